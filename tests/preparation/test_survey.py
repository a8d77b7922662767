"""The survey releases what it says: sums of clipped row quantities, of the sensitivity that noise is made for.

Noise is made by hand here. Where it is 0 or as good as 0, a release is compared with the sum that NumPy computes; where
neighbouring tables are compared, it is the integers before the noise that count.
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import numpyro_dp.clipping
import numpyro_dp.kernels.survey
import numpyro_dp.kernels.target
from numpyro_dp import clipping
from numpyro_dp.clipping import GRID, sensitivity_steps
from numpyro_dp.cut import Cut
from numpyro_dp.kernels.survey import CENTRE_DRAWS, Frame, Survey, distance, residual_distance
from numpyro_dp.kernels.target import Draw, Grid, PrivateTarget
from numpyro_dp.noise import GridNoise
from numpyro_dp.preparation import LINE

pytestmark = pytest.mark.optimized

M = 3
RELATIONS = ("replace_one", "add_or_remove_one")
POWER = 0.4
_rng = np.random.default_rng(0)
FRAME = Frame(np.array([0.3, -0.2, 0.1]), np.array([[0.5, 0, 0], [0.2, 0.4, 0], [-0.1, 0.3, 0.6]]))
POINTS = _rng.normal(size=(5, M))
PAIRS = _rng.normal(size=(4, 2, M))
ENDS = np.asarray(FRAME.center) + LINE[:, None] * np.array([0.4, -0.7, 0.2])


def logistic(phi, row):
    X, y = row
    logit = X[0] @ phi
    return y[0] * logit - jnp.logaddexp(0.0, logit)


def log_normal(phi, row):
    """No density at y = 0, nor below, and a scale among the parameters."""
    X, y = row
    misfit = (jnp.log(y[0]) - X[0, :2] @ phi[:2]) * jnp.exp(-phi[2])
    return -(misfit**2) / 2 - phi[2] - jnp.log(y[0])


def drawn_logistic(phi, row, words):
    X, y = row
    drawn = jax.random.bernoulli(jax.random.wrap_key_data(words), jax.nn.sigmoid(X[0] @ phi))
    return logistic(phi, (X, drawn[None].astype(y.dtype)))


def drawn_log_normal(phi, row, words):
    X, y = row
    normal = jax.random.normal(jax.random.wrap_key_data(words), y.shape, y.dtype)
    return log_normal(phi, (X, jax.lax.stop_gradient(jnp.exp(X[0, :2] @ phi[:2] + jnp.exp(phi[2]) * normal))))


DRAWN = {logistic: drawn_logistic, log_normal: drawn_log_normal}


def table(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, M)) * rng.choice([0.3, 1.0, 4.0], (n, 1)), rng.integers(0, 2, n).astype(float)


def survey_of(rows, relation="replace_one", power=1.0, density=logistic):
    rows = tuple(jnp.asarray(part, jnp.result_type(float)) for part in rows)
    separated = SimpleNamespace(
        log_prior=lambda args, kwargs: lambda z: -z @ z / 2,
        row_log_density=lambda args, kwargs: density,
        rows=lambda args, kwargs: rows,
        num_params=M,
        rows_per_unit=1,
        has_public_places=True,
        num_rows=len(rows[0]),
    )
    target = PrivateTarget(separated, (), {}, neighboring_relation=relation, power=power)
    return Survey(target, Cut(M, True, ("a", "b", "c"), lambda z: z, density, DRAWN[density]))


def draw(*shape, hi=0, lo=0, multiplier=1e-9):
    """Leave for releases of `shape` with given noise, in steps of the grid."""
    noise = GridNoise(*(jnp.broadcast_to(jnp.asarray(part, jnp.int32), shape) for part in (hi, lo)))
    return Draw(noise, None, jnp.asarray(multiplier), jnp.array(True), jnp.zeros(1, jnp.uint32), jnp.array(False))


def searches(counts, multiplier=1e-9, hi=0):
    """As many draws as a search makes."""
    one = draw(counts, hi=hi)
    return one._replace(
        noise_multiplier=jnp.full(counts, multiplier),
        granted=jnp.ones(counts, bool),
        tag=jnp.zeros((counts, 1), jnp.uint32),
        accepted=jnp.zeros(counts, bool),
    )


# -- What is summed ----------------------------------------------------------------------------------------------------


def derivatives_by_hand(X, y):
    """Gradients and Hessians of the rows with respect to u at 0."""
    along = X @ FRAME.whitening
    p = 1 / (1 + np.exp(-X @ FRAME.center))
    return (y - p)[:, None] * along, -(p * (1 - p))[:, None, None] * along[:, :, None] * along[:, None]


def clipped(values, bound):
    norm = np.sqrt(np.sum(values**2, axis=tuple(range(1, values.ndim)), keepdims=True))
    return values * np.minimum(1, bound / norm)


def log_density_by_hand(X, y, phi):
    logit = X @ phi
    return y * logit - np.logaddexp(0, logit)


def residuals_by_hand(X, y, bounds, points):
    """Shape (n, k)."""
    gradient, hessian = (clipped(x, bound) for x, bound in zip(derivatives_by_hand(X, y), bounds, strict=True))
    center = log_density_by_hand(X, y, FRAME.center)
    return np.stack(
        [
            log_density_by_hand(X, y, FRAME.center + FRAME.whitening @ u)
            - center
            - gradient @ u
            - np.einsum("nij,i,j->n", hessian, u, u) / 2
            for u in points
        ],
        1,
    )


X, Y = table(300)
LOOSE, TIGHT = np.array([50.0, 50.0]), np.array([0.4, 0.1])  # no row is clipped; most rows are
assert np.linalg.norm(derivatives_by_hand(X, Y)[0], axis=1).max() < 50
assert (np.linalg.norm(derivatives_by_hand(X, Y)[1], axis=(1, 2)) > TIGHT[1]).mean() > 0.3


@pytest.mark.parametrize("power", [1.0, POWER])
@pytest.mark.parametrize("bounds", [LOOSE, TIGHT], ids=["loose", "tight"])
def test_derivatives_are_sums_of_the_rows_clipped_derivatives(bounds, power, x64):
    survey = survey_of((X, Y), power=power)
    score, score_scale, hessian, scale = survey.derivatives((draw(M), draw(M * (M + 1) // 2)), FRAME, bounds)
    gradients, hessians = derivatives_by_hand(X, Y)
    radii = [clipping.radius_by_blocks(width, clipping.SMALL_BLOCK) / clipping.GRID for width in (M, M * (M + 1) // 2)]
    gradients, hessians = (clipped(x, b * r) for x, b, r in zip((gradients, hessians), bounds, radii, strict=True))
    np.testing.assert_allclose(score, power * gradients.sum(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(hessian, power * hessians.sum(0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose([score_scale, scale], 2e-9 * power * bounds)


def test_the_packed_hessian_has_the_norm_of_the_matrix_and_so_has_its_noise(x64):
    """One step of noise in each packed entry: s in the diagonal, s / sqrt(2) off it, and the matrix is symmetric."""
    survey, steps = survey_of((X, Y)), 2**20
    packed = M * (M + 1) // 2
    exact = survey.derivatives((draw(M), draw(packed)), FRAME, TIGHT)
    noisy = survey.derivatives((draw(M, lo=steps), draw(packed, lo=steps)), FRAME, TIGHT)
    np.testing.assert_allclose(noisy[0] - exact[0], steps / GRID * TIGHT[0], rtol=1e-6)
    noise = (noisy[2] - exact[2]) / (steps / GRID * TIGHT[1])
    np.testing.assert_allclose(noise, np.where(np.eye(M), 1, math.sqrt(0.5)), rtol=1e-6)
    one = derivatives_by_hand(X[:1], Y[:1])[1]
    bound = 0.9 * np.linalg.norm(one)  # clipped by the Frobenius norm: no entry is, alone
    alone = survey_of((X[:1], Y[:1])).derivatives((draw(M), draw(packed)), FRAME, np.array([1.0, bound]))
    radius = clipping.radius_by_blocks(packed, clipping.SMALL_BLOCK) / clipping.GRID
    np.testing.assert_allclose(alone[2], 0.9 * radius * one[0], rtol=1e-4)


@pytest.mark.statistical
def test_centred_gradients_are_0_on_average_where_the_model_holds_and_clipped_ones_are_not():
    """Surprising outcomes are clipped, and they are all of one kind: most outcomes are 0."""
    rng, n = np.random.default_rng(), 60_000
    X = np.abs(rng.normal(size=(n, M)))
    center = np.array([-0.7, -0.8, -0.9])
    frame = Frame(center, np.eye(M))
    p = 1 / (1 + np.exp(-X @ center))
    spread = np.sqrt(np.einsum("n,ni,ni->i", p * (1 - p), X, X))  # of the unclipped sum
    bounds = np.array([1.0, 1e3])
    survey = survey_of((X, (rng.random(n) < p).astype(float)))
    draws = draw(M), draw(M * (M + 1) // 2)
    centred, clipped_only = (survey.derivatives(draws, frame, bounds, centred=c)[0] for c in (True, False))
    assert np.all(np.abs(centred) < 5 * math.sqrt(1 + 1 / CENTRE_DRAWS) * spread), centred / spread
    assert np.all(clipped_only < -10 * spread), clipped_only / spread


def scale_survey(n, away=0.0):
    """Log-normal rows whose parameters are `away` standard deviations (of each alone) from the centre of a frame.

    Bounds clip the tails of the squares, of which a scale is known.
    """
    rng = np.random.default_rng()
    center = np.array([0.5, -0.5, 0.2])
    X = rng.normal(size=(n, M))
    sd = np.array([math.exp(center[2]), math.exp(center[2]), math.sqrt(0.5)]) / math.sqrt(n)
    phi = center + away * sd
    y = np.exp(X[:, :2] @ phi[:2] + math.exp(phi[2]) * rng.normal(size=n))
    bound = 1.2 * math.sqrt(M / n)
    return survey_of((X, y), density=log_normal), Frame(center, np.diag(sd)), np.array([bound, 1e3 / n])


SCALE_DRAWS = draw(M), draw(M * (M + 1) // 2)


@pytest.mark.optimized
def test_a_scale_whose_squares_are_clipped_has_a_centred_score_of_0(x64):
    """Its own standard deviation is 1 in these coordinates, or less."""
    survey, frame, bounds = scale_survey(400_000)
    score = survey.derivatives(SCALE_DRAWS, frame, bounds, centred=True)[0]
    assert np.all(np.abs(score) < 5 * math.sqrt(1 + 1 / CENTRE_DRAWS)), score


@pytest.mark.optimized
def test_what_is_given_back_beyond_the_bound_is_given_again(x64, monkeypatch):
    """A negative control: given back once only, the scale would be found too small, by 14.5 standard deviations."""
    monkeypatch.setattr(numpyro_dp.kernels.survey, "CENTRE_STEPS", 1)
    survey, frame, bounds = scale_survey(1_600_000)
    score = survey.derivatives(SCALE_DRAWS, frame, bounds, centred=True)[0]
    assert score[2] < -5 * math.sqrt(1 + 1 / CENTRE_DRAWS), score


@pytest.mark.statistical
@pytest.mark.optimized
def test_centred_curvature_is_how_the_centred_score_answers_and_that_of_all_rows_is_not(x64):
    """Thirty standard deviations away: a third of the answer would be that of what the clip takes."""
    away = np.array([0.0, 0.0, 30.0])
    survey, frame, bounds = scale_survey(400_000, away)
    score, _, hessian, _ = survey.derivatives(SCALE_DRAWS, frame, bounds, centred=True)
    plain = survey.derivatives(SCALE_DRAWS, frame, bounds)[2]
    limit = 5 * math.sqrt(1 + 1 / CENTRE_DRAWS)
    assert np.all(np.abs(score + hessian @ away) < limit), (score, hessian @ away)
    assert (score + plain @ away)[2] < -limit, (score, plain @ away)


def test_without_a_clip_centred_derivatives_are_the_rows_own(x64):
    draws = draw(M), draw(M * (M + 1) // 2)
    survey = survey_of((X, Y))
    for one, other in zip(
        *(survey.derivatives(draws, FRAME, LOOSE, centred) for centred in (True, False)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-3)


def test_where_a_row_stands_is_private_under_add_or_remove():
    """So no random number may depend on it."""
    assert survey_of((X, Y)).centres
    assert not survey_of((X, Y), "add_or_remove_one").centres


@pytest.mark.parametrize("power", [1.0, POWER])
def test_gains_are_sums_of_the_rows_clipped_rises(power, x64):
    bounds = np.array([1.0, 0.3, 5.0, 0.02])
    rises = np.stack([log_density_by_hand(X, Y, e) - log_density_by_hand(X, Y, FRAME.center) for e in ENDS], 1)
    assert (abs(rises) > bounds).any(0).sum() >= 2
    gains, scales = survey_of((X, Y), power=power).gains(draw(len(ENDS)), FRAME.center, ENDS, bounds)
    np.testing.assert_allclose(gains, power * np.clip(rises, -bounds, bounds).sum(0), rtol=1e-4, atol=1e-3)
    # All rises of a row may be at their bounds: the norm of the four is then 2.
    np.testing.assert_allclose(scales, 2e-9 * power * 2 * bounds, rtol=2e-3)


def test_a_rise_without_a_value_counts_as_the_largest_fall(x64):
    rows = X.copy()
    rows[7] = np.inf
    gains, _ = survey_of((rows, Y)).gains(draw(len(ENDS)), FRAME.center, ENDS, np.full(len(ENDS), 20.0))
    others = np.delete(X, 7, 0), np.delete(Y, 7)
    without, _ = survey_of(others).gains(draw(len(ENDS)), FRAME.center, ENDS, np.full(len(ENDS), 20.0))
    np.testing.assert_allclose(gains - without, -20, rtol=1e-4)


@pytest.mark.parametrize("bounds", [LOOSE, TIGHT], ids=["loose", "tight"])
def test_residuals_are_of_the_expansion_of_clipped_derivatives(bounds, x64):
    by_hand = residuals_by_hand(X, Y, bounds, POINTS)
    norms = np.linalg.norm(by_hand, axis=1)
    for bound in (2 * norms.max(), np.median(norms)):
        found, scale = survey_of((X, Y), power=POWER).residuals(draw(len(POINTS)), FRAME, bounds, POINTS, bound)
        np.testing.assert_allclose(found, POWER * clipped(by_hand, bound).sum(0), rtol=1e-4, atol=1e-3)
        assert scale == pytest.approx(2e-9 * POWER * bound)


def test_an_expansion_of_unclipped_derivatives_would_be_noticed(x64, monkeypatch):
    monkeypatch.setattr(numpyro_dp.kernels.survey, "clip_norm", lambda x, bound: x)
    by_hand = residuals_by_hand(X, Y, TIGHT, POINTS).sum(0)
    found, _ = survey_of((X, Y)).residuals(draw(len(POINTS)), FRAME, TIGHT, POINTS, 1e3)
    assert np.abs(found - by_hand).max() > 0.05 * np.abs(by_hand).max()


# -- Quantiles ---------------------------------------------------------------------------------------------------------


def on_grid(values, grid, smallest, threshold):
    """The smallest bound of the grid that at most so many values exceed, or the largest bound."""
    candidates = smallest * grid.ratio ** np.arange(2**grid.num_counts)
    few = [np.sum(values > bound) <= threshold for bound in candidates]
    return candidates[int(np.argmax(few))] if any(few) else candidates[-1]


@pytest.mark.parametrize("relation", RELATIONS)
def test_searches_find_the_quantile_on_their_grids(relation, x64):
    """With several grids, each search has its own draws, and takes its own column."""
    rng = np.random.default_rng(1)
    columns = np.exp(rng.normal(size=(400, 2)) * [0.5, 2.0]) * [1.0, 1e-4]
    columns[:3, 0] = np.nan  # exceeds nothing
    target = survey_of((columns, np.zeros(400)), relation)._target
    grids = (Grid(2**0.25, 4), Grid(2.0, 6))
    search = jax.jit(
        lambda thresholds, smallest: target.find_bounds(
            searches(10), lambda row: row[0][0], grids, smallest, thresholds
        )
    )
    for thresholds in ([0.5, 399.5], [20, 5], [100, 30], [1000, 0]):
        for smallest in ([0.3, 2.0**-40], [5.0, 2.0**-20], [0.01, 1.0]):
            expected = [on_grid(columns[:, k], grids[k], smallest[k], thresholds[k]) for k in range(2)]
            np.testing.assert_allclose(search(jnp.array(thresholds, float), jnp.array(smallest)), expected, rtol=1e-12)


@pytest.mark.parametrize("relation", RELATIONS)
def test_fewer_rows_than_some_deviations_of_a_count_are_none(relation, x64):
    """A count has sensitivity 1 under both relations: its standard deviation is the noise multiplier."""
    values = np.arange(1.0, 401.0)[:, None]
    target = survey_of((values, np.zeros(400)), relation)._target
    for multiplier in (5.0, 20.0):
        (found,) = target.find_bounds(
            searches(9, multiplier), lambda row: row[0][0], [Grid(1.01, 9)], jnp.array([4.0]), jnp.array([1.0])
        )
        assert found == pytest.approx(on_grid(values[:, 0], Grid(1.01, 9), 4.0, Grid(1.01, 9).no_rows * multiplier))


def test_bounds_are_quantiles_of_the_norms(x64):
    gradients, hessians = derivatives_by_hand(X, Y)
    norms = np.linalg.norm(gradients, axis=1), np.linalg.norm(hessians, axis=(1, 2))
    grids, smallest, thresholds = (Grid(2**0.25, 6), Grid(2**0.5, 5)), (2.0**-6, 2.0**-5), (30.0, 12.0)
    found = survey_of((X, Y)).bounds(searches(11), FRAME, grids, smallest, thresholds)
    np.testing.assert_allclose(found, [on_grid(*x) for x in zip(norms, grids, smallest, thresholds, strict=True)])


@pytest.mark.parametrize("bounds", [LOOSE, TIGHT], ids=["loose", "tight"])
def test_residual_bounds_are_quantiles_of_the_norms(bounds, x64):
    norms = np.linalg.norm(residuals_by_hand(X, Y, bounds, POINTS), axis=1)
    found = survey_of((X, Y)).residual_bound(searches(7), FRAME, bounds, POINTS, Grid(2**0.25, 7), 2.0**-8, 9.0)
    assert found == pytest.approx(on_grid(norms, Grid(2**0.25, 7), 2.0**-8, 9.0))


def test_slopes_are_quantiles_of_root_mean_squares(x64):
    survey, grid = survey_of((X, Y)), Grid(2**0.25, 7)

    def by_hand(values, measure):
        distances = np.array([float(measure(*map(jnp.asarray, pair))) for pair in PAIRS])
        return np.sqrt(np.mean(((values[:, 1::2] - values[:, ::2]) / distances) ** 2, 1))

    flat = PAIRS.reshape(-1, M)
    ratios = np.stack([log_density_by_hand(X, Y, FRAME.center + FRAME.whitening @ u) for u in flat], 1)
    expected = on_grid(by_hand(ratios, distance), grid, 2.0**-10, 9.0)
    assert survey.slope(searches(7), FRAME, PAIRS, grid, 2.0**-10, 9.0) == pytest.approx(expected)
    for bounds in (LOOSE, TIGHT):
        expected = on_grid(by_hand(residuals_by_hand(X, Y, bounds, flat), residual_distance), grid, 2.0**-10, 9.0)
        assert survey.slope(searches(7), FRAME, PAIRS, grid, 2.0**-10, 9.0, bounds) == pytest.approx(expected)


def test_distances_are_those_of_the_docs(x64):
    u, v = np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, -1.0])
    assert distance(jnp.asarray(u), jnp.asarray(v)) == pytest.approx(3)
    assert residual_distance(jnp.asarray(u), jnp.asarray(v)) == pytest.approx(3 * (9 + 6) / 2)


# -- Sensitivity -------------------------------------------------------------------------------------------------------

N, COUNTS = 6, 3
HOSTILE = [0.0, -0.0, 1e-30, 1.0, -5.0, 1e6, -1e30, 3e38, np.inf, -np.inf, np.nan]
SEARCH = Grid(4.0, COUNTS)


@pytest.fixture(scope="module")
def recorded():
    """The sums that are released, as whole numbers of steps, before their noise."""
    sums = []
    release = numpyro_dp.kernels.target.release

    def record(hi, lo):
        sums.append([int(h) * 2**24 + int(part) for h, part in zip(np.ravel(hi), np.ravel(lo), strict=True)])

    def recording(total, noise):
        jax.debug.callback(record, total.hi, total.lo, ordered=True)
        return release(total, noise)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpyro_dp.kernels.target, "release", recording)
        yield sums


def ask_everything(survey, bounds, up):
    """One release of each kind. Noise leads the searches the same way, whatever the rows say.

    :param up: which half each search goes on in.
    """
    noise = np.where(up, 2**12, -(2**12))
    count = searches(COUNTS, hi=noise)
    both = searches(2 * COUNTS, hi=np.tile(noise, 2))
    survey.bounds(both, FRAME, (SEARCH, SEARCH), (2.0**-6, 2.0**-6), (1.0, 2.0))
    first = survey.derivatives((draw(M), draw(M * (M + 1) // 2)), FRAME, bounds)
    second = survey.gains(draw(len(ENDS)), FRAME.center, ENDS, bounds[0] * LINE)
    survey.residual_bound(count, FRAME, bounds, POINTS, SEARCH, 2.0**-6, 1.0)
    third = survey.residuals(draw(len(POINTS)), FRAME, bounds, POINTS, bounds[1])
    survey.slope(count, FRAME, PAIRS, SEARCH, 2.0**-6, 1.0)
    survey.slope(count, FRAME, PAIRS, SEARCH, 2.0**-6, 1.0, bounds)
    centred = []
    if survey.centres:
        centred.append(survey.derivatives((draw(M), draw(M * (M + 1) // 2)), FRAME, bounds, centred=True))
    jax.effects_barrier()
    return first, second, third, *centred


OF_DERIVATIVES = slice(2 * COUNTS, 2 * COUNTS + 2)
OF_RESIDUALS = 2 * COUNTS + 2 + 1 + COUNTS
NUM_RELEASES = OF_RESIDUALS + 1 + 2 * COUNTS
CENTRED = slice(NUM_RELEASES, NUM_RELEASES + 2)


def largest_move(survey, recorded, tables, bounds, up):
    """Over all releases: how far the sum moves from one table to the other, in units of the sensitivity claimed."""
    sums, released = [], []
    for rows in tables:
        survey._target = survey._target.on(tuple(jnp.asarray(part, jnp.float32) for part in rows))
        recorded.clear()
        released.append(ask_everything(survey, bounds, up))
        sums.append(list(recorded))
    assert len(sums[0]) == len(sums[1]) == (CENTRED.stop if survey.centres else NUM_RELEASES)
    limit = sensitivity_steps(survey._target._relation)
    moves = [
        math.sqrt(sum((a - b) ** 2 for a, b in zip(*pair, strict=True))) / limit for pair in zip(*sums, strict=True)
    ]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(released))
    return moves, released


_surveys: dict = {}


def shared_survey(relation):
    """Programs are compiled once."""
    if relation not in _surveys:
        _surveys[relation] = survey_of(rows_near(), relation, POWER, log_normal)
    return _surveys[relation]


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


@settings(max_examples=60)
@given(
    relation=st.sampled_from(RELATIONS),
    row=hostile_rows,
    other=hostile_rows,
    log_bounds=st.tuples(st.floats(-6, 3), st.floats(-6, 3)),
    up=st.lists(st.booleans(), min_size=COUNTS, max_size=COUNTS),
)
def test_a_row_moves_each_release_by_at_most_its_sensitivity(recorded, relation, row, other, log_bounds, up):
    bounds = 10.0 ** np.array(log_bounds)
    moves, released = largest_move(shared_survey(relation), recorded, neighbours(relation, row, other), bounds, up)
    assert max(moves) <= 1
    # And what is published moves by no more than the scale of its noise says.
    for one, two in zip(*(derivatives_gains_residuals(*x) for x in released), strict=True):
        assert np.linalg.norm((one[0] - two[0]) / one[1]) <= 1 / 1e-9 * (1 + 1e-4)


def derivatives_gains_residuals(derivatives, gains, residuals, *centred):
    """Values and the standard deviations of their noise, by release."""
    found, off = [], np.tril_indices(M, -1)
    for score, score_scale, hessian, scale in (derivatives, *centred):
        packed = np.append(np.diag(hessian), hessian[off] * math.sqrt(2))
        found += [(score, score_scale), (packed, scale)]
    return [*found, gains, residuals]


WIDTH = math.exp(FRAME.center[2])  # of log y, around 0.1 in a row of ones
QUIET = (0.0, 0.0, 0.0, math.exp(WIDTH))  # a row without a slope
LARGE = (30.0, -20.0, 10.0, 1e30)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_sensitivity_of_sums_and_of_counts_is_reached(relation, recorded):
    """A row at the bound against one at the opposite bound, or none: noise for less would not do."""
    survey, bounds, up = shared_survey(relation), np.array([1e-3, 1e-3]), [True] * COUNTS
    opposite = [(1.0, 1.0, 1.0, math.exp(0.1 + sign * WIDTH)) for sign in (1, -1)]
    moves, _ = largest_move(survey, recorded, neighbours(relation, *opposite), bounds, up)
    assert 1 - 1e-3 < moves[OF_DERIVATIVES][0] <= 1
    # What is given back makes up for one outcome's surprise, not for both.
    assert not survey.centres or moves[CENTRED][0] <= 1
    if survey.centres:
        lone = [(9.0, 0.0, 0.0, math.exp(9.0 * FRAME.center[0] + sign * 2 * WIDTH)) for sign in (1, -1)]
        moves, _ = largest_move(survey, recorded, neighbours(relation, *lone), np.array([6.0, 1.0]), up)
        assert 0.9 < moves[CENTRED][0] <= 1
    # A row that exceeds all bounds, and one that exceeds none.
    moves, _ = largest_move(survey, recorded, neighbours(relation, LARGE, QUIET), bounds, up)
    assert moves[:COUNTS] == [1] * COUNTS


@pytest.mark.nightly
def test_rows_that_are_not_clipped_would_be_noticed(recorded, monkeypatch):
    """Negative controls: vectors without the clip, and counts whose rows weigh twice as much as the noise is for."""

    def doubled(values, bound):
        return 2 * scalar_steps(values, bound)

    scalar_steps = numpyro_dp.clipping.scalar_steps
    monkeypatch.setattr(numpyro_dp.clipping, "_radius", lambda dimension, room: 32.0 * GRID)
    monkeypatch.setattr(numpyro_dp.clipping, "scalar_steps", doubled)
    survey = survey_of(rows_near(), "replace_one", POWER, log_normal)
    tables = neighbours("replace_one", LARGE, QUIET)
    moves, _ = largest_move(survey, recorded, tables, np.array([0.1, 0.1]), [True] * COUNTS)
    assert min(*moves[OF_DERIVATIVES], *moves[CENTRED], moves[OF_RESIDUALS]) > 1
    assert moves[:COUNTS] == [2] * COUNTS
