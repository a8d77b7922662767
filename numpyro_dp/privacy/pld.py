"""Privacy loss distributions on a grid: of one release, from its privacy profile, and of many, by convolution.

Everything is rounded to the safe side. A profile's dots are joined by chords, which lie above it ("Connect the Dots",
Doroshenko et al. 2022); the convolution is made by Fourier transforms of tilted distributions, and its rounding errors
are added to the result.

Proof: docs/proofs/composition.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.fft import next_fast_len
from scipy.optimize import brentq

Profile = Callable[[np.ndarray], np.ndarray]
"""``delta`` at each of an array of ``eps >= 0``: decreasing, and convex as a function of ``e^eps``."""

_NEGLIGIBLE = 1e-45  # a profile below this has ended: far below every delta that is accepted, times any count

MAX_BINS = 2**18
"""Of one discretised loss distribution on each side of 0."""

_SAFETY = 1e-9  # relative, of an eps that was found by iteration


# --- Of one release ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LossDistribution:
    """The privacy loss of one release: probability `mass[k]` of the loss ``lowest + k``, in intervals of a grid."""

    lowest: int
    mass: np.ndarray
    infinite: float
    """Probability of an infinite loss."""


def discretized(forward: Profile, backward: Profile, interval: float) -> tuple[LossDistribution, ...]:
    """The loss distributions, on multiples of `interval`, whose profiles join the given ones' dots by chords.

    Profiles are convex in ``e^eps``, so the chords lie above: the result is pessimistic, and a composition of such
    results too (Doroshenko et al. 2022, "Connect the Dots").

    :return: one distribution for each direction, or one for both if the profiles are the same function.
    """
    dots = [_connect_dots(profile, interval) for profile in {forward: None, backward: None}]
    return tuple(_two_sided(*one, other, interval) for one, (other, _) in zip(dots, reversed(dots), strict=True))


def _two_sided(above: np.ndarray, infinite: float, opposite: np.ndarray, interval: float) -> LossDistribution:
    """Losses below 0 come from the `opposite` direction: ``-x`` has ``e^-x`` times the probability of ``x`` there."""
    below = opposite * np.exp(-interval * np.arange(1, len(opposite) + 1))
    at_zero = max(1.0 - float(np.sum(above)) - float(np.sum(below)) - infinite, 0.0)
    return LossDistribution(-len(below), np.concatenate([below[::-1], [at_zero], above]), infinite)


def _connect_dots(profile: Profile, interval: float) -> tuple[np.ndarray, float]:
    """Probabilities of the losses ``interval``, ``2 * interval``, ... and of infinity."""
    bins = math.ceil(largest_loss(profile) / interval)
    deltas = np.minimum.accumulate(profile(interval * np.arange(bins + 1)))
    drops = deltas[:-1] - deltas[1:]
    # The mass of each cell goes to its two ends, in the shares that keep its probability under both tables.
    mass = drops / -math.expm1(-interval)
    mass[:-1] -= drops[1:] / math.expm1(interval)
    return np.maximum(mass, 0.0), float(deltas[-1])


_LOSSES = np.geomspace(1e-16, 1e7, 1000)


def largest_loss(profile: Profile) -> float:
    """Where the profile ends, to a few percent, rounded up."""
    ended = profile(_LOSSES) <= _NEGLIGIBLE
    return float(_LOSSES[np.argmax(ended)]) if ended.any() else float(_LOSSES[-1])


def mean_loss(forward: Profile, backward: Profile) -> float:
    """Kullback-Leibler divergence in the forward direction: the integral of ``forward + e^-eps * backward``."""
    eps = max(largest_loss(forward), largest_loss(backward)) * np.geomspace(1e-9, 1, 600)
    return float(np.trapezoid(forward(eps) + np.exp(-eps) * backward(eps), eps))


# --- Of many ----------------------------------------------------------------------------------------------------------


# Room for the rounding of the Fourier transforms. Powers of T of their values are off by about 1e-16 T, relative to the
# tilted sum; each value of the result is off by about 1e-17, of which some thousand count; and what lies above the
# window is lost from the result, at most as much as the latter.
_CONVOLUTION_SAFETY = 1e-6
_ROUNDING = 1e-13
_LOG_OUTSIDE = math.log(1e14)


class _Cumulants(NamedTuple):
    """Of a sum of losses under a tilt: log of ``E e^(tilt * loss)``, then mean and variance of the tilted sum."""

    log_moment: float
    mean: float
    variance: float


class Convolution:
    """The sum of independent privacy losses, one distribution for all of one direction.

    The probabilities near the eps in question are as small as delta, far below the rounding error of a Fourier
    transform whose largest values are near 1. Therefore the distributions are first tilted (multiplied by
    ``e^(tilt * loss)`` and normalised) so that the sum concentrates at that eps; then the error is relative.
    """

    def __init__(self, losses: list[tuple[LossDistribution, int]], interval: float) -> None:
        self._interval = interval
        self._parts = []
        for loss, count in losses:
            (kept,) = np.nonzero(loss.mass)
            self._parts.append((loss.lowest + kept, np.log(loss.mass[kept]), count))
        self._infinite = min(1.0, sum(count * loss.infinite for loss, count in losses))
        self._known: dict[float, _Cumulants] = {}

    def eps(self, delta: float) -> float:
        finite = delta / (1 + _CONVOLUTION_SAFETY) - self._infinite
        if finite <= 0:
            return math.inf
        log_delta = math.log(finite)
        # Minimises the Chernoff bound below: there, losses near the solution are typical of the tilted sum.
        start = math.sqrt(-2 * log_delta / (self._cumulants(0.0).variance + self._interval**2))
        tilt = self._root(lambda tilt, k: tilt * k.mean - k.log_moment + log_delta, start)
        bound = (self._cumulants(tilt).log_moment - log_delta) / tilt  # the Chernoff bound, above the solution
        sums = self._sums(tilt)
        if bound <= 0 or sums.delta(0.0) <= delta:
            return 0.0
        if sums.delta(bound) > delta:  # cannot happen unless the room for rounding were too small
            return math.inf
        lower, step = bound, 0.05 * bound
        while lower > 0 and sums.delta(lower) <= delta:
            lower, step = max(lower - step, 0.0), 2 * step
        eps = brentq(lambda e: math.log(max(sums.delta(e), 1e-300) / delta), lower, bound, xtol=1e-14, rtol=1e-12)
        eps = eps * (1 + _SAFETY) + 1e-12
        return eps if sums.delta(eps) <= delta else bound

    def delta(self, eps: float) -> float:
        if self._infinite >= 1.0:
            return 1.0
        untilted = self._cumulants(0.0)
        start = (eps - untilted.mean) / (untilted.variance + self._interval**2)
        tilt = self._root(lambda tilt, k: k.mean - eps, start)
        return self._sums(tilt).delta(eps)

    def _root(self, slope: Callable[[float, _Cumulants], float], start: float) -> float:
        """The tilt, to a percent, where `slope` is 0: a function of a tilt and the cumulants there, which increases.

        Limited to tilts that tell neighbouring losses apart; any tilt is right, this one is the most accurate.
        """
        smallest, largest = 1e-6, 5.0 / self._interval
        low = high = min(max(start, smallest), largest)
        while slope(low, self._cumulants(low)) > 0 and low > smallest:
            low /= 2
        while slope(high, self._cumulants(high)) < 0 and high < largest:
            high = min(2 * high, largest)
        if slope(low, self._cumulants(low)) > 0:
            return low
        if slope(high, self._cumulants(high)) <= 0:
            return high
        return brentq(lambda tilt: slope(tilt, self._cumulants(tilt)), low, high, rtol=1e-2)

    def _cumulants(self, tilt: float) -> _Cumulants:
        if tilt not in self._known:
            self._known[tilt] = self._cumulants_at(tilt)
        return self._known[tilt]

    def _cumulants_at(self, tilt: float) -> _Cumulants:
        log_moment, mean, variance = 0.0, 0.0, 0.0
        for position, log_mass, count in self._parts:
            log_weight, weight = _tilted(position, log_mass, tilt * self._interval)
            first = float(np.sum(weight * position))
            log_moment += count * log_weight
            mean += count * first
            variance += count * (float(np.sum(weight * position**2)) - first**2)
        return _Cumulants(log_moment, mean * self._interval, max(variance, 0.0) * self._interval**2)

    def _sums(self, tilt: float) -> "_TiltedSums":
        """The tilted sum on a window outside of which it has next to no mass; what is outside wraps around."""
        log_moment, _, variance = self._cumulants(tilt)
        sd = math.sqrt(variance) + self._interval

        def edge(sign: int) -> float:
            """A Chernoff bound again: beyond it the tilted sum has probability e^-_LOG_OUTSIDE at most."""
            rates = [sign * rate / sd for rate in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)]
            bounds = [self._cumulants(tilt + rate).log_moment - log_moment + _LOG_OUTSIDE for rate in rates]
            return min(bound / abs(rate) for bound, rate in zip(bounds, rates, strict=True))

        top, bottom = edge(+1), -edge(-1)
        lowest = math.floor(bottom / self._interval)
        length = next_fast_len(math.ceil(top / self._interval) - lowest + 1, real=True)
        product = np.ones(length // 2 + 1, dtype=complex)
        for position, log_mass, count in self._parts:
            _, weight = _tilted(position, log_mass, tilt * self._interval)
            product *= _power(np.fft.rfft(np.bincount(position % length, weight, minlength=length)), count)
        mass = np.maximum(np.fft.irfft(product, length), 0.0)
        loss = self._interval * (lowest + np.arange(length))
        return _TiltedSums(loss, np.roll(mass, -(lowest % length)), tilt, log_moment, self._infinite)


class _TiltedSums(NamedTuple):
    loss: np.ndarray
    mass: np.ndarray
    tilt: float
    log_moment: float
    infinite: float

    def delta(self, eps: float) -> float:
        start = int(np.searchsorted(self.loss, eps, side="right"))
        loss = self.loss[start:]
        # Far below the eps that the tilt is for, the factors are huge and multiply rounding errors: delta is 1 there.
        factors = np.exp(np.minimum(self.log_moment - self.tilt * loss, 600.0))
        rounding = _ROUNDING * math.exp(min(self.log_moment - self.tilt * eps, 600.0))
        delta = float(np.sum(self.mass[start:] * factors * -np.expm1(eps - loss)))
        return min(1.0, (delta + self.infinite) * (1 + _CONVOLUTION_SAFETY) + rounding)


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """By repeated squaring: many times as fast as NumPy's powers of complex numbers."""
    result = values if exponent % 2 else np.ones_like(values)
    while exponent := exponent // 2:
        values = values * values
        if exponent % 2:
            result = result * values
    return result


def _tilted(position: np.ndarray, log_mass: np.ndarray, tilt: float) -> tuple[float, np.ndarray]:
    """Log of the total after multiplication by ``e^(tilt * position)``, and the normalised masses."""
    exponent = log_mass + tilt * position
    largest = float(np.max(exponent))
    weight = np.exp(exponent - largest)
    total = float(weight.sum())
    return largest + math.log(total), weight / total
