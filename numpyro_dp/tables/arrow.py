"""PyArrow, which is not always installed, and what all readers of its columns ask of it."""

from typing import Any


def arrow() -> Any:
    """PyArrow.

    :raises ImportError: with the way out, if it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.csv
        import pyarrow.dataset
    except ImportError as error:
        raise ImportError("tables in files are read by PyArrow: pip install 'numpyro_dp[tables]'") from error
    return pyarrow


def is_text(kind: Any) -> bool:
    """Whether a type of Arrow's is one of texts."""
    types = arrow().types
    return types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view"


def plain(column: Any) -> Any:
    """In one chunk, without a dictionary."""
    pa = arrow()
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
