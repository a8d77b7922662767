"""The survey releases what it says: sums of clipped row quantities, and bounds that so many rows exceed.

Noise is made by hand and is as good as 0: a release is compared with the sum that NumPy computes, or with what a model
expects, within 5 standard errors. What one row can do to a release: `test_sensitivity.py`.
"""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import numpyro_dp.preparation.row_scores
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.row_scores import _FAR, CENTRE_DRAWS, SHARE_OF_FEW, centred_scores, has_kinks, row_bends
from numpyro_dp.preparation.search import LINE
from numpyro_dp.preparation.survey import (
    _LIGHT,
    _OUTLYING,
    BOUND_GRID,
    CURVE_GRID,
    LEAST_WEIGHT,
    SCALE_GRID,
    TURN_REACH,
    WEIGHT_GRID,
    Bounds,
    Steps,
    Survey,
    kinds_of,
)
from numpyro_dp.privacy.clipping import GRID
from numpyro_dp.privacy.release import Grid, Vault
from tests.helpers.surveys import (
    FRAME,
    MULTIPLIER,
    POWER,
    STEPS,
    M,
    cut_of,
    draw,
    drawn_linear,
    linear,
    log_normal,
    logistic,
    of_derivatives,
    searches,
    survey_of,
    table,
    with_rows,
    yes_or_no,
)

pytestmark = pytest.mark.optimized

RELATIONS = ("replace_one", "add_or_remove_one")
_rng = np.random.default_rng(0)
POINTS = _rng.normal(size=(4, M))
PAIRS = _rng.normal(size=(4, 2, M))
ENDS = np.asarray(FRAME.center) + LINE[:, None] * np.array([0.4, -0.7, 0.2])
SHARE = 0.3
X, Y = table(300)
LOOSE, TIGHT = Bounds(50.0, 50.0), Bounds(0.4, 0.1)  # no row is clipped; most rows are


@functools.cache
def survey(relation="replace_one", can_draw=False, is_smooth=True):
    """Of (X, Y), a logistic regression in float64. Programs are compiled once."""
    return survey_of((X, Y), logistic, relation, can_draw=can_draw, is_smooth=is_smooth)


# -- By hand -----------------------------------------------------------------------------------------------------------


def derivatives_by_hand(X, y):
    """Gradients of the rows with respect to u at 0, and minus their Hessians."""
    along = X @ FRAME.whitening
    p = 1 / (1 + np.exp(-X @ FRAME.center))
    return (y - p)[:, None] * along, (p * (1 - p))[:, None, None] * along[:, :, None] * along[:, None]


def clipped(values, bound):
    norm = np.sqrt(np.sum(values**2, axis=tuple(range(1, values.ndim)), keepdims=True))
    return values * np.minimum(1, bound / norm)


def log_density_by_hand(phi):
    """Of the rows, shape (n,)."""
    logit = X @ phi
    return Y * logit - np.logaddexp(0, logit)


def at(u):
    return FRAME.center + FRAME.whitening @ u


def on_grid(values, grid, smallest, threshold):
    """The smallest bound of the grid that at most so many values exceed, or the largest bound."""
    candidates = smallest * grid.ratio ** np.arange(2**grid.num_counts)
    few = [np.sum(values > bound) <= threshold for bound in candidates]
    return candidates[int(np.argmax(few))] if any(few) else candidates[-1]


assert np.linalg.norm(derivatives_by_hand(X, Y)[0], axis=1).max() < LOOSE.score
assert (np.linalg.norm(derivatives_by_hand(X, Y)[1], axis=(1, 2)) > TIGHT.information).mean() > 0.3


# -- Score and information ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("bounds", [LOOSE, TIGHT], ids=["loose", "tight"])
def test_where_no_outcomes_are_drawn_they_are_sums_of_clipped_gradients_and_hessians(bounds, relation, x64):
    found = survey(relation).derivatives(of_derivatives(), FRAME, bounds, SHARE, 300)
    score, information = (clipped(*pair) for pair in zip(derivatives_by_hand(X, Y), bounds, strict=True))
    np.testing.assert_allclose(found.score, POWER * score.sum(0), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(found.information, POWER * information.sum(0), rtol=1e-5, atol=1e-3)
    sensitivity = {"replace_one": 2, "add_or_remove_one": 1}[relation]
    scales = [b / math.sqrt(share) for b, share in zip(bounds, (1 - SHARE, SHARE), strict=True)]
    expected = POWER * sensitivity * MULTIPLIER * np.array(scales)
    np.testing.assert_allclose([found.score_scale, found.information_scale], expected, rtol=2e-3)
    assert np.all(np.array([found.score_scale, found.information_scale]) >= expected)


@pytest.mark.parametrize("bounds", [LOOSE, Bounds(0.4, 50.0), TIGHT], ids=["loose", "score", "tight"])
def test_where_hessians_say_nothing_the_information_is_of_the_gradients_squares(bounds, x64):
    """Of the clipped gradient times the gradient, where noise hides how gradients fall."""
    found = survey(is_smooth=False).derivatives(
        of_derivatives(has_kinks=True, multiplier=1e6), FRAME, bounds, SHARE, 300
    )
    gradients, _ = derivatives_by_hand(X, Y)
    short = clipped(gradients, bounds.score)
    squares = clipped(short[:, :, None] * gradients[:, None], bounds.information)
    np.testing.assert_allclose(found.score, POWER * short.sum(0), rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(found.information, POWER * squares.sum(0), rtol=1e-5, atol=1e-3)


def laplace(phi, row):
    x, y = row
    return -jnp.abs(y[0] - x[0] @ phi)


@pytest.mark.parametrize("bound", [50.0, 0.7], ids=["loose", "tight"])
def test_where_there_are_kinks_the_information_is_as_large_as_the_gradients_fall_says(bound, x64):
    """Of normal rows the sum of absolute distances is not as curved as the squares of its slopes say."""
    rng, n = np.random.default_rng(0), 4_000
    X = rng.normal(size=(n, M))
    y = X @ FRAME.center + 2 * rng.normal(size=n)
    whitening = np.eye(M) / math.sqrt(n)
    frame, reach = Frame(FRAME.center, whitening), 0.5 / math.sqrt(M / n)
    kinked = survey_of((X, y), laplace, power=1.0, can_draw=False, is_smooth=False)
    assert kinked.has_kinks
    # Hardly any noise: an answer then counts in full.
    of_all = draw(kinked.derivative_numbers(0), multiplier=1e-3)
    found = kinked.derivatives(of_all, frame, Bounds(bound * math.sqrt(M / n), 10.0), SHARE, n)

    def slopes(u):
        return clipped(np.sign(y - X @ at_of(frame, u))[:, None] * (X @ whitening), bound * math.sqrt(M / n))

    short, ends = slopes(np.zeros(M)), reach * np.eye(M)
    full = np.sign(y - X @ frame.center)[:, None] * (X @ whitening)
    squares = (short[:, :, None] * full[:, None]).sum(0)
    falls = np.stack([slopes(-ends[k]) - slopes(ends[k]) for k in range(M)], 2) / (2 * reach)
    falls = (falls + falls.transpose(0, 2, 1)) / 2
    norms = np.maximum(np.linalg.norm(falls, axis=(1, 2)), 1e-30)  # most rows have no kink on the way
    fall = np.sum(falls * np.minimum(1, 2.5 * math.sqrt(M) * M / n / norms)[:, None, None], 0)
    assert found.answer == pytest.approx(np.trace(fall) / np.trace(squares), rel=1e-3)
    np.testing.assert_allclose(found.information, fall, rtol=1e-3, atol=1e-3)
    if bound > 10:  # twice the density at 0, less what it falls by within reach
        np.testing.assert_allclose(np.linalg.eigvalsh(found.information), 0.4, rtol=0.15)


@pytest.mark.parametrize("answer", [1.0, 0.3])
def test_a_fit_is_beside_a_quadratic_as_curved_as_the_answer_says(answer, x64):
    """Of rows with kinks: less of the gradients' squares."""
    kinked = survey_of((X, Y), logistic, can_draw=False, is_smooth=False)
    draws = searches(CURVE_GRID.num_counts), draw(kinked.fit_numbers(len(POINTS)), multiplier=1e-3)
    found = kinked.fit(*draws, FRAME, Bounds(50.0, 1e9), POINTS, 2.0**14, 0.5, answer)
    gradients, _ = derivatives_by_hand(X, Y)
    here = log_density_by_hand(FRAME.center)
    squares = gradients.T @ gradients
    beyond = [(log_density_by_hand(at(u)) - here - gradients @ u).sum() + answer * u @ squares @ u / 2 for u in POINTS]
    np.testing.assert_allclose(found.curve, POWER * np.array(beyond), rtol=1e-3, atol=1e-2)


def at_of(frame, u):
    return np.asarray(frame.center) + np.asarray(frame.whitening) @ u


def test_the_information_has_the_norm_of_the_matrix_and_so_has_its_noise(x64):
    """Noise of one size in each number: s in the diagonal, s / sqrt(2) off it, and the matrix is symmetric."""
    steps = 2**20
    exact, noisy = (survey().derivatives(of_derivatives(lo=lo), FRAME, TIGHT, SHARE, 300) for lo in (0, steps))
    sigmas = steps / (2 * GRID * MULTIPLIER)
    np.testing.assert_allclose(noisy.score - exact.score, sigmas * exact.score_scale, rtol=1e-6)
    noise = (noisy.information - exact.information) / (sigmas * exact.information_scale)
    np.testing.assert_allclose(noise, np.where(np.eye(M), 1, math.sqrt(0.5)), rtol=1e-6)
    # One row, clipped by the Frobenius norm: no entry is, alone.
    one = derivatives_by_hand(X[:1], Y[:1])[1]
    alone = survey_of((X[:1], Y[:1]), can_draw=False)
    found = alone.derivatives(of_derivatives(), FRAME, Bounds(1.0, 0.9 * np.linalg.norm(one)), SHARE, 300)
    np.testing.assert_allclose(found.information, POWER * 0.9 * one[0], rtol=1e-4)


MANY = 20_000


@functools.cache
def large_survey():
    return survey_of(table(MANY, seed=3), logistic)


def test_the_information_of_drawn_outcomes_is_fishers(x64):
    """Without a clip: the rows' own score, and an information in which their outcomes have no part."""
    X, y = table(MANY, seed=3)
    found = with_rows(large_survey(), (X, y)).derivatives(of_derivatives(), FRAME, LOOSE, SHARE, 300)
    gradients, informations = derivatives_by_hand(X, y)
    np.testing.assert_allclose(found.score, POWER * gradients.sum(0), rtol=1e-5, atol=0.1)
    p = 1 / (1 + np.exp(-X @ FRAME.center))
    # (y - p)**2 has variance p (1 - p) (1 - 2 p)**2, where the information has p (1 - p).
    relative = (1 - 2 * p) / np.sqrt(p * (1 - p))
    error = np.sqrt(np.sum((relative[:, None, None] * informations) ** 2, 0) / CENTRE_DRAWS)
    assert np.all(np.abs(found.information / POWER - informations.sum(0)) < 5 * error)
    assert np.all(error < 0.05 * np.sqrt(np.outer(*2 * [np.diag(informations.sum(0))])))
    other = with_rows(large_survey(), (X, 1 - y)).derivatives(of_derivatives(), FRAME, LOOSE, SHARE, 300)
    np.testing.assert_allclose(other.information, found.information, rtol=1e-5, atol=0.1)


def test_the_information_is_positive_and_less_where_scores_are_clipped(x64):
    found = [
        with_rows(large_survey(), table(MANY, seed=3)).derivatives(of_derivatives(), FRAME, Bounds(b, 50.0), SHARE, 300)
        for b in (50.0, 0.4, 0.1)
    ]
    values = [np.linalg.eigvalsh(one.information) for one in found]
    assert all(np.all(small < 0.9 * large) for large, small in itertools.pairwise(values))
    assert values[-1].min() > 0


def test_bends_are_released_beside_the_information_and_clipped_with_it(x64):
    X, y = table(MANY, seed=3)
    survey = survey_of((X, y), yes_or_no)
    some, roomy = Steps(*(part[..., 1:] for part in STEPS)), Bounds(50.0, 1e4)
    plain = survey.derivatives(of_derivatives(), FRAME, roomy, SHARE, 300)
    found = survey.derivatives(of_derivatives(num_steps=2), FRAME, roomy, SHARE, 300, some)

    def one(X, y):
        ahead, row = jnp.asarray(some.ahead), (X[None], y[None])
        return row_bends(survey.cut, FRAME, jnp.asarray(50.0), ahead, row, jnp.array(0))

    bends = np.asarray(jax.jit(jax.vmap(one))(X, y))
    np.testing.assert_allclose(found.information, plain.information, rtol=1e-5)
    np.testing.assert_allclose(found.bends, POWER * bends.sum(0), rtol=1e-3, atol=0.1)
    assert found.bends_scale == found.information_scale == plain.information_scale
    assert found.steps is some
    assert plain.bends.size == 0
    tight = survey.derivatives(of_derivatives(num_steps=2), FRAME, Bounds(50.0, 0.05), SHARE, 300, some)
    assert np.all(np.abs(tight.bends) < 0.9 * np.abs(found.bends))


def test_where_a_row_stands_is_private_under_add_or_remove(x64):
    """So no random number may depend on it: rows are plain, whatever the model can draw."""
    drawing = survey_of((X, Y), relation="add_or_remove_one")
    assert survey_of((X, Y)).centres
    assert not drawing.centres
    assert not survey().centres
    order = np.random.default_rng(1).permutation(len(Y))
    shuffled = survey_of((X[order], Y[order]), relation="add_or_remove_one")
    plain = survey("add_or_remove_one").derivatives(of_derivatives(), FRAME, TIGHT, SHARE, 300)
    for same in (drawing, shuffled):
        found = same.derivatives(of_derivatives(), FRAME, TIGHT, SHARE, 300)
        np.testing.assert_allclose(found.score, plain.score, rtol=1e-6, atol=1e-4)
        np.testing.assert_allclose(found.information, plain.information, rtol=1e-6, atol=1e-4)


# -- Centred scores ----------------------------------------------------------------------------------------------------


@pytest.mark.statistical
def test_centred_gradients_are_0_on_average_where_the_model_holds_and_clipped_ones_are_not():
    """Surprising outcomes are clipped, and they are all of one kind: most outcomes are 0."""
    rng, n = np.random.default_rng(1), 60_000
    X = np.abs(rng.normal(size=(n, M)))
    center = np.array([-0.7, -0.8, -0.9])
    frame = Frame(center, np.eye(M))
    p = 1 / (1 + np.exp(-X @ center))
    spread = np.sqrt(np.einsum("n,ni,ni->i", p * (1 - p), X, X))  # of the unclipped sum
    rows = X, (rng.random(n) < p).astype(float)
    centred, plain = (
        survey_of(rows, power=1.0, can_draw=can)
        .derivatives(of_derivatives(), frame, Bounds(1.0, 1e3), SHARE, 300)
        .score
        for can in (True, False)
    )
    assert np.all(np.abs(centred) < 5 * math.sqrt(1 + 1 / CENTRE_DRAWS) * spread), centred / spread
    assert np.all(plain < -10 * spread), plain / spread


def scale_survey(n, away=0.0):
    """Log-normal rows whose parameters are `away` standard deviations (of each alone) from the centre of a frame.

    Bounds clip the tails of the squares, of which a scale is known.
    """
    rng = np.random.default_rng(1)
    center = np.array([0.5, -0.5, 0.2])
    X = rng.normal(size=(n, M))
    sd = np.array([math.exp(center[2]), math.exp(center[2]), math.sqrt(0.5)]) / math.sqrt(n)
    phi = center + away * sd
    y = np.exp(X[:, :2] @ phi[:2] + math.exp(phi[2]) * rng.normal(size=n))
    return survey_of((X, y), log_normal, power=1.0), Frame(center, np.diag(sd)), 1.2 * math.sqrt(M / n)


def test_a_scale_whose_squares_are_clipped_has_a_centred_score_of_0(x64):
    """Its own standard deviation is 1 in these coordinates, or less."""
    survey, frame, bound = scale_survey(400_000)
    score = survey.derivatives(of_derivatives(given=True), frame, Bounds(bound, 100 * bound**2), 0.05, 300).score
    assert np.all(np.abs(score) < 5 * math.sqrt(1 + 1 / CENTRE_DRAWS)), score


def test_what_is_given_back_beyond_the_bound_is_given_again(x64, monkeypatch):
    """A negative control: given back once only, the scale would be found too small, by 14.5 standard deviations."""
    monkeypatch.setattr(numpyro_dp.preparation.row_scores, "CENTRE_STEPS", 1)
    survey, frame, bound = scale_survey(1_600_000)
    score = survey.derivatives(of_derivatives(given=True), frame, Bounds(bound, 100 * bound**2), 0.05, 300).score
    assert score[2] < -5 * math.sqrt(1 + 1 / CENTRE_DRAWS), score


@pytest.mark.statistical
def test_centred_scores_answer_as_the_information_of_clipped_ones_says(x64):
    """Thirty standard deviations away, on either side of the scale's place."""
    answers, told = [], []
    for sign in (1, -1):
        survey, frame, bound = scale_survey(400_000, np.array([0.0, 0.0, 30.0 * sign]))
        found = survey.derivatives(of_derivatives(given=True), frame, Bounds(bound, 100 * bound**2), 0.05, 300)
        answers.append(found.score[2] / (30 * sign))
        told.append(found.information[2, 2])
    error = 5 * math.sqrt(2) * math.sqrt(1 + 1 / CENTRE_DRAWS) / 60
    assert abs(np.mean(answers) - np.mean(told)) < 0.1 * np.mean(told) + error
    assert np.mean(told) < 0.9  # of an unclipped one


def lever_survey(n, away):
    """A regression in which 2% of the rows alone inform the last coefficient, which is `away` from the centre."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(n, M)) * np.array([1, 1, 0])
    X[: n // 50, 2] = 1.0
    sd = 1 / np.sqrt(np.sum(X**2, 0))
    phi = np.array([0.5, -0.5, 0.2])
    y = X @ (phi + [0, 0, away * sd[2]]) + rng.normal(size=n)
    return survey_of((X, y), linear, power=1.0), Frame(phi, np.diag(sd))


@pytest.mark.statistical
def test_scores_answer_as_the_information_says_where_few_rows_of_which_it_is_clipped_inform_a_direction(x64):
    n, away = 200_000, 20.0
    survey, frame = lever_survey(n, away)
    tight = Bounds(2.6 * math.sqrt(M / n), 3 * M / n)
    found = survey.derivatives(of_derivatives(given=True), frame, tight, SHARE, 300)
    assert found.information[2, 2] < 0.3
    assert abs(found.score[2] / away - found.information[2, 2]) < 0.1 * found.information[2, 2]
    # The same rows with a score that is not shortened with the information would lead more than twice as far.
    loose = survey.derivatives(of_derivatives(given=True), frame, Bounds(tight.score, 1.0), SHARE, 300)
    assert loose.score[2] / away > 2 * found.information[2, 2]


def test_a_score_is_shortened_by_as_much_as_its_rows_information(x64):
    X, y = table(MANY, seed=3)
    bounds = Bounds(0.8, 0.4)
    found = with_rows(large_survey(), (X, y)).derivatives(of_derivatives(), FRAME, bounds, SHARE, 300)
    rows = jnp.asarray(X)[:, None], jnp.asarray(y)[:, None], jnp.arange(MANY)[:, None]

    def one(X, y, number):
        return centred_scores(large_survey().cut, FRAME, jnp.asarray(bounds.score), (X, y), number[0])

    each = jax.jit(jax.vmap(one))(*rows)
    weights = np.minimum(1, bounds.information / np.linalg.norm(each.information, axis=(1, 2)))
    assert 0.1 < np.mean(weights < 1) < 0.9
    expected = POWER * np.sum(weights[:, None] * clipped(np.asarray(each.score), bounds.score), 0)
    np.testing.assert_allclose(found.score, expected, rtol=1e-4, atol=0.1)


def test_what_rows_are_given_back_is_released_beside_their_information(x64):
    """Of outcomes on a line only. Of the log-normal law it is along the scale."""
    rng, n = np.random.default_rng(3), 500
    X = rng.normal(size=(n, M))
    y = np.exp(X[:, :2] @ FRAME.center[:2] + math.exp(FRAME.center[2]) * rng.normal(size=n))
    survey, bound = survey_of((X, y), log_normal), 0.5
    found = survey.derivatives(of_derivatives(given=True), FRAME, Bounds(bound, 50.0), SHARE, 300)

    def given(X, y, number):
        return centred_scores(survey.cut, FRAME, jnp.asarray(bound), (X, y), number).given

    each = jax.jit(jax.vmap(given))(jnp.asarray(X)[:, None], jnp.asarray(y)[:, None], jnp.arange(n))
    expected = POWER * np.sum(clipped(np.asarray(each), 0.3 * bound), 0)
    np.testing.assert_allclose(found.given, expected, rtol=1e-4, atol=1e-2)
    in_phi = np.linalg.solve(FRAME.whitening.T, expected)
    assert abs(in_phi[2]) > 5 * np.abs(in_phi[:2]).max()
    of_noise = survey.derivatives(of_derivatives(given=True, multiplier=0.1), FRAME, Bounds(bound, 50.0), SHARE, 300)
    in_noise = math.sqrt(0.95 * (1 - SHARE) / 0.05)  # of the score, for which there is so much more
    assert of_noise.given_scale == pytest.approx(0.3 * of_noise.score_scale * in_noise)
    assert survey_of((X, y > 1), logistic).derivatives(of_derivatives(), FRAME, LOOSE, SHARE, 300).given.size == 0


# -- Rows that count more often than once ------------------------------------------------------------------------------


def weighted_cut(drawn=drawn_linear, num_outcomes=None):
    """Of rows (X, y, w), of which w says how often they count."""

    def density(phi, row):
        return row[2][0] * linear(phi, row[:2])

    def drawn_once(phi, row, words):
        return drawn(phi, row[:2], words)

    return dataclasses.replace(cut_of(density, drawn_once), row_weight=lambda row: row[2][0], num_outcomes=num_outcomes)


def enumerated_linear(phi, row, words):
    """Of a row whose outcome is one of three, each as likely as its density says."""
    return linear(phi, (row[0], words[:1].astype(row[1].dtype) - 1))


@pytest.mark.parametrize(("drawn", "num_outcomes"), [(drawn_linear, None), (enumerated_linear, 3)])
def test_a_row_that_counts_w_times_has_w_times_the_score_and_the_information(drawn, num_outcomes, x64):
    """Outcomes are of the same law, so the information has no square of the weight in it."""
    X, y = table(50, seed=5)

    def found(w, bound):
        rows = jnp.asarray(X)[:, None], jnp.asarray(y)[:, None], jnp.full((50, 1), w)
        cut = weighted_cut(drawn, num_outcomes)
        return jax.vmap(lambda k, *row: centred_scores(cut, FRAME, jnp.asarray(bound), row, k))(jnp.arange(50), *rows)

    once, often = found(1.0, 0.6), found(7.0, 4.2)
    assert 0.1 < np.mean(np.linalg.norm(once.score, axis=1) > 0.6) < 0.9
    for part in ("score", "information", "unclipped"):
        np.testing.assert_allclose(getattr(often, part), 7 * getattr(once, part), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(often.square, 49 * once.square, rtol=1e-6, atol=1e-9)
    for part in ("clipped", "outlying"):
        np.testing.assert_allclose(getattr(often, part), getattr(once, part), atol=1e-9)
    nothing = found(np.nan, 0.6)
    assert not np.any(nothing.information)

    def bends(w, bound):
        cut, steps = weighted_cut(drawn, num_outcomes), jnp.asarray(STEPS.ahead)

        def of_row(k, x, y):
            return row_bends(cut, FRAME, jnp.asarray(bound), steps, (x[None], y[None], jnp.full(1, w)), k)

        return jax.vmap(of_row)(jnp.arange(50), X, y)

    np.testing.assert_allclose(bends(7.0, 4.2), 7 * bends(1.0, 0.6), rtol=1e-6, atol=1e-9)


def weighted_survey(weights, power=POWER):
    X, y = table(len(weights), seed=6)
    rows = tuple(jnp.asarray(part) for part in (X, y, weights))
    cut, vault = weighted_cut(), Vault(rows, neighboring_relation="replace_one", ledger=None)
    target = PrivateTarget(vault, lambda z: 0.0, cut.row_log_density, num_params=M, num_rows=len(X), power=power)
    return Survey(target, cut)


def test_a_weight_that_is_typical_goes_to_the_power(x64):
    """Nothing else changes: with bounds in proportion, what is released is the same."""
    weights = np.random.default_rng(7).gamma(3.0, 10.0, 300)
    survey = weighted_survey(weights)
    found = survey.of_rows_that_count_once(searches(WEIGHT_GRID.num_counts), 60.0)
    typical = found.power / POWER
    largest = on_grid(weights, WEIGHT_GRID, LEAST_WEIGHT, 60.0)
    assert typical == pytest.approx(largest / math.sqrt(WEIGHT_GRID.ratio))
    assert 0.5 < typical / np.quantile(weights, 0.8) < 2
    released = [
        each.derivatives(of_derivatives(given=True), FRAME, Bounds(0.9 / unit, 0.6 / unit), SHARE, 300)
        for each, unit in ((survey, 1.0), (found, typical))
    ]
    for part in ("score", "information", "score_scale", "information_scale"):
        one, other = (getattr(each, part) for each in released)
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-3)


def test_where_hardly_a_row_counts_no_weight_is_typical():
    weights = np.where(np.arange(300) < 20, 5.0, 0.0)
    survey = weighted_survey(weights)
    assert survey.of_rows_that_count_once(searches(WEIGHT_GRID.num_counts), 60.0) is survey


# -- Rises -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", RELATIONS)
def test_gains_are_sums_of_the_rows_clipped_rises(relation, x64):
    bounds = np.array([1.0, 0.3, 5.0, 0.02] + 5 * [1e-3])
    rises = np.stack([log_density_by_hand(end) - log_density_by_hand(FRAME.center) for end in ENDS], 1)
    assert (abs(rises) > bounds).any(0).sum() >= 2
    gains, scales = survey(relation).gains(draw(len(ENDS)), FRAME.center, ENDS, bounds)
    np.testing.assert_allclose(gains, POWER * np.clip(rises, -bounds, bounds).sum(0), rtol=1e-4, atol=1e-3)
    # All rises of a row may be at their bounds: the norm of the nine is then 3.
    sensitivity = {"replace_one": 2, "add_or_remove_one": 1}[relation]
    np.testing.assert_allclose(scales, sensitivity * MULTIPLIER * POWER * 3 * bounds, rtol=2e-3)


def test_a_rise_without_a_value_counts_as_the_largest_fall(x64):
    rows = X.copy()
    rows[7] = np.inf
    bounds = np.full(len(ENDS), 20.0)
    gains, _ = with_rows(survey(), (rows, Y)).gains(draw(len(ENDS)), FRAME.center, ENDS, bounds)
    with_rows(survey(), (X, Y))
    rises = np.stack([log_density_by_hand(end) - log_density_by_hand(FRAME.center) for end in ENDS], 1)
    others = np.delete(np.clip(rises, -20, 20), 7, 0).sum(0)
    np.testing.assert_allclose(gains, POWER * (others - 20), rtol=1e-4, atol=1e-2)


# -- Bounds that so many rows exceed -----------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_count_is_that_of_the_rows(relation, x64):
    assert survey(relation).count(draw()) == pytest.approx(len(Y), rel=1e-6)


@pytest.mark.parametrize("relation", RELATIONS)
def test_searches_find_the_quantiles_of_several_numbers_at_once(relation, x64):
    rng = np.random.default_rng(1)
    columns = np.exp(rng.normal(size=(400, 3)) * [0.5, 2.0, 1.0]) * [1.0, 1e-4, 30.0]
    columns[:3, 0] = np.nan  # exceeds nothing
    target, grid = survey_of((columns, np.zeros(400)), relation=relation)._target, Grid(2**0.5, 6)
    search = functools.partial(
        target.program(
            lambda target, draws, *numbers: target.find_bounds(draws, lambda row: row[0][0], grid, *numbers)
        ),
        target,
    )
    for threshold in (0.5, 30.0, 399.5, 1000.0):
        for smallest in ([0.01, 2.0**-20, 0.1], [5.0, 1e-4, 1e3]):
            expected = [on_grid(columns[:, k], grid, smallest[k], threshold) for k in range(3)]
            found = search(searches(6, 3), jnp.array(smallest), threshold)
            np.testing.assert_allclose(found, expected, rtol=1e-12)
    # Noise of ten rows in each count, in steps of the grid: one row moves each of three counts by one.
    largest = math.sqrt(3) * {"replace_one": 0.5, "add_or_remove_one": 1.0}[relation]
    smallest = np.array([0.01, 2.0**-20, 0.1])
    for rows in (10, -10):
        expected = [on_grid(columns[:, k], grid, smallest[k], 29.5 - rows) for k in range(3)]
        found = search(searches(6, 3, lo=round(rows * GRID / largest)), jnp.asarray(smallest), 29.5)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_bounds_are_quantiles_of_the_norms(x64):
    gradients, informations = derivatives_by_hand(X, Y)
    norms = np.linalg.norm(gradients, axis=1), np.linalg.norm(informations, axis=(1, 2))
    smallest = np.array([2.0**-12, 2.0**-9])
    found = survey().bounds(searches(BOUND_GRID.num_counts, 2), FRAME, smallest, 30.0)
    expected = [on_grid(values, BOUND_GRID, least, 30.0) for values, least in zip(norms, smallest, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_scales_are_quantiles_of_each_coordinates_derivatives(x64):
    units = np.array([1.0, 1e3, 1e-2])
    gradients = derivatives_by_hand(X, Y)[0] * units
    frame = FRAME._replace(whitening=FRAME.whitening * units)
    found = survey().scales(
        searches(SCALE_GRID.num_counts, M), frame, SCALE_GRID, 2.0**-20, 90.0, np.eye(M, dtype=bool)
    )
    np.testing.assert_allclose(found, [on_grid(np.abs(g), SCALE_GRID, 2.0**-20, 90.0) for g in gradients.T], rtol=1e-6)


def test_scales_are_not_below_those_of_the_models_outcomes(x64):
    """Of rows that lie where the model expects them, as all do where a scale starts far too large."""
    y = X @ np.asarray(FRAME.center, float)

    def scales(can_draw):
        surveyed = survey_of((X, y), linear, can_draw=can_draw)
        draws = searches(SCALE_GRID.num_counts, M)
        return surveyed.scales(draws, FRAME, SCALE_GRID, 2.0**-20, 90.0, np.eye(M, dtype=bool))

    np.testing.assert_allclose(scales(can_draw=False), 2.0**-20)
    # The root of eight normal draws' mean square is between .3 and 2, but once in 1e4 rows.
    usual = np.quantile(np.abs(X @ FRAME.whitening), 1 - 90 / len(X), axis=0)
    found = scales(can_draw=True)
    assert np.all((usual / 2 < found) & (found < 4 * usual))


def test_coordinates_of_a_kind_are_counted_together(x64):
    """Effects of groups: each row tells of one, so all rows tell how much a row tells."""
    group = np.eye(M)[np.arange(len(Y)) % M]
    together = survey_of((group, Y), logistic, can_draw=False, apart=~np.eye(M, dtype=bool))
    frame = Frame(FRAME.center, np.diag([1.0, 2.0, 3.0]))
    p = 1 / (1 + np.exp(-group @ FRAME.center))
    gradients = np.abs(Y - p) * (group @ [1.0, 2.0, 3.0])
    found = together.scales(searches(SCALE_GRID.num_counts, 1), frame, SCALE_GRID, 2.0**-20, 90.0, together.kinds)
    np.testing.assert_allclose(found, [on_grid(gradients, SCALE_GRID, 2.0**-20, 90.0)], rtol=1e-6)


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_rows_are_counted_that_have_a_derivative(relation, x64):
    """By each of the coordinates; also where they are of a kind, of which a row has one."""
    few = X * (np.arange(len(X)) % 7 == 0)[:, None] ** [0, 1, 0]
    gradients = derivatives_by_hand(few, Y)[0]
    level = np.array([0.05, 0.5, 1e-6])
    found = survey_of((few, Y), logistic, relation, can_draw=False).row_counts(draw(M), FRAME, level)
    np.testing.assert_allclose(found, (np.abs(gradients) > level).sum(0), atol=0.01)
    group = np.eye(M)[np.minimum(np.arange(len(Y)) % 5, M - 1)]
    together = survey_of((group, Y), logistic, relation, can_draw=False, apart=~np.eye(M, dtype=bool))
    found = together.row_counts(draw(M), Frame(FRAME.center, np.eye(M)), np.zeros(M))
    np.testing.assert_allclose(found, group.sum(0), atol=0.01)


def test_a_kind_has_coordinates_of_which_no_row_has_two():
    apart = np.zeros((5, 5), bool)
    apart[np.ix_([1, 3], [1, 3])] = apart[np.ix_([2, 4], [2, 4])] = ~np.eye(2, dtype=bool)
    expected = [[1, 0, 0, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 1]]
    np.testing.assert_array_equal(kinds_of(5, apart), np.array(expected, bool))
    np.testing.assert_array_equal(kinds_of(5, None), np.eye(5, dtype=bool))


def test_slopes_are_quantiles_of_root_mean_squares(x64):
    grid = Grid(2**0.25, 7)
    ratios = [
        (log_density_by_hand(at(end)) - log_density_by_hand(at(start))) / np.linalg.norm(end - start)
        for start, end in PAIRS
    ]
    values = np.sqrt(np.mean(np.square(ratios), 0))
    found = survey().slope(searches(7), FRAME, PAIRS, grid, 2.0**-10, 9.0)
    assert found == pytest.approx(on_grid(values, grid, 2.0**-10, 9.0), rel=1e-6)


# -- The last look -----------------------------------------------------------------------------------------------------


def look(survey, frame, bound, points, smallest, threshold):
    draws = searches(CURVE_GRID.num_counts), draw(survey.fit_numbers(len(points)))
    return survey.fit(*draws, frame, Bounds(bound, 1e9), points, 16 * smallest, threshold)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("threshold", [0.5, 100.0], ids=["loose", "tight"])
def test_a_fit_is_of_sums_over_rows(threshold, relation, x64):
    gradients, informations = derivatives_by_hand(X, Y)
    here, bound = log_density_by_hand(FRAME.center), 0.4
    beyond = np.stack(
        [
            log_density_by_hand(at(u)) - here - gradients @ u + np.einsum("nij,i,j->n", informations, u, u) / 2
            for u in POINTS
        ],
        1,
    )
    largest = on_grid(np.linalg.norm(beyond, axis=1), CURVE_GRID, 2.0**-12, threshold)
    found = look(survey(relation), FRAME, bound, POINTS, 2.0**-12, threshold)
    np.testing.assert_allclose(found.curve, POWER * clipped(beyond, largest).sum(0), rtol=1e-4, atol=1e-3)
    assert found.clipped == pytest.approx(np.sum(np.linalg.norm(gradients, axis=1) > bound), abs=1e-3)
    assert (found.outlying, found.square, found.surplus) == (0, 0, 0)  # no model says how many to expect
    # Where n is public, a row adds to the count of clipped ones what lies within 1/2 of a middle.
    sensitivity, clip = {"replace_one": (2, 0.5), "add_or_remove_one": (1, 1)}[relation]
    noise = sensitivity * MULTIPLIER * math.hypot(clip, _LIGHT)
    expected = noise * np.array([1, POWER * largest / _LIGHT])
    np.testing.assert_allclose([found.clipped_scale, found.curve_scale], expected, rtol=2e-3)


def linear_rows(n, noise):
    X = np.random.default_rng(5).normal(size=(n, M))
    return X, X @ FRAME.center + noise


LINEAR = 40_000


@functools.cache
def linear_survey():
    return survey_of(linear_rows(LINEAR, np.zeros(LINEAR)), linear, power=1.0)


def linear_fit(noise, bound, typical=2.0**-6):
    frame = Frame(FRAME.center, np.eye(M) / math.sqrt(LINEAR))
    survey = with_rows(linear_survey(), linear_rows(LINEAR, noise))
    return look(survey, frame, bound / math.sqrt(LINEAR), POINTS, typical / 16 / LINEAR, 0.5), frame


@pytest.mark.parametrize("bound", [0.3, 1.0, 2.5])
def test_surprising_rows_are_as_many_as_expected_where_the_model_holds(bound, x64):
    """The row is one among its draws, however much is clipped: with a bound of .3 most rows are."""
    found, _ = linear_fit(np.random.default_rng(2).normal(size=LINEAR), bound)
    # A row's excess is at most 1, and its variance at most that of one of two exchangeable indicators.
    limit = 5 * 0.5 * math.sqrt(LINEAR * (1 + 1 / CENTRE_DRAWS))
    assert abs(found.clipped) < limit
    assert abs(found.outlying) < limit * 2 * math.sqrt(0.2)  # it is 1 for one of nine at most


@pytest.mark.parametrize(("degrees", "least"), [(3, 0.01), (1.5, 0.05)])
def test_more_rows_are_clipped_than_expected_where_tails_are_heavy(degrees, least, x64):
    found, _ = linear_fit(np.random.default_rng(2).standard_t(degrees, LINEAR), 2.5)
    assert found.clipped > least * LINEAR
    # Among eight normal numbers the largest is hardly above 2.
    assert found.outlying > 0.5 * LINEAR * stats.t.sf(2 * _FAR, degrees)


@pytest.mark.parametrize("typical", [1e-3, 1.0, 1e3], ids=["all are clipped", "some", "none"])
def test_the_information_on_the_way_to_a_point_is_that_of_the_slopes_there(typical, x64):
    noise = np.random.default_rng(2).normal(size=LINEAR)
    found, _ = linear_fit(noise, 10.0, typical)
    ways = TURN_REACH * POINTS
    steps = linear_rows(LINEAR, noise)[0] @ ways.T / math.sqrt(LINEAR)
    changes = ((noise[:, None] - steps) ** 2 - noise[:, None] ** 2) * steps**2
    most = 4 * typical / LINEAR * TURN_REACH**2
    size = np.mean(np.sum(ways**2, 1))
    expected = np.clip(changes.mean(1), -most, most).sum() / size
    assert found.turned == pytest.approx(expected, abs=1e-3, rel=1e-3)
    unit = found.clipped_scale / math.hypot(1, 1 / _OUTLYING) / _LIGHT
    assert found.turned_scale == pytest.approx(most / size * unit)


def test_a_few_rows_that_are_far_away_are_outlying_where_the_clip_shortens_them(x64):
    """Some per cent of the rows, in places that the model hardly knows. What is not clipped does no harm."""
    noise = np.random.default_rng(2).normal(size=LINEAR)
    well, _ = linear_fit(noise, 10.0)
    noise[: LINEAR // 25] = 100.0
    far, _ = linear_fit(noise, 10.0)
    assert abs(well.clipped) < 10
    assert far.outlying - well.outlying == pytest.approx(LINEAR / 25, rel=0.05)
    loose, _ = linear_fit(noise, 1e3)
    np.testing.assert_allclose([loose.clipped, loose.outlying], 0, atol=0.01)


def test_an_outlying_row_adds_nothing_else(x64):
    """However far it is: to the curve nothing, and to the squares what is taken for none."""
    noise = np.random.default_rng(2).normal(size=LINEAR)
    found = []
    for far in (1e4, -1e6):
        noise[: LINEAR // 25] = far
        found.append(linear_fit(noise, 10.0)[0])
    np.testing.assert_allclose(found[0].curve, found[1].curve, atol=1e-3)
    for name in ("clipped", "outlying", "square", "surplus"):
        assert getattr(found[0], name) == pytest.approx(getattr(found[1], name), rel=1e-4), name


def test_the_squares_of_a_fit_are_those_of_the_scores(x64):
    """And the surplus is without what the model expects of them, for outcomes that it draws."""
    noise = np.random.default_rng(2).normal(size=LINEAR)
    fit, frame = linear_fit(noise, 1e3)
    lengths = np.sum((linear_rows(LINEAR, 0)[0] @ frame.whitening) ** 2, 1)
    assert fit.square == pytest.approx(np.sum(noise**2 * lengths), rel=1e-4)
    error = math.sqrt(np.sum(2 / CENTRE_DRAWS * lengths**2))
    assert fit.surplus == pytest.approx(np.sum((noise**2 - 1) * lengths), abs=6 * error)


def long_rows_of(noise, edges):
    frame = Frame(FRAME.center, np.eye(M) / math.sqrt(LINEAR))
    survey = with_rows(linear_survey(), linear_rows(LINEAR, noise))
    found, scale = survey.long_rows(draw(len(edges) - 1), frame, np.asarray(edges) / math.sqrt(LINEAR))
    assert scale == pytest.approx((1 + SHARE_OF_FEW) / 2 * 2 * MULTIPLIER * math.sqrt(len(edges) - 1), rel=3e-3)
    return found


def test_longer_rows_are_as_many_as_expected_where_the_model_holds_and_more_where_tails_are_heavy(x64):
    edges = [2.0, 3.5, 6.0, 10.0]
    rng = np.random.default_rng(2)
    found = long_rows_of(rng.normal(size=LINEAR), edges)
    long = [
        np.mean(np.abs(rng.normal(size=LINEAR)) * np.linalg.norm(rng.normal(size=(LINEAR, M)), axis=1) > e)
        for e in edges
    ]
    # Of each row's part, own less the mean of nine, the variance is below that of an indicator.
    assert np.all(np.abs(found) < 5 * np.sqrt(LINEAR * np.array(long[:-1]) * 10 / 9) + 5)
    noise = rng.standard_t(3, LINEAR)
    heavy = long_rows_of(noise, edges)
    lengths = np.abs(noise) * np.linalg.norm(linear_rows(LINEAR, 0)[0], axis=1)
    beyond = np.clip((lengths[:, None] - edges[:-1]) / np.diff(edges), 0, 1).sum(0)
    normal = np.clip(
        (lengths / np.abs(noise) * np.abs(rng.normal(size=LINEAR)))[:, None] - edges[:-1], 0, np.diff(edges)
    ).sum(0)
    np.testing.assert_allclose(heavy[1:], (beyond - normal / np.diff(edges))[1:], rtol=0.15)
    # A row that is no number is in none of the counts.
    noise[:] = np.nan
    np.testing.assert_allclose(long_rows_of(noise, edges), 0, atol=0.01)


def test_rows_that_fit_too_well_are_clipped_less_often_than_expected(x64):
    found, frame = linear_fit(0.5 * np.random.default_rng(2).normal(size=LINEAR), 2.5)
    assert found.clipped < -0.05 * LINEAR
    # The information does not follow them: it is that of the model's outcomes.
    assert np.all(np.abs(found.curve) < 5 * curve_error(frame))


def test_outlying_rows_are_as_many_as_expected_where_a_laws_own_tails_are_long(x64):
    """Those of the squares of which a scale is known: some per cent of the rows are outlying."""
    n = 200_000
    survey, frame, bound = scale_survey(n)
    found = look(survey, frame, bound, POINTS, 2.0**-10 / n, 0.5)
    assert abs(found.outlying) < 5 * math.sqrt(n / 9 * (1 + 1 / CENTRE_DRAWS))  # of nine, one is at most


def curve_error(frame):
    """The Monte Carlo error of the information: of the mean of eight squares of normal numbers, in place of 1."""
    along = linear_rows(LINEAR, 0)[0] @ frame.whitening @ POINTS.T
    return np.sqrt(np.sum((along**2 / 2) ** 2 * 2 / CENTRE_DRAWS, 0))


def test_a_parabola_has_no_curve(x64):
    found, frame = linear_fit(np.random.default_rng(2).normal(size=LINEAR), 2.5)
    error = curve_error(frame)
    assert np.all(np.abs(found.curve) < 5 * error), found.curve / error
    assert error.max() < 0.05


def test_a_bent_log_density_has_a_curve(x64):
    """A logistic regression that is looked at where all is saturated, with points far out."""
    far = Frame(np.zeros(M), 3 * np.eye(M))
    found = look(survey(), far, 1.0, POINTS, 2.0**-12, 0.5)
    phi = [3 * u for u in POINTS]
    gradient = (Y - 0.5) @ X
    exact = [
        np.sum(log_density_by_hand(p) - log_density_by_hand(0 * p)) - gradient @ p + np.sum((X @ p) ** 2) / 8
        for p in phi
    ]
    np.testing.assert_allclose(found.curve, POWER * np.array(exact), rtol=1e-4)
    assert np.min(exact) > 100


# -- Kinks -------------------------------------------------------------------------------------------------------------


def quantile(phi, row):
    X, y = row
    misfit = y[0] - X[0] @ phi
    return -jnp.maximum(0.9 * misfit, -0.1 * misfit)


def laplace_with_scale(phi, row):
    X, y = row
    return -jnp.abs(y[0] - X[0, :2] @ phi[:2]) * jnp.exp(-phi[2]) - phi[2]


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        (quantile, True),
        (laplace_with_scale, True),  # in the location; the scale has a curvature
        (linear, False),
        (logistic, False),
        (log_normal, False),
        (lambda phi, row: linear(phi, row) - jnp.abs(phi[0]), False),
        (lambda phi, row: -jnp.sqrt(1 + (row[1][0] - row[0][0] @ phi) ** 2), False),
        (lambda phi, row: linear(jnp.stack([phi[0], phi[1], 0 * phi[2]]), row), False),  # nothing depends on one
    ],
    ids=["quantile", "laplace", "normal", "logistic", "log-normal", "with a bend", "soft", "without"],
)
def test_kinks_are_seen_where_a_coordinate_has_slopes_and_no_curvature(density, expected):
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.normal(size=(16, 1, M))), jnp.exp(jnp.asarray(rng.normal(size=(16, 1))))
    assert has_kinks(cut_of(density), rng.normal(size=(8, M)), rows) is expected
