"""What does noise from the operating system's generator cost, beside noise that could be replayed?

Time of one draw of a release's noise (a number, and a vector of 1,000) from the operating system's entropy, which is
the default; from a secret seed (SHAKE-256); and, in the place of both, NumPy's Philox normals rounded to the same grid.
The draws take turns, so that a busy machine slows all of them alike; the fastest tenth is averaged.

    python benchmarks/noise.py
"""

import time

import numpy as np

from numpyro_dp.privacy.clipping import GRID
from numpyro_dp.privacy.mechanisms import Gaussian
from numpyro_dp.privacy.noise import NoiseSource

MECHANISM, TURNS = Gaussian(3.0), 5_000


def philox(generator: np.random.Generator, size: int) -> np.ndarray:
    return np.rint(MECHANISM.noise_multiplier * 2 * GRID * generator.standard_normal(size)).astype(np.int64)


def main() -> None:
    fresh, seeded, generator = NoiseSource(), NoiseSource(2**127 + 1), np.random.Generator(np.random.Philox(0))
    ways = {
        "operating system": lambda size, turn: fresh.draw((size,), MECHANISM, "replace_one", b""),
        "seed, SHAKE-256": lambda size, turn: seeded.draw((size,), MECHANISM, "replace_one", turn.to_bytes(8, "big")),
        "NumPy's Philox": lambda size, turn: philox(generator, size),
    }
    print("| noise from | 1 number | 1,000 numbers |\n|---|---|---|")
    took: dict[tuple[str, int], list[float]] = {(name, size): [] for name in ways for size in (1, 1000)}
    for turn in range(TURNS):
        for (name, size), times in took.items():
            start = time.perf_counter()
            ways[name](size, turn)
            times.append(time.perf_counter() - start)
    for name in ways:
        cells = [np.mean(np.sort(took[name, size])[: TURNS // 10]) * 1e6 for size in (1, 1000)]
        print(f"| {name} | " + " | ".join(f"{cell:.1f} us" for cell in cells) + " |")


if __name__ == "__main__":
    main()
