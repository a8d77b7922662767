"""Columns of a data frame, as a formula can use them, by what is public about them.

Each value is coded by itself: neither other values nor the column's type, which one value may decide, change what it
becomes. One that is missing, or not what was said to be public (beyond the range, not among the levels, of a type
that none should have), is no error, whose text would tell of it: its row says nothing, and a value that does no harm
stands in its place. So what comes after never meets anything but numbers within public ranges and public levels.
"""

import contextlib
import datetime
import decimal
import difflib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LARGEST_COUNT = 10**9
_ROUNDING = 1e-6  # of a range: values of single precision reach so far beyond its ends
_NO_LEVELS = ("", "nan")
_LARGEST_WHOLE = 2**53
"""Floats beyond it stand for several whole numbers; and a column of whole numbers becomes one of floats where a value
is missing."""


@dataclass(frozen=True)
class Range:
    """A column of numbers, or of dates, of which days since `low` are made; the last day is one of them."""

    low: Any
    high: Any

    @property
    def of_dates(self) -> bool:
        return isinstance(self.low, str | datetime.date | np.datetime64)

    @property
    def ends(self) -> tuple[float, float]:
        if self.of_dates:
            try:
                return 0.0, _day(self.high) - _day(self.low)
            except ValueError:  # no ISO 8601
                return np.nan, np.nan
        return float(self.low), float(self.high)


@dataclass(frozen=True)
class Levels:
    """A column of categories."""

    values: tuple


Public = Range | Levels


def describe(ranges: Mapping[str, Sequence] | None, levels: Mapping[str, Sequence] | None) -> dict[str, Public]:
    """What is public, by name of the column.

    :raises ValueError: if a range is none, a level stands twice or cannot be told apart, or a column has both.
    """
    found: dict[str, Public] = {}
    for name, pair in (ranges or {}).items():
        if isinstance(pair, str) or not hasattr(pair, "__len__") or len(pair) != 2:
            raise ValueError(f"ranges[{name!r}] must be a pair (lowest, highest), got {pair!r}")
        column = Range(*pair)
        try:
            low, high = column.ends
        except (TypeError, ValueError):
            raise ValueError(f"ranges[{name!r}] must be two numbers, or two dates, got {pair!r}") from None
        with quietly():
            are_finite = np.isfinite(np.array([low, high, high - low], np.float32)).all()
        if not (are_finite and low < high):
            raise ValueError(f"ranges[{name!r}] must be finite and rise (of dates: as ISO 8601 has them), got {pair!r}")
        found[name] = column
    for name, given in (levels or {}).items():
        if isinstance(given, str | set | frozenset):
            raise ValueError(f"levels[{name!r}] must be a list, whose first is the reference, got {given!r}")
        values = tuple(given.tolist() if isinstance(given, np.ndarray) else given)
        if name in found:
            raise ValueError(
                f"column {name!r} is in both `ranges` and `levels`: numbers have a range, categories levels"
            )
        keys = [_key(value) for value in values]
        if None in keys:
            raise ValueError(
                f"levels[{name!r}]: {values[keys.index(None)]!r} is no level. Levels are texts, finite numbers, dates "
                "or true and false; put a letter before whole numbers above 2**53, in the table, too"
            )
        if len(set(keys)) != len(keys) or len(keys) < 2:
            raise ValueError(
                f"levels[{name!r}] must be two or more values, each once (1, 1.0, True and '1' are the same), got "
                f"{list(values)}"
            )
        found[name] = Levels(values)
    return found


def require_public(names: Sequence[str], public: Mapping[str, Public]) -> None:
    """:raises ValueError: if it is not said of each of the columns what is public about it."""
    unknown = [name for name in names if name not in public]
    if unknown:
        alike = difflib.get_close_matches(unknown[0], list(public), 1)
        raise ValueError(
            f"nothing is public about {', '.join(map(repr, unknown))}"
            f"{f' (did you mean {alike[0]!r}?)' if alike else ''}. Say what values there may be, from the codebook "
            f"and not from the table: ranges={{{unknown[0]!r}: (lowest, highest)}} for a number or a date, "
            f"levels={{{unknown[0]!r}: [...]}} for a category, which a column of true and false is, too: [False, True]"
        )


def made_up(public: Mapping[str, Public], num_rows: int) -> dict[str, np.ndarray]:
    """Columns that cover all that is public evenly: they give a formula's coding its levels, knots and centres."""
    rng = np.random.default_rng(0)

    def values(column: Public) -> np.ndarray:
        if isinstance(column, Range):
            return np.linspace(*column.ends, num_rows)
        return np.arange(num_rows) % len(column.values)

    return {name: values(column)[rng.permutation(num_rows)] for name, column in public.items()}


def names_of(data: Any) -> list[str]:
    """Of the columns of a pandas, Polars or Arrow table, or of a mapping.

    :raises TypeError: if it is none.
    """
    names = list(data) if isinstance(data, Mapping) else getattr(data, "column_names", getattr(data, "columns", None))
    if names is None or hasattr(data, "collect"):
        raise TypeError(
            f"data must be a pandas, Polars or Arrow table (collected, if it is lazy), or a dict of columns, got a "
            f"{type(data).__name__}"
        )
    return list(names)


def read(data: Any, names: Sequence[str]) -> dict[str, np.ndarray]:
    """These columns as arrays, each value as it is: of numbers, dates or objects.

    :param data: a pandas, Polars or Arrow table, or a mapping from names to arrays.
    :raises ValueError: if one is missing, or they are not of one length.
    """
    require_each_once(names, names_of(data))
    with quietly():
        found = {name: _array(data[name]) for name in names}
    others = [name for name in names if found[name].shape != (len(found[names[0]]),)]
    if others:
        raise ValueError(f"columns {names[0]!r} and {others[0]!r} are not of the same length")
    return found


def require_each_once(names: Sequence[str], known: Sequence[str]) -> None:
    """:raises ValueError: if a table of columns `known` has not each of `names`, once."""
    missing = [name for name in names if known.count(name) != 1]
    if missing:
        has = "have several columns" if missing[0] in known else "have no column"
        raise ValueError(f"the data {has} {missing[0]!r}; they have {', '.join(map(str, known))}")


def num_rows_of(data: Any) -> int:
    """:raises ValueError: if there are no columns."""
    if not (names := names_of(data)):
        raise ValueError("the data have no columns")
    return len(data[names[0]])


def _array(column: Any) -> np.ndarray:
    """Its values, without a type that one of them could decide: what is not of a plain type stays as it is."""
    if type(column).__module__.startswith("polars"):
        try:
            column = column.to_arrow()
        except Exception:  # whole numbers beyond 64 bits
            column = column.to_list()
    if type(column).__module__.startswith("pyarrow"):
        return _of_arrow(column)
    if getattr(getattr(column, "dtype", None), "tz", None) is not None and hasattr(column, "dt"):  # pandas
        column = column.dt.tz_convert("UTC").dt.tz_localize(None)
    if isinstance(getattr(column, "dtype", None), np.dtype) and column.dtype.kind in "biufM":
        if not isinstance(column, np.ma.MaskedArray):
            return np.asarray(column)
    elif getattr(column, "dtype", None) is not None and getattr(column.dtype, "kind", "O") in "biuf":
        return column.to_numpy(dtype=float, na_value=np.nan)  # of pandas, with values that may be missing
    if hasattr(column, "iloc"):
        with contextlib.suppress(Exception):  # of one value
            return column.astype(object).to_numpy()
        return _each(column.iloc.__getitem__, len(column))
    values = column.tolist() if isinstance(column, np.ma.MaskedArray) else list(column)
    return _each(values.__getitem__, len(values))


def _of_arrow(column: Any) -> np.ndarray:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(column.to_numpy(**({"zero_copy_only": False} if isinstance(column, pa.Array) else {})))
    if pa.types.is_date32(kind):
        column, kind = column.cast(pa.int32()).cast(pa.int64()), "D"
    elif pa.types.is_date64(kind):
        column, kind = column.cast(pa.int64()), "ms"
    elif pa.types.is_timestamp(kind):  # of UTC, whatever the zone
        column, kind = column.cast(pa.int64()), kind.unit
    elif pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        return np.concatenate([np.zeros(0, object), *map(_of_codes, chunks)])
    else:
        return _each(lambda k: column[k].as_py(), len(column))
    numbers = column.fill_null(np.iinfo(np.int64).min)
    return np.asarray(numbers.to_numpy()).view(f"datetime64[{kind}]")


def _of_codes(column: Any) -> np.ndarray:
    """Of an array of texts, or of codes: each different value is read once."""
    import pyarrow as pa

    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    different = _each(lambda k: encoded.dictionary[k].as_py(), len(encoded.dictionary))
    places = encoded.indices.cast(pa.int64()).fill_null(len(different))  # codes of 8 bits may have no room for it
    return np.append(different, None)[np.asarray(places)]


def _each(get: Callable[[int], Any], length: int) -> np.ndarray:
    """An array of objects; None for what cannot be got."""
    found = np.full(length, None, object)
    for k in range(length):
        with contextlib.suppress(Exception):
            found[k] = get(k)
    return found


class Coded(NamedTuple):
    """A column as a formula can use it, value by value.

    :ivar values: numbers within the range, or positions of levels.
    :ivar missing: where there is none; the value stands for nothing.
    :ivar outside: where there is one, but not what was said to be public; the value stands for nothing.
    """

    values: np.ndarray
    missing: np.ndarray
    outside: np.ndarray


def code(values: np.ndarray, column: Public) -> Coded:
    """Each value by itself."""
    missing = are_missing(values)
    if isinstance(column, Levels):
        positions = _positions(values, column)
        return Coded(np.maximum(positions, 0), missing, ~missing & (positions < 0))
    found = _days(values) - _day(column.low) if column.of_dates else numbers(values)
    low, high = column.ends
    beyond = 1.0 if column.of_dates else _ROUNDING * (high - low)  # times of the last day belong to it
    with quietly():
        is_within = (found >= low - _ROUNDING * (high - low)) & (found < high + beyond)
    harmless = np.where(is_within, np.clip(found, low, high), (low + high) / 2)
    return Coded(harmless, missing, ~missing & ~is_within)


def are_missing(values: np.ndarray) -> np.ndarray:
    """Where there is no value: None, NaN and what stands for it, an empty text."""
    if values.dtype.kind in "fcmM":
        return values != values
    if values.dtype.kind in "biu":
        return np.zeros(len(values), bool)
    with quietly():
        return _one_by_one(_is_missing, values) > 0


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in _NO_LEVELS
    if value is None or type(value).__name__ == "NAType":  # of pandas, which is neither equal to anything nor not
        return True
    return bool(value != value)


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, whose text would tell of rows."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def numbers(values: np.ndarray) -> np.ndarray:
    """A column of numbers, of true and false, or of texts of such; NaN where there is none."""
    with quietly():
        return values.astype(float) if values.dtype.kind in "biuf" else _one_by_one(_number, values)


def _one_by_one(read_one: Callable[[Any], float], values: np.ndarray) -> np.ndarray:
    """Each value by itself, as a number; texts, which come again and again, once each."""

    def careful(value: Any) -> float:
        try:
            return float(read_one(value))
        except Exception:  # it would tell of the value
            return np.nan

    of_text = functools.cache(careful)
    if values.dtype.kind != "O":
        different, places = np.unique(values, return_inverse=True)
        return np.array([careful(value) for value in different], float)[places.reshape(-1)]
    return np.array([(of_text if type(value) is str else careful)(value) for value in values], float)


_TRUTHS = {"true": True, "false": False}  # as texts, too, where a column has other ones
_NUMBERS = (bool, int, float, complex, decimal.Decimal, np.bool_, np.number)


def _number(value: Any) -> float:
    """NaN, if it is none."""
    if isinstance(value, complex | np.complexfloating):  # all are, in a column with one
        value = value.real if value.imag == 0 else np.nan
    if isinstance(value, str):
        value = _TRUTHS.get(value.strip().lower(), value)
    if isinstance(value, (str, *_NUMBERS)):
        with contextlib.suppress(ArithmeticError, TypeError, ValueError):
            return float(value)  # type: ignore[arg-type]
    return np.nan


def _days(values: np.ndarray) -> np.ndarray:
    """Days since 1970; NaN where there is no date."""
    with quietly():
        return _since_1970(values) if values.dtype.kind == "M" else _one_by_one(_day, values)


_PER_SECOND = {"ms": 10**3, "us": 10**6, "ns": 10**9, "ps": 10**12, "fs": 10**15, "as": 10**18}
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "D": 86_400, "W": 7 * 86_400}
_YEARS = 20_000  # as far as dates can be told apart where years are counted


def _since_1970(dates: np.ndarray) -> np.ndarray:
    """In days, by whole seconds. NumPy's own conversions fail where another unit cannot hold a date."""
    unit, count = np.datetime_data(dates.dtype)
    counted = dates.view(np.int64)
    if unit in ("Y", "M"):
        most = _YEARS * (12 if unit == "M" else 1) // count
        days = np.clip(counted, -most, most).view(dates.dtype).astype("datetime64[D]").view(np.int64).astype(float)
    elif unit in _PER_SECOND and count == 1:
        days = (counted // _PER_SECOND[unit]) / 86_400
    else:
        days = np.floor(counted * (count * _SECONDS.get(unit, 1) / _PER_SECOND.get(unit, 1))) / 86_400
    return np.where(np.isnat(dates), np.nan, days)


def _day(value: Any) -> float:
    """Days since 1970 of a date, a time, or a text as ISO 8601 has them; NaN, if it is none."""
    if isinstance(value, str) and not value.strip().isdigit():  # digits are a number to who reads a file
        value = datetime.datetime.fromisoformat(value.strip())
    if hasattr(value, "to_datetime64"):  # of pandas, in UTC
        value = value.to_datetime64()
    if isinstance(value, np.datetime64):
        return float(_since_1970(np.array([value]))[0])
    if isinstance(value, datetime.datetime):
        since = value.replace(tzinfo=None) - datetime.datetime(1970, 1, 1) - (value.utcoffset() or datetime.timedelta())
        return since // datetime.timedelta(seconds=1) / 86_400
    if isinstance(value, datetime.date):
        return float((value - datetime.date(1970, 1, 1)).days)
    return np.nan


def _positions(values: np.ndarray, column: Levels) -> np.ndarray:
    """Of each value among the levels; -1, if it is none."""
    places = {_key(value): place for place, value in enumerate(column.values)}
    with quietly():
        found = _one_by_one(lambda value: places.get(_key(value), -1), values)
    return np.nan_to_num(found, nan=-1).astype(np.int64)


def _key(value: Any) -> str | None:
    """The same for the same level, whatever the type that its column was read with; None for what is no level.

    Where one value is missing or is a text, all others of a column may be read as floats or as texts.
    """
    number = _number(value)
    if isinstance(value, _NUMBERS) or not np.isnan(number):
        if not abs(number) < _LARGEST_WHOLE:
            return None
        return str(int(number)) if number == int(number) else f"{number:.6g}"  # of single precision, too
    with contextlib.suppress(Exception):
        if not np.isnan(day := _day(value)):
            return f"day {day!r}"
    text = value.strip() if isinstance(value, str) else ""
    return text if text.lower() not in _NO_LEVELS else None
