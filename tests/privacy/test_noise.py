import copy
import hashlib
import math
import pickle
import re
import types

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import numpyro_dp.privacy.noise
from numpyro_dp.privacy.clipping import GRID, ClippedSum, clipped_sum, sensitivity_steps
from numpyro_dp.privacy.exact_sampling import NORMAL, rounded
from numpyro_dp.privacy.mechanisms import Gaussian, LogisticBit
from numpyro_dp.privacy.noise import (
    GridNoise,
    NoiseSource,
    NoisySteps,
    add_up,
    in_real_units,
    noise_scale,
    release,
    release_bit,
)
from numpyro_dp.tools.sums import release_sum

pytestmark = pytest.mark.optimized


def draw_many(source, count, noise_multiplier, relation="replace_one"):
    high, low = source.draw((count,), Gaussian(noise_multiplier), relation, b"nonce")
    return high.astype(np.int64) * 2**24 + low


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
@pytest.mark.parametrize("noise_multiplier", [0.7, 20.0, 3000.0])
def test_released_sums_have_the_claimed_law(relation, noise_multiplier):
    """Kolmogorov-Smirnov on released sums; halved noise and the other relation's noise must fail it."""
    total = clipped_sum(lambda row: row[0][0], (jnp.array([0.5, -2.0, 0.25]),), 1.0)
    high, low = NoiseSource(7).draw((20000,), Gaussian(noise_multiplier), relation, b"")
    many = ClippedSum(*(jnp.broadcast_to(part, (20000,)) for part in total))
    released = np.asarray(in_real_units(release(many, GridNoise(jnp.asarray(high), jnp.asarray(low))), many.bound))
    sensitivity = {"replace_one": 2.0, "add_or_remove_one": 1.0}[relation]

    def p_value(scale):
        return stats.kstest(released, stats.norm(-0.25, scale).cdf).pvalue

    claimed = noise_multiplier * sensitivity
    assert p_value(claimed) > 1e-5
    assert p_value(claimed / 2) < 1e-12
    assert p_value(claimed * 2) < 1e-12
    assert p_value(claimed * 1.1) < 1e-6
    for bound in (1.0, 0.25):
        scale = noise_scale(jnp.asarray(bound), jnp.asarray(noise_multiplier), relation)
        assert float(scale) == pytest.approx(claimed * bound, rel=1e-6)


def test_noise_is_that_of_a_rounded_normal_number_with_no_less_than_the_planned_steps():
    """sum + round(noise) = round(sum + noise) on the grid: post-processing of an exact Gaussian mechanism."""
    for multiplier in (11.0, 1e-3, 2.0**25):
        planned = multiplier * sensitivity_steps("replace_one")
        expected = rounded(NORMAL, math.ceil(planned), 1000, NoiseSource(3).words(b"nonce"))
        assert (draw_many(NoiseSource(3), 1000, multiplier) == expected).all()


def test_large_noise_keeps_its_law_in_int32_parts():
    steps = draw_many(NoiseSource(5), 4000, 2.0**25)
    assert stats.kstest(steps / (2.0**25 * 2 * GRID), "norm").pvalue > 1e-5


def _as_limbs(values, split=0):
    """Integers in limbs, of which the lower has `split` times 2**24 more than it need have."""
    return jnp.asarray((values >> 24) - split, jnp.int32), jnp.asarray(
        (values & (2**24 - 1)) + (split << 24), jnp.int32
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_released_is_a_function_of_one_integer(dtype, x64):
    """P16. 0.1.0 did not normalise: with these totals, of which the lower limb carries, float32 numbers were others."""
    rng = np.random.default_rng(0)
    noisy = rng.integers(-(2**50), 2**50, 20_000)
    noisy[:5000] %= 2**27
    bound, images = jnp.asarray(0.7, dtype), []
    for split_sum, split_noise, share in ((0, 0, 1.0), (1, 0, 0.3), (0, 1, 0.7), (-1, 1, 0.5), (3, 2, 0.01)):
        sums = (noisy * share).astype(np.int64) + rng.integers(-(2**24), 2**24, noisy.shape)
        total = ClippedSum(*_as_limbs(sums, split_sum), bound)
        steps = release(total, GridNoise(*_as_limbs(noisy - sums, split_noise)))
        assert ((np.asarray(steps.hi, np.int64) << 24) + np.asarray(steps.lo) == noisy).all()
        assert ((steps.lo >= 0) & (steps.lo < 2**24)).all()
        images.append(np.asarray(in_real_units(steps, bound)))
        assert images[-1].dtype == dtype
    for image in images[1:]:
        assert image.tobytes() == images[0].tobytes()


def test_neighbouring_sums_with_the_same_noisy_total_have_the_same_outputs():
    """The exact set of outputs: every noisy total, whichever of two neighbouring sums the noise was added to."""
    bound = jnp.asarray(1.0)
    totals = np.concatenate([np.arange(2**24 - 300, 2**24 + 300), np.arange(-300, 300), 3 * 2**24 + np.arange(300)])
    outputs = []
    for secret in (0, -1, 2**23, 2**24 - 1, -(2**24)):
        total = ClippedSum(*_as_limbs(np.full_like(totals, secret)), bound)
        steps = release(total, GridNoise(*_as_limbs(totals - secret)))
        outputs.append(np.asarray(in_real_units(steps, bound)))
    for other in outputs[1:]:
        assert other.tobytes() == outputs[0].tobytes()


def test_one_call_does_not_tell_a_table_from_its_neighbour():
    """The attack on 0.1.0: of 200 numbers of the one table about 20 were odd multiples of 2**-23, of the other none.

    Below 2**24 steps float32 has all integers, and half of them are odd, whatever the table.
    """
    table = np.zeros((64, 1000), np.float32)
    neighbor = table.copy()
    neighbor[0] = -(2.0**-23)
    for rows in (table, neighbor):
        released = release_sum(lambda r: r, rows, bound=1.0, eps=1.0, delta=1e-6)
        steps = np.asarray(released.value, float) * 2**23
        near = steps[abs(steps) < 2**24]
        assert len(near) > 60
        assert abs((near % 2).mean() - 0.5) < 5.5 * 0.5 / np.sqrt(len(near))


def test_no_noise_is_a_noise_multiplier_of_zero():
    assert (draw_many(NoiseSource(), 100, 0.0) == 0).all()


def test_noise_multipliers_out_of_range_are_refused():
    with pytest.raises(ValueError, match="noise multiplier must lie"):
        NoiseSource().draw((1,), Gaussian(2.0**26), "replace_one", b"")
    with pytest.raises(ValueError, match="noise multiplier must lie"):  # it would be rounded up to none
        NoiseSource().draw((1,), types.SimpleNamespace(noise_multiplier=-1e-9), "replace_one", b"")


def test_fresh_entropy_never_repeats_and_seeds_do():
    assert NoiseSource(0).reproducible
    assert not NoiseSource().reproducible
    assert (draw_many(NoiseSource(), 10, 1.0) != draw_many(NoiseSource(), 10, 1.0)).all()
    source = NoiseSource()
    assert (draw_many(source, 10, 1.0) != draw_many(source, 10, 1.0)).all()
    assert (draw_many(NoiseSource(1), 10, 1.0) == draw_many(NoiseSource(1), 10, 1.0)).all()
    assert (draw_many(NoiseSource(1), 10, 1.0) != draw_many(NoiseSource(2), 10, 1.0)).all()
    first, second = (NoiseSource(1).draw((10,), Gaussian(1.0), "replace_one", nonce) for nonce in (b"a", b"b"))
    assert (first[1] != second[1]).all()


def test_words_are_as_many_as_asked_for_and_those_of_a_seed_are_hashed_from_all_that_tells_them_apart():
    assert [len(NoiseSource().words(b"")(count)) for count in (0, 1, 5, 800)] == [0, 1, 5, 800]
    words, parts = NoiseSource(5).words(b"nonce"), ((1, b"5"), (5, b"nonce"))
    head = b"".join(length.to_bytes(8, "big") + part for length, part in parts)
    for block, count in enumerate((3, 1, 40)):  # no seed and nonce are another seed and nonce put together
        expected = hashlib.shake_256(head + block.to_bytes(8, "big")).digest(8 * count)
        assert words(count).astype("<u8").tobytes() == expected


def test_a_source_cannot_be_copied():
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            attempt(NoiseSource(1))


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_released_bit_compares_integers(dtype, x64):
    """`sum + noise > floor(threshold)` in steps, whatever the limbs; a bound of 0 says nothing of the threshold."""
    rng = np.random.default_rng(0)
    noisy = np.concatenate([rng.integers(-(2**50), 2**50, 2000), rng.integers(-(2**27), 2**27, 4000)])
    noisy[4:9] = [-2, -1, 0, 1, 2]
    noisy[:4] = 2**53 - 2**31, -(2**53) + 2**31, 2**52 + 1, -(2**52) - 1  # at the ends to which a threshold is clipped
    near = noisy + rng.choice([-(2**24), -2, -1, 0, 1, 2, 2**24], noisy.shape)
    thresholds = (near / GRID).astype(dtype) * rng.choice([1, 1, 1, -1, 0.5], noisy.shape).astype(dtype)
    thresholds[:4] = np.inf, -np.inf, 3e38, -3e38
    sums = rng.integers(-(2**30), 2**30, noisy.shape)
    noise = GridNoise(*_as_limbs(noisy - sums, 1))
    for bound in (1.0, 2.0**-9):  # steps of a power of 2: nothing is rounded here
        total = ClippedSum(*_as_limbs(sums), jnp.asarray(bound, dtype))
        found = release_bit(total, noise, jnp.asarray(thresholds * np.asarray(bound, dtype)))
        floors = np.floor(np.clip(thresholds.astype(float) * GRID, -(2.0**53), 2.0**53)).astype(np.int64)
        assert (np.asarray(found) == (noisy > floors)).all()
    nothing = release_bit(ClippedSum(*_as_limbs(sums), jnp.zeros((), dtype)), noise, jnp.asarray(thresholds))
    assert (np.asarray(nothing) == (noisy > 0)).all()


def test_sums_over_owners_are_exact():
    rng = np.random.default_rng(0)
    values = rng.integers(-(2**50), 2**50, (300, 4))
    hi, lo = add_up(NoisySteps(*_as_limbs(values)))
    assert ((lo >= 0) & (lo < 2**24)).all()
    assert ((np.asarray(hi, np.int64) << 24) + np.asarray(lo) == values.sum(0)).all()


def test_as_many_owners_as_add_up_exactly_and_no_more():
    most = NoisySteps(jnp.zeros(2**19, jnp.int32), jnp.full(2**19, 2**24 - 1, jnp.int32))
    total = add_up(most)
    assert int(total.hi) * 2**24 + int(total.lo) == 2**19 * (2**24 - 1)
    with pytest.raises(ValueError, match="524289 noisy sums cannot be added up"):
        add_up(NoisySteps(*(jnp.zeros(2**19 + 1, jnp.int32) for _ in range(2))))


def test_no_other_module_draws_noise_or_adds_it():
    """P1: one door, by the words of the source. Two files use the system's entropy and exact laws, and noisy sums are
    made where the vault answers. In the core nobody draws by JAX or NumPy but batches, and for public numbers."""
    from pathlib import Path

    package = Path(numpyro_dp.__file__).parent
    core, drawing = package / "privacy", ("urandom", "ndtri", "shake_256", "import secrets", "rounded(")
    allowed = {word: {core / "noise.py", core / "exact_sampling.py"} for word in drawing}
    allowed |= {"NoisySteps(": {core / "noise.py", core / "release.py"}}
    allowed |= {"GridNoise(": {core / "noise.py", core / "draws.py"}}
    for path in package.rglob("*.py"):
        found = {word for word in allowed if word in path.read_text() and path not in allowed[word]}
        assert not found, (path, found)
        if path.parent == core:
            drawn = set(re.findall(r"\brandom\.(\w+)", path.read_text()))
            public = {"batches.py": {"Generator", "Philox"}, "isolation.py": {"default_rng"}}.get(path.name, set())
            assert drawn <= {"key", "key_data", "wrap_key_data"} | public, (path, drawn)
