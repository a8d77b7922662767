"""Sums with the structure of a row's density, beside the sums that know nothing of it; and what one row can do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers.sums import HOSTILE, steps
from helpers.tiers import single_every_day, some_every_day
from helpers.zoo import BY_NAME, CASES
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_dp.privacy.structured
from numpyro_dp.fast.row_structure import find_structure
from numpyro_dp.model.separate import separate
from numpyro_dp.privacy import clipping
from numpyro_dp.privacy.clipping import GRID, clipped_sum
from numpyro_dp.privacy.structured import StructuredRows

pytestmark = pytest.mark.optimized


def sums_of(density, rows, size, dtype=jnp.float32):
    shapes = [jax.ShapeDtypeStruct((1, *row.shape[1:]), row.dtype) for row in rows]
    structure = find_structure(density, jax.ShapeDtypeStruct((size,), dtype), shapes)
    return StructuredRows(structure, rows, size, jax.ensure_compile_time_eval)


def kinds(case):
    """The kinds of a model's parts, and how many coordinates each has."""
    separated = separate(case.model, case.args, case.kwargs, **case.options)
    rows = separated.rows(case.args, case.kwargs)
    shapes = [jax.ShapeDtypeStruct((1, *row.shape[1:]), row.dtype) for row in rows]
    z = jax.ShapeDtypeStruct((separated.num_params,), jnp.float32)
    structure = find_structure(separated.row_log_density(case.args, case.kwargs), z, shapes)
    return [(part.kind, part.coordinates.size) for part in structure.parts]


EXPECTED = {
    "logistic": [("dot", 3)],
    "multi_output": [("dot", 6)],
    "softmax_regression": [("dot", 12)],
    "robust_regression": [("dot", 3), ("direct", 1), ("direct", 1)],
    "hierarchical": [("dot", 3), ("member", 4)],
    "non_centred": [("dot", 3), ("member", 4), ("direct", 1), ("direct", 1)],
    "crossed_effects": [("member", 3), ("member", 4), ("direct", 1)],
    "mixture_of_regressions": [("dot", 3), ("dot", 3), ("direct", 1)],
    "latent_class_by_group": [("dot", 3), ("member", 4)],
    "missing_as_nan": [("dot", 3)],
    "horseshoe": [("direct", 3), ("direct", 3), ("direct", 1)],
}


@pytest.mark.parametrize(
    "name",
    some_every_day(
        EXPECTED, ["logistic", "softmax_regression", "non_centred", "latent_class_by_group", "missing_as_nan"]
    ),
)
def test_the_structure_of_models_is_found(name):
    assert kinds(BY_NAME[name]) == EXPECTED[name]


EVERYDAY = ("mixture",)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c.name in EVERYDAY else pytest.mark.nightly) for c in CASES], ids=str
)
def test_sums_are_those_of_the_general_path(case):
    """For every model, rows clipped or not: up to the rounding of the clip's radius and of float32."""
    separated = separate(case.model, case.args, case.kwargs, **case.options)
    rows, size = separated.rows(case.args, case.kwargs), separated.num_params
    density = separated.row_log_density(case.args, case.kwargs)
    sums = sums_of(density, rows, size)
    rng = np.random.default_rng(0)
    z, z_new = jnp.asarray(rng.normal(size=(2, size)) * 0.3, jnp.float32)

    @jax.jit
    def both(z, z_new, bound):
        gradient = clipped_sum(lambda row: jax.grad(density)(z, row), rows, bound, fixed_places=True)
        ratio = clipped_sum(lambda row: density(z_new, row) - density(z, row), rows, bound)
        return (gradient, ratio), (sums.gradient(z, bound), sums.log_ratio(z, z_new, bound))

    for bound in (1e-2, 1e3):
        for general, found in zip(*both(z, z_new, bound), strict=True):
            ours, theirs = (np.asarray(steps(total), float) for total in (found, general))
            # The radius keeps 0.8% free, not 0.05%; single precision does the rest.
            assert np.linalg.norm(ours - theirs) <= 0.01 * np.linalg.norm(theirs) + 2e-5 * GRID * len(rows[0])


@single_every_day
def test_gradients_that_are_not_clipped_are_summed_exactly(precision):
    rng = np.random.default_rng(0)
    X, b = rng.normal(size=(5000, 4)), rng.normal(size=4)
    dtype = jnp.result_type(float)
    sums = sums_of(lambda z, row: -((row[0] @ z)[0] ** 2) / 2, (jnp.asarray(X, dtype),), 4, dtype)
    total = sums.gradient(jnp.asarray(b, dtype), 200.0)
    np.testing.assert_allclose(steps(total).astype(float) * 200 / GRID, -X.T @ (X @ b), atol=1e-5 * 5000)


# -- What one row can do -----------------------------------------------------------------------------------------------

D, NUM_GROUPS = 3, 4


def mixed_density(z, row):
    """Products, members and direct use of parameters in one density with large slopes and jumps."""
    x, y, group = row
    b, alpha, log_scale = z[:D], z[D : D + NUM_GROUPS], z[-1]
    eta = x[0] @ b + jnp.exp(z[-2]) * alpha[group[0]]
    return -jnp.abs(y[0] - eta) * jnp.exp(-log_scale) - log_scale + y[0] * z[-2] ** 2


SIZE = D + NUM_GROUPS + 2
NUM_ROWS = 300  # more than a block


def rows_like(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(NUM_ROWS, D)).astype(np.float32)
    return X, rng.normal(size=NUM_ROWS).astype(np.float32), rng.integers(0, NUM_GROUPS, NUM_ROWS).astype(np.int32)


@functools.cache
def program(chunk):
    def sums(rows, z, bound):
        with pytest.MonkeyPatch.context() as patched:
            if chunk:
                patched.setattr(numpyro_dp.privacy.structured, "_WHOLE", 0)
                patched.setattr(numpyro_dp.privacy.structured, "_chunk_rows", lambda width: 256)
            of_rows = sums_of(mixed_density, rows, SIZE)
        return of_rows.gradient(z, bound), of_rows.log_ratio(z, z + 0.1, bound)

    return jax.jit(sums)


def test_parts_of_the_mixed_density():
    shapes = [jax.ShapeDtypeStruct((1, *row.shape[1:]), row.dtype) for row in rows_like()]
    structure = find_structure(mixed_density, jax.ShapeDtypeStruct((SIZE,), jnp.float32), shapes)
    assert sorted((part.kind, part.coordinates.size) for part in structure.parts) == [
        ("direct", 1),
        ("direct", 1),
        ("dot", D),
        ("member", NUM_GROUPS),
    ]


def largest_move(place, x, y, group, bound, z, chunk=False):
    """How far a sum moves, in claimed sensitivities, when one row is replaced."""
    rows = rows_like()
    changed = tuple(row.copy() for row in rows)
    for row, value in zip(changed, (x, y, group), strict=True):
        row[place] = value
    moves = []
    for one, other in zip(
        *(program(chunk)(r, jnp.asarray(z, jnp.float32), bound) for r in (rows, changed)), strict=True
    ):
        change = np.atleast_1d(steps(one) - steps(other))
        moves.append(float(sum(int(c) ** 2 for c in change)) ** 0.5 / (2 * GRID))
    return max(moves)


@settings(max_examples=150)
@given(
    place=st.sampled_from([0, 255, 256, NUM_ROWS - 1]),
    x=st.lists(st.sampled_from(HOSTILE), min_size=D, max_size=D),
    y=st.sampled_from(HOSTILE),
    group=st.integers(-5, 7),
    bound=st.floats(1e-6, 1e6),
    z=st.lists(st.sampled_from([0.0, 1e-3, 1.0, -7.0, 30.0]), min_size=SIZE, max_size=SIZE),
    chunk=st.booleans(),
)
def test_replacing_a_row_moves_the_sums_by_at_most_the_sensitivity(place, x, y, group, bound, z, chunk):
    assert largest_move(place, x, y, group, bound, z, chunk) <= 1


def one_row_sum(density, row, size, z, bound):
    return steps(
        sums_of(density, tuple(jnp.asarray(r) for r in row), size).gradient(jnp.asarray(z, jnp.float32), bound)
    )


@settings(max_examples=200)
@given(
    log_size=st.floats(-37, 37), log_slope=st.floats(-37, 37), log_bound=st.floats(-6, 6), seed=st.integers(0, 2**31)
)
def test_one_row_never_exceeds_the_grid_radius(log_size, log_slope, log_bound, seed):
    """The product of a tiny (huge) slope and a huge (tiny) x, whose squares alone would leave single precision."""
    x = (np.random.default_rng(seed).normal(size=(1, 3)) * 10**log_size).astype(np.float32)
    slope = np.float32(10**log_slope)
    total = linear_program()(x, slope[None], 10**log_bound)
    norm = float(sum(int(c) ** 2 for c in steps(total))) ** 0.5
    assert norm <= GRID
    true = float(np.linalg.norm(x.astype(float)) * float(slope)) / 10**log_bound
    # Smaller x are taken for larger than they are; what overflows contributes nothing.
    if -14 < log_size < 17 and -30 < log_slope < 30 and true < 1e18:
        assert norm == pytest.approx(GRID * min(true, 1), rel=0.01, abs=3)


@functools.cache
def linear_program():
    return jax.jit(
        lambda x, slope, bound: sums_of(lambda z, row: row[1][0] * (row[0][0] @ z), (x, slope), 3).gradient(
            jnp.zeros(3), bound
        )
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_a_row_that_is_not_finite_leaves_the_others_as_they_are(bad):
    X, y, group = rows_like()
    z = jnp.asarray(np.random.default_rng(1).normal(size=SIZE), jnp.float32)
    before, _ = program(False)((X, y, group), z, 1.0)
    X = X.copy()  # JAX may still be reading the other
    X[7, 1] = bad
    without, _ = program(False)((np.where(np.arange(NUM_ROWS)[:, None] == 7, np.nan, X), y, group), z, 1.0)
    after, _ = program(False)((X, y, group), z, 1.0)
    np.testing.assert_array_equal(steps(after), steps(without))
    assert 0 < np.linalg.norm((steps(after) - steps(before)).astype(float)) <= GRID


def test_each_row_counts_once_whatever_the_chunks():
    z = jnp.asarray(np.random.default_rng(1).normal(size=SIZE), jnp.float32)
    for one, other in zip(*(program(chunk)(rows_like(), z, 1e3) for chunk in (False, True)), strict=True):
        ours, theirs = (np.atleast_1d(steps(total)).astype(float) for total in (one, other))
        np.testing.assert_allclose(ours, theirs, atol=NUM_ROWS * 2)


@pytest.mark.nightly
def test_a_column_of_equal_values_is_not_compiled_into_the_sums(monkeypatch):
    """Programs hold tables as constants. If compilers saw that all outcomes are alike in one table, and that one is not
    in its neighbour, they would compute *all* rows by other instructions."""
    n = 2**14
    rng = np.random.default_rng(3)
    X = jnp.asarray(rng.normal(size=(n, 2)), jnp.float32)
    points = jnp.asarray(rng.normal(size=(12, 3)) * 0.5, jnp.float32)
    ends = points + jnp.asarray(rng.normal(size=(12, 3)) * 1e-4, jnp.float32)

    def density(z, row):
        return jnp.sum(dist.Gamma(jnp.exp(z[2]), jnp.exp(row[0] @ z[:2])).log_prob(row[1]))

    def ratios(y, general):
        rows = (X, jnp.asarray(y))
        sums = sums_of(density, rows, 3)

        def one(z, z_new):
            if general:
                return clipped_sum(lambda row: density(z_new, row) - density(z, row), rows, 1e-3)
            return sums.log_ratio(z, z_new, 1e-3)

        def at(k, found):
            total = one(points[k], ends[k])
            return found[0].at[k].set(total.hi), found[1].at[k].set(total.lo)

        start = (jnp.zeros(12, jnp.int32), jnp.zeros(12, jnp.int32))
        hi, lo = jax.jit(lambda: jax.lax.fori_loop(0, 12, at, start))()
        return np.asarray(hi).astype(float) * 2**24 + np.asarray(lo)

    def largest_change(general):
        alike = np.full(n, 30, np.float32)
        return np.abs(ratios(alike, general) - ratios(np.where(np.arange(n), alike, 29), general)).max() / (2 * GRID)

    assert largest_change(True) <= 1
    assert largest_change(False) <= 1
    monkeypatch.setattr(jax.lax, "optimization_barrier", lambda values: values)
    if jax.default_backend() == "cpu":  # a mutation, to see that there is something to find
        assert largest_change(False) > 1


@pytest.mark.parametrize("fill", [0.0, np.nan])
def test_what_is_filled_in_for_a_group_that_does_not_exist_is_no_member(fill):
    """It comes from no coordinate of z, so a row's gradient must not go to any."""

    def density(z, row):
        effects = z.reshape(3, 50).at[row[0]].get(mode="fill", fill_value=fill)
        return -0.5 * jnp.sum((row[1][0] - effects) ** 2)

    found = []
    for outcome in (1e3, -1e3):
        group, y = np.zeros(256, np.int32), np.zeros(256, np.float32)
        group[0], y[0] = 99, outcome
        total = sums_of(density, (jnp.asarray(group), jnp.asarray(y)), 150).gradient(jnp.zeros(150), 1.0)
        found.append(steps(total).astype(float))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("bound", [1e-25, 1e23, 1e35])
def test_bounds_beyond_single_precision_give_nothing(bound):
    x, slope = np.full((1, 3), 1e-3, np.float32), np.float32([3e38])
    assert not np.any(steps(linear_program()(x, slope, np.float32(bound))))


ODD = {
    "without parameters": lambda z, row: -jnp.sum(row[0] ** 2),
    "no columns": lambda z, row: -jnp.sum(row[0][:, :0] @ z[:0]) - z[0],
    "two numbers": lambda z, row: (row[0] @ (jnp.full(2, z[0]) * z[1]))[0],
    "reversed": lambda z, row: (row[0] @ (1.0 - 2.0 * z[:2][::-1] / z[2]))[0],
    "tied": lambda z, row: (row[0] @ z[:2])[0] * z[0] - (row[0] @ z[1:])[0] ** 2,
    "sum of products": lambda z, row: jnp.sum(row[0] * z[:2]) ** 2 * z[2],
    "a member and all": lambda z, row: z[jnp.int32(row[0][0, 0] > 0)] * jnp.sum(z),
    "conditional": lambda z, row: jax.lax.cond(row[0][0, 0] > 0, lambda: z[0] ** 2, lambda: z[1] * z[2]),
    "scan": lambda z, row: jax.lax.scan(lambda c, x: (c * z[0] + x, None), z[1], row[0][0])[0],
    "stopped": lambda z, row: (row[0] @ jax.lax.stop_gradient(z[:2]))[0] * z[2],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("conditional", "scan") else pytest.mark.nightly) for n in ODD]
)
def test_gradients_of_odd_densities(name):
    rng = np.random.default_rng(0)
    X, z = jnp.asarray(rng.normal(size=(20, 2)), jnp.float32), jnp.asarray([0.3, -0.7, 1.1])
    density = ODD[name]
    total = sums_of(density, (X,), 3).gradient(z, 1e3)
    expected = jax.grad(lambda z: sum(density(z, (X[k : k + 1],)) for k in range(20)))(z)
    np.testing.assert_allclose(steps(total).astype(float) * 1e3 / GRID, expected, rtol=1e-4, atol=0.02)


# -- Mistakes that must be noticed -------------------------------------------------------------------------------------


def worst_move(monkeypatch):
    monkeypatch.setattr("test_gradients.program", functools.cache(program.__wrapped__))
    z = [0.0] * (SIZE - 1) + [-5.0]
    return max(
        largest_move(0, [size] * D, sign * 1e-3, group, 1.0, z)
        for size in (1e-3, 30.0)
        for sign in (1, -1)
        for group in (1, 2)
    )


def test_the_sensitivity_is_reached_and_mistakes_exceed_it(monkeypatch):
    assert 0.45 < worst_move(monkeypatch) <= 1
    with_norms = numpyro_dp.privacy.structured._without_infinities

    def without_norms(*args):
        x, norm = with_norms(*args)
        return x, None if norm is None else jnp.ones_like(norm)

    with monkeypatch.context() as patched:  # without the numbers x in the norm
        patched.setattr(numpyro_dp.privacy.structured, "_without_infinities", without_norms)
        assert worst_move(patched) > 1
    with monkeypatch.context() as patched:
        patched.setattr(clipping, "_radius", lambda dimension, room: 3.0 * GRID)
        assert worst_move(patched) > 1


def test_members_of_a_million_rows_are_summed_exactly():
    """The low halves of such sums leave 32 bits after 2**19 rows."""
    n, each = 2**20, 2030 * 4096 + 4095

    def density(z, row):
        return z[row[1][0]] * row[0][0]

    group = np.arange(n) % 5 == 0
    rows = jnp.full(n, each / GRID, jnp.float32), jnp.asarray(group, jnp.int32)
    total = sums_of(density, rows, 2).gradient(jnp.zeros(2), 1.0)
    assert [int(x) for x in steps(total)] == [int((~group).sum()) * each, int(group.sum()) * each]
