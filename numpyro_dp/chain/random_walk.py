"""What random-walk kernels share: symmetric jumps, of one component or of all, guided or not."""

import jax
import jax.numpy as jnp
from jax import random

from numpyro_dp.chain.algorithm import Algorithm, Step, Transition


class RandomWalk(Algorithm):
    """A walk with one release in each iteration. The carry holds the directions of a guided one."""

    def _set_walk(self, one_component: bool, guided: bool, dense_mass: bool) -> None:
        """
        :param one_component: whether an iteration moves one component, drawn at random.
        :param guided: whether a component keeps its direction until a jump of it is rejected.
        """
        if guided and dense_mass and not one_component:
            raise ValueError("the guided walk has a direction for each component: it needs a diagonal mass matrix")
        self._one_component, self._guided = one_component, guided

    def init_carry(self, rng_key: jax.Array, z: jax.Array) -> jax.Array:
        return random.rademacher(rng_key, z.shape, z.dtype)

    def _jump(self, step: Step) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A jump, which components it moves, and the key that is left."""
        normal_key, component_key, left = random.split(step.rng_key, 3)
        moves = moving_components(component_key, step.z.size, self._one_component)
        direction = step.carry if self._guided else None
        jump = random_walk_jump(normal_key, step.z.shape, step.adapt.inverse_mass_matrix, moves, direction)
        return step.adapt.step_size * jump, moves, left

    def _arrive(
        self,
        step: Step,
        z_new: jax.Array,
        moves: jax.Array,
        accepted: jax.Array,
        accept_prob: jax.Array,
        scale: jax.Array,
    ) -> Transition:
        """At `z_new`, or where the iteration began."""
        carry = step.carry
        if self._guided:  # where a component moved and was rejected, it turns round; the others keep their direction
            carry = jnp.where(moves & ~accepted, -carry, carry)
        return Transition(jnp.where(accepted, z_new, step.z), accepted, accept_prob, scale, carry)


def random_walk_jump(
    rng_key: jax.Array, shape: tuple[int, ...], covariance: jax.Array, moves: jax.Array, direction: jax.Array | None
) -> jax.Array:
    """A symmetric draw with the given covariance, of the components that move and, if guided, in their directions."""
    normal = random.normal(rng_key, shape, covariance.dtype)
    if direction is not None:
        normal = direction * jnp.abs(normal)
    if covariance.ndim == 1:
        jump = jnp.sqrt(covariance) * normal
    else:  # one component alone has its marginal variance
        jump = jnp.where(
            jnp.all(moves), jnp.linalg.cholesky(covariance) @ normal, jnp.sqrt(jnp.diagonal(covariance)) * normal
        )
    return jnp.where(moves, jump, 0)


def moving_components(rng_key: jax.Array, size: int, one_component: bool) -> jax.Array:
    """Which components a proposal moves: all, or one at random. Not from data."""
    if not one_component:
        return jnp.ones(size, dtype=bool)
    return jnp.arange(size) == random.randint(rng_key, (), 0, size)
