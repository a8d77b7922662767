"""One data owner in a process of its own: ``python owners_worker.py SCENARIO ADDRESS NUM_OWNERS INDEX TIMEOUT``.

Prints, as one line of JSON for `tests/privacy/test_owners.py`, what the run came to, or the error that ended it.
"""

import importlib.util
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback


def _load_owners():
    """`numpyro_dp.owners` alone: the rest of the package, which it does not use, takes seconds to import."""
    path = Path(__file__).parents[2] / "numpyro_dp" / "owners.py"
    spec = importlib.util.spec_from_file_location("owners", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


owners_module = _load_owners()
NUM_STEPS, NUM_CHAINS = 40, 3


def run_chains(owners, name: str, before=lambda step: None) -> list:
    """A compiled loop over vmapped chains of two integers; every step depends on what all owners sent before it."""

    def host(chain, step, z):
        before(int(step))
        mine = (np.asarray(z).astype(np.int64) * 1_000_003 + owners.index) * 2**20
        total = owners.exchange(f"{name} {chain} {step}".encode(), mine).sum(0)
        return (total // 2**20 % 999_983).astype(np.int32)

    def chain(number):
        def step(i, z):
            total = io_callback(host, jax.ShapeDtypeStruct(z.shape, z.dtype), number, i, z)
            return total // 2 + 1

        return jax.lax.fori_loop(0, NUM_STEPS, step, jnp.arange(2, dtype=jnp.int32) + number)

    return np.asarray(jax.jit(jax.vmap(chain))(jnp.arange(NUM_CHAINS, dtype=jnp.int32))).tolist()


def agree(owners) -> dict:
    """Chains on their own; two programs at a time, out of step with their peers; a second object for a second run."""
    owners.check(b"settings", b"step_size=0.1")
    results = {"alone": run_chains(owners, "a")}
    devices = jax.local_devices()
    rng = np.random.default_rng(owners.index)

    def run(name: str, device) -> None:
        with jax.default_device(device):
            results[name] = run_chains(owners, name, lambda step: time.sleep(rng.exponential(1e-3)))

    threads = [threading.Thread(target=run, args=item) for item in zip("bc", [devices[0], devices[-1]], strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    start = time.perf_counter()
    for i in range(100):
        owners.exchange(b"timed %d" % i, np.arange(2))
    results["milliseconds"] = (time.perf_counter() - start) * 10
    with owners_module.JaxOwners(owners.timeout) as others:
        others.check(b"settings", b"step_size=0.2")
        results["second run"] = run_chains(others, "a")
    return {**results, "num_devices": len(devices)}


def differ(owners) -> dict:
    owners.check(b"model", b"the same")
    owners.check(b"settings", b"step_size=0.2" if owners.index == 1 else b"step_size=0.1")
    return {}


def die(owners, index: int) -> dict:
    """One owner is killed in the middle."""
    owners.check(b"settings", b"")

    def before(step: int) -> None:
        if step == NUM_STEPS // 2 and owners.index == index:
            os.kill(os.getpid(), signal.SIGKILL)

    run_chains(owners, "a", before)
    return {}


def fail(owners) -> dict:
    """The run of one owner ends with an error."""
    owners.check(b"settings", b"")

    def before(step: int) -> None:
        if step == NUM_STEPS // 2 and owners.index == 1:
            raise ValueError("a private matter")

    run_chains(owners, "a", before)
    return {}


SCENARIOS = {
    "agree": agree,
    "differ": differ,
    "fail": fail,
    "last dies": lambda owners: die(owners, owners.num_owners - 1),
    "first dies": lambda owners: die(owners, 0),
}


def main(scenario: str, address: str, num_owners: str, index: str, timeout: str) -> None:
    outcome: dict = {}
    try:
        with owners_module.JaxOwners.connect(
            address, int(num_owners), int(index), timeout=float(timeout), coordinator_bind_address=address
        ) as owners:
            owners.sent = []
            started = time.monotonic()
            try:
                outcome.update(SCENARIOS[scenario](owners))
            finally:
                outcome["seconds"] = time.monotonic() - started
        outcome["computed_after"] = int(jax.jit(lambda x: 2 * x)(21))
        outcome["num_sent"] = len(owners.sent)
        outcome["last_sent"] = owners.sent[-1][1].decode()
    except RuntimeError as error:  # JAX's are, too
        outcome["error"] = str(error)
        outcome["last_sent"] = owners.sent[-1][1].decode()
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
