"""What a sequence of releases costs: composition and calibration.

**Sums over all rows** are Gaussian mechanisms: a sum with L2 sensitivity ``Delta`` plus noise of standard deviation
``sigma``. The *noise multiplier* is ``sigma / Delta``, and the cost is

    ``rho = 1 / (2 * noise_multiplier**2)``,

which adds up over any adaptive sequence whose noise multipliers are fixed beforehand. ``rho`` is the zCDP parameter;
because the releases are Gaussian it also determines the exact curve ``delta(eps)`` (`gaussian_delta`), so nothing is
lost in the composition (Sommer, Meiser and Mohammadi 2019; Theorem 3.5 of Räisä, Koskela and Honkela 2021).

**Any other sequence**, of the kinds in `numpyro_dp.privacy.mechanisms`, is composed by `composed_eps`, `composed_delta`
and `calibrate`: its privacy loss distribution on a grid, which is an upper bound within a fraction of a percent.
(`benchmarks/accountants.py` has the looser accountants of the literature beside it.)

Every conversion here rounds to the safe side: an ``eps`` or a ``delta`` up, a ``rho`` that may be spent down. Plain
floats in, plain floats out; nothing here depends on JAX.

Proofs: docs/proofs/gaussian.md, docs/proofs/composition.md.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from scipy.optimize import brentq
from scipy.special import log_ndtr

from numpyro_dp.privacy import mechanisms
from numpyro_dp.privacy.mechanisms import Gaussian, Mechanism
from numpyro_dp.privacy.pld import MAX_BINS, Convolution, largest_loss, mean_loss

MIN_EPS, MIN_DELTA = 1e-4, 1e-30
"""Below these the formulas lose digits to cancellation, and no posterior can come of such a budget."""

# Relative room given away in each conversion. The formulas below are good to about 1e-12 (tests compare with mpmath),
# so this covers their rounding many times over and costs nothing that a user could notice.
_SAFETY = 1e-9


def gaussian_delta(eps: float, rho: float) -> float:
    """The smallest ``delta`` at which Gaussian releases of total cost `rho` are ``(eps, delta)``-DP.

    :param eps: at least 0.
    :param rho: total of ``1 / (2 * noise_multiplier**2)`` over all releases, at least 0.
    :return: ``delta`` in [0, 1], exact up to floating-point error.
    """
    eps, rho = float(eps), float(rho)  # numbers of lower precision would be computed with in theirs
    _check(eps >= 0, f"eps must be at least 0, got {eps}")
    _check(rho >= 0, f"rho must be at least 0, got {rho}")
    if rho == 0 or eps == math.inf:
        return 0.0
    if rho == math.inf:
        return 1.0
    root = math.sqrt(2 * rho)
    # delta = Phi(-(eps-rho)/root) - e^eps Phi(-(eps+rho)/root), in logs: the plain form overflows for large eps
    # and cancels for small delta.
    a = float(log_ndtr(-(eps - rho) / root))
    b = eps + float(log_ndtr(-(eps + rho) / root))
    return math.exp(a) * -math.expm1(min(b - a, 0.0))


def gaussian_eps(delta: float, rho: float) -> float:
    """The smallest ``eps`` at which Gaussian releases of total cost `rho` are ``(eps, delta)``-DP, rounded up."""
    delta, rho = float(delta), float(rho)
    _check_delta(delta)
    _check(rho >= 0, f"rho must be at least 0, got {rho}")
    if rho == math.inf:
        return math.inf
    if gaussian_delta(0.0, rho) <= delta:
        return 0.0
    upper = zcdp_eps(delta, rho)  # always looser, hence a bracket
    eps = brentq(lambda e: gaussian_delta(e, rho) - delta, 0.0, upper * (1 + _SAFETY) + 1e-12, xtol=1e-15, rtol=1e-14)
    return eps * (1 + _SAFETY)


def gaussian_rho(eps: float, delta: float) -> float:
    """The largest total cost ``rho`` of Gaussian releases that is still ``(eps, delta)``-DP, rounded down."""
    eps, delta = float(eps), float(delta)
    _check(eps >= MIN_EPS, f"eps must be at least {MIN_EPS:g}, got {eps}")
    _check_delta(delta)
    if eps == math.inf:
        return math.inf
    lower = _zcdp_rho(eps, delta)  # valid for zCDP, hence below the exact root
    upper = 2 * lower + 1e-12
    while gaussian_delta(eps, upper) <= delta:
        upper *= 2
    rho = brentq(lambda r: gaussian_delta(eps, r) - delta, lower, upper, xtol=1e-300, rtol=1e-14)
    return rho * (1 - _SAFETY)


def zcdp_eps(delta: float, rho: float) -> float:
    """The classical zCDP conversion ``rho + 2 sqrt(rho ln(1/delta))`` (Bun and Steinke 2016, Proposition 1.3).

    Always larger than `gaussian_eps`, for which it is one end of a bracket.
    """
    rho, delta = float(rho), float(delta)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def _zcdp_rho(eps: float, delta: float) -> float:
    log_inverse_delta = math.log(1 / delta)
    # (sqrt(eps + L) - sqrt(L))^2 without cancellation
    return (eps / (math.sqrt(eps + log_inverse_delta) + math.sqrt(log_inverse_delta))) ** 2


def noise_multiplier_for(rho: float, count: float) -> float:
    """The smallest noise multiplier at which `count` releases cost at most `rho`, rounded up; 0 for infinite `rho`."""
    rho = float(rho)
    _check(count > 0, f"count must be positive, got {count}")
    _check(rho > 0, f"rho must be positive, got {rho}")
    if rho == math.inf:
        return 0.0
    return math.sqrt(count / (2 * rho)) * (1 + _SAFETY)


CountedMechanisms = Sequence[tuple[Mechanism, int]]
"""What a run releases: each mechanism with its number of releases, in any order."""


def composed_eps(releases: CountedMechanisms, delta: float, relation: str) -> float:
    """The ``eps`` at which all `releases` together are ``(eps, delta)``-DP, rounded up; infinite if there is none.

    The releases may be adaptive (each may depend on the values of those before it), but their mechanisms and counts
    must be fixed beforehand.

    In closed form if all are `Gaussian`, over all rows. Otherwise an upper bound good to 0.1 percent (0.4 percent if
    there are more than 64 different mechanisms), and infinite where eps would be above 1e8 or so.

    :param relation: one of `mechanisms.NEIGHBORING_RELATIONS`.
    :raises ValueError: if a mechanism is not private under the relation.
    """
    delta = float(delta)
    _check_delta(delta)
    return _composed_eps(_merged(releases, relation), delta, relation)


def composed_delta(releases: CountedMechanisms, eps: float, relation: str) -> float:
    """The ``delta`` at which all `releases` together are ``(eps, delta)``-DP, rounded up; see `composed_eps`."""
    eps = float(eps)
    _check(eps >= 0, f"eps must be at least 0, got {eps}")
    merged = _merged(releases, relation)
    curve = _curve(merged, relation)
    overflow = _overflow(merged)
    return min(1.0, curve.delta(eps) + (overflow * (1 + math.exp(min(eps, 700.0))) if overflow else 0.0))


def how(releases: CountedMechanisms) -> str:
    """By what mathematics their cost is found, in a few words."""
    return "Gaussian releases, in closed form" if _are_gaussian(releases) else "privacy loss distributions, convolved"


def calibrate(
    releases_at: Callable[[float], CountedMechanisms],
    eps: float,
    delta: float,
    relation: str,
    low: float = 1e-9,
    high: float = 1e9,
) -> float:
    """The smallest scale whose releases cost at most `eps` at `delta`, to within 0.05 percent, rounded up.

    :param releases_at: the releases at a scale. Their cost must fall as the scale grows: typically the noise
        multipliers are proportional to it.
    :param low: no smaller scale is considered.
    :param high: no larger scale is considered.
    :return: a scale at which the cost was computed and found to be at most `eps`.
    :raises ValueError: if the releases cost more than `eps` even at `high`.
    """
    eps, delta = float(eps), float(delta)
    _check(eps >= MIN_EPS, f"eps must be at least {MIN_EPS:g}, got {eps}")
    _check(0 < low < high, f"low and high must satisfy 0 < low < high, got {low} and {high}")
    if eps == math.inf:
        return low

    def excess(scale: float) -> float:
        """Log of the cost over the budget."""
        cost = composed_eps(releases_at(scale), delta, relation)
        return math.log(cost / eps) if 0 < cost < math.inf else math.copysign(math.inf, cost - eps)

    def impossible() -> ValueError:
        return ValueError(
            f"eps={eps:g} at delta={delta:g} cannot be met: at scale {high:g}, the largest allowed, the releases still "
            f"cost eps={composed_eps(releases_at(high), delta, relation):g}; allow fewer releases, a larger eps or "
            "delta, or a larger scale"
        )

    return _smallest(excess, low, high, impossible)


def _smallest(excess: Callable[[float], float], low: float, high: float, impossible: Callable[[], ValueError]) -> float:
    """The smallest scale at which the decreasing function `excess` is at most 0, by secants on log-log axes."""
    too_small, enough = None, None  # (log scale, excess) on either side of the root
    at = math.log(min(max(1.0, low), high))
    bottom, top = math.log(low), math.log(high)
    for _ in range(200):
        value = excess(math.exp(at))
        if value <= 0:
            enough = (at, value)
        else:
            too_small = (at, value)
        if enough and (enough[0] <= bottom or (too_small and enough[0] - too_small[0] <= 4e-4)):
            return math.exp(enough[0])
        if too_small and too_small[0] >= top:
            raise impossible()
        at = min(max(_next_scale(too_small, enough), bottom), top)
    raise RuntimeError("calibration did not converge: the cost of the releases does not fall as the scale grows")


_Point = tuple[float, float]


def _next_scale(too_small: _Point | None, enough: _Point | None) -> float:
    if too_small is None or enough is None:
        at, value = too_small or enough or (0.0, 0.0)
        # The cost is roughly inversely proportional to the scale, or falls faster; a little further, to get across.
        return at + max(-3.0, min(3.0, value * 1.05)) + math.copysign(2e-3, value)
    (left, above), (right, below) = too_small, enough
    if math.isinf(above) or math.isinf(below):
        return 0.5 * (left + right)
    root = left + (right - left) * above / (above - below)
    # Aim just beyond the root, on the side that is farther away: that side jumps close to it.
    return root + (1.5e-4 if right - root > root - left else -1.5e-4)


# --- Composition ----------------------------------------------------------------------------------------------------


_Merged = tuple[tuple[Mechanism, int], ...]


def _merged(releases: CountedMechanisms, relation: str) -> _Merged:
    mechanisms.check_relation(relation)
    counts: Counter[Mechanism] = Counter()
    for mechanism, count in releases:
        if count < 0 or count != int(count):
            raise ValueError(f"{mechanism}: count must be a whole number, got {count}")
        counts[mechanism] += int(count)
    return tuple((mechanism, count) for mechanism, count in counts.items() if count)


def _overflow(releases: _Merged) -> float:
    """Bound on the probability that any release deviates from what its mechanism describes."""
    return sum(count * getattr(mechanism, "overflow", 0.0) for mechanism, count in releases)


@functools.lru_cache(maxsize=64)  # keys are long where noise follows a schedule
def _composed_eps(releases: _Merged, delta: float, relation: str) -> float:
    curve = _curve(releases, relation)
    eps = curve.eps(delta)
    overflow = _overflow(releases)
    if overflow == 0:
        return eps
    # Releases within `overflow` of (eps, delta)-DP ones, in total variation, are
    # (eps, delta + (1 + e^eps) overflow)-DP: find an eps that covers its own surcharge.
    for _ in range(100):
        if not eps < 700:
            return math.inf
        guess = eps * (1 + 1e-6) + 1e-9
        rest = delta - overflow * (1 + math.exp(guess))
        if rest <= 0:
            return math.inf
        eps = curve.eps(rest)
        if eps <= guess:
            return eps
    return math.inf


def _curve(releases: _Merged, relation: str) -> "LossCurve | _GaussianCurve":
    for mechanism, _ in releases:
        mechanism.check_relation(relation)
    if _are_gaussian(releases):
        return _GaussianCurve(sum(count * (mechanism.rho or 0.0) for mechanism, count in releases) * (1 + 1e-15))
    if any(mechanism.noise_multiplier == 0 for mechanism, _ in releases):
        return _GaussianCurve(math.inf)
    losses = LossCurve(releases, relation)
    return losses if losses.mean <= _LARGEST_MEAN_LOSS else _GaussianCurve(math.inf)


def _are_gaussian(releases: CountedMechanisms) -> bool:
    return all(isinstance(mechanism, Gaussian) for mechanism, _ in releases)


class _GaussianCurve(NamedTuple):
    rho: float

    def eps(self, delta: float) -> float:
        return gaussian_eps(delta, self.rho)

    def delta(self, eps: float) -> float:
        return min(1.0, gaussian_delta(eps, self.rho) * (1 + _SAFETY))


_MAX_DISTINCT, _FLOORED = 64, 1.005


def _grouped(releases: _Merged) -> _Merged:
    """The releases, with neighbouring noise multipliers lowered to a common one if there are very many of them.

    A schedule of step sizes makes as many mechanisms as steps. Lowering a noise multiplier only raises the cost: by
    less than 0.5 percent, and by half of that on average.
    """
    if len(releases) <= _MAX_DISTINCT:
        return releases
    families: dict[Mechanism, list[tuple[float, int]]] = {}
    for mechanism, count in releases:
        family = mechanisms.with_noise_multiplier(mechanism, 1.0)
        families.setdefault(family, []).append((mechanism.noise_multiplier, count))
    grouped: list[tuple[Mechanism, int]] = []
    for family, members in families.items():
        (floor, total), *others = sorted(members)
        for multiplier, count in others:
            if multiplier <= floor * _FLOORED:
                total += count
                continue
            grouped.append((mechanisms.with_noise_multiplier(family, floor), total))
            floor, total = multiplier, count
        grouped.append((mechanisms.with_noise_multiplier(family, floor), total))
    return tuple(grouped)


# Beyond it eps is of no use to anyone, and distributions on a grid take long.
_LARGEST_MEAN_LOSS = 1e8


class LossCurve:
    """Convolution of the privacy loss distributions of one release or more, in both directions if they differ.

    The distributions are on a grid so fine that rounding raises the total divergence by 0.02 percent (0.1 percent for
    schedules, which are slower), and finer if the result itself is of the order of the grid. A spread of ``h^2 / 6`` in
    the variance of every loss, hence ``h^2 / 12`` in its mean, is what rounding to multiples of ``h`` adds.
    """

    def __init__(self, releases: _Merged, relation: str) -> None:
        self._relation = relation
        gaussian = sum(count * (m.rho or 0.0) for m, count in releases if isinstance(m, Gaussian))
        others = _grouped(tuple((m, count) for m, count in releases if not isinstance(m, Gaussian)))
        parts = [part for mechanism, count in others for part in mechanism.blocks(count)]
        if gaussian:  # all of them are one
            parts.append((Gaussian(1 / math.sqrt(2 * gaussian * (1 + 1e-15))), 1))
        self._parts = parts
        profiles = [(*mechanism.profiles(relation), count) for mechanism, count in parts]
        total = sum(count * mean_loss(forward, backward) for forward, backward, count in profiles)
        added = 2e-4 if len(parts) <= 8 else 1e-3
        self.mean = total
        number = sum(count for *_, count in profiles)
        largest = max(largest_loss(p) for *both, _ in profiles for p in both)
        self._finest = largest / MAX_BINS
        self._interval = max(math.sqrt(12 * added * total / number), self._finest)
        self._convolutions: tuple[float, list[Convolution]] | None = None

    def _directions(self, interval: float) -> list[Convolution]:
        if self._convolutions is None or self._convolutions[0] != interval:
            losses = [(mechanism.pld(self._relation, interval), count) for mechanism, count in self._parts]
            number = max(len(loss) for loss, _ in losses)
            self._convolutions = (
                interval,
                [
                    Convolution([(loss[min(k, len(loss) - 1)], count) for loss, count in losses], interval)
                    for k in range(number)
                ],
            )
        return self._convolutions[1]

    def eps(self, delta: float) -> float:
        interval = self._interval
        eps = max(direction.eps(delta) for direction in self._directions(interval))
        while interval > max(eps / 200, MIN_EPS / 200, self._finest):
            interval = max(eps / 400, MIN_EPS / 400, self._finest)
            eps = max(direction.eps(delta) for direction in self._directions(interval))
        return eps

    def delta(self, eps: float) -> float:
        interval = max(min(self._interval, max(eps, MIN_EPS) / 400), self._finest)
        return max(direction.delta(eps) for direction in self._directions(interval))


def _check_delta(delta: float) -> None:
    _check(MIN_DELTA <= delta < 1, f"delta must lie between {MIN_DELTA:g} and 1, got {delta}")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
