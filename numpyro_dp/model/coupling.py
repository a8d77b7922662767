"""What a row is, and the reasons why a model is no product over rows that shapes and dependencies show.

These stages of `numpyro_dp.model.separate.separate` look at abstract traces (see `numpyro_dp.model.tracing`) at the
model's real shapes and at a single row. What only numbers show is found by `numpyro_dp.model.synthetic`. Shapes can be
ambiguous; then the model is refused and the user is asked, because a wrong guess would leave rows without protection.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from numpyro.handlers import trace

from numpyro_dp.model.arguments import (
    Argument,
    UnsupportedModelError,
    abstract,
    describe_error,
    overlooked,
    quote,
    raise_if,
    take_arrays,
)
from numpyro_dp.model.outside import Outside
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.tracing import (
    FullTrace,
    Shape,
    Sites,
    array_constants,
    branches_on_values,
    describe_site,
    funsor_is_installed,
    initialized,
    keep_sites,
    needs_values,
    print_problems,
)
from numpyro_dp.privacy.isolation import describe_hazard, hazards

# -- Which rows --------------------------------------------------------------------------------------------------------


def find_rows(full: FullTrace, named: Sequence[Argument], row_plate: str | None) -> tuple[int, str | None]:
    """The number of rows and their plate; refuses what leaves the choice open."""
    raise_if(
        f"plate '{name}' is subsampled ({subsample} of {size}): remove `subsample_size`; which rows a step looks at is "
        "the kernel's decision, because the privacy accounting depends on it"
        for name, (size, subsample) in full.subsampled.items()
    )
    if row_plate is not None:
        sizes = {name: size for s in full.sites.values() for name, size in s.plate_sizes.items()}
        if row_plate not in sizes:
            known = quote(sizes) or "none"
            raise UnsupportedModelError(
                [f"row_plate='{row_plate}' is not a plate of the model; its plates are: {known}"]
            )
        return sizes[row_plate], row_plate

    observed = [s for s in full.sites.values() if s.kind == "observed"]
    chosen = any(a.private for a in named)
    length = {k: a.length for k, a in enumerate(named) if a.length is not None and (a.private or not chosen)}
    # The rows of the observed arrays: of those that values come from, or (factors) of what the density reads.
    lengths = {length[k] for s in observed for k in s.value_depends_on & length.keys()}
    lengths = lengths or {length[k] for s in observed for k in s.depends_on & length.keys()}
    if not lengths:
        raise UnsupportedModelError(
            [
                "no observed site is computed from an array argument: pass the outcomes as an argument of the model "
                "and give them to `obs=`"
            ]
        )
    if len(lengths) > 1:
        raise UnsupportedModelError(
            [
                f"the observed arrays have different leading axes ({', '.join(map(str, sorted(lengths)))}), so it is "
                "not clear what a row is: name the plate of the protected rows with `row_plate=`"
            ]
        )
    (num_rows,) = lengths
    leading = set(length.values())
    for s in observed:
        same = [name for name, size in s.plate_sizes.items() if size == num_rows]
        rivals = [name for name, size in s.plate_sizes.items() if size > num_rows or size in leading]
        if same and set(rivals) - {same[0]}:
            described = ", ".join(f"'{name}' ({size})" for name, size in s.plate_sizes.items())
            raise UnsupportedModelError(
                [
                    f"site '{s.name}' is observed in several plates, {described}, and it is not clear whose "
                    "members are to be protected: name that plate with `row_plate=` (its members must be on the "
                    "leading axis of the private arguments)"
                ]
            )
    names = [name for s in observed for name, size in s.plate_sizes.items() if size == num_rows]
    return num_rows, (names[0] if names else None)


def find_row_plates(sites: Sites, num_rows: int, plate: str | None) -> frozenset[str]:
    """All plates over the rows: a model may open one for each observed site."""
    if plate is None:
        return frozenset()
    names = {plate}
    for s in sites.values():
        if s.kind == "observed" and plate not in s.plates:
            names |= {name for name, size in s.plate_sizes.items() if size == num_rows}
    return frozenset(names)


def classify_arguments(
    named: Sequence[Argument], num_rows: int, plate: str | None, sites: Sites
) -> tuple[tuple[Argument, ...], list[str]]:
    """Mark the private arguments unless the user has, and say where shapes leave it open what holds rows."""
    if any(a.private for a in named):
        return tuple(named), [
            f"private argument '{a.name}' has shape {a.shape}, but its leading axis must hold the {num_rows} rows: "
            "transpose it, or name another `row_plate=`"
            for a in named
            if a.private and a.length != num_rows
        ]
    arguments = tuple(replace(a, private=a.length == num_rows) for a in named)
    problems = list(_axis_problems(arguments, num_rows, sites))
    if not problems and not any(a.private for a in arguments):
        shapes = ", ".join(str(a) for a in named if a.shape) or "none"
        whose = f"the {num_rows} members of plate '{plate}'" if plate else f"{num_rows} rows"
        problems = [
            f"no argument is private: none has {whose} on its leading axis (array arguments: {shapes}). Pass the "
            "table as array arguments of the model, rows first"
        ]
    return arguments, problems


def _axis_problems(arguments: Sequence[Argument], num_rows: int, sites: Sites) -> Iterator[str]:
    """Arguments that would pass as public although an axis other than the leading one may be the rows'."""
    observed = [s for s in sites.values() if s.kind == "observed" and not s.factor]
    outcomes = [arguments[k] for k in sorted({k for s in observed for k in s.value_depends_on})]
    for a in arguments:
        if a.private or not a.shape:
            continue
        if num_rows in a.shape:
            yield (
                f"argument '{a.name}' has shape {a.shape}: axis {a.shape.index(num_rows)} is as long as there are "
                f"rows ({num_rows}), but rows must be on the leading axis. Pass it transposed; if it holds no rows, "
                "say which arguments do with `private_args=`"
            )
            continue
        for y in outcomes:
            if y.private and a.shape[0] in y.row_shape and a.shape[0] > 1:
                yield (
                    f"the leading axis of argument '{a.name}' {a.shape} is as long as axis "
                    f"{y.row_shape.index(a.shape[0]) + 1} of the outcomes '{y.name}' {y.shape}, so it is not clear "
                    "which of them holds the rows. Rows must be on the leading axis: pass the outcomes transposed, or, "
                    f"if '{a.name}' holds no rows, say which arguments do with `private_args=`"
                )


# -- Sites that are no factor of a row ---------------------------------------------------------------------------------


def private_leaves(arguments: Sequence[Argument]) -> frozenset[int]:
    return frozenset(k for k, a in enumerate(arguments) if a.private)


def site_problems(separated: SeparableModel, sites: Sites, private_args: Sequence[str] | None) -> list[str]:
    """Sites that would publish a row, or read rows where no row is protected.

    :param private_args: what the user said about them; None, if it was left to `classify_arguments`.
    """
    private = private_leaves(separated.arguments)
    latents = separated.latents
    names = frozenset() if latents is None else latents.names
    latent = [s for s in sites.values() if s.kind == "latent" and s.name not in names]
    # With their discrete latents given, rows are made of observed sites and of these.
    members = [s for s in sites.values() if s.kind == "observed" or s.name in separated.row_latents]

    def used(indices: frozenset[int]) -> str:
        return quote(separated.arguments[k].name for k in sorted(indices))

    problems = [
        f"the prior of '{s.name}' uses {quote(sorted(s.continuous_latents & names))}, of which each row or unit has "
        "its own value: that is no prior times one factor per row. Put it into the same plate"
        for s in latent
        if s.continuous_latents & names
    ]
    problems += [
        f"the prior of '{s.name}' uses private argument {used(s.depends_on & private)}: priors, their supports and "
        "group sizes must come from public knowledge; pass such values as separate public arguments, and if "
        f"{used(s.depends_on & private)} holds no rows, list the arguments that do with `private_args=`"
        for s in sites.values()
        if s.kind == "latent" and s.depends_on & private and (s in latent or (latents is not None and latents.plates))
    ]
    n = separated.num_rows
    for s in members:
        if s.name not in separated.row_sites:
            if s.continuous_latents & names:
                problems.append(
                    f"site '{s.name}' uses {quote(sorted(s.continuous_latents & names))}, of which each unit has its "
                    "own, outside of the rows: what units have in common is no matter of one of them. Leave it out, or "
                    "give each row its part"
                )
            public = s.value_depends_on - private
            if public and not s.factor and private_args is None:
                problems.append(
                    f"site '{s.name}' is observed with {used(public)}, whose leading axis is not the {n} rows': it "
                    "would be treated as public. Put it into the same table, or list the private arguments with "
                    "`private_args=` if it is public indeed"
                )
            continue
        if s.factor and not s.plates & separated.row_plates and s.log_prob_shape[:1] != (n,):
            summed = sorted(s.discrete_latents & separated.row_latents)
            summed += sorted(s.continuous_latents & names)
            source = f"private argument {used(s.depends_on & private)}" if s.depends_on & private else quote(summed)
            problems.append(
                f"factor '{s.name}' is computed from {source} over all rows at once: put one factor per row into the "
                "row plate, "
                f"`with numpyro.plate('rows', n): numpyro.factor('{s.name}', per_row_values)`"
            )
        if s.log_prob_shape.count(n) > 1 and n > 1 and len(s.plates) < 2:
            problems.append(
                f"the log density of '{s.name}' has shape {s.log_prob_shape}: arrays of shapes (n, 1) and (n,) were "
                "broadcast against each other; give both the same shape"
            )
    if not separated.row_sites:
        problems.append("no observed site depends on a private argument: there is nothing to protect")
    return problems


def discrete_problems(separated: SeparableModel, full: FullTrace) -> list[str]:
    """Discrete latents that cannot be summed out row by row."""
    latents = separated.row_latents
    discrete = [s.name for s in full.sites.values() if s.kind == "discrete"]
    problems = []
    if outside := [name for name in discrete if name not in latents]:
        others = f" (like {quote(outside[1:])})" if outside[1:] else ""
        problems.append(
            f"latent site '{outside[0]}' is discrete and outside of the row plate{others}: rows that share it are no "
            "product once it is summed over. If only priors use it, sum it out by hand (a mixture as the prior); if "
            "rows do, give each row its own value, inside the row plate, make it a continuous parameter (such as the "
            "weights of a mixture), or pass it as an argument"
        )
    problems += [
        f"the prior of '{s.name}' uses {quote(sorted(s.discrete_latents & latents))}, of which each row has its own "
        "value: that is no prior times one factor per row"
        for s in full.sites.values()
        if s.kind == "latent" and s.discrete_latents & latents
    ]
    if discrete and full.control_flow:
        problems.append(
            f"latent site '{discrete[0]}' is discrete, and the model runs `scan` or `cond`: a chain over the rows "
            "mixes them, and one within each row cannot be enumerated. Sum the latter out by hand (the forward "
            "recursion, as one `numpyro.factor` per row), or write a short loop in Python instead of `scan`"
        )
    if latents and not funsor_is_installed():
        problems.append(
            f"the discrete latents of each row, {quote(sorted(latents))}, can be summed out for you, but that needs "
            "funsor: `pip install 'numpyro_dp[enumeration]'`; or sum them out by hand (for a mixture, "
            "`MixtureSameFamily`)"
        )
    return problems


def closed_over_problems(
    separated: SeparableModel, sites: Sites, constants: set[Shape], outside: Sequence[Outside]
) -> list[str]:
    """Data that reach the model by another way than its arguments.

    :param constants: shapes of the arrays that come from no argument and that JAX computes with.
    :param outside: what Python may compute with.
    """
    n = separated.num_rows
    as_long = {item.name: item for item in outside if n in item.shape and n > 1}
    unnamed = {shape for shape in constants if n in shape and n > 1} - {item.shape for item in as_long.values()}
    found = [item.describe() for name, item in sorted(as_long.items()) if not name.startswith(tuple(_parts(as_long)))]
    found += [f"an array of shape {shape}," for shape in sorted(unnamed)]
    problems = [
        f"the model closes over {what} which has an axis as long as there are rows ({n}): pass it as an argument, so "
        "that it can be split into rows and protected (if it holds no rows, list the arguments that do with "
        "`private_args=`)"
        for what in found
    ]
    problems += [
        f"site '{s.name}' is observed with an array that the model closes over: pass it as an argument (to fix a "
        "parameter, use its value in the place of the site)"
        for s in sites.values()
        if s.kind == "observed" and s.closed_over and s.name not in separated.row_sites and n not in s.shape
    ]
    return problems


def _parts(names: Iterable[str]) -> Iterator[str]:
    """How the names of what is within these begin."""
    return (name + end for name in names for end in ("[", "."))


# -- The model at a single row -----------------------------------------------------------------------------------------


def one_row_trace(separated: SeparableModel, args: tuple, kwargs: dict) -> tuple[Sites, set[Shape], list[str]]:
    """The sites of the model at a single row, the shapes of the constants that it closes over, and why it has none."""
    arrays, merge = take_arrays(*separated.without_private(args, kwargs))
    sites: Sites = {}

    def run(arrays: list) -> dict[str, jax.Array]:
        args, kwargs = merge(arrays)
        model = initialized(keep_sites(separated.model, lambda name: True, separated.plates_of_one, 1))
        log_probs = {}
        for name, msg in trace(model).get_trace(*args, **kwargs).items():
            if msg["type"] in ("sample", "deterministic"):
                sites[name] = describe_site(name, msg)
            if msg["type"] == "sample":
                log_probs[name] = msg["fn"].log_prob(msg["value"])
        return log_probs

    private = [a.private for a in separated.arguments if a.shape is not None]
    try:
        closed = jax.make_jaxpr(run)(abstract(arrays))
        problems = print_problems(closed)
        problems += [describe_hazard(name) for name in sorted(hazards(closed.jaxpr, private))]
        return sites, set(array_constants(closed)), problems
    except Exception as error:  # whatever the model raises at one row; it has seen shapes only
        if needs_values(error):
            return sites, set(), [branches_on_values(error)]
        problem = (
            "the model cannot be evaluated on a single row, so it is not a product over rows as it stands: "
            f"{describe_error(error)}. Take sizes from the arguments' shapes, do not squeeze axes away or decompose "
            "the table as a matrix, and pass every array with rows as an argument, rows first"
        )
        return sites, set(), [problem + overlooked(separated.arguments, separated.num_rows)]


def enumeration_problems(separated: SeparableModel, args: tuple, kwargs: dict) -> list[str]:
    """Why the discrete latents of a row cannot be summed out at a single row; nothing is evaluated."""
    if not separated.row_latents:
        return []
    arrays, merge = take_arrays(*separated.without_private(args, kwargs))

    def run(arrays: list, z: dict) -> jax.Array:
        args, kwargs = merge(arrays)
        return separated.row_log_density(args, kwargs)(separated.ravel(z), separated.rows(args, kwargs))

    try:
        jax.eval_shape(run, abstract(arrays), separated.prototype)
    except Exception as error:  # whatever the model or funsor raise; they have seen shapes only
        return [
            f"the discrete latents {quote(sorted(separated.row_latents))} cannot be enumerated: "
            f"{describe_error(error)}. Enumeration puts all values of a latent on a new axis on the left: let "
            "operations broadcast (`jnp.sum(x * b, -1)` instead of `einsum`, `x[..., None]` instead of `x[:, None]`), "
            "put further axes of a site into `to_event` or a plate, and do not index, reshape or sum over the axes of "
            "a latent; or sum them out by hand"
        ]
    return []


def derivative_problems(separated: SeparableModel, args: tuple, kwargs: dict) -> list[str]:
    """Derivative rules by which rows could act on one another; nothing is evaluated.

    A density without a gradient has none of them: kernels that need it refuse it themselves.
    """
    arrays, merge = take_arrays(*separated.without_private(args, kwargs))

    def gradient(arrays: list, z: jax.Array) -> jax.Array:
        args, kwargs = merge(arrays)
        rows = separated.rows(args, kwargs)
        return jax.grad(lambda z: separated.row_log_density(args, kwargs)(z, rows))(z)

    try:
        z = jax.ShapeDtypeStruct((separated.num_params,), jnp.result_type(float))
        closed = jax.make_jaxpr(gradient)(abstract(arrays), z)
    except Exception:
        return []
    private = [a.private for a in separated.arguments if a.shape is not None]
    return [describe_hazard(name) for name in sorted(hazards(closed.jaxpr, [*private, False]))]


def one_row_problems(separated: SeparableModel, sites: Sites, one_row: Sites) -> list[str]:
    """Sites that are others with one row than with all of them."""
    missing = [name for name, s in sites.items() if s.kind != "deterministic" and name not in one_row]
    problems = []
    latents = frozenset() if separated.latents is None else separated.latents.names
    if missing:
        problems.append(
            f"a site exists only for some numbers of rows: {quote(missing[:3])}. Give all rows to one site, in a plate"
        )
    for s in sites.values():
        is_parameter = s.kind == "latent" and s.name not in latents
        if is_parameter and s.name in one_row and one_row[s.name].shape != s.shape:
            problems.append(
                f"latent site '{s.name}' has shape {s.shape} with all rows and {one_row[s.name].shape} with one: one "
                "value per protected row would publish that row. In the plate of the rows it is integrated out; or "
                "give it a plate over groups whose number is an argument"
            )
    return problems


def sites_to_drop(separated: SeparableModel, sites: Sites, one_row: Sites) -> dict[str, str]:
    """Deterministic sites that must not be released, with the reason."""
    private = private_leaves(separated.arguments)
    dropped = {}
    for s in sites.values():
        if s.kind != "deterministic":
            continue
        if s.depends_on & private:
            dropped[s.name] = "computed from private rows"
        elif s.discrete_latents:
            dropped[s.name] = "computed from latents that are summed out"
        elif separated.latents is not None and s.continuous_latents & separated.latents.names:
            dropped[s.name] = "computed from latents that are integrated out"
        elif s.name not in one_row or one_row[s.name].shape != s.shape:
            dropped[s.name] = "has one value per row"
    return dropped
