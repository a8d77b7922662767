"""`family_of`: sufficient statistics say what the model says, within bounds that hold for any row, or are refused."""

import functools
import gc
import math
import types
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import single_every_day
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.handlers import mask, scale
from numpyro.infer.util import compute_log_probs, constrain_fn

from numpyro_dp.model.arguments import UnsupportedModelError
from numpyro_dp.model.families import ExponentialFamily, UnsupportedFamilyError, _ellipse_around, family_of
from numpyro_dp.model.separate import separate

N = 13
_rng = np.random.default_rng(1)
POSITIVE = dist.LogNormal(0.0, 0.5)
NORMALS, COUNTS, BITS = _rng.normal(size=N), _rng.poisson(3.0, N), _rng.integers(0, 2, N)
TIMES, COLUMNS = _rng.gamma(2.0, size=N) + 0.05, _rng.normal(size=(N, 3))


def observed(likelihood, transform=lambda y: y, **priors):
    """A model whose rows have one `likelihood` of the parameters."""

    def model(y):
        params = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", likelihood(**params), obs=transform(y))

    return model


def columns(y):
    """Three values a row, each column with its own mean."""
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", POSITIVE)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma).to_event(1), obs=y)


def nested_plates(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0], dim=-2), numpyro.plate("columns", y.shape[1], dim=-1):
        numpyro.sample("y", dist.Normal(mu, 1.3), obs=y)


def no_plate(y):
    mu, sigma = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("sigma", POSITIVE)
    numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def weighted(y):
    rate = numpyro.sample("rate", POSITIVE)
    with numpyro.plate("rows", y.shape[0]), scale(scale=0.3):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def trials(y, total, slope):
    """The number of trials and a covariate of each column are public."""
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Binomial(total, logits=a * slope).to_event(1), obs=y)


class Case(NamedTuple):
    model: Any
    args: tuple
    bounds: Any = None
    size: int = 1  # entries of the statistic
    private_args: Any = None


def _normal(mu, sigma):
    return dist.Normal(mu, sigma)


MU, SHARE = dist.Normal(0.0, 1.0), dist.Uniform(0.0, 1.0)
CASES = {
    "normal": Case(observed(_normal, mu=MU, sigma=POSITIVE), (NORMALS,), (-4, 5), 2),
    "normal_mean": Case(observed(lambda mu: dist.Normal(mu, 1.7), mu=MU), (NORMALS,), (-4, 5)),
    "normal_scale": Case(observed(lambda sigma: dist.Normal(0.5, sigma), sigma=POSITIVE), (NORMALS,), (-4, 5)),
    "normal_far_mean": Case(observed(lambda sigma: dist.Normal(9.0, sigma), sigma=POSITIVE), (NORMALS,), (-4, 5)),
    "normal_years": Case(
        observed(lambda mu, sigma: dist.Normal(1960 + 9 * mu, 9 * sigma), mu=MU, sigma=POSITIVE),
        (1960 + 10 * NORMALS,),
        (1900, 2030),
        2,
    ),
    "normal_columns": Case(columns, (COLUMNS,), (np.array([-4, -5, -6]), np.array([5, 6, 7])), 6),
    "normal_nested_plates": Case(nested_plates, (COLUMNS,), (-4, 4), 3),
    "normal_without_plate": Case(no_plate, (NORMALS,), (-4, 4), 2),
    "normal_of_logarithms": Case(observed(_normal, jnp.log, mu=MU, sigma=POSITIVE), (TIMES,), (-4, 4), 2),
    "gamma": Case(observed(lambda a, b: dist.Gamma(a, b), a=POSITIVE, b=POSITIVE), (TIMES,), (0.04, 9), 2),
    "gamma_rate": Case(observed(lambda b: dist.Gamma(2.0, b), b=POSITIVE), (TIMES,), (0.04, 9)),
    "gamma_concentration": Case(observed(lambda a: dist.Gamma(a, 1.5), a=POSITIVE), (TIMES,), (0.04, 9)),
    "exponential": Case(observed(lambda b: dist.Exponential(b), b=POSITIVE), (TIMES,), (0, 9)),
    "poisson": Case(observed(lambda b: dist.Poisson(b), b=POSITIVE), (COUNTS,), (0, 12)),
    "poisson_weighted": Case(weighted, (COUNTS.astype(float),), (0, 12)),
    "bernoulli_probs": Case(observed(lambda p: dist.Bernoulli(p), p=SHARE), (BITS,)),
    "bernoulli_logits": Case(observed(lambda a: dist.Bernoulli(logits=a), a=MU), (BITS.astype(bool),)),
    "binomial_probs": Case(observed(lambda p: dist.Binomial(20, p), p=SHARE), (COUNTS,)),
    "binomial_logits": Case(
        trials, (np.stack([BITS, COUNTS], -1), np.array([1, 20]), np.array([0.5, -1.0])), None, 2, ["y"]
    ),
    "categorical_probs": Case(
        observed(lambda p: dist.Categorical(p), p=dist.Dirichlet(np.ones(4))), (COUNTS % 4,), None, 4
    ),
    "categorical_logits": Case(
        observed(lambda a: dist.Categorical(logits=a), a=dist.Normal(np.zeros(3), 1).to_event(1)),
        (COUNTS % 3,),
        None,
        3,
    ),
}


class Bound(NamedTuple):
    separated: Any
    family: Any
    case: Case

    @property
    def rows(self):
        return self.separated.rows(self.case.args, {})

    def point(self, seed):
        dtype = jnp.result_type(float)
        return jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, self.separated.num_params), dtype)


@functools.cache
def _bound(name, x64):
    case = CASES[name]
    separated = separate(case.model, case.args, private_args=case.private_args)
    return Bound(separated, family_of(separated, case.args, {}, case.bounds), case)


@functools.cache
def _statistics(name, precision="float32"):
    """The function from rows to what each contributes."""
    family = _bound(name, precision).family
    return jax.jit(jax.vmap(lambda row: family.statistic((row[None],))))


# -- The family is the model's -----------------------------------------------------------------------------------------


EVERYDAY = ("normal_columns", "gamma", "poisson_weighted", "binomial_logits")


some_every_day = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in EVERYDAY else pytest.mark.nightly) for n in CASES]
)


@single_every_day
@some_every_day
def test_statistics_give_the_log_likelihood_ratio_of_numpyro(name, precision):
    bound = _bound(name, precision)
    separated, family, case = bound
    statistics = _statistics(name, precision)(bound.rows[0])
    assert statistics.shape == (N, family.size) == (N, case.size)

    def log_likelihood(z):
        params = constrain_fn(case.model, case.args, {}, separated.unravel(z))
        return compute_log_probs(case.model, case.args, {}, params)[0]["y"]

    @jax.jit
    def of_family(z, z_new):
        eta, log_partition = family.change(z, z_new)
        terms = jnp.append(statistics @ eta, -N * log_partition)
        plain = family.natural_parameters(z_new) - family.natural_parameters(z)
        return jnp.sum(terms), jnp.sum(jnp.abs(terms)), eta, plain

    for seed in range(3):
        z, z_new = bound.point(seed), bound.point(seed + 10)
        before, after = log_likelihood(z), log_likelihood(z_new)
        change, magnitude, eta, plain = of_family(z, z_new)
        eps = jnp.finfo(z.dtype).eps
        np.testing.assert_allclose(change, after - before, atol=50 * eps * (magnitude + abs(before) + abs(after)))
        np.testing.assert_allclose(eta, plain, rtol=1e3 * eps, atol=1e3 * eps * np.max(np.abs(plain)))


def test_a_bernoulli_in_closed_form(x64):
    bound = _bound("bernoulli_logits", "float64")
    z = jnp.array([0.7])
    np.testing.assert_allclose(_statistics("bernoulli_logits", "float64")(jnp.array([False, True])), [[-1], [1]])
    np.testing.assert_allclose(bound.family.natural_parameters(z), z / 2)
    np.testing.assert_allclose(bound.family.log_partition(z), np.log(2 * np.cosh(0.35)))


def test_short_jumps_keep_their_digits_in_float32():
    """A narrow likelihood in wide bounds: plain differences of eta and A would be off by more than their change."""
    model = observed(lambda mu, tau: dist.Normal(mu, 0.01 * tau), mu=MU, tau=POSITIVE)
    y = np.zeros(10)
    family = family_of(separate(model, (y,)), (y,), {}, (-3, 3))
    with jax.enable_x64(True):
        precise = family_of(separate(model, (y,)), (y,), {}, (-3, 3))
        z = np.array([0.3, -0.2], np.float32)
        jump = np.array([2e-5, 1e-5], np.float32)
        exact = [np.asarray(x) for x in precise.change(jnp.asarray(z, float), jnp.asarray(z + jump, float))]
    short = family.change(jnp.asarray(z), jnp.asarray(z + jump))
    for found, expected in zip(short, exact, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    plain = family.log_partition(jnp.asarray(z + jump)) - family.log_partition(jnp.asarray(z))
    assert abs(plain - exact[1]) > 1e-3 * abs(exact[1])  # or this test shows nothing


def test_the_change_is_the_plain_difference_where_the_derivative_does_not_tell():
    """A kink between the two points, and a jump out of this world."""
    model = observed(lambda mu: dist.Normal(jnp.where(mu > 0.35, 1.0, -1.0), 1.0), mu=MU)
    family = family_of(separate(model, (NORMALS,)), (NORMALS,), {}, (-4, 4))
    eta, _ = family.change(jnp.array([0.1]), jnp.array([0.9]))
    np.testing.assert_allclose(eta, [8.0])  # 2 in units of y; the interval's half is 4
    eta, log_partition = _bound("poisson", "float32").family.change(jnp.array([0.1]), jnp.array([jnp.inf]))
    assert not jnp.isfinite(log_partition) or not jnp.all(jnp.isfinite(eta))


def test_change_works_for_many_chains():
    family = _bound("gamma", "float32").family
    z = jnp.array([[0.1, 0.2], [0.5, -0.4]])
    change = jax.jit(family.change)
    together = jax.vmap(change)(z, z + 0.01)
    for k in range(2):
        for one, many in zip(change(z[k], z[k] + 0.01), together, strict=True):
            np.testing.assert_allclose(many[k], one, rtol=1e-5)


# -- Bounds ------------------------------------------------------------------------------------------------------------

HOSTILE = [0.0, -0.0, 1e-45, 0.5, -3.0, 2.5, 7.0, 1e6, -1e30, 3e38, np.inf, -np.inf, np.nan]


@some_every_day
def test_no_row_goes_beyond_the_bound(name):
    bound = _bound(name, "float32")
    dtype, shape = bound.rows[0].dtype, bound.rows[0].shape[1:]

    @settings(max_examples=20)
    @given(st.lists(st.one_of(st.sampled_from(HOSTILE), st.floats(width=32)), min_size=64, max_size=64))
    def check(values):
        values = np.resize(np.array(values, np.float32), (64, *shape))
        if dtype.kind in "iub":
            values = np.nan_to_num(values).clip(-(2.0**31), 2.0**31 - 129).astype(dtype)
        statistics = np.asarray(_statistics(name)(jnp.asarray(values, dtype)), np.float64)
        assert np.all(np.isfinite(statistics))
        assert np.all(np.linalg.norm(statistics, axis=1) <= bound.family.bound * (1 + 1e-5))

    check()


@some_every_day
def test_the_bound_is_reached(name):
    """A bound larger than need be is paid for in noise."""
    bound = _bound(name, "float32")
    low, high = (0, 20) if bound.case.bounds is None else (np.min(bound.case.bounds[0]), np.max(bound.case.bounds[1]))
    shape = bound.rows[0].shape[1:]
    values = np.linspace(low, high, 4001).reshape(-1, *[1] * len(shape)) * np.ones(shape)
    if name == "normal_of_logarithms":
        values = np.exp(values)
    if name == "binomial_logits":
        values = np.array([[0, 0], [1, 20]])
    statistics = _statistics(name)(jnp.asarray(np.round(values) if bound.rows[0].dtype.kind in "iub" else values))
    assert np.max(np.linalg.norm(statistics, axis=1)) == pytest.approx(bound.family.bound, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "value", "same_as"),
    [
        ("normal", 1e30, 5.0),
        ("normal", -7.0, -4.0),
        ("poisson", 50, 12),
        ("exponential", 99.0, 9.0),
        ("gamma", 0.0, 0.04),
        ("normal", np.nan, None),
        ("normal", np.inf, None),
        ("exponential", -1.0, None),
        ("poisson", -1, None),
        ("poisson_weighted", 2.5, None),
        ("bernoulli_probs", 2, None),
        ("categorical_probs", 4, None),
        ("categorical_probs", -1, None),
        ("binomial_probs", 21, None),
    ],
)
def test_a_value_out_of_bounds_is_moved_and_one_out_of_the_support_counts_as_the_centre(name, value, same_as):
    dtype = _bound(name, "float32").rows[0].dtype
    found = _statistics(name)(jnp.asarray([value], dtype))[0]
    expected = jnp.zeros_like(found) if same_as is None else _statistics(name)(jnp.asarray([same_as], dtype))[0]
    np.testing.assert_array_equal(found, expected)


def test_one_bad_value_makes_its_row_the_centre():
    statistics = _statistics("normal_columns")(jnp.asarray([[1.0, np.nan, 0.3], [1.0, 2.0, 0.3]]))
    assert jnp.all(statistics[0] == 0)
    assert jnp.all(statistics[1] != 0)


@pytest.mark.parametrize("low", [0.5, 0.01, 1e-6])
def test_the_ellipse_is_the_smallest(low):
    """Against Khachiyan's iteration for the smallest ellipse around points."""
    x = np.linspace(low, 1, 400)
    curve = np.stack([np.log(x), x], -1)
    _, root = _ellipse_around(curve)
    points, weights = np.column_stack([curve, np.ones(len(x))]), np.full(len(x), 1 / len(x))
    for _ in range(3000):
        inverse = np.linalg.inv(points.T @ (weights[:, None] * points))
        distance = np.sum(points @ inverse * points, 1)
        k = np.argmax(distance)
        step = (distance[k] - 3) / (3 * (distance[k] - 1))
        weights *= 1 - step
        weights[k] += step
    center = weights @ curve
    smallest = 2 * np.sqrt(np.linalg.det((curve - center).T @ (weights[:, None] * (curve - center))))
    assert np.linalg.det(root) == pytest.approx(smallest, rel=2e-3)


def test_a_normal_value_wastes_less_noise_than_raw_moments():
    _, root = _ellipse_around(np.stack([u := np.linspace(-1, 1, 2001), u**2], -1))
    assert np.linalg.det(root) == pytest.approx(math.sqrt(16 / 27), rel=1e-6)  # a = sqrt(4/3), b = 2/3


# -- No private value is read ------------------------------------------------------------------------------------------


def test_the_family_holds_no_rows_and_does_not_depend_on_them():
    case = CASES["normal"]
    y, other = NORMALS.copy(), np.full(N, np.nan)
    separated = separate(case.model, (y,))
    found, expected = family_of(separated, (y,), {}, case.bounds), family_of(separated, (other,), {}, case.bounds)
    z = jnp.array([0.2, 0.1])
    row = (jnp.array([0.3]),)
    np.testing.assert_array_equal(found.statistic(row), expected.statistic(row))
    np.testing.assert_array_equal(found.natural_parameters(z), expected.natural_parameters(z))
    assert found.log_partition(z) == expected.log_partition(z)
    alive = weakref.ref(y)
    del y
    gc.collect()
    assert alive() is None


def test_public_arguments_may_be_traced():
    case = CASES["binomial_logits"]

    @jax.jit
    def change(y, total, slope):
        args = (y, total, slope)
        separated = separate(case.model, args, private_args=case.private_args)
        return family_of(separated, args, {}).change(jnp.array([0.1]), jnp.array([0.3]))

    expected = _bound("binomial_logits", "float32").family.change(jnp.array([0.1]), jnp.array([0.3]))
    for one, other in zip(change(*map(jnp.asarray, case.args)), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# -- A family of the user's --------------------------------------------------------------------------------------------


def regression(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", POSITIVE)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, sigma), obs=y)


def _regression_family(**changes):
    def statistic(row):
        x, y = jnp.clip(row["X"], -1, 1), jnp.clip(row["y"], -2, 2)
        return jnp.concatenate([jnp.outer(x, x).ravel(), x * y, y[None] ** 2])

    def natural_parameters(params):
        b, precision = params["b"], params["sigma"] ** -2
        return precision * jnp.concatenate([-jnp.outer(b, b).ravel() / 2, b, jnp.array([-0.5])])

    parts = {
        "statistic": statistic,
        "natural_parameters": natural_parameters,
        "log_partition": lambda params: jnp.log(params["sigma"]),
        "bound": math.sqrt(2 * 0.5**2 + 2 + 8 + 4),
        "center": np.array([0.5, 0, 0, 0.5, 0, 0, 2.0]),
    }
    return ExponentialFamily(**(parts | changes))


REGRESSION = (_rng.uniform(-1, 1, (N, 2)), _rng.uniform(-2, 2, N))
LIMITS = {"X": (-1, 1), "y": (-2, 2)}


@functools.cache
def _regression(x64):
    return separate(regression, REGRESSION)


def _given(family, bounds=LIMITS):
    return family_of(_regression(jax.config.jax_enable_x64), REGRESSION, {}, bounds, family)


@single_every_day
def test_linear_regression_in_sufficient_statistics(precision):
    family, separated = _given(_regression_family()), _regression(precision == "float64")
    rows = tuple(x[:, None] for x in separated.rows(REGRESSION, {}))
    statistics = jax.vmap(family.statistic)(rows)
    assert np.all(np.linalg.norm(statistics, axis=1) <= family.bound)
    z, z_new = jnp.array([0.1, -0.3, 0.2]), jnp.array([0.4, 0.2, -0.1])
    density = jax.vmap(separated.row_log_density(REGRESSION, {}), (None, 0))
    eta, log_partition = family.change(z, z_new)
    tolerance = 1e-4 if precision == "float32" else 1e-12
    np.testing.assert_allclose(
        statistics @ eta - log_partition, density(z_new, rows) - density(z, rows), atol=tolerance
    )
    bad = (jnp.array([[0.1, np.nan]]), jnp.array([1.0]))
    assert jnp.all(family.statistic(bad) == 0)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"log_partition": lambda params: 2 * jnp.log(params["sigma"])}, "changes by"),
        ({"log_partition": lambda params: jnp.zeros(())}, "changes by"),
        ({"natural_parameters": lambda p: 1.001 * _regression_family().natural_parameters(p)}, "changes by"),
        ({"statistic": lambda row: jnp.append(_regression_family().statistic(row)[:-1], row["y"])}, "changes by"),
        ({"statistic": lambda row: _regression_family().statistic(row)[:-1], "center": 0.0}, "(6,)"),
        ({"log_partition": lambda params: params["b"]}, "scalar"),
        ({"center": np.zeros(3)}, "shape"),
        ({"bound": 1e-3}, "cannot be compared"),
    ],
)
def test_a_wrong_family_is_refused(changes, word, x64):
    with pytest.raises((UnsupportedFamilyError, TypeError, ValueError), match=r"(?s).") as info:
        _given(_regression_family(**changes))
    assert word in str(info.value)


def test_a_statistic_that_moves_values_needs_bounds():
    with pytest.raises(UnsupportedFamilyError, match="give `bounds` within which it moves none"):
        _given(_regression_family(), bounds=None)


@pytest.mark.parametrize("changes", [{"bound": 0.0}, {"bound": math.inf}, {"bound": math.nan}, {"center": math.nan}])
def test_constants_must_be_finite(changes):
    with pytest.raises(ValueError, match=f"{next(iter(changes))} must be"):
        _regression_family(**changes)


# -- Refused -----------------------------------------------------------------------------------------------------------


def _refusal(model, args, bounds=None, separated=None, error=UnsupportedFamilyError):
    with pytest.raises(error) as info:
        family_of(separated or separate(model, args), args, {}, bounds)
    return str(info.value)


def test_covariates_are_refused_by_name():
    message = _refusal(regression, REGRESSION, (-1, 1), _regression(False))
    for word in ("the loc of 'y' (Normal)", "'X'", "DPPenalty"):
        assert word in message


def test_weights_of_rows_are_refused_by_name():
    def model(y, w):
        mu = numpyro.sample("mu", MU)
        with numpyro.plate("rows", y.shape[0]), scale(scale=w):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    assert "the weight of 'y' (Normal) is computed from private argument 'w'" in _refusal(model, (NORMALS, TIMES))


def test_two_sites_are_refused():
    def model(y, t):
        mu = numpyro.sample("mu", POSITIVE)
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)
            numpyro.sample("t", dist.Exponential(mu), obs=t)

    assert "'t', 'y'" in _refusal(model, (NORMALS, TIMES), (-1, 1))


def test_discrete_latents_of_a_row_are_refused():
    pytest.importorskip("funsor")

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", y.shape[0]):
            k = numpyro.sample("k", dist.Categorical(jnp.array([0.4, 0.6])))
            numpyro.sample("y", dist.Normal(mu[k], 1), obs=y)

    assert "'k'" in _refusal(model, (NORMALS,), (-3, 3), error=(UnsupportedFamilyError, UnsupportedModelError))


def _masked(y):
    mu = numpyro.sample("mu", MU)
    with numpyro.plate("rows", y.shape[0]), mask(mask=y > 0):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def _factor(y):
    mu = numpyro.sample("mu", MU)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.factor("y", -((y - mu) ** 2))


@pytest.mark.parametrize(
    ("model", "y", "words"),
    [
        (observed(lambda mu: dist.StudentT(4.0, mu), mu=MU), NORMALS, ["'y' (StudentT)", "ExponentialFamily"]),
        (observed(lambda mu: dist.LogNormal(mu, 1.0), mu=MU), TIMES, ["'y' (LogNormal)", "logarithms"]),
        (_masked, NORMALS, ["'y' is masked"]),
        (_factor, NORMALS, ["'y' (Unit)"]),
    ],
)
def test_other_likelihoods_are_refused_by_name(model, y, words):
    message = _refusal(model, (y,), (-4, 4))
    for word in [*words, "DPPenalty"]:
        assert word in message, message


def test_residuals_are_refused():
    def model(y):
        mu = numpyro.sample("mu", MU)
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1), obs=y - mu)

    assert "the value of 'y' (Normal) is computed from latent sites" in _refusal(model, (NORMALS,), (-4, 4))


def test_a_tempered_likelihood_of_unknown_weight_is_refused():
    def model(y):
        mu, w = numpyro.sample("mu", MU), numpyro.sample("w", POSITIVE)
        with numpyro.plate("rows", y.shape[0]), scale(scale=w):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    assert "the weight of 'y' (Normal) is computed from latent sites" in _refusal(model, (NORMALS,), (-4, 4))


def test_a_model_that_does_more_than_its_distribution_is_refused():
    """The comparison with the model's own density is the last resort; here that density is tampered with."""
    separated = separate(CASES["normal"].model, (NORMALS,))
    density = separated.row_log_density((NORMALS,), {})
    methods = ("rows", "with_private", "without_private", "private_arguments", "log_prior", "constrain", "unravel")
    fields = ("model", "row_sites", "row_plates", "prototype", "num_params", "arguments")
    tampered = types.SimpleNamespace(**{name: getattr(separated, name) for name in methods + fields})
    tampered.row_log_density = lambda args, kwargs: lambda z, row: density(z, row) + 0.01 * z[0]
    message = _refusal(None, (NORMALS,), (-4, 5), separated=tampered)
    assert "'y' is not the model's" in message
    assert "DPPenalty" in message


@pytest.mark.parametrize(
    ("name", "bounds", "word"),
    [
        ("normal", None, "give `bounds=(low, high)`"),
        ("normal", (1, 1), "low < high"),
        ("normal", (-np.inf, 1), "finite"),
        ("normal", (np.zeros(4), 1), "broadcast"),
        ("poisson", (-1, 5), "start at 0 or above"),
        ("gamma", (0, 5), "lie above 0"),
        ("bernoulli_probs", (0, 1), "bounded by themselves"),
    ],
)
def test_bounds_are_checked(name, bounds, word):
    bound = _bound(name, "float32")
    assert word in _refusal(None, bound.case.args, bounds, bound.separated, ValueError)
