"""Clipped sums over rows of gradients and log ratios, in few passes over the data.

What `numpyro_dp.privacy.clipping.clipped_sum` does for any function of a row, for those two and with a `RowStructure`
that somebody tells: no row's gradient is formed where its norm is known without. Only for tables of which neighbours
have all other rows *in the same places*.

A structure is a hint. Whether it is that of the model does not matter here: a row's vector is what the parts make it,
and it is that vector whose norm is computed and which is added up. What the norm rests on is checked: that parts share
no coordinate, that a row's members are coordinates of their part and differ, and that rows are kept apart.

The sum over a row's parts is the row's vector, because parts share no coordinate; its squared norm is the sum of the
parts' squared norms, ``|w|^2 |x|^2`` for a product with x, of which nothing cancels. With the factor that clips the
norm, the gradient of each part is summed in floating point within fixed blocks of rows, whose sums are rounded and
added as integers; members, which rows choose, are rounded row by row. See `numpyro_dp.privacy.clipping` for what is
rounded, what room is left for it, and the guarantee, which is the same.

One more kind of row contributes 0: one with numbers x that are not finite or whose norm overflows. A block is of 256
rows, for which 0.8% of the bound is kept free.

Proof: docs/proofs/structured.md.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from numpyro_dp.privacy import clipping
from numpyro_dp.privacy.clipping import GRID, ClippedSum, add_sums, normalize, sum_in_limbs, sum_steps
from numpyro_dp.privacy.isolation import alone
from numpyro_dp.privacy.sharding import Layout
from numpyro_dp.privacy.vmap import vmap_last

_BLOCK = 256  # rows that add up in floating point
_WHOLE = 2**25  # numbers that a pass may take at once; more rows are taken in chunks
_CHUNK = 2**20  # numbers in a chunk
_CHUNK_ROWS = (2**8, 2**17)
_MEMBER_ROWS = 2**18  # whose rounded steps add up in two limbs of int32
_SMALLEST_NORM = 1e-15  # of the numbers x of a row: squares of smaller ones would underflow


Row = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """One way in which some coordinates of z enter a row's density.

    :ivar kind: "direct", "dot" or "member".
    :ivar coordinates: of z. Direct: in the shape of the value; dot: shape (d, k), for k products with d numbers;
        member: all that may be chosen.
    :ivar shape: of the value that a row sees.
    """

    kind: str
    coordinates: np.ndarray
    shape: tuple[int, ...]
    precision: Any = None

    def value(self, z: jax.Array, coefficient: jax.Array | None) -> jax.Array:
        """Values at z for rows with some coefficients (see `RowStructure.coefficients`), rows last; direct: of all."""
        if self.kind == "direct":
            return z[self.coordinates]
        assert coefficient is not None
        if self.kind == "member":
            return z[coefficient]
        if coefficient.ndim == 2:
            products = jnp.matmul(coefficient, z[self.coordinates], precision=self.precision).T
        else:
            z = jnp.broadcast_to(z[self.coordinates].T, (coefficient.shape[0], *self.coordinates.shape[::-1]))
            products = jnp.moveaxis(jnp.matmul(z, coefficient, precision=self.precision), 0, 1)
        return products.reshape(*self.shape, -1)


@dataclasses.dataclass(frozen=True, eq=False)
class RowStructure:
    """A row's log density as a function of the values of its parts. Holds no row.

    :ivar coefficients: from one-row slices to what each part needs of them: x, shape (d,), for a dot; the coordinates
        of the chosen members, in the shape of the value; None for a direct part.
    :ivar rest: from the parts' values and one-row slices to the log density.
    :ivar width: how many numbers the largest array has that is computed on the way, for one row.
    """

    parts: tuple[Part, ...]
    width: int
    coefficients: Callable[[Row], tuple[jax.Array | None, ...]]
    rest: Callable[[Sequence[jax.Array], Row], jax.Array]


class Table(NamedTuple):
    """The rows as passes over them need them: rows on the last axis, zeros behind them that fill the last block.

    Rows come last because a row has few numbers: compilers vectorise along the last axis.

    :ivar rows: the private arrays, each with a leading axis of length 1: a row's slice.
    :ivar counts: which rows count.
    :ivar coefficients: of each part; numbers x that are not finite are replaced.
    :ivar norms: of each part: of a row's x, infinite where there was such a number; None for other parts.
    """

    rows: Row
    counts: jax.Array
    coefficients: tuple[jax.Array | None, ...]
    norms: tuple[jax.Array | None, ...]


class StructuredRows:
    """Clipped sums over the rows of a table of a log density's gradient and of its change.

    :param structure: a hint, see `numpyro_dp.fast.row_structure.find_structure`.
    :param rows: the private arrays.
    :param size: of z.
    :param once: what makes JAX compute at once where it can.
    :param layout: of the rows, if they lie on several devices.
    :raises ValueError: if parts share coordinates.
    """

    def __init__(self, structure: RowStructure, rows: Row, size: int, once: Callable, layout: Layout | None = None):
        # Of our own class and arrays: what was checked is what is used.
        parts = tuple(
            Part(_plain_kind(p.kind), np.array(p.coordinates), tuple(map(int, p.shape)), p.precision)
            for p in structure.parts
        )
        _require_apart(parts, size)
        self.size, self._num_arrays, self._layout = size, len(rows), layout
        self.structure = RowStructure(parts, structure.width, structure.coefficients, structure.rest)
        num_rows, width = rows[0].shape[0] // (layout.num_shards if layout else 1), self._numbers_per_row()
        self._data: Table | Row = rows
        if num_rows * width <= _WHOLE:
            with once():
                tabulate = functools.partial(_tabulate, self.structure, in_blocks=True)
                self._data = layout.map(tabulate, rows) if layout else tabulate(rows)
        self._chunk = _chunk_rows(width)

    def _numbers_per_row(self) -> int:
        of_parts = (
            p.coordinates.shape[0] + 2 * p.coordinates.shape[1] if p.kind == "dot" else 2 * math.prod(p.shape)
            for p in self.structure.parts
        )
        return self.structure.width + sum(of_parts)

    def gradient(self, z: jax.Array, bound: jax.Array | float) -> ClippedSum:
        """The sum of the rows' gradients at z, each clipped to norm `bound`; 0 for one that is not in [1e-18, 1e18]."""
        bound = jnp.asarray(bound, z.dtype)
        return self._sum(lambda table: self._gradient(table, z, bound), bound)

    def log_ratio(self, z: jax.Array, z_new: jax.Array, bound: jax.Array | float) -> ClippedSum:
        """The sum of the rows' changes of the log density from z to z_new, each clipped to +-`bound`."""
        bound = jnp.asarray(bound, z.dtype)
        return self._sum(lambda table: self._log_ratio(table, z, z_new, bound), bound)

    def _sum(self, of_table: Callable[[Table], tuple], bound: jax.Array) -> ClippedSum:
        def of_rows(data: Table | Row) -> ClippedSum:
            data = lax.optimization_barrier(data)  # see `clipped_sum`
            hi, lo = of_table(data) if isinstance(data, Table) else self._over_chunks(of_table, data)
            return ClippedSum(hi, lo, bound)

        return self._layout.sum(of_rows, self._data) if self._layout else of_rows(self._data)

    def _over_chunks(self, of_table: Callable[[Table], tuple], rows: Row) -> tuple[jax.Array, jax.Array]:
        num_rows = rows[0].shape[0]
        chunk = min(self._chunk, num_rows)

        def of_chunk(start: jax.Array, counted: jax.Array) -> tuple[jax.Array, jax.Array]:
            part = tuple(lax.dynamic_slice_in_dim(row, start, chunk) for row in rows)
            table = _tabulate(self.structure, part, in_blocks=False)
            is_new = start + jnp.arange(table.counts.shape[0]) >= counted
            return of_table(table._replace(counts=table.counts & is_new))

        def add_chunk(k: jax.Array, total: tuple) -> tuple:
            # The last chunk starts early enough to be whole; its rows that are counted already are left out.
            return add_sums(total, of_chunk(jnp.minimum(k * chunk, num_rows - chunk), k * chunk))

        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(of_chunk, 0, 0))
        return lax.fori_loop(0, -(-num_rows // chunk), add_chunk, zero)

    # -- One chunk ---------------------------------------------------------------------------------------------------

    def _gradient(self, table: Table, z: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = self.structure.parts
        values = tuple(part.value(z, x) for part, x in zip(parts, table.coefficients, strict=True))
        # For speed: else XLA reads a product that it has transposed number by number, for each chain.
        values = lax.optimization_barrier(values)
        slopes = self._of_each_row(jax.grad(self.structure.rest))(values, table.rows)
        # The barrier is for safety first, see `clipped_sum`: norm and sum must be those of the same numbers.
        slopes = lax.optimization_barrier(slopes)
        slopes = tuple(w.reshape(-1, w.shape[-1]) for w in slopes)
        per_bound = 1 / bound
        norms = (per_bound if norm is None else norm * per_bound for norm in table.norms)
        squares = (jnp.sum((w * norm) ** 2, 0) for w, norm in zip(slopes, norms, strict=True))
        norm_squared = sum(squares, start=jnp.zeros(table.counts.shape, z.dtype))
        factor = jnp.minimum(GRID, clipping.radius_by_blocks(self.size, _BLOCK) * lax.rsqrt(norm_squared)) * per_bound
        # Outside of that range one of two products underflows that must not, the norm's or the sum's.
        usable = table.counts & jnp.isfinite(norm_squared) & jnp.isfinite(factor) & (bound > 1e-18) & (bound < 1e18)
        factor = jnp.where(usable, factor, 0)
        total = jnp.zeros(self.size, jnp.int32), jnp.zeros(self.size, jnp.int32)
        for part, w, x in zip(parts, slopes, table.coefficients, strict=True):
            if not part.coordinates.size:
                continue
            # For speed: else XLA computes this while it transposes it for the product, one number at a time.
            clipped = lax.optimization_barrier(jnp.where(usable, w, 0) * factor)
            hi, lo = _sum_of_part(part, clipped, x, self.size)
            total = total[0] + hi, total[1] + lo
        return total

    def _log_ratio(self, table: Table, z: jax.Array, z_new: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
        parts = self.structure.parts

        def densities(z: jax.Array) -> jax.Array:
            values = tuple(part.value(z, x) for part, x in zip(parts, table.coefficients, strict=True))
            return self._of_each_row(self.structure.rest)(values, table.rows)

        change = lax.optimization_barrier(densities(z_new) - densities(z))
        if change.ndim != 1:
            raise ValueError(f"a row's log density is one number, got shape {change.shape[:-1]}")
        usable = table.counts
        for norm in table.norms:
            usable = usable if norm is None else usable & jnp.isfinite(norm)
        return sum_steps(jnp.where(usable, clipping.scalar_steps(change, bound), 0))

    def _of_each_row(self, function: Callable) -> Callable:
        parts = self.structure.parts
        mapped = vmap_last(
            lambda *args: function(args[: len(parts)], args[len(parts) :]),
            [part.kind == "direct" for part in parts] + [False] * self._num_arrays,
        )
        return lambda values, rows: mapped(*values, *rows)


def _sum_of_part(part: Part, slopes: jax.Array, x: jax.Array | None, size: int) -> tuple[jax.Array, jax.Array]:
    """Sum over rows of the gradient with respect to z that one part gives, in steps.

    :param slopes: shape (values of the part, rows): each row's gradient with respect to these, clipped, in steps.
    """
    if part.kind == "member":
        assert x is not None
        return _sum_of_members(slopes, x.reshape(slopes.shape), size)
    slopes = slopes.reshape(slopes.shape[0], -1, _BLOCK)
    if part.kind == "direct":
        sums = jnp.sum(slopes.reshape(slopes.shape[0], _BLOCK, -1), 1).T
    else:
        assert x is not None
        x = x if x.ndim == 3 else x.reshape(-1, _BLOCK, x.shape[-1]).mT
        sums = jnp.matmul(x, jnp.moveaxis(slopes, 0, -1), precision=lax.Precision.HIGHEST)
    places = part.coordinates.ravel()
    hi, lo = sum_in_limbs(jnp.round(sums).astype(jnp.int32).reshape(sums.shape[0], -1))
    zero = jnp.zeros(size, jnp.int32)
    return zero.at[places].set(hi), zero.at[places].set(lo)


def _sum_of_members(steps: jax.Array, members: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Sum of what rows give to the members that they choose; each row's steps are rounded."""
    rounded = jnp.round(steps).astype(jnp.int32)
    limbs = jnp.stack([rounded >> 12, rounded & 4095], -1)
    zero = jnp.zeros((size, 2), jnp.int32)
    total = jnp.zeros(size, jnp.int32), jnp.zeros(size, jnp.int32)
    for start in range(0, steps.shape[-1], _MEMBER_ROWS):
        chunk = slice(start, start + _MEMBER_ROWS)
        high, low = zero.at[members[:, chunk]].add(limbs[:, chunk], mode="drop").T
        total = add_sums(total, normalize(high, low))
    return total


def _tabulate(structure: RowStructure, rows: Row, in_blocks: bool) -> Table:
    num_rows = rows[0].shape[0]
    missing = -num_rows % _BLOCK
    rows = tuple(jnp.pad(jnp.moveaxis(row, 0, -1), [(0, 0)] * (row.ndim - 1) + [(0, missing)])[None] for row in rows)
    counts = jnp.arange(num_rows + missing) < num_rows
    axes = tuple(0 if part.kind == "dot" else -1 for part in structure.parts)
    # The barrier is for safety: norms and sums must be those of the same numbers.
    of_row = alone(structure.coefficients, tuple(jax.ShapeDtypeStruct(row.shape[:-1], row.dtype) for row in rows))
    found = lax.optimization_barrier(jax.vmap(of_row.of, in_axes=-1, out_axes=axes)(rows))
    found = tuple(_as_told(part, x) for part, x in zip(structure.parts, found, strict=True))
    for part, x in zip(structure.parts, found, strict=True):
        if part.kind == "member":
            assert x is not None
            counts = counts & _chooses_well(part, x)
    numbers = [_without_infinities(part, x, in_blocks) for part, x in zip(structure.parts, found, strict=True)]
    return Table(rows, counts, tuple(x for x, _ in numbers), tuple(norm for _, norm in numbers))


def _plain_kind(kind: str) -> str:
    """Our own text, which is equal to the same ones each time it is compared."""
    for known in ("direct", "dot", "member"):
        if known == kind:
            return known
    raise ValueError("the parts of a row's structure must be of known kinds and share no coordinate")


def _require_apart(parts: Sequence[Part], size: int) -> None:
    """Refuse parts whose vectors could add up in one coordinate: the norm of the sum would not be that of the parts."""
    places = np.concatenate([np.ravel(part.coordinates) for part in parts]) if parts else np.zeros(0, int)
    if np.unique(places).size != places.size or (places < 0).any() or (places >= size).any():
        raise ValueError("the parts of a row's structure must be of known kinds and share no coordinate")


def _as_told(part: Part, x: Any) -> jax.Array | None:
    """The coefficients of a part, of the shape and kind by which norms are computed.

    :raises ValueError: if they are others.
    """
    if part.kind == "direct":
        return None
    if part.kind == "member":
        if x is not None and x.shape[:-1] == part.shape and jnp.issubdtype(x.dtype, jnp.integer):
            return x
    elif x is not None and x.shape[1:] == part.coordinates.shape[:1] and jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))  # the square of a smaller kind would underflow
    raise ValueError(f"a {part.kind} part needs other numbers of a row")


def _chooses_well(part: Part, members: jax.Array) -> jax.Array:
    """For each row, whether the members that it chooses are coordinates of the part, and no two are the same.

    :param members: rows on the last axis.
    """
    chosen = members.reshape(-1, members.shape[-1])
    allowed = np.zeros(int(part.coordinates.max()) + 1, bool)
    allowed[np.ravel(part.coordinates)] = True
    is_known = ((chosen >= 0) & (chosen < len(allowed)) & jnp.asarray(allowed)[chosen]).all(0)
    if len(chosen) == 1:
        return is_known
    in_order = jnp.sort(chosen, 0)
    return is_known & (in_order[1:] != in_order[:-1]).all(0)


def _without_infinities(part: Part, x: jax.Array | None, in_blocks: bool) -> tuple[jax.Array | None, jax.Array | None]:
    if part.kind != "dot":
        return x, None
    assert x is not None
    norm = jnp.sqrt(jnp.matmul(x * x, jnp.ones(x.shape[-1], x.dtype), precision=lax.Precision.HIGHEST))
    norm = jnp.maximum(norm, _SMALLEST_NORM)
    x = x.reshape(-1, _BLOCK, x.shape[-1]).mT if in_blocks else x
    return jnp.where(jnp.isfinite(x), x, 0), jnp.where(jnp.isfinite(norm), norm, jnp.inf)


def _chunk_rows(width: int) -> int:
    rows = 2 ** round(math.log2(_CHUNK / width))
    return min(max(rows, _CHUNK_ROWS[0]), _CHUNK_ROWS[1])
