"""Passes over a table that is not in memory: blocks of rows are read, clipped and added up, anywhere.

A sum of clipped rows is a sum of whole numbers (`numpyro_dp.privacy.clipping`), so it may be added up in any order, by
any number of threads, processes or machines, and is the same to the last bit. One pass over a table is

1. a `Task`: a compiled program that clips and adds up a block of rows, the numbers that it is given, and which columns
   it reads. It can be sent to wherever the rows are;
2. *pieces* of the table, each read once, by whoever runs the task on them;
3. their totals, which come back here and are added up. What comes back more than once, or not at all, is an error: a
   row that counted twice would count for more than its sensitivity.

Noise is drawn and added by the vault, as of any other sum. The exact totals of pieces travel to it: whoever runs the
pieces is trusted with the rows, and so is the way between.

Rows lie in blocks by their numbers in the table, wherever pieces begin and end. A row's value is computed in the same
place of the same program, whatever rows surround it.

Proof: docs/proofs/passes.md.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.interpreters import mlir

from numpyro_dp.privacy.isolation import jaxprs_in
from numpyro_dp.privacy.vmap import aval, bind

BLOCK_ROWS, BLOCK_UNITS = 2**14, 2**12
"""Rows, or units of several rows, that a program is for; more would be wasted where a piece ends in a block."""
MOST_ROWS = 2**31 - 1
"""Rows have numbers of 32 bits, and the sum of as many fits into two limbs."""
_LIMB_BITS = 24


class Piece(Protocol):
    """Some consecutive rows of a table, which may be far away."""

    @property
    def first(self) -> int:
        """Number of its first row in the table."""

    @property
    def num_rows(self) -> int:
        """How many there are."""

    def read(self, columns: Sequence[Any]) -> Iterator[tuple[tuple[np.ndarray, ...], np.ndarray]]:
        """The rows in order, some at a time: an array for each column, and which of the rows count at all."""


class Part(NamedTuple):
    """What the task found in a piece; exact, and so private.

    :ivar totals: int64 arrays.
    """

    first: int
    num_rows: int
    totals: tuple[np.ndarray, ...]

    def __repr__(self) -> str:  # engines write what they print into logs
        return f"Part({self.first}, {self.num_rows})"


class StreamedTable(ABC):
    """A table that is read in pieces; see `numpyro_dp.scan`.

    :ivar progress_bar: whether a pass shows how far it is.
    :ivar block_rows: how many rows a program is for.
    """

    block_rows: int = BLOCK_ROWS

    progress_bar: bool = False

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def run(self, task: "Task") -> Iterable[Part]:
        """The task's result on each of the pieces, in any order."""

    def unit(self, name: str) -> "StreamedColumn":
        """The column of this name, as one that says whose each row is."""
        raise NotImplementedError

    def by_unit(self, unit: "StreamedColumn", most_rows: int | None) -> "StreamedUnits":
        """The table with units in the place of rows.

        :param unit: says whose each row is.
        :param most_rows: of a unit, that count; None for as many as it has.
        """
        raise NotImplementedError


class StreamedUnits(StreamedTable):
    """A table of units that is read in pieces.

    :ivar most_rows: that a unit has a place for.
    :ivar num_table_rows: rows of all units.
    :ivar identity: a name for which rows belong together.
    """

    block_rows = BLOCK_UNITS
    most_rows: int
    num_table_rows: int
    identity: str

    @abstractmethod
    def of_units(self, column: "StreamedColumn") -> "StreamedColumn":
        """A column of rows with an axis of units, and behind it one of a unit's rows."""

    @property
    @abstractmethod
    def present(self) -> "StreamedColumn":
        """Which of the places are rows."""


class StreamedColumn:
    """An argument of a model that is read in pieces, a row on each place of its leading axis.

    :ivar table: that it belongs to.
    :ivar shape, dtype: as of an array.
    :ivar spec: what a piece is asked to read for it, which can be sent; None for the rows' numbers.
    """

    def __init__(self, table: StreamedTable, row_shape: tuple[int, ...], dtype: Any, spec: Any = None):
        self.table, self.dtype, self.spec = table, np.dtype(dtype), spec
        self.shape = (table.num_rows, *row_shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "a column of a scan is no array: only a model's private arguments (`private_args=`) can be columns"
        )


class RowNumbers(StreamedColumn):
    """Each row's number in the table, from 0."""

    def __init__(self, table: StreamedTable):
        super().__init__(table, (), np.int32)


def table_of(rows: Sequence[Any]) -> StreamedTable | None:
    """The table that all of these columns are read from; None for arrays.

    :raises ValueError: if some are arrays, or of another table.
    """
    tables = {id(row.table): row.table for row in rows if isinstance(row, StreamedColumn)}
    if not tables:
        return None
    if len(tables) > 1 or not all(isinstance(row, StreamedColumn) for row in rows):
        raise ValueError(
            "all private arguments must be columns of one and the same `numpyro_dp.scan`, got "
            f"{sum(not isinstance(row, StreamedColumn) for row in rows)} array(s) and columns of {len(tables)} scan(s)"
        )
    return next(iter(tables.values()))


# -- What is sent ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Task:
    """What to do with a piece: ``task(piece)`` gives its `Part`. Holds no rows, and can be pickled.

    :ivar program: takes ``(*rows of a block, which of them count, *given)`` and gives pairs of limbs; as `jax.export`
        writes it.
    :ivar given: numbers that the program is given, all of them public or released.
    :ivar columns: what a piece is asked to read, for each array of the program; None for the rows' numbers.
    :ivar block_rows: how many rows it is for.
    :ivar in_double_precision: whether 64-bit numbers are on.
    """

    program: bytes
    given: tuple[np.ndarray, ...]
    columns: tuple[Any, ...]
    block_rows: int
    in_double_precision: bool

    def __call__(self, piece: Piece) -> Part:
        read = [column for column in self.columns if column is not None]
        with jax.enable_x64(self.in_double_precision):
            totals, done = None, 0
            for arrays, counts in piece.read(read):
                for found in self._blocks(arrays, counts, piece.first + done):
                    totals = found if totals is None else [a + b for a, b in zip(totals, found, strict=True)]
                done += len(counts)
        if done != piece.num_rows:
            raise ValueError("a piece of the table has changed: it has another number of rows than when it was opened")
        return Part(piece.first, piece.num_rows, tuple(totals or ()))

    def _blocks(self, arrays: tuple[np.ndarray, ...], counts: np.ndarray, first: int) -> Iterator[list[np.ndarray]]:
        run, end, size = _compiled(self.program), first + len(counts), self.block_rows
        for start in range(first - first % size, end, size):
            low, high = max(start, first), min(start + size, end)
            own = slice(low - first, high - first)
            place = slice(low - start, high - start)
            block = iter([_placed(array[own], place, size) for array in arrays])
            rows = [None if column is None else next(block) for column in self.columns]
            numbers = np.arange(start, start + size, dtype=np.int64).astype(np.int32)
            filled = [numbers if row is None else row for row in rows]
            found = run(*filled, _placed(counts[own], place, size), *self.given)
            limbs = [np.asarray(x).astype(np.int64) for x in found]
            yield [(hi << _LIMB_BITS) + lo for hi, lo in zip(limbs[::2], limbs[1::2], strict=True)]


def _placed(rows: np.ndarray, place: slice, size: int) -> np.ndarray:
    """A whole block with these rows in it, and zeros beside them."""
    if len(rows) == size:
        return rows
    block = np.zeros((size, *rows.shape[1:]), rows.dtype)
    block[place] = rows
    return block


@functools.lru_cache(256)
def _compiled(program: bytes) -> Callable[..., Any]:
    """Compiled once in each process, by a name that says nothing."""
    return jax.jit(export.deserialize(bytearray(program)).call)


# -- What is asked -----------------------------------------------------------------------------------------------------


class _Question:
    """A sum over all rows in the trace of a program that asks for it.

    :ivar jaxpr: of a block: constants that are given, rows, and which of them count; to limbs of whole numbers.
    :ivar finish: what becomes of each total, as whole numbers, at the end.
    """

    def __init__(self, jaxpr: Jaxpr, rows: tuple[StreamedColumn, ...], finish: Callable | None):
        self.jaxpr, self.rows, self.finish = jaxpr, rows, finish
        self.table = rows[0].table
        self._program: dict[bool, bytes] = {}

    def task(self, given: Sequence[Any]) -> Task:
        in_double_precision = jax.config.jax_enable_x64
        if in_double_precision not in self._program:  # once for all passes that ask the same
            self._program[in_double_precision] = self._exported(given)
        columns = tuple(row.spec for row in self.rows)
        numbers = tuple(map(np.asarray, given))
        return Task(self._program[in_double_precision], numbers, columns, self.table.block_rows, in_double_precision)

    def _exported(self, given: Sequence[Any]) -> bytes:
        def run(*args: Any) -> list:
            rows, given = args[: len(self.rows) + 1], args[len(self.rows) + 1 :]
            return jax.core.eval_jaxpr(self.jaxpr, given, *rows)

        blocks, counts = _block_of(self.rows)
        numbers = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in given]
        return bytes(export.export(jax.jit(run))(*blocks, counts, *numbers).serialize())


def total_over(
    rows: Sequence[StreamedColumn],
    of_block: Callable[[tuple, jax.Array], Any],
    finish: Callable[[np.ndarray, int], np.ndarray] | None = None,
) -> Any:
    """The exact total over all rows of pairs of limbs that `of_block` gives of a block.

    :param of_block: of the rows of a block and of which of them count, to a list of pairs ``(hi, lo)`` of int32 arrays.
    :param finish: from a total, int64, and the number of rows to what is returned in its place.
    :return: a list of pairs of limbs.
    """
    closed = jax.make_jaxpr(of_block)(*_block_of(rows))
    question = _Question(closed.jaxpr, tuple(rows), finish)
    limbs = _PASS.bind(*closed.consts, question=question)
    return list(zip(limbs[::2], limbs[1::2], strict=True))


def _block_of(rows: Sequence[StreamedColumn]) -> tuple[tuple, jax.ShapeDtypeStruct]:
    """Shapes of a block's rows, and of which of them count."""
    size = rows[0].table.block_rows
    blocks = tuple(jax.ShapeDtypeStruct((size, *row.shape[1:]), row.dtype) for row in rows)
    return blocks, jax.ShapeDtypeStruct((size,), np.bool_)


_PASS = Primitive("pass_over_the_table")
_PASS.multiple_results = True


@_PASS.def_abstract_eval
def _shapes(*_given: Any, question: _Question) -> list:
    return [jax.core.ShapedArray(aval(out).shape, np.dtype(np.int32)) for out in question.jaxpr.outvars]


@_PASS.def_impl
def _run(*given: Any, question: _Question) -> list:
    table = question.table
    totals = _add_up(table.run(question.task(given)), table.num_rows)
    if totals is None:
        totals = [np.zeros(aval(out).shape, np.int64) for out in question.jaxpr.outvars[::2]]
    if question.finish is not None:
        totals = [question.finish(total, table.num_rows) for total in totals]
    limbs = [part for total in totals for part in (total >> _LIMB_BITS, total & (2**_LIMB_BITS - 1))]
    return [jnp.asarray(part.astype(np.int32)) for part in limbs]


def _refused(*_args: Any, **_params: Any) -> Any:
    raise TypeError(
        "a table that is read in pieces is asked by a program as a whole, and cannot be asked inside of its loops, "
        "branches and maps"
    )


mlir.register_lowering(_PASS, _refused)


def _add_up(parts: Iterable[Part], num_rows: int) -> list[np.ndarray] | None:
    """The total of all pieces, each of which must be there once; None of no rows.

    :raises RuntimeError: if they are not.
    """
    totals: list[np.ndarray] | None = None
    places: dict[int, int] = {}
    for part in parts:
        if part.first in places or part.num_rows < 1:
            raise RuntimeError("a piece of the table came back twice, or without rows: nothing is released")
        places[part.first] = part.num_rows
        found = [np.asarray(x, np.int64) for x in part.totals]
        totals = found if totals is None else [a + b for a, b in zip(totals, found, strict=True)]
    end = 0
    for first in sorted(places):
        if first != end:
            raise RuntimeError("pieces of the table came back that do not follow one another: nothing is released")
        end += places[first]
    if end != num_rows:
        raise RuntimeError(
            "pieces of the table are missing, or some that it does not have came back: nothing is released"
        )
    return totals


# -- Programs that ask -------------------------------------------------------------------------------------------------


def trace_program(function: Callable[..., Any], *args: Any, static: Sequence[int] = ()) -> tuple[ClosedJaxpr, Any]:
    """The program of a function that asks for sums over a table that is not in memory.

    :raises TypeError: if it asks for one where it may be asked several times.
    """
    closed, shapes = jax.make_jaxpr(function, static_argnums=tuple(static), return_shape=True)(*args)
    if any(_asks(inner) for outer in closed.jaxpr.eqns for inner in jaxprs_in(outer.params)):
        _refused()
    return closed, shapes


def _asks(jaxpr: Jaxpr) -> bool:
    return any(eqn.primitive is _PASS or any(map(_asks, jaxprs_in(eqn.params))) for eqn in jaxpr.eqns)


def run_program(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """Run a program; each sum that it asks for is a pass over the table."""
    values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(closed.jaxpr.invars, args, strict=True))

    def value(v: Any) -> Any:
        return jnp.asarray(v.val, aval(v).dtype) if isinstance(v, Literal) else values[v]

    for eqn in closed.jaxpr.eqns:
        values.update(zip(eqn.outvars, bind(eqn, [value(v) for v in eqn.invars]), strict=True))
    return [value(v) for v in closed.jaxpr.outvars]
