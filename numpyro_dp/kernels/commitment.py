"""What a kernel commits before it asks anything: its plan, by public numbers only."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_dp.chain.worth import FEW_DRAWS, most_draws, tight_slope
from numpyro_dp.kernels.settings import Settings
from numpyro_dp.model.arguments import PublicArguments
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.privacy.clipping import OwnerIndex
from numpyro_dp.privacy.ledger import Plan, Wanted, plan_for_budget, plan_for_noise
from numpyro_dp.privacy.mechanisms import Gaussian


def make_plan(
    settings: Settings,
    separated: SeparableModel,
    wanted: Callable[[int, int, int], dict[str, Wanted]],
    num_iterations: int,
    num_chains: int,
) -> Plan:
    """The releases of a run, and the noise that the budget asks for; or that was given, and what it costs.

    :param wanted: everything that the budget is for, by the number of rows, iterations and chains.
    :param num_iterations: of one chain, warmup included.
    :raises ValueError: if batches or owners do not fit the table.
    """
    n = separated.num_rows
    settings.batches.check(n, settings.neighboring_relation)
    if isinstance(settings.owners, OwnerIndex) and settings.owners.of_row.shape != (n,):
        raise ValueError(f"owners has shape {settings.owners.of_row.shape}, but there are {n} rows")
    common: dict[str, Any] = {
        "delta": settings.delta_for(n),
        "neighboring_relation": settings.neighboring_relation,
        "wanted": wanted(n, num_iterations, num_chains),
        "num_iterations": num_iterations,
        "num_chains": num_chains,
        "num_rows": n if settings.size_is_public else None,
    }
    if settings.eps is not None:
        plan = plan_for_budget(eps=settings.eps, **common)
    else:
        plan = plan_for_noise(noise_multipliers=settings.given_noise_multipliers, **common)
    return dataclasses.replace(plan, unit=separated.identity)


def require_own_bound(settings: Settings, separated: SeparableModel, public: PublicArguments) -> None:
    """:raises ValueError: if `clip_ratio` is a function that returns no single number; before anything is paid."""
    if callable(clip := settings.clips.get("ratio")):
        sites = separated.sites(public.args, public.kwargs)
        z = jax.eval_shape(separated.ravel, separated.prototype)
        shape = jax.eval_shape(lambda z: jnp.asarray(clip(sites(z), sites(z))), z).shape
        if shape != ():
            raise ValueError(f"clip_ratio must return one number for two places, got an array of shape {shape}")


def warn_if_hopeless(kernel: str, plan: Plan, size: int, power: float) -> None:
    """Warn of a chain that noise will keep where it is; by public numbers only.

    :param kernel: its name.
    :param size: how many parameters there are.
    :param power: of the likelihood.
    """
    ratio = plan.kinds.get("ratio")
    if plan.num_rows is None or ratio is None:
        return
    if not isinstance(ratio.mechanisms[0], Gaussian):  # of all rows
        return
    slope = tight_slope(plan.num_rows, size, power)
    tau, iterations = ratio.mechanisms[0].noise_multiplier, plan.num_iterations * plan.num_chains
    draws, without_noise = most_draws(size, slope, tau, iterations, "grad" in plan.kinds)
    if draws < FEW_DRAWS and draws < without_noise / 10:
        warnings.warn(
            f"this {kernel} will hardly move: with clip bounds as tight as can be, eps={plan.eps:.3g} "
            f"over {plan.num_chains} chain(s) of {plan.num_iterations} iterations pays for about {draws:.1g} "
            f"effective draws of {size} parameters, if the {plan.num_rows} rows inform all of them. "
            "Use DPHMC with its default preparation, which releases the likelihood once, raise eps, or temper the "
            "likelihood (power, n0); numpyro_dp.plan says how far",
            stacklevel=3,
        )
