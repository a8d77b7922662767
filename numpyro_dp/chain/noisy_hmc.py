"""Hamiltonian Monte Carlo on noisy clipped gradients, with the penalty test (Räisä et al. 2021).

The integrator sees ``G(z) = sum_i clip(grad log p(x_i | z), clip_grad) + noise + grad log p(z)``, with fresh noise at
each call, and the end point is tested as in `numpyro_dp.kernels.penalty`. Kicks by a symmetric random amount and drifts
are each reversible up to a flip of the momentum, and each leapfrog below is a palindrome of them, so with unclipped
*ratios* the exact posterior is invariant. Clipping or noise in the gradients costs acceptance, not correctness.

Three leapfrogs, L steps each:

============  =====================  ==================================================================
`leapfrog`    gradients per chain    what it does
============  =====================  ==================================================================
"position"    k L                    half a drift, then kicks between drifts: nothing to carry along
"fresh"       k (L + 1)              kicks at both ends, a new first gradient every iteration (the paper)
"reuse"       k L + 1                as "fresh", but starts from the last accepted point's own noisy
                                     gradient, which is part of the state. Kept on rejection: drawing it
                                     anew only then would bias the chain
============  =====================  ==================================================================

With `batch_size` each kick and each test look at a batch of their own. The law of a kick depends on the position only,
on a batch as with noise, so the leapfrog is as reversible as before: batches of gradients cost acceptance. The test's
estimate is that of `numpyro_dp.kernels.penalty`, with half of its sampling variance subtracted, and as approximate.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import random

from numpyro_dp.chain.acceptance import penalty_test
from numpyro_dp.chain.algorithm import Algorithm, Step, Transition
from numpyro_dp.privacy.draws import Draw

LEAPFROGS = ("position", "fresh", "reuse")


class HMCCarry(NamedTuple):
    """What the sampler carries from iteration to iteration.

    :ivar jitter_shift: random shift of the chain's step size sequence, 32 bits.
    :ivar gradient: noisy gradient of the log posterior at `z`, for ``leapfrog="reuse"``; released.
    :ivar has_gradient: whether `gradient` has been released yet.
    """

    jitter_shift: jax.Array
    gradient: jax.Array
    has_gradient: jax.Array


class NoisyHMC(Algorithm):
    """An iteration: `num_steps` noisy gradients, then one noisy log ratio."""

    clip: Any  # of a kind of release; the kernel's

    def _set_hmc(self, num_steps: int, leapfrog: str, jitter: float) -> None:
        """
        :param num_steps: leapfrog steps of an iteration.
        :param jitter: each iteration's step size is multiplied by a factor in ``[1 - jitter, 1 + jitter]``.
        """
        if leapfrog not in LEAPFROGS:
            raise ValueError(f"leapfrog must be one of {', '.join(map(repr, LEAPFROGS))}, got {leapfrog!r}")
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must lie in [0, 1), got {jitter}")
        self._num_steps, self._leapfrog, self._jitter = num_steps, leapfrog, jitter

    def releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        per_chain = {
            "position": num_iterations * self._num_steps,
            "fresh": num_iterations * (self._num_steps + 1),
            "reuse": num_iterations * self._num_steps + (0 if resumed else 1),
        }[self._leapfrog]
        return {"ratio": num_iterations * num_chains, "grad": per_chain * num_chains}

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        ends = 0 if self._leapfrog == "position" else 1
        return {"ratio": (1,), "grad": (self._num_steps + ends, num_params)}

    def request(self, carry: HMCCarry) -> dict[str, jax.Array | int]:
        first: dict[str, Any] = {
            "position": 0,
            "fresh": 1,
            "reuse": (~carry.has_gradient.astype(bool)).astype(jnp.int32),
        }
        return {"ratio": 1, "grad": self._num_steps + first[self._leapfrog]}

    def init_carry(self, rng_key: jax.Array, z: jax.Array) -> HMCCarry:
        return HMCCarry(random.bits(rng_key, dtype=jnp.uint32), jnp.zeros_like(z), jnp.array(False))

    def transition(self, step: Step) -> Transition:
        target, grant, rng_key, i, z, adapt, carry = step
        momentum_key, accept_key = random.split(rng_key)
        step_size = adapt.step_size * self._step_factor(i, carry.jitter_shift)
        p = _multiply(adapt.mass_matrix_sqrt, random.normal(momentum_key, z.shape, z.dtype))

        def gradient(position: jax.Array, draw: Draw) -> jax.Array:
            return target.gradient(draw, position, self.clip("grad")).value + jax.grad(target.log_prior)(position)

        z_new, p_new, new_gradient, first_gradient = self._integrate(
            gradient, grant["grad"], z, p, step_size, adapt.inverse_mass_matrix, carry
        )
        energies = [momentum @ _multiply(adapt.inverse_mass_matrix, momentum) / 2 for momentum in (p, p_new)]
        accepted, accept_prob, scale = penalty_test(
            target,
            grant["ratio"],
            accept_key,
            z,
            z_new,
            target.log_prior(z_new) - target.log_prior(z) + energies[0] - energies[1],
            self.clip("ratio"),
        )
        if self._leapfrog == "reuse":
            carry = carry._replace(
                gradient=jnp.where(accepted, new_gradient, first_gradient), has_gradient=jnp.array(True)
            )
        return Transition(jnp.where(accepted, z_new, z), accepted, accept_prob, scale, carry)

    def _integrate(
        self,
        gradient: Callable[[jax.Array, Draw], jax.Array],
        draws: Draw,
        z: jax.Array,
        p: jax.Array,
        step_size: jax.Array,
        inverse_mass_matrix: jax.Array,
        carry: HMCCarry,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """End point, end momentum, and the noisy gradients at the end and at the start (zeros for "position")."""

        def drift(z: jax.Array, p: jax.Array, time: jax.Array) -> jax.Array:
            return z + time * _multiply(inverse_mass_matrix, p)

        if self._leapfrog == "position":

            def kick_drift(state: tuple, draw: Draw) -> tuple:
                z, p = state
                p = p + step_size * gradient(z, draw)
                return (drift(z, p, step_size), p), None

            z = drift(z, p, step_size / 2)
            (z, p), _ = draws.scan(kick_drift, (z, p))
            zero = jnp.zeros_like(z)
            return drift(z, p, -step_size / 2), p, zero, zero  # the last drift is half a step

        def kick_drift_kick(state: tuple, draw: Draw) -> tuple:
            z, p, g = state
            p = p + step_size / 2 * g
            z = drift(z, p, step_size)
            g = gradient(z, draw)
            return (z, p + step_size / 2 * g, g), None

        later, at_start = draws.split(self._num_steps)
        if self._leapfrog == "reuse":
            first = at_start.when(
                ~carry.has_gradient.astype(bool), lambda draw: gradient(z, draw), lambda: carry.gradient
            )
        else:
            first = gradient(z, at_start)
        (z, p, last), _ = later.scan(kick_drift_kick, (z, p, first))
        return z, p, last, first

    def _step_factor(self, i: jax.Array, shift: jax.Array) -> jax.Array:
        """Element i of the base-2 Halton sequence, digits flipped by the chain's random shift, on [1-j, 1+j]."""
        digits = _reverse_bits(i.astype(jnp.uint32)) ^ shift
        return 1 + self._jitter * (2 * (digits.astype(jnp.result_type(float)) / 2.0**32) - 1)


def num_leapfrog_steps(num_steps: int | None, trajectory_length: float | None, step_size: float | None) -> int:
    if num_steps is not None and trajectory_length is not None:
        raise ValueError("give either num_steps or trajectory_length, not both")
    if trajectory_length is not None:
        if step_size is None:
            raise ValueError(
                "trajectory_length needs a step_size: their ratio is the number of leapfrog steps, which the privacy "
                "budget has to know beforehand"
            )
        if not 0 < trajectory_length < math.inf:
            raise ValueError(f"trajectory_length must be positive, got {trajectory_length}")
        return math.ceil(trajectory_length / step_size - 1e-9)
    num_steps = 8 if num_steps is None else num_steps
    if not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps must be a positive integer, got {num_steps!r}")
    return num_steps


def _multiply(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    return matrix * vector if matrix.ndim == 1 else matrix @ vector


def _reverse_bits(x: jax.Array) -> jax.Array:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = ((x & jnp.uint32(mask)) << shift) | ((x >> shift) & jnp.uint32(mask))
    return x
