"""The kinds of private release: what one of them costs, as a privacy profile and as a privacy loss distribution.

A mechanism is a frozen description of one release: its noise, and how its batch was drawn.
`numpyro_dp.privacy.accounting` composes any sequence of them. All of them measure noise in one unit,

    ``noise_multiplier = (sd of the noise, or scale of the logistic noise) / sensitivity under the relation in force``,

where the sensitivity of a sum of per-row vectors of norm at most ``B`` is ``2 B`` under ``"replace_one"`` and ``B``
under ``"add_or_remove_one"`` and ``"zero_out"``, for sums over batches as for sums over all rows. Under ``"zero_out"``
a neighbour has a row that counts as 0 in the place of one; what is drawn into a batch is the same, so that a Poisson
batch costs what it costs under add/remove.

Each mechanism states its *privacy profile*: the smallest ``delta`` at each ``eps >= 0`` over all neighbouring tables
and everything else that an adversary may choose (the parameters at which the data are asked, the other rows). A pair of
distributions with that profile *dominates* the mechanism, and pairs compose: the privacy loss distribution of a
composition, however adaptive, is the convolution of those of its parts (Zhu, Dong and Wang 2022, Theorems 10 and 11).

Proofs: docs/proofs/gaussian.md, docs/proofs/bits.md, docs/proofs/batches.md.
"""

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import scipy  # its `stats`, which take long to import, come when they are asked for
from scipy.special import log_ndtr

from numpyro_dp.privacy.pld import LossDistribution, Profile, discretized

NEIGHBORING_RELATIONS = ("replace_one", "add_or_remove_one", "zero_out")


def size_is_public(relation: str) -> bool:
    """Whether neighbouring tables have as many rows."""
    return relation != "add_or_remove_one"


def bounds_per_row(relation: str) -> int:
    """The sensitivity of a sum of rows, over the bound of one row's norm."""
    return {"replace_one": 2, "add_or_remove_one": 1, "zero_out": 1}[relation]


_LARGEST_BLOCK_LOSS = 300.0  # keeps exponentials in range
_BITS_PER_BLOCK = 128  # more cost less per bit by a fraction of a percent, and take longer: see `LogisticBits`


@dataclass(frozen=True)
class Mechanism:
    """One release. For the unit of `noise_multiplier` see the module; 0 means no noise, at infinite cost."""

    noise_multiplier: float

    def __post_init__(self) -> None:
        finite = 0 <= self.noise_multiplier < math.inf
        _check(finite, f"noise_multiplier must be at least 0 and finite, got {self.noise_multiplier}")

    @property
    def rho(self) -> float | None:
        """The zCDP parameter: Rényi divergences of any order are at most ``order * rho``. None: there is none."""
        return None

    def check_relation(self, relation: str) -> None:
        """Check that the release is private under `relation`.

        :raises ValueError: if `relation` is unknown, or the release is not private under it.
        """
        check_relation(relation)

    def profiles(self, relation: str) -> tuple[Profile, Profile]:
        """The profile in one direction (the table with the row against the one without it) and in the other."""
        raise NotImplementedError

    def pld(self, relation: str, interval: float) -> "tuple[LossDistribution, ...]":
        """The privacy loss on multiples of `interval`, rounded pessimistically; one, or one for each direction."""
        return discretized(*self.profiles(relation), interval)

    def blocks(self, count: int) -> "list[tuple[Mechanism, int]]":
        """What to compose for `count` of these releases; together they cost at least as much."""
        return [(self, count)]

    def describe(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Gaussian(Mechanism):
    """A sum over all rows, with Gaussian noise."""

    @property
    def rho(self) -> float:
        return math.inf if self.noise_multiplier == 0 else 0.5 / self.noise_multiplier / self.noise_multiplier

    def profiles(self, relation: str) -> tuple[Profile, Profile]:
        return _symmetric(functools.partial(_gaussian_delta, shift=1 / self.noise_multiplier))

    def describe(self) -> str:
        return "Gaussian, all rows"


@dataclass(frozen=True)
class PoissonGaussian(Mechanism):
    """A sum over a Poisson batch (each row with probability `rate`, independently), with Gaussian noise.

    The worst case has one row that is always at the bound. Under add/remove and zero-out it shifts the noise by
    ``1 / noise_multiplier`` with probability `rate`. Under replace-one it shifts it by half of that, upwards in one
    table and downwards in the other. These pairs, and no others, are what `rate` may be used with: a batch of fixed
    size is *not* a Poisson batch (`FixedBatchGaussian`).

    :param overflow: probability that one draw deviates from exact Poisson sampling (a buffer of fixed size overflows).
        Composition adds ``count * overflow * (1 + e^eps)`` to delta; the methods here describe exact Poisson sampling.
    """

    rate: float
    overflow: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self.rate)
        _check(0 <= self.overflow < 1, f"overflow must be a probability below 1, got {self.overflow}")

    def profiles(self, relation: str) -> tuple[Profile, Profile]:
        shift = 1 / noise_per_row_bound(self.noise_multiplier, relation)
        return _poisson_profiles(self.rate, shift, relation)

    def describe(self) -> str:
        return f"Gaussian, Poisson batch at rate {self.rate:g}"


@dataclass(frozen=True)
class TruncatedPoissonGaussian(Mechanism):
    """A sum over a Poisson batch, of which a uniformly random subset is kept if it exceeds `max_batch_size` rows.

    Let the row in question be sampled last. With probability ``t = P(Binomial(num_rows - 1, rate) >= max_batch_size)``
    the others fill the batch, and then the row takes the place of another one with probability ``p``: a replacement,
    which shifts the noise by twice as much as a row that joins. Otherwise it joins a batch that has room. The adversary
    may be told which: the profile is the mixture of the two (https://arxiv.org/abs/2508.15089, as in dp_accounting's
    ``TruncatedSubsampledGaussianDpEvent``).
    """

    rate: float
    num_rows: int
    max_batch_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate(self.rate)
        _check_positive("num_rows", self.num_rows)
        _check_positive("max_batch_size", self.max_batch_size)

    @property
    def full(self) -> tuple[float, float]:
        """Probability that the other rows fill the batch, and that the row then takes the place of one of them."""
        full = float(scipy.stats.binom.sf(self.max_batch_size - 1, self.num_rows - 1, self.rate))
        if full == 0.0:
            return 0.0, self.rate
        overfull = float(scipy.stats.binom.sf(self.max_batch_size, self.num_rows, self.rate))
        return full, min(self.rate, overfull * self.max_batch_size / (full * self.num_rows))

    def profiles(self, relation: str) -> tuple[Profile, Profile]:
        full, rate = self.full
        shift = 1 / noise_per_row_bound(self.noise_multiplier, relation)
        roomy = _poisson_profiles(self.rate, shift, relation)
        if full == 0.0:
            return roomy
        replaced, _ = _poisson_profiles(rate, 2 * shift, "replace_one")

        def mixture(profile: Profile) -> Profile:
            return lambda eps: (1 - full) * profile(eps) + full * replaced(eps)

        return _symmetric(mixture(roomy[0])) if roomy[0] is roomy[1] else (mixture(roomy[0]), mixture(roomy[1]))

    def describe(self) -> str:
        return f"Gaussian, Poisson batch at rate {self.rate:g} of at most {self.max_batch_size} rows"


@dataclass(frozen=True)
class FixedBatchGaussian(Mechanism):
    """A sum over `batch_size` rows drawn without replacement, with Gaussian noise. Not under add/remove.

    Profile: ``rate * delta_G(log(1 + (e^eps - 1) / rate))`` with ``rate = batch_size / num_rows`` and ``delta_G`` the
    profile of the noise on one batch (Balle, Barthe and Gaboardi 2018, Theorem 11), the same in both directions. It
    compares batches that differ in one row: with and without the row in question a batch has another row in its place.
    So under ``"zero_out"``, too, the noise on one batch hides ``2 B``.
    """

    batch_size: int
    num_rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_batch(self.batch_size, self.num_rows)

    def noise_per_replacement(self, relation: str) -> float:
        """Noise sd over the distance ``2 B`` of two batches that differ in one row."""
        return self.noise_multiplier * bounds_per_row(relation) / 2

    @property
    def rate(self) -> float:
        return self.batch_size / self.num_rows

    def check_relation(self, relation: str) -> None:
        check_relation(relation)
        _check(
            size_is_public(relation),
            f"{self.describe()}: a batch of fixed size is not private under {relation!r} (adding a row changes the "
            "number of rows, which this sampling uses): use Poisson batches",
        )

    def profiles(self, relation: str) -> tuple[Profile, Profile]:
        self.check_relation(relation)
        shift = 1 / self.noise_per_replacement(relation)
        return _symmetric(_amplified(functools.partial(_gaussian_delta, shift=shift), self.rate))

    def describe(self) -> str:
        return f"Gaussian, batch of {self.batch_size} of {self.num_rows} rows without replacement"


@dataclass(frozen=True)
class LogisticBit(Mechanism):
    """One bit, the sign of a sum over all rows plus logistic noise: Barker's acceptance test.

    The logit of the bit moves by at most ``1 / noise_multiplier`` between neighbouring tables, so the release is that
    of a bounded-range mechanism: ``rho = 1 / (8 * noise_multiplier**2)``, and pure differential privacy.
    """

    @property
    def rho(self) -> float:
        return math.inf if self.noise_multiplier == 0 else 0.125 / self.noise_multiplier / self.noise_multiplier

    def profiles(self, relation: str) -> tuple[Profile, Profile]:
        return LogisticBits(self.noise_multiplier, 1).profiles(relation)

    def blocks(self, count: int) -> list[tuple[Mechanism, int]]:
        length = max(1, min(_BITS_PER_BLOCK, int(_LARGEST_BLOCK_LOSS * self.noise_multiplier)))
        whole, rest = divmod(count, length)
        blocks: list[tuple[Mechanism, int]] = []
        if whole:
            blocks.append((LogisticBits(self.noise_multiplier, length), whole))
        if rest:
            blocks.append((LogisticBits(self.noise_multiplier, rest), 1))
        return blocks

    def describe(self) -> str:
        return "logistic accept bit, all rows"


@dataclass(frozen=True)
class LogisticBits(Mechanism):
    """`length` successive `LogisticBit` releases as one, exactly as private as they are together.

    The profile of a single bit is attained at logits that depend on eps, so the pair that has this profile is worse
    than any logit, by 4/3 in ``rho``. An adversary who chooses each logit after having seen the bits before it attains

        ``D_k(eps) = max_t  p(t) D_(k-1)(eps - t) + (1 - p(t)) D_(k-1)(eps - t + Delta)``,
        ``p(t) = (1 - e^(t - Delta)) / (1 - e^-Delta)``, ``0 <= t <= Delta = 1 / noise_multiplier``,

    with ``t`` the loss of the bit's first value (in the notation of Dong, Durfee and Rogers 2020, who introduced this
    parametrisation), and no adversary attains more. Evaluated on a grid that divides ``Delta``, rounded up: ``D_k`` is
    convex in ``e^eps``, hence below its chords, and on a chord the maximum over ``t`` has a closed form.
    """

    length: int

    def profiles(self, relation: str) -> tuple[Profile, Profile]:
        shift = 1 / self.noise_multiplier
        if self.length == 1:
            return _symmetric(functools.partial(_bit_delta, shift=shift))
        grid, deltas = _logistic_profile(shift, self.length)
        return _symmetric(lambda eps: _chords(eps, grid, deltas))

    def describe(self) -> str:
        return f"{self.length} logistic accept bits, all rows"


@dataclass(frozen=True)
class BarkerBatch(Mechanism):
    """The log ratio of a batch drawn without replacement, with noise up to total variance `variance`.

    From the per-row log ratios ``r`` of the batch, each clipped to ``c``, scaled by ``s = num_rows / batch_size``
    (times the tempering exponent), one release is ``Normal(s sum(r), variance - s^2 sum((r - mean(r))^2))``. With
    ``kappa = s c sqrt(batch_size)`` the batch variance is at most ``kappa^2``, which must stay below `variance`.
    Here ``noise_multiplier = 1 / kappa``. ``"replace_one"`` only. Heikkilä, Jälkö, Dikmen and Honkela (2019), section
    3.3, have ``kappa = 1, variance = 2``; their bound on the release (Theorem 2) is much looser than the one here: a
    replaced row moves the mean by at most ``2 kappa / sqrt(b)`` and the batch variance by at most
    ``4 kappa^2 (1 - 1/b) / b``.
    """

    batch_size: int
    num_rows: int
    variance: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_batch(self.batch_size, self.num_rows)
        _check(self.batch_size > 1, "batch_size must be at least 2: one row has no variance")
        _check(self.variance > 0, f"variance must be positive, got {self.variance}")

    @property
    def rate(self) -> float:
        return self.batch_size / self.num_rows

    @property
    def worst(self) -> tuple[float, float] | None:
        """Squared shift of the mean over the smallest variance, and growth of the variance over it; None: unbounded."""
        if self.noise_multiplier == 0:
            return None
        kappa2 = self.noise_multiplier**-2
        smallest = self.variance - kappa2
        if smallest <= 0:
            return None
        shift2 = 4 * kappa2 / (self.batch_size * smallest)
        return shift2, shift2 * (1 - 1 / self.batch_size)

    def check_relation(self, relation: str) -> None:
        check_relation(relation)
        _check(
            relation == "replace_one",
            f'{self.describe()}: this release is accounted for under "replace_one" only, got {relation!r}; use '
            "all rows",
        )

    def profiles(self, relation: str) -> tuple[Profile, Profile]:
        self.check_relation(relation)
        return _symmetric(_amplified(self._batch_profile, self.rate))

    def _batch_profile(self, eps: np.ndarray) -> np.ndarray:
        """The profile on one batch, one row of it replaced, rounded up.

        The profile of ``Normal(m, u)`` against ``Normal(0, v)`` grows with ``m`` and under a common scaling down of
        ``u`` and ``v``; so one of them is the smallest variance, 1 after scaling. The other is ``1 + g``, with ``g``
        between 0 and `growth`, where the profile need not be monotone. So ``g`` goes through a few values, and between
        two of them, ``g`` and ``g'``, densities differ by at most ``e^eta = sqrt((1 + g') / (1 + g))`` upwards.
        """
        if self.worst is None:
            return np.ones_like(eps)
        shift2, growth = self.worst
        variances = 1 + growth * np.linspace(0, 1, 9)
        worst = np.zeros_like(eps)
        for low, high in itertools.pairwise(variances):
            eta = 0.5 * math.log(high / low)
            wider_second = _normal_delta(eps - eta, math.sqrt(shift2), 1.0, low)
            wider_first = math.exp(eta) * _normal_delta(eps - eta, math.sqrt(shift2), high, 1.0)
            worst = np.maximum(worst, np.maximum(wider_first, wider_second))
        return np.minimum(worst, 1.0)

    def describe(self) -> str:
        return f"Barker, batch of {self.batch_size} of {self.num_rows} rows, total variance {self.variance:g}"


def noise_per_row_bound(noise_multiplier: float, relation: str) -> float:
    """Noise sd over the bound ``B`` of one row's norm, as dp_accounting counts noise under either relation.

    The exception is its event for batches without replacement: see `FixedBatchGaussian.noise_per_replacement`.
    """
    check_relation(relation)
    return bounds_per_row(relation) * noise_multiplier


# --- Profiles -------------------------------------------------------------------------------------------------------


def _symmetric(profile: Profile) -> tuple[Profile, Profile]:
    return profile, profile


def _gaussian_delta(eps: np.ndarray, shift: float) -> np.ndarray:
    """Profile of ``Normal(shift, 1)`` against ``Normal(0, 1)``, at `eps` of either sign, with relative precision."""
    # Beyond 1e3 standard deviations it is 0 in any case; the cut keeps infinity minus infinity out.
    z = np.minimum(eps / shift - 0.5 * shift, 1e3)
    log_first = log_ndtr(-z)
    log_second = eps + log_ndtr(-z - shift)
    return np.where(z < 1e3, np.exp(log_first) * -np.expm1(np.minimum(log_second - log_first, 0.0)), 0.0)


def _amplified(profile: Profile, rate: float) -> Profile:
    """``rate * profile(log(1 + (e^eps - 1) / rate))``: the profile of a release on a random share of the rows."""
    return lambda eps: rate * profile(_amplified_eps(eps, rate))


def _amplified_eps(eps: np.ndarray, rate: float) -> np.ndarray:
    small = np.log1p(np.expm1(np.minimum(eps, 1.0)) / rate)
    return np.where(eps < 1, small, eps - math.log(rate) + np.log1p((rate - 1) * np.exp(-eps)))


def _poisson_profiles(rate: float, shift: float, relation: str) -> tuple[Profile, Profile]:
    """Profiles of a Poisson batch whose row shifts the unit noise by `shift`; the table with the row comes first."""
    if relation == "replace_one":
        return _symmetric(functools.partial(_poisson_replace_delta, rate=rate, shift=shift))
    gaussian = functools.partial(_gaussian_delta, shift=shift)
    if rate == 1:
        return _symmetric(gaussian)

    def absent(eps: np.ndarray) -> np.ndarray:
        # Normal(0) against the mixture: the loss is below -log(1 - rate), and with e = log(1 + (e^-eps - 1) / rate)
        # the profile is rate e^(eps + e) delta_G(-e).
        inside = np.minimum(eps, -math.log1p(-rate) * (1 - 1e-12))
        e = np.log1p(np.expm1(-inside) / rate)
        return np.where(inside < eps, 0.0, rate * np.exp(inside + e) * gaussian(-e))

    return _amplified(gaussian, rate), absent


def _poisson_replace_delta(eps: np.ndarray, rate: float, shift: float) -> np.ndarray:
    """Profile of ``(1 - rate) N(0, 1) + rate N(shift, 1)`` against the same with ``-shift``, with relative precision.

    The loss increases with the noisy value ``x``, and ``u = e^(shift x)`` solves a quadratic equation at loss `eps`.
    """
    log_c = math.log(rate) - 0.5 * shift**2
    with np.errstate(divide="ignore"):
        log_a = np.log1p(-rate) + eps + np.log(-np.expm1(-eps))  # (1 - rate) (e^eps - 1)
        root = 0.5 * np.logaddexp(2 * log_a, math.log(4) + 2 * log_c + eps)
        x = (np.logaddexp(log_a, root) - math.log(2) - log_c) / shift
        x = np.minimum(x, 1e8)
        with_row = np.exp(math.log(rate) + log_ndtr(shift - x))
        opposite = np.exp(math.log(rate) + eps + log_ndtr(-shift - x))
        without_row = np.exp(log_a + log_ndtr(-x))
    return np.maximum(with_row - opposite - without_row, 0.0)


def _normal_delta(eps: np.ndarray, shift: float, first: float, second: float) -> np.ndarray:
    """Profile of ``Normal(shift, variance first)`` against ``Normal(0, variance second)``, at `eps` of either sign."""
    if first == second:
        return _gaussian_delta(eps, shift / math.sqrt(first))
    # log p/q = a x^2 + b x + c exceeds eps between two points (first < second) or outside them.
    a = 0.5 / second - 0.5 / first
    b = shift / first
    c = 0.5 * math.log(second / first) - 0.5 * shift**2 / first
    discriminant = b**2 - 4 * a * (c - eps)
    root = np.sqrt(np.maximum(discriminant, 0.0))
    near = -2 * (c - eps) / (b + root)  # the root nearer to 0, without cancellation; b and root are not negative
    far = -(b + root) / (2 * a)
    sd_first, sd_second = math.sqrt(first), math.sqrt(second)
    if a < 0:  # between `near` and `far`, which is far to the right
        p = _log_between((near - shift) / sd_first, (far - shift) / sd_first)
        q = _log_between(near / sd_second, far / sd_second)
        p = np.where(discriminant > 0, p, -np.inf)  # nowhere, if there are no such points
    else:  # above `near`, or below `far`, which is far to the left
        p = np.logaddexp(log_ndtr((shift - near) / sd_first), log_ndtr((far - shift) / sd_first))
        q = np.logaddexp(log_ndtr(-near / sd_second), log_ndtr(far / sd_second))
        p, q = np.where(discriminant > 0, p, 0.0), np.where(discriminant > 0, q, 0.0)  # everywhere
    possible = p > -np.inf
    return np.where(possible, np.exp(p) * -np.expm1(np.minimum(eps + q - np.where(possible, p, 0.0), 0.0)), 0.0)


def _log_between(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Log probability that a standard normal variable lies between `low` and `high`."""
    log_above, log_beyond = log_ndtr(-low), log_ndtr(-high)
    possible = (high > low) & (log_above > -np.inf)
    share = -np.expm1(np.where(possible, np.minimum(log_beyond - np.where(possible, log_above, 0.0), 0.0), 0.0))
    with np.errstate(divide="ignore"):
        return np.where(possible, log_above + np.log(share), -np.inf)


def _bit_delta(eps: np.ndarray, shift: float) -> np.ndarray:
    """Profile of one bit whose logit moves by `shift`, attained at the logits that are ``eps`` above and below 0."""
    return np.expm1((np.minimum(eps, shift) - shift) / 2) ** 2 / -math.expm1(-shift)


@functools.lru_cache(maxsize=32)
def _logistic_profile(shift: float, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The profile of `length` bits, rounded up, on a grid of ``eps >= 0`` that divides `shift`: see `LogisticBits`."""
    cells = max(12, min(200, 12 * _BITS_PER_BLOCK // length))
    ends = length * cells
    grid = shift / cells * np.arange(-ends - cells, ends + cells + 1)
    gamma = np.exp(grid)
    deltas = np.maximum(-np.expm1(grid), 0.0)
    for done in range(length):
        # Beyond +-(done + 1) bits nothing has changed yet: there the profile is that of no release at all.
        near = slice((length - done - 1) * cells + cells, -((length - done - 1) * cells + cells))
        deltas[near] = _one_more_bit(gamma, deltas, near, cells, shift)
    inside = slice(ends + cells, None)
    return grid[inside], deltas[inside]


def _one_more_bit(gamma: np.ndarray, deltas: np.ndarray, near: slice, cells: int, shift: float) -> np.ndarray:
    """The maximum over ``v = e^t``, cell by cell: on one cell both profiles are straight lines ``a + b gamma``."""
    slope = np.diff(deltas) / np.diff(gamma)
    intercept = deltas[:-1] - slope * gamma[:-1]
    positions = np.arange(near.start, len(gamma) + near.stop)
    at = gamma[positions]
    small = math.exp(-shift)
    best = np.zeros(len(positions))
    for cell in range(cells):
        low, high = math.exp(cell * shift / cells), math.exp((cell + 1) * shift / cells)
        first = positions - cell - 1
        second = first + cells
        # p = (1 - v e^-Delta) / (1 - e^-Delta); the sum is const + v small (a' - a) + (gamma / v) (b - b').
        rise = np.maximum(intercept[first] - intercept[second], 0.0)
        fall = np.maximum(slope[second] - slope[first], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            v = np.sqrt(at * fall / (small * rise))
        v = np.clip(np.nan_to_num(v, nan=low, posinf=high), low, high)
        p = (1 - v * small) / (1 - small)
        after_first = intercept[first] + slope[first] * at / v
        after_second = intercept[second] + slope[second] * at / (v * small)
        best = np.maximum(best, p * np.maximum(after_first, 0.0) + (1 - p) * np.maximum(after_second, 0.0))
    return best


def _chords(eps: np.ndarray, grid: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """Straight lines in ``e^eps`` between the points of an equally spaced `grid` that starts at 0; 0 beyond it."""
    step = grid[1]
    inside = np.minimum(eps, grid[-1])
    left = np.clip((inside / step).astype(int), 0, len(grid) - 2)
    weight = np.clip(np.expm1(inside - grid[left]) / math.expm1(step), 0.0, 1.0)
    return np.where(eps < grid[-1], (1 - weight) * deltas[left] + weight * deltas[left + 1], 0.0)


# --- Checks ----------------------------------------------------------------------------------------------------------


def with_noise_multiplier(mechanism: Mechanism, noise_multiplier: float) -> Mechanism:
    return dataclasses.replace(mechanism, noise_multiplier=noise_multiplier)


def rebuilt(mechanism: Mechanism) -> Mechanism:
    """The same mechanism, of our own class and of plain numbers: what it says of itself is what is written here.

    :raises TypeError: if it is of another class, which could say of itself what it likes.
    """
    if type(mechanism) not in _KNOWN:
        raise TypeError(f"only the mechanisms of {__name__} are accounted for, got {type(mechanism).__name__}")
    values = {field.name: getattr(mechanism, field.name) for field in dataclasses.fields(mechanism)}
    plain = {name: int(value) if isinstance(value, int) else float(value) for name, value in values.items()}
    return type(mechanism)(**plain)


_KNOWN = (Gaussian, PoissonGaussian, TruncatedPoissonGaussian, FixedBatchGaussian, LogisticBit, BarkerBatch)


def check_relation(relation: str) -> None:
    names = ", ".join(map(repr, NEIGHBORING_RELATIONS))
    _check(relation in NEIGHBORING_RELATIONS, f"neighboring_relation must be one of {names}, got {relation!r}")


def _check_rate(rate: float) -> None:
    _check(0 < rate <= 1, f"rate must be above 0 and at most 1, got {rate}")


def _check_batch(batch_size: int, num_rows: int) -> None:
    _check_positive("batch_size", batch_size)
    _check(batch_size <= num_rows, f"batch_size must be at most num_rows, got {batch_size} of {num_rows}")


def _check_positive(name: str, value: int) -> None:
    _check(value >= 1, f"{name} must be at least 1, got {value}")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
