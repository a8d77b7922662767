"""`DPHMC`: by default on a private surrogate of the likelihood; or on noisy clipped gradients (Räisä et al. 2021).

What runs when somebody writes ``DPHMC(model, eps=1.0)`` is `numpyro_dp.preparation.prepare`, one function:

1. `numpyro_dp.preparation.search` finds privately where the posterior is and how wide, in the coordinates in which the
   parameters meet the data (`numpyro_dp.model.coordinates`);
2. `numpyro_dp.preparation.last_release` spends the bulk of the budget there, on the likelihood's slope and curvature,
   which with the uncertainty of their noise are a quadratic (`numpyro_dp.preparation.surrogate`);
3. `numpyro_dp.preparation.last_look` asks once more whether that quadratic is like the likelihood;
4. `numpyro_dp.preparation.chains.NutsChain` runs NUTS on it and the exact prior.

`numpyro_dp.kernels.prepared` calls it before a chain starts. With ``prepare=False`` the sampler is that in
`numpyro_dp.chain.noisy_hmc`.
"""

from collections.abc import Callable
from typing import Unpack

from numpyro_dp.chain.noisy_hmc import NoisyHMC, num_leapfrog_steps
from numpyro_dp.kernels.options import MetropolisOptions, only
from numpyro_dp.kernels.prepared import PreparedKernel, resolve_preparation, without_preparation
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.batches import Batches


class DPHMC(NoisyHMC, PreparedKernel):
    """Differentially private Hamiltonian Monte Carlo.

    With nothing but a model and `eps`, it finds the posterior privately, releases the likelihood once as a noise-aware
    quadratic in the coordinates in which the parameters meet the data, and runs NUTS on that and the exact prior.
    `prepared` says what was found, and `MCMC.privacy.posterior` whether to believe it.

    **Formal guarantee.** Everything that is released is ``(eps, delta)``-DP under `neighboring_relation`. Prepared: the
    releases of `numpyro_dp.preparation` and of the chain, adaptively chosen Gaussian mechanisms under a filter on their
    total cost (Smith and Thakurta 2022). Without preparation: all chains and all iterations, warmup and rejections
    included; k iterations release k Gaussian sums of log ratios at noise multiplier ``tau_l`` and at most
    N_g Gaussian sums of gradients at ``tau_g`` (N_g in the table of `numpyro_dp.chain.noisy_hmc`), which cost
    ``rho = k / (2 tau_l^2) + N_g / (2 tau_g^2)`` (Theorem 3.5 of Räisä et al. 2021, with the exact composition of
    `numpyro_dp.privacy.accounting`).

    The arguments that `DPPenalty` has too mean the same here.

    :param prepare: a `numpyro_dp.Preparation`, True for the default one (as is None), False for none. Only with False
        may arguments for the sampler without preparation be given: those that follow but `noise_aware`, a mass matrix,
        its or the step size's adaptation, or owners. With noise multipliers in the place of a budget there is none.
        With ``eps=inf`` there is one that has hardly any noise, or none, if such arguments are given.
    :param noise_aware: whether draws carry the uncertainty that the noise in the released likelihood adds.
    :param clip_grad: largest norm of one row's gradient, in unconstrained space, that is counted in full. Clipped
        gradients make worse proposals, not a wrong posterior; but where much is clipped the proposals may lead away
        from the posterior, and hardly any is accepted. Default 1, and the report says so.
    :param step_size: of the leapfrog. Default ``1 / sqrt(n)`` (0.01 under add/remove); adapted in warmup from released
        decisions.
    :param num_steps: leapfrog steps per iteration, default 8. Their number is fixed: each costs privacy.
    :param trajectory_length: instead of `num_steps`: ``ceil(trajectory_length / step_size)`` steps at the given
        `step_size`, with which the length changes if the step size is adapted.
    :param leapfrog: ``"position"`` (default, the cheapest), ``"fresh"`` or ``"reuse"``.
    :param batch_size: as for `DPPenalty`: each gradient and each log ratio is of a batch of its own. Gradients of
        batches cost acceptance only; the ratio's estimate is taken to be normal, so temper the likelihood.
    :param grad_share: fraction of the budget that gradients get; the ratios get the rest.
    :param jitter: each iteration's step size is multiplied by a factor from a randomised Halton sequence on
        ``[1 - jitter, 1 + jitter]``, which breaks up periodic orbits.
    :param noise_multiplier_ratio, noise_multiplier_grad: instead of `eps`, noise standard deviation over sensitivity.
    :param options: `numpyro_dp.kernels.options.KernelOptions` and `MetropolisOptions`; `target_accept_prob` is 0.4.

    `DPState.carry` is an `HMCCarry`.
    """

    def __init__(
        self,
        model: Callable,
        eps: float | None = None,
        delta: float | None = None,
        *,
        prepare: Preparation | bool | None = None,
        noise_aware: bool = True,
        clip_ratio: float | Callable | None = None,
        clip_grad: float | None = None,
        step_size: float | None = None,
        num_steps: int | None = None,
        trajectory_length: float | None = None,
        leapfrog: str | None = None,
        grad_share: float | None = None,
        jitter: float | None = None,
        batch_size: float | Batches | None = None,
        noise_multiplier_ratio: float | None = None,
        noise_multiplier_grad: float | None = None,
        **options: Unpack[MetropolisOptions],
    ):
        plain = {
            "clip_ratio": clip_ratio,
            "clip_grad": clip_grad,
            "step_size": step_size,
            "num_steps": num_steps,
            "trajectory_length": trajectory_length,
            "leapfrog": leapfrog,
            "grad_share": grad_share,
            "jitter": jitter,
            "batch_size": batch_size,
        }
        preparation = resolve_preparation(prepare, eps, plain | without_preparation(options))
        options.setdefault("target_accept_prob", 0.4)
        grad_share = 0.5 if grad_share is None else grad_share
        super().__init__(
            model,
            eps,
            delta,
            noise_multipliers={"ratio": noise_multiplier_ratio, "grad": noise_multiplier_grad},
            shares={"ratio": 1 - grad_share, "grad": grad_share},
            clips={"ratio": clip_ratio, "grad": clip_grad},
            batch_size=batch_size,
            step_size=step_size,
            prepare=preparation,
            noise_aware=noise_aware,
            **only(MetropolisOptions, options),
        )
        if not 0 < grad_share < 1:
            raise ValueError(f"grad_share must lie strictly between 0 and 1, got {grad_share}")
        self._set_hmc(
            num_leapfrog_steps(num_steps, trajectory_length, step_size),
            "position" if leapfrog is None else leapfrog,
            0.2 if jitter is None else jitter,
        )
