"""Clip bounds of the last releases, and how their price is shared.

Where the frame is right, a row's gradient has a mean square norm of m_eff / n, whatever the model (the information
identity; m_eff counts the coordinates of which the rows, not the prior, decide). Were all covariates about normal, the
best clip bounds would be public multiples of that, by m, n and the budget. Covariates with heavy tails need larger
ones. So noisy counts find which bound as many rows exceed as would exceed the best one for normal covariates.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from numpyro_dp.preparation.frames import SCORE_ROOM, Frame, NormalPrior
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.preparation.shrinkage import noise_left
from numpyro_dp.preparation.survey import LAST_BOUND_GRID, Bounds, Survey

_SPREAD, _WIDEST_SPREAD = 0.4, 1.2
"""Of the log of a row's norm, beyond that of a normal law: rows differ in their covariates. Where they differ more,
larger bounds are better; but less so the more noise there is, since the clip shortens signal and noise alike."""
_UNCENTRED_ROOM, _UNCENTRED_ROWS = 2.0, 6_000
"""Where the model cannot tell what the clip takes, the score's bound leaves more room, for up to so many rows. What it
takes of an exponential tail is a bias of sqrt(n) exp(-bound) posterior standard deviations: with more rows, larger
bounds keep it as small."""
_KINK_SHARE, _KINK_CLEAR = 0.06, 2.0
"""Where rows have kinks, besides, the price of counts of long rows, and `_CLEAR` for them: bounds that are too large
cost less there. Of a check loss at the quantile .9 a tenth of the rows say three times as much as is usual."""
_KINK_MOST, _KINK_NOISE = 2.0, 2.5
"""The bound becomes so many times as large at most, and not larger than gives that noise in a coordinate."""
_MULTIPLES = (1.6, 6.0)
"""Bounds of the score, over the root mean square of a row's norm. Less than the least of these would have less noise
where the budget is small, but eight draws do not give back what it clips: of 20,000 rows at eps = .1 a scale came out 5
of its own standard deviations too small with .7, and no narrower."""
_MISFIT, _MISFIT_FALL = 0.04, 1.9
"""Of linear regressions of real tables, that moved their posteriors by .04 to .13 times the root of the number of rows;
see `misfit_of`."""
_PULL = 0.1
"""Of such regressions, along the direction of `pull_of`, .03 to .12 times that root; in dollars, .3 to .6 times."""
PULL_OVER_MISFIT = _PULL / _MISFIT
"""What is of one direction, as so much in each: the squares of both add up to the same, but for the number of them."""
_MOST_WITH_MISFIT = 16.0
_INFORMATION_MULTIPLES = (1.3, 6.0)
"""Bounds of the information, over the mean square of a row's norm."""
_LEAST = 0.5
"""Of the bound for normal covariates: no smaller one is looked for."""
_TYPICAL_SHARE, _LARGEST_SHARE = 0.15, 0.3
"""Of the price of a stage, for the information."""
_LOUD_INFORMATION = 0.15
"""Noise of the information, in a step of length 1, above which heavy tails raise its bound no further."""
_BOUND_SHARE = 0.03
"""Of the price of a stage, for the bounds."""
_CLEAR = 3.0
"""A bound that no row exceeds shall not seem to be exceeded, by noise, by more than are looked for."""
_LONGEST = 16.0
"""The bound of the information is at most so many times that of normal covariates."""
_MOST_EXCEEDING = 0.25
"""Where the noise would not let fewer rows exceed a bound, nobody searches for it."""


class _Reference(NamedTuple):
    """Bounds that would be best if covariates were about normal, and the norms of rows then.

    :ivar multiples: of the root mean square of a row's norm, and of the mean of its information's; shape (2,).
    :ivar norms: of gradients and information matrices, in the same units, sorted; shape (2, k).
    """

    multiples: np.ndarray
    norms: np.ndarray

    def exceeding(self) -> np.ndarray:
        """Share of the rows that exceed each of the bounds."""
        return np.mean(self.norms > self.multiples[:, None], 1)

    def quantiles(self, exceeding: np.ndarray) -> np.ndarray:
        """Which norms such shares of the rows exceed."""
        return np.array([np.quantile(norms, 1 - share) for norms, share in zip(self.norms, exceeding, strict=True)])


def misfit_of(multiple: Any, num_rows: float, size: float) -> Any:
    """How far the clip may move the posterior, in each coordinate, by what it takes of rows not as the model says.

    In posterior standard deviations. Of rows that the model draws, what it takes is given back. Of others it does not
    cancel: a curve where the model has a line, a spread that grows with a covariate. That grows with the root of the
    number of rows, while noise falls with it. So the bound is chosen, and the release weighed, as if that much more
    noise were in it. Most of it is along one direction, often that of a scale; nobody knows along which.

    :param multiple: the score's bound, over the root mean square of a row's norm.
    :param size: number of coordinates that the rows decide on.
    """
    return _MISFIT * math.sqrt(num_rows / size) * np.exp(-(multiple - _MULTIPLES[0]) / _MISFIT_FALL)


def pull_of(multiple: Any, num_rows: float) -> Any:
    """The same along one direction: that in which the clip takes most of what the model itself draws.

    Of heavier tails it takes more in the same direction, such as that of a scale. Arguments as of `misfit_of`.
    """
    return _PULL * math.sqrt(num_rows) * np.exp(-(multiple - _MULTIPLES[0]) / _MISFIT_FALL)


@functools.lru_cache(64)
def reference(
    size: int, num_rows: float, rho: float, spread: float = _SPREAD, misfit: float = 0.0, power: float = 1.0
) -> _Reference:
    """The bounds with the least error of the posterior's place, for rows whose gradients are normal in the frame.

    Of the score: what the noise adds, ``(2 C)^2 / (2 rho b^2)`` for each coordinate, and what the clip takes, ``v / b^2
    - 1``: b is how the clipped score answers to the place, and v its variance; and the square of `misfit_of`. Of the
    information, which multiplies the way to the posterior: the square of what the clip takes, and of the noise, ``s^2
    (m + 1) / 2``.

    :param rho: for both.
    :param spread: of the log of a row's norm.
    :param misfit: of the rows, over that of usual tables.
    :param power: of the likelihood. A row's typical gradient is ``(power n)**-0.5`` posterior standard deviations, and
        counts `power` times: so the noise is that in ``n / power`` rows, and what rows add up to that of ``power n``.
    """
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4000, size)) * np.exp(spread * rng.standard_normal((4000, 1)) - spread**2)
    norms = np.sort(np.linalg.norm(rows, axis=1)) / math.sqrt(size)
    multiples = np.geomspace(_MULTIPLES[0], _MOST_WITH_MISFIT if misfit else _MULTIPLES[1], 60)
    factors = np.minimum(1, multiples[:, None] / norms)
    b, v = (factors * norms**2).mean(1), (factors**2 * norms**2).mean(1)
    noise = 2 * multiples**2 * size / (num_rows / power * (1 - _TYPICAL_SHARE) * rho * b**2)
    score = multiples[np.argmin(noise + v / b**2 + (misfit * misfit_of(multiples, power * num_rows, size)) ** 2)]
    multiples = np.geomspace(*_INFORMATION_MULTIPLES, 60)
    lost = 1 - np.minimum(multiples[:, None], norms**2).mean(1) / np.mean(norms**2)
    information = multiples[np.argmin(lost**2 + _information_noise(multiples, size, num_rows, _TYPICAL_SHARE * rho))]
    return _Reference(np.array([score, information]), np.stack([norms, norms**2]))


def _information_noise(multiples: Any, size: int, num_rows: float, rho: float) -> Any:
    """Mean square, in each coordinate, of what the information's noise does to a step of length 1 in each."""
    return (noise_left(size) * multiples * size / num_rows) ** 2 * (size + 1) / rho


def last_bounds(
    survey: Survey,
    frame: Frame,
    prior: NormalPrior,
    n: float,
    rho: float,
    fund: Fund,
    room: float = 1.0,
    misfit: float = 0.0,
) -> tuple[Bounds, float]:
    """Clip bounds where the posterior is about N(0, I), and what is left of `rho`.

    From public and released numbers only, the counts among them, which `fund` charges.

    :param room: that the search has found necessary: then no count is asked, which would see the many rows that say
        little.
    :param misfit: of the rows, over that of usual tables.
    """
    counted = survey.power * n
    informed = informed_by_rows(frame, prior)
    typical = np.array([math.sqrt(informed / counted), informed / counted])
    size = max(round(informed), 1)
    best = reference(size, n, rho, misfit=misfit, power=survey.power)
    loudest = _LOUD_INFORMATION / math.sqrt(_information_noise(1.0, size, n, _LARGEST_SHARE * rho))
    if not survey.centres:
        room = _UNCENTRED_ROOM + math.log(max(counted / _UNCENTRED_ROWS, 1)) / 2 / _MULTIPLES[0]
        least = np.array([room, 1.0]) * best.multiples * typical
        if not survey.has_kinks:  # smooth rows: counts made posteriors of censored outcomes wider, and no better
            return Bounds(*least), rho
        return _bounds_with_kinks(survey, frame, n, rho, fund, least, loudest * typical[1])
    if room > 1:
        return Bounds(*(np.maximum(best.multiples, [room * SCORE_ROOM, 0.0]) * typical)), rho
    of_bounds = _BOUND_SHARE * rho
    noise = math.sqrt(LAST_BOUND_GRID.num_counts / of_bounds)  # of a count
    exceeding = np.maximum(best.exceeding(), _CLEAR * noise / n)
    if exceeding.max() > _MOST_EXCEEDING:
        return Bounds(*(best.multiples * typical)), rho
    draws = fund.ask(last_bounds=Wish(of_bounds, LAST_BOUND_GRID.num_counts, (2,)))["last_bounds"]
    found = survey.bounds(draws, frame, _LEAST * best.quantiles(exceeding) * typical, exceeding * n, LAST_BOUND_GRID)
    # The grid's steps round up, by a factor between 1 and its ratio.
    found = found / math.sqrt(LAST_BOUND_GRID.ratio) * best.multiples / best.quantiles(exceeding)
    found[1] = min(found[1], max(loudest, best.multiples[1]) * typical[1])
    least = np.array([_MULTIPLES[0], _INFORMATION_MULTIPLES[0]])
    heavy = reference(size, n, rho, _WIDEST_SPREAD, misfit, survey.power)
    most = np.array([max(best.multiples[0], heavy.multiples[0]), _LONGEST * best.multiples[1]])
    return Bounds(*np.clip(found, least * typical, most * typical)), rho - of_bounds


def _bounds_with_kinks(
    survey: Survey, frame: Frame, n: float, rho: float, fund: Fund, least: np.ndarray, loudest: float
) -> tuple[Bounds, float]:
    """`last_bounds` that hardly any row exceeds: nothing gives back what the clip takes, and it may pull one way.

    :param least: bounds; without counts, these.
    :param loudest: bound of the information that is not to be exceeded.
    """
    of_bounds = _KINK_SHARE * rho
    noise = survey.power * least[0] * math.sqrt(2 / (rho - of_bounds))  # of each coordinate's score
    exceeding = _KINK_CLEAR * math.sqrt(LAST_BOUND_GRID.num_counts / of_bounds)
    if exceeding > _MOST_EXCEEDING * n:
        return Bounds(*least), rho
    draws = fund.ask(last_bounds=Wish(of_bounds, LAST_BOUND_GRID.num_counts, (2,)))["last_bounds"]
    found = survey.bounds(draws, frame, least, exceeding, LAST_BOUND_GRID)
    most = np.maximum(least, [least[0] * min(_KINK_MOST, _KINK_NOISE / noise), loudest])
    return Bounds(*np.minimum(found, most)), rho - of_bounds


def informed_by_rows(frame: Frame, prior: NormalPrior) -> float:
    """How many coordinates the rows, and not the prior, decide on, where the posterior is about N(0, I)."""
    _, precision = prior.in_frame(frame)
    return min(max(len(precision) - float(np.trace(precision)), 1.0), len(precision))


def information_share(bounds: Bounds, size: int, num_rows: float, rho: float) -> float:
    """Of the price of a stage, so much for the information.

    The error of the posterior's place has a part from the score's noise, of variance ``a / (1 - h)`` if the information
    gets the share h, and one from the noise left in the information, ``b / h``, which grows with the distance that is
    left to go: the best h is ``r / (1 + r)`` with ``r**2 = b / a``. Noise is in proportion to the bounds.

    :param num_rows: over the power of the likelihood.
    """
    distance = 8 * math.sqrt(size / (num_rows * rho))
    r = noise_left(size) * float(bounds.information / bounds.score) * distance * math.sqrt((size + 1) / 2)
    return min(max(r / (1 + r), 0.04), _LARGEST_SHARE)
