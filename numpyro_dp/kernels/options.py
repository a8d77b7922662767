"""Arguments that private kernels share."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from numpyro_dp.privacy.budget import PrivacyBudget


class KernelOptions(TypedDict, total=False):
    """Arguments that every private kernel takes, by keyword.

    :param power: exponent of the likelihood (tempering): the target is ``p(z) * prod_i p(row_i | z)**power``. Clip
        bounds refer to the rows before tempering.
    :param n0: instead of `power`: the rows count as if there were `n0` of them (a c-posterior, Miller and Dunson 2019),
        ``power = n0 / n``.
    :param neighboring_relation: which tables are neighbours: a row has other values (``"replace_one"``; n is public), a
        row is there or not (``"add_or_remove_one"``; n is private), or a row counts as nothing (``"zero_out"``; n is
        public). The last is weaker than the first: what a person's row says is hidden behind their having said nothing,
        not behind whatever they might have said; two answers differ by up to ``2 eps``, with ``(1 + e^eps) delta``.
    :param num_iterations: iterations of one chain, warmup included, that the budget is for. `numpyro_dp.MCMC` knows;
        ``numpyro.infer.MCMC`` does not. Give more than a run needs to keep budget for later runs.
    :param num_chains: chains that the budget is for; as `num_iterations`.
    :param inverse_mass_matrix: a number, a vector (d,), a matrix (d, d) with `dense_mass`, or a dict by site. Public.
    :param init_strategy: NumPyro's; default ``init_to_median`` of the prior.
    :param row_plate: the plate whose members are protected. Default: that of the observed sites.
    :param private_args: names of the arguments that hold rows. Default: arrays as long as the row plate; where their
        number is private (``"add_or_remove_one"``, `max_rows_per_unit`), all arrays. Without it, an array with one
        entry for each of 50 units or more is refused: it would be public.
    :param unit: whose each row is, if one person has many: integers, shape (n,), or the name of the model's argument
        that says so. What a unit's rows do together is clipped. Which rows are whose is public. See
        `numpyro_dp.model.units`.
    :param max_rows_per_unit: makes it private which rows are whose, and how many each unit has: this cap is public, and
        how many units there are. Of each unit the first so many rows count. Needs the *name* of an argument as `unit`.
        Costs precision, since nothing can be centred by public places: use `unit` alone where it may be public.
    :param owners: for rows that belong to several data owners: each row's owner as integers from 0 (public), or an
        exchange such as `numpyro_dp.owners.JaxOwners` in the process of each owner. See `numpyro_dp.owners`.
    :param budget: `numpyro_dp.PrivacyBudget` of the table, which the whole plan is charged to before the first release.
    :param noise_seed: a secret integer that makes the noise reproducible, for the same model, settings, kind of device
        and versions of this package and the libraries. Default: fresh entropy.
    """

    power: float
    n0: float | None
    neighboring_relation: str
    num_iterations: int | None
    num_chains: int
    inverse_mass_matrix: Any
    init_strategy: Callable | None
    row_plate: str | None
    private_args: Sequence[str] | None
    unit: Any
    max_rows_per_unit: int | None
    owners: Any
    budget: PrivacyBudget | None
    noise_seed: int | None


class MetropolisOptions(KernelOptions, total=False):
    """Further arguments of kernels that accept or reject proposals.

    :param dense_mass: whether `inverse_mass_matrix` is a matrix.
    :param adapt_step_size: towards `target_accept_prob`, in warmup, from released decisions; costs nothing.
    :param adapt_mass_matrix: from the released draws of the warmup; costs nothing.
    :param target_accept_prob: what the step size is adapted to.
    """

    dense_mass: bool
    adapt_step_size: bool
    adapt_mass_matrix: bool
    target_accept_prob: float


OF_PLAIN_SAMPLERS = (
    "owners",
    "inverse_mass_matrix",
    "dense_mass",
    "adapt_mass_matrix",
    "target_accept_prob",
    "adapt_step_size",
)
"""Options for samplers without preparation."""
_OF_NUTS = {"max_tree_depth", "find_heuristic_step_size", "forward_mode_differentiation", "regularize_mass_matrix"}

Options = TypeVar("Options", bound=Mapping[str, Any])


def only(kind: type, options: Options) -> Options:
    """The options, all of them of a kind.

    `DPKernel` has further arguments for its subclasses to set. From a user they could, for instance, have releases on
    all rows accounted for as releases on batches.

    :raises TypeError: if one of them is another argument.
    """
    known = ["eps", "delta", *kind.__annotations__]
    unknown = sorted(set(options) - set(kind.__annotations__))
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1) or [name for name in known if name in unknown[0]][:1]
        hint = f"Did you mean {near[0]}? " if near else ""
        if _OF_NUTS.intersection(unknown):
            hint = "NumPyro's NUTS has it. DPHMC runs NUTS on what was released, with its own settings: leave it out. "
        plain = [name for name in known if name in OF_PLAIN_SAMPLERS]
        others = f"; and, for samplers without preparation, {', '.join(plain)}" if plain else ""
        raise TypeError(
            f"this kernel has no argument {', '.join(unknown)}. {hint}Beside its own there are "
            f"{', '.join(name for name in known if name not in plain)}{others}"
        )
    return options


def require_budget_type(budget: Any) -> None:
    if not isinstance(budget, PrivacyBudget):
        raise TypeError(f"budget must be a numpyro_dp.PrivacyBudget, got {budget!r}; the number is `eps`")
