"""A working law: quantile regressions of rows that are no asymmetric Laplace draws, against NUTS.

Whoever regresses a quantile takes that law for its check loss. Its gradients' squares then say nothing of the sum's
curvature, and no model tells what a clip takes. Rows have normal, gamma or t noise (3 degrees of freedom) that spreads
with a covariate; a run is *off* as in `right.py`.

    python benchmarks/working.py --eps 1 3 --tables 3 4
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Callable

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC as ExactMCMC
from numpyro.infer import NUTS

from numpyro_dp import DPHMC, MCMC, PosteriorWarning

NUM_ROWS = 6_000
NOISE = {
    "normal": lambda rng: rng.normal(size=NUM_ROWS),
    "gamma": lambda rng: rng.gamma(2, 1, NUM_ROWS),
    "t": lambda rng: rng.standard_t(3, NUM_ROWS),
}


def model_of(quantile: float) -> Callable:
    def model(X, y=None):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 5).expand([X.shape[1]]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(5))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.AsymmetricLaplaceQuantile(a + X @ b, scale, quantile), obs=y)

    return model


def table(noise: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (NUM_ROWS, 3))
    y = 1 + X @ [1.0, -0.5, 0.3] + np.exp(0.7 * X[:, 0]) * NOISE[noise](rng)
    return X.astype(np.float32), y.astype(np.float32)


def draws(mcmc: ExactMCMC) -> np.ndarray:
    samples = mcmc.get_samples()
    return np.column_stack([samples["a"], samples["b"], samples["scale"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--eps", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--quantiles", type=float, nargs="+", default=[0.25, 0.5, 0.75, 0.9])
    parser.add_argument("--tables", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    warnings.simplefilter("ignore", PosteriorWarning)
    counts: dict[tuple[float, float], Counter] = {}
    for seed in options.tables:
        for noise in NOISE:
            for quantile in options.quantiles:
                model, (X, y) = model_of(quantile), table(noise, seed)
                nuts = ExactMCMC(NUTS(model), num_warmup=400, num_samples=1_000, progress_bar=False)
                nuts.run(jax.random.key(0), X, y)
                exact = draws(nuts)
                for eps in options.eps:
                    mcmc = MCMC(DPHMC(model, eps=eps), num_warmup=100, num_samples=1_500, progress_bar=False)
                    mcmc.run(jax.random.key(0), X, y)
                    found = draws(mcmc)
                    away = found.mean(0) - exact.mean(0)
                    low, high = np.quantile(found, [0.05, 0.95], axis=0)
                    coverage = ((exact > low) & (exact < high)).mean()
                    error = np.sqrt(np.mean((away / exact.std(0)) ** 2))
                    own, ratio = np.max(np.abs(away) / found.std(0)), np.median(found.std(0) / exact.std(0))
                    is_off, trusted = own > 4 or coverage < 0.6, mcmc.privacy.posterior.trusted
                    verdict = ("off" if is_off else "right") + (", SILENT" if is_off and trusted else "")
                    verdict += "" if trusted else ", flagged"
                    counts.setdefault((quantile, eps), Counter())[verdict] += 1
                    print(
                        f"{noise:7} quantile {quantile:<5} eps {eps:<4g} table {seed}: error {error:6.2f}  "
                        f"sd {ratio:5.2f}  own {own:5.2f}  cover {coverage:.2f}  {verdict}",
                        flush=True,
                    )
    for (quantile, eps), counter in sorted(counts.items()):
        print(f"quantile {quantile:<5} eps {eps:<4g}", dict(counter))


if __name__ == "__main__":
    main()
