"""What is added to a log ratio with Gaussian noise, so that the sign of the total is an acceptance test.

A test with log ratio ``x`` sees ``x + N(0, C)`` only: the noise that privacy asks for, of a variance ``C`` that is
public and fixed before the run. It accepts if ``x + N(0, C) + V > 0`` for a random V that depends on nothing. Two laws
of V:

- `exponential_correction`, ``V = Exp(1) - C/2``: the penalty test (Ceperley and Dewing 1999), exact for every C. It
  accepts a proposal of equal density with probability ``2 Phi(-sqrt(C) / 2)``: 0.803, 0.617, 0.480 at C = 0.25, 1, 2.
- `logistic_correction`: ``N(0, C) + V`` is close to the logistic law, which makes it Barker's test, accepting with
  probability ``expit(x)`` (Seita et al. 2017; Heikkilä et al. 2019). Never exact: the characteristic function of such a
  V would be ``pi t exp(C t^2 / 2) / sinh(pi t)``, which is unbounded. What is lost grows quickly with C, see the table
  in `logistic_correction`. At ``x = 0`` it accepts half of the proposals, whatever C is.

V is no privacy noise: it is drawn from the kernel's key, as the uniform number of any Metropolis test is. But whoever
learns V learns more about ``x + N(0, C)`` than its sign, so only the decision may leave the kernel.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from scipy.optimize import linprog
from scipy.special import expit, ndtr

LOGISTIC_VARIANCE = math.pi**2 / 3
"""Variance of the logistic law: what the noise may not reach."""

_SMALLEST_LP_VARIANCE = 0.65
"""Below it the best error is lost in the solver's tolerance. V gets a Gaussian part up to it instead."""
_ATOM_SPACING, _LARGEST_ATOM = 0.1, 28.0
_POINT_SPACING, _LARGEST_POINT = 0.1, 24.0
_TAIL_ALLOWANCE = 20.0
"""Largest relative error of ``F(-x)`` in the tail over largest absolute error of F, see `logistic_correction`."""
_ROW_SCALE = 1e3
"""HiGHS takes matrix entries below 1e-9 for zero, and stops at errors of 1e-8: both are in units of a scaled row."""
_ATTEMPTS = (("highs-ds", 1e-8), ("highs-ipm", 1e-8), ("highs-ds", 1e-7), ("highs-ipm", 1e-7), ("highs-ds", 1e-6))
"""Solver and its tolerance, tried in this order: HiGHS gives up on one or two in a hundred of these programs."""


@dataclass(frozen=True, eq=False)
class Correction:
    """A law of V for which ``N(0, variance) + V`` is nearly logistic; made by `logistic_correction`.

    ``V = S A + N(0, gaussian_variance)`` with a fair sign S, and ``A = atoms[k]`` with probability ``weights[k]``.

    :param variance: of the Gaussian noise that V is added to.
    :param atoms: shape (m,), nonnegative and increasing.
    :param weights: shape (m,), positive, with sum 1.
    :param gaussian_variance: 0 unless `variance` is small.
    :param cdf_error: largest error of the acceptance probability, ``|F(x) - expit(x)|``.
    """

    variance: float
    atoms: np.ndarray
    weights: np.ndarray
    gaussian_variance: float
    cdf_error: float

    def sample(self, rng_key: jax.Array, shape: tuple[int, ...] = (), dtype: Any = float) -> jax.Array:
        """Independent draws of V; can be compiled.

        The atoms are drawn with 63 random bits in either precision: float32 uniforms are multiples of 2**-23, and
        would never find the far atoms. The Gaussian part, where there is one, has the precision of `dtype`: in float32
        its distribution function is right to about 1e-7, as good as the float32 log ratio that V is added to.
        """
        atom_key, normal_key = random.split(rng_key)
        high, low = random.bits(atom_key, (2, *shape), jnp.uint32)
        atom = jnp.asarray(self.atoms, dtype)[_atom_index(high, low, _thresholds(self.weights))]
        # The atom doesn't depend on the last bit: thresholds are even.
        draw = jnp.where(low & 1, -atom, atom)
        if self.gaussian_variance > 0:
            draw = draw + math.sqrt(self.gaussian_variance) * random.normal(normal_key, shape, dtype)
        return draw


@dataclass(frozen=True)
class ExponentialCorrection:
    """``V = Exp(1) - variance/2``, with which the test is the penalty test; made by `exponential_correction`.

    It accepts with probability ``Phi(x/s - s/2) + exp(x) Phi(-x/s - s/2)``, whose ratio at x and -x is ``exp(x)``,
    whatever the variance ``s**2``: detailed balance holds exactly.
    """

    variance: float

    def sample(self, rng_key: jax.Array, shape: tuple[int, ...] = (), dtype: Any = float) -> jax.Array:
        """Independent draws of V; can be compiled.

        By inversion of 64 random bits in either precision, so that V reaches 44; with a float32 uniform a test would
        accept the impossible with probability 2**-23, and never resolve log ratios below -16.
        """
        high, low = random.bits(rng_key, (2, *shape), jnp.uint32).astype(dtype)
        return -jnp.log(high * 2.0**-32 + (low + 0.5) * 2.0**-64) - self.variance / 2


def exponential_correction(variance: float) -> ExponentialCorrection:
    """The exact law of V, for Gaussian noise of any variance.

    :param variance: of the noise, positive and finite; public.
    """
    return ExponentialCorrection(_checked_variance(variance, math.inf, ""))


def logistic_correction(variance: float) -> Correction:
    """The law of V that makes ``N(0, variance) + V`` as good a stand-in for the logistic law as can be.

    A linear program over the weights of fixed symmetric atoms (other laws, such as mixtures of Gaussians, are mixtures
    of atoms) minimises t such that, for all ``x >= 0``,

        ``|F(-x) - expit(-x)| <= t min(1, 20 expit(-x))``.

    *Why this.* Start a step at the target; let x be the log ratio of its proposal. The flows between pairs of states
    are out of balance by ``E|F(x) - expit(x)|`` in total, which bounds how far one step leads away. So the stationary
    law is wrong by at most the error of F over the spectral gap, and on test chains it followed the error of F, not the
    total variation nor the log odds. But the error of F alone leaves improbable states with odds wrong by a factor of
    up to 7 (C = 2, ``|x| <= 10``). The second bound makes that ``1 +- 20 t``, 1.6%, and costs a third more error of F.
    At C = 2, minimal total variation is worse in both (odds 3.7%); minimal error of log odds doubles that of F.

    Errors, computed from the final weights: `cdf_error`; the total variation distance from the logistic law; and the
    largest violation of detailed balance, ``|logit F(x) - x|`` over ``|x| <= 6``, by which a chain is wrong about the
    log odds of two states:

    ========  ==========  =========  ============
    variance  cdf_error   tv_error   logit_error
    ========  ==========  =========  ============
    <= 0.65   5e-12       7e-11      8e-11
    1         8.0e-8      9.9e-7     1.7e-6
    1.5       3.8e-5      2.9e-4     7.8e-4
    2         7.9e-4      3.9e-3     1.6e-2
    3         1.5e-2      3.9e-2     0.36
    ========  ==========  =========  ============

    :param variance: of the noise, between 0 and ``pi**2 / 3 = 3.29``, both excluded; public.
    :return: the same object for the same variance. The first call takes half a second, at times a second.
    """
    return _logistic_correction(
        _checked_variance(
            variance,
            LOGISTIC_VARIANCE,
            ", the variance of the logistic law: use less noise, or exponential_correction, which is exact for any",
        )
    )


@lru_cache(maxsize=128)
def _logistic_correction(variance: float) -> Correction:
    total_variance = max(variance, _SMALLEST_LP_VARIANCE)
    atoms, weights = _best_atoms(total_variance)
    for array in (atoms, weights):
        array.setflags(write=False)
    return Correction(variance, atoms, weights, total_variance - variance, _cdf_error(total_variance, atoms, weights))


def _best_atoms(variance: float) -> tuple[np.ndarray, np.ndarray]:
    """Solve the linear program of `logistic_correction`.

    Logistic tails span ten orders of magnitude. Rows are therefore relative to ``expit(-x)``, and the unknowns are
    relative to the logistic density at the atom; then all entries that matter are of order 1.
    """
    atoms = np.arange(0, _LARGEST_ATOM, _ATOM_SPACING * min(1.0, math.sqrt(variance)))
    x = np.arange(0, _LARGEST_POINT, _POINT_SPACING)
    density = expit(atoms) * expit(-atoms)
    ratio = _mixture_cdf(-x, atoms, variance) * density / expit(-x)[:, None]
    allowance = np.minimum(1 / expit(-x), _TAIL_ALLOWANCE)[:, None] / _ROW_SCALE
    ones = np.ones(len(x))
    for method, tolerance in _ATTEMPTS:
        solution = linprog(
            np.append(np.zeros(len(atoms)), 1.0),
            A_ub=_ROW_SCALE * np.block([[ratio, -allowance], [-ratio, -allowance]]),
            b_ub=_ROW_SCALE * np.concatenate([ones, -ones]),
            A_eq=_ROW_SCALE * np.append(density, 0.0)[None],
            b_eq=[_ROW_SCALE],
            bounds=(0, None),
            method=method,
            options={"primal_feasibility_tolerance": tolerance, "dual_feasibility_tolerance": tolerance},
        )
        if solution.success:
            weights = solution.x[:-1] * density
            used = weights > 1e-14
            return atoms[used], weights[used] / weights[used].sum()
    raise RuntimeError(
        f"no correction was found for the noise variance {variance!r} ({solution.message}): change it slightly, "
        "or use exponential_correction"
    )


def _cdf_error(variance: float, atoms: np.ndarray, weights: np.ndarray) -> float:
    """The largest error of the distribution function, on a grid that the linear program didn't see."""
    x = np.linspace(0, 40, 6001)
    return float(np.abs(_mixture_cdf(-x, atoms, variance) @ weights - expit(-x)).max())


def _mixture_cdf(x: Any, atoms: np.ndarray, variance: float) -> np.ndarray:
    """``P(N(+-a, variance) <= x)``, the sign of a being fair, shape ``x.shape + atoms.shape``."""
    x, scale = np.asarray(x, np.float64)[..., None], math.sqrt(variance)
    return (ndtr((x - atoms) / scale) + ndtr((x + atoms) / scale)) / 2


def _thresholds(weights: np.ndarray) -> np.ndarray:
    """Where 64-bit words pass from one atom to the next: high and low halves, uint32 of shape (2, m - 1).

    Atom k has ``weights[k] * 2**64`` of the words, rounded to an even number.
    """
    counts = [2 * round(float(weight) * 2**63) for weight in weights]
    steps = np.array([sum(counts[:k]) for k in range(1, len(counts))], dtype=object)
    return np.array([[step >> 32 for step in steps], [step & (2**32 - 1) for step in steps]], np.uint32)


def _atom_index(high: jax.Array, low: jax.Array, thresholds: np.ndarray) -> jax.Array:
    """How many thresholds each 64-bit word has reached."""
    high, low = high[..., None], low[..., None]
    reached = (high > thresholds[0]) | ((high == thresholds[0]) & (low >= thresholds[1]))
    return reached.sum(-1)


def _checked_variance(variance: float, upper: float, why: str) -> float:
    if isinstance(variance, jax.core.Tracer):
        raise TypeError("the noise variance must be a number that is known before the program is compiled")
    if not 0 < variance < upper:
        limit = "finite" if upper == math.inf else f"less than {upper:.6g}"
        raise ValueError(f"the noise variance must be positive and {limit}{why}; got {variance}")
    return float(variance)
