"""What the samplers without an acceptance test share: noisy gradients, step sizes, and the noise that fits them.

They follow a stochastic gradient ``g(z) = w (sum over a batch of clip(grad l_i(z)) + N(0, sigma^2)) + grad log p(z)``
with ``w = power / rate``, and need Gaussian noise of their own to explore: per step of size h, of variance ``2 h F``
with a friction F. The privacy noise takes the place of as much of it as it can:

    ``privacy noise h^2 w^2 sigma^2  +  added noise  =  2 h F``        (in coordinates scaled by `inverse_mass_matrix`)

so the step size decides how much privacy noise fits in, and a budget decides how large steps may be. Where more would
be needed than fits, the chain would be overheated: such a plan is refused. The price of a step depends on its size;
with decreasing steps the noise grows like ``1 / sqrt(h)``, so that privacy noise keeps its share, and every iteration
is a mechanism of its own to the accountant.

Without a test nothing corrects what is wrong with a step: the posterior is approximate, by an error that shrinks with
the step size (discretisation, and the sampling noise of batches), and by one that does not (clipped gradients, which
move the posterior to where the *clipped* gradients balance).
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.chain.algorithm import Step, Transition
from numpyro_dp.kernels.options import KernelOptions, only
from numpyro_dp.kernels.prepared import PreparedKernel, prepare_own_chain, without_preparation
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.batches import AllRows, Batches
from numpyro_dp.privacy.clipping import OwnerIndex
from numpyro_dp.privacy.draws import Draw
from numpyro_dp.privacy.ledger import Plan
from numpyro_dp.privacy.mechanisms import Mechanism, bounds_per_row
from numpyro_dp.privacy.release import Released

MATCHED = "matched"
_HEAT = 0.2
"""Of the sampler's own noise, what that of batches may add in a prepared run: sds are then up to a tenth too wide."""


def decreasing_steps(initial: float, exponent: float = 1 / 3) -> "DecreasingSteps":
    """Step sizes ``initial * t**-exponent`` for the iterations t = 1, 2, ...

    The default exponent minimises the mean squared error of averages weighted by the step sizes (Teh, Thiery and
    Vollmer 2016), which are in the extra field ``carry.step_size``; plain averages converge for exponents in (1/2, 1].
    """
    if not initial > 0 or not 0 <= exponent <= 1:
        raise ValueError(f"initial must be positive and exponent in [0, 1], got {initial} and {exponent}")
    return DecreasingSteps(float(initial), float(exponent))


class DecreasingSteps(NamedTuple):
    """Made by `decreasing_steps`."""

    initial: float
    exponent: float

    def __call__(self, t: jax.Array) -> jax.Array:
        return self.initial * t**-self.exponent


class Carry(NamedTuple):
    """What these kernels carry along.

    :ivar step_size: of the last iteration.
    :ivar dynamics: what the sampler itself carries along; see there.
    """

    step_size: jax.Array
    dynamics: Any


class StochasticGradientKernel(PreparedKernel):
    """Base of `DPSGLD`, `DPSGNHT` and `DPSGHMC`; see there."""

    _has_own_chain = True

    def __init__(
        self,
        model: Callable,
        eps: float | None = None,
        delta: float | None = None,
        *,
        prepare: Preparation | bool = False,
        clip_grad: float | None = None,
        step_size: float | Callable | None = None,
        batch_size: float | Batches | None = None,
        num_steps: int = 1,
        noise_multiplier_grad: float | str | None = None,
        **options: Unpack[KernelOptions],
    ):
        self._match_noise = isinstance(noise_multiplier_grad, str)
        if self._match_noise:
            if noise_multiplier_grad != MATCHED:
                raise ValueError(
                    f"noise_multiplier_grad must be a number or {MATCHED!r}, got {noise_multiplier_grad!r}"
                )
            if step_size is None:
                raise ValueError(f"noise_multiplier_grad={MATCHED!r} follows from the step size: give step_size")
        if not isinstance(num_steps, int) or num_steps < 1:
            raise ValueError(f"num_steps must be a positive integer, got {num_steps!r}")
        plain = {"clip_grad": clip_grad, "step_size": step_size}
        preparation = prepare_own_chain(prepare, eps, plain | self._in_units_of_width() | without_preparation(options))
        super().__init__(
            model,
            eps,
            delta,
            prepare=preparation,
            noise_multipliers={"grad": 1.0 if self._match_noise else noise_multiplier_grad},  # type: ignore[dict-item]
            clips={"grad": clip_grad},
            batch_size=batch_size,
            step_size=step_size,
            adapt_step_size=False,
            **only(KernelOptions, options),
        )
        if self.settings.has_exchange:
            raise ValueError(
                "how much noise data owners in other processes add is not known when step sizes are chosen, and "
                "nothing corrects for it: use DPPenalty or DPHMC, whose test does"
            )
        self._num_steps = num_steps
        self._schedules: list[np.ndarray] = []

    # -- What a sampler defines --------------------------------------------------------------------------------------

    def _in_units_of_width(self) -> dict[str, Any]:
        """Arguments of the sampler's own that a preparation would change the meaning of; None where not given."""
        return {}

    @abstractmethod
    def _friction_at(self, width: float) -> float:
        """Friction F, for a posterior of about this width."""

    @abstractmethod
    def _default_step_size(self, width: float) -> float:
        """A step size that is stable for a posterior of about this width."""

    def _init_dynamics(self, rng_key: jax.Array, y: jax.Array) -> Any:
        """What the sampler itself carries along, at the start."""
        return None

    @abstractmethod
    def _move(
        self,
        gradient: Callable[[jax.Array, Draw], Released],
        draws: Draw,
        rng_key: jax.Array,
        y: jax.Array,
        step_size: jax.Array,
        friction: float,
        dynamics: Any,
    ) -> tuple[jax.Array, Any]:
        """All steps of one iteration, in scaled coordinates ``y``, from noisy gradients in those coordinates."""

    # -- Step sizes and noise ----------------------------------------------------------------------------------------

    def _width(self, num_rows: int) -> float:
        """Width of a posterior whose rows each have information of about 1; 1 in prepared coordinates."""
        if self.prepared is not None:
            return 1.0
        return self.settings.width_for(num_rows)

    def _schedule(self, num_iterations: int) -> np.ndarray | None:
        """Step size of each iteration, if the user gave a schedule."""
        if not callable(self.settings.step_size):
            return None
        # Evaluated once: a function that returns something else later must not change what has been accounted for.
        for sizes in self._schedules:
            if len(sizes) == num_iterations:
                return sizes
        try:
            sizes = np.asarray(jax.vmap(self.settings.step_size)(jnp.arange(1.0, num_iterations + 1)), float)
        except Exception as error:
            raise ValueError(
                "step_size as a function must map the iteration t = 1, 2, ... (a JAX number) to a step size, such as "
                f"`lambda t: 0.1 * t ** (-1 / 3)`; it raised {type(error).__name__}: {error}"
            ) from error
        if sizes.shape != (num_iterations,) or not (np.isfinite(sizes) & (sizes > 0)).all():
            raise ValueError("step_size must give one positive number for each iteration t = 1, 2, ...")
        self._schedules.append(sizes)
        return sizes

    def _asked_by(self) -> list[tuple[str, Any]]:
        return [*super()._asked_by(), ("schedules", [sizes.tolist() for sizes in self._schedules])]

    def _mechanisms(
        self, kind: str, noise_multiplier: float, num_rows: int, num_iterations: int
    ) -> tuple[Mechanism, ...]:
        sizes = self._schedule(num_iterations)
        first = self.settings.step_size if sizes is None else float(sizes[0])
        if self._match_noise:
            noise_multiplier *= self._matched_noise(first, num_rows)
        if sizes is None:
            return (self.settings.batches.mechanism(noise_multiplier, num_rows),)
        return tuple(self.settings.batches.mechanism(noise_multiplier * math.sqrt(first / h), num_rows) for h in sizes)

    def _noise_per_multiplier(self, num_rows: int) -> float:
        """Standard deviation of the noise in the scaled gradient, of all owners, at a noise multiplier of 1."""
        per_row = bounds_per_row(self.settings.neighboring_relation)
        weight = 1.0 if isinstance(self.settings.batches, AllRows) else self.settings.batches.weight(num_rows)
        owners = math.sqrt(self.settings.owners.num_owners) if isinstance(self.settings.owners, OwnerIndex) else 1.0
        return self.settings.power_for(num_rows) * weight * per_row * self.clip("grad") * self._largest_scale * owners

    def _matched_noise(self, step_size: float, num_rows: int) -> float:
        """The noise multiplier at which all of the sampler's noise is privacy noise."""
        friction = self._friction_at(self._width(num_rows))
        return math.sqrt(2 * friction / step_size) / self._noise_per_multiplier(num_rows)

    def _worth(self, slope: float, size: int, num_rows: int) -> float:
        plan, friction = self.ledger.plan, self._friction_at(1.0)
        multiplier = plan.kinds["grad"].mechanisms[0].noise_multiplier
        noise = multiplier * self._noise_per_multiplier(num_rows) * slope / self.clip("grad")
        step_size = min(self._default_step_size(1.0), 2 * friction / noise**2, self._longest_on_batches(num_rows))
        return plan.num_iterations * plan.num_chains * self._relaxations(step_size) / 2

    def _longest_on_batches(self, num_rows: int) -> float:
        """The largest step in prepared coordinates in which the sampling noise of batches is `_HEAT` of what fits.

        Where the model holds, each entry of all rows' scores has the variance 1 there, so that of an estimate from a
        batch of the share q is ``(1 - q) / q``.
        """
        if isinstance(self.settings.batches, AllRows):
            return math.inf
        variance = self.settings.power_for(num_rows) * (self.settings.batches.weight(num_rows) - 1)
        return _HEAT * 2 * self._friction_at(1.0) / variance if variance > 0 else math.inf

    def _relaxations(self, step_size: float) -> float:
        """How many relaxation times of N(0, I) an iteration takes."""
        return self._num_steps * step_size

    @property
    def _largest_scale(self) -> float:
        given = self.settings.inverse_mass_matrix
        values = jax.tree.leaves(given if given is not None else 1.0)
        return math.sqrt(max(float(np.max(value)) for value in values))

    def _check_plan(self, plan: Plan, separated: SeparableModel) -> None:
        """Refuse step sizes with which the privacy noise alone would overheat the chain."""
        given, num_rows = self.settings.inverse_mass_matrix, separated.num_rows
        if isinstance(given, Mapping) and (missing := set(separated.prototype) - set(given)):
            raise ValueError(
                f"inverse_mass_matrix leaves out {', '.join(sorted(missing))}: noise is fitted to its largest entry: "
                "give one for each site (1.0 is the default)"
            )
        friction = self._friction_at(self._width(num_rows))
        if not plan.private or self.settings.step_size is None or friction == 0:
            return
        sizes = self._schedule(plan.num_iterations)
        first = self.settings.step_size if sizes is None else float(sizes[0])
        multiplier = plan.kinds["grad"].mechanisms[0].noise_multiplier
        largest = 2 * friction / (multiplier * self._noise_per_multiplier(num_rows)) ** 2
        if first > largest * (1 + 1e-6):
            raise ValueError(
                f"a (first) step size of {first:.4g} is too large for this budget: the privacy noise alone would "
                f"overheat the chain. The largest that it allows is {largest:.4g}. Give a smaller step_size, leave it "
                "out, raise eps, or run fewer iterations"
            )

    def _initial_step_size(self, num_rows: int) -> float:
        if callable(self.settings.step_size):
            with jax.ensure_compile_time_eval():
                return float(self.settings.step_size(jnp.ones(())))
        return (
            self._default_step_size(self._width(num_rows))
            if self.settings.step_size is None
            else self.settings.step_size
        )

    def _step_size_at(self, i: jax.Array, noise: jax.Array, friction: float, num_rows: int, dtype: Any) -> jax.Array:
        """Step size of iteration i; if the user gave none, the default, or the largest that the noise fits in."""
        if self.settings.step_size is None:
            default = self._default_step_size(self._width(num_rows))
            largest = jnp.where((noise > 0) & (friction > 0), 2 * friction / noise**2, jnp.inf)
            if self.prepared is not None:
                default = min(default, self._longest_on_batches(num_rows))
            return jnp.minimum(default, largest).astype(dtype)
        if callable(self.settings.step_size):
            return jnp.asarray(self.settings.step_size((i + 1).astype(dtype)), dtype)
        return jnp.asarray(self.settings.step_size, dtype)

    # -- The interface of DPKernel -----------------------------------------------------------------------------------

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"grad": (self._num_steps, num_params)}

    def describe_exactness(self) -> str:
        return (
            "the posterior is approximate: there is no acceptance test, so its error shrinks only with the step size, "
            f"and gradients beyond clip_grad = {self.clip('grad'):g} move it to where clipped gradients balance"
        )

    def init_carry(self, rng_key: jax.Array, z: jax.Array) -> Carry:
        return Carry(jnp.zeros((), z.dtype), self._init_dynamics(rng_key, z))

    def transition(self, step: Step) -> Transition:
        target, grant, rng_key, i, z, adapt, carry = step
        scales = jnp.sqrt(adapt.inverse_mass_matrix)
        draws = grant["grad"]
        noise = draws.noise_multiplier * self._noise_per_multiplier(target.num_rows)
        friction = self._friction_at(self._width(target.num_rows))
        step_size = self._step_size_at(i, noise, friction, target.num_rows, z.dtype)

        def gradient(y: jax.Array, draw: Draw) -> Released:
            position = y * scales
            likelihood = target.gradient(draw, position, self.clip("grad"))
            return Released(
                scales * (likelihood.value + jax.grad(target.log_prior)(position)), scales * likelihood.scale
            )

        y, dynamics = self._move(gradient, draws, rng_key, z / scales, step_size, friction, carry.dynamics)
        possible = jnp.all(jnp.isfinite(y))  # a matter of released values
        return Transition(
            jnp.where(possible, y * scales, z),
            possible,
            possible.astype(z.dtype),
            (noise / self._largest_scale).astype(z.dtype),
            Carry(step_size, jax.tree.map(lambda new, old: jnp.where(possible, new, old), dynamics, carry.dynamics)),
        )


def added_noise(step_size: jax.Array, friction: jax.Array | float, scale: jax.Array) -> jax.Array:
    """Standard deviation of the noise that a step needs beside privacy noise of standard deviation `scale`."""
    return jnp.sqrt(jnp.maximum(2 * step_size * friction - (step_size * scale) ** 2, 0))
