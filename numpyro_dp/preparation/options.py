"""What a user may say about the preparation, and what is refused or warned of by public numbers only."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpyro_dp.chain.worth import (
    MAX_CURVATURE_NOISE,
    ROUGH_ERROR,
    TYPICAL_CLIP,
    curvature_noise,
    released_error,
    tight_slope,
    walk_draws,
)
from numpyro_dp.privacy.accounting import gaussian_eps, gaussian_rho
from numpyro_dp.privacy.ledger import PrivacyBudgetError
from numpyro_dp.statements import round_up

MODES = ("surrogate", "walk")
MIN_WALK_DRAWS = 5.0
"""Independent draws that a chain that asks the rows must be worth, as foreseen."""
_NO_PRIVACY = 20.0
"""A larger eps is not recommended."""


@dataclass(frozen=True)
class Preparation:
    """What is known without asking the table, and what shall follow.

    :param start: a public guess of the posterior's place: unconstrained values by site.
    :param scales: public guesses of its width, in unconstrained space: a number for each site, or an array of its
        shape. With both given, a public start replaces the prior's place and width in the search, not in the posterior.
        A site with an improper prior and no bounds needs one.
    :param mode: "surrogate" releases the likelihood once, and draws cost nothing; "walk" leaves most of the budget to a
        random walk, each of whose steps asks the rows.
    :param force: go on where the size of the table and the budget promise no useful posterior.
    """

    start: Mapping[str, Any] | None = None
    scales: Mapping[str, Any] | None = None
    mode: str | None = None
    force: bool = False

    def __post_init__(self):
        if self.mode not in (None, *MODES):
            raise ValueError(f"mode must be None or one of {', '.join(map(repr, MODES))}, got {self.mode!r}")


def what_would_do(eps: float, delta: float, times_rho: float, num_rows: float, units: str) -> str:
    """The eps at which rho is so many times what it is, or at the same eps the number of rows; in words."""
    rows = f"{float(round_up(num_rows, 2)):,.0f} {units} at this eps would do"
    enough = gaussian_eps(delta, times_rho * gaussian_rho(eps, delta)) if math.isfinite(eps) else math.inf
    return f"about eps={round_up(enough, 2)} or {rows}" if enough <= _NO_PRIVACY else f"about {rows}"


def require_hope(
    size: int,
    num_rows: float,
    rho: float,
    options: Preparation,
    eps: float,
    delta: float,
    units: str = "rows",
    advice: str = "",
) -> None:
    """Refuse a run from which no useful posterior can come, by public numbers only.

    :param size: m, coordinates in which the parameters meet the data.
    :param num_rows: n over the power of the likelihood.
    :param rho: the whole budget.
    :param eps, delta: of the run.
    :param units: what is counted.
    :param advice: on this model.
    :raises PrivacyBudgetError: if the curvature's noise would drown it; for a walk, if all its steps together would be
        worth less than `MIN_WALK_DRAWS` independent draws.
    """
    curvature, shift = curvature_noise(size, num_rows, rho), released_error(size, num_rows, rho)
    if curvature > MAX_CURVATURE_NOISE:
        # The one falls as the root of rho, and as n; the other as rho, and as n. Both must do.
        by_rho = max((curvature / MAX_CURVATURE_NOISE) ** 2, (shift / ROUGH_ERROR) ** 2)
        by_rows = max(curvature / MAX_CURVATURE_NOISE, (shift / ROUGH_ERROR) ** 2)
        raise PrivacyBudgetError(
            f"eps={eps:g} with {num_rows:.6g} {units} cannot give a posterior of the {size} numbers in which this "
            f"model's parameters meet the data: noise would be about {curvature:.2g} of the curvature, and would shift "
            f"the posterior by about {shift:.2g} standard deviations. Nothing was released; "
            f"{what_would_do(eps, delta, by_rho, by_rows * num_rows, units)}. {advice}Or use fewer parameters, or go "
            "on all the same with `prepare=Preparation(force=True)`"
        )
    draws = walk_draws(TYPICAL_CLIP * tight_slope(num_rows, size), size, rho / 2)
    if options.mode == "walk" and draws < MIN_WALK_DRAWS:
        raise PrivacyBudgetError(
            f"eps={eps:g} with {num_rows:.6g} {units} pays for a random walk worth about {draws:.2g} independent draws "
            f"of the {size} numbers in which this model's parameters meet the data. Nothing was released. DPHMC can do "
            "with less: it releases the likelihood once. Or raise eps, temper the likelihood (n0, power), or go on all "
            "the same with `prepare=Preparation(force=True)`"
        )


def require_draws(draws: float, num_rows: float, eps: float, units: str) -> None:
    """Refuse a kernel's own chain that would hardly move, by public numbers only.

    :param draws: independent ones that it is worth, as foreseen.
    :raises PrivacyBudgetError: if these are fewer than `MIN_WALK_DRAWS`.
    """
    if draws < MIN_WALK_DRAWS:
        raise PrivacyBudgetError(
            f"eps={eps:g} with {num_rows:.6g} {units} pays for a chain worth about {draws:.2g} independent draws. "
            "Nothing was released. DPHMC can do with less: it releases the likelihood once. Or raise eps, give more "
            "rows to a batch, temper the likelihood (n0, power), or go on all the same with "
            "`prepare=Preparation(force=True)`"
        )


def warn_if_blurred(
    size: int, num_rows: float, rho: float, options: Preparation, eps: float, delta: float, units: str = "rows"
) -> None:
    """Warn of a release whose noise will leave little of the posterior, by public numbers only.

    :param size, num_rows, rho, eps, delta, units: as in `require_hope`.
    """
    shift = released_error(size, num_rows, rho)
    factor = (shift / ROUGH_ERROR) ** 2  # which falls as rho, and as n
    if options.mode != "walk" and shift > ROUGH_ERROR:
        warnings.warn(
            f"eps={eps:g} with {num_rows:.6g} {units} will give a blurred posterior of the {size} numbers in which "
            f"this model's parameters meet the data: noise shifts it by about {shift:.2g} of its standard deviations, "
            f"and makes it at least {math.hypot(1, shift):.2g} times as wide. For a shift of {ROUGH_ERROR:g}, "
            f"{what_would_do(eps, delta, factor, factor * num_rows, units)}",
            stacklevel=2,
        )
