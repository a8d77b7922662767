"""One of several processes that share a table: ``python sharding_worker.py ADDRESS NUM_PROCESSES INDEX DIRECTORY``.

All run the same program, each with its own rows in memory. See `tests/privacy/test_sharding.py`.
"""

import pickle
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import sharded
from numpyro_dp import DPHMC, MCMC


def main(address: str, num_processes: int, index: int, directory: Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes, index)
    own = slice(index * sharded.N // num_processes, (index + 1) * sharded.N // num_processes)
    mesh = jax.make_mesh((num_processes,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    table = [jax.make_array_from_process_local_data(sharding, x[own]) for x in sharded.table()]

    drawn = sharded.count_noise()
    draws, mcmc = sharded.draws(sharded.KERNELS["hmc"](), table)
    results = {"draws": draws, "releases": mcmc.privacy.releases, "drawn": len(drawn)}
    try:
        MCMC(DPHMC(sharded.model, eps=1.0), num_warmup=1, num_samples=1).run(jax.random.key(0), *table)
    except ValueError as error:
        results["refusal"] = str(error)
    (directory / f"result-{index}.pkl").write_bytes(pickle.dumps(results))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
