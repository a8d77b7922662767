"""Which form of Barker's test is worth its privacy, and which batches?

Every form of DPBarker, DPPenalty and DPHMC's walk at the same eps and number of iterations, on a logistic regression
whose exact posterior NUTS gives: what one iteration costs, how far a row may move the log ratio, how often the chain
accepts, how well it mixes and how far off it ends. All chains start at the posterior's mean, so that only mixing is
compared; the batch forms sample a tempered posterior (n0), with a reference of their own. The errors of the corrections
themselves are in `benchmarks/barker_corrections.py`.

    python benchmarks/barker.py --eps 8 --iterations 4000
    python benchmarks/barker.py --eps 8 --iterations 4000 --columns 10 --only DPPenalty DPHMC
"""

import argparse

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer

from numpyro_dp import DPHMC, MCMC, DPBarker, DPPenalty, FixedBatches

ROWS, N0, BATCH = 10_000, 200, 1000


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def kernels(eps, columns):
    """Each with the power of the likelihood."""
    plain = {"eps": eps, "clip_ratio": float(np.sqrt(columns))}
    walk = plain | {"prepare": False}
    hmc = walk | {"clip_grad": float(np.sqrt(columns)), "num_steps": 3}
    tempered = N0 / ROWS
    return {
        "DPPenalty": (DPPenalty(model, **walk), 1.0),
        "Barker, exact logistic bit (default)": (DPBarker(model, **plain), 1.0),
        "Barker, variance 1, exponential": (DPBarker(model, variance=1.0, **plain), 1.0),
        "Barker, variance 1, logistic": (DPBarker(model, variance=1.0, correction="logistic", **plain), 1.0),
        "Barker, variance 2, exponential": (DPBarker(model, variance=2.0, **plain), 1.0),
        "Barker, variance 2, logistic (paper)": (DPBarker(model, variance=2.0, correction="logistic", **plain), 1.0),
        "DPPenalty, tempered": (DPPenalty(model, n0=N0, **walk), tempered),
        f"DPPenalty, Poisson batch {BATCH}": (DPPenalty(model, n0=N0, batch_size=BATCH, **walk), tempered),
        f"DPPenalty, fixed batch {BATCH}": (
            DPPenalty(model, n0=N0, batch_size=FixedBatches(BATCH), **walk),
            tempered,
        ),
        "DPHMC, three steps, tempered": (DPHMC(model, n0=N0, **hmc), tempered),
        f"DPHMC, three steps, Poisson batch {BATCH}": (DPHMC(model, n0=N0, batch_size=BATCH, **hmc), tempered),
        f"Barker, batch {BATCH}, exponential": (DPBarker(model, n0=N0, batch_size=BATCH, **plain), tempered),
        f"Barker, batch {BATCH}, logistic (paper)": (
            DPBarker(model, n0=N0, batch_size=BATCH, correction="logistic", **plain),
            tempered,
        ),
    }


def reference(power, X, y):
    nuts = numpyro.infer.NUTS(_tempered(power))
    mcmc = numpyro.infer.MCMC(nuts, num_warmup=500, num_samples=4000, progress_bar=False)
    mcmc.run(jax.random.key(1), X, y=y)
    draws = np.asarray(mcmc.get_samples()["b"])
    return draws.mean(0), draws.std(0)


def _tempered(power):
    def tempered(X, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0]), numpyro.handlers.scale(scale=power):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    return tempered


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eps", type=float, default=8.0)
    parser.add_argument("--iterations", type=int, default=4000)
    parser.add_argument("--columns", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[""], help="kernels whose names begin so")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (ROWS, options.columns))
    y = (rng.random(ROWS) < 1 / (1 + np.exp(-X @ np.resize([1.0, -0.5, 0.3], options.columns)))).astype(int)
    exact = {power: reference(power, X, y) for power in (1.0, N0 / ROWS)}
    print(f"eps {options.eps:g} for {options.iterations} iterations, {ROWS} rows, tempered: n0 = {N0}")
    print("| kernel | noise multiplier | accepted | jump / sd | ESS | largest shift / sd | sd ratios |")
    print("|---|---|---|---|---|---|---|")
    for name, (kernel, power) in kernels(options.eps, options.columns).items():
        if not name.startswith(tuple(options.only)):
            continue
        mean, sd = exact[power]
        warmup = options.iterations // 4
        mcmc = MCMC(kernel, num_warmup=warmup, num_samples=options.iterations - warmup, progress_bar=False)
        mcmc.run(jax.random.key(0), X, y=y, init_params={"b": jnp.asarray(mean)})
        draws = np.asarray(mcmc.get_samples()["b"], float)
        accepted = np.asarray(mcmc.get_extra_fields()["accepted"])
        jumps = np.abs(np.diff(draws, axis=0)[accepted[1:]] / sd).mean()
        ess = min(float(arviz.ess(draws[None, :, k].copy())) for k in range(options.columns))
        shift = np.abs((draws.mean(0) - mean) / sd).max()
        ratio = draws.std(0) / sd
        multiplier = mcmc.privacy.releases["ratio"]["noise_multiplier"]
        print(
            f"| {name} | {multiplier:.2f} | {accepted.mean():.2f} | {jumps:.2f} | {ess:.0f} | {shift:.2f} | "
            f"{ratio.min():.2f} to {ratio.max():.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
