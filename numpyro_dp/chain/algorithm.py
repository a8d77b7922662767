"""What an algorithm defines, what one iteration of it starts from, and what it yields."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import jax

from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.privacy.draws import Grant


class Step(NamedTuple):
    """What one iteration of an algorithm starts from.

    :ivar target: the one way to the rows.
    :ivar grant: what may be released, and its noise.
    :ivar rng_key: of public randomness.
    :ivar i: iterations done.
    :ivar z: flat, unconstrained.
    :ivar adapt: step size and mass matrix, NumPyro's ``HMCAdaptState``.
    :ivar carry: see `Transition`.
    """

    target: PrivateTarget
    grant: Grant
    rng_key: jax.Array
    i: jax.Array
    z: jax.Array
    adapt: Any
    carry: Any


class Transition(NamedTuple):
    """What one iteration of an algorithm yields: the next point (flat, unconstrained) and what was released on it."""

    z: jax.Array
    accepted: jax.Array
    accept_prob: jax.Array
    noise_scale: jax.Array
    carry: Any
    diverging: jax.Array | bool = False


class Algorithm(ABC):
    """What an algorithm defines: what it releases in an iteration, and how it goes on from there."""

    @abstractmethod
    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        """Shape of one iteration's noise for each kind of release; the first axis counts releases."""

    def releases(self, num_iterations: int, num_chains: int, resumed: bool = False) -> dict[str, int]:
        """How many releases of each kind so many iterations need; by default each as many as it has noise for.

        :param resumed: whether the chains have done iterations before.
        """
        return {kind: shape[0] * num_iterations * num_chains for kind, shape in self.noise_shapes(0).items()}

    def request(self, carry: Any) -> dict[str, jax.Array | int]:
        """How many releases of each kind the next iteration makes; by default as many as it has noise for."""
        return {kind: shape[0] for kind, shape in self.noise_shapes(0).items()}

    @abstractmethod
    def init_carry(self, rng_key: jax.Array, z: jax.Array) -> Any:
        """What the algorithm carries along, at the start. Not from data."""

    @abstractmethod
    def transition(self, step: Step) -> Transition:
        """One iteration."""
