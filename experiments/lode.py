"""Lode (2019), "Sub-sampled and differentially private Hamiltonian Monte Carlo": Chapter 6.

Three things are not as in the thesis. The dynamics have friction that slows down, not up, and noise of the right
variance (as printed they have neither). Rows are clipped one by one, where the thesis clips the sum over a batch, which
protects nobody. And its radon table is not distributed here: a synthetic one of the same size takes its place.

The thesis minimises the *mean* loss, so what it samples is the posterior with all rows together counting as one
(`softmax-one`). The same runs are made for the posterior itself, too.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import accountants
from benchmarks.accountants import INNER_STEPS
from experiments import metrics, runs
from experiments.models import PROBLEMS, Problem, flat, make_softmax
from experiments.runs import Experiment, Job, Record, Size, markdown, summary
from numpyro_dp import DPHMC, DPSGHMC, MCMC, PoissonBatches, decreasing_steps

# -- Phase space -------------------------------------------------------------------------------------------------------


def batch_noise(batch: int, step: float) -> float:
    """What the gradient's noise from batches amounts to, as a friction: ``step / 2`` times its variance."""
    y = np.asarray(PROBLEMS["normal"].table()[1][0], float)
    return 0.5 * step * (len(y) / 4) ** 2 * y.var() / batch * (1 - batch / len(y))


def end_energies(
    batch: int, step: float, friction: float, number: int = 500, batches: str = "one for each step"
) -> np.ndarray:
    """Energies of `number` trajectories that start with energy 1, on the mean of `normal`'s 500 rows.

    A trajectory has as many leapfrog steps as one pass over the rows has batches: along the gradients of batches drawn
    without replacement, each scaled up to all rows.

    :param friction: taken out of the momentum in each step, in the unit of ``1 / step``.
    :param batches: which of `BATCHES`.
    """
    y = np.asarray(PROBLEMS["normal"].table()[1][0], float)
    precision = 1 + len(y) / 4
    mean = y.sum() / 4 / precision
    rng = np.random.default_rng([18, batch])
    angle = 2 * np.pi * rng.random(number)
    q, p = mean + np.sqrt(2 / precision) * np.cos(angle), np.sqrt(2) * np.sin(angle)
    order = np.stack([rng.permutation(len(y)) for _ in range(number)]).reshape(number, -1, batch)
    for j in BATCHES[batches](order.shape[1]):
        q = q + step / 2 * p
        p = np.exp(-step * friction) * p - step * (q + len(y) / 4 * (q - y[order[:, j]].mean(1)))
        q = q + step / 2 * p
    return 0.5 * precision * (q - mean) ** 2 + 0.5 * p**2


BATCHES = {
    "one for each step": range,
    "one for the whole trajectory": lambda steps: [0] * steps,
    "first and last shared": lambda steps: [*range(steps - 1), 0],
    "each twice, there and back": lambda steps: [min(j, steps - 1 - j) for j in range(steps)],
}
"""Which batch each step of a trajectory looks at (Lode 2019, section 3.2)."""

FRICTION = {
    "none": lambda batch, step: 0.0,
    "the thesis' 8e-4 per step": lambda batch, step: 8e-4 / step,
    "as much as the batches' noise": batch_noise,
}


def _phase_space(size: Size) -> list[Job]:
    def job(batch: int, step: float, name: str, batches: str = "one for each step") -> Job:
        def make() -> Record:
            friction = FRICTION[name](batch, step)
            energies = end_energies(batch, step, friction, batches=batches)
            quartiles = np.quantile(energies, [0.25, 0.5, 0.75])
            return {"value": friction, "mean": float(energies.mean()), "quartiles": quartiles.tolist()}

        return Job({"batch": batch, "step": step, "friction": name, "batches": batches}, make)

    sizes = [(batch, step) for step in (0.05, 0.005) for batch in (10, 50, 100, 500)]
    shared = [job(*of, "none", batches) for batches in list(BATCHES)[1:] for of in sizes]
    return [job(*of, name) for of in sizes for name in FRICTION] + shared


def _phase_space_table(records: list[Record]) -> str:
    rows = [
        [
            k["step"],
            k["batch"],
            k["batches"],
            k["friction"],
            f"{r['value']:.3g}",
            f"{r['mean']:.2f}",
            f"{r['quartiles'][1]:.2f}",
        ]
        for r in records
        for k in (r["key"],)
    ]
    return markdown(["step", "batch", "batches", "friction", "", "mean energy at the end (start: 1)", "median"], rows)


def _draw_phase_space(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt

    steps = runs.grouped(records, "step")
    figure, axes = plt.subplots(1, len(steps), figsize=(4.5 * len(steps), 3.4), layout="constrained")
    for axis, ((step,), group) in zip(axes, steps.items(), strict=True):
        for (name, batches), some in runs.grouped(group, "friction", "batches").items():
            label = name if batches == "one for each step" else batches
            axis.plot([r["key"]["batch"] for r in some], [r["mean"] for r in some], "o-", label=label)
        axis.axhline(1, color="0.7", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="batch size", ylabel="mean energy / start", title=f"step {step}")
    axes[0].legend(fontsize=8)
    runs.save(figure, path)


# -- The mean of a normal law ------------------------------------------------------------------------------------------

NORMAL: dict[str, dict[str, Any]] = {
    "naive (no friction), q = .01": {"friction": 0.0, "batch_size": PoissonBatches(rate=0.01)},
    "friction, q = .01": {"batch_size": PoissonBatches(rate=0.01)},
    "naive (no friction), q = .1": {"friction": 0.0, "batch_size": PoissonBatches(rate=0.1)},
    "friction, q = .1": {"batch_size": PoissonBatches(rate=0.1)},
    "friction, all rows": {},
}
"""Samplers without privacy: batches and friction are what is compared. Step and friction are the package's defaults."""


def sghmc(problem: Problem, repeat: int, iterations: int, **settings: Any) -> tuple[MCMC, np.ndarray]:
    """A run of DP-SGHMC from around the true parameters; half of it is warmup. With draws, shape (draws, scalars)."""
    model, args, kwargs, _ = problem.table(repeat)
    common: dict[str, Any] = {"noise_seed": 1000 + repeat} | ({} if problem.n0 is None else {"n0": problem.n0})
    kernel = DPSGHMC(model, **common, **settings)
    mcmc = MCMC(kernel, num_warmup=iterations // 2, num_samples=iterations - iterations // 2, progress_bar=False)
    starts = {name: value[0] for name, value in problem.starts(1, repeat, repeat).items()}
    mcmc.run(jax.random.key(repeat), *args, init_params=starts, **kwargs)
    samples = {name: np.asarray(value, float) for name, value in mcmc.get_samples().items()}
    return mcmc, flat(samples)


def _table_6_1(size: Size) -> list[Job]:
    budgets, repeats = size.of(((3.0, 10.0), 3), ((3.0, 10.0), 15))
    iterations = 500
    problem = PROBLEMS["normal"]

    def off(draws: np.ndarray, repeat: int) -> Record:
        exact = problem.exact(seed=repeat)["mu"]
        return {"error": float((draws.mean() - exact.mean()) / exact.std()), "ratio": float(draws.std() / exact.std())}

    def job(name: str, repeat: int) -> Job:
        def make() -> Record:
            _, draws = sghmc(problem, repeat, iterations, eps=float("inf"), clip_grad=0.7, **NORMAL[name])
            return off(draws[:, 0], repeat)

        return Job({"method": name, "repeat": repeat, "iterations": iterations}, make)

    def private(eps: float, repeat: int) -> Job:
        def make() -> Record:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                draws = runs.fit(problem, runs.Default(chains=1), eps, repeat).chains.ravel()
            return off(draws, repeat) | {"warnings": sorted({str(w.message)[:200] for w in caught})}

        return Job({"method": f"ours, defaults, eps = {eps:g}", "repeat": repeat, "iterations": 500}, make)

    return [
        *(job(name, repeat) for name in NORMAL for repeat in range(repeats)),
        *(private(eps, repeat) for eps in budgets for repeat in range(repeats)),
    ]


def _table_6_1_table(records: list[Record]) -> str:
    rows = []
    for (name,), group in runs.grouped(records, "method").items():
        warned = sum(bool(r.get("warnings")) for r in group)
        cells = [summary([r["error"] for r in group]), summary([r["ratio"] for r in group])]
        rows.append([name, *cells, f"{warned} of {len(group)} warned" if warned else ""])
    return markdown(["sampler", "error of the mean / posterior sd", "sd / posterior sd", ""], rows)


# -- Softmax regression ------------------------------------------------------------------------------------------------

RATE, DELTA, TEST_ROWS = 0.01, 1e-5, 3000


@dataclass(frozen=True)
class Friction:
    """The thesis' sampler of the mean loss: step sizes ``beta * t**(-1/3)``, friction C, clip bound L, J = 10 steps."""

    beta: float
    friction: float
    clip: float = 1.0

    def settings(self) -> dict[str, Any]:
        return {
            "noise_multiplier_grad": "matched",
            "clip_grad": self.clip,
            "friction": self.friction,
            "step_size": decreasing_steps(self.beta),
            "num_steps": INNER_STEPS,
            "batch_size": PoissonBatches(rate=RATE),
        }

    def thesis_eps(self, iterations: int) -> float:
        """By the thesis' account: noise of standard deviation ``sqrt(2 C / step) / L``, Poisson batches, add/remove.

        It holds for sums of rows that are clipped to L one by one, and not for the thesis' own mean over a batch.
        """
        relation, accountant, release = accountants.KINDS_OF_BATCH["Poisson, add/remove"]
        number = INNER_STEPS * iterations
        releases = accountants.friction_sampler(number, release, self.beta, self.friction, self.clip)
        return accountants.eps_by(accountant, releases, DELTA, relation)


SOFTMAX: dict[str, tuple[str, dict[str, Any]]] = {
    "the thesis' DP-SGHMC, mean loss": (
        "softmax-one",
        Friction(1.7, 0.15).settings(),
    ),
    "the same without friction": (
        "softmax-one",
        Friction(1.7, 0.0).settings() | {"noise_multiplier_grad": None, "eps": float("inf")},
    ),
    "DP-SGHMC, posterior, eps = 1": (
        "softmax",
        {"eps": 1.0, "clip_grad": 1.0, "num_steps": 10, "batch_size": PoissonBatches(rate=RATE)},
    ),
}


def _table_6_2(size: Size) -> list[Job]:
    budgets, repeats = size.of(((1.0, 3.0), 1), ((1.0, 3.0), 15))
    iterations = 1500 if size.full else 300

    def record(problem: Problem, draws: np.ndarray, eps: float, repeat: int = 0) -> Record:
        # A constant added to the coefficients of one covariate changes no probability: compare without it.
        centred, exact = (_centred(values) for values in (draws, flat(problem.exact(seed=repeat))))
        return {
            "eps": eps,
            "accuracy": _accuracy(draws),
            "mean_error": metrics.mean_error(centred, exact),
            "sd_error": metrics.sd_error(centred, exact),
            "sd_difference": float(np.abs(draws.std(0) - flat(problem.exact(seed=repeat)).std(0)).mean()),
        }

    def job(name: str, repeat: int) -> Job:
        on, settings = SOFTMAX[name]

        def make() -> Record:
            mcmc, draws = sghmc(PROBLEMS[on], repeat, iterations, delta=DELTA, **settings)
            return record(PROBLEMS[on], draws, float(mcmc.privacy.eps), repeat)

        return Job({"method": name, "on": on, "repeat": repeat, "iterations": iterations}, make)

    def ours(eps: float, repeat: int) -> Job:
        def make() -> Record:
            problem = PROBLEMS["softmax"]
            model, args, _, _ = problem.table(repeat)
            kernel = DPHMC(model, eps=eps, delta=DELTA, noise_seed=1000 + repeat)
            mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, progress_bar=False)
            mcmc.run(jax.random.key(repeat), *args)
            samples = {name: np.asarray(value, float) for name, value in mcmc.get_samples().items()}
            return record(problem, flat(samples), float(mcmc.privacy.eps), repeat)

        return Job({"method": f"ours, defaults, eps = {eps:g}", "on": "softmax", "repeat": repeat}, make)

    def exact(on: str) -> Job:
        return Job(
            {"method": "exact", "on": on, "repeat": 0},
            lambda: record(PROBLEMS[on], flat(PROBLEMS[on].exact(seed=0)), float("inf")),
        )

    return [
        exact("softmax"),
        exact("softmax-one"),
        *(job(name, repeat) for name in SOFTMAX for repeat in range(repeats)),
        *(ours(eps, repeat) for eps in budgets for repeat in range(repeats)),
    ]


def _centred(draws: np.ndarray) -> np.ndarray:
    """Coefficients less the mean over classes, as a matrix (draws, 15)."""
    theta = draws.reshape(len(draws), 3, 5)
    return (theta - theta.mean(2, keepdims=True)).reshape(len(draws), -1)


def _accuracy(draws: np.ndarray) -> float:
    """On fresh rows, by the means of the coefficients, as in the thesis."""
    X, y = make_softmax(1000, TEST_ROWS)[1]
    return metrics.accuracy(np.asarray(X, float) @ draws.mean(0).reshape(3, 5), y)


def _table_6_2_table(records: list[Record]) -> str:
    rows = []
    for (method, on), group in runs.grouped(records, "method", "on").items():
        cells = [summary([r[c] for r in group], 3) for c in ("accuracy", "mean_error", "sd_error", "sd_difference")]
        rows.append([method, "all rows" if on == "softmax" else "one row", f"{group[0]['eps']:.3g}", *cells])
    headers = ["sampler", "rows count as", "eps", "accuracy", "mean error", "sd error", "mean abs. difference of sds"]
    return markdown(headers, rows)


# -- Step sizes and frictions ------------------------------------------------------------------------------------------


PAIR = {
    "C = 0.05, beta = 2, L = 0.7": (Friction(2.0, 0.05, 0.7), 19.811),
    "C = 0.7, beta = 3, L = 0.8": (Friction(3.0, 0.7, 0.8), 2.248),
}
"""Of Figure 6.9, with the eps that the thesis states."""


def _thesis_job(sampler: Friction, repeat: int, iterations: int, keep: int, **key: Any) -> Job:
    """A run on the thesis' mean loss (all rows together count as one)."""

    def make() -> Record:
        problem = PROBLEMS["softmax-one"]
        mcmc, draws = sghmc(problem, repeat, iterations, delta=DELTA, **sampler.settings())
        found = {"eps": float(mcmc.privacy.eps), "thesis_eps": sampler.thesis_eps(iterations)}
        if keep:
            found["draws"] = np.round(draws[np.linspace(0, len(draws) - 1, keep).astype(int)], 3).tolist()
        return found | _likeness(draws, repeat)

    settings = {"beta": sampler.beta, "friction": sampler.friction, "clip": sampler.clip}
    return Job(settings | {"repeat": repeat, "iterations": iterations, "keep": keep} | key, make)


def _likeness(draws: np.ndarray, repeat: int) -> Record:
    """Accuracy, and the thesis' measure of a posterior: the mean absolute difference of standard deviations."""
    exact = flat(PROBLEMS["softmax-one"].exact(seed=repeat))
    return {
        "accuracy": _accuracy(draws) if np.isfinite(draws).all() else float("nan"),
        "sd_difference": float(np.abs(draws.std(0) - exact.std(0)).mean()),
    }


def _figure_6_7(size: Size) -> list[Job]:
    _, repeats = size.of(((), 1), ((), 10))
    frictions = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.66, 0.8, 1.0) if size.full else (0.05, 0.3, 0.66, 1.0)
    betas = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0) if size.full else (0.5, 1.5, 3.0)
    return [
        _thesis_job(Friction(beta, friction), repeat, 750 if size.full else 150, 0)
        for beta in betas
        for friction in frictions
        for repeat in range(repeats)
    ]


def _figure_6_7_table(records: list[Record]) -> str:
    rows = []
    for (beta, friction), group in runs.grouped(records, "beta", "friction").items():
        cells = [summary([r[c] for r in group]) for c in ("accuracy", "sd_difference")]
        rows.append([beta, friction, *cells, f"{group[0]['thesis_eps']:.2f}", f"{group[0]['eps']:.4f}"])
    return markdown(
        ["beta", "C", "accuracy", "mean abs. difference of sds", "eps, the thesis' account", "eps, as run"], rows
    )


def _draw_figure_6_7(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt

    panels = {"accuracy": "accuracy", "sd_difference": "mean abs. difference of sds", "thesis_eps": "eps"}
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), layout="constrained")
    for (beta,), group in runs.grouped(records, "beta").items():
        by_friction = runs.grouped(group, "friction")
        for axis, (column, label) in zip(axes, panels.items(), strict=True):
            values = [float(np.mean([r[column] for r in some])) for some in by_friction.values()]
            axis.plot([friction for (friction,) in by_friction], values, "o-", label=f"beta = {beta:g}")
            axis.set(xlabel="friction C", ylabel=label)
    axes[2].set(yscale="log", title="by the thesis' account")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=8)
    runs.save(figure, path)


def _figure_6_9(size: Size) -> list[Job]:
    _, repeats = size.of(((), 1), ((), 10))
    iterations = 1500 if size.full else 300
    return [
        _thesis_job(sampler, repeat, iterations, 150, method=name)
        for name, (sampler, _) in PAIR.items()
        for repeat in range(repeats)
    ]


def _figure_6_9_table(records: list[Record]) -> str:
    rows = []
    for (name, iterations), group in runs.grouped(records, "method", "iterations").items():
        cells = [summary([r[c] for r in group]) for c in ("accuracy", "sd_difference")]
        stated = PAIR[name][1] if iterations == 1500 else "-"
        rows.append([name, iterations, *cells, stated, f"{group[0]['thesis_eps']:.3f}", f"{group[0]['eps']:.3g}"])
    headers = ["settings", "iterations", "accuracy", "mean abs. difference of sds", "eps, stated"]
    return markdown([*headers, "by the thesis' account, here", "as run"], rows)


def _draw_figure_6_9(records: list[Record], path: Path) -> None:
    """As in the thesis: five of the fifteen parameters, the exact posterior first."""
    import matplotlib.pyplot as plt

    first = [r for r in records if r["key"]["repeat"] == 0]
    panels = {"exact": flat(PROBLEMS["softmax-one"].exact(seed=0))}
    panels |= {r["key"]["method"]: np.asarray(r["draws"]) for r in first}
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.2), sharex=True, layout="constrained")
    for axis, (name, draws) in zip(axes, panels.items(), strict=True):
        for k in range(5):
            axis.hist(draws[:, 3 * k], bins=25, density=True, histtype="step", label=f"parameter {3 * k + 1}")
        axis.set(title=name, yticks=[])
    axes[0].legend(fontsize=7)
    runs.save(figure, path)


EXPERIMENTS = [
    Experiment(
        "lode-phase-space",
        "energy that batches bring in, and friction takes out (Figures 6.1 to 6.5)",
        _phase_space,
        _phase_space_table,
        _draw_phase_space,
    ),
    Experiment("lode-table-6-1", "the mean of a normal law, with and without friction", _table_6_1, _table_6_1_table),
    Experiment(
        "lode-table-6-2", "softmax regression: accuracy and posterior sds (Figure 6.6)", _table_6_2, _table_6_2_table
    ),
    Experiment(
        "lode-figure-6-7",
        "softmax regression: accuracy, posterior sds and eps by step size and friction",
        _figure_6_7,
        _figure_6_7_table,
        _draw_figure_6_7,
    ),
    Experiment(
        "lode-figure-6-9",
        "softmax regression: two settings of like accuracy and unlike eps",
        _figure_6_9,
        _figure_6_9_table,
        _draw_figure_6_9,
    ),
]
