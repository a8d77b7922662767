"""Rényi curves of the package's mechanisms, and the accountants that rest on them, which the papers used.

Looser than what the package accounts with (`numpyro_dp.privacy.accounting`), which decides nothing by them. They show
what published numbers are worth, and are a second opinion on the loss distributions, which stay below them (but for
what a grid rounds up, where eps is in the thousands).
"""

import functools
import math
from collections.abc import Callable

import numpy as np
from scipy.special import gammaln, logsumexp

from numpyro_dp.privacy.accounting import CountedMechanisms
from numpyro_dp.privacy.mechanisms import (
    BarkerBatch,
    FixedBatchGaussian,
    Gaussian,
    LogisticBit,
    Mechanism,
    PoissonGaussian,
    TruncatedPoissonGaussian,
    noise_per_row_bound,
)


@functools.singledispatch
def rdp(mechanism: Mechanism, order: float, relation: str) -> float:
    """Bound on the Rényi divergence of `order` (above 1) between the releases on any two neighbouring tables."""
    raise NotImplementedError(type(mechanism).__name__)


@rdp.register
def _(mechanism: Gaussian, order: float, relation: str) -> float:
    return order * mechanism.rho


@rdp.register
def _(mechanism: PoissonGaussian, order: float, relation: str) -> float:
    if mechanism.noise_multiplier == 0:
        return math.inf
    shift = 1 / noise_per_row_bound(mechanism.noise_multiplier, relation)
    if relation == "replace_one":
        return _mixture_rdp(order, mechanism.rate, shift, -shift)
    return max(_mixture_rdp(order, mechanism.rate, shift, 0.0), _mixture_rdp(order, mechanism.rate, 0.0, shift))


@rdp.register
def _(mechanism: TruncatedPoissonGaussian, order: float, relation: str) -> float:
    full, rate = mechanism.full
    roomy = rdp(PoissonGaussian(mechanism.noise_multiplier, mechanism.rate), order, relation)
    if full == 0.0 or math.isinf(roomy):
        return roomy
    shift = 2 / noise_per_row_bound(mechanism.noise_multiplier, relation)
    # E[(P/Q)^order] of a mixture with a known label is the mixture of the expectations.
    exponents = (order - 1) * np.array([roomy, _mixture_rdp(order, rate, shift, -shift)])
    return float(logsumexp(exponents, b=[1 - full, full])) / (order - 1)


@rdp.register
def _(mechanism: FixedBatchGaussian, order: float, relation: str) -> float:
    """Wang, Balle and Kasiviswanathan (2019), Theorem 9."""
    mechanism.check_relation(relation)
    on_batch = Gaussian(mechanism.noise_per_replacement(relation))
    return amplified_rdp(lambda order: rdp(on_batch, order, relation), order, mechanism.rate)


@rdp.register
def _(mechanism: LogisticBit, order: float, relation: str) -> float:
    """The largest divergence over all logits.

    The loss of either value of the bit is ``t`` or ``t - Delta``, with ``Delta = 1 / noise_multiplier``; which of them
    has what probability follows from ``t``, and the expectation ``E exp((order - 1) * loss)`` is largest at

        ``e^t = (order-1)/order * (1 - e^(-order Delta)) / (e^-Delta - e^(-order Delta))``.
    """
    if mechanism.noise_multiplier == 0:
        return math.inf
    shift = 1 / mechanism.noise_multiplier
    if order * shift < 1e-2:  # the formula loses digits, and is order * rho up to a factor 1 - O(shift^2)
        return order * mechanism.rho
    log_all = math.log(-math.expm1(-order * shift))
    t = math.log1p(-1 / order) + log_all + shift - math.log(-math.expm1(-(order - 1) * shift))
    divergence = t + (log_all - math.log(order) - math.log(-math.expm1(-shift))) / (order - 1)
    return min(divergence, order * mechanism.rho)


@rdp.register
def _(mechanism: BarkerBatch, order: float, relation: str) -> float:
    """Over all pairs of variances that can occur when one row of a batch is replaced.

    In units of the second variance the divergence is a convex function of the first one, so it is largest at an end:
    the replaced row increases the variance most, or decreases it most. Taking the smallest variance for the unit in
    both cases rounds up.
    """
    mechanism.check_relation(relation)
    if mechanism.worst is None:
        return math.inf
    shift2, growth = mechanism.worst
    return amplified_rdp(
        lambda order: max(_normal_rdp(order, shift2, growth), _normal_rdp(order, shift2, -growth)),
        order,
        mechanism.rate,
    )


def amplified_rdp(on_batch: Callable[[float], float], order: float, rate: float) -> float:
    """Rényi divergence of a release on a batch drawn without replacement, from that on the batch itself.

    Theorem 9 of Wang, Balle and Kasiviswanathan (2019), for ``"replace_one"`` on both sides; Corollary 2 of Heikkilä et
    al. (2019). It holds at whole orders; between them ``(order - 1) * divergence`` is convex, hence below its chord.

    :param rate: batch size over number of rows.
    """
    lower = math.floor(order)
    if lower == order:
        return _amplified_rdp_whole(on_batch, lower, rate)
    upper_exponent = lower * _amplified_rdp_whole(on_batch, lower + 1, rate)
    lower_exponent = (lower - 1) * _amplified_rdp_whole(on_batch, lower, rate) if lower > 1 else 0.0
    weight = order - lower
    return min(on_batch(order), ((1 - weight) * lower_exponent + weight * upper_exponent) / (order - 1))


def _amplified_rdp_whole(on_batch: Callable[[float], float], order: int, rate: float) -> float:
    base = on_batch(float(order))
    if math.isinf(base):
        return math.inf
    j = np.arange(2, order + 1, dtype=float)
    curve = np.array([on_batch(x) for x in j])
    log_terms = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1) + j * math.log(rate)
    log_terms += math.log(2) + (j - 1) * curve
    second = curve[0]  # of order 2: the smaller of 4 (e^second - 1) and 2 e^second
    if second < math.log(2):
        log_terms[0] += math.log(2 * -math.expm1(-second)) if second > 0 else -math.inf
    return min(base, float(np.logaddexp(0.0, logsumexp(log_terms))) / (order - 1))


def _normal_rdp(order: float, shift2: float, growth: float) -> float:
    """Rényi divergence of ``Normal(shift, 1 + growth)`` from ``Normal(0, 1)``, with ``shift2 = shift**2``."""
    scale = 1 - (order - 1) * growth
    if scale <= 0 or growth <= -1:
        return math.inf
    return -0.5 * math.log1p(growth) - math.log(scale) / (2 * (order - 1)) + order * shift2 / (2 * scale)


def _mixture_rdp(order: float, rate: float, first: float, second: float) -> float:
    """Rényi divergence between ``(1 - rate) N(0, 1) + rate N(first, 1)`` and the same with `second`.

    By the trapezoidal rule, which converges geometrically for such integrands.
    """
    shift = max(abs(first), abs(second))
    end = 2 * order * shift + 15
    step = min(0.05, 0.5 / shift)
    if end > 2e5 * step:  # next to no noise: here sampling makes no difference, and without it the result is larger
        return order * (first - second) ** 2 / 2
    x = np.arange(-end, end + step, step)
    exponent = order * _log_ratio(x, rate, first) + (1 - order) * _log_ratio(x, rate, second)
    if np.max(exponent) > 600:
        return float(logsumexp(exponent - 0.5 * x**2, b=step / math.sqrt(2 * math.pi))) / (order - 1)
    # The integral minus 1 directly, for it may be tiny.
    excess = float(np.sum(np.exp(-0.5 * x**2) * np.expm1(exponent))) * step / math.sqrt(2 * math.pi)
    return math.log1p(max(excess, 0.0)) / (order - 1)


def _log_ratio(x: np.ndarray, rate: float, shift: float) -> np.ndarray:
    """Log density at `x` of ``(1 - rate) N(0, 1) + rate N(shift, 1)`` relative to ``N(0, 1)``."""
    exponent = shift * x - 0.5 * shift**2
    small = np.log1p(rate * np.expm1(np.minimum(exponent, 1.0)))
    with np.errstate(divide="ignore"):
        return np.where(exponent < 1, small, np.logaddexp(np.log1p(-rate), math.log(rate) + exponent))


def renyi_eps(releases: CountedMechanisms, delta: float, relation: str, classical: bool = False) -> float:
    """``eps`` of all `releases` together, at the best order; a buffer that may overflow is not counted.

    :param classical: as the moments accountant has it: whole orders, and the conversion ``D + log(1 / delta) / (order -
        1)``. Otherwise real orders, and the conversion of Canonne, Kamath and Steinke (2020).
    """

    @functools.cache
    def at(order: float) -> float:
        divergence = sum(count * rdp(mechanism, order, relation) for mechanism, count in releases)
        if classical:
            return divergence - math.log(delta) / (order - 1)
        return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    return max(0.0, _smallest(at, classical))


def _smallest(at: Callable[[float], float], whole: bool) -> float:
    """The minimum over the orders. Any order is valid; the function has one valley, up to rounding."""
    orders = [1 + 2.0**k for k in range(1 if whole else -6, 15)]
    orders = [2.0, *orders] if whole else orders
    values: list[float] = []
    for order in orders:
        values.append(at(order))
        if len(values) > 3 and values[-1] >= values[-2] >= values[-3]:
            break
    best = int(np.argmin(values))
    left, right = orders[max(best - 1, 0)], orders[min(best + 1, len(orders) - 1)]
    # Between the neighbours: whole orders (where some curves have their kinks), or ever finer real ones.
    while right - left > (1 if whole else 0.01 * (left - 1)):
        inner = np.linspace(left, right, 9)
        inner = np.unique(np.round(inner)) if whole or right - left >= 8 else inner
        inner_values = [at(float(order)) for order in inner]
        best = int(np.argmin(inner_values))
        values.append(inner_values[best])
        narrower = float(inner[max(best - 1, 0)]), float(inner[min(best + 1, len(inner) - 1)])
        if narrower[1] - narrower[0] >= right - left or (whole and len(inner) <= 3):
            break
        left, right = narrower
    return min(values)
