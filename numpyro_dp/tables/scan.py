"""`scan`: a table that is read from files, or from a frame, in each pass, and never as a whole."""

import collections
import contextlib
import dataclasses
import datetime
import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from numpyro_dp.privacy.passes import MOST_ROWS, Part, StreamedColumn, StreamedTable, Task
from numpyro_dp.tables.arrow import arrow
from numpyro_dp.tables.columns import COMPUTED, DAYS, LEVELS, MISSING, NUMBERS, UNIT, ColumnSpec, numbers_of
from numpyro_dp.tables.engines import Engine, SparkFrame, engine_of
from numpyro_dp.tables.groups import FindRuns, Units, UnitTable, find_units, require_id_type
from numpyro_dp.tables.pieces import (
    PIECE_ROWS,
    DaskPartition,
    FilePiece,
    FramePiece,
    Rows,
    SparkPartition,
    TableChangedError,
    table_of_pandas,
)

T = TypeVar("T")


class Column(StreamedColumn):
    """A column of a table that is read in pieces, or several side by side: what a model's argument may be."""

    table: "Table"
    spec: ColumnSpec

    def levels(self, levels: Sequence[Any]) -> "Column":
        """Each value's position among `levels`, which must be public; a row with another one says nothing."""
        self._require_one("levels")
        if len(set(levels)) != len(levels) or not levels:
            raise ValueError(f"levels must be some different values, got {list(levels)!r}")
        pa, kind = arrow(), self.table.type_of(self.spec.names[0])
        try:
            pa.array(levels).cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            raise ValueError(
                f"column {self.spec.names[0]!r} holds {kind}, of which {list(levels)!r} are none"
            ) from None
        return self.table._column(ColumnSpec(self.spec.names, LEVELS, "int32", levels=tuple(levels)))

    def fill(self, value: float) -> "Column":
        """The same with a public value in the place of missing ones (nulls and NaN)."""
        if np.array(value).astype(self.dtype) != value:
            raise ValueError(f"{value!r} cannot stand in a column of {self.dtype}")
        return self.table._column(self.spec._replace(fill=value))

    def is_missing(self) -> "Column":
        """Whether each value is missing (a null or NaN)."""
        self._require_one("is_missing")
        return self.table._column(ColumnSpec(self.spec.names, MISSING, "bool"))

    def days_since(self, origin: str) -> "Column":
        """Days from a date, as `2020-01-31`, to that of each row; of times with a zone, in UTC."""
        self._require_one("days_since")
        types, kind = arrow().types, self.table.type_of(self.spec.names[0])
        if not (types.is_date(kind) or types.is_timestamp(kind) or self.table.is_untyped(self.spec.names[0])):
            raise ValueError(f"column {self.spec.names[0]!r} holds {kind}, and no dates: `days_since` is for dates")
        datetime.datetime.fromisoformat(origin)
        dtype = np.dtype(jnp.result_type(float)).name
        return self.table._column(ColumnSpec(self.spec.names, DAYS, dtype, origin=origin))

    @property
    def num_units(self) -> int:
        """How many units there are, if this is the column that says whose a row is. Reads it, once."""
        return self.table.by_unit(self, None).num_rows

    def _require_one(self, what: str) -> None:
        if self.spec.is_matrix:
            raise ValueError(f"`{what}` is for one column at a time, got {', '.join(self.spec.names)}")

    def __repr__(self) -> str:
        return f"Column({', '.join(self.spec.names)}: {self.spec.kind}, {self.dtype}, shape {self.shape})"


class Table(StreamedTable):
    """A table that is read in pieces; made by `scan`. ``table["age"]`` and ``table[["age", "sex"]]`` are arguments.

    :ivar engine: what reads it.
    :param texts: columns of no type of their own: each value is a number, a date or a text as it is written.
    """

    def __init__(
        self,
        pieces: Sequence[Rows],
        schema: Any,
        engine: Engine,
        files: "_Files | None" = None,
        texts: Iterable[str] = (),
    ):
        self.engine, self._pieces, self._schema, self._files = engine, list(pieces), schema, files
        self._texts = frozenset(texts)
        self._num_rows = sum(piece.num_rows for piece in self._pieces)
        self._columns: dict[ColumnSpec, StreamedColumn] = {}
        self._units: dict[str, Units] = {}
        if self._num_rows > MOST_ROWS:
            raise ValueError(f"a table may have up to {MOST_ROWS:,} rows, got {self._num_rows:,}")

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def __len__(self) -> int:
        return self._num_rows

    @property
    def column_names(self) -> list[str]:
        return list(self._schema.names)

    def __getitem__(self, names: str | list[str]) -> Column:
        """A column, or several as a matrix. The same object for the same names.

        :raises KeyError: if there is no such column.
        :raises ValueError: if it does not hold numbers, with the way out.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if name not in self._schema.names:
                raise KeyError(f"no column {name!r}; there are {', '.join(self._schema.names)}")
        types = [arrow().float64() if name in self._texts else self._schema.field(name).type for name in wanted]
        try:
            return self._column(numbers_of(wanted, types, not isinstance(names, str)))
        except ValueError:
            if not isinstance(names, str):
                raise
            return _Other(self, names, types[0])  # type: ignore[return-value]

    def type_of(self, name: str) -> Any:
        """Arrow's type of a column's values."""
        kind = self._schema.field(name).type
        return kind.value_type if arrow().types.is_dictionary(kind) else kind

    def is_untyped(self, name: str) -> bool:
        """Whether a column is of no type of its own, as in CSV files: each value is read by itself."""
        return name in self._texts

    def _column(self, spec: ColumnSpec) -> Column:
        if spec not in self._columns:
            shape = (len(spec.names),) if spec.is_matrix else ()
            self._columns[spec] = Column(self, shape, np.dtype(spec.dtype), spec)
        return self._columns[spec]  # type: ignore[return-value]

    def computed(
        self, names: Sequence[str], function: Callable[[Any], Mapping[str, np.ndarray]], like: Mapping[str, np.ndarray]
    ) -> dict[str, StreamedColumn]:
        """Columns that a function makes of some rows at a time, wherever they are read; for `FormulaModel`.

        What it makes of a row may not depend on other rows: nobody checks that here.

        :param names: of the columns that it gets, as a table of Arrow's.
        :param function: can be pickled.
        :param like: what it makes of one row.
        """
        found = {}
        for part, value in like.items():
            spec = ColumnSpec(tuple(names), COMPUTED, value.dtype.name, function=function, part=part)
            found[part] = self._columns.setdefault(spec, StreamedColumn(self, value.shape[1:], value.dtype, spec))
        return found

    def run(self, task: Task) -> Iterable[Part]:
        """See `StreamedTable`.

        :raises TableChangedError: if a file has changed since the table was opened.
        """
        return self.run_on(task, self._pieces)

    def run_on(self, task: Callable[[Any], T], pieces: Sequence[Any]) -> Iterator[T]:
        """The same on pieces that are made of these."""
        self._require_same()
        total = sum(piece.num_rows for piece in pieces)
        with tqdm(total=total, unit="row", unit_scale=True, disable=not self.progress_bar, leave=False) as bar:
            for part in self.engine.run(task, pieces):  # type: ignore[arg-type]
                bar.update(part.num_rows)
                yield part  # type: ignore[misc]
        self._require_same()

    def unit(self, name: str) -> Column:
        """The column that says whose each row is; texts and dates, too. The rows of a unit must follow one another.

        To be named by a kernel's `unit`, and to be passed to the model's argument of that name, if it has one, where it
        is the number of the row's unit.
        """
        if name not in self._schema.names:
            raise KeyError(f"no column {name!r}; there are {', '.join(self._schema.names)}")
        require_id_type(name, self.type_of(name))
        return self._column(ColumnSpec((name,), UNIT, "int32"))

    def by_unit(self, unit: StreamedColumn, most_rows: int | None) -> UnitTable:
        """See `StreamedTable`. Reads the unit's column, once."""
        if len(unit.spec.names) != 1:
            raise ValueError(f"a unit is told by one column, got {', '.join(unit.spec.names)}")
        (name,) = unit.spec.names
        require_id_type(name, self.type_of(name))
        if isinstance(self.engine, SparkFrame):
            raise ValueError("units of a Spark frame may lie in several of its partitions: scan the files instead")
        if name not in self._units:
            self._units[name] = find_units(self._pieces, self.run_on(FindRuns(name), self._pieces), name)
        return UnitTable(self, name, self._units[name], most_rows)

    def _require_same(self) -> None:
        if self._files is not None:
            self._files.require_same()

    def __repr__(self) -> str:
        return (
            f"Table of {self._num_rows:,} rows in {len(self._pieces)} piece(s), read by {self.engine}: "
            f"{', '.join(f'{field.name} ({field.type})' for field in self._schema)}"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a table cannot be pickled: open it where it is needed")


class _Other:
    """A column that holds no numbers, until it is said what they shall be."""

    def __init__(self, table: Table, name: str, kind: Any):
        self._table, self._name, self._kind = table, name, kind

    def _column(self) -> Column:
        spec = ColumnSpec((self._name,), NUMBERS, "float32")
        return Column(self._table, (), np.float32, spec)

    def levels(self, levels: Sequence[Any]) -> Column:
        return self._column().levels(levels)

    def days_since(self, origin: str) -> Column:
        return self._column().days_since(origin)

    def is_missing(self) -> Column:
        return self._column().is_missing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        numbers_of([self._name], [self._kind], False)  # which says what to do
        raise AttributeError(name)


def scan(source: Any, *, engine: Any = None, format: str | None = None) -> Table:
    """Open a table that is read in pieces, in each pass anew.

    ::

        table = ndp.scan("visits/*.parquet")
        mcmc = MCMC(DPHMC(model, eps=1.0), num_warmup=500, num_samples=1000)
        mcmc.run(jax.random.key(0), X=table[["age", "dose"]], y=table["events"])

    Files are read in the order of their names, or of the list that they are in. The same rows in the same order give
    the same released numbers, bit by bit, whatever the files, the pieces and the engine, if the noise is the same.

    A row with a missing value (a null) in a column that the model uses says nothing, as a row of NaN does; use it by
    `Column.fill` and `Column.is_missing`.

    :param source: Parquet, Arrow or CSV files: a path, a folder, a pattern or a list of these, where `pyarrow.dataset`
        finds them; a data frame of pandas, Polars or any other library that speaks Arrow; a `pyarrow.Table` or dataset;
        a data frame of Dask's or Spark's.
    :param engine: what reads it: None for threads of this process, a Dask client, a Spark session, or an object with
        ``run(task, pieces)``.
    :param format: of files, if their names do not say: "parquet", "arrow" or "csv".
    :raises ValueError: if files have different columns, or one is there twice.
    """
    pa = arrow()
    runs = engine_of(engine)
    if isinstance(source, str | os.PathLike | list | tuple):
        source = _dataset(source, format)
    if isinstance(source, pa.dataset.FileSystemDataset):
        _require_each_once(source)
        files = _Files(source)
        if source.format.default_extname == "csv":
            schema = pa.schema([(name, pa.large_string()) for name in source.schema.names])
            return Table(_pieces_of_files(_of_bytes(source), has_types=False), schema, runs, files, schema.names)
        return Table(_pieces_of_files(source), source.schema, runs, files)
    kind = type(source).__module__.partition(".")[0]
    if kind == "dask" and hasattr(source, "to_delayed"):
        return _dask_table(source, engine)
    if kind == "pyspark":
        return _spark_table(source)
    texts: list[str] = []
    if kind == "pandas":
        texts = [name for name in source.columns if source[name].dtype == object]
        source = table_of_pandas(source)
    if not isinstance(source, pa.Table):
        try:
            source = pa.table(source)
        except (TypeError, ValueError, pa.ArrowInvalid):
            raise TypeError(
                "a table is files, a data frame that speaks Arrow, or a dataset of PyArrow's, got "
                f"{type(source).__name__}"
            ) from None
    fields = [field.with_type(_roomy(field.type)) for field in source.schema]
    source = source.cast(pa.schema(fields)).unify_dictionaries()
    starts = range(0, source.num_rows, PIECE_ROWS)
    slices = [source.slice(start, PIECE_ROWS) for start in starts]
    pieces = [FramePiece(part, start, part.num_rows) for start, part in zip(starts, slices, strict=True)]
    return Table(pieces, source.schema, runs, texts=texts)


def _of_bytes(dataset: Any) -> Any:
    """CSV files in which no value decides how others are read: each is bytes, an empty line is a row."""
    pa = arrow()
    names = dataset.schema.names
    given, read = dataset.format.parse_options, dataset.format.default_fragment_scan_options.read_options
    parse = pa.csv.ParseOptions(
        delimiter=given.delimiter,
        quote_char=given.quote_char,
        double_quote=given.double_quote,
        escape_char=given.escape_char,
        newlines_in_values=True,
        ignore_empty_lines=False,
    )
    convert = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.binary()), strings_can_be_null=True, quoted_strings_can_be_null=True
    )
    options = pa.dataset.CsvFragmentScanOptions(convert_options=convert, read_options=read)
    own = pa.dataset.CsvFileFormat(parse_options=parse, default_fragment_scan_options=options)
    schema = pa.schema([(name, pa.binary()) for name in names])
    return pa.dataset.FileSystemDataset.from_paths(dataset.files, schema, own, dataset.filesystem)


def _roomy(kind: Any) -> Any:
    """A type of Arrow's that all of its libraries' functions take; codes with room for those of all chunks together."""
    pa = arrow()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(pa.int32(), _roomy(kind.value_type), kind.ordered)
    return {"string_view": pa.large_string(), "binary_view": pa.large_binary()}.get(str(kind), kind)


def _dask_table(frame: Any, client: Any) -> Table:
    import pandas  # as Dask does
    from distributed import default_client

    sizes = [int(size) for size in frame.map_partitions(len).compute()]
    firsts = np.cumsum([0, *sizes])
    parts = zip(frame.to_delayed(), firsts, sizes, strict=False)
    pieces = [DaskPartition(part, int(first), size) for part, first, size in parts if size]
    empty = pandas.DataFrame({name: pandas.Series(dtype=kind) for name, kind in frame.dtypes.items()})
    schema = table_of_pandas(empty).schema.remove_metadata()
    pieces = [dataclasses.replace(piece, schema=schema) for piece in pieces]
    texts = [name for name in empty.columns if empty[name].dtype == object]
    return Table(pieces, schema, engine_of(client or default_client()), texts=texts)


def _spark_table(frame: Any) -> Table:
    engine = SparkFrame(frame)
    sizes = engine.sizes()
    firsts = np.cumsum([0, *sizes])
    pieces = [SparkPartition(k, int(firsts[k]), size) for k, size in enumerate(sizes) if size]
    return Table(pieces, frame.limit(0).toArrow().schema, engine)


def _dataset(source: Any, format: str | None) -> Any:
    """A dataset of the files, in the order of their names.

    :raises FileNotFoundError: if there is none.
    """
    given = [os.fspath(path) for path in (source if isinstance(source, list | tuple) else [source])]
    if any("://" in path for path in given):
        if len(given) > 1:
            raise ValueError("of a store elsewhere, give one folder or file: 's3://bucket/visits/'")
        return _opened(given[0], format or _FORMATS.get(os.path.splitext(given[0])[1].lower(), "parquet"))
    paths: list[str] = []
    for path in given:
        if os.path.isdir(path):
            paths += sorted(_files_in(path))
        elif not os.path.exists(path) and any(mark in path for mark in "*?["):
            paths += sorted(set(glob.glob(path, recursive=True)))
        else:
            paths.append(path)
    paths = [path for path in paths if not os.path.isdir(path)]
    if not paths:
        raise FileNotFoundError(f"no files are found by {', '.join(given)}")
    if format is None:
        endings = {os.path.splitext(path.removesuffix(".gz"))[1] for path in paths}
        formats = {_FORMATS.get(ending.lower()) for ending in endings}
        if len(formats) != 1 or None in formats:
            raise ValueError(
                f"files must all be Parquet, Arrow or CSV, got {', '.join(sorted(endings))}: say which they are by "
                "`format=`, or name the files by a pattern, `folder/*.parquet`"
            )
        format = formats.pop()
    return _opened(paths if len(paths) > 1 else paths[0], format)


def _files_in(folder: str) -> Iterator[str]:
    """But for those whose names, or whose folders' names, say that they are no data."""
    for inner, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        yield from (os.path.join(inner, name) for name in names if not name.startswith((".", "_")))


def _opened(paths: Any, format: str | None) -> Any:
    """
    :raises ValueError: if a file is not what it seems. What PyArrow says of it could quote a row.
    """
    pa = arrow()
    try:
        return pa.dataset.dataset(paths, format=format)
    except FileNotFoundError:
        raise
    except Exception as error:
        some = paths if isinstance(paths, str) else f"{paths[0]} and {len(paths) - 1} more"
        raise ValueError(f"{some} cannot be read as {format} ({type(error).__name__})") from None


def _require_each_once(dataset: Any) -> None:
    """
    :raises ValueError: if a file is there twice, by whatever names: its rows would count twice.
    """
    names = collections.Counter(os.path.realpath(path) for path in dataset.files)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{', '.join(twice[:3])} would be read more than once, so its rows would count more than once")


_FORMATS = {".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"} | {
    ".csv": "csv",
    ".txt": "csv",
}


def _pieces_of_files(dataset: Any, has_types: bool = True) -> list[FilePiece]:
    """Of all files, in their order.

    :raises ValueError: if a file has not the columns of the others, or has them of other types.
    """
    pieces: list[FilePiece] = []
    first = 0
    for fragment in dataset.get_fragments():
        _require_schema(fragment, dataset.schema)
        for part, rows in _parts(fragment):
            if rows:
                pieces.append(FilePiece(part, dataset.schema, first, rows, has_types))
                first += rows
    return pieces


def _parts(fragment: Any) -> Iterable[tuple[Any, int]]:
    """Of a file, with the rows of each: as Parquet has them in groups, some of these together; others as a whole."""
    groups = getattr(fragment, "row_groups", None)
    if groups is None:
        try:
            yield fragment, fragment.count_rows()
        except Exception as error:
            raise ValueError(f"the rows of {fragment.path!r} cannot be counted ({type(error).__name__})") from None
        return
    held, rows = [], 0
    for group in groups:
        held.append(group.id)
        rows += group.num_rows
        if rows >= PIECE_ROWS:
            yield fragment.subset(row_group_ids=held), rows
            held, rows = [], 0
    if held:
        yield fragment.subset(row_group_ids=held), rows


def _require_schema(fragment: Any, schema: Any) -> None:
    own = fragment.physical_schema
    for field in schema:
        if field.name not in own.names:
            raise ValueError(f"{fragment.path!r} has no column {field.name!r}, which another of the files has")
        kind = own.field(field.name).type
        if kind != field.type:
            raise ValueError(
                f"column {field.name!r} of {fragment.path!r} is of type {kind}, and of another file {field.type}: "
                "write the files with one type"
            )


class _Files:
    """Sizes and times of files, by which a change is noticed."""

    def __init__(self, dataset: Any):
        self._filesystem, self._paths = dataset.filesystem, list(dataset.files)
        self._known = self._now()

    def _now(self) -> list[tuple]:
        infos: list[Any] = []
        with contextlib.suppress(OSError):
            infos = self._filesystem.get_file_info(self._paths)
        return [(info.path, info.size, info.mtime_ns) for info in infos]

    def require_same(self) -> None:
        now = self._now()
        if now == self._known:
            return
        changed = sorted({path for path, *_ in set(self._known) ^ set(now)})
        raise TableChangedError(
            f"{', '.join(changed[:3]) or 'a file'} changed since the table was opened: a run is about one table. What "
            "was charged stays charged; open it anew for another run"
        )
