"""Heikkilä et al. (2019), "Differentially private Markov chain Monte Carlo" (DP Barker): Figures 1 to 3.

A two-component mixture, a million rows tempered to a hundred; batches of 1,000; 20,000 iterations. The paper finds the
start with variational inference at eps = .22; here the samplers start at the true parameters, free of charge. DP-SGLD
is run as set in the authors' code, on batches of 100, but with the noise that its target needs.
"""

import functools
import math
from pathlib import Path

import numpy as np
from scipy.special import gammaln, logsumexp

from experiments import metrics, runs
from experiments.dp_hmc import OURS
from experiments.models import PROBLEMS, flat
from experiments.runs import SGLD, Barker, Default, Experiment, Job, Record, Size, markdown, summary
from numpyro_dp.privacy.accounting import composed_eps
from numpyro_dp.privacy.mechanisms import BarkerBatch

ROWS, BATCH, ITERATIONS, DELTA = 1_000_000, 1000, 20_000, 1e-6
SAMPLER = Barker(step=0.1, batch=BATCH)

LANGEVIN = SGLD(eta=70.0, clip=0.01, batch=100, kept=1000, chains=1, power=100 / ROWS)
LANGEVIN_STEPS = 6_000_000

PUBLISHED = 1.0
"""What the paper's 20,000 iterations cost by its own account, without the start."""


# -- Privacy -----------------------------------------------------------------------------------------------------------


@functools.cache
def theorem_2(order: float, batch: int) -> float:
    """The paper's Rényi bound of one test on a batch (C = 2); infinite where it does not hold."""
    if not order < batch / 5:
        return math.inf
    rest = batch - 5 * order
    return 5 / (2 * batch) + math.log(2 * batch / rest) / (2 * (order - 1)) + 2 * order / rest


@functools.cache
def corollary_2(order: int, batch: int, rows: int) -> float:
    """The paper's bound with subsampling (Wang, Balle and Kasiviswanathan 2019), at a whole order."""
    log_q = math.log(batch / rows)
    second = theorem_2(2, batch)
    terms = [0.0, 2 * log_q + _log_choose(order, 2) + math.log(min(4 * math.expm1(second), 2 * math.exp(second)))]
    terms += [
        math.log(2) + j * log_q + _log_choose(order, j) + (j - 1) * theorem_2(j, batch) for j in range(3, order + 1)
    ]
    return float(logsumexp(terms)) / (order - 1)


def _log_choose(n: int, k: int) -> float:
    return float(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def published_eps(iterations: int, batch: int, rows: int, delta: float) -> float:
    """By the paper's account: Theorem 2, Corollary 2, and the moments accountant's conversion."""
    orders = range(2, min(100, batch // 5))
    return min(iterations * corollary_2(a, batch, rows) + math.log(1 / delta) / (a - 1) for a in orders)


def our_eps(iterations: int, batch: int, rows: int, delta: float) -> float:
    """The same releases by this package's account: the loss distribution of a batch's test."""
    return composed_eps([(BarkerBatch(1 / SAMPLER.kappa, batch, rows, 2.0), iterations)], delta, "replace_one")


def _figure_1(size: Size) -> list[Job]:
    lengths = (1000, 2000, 5000, 10_000, 20_000, 40_000) if size.full else (1000, 5000, 20_000)
    rates = (0.0002, 0.0005, 0.001, 0.002, 0.005) if size.full else (0.0005, 0.001, 0.002)
    cases = [(BATCH, length) for length in lengths] + [(round(rate * ROWS), ITERATIONS) for rate in rates]

    def job(batch: int, iterations: int) -> Job:
        return Job(
            {"batch": batch, "iterations": iterations, "rows": ROWS, "delta": DELTA},
            lambda: {
                "published": published_eps(iterations, batch, ROWS, DELTA),
                "ours": our_eps(iterations, batch, ROWS, DELTA),
            },
        )

    return [job(*case) for case in dict.fromkeys(cases)]


def _privacy_table(records: list[Record]) -> str:
    rows = [
        [f"{r['key']['batch'] / ROWS:g}", r["key"]["iterations"], f"{r['published']:.3f}", f"{r['ours']:.3f}"]
        for r in records
    ]
    return markdown(["batch / n", "iterations", "eps, the paper's bound", "eps, here"], rows)


def _draw_privacy(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    by_rate = sorted((r for r in records if r["key"]["iterations"] == ITERATIONS), key=lambda r: r["key"]["batch"])
    by_length = sorted((r for r in records if r["key"]["batch"] == BATCH), key=lambda r: r["key"]["iterations"])
    for name, label in (("published", "Theorem 2 and Corollary 2"), ("ours", "here")):
        axes[0].plot([r["key"]["batch"] / ROWS for r in by_rate], [r[name] for r in by_rate], "o-", label=label)
        axes[1].plot([r["key"]["iterations"] for r in by_length], [r[name] for r in by_length], "o-", label=label)
    axes[0].set(xlabel="batch / n", ylabel="eps", xscale="log", yscale="log", title=f"{ITERATIONS} iterations")
    axes[1].set(xlabel="iterations", ylabel="eps", yscale="log", title=f"batches of {BATCH} of a million rows")
    axes[0].legend()
    runs.save(figure, path)


VARIANCES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""Of proposals; Figures 2 and 3 use ``SAMPLER.step**2``."""


def _figure_1c(size: Size) -> list[Job]:
    """Jumps from draws of the exact posterior; a row is clipped where its ratio is above ``sqrt(b) / n0``."""
    problem = PROBLEMS["mixture"]

    def share(variance: float, number: int) -> Record:
        model, args, kwargs, _ = problem.table(0)
        draws = problem.exact(seed=0)
        rng = np.random.default_rng(22)
        at = rng.choice(len(next(iter(draws.values()))), number)
        before = {name: value[at] for name, value in draws.items()}
        lengths = math.sqrt(variance)
        after = {name: value + lengths * rng.standard_normal(value.shape) for name, value in before.items()}
        bound = SAMPLER.kappa * math.sqrt(BATCH) / (problem.n0 or problem.rows)
        return {"clipped": metrics.clipped_share(model, args, kwargs, (before, after), bound, per_length=False)}

    def job(variance: float) -> Job:
        number = 200 if size.full else 20
        return Job({"variance": variance, "jumps": number}, lambda: share(variance, number))

    return [job(variance) for variance in VARIANCES]


def _clipped_table(records: list[Record]) -> str:
    rows = [[f"{r['key']['variance']:g}", f"{r['clipped']:.4f}"] for r in records]
    return markdown(["proposal variance", "share of log ratios clipped"], rows)


def _draw_clipped(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.4), layout="constrained")
    axis.plot([r["key"]["variance"] for r in records], [r["clipped"] for r in records], "o-")
    axis.axvline(SAMPLER.step**2, color="0.7", linestyle="--", label="of Figures 2 and 3")
    axis.set(xscale="log", xlabel="proposal variance", ylabel="share of log ratios clipped", ylim=(-0.02, 1))
    axis.legend()
    runs.save(figure, path)


# -- The mixture -------------------------------------------------------------------------------------------------------


def _job(method: str, eps: float, repeat: int, iterations: int, keep: int, samples: int) -> Job:
    problem = PROBLEMS["mixture"]

    def make() -> Record:
        published = {"DP-Barker": SAMPLER, "DP-SGLD": LANGEVIN}
        sampler = published.get(method, Default(chains=2, warmup=samples, samples=samples))
        blocks = iterations // LANGEVIN.kept if method == "DP-SGLD" else iterations
        finished = runs.fit(problem, sampler, eps, repeat, iterations=blocks)
        draws = finished.chains.reshape(-1, finished.chains.shape[-1])
        return {
            "outcome": "done",
            "eps_spent": float(finished.mcmc.privacy.eps),
            "seconds": round(finished.seconds, 2),
            "mode": str(getattr(getattr(finished.mcmc.sampler, "prepared", None), "mode", "") or ""),
            "draws": np.round(draws[np.linspace(0, len(draws) - 1, min(keep, len(draws))).astype(int)], 5).tolist(),
            "course": _course(finished.chains[0], iterations, repeat) if method == "DP-Barker" else [],
            **runs.scores(problem, finished.chains, repeat),
        }

    key = {"method": method, "eps": eps, "repeat": repeat, "iterations": iterations, "keep": keep, "samples": samples}
    return Job(key, make)


def _course(chain: np.ndarray, iterations: int, repeat: int) -> list[Record]:
    """Errors of the first draws, with what the iterations until then cost; the first half was warmup."""
    exact = flat(PROBLEMS["mixture"].exact(seed=repeat))
    return [
        {
            "eps": our_eps(iterations - len(chain) + number, BATCH, ROWS, DELTA),
            "published": published_eps(iterations - len(chain) + number, BATCH, ROWS, DELTA),
            "mean_error": metrics.mean_error(chain[:number], exact),
            "sd_error": metrics.sd_error(chain[:number], exact),
        }
        for number in np.unique(np.geomspace(200, len(chain), 6).astype(int)).tolist()
    ]


def _figures_2_3(size: Size) -> list[Job]:
    budgets, repeats = size.of(((0.3,), 1), ((0.1, 0.3, 1.0), 20))
    iterations, keep, samples = (ITERATIONS, 4000, 500) if size.full else (4000, 500, 200)
    steps = LANGEVIN_STEPS if size.full else LANGEVIN_STEPS // 60
    return [
        *(_job("DP-Barker", PUBLISHED, repeat, iterations, keep, samples) for repeat in range(repeats)),
        *(_job("DP-SGLD", PUBLISHED, repeat, steps, keep, samples) for repeat in range(repeats)),
        *(_job(OURS, eps, repeat, 0, keep, samples) for eps in budgets for repeat in range(repeats)),
    ]


def _mixture_table(records: list[Record]) -> str:
    rows = []
    for (method, _, iterations), group in runs.grouped(records, "method", "eps", "iterations").items():
        cells = [summary([r[c] for r in group]) for c in ("mmd", "mean_error", "sd_error", "rhat")]
        published = f"{published_eps(iterations, BATCH, ROWS, DELTA):.2f}" if method == "DP-Barker" else "-"
        spent = summary([r["eps_spent"] for r in group], 3)
        rows.append([method, iterations or "-", published, spent, *cells, "/".join(sorted({r["mode"] for r in group}))])
    headers = ["method", "iterations", "eps, the paper's bound", "eps", "MMD", "mean error", "sd error", "R-hat", ""]
    return markdown(headers, rows)


def _draw_mixture(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt

    exact = flat(PROBLEMS["mixture"].exact())
    groups = runs.grouped(records, "method", "eps")
    count = 1 + len(groups)
    figure, axes = plt.subplots(1, count, figsize=(3.4 * count, 3.4), squeeze=False, layout="constrained")
    for axis, ((method, _), group) in zip(axes[0], groups.items(), strict=False):
        axis.plot(*exact.T, ".", color="0.8", markersize=2)
        axis.plot(*np.asarray(group[0]["draws"]).T, ".", markersize=2)
        axis.set(title=f"{method}, eps = {group[0]['eps_spent']:.2f}", xlabel="theta_1", ylabel="theta_2")
    for record in records:
        for name, color in (("mean_error", "C0"), ("sd_error", "C1")):
            if record["course"]:
                course = record["course"]
                axes[0, -1].plot([c["eps"] for c in course], [c[name] for c in course], color=color, linewidth=0.8)
            else:
                marker = "*" if record["key"]["method"] == OURS else "x"
                axes[0, -1].plot(record["eps_spent"], record[name], marker, color=color)
    axes[0, -1].set(xlabel="eps", ylabel="error / posterior sd", xscale="log", yscale="log")
    axes[0, -1].set_title("mean (blue), sd (orange); lines: DP-Barker,\ncrosses: DP-SGLD, stars: ours", fontsize=9)
    runs.save(figure, path)


EXPERIMENTS = [
    Experiment("barker-figure-1", "eps by batch size and iterations, exact", _figure_1, _privacy_table, _draw_privacy),
    Experiment(
        "barker-figure-1c",
        "what is clipped by proposal variance, on the mixture",
        _figure_1c,
        _clipped_table,
        _draw_clipped,
    ),
    Experiment(
        "barker-figures-2-3",
        "the tempered mixture: draws and errors by eps",
        _figures_2_3,
        _mixture_table,
        _draw_mixture,
    ),
]
