"""Can one row make everybody wait? Time of JAX's special functions on 1,000 numbers of which one is hostile.

A function that iterates until its slowest element has converged tells by its time about one row, and may stall a run.
Of each function the time with one hostile number (or pair of numbers) is shown, as a multiple of the time without: the
worst over a grid of them, the fastest of 30 calls. What is refused of a row (`numpyro_dp.privacy.isolation`) is marked.

    python benchmarks/hostile_time.py
"""

import itertools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.special as special
import numpy as np
from jax import lax

from numpyro_dp.privacy.isolation import RowsMeetError, alone

_ENDS = [0.0, 1e-45, 1e-38, 1e-10, 1e-3, 0.3, 0.5, 1 - 6e-8, 1.0, 1 + 2e-7, 2.0, 7.5, 30.0, 170.0]
_ENDS += [1e3, 1e4, 1e5, 1e6, 3e7, 1e9, 1e15, 1e30, 3e38, np.inf]
HOSTILE = [np.nan, *_ENDS, *(-value for value in _ENDS)]
ENOUGH = 2.0  # seconds

OF_TWO = {
    "igamma": lax.igamma,
    "igammac": lax.igammac,
    "igamma_grad_a": lax.igamma_grad_a,
    "random_gamma_grad": lax.random_gamma_grad,
    "betainc": lambda a, x: lax.betainc(a, a, jnp.clip(x, 0, 1)),
    "betainc at 1/2": lambda a, b: lax.betainc(a, b, jnp.full_like(a, 0.5)),
    "polygamma": lambda a, x: lax.polygamma(jnp.round(a), x),
    **{name: getattr(lax, name) for name in ("zeta", "pow", "atan2", "rem", "nextafter")},
}
_NAMES = """lgamma digamma erf erfc erf_inv bessel_i0e bessel_i1e exp exp2 log log1p expm1 sin cos tan asin acos atan
sinh cosh tanh asinh acosh atanh logistic rsqrt cbrt sqrt"""
OF_ONE = {name: getattr(lax, name) for name in _NAMES.split()}
OF_ONE |= {name: getattr(special, name) for name in ("i0", "spence", "expi", "ndtri", "log_ndtr")}


def seconds(function: Callable, arrays: list[np.ndarray], repeats: int) -> float:
    """Of the fastest call."""
    best = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        best = min(best, time.perf_counter() - start)
        if best > ENOUGH:
            break
    return best


def worst(function: Callable, number: int) -> tuple[float, float, tuple]:
    """Usual time, the longest one, and of which numbers."""
    program, usual = jax.jit(function), [np.full(1000, value, np.float32) for value in (1.5, 0.7)[:number]]

    def time_of(values: tuple, repeats: int) -> float:
        arrays = [array.copy() for array in usual]
        for array, value in zip(arrays, values, strict=True):
            array[7] = value
        return seconds(program, arrays, repeats)

    jax.block_until_ready(program(*usual))
    times = {}
    for values in itertools.product(HOSTILE, repeat=number):
        times[values] = time_of(values, 2)
        if times[values] > ENOUGH:
            break
    slowest = sorted(times, key=times.__getitem__)[-5:]  # once more: the machine may have been busy
    longest, where = max((time_of(values, 30), values) for values in slowest)
    return seconds(program, usual, 30), longest, where


def main() -> None:
    print(f"JAX {jax.__version__}, {jax.default_backend()}\n")
    print("| function | usual | worst | at | of a row |\n|---|---|---|---|---|")
    for number, functions in ((2, OF_TWO), (1, OF_ONE)):
        for name, function in functions.items():
            usual, longest, where = worst(function, number)
            try:
                alone(function, *[jnp.float32(0.5)] * number)
                allowed = "allowed"
            except RowsMeetError:
                allowed = "refused"
            print(f"| {name} | {usual * 1e3:.2f} ms | {longest / usual:.1f} times | {where} | {allowed} |", flush=True)


if __name__ == "__main__":
    main()
