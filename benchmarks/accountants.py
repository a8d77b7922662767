"""What does the same sequence of releases cost by each accountant, and what did the published ones make of it?

Prints a table for every kind of release, and draws Figure 6.2 of Räisä's thesis (iterations that a budget allows) and
Table 6.3 with Figure 6.8 of Lode's (privacy of the friction sampler) beside the published numbers.

    python -m benchmarks.accountants
    python -m benchmarks.accountants --quick --output pictures
"""

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.renyi import renyi_eps
from numpyro_dp.privacy.accounting import CountedMechanisms, LossCurve, composed_eps, gaussian_eps, zcdp_eps
from numpyro_dp.privacy.mechanisms import (
    BarkerBatch,
    FixedBatchGaussian,
    Gaussian,
    LogisticBit,
    Mechanism,
    PoissonGaussian,
    TruncatedPoissonGaussian,
)

REPLACE, ADD_REMOVE = "replace_one", "add_or_remove_one"

# --- Accountants ----------------------------------------------------------------------------------------------------

ACCOUNTANTS = ("exact", "pld", "rdp", "zcdp", "moments")
"""From the tightest to the loosest:

- ``"exact"``: the closed form, if every release is `Gaussian` over all rows;
- ``"pld"``: convolved privacy loss distributions;
- ``"rdp"``: the sum of the Rényi curves, at the best real order, converted after Canonne, Kamath and Steinke (2020);
- ``"zcdp"``: the classical conversion of ``rho``, if every release has one;
- ``"moments"``: the moments accountant as in the papers: Rényi curves at whole orders, classical conversion.

The package uses the first two.
"""


def eps_by(accountant: str, releases: CountedMechanisms, delta: float, relation: str) -> float | None:
    """``eps`` of all `releases` together; None if the accountant does not apply."""
    rhos = [mechanism.rho for mechanism, _ in releases]
    rho = None if None in rhos else sum(count * rho for rho, (_, count) in zip(rhos, releases, strict=True))
    if accountant == "exact":
        return gaussian_eps(delta, rho) if all(isinstance(m, Gaussian) for m, _ in releases) else None
    if accountant == "pld":
        return LossCurve(tuple(releases), relation).eps(delta)
    if accountant == "zcdp":
        return None if rho is None else zcdp_eps(delta, rho)
    return renyi_eps(releases, delta, relation, classical=accountant == "moments")


def compare(releases: CountedMechanisms, delta: float, relation: str) -> dict[str, float]:
    """``eps`` by each of `ACCOUNTANTS` that applies, in that order."""
    found = {name: eps_by(name, releases, delta, relation) for name in ACCOUNTANTS}
    return {name: eps for name, eps in found.items() if eps is not None}


# --- All kinds of release -------------------------------------------------------------------------------------------

KINDS: list[tuple[Mechanism, int, str, float]] = [
    (Gaussian(math.sqrt(1000)), 1000, REPLACE, 1e-6),
    (LogisticBit(50.0), 1000, REPLACE, 1e-6),
    (PoissonGaussian(1.0, 0.01), 10_000, ADD_REMOVE, 1e-6),
    (PoissonGaussian(1.0, 0.01), 10_000, REPLACE, 1e-6),
    (TruncatedPoissonGaussian(1.0, 0.01, 100_000, 1200), 10_000, REPLACE, 1e-6),
    (FixedBatchGaussian(1.0, 1000, 100_000), 10_000, REPLACE, 1e-6),
    (BarkerBatch(1.0, 1000, 1_000_000, 2.0), 20_000, REPLACE, 1e-6),
]


def print_kinds() -> None:
    print("eps by each accountant\n")
    print(f"{'release':<58}{'count':>7}  {'relation':<18}" + "".join(f"{name:>9}" for name in ACCOUNTANTS) + "   time")
    for mechanism, count, relation, delta in KINDS:
        start = time.perf_counter()
        costs = compare([(mechanism, count)], delta, relation)
        elapsed = time.perf_counter() - start
        cells = "".join(f"{costs[name]:9.4f}" if name in costs else f"{'-':>9}" for name in ACCOUNTANTS)
        print(f"{mechanism.describe():<58}{count:>7}  {relation:<18}{cells} {elapsed:5.2f} s")
    schedule = [(dataclasses.replace(KINDS[2][0], noise_multiplier=t ** (1 / 6)), 1) for t in range(1, 10_001)]
    start = time.perf_counter()
    eps = composed_eps(schedule, 1e-6, ADD_REMOVE)
    print(f"{'noise t^(1/6), Poisson batch at rate 0.01':<58}{10_000:>7}  {ADD_REMOVE:<18}{'-':>9}{eps:9.4f}", end="")
    print(f"{'':27} {time.perf_counter() - start:5.2f} s\n")


# --- Räisä (2021), Figure 6.2: the flat banana in two dimensions ----------------------------------------------------

ROWS, DELTA = 10**5, 1e-6
PANELS: dict[str, tuple[Callable[[int], CountedMechanisms], dict[str, str], dict[float, int]]] = {
    "DP penalty": (
        lambda count: [(Gaussian(0.1 * math.sqrt(ROWS)), count)],
        {"zcdp": "zCDP (Theorem 5)", "exact": "closed form (Theorem 6)"},
        {4.0: 702, 15.0: 6636},
    ),
    "minibatch DP penalty": (
        lambda count: [(FixedBatchGaussian(math.sqrt(0.7), 1000, ROWS), count)],
        {"moments": "RDP (Theorem 8)", "rdp": "RDP, better conversion", "pld": "loss distribution"},
        {4.0: 827},
    ),
    "DP HMC": (
        lambda count: [(Gaussian(0.1 * math.sqrt(ROWS)), count), (Gaussian(0.4 * math.sqrt(ROWS)), 11 * count)],
        {"zcdp": "zCDP (Theorem 10)", "exact": "closed form (Theorem 11)"},
        {4.0: 416, 15.0: 3932},
    ),
}
"""Releases of a number of iterations, accountants, and the numbers of iterations that the thesis' own code found."""


def iterations(releases: Callable[[int], CountedMechanisms], eps: float, accountant: str) -> int:
    """The largest number of iterations whose releases cost at most `eps`."""

    def affordable(count: int) -> bool:
        return eps_by(accountant, releases(count), DELTA, REPLACE) <= eps

    if not affordable(1):
        return 0
    low, high = 1, 2
    while affordable(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if affordable(middle) else (low, middle)
    return low


def draw_raisa(output: Path, quick: bool) -> None:
    budgets = [1.0, 4.0, 15.0] if quick else [0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0, 12.0, 15.0]
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    print("Räisä, Figure 6.2: iterations that a budget allows (n = 100,000, delta = 1e-6)\n")
    for axis, (title, (releases, accountants, published)) in zip(axes, PANELS.items(), strict=True):
        print(f"{title:<34}" + "".join(f"{f'eps={eps:g}':>10}" for eps in budgets))
        for accountant, label in accountants.items():
            counts = [iterations(releases, eps, accountant) for eps in budgets]
            axis.plot(budgets, counts, marker=".", label=label)
            print(f"  {label:<32}" + "".join(f"{count:>10}" for count in counts))
        axis.plot(list(published), list(published.values()), "kx", label="the thesis' code")
        axis.set(title=title, xlabel="$\\epsilon$", ylabel="iterations")
        axis.legend(fontsize=8)
        print(f"  {'the thesis code':<32}" + "".join(f"{published.get(eps, '-'):>10}" for eps in budgets) + "\n")
    save(figure, output / "raisa-figure-6-2.png")


# --- Lode (2019), Table 6.3 and Figure 6.8 --------------------------------------------------------------------------

INNER_STEPS, RATE = 10, 0.01
PUBLISHED_BY_DELTA = {
    1e-6: (0.881, 2.254),
    1e-5: (0.763, 2.061),
    1e-4: (0.629, 1.848),
    1e-3: (0.473, 1.607),
    1e-2: (0.273, 1.324),
}
PUBLISHED_BY_ITERATIONS = {1000: (0.609, 1.664), 2000: (0.763, 2.061), 5000: (1.040, 2.800), 10000: (1.324, 3.541)}

KINDS_OF_BATCH: dict[str, tuple[str, str, Callable[[float], Mechanism]]] = {
    "Poisson, add/remove": (ADD_REMOVE, "pld", lambda noise: PoissonGaussian(noise, RATE)),
    "the same, RDP": (ADD_REMOVE, "rdp", lambda noise: PoissonGaussian(noise, RATE)),
    "Poisson, replace-one": (REPLACE, "pld", lambda noise: PoissonGaussian(noise / 2, RATE)),
    "fixed batches (as run), replace-one": (REPLACE, "pld", lambda noise: FixedBatchGaussian(noise / 2, 10, 1000)),
    "the same, as if one row moved a sum by L, moments": (
        REPLACE,
        "moments",
        lambda noise: FixedBatchGaussian(noise, 10, 1000),
    ),
}
"""Relation, accountant, and the release at a noise sd in units of the clip bound."""


def friction_sampler(
    iterations: int,
    release: Callable[[float], Mechanism],
    beta: float = 3.0,
    friction: float = 1.0,
    clip: float = 0.7,
) -> CountedMechanisms:
    """All gradients with a friction, a clip bound and step sizes ``beta t^(-1/3)``, of which there are 10 each."""
    step_sizes = beta * np.arange(1, iterations // INNER_STEPS + 1) ** (-1 / 3)
    return [(release(float(noise)), INNER_STEPS) for noise in np.sqrt(2 * friction / step_sizes) / clip]


def draw_lode(output: Path, quick: bool) -> None:
    deltas = list(PUBLISHED_BY_DELTA)
    lengths = [1000, 2000] if quick else list(PUBLISHED_BY_ITERATIONS)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    table: dict[str, list[float]] = {}
    for label, (relation, accountant, release) in KINDS_OF_BATCH.items():
        by_delta = [eps_by(accountant, friction_sampler(2000, release), delta, relation) for delta in deltas]
        by_length = [eps_by(accountant, friction_sampler(n, release), 1e-5, relation) for n in lengths]
        table[label] = by_delta + by_length
        left.plot(np.log10(deltas), by_delta, marker=".", label=label)
        right.plot(lengths, by_length, marker=".", label=label)
    for column, (label, marker) in enumerate((("thesis, PLD", "kx"), ("thesis, moments accountant", "k+"))):
        by_delta = [PUBLISHED_BY_DELTA[delta][column] for delta in deltas]
        by_length = [PUBLISHED_BY_ITERATIONS[n][column] for n in lengths]
        table[label] = by_delta + by_length
        left.plot(np.log10(deltas), by_delta, marker, label=label)
        right.plot(lengths, by_length, marker, label=label)
    left.set(xlabel="$\\log_{10}\\delta$", ylabel="$\\epsilon$", title="2000 iterations")
    right.set(xlabel="iterations", ylabel="$\\epsilon$", title="$\\delta = 10^{-5}$")
    left.legend(fontsize=8)
    print("Lode, Table 6.3 and Figure 6.8: eps of the friction sampler\n")
    columns = [f"{delta:g}" for delta in deltas] + [f"n={n}" for n in lengths]
    print(f"{'':<38}" + "".join(f"{column:>9}" for column in columns))
    for label, values in table.items():
        print(f"{label:<38}" + "".join(f"{value:9.4f}" for value in values))
    print()
    save(figure, output / "lode-table-6-3.png")


def print_shared_batches(steps: int = 10, trajectories: int = 100) -> None:
    """Trajectories of which each step draws a batch, or all steps share one: those are one mechanism of less noise."""
    print(f"{trajectories} trajectories of {steps} gradients, delta = 1e-6, replace-one: eps\n")
    print(f"{'rate, noise multiplier':<26}{'a batch each':>14}{'one for all':>14}")
    for rate, noise in [(0.01, 2.0), (0.01, 5.0), (0.1, 2.0), (0.1, 5.0)]:
        releases = (noise, steps * trajectories), (noise / math.sqrt(steps), trajectories)
        each, one = (composed_eps(((PoissonGaussian(s, rate), n),), 1e-6, REPLACE) for s, n in releases)
        print(f"{f'{rate:g}, {noise:g}':<26}{each:14.3f}{one:14.3f}")
    print()


def save(figure: matplotlib.figure.Figure, path: Path) -> None:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"-> {path}\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer points")
    parser.add_argument("--output", type=Path, default=Path("benchmark-output"), help="folder for the pictures")
    options = parser.parse_args(arguments)
    matplotlib.use("Agg")
    options.output.mkdir(parents=True, exist_ok=True)
    print_kinds()
    print_shared_batches()
    draw_raisa(options.output, options.quick)
    draw_lode(options.output, options.quick)


if __name__ == "__main__":
    main()
