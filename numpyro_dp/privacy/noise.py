"""The one place that draws privacy noise, and the only way from private sums to released numbers.

Noise is drawn on the host, from 64-bit words of the operating system's generator, in whole steps of the grid of the sum
that it hides: it is a normal number (for accept bits a logistic one), rounded to whole steps, and each integer has
exactly the probability that this law gives it (`numpyro_dp.privacy.exact_sampling`). A clipped sum is a whole number of
steps, so that rounding the *noise* equals rounding ``sum + noise``: what is released is a post-processed Gaussian
release of a real sum, with no floating-point trace of the sum or of the noise in it (Mironov 2012).

Of a sum only `NoisySteps` leave: one integer for each number, in limbs that say nothing else, since `release`
normalises them. What is made of them afterwards (`in_real_units`) is a function of that integer and of public numbers
(P16). Of an accept test one bit leaves.

No key exists from which the noise could be drawn again. The exception is `NoiseSource` with a seed, for runs that must
be reproducible; its guarantee holds only while nobody learns that seed, and if it is used for one run on one table.
Batches are drawn from the same source.

Proof: docs/proofs/noise.md.
"""

import hashlib
import itertools
import math
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.privacy.clipping import GRID, LIMB, ClippedMoments, ClippedSum, normalize, sensitivity_steps
from numpyro_dp.privacy.exact_sampling import LOGISTIC, NORMAL, Words, rounded
from numpyro_dp.privacy.mechanisms import BarkerBatch, LogisticBit, Mechanism, bounds_per_row

MAX_NOISE_MULTIPLIER = 2.0**25
"""Above this the integers overflow. A budget that needs so much noise per release is hopeless anyway."""


class GridNoise(NamedTuple):
    """Noise in whole steps of the grid, ``hi * 2**24 + lo``: what `NoiseSource.draw` gave, as a `Draw` carries it."""

    hi: jax.Array
    lo: jax.Array


class NoisySteps(NamedTuple):
    """A sum with its noise, in whole steps of the grid: the integer ``hi * 2**24 + lo`` with ``0 <= lo < 2**24``.

    Made by `release` and `add_up`, and of what other owners' were. An integer has one such form, so that the limbs tell
    nothing but the integer: how the sum and the noise were split, and whether a limb of theirs carried, is gone.
    """

    hi: jax.Array
    lo: jax.Array


class NoiseSource:
    """Draws noise for clipped sums, Gaussian or logistic, on the host.

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
        law = LOGISTIC if isinstance(mechanism, LogisticBit) else NORMAL
        if isinstance(mechanism, BarkerBatch):  # its standard deviation depends on the batch, see `release_batch_bit`
            scale = GRID
        else:  # rounded up: never less noise than was planned
            scale = math.ceil(mechanism.noise_multiplier * sensitivity_steps(neighboring_relation))
        steps = rounded(law, scale, math.prod(shape), self.words(nonce)).reshape(shape)
        # Beyond 2**55 the high part wraps around, as the released integer then does.
        return np.stack([(steps >> 24).astype(np.int32), (steps & (LIMB - 1)).astype(np.int32)])

    def words(self, nonce: bytes) -> Words:
        """Random 64-bit words, as many as are asked for.

        :param nonce: distinguishes these words from all others; ignored with the operating system's entropy.
        """
        if self._seed is None:
            return lambda count: np.frombuffer(os.urandom(8 * count), np.uint64)
        seed, numbers = str(self._seed).encode(), itertools.count()
        head = len(seed).to_bytes(8, "big") + seed + len(nonce).to_bytes(8, "big") + nonce

        def derived(count: int) -> np.ndarray:
            block = next(numbers).to_bytes(8, "big")
            return np.frombuffer(hashlib.shake_256(head + block).digest(8 * count), "<u8").astype(np.uint64)

        return derived

    def __getstate__(self):
        raise TypeError("a noise source cannot be pickled or copied: whoever holds its seed can remove the noise")


def release(total: ClippedSum, noise: GridNoise | None) -> NoisySteps:
    """``total + noise`` in steps of the grid: one exact integer for each number.

    A Gaussian mechanism with the noise multiplier that `noise` was drawn with.

    :param noise: None only in runs that are declared not private.
    """
    hi, lo = (total.hi, total.lo) if noise is None else (total.hi + noise.hi, total.lo + noise.lo)
    return NoisySteps(hi + (lo >> 24), lo & (LIMB - 1))


def add_up(steps: NoisySteps) -> NoisySteps:
    """Exact sum over the leading axis.

    :raises ValueError: if it is longer than 2**19, beyond which 32 bits would not do.
    """
    if len(steps.lo) > 2**19:
        raise ValueError(f"{len(steps.lo)} noisy sums cannot be added up: there may be up to 2**19")
    hi, lo = normalize(jnp.sum(steps.lo >> 12, 0, jnp.int32), jnp.sum(steps.lo & 4095, 0, jnp.int32))
    return NoisySteps(jnp.sum(steps.hi, 0, jnp.int32) + hi, lo)


def in_real_units(steps: NoisySteps, bound: jax.Array) -> jax.Array:
    """What was released, in the units of the clip bound; rounded once, as a function of the integer."""
    return (steps.hi.astype(bound.dtype) * LIMB + steps.lo.astype(bound.dtype)) * (bound / GRID)


def release_bit(total: ClippedSum, noise: GridNoise, threshold: jax.Array) -> jax.Array:
    """Whether ``total + noise > threshold``, and nothing else about them; see `LogisticBit`.

    The comparison is one of integers, so the bit is that of exact logistic noise and of a threshold within one step of
    the given one.
    """
    noisy = release(total, noise)
    steps = jnp.clip(threshold / (total.bound / GRID), -(2.0**53), 2.0**53)
    steps = jnp.where(total.bound > 0, steps, 0)
    whole = jnp.floor(steps / LIMB)
    part = jnp.floor(steps - whole * LIMB).astype(jnp.int32)
    whole = whole.astype(jnp.int32)
    return (noisy.hi > whole) | ((noisy.hi == whole) & (noisy.lo > part))


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
    normal = in_real_units(NoisySteps(noise.hi, noise.lo), jnp.ones_like(unit))
    return weight * unit * moments.first + scale * normal > threshold


def noise_scale(bound: jax.Array | float, noise_multiplier: jax.Array, neighboring_relation: str) -> jax.Array:
    """Standard deviation, in real units, of the noise in a release of a sum clipped at `bound`."""
    return noise_multiplier * bounds_per_row(neighboring_relation) * jnp.asarray(bound)
