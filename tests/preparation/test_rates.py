"""Rates are those of the scores that were released, where noise lets them be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import kstest

from numpyro_dp.preparation.combination import LastRelease, combine
from numpyro_dp.preparation.frames import Frame, NormalPrior
from numpyro_dp.preparation.last_look import _beyond_quadratic
from numpyro_dp.preparation.rates import _STEEPEST, _UNSURE, Rates, rates_of, steps_for, stretch, told, uneven_along
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import Bounds, Derivatives, Steps

M = 3
PLACE = np.array([2.0, -1.0, 30.0])
WIDTHS = np.array([0.5, 0.2, 0.01])


def released(rates, center=PLACE, noise=1e-4, rng=None, widths=WIDTHS, steepest=_STEEPEST):
    """What rows say whose information, in units of `WIDTHS`, is 1 at `PLACE`, and falls by `rates` along each phi."""
    frame = Frame(center, np.diag(widths))
    steps = Steps(np.arange(M), np.diag(np.full(M, 2.0)), np.full(M, steepest))
    information = np.exp(-rates * (center - PLACE)) * (widths / WIDTHS) ** 2
    along = rates * widths * np.diag(steps.ahead)  # over a step
    draws = np.zeros((2, M)) if rng is None else noise * rng.standard_normal((2, M))
    found = Derivatives(np.zeros(M), 0.1, np.diag(information + draws[0]), noise)
    return frame, found._replace(bends=-information * along + draws[1], bends_scale=noise, steps=steps)


class Discrete:
    """As much of a survey as says which steps to ask for."""

    size, power, is_discrete, is_listed, kinds = M, 1.0, True, True, np.eye(M, dtype=bool)


def prior(of_frames=0.0, steepest=0.0):
    return NormalPrior(np.zeros(M), np.eye(M), np.asarray(of_frames), np.asarray(steepest))


def steps_in(frame, of_frames, n):
    return steps_for(Discrete(), frame, prior(of_frames), n, np.arange(M)).ahead


def test_steps_are_those_of_one_coordinate_alone_as_wide_as_the_posterior():
    whitening = np.array([[0.3, 0.1, 0.0], [0.1, 0.2, 0.0], [0.0, -0.1, 0.25]])
    steps = steps_in(Frame(np.zeros(M), whitening), 0.0, 1000)
    np.testing.assert_allclose(whitening @ steps, np.diag(np.diag(whitening @ steps)), atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(steps, axis=0), 2)
    # A frame that is four times as narrow along one coordinate, for the sake of few rows.
    added = np.array([0.0, 15.0, 0.0]) * np.diag(np.linalg.inv(whitening @ whitening.T))
    values, vectors = np.linalg.eigh(np.eye(M) + whitening.T @ np.diag(added) @ whitening)
    narrow = Frame(np.zeros(M), whitening @ (vectors / np.sqrt(values)))
    wide = steps_in(narrow, added, 100_000)
    np.testing.assert_allclose(np.diag(narrow.whitening @ wide), np.diag(whitening @ steps))
    # Not so far that a typical one of these rows says something else: with more rows, it says more.
    short = steps_in(narrow, added, 1000)
    assert 0 < (narrow.whitening @ short)[1, 1] < 0.5 * (whitening @ steps)[1, 1]
    np.testing.assert_allclose(short[:, [0, 2]], wide[:, [0, 2]])


def test_scores_may_be_uneven_where_rows_say_something_else_within_two_standard_deviations():
    """A rate of a logistic law is a covariate's value, and twice that of the steepest row's derivative."""
    survey, frame = Discrete(), Frame(np.zeros(M), np.diag([0.05, 0.5, 3.0]))
    steep, flat = prior(steepest=[0.5, 0.5, 0.5]), prior(steepest=[1e-3, 1e-3, 1.0])
    np.testing.assert_array_equal(uneven_along(survey, frame, steep, 1000), [1, 2])
    steps = steps_for(survey, frame, steep, 1000, np.array([1, 2]))
    np.testing.assert_allclose(steps.steepest, [0.5, _STEEPEST])
    np.testing.assert_array_equal(steps.coordinates, [1, 2])
    np.testing.assert_allclose(frame.whitening @ steps.ahead, [[0, 0], [1, 0], [0, 6]])
    np.testing.assert_array_equal(uneven_along(survey, frame, flat, 1000), [2])
    np.testing.assert_array_equal(uneven_along(survey, frame, prior(), 1000), [0, 1, 2])  # nobody knows
    survey.is_discrete = False
    assert uneven_along(survey, frame, steep, 1000).size == 0


def test_of_counts_only_effects_of_groups_may_be_uneven():
    """Of a covariate, a steep row tells its product with a count."""
    survey, frame = Discrete(), Frame(np.zeros(M), np.diag([0.05, 0.5, 0.05]))
    survey.is_listed, steep = False, prior(steepest=1e4)
    assert uneven_along(survey, frame, steep, 1000).size == 0
    assert uneven_along(survey, frame, prior(), 1000).size == 0
    survey.kinds = np.array([[True, False, False], [False, True, True]])
    np.testing.assert_array_equal(uneven_along(survey, frame, steep, 1000), [1])
    np.testing.assert_array_equal(uneven_along(survey, frame, prior(), 1000), [1])
    np.testing.assert_allclose(steps_for(survey, frame, steep, 1000, np.array([1])).steepest, 1)
    gentle = prior(steepest=1.0)
    np.testing.assert_allclose(steps_for(survey, frame, gentle, 1000, np.array([1])).steepest, 0.4)


def test_without_noise_both_likelihoods_are_the_same_also_where_scores_flatten_out(x64):
    rates = Rates(np.array([0.8, 0.0, -0.3]), np.zeros(M), 2 * WIDTHS, np.array([1.0, 0.0, 0.5]))
    curvature, none = np.diag([1.0, 2.0, 0.5]), np.zeros((M, M))
    found = Surrogate(Frame(PLACE, np.diag(WIDTHS)), np.array([0.3, -0.2, 0.1]), none, curvature, 0.0, rates=rates)
    points = jnp.asarray(np.random.default_rng(0).normal(0, 3, (20, M)))
    rises = [jax.vmap(law)(points) - law(jnp.zeros(M)) for law in (found.noise_aware, found.plug_in)]
    np.testing.assert_allclose(rises[0], rises[1], rtol=1e-9, atol=1e-9)
    evenly = found._replace(rates=None)
    assert np.max(np.abs(rises[1] - jax.vmap(evenly.plug_in)(points))) > 1


def test_a_rate_is_found_and_that_of_others_is_0():
    rates = np.array([1.5, 0.0, -100.0])
    found = rates_of(released(rates), [])
    np.testing.assert_allclose(found.steps, 2 * WIDTHS)
    np.testing.assert_allclose(found.values, rates * 2 * WIDTHS, rtol=1e-3, atol=1e-12)
    assert not found.scales.any()
    frame, other = released(rates)
    assert rates_of((frame, other._replace(steps=Steps(), bends=np.zeros(0))), []) is None
    last = Steps(*(part[..., 2:] for part in other.steps))
    some = rates_of((frame, other._replace(steps=last, bends=other.bends[2:])), [])
    np.testing.assert_allclose(some.values, [0, 0, found.values[2]])
    np.testing.assert_array_equal(some.scales[:2], 0)


def test_what_noise_may_have_made_is_not_a_rate_but_may_be_one():
    found = rates_of(released(np.array([1.5, 0.0, 0.0]), noise=0.9), [])
    assert 0.3 < found.values[0] < 1.5
    assert np.all((found.scales > _UNSURE) & (found.scales < _STEEPEST))
    hidden = rates_of(released(np.array([1.5, 0.0, 0.0]), noise=1e6), [])
    np.testing.assert_allclose(hidden.values, 0, atol=1e-5)
    np.testing.assert_allclose(hidden.scales, (1 + _STEEPEST**-2) ** -0.5)
    expected = rates_of(released(np.array([1.5, 0.0, 0.0]), noise=0.9, steepest=0.5), [])
    assert 0 < expected.values[0] < 0.5 * found.values[0]
    assert np.all(expected.scales < 0.5)
    assert not np.any(rates_of(released(np.array([0.2, 0.0, 0.0]), noise=0.14), []).scales)  # is known


def test_releases_nearby_count_by_their_precision_and_others_do_not():
    rng, rates = np.random.default_rng(0), np.array([1.0, 0.0, 60.0])
    here = released(rates, noise=0.8, rng=rng)
    near = released(rates, PLACE + [0.3, 0.1, 0.005], noise=0.01, rng=rng)
    np.testing.assert_allclose(rates_of(here, [near]).values, rates * 2 * WIDTHS, atol=0.1)
    far = released(-rates, PLACE + [3.0, 0.0, 0.1], noise=0.01, rng=rng)
    np.testing.assert_array_equal(rates_of(here, [far]).values[[0, 2]], rates_of(here, []).values[[0, 2]])


def test_an_information_is_carried_as_it_falls_on_the_way():
    rates = np.array([1.0, 0.0, -60.0])
    here, there = released(rates, steepest=0.1), released(rates, PLACE + [0.4, 0.1, 0.01], steepest=0.1)
    by = stretch(rates_of(here, []), there[0], here[0])
    np.testing.assert_allclose(by.T @ there[1].information @ by, here[1].information, rtol=2e-3, atol=1e-12)
    np.testing.assert_array_equal(stretch(None, there[0], here[0]), np.eye(M))
    far, farther = (stretch(rates_of(here, []), Frame(PLACE - k, np.diag(WIDTHS)), here[0])[0, 0] for k in (400, 4000))
    assert far == farther  # beyond any sigmoid, nothing overflows


def test_a_release_elsewhere_counts_as_if_it_had_been_made_here():
    rates = np.array([1.0, 0.0, -60.0])
    here, there = (
        LastRelease(frame, Bounds(1.0, 1.0), found._replace(information_scale=1e-6))
        for frame, found in (released(rates, c, steepest=0.1) for c in (PLACE, PLACE + [0.4, 0.1, 0.01]))
    )
    found = combine(here, [there])
    np.testing.assert_allclose(found.rates.values, rates * 2 * WIDTHS, rtol=0.05, atol=1e-9)
    np.testing.assert_allclose(found.curvature, here.found.information, rtol=0.01, atol=1e-9)
    without = combine(*(here._replace(found=here.found._replace(bends=np.zeros(0))), [there]))
    assert without.rates is None
    assert abs(without.curvature[0, 0] - 1) > 0.1


@pytest.mark.parametrize("center", [0.0, 0.7])
def test_the_last_look_is_compared_with_what_the_surrogate_has_there(center, x64):
    """The integral of the score that is expected, less a quadratic around the place that is looked at."""
    rate, curvature, points = 0.8, 2.0, np.array([[1.0], [-0.5]])
    rates = Rates(np.array([rate]), np.zeros(1), np.ones(1), np.array([rate]))
    plain = Surrogate(Frame(np.zeros(1), np.eye(1)), np.zeros(1), np.eye(1), np.full((1, 1), curvature), 0.0)
    look = Frame(np.array([center]), np.full((1, 1), 0.5))
    assert not _beyond_quadratic(plain, look, points).any()
    found = _beyond_quadratic(plain._replace(rates=rates), look, points)
    v, here = 0.5 * points[:, 0], curvature * np.exp(-rate * center)
    expected = here * (v**2 / 2 - (v / rate + np.expm1(-rate * v) / rate**2))
    np.testing.assert_allclose(found, expected, rtol=0.05)


# -- The likelihood ----------------------------------------------------------------------------------------------------


def surrogate(rates, scales=(0.0, 0.0), noise=0.5, information=0.0, steepest=(1.0, 0.0)):
    whitening = np.array([[0.5, 0.2], [-0.1, 0.3]])
    found = Rates(np.asarray(rates, float), np.asarray(scales, float), np.array([0.7, 0.4]), np.asarray(steepest))
    curvature = np.array([[1.0, 0.3], [0.3, 0.8]])
    score = np.array([0.4, -0.3])
    return Surrogate(Frame(np.ones(2), whitening), score, noise * np.eye(2), curvature, information, rates=found)


@pytest.mark.parametrize("rate", [0.8, 0.0, -0.4])
def test_the_expected_score_flattens_out_along_a_coordinate_with_a_rate(rate, x64):
    """As a sigmoid with the slope 1 at 0, whose slope falls there at the rate."""
    s = surrogate([rate, 0.0], steepest=(1.3, 0.0))
    p = (1 + rate / 1.3) / 2
    points = np.random.default_rng(0).normal(size=(50, 2)) * 3
    phi = points @ s.frame.whitening.T
    phi[:, 0] = 0.7 * (expit(logit(p) + 1.3 * phi[:, 0] / 0.7) - p) / (1.3 * p * (1 - p))
    expected = np.linalg.solve(s.frame.whitening, phi.T).T
    np.testing.assert_allclose(jax.vmap(s.straightened)(jnp.asarray(points)), expected, rtol=1e-9, atol=1e-9)
    plain = s._replace(rates=None)
    there = jax.vmap(plain.noise_aware)(jnp.asarray(expected))
    np.testing.assert_allclose(jax.vmap(s.noise_aware)(jnp.asarray(points)), there, rtol=1e-9)


def test_without_rates_the_likelihood_is_what_it_was(x64):
    s, points = surrogate([0.0, 0.0], steepest=(0.0, 0.0)), jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)))
    np.testing.assert_array_equal(jax.vmap(s.noise_aware)(points), jax.vmap(s._replace(rates=None).noise_aware)(points))


@pytest.mark.nightly
def test_what_is_not_known_of_rates_is_a_mixture_over_them(x64):
    s, points = surrogate([0.5, 0.0], [0.4, 0.0]), np.random.default_rng(0).normal(size=(20, 2)) * 2
    rates = np.random.default_rng(1).normal(0.5, 0.4, 4000)
    each = np.array([jax.vmap(surrogate([x, 0.0]).noise_aware)(jnp.asarray(points)) for x in rates[:1000]])
    expected = np.log(np.mean(np.exp(each), 0))
    found = np.asarray(jax.vmap(s.noise_aware)(jnp.asarray(points)))
    error = np.std(np.exp(each), 0) / np.sqrt(1000) / np.mean(np.exp(each), 0)
    assert np.all(np.abs(found - found[0] - (expected - expected[0])) < 5 * (error + error[0]) + 0.05)


@pytest.mark.parametrize("place", [1e3, -1e3, 1e6])
def test_far_away_it_is_finite_and_so_is_its_slope(place):
    for s in (surrogate([2.0, 0.0]), surrogate([2.0, -1.0], [1.4, 1.4], information=0.1, steepest=(1.0, 1.0))):
        value, slope = jax.value_and_grad(s.noise_aware)(jnp.array([place, -place]))
        assert np.isfinite(value)
        assert np.isfinite(slope).all()


@pytest.mark.statistical
@pytest.mark.parametrize("noise", [0.1, 0.4])
def test_posteriors_are_calibrated_whether_or_not_noise_hides_the_rate(noise, x64):
    """Parameter and rate from their laws, and what is released of them: the parameter's rank is about uniform."""
    rng, grid, count = np.random.default_rng(2), np.linspace(-10, 10, 801), 300
    frame, S, ranks = Frame(np.zeros(1), np.eye(1)), 0.3, []

    def rank(s, u):
        logs = np.asarray(jax.vmap(s.noise_aware)(jnp.asarray(grid[:, None]))) - grid**2 / 8
        weight = np.exp(logs - logs.max())
        return weight[grid < u].sum() / weight.sum()

    for _ in range(count):
        u, rate = 2 * rng.normal(), rng.uniform(-1, 1)
        score = np.array([2 * float(told(u / 2, rate, 1.0)) + np.sqrt(1 + S) * rng.normal()])
        information = np.array([[max(1 + noise * rng.normal(), 0.0)]])
        bends = np.array([float(told(1.0, rate, 1.0) + told(-1.0, rate, 1.0)) + noise * rng.normal()])
        found = Derivatives(score, S**0.5, information, noise)
        steps = Steps(np.zeros(1, int), np.array([[2.0]]), np.ones(1))
        found = found._replace(bends=bends, bends_scale=noise, steps=steps)
        s = Surrogate(frame, score, np.array([[S]]), information, noise, rates=rates_of((frame, found), []))
        ranks.append([rank(s, u), rank(s._replace(rates=None), u)])
    inside = np.mean(np.abs(np.array(ranks) - 0.5) < 0.45, 0)
    error = np.sqrt(0.09 / count)
    assert abs(inside[0] - 0.9) < 5 * error, inside
    assert kstest(np.array(ranks)[:, 0], "uniform").pvalue > 1e-6
    assert inside[1] < inside[0] - 0.03, inside  # as if all scores were even
