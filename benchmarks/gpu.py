"""DPHMC beside NumPyro's HMC on one GPU: time per iteration, and whether sums are those of the CPU.

    python benchmarks/gpu.py        # says so and ends where there is no GPU

Needs JAX with CUDA, `pip install 'jax[cuda12]'`. The tables are those of `speed.py glm`, to which further
arguments are passed on.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from speed import table

from numpyro_dp.fast.row_structure import find_structure
from numpyro_dp.privacy.clipping import GRID
from numpyro_dp.privacy.structured import StructuredRows


def gpu() -> jax.Device | None:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return None


def steps(device: jax.Device) -> np.ndarray:
    """Of a clipped gradient and log ratio of logistic regression, relative to the bound."""
    with jax.default_device(device):
        X, y = (jax.device_put(x, device) for x in table(100_000, 20))
        z = jnp.linspace(-1, 1, 20)

        def density(z, row):
            eta = jnp.sum(row[0] * z)
            return jnp.sum(row[1] * eta - jax.nn.softplus(eta))

        one_row = [jax.ShapeDtypeStruct((1, *part.shape[1:]), part.dtype) for part in (X, y)]
        structure = find_structure(density, jax.ShapeDtypeStruct(z.shape, z.dtype), one_row)
        sums = StructuredRows(structure, (X, y), z.size, jax.ensure_compile_time_eval)
        both = jax.jit(lambda z: (sums.gradient(z, 1.0), sums.log_ratio(z, z + 0.01, 1.0)))(z)
        return np.concatenate([np.ravel(np.asarray(s.hi, float) * 2**24 + np.asarray(s.lo)) for s in both]) / GRID


def main() -> None:
    device = gpu()
    if device is None:
        print("no GPU that JAX can use: nothing to measure")
        return
    print(f"{device.device_kind}, JAX {jax.__version__}")
    apart = np.abs(steps(device) - steps(jax.devices("cpu")[0])).max()
    print(f"clipped sums of 100,000 rows differ from those of the CPU by at most {apart:.2g} bounds")
    subprocess.run([sys.executable, str(Path(__file__).parent / "speed.py"), "glm", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
