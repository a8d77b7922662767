"""What a sequence of Gaussian releases costs: exact composition, calibration, and looser bounds for comparison.

Every private release in this package is a Gaussian mechanism: a sum with L2 sensitivity ``Delta`` plus noise of
standard deviation ``sigma``. Its *noise multiplier* is ``sigma / Delta``, and its cost is

    ``rho = 1 / (2 * noise_multiplier**2)``,

which adds up over any adaptive sequence whose noise multipliers are fixed beforehand. ``rho`` is the zCDP parameter;
because the releases are Gaussian it also determines the exact curve ``delta(eps)`` (`gaussian_delta`), so nothing is
lost in the composition (Sommer, Meiser and Mohammadi 2019; Theorem 3.5 of Räisä, Koskela and Honkela 2021).

Every conversion here rounds to the safe side: an ``eps`` or a ``delta`` up, a ``rho`` that may be spent down. Plain
floats in, plain floats out; nothing here depends on JAX.
"""

import math
from collections.abc import Callable, Sequence

from dp_accounting import DpEvent, GaussianDpEvent, SelfComposedDpEvent
from scipy.optimize import brentq
from scipy.special import log_ndtr

from numpyro_dp.mechanisms import NEIGHBORING_RELATIONS as NEIGHBORING_RELATIONS
from numpyro_dp.mechanisms import Mechanism

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
    _check(eps >= MIN_EPS, f"eps must be at least {MIN_EPS:g}, got {eps}")
    _check_delta(delta)
    if eps == math.inf:
        return math.inf
    lower = _zcdp_rho(eps, delta)  # valid for zCDP, hence below the exact root
    upper = 2 * lower + 1e-12
    while gaussian_delta(eps, upper) <= delta:
        upper *= 2
    rho = brentq(lambda r: gaussian_delta(eps, r) - delta, lower, upper, xtol=1e-300, rtol=1e-14)
    rho *= 1 - _SAFETY
    while gaussian_delta(eps, rho) > delta:  # cannot happen unless the safety margin were too small
        rho *= 1 - _SAFETY
    return rho


def zcdp_eps(delta: float, rho: float) -> float:
    """The classical zCDP conversion ``rho + 2 sqrt(rho ln(1/delta))`` (Bun and Steinke 2016, Proposition 1.3).

    For comparison only: always larger than `gaussian_eps`.
    """
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def _zcdp_rho(eps: float, delta: float) -> float:
    log_inverse_delta = math.log(1 / delta)
    # (sqrt(eps + L) - sqrt(L))^2 without cancellation
    return (eps / (math.sqrt(eps + log_inverse_delta) + math.sqrt(log_inverse_delta))) ** 2


def rdp_eps(delta: float, rho: float) -> float:
    """The best ``eps`` from the Rényi curve ``alpha * rho``, with the conversion of Canonne, Kamath and Steinke (2020).

    For comparison only: larger than `gaussian_eps`.
    """
    if rho == 0:
        return 0.0

    def eps_at(log_order_minus_one: float) -> float:
        order = 1 + math.exp(log_order_minus_one)
        return order * rho + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    # One smooth minimum in log(order - 1), near sqrt(ln(1/delta) / rho).
    centre = 0.5 * math.log(math.log(1 / delta) / rho)
    grid = [eps_at(centre + 0.001 * k) for k in range(-4000, 4001)]
    return max(0.0, min(grid))


def releases_rho(noise_multiplier: float, count: int) -> float:
    """Cost ``rho`` of `count` Gaussian releases at `noise_multiplier` (noise sd / L2 sensitivity), rounded up."""
    if count == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    return count / (2 * noise_multiplier**2) * (1 + 1e-15)


def noise_multiplier_for(rho: float, count: int) -> float:
    """The smallest noise multiplier at which `count` releases cost at most `rho`, rounded up; 0 for infinite `rho`."""
    _check(count > 0, f"count must be positive, got {count}")
    _check(rho > 0, f"rho must be positive, got {rho}")
    if rho == math.inf:
        return 0.0
    return math.sqrt(count / (2 * rho)) * (1 + _SAFETY)


def gaussian_event(noise_multiplier: float, count: int, neighboring_relation: str) -> DpEvent:
    """The privacy event of `count` releases, as dp_accounting's PLD accountant understands it.

    dp_accounting counts the noise in units of one row's norm bound, for either relation, while our noise multiplier
    counts it in units of the sensitivity (twice that bound under replace-one).

    .. warning:: dp_accounting's *RDP* accountant ignores the relation for full-batch Gaussian events; under
        ``"replace_one"`` feed these events to its PLD accountant only.
    """
    per_row_bound = 2.0 if neighboring_relation == "replace_one" else 1.0
    return SelfComposedDpEvent(GaussianDpEvent(per_row_bound * noise_multiplier), count)


def _check_delta(delta: float) -> None:
    _check(MIN_DELTA <= delta < 1, f"delta must lie between {MIN_DELTA:g} and 1, got {delta}")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


Releases = Sequence[tuple[Mechanism, int]]
"""What a run releases: each mechanism with its number of releases."""


def composed_eps(releases: Releases, delta: float, relation: str, accountant: str = "best") -> float:
    """The ``eps`` at which all `releases` together are ``(eps, delta)``-DP, rounded up."""
    raise NotImplementedError


def composed_delta(releases: Releases, eps: float, relation: str, accountant: str = "best") -> float:
    """The ``delta`` at which all `releases` together are ``(eps, delta)``-DP, rounded up."""
    raise NotImplementedError


def compare(releases: Releases, delta: float, relation: str) -> dict[str, float]:
    """``eps`` by every accountant that applies."""
    raise NotImplementedError


def calibrate(
    releases_at: Callable[[float], Releases],
    eps: float,
    delta: float,
    relation: str,
    low: float = 1e-3,
    high: float = 1e6,
) -> float:
    """The smallest scale whose releases cost at most `eps`; the noise multipliers grow with the scale."""
    raise NotImplementedError
