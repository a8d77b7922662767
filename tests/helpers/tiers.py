"""Which parameters of a test run every day, and which nightly; see CONTRIBUTING.md."""

from collections.abc import Collection, Iterable
from typing import Any

import numpyro
import pytest

NIGHTLY = pytest.mark.nightly


def some_every_day(values: Iterable[Any], everyday: Collection[Any]) -> list:
    """All values as parameters, a tuple as several; others than `everyday`, which run the same code, nightly."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else [value]), marks=() if value in everyday else NIGHTLY)
        for value in values
    ]


single_every_day = pytest.mark.parametrize(
    "precision", some_every_day(["float32", "float64"], ["float32"]), indirect=True
)
"""In both precisions, as the fixture has it; in double precision nightly."""

needs_support = pytest.mark.skipif(
    tuple(map(int, numpyro.__version__.split(".")[:2])) < (0, 22),
    reason="before 0.22 NumPyro gives outcomes a density that a law cannot have",
)
