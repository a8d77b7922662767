"""The three chains that may follow a private preparation.

===========  ==============================================  =============================================  ==========
mode         chain                                           target                                         draws cost
===========  ==============================================  =============================================  ==========
"surrogate"  NumPyro's NUTS on the released surrogate        ``prior(z) * S(phi(z))``, S noise-aware: what  nothing
                                                             the release says about z
"residual"   leapfrog on the surrogate, penalty test on the  ``prior(z) * S(phi(z)) * prod_i                each one
             noisy residuals of the rows                     exp(r_i(phi(z)))``: the posterior where S is
                                                             the expansion without noise
"walk"       random walk in whitened coordinates, penalty    the posterior                                  each one
             test on the noisy log ratio
===========  ==============================================  =============================================  ==========

``r_i`` is row i's log density minus its quadratic expansion of clipped derivatives. Residuals change little from point
to point, so the noise of a test is small where that of a log ratio is not. Where no residual, or no ratio, is clipped,
both tests leave their target invariant exactly; that of "residual" is cut off at a ball far outside
(`ResidualChain._radius`). The targets of the first two differ from the posterior by the one-off noise, and by design:
see `numpyro_dp.surrogate`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.infer.hmc import hmc

from numpyro_dp.cut import Cut
from numpyro_dp.kernels.base import Algorithm, Step, Transition
from numpyro_dp.kernels.penalty_test import accept_with_penalty
from numpyro_dp.kernels.survey import Frame, distance, residual_distance, row_residual
from numpyro_dp.kernels.target import Draw, PrivateTarget, Released
from numpyro_dp.preparation import Check, Mirror
from numpyro_dp.surrogate import Surrogate


class Prepared(NamedTuple):
    """What a preparation has found. Released as a whole.

    :ivar mode: "surrogate", "residual" or "walk"; see `numpyro_dp.kernels.chains`.
    :ivar check: how far the log likelihood is from a quadratic; None for one that was made by hand.
    :ivar coordinates: names of the coordinates in which the parameters meet the data.
    :ivar frame: in which the posterior is about N(0, I).
    :ivar surrogate: the released likelihood, or None in mode "walk".
    :ivar bounds: clip bounds of the rows' gradients and Hessians in the frame.
    :ivar slope: clip bound of a row's log ratio, or of its residual, per unit of distance; None in mode "surrogate".
    :ivar start: unconstrained parameters near the posterior, shape (d,).
    :ivar covariance: about the posterior's, shape (d, d); from prior and frame.
    :ivar step: length of the proposals: in posterior standard deviations, or as an angle in mode "residual".
    :ivar distance: how far the surrogate's mode is from where the likelihood was expanded, in posterior standard
        deviations or, where that is larger, the noise's, or a quarter of how far that place was from the mode of the
        first of two releases; see `numpyro_dp.preparation.final_releases`. None in "walk".
    :ivar centred: whether the rows' gradients, of which the surrogate's is made, were centred before the clip by those
        of outcomes drawn from the model.
    :ivar unseen: the share of the rows that the search for clip bounds may have taken for none: public, by n and eps. 0
        where the number of rows is not public.
    :ivar disagreement: between the curvature that was released last and that of all releases together, beyond their
        noise, where the posterior's precision is about 1; see `numpyro_dp.preparation.disagreement`. None in "walk".
    :ivar mirror: another hump of the posterior, of which the draws show nothing; None if none was found, and in "walk".
    """

    mode: str
    check: Check | None
    coordinates: tuple[str, ...]
    frame: Frame
    surrogate: Surrogate | None
    bounds: np.ndarray
    slope: float | None
    start: np.ndarray
    covariance: np.ndarray
    step: float
    distance: float | None = None
    centred: bool = False
    unseen: float = 0.0
    disagreement: float | None = None
    mirror: Mirror | None = None


class Chain(Algorithm):
    """A chain that a preparation has chosen.

    :param cut: the coordinates in which the parameters meet the data.
    """

    def __init__(self, prepared: Prepared, cut: Cut, log_prior: Callable, noise_aware: bool, power: float):
        self.prepared, self._cut, self._log_prior = prepared, cut, log_prior
        self._noise_aware, self._power = noise_aware, power
        self.num_warmup = 0

    def _u(self, z: jax.Array) -> jax.Array:
        """Whitened coordinates of the flat unconstrained `z`."""
        inverse = jnp.asarray(np.linalg.inv(self.prepared.frame.whitening), z.dtype)
        return inverse @ (self._cut.coordinates(z) - jnp.asarray(self.prepared.frame.center, z.dtype))

    def _log_surrogate(self, u: jax.Array) -> jax.Array:
        surrogate = self.prepared.surrogate
        assert surrogate is not None
        return surrogate.noise_aware(u) if self._noise_aware else surrogate.plug_in(u)

    def _releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        return dict.fromkeys(self._noise_shapes(0), num_iterations * num_chains)

    def _request(self, carry: Any) -> dict[str, jax.Array | int]:
        return dict.fromkeys(self._noise_shapes(0), 1)

    def _init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        return jnp.zeros((), z.dtype)


class SurrogateChain(Chain):
    """NumPyro's NUTS on ``prior(z) * S(phi(z))``. No row is asked; any number of draws. The carry is its `HMCState`."""

    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {}

    def _start(self, rng_key: jax.Array, z: jax.Array) -> tuple[Any, Callable]:
        """NUTS's first state at `z`, and its step."""

        def potential(z: jax.Array) -> jax.Array:
            return -self._log_prior(z) - self._log_surrogate(self._u(z))

        init, sample = hmc(potential_fn=potential, algo="NUTS")
        state = init(
            z,
            self.num_warmup,
            step_size=0.5,
            inverse_mass_matrix=jnp.asarray(self.prepared.covariance, z.dtype),
            dense_mass=True,
            # Curved cuts and scales of hierarchies make narrow ends, in which longer steps diverge (the papers' banana,
            # 2,000 draws: R-hat up to 1.36 at the usual .8). Shorter ones ask no row.
            target_accept_prob=0.95,
            trajectory_length=None,
            find_heuristic_step_size=False,
            rng_key=rng_key,
        )
        return _without_keys(state), sample

    def _init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        return self._start(rng_key, z)[0]

    def _transition(self, step: Step) -> Transition:
        z, carry = step.z, step.carry
        start_key, step_key, adapt_key = random.split(step.rng_key, 3)
        _, sample = self._start(start_key, z)  # NumPyro's step keeps what its start was told; the state is not used
        adapt_state = carry.adapt_state._replace(rng_key=adapt_key)
        state = sample(carry._replace(rng_key=step_key, adapt_state=adapt_state), (), {})
        return Transition(
            state.z,
            jnp.array(True),
            state.accept_prob,
            jnp.zeros((), z.dtype),
            _without_keys(state),
            state.diverging,
        )


def _without_keys(state: Any) -> Any:
    """NUTS's state as it is carried: keys come from the chain's own, and a copy of a state must not repeat one."""
    return state._replace(rng_key=None, adapt_state=state.adapt_state._replace(rng_key=None))


class ResidualChain(Chain):
    """Leapfrog on ``prior(z) * S(phi(z))``, and a penalty test on the rows' noisy residuals."""

    num_steps = 8

    def _radius(self) -> float:
        """Of the ball in whitened coordinates that the target is cut off at: five noisy standard deviations beyond."""
        assert self.prepared.surrogate is not None
        size = len(self.prepared.surrogate.score)
        noise = np.trace(self.prepared.surrogate.score_covariance) / size
        return (math.sqrt(size) + 5) * math.sqrt(1 + noise)

    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"residual": (1,)}

    def _transition(self, step: Step) -> Transition:
        momentum_key, angle_key, accept_key = random.split(step.rng_key, 3)
        prepared, z = self.prepared, step.z
        root = jnp.asarray(np.linalg.cholesky(prepared.covariance), z.dtype)

        def log_density(x: jax.Array) -> jax.Array:
            at = z + root @ x
            return self._log_prior(at) + self._log_surrogate(self._u(at))

        angle = prepared.step * random.uniform(angle_key, (), z.dtype, 0.5, 1.0)
        time = angle / self.num_steps
        momentum = random.normal(momentum_key, z.shape, z.dtype)
        gradient = jax.grad(log_density)

        def kick_drift(state: tuple, _: Any) -> tuple:
            x, p = state
            p = p + time * gradient(x)
            return (x + time * p, p), None

        zero = jnp.zeros_like(z)
        (x, p), _ = lax.scan(kick_drift, (zero + time / 2 * momentum, momentum), None, self.num_steps)
        x = x - time / 2 * p
        z_new = z + root @ x
        u, u_new = self._u(z), self._u(z_new)
        slope = prepared.slope
        assert slope is not None
        released = residual_ratio(
            step.target,
            self._cut,
            prepared.frame,
            prepared.bounds,
            step.grant.first("residual"),
            u,
            u_new,
            slope * residual_distance(u, u_new),
        )
        public = log_density(x) - log_density(zero) + (momentum @ momentum - p @ p) / 2
        # The residuals give back the likelihood's own tails, beside which a quadratic with noise may be improper: the
        # target is cut off far outside. A chain that starts beyond may come in.
        radius = self._radius()
        outside = (jnp.linalg.norm(u_new) > radius) & (jnp.linalg.norm(u) <= radius)
        public = jnp.where(outside, -jnp.inf, public)
        accepted, accept_prob, scale = accept_with_penalty(
            accept_key, self._power * released.value + public, self._power * released.scale, z_new
        )
        return Transition(jnp.where(accepted, z_new, z), accepted, accept_prob, scale, step.carry)


class WalkChain(Chain):
    """A random walk in whitened coordinates with the penalty test on the noisy log ratio."""

    def _noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"ratio": (1,)}

    def _transition(self, step: Step) -> Transition:
        jump_key, accept_key = random.split(step.rng_key)
        target, z, prepared = step.target, step.z, self.prepared
        root = jnp.asarray(np.linalg.cholesky(prepared.covariance), z.dtype)
        z_new = z + prepared.step * root @ random.normal(jump_key, z.shape, z.dtype)
        slope = prepared.slope
        assert slope is not None
        ratio, scale = target.log_ratio(
            step.grant.first("ratio"), z, z_new, slope * distance(self._u(z), self._u(z_new))
        )
        public = self._log_prior(z_new) - self._log_prior(z)
        accepted, accept_prob, scale = accept_with_penalty(accept_key, ratio + public, scale, z_new)
        return Transition(jnp.where(accepted, z_new, z), accepted, accept_prob, scale, step.carry)


CHAINS: dict[str, type[Chain]] = {"surrogate": SurrogateChain, "residual": ResidualChain, "walk": WalkChain}


def residual_ratio(
    target: PrivateTarget,
    cut: Cut,
    frame: Frame,
    bounds: np.ndarray,
    draw: Draw,
    u: jax.Array,
    u_new: jax.Array,
    bound: jax.Array,
) -> Released:
    """The change of the rows' residuals from `u` to `u_new`, not tempered, with noise."""
    cast = Frame(*(jnp.asarray(part, u.dtype) for part in frame))
    residual = row_residual(cut, cast, jnp.asarray(bounds, u.dtype))

    def change(row: tuple) -> jax.Array:
        before, after = residual(jnp.stack([u, u_new]), row)
        return after - before

    return target.release_sum(draw, change, bound, cut.size**2)
