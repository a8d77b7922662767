"""By which rate what rows say falls along a coordinate, as releases of a score's answers tell it.

A quadratic log likelihood has a score that falls evenly. Where few rows alone tell of a coefficient, and nearly all of
them have the same outcome, it does not: along it the score is ``J (1 - exp(-r v)) / r`` at a distance of v, with the
value r of the rows' covariate for a logistic law. Rows say how far to go at least, and the prior how far at most.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from numpyro_dp.preparation.first_frame import TYPICAL
from numpyro_dp.preparation.frames import SCORE_ROOM, Frame, typical_norm
from numpyro_dp.preparation.survey import Derivatives, Survey

_STEP = 2.0
"""Length of a step, in standard deviations."""
_LEAST_LEFT = 1 / 64
"""Of a frame's precision along a coordinate, without that of frames."""
_CLEARLY_UNEVEN = 2.5
"""Standard deviations of noise above which a coordinate's bend is believed."""
_MOST = 4.0
"""Rate over a step, at most: there the information falls by a factor of 50 on the way."""
_USUAL = 1.5
"""Standard deviation of rates over a step, before anything was released."""
_UNSURE = 0.15
"""Rates over a step of which less is uncertain count as known, and as 0 if that may be."""
_FAR = 1.0
"""Steps along a coordinate beyond which another release says nothing of the rate here."""
_MOST_STRETCHED = 2.0
"""Logarithm of what an information that falls on the way becomes larger or smaller by, at most."""
_LEAST_NOISE = 1e-9
"""Of a release whose noise is none."""


class Rates(NamedTuple):
    """Along each coordinate phi, shape (m,).

    :ivar values: rates times steps, as the release and a normal law before it have them on average.
    :ivar scales: their standard deviations; 0 where that is next to nothing.
    :ivar steps: in phi: two standard deviations, where all other coordinates are known.
    """

    values: np.ndarray
    scales: np.ndarray
    steps: np.ndarray


def steps_for(survey: Survey, frame: Frame, of_frames: np.ndarray | float, num_rows: float) -> np.ndarray:
    """Steps of u along each of which one coordinate phi changes alone, for what `Survey.derivatives` asks of a frame.

    They are as long as two standard deviations where all others are known: of the posterior, not of a frame that is
    narrower for the sake of few rows (`NormalPrior.of_frames`). But not so long that a typical one of these rows has a
    log density that changes by more than about 1: there its score answers in no simple way.

    :param of_frames: as `first_frame` has found it.
    :return: as columns, shape (m, k): of all coordinates where outcomes are listed, else of none.
    """
    m, counted = survey.size, survey.power * num_rows
    if not survey.is_listed:
        return np.zeros((m, 0))
    of_frames = np.broadcast_to(np.asarray(of_frames, float), m)
    inverse = np.linalg.inv(np.asarray(frame.whitening, float))
    lengths = np.linalg.norm(inverse, axis=0)
    narrowed = of_frames / lengths**2
    longest = TYPICAL / (SCORE_ROOM * typical_norm(m, counted)) / np.sqrt(np.where(of_frames > 0, of_frames, 1e-30))
    return inverse * np.minimum(_STEP / (lengths * np.sqrt(np.maximum(1 - narrowed, _LEAST_LEFT))), longest)


def rates_of(here: tuple[Frame, Derivatives], others: Sequence[tuple[Frame, Derivatives]]) -> Rates | None:
    """Rates here, from all releases that are near, weighted by their precision; None if nobody asked.

    A score that answers as ``(1 - exp(-r u)) / r`` adds up, a step of l ahead and one back, to about ``-r l**2`` times
    its slope at 0; see `row_bends`. Of coordinates that nobody asked for, scores answer evenly.
    """
    if not here[1].bends.size:
        return None
    weights, told, bends, steps = np.zeros((4, len(here[1].score)))
    for frame, found in (here, *others):
        whitening = np.asarray(frame.whitening, float)
        ways = whitening @ found.steps
        which = np.argmax(np.abs(ways) / np.linalg.norm(whitening, axis=1)[:, None], 0)
        way = np.abs(ways[which, np.arange(len(which))])
        squares = np.sum(found.steps**2, 0) / way**2  # from unit steps of u to those of phi
        is_near = np.abs(np.asarray(frame.center) - np.asarray(here[0].center))[which] <= _FAR * way
        weight = is_near * (max(found.bends_scale, _LEAST_NOISE) * squares) ** -2
        weights[which] += weight
        told[which] += weight * np.einsum("ik,ij,jk->k", found.steps, found.information, found.steps) / way**2
        bends[which] += weight * found.bends * squares
        steps[which] += weight * way
    asked = weights > 0
    weights = np.where(asked, weights, 1.0)
    noise, told, bends, steps = weights**-0.5, told / weights, bends / weights, np.where(asked, steps / weights, 1.0)
    values = np.clip(-bends / np.maximum(told, noise), -_MOST, _MOST)
    precision = (np.maximum(told, noise) / noise) ** 2 / (1 + values**2)
    scales = (precision + _USUAL**-2) ** -0.5
    is_unsure = asked & (scales > _UNSURE)
    is_clear = asked & (np.abs(bends) > _CLEARLY_UNEVEN * noise)
    values = np.where(is_unsure | is_clear, precision * scales**2 * values, 0)
    return Rates(values, np.where(is_unsure, scales, 0), steps)


def stretch(rates: Rates | None, there: Frame, here: Frame) -> np.ndarray:
    """By which an information of `there` becomes that of `here`, shape (m, m), in the coordinates of `here`."""
    if rates is None:
        return np.eye(len(here.center))
    way = (np.asarray(there.center) - np.asarray(here.center)) / rates.steps
    factors = np.exp(np.clip(rates.values * way, -_MOST_STRETCHED, _MOST_STRETCHED) / 2)
    return np.linalg.solve(here.whitening, factors[:, None] * here.whitening)
