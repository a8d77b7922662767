"""Does the time or the memory of a run tell about a row? Preparations of the default, on tables that differ in a row.

Beside the usual table stand tables with one hostile row, with a tenth of such rows, and one with another usual row.
Preparations alternate between the tables in one process, by the same compiled programs, with fresh noise. Of each table
the median time is shown as a multiple of the usual table's, with the standard error of that ratio, and how far the
process's largest memory grew after the usual table's.

    python -m benchmarks.run_time
    python -m benchmarks.run_time --repeats 100
"""

import argparse
import resource
import time
from functools import partial

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_dp import DPHMC
from numpyro_dp.privacy.batches import ALL_ROWS
from numpyro_dp.tools.auditing import _Repeated  # whole runs would be mostly compilation

ROWS, COLUMNS = 20_000, 5


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([COLUMNS]).to_event(1))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def tables() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    y = (rng.random(ROWS) < 1 / (1 + np.exp(-X @ rng.normal(size=COLUMNS)))).astype(np.int32)

    def with_rows(value: float, count: int) -> tuple[np.ndarray, np.ndarray]:
        changed = X.copy()
        changed[:count] = value
        return changed, y

    return {
        "the usual table": (X, y),
        "the same, again": (X.copy(), y),
        "another usual row": with_rows(0.5, 1),
        "one row of NaN": with_rows(np.nan, 1),
        "one row of 1e30": with_rows(1e30, 1),
        "one row of infinities": with_rows(np.inf, 1),
        "one row of 1e-40 (subnormal)": with_rows(1e-40, 1),
        "a tenth of NaN": with_rows(np.nan, ROWS // 10),
        "a tenth of 1e-40 (subnormal)": with_rows(1e-40, ROWS // 10),
    }


def prepared(table: tuple) -> tuple:
    """A kernel whose preparation can be repeated, and what one needs."""
    kernel = DPHMC(model, eps=1.0)
    kernel.require_budget(10, 1, table, {}, 10)
    kernel._ledger = ledger = _Repeated(kernel.ledger.plan, kernel.ledger._noise)
    separated = kernel.separate(table, {})
    target = partial(kernel.target, separated, table, {}, ALL_ROWS)
    return kernel, ledger, kernel.before_asking(separated, separated.public(table, {}), target)


def median_and_error(times: np.ndarray) -> tuple[float, float]:
    """The median, and its standard error by the bootstrap."""
    draws = np.median(np.random.default_rng(0).choice(times, (500, len(times))), 1)
    return float(np.median(times)), float(draws.std())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    runs = {name: prepared(table) for name, table in tables().items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    memory: dict[str, int] = {}
    for repeat in range(repeats + 1):  # the first one compiles
        for name, (kernel, ledger, begun) in runs.items():
            ledger.begin_anew()
            start = time.perf_counter()
            jax.block_until_ready(kernel.ask_table(begun).start)
            if repeat:
                times[name].append(time.perf_counter() - start)
            memory[name] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if repeat == 1:
            before = dict(memory)
    usual, usual_error = median_and_error(np.array(times["the usual table"]))
    print(f"{'table':<32}{'time':>7}{'+-':>7}   (multiples of {usual:.3f} s)")
    for name, seconds in times.items():
        middle, error = median_and_error(np.array(seconds))
        ratio = middle / usual
        print(f"{name:<32}{ratio:>7.3f}{ratio * np.hypot(error / middle, usual_error / usual):>7.3f}")
    print(f"largest memory grew by {max(memory.values()) - max(before.values())} kB over {repeats - 1} rounds")


if __name__ == "__main__":
    main()
