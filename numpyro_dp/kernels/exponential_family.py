"""Posteriors from noisy sufficient statistics, for exponential families (Yıldırım 2017, section 3.3).

Where the rows' log density is ``<eta(z), T(row)> - A(z) + h(row)``, all that they say about the parameters is ``S =
sum_i T(row_i)``. By default S is released once, with noise, and NUTS draws from the exact prior times what the released
S' says, noise included (`numpyro_dp.preparation.statistics`). More draws cost nothing.

With ``prepare=False`` it is the paper's DP-penalty chain, whose target is the posterior given S itself. One iteration
from ``z``:

    1. propose ``z'`` (symmetric, public);
    2. release ``S' = S + N(0, sigma^2 I)``, with fresh noise;
    3. accept if ``log u < <D, S'> - n (A(z') - A(z)) + log p(z') - log p(z) - sigma^2 |D|^2 / 2``,
       ``D = eta(z') - eta(z)``.

Both end points share the noise of one ``S'``, hence a variance of ``sigma^2 |D|^2``, and the penalty makes the test
exact (Ceperley and Dewing 1999). So many releases need a large budget: for one proportion, n = 500 and eps = 1, the
chain hardly moves. No ratio is clipped: the clip bounds the statistics themselves, which are those of the table with
its values moved into public bounds. The rows are read once; afterwards an iteration costs the same for any n.

Under add/remove n is private, and is released as one more statistic, the constant `bound` of each row.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from numpyro_dp.chain.acceptance import accept_with_penalty
from numpyro_dp.chain.algorithm import Step, Transition
from numpyro_dp.chain.random_walk import RandomWalk
from numpyro_dp.chain.target import ROOM, PrivateTarget
from numpyro_dp.kernels.options import MetropolisOptions, only
from numpyro_dp.kernels.prepared import (
    PreparedKernel,
    copied,
    resolve_preparation,
    same_values,
    without_preparation,
)
from numpyro_dp.model.arguments import PublicArguments
from numpyro_dp.model.families import BoundFamily, ExponentialFamily, family_of
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.preparation.begin import PRIOR_DRAWS
from numpyro_dp.preparation.chains import NutsChain, Prepared
from numpyro_dp.preparation.fund import BEGUN, RESERVE, Fund, Wish
from numpyro_dp.preparation.statistics import Statistics, SumLaw, find_modes
from numpyro_dp.privacy.accounting import noise_multiplier_for
from numpyro_dp.privacy.draws import Draw
from numpyro_dp.privacy.ledger import PrivacyBudgetError
from numpyro_dp.privacy.mechanisms import bounds_per_row
from numpyro_dp.privacy.release import Released

_COUNT_SHARE = 0.2
"""Of the budget, for the count of rows that do not count as they are.

Such a row moves the sum by up to one bound, so the two noises must be about as large. With a twentieth, 10% of missing
values among 800 were missed half the time, and the posterior was 6 of its standard deviations off.
"""
_STARTS = 8
"""Draws of the prior from which modes are searched."""


class DPExponentialFamily(RandomWalk, PreparedKernel):
    """Differentially private posteriors from noisy sufficient statistics.

    **Formal guarantee.** All chains and all iterations, warmup and rejections included, are ``(eps, delta)``-DP under
    `neighboring_relation`. What is released are Gaussian sums of vectors of bounded norm: the sufficient statistics
    once, and a count of the rows that `bounds` have moved; with ``prepare=False`` the statistics in each iteration. k
    releases at noise multiplier ``tau`` cost ``rho = k / (2 tau^2)``.

    **Exactness.** By default the draws are those of the posterior given the released statistics, up to the saddlepoint
    approximation of their law. With ``prepare=False`` they are a chain on the posterior given the table whose values
    are moved into `bounds`, and exact for it.

    :param model: a NumPyro model with one observed site, whose parameters do not depend on the rows (no covariates);
        `numpyro_dp.model.families` has the list. The family is read off the model.
    :param bounds: public limits ``(low, high)`` of the observed values, for likelihoods with unbounded values. Narrow
        bounds mean little noise; values beyond are moved to them.
    :param family: for other likelihoods, their statistics as an `ExponentialFamily`, which is compared with the model.
        The chain is then that of ``prepare=False``: how such sums vary is not known.
    :param prepare: whether the statistics are released once. False for the paper's chain, with its own options.
    :param one_component, guided, step_size: of that, as for `DPPenalty`.
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
        prepare: bool | None = None,
        one_component: bool = False,
        guided: bool = False,
        step_size: float | None = None,
        noise_multiplier_statistics: float | None = None,
        **options: Unpack[MetropolisOptions],
    ):
        if prepare not in (None, True, False):
            raise TypeError(f"prepare must be True, False or None, got {prepare!r}")
        if prepare and family is not None:
            raise ValueError(
                "how sums of statistics of your own vary is not known, so that one release of them says nothing "
                "certain: leave `prepare` out, and the statistics are released in each iteration"
            )
        walk = {"step_size": step_size, "one_component": one_component, "guided": guided}
        prepare = False if family is not None else prepare
        super().__init__(
            model,
            eps,
            delta,
            prepare=resolve_preparation(prepare, eps, walk | without_preparation(options)),
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
        self._read_with: list[Any] | None = None  # public arguments, of which the family was made
        self._size_and_bound = (0, 0.0)  # of the family, for the report; copies have no family

    @property
    def _counts_rows(self) -> bool:
        """Whether the number of rows is private, and so one of the statistics."""
        return self.settings.neighboring_relation == "add_or_remove_one"

    @property
    def _reads_rows_once(self) -> bool:  # type: ignore[override]
        return self.preparation is None

    def _see(self, separated: SeparableModel, public: PublicArguments, is_new: bool) -> None:
        known = None if self._family is None or is_new else self._read_with
        if known is not None and same_values(public.leaves, known):
            return
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in public.leaves)
        # It must outlive the trace in which it is read off; with traced public values it cannot.
        with nullcontext() if traced else jax.ensure_compile_time_eval():
            self._family = family_of(separated, public.args, public.kwargs, self._bounds, self._given_family)
        self._size_and_bound = (self._family.size, self._family.bound)
        self._read_with = None if traced else copied(public.leaves)

    def _queries(self, separated: SeparableModel, public: PublicArguments) -> list[tuple[Callable, tuple]]:
        prior, (density, (z, rows)) = super()._queries(separated, public)
        family = self._known_family
        of_z = [(family.natural_parameters, (z,)), (family.log_partition, (z,))]
        return [prior, (density, (z, rows)), (family.statistic, (rows,)), *of_z]

    def _ready(self, target: PrivateTarget) -> PrivateTarget:
        if self.preparation is None:
            target.prepare_statistics(self._known_family, counted=self._counts_rows)
        return target

    @property
    def _known_family(self) -> BoundFamily:
        if self._family is None:
            raise RuntimeError("this kernel was not initialised: call `init` first, or use it in an MCMC")
        return self._family

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"statistics": (1, self._known_family.size + self._counts_rows)}

    # -- One release -------------------------------------------------------------------------------------------------

    def _find_cut(self, separated: SeparableModel, public: PublicArguments) -> BoundFamily:
        return self._known_family

    def before_asking(  # type: ignore[override]
        self, separated: SeparableModel, public: PublicArguments, target: Callable[[], PrivateTarget]
    ) -> "_BegunSums":
        """Everything that comes before the first look at the table."""
        if RESERVE not in self.ledger.plan.kinds:
            raise PrivacyBudgetError(BEGUN)
        family = self._known_family
        assert family.log_partition_of_eta is not None
        eta = family.natural_parameters(jnp.zeros(separated.num_params, jnp.result_type(float)))
        if bool(jnp.isnan(family.log_partition_of_eta(eta))):
            raise ValueError(
                f"site '{family.site}' is weighted (`numpyro.handlers.scale`), and how a weighted sum varies is not "
                "known: temper by `power` or `n0`, or release the statistics in each iteration (prepare=False)"
            )
        self.ledger.require({RESERVE: 1}, 1, None, "the release of the statistics")
        of_rows = target()
        counted = self._counts_rows

        def sums(target: PrivateTarget, of_statistics: Draw, of_moved: Draw) -> tuple[Released, Released]:
            # Where n is public, half of it is taken off the count, for half the noise.
            half = 0.0 if counted else 0.5
            moved = target.release_sum(of_moved, lambda row: family.is_moved(row) - half, ROOM * (1 - half))
            return target.release_statistics(of_statistics, family, counted), moved

        log_prior, power = separated.log_prior(public.args, public.kwargs), self.settings.power_for(separated.num_rows)
        multiplier = noise_multiplier_for((1 - _COUNT_SHARE) * Fund(self.ledger).left, 1)
        noise = multiplier * bounds_per_row(self.settings.neighboring_relation) * family.bound
        law = SumLaw(family, separated.num_params, noise, counted)

        def minus_log_posterior(z: jax.Array, found: Statistics, middle: jax.Array) -> jax.Array:
            return -log_prior(z) - power * law.log_density(found, middle, z)

        return _BegunSums(
            family,
            of_rows,
            of_rows.program(sums),
            *separated.prior_draws(PRIOR_DRAWS, public.args, public.kwargs),
            jax.jit(law.middle),
            jax.jit(jax.value_and_grad(minus_log_posterior)),
            jax.jit(jax.hessian(minus_log_posterior)),
        )

    def ask_table(self, begun: "_BegunSums") -> Prepared:  # type: ignore[override]
        """Ask the table, once."""
        fund, size = Fund(self.ledger, self.announce), begun.cut.size + self._counts_rows
        count = _COUNT_SHARE * fund.left
        draws = fund.ask(statistics=Wish(fund.left - count, 1, (size,)), moved=Wish(count))
        found, moved = begun.sums(begun.target, draws["statistics"], draws["moved"])
        values, sd = np.asarray(found.value, float), float(found.scale)
        bound = begun.cut.bound
        statistics = Statistics(
            values[: begun.cut.size],
            sd,
            values[-1] / bound if self._counts_rows else float(begun.target.num_rows),
            sd / bound if self._counts_rows else 0.0,
            float(moved.value) + (0.0 if self._counts_rows else begun.target.num_rows / 2),
            float(moved.scale),
        )
        middle = begun.middle(statistics)
        modes = find_modes(
            lambda z: begun.density(z, statistics, middle),
            lambda z: begun.curvature(z, statistics, middle),
            begun.z_draws[:_STARTS],
            float(np.max(np.var(begun.z_draws, 0))),
        )
        return Prepared(
            "statistics",
            begun.cut.names,
            modes.best,
            modes.covariance,
            statistics=statistics,
            has_humps=modes.has_humps,
        )

    def _make_chain(  # type: ignore[override]
        self, prepared: Prepared, cut: BoundFamily, separated: SeparableModel, public: PublicArguments
    ) -> NutsChain:
        assert prepared.statistics is not None
        power, found = self.settings.power_for(separated.num_rows), prepared.statistics
        law = SumLaw(cut, separated.num_params, found.sd, self._counts_rows)
        middle = law.middle(found)
        z = jax.ShapeDtypeStruct((separated.num_params,), jnp.result_type(float))
        # A jaxpr holds numbers, where the functions of a family hold the model, which knows how many rows it was given.
        likelihood = jaxpr_as_fun(jax.make_jaxpr(lambda z: power * law.log_density(found, middle, z))(z))
        prior = separated.log_prior(public.args, public.kwargs)
        return NutsChain(prepared, prior, lambda z: likelihood(z)[0])

    def doubts(self) -> list[str]:
        found = super().doubts()
        if self._result is None or self._result.statistics is None:
            return found
        statistics = self._result.statistics
        if statistics.has_moved:
            found.append(
                f"about {statistics.moved:.0f} (+-{statistics.moved_sd:.0f}) of the {statistics.num_rows:.0f} rows are "
                "none that the likelihood and `bounds` allow: their values were moved to the bounds or, where they "
                "are missing or impossible, to their middle. Wider bounds, from public knowledge, help against the "
                "one; leave rows with missing values out of the table, or use DPHMC, for which they count for nothing"
            )
        if self._result.has_humps:
            found.append(
                "the posterior has several humps, far apart, and draws may show one of them. Say in the model which is "
                "meant (by a prior that is ordered or positive)"
            )
        return found

    # -- What a reader is told ---------------------------------------------------------------------------------------

    def describe_clip(self, kind: str) -> str:
        if kind in ("moved", RESERVE):
            return "one for each row" if kind == "moved" else "not spent"
        bounds = "" if self._bounds is None else f" of values in bounds {self._bounds}"
        size, bound = self._size_and_bound
        return f"{size} statistics{bounds}, of norm up to {bound:.4g}"

    def describe_exactness(self) -> str:
        if self.preparation is not None:
            return (
                "the law of the released statistics is its saddlepoint approximation, for rows that are as the model "
                "says and within the bounds"
            )
        return "the posterior is exact for the table with its values moved into the bounds"

    def describe_missing(self) -> str:
        count = "; about how many there are is released" if self.preparation is not None else ""
        return f"a row with a missing or impossible value counts as one in the middle of the bounds{count}"

    def describe_posterior(self) -> str:
        if self.preparation is None:
            return super().describe_posterior()
        if self._result is None:
            return "none: the preparation did not end"
        return (
            "NUTS draws of the exact prior times the likelihood of sufficient statistics that were released once, with "
            "the noise of the release in it. More draws cost nothing"
        )

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
        return super().__getstate__() | {"_family": None, "_read_with": None}


class _BegunSums(NamedTuple):
    """What one release needs.

    :ivar target: on all rows.
    :ivar sums: of statistics and of moved rows.
    :ivar z_draws: of the prior.
    :ivar improper: supports of sites whose prior is: their draws are uniform in (-2, 2).
    :ivar middle: see `SumLaw`.
    :ivar density, curvature: minus the log posterior and its gradient, and its Hessian.
    """

    cut: BoundFamily
    target: PrivateTarget
    sums: Callable[..., tuple[Released, Released]]
    z_draws: np.ndarray
    improper: dict[str, Any]
    middle: Callable[[Statistics], jax.Array]
    density: Callable[..., tuple[jax.Array, jax.Array]]
    curvature: Callable[..., jax.Array]
