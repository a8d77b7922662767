"""`release_sum`: one Gaussian mechanism, whatever the rows are."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import numpyro_dp.clipping
from numpyro_dp import PrivacyBudget, PrivacyBudgetError, release_sum
from numpyro_dp.accounting import gaussian_rho
from numpyro_dp.noise import NoiseSource

N = 300
HOSTILE = st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-40, 0.0, 1.0, -1.0, 0.3])


@pytest.fixture
def without_noise(monkeypatch):
    monkeypatch.setattr(NoiseSource, "draw", lambda self, shape, *args: np.zeros((2, *shape), np.int32))


def table():
    rng = np.random.default_rng(0)
    return rng.normal(size=N).astype(np.float32), rng.integers(0, 3, N)


def pair(x, g):
    return jnp.stack([x, x * (g == 1), jnp.exp(x)])


def test_the_sum_is_that_of_the_rows(without_noise):
    x, g = table()
    found = release_sum(pair, (x, g), bound=100.0, eps=1.0)
    np.testing.assert_allclose(found.value, np.array(jax.vmap(pair)(x, g)).sum(0), rtol=1e-3, atol=1e-2)
    counted = release_sum(lambda g: g == 2, g, bound=1.0, eps=1.0)
    assert counted.value == pytest.approx((g == 2).sum(), rel=1e-3)
    assert counted.value.shape == ()


@settings(max_examples=40, deadline=None)
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
        return jnp.round(jnp.nan_to_num(values) * (numpyro_dp.clipping.GRID / bound)).astype(jnp.int32)

    assert distance(-2.0, 2.0, 7, False) <= 1 + 1e-5
    monkeypatch.setattr(numpyro_dp.clipping, "scalar_steps", unclipped)
    assert distance(-2.0, 2.0, 7, False) > 5


def noise_of(repetitions, eps=1.0, **options):
    values = np.zeros((50, 3), np.float32)
    function = lambda row: row  # noqa: E731
    found = [release_sum(function, values, bound=2.0, eps=eps, **options) for _ in range(repetitions)]
    return np.concatenate([f.value for f in found]), found[0]


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_the_noise_is_that_of_the_budget(relation):
    delta = 1e-4
    values, found = noise_of(100, delta=delta, neighboring_relation=relation)
    sensitivity = {"replace_one": 4.0, "add_or_remove_one": 2.0}[relation]
    sd = sensitivity / np.sqrt(2 * gaussian_rho(1.0, delta))
    assert found.noise_sd == pytest.approx(sd, rel=1e-6)
    assert stats.kstest(values / sd, "norm").pvalue > 1e-6
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

    monkeypatch.setattr(numpyro_dp.sums, "clipped_sum", read)
    with pytest.raises(PrivacyBudgetError):
        release_sum(pair, (x, g), bound=1.0, eps=0.9, delta=5e-4, budget=budget)
    assert len(budget.charges) == 1
    with pytest.raises(AssertionError, match="was read"):
        release_sum(pair, (x, g), bound=1.0, eps=0.1, delta=1e-4, budget=budget)
    assert len(budget.charges) == 2


def test_results_hold_no_rows():
    x, g = table()
    found = release_sum(pair, (x, g), bound=1.0, eps=1.0)
    data = pickle.dumps(found)
    assert not any(part.tobytes() in data for part in (x[:4], g[:4]))
    assert "with noise of sd" in str(found)
    assert "(1, 0.000333)-differentially private" in str(found)


def test_two_calls_have_different_noise():
    x, g = table()
    one, other = (release_sum(pair, (x, g), bound=1.0, eps=1.0).value for _ in range(2))
    assert (one != other).all()


X, G = table()


@pytest.mark.parametrize(
    ("function", "rows", "options", "message"),
    [
        (lambda x: x, X, {"bound": 0.0}, "bound must be positive"),
        (lambda x: x, X, {"bound": float("inf")}, "bound must be positive and finite"),
        (lambda x: x, X, {"eps": float("inf")}, "eps must be positive and finite"),
        (lambda x: x, X, {"delta": 1.0}, "delta must lie"),
        (lambda x: x, X, {"neighboring_relation": "add_or_remove_one"}, "give delta, a public number"),
        (lambda x: x, X, {"neighboring_relation": "swap"}, "neighboring_relation must be one of"),
        (lambda x, g: x, (X, G[:-1]), {}, "the same leading axis"),
        (lambda x: x, np.zeros((0, 2)), {}, "at least one row"),
        (lambda x: x, np.float32(1.0), {}, "the same leading axis"),
        (lambda x: jnp.ones((2, 2)) * x, X, {}, "gives shape \\(2, 2\\): ravel it"),
        (lambda x: x - jnp.asarray(X).mean(), X, {}, "closes over an array as long as the table"),
        (lambda x: jax.lax.while_loop(lambda y: y < x, lambda y: y + 1, 0.0), X, {}, "per_row has a loop"),
        (lambda x: jax.pure_callback(lambda y: y, x, x), X, {}, "per_row applies `pure_callback`"),
    ],
)
def test_what_cannot_be_released_is_refused(function, rows, options, message):
    with pytest.raises(ValueError, match=message):
        release_sum(function, rows, **{"bound": 1.0, "eps": 1.0, **options})
