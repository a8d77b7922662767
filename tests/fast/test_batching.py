"""`vmap_last` gives what `jax.vmap` gives, and keeps rows on the last axis; vectorized chains share one table."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.jaxprs import shapes_in
from jax import lax
from jax.scipy.special import logsumexp, xlogy

import numpyro_dp.privacy.draws
from numpyro_dp import DPHMC, DPSGLD, DPBarker, DPPenalty
from numpyro_dp.privacy.vmap import cond_of_chains, vmap_chains, vmap_last

N = 5


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@jax.custom_vjp
def cube(x):
    return x**3


cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * x**2 * g,))


# Each of a matrix w that all rows share, and of a row's x, shape (3,), and matrix m, shape (2, 3).
FUNCTIONS = {
    "elementwise": lambda w, x, m: jnp.where(x > 0, jnp.exp(x) * m, w) + 2.0,
    "scalar predicate": lambda w, x, m: lax.select(x[0] > 0, m, w),
    "clamp": lambda w, x, m: lax.clamp(-0.5, m, x[0]),
    "mixture": lambda w, x, m: logsumexp(w + x * m, 0) - xlogy(jnp.abs(x), 2.0),
    "matrix of all rows on the left": lambda w, x, m: w @ x,
    "matrix of all rows on the right": lambda w, x, m: m @ w.T,
    "matrices of each row": lambda w, x, m: m @ jnp.outer(x, x[:2]),
    "scalar product": lambda w, x, m: jnp.dot(x, x),
    "batches of all rows": lambda w, x, m: jnp.einsum("ij,ik->ijk", w, m),
    "batches of each row": lambda w, x, m: jnp.einsum("ij,ik->ijk", m, 2 * m),
    "contracted twice": lambda w, x, m: jnp.tensordot(m, w, ((0, 1), (0, 1))),
    "shapes": lambda w, x, m: jnp.concatenate([m.reshape(3, 2), w.T, x[:, None] * jnp.ones(2)], 0)[::2].T,
    "along axes": lambda w, x, m: jnp.cumsum(m, 1) + jnp.flip(m, 0) + jnp.max(m, 0) + jnp.argmax(m, 1)[:, None],
    "chosen elements": lambda w, x, m: w[:, jnp.argmax(x)] + m[jnp.argmin(x[:2])][:2],
    "places of all rows": lambda w, x, m: m[:, jnp.array([2, 0, 2, 7])] + m[jnp.array([[0], [1]]), jnp.array([1])],
    "added in places of all rows": lambda w, x, m: jnp.zeros((2, 4)).at[1, jnp.array([0, 3, 3])].add(x)[:, :3] + w,
    "added in windows": lambda w, x, m: w.at[:, jnp.array([1, 1])].add(m[:, :2]) + w.at[jnp.array([0, 5])].add(m),
    "slices": lambda w, x, m: jnp.pad(m[:, 1:], 1) + lax.dynamic_slice(w, (0, jnp.argmax(x)), (1, 1)),
    "sorted": lambda w, x, m: jnp.sort(m, -1),
    "loop": lambda w, x, m: lax.scan(lambda c, row: (c + row @ w.T, row), x[:2], jnp.stack([x, 2 * x]))[0],
    "until": lambda w, x, m: lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] + x, s[1] + 1), (x, w[0, 0]))[0],
    "branches": lambda w, x, m: lax.cond(x[0] > 0, lambda: m, lambda: w),
    "solve": lambda w, x, m: jax.scipy.linalg.solve_triangular(jnp.eye(2) + w @ w.T, m, lower=True),
    "own derivative": lambda w, x, m: jax.grad(lambda x: jnp.sum(cube(x)) + jnp.sum(jax.nn.softplus(w @ x)))(x),
    "checkpoint": lambda w, x, m: jax.checkpoint(lambda v: jnp.sin(w @ v))(x),
    "of all rows only": lambda w, x, m: jnp.sum(w),
    "several": lambda w, x, m: {"a": x, "b": (m, w[0])},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_vmap(name):
    function, args = FUNCTIONS[name], (numbers(2, 3), numbers(3, N), numbers(2, 3, N))
    expected = jax.vmap(function, (None, -1, -1), -1)(*args)
    found = jax.jit(vmap_last(function, (True, False, False)))(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["elementwise", "mixture", "places of all rows", "added in windows", "matrices of each row", "own derivative"],
)
def test_rows_stay_on_the_last_axis(name):
    """What compilers vectorise; `jax.vmap` puts them first."""
    args = (numbers(2, 3), numbers(3, 7919), numbers(2, 3, 7919))

    def axes(mapped):
        shapes = {s for s in str(jax.make_jaxpr(mapped)(*args)).replace("]", "[").split("[") if "7919" in s}
        return {s.split(",").index("7919") - len(s.split(",")) for s in shapes if s.replace(",", "").isdigit()}

    assert axes(vmap_last(FUNCTIONS[name], (True, False, False))) == {-1}
    assert axes(jax.vmap(FUNCTIONS[name], (None, -1, -1), -1)) != {-1}


def regression(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def largest_array(kernel, rows, columns, num_chains):
    """Numbers in the largest array of an iteration of vectorized chains."""
    X, y = np.ones((rows, columns), np.float32), np.zeros(rows, np.int32)
    state = kernel.init(jax.random.split(jax.random.key(0), num_chains), 0, None, (X, y), {})
    closed = jax.make_jaxpr(lambda state: kernel.sample(state, (X, y), {}))(state)
    return max(np.prod(shape, dtype=int) for shape in shapes_in(closed.jaxpr))


KERNELS = {
    "hmc": lambda: DPHMC(regression, eps=1.0, num_iterations=5, prepare=False),
    "hmc_reuse": lambda: DPHMC(regression, eps=1.0, num_iterations=5, prepare=False, leapfrog="reuse"),
    "penalty": lambda: DPPenalty(regression, eps=1.0, num_iterations=5, prepare=False),
    "barker": lambda: DPBarker(regression, eps=1.0, num_iterations=5),
    "sgld": lambda: DPSGLD(regression, eps=1.0, num_iterations=5),
}


@pytest.mark.parametrize("name", KERNELS)
def test_vectorized_chains_share_one_table(name):
    rows, columns = 2560, 16
    assert largest_array(KERNELS[name](), rows, columns, num_chains=3) == rows * columns


@pytest.mark.parametrize("name", ["hmc", "hmc_reuse", "penalty"])
def test_a_table_for_each_chain_would_be_noticed(name, monkeypatch):
    monkeypatch.setattr(numpyro_dp.privacy.draws, "cond_of_chains", lax.cond)
    with pytest.raises(AssertionError):
        test_vectorized_chains_share_one_table(name)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (True, True)])
def test_a_cond_of_chains_is_a_cond_for_each(wanted):
    x, wanted = numbers(2), jnp.array(wanted)
    found = vmap_chains(lambda w, x: cond_of_chains(w, lambda: (x, 2 * x), lambda: (x, -x)))(wanted, x)
    each = [lax.cond(w, lambda x: (x, 2 * x), lambda x: (x, -x), y) for w, y in zip(wanted, x, strict=True)]
    for one, other in zip(found, zip(*each, strict=True), strict=True):
        assert one.tolist() == [float(y) for y in other]


def test_conditions_that_are_no_bools_are_refused():
    with pytest.raises(TypeError, match="a condition is a bool, got int32"):
        cond_of_chains(jnp.array(2), lambda: 1.0, lambda: 0.0)


@pytest.mark.parametrize("flag", [-2, 1, 9])
def test_a_flag_by_hand_is_charged_for_as_it_is_used(flag):
    """P4: what says that there is a gradient must not count as more than one release that is saved."""
    kernel = DPHMC(regression, eps=1.0, prepare=False, leapfrog="reuse", num_steps=4, num_iterations=5)
    state = kernel.init(jax.random.key(0), 0, None, (np.ones((9, 2), np.float32), np.zeros(9, np.int32)), {})
    assert kernel.request(state.carry)["grad"] == 5
    assert kernel.request(state.carry._replace(has_gradient=jnp.array(flag)))["grad"] == 4
