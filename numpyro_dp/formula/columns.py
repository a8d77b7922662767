"""Columns of a data frame, as a formula can use them, by what is public about them.

Each value is coded by itself. One that makes no sense (missing, not among the levels) is no error, whose text would
tell of it: its row says nothing, and a value that does no harm stands in its place. So what comes after never meets
anything but numbers within public ranges and public levels.
"""

import datetime
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST_COUNT = 10**9


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
            days = np.datetime64(self.high, "D") - np.datetime64(self.low, "D")
            return 0.0, float(days / np.timedelta64(1, "D"))
        return float(self.low), float(self.high)


@dataclass(frozen=True)
class Levels:
    """A column of categories."""

    values: tuple


Public = Range | Levels


def describe(ranges: Mapping[str, Sequence] | None, levels: Mapping[str, Sequence] | None) -> dict[str, Public]:
    """What is public, by name of the column.

    :raises ValueError: if a range is none, a level stands twice, or a column has both.
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
        values = tuple(given.tolist() if isinstance(given, np.ndarray) else given)
        if name in found:
            raise ValueError(
                f"column {name!r} is in both `ranges` and `levels`: numbers have a range, categories levels"
            )
        if len(set(values)) != len(values) or len(values) < 2:
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
            f"levels={{{unknown[0]!r}: [...]}} for a category; `glm` knows those of columns of true and false"
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
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"the data have no column {missing[0]!r}; they have {', '.join(map(str, known))}")
    found = {}
    for name in names:
        column = data[name]
        series = column.to_pandas() if hasattr(column, "to_pandas") else pd.Series(column)
        found[name] = series.reset_index(drop=True)
    return found


def code(name: str, series: Any, column: Public) -> tuple[np.ndarray, np.ndarray]:
    """Numbers within the range or positions of levels, and which rows have none (there the values stand for nothing).

    :raises TypeError: if the column's type is not that of numbers, dates or of the levels.
    """
    if isinstance(column, Levels):
        return _positions(name, series, column)
    values = _days(series, column) if column.of_dates else numbers(name, series)
    low, high = column.ends
    missing = ~np.isfinite(values)
    return np.where(missing, (low + high) / 2, np.clip(values, low, high)), missing


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings, whose text would tell of rows."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def numbers(name: str, series: Any) -> np.ndarray:
    """A column of numbers, or of true and false; NaN where there is none."""
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    if not (is_numeric_dtype(series.dtype) or is_bool_dtype(series.dtype)):
        raise TypeError(
            f"column {name!r} is of type {series.dtype}, not of numbers. Give its `levels` if it is a category, or "
            f"dates as the ends of its range if it is one, or make numbers of it: pd.to_numeric(data[{name!r}], "
            "errors='coerce')"
        )
    return series.to_numpy(dtype=float, na_value=np.nan)


def _days(series: Any, column: Range) -> np.ndarray:
    import pandas as pd

    with quietly():  # of dates whose format is not clear
        dates = pd.to_datetime(series, errors="coerce", utc=True).dt.tz_localize(None)
    return ((dates - pd.Timestamp(column.low)) / pd.Timedelta(days=1)).to_numpy(dtype=float, na_value=np.nan)


def _positions(name: str, series: Any, column: Levels) -> tuple[np.ndarray, np.ndarray]:
    import pandas as pd
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    are_numbers = is_numeric_dtype(series.dtype) or is_bool_dtype(series.dtype)
    if are_numbers and all(isinstance(value, str) for value in column.values):
        raise TypeError(
            f"column {name!r} is of type {series.dtype}, but its levels are texts: {', '.join(column.values)}"
        )
    positions = pd.Index(list(column.values), dtype=object).get_indexer(series.astype(object))
    missing = positions < 0
    return np.where(missing, 0, positions), missing
