"""What the experiments share: the papers' samplers as they were set, one run of one sampler, and records of runs.

An experiment is a list of jobs. Each job makes one record, which is appended as one line to a file
(`benchmark-output/experiments/NAME.jsonl`); a job whose line is there is not run again, so a long experiment may be
stopped and started.
"""

import dataclasses
import json
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from experiments import metrics
from experiments.models import Problem, flat
from numpyro_dp import DPHMC, DPSGLD, DPSGNHT, MCMC, DPBarker, DPPenalty, FixedBatches
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.privacy.accounting import CountedMechanisms, composed_eps, gaussian_rho
from numpyro_dp.privacy.mechanisms import BarkerBatch, FixedBatchGaussian, Gaussian

OUTPUT = Path(__file__).resolve().parents[1] / "benchmark-output" / "experiments"

Record = dict[str, Any]


# -- The papers' samplers ----------------------------------------------------------------------------------------------


class Sampler(ABC):
    """A published sampler with its settings.

    :ivar chains: how many are run, and share the budget.
    """

    chains: int

    @abstractmethod
    def iteration(self, rows: int) -> CountedMechanisms:
        """What one iteration of one chain releases."""

    def once(self, rows: int) -> CountedMechanisms:
        """What a chain releases before its first iteration."""
        return []

    @abstractmethod
    def kernel(self, model: Callable, rows: int, **common: Any) -> DPKernel:
        """The kernel with noise multipliers instead of eps: eps follows from the number of iterations."""

    def affordable(self, rows: int, eps: float) -> int:
        """Iterations of all chains together that cost at most `eps` at delta = 0.1 / n, replace-one."""
        once = [(mechanism, self.chains * count) for mechanism, count in self.once(rows)]
        return affordable(self.iteration(rows), eps, 0.1 / rows, once)


@dataclass(frozen=True)
class Penalty(Sampler):
    """DP-penalty (Yıldırım 2017), as set in the DP-HMC paper and in Räisä's thesis.

    :ivar tau: of their parameter files: noise sd over sensitivity, divided by ``sqrt(n)``.
    :ivar step: sd of proposals, for all components or for each.
    :ivar clip: of a row's log ratio, per unit of distance.
    """

    tau: float
    step: float | tuple[float, ...]
    clip: float
    one_component: bool = False
    guided: bool = False
    chains: int = 4

    def iteration(self, rows):
        return [(Gaussian(self.tau * math.sqrt(rows)), 1)]

    def kernel(self, model, rows, **common):
        scale = self.step if isinstance(self.step, float) else 1.0
        variances = None if isinstance(self.step, float) else jnp.square(jnp.asarray(self.step))
        return DPPenalty(
            model,
            prepare=False,
            clip_ratio=self.clip,
            step_size=scale,
            inverse_mass_matrix=variances,
            one_component=self.one_component,
            guided=self.guided,
            adapt_step_size=False,
            **({"eps": math.inf} if self.tau == 0 else {"noise_multiplier_ratio": self.tau * math.sqrt(rows)}),
            **common,
        )


@dataclass(frozen=True)
class HMC(Sampler):
    """DP-HMC (Räisä, Koskela and Honkela 2021), as set there and in Räisä's thesis.

    :ivar tau, tau_g: of log ratios and gradients, as `Penalty.tau`; 0 for no noise.
    :ivar step: of the leapfrog. The paper multiplies it by a Halton sequence on [0, 1], the thesis does not.
    :ivar clip, clip_grad: of a row's log ratio per unit of distance, and of the norm of its gradient.
    :ivar mass: of each component; default 1.
    """

    tau: float
    tau_g: float
    step: float
    steps: int
    clip: float
    clip_grad: float
    mass: tuple[float, ...] | None = None
    halton: bool = False
    leapfrog: str = "fresh"
    chains: int = 4

    def iteration(self, rows):
        gradients = self.steps + (1 if self.leapfrog == "fresh" else 0)
        return [
            (Gaussian(self.tau * math.sqrt(rows)), 1),
            (Gaussian(self.tau_g * math.sqrt(rows)), gradients),
        ]

    def once(self, rows):
        return [(Gaussian(self.tau_g * math.sqrt(rows)), 1)] if self.leapfrog == "reuse" else []

    def kernel(self, model, rows, **common):
        noise = {
            "noise_multiplier_ratio": self.tau * math.sqrt(rows),
            "noise_multiplier_grad": self.tau_g * math.sqrt(rows),
        }
        return DPHMC(
            model,
            prepare=False,
            clip_ratio=self.clip,
            clip_grad=self.clip_grad,
            step_size=self.step / 2 if self.halton else self.step,
            num_steps=self.steps,
            jitter=0.999 if self.halton else 0.0,
            leapfrog=self.leapfrog,
            inverse_mass_matrix=None if self.mass is None else 1 / jnp.asarray(self.mass),
            adapt_step_size=False,
            **({"eps": math.inf} if self.tau == 0 else noise),
            **common,
        )


@dataclass(frozen=True)
class SGLD(Sampler):
    """DP-SGLD and, with a friction, DP-SGNHT, as set in the DP-HMC paper.

    The authors' step ``eta / n`` and privacy noise; what noise is missing for the right target is added (the authors'
    code samples the posterior's square). Batches are drawn, as theirs, without replacement, and accounted as such.

    :ivar clip: of a row's gradient, times `power`.
    :ivar kept: of so many steps one draw is kept.
    :ivar power: of the likelihood, where it is tempered.
    """

    eta: float
    clip: float
    friction: float | None = None
    batch: int = 1000
    kept: int = 1
    chains: int = 4
    power: float = 1.0

    def noise_multiplier(self, rows):
        """In units of the sensitivity, which is twice the clip bound."""
        friction = 1.0 if self.friction is None else 2 * self.friction
        return self.batch / (2 * self.clip * math.sqrt(self.eta * rows)) * math.sqrt(friction)

    def iteration(self, rows):
        return [(FixedBatchGaussian(self.noise_multiplier(rows), self.batch, rows), self.kept)]

    def kernel(self, model, rows, **common):
        settings = {
            "clip_grad": self.clip / self.power,
            "step_size": self.eta / rows,
            "batch_size": FixedBatches(self.batch),
            "num_steps": self.kept,
            # A hair below what would fill the Langevin noise entirely: rounding must not make it too much.
            "noise_multiplier_grad": self.noise_multiplier(rows) * (1 - 1e-7),
        }
        if self.friction is None:
            return DPSGLD(model, **settings, **common)
        return DPSGNHT(model, friction=self.friction, **settings, **common)


@dataclass(frozen=True)
class Barker(Sampler):
    """DP-Barker on batches (Heikkilä et al. 2019): variance 2, rows clipped to ``.99 sqrt(b) / n0``.

    :ivar step: sd of proposals; they are practically never shortened (only beyond 5 sds of their length).
    """

    step: float
    batch: int = 1000
    kappa: float = 0.99
    correction: str = "logistic"
    chains: int = 1

    def iteration(self, rows):
        return [(BarkerBatch(1 / self.kappa, self.batch, rows, 2.0), 1)]

    def kernel(self, model, rows, n0=None, **common):
        bound = self.kappa * math.sqrt(self.batch) / (rows if n0 is None else n0)
        return DPBarker(
            model,
            variance=2.0,
            correction=self.correction,
            batch_size=self.batch,
            clip_ratio=bound / (5 * self.step),
            step_size=self.step,
            adapt_step_size=False,
            noise_multiplier_ratio=1 / self.kappa,
            n0=n0,
            **common,
        )


@dataclass(frozen=True)
class MinibatchPenalty(Sampler):
    """The minibatch penalty sampler of Räisä's thesis (section 3.3), on batches without replacement, accounted as such.

    The sensitivity is this package's, which is exact (the thesis' bound is larger), and the variance without bias.

    :ivar tau: of the thesis: the noise's variance over the squared sensitivity.
    :ivar step, clip: as `Penalty.step` and `Penalty.clip`.
    """

    tau: float
    step: float
    clip: float
    batch: int = 1000
    one_component: bool = False
    guided: bool = False
    chains: int = 1

    def iteration(self, rows):
        return [(FixedBatchGaussian(math.sqrt(self.tau), self.batch, rows), 1)]

    def kernel(self, model, rows, **common):
        return DPPenalty(
            model,
            clip_ratio=self.clip,
            step_size=self.step,
            batch_size=FixedBatches(self.batch),
            noise_multiplier_ratio=math.sqrt(self.tau),
            one_component=self.one_component,
            guided=self.guided,
            adapt_step_size=False,
            **common,
        )


@dataclass(frozen=True)
class Default:
    """This package's defaults: the model and eps, and nothing else."""

    chains: int = 4
    warmup: int = 500
    samples: int = 500
    kind: type = DPHMC


def affordable(releases: CountedMechanisms, eps: float, delta: float, once: CountedMechanisms = ()) -> int:
    """How many times `releases` together cost at most `eps` under replace-one; to 0.2% where there is no closed form.

    :param releases: of one iteration; `once`: further ones, Gaussian.
    """
    if all(isinstance(mechanism, Gaussian) for mechanism, _ in releases):
        rho = gaussian_rho(eps, delta) - sum(count * (mechanism.rho or 0.0) for mechanism, count in once)
        return max(0, int(rho / sum(count * (mechanism.rho or 0.0) for mechanism, count in releases)))

    def cost(count):
        return composed_eps([(mechanism, count * each) for mechanism, each in releases], delta, "replace_one")

    low, high = 0, 64
    while cost(high) <= eps:
        low, high = high, 4 * high
    while high - low > max(1, 0.002 * low):
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= eps else (low, middle)
    return low


# -- One run -----------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """A finished run.

    :ivar chains: draws, shape (chains, draws, scalars), sites in alphabetical order.
    :ivar samples: {site: (chains, draws, ...)}.
    """

    mcmc: MCMC
    chains: np.ndarray
    samples: dict[str, np.ndarray]
    seconds: float


def fit(
    problem: Problem,
    sampler: Sampler | Default,
    eps: float,
    repeat: int,
    most: int | None = None,
    iterations: int | None = None,
) -> Fit:
    """Run a sampler within a budget: a published one for as many iterations as eps pays for, half of them warmup.

    :param repeat: also the seed of the table: in the papers all repeats share one, and its luck.
    :param most: do not make more iterations in each chain.
    :param iterations: of each chain, if not what eps pays for.
    """
    model, args, kwargs, _ = problem.table(repeat)
    common: dict[str, Any] = {"noise_seed": 1000 + repeat}
    if problem.n0 is not None:
        common["n0"] = problem.n0
    options: dict[str, Any] = {"chain_method": "vectorized", "progress_bar": False, "num_chains": sampler.chains}
    start = {}
    if isinstance(sampler, Default):
        kernel = sampler.kind(model, eps=eps, **common)
        options |= {"num_warmup": sampler.warmup, "num_samples": sampler.samples}
    else:
        count = iterations or sampler.affordable(problem.rows, eps) // sampler.chains
        count = min(count, most or count)
        if count < 2:
            raise ValueError(f"eps = {eps:g} pays for {count} iterations of each chain only")
        kernel = sampler.kernel(model, problem.rows, **common)
        options |= {"num_warmup": count // 2, "num_samples": count - count // 2}
        starts = problem.starts(sampler.chains, repeat, repeat)
        start = {"init_params": starts if sampler.chains > 1 else {k: v[0] for k, v in starts.items()}}
    mcmc = MCMC(kernel, **options)
    begun = time.perf_counter()
    mcmc.run(jax.random.key(repeat), *args, **start, **kwargs)
    samples = {name: np.asarray(value, float) for name, value in mcmc.get_samples(group_by_chain=True).items()}
    seconds = time.perf_counter() - begun
    chains = np.stack([flat({name: value[k] for name, value in samples.items()}) for k in range(sampler.chains)])
    return Fit(mcmc, chains, samples, seconds)


def scores(problem: Problem, chains: np.ndarray, repeat: int) -> Record:
    """Of draws of shape (chains, draws, scalars), for the table of `repeat`."""
    exact, draws = flat(problem.exact(seed=repeat)), chains.reshape(-1, chains.shape[-1])
    return {
        "mmd": metrics.mmd(draws, exact),
        "mean_error": metrics.mean_error(draws, exact),
        "sd_error": metrics.sd_error(draws, exact),
        "coverage": metrics.coverage(draws, exact),
        "rhat": metrics.rhat(chains),
        "ess": metrics.ess(chains),
    }


def clipping(
    problem: Problem,
    sampler: Penalty | MinibatchPenalty | HMC,
    samples: dict[str, np.ndarray],
    repeat: int,
    number: int = 20,
) -> float:
    """The share of a run's log ratios that were clipped, from jumps like those that it made.

    Of a random walk: new proposals from its draws. Of HMC: from its draws to those 1, 2, ... iterations later.
    """
    model, args, kwargs, _ = problem.table(repeat)
    rng = np.random.default_rng(20)
    size = next(iter(samples.values())).shape[1]
    at = rng.choice(size, number)
    before = {name: value[0][at] for name, value in samples.items()}
    if not isinstance(sampler, HMC):
        scales = np.broadcast_to(np.asarray(sampler.step, float), flat(before).shape[1:])
        jump = rng.standard_normal(flat(before).shape) * scales
        if sampler.one_component:
            jump *= np.eye(jump.shape[1])[rng.integers(0, jump.shape[1], number)]
        after = _moved(before, jump)
    else:
        chain = flat({name: value[0] for name, value in samples.items()})
        moved = [next((j for j in range(i + 1, size) if (chain[j] != chain[i]).any()), None) for i in at]
        kept = [k for k, j in enumerate(moved) if j is not None]
        if not kept:
            return math.nan
        after = {name: value[0][[moved[k] for k in kept]] for name, value in samples.items()}
        before = {name: value[kept] for name, value in before.items()}
    return metrics.clipped_share(model, args, kwargs, (before, after), sampler.clip)


def clipped_gradients(
    problem: Problem, sampler: HMC, samples: dict[str, np.ndarray], repeat: int, number: int = 20
) -> float:
    """The share of gradients that are clipped at draws of a run."""
    model, args, kwargs, _ = problem.table(repeat)
    at = np.random.default_rng(21).choice(next(iter(samples.values())).shape[1], number)
    values = {name: value[0][at] for name, value in samples.items()}
    return metrics.clipped_gradients(model, args, kwargs, values, sampler.clip_grad)


def _moved(values, jump):
    moved, at = {}, 0
    for name in sorted(values):
        size = int(np.prod(values[name].shape[1:]))
        moved[name] = values[name] + jump[:, at : at + size].reshape(values[name].shape)
        at += size
    return moved


def run(
    problem: Problem,
    sampler: Sampler | Default,
    eps: float,
    repeat: int,
    most: int | None = None,
    keep: int = 0,
) -> Record:
    """One run as a record.

    :param keep: how many draws to keep in the record.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mcmc, chains, samples, seconds = fit(problem, sampler, eps, repeat, most)
        except Exception as error:  # a run that is refused is a result, too
            return {"outcome": f"{type(error).__name__}: {error}"[:300]}
    report = mcmc.privacy
    record = {
        "outcome": "done",
        "eps_spent": float(report.eps),
        "iterations": int(report.num_iterations),
        "accepted": float(np.asarray(mcmc.get_extra_fields()["accepted"], float).mean()),
        "seconds": round(seconds, 2),
        "warnings": sorted({str(w.message)[:200] for w in caught}),
        **scores(problem, chains, repeat),
    }
    if isinstance(sampler, Default):
        record["mode"] = str(getattr(getattr(mcmc.sampler, "prepared", None), "mode", "") or "")
    elif isinstance(sampler, Penalty | MinibatchPenalty | HMC):
        record["clipped"] = clipping(problem, sampler, samples, repeat)
        if isinstance(sampler, HMC):
            record["clipped_gradients"] = clipped_gradients(problem, sampler, samples, repeat)
    if keep:
        draws = chains.reshape(-1, chains.shape[-1])
        record["draws"] = np.round(draws[np.linspace(0, len(draws) - 1, keep).astype(int)], 6).tolist()
    return record


# -- Records -----------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """How much of an experiment to do.

    :ivar full: the paper's sizes; otherwise what shows the same in a minute or so.
    :ivar eps, repeats, problems: instead of those of that size, where an experiment has them.
    :ivar methods: leave out the others.
    """

    full: bool = False
    eps: tuple[float, ...] | None = None
    repeats: int | None = None
    problems: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None

    def of(self, short: tuple[tuple[float, ...], int], full: tuple[tuple[float, ...], int]) -> tuple[Any, int]:
        """Budgets and repetitions, from those of the short and of the full size."""
        budgets, repeats = full if self.full else short
        return self.eps or budgets, self.repeats or repeats


SHORT = Size()


@dataclass(frozen=True)
class Job:
    """Something to be done once.

    :ivar key: what it is about; a job with the same key is the same job.
    :ivar make: its results; both together are the record.
    """

    key: Record
    make: Callable[[], Record]


@dataclass(frozen=True)
class Experiment:
    """:ivar name: on the command line.
    :ivar shows: in one line.
    :ivar jobs: to be done, at a size.
    :ivar table: from records to what is printed.
    :ivar draw: from records and a path, to a picture there.
    """

    name: str
    shows: str
    jobs: Callable[[Size], Sequence[Job]]
    table: Callable[[list[Record]], str]
    draw: Callable[[list[Record], Path], None] | None = None


def perform(experiment: Experiment, size: Size = SHORT, output: Path = OUTPUT, progress: bool = True) -> list[Record]:
    """Do what has not been done yet.

    :return: records of all jobs, in their order.
    """
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{experiment.name}.jsonl"
    done = {_key(record["key"]): record for record in read(path)}
    jobs = [job for job in experiment.jobs(size) if size.methods is None or job.key.get("method") in size.methods]
    left = [job for job in jobs if _key(job.key) not in done]
    with path.open("a") as lines:
        if path.stat().st_size and not path.read_text().endswith("\n"):
            lines.write("\n")  # after an interrupted line
        for job in tqdm(left, desc=experiment.name, disable=not progress, smoothing=0):
            record = {"key": job.key} | job.make()
            lines.write(json.dumps(record) + "\n")
            lines.flush()
            done[_key(job.key)] = record
    return [done[_key(job.key)] for job in jobs]


def read(path: Path) -> list[Record]:
    """Records of a file; a line that an interrupted run left half written is passed over."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _key(key: Record) -> str:
    return json.dumps(key, sort_keys=True)


def compare(
    problems: Iterable[Problem],
    samplers: Callable[[Problem], dict[str, Sampler | Default]],
    budgets: Iterable[float],
    repeats: int,
    most: int | None = None,
    keep: int = 0,
) -> list[Job]:
    """All samplers on all problems at all eps."""
    return [
        Job(
            {
                "problem": problem.name,
                "method": name,
                "eps": eps,
                "repeat": repeat,
                "settings": repr(sampler),
                "most": most,
                "keep": keep,
            },
            lambda problem=problem, sampler=sampler, eps=eps, repeat=repeat: run(
                problem, sampler, eps, repeat, most, keep
            ),
        )
        for problem in problems
        for name, sampler in samplers(problem).items()
        for eps in budgets
        for repeat in range(repeats)
    ]


# -- Tables and pictures -----------------------------------------------------------------------------------------------


def markdown(headers: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def grouped(records: Iterable[Record], *names: str) -> dict[tuple, list[Record]]:
    """Records by some of their keys, in order of appearance."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record["key"][name] for name in names), []).append(record)
    return groups


def summary(values: Iterable[float], digits: int = 2) -> str:
    """The median, and the range in brackets."""
    values = sorted(value for value in values if not math.isnan(value))
    if not values:
        return "-"
    middle = f"{float(np.median(values)):.{digits}f}"
    if values[0] == values[-1]:
        return middle
    return f"{middle} ({values[0]:.{digits}f}, {values[-1]:.{digits}f})"


COLUMNS = {
    "mmd": "MMD",
    "mean_error": "mean error",
    "sd_error": "sd error",
    "rhat": "R-hat",
    "accepted": "accepted",
    "clipped": "clipped",
    "clipped_gradients": "gradients clipped",
    "iterations": "iterations",
    "centre": "mean off centre",
}

USUAL = ("mmd", "mean_error", "sd_error", "rhat", "accepted", "clipped", "clipped_gradients", "iterations")


def comparison(records: list[Record], columns: Sequence[str] = USUAL) -> str:
    """Medians (and ranges) of runs by problem, eps and method."""
    rows = []
    for (problem, eps, method), group in sorted(
        grouped(records, "problem", "eps", "method").items(), key=lambda item: (item[0][0], item[0][1])
    ):
        done = [record for record in group if record["outcome"] == "done"]
        cells = [summary([r[c] for r in done if c in r], 0 if c == "iterations" else 2) for c in columns]
        failed = "; ".join(sorted({r["outcome"] for r in group if r["outcome"] != "done"}))
        modes = "/".join(sorted({r["mode"] for r in done if r.get("mode")}))
        rows.append([problem, f"{eps:g}", method, *cells, failed or modes])
    return markdown(["problem", "eps", "method", *(COLUMNS[c] for c in columns), ""], rows)


def draw_comparison(records: list[Record], path: Path, columns: Sequence[str] = ("mmd", "mean_error", "rhat")) -> None:
    """One row of panels for each problem: medians and ranges by eps."""
    import matplotlib.pyplot as plt

    problems = list(grouped(records, "problem"))
    figure, axes = plt.subplots(
        len(problems), len(columns), figsize=(4 * len(columns), 3 * len(problems)), squeeze=False, layout="constrained"
    )
    handles: dict[str, Any] = {}
    # By method, since not every panel has all of them.
    styles: dict[str, dict[str, Any]] = {
        method: {"linewidth": 2.5, "color": "k"} if method.startswith("ours") else {"linewidth": 1.2, "color": f"C{k}"}
        for k, (method,) in enumerate(grouped(records, "method"))
    }
    for line, (problem,) in zip(axes, problems, strict=True):
        for axis, column in zip(line, columns, strict=True):
            for (method,), group in grouped(records, "method").items():
                mine = [r for r in group if r["key"]["problem"] == problem and r["outcome"] == "done"]
                points = {
                    eps: values
                    for (eps,), some in sorted(grouped(mine, "eps").items())
                    if (values := [r[column] for r in some if math.isfinite(r.get(column, math.nan))])
                }
                if not points:
                    continue
                middle = np.array([np.median(v) for v in points.values()])
                low, high = (np.array([f(v) for v in points.values()]) for f in (min, max))
                (line_of_method,) = axis.plot(list(points), middle, marker="o", markersize=4, **styles[method])
                axis.vlines(list(points), low, high, color=line_of_method.get_color())
                handles[method] = line_of_method
            axis.set(xlabel="eps", ylabel=COLUMNS[column], title=problem)
            if column in ("mean_error", "rhat"):
                axis.set_yscale("log")
            elif column == "mmd":
                axis.set_ylim(bottom=-0.02)
            else:
                axis.set_ylim(bottom=0)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110)
    plt.close(figure)


def with_clip(sampler: Sampler, bound: float) -> Sampler:
    """The same sampler with another clip bound of log ratios."""
    return dataclasses.replace(sampler, clip=bound)  # type: ignore[type-var]
