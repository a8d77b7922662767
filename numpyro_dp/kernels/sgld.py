"""DP-SGLD: Langevin dynamics on noisy clipped gradients (Welling and Teh 2011; Wang, Fienberg and Smola 2015).

    ``z' = z + h g(z) + sqrt(2 h - h^2 w^2 sigma^2) N(0, 1)``

with the noisy gradient ``g`` of `numpyro_dp.kernels.stochastic_gradient`, whose friction is 1 here. The noise's
variance is ``2 h`` for a drift of ``h``: with ``h`` it would sample the square of the posterior (as published code
does).
"""

import jax
from jax import random

from numpyro_dp.kernels.stochastic_gradient import StochasticGradientKernel, added_noise
from numpyro_dp.privacy.draws import Draw


class DPSGLD(StochasticGradientKernel):
    """Differentially private stochastic gradient Langevin dynamics.

    **Formal guarantee.** All chains and all iterations, warmup included, are ``(eps, delta)``-DP under
    `neighboring_relation`: every step releases one sum of clipped gradients with Gaussian noise, on a batch or on all
    rows, and all of them are composed by `numpyro_dp.privacy.accounting` (exactly on all rows, by privacy loss
    distributions on batches).

    **Approximation.** There is no acceptance test. The error shrinks with the step size, except for that of clipped
    gradients; see `numpyro_dp.kernels.stochastic_gradient`.

    :param model, eps, delta: as for `DPPenalty`.
    :param prepare: True or a `numpyro_dp.Preparation` for a private search before the chain starts, for 30% of the
        budget. It finds where the chain starts, coordinates in which the posterior is about N(0, I), the clip bound and
        the step size. Then neither `clip_grad` nor `step_size`, friction, mass matrix or owners may be given.
    :param clip_grad: largest norm of one row's gradient, in unconstrained space, that is counted in full. Rows beyond
        it bias the posterior. Default 1, and the report says so.
    :param step_size: h, in units of the squared posterior width; a number, or a function of the iteration t = 1, 2, ...
        such as `decreasing_steps`. Default ``0.1 / (power n)``, or the largest in which the privacy noise fits.
    :param batch_size: expected batch size, `PoissonBatches` or `FixedBatches`. Default: all rows.
    :param num_steps: steps per iteration; only the last one is kept.
    :param noise_multiplier_grad: instead of `eps`: noise standard deviation over sensitivity, in the first iteration;
        or ``"matched"``: all the noise that the step size needs is privacy noise, and eps follows.
    :param options: `numpyro_dp.kernels.options.KernelOptions`. `inverse_mass_matrix` (a number, a vector, or by site)
        is the preconditioner.
    """

    def _friction_at(self, width: float) -> float:
        return 1.0

    def _default_step_size(self, width: float) -> float:
        return 0.1 * width**2

    def _move(self, gradient, draws, rng_key, y, step_size, friction, dynamics):
        def step(y: jax.Array, draw: Draw, key: jax.Array) -> tuple[jax.Array, None]:
            drift, scale = gradient(y, draw)
            noise = added_noise(step_size, friction, scale) * random.normal(key, y.shape, y.dtype)
            return y + step_size * drift + noise, None

        y, _ = draws.scan(step, y, random.split(rng_key, self._num_steps))
        return y, dynamics
