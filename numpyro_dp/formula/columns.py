"""Columns of a data frame, as a formula can use them, by what is public about them.

Each value is coded by itself: neither other values nor the column's type, which one value may decide, change what it
becomes. One that makes no sense (missing, not among the levels, of a type that none should have) is no error, whose
text would tell of it: its row says nothing, and a value that does no harm stands in its place. So what comes after
never meets anything but numbers within public ranges and public levels.
"""

import contextlib
import datetime
import decimal
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST_COUNT = 10**9
_LARGEST_WHOLE = 2**53
"""Floats beyond it stand for several whole numbers; and a column of whole numbers becomes one of floats where a value
is missing."""


@dataclass(frozen=True)
class Range:
    """A column of numbers, or of dates, of which days since `low` are made. Values outside are moved to its ends."""

    low: Any
    high: Any

    @property
    def of_dates(self) -> bool:
        return isinstance(self.low, str | datetime.date | np.datetime64)

    @property
    def ends(self) -> tuple[float, float]:
        if self.of_dates:
            return 0.0, _day(self.high) - _day(self.low)
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
        if isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"ranges[{name!r}] must be a pair (lowest, highest), got {pair!r}")
        column = Range(*pair)
        low, high = column.ends
        if not (np.isfinite([low, high]).all() and low < high):
            raise ValueError(f"ranges[{name!r}] must be finite and rise, got {pair!r}")
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
                f"levels[{name!r}]: {values[keys.index(None)]!r} is no level. Levels are texts, numbers, dates or true "
                "and false; put a letter before whole numbers above 2**53, in the table, too"
            )
        if len(set(keys)) != len(keys) or len(keys) < 2:
            raise ValueError(f"levels[{name!r}] must be two or more values, each once, got {list(values)}")
        found[name] = Levels(values)
    return found


def require_public(names: Sequence[str], public: Mapping[str, Public]) -> None:
    """:raises ValueError: if it is not said of each of the columns what is public about it."""
    unknown = [name for name in names if name not in public]
    if unknown:
        raise ValueError(
            f"nothing is public about {', '.join(map(repr, unknown))}. Say what values there may be, from the codebook "
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
    """Of the columns of a pandas, Polars or Arrow table, or of a mapping."""
    if isinstance(data, Mapping):
        return list(data)
    return list(data.column_names if type(data).__module__.startswith("pyarrow") else data.columns)


def read(data: Any, names: Sequence[str]) -> dict[str, Any]:
    """These columns as pandas Series.

    :param data: a pandas, Polars or Arrow table, or a mapping from names to arrays.
    :raises ValueError: if one is missing.
    """
    import pandas as pd

    known = names_of(data)
    missing = [name for name in names if known.count(name) != 1]
    if missing:
        has = "have several columns" if missing[0] in known else "have no column"
        raise ValueError(f"the data {has} {missing[0]!r}; they have {', '.join(map(str, known))}")
    found = {}
    with quietly():
        for name in names:
            column = data[name]
            series = column.to_pandas() if hasattr(column, "to_pandas") else pd.Series(column)
            found[name] = series.reset_index(drop=True)
    return found


def code(series: Any, column: Public) -> tuple[np.ndarray, np.ndarray]:
    """Numbers within the range or positions of levels, and which rows have none: there the values stand for nothing."""
    if isinstance(column, Levels):
        positions = _positions(series, column)
        return np.maximum(positions, 0), positions < 0
    values = _days(series) - _day(column.low) if column.of_dates else numbers(series)
    low, high = column.ends
    missing = ~np.isfinite(values)
    return np.where(missing, (low + high) / 2, np.clip(values, low, high)), missing


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, whose text would tell of rows."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def numbers(series: Any) -> np.ndarray:
    """A column of numbers, of true and false, or of texts of such; NaN where there is none."""
    with quietly():
        if getattr(series.dtype, "kind", "O") in "biuf":  # also of columns that may hold missing values
            return series.to_numpy(dtype=float, na_value=np.nan)
        return _one_by_one(_number, series)


def _one_by_one(read_one: Callable[[Any], float], series: Any) -> np.ndarray:
    """Each value by itself, as a number; texts, which come again and again, once each."""
    read_text = functools.cache(read_one)
    values = series.astype(object)
    return np.array([(read_text if type(value) is str else read_one)(value) for value in values], float)


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


def _days(series: Any) -> np.ndarray:
    """Days since 1970; NaN where there is no date."""
    with quietly():
        if getattr(series.dtype, "kind", "O") != "M":
            return _one_by_one(_day, series)
        has_zone = getattr(series.dt, "tz", None) is not None
        return _since_1970((series.dt.tz_convert("UTC").dt.tz_localize(None) if has_zone else series).to_numpy())


def _since_1970(dates: Any) -> Any:
    """In days, by way of seconds: nanoseconds as integers would overflow between two centuries."""
    return np.where(np.isnat(dates), np.nan, dates.astype("datetime64[s]").astype(np.int64) / 86_400)


def _day(value: Any) -> float:
    """Days since 1970 of a date, a time, or a text as ISO 8601 has them; NaN, if it is none."""
    with contextlib.suppress(ArithmeticError, TypeError, ValueError):
        if isinstance(value, str):
            value = datetime.datetime.fromisoformat(value.strip())
        if isinstance(value, datetime.datetime):
            whole_seconds = datetime.datetime(*value.utctimetuple()[:6])
            return (whole_seconds - datetime.datetime(1970, 1, 1)).total_seconds() / 86_400
        if isinstance(value, datetime.date):
            return float((value - datetime.date(1970, 1, 1)).days)
        if isinstance(value, np.datetime64):
            return float(_since_1970(value))
    return np.nan


def _positions(series: Any, column: Levels) -> np.ndarray:
    """Of each value among the levels; -1, if it is none."""
    places = {_key(value): place for place, value in enumerate(column.values)}
    with quietly():
        return _one_by_one(lambda value: places.get(_key(value), -1), series).astype(np.int64)


def _key(value: Any) -> str | None:
    """The same for the same level, whatever the type that its column was read with; None for what is no level.

    Where one value is missing or is a text, all others of a column may be read as floats or as texts.
    """
    number = _number(value)
    if isinstance(value, _NUMBERS) or not np.isnan(number):
        if not abs(number) < _LARGEST_WHOLE:
            return None
        return str(int(number)) if number == int(number) else f"{number:.12g}"
    if not np.isnan(day := _day(value)):
        return f"day {day!r}"
    text = value.strip() if isinstance(value, str) else ""
    return text if text.lower() not in ("", "nan") else None
