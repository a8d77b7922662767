"""How fast is a private run, beside NumPyro's HMC and NUTS, and beside clipping by `vmap(grad)`? Prints tables.

    python benchmarks/speed.py                  # all of it: about half an hour on 2 cores
    python benchmarks/speed.py glm              # time per iteration of logistic regressions
    python benchmarks/speed.py memory           # peak memory of `MCMC.run`, each in a process of its own
    python benchmarks/speed.py effective        # time per effective draw, compilation included
    python benchmarks/speed.py chains           # vectorized and sequential chains
    python benchmarks/speed.py profile          # where an iteration's time goes
    python benchmarks/speed.py zoo              # time per iteration and to compile, for the models of the tests

What is compared is run in turn, in one process, several rounds; ratios are of the same round, and their median is
printed. As in `MCMC.run`, the programs hold the table as a constant, unless it is large.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
from jax import lax

import numpyro_dp
from numpyro_dp.chain.target import PrivateTarget

NUM_STEPS = 10  # leapfrog steps
SHAPES = ((100_000, 20), (100_000, 200), (1_000_000, 20))
LARGE = ((1_000_000, 50), (10_000_000, 20), (1_000_000, 200))


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def table(rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    X = 2 * rng.random((rows, columns), np.float32) - 1
    logits = X @ np.linspace(-1, 1, columns, dtype=np.float32)
    y = rng.random(rows, np.float32) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(X), jnp.asarray(y, jnp.int32)


# -- Kernels -----------------------------------------------------------------------------------------------------------


def hmc(of=model, **options):
    """NumPyro's own, with steps that are fixed."""
    fixed = {"step_size": 1e-3, "adapt_step_size": False, "adapt_mass_matrix": False}
    return numpyro.infer.HMC(of, **fixed, num_steps=NUM_STEPS, trajectory_length=None, **options)


def dphmc(of=model, **options):
    clips = {"clip_ratio": 3.0, "clip_grad": 3.0}
    fixed = {"step_size": 1e-3, "adapt_step_size": False, "num_iterations": 10**7}
    return numpyro_dp.DPHMC(of, eps=1.0, **clips, **fixed, prepare=False, num_steps=NUM_STEPS, **options)


@contextlib.contextmanager
def per_row_gradients() -> Iterator[None]:
    """Clip by forming each row's gradient, `vmap(grad)`, as if models had no structure."""
    find_structure = PrivateTarget.find_structure
    PrivateTarget.find_structure = lambda self: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        PrivateTarget.find_structure = find_structure  # type: ignore[method-assign]


# -- Timing ------------------------------------------------------------------------------------------------------------


def stepper(
    kernel, args: tuple, kwargs: dict | None = None, as_arguments: bool = False, num_chains: int = 1
) -> tuple[Callable, float]:
    """A function that runs so many iterations in one compiled loop, and the seconds to trace and compile it."""
    kwargs = kwargs or {}
    key = jax.random.key(0)
    state = kernel.init(key if num_chains == 1 else jax.random.split(key, num_chains), 0, None, args, kwargs)

    def loop(state, count, given):
        args_, kwargs_ = given if as_arguments else (args, kwargs)
        return lax.fori_loop(0, count, lambda _, s: kernel.sample(s, args_, kwargs_), state)

    given = (args, kwargs) if as_arguments else None
    start = time.perf_counter()
    compiled = jax.jit(loop).lower(state, 1, given).compile()
    seconds = time.perf_counter() - start
    return lambda count: jax.block_until_ready(compiled(state, count, given)), seconds


def interleaved(runs: dict[str, Callable], iterations: int, rounds: int) -> dict[str, np.ndarray]:
    """Seconds per iteration of each, for all rounds."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(1)
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run(iterations)
            times[name].append((time.perf_counter() - start) / iterations)
    return {name: np.array(values) for name, values in times.items()}


def against(times: dict[str, np.ndarray], name: str, other: str) -> str:
    ratios = times[name] / times[other]
    return f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})"


def milliseconds(values: np.ndarray) -> str:
    return f"{1e3 * np.median(values):.2f}"


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def head(*cells: str) -> None:
    print()
    row(*cells)
    row(*("---" for _ in cells))


# -- The parts ---------------------------------------------------------------------------------------------------------


def glm(options: argparse.Namespace) -> None:
    print(f"\n### An iteration of {NUM_STEPS} leapfrog steps, logistic regression")
    head("rows x columns", "HMC, ms", "DPHMC, ms", "ratio", "by `vmap(grad)`, ratio", "to start, s", "ratio")
    for rows, columns in (options.shape,) if options.shape else SHAPES:
        data = table(rows, columns)
        plain, plain_seconds = stepper(hmc(), data)
        private, seconds = stepper(dphmc(), data)
        with per_row_gradients():
            by_rows, _ = stepper(dphmc(), data)
        runs = {"HMC": plain, "DPHMC": private, "vmap": by_rows}
        times = interleaved(runs, max(2, round(3e7 / (rows * columns))), options.rounds)
        row(
            f"{rows:.0e} x {columns}".replace("+0", ""),
            milliseconds(times["HMC"]),
            milliseconds(times["DPHMC"]),
            against(times, "DPHMC", "HMC"),
            against(times, "vmap", "HMC"),
            f"{seconds:.1f}",
            f"{seconds / plain_seconds:.1f}",
        )


def memory(options: argparse.Namespace) -> None:
    print("\n### Peak memory of `MCMC.run`, MB")
    head("rows x columns", "sampler", "data", "Python and libraries", "peak", "peak without these / data")
    for rows, columns in (options.shape,) if options.shape else SHAPES[:1] + LARGE:
        for sampler in ("HMC", "DPHMC"):
            command = [sys.executable, __file__, "peak", "--shape", str(rows), str(columns), "--sampler", sampler]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            data, bare, peak = (float(word) for word in done.stdout.split())
            shape = f"{rows:.0e} x {columns}".replace("+0", "")
            row(shape, sampler, f"{data:.0f}", f"{bare:.0f}", f"{peak:.0f}", f"{(peak - bare) / data:.2f}")


def peak(options: argparse.Namespace) -> None:
    """In a process of its own: sizes in MB of the data, of the process without them, of its peak during a run."""
    jax.block_until_ready(jnp.ones(3) + 1)
    bare = resident("VmRSS")
    data = table(*options.shape)
    # The making of the table needed more memory than the run.
    Path("/proc/self/clear_refs").write_text("5")
    run = {"num_warmup": 1, "num_samples": 2, "progress_bar": False}
    make, kernel = (numpyro.infer.MCMC, hmc) if options.sampler == "HMC" else (numpyro_dp.MCMC, dphmc)
    mcmc = make(kernel(), **run)
    mcmc.run(jax.random.key(0), *data)
    jax.block_until_ready(mcmc.get_samples())
    print(sum(x.nbytes for x in data) / 2**20, bare, resident("VmHWM"))


def resident(field: str) -> float:
    """VmRSS (now) or VmHWM (peak) of this process, in MB; Linux."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def effective(options: argparse.Namespace) -> None:
    rows, columns = options.shape or SHAPES[0]
    print(f"\n### `MCMC.run`, {rows:,} rows x {columns} columns, 500 + 1,000 iterations, 1 chain")
    head("sampler", "fit, s", "smallest ESS", "ms per effective draw")
    data = table(rows, columns)
    run = {"num_warmup": 500, "num_samples": 1000, "progress_bar": False}
    samplers = {
        "NumPyro NUTS": lambda: numpyro.infer.MCMC(numpyro.infer.NUTS(model), **run),
        # Its default trajectory, of length 2 pi, ends where it began if the posterior is normal.
        "NumPyro HMC, trajectory pi / 2": lambda: numpyro.infer.MCMC(
            numpyro.infer.HMC(model, trajectory_length=np.pi / 2), **run
        ),
        "DPHMC, eps = 1": lambda: numpyro_dp.MCMC(numpyro_dp.DPHMC(model, eps=1.0), **run),
    }
    for name, make in samplers.items():
        start = time.perf_counter()
        mcmc = make()
        mcmc.run(jax.random.key(0), *data)
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["b"])
        seconds = time.perf_counter() - start
        smallest = float(min(np.ravel(az.ess(az.convert_to_dataset({"b": draws}))["b"].values)))
        row(name, f"{seconds:.1f}", f"{smallest:.0f}", f"{1e3 * seconds / smallest:.1f}")


def chains(options: argparse.Namespace) -> None:
    rows, columns = options.shape or SHAPES[0]
    print(f"\n### An iteration of four chains, {rows:,} rows x {columns} columns")
    head("sampler", "one chain, ms", "four vectorized, ms", "vectorized / four times one")
    data = table(rows, columns)
    runs = {}
    for name, make in (("HMC", hmc), ("DPHMC", dphmc)):
        runs[name] = stepper(make(), data)[0]
        runs[name, 4] = stepper(make(), data, num_chains=4)[0]
    times = interleaved(runs, max(2, round(3e7 / (rows * columns))), options.rounds)
    for name in ("HMC", "DPHMC"):
        ratio = np.median(times[name, 4] / times[name] / 4)
        row(name, milliseconds(times[name]), milliseconds(times[name, 4]), f"{ratio:.2f}")


def profile(options: argparse.Namespace) -> None:
    """Programs that do a part of an iteration each."""
    rows, columns = options.shape or SHAPES[0]
    print(f"\n### Where an iteration of DPHMC spends its time, {rows:,} rows x {columns} columns")
    data = table(rows, columns)
    once, z = jax.ensure_compile_time_eval, jnp.full(columns, 0.01)

    def density(z, private):
        X, y = private
        return jnp.sum(dist.Bernoulli(logits=X @ z).log_prob(y))

    one_row = [jax.ShapeDtypeStruct((1, *part.shape[1:]), part.dtype) for part in data]
    structure = numpyro_dp.fast.row_structure.find_structure(density, jax.ShapeDtypeStruct(z.shape, z.dtype), one_row)
    sums = numpyro_dp.privacy.structured.StructuredRows(structure, data, z.size, once)

    def repeated(part: Callable) -> Callable:
        def loop(z, count):
            return lax.fori_loop(0, count, lambda _, z: z + 0 * lax.optimization_barrier(part(z)), z)

        compiled = jax.jit(loop)
        return lambda count: jax.block_until_ready(compiled(z, count))

    parts = {
        "iteration": stepper(dphmc(), data)[0],
        "clipped gradient": repeated(lambda z: sums.gradient(z, 3.0).hi.astype(z.dtype)),
        "clipped log ratio": repeated(lambda z: sums.log_ratio(z, z + 0.01, 3.0).hi.astype(z.dtype)),
        "plain gradient": repeated(jax.grad(lambda z: density(z, data))),
        "an iteration of 10 rows": stepper(dphmc(), tuple(x[:10] for x in data))[0],
    }
    times = interleaved(parts, max(20, round(3e7 / (rows * columns))), options.rounds)
    head("part", "times", "ms each", "share of the iteration")
    for name, count in (
        ("clipped gradient", NUM_STEPS),
        ("clipped log ratio", 1),
        ("an iteration of 10 rows", 1),
    ):
        share = count * np.median(times[name]) / np.median(times["iteration"])
        row(name, count, milliseconds(times[name]), f"{share:.0%}")
    row("iteration", 1, milliseconds(times["iteration"]), "100%")
    row("(plain gradient of the sum)", "", milliseconds(times["plain gradient"]), "")


def zoo(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from helpers import zoo as models

    rows = 100_000
    print(f"\n### An iteration of {NUM_STEPS} leapfrog steps, models of the tests, {rows:,} rows")
    head("model", "HMC, ms", "DPHMC, ms", "ratio", "to compile, s", "ratio")
    for case in models.CASES:
        try:
            args, kwargs = enlarged(case, rows)
            plain, plain_seconds = stepper(hmc(case.model), args, kwargs)
            private, seconds = stepper(dphmc(case.model, **case.options), args, kwargs)
        except Exception as error:  # a plate of fixed length; latents that HMC cannot sum out
            print(f"<!-- {case.name}: {str(error).splitlines()[0][:90]} -->")
            continue
        times = interleaved({"HMC": plain, "DPHMC": private}, 5, options.rounds)
        row(
            case.name,
            milliseconds(times["HMC"]),
            milliseconds(times["DPHMC"]),
            against(times, "DPHMC", "HMC"),
            f"{seconds:.1f}",
            f"{seconds / plain_seconds:.1f}",
        )


def enlarged(case, rows: int) -> tuple:
    """The arguments of a model with as many rows, repeated."""
    separated = numpyro_dp.model.separate.separate(case.model, case.args, case.kwargs, **case.options)
    leaves, treedef = jax.tree.flatten((case.args, case.kwargs))
    leaves = [
        jnp.asarray(np.resize(np.asarray(leaf), (rows, *np.shape(leaf)[1:]))) if argument.private else leaf
        for leaf, argument in zip(leaves, separated.arguments, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


PARTS = {
    "glm": glm,
    "profile": profile,
    "chains": chains,
    "effective": effective,
    "memory": memory,
    "zoo": zoo,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "peak"], help="default: all of them")
    parser.add_argument("--shape", nargs=2, type=lambda number: int(float(number)), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sampler", choices=("HMC", "DPHMC"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)  # on clip bounds; only time matters
    if options.part == "peak":
        return peak(options)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(f"{date.today()}, {jax.default_backend()}, {os.cpu_count()} cores, {gib:.0f} GiB, JAX {jax.__version__}, ")
    print(f"NumPyro {numpyro.__version__}, float32")
    for name in [options.part] if options.part else PARTS:
        PARTS[name](options)
    return None


if __name__ == "__main__":
    main()
