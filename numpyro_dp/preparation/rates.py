"""By which rate what rows say falls along a coordinate, as releases of a score's answers tell it.

A quadratic log likelihood has a score that falls evenly. Where few rows alone tell of a coefficient, and nearly all of
them have the same outcome, it does not: rows say how far to go at least, and the prior how far at most. Of yes and no,
a row whose covariate is x expects a score that changes as a sigmoid of x v at a distance of v. With the slope 1 here,
where it is falling at the rate r (between -x and x), that is ::

    told(v) = (exp(x v) - 1) / x / (1 + p (exp(x v) - 1)),    p = (1 + r / x) / 2.

At r = x it is ``(1 - exp(-x v)) / x``, as of yes only; at r = -x it is that of counts without a clip. The clipped score
of a count has a sigmoid, too: whether there is an event at all. At r = 0 it flattens out on both sides.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.preparation.first_frame import TYPICAL
from numpyro_dp.preparation.frames import SCORE_ROOM, Frame, NormalPrior, typical_norm
from numpyro_dp.preparation.survey import Derivatives, Steps, Survey

_STEP = 2.0
"""Length of a step, in standard deviations."""
_LEAST_LEFT = 1 / 64
"""Of a frame's precision along a coordinate, without that of frames."""
_MOST = 4.0
"""Rate over a step, at most: there the information falls by a factor of 50 on the way."""
_STEEPEST, _OF_LISTED, _OF_COUNTS = 1.5, 1.0, 0.4
"""Of x over a step, at most, and over the change of the steepest rows' log density on the way: the derivative of a
row's log density is at most x where it is of yes and no; steep rows of counts have a few times that, or, where the
search begins far from their mean, any multiple."""
_OF_EFFECT = 1.0
"""x of a group's effect on counts, which is taken for one on the logarithm of their mean. Of other coordinates x is not
known."""
_UNEVEN = 0.15
"""Of x over a step; coordinates with less are not asked for: there a quadratic is right."""
_UNSURE = 0.15
"""Rates over a step of which less is uncertain count as known."""
_FAR = 1.0
"""Steps along a coordinate beyond which another release says nothing of the rate here."""
_MOST_STRETCHED = 2.0
"""Logarithm of what an information that falls on the way becomes larger or smaller by, at most."""
_LEAST_NOISE = 1e-9
"""Of a release whose noise is none."""
_FARTHEST = 20.0
"""Of x v: in single precision, squares of the exponential are finite."""


class Rates(NamedTuple):
    """Along each coordinate phi, shape (m,).

    :ivar values: rates times steps, as the release and a normal law before it have them on average.
    :ivar scales: their standard deviations; 0 where that is next to nothing.
    :ivar steps: in phi: two standard deviations, where all other coordinates are known.
    :ivar steepest: x times steps; 0 of coordinates along which scores answer evenly.
    """

    values: np.ndarray
    scales: np.ndarray
    steps: np.ndarray
    steepest: np.ndarray


def told(v: jax.Array, rate: jax.Array, steepest: jax.Array) -> jax.Array:
    """So far it seems to be at v; see above. All in steps."""
    x, p = _sigmoid(rate, steepest)
    grown = jnp.expm1(jnp.clip(x * v, -_FARTHEST, _FARTHEST))
    return grown / x / (1 + p * grown)


def _sigmoid(rate: Any, steepest: Any) -> tuple[Any, Any]:
    """x, which is hardly above the rate if that is larger than was thought possible, and p."""
    x = jnp.maximum(steepest, (1 + 1e-3) * jnp.abs(rate))
    return x, (1 + rate / x) / 2


def uneven_along(survey: Survey, frame: Frame, prior: NormalPrior, num_rows: float) -> np.ndarray:
    """Coordinates along which scores may answer unevenly within two standard deviations, as far as `prior` tells.

    :param prior: as `first_frame` has it.
    """
    ways = _ways(survey, frame, prior, num_rows)
    return np.flatnonzero(survey.is_discrete & (_steepness(survey, prior, ways) > _UNEVEN))


def steps_for(survey: Survey, frame: Frame, prior: NormalPrior, num_rows: float, which: np.ndarray) -> Steps:
    """Steps along each of which one coordinate phi changes alone, for what `Survey.derivatives` asks of a frame.

    :param prior: as `first_frame` has it.
    :param which: coordinates, shape (k,).
    """
    ways = _ways(survey, frame, prior, num_rows)
    ahead = np.linalg.inv(np.asarray(frame.whitening, float)) * ways
    return Steps(which, ahead[:, which], _steepness(survey, prior, ways)[which])


def _ways(survey: Survey, frame: Frame, prior: NormalPrior, num_rows: float) -> np.ndarray:
    """How far along each coordinate, shape (m,).

    Two standard deviations where all others are known: of the posterior, not of a frame that is narrower for the sake
    of few rows (`NormalPrior.of_frames`). But not so far that a typical one of these rows has a log density that
    changes by more than about 1: there its score answers in no simple way.
    """
    m = survey.size
    of_frames = np.broadcast_to(np.asarray(prior.of_frames, float), m)
    lengths = np.linalg.norm(np.linalg.inv(np.asarray(frame.whitening, float)), axis=0)
    narrowed = of_frames / lengths**2
    bound = SCORE_ROOM * typical_norm(m, survey.power * num_rows)
    longest = TYPICAL / bound / np.sqrt(np.where(of_frames > 0, of_frames, 1e-30))
    return np.minimum(_STEP / (lengths * np.sqrt(np.maximum(1 - narrowed, _LEAST_LEFT))), longest)


def _steepness(survey: Survey, prior: NormalPrior, ways: np.ndarray) -> np.ndarray:
    """x over such ways, and the standard deviation of rates before anything is released, shape (m,)."""
    steepest = np.broadcast_to(np.asarray(prior.steepest, float), len(ways))
    share = _OF_LISTED if survey.is_listed else _OF_COUNTS
    found = np.where(steepest > 0, np.minimum(share * steepest * ways, _STEEPEST), _STEEPEST)
    if survey.is_listed:
        return found
    are_effects = survey.kinds[survey.kinds.sum(1) > 1].any(0)
    return np.where(are_effects, np.minimum(found, _OF_EFFECT * ways), 0)


def rates_of(here: tuple[Frame, Derivatives], others: Sequence[tuple[Frame, Derivatives]]) -> Rates | None:
    """Rates here, from all releases that are near, weighted by their precision; None if nobody asked.

    A score that answers as `told` adds up, a step of l ahead and one back, to about ``-r l**2`` times its slope at 0;
    see `row_bends`.
    """
    if not here[1].bends.size:
        return None
    weights, information, bends, steps, steepest = np.zeros((5, len(here[1].score)))
    for frame, found in (here, *others):
        which, ahead = found.steps.coordinates, found.steps.ahead
        if not which.size:
            continue
        way = np.einsum("km,mk->k", np.asarray(frame.whitening, float)[which], ahead)
        squares = np.sum(ahead**2, 0) / way**2  # from unit steps of u to those of phi
        is_near = np.abs(np.asarray(frame.center) - np.asarray(here[0].center))[which] <= _FAR * way
        weight = is_near * (max(found.bends_scale, _LEAST_NOISE) * squares) ** -2
        weights[which] += weight
        information[which] += weight * np.einsum("ik,ij,jk->k", ahead, found.information, ahead) / way**2
        bends[which] += weight * found.bends * squares
        steps[which] += weight * way
        steepest[which] += weight * found.steps.steepest
    asked = weights > 0
    weights = np.where(asked, weights, 1.0)
    noise, information, bends, steps = (
        weights**-0.5,
        information / weights,
        bends / weights,
        np.where(asked, steps / weights, 1.0),
    )
    steepest = np.where(asked, steepest / weights, _STEEPEST)
    values = np.clip(-bends / np.maximum(information, noise), -_MOST, _MOST)
    precision = (np.maximum(information, noise) / noise) ** 2 / (1 + values**2)
    scales = (precision + steepest**-2) ** -0.5
    return Rates(
        np.where(asked, precision * scales**2 * values, 0),
        np.where(asked & (scales > _UNSURE), scales, 0),
        steps,
        np.where(asked, steepest, 0),
    )


def stretch(rates: Rates | None, there: Frame, here: Frame) -> np.ndarray:
    """By which an information of `there` becomes that of `here`, shape (m, m), in the coordinates of `here`."""
    if rates is None:
        return np.eye(len(here.center))
    x, p = (np.asarray(part, float) for part in _sigmoid(rates.values, np.where(rates.steepest > 0, rates.steepest, 1)))
    way = np.clip(x * (np.asarray(there.center) - np.asarray(here.center)) / rates.steps, -_FARTHEST, _FARTHEST)
    # What is told there, of that here: the sigmoid's slope.
    logs = np.where(rates.steepest > 0, way - 2 * np.log1p(p * np.expm1(way)), 0)
    factors = np.exp(-np.clip(logs, -_MOST_STRETCHED, _MOST_STRETCHED) / 2)
    return np.linalg.solve(here.whitening, factors[:, None] * here.whitening)
