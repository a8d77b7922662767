"""Engines: the released numbers are those of this process, bit by bit, whoever reads the pieces, and whoever dies."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from helpers.addresses import reserved_address
from helpers.tables import draws, draws_of_the_whole, frame, in_pieces, scan, write

from numpyro_dp.privacy.passes import Part
from numpyro_dp.tables.engines import DaskWorkers, EngineLostError, SparkJobs, Threads, engine_of

WORKER = Path(__file__).parents[1] / "helpers" / "processes_worker.py"
# Other processes compile programs as users have them. Warnings are of libraries, about themselves.
pytestmark = [pytest.mark.optimized, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def whole(request):
    return draws_of_the_whole(request.node.get_closest_marker("optimized") is not None)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dask")
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with LocalCluster(local_directory=str(folder), **options) as found, Client(found) as client:
        yield client, folder


@pytest.mark.statistical
def test_dask_reads_files_and_a_worker_dies(tmp_path, cluster, whole, monkeypatch):
    """In the middle of a run, with a pass under way: its pieces are read again, and give the same whole numbers."""
    client, folder = cluster
    table = scan(write(tmp_path, row_group_size=700), engine=client)
    assert "read by Dask" in repr(table)
    run, passes = DaskWorkers.run, []
    victim = next(iter(client.run(os.getpid).values()))

    def killing(self, task, pieces):
        passes.append(task)
        found = run(self, task, pieces)
        yield next(found)
        if len(passes) == 4:
            os.kill(victim, signal.SIGKILL)
        yield from found

    monkeypatch.setattr(DaskWorkers, "run", killing)
    np.testing.assert_array_equal(draws(table), whole)
    assert len(passes) > 10
    assert victim not in client.run(os.getpid).values()
    # What is left behind on disk holds no rows and no sums.
    written = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert frame()["y"].to_numpy()[:2].tobytes() not in written
    assert all(str(key).startswith("pass-") for keys in client.has_what().values() for key in keys)


@pytest.mark.nightly
def test_dask_frames(cluster, tmp_path, whole):
    from dask import dataframe as dd

    client, _ = cluster
    data = dd.read_parquet(write(tmp_path, (1000, 1500)))
    table = scan(data, engine=client)
    assert len(table._pieces) > 1
    np.testing.assert_array_equal(draws(table, 20), whole)
    with_units = frame().append_column("who", pa.array(np.arange(3000) // 3))
    (tmp_path / "units").mkdir()
    frames = dd.read_parquet(write(tmp_path / "units", (1000, 1500), with_units))
    found = scan(frames, engine=client).by_unit(scan(frames, engine=client).unit("who"), None)
    assert (found.num_rows, found.most_rows) == (1000, 3)


def test_no_value_of_a_dask_frame_decides_of_what_type_others_are(cluster):
    """Nor whether there is an error, wherever in the frame it is."""
    import dask
    from dask import dataframe as dd

    client, _ = cluster
    for values in ([5, 16777217, 2.5, "abc"], ["abc", 16777217, 2.5, 5], [2.5, None, 16777217, "7"]):
        data = pd.DataFrame({"v": pd.Series(values, dtype=object), "y": np.arange(4)})
        with dask.config.set({"dataframe.convert-string": False}):
            table = scan(dd.from_pandas(data, npartitions=2), engine=client)
        assert table["v"].dtype == np.float32
        assert table["y"].dtype == np.int32
        found = [piece.having(dask.compute(*piece.needs)) for piece in table._pieces]
        parts = [part for piece in found for part in piece.read([table["v"].spec])]
        numbers = [float(v) if str(v).replace(".", "").isdigit() else None for v in values]
        assert np.concatenate([counts for _, counts in parts]).tolist() == [v is not None for v in numbers]
        got = np.concatenate([arrays[0] for arrays, _ in parts]).tolist()
        assert [v for v, n in zip(got, numbers, strict=True) if n is not None] == [
            float(np.float32(n)) for n in numbers if n is not None
        ]


def test_dask_errors_quote_no_value(cluster, tmp_path):
    client, _ = cluster
    pattern = write(tmp_path)
    table = scan(pattern, engine=client)
    (tmp_path / "1.parquet").write_bytes(b"secret")
    with pytest.raises(RuntimeError, match="changed") as found:
        draws(table)
    assert "secret" not in str(found.value)


@pytest.mark.statistical
def test_two_processes_of_jax(tmp_path, whole):
    """The first one decides, draws noise and charges; the other one computes, and leaves when the first does."""
    (tmp_path / "files").mkdir()
    pattern = write(tmp_path / "files", row_group_size=500)
    with reserved_address() as address:
        commands = [[sys.executable, WORKER, str(k), address, pattern, str(tmp_path / "found.npy")] for k in (1, 0)]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
        processes = [subprocess.Popen(command, **options) for command in commands]
        outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [out.split("\n")[-2] for out, _ in outputs] == ["done", "done"]
    (left,) = re.findall(r"left (.*)", outputs[1][0])
    assert 0.5 < float(left) < 3.0
    np.testing.assert_array_equal(np.load(tmp_path / "found.npy"), whole)


@pytest.mark.nightly
def test_a_lost_scheduler_is_said(tmp_path, monkeypatch):
    options = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with LocalCluster(**options) as found, Client(found, timeout=5) as client:
        table = scan(write(tmp_path), engine=client)
        run, passes = DaskWorkers.run, []

        def losing(self, task, pieces):
            passes.append(task)
            if len(passes) == 2:
                client.cluster.sync(client.cluster.scheduler.close)
            return run(self, task, pieces)

        monkeypatch.setattr(DaskWorkers, "run", losing)
        with pytest.raises(EngineLostError, match="what was charged stays charged"):
            draws(table)


def test_what_engines_print_holds_no_row():
    """Dask logs the arguments of what fails."""
    table = in_pieces(frame())
    (piece,) = table._pieces
    part = Part(0, 3, (np.array([123456789]),))
    assert repr(piece) == "FramePiece of 3000 rows from 0"
    assert "123456789" not in repr(part)


def test_threads_stop_where_one_fails():
    ran = []

    def fails(piece):
        ran.append(piece)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        list(Threads(2).run(fails, range(100)))
    assert len(ran) < 10


@pytest.mark.statistical
def test_an_engine_is_whatever_runs_a_task(whole):
    """As docs/cluster.md says."""

    class InOrder:
        def run(self, task, pieces):
            return map(task, pieces)

    table = in_pieces(frame(), (10, 20), engine_of(InOrder()))
    np.testing.assert_array_equal(draws(table), whole)


def spark_is_missing() -> str:
    try:
        import pyspark  # noqa: F401
    except ImportError:
        return "PySpark is not installed"
    return "" if shutil.which("java") else "there is no Java"


@pytest.mark.nightly
@pytest.mark.skipif(bool(spark_is_missing()), reason=spark_is_missing() or "-")
def test_spark(tmp_path, whole):
    """By files, and by a data frame whose partitions are the files, each as long as the others."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        pattern = write(tmp_path, row_group_size=700)
        table = scan(pattern, engine=session)
        assert isinstance(table.engine, SparkJobs)
        np.testing.assert_array_equal(draws(table), whole)
        one = tmp_path / "one.parquet"
        pq.write_table(frame(), one)
        rows = session.read.parquet(str(one)).coalesce(1)
        np.testing.assert_array_equal(draws(scan(rows)), whole)
    finally:
        session.stop()
