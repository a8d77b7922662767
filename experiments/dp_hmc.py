"""Räisä, Koskela and Honkela (2021), "Differentially private Hamiltonian Monte Carlo": Figures 1 to 3.

Their DP-HMC, DP-penalty, DP-SGLD and DP-SGNHT with the settings of their published parameter files, from starting
points around the true parameters (free of charge), four chains, the first half of each left out; and this package's
defaults, which are told nothing.
"""

from pathlib import Path

import numpy as np

from experiments import runs
from experiments.models import PROBLEMS, Problem, flat
from experiments.runs import HMC, SGLD, Default, Experiment, Job, Penalty, Record, Sampler, Size, markdown, summary
from numpyro_dp import DPPenalty

OURS = "ours, defaults"

SETTINGS: dict[str, dict[str, Sampler]] = {
    "banana": {
        "DP-HMC": HMC(tau=0.10, tau_g=0.55, step=0.006, steps=25, clip=0.1, clip_grad=0.05, halton=True),
        "DP-penalty": Penalty(tau=0.17, step=0.06, clip=0.15),
        "DP-SGLD": SGLD(eta=1.0, clip=0.2, kept=50),
        "DP-SGNHT": SGLD(eta=100.0, clip=0.2, friction=50.0, kept=50),
    },
    "gauss": {
        "DP-HMC": HMC(tau=0.1, tau_g=0.25, step=0.00015, steps=12, clip=6.0, clip_grad=10.0, halton=True),
        "DP-penalty": Penalty(tau=0.05, step=0.0007, clip=10.0),
        "DP-SGLD": SGLD(eta=0.008, clip=15.0, kept=5),
        "DP-SGNHT": SGLD(eta=0.2, clip=12.0, friction=30.0, kept=5),
    },
}
"""Of the paper's parameter files. SGLD and SGNHT keep one of several draws, to save memory."""
SETTINGS["curved-banana"] = {name: SETTINGS["banana"][name] for name in ("DP-HMC", "DP-penalty")}

BUDGETS = (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 15.0)

CLIPPING: dict[str, dict[str, tuple[Sampler, int]]] = {
    "banana": {
        "HMC": (HMC(0.0, 0.0, step=0.01, steps=100, clip=1.0, clip_grad=10.0, halton=True), 1000),
        "random walk": (Penalty(0.0, step=0.3, clip=1.0), 12_000),
    },
    "gauss": {
        "HMC": (HMC(0.0, 0.0, step=0.0005, steps=12, clip=1.0, clip_grad=100.0, halton=True), 1000),
        "random walk": (Penalty(0.0, step=0.0007, clip=1.0), 25_000),
    },
}
"""Samplers without noise, and their iterations. The clip bound is set by the experiment."""

BOUNDS = {"banana": (0.01, 0.02, 0.05, 0.1, 0.15, 0.5, 1.0), "gauss": (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)}


def samplers(problem: Problem) -> dict[str, Sampler | Default]:
    return SETTINGS[problem.name] | {OURS: Default()}


def _figure_1(size: Size) -> list[Job]:
    budgets, repeats = size.of(((4.0,), 1), (BUDGETS, 10))
    # 400,000 steps of SGLD and SGNHT on the banana are too many for a minute.
    chosen = {"banana": samplers if size.full else _without_sgld, "gauss": samplers}
    return [
        job
        for name in size.problems or chosen
        for job in runs.compare([PROBLEMS[name]], chosen[name], budgets, repeats)
    ]


def _without_sgld(problem: Problem) -> dict[str, Sampler | Default]:
    return {name: sampler for name, sampler in samplers(problem).items() if not isinstance(sampler, SGLD)}


def _curved(size: Size) -> list[Job]:
    budgets, repeats = size.of(((4.0,), 1), ((1.0, 4.0, 15.0), 10))
    return runs.compare(
        [PROBLEMS["curved-banana"]],
        lambda problem: samplers(problem) | {"ours, DPPenalty": Default(kind=DPPenalty)},
        budgets,
        repeats,
    )


def _figure_2(size: Size) -> list[Job]:
    budgets, repeats = size.of(((4.0,), 1), ((15.0,), 10))
    chosen = samplers if size.full else _without_sgld
    return runs.compare([PROBLEMS["banana"]], chosen, budgets, repeats, keep=1000 if size.full else 400)


def _draw_figure_2(records: list[Record], path: Path) -> None:
    """The run in the middle, by MMD, of each method, over draws of the exact posterior."""
    import matplotlib.pyplot as plt

    groups = runs.grouped(records, "method")
    figure, axes = plt.subplots(
        2, len(groups), figsize=(3.2 * len(groups), 5.5), squeeze=False, layout="constrained", sharex="col"
    )
    for (top, bottom), ((method,), group) in zip(axes.T, groups.items(), strict=True):
        done = sorted((r for r in group if r["outcome"] == "done"), key=lambda r: r["mmd"])
        if not done:
            continue
        middle = done[len(done) // 2]
        exact = flat(PROBLEMS["banana"].exact(seed=middle["key"]["repeat"]))
        draws = np.asarray(middle["draws"])
        top.plot(*exact.T, ".", color="0.8", markersize=2, label="exact")
        top.plot(*draws.T, ".", markersize=3, label="private")
        top.set(
            title=f"{method}\nMMD {middle['mmd']:.2f}",
            ylabel="theta_2",
            ylim=(exact[:, 1].min() - 1, exact[:, 1].max() + 1),
        )
        bins = np.linspace(exact[:, 0].min() - 0.2, exact[:, 0].max() + 0.2, 41)
        bottom.hist(exact[:, 0], bins, density=True, color="0.8")
        bottom.hist(draws[:, 0], bins, density=True, histtype="step")
        bottom.set(xlabel="theta_1", xlim=bins[[0, -1]], yticks=[])
    figure.suptitle(f"the banana at eps = {records[0]['key']['eps']:g}")
    runs.save(figure, path)


def clipping_jobs(
    problem: Problem, chosen: dict[str, tuple[Sampler, int]], bounds: tuple[float, ...], repeats: int, share: float = 1
) -> list[Job]:
    """Runs without noise at several clip bounds.

    :param share: of the iterations.
    """

    def job(name: str, sampler: Sampler, iterations: int, repeat: int) -> Job:
        def make() -> Record:
            finished = runs.fit(problem, sampler, float("inf"), repeat, iterations=iterations)
            return {
                "outcome": "done",
                "clipped": runs.clipping(problem, sampler, finished.samples, repeat),
                "accepted": float(np.asarray(finished.mcmc.get_extra_fields()["accepted"], float).mean()),
                "seconds": round(finished.seconds, 2),
                **runs.scores(problem, finished.chains, repeat),
            }

        key = {"problem": problem.name, "method": name, "clip": sampler.clip, "repeat": repeat}
        return Job(key | {"settings": repr(sampler), "iterations": iterations}, make)

    return [
        job(name, runs.with_clip(sampler, bound), int(iterations * share), repeat)
        for name, (sampler, iterations) in chosen.items()
        for bound in bounds
        for repeat in range(repeats)
    ]


def _figure_3(size: Size) -> list[Job]:
    if size.full:
        _, repeats = size.of(((), 1), ((), 10))
        return [
            job
            for name, chosen in CLIPPING.items()
            for job in clipping_jobs(PROBLEMS[name], chosen, BOUNDS[name], repeats)
        ]
    walk = {"random walk": CLIPPING["banana"]["random walk"]}
    return clipping_jobs(PROBLEMS["banana"], walk, (0.02, 0.15, 1.0), 1, 0.5)


def clipping_table(records: list[Record]) -> str:
    rows = [
        [
            *key[:2],
            f"{key[2]:g}",
            *(summary([r[c] for r in group]) for c in ("clipped", "mmd", "sd_error", "rhat", "accepted")),
        ]
        for key, group in runs.grouped(records, "problem", "method", "clip").items()
    ]
    return markdown(
        ["problem", "sampler", "clip bound", "clipped", "MMD", "sd error", "R-hat", "accepted"],
        rows,
    )


def draw_clipping(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt

    problems = list(runs.grouped(records, "problem"))
    figure, axes = plt.subplots(len(problems), 2, figsize=(9, 3.2 * len(problems)), squeeze=False, layout="constrained")
    for line, (problem,) in zip(axes, problems, strict=True):
        for (method,), group in runs.grouped([r for r in records if r["key"]["problem"] == problem], "method").items():
            line[0].plot([r["key"]["clip"] for r in group], [r["mmd"] for r in group], ".", label=method)
            line[1].plot([r["clipped"] for r in group], [r["mmd"] for r in group], ".", label=method)
        line[0].set(xscale="log", xlabel="clip bound", ylabel="MMD", title=problem)
        line[1].set(xlabel="share of log ratios clipped", ylabel="MMD")
        line[1].axvline(0.2, color="0.7", linewidth=0.8)
        line[0].legend()
    runs.save(figure, path)


EXPERIMENTS = [
    Experiment(
        "dp-hmc-figure-1",
        "MMD, mean error and R-hat by eps: DP-HMC, DP-penalty, DP-SGLD, DP-SGNHT and our defaults",
        _figure_1,
        runs.comparison,
        runs.draw_comparison,
    ),
    Experiment(
        "curved-banana",
        "a banana whose curvature differs by row: the paper's samplers as for its banana, and our defaults",
        _curved,
        runs.comparison,
        runs.draw_comparison,
    ),
    Experiment("dp-hmc-figure-2", "the draws themselves, on the banana", _figure_2, runs.comparison, _draw_figure_2),
    Experiment("dp-hmc-figure-3", "what clipping alone does: no noise", _figure_3, clipping_table, draw_clipping),
]
