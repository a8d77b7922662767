"""How far draws are from the exact posterior, and whether chains agree.

All of it looks at finished draws and exact posteriors, which only experiments with known tables have.
"""

from collections.abc import Callable

import arviz
import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer.util import compute_log_probs
from scipy.stats import chisquare


def squared_mmd(x: np.ndarray, y: np.ndarray, *, width: float | None = None, seed: int = 0, most: int = 2000) -> float:
    """Squared maximum mean discrepancy of two samples, without bias: it may be negative (Gretton et al. 2012).

    :param x, y: draws, shapes (number, d) and (number, d); of more than `most` a random subset.
    :param width: of the Gaussian kernel ``exp(-|a - b|^2 / (2 width^2))``. Default, as in the papers: the median
        distance between 500 draws of one sample and 500 of the other (drawn with replacement, by `seed`).
    """
    rng = np.random.default_rng([13, seed])
    x, y = (_some(rng, np.asarray(points, float), most) for points in (x, y))
    if width is None:
        some = [points[rng.choice(len(points), 500)] for points in (x, y)]
        width = float(np.sqrt(np.median(_squares(*some))))
    if not width > 0:
        return 0.0  # all points are one

    def kernel(a, b):
        return np.exp(-_squares(a, b) / (2 * width**2))

    def within(points):
        return (kernel(points, points).sum() - len(points)) / (len(points) * (len(points) - 1))

    return float(within(x) + within(y) - 2 * kernel(x, y).mean())


def mmd(x: np.ndarray, y: np.ndarray, *, width: float | None = None, seed: int = 0, most: int = 2000) -> float:
    """Root of `squared_mmd`, with its sign: negative values say that the samples cannot be told apart."""
    square = squared_mmd(x, y, width=width, seed=seed, most=most)
    return float(np.copysign(np.sqrt(abs(square)), square))


def _some(rng, points, most):
    return points[rng.choice(len(points), min(most, len(points)), replace=False)]


def _squares(a, b):
    centre = b.mean(0)
    a, b = a - centre, b - centre
    return np.maximum((a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T, 0.0)


def mean_error(draws: np.ndarray, exact: np.ndarray) -> float:
    """Root mean square over parameters of the difference of means, in standard deviations of the exact posterior.

    :param draws, exact: shapes (number, d) and (number, d).
    """
    return float(np.sqrt((((draws.mean(0) - exact.mean(0)) / exact.std(0)) ** 2).mean()))


def sd_error(draws: np.ndarray, exact: np.ndarray) -> float:
    """Root mean square over parameters of the difference of standard deviations, in those of the exact posterior."""
    return float(np.sqrt(((draws.std(0) / exact.std(0) - 1) ** 2).mean()))


def coverage(draws: np.ndarray, exact: np.ndarray, prob: float = 0.9) -> float:
    """The share of the exact posterior's draws within the central intervals of `draws`, mean over parameters."""
    low, high = np.quantile(draws, [(1 - prob) / 2, (1 + prob) / 2], axis=0)
    return float(((low <= exact) & (exact <= high)).mean())


def rhat(chains: np.ndarray) -> float:
    """The largest rank-normalised split R-hat over parameters; infinite if a chain stood still.

    :param chains: shape (chains, draws, d).
    """
    return _worst(chains, arviz.rhat, max)


def ess(chains: np.ndarray) -> float:
    """The smallest bulk effective sample size over parameters; 0 if a chain stood still.

    :param chains: shape (chains, draws, d).
    """
    return _worst(chains, arviz.ess, min)


def _worst(chains, diagnostic, worst):
    chains = np.asarray(chains, float)
    if chains.shape[1] < 4 or (chains.std(1) == 0).any():
        return float("inf") if worst is max else 0.0
    return float(worst(float(diagnostic(chains[:, :, k].copy())) for k in range(chains.shape[2])))


def accuracy(probabilities: np.ndarray, labels: np.ndarray) -> float:
    """The share of rows whose most probable class is theirs; shapes (rows, classes) and (rows,)."""
    return float((np.argmax(probabilities, axis=1) == labels).mean())


def ranks(draws: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Simulation-based calibration: how many draws are below the truth, for each parameter.

    :param draws: shape (number, d); independent, or thinned until they nearly are.
    :param truth: the parameters that the table was drawn with, drawn from the prior themselves; shape (d,).
    :return: integers from 0 to number, uniform over tables if draws are from the posterior (Talts et al. 2018).
    """
    return (np.asarray(draws) < np.asarray(truth)).sum(0)


def uniformity(ranks: np.ndarray, number: int, bins: int = 10) -> float:
    """p-value of a chi-squared test that `ranks` (any shape) are uniform on 0, ..., `number`."""
    edges = np.linspace(0, number + 1, bins + 1)
    observed, _ = np.histogram(ranks, edges)
    sizes = np.diff(np.ceil(edges))
    return float(chisquare(observed, np.size(ranks) * sizes / sizes.sum()).pvalue)


def clipped_share(
    model: Callable, args: tuple, kwargs: dict, pairs: tuple[dict, dict], bound: float, per_length: bool = True
) -> float:
    """The share of rows whose log ratio is larger than `bound`, times the length of the jump if `per_length`.

    The papers print it, and no private sampler may: it looks at the rows. For experiments on made-up tables only.

    :param pairs: values before and after, {site: (pairs, ...)} each, in a space without constraints.
    """
    jump = np.concatenate([np.reshape(b - a, (len(a), -1)) for a, b in zip(*map(_leaves, pairs), strict=True)], axis=1)
    bounds = np.full(len(jump), bound) * (np.linalg.norm(jump, axis=1) if per_length else 1.0)
    rows = _log_likelihoods(model, args, kwargs)

    def share(pair):
        before, after, bound = pair
        return (jnp.abs(rows(after) - rows(before)) > bound).mean()

    return float(jax.jit(lambda pairs: jax.lax.map(share, pairs))((*pairs, jnp.asarray(bounds))).mean())


def clipped_gradients(model: Callable, args: tuple, kwargs: dict, values: dict, bound: float) -> float:
    """The share of rows whose gradients are longer than `bound`: as `clipped_share`, for made-up tables only.

    :param values: {site: (draws, ...)}, in a space without constraints.
    """
    rows = _log_likelihoods(model, args, kwargs)

    def share(values):
        slopes = jax.tree.leaves(jax.jacfwd(rows)(values))  # of shape (rows, ...) each
        squares = sum(jnp.square(slope).reshape(len(slope), -1).sum(1) for slope in slopes)
        return (jnp.sqrt(squares) > bound).mean()

    return float(jax.jit(lambda values: jax.lax.map(share, values))(jax.tree.map(jnp.asarray, values)).mean())


def _log_likelihoods(model, args, kwargs):
    """From values of the latent sites to the log likelihood of each row."""

    def rows(values):
        log_probs, trace = compute_log_probs(model, args, kwargs, values, sum_log_prob=False)
        (log_prob,) = (value for name, value in log_probs.items() if trace[name]["is_observed"])
        return log_prob

    return rows


def _leaves(values):
    return [np.asarray(value, float) for value in jax.tree.leaves(values)]
