"""A table on several devices: the same chain as on one, and noise that is drawn once."""

import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.addresses import reserved_address
from helpers.sharded import KERNELS, D, N, draws, model, table

from numpyro_dp import DPHMC, DPExponentialFamily, DPPenalty
from numpyro_dp.privacy.sharding import layout_of


def conjugate(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def spread(*arrays, num_devices=2):
    mesh = jax.make_mesh((num_devices,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    return tuple(jax.device_put(x, sharding) for x in arrays)


EVERYDAY = ("penalty",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.nightly) for name in KERNELS]
)
@pytest.mark.filterwarnings("ignore")
def test_the_chain_is_that_of_one_device(name):
    """With the same noise, which is therefore drawn once, and not on each device."""
    one, on_one = draws(KERNELS[name](), table())
    two, on_two = draws(KERNELS[name](), spread(*table()))
    np.testing.assert_allclose(two, one, rtol=2e-3, atol=2e-3)
    assert on_two.privacy.eps == on_one.privacy.eps
    assert on_two.privacy.releases == on_one.privacy.releases


def test_statistics_are_those_of_one_device():
    def kernel():
        return DPExponentialFamily(conjugate, eps=5.0, bounds=(-3.0, 3.0), prepare=False, noise_seed=1)

    y = table()[0][:, 0]
    one, _ = draws(kernel(), (y,))
    two, _ = draws(kernel(), spread(y))
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
def test_vectorized_chains_on_several_devices():
    one, _ = draws(KERNELS["hmc"](), table(), "vectorized", 2)
    two, _ = draws(KERNELS["hmc"](), spread(*table()), "vectorized", 2)
    np.testing.assert_allclose(two, one, rtol=2e-3, atol=2e-3)


def test_noise_on_each_device_would_be_noticed(monkeypatch):
    """A mutation: something is added before the total is taken."""
    from numpyro_dp.privacy.clipping import ClippedSum
    from numpyro_dp.privacy.sharding import Layout

    def twice(self, of_rows, rows):
        found = honest(self, of_rows, rows)
        return ClippedSum(found.hi + 8, found.lo, found.bound)

    honest = Layout.sum
    one, _ = draws(KERNELS["hmc"](), table())
    monkeypatch.setattr(Layout, "sum", twice)
    two, _ = draws(KERNELS["hmc"](), spread(*table()))
    assert np.abs(two - one).max() > 0.01


def test_only_sums_travel():
    """Each device reads its own rows: no array is as long as the table, and what is exchanged are a few numbers."""
    X, y = spread(*table())
    kernel = DPHMC(model, eps=20.0, prepare=False, step_size=0.05, num_iterations=10)
    state = kernel.init(jax.random.key(0), 0, None, (X, y), {})
    text = jax.jit(lambda state, X, y: kernel.sample(state, (X, y), {})).lower(state, X, y).compile().as_text()
    assert f"[{N // 2},{D}]" in text
    assert f"[{N},{D}]" not in text
    exchanged = [
        math.prod(int(length) for length in shape.split(",") if length)
        for results in re.findall(r"= (.*?) (?:all-\w+|collective-\w+)\(", text)
        for shape in re.findall(r"\[([\d,]*)\]", results)
    ]
    assert 2 * D < sum(exchanged) < 50 * D
    assert max(exchanged) <= 2 * 8 * D  # the noise of all gradients


@pytest.mark.nightly
def test_two_processes_run_the_chain_of_one(tmp_path):
    """Each has half of the rows; the first one draws the noise, once, and both report what was released."""
    worker = Path(__file__).parents[1] / "helpers" / "sharding_worker.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(worker.parent.parent), environment.get("PYTHONPATH", "")])
    with reserved_address() as address:
        processes = [
            subprocess.Popen(
                [sys.executable, str(worker), address, "2", str(index), str(tmp_path)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(2)
        ]
        try:
            said = [process.communicate(timeout=200)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    first, second = (pickle.loads((tmp_path / f"result-{index}.pkl").read_bytes()) for index in range(2))
    np.testing.assert_array_equal(first["draws"], second["draws"])
    alone, mcmc = draws(KERNELS["hmc"](), table())
    np.testing.assert_allclose(first["draws"], alone, rtol=2e-3, atol=2e-3)
    assert (first["drawn"] > 0, second["drawn"]) == (True, 0)
    assert first["releases"] == second["releases"] == mcmc.privacy.releases
    assert "preparation cannot run in several processes" in first["refusal"]
    assert first["refusal"] == second["refusal"]


# -- What cannot be --------------------------------------------------------------------------------------------------


def test_arrays_that_lie_differently_are_refused():
    X, y = table()
    with pytest.raises(ValueError, match=r"all arrays of the table must be spread .*\(rows\) spread as \(\)"):
        draws(KERNELS["hmc"](), (spread(X)[0], y))


def test_columns_cannot_be_spread():
    X, _ = table()
    mesh = jax.make_mesh((2,), ("columns",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = jax.device_put(X[:, :2], jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "columns")))
    with pytest.raises(ValueError, match="only the rows"):
        layout_of([columns])


def test_parallel_chains_and_units_need_one_device():
    with pytest.raises(ValueError, match="chain_method='parallel'"):
        draws(KERNELS["hmc"](), spread(*table()), "parallel", 2)
    with pytest.raises(ValueError, match="cannot be spread over devices"):
        draws(DPPenalty(model, eps=1.0, prepare=False, unit=np.arange(N) // 2), spread(*table()))
