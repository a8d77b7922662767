"""The bulk of the budget: the likelihood, released around the posterior, as a noise-aware quadratic."""

import math
from collections.abc import Sequence

import numpy as np

from numpyro_dp.preparation.combination import LastRelease, combine
from numpyro_dp.preparation.frames import Frame, NormalPrior, typical_norm, within_reason
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.preparation.last_bounds import (
    PULL_OVER_MISFIT,
    information_share,
    informed_by_rows,
    last_bounds,
    misfit_of,
    pull_of,
)
from numpyro_dp.preparation.long_rows import LONG_ROWS_SHARE, LongRows, count_long_rows
from numpyro_dp.preparation.rates import steps_for, uneven_along
from numpyro_dp.preparation.search import Found, noise_edge
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import Bounds, Derivatives, Survey

FIRST_SHARE = 0.2
"""Of what is left, for a release before the last one, which is made around the mode that it gives."""
MOST_FIRST = 4
"""So many of them, while they still lead away."""
_WIDE, _WIDE_SHARE = 4.0, 0.1
"""Bound and price of a release that tells how much the clip takes; not made where noise would be `_BLIND` times what a
usual misfit makes of it."""
_BLIND = 3.0
_LOG_SPREAD = 0.8
"""Of misfits, over that of usual tables."""
_MORE_ROOM = 4.0
"""By which a frame becomes wider along a coordinate, where it was too narrow for what its rows say to be seen."""
_MOST_UNRESOLVED = 2.0
"""Of the noise in the first of the releases, which has about twice that of all, over what is known in a direction:
where it is more, frames become as wide as the posterior after all."""
_MOST_WIDE = 1.5
"""Of the mean eigenvalue of an information, which is below 1 in a frame as wide as the posterior."""
_MOST_BY_NOISE = 3.0
"""Standard deviations of a step's square by which noise makes it longer, at most."""


def last_releases(
    survey: Survey, found: Found, prior: NormalPrior, fund: Fund, rho: float, is_proper: bool = True
) -> tuple[Found, list[Surrogate], list[LastRelease], NormalPrior]:
    """What was found, with the long rows where the last release was made; after each stage the surrogate that is made
    of all so far; the stages; and the prior that frames were made by.

    What the search released near its end is a part of it, where what the clip takes is given back.

    :param found: where the search has ended.
    :param rho: for all of it.
    :param is_proper: whether the posterior's prior is. If not, scores that flatten out would leave it no end.
    """
    m, prior = survey.size, prior._replace(of_frames=found.of_frames, steepest=found.steepest)
    n, frame, at_first = found.num_rows, found.frame, prior
    uneven = uneven_along(survey, frame, prior, n) if is_proper else np.zeros(0, int)
    counted = survey.power * n
    # An outcome with few values has a derivative about as large at any place. If what few rows say is hidden in a frame
    # that was made for that, they say little.
    widest = prior.of_frames / _MORE_ROOM**2 if survey.is_listed else 0.0
    stages: list[LastRelease] = []
    surrogates: list[Surrogate] = []

    misfit, pull = (1.0, 1.0) if survey.is_open else (0.0, 0.0)

    def released(frame: Frame, bounds: Bounds, derivatives: Derivatives) -> LastRelease:
        informed = informed_by_rows(frame, prior)
        multiple = float(bounds.score) / math.sqrt(informed / counted)
        usual = float(misfit_of(multiple, counted, informed))
        along = pulled_along(frame, [(frame, derivatives), *((s.frame, s.found) for s in stages)])
        return LastRelease(frame, bounds, derivatives, usual, pull_of(multiple, counted) * along).fitting(misfit, pull)

    before = [released(here.frame, here.bounds, here.found) for here in found.near] if survey.centres else []

    def release(price: float, frame: Frame, long_rows: LongRows, allowed: float = 0.0, least: float = 0.0) -> None:
        bounds, price = last_bounds(survey, frame, prior, n, price, fund, found.room, allowed)
        bounds = bounds._replace(score=max(float(bounds.score), max(least, long_rows.bound) * typical_norm(m, counted)))
        share = information_share(bounds, m, n / survey.power, price)
        steps = steps_for(survey, frame, at_first, n, uneven)
        draw = fund.ask(last_release=Wish(price, 1, (survey.derivative_numbers(steps.steepest.size),)))["last_release"]
        derivatives = survey.derivatives(draw, frame, bounds, share, n, steps)
        stages.append(released(frame, bounds, derivatives))
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
    tight, allowed = stages[-1], misfit
    of_wide = misfit_of(_WIDE, counted, informed_by_rows(frame, prior))
    usual, usual_pull = tight.misfit - of_wide, np.linalg.norm(tight.pull) * (1 - of_wide / max(tight.misfit, of_wide))
    if max(usual * _BLIND, usual_pull) > _WIDE * math.sqrt(2 * m / (n / survey.power * _WIDE_SHARE * rho)):
        guide = combine(tight.fitting(), [s.fitting() for s in stages[:-1]])
        release(_WIDE_SHARE * rho, frame, found.long_rows, least=_WIDE)
        rho -= _WIDE_SHARE * rho
        wide = stages[-1]
        misfit, pull = _unusual_along(guide, wide.fitting(), prior, usual, usual_pull, np.asarray(wide.pull))
        allowed = math.hypot(misfit, pull * PULL_OVER_MISFIT if np.any(tight.pull) else 0.0)
        before = [s.fitting(misfit, pull) for s in before]
        stages = [s.fitting(misfit, pull) for s in stages]
        surrogates[-1] = combine(stages[-1], [*before, *stages[:-1]])
        frame = recentred(surrogates[-1], prior)
    long_rows = found.long_rows
    if long_rows.bound:  # counted where the search had ended, which they may have led astray
        off = float(np.trace(surrogates[-1].score_covariance)) / m
        long_rows = count_long_rows(survey, fund, frame, LONG_ROWS_SHARE * rho, n, off, long_rows)
        rho -= LONG_ROWS_SHARE * rho
    release(rho, frame, long_rows, allowed)
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
    pull = np.broadcast_to(here.pull, m)
    noise = inverse @ (here.noise + np.outer(pull, pull)) @ inverse
    change = np.linalg.solve(np.asarray(here.frame.whitening), np.asarray(guide.frame.whitening))
    of_guide = inverse @ np.linalg.inv(change).T
    noise = noise + of_guide @ guide.score_covariance @ of_guide.T
    noise += guide.curvature_scale**2 * np.eye(m)
    return inverse @ (here.found.score + slope), whole, noise


def pulled_along(here: Frame, told: Sequence[tuple[Frame, Derivatives]]) -> np.ndarray:
    """The direction of what rows have been given back, in the coordinates of `here`, as the clearest of some releases
    has it: of norm 1, but shorter where noise hides it, and 0 where nobody asked.
    """
    clearest, along = 0.0, np.zeros(len(here.center))
    for frame, found in told:
        square = float(found.given @ found.given)
        known = 1 - found.given.size * found.given_scale**2 / square if square else 0.0
        if known > clearest:
            given = np.asarray(here.whitening).T @ np.linalg.solve(np.asarray(frame.whitening).T, found.given)
            clearest, along = known, math.sqrt(known) * given / np.linalg.norm(given)
    return along


def _unusual_along(
    guide: Surrogate, here: LastRelease, prior: NormalPrior, usual: float, usual_pull: float, along: np.ndarray
) -> tuple[float, float]:
    """Misfit and pull, over usual ones, as the way from the mode of a tight release to that of a wide one tells.

    :param usual, usual_pull: what usual ones make of the way, in each coordinate and along the pull.
    :param along: the pull's direction in the frame of `here`; 0 if nobody knows.
    """
    step, _, noise = way_from(guide, here, prior)
    m = len(step)
    if not usual_pull or not along.any():
        return _unusual(step, noise, usual), 1.0
    axes = np.linalg.qr(np.column_stack([along, np.eye(m)]))[0].T  # the first one along the pull
    step, noise = axes @ step, axes @ noise @ axes.T
    pull = _unusual(step[:1], noise[:1, :1], usual_pull)
    return _unusual(step[1:], noise[1:, 1:], usual) if m > 1 else 1.0, pull


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
