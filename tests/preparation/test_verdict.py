"""Reasons to doubt a posterior: each is given where it should be, with its number and a way out, and nowhere else."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.diagnostics import effective_sample_size
from scipy.stats import chi2

from numpyro_dp.chain.finished import by_coordinate, should_thin_more, standing, uninformed, unmixed, widths
from numpyro_dp.model.coordinates import Cut
from numpyro_dp.model.symmetry import Symmetry
from numpyro_dp.preparation.frames import Frame, NormalPrior
from numpyro_dp.preparation.last_look import _OF_SAMPLING, Check, _moved, _variance, _varied, _width, check
from numpyro_dp.preparation.last_release import last_releases, recentred
from numpyro_dp.preparation.long_rows import EDGES, LongRows
from numpyro_dp.preparation.mirror import find_mirror
from numpyro_dp.preparation.row_scores import _FAR, CENTRE_DRAWS
from numpyro_dp.preparation.search import Found
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import CURVE_GRID, Fit
from numpyro_dp.preparation.verdict import (
    MOST_CLIPPED,
    MOST_SHORTENED,
    MOST_TURNED,
    MOST_UNEXPECTED,
    MOST_UNRESOLVED,
    reasons_of_check,
    untold,
)
from tests.helpers.surveys import Parabola, fund_of, positive, spent_by

M = 3
WELL = Check(
    has_arrived=True,
    moved=1.0,
    chance=0.4,
    reach=1.0,
    unresolved=0.1,
    clipped=0.0,
    outlying=0.0,
    clipped_noise=0.001,
    outlying_noise=0.001,
    variance=1.0,
    varied=10.0,
    curve=np.array([0.1, -0.1, 0.0, 0.2, 0.0, 0.1, -0.3, 0.1]),
    curve_noise=0.15,
)

# -- A check by itself -------------------------------------------------------------------------------------------------


def bent(by, k=8):
    return np.full(k, by)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"moved": 5.0, "chance": 9e-4, "reach": 3.0},
            ("moved 3.0 standard deviations", "5.0 times", "larger eps", "`Preparation`"),
        ),
        (
            {"has_arrived": False, "moved": 2.6, "chance": 9e-3, "reach": 1.3},
            ("had not arrived", "2.6 times what noise explains", "public start"),
        ),
        ({"unresolved": 1.01}, ("noise may have made 100%", "narrower prior")),
        ({"unresolved": 7.0}, ("noise may have made 100%", "fewer parameters")),
        (
            {"clipped": 0.05},
            ("5.0% more of them", "are clipped (noise of that count 0.1%)", "law's support", "Student's t"),
        ),
        ({"clipped": -0.05}, ("5.0% fewer of them", "A law with other tails")),
        (
            {"outlying": 0.05},
            ("5.0% more of them", "are far further out than what it draws (noise", "missing covariate"),
        ),
        ({"clipped": 0.07, "outlying": 0.05}, ("7.0% more of them",)),
        ({"taken": 2.1, "room": 3.0}, ("moves the posterior by about 2.1 of its", "logarithm")),
        ({"room": 3.06}, ("noisy counts found some that are longer", "3.1 times as large", "Student's t")),
        ({"room": 3.0, "clipped": 0.05}, ("5.0% more of them", "are clipped")),
        ({"lost": 0.07}, ("7.0% of the rows were clipped or have missing values (noise", "a law that says how")),
        (
            {"clipped": None, "outlying": None, "shortened": 0.13},
            ("13% of the rows were clipped (noise of that count 0.1%)", "normalise them", "`numpyro.factor`"),
        ),
        ({"variance": 0.3, "varied": 1.9}, ("vary only 0.3 times", "narrower prior")),
        ({"curve": bent(-2.0)}, ("is 2.0 from the quadratic", "noise of that 0.1", "`DPPenalty`")),
        ({"curve": np.array([0.0] * 7 + [9.0])}, ("is 3.2 from the quadratic",)),
        ({"turned": 1.3, "turned_noise": 0.2}, ("grows by 1.3 times itself (noise of that 0.2)", "the product")),
    ],
    ids=[
        "far",
        "not arrived",
        "unresolved",
        "all noise",
        "more clipped",
        "fewer clipped",
        "outlying",
        "both",
        "taken",
        "counted",
        "counted and clipped",
        "lost",
        "shortened",
        "hardly varied",
        "curved",
        "once curved",
        "bent",
    ],
)
def test_a_reason_is_given_with_its_number_and_a_way_out(changes, parts):
    assert reasons_of_check(WELL) == []
    (found,) = reasons_of_check(WELL._replace(**changes))
    for part in (*parts, "would help"):
        assert part in found
    assert "  " not in found
    assert not found.endswith(".")


@pytest.mark.parametrize(("share", "most"), [(0.49, False), (0.51, True)])
def test_where_most_rows_say_nothing_their_coding_is_looked_at_first(share, most):
    (found,) = reasons_of_check(WELL._replace(clipped=share))
    assert ("most of the rows: look first whether the outcome is coded" in found) == most
    assert ("a value outside of a formula's `ranges`" in found) != most


@pytest.mark.parametrize(
    "changes",
    [
        {"chance": 1e-9, "reach": 1.1},  # clear, but near
        {"chance": 1.1e-3, "reach": 30.0},  # far, but so is the noise
        {"has_arrived": False, "chance": 1.1e-2, "reach": 30.0},
        {"has_arrived": False, "chance": 1e-9, "reach": 1.1},
        {"unresolved": MOST_UNRESOLVED - 0.01},
        {"clipped": 0.99 * MOST_UNEXPECTED, "clipped_noise": 1e-6},  # few
        {"outlying": -0.99 * MOST_UNEXPECTED, "outlying_noise": 1e-6},
        {"clipped": 0.05, "clipped_noise": 0.013},  # within the noise
        {"clipped": -0.05, "clipped_noise": 0.013},
        {"outlying": 0.05, "outlying_noise": 0.019},
        {"outlying": -0.3, "outlying_noise": 1e-6},  # rows that fit too well are clipped less often
        {"clipped": None, "outlying": None, "room": 3.0},
        {"taken": 1.9},
        {"clipped": None, "outlying": None, "lost": 0.99 * MOST_CLIPPED},  # no model says what to expect
        {"lost": 0.05, "clipped_noise": 0.017},
        {"clipped": None, "outlying": None, "shortened": 0.99 * MOST_SHORTENED},
        {"clipped": None, "outlying": None, "shortened": 0.13, "clipped_noise": 0.031},
        {"curve": bent(0.99), "curve_noise": 1e-6},
        {"curve": bent(5.0), "curve_noise": 4.0},
        {"curve": bent(0.0)},
        {"curve": bent(7.9), "width": 0.5},
        {"turned": 0.99 * MOST_TURNED, "turned_noise": 1e-6},
        {"turned": 1.3, "turned_noise": 0.33},
        {"turned": -5.0, "turned_noise": 0.1},  # flatter further out: a tail, and no bend
        {"variance": 0.5, "varied": 0.0},
        {"variance": 0.3, "varied": 2.1},  # as the model says: what is rare is clipped
    ],
    ids=str,
)
def test_what_is_small_or_may_be_noise_is_no_reason(changes):
    assert reasons_of_check(WELL._replace(**changes)) == []


def test_a_curve_counts_at_the_width_of_the_posterior():
    """Where scores are clipped and vary less than the information says, that is narrower than the frame."""
    assert "is 2.0 from the quadratic" in reasons_of_check(WELL._replace(curve=bent(16.0), width=0.5))[0]
    rng = np.random.default_rng(0)
    curvature, precision = positive(rng, M), 0.1 * positive(rng, M)
    frame = Frame(np.zeros(M), np.eye(M))
    whitening = np.linalg.inv(np.linalg.cholesky(curvature + precision)).T
    for variance, noise, expected in ((1.0, 0.0, 1.0), (0.3, 0.0, None), (1.0, 9.0, 1.0)):
        surrogate = Surrogate(frame, np.zeros(M), noise * np.eye(M), curvature, 0.0, variance)
        found = _width(surrogate, precision, Frame(np.zeros(M), whitening))
        if expected is None:  # the prior's part does not shrink
            assert (
                math.sqrt(0.3) < found < math.sqrt(0.3 + 0.7 * np.linalg.norm(precision @ np.linalg.inv(curvature), 2))
            )
        else:
            assert found == pytest.approx(expected)


def test_scores_that_hardly_vary_are_a_reason_where_no_model_tells_why():
    assert "vary only 0.3 times" in reasons_of_check(WELL._replace(variance=0.3, varied=None))[0]


def test_all_reasons_at_once():
    changes = {"moved": 9.0, "chance": 1e-6, "reach": 9.0, "unresolved": 2.0, "clipped": 0.3, "curve": bent(9.0)}
    assert len(reasons_of_check(WELL._replace(**changes))) == 4


def test_noise_alone_is_seldom_a_reason():
    """Of curves that are nothing but noise, however large, one in 1,000 at most is one."""
    rng = np.random.default_rng(0)
    for noise in (0.1, 3.0, 100.0):
        curves = noise * rng.normal(size=(5000, 8))
        named = sum(bool(reasons_of_check(WELL._replace(curve=curve, curve_noise=noise))) for curve in curves)
        assert named <= 15  # 5, and 4.5 standard deviations


# -- The check of a surrogate ------------------------------------------------------------------------------------------

N, RHO = 20_000, 0.1
PLACE = np.array([0.4, -0.3, 0.2])
PRECISION = N * (positive(np.random.default_rng(5), M) + 0.2 * np.eye(M))
PRIOR = NormalPrior(np.zeros(M), 4 * np.eye(M))
ROOT = np.linalg.inv(np.linalg.cholesky(PRECISION)).T


def checked(
    away=0.0, seed=0, change=None, centres=True, rho=RHO, of_frames=0.0, has_kinks=False, misfit=None, long_rows=None
):
    """A surrogate from so many posterior standard deviations away, and its check.

    :param change: what the last look says otherwise, from a `Fit` to another one.
    :param of_frames: see `NormalPrior`.
    :param long_rows: of rows, in the place of what was counted.
    """
    survey, fund = Parabola(PLACE, PRECISION, N, seed, centres=centres, misfit=misfit), fund_of(rho)
    survey.has_kinks = has_kinks
    fit = survey.fit
    if change is not None:
        survey.fit = lambda *args: change(fit(*args))
    found = Found(Frame(PLACE + ROOT @ np.full(M, away / math.sqrt(M)), ROOT), [], float(N), 1.0, of_frames)
    found, surrogates, stages, prior = last_releases(survey, found, PRIOR, fund, 0.9 * rho)
    found = found._replace(long_rows=long_rows or found.long_rows)
    result, surrogate = check(survey, found, surrogates, stages, prior, fund, fund.left)
    return result._replace(has_arrived=True), surrogate, stages, fund


def test_a_surrogate_that_is_right_has_a_check_without_reasons():
    for seed in range(30):
        result, surrogate, _, _ = checked(seed=seed)
        assert reasons_of_check(result) == []
        assert surrogate.variance == result.variance == pytest.approx(1, abs=0.1)
        assert 0 < result.unresolved < 0.5
        assert abs(result.clipped) < 6 * result.clipped_noise


@pytest.mark.parametrize("misfit", [None, 0.0])
def test_raised_bounds_are_a_reason_where_outcomes_can_be_of_any_size(misfit):
    """Where they can have few values, longer rows were a count's chance, or their covariates'."""
    result, _, _, _ = checked(misfit=misfit, long_rows=LongRows(2 * float(EDGES[0]), 0.0))
    assert result.room == (1.0 if misfit is None else 2.0)


def test_a_check_spends_what_it_is_given():
    _, _, _, fund = checked()
    spent = spent_by(fund)
    assert spent["fit bound"] == pytest.approx(0.03 * RHO, rel=1e-5)
    assert spent["fit"] == pytest.approx(0.07 * RHO, rel=1e-5)
    assert fund.left == 0
    (bound,) = (kind for name, kind in fund._ledger.plan.kinds.items() if name.startswith("fit bound"))
    assert bound.counts == (CURVE_GRID.num_counts,)


def test_a_move_between_the_last_releases_is_seen_in_units_of_its_noise():
    checks = [checked(seed=seed)[0] for seed in range(400)]
    assert all(one.chance == pytest.approx(chi2.sf(M * one.moved, M)) for one in checks)
    assert np.mean([one.chance < 0.1 for one in checks]) < 0.1 + 5 * math.sqrt(0.1 * 0.9 / 400)
    moved = [one.moved for one in checks]
    assert np.mean(moved) < 1 + 5 * math.sqrt(2 / (M * 400))  # some noise is counted generously
    assert np.mean(moved) > 0.5
    # Three coordinates, none of which the last release but one had found: from so far away that all are used up.
    far, *_ = checked(away=1e5)
    assert far.moved > 100
    assert far.reach > 10
    assert any("had not arrived" in reason for reason in reasons_of_check(far))


def test_reach_is_the_length_of_the_move_over_the_root_of_the_number_of_coordinates():
    _, surrogate, stages, _ = checked()
    step = np.array([3.0, 0.0, 4.0])
    here = stages[-1]
    score = here.found.information @ step
    exact = here.found._replace(score=score, score_scale=1e-9, information_scale=1e-9)
    flat = NormalPrior(np.zeros(M), 1e12 * np.eye(M))
    _, reach = _moved(here._replace(found=exact), surrogate, flat)
    assert reach == pytest.approx(math.sqrt(step @ here.found.information @ step / M), rel=1e-4)


def test_what_noise_may_have_made_grows_with_it():
    found = [checked(rho=rho)[0].unresolved for rho in (1.0, 0.1, 0.003)]
    assert found[0] < found[1] < found[2]


def test_the_last_look_is_reported_as_a_share_of_the_rows():
    scales = {"clipped_scale": 0.01 * N, "outlying_scale": 0.02 * N}
    changes = {"clipped": 0.1 * N, "outlying": -0.2 * N, "curve": np.arange(8.0)} | scales
    result, *_ = checked(change=lambda fit: fit._replace(**changes))
    assert (result.clipped, result.outlying) == pytest.approx((0.1, -0.2))
    assert result.clipped_noise == pytest.approx(0.01)
    assert result.outlying_noise == pytest.approx(0.02, rel=0.02)  # and what chance makes of the rows
    assert result.outlying_noise > 0.02
    np.testing.assert_array_equal(result.curve, changes["curve"])
    uncentred, *_ = checked(centres=False)
    assert uncentred.clipped is uncentred.outlying is None
    assert result.lost is None
    uncentred, *_ = checked(change=lambda fit: fit._replace(**changes), centres=False)
    assert uncentred.lost is None  # smooth: less is known of how many are clipped where all is well
    assert uncentred.shortened == pytest.approx(0.1)
    kinked, *_ = checked(change=lambda fit: fit._replace(**changes), centres=False, has_kinks=True)
    assert kinked.lost == pytest.approx(0.1)
    assert result.shortened is kinked.shortened is None


@pytest.mark.parametrize(("share", "expected"), [(0.5, 1.0), (2.0, 2.0)])
def test_where_few_rows_tell_of_a_coordinate_scores_are_not_taken_to_vary_less_than_the_model_says(share, expected):
    """Their own are clipped more than others', of which the mean then says too little."""
    options = {"change": lambda fit: fit._replace(square=share * fit.square, square_scale=1e-9)}
    of_frames = np.array([0.0, 0.0, 0.1 * PRECISION[2, 2]])
    result, surrogate, *_ = checked(of_frames=of_frames, **options)
    assert result.variance == pytest.approx(share, rel=0.1)
    assert surrogate.variance == pytest.approx(expected, rel=0.1)
    plain, surrogate, *_ = checked(**options)
    assert surrogate.variance == plain.variance == pytest.approx(share, rel=0.1)


FIT = Fit(0.0, 1.0, 0.0, 1.0, 0.0, 1e-9, None, np.zeros(8), 1.0)


@pytest.mark.parametrize(
    ("ratio", "noise", "expected"),
    [(0.5, 0.0, 0.5), (2.0, 0.0, 2.0), (0.1, 0.0, 0.3), (9.0, 0.0, 3.0), (0.5, 0.2, 0.75), (0.5, 1e3, 1.0)],
)
def test_the_variance_is_the_ratio_of_traces_but_1_where_noise_hides_it(ratio, noise, expected):
    """In the frame of the last look, whatever frame the surrogate has."""
    _, surrogate, *_ = checked()
    frame = recentred(surrogate, PRIOR)
    survey = Parabola(PLACE, PRECISION, N, power=0.25)
    change = np.linalg.solve(surrogate.frame.whitening, frame.whitening)
    trace = np.trace(change.T @ surrogate.curvature @ change)
    fit = FIT._replace(square=ratio * trace / 0.25, square_scale=max(noise, 1e-12) * trace / 0.25)
    assert _variance(survey, fit, surrogate, frame) == pytest.approx(expected, rel=1e-6)
    survey.is_weighted = True  # then it is not the information, whatever holds
    assert _variance(survey, fit, surrogate, frame) == 1.0


@pytest.mark.parametrize(
    ("square", "surplus", "expected"),
    [(3.0, 0.0, 1.5), (3.0, -3.0, 0.0), (3.0, -9.0, -3.0), (3.0, 1.0, 2.0)],
)
def test_how_clearly_scores_vary_by_more_than_half_of_what_the_model_says(square, surplus, expected):
    found = _varied(FIT._replace(square=square, square_scale=2 / math.sqrt(5), surplus=surplus))
    assert found == pytest.approx(expected)


# -- Chains ------------------------------------------------------------------------------------------------------------


def draws_of(shape=(4, 500, 2), seed=0):
    return {"b": np.random.default_rng(seed).normal(size=shape), "none": np.zeros((4, 500, 0))}


def sluggish(length=500):
    x = np.cumsum(np.random.default_rng(0).normal(size=(4, length)), 1)
    return {"b": x}


def test_chains_that_agree_are_not_doubted():
    for seed in range(20):
        assert unmixed(draws_of(seed=seed)) == []
    assert unmixed(draws_of((1, 50, 3))) == []
    assert unmixed({}) == []
    factor = np.zeros((4, 500, 2, 2))
    factor[..., 0, 0], factor[..., 1, :] = 1, draws_of()["b"]  # as of a Cholesky factor
    assert unmixed({"factor": factor}) == []
    assert unmixed({"none": np.zeros((4, 500, 0))}) == []
    # Of draws that alternate, the effective size is estimated below 0.
    alternating = (-1.0) ** np.arange(20) + 0.1 * np.random.default_rng(0).normal(size=20)
    assert effective_sample_size(alternating[None]) < 0
    assert unmixed({"b": alternating[None]}) == []


@pytest.mark.parametrize(
    "draws",
    [
        {"b": draws_of()["b"] + 3 * np.arange(4)[:, None, None]},
        sluggish(),
        {"b": np.random.default_rng(0).normal(size=(2, 100)) + np.linspace(0, 6, 100)},
        draws_of() | {"tau": np.where(np.arange(500) < 499, draws_of()["b"][..., 0], np.nan)},
    ],
    ids=["apart", "sluggish", "drifting", "not finite"],
)
def test_chains_that_have_not_converged_are_named_with_what_would_help(draws):
    (found,) = unmixed(draws)
    for part in ("have not converged: R-hat", "effective size", "draws. A longer warmup and more draws"):
        assert part in found


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([0.0, 50.0, 50.0], ["u[0]"]),
        ([50.0, 4.0, 50.0], ["u[1]"]),
        ([50.0, 4.3, 50.0], []),
        ([0.0, 0.0, 50.0], []),  # most are noisy
        ([0.0, 0.0, 0.0], []),
    ],
)
def test_a_group_of_which_no_row_tells_is_named(told, expected):
    """Codes from 1, say: effects are mu + tau u, and the first one has no rows. In large units, too."""
    names = ["mu", "tau", "u[0]", "u[1]", "u[2]"]
    cut = types.SimpleNamespace(coordinates=lambda z: z[0] + z[1] * z[2:])
    for unit in (1.0, 1e-3):
        frame = Frame(np.zeros(M), unit * np.eye(M))
        surrogate = Surrogate(frame, np.zeros(M), np.eye(M), np.diag(told), 1.0)
        assert untold(surrogate, cut, np.array([0.3, 1.0, 0.2, 0.5, -0.5]), names) == expected


@pytest.mark.parametrize(
    ("draws", "expected"),
    [
        (draws_of(), False),
        (draws_of((1, 500, 2)), False),
        (sluggish(), True),
        ({"b": sluggish()["b"][:, :99]}, False),  # too few to tell
        ({"b": np.random.default_rng(0).normal(size=(1, 500)) + np.linspace(0, 2, 500)}, True),
        ({"b": draws_of((4, 500, 1))["b"] + 3 * np.arange(4)[:, None, None]}, True),
        ({"b": np.repeat(draws_of((1, 100, 1), seed=1)["b"], 5, axis=1)}, True),  # converged; an effective size of 100
        ({"b": np.repeat(draws_of((1, 1000, 1), seed=1)["b"], 5, axis=1)}, False),  # of 1,000 of 5,000
        ({"b": np.ones((2, 500))}, False),  # stands still
        ({"b": draws_of((2, 2, 1))["b"]}, False),
        ({}, False),
        ({"b": np.full((2, 500), np.nan)}, True),
    ],
)
def test_draws_are_made_again_where_too_few_are_effective(draws, expected):
    assert should_thin_more(draws) == expected


def test_a_chain_that_stands_still_is_named():
    one_of_two = np.random.default_rng(0).normal(size=(2, 100))
    one_of_two[1] = 0.3
    for draws in ({"tau": np.ones((2, 100))}, draws_of((2, 100)) | {"tau": one_of_two}):
        assert standing(draws) == ["tau"]
        (found,) = unmixed(draws)
        assert found.startswith(
            "a chain stood still: all of its draws of tau are one point, so R-hat and effective sizes"
        )
    assert standing({"tau": np.ones((2, 3))}) == []


def test_of_three_draws_nothing_is_known():
    assert unmixed({"b": np.zeros((2, 3))}) == ["four draws at least tell whether chains have converged"]


def test_what_is_hardly_narrower_than_the_prior_is_named():
    rng = np.random.default_rng(0)
    draws = by_coordinate({"b": rng.normal(size=(4, 500, 2)) * [0.3, 0.9], "c": rng.normal(size=(4, 500))}, FREE, 2)
    prior = by_coordinate({"b": rng.normal(size=(1000, 2)), "c": 2 * rng.normal(size=1000)}, FREE, 1)
    wide = widths(prior)
    assert wide["c"] == pytest.approx(2 * 1.349, rel=0.2)
    assert uninformed(draws, wide) == ["b[1]"]
    assert uninformed(draws, wide | {"c": 0.0}) == ["b[1]"]  # a prior of one point
    assert uninformed(draws | {"d": draws["c"]}, wide) == ["b[1]"]  # of which no prior is known
    far = {name: np.where(np.arange(1000) % 9 == 0, np.nan, values) for name, values in prior.items()}
    assert uninformed(draws, widths(far)) == ["b[1]"]
    assert uninformed({"c": np.full((4, 500), np.nan)}, wide) == []
    assert widths({"c": np.full(9, np.nan), "simplex": np.zeros((4, 5, 3))}) == {"c": 0.0}


FREE = {"b": 2, "c": 1, "simplex": 2, "fixed": 0, "L": 1}


def test_coordinates_are_told_apart_where_each_is_a_parameter():
    draws = {"simplex": np.zeros((4, 5, 3)), "fixed": np.zeros((4, 5)), "L": np.zeros((4, 5, 2, 2))}
    found = by_coordinate(draws | {"b": np.arange(40.0).reshape(4, 5, 2)}, FREE, 2)
    assert {name: value.shape for name, value in found.items()} == {
        "simplex": (4, 5, 3),
        "L": (4, 5, 2, 2),
        "b[0]": (4, 5),
        "b[1]": (4, 5),
    }
    assert found["b[1]"][0, 0] == 1


# -- Mirrors -----------------------------------------------------------------------------------------------------------

FLIP = Symmetry("b changes its sign", lambda z: (-z, 0.0))
SWAP = Symmetry("b[0] and b[1] change places", lambda z: (z[[1, 0, 2]], 0.0))
CUT = Cut(M, True, ("a", "b", "c"), lambda z: jnp.asarray(z), lambda phi, row: jnp.zeros(()))


def around(start, sd=0.1, noise=0.0):
    """A surrogate whose posterior is at `start`, with such a standard deviation in each coordinate."""
    frame = Frame(np.asarray(start, float), sd * np.diag([1.0, 2.0, 0.5]))
    curvature = np.diag([1.0, 4.0, 0.25])
    return Surrogate(frame, np.zeros(M), noise * curvature, curvature, 0.0)


def mirror(start, *symmetries, **options):
    start = np.array(start)
    return find_mirror(symmetries, CUT, around(start, **options), start)


def test_a_hump_far_away_is_found_with_its_distance(x64):
    found = mirror([2.0, 0.0, 1.0], FLIP)
    assert found.what == FLIP.what
    assert found.distance == pytest.approx(np.linalg.norm([40.0, 0.0, 20.0]))
    assert mirror([2.0, 0.0, 1.0], FLIP, noise=3.0).distance == pytest.approx(found.distance / 2)
    assert isinstance(jax.tree.leaves(tuple(found))[1], float)


def test_humps_that_merge_are_none(x64):
    """Two coordinates change: by noise alone 2 sqrt(2) apart, and two standard deviations on each side."""
    limit = 2 * (math.sqrt(2) + 2)
    for distance, is_found in ((0.98 * limit, False), (1.02 * limit, True)):
        one = distance * 0.1 / 2 / math.sqrt(2)
        assert (mirror([one, 0.0, one], FLIP) is not None) is is_found
    assert mirror([2.0, 0.0, 1.0], FLIP, noise=1e4) is None
    assert mirror([2.0, 0.0, 1.0]) is None


def test_a_hump_of_which_the_prior_leaves_next_to_nothing_is_none(x64):
    for odds, expected in ((0.011, 0.011), (50.0, 50.0), (0.009, None), (0.0, None), (math.nan, None)):
        log_odds = math.log(odds) if odds > 0 else -math.inf if odds == 0 else odds
        found = mirror([2.0, 0.0, 1.0], FLIP._replace(image=lambda z, log_odds=log_odds: (-z, log_odds)))
        assert (found and found.odds) == (expected and pytest.approx(expected))


def test_of_several_the_furthest_is_named(x64):
    assert mirror([2.0, 1.0, 0.0], SWAP, FLIP).what == FLIP.what
    assert mirror([2.0, -2.1, 0.0], SWAP, FLIP).what in (SWAP.what, FLIP.what)
    assert mirror([1.0, 1.0, 0.0], SWAP) is None


def test_a_direction_of_which_nothing_was_learned_has_no_distance(x64):
    start = np.array([2.0, 0.0, 0.0])
    surrogate = around(start)._replace(curvature=np.diag([0.0, 4.0, 0.25]))
    assert find_mirror([FLIP], CUT, surrogate, start) is None


# -- How many rows are outlying by chance ------------------------------------------------------------------------------

ALIKE = {
    "exponential": (lambda rng, shape: rng.exponential(size=shape) - 1, 1.0),
    "the scale of a normal law": (lambda rng, shape: rng.standard_normal(shape) ** 2 - 1, 1.25),
    "gamma with shape .2": (lambda rng, shape: rng.gamma(0.2, 5, shape) - 1, 1.5),
}


@pytest.mark.parametrize("law", ALIKE)
def test_how_many_rows_are_outlying_varies_by_no_more_than_is_counted_with(law):
    """By simulation of nine lengths that are alike, of which those are clipped that are beyond 1.6 times the usual."""
    make, most = ALIKE[law]
    lengths = np.abs(make(np.random.default_rng(0), (100_000, 1 + CENTRE_DRAWS)))
    order = np.sort(lengths, 1)
    is_any = (order[:, -1] > _FAR * order[:, -2]) & (order[:, -1] > 1.6 * np.sqrt(np.mean(lengths**2)))
    found = (lengths == order[:, -1:]) & is_any[:, None]
    spread = np.std(found[:, 0] - found[:, 1:].mean(1))
    assert 0.8 * most * _OF_SAMPLING < spread < most * _OF_SAMPLING
