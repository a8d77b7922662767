"""A row's numbers are the same, bit for bit, whatever the other rows are: or the model is refused."""

from contextlib import nullcontext
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.jaxprs import equations_in
from jax.extend.core import Primitive
from jax.scipy import special

from numpyro_dp.fast.row_structure import find_structure
from numpyro_dp.model.arguments import UnsupportedModelError
from numpyro_dp.model.separate import separate
from numpyro_dp.privacy import isolation
from numpyro_dp.privacy.clipping import clipped_moments, clipped_sum
from numpyro_dp.privacy.isolation import RowsMeetError, alone, betainc_is_elementwise, hazards, one_row
from numpyro_dp.privacy.structured import StructuredRows
from numpyro_dp.privacy.vmap import vmap_last
from numpyro_dp.tools.sums import release_sum

N = 512
pytestmark = pytest.mark.optimized

FUNCTIONS = {
    "betainc": lambda x: special.betainc(x, x, 0.5),
    "betaln": lambda x: special.betaln(x, 2.0),
    "cauchy": lambda x: dist.Cauchy(0.0, 1.0).cdf(x),
    "digamma": special.digamma,
    "eigh": lambda x: jnp.linalg.eigvalsh(jnp.outer(x * jnp.arange(3.0), x * jnp.arange(3.0)) + jnp.eye(3))[2],
    "gammainc": lambda x: special.gammainc(x, 2.0),
    "gammaincc": lambda x: special.gammaincc(x, 2.0),
    "gradient of gammainc": jax.grad(lambda x: special.gammainc(x, 2.0)),
    "i0e": special.i0e,
    "i1e": special.i1e,
    "log_ndtr": special.log_ndtr,
    "logsumexp": lambda x: special.logsumexp(x * jnp.arange(3.0)),
    "interpolation": lambda x: jnp.interp(x, jnp.arange(5.0), jnp.array([0.0, 1.0, 4.0, 9.0, 16.0])),
    "ldexp": lambda x: jnp.ldexp(x, 3),
    "lgamma": special.gammaln,
    "matrix exponential": lambda x: jax.scipy.linalg.expm(x / 9 * jnp.arange(9.0).reshape(3, 3))[0, 1],
    "ndtri": lambda x: special.ndtri(x / 9),
    "polygamma": lambda x: special.polygamma(1, x),
    "pow": lambda x: x**1.7,
    "singular values": lambda x: jnp.linalg.svd(x * jnp.eye(3) + 1.0, compute_uv=False)[0],
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
    if is_refused and mapped is not jax.vmap:
        with pytest.raises(RowsMeetError):
            mapped(function)(jnp.ones(N))
        return
    assert is_refused == ("gammainc" in name or (name in ("betainc", "student") and not betainc_is_elementwise("cpu")))
    program, moved = jax.jit(mapped(function)), 0
    for usual in (0.3, 0.9, 2.5, 7.0, None):  # rows that are all alike are done at once
        x = jnp.asarray(
            np.random.default_rng(0).uniform(0.05, 8, N) if usual is None else np.full(N, usual), jnp.float32
        )
        expected = np.asarray(program(x))
        for value in (np.nan, np.inf, -np.inf, 0.0, -3.0, 1e-42, 0.01, 1e5, 1e6, 1e30):
            found = np.asarray(program(x.at[17].set(value)))
            moved += np.sum(np.delete(found, 17).view(np.int32) != np.delete(expected, 17).view(np.int32))
    assert (moved > 0) == (is_refused and "gammainc" not in name)  # which is refused for the time that it takes


def test_an_incomplete_beta_function_that_waits_for_the_slowest_is_noticed(monkeypatch):
    betainc = jax.scipy.special.betainc
    monkeypatch.setattr("jax.scipy.special.betainc", lambda a, b, x: betainc(a, b, x) + 1e-12 * jnp.max(a))
    betainc_is_elementwise.cache_clear()
    try:
        assert not betainc_is_elementwise("cpu")
    finally:
        betainc_is_elementwise.cache_clear()


def test_the_incomplete_beta_function_is_refused_where_rows_meet_in_it(monkeypatch):
    def censored(y, late):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.RightCensoredDistribution(dist.StudentT(3.0, b, 1.0), late), obs=y)

    args = (np.linspace(-1, 1, 7, dtype=np.float32), np.arange(7) % 2)
    monkeypatch.setattr("numpyro_dp.privacy.isolation.betainc_is_elementwise", lambda backend: False)
    with pytest.raises(UnsupportedModelError, match="incomplete beta function"):
        separate(censored, args)
    monkeypatch.setattr("numpyro_dp.privacy.isolation.betainc_is_elementwise", lambda backend: True)
    separate(censored, args)


@pytest.mark.parametrize("law", [dist.Gamma, dist.InverseGamma], ids=lambda law: law.__name__)
def test_the_incomplete_gamma_function_is_refused_since_one_row_stalls_all(law):
    """10 s instead of .25 ms for 1,000 numbers of which one has a = x = 3e7: see benchmarks/hostile_time.py."""

    def censored(y, late):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.RightCensoredDistribution(law(jnp.exp(b), 1.0), late), obs=y)

    args = (np.linspace(0.1, 1, 7, dtype=np.float32), np.arange(7) % 2)
    with pytest.raises(UnsupportedModelError, match=r"incomplete gamma function of a row.*closed form"):
        separate(censored, args)


def test_a_prior_may_use_any_function():
    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.factor("prior", special.gammainc(2.0, jnp.exp(b)))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(b, 1.0), obs=y)

    separate(model, (np.ones(7, np.float32),))


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


@pytest.mark.parametrize("vmap_method", ["sequential", "expand_dims", "broadcast_all"])
def test_callbacks_are_refused_whatever_their_method(vmap_method):
    """Row by row, too: Python may remember one row while it sees the next."""

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b * callback(vmap_method)(x), 1.0), obs=y)

    with pytest.raises(UnsupportedModelError, match="calls Python with a row"):
        separate(model, (np.ones(7, np.float32), np.ones(7, np.float32)))


def test_random_numbers_of_a_rows_own_threefry_key_are_its_own():
    noisy = lambda v: v + jax.random.normal(jax.random.key(v.astype(int)))  # noqa: E731
    x = jnp.arange(8.0)
    each = jnp.stack([noisy(v) for v in x])
    np.testing.assert_allclose(jax.vmap(alone(noisy, 1.0).of)(x), each, rtol=1e-6)
    alone(lambda v: jax.random.uniform(jax.random.fold_in(jax.random.key(0), v)), 3)
    alone(lambda words: jax.random.uniform(jax.random.wrap_key_data(words)), jnp.arange(2, dtype=jnp.uint32))


# -- Derivative rules: of what is mapped, a gradient, the forward density says nothing ---------------------------------


def jvp_rule(mixing):
    @jax.custom_jvp
    def f(x):
        return x

    f.defjvp(lambda primals, tangents: (primals[0], tangents[0] * jnp.sign(mixing(primals[0]))))
    return f


def vjp_rule(mixing):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, x), lambda x, g: (g * jnp.sign(mixing(x)),))
    return f


MIXING = {"custom_vmap_call": own_rule, "pure_callback": callback("broadcast_all")}


def hidden(rule, name):
    f = rule(MIXING[name])
    return lambda z, row: -0.5 * (f(z[0] * row[0]) - row[0]) ** 2


@pytest.mark.parametrize("rule", [jvp_rule, vjp_rule])
@pytest.mark.parametrize("name", MIXING)
def test_derivative_rules_do_not_escape(rule, name):
    """Version 0.1.0 accepted them: sums of gradients moved by 1984 where 2 was claimed."""
    density = hidden(rule, name)

    def model(y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([1]).to_event(1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.factor("fit", density(b, (y,)))

    shown = "calls Python with a row" if name == "pure_callback" else "applies `custom_vmap_call` to a row"
    with pytest.raises(UnsupportedModelError, match=shown):
        separate(model, (np.ones(7, np.float32),))


@pytest.mark.parametrize("rule", [jvp_rule, vjp_rule])
@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize("where", ["clipped_sum", "clipped_moments", "StructuredRows", "vmap_last", "release_sum"])
def test_what_is_mapped_is_checked_where_it_is_mapped(rule, name, where):
    """Whoever asks: not only the models that `separate` has seen."""
    density, rows = hidden(rule, name), jnp.linspace(0, 1, 8)
    gradient = jax.grad(lambda z, row: density(z, row).sum())
    z = jnp.array([0.3])
    with pytest.raises(ValueError, match=name):  # a RowsMeetError, or release_sum's own
        if where == "clipped_sum":
            clipped_sum(lambda row: gradient(z, (row[0][0],)), (rows,), 1.0)
        elif where == "clipped_moments":
            clipped_moments(lambda row: gradient(z, (row[0][0],))[0], (rows,), 1.0)
        elif where == "vmap_last":
            vmap_last(lambda v: gradient(z, (v,)), (False,))(rows)
        elif where == "release_sum":
            release_sum(lambda v: gradient(z, (v,))[0], rows, bound=1.0, eps=1.0)
        else:
            shapes = jax.ShapeDtypeStruct((1,), rows.dtype), (jax.ShapeDtypeStruct((1,), rows.dtype),)
            structure = find_structure(lambda z, row: density(z, (row[0][0],)), *shapes)
            sums = StructuredRows(structure, (rows,), 1, nullcontext)
            sums.gradient(z, 1.0)


def test_operations_that_are_not_listed_are_refused_by_name():
    """Also those of the future, of other libraries, and those that borrow a name."""
    for name in ("attention_of_2030", "add", "random_wrap", "geqrf", "closed_call", "custom_jvp_call"):
        own = Primitive(name)
        own.def_impl(lambda x: x)
        own.def_abstract_eval(lambda x: x)
        with pytest.raises(RowsMeetError, match=f"`{name}`"):
            alone(own.bind, jnp.ones(3))
    foreign = jax.ffi.ffi_call("somebodys", jax.ShapeDtypeStruct((), jnp.float32), vmap_method="broadcast_all")
    with pytest.raises(RowsMeetError, match="`ffi_call`"):
        alone(foreign, jnp.float32(1.0))
    with pytest.raises(RowsMeetError, match="`eig`"):
        alone(lambda x: jnp.linalg.eigvals(x).real, jnp.eye(3))


def test_loops_are_followed():
    loop = lambda x, n: jax.lax.fori_loop(0, n, lambda _, v: own_rule(v) + 1, x)  # noqa: E731
    with pytest.raises(RowsMeetError, match="custom_vmap_call"):
        alone(loop, 1.0, 3, of_rows=[True, False])
    scan = lambda x: jax.lax.scan(lambda c, _: (own_rule(c), c), x, None, length=3)[1]  # noqa: E731
    with pytest.raises(RowsMeetError, match="custom_vmap_call"):
        alone(scan, 1.0)
    branch = lambda x: jax.lax.cond(x > 0, own_rule, lambda v: v, x)  # noqa: E731
    with pytest.raises(RowsMeetError, match="custom_vmap_call"):
        alone(branch, 1.0)
    with pytest.raises(RowsMeetError, match="one row could keep the run from ending"):
        alone(lambda x: jax.lax.while_loop(lambda v: v < 1, lambda v: v + 1, x), 1.0)
    alone(lambda x: jax.lax.fori_loop(0, 3, lambda _, v: v + 1, x), 1.0)
    alone(lambda x, n: jax.lax.fori_loop(0, n, lambda _, v: v + 1, x), 1.0, 3, of_rows=[True, False])


def test_what_depends_on_a_row_is_known_behind_branches_and_loops():
    """By what decides the branch, by what the loop closes over, and by what it begins with, should it never turn."""
    for function in (
        lambda x, n: own_rule(jax.lax.cond(x > 0, lambda m: m, lambda m: 2 * m, n)),
        lambda x, n: own_rule(jax.lax.fori_loop(0, n, lambda _, v: v + x, 0.0)),
        lambda x, n: own_rule(jax.lax.fori_loop(0, n, lambda _, c: (c[1], c[1]), (x, 0.0))[0]),
    ):
        with pytest.raises(RowsMeetError, match="custom_vmap_call"):
            alone(function, 1.0, 3, of_rows=[True, False])
    alone(lambda x, n: x + own_rule(jax.lax.fori_loop(0, n, lambda _, v: v + 1, 0.0)), 1.0, 3, of_rows=[True, False])


def test_what_no_output_depends_on_is_left_out():
    checked = alone(lambda x, y: (own_rule(y), 2 * x)[1], 1.0, 2.0)
    assert checked.used == [True, False]
    np.testing.assert_array_equal(jax.vmap(checked.of)(jnp.arange(3.0), jnp.ones(3)), [0, 2, 4])


def test_an_operation_that_looks_like_one_that_jax_wraps_is_refused():
    """By the name of its class; nor does an object of the real class help in an operation of somebody else's."""
    lookalike = type("SearchSorted", (), {"__module__": "jax._src.numpy.hijax"})()
    closed = jax.make_jaxpr(jnp.searchsorted)(jnp.ones(3), jnp.float32(1.0))
    wrapped = [equation for equation in equations_in(closed.jaxpr) if "_prim" in equation.params]
    assert bool(wrapped) == (jax.__version_info__ >= (0, 12))
    own = Primitive("somebodys")
    own.def_abstract_eval(lambda x, **params: x)
    for prim in (lookalike, *(equation.params["_prim"] for equation in wrapped)):
        with pytest.raises(RowsMeetError):
            alone(lambda x, prim=prim: own.bind(x, _prim=prim), jnp.ones(3))
        assert not isolation._is_wrapped(SimpleNamespace(primitive=own, params={"_prim": prim}))
    for equation in wrapped:
        assert isolation._is_wrapped(equation)
        others = SimpleNamespace(primitive=equation.primitive, params={"_prim": lookalike})
        assert not isolation._is_wrapped(others)


def test_one_row_of_a_table_has_a_leading_axis():
    shapes = one_row((np.zeros((5, 3), np.float32), np.zeros(5, np.int32)))
    assert [(shape.shape, shape.dtype) for shape in shapes] == [((1, 3), np.float32), ((1,), np.int32)]
