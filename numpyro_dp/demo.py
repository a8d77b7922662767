"""``python -m numpyro_dp.demo``: a private posterior beside the exact one, on real data, in a few minutes.

The data are those of the RAND Health Insurance Experiment, in which families were assigned to insurance plans by lot:
20,190 rows, each a year of one person's life. The question is whether paying a share of the bill keeps people from the
doctor. The answer is computed three times: by NUTS without privacy, by `DPPenalty`, and by `DPHMC`.

**What is public here.** Ranges of covariates come from their definitions, never from the rows: see `COVARIATES`. Every
covariate is clamped to its range and scaled to [-1, 1], so that a row (with 1 for the intercept) has a norm of at most
`MAX_NORM`. A row of a logistic regression has the gradient ``(visit - probability) * row``, and a probability is never
off by more than 1, so `MAX_NORM` bounds the gradient too, and clip bounds equal to it clip nothing.

**Why two covariates.** With d coefficients a row can be sqrt(d) long, and a move has to cover sqrt(d) posterior
standard deviations, so the rho that a move of all coefficients costs grows with the square of d. `DPHMC` makes such
moves; `DPPenalty` moves one coefficient at a time here and could do with more of them.
"""

import argparse
import importlib
import math
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC as ExactMCMC
from numpyro.infer import NUTS

from numpyro_dp import DPHMC, MCMC, DPPenalty, PrivacyReport, to_arviz
from numpyro_dp.accounting import gaussian_eps, gaussian_rho, noise_multiplier_for
from numpyro_dp.plots import plot_posteriors

# -- The data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Covariate:
    """A covariate with the range that its definition gives it.

    :ivar label: for pictures.
    :ivar values: from the table to the raw values.
    :ivar low, high: the range; values outside are moved to its nearer end, missing ones to its middle.
    """

    label: str
    values: Callable[[Any], Any]
    low: float
    high: float


COVARIATES = {
    # lncoins = ln(coinsurance rate + 1), and a rate is a percentage: 0 (care is free) to 100.
    "cost_sharing": Covariate(
        "cost sharing: from free care to paying all", lambda table: table["lncoins"], 0.0, math.log(101)
    ),
    # disea is an index of the number of chronic diseases. Above 10 is 1, otherwise 0: a round number, no quantile.
    "chronically_ill": Covariate(
        "chronic diseases: up to 10 or more, on an index", lambda table: np.asarray(table["disea"]) > 10, 0.0, 1.0
    ),
}
LABELS = {"intercept": "intercept", **{name: covariate.label for name, covariate in COVARIATES.items()}}

MAX_COMPONENT = 1.0
"""Largest entry of a row: a move along one coefficient changes the row's log density by at most this much per unit."""

MAX_NORM = math.sqrt(1 + len(COVARIATES))
"""Largest norm of a row, the intercept's 1 included, and so of its gradient."""

ROWS_PER_PERSON = 5
"""The experiment followed a person for at most five years."""


def load_table() -> Any:
    """The table, as a pandas data frame.

    :raises ImportError: if statsmodels, which carries the data, is missing.
    """
    try:
        datasets = importlib.import_module("statsmodels.datasets")
    except ImportError as error:
        raise ImportError("the data come with statsmodels: pip install 'numpyro_dp[demo]'") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*float_precision.*")  # statsmodels 0.14 with pandas 3
        return datasets.randhie.load_pandas().data


def design_matrix(table: Any) -> np.ndarray:
    """Covariates within [-1, 1], whatever the table holds; (n, number of covariates), float32."""
    columns = []
    for covariate in COVARIATES.values():
        middle, half = (covariate.low + covariate.high) / 2, (covariate.high - covariate.low) / 2
        scaled = (np.asarray(covariate.values(table), float) - middle) / half
        columns.append(np.where(np.isnan(scaled), 0.0, np.clip(scaled, -1, 1)))
    return np.stack(columns, 1).astype(np.float32)


def any_visit(table: Any) -> np.ndarray:
    """1 if the person saw a doctor in that year, else 0; (n,), int32."""
    return (np.asarray(table["mdvis"]) > 0).astype(np.int32)


# -- The model and the runs --------------------------------------------------------------------------------------------


def model(covariates, visit=None):
    """Logistic regression of "any visit to a doctor this year"; a plain NumPyro model with a plate over the rows."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    effects = jnp.stack([numpyro.sample(name, dist.Normal(0, 1)) for name in COVARIATES])
    with numpyro.plate("person_years", covariates.shape[0]):
        numpyro.sample("visit", dist.Bernoulli(logits=intercept + covariates @ effects), obs=visit)


def run_reference(
    covariates: np.ndarray, visit: np.ndarray, *, num_chains: int, seed: int, progress_bar: bool
) -> ExactMCMC:
    """NUTS on the table itself: not private."""
    mcmc = ExactMCMC(
        NUTS(model),
        num_warmup=300,
        num_samples=500,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=progress_bar,
    )
    mcmc.run(jax.random.key(seed), covariates, visit=visit)
    return mcmc


def run_penalty(
    covariates: np.ndarray,
    visit: np.ndarray,
    *,
    eps: float,
    num_warmup: int,
    num_samples: int,
    num_chains: int,
    seed: int,
    progress_bar: bool,
) -> MCMC:
    """A guided walk, one coefficient at a time.

    A row's log density changes by at most `MAX_COMPONENT` per unit of such a move, and by up to `MAX_NORM` per unit of
    a move of all coefficients: that is where this walk saves noise.
    """
    kernel = DPPenalty(
        model, eps=eps, clip_ratio=MAX_COMPONENT, one_component=True, guided=True, target_accept_prob=0.5
    )
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=progress_bar,
    )
    mcmc.run(jax.random.key(seed), covariates, visit=visit)
    return mcmc


NUM_STEPS = 8  # leapfrog steps of DPHMC
GRAD_SHARE = 0.5


def hmc_step_size(eps: float, num_rows: int, num_iterations: int) -> float:
    """A step size for `run_hmc` from public numbers alone.

    A trajectory ends about ``time * sqrt(number of coefficients)`` away, and the noise in the test of its end point
    grows with that distance. The time is such that this noise has a standard deviation of 1.4: longer trajectories are
    hardly ever accepted, shorter ones lead nowhere. At most it is a quarter of the period that belongs to a standard
    deviation of ``2 / sqrt(n)``: a row tells at most 1/4 about a coefficient, so that is about the least there can be.

    :param num_iterations: of all chains.
    """
    rho = (1 - GRAD_SHARE) * gaussian_rho(eps, 0.1 / num_rows)
    noise_per_distance = 2 * MAX_NORM * noise_multiplier_for(rho, num_iterations)
    longest = math.pi / 2 * 2 / math.sqrt(num_rows)
    return min(1.4 / (noise_per_distance * math.sqrt(len(LABELS))), longest) / NUM_STEPS


def run_hmc(
    covariates: np.ndarray,
    visit: np.ndarray,
    *,
    eps: float,
    num_warmup: int,
    num_samples: int,
    num_chains: int,
    seed: int,
    progress_bar: bool,
    start: Mapping[str, jax.Array] | None = None,
) -> MCMC:
    """Hamiltonian Monte Carlo on noisy gradients.

    :param start: where the chains start; released values, or public ones.
    """
    kernel = DPHMC(
        model,
        eps=eps,
        clip_ratio=MAX_NORM,
        clip_grad=MAX_NORM,
        num_steps=NUM_STEPS,
        grad_share=GRAD_SHARE,
        step_size=hmc_step_size(eps, len(visit), num_chains * (num_warmup + num_samples)),
        adapt_step_size=False,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=progress_bar,
    )
    mcmc.run(jax.random.key(seed), covariates, visit=visit, init_params=start)
    return mcmc


# -- What came out -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """What one run says about one coefficient."""

    mean: float
    sd: float
    ess: float
    r_hat: float


def estimates(mcmc: ExactMCMC) -> dict[str, Estimate]:
    """Posterior mean and sd of each coefficient, with effective sample size and R-hat."""
    found = {}
    with np.errstate(all="ignore"):  # a chain that never moved has no R-hat
        for name in LABELS:
            draws = np.asarray(mcmc.get_samples(group_by_chain=True)[name], float)
            ess, r_hat = (
                (float(effective_sample_size(draws)), float(split_gelman_rubin(draws)))
                if draws.shape[1] >= 4
                else (math.nan, math.nan)
            )
            found[name] = Estimate(float(draws.mean()), float(draws.std()), ess, r_hat)
    return found


def what_privacy_cost(reference: Mapping[str, Estimate], private: Mapping[str, Mapping[str, Estimate]]) -> str:
    """The table: for each coefficient and sampler, mean, sd, shift in non-private sds, ratio of sds, ESS and R-hat."""
    lines = [f"{'':<18}{'':<12}{'mean':>8}{'sd':>8}{'shift':>8}{'sd ratio':>10}{'ESS':>7}{'R-hat':>7}"]
    for name, exact in reference.items():
        lines.append(
            f"{name:<18}{'not private':<12}{exact.mean:8.3f}{exact.sd:8.3f}{'':>18}{exact.ess:7.0f}{exact.r_hat:7.2f}"
        )
        for sampler, found in private.items():
            e = found[name]
            lines.append(
                f"{'':<18}{sampler:<12}{e.mean:8.3f}{e.sd:8.3f}{(e.mean - exact.mean) / exact.sd:+8.2f}"
                f"{e.sd / exact.sd:10.2f}{e.ess:7.0f}{e.r_hat:7.2f}"
            )
    return "\n".join(lines)


def verdict(sampler: str, eps: float, reference: Mapping[str, Estimate], found: Mapping[str, Estimate]) -> str:
    """One sentence on how far a private posterior can be trusted."""
    shift = max(abs(found[name].mean - exact.mean) / exact.sd for name, exact in reference.items())
    ratios = [found[name].sd / exact.sd for name, exact in reference.items()]
    ess = min(estimate.ess for estimate in found.values())
    r_hat = max(estimate.r_hat for estimate in found.values())
    if not shift <= 0.5:
        judgement = "not usable"
    elif r_hat < 1.1:
        judgement = "usable"
    else:
        judgement = "usable for the means, with chains that have not fully agreed"
    return (
        f"{sampler} at eps = {eps:g} is {judgement}: no posterior mean is off by more than {shift:.2f} non-private "
        f"standard deviations, standard deviations are {min(ratios):.2f} to {max(ratios):.2f} times the non-private "
        f"ones, ESS at least {ess:.0f}, R-hat at most {r_hat:.2f}."
    )


def answer(mcmc: MCMC) -> str:
    """The experiment's question, answered from a private posterior."""
    draws = np.asarray(mcmc.get_samples()["cost_sharing"], float)
    # From free care to paying all, the scaled covariate goes from -1 to 1.
    low, middle, high = np.exp(2 * np.quantile(draws, [0.05, 0.5, 0.95]))
    return (
        f"The answer, as {type(mcmc.sampler).__name__} gives it: the odds that a person sees a doctor in a year are "
        f"{middle:.2f} times as high (90% interval {low:.2f} to {high:.2f}) where all care is paid for as where it is "
        "free."
    )


def total_cost(reports: Sequence[PrivacyReport]) -> str:
    """What the runs cost, each and together; they saw the same table, so that their costs add up (in rho)."""
    delta, rho = reports[0].delta, sum(report.rho or 0.0 for report in reports)
    lines = [f"{report.kernel:<12} eps = {report.eps:g} (rho {report.rho:.4g})" for report in reports]
    lines += [
        f"{'together':<12} eps = {gaussian_eps(delta, rho):.4g} (rho {rho:.4g}): one table, so rho adds up",
        f"{'':<12} all at delta = {delta:.3g}, for replacing one row, that is one year of one person",
        f"{'a person':<12} has up to {ROWS_PER_PERSON} rows: for all of them the two runs together guarantee only "
        f"eps = {gaussian_eps(delta, ROWS_PER_PERSON**2 * rho):.4g}",
    ]
    return "\n".join(lines)


# -- The command -------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
Does paying part of the bill keep people from the doctor? The RAND Health Insurance Experiment assigned families to
insurance plans by lot. This demo fits a logistic regression of "any visit to a doctor this year" to its {rows} rows,
with differential privacy (DPPenalty at eps = {penalty_eps:g}, DPHMC at eps = {hmc_eps:g}) and, to compare, without.

The guarantee is per ROW, that is per person-year and not per person: a person has up to {per_person} rows.
Covariates ({covariates}) are scaled by their public ranges to [-1, 1], and the clip bounds
follow from that: no row is ever clipped, so both private samplers have the exact posterior as their target. What
privacy takes is effective sample size.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _parse(argv)
    try:
        table = load_table()
        for name in ("matplotlib", "netCDF4"):  # better now than after the runs
            importlib.import_module(name)
    except ImportError as error:
        print(f"The demo needs more than numpyro_dp: pip install 'numpyro_dp[demo]' ({error})", file=sys.stderr)
        return 1
    covariates, visit = design_matrix(table), any_visit(table)
    listed = ", ".join(COVARIATES)
    print(
        INTRODUCTION.format(
            covariates=listed,
            rows=len(visit),
            penalty_eps=options.eps_penalty,
            hmc_eps=options.eps,
            per_person=ROWS_PER_PERSON,
        )
    )

    common: dict[str, Any] = {"num_chains": options.num_chains, "progress_bar": options.progress_bar}
    reference = _timed(
        "NUTS, not private, shown here only because these data are public",
        lambda: run_reference(covariates, visit, seed=options.seed, **common),
    )
    reference.print_summary()
    penalty = _timed(
        f"DPPenalty at eps = {options.eps_penalty:g}",
        lambda: run_penalty(
            covariates,
            visit,
            eps=options.eps_penalty,
            num_warmup=options.num_warmup,
            num_samples=options.num_samples,
            seed=options.seed + 1,
            **common,
        ),
    )
    penalty.print_summary()
    # One iteration of DPHMC looks at the table NUM_STEPS + 1 times, one of DPPenalty once.
    hmc = _timed(
        f"DPHMC at eps = {options.eps:g}, started from DPPenalty's last draws",
        lambda: run_hmc(
            covariates,
            visit,
            eps=options.eps,
            num_warmup=max(1, options.num_warmup // (10 * (NUM_STEPS + 1))),
            num_samples=max(4, options.num_samples // (NUM_STEPS + 1)),
            seed=options.seed + 2,
            start=penalty.last_state.z,
            **common,
        ),
    )
    hmc.print_summary()
    print(
        "\nTo start from released draws is post-processing and costs nothing more, but what DPHMC then finds\n"
        "rests on both budgets. Far from the posterior its trajectories are long, and the noise in their tests grows\n"
        "with that: from the prior's median it would not get there.\n"
    )

    exact = estimates(reference)
    runs = {"DPPenalty": penalty, "DPHMC": hmc}
    private = {sampler: estimates(run) for sampler, run in runs.items()}
    _heading("What privacy cost (shift: in non-private standard deviations)")
    print(what_privacy_cost(exact, private) + "\n")
    _heading("What it cost in privacy")
    print(total_cost([run.privacy for run in runs.values()]) + "\n")
    _heading("Conclusion")
    for sampler, run in runs.items():
        print(textwrap.fill(verdict(sampler, run.privacy.eps, exact, private[sampler]), _WIDTH))
    print(textwrap.fill(answer(penalty), _WIDTH))

    options.output.mkdir(parents=True, exist_ok=True)
    written = [options.output / "posteriors.png", options.output / "dppenalty.nc", options.output / "dphmc.nc"]
    results = {sampler: to_arviz(run) for sampler, run in runs.items()}
    figure = plot_posteriors(
        {
            "NUTS, not private": reference.get_samples(),
            **{f"{sampler}, eps = {runs[sampler].privacy.eps:g}": result for sampler, result in results.items()},
        },
        var_names=list(LABELS),
        labels=LABELS,
        title="Any visit to a doctor this year: log-odds with and without privacy",
    )
    figure.savefig(written[0])
    for path, result in zip(written[1:], results.values(), strict=True):
        result.to_netcdf(str(path), engine="netcdf4")
    print("\nWritten: the picture, and the private posteriors for ArviZ")
    for path in written:
        print(f"  {path}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m numpyro_dp.demo",
        description="A private posterior beside the exact one, on the RAND Health Insurance Experiment.",
    )
    parser.add_argument("--eps", type=_positive_float, default=15.0, help="budget of the DPHMC run (%(default)s)")
    parser.add_argument(
        "--eps-penalty", type=_positive_float, default=6.0, help="budget of the DPPenalty run (%(default)s)"
    )
    parser.add_argument(
        "--num-samples",
        type=_positive_int,
        default=2000,
        help="DPPenalty's draws per chain (%(default)s); DPHMC, whose "
        f"iterations look at the table {NUM_STEPS + 1} times each, makes 1/{NUM_STEPS + 1} of that",
    )
    parser.add_argument("--num-warmup", type=_positive_int, default=500, help="DPPenalty's warmup (%(default)s)")
    parser.add_argument(
        "--num-chains", type=_positive_int, default=2, help="chains of each run, which share its budget (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the results (%(default)s)")
    parser.add_argument("--progress-bar", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--seed", type=int, default=0, help="of proposals and starting points; privacy noise is fresh in every run"
    )
    return parser.parse_args(argv)


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


_WIDTH = 118


def _heading(text: str) -> None:
    print(f"{text}\n{'-' * len(text)}")


def _timed(text: str, run: Callable[[], Any]) -> Any:
    _heading(text)
    start = time.perf_counter()
    result = run()
    print(f"({time.perf_counter() - start:.0f} s)")
    return result


if __name__ == "__main__":
    sys.exit(main())
