"""DP-Barker: acceptance tests with noise of a fixed size, full batch and subsampled (Heikkilä et al. 2019).

Barker's test accepts ``z'`` if ``lambda + V > 0`` for the log acceptance ratio ``lambda`` and a logistic ``V``: noise
is part of it already, and what is released is one bit. ``lambda`` is a sum over rows, tempered by ``omega = power``,
and each row's part is clipped to ``+-B``. Here `B` is a constant, and it follows from the budget; proposals are kept so
short that
``clip_ratio * omega * |z' - z| <= B``.

=================  ====================================  ============================  ====================
                   test                                  cost of one iteration         exact?
=================  ====================================  ============================  ====================
default            ``lambda + V > 0``                    ``rho = B^2 / 2``             if nothing is clipped
                                                         (add/remove: ``B^2 / 8``)
`variance` = C     ``lambda + N(0, C) + V_C > 0``        ``rho = 2 B^2 / C``           as `correction` is
                                                         (add/remove: ``B^2 / 2C``)
`batch_size` = b   ``lambda_b + N(0, C - v_b) + V_C``    `BarkerBatch`                 approximate
                   ``> 0``
=================  ====================================  ============================  ====================

``V_C`` is what is left to draw. With ``correction="exponential"`` it is ``Exp(1) - C / 2``, which makes the test the
penalty test, exact for every C. With ``correction="logistic"`` it is the paper's: a law for which ``N(0, C) + V_C`` is
close to logistic (none is exactly; see `numpyro_dp.kernels.barker_correction` for the errors). The default test needs
neither, and at equal privacy it can afford rows twice as large as the paper's with C = 2. k data owners add noise of
variance ``C / k`` each, so that its sum is what the test needs; each pays ``rho = 2 k B^2 / C``.

On a batch the estimate ``lambda_b = (omega n / b) sum r_i`` has a variance ``v_b`` of its own, which is brought to C in
total. Rows are clipped to ``c = kappa sqrt(b) / (omega n)``, where kappa follows from the budget (but is at most
``0.9 sqrt(C)``), so that ``v_b <= kappa^2 < C``. It rests on the estimate being normal.
"""

import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_dp.chain.algorithm import Step, Transition
from numpyro_dp.chain.random_walk import RandomWalk
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.kernels.barker_correction import (
    Correction,
    ExponentialCorrection,
    exponential_correction,
    logistic_correction,
)
from numpyro_dp.kernels.options import MetropolisOptions, only
from numpyro_dp.kernels.prepared import PreparedKernel, prepare_own_chain, without_preparation
from numpyro_dp.kernels.state import DPState
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.batches import AllRows, Batches, FixedBatches
from numpyro_dp.privacy.draws import Draw
from numpyro_dp.privacy.mechanisms import BarkerBatch, LogisticBit, Mechanism, bounds_per_row
from numpyro_dp.privacy.release import Exchange, batch_bit_bound

CORRECTIONS: dict[str, Callable[[float], Correction | ExponentialCorrection]] = {
    "exponential": exponential_correction,
    "logistic": logistic_correction,
}


LARGEST_BATCH_SHARE = 0.9
"""How much of the test's standard deviation a batch may bring at most."""


class DPBarker(RandomWalk, PreparedKernel):
    """Differentially private random-walk MCMC with Barker's test.

    **Formal guarantee.** All chains and all iterations, warmup and rejections included, are ``(eps, delta)``-DP under
    `neighboring_relation`. Each iteration releases one bit (the default and on batches), whose logit moves by at most
    the sensitivity (see `LogisticBit`), or which is read off a Gaussian release (`Gaussian`, `BarkerBatch`: Theorems 1
    and 2 of Heikkilä et al. 2019, with the tighter bounds of `numpyro_dp.privacy.mechanisms`).

    :param prepare: True or a `numpyro_dp.Preparation` for a private search before the chain starts, for 30% of the
        budget. It finds where the chain starts, coordinates in which the posterior is about N(0, I), the clip bound and
        a first step size. Then neither `clip_ratio` nor `step_size`, mass matrix or owners may be given.
    :param model, eps, delta, one_component, guided, step_size: as for `DPPenalty`. Whatever the step size, jumps are
        shortened to the largest distance at which rows of slope `clip_ratio` are not clipped.
    :param clip_ratio: largest change of one row's log density per unit of distance in unconstrained space that is
        counted in full; it decides how far proposals go. Default 1, and the report says so.
    :param variance: of the Gaussian noise of all owners together, public. Default: none, the exact logistic test; with
        `batch_size` or `owners`, 2.
    :param correction: what completes Gaussian noise to a test, ``"exponential"`` (default) or ``"logistic"``. With
        ``eps=inf`` the test is always Barker's, on all rows.
    :param batch_size: how many rows to draw in each iteration, without replacement. ``"replace_one"`` only.
    :param noise_multiplier_ratio: instead of `eps`: scale of each owner's noise (1 for the logistic, ``sqrt(variance /
        k)``) over the sensitivity of the tempered log ratio; on batches ``1 / kappa``.
    :param options: `numpyro_dp.kernels.options.KernelOptions` and `MetropolisOptions`; `target_accept_prob` is 0.35.

    `DPState.accept_prob` is the bit itself, since nothing else is released; `DPState.noise_scale` is the test's noise
    in the log ratio, and `DPState.carry` holds the walk's directions.
    """

    _has_own_chain = True

    def __init__(
        self,
        model: Callable,
        eps: float | None = None,
        delta: float | None = None,
        *,
        prepare: Preparation | bool = False,
        clip_ratio: float | None = None,
        variance: float | None = None,
        correction: str = "exponential",
        one_component: bool = False,
        guided: bool = False,
        step_size: float | None = None,
        batch_size: int | Batches | None = None,
        noise_multiplier_ratio: float | None = None,
        **options: Unpack[MetropolisOptions],
    ):
        if callable(clip_ratio):
            raise TypeError("DPBarker's jumps follow from clip_ratio, a number; a function is for DPPenalty and DPHMC")
        plain = {"clip_ratio": clip_ratio, "step_size": step_size}
        preparation = prepare_own_chain(prepare, eps, plain | without_preparation(options))
        options.setdefault("target_accept_prob", 0.35)
        super().__init__(
            model,
            eps,
            delta,
            prepare=preparation,
            noise_multipliers={"ratio": noise_multiplier_ratio},
            clips={"ratio": clip_ratio},
            batch_size=FixedBatches(batch_size) if isinstance(batch_size, int | np.integer) else batch_size,
            step_size=step_size,
            **only(MetropolisOptions, options),
        )
        if not isinstance(self.settings.batches, AllRows | FixedBatches):
            raise ValueError("DPBarker's batches have a fixed size: give batch_size as an integer")
        if self._batched and self.settings.neighboring_relation != "replace_one":
            raise ValueError("DPBarker on batches needs neighboring_relation='replace_one'")
        if correction not in CORRECTIONS:
            raise ValueError(f"correction must be one of {', '.join(map(repr, CORRECTIONS))}, got {correction!r}")
        if variance is not None and not 0 < variance < math.inf:
            raise ValueError(f"variance must be positive, got {variance}")
        self._set_walk(one_component, guided, self.settings.dense_mass)
        # One bit cannot be made of several owners' noise.
        is_gaussian = self._batched or self.settings.owners is not None
        self._variance = 2.0 if is_gaussian and variance is None else variance
        if self._variance is None and correction != "exponential":
            raise ValueError(
                f"correction={correction!r} completes Gaussian noise, and there is none: give variance or batch_size"
            )
        self._correction_name = correction  # a part of what decides what is asked of the table
        self._correction = None if self._variance is None else CORRECTIONS[correction](self._variance)

    @property
    def _batched(self) -> bool:
        return isinstance(self.settings.batches, FixedBatches)

    # -- What is released --------------------------------------------------------------------------------------------

    def _mechanisms(
        self, kind: str, noise_multiplier: float, num_rows: int, num_iterations: int
    ) -> tuple[Mechanism, ...]:
        if isinstance(self.settings.batches, FixedBatches) and self._variance is not None:
            # A budget that would allow the batch itself more than the total variance is not used up.
            least = 1 / (LARGEST_BATCH_SHARE * math.sqrt(self._variance)) if noise_multiplier else 0.0
            size = self.settings.batches.batch_size
            return (BarkerBatch(max(noise_multiplier, least), size, num_rows, self._variance),)
        if self._variance is None:
            return (LogisticBit(noise_multiplier),)
        return super()._mechanisms(kind, noise_multiplier, num_rows, num_iterations)

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"ratio": (1,)}

    def _row_bound(self, noise_multiplier: jax.Array, power: float, num_rows: int) -> jax.Array:
        """Bound on the change of one row's log density, before tempering, at which the noise is what was granted."""
        if isinstance(self.settings.batches, FixedBatches):
            mechanism = BarkerBatch(1.0, self.settings.batches.batch_size, num_rows, self._variance or 0.0)
            return batch_bit_bound(mechanism, noise_multiplier, power * self.settings.batches.weight(num_rows))
        per_row = bounds_per_row(self.settings.neighboring_relation)
        num_owners = 1 if self.settings.owners is None else self.settings.owners.num_owners
        scale = 1.0 if self._variance is None else math.sqrt(self._variance / num_owners)  # of each owner's noise
        return scale / (per_row * noise_multiplier * power)

    def _worth(self, slope: float, size: int, num_rows: int) -> float:
        plan = self.ledger.plan
        multiplier = jnp.asarray(plan.kinds["ratio"].mechanisms[0].noise_multiplier, jnp.result_type(float))
        reach = float(self._row_bound(multiplier, self.settings.power_for(num_rows), num_rows)) / slope
        # About half of the jumps are accepted, and those of length l add l^2 / size to the variance of a coordinate.
        jump = min(reach, 2.38)
        return plan.num_iterations * plan.num_chains * jump**2 / size / 4

    def describe_clip(self, kind: str) -> str:
        if kind != "ratio":
            return super().describe_clip(kind)
        bound = f"{self.clip('ratio'):g} per unit of distance bounds the jumps"
        multiplier = self.ledger.plan.kinds["ratio"].mechanisms[0].noise_multiplier
        if not multiplier:
            return bound
        if isinstance(self.settings.batches, FixedBatches):
            return f"{bound}; tempered rows are clipped at {1 / multiplier:.4g} sqrt(batch_size) / n"
        return f"{bound}; tempered rows are clipped at {float(self._row_bound(jnp.asarray(multiplier), 1.0, 1)):.4g}"

    def describe_exactness(self) -> str:
        approximations = []
        if isinstance(self._correction, Correction):
            approximations.append(f"the test is Barker's up to an error of {self._correction.cdf_error:.1e}")
        if self._batched:
            approximations.append("estimates from batches are taken to be normal")
        return "; ".join([super().describe_exactness().split(";")[0], *approximations])

    def _agree_with_other_owners(self, owners: Exchange, state: DPState) -> None:
        super()._agree_with_other_owners(owners, state)
        # Of it follow the clip bound and how long jumps are.
        multiplier = self.ledger.plan.kinds["ratio"].mechanisms[0].noise_multiplier
        owners.check(b"noise multiplier, by eps and delta", repr(multiplier).encode())

    # -- The algorithm -----------------------------------------------------------------------------------------------

    def transition(self, step: Step) -> Transition:
        jump, moves, accept_key = self._jump(step)
        target, z, draw = step.target, step.z, step.grant["ratio"]
        bound = self._row_bound(draw.noise_multiplier, target.power, target.num_rows) if draw.is_private else math.inf
        # Shortened, the jump is still symmetric, and its law the same at every z.
        reach = bound / self.clip("ratio") if draw.is_private else math.inf
        z_new = z + jump * jnp.minimum(1, reach / jnp.linalg.norm(jump))
        public = target.log_prior(z_new) - target.log_prior(z)
        bit = self._test(target, draw, accept_key, z, z_new, public, bound)
        accepted = bit & jnp.all(jnp.isfinite(z_new)) & ~jnp.isnan(public)
        scale = math.pi / math.sqrt(3) if self._variance is None else math.sqrt(self._variance)
        noise = jnp.asarray(scale if draw.is_private else 0.0, z.dtype)
        return self._arrive(step, z_new, moves, accepted, accepted.astype(z.dtype), noise)

    def _test(
        self,
        target: PrivateTarget,
        draw: Draw,
        rng_key: jax.Array,
        z: jax.Array,
        z_new: jax.Array,
        public: jax.Array,
        bound: jax.Array | float,
    ) -> jax.Array:
        """Whether ``log ratio + public + noise + correction > 0``."""
        if not draw.is_private:
            return target.exact_log_ratio(z, z_new) + public + random.logistic(rng_key, dtype=z.dtype) > 0
        if self._correction is None:
            return target.log_ratio_exceeds(draw, z, z_new, bound, -public)
        correction = self._correction.sample(rng_key, (), z.dtype)
        if self._batched and self._variance is not None:
            return target.batch_log_ratio_exceeds(draw, z, z_new, -public - correction)
        return target.log_ratio(draw, z, z_new, bound).value + public + correction > 0

    def _adapt(self, i: jax.Array, accept_prob: jax.Array, z: jax.Array, adapt_state: Any) -> Any:
        adapted = super()._adapt(i, accept_prob, z, adapt_state)
        # Where jumps are shortened to the bound a larger step size changes nothing, so nothing would keep it from
        # growing for ever.
        return adapted._replace(step_size=jnp.minimum(adapted.step_size, 1e3))
