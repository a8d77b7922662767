"""One data owner's run, for `test_owners_chain`: ``python owners_chain_worker.py ADDRESS NUM_OWNERS INDEX DIRECTORY``.

It reads its own rows only, runs a chain with the other owners, and writes what it got and everything that it sent.
"""

import pickle
import sys
from pathlib import Path

import jax
import numpy as np

from numpyro_dp import DPHMC, MCMC, DPBarker, DPPenalty
from numpyro_dp.owners import JaxOwners

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import owners_model


def main(address: str, num_owners: int, index: int, directory: Path) -> None:
    with JaxOwners.connect(address, num_owners, index, timeout=60) as owners:
        owners_model.repeatable_noise(owner=index)
        X, y = owners_model.rows_of(directory, index)
        owners.sent = []
        results = {"sent": owners.sent, "rows": len(y)}
        for name, kernel in (("penalty", DPPenalty), ("hmc", DPHMC), ("barker", DPBarker)):
            mcmc = MCMC(kernel(owners_model.model, owners=owners, **owners_model.OPTIONS), **owners_model.RUN)
            mcmc.run(jax.random.key(3), X, y=y)
            results[name] = np.asarray(mcmc.get_samples(group_by_chain=True)["b"])
            results[name + " report"] = str(mcmc.privacy)
            results[name + " eps"] = mcmc.privacy.eps
        (directory / f"result-{index}.pkl").write_bytes(pickle.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
