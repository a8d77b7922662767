"""A row's numbers are the same, bit for bit, whatever the other rows are: or the model is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy import special

from numpyro_dp.batching import vmap_last
from numpyro_dp.model import UnsupportedModelError, separate
from numpyro_dp.tracing import hazards

N = 512
pytestmark = pytest.mark.optimized

FUNCTIONS = {
    "betainc": lambda x: special.betainc(x, x, 0.5),
    "betaln": lambda x: special.betaln(x, 2.0),
    "cauchy": lambda x: dist.Cauchy(0.0, 1.0).cdf(x),
    "digamma": special.digamma,
    "gammainc": lambda x: special.gammainc(x, 2.0),
    "gammaincc": lambda x: special.gammaincc(x, 2.0),
    "gradient of gammainc": jax.grad(lambda x: special.gammainc(x, 2.0)),
    "i0e": special.i0e,
    "i1e": special.i1e,
    "log_ndtr": special.log_ndtr,
    "logsumexp": lambda x: special.logsumexp(x * jnp.arange(3.0)),
    "lgamma": special.gammaln,
    "ndtri": lambda x: special.ndtri(x / 9),
    "polygamma": lambda x: special.polygamma(1, x),
    "pow": lambda x: x**1.7,
    "solve": lambda x: jnp.linalg.solve(jnp.eye(3) * x + 0.1, jnp.arange(3.0))[0],
    "student": lambda x: dist.StudentT(3.0).cdf(x),
    "sort": lambda x: jnp.sort(x * jnp.array([1.0, -1.0, 0.5]))[1],
    "zeta": lambda x: special.zeta(x + 1, 2.0),
}


@pytest.mark.parametrize("mapped", [jax.vmap, lambda f: vmap_last(f, (False,))], ids=["vmap", "vmap_last"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_other_rows_do_not_change(name, mapped):
    function = FUNCTIONS[name]
    is_refused = bool(hazards(jax.make_jaxpr(function)(1.0).jaxpr, [True]))
    assert not is_refused or name in ("betainc", "student")
    program, moved = jax.jit(mapped(function)), 0
    for usual in (0.3, 0.9, 2.5, 7.0, None):  # rows that are all alike are done at once
        x = jnp.asarray(
            np.random.default_rng(0).uniform(0.05, 8, N) if usual is None else np.full(N, usual), jnp.float32
        )
        expected = np.asarray(program(x))
        for value in (np.nan, np.inf, -np.inf, 0.0, -3.0, 1e-42, 0.01, 1e5, 1e6, 1e30):
            found = np.asarray(program(x.at[17].set(value)))
            moved += np.sum(np.delete(found, 17).view(np.int32) != np.delete(expected, 17).view(np.int32))
    assert (moved > 0) == is_refused


def test_the_incomplete_beta_function_is_refused_where_rows_meet_in_it(monkeypatch):
    def censored(y, late):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.RightCensoredDistribution(dist.StudentT(3.0, b, 1.0), late), obs=y)

    args = (np.linspace(-1, 1, 7, dtype=np.float32), np.arange(7) % 2)
    monkeypatch.setattr("numpyro_dp.tracing.betainc_is_elementwise", lambda backend: False)
    with pytest.raises(UnsupportedModelError, match="incomplete beta function"):
        separate(censored, args)
    monkeypatch.setattr("numpyro_dp.tracing.betainc_is_elementwise", lambda backend: True)
    separate(censored, args)


@jax.custom_batching.custom_vmap
def own_rule(x):
    return x


@own_rule.def_vmap
def _(axis_size, in_batched, x):
    return jnp.where(jnp.abs(x) > 1e4, jnp.sum(x), x), True  # mixes rows, but not those of any check


def callback(vmap_method):
    return lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method=vmap_method)


def rbg_in_a_loop(v):
    """Of which `vmap` uses one row's key for all rows, and the check on numbers sees only those that it tries."""
    draw = lambda carry, _: (carry, jax.random.uniform(jax.random.key(v.astype(int), impl="rbg")))  # noqa: E731
    return jnp.where(v > 1e4, jax.lax.scan(draw, 0, None, length=1)[1][0], 0.0)


@pytest.mark.parametrize(
    ("name", "of_rows"),
    [
        ("custom_vmap_call", own_rule),
        ("pure_callback", callback("expand_dims")),
        ("random_bits", lambda x: jax.vmap(lambda v: jax.random.normal(jax.random.key(v.astype(int))))(x)),
        ("random_bits of other keys than threefry's", lambda x: jax.vmap(rbg_in_a_loop)(x)),
        ("random_gamma", lambda x: jax.vmap(lambda v: jax.random.gamma(jax.random.key(v.astype(int)), 2.0))(x)),
    ],
)
def test_operations_with_rules_of_their_own_for_many_rows_are_refused(name, of_rows):
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b * of_rows(x), 1.0), obs=y)

    with pytest.raises(UnsupportedModelError, match=f"applies `{name}` to a row"):
        separate(model, (np.ones(7, np.float32), np.ones(7, np.float32)))


def test_a_callback_row_by_row_is_fine():
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b * callback("sequential")(x), 1.0), obs=y)

    separate(model, (np.ones(7, np.float32), np.ones(7, np.float32)))
