"""DP-penalty: a random walk whose acceptance test corrects for the privacy noise (Yıldırım 2017).

One iteration from ``z``, with ``B = clip_ratio * |z' - z|``:

    1. propose ``z'`` (symmetric, public);
    2. release ``R = sum_i clip(log p(x_i | z') - log p(x_i | z), +-B) + N(0, sigma^2)``,
       ``sigma = noise_multiplier * sensitivity``, sensitivity ``2 B`` (replace-one) or ``B`` (add/remove);
    3. accept if ``log u < R + log p(z') - log p(z) - sigma^2 / 2``.

The penalty ``sigma^2 / 2`` (Ceperley and Dewing 1999) makes the test exact under Gaussian noise: where no ratio is
clipped, the chain leaves the exact posterior invariant. Clipped ratios flatten it. Walks of one component at a time and
guided ones are of the later paper (Yıldırım and Ermiş 2019).

With `batch_size`, step 2 looks at a batch ``S`` of the rows. The estimate ``sum_S r_i / q`` of the log ratio then has a
sampling variance of its own, of which half is subtracted, too, as estimated on the same batch:

===============  ==================================================================  ==============================
batches          released sum of                                                     bound of one row
===============  ==================================================================  ==============================
Poisson, rate q  ``phi(r) = r / q - (1 - q) r^2 / (2 q^2)`` over the batch           ``|phi(-B)|``
fixed size b     ``s r_i``, minus ``s^2 f sum (r_i - mean)^2 / 2``, ``s = n / b``,   ``s B + s^2 B^2 (1 - 1/b) f``,
                 ``f = b / (b - 1) (1 - b / n)``                                     half the sensitivity
===============  ==================================================================  ==============================

The Poisson form is a plain sum of row-wise terms, hence an ordinary Gaussian mechanism on a Poisson batch. The second
is the minibatch penalty of Räisä (2021, section 3.3) with an unbiased variance and its tight sensitivity (the published
one is half as large again). Both rest on the estimate being normal, so the posterior is approximate, well so only while
the sampling variance is about 1 or below: temper the likelihood (`power`, `n0`), or take small steps.
"""

import dataclasses
from collections.abc import Callable
from typing import Unpack

from numpyro_dp.chain.acceptance import penalty_test
from numpyro_dp.chain.algorithm import Step, Transition
from numpyro_dp.chain.random_walk import RandomWalk
from numpyro_dp.kernels.options import MetropolisOptions, only
from numpyro_dp.kernels.prepared import PreparedKernel, resolve_preparation, without_preparation
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.batches import Batches


class DPPenalty(RandomWalk, PreparedKernel):
    """Differentially private random-walk Metropolis with the penalty test.

    **Formal guarantee.** All chains and all iterations, warmup and rejections included, are ``(eps, delta)``-DP under
    `neighboring_relation`: each iteration releases one Gaussian sum at the noise multiplier ``tau`` that the budget
    allows, and ``k`` of them cost ``rho = k / (2 tau^2)`` (Theorem 2.4 of Räisä et al. 2021, with the exact
    composition of `numpyro_dp.privacy.accounting`).

    :param model: a NumPyro model whose arguments hold the table, see `numpyro_dp.model.separate.separate`.
    :param eps: budget of the whole run. ``inf`` runs with hardly any noise, and says that it is not private.
    :param delta: default ``0.1 / n`` under replace-one; to be given under add/remove.
    :param prepare: how the walk is prepared: a `numpyro_dp.Preparation`, True for the default one (as is None), False
        for none. A prepared walk moves in whitened coordinates with private clip bounds, and has no step size to
        choose; its preparation's releases are Gaussian, in the report, and part of `eps`. Only with False may arguments
        for the walk without preparation be given: those that follow, a mass matrix, or owners.
    :param clip_ratio: largest change of one row's log density per unit of distance in unconstrained space that is
        counted in full. Larger is safer for the posterior, and needs more noise. For a generalised linear model with
        canonical link, the largest norm of a row's covariates times the largest residual is enough to clip nothing;
        with `one_component`, the largest single covariate times that. Default 1, and the report says so. Or a function
        ``(sites before, sites after) -> bound`` of dicts as `MCMC.get_samples` has them: a public bound on how much a
        row's log density changes, the paper's ``c(theta, theta')``. Where it is no positive number, a proposal is
        rejected.
    :param one_component: change one component at a time, chosen at random: shorter jumps, less noise.
    :param guided: Gustafson's guided walk: a component keeps its direction until a rejection. With `one_component` it
        mixed best of the variants wherever we compared them.
    :param step_size: proposals have covariance ``step_size**2 * inverse_mass_matrix``. Default ``1 / sqrt(n)``
        (0.01 under add/remove, where n is private); adapted in warmup.
    :param noise_multiplier_ratio: instead of `eps`, noise standard deviation over sensitivity.
    :param batch_size: instead of all rows, batches: their expected size (Poisson sampling), or
        `numpyro_dp.PoissonBatches` or `numpyro_dp.FixedBatches`. Time and memory per iteration follow the batch.
    :param options: `numpyro_dp.kernels.options.KernelOptions` and `MetropolisOptions`.

    `DPState.carry` holds the walk's directions, +-1 for each component.
    """

    def __init__(
        self,
        model: Callable,
        eps: float | None = None,
        delta: float | None = None,
        *,
        prepare: Preparation | bool | None = None,
        clip_ratio: float | Callable | None = None,
        one_component: bool = False,
        guided: bool = False,
        step_size: float | None = None,
        batch_size: float | Batches | None = None,
        noise_multiplier_ratio: float | None = None,
        **options: Unpack[MetropolisOptions],
    ):
        plain = {
            "clip_ratio": clip_ratio,
            "one_component": one_component or None,
            "guided": guided or None,
            "step_size": step_size,
            "batch_size": batch_size,
        }
        preparation = resolve_preparation(prepare, eps, plain | without_preparation(options))
        if preparation is not None:
            if preparation.mode not in (None, "walk"):
                raise ValueError(f"DPPenalty walks: mode {preparation.mode!r} is for DPHMC")
            preparation = dataclasses.replace(preparation, mode="walk")
        super().__init__(
            model,
            eps,
            delta,
            prepare=preparation,
            noise_multipliers={"ratio": noise_multiplier_ratio},
            clips={"ratio": clip_ratio},
            batch_size=batch_size,
            step_size=step_size,
            **only(MetropolisOptions, options),
        )
        self._set_walk(one_component, guided, self.settings.dense_mass)

    def noise_shapes(self, num_params: int) -> dict[str, tuple[int, ...]]:
        return {"ratio": (1,)}

    def transition(self, step: Step) -> Transition:
        jump, moves, accept_key = self._jump(step)
        z, z_new = step.z, step.z + jump
        decision = penalty_test(
            step.target,
            step.grant["ratio"],
            accept_key,
            z,
            z_new,
            step.target.log_prior(z_new) - step.target.log_prior(z),
            self.clip("ratio"),
        )
        return self._arrive(step, z_new, moves, *decision)
