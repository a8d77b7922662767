"""From a plain NumPyro model to a `SeparableModel`, or to a refusal.

Whether the sum over rows *is* the posterior the user meant is checked beforehand, on abstract traces and on synthetic
rows of the same shapes. **No private value is read** by any of it, only by `row_log_density`; every refusal depends on
shapes, dtypes and the model's code only. All problems are reported in one `UnsupportedModelError`.

The stages of the check have modules of their own: `numpyro_dp.model.arguments` (names, and what is refused on sight),
`numpyro_dp.model.outside` (what the model reads besides its arguments), `numpyro_dp.model.tracing` (the model run on
shapes alone), `numpyro_dp.model.coupling` (what a row is, and the reasons to refuse that shapes show) and
`numpyro_dp.model.synthetic` (the comparison on synthetic rows), in the order of `separate`. Where the number of rows is
private, `numpyro_dp.model.standins` keeps it from all of them.
"""

import dataclasses
from collections.abc import Callable, Sequence

from numpyro_dp.model.arguments import (
    argument_problems,
    list_problems,
    mark_chosen,
    name_leaves,
    named_values,
    quote,
    raise_if,
)
from numpyro_dp.model.coupling import (
    classify_arguments,
    closed_over_problems,
    derivative_problems,
    discrete_problems,
    enumeration_problems,
    find_row_plates,
    find_rows,
    one_row_problems,
    one_row_trace,
    private_leaves,
    site_problems,
    sites_to_drop,
)
from numpyro_dp.model.marginal import find_latents
from numpyro_dp.model.outside import Outside, iterator_problems, listed, read_outside
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.standins import stand_ins, without_length
from numpyro_dp.model.synthetic import check_on_synthetic_rows
from numpyro_dp.model.tracing import (
    Site,
    Sites,
    abstract_trace,
    explained_errors,
    first_available_dim,
)


def separate(
    model: Callable,
    args: tuple = (),
    kwargs: dict | None = None,
    row_plate: str | None = None,
    private_args: Sequence[str] | None = None,
    public_size: bool = True,
    unit: str | None = None,
) -> SeparableModel:
    """Split `model` into a data-free prior and one factor per row, or refuse it.

    :param model: a NumPyro model.
    :param args, kwargs: its arguments. Only shapes and dtypes of arrays are used; other leaves are public.
    :param row_plate: the plate whose members are the protected rows. Default: the plate of the observed sites whose
        size is the leading axis of the observed arrays; without plates, that leading axis itself.
    :param private_args: names of the arguments that hold rows. Default: every array whose leading axis is the rows'; if
        their number is private, every array.
    :param public_size: whether everybody may know how many rows there are. If not, all tables that differ in nothing
        else have the same result, but for `num_rows`, or are refused with the same message; see
        `numpyro_dp.model.standins`.
    :param unit: name of the argument that says whose each row is. Latents that a row picks by it are its unit's own.
    :raises UnsupportedModelError: with every reason why the model has no such form, and the way out of each.
    """
    kwargs = {} if kwargs is None else kwargs
    outside = read_outside(model, named_values(model, args, kwargs))
    raise_if(iterator_problems(outside))
    if public_size:
        return _separate(model, args, kwargs, row_plate, private_args, outside, unit)
    table = stand_ins(model, args, kwargs, private_args, outside)
    with without_length(model, table):
        separated = _separate(model, table.args, table.kwargs, row_plate, table.private_args, outside, unit)
    return dataclasses.replace(separated, num_rows=table.num_rows)


def _separate(
    model: Callable,
    args: tuple,
    kwargs: dict,
    row_plate: str | None,
    private_args: Sequence[str] | None,
    outside: Sequence[Outside],
    unit: str | None,
) -> SeparableModel:
    named = name_leaves(model, args, kwargs)
    raise_if(argument_problems(named, args, kwargs))
    if not any(a.shape for a in named):
        raise_if(list_problems(model, args, kwargs, None))

    lengths = sorted({a.shape[0] for a in named if a.shape})
    with explained_errors(named, [problem for n in lengths for problem in list_problems(model, args, kwargs, n)]):
        full = abstract_trace(model, args, kwargs)
    sites, named = full.sites, mark_chosen(named, private_args)
    num_rows, plate = find_rows(full, named, row_plate)
    raise_if(list_problems(model, args, kwargs, num_rows))
    arguments, problems = classify_arguments(named, num_rows, plate, sites)
    raise_if(problems)

    private, row_plates = private_leaves(arguments), find_row_plates(sites, num_rows, plate)
    latents = frozenset(s.name for s in sites.values() if s.kind == "discrete" and s.plates & row_plates)
    own = frozenset(s.name for s in sites.values() if s.kind == "latent" and s.plates & row_plates)
    observed = [s for s in sites.values() if s.kind == "observed"]
    row_sites = latents.union(
        s.name
        for s in observed
        if s.depends_on & private or s.plates & row_plates or s.discrete_latents & latents or s.continuous_latents & own
    )
    separated = SeparableModel(
        model=model,
        num_rows=num_rows,
        row_plate=plate,
        row_plates=row_plates,
        arguments=arguments,
        row_sites=row_sites,
        row_latents=latents,
        outcome_leaves=_outcome_leaves([s for s in observed if s.name in row_sites], private),
        first_available_dim=first_available_dim(sites),
        dropped_sites={},
        closed_over=listed(outside),
        prototype=full.prototype,
        latents=None,
    )
    separated, problems = _with_latents(separated, sites, unit, args, kwargs)
    raise_if(problems)
    one_row, constants, failure = one_row_trace(separated, args, kwargs)
    # What is as long as there are rows beside a single row, too, does not come from the arguments.
    constants = full.constants if failure else full.constants & constants
    problems = site_problems(separated, sites, private_args) + discrete_problems(separated, full)
    raise_if([*problems, *closed_over_problems(separated, sites, constants, outside)])
    raise_if(failure)
    raise_if(one_row_problems(separated, sites, one_row))
    raise_if(enumeration_problems(separated, args, kwargs))
    raise_if(derivative_problems(separated, args, kwargs))

    dropped = sites_to_drop(separated, sites, one_row)
    separated = dataclasses.replace(separated, dropped_sites=dropped)
    problems, depend_on_size = check_on_synthetic_rows(separated, args, kwargs, sites)
    raise_if(problems)
    return dataclasses.replace(separated, dropped_sites=dropped | depend_on_size)


def _with_latents(
    separated: SeparableModel, sites: Sites, unit: str | None, args: tuple, kwargs: dict
) -> tuple[SeparableModel, list[str]]:
    """The model with the continuous latents of its rows or units apart from its parameters."""
    latents, problems = find_latents(separated, sites, unit, args, kwargs)
    if latents is None:
        return separated, problems
    prototype = {name: x for name, x in separated.prototype.items() if name not in latents.names}
    if not sum(x.size for x in prototype.values()):
        problems.append(
            f"the model has no latent sites beside {quote(sorted(latents.names))}, which are integrated out: there is "
            "nothing to infer"
        )
    return dataclasses.replace(separated, prototype=prototype, latents=latents), problems


def _outcome_leaves(outcomes: Sequence[Site], private: frozenset[int]) -> frozenset[int] | None:
    # A value that is computed from parameters, `obs=y - X @ b`, is no outcome: with one that is drawn in its place, the
    # row would tell nothing of them.
    if any(site.value_has_latents or not site.value_depends_on & private for site in outcomes):
        return None
    return frozenset(
        k for k, leaf in enumerate(sorted(private)) if any(leaf in site.value_depends_on for site in outcomes)
    )
