"""Mistakes that tests plant, and must notice."""

import numpy as np

from numpyro_dp.privacy.noise import NoiseSource


def noise_divided_by(divisor):
    """`NoiseSource.draw` with a mistake."""
    exact = NoiseSource.draw

    def draw(self, *arguments):
        hi, lo = exact(self, *arguments).astype(np.int64)
        steps = ((hi << 24) + lo) // divisor
        return np.stack([steps >> 24, steps & (2**24 - 1)]).astype(np.int32)

    return draw
