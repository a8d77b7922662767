import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from helpers.jaxprs import shapes_in
from helpers.sums import HOSTILE, steps
from helpers.tiers import single_every_day, some_every_day
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_dp.privacy.clipping
from numpyro_dp.privacy.clipping import (
    GRID,
    BrokenCompilerError,
    ClippedSum,
    OwnerIndex,
    chunk_rows,
    clipped_moments,
    clipped_sum,
    map_chunks,
    penalized_sum,
    radius_by_blocks,
    require_correct_sums,
    sensitivity_steps,
    sum_steps,
)
from numpyro_dp.privacy.isolation import RowsMeetError
from numpyro_dp.privacy.noise import in_real_units, release

pytestmark = pytest.mark.optimized


def released(total, noise):
    return in_real_units(release(total, noise), total.bound)


def scalar_sum(values, bound):
    return clipped_sum(lambda row: row[0][0], (jnp.asarray(values),), bound)


vector_sum = scalar_sum  # what a row gives decides
compiled_sum = jax.jit(lambda values, bound: clipped_sum(lambda row: row[0][0], (values,), bound))


def test_small_values_are_summed_as_they_are(precision):
    rng = np.random.default_rng(0)
    scalars = rng.uniform(-1, 1, 1000)
    np.testing.assert_allclose(released(scalar_sum(scalars, 1.0), None), scalars.sum(), atol=1000 * 2.0**-23)
    vectors = rng.uniform(-0.3, 0.3, (1000, 5))
    np.testing.assert_allclose(released(vector_sum(vectors, 1.0), None), vectors.sum(0), atol=1000 * 2.0**-23)


def test_large_values_are_clipped(precision):
    assert released(scalar_sum([5.0, -7.0, 0.25, 5.0], 1.0), None) == pytest.approx(1.25)
    clipped = released(vector_sum([[3.0, 4.0], [0.0, 0.0]], 1.0), None)
    np.testing.assert_allclose(clipped, [0.6, 0.8], rtol=1e-4)  # the radius leaves room for rounding


@pytest.mark.parametrize(
    ("value", "expected"), [(np.nan, 0), (np.inf, 2.0), (-np.inf, -2.0), (1e30, 2.0), (0.0, 0), (1.5, 1.5)]
)
def test_what_one_scalar_row_contributes(value, expected, precision):
    assert released(scalar_sum([value], 2.0), None) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_what_one_vector_row_contributes(bad):
    total = vector_sum(np.array([[bad, 1.0, 0.0], [0.5, 0.0, 0.0]], np.float32), 2.0)
    np.testing.assert_allclose(released(total, None), [0.5, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(steps(total), steps(vector_sum(np.array([[0.5, 0.0, 0.0]], np.float32), 2.0)))


@pytest.mark.parametrize("fixed_places", [False, True])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_only_rows_that_are_present_count(shape, fixed_places):
    rng = np.random.default_rng(0)
    values, present = rng.normal(size=(300, *shape)).astype(np.float32), rng.random(300) < 0.5
    per_row, options = lambda row: row[0][0], {"fixed_places": fixed_places}
    found = clipped_sum(per_row, (jnp.asarray(values),), 2.0, present=jnp.asarray(present), **options)
    where = present.reshape(-1, *[1] * len(shape))
    expected = clipped_sum(per_row, (jnp.asarray(np.where(where, values, 0)),), 2.0, **options)
    np.testing.assert_array_equal(steps(found), steps(expected))


def test_a_chunk_may_be_full_of_the_largest_steps():
    high, low = sum_steps(jnp.full(2**17, GRID, jnp.int32))
    assert (int(high) << 24) + int(low) == 2**17 * GRID


def test_loops_are_refused_unless_somebody_vouches_for_them():
    with pytest.raises(RowsMeetError, match="random_gamma"):
        clipped_sum(lambda row: jax.random.gamma(jax.random.key(0), row[0][0]), (jnp.ones(3),), 1.0)


@pytest.mark.parametrize("value", HOSTILE)
def test_no_jump_no_contribution(value):
    """Proposal equals current: the bound is 0 and so is the sum, whatever the rows say."""
    assert released(scalar_sum([value, 1.0], jnp.zeros(())), None) == 0


@settings(max_examples=150)
@given(
    rows=st.lists(st.lists(st.sampled_from(HOSTILE), min_size=3, max_size=3), min_size=5, max_size=5),
    other=st.lists(st.sampled_from(HOSTILE), min_size=3, max_size=3),
    bound=st.floats(1e-6, 1e6),
)
def test_replacing_a_row_moves_the_sum_by_at_most_the_sensitivity(rows, other, bound):
    rows = np.array(rows, np.float32)
    neighbour = rows.copy()
    neighbour[0] = other
    for column in (slice(None), 0):  # vectors, then scalars
        change = steps(compiled_sum(rows[:, column], bound)) - steps(compiled_sum(neighbour[:, column], bound))
        assert sum(int(c) ** 2 for c in np.atleast_1d(change)) <= sensitivity_steps("replace_one") ** 2


@settings(max_examples=300)
@given(
    dimension=st.sampled_from([1, 2, 3, 20, 257]),
    log_size=st.floats(-30, 18),
    log_bound=st.floats(-6, 6),
    seed=st.integers(0, 2**31),
)
def test_one_row_never_exceeds_the_grid_radius(dimension, log_size, log_bound, seed):
    """In exact integers: the norm of a clipped row, rounding included, is at most GRID steps."""
    rng = np.random.default_rng(seed)
    row = (rng.standard_t(1, (1, dimension)) * 10**log_size).astype(np.float32)
    norm_squared = sum(int(c) ** 2 for c in steps(compiled_sum(row, 10**log_bound)))
    assert norm_squared <= GRID**2


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000, 5000])
def test_every_row_counts_once_whatever_the_chunks(n, monkeypatch):
    monkeypatch.setattr(numpyro_dp.privacy.clipping, "chunk_rows", lambda width: 256)
    values = np.random.default_rng(n).integers(-8, 9, n) / 8.0
    assert int(steps(scalar_sum(values, 1.0))) == int((values * GRID).sum())


def test_the_order_of_the_rows_does_not_matter(precision):
    values = np.random.default_rng(1).standard_cauchy((4000, 3))
    shuffled = np.random.default_rng(2).permutation(values)
    assert (steps(vector_sum(values, 1.0)) == steps(vector_sum(shuffled, 1.0))).all()


def test_a_million_rows_in_float32_are_summed_exactly():
    """A float32 sum would lose the last row among a million; the integer sum moves by exactly its change."""
    n = 10**6
    values = np.full(n, 0.9999999, np.float32)
    neighbour = values.copy()
    neighbour[-1] = -1.0
    change = int(steps(scalar_sum(values, 1.0))) - int(steps(scalar_sum(neighbour, 1.0)))
    assert change == round(0.9999999 * GRID) + GRID
    assert change <= sensitivity_steps("replace_one")
    assert int(steps(scalar_sum(np.ones(n, np.float32), 1.0))) == n * GRID
    assert int(steps(scalar_sum(-np.ones(n, np.float32), 1.0))) == -n * GRID


def test_reversed_jumps_give_the_opposite_sum():
    """The penalty test needs an antisymmetric ratio, rounding included."""
    values = np.random.default_rng(3).normal(size=1000)
    assert int(steps(scalar_sum(values, 1.0))) == -int(steps(scalar_sum(-values, 1.0)))


def test_without_a_bound_the_sum_is_plain():
    total = clipped_sum(lambda row: row[0][0], (jnp.arange(10.0),), float("inf"))
    assert total.value == 45.0


def test_chunks_bound_the_memory():
    for width in (1, 10, 200, 10**5):
        assert chunk_rows(width) <= 2**17
        assert chunk_rows(width) * width <= 2**20 or chunk_rows(width) == 2**8


def test_a_mutation_without_the_clip_is_caught(monkeypatch):
    monkeypatch.setattr(
        numpyro_dp.privacy.clipping, "scalar_steps", lambda v, b: jnp.round(v / b * GRID).astype(jnp.int32)
    )
    change = int(steps(scalar_sum([5.0], 1.0))) - int(steps(scalar_sum([-5.0], 1.0)))
    assert change > sensitivity_steps("replace_one")


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_16_bit_values_are_clipped_in_float32(dtype):
    values = jnp.asarray(np.random.default_rng(0).normal(size=(1, 50)) * 5, dtype)
    assert sum(int(c) ** 2 for c in steps(vector_sum(values, 1.0))) <= GRID**2
    assert abs(int(steps(scalar_sum(jnp.asarray([7.0], dtype), 1.0)))) == GRID


# -- Compilers that cannot add -----------------------------------------------------------------------------------------


def test_this_compiler_adds_correctly(precision):
    require_correct_sums()


def test_a_compiler_that_was_told_there_are_no_nans_is_refused():
    """A row of NaN would move each sum of a block by 250 times the bound."""
    program = "from numpyro_dp.privacy.clipping import require_correct_sums; require_correct_sums()"
    fast = "--xla_cpu_enable_fast_math=true"
    wrong = f"{fast} --xla_cpu_fast_math_honor_nans=false --xla_cpu_fast_math_honor_infs=false"
    for flags, is_right in ((fast, True), (wrong, False)):
        options = {"env": os.environ | {"XLA_FLAGS": flags}, "capture_output": True, "text": True}
        found = subprocess.run([sys.executable, "-c", program], check=False, **options)
        assert (found.returncode == 0) == is_right, found.stderr
        assert is_right or "BrokenCompilerError" in found.stderr


def test_a_compiler_known_to_add_wrongly_is_refused(monkeypatch):
    monkeypatch.setattr(jaxlib, "__version__", "0.10.2")
    with pytest.raises(BrokenCompilerError, match=r"jaxlib 0\.10\.2 returns wrong sums.*pip install"):
        require_correct_sums()


def test_a_compiler_seen_to_add_wrongly_is_refused(monkeypatch):
    numpyro_dp.privacy.clipping._known_sums_are_right.cache_clear()
    monkeypatch.setattr(
        numpyro_dp.privacy.clipping, "clipped_sum", lambda *_, **__: ClippedSum(jnp.int32(7), jnp.int32(0), 1.0)
    )
    with pytest.raises(BrokenCompilerError, match="known-answer"):
        require_correct_sums()
    numpyro_dp.privacy.clipping._known_sums_are_right.cache_clear()


# -- Rows in fixed places, whose vectors are added up by blocks --------------------------------------------------------


def by_blocks(values, bound, size=None):
    return clipped_sum(lambda row: row[0][0], (jnp.asarray(values),), bound, size=size, fixed_places=True)


compiled_by_blocks = jax.jit(by_blocks)


@single_every_day
@pytest.mark.parametrize("n", [1, 64, 65, 2000])
def test_sums_by_blocks_are_those_of_single_rows(n, precision, monkeypatch):
    monkeypatch.setattr(
        numpyro_dp.privacy.clipping, "_CHUNK_ELEMENTS", 2**11
    )  # several chunks, the last one incomplete
    rng = np.random.default_rng(n)
    values = rng.normal(size=(n, 7)) * rng.lognormal(sigma=2, size=(n, 1))
    values[rng.random(n) < 0.1, 3] = rng.choice([np.nan, np.inf, -np.inf])
    for size in (None, n // 2):
        one = released(vector_sum(values[:size], 1.5), None) if size != 0 else 0
        found = released(by_blocks(values, 1.5, size), None)
        np.testing.assert_allclose(found, one, atol=2e-3 * max(np.sqrt(n), 1))
    inside = np.clip(values, -0.1, 0.1)
    total = np.nan_to_num(inside)[np.isfinite(inside).all(1)].sum(0)
    np.testing.assert_allclose(released(by_blocks(inside, 1.0), None), total, atol=1e-5 * n)  # unclipped: no bias


@settings(max_examples=150)
@given(
    changed=st.lists(st.lists(st.sampled_from(HOSTILE), min_size=3, max_size=3), min_size=2, max_size=2),
    rest=st.sampled_from(["aligned", "random", "huge", "tiny", "mixed"]),
    place=st.integers(0, 149),
    log_bound=st.floats(-12, 12),
    seed=st.integers(0, 9),
)
def test_by_blocks_a_changed_row_moves_the_sum_by_at_most_the_sensitivity(changed, rest, place, log_bound, seed):
    rng, bound = np.random.default_rng(seed), 10.0**log_bound
    values = rng.normal(size=(150, 3)) * bound
    if rest == "aligned":  # all of them at the bound, on one side: the largest partial sums
        values = np.abs(values[:1]) * np.ones((150, 1)) * rng.uniform(1, 3, size=(150, 1))
    values *= {"huge": 1e15, "tiny": 1e-15}.get(rest, 1.0)
    if rest == "mixed":
        values *= 10.0 ** rng.uniform(-20, 20, size=(150, 1))
    values = np.clip(values, -3e38, 3e38).astype(np.float32)
    tables = []
    for row in changed:
        table = values.copy()
        table[place] = row
        tables.append(steps(compiled_by_blocks(table, jnp.float32(bound))))
    difference = (tables[0] - tables[1]).astype(float)
    assert np.linalg.norm(difference) <= sensitivity_steps("replace_one")


@pytest.mark.parametrize("dimension", [1, 2, 20, 300])
def test_by_blocks_the_sensitivity_is_nearly_reached_and_never_passed(dimension, precision):
    """A row that turns around, among others that make every partial sum as large as can be."""
    rng = np.random.default_rng(dimension)
    largest = 0.0
    for _ in range(20):
        values = rng.normal(size=dimension) * np.ones((192, 1)) * 10 ** rng.uniform(0, 5, size=(192, 1))
        turned = values.copy()
        turned[rng.integers(192)] *= -1
        one, other = (steps(compiled_by_blocks(v, 1.0)).astype(float) for v in (values, turned))
        largest = max(largest, np.linalg.norm(one - other))
    assert 0.997 * sensitivity_steps("replace_one") < largest <= sensitivity_steps("replace_one")


@pytest.mark.parametrize("block", [32, 64, 256])
@pytest.mark.parametrize("dimension", [1, 10, 1000])
def test_the_clip_by_blocks_leaves_the_room_of_its_proof(dimension, block):
    """docs/proofs/clipping.md: half a step for each entry, the error of the norm, and ``2 B^2 u`` for a block."""
    unit = 2.0**-24
    room = 8 * (dimension + 16) * unit + 2 * block**2 * unit
    assert radius_by_blocks(dimension, block) <= (GRID - dimension**0.5 / 2) * (1 - room)
    assert radius_by_blocks(dimension, block) >= (GRID - dimension**0.5 / 2) * (1 - room) - 2


@pytest.mark.parametrize("n", [0, 1, 1024, 2500])
def test_rows_are_mapped_by_chunks_as_they_are_at_once(n):
    rows = jnp.asarray(np.random.default_rng(n).normal(size=(n, 3)), jnp.float32)
    found = map_chunks(lambda row: jnp.stack([row[0][0].sum(), row[0][0, 1]]), (rows,), 2**8)
    np.testing.assert_allclose(found, np.stack([rows.sum(1), rows[:, 1]], 1), rtol=1e-5, atol=1e-6)


def test_by_blocks_a_mutation_without_the_clip_is_caught(monkeypatch):
    monkeypatch.setattr(numpyro_dp.privacy.clipping.lax, "rsqrt", jnp.ones_like)
    values = np.ones((64, 3), np.float32)
    changed = values.copy()
    changed[5] = -1e3
    with jax.disable_jit():
        difference = steps(by_blocks(values, 1.0)) - steps(by_blocks(changed, 1.0))
    assert np.linalg.norm(difference.astype(float)) > sensitivity_steps("replace_one")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bound", [1e-18, 1.0, 1e18, 1e20, 1e30])
def test_by_blocks_a_row_with_a_number_that_is_none_counts_as_0_at_any_bound(bad, bound):
    values = np.zeros((70, 2), np.float32)
    values[3] = [bad, 1.0]
    np.testing.assert_array_equal(steps(by_blocks(values, bound)), 0)


def test_more_rows_than_fit_into_the_limbs_are_never_added_up_at_once():
    """An int32 would overflow, and the sum be another one. No memory is needed for a shape."""

    def shape_of_sum(length, dimension=()):
        rows = jax.ShapeDtypeStruct((length, *dimension), jnp.int32)
        return jax.eval_shape(sum_steps, rows)[0].shape

    assert shape_of_sum(2**26) == ()
    assert shape_of_sum(2**26, (3,)) == (3,)
    with pytest.raises(ValueError, match="at most 524288 numbers can be added up exactly at once"):
        shape_of_sum(2**26 + 1)
    with pytest.raises(ValueError, match="at most 524288 numbers can be added up exactly at once"):
        shape_of_sum(2**26 + 1, (3,))
    owned = lambda steps: sum_steps(steps, OwnerIndex(jnp.zeros(len(steps), jnp.int32), 1))  # noqa: E731
    assert jax.eval_shape(owned, jax.ShapeDtypeStruct((2**17,), jnp.int32))[0].shape == (1,)
    with pytest.raises(ValueError, match="at most 131072 numbers can be added up exactly at once, got 131073"):
        jax.eval_shape(owned, jax.ShapeDtypeStruct((2**17 + 1,), jnp.int32))
    rows = jax.ShapeDtypeStruct((2**26 + 1,), jnp.float32)  # in chunks there may be more
    for fixed_places in (True, False):
        total = jax.eval_shape(
            lambda x, fixed=fixed_places: clipped_sum(lambda row: row[0][0], (x,), 1.0, fixed_places=fixed), rows
        )
        assert total.hi.shape == ()


def test_what_is_not_in_fixed_places_is_added_row_by_row(monkeypatch):
    """Were a row taken out, all the others would move to other blocks, and be rounded with others."""
    monkeypatch.setattr(numpyro_dp.privacy.clipping, "_sum_by_blocks", lambda *args: pytest.fail("added up by blocks"))
    values = np.ones((10, 3), np.float32)
    vector_sum(values, 1.0)
    owners = OwnerIndex(np.zeros(10, np.int32), 2)
    clipped_sum(lambda row: row[0][0], (jnp.asarray(values),), 1.0, owners=owners, fixed_places=True)
    with pytest.raises(pytest.fail.Exception):
        by_blocks(values, 1.0)


def test_rows_whose_places_may_change_are_computed_among_as_many_others_wherever_they_are():
    """The last rows of an odd number may be computed by other instructions, with other last bits."""

    def chunks(n, **options):
        program = jax.make_jaxpr(lambda rows: clipped_sum(lambda row: row[0][0], (rows,), 1.0, **options))
        return {shape[0] for shape in shapes_in(program(jnp.zeros((n, 5))).jaxpr) if shape[1:] == (1, 5)} - {1}

    assert {n: chunks(n) for n in (0, 5, 64, 65, 1024, 5000)} == {n: {1024} for n in (0, 5, 64, 65, 1024, 5000)}
    assert chunks(5, fixed_places=True) == {5}
    assert chunks(5, width=2**15) == {256}


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("function", "width"),
    some_every_day(
        [("softmax", 8), ("softmax", 200), ("matrix", 8), ("gradient", 8)], [("softmax", 200), ("gradient", 8)]
    ),
)
def test_one_row_more_changes_no_bit_of_the_others(function, width):
    """Under add/remove the number of rows is private. Where the shape of a program followed from it, one row more than
    a power of two made the compiler compute all rows otherwise: each by a last bit, of which a function that jumps
    makes its whole bound. With a public matrix in the model, 64 or 1,024 rows moved at once."""
    rng = np.random.default_rng(0)
    matrix, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 4), 4))
    functions = {
        "softmax": lambda x: jax.nn.softmax(x @ matrix) @ b,
        "matrix": lambda x: jnp.tanh((x @ matrix) @ b),
        "gradient": lambda x: jax.grad(lambda c: (1 - jax.nn.softmax(x @ matrix) @ c) ** 2)(b)[0],
    }

    def last_bits(row):
        """What a number of about 1 has beyond its 12th bit, in units of the 13th: exact."""
        value = functions[function](row[0][0])
        return (value - jnp.round(value * 2**12) / 2**12) * 2**13

    total = jax.jit(lambda x: clipped_sum(last_bits, (x,), 1.0, width))
    values = jax.jit(lambda x: map_chunks(lambda row: functions[function](row[0][0]), (x,), chunk_rows(width)))
    for n in (64, 1024, 2048):
        X = rng.normal(size=(n + 1, 3)).astype(np.float32)
        more, fewer, alone = (steps(total(x)) for x in (X, X[:-1], X[-1:]))
        assert more - fewer == alone, n
        np.testing.assert_array_equal(np.asarray(values(X))[:-1], np.asarray(values(X[:-1])))


@pytest.mark.parametrize("per_row", [lambda row: jnp.ones((2, 2)), lambda row: jnp.ones((), jnp.complex64)])
def test_a_row_contributes_a_real_number_or_a_vector(per_row):
    with pytest.raises(ValueError, match="a row contributes a real number or a vector"):
        clipped_sum(per_row, (jnp.ones((5, 1)),), 1.0)


@pytest.mark.parametrize("per_row", [lambda row: jnp.ones(2), lambda row: jnp.ones((), jnp.int32)])
def test_a_moment_is_of_one_real_number(per_row):
    with pytest.raises(ValueError, match="a row contributes one real number"):
        clipped_moments(per_row, (jnp.ones((5, 1)),), 1.0)


def test_the_bound_of_a_penalized_sum_is_that_of_its_claim():
    """And no larger, which would be noise for nothing."""
    bound, weight, factor, size = 0.3, 2.0, 0.25, 50
    moments = clipped_moments(lambda row: row[0][0], (jnp.ones(size),), bound)
    claimed = weight * bound * (1 + weight * bound * factor * (1 - 1 / size))
    assert claimed <= float(penalized_sum(moments, weight, factor).bound) < 1.001 * claimed
