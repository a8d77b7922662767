"""Each of the three chains leaves the target that its docs state invariant, noise included.

The targets are known on a grid, from which thousands of chains start as exact draws; after a few steps their law must
still be the same. Errors are those of independent draws, about 5 sigma.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import numpyro_dp.kernels.chains
from numpyro_dp.cut import Cut
from numpyro_dp.kernels.base import Step
from numpyro_dp.kernels.chains import CHAINS, Prepared, residual_ratio
from numpyro_dp.kernels.survey import Frame, Survey, distance, residual_distance, row_residual
from numpyro_dp.kernels.target import Draw, Grant, PrivateTarget
from numpyro_dp.mechanisms import Gaussian
from numpyro_dp.noise import GridNoise, NoiseSource
from numpyro_dp.surrogate import Surrogate

pytestmark = pytest.mark.optimized

N = 60
_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 2)) * [1.0, 0.6]
PRIOR_SD = 3.0
SHEAR = np.array([[1.0, 0.0], [0.5, 1.0]])  # from z to phi
FRAME = Frame(np.array([0.55, -0.25]), np.array([[0.12, 0.0], [-0.03, 0.2]]))
LOOSE, TIGHT = np.array([50.0, 50.0]), np.array([0.25, 0.05])  # no row's derivatives are clipped; most are
BEND = 0.3


def response(linear):
    """Not linear, so that the posterior is not normal; steeper further out, so that targets with noise are proper."""
    return linear + BEND * linear**3


Y = response(X @ np.array([0.6, -0.3])) + _rng.normal(size=N)


def log_prior(z):
    return -jnp.sum(z**2) / (2 * PRIOR_SD**2)


def row_log_density(phi, row):
    x, y = row
    return -((y[0] - response(x[0] @ phi)) ** 2) / 2


def coordinates(z):
    return jnp.asarray(SHEAR, z.dtype) @ z


CUT = Cut(2, False, ("a", "b"), coordinates, row_log_density)


def target_of(power=1.0):
    rows = tuple(jnp.asarray(part, jnp.result_type(float)) for part in (X, Y))
    separated = SimpleNamespace(
        log_prior=lambda args, kwargs: log_prior,
        row_log_density=lambda args, kwargs: lambda z, row: row_log_density(coordinates(z), row),
        rows=lambda args, kwargs: rows,
        num_params=2,
        rows_per_unit=1,
        has_public_places=True,
        num_rows=N,
    )
    return PrivateTarget(separated, (), {}, neighboring_relation="replace_one", power=power)


def no_noise(*shape):
    noise = GridNoise(*(jnp.zeros(shape, jnp.int32),) * 2)
    return Draw(noise, None, jnp.zeros(()), jnp.array(True), jnp.zeros(1, jnp.uint32), jnp.array(False))


@functools.cache
def derivatives(power, tight):
    """Score and curvature of the clipped rows, without noise."""
    found = Survey(target_of(power), CUT).derivatives((no_noise(2), no_noise(3)), FRAME, TIGHT if tight else LOOSE)
    return found[0], -found[2]


NOISE = np.array([0.6, -0.4]), np.array([[0.1, -0.05], [-0.05, -0.08]])  # one-off: of score and curvature


def surrogate_of(power=1.0, noisy=True, tight=False):
    score, curvature = derivatives(power, tight)
    if not noisy:
        return Surrogate(FRAME, score, np.zeros((2, 2)), curvature, 0.0)
    return Surrogate(FRAME, score + NOISE[0], 0.3 * np.eye(2), curvature + NOISE[1], 0.1)


def chain_of(mode, noise_aware=True, power=1.0, noisy=True, tight=False, slope=0.4, step=1.0):
    surrogate = None if mode == "walk" else surrogate_of(power, noisy, tight)
    covariance = np.array([[0.015, -0.01], [-0.01, 0.05]])
    bounds = TIGHT if tight else LOOSE
    prepared = Prepared(mode, None, CUT.names, FRAME, surrogate, bounds, slope, np.zeros(2), covariance, step)
    chain = CHAINS[mode](prepared, CUT, log_prior, noise_aware, power)
    chain.num_warmup = 0
    return chain


# -- The targets, on a grid --------------------------------------------------------------------------------------------

SIDE, FAR = 300, 8.0


def log_likelihood(z):
    """Of points (k, 2), by NumPy."""
    return -np.sum((Y[:, None] - response(X @ SHEAR @ z.T)) ** 2, 0) / 2


def stated_target(chain, power, z):
    """Of points (k, 2): log prior + log S(phi(z)) + the rows' residuals, times the power, where the chain has these."""
    log_density = -np.sum(z**2, 1) / (2 * PRIOR_SD**2)
    if chain.prepared.mode == "walk":
        return log_density + power * log_likelihood(z)
    surrogate, u = chain.prepared.surrogate, np.linalg.solve(FRAME.whitening, (z @ SHEAR.T - FRAME.center).T).T
    misfit = surrogate.score - u @ surrogate.curvature
    if chain._noise_aware:
        extra = np.sum(u**2, 1)[:, None, None] * np.eye(2) + u[:, :, None] * u[:, None]
        covariance = surrogate.curvature + surrogate.score_covariance + surrogate.curvature_scale**2 / 2 * extra
        square = np.einsum("ki,kij,kj->k", misfit, np.linalg.inv(covariance), misfit)
        log_density -= (square + np.linalg.slogdet(covariance)[1]) / 2
    else:
        log_density += u @ surrogate.score - np.einsum("ki,ij,kj->k", u, surrogate.curvature, u) / 2
    if chain.prepared.mode == "residual":
        score, curvature = derivatives(power, bool(chain.prepared.bounds[0] == TIGHT[0]))
        log_density += power * log_likelihood(z) - u @ score + np.einsum("ki,ij,kj->k", u, curvature, u) / 2
    return log_density


@functools.cache
def _on_grid(log_density):
    """Cells (k, 2), their width, and their probabilities: a coarse grid finds the place, a fine one the numbers."""
    low, high = np.full(2, -FAR), np.full(2, FAR)
    for _ in range(3):
        axes = [np.linspace(*ends, SIDE) for ends in zip(low, high, strict=True)]
        cells = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
        values = log_density(cells)
        width = (high - low) / (SIDE - 1)
        likely = cells[values > values.max() - 25]
        low, high = np.maximum(likely.min(0) - 2 * width, -FAR), np.minimum(likely.max(0) + 2 * width, FAR)
    weight = np.exp(values - values.max())
    return cells, width, weight / weight.sum()


def exact_draws(grid, count, seed=None):
    cells, width, weight = grid
    rng = np.random.default_rng(seed)
    return cells[rng.choice(len(cells), count, p=weight)] + width * rng.uniform(-0.5, 0.5, (count, 2))


def z_scores(draws, grid):
    """|z| of means, variances, the covariance and a measure of the tails, and of Kolmogorov-Smirnov tests."""
    cells, _, weight = grid
    mean = weight @ cells
    sd = np.sqrt(weight @ (cells - mean) ** 2)

    def measures(z):
        x = (z - mean) / sd
        far = np.sum(np.minimum(np.abs(x), 2.5) ** 3, 1)  # bounded: its average is nearly normal
        return np.column_stack([x, x**2, x.prod(1), np.exp(-np.sum(x**2, 1)), far])

    of_cells, of_draws = measures(cells), measures(draws)
    expected = weight @ of_cells
    error = np.sqrt(weight @ (of_cells - expected) ** 2 / len(draws))
    z = list((of_draws.mean(0) - expected) / error)
    for k in range(2):
        ends, which = np.unique(cells[:, k], return_inverse=True)
        cdf = np.cumsum(np.bincount(which, weight))
        half = (ends[1] - ends[0]) / 2
        ranks = np.interp(draws[:, k], np.append(ends[0] - half, ends + half), np.append(0, cdf))
        z.append(stats.norm.isf(stats.kstest(ranks, "uniform").pvalue / 2))
    return np.abs(z)


# -- Invariance --------------------------------------------------------------------------------------------------------

CHAINS_RUN, STEPS = 4000, 5


def run(chain, power=1.0, multiplier=1.0, chains=CHAINS_RUN, steps=STEPS):
    """The target on its grid, and where chains are that start there; median noise in a test, and acceptance rate."""
    grid = _on_grid(functools.partial(stated_target, chain, power))
    source, target = NoiseSource(), target_of(power)
    kinds = list(chain._noise_shapes(2))

    def step(noise, key, z, carry):
        draws = {
            kind: Draw(
                GridNoise(noise[0], noise[1]),
                None,
                jnp.full(1, multiplier, z.dtype),
                jnp.ones(1, bool),
                jnp.zeros((1, 1), jnp.uint32),
                jnp.zeros(1, bool),
            )
            for kind in kinds
        }
        return chain._transition(Step(target, Grant(jnp.array(True), draws), key, jnp.array(0), z, None, carry))

    z = jnp.asarray(exact_draws(grid, chains), jnp.result_type(float))
    key = jax.random.key(np.random.default_rng().integers(2**32))
    carry = jax.vmap(chain._init_carry)(jax.random.split(key, chains), z)
    vectorized = jax.jit(jax.vmap(step, (1, 0, 0, 0)))
    accepted, noise_scale = [], []
    for k in range(steps):
        noise = source.draw((chains, 1), Gaussian(multiplier), "replace_one", b"")
        found = vectorized(jnp.asarray(noise), jax.random.split(jax.random.fold_in(key, k), chains), z, carry)
        z, carry = found.z, found.carry
        accepted.append(float(found.accepted.mean()))
        noise_scale.append(float(jnp.median(found.noise_scale)))
    return z_scores(np.asarray(z, float), grid), np.median(noise_scale), np.mean(accepted)


CASES = {
    "residual": ("residual", {}, 1.0, 0.6),
    "residual_plug_in": ("residual", {"noise_aware": False}, 1.0, 0.6),
    "residual_tempered": ("residual", {"power": 0.5, "step": 0.8}, 0.5, 0.8),
    "walk": ("walk", {"slope": 2.5}, 1.0, 0.2),
    "walk_tempered": ("walk", {"slope": 2.5, "power": 0.5}, 0.5, 0.4),
}


def assert_nothing_is_clipped(chain, power):
    """At pairs of the target's own draws: the largest change of a row per unit of distance is below the slope."""
    prepared = chain.prepared
    z = exact_draws(_on_grid(functools.partial(stated_target, chain, power)), 2000, seed=0)
    u = jnp.asarray(np.linalg.solve(FRAME.whitening, (z @ SHEAR.T - FRAME.center).T).T)
    rows = tuple(jnp.asarray(part)[:, None] for part in (X, Y))
    frame, bounds = Frame(*map(jnp.asarray, FRAME)), jnp.asarray(prepared.bounds)
    if prepared.mode == "residual":
        values, measure = row_residual(CUT, frame, bounds), residual_distance
    else:
        measure = distance

        def values(points, row):
            return jax.vmap(lambda u: row_log_density(frame.at(u), row))(points)

    found = jax.vmap(lambda row: values(u, row))(rows)
    changes = jnp.abs(found[:, 1:] - found[:, :-1]).max(0)
    assert np.mean(changes < prepared.slope * jax.vmap(measure)(u[1:], u[:-1])) > 0.999


def quick(names, *of_them):
    return [pytest.param(name, marks=() if name in of_them else pytest.mark.statistical) for name in names]


@pytest.mark.statistical
@pytest.mark.parametrize("name", quick(CASES, "residual", "walk"))
def test_noise_leaves_the_stated_target_invariant(name):
    mode, options, power, multiplier = CASES[name]
    chain = chain_of(mode, **options)
    assert_nothing_is_clipped(chain, power)
    z, noise, accepted = run(chain, power, multiplier)
    assert 0.5 < noise < 3  # noise that matters
    assert 0.1 < accepted < 0.9
    assert z.max() < 6, z


@pytest.mark.statistical
@pytest.mark.parametrize("name", quick(["residual", "walk"], "residual"))
def test_without_the_penalty_the_target_would_be_another(name, monkeypatch):
    """A negative control."""
    accept = numpyro_dp.kernels.chains.accept_with_penalty
    monkeypatch.setattr(
        numpyro_dp.kernels.chains,
        "accept_with_penalty",
        lambda key, ratio, scale, z_new: accept(key, ratio, 0 * scale, z_new),
    )
    mode, options, power, multiplier = CASES[name]
    z, _, _ = run(chain_of(mode, **options), power, multiplier)
    assert z.max() > 7


@pytest.mark.statistical
def test_residuals_of_the_wrong_sign_would_be_noticed(monkeypatch):
    def negative(*args):
        residual = row_residual(*args)
        return lambda points, row: -residual(points, row)

    monkeypatch.setattr(numpyro_dp.kernels.chains, "row_residual", negative)
    mode, options, power, multiplier = CASES["residual"]
    z, _, _ = run(chain_of(mode, **options), power, multiplier)
    assert z.max() > 7


@pytest.mark.statistical
def test_a_residual_that_does_not_count_would_be_noticed():
    """The surrogate is that of the tempered likelihood already; the residuals are tempered where they are tested."""
    _, options, power, multiplier = CASES["residual_tempered"]
    chain = chain_of("residual", **options)
    chain._power = 0.0
    z, _, _ = run(chain, power, multiplier)
    assert z.max() > 7


# -- Nothing but the posterior, without noise --------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("tight", [False, True], ids=["loose", "clipped"])
@pytest.mark.parametrize("noise_aware", [False, True], ids=["plug-in", "noise-aware"])
def test_without_noise_the_residual_chains_target_is_the_posterior(noise_aware, tight, power, x64):
    """Whatever the rows' derivatives lose by the clip, the residuals give back. In the chain's own terms."""
    derivatives.cache_clear()
    chain, target = chain_of("residual", noise_aware, power, noisy=False, tight=tight), target_of(power)
    rng = np.random.default_rng(1)
    z = np.array([0.5, -0.8]) + rng.normal(size=(6, 2)) * [0.2, 0.4]

    @jax.jit
    def log_ratio(z, z_new):
        u, u_new = chain._u(z), chain._u(z_new)
        prepared = chain.prepared
        released = residual_ratio(target, CUT, FRAME, prepared.bounds, no_noise(), u, u_new, 1e3)
        public = [log_prior(z) + chain._log_surrogate(u) for z, u in ((z, u), (z_new, u_new))]
        return chain._power * released.value + public[1] - public[0]

    found = [log_ratio(jnp.asarray(z[0]), jnp.asarray(other)) for other in z[1:]]
    posterior = -np.sum(z**2, 1) / (2 * PRIOR_SD**2) + power * log_likelihood(z)
    np.testing.assert_allclose(found, posterior[1:] - posterior[0], rtol=1e-4, atol=0.05)  # a grid of 1e3 * 2**-23
    # And so says the target that the invariance tests have.
    stated = stated_target(chain, power, z)
    np.testing.assert_allclose(stated - stated[0], posterior - posterior[0], rtol=1e-3, atol=0.01)
    derivatives.cache_clear()


# -- NUTS on the surrogate ---------------------------------------------------------------------------------------------


@pytest.mark.statistical
@pytest.mark.parametrize("likelihood", quick(["noise-aware", "plug-in"], "plug-in"))
def test_nuts_leaves_the_surrogate_posterior_invariant(likelihood):
    chain = chain_of("surrogate", likelihood == "noise-aware")
    z, _, _ = run(chain, chains=1500, steps=2)
    assert z.max() < 6, z


@pytest.mark.statistical
def test_nuts_finds_the_surrogate_posterior_from_afar():
    """With warmup, from the prior: moments of later draws."""
    chain = chain_of("surrogate")
    chain.num_warmup = 150
    grid = _on_grid(functools.partial(stated_target, chain, 1.0))
    start = jnp.asarray(0.3 * np.random.default_rng().normal(size=(1000, 2)), jnp.result_type(float))
    grant = Grant(jnp.array(True), {})

    def whole(key, z):
        def step(state, k):
            z, carry = state
            found = chain._transition(Step(None, grant, jax.random.fold_in(key, k), k, z, None, carry))
            return (found.z, found.carry), found.z

        return jax.lax.scan(step, (z, chain._init_carry(key, z)), jnp.arange(170))[1][-1]

    keys = jax.random.split(jax.random.key(np.random.default_rng().integers(2**32)), len(start))
    draws = np.asarray(jax.jit(jax.vmap(whole))(keys, start), float)
    assert z_scores(draws, grid).max() < 6
