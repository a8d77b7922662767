"""Räisä (2021), "Differentially private Markov chain Monte Carlo" (thesis): Figures 6.3 to 6.9.

One chain at a time, which has the whole budget (the thesis repeats each 20 times), from around the true parameters;
settings of the thesis' parameter files. The guided walk with one component at a time is its "OCU + GWMH".
"""

from pathlib import Path

import numpy as np

from experiments import runs
from experiments.dp_hmc import OURS, clipping_jobs, clipping_table, draw_clipping
from experiments.models import PROBLEMS, Problem, flat
from experiments.runs import HMC, Barker, Default, Experiment, Job, MinibatchPenalty, Penalty, Record, Sampler, Size


def _penalty(tau: float, step: float | tuple[float, ...], clip: float) -> Penalty:
    return Penalty(tau, step, clip, chains=1)


def _guided(tau: float, step: float | tuple[float, ...], clip: float) -> Penalty:
    return Penalty(tau, step, clip, one_component=True, guided=True, chains=1)


def _hmc(tau: float, tau_g: float, step: float, steps: int, clip: float, clip_grad: float, mass=None) -> HMC:
    return HMC(tau, tau_g, step, steps, clip, clip_grad, mass, leapfrog="reuse", chains=1)


_WIDTHS = (20.0, 7.0, *[5.0] * 28)

SETTINGS: dict[str, dict[str, Sampler]] = {
    "flat-banana": {
        "penalty": _penalty(0.1, 0.008, 2.0),
        "penalty, guided": _guided(0.1, 0.008, 1.8),
        "HMC": _hmc(0.1, 0.4, 0.0005, 10, 2.0, 1.0),
        "minibatch penalty": MinibatchPenalty(0.7, 0.001, 1.0),
        "minibatch penalty, guided": MinibatchPenalty(0.7, 0.001, 1.0, one_component=True, guided=True),
        "Barker": Barker(0.0008, 1300),
    },
    "flat-banana-10": {
        "penalty": _penalty(0.1, 0.0015, 2.0),
        "penalty, guided": _guided(0.1, 0.0015, 3.0),
        "HMC": _hmc(0.05, 0.2, 0.00015, 10, 2.5, 3.0),
        "minibatch penalty": MinibatchPenalty(0.6, 0.0001, 3.0),
        "minibatch penalty, guided": MinibatchPenalty(0.5, 0.00032, 2.0, one_component=True, guided=True),
        "Barker": Barker(0.0008, 2600),
    },
    "tempered-banana": {
        "penalty": _penalty(0.2, 0.035, 5.0),
        "penalty, guided": _guided(0.2, 0.04, 3.5),
        "HMC": _hmc(0.2, 0.6, 0.01, 10, 2.5, 2.0),
        "minibatch penalty": MinibatchPenalty(1.5, 0.025, 4.0),
        "minibatch penalty, guided": MinibatchPenalty(2.0, 0.04, 4.0, one_component=True, guided=True),
        "Barker": Barker(0.12, 1300),
    },
    "tempered-banana-10": {
        "penalty": _penalty(0.18, 0.02, 3.0),
        "penalty, guided": _guided(0.1, 0.04, 3.0),
        "HMC": _hmc(0.08, 0.2, 0.015, 10, 2.5, 3.5),
        "minibatch penalty": MinibatchPenalty(0.7, 0.02, 2.0, batch=1200),
        "minibatch penalty, guided": MinibatchPenalty(0.8, 0.028, 2.0, batch=1200, one_component=True, guided=True),
        "Barker": Barker(0.04, 2600),
    },
    "gauss-30": {
        "penalty": _penalty(0.06, tuple(0.00014 * w for w in _WIDTHS), 3.0),
        "penalty, guided": _guided(0.2, tuple(0.00024 * w for w in _WIDTHS), 3.0),
        "HMC": _hmc(0.05, 0.1, 0.0002, 5, 3.1, 6.0, (0.1, 1.0, *[2.0] * 28)),
    },
    "narrow-banana": {
        "penalty": _penalty(0.2, 0.0015, 4.5),
        "penalty, guided": _guided(0.2, 0.0015, 4.5),
        "HMC": _hmc(0.15, 0.25, 0.00045, 5, 3.5, 2.8),
    },
    "correlated-gauss": {
        "penalty": _penalty(0.07, 0.00015, 50.0),
        "penalty, guided": _guided(0.1, 0.0002, 45.0),
        "HMC": _hmc(0.05, 0.2, 0.00007, 8, 30.0, 29.0),
    },
    "circle": {
        "penalty": _penalty(4.0, 0.2, 0.002),
        "HMC": _hmc(0.6, 1.9, 0.07, 40, 0.001, 0.0015),
    },
}
"""Of the thesis' parameter files: tau, step, clip bound; HMC: tau, tau_g, step, number of steps, clip bounds, mass."""

BUDGETS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 15.0)
ROUND = ("flat-banana", "flat-banana-10", "tempered-banana", "tempered-banana-10")
QUICK = ("flat-banana", "tempered-banana", "narrow-banana", "correlated-gauss")
HARD = ("gauss-30", "narrow-banana", "correlated-gauss")

_CLIPPING_MASS = (1.0, 0.5, *[0.4] * 8)

CLIPPING: dict[str, dict[str, tuple[Sampler, int]]] = {
    "flat-banana": {
        "HMC": (HMC(0.0, 0.0, 0.001, 15, clip=1.0, clip_grad=1e6, mass=_CLIPPING_MASS[:2], chains=1), 500),
        "random walk": (Penalty(0.0, step=0.01, clip=1.0, chains=1), 3000),
    },
    "flat-banana-10": {
        "HMC": (HMC(0.0, 0.0, 0.001, 15, clip=1.0, clip_grad=1e6, mass=_CLIPPING_MASS, chains=1), 500),
        "random walk": (Penalty(0.0, step=(0.015, 0.015, *[0.002] * 8), clip=1.0, chains=1), 3000),
    },
}
"""Iterations, steps and masses of the thesis' code, which in ten dimensions has 100,000 rows (here 200,000)."""

BOUNDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def samplers(problem: Problem) -> dict[str, Sampler | Default]:
    return SETTINGS[problem.name] | {OURS: Default()}


def _by_eps(names: tuple[str, ...]):
    def jobs(size: Size) -> list[Job]:
        budgets, repeats = size.of(((4.0,), 1), (BUDGETS, 20))
        most = None if size.full else 1000
        chosen = size.problems or (names if size.full else [name for name in names if name in QUICK])
        return runs.compare([PROBLEMS[name] for name in chosen], samplers, budgets, repeats, most)

    return jobs


def _draw_by_eps(records: list[Record], path: Path) -> None:
    runs.draw_comparison(records, path, ("mmd", "mean_error", "clipped", "clipped_gradients"))


def _figure_6_3(size: Size) -> list[Job]:
    if size.full:
        _, repeats = size.of(((), 1), ((), 20))
        return [
            job for name, chosen in CLIPPING.items() for job in clipping_jobs(PROBLEMS[name], chosen, BOUNDS, repeats)
        ]
    walk = {"random walk": CLIPPING["flat-banana"]["random walk"]}
    return clipping_jobs(PROBLEMS["flat-banana"], walk, BOUNDS[1:5], 1)


def _circle_samplers(problem: Problem) -> dict[str, Sampler | Default]:
    return SETTINGS["circle"] | {OURS: Default()}


def _figure_6_9(size: Size) -> list[Job]:
    budgets, repeats = size.of(((0.5,), 1), ((0.5, 1.0, 2.0, 4.0), 20))
    # eps = 4 would pay for a million iterations of the walk: more than anyone needs. eps = 1 pays for 88,000.
    return runs.compare(
        [PROBLEMS["circle"]], _circle_samplers, budgets, repeats, most=100_000 if size.full else 4000, keep=400
    )


def _circle_table(records: list[Record]) -> str:
    columns = ("centre", "mmd", "rhat", "accepted", "clipped", "iterations")
    return runs.comparison([r | {"centre": _off_centre(r)} for r in records], columns)


def _off_centre(record: Record) -> float:
    return float(np.linalg.norm(np.mean(record["draws"], axis=0))) if "draws" in record else float("nan")


def _draw_circle(records: list[Record], path: Path) -> None:
    """Distance of the mean from the centre, as in the thesis, and the draws of each method's first run."""
    import matplotlib.pyplot as plt

    exact = flat(PROBLEMS["circle"].exact())
    groups = runs.grouped([r for r in records if "draws" in r], "method")
    figure, axes = plt.subplots(
        1, 1 + len(groups), figsize=(3.4 * (1 + len(groups)), 3.4), squeeze=False, layout="constrained"
    )
    for axis, ((method,), group) in zip(axes[0, 1:], groups.items(), strict=True):
        axes[0, 0].plot([r["key"]["eps"] for r in group], [_off_centre(r) for r in group], ".", label=method)
        last = max(group, key=lambda r: (r["key"]["eps"], -r["key"]["repeat"]))
        axis.plot(*exact.T, ".", color="0.8", markersize=1)
        axis.plot(*np.asarray(last["draws"]).T, ".", markersize=3)
        axis.set(title=f"{method}, eps = {last['key']['eps']:g}", aspect="equal")
    axes[0, 0].set(xlabel="eps", ylabel="distance of the mean from the centre")
    axes[0, 0].legend(fontsize=8)
    runs.save(figure, path)


EXPERIMENTS = [
    Experiment(
        "thesis-figure-6-3",
        "what clipping alone does, in 2 and 10 dimensions: no noise",
        _figure_6_3,
        clipping_table,
        draw_clipping,
    ),
    Experiment(
        "thesis-figure-6-4",
        "flat and tempered bananas, 2 and 10 dimensions, by eps (with Figures 6.6 and 6.8: shares clipped)",
        _by_eps(ROUND),
        runs.comparison,
        _draw_by_eps,
    ),
    Experiment(
        "thesis-figure-6-5",
        "30-d Gaussian, narrow banana, correlated Gaussian, by eps (with Figures 6.7 and 6.8: shares clipped)",
        _by_eps(HARD),
        runs.comparison,
        _draw_by_eps,
    ),
    Experiment("thesis-figure-6-9", "the circle", _figure_6_9, _circle_table, _draw_circle),
]
