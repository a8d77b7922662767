"""Frames, in which the posterior is about N(0, I), beside the prior as a rough normal law."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SCORE_ROOM = 1.2
"""Over the root mean square of a row's norm in a frame that is right, where bounds are not searched for."""
_NARROWEST, _WIDEST = 1e-7, 1e3
"""Widths of a frame, over the prior's."""
_LEAST_LEFT = 1 / 64
"""Of a frame's precision, what is left at least without that of frames."""


class Frame(NamedTuple):
    """Coordinates ``phi = center + whitening @ u``; released or public.

    :ivar center: shape (m,).
    :ivar whitening: shape (m, m).
    """

    center: np.ndarray | jax.Array
    whitening: np.ndarray | jax.Array

    def at(self, u: jax.Array) -> jax.Array:
        """phi of `u`."""
        return jnp.asarray(self.center) + jnp.asarray(self.whitening) @ u

    def of(self, phi: jax.Array) -> jax.Array:
        """u of `phi`."""
        inverse = np.linalg.inv(np.asarray(self.whitening, float))
        return jnp.asarray(inverse, phi.dtype) @ (phi - jnp.asarray(self.center, phi.dtype))


def typical_norm(size: int, num_rows: float) -> float:
    """Root mean square norm of a row's gradient in a frame that is right, whatever the model is."""
    return math.sqrt(size / num_rows)


class NormalPrior(NamedTuple):
    """A rough normal law of phi, from prior draws; it guides the search and enters no posterior.

    :ivar of_frames: precision that frames have beside it, of each coordinate: see `numpyro_dp.preparation.first_frame`.
    :ivar steepest: derivative of a row's log density by each coordinate that few rows exceed, where the search began;
        0 where nobody knows.
    """

    mean: np.ndarray
    covariance: np.ndarray
    of_frames: np.ndarray | float = 0.0
    steepest: np.ndarray | float = 0.0

    def in_frame(self, frame: Frame) -> tuple[np.ndarray, np.ndarray]:
        """Slope of its log density at the frame's centre, and its precision, in the frame's coordinates."""
        whitening = np.asarray(frame.whitening)
        precision = whitening.T @ np.linalg.solve(self.covariance, whitening)
        slope = whitening.T @ np.linalg.solve(self.covariance, self.mean - np.asarray(frame.center))
        return slope, (precision + precision.T) / 2

    def for_next(self, frame: Frame) -> np.ndarray:
        """The precision beside the rows' that the next frame has, in the coordinates of this one."""
        whitening = np.asarray(frame.whitening)
        added = np.broadcast_to(self.of_frames, len(whitening))
        return self.in_frame(frame)[1] + (whitening.T * added) @ whitening

    def log_density(self, phi: np.ndarray) -> float:
        """Up to a constant."""
        away = phi - self.mean
        return float(-away @ np.linalg.solve(self.covariance, away) / 2)


def rough_normal(draws: np.ndarray) -> NormalPrior:
    """Median and covariance of `draws` (k, m), with values beyond 6 robust standard deviations pulled in."""
    draws = draws[np.isfinite(draws).all(1)]
    median = np.median(draws, 0)
    scale = np.subtract(*np.percentile(draws, [75, 25], 0)) / 1.349
    scale = np.maximum(scale, 1e-6 * np.maximum(np.abs(median), 1))
    scaled = np.clip((draws - median) / scale, -6, 6)
    covariance = np.cov(scaled, rowvar=False).reshape(scaled.shape[1], -1) + 1e-3 * np.eye(scaled.shape[1])
    return NormalPrior(median, scale[:, None] * covariance * scale)


def place_of(draws: np.ndarray) -> np.ndarray:
    """The median of `draws` (k, d) of the unconstrained parameters, but 0 where it is that up to its Monte Carlo error.

    Slopes that differ from 0 by that error only can be enough to saturate a link, where covariates are large.
    """
    draws = draws[np.isfinite(draws).all(1)]
    median = np.median(draws, 0)
    spread = np.subtract(*np.percentile(draws, [75, 25], 0)) / 1.349
    near_zero = np.abs(median) < 4 * 1.25 * spread / math.sqrt(len(draws))
    return np.where(near_zero, 1e-4 * spread, median)  # not 0 itself, where a link may have a kink


def within_reason(whitening: np.ndarray, prior: NormalPrior) -> np.ndarray:
    """The same, but in each direction by no more than `_NARROWEST` and `_WIDEST` other than the prior.

    Where noise decides, as in a table of a few rows, each frame would be narrower than the one before, until it is
    singular.
    """
    root = np.linalg.cholesky(prior.covariance)
    left, widths, right = np.linalg.svd(np.linalg.solve(root, whitening))
    kept = np.clip(widths, _NARROWEST, _WIDEST)
    return whitening if np.array_equal(kept, widths) else root @ (left * kept) @ right


def as_wide_as_the_posterior(frame: Frame, of_frames: np.ndarray | float) -> Frame:
    """The frame without the precision that it has for the sake of few rows (`NormalPrior.of_frames`)."""
    whitening = np.asarray(frame.whitening)
    added = np.broadcast_to(of_frames, len(whitening))
    values, vectors = np.linalg.eigh(np.eye(len(whitening)) - (whitening.T * added) @ whitening)
    return frame._replace(whitening=whitening @ (vectors / np.sqrt(np.maximum(values, _LEAST_LEFT))))
