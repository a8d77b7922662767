"""The one place that draws privacy noise, and the only way from private sums to released numbers.

Noise is drawn on the host, in float64, from 64-bit words of the operating system's generator, and rounded to the grid
of the sum that it hides. A clipped sum is a whole number of steps, so rounding the *noise* to whole steps equals
rounding ``sum + noise``: what is released is a post-processed exact Gaussian release, with no floating-point trace of
the sum in its last bits (Mironov 2012). Each normal is the inverse distribution function at one of 2**64 equidistant
points, so its tail reaches 9 standard deviations on either side, in float32 programs too; the distance from the normal
law is below 1e-18 per draw.

No key exists from which the noise could be drawn again. The exception is `NoiseSource` with a seed, for runs that must
be reproducible; its guarantee holds only while nobody learns that seed, and if it is used for one run on one table.
"""

import hashlib
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtri

from numpyro_dp.clipping import GRID, ClippedSum, UnclippedSum, sensitivity_steps

_LIMB = 2**24
MAX_NOISE_MULTIPLIER = 2.0**25
"""Above this the integers overflow. A budget that needs so much noise per release is hopeless anyway."""


class GridNoise(NamedTuple):
    """Gaussian noise in whole steps of the grid, ``hi * 2**24 + lo``; made by `NoiseSource` only."""

    hi: jax.Array
    lo: jax.Array


class NoiseSource:
    """Draws Gaussian noise for clipped sums, on the host.

    :param seed: None for the operating system's entropy (the default). Otherwise a secret from which the noise is
        derived (SHAKE-256 of the seed and of a nonce that never repeats within a run), so that a run can be repeated.
    """

    def __init__(self, seed: int | None = None):
        self._seed = seed

    @property
    def reproducible(self) -> bool:
        return self._seed is not None

    def draw(
        self, shape: tuple[int, ...], noise_multiplier: float, neighboring_relation: str, nonce: bytes
    ) -> np.ndarray:
        """Noise for one sum of `shape`.

        :param noise_multiplier: standard deviation over L2 sensitivity.
        :param nonce: distinguishes this draw from every other one; ignored with the operating system's entropy.
        :return: int32 array of shape ``(2, *shape)``: high and low part, as in `GridNoise`.
        """
        if not 0 <= noise_multiplier <= MAX_NOISE_MULTIPLIER:
            raise ValueError(f"noise multiplier must lie in [0, {MAX_NOISE_MULTIPLIER:.3g}], got {noise_multiplier}")
        words = np.frombuffer(self._entropy(8 * int(np.prod(shape)), nonce), np.uint64)
        scale = noise_multiplier * sensitivity_steps(neighboring_relation)
        steps = np.rint(scale * standard_normal(words)).astype(np.int64).reshape(shape)
        return np.stack([steps >> 24, steps & (_LIMB - 1)]).astype(np.int32)

    def _entropy(self, size: int, nonce: bytes) -> bytes:
        if self._seed is None:
            return os.urandom(size)
        seed = str(self._seed).encode()
        return hashlib.shake_256(len(seed).to_bytes(8, "big") + seed + nonce).digest(size)

    def __getstate__(self):
        raise TypeError("a noise source cannot be pickled or copied: whoever holds its seed can remove the noise")


def standard_normal(words: np.ndarray) -> np.ndarray:
    """One standard normal per 64-bit word: a sign, and the quantile at ``(k + 1/2) / 2**64`` for the other 63 bits.

    Going through the lower tail keeps full precision there: float64 resolves probabilities near 0, not near 1.
    """
    magnitude = -ndtri(((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64)
    return np.where(words & np.uint64(1), magnitude, -magnitude)


def release(total: ClippedSum | UnclippedSum, noise: GridNoise | None) -> jax.Array:
    """``total + noise`` in real units: a Gaussian mechanism with the noise multiplier that `noise` was drawn with.

    :param noise: None only in runs that are declared not private.
    """
    if isinstance(total, UnclippedSum):
        if noise is not None:
            raise TypeError("a sum without a clip bound has no sensitivity: noise cannot make it private")
        return total.value
    hi, lo = total.hi, total.lo
    if noise is not None:
        hi, lo = hi + noise.hi, lo + noise.lo
    dtype = total.bound.dtype
    step = total.bound / GRID
    return (hi.astype(dtype) * _LIMB + lo.astype(dtype)) * step


def noise_scale(bound: jax.Array | float, noise_multiplier: jax.Array, neighboring_relation: str) -> jax.Array:
    """Standard deviation, in real units, of the noise in a release of a sum clipped at `bound`."""
    return noise_multiplier * (sensitivity_steps(neighboring_relation) / GRID) * jnp.asarray(bound)
