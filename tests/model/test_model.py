"""`separate`: the two halves give NumPyro's model back, rows are isolated, and what has no such form is refused."""

import array
import collections
import functools
import re
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.zoo import BY_NAME, CASES, STRUCTURES
from jax.flatten_util import ravel_pytree
from numpyro.contrib.control_flow import scan
from numpyro.handlers import block, condition, lift, scale, seed, substitute, trace
from numpyro.infer import (
    Predictive,
    init_to_feasible,
    init_to_mean,
    init_to_median,
    init_to_sample,
    init_to_uniform,
    init_to_value,
)
from numpyro.infer.util import constrain_fn, initialize_model, potential_energy

from numpyro_dp import DPPenalty
from numpyro_dp.model.arguments import UnsupportedModelError
from numpyro_dp.model.separable import released_model
from numpyro_dp.model.separate import separate

N = 7
_rng = np.random.default_rng(1)
X, y, g = _rng.normal(size=(N, 3)), _rng.normal(size=N), np.arange(N) % 4


@functools.cache
def _separated(name, x64):
    case = BY_NAME[name]
    return separate(case.model, case.args, case.kwargs, **case.options)


def _terms(separated, args, kwargs):
    """Compiled ``(z, rows) -> one log density per row``."""
    one = separated.row_log_density(args, kwargs)
    return jax.jit(lambda z, rows: jax.vmap(one, (None, 0))(z, tuple(r[:, None] for r in rows)))


def _points(separated, count=3):
    rng = np.random.default_rng(2)
    dtype = ravel_pytree(separated.prototype)[0].dtype
    return jnp.asarray(rng.uniform(-1, 1, (count, separated.num_params)), dtype)


def _refusal(model, args=(X, y), kwargs=None, **options):
    with pytest.raises(UnsupportedModelError) as info:
        separate(model, args, kwargs or {}, **options)
    return str(info.value)


def _assert_refused(model, *words, args=(X, y), kwargs=None, **options):
    message = _refusal(model, args, kwargs, **options)
    for word in words:
        assert word in message, message


def linear(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


# -- The two halves are the model --------------------------------------------------------------------------------------

_FLOAT32 = ("logistic", "hierarchical", "pytree_data", "shared_random_walk", "callable_object", "narrow_dtypes")


def _cases():
    """One of each structure every day."""
    for case in CASES:
        yield pytest.param(case, id=case.name, marks=() if case.name in STRUCTURES else pytest.mark.nightly)


def _cases_by_precision():
    for case in CASES:
        yield pytest.param(case, True, id=f"{case.name}-float64", marks=pytest.mark.nightly)  # see test_cut.py
        marks = () if case.name in _FLOAT32 else pytest.mark.nightly
        yield pytest.param(case, False, id=f"{case.name}-float32", marks=marks)


@pytest.mark.parametrize(("case", "x64"), [*_cases_by_precision()])
def test_prior_plus_rows_is_the_model(case, x64):
    with jax.enable_x64(x64):
        separated = _separated(case.name, x64)
        rows, terms = separated.rows(case.args, case.kwargs), _terms(separated, case.args, case.kwargs)
        log_prior = separated.log_prior(case.args, case.kwargs)

        def by_parts(z):
            t = terms(z, rows)
            return log_prior(z) + jnp.sum(t), jnp.sum(jnp.abs(t))

        def as_one(z):
            return -potential_energy(case.reference, case.args, case.kwargs, separated.unravel(z)), 0.0

        both = jax.jit(lambda z: [jax.value_and_grad(f, has_aux=True)(z) for f in (by_parts, as_one)])
        for z in _points(separated):
            ((value, magnitude), grad), ((expected, _), expected_grad) = both(z)
            assert value.dtype == (jnp.float64 if x64 else jnp.float32)
            assert np.isfinite(expected)
            tolerance = 50 * jnp.finfo(value.dtype).eps * (10 + magnitude)
            np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)
            np.testing.assert_allclose(grad, expected_grad, rtol=0, atol=20 * tolerance)


@pytest.mark.parametrize("case", [*_cases()])
def test_a_row_reaches_its_own_term_only(case):
    with jax.enable_x64(True):
        separated = _separated(case.name, True)
        rows, terms = separated.rows(case.args, case.kwargs), _terms(separated, case.args, case.kwargs)
        (z,) = _points(separated, 1)
        before = np.asarray(terms(z, rows))
        assert before.shape == (separated.num_rows,)
        for hostile in (np.nan, np.inf, 1e30, -1e30, 0.0):
            j = 2
            changed = tuple(
                r.at[j].set(jnp.nan_to_num(hostile).astype(r.dtype) if r.dtype.kind in "iub" else hostile) for r in rows
            )
            after = np.asarray(terms(z, changed))
            np.testing.assert_array_equal(np.delete(after, j), np.delete(before, j))


@pytest.mark.parametrize("case", [*_cases()])
def test_released_sites(case):
    with jax.enable_x64(True):
        separated = _separated(case.name, True)
        assert set(separated.dropped_sites) == set(case.dropped)
        (z,) = _points(separated, 1)
        z = separated.unravel(z)
        released = separated.constrain(case.args, case.kwargs)(z)
        expected = jax.jit(
            lambda z: constrain_fn(case.reference, case.args, case.kwargs, z, return_deterministic=True)
        )(z)
        assert set(released) == set(expected) - set(case.dropped)
        for name, value in released.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-10)


def test_row_sites_and_rows():
    case = BY_NAME["two_outcomes"]
    separated = _separated("two_outcomes", jax.config.jax_enable_x64)
    assert separated.row_sites == {"y", "count"}
    assert separated.num_rows == N
    assert separated.row_plate == "rows"
    assert [a.name for a in separated.private_arguments()] == ["X", "y", "count"]
    assert [r.shape for r in separated.rows(case.args, case.kwargs)] == [(N, 3), (N,), (N,)]


def test_vectors_are_in_alphabetical_order_of_the_sites():
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        a = numpyro.sample("a", dist.Normal(0, 1).expand([2]))
        numpyro.sample("y", dist.Normal(a.sum() + b, 1), obs=y)

    separated = separate(model, (y,))
    z = {"b": jnp.array(3.0), "a": jnp.array([1.0, 2.0])}
    np.testing.assert_array_equal(separated.ravel(z), [1, 2, 3])
    assert jax.tree.all(jax.tree.map(np.array_equal, separated.unravel(separated.ravel(z)), z))
    assert separated.num_params == 3


def test_separating_twice_gives_the_same():
    case = BY_NAME["hierarchical"]
    first, second = (separate(case.model, case.args, case.kwargs) for _ in range(2))
    first, second = (vars(s) | {"prototype": jax.tree.map(jnp.shape, s.prototype)} for s in (first, second))
    assert first == second


# -- Discrete latents of a row -----------------------------------------------------------------------------------------
#
# The zoo has them beside the same models summed out by hand, which `test_prior_plus_rows_is_the_model` compares.


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["membership_marked", "repeated_measures"])
def test_potential_is_that_of_numpyros_hmc(name):
    case = BY_NAME[name]
    with jax.enable_x64(True):
        separated = _separated(name, True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some algorithms will automatically enumerate", FutureWarning)
            info = initialize_model(jax.random.key(0), case.model, model_args=case.args, model_kwargs=case.kwargs)
        rows, terms = separated.rows(case.args, {}), _terms(separated, case.args, {})
        log_prior = separated.log_prior(case.args, {})
        assert jax.tree.map(jnp.shape, info.param_info.z) == jax.tree.map(jnp.shape, separated.prototype)
        ours = jax.jit(jax.value_and_grad(lambda z: -log_prior(z) - jnp.sum(terms(z, rows))))
        theirs = jax.jit(jax.value_and_grad(lambda z: info.potential_fn(separated.unravel(z))))
        for z in _points(separated):
            for value, expected in zip(ours(z), theirs(z), strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "name",
    ["dependent_latents", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("membership", "repeated_measures"))],
)
def test_each_row_is_that_of_the_model_summed_by_hand(name):
    case = BY_NAME[name]
    with jax.enable_x64(True):
        enumerated, by_hand = _separated(name, True), separate(case.summed, case.args, case.kwargs)
        (z,) = _points(by_hand, 1)
        results = []
        for separated in (enumerated, by_hand):
            one, rows = separated.row_log_density(case.args, {}), separated.rows(case.args, {})
            per_row = jax.jit(jax.vmap(jax.value_and_grad(one), (None, 0)))
            results.append(per_row(z, tuple(r[:, None] for r in rows)))
        for value, expected in zip(*results, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-12)


def test_discrete_latents_are_no_parameters():
    case = BY_NAME["membership_marked"]
    separated = _separated("membership_marked", jax.config.jax_enable_x64)
    assert separated.row_latents == {"component"}
    assert separated.row_sites == {"component", "y"}
    assert set(separated.prototype) == {"weights", "loc"}
    assert set(separated.dropped_sites.values()) == {"computed from latents that are summed out"}
    for strategy in (init_to_uniform, init_to_median, init_to_sample):
        params, is_valid = separated.init_params(jax.random.key(0), strategy, case.args, {})
        assert is_valid
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, separated.prototype)
    assert set(separated.constrain(case.args, {})(params)) == {"weights", "loc", "spread"}
    log_prior = separated.log_prior(case.args, {})(separated.ravel(params))
    np.testing.assert_allclose(log_prior, separated.log_prior((np.full(N, np.nan),), {})(separated.ravel(params)))
    drawn = Predictive(released_model(case.model), num_samples=2)(jax.random.key(0), *case.args)
    assert drawn["y"].shape == drawn["component"].shape == (2, N)


def _two_components(y, w):
    loc = numpyro.sample("loc", dist.Normal(0, 1).expand([2]))
    with numpyro.plate("rows", y.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(loc[z], 0.05), obs=y)
        numpyro.sample("w", dist.Normal(loc[z], 0.05), obs=w)


def test_outcomes_that_contradict_each_other():
    """Each component explains one outcome and finds the other impossible: the terms must not be multiplied as such."""
    args = (np.zeros(N), np.ones(N))
    separated = separate(_two_components, args)
    z, rows = jnp.array([0.0, 1.0]), separated.rows(args, {})
    value, grad = jax.jit(jax.vmap(jax.value_and_grad(separated.row_log_density(args, {})), (None, 0)))(
        z, tuple(r[:, None] for r in rows)
    )
    np.testing.assert_allclose(value, -np.log(2 * np.pi * 0.05**2) - 0.5 / 0.05**2, rtol=1e-5)
    np.testing.assert_allclose(grad, np.broadcast_to([0.7 / 0.05**2, -0.3 / 0.05**2], (N, 2)), rtol=1e-4)


def test_markov_within_a_row():
    """Its reuse of axes changes nothing."""
    from numpyro.contrib.funsor import markov

    def model(Y, around=iter):
        probs, loc = numpyro.sample("probs", dist.Dirichlet(jnp.ones((2, 2))).to_event(1)), jnp.array([0.0, 1.0])
        with numpyro.plate("persons", Y.shape[0]):
            state = 0
            for t in around(range(Y.shape[1])):
                state = numpyro.sample(f"state_{t}", dist.Categorical(probs[state]))
                numpyro.sample(f"y_{t}", dist.Normal(loc[state], 1.0), obs=Y[:, t])

    values = []
    for variant in (model, functools.partial(model, around=markov)):
        separated = separate(variant, (X,))
        values.append(_terms(separated, (X,), {})(jnp.array([0.3, -0.2]), separated.rows((X,), {})))
    np.testing.assert_allclose(*values, rtol=1e-6)


def _with_latent(latent, use=lambda z, loc: loc[z]):
    def model(X, y):
        loc = numpyro.sample("loc", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", X.shape[0]):
            z = numpyro.sample("z", latent(X, loc))
            numpyro.sample("y", dist.Normal(use(z, loc), 1.0), obs=y)

    return model


_THIRDS = dist.Categorical(jnp.ones(3) / 3)


@pytest.mark.parametrize(
    ("latent", "words"),
    [
        (lambda X, loc: dist.Poisson(2.0), "'z' is discrete and has no finite list of values"),
        (lambda X, loc: dist.Binomial(jnp.int32(X[:, 0] > 0), 0.5), "are not the same public ones for all rows"),
        (lambda X, loc: dist.Bernoulli(jnp.ones(2) / 2).to_event(1), "'z' is discrete and has several values at once"),
        (lambda X, loc: dist.Categorical(logits=X - X.mean(0)), "the log density of 'z' is not a sum over rows"),
        (lambda X, loc: dist.Categorical(logits=X[::-1] * loc), "the log density of 'z' is not a sum over rows"),
        (lambda X, loc: dist.Categorical(logits=loc * X.shape[0]), "the log density of 'z' is not a sum over rows"),
        (lambda X, loc: dist.Categorical(logits=X[:, None] * loc), "the log density of 'z' has shape (7, 7)"),
    ],
)
def test_latents_that_cannot_be_summed_out(latent, words):
    _assert_refused(_with_latent(latent, lambda z, loc: loc[0]), words)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda z, loc: loc[jnp.roll(z, 1)], "the log density of 'y' is not a sum over rows"),
        (lambda z, loc: loc[z] / z.shape[0], "the log density of 'y' is not a sum over rows"),
        (lambda z, loc: loc[z[::-1]], "the log density of 'y' is not a sum over rows"),
        (lambda z, loc: loc[jnp.cumsum(z) - jnp.cumsum(z) + z.max()], "the log density of 'y' is not a sum over rows"),
        (lambda z, loc: jnp.einsum("nk,k->n", jax.nn.one_hot(z, 3), loc), "'z' cannot be enumerated"),
        (lambda z, loc: loc[0] if z[0] else loc[1], "needs the values of an array argument in Python"),
    ],
)
def test_uses_of_latents_that_mix_rows(use, words):
    _assert_refused(_with_latent(lambda X, loc: _THIRDS, use), words)


def test_enumeration_that_would_give_another_model():
    """Right with the latents at hand, row by row; the extra axis of enumeration is what these do not expect."""

    def outside_of_its_plate(Y):
        loc = numpyro.sample("loc", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", Y.shape[0], dim=-2), numpyro.plate("visits", Y.shape[1], dim=-1):
            z = numpyro.sample("z", _THIRDS)
            numpyro.sample("Y", dist.Normal(loc[z], 1.0), obs=Y)
        with numpyro.plate("rows", Y.shape[0]):
            numpyro.factor("changes", -jnp.sum(z == 0, -1) * 0.5)

    words = ("summing out 'z' by enumeration would give another model", "sum it out by hand")
    _assert_refused(outside_of_its_plate, *words, args=(X,))
    _assert_refused(_with_latent(lambda X, loc: _THIRDS, lambda z, loc: loc[z.reshape(-1)]), *words)
    # Errors while enumerating leave nothing behind.
    case = BY_NAME["membership"]
    assert separate(case.model, case.args).row_latents == {"component"}


def test_latents_whose_plates_cross():
    def model(Y):
        loc = numpyro.sample("loc", dist.Normal(0, 1).expand([2, 2]))
        a, b = numpyro.plate("a", 2, dim=-2), numpyro.plate("b", 3, dim=-1)
        with numpyro.plate("rows", Y.shape[0], dim=-3):
            with a:
                u = numpyro.sample("u", dist.Bernoulli(0.5))
            with b:
                v = numpyro.sample("v", dist.Bernoulli(0.5))
            with a, b:
                numpyro.sample("Y", dist.Normal(loc[u, v], 1.0), obs=Y)

    words = "'u', 'v' cannot be enumerated", "neither's plates hold the other's"
    _assert_refused(model, *words, args=(_rng.normal(size=(N, 2, 3)),))


def test_latents_outside_of_the_row_plate():
    def by_hand(site):
        def model(X, y, g, num_groups):
            mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2]))
            k = site(X, num_groups)
            with numpyro.plate("rows", X.shape[0]):
                numpyro.sample("y", dist.Normal(mu[k if jnp.ndim(k) == 0 or len(k) == N else k[g]], 1.0), obs=y)

        return model

    def in_plate(name, size):
        with numpyro.plate(name, size):
            return numpyro.sample("k", dist.Bernoulli(0.5))

    for site in (
        lambda X, num_groups: numpyro.sample("k", dist.Bernoulli(0.5)),
        lambda X, num_groups: in_plate("groups", num_groups),
        lambda X, num_groups: in_plate("people", X.shape[0]),  # as many as rows, but another plate
        lambda X, num_groups: numpyro.sample("k", dist.Bernoulli(0.5).expand([X.shape[0]])),
    ):
        words = ("latent site 'k' is discrete and outside of the row plate", "sum it out by hand")
        _assert_refused(by_hand(site), *words, args=(X, y, g, 4))


def test_spike_and_slab_prior():
    def model(X, y):
        keep = numpyro.sample("keep", dist.Bernoulli(0.5).expand([3]))
        b = numpyro.sample("b", dist.Normal(0, jnp.where(keep == 1, 2.0, 0.1)))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)

    _assert_refused(model, "latent site 'keep' is discrete", "a mixture as the prior")


def test_parameters_and_factors_that_use_the_latents_of_rows():
    def model(X, y):
        _with_latent(lambda X, loc: _THIRDS, lambda z, loc: kept.append(z) or loc[z])(X, y)
        z = kept.pop()
        numpyro.sample("theta", dist.Normal(jnp.sum(z), 1.0))
        numpyro.factor("total", -jnp.sum(z) * 0.5)

    kept = []
    _assert_refused(
        model, "the prior of 'theta' uses 'z', of which each row", "factor 'total' is computed from 'z' over all rows"
    )


def test_only_discrete_latents():
    def model(y):
        with numpyro.plate("rows", y.shape[0]):
            z = numpyro.sample("z", dist.Bernoulli(0.5))
            numpyro.sample("y", dist.Normal(z, 1.0), obs=y)

    _assert_refused(model, "no latent site beside the discrete 'z'", args=(y,))


def test_hidden_markov_models_by_scan():
    def over_rows(Y):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones((2, 2))).to_event(1))

        def step(state, y):
            state = numpyro.sample("state", dist.Categorical(probs[state]))
            numpyro.sample("y", dist.Normal(state, 1.0).expand([3]).to_event(1), obs=y)
            return state, None

        scan(step, 0, Y)

    def within_rows(Y):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones((2, 2))).to_event(1))

        def step(state, y):
            with numpyro.plate("persons", Y.shape[0]):
                state = numpyro.sample("state", dist.Categorical(probs[state]))
                numpyro.sample("y", dist.Normal(state, 1.0), obs=y)
            return state, None

        scan(step, jnp.zeros(Y.shape[0], int), Y.T)

    for model in (over_rows, within_rows):
        _assert_refused(model, "'state' is discrete, and the model runs `scan`", "forward recursion", args=(X,))


def test_without_funsor(monkeypatch):
    monkeypatch.setitem(sys.modules, "funsor", None)
    monkeypatch.setitem(sys.modules, "numpyro.contrib.funsor", None)
    case = BY_NAME["membership"]
    _assert_refused(case.model, "'component'", "pip install 'numpyro_dp[enumeration]'", "by hand", args=case.args)
    assert separate(linear, (X, y)).num_rows == N


@pytest.mark.nightly
def test_funsor_is_imported_only_where_it_is_needed():
    """Its import has side effects; and the first one may happen while something is traced."""
    script = """
import sys, warnings
warnings.simplefilter("error")
import jax, numpy as np, numpyro, numpyro.distributions as dist
from helpers.zoo import BY_NAME
from numpyro_dp.model.separate import separate

def density(name, args):
    separated = separate(BY_NAME[name].model, args)
    rows = separated.rows(args, {})
    one = jax.vmap(separated.row_log_density(args, {}), (None, 0))
    return one(separated.ravel(separated.prototype), tuple(r[:, None] for r in rows))

density("mixture", BY_NAME["mixture"].args)
assert "funsor" not in sys.modules
args = BY_NAME["membership"].args
with jax.checking_leaks():
    first = jax.jit(lambda args: density("membership", args))(args)
np.testing.assert_allclose(first, density("membership", args), rtol=1e-5)
"""
    environment = {"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu", "PATH": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


# -- A start without data ----------------------------------------------------------------------------------------------

_STRATEGIES = [
    init_to_median,
    init_to_median(num_samples=5),
    init_to_uniform,
    init_to_uniform(radius=0.5),
    init_to_sample,
    init_to_feasible,
    init_to_mean,
    init_to_value(values={"b": np.zeros(3)}),
]


@pytest.mark.parametrize("strategy", _STRATEGIES, ids=lambda s: getattr(s, "__name__", None) or s.func.__name__)
@pytest.mark.parametrize("name", ["hierarchical", pytest.param("non_centred", marks=pytest.mark.nightly)])
def test_start_is_finite_under_the_prior(name, strategy):
    case = BY_NAME[name]
    separated = _separated(name, jax.config.jax_enable_x64)
    params, is_valid = separated.init_params(jax.random.key(0), strategy, case.args, case.kwargs)
    assert is_valid
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, separated.prototype)
    assert jnp.isfinite(separated.log_prior(case.args, case.kwargs)(separated.ravel(params)))


def test_starts_of_several_chains_and_data():
    case = BY_NAME["hierarchical"]
    separated = _separated("hierarchical", jax.config.jax_enable_x64)
    keys = jax.random.split(jax.random.key(0), 3)
    params, is_valid = separated.init_params(keys, init_to_uniform, case.args, case.kwargs)
    assert is_valid.shape == (3,)
    assert params["b"].shape == (3, 3)
    other = (np.full((N, 3), np.nan), np.full(N, 10**6), *case.args[2:])
    again, _ = separated.init_params(keys, init_to_uniform, other, case.kwargs)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, again))


def test_prior_and_constrain_do_not_see_the_rows():
    case = BY_NAME["hierarchical"]
    separated = _separated("hierarchical", jax.config.jax_enable_x64)
    other = (np.full((N, 3), np.nan), np.full(N, 10**6), np.full(N, -1), 4)
    (z,) = _points(separated, 1)
    for get in (
        lambda args: separated.log_prior(args, {})(z),
        lambda args: separated.constrain(args, {})(separated.unravel(z)),
    ):
        assert jax.tree.all(jax.tree.map(np.array_equal, get(case.args), get(other)))


# -- Refusals: the private rows ----------------------------------------------------------------------------------------


def test_latent_with_one_value_per_row_but_no_plate():
    def model(X, y):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([X.shape[0]]))
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    _assert_refused(model, "latent site 'effect' has shape (7,) with all rows and (1,) with one", "integrated out")


@pytest.mark.parametrize("index", ["whole", "arange"])
def test_latent_with_a_hard_coded_value_per_row(index):
    def model(y):
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([N]))
        effect = effect if index == "whole" else effect[jnp.arange(y.shape[0])]
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)

    words = {"whole": "works with 7 rows but not with another number", "arange": "'y' is not a sum over rows"}[index]
    _assert_refused(model, words, args=(y,))


def test_subsampled_plate():
    def by_size(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", N, subsample_size=3) as index:
            numpyro.sample("y", dist.Normal(X[index] @ b, 1.0), obs=y[index])

    def by_primitive(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", N, subsample_size=3):
            rows, outcomes = numpyro.subsample(X, event_dim=1), numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(rows @ b, 1.0), obs=outcomes)

    for model in (by_size, by_primitive):
        _assert_refused(model, "plate 'rows' is subsampled (3 of 7)", "remove `subsample_size`")


def test_factor_over_all_rows():
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.factor("loss", -jnp.sqrt(jnp.sum((y - X @ b) ** 2)))

    _assert_refused(model, "factor 'loss' is computed from private argument 'X', 'y' over all rows", "numpyro.plate")


_MIXING = {
    "standardise": lambda X: (X - X.mean(0)) / X.std(0),
    "centre": lambda X: X - jnp.mean(X, 0),
    "rank": lambda X: jnp.argsort(jnp.argsort(X, 0), 0) * 1.0,
    "cumulate": lambda X: jnp.cumsum(X, 0),
    "lag": lambda X: jnp.concatenate([jnp.zeros((1, X.shape[1])), X[:-1]]),
    "reverse_and_gate": lambda X: X * X[::-1],
    "largest": lambda X: X / jnp.max(jnp.abs(X)),
    "whiten": lambda X: X @ jnp.linalg.inv(X.T @ X + jnp.eye(X.shape[1])),
    "winsorise": lambda X: jnp.clip(X, *jnp.quantile(X, jnp.array([0.1, 0.9]))),
    "clip far out": lambda X: jnp.clip(X, X.mean(0) - 5 * X.std(0), X.mean(0) + 5 * X.std(0)),
    "drop outliers": lambda X: jnp.where(jnp.abs(X - X.mean(0)) > 3 * X.std(0), 0, X),
    "impute_by_column_mean": lambda X: jnp.where(jnp.isnan(X), jnp.nanmean(X, 0), X),
}


@pytest.mark.parametrize("kind", _MIXING)
def test_rows_mixed_inside_the_model(kind):
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(_MIXING[kind](X) @ b, 1.0), obs=y)

    _assert_refused(model, "'y' is not a sum over rows", "do it beforehand with public constants")


def _filled(kind, z):
    known = {"NaN": ~jnp.isnan(z), "999": z != 999, "-9": z != -9, "none": jnp.isfinite(z)}[kind]
    mean = jnp.sum(jnp.where(known, z, 0)) / jnp.maximum(known.sum(), 1)
    return jnp.where(known, z, 0.5 if kind == "none" else mean)


@pytest.mark.parametrize("kind", ["NaN", "999", "-9", "none"])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_missing_values_that_are_filled_from_other_rows(kind, dtype):
    """Which of the few synthetic rows has one must not be left to chance, which goes by names."""

    def model(z, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", z.shape[0]):
            numpyro.sample("y", dist.Normal(_filled(kind, z) * b, 1.0), obs=y)

    args = X[:, 0].astype(dtype), y
    if kind == "none" or (kind == "NaN" and dtype == np.int32):
        assert separate(model, args)
    else:
        _assert_refused(model, "'y' is not a sum over rows", args=args)


def test_a_parameter_that_is_fixed_stays_so_where_outcomes_are_drawn():
    """Not drawn anew from its prior for each row: informations and expected counts would be those of another law."""

    def free(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b, sigma), obs=y)

    def fixed(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b, 0.1), obs=y)

    z, words = jnp.array([0.3, -0.2, 0.1]), jnp.array([3, 4], jnp.uint32)
    found = []
    for model in (condition(free, {"sigma": 0.1}), fixed):
        separated = separate(model, (X, y))
        row = tuple(part[:1] for part in separated.rows((X, y), {}))
        found.append(float(separated.drawn_log_density((X, y), {})(z, row, words)))
        kernel = DPPenalty(model, eps=1.0, prepare=False)
        kernel.separate((X, y), {})
        drawn = trace(seed(kernel.model, 0)).get_trace(X, y)
        assert not drawn["y"]["is_observed"]
        assert "sigma" not in drawn or float(drawn["sigma"]["value"]) == pytest.approx(0.1)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_table_as_a_matrix():
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("y", dist.Normal(jnp.linalg.qr(X)[0] @ b, 1.0), obs=y)

    _assert_refused(model, "cannot be evaluated on a single row", "jnp.linalg.qr(X)[0] @ b", "decompose the table")


def test_time_series_over_rows():
    def model(y):
        phi = numpyro.sample("phi", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(phi * y[:-1], 1.0), obs=y[1:])

    assert "row" in _refusal(model, (y,))


def test_gaussian_process_over_rows():
    def model(x, y):
        length = numpyro.sample("length", dist.LogNormal(0, 1))
        gap = x[:, None] - x
        numpyro.sample("y", dist.MultivariateNormal(0.0, jnp.exp(-((gap / length) ** 2)) + jnp.eye(len(x))), obs=y)

    _assert_refused(model, "'y' is not a sum over rows", args=(X[:, 0], y))


@pytest.mark.parametrize("limit", [0, 4, 1000])
def test_scale_by_the_number_of_rows(limit):
    """Also where the number matters from some size on, which no small table shows."""

    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with scale(scale=1 / max(X.shape[0], limit) if limit < 1000 else min(1.0, 5 / X.shape[0])):
            numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)

    _assert_refused(model, "scaled by the number of rows" if limit == 0 else "'y'", "row")


def test_broadcasting_of_column_against_vector():
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3, 1]))
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)

    _assert_refused(model, "'y' has shape (7, 7)", "broadcast")


def test_observed_summary():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("mean", dist.Normal(mu, 0.1), obs=y.mean())

    _assert_refused(model, "'mean'", "not a sum over rows", args=(y,))


_PRIORS = {
    "mean": lambda X, y: dist.Normal(y.mean(), 1.0),
    "spread": lambda X, y: dist.Normal(0, X.std()),
    "support": lambda X, y: dist.Uniform(0, jnp.max(y)),
    "constant_in_disguise": lambda X, y: dist.Normal(0 * y[0], 1.0),
    "loop": lambda X, y: dist.Normal(jax.lax.fori_loop(0, 3, lambda i, c: c + y[i], 0.0), 1.0),
    "branch": lambda X, y: dist.Normal(jax.lax.cond(y[0] > 0, lambda: 1.0, lambda: 0.0), 1.0),
    "custom_derivative": lambda X, y: dist.Normal(jax.nn.softplus(y).sum(), 1.0),
    "stopped_gradient": lambda X, y: dist.Normal(jax.lax.stop_gradient(y[3]), 1.0),
}


@pytest.mark.parametrize("kind", _PRIORS)
def test_prior_from_private_rows(kind):
    def model(X, y):
        theta = numpyro.sample("theta", _PRIORS[kind](X, y))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    _assert_refused(model, "the prior of 'theta' uses private argument", "public")


def test_prior_scaled_by_private_rows():
    def model(y):
        with scale(scale=jnp.mean(y**2)):
            theta = numpyro.sample("theta", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    _assert_refused(model, "the prior of 'theta' uses private argument 'y'", args=(y,))


@pytest.mark.parametrize("kind", ["prior", "factor"])
def test_prior_that_depends_on_the_number_of_rows(kind):
    def model(y):
        theta = numpyro.sample("theta", dist.Normal(0, y.shape[0] if kind == "prior" else 1.0))
        if kind == "factor":
            numpyro.factor("norm", -y.shape[0] * jnp.log1p(theta**2))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    site = {"prior": "the prior of 'theta'", "factor": "site 'norm'"}[kind]
    _assert_refused(model, f"{site} depends on the number of rows", "plain Python number", args=(y,))


# -- Refusals: data by other ways --------------------------------------------------------------------------------------


def _closing_over(data):
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("y", dist.Normal(data @ b, 1.0), obs=y)

    return model


def global_array(y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def global_array_reduced_by_numpy(y):
    b = numpyro.sample("b", dist.Normal(X.mean(), np.std(X)))
    numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


def array_as_default(y, data=y):
    b = numpyro.sample("b", dist.Normal(float(np.mean(data)), 1))
    numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


class WithData:
    def __init__(self, data):
        self.data = data

    def method(self, y):
        b = numpyro.sample("b", dist.Normal(self.data.mean(), 1))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=y)

    def __call__(self, y):
        self.method(y)


def _helper(b):
    return np.mean(X) * b


def array_in_a_helper(y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(_helper(b), 1.0), obs=y)


@pytest.mark.parametrize(
    "model",
    [
        array_in_a_helper,
        _closing_over(X),
        _closing_over(jnp.asarray(X)),
        global_array,
        global_array_reduced_by_numpy,
        array_as_default,
        functools.partial(linear, X),
        functools.partial(linear, X=X),
        WithData(y).method,
        WithData(y),
        condition(_closing_over(X), data={"none": y}),
    ],
)
def test_closed_over_data(model):
    kwargs = {"y": y}
    _assert_refused(model, "closes over", "pass it as an argument", args=(), kwargs=kwargs)


def test_outcomes_by_condition():
    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)

    _assert_refused(condition(model, data={"y": y}), "closes over", args=(X,))
    _assert_refused(condition(model, data={"y": jnp.asarray(y)}), "closes over", args=(X,))


def test_second_table_that_is_closed_over():
    other = np.ones(5)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        numpyro.sample("other", dist.Normal(mu, 1.0), obs=other)

    _assert_refused(model, "site 'other' is observed with an array that the model closes over", args=(y,))


def test_lists_of_numbers():
    def model(X, y):
        linear(jnp.asarray(X), jnp.asarray(y))

    _assert_refused(model, "argument 'y' is a list of 7 numbers", "jnp.array(y)", args=(X, y.tolist()))
    _assert_refused(model, "argument 'X' is a list of 7", args=(X.tolist(), y))
    _assert_refused(model, "argument 'X'", "argument 'y'", args=(X.tolist(), y.tolist()))
    _assert_refused(model, "argument 'y' is a tuple", args=(X, tuple(y)))

    def nested(data):
        model(data["X"], data["y"])

    _assert_refused(nested, "argument 'data['y']'", args=({"X": X, "y": y.tolist()},))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {f"person {k}": float(k) for k in range(N)},
            f"'extra' is a dict of {N} numbers.*jnp.array\\(list\\(extra.values",
        ),
        (collections.OrderedDict((k, [float(k), 1.0]) for k in range(N)), f"'extra' is an OrderedDict of {N} numbers"),
        ({f"person {k}": jnp.asarray(1.0) for k in range(N)}, f"'extra' is a dict of {N} numbers"),
        (dict.fromkeys(range(N), "yes"), "'extra' is a dict as long as there are rows.*array of codes"),
        ({"a": {"b": dict.fromkeys(range(N), 1.0)}}, r"'extra\['a'\]\['b'\]' is a dict"),
        ([*range(N - 1), "NA"], f"'extra' is a list of {N} values"),
        ([*range(N - 1), None], f"'extra' is a list of {N} numbers"),
        ([np.ones(2), *range(N - 1)], f"'extra' is a list of {N} values"),
        ({"known": np.ones(2)} | {f"k{k}": 1.0 for k in range(N)}, f"'extra' is a dict of {N} values"),
        ([np.ones(2)] * N, f"'extra' is a list of {N} values"),
        ({f"person {k}": np.ones(2) for k in range(N)}, f"'extra' is a dict of {N} values"),
        (collections.deque(range(N)), f"'extra' is a deque of {N} numbers"),
        (bytes(N), f"'extra' is a bytes of {N} numbers"),
        (bytearray(N), f"'extra' is a bytearray of {N} numbers"),
        (array.array("d", range(N)), f"'extra' is an array of {N} numbers"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_rows_in_a_container_of_pythons_are_refused(values, message):
    """A person's name, which a key may be, is in no message."""

    def with_extra(X, y, extra):
        linear(X, y)

    with pytest.raises(UnsupportedModelError, match=message) as error:
        separate(with_extra, (X, y, values))
    assert "person" not in str(error.value)


def test_options_in_containers_are_public():
    def with_options(X, y, options):
        linear(X, y)

    some = [{"scale": 2.0, "df": 4}, {"knots": np.arange(3.0), "degree": 3}, bytes(3), [np.ones(2)] * 3, {}]
    for options in (*some, {"X": X, "y": y}):
        assert separate(with_options, (X, y, options)).num_rows == N


def test_a_list_on_which_the_model_fails_is_named():
    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("N", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)  # which multiplies by y

    X, y = jnp.ones((7, 2)), [0, 1, 0, 1, 0, 1, 1]
    _assert_refused(model, "argument 'y' is a list of 7 numbers", "jnp.array(y)", args=(X, y))


def test_codes_that_are_no_whole_numbers_say_what_to_do():
    def model(h, y):
        with numpyro.plate("h", 4):
            u = numpyro.sample("u", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(u[h], 1), obs=y)

    with pytest.raises(TypeError, match="integer") as error:
        separate(model, (g.astype(np.float32), y))
    note = error.value.__notes__[-1]
    assert "'h' (7,) float32" in note
    assert "must be whole numbers: `.astype(int)`" in note


def test_short_lists_are_options():
    def model(y, sizes):
        mu = numpyro.sample("mu", dist.Normal(0, sizes[0]).expand(sizes))
        numpyro.sample("y", dist.Normal(mu.sum(), 1.0), obs=y)

    assert separate(model, (y, [2, 3])).num_rows == N


def test_tables_that_are_no_arrays():
    class Column:
        shape, dtype = (N,), np.dtype(float)

        def __array__(self):
            raise AssertionError("a private value was read")

    class Frame:
        shape, columns, dtypes = (N, 3), ["a", "b", "c"], [np.dtype(float)] * 3

    _assert_refused(linear, "argument 'y' is a Column", "y.to_numpy()", args=(X, Column()))
    _assert_refused(linear, "argument 'X' is a Frame", "argument 'y' is a Column", args=(Frame(), Column()))


def test_pandas():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    _assert_refused(linear, "argument 'X' is a DataFrame", "X.to_numpy()", args=(frame, y))
    _assert_refused(linear, "argument 'y' is a Series", args=(X, frame["a"]))

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(frame["a"].mean(), 1))
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    _assert_refused(model, "closes over 'frame'", args=(y,))


@pytest.mark.parametrize(
    "column",
    [
        np.array(["a", "b"] * 3 + ["a"]),
        np.array(["a", "b"] * 3 + ["a"], dtype=object),
        np.arange(N).astype("datetime64[D]"),
        np.arange(N).astype(np.longdouble),
    ],
)
def test_arrays_that_are_no_numbers(column):
    _assert_refused(linear, "argument 'y' has dtype", "encode it as numbers", args=(X, column))


def test_masked_arrays():
    _assert_refused(linear, "argument 'y' is a MaskedArray", "mask", args=(X, np.ma.masked_invalid(y)))


def test_random_keys_as_rows():
    _assert_refused(linear, "argument 'y' has dtype key", args=(X, jax.random.split(jax.random.key(0), N)))


# -- Refusals: values in Python ----------------------------------------------------------------------------------------

_IN_PYTHON = {
    "branch": lambda g: 1.0 if g[0] > 1 else 2.0,
    "float": lambda g: float(g[0]),
    "number_of_groups": lambda g: float(len(np.unique(g))),
    "jax_unique": lambda g: float(len(jnp.unique(g))),
    "largest": lambda g: 1.0 * sum(range(g.max())),
    "item": lambda g: g.max().item(),
    "boolean_index": lambda g: g[g > 1].sum(),
    "numpy_index": lambda g: np.ones(4)[g].sum(),
    "plate_size": lambda g: jnp.ones(g.max() + 1).sum(),
}


@pytest.mark.parametrize("kind", _IN_PYTHON)
def test_values_used_in_python(kind):
    def model(y, g):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu, 1.0 + _IN_PYTHON[kind](g)), obs=y)

    _assert_refused(model, "needs the values of an array argument in Python (line ", "beforehand", args=(y, g))
    assert re.search(rf'\(line \d+ of test_model.py: `"{kind}": lambda g: .*`\)', _refusal(model, (y, g), None))


def _printing_all_rows(X):
    jax.debug.print("{X}", X=X)
    return 0.0


_SHOWN = {
    "print": lambda X: _printing_all_rows(X),
    "ordered": lambda X: jax.debug.print("{}", X.sum(), ordered=True) or 0.0,
    "callback": lambda X: jax.debug.callback(print, X[0]) or 0.0,
    "in_a_branch": lambda X: jax.lax.cond(X[0, 0] > 0, lambda: _printing_all_rows(X), lambda: 0.0),
    "at_one_row": lambda X: _printing_all_rows(X) if X.shape[0] == 1 else 0.0,
}


@pytest.mark.parametrize("kind", _SHOWN)
def test_rows_on_the_console(kind, capsys):
    """JAX keeps what is shown whatever is computed from it: priors seemed to need the rows, and had the blame."""

    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
        numpyro.sample("y", dist.Normal(X @ b + _SHOWN[kind](X), 1.0), obs=y)

    message = _refusal(model)
    assert re.search(r"1\. the model calls `jax\.debug\.(print|callback)`, which would show private rows", message)
    assert "remove it" in message
    assert "prior of" not in message
    jax.effects_barrier()
    assert capsys.readouterr().out == ""


# -- Refusals: what is a row? ------------------------------------------------------------------------------------------


def test_param_site():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        sigma = numpyro.param("sigma", 1.0, constraint=dist.constraints.positive)
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)

    _assert_refused(model, "'sigma' is a numpyro.param site", "numpyro.sample", args=(y,))
    lifted = lift(model, prior={"sigma": dist.HalfNormal(1.0)})
    assert set(separate(lifted, (y,)).prototype) == {"mu", "sigma"}


def test_random_model():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + jax.random.normal(numpyro.prng_key()), 1.0), obs=y)

    _assert_refused(model, "numpyro.prng_key", args=(y,))


def test_ambiguous_row_plate():
    def model(Y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("patients", Y.shape[0], dim=-2), numpyro.plate("visits", Y.shape[1], dim=-1):
            numpyro.sample("Y", dist.Normal(mu, 1.0), obs=Y)

    square = _rng.normal(size=(5, 5))
    _assert_refused(model, "'patients' (5)", "'visits' (5)", "row_plate=", args=(square,))
    assert separate(model, (square,), row_plate="patients").row_plate == "patients"
    _assert_refused(model, "'Y'", args=(_rng.normal(size=(4, 5)),))
    # Rows on the second axis cannot be had, however they are called.
    _refusal(model, (_rng.normal(size=(4, 5)),), row_plate="visits")
    _refusal(model, (square,), row_plate="visits")


def test_transposed_outcomes():
    def in_plates(X, Y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("items", Y.shape[0], dim=-2), numpyro.plate("rows", Y.shape[1], dim=-1):
            numpyro.sample("Y", dist.Normal(X @ b, 1.0), obs=Y)

    def bare(X, Y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("Y", dist.Normal(X @ b, 1.0), obs=Y)

    for items in (4, 9):
        Y = _rng.normal(size=(items, N))
        _assert_refused(in_plates, "row_plate=", args=(X, Y))
        _assert_refused(in_plates, "axis", "leading axis", args=(X, Y), row_plate="rows")
        _assert_refused(bare, "'X' (7, 3)", "transposed", args=(X, Y))


def test_transposed_covariates():
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("y", dist.Normal(b @ X, 1.0), obs=y)

    _assert_refused(model, "argument 'X' has shape (3, 7)", "transposed", args=(X.T, y))


def test_tables_of_different_length():
    def model(y, other):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        with numpyro.plate("others", other.shape[0]):
            numpyro.sample("other", dist.Normal(mu, 1.0), obs=other)

    _assert_refused(model, "different leading axes (5, 7)", "row_plate=", args=(y, np.ones(5)))
    _assert_refused(model, "'other' is observed with 'other'", "public", args=(y, np.ones(5)), row_plate="rows")
    separated = separate(model, (y, np.ones(5)), row_plate="rows", private_args=["y"])
    assert separated.row_sites == {"y"}
    assert [a.name for a in separated.public_arguments()] == ["other"]


def test_nothing_observed():
    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    _assert_refused(model, "no site of the model is observed", "`obs=`", args=(X,))
    _assert_refused(model, "no site of the model is observed", "`obs=`", args=(X, None))


def test_outcomes_that_are_no_argument():
    def model(X):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("y", dist.Normal(b.sum(), 1.0), obs=0.0)

    _assert_refused(model, "no observed site is computed from an array argument", args=(X,))


def test_no_latent_site():
    _assert_refused(lambda y: numpyro.sample("y", dist.Normal(0, 1), obs=y), "no latent site", args=(y,))


def test_empty_table():
    _assert_refused(linear, "argument 'y' has no rows", args=(X[:0], y[:0]))


def test_fixed_latents():
    def model(X, y):
        numpyro.sample("a", dist.Normal(0, 1))
        linear(X, y)

    assert set(separate(condition(model, data={"a": 0.5}), (X, y)).prototype) == {"b"}
    # An array may as well be a table.
    _assert_refused(condition(model, data={"b": jnp.zeros(3)}), "'b' is observed with an array", "to fix a parameter")
    # As in NumPyro, an inference kernel overrides `substitute`.
    assert set(separate(substitute(model, data={"b": jnp.zeros(3)}), (X, y)).prototype) == {"a", "b"}


def test_one_message_lists_all_problems():
    def model(X, y):
        theta = numpyro.sample("theta", dist.Normal(y.mean(), 1.0))
        phi = numpyro.sample("phi", dist.Uniform(0, jnp.max(X)))
        with numpyro.plate("rows", X.shape[0]):
            effect = numpyro.sample("effect", dist.Normal(0, 1))
        gamma = numpyro.sample("gamma", dist.Normal(effect.sum(), 1.0))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(theta + phi + gamma, 1.0), obs=y)
        numpyro.factor("loss", -jnp.abs(jnp.sum(y)))

    with pytest.raises(UnsupportedModelError) as info:
        separate(model, (X, y))
    assert len(info.value.problems) == 4
    for k, words in enumerate(["'gamma'", "'theta'", "'phi'", "'loss'"], 1):
        assert any(
            f"  {i}. " in line and words in line for i in range(1, 5) for line in str(info.value).splitlines()
        ), k


def test_errors_of_the_model_itself_come_through():
    def model(X, y):
        raise KeyError("a mistake in the model")

    with pytest.raises(KeyError, match="a mistake"):
        separate(model, (X, y))


# -- Options -----------------------------------------------------------------------------------------------------------


def test_row_plate_must_exist():
    _assert_refused(
        linear, "row_plate='persons' is not a plate of the model; its plates are: 'rows'", row_plate="persons"
    )


def test_row_plate_of_groups_is_refused():
    case = BY_NAME["hierarchical"]
    _assert_refused(case.model, "no argument is private", "plate 'groups'", args=case.args, row_plate="groups")


def test_private_args():
    def model(X, y, knots):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("y", dist.Normal(X @ b + jnp.sum(knots), 1.0), obs=y)

    args = (X, y, np.ones(N))
    assert [a.name for a in separate(model, args, private_args=["X", "y"]).private_arguments()] == ["X", "y"]
    assert [a.name for a in separate(model, args, private_args=("X", "y")).public_arguments()] == ["knots"]
    _assert_refused(model, "private_args=", args=args)  # as many knots as rows: which are they?
    _assert_refused(model, "private_args names 'z'", "'X', 'y', 'knots'", args=args, private_args=["X", "z"])
    _assert_refused(model, "'X'", "not listed in `private_args=`", args=args, private_args="y")
    _assert_refused(model, "'y'", args=args, private_args="X")


def test_private_args_within_a_tree():
    case = BY_NAME["pytree_data"]
    whole = separate(case.model, case.args, case.kwargs, private_args=["data"])
    leaves = separate(case.model, case.args, case.kwargs, private_args=["data['y']", "data['X']['dense']"])
    assert whole.private_arguments() == leaves.private_arguments()
    assert [a.name for a in whole.private_arguments()] == ["data['X']['dense']", "data['y']"]


def test_names_of_arguments():
    def model(X, *more, y, **others):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("y", dist.Normal(X @ b + more[0] + others["offset"], 1.0), obs=y)

    separated = separate(model, (X, y), {"y": y, "offset": y})
    assert [a.name for a in separated.arguments] == ["X", "args[1]", "offset", "y"]
    wrapped = seed(functools.partial(scale(linear, scale=0.5)), 0)
    assert [a.name for a in separate(wrapped, (X, y)).arguments] == ["X", "y"]


# -- Sizes and dtypes at the edges -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
def test_few_rows(n):
    """Here n meets the number of columns, of groups, and the sizes of the synthetic tables."""
    separated = separate(linear, (X[:n], y[:n]))
    assert separated.num_rows == n
    case = BY_NAME["hierarchical"]
    args = (*(a[:n] for a in case.args[:3]), 4)
    assert separate(case.model, args).num_rows == n


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.float16, np.complex64, bool, jnp.bfloat16])
def test_dtypes(dtype):
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.sample("y", dist.Normal(jnp.abs(X) @ b, 1.0), obs=y)

    separated = separate(model, (jnp.asarray(X).astype(dtype), y))
    assert separated.arguments[0].dtype == dtype


def test_a_table_of_single_precision_beside_parameters_of_double_precision(x64):
    """Terms of the rows alone are then rounded to single precision; rows that are mixed are refused all the same."""

    def shares(X, y):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([4]).to_event(1))
        precision = numpyro.sample("precision", dist.Gamma(2.0, 0.1))
        with numpyro.plate("rows", X.shape[0]):
            mean = jax.nn.sigmoid(X @ b)
            numpyro.sample("y", dist.Beta(mean * precision, (1 - mean) * precision), obs=y)

    rng = np.random.default_rng(0)
    table = rng.normal(size=(5000, 4)).astype(np.float32), rng.uniform(0.1, 0.9, 5000).astype(np.float32)
    assert separate(shares, table).num_params == 5
    with pytest.raises(UnsupportedModelError, match="is not a sum over rows"):
        separate(lambda X, y: shares(X - X.mean(0), y), table)


def test_scalars_are_public():
    def model(y, a, b, c, key):
        mu = numpyro.sample("mu", dist.Normal(a, b).expand([int(c)]))
        numpyro.sample("y", dist.Normal(mu.sum() + jax.random.normal(key), 1.0), obs=y)

    args = (y, np.float64(1.0), jnp.array(2.0), np.array(3), jax.random.key(0))
    assert [a.name for a in separate(model, args).private_arguments()] == ["y"]


def test_rows_that_few_models_have():
    """Synthetic rows have to be found on which these densities are finite."""

    def matrices(S):
        a = numpyro.sample("a", dist.LogNormal(0, 1))
        with numpyro.plate("rows", S.shape[0]):
            numpyro.sample("S", dist.Wishart(5.0, scale_matrix=a * jnp.eye(2)), obs=S)

    def intervals(start, stop):
        rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
        with numpyro.plate("rows", start.shape[0]):
            numpyro.factor("f", jnp.log(stop - start) * rate)

    def years(year):
        rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
        with numpyro.plate("rows", year.shape[0]):
            numpyro.factor("f", jnp.where(year >= 1900, jnp.log(year - 1899.0) * rate, -jnp.inf))

    assert separate(matrices, (np.stack([np.eye(2)] * N),)).row_sites == {"S"}
    assert separate(intervals, (y, y + 1)).row_sites == {"f"}
    assert separate(years, (np.arange(1990, 1990 + N),)).row_sites == {"f"}

    def nowhere(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + jnp.log(-jnp.abs(y) - 1), 1.0), obs=y)

    _assert_refused(nowhere, "'y' is not finite on any synthetic rows", "ordinary data", args=(y,))


def test_deterministic_trees():
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        numpyro.deterministic("tree", {"b": b, "first": b[0]})
        numpyro.deterministic("leaky", {"b": b, "mean": jnp.mean(X @ b)})
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)

    separated = separate(model, (X, y))
    assert set(separated.dropped_sites) == {"leaky"}
    assert set(separated.constrain((X, y), {})(separated.prototype)) == {"b", "tree"}


def test_hidden_sites():
    _assert_refused(block(linear, hide=["y"]), "no site of the model is observed")
    _assert_refused(block(linear, hide=["b"]), "`block`", "random")


def test_one_site_per_row():
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
        for i in range(X.shape[0]):
            numpyro.sample(f"y{i}", dist.Normal(X[i] @ b, 1.0), obs=y[i])

    _assert_refused(model, "exists only for some numbers of rows: 'y1', 'y2', 'y3'", "plate")


def test_attributes_that_are_called_like_globals():
    record = types.SimpleNamespace(X=1.0)

    def model(table):
        b = numpyro.sample("b", dist.Normal(0, record.X).expand([3]))
        numpyro.sample("y", dist.Normal(table["X"] @ b, 1.0), obs=table["y"])

    assert separate(model, ({"X": X, "y": y},)).num_rows == N


# -- No private value is read ------------------------------------------------------------------------------------------


def _outcome(model, args, **options):
    try:
        separated = separate(model, args, **options)
    except UnsupportedModelError as error:
        return str(error)
    return vars(separated) | {"prototype": jax.tree.map(jnp.shape, separated.prototype)}


def _mixing(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Normal((X - X.mean(0)) @ b, 1.0), obs=y)


def _bad_prior(X, y):
    b = numpyro.sample("b", dist.Normal(0, jnp.std(X)))
    numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


def _positive_outcomes(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]))
    numpyro.sample("y", dist.Gamma(2.0, jnp.exp(X @ b)), obs=y)


def _branching(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(b if y[0] > 0 else -b, 1.0), obs=y)


@pytest.mark.parametrize("model", [linear, _positive_outcomes, _mixing, _bad_prior, _branching])
def test_outcome_is_the_same_for_all_private_values(model):
    with jax.enable_x64(False):
        expected = _outcome(model, (X, y))
        for value in (np.nan, -1e30, 0.0):
            assert _outcome(model, (np.full_like(X, value), np.full_like(y, value))) == expected
        # Arrays whose values are gone, and shapes without values.
        gone = tuple(jnp.array(a) for a in (X, y))
        jax.tree.map(lambda a: a.delete(), gone)
        assert _outcome(model, gone) == expected
        shapes = tuple(jax.ShapeDtypeStruct(a.shape, np.float32) for a in (X, y))
        assert _outcome(model, shapes) == expected


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.pmap], ids=["jit", "vmap", "pmap"])
def test_separating_while_tracing(transform):
    """As when the arguments of a run are compiled, or under parallel chains."""
    case = BY_NAME["public_and_row_data"]
    args = case.args if transform is jax.jit else jax.tree.map(lambda a: a[None], case.args)
    found = []

    def run(args):
        separated = separate(case.model, args)
        found.append(separated)
        z = separated.ravel(separated.prototype)
        terms = _terms(separated, args, {})(z, separated.rows(args, {}))
        return separated.log_prior(args, {})(z) + terms.sum()

    value = np.squeeze(transform(run)(args))
    (separated,) = {id(s): s for s in found}.values()
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(separated.prototype))
    expected = -potential_energy(case.model, case.args, {}, separated.prototype)
    np.testing.assert_allclose(value, expected, rtol=1e-4)


def test_separating_while_tracing_something_else():
    """Closed-over arguments, as in NumPyro's parallel chains."""

    @jax.jit
    def run(z):
        separated = separate(linear, (X, y))
        return separated.log_prior((X, y), {})(z)

    assert jnp.isfinite(run(jnp.zeros(3)))


def test_hostile_rows_neither_warn_nor_raise():
    """NumPyro validates concrete values; out-of-support rows would show in a warning."""
    model, bad = _positive_outcomes, (X, -np.abs(y))
    separated = separate(model, bad)
    z = jnp.zeros(3)
    density = separated.row_log_density(bad, {})
    rows = separated.rows(bad, {})
    density(z, tuple(r[:1] for r in rows))
    jax.vmap(density, (None, 0))(z, tuple(r[:, None] for r in rows))


# -- What ArviZ and Predictive may see ---------------------------------------------------------------------------------


def test_released_model_observes_nothing():
    for name in ("logistic", "row_factor"):
        case = BY_NAME[name]
        sites = trace(seed(released_model(case.model), 0)).get_trace(*case.args, **case.kwargs)
        assert not any(site["type"] == "sample" and site["is_observed"] for site in sites.values())
    case = BY_NAME["logistic"]
    drawn = Predictive(released_model(case.model), num_samples=2)(jax.random.key(0), *case.args)
    assert drawn["y"].shape == (2, N)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.int32, np.uint8])
def test_whole_numbers_that_are_too_large_are_the_largest(dtype):
    """JAX would take them modulo 2**32, and 3e9 would be a negative outcome."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    ends = np.iinfo(dtype)
    y = np.array([ends.max, 5, min(3_000_000_000, ends.max), ends.min], dtype)
    (rows,) = separate(model, (y,)).rows((y,), {})
    kept = np.iinfo(rows.dtype)
    np.testing.assert_array_equal(rows, [min(int(x), kept.max) if x > 0 else max(int(x), kept.min) for x in y])
