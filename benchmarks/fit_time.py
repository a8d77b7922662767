"""How long does a default private fit take, beside NumPyro's NUTS on the same data and model, compilation included?

Both are run in turn in one process, on new objects each time, so that both compile anew. Prints seconds and the ratio.

    python benchmarks/fit_time.py --rows 1e5 --columns 10 --repeats 3
"""

import argparse
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC as ExactMCMC
from numpyro.infer import NUTS

from numpyro_dp import DPHMC, MCMC


def model(X, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ b), obs=y)


def table(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Correlated covariates and outcomes, as in `small_eps.py`."""
    rng = np.random.default_rng(0)
    lags = np.abs(np.subtract.outer(np.arange(columns - 1), np.arange(columns - 1)))
    X = rng.standard_normal((rows, columns - 1)) @ np.linalg.cholesky(0.6**lags).T
    y = rng.random(rows) < 1 / (1 + np.exp(-X @ rng.normal(0, 0.5, columns - 1)))
    return X.astype(np.float32), y.astype(np.int32)


def seconds(kind: str, arrays: tuple, options: argparse.Namespace) -> float:
    start = time.perf_counter()
    run = {
        "num_warmup": options.warmup,
        "num_samples": options.samples,
        "num_chains": options.chains,
        "chain_method": "vectorized",
        "progress_bar": False,
    }
    mcmc = ExactMCMC(NUTS(model), **run) if kind == "NUTS" else MCMC(DPHMC(model, eps=1.0), **run)
    mcmc.run(jax.random.key(0), *arrays)
    jax.block_until_ready(mcmc.get_samples())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1e5)
    parser.add_argument("--columns", type=int, default=10, help="the intercept's included")
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    arrays = table(int(options.rows), options.columns)
    print(f"{int(options.rows)} rows, {options.columns} coefficients, {options.chains} chain(s)")
    for _ in range(options.repeats):
        exact, private = (seconds(kind, arrays, options) for kind in ("NUTS", "DPHMC"))
        print(f"NUTS {exact:6.1f} s   DPHMC, eps 1 {private:6.1f} s   ratio {private / exact:.2f}", flush=True)


if __name__ == "__main__":
    main()
