"""Where pieces of a table are run: here, in threads, or wherever an engine has workers.

An engine is anything with a method ``run(task, pieces)`` that gives ``task(piece)`` of each piece, in any order.
"""

import itertools
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from numpyro_dp.privacy.passes import Part, Piece, Task


class Engine(Protocol):
    """Runs a task on pieces of a table."""

    def run(self, task: Task, pieces: Sequence[Piece]) -> Iterable[Part]:
        """``task(piece)`` of each piece, in any order."""


class Threads:
    """In this process: some pieces are computed while others are read.

    :param num_threads: how many at once; default: as many as there are cores.
    """

    def __init__(self, num_threads: int | None = None):
        self.num_threads = num_threads or os.cpu_count() or 1

    def run(self, task: Task, pieces: Sequence[Piece]) -> Iterator[Part]:
        waiting = iter(pieces)
        with ThreadPoolExecutor(self.num_threads) as pool:
            running: set[Future] = {pool.submit(task, piece) for piece in itertools.islice(waiting, self.num_threads)}
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
                    running |= {pool.submit(task, piece) for piece in itertools.islice(waiting, len(done))}
            finally:
                for future in running:
                    future.cancel()

    def __repr__(self) -> str:
        return f"{self.num_threads} threads"


def engine_of(given: Any) -> Engine:
    """What `numpyro_dp.scan` was given as its engine: None, a Dask client, a Spark session, or an `Engine`."""
    if given is None:
        return Threads()
    kind = f"{type(given).__module__}.{type(given).__qualname__}"
    if kind.startswith("distributed."):
        return DaskWorkers(given)
    if kind.startswith("pyspark."):
        return SparkJobs(given)
    if callable(getattr(given, "run", None)):
        return given
    raise TypeError(
        f"engine must be a Dask client, a Spark session, or an object with a method run(task, pieces), got {kind}"
    )


class DaskWorkers:
    """On the workers of a Dask cluster.

    Dask runs a task again whose worker died: it gives the same whole numbers. Noise is drawn here, once.

    :param client: `distributed.Client`.
    """

    def __init__(self, client: Any):
        self.client = client

    def run(self, task: Task, pieces: Sequence[Piece]) -> Iterator[Part]:
        from distributed import as_completed

        name = f"pass-{uuid.uuid4().hex}"
        # Not scattered: what a dead worker held would be lost, and Dask makes anew what it has a recipe for.
        sent = self.client.submit(_hold, task, key=f"{name}-task", pure=False)
        futures = [
            self.client.submit(_run, sent, piece, key=f"{name}-{k}", pure=False) for k, piece in enumerate(pieces)
        ]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            self.client.cancel([*futures, sent])

    def __repr__(self) -> str:
        return "Dask"


class SparkJobs:
    """As jobs of a Spark session.

    :param session: `pyspark.sql.SparkSession`.
    """

    def __init__(self, session: Any):
        self.session = session

    def run(self, task: Task, pieces: Sequence[Piece]) -> Iterator[Part]:
        context = self.session.sparkContext
        sent = context.broadcast(task)
        try:
            found = context.parallelize(list(pieces), len(pieces)).map(lambda piece: sent.value(piece))
            yield from found.collect()
        finally:
            sent.destroy()

    def __repr__(self) -> str:
        return "Spark"


def _hold(task: Task) -> Task:
    return task


def _run(task: Task, piece: Piece) -> Part:
    return task(piece)
