"""The same table by every engine: the same released numbers, bit by bit, and how long a pass takes.

    python benchmarks/engines.py [--engines files dask spark jax] [--times 1000] [--folder build/rand]

The table is that of the RAND Health Insurance Experiment, repeated so many times with new persons; the unit is a
person with all of their years. With noise from a seed, so that engines can be compared: not for a table that must be
protected.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pyarrow as pa
import pyarrow.parquet as pq

import numpyro_dp as ndp
from numpyro_dp import demo
from numpyro_dp.tables.scan import Table

TIMES_IN_A_FILE = 50
NAMES = [*demo.COVARIATES]


def model(X, y=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("years", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + X @ b), obs=y)


def write(folder: Path, times: int) -> str:
    """Files of the table, repeated; the pattern that finds them."""
    if not folder.exists():
        folder.mkdir(parents=True)
        table = demo.load_table()
        X, y, person = demo.design_matrix(table), demo.any_visit(table), demo.persons(table)
        for start in range(0, times, TIMES_IN_A_FILE):
            copies = range(start, min(start + TIMES_IN_A_FILE, times))
            who = np.concatenate([person + k * (person.max() + 1) for k in copies])
            columns = {name: np.tile(X[:, j].astype(np.float32), len(copies)) for j, name in enumerate(NAMES)}
            whole = pa.table({**columns, "y": np.tile(y.astype(np.int8), len(copies)), "person": who})
            pq.write_table(whole, folder / f"{start:05d}.parquet")
    return str(folder / "*.parquet")


def fit(table: Table, name: str) -> None:
    passes, run_on = [], Table.run_on

    def timed(self: Table, *args: Any) -> Iterator[Any]:
        start = time.perf_counter()
        yield from run_on(self, *args)
        passes.append(time.perf_counter() - start)

    Table.run_on = timed  # type: ignore[method-assign]
    kernel = ndp.DPHMC(model, eps=1.0, unit="person", noise_seed=1)
    mcmc = ndp.MCMC(kernel, num_warmup=200, num_samples=500, progress_bar=False)
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), table[NAMES], y=table["y"])
    seconds = time.perf_counter() - start
    Table.run_on = run_on  # type: ignore[method-assign]
    draws = np.asarray(mcmc.get_samples()["b"])
    digest = hashlib.sha256(draws.tobytes()).hexdigest()[:12]
    size = f"{len(table):,} rows, {table.unit('person').num_units:,} persons"
    print(
        f"{name:8}{size}: {seconds:.0f} s, {len(passes)} passes of "
        f"{statistics.median(passes):.2f} s; b = {np.round(draws.mean(0), 4).tolist()}, draws {digest}",
        flush=True,
    )


@contextlib.contextmanager
def dask_client() -> Iterator[Any]:
    from distributed import Client, LocalCluster

    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield client


@contextlib.contextmanager
def spark_session() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    if not shutil.which("java"):
        raise SystemExit("Spark needs Java")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    yield session
    session.stop()


def two_processes(options: argparse.Namespace) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--folder", str(options.folder), "--times", str(options.times)]
    processes = [subprocess.Popen([*command, "--process", f"{k}:{port}"]) for k in (1, 0)]
    if sum(process.wait() != 0 for process in processes):
        raise SystemExit("a process failed")


def one_process(number: int, port: int, files: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
    with ndp.JaxProcesses() as engine:
        if engine.is_first:
            fit(ndp.scan(files, engine=engine), "jax")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="*", default=["files", "dask", "spark", "jax"])
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--folder", type=Path, default=Path("build/rand"))
    parser.add_argument("--process", help=argparse.SUPPRESS)
    options = parser.parse_args()
    files = write(options.folder, options.times)
    if options.process:
        return one_process(*map(int, options.process.split(":")), files)
    for name in options.engines:
        if name == "files":
            fit(ndp.scan(files), name)
        elif name == "jax":
            two_processes(options)
        else:
            with {"dask": dask_client, "spark": spark_session}[name]() as engine:
                fit(ndp.scan(files, engine=engine), name)
    return None


if __name__ == "__main__":
    main()
