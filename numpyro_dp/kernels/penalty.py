"""DP-penalty: a random walk whose acceptance test corrects for the privacy noise (Yıldırım and Ermiş 2019).

One iteration from ``z``, with ``B = clip_ratio * |z' - z|``:

    1. propose ``z'`` (symmetric, public);
    2. release ``R = sum_i clip(log p(x_i | z') - log p(x_i | z), +-B) + N(0, sigma^2)``,
       ``sigma = noise_multiplier * sensitivity``, sensitivity ``2 B`` (replace-one) or ``B`` (add/remove);
    3. accept if ``log u < R + log p(z') - log p(z) - sigma^2 / 2``.

The penalty ``sigma^2 / 2`` (Ceperley and Dewing 1999) makes the test exact under Gaussian noise: where no ratio is
clipped, the chain leaves the exact posterior invariant. Clipped ratios flatten it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import random

from numpyro_dp.kernels.base import DPKernel, Grant, PrivateTarget, Transition
from numpyro_dp.noise import GridNoise, noise_scale, release


def penalty_test(
    target: PrivateTarget,
    grant: Grant,
    rng_key: jax.Array,
    z: jax.Array,
    z_new: jax.Array,
    public_log_ratio: jax.Array,
    clip_ratio: float,
    neighboring_relation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The accept decision for ``z -> z_new``, shared by all penalty kernels.

    :param public_log_ratio: the part of the log acceptance ratio that no row enters: prior, proposal, momentum.
    :return: accepted; estimated acceptance probability, from the noisy ratio; noise standard deviation.
    """
    distance = jnp.linalg.norm(z_new - z)
    bound = clip_ratio if math.isinf(clip_ratio) else clip_ratio * distance
    noise = grant.noise["ratio"]
    ratio = release(target.log_ratio(z, z_new, bound), None if noise is None else GridNoise(noise.hi[0], noise.lo[0]))
    scale = (
        jnp.zeros_like(ratio)
        if noise is None
        else noise_scale(bound, grant.noise_multipliers["ratio"], neighboring_relation).astype(ratio.dtype)
    )
    log_accept = ratio + public_log_ratio - scale**2 / 2
    # A jump to nowhere is a matter of released values; what the rows said about it is not used.
    possible = jnp.all(jnp.isfinite(z_new)) & ~jnp.isnan(log_accept)
    log_accept = jnp.where(possible, log_accept, -jnp.inf)
    accepted = jnp.log(random.uniform(rng_key, dtype=z.dtype)) < log_accept
    return accepted, jnp.exp(jnp.minimum(log_accept, 0.0)), scale


class DPPenalty(DPKernel):
    """Differentially private random-walk Metropolis with the penalty test.

    **Formal guarantee.** All chains and all iterations, warmup and rejections included, are ``(eps, delta)``-DP under
    `neighboring_relation`: each iteration releases one Gaussian sum at the noise multiplier ``tau`` that the budget
    allows, and ``k`` of them cost ``rho = k / (2 tau^2)`` (Theorem 2.4 of Räisä et al. 2021, with the exact
    composition of `numpyro_dp.accounting`).

    :param model: a NumPyro model whose arguments hold the table, see `numpyro_dp.model.separate`.
    :param eps: budget of the whole run. ``inf`` runs without noise, and says that it is not private.
    :param delta: default ``0.1 / n`` under replace-one; to be given under add/remove.
    :param clip_ratio: largest change of one row's log density per unit of distance in unconstrained space that is
        counted in full. Larger is safer for the posterior, and needs more noise. For a generalised linear model with
        canonical link, the largest norm of a row's covariates times the largest residual is enough to clip nothing;
        with `one_component`, the largest single covariate times that. Default 1, and the report says so.
    :param one_component: change one component at a time, chosen at random: shorter jumps, less noise.
    :param guided: Gustafson's guided walk: a component keeps its direction until a rejection. With `one_component` it
        mixed best of the variants wherever we compared them (see ``python -m numpyro_dp.demo``).
    :param step_size: proposals have covariance ``step_size**2 * inverse_mass_matrix``. Default ``1 / sqrt(n)``
        (0.01 under add/remove, where n is private); adapted in warmup.
    :param inverse_mass_matrix: a number, a vector (d,), a matrix (d, d) with `dense_mass`, or a dict by site. Public.
    :param adapt_step_size: towards `target_accept_prob`, from released decisions; costs nothing.
    :param adapt_mass_matrix: from the released draws of the warmup; costs nothing.
    :param noise_multiplier_ratio: instead of `eps`, noise standard deviation over sensitivity.
    :param neighboring_relation: ``"replace_one"`` (n is public) or ``"add_or_remove_one"``.
    :param num_iterations: iterations of one chain, warmup included, that the budget is for. `numpyro_dp.MCMC` knows;
        ``numpyro.infer.MCMC`` does not. Give more than a run needs to keep budget for later runs.
    :param num_chains: chains that the budget is for; as `num_iterations`.
    :param init_strategy: NumPyro's; default ``init_to_median`` of the prior.
    :param row_plate: the plate whose members are protected. Default: that of the observed sites.
    :param private_args: names of the arguments that hold rows. Default: arrays as long as the row plate.
    :param noise_seed: a secret integer that makes the noise reproducible. Default: fresh entropy.

    `DPState.carry` holds the walk's directions, +-1 for each component.
    """

    def __init__(
        self,
        model: Callable,
        eps: float | None = None,
        delta: float | None = None,
        *,
        clip_ratio: float | None = None,
        one_component: bool = False,
        guided: bool = False,
        step_size: float | None = None,
        inverse_mass_matrix: Any = None,
        dense_mass: bool = False,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = False,
        target_accept_prob: float = 0.5,
        noise_multiplier_ratio: float | None = None,
        neighboring_relation: str = "replace_one",
        num_iterations: int | None = None,
        num_chains: int = 1,
        init_strategy: Callable | None = None,
        row_plate: str | None = None,
        private_args: Sequence[str] | None = None,
        noise_seed: int | None = None,
    ):
        super().__init__(
            model,
            eps,
            delta,
            noise_multipliers={"ratio": noise_multiplier_ratio},
            shares={"ratio": 1.0},
            clips={"ratio": clip_ratio},
            neighboring_relation=neighboring_relation,
            num_iterations=num_iterations,
            num_chains=num_chains,
            step_size=step_size,
            inverse_mass_matrix=inverse_mass_matrix,
            dense_mass=dense_mass,
            adapt_step_size=adapt_step_size,
            adapt_mass_matrix=adapt_mass_matrix,
            target_accept_prob=target_accept_prob,
            init_strategy=init_strategy,
            row_plate=row_plate,
            private_args=private_args,
            noise_seed=noise_seed,
        )
        if guided and dense_mass and not one_component:
            raise ValueError("the guided walk has a direction for each component: it needs a diagonal mass matrix")
        self._one_component, self._guided = one_component, guided

    def _releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        return {"ratio": num_iterations * num_chains}

    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"ratio": (1,)}

    def _request(self, carry: Any) -> dict[str, jax.Array | int]:
        return {"ratio": 1}

    def _init_carry(self, rng_key: jax.Array, z: jax.Array) -> jax.Array:
        return random.rademacher(rng_key, z.shape, z.dtype)

    def _transition(
        self,
        target: PrivateTarget,
        grant: Grant,
        rng_key: jax.Array,
        i: jax.Array,
        z: jax.Array,
        adapt: Any,
        carry: jax.Array,
    ) -> Transition:
        normal_key, component_key, accept_key = random.split(rng_key, 3)
        direction = carry
        moves = jnp.ones_like(z, dtype=bool)
        if self._one_component:
            moves = jnp.arange(z.size) == random.randint(component_key, (), 0, z.size)
        z_new = z + adapt.step_size * self._jump(normal_key, moves, direction, adapt)
        accepted, accept_prob, scale = penalty_test(
            target,
            grant,
            accept_key,
            z,
            z_new,
            target.log_prior(z_new) - target.log_prior(z),
            self._clips["ratio"],
            self._neighboring_relation,
        )
        # Where a component moved and was rejected, it turns round; the others keep their direction.
        carry = jnp.where(moves & ~accepted, -direction, direction) if self._guided else direction
        return Transition(jnp.where(accepted, z_new, z), accepted, accept_prob, scale, carry)

    def _jump(self, rng_key: jax.Array, moves: jax.Array, direction: jax.Array, adapt: Any) -> jax.Array:
        """A draw with covariance `inverse_mass_matrix`, of the chosen components and directions only."""
        normal = random.normal(rng_key, direction.shape, direction.dtype)
        if self._guided:
            normal = direction * jnp.abs(normal)
        covariance = adapt.inverse_mass_matrix
        if covariance.ndim == 1:
            jump = jnp.sqrt(covariance) * normal
        elif self._one_component:
            jump = jnp.sqrt(jnp.diagonal(covariance)) * normal
        else:
            jump = jnp.linalg.cholesky(covariance) @ normal
        return jnp.where(moves, jump, 0)
