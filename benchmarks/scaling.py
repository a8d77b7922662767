"""How does the time per iteration fall with the number of devices, and stay the same as rows grow with it?

Each device is a CPU core to which the benchmark pins itself: one device on one core; two devices in one process on two
cores; two processes with a core each, which share the table by `jax.distributed`. Strong scaling: the same table
throughout. Weak scaling: the same number of rows on each device. Beside them NumPyro's HMC on one core and on two:
what a second core of this machine adds. Then the time for a sum of d numbers to travel, and what follows from these
constants for n = 1e9, d = 100.

    python benchmarks/scaling.py --rows 1e6 --columns 20
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time

CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    number = {"type": lambda text: int(float(text))}
    parser.add_argument("--rows", **number, default=1_000_000)
    parser.add_argument("--columns", **number, default=20)
    parser.add_argument("--iterations", type=int, default=5, help="timed together")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options, **json.loads(options.worker))
    if len(CORES) < 2:
        print("one core: there is nothing to scale over")
        return None
    half, rows = options.rows // 2, options.rows
    one, two = (run(options, rows, 1, 1, cores, "HMC")["iteration"] * 1e3 for cores in (1, 2))
    print(f"NumPyro's HMC, {rows:,} rows: {one:.1f} ms on one core, {two:.1f} on two ({two / one:.2f})\n")
    print(f"{options.columns} columns, 10 leapfrog steps, one core for each device; ms per iteration")
    print("| scaling | rows | one device | two devices, one process | two devices, two processes |")
    print("|---|---|---|---|---|")
    seconds = {}
    for name, one, two in (("strong", rows, rows), ("weak", half, rows)):
        alone, devices, processes = (
            run(options, rows=n, processes=p, devices=k) for n, p, k in ((one, 1, 1), (two, 1, 2), (two, 2, 1))
        )
        seconds[name] = alone["iteration"]
        cells = [f"{alone['iteration'] * 1e3:.1f}"]
        cells += [
            f"{x['iteration'] * 1e3:.1f} ({x['iteration'] / alone['iteration']:.2f})" for x in (devices, processes)
        ]
        print(f"| {name} | {one:.0e} to {two:.0e} | " + " | ".join(cells) + " |", flush=True)
    travel = processes["sum"]
    per_number = seconds["strong"] / rows / options.columns
    print(f"\na sum of {3 * options.columns} int32 over two processes: {travel * 1e6:.0f} us")
    print(f"an iteration on one core: {per_number * 1e9:.2f} ns per number of the table")
    print("\nprojected for n = 1e9, d = 100, and cores like these: all numbers are read by 8 or 64 devices, and 10")
    print("gradients and a ratio travel in log2(devices) stages each")
    for devices in (8, 64):
        reading = 1e11 * per_number / devices
        travelling = 11 * travel * (devices.bit_length() - 1)
        print(f"  {devices:>3} devices: {reading:.1f} s to read, {travelling * 1e3:.1f} ms to travel")
    return None


def run(
    options: argparse.Namespace, rows: int, processes: int, devices: int, cores: int = 0, sampler: str = "DPHMC"
) -> dict:
    """Start the workers, each on so many cores (default: as it has devices), and wait for what the first one says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    workers = []
    for index in range(processes):
        task = {"rows": rows, "processes": processes, "devices": devices, "index": index, "address": address}
        task |= {"cores": cores or devices, "sampler": sampler}
        sizes = ["--columns", str(options.columns), "--rounds", str(options.rounds)]
        sizes += ["--iterations", str(options.iterations), "--worker", json.dumps(task)]
        workers.append(subprocess.Popen([sys.executable, __file__, *sizes], stdout=subprocess.PIPE, text=True))
    said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit("\n".join(said))
    return json.loads(said[0].splitlines()[-1])


def work(
    options: argparse.Namespace,
    rows: int,
    processes: int,
    devices: int,
    index: int,
    address: str,
    cores: int,
    sampler: str,
) -> None:
    os.sched_setaffinity(0, CORES[index * cores : (index + 1) * cores])  # before JAX counts cores
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp
    import numpy as np
    from speed import dphmc, hmc, stepper, table

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, processes, index)
    total = processes * devices
    data = [np.asarray(x) for x in table(rows, options.columns)]
    if total > 1:
        mesh = jax.make_mesh((total,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
        own = slice(index * rows // processes, (index + 1) * rows // processes)
        data = [jax.make_array_from_process_local_data(sharding, x[own]) for x in data]
    else:
        data = [jnp.asarray(x) for x in data]
    iterate, _ = stepper({"HMC": hmc, "DPHMC": dphmc}[sampler](), tuple(data), as_arguments=total > 1)
    iterate(1)
    found = {"iteration": best(iterate, options)}
    if total > 1:
        found["sum"] = best(summing(mesh, 3 * options.columns), options, 200)
    print(json.dumps(found))
    if processes > 1:
        jax.distributed.shutdown()


def best(function, options: argparse.Namespace, iterations: int | None = None) -> float:
    """The median over rounds of the seconds for one of so many iterations."""
    count, times = iterations or options.iterations, []
    for _ in range(options.rounds):
        start = time.perf_counter()
        function(count)
        times.append((time.perf_counter() - start) / count)
    return sorted(times)[len(times) // 2]


def summing(mesh, size: int):
    """A program that adds up `size` numbers of each device, so many times."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def once(_, x):
        return lax.psum(x, "rows") // mesh.size

    def loop(x, count):
        return lax.fori_loop(0, count, once, x)

    whole = jax.sharding.PartitionSpec()
    program = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False))
    return lambda count: jax.block_until_ready(program(jnp.ones(size, jnp.int32), count))


if __name__ == "__main__":
    main()
