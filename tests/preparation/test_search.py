"""The search: its steps by hand, and the whole of it on a likelihood that is a parabola.

On the host; no program is compiled. Noise has a seed.
"""

import math

import numpy as np
import pytest

from numpyro_dp.preparation.frames import (
    _NARROWEST,
    _WIDEST,
    SCORE_ROOM,
    Frame,
    NormalPrior,
    place_of,
    rough_normal,
    typical_norm,
    within_reason,
)
from numpyro_dp.preparation.search import (
    _LEAST,
    _MOST,
    _WIDENS,
    FINE_EDGE,
    FINE_NOISE,
    GROWTH,
    LINE,
    MOST_ROUNDS,
    SEARCH_SHARE,
    Found,
    Round,
    _known,
    _length,
    _next_frame,
    _Prices,
    _release,
    _step,
    expected_square,
    noise_edge,
    search,
)
from numpyro_dp.preparation.survey import Bounds, Derivatives
from tests.helpers.surveys import Parabola, fund_of, positive, spent_by

M = 3
FLAT = NormalPrior(np.zeros(M), 1e12 * np.eye(M))

# -- A rough normal law ------------------------------------------------------------------------------------------------


def test_of_normal_draws_the_rough_normal_is_their_law():
    rng = np.random.default_rng(0)
    covariance = positive(rng, M) * np.outer(*2 * [[1.0, 100.0, 1e-3]])
    mean = np.array([1.0, -300.0, 0.0])
    found = rough_normal(mean + rng.normal(size=(20_000, M)) @ np.linalg.cholesky(covariance).T)
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((found.mean - mean) / sd, 0, atol=5 * 1.26 / math.sqrt(20_000))
    np.testing.assert_allclose(found.covariance / np.outer(sd, sd), covariance / np.outer(sd, sd), atol=0.05)


def test_heavy_tails_do_not_make_it_wide():
    draws = np.random.default_rng(0).standard_cauchy((5000, 2))
    found = rough_normal(draws)
    np.testing.assert_allclose(found.mean, 0, atol=0.2)
    assert np.all(np.sqrt(np.diag(found.covariance)) < 6 * 1.6)  # whose quartiles are at 1.48 of a normal's


def test_draws_that_are_not_finite_do_not_count():
    draws = np.random.default_rng(0).normal(size=(100, 2))
    with_others = np.concatenate([draws, [[np.nan, 0.0], [np.inf, 1.0]]])
    for one, same in zip(rough_normal(draws), rough_normal(with_others), strict=True):
        np.testing.assert_array_equal(one, same)
    np.testing.assert_array_equal(place_of(draws), place_of(with_others))


@pytest.mark.parametrize("draws", [np.ones((50, 2)), np.zeros((50, 1)), np.full((50, 3), 1e9)], ids=["1", "0", "1e9"])
def test_a_constant_has_a_covariance_that_can_be_inverted(draws):
    found = rough_normal(draws)
    np.testing.assert_array_equal(found.mean, draws[0])
    assert found.covariance.shape == (draws.shape[1],) * 2
    assert np.linalg.eigvalsh(found.covariance).min() > 0


def test_a_prior_in_a_frame_is_the_density_along_its_coordinates():
    rng = np.random.default_rng(1)
    prior = NormalPrior(rng.normal(size=M), positive(rng, M))
    frame = Frame(rng.normal(size=M), np.eye(M) + 0.3 * rng.normal(size=(M, M)))
    slope, precision = prior.in_frame(frame)
    for u in rng.normal(size=(5, M)):
        rise = prior.log_density(frame.center + frame.whitening @ u) - prior.log_density(frame.center)
        assert rise == pytest.approx(slope @ u - u @ precision @ u / 2)


def test_a_place_that_may_be_0_is_next_to_0():
    rng = np.random.default_rng(2)
    draws = rng.normal(size=(1000, 3)) * [2.0, 1.0, 1.0] + [0.0, 0.1, 0.5]
    near, uncertain, away = place_of(draws)
    assert 0 < near < 1e-3
    assert 0 < uncertain < 1e-3  # .1 is 2.5 Monte Carlo errors
    assert away == np.median(draws[:, 2])


# -- Noise in a matrix -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [4, 10, 40])
def test_the_edge_is_where_the_noises_largest_eigenvalue_is(m):
    rng, scale = np.random.default_rng(0), 0.3
    largest = []
    for _ in range(100):
        noise = np.tril(rng.normal(size=(m, m)) * np.where(np.eye(m), 1, math.sqrt(0.5)))
        largest.append(scale * np.linalg.eigvalsh(noise + np.tril(noise, -1).T)[-1])
    assert 0.6 < np.mean(largest) / noise_edge(scale, m) < 1.02
    assert np.quantile(largest, 0.9) < 1.2 * noise_edge(scale, m)


@pytest.mark.parametrize(
    ("values", "edge", "expected"),
    [
        ([0.5, 1.0, 2.0], 0.0, [0.5, 1.0, 2.0]),
        ([-0.1, 0.01, 2.0], 0.0, [_WIDENS, _WIDENS, 2.0]),  # what is certain says nothing: the frame widens slowly
        ([-0.1, 0.3, 2.0], 0.8, [0.2, 0.3, math.sqrt(2.0**2 - 0.8**2)]),
        ([-3.0, 15.0, 50.0], 20.0, [1.0, 1.0, math.sqrt(50.0**2 - 20**2)]),  # noise hides it: as wide as before
    ],
)
def test_what_noise_hides_is_known_by_the_frame_only(values, edge, expected):
    turn = np.linalg.qr(np.random.default_rng(3).normal(size=(M, M)))[0]
    found = Derivatives(np.zeros(M), 1.0, turn * np.array(values) @ turn.T, 0.0)
    np.testing.assert_allclose(_known(found, edge), turn * np.array(expected) @ turn.T, atol=1e-12)


# -- How long a step is ------------------------------------------------------------------------------------------------


class Line:
    """A survey that knows how much each multiple of a step gains."""

    def __init__(self, rise, scale=1e-3):
        self.rise, self.scale = rise, scale

    def gains(self, draw, start, ends, bounds):
        self.start, self.ends, self.bounds = start, ends, bounds
        return self.rise(LINE), self.scale * bounds


FRAME = Frame(np.array([1.0, 2.0, 3.0]), np.diag([0.5, 1.0, 2.0]))
STEP = np.array([3.0, 0.0, 4.0])


def length(rise, scale=1e-3, prior=FLAT, expected=math.inf):
    return _length(Line(rise, scale), None, prior, FRAME, STEP, 0.1, expected)


def test_multiples_of_a_step_are_compared_with_bounds_in_proportion():
    line = Line(lambda t: t)
    _length(line, None, FLAT, FRAME, STEP, 0.1, math.inf)
    assert LINE.max() == 8
    assert 1 in LINE
    np.testing.assert_allclose(LINE[1:] / LINE[:-1], 1 / 8)
    np.testing.assert_allclose(line.start, FRAME.center)
    np.testing.assert_allclose(line.ends, FRAME.center + LINE[:, None] * [1.5, 0.0, 8.0])
    np.testing.assert_allclose(line.bounds, 0.1 * 5 * LINE)


@pytest.mark.parametrize(
    ("rise", "expected"),
    [
        (lambda t: t - t**2 / 2, 1.0),  # of a parabola the whole step is right
        (lambda t: t - 5 * t**2, 1 / 8),  # too long by 10
        (lambda t: t - 500 * t**2, 1 / 8**4),  # by 1000
        (lambda t: t - t**2 / 20, 8.0),  # too short by 10
        (lambda t: np.where(t < 1e-3, t, -9.0), 1 / 8**4),
        (lambda t: -t, 0.0),
        (lambda t: 0 * t, 0.0),
    ],
    ids=["right", "long", "far too long", "short", "a wall", "downhill", "flat"],
)
def test_the_longest_multiple_with_a_clear_gain_is_gone(rise, expected):
    assert length(rise) == expected


def test_a_gain_below_its_noise_is_none():
    def rise(t):
        return t - t**2 / 2

    clear = np.max(rise(LINE) / (0.5 * LINE))  # over the scale
    assert length(rise, scale=clear * 1.01) == 0
    assert length(rise, scale=clear * 0.99) > 0


@pytest.mark.parametrize(("short", "expected"), [(1.9, 1.0), (2.1, 1 / 8)])
def test_the_whole_step_is_gone_where_noise_could_hide_what_it_gains(short, expected):
    """:param short: of what is expected, by so many standard deviations. A shorter step has a clearer gain."""
    of_whole = 0.1 * np.linalg.norm(STEP)  # standard deviation
    assert length(lambda t: np.where(t < 1, 100 * t, -0.1), 1.0, expected=short * of_whole - 0.1) == expected


def test_what_the_prior_gains_counts():
    along = FRAME.whitening @ STEP
    prior = NormalPrior(FRAME.center + along, np.outer(along, along) / 100 + 1e-6 * np.eye(M))
    assert length(lambda t: 0 * t) == 0
    assert length(lambda t: 0 * t, prior=prior) == 1


@pytest.mark.parametrize(("sds", "middle", "expected"), [(0.55, 0.0, 8.0), (0.65, 0.0, 1.0), (10.0, 12.0, 8.0)])
def test_no_longer_step_than_that_to_the_mode_leaves_the_prior(sds, middle, expected):
    """Eight times this one ends 4.4 and 5.2 standard deviations away, where 4.73 is the most; or it leads back there.

    :param sds: of the prior, how long the step is; where its middle is, in steps.
    """
    along = FRAME.whitening @ STEP
    away = along / sds
    across = np.eye(M) - np.outer(along, along) / (along @ along)
    prior = NormalPrior(FRAME.center + middle * along, np.outer(away, away) + 1e6 * across)
    assert length(lambda t: 100 * (t - t**2 / 20), prior=prior) == expected


# -- When a round is enough --------------------------------------------------------------------------------------------

ENOUGH = Round(
    FRAME, Bounds(1.0, 1.0), Derivatives(STEP, 1.0, np.eye(M), 0.01), STEP, 1.0, 2.0 * M, 0.5 * M, 0.1, 0.8, 1.2
)


@pytest.mark.parametrize(
    "changes",
    [
        {"distance": 1.01 * expected_square(M, 0.5 * M)},
        {"distance": 2 * M + 0.5 * M * (1.01 + 3 * math.sqrt(2 / M))},  # further than noise alone leads
        {"length": 1 / 8},
        {"noise": FINE_NOISE * M},
        {"edge": FINE_EDGE},
        {"least": 0.99 * _LEAST},
        {"most": _MOST},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_round_is_enough_where_all_of_it_says_so(changes):
    assert ENOUGH.is_enough
    assert not ENOUGH._replace(**changes).is_enough


def test_noise_may_have_taken_so_much_of_a_precision():
    """Where the edge of the noise is at .8, an eigenvalue of 1 may be released as one just above 0."""
    noisy = ENOUGH._replace(edge=0.8, least=0.01)
    assert noisy.is_enough
    assert not noisy._replace(least=-0.1).is_enough


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"length": 1 / 8, "noise": 29 * M, "least": -1.0, "edge": 1.9 * FINE_EDGE, "most": 1.9 * _MOST}, True),
        ({"distance": 1e6}, False),
        ({"noise": 30 * M}, False),
        ({"edge": 2 * FINE_EDGE}, False),
        ({"most": 2 * _MOST}, False),
    ],
    ids=["well", "rough", "far", "loud", "noise", "narrow"],
)
def test_a_frame_is_usable_where_it_is_near_and_not_all_noise(changes, expected):
    assert ENOUGH._replace(**changes).is_usable is expected


def test_the_next_round_is_paid_better_where_noise_alone_decides_on_the_step():
    assert ENOUGH.price_factor == GROWTH
    assert ENOUGH._replace(distance=1e3).price_factor == 1 / GROWTH
    assert ENOUGH._replace(edge=1e3).price_factor == 1.0
    long = ENOUGH._replace(distance=1e3, noise=100.0)  # cheaper, but not so that noise decides
    assert long.price_factor == 0.8
    assert long._replace(noise=140.0).price_factor == 1.0


def test_what_is_told_is_what_the_last_rounds_released_near_the_posterior():
    far, near = ENOUGH._replace(distance=1e6), [ENOUGH, ENOUGH._replace(length=0.1)]
    for rounds, expected in (([], []), ([far], []), ([ENOUGH, far], []), ([ENOUGH, far, *near], near[::-1])):
        assert Found(FRAME, rounds, 100.0).near == expected
    for changes in ({"noise": 16 * M, "distance": 0.0}, {"edge": 2.0}):
        assert Found(FRAME, [ENOUGH, ENOUGH._replace(**changes), ENOUGH], 100.0).near == [ENOUGH]


def test_rows_count_as_often_as_their_gradients_are_longer_than_usual():
    """As the last round has it: those before were further away. The grid's steps round up."""
    for usual, expected in ((1.0, 1.0), (1.4, 1.0), (2.0, 2 * math.sqrt(2)), (5.7, 5.7**2 / math.sqrt(2))):
        rounds = [ENOUGH._replace(usual=9.0), ENOUGH._replace(usual=usual)]
        assert Found(FRAME, rounds, 100.0).weight == pytest.approx(expected)
    assert Found(FRAME, [], 100.0).weight == 1.0


# -- A step ------------------------------------------------------------------------------------------------------------


def test_a_step_without_noise_is_newtons():
    rng = np.random.default_rng(8)
    survey = Parabola(rng.normal(size=M), positive(rng, M, 50.0) + 50 * np.eye(M))
    prior = NormalPrior(rng.normal(size=M), positive(rng, M, 0.1) + 0.05 * np.eye(M))
    frame = Frame(survey.place + 0.3, np.eye(M))
    found = Derivatives(survey.exact(frame)[0], 1e-6, survey.exact(frame)[1], 1e-9)
    slope, precision = prior.in_frame(frame)
    step, distance, noise = _step(found, 1e-9, prior, frame)
    whole = found.information + precision
    np.testing.assert_allclose(step, np.linalg.solve(whole, found.score + slope), rtol=1e-6)
    assert distance == pytest.approx(step @ whole @ step)
    assert noise == pytest.approx(1e-12 * np.trace(found.information @ np.linalg.inv(whole) / 50), rel=10)


@pytest.mark.parametrize(("more", "centres", "expected"), [(36.0, True, 6.0), (1.9, True, 1.0), (36.0, False, 1.0)])
def test_a_frame_in_which_rows_tell_too_much_becomes_narrower(more, centres, expected):
    """:param more: information of many rows, over that of one in a frame that is right."""
    n = 10_000
    typical = typical_norm(M, n)

    class TooWide(Parabola):
        def bounds(self, *_):
            return np.array([5 * typical, more * typical**2])

        def derivatives(self, draw, frame, *args):
            self.frame = frame
            return super().derivatives(draw, frame, *args)

    survey = TooWide(np.zeros(M), np.eye(M), n, centres=centres)
    frame, bounds, _, usual = _release(survey, fund_of(1.0), FRAME, _Prices(0.1, 0.1, 0.1), n, False, 1.0)
    assert survey.frame is frame
    np.testing.assert_array_equal(frame.center, FRAME.center)
    np.testing.assert_allclose(frame.whitening, FRAME.whitening / expected)
    assert usual == pytest.approx(5)
    assert bounds.score == pytest.approx(typical if expected > 1 else 5 * typical, rel=0.5)


def test_where_the_rows_say_nothing_no_step_follows_the_noise():
    """The score is noise of 10 in a direction of no information, in which the frame is as wide as the prior."""
    frame, prior = Frame(np.zeros(M), np.diag([1e-3, 1e-3, 1.0])), NormalPrior(np.zeros(M), np.eye(M))
    rng, steps, scale = np.random.default_rng(9), [], 10.0
    for _ in range(2000):
        found = Derivatives(scale * rng.normal(size=M), scale, np.diag([1.0, 1.0, 0.0]), 0.01)
        step, distance, noise = _step(found, 0.1, prior, frame)
        steps.append([*step, distance])
        assert abs(step[2]) < 0.1
    mean, error = np.mean(steps, 0)[-1], np.std(steps, 0)[-1] / math.sqrt(len(steps))
    assert mean == pytest.approx(noise, abs=5 * error)
    np.testing.assert_allclose(np.std(steps, 0)[:2], scale, rtol=5 / math.sqrt(2 * len(steps)))


def test_a_search_has_arrived_if_its_last_round_was_enough():
    far = ENOUGH._replace(distance=1e6)
    for rounds, expected in (([], False), ([far], False), ([far, ENOUGH], True), ([ENOUGH, far], False)):
        assert Found(FRAME, rounds, 100.0).has_arrived is expected


def test_the_next_frame_is_around_the_step_and_as_wide_as_the_posterior():
    rng = np.random.default_rng(4)
    survey = Parabola(rng.normal(size=M), positive(rng, M, 50.0) + 50 * np.eye(M))
    prior = NormalPrior(rng.normal(size=M), positive(rng, M, 0.1) + 0.05 * np.eye(M))
    frame = Frame(survey.place + 0.3, np.eye(M) + 0.2 * rng.normal(size=(M, M)))
    score, information = survey.exact(frame)
    slope, precision = prior.in_frame(frame)
    step = np.linalg.solve(information + precision, score + slope)
    here = ENOUGH._replace(frame=frame, found=Derivatives(score, 1e-9, information, 1e-9), step=step, edge=1e-9)
    whole = survey.precision + np.linalg.inv(prior.covariance)
    mode = np.linalg.solve(whole, survey.precision @ survey.place + np.linalg.solve(prior.covariance, prior.mean))
    found = _next_frame(here, prior)
    np.testing.assert_allclose(found.center, mode)
    np.testing.assert_allclose(found.whitening.T @ whole @ found.whitening, np.eye(M), atol=1e-9)
    half = _next_frame(here._replace(length=0.5), prior)
    np.testing.assert_allclose(half.center, (np.asarray(frame.center) + mode) / 2)


def test_a_frame_has_widths_within_reason():
    """Relative to the prior's, in its directions; one that has is kept to the last bit."""
    rng = np.random.default_rng(6)
    prior = NormalPrior(np.zeros(M), positive(rng, M) * np.outer(*2 * [[1.0, 1e6, 1e-6]]))
    root, usual = np.linalg.cholesky(prior.covariance), np.eye(M) + 0.3 * rng.normal(size=(M, M))
    kept = root @ usual
    assert within_reason(kept, prior) is kept
    left, right = (np.linalg.qr(rng.normal(size=(M, M)))[0] for _ in range(2))
    found = within_reason(root @ (left * [1e9, 0.5, 1e-20]) @ right, prior)
    widths = np.linalg.svd(np.linalg.solve(root, found))[1]
    np.testing.assert_allclose(widths, [_WIDEST, 0.5, _NARROWEST], rtol=1e-6)
    np.testing.assert_allclose(
        found, root @ (left * [_WIDEST, 0.5, _NARROWEST]) @ right, rtol=1e-6, atol=1e-9 * root.max()
    )


# -- The whole of it ---------------------------------------------------------------------------------------------------

N = 20_000
WIDE = NormalPrior(np.zeros(M), 4 * np.eye(M))
PLACE = np.array([2.0, -1.0, 0.5])
PRECISION = N * (positive(np.random.default_rng(5), M) + 0.2 * np.eye(M))


def found_by(survey, rho, near=WIDE, num_rows=N, prior=WIDE):
    fund = fund_of(rho)
    return search(survey, prior, near, fund, num_rows), fund


@pytest.mark.parametrize("seed", range(3))
def test_a_search_finds_a_parabola_and_spends_half_at_most(seed):
    rho = 0.1
    found, fund = found_by(Parabola(PLACE, PRECISION, N, seed), rho)
    assert found.has_arrived
    assert found.num_rows == N
    assert fund.left >= (1 - SEARCH_SHARE) * rho * (1 - 1e-6)
    assert sum(spent_by(fund).values()) + fund.left == pytest.approx(rho, rel=1e-5)
    whole = PRECISION + np.eye(M) / 4
    away = np.linalg.solve(found.frame.whitening, PLACE - found.frame.center)
    last = found.rounds[-1]
    assert np.linalg.norm(away) < 3 * math.sqrt(M + last.noise)
    values = np.linalg.eigvalsh(found.frame.whitening.T @ whole @ found.frame.whitening)
    assert values.min() > 0.5
    assert values.max() < 2
    assert len(found.rounds) < 20


@pytest.mark.parametrize("start", [0.01, 1.0, 100.0])
def test_a_search_finds_it_from_wherever_it_starts(start):
    near = NormalPrior(PLACE + start * np.array([1.0, 1.0, -1.0]), start**2 * np.eye(M))
    found, _ = found_by(Parabola(PLACE, PRECISION, N), 0.1, near, prior=NormalPrior(np.zeros(M), 1e4 * np.eye(M)))
    assert found.has_arrived


@pytest.mark.parametrize("centres", [True, False])
def test_long_rows_are_counted_where_the_model_tells_how_many_it_expects(centres):
    """Elsewhere all long rows would be taken for rows that are not as the model says."""
    survey = Parabola(PLACE, PRECISION, N, 0, centres=centres)
    found, _ = found_by(survey, 0.1)
    assert found.has_arrived
    assert ("long_rows" in survey.asked) == centres


class Restless(Parabola):
    """Whose score never says that the search has arrived: wherever it has little noise, it is large."""

    def derivatives(self, *args):
        found = super().derivatives(*args)
        kick = 20.0 if found.score_scale**2 < FINE_NOISE else 0.0
        return found._replace(score=found.score + kick * (-1) ** len(self.asked))


def test_where_nothing_is_centred_bounds_are_wide_once_noise_is_small():
    """Far away, their noise would lead astray."""
    survey = Restless(PLACE, PRECISION, N, 0, centres=False)
    found, _ = found_by(survey, 0.1)
    multiples = np.array([here.bounds.score for here in found.rounds]) / typical_norm(M, N)
    is_precise = np.array([here.noise < FINE_NOISE * M for here in found.rounds])
    first = int(np.argmax(is_precise))
    assert is_precise[first]
    assert first + 1 < len(multiples)
    affordable = min(4.0, math.sqrt(0.12 * N * 0.1 / M))
    wide = multiples[first + 1 :] > 0.99 * affordable * SCORE_ROOM
    assert wide.all()


def test_a_private_number_of_rows_is_released_first():
    survey = Parabola(PLACE, PRECISION, N)
    found, fund = found_by(survey, 0.1, num_rows=None)
    assert survey.asked[0] == "count"
    assert survey.asked.count("count") == 1
    assert spent_by(fund)["count"] == pytest.approx(0.001, rel=1e-6)
    assert found.num_rows != N
    assert found.num_rows == pytest.approx(N, abs=6 * 2 / math.sqrt(2 * 0.001))
    known = Parabola(PLACE, PRECISION, N)
    found_by(known, 0.1)
    assert "count" not in known.asked


@pytest.mark.parametrize("rho", [1e-9, 1e-6, 1e-4])
def test_a_search_that_cannot_arrive_stops_at_half_of_the_budget(rho):
    found, fund = found_by(Parabola(PLACE, PRECISION, N), rho)
    assert not found.has_arrived
    assert (1 - SEARCH_SHARE) * rho * (1 - 1e-6) <= fund.left
    assert 1 <= len(found.rounds) <= MOST_ROUNDS
    assert np.isfinite(np.asarray(found.frame.whitening)).all()


def test_a_search_ends_after_so_many_rounds():
    """One whose steps always lead on: the place runs away."""
    survey = Parabola(PLACE, PRECISION, N)
    derivatives = survey.derivatives

    def away(*asked):
        survey.place = survey.place + 3 * np.ones(M)
        return derivatives(*asked)

    survey.derivatives = away
    found, _ = found_by(survey, 100.0)
    assert len(found.rounds) == MOST_ROUNDS
    assert not found.has_arrived


def test_a_search_that_is_led_astray_in_the_end_goes_back_to_its_last_usable_frame():
    survey = Parabola(PLACE, PRECISION, N)
    derivatives, usual = survey.derivatives, survey.place

    def astray(*args):
        asked = survey.asked.count("derivatives")
        survey.place = usual + (10.0 * (-1) ** asked if asked > 4 else 0.0)
        return derivatives(*args)

    survey.derivatives = astray
    found, _ = found_by(survey, 0.008)
    usable = [k for k, here in enumerate(found.rounds) if here.is_usable]
    assert 0 <= usable[-1] < len(found.rounds) - 1
    expected = _next_frame(found.rounds[usable[-1]], WIDE)
    np.testing.assert_allclose(found.frame.center, expected.center)
    np.testing.assert_allclose(found.frame.whitening, expected.whitening)
    assert not found.has_arrived


def test_steps_that_noise_would_make_as_long_are_gone_without_a_look_at_the_line():
    survey = Parabola(PLACE, PRECISION, N)
    found, _ = found_by(survey, 0.1)
    assert survey.asked[:4] == [
        "scales",
        "row_counts",
        "derivatives",
        "gains",
    ]
    assert survey.asked.count("gains") < survey.asked.count("derivatives") == len(found.rounds)
