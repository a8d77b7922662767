"""The chains that may follow a private preparation.

============ ==============================================  =============================================  ==========
mode         chain                                           target                                         draws cost
============ ==============================================  =============================================  ==========
"surrogate"  NumPyro's NUTS on the released surrogate        ``prior(z) * S(phi(z))``, S noise-aware: what  nothing
                                                             the release says about z
"statistics" NumPyro's NUTS on what released sufficient      ``prior(z) * p(S' | z)``                       nothing
             statistics say (DPExponentialFamily)
"walk"       random walk in whitened coordinates, penalty    the posterior                                  each one
             test on the noisy log ratio
"own"        the kernel's own (DPBarker and those without a  the posterior, as far as the kernel has it     each one
             test), in whitened coordinates
============ ==============================================  =============================================  ==========

Where no row's ratio is clipped, the test of a walk leaves its target invariant exactly. The target of "surrogate"
differs from the posterior by the one-off noise, and by design: see `numpyro_dp.preparation.surrogate`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from numpyro.infer.hmc import HMCState, hmc
from numpyro.infer.hmc_util import HMCAdaptState

from numpyro_dp.chain.acceptance import accept_with_penalty
from numpyro_dp.chain.algorithm import Algorithm, Step, Transition
from numpyro_dp.model.coordinates import Cut
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.last_look import Check
from numpyro_dp.preparation.mirror import Mirror
from numpyro_dp.preparation.statistics import Statistics
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import Bounds


class Prepared(NamedTuple):
    """What a preparation has found. Released as a whole.

    :ivar mode: "surrogate", "walk", "statistics" or "own"; see `numpyro_dp.preparation.chains`.
    :ivar coordinates: names of the coordinates in which the parameters meet the data.
    :ivar start: unconstrained parameters near the posterior, shape (d,).
    :ivar covariance: about the posterior's, shape (d, d); from prior and frame.
    :ivar frame: in which the posterior is about N(0, I); None in mode "statistics".
    :ivar rounds: of the search.
    :ivar surrogate: the released likelihood; None in other modes than "surrogate", as `check` and `bounds`.
    :ivar check: what the rows said about it; None, too, for one that was made by hand.
    :ivar bounds: clip bounds of the rows' gradients and information in the last release.
    :ivar slope: clip bound of a row's log ratio, per unit of distance in whitened coordinates, or of its gradient
        there; None in mode "surrogate".
    :ivar step: length of a walk's proposals, in posterior standard deviations.
    :ivar centred: whether the rows' gradients, of which the surrogate's is made, were centred before the clip by those
        of outcomes drawn from the model.
    :ivar mirror: another hump of the posterior, of which the draws show nothing; None if none was found, and where
        there is no surrogate.
    :ivar has_arrived: whether the search ended with a step of no significance; of a surrogate `check` says it.
    :ivar steps: coordinates along which a row's log density jumps, on synthetic rows.
    :ivar statistics: what was released in mode "statistics".
    :ivar has_humps: whether that likelihood and the prior have another mode, far from `start`, that is about as high.
    """

    mode: str
    coordinates: tuple[str, ...]
    start: np.ndarray
    covariance: np.ndarray
    frame: Frame | None = None
    rounds: int = 1
    surrogate: Surrogate | None = None
    check: Check | None = None
    bounds: Bounds | None = None
    slope: float | None = None
    step: float = 1.0
    centred: bool = False
    mirror: Mirror | None = None
    has_arrived: bool = True
    steps: tuple[str, ...] = ()
    statistics: Statistics | None = None
    has_humps: bool = False

    @property
    def z_frame(self) -> Frame:
        """Coordinates y in which the posterior of the unconstrained parameters z is about N(0, I)."""
        return Frame(self.start, np.linalg.cholesky(self.covariance))

    @property
    def draws_are_free(self) -> bool:
        """Whether all that the chain needs of the table has been released."""
        return self.mode in ("surrogate", "statistics")


class Chain(Algorithm):
    """A chain that a preparation has chosen.

    :param log_prior: of flat unconstrained z.
    """

    def __init__(self, prepared: Prepared, log_prior: Callable[[jax.Array], jax.Array]):
        self.prepared, self.log_prior = prepared, log_prior
        self.num_warmup = 0

    def init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        return jnp.zeros((), z.dtype)


THINNING, MOST_THINNING = 8, 128
"""NUTS's own iterations to one of the chain: they ask no row. So many at most, where fewer did not converge."""
_MORE = 4
LEAST_WARMUP = 300
"""Iterations in which NUTS adapts, whatever the chain's warmup is."""


class NutsChain(Chain):
    """NumPyro's NUTS on the prior and a released likelihood. No row is asked; any number of draws.

    The carry is its `HMCState`, in whitened coordinates: NumPyro's adaptation takes no variance for less than about
    1e-5. An iteration is several of NUTS's own, and where the chain's warmup is short, NUTS warms up before it.

    :ivar thinning: so many of NUTS's own.
    :param log_likelihood: as released, up to a constant, of flat unconstrained z. It knows nothing of the table.
    """

    def __init__(
        self,
        prepared: Prepared,
        log_prior: Callable[[jax.Array], jax.Array],
        log_likelihood: Callable[[jax.Array], jax.Array],
    ):
        super().__init__(prepared, log_prior)
        self.log_likelihood, self._frame = log_likelihood, prepared.z_frame
        self.thinning = THINNING

    def thin_more(self) -> bool:
        """Take more of NUTS's iterations to one of the chain from now on; whether there may be more."""
        before, self.thinning = self.thinning, max(self.thinning, min(_MORE * self.thinning, MOST_THINNING))
        return self.thinning > before

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {}

    def _start(self, rng_key: jax.Array, y: jax.Array) -> tuple[Any, Callable]:
        """NUTS's first state at `y`, and its step."""

        def potential(y: jax.Array) -> jax.Array:
            z = self._frame.at(y)
            return -self.log_prior(z) - self.log_likelihood(z)

        init, sample = hmc(potential_fn=potential, algo="NUTS")
        state = init(
            y,
            self._nuts_warmup,
            step_size=0.5,
            dense_mass=True,
            # Curved cuts and scales of hierarchies make narrow ends, in which longer steps diverge (the papers' banana,
            # 2,000 draws: R-hat up to 1.36 at the usual .8). Shorter ones ask no row.
            target_accept_prob=0.95,
            trajectory_length=None,
            find_heuristic_step_size=False,
            rng_key=rng_key,
        )
        return _without_keys(state), sample

    @property
    def _nuts_warmup(self) -> int:
        return max(self.thinning * self.num_warmup, LEAST_WARMUP)

    def init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        start_key, run_key = random.split(rng_key)
        state, _ = self._start(start_key, self._frame.of(z))
        missing = self._nuts_warmup - self.thinning * self.num_warmup
        return self._run(run_key, state, missing) if missing else state

    def _run(self, rng_key: jax.Array, state: Any, iterations: int) -> Any:
        """So many of NUTS's iterations; the state says whether the last one diverged."""
        start_key, run_key = random.split(rng_key)
        _, sample = self._start(start_key, state.z)  # NumPyro's step keeps what its start was told

        def move(k: jax.Array, state: Any) -> Any:
            step_key, adapt_key = random.split(random.fold_in(run_key, k))
            adapt_state = state.adapt_state._replace(rng_key=adapt_key)
            return _without_keys(sample(state._replace(rng_key=step_key, adapt_state=adapt_state), (), {}))

        return lax.fori_loop(0, iterations, move, state)

    def transition(self, step: Step) -> Transition:
        z = step.z
        state = self._run(step.rng_key, step.carry, self.thinning)
        return Transition(
            self._frame.at(state.z),
            jnp.array(True),
            state.accept_prob,
            jnp.zeros((), z.dtype),
            state,
            state.diverging,
        )


def shape_of_carry(z: jax.Array) -> HMCState:
    """What a `NutsChain` carries, as far as names go."""
    adapt_state = HMCAdaptState(*[z] * len(HMCAdaptState._fields))
    return _without_keys(HMCState(**dict.fromkeys(HMCState._fields, z) | {"adapt_state": adapt_state}))


def _without_keys(state: Any) -> Any:
    """NUTS's state as it is carried: keys come from the chain's own, and a copy of a state must not repeat one."""
    return state._replace(rng_key=None, adapt_state=state.adapt_state._replace(rng_key=None))


def surrogate_chain(prepared: Prepared, cut: Cut, log_prior: Callable, noise_aware: bool) -> NutsChain:
    """Mode "surrogate"; `cut` has the coordinates in which the parameters meet the data."""
    surrogate, coordinates, frame = prepared.surrogate, cut.coordinates, prepared.frame
    assert surrogate is not None
    assert frame is not None
    density = surrogate.noise_aware if noise_aware else surrogate.plug_in
    return NutsChain(prepared, log_prior, lambda z: density(frame.of(coordinates(z))))


class WalkChain(Chain):
    """A random walk in whitened coordinates with the penalty test on the noisy log ratio.

    :param cut: the coordinates in which the parameters meet the data.
    """

    def __init__(self, prepared: Prepared, cut: Cut, log_prior: Callable[[jax.Array], jax.Array]):
        super().__init__(prepared, log_prior)
        self._cut = cut

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"ratio": (1,)}

    def transition(self, step: Step) -> Transition:
        jump_key, accept_key = random.split(step.rng_key)
        target, z, prepared = step.target, step.z, self.prepared
        root = jnp.asarray(prepared.z_frame.whitening, z.dtype)
        z_new = z + prepared.step * root @ random.normal(jump_key, z.shape, z.dtype)
        frame, slope = prepared.frame, prepared.slope
        assert frame is not None
        assert slope is not None
        u, u_new = (frame.of(self._cut.coordinates(point)) for point in (z, z_new))
        ratio, scale = target.log_ratio(step.grant["ratio"], z, z_new, slope * jnp.linalg.norm(u_new - u))
        public = self.log_prior(z_new) - self.log_prior(z)
        accepted, accept_prob, scale = accept_with_penalty(accept_key, ratio + public, scale, z_new)
        return Transition(jnp.where(accepted, z_new, z), accepted, accept_prob, scale, step.carry)


class OwnChain(Algorithm):
    """A kernel's own algorithm in coordinates y, ``z = start + root @ y``, in which the posterior is about N(0, I).

    :param algorithm: the kernel, whose target is in y (`PrivateTarget.of`).
    """

    def __init__(self, prepared: Prepared, algorithm: Algorithm):
        self.prepared, self._algorithm, self._frame = prepared, algorithm, prepared.z_frame
        self.num_warmup = 0

    def parameters(self, y: jax.Array) -> jax.Array:
        """z of `y`."""
        return self._frame.at(y)

    def releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        return self._algorithm.releases(num_iterations, num_chains, resumed)

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return self._algorithm.noise_shapes(num_params)

    def request(self, carry: Any) -> dict[str, jax.Array | int]:
        return self._algorithm.request(carry)

    def init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        return self._algorithm.init_carry(rng_key, self._frame.of(z))

    def transition(self, step: Step) -> Transition:
        moved = self._algorithm.transition(step._replace(z=self._frame.of(step.z)))
        # Where a proposal is rejected, the point stays as it is, to the last bit.
        return moved._replace(z=jnp.where(moved.accepted, self.parameters(moved.z), step.z))
