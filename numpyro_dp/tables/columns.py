"""From columns of Arrow to a model's arrays, row by row.

What is made of a row depends on that row alone, so a row that cannot be made sense of is no error, whose text would
tell of it: it says nothing (`missing`), and its place stays empty.
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.tables.arrow import arrow, is_text, plain
from numpyro_dp.tables.texts import numbers_of_texts, times_of_texts

_DAY = 86_400e6
"""In microseconds."""
NUMBERS, LEVELS, MISSING, DAYS, UNIT, COMPUTED = "numbers", "levels", "missing", "days", "unit", "computed"


class ColumnSpec(NamedTuple):
    """How an argument of a model is made of a table's columns.

    :ivar names: of the columns.
    :ivar kind: numbers as they are; the position of each value among `levels`; whether a value is missing; days since
        `origin`; the number of the row's unit; or what `function` makes of the columns, of that the entry `part`.
    :ivar dtype: name of the array's.
    :ivar is_matrix: whether the array has an axis of columns.
    :ivar fill: in the place of missing values; None where a row without one says nothing.
    """

    names: tuple[str, ...]
    kind: str
    dtype: str
    is_matrix: bool = False
    levels: tuple = ()
    fill: float | None = None
    origin: str = ""
    function: Callable[[Any], Mapping[str, np.ndarray]] | None = None
    part: str = ""


def numbers_of(names: Sequence[str], types: Sequence[Any], is_matrix: bool) -> ColumnSpec:
    """For columns of numbers.

    :raises ValueError: if one holds something else, with the way out.
    """
    pa = arrow()
    kinds: set[np.dtype] = set()
    for name, kind in zip(names, types, strict=True):
        value = kind.value_type if pa.types.is_dictionary(kind) else kind
        if is_text(value):
            raise ValueError(
                f"column {name!r} holds texts. Which there may be must be public: name them, "
                f"`table[{name!r}].levels(['a', 'b'])`, and the model gets 0, 1, ...; any other counts as missing"
            )
        if pa.types.is_date(value) or pa.types.is_timestamp(value):
            raise ValueError(
                f"column {name!r} holds dates: `table[{name!r}].days_since('2020-01-01')` makes numbers of them"
            )
        if pa.types.is_boolean(value) or pa.types.is_integer(value) or pa.types.is_floating(value):
            kinds.add(np.dtype(value.to_pandas_dtype()))
        elif pa.types.is_decimal(value):
            kinds.add(np.dtype(float))
        else:
            raise ValueError(
                f"column {name!r} is of type {value}, of which a model can make nothing: cast it to numbers"
            )
    dtype = jax.dtypes.canonicalize_dtype(np.result_type(*kinds))
    if len(kinds) > 1 and any(k.kind == "f" for k in kinds):
        dtype = jnp.result_type(float)
    return ColumnSpec(tuple(names), NUMBERS, np.dtype(dtype).name, is_matrix)


def decode(batch: Any, specs: Sequence[ColumnSpec]) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """An array for each of the specs, rows leading, and which of the rows count: those without a missing value.

    A row of which a library can make nothing counts for nothing, and no other row does.
    """
    try:
        return _decode(batch, specs)
    except Exception:
        if not batch.num_rows:  # no row is to blame
            raise
    if batch.num_rows > 1:
        middle = batch.num_rows // 2
        first, counted = decode(batch.slice(0, middle), specs)
        second, others = decode(batch.slice(middle), specs)
        joined = tuple(np.concatenate(pair) for pair in zip(first, second, strict=True))
        return joined, np.concatenate([counted, others])
    empty, _ = decode(batch.slice(0, 0), specs)
    return tuple(np.zeros((1, *array.shape[1:]), array.dtype) for array in empty), np.zeros(1, bool)


def _decode(batch: Any, specs: Sequence[ColumnSpec]) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    counts = np.ones(batch.num_rows, bool)
    arrays = []
    computed: dict[Any, Mapping[str, np.ndarray]] = {}
    for spec in specs:
        if spec.function is not None:
            if spec.function not in computed:
                computed[spec.function] = spec.function(batch)
            arrays.append(computed[spec.function][spec.part])
            continue
        columns = []
        for name in spec.names:
            values, missing = _VALUES[spec.kind](batch.column(name), spec)
            if missing is not None and spec.fill is not None:  # a value that is none of the levels is not missing
                absent, _ = _is_missing(batch.column(name), spec)
                values[missing & absent] = spec.fill
                missing = missing & ~absent
            if missing is not None:
                counts &= ~missing
            columns.append(values)
        arrays.append(np.stack(columns, 1) if spec.is_matrix else columns[0])
    return tuple(arrays), counts


def _numbers(column: Any, spec: ColumnSpec) -> tuple[np.ndarray, np.ndarray | None]:
    pa = arrow()
    column = plain(column)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    elif is_text(column.type):
        column = numbers_of_texts(column)
    missing = _missing(column, of_nan=spec.fill is not None)
    if column.null_count:
        column = column.fill_null(False if pa.types.is_boolean(column.type) else 0)
    values = column.to_numpy(zero_copy_only=False)
    with np.errstate(all="ignore"):  # what is too large for the dtype is not told
        found = values.astype(spec.dtype, copy=missing is not None)
    if values.dtype.kind in "iu" and found.dtype.kind in "iu" and found.dtype != values.dtype:
        fits = np.iinfo(found.dtype)
        too_large = (values < fits.min) | (values > fits.max)
        if too_large.any():
            missing = too_large if missing is None else missing | too_large
    return found, missing


def _levels(column: Any, spec: ColumnSpec) -> tuple[np.ndarray, np.ndarray | None]:
    pa = arrow()
    column, levels = plain(column), pa.array(list(spec.levels))
    if is_text(column.type) and not is_text(levels.type):  # 1 and 1.0 are one level
        column = numbers_of_texts(column)
    codes = pa.compute.index_in(column, levels.cast(column.type))
    missing = _missing(codes)
    return codes.fill_null(0).to_numpy(zero_copy_only=False).astype(spec.dtype), missing


def _is_missing(column: Any, spec: ColumnSpec) -> tuple[np.ndarray, None]:
    missing = _missing(plain(column), of_nan=True)
    return (np.zeros(len(column), bool) if missing is None else missing), None


def _days(column: Any, spec: ColumnSpec) -> tuple[np.ndarray, np.ndarray | None]:
    pa = arrow()
    column = plain(column)
    column = times_of_texts(column) if is_text(column.type) else column.cast(pa.timestamp("us"), safe=False)
    origin = np.datetime64(datetime.datetime.fromisoformat(spec.origin), "us").astype(np.int64)
    missing = _missing(column)
    # Of whole numbers NumPy's difference of two times may be too large.
    since = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False).astype(float) - float(origin)
    return (since / _DAY).astype(spec.dtype), missing


def _unit(column: Any, spec: ColumnSpec) -> Any:
    raise ValueError(
        f"column {spec.names[0]!r} says whose a row is, and the kernel was not told: give it `unit=`, the name of the "
        "model's argument or of the column"
    )


_VALUES = {NUMBERS: _numbers, LEVELS: _levels, MISSING: _is_missing, DAYS: _days, UNIT: _unit}


def _missing(column: Any, of_nan: bool = False) -> np.ndarray | None:
    pa = arrow()
    of_nan = of_nan and pa.types.is_floating(column.type)
    if not column.null_count and not of_nan:
        return None
    return column.is_null(nan_is_null=of_nan).to_numpy(zero_copy_only=False)
