"""A table, and kernels that are run on it as a whole and spread over devices."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_dp import DPHMC, DPSGLD, MCMC, DPBarker, DPPenalty, Preparation
from numpyro_dp.privacy.noise import NoiseSource

N, D = 600, 3


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def table():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (N, D)).astype(np.float32)
    return X, (rng.random(N) < 1 / (1 + np.exp(-X @ np.array([1.0, -1.0, 0.5])))).astype(np.int32)


KERNELS = {
    "hmc": lambda: DPHMC(model, eps=20.0, noise_seed=1, prepare=False, step_size=0.05, clip_grad=3.0, clip_ratio=3.0),
    "hmc_adding": lambda: DPHMC(
        model,
        eps=20.0,
        delta=1e-5,
        noise_seed=1,
        prepare=False,
        step_size=0.05,
        neighboring_relation="add_or_remove_one",
    ),
    "penalty": lambda: DPPenalty(model, eps=20.0, noise_seed=1, prepare=False),
    "barker": lambda: DPBarker(model, eps=20.0, noise_seed=1),
    "prepared": lambda: DPHMC(model, eps=20.0, noise_seed=1, prepare=Preparation(force=True)),
    "walk": lambda: DPPenalty(model, eps=20.0, noise_seed=1, prepare=Preparation(force=True, mode="walk")),
    "sgld": lambda: DPSGLD(model, eps=20.0, noise_seed=1, batch_size=50),
    "not_private": lambda: DPPenalty(model, eps=float("inf"), prepare=False),
}


def draws(kernel, args, chain_method="sequential", num_chains=1, **options):
    mcmc = MCMC(
        kernel,
        num_warmup=10,
        num_samples=30,
        num_chains=num_chains,
        chain_method=chain_method,
        progress_bar=False,
        **options,
    )
    mcmc.run(jax.random.key(3), *args)
    return np.asarray(jax.tree.leaves(mcmc.get_samples())[0]), mcmc


def count_noise():
    """A list that grows by one whenever noise is drawn in this process."""
    drawn, draw = [], NoiseSource.draw

    def counted(self, *arguments):
        drawn.append(1)
        return draw(self, *arguments)

    NoiseSource.draw = counted
    return drawn
