"""Batches of rows. The object that draws a batch also names the privacy mechanism that the batch makes (P7).

============================  ============================================================  ============================
`batch_size=`                 each draw                                                     accounted as
============================  ============================================================  ============================
None                          all rows                                                      Gaussian, exactly
a number, or                  every row independently with the same probability             Poisson-subsampled Gaussian
`PoissonBatches`
`PoissonBatches` with         the same, and of more than `max_batch_size` rows a uniformly  truncated Poisson-subsampled
`max_batch_size`              random choice of that many                                    Gaussian
`FixedBatches`                so many distinct rows, uniformly at random                    without replacement
============================  ============================================================  ============================

Batches are drawn on the host in O(batch) time and memory, Poisson batches exactly so
(`numpyro_dp.privacy.exact_sampling`). They are secret, as noise is: amplification by subsampling holds only against who
does not know which rows were drawn. No batch is ever divided by its realised size.

Proof: docs/proofs/batches.md.
"""

import dataclasses
import functools
import math
import operator
from typing import NamedTuple

import jax
import numpy as np
import scipy  # its `stats`, which take long to import, come when they are asked for

from numpyro_dp.privacy.exact_sampling import Words, poisson_rows
from numpyro_dp.privacy.mechanisms import (
    BarkerBatch,
    FixedBatchGaussian,
    Gaussian,
    LogisticBit,
    Mechanism,
    PoissonGaussian,
    TruncatedPoissonGaussian,
    size_is_public,
)

OVERFLOW = 1e-40
"""Probability that a Poisson batch does not fit its buffer. Accounted for: see `PoissonGaussian`."""
SMALLEST_RATE = 1e-15
"""Below, the gaps between rows are not resolved, and no table has a row in a batch."""


class Batch(NamedTuple):
    """Rows that were drawn, in a buffer of fixed length; secret.

    :ivar indices: row numbers; those beyond `size` do not count.
    :ivar size: how many rows were drawn; may be 0.
    """

    indices: jax.Array
    size: jax.Array


@dataclasses.dataclass(frozen=True)
class AllRows:
    """No subsampling."""

    def check(self, num_rows: int, neighboring_relation: str) -> None:
        """Nothing to refuse."""

    def mechanism(self, noise_multiplier: float, num_rows: int) -> Mechanism:
        return Gaussian(noise_multiplier)

    def accounts_for(self, mechanism: Mechanism, num_rows: int) -> bool:
        """Whether a release on all rows may be accounted for as this mechanism."""
        return isinstance(mechanism, Gaussian | LogisticBit)


@dataclasses.dataclass(frozen=True)
class PoissonBatches:
    """Every row is drawn independently with probability `rate`.

    :param batch_size: expected number of rows, from which the rate follows as ``batch_size / n``; n must be public.
    :param rate: or the probability itself; needed under add/remove, where n is private.
    :param max_batch_size: never more rows than that: of a larger batch a random subset is taken, and the mechanism is
        accounted as truncated, which needs a public n. Default: as many as ever occur.
    """

    batch_size: float | None = None
    rate: float | None = None
    max_batch_size: int | None = None

    def __post_init__(self):
        # Of numbers of lower precision the accounting would be in theirs.
        for name, kind in (("batch_size", float), ("rate", float), ("max_batch_size", operator.index)):
            if (given := getattr(self, name)) is not None:
                object.__setattr__(self, name, kind(given))
        if (self.batch_size is None) == (self.rate is None):
            raise ValueError("give PoissonBatches either batch_size, the expected number of rows, or rate")
        if self.rate is not None and not SMALLEST_RATE <= self.rate <= 1:
            raise ValueError(f"rate must lie in [{SMALLEST_RATE:g}, 1], got {self.rate}")
        if self.batch_size is not None and not 0 < self.batch_size < math.inf:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {self.max_batch_size}")

    def check(self, num_rows: int, neighboring_relation: str) -> None:
        """Refuse what cannot be drawn, or not be accounted for.

        :raises ValueError: with the way out.
        """
        if neighboring_relation == "add_or_remove_one":
            if self.batch_size is not None:
                raise ValueError(
                    "under 'add_or_remove_one' n is private, and a batch size would be a rate times n: give "
                    "batch_size=PoissonBatches(rate=...)"
                )
            if self.max_batch_size is not None:
                raise ValueError(
                    "the privacy of a truncated batch depends on n, which is private under 'add_or_remove_one': "
                    "leave max_batch_size out"
                )
        elif self.batch_size is not None and self.batch_size > num_rows:
            raise ValueError(f"batch_size is {self.batch_size:g}, but there are only {num_rows} rows")
        elif self.probability(num_rows) < SMALLEST_RATE:
            raise ValueError(f"batch_size is {self.batch_size:g} of {num_rows} rows, a rate below {SMALLEST_RATE:g}")

    def probability(self, num_rows: int) -> float:
        """Probability with which each row is drawn."""
        return self.rate if self.rate is not None else self.batch_size / num_rows  # type: ignore[operator]

    def capacity(self, num_rows: int) -> int:
        """Length of the buffer. Under add/remove it follows from the private n and must not be released."""
        if self.max_batch_size is not None:
            return min(self.max_batch_size, num_rows)
        return _capacity(num_rows, self.probability(num_rows))

    def inclusion(self, num_rows: int) -> float:
        """Probability with which each row is in a batch: `probability`, less what truncation takes away."""
        rate, most = self.probability(num_rows), self.max_batch_size
        if most is None:
            return rate
        within = rate * scipy.stats.binom.cdf(most - 1, num_rows - 1, rate)  # E[K; K <= most] / n
        return float(within + most / num_rows * scipy.stats.binom.sf(most, num_rows, rate))

    def weight(self, num_rows: int) -> float:
        """What a sum over a batch is multiplied by to estimate the sum over all rows."""
        return 1 / self.inclusion(num_rows)

    def mechanism(self, noise_multiplier: float, num_rows: int) -> Mechanism:
        """What one Gaussian release on a batch is to the accountant."""
        rate = self.probability(num_rows)
        if self.max_batch_size is not None and self.max_batch_size < num_rows:
            return TruncatedPoissonGaussian(noise_multiplier, rate, num_rows, self.max_batch_size)
        return Gaussian(noise_multiplier) if rate == 1 else PoissonGaussian(noise_multiplier, rate, OVERFLOW)

    def accounts_for(self, mechanism: Mechanism, num_rows: int) -> bool:
        """Whether a release on such a batch may be accounted for as this mechanism."""
        return mechanism == self.mechanism(mechanism.noise_multiplier, num_rows)

    def draw(self, words: Words, num_rows: int) -> tuple[np.ndarray, int]:
        """Indices in a buffer of length `capacity`, and how many of them count.

        Of more rows than the buffer holds, a uniformly random choice is kept.

        :param words: fresh random words.
        """
        rows, capacity = poisson_rows(self.probability(num_rows), num_rows, words), self.capacity(num_rows)
        if len(rows) > capacity:
            rows = _generator(words).choice(rows, capacity, replace=False, shuffle=False)
        indices = np.zeros(capacity, np.int32)
        indices[: len(rows)] = rows
        return indices, len(rows)


@dataclasses.dataclass(frozen=True)
class FixedBatches:
    """`batch_size` distinct rows, uniformly at random (without replacement). Not under add/remove. Methods are those of
    `PoissonBatches`."""

    batch_size: int

    def __post_init__(self):
        is_whole = isinstance(self.batch_size, int | np.integer) and not isinstance(self.batch_size, bool)
        if not is_whole or self.batch_size < 2:
            raise ValueError(f"batch_size of FixedBatches must be an integer of at least 2, got {self.batch_size!r}")
        object.__setattr__(self, "batch_size", operator.index(self.batch_size))

    def check(self, num_rows: int, neighboring_relation: str) -> None:
        if not size_is_public(neighboring_relation):
            raise ValueError(
                "batches of a fixed size need a public number of rows (neighboring_relation='replace_one'): with a row "
                "more or less the rate itself would change. Use PoissonBatches(rate=...)"
            )
        if self.batch_size > num_rows:
            raise ValueError(f"batch_size is {self.batch_size}, but there are only {num_rows} rows")

    def capacity(self, num_rows: int) -> int:
        return self.batch_size

    def weight(self, num_rows: int) -> float:
        return num_rows / self.batch_size

    def mechanism(self, noise_multiplier: float, num_rows: int) -> Mechanism:
        return FixedBatchGaussian(noise_multiplier, self.batch_size, num_rows)

    def accounts_for(self, mechanism: Mechanism, num_rows: int) -> bool:
        if isinstance(mechanism, BarkerBatch):
            return (mechanism.batch_size, mechanism.num_rows) == (self.batch_size, num_rows)
        return mechanism == self.mechanism(mechanism.noise_multiplier, num_rows)

    def draw(self, words: Words, num_rows: int) -> tuple[np.ndarray, int]:
        rows = _generator(words).choice(num_rows, self.batch_size, replace=False, shuffle=False)
        return rows.astype(np.int32), self.batch_size


ALL_ROWS = AllRows()
Batches = AllRows | PoissonBatches | FixedBatches


def require_batches(batches: Batches) -> Batches:
    """The same, if it is of our own classes, which draw as they are accounted for.

    :raises TypeError: if it is not.
    """
    if type(batches) not in (AllRows, PoissonBatches, FixedBatches):
        raise TypeError(f"batches are of the classes of {__name__}, got {type(batches).__name__}")
    return batches


def shareable(batches: Batches) -> bool:
    """Whether several data owners can draw them, each from its own rows, with no say in what the others draw."""
    return not isinstance(batches, FixedBatches) and getattr(batches, "max_batch_size", None) is None


def as_batches(batch_size: "int | float | Batches | None") -> Batches:
    """What the argument `batch_size` of a kernel means: a number stands for Poisson batches."""
    if batch_size is None:
        return AllRows()
    if isinstance(batch_size, AllRows | PoissonBatches | FixedBatches):
        return require_batches(batch_size)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | float | np.integer | np.floating):
        raise TypeError(
            "batch_size must be a number (the expected size of Poisson batches), PoissonBatches or FixedBatches, "
            f"got {batch_size!r}"
        )
    return PoissonBatches(float(batch_size))


@functools.cache
def _capacity(num_rows: int, rate: float) -> int:
    """The smallest buffer that overflows with probability at most `OVERFLOW`."""
    low, high = 1, num_rows
    while low < high:  # scipy's own inverse loses such small probabilities
        middle = (low + high) // 2
        if scipy.stats.binom.sf(middle, num_rows, rate) <= OVERFLOW:
            high = middle
        else:
            low = middle + 1
    return min(low, num_rows)


def _generator(words: Words) -> np.random.Generator:
    """A freshly keyed generator. Its output is secret and never released."""
    return np.random.Generator(np.random.Philox(key=words(2)))
