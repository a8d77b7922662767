"""The last look at the rows: what released numbers say about the surrogate, and the noise in them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import chdtrc

from numpyro_dp.preparation.combination import LastRelease
from numpyro_dp.preparation.frames import Frame, NormalPrior
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.preparation.last_release import recentred, unresolved, way_from
from numpyro_dp.preparation.long_rows import EDGES
from numpyro_dp.preparation.search import Found
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import CURVE_GRID, Fit, Survey

FIT_SHARE = 0.1
"""Of the budget, for the last look at the rows."""
_BOUND_SHARE = 0.3
"""Of that, for a bound of the rows' distances from their tangents."""
_POINTS = 4  # pairs of them
_LEAST_VARIANCE, _MOST_VARIANCE = 0.3, 3.0
_OF_SAMPLING = 0.12
"""Standard deviation of whether a row is outlying, less the share of eight others that are, if the nine are alike and
their law has tails as long as an exponential one. A single scale has .15, the longest of usual laws .18: there
`verdict.CLEAR_OUTLYING` has false alarms in up to 1% of the runs."""


class Check(NamedTuple):
    """What released numbers say about a surrogate; all of it would be about as named if the surrogate were right.

    :ivar has_arrived: whether the search for the posterior ended with a step of no significance: yes.
    :ivar moved: how far the mode moved between the last two releases, as a chi-square statistic over its degrees of
        freedom: 1.
    :ivar chance: how often noise alone would move it so far.
    :ivar reach: length of that move over the square root of the number of coordinates, in posterior standard
        deviations: about 1, or what the noise makes of it.
    :ivar unresolved: the largest part of a coordinate's precision that the information's noise may have made: below 1.
    :ivar clipped: share of the rows that were clipped beyond what the model expects: 0; None where no model tells.
    :ivar outlying: the same of rows that are far further out than the outcomes that the model draws for them.
    :ivar clipped_noise, outlying_noise: standard deviations of the noise in these; of the rows' own chance, too, in the
        second.
    :ivar variance: of the clipped scores over the information, as released: that of the surrogate, but where it has 1.
    :ivar varied: by how many standard deviations of noise the clipped scores vary by more than half of what the model
        expects; None where no model tells.
    :ivar curve: by how much the log likelihood is above the surrogate's, at each of some points of about a posterior's
        width: 0.
    :ivar curve_noise: standard deviation of the noise in it.
    :ivar turned: by how much the information grows on the way to points twice as far, over that of the posterior: 0;
        None where no model tells, or rows count more often than once.
    :ivar turned_noise: standard deviation of the noise in it.
    :ivar lost: share of the rows with kinks that were clipped, where nobody knows what that takes: 0; None elsewhere.
    :ivar shortened: share of the rows that were clipped, where they have no kinks and no model tells how many are: few.
    :ivar taken: about how far the clip still moves the posterior by what it takes of rows that are longer than the
        model expects, in standard deviations of the noise-aware posterior: 0.
    :ivar room: the score's bound, over the least that it ever has, where rows are longer than the model expects: what
        it takes of each is so many times as long. 1 where outcomes can have few values: such rows are not far out.
    :ivar width: of the posterior, in units of these points' distance: 1, or less where clipped scores vary less.
    """

    has_arrived: bool
    moved: float
    chance: float
    reach: float
    unresolved: float
    clipped: float | None
    outlying: float | None
    clipped_noise: float
    outlying_noise: float
    variance: float
    varied: float | None
    curve: np.ndarray
    curve_noise: float
    width: float = 1.0
    lost: float | None = None
    shortened: float | None = None
    taken: float = 0.0
    room: float = 1.0
    turned: float | None = None
    turned_noise: float = 0.0


def check(
    survey: Survey,
    found: Found,
    surrogates: Sequence[Surrogate],
    stages: Sequence[LastRelease],
    prior: NormalPrior,
    fund: Fund,
    rho: float,
) -> tuple[Check, Surrogate]:
    """Look at the rows once more; also the surrogate, with the variance of the clipped scores as released.

    :param surrogates, stages, prior: of `last_releases`.
    """
    m, n, surrogate = survey.size, found.num_rows, surrogates[-1]
    frame, last = recentred(surrogate, prior), stages[-1]
    of_bound = _BOUND_SHARE * rho
    half = np.random.default_rng(0).standard_normal((_POINTS, m))
    points = np.concatenate([half, -half])
    draws = fund.ask(
        fit_bound=Wish(of_bound, CURVE_GRID.num_counts, (1,)),
        fit=Wish(rho - of_bound, 1, (survey.fit_numbers(len(points)),)),
    )
    typical = m / (survey.power * n)
    # Where few rows are far from their tangent (kinks), a bound that many exceed would hide them.
    most = min(max(0.005 * n, math.sqrt(CURVE_GRID.num_counts / of_bound)), 0.3 * n)
    looked = draws["fit_bound"], draws["fit"]
    fit = survey.fit(*looked, frame, last.bounds, points, typical, most, last.found.answer)
    variance = _variance(survey, fit, surrogate, frame)
    # Where few rows alone tell of a coordinate, they are clipped more than others: of those the mean says too little.
    surrogate = surrogate._replace(variance=max(variance, 1.0) if np.any(found.of_frames) else variance)
    _, precision = prior.in_frame(surrogate.frame)
    room = max(found.long_rows.bound / float(EDGES[0]), 1.0)
    moved, reach = _moved(stages[-1], surrogates[-2], prior)
    return Check(
        has_arrived=found.has_arrived,
        moved=moved,
        chance=float(chdtrc(m, moved * m)),
        reach=reach,
        unresolved=unresolved(surrogate, prior),
        clipped=fit.clipped / n if survey.centres else None,
        outlying=fit.outlying / n if survey.centres else None,
        clipped_noise=fit.clipped_scale / n,
        outlying_noise=math.hypot(fit.outlying_scale / n, _OF_SAMPLING / (room * math.sqrt(n))),
        variance=variance,
        varied=_varied(fit) if survey.centres else None,
        curve=fit.curve - _beyond_quadratic(surrogate, frame, points),
        curve_noise=fit.curve_scale,
        width=_width(surrogate, precision, frame),
        lost=fit.clipped / n if survey.has_kinks else None,
        shortened=None if survey.centres or survey.has_kinks else fit.clipped / n,
        taken=found.long_rows.taken / math.hypot(1.0, last.found.score_scale),
        room=room if survey.is_open else 1.0,
        turned=None if survey.is_weighted else fit.turned,
        turned_noise=fit.turned_scale,
    ), surrogate


def _beyond_quadratic(surrogate: Surrogate, frame: Frame, points: np.ndarray) -> np.ndarray:
    """By how much the surrogate itself, without noise, is above a quadratic around the centre of `frame`: 0, but for
    its rates."""
    if surrogate.rates is None:
        return np.zeros(len(points))
    start = np.linalg.solve(surrogate.frame.whitening, np.asarray(frame.center) - surrogate.frame.center)
    ways = points @ np.linalg.solve(surrogate.frame.whitening, np.asarray(frame.whitening, float)).T
    steps = np.linspace(0, 1, 65)
    places = start + steps[:, None, None] * ways
    answers = np.asarray(jax.vmap(jax.vmap(surrogate.straightened))(jnp.asarray(places, jnp.result_type(float))))
    rises = np.einsum("ski,ij,kj->sk", answers - answers[0], surrogate.curvature, ways)
    return rises[1] / steps[1] / 2 - np.trapezoid(rises, steps, axis=0)


def _width(surrogate: Surrogate, prior_precision: np.ndarray, frame: Frame) -> float:
    """`Check.width`: the root of the posterior's mean variance in `frame`, at most 1."""
    inverse = np.linalg.inv(surrogate.curvature + prior_precision)
    spread = surrogate.variance * surrogate.curvature + surrogate.score_covariance + prior_precision
    change = np.linalg.solve(np.asarray(frame.whitening), np.asarray(surrogate.frame.whitening))
    covariance = change @ inverse @ spread @ inverse @ change.T
    return math.sqrt(min(float(np.trace(covariance)) / len(covariance), 1.0))


def _variance(survey: Survey, fit: Fit, surrogate: Surrogate, frame: Frame) -> float:
    """Of the clipped scores over the information: the ratio of their traces, in the frame of the last look."""
    # The information is not the scores' variance, but what the posterior's width goes by, where it is minus the second
    # derivative: a likelihood that is scaled, or a check loss, is not that of the law by which rows come about.
    if survey.has_kinks or not survey.centres or survey.is_weighted:
        return 1.0
    change = np.linalg.solve(np.asarray(surrogate.frame.whitening), np.asarray(frame.whitening))
    information = float(np.trace(change.T @ surrogate.curvature @ change))
    if not information > 0:  # a release that is all noise: rows told nothing
        return 1.0
    square = survey.power * fit.square
    ratio, noise = square / information, survey.power * fit.square_scale / information
    # Where the noise tells nothing, 1: with that, intervals are rather too wide.
    weight = 1 / (1 + (noise / 0.2) ** 2)
    return float(np.clip(weight * ratio + (1 - weight), _LEAST_VARIANCE, _MOST_VARIANCE))


def _varied(fit: Fit) -> float:
    """`Check.varied`. The surplus has twice the noise of the square."""
    return (fit.square - (fit.square - fit.surplus) / 2) / (math.sqrt(5) / 2 * fit.square_scale)


def _moved(here: LastRelease, guide: Surrogate, prior: NormalPrior) -> tuple[float, float]:
    """How far the mode moved with the last release: `Check.moved` and `Check.reach`.

    :param guide: the surrogate around whose mode that release was made, so that it was at 0.
    """
    step, whole, noise = way_from(guide, here, prior)
    m = len(step)
    return float(step @ np.linalg.solve(noise, step) / m), math.sqrt(max(step @ whole @ step, 0.0) / m)
