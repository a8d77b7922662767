"""One of two processes that read a table together: ``python processes_worker.py NUMBER ADDRESS FILES RESULT``."""

import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.tables import draws, model
from numpyro_dp import DPHMC, PrivacyBudget, scan
from numpyro_dp.tables.engines import JaxProcesses


def main(number: int, address: str, files: str, result: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, number)
    with JaxProcesses() as engine:
        if engine.is_first:
            budget = PrivacyBudget(f"{result}.budget", eps=4.0, delta=1e-3)
            kernel = DPHMC(model, eps=3.0, noise_seed=1, budget=budget)
            np.save(result, draws(scan(files, engine=engine), kernel=kernel))
            print(f"left {budget.eps_left:.2f}")
    print("done")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
