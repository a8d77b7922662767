"""The bulk of the budget: the likelihood, released around the posterior, as a noise-aware quadratic.

Where the frame is right, a row's gradient has a mean square norm of m_eff / n, whatever the model (the information
identity; m_eff counts the coordinates of which the rows, not the prior, decide). Were all covariates about normal, the
best clip bounds would be public multiples of that, by m, n and the budget. Covariates with heavy tails need larger
ones. So noisy counts find which bound as many rows exceed as would exceed the best one for normal covariates.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from numpyro_dp.preparation.frames import SCORE_ROOM, Frame, NormalPrior, typical_norm, within_reason
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.preparation.long_rows import LONG_ROWS_SHARE, LongRows, count_long_rows
from numpyro_dp.preparation.rates import rates_of, steps_for, stretch, uneven_along
from numpyro_dp.preparation.search import Found, noise_edge
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import LAST_BOUND_GRID, Bounds, Derivatives, Survey

FIRST_SHARE = 0.2
"""Of what is left, for a release before the last one, which is made around the mode that it gives."""
MOST_FIRST = 4
"""So many of them, while they still lead away."""
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
_MOST_WITH_MISFIT = 16.0
_WIDE, _WIDE_SHARE = 4.0, 0.1
"""Bound and price of a release that tells how much the clip takes; not made where noise would be `_BLIND` times what a
usual misfit makes of it."""
_BLIND = 3.0
_LOG_SPREAD = 0.8
"""Of misfits, over that of usual tables."""
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
_LEAST_LEFT = 0.2
"""Of what a release tells here, so much may one elsewhere tell; more only where the information differs by place."""
_CLEARLY_LEFT = 5.0
"""Standard deviations of noise beyond which it is believed to tell less."""
_AGREES = 1.5
"""Of the largest eigenvalue that noise gives the difference of two informations."""
_MORE_ROOM = 4.0
"""By which a frame becomes wider along a coordinate, where it was too narrow for what its rows say to be seen."""
_MOST_UNRESOLVED = 2.0
"""Of the noise in the first of the releases, which has about twice that of all, over what is known in a direction:
where it is more, frames become as wide as the posterior after all."""
_MOST_WIDE = 1.5
"""Of the mean eigenvalue of an information, which is below 1 in a frame as wide as the posterior."""
_MOST_BY_NOISE = 3.0
"""Standard deviations of a step's square by which noise makes it longer, at most."""


class LastRelease(NamedTuple):
    """What was released in one of the last stages, and where.

    :ivar misfit: see `misfit_of`; 0 where an outcome can have few values.
    """

    frame: Frame
    bounds: Bounds
    found: Derivatives
    misfit: float = 0.0


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
    return (multiples * size / num_rows) ** 2 * (size + 1) / rho


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
    informed = _informed(frame, prior)
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


def _informed(frame: Frame, prior: NormalPrior) -> float:
    """How many coordinates the rows, and not the prior, decide on, where the posterior is about N(0, I)."""
    _, precision = prior.in_frame(frame)
    return min(max(len(precision) - float(np.trace(precision)), 1.0), len(precision))


def information_share(bounds: Bounds, size: int, num_rows: float, rho: float) -> float:
    """Of the price of a stage, so much for the information.

    The error of the posterior's place has a part from the score's noise, of variance ``a / (1 - h)`` if the information
    gets the share h, and one from the information's noise, ``b / h``, which grows with the distance that is left to go:
    the best h is ``r / (1 + r)`` with ``r**2 = b / a``. Noise is in proportion to the bounds.

    :param num_rows: over the power of the likelihood.
    """
    distance = 8 * math.sqrt(size / (num_rows * rho))
    r = float(bounds.information / bounds.score) * distance * math.sqrt((size + 1) / 2)
    return min(max(r / (1 + r), 0.04), _LARGEST_SHARE)


def last_releases(
    survey: Survey, found: Found, prior: NormalPrior, fund: Fund, rho: float
) -> tuple[Found, list[Surrogate], list[LastRelease], NormalPrior]:
    """What was found, with the long rows where the last release was made; after each stage the surrogate that is made
    of all so far; the stages; and the prior that frames were made by.

    What the search released near its end is a part of it, where what the clip takes is given back.

    :param found: where the search has ended.
    :param rho: for all of it.
    """
    m, prior = survey.size, prior._replace(of_frames=found.of_frames, steepest=found.steepest)
    at_first, uneven = prior, uneven_along(survey, found.frame, prior, found.num_rows)
    n, frame = found.num_rows, found.frame
    counted = survey.power * n
    # An outcome with few values has a derivative about as large at any place. If what few rows say is hidden in a frame
    # that was made for that, they say little.
    widest = prior.of_frames / _MORE_ROOM**2 if survey.is_listed else 0.0
    stages: list[LastRelease] = []
    surrogates: list[Surrogate] = []

    def released(frame: Frame, bounds: Bounds, derivatives: Derivatives, misfit: float = 1.0) -> LastRelease:
        informed = _informed(frame, prior)
        multiple = float(bounds.score) / math.sqrt(informed / counted)
        misfit *= float(misfit_of(multiple, counted, informed)) if survey.is_open else 0.0
        return LastRelease(frame, bounds, derivatives, misfit)

    before = [released(here.frame, here.bounds, here.found) for here in found.near] if survey.centres else []

    def release(price: float, frame: Frame, long_rows: LongRows, misfit: float = 0.0, least: float = 0.0) -> None:
        bounds, price = last_bounds(survey, frame, prior, n, price, fund, found.room, misfit)
        bounds = bounds._replace(score=max(float(bounds.score), max(least, long_rows.bound) * typical_norm(m, counted)))
        share = information_share(bounds, m, n / survey.power, price)
        steps = steps_for(survey, frame, at_first, n, uneven)
        draw = fund.ask(last_release=Wish(price, 1, (survey.derivative_numbers(steps.usual.size),)))["last_release"]
        derivatives = survey.derivatives(draw, frame, bounds, share, n, steps)
        stages.append(released(frame, bounds, derivatives, misfit or 1.0))
        # What tighter bounds have taken of surprising rows is missing from earlier releases.
        earlier = [*before, *stages[:-1]] if long_rows.bound <= found.long_rows.bound else []
        surrogates.append(combine(stages[-1], earlier))

    for _ in range(MOST_FIRST):
        release(FIRST_SHARE * rho, frame, found.long_rows)
        rho -= FIRST_SHARE * rho
        of_frames = _with_room(surrogates[-1], prior, len(stages) == MOST_FIRST, widest)
        widened, prior = of_frames < prior.of_frames, prior._replace(of_frames=of_frames)
        frame = _at_least_as_wide(recentred(surrogates[-1], prior), prior, widened)
        is_narrow = float(np.trace(stages[-1].found.information)) < _MOST_WIDE * m  # not far wider than the posterior
        if is_there(stages[-1], prior) and not widened.any() and is_narrow:
            break
    misfit = 1.0 if survey.is_open else 0.0
    usual = stages[-1].misfit - misfit_of(_WIDE, counted, _informed(frame, prior))
    if usual * _BLIND > _WIDE * math.sqrt(2 * m / (n / survey.power * _WIDE_SHARE * rho)):
        guide = combine(stages[-1]._replace(misfit=0.0), [s._replace(misfit=0.0) for s in stages[:-1]])
        release(_WIDE_SHARE * rho, frame, found.long_rows, least=_WIDE)
        rho -= _WIDE_SHARE * rho
        step, _, noise = way_from(guide, stages[-1]._replace(misfit=0.0), prior)
        misfit = _unusual(step, noise, usual)
        before = [s._replace(misfit=misfit * s.misfit) for s in before]
        stages = [s._replace(misfit=misfit * s.misfit) for s in stages]
        surrogates[-1] = combine(stages[-1], [*before, *stages[:-1]])
        frame = recentred(surrogates[-1], prior)
    long_rows = found.long_rows
    if long_rows.bound:  # counted where the search had ended, which they may have led astray
        off = float(np.trace(surrogates[-1].score_covariance)) / m
        long_rows = count_long_rows(survey, fund, frame, LONG_ROWS_SHARE * rho, n, off, long_rows)
        rho -= LONG_ROWS_SHARE * rho
    release(rho, frame, long_rows, misfit)
    return found._replace(long_rows=long_rows), surrogates, stages, prior


def way_from(guide: Surrogate, here: LastRelease, prior: NormalPrior) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From the mode of a surrogate to that of a release around it: the step, in the frame of the latter, the precision
    of the posterior there, and the covariance of the noise in the step."""
    m = len(here.found.score)
    slope, precision = prior.in_frame(here.frame)
    edge = noise_edge(here.found.information_scale, m)
    values, vectors = np.linalg.eigh(here.found.information)
    whole = (vectors * np.maximum(values, edge / 2)) @ vectors.T + precision
    inverse = np.linalg.inv(whole)
    noise = (here.found.score_scale**2 + here.misfit**2) * inverse @ inverse
    change = np.linalg.solve(np.asarray(here.frame.whitening), np.asarray(guide.frame.whitening))
    of_guide = inverse @ np.linalg.inv(change).T
    noise = noise + of_guide @ guide.score_covariance @ of_guide.T
    noise += guide.curvature_scale**2 * np.eye(m)
    return inverse @ (here.found.score + slope), whole, noise


def _unusual(step: np.ndarray, noise: np.ndarray, usual: float) -> float:
    """The misfit over that of usual tables, as the way between the modes of a tight and of a wide release tells it.

    The root of the mean of its square, for a lognormal law before, by which that is 1.

    :param step, noise: see `way_from`; the noise is without misfit.
    :param usual: what a usual misfit makes of each entry of the step.
    """
    values, vectors = np.linalg.eigh(noise)
    squares = (vectors.T @ step) ** 2
    logs = np.linspace(-3, 3, 61)
    variances = values + np.exp(2 * logs[:, None]) * usual**2
    fits = -np.sum(np.log(variances) + squares / variances, 1) / 2 - ((logs + _LOG_SPREAD**2) / _LOG_SPREAD) ** 2 / 2
    weights = np.exp(fits - np.max(fits))
    return math.sqrt(float(weights @ np.exp(2 * logs) / weights.sum()))


def _with_room(surrogate: Surrogate, prior: NormalPrior, is_last: bool, least: np.ndarray | float = 0.0) -> np.ndarray:
    """`NormalPrior.of_frames`, with less for a coordinate of which noise hides what its rows say in such a frame.

    Scales were found at the start, where derivatives may be far larger than around the posterior.

    :param is_last: whether there is no other release that could tell whether there is room enough now.
    :param least: of what is returned.
    """
    of_frames = np.broadcast_to(np.asarray(prior.of_frames, float), len(surrogate.curvature)).copy()
    if not of_frames.any():
        return of_frames
    inverse = np.linalg.inv(np.asarray(surrogate.frame.whitening))
    told = np.diag(inverse.T @ surrogate.curvature @ inverse)  # by each coordinate, where the others are known
    hidden = told < of_frames * noise_edge(surrogate.curvature_scale, len(told))
    if not hidden.any() and unresolved(surrogate, prior) > _MOST_UNRESOLVED:
        of_frames[:] = 0
    of_frames[hidden] *= 0 if is_last else _MORE_ROOM**-2
    return np.maximum(of_frames, least)


def _at_least_as_wide(frame: Frame, prior: NormalPrior, which: np.ndarray) -> Frame:
    """The frame, along some coordinates as wide as `NormalPrior.of_frames` and the prior allow."""
    whitening = np.asarray(frame.whitening)
    allowed = (1 / np.diag(prior.covariance) + prior.of_frames) ** -0.5
    factors = np.where(which, np.maximum(allowed / np.linalg.norm(whitening, axis=1), 1), 1)
    return frame._replace(whitening=factors[:, None] * whitening)


def unresolved(surrogate: Surrogate, prior: NormalPrior) -> float:
    """The largest part of a direction's precision that the information's noise may have made."""
    _, precision = prior.in_frame(surrogate.frame)
    edge = noise_edge(surrogate.curvature_scale, len(precision))
    return float(edge / np.linalg.eigvalsh(surrogate.curvature + precision)[0])


def is_there(stage: LastRelease, prior: NormalPrior) -> bool:
    """Whether the posterior is where the release was made, as far as that can tell."""
    found, m = stage.found, len(stage.found.score)
    slope, precision = prior.in_frame(stage.frame)
    values, vectors = np.linalg.eigh(found.information)
    whole = (vectors * np.maximum(values, noise_edge(found.information_scale, m) / 2)) @ vectors.T + precision
    step = np.linalg.solve(whole, found.score + slope)
    noise = found.score_scale**2 / np.linalg.eigvalsh(whole)  # of the squares that add up to the step's
    most = noise.sum() + _MOST_BY_NOISE * math.sqrt(2 * np.sum(noise**2))
    return float(step @ whole @ step) < 2 * m + most


def combine(here: LastRelease, earlier: list[LastRelease]) -> Surrogate:
    """One surrogate in the frame of `here`, from releases in several frames, weighted by their precision.

    A score that was taken elsewhere is carried over with the information on the way; what that may be wrong by is
    counted as noise. Where tighter bounds left less of the score and of the information, both count as if they had left
    as much as here; unless they took more in some directions than in others, as where few rows alone tell of one.
    """
    found, variance = here.found, here.found.score_scale**2 + here.misfit**2
    m = len(found.score)
    weight, total = 1 / found.information_scale**2, found.information / found.information_scale**2
    rates = rates_of((here.frame, here.found), [(stage.frame, stage.found) for stage in earlier])
    moved = []
    for other in earlier:
        # In their coordinates a point is other.whitening @ v: v = change @ u, up to the shift.
        change = np.linalg.solve(other.frame.whitening, here.frame.whitening)
        shift = np.linalg.solve(here.frame.whitening, np.asarray(other.frame.center) - here.frame.center)
        carried, scale = change.T @ other.found.information @ change, other.found.information_scale
        there = carried
        to_here = stretch(rates, other.frame, here.frame)
        carried, scale = to_here.T @ carried @ to_here, scale * np.linalg.norm(change @ to_here, 2) ** 2
        is_tighter = float(other.bounds.information) < float(here.bounds.information)
        left = _left(carried, scale, found) if is_tighter else 1.0
        scale /= left
        if left < 1 and not _agrees(carried / left, scale, found):
            continue
        total = total + carried / left / scale**2
        weight += 1 / scale**2
        moved.append((other, change / left, shift, there / left))
    scale = weight**-0.5
    values, vectors = np.linalg.eigh(total / weight)
    information = (vectors * np.maximum(values, 0)) @ vectors.T
    precision, score = np.eye(m) / variance, found.score / variance
    for other, change, shift, there in moved:
        released = other.found
        if np.linalg.norm(shift) > 3 * math.sqrt(m) + 3 * found.score_scale:  # for the information to carry it
            continue
        noise = (released.score_scale**2 + other.misfit**2) * change.T @ change
        noise += (released.information_scale**2 + scale**2) * (shift @ shift) * np.eye(m)
        other_precision = np.linalg.inv(noise)
        precision = precision + other_precision
        # On the way the score falls by the mean information, about that of the two ends.
        score = score + other_precision @ (change.T @ released.score + (information + there) @ shift / 2)
    covariance = np.linalg.inv(precision)
    return Surrogate(here.frame, covariance @ score, covariance, information, float(scale), rates=rates)


def _left(carried: np.ndarray, scale: float, found: Derivatives) -> float:
    """Of an information, how much of it another release has, if that is less by more than noise explains."""
    size, spread = float(np.trace(found.information)), math.sqrt(len(found.score))
    if not size > 0:
        return 1.0
    left = float(np.clip(np.trace(carried) / size, _LEAST_LEFT, 1.0))
    noise = spread * math.hypot(scale, left * found.information_scale) / size
    return left if abs(left - 1) > _CLEARLY_LEFT * noise else 1.0


def _agrees(information: np.ndarray, scale: float, found: Derivatives) -> bool:
    """Whether an information differs from a released one by no more than their noise."""
    most = np.abs(np.linalg.eigvalsh(information - found.information)).max()
    return bool(most < _AGREES * noise_edge(math.hypot(scale, found.information_scale), len(information)))


def recentred(surrogate: Surrogate, prior: NormalPrior) -> Frame:
    """The frame around the posterior's mode, in which it would be about N(0, I) without noise."""
    frame, shift = surrogate.frame, mode(surrogate, prior)
    precision = prior.for_next(frame)
    values, vectors = np.linalg.eigh(surrogate.curvature)
    edge = noise_edge(surrogate.curvature_scale, len(values))
    whole = (vectors * np.maximum(values, min(1.0, edge / 4))) @ vectors.T + precision
    values, vectors = np.linalg.eigh(whole)
    whitening = np.asarray(frame.whitening)
    return Frame(frame.center + whitening @ shift, within_reason(whitening @ (vectors / np.sqrt(values)), prior))


def mode(surrogate: Surrogate, prior: NormalPrior) -> np.ndarray:
    """Of the noise-aware surrogate times the prior, in the surrogate's frame: near it, both are about normal."""
    slope, precision = prior.in_frame(surrogate.frame)
    noisy = surrogate.variance * surrogate.curvature + surrogate.score_covariance
    answer = np.linalg.solve(noisy, surrogate.curvature)
    return np.linalg.solve(surrogate.curvature @ answer + precision, answer.T @ surrogate.score + slope)
