"""Sums of clipped rows as exact integers, and rows that try to break them."""

import numpy as np

from numpyro_dp.privacy.clipping import ClippedSum

HOSTILE = [0.0, -0.0, 1e-45, 1e-30, 0.5, -3.0, 1e6, -1e30, 3e38, np.inf, -np.inf, np.nan]


def steps(total: ClippedSum) -> np.ndarray:
    """The sum as exact integers."""
    return np.asarray(total.hi).astype(object) * 2**24 + np.asarray(total.lo).astype(object)
