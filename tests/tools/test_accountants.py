"""`benchmarks/renyi.py`: the accountants that the papers used, against dp_accounting, mpmath and published figures."""

import math

import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from scipy.special import expit

from benchmarks.accountants import ACCOUNTANTS, compare
from benchmarks.renyi import amplified_rdp, rdp, renyi_eps
from numpyro_dp.privacy.accounting import composed_eps
from numpyro_dp.privacy.mechanisms import (
    BarkerBatch,
    FixedBatchGaussian,
    Gaussian,
    LogisticBit,
    PoissonGaussian,
    TruncatedPoissonGaussian,
)
from numpyro_dp.tools.events import DP_ACCOUNTING_RELATIONS, event_of

REPLACE, ADD_REMOVE = "replace_one", "add_or_remove_one"
SYMMETRIC = [Gaussian(1.3), LogisticBit(0.8)]
BATCHES = [PoissonGaussian(0.9, 0.05), TruncatedPoissonGaussian(1.1, 0.1, 200, 22)]
FIXED = [FixedBatchGaussian(0.8, 20, 400), BarkerBatch(1.0, 50, 1000, 2.0)]
CASES = [(mechanism, relation) for mechanism in SYMMETRIC + BATCHES for relation in (REPLACE, ADD_REMOVE)]
CASES += [(mechanism, REPLACE) for mechanism in FIXED]


@pytest.mark.parametrize(("mechanism", "relation"), CASES)
def test_no_curve_is_below_the_loss_distributions(mechanism, relation):
    costs = compare([(mechanism, 40)], 1e-5, relation)
    assert list(costs) == [name for name in ACCOUNTANTS if name in costs]
    assert {"pld", "rdp", "moments"} <= set(costs)
    assert ("zcdp" in costs) == (mechanism.rho is not None)
    assert ("exact" in costs) == isinstance(mechanism, Gaussian)
    for name, tighter in (("rdp", "pld"), ("moments", "rdp"), ("zcdp", "rdp")):
        if name in costs:
            assert costs[tighter] <= costs[name] * (1 + 1e-9)
    assert composed_eps([(mechanism, 40)], 1e-5, relation) == pytest.approx(costs.get("exact", costs["pld"]), rel=1e-12)


@pytest.mark.parametrize(
    ("noise", "rate", "count", "delta", "poisson", "fixed"),
    [
        (1, 0.01, 1000, 1e-5, 2.10137, 20.99),
        (2, 0.01, 10**4, 1e-5, 2.35291, 13.15),
        (4, 0.05, 500, 1e-6, 1.34518, 6.61),
    ],
)
def test_subsampled_gaussians_agree_with_dp_accounting(noise, rate, count, delta, poisson, fixed):
    found = renyi_eps([(PoissonGaussian(noise, rate), count)], delta, ADD_REMOVE)
    assert poisson * 0.999 < found < poisson * 1.00001  # dp_accounting tries fewer orders
    # Theorem 9 is what we use; dp_accounting has a refinement of it for Gaussian noise.
    mechanism = FixedBatchGaussian(noise / 2, round(rate * 10**4), 10**4)
    accountant = RdpAccountant(neighboring_relation=DP_ACCOUNTING_RELATIONS[REPLACE])
    accountant.compose(event_of(mechanism, REPLACE), count)
    assert accountant.get_epsilon(delta) == pytest.approx(fixed, rel=1e-3)
    assert fixed * 0.999 < renyi_eps([(mechanism, count)], delta, REPLACE) < fixed * 1.07


def test_one_poisson_batch_agrees_with_dp_accounting():
    mechanism = PoissonGaussian(0.9, 0.03)
    for order in (2, 16, 64):  # at real orders its series is off by percents
        accountant = RdpAccountant(orders=[order])
        accountant.compose(event_of(mechanism, ADD_REMOVE))
        delta = 1e-12  # so small that the conversion is invertible
        conversion = math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        expected = accountant.get_epsilon(delta) - conversion
        assert rdp(mechanism, order, ADD_REMOVE) == pytest.approx(expected, rel=1e-9, abs=1e-13)
    assert rdp(mechanism, 1.5, ADD_REMOVE) == pytest.approx(0.00156272585162401, rel=1e-10)  # mpmath
    assert rdp(mechanism, 3.7, ADD_REMOVE) == pytest.approx(0.00513189492328517, rel=1e-10)
    # A rate so small that the divergence is next to nothing, and noise so small that its exponential overflows.
    assert rdp(PoissonGaussian(2.0, 1e-6), 2, ADD_REMOVE) == pytest.approx(1e-12 * math.expm1(0.25), rel=1e-9)
    assert rdp(PoissonGaussian(0.01, 0.1), 2, ADD_REMOVE) == pytest.approx(1e4 + 2 * math.log(0.1), rel=1e-9)


@pytest.mark.parametrize("shift", [0.05, 0.7, 3.0])
def test_a_bit_against_all_logits(shift):
    logits = np.linspace(-8 - shift, 8, 4001)
    p, q = expit(logits + shift), expit(logits)
    for order in (1.01, 2, 8, 100):
        ones = order * np.log(p) + (1 - order) * np.log(q)
        zeros = order * np.log1p(-p) + (1 - order) * np.log1p(-q)
        worst = (np.logaddexp(ones, zeros) / (order - 1)).max()
        assert worst * (1 - 1e-9) <= rdp(LogisticBit(1 / shift), order, REPLACE) <= worst * (1 + 2e-5)


@pytest.mark.parametrize(
    ("multiplier2", "batch", "rows", "delta", "moments", "better"),
    [
        (0.7, 1000, 10**5, 1e-6, 272, 442),
        (0.6, 1000, 2 * 10**5, 5e-7, 687, 1225),
        (1.5, 1000, 10**5, 1e-6, 1237, 1538),
        (0.7, 1200, 2 * 10**5, 5e-7, 969, 1447),
    ],
)
def test_published_iterations_of_the_minibatch_penalty(multiplier2, batch, rows, delta, moments, better):
    """Of Räisä's thesis, at eps = 4: Theorem 8 with either conversion."""
    mechanism = FixedBatchGaussian(math.sqrt(multiplier2), batch, rows)
    for classical, count in ((True, moments), (False, better)):
        assert renyi_eps([(mechanism, count)], delta, REPLACE, classical) <= 4
        assert renyi_eps([(mechanism, count + 1)], delta, REPLACE, classical) > 4


# Barker's test on a batch (Heikkilä et al. 2019)

ORDERS = [2, 3, 5, 10, 16, 32, 64]
GOLDEN = {
    "theorem 2": [0.35813916, 0.18565658, 0.10256453, 0.064910436, 0.063166902, 0.092682421, 0.19929728],
    "corollary 2": [1.7226573e-6, 2.5854312e-6, 4.3138617e-6, 8.6516831e-6, 1.3888422e-5, 2.8017696e-5, 5.697023e-5],
    "batch": [0.0040240322, 0.0060603465, 0.010182558, 0.020786908, 0.034106748, 0.073188028, 0.17137305],
    "all": [1.6128558e-8, 2.5205031e-8, 4.5384925e-8, 1.0768246e-7, 2.0485459e-7, 5.8434461e-7, 1.8757212e-6],
}


def theorem2(order: float, batch_size: int = 1000) -> float:
    """`BarkerBatch` on one batch, at ``kappa = 1`` and total variance 2, by their bound.

    Valid, and between 1.2 and 90 times as large as the divergence itself; which published figures rest on.

    :param order: below ``batch_size / 5``; infinite from there on.
    """
    rest = batch_size - 5 * order
    if rest <= 0:
        return math.inf
    return 2.5 / batch_size + math.log(2 * batch_size / rest) / (2 * (order - 1)) + 2 * order / rest


def test_barker_golden_values():
    found = {
        "theorem 2": [theorem2(order) for order in ORDERS],
        "corollary 2": [amplified_rdp(theorem2, order, 1e-3) for order in ORDERS],
        "batch": [rdp(BarkerBatch(1.0, 1000, 1000, 2.0), order, REPLACE) for order in ORDERS],  # the batch is all rows
        "all": [rdp(BarkerBatch(1.0, 1000, 10**6, 2.0), order, REPLACE) for order in ORDERS],
    }
    for name, golden in GOLDEN.items():
        np.testing.assert_allclose(found[name], golden, rtol=1e-7, err_msg=name)
    assert theorem2(2, 1300) == pytest.approx(0.35545847, rel=1e-7)
    assert theorem2(200) == math.inf


@pytest.mark.parametrize(
    ("count", "published", "moments", "better"),
    [(20_000, 1.000420, 0.223231, 0.162060), (5000, 0.499430, 0.137518, 0.095799), (1000, 0.225784, 0.0853, 0.0535)],
)
def test_published_mixture_experiment(count, published, moments, better):
    """Heikkilä et al.'s Gaussian mixture: a million rows, batches of 1000."""
    classical = [count * amplified_rdp(theorem2, k, 1e-3) + math.log(1e6) / (k - 1) for k in range(2, 199)]
    assert min(classical) == pytest.approx(published, rel=1e-5)
    found = compare([(BarkerBatch(1.0, 1000, 10**6, 2.0), count)], 1e-6, REPLACE)
    if count > 1000:  # there the golden values used orders up to 199 only
        assert found["moments"] == pytest.approx(moments, rel=1e-5)
        assert found["rdp"] == pytest.approx(better, rel=1e-5)
    assert 0.85 * moments < found["moments"] < moments * 1.0001
    assert found["pld"] < 0.25 * found["rdp"]


def test_barker_on_the_worst_batches():
    """Theorem 2 of Heikkilä et al. holds, ours is sharper, and both are above the divergence of the worst batches."""
    size, kappa, variance = 200, 1.0, 2.0
    mechanism = BarkerBatch(1 / kappa, size, size, variance)
    scale = kappa / math.sqrt(size)

    def release(rows):
        return scale * rows.sum(), variance - scale**2 * size * rows.var()

    def divergence(first, second, order):
        """Of two normal laws (mean, variance)."""
        mixed = order * second[1] + (1 - order) * first[1]
        spread = math.log(mixed / (first[1] ** (1 - order) * second[1] ** order)) / (2 * (1 - order))
        return order * (first[0] - second[0]) ** 2 / (2 * mixed) + spread

    for order in (2, 5, 10):
        worst = 0.0
        for ups in (0, size // 2, size - 1, size // 4, 3 * size // 4):
            batch = np.concatenate([np.ones(ups), -np.ones(size - 1 - ups)])
            for old, new in ((1.0, -1.0), (-1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
                both = release(np.append(batch, old)), release(np.append(batch, new))
                worst = max(worst, divergence(*both, order))
        assert worst < rdp(mechanism, order, REPLACE) < 1.3 * worst
        assert rdp(mechanism, order, REPLACE) < theorem2(order, size)


def test_no_noise_costs_infinitely_much():
    for mechanism in [type(m)(0.0, *list(vars(m).values())[1:]) for m in SYMMETRIC + BATCHES + FIXED]:
        assert rdp(mechanism, 2.0, REPLACE) == math.inf
    assert rdp(BarkerBatch(0.7, 50, 1000, 2.0), 2.0, REPLACE) == math.inf  # the batch variance may exceed the total
