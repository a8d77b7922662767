"""What is a public bound of one's own worth, in place of a slope times a distance?

A logistic regression on two covariates, one from -10 to 10, the other from -1 to 1: with a slope, jumps along the
second pay for the range of the first. Chains start at the parameters that the rows were drawn with.

    python benchmarks/own_bound.py --repeats 5
"""

import argparse

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_dp import MCMC, DPPenalty

RANGES, TRUE = np.array([10.0, 1.0]), np.array([0.2, -0.5])
BOUNDS = {
    "slope times distance": float(np.linalg.norm(RANGES)),
    "of both places": lambda before, after: RANGES @ jnp.abs(after["b"] - before["b"]),
}


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def effective_sizes(clip_ratio, seed, eps):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-RANGES, RANGES, (20_000, 2))
    y = (rng.random(len(X)) < 1 / (1 + np.exp(-X @ TRUE))).astype(int)
    widths = {"step_size": 0.05, "inverse_mass_matrix": np.array([0.01, 1.0])}
    kernel = DPPenalty(model, eps=eps, prepare=False, clip_ratio=clip_ratio, **widths)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=3500, progress_bar=False)
    mcmc.run(jax.random.key(seed), X, y=y, init_params={"b": jnp.asarray(TRUE)})
    draws = np.asarray(mcmc.get_samples()["b"])
    return [float(arviz.ess(draws[None, :, k].copy())) for k in range(2)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print("| clip_ratio | ESS, wide covariate | ESS, narrow covariate |\n|---|---|---|")
    for name, clip_ratio in BOUNDS.items():
        found = [effective_sizes(clip_ratio, seed, options.eps) for seed in range(options.repeats)]
        cells = [f"{np.median(x):.0f} ({min(x):.0f} to {max(x):.0f})" for x in zip(*found, strict=True)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
