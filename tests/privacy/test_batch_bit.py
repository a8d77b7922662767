"""The bit of Barker's test on a batch: its exact law as a floating-point program, against what is accounted for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import DPBarker
from numpyro_dp.privacy.clipping import GRID, clipped_moments
from numpyro_dp.privacy.mechanisms import BarkerBatch
from numpyro_dp.privacy.noise import GridNoise, release_batch_bit
from numpyro_dp.privacy.release import batch_bit_bound

NUM_ROWS, VARIANCE = 1000, 2.0


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


@jax.jit
def smallest_noise(rows, bound, thresholds):
    """The smallest noise, in steps of the grid, at which the bit is 1: the bit is monotone in the noise."""
    moments = clipped_moments(lambda row: row[0][0], (rows,), bound)
    weight = NUM_ROWS / len(rows)

    def bit(steps, threshold):
        noise = GridNoise(steps >> 24, steps & (2**24 - 1))
        return release_batch_bit(moments, weight, 1.0, VARIANCE, noise, threshold)  # the largest factor

    def search(threshold):
        def halve(_, ends):
            low, high = ends
            middle = (low + high) // 2
            one = bit(middle, threshold)
            return jnp.where(one, low, middle), jnp.where(one, middle, high)

        return jax.lax.fori_loop(0, 28, halve, (jnp.int32(-9 * GRID), jnp.int32(9 * GRID)))[1]

    return jax.vmap(search)(thresholds)


@pytest.mark.parametrize("size", [2, 50, 1000])
@pytest.mark.parametrize("noise_multiplier", [1.0, 1e2, 1e4])
def test_a_row_moves_the_bit_by_no_more_than_is_accounted_for(size, noise_multiplier):
    """The noise's steps and every rounding included, which matter where a row changes very little."""
    rng = np.random.default_rng(0)
    kernel = DPBarker(model, noise_multiplier_ratio=noise_multiplier, batch_size=size, variance=VARIANCE)
    bound = kernel._row_bound(jnp.float32(noise_multiplier), 1.0, NUM_ROWS)
    shift2, growth = BarkerBatch(noise_multiplier, size, NUM_ROWS, VARIANCE).worst
    thresholds = jnp.asarray(rng.uniform(-3, 3, 300), jnp.float32)
    for others in (np.ones(size), rng.uniform(-1, 1, size)):
        rows = [jnp.asarray(np.append(others[1:], row) * bound, jnp.float32) for row in (1e9, -1e9)]
        first, second = (np.asarray(smallest_noise(r, bound, thresholds)) / GRID for r in rows)
        # Where a change of the mean by m and of the standard deviation by a factor of f put the threshold.
        factor = np.sqrt(1 + growth)
        allowed = np.sqrt(shift2) + (factor - 1) * np.abs(first)
        assert np.all(np.abs(first - second) <= allowed * (1 + 1e-9))


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("weight", [0.5, 3.0])
def test_the_noise_and_the_batch_have_the_stated_variance_together(weight, factor):
    """`w sum r + sqrt(variance - w^2 factor sum (r - mean)^2) noise > threshold`, computed in double precision."""
    rng = np.random.default_rng(1)
    bound = 0.25
    rows = np.round(rng.uniform(-bound, bound, 40) * 2**15 / bound) * bound / 2**15
    moments = clipped_moments(lambda row: row[0][0], (jnp.asarray(rows, jnp.float32),), jnp.float32(bound))
    spread = weight**2 * factor * np.sum((rows - rows.mean()) ** 2)
    variance = 1.5 * spread
    steps = rng.integers(-3 * GRID, 3 * GRID, 500)
    noise = GridNoise(jnp.asarray(steps >> 24, jnp.int32), jnp.asarray(steps & (2**24 - 1), jnp.int32))
    middle = weight * rows.sum() + np.sqrt(variance - spread) * steps / GRID
    for distance, expected in ((-1e-4, True), (1e-4, False)):
        bits = release_batch_bit(moments, weight, factor, variance, noise, jnp.asarray(middle + distance, jnp.float32))
        assert (np.asarray(bits) == expected).all()
    none_left = release_batch_bit(moments, weight, factor, spread / 2, noise, weight * rows.sum() + 1e-4)
    assert not np.asarray(none_left).any()
    none_left = release_batch_bit(moments, weight, factor, spread / 2, noise, weight * rows.sum() - 1e-4)
    assert np.asarray(none_left).all()


def test_the_bound_of_a_row_leaves_room_for_rounding_of_sum_and_noise():
    size, multiplier, weight, variance = 1000, 2.0, 0.5, 2.0
    bound = batch_bit_bound(BarkerBatch(multiplier, size, 10_000, variance), jnp.float32(multiplier), weight)
    room = 1 / (multiplier * weight * math.sqrt(size)) / float(bound) - 1
    expected = 8 * size * 2.0**-23 + 40 * 2.0**-23 * multiplier * math.sqrt(variance * size)
    assert room == pytest.approx(expected, rel=1e-3)
