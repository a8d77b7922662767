"""DP-SGNHT: a Nosé-Hoover thermostat on noisy clipped gradients (Ding et al. 2014).

One step, in this (symplectic) order; the explicit order of published code diverges at steps at which this one is
stable:

    ``p  <-  p - h xi p + h g(z) + sqrt(2 A h - h^2 w^2 sigma^2) N(0, 1)``
    ``z  <-  z + h p``
    ``xi <-  xi + h (p.p / d - 1)``

The thermostat ``xi`` starts at A and finds the friction at which the momentum has unit temperature, so it also absorbs
the sampling noise of batches, whose size nobody needs to know. With d = 1 it is slow to do so. The bias is of first
order in h, and steps of about 0.4 posterior widths diverge.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import random

from numpyro_dp.kernels.options import KernelOptions
from numpyro_dp.kernels.stochastic_gradient import StochasticGradientKernel, added_noise
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.batches import Batches
from numpyro_dp.privacy.draws import Draw


class Thermostat(NamedTuple):
    """What DPSGNHT carries along.

    :ivar momentum: p, in coordinates scaled by `inverse_mass_matrix`.
    :ivar friction: xi.
    """

    momentum: jax.Array
    friction: jax.Array


class DPSGNHT(StochasticGradientKernel):
    """Differentially private stochastic gradient Nosé-Hoover thermostat.

    The formal guarantee, the approximation and the arguments are those of `DPSGLD`, but for:

    :param step_size: h, in units of the posterior width. Default ``0.1 / sqrt(power n)``, or the largest in which the
        privacy noise fits.
    :param friction: A, in the unit of ``1 / h``. Default ``sqrt(power n)``. More friction leaves room for more privacy
        noise, and moves more slowly.

    `DPState.carry.dynamics` is a `Thermostat`.
    """

    def __init__(
        self,
        model: Callable,
        eps: float | None = None,
        delta: float | None = None,
        *,
        prepare: Preparation | bool = False,
        clip_grad: float | None = None,
        step_size: float | Callable | None = None,
        friction: float | None = None,
        batch_size: float | Batches | None = None,
        num_steps: int = 1,
        noise_multiplier_grad: float | str | None = None,
        **options: Unpack[KernelOptions],
    ):
        if friction is not None and not friction > 0:
            raise ValueError(f"friction must be positive, got {friction}")
        self._friction = friction
        super().__init__(
            model,
            eps,
            delta,
            prepare=prepare,
            clip_grad=clip_grad,
            step_size=step_size,
            batch_size=batch_size,
            noise_multiplier_grad=noise_multiplier_grad,
            num_steps=num_steps,
            **options,
        )

    def _in_units_of_width(self) -> dict[str, Any]:
        return {"friction": self._friction}

    def _friction_at(self, width: float) -> float:
        return 1 / width if self._friction is None else self._friction

    def _default_step_size(self, width: float) -> float:
        return 0.1 * width

    def _init_dynamics(self, rng_key: jax.Array, y: jax.Array) -> Thermostat:
        # NaN stands for the friction A, which depends on the number of rows and is filled in by the first step.
        return Thermostat(random.normal(rng_key, y.shape, y.dtype), jnp.full((), jnp.nan, y.dtype))

    def _move(self, gradient, draws, rng_key, y, step_size, friction, dynamics):
        def step(state: tuple, draw: Draw, key: jax.Array) -> tuple[tuple, None]:
            y, p, xi = state
            drift, scale = gradient(y, draw)
            noise = added_noise(step_size, friction, scale) * random.normal(key, y.shape, y.dtype)
            p = p - step_size * xi * p + step_size * drift + noise
            return (y + step_size * p, p, xi + step_size * (p @ p / p.size - 1)), None

        xi = jnp.where(jnp.isnan(dynamics.friction), friction, dynamics.friction).astype(y.dtype)
        keys = random.split(rng_key, self._num_steps)
        (y, p, xi), _ = draws.scan(step, (y, dynamics.momentum, xi), keys)
        return y, Thermostat(p, xi)
