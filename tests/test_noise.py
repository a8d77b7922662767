import copy
import pickle

import jax.numpy as jnp
import mpmath
import numpy as np
import pytest
from scipy import stats

import numpyro_dp.noise
from numpyro_dp.clipping import GRID, ClippedSum, clipped_sum, sensitivity_steps
from numpyro_dp.mechanisms import Gaussian, LogisticBit
from numpyro_dp.noise import (
    GridNoise,
    NoiseSource,
    add_up,
    in_real_units,
    noise_scale,
    release,
    release_bit,
    standard_logistic,
    standard_normal,
)

pytestmark = pytest.mark.optimized


def draw_many(source, count, noise_multiplier, relation="replace_one"):
    high, low = source.draw((count,), Gaussian(noise_multiplier), relation, b"nonce")
    return high.astype(np.int64) * 2**24 + low


def test_standard_normal_is_standard_normal():
    draws = standard_normal(np.frombuffer(NoiseSource(1)._entropy(8 * 10**6, b""), np.uint64))
    # Seed fixed: the test's own error rate is 1e-5.
    assert stats.kstest(draws, "norm").pvalue > 1e-5
    assert abs(draws.mean()) < 5 / 1000
    assert abs(draws.var() - 1) < 5 * np.sqrt(2 / 10**6)


def test_quantiles_are_right_far_into_the_tails():
    """Each word stands for an interval of 2**-64; the draw is its midpoint's quantile, in both tails."""
    for word in (0, 1, 2, 3, 2**20, 2**40 + 1, 2**63, 2**64 - 1):
        with mpmath.workdps(40):
            p = (mpmath.mpf(word >> 1) + 0.5) / mpmath.mpf(2) ** 64
            quantile = -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * p)
        draw = standard_normal(np.array([word], np.uint64))[0]
        assert abs(draw) == pytest.approx(-float(quantile), rel=1e-9, abs=1e-12)
        assert (draw > 0) == bool(word & 1) or draw == 0


def test_tails_reach_where_float32_normals_end():
    """float32 normals stop at 5.42 standard deviations; these go on to 9."""
    extreme = standard_normal(np.array([0, 1], np.uint64))
    assert extreme[0] < -9
    assert extreme[1] > 9
    # The law of |draw| is that of a half normal, cell by cell of width 2**-63: what is beyond the last is negligible.
    assert 2 * stats.norm.sf(extreme[1]) < 2.0**-62


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
@pytest.mark.parametrize("noise_multiplier", [0.7, 20.0, 3000.0])
def test_released_sums_have_the_claimed_law(relation, noise_multiplier):
    """Kolmogorov-Smirnov on released sums; halved noise and the other relation's noise must fail it."""
    total = clipped_sum(lambda row: row[0][0], (jnp.array([0.5, -2.0, 0.25]),), 1.0)
    high, low = NoiseSource(7).draw((20000,), Gaussian(noise_multiplier), relation, b"")
    many = ClippedSum(*(jnp.broadcast_to(part, (20000,)) for part in total))
    released = np.asarray(in_real_units(*release(many, GridNoise(jnp.asarray(high), jnp.asarray(low))), many.bound))
    sensitivity = {"replace_one": 2.0, "add_or_remove_one": 1.0}[relation]

    def p_value(scale):
        return stats.kstest(released, stats.norm(-0.25, scale).cdf).pvalue

    claimed = noise_multiplier * sensitivity
    assert p_value(claimed) > 1e-5
    assert p_value(claimed / 2) < 1e-12
    assert p_value(claimed * 2) < 1e-12
    assert p_value(claimed * 1.05) < 1e-3
    scale = noise_scale(jnp.asarray(1.0), jnp.asarray(noise_multiplier), relation)
    assert float(scale) == pytest.approx(claimed, rel=1e-6)


def test_the_release_is_a_rounded_exact_release():
    """sum + round(noise) = round(sum + noise) on the grid: post-processing of an exact Gaussian mechanism."""
    noise = standard_normal(np.frombuffer(NoiseSource(3)._entropy(8 * 1000, b"nonce"), np.uint64))
    steps = draw_many(NoiseSource(3), 1000, 11.0)
    assert (steps == np.rint(noise * 11.0 * sensitivity_steps("replace_one"))).all()


def test_large_noise_keeps_its_law_in_int32_parts():
    steps = draw_many(NoiseSource(5), 4000, 2.0**25)
    assert abs(steps / (2.0**25 * 2 * GRID)).max() < 9.2
    assert stats.kstest(steps / (2.0**25 * 2 * GRID), "norm").pvalue > 1e-5


def test_noise_multipliers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="noise multiplier must lie"):
        NoiseSource().draw((1,), Gaussian(2.0**26), "replace_one", b"")


def test_fresh_entropy_never_repeats_and_seeds_do():
    assert (draw_many(NoiseSource(), 10, 1.0) != draw_many(NoiseSource(), 10, 1.0)).all()
    source = NoiseSource()
    assert (draw_many(source, 10, 1.0) != draw_many(source, 10, 1.0)).all()
    assert (draw_many(NoiseSource(1), 10, 1.0) == draw_many(NoiseSource(1), 10, 1.0)).all()
    assert (draw_many(NoiseSource(1), 10, 1.0) != draw_many(NoiseSource(2), 10, 1.0)).all()
    first, second = (NoiseSource(1).draw((10,), Gaussian(1.0), "replace_one", nonce) for nonce in (b"a", b"b"))
    assert (first[1] != second[1]).all()


def test_a_source_cannot_be_copied():
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            attempt(NoiseSource(1))


def test_standard_logistic_is_standard_logistic():
    draws = standard_logistic(np.frombuffer(NoiseSource(1)._entropy(8 * 10**6, b""), np.uint64))
    assert stats.kstest(draws, "logistic").pvalue > 1e-5
    assert 45 < standard_logistic(np.array([1], np.uint64))[0] < 46


@pytest.mark.parametrize("threshold", [-1.3, 0.0, 0.4, 30.0])
def test_a_released_bit_has_the_logistic_probability(threshold):
    """Also of a mechanism with half the noise, which must fail."""
    total = clipped_sum(lambda row: row[0][0], (jnp.array([0.05, -0.2, 0.025]),), 0.1)

    def frequency(noise_multiplier):
        high, low = NoiseSource(9).draw((10**5,), LogisticBit(noise_multiplier), "replace_one", b"")
        many = ClippedSum(*(jnp.broadcast_to(part, (10**5,)) for part in total))
        return float(release_bit(many, GridNoise(jnp.asarray(high), jnp.asarray(low)), jnp.asarray(threshold)).mean())

    expected = stats.logistic.sf(threshold + 0.025)  # the clipped sum is 0.05 - 0.1 + 0.025
    error = 5 * np.sqrt(expected * (1 - expected) / 10**5) + 1e-12
    assert abs(frequency(1 / 0.2) - expected) < error  # scale 1 over a sensitivity of 2 * 0.1
    if threshold not in (0.0, 30.0):
        assert abs(frequency(0.5 / 0.2) - expected) > error


def test_sums_over_owners_are_exact():
    rng = np.random.default_rng(0)
    values = rng.integers(-(2**50), 2**50, (300, 4))
    hi, lo = add_up(jnp.asarray(values >> 24, jnp.int32), jnp.asarray(values & (2**24 - 1), jnp.int32))
    assert ((np.asarray(hi, np.int64) << 24) + np.asarray(lo) == values.sum(0)).all()


def test_no_other_module_draws_noise_or_adds_it():
    """P1: one door. Entropy and normal quantiles are used in noise.py only, and limbs are added there only."""
    from pathlib import Path

    package = Path(numpyro_dp.noise.__file__).parent
    for path in package.rglob("*.py"):
        if path.name != "noise.py":
            source = path.read_text()
            for word in ("urandom", "ndtri", "shake_256", "import secrets"):
                assert word not in source, (path, word)
