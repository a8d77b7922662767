"""How accurate is the private posterior at small eps, with nothing tuned?

Data sets drawn from models that their owner would write down, the default kernels on each of them, and the exact
posterior beside them. A fit with the defaults sees the model, the table and eps. The published samplers ("plain")
are given for free what nobody would know: chains that start one posterior standard deviation from the true
parameters, the exact posterior's variances as mass matrix, clip bounds from the papers or, where they have none, the
slope that one row in 200 exceeds at the exact posterior's mean (the papers clip a fifth of the rows, which moves a
logistic regression by sds), and steps for which the noise allows acceptance.

    python benchmarks/small_eps.py                      # three models, two eps: some minutes
    python benchmarks/small_eps.py --cases all --eps 0.3 1 3 10 --seeds 5 --methods default penalty plain-hmc
    python benchmarks/small_eps.py --coverage           # do 90% intervals cover the truth? default fits only

Columns: `error`, the rms over all parameters (scales of hierarchies included; group effects centred) of the difference
of posterior means in standard deviations of the exact posterior; `sd ratio`, private over exact, geometric mean;
`truth` and `exact`, the share of 90% intervals that cover the true parameters and draws of the exact posterior; `MMD`,
with a Gaussian kernel as wide as the median distance between private and exact draws, 0 where its unbiased square is
negative (equal laws give about 0.01 to 0.03). Medians over data sets, and
quartiles in brackets.
"""

import argparse
import inspect
import json
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer.util import compute_log_probs, constrain_fn, unconstrain_fn

import numpyro_dp
from numpyro_dp import DPHMC, MCMC, DPPenalty
from numpyro_dp.kernels.options import KernelOptions, MetropolisOptions
from numpyro_dp.privacy.accounting import gaussian_rho

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for those who run this as a script

from benchmarks.small_eps_models import CACHE, CASES, Case, Exact, exact
from experiments.metrics import mmd
from experiments.models import flat

QUICK = ["logistic-1e4-5", "poisson", "hierarchical-8"]

GLMS = ["logistic-1e4-5", "logistic-1e5-10", "logistic-2e4-20", "poisson", "negative-binomial", "heavy-tailed", "rare"]

METRICS = ["error", "sd ratio", "truth", "exact", "MMD", "seconds"]

# -- Fits --------------------------------------------------------------------------------------------------------------


def accepts(kernel: type, name: str) -> bool:
    options = KernelOptions.__annotations__ | MetropolisOptions.__annotations__
    return name in inspect.signature(kernel.__init__).parameters or name in options


def default_fit(kernel: type) -> Callable:
    def fit(case: Case, posterior, model, args, kwargs, truth, eps: float, seed: int):
        options = {"noise_seed": 1000 + seed} | case.options
        sampler = kernel(model, eps=eps, **{name: value for name, value in options.items() if accepts(kernel, name)})
        mcmc = MCMC(
            sampler, num_warmup=200, num_samples=1000, num_chains=2, chain_method="vectorized", progress_bar=False
        )
        return sampler, mcmc, {}

    return fit


def plain_fit(kernel: type, method: str, iterations: int = 200, chains: int = 4) -> Callable:
    """The published sampler, with an oracle for all that has to be guessed; half of the iterations are warmup."""

    def fit(case: Case, posterior: Exact, model, args, kwargs, truth, eps: float, seed: int):
        oracle = Oracle(case, posterior, model, args, kwargs, truth)
        settings: dict[str, Any] = {"clip_ratio": oracle.clip_ratio}
        if kernel is DPHMC:
            settings |= {"clip_grad": oracle.clip_grad, "num_steps": 12, "jitter": 0.1}
        settings |= case.papers.get(method, {})
        rho = gaussian_rho(eps, 0.1 / oracle.rows)
        ratio_share = 0.5 if kernel is DPHMC else 1.0  # of DPHMC's budget; the rest is for gradients
        multiplier = math.sqrt(iterations * chains / (2 * rho * ratio_share))
        # A jump of one posterior sd in every direction has this noise in its log ratio; about 2 is best.
        noise = 2 * multiplier * settings["clip_ratio"] * math.sqrt(oracle.variance.sum()) * oracle.power
        if kernel is DPHMC:
            step_size = min(math.pi / 2, math.sqrt(2) / noise) / settings["num_steps"]
        else:
            step_size = min(2.38 / math.sqrt(len(oracle.variance)), 2 / noise)
        options = {"noise_seed": 1000 + seed, "prepare": False, "adapt_step_size": False} | case.options
        sampler = kernel(
            model,
            eps=eps,
            step_size=step_size,
            inverse_mass_matrix=jnp.asarray(oracle.variance, jnp.float32),
            **settings,
            **{name: value for name, value in options.items() if accepts(kernel, name)},
        )
        mcmc = MCMC(
            sampler,
            num_warmup=iterations // 2,
            num_samples=iterations - iterations // 2,
            num_chains=chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        return sampler, mcmc, {"init_params": oracle.starts(chains, seed)}

    return fit


class Oracle:
    """What a plain sampler needs and nobody knows, from the exact posterior and the rows.

    :ivar rows: how many.
    :ivar power: of the likelihood.
    :ivar variance: of the exact posterior in unconstrained space, flat.
    :ivar clip_ratio: the slope along typical jumps that one row in 200 exceeds, at the posterior's mean.
    :ivar clip_grad: the norm that a tenth of the rows' gradients exceeds there; that costs acceptance, and no bias.
    """

    def __init__(self, case: Case, posterior: Exact, model, args, kwargs, truth):
        self._case = case
        self.rows = len(args[0])
        self.power = case.options.get("n0", self.rows) / self.rows
        sites = [name for name in posterior.draws if name in self._sites(model, args, kwargs)]

        def unconstrained(values):
            return unconstrain_fn(model, args, kwargs, {name: values[name] for name in sites})

        some = {name: jnp.asarray(posterior.draws[name][:1000], jnp.float32) for name in sites}
        z = jax.jit(jax.vmap(lambda values: ravel_pytree(unconstrained(values))[0]))(some)
        self.variance = np.asarray(z, float).var(0)
        start = truth | (case.start or {})
        self._start, self._unravel = ravel_pytree(
            unconstrained({name: jnp.asarray(start[name], jnp.float32) for name in sites})
        )

        def rows(point):
            values = constrain_fn(model, args, kwargs, self._unravel(point))
            log_probs, _ = compute_log_probs(model, args, kwargs, values, sum_log_prob=False)
            (log_prob,) = (value for name, value in log_probs.items() if jnp.shape(value) == (self.rows,))
            return log_prob

        centre = z.mean(0) if case.metric == "means" else z[0]
        slopes = np.asarray(jax.jit(jax.jacfwd(rows))(centre), float)
        jumps = np.random.default_rng(0).standard_normal((20, z.shape[1])) * np.sqrt(self.variance)
        along = np.abs(slopes @ (jumps / np.linalg.norm(jumps, axis=1, keepdims=True)).T)
        self.clip_ratio = float(np.quantile(along, 0.995))
        self.clip_grad = float(np.quantile(np.linalg.norm(slopes, axis=1), 0.9))

    @staticmethod
    def _sites(model, args, kwargs):
        trace = handlers.trace(handlers.seed(model, 0)).get_trace(*args, **kwargs)
        return [name for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]]

    def starts(self, chains: int, seed: int):
        """As the papers': around the true parameters, as wide as the posterior."""
        away = np.random.default_rng([12, seed]).standard_normal((chains, len(self.variance)))
        points = self._start + jnp.asarray(away * np.sqrt(self.variance), jnp.float32)
        return jax.vmap(self._unravel)(points)


METHODS = {
    "default": default_fit(DPHMC),
    "penalty": default_fit(DPPenalty),
    "plain-hmc": plain_fit(DPHMC, "plain-hmc"),
    "plain-penalty": plain_fit(DPPenalty, "plain-penalty"),
}


def run(case: Case, method: str, eps: float, seed: int, compare: bool = True) -> dict[str, Any]:
    """One fit to one data set, as a record for the results.

    :param compare: with the exact posterior; otherwise with the true parameters only.
    """
    model, args, kwargs, truth = case.make(seed)
    posterior = exact(case.name, seed) if compare or method.startswith("plain") else None
    record = {"case": case.name, "eps": eps, "method": method, "seed": seed, "outcome": "done"}
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            sampler, mcmc, options = METHODS[method](case, posterior, model, args, kwargs, truth, eps, seed)
            start = time.perf_counter()
            mcmc.run(jax.random.key(seed), *args, **options, **kwargs)
            samples = jax.block_until_ready(mcmc.get_samples())
        except Exception as error:  # one fit that fails is a result of the benchmark
            refused = isinstance(error, numpyro_dp.PrivacyBudgetError) or "Refus" in type(error).__name__
            record["outcome"] = "refused" if refused else "failed"
            record["message"] = f"{type(error).__name__}: {error}"[:500]
            return record
    record["seconds"] = time.perf_counter() - start
    record["warnings"] = sorted({f"{w.category.__name__}: {w.message}"[:300] for w in caught})
    prepared = getattr(sampler, "prepared", None)
    record["mode"] = str(getattr(prepared, "mode", "") or "")
    return record | scores(case, samples, truth, posterior, seed)


# -- Scores ------------------------------------------------------------------------------------------------------------


def scores(case: Case, samples, truth, posterior: Exact | None, seed: int) -> dict[str, float]:
    names = {name for name in truth if name in samples}  # without deterministic sites
    if "z" in names:
        names.discard("alpha")
    private = flat(case.quantities({name: samples[name] for name in names}))
    low, high = np.quantile(private, [0.05, 0.95], axis=0)
    true = case.true_quantities(truth)
    result = {"truth": float(((low <= true) & (true <= high)).mean()), "parameters": len(true)}
    if posterior is None:
        return result
    draws = flat(case.quantities({name: posterior.draws[name] for name in names}))
    difference = (private.mean(0) - posterior.mean) / posterior.sd
    ratio = np.maximum(private.std(0) / posterior.sd, 1e-9)
    return result | {
        "error": float(np.sqrt((difference**2).mean())),
        "sd ratio": float(np.exp(np.log(ratio).mean())),
        "exact": float(((low <= draws) & (draws <= high)).mean()),
        "MMD": max(mmd(private, draws, seed=seed), 0.0),
    }


# -- Tables ------------------------------------------------------------------------------------------------------------


def summary(values: list[float], digits: int = 2) -> str:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    if len(values) == 1:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} ({low:.{digits}f}, {high:.{digits}f})"


def row(records: list[dict[str, Any]]) -> list[str]:
    """One line of a table, from the fits of a method at one eps."""
    done = [record for record in records if record["outcome"] == "done"]
    cells = [summary([r[m] for r in done], 1 if m == "seconds" else 2) if done else "-" for m in METRICS]
    modes = sorted({record["mode"] for record in done if record["mode"]})
    others = [record["outcome"] for record in records if record["outcome"] != "done"]
    notes = [f"{others.count(outcome)}/{len(records)} {outcome}" for outcome in sorted(set(others))]
    warned = sum(bool(record["warnings"]) for record in done)
    if warned:
        notes.append(f"{warned}/{len(records)} warned")
    return [*cells, "/".join(modes), ", ".join(notes)]


def verdict(case: Case, eps: float, records: list[dict[str, Any]]) -> str:
    """The target and whether it was met; empty where there is none."""
    if eps not in case.targets:
        return ""
    target, metric = case.targets[eps], "MMD" if case.metric == "mmd" else "error"
    done = [record for record in records if record["outcome"] == "done"]
    if not done:
        refused = all(record["outcome"] == "refused" for record in records)
        outcome = ("met" if target.or_refused else "missed") + " (refused)" if refused else "failed"
        return f"{metric} {target}: {outcome}"
    met = np.median([record[metric] for record in done]) <= target.at_most
    if target.coverage:
        met &= target.coverage[0] <= np.mean([record["exact"] for record in done]) <= target.coverage[1]
    return f"{metric} {target}: {'met' if met else 'missed'}"


def picture(records: list[dict[str, Any]], names: list[str], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return
    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.6 * columns, 3 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        case = CASES[name]
        metric = "MMD" if case.metric == "mmd" else "error"
        mine = [r for r in records if r["case"] == name and r["outcome"] == "done"]
        for method in METHODS:
            points = sorted({r["eps"] for r in mine if r["method"] == method})
            if not points:
                continue
            values = [[r[metric] for r in mine if r["method"] == method and r["eps"] == eps] for eps in points]
            low, middle, high = (np.array([np.quantile(v, q) for v in values]) for q in (0.25, 0.5, 0.75))
            axis.errorbar(points, middle, [middle - low, high - middle], marker="o", capsize=2, label=method)
        if case.targets:
            axis.plot(
                list(case.targets), [t.at_most for t in case.targets.values()], "k_", markersize=14, label="target"
            )
        axis.set(title=name, xscale="log", yscale="log", xlabel="eps", ylabel=metric)
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"\nPicture: {path}")


def compare(options) -> None:
    records: list[dict[str, Any]] = []
    CACHE.mkdir(parents=True, exist_ok=True)
    verdicts = []
    for name in options.cases:
        case = CASES[name]
        print(f"\n## {name}\n")
        print(f"| eps | method | {' | '.join(METRICS)} | mode | notes | target |")
        print("|" + "---|" * (len(METRICS) + 5))
        for eps in options.eps:
            for method in options.methods:
                fits = [run(case, method, eps, seed) for seed in range(options.seeds)]
                records += fits
                (CACHE / "results.json").write_text(json.dumps(records, indent=1))
                beside = verdict(case, eps, fits)
                if beside:
                    verdicts.append((name, eps, method, beside))
                print(f"| {eps:g} | {method} | {' | '.join(row(fits))} | {beside} |", flush=True)
                for message in sorted({r["message"] for r in fits if r["outcome"] == "failed"}):
                    print(f"    {message}", flush=True)
        jax.clear_caches()
    if verdicts:
        print("\n| case | eps | method | target |\n|---|---|---|---|")
        for name, eps, method, beside in verdicts:
            print(f"| {name} | {eps:g} | {method} | {beside} |")
    picture(records, options.cases, CACHE / "results.png")


def coverage(options) -> None:
    """Many data sets; the true parameters only, so no exact posterior is needed."""
    print(f"Coverage of the true parameters by 90% intervals, {options.seeds} data sets\n")
    print("| case | eps | covered | s.e. (binomial) | s.e. (between data sets) | fits | notes |")
    print("|---|---|---|---|---|---|---|")
    records: list[dict[str, Any]] = []
    CACHE.mkdir(parents=True, exist_ok=True)

    def report(name, eps, fits):
        done = [record for record in fits if record["outcome"] == "done"]
        others = [record["outcome"] for record in fits if record["outcome"] != "done"]
        notes = ", ".join(f"{others.count(outcome)} {outcome}" for outcome in sorted(set(others)))
        if not done:
            print(f"| {name} | {eps:g} | - | - | - | 0 | {notes} |", flush=True)
            return
        sizes = np.array([record["parameters"] for record in done])
        hits = np.array([record["truth"] for record in done]) * sizes
        share = hits.sum() / sizes.sum()
        binomial = np.sqrt(share * (1 - share) / sizes.sum())
        between = np.sqrt(((hits - share * sizes) ** 2).sum()) / sizes.sum()
        print(
            f"| {name} | {eps:g} | {share:.3f} | {binomial:.3f} | {between:.3f} | {len(done)} | {notes} |", flush=True
        )

    for name in options.cases:
        for eps in options.eps:
            fits = [run(CASES[name], "default", eps, seed, compare=False) for seed in range(options.seeds)]
            records += fits
            (CACHE / "coverage.json").write_text(json.dumps(records, indent=1))
            report(name, eps, fits)
        jax.clear_caches()
    for eps in options.eps:
        report("all", eps, [record for record in records if record["eps"] == eps])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=["all", *CASES], help=f"default: {' '.join(QUICK)}")
    parser.add_argument("--eps", nargs="+", type=float, help="default: 1 3; with --coverage 0.3 1 3")
    parser.add_argument("--seeds", type=int, help="data sets per model; default 2; with --coverage 20")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=["default"])
    parser.add_argument("--coverage", action="store_true", help="pooled coverage of default fits, on GLMs by default")
    options = parser.parse_args()
    options.cases = options.cases or (GLMS if options.coverage else QUICK)
    if "all" in options.cases:
        options.cases = list(CASES)
    options.eps = options.eps or ([0.3, 1.0, 3.0] if options.coverage else [1.0, 3.0])
    options.seeds = options.seeds or (20 if options.coverage else 2)
    (coverage if options.coverage else compare)(options)


if __name__ == "__main__":
    main()
