import dataclasses
import itertools
import math
import pickle
import time
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest
from dp_accounting import ComposedDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from helpers.tiers import some_every_day
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from numpyro_dp.privacy import mechanisms
from numpyro_dp.privacy.accounting import (
    MIN_DELTA,
    MIN_EPS,
    calibrate,
    composed_delta,
    composed_eps,
    gaussian_delta,
    gaussian_eps,
    gaussian_rho,
    how,
    noise_multiplier_for,
    zcdp_eps,
)
from numpyro_dp.privacy.mechanisms import (
    NEIGHBORING_RELATIONS,
    BarkerBatch,
    FixedBatchGaussian,
    Gaussian,
    LogisticBit,
    LogisticBits,
    PoissonGaussian,
    TruncatedPoissonGaussian,
)
from numpyro_dp.privacy.pld import largest_loss
from numpyro_dp.tools.events import DP_ACCOUNTING_RELATIONS, event_of, privacy_events


def releases_rho(noise_multiplier, count):
    return count * Gaussian(noise_multiplier).rho


def rdp_eps(delta, rho):
    """The best ``eps`` from the curve ``alpha * rho``, with the conversion of Canonne, Kamath and Steinke (2020)."""
    if rho == 0:
        return 0.0

    def eps_at(log_order_minus_one):
        order = 1 + math.exp(log_order_minus_one)
        return order * rho + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)

    # One smooth minimum in log(order - 1), near sqrt(ln(1/delta) / rho).
    centre = 0.5 * math.log(math.log(1 / delta) / rho)
    grid = [eps_at(centre + 0.001 * k) for k in range(-4000, 4001)]
    return max(0.0, min(grid))


def exact_delta(eps, rho):
    """The same curve in 60 digits, from its definition."""
    with mpmath.workdps(60):
        eps, rho = mpmath.mpf(eps), mpmath.mpf(rho)
        root = mpmath.sqrt(2 * rho)
        return mpmath.ncdf(-(eps - rho) / root) - mpmath.exp(eps) * mpmath.ncdf(-(eps + rho) / root)


@pytest.mark.parametrize(
    ("eps", "rho", "delta"),
    [
        (1, 0.1, 3.1850553783335e-3),
        (4, 0.5, 4.7122412007931e-5),
        (15, 3, 1.5397649849967e-7),
        (0, 0.5, 0.382924922548026),
        (1, 0.01, 2.436438397e-14),
        (800, 400, 6.946331189e-46),
    ],
)
def test_delta_golden_values(eps, rho, delta):
    assert gaussian_delta(eps, rho) == pytest.approx(delta, rel=1e-9)
    assert gaussian_delta(eps, rho) == pytest.approx(float(exact_delta(eps, rho)), rel=1e-11)


@pytest.mark.parametrize(
    ("noise_multiplier", "count", "delta", "eps"),
    [
        (10, 100, 1e-5, 4.3771780957),
        (10, 1000, 1e-5, 17.8565868301),
        (5, 10, 1e-5, 2.5943833805),
        (50, 1000, 1e-6, 2.9216005904),
        (math.sqrt(1000), 1000, 1e-6, 4.8865541175),
    ],
)
def test_eps_golden_values(noise_multiplier, count, delta, eps):
    assert gaussian_eps(delta, releases_rho(noise_multiplier, count)) == pytest.approx(eps, rel=3e-9)


@pytest.mark.parametrize(
    ("ratio", "grad", "num_steps", "iterations", "delta", "fresh", "reuse", "position"),
    [
        (10, 40, 10, 50, 1e-5, 3.9682846307, 3.8847768331, 3.8830598491),
        (20, 100, 20, 100, 1e-6, 3.1574857726, 3.1194985675, 3.1191130798),
    ],
)
def test_hmc_golden_values(ratio, grad, num_steps, iterations, delta, fresh, reuse, position):
    counts = [iterations * (num_steps + 1), iterations * num_steps + 1, iterations * num_steps]
    for gradients, eps in zip(counts, [fresh, reuse, position], strict=True):
        rho = releases_rho(ratio, iterations) + releases_rho(grad, gradients)
        assert gaussian_eps(delta, rho) == pytest.approx(eps, rel=3e-9)


@pytest.mark.parametrize(
    ("eps", "delta", "rho", "zcdp"),
    [
        (4, 1e-6, 0.351003648416, 0.253935578289),
        (15, 1e-6, 3.318427858641, 2.726084561829),
        (1, 1e-5, 0.035925702327, 0.020819938340),
        (0.5, 1e-6, 0.007701168114, None),
    ],
)
def test_budget_golden_values(eps, delta, rho, zcdp):
    assert gaussian_rho(eps, delta) == pytest.approx(rho, rel=5e-9)
    if zcdp is not None:
        assert zcdp_eps(delta, zcdp) == pytest.approx(eps, rel=1e-9)


@pytest.mark.parametrize(
    ("multiplier_over_root_n", "eps", "iterations"),
    [(0.17, 4, 2028), (0.17, 15, 19180), (0.05, 4, 175), (0.05, 15, 1659)],
)
def test_iterations_of_the_published_penalty_runs(multiplier_over_root_n, eps, iterations):
    noise_multiplier = multiplier_over_root_n * math.sqrt(1e5)
    assert math.floor(gaussian_rho(eps, 1e-6) / releases_rho(noise_multiplier, 1)) == iterations


@pytest.mark.parametrize(
    ("ratio", "grad", "num_steps", "eps", "fresh", "position"),
    [(0.10, 0.55, 25, 4, 377, 384), (0.10, 0.55, 25, 15, 3569, 3633), (0.1, 0.25, 12, 4, 227, 240)],
)
def test_iterations_of_the_published_hmc_runs(ratio, grad, num_steps, eps, fresh, position):
    root_n = math.sqrt(1e5)
    for gradients, iterations in ((num_steps + 1, fresh), (num_steps, position)):
        rho = releases_rho(ratio * root_n, 1) + releases_rho(grad * root_n, gradients)
        assert math.floor(gaussian_rho(eps, 1e-6) / rho) == iterations


@settings(max_examples=200)
@given(eps=st.floats(1e-4, 500), log_delta=st.floats(-16, -1))
def test_conversions_round_to_the_safe_side(eps, log_delta):
    delta = 10**log_delta
    rho = gaussian_rho(eps, delta)
    assert exact_delta(eps, rho) <= delta
    assert exact_delta(gaussian_eps(delta, rho), rho) <= delta
    assert gaussian_eps(delta, rho) == pytest.approx(eps, rel=1e-6, abs=1e-9)
    assert gaussian_eps(delta, rho) <= rdp_eps(delta, rho) * (1 + 1e-6) + 1e-9
    assert rdp_eps(delta, rho) <= zcdp_eps(delta, rho) * (1 + 1e-6)


@settings(max_examples=50)
@given(rho=st.floats(1e-6, 50), count=st.integers(1, 10**7))
def test_noise_multiplier_never_overspends(rho, count):
    multiplier = noise_multiplier_for(rho, count)
    assert mpmath.mpf(count) / (2 * mpmath.mpf(multiplier) ** 2) <= rho
    assert releases_rho(multiplier, count) == pytest.approx(rho, rel=1e-8)


@pytest.mark.parametrize("relation", list(NEIGHBORING_RELATIONS))
def test_agrees_with_the_pld_accountant(relation):
    """dp_accounting's PLD discretises pessimistically, so it may only be slightly above."""
    counts = {20.0: 50, 60.0: 500}
    accountant = PLDAccountant(DP_ACCOUNTING_RELATIONS[relation], value_discretization_interval=1e-4)
    events = [SelfComposedDpEvent(event_of(Gaussian(m), relation), k) for m, k in counts.items()]
    accountant.compose(ComposedDpEvent(events))
    eps = gaussian_eps(1e-6, sum(releases_rho(m, k) for m, k in counts.items()))
    assert eps * (1 - 1e-6) <= accountant.get_epsilon(1e-6) <= eps * (1 + 3e-3)


def test_no_noise_and_no_budget():
    assert gaussian_eps(1e-6, math.inf) == math.inf
    assert gaussian_eps(1e-6, 0.0) == 0.0
    assert gaussian_rho(math.inf, 1e-6) == math.inf
    assert noise_multiplier_for(math.inf, 5) == 0.0
    assert Gaussian(0.0).rho == math.inf


@pytest.mark.parametrize(("eps", "delta"), [(0, 1e-6), (-1, 1e-6), (math.nan, 1e-6), (1, 0), (1, 1), (1, math.nan)])
def test_impossible_budgets_are_refused(eps, delta):
    with pytest.raises(ValueError, match="must"):
        gaussian_rho(eps, delta)


# --- Every kind of release ------------------------------------------------------------------------------------------


REPLACE, ADD_REMOVE = "replace_one", "add_or_remove_one"
RELATIONS = [REPLACE, ADD_REMOVE]
EPS = np.array([0.0, 0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0])

SYMMETRIC = [Gaussian(1.3), LogisticBit(0.8)]
BATCHES = [PoissonGaussian(0.9, 0.05), TruncatedPoissonGaussian(1.1, 0.1, 200, 22)]
FIXED = [FixedBatchGaussian(0.8, 20, 400), BarkerBatch(1.0, 50, 1000, 2.0)]
CASES = [(mechanism, relation) for mechanism in SYMMETRIC + BATCHES for relation in RELATIONS]
CASES += [(mechanism, REPLACE) for mechanism in FIXED]


def per_row(noise_multiplier, relation):
    """Our noise multiplier from dp_accounting's."""
    return noise_multiplier / 2 if relation == REPLACE else noise_multiplier


# Golden values


@pytest.mark.parametrize(
    ("noise", "rate", "count", "delta", "add_or_remove", "replace", "fixed"),
    [
        (1, 0.01, 1000, 1e-5, 1.82824, 2.84345, 14.82),
        (2, 0.01, 10**4, 1e-5, 2.16277, 4.39607, 8.084),
        (4, 0.05, 500, 1e-6, 1.24517, 2.54627, 3.241),
    ],
)
def test_subsampled_gaussian_golden_values(noise, rate, count, delta, add_or_remove, replace, fixed):
    batch, rows = round(rate * 10**4), 10**4
    poisson = {relation: [(PoissonGaussian(per_row(noise, relation), rate), count)] for relation in RELATIONS}
    without_replacement = [(FixedBatchGaussian(noise / 2, batch, rows), count)]
    found = [
        composed_eps(poisson[ADD_REMOVE], delta, ADD_REMOVE),
        composed_eps(poisson[REPLACE], delta, REPLACE),
        composed_eps(without_replacement, delta, REPLACE),
    ]
    np.testing.assert_allclose(found, [add_or_remove, replace, fixed], rtol=6e-4)


@pytest.mark.parametrize(("max_batch_size", "add_or_remove", "replace"), [(1000, 1.975, 2.123), (1100, 0.6288, 1.2077)])
def test_truncated_poisson_golden_values(max_batch_size, add_or_remove, replace):
    for relation, eps in ((ADD_REMOVE, add_or_remove), (REPLACE, replace)):
        mechanism = TruncatedPoissonGaussian(per_row(2, relation), 0.01, 10**5, max_batch_size)
        assert composed_eps([(mechanism, 1000)], 1e-5, relation) == pytest.approx(eps, rel=1e-3)


def published_schedule(steps):
    """Noise per row bound of the friction sampler of Lode's thesis, section 6.5."""
    step_sizes = 3 * np.arange(1, steps + 1) ** (-1 / 3)
    return [float(noise) for noise in np.sqrt(2 / (step_sizes * 0.7**2))]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("delta", "thesis", "replace", "fixed", "summed"),
    [
        (1e-6, 0.881, 1.7026, 4.442, 4.203),
        (1e-5, 0.763, 1.4981, 3.505, 3.268),
        (1e-4, 0.629, 1.2666, 2.606, 2.334),
        (1e-3, 0.473, 0.9944, 1.904, 1.579),
        (1e-2, 0.273, 0.6514, 1.273, 0.978),
    ],
)
def test_published_table_of_the_friction_sampler(delta, thesis, replace, fixed, summed):
    noises = published_schedule(200)

    def eps(relation, mechanism_at):
        return composed_eps([(mechanism_at(noise), 10) for noise in noises], delta, relation)

    found = eps(ADD_REMOVE, lambda noise: PoissonGaussian(noise, 0.01))
    assert thesis - 6e-4 < found < thesis * 1.004 + 6e-4
    for golden, found in (
        (replace, eps(REPLACE, lambda noise: PoissonGaussian(noise / 2, 0.01))),
        (fixed, eps(REPLACE, lambda noise: FixedBatchGaussian(noise / 2, 10, 1000))),
        (summed, eps(ADD_REMOVE, lambda noise: PoissonGaussian(noise / 2, 0.01))),
    ):
        assert golden * 0.9995 < found < golden * 1.004


@pytest.mark.nightly
@pytest.mark.parametrize(("steps", "eps"), [(100, 0.609), (500, 1.040), (1000, 1.324)])
def test_published_iterations_of_the_friction_sampler(steps, eps):
    releases = [(PoissonGaussian(noise, 0.01), 10) for noise in published_schedule(steps)]
    assert composed_eps(releases, 1e-5, ADD_REMOVE) == pytest.approx(eps, rel=4e-3)


def test_barker_on_all_rows_golden_values():
    bound, count = 0.01, 1000
    noisy = [(Gaussian(math.sqrt(2) / (2 * bound)), count)]
    bits = [(LogisticBit(1 / (2 * bound)), count)]
    assert count * noisy[0][0].rho == pytest.approx(0.1)
    assert count * bits[0][0].rho == pytest.approx(0.05)
    assert composed_eps(noisy, 1e-6, REPLACE) == pytest.approx(1.994527, rel=1e-6)
    assert zcdp_eps(1e-6, count * bits[0][0].rho) == pytest.approx(1.712258, rel=1e-6)
    assert composed_eps(bits, 1e-6, REPLACE) == pytest.approx(gaussian_eps(1e-6, 0.05), rel=1e-2)


@pytest.mark.parametrize(
    ("multiplier2", "batch", "rows", "delta", "count"),
    [
        (0.7, 1000, 10**5, 1e-6, 1130),
        (0.6, 1000, 2 * 10**5, 5e-7, 3080),
        (1.5, 1000, 10**5, 1e-6, 4696),
        (0.7, 1200, 2 * 10**5, 5e-7, 3128),
    ],
)
def test_iterations_of_the_minibatch_penalty(multiplier2, batch, rows, delta, count):
    """Of Räisä's thesis, at eps = 4."""
    mechanism = FixedBatchGaussian(math.sqrt(multiplier2), batch, rows)
    assert composed_eps([(mechanism, math.floor(0.997 * count))], delta, REPLACE) <= 4
    assert composed_eps([(mechanism, math.ceil(1.003 * count) + 1)], delta, REPLACE) > 4


@pytest.mark.parametrize(
    ("noise", "eps", "fixed", "replace", "add_or_remove"),
    [(2.3570, 4, 4176, 9712, 35_200), (4.5644, 4, 24_832, 36_480, 141_824), (2.3570, 15, 39_808, 91_776, 335_360)],
)
def test_iterations_of_the_published_gradient_samplers(noise, eps, fixed, replace, add_or_remove):
    """What the runs of Räisä et al.'s Langevin and thermostat samplers could have afforded, by their true batches."""
    for mechanism, relation, count in (
        (FixedBatchGaussian(noise / 2, 1000, 10**5), REPLACE, fixed),
        (PoissonGaussian(noise / 2, 0.01), REPLACE, replace),
        (PoissonGaussian(noise, 0.01), ADD_REMOVE, add_or_remove),
    ):
        assert composed_eps([(mechanism, math.floor(0.994 * count))], 1e-6, relation) <= eps
        assert composed_eps([(mechanism, math.ceil(1.006 * count))], 1e-6, relation) > eps


# A wrong relation or half the noise moves each of these figures by far more than the tolerances above.


@pytest.mark.parametrize(("mechanism", "relation"), CASES)
def test_half_the_noise_is_noticed(mechanism, relation):
    releases = [(mechanism, 30)]
    weaker = [(dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2), 30)]
    assert composed_eps(weaker, 1e-5, relation) > 1.3 * composed_eps(releases, 1e-5, relation)


@pytest.mark.parametrize("mechanism", BATCHES)
def test_a_wrong_relation_is_noticed(mechanism):
    """Noise in units of the row bound: replace-one costs more. In units of the sensitivity: less."""
    one = composed_eps([(mechanism, 30)], 1e-5, ADD_REMOVE)
    same = dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier / 2)
    assert composed_eps([(same, 30)], 1e-5, REPLACE) > 1.03 * one
    assert composed_eps([(mechanism, 30)], 1e-5, REPLACE) < 0.9 * one


# Against dp_accounting


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    "releases",
    [
        [(PoissonGaussian(0.9, 0.02), 300)],
        [(TruncatedPoissonGaussian(0.9, 0.02, 5000, 110), 300)],
        [(PoissonGaussian(1.0, 0.1), 20), (Gaussian(8.0), 10), (PoissonGaussian(0.6, 0.001), 100)],
        [(PoissonGaussian(0.5, 0.5), 1)],
        [(PoissonGaussian(0.3, 0.001), 10)],
    ],
)
def test_agrees_with_dp_accounting(releases, relation):
    accountant = PLDAccountant(DP_ACCOUNTING_RELATIONS[relation], value_discretization_interval=2e-4)
    for mechanism, count in releases:
        accountant.compose(event_of(mechanism, relation), count)
    for delta in (1e-3, 1e-5, 1e-7):
        assert composed_eps(releases, delta, relation) == pytest.approx(accountant.get_epsilon(delta), rel=2e-3)
    for eps in (0.5, 2.0):
        expected = accountant.get_delta(eps)
        if expected > 1e-8:
            assert composed_delta(releases, eps, relation) == pytest.approx(expected, rel=1e-2)


def test_the_events_of_a_run_are_all_that_it_committed():
    mechanism, report = Gaussian(40.0), SimpleNamespace(private=True, neighboring_relation=REPLACE, committed=[])
    report.committed = [(mechanism, 30), (Gaussian(25.0), 2)]
    accountant = PLDAccountant(DP_ACCOUNTING_RELATIONS[REPLACE], value_discretization_interval=1e-3)
    for event in privacy_events(report):
        accountant.compose(event)
    assert accountant.get_epsilon(1e-6) == pytest.approx(composed_eps(report.committed, 1e-6, REPLACE), rel=5e-3)
    report.private = False
    with pytest.raises(ValueError, match="no privacy event"):
        privacy_events(report)


# Against the definition, on tables so small that all batches can be listed


def mixture_density(x, weights, means, sds):
    z = (x[:, None] - means) / sds
    return np.sum(weights * np.exp(-0.5 * z**2) / (sds * math.sqrt(2 * math.pi)), axis=1)


def profile_of(first, second):
    """Profile at `EPS` between two mixtures of normals, by quadrature."""
    sd = min(first[2].min(), second[2].min())
    means = np.concatenate([first[1], second[1]])
    reach = 12 * max(first[2].max(), second[2].max())
    x = np.linspace(means.min() - reach, means.max() + reach, 40_001)
    assert x[1] - x[0] < 0.05 * sd
    p, q = mixture_density(x, *first), mixture_density(x, *second)
    step = x[1] - x[0]
    return np.array([step * np.sum(np.maximum(p - math.exp(eps) * q, 0)) for eps in EPS])


def assert_covers(mechanism, relation, table, neighbor, release):
    """The mechanism's profile is at least that of `release` on these two tables, both ways."""
    first, second = release(table), release(neighbor)
    profiles = mechanism.profiles(relation)
    for one, other, profile in ((first, second, profiles[0]), (second, first, profiles[1])):
        np.testing.assert_array_less(profile_of(one, other), profile(EPS) * (1 + 1e-6) + 1e-9)
    return profile_of(first, second)


def subsets(size):
    return [np.array(kept) for kept in itertools.product([False, True], repeat=size)]


def poisson_release(rate, sd, max_batch_size=10**9):
    """The mixture that a noisy sum over a Poisson batch is; too large batches lose rows at random."""

    def release(rows):
        weights, means = [], []
        for kept in subsets(len(rows)):
            weight = rate ** kept.sum() * (1 - rate) ** (~kept).sum()
            batch = rows[kept]
            choices = list(itertools.combinations(batch, min(len(batch), max_batch_size)))
            weights += [weight / len(choices)] * len(choices)
            means += [sum(choice) for choice in choices]
        return np.array(weights), np.array(means), np.full(len(means), sd)

    return release


def fixed_batches(rows, size):
    return [np.array(batch) for batch in itertools.combinations(rows, size)]


def rows_strategy(number):
    return st.lists(st.sampled_from([-1.0, -0.4, 0.0, 0.3, 1.0]), min_size=number, max_size=number).map(np.array)


@settings(max_examples=25)
@given(rows=rows_strategy(3), old=st.sampled_from([-1.0, 0.5, 1.0]), new=st.sampled_from([-1.0, 0.0, 1.0]))
@pytest.mark.parametrize("max_batch_size", [10**9, 2])
def test_poisson_batches_against_the_definition(max_batch_size, rows, old, new):
    rate, sd = 0.3, 1.2
    release = poisson_release(rate, sd, max_batch_size)
    for relation in RELATIONS:
        neighbor = np.append(rows, new) if relation == REPLACE else rows
        number = len(rows) + 1
        noise = sd / 2 if relation == REPLACE else sd
        mechanism = PoissonGaussian(noise, rate)
        if max_batch_size < 10:
            mechanism = TruncatedPoissonGaussian(noise, rate, number, max_batch_size)
        assert_covers(mechanism, relation, np.append(rows, old), neighbor, release)


def test_poisson_batches_attain_the_profile():
    sd, rate, others = 1.2, 0.3, np.zeros(2)
    release = poisson_release(rate, sd)
    exact = assert_covers(PoissonGaussian(sd, rate), ADD_REMOVE, np.append(others, 1.0), others, release)
    np.testing.assert_allclose(exact, PoissonGaussian(sd, rate).profiles(ADD_REMOVE)[0](EPS), rtol=1e-4, atol=1e-12)
    mechanism = PoissonGaussian(sd / 2, rate)
    exact = assert_covers(mechanism, REPLACE, np.append(others, 1.0), np.append(others, -1.0), release)
    np.testing.assert_allclose(exact, mechanism.profiles(REPLACE)[0](EPS), rtol=1e-4, atol=1e-12)


@settings(max_examples=25)
@given(rows=rows_strategy(5), old=st.sampled_from([-1.0, 0.5, 1.0]), new=st.sampled_from([-1.0, 0.0, 1.0]))
def test_fixed_batches_against_the_definition(rows, old, new):
    sd, size = 1.2, 2

    def release(rows):
        means = np.array([batch.sum() for batch in fixed_batches(rows, size)])
        return np.full(len(means), 1 / len(means)), means, np.full(len(means), sd)

    mechanism = FixedBatchGaussian(sd / 2, size, 6)
    assert_covers(mechanism, REPLACE, np.append(rows, old), np.append(rows, new), release)
    # The worst case: all the others are like the new row. Poisson accounting would miss it.
    others = np.full(5, -1.0)
    exact = assert_covers(mechanism, REPLACE, np.append(others, 1.0), np.append(others, -1.0), release)
    np.testing.assert_allclose(exact, mechanism.profiles(REPLACE)[0](EPS), rtol=1e-4, atol=1e-12)
    assert exact[3] > 1.2 * PoissonGaussian(sd / 2, size / 6).profiles(REPLACE)[0](EPS)[3]


@settings(max_examples=40)
@given(
    rows=rows_strategy(5),
    old=st.sampled_from([-1.0, 0.5, 1.0]),
    new=st.sampled_from([-1.0, 0.0, 1.0]),
    size=st.integers(2, 6),
    kappa=st.sampled_from([0.3, 1.0, 1.3]),
)
def test_barker_batches_against_the_definition(rows, old, new, size, kappa):
    """Rows are log ratios in units of the clip bound; the batch variance tops up the noise."""
    variance, scale = 2.0, kappa / math.sqrt(size)

    def release(rows):
        batches = fixed_batches(rows, size)
        means = scale * np.array([batch.sum() for batch in batches])
        noise = variance - scale**2 * size * np.array([batch.var() for batch in batches])
        return np.full(len(means), 1 / len(means)), means, np.sqrt(noise)

    mechanism = BarkerBatch(1 / kappa, size, 6, variance)
    assert_covers(mechanism, REPLACE, np.append(rows, old), np.append(rows, new), release)


# Accept bits


def bit_pairs(shift, number=4001):
    """Probabilities of the bit on neighbouring tables, for many logits."""
    logits = np.linspace(-8 - shift, 8, number)
    return expit(logits + shift), expit(logits)


@pytest.mark.parametrize("shift", [0.05, 0.7, 3.0])
def test_logistic_bit_against_all_logits(shift):
    mechanism = LogisticBit(1 / shift)
    p, q = bit_pairs(shift)
    for order in (1.01, 2, 8, 100):
        ones = order * np.log(p) + (1 - order) * np.log(q)
        zeros = order * np.log1p(-p) + (1 - order) * np.log1p(-q)
        assert (np.logaddexp(ones, zeros) / (order - 1)).max() <= order * mechanism.rho
    for eps in (0.0, 0.3 * shift, 0.9 * shift, 1.1 * shift):
        exact = np.maximum(p - math.exp(eps) * q, 0) + np.maximum((1 - p) - math.exp(eps) * (1 - q), 0)
        (profile,) = mechanism.profiles(REPLACE)[0](np.array([eps]))
        assert profile == pytest.approx(exact.max(), rel=1e-4, abs=1e-15)
        assert profile >= exact.max() * (1 - 1e-9)


def test_logistic_bits_against_adaptive_adversaries():
    """Whatever logit follows which bits: the exact profile of the tree of answers stays below, and comes close."""
    shift, length = 0.6, 4
    rng = np.random.default_rng(0)
    profile = LogisticBits(1 / shift, length).profiles(REPLACE)[0](EPS)

    def tree(logit_after):
        """Probabilities of all answers under both tables."""
        answers = [((), 1.0, 1.0)]
        for _ in range(length):
            longer = []
            for bits, p, q in answers:
                logit, sign = logit_after(bits)
                one, other = expit(logit + sign * shift), expit(logit)
                longer += [((*bits, 1), p * one, q * other), ((*bits, 0), p * (1 - one), q * (1 - other))]
            answers = longer
        p, q = (np.array(column) for column in list(zip(*answers, strict=True))[1:])
        return np.array([np.sum(np.maximum(p - math.exp(eps) * q, 0)) for eps in EPS])

    best = np.zeros(len(EPS))
    for trial in range(300):
        logits: dict[tuple, tuple] = {}
        spread = 3 * rng.random() if trial % 2 else 0.2

        def logit_after(bits, logits=logits, spread=spread):
            return logits.setdefault(
                bits, (-shift / 2 + spread * rng.normal(), 1 if spread == 0.2 else rng.choice([-1, 1]))
            )

        best = np.maximum(best, tree(logit_after))
    np.testing.assert_array_less(best, profile + 1e-12)
    # At each eps the best adversary of one kind: all logits the same.
    same = np.array([tree(lambda bits, logit=logit: (logit, 1)) for logit in np.linspace(-3, 3, 121)]).max(axis=0)
    assert np.all(same[:4] > 0.97 * profile[:4])


@pytest.mark.parametrize(("count", "shift"), [(1000, 0.02), (20, 0.3)])
def test_composed_bits(count, shift):
    """Many small moves cost like Gaussian noise with the same rho; never more than the sum of the largest losses."""
    eps, rho = composed_eps([(LogisticBit(1 / shift), count)], 1e-6, REPLACE), count * shift**2 / 8
    assert eps < zcdp_eps(1e-6, rho)
    assert eps == pytest.approx(gaussian_eps(1e-6, rho), rel=0.01 if count > 100 else 0.2)
    assert composed_eps([(LogisticBit(2.0), 3)], 1e-12, REPLACE) <= 1.5 * 1.01


# Composition


@pytest.mark.parametrize("count", some_every_day([1, 30, 10**4, 10**7], [1, 30, 10**4]))
@pytest.mark.parametrize("rho", [1e-3, 0.05, 3.0])
def test_convolution_against_the_closed_form(count, rho):
    """A batch of all rows is Gaussian. At every delta the convolution is above the exact eps, and hardly above it."""
    releases = [(FixedBatchGaussian(math.sqrt(count / (2 * rho)), 1000, 1000), count)]
    for delta in (1e-2, 1e-6, 1e-12, 1e-29):
        exact = gaussian_eps(delta, rho)
        assert exact * (1 - 1e-8) <= composed_eps(releases, delta, REPLACE) <= exact * (1 + 5e-4)
        assert delta * (1 - 1e-6) <= composed_delta(releases, exact, REPLACE) <= delta * 1.05


@pytest.mark.parametrize(("mechanism", "relation"), CASES)
def test_eps_and_delta_are_inverse(mechanism, relation):
    eps = composed_eps([(mechanism, 40)], 1e-5, relation)
    assert 0.97e-5 <= composed_delta([(mechanism, 40)], eps, relation) <= 1e-5 * (1 + 1e-6)


@pytest.mark.parametrize(("mechanism", "relation"), CASES)
def test_costs_grow_with_the_number_of_releases(mechanism, relation):
    costs = [composed_eps([(mechanism, count)], 1e-5, relation) for count in (1, 2, 10, 100)]
    assert costs == sorted(costs)
    assert costs[0] < costs[1]


def test_order_and_splitting_of_releases_do_not_matter():
    one, two = PoissonGaussian(1.0, 0.1), FixedBatchGaussian(2.0, 10, 100)
    eps = composed_eps([(one, 5), (two, 7)], 1e-5, REPLACE)
    assert composed_eps([(two, 3), (one, 5), (two, 4), (Gaussian(1.0), 0)], 1e-5, REPLACE) == pytest.approx(
        eps, rel=1e-9
    )


def test_schedules_are_grouped_to_the_safe_side():
    """Noise multipliers within half a percent of each other are lowered to one."""
    releases = [(PoissonGaussian(1.5 + 0.002 * k, 0.05), 2) for k in range(150)]
    grouped = composed_eps(releases, 1e-6, REPLACE)
    exact = PLDAccountant(DP_ACCOUNTING_RELATIONS[REPLACE], value_discretization_interval=1e-3)
    for mechanism, count in releases[::3]:  # every third one stands for three
        exact.compose(
            event_of(dataclasses.replace(mechanism, noise_multiplier=mechanism.noise_multiplier + 0.002), REPLACE),
            3 * count,
        )
    assert 1 < grouped / exact.get_epsilon(1e-6) < 1.005


def test_a_schedule_of_ten_thousand_steps_takes_seconds():
    releases = [(PoissonGaussian(0.6 * step ** (1 / 6), 0.01), 1) for step in range(1, 10_001)]
    start = time.process_time()
    assert 1.9 < composed_eps(releases, 1e-6, REPLACE) < 2.0
    assert time.process_time() - start < 10


def test_an_overflowing_buffer_is_paid_for():
    exact, count, overflow = PoissonGaussian(0.9, 0.05), 100, 1e-11
    overflowing = dataclasses.replace(exact, overflow=overflow)
    for relation in RELATIONS:
        eps = composed_eps([(overflowing, count)], 1e-5, relation)
        assert eps > composed_eps([(exact, count)], 1e-5, relation)
        rest = 1e-5 - count * overflow * (1 + math.exp(eps))
        assert eps == pytest.approx(composed_eps([(exact, count)], rest, relation), rel=1e-4)
        extra = composed_delta([(overflowing, count)], eps, relation) - composed_delta([(exact, count)], eps, relation)
        assert extra == pytest.approx(count * overflow * (1 + math.exp(eps)), rel=1e-6)
    assert composed_eps([(dataclasses.replace(exact, overflow=1e-25), count)], 1e-5, REPLACE) == pytest.approx(
        composed_eps([(exact, count)], 1e-5, REPLACE), rel=1e-9
    )
    assert composed_eps([(dataclasses.replace(exact, overflow=1e-6), count)], 1e-5, REPLACE) == math.inf


def test_no_noise_no_releases():
    assert composed_eps([], 1e-5, REPLACE) == 0.0
    assert composed_delta([], 0.0, REPLACE) == 0.0
    for mechanism in SYMMETRIC + BATCHES + FIXED:
        bare = dataclasses.replace(mechanism, noise_multiplier=0.0)
        assert composed_eps([(bare, 1), (Gaussian(1.0), 1)], 1e-5, REPLACE) == math.inf
        assert composed_delta([(bare, 1)], 1.0, REPLACE) == 1.0
    too_little = [(BarkerBatch(0.7, 50, 1000, 2.0), 1)]  # the batch variance may exceed the total
    assert composed_eps(too_little, 1e-5, REPLACE) == math.inf
    assert composed_delta(too_little, 1.0, REPLACE) > 1e-3


def test_nothing_costs_less_than_zero():
    assert composed_eps([(Gaussian(1e6), 1)], 0.9, REPLACE) == 0
    assert composed_eps([(LogisticBit(1e6), 1)], 0.9, REPLACE) >= 0


def test_where_eps_would_be_of_no_use_to_anyone_it_is_infinite():
    """Distributions on a grid would take long. What is calibrated stays below it."""
    releases = [(LogisticBit(1e-7), 100)]  # each bit may lose 10,000,000
    assert composed_eps(releases, 1e-6, REPLACE) == math.inf
    assert composed_delta(releases, 1.0, REPLACE) == 1.0
    scale = calibrate(lambda scale: [(LogisticBit(1e-7 * scale), 100)], 1e9, 1e-6, REPLACE)
    assert 1e7 < composed_eps([(LogisticBit(1e-7 * scale), 100)], 1e-6, REPLACE) < 1e9


@pytest.mark.parametrize("noise_multiplier", [0.1, 0.01, 1e-3])
def test_large_losses_against_the_closed_form(noise_multiplier):
    """Ten batches of all rows are Gaussian; eps goes up to five millions."""
    exact = gaussian_eps(1e-5, 10 * Gaussian(noise_multiplier).rho)
    found = composed_eps([(FixedBatchGaussian(noise_multiplier, 100, 100), 10)], 1e-5, REPLACE)
    assert exact <= found <= exact * (1 + 5e-4)


# Calibration


@pytest.mark.parametrize("eps", [0.1, 1.0, pytest.param(8.0, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("mechanism", "relation"), CASES)
def test_calibration(mechanism, relation, eps):
    def releases_at(scale):
        noise = scale if isinstance(mechanism, BarkerBatch) else scale * mechanism.noise_multiplier
        return [(dataclasses.replace(mechanism, noise_multiplier=noise), 1000)]

    evaluated = []

    def recorded(scale):
        evaluated.append(scale)
        return releases_at(scale)

    scale = calibrate(recorded, eps, 1e-6, relation)
    assert scale in evaluated
    assert composed_eps(releases_at(scale), 1e-6, relation) <= eps
    assert composed_eps(releases_at(scale * (1 - 5e-4)), 1e-6, relation) > eps
    assert len(evaluated) < 20


def test_calibration_of_several_kinds_at_once():
    def releases_at(scale):
        return [(PoissonGaussian(scale, 0.01), 10**4), (Gaussian(20 * scale), 500), (LogisticBit(50 * scale), 100)]

    scale = calibrate(releases_at, 1.0, 1e-6, REPLACE)
    assert 0.998 < composed_eps(releases_at(scale), 1e-6, REPLACE) <= 1.0


def test_calibration_at_the_ends():
    def releases_at(scale):
        return [(Gaussian(scale), 100)]

    assert calibrate(releases_at, 1.0, 1e-6, REPLACE, low=1e5) == pytest.approx(1e5)
    assert calibrate(releases_at, math.inf, 1e-6, REPLACE, low=0.1) == 0.1
    with pytest.raises(ValueError, match=r"eps=1 at delta=1e-06 cannot be met: at scale 10, .* allow fewer releases"):
        calibrate(releases_at, 1.0, 1e-6, REPLACE, high=10)
    with pytest.raises(ValueError, match="cannot be met"):  # the overflow alone costs more than delta
        calibrate(lambda scale: [(PoissonGaussian(scale, 0.01, 1e-6), 100)], 1.0, 1e-6, REPLACE)
    for bad in ({"eps": 0.0}, {"low": 0.0}, {"low": 2.0, "high": 1.0}):
        with pytest.raises(ValueError, match="must"):
            calibrate(releases_at, **{"eps": 1.0, "delta": 1e-6, "relation": REPLACE, **bad})


# Refusals


@pytest.mark.parametrize("mechanism", FIXED)
def test_fixed_batches_are_refused_under_add_or_remove(mechanism):
    for call in (
        lambda: composed_eps([(mechanism, 1)], 1e-5, ADD_REMOVE),
        lambda: composed_delta([(mechanism, 1)], 1.0, ADD_REMOVE),
        lambda: calibrate(lambda scale: [(mechanism, 1)], 1.0, 1e-5, ADD_REMOVE),
        lambda: mechanism.profiles(ADD_REMOVE),
        lambda: mechanism.pld(ADD_REMOVE, 1e-3),
    ):
        with pytest.raises(ValueError, match=r"add_or_remove_one.*use (Poisson batches|all rows)"):
            call()


def test_what_cannot_be_accounted_for_is_refused():
    with pytest.raises(ValueError, match=r"neighboring_relation must be .* got 'bounded'"):
        composed_eps([(Gaussian(1.0), 1)], 1e-5, "bounded")
    with pytest.raises(ValueError, match="count must be a whole number"):
        composed_eps([(Gaussian(1.0), -1)], 1e-5, REPLACE)
    with pytest.raises(ValueError, match="count must be positive"):
        noise_multiplier_for(1.0, 0)
    with pytest.raises(ValueError, match="delta must"):
        composed_eps([(Gaussian(1.0), 1)], 1e-40, REPLACE)
    with pytest.raises(ValueError, match="eps must"):
        composed_delta([(Gaussian(1.0), 1)], math.nan, REPLACE)
    with pytest.raises(ValueError, match="no event for this release: Barker"):
        event_of(BarkerBatch(1.0, 10, 100, 2.0), REPLACE)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gaussian(-1.0), "noise_multiplier"),
        (lambda: Gaussian(math.nan), "noise_multiplier"),
        (lambda: PoissonGaussian(1.0, 0.0), "rate"),
        (lambda: PoissonGaussian(1.0, 1.1), "rate"),
        (lambda: PoissonGaussian(1.0, 0.1, -1e-9), "overflow"),
        (lambda: PoissonGaussian(1.0, 0.1, 1.0), "overflow"),
        (lambda: TruncatedPoissonGaussian(1.0, 0.1, 0, 1), "num_rows"),
        (lambda: TruncatedPoissonGaussian(1.0, 0.1, 10, 0), "max_batch_size"),
        (lambda: FixedBatchGaussian(1.0, 11, 10), "batch_size"),
        (lambda: BarkerBatch(1.0, 1, 10, 2.0), "batch_size"),
        (lambda: BarkerBatch(1.0, 2, 10, 0.0), "variance"),
    ],
)
def test_impossible_mechanisms_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("mechanism", SYMMETRIC + BATCHES + FIXED)
def test_mechanisms_are_values(mechanism):
    assert pickle.loads(pickle.dumps(mechanism)) == mechanism
    assert hash(dataclasses.replace(mechanism)) == hash(mechanism)
    assert isinstance(mechanism.describe(), str)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.noise_multiplier = 1e9


@pytest.mark.parametrize("kind", [np.float16, np.float32])
@pytest.mark.parametrize("eps", [0.01, 0.1, 3.0])
def test_numbers_of_low_precision_are_computed_with_in_full(kind, eps):
    low, full = kind(eps), float(kind(eps))
    delta = kind(1e-4)
    assert gaussian_rho(low, delta) == gaussian_rho(full, float(delta))
    rho = gaussian_rho(full, 1e-6)
    assert gaussian_delta(low, rho) == gaussian_delta(full, rho) <= 1e-6
    assert gaussian_eps(delta, kind(0.1)) == gaussian_eps(float(delta), float(kind(0.1)))
    releases = ((Gaussian(5.0), 10),)
    assert composed_delta(releases, low, "replace_one") == composed_delta(releases, full, "replace_one")


def test_chords_join_the_points_of_a_grid():
    """Straight in ``e^eps`` from each point to the next, from the first cell to the last, and 0 beyond."""
    grid, deltas = np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.9, 0.5, 0.2, 0.1])
    eps = np.array([0.0, 0.3, 1.0, 1.6, 2.5, 3.0, 4.0])
    expected = np.interp(np.exp(eps), np.exp(grid), deltas) * (eps < 3)
    np.testing.assert_allclose(mechanisms._chords(eps, grid, deltas), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("mechanism", "relation", "interval"),
    [*((*case, 0.01) for case in CASES), (BarkerBatch(0.7, 50, 1000, 2.0), REPLACE, 100.0)],  # one without an end
)
def test_the_probabilities_of_losses_add_up_to_one(mechanism, relation, interval):
    for loss in mechanism.pld(relation, interval):
        assert loss.mass.min() >= 0
        assert loss.mass.sum() + loss.infinite == pytest.approx(1, abs=1e-12)


def test_a_delta_is_that_of_an_eps_above_zero():
    for eps in (-0.5, -1.0, math.nan):
        with pytest.raises(ValueError, match="eps must be at least 0"):
            composed_delta([(PoissonGaussian(1.0, 0.1), 1)], eps, REPLACE)
        with pytest.raises(ValueError, match="eps must be at least 0"):
            gaussian_delta(eps, 0.1)


def test_a_replaced_row_moves_mean_and_variance_of_a_batch_by_what_is_claimed():
    """``2 kappa / sqrt(b)``, and ``4 kappa^2 (1 - 1/b) / b``, over the smallest variance."""
    size, kappa2, variance = 5, 0.8, 2.0
    shift2, growth = BarkerBatch(kappa2**-0.5, size, 10, variance).worst
    assert shift2 == pytest.approx(4 * kappa2 / size / (variance - kappa2))
    assert growth == pytest.approx(4 * kappa2 / size * (1 - 1 / size) / (variance - kappa2))


@pytest.mark.parametrize("shift", [0.3, 2.0])
@pytest.mark.parametrize(
    ("first", "second"), [(1.3, 1.0), (1.0, 1.3), (2.0, 2.0), (1.0, 1.001), (1.001, 1.0), (0.3, 3.0), (3.0, 0.3)]
)
def test_two_normal_laws_against_their_densities(shift, first, second):
    """``max(p - e^eps q, 0)``, integrated."""
    x = np.linspace(-40, 40, 2_000_001)
    p = np.exp(-((x - shift) ** 2) / (2 * first)) / math.sqrt(2 * math.pi * first)
    q = np.exp(-(x**2) / (2 * second)) / math.sqrt(2 * math.pi * second)
    eps = np.array([-1.0, -0.2, 0.0, 0.1, 0.5, 1.0, 3.0])
    expected = [np.trapezoid(np.maximum(p - math.exp(e) * q, 0), x) for e in eps]
    np.testing.assert_allclose(mechanisms._normal_delta(eps, shift, first, second), expected, rtol=1e-6, atol=1e-10)


def test_between_two_places_there_is_a_share_or_nothing():
    low, high = np.array([0.0, -1.0, 1.0, 50.0, -np.inf]), np.array([1.0, 1.0, 1.0, 60.0, 0.0])
    found = mechanisms._log_between(low, high)
    np.testing.assert_allclose(np.exp(found), [0.34134475, 0.68268949, 0.0, 0.0, 0.5], atol=1e-8)
    assert mechanisms._log_between(np.array([2.0]), np.array([1.0])) == -np.inf
    # The logarithm of the normal law falls here, in its last bit.
    next_to_it = [np.array([-float.fromhex(f"0x1.40c9e9e0b379{digit}p+0")]) for digit in "54"]
    assert mechanisms._log_between(*next_to_it) < -30


def test_a_batch_that_is_never_full_is_a_poisson_batch():
    never_full = TruncatedPoissonGaussian(1.5, 1e-3, 1_000_000, 100_000)
    assert never_full.full == (0.0, 1e-3)
    for relation in (REPLACE, ADD_REMOVE):
        of_batches, poisson = (m.profiles(relation) for m in (never_full, PoissonGaussian(1.5, 1e-3)))
        for k in range(2):
            np.testing.assert_array_equal(of_batches[k](EPS), poisson[k](EPS))


def test_a_mechanism_is_made_anew_of_plain_numbers_or_refused():
    for mechanism in (Gaussian(np.float32(2.5)), FixedBatchGaussian(1.5, 5, 10), LogisticBit(0.5)):
        anew = mechanisms.rebuilt(mechanism)
        assert (anew, type(anew.noise_multiplier)) == (mechanism, float)
    assert type(mechanisms.rebuilt(FixedBatchGaussian(1.5, 5, 10)).batch_size) is int

    class SaysSo(Gaussian):
        rho = 0.0

    with pytest.raises(TypeError, match=r"only the mechanisms of .* are accounted for, got SaysSo"):
        mechanisms.rebuilt(SaysSo(1.0))


def test_the_smallest_delta_and_no_negative_cost():
    assert 0 < gaussian_eps(MIN_DELTA, 0.1) < math.inf
    for call in (lambda: gaussian_delta(1.0, -0.5), lambda: gaussian_eps(1e-6, -0.5)):
        with pytest.raises(ValueError, match=r"rho must be at least 0, got -0\.5"):
            call()


def test_the_way_to_a_price_is_told():
    assert how([(Gaussian(1.0), 2)]) == "Gaussian releases, in closed form"
    assert how([(Gaussian(1.0), 2), (LogisticBit(1.0), 1)]) == "privacy loss distributions, convolved"


def test_a_profile_that_does_not_end_has_the_largest_loss():
    assert largest_loss(np.ones_like) == pytest.approx(1e7)


def test_what_costs_nothing_costs_nothing():
    assert calibrate(lambda scale: [(Gaussian(100 * scale), 1)], 1.0, 0.5, REPLACE, low=1e-3) > 0
    assert calibrate(lambda scale: [(Gaussian(scale), 1)], MIN_EPS, 1e-6, REPLACE) > 0
    assert gaussian_delta(MIN_EPS, gaussian_rho(MIN_EPS, 1e-6)) <= 1e-6
    assert gaussian_delta(1.0, 0.0) == gaussian_delta(math.inf, 0.1) == gaussian_eps(0.9, 1e-3) == 0.0
    assert gaussian_delta(1.0, math.inf) == 1.0


def test_of_all_rows_a_poisson_batch_is_all_rows():
    of_batches, of_all = (m.profiles(ADD_REMOVE) for m in (PoissonGaussian(1.5, 1.0), Gaussian(1.5)))
    for k in range(2):
        np.testing.assert_array_equal(of_batches[k](EPS), of_all[k](EPS))


def test_two_normal_laws_far_below_every_loss():
    """Where the loss exceeds eps everywhere, the profile is ``1 - e^eps``."""
    eps = np.array([-3.0, -6.0, -20.0])
    np.testing.assert_allclose(mechanisms._normal_delta(eps, 0.5, 1.3, 1.0), -np.expm1(eps), rtol=1e-12)


def test_one_more_bit_is_the_most_that_any_logit_gives():
    """The closed form on each cell against many logits: not below the best of them, and next to it."""
    shift, length = 0.6, 3
    grid, deltas = mechanisms._logistic_profile(shift, length)
    fewer, before = mechanisms._logistic_profile(shift, length - 1)

    def profile(eps):
        known = mechanisms._chords(np.abs(eps), fewer, before)
        return np.where(eps < 0, -np.expm1(eps) + np.exp(eps) * known, known)

    for k in range(0, len(grid) - 1, 17):
        t = np.linspace(0, shift, 4001)
        p = -np.expm1(t - shift) / -math.expm1(-shift)
        best = (p * profile(grid[k] - t) + (1 - p) * profile(grid[k] - t + shift)).max()
        assert best * (1 - 1e-9) - 1e-15 <= deltas[k] <= best * (1 + 1e-3) + 1e-15


def test_a_delta_is_never_below_zero():
    """Where two probabilities are alike to the last bit, their difference may be on either side."""
    assert min(gaussian_delta(eps, 1e-26) for eps in np.linspace(1e-13, 6e-12, 2000)) >= 0


def test_without_noise_a_mechanism_still_has_its_relations():
    assert composed_eps([(FixedBatchGaussian(0.0, 20, 400), 1)], 1e-5, REPLACE) == math.inf
    with pytest.raises(ValueError, match="add_or_remove_one"):
        composed_eps([(FixedBatchGaussian(0.0, 20, 400), 1)], 1e-5, ADD_REMOVE)


@pytest.mark.parametrize("mechanism", [BarkerBatch(0.7, 50, 50, 2.0), FixedBatchGaussian(1e-5, 100, 100)])
def test_what_hides_nothing_has_a_delta_of_one(mechanism):
    """All of its losses are infinite, or as good as that."""
    assert composed_delta([(mechanism, 1)], 1.0, REPLACE) == 1.0
    assert composed_eps([(mechanism, 1)], 1e-5, REPLACE) == math.inf


def test_the_smallest_delta_pays_for_poisson_batches_too():
    """Of it, what a buffer that overflows may cost is taken off."""
    releases = [(PoissonGaussian(5.0, 0.01, 1e-40), 10)]
    at, above = (composed_eps(releases, delta, REPLACE) for delta in (MIN_DELTA, 1.1 * MIN_DELTA))
    assert above < at < above * 1.01


def test_a_profile_of_a_batch_is_a_probability():
    eps = np.array([0.0, 1e-9, 0.01])
    for mechanism in (BarkerBatch(0.75, 2, 100, 1.8), BarkerBatch(1.0, 2, 100, 1.01)):
        assert (mechanism._batch_profile(eps) <= 1).all()


def test_what_a_large_delta_pays_for_costs_no_eps():
    assert composed_eps([(PoissonGaussian(1000.0, 1e-3), 10)], 0.5, REPLACE) == 0.0
    assert composed_eps([(PoissonGaussian(1000.0, 1e-3), 10)], 1e-12, REPLACE) > 0.0


@pytest.mark.parametrize("rho", [0.0, -0.5])
def test_no_noise_is_enough_for_no_cost(rho):
    with pytest.raises(ValueError, match="rho must be positive"):
        noise_multiplier_for(rho, 3)


def test_batches_may_be_of_one_row():
    assert composed_eps([(FixedBatchGaussian(1.0, 1, 10), 1)], 1e-5, "replace_one") > 0
    assert composed_eps([(TruncatedPoissonGaussian(1.0, 0.1, 10, 1), 1)], 1e-5, "replace_one") > 0


def test_calibration_looks_below_one_and_above():
    for unit in (1e-6, 1e6):
        scale = calibrate(lambda scale, unit=unit: [(Gaussian(unit * scale), 10)], 1.0, 1e-6, REPLACE)
        assert unit * scale == pytest.approx(noise_multiplier_for(gaussian_rho(1.0, 1e-6), 10), rel=1e-3)
