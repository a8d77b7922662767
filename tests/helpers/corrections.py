"""How far from the logistic law the corrections of `numpyro_dp.kernels.barker_correction` leave a test."""

import math

import numpy as np
from scipy.special import expit

from benchmarks.barker_corrections import acceptance
from numpyro_dp.kernels.barker_correction import Correction


def tv_error(correction: Correction) -> float:
    """Total variation distance between ``N(0, variance) + V`` and the logistic law: half the integral of both signs."""
    x, variance = np.linspace(0, 40, 6001), correction.variance + correction.gaussian_variance
    offsets = np.stack([x[:, None] - correction.atoms, x[:, None] + correction.atoms])
    densities = np.exp(-(offsets**2) / (2 * variance)).mean(0) / math.sqrt(2 * math.pi * variance)
    return float(np.trapezoid(np.abs(densities @ correction.weights - expit(x) * expit(-x)), x))


def logit_error(correction: Correction) -> float:
    """Largest violation of detailed balance, ``|logit F(x) - x|``, over ``|x| <= 6``."""
    x = np.linspace(0, 6, 901)
    lower = acceptance(correction, -x)
    return float(np.abs(np.log1p(-lower) - np.log(lower) - x).max())
