"""DP-penalty on noisy sufficient statistics, for exponential families (Yıldırım and Ermiş 2019, section 3.3).

Where the rows' log density is ``<eta(z), T(row)> - A(z) + h(row)``, the log likelihood ratio of any jump follows from
``S = sum_i T(row_i)``. One iteration from ``z``:

    1. propose ``z'`` (symmetric, public);
    2. release ``S' = S + N(0, sigma^2 I)``, with fresh noise;
    3. accept if ``log u < <D, S'> - n (A(z') - A(z)) + log p(z') - log p(z) - sigma^2 |D|^2 / 2``,
       ``D = eta(z') - eta(z)``.

Both end points share the noise of one ``S'``, hence a variance of ``sigma^2 |D|^2``, and the penalty makes the test
exact (Ceperley and Dewing 1999). No ratio is clipped: the clip bounds the statistics themselves, which are those of the
table with its values moved into public bounds, and of that table the posterior is exact. The rows are read once;
afterwards an iteration costs the same for any n. Reusing one ``S'`` would not be a penalty chain: it would sample the
posterior that takes the noisy statistics for the true ones.

Under add/remove n is private, and is released as one more statistic, the constant `bound` of each row.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.chain.acceptance import accept_with_penalty
from numpyro_dp.chain.algorithm import Step, Transition
from numpyro_dp.chain.random_walk import RandomWalk
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.kernels.options import MetropolisOptions, only
from numpyro_dp.model.arguments import PublicArguments
from numpyro_dp.model.families import BoundFamily, ExponentialFamily, family_of
from numpyro_dp.model.separable import SeparableModel


class DPExponentialFamily(RandomWalk, DPKernel):
    """Differentially private random-walk Metropolis on noisy sufficient statistics.

    **Formal guarantee.** All chains and all iterations, warmup and rejections included, are ``(eps, delta)``-DP under
    `neighboring_relation`: each iteration releases one Gaussian sum, the vector of sufficient statistics, at the noise
    multiplier ``tau`` that the budget allows, and k of them cost ``rho = k / (2 tau^2)``.

    **Exactness.** For the table whose values are moved into `bounds` the posterior is exact.

    :param model: a NumPyro model with one observed site, whose parameters do not depend on the rows (no covariates);
        `numpyro_dp.model.families` has the list. The family is read off the model.
    :param bounds: public limits ``(low, high)`` of the observed values, for likelihoods with unbounded values. Narrow
        bounds mean little noise; values beyond are moved to them.
    :param family: for other likelihoods, their statistics as an `ExponentialFamily`, which is compared with the model.
    :param one_component, guided, step_size: as for `DPPenalty`.
    :param noise_multiplier_statistics: instead of `eps`, noise standard deviation over sensitivity.
    :param options: `numpyro_dp.kernels.options.KernelOptions` and `MetropolisOptions`.
    """

    def __init__(
        self,
        model: Callable,
        eps: float | None = None,
        delta: float | None = None,
        *,
        bounds: Any = None,
        family: ExponentialFamily | None = None,
        one_component: bool = False,
        guided: bool = False,
        step_size: float | None = None,
        noise_multiplier_statistics: float | None = None,
        **options: Unpack[MetropolisOptions],
    ):
        super().__init__(
            model,
            eps,
            delta,
            noise_multipliers={"statistics": noise_multiplier_statistics},
            clips={},
            step_size=step_size,
            **only(MetropolisOptions, options),
        )
        if self.settings.unit is not None:
            raise ValueError("sufficient statistics are bounded row by row: use another kernel with unit")
        if self.settings.has_exchange and not self._counts_rows:
            raise ValueError(
                "how many rows the other owners have is not known here: give "
                "neighboring_relation='add_or_remove_one', under which it is one of the noisy statistics"
            )
        self._set_walk(one_component, guided, self.settings.dense_mass)
        self._bounds, self._given_family = bounds, family
        self._family: BoundFamily | None = None
        self._public: list[Any] | None = None  # what the family was read off with
        self._size_and_bound = (0, 0.0)  # of the family, for the report; copies have no family

    @property
    def _counts_rows(self) -> bool:
        """Whether the number of rows is private, and so one of the statistics."""
        return self.settings.neighboring_relation == "add_or_remove_one"

    _reads_rows_once = True

    def _see(self, separated: SeparableModel, public: PublicArguments, is_new: bool) -> None:
        known = None if self._family is None or is_new else self._public
        if known is not None and _all_equal(public.leaves, known):
            return
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in public.leaves)
        # It must outlive the trace in which it is read off; with traced public values it cannot.
        with nullcontext() if traced else jax.ensure_compile_time_eval():
            self._family = family_of(separated, public.args, public.kwargs, self._bounds, self._given_family)
        self._size_and_bound = (self._family.size, self._family.bound)
        self._public = None if traced else public.leaves

    def _queries(self, separated: SeparableModel, public: PublicArguments) -> list[tuple[Callable, tuple]]:
        prior, (density, (z, rows)) = super()._queries(separated, public)
        family = self._known_family
        of_z = [(family.natural_parameters, (z,)), (family.log_partition, (z,))]
        return [prior, (density, (z, rows)), (family.statistic, (rows,)), *of_z]

    def _ready(self, target: PrivateTarget) -> PrivateTarget:
        target.prepare_statistics(self._known_family, counted=self._counts_rows)
        return target

    @property
    def _known_family(self) -> BoundFamily:
        if self._family is None:
            raise RuntimeError("this kernel was not initialised: call `init` first, or use it in an MCMC")
        return self._family

    _released = "statistics"

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"statistics": (1, self._known_family.size + self._counts_rows)}

    def describe_clip(self, kind: str) -> str:
        bounds = "" if self._bounds is None else f" of values in bounds {self._bounds}"
        size, bound = self._size_and_bound
        return f"{size} statistics{bounds}, of norm up to {bound:.4g}"

    def describe_exactness(self) -> str:
        return "the posterior is exact for the table with its values moved into the bounds"

    def transition(self, step: Step) -> Transition:
        jump, moves, accept_key = self._jump(step)
        target, z, z_new, family = step.target, step.z, step.z + jump, self._known_family
        statistics, sd = target.statistics(step.grant["statistics"])
        change, log_partition = family.change(z, z_new)
        if self._counts_rows:
            change = jnp.append(change, -log_partition / family.bound)
            log_ratio = change @ statistics
        else:
            log_ratio = change @ statistics - target.num_rows * log_partition
        decision = accept_with_penalty(
            accept_key,
            target.power * log_ratio + target.log_prior(z_new) - target.log_prior(z),
            target.power * sd * jnp.linalg.norm(change),
            z_new,
        )
        return self._arrive(step, z_new, moves, *decision)

    def __getstate__(self):
        return super().__getstate__() | {"_family": None, "_public": None}


def _all_equal(first: list[Any], second: list[Any]) -> bool:
    """Whether two lists hold the same values; traced ones, whose values are not known, count as the same."""

    def same(a: Any, b: Any) -> bool:
        traced = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
        return a is b or traced or bool(np.array_equal(a, b))

    return len(first) == len(second) and all(map(same, first, second))
