"""What does Gaussian noise of a fixed variance cost a chain, and how does the test's correction change that?

Random walks on a grid, their acceptance probabilities exact: Barker's and Metropolis's test without noise, and with
noise of variance C the nearly logistic and the exponential correction. Prints a markdown table: the probability of
accepting a proposal of equal density, and for a normal target the mean acceptance, the spectral gap (its inverse is
the number of iterations to forget) and the total variation distance of the stationary law from the target, for two
steps (in standard deviations of the target); then the gap for the best step of each test.

    python benchmarks/barker_corrections.py
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
from scipy.special import expit, log_ndtr, ndtr

from numpyro_dp.kernels.barker_correction import (
    Correction,
    ExponentialCorrection,
    _mixture_cdf,
    exponential_correction,
    logistic_correction,
)

STEPS = (0.5, 1.0)
Acceptance = Callable[[np.ndarray], np.ndarray]


def acceptance(correction: Correction | ExponentialCorrection, log_ratio: np.ndarray | float) -> np.ndarray:
    """Probability that ``log_ratio + N(0, variance) + V > 0``: float64, with small relative error at small ones."""
    if isinstance(correction, Correction):  # the distribution function itself, since its law is symmetric
        variance = correction.variance + correction.gaussian_variance
        return _mixture_cdf(log_ratio, correction.atoms, variance) @ correction.weights
    x, s = np.asarray(log_ratio, np.float64), math.sqrt(correction.variance)
    return ndtr(x / s - s / 2) + np.exp(x + log_ndtr(-x / s - s / 2))


def chain(accepts: Acceptance, step: float) -> tuple[float, float, float]:
    """Mean acceptance, spectral gap and stationary error of a random walk towards a standard normal law."""
    x = np.linspace(-6, 6, 121)
    target = np.exp(-(x**2) / 2)
    target /= target.sum()
    proposal = np.exp(-(((x[:, None] - x) / step) ** 2) / 2)
    proposal /= proposal.sum(1).max()  # symmetric; what would leave the grid stays
    transition = proposal * accepts((x[:, None] ** 2 - x**2) / 2)
    accepted = (target @ transition).sum()
    np.fill_diagonal(transition, 0)
    np.fill_diagonal(transition, 1 - transition.sum(1))
    eigenvalues = np.sort(np.abs(np.linalg.eigvals(transition)))
    equations = transition.T - np.eye(len(x))
    equations[0] = 1
    stationary = np.linalg.solve(equations, np.eye(len(x))[0])
    return accepted, 1 - eigenvalues[-2], np.abs(stationary - target).sum() / 2


def main() -> None:
    tests: dict[str, Acceptance] = {
        "Metropolis, no noise": lambda x: np.exp(np.minimum(x, 0)),
        "Barker, no noise": expit,
        **{f"logistic, C = {c:g}": partial(acceptance, logistic_correction(c)) for c in (0.25, 1.0, 2.0, 3.0)},
        **{f"exponential, C = {c:g}": partial(acceptance, exponential_correction(c)) for c in (0.25, 1.0, 2.0, 3.0)},
    }
    columns = ["test", "accepts at 0"]
    for step in STEPS:
        columns += [f"accepts, step {step:g}", f"gap, step {step:g}", f"stationary TV, step {step:g}"]
    columns += ["best gap", "at step"]
    print("| " + " | ".join(columns) + " |")
    print("|---" * len(columns) + "|")
    for name, accepts in tests.items():
        cells = [name, f"{float(accepts(np.array(0.0))):.4f}"]
        for step in STEPS:
            accepted, gap, error = chain(accepts, step)
            cells += [f"{accepted:.3f}", f"{gap:.4f}", f"{error:.1e}" if error > 1e-12 else "0"]
        best, at = max((chain(accepts, step)[1], step) for step in np.arange(1.5, 3.05, 0.1))
        print("| " + " | ".join([*cells, f"{best:.4f}", f"{at:.1f}"]) + " |")


if __name__ == "__main__":
    main()
