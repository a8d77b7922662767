"""Owners of rows exchange exact integers, in threads and in real processes, and end with a clear error if one fails."""

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.addresses import reserved_address
from jax.experimental import io_callback

from numpyro_dp.owners import JaxOwners, OwnersError
from tests.helpers.local_owners import LocalExchange

WORKER = Path(__file__).parents[1] / "helpers" / "owners_worker.py"


def everyone(group, run, seconds=20.0):
    """`run(owner)` of all owners in threads: the results, or the errors in their places."""
    results = [None] * len(group)

    def target(i):
        try:
            results[i] = run(group[i])
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=target, args=(i,), daemon=True) for i in range(len(group))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "owners hang"
    return results


def checked(num_owners, timeout=10.0):
    group = LocalExchange.group(num_owners, timeout)
    assert everyone(group, lambda owner: owner.check(b"all", b"same")) == [None] * num_owners
    return group


# -- In threads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_owners", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,)])
def test_all_owners_get_all_arrays_in_the_order_of_the_owners(num_owners, shape):
    group = checked(num_owners)
    rng = np.random.default_rng(0)
    # Beyond 2**53, where a float would round.
    sent = rng.integers(-(2**62), 2**62, (num_owners, *shape), dtype=np.int64)
    for received in everyone(group, lambda owner: owner.exchange(b"a", sent[owner.index])):
        assert received.dtype == np.int64
        np.testing.assert_array_equal(received, sent)


def test_owners_may_be_out_of_step_in_several_threads():
    group = checked(2)

    def run(owner):
        rng = np.random.default_rng(owner.index)

        def thread(name):
            total = 0
            for i in range(50):
                time.sleep(rng.exponential(1e-3))
                received = owner.exchange(b"%d %d" % (name, i), np.array([name, i, total]))
                assert (received == received[0]).all()
                total = int(received.sum())
            return total

        names = [0, 1, 2] if owner.index else [2, 1, 0]
        return dict(zip(names, everyone(names, thread), strict=True))

    first, second = everyone(group, run)
    assert first == second
    assert all(isinstance(total, int) for total in first.values())


def test_exchanges_with_the_same_tag_are_paired_in_their_order():
    def run(owner):
        return [owner.exchange(b"a", np.array(10 * i + owner.index)).tolist() for i in range(4)]

    for received in everyone(checked(3), run):
        assert received == [[10 * i, 10 * i + 1, 10 * i + 2] for i in range(4)]


def test_store_is_emptied():
    group = checked(3)
    everyone(group, lambda owner: [owner.exchange(b"%d" % i, np.arange(5)) for i in range(100)])
    for owner in group:
        owner.close()
    store = group[0]._store
    assert sorted(store.values) == ["left/0", "left/1", "left/2"]
    assert not store._counts


def test_callback_in_a_compiled_loop():
    group = checked(2)

    def run(owner):
        def host(chain, i, z):
            return owner.exchange(b"%d %d" % (chain, i), np.asarray(z, np.int64) + owner.index).sum(0).astype(np.int32)

        def chain(number):
            def step(i, z):
                return io_callback(host, jax.ShapeDtypeStruct((), jnp.int32), number, i, z) % 1009

            return jax.lax.fori_loop(0, 30, step, number)

        return np.asarray(jax.jit(jax.vmap(chain))(jnp.arange(3, dtype=jnp.int32))).tolist()

    expected = [0, 1, 2]
    for _ in range(30):
        expected = [(2 * z + 1) % 1009 for z in expected]
    assert everyone(group, run) == [expected, expected]


def test_missing_owners_are_named_and_nothing_is_exchanged_afterwards():
    group = checked(4)
    for owner in group[:2]:
        owner.timeout = 0.3
    start = time.monotonic()
    results = everyone(group[:2], lambda owner: owner.exchange(b"a", np.zeros(2, np.int64)))
    assert time.monotonic() - start < 5
    for error in results:
        assert isinstance(error, OwnersError)
        assert "owner 2 did not answer within 0.3 s; owner 3 did not answer within 0.3 s" in str(error)
    with pytest.raises(OwnersError, match="nothing can be exchanged any more: owner 2 did not answer"):
        group[0].exchange(b"b", np.zeros(2, np.int64))
    # Those that come too late do not wait, and learn why.
    start = time.monotonic()
    with pytest.raises(OwnersError, match=r"owner 0 has left \(owner 2 did not answer within 0.3 s; owner 3"):
        group[2].exchange(b"b", np.zeros(2, np.int64))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("late", [False, True])
def test_who_leaves_is_not_waited_for(late):
    group = checked(2, timeout=60)

    def run(owner):
        if owner.index == 0:
            return owner.exchange(b"a", np.array(1))
        time.sleep(0.2 * late)
        with pytest.raises(ZeroDivisionError), owner:
            raise ZeroDivisionError("a private matter")
        return None

    start = time.monotonic()
    error, _ = everyone(group, run)
    assert time.monotonic() - start < 5
    assert str(error).endswith("owner 1 has left (the run ended with an error)")


def test_what_was_sent_before_leaving_counts():
    first, second = checked(2)
    store = first._store
    get, asked = store.get, []

    def get_late(key, seconds):
        """The other owner's message and its farewell come just after the first look."""
        if key.startswith("messages") and not asked:
            asked.append(key)
            store.put(key, np.array(7).tobytes())
            second.close()
            return None
        return get(key, seconds)

    store.get = get_late
    assert first.exchange(b"a", np.array(6)).tolist() == [6, 7]
    assert asked


def test_owners_that_differ_are_refused_by_name():
    group = LocalExchange.group(4)
    everyone(group, lambda owner: owner.check(b"model", b"same"))
    for error in everyone(group, lambda owner: owner.check(b"random key", b"%d" % (owner.index == 2))):
        assert "owners differ in 'random key': owners 0, 1, 3 versus owner 2" in str(error)
    for error in everyone(group, lambda owner: owner.exchange(b"a", np.array(0))):
        assert "nothing can be exchanged any more: owners differ" in str(error)


def test_nothing_is_exchanged_before_a_check():
    group = LocalExchange.group(2)
    with pytest.raises(RuntimeError, match="call `check` first"):
        group[0].exchange(b"a", np.array(0))
    assert not group[0]._store.values


@pytest.mark.parametrize(
    ("mine", "given"),
    [(np.zeros(2), "float64"), (np.zeros(2, np.int32), "int32"), (1, "int"), ([1, 2], "list")],
)
def test_only_whole_steps_are_sent(mine, given):
    (owner,) = checked(1)
    with pytest.raises(TypeError, match=f"int64 arrays, got .*{given}"):
        owner.exchange(b"a", mine)


def test_other_shapes_are_refused():
    group = checked(2)
    for error in everyone(group, lambda owner: owner.exchange(b"a", np.zeros(2 + owner.index, np.int64))):
        assert isinstance(error, OwnersError)
        assert "24" in str(error)
        assert "16" in str(error)


def test_everything_that_reaches_the_store_is_recorded():
    group = LocalExchange.group(2)
    store = group[0]._store
    stored = {}
    put = store.put
    store.put = lambda key, value: (stored.update({key: value}), put(key, value))
    for owner in group:
        owner.sent = []
    public = b"settings that are longer than a hash of them: " + 100 * b"x"
    everyone(group, lambda owner: owner.check(b"settings", public))
    mine = [np.array([5, -6]), np.array([7, 8])]
    everyone(group, lambda owner: owner.exchange(b"public tag", mine[owner.index]))
    everyone(group, lambda owner: owner.close())
    assert stored == dict(group[0].sent + group[1].sent)
    for owner in group:
        digest, numbers, farewell = [value for _, value in owner.sent]
        assert len(digest) == 32
        assert np.frombuffer(numbers, "<i8").tolist() == mine[owner.index].tolist()
        assert farewell == b"the run is over"
    assert not any(text in key for key in stored for text in ("public tag", b"public tag".hex()))


def test_a_copy_cannot_exchange():
    group = checked(2)
    copy = pickle.loads(pickle.dumps(group[1]))
    assert (copy.num_owners, copy.index, copy.timeout) == (2, 1, 10.0)
    with pytest.raises(OwnersError, match="this is a copy"):
        copy.exchange(b"a", np.array(0))
    copy.close()
    everyone(group, lambda owner: owner.exchange(b"a", np.array(0)))


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan")])
def test_timeout_must_be_positive(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        LocalExchange.group(2, timeout)


def test_unconnected_process_is_told_how_to_connect():
    with pytest.raises(RuntimeError, match=r"JaxOwners.connect"):
        JaxOwners()


# -- In processes ------------------------------------------------------------------------------------------------------


def run_processes(tmp_path, scenario, num_owners, timeout=60.0, num_devices=1, limit=90.0):
    """Real owners, killed after `limit` seconds: per owner the exit status, what it printed as JSON, and its log."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}",
    }
    processes, logs = [], []
    with reserved_address() as address:
        command = [sys.executable, "-W", "error", str(WORKER), scenario, address, str(num_owners)]
        try:
            for index in range(num_owners):
                logs.append(tmp_path / f"{scenario} {index}.log")
                with logs[-1].open("w") as log, (tmp_path / f"{scenario} {index}.json").open("w") as out:
                    arguments = [*command, str(index), str(timeout)]
                    processes.append(subprocess.Popen(arguments, env=environment, stdout=out, stderr=log))
            deadline = time.monotonic() + limit
            statuses = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    outcomes = []
    for index in range(num_owners):
        lines = (tmp_path / f"{scenario} {index}.json").read_text().splitlines()
        outcomes.append(json.loads(lines[-1]) if lines else None)
    return statuses, outcomes, [log.read_text() for log in logs]


def expected_chains(num_owners):
    chains = [[chain, chain + 1] for chain in range(3)]
    for _ in range(40):
        chains = [
            [sum(z * 1_000_003 + owner for owner in range(num_owners)) % 999_983 // 2 + 1 for z in chain]
            for chain in chains
        ]
    return chains


@pytest.mark.parametrize(("num_owners", "num_devices"), [pytest.param(2, 1, marks=pytest.mark.nightly), (3, 2)])
@pytest.mark.statistical
def test_processes_agree(tmp_path, num_owners, num_devices):
    statuses, outcomes, logs = run_processes(tmp_path, "agree", num_owners, num_devices=num_devices)
    assert statuses == [0] * num_owners, logs
    expected = expected_chains(num_owners)
    for outcome in outcomes:
        assert "error" not in outcome, outcome
        assert outcome["num_devices"] == num_devices
        for run in ("alone", "b", "c", "second run"):
            assert outcome[run] == expected, run
        assert outcome["num_sent"] == 1 + 3 * 3 * 40 + 100 + 1
        assert outcome["last_sent"] == "the run is over"
        assert outcome["computed_after"] == 42  # and JAX goes on without the others


def test_processes_that_differ_are_refused(tmp_path):
    statuses, outcomes, logs = run_processes(tmp_path, "differ", 3)
    assert statuses == [0, 0, 0], logs
    for outcome in outcomes:
        assert "owners differ in 'settings': owners 0, 2 versus owner 1" in outcome["error"]


@pytest.mark.statistical
def test_dead_process_ends_the_others_in_time(tmp_path):
    statuses, outcomes, logs = run_processes(tmp_path, "last dies", 3, timeout=5.0)
    assert statuses == [0, 0, -9], logs
    for outcome in outcomes[:2]:
        assert "owner 2 did not answer within 5 s" in outcome["error"]
        assert outcome["seconds"] < 5 + 25  # JAX itself would notice after 100


def test_failed_process_ends_the_others_at_once(tmp_path):
    statuses, outcomes, logs = run_processes(tmp_path, "fail", 3, timeout=60.0)
    assert statuses == [0, 0, 0], logs
    for index in (0, 2):
        assert "owner 1 has left (the run ended with an error)" in outcomes[index]["error"]
        assert outcomes[index]["seconds"] < 20
        assert "private" not in outcomes[index]["error"]
    assert "a private matter" in outcomes[1]["error"]
    assert outcomes[1]["last_sent"] == "the run ended with an error"


def test_dead_coordinator_ends_the_others_at_once(tmp_path):
    statuses, _, logs = run_processes(tmp_path, "first dies", 2, timeout=60.0, limit=45.0)
    assert statuses[0] == -9, logs
    assert statuses[1] != 0
    assert "JAX distributed service detected fatal errors" in logs[1]
