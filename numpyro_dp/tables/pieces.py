"""Pieces of a table: consecutive rows of a file or of a frame, as small objects that can be sent."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from numpyro_dp.privacy.passes import BLOCK_ROWS
from numpyro_dp.tables.arrow import arrow
from numpyro_dp.tables.columns import ColumnSpec, decode
from numpyro_dp.tables.texts import texts_of_bytes, texts_of_objects

PIECE_ROWS = 2**19
"""About so many, so that a pass has pieces for all workers, and each of them takes far longer than to ask for it."""
_READ_ROWS = 2**17


class TableChangedError(RuntimeError):
    """A file is not what it was when the table was opened. Nothing more is released; what was charged stays charged."""


class Rows(ABC):
    """Consecutive rows; see `numpyro_dp.privacy.passes.Piece`."""

    first: int
    num_rows: int

    def __repr__(self) -> str:  # engines write what they print into logs: no row may be in it
        return f"{type(self).__name__} of {self.num_rows} rows from {self.first}"

    @abstractmethod
    def batches(self, columns: Sequence[ColumnSpec]) -> Iterator[Any]:
        """In order, of Arrow's columns those that are needed."""

    def read(self, columns: Sequence[ColumnSpec]) -> Iterator[tuple[tuple[np.ndarray, ...], np.ndarray]]:
        for table in aligned(self.batches(columns), self.first):
            yield decode(table, columns)


@dataclasses.dataclass(frozen=True, repr=False)
class FilePiece(Rows):
    """Rows of one file.

    :ivar fragment: a part of a dataset of PyArrow's.
    :ivar schema: of the file.
    :ivar has_types: whether the file says of which types its columns are.
    """

    fragment: Any
    schema: Any
    first: int
    num_rows: int
    has_types: bool = True

    def batches(self, columns: Sequence[ColumnSpec]) -> Iterator[Any]:
        """The rows, some at a time; texts where the file has bytes.

        :raises TableChangedError: if the file cannot be read. What PyArrow says of it could quote a value.
        """
        names = sorted({name for column in columns for name in column.names})
        try:
            read = self.fragment.to_batches(
                schema=self.schema, columns=names, batch_size=_READ_ROWS, batch_readahead=4, fragment_readahead=1
            )
            for batch in read:
                yield batch if self.has_types else _in_texts(batch)
        except Exception as error:
            raise TableChangedError(
                f"{self.fragment.path!r} cannot be read as a table of the columns {', '.join(names)} "
                f"({type(error).__name__}): it has changed, or a value is of another type than the first ones"
            ) from None


@dataclasses.dataclass(frozen=True, repr=False)
class FramePiece(Rows):
    """Rows of a table of PyArrow's that is in memory."""

    table: Any
    first: int
    num_rows: int

    def batches(self, columns: Sequence[ColumnSpec]) -> Iterator[Any]:
        names = sorted({name for column in columns for name in column.names})
        yield from self.table.select(names).to_batches(max_chunksize=_READ_ROWS)


@dataclasses.dataclass(frozen=True, repr=False)
class DaskPartition(Rows):
    """A partition of a Dask data frame.

    :ivar part: how Dask makes it; then what it has made.
    :ivar schema: of the table.
    """

    part: Any
    first: int
    num_rows: int
    schema: Any = None

    @property
    def needs(self) -> list[Any]:
        """What Dask is to make of it first."""
        return [self.part]

    def having(self, parts: Sequence[Any]) -> "DaskPartition":
        """The same when Dask has made it."""
        return dataclasses.replace(self, part=parts[0])

    def batches(self, columns: Sequence[ColumnSpec]) -> Iterator[Any]:
        names = sorted({name for column in columns for name in column.names})
        pa = arrow()
        schema = pa.schema([self.schema.field(name) for name in names])
        try:
            table = table_of_pandas(self.part[names], schema)
        except Exception as error:
            raise TableChangedError(
                f"a partition has other columns than {', '.join(names)}, or of other types than the frame says "
                f"({type(error).__name__})"
            ) from None
        yield from table.to_batches(max_chunksize=_READ_ROWS)


def _in_texts(batch: Any) -> Any:
    return arrow().RecordBatch.from_arrays([texts_of_bytes(column) for column in batch.columns], batch.schema.names)


def table_of_pandas(frame: Any, schema: Any = None) -> Any:
    """A table of Arrow's. Columns of Python's objects become texts, each value by itself.

    :param schema: that it shall have; None for that of the columns' dtypes.
    """
    pa = arrow()
    objects = [name for name in frame.columns if frame[name].dtype == object]
    frame = frame.reset_index(drop=True)  # by which pandas would put values elsewhere
    frame = frame.assign(**{name: texts_of_objects(frame[name]).to_pandas() for name in objects})
    if schema is None:
        typed = pa.Schema.from_pandas(frame.drop(columns=objects), preserve_index=False).remove_metadata()
        kinds = {name: pa.large_string() for name in objects}
        schema = pa.schema([(name, kinds[name] if name in kinds else typed.field(name).type) for name in frame.columns])
    return pa.Table.from_pandas(frame, schema=schema, preserve_index=False, safe=False)


@dataclasses.dataclass(frozen=True, repr=False)
class SparkPartition(Rows):
    """A partition of a Spark data frame.

    :ivar partition: its number.
    :ivar found: its rows, where Spark has them.
    """

    partition: int
    first: int
    num_rows: int
    found: Any = None

    def of(self, batches: Iterator[Any]) -> "SparkPartition":
        """The same with its rows."""
        return dataclasses.replace(self, found=batches)

    def batches(self, columns: Sequence[ColumnSpec]) -> Iterator[Any]:
        yield from self.found


def aligned(batches: Iterable[Any], first: int) -> Iterator[Any]:
    """The same rows, in tables that end where a block of rows ends: a block that is cut is computed twice.

    :param first: number of the first row.
    """
    pa = arrow()
    held: list[Any] = []
    rows, schema = 0, None
    for batch in batches:
        held.append(batch)
        rows += batch.num_rows
        schema = batch.schema
        whole = rows - (first + rows) % BLOCK_ROWS
        if rows >= _READ_ROWS and whole > 0:
            table = pa.Table.from_batches(held)
            yield table.slice(0, whole)
            held, first, rows = table.slice(whole).to_batches(), first + whole, rows - whole
    if rows:
        yield pa.Table.from_batches(held, schema)
