"""What owners in processes of their own have in common: the model, the settings, and noise that can be repeated."""

import hashlib
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_dp.privacy.clipping import sensitivity_steps
from numpyro_dp.privacy.noise import NoiseSource

OPTIONS = {"eps": 20.0, "delta": 1e-4, "step_size": 0.1, "prepare": False}
RUN = {"num_warmup": 5, "num_samples": 15, "num_chains": 2, "chain_method": "vectorized", "progress_bar": False}


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def rows_of(directory: Path, index: int) -> tuple[np.ndarray, np.ndarray]:
    with np.load(directory / f"owner-{index}.npz") as table:
        return table["X"], table["y"]


def repeatable_noise(owner: int | None) -> None:
    """Noise that is a function of the release and of the owner: of one of them, or of all on the second axis."""

    def draw(self, shape, mechanism, relation, nonce):
        def of(j: int, shape: tuple) -> np.ndarray:
            seed = int.from_bytes(hashlib.sha256(nonce + bytes([j])).digest()[:8], "big")
            return np.random.default_rng(seed).normal(size=shape)

        if owner is None:
            normal = np.stack([of(j, (shape[0], *shape[2:])) for j in range(shape[1])], 1)
        else:
            normal = of(owner, shape)
        steps = np.rint(mechanism.noise_multiplier * sensitivity_steps(relation) * normal).astype(np.int64)
        return np.stack([steps >> 24, steps & (2**24 - 1)]).astype(np.int32)

    NoiseSource.draw = draw
