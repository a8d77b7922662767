"""Tables that are read in pieces, of any lengths, and a model of them in which rows have numbers."""

import functools
import itertools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pyarrow as pa
import pyarrow.parquet as pq

from numpyro_dp import DPHMC, MCMC, scan
from numpyro_dp.tables.engines import Threads
from numpyro_dp.tables.pieces import FramePiece
from numpyro_dp.tables.scan import Table

N = 3000


def model(X, y=None):
    """Outcomes that are drawn for centring are drawn by the rows' numbers."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def frame(num_rows: int = N, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, 2)).astype(np.float32)
    y = (X @ np.array([1.0, -0.5]) + rng.normal(size=num_rows)).astype(np.float32)
    return pa.table({"a": X[:, 0], "c": X[:, 1], "y": y})


def write(folder, lengths=(1000, 1, 1500), table: pa.Table | None = None, **options) -> str:
    """Files with so many rows each, and one with the rest; the pattern that finds them."""
    table, start = frame() if table is None else table, 0
    for k, length in enumerate([*lengths, None]):
        part = table.slice(start) if length is None else table.slice(start, length)
        pq.write_table(part, folder / f"{k}.parquet", **options)
        start += part.num_rows
    return str(folder / "*.parquet")


def in_pieces(table: pa.Table, cuts=(), engine=None) -> Table:
    """The table in pieces that end at `cuts`."""
    edges = [0, *cuts, table.num_rows]
    pieces = [
        FramePiece(table.slice(first, last - first), first, last - first)
        for first, last in itertools.pairwise(edges)
        if last > first
    ]
    return Table(pieces, table.schema, engine or Threads(2))


def arguments(table: Table) -> dict:
    return {"X": table[["a", "c"]], "y": table["y"]}


def draws(table: Table, samples: int = 20, kernel=None, **options) -> np.ndarray:
    """Of a run with noise that can be repeated."""
    kernel = DPHMC(model, eps=3.0, noise_seed=1, **options) if kernel is None else kernel
    mcmc = MCMC(kernel, num_warmup=20, num_samples=samples, progress_bar=False)
    mcmc.run(jax.random.key(0), **arguments(table))
    return np.asarray(mcmc.get_samples()["b"])


@functools.cache
def draws_of_the_whole(are_programs_optimized: bool) -> np.ndarray:
    """Of the table in one piece, read here; other programs round otherwise."""
    del are_programs_optimized
    return draws(in_pieces(frame()))


__all__ = ["N", "arguments", "draws", "draws_of_the_whole", "frame", "in_pieces", "model", "scan", "write"]
