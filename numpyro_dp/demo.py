"""``python -m numpyro_dp.demo``: a private posterior beside the exact one, on real data.

The data are those of the RAND Health Insurance Experiment, in which families were assigned to insurance plans by lot:
20,190 rows, each a year of one person's life. The question is whether paying a share of the bill keeps people from the
doctor. The answer is computed twice: by `DPHMC`, which is told the model, eps, and whose each row is, and, to compare,
by NUTS without privacy.

**A person is what is protected**, with all of their years. The years of a person are alike: each person has an
intercept of their own, which `DPHMC` integrates out and NUTS samples. The table that statsmodels ships has lost the
numbers of the persons; here consecutive years with the same covariates count as one person's, at most five of them.
Which rows are whose is public then: for how long a person takes part was settled by lot.

**What is public here.** Ranges of covariates come from their definitions, never from the rows: see `COVARIATES`. Every
covariate is clamped to its range and scaled to [-1, 1]. Privacy does not need that, since the kernel finds its clip
bounds itself; the priors do: a Normal(0, 1) for each coefficient means something only if the scale of its covariate is
known, and a scale computed from the rows would be a release that nobody paid for.
"""

import argparse
import dataclasses
import importlib
import math
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from scipy.special import ndtr

from numpyro_dp import DPHMC, MCMC, PrivacyBudgetError, PrivacyReport, to_arviz
from numpyro_dp.plots import plot_posteriors

# -- The data ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
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
    "cost_sharing": Covariate("cost sharing: from free care to paying all", lambda t: t["lncoins"], 0.0, math.log(101)),
    "individual_deductible": Covariate("plan with a deductible for each person", lambda t: t["idp"], 0.0, 1.0),
    "physical_limitation": Covariate("physical limitation", lambda t: t["physlm"], 0.0, 1.0),
    # disea is an index of the number of chronic diseases. Above 10 is 1, otherwise 0: a round number, no quantile.
    "chronically_ill": Covariate("over 10 on an index of chronic diseases", lambda t: t["disea"] > 10, 0.0, 1.0),
    # Self-rated health: excellent, good, fair or poor, of which the table has the last three as indicators.
    "fair_or_poor_health": Covariate("health: fair or poor", lambda t: np.maximum(t["hlthf"], t["hlthp"]), 0.0, 1.0),
}
LABELS = {
    "intercept": "intercept",
    **{name: covariate.label for name, covariate in COVARIATES.items()},
    "spread": "spread of the persons' own intercepts",
}

YEARS = 5
"""The experiment followed a person for at most so many years."""


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


def persons(table: Any) -> np.ndarray:
    """Whose each row is, by numbers from 0: consecutive rows that differ in visits only, at most `YEARS`; (n,)."""
    others = np.column_stack([np.asarray(table[name], float) for name in table if name != "mdvis"])
    is_other = np.append(True, np.any((others[1:] != others[:-1]) & ~np.isnan(others[1:] * others[:-1]), axis=1))
    start = np.maximum.accumulate(np.where(is_other, np.arange(len(others)), 0))
    return np.cumsum((np.arange(len(others)) - start) % YEARS == 0) - 1


# -- The model and the runs --------------------------------------------------------------------------------------------


def model(person, covariates, visit=None, *, num_persons):
    """Logistic regression of "any visit to a doctor this year", with an intercept of each person's own."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    effects = jnp.stack([numpyro.sample(name, dist.Normal(0, 1)) for name in COVARIATES])
    spread = numpyro.sample("spread", dist.HalfNormal(2))
    with numpyro.plate("persons", num_persons):
        own = numpyro.sample("own", dist.Normal(0, 1))
    with numpyro.plate("years", covariates.shape[0]):
        logits = intercept + covariates @ effects + spread * own[person]
        numpyro.sample("visit", dist.Bernoulli(logits=logits), obs=visit)


def run_private(table: Any, *, eps: float, seed: int, **options: Any) -> MCMC:
    """`DPHMC` with nothing but the model, a budget, and whose each row is.

    :param options: of `MCMC`: numbers of iterations and chains.
    """
    person = persons(table)
    mcmc = MCMC(DPHMC(model, eps=eps, unit="person"), chain_method="vectorized", **options)
    mcmc.run(jax.random.key(seed), person, design_matrix(table), any_visit(table), num_persons=int(person.max()) + 1)
    return mcmc


def run_reference(table: Any, *, seed: int, **options: Any) -> ExactMCMC:
    """NUTS on the table itself, with all persons' intercepts: not private."""
    person = persons(table)
    mcmc = ExactMCMC(NUTS(model), chain_method="vectorized", **options)
    mcmc.run(jax.random.key(seed), person, design_matrix(table), any_visit(table), num_persons=int(person.max()) + 1)
    return mcmc


# -- What came out -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
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


def what_privacy_cost(reference: Mapping[str, Estimate], private: Mapping[str, Estimate]) -> str:
    """The table: for each coefficient mean, sd, shift in non-private sds, ratio of sds, ESS and R-hat."""
    lines = [f"{'':<23}{'':<12}{'mean':>8}{'sd':>8}{'shift':>8}{'sd ratio':>10}{'ESS':>7}{'R-hat':>7}"]
    for name, exact in reference.items():
        e = private[name]
        lines += [
            f"{name:<23}{'not private':<12}{exact.mean:8.3f}{exact.sd:8.3f}{'':>18}{exact.ess:7.0f}{exact.r_hat:7.2f}",
            f"{'':<23}{'private':<12}{e.mean:8.3f}{e.sd:8.3f}{(e.mean - exact.mean) / exact.sd:+8.2f}"
            f"{e.sd / exact.sd:10.2f}{e.ess:7.0f}{e.r_hat:7.2f}",
        ]
    return "\n".join(lines)


def verdict(eps: float, reference: Mapping[str, Estimate], private: Mapping[str, Estimate]) -> str:
    """One sentence on how far a private posterior can be trusted.

    It is not usable if a mean is more than 4 of its own standard deviations from the non-private one, or if 90%
    intervals hold less than 60% of the non-private posterior. That one interval of several misses is chance, and no
    reason.
    """
    mean, sd, ess, r_hat = np.array([dataclasses.astuple(private[name]) for name in reference]).T
    exact_mean, exact_sd, *_ = np.array([dataclasses.astuple(exact) for exact in reference.values()]).T
    shift, ratio = np.abs(mean - exact_mean) / exact_sd, sd / exact_sd
    half = 1.645 * ratio  # of a 90% interval
    held = float(np.mean(ndtr(shift + half) - ndtr(shift - half)))  # of a posterior that is nearly normal
    if not (np.max(shift / ratio) <= 4 and held >= 0.6):
        judgement = "not usable"
    elif shift.max() > 1:
        judgement = "usable only with its own intervals"
    elif r_hat.max() < 1.1:
        judgement = "usable"
    else:
        judgement = "usable for the means, with chains that have not fully agreed"
    return (
        f"DPHMC at eps = {eps:g} is {judgement}: no posterior mean is off by more than {shift.max():.2f} non-private "
        f"standard deviations, standard deviations are {ratio.min():.2f} to {ratio.max():.2f} times the non-private "
        f"ones, {np.sum(shift <= half)} of {len(reference)} 90% intervals hold the non-private mean, and all together "
        f"{held:.0%} of the non-private posterior. ESS is at least {ess.min():.0f}, R-hat at most {r_hat.max():.2f}."
    )


def answer(private: ExactMCMC, reference: ExactMCMC) -> str:
    """The experiment's question, answered from both posteriors."""

    def odds_ratio(mcmc: ExactMCMC) -> np.ndarray:
        # From free care to paying all, the scaled covariate goes from -1 to 1.
        draws = np.asarray(mcmc.get_samples()["cost_sharing"], float)
        return np.exp(2 * np.quantile(draws, [0.05, 0.5, 0.95]))

    (low, middle, high), (exact_low, exact, exact_high) = odds_ratio(private), odds_ratio(reference)
    return (
        "The answer: the odds that a person sees a doctor in a year are "
        f"{middle:.2f} times as high (90% interval {low:.2f} to {high:.2f}) where all care is paid for as where it is "
        f"free, all else equal; without privacy {exact:.2f} times ({exact_low:.2f} to {exact_high:.2f})."
    )


def what_is_protected(report: PrivacyReport) -> str:
    """Whom eps is for."""
    return (
        f"eps = {report.eps:g} is for replacing one person with all of their years, up to {YEARS}. One year is part of "
        "that, and protected at least as well. Families are not: their members are persons of their own here."
    )


# -- The command -------------------------------------------------------------------------------------------------------

INTRODUCTION = """\
Does paying part of the bill keep people from the doctor? The RAND Health Insurance Experiment assigned families to
insurance plans by lot. This demo fits a logistic regression of "any visit to a doctor this year", with an intercept of
each person's own, to the {rows} years of {persons} persons: with differential privacy (DPHMC at eps = {eps:g}) and, to
compare, without.

The guarantee is per PERSON, with all of their years. DPHMC integrates the persons' intercepts out, because one value
for each person would publish it. It gets the model, eps and whose each row is: no clip bounds, no step size, no
starting values. Covariates are scaled to [-1, 1] by their public ranges, because the priors refer to that scale.
"""

SURROGATE = """
What the draws are: DPHMC looked for the posterior with part of the budget, and released the log likelihood there with
the rest, once, as a quadratic with noise. The last line of the report says whether released numbers vouch for it. The
draws are NUTS draws of the exact prior times what the release says about the coefficients: its noise is part of the
model, so the intervals include what the noise adds. No draw looks at the table again: more draws cost nothing.
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
    print(INTRODUCTION.format(rows=len(table), persons=int(persons(table).max()) + 1, eps=options.eps))

    common = {name: getattr(options, name) for name in ("num_warmup", "num_samples", "num_chains", "progress_bar")}
    try:
        private = _timed(
            f"DPHMC at eps = {options.eps:g}",
            lambda: run_private(table, eps=options.eps, seed=options.seed, **common),
        )
    except PrivacyBudgetError as error:
        print(textwrap.fill(str(error), _WIDTH), file=sys.stderr)
        return 1
    private.print_summary()
    print(SURROGATE)
    reference = _timed(
        "NUTS, not private, shown here only because these data are public",
        lambda: run_reference(table, seed=options.seed + 1, **common),
    )
    exact, found = estimates(reference), estimates(private)
    _heading("What privacy cost (shift: in non-private standard deviations)")
    print(what_privacy_cost(exact, found) + "\n")
    _heading("Conclusion")
    texts = verdict(options.eps, exact, found), answer(private, reference), what_is_protected(private.privacy)
    print("\n".join(textwrap.fill(text, _WIDTH) for text in texts))

    options.output.mkdir(parents=True, exist_ok=True)
    picture, draws = options.output / "posteriors.png", options.output / "dphmc.nc"
    result = to_arviz(private)
    panels = plot_posteriors(
        {"NUTS, not private": reference.get_samples(), f"DPHMC, eps = {options.eps:g}": result},
        var_names=list(LABELS),
        labels=LABELS,
        title="Any visit to a doctor this year: log-odds with and without privacy",
    )
    panels[0].figure.savefig(picture, dpi=150)
    result.to_netcdf(str(draws), engine="netcdf4")
    print(f"\nWritten: the picture, and the private posterior for ArviZ\n  {picture}\n  {draws}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m numpyro_dp.demo",
        description="A private posterior beside the exact one, on the RAND Health Insurance Experiment.",
    )
    parser.add_argument("--eps", type=_positive_float, default=1.0, help="budget of the private run (%(default)s)")
    parser.add_argument("--num-samples", type=_positive_int, default=1000, help="draws per chain (%(default)s)")
    parser.add_argument("--num-warmup", type=_positive_int, default=300, help="warmup per chain (%(default)s)")
    parser.add_argument("--num-chains", type=_positive_int, default=2, help="chains of each run (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("demo-output"), help="folder for the results (%(default)s)")
    parser.add_argument("--progress-bar", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--seed", type=int, default=0, help="of the draws; privacy noise is fresh in every run")
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
