"""Each of the two chains leaves the target that its docs state invariant, noise included.

Targets are known on a grid. Walks start as exact draws of it, by the thousand; after a few steps their law must still
be the same. NUTS on a surrogate is compared with it by long chains, with the effective size of their draws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.diagnostics import effective_sample_size
from scipy import stats

import numpyro_dp.preparation.chains
from numpyro_dp.chain.algorithm import Step
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.model.coordinates import Cut
from numpyro_dp.preparation.chains import LEAST_WARMUP, THINNING, Prepared, WalkChain, surrogate_chain
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import Bounds
from numpyro_dp.privacy.draws import Grant
from numpyro_dp.privacy.mechanisms import Gaussian
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.privacy.release import Vault
from tests.helpers.drawn import given_draw

pytestmark = pytest.mark.optimized

N = 60
_rng = np.random.default_rng(0)
X = _rng.normal(size=(N, 2)) * [1.0, 0.6]
PRIOR_SD = 3.0
SHEAR = np.array([[1.0, 0.0], [0.5, 1.0]])  # from z to phi
FRAME = Frame(np.array([0.55, -0.25]), np.array([[0.12, 0.0], [-0.03, 0.2]]))
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

    def density(z, row):
        return row_log_density(coordinates(z), row)

    vault = Vault(rows, neighboring_relation="replace_one")
    return PrivateTarget(vault, log_prior, density, num_params=2, num_rows=N, power=power)


def likelihood_in_frame(u):
    """Of all rows, without a clip."""
    rows = tuple(jnp.asarray(part)[:, None] for part in (X, Y))
    return jnp.sum(jax.vmap(lambda row: row_log_density(FRAME.at(u), row))(rows))


@functools.cache
def surrogate_of(power=1.0):
    """Of the rows' derivatives, with noise in both."""
    zero = jnp.zeros(2)
    score, curvature = jax.grad(likelihood_in_frame)(zero), -jax.hessian(likelihood_in_frame)(zero)
    noise = np.array([0.6, -0.4]), np.array([[0.1, -0.05], [-0.05, -0.08]])
    return Surrogate(
        FRAME,
        power * np.asarray(score, float) + noise[0],
        0.3 * np.eye(2),
        power * np.asarray(curvature, float) + noise[1],
        0.1,
        variance=0.8,
    )


def chain_of(mode, noise_aware=True, power=1.0, slope=0.4, step=1.0, surrogate=None, cut=CUT, prior=log_prior):
    if mode == "surrogate" and surrogate is None:
        surrogate = surrogate_of(power)
    covariance = np.array([[0.015, -0.01], [-0.01, 0.05]])
    frame = FRAME if surrogate is None else surrogate.frame
    prepared = Prepared(
        mode, cut.names, np.zeros(2), covariance, frame, 0, surrogate, None, Bounds(1.0, 1.0), slope, step
    )
    return WalkChain(prepared, cut, prior) if mode == "walk" else surrogate_chain(prepared, cut, prior, noise_aware)


# -- The targets, on a grid --------------------------------------------------------------------------------------------

SIDE, FAR = 300, 8.0


def log_likelihood(z):
    """Of points (k, 2), by NumPy."""
    return -np.sum((Y[:, None] - response(X @ SHEAR @ z.T)) ** 2, 0) / 2


def stated_target(chain, power, noise_aware, z):
    """Of points (k, 2): log prior + log S(phi(z)), or + the tempered log likelihood."""
    log_density = -np.sum(z**2, 1) / (2 * PRIOR_SD**2)
    if chain.prepared.mode == "walk":
        return log_density + power * log_likelihood(z)
    surrogate, u = chain.prepared.surrogate, np.linalg.solve(FRAME.whitening, (z @ SHEAR.T - FRAME.center).T).T
    if not noise_aware:
        return log_density + u @ surrogate.score - np.einsum("ki,ij,kj->k", u, surrogate.curvature, u) / 2
    misfit = surrogate.score - u @ surrogate.curvature
    extra = np.sum(u**2, 1)[:, None, None] * np.eye(2) + u[:, :, None] * u[:, None]
    covariance = surrogate.variance * surrogate.curvature + surrogate.score_covariance
    covariance = covariance + surrogate.curvature_scale**2 / 2 * extra
    square = np.einsum("ki,kij,kj->k", misfit, np.linalg.inv(covariance), misfit)
    return log_density - (square + np.linalg.slogdet(covariance)[1]) / 2


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


def measures_on(grid):
    """A function from draws to numbers for means, variances, the covariance and the tails; and what they are on the
    grid: expectations and standard deviations."""
    cells, _, weight = grid
    mean = weight @ cells
    sd = np.sqrt(weight @ (cells - mean) ** 2)

    def measures(z):
        x = (z - mean) / sd
        far = np.sum(np.minimum(np.abs(x), 2.5) ** 3, -1)  # bounded: its average is nearly normal
        product = x.prod(-1)[..., None]
        return np.concatenate([x, x**2, product, np.exp(-np.sum(x**2, -1))[..., None], far[..., None]], -1)

    expected = weight @ measures(cells)
    return measures, expected, np.sqrt(weight @ (measures(cells) - expected) ** 2)


def z_scores(draws, grid):
    """|z| of the measures, and of Kolmogorov-Smirnov tests, of independent draws."""
    cells, _, weight = grid
    measures, expected, spread = measures_on(grid)
    z = list((measures(draws).mean(0) - expected) / (spread / np.sqrt(len(draws))))
    for k in range(2):
        ends, which = np.unique(cells[:, k], return_inverse=True)
        cdf = np.cumsum(np.bincount(which, weight))
        half = (ends[1] - ends[0]) / 2
        ranks = np.interp(draws[:, k], np.append(ends[0] - half, ends + half), np.append(0, cdf))
        z.append(stats.norm.isf(stats.kstest(ranks, "uniform").pvalue / 2))
    return np.abs(z)


# -- A walk ------------------------------------------------------------------------------------------------------------

CHAINS_RUN, STEPS = 4000, 5


def run(chain, power=1.0, multiplier=1.0, chains=CHAINS_RUN, steps=STEPS):
    """The target on its grid, and where chains are that start there; median noise in a test, and acceptance rate."""
    grid = _on_grid(functools.partial(stated_target, chain, power, True))
    source, target = NoiseSource(), target_of(power)

    def step(noise, key, z):
        grant = Grant(jnp.array(True), {"ratio": given_draw(hi=noise[0], lo=noise[1], noise_multiplier=multiplier)})
        return chain.transition(Step(target, grant, key, jnp.array(0), z, None, jnp.zeros(())))

    z = jnp.asarray(exact_draws(grid, chains), jnp.result_type(float))
    key = jax.random.key(np.random.default_rng().integers(2**32))
    vectorized = jax.jit(jax.vmap(step, (1, 0, 0)))
    accepted, noise_scale = [], []
    for k in range(steps):
        noise = source.draw((chains, 1), Gaussian(multiplier), "replace_one", b"")
        found = vectorized(jnp.asarray(noise), jax.random.split(jax.random.fold_in(key, k), chains), z)
        z = found.z
        accepted.append(float(found.accepted.mean()))
        noise_scale.append(float(jnp.median(found.noise_scale)))
    return z_scores(np.asarray(z, float), grid), np.median(noise_scale), np.mean(accepted)


CASES = {
    "walk": ({"slope": 2.5}, 1.0, 0.2),
    "walk_tempered": ({"slope": 2.5, "power": 0.5}, 0.5, 0.4),
}


def assert_nothing_is_clipped(chain, power):
    """At pairs of the target's own draws: the largest change of a row per unit of distance is below the slope."""
    z = exact_draws(_on_grid(functools.partial(stated_target, chain, power, True)), 2000, seed=0)
    u = jnp.asarray(np.linalg.solve(FRAME.whitening, (z @ SHEAR.T - FRAME.center).T).T)
    rows = tuple(jnp.asarray(part)[:, None] for part in (X, Y))
    found = jax.vmap(lambda row: jax.vmap(lambda u: row_log_density(FRAME.at(u), row))(u))(rows)
    changes = jnp.abs(found[:, 1:] - found[:, :-1]).max(0)
    assert np.mean(changes < chain.prepared.slope * jnp.linalg.norm(u[1:] - u[:-1], axis=1)) > 0.999


@pytest.mark.statistical
@pytest.mark.parametrize("name", CASES)
def test_noise_leaves_a_walks_target_invariant(name):
    options, power, multiplier = CASES[name]
    chain = chain_of("walk", **options)
    assert_nothing_is_clipped(chain, power)
    z, noise, accepted = run(chain, power, multiplier)
    assert 0.5 < noise < 3  # noise that matters
    assert 0.1 < accepted < 0.9
    assert z.max() < 6, z


@pytest.mark.statistical
def test_without_the_penalty_the_target_would_be_another(monkeypatch):
    """A negative control."""
    accept = numpyro_dp.preparation.chains.accept_with_penalty
    monkeypatch.setattr(
        numpyro_dp.preparation.chains,
        "accept_with_penalty",
        lambda key, ratio, scale, z_new: accept(key, ratio, 0 * scale, z_new),
    )
    options, power, multiplier = CASES["walk"]
    z, _, _ = run(chain_of("walk", **options), power, multiplier)
    assert z.max() > 7


def test_a_walk_asks_for_one_release_in_each_iteration_and_nuts_for_none():
    walk, nuts = chain_of("walk"), chain_of("surrogate")
    assert walk.request(None) == walk.releases(1, 1) == {"ratio": 1}
    assert walk.releases(10, 3) == {"ratio": 30}
    assert nuts.request(None) == nuts.releases(10, 3) == {}


# -- NUTS on a surrogate -----------------------------------------------------------------------------------------------

MEAN, SD = np.array([1.0, -2.0]), np.array([0.5, 2.0])  # of a normal prior
NORMAL = Surrogate(
    Frame(np.array([0.5, -1.0]), np.array([[0.3, 0.0], [-0.1, 0.6]])),
    np.array([1.5, -0.8]),
    0.5 * np.eye(2),
    np.array([[1.0, 0.3], [0.3, 0.8]]),
    0.0,
    variance=0.7,
)


def normal_prior(z):
    return -jnp.sum(((z - MEAN) / SD) ** 2) / 2


def normal_posterior(noise_aware):
    """Mean and covariance, by hand: phi = SHEAR @ z, u = inverse whitening @ (phi - center)."""
    s = NORMAL
    to_u = np.linalg.solve(s.frame.whitening, SHEAR)
    u_of_0 = -np.linalg.solve(s.frame.whitening, s.frame.center)
    precision, slope = s.curvature, s.score
    if noise_aware:
        noisy = s.variance * s.curvature + s.score_covariance
        slope = s.curvature @ np.linalg.solve(noisy, s.score)
        precision = s.curvature @ np.linalg.solve(noisy, s.curvature)
    whole = to_u.T @ precision @ to_u + np.diag(1 / SD**2)
    right = to_u.T @ (slope - precision @ u_of_0) + MEAN / SD**2
    return np.linalg.solve(whole, right), np.linalg.inv(whole)


NUM_CHAINS = 4


def long_chains(chain, num_warmup, num_samples, start, seed=0):
    """Draws after the warmup, shape (chains, draws, 2); the last carry; and whether any iteration diverged."""
    chain.num_warmup = num_warmup
    grant = Grant(jnp.array(True), {})

    def whole(key, z):
        start_key, key = jax.random.split(key)

        def step(state, k):
            z, carry = state
            found = chain.transition(Step(None, grant, jax.random.fold_in(key, k), k, z, None, carry))
            return (found.z, found.carry), (found.z, found.diverging)

        last, (draws, diverging) = jax.lax.scan(
            step, (z, chain.init_carry(start_key, z)), jnp.arange(num_warmup + num_samples)
        )
        return draws[num_warmup:], last[1], diverging[num_warmup:].any()

    keys = jax.random.split(jax.random.key(seed), NUM_CHAINS)
    draws, carry, diverging = jax.jit(jax.vmap(whole))(keys, jnp.asarray(start, jnp.result_type(float)))
    return np.asarray(draws, float), carry, bool(diverging.any())


def standard_errors_off(numbers, expected, spread):
    """Of averages of chains (chains, draws, k), by their effective sizes, which must be of use."""
    size = np.array([effective_sample_size(numbers[..., k : k + 1])[0] for k in range(numbers.shape[-1])])
    assert size.min() > 400, size
    return np.abs(numbers.mean((0, 1)) - expected) / (spread / np.sqrt(size))


@pytest.mark.parametrize(
    ("noise_aware", "num_warmup"),
    [
        pytest.param(True, 0, id="noise-aware"),
        pytest.param(False, 200, id="plug-in, with warmup", marks=pytest.mark.nightly),
        pytest.param(True, 200, id="noise-aware, with warmup", marks=pytest.mark.nightly),
        pytest.param(False, 0, id="plug-in", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.statistical
def test_nuts_draws_from_a_normal_posterior(noise_aware, num_warmup):
    """Whose mean and covariance are known; from starts far away, also where the chain has no warmup of its own."""
    chain = chain_of("surrogate", noise_aware, surrogate=NORMAL, prior=normal_prior)
    start = 5 * np.random.default_rng(0).normal(size=(NUM_CHAINS, 2))
    draws, _, diverging = long_chains(chain, num_warmup, 1500, start)
    mean, covariance = normal_posterior(noise_aware)
    x = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).reshape(-1, 2).T).T.reshape(draws.shape)
    numbers = np.concatenate([x, x**2, x.prod(-1)[..., None]], -1)
    off = standard_errors_off(numbers, np.array([0, 0, 1, 1, 0]), np.sqrt([1, 1, 2, 2, 1]))
    assert off.max() < 5, off
    assert not diverging


@pytest.mark.statistical
@pytest.mark.parametrize("likelihood", ["noise-aware", "plug-in"])
def test_nuts_draws_from_a_surrogate_that_is_not_normal(likelihood):
    """Noise in the curvature makes its tails heavy: moments on a grid."""
    chain = chain_of("surrogate", likelihood == "noise-aware")
    grid = _on_grid(functools.partial(stated_target, chain, 1.0, likelihood == "noise-aware"))
    measures, expected, spread = measures_on(grid)
    draws, _, _ = long_chains(chain, 0, 4000, exact_draws(grid, NUM_CHAINS, seed=0))
    off = standard_errors_off(measures(draws), expected, spread)
    assert off.max() < 5, off
    if likelihood == "noise-aware":  # a negative control: it is not the other one
        measures, expected, spread = measures_on(_on_grid(functools.partial(stated_target, chain, 1.0, False)))
        assert standard_errors_off(measures(draws), expected, spread).max() > 7


@pytest.mark.statistical
def test_nuts_moves_at_any_scale():
    """NumPyro's adaptation adds about 1e-5 to each variance: where it sees the parameters themselves, one of a standard
    deviation of 1e-7 (a slope by dollars) makes all steps tiny, and 500 draws of the other are worth some ten."""
    sd = np.array([1e-7, 1e-2])
    frame = Frame(np.array([3e-5, -9.0]), np.diag(sd))
    surrogate = Surrogate(frame, np.zeros(2), np.zeros((2, 2)), np.eye(2), 0.0, variance=1.0)
    cut = Cut(2, True, ("a", "b"), lambda z: z, row_log_density)
    prepared = chain_of("surrogate").prepared._replace(
        frame=frame, surrogate=surrogate, start=frame.center, covariance=np.diag(sd**2)
    )
    chain = surrogate_chain(prepared, cut, lambda z: -jnp.sum(z**2) / 2e4, True)
    draws, _, _ = long_chains(chain, 0, 500, frame.center + sd * np.ones((NUM_CHAINS, 1)))
    x = (draws - frame.center) / sd
    assert standard_errors_off(np.concatenate([x, x**2], -1), np.array([0, 0, 1, 1]), np.sqrt([1, 1, 2, 2])).max() < 5


def key_leaves(tree):
    """Leaves that may be keys: typed ones, or two words."""
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or jnp.issubdtype(leaf.dtype, jnp.unsignedinteger)
    ]


@functools.cache
def short_nuts():
    """A chain without warmup, its first carry, and a function from a key and a carry to the next transition."""
    chain = chain_of("surrogate", surrogate=NORMAL, prior=normal_prior)
    z, grant = jnp.zeros(2), Grant(jnp.array(True), {})

    @jax.jit
    def move(key, carry):
        return chain.transition(Step(None, grant, key, jnp.array(0), z, None, carry))

    return chain, jax.jit(chain.init_carry)(jax.random.key(0), z), move


def test_no_key_is_carried_and_draws_follow_from_the_iterations_key():
    """A copy of a state must not repeat random numbers, nor two chains with the same state share them."""
    _, carry, move = short_nuts()
    assert key_leaves(carry) == []
    assert carry.rng_key is None
    assert carry.adapt_state.rng_key is None
    first, same, other = (move(jax.random.key(seed), carry) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.z, same.z)
    assert not np.array_equal(first.z, other.z)
    assert key_leaves(first.carry) == []
    further, elsewhere = (move(jax.random.key(seed), first.carry) for seed in (1, 3))
    assert not np.array_equal(further.z, elsewhere.z)
    assert jax.tree.structure(first.carry) == jax.tree.structure(carry)


def test_nuts_warms_up_before_the_chain_where_its_warmup_is_short():
    """Then it adapts no more. An iteration of the chain is several of NUTS."""
    chain, carry, move = short_nuts()
    assert int(carry.i) == LEAST_WARMUP
    found = move(jax.random.key(1), carry).carry
    assert int(found.i) == LEAST_WARMUP + THINNING
    assert found.adapt_state.step_size == carry.adapt_state.step_size
    assert carry.adapt_state.step_size != 0.5
    chain = chain_of("surrogate", surrogate=NORMAL, prior=normal_prior)
    for chain.num_warmup, expected in ((0, 300), (10, 300), (30, 300), (500, 4000)):
        assert chain._nuts_warmup == expected
    assert int(jax.jit(chain.init_carry)(jax.random.key(0), jnp.zeros(2)).i) == 0  # all of it is the chain's
