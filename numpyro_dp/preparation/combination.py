"""One surrogate of several releases, each made in its own frame."""

import math
from typing import NamedTuple

import numpy as np

from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.rates import rates_of, stretch
from numpyro_dp.preparation.search import noise_edge
from numpyro_dp.preparation.shrinkage import without_noise
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import Bounds, Derivatives

_LEAST_TOLD = 0.2
"""Of what a release tells here, so much may one elsewhere tell; more only where the information differs by place."""
_CLEARLY_LEFT = 5.0
"""Standard deviations of noise beyond which it is believed to tell less."""
_AGREES = 1.5
"""Of the largest eigenvalue that noise gives the difference of two informations."""


class LastRelease(NamedTuple):
    """What was released in one of the last stages, and where.

    :ivar misfit: see `misfit_of`; 0 where an outcome can have few values.
    :ivar pull: besides, along one direction, see `pull_of`; 0, or shape (m,).
    """

    frame: Frame
    bounds: Bounds
    found: Derivatives
    misfit: float = 0.0
    pull: np.ndarray | float = 0.0

    @property
    def noise(self) -> np.ndarray:
        """Covariance of the noise in the score, but for the pull, shape (m, m)."""
        return (self.found.score_scale**2 + self.misfit**2) * np.eye(len(self.found.score))

    def fitting(self, misfit: float = 0.0, pull: float = 0.0) -> "LastRelease":
        """The same, of rows whose misfit and pull are so many times as large."""
        return self._replace(misfit=misfit * self.misfit, pull=pull * np.asarray(self.pull))


def combine(here: LastRelease, earlier: list[LastRelease]) -> Surrogate:
    """One surrogate in the frame of `here`, from releases in several frames, weighted by their precision.

    A score that was taken elsewhere is carried over with the information on the way; what that may be wrong by is
    counted as noise. Where tighter bounds left less of the score and of the information, both count as if they had left
    as much as here; unless they took more in some directions than in others, as where few rows alone tell of one.
    """
    found = here.found
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
        # In a wider frame the same noise is larger. In a narrower one its part here stands for what differs on the way.
        there_scale = other.found.information_scale * max(float(np.linalg.norm(change, 2)) ** 2, 1) / left
        moved.append((other, change / left, shift, there / left, there_scale))
    scale = weight**-0.5
    values, vectors = np.linalg.eigh(without_noise(total / weight, scale))
    information = (vectors * np.maximum(values, 0)) @ vectors.T
    scores, noises, pulls = [found.score], [here.noise], [np.broadcast_to(here.pull, m)]
    for other, change, shift, there, there_scale in moved:
        released = other.found
        if np.linalg.norm(shift) > 3 * math.sqrt(m) + 3 * found.score_scale:  # for the information to carry it
            continue
        noises.append(change.T @ other.noise @ change + (there_scale**2 + scale**2) * (shift @ shift) * np.eye(m))
        pulls.append(change.T @ np.broadcast_to(other.pull, m))
        # On the way the score falls by the mean information, about that of the two ends.
        scores.append(change.T @ released.score + (information + there) @ shift / 2)
    score, covariance = _weighted(scores, noises, pulls)
    return Surrogate(here.frame, score, covariance, information, float(scale), rates=rates)


def _weighted(scores: list, noises: list, pulls: list) -> tuple[np.ndarray, np.ndarray]:
    """The mean of scores by their precision, and its covariance. Noise of each is its own; all are pulled one way.

    By how much a tight release is pulled more than a wide one would tell of the pull, at the price of much noise.
    """
    precisions = [np.linalg.inv(noise) for noise in noises]
    covariance = np.linalg.inv(np.sum(precisions, 0))
    score = covariance @ np.sum([p @ score for p, score in zip(precisions, scores, strict=True)], 0)
    pull = covariance @ np.sum([p @ pull for p, pull in zip(precisions, pulls, strict=True)], 0)
    return score, covariance + np.outer(pull, pull)


def _left(carried: np.ndarray, scale: float, found: Derivatives) -> float:
    """Of an information, how much of it another release has, if that is less by more than noise explains."""
    size, spread = float(np.trace(found.information)), math.sqrt(len(found.score))
    if not size > 0:
        return 1.0
    left = float(np.clip(np.trace(carried) / size, _LEAST_TOLD, 1.0))
    noise = spread * math.hypot(scale, left * found.information_scale) / size
    return left if abs(left - 1) > _CLEARLY_LEFT * noise else 1.0


def _agrees(information: np.ndarray, scale: float, found: Derivatives) -> bool:
    """Whether an information differs from a released one by no more than their noise."""
    most = np.abs(np.linalg.eigvalsh(information - found.information)).max()
    return bool(most < _AGREES * noise_edge(math.hypot(scale, found.information_scale), len(information)))
