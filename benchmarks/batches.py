"""Does an iteration on batches cost what the batch costs, whatever the size of the table?

Time per iteration of DPSGLD and of the minibatch DPPenalty with a Poisson batch of fixed expected size, for tables of
growing length, in one process, each beside the same kernel on the first table. `--memory` adds what the process holds
beyond the table itself.

    python benchmarks/batches.py --rows 1e5 1e6 1e7 --batch 1000
"""

import argparse
import resource
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_dp import DPSGLD, DPPenalty

COLUMNS = 20


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


KERNELS = {
    "DPSGLD": lambda batch, iterations: DPSGLD(model, eps=8.0, batch_size=batch, num_iterations=iterations),
    "DPPenalty": lambda batch, iterations: DPPenalty(
        model, eps=8.0, prepare=False, batch_size=batch, n0=100, num_iterations=iterations
    ),
}


def seconds_per_iteration(make, table, batch, iterations, repeats):
    """The fastest of `repeats` runs of `iterations` iterations, compiled before."""
    kernel = make(batch, iterations * (repeats + 1))
    X, y = table
    state = kernel.init(jax.random.key(0), 0, None, (X,), {"y": y})

    @jax.jit
    def run(state, X, y):
        return jax.lax.fori_loop(0, iterations, lambda _, s: kernel.sample(s, (X,), {"y": y}), state)

    device = (jax.numpy.asarray(X), jax.numpy.asarray(y))
    state = jax.block_until_ready(run(state, *device))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(run(state, *device))
        times.append(time.perf_counter() - start)
    return min(times) / iterations


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, nargs="+", default=[1e5, 1e6, 1e7])
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="also print the peak memory of the process")
    options = parser.parse_args()
    print(f"batch {options.batch}, {COLUMNS} columns, float32, jax {jax.__version__}, {jax.default_backend()}")
    print("| rows | kernel | ms per iteration | ratio to the first |" + (" peak MB |" if options.memory else ""))
    print("|---|---|---|---|" + ("---|" if options.memory else ""))
    first = {}
    for rows in map(int, options.rows):
        rng = np.random.default_rng(0)
        X = rng.uniform(-1, 1, (rows, COLUMNS)).astype(np.float32)
        y = rng.integers(0, 2, rows).astype(np.int32)
        for name, make in KERNELS.items():
            ms = 1e3 * seconds_per_iteration(make, (X, y), options.batch, options.iterations, options.repeats)
            first.setdefault(name, ms)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            memory = f" {peak:.0f} |" if options.memory else ""
            print(f"| {rows:.0e} | {name} | {ms:.3f} | {ms / first[name]:.2f} |{memory}", flush=True)
        del X, y


if __name__ == "__main__":
    main()
