"""Sums of per-row quantities, each row clipped; the result knows its own sensitivity.

A sum is accumulated in integers. Each row's contribution is clipped, divided by the clip bound and rounded to a grid of
`GRID` steps; integers add up exactly, in any order and at any size, so that the sensitivity claimed is the sensitivity
that the floating-point program has (Mironov 2012 and Casacuberta et al. 2022 show how far apart the two can be).
Rounding moves a row by at most half a step, ``bound / 2**24``.

Rounding each entry of each row's vector takes longer than all the rest. Where neighbouring tables have all other rows
*in the same places*, vectors are therefore added up in floating point within fixed blocks of `SMALL_BLOCK` rows, and
the blocks' sums are rounded and added as integers. A changed row then changes one block. There B contributions of norm
at most R, added in any order, are off by at most ``B u / (1 - B u)`` times the sum of their norms, about ``B**2 u R``
(Higham 2002, section 4.2; u the unit roundoff): twice that is kept free, a 2000th of the bound.

**Formal guarantee.** For every parameter value, and for rows of any content (NaN, infinity, 1e30), replacing one row
changes a `ClippedSum` by at most ``2 * GRID`` steps in L2 norm, adding or removing one, or having it count as 0, by at
most ``GRID`` steps; one step is ``bound / GRID``.

=====================================  ====================================
a row whose                            contributes
=====================================  ====================================
scalar is NaN                          0
scalar is +-infinity                   +-bound
vector has a NaN or infinite entry     0
vector has a norm that overflows       0
vector is 0                            0
bound is 0 (no jump)                   0
=====================================  ====================================

Proof: docs/proofs/clipping.md.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax import lax

from numpyro_dp.privacy.isolation import alone, one_row
from numpyro_dp.privacy.mechanisms import bounds_per_row

GRID = 2**23
"""Steps per clip bound: float32 resolves no more."""

LIMB = 2**24  # a sum is hi * LIMB + lo with 0 <= lo < LIMB: exact in int32 for more than 1e9 rows
_CHUNK_ELEMENTS = 2**15  # rows are taken in chunks of about this many numbers, which bounds the memory
_FEWEST_CHUNK_ROWS = 2**8
_MOVING_CHUNK_ROWS = 2**10
"""At most so many, where neighbouring tables may have other numbers of rows: see `whole_chunks`."""
_BLOCK = 128  # rows whose steps add up in int32: 128 * 2**23 = 2**30
SMALL_BLOCK = 64  # rows whose vectors add up in floating point


class ClippedSum(NamedTuple):
    """A sum over rows on the integer grid; made by `clipped_sum` only.

    :ivar hi, lo: the sum in steps is ``hi * 2**24 + lo``; scalars, or vectors of the same length; with owners, one
        such sum for each of them, on a leading axis.
    :ivar bound: largest norm of one row's contribution, in real units.
    """

    hi: jax.Array
    lo: jax.Array
    bound: jax.Array


class UnclippedSum(NamedTuple):
    """A plain floating-point sum, for runs without privacy. No noise can be added to it."""

    value: jax.Array


def sensitivity_steps(neighboring_relation: str) -> int:
    """L2 sensitivity of every `ClippedSum`, in steps of the grid."""
    return bounds_per_row(neighboring_relation) * GRID


class OwnerIndex(NamedTuple):
    """Whose row each one is; public.

    :ivar of_row: owner number of each row.
    :ivar num_owners: how many owners there are.
    """

    of_row: np.ndarray | jax.Array
    num_owners: int


def clipped_sum(
    per_row: Callable[[tuple], jax.Array],
    rows: Sequence[jax.Array],
    bound: jax.Array | float,
    width: int = 1,
    size: jax.Array | None = None,
    owners: OwnerIndex | None = None,
    fixed_places: bool = False,
    may_loop: bool = False,
    present: jax.Array | None = None,
) -> ClippedSum | UnclippedSum:
    """Sum `per_row` over the rows, each contribution clipped to norm `bound`.

    :param per_row: from one-row slices of `rows` (leading axis 1) to a scalar or a vector.
    :param rows: arrays with the rows on the leading axis.
    :param bound: at least 0, in the units of `per_row`. The Python float ``inf`` gives an `UnclippedSum`.
    :param width: about how many numbers one row needs, which decides how many rows are taken at once.
    :param size: only the first so many rows count. Default: all of them. May be 0.
    :param owners: one sum for each owner, on a leading axis, instead of one in all.
    :param fixed_places: whether neighbouring tables have all rows but one in the same places, so that vectors may be
        added up by blocks.
    :param may_loop: see `numpyro_dp.privacy.isolation.alone`.
    :param present: which rows count, shape (n,). Default: all of them.
    :raises RowsMeetError: while it is traced, if rows could act on one another through `per_row`.
    """
    # Where a program holds the table as a constant, compilers look at it: a column in which all rows are alike becomes
    # a number, and then all rows are computed by other instructions than those of a neighbouring table are, with other
    # last bits. They do not look past a barrier.
    rows = lax.optimization_barrier(tuple(rows))
    num_rows = rows[0].shape[0]
    counted_rows = num_rows if size is None else size
    of_row = alone(per_row, one_row(rows), may_loop=may_loop)
    result = of_row.shapes
    if len(result.shape) > 1 or jnp.issubdtype(result.dtype, jnp.complexfloating):
        raise ValueError(f"a row contributes a real number or a vector, got shape {result.shape} of {result.dtype}")
    dtype = jnp.promote_types(result.dtype, jnp.float32)  # the grid is too fine for 16-bit floats
    clip: bool = not (isinstance(bound, float) and math.isinf(bound))
    by_blocks = fixed_places and clip and len(result.shape) == 1 and owners is None
    chunk = chunk_rows(width + sum(math.prod(row.shape[1:]) for row in rows))
    num_chunks: jax.Array | int
    if fixed_places:
        chunk = min(num_rows, chunk)
        num_chunks = -(-num_rows // chunk)
    else:
        rows, chunk, num_chunks = whole_chunks(rows, chunk)
        beyond = (0, rows[0].shape[0] - num_rows)
        num_rows = rows[0].shape[0]
        owners = None if owners is None else owners._replace(of_row=jnp.pad(jnp.asarray(owners.of_row), beyond))
        present = None if present is None else jnp.pad(present, beyond)

    def chunk_sum(start: jax.Array, counted: jax.Array) -> tuple:
        slices = tuple(lax.dynamic_slice_in_dim(row, start, chunk)[:, None] for row in rows)
        values = jax.vmap(of_row.of)(slices).astype(dtype)
        # The barrier is for safety first: were a row's value computed twice, for its norm and for the sum, the two
        # could differ by rounding, and the clip would be that of another vector. It is also faster.
        values = lax.optimization_barrier(values)
        position = start + jnp.arange(chunk)
        counted_here = (position >= counted) & (position < counted_rows)
        if present is not None:
            counted_here &= lax.dynamic_slice_in_dim(present, start, chunk)
        counts = _align(counted_here, values)
        if not clip:
            return (_sum_values(jnp.where(counts, values, 0), start),)
        if by_blocks:
            return _sum_by_blocks(values, bound, counted_here)
        steps = (scalar_steps if values.ndim == 1 else _vector_steps)(values, bound)
        return sum_steps(jnp.where(counts, steps, 0), _owners_of(start))

    def _owners_of(start: jax.Array) -> OwnerIndex | None:
        if owners is None:
            return None
        return OwnerIndex(lax.dynamic_slice_in_dim(jnp.asarray(owners.of_row), start, chunk), owners.num_owners)

    def _sum_values(values: jax.Array, start: jax.Array) -> jax.Array:
        whose = _owners_of(start)
        return jnp.sum(values, 0) if whose is None else jax.ops.segment_sum(values, whose.of_row, whose.num_owners)

    def add_chunk(k: jax.Array, total: tuple) -> tuple:
        counted = k * chunk
        # The last chunk starts early enough to be whole; its rows that are counted already are left out.
        part = chunk_sum(jnp.minimum(counted, num_rows - chunk), counted)
        if not clip:
            return (total[0] + part[0],)
        return add_sums(total, part)

    shape = result.shape if owners is None else (owners.num_owners, *result.shape)
    zero = jnp.zeros(shape, jnp.int32 if clip else dtype)
    total = lax.fori_loop(0, num_chunks, add_chunk, (zero,) if not clip else (zero, zero))
    if not clip:
        return UnclippedSum(total[0])
    return ClippedSum(total[0], total[1], jnp.asarray(bound, dtype))


class ClippedMoments(NamedTuple):
    """Exact integer moments of the clipped scalars of one batch of fixed size; private, see `penalized_sum`.

    :ivar first, second: sum of the rows' values in steps of ``bound / 2**15``, and of their squares; as floats.
    :ivar size: rows in the batch.
    :ivar bound: largest absolute value of one row, in real units.
    """

    first: jax.Array
    second: jax.Array
    size: int
    bound: jax.Array


def clipped_moments(
    per_row: Callable[[tuple], jax.Array], rows: Sequence[jax.Array], bound: jax.Array | float
) -> ClippedMoments:
    """Moments of the scalar `per_row` over `rows`, each value clipped to +-`bound` and rounded to 2**-15 of it."""
    rows = lax.optimization_barrier(tuple(rows))  # see `clipped_sum`
    size = rows[0].shape[0]
    of_row = alone(per_row, one_row(rows))
    if of_row.shapes.shape != () or not jnp.issubdtype(of_row.shapes.dtype, jnp.floating):
        raise ValueError(f"a row contributes one real number, got shape {of_row.shapes.shape} of {of_row.shapes.dtype}")
    values = jax.vmap(of_row.of)(tuple(row[:, None] for row in rows))
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    steps = (scalar_steps(lax.optimization_barrier(values.astype(dtype)), bound) + 2**7) >> 8  # rounded

    def exact_sum(terms: jax.Array) -> jax.Array:
        hi, lo = sum_steps(terms)
        return hi.astype(dtype) * LIMB + lo.astype(dtype)

    # A square has 30 bits: its two halves are summed apart, so that no partial sum leaves 32 bits.
    squares = steps * steps
    second = exact_sum(squares >> 15) * 2**15 + exact_sum(squares & (2**15 - 1))
    return ClippedMoments(exact_sum(steps), second, size, jnp.asarray(bound, dtype))


def penalized_sum(moments: ClippedMoments, weight: float, factor: float) -> ClippedSum:
    """``weight * sum_i r_i - v / 2`` with ``v = weight**2 * factor * sum_i (r_i - mean)**2``, as one clipped sum.

    **Formal guarantee.** Replacing one row of the batch moves it by at most ``2 w c + 2 w^2 c^2 (1 - 1/b) factor`` for
    rows within +-c (tight: all other rows at c, one that moves from -c to c), which is the sensitivity ``2 * bound`` of
    the result. Rounding is allowed for.
    """
    size = moments.size
    spread = moments.second - moments.first * (moments.first / size)
    # In units of the weighted bound, of which the square could be beyond the range of floats.
    unit = weight * moments.bound
    value = moments.first / 2.0**15 - unit * factor * (spread / 2.0**31)
    largest = 1 + unit * factor * (1 - 1 / size)
    # The integers are exact; of the float operations on them, each is off by at most eps times the largest value, which
    # is below `size` times `largest`.
    room = 1 + 8 * size * float(jnp.finfo(value.dtype).eps) + 1e-6
    bound = unit * largest * room
    usable = (bound > 0) & jnp.isfinite(bound)
    steps = jnp.where(usable, jnp.round(value * (GRID / (largest * room))), 0)
    hi = jnp.floor(steps / LIMB)
    return ClippedSum(hi.astype(jnp.int32), (steps - hi * LIMB).astype(jnp.int32), bound)


def chunk_rows(width: int) -> int:
    """Rows to take at once when one row needs `width` numbers: a power of two, which bounds the memory of a pass."""
    return max(2 ** round(math.log2(_CHUNK_ELEMENTS / max(width, 1))), _FEWEST_CHUNK_ROWS)


def whole_chunks(rows: Sequence[jax.Array], chunk: int) -> tuple[tuple[jax.Array, ...], int, jax.Array]:
    """The rows with zeros behind them, how many of them to take at once, and how often: for tables of any length.

    Where neighbouring tables may have other numbers of rows, or rows in other places, each row's value must be the same
    in the last bit whatever that number is: a function that jumps (the gradient of a Laplace density, whether a norm
    exceeds a bound) would make much of it, and all rows can have been put there. Compilers compute by other
    instructions what has another shape, the last few of an odd number, and what a loop does once only. So a chunk is a
    power of two that does not depend on the number of rows, there are two at least, the last one has room, and
    compilers see the number of chunks as a variable: the program of a chunk is the same for all tables.
    """
    num_rows = rows[0].shape[0]
    chunk = min(chunk, _MOVING_CHUNK_ROWS)
    num_chunks = max(num_rows // chunk + 1, 2)
    missing = num_chunks * chunk - num_rows
    padded = tuple(jnp.pad(row, [(0, missing)] + [(0, 0)] * (row.ndim - 1)) for row in rows)
    return padded, chunk, lax.optimization_barrier(jnp.asarray(num_chunks, jnp.int32))


def map_chunks(function: Callable[[tuple], jax.Array], rows: Sequence[jax.Array], chunk: int) -> jax.Array:
    """``vmap(function)(rows)``, with each row's value as `whole_chunks` has it.

    :param function: of one-row slices (leading axis 1).
    """
    num_rows = rows[0].shape[0]
    rows, chunk, num_chunks = whole_chunks(lax.optimization_barrier(tuple(rows)), chunk)
    result = jax.eval_shape(function, one_row(rows))

    def add_chunk(k: jax.Array, values: jax.Array) -> jax.Array:
        slices = tuple(lax.dynamic_slice_in_dim(row, k * chunk, chunk)[:, None] for row in rows)
        found = lax.optimization_barrier(jax.vmap(function)(slices))
        return lax.dynamic_update_slice_in_dim(values, found, k * chunk, 0)

    values = jnp.zeros((rows[0].shape[0], *result.shape), result.dtype)
    return lax.fori_loop(0, num_chunks, add_chunk, values)[:num_rows]


def _align(mask: jax.Array, values: jax.Array) -> jax.Array:
    return mask.reshape(mask.shape + (1,) * (values.ndim - 1))


def scalar_steps(values: jax.Array, bound: jax.Array | float) -> jax.Array:
    """Clip to [-bound, bound], in steps; one row each."""
    steps = values * (GRID / bound)
    steps = jnp.where(jnp.isnan(steps), 0, jnp.clip(steps, -GRID, GRID))
    return jnp.round(steps).astype(jnp.int32)


def _vector_steps(values: jax.Array, bound: jax.Array | float) -> jax.Array:
    """Clip the L2 norm of each row of `values` to `bound`, in steps."""
    scaled = values / bound
    norm_squared = jnp.sum(scaled * scaled, -1, keepdims=True)
    factor = jnp.minimum(GRID, _radius(values.shape[-1], 0.0) * lax.rsqrt(norm_squared))
    # A norm that is not finite, or a factor that underflows against a huge row, would leave 0 * inf = NaN.
    usable = jnp.isfinite(norm_squared)
    return jnp.round(jnp.where(usable, scaled * factor, 0)).astype(jnp.int32)


def _sum_by_blocks(values: jax.Array, bound: jax.Array | float, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum over rows in fixed places, of which only the sums of blocks of rows are rounded.

    :param counts: which rows count.
    """
    size, dimension = values.shape
    per_bound = 1 / jnp.asarray(bound, values.dtype)
    norm_squared = jnp.sum((values * per_bound) ** 2, -1)
    radius = radius_by_blocks(dimension, SMALL_BLOCK)
    weights = jnp.minimum(GRID, radius * lax.rsqrt(norm_squared)) * per_bound
    weights = jnp.where(counts & jnp.isfinite(norm_squared) & jnp.isfinite(weights), weights, 0)
    blocks = -(-size // SMALL_BLOCK)
    missing = blocks * SMALL_BLOCK - size
    weights = jnp.pad(weights, (0, missing)).reshape(blocks, 1, SMALL_BLOCK)
    finite = jnp.where(jnp.isfinite(values), values, 0)  # 0 times what is not would be NaN
    vectors = jnp.pad(finite, ((0, missing), (0, 0))).reshape(blocks, SMALL_BLOCK, dimension)
    sums = jnp.matmul(weights, vectors, precision=lax.Precision.HIGHEST)[:, 0]
    return sum_in_limbs(jnp.round(sums).astype(jnp.int32))  # at most 2**29


def radius_by_blocks(dimension: int, block: int) -> float:
    """`_radius` for vectors that are added up by blocks of so many rows."""
    return _radius(dimension, block**2 * float(np.finfo(np.float32).eps))


def _radius(dimension: int, room: float) -> float:
    """The norm, in steps, to which vectors are clipped so that what becomes of them is at most `GRID`.

    It leaves room for rounding to the grid (half a step per entry) and for the floating-point error of the norm,
    whatever the compiler does.

    :param room: relative, for further errors.
    """
    slack = 4 * (dimension + 16) * float(np.finfo(np.float32).eps) + room
    radius = (GRID - math.sqrt(dimension) / 2) * (1 - slack) - 1
    if radius <= 0:
        raise ValueError(f"cannot clip vectors of {dimension} entries on a grid of {GRID} steps")
    return radius


def sum_steps(steps: jax.Array, owners: OwnerIndex | None = None) -> tuple[jax.Array, jax.Array]:
    """Exact sum over the leading axis, of at most `GRID` steps each, in int32 throughout.

    :raises ValueError: if there are more than 2**26 rows; with owners, more than 2**17.
    """
    if owners is not None:
        _require_at_most(2**17, steps)
        high = jax.ops.segment_sum(steps >> 12, owners.of_row, owners.num_owners)
        return normalize(high, jax.ops.segment_sum(steps & 4095, owners.of_row, owners.num_owners))
    blocks = -(-steps.shape[0] // _BLOCK)
    padding = [(0, blocks * _BLOCK - steps.shape[0])] + [(0, 0)] * (steps.ndim - 1)
    in_blocks = jnp.sum(jnp.pad(steps, padding).reshape(blocks, _BLOCK, *steps.shape[1:]), 1, jnp.int32)
    return sum_in_limbs(in_blocks)


def sum_in_limbs(steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exact sum over the leading axis of integers, as ``hi * 2**24 + lo``.

    :raises ValueError: if there are more than 2**19.
    """
    _require_at_most(2**19, steps)
    high, middle, low = (jnp.sum(limb, 0, jnp.int32) for limb in (steps >> 22, (steps >> 11) & 2047, steps & 2047))
    middle = middle + (low >> 11)
    high = high + (middle >> 11)
    return high >> 2, ((high & 3) << 22) + ((middle & 2047) << 11) + (low & 2047)


def _require_at_most(most: int, steps: jax.Array) -> None:
    """More would overflow an int32, and the sum be another one."""
    if steps.shape[0] > most:
        raise ValueError(f"at most {most} numbers can be added up exactly at once, got {steps.shape[0]}")


def add_sums(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Of two sums in the form ``hi * 2**24 + lo``."""
    lo = one[1] + other[1]
    return one[0] + other[0] + (lo >> 24), lo & (LIMB - 1)


def normalize(high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``high * 2**12 + low`` as ``hi * 2**24 + lo``."""
    lo = ((high & 4095) << 12) + (low & (LIMB - 1))
    return (high >> 12) + (low >> 24) + (lo >> 24), lo & (LIMB - 1)


# -- Compilers that cannot add -----------------------------------------------------------------------------------------

_WRONG_SUMS = ("0.10.2",)


class BrokenCompilerError(RuntimeError):
    """This jaxlib returns wrong sums, so neither a sensitivity nor a posterior computed with it holds."""


def require_correct_sums() -> None:
    """Refuse to go on with a jaxlib known, or seen here, to add wrongly (jax-ml/jax issue 39103).

    :raises BrokenCompilerError: for jaxlib 0.10.2, or if a known sum comes out wrong.
    """
    version = jaxlib.__version__
    if version in _WRONG_SUMS:
        raise BrokenCompilerError(
            f"jaxlib {version} returns wrong sums under jit on CPUs, silently. Install another version: "
            "`pip install 'jax!=0.10.2' 'jaxlib!=0.10.2'` (0.10.1 or older on Python 3.11, 0.11 or newer above)"
        )
    if not _known_sums_are_right(jax.default_backend(), jax.config.jax_enable_x64):
        raise BrokenCompilerError(
            f"jaxlib {version} fails a known-answer test of summation on {jax.default_backend()}: leave out what "
            "compilers are told otherwise (`XLA_FLAGS`), or install another version"
        )


@functools.cache
def _known_sums_are_right(backend: str, x64: bool) -> bool:
    """A vmapped matrix-vector product followed by a reduction, the pattern that jaxlib 0.10.2 gets wrong; and rows that
    are no number, which must count for nothing: compilers can be told that there are none."""
    x = np.arange(64 * 3).reshape(64, 3) % 7 - 3.0
    y = np.arange(64) % 5 - 2.0
    z = np.arange(4 * 3).reshape(4, 3) % 3 - 1.0
    expected = ((z @ x.T) * y).sum(1)  # small integers: exact in any precision
    with jax.ensure_compile_time_eval():
        x_, y_, z_ = (jnp.asarray(v) for v in (x, y, z))
        found = jax.jit(jax.vmap(lambda z: jnp.sum(y_ * (x_ @ z))))(z_)
        many = np.concatenate([np.tile(x[:, 0], 301), [np.nan, np.inf, -np.inf]])
        scalars = jax.jit(lambda v: clipped_sum(lambda row: row[0][0], (v,), 3.0))
        vectors = jax.jit(lambda v: clipped_sum(lambda row: row[0], (v,), 3.0, fixed_places=True))
        totals = [scalars(jnp.asarray(many)), vectors(jnp.asarray(many))]
    by_row, by_blocks = (int((np.asarray(t.hi).astype(np.int64) * LIMB + np.asarray(t.lo)).sum()) for t in totals)
    expected_steps = 301 * sum(round(v * GRID / 3.0) for v in x[:, 0])
    # Each row is rounded; of blocks the sums are, which adds up to less than half of what a row may add.
    are_right = abs(by_row - expected_steps) <= 64 * 301 and abs(by_blocks - expected_steps) < GRID // 2
    return bool(np.array_equal(found, expected)) and are_right
