"""Owners in processes of their own get the chain that one process with all rows and the same noise gets."""

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import owners_model
from helpers.addresses import reserved_address

from numpyro_dp import DPHMC, MCMC, DPBarker, DPPenalty, FixedBatches
from numpyro_dp.privacy.draws import Slots
from numpyro_dp.privacy.noise import NoiseSource, NoisySteps
from numpyro_dp.privacy.release import _add_up_with_others
from tests.helpers.local_owners import LocalExchange

pytestmark = pytest.mark.nightly  # DPPenalty with owners of rows in one process is an everyday matter of test_kernels

WORKER = Path(__file__).parents[1] / "helpers" / "owners_chain_worker.py"
SIZES = (40, 25, 60)


@pytest.fixture(scope="module")
def owners(tmp_path_factory):
    """Runs three processes; their results."""
    directory = tmp_path_factory.mktemp("owners")
    rng = np.random.default_rng(0)
    tables = []
    for index, size in enumerate(SIZES):
        X = rng.uniform(-1, 1, (size, 2))
        tables.append((X, (rng.random(size) < 1 / (1 + np.exp(-X @ [1.0, -1.0]))).astype(int)))
        np.savez(directory / f"owner-{index}.npz", X=X, y=tables[-1][1])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(WORKER.parent.parent), environment.get("PYTHONPATH", "")])
    with reserved_address() as address:
        processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), address, str(len(SIZES)), str(index), str(directory)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for index in range(len(SIZES))
        ]
        try:
            said = [process.communicate(timeout=300)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
    assert [process.returncode for process in processes] == [0] * len(SIZES), "\n".join(said)
    return tables, [pickle.loads((directory / f"result-{index}.pkl").read_bytes()) for index in range(len(SIZES))]


@pytest.mark.parametrize(("name", "kernel"), [("penalty", DPPenalty), ("hmc", DPHMC), ("barker", DPBarker)])
def test_all_processes_get_the_chain_of_one_process_with_the_same_noise(owners, name, kernel, monkeypatch):
    tables, results = owners
    monkeypatch.setattr(NoiseSource, "draw", NoiseSource.draw)  # restored afterwards
    owners_model.repeatable_noise(owner=None)
    whose = np.repeat(np.arange(len(SIZES)), SIZES)
    shuffled = np.random.default_rng(1).permutation(len(whose))
    X, y = (np.concatenate(parts)[shuffled] for parts in zip(*tables, strict=True))
    mcmc = MCMC(kernel(owners_model.model, owners=whose[shuffled], **owners_model.OPTIONS), **owners_model.RUN)
    mcmc.run(jax.random.key(3), X, y=y)
    expected = np.asarray(mcmc.get_samples(group_by_chain=True)["b"])
    assert len(np.unique(expected[..., 0])) > 2
    for result in results:
        np.testing.assert_array_equal(result[name], results[0][name])
        np.testing.assert_allclose(result[name], expected, rtol=1e-5, atol=1e-6)


def test_only_noisy_sums_of_the_planned_number_cross_the_wire(owners):
    _, results = owners
    for index, result in enumerate(results):
        messages = [(key, value) for key, value in result["sent"] if key.startswith("messages/")]
        sizes = [len(value) for _, value in messages]
        # A digest of 32 bytes, or 8 bytes for each noisy number, for the noise multiplier and for the last decision.
        releases = 2 * 20  # chains, iterations
        digests = 2 * 2 + 3
        assert sizes.count(24) == 3 * releases  # log ratios
        assert sizes.count(32) == 8 * releases + digests  # gradients
        assert len(sizes) == digests + 11 * releases
        assert all(key.endswith(f"/{index}") for key, _ in messages)
        everything = b"".join(value for _, value in result["sent"])
        X, _ = owners[0][index]
        assert not any(part.tobytes() in everything for part in (*X.ravel(), *X.astype(np.float32).ravel()))


def test_each_owner_held_its_own_rows_only_and_has_a_guarantee_of_its_own(owners):
    _, results = owners
    for size, result in zip(SIZES, results, strict=True):
        assert result["rows"] == size
        assert result["penalty eps"] == 20.0
        assert f"n = {size}" in result["penalty report"]
        assert "3 data owners" in result["penalty report"]


def test_in_one_process_the_report_tells_what_an_outsider_learns():
    X, y = np.zeros((9, 2)), np.zeros(9, int)
    kernel = DPPenalty(owners_model.model, owners=np.arange(9) % 3, **owners_model.OPTIONS)
    mcmc = MCMC(kernel, **owners_model.RUN)
    mcmc.run(jax.random.key(0), X, y=y)
    report = str(mcmc.privacy)
    assert mcmc.privacy.eps == 20.0
    assert "the noise of all owners counts: eps is 9." in " ".join(report.split())


def test_chains_that_come_apart_end_with_an_error():
    """Processors may round differently: then a decision may differ one day, and the sums must not be added."""
    group = LocalExchange.group(2)
    errors = [None, None]

    def run(index):
        group[index].check(b"all", b"same")
        decided = jnp.array(bool(index))
        slot = Slots(None, None, jnp.ones(()), jnp.array(True), jnp.zeros(2, jnp.uint32), decided)
        try:
            jax.block_until_ready(_add_up_with_others(group[index], slot, NoisySteps(jnp.int32(1), jnp.int32(2))))
        except Exception as error:
            errors[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all("have come apart" in error and "owner(s) [1] only" in error for error in errors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"owners": [0.5, 1.0]}, "each row's owner as integers from 0"),
        ({"owners": [-1, 0]}, "each row's owner as integers from 0"),
        ({"owners": [0, 1], "batch_size": FixedBatches(2)}, "each data owner draws from its own rows"),
        ({"owners": LocalExchange.group(1)[0], "clip_ratio": lambda old, new: 1.0}, "give clip_ratio as a number"),
        ({"owners": [0, 1], "neighboring_relation": "add_or_remove_one"}, "tells n, which is private"),
    ],
)
def test_impossible_owners_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DPPenalty(owners_model.model, **{**owners_model.OPTIONS, **options})


def test_owners_of_another_number_of_rows_are_refused():
    kernel = DPPenalty(owners_model.model, owners=[0, 1, 1], **owners_model.OPTIONS)
    with pytest.raises(ValueError, match=r"owners has shape \(3,\), but there are 9 rows"):
        MCMC(kernel, **owners_model.RUN).run(jax.random.key(0), np.zeros((9, 2)), y=np.zeros(9, int))
