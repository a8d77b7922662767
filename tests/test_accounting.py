import math

import mpmath
import pytest
from dp_accounting import ComposedDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_dp.accounting import (
    NEIGHBORING_RELATIONS,
    gaussian_delta,
    gaussian_eps,
    gaussian_event,
    gaussian_rho,
    noise_multiplier_for,
    rdp_eps,
    releases_rho,
    zcdp_eps,
)


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


@settings(max_examples=200, deadline=None)
@given(eps=st.floats(1e-4, 500), log_delta=st.floats(-16, -1))
def test_conversions_round_to_the_safe_side(eps, log_delta):
    delta = 10**log_delta
    rho = gaussian_rho(eps, delta)
    assert exact_delta(eps, rho) <= delta
    assert exact_delta(gaussian_eps(delta, rho), rho) <= delta
    assert gaussian_eps(delta, rho) == pytest.approx(eps, rel=1e-6, abs=1e-9)
    assert gaussian_eps(delta, rho) <= rdp_eps(delta, rho) * (1 + 1e-6) + 1e-9
    assert rdp_eps(delta, rho) <= zcdp_eps(delta, rho) * (1 + 1e-6)


@settings(max_examples=50, deadline=None)
@given(rho=st.floats(1e-6, 50), count=st.integers(1, 10**7))
def test_noise_multiplier_never_overspends(rho, count):
    multiplier = noise_multiplier_for(rho, count)
    assert mpmath.mpf(count) / (2 * mpmath.mpf(multiplier) ** 2) <= rho
    assert releases_rho(multiplier, count) == pytest.approx(rho, rel=1e-8)


@pytest.mark.parametrize("relation", list(NEIGHBORING_RELATIONS))
def test_agrees_with_the_pld_accountant(relation):
    """dp_accounting's PLD discretises pessimistically, so it may only be slightly above."""
    counts = {20.0: 50, 60.0: 500}
    accountant = PLDAccountant(NEIGHBORING_RELATIONS[relation], value_discretization_interval=1e-4)
    accountant.compose(ComposedDpEvent([gaussian_event(m, k, relation) for m, k in counts.items()]))
    eps = gaussian_eps(1e-6, sum(releases_rho(m, k) for m, k in counts.items()))
    assert eps * (1 - 1e-6) <= accountant.get_epsilon(1e-6) <= eps * (1 + 3e-3)


def test_no_noise_and_no_budget():
    assert gaussian_eps(1e-6, math.inf) == math.inf
    assert gaussian_eps(1e-6, 0.0) == 0.0
    assert gaussian_rho(math.inf, 1e-6) == math.inf
    assert noise_multiplier_for(math.inf, 5) == 0.0
    assert releases_rho(0.0, 1) == math.inf
    assert releases_rho(0.0, 0) == 0.0


@pytest.mark.parametrize(("eps", "delta"), [(0, 1e-6), (-1, 1e-6), (math.nan, 1e-6), (1, 0), (1, 1), (1, math.nan)])
def test_impossible_budgets_are_refused(eps, delta):
    with pytest.raises(ValueError, match="must"):
        gaussian_rho(eps, delta)
