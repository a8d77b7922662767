"""P7: batches are what their mechanism says, whatever the order of the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_dp.privacy.batches import OVERFLOW, SMALLEST_RATE, AllRows, FixedBatches, PoissonBatches, as_batches
from numpyro_dp.privacy.clipping import (
    GRID,
    OwnerIndex,
    clipped_moments,
    clipped_sum,
    penalized_sum,
    scalar_steps,
    sensitivity_steps,
)
from numpyro_dp.privacy.mechanisms import FixedBatchGaussian, Gaussian, PoissonGaussian, TruncatedPoissonGaussian
from numpyro_dp.privacy.noise import NoiseSource

N = 50


def draw_many(batches, count=8_000, num_rows=N, seed=0):
    """0/1 matrix: which rows are in which batch. Fixed seed: with 5 sigma or 1e-5 the error is that of the seed."""
    words = NoiseSource(seed).words(b"")
    drawn = np.zeros((count, num_rows), np.int8)
    for k in range(count):
        indices, size = batches.draw(words, num_rows)
        assert indices.shape == (batches.capacity(num_rows),)
        assert len(set(indices[:size])) == size
        drawn[k, indices[:size]] = 1
    return drawn


def test_poisson_batches_are_independent_coin_flips():
    drawn = draw_many(PoissonBatches(rate=0.2))
    sizes = drawn.sum(1)
    expected = stats.binom.pmf(np.arange(N + 1), N, 0.2) * len(sizes)
    cells = expected > 5
    observed = np.bincount(sizes, minlength=N + 1)[cells]
    assert stats.chisquare(observed, expected[cells] * observed.sum() / expected[cells].sum()).pvalue > 1e-5
    error = np.sqrt(0.2 * 0.8 / len(drawn))
    assert abs(drawn.mean(0) - 0.2).max() < 5 * error
    correlations = np.corrcoef(drawn.T) - np.eye(N)
    assert abs(correlations).max() < 5.5 / np.sqrt(len(drawn))


def test_truncation_takes_a_random_subset_whatever_the_order_of_the_rows():
    """A truncation in row order would never see the last rows."""
    drawn = draw_many(PoissonBatches(rate=0.5, max_batch_size=20))
    assert drawn.sum(1).max() == 20
    rate = PoissonBatches(rate=0.5, max_batch_size=20).inclusion(N)
    sizes = np.arange(N + 1)
    assert rate == pytest.approx((stats.binom.pmf(sizes, N, 0.5) * np.minimum(sizes, 20)).sum() / N, rel=1e-12)
    assert abs(drawn.mean(0) - rate).max() < 5 * np.sqrt(rate * (1 - rate) / len(drawn))


def test_fixed_batches_are_uniform_without_replacement():
    drawn = draw_many(FixedBatches(10))
    assert (drawn.sum(1) == 10).all()
    assert abs(drawn.mean(0) - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / len(drawn))
    pairs = (drawn.T.astype(float) @ drawn / len(drawn))[np.triu_indices(N, 1)]
    together = 10 * 9 / (N * (N - 1))
    assert abs(pairs - together).max() < 5 * np.sqrt(together / len(drawn))


@pytest.mark.parametrize("num_rows", [1, 20, 10**4, 10**7])
def test_the_buffer_overflows_as_rarely_as_is_accounted_for(num_rows):
    batches = PoissonBatches(rate=min(1.0, 100 / num_rows) * 0.9)
    capacity = batches.capacity(num_rows)
    assert stats.binom.sf(capacity, num_rows, batches.rate) <= OVERFLOW
    assert capacity == 1 or stats.binom.sf(capacity - 1, num_rows, batches.rate) > OVERFLOW
    assert capacity <= min(num_rows, 90 + 16 * np.sqrt(90) + 40)


def test_batches_may_be_empty():
    indices, size = PoissonBatches(rate=1e-12).draw(NoiseSource(0).words(b""), N)
    assert size == 0
    total = clipped_sum(
        lambda row: row[0][0], (jnp.ones(N)[jnp.asarray(indices)],), 1.0, size=jnp.asarray(size, jnp.int32)
    )
    assert (int(total.hi), int(total.lo)) == (0, 0)


def test_rates_of_lower_precision_are_accounted_for_in_full_precision():
    assert type(PoissonBatches(rate=np.float32(0.1)).mechanism(1.0, N).rate) is float
    assert type(PoissonBatches(np.float16(7)).probability(N)) is float
    assert type(PoissonBatches(7, max_batch_size=np.int16(9)).max_batch_size) is int


def test_every_batch_names_its_mechanism():
    assert as_batches(None) == AllRows()
    assert as_batches(None).mechanism(2.0, N) == Gaussian(2.0)
    assert as_batches(10).mechanism(2.0, N) == PoissonGaussian(2.0, 0.2, OVERFLOW)
    assert PoissonBatches(rate=0.3).mechanism(2.0, N) == PoissonGaussian(2.0, 0.3, OVERFLOW)
    assert PoissonBatches(10, max_batch_size=12).mechanism(2.0, N) == TruncatedPoissonGaussian(2.0, 0.2, N, 12)
    assert PoissonBatches(10, max_batch_size=N).mechanism(2.0, N) == PoissonGaussian(2.0, 0.2, OVERFLOW)
    assert PoissonBatches(rate=1.0).mechanism(2.0, N) == Gaussian(2.0)
    assert FixedBatches(10).mechanism(2.0, N) == FixedBatchGaussian(2.0, 10, N)


@pytest.mark.parametrize(
    "batches",
    [
        *(PoissonBatches(10), PoissonBatches(rate=0.3), PoissonBatches(10, max_batch_size=12)),
        *(PoissonBatches(10, max_batch_size=N), FixedBatches(10)),
    ],
    ids=repr,
)
def test_a_batch_times_its_weight_estimates_the_sum_over_all_rows(batches):
    """By the law of the batch's size: as many rows of 1 as it has, times the weight, are N on average."""
    sizes = np.arange(N + 1)
    if isinstance(batches, PoissonBatches):
        law = stats.binom.pmf(sizes, N, batches.probability(N))
        sizes = np.minimum(sizes, batches.max_batch_size or N)
    else:
        law = sizes == batches.capacity(N)
    assert batches.weight(N) * (law @ sizes) == pytest.approx(N, rel=1e-9)


@pytest.mark.parametrize(
    ("make", "relation", "message"),
    [
        (lambda: PoissonBatches(10), "add_or_remove_one", r"n is private.*PoissonBatches\(rate="),
        (lambda: PoissonBatches(rate=0.1, max_batch_size=9), "add_or_remove_one", "leave max_batch_size out"),
        (lambda: FixedBatches(10), "add_or_remove_one", "need a public number of rows"),
        (lambda: PoissonBatches(60), "replace_one", "only 50 rows"),
        (lambda: FixedBatches(60), "replace_one", "only 50 rows"),
        (lambda: PoissonBatches(1e-15), "replace_one", "batch_size is 1e-15 of 50 rows, a rate below 1e-15"),
    ],
)
def test_batches_that_cannot_be_accounted_for_are_refused(make, relation, message):
    with pytest.raises(ValueError, match=message):
        make().check(N, relation)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonBatches(), "either batch_size"),
        (lambda: PoissonBatches(5, 0.1), "either batch_size"),
        (lambda: PoissonBatches(rate=1.5), r"rate must lie in \[1e-15, 1\]"),
        (lambda: PoissonBatches(-1), "batch_size must be positive"),
        (lambda: PoissonBatches(0), "batch_size must be positive"),
        (lambda: PoissonBatches(np.inf), "batch_size must be positive"),
        (lambda: PoissonBatches(3, max_batch_size=0), "max_batch_size must be at least 1"),
        (lambda: FixedBatches(1), "at least 2"),
        (lambda: FixedBatches(2.0), "integer"),
    ],
)
def test_impossible_batches_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_sizes_of_numpy_are_whole_numbers():
    assert type(FixedBatches(np.int64(5)).batch_size) is int
    assert FixedBatches(np.int64(5)) == FixedBatches(5)
    with pytest.raises(ValueError, match="integer of at least 2, got True"):
        FixedBatches(True)


def test_less_than_one_row_may_be_expected():
    PoissonBatches(SMALLEST_RATE).check(1, "replace_one")
    assert PoissonBatches(0.5).probability(N) == 0.01


@pytest.mark.parametrize(
    "batches", [AllRows(), PoissonBatches(5), PoissonBatches(5, max_batch_size=9), FixedBatches(5)], ids=str
)
def test_batches_are_accounted_for_as_what_they_are_and_as_nothing_else(batches):
    of_table = batches.mechanism(2.0, N)
    assert batches.accounts_for(of_table, N)
    kinds = (AllRows(), PoissonBatches(6), PoissonBatches(5, max_batch_size=8), FixedBatches(6))
    for other in (
        kind.mechanism(2.0, N) for kind in kinds if type(kind) is not AllRows or type(batches) is not AllRows
    ):
        assert not batches.accounts_for(other, N)
    if type(batches) is not AllRows:
        assert not batches.accounts_for(of_table, N + 1)


def test_batches_at_the_ends_of_what_is_allowed():
    assert PoissonBatches(rate=SMALLEST_RATE).rate == SMALLEST_RATE
    assert FixedBatches(2).batch_size == 2
    for batches in (FixedBatches(N), PoissonBatches(N)):
        batches.check(N, "replace_one")


def test_a_batch_size_that_is_no_number_is_refused():
    with pytest.raises(TypeError, match="batch_size must be a number"):
        as_batches("100")


# -- Sums over batches -------------------------------------------------------------------------------------------------


def steps(total):
    return int(total.hi) * 2**24 + int(total.lo)


def steps_of_all(total):
    return np.asarray(total.hi, np.int64) * 2**24 + np.asarray(total.lo)


def test_only_the_first_rows_count():
    values = jnp.arange(1.0, 301.0)
    for size in (0, 1, 17, 300):
        total = clipped_sum(lambda row: row[0][0], (values,), 1000.0, size=jnp.asarray(size))
        assert steps(total) / GRID * 1000 == pytest.approx(float(values[:size].sum()), abs=size * 1e-4)


def test_one_sum_for_each_owner():
    rng = np.random.default_rng(0)
    values, owner = rng.normal(size=(70_000, 3)), rng.integers(0, 5, 70_000)
    total = clipped_sum(lambda row: row[0][0], (jnp.asarray(values),), 1.0, 3, owners=OwnerIndex(owner, 5))
    assert total.hi.shape == (5, 3)
    for j in range(5):
        alone = clipped_sum(lambda row: row[0][0], (jnp.asarray(values[owner == j]),), 1.0, 3)
        difference = steps_of_all(total)[j] - steps_of_all(alone)
        assert np.abs(difference).max() < 64  # of 14,000 rows: another program may round a last bit otherwise


@jax.jit
def penalized(values, weight, factor=1.0, clip=1.0):
    """For a stack of batches of scalars."""

    def one(values):
        return penalized_sum(clipped_moments(lambda row: row[0][0], (values,), clip), weight, factor)

    return jax.vmap(one)(values)


def many_steps(total):
    return np.asarray(total.hi, np.int64) * 2**24 + np.asarray(total.lo)


@pytest.mark.parametrize("size", [2, 1000, 140_000])
def test_the_penalized_sum_is_its_formula(size):
    values = np.random.default_rng(size).normal(size=size)
    clipped = np.clip(values, -1, 1)
    for weight in (1e-3, 0.3, 4.0):
        total = penalized(values[None], weight, 1.1)
        expected = weight * clipped.sum() - weight**2 * 1.1 * ((clipped - clipped.mean()) ** 2).sum() / 2
        found = many_steps(total)[0] * float(total.bound[0]) / GRID
        largest = size * (weight + weight**2 * 1.1)
        # Each row is rounded by at most 2**-15; float32 has 2**-24 of the largest value.
        assert abs(found - expected) < np.sqrt(size) * 2.0**-14 * (weight + weight**2 * 1.1) + largest * 2.0**-21


def test_moments_are_those_of_whole_steps(x64):
    """Each value is rounded to 2**-15 of the bound; their sum and the sum of their squares are exact."""
    values = np.random.default_rng(0).normal(size=3000)
    moments = clipped_moments(lambda row: row[0][0], (jnp.asarray(values),), 1.0)
    whole = (np.asarray(scalar_steps(jnp.asarray(values), 1.0), np.int64) + 2**7) >> 8
    assert (moments.first, moments.second) == (whole.sum(), (whole**2).sum())


@pytest.mark.parametrize("size", [2, 5, 20])
def test_the_penalized_sum_moves_by_at_most_its_sensitivity_and_can_move_by_it(size):
    """Brute force over corners: ``2 w c + 2 w^2 c^2 (1 - 1/b)`` is attained (Räisä 2021, Lemma 1, made tight)."""
    corners = [[1.0] * (size - 1 - others) + [-1.0] * others for others in range(size)]
    for weight in (0.01, 0.5, 3.0):
        before = [
            penalized(jnp.array([[start, *rest] for rest in corners]), weight) for start in (-1.0, -0.5, 0.0, 0.5)
        ]
        after = penalized(jnp.array([[1.0, *rest] for rest in corners]), weight)
        moved = np.abs([many_steps(total) - many_steps(after) for total in before])
        assert moved.max() <= sensitivity_steps("replace_one")
        assert moved.max() > 0.999 * sensitivity_steps("replace_one")
        claimed = 2 * weight + 2 * weight**2 * (1 - 1 / size)
        assert 2 * float(after.bound[0]) == pytest.approx(claimed, rel=1e-4)
        room = 8 * size * np.finfo(np.float32).eps  # for the rounding of floats
        assert 2 * float(after.bound[0]) >= claimed * (1 + room)


def test_hostile_rows_move_the_penalized_sum_within_its_sensitivity():
    rest = np.random.default_rng(0).normal(size=30)
    batches = np.array([[value, *rest] for value in (0.3, np.nan, np.inf, -np.inf, 1e30)])
    moved = many_steps(penalized(batches, 0.4))
    assert (abs(moved - moved[0]) <= sensitivity_steps("replace_one")).all()


def test_the_penalized_sum_of_no_jump_is_zero():
    total = penalized(np.zeros((1, 5)), 2.0, 1.0, jnp.zeros(()))
    assert many_steps(total)[0] == 0
    assert jnp.isfinite(total.bound).all()


def test_a_buffer_may_hold_one_row_and_may_be_full():
    batches = PoissonBatches(rate=0.5, max_batch_size=1)
    for seed in range(20):
        rows, size = batches.draw(NoiseSource(seed).words(b""), 30)
        assert rows.shape == (1,)
        assert size <= 1
    everybody, size = PoissonBatches(rate=1.0).draw(NoiseSource(0).words(b""), 30)
    assert size == 30
    np.testing.assert_array_equal(everybody, np.arange(30))  # in their order: none had to be left out
