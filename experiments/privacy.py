"""What the papers' runs cost: iterations that a budget allows, and Lode's Table 6.3. Exact, in seconds.

Accountants compared on the flat banana (Räisä 2021, Figure 6.2) and on the friction sampler (Lode 2019, Table 6.3 and
Figure 6.8) are those of `benchmarks/accountants.py`.
"""

import math
from pathlib import Path

from benchmarks import accountants
from experiments import dp_hmc, raisa, runs
from experiments.models import PROBLEMS
from experiments.runs import Experiment, Job, Record, Size, markdown
from numpyro_dp.privacy.accounting import zcdp_eps

PAPER: dict[tuple[str, str, float], tuple[int, str]] = {
    ("banana", "DP-penalty", 4.0): (2028, ""),
    ("banana", "DP-penalty", 15.0): (19_180, ""),
    ("gauss", "DP-penalty", 4.0): (175, ""),
    ("gauss", "DP-penalty", 15.0): (1659, ""),
    ("banana", "DP-HMC", 4.0): (377, ""),
    ("banana", "DP-HMC", 15.0): (3569, ""),
    ("gauss", "DP-HMC", 4.0): (227, ""),
    ("gauss", "DP-HMC", 15.0): (2154, ""),
    ("banana", "DP-SGLD", 4.0): (109_600, "*"),
    ("banana", "DP-SGLD", 15.0): (1_036_000, "*"),
    ("banana", "DP-SGNHT", 4.0): (109_600, "*"),
    ("banana", "DP-SGNHT", 15.0): (1_036_000, "*"),
    ("gauss", "DP-SGLD", 4.0): (2256, "*"),
    ("gauss", "DP-SGLD", 15.0): (21_440, "*"),
    ("gauss", "DP-SGNHT", 4.0): (9088, "*"),
    ("gauss", "DP-SGNHT", 15.0): (86_016, "*"),
    ("flat-banana", "penalty", 4.0): (702, ""),
    ("flat-banana", "penalty", 15.0): (6636, ""),
    ("flat-banana", "HMC", 4.0): (431, ""),
    ("flat-banana", "HMC", 15.0): (4084, ""),
    ("flat-banana-10", "penalty", 4.0): (1331, ""),
    ("flat-banana-10", "HMC", 4.0): (204, ""),
    ("tempered-banana", "penalty", 4.0): (2808, ""),
    ("tempered-banana", "HMC", 4.0): (1330, ""),
    ("tempered-banana-10", "penalty", 4.0): (4313, ""),
    ("tempered-banana-10", "penalty, guided", 4.0): (1331, ""),
    ("tempered-banana-10", "HMC", 4.0): (327, ""),
    ("gauss-30", "penalty", 4.0): (479, ""),
    ("gauss-30", "penalty, guided", 4.0): (5325, ""),
    ("gauss-30", "HMC", 4.0): (147, ""),
    ("narrow-banana", "penalty", 4.0): (4081, ""),
    ("narrow-banana", "HMC", 4.0): (819, ""),
    ("correlated-gauss", "penalty", 4.0): (652, ""),
    ("correlated-gauss", "penalty, guided", 4.0): (1331, ""),
    ("correlated-gauss", "HMC", 4.0): (221, ""),
    ("circle", "HMC", 4.0): (5065, ""),
}
"""Iterations of all chains by the authors' own code. *: by its reference semantics, which costs more than necessary."""


def _iterations(size: Size) -> list[Job]:
    """All but the slowest (loss distributions of a million releases), unless at full size."""

    def job(problem: str, method: str, eps: float, published: int, mark: str) -> Job:
        sampler = (dp_hmc.SETTINGS.get(problem) or raisa.SETTINGS[problem])[method]

        def make() -> Record:
            rows = PROBLEMS[problem].rows
            kept = getattr(sampler, "kept", 1)
            count = sampler.affordable(rows, eps) * kept
            rho = sum((mechanism.rho or math.nan) * number for mechanism, number in sampler.iteration(rows))
            classical = affordable_by_zcdp(rho, eps, 0.1 / rows) if not mark else 0
            return {"ours": count, "zcdp": classical}

        key = {"problem": problem, "method": method, "eps": eps, "published": published, "mark": mark}
        return Job(key | {"settings": repr(sampler)}, make)

    return [job(*key, *value) for key, value in PAPER.items() if size.full or not value[1]]


def affordable_by_zcdp(rho: float, eps: float, delta: float) -> int:
    """Releases of `rho` each that the classical zCDP conversion allows."""
    low, high = 0, 1
    while zcdp_eps(delta, high * rho) <= eps:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if zcdp_eps(delta, middle * rho) <= eps else (low, middle)
    return low


def _iterations_table(records: list[Record]) -> str:
    rows = [
        [
            *(r["key"][n] for n in ("problem", "method")),
            f"{r['key']['eps']:g}",
            f"{r['key']['published']}{r['key']['mark']}",
        ]
        + [r["ours"], r["zcdp"] or "-"]
        for r in records
    ]
    note = "\n*: batches without replacement; the authors' account halves the noise and uses twice the sensitivity."
    return markdown(["problem", "method", "eps", "authors' code", "here", "by zCDP"], rows) + note


def _thesis_6_2(size: Size) -> list[Job]:
    budgets = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0) if size.full else (1.0, 4.0)

    def job(panel: str, accountant: str, label: str, eps: float) -> Job:
        releases, _, published = accountants.PANELS[panel]
        key = {"panel": panel, "accountant": label, "eps": eps, "published": published.get(eps)}
        return Job(key, lambda: {"iterations": accountants.iterations(releases, eps, accountant)})

    return [
        job(panel, accountant, label, eps)
        for panel, (_, names, _) in accountants.PANELS.items()
        for accountant, label in names.items()
        for eps in budgets
    ]


def _thesis_6_2_table(records: list[Record]) -> str:
    rows = [
        [
            r["key"]["panel"],
            r["key"]["accountant"],
            f"{r['key']['eps']:g}",
            r["iterations"],
            r["key"]["published"] or "-",
        ]
        for r in records
    ]
    return markdown(["algorithm", "accountant", "eps", "iterations", "authors' code, tight"], rows)


def _draw_thesis_6_2(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt

    panels = runs.grouped(records, "panel")
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), layout="constrained")
    for axis, ((panel,), group) in zip(axes, panels.items(), strict=True):
        for (accountant,), some in runs.grouped(group, "accountant").items():
            axis.plot([r["key"]["eps"] for r in some], [r["iterations"] for r in some], "o-", label=accountant)
        axis.set(title=panel, xlabel="eps", ylabel="iterations")
        axis.legend(fontsize=8)
    runs.save(figure, path)


def _lode_6_3(size: Size) -> list[Job]:
    cases = [(2000, delta, *values) for delta, values in accountants.PUBLISHED_BY_DELTA.items()]
    cases += [
        (n, 1e-5, *values) for n, values in accountants.PUBLISHED_BY_ITERATIONS.items() if size.full and n != 2000
    ]

    def job(iterations: int, delta: float, tight: float, moments: float) -> Job:
        def make() -> Record:
            return {
                label: accountants.eps_by(
                    accountant, accountants.friction_sampler(iterations, release), delta, relation
                )
                for label, (relation, accountant, release) in accountants.KINDS_OF_BATCH.items()
            }

        return Job({"iterations": iterations, "delta": delta, "thesis": tight, "thesis, moments": moments}, make)

    return [job(*case) for case in cases]


def _lode_6_3_table(records: list[Record]) -> str:
    kinds = list(accountants.KINDS_OF_BATCH)
    rows = [
        [r["key"]["iterations"], f"{r['key']['delta']:g}", r["key"]["thesis"], r["key"]["thesis, moments"]]
        + [f"{r[kind]:.3f}" for kind in kinds]
        for r in records
    ]
    return markdown(["iterations", "delta", "thesis", "thesis, moments accountant", *kinds], rows)


def _draw_lode_6_3(records: list[Record], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.6), layout="constrained")
    some = [r for r in records if r["key"]["iterations"] == 2000]
    for kind in accountants.KINDS_OF_BATCH:
        axis.plot([r["key"]["delta"] for r in some], [r[kind] for r in some], "o-", label=kind)
    for name, marker in (("thesis", "kx"), ("thesis, moments", "k+")):
        axis.plot([r["key"]["delta"] for r in some], [r["key"][name] for r in some], marker, label=name)
    axis.set(xscale="log", xlabel="delta", ylabel="eps")
    axis.legend(fontsize=8)
    runs.save(figure, path)


EXPERIMENTS = [
    Experiment("iterations", "iterations that eps pays for, beside the authors' code", _iterations, _iterations_table),
    Experiment("thesis-figure-6-2", "accountants: iterations by eps", _thesis_6_2, _thesis_6_2_table, _draw_thesis_6_2),
    Experiment("lode-table-6-3", "eps of the friction sampler", _lode_6_3, _lode_6_3_table, _draw_lode_6_3),
]
