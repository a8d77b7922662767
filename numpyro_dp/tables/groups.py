"""A table of units, each with the rows that are its own, in the place of a table of rows.

The rows of a unit must follow one another; a table that is sorted by the unit's column is like that. One pass over that
column finds where units begin, so that each belongs to one piece, which reads its rows to the last of them.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from numpyro_dp.privacy.passes import Part, StreamedColumn, StreamedUnits, Task
from numpyro_dp.tables.arrow import arrow, is_text, plain
from numpyro_dp.tables.columns import UNIT, ColumnSpec, decode
from numpyro_dp.tables.pieces import Rows

_ROWS_AT_ONCE = 2**16


class UnitTable(StreamedUnits):
    """A table whose rows are the units of another one.

    :ivar most_rows: that a unit has a place for.
    :ivar num_table_rows: of the other one.
    :ivar identity: a name for which rows belong together.
    """

    def __init__(self, table: Any, name: str, found: "Units", most_rows: int | None):
        self._table, self._name, self._found = table, name, found
        self.most_rows = found.most_rows if most_rows is None else most_rows
        self.num_table_rows = table.num_rows
        self.identity = found.identity
        # Where it is private which rows are whose, one unit's number would tell of the others.
        options: dict[str, Any] = {"name": name, "most_rows": self.most_rows, "are_numbered": most_rows is None}
        self._pieces = [dataclasses.replace(piece, **options) for piece in found.pieces]

    @property
    def num_rows(self) -> int:
        return self._found.num_units

    @property
    def progress_bar(self) -> bool:  # type: ignore[override]
        return self._table.progress_bar

    def of_units(self, column: StreamedColumn) -> StreamedColumn:
        """The same column with an axis of units, and behind it one of a unit's rows.

        :raises ValueError: if it is of another table.
        """
        if column.table is not self._table:
            raise ValueError("all private arguments must be columns of one and the same `numpyro_dp.scan`")
        return StreamedColumn(self, (self.most_rows, *column.shape[1:]), column.dtype, column.spec)

    @property
    def present(self) -> StreamedColumn:
        """Which of the places are rows."""
        return StreamedColumn(self, (self.most_rows,), bool, _PRESENT)

    def run(self, task: Task) -> Iterable[Part]:
        return self._table.run_on(task, self._pieces)


_PRESENT = ColumnSpec((), "present", "bool")


@dataclasses.dataclass(frozen=True, repr=False)  # engines write what they print into logs
class UnitPiece:
    """The units that begin in a piece of a table.

    :ivar rows: that piece, and those behind it as far as the last of the units reaches.
    :ivar skip, take: which of their rows are these units'.
    :ivar name: of the unit's column.
    :ivar are_numbered: whether units have numbers; else each is 0.
    """

    rows: tuple[Rows, ...]
    skip: int
    take: int
    first: int
    num_rows: int
    name: str = ""
    most_rows: int = 0
    are_numbered: bool = True

    @property
    def needs(self) -> list[Any]:
        """See `DaskPartition`."""
        return [needed for piece in self.rows for needed in getattr(piece, "needs", [])]

    def having(self, parts: Sequence[Any]) -> "UnitPiece":
        """See `DaskPartition`."""
        rows = tuple(piece.having([part]) for piece, part in zip(self.rows, parts, strict=True))  # type: ignore[attr-defined]
        return dataclasses.replace(self, rows=rows)

    def read(self, columns: Sequence[ColumnSpec]) -> Iterator[tuple[tuple[np.ndarray, ...], np.ndarray]]:
        own = _column(self.name)
        wanted = [column for column in columns if column not in (_PRESENT, own)]
        done = 0
        for table, sizes in self._whole_units(wanted):
            arrays, counts = decode(table, wanted)
            place = np.arange(self.most_rows)
            first = np.cumsum(sizes) - sizes
            present = place < sizes[:, None]
            index = first[:, None] + np.where(present, place, 0)
            supply = iter([array[index] for array in arrays])
            present &= counts[index]
            number = (self.first + done + np.arange(len(sizes))) * self.are_numbered
            numbers = np.broadcast_to(number[:, None], index.shape).astype(np.int32)
            done += len(sizes)
            known = {_PRESENT: present, own: numbers}
            yield tuple(known[c] if c in known else next(supply) for c in columns), np.ones(len(sizes), bool)

    def _whole_units(self, columns: Sequence[ColumnSpec]) -> Iterator[tuple[Any, np.ndarray]]:
        """Rows of some units at a time, and how many each has."""
        pa = arrow()
        wanted = [*columns, _column(self.name)]  # rows of its own
        held: list[Any] = []
        rows = 0
        for batch in _sliced(self._batches(wanted), self.skip, self.take):
            held.append(batch)
            rows += batch.num_rows
            if rows < _ROWS_AT_ONCE:
                continue
            table = pa.Table.from_batches(held)
            starts = _starts(table.column(self.name))
            last = int(starts[-1])  # may go on
            if last:
                yield table.slice(0, last), np.diff(starts)
                held, rows = table.slice(last).to_batches(), rows - last
        if rows:
            table = pa.Table.from_batches(held)
            yield table, np.diff(np.append(_starts(table.column(self.name)), rows))

    def _batches(self, columns: Sequence[ColumnSpec]) -> Iterator[Any]:
        for piece in self.rows:
            yield from piece.batches(columns)


def _sliced(batches: Iterable[Any], skip: int, take: int) -> Iterator[Any]:
    for batch in batches:
        if skip >= batch.num_rows:
            skip -= batch.num_rows
            continue
        part = batch.slice(skip, take)
        skip, take = 0, take - part.num_rows
        yield part
        if not take:
            return


def _starts(ids: Any) -> np.ndarray:
    """Where another unit begins; the first is 0."""
    pa = arrow()
    ids = ids.combine_chunks() if isinstance(ids, pa.ChunkedArray) else ids
    if len(ids) < 2:
        return np.zeros(len(ids), np.int64)
    changes = pa.compute.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.flatnonzero(changes) + 1])


# -- Where units begin -------------------------------------------------------------------------------------------------


class Units(NamedTuple):
    """Of a table: how many, how many rows one has at most, a name for which rows are whose, and who reads them."""

    num_units: int
    most_rows: int
    identity: str
    pieces: list[UnitPiece]


class Runs(NamedTuple):
    """Runs of equal ids in a piece.

    :ivar first_id, last_id: of its first and last row; arrays of Arrow's, of one id.
    :ivar num_runs: how many there are.
    :ivar first_rows, last_rows, most_rows: of the first run, of the last, and of the longest.
    :ivar starts: `_mixed` of where all but the first of them begin.
    :ivar is_sorted: whether no id is smaller than the one before, in each of the `_orders`.
    """

    first: int
    num_rows: int
    first_id: Any
    last_id: Any
    num_runs: int
    first_rows: int
    last_rows: int
    most_rows: int
    starts: tuple[int, ...]
    is_sorted: tuple[bool, ...]
    has_missing: bool

    def __repr__(self) -> str:  # engines write what they print into logs
        return f"Runs({self.first}, {self.num_rows})"


@dataclasses.dataclass(frozen=True)
class FindRuns:
    """A task: what there is to know of where units begin in a piece.

    :ivar name: of the unit's column.
    """

    name: str

    def __call__(self, piece: Rows) -> Runs:
        pa = arrow()
        table = pa.Table.from_batches(piece.batches([_column(self.name)]))
        ids = plain(table.column(self.name))
        starts = _starts(ids)
        sizes = np.diff(np.append(starts, len(ids)))
        has_missing = ids.null_count > 0
        compute = pa.compute
        falls = [compute.any(compute.less(x.slice(1), x.slice(0, len(ids) - 1))).as_py() for x in _orders(ids)]
        return Runs(
            piece.first,
            len(ids),
            ids.slice(0, 1),
            ids.slice(len(ids) - 1),
            len(sizes),
            int(sizes[0]),
            int(sizes[-1]),
            int(sizes.max()),
            _mixed(starts[1:] + piece.first),
            tuple(not falling for falling in falls),
            has_missing,
        )


def find_units(pieces: Sequence[Rows], found: Iterable[Runs], name: str) -> Units:
    """Which units begin in which piece.

    :param found: of each of the pieces.
    :raises ValueError: if an id is missing, or rows of a unit may lie apart.
    """
    runs = sorted(found, key=lambda r: r.first)
    if any(r.has_missing for r in runs):
        raise ValueError(f"column {name!r} says whose a row is, and some have no value: leave these rows out")
    rises = [[not fell for fell in _are("less", b, a)] for a, b in itertools.pairwise(runs)]
    if runs and not any(map(all, zip(*(r.is_sorted for r in runs), *rises, strict=True))):
        raise ValueError(
            f"the rows of a unit must follow one another, and column {name!r} is not sorted: sort the files by it, in "
            "the order of their names"
        )
    goes_on = [False, *(_are("equal", b, a)[0] for a, b in itertools.pairwise(runs))]
    mixed, most, longest, number = [0, 0], 0, 0, 0
    units: list[UnitPiece] = []
    for k, (piece, own) in enumerate(zip(pieces, runs, strict=True)):
        begins_here = (0, 0) if goes_on[k] else _mixed(np.array([own.first]))
        mixed = [sum(parts) % 2**64 for parts in zip(mixed, own.starts, begins_here, strict=True)]
        longest = longest + own.first_rows if goes_on[k] else own.first_rows
        most = max(most, longest, own.most_rows)
        longest = own.last_rows if own.num_runs > 1 else longest
        begins = own.num_runs - goes_on[k]
        if not begins:
            continue
        reach, take = [piece], own.num_rows - goes_on[k] * own.first_rows
        for j in range(k + 1, len(runs)):
            if not goes_on[j]:
                break
            reach.append(pieces[j])
            take += runs[j].first_rows
            if runs[j].num_runs > 1:
                break
        units.append(UnitPiece(tuple(reach), goes_on[k] * own.first_rows, take, number, begins))
        number += begins
    identity = hashlib.sha256(repr((number, most, sum(r.num_rows for r in runs), mixed)).encode()).hexdigest()
    return Units(number, most, identity, units)


def _orders(ids: Any) -> list[Any]:
    """What a table may be sorted by: ids as they are; of texts, whole numbers by size, too."""
    if not is_text(ids.type):
        return [ids]
    compute = arrow().compute
    is_whole = compute.match_substring_regex(ids, r"^(0|[1-9]\d{0,18})$")
    return [ids, compute.if_else(is_whole, compute.utf8_lpad(ids, 19, "0"), ids)]


def _are(what: str, later: Runs, earlier: Runs) -> list[bool]:
    """How the first id of a piece compares with the last one of the piece before, in each of the `_orders`."""
    pairs = zip(_orders(later.first_id), _orders(earlier.last_id), strict=True)
    return [bool(getattr(arrow().compute, what)(a, b)[0].as_py()) for a, b in pairs]


def require_id_type(name: str, kind: Any) -> None:
    """
    :raises ValueError: if equal ids could not be found equal, as NaN.
    """
    types = arrow().types
    allowed = ("integer", "string", "large_string", "date", "timestamp", "boolean", "decimal", "binary")
    if not any(getattr(types, f"is_{one}")(kind) for one in allowed):
        raise ValueError(f"column {name!r} holds {kind}: whose a row is, say by whole numbers, texts or dates")


def _mixed(places: np.ndarray) -> tuple[int, ...]:
    """Two sums of pseudo-random numbers that places stand for: a hash that adds up, in whatever pieces they are."""
    sums = []
    for constant in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03):
        x = places.astype(np.uint64) * np.uint64(constant) + np.uint64(constant)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        sums.append(int(np.sum(x ^ (x >> np.uint64(31)), dtype=np.uint64)))
    return tuple(sums)


def _column(name: str) -> ColumnSpec:
    return ColumnSpec((name,), UNIT, "int32")
