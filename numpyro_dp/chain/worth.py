"""What noise leaves of a chain: estimates from public numbers only, before any budget is spent.

The estimates are for a posterior that is about normal, in its own standard deviations. What rows do to it is one
number, the *slope*: by how much one row's log density may change, at its clip bound, per posterior standard deviation.
A typical row's gradient has norm ``sqrt(d / n)`` there, because n rows make d unit curvatures; a clip bound that
rarely clips is about twice that.

*A walk with the penalty test*, whose jump has length j, sees a log ratio of mean ``-j^2 / 2`` and variance ``j^2``, and
noise of variance ``s^2``, ``s = 2 slope j tau`` under replace-one. It accepts with probability
``2 Phi(-sqrt(j^2 + s^2) / 2)``, and an iteration is worth ``j^2 / (4 d)`` of that, in independent draws (the diffusion
limit of Roberts, Gelman and Gilks 1997, to which the noise adds as in Ceperley and Dewing 1999, where d is not small).
*A leapfrog* on noisy gradients is simulated on a standard normal. *A likelihood that is released once* (`DPHMC` as it
is by default) has an error from the noise in its gradient; see `released_error`.
"""

import functools
import math

import numpy as np
from scipy.special import ndtr

GOOD_ERROR = 0.5
"""Error of a posterior mean, in posterior standard deviations, up to which a run is said to work."""
ROUGH_ERROR = 1.5
"""Error above which it is said to be hopeless."""
TYPICAL_CLIP = 2.0
"""A clip bound that rarely clips, over the root mean square of what it bounds."""
FEW_DRAWS, MANY_DRAWS = 4.0, 100.0
"""With fewer effective draws than the one a chain is hopeless, whatever else; with as many as the other it works."""
MAX_CURVATURE_NOISE = 1.0
"""Relative noise of the curvature, as foreseen, above which a preparation refuses to begin."""

_JUMPS = np.geomspace(1e-4, 8, 400)  # posterior standard deviations
_STEPS = np.geomspace(1e-5, 2, 40)
_TRAJECTORIES = 400


def tight_slope(num_rows: float, size: int, power: float = 1.0) -> float:
    """A typical row's gradient in posterior standard deviations: no clip bound can be below without clipping many."""
    return math.sqrt(power * size / num_rows)


def curvature_noise(size: int, num_rows: float, rho: float) -> float:
    """Noise in the curvature that a preparation releases, relative to the curvature."""
    return 4 * size / num_rows * math.sqrt(size / (0.11 * rho))


def released_error(size: int, num_rows: float, rho: float) -> float:
    """Error of the posterior's place by the noise in a gradient that is released once, in standard deviations.

    With half of the budget and a clip bound of three times a typical row's gradient: rather too large, since bounds are
    narrower than that.
    """
    return 3 * math.sqrt(2 * size / (0.5 * num_rows * rho))


def walk_draws(slope: float, size: int, rho: float) -> float:
    """How many independent draws a penalty random walk is worth, however many steps share `rho`.

    A step of length s (in posterior standard deviations) takes noise of standard deviation 2 for ``rho = (slope s)^2
    size / 2`` (sensitivity ``2 slope s sqrt(size)``), and s^-2 of them make a draw, about.

    :param slope: clip bound of a row's log ratio per unit of distance.
    """
    return 0.78 * rho / (8 * slope**2 * size)


def penalty_walk(jump: np.ndarray, slope: float, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Noise in the log ratio of jumps of some lengths, and how many of them are accepted.

    :param tau: noise multiplier.
    """
    noise = 2 * slope * tau * jump
    return noise, 2 * ndtr(-np.hypot(jump, noise) / 2)


def best_walk(size: int, slope: float, tau: float) -> tuple[float, float, float, float]:
    """The jump that gets furthest, its noise and acceptance, and how much of a draw an iteration is then worth."""
    noise, accepted = penalty_walk(_JUMPS, slope, tau)
    worth = _JUMPS**2 * accepted / (4 * size)
    best = int(np.argmax(worth))
    return float(_JUMPS[best]), float(noise[best]), float(accepted[best]), float(min(worth[best], 1.0))


def best_leapfrog(
    size: int, slope: float, tau_ratio: float, tau_grad: float, num_steps: int
) -> tuple[float, float, float, float]:
    """As `best_walk`, for so many leapfrog steps on noisy gradients of a standard normal, simulated."""
    z, p, kicks, accept = _normals(size, num_steps)
    sd = 2 * slope * tau_grad
    best = (0.0, 0.0, 0.0, -1.0)
    for step in _STEPS:
        x, v = z + step / 2 * p, p
        for k in range(num_steps):
            v = v + step * (sd * kicks[k] - x)
            x = x + step * v
        x = x - step / 2 * v
        jump = np.linalg.norm(x - z, axis=1)
        noise = 2 * slope * tau_ratio * jump
        gain = ((z**2).sum(1) - (x**2).sum(1) + (p**2).sum(1) - (v**2).sum(1)) / 2
        accepted = np.exp(np.minimum(0, gain + noise * accept - noise**2 / 2))
        moved = np.mean(accepted * jump**2) / (2 * size)  # one minus the autocorrelation, if that is positive
        worth = moved / (2 - moved) if moved < 1 else 1.0
        if worth > best[3]:
            best = float(jump.mean()), float(noise.mean()), float(accepted.mean()), float(worth)
    return best


def most_draws(size: int, slope: float, tau: float, iterations: int, drifts: bool) -> tuple[float, float]:
    """Effective draws of a chain at best, and how many there would be without noise.

    :param drifts: whether gradients lead the proposals, so that long jumps need not be refused but for the noise.
    """

    def draws(tau: float) -> float:
        noise, accepted = penalty_walk(_JUMPS, slope, tau)
        if drifts:
            accepted = 2 * ndtr(-noise / 2)
        return iterations * float(min(np.max(_JUMPS**2 * accepted) / (4 * size), 1.0))

    return draws(tau), draws(0.0)


@functools.lru_cache(maxsize=4)
def _normals(size: int, num_steps: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    start = rng.standard_normal((2, _TRAJECTORIES, size))
    return *start, rng.standard_normal((num_steps, _TRAJECTORIES, size)), rng.standard_normal(_TRAJECTORIES)
