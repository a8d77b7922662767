"""Arguments that private kernels share, and the checks of them that need no table."""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import numpy as np

from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.mechanisms import NEIGHBORING_RELATIONS


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
        number is private (``"add_or_remove_one"``, `max_rows_per_unit`), all arrays.
    :param unit: whose each row is, if one person has many: integers, shape (n,), or the name of the model's argument
        that says so. What a unit's rows do together is clipped. Which rows are whose is public. See
        `numpyro_dp.model.units`.
    :param max_rows_per_unit: makes it private which rows are whose, and how many each unit has: this cap is public, and
        how many units there are. Of each unit the first so many rows count. Needs the *name* of an argument as `unit`.
    :param owners: for rows that belong to several data owners: each row's owner as integers from 0 (public), or an
        exchange such as `numpyro_dp.owners.JaxOwners` in the process of each owner. See `numpyro_dp.owners`.
    :param budget: `numpyro_dp.PrivacyBudget` of the table, which the whole plan is charged to before the first release.
    :param noise_seed: a secret integer that makes the noise reproducible, for the same model, settings and versions of
        the libraries. Default: fresh entropy.
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
        raise TypeError(
            f"this kernel has no argument {', '.join(unknown)}{f'; did you mean {near[0]}?' if near else ''}. Beside "
            f"its own there are {', '.join(known)}"
        )
    return options


def require_budget_type(budget: Any) -> None:
    if not isinstance(budget, PrivacyBudget):
        raise TypeError(f"budget must be a numpyro_dp.PrivacyBudget, got {budget!r}; the number is `eps`")


def check_positive_int(name: str, value: Any, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_power(power: float, n0: float | None, neighboring_relation: str) -> None:
    if not 0 < power < math.inf:
        raise ValueError(f"power must be positive, got {power}")
    if n0 is not None:
        if power != 1:
            raise ValueError("give either power or n0, not both: power = n0 / n")
        if not 0 < n0 < math.inf:
            raise ValueError(f"n0 must be positive, got {n0}")
        if neighboring_relation == "add_or_remove_one":
            raise ValueError("n0 needs n, which is private under 'add_or_remove_one': give power")


def check_unit(
    unit: Any, max_rows_per_unit: int | None, n0: float | None, owners: Any, neighboring_relation: str
) -> None:
    check_positive_int("max_rows_per_unit", max_rows_per_unit, optional=True)
    if max_rows_per_unit is not None and not isinstance(unit, str):
        raise ValueError(
            "max_rows_per_unit makes it private which rows are whose, so the kernel must not keep that: give `unit` as "
            "the name of the model's argument that says it"
        )
    if unit is None:
        return
    if neighboring_relation == "add_or_remove_one" and max_rows_per_unit is None:
        raise ValueError(
            "unit tells n, which is private under 'add_or_remove_one': give max_rows_per_unit, and it does not"
        )
    if n0 is not None:
        raise ValueError("n0 counts rows, and with a unit those of one person count together: give power")
    if owners is not None:
        raise ValueError("unit and owners cannot be combined")
    if np.ma.isMaskedArray(unit):
        raise ValueError("unit must say of each row whose it is: masked values are nobody's")


def check_budget(eps, delta, noise_multipliers: Mapping[str, float | None], neighboring_relation: str) -> None:
    given = [value for value in noise_multipliers.values() if value is not None]
    names = ", ".join(f"noise_multiplier_{kind}" for kind in noise_multipliers)
    if eps is None and len(given) < len(noise_multipliers):
        raise ValueError(f"give the budget `eps`, or all of {names} (noise standard deviation over L2 sensitivity)")
    if eps is not None and given:
        raise ValueError(f"give either `eps` or {names}, not both: each follows from the other")
    if eps is not None and not eps > 0:
        raise ValueError(f"eps must be positive (inf runs without noise, and is not private), got {eps}")
    for value in given:
        if not 0 < value < math.inf:
            raise ValueError(f"noise multipliers must be positive, got {value}")
    if neighboring_relation not in NEIGHBORING_RELATIONS:
        raise ValueError(
            f"neighboring_relation must be one of {', '.join(map(repr, NEIGHBORING_RELATIONS))}, "
            f"got {neighboring_relation!r}"
        )
    if delta is not None and not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta}")
    if delta is None and neighboring_relation == "add_or_remove_one":
        raise ValueError(
            "under 'add_or_remove_one' the number of rows is private, so there is no default delta: give one that is "
            "far below 1 over the order of magnitude of the table's size"
        )
