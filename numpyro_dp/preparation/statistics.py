"""What noisy sufficient statistics say about the parameters.

The rows' log density is ``<eta, T(row)> - A(eta) + h(row)``, and what was released is ``S' = sum_i T(row_i) + N(0,
sigma^2 I)``. Its log density given ``eta`` has no closed form: the law of the sum is that of n rows. But its cumulants
have one,

    ``K(t) = n kappa(t) + sigma^2 |t|^2 / 2,    kappa(t) = A(eta + t) - A(eta)``,

and so has its saddlepoint approximation (Daniels 1954), ``log p(S' | eta) = K(t) - <t, S'> - log det K''(t) / 2`` where
``K'(t) = S'``. Without noise it is the likelihood itself up to a constant; with much noise it is the normal law of n
rows and the noise (Bernstein and Sheldon 2018); its error is of order 1 / n, and hardly depends on ``eta``.

Where n is private, it was released as n' with noise of standard deviation s; then ``n kappa`` is ``n' kappa + s^2
kappa^2 / 2``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from numpyro_dp.model.families import BoundFamily

_PLUG_IN = 0.1
"""Noise of less than this share of what one row may add changes nothing that n rows do not."""
_NEWTON = 100
_ABOUT_AS_HIGH, _FAR = 5.0, 5.0**2
"""Of modes: in log density, and in squared standard deviations."""


class Statistics(NamedTuple):
    """As released.

    :ivar values: sum over the rows, shape (m,).
    :ivar sd: of its noise.
    :ivar num_rows: n, or as released.
    :ivar num_rows_sd: of its noise; 0 where n is public.
    :ivar moved: count of rows that do not count as they are.
    :ivar moved_sd: of its noise.
    """

    values: Any
    sd: float
    num_rows: float
    num_rows_sd: float
    moved: float
    moved_sd: float

    @property
    def has_moved(self) -> bool:
        """Whether so many rows were moved into the bounds, or left out, that it may matter.

        By its noise alone the count says so once in 740 times. A row moves a mean by a few of its standard deviations
        over n at most, and the posterior has a width of that over sqrt(n).
        """
        return self.moved > 3 * self.moved_sd + 0.1 * max(self.num_rows, 1.0) ** 0.5


class SumLaw:
    """``log p(S' | z)`` up to a constant; an approximation, see above.

    :param family: one that is read off the model, whose `log_partition_of_eta` is known.
    :param noise: standard deviation of the noise in S'.
    :param is_counted: whether the number of rows was released, with noise, too.
    """

    def __init__(self, family: BoundFamily, num_params: int, noise: float, is_counted: bool):
        self._family, self._has_noise, self._is_counted = family, noise >= _PLUG_IN * family.bound, is_counted
        self._origin = jnp.zeros(num_params, jnp.result_type(float))

    def middle(self, found: Statistics) -> jax.Array:
        """Natural parameters that S' speaks for, near which each saddlepoint is searched."""
        eta = self._family.natural_parameters(self._origin)
        return eta + _solve(self._cumulants(found, eta), jnp.zeros_like(eta)) if self._has_noise else eta

    def log_density(self, found: Statistics, middle: jax.Array, z: jax.Array) -> jax.Array:
        if self._has_noise:
            return _saddlepoint(self._cumulants(found, self._family.natural_parameters(z)), middle)
        eta, log_partition = self._family.change(self._origin, z)
        return eta @ jnp.asarray(found.values, z.dtype) - found.num_rows * log_partition

    def _cumulants(self, found: Statistics, eta: jax.Array) -> "_Cumulants":
        assert self._family.log_partition_of_eta is not None
        values = jnp.asarray(found.values, eta.dtype)
        return _Cumulants(self._family.log_partition_of_eta, found, values, self._is_counted, eta)


class _Cumulants(NamedTuple):
    """``K(t) - <t, S'>``, a convex function of t.

    In single precision ``eta + t`` may be eta where t is not 0, so that it is not the variable.
    """

    log_partition: Callable[[jax.Array], jax.Array]
    found: Statistics
    values: jax.Array
    is_counted: bool  # whether n has noise
    eta: jax.Array

    def value(self, t: jax.Array) -> jax.Array:
        mean, apart, kappa = self._at(t)
        spread = (self.found.num_rows_sd * kappa) ** 2 / 2 + self.found.sd**2 * (t @ t) / 2
        return t @ (self.rows * mean - self.values) - self.rows * apart + spread

    def least(self, t: jax.Array) -> jax.Array:
        """The value where the gradient is 0, at which the first term is known.

        No terms cancel: where t is not quite found, for parameters that S' excludes, the value still says so.
        """
        _, apart, kappa = self._at(t)
        of_rows = (self.found.num_rows_sd * kappa) ** 2 / 2 + self._rows_at(kappa) * apart
        return -of_rows - self.found.sd**2 * (t @ t) / 2

    def slope(self, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gradient and Hessian."""
        mean, _, kappa = self._at(t)
        rows = self._rows_at(kappa) if self.is_counted else self.rows
        gradient = rows * mean + self.found.sd**2 * t - self.values
        of_rows = rows * jax.hessian(self.log_partition)(self.eta + t)
        curvature = of_rows + self.found.num_rows_sd**2 * jnp.outer(mean, mean)
        return gradient, curvature + self.found.sd**2 * jnp.eye(len(t), dtype=t.dtype)

    def _at(self, t: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """``A'(eta + t)``, ``A(eta) - A(eta + t) + <A'(eta + t), t>`` and kappa."""
        mean = jax.grad(self.log_partition)(self.eta + t)
        apart = _bregman(self.log_partition, self.eta, t)
        return mean, apart, mean @ t - apart

    def _rows_at(self, kappa: jax.Array) -> jax.Array:
        return jnp.maximum(self.rows + self.found.num_rows_sd**2 * kappa, 1.0)

    @property
    def rows(self) -> jax.Array:
        return jnp.maximum(jnp.asarray(self.found.num_rows, self.eta.dtype), 1.0)


def _bregman(log_partition: Callable, eta: jax.Array, t: jax.Array) -> jax.Array:
    """``A(eta) - A(eta + t) + <A'(eta + t), t>``, without the rounding of its terms, as in `BoundFamily.change`."""
    nodes, weights = (jnp.asarray(x / 2, eta.dtype) for x in np.polynomial.legendre.leggauss(8))
    nodes = nodes + 0.5

    def curvature(s: jax.Array) -> jax.Array:
        return jax.jvp(lambda x: jax.jvp(log_partition, (x,), (t,))[1], (eta + s * t,), (t,))[1]

    integral = jnp.sum(weights * nodes * jax.vmap(curvature)(nodes))
    before, (after, slope) = log_partition(eta), jax.jvp(log_partition, (eta + t,), (t,))
    plain = before - after + slope
    rounding = 64 * jnp.finfo(eta.dtype).eps * (jnp.abs(before) + jnp.abs(after) + jnp.abs(slope))
    return jnp.where(jnp.abs(integral - plain) <= rounding, integral, plain)


def _solve(cumulants: _Cumulants, start: jax.Array) -> jax.Array:
    """The t at which the convex function is least, by Newton's method.

    Its steps are shortened as those on a self-concordant function are (Nesterov and Nemirovskii 1994), which keeps them
    where natural parameters may be: ``-log(x) / 2``, of the normal law, is the steepest barrier here.
    """

    def go_on(state: tuple) -> jax.Array:
        k, _, decrement = state
        return (k < _NEWTON) & (decrement > 1e-6)

    def improve(state: tuple) -> tuple:
        k, t, _ = state
        gradient, curvature = cumulants.slope(t)
        step = cho_solve(cho_factor(curvature), -gradient)
        decrement = -gradient @ step
        return k + 1, t + step / (1 + 2 * jnp.sqrt(jnp.maximum(decrement, 0) / cumulants.rows)), decrement

    return lax.while_loop(go_on, improve, (0, start, jnp.asarray(jnp.inf, start.dtype)))[1]


def _saddlepoint(cumulants: _Cumulants, middle: jax.Array) -> jax.Array:
    still = cumulants._replace(eta=lax.stop_gradient(cumulants.eta))
    # The function is 0 at 0. For parameters that S' excludes its least is near there, and far from where S' points.
    start = middle - still.eta
    t = lax.stop_gradient(_solve(still, jnp.where(still.value(start) < 0, start, jnp.zeros_like(start))))
    # One more step, through which derivatives see how the saddlepoint moves.
    curvature = lax.stop_gradient(still.slope(t)[1])
    t = t - cho_solve(cho_factor(curvature), cumulants.slope(t)[0])
    return cumulants.least(t) - jnp.linalg.slogdet(cumulants.slope(t)[1])[1] / 2


class Modes(NamedTuple):
    """Where a density is largest.

    :ivar best: shape (d,).
    :ivar covariance: of the normal law that touches it there.
    :ivar has_humps: whether another mode is about as high, and far away.
    """

    best: np.ndarray
    covariance: np.ndarray
    has_humps: bool


def find_modes(
    density: Callable[[np.ndarray], tuple[Any, Any]],
    hessian: Callable[[np.ndarray], Any],
    starts: np.ndarray,
    widest: float,
) -> Modes:
    """The highest mode of a density that searches from several starts find, and whether there are others.

    :param density: its negative logarithm and the gradient of that, of z (d,).
    :param hessian: of the same.
    :param starts: shape (k, d).
    :param widest: the largest variance that a direction may have.
    """

    def bounded(z: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = density(z)
        return float(np.nan_to_num(value, nan=1e30, posinf=1e30)), np.nan_to_num(
            np.asarray(slope, float), posinf=0, neginf=0
        )

    found = [minimize(bounded, start, jac=True, method="BFGS") for start in starts]
    best = min(found, key=lambda mode: mode.fun)
    curvature, axes = np.linalg.eigh(np.nan_to_num(np.asarray(hessian(best.x), float)))
    variances = np.minimum(1 / np.maximum(curvature, 1e-30), widest)
    distances = [np.sum(((mode.x - best.x) @ axes) ** 2 / variances) for mode in found]
    others = [d for d, mode in zip(distances, found, strict=True) if mode.fun < best.fun + _ABOUT_AS_HIGH]
    return Modes(best.x, (axes * variances) @ axes.T, bool(max(others, default=0.0) > _FAR))
