"""What one row can do to a release of the survey: no more than the noise is made for, whatever it holds.

Two neighbouring tables get the same noise, and it is the integers before the noise that are compared. Before the clip
rows are looked at one by one: their norm is what the survey says that it is, so that nothing is lost to the clip.
"""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tiers import some_every_day
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_dp.chain.target
import numpyro_dp.privacy.clipping
from numpyro_dp.chain.target import ROOM, PrivateTarget
from numpyro_dp.preparation.search import LINE
from numpyro_dp.preparation.survey import (
    _LIGHT,
    _OUTLYING,
    BOUND_GRID,
    CURVE_GRID,
    LAST_BOUND_GRID,
    NO_STEPS,
    SCALE_GRID,
    Bounds,
    Survey,
)
from numpyro_dp.privacy.clipping import GRID, sensitivity_steps
from numpyro_dp.privacy.release import Grid, Released, Vault
from tests.helpers.surveys import (
    FRAME,
    MULTIPLIER,
    STEPS,
    M,
    counts,
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
HOSTILE = [0.0, -0.0, 1e-30, 1.0, -5.0, 1e6, -1e30, 1e30, 3e38, np.inf, -np.inf, np.nan]
_rng = np.random.default_rng(0)
POINTS = _rng.normal(size=(5, M))
PAIRS = _rng.normal(size=(4, 2, M))
ENDS = np.asarray(FRAME.center) + LINE[:, None] * np.array([0.4, -0.7, 0.2])
SHARE, SHARES = 0.3, (0.04, 0.3, 0.5)

# -- Two neighbouring tables -------------------------------------------------------------------------------------------

N = 6
SLOPE_GRID = Grid(4.0, 3)
KINDS = {
    "count": 1,
    "scales": SCALE_GRID.num_counts,
    "row_counts": 1,
    "bounds": BOUND_GRID.num_counts,
    "last bounds": LAST_BOUND_GRID.num_counts,
    "derivatives": 1,
    "gains": 1,
    "long_rows": 2,
    "fit bound": CURVE_GRID.num_counts,
    "fit": 1,
    "slope": SLOPE_GRID.num_counts,
}


@pytest.fixture(scope="module")
def recorded():
    """The sums that are released, as whole numbers of steps, before their noise."""
    sums = []
    release = numpyro_dp.privacy.release.release

    def record(hi, lo):
        sums.append([int(h) * 2**24 + int(part) for h, part in zip(np.ravel(hi), np.ravel(lo), strict=True)])

    def recording(total, noise):
        jax.debug.callback(record, total.hi, total.lo, ordered=True)
        return release(total, noise)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpyro_dp.privacy.release, "release", recording)
        yield sums


def in_noises(fit):
    """What a look at the fit released, each number over the standard deviation of its noise."""
    counted, noise = fit.clipped - fit.outlying, math.sqrt(fit.clipped_scale**2 - fit.outlying_scale**2)
    found = [counted / noise, *fit.curve / fit.curve_scale]
    if fit.turned is not None:
        found.append(fit.turned / fit.turned_scale)
    if fit.outlying_scale:
        found += [fit.outlying / fit.outlying_scale, fit.square / fit.square_scale, fit.surplus / fit.square_scale / 2]
    return np.array(found)


def ask_everything(survey, bounds, up):
    """One release of each kind. Noise leads the searches the same way, whatever the rows say.

    :param up: which half each search goes on in.
    :return: values, and standard deviations of the noise in them, of releases that are vectors.
    """
    noise = np.where(up, 2**12, -(2**12))

    def led(grid, k=1):
        return searches(grid.num_counts, k, hi=noise[: grid.num_counts])

    survey.count(draw())
    survey.scales(led(SCALE_GRID, M), FRAME, SCALE_GRID, 2.0**-26, 1.0, survey.kinds)
    survey.row_counts(draw(M), FRAME, np.full(M, 0.01))
    survey.bounds(led(BOUND_GRID, 2), FRAME, np.array([2.0**-30, 2.0**-26]), 2.0)
    least, most = np.array([2.0**-9, 2.0**-6]), np.array([1.0, 2.0])
    survey.bounds(led(LAST_BOUND_GRID, 2), FRAME, least, most, LAST_BOUND_GRID)
    steps = STEPS if survey.centres else NO_STEPS
    shape = {"has_kinks": survey.has_kinks, "num_steps": steps.steepest.size, "given": survey.tells_given}
    of_both = of_derivatives(**shape)
    found = survey.derivatives(of_both, FRAME, Bounds(*bounds), SHARE, 300, steps)
    gains, gains_scale = survey.gains(draw(len(ENDS)), FRAME.center, ENDS, bounds[0] * LINE)
    for least in bounds if survey.centres else ():
        survey.long_rows(draw(3), FRAME, least * 2.0 ** np.arange(4))
    fit = survey.fit(
        led(CURVE_GRID), draw(survey.fit_numbers(len(POINTS))), FRAME, Bounds(*bounds), POINTS, 2.0**-8, 2.0
    )
    survey.slope(led(SLOPE_GRID), FRAME, PAIRS, SLOPE_GRID, 2.0**-6, 1.0)
    jax.effects_barrier()
    packed = np.append(np.diag(found.information), found.information[np.tril_indices(M, -1)] * math.sqrt(2))
    packed = np.append(packed, found.bends) / found.information_scale
    if survey.tells_given:
        packed = np.append(packed, found.given / found.given_scale)
    return [
        np.append(found.score / found.score_scale, packed),
        gains / gains_scale,
        in_noises(fit),
    ]


def largest_moves(survey, recorded, tables, bounds, up):
    """How far each kind of sum moves from one table to the other, in units of the sensitivity claimed; and what is
    published, in units of the standard deviation of its noise."""
    sums, released = [], []
    for rows in tables:
        with_rows(survey, rows, jnp.float32)
        recorded.clear()
        released.append(ask_everything(survey, bounds, up))
        sums.append(list(recorded))
    kinds = KINDS if survey.centres else {kind: number for kind, number in KINDS.items() if kind != "long_rows"}
    assert len(sums[0]) == len(sums[1]) == sum(kinds.values())
    limit = sensitivity_steps(survey._target.vault._relation)
    moves = [
        math.sqrt(sum((a - b) ** 2 for a, b in zip(*pair, strict=True))) / limit for pair in zip(*sums, strict=True)
    ]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(released))
    ends = np.cumsum([*kinds.values()])
    by_kind = {kind: max(moves[end - kinds[kind] : end]) for kind, end in zip(kinds, ends, strict=True)}
    return by_kind, [np.linalg.norm(one - two) for one, two in zip(*released, strict=True)]


_surveys: dict = {}


def shared_survey(relation, density=log_normal):
    """Programs are compiled once."""
    if (relation, density) not in _surveys:
        _surveys[relation, density] = survey_of(rows_near(), density, relation)
    return _surveys[relation, density]


def rows_near():
    X, y = table(N, seed=1)
    return X, np.exp(y)


def neighbours(relation, row, other):
    """Two tables that differ in one row; under add-or-remove, the first has it and the second has not."""
    X, y = rows_near()
    first, second = [(X.copy(), y.copy()) for _ in range(2)]
    for (X, y), put in ((first, row), (second, other)):
        X[2], y[2] = put[:M], put[M]
    return first, second if relation == "replace_one" else tuple(np.delete(part, 2, 0) for part in second)


hostile_rows = st.lists(st.sampled_from(HOSTILE), min_size=M + 1, max_size=M + 1)
ALL_UP = [True] * max(KINDS.values())


@settings(max_examples=60)
@given(
    asked=st.sampled_from([*((relation, log_normal) for relation in RELATIONS), ("replace_one", yes_or_no)]),
    row=hostile_rows,
    other=hostile_rows,
    log_bounds=st.tuples(st.floats(-6, 3), st.floats(-6, 3)),
    up=st.lists(st.booleans(), min_size=len(ALL_UP), max_size=len(ALL_UP)),
)
@pytest.mark.statistical
def test_a_row_moves_each_release_by_at_most_its_sensitivity(recorded, asked, row, other, log_bounds, up):
    bounds = 10.0 ** np.array(log_bounds)
    moves, published = largest_moves(shared_survey(*asked), recorded, neighbours(asked[0], row, other), bounds, up)
    assert max(moves.values()) <= 1, moves
    # And what is published moves by no more than the scale of its noise says. The square of a fit has twice the noise.
    assert max(published) <= 1 / MULTIPLIER * (1 + 1e-4)


WIDTH = math.exp(FRAME.center[2])  # of log y, around 0.1 in a row of ones
QUIET = (0.0, 0.0, 0.0, math.exp(WIDTH))  # a row without a slope
LARGE = (30.0, -20.0, 10.0, 1e30)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.statistical
def test_the_sensitivity_is_reached(relation, recorded):
    """A row at the bound against one at the opposite bound, or none: noise for less would not do."""
    survey, bounds = shared_survey(relation), np.array([1e-3, 1e-3])
    # One that exceeds all bounds, and one that exceeds none.
    moves, _ = largest_moves(survey, recorded, neighbours(relation, LARGE, QUIET), bounds, ALL_UP)
    for kind in ("scales", "row_counts", "bounds", "last bounds", "fit bound", "slope"):
        assert 1 - 2e-3 < moves[kind] <= 1, kind
    assert moves["count"] == (0 if relation == "replace_one" else 1)
    if relation == "add_or_remove_one":
        assert moves["derivatives"] > 1 - 2e-3
    opposite = [(9.0, 0.0, 0.0, math.exp(9.0 * FRAME.center[0] + sign * 2 * WIDTH)) for sign in (1, -1)]
    moves, _ = largest_moves(survey, recorded, neighbours(relation, *opposite), np.array([6.0, 1e4]), ALL_UP)
    # The scores are about opposite to each other, and an information that is not clipped shortens none.
    assert 0.9 * math.sqrt(1 - SHARE) < moves["derivatives"] <= 1
    assert moves["gains"] > 0.5
    moves, _ = largest_moves(survey, recorded, neighbours(relation, LARGE, QUIET), np.array([6.0, 1e4]), ALL_UP)
    assert 0.4 < moves["fit"] <= 1, moves["fit"]


def test_a_private_number_of_rows_is_nowhere_used():
    """But in sums that are released: neither to centre a count nor to find a square."""
    found = []
    for num_rows in (N, 10**6):
        survey = survey_of(rows_near(), log_normal, "add_or_remove_one")
        survey._target.num_rows = num_rows
        bounds = survey.bounds(searches(BOUND_GRID.num_counts, 2), FRAME, np.array([2.0**-30, 2.0**-26]), 1.5)
        draws = searches(CURVE_GRID.num_counts), draw(survey.fit_numbers(len(POINTS)))
        fit = survey.fit(*draws, FRAME, Bounds(0.3, 1.0), POINTS, 2.0**-8, 2.0)
        found.append([*bounds, fit.clipped, *fit.curve])
    np.testing.assert_array_equal(*found)


@pytest.mark.nightly
def test_rows_that_are_not_clipped_would_be_noticed(recorded, monkeypatch):
    """A negative control: neither by the survey nor by the sum."""
    monkeypatch.setattr(numpyro_dp.privacy.clipping, "_radius", lambda dimension, room: 32.0 * GRID)
    monkeypatch.setattr(numpyro_dp.preparation.survey, "clip_norm", lambda x, bound: x)
    survey = survey_of(rows_near(), log_normal)
    moves, _ = largest_moves(survey, recorded, neighbours("replace_one", LARGE, QUIET), np.array([0.1, 0.1]), ALL_UP)
    assert min(moves["derivatives"], moves["fit"]) > 1


# -- Row by row, before the clip ---------------------------------------------------------------------------------------


@pytest.fixture
def by_row(monkeypatch):
    """In the place of a sum: the rows' contributions (n, k), and the norm that each is said to have at most."""

    def contributions(target, draw, per_row, bound, width=1, may_loop=False):
        rows = tuple(row[:, None] for row in target.vault._rows)
        return Released(jax.vmap(per_row)(rows), jnp.asarray(bound))

    def bounds(target, draws, per_row, grid, smallest, threshold, width=1, may_loop=False):
        rows = tuple(row[:, None] for row in target.vault._rows)
        values = jax.vmap(per_row)(rows)
        return jnp.full(values.shape[1], smallest)

    monkeypatch.setattr(PrivateTarget, "release_sum", contributions)
    monkeypatch.setattr(PrivateTarget, "find_bounds", bounds)


def hostile_table(density):
    """All that the hostile values make, sampled, and rows as they should be; outcomes of any support."""
    rng = np.random.default_rng(1)
    X, y = rng.choice(HOSTILE, (400, M)), rng.choice(HOSTILE, 400)
    usual_X, usual_y = table(400, seed=2)
    usual_y = np.exp(3 * rng.normal(size=400)) if density is log_normal else usual_y
    # Usual covariates with a hostile outcome, and the other way round.
    return np.concatenate([X, usual_X, usual_X, X]), np.concatenate([y, usual_y, y, usual_y])


def norms(values):
    values = np.asarray(values, float)
    assert np.isfinite(values).all()
    return np.linalg.norm(values, axis=1)


EVERYDAY = {
    (yes_or_no, "replace_one"),
    (counts, "replace_one"),
    (log_normal, "replace_one"),
    (log_normal, "add_or_remove_one"),
    (linear, "add_or_remove_one"),
}
CASES = [
    pytest.param(
        *(density, relation, smooth),
        id=f"{density.__name__}-{relation}-{'smooth' if smooth else 'kinked'}",
        marks=() if (density, relation) in EVERYDAY else pytest.mark.nightly,
    )
    for density in (logistic, yes_or_no, counts, log_normal, linear)
    for relation, smooth in (("replace_one", True), ("add_or_remove_one", True), ("add_or_remove_one", False))
]


@pytest.mark.parametrize(("density", "relation", "smooth"), CASES)
def test_a_row_has_the_norm_that_is_claimed(density, relation, smooth, by_row):
    """1 for score and information together; the root of the number of ends; and for the last look that of its parts."""
    survey = survey_of(hostile_table(density), density, relation, is_smooth=smooth)
    target, frame = survey._target, survey._cast(FRAME)
    assert survey.centres == (relation == "replace_one")

    def require(found, largest):
        values, claimed = found.value, float(found.scale)
        assert claimed == pytest.approx(largest * ROOM, rel=1e-6)
        assert norms(values).max() <= largest * (1 + 1e-5)
        return norms(values).max() / largest

    derivatives = target.program(survey._sum_derivatives)
    steps = jnp.asarray(STEPS.ahead[:, : M if survey.centres else 0], survey.dtype)
    for bound, largest in ((1e-6, 1e-6), (0.3, 1e-3), (0.3, 10.0), (0.3, 1e4), (1e3, 1e6)):
        for share in SHARES:
            # Of what falls, or is given back: its bound is reached on both sides.
            third = 0.2 if survey.has_kinks else 0.05 if survey.tells_given else 0.0
            prices = (1 - third) * (1 - share), (1 - third) * share, third
            weights = [math.sqrt(price) for price in prices]
            found = derivatives(target, None, frame, bound, largest, 1e-12, *weights, 0.5, steps)
            assert found.value.shape[1:] == (survey.derivative_numbers(steps.shape[1]),)
            reached = require(found, 1.0)
            # Where gradients are centred, a score is shortened with its row's information.
            if not survey.centres and largest < 1:
                assert reached > 0.99
            elif largest < 1 or bound < 1 < 100 < largest:
                assert reached > 0.99 * weights[1 if largest < 1 else 0]
    bounds = jnp.asarray(0.1 * LINE, survey.dtype)
    found = survey._sum_gains(target, None, frame.center, jnp.asarray(ENDS, survey.dtype), bounds)
    reached = require(Released(found.value / survey.power, found.scale / survey.power), math.sqrt(len(LINE)))
    assert reached > 0.99
    long_rows = target.program(survey._sum_long_rows)
    for least in (1e-6, 0.3, 1e3) if survey.centres else ():
        found = long_rows(target, None, frame, jnp.asarray(least * 2.0 ** np.arange(4), survey.dtype))
        require(found, math.sqrt(3))
    trace = target.program(survey._sum_unclipped_trace)
    for most in (1e-3, 1e6) if survey.centres else ():
        found = trace(target, None, frame, math.inf, most)
        assert require(found._replace(value=found.value[:, None]), 0.5) == 1
    fit = target.program(survey._sum_fit)
    for bound in (1e-6, 0.3, 1e3):
        for smallest in (1e-9, 0.1, 1e6):
            points = jnp.asarray(POINTS, survey.dtype)
            found, _ = fit(target, None, None, frame, bound, 1e9, points, smallest, 1.0, 1.0, 300 * smallest)
            if survey.centres:
                # Clipped by 1, a square, a surplus, distances and a turn of norm 1; or outlying by 1.
                light = 4 * _LIGHT**2
                off = 0.5 - (1 + light) / (2 * _OUTLYING**2)
                require(found, math.hypot(_OUTLYING * off, math.sqrt(1 + light)))
                alone = found.value[:, -1] > 0
                assert not found.value[alone, :-1].any()
                assert float(found.value[:, -1].max()) == pytest.approx(_OUTLYING * (1 - off))
            else:
                # Clipped, which is centred where the number of rows is public, and distances of norm 1.
                clip = 0.5 if relation == "replace_one" else 1
                reached = require(found, math.hypot(clip, _LIGHT))
                assert reached > 0.99 or bound > 1 or smallest > 1


def test_a_row_has_the_norm_that_is_claimed_however_often_it_says_that_it_counts(by_row):
    X, y = hostile_table(linear)
    weights = np.random.default_rng(3).permutation(np.resize([*HOSTILE, 1.0, 2.0], len(y)))
    cut = dataclasses.replace(
        cut_of(lambda phi, row: row[2][0] * linear(phi, row[:2]), lambda phi, row, k: drawn_linear(phi, row[:2], k)),
        row_weight=lambda row: row[2][0],
    )
    rows = tuple(jnp.asarray(part, jnp.float32) for part in (X, y, weights))
    vault = Vault(rows, neighboring_relation="replace_one", ledger=None)
    target = PrivateTarget(vault, lambda z: 0.0, cut.row_log_density, num_params=M, num_rows=len(y))
    survey = Survey(target, cut)
    frame, points = survey._cast(FRAME), jnp.asarray(POINTS, survey.dtype)
    derivatives, long_rows, fit = map(target.program, (survey._sum_derivatives, survey._sum_long_rows, survey._sum_fit))
    for bound, largest in ((1e-6, 1e-6), (0.3, 1e-3), (0.3, 10.0), (1e3, 1e6)):
        prices = math.sqrt(1 - SHARE), math.sqrt(SHARE), 0.0
        numbers = bound, largest, 1e-12, *prices, 0.5, jnp.asarray(STEPS.ahead, jnp.float32)
        assert norms(derivatives(target, None, frame, *numbers).value).max() <= 1 + 1e-5
        edges = jnp.asarray(bound * 2.0 ** np.arange(4), survey.dtype)
        assert norms(long_rows(target, None, frame, edges).value).max() <= math.sqrt(3) * (1 + 1e-5)
        found, _ = fit(target, None, None, frame, bound, largest, points, 0.1, 1.0, 1.0, 1.0)
        assert norms(found.value).max() <= float(found.scale) / ROOM * (1 + 1e-5)


@pytest.mark.parametrize("density", [logistic, yes_or_no])
@pytest.mark.parametrize("relation", RELATIONS)
def test_rows_that_say_nothing_usable_contribute_nothing_to_the_derivatives(relation, density, by_row):
    """NaN or infinite gradients: 0 where their law is not known, and of the size of the bound at most where it is."""
    survey = survey_of(hostile_table(density), density, relation)
    target, frame = survey._target, survey._cast(FRAME)
    numbers = (
        0.3,
        0.1,
        1.0,
        math.sqrt(0.7),
        math.sqrt(0.3),
        0.0,
        0.5,
        jnp.asarray(STEPS.ahead[:, : M if survey.centres else 0], jnp.float32),
    )
    found = target.program(survey._sum_derivatives)(target, None, frame, *numbers)
    values = np.asarray(found.value)
    is_nan = np.isnan(np.asarray(target.vault._rows[0])).any(1)
    assert is_nan.any()
    assert not values[is_nan].any()


def test_the_clipped_rows_of_a_fit_are_centred_where_the_number_of_rows_is_public_only(by_row):
    """So that its norm is smaller; added back, the centre would tell the number of rows."""
    quiet = np.zeros((4, M)), np.ones(4)
    for relation, expected in (("replace_one", -0.5), ("add_or_remove_one", 0.0)):
        survey = survey_of(quiet, logistic, relation, can_draw=False)
        points = jnp.asarray(POINTS, survey.dtype)
        fit = survey._target.program(survey._sum_fit)
        found, _ = fit(survey._target, None, None, survey._cast(FRAME), 0.3, 1.0, points, 0.1, 1.0, 1.0, 1.0)
        np.testing.assert_allclose(np.asarray(found.value)[:, 0], expected)


@pytest.mark.parametrize("can_draw", some_every_day([True, False], [False]))
def test_only_samplers_may_loop(can_draw, monkeypatch):
    """Loops whose end depends on a row are allowed for outcomes that the model draws, and for nothing else."""
    asked = []
    for name in ("release_sum", "find_bounds"):
        original = getattr(PrivateTarget, name)

        def watched(self, *args, original=original, name=name, **options):
            bound = inspect.signature(original).bind(self, *args, **options)
            asked.append((name, bool(bound.arguments.get("may_loop", False))))
            return original(self, *args, **options)

        monkeypatch.setattr(PrivateTarget, name, watched)
    survey = survey_of(table(40), can_draw=can_draw)
    survey.bounds(searches(BOUND_GRID.num_counts, 2), FRAME, np.array([1e-3, 1e-6]), 2.0)
    survey.derivatives(of_derivatives(), FRAME, Bounds(0.3, 0.1), SHARE, 300)
    draws = searches(CURVE_GRID.num_counts), draw(survey.fit_numbers(len(POINTS)))
    survey.fit(*draws, FRAME, Bounds(0.3, 1.0), POINTS, 2.0**-8, 2.0)
    assert [name for name, _ in asked] == ["find_bounds", "release_sum", "find_bounds", "release_sum"]
    assert {may_loop for _, may_loop in asked} == {can_draw}
