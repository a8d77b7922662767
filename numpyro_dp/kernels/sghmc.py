"""DP-SGHMC: Hamiltonian dynamics with friction on noisy clipped gradients (Chen et al. 2014; Lode 2019).

An iteration draws a momentum ``p ~ N(0, 1)`` and makes `num_steps` steps

    ``z <-  z + h p``
    ``p <-  p + h g(z) - h C p + sqrt(2 h (C - B) - h^2 w^2 sigma^2) N(0, 1)``

in coordinates scaled by `inverse_mass_matrix`. The friction C takes out the energy that the noise brings in: the
privacy noise, the noise added beside it and, if the caller knows a public value for it, the sampling noise B of the
batches. Signs and powers of h are those of Chen et al.; as printed in the thesis, the friction accelerates and the
noise is multiplied by h once too often.

``friction=0`` is the naive sampler: no friction and no added noise, so that privacy and sampling noise heat the chain
up until the next momentum is drawn. It is there for comparison.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
from jax import random

from numpyro_dp.kernels.options import KernelOptions
from numpyro_dp.kernels.stochastic_gradient import StochasticGradientKernel, added_noise
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.batches import Batches
from numpyro_dp.privacy.draws import Draw


class DPSGHMC(StochasticGradientKernel):
    """Differentially private stochastic gradient Hamiltonian Monte Carlo.

    The formal guarantee, the approximation and the arguments are those of `DPSGLD`, but for:

    :param step_size: h, in units of the posterior width. Default ``0.1 / sqrt(power n)``, or the largest in which the
        privacy noise fits.
    :param num_steps: steps between two draws of the momentum, default 10.
    :param friction: C, in the unit of ``1 / h``. Default ``sqrt(power n)``; 0 for the naive sampler.
    :param gradient_noise: B, the part of the friction that the sampling noise of batches uses up: ``h / 2`` times the
        variance of one entry of the stochastic gradient. A public number; default 0.
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
        num_steps: int = 10,
        friction: float | None = None,
        gradient_noise: float = 0.0,
        batch_size: float | Batches | None = None,
        noise_multiplier_grad: float | str | None = None,
        **options: Unpack[KernelOptions],
    ):
        if friction is not None and not friction >= 0:
            raise ValueError(f"friction must be at least 0, got {friction}")
        if not gradient_noise >= 0 or (gradient_noise and friction is not None and gradient_noise >= friction):
            raise ValueError(f"gradient_noise must lie between 0 and the friction, got {gradient_noise}")
        if friction == 0 and isinstance(noise_multiplier_grad, str):
            raise ValueError("without friction no noise matches: give eps or a number as noise_multiplier_grad")
        self._friction, self._gradient_noise = friction, gradient_noise
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
        return {"friction": self._friction, "gradient_noise": self._gradient_noise or None}

    def _friction_at(self, width: float) -> float:
        """What is left of the friction for privacy noise and added noise."""
        friction = 1 / width if self._friction is None else self._friction
        if self._friction is None and self._gradient_noise >= friction:
            raise ValueError(
                f"gradient_noise is {self._gradient_noise:g}, and must be below the friction, which is {friction:.4g} "
                "here: give friction"
            )
        return friction - self._gradient_noise

    def _relaxations(self, step_size: float) -> float:
        time = self._num_steps * step_size  # with a new momentum after it, a shorter way is a step of a random walk
        return time * min(1.0, time / 2)

    def _default_step_size(self, width: float) -> float:
        return 0.1 * width

    def _move(self, gradient, draws, rng_key, y, step_size, friction, dynamics):
        def step(state: tuple, draw: Draw, key: jax.Array) -> tuple[tuple, None]:
            y, p = state
            y = y + step_size * p
            force, scale = gradient(y, draw)
            noise = added_noise(step_size, friction, scale) * random.normal(key, y.shape, y.dtype)
            damping = step_size * (friction + self._gradient_noise)
            return (y, p + step_size * force - damping * p + noise), None

        momentum_key, noise_key = random.split(rng_key)
        p = random.normal(momentum_key, y.shape, y.dtype)
        (y, _), _ = draws.scan(step, (y, p), random.split(noise_key, self._num_steps))
        return y, dynamics
