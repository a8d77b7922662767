"""`release_sum`: one Gaussian mechanism, whatever the rows are."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import numpyro_dp.privacy.clipping
from numpyro_dp import PrivacyBudget, PrivacyBudgetError, release_sum, scan
from numpyro_dp.privacy.accounting import gaussian_rho
from numpyro_dp.privacy.clipping import clipped_sum
from numpyro_dp.privacy.ledger import Ledger
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.tools.sums import SMALLEST_BOUND, NoisySum

N = 300
HOSTILE = st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-40, 0.0, 1.0, -1.0, 0.3])


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(NoiseSource, "draw", lambda self, shape, *args: np.zeros((2, *shape), np.int32))


def table():
    rng = np.random.default_rng(0)
    return rng.normal(size=N).astype(np.float32), rng.integers(0, 3, N)


X, G = table()


def pair(x, g):
    return jnp.stack([x, x * (g == 1), jnp.exp(x)])


def test_the_sum_is_that_of_the_rows(without_noise):
    x, g = table()
    found = release_sum(pair, (x, g), bound=100.0, eps=1.0)
    np.testing.assert_allclose(found.value, np.array(jax.vmap(pair)(x, g)).sum(0), rtol=1e-3, atol=1e-2)
    counted = release_sum(lambda g: g == 2, g, bound=1.0, eps=1.0)
    assert counted.value == pytest.approx((g == 2).sum(), rel=1e-3)
    assert counted.value.shape == ()


@settings(max_examples=40)
@given(first=HOSTILE, second=HOSTILE, place=st.integers(0, N - 1), vector=st.booleans())
def test_a_row_moves_the_sum_by_at_most_twice_its_bound(first, second, place, vector):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseSource, "draw", lambda self, shape, *args: np.zeros((2, *shape), np.int32))
        moved = distance(first, second, place, vector)
    assert moved <= 2 * 0.5 * (1 + 1e-5)


def distance(first, second, place, vector):
    x, g = table()
    function = pair if vector else (lambda x, g: 3 * x)
    found = []
    for value in (first, second):
        x[place] = value
        found.append(release_sum(function, (x, g), bound=0.5, eps=1.0).value.astype(float))
    return np.linalg.norm(found[0] - found[1])


def test_a_clip_that_is_left_out_is_noticed(without_noise, monkeypatch):
    def unclipped(values, bound):
        return jnp.round(jnp.nan_to_num(values) * (numpyro_dp.privacy.clipping.GRID / bound)).astype(jnp.int32)

    assert distance(-2.0, 2.0, 7, False) <= 1 + 1e-5
    monkeypatch.setattr(numpyro_dp.privacy.clipping, "scalar_steps", unclipped)
    assert distance(-2.0, 2.0, 7, False) > 5


def noise_of(repetitions, eps=1.0, width=12, **options):
    values = np.zeros((50, width), np.float32)
    function = lambda row: row  # noqa: E731
    found = [release_sum(function, values, bound=2.0, eps=eps, **options) for _ in range(repetitions)]
    return np.concatenate([f.value for f in found]), found[0]


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_the_noise_is_that_of_the_budget(relation):
    delta = 1e-4
    values, found = noise_of(10, width=120, delta=delta, neighboring_relation=relation)
    sensitivity = {"replace_one": 4.0, "add_or_remove_one": 2.0}[relation]
    sd = sensitivity / np.sqrt(2 * gaussian_rho(1.0, delta))
    assert found.noise_sd == pytest.approx(sd, rel=1e-6)
    assert stats.kstest(values / sd, "norm").pvalue > 1e-8
    assert stats.kstest(values / (sd / 2), "norm").pvalue < 1e-6  # half the noise would be noticed


def test_it_is_charged_before_the_table_is_read_and_refused_beyond(tmp_path, monkeypatch):
    x, g = table()
    with pytest.warns(UserWarning, match="a new privacy budget was made"):
        budget = PrivacyBudget(tmp_path / "budget", eps=1.0, delta=1e-3, witness=False)
    release_sum(pair, (x, g), bound=1.0, eps=0.7, delta=5e-4, budget=budget)
    (charge,) = budget.charges
    assert (charge.eps, charge.num_rows) == (0.7, N)
    assert "release_sum of pair" in charge.what

    def read(*args, **options):
        raise AssertionError("the table was read")

    monkeypatch.setattr(numpyro_dp.privacy.release, "clipped_sum", read)
    with pytest.raises(PrivacyBudgetError):
        release_sum(pair, (x, g), bound=1.0, eps=0.9, delta=5e-4, budget=budget)
    assert len(budget.charges) == 1
    with pytest.raises(AssertionError, match="was read"):
        release_sum(pair, (x, g), bound=1.0, eps=0.1, delta=1e-4, budget=budget)
    assert len(budget.charges) == 2


def test_delta_follows_from_the_number_of_rows_whatever_their_shape():
    found = release_sum(lambda m, x: m.sum() + x, (np.ones((40, 3)), np.ones(40)), bound=1.0, eps=1.0)
    assert found.delta == 0.1 / 40


def test_one_row_beside_a_known_number_is_a_table(without_noise):
    known = jnp.ones(1)
    assert release_sum(lambda x: jnp.sum(x - known), np.array([1.5]), bound=1.0, eps=1.0).value == 0.5


@pytest.mark.parametrize("bound", [SMALLEST_BOUND, 1 / SMALLEST_BOUND])
def test_the_smallest_and_the_largest_bound_are_allowed(bound):
    assert release_sum(lambda x: x, X, bound=bound, eps=1.0).bound == pytest.approx(bound)


def test_nothing_is_released_that_the_ledger_does_not_grant(monkeypatch):
    grant = Ledger.grant
    monkeypatch.setattr(Ledger, "grant", lambda *args: (False, grant(*args)[1]))
    with pytest.raises(PrivacyBudgetError, match="Nothing was released"):
        release_sum(lambda x: x, X, bound=1.0, eps=1.0)


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_vectors_are_added_by_blocks_only_where_neighbours_have_their_rows_in_the_same_places(relation, monkeypatch):
    asked = []

    def spy(*args, fixed_places, **options):
        asked.append(fixed_places)
        return clipped_sum(*args, fixed_places=fixed_places, **options)

    monkeypatch.setattr(numpyro_dp.privacy.release, "clipped_sum", spy)
    release_sum(pair, (X, G), bound=1.0, eps=1.0, delta=1e-4, neighboring_relation=relation)
    assert asked == [relation == "replace_one"]


def test_results_hold_no_rows():
    x, g = table()
    found = release_sum(pair, (x, g), bound=1.0, eps=1.0)
    data = pickle.dumps(found)
    assert not any(part.tobytes() in data for part in (x[:4], g[:4]))
    assert "with noise of sd" in str(found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.eps = 0.1
    assert "(1, 0.000333)-differentially private" in str(found)


def test_a_sum_shows_four_digits_and_of_many_numbers_the_ends():
    few, many = (NoisySum(np.arange(k) + 0.12345678, 0.5, 1.0, 1.0, 1e-5, "replace_one") for k in (20, 21))
    assert str(few).startswith("[ 0.1235  1.1235")
    assert "..." not in str(few)
    assert " 1.1235  2.1235 ... 18.1235" in str(many)


def test_what_a_sum_costs_is_given_by_name():
    with pytest.raises(TypeError, match="positional"):
        release_sum(lambda x: x, X, 1.0, eps=1.0)


def test_columns_of_a_scan_do_not_hide_what_is_no_array():
    streamed = scan(pyarrow.table({"x": X}))
    with pytest.raises(ValueError, match=r"rows\[1\] must be a NumPy or JAX array"):
        release_sum(lambda x, y: x, (streamed["x"], [1.0, 2.0]), bound=1.0, eps=1.0)


def test_two_calls_have_different_noise():
    x, g = table()
    one, other = (release_sum(pair, (x, g), bound=1.0, eps=1.0).value for _ in range(2))
    assert (one != other).all()


def rbg_in_a_loop(k):
    """Of which `vmap` uses one row's key for all rows."""
    draw = lambda carry, _: (carry, jax.random.uniform(jax.random.key(k, impl="rbg")))  # noqa: E731
    return jax.lax.scan(draw, 0, None, length=1)[1][0]


def split_of_unsafe_rbg(k):
    return jax.random.key_data(jax.random.split(jax.random.key(k, impl="unsafe_rbg"))).astype(float).ravel()


def test_nothing_is_said_of_the_number_of_rows_where_that_is_private():
    options = {"bound": 1.0, "eps": 1.0, "delta": 1e-4, "neighboring_relation": "add_or_remove_one"}
    for length in (N - 1, N):  # known thresholds, as many as rows or not
        thresholds = jnp.linspace(0, 1, length)
        release_sum(lambda x, thresholds=thresholds: jnp.mean(x > thresholds), X, **options)
    with pytest.raises(ValueError, match="the same first axis") as error:
        release_sum(lambda x, g: x, (X, G[:-1]), **options)
    assert str(N) not in str(error.value)


def test_a_value_beyond_single_precision_is_clipped_without_a_word(without_noise):
    x = np.full(10, 0.5)
    quiet = release_sum(lambda x: x, x, bound=1.0, eps=1.0)
    x[0] = 1e300  # warnings are errors
    assert release_sum(lambda x: x, x, bound=1.0, eps=1.0).value - quiet.value == pytest.approx(0.5, rel=1e-3)


DTYPES = ("float32", "float16", "bfloat16", "int8", "bool")


def test_numbers_of_low_precision_are_taken_as_they_are(without_noise):
    one = release_sum(lambda x: x, X, bound=np.float16(0.1), eps=np.float16(0.01), delta=1e-6)
    other = release_sum(lambda x: x, X, bound=float(np.float16(0.1)), eps=float(np.float16(0.01)), delta=1e-6)
    assert one == other


def test_so_are_rows_of_low_precision(without_noise):
    """The sum itself is of more bits."""
    sums = [release_sum(lambda x, d=d: jnp.clip(x, 0, 1).round().astype(d), X, bound=1.0, eps=1.0) for d in DTYPES]
    assert {float(found.value) for found in sums} == {float(np.clip(X, 0, 1).round().sum())}


def test_a_function_is_the_one_that_was_checked(without_noise):
    calls = []

    def changing(x):
        calls.append(x)
        return x if len(calls) == 1 else 100 * x

    expected = release_sum(lambda x: x, X, bound=1.0, eps=1.0)
    assert release_sum(changing, X, bound=1.0, eps=1.0).value == expected.value
    assert len(calls) == 1


def test_it_cannot_be_called_in_a_program():
    with pytest.raises(ValueError, match="within jit, grad or vmap"):
        jax.jit(lambda x: release_sum(lambda v: v, x, bound=1.0, eps=1.0).value)(X)


@pytest.mark.parametrize(
    ("function", "rows", "options", "message"),
    [
        (lambda x: x, X, {"bound": 0.0}, "bound must lie between"),
        (lambda x: x, X, {"bound": 1e38}, "bound must lie between"),
        (lambda x: x, X, {"bound": float("inf")}, "bound must lie between"),
        (lambda x: x, X, {"eps": float("inf")}, "eps must be positive and finite"),
        (lambda x: x, X, {"eps": 0.0}, "eps must be positive and finite"),
        (lambda x: x, X, {"eps": -0.5}, "eps must be positive and finite"),
        (lambda x: x, X, {"bound": 1.5 / SMALLEST_BOUND}, "bound must lie between"),
        (lambda x: x, X, {"delta": 0.0}, "delta must lie strictly"),
        (lambda x: x, X, {"delta": -0.5}, "delta must lie strictly"),
        (lambda x: x, X, {"delta": 1.0}, "delta must lie strictly"),
        (lambda x: x, X, {"delta": 1.5}, "delta must lie strictly"),
        (lambda x: x, X, {"neighboring_relation": "add_or_remove_one"}, "give delta, a public number"),
        (lambda x: x, X, {"neighboring_relation": "swap"}, "neighboring_relation must be .*'replace_one'"),
        (lambda x, g: x, (X, G[:-1]), {}, "the same first axis"),
        (lambda x: x, (), {}, "the same first axis"),
        (lambda x: x, np.zeros((0, 2)), {}, "argument 'x' has no rows"),
        (lambda x: x, np.float32(1.0), {}, r"rows\[0\] must be a NumPy or JAX array"),
        (lambda x: x, np.ones(()), {}, r"rows\[0\] must be a NumPy or JAX array"),
        (lambda x: x, [1, 2, 2**40], {}, r"rows\[0\] must be a NumPy or JAX array with the rows on its first axis$"),
        (lambda x: x, np.array(["secret", "other"]), {}, "argument 'x' has dtype <U6: encode it as numbers"),
        (lambda x: x, np.ma.masked_array(X), {}, "whose mask JAX ignores"),
        (lambda x: jnp.ones((2, 2)) * x, X, {}, "gives shape \\(2, 2\\): ravel it"),
        (lambda x: jnp.zeros(0) * x, X, {}, r"gives shape \(0,\), which has no number in it"),
        (lambda x: x.astype(jnp.float8_e5m2), X, {}, "numbers of 16 bits or more, and gives float8_e5m2: convert"),
        (lambda x: x - jnp.asarray(X).mean(), X, {}, "closes over an array as long as the table"),
        (lambda x: jax.lax.while_loop(lambda y: y < x, lambda y: y + 1, 0.0), X, {}, "per_row has a loop"),
        (lambda x: jax.debug.print("{}", x) or x, X, {}, "per_row calls `jax.debug.print`, which would show"),
        (lambda x: jax.pure_callback(lambda y: y, x, x), X, {}, "per_row calls Python with a row"),
        (lambda x: x - X.mean(), X, {}, "closes over an array as long as the table"),
        (lambda x: x - jnp.array([1.0, 2.0]).mean(), X[:2], {}, "closes over an array as long as the table"),
        (lambda m, x: x - jnp.asarray(X).mean(), (np.ones((N, 2)), X), {}, "closes over an array as long as the table"),
        (lambda g: rbg_in_a_loop(g), G, {}, "random_bits of other keys than threefry's"),
        (lambda g: jax.random.gamma(jax.random.key(g), 2.0), G, {}, "applies `random_gamma`"),
        (lambda g: split_of_unsafe_rbg(g), G, {}, "random_split of other keys than threefry's"),
    ],
)
def test_what_cannot_be_released_is_refused(function, rows, options, message):
    with pytest.raises(ValueError, match=message):
        release_sum(function, rows, **{"bound": 1.0, "eps": 1.0, **options})


def test_processes_that_share_a_table_cannot_each_draw_noise(monkeypatch):
    shared = jnp.asarray(X)
    monkeypatch.setattr(type(shared), "is_fully_addressable", property(lambda self: False))
    with pytest.raises(ValueError, match="several processes share this table"):
        release_sum(lambda x: x, shared, bound=1.0, eps=1.0)


def test_whole_numbers_of_64_bits_are_not_taken_modulo_32(without_noise):
    when = np.array([3_000_000_000, 1_500_000_000, -3_000_000_000])
    found = release_sum(lambda t: (t > 1_600_000_000) * 1.0, (when,), bound=1.0, eps=1.0)
    assert found.value == pytest.approx(1.0, abs=1e-5)
