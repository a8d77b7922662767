"""How much does one DPHMC iteration cost beside NumPyro's non-private HMC with the same number of leapfrog steps?

Logistic regression, both samplers in one process, interleaved, several rounds; prints the time of an iteration of
each, their ratio, and (with --memory) the peak memory of a private run beside the size of its data.

    python benchmarks/iteration.py --rows 1e5 --columns 20
    python benchmarks/iteration.py --rows 1e6 --columns 50 --memory
"""

import argparse
import gc
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer

import numpyro_dp


def model(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def table(rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    X = 2 * rng.random((rows, columns), np.float32) - 1
    logits = X @ np.linspace(-1, 1, columns, dtype=np.float32)
    y = rng.random(rows, np.float32) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(X), jnp.asarray(y, jnp.int32)


def stepper(kernel, X, y):
    """A function that runs `count` iterations in one compiled loop, and its state."""
    state = kernel.init(jax.random.key(0), 0, {"b": jnp.zeros(X.shape[1])}, (X, y), {})
    loop = jax.jit(lambda state, count: jax.lax.fori_loop(0, count, lambda _, s: kernel.sample(s, (X, y), {}), state))
    return lambda count: jax.block_until_ready(loop(state, count))


def memory(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process, in MB; Linux."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """Start a new peak: the making of the data needs more memory than the run."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=1e5)
    parser.add_argument("--columns", type=int, default=20)
    parser.add_argument("--num-steps", type=int, default=10, help="leapfrog steps")
    parser.add_argument("--iterations", type=int, default=10, help="timed together")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--memory", action="store_true", help="run the private sampler only, and report its peak memory"
    )
    options = parser.parse_args()

    bare = memory("VmRSS")
    X, y = table(int(options.rows), options.columns)
    size = (X.nbytes + y.nbytes) / 2**20
    if options.memory:
        forget_peak()
    private = stepper(
        numpyro_dp.DPHMC(
            model,
            eps=1.0,
            clip_ratio=3.0,
            clip_grad=3.0,
            step_size=1e-3,
            adapt_step_size=False,
            num_steps=options.num_steps,
            num_iterations=10**7,
        ),
        X,
        y,
    )
    if options.memory:
        private(options.iterations)
        print(f"data {size:.0f} MB, Python with its libraries {bare:.0f} MB, peak of the run {memory('VmHWM'):.0f} MB")
        return

    plain = stepper(
        numpyro.infer.HMC(
            model,
            step_size=1e-3,
            adapt_step_size=False,
            adapt_mass_matrix=False,
            num_steps=options.num_steps,
            trajectory_length=None,
        ),
        X,
        y,
    )
    times = {"numpyro HMC": [], "DPHMC": []}
    for run in (plain, private):  # compile
        run(1)
    for _ in range(options.rounds):
        for name, run in (("numpyro HMC", plain), ("DPHMC", private)):
            start = time.perf_counter()
            run(options.iterations)
            times[name].append((time.perf_counter() - start) / options.iterations)
    print(f"jax {jax.__version__}, {X.shape[0]:,} rows x {X.shape[1]} columns, {options.num_steps} leapfrog steps")
    for name, values in times.items():
        print(f"  {name:<12} {statistics.median(values) * 1e3:8.2f} ms per iteration (best {min(values) * 1e3:.2f})")
    ratios = [b / a for a, b in zip(times["numpyro HMC"], times["DPHMC"], strict=True)]
    print(f"  ratio        {statistics.median(ratios):8.2f} (rounds from {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
