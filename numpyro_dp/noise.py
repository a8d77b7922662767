"""The one place that draws privacy noise, and the only way from private sums to released numbers.

Noise is drawn on the host, in float64, from 64-bit words of the operating system's generator, and rounded to the grid
of the sum that it hides. A clipped sum is a whole number of steps, so rounding the *noise* to whole steps equals
rounding ``sum + noise``: what is released is a post-processed exact Gaussian release, with no floating-point trace of
the sum in its last bits (Mironov 2012). Each normal is the inverse distribution function at one of 2**64 equidistant
points, so its tail reaches 9 standard deviations on either side, in float32 programs too; the distance from the normal
law is below 1e-18 per draw.

No key exists from which the noise could be drawn again. The exception is `NoiseSource` with a seed, for runs that must
be reproducible; its guarantee holds only while nobody learns that seed, and if it is used for one run on one table.
Batches are drawn from the same source.
"""

import hashlib
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import ndtri

from numpyro_dp.clipping import GRID, ClippedMoments, ClippedSum, sensitivity_steps
from numpyro_dp.mechanisms import BarkerBatch, LogisticBit, Mechanism

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

    def draw(self, shape: tuple[int, ...], mechanism: Mechanism, neighboring_relation: str, nonce: bytes) -> np.ndarray:
        """Noise for sums of `shape`, of the law and the scale that make their release the `mechanism`.

        :param nonce: distinguishes this draw from every other one; ignored with the operating system's entropy.
        :return: int32 array of shape ``(2, *shape)``: high and low part, as in `GridNoise`.
        """
        if not 0 <= mechanism.noise_multiplier <= MAX_NOISE_MULTIPLIER:
            raise ValueError(
                f"noise multiplier must lie in [0, {MAX_NOISE_MULTIPLIER:.3g}], got {mechanism.noise_multiplier}"
            )
        words = np.frombuffer(self._entropy(8 * int(np.prod(shape)), nonce), np.uint64)
        law = standard_logistic if isinstance(mechanism, LogisticBit) else standard_normal
        scale = mechanism.noise_multiplier * sensitivity_steps(neighboring_relation)
        if isinstance(mechanism, BarkerBatch):  # its standard deviation depends on the batch, see `batch_bit`
            scale = GRID
        steps = np.rint(scale * law(words)).astype(np.int64).reshape(shape)
        return np.stack([steps >> 24, steps & (_LIMB - 1)]).astype(np.int32)

    def generator(self, nonce: bytes) -> np.random.Generator:
        """A freshly keyed generator for one batch. Its output is secret and never released."""
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._entropy(16, nonce), "big")))

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


def standard_logistic(words: np.ndarray) -> np.ndarray:
    """One standard logistic per 64-bit word, as `standard_normal`; up to 44 on either side."""
    tail = ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64
    magnitude = np.log1p(-tail) - np.log(tail)
    return np.where(words & np.uint64(1), magnitude, -magnitude)


def release(total: ClippedSum, noise: GridNoise | None) -> tuple[jax.Array, jax.Array]:
    """``total + noise`` in steps of the grid, ``hi * 2**24 + lo``: exact integers.

    A Gaussian mechanism with the noise multiplier that `noise` was drawn with.

    :param noise: None only in runs that are declared not private.
    """
    return (total.hi, total.lo) if noise is None else (total.hi + noise.hi, total.lo + noise.lo)


def add_up(hi: jax.Array, lo: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exact sum over the leading axis of released numbers in steps, each with ``0 <= lo < 2**25``."""
    low = jnp.sum(lo & 4095, 0, jnp.int32)
    high = jnp.sum(lo >> 12, 0, jnp.int32) + (low >> 12)
    return jnp.sum(hi, 0, jnp.int32) + (high >> 12), ((high & 4095) << 12) + (low & 4095)


def in_real_units(hi: jax.Array, lo: jax.Array, bound: jax.Array) -> jax.Array:
    """What was released, in the units of the clip bound."""
    return (hi.astype(bound.dtype) * _LIMB + lo.astype(bound.dtype)) * (bound / GRID)


def release_bit(total: ClippedSum, noise: GridNoise, threshold: jax.Array) -> jax.Array:
    """Whether ``total + noise > threshold``, and nothing else about them; see `LogisticBit`.

    The comparison is one of integers, so the bit is that of exact logistic noise and of a threshold within one step of
    the given one.
    """
    hi, lo = release(total, noise)
    steps = jnp.clip(threshold / (total.bound / GRID), -(2.0**53), 2.0**53)
    steps = jnp.where(total.bound > 0, steps, 0)
    whole = jnp.floor(steps / _LIMB)
    part = jnp.floor(steps - whole * _LIMB).astype(jnp.int32)
    hi, lo = hi + (lo >> 24), lo & (_LIMB - 1)
    whole = whole.astype(jnp.int32)
    return (hi > whole) | ((hi == whole) & (lo > part))


def release_batch_bit(
    moments: ClippedMoments, weight: float, factor: float, variance: float, noise: GridNoise, threshold: jax.Array
) -> jax.Array:
    """Whether ``w sum_i r_i + N(0, variance - v) > threshold``, ``v = w^2 factor sum_i (r_i - mean)^2``.

    :param weight: w.
    :param factor: at most 1.

    The batch's own variance counts towards `variance`, so that the total is the same for every batch (Heikkilä et al.
    2019). The noise's standard deviation depends on the rows; therefore nothing but the bit may leave this function.
    See `BarkerBatch` for what the bit costs.
    """
    unit = moments.bound / 2**15
    spread = moments.second - moments.first * (moments.first / moments.size)
    scale = jnp.sqrt(jnp.maximum(variance - weight**2 * factor * unit**2 * spread, 0))
    normal = in_real_units(noise.hi, noise.lo, jnp.ones_like(unit))
    return weight * unit * moments.first + scale * normal > threshold


def noise_scale(bound: jax.Array | float, noise_multiplier: jax.Array, neighboring_relation: str) -> jax.Array:
    """Standard deviation, in real units, of the noise in a release of a sum clipped at `bound`."""
    return noise_multiplier * (sensitivity_steps(neighboring_relation) / GRID) * jnp.asarray(bound)
