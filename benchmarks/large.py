"""The default on tables that are read in pieces: time of a pass beside reading the files alone, memory, and passes.

    python benchmarks/large.py [--rows 1e7] [--folder build/large] [--columns 10] [--memory]

Writes files of 1e6 rows each, if they are not there. Reading alone is a scan of `pyarrow.dataset` of the same columns.
Passes and reading alternate, so that a machine's load is in both. `--memory` also fits NumPyro's NUTS to the table in
memory.
"""

import argparse
import resource
import statistics
import threading
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import numpyro_dp as ndp
from numpyro_dp.tables.engines import Threads

ROWS_OF_A_FILE = 1_000_000


def model(X, y=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + X @ b), obs=y)


def write(folder: Path, rows: int, columns: int) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"x{k}" for k in range(columns - 1)]
    files = []
    for k in range(rows // ROWS_OF_A_FILE):
        files.append(str(folder / f"{k:05d}.parquet"))
        if not Path(files[-1]).exists():
            rng = np.random.default_rng(k)
            X = rng.standard_normal((ROWS_OF_A_FILE, columns - 1), np.float32)
            y = (rng.random(ROWS_OF_A_FILE) < 1 / (1 + np.exp(-X[:, 0] + X[:, 1] / 2))).astype(np.int8)
            pq.write_table(pa.table({**{name: X[:, j] for j, name in enumerate(names)}, "y": y}), files[-1])
    return files


def read_alone(files: list[str]) -> float:
    start = time.perf_counter()
    for batch in ds.dataset(files).to_batches():
        batch.num_rows  # noqa: B018
    return time.perf_counter() - start


def resident() -> float:
    """Memory of this process now, in GB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e9


class Measured(Threads):
    """Times each pass, and reading alone after some of them."""

    def __init__(self, files: list[str]):
        super().__init__()
        self.files, self.passes, self.reads, self.most = files, [], [], 0.0

    def run(self, task, pieces):
        start = time.perf_counter()
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                self.most = max(self.most, resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        yield from super().run(task, pieces)
        done.set()
        watcher.join()
        self.passes.append(time.perf_counter() - start)
        if len(self.passes) % 8 == 1:
            self.reads.append(read_alone(self.files))


def fit(table, names: list[str]) -> float:
    mcmc = ndp.MCMC(ndp.DPHMC(model, eps=1.0), num_warmup=200, num_samples=300, progress_bar=False)
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), table[names], y=table["y"])
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1e7)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("build/large"))
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    files = write(options.folder, int(options.rows), options.columns)
    names = [f"x{k}" for k in range(options.columns - 1)]
    small = ndp.scan(ds.dataset(files[0]).head(10_000))
    fit(small, names)  # what the programs need, on a table that needs nothing
    before = resident()
    engine = Measured(files)
    table = ndp.scan(files, engine=engine)
    seconds = fit(table, names)
    one, read = statistics.median(engine.passes), statistics.median(engine.reads)
    print(
        f"{len(table):.0e} rows x {options.columns}: {seconds:.0f} s, {len(engine.passes)} passes of {one:.2f} s "
        f"(first {engine.passes[0]:.2f}); reading alone {read:.2f} s, a pass {one / read:.1f} times that; "
        f"{one / len(table) * 1e9:.0f} ns a row; memory {before:.2f} GB with programs, at most {engine.most:.2f} GB "
        f"in a pass, {engine.most - before:+.2f}"
    )
    if options.memory:
        data = ds.dataset(files).to_table().to_pandas()
        X, y = data[names].to_numpy(), data["y"].to_numpy()
        from numpyro.infer import MCMC, NUTS

        mcmc = MCMC(NUTS(model), num_warmup=200, num_samples=300, progress_bar=False)
        start = time.perf_counter()
        mcmc.run(jax.random.key(0), X, y=y)
        jax.block_until_ready(mcmc.get_samples())
        print(f"NUTS in memory, 200 + 300 iterations: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
