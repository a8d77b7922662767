"""What models of `tests/model/test_outside.py` read from another module."""

import numpy as np

AGES = [31.0, 45.0, 52.0, 28.0, 39.0, 61.0, 47.0]
KNOTS = np.linspace(0.0, 1.0, 5)
WEIGHT = 2.0


def mean_age():
    return sum(AGES) / len(AGES)


def basis(x):
    return WEIGHT * np.sum(KNOTS) * x


class Settings:
    def __init__(self, **given):
        vars(self).update(given)
