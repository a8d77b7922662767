"""`benchmarks/one_run.py`: audits of single runs, and that their bound is one."""

import warnings

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
from helpers.mistakes import noise_divided_by

from benchmarks.one_run import SUBJECTS, audit_once, eps_lower, p_value
from numpyro_dp import PosteriorWarning
from numpyro_dp.privacy.noise import NoiseSource

EPS, DELTA = 4.0, 1e-9  # a larger delta would excuse more than ERROR
ERROR = 1e-6  # probability that an honest kernel is accused


def test_without_delta_right_guesses_are_those_of_randomized_response():
    assert p_value(8, 10, 500, np.log(3), 0.0) == pytest.approx(scipy.stats.binom.sf(7, 10, 0.75))


def test_delta_counts_once_for_each_coin():
    """Of one coin guessed right: the probability is at most that of randomized response, plus 2 delta."""
    assert p_value(1, 1, 1, 1.0, 1e-3) == pytest.approx(np.e / (1 + np.e) + 2e-3 / (1 + np.e))
    # Of two, the worst of "one fewer" for all and "two fewer" for half of it.
    right = np.e / (1 + np.e)
    one_fewer, two_fewer = 2 * right * (1 - right), 2 * right * (1 - right) + (1 - right) ** 2
    worst = max(one_fewer, two_fewer / 2)
    assert p_value(2, 2, 2, 1.0, 1e-3) == pytest.approx(right**2 + 4e-3 * worst)


@pytest.mark.parametrize("sure", [False, True])
def test_a_bound_is_what_so_many_right_guesses_are_too_many_for(sure):
    coins = np.arange(100) < 50
    scores = np.where(coins, 1.0, -1.0)
    scores[:20] *= -0.5 if sure else -2.0  # the wrong ones: those it is least sure of, or most
    found = eps_lower(scores, coins, 0.0, 0.05)
    if sure:  # 50 of 50
        expected = scipy.optimize.brentq(lambda eps: p_value(50, 50, 100, eps, 0.0) - 0.05 / 6, 0, 20)
    else:
        expected = scipy.optimize.brentq(lambda eps: p_value(80, 100, 100, eps, 0.0) - 0.05 / 6, 0, 20)
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.nightly
@pytest.mark.statistical
def test_the_bound_on_randomized_response_is_seldom_wrong():
    rng, eps, times = np.random.default_rng(0), 1.0, 100
    wrong = 0
    for _ in range(times):
        coins = rng.random(100) < 0.5
        answers = coins ^ (rng.random(100) > np.e / (1 + np.e))
        wrong += eps_lower((answers - 0.5) * rng.uniform(1, 2, 100), coins, 0.0, 0.05) > eps
    assert wrong <= scipy.stats.binom.isf(1e-6, times, 0.05)


def once(name, eps=EPS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PosteriorWarning)  # canaries are outliers, by design
        return audit_once(SUBJECTS[name], 0, eps=eps, delta=DELTA, error=ERROR)


@pytest.mark.nightly
@pytest.mark.statistical
@pytest.mark.parametrize("name", SUBJECTS)
def test_one_run_stays_below_its_claim(name):
    found = once(name)
    print(name, found)
    assert found.eps_lower <= EPS
    assert found.right > 0.5
    if "batches" not in name:  # a batch may not have the canary
        assert found.checked < 1e-3


@pytest.mark.nightly
@pytest.mark.statistical
def test_as_many_guesses_are_right_as_the_claim_allows():
    """Gaussian noise of a whole run tells two candidates apart as N(0, 1) and N(mu, 1), with the mu that is claimed."""

    def delta(mu):
        return scipy.stats.norm.cdf(mu / 2 - EPS / mu) - np.exp(EPS) * scipy.stats.norm.cdf(-mu / 2 - EPS / mu)

    mu = scipy.optimize.brentq(lambda mu: delta(mu) - DELTA, 0.1, 5)
    expected, coins = scipy.stats.norm.cdf(mu / 2), SUBJECTS["DPSGLD"].coins
    assert abs(once("DPSGLD").right - expected) < 5 * np.sqrt(expected * (1 - expected) / coins)


@pytest.mark.nightly
@pytest.mark.statistical
def test_a_sixteenth_of_the_noise_is_noticed_in_one_run(monkeypatch):
    """An eighth of it would take more coins at this confidence."""
    monkeypatch.setattr(NoiseSource, "draw", noise_divided_by(16))
    assert once("DPSGLD", eps=1.0).eps_lower > 1.0
