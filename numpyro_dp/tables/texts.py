"""Columns of texts, of which each value is read by itself: as CSV files and columns of Python's objects have them.

Whoever reads such a column lets its values decide of which type all of them are. One row would then change what others
say: beside `5.5` a whole number has single precision, beside `abc` an empty cell is a text and not missing. So here all
are texts, and whether one is a number or a date is decided for each alone. One that is neither is missing.
"""

import datetime
import decimal
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from numpyro_dp.tables.arrow import arrow

_NUMBER = r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?$"
_DATE = r"^\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d{1,6})?)?)?$"


def texts_of_bytes(column: Any) -> Any:
    """Texts in UTF-8; those that are none are null."""
    pa = arrow()
    try:
        return column.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.array([_decoded(value) for value in column.to_pylist()], pa.large_string())


def texts_of_objects(values: Iterable[Any]) -> Any:
    """Of Python's objects: texts as they are, numbers and dates as they are written; null for all else."""
    return arrow().array([_written(value) for value in values], arrow().large_string())


def numbers_of_texts(column: Any) -> Any:
    """Double precision; null for what is no number. True and false are 1 and 0."""
    pa, compute = arrow(), arrow().compute
    texts = compute.ascii_lower(compute.ascii_trim_whitespace(column))
    for word, digit in (("true", "1"), ("false", "0")):
        texts = compute.if_else(compute.equal(texts, word), pa.scalar(digit, texts.type), texts)
    is_number = compute.match_substring_regex(texts, _NUMBER)
    return compute.if_else(is_number, texts, pa.scalar(None, texts.type)).cast(pa.float64())


def times_of_texts(column: Any) -> Any:
    """Dates and times as ISO 8601 has them, without a zone; null for what is none."""
    pa, compute = arrow(), arrow().compute
    texts = compute.ascii_trim_whitespace(column)
    is_date = compute.match_substring_regex(texts, _DATE)
    texts = compute.if_else(is_date, texts, pa.scalar(None, texts.type))
    try:
        return texts.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:  # the 30th of February, say
        return pa.array([_time(text) for text in texts.to_pylist()], pa.timestamp("us"))


def _decoded(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _time(text: str | None) -> datetime.datetime | None:
    try:
        return None if text is None else datetime.datetime.fromisoformat(text)
    except ValueError:
        return None


def _written(value: Any) -> str | None:
    """Whatever the object does or says: an error would tell of it."""
    try:
        if isinstance(value, str):
            return _decoded(value.encode(errors="surrogatepass"))
        if isinstance(value, float | np.floating):
            return repr(float(value)) if math.isfinite(value) else None
        if isinstance(value, bool | int | np.integer | np.bool_ | decimal.Decimal):
            return str(value)
        if isinstance(value, datetime.datetime):
            value = value.astimezone(datetime.UTC).replace(tzinfo=None) if value.tzinfo else value
            return value.isoformat(" ") if value == value else None  # pandas' missing time is not
        return value.isoformat() if isinstance(value, datetime.date) else None
    except Exception:
        return None
