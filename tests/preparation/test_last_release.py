"""The last releases: their prices and bounds, and the one surrogate that is made of them.

On the host; programs are compiled for `mode` only. Tolerances of averages are 5 standard errors; noise has a seed.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import some_every_day

from numpyro_dp.preparation.combination import LastRelease, combine
from numpyro_dp.preparation.frames import Frame, NormalPrior
from numpyro_dp.preparation.last_bounds import information_share, last_bounds, misfit_of, reference
from numpyro_dp.preparation.last_release import (
    FIRST_SHARE,
    MOST_FIRST,
    _at_least_as_wide,
    _unusual,
    _with_room,
    is_there,
    last_releases,
    mode,
    pulled_along,
    recentred,
    way_from,
)
from numpyro_dp.preparation.search import Found, Round
from numpyro_dp.preparation.shrinkage import noise_left, without_noise
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import LAST_BOUND_GRID, Bounds, Derivatives
from tests.helpers.surveys import (
    Parabola,
    assert_covariance,
    assert_mean,
    fund_of,
    positive,
    spent_by,
    symmetric_noise,
)

M = 4


def at_most(smaller, larger):
    """In the order of symmetric matrices."""
    return np.linalg.eigvalsh(larger - smaller).min() > -1e-9 * np.abs(larger).max()


# -- Several releases as one -------------------------------------------------------------------------------------------

PLACE = np.array([0.4, -0.3, 0.2, 0.1])  # the mode of a quadratic log likelihood of phi
PRECISION = 400 * positive(np.random.default_rng(4), M) + 400 * np.eye(M)
COUNT = 3000


def frame_near(center, whitening_noise=0.0, size=0.05, seed=5):
    rng = np.random.default_rng(seed)
    turned = np.linalg.qr(rng.normal(size=(M, M)))[0]
    return Frame(np.asarray(center, float), size * (np.eye(M) + whitening_noise * rng.normal(size=(M, M))) @ turned)


def derivatives(frame):
    """Of the quadratic, in a frame at u = 0: its score, and its curvature."""
    W = np.asarray(frame.whitening)
    return W.T @ PRECISION @ (PLACE - frame.center), W.T @ PRECISION @ W


def released(rng, frame, score_scale, curvature_scale):
    score, curvature = derivatives(frame)
    noise = symmetric_noise(rng, 1, M, curvature_scale)[0]
    found = Derivatives(score + score_scale * rng.normal(size=M), score_scale, curvature + noise, curvature_scale)
    return LastRelease(frame, Bounds(1.0, 1.0), found)


def combined(here, earlier, told=None):
    """Many repetitions of releases of given (frame, score scale, curvature scale).

    :param told: the frames that `combine` is told of, instead of the earlier ones.
    """
    rng, told = np.random.default_rng(9), told or [frame for frame, _, _ in earlier]

    def one():
        rounds = [released(rng, *other)._replace(frame=frame) for other, frame in zip(earlier, told, strict=True)]
        return combine(released(rng, *here), rounds)

    runs = [one() for _ in range(COUNT)]
    for run in runs[1:]:  # they depend on the scales of the noise, not on the noise
        np.testing.assert_array_equal(run.score_covariance, runs[0].score_covariance)
        assert run.curvature_scale == runs[0].curvature_scale
    return np.stack([run.score for run in runs]), np.stack([run.curvature for run in runs]), runs[0]


def packed(matrices, scale):
    """What is N(0, I) if a symmetric matrix has noise of that scale."""
    rows, columns = np.tril_indices(M)
    return matrices[:, rows, columns] / scale * np.where(rows == columns, 1, np.sqrt(2))


def test_one_release_is_kept_as_it_is():
    rng = np.random.default_rng(6)
    one = released(rng, frame_near(PLACE), 0.5, 0.02)
    s = combine(one, [])
    np.testing.assert_allclose(s.score, one.found.score)
    np.testing.assert_allclose(s.score_covariance, 0.25 * np.eye(M))
    np.testing.assert_allclose(s.curvature, without_noise(one.found.information, 0.02))
    assert s.variance == 1
    assert s.curvature_scale == pytest.approx(0.02)


def test_releases_in_turned_coordinates_combine_with_exactly_the_claimed_errors():
    """The same centre and the same size: nothing has to be carried over, nothing is only bounded."""
    center = PLACE + 0.02
    here = (frame_near(center), 0.5, 0.02)
    same_size = [
        Frame(center, here[0].whitening @ np.linalg.qr(np.random.default_rng(k).normal(size=(M, M)))[0]) for k in (7, 8)
    ]
    score, curvature, claimed = combined(here, [(same_size[0], 0.7, 0.03), (same_size[1], 1.5, 0.05)])
    exact = derivatives(here[0])
    assert_mean(score, exact[0])
    assert_mean(curvature, exact[1])
    assert_covariance(score, claimed.score_covariance)
    np.testing.assert_allclose(
        claimed.score_covariance, np.eye(M) / (0.5**-2 + 0.7**-2 + 1.5**-2), rtol=1e-9, atol=1e-12
    )
    assert claimed.curvature_scale == pytest.approx((0.02**-2 + 0.03**-2 + 0.05**-2) ** -0.5)
    assert_covariance(packed(curvature - exact[1], claimed.curvature_scale), np.eye(len(np.tril_indices(M)[0])))


def assert_errors_as_claimed_or_smaller(here, others):
    """And no bias. Returns what is claimed."""
    score, curvature, claimed = combined(here, others)
    exact = derivatives(here[0])
    assert_mean(score, exact[0])
    assert_mean(curvature, exact[1])
    centred = score - score.mean(0)
    values, vectors = np.linalg.eigh(claimed.score_covariance)
    standard = centred @ vectors / np.sqrt(values)
    excess = np.linalg.eigvalsh(np.cov(standard, rowvar=False)).max()
    curvature_excess = np.linalg.eigvalsh(np.cov(packed(curvature, claimed.curvature_scale), rowvar=False)).max()
    # The largest eigenvalue of a sample covariance of n standard normals in m dimensions is about (1 + sqrt(m/n))^2.
    for largest, dimension in ((excess, M), (curvature_excess, M * (M + 1) // 2)):
        assert largest < (1 + np.sqrt(dimension / COUNT)) ** 2 + 5 * np.sqrt(2 / COUNT)
    return claimed


SHIFTS = {"near": 0.02, "far": 0.1, "too far": 3.0}


@pytest.mark.statistical
@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS.keys())
def test_releases_in_other_frames_combine_without_bias_and_with_errors_as_claimed_or_smaller(shift):
    """What the curvature carries over may be wrong by its noise; that is counted, generously."""
    here = (frame_near(PLACE + 0.01, 0.2), 0.5, 0.02)
    others = [
        (frame_near(PLACE + shift * np.array([1, -1, 0.5, 0]), 0.2, 0.08, seed=6), 0.8, 0.06),
        (frame_near(PLACE - shift * np.array([0, 0.5, 1, 1]), 0.2, 0.04, seed=7), 0.6, 0.03),
    ]
    claimed = assert_errors_as_claimed_or_smaller(here, others)
    if shift < 1:  # they do help
        assert at_most(claimed.score_covariance, 0.25 * np.eye(M) * 0.99)
    else:
        np.testing.assert_allclose(claimed.score_covariance, 0.25 * np.eye(M), rtol=1e-6)


@pytest.mark.statistical
def test_noise_of_an_information_is_as_large_as_a_wider_frame_makes_it():
    """A frame is widened where rows said too little in a narrower one."""
    here = (frame_near(PLACE + 0.01, size=0.2), 0.5, 0.1)
    narrower = (frame_near(PLACE + 0.1 * np.array([1, -1, 0.5, 0]), size=0.05, seed=6), 0.05, 0.3)
    assert_errors_as_claimed_or_smaller(here, [narrower])


def test_a_score_carried_the_wrong_way_would_be_noticed():
    """A negative control: the earlier centre on the other side."""
    here, other = (frame_near(PLACE), 0.5, 0.02), (frame_near(PLACE + 0.03), 0.5, 0.02)
    mirrored = other[0]._replace(center=2 * here[0].center - other[0].center)
    score, _, _ = combined(here, [other], [mirrored])
    with pytest.raises(AssertionError):
        assert_mean(score, derivatives(here[0])[0])


def test_releases_combine_as_normal_laws_do():
    """By hand, where the frames differ in their centre and the information has no noise to speak of."""
    here, there = Frame(np.zeros(M), np.eye(M)), Frame(np.array([0.5, 0.0, -0.5, 0.2]), np.diag([1.0, 2.0, 0.5, 1.0]))
    information, change = positive(np.random.default_rng(1), M), np.linalg.inv(there.whitening)
    one = LastRelease(here, Bounds(1.0, 1.0), Derivatives(np.arange(4.0), 0.5, information, 1e-6))
    in_there = there.whitening.T @ information @ there.whitening
    other = LastRelease(there, Bounds(1.0, 1.0), Derivatives(np.array([1.0, 0.0, 2.0, -1.0]), 0.8, in_there, 1e-6))
    found = combine(one, [other])
    # In the frame of `here`: the other's score is that at 0 less information times its centre.
    carried = change.T @ other.found.score + information @ there.center
    precisions = [np.eye(M) / 0.5**2, np.linalg.inv(0.8**2 * change.T @ change)]
    covariance = np.linalg.inv(sum(precisions))
    np.testing.assert_allclose(found.score_covariance, covariance, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(
        found.score, covariance @ (precisions[0] @ one.found.score + precisions[1] @ carried), rtol=1e-6
    )
    np.testing.assert_allclose(found.curvature, information, rtol=1e-6, atol=1e-9)
    assert found.frame is here


def test_what_tighter_bounds_have_left_counts_as_if_they_had_left_all():
    """Half of the score and of the information: as it stands, it would draw the mode towards where it was released."""
    here, there = frame_near(PLACE + 0.01), frame_near(PLACE - 0.1)
    rng = np.random.default_rng(1)
    one, other = released(rng, here, 1e-3, 1e-4), released(rng, there, 1e-3, 1e-4)
    found = other.found._replace(score=other.found.score / 2, information=other.found.information / 2)
    surrogate = combine(one, [LastRelease(there, Bounds(0.5, 0.5), found)])
    mode = here.center + np.asarray(here.whitening) @ np.linalg.solve(surrogate.curvature, surrogate.score)
    np.testing.assert_allclose(mode, PLACE, atol=1e-3)
    np.testing.assert_allclose(surrogate.curvature, derivatives(here)[1], rtol=1e-2)
    np.testing.assert_allclose(surrogate.score_covariance, np.eye(M) * 1e-6 / (1 + 0.25), rtol=0.05, atol=1e-8)


def test_what_tighter_bounds_took_in_some_directions_only_is_not_given_back_in_all():
    """As where few rows alone tell of two coordinates: the others would seem to be known nearly twice as well."""
    here = frame_near(PLACE)
    rng = np.random.default_rng(1)
    one, other = released(rng, here, 0.05, 0.01), released(rng, here, 0.05, 0.01)
    left = np.sqrt([1.0, 1.0, 0.05, 0.05])
    found = other.found._replace(
        score=left * other.found.score, information=np.outer(left, left) * derivatives(here)[1]
    )
    surrogate = combine(one, [LastRelease(here, Bounds(0.5, 0.5), found)])
    np.testing.assert_array_equal(surrogate.curvature, combine(one, []).curvature)
    np.testing.assert_array_equal(surrogate.score, combine(one, []).score)


def test_an_information_from_a_narrower_frame_is_as_much_noisier_as_it_is_larger():
    here, there = frame_near(PLACE), frame_near(PLACE)
    there = there._replace(whitening=there.whitening / 2)
    rng = np.random.default_rng(1)
    found = combine(released(rng, here, 0.5, 0.02), [released(rng, there, 0.5, 0.01)])
    assert found.curvature_scale == pytest.approx((0.02**-2 + (4 * 0.01) ** -2) ** -0.5)


def test_what_the_informations_noise_does_to_a_score_that_is_carried_is_counted():
    """Of a precise score, two posterior standard deviations away, by an information that is not."""
    here = (frame_near(PLACE), 0.5, 0.2)
    there = frame_near(PLACE)
    there = there._replace(center=there.center + there.whitening @ np.array([1.5, -1.5, 0.0, 0.0]))
    score, _, claimed = combined(here, [(there, 0.02, 0.2)])
    assert_mean(score, derivatives(here[0])[0])
    values, vectors = np.linalg.eigh(claimed.score_covariance)
    variances = ((score - score.mean(0)) @ vectors / np.sqrt(values)).var(0)
    assert np.all(variances < 1 + 5 * np.sqrt(2 / COUNT)), variances


def test_an_information_that_noise_has_made_negative_is_0_there():
    found = Derivatives(np.zeros(M), 0.5, np.diag([-3.0, 0.01, 1.0, 5.0]), 0.2)
    surrogate = combine(LastRelease(frame_near(PLACE), Bounds(1.0, 1.0), found), [])
    expected = np.diag(without_noise(found.information, 0.2))
    assert expected[0] < -2.5
    np.testing.assert_allclose(surrogate.curvature, np.diag(np.maximum(expected, 0)), atol=1e-12)


# -- What few rows tell ------------------------------------------------------------------------------------------------

NARROW = Frame(np.zeros(M), np.diag([0.1, 0.1, 0.02, 0.02]))  # two coordinates are as narrow as few rows have them


def narrow(*information, scale=0.02):
    """A surrogate in that frame, and a wide prior with what it has for frames."""
    surrogate = Surrogate(NARROW, np.zeros(M), 0.1 * np.eye(M), np.diag(information), scale)
    return surrogate, NormalPrior(np.zeros(M), 25 * np.eye(M), np.array([0, 0, 0.02**-2, 0.02**-2]))


def test_a_frame_that_is_too_narrow_for_what_few_rows_say_gets_more_room():
    """The noise has a largest eigenvalue of about .06: of the last coordinate it hides what the rows say."""
    surrogate, prior = narrow(1.0, 1.0, 0.3, 0.01)
    more = _with_room(surrogate, prior, is_last=False)
    np.testing.assert_allclose(more, [0, 0, 0.02**-2, 0.08**-2])
    wider = _at_least_as_wide(NARROW, prior._replace(of_frames=more), more < prior.of_frames)
    np.testing.assert_allclose(np.diag(wider.whitening), [0.1, 0.1, 0.02, 0.08], rtol=1e-3)
    np.testing.assert_allclose(_with_room(surrogate, prior, is_last=True), [0, 0, 0.02**-2, 0])
    np.testing.assert_allclose(
        _with_room(surrogate, prior, True, prior.of_frames / 4), np.maximum([0, 0, 0.02**-2, 0], prior.of_frames / 4)
    )
    none = np.zeros(M)
    as_the_prior = _at_least_as_wide(NARROW, prior._replace(of_frames=none), none < prior.of_frames)
    np.testing.assert_allclose(np.diag(as_the_prior.whitening), [0.1, 0.1, 5, 5])


def test_what_is_seen_keeps_its_frame():
    surrogate, prior = narrow(1.0, 1.0, 0.3, 0.3)
    np.testing.assert_array_equal(_with_room(surrogate, prior, is_last=False), prior.of_frames)
    plain = prior._replace(of_frames=0.0)
    assert not _with_room(narrow(1.0, 1.0, 0.0, 0.0)[0], plain, is_last=True).any()
    assert _at_least_as_wide(NARROW, prior, np.zeros(M, bool)).whitening.tolist() == NARROW.whitening.tolist()


def test_frames_widen_where_a_sum_of_coordinates_is_hidden():
    """Of each, where the other is known, the rows say enough; not of the direction in which both change."""
    surrogate, prior = narrow(1.0, 1.0, 1.0, 1.0)
    curvature = surrogate.curvature.copy()
    curvature[2:, 2:] = [[0.3, 0.299], [0.299, 0.3]]
    assert not _with_room(surrogate._replace(curvature=curvature), prior, is_last=False).any()


# -- The posterior's mode ----------------------------------------------------------------------------------------------


def surrogate_near(rng, curvature_scale=0.0):
    return Surrogate(
        Frame(rng.normal(size=M), np.eye(M) + 0.3 * rng.normal(size=(M, M))),
        rng.normal(size=M),
        0.2 * positive(rng, M),
        positive(rng, M),
        curvature_scale,
        variance=0.7,
    )


def test_the_mode_is_that_of_prior_and_noise_aware_surrogate(x64):
    rng = np.random.default_rng(7)
    for _ in range(3):
        surrogate, prior = surrogate_near(rng), NormalPrior(rng.normal(size=M), positive(rng, M))
        slope, precision = prior.in_frame(surrogate.frame)
        found = mode(surrogate, prior)
        gradient = jax.grad(lambda u, s=surrogate: s.noise_aware(u))(jnp.asarray(found)) + slope - precision @ found
        np.testing.assert_allclose(gradient, 0, atol=1e-9)


def test_the_frame_around_the_mode_is_as_wide_as_the_posterior_without_noise():
    rng = np.random.default_rng(8)
    surrogate, prior = surrogate_near(rng), NormalPrior(rng.normal(size=M), positive(rng, M))
    frame = surrogate.frame
    found = recentred(surrogate, prior)
    np.testing.assert_allclose(found.center, frame.center + frame.whitening @ mode(surrogate, prior))
    inverse = np.linalg.inv(frame.whitening)
    whole = inverse.T @ surrogate.curvature @ inverse + np.linalg.inv(prior.covariance)
    np.testing.assert_allclose(found.whitening.T @ whole @ found.whitening, np.eye(M), atol=1e-9)


def test_where_noise_hides_the_curvature_the_frame_stays_as_wide_as_it_was():
    surrogate = surrogate_near(np.random.default_rng(9), curvature_scale=100.0)._replace(curvature=0.01 * np.eye(M))
    found = recentred(surrogate, NormalPrior(np.zeros(M), 1e9 * np.eye(M)))
    np.testing.assert_allclose(
        found.whitening @ found.whitening.T, surrogate.frame.whitening @ surrogate.frame.whitening.T
    )


# -- Bounds and prices -------------------------------------------------------------------------------------------------


def test_the_less_the_noise_the_wider_the_bounds():
    for size in (1, 3, 30):
        multiples = np.array([reference(size, n, 0.1).multiples for n in (1e1, 1e2, 1e3, 1e4, 1e6, 1e9)])
        assert np.all(np.diff(multiples, axis=0) >= 0)
        np.testing.assert_allclose(multiples[0], [1.6, 1.3])  # below, eight draws do not give back what the clip takes
        assert np.all(multiples[-1] > 3)
        # The first by rows times rho only, the second by rows times the root of rho.
        assert reference(size, 1e4, 0.1).multiples[0] == reference(size, 1e3, 1.0).multiples[0]
        assert reference(size, 1e4, 0.01).multiples[1] == reference(size, 1e3, 1.0).multiples[1]
        # Tempered, a row counts for less, and so does the noise that hides it; the information's stays the same.
        tempered = reference(size, 1e4, 0.1, power=0.1).multiples
        assert tempered[0] == reference(size, 1e5, 0.1).multiples[0]
        assert tempered[1] == reference(size, 1e4, 0.1).multiples[1]


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("told", [300.0, 3000.0, 30_000.0])
def test_the_bounds_have_about_the_least_error(size, told):
    """Of normal rows in 1 and 4 coordinates: noise and clip, over how the clipped sums answer, by numbers."""
    rows = np.random.default_rng(1).normal(size=(100_000, size))
    norms = np.linalg.norm(rows, axis=1)
    share = 0.15

    def of_score(multiple):
        clipped = rows * np.minimum(1, multiple * math.sqrt(size) / norms)[:, None]
        answer, variance = np.sum(rows * clipped) / rows.size, np.mean(clipped**2)
        return (2 * multiple**2 * size / ((1 - share) * told) + variance) / answer**2

    def of_information(multiple):
        squares = norms**2 / size
        lost = 1 - np.minimum(squares, multiple).mean()
        noise = 2 * (multiple * size) * math.sqrt(1 / (2 * share)) / told  # rho = told, n = told: see below
        return lost**2 + noise**2 * (size + 1) / 2

    score = reference(size, told, 1.0).multiples[0]
    assert of_score(score) < 1.15 * min(of_score(multiple) for multiple in np.geomspace(1.6, 6, 60))
    information = reference(size, told, 1.0).multiples[1]
    grid = np.geomspace(1.3, 6, 60)
    assert of_information(information) < of_information(1.3) or information < 1.4
    assert abs(math.log(information / grid[np.argmin([of_information(multiple) for multiple in grid])])) < 0.7


class Rows(Parabola):
    """A survey of rows whose norms in the frame are those of the reference, times a factor."""

    def __init__(self, n, longer=1.0, place=(0.0,) * M, precision=None, **options):
        super().__init__(place, np.eye(M) if precision is None else precision, n, **options)
        self.longer = longer

    def bounds(self, draws, frame, smallest, threshold, grid):
        assert len(draws) == grid.num_counts
        self.asked.append("bounds")
        units = np.array([math.sqrt(M / (self.power * self.n)), M / (self.power * self.n)]) * [
            self.longer,
            self.longer**2,
        ]
        quantiles = reference(M, 1.0, 1.0).quantiles(np.asarray(threshold) / self.n)
        assert np.all(smallest < quantiles * units)
        return quantiles * units * math.sqrt(LAST_BOUND_GRID.ratio)


FLAT = NormalPrior(np.zeros(M), 1e9 * np.eye(M))
WHOLE = Frame(np.zeros(M), np.eye(M))


def bounds_of(survey, rho=0.1, prior=FLAT):
    fund = fund_of(2 * rho)
    found, left = last_bounds(survey, WHOLE, prior, survey.n, rho, fund)
    assert left == pytest.approx(rho - sum(spent_by(fund).values()), rel=1e-6)
    return found, left


def test_bounds_of_few_rows_are_public_multiples_of_what_a_row_says():
    survey, rho = Rows(500.0), 0.01
    score, information = reference(M, 500.0, rho).multiples
    found, left = bounds_of(survey, rho)
    assert survey.asked == []
    assert left == rho
    assert found.score == pytest.approx(score * math.sqrt(M / 500))
    assert found.information == pytest.approx(information * M / 500)
    # Of two coordinates the prior decides; of all, but one counts at least.
    for prior, informed in (([1e9, 1e9, 1.0, 1.0], 2), ([0.01] * M, 1)):
        found, _ = bounds_of(survey, rho, NormalPrior(np.zeros(M), np.diag(prior)))
        assert found.score == pytest.approx(reference(informed, 500.0, rho).multiples[0] * math.sqrt(informed / 500))
    # Tempered rows count less.
    assert bounds_of(Rows(2000.0, power=0.25), rho)[0].score == pytest.approx(score * math.sqrt(M / 500))


def test_where_nothing_is_given_back_the_scores_bound_leaves_more_room():
    survey = Rows(1e5, centres=False)
    found, _ = bounds_of(survey)
    assert survey.asked == []
    score, information = reference(M, 1e5, 0.1).multiples
    room = 2 + math.log(1e5 / 6_000) / 3.2
    assert found.score == pytest.approx(room * score * math.sqrt(M / 1e5))
    assert found.information == pytest.approx(information * M / 1e5)


class Kinked(Rows):
    """Of which so many times the least bounds are exceeded by as many rows as may."""

    def __init__(self, n, longer, power=1.0):
        super().__init__(n, longer, centres=False, power=power)
        self.has_kinks = True

    def bounds(self, draws, frame, smallest, threshold, grid):
        self.asked.append(float(threshold))
        return self.longer * smallest


@pytest.mark.parametrize("longer", [1.0, 1.5, 200.0])
def test_where_rows_have_kinks_hardly_any_exceeds_the_scores_bound(longer):
    """No more than a count can tell."""
    n, rho = 1e5, 0.1
    least, _ = bounds_of(Rows(n, centres=False), rho)
    survey = Kinked(n, longer)
    found, left = bounds_of(survey, rho)
    assert left == pytest.approx(0.94 * rho)
    (exceeding,) = survey.asked
    assert exceeding == pytest.approx(2 * math.sqrt(LAST_BOUND_GRID.num_counts / (0.06 * rho)))
    assert exceeding < 0.01 * n
    assert found.score == pytest.approx(least.score * min(longer, 2.0))
    assert least.information <= found.information < 100 * least.information


@pytest.mark.parametrize("power", [1.0, 0.25])
def test_where_rows_have_kinks_no_bound_is_all_noise(power):
    n, rho = 2e3 / power, 0.02
    least, _ = bounds_of(Rows(n, centres=False, power=power), rho)
    found, left = bounds_of(Kinked(n, 50.0, power), rho)
    assert found.score == pytest.approx(min(2 * least.score, max(2.5 / (power * math.sqrt(2 / left)), least.score)))


def test_where_rows_are_few_nobody_counts_those_with_kinks():
    survey = Kinked(500.0, 50.0)
    found, left = bounds_of(survey, 0.01)
    assert (survey.asked, left) == ([], 0.01)
    assert found == bounds_of(Rows(500.0, centres=False), 0.01)[0]


@pytest.mark.parametrize(("n", "longer"), [(5e3, 1.0), (1e5, 1.0), (1e5, 2.0), (1e5, 0.01)])
def test_bounds_of_many_rows_follow_how_long_they_are(n, longer):
    survey = Rows(n, longer)
    score, information = reference(M, n, 0.1).multiples
    if longer < 0.1:  # but clip hardly more than normal rows
        survey.bounds = lambda *args: np.array([1e-9, 1e-9])
        score, information, longer = 1.6, 1.3, 1.0
    else:
        longer = survey.longer
    found, left = bounds_of(survey)
    assert left == pytest.approx(0.97 * 0.1)
    assert found.score == pytest.approx(score * longer * math.sqrt(M / n), rel=0.02)
    assert found.information == pytest.approx(information * longer**2 * M / n, rel=0.02)


def test_a_count_that_noise_has_misled_does_not_waste_the_release():
    n = 1e5
    survey = Rows(n, 1e6)
    found, _ = bounds_of(survey)
    assert found.score == pytest.approx(reference(M, n, 0.1, 1.2).multiples[0] * math.sqrt(M / n))


@pytest.mark.parametrize("told", [2.0, 20.0, 200.0, 2e4])
@pytest.mark.parametrize("kind", ["normal residuals", "lognormal covariates"])
def test_bounds_that_follow_long_rows_are_no_worse_than_those_of_normal_covariates(told, kind):
    """The error with the bound that is taken where counts say how long rows are, over the least that a bound gives.

    :param told: rows times rho for a coordinate.
    """
    rng = np.random.default_rng(2)
    factors = np.abs(rng.normal(size=100_000)) if kind == "normal residuals" else np.exp(1.1 * rng.normal(size=100_000))
    rows = rng.normal(size=(100_000, M)) * factors[:, None]
    rows /= np.sqrt(np.mean(rows**2))
    norms, n = np.linalg.norm(rows, axis=1), 1e6
    survey, rho = Rows(n, 1.0), told * M / n

    def error(multiple):
        clipped = rows * np.minimum(1, multiple * math.sqrt(M) / norms)[:, None]
        answer, variance = np.sum(rows * clipped) / rows.size, np.mean(clipped**2)
        return math.sqrt((2 * multiple**2 / (0.85 * told) + variance) / answer**2)

    def bounds(draws, frame, smallest, threshold, grid):  # without noise
        of_norms = np.quantile(norms, 1 - np.asarray(threshold) / n) / math.sqrt(n)
        return of_norms ** np.array([1, 2]) * math.sqrt(grid.ratio)

    survey.bounds = bounds
    found = bounds_of(survey, rho)[0].score * math.sqrt(n / M)
    usual = reference(M, n, rho).multiples[0]
    least = min(error(multiple) for multiple in np.geomspace(1.6, 8, 40))
    assert error(found) < 1.1 * least
    assert error(found) < 1.02 * error(usual)


def test_the_bound_of_the_information_does_not_grow_until_its_noise_hides_it():
    n, rho = 5e3, 0.1
    public = reference(M, n, rho).multiples[1]
    found = [bounds_of(Rows(n, longer), rho)[0].information * n / M for longer in (1.0, 3.0, 30.0)]
    assert found[0] == pytest.approx(public, rel=0.02)
    # The square of the noise that is left of an entry, times (m + 1) / 2, is .15 squared.
    loudest = 0.15 * n / M * math.sqrt(0.3 * rho / (M + 1)) / noise_left(M)
    assert found[1] == found[2] == pytest.approx(max(loudest, public))


def test_the_information_gets_a_larger_share_where_it_is_worse_known():
    def share(size, n, rho=0.1, longer=1.0):
        return information_share(Bounds(math.sqrt(size / n), longer * size / n), size, n, rho)

    shares = [share(5, n) for n in (10, 1e3, 3e3, 1e4, 1e6)]
    assert shares[0] == 0.3
    assert shares[-1] == 0.04
    assert shares == sorted(shares, reverse=True)
    assert share(5, 1e3) < share(8, 1e3)
    # r / (1 + r), with r the root of the ratio of the two errors at an equal price: noise of the score's 2 C^2 / rho in
    # each coordinate, of the information's C_h^2 (m + 1) d^2 / rho, at a distance d.
    distance = 8 * math.sqrt(5 / (3e3 * 0.1))
    for longer in (1.0, 2.0):
        r = noise_left(5) * math.sqrt((longer * 5 / 3e3) ** 2 * 6 * distance**2 / (2 * 5 / 3e3))
        assert share(5, 3e3, longer=longer) == pytest.approx(r / (1 + r))


# -- Stages ------------------------------------------------------------------------------------------------------------


def stage_at(distance, score_scale=0.1):
    score = np.zeros(M)
    score[0] = distance
    found = Derivatives(score, score_scale, np.eye(M), 0.01)
    return LastRelease(Frame(np.zeros(M), np.eye(M)), Bounds(1.0, 1.0), found)


def test_it_is_there_where_the_step_is_no_longer_than_noise_makes_it():
    flat = NormalPrior(np.zeros(M), 1e9 * np.eye(M))
    assert is_there(stage_at(0.0), flat)
    assert is_there(stage_at(2.8), flat)  # the root of 2 m, and of what the noise of .1 adds
    assert not is_there(stage_at(3.1), flat)
    # With noise of 2: 8 + 4 m + 3 standard deviations of 4 times a chi-square variable.
    edge = math.sqrt(8 + 4 * M + 3 * 4 * math.sqrt(2 * M))
    assert is_there(stage_at(0.98 * edge, score_scale=2.0), flat)
    assert not is_there(stage_at(1.02 * edge, score_scale=2.0), flat)
    pulled = NormalPrior(np.array([9.0, 0.0, 0.0, 0.0]), np.eye(M))
    assert not is_there(stage_at(0.0), pulled)
    # A direction that noise hides is no way to a far place.
    hidden = stage_at(0.0)
    hidden.found.score[1] = 0.5
    hidden.found.information[1, 1] = 1e-6
    assert is_there(hidden._replace(found=hidden.found._replace(information_scale=0.2)), flat)


N, RHO = 20_000, 0.05
PARABOLA = N * (positive(np.random.default_rng(5), M) + 0.2 * np.eye(M))
PRIOR = NormalPrior(np.zeros(M), 4 * np.eye(M))


def released_from(away, seed=0, rounds=(), centres=True):
    """From a frame around a place so many posterior standard deviations away."""
    survey, fund = Parabola(PLACE, PARABOLA, N, seed, centres=centres), fund_of(2 * RHO)
    root = np.linalg.inv(np.linalg.cholesky(PARABOLA)).T
    frame = Frame(PLACE + root @ np.full(M, away / math.sqrt(M)), root)
    _, surrogates, stages, _ = last_releases(survey, Found(frame, list(rounds), float(N)), PRIOR, fund, RHO)
    assert len(surrogates) == len(stages)
    return surrogates[-1], stages, survey, fund


@pytest.mark.parametrize(("away", "number"), [(0.0, 2), (30.0, 3), (1e6, MOST_FIRST + 1)])
def test_first_releases_are_made_until_they_lead_nowhere(away, number):
    surrogate, stages, survey, fund = released_from(away)
    assert len(stages) == number
    assert survey.asked == ["bounds", "derivatives"] * number
    assert sum(spent_by(fund).values()) == pytest.approx(RHO, rel=1e-6)
    assert spent_by(fund)["last bounds"] == pytest.approx(0.03 * RHO, rel=1e-6)
    kinds = [kind.mechanisms[0].rho for name, kind in fund._ledger.plan.kinds.items() if "last release" in name]
    expected = [FIRST_SHARE * (1 - FIRST_SHARE) ** k for k in range(number - 1)]
    expected = 0.97 * RHO * np.array([*expected, (1 - FIRST_SHARE) ** (number - 1)])
    np.testing.assert_allclose(kinds, expected, rtol=1e-6)
    assert surrogate.frame is stages[-1].frame


def round_near(seed):
    """What a search's last round releases, one posterior standard deviation away, with about a stage's noise."""
    rng, root = np.random.default_rng([7, seed]), np.linalg.inv(np.linalg.cholesky(PARABOLA)).T
    frame = Frame(PLACE + root @ np.eye(M)[0], root)
    score, information = Parabola(PLACE, PARABOLA, N).exact(frame)
    found = Derivatives(score + 1.5 * rng.normal(size=M), 1.5, information + symmetric_noise(rng, 1, M, 0.1)[0], 0.1)
    return Round(frame, Bounds(1.0, 1.0), found, np.zeros(M), 1.0, 1.0, 1.0, 0.3, 0.9, 1.1)


def test_what_the_search_released_near_its_end_counts_where_gradients_are_centred():
    rounds = [round_near(0), round_near(1)]
    for centres, part in ((True, 1), (False, 0)):
        alone, surrogate = (released_from(0.0, rounds=told, centres=centres)[0] for told in ((), rounds))
        gained = np.linalg.inv(surrogate.score_covariance) - np.linalg.inv(alone.score_covariance)
        # The last frame depends on the noise in what came before.
        np.testing.assert_allclose(np.linalg.eigvalsh(gained), 2 * part / 1.5**2, rtol=0.5, atol=1e-9)


@pytest.mark.parametrize("num_rounds", some_every_day([0, 2], [2]))
def test_the_surrogate_of_the_last_releases_has_the_errors_that_it_claims(num_rounds):
    errors, curvatures = [], []
    for seed in range(200):
        rounds = [round_near(10 * seed + k) for k in range(num_rounds)]
        surrogate, stages, survey, _ = released_from(3.0, seed, rounds)
        score, information = survey.exact(surrogate.frame)
        root = np.linalg.cholesky(surrogate.score_covariance)
        errors.append(np.linalg.solve(root, surrogate.score - score))
        # Of the trace: the frame's axes follow the noise in the first release.
        trace = np.trace(surrogate.curvature - information) / (surrogate.curvature_scale * math.sqrt(M))
        curvatures.append([trace])
        assert np.trace(surrogate.score_covariance) < stages[-1].found.score_scale ** 2 * M
    for found in (np.array(errors), np.array(curvatures)):
        assert np.all(np.abs(found.mean(0)) < 5 / math.sqrt(len(found)))
        assert np.all(found.var(0) < 1 + 5 * math.sqrt(2 / len(found)))
        assert np.all(found.var(0) > 0.5)


# -- Rows that are not as the model says -------------------------------------------------------------------------------


def test_a_bound_has_the_least_of_noise_and_misfit():
    for n in (3e3, 3e4, 3e5):
        usual, none = (reference(M, n, 0.03, misfit=misfit).multiples[0] for misfit in (1.0, 0.0))

        def error(multiple):
            return 2 * multiple**2 * M / (n * 0.85 * 0.03) + misfit_of(multiple, n, M) ** 2  # noqa: B023

        assert usual > none
        assert error(usual) < 1.05 * min(error(multiple) for multiple in np.geomspace(1.6, 16, 60))


@pytest.mark.parametrize("direction", [[1.0, 0, 0, 0], [0.5, -0.5, 0.5, 0.5]])
def test_a_step_tells_the_misfit_as_far_as_noise_lets_it(direction):
    for times in (0.1, 1.0, 4.0):
        step = times * 2.0 * math.sqrt(M) * np.array(direction)
        told = _unusual(step, 1e-4 * np.eye(M), 2.0)
        assert 0.8 * times < told < 2.2 * times  # of four numbers a mean square is hardly known
        assert _unusual(step, 1e6 * np.eye(M), 2.0) == pytest.approx(1, rel=0.02)
    told = [_unusual(np.zeros(M), scale * np.eye(M), 2.0) for scale in (0.01, 1.0, 100.0)]
    assert told == sorted(told)
    assert told[0] < 0.15


def released_open(misfit, seed, n=100_000, given=False):
    """Around the place where the clip takes nothing; the surrogate's errors, in what it claims; and the stages."""
    precision = PARABOLA * n / N
    survey, fund = Rows(n, 1.0, PLACE, precision, seed=seed, misfit=misfit, given=given), fund_of(2 * RHO)
    root = np.linalg.inv(np.linalg.cholesky(precision)).T
    _, surrogates, stages, _ = last_releases(survey, Found(Frame(PLACE, root), [], float(n)), PRIOR, fund, RHO)
    assert sum(spent_by(fund).values()) == pytest.approx(RHO, rel=1e-6)
    surrogate = surrogates[-1]
    error = surrogate.score - survey.exact(surrogate.frame)[0]
    return error @ np.linalg.solve(surrogate.score_covariance, error) / M, stages


@pytest.mark.parametrize("misfit", [0.0, 0.3, 1.0, 4.0])
def test_a_wide_release_tells_how_tight_the_last_one_may_be(misfit):
    """Without the allowance the last release would be as tight as the first, and the posterior many times its own
    standard deviations off."""
    squares, multiples = [], []
    for seed in range(60):
        square, stages = released_open(misfit, seed)
        squares.append(square)
        # The way from where nothing is taken to where the clip leads may take several first releases.
        first, *_, wide, last = (s.bounds.score / math.sqrt(M / 100_000) for s in stages)
        assert first < 2.5 < 4 <= wide
        multiples.append(last / first)
    # The law of misfits is one of many tables: of those with one misfit errors are larger or smaller than claimed.
    assert np.mean(squares) < 2.5
    tight, at_ease = (reference(M, 1e5, 0.5 * RHO, misfit=m).multiples[0] / first for m in (0.5, 1.0))
    if misfit < 0.1:
        assert np.median(multiples) < tight
    if misfit >= 1:
        assert np.median(multiples) > 0.9 * at_ease


def test_where_noise_hides_what_a_wide_release_would_tell_none_is_made():
    _, stages = released_open(1.0, 0, n=500)
    assert len(stages) == 2
    assert stages[-1].misfit == pytest.approx(misfit_of(stages[-1].bounds.score / math.sqrt(M / 500), 500, M), rel=0.05)
    assert all(stage.misfit == 0 for stage in released_from(0.0)[1])


def test_a_misfit_counts_as_noise_in_each_release():
    """Of this one and of others: each is weighted by what its noise and its misfit leave."""
    frame = Frame(np.zeros(M), np.eye(M))
    ones = Derivatives(np.ones(M), 0.3, np.eye(M), 1e-6)
    here = LastRelease(frame, Bounds(1.0, 1.0), ones, misfit=0.4)
    alone = combine(here, [])
    np.testing.assert_allclose(alone.score_covariance, 0.25 * np.eye(M))
    other = LastRelease(frame, Bounds(1.0, 1.0), ones._replace(score=np.zeros(M), score_scale=0.6), misfit=0.8)
    both = combine(here, [other])
    np.testing.assert_allclose(both.score_covariance, np.eye(M) / (1 / 0.25 + 1 / 1.0))
    np.testing.assert_allclose(both.score, 0.8)
    # So it does in how far the noise moves a mode: the way from a surrogate without noise.
    guide = alone._replace(score_covariance=np.zeros((M, M)), curvature_scale=0.0)
    _, _, noise = way_from(guide, here, FLAT)
    np.testing.assert_allclose(noise, 0.25 * np.eye(M), rtol=1e-6)


def test_all_releases_are_pulled_one_way():
    """So a pull is as large in their mean, while noise is less."""
    frame, pull = Frame(np.zeros(M), np.eye(M)), np.array([2.0, 0.0, 0.0, 0.0])
    ones = Derivatives(np.ones(M), 0.5, np.eye(M), 1e-6)
    here = LastRelease(frame, Bounds(1.0, 1.0), ones, pull=pull)
    np.testing.assert_allclose(combine(here, []).score_covariance, 0.25 * np.eye(M) + np.outer(pull, pull))
    np.testing.assert_allclose(combine(here, [here]).score_covariance, 0.125 * np.eye(M) + np.outer(pull, pull))
    firm = LastRelease(frame, Bounds(1.0, 1.0), ones._replace(score=np.zeros(M)), pull=0 * pull)
    both = combine(here, [firm])
    np.testing.assert_allclose(both.score, 0.5)
    np.testing.assert_allclose(both.score_covariance, 0.125 * np.eye(M) + np.outer(pull, pull) / 4)
    guide = combine(here, [])._replace(score_covariance=np.zeros((M, M)), curvature_scale=0.0)
    np.testing.assert_allclose(way_from(guide, here, FLAT)[2], 0.25 * np.eye(M) + np.outer(pull, pull), rtol=1e-6)
    np.testing.assert_allclose(here.fitting(0.0, 0.5).pull, pull / 2)


def test_the_pull_has_the_direction_that_the_clearest_release_tells():
    frame, there = Frame(np.zeros(M), np.eye(M)), Frame(np.ones(M), np.diag([1.0, 2.0, 0.5, 4.0]))
    none = Derivatives(np.zeros(M), 1.0, np.eye(M), 1e-6)
    told = none._replace(given=np.array([0.0, 6.0, 0.0, 8.0]), given_scale=0.1)
    hidden = none._replace(given=np.array([3.0, 0.0, 0.0, 0.0]), given_scale=1.0)
    assert not pulled_along(frame, [(frame, none)]).any()
    assert not pulled_along(frame, [(frame, hidden._replace(given_scale=1.6))]).any()
    weak = pulled_along(frame, [(frame, hidden)])
    np.testing.assert_allclose(weak, [math.sqrt(5 / 9), 0, 0, 0])
    found = pulled_along(frame, [(frame, hidden), (there, told)])
    expected = np.array([0.0, 3.0, 0.0, 2.0]) / math.sqrt(13)  # a sum of scores by other coordinates
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("misfit", [0.0, 1.0, 6.0])
def test_along_that_direction_a_posterior_is_as_uncertain_as_the_pull_makes_it(misfit):
    """Of heavy tails, say: noise hides how large it is, and the rest of the posterior is no wider for it."""
    errors, others = [], []
    for seed in range(60):
        precision = PARABOLA * 20_000 / N
        survey = Rows(20_000, 1.0, PLACE, precision, seed=seed, misfit=misfit, given=True)
        root = np.linalg.inv(np.linalg.cholesky(precision)).T
        found = Found(Frame(PLACE, root), [], 20_000.0)
        _, surrogates, _, _ = last_releases(survey, found, PRIOR, fund_of(2 * RHO), RHO / 10)
        score = survey.exact(surrogates[-1].frame)[0]
        along = np.asarray(surrogates[-1].frame.whitening).T @ np.linalg.cholesky(precision)[:, 0]
        along /= np.linalg.norm(along)
        error, covariance = surrogates[-1].score - score, surrogates[-1].score_covariance
        errors.append((along @ error) ** 2 / (along @ covariance @ along))
        across = np.linalg.svd(along[None])[2][1:]
        others.append(np.sqrt(np.trace(across @ covariance @ across.T) / (M - 1) / (along @ covariance @ along)))
    assert np.mean(errors) < 2.5
    assert np.median(others) < 0.8
