"""Where pieces of a table are run: here, in threads, or wherever an engine has workers.

An engine is anything with a method ``run(task, pieces)`` that gives ``task(piece)`` of each piece, in any order.
"""

import contextlib
import itertools
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from numpyro_dp.privacy.passes import Part, Piece, Task


class Engine(Protocol):
    """Runs a task on pieces of a table."""

    def run(self, task: Task, pieces: Sequence[Piece]) -> Iterable[Part]:
        """``task(piece)`` of each piece, in any order."""


class EngineLostError(RuntimeError):
    """Who was to read the table is gone. Nothing more is released; what was charged stays charged."""


_LOST = "Nothing more is released; what was charged stays charged, as the budget's file says if there is one"


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
        from distributed import CancelledError, KilledWorker, as_completed

        name = f"pass-{uuid.uuid4().hex}"
        # Not scattered: what a dead worker held would be lost, and Dask makes anew what it has a recipe for.
        sent = self.client.submit(_hold, task, key=f"{name}-task", pure=False)
        futures = [
            self.client.submit(_run, sent, piece, *self.client.compute(held(piece)), key=f"{name}-{k}", pure=False)
            for k, piece in enumerate(pieces)
        ]
        try:
            for future in as_completed(futures):
                yield future.result()
        except (CancelledError, KilledWorker, OSError, TimeoutError) as error:
            raise EngineLostError(f"Dask stopped in the middle of a pass ({type(error).__name__}). {_LOST}") from error
        finally:
            with contextlib.suppress(Exception):  # whose scheduler is gone
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


class SparkFrame:
    """Partitions of a data frame of Spark's, each where it is.

    Spark computes the frame anew in each pass, which must give the same rows in the same order: read it from files, and
    do not shuffle it.

    :param frame: `pyspark.sql.DataFrame`.
    """

    def __init__(self, frame: Any):
        self.frame = frame

    def sizes(self) -> list[int]:
        """How many rows each partition has."""

        def count(batches: Iterator[Any]) -> Iterator[Any]:
            yield _as_row(sum(batch.num_rows for batch in batches))

        return self._in_order(self.frame.mapInArrow(count, "number long, found binary"))

    def run(self, task: Task, pieces: Sequence[Piece]) -> Iterator[Part]:
        names = sorted({name for column in task.columns if column is not None for name in column.names})
        firsts = {piece.partition: piece for piece in pieces}  # type: ignore[attr-defined]
        sent = self.frame.sparkSession.sparkContext.broadcast((task, firsts))

        def run(batches: Iterator[Any]) -> Iterator[Any]:
            task, pieces = sent.value
            piece = pieces.get(_partition())
            if piece is not None:
                yield _as_row(task(piece.of(batches)))

        try:
            yield from self._in_order(self.frame.select(*names).mapInArrow(run, "number long, found binary"))
        finally:
            sent.destroy()

    @staticmethod
    def _in_order(rows: Any) -> list:
        return [pickle.loads(row.found) for row in sorted(rows.collect(), key=lambda row: row.number)]

    def __repr__(self) -> str:
        return "Spark"


def _partition() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.partitionId()


def _as_row(found: Any) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_pydict({"number": [_partition()], "found": [pickle.dumps(found)]})


class JaxProcesses:
    """In the processes of a JAX program (`jax.distributed`): the first one decides, draws noise and charges.

    ::

        jax.distributed.initialize(...)
        with JaxProcesses() as engine:  # the other processes compute here, until the first one has left
            if engine.is_first:
                table = scan("visits/*.parquet", engine=engine)
                mcmc.run(key, X=table[["age", "dose"]], y=table["events"])

    All processes must reach the files by the same names.
    """

    def __init__(self) -> None:
        self.is_first = jax.process_index() == 0
        self._threads = Threads()

    def run(self, task: Task, pieces: Sequence[Piece]) -> Iterator[Part]:
        self._tell((task, list(pieces)))
        yield from self._together(task, pieces)

    def __enter__(self) -> "JaxProcesses":
        while not self.is_first:
            asked = self._hear()
            if asked is None:
                break
            self._together(*asked)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.is_first:
            self._tell(None)

    def _together(self, task: Task, pieces: Sequence[Piece]) -> list[Part]:
        """All parts, in all processes. An error of one of them is one of all."""
        own = pieces[jax.process_index() :: jax.process_count()]
        try:
            found: Any = list(self._threads.run(task, own))
        except Exception as error:
            found = error
        message = np.frombuffer(pickle.dumps(found), np.uint8)
        sizes = np.ravel(multihost_utils.process_allgather(np.array([message.size])))
        padded = np.zeros(sizes.max(), np.uint8)
        padded[: message.size] = message
        gathered = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
        parts = [pickle.loads(row[:size].tobytes()) for row, size in zip(gathered, sizes, strict=True)]
        for part in parts:
            if isinstance(part, Exception):
                raise part
        return [part for some in parts for part in some]

    def _tell(self, message: Any) -> None:
        data = np.frombuffer(pickle.dumps(message), np.uint8)
        multihost_utils.broadcast_one_to_all(np.array([data.size]))
        multihost_utils.broadcast_one_to_all(data)

    def _hear(self) -> Any:
        (size,) = np.asarray(multihost_utils.broadcast_one_to_all(np.zeros(1, int)))
        data = multihost_utils.broadcast_one_to_all(np.zeros(size, np.uint8))
        return pickle.loads(np.asarray(data).tobytes())

    def __repr__(self) -> str:
        return f"{jax.process_count()} processes"


def held(piece: Piece) -> list[Any]:
    """What a piece needs that a Dask cluster has, or can make."""
    return getattr(piece, "needs", [])


def _hold(task: Task) -> Task:
    return task


def _run(task: Task, piece: Any, *parts: Any) -> Part:
    return task(piece.having(parts) if parts else piece)
