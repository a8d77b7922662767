"""The kinds of private release: what one of them costs, as a Rényi curve and as a privacy loss distribution.

A mechanism is a frozen description of one release (its noise, and how its batch was drawn). `numpyro_dp.accounting`
composes any sequence of them. All of them measure noise in one unit,

    ``noise_multiplier = (sd of the noise, or scale of the logistic noise) / sensitivity under the relation in force``,

where the sensitivity of a sum of per-row values of norm at most ``B`` is ``2 B`` under ``"replace_one"`` and ``B``
under ``"add_or_remove_one"``, for batches as for full sums. (dp_accounting counts noise in units of ``B`` instead:
its noise multiplier is `noise_per_row_bound`.)
"""

import math
from dataclasses import dataclass

from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SampledWithoutReplacementDpEvent,
    TruncatedSubsampledGaussianDpEvent,
    ZCDpEvent,
)

NEIGHBORING_RELATIONS = {
    "replace_one": NeighboringRelation.REPLACE_ONE,
    "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
}


@dataclass(frozen=True)
class Mechanism:
    """One release. See the module's docstring for the unit of `noise_multiplier`; 0 means no noise, at infinite cost."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        _check(self.noise_multiplier >= 0, f"noise_multiplier must be at least 0, got {self.noise_multiplier}")

    @property
    def rho(self) -> float | None:
        """The zCDP parameter: the Rényi curve is at most ``order * rho`` at every order. None: there is none."""
        return None

    def event(self, relation: str) -> DpEvent:
        """The release as dp_accounting describes it.

        :raises ValueError: if dp_accounting has no event for it.
        """
        raise ValueError(f"dp_accounting has no event for {self.describe()}")

    def rdp(self, order: float, relation: str) -> float:
        """Rényi divergence of `order` (above 1) between the releases on the two worst neighbouring tables."""
        raise NotImplementedError

    def pld(self, relation: str, interval: float):
        """dp_accounting's privacy loss distribution on multiples of `interval`, pessimistic; None: there is none."""
        return None

    def describe(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """A sum over all rows, with Gaussian noise."""

    @property
    def rho(self) -> float:
        return math.inf if self.noise_multiplier == 0 else 1 / (2 * self.noise_multiplier**2)

    def event(self, relation: str) -> DpEvent:
        return GaussianDpEvent(noise_per_row_bound(self.noise_multiplier, relation))

    def describe(self) -> str:
        return "Gaussian, all rows"


@dataclass(frozen=True)
class PoissonGaussian(Mechanism):
    """A sum over a Poisson batch (each row with probability `rate`, independently), with Gaussian noise.

    :param overflow: probability that one draw deviates from exact Poisson sampling (a buffer of fixed size overflows).
        Composition adds ``count * overflow * (1 + e^eps)`` to delta.
    """

    rate: float
    overflow: float = 0.0

    def event(self, relation: str) -> DpEvent:
        noise = GaussianDpEvent(noise_per_row_bound(self.noise_multiplier, relation))
        return PoissonSampledDpEvent(self.rate, noise)

    def describe(self) -> str:
        return f"Gaussian, Poisson batch at rate {self.rate:g}"


@dataclass(frozen=True)
class TruncatedPoissonGaussian(Mechanism):
    """A sum over a Poisson batch, of which a uniformly random subset is kept if it exceeds `max_batch_size` rows."""

    rate: float
    num_rows: int
    max_batch_size: int

    def event(self, relation: str) -> DpEvent:
        noise = noise_per_row_bound(self.noise_multiplier, relation)
        return TruncatedSubsampledGaussianDpEvent(self.num_rows, self.rate, self.max_batch_size, noise)

    def describe(self) -> str:
        return f"Gaussian, Poisson batch at rate {self.rate:g} of at most {self.max_batch_size} rows"


@dataclass(frozen=True)
class FixedBatchGaussian(Mechanism):
    """A sum over `batch_size` rows drawn without replacement, with Gaussian noise. ``"replace_one"`` only."""

    batch_size: int
    num_rows: int

    def event(self, relation: str) -> DpEvent:
        noise = GaussianDpEvent(self.noise_multiplier)
        return SampledWithoutReplacementDpEvent(self.num_rows, self.batch_size, noise)

    def describe(self) -> str:
        return f"Gaussian, batch of {self.batch_size} of {self.num_rows} rows without replacement"


@dataclass(frozen=True)
class LogisticBit(Mechanism):
    """One bit, the sign of a sum over all rows plus logistic noise: Barker's acceptance test.

    The logit of the bit moves by at most ``1 / noise_multiplier`` between neighbouring tables.
    """

    @property
    def rho(self) -> float:
        return math.inf if self.noise_multiplier == 0 else 1 / (8 * self.noise_multiplier**2)

    def event(self, relation: str) -> DpEvent:
        return ZCDpEvent(self.rho)

    def describe(self) -> str:
        return "logistic accept bit, all rows"


@dataclass(frozen=True)
class BarkerBatch(Mechanism):
    """The noisy log ratio of a batch drawn without replacement, topped up to total variance `variance`.

    ``kappa = 1 / noise_multiplier`` bounds the standard deviation that the batch itself contributes.
    ``"replace_one"`` only.
    """

    batch_size: int
    num_rows: int
    variance: float

    def describe(self) -> str:
        return f"Barker, batch of {self.batch_size} of {self.num_rows} rows, total variance {self.variance:g}"


def noise_per_row_bound(noise_multiplier: float, relation: str) -> float:
    """Noise sd over the bound ``B`` of one row's norm, as dp_accounting counts noise under either relation."""
    return (2.0 if relation == "replace_one" else 1.0) * noise_multiplier


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
