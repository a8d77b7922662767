"""Outcomes that are drawn: by samplers that draw from the law's own density, and end whatever a row holds."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp.model.coordinates import find_cut
from numpyro_dp.model.drawing import _ending, is_drawable
from numpyro_dp.model.separate import separate

SHARES = jnp.array([0.2, 0.5, 0.3])
HOSTILE = [np.nan, np.inf, -np.inf, -1.0, 0.0, 1e-30, 1e30]


@pytest.fixture(autouse=True)
def _any_parameter():
    """Hostile rows give laws parameters that NumPyro would not take from a person."""
    with numpyro.validation_enabled(False):
        yield


def _hurdle(name, *parameters):
    """Since NumPyro 0.22."""
    return getattr(dist, name)(*parameters) if hasattr(dist, name) else None


def _hurdle_of(base):
    return dist.HurdleProbs(base, 0.2) if hasattr(dist, "HurdleProbs") else None


COUNTS = {
    "binomial": dist.BinomialProbs(0.3, 7),
    "binomial, certain": dist.BinomialProbs(1.0, 7),
    "binomial, total as a float": dist.BinomialProbs(0.3, 7.0),
    "binomial, logits, total as a float": dist.BinomialLogits(-0.5, 7.0),
    "binomial, expanded": dist.BinomialProbs(0.3, 7).expand((1,)).to_event(1),
    "hurdle poisson": _hurdle("HurdlePoisson", 0.3, 2.5),
    "hurdle poisson, rare": _hurdle("HurdlePoisson", 0.3, 1e-4),
    "hurdle poisson, logits": _hurdle("HurdleLogits", dist.Poisson(3.0), 0.5),
    "hurdle geometric": _hurdle_of(dist.GammaPoisson(1.0, 0.8)),
    "hurdle negative binomial": _hurdle_of(dist.NegativeBinomial2(3.0, 1.5)),
    "hurdle negative binomial, rare": _hurdle("HurdleNegativeBinomial2", 0.4, 0.05, 0.3),
    "multinomial": dist.MultinomialProbs(SHARES, 4),
    "multinomial, logits": dist.MultinomialLogits(jnp.log(SHARES), 4),
    "multinomial, masked": dist.MultinomialProbs(SHARES, 4).mask(True),
    "dirichlet multinomial": dist.DirichletMultinomial(3 * SHARES, 4),
}


@pytest.mark.parametrize("name", [name for name, law in COUNTS.items() if law is not None])
def test_counts_are_drawn_as_often_as_their_law_says(name):
    law = COUNTS[name]
    drawing = _ending(law)
    assert is_drawable(drawing, True)
    assert type(drawing) is not type(law) or drawing.base_dist is not law.base_dist
    draws = 200_000
    values = np.asarray(drawing.sample(jax.random.key(0), (draws,)))
    found, counts = np.unique(values.reshape(draws, -1), axis=0, return_counts=True)
    at = jnp.asarray(found.reshape(-1, *values.shape[1:]))
    expected = draws * np.exp(np.asarray(jax.vmap(law.log_prob)(at), float).reshape(len(found)))
    assert expected.sum() == pytest.approx(draws, rel=5e-3)
    often = expected > 25
    assert np.all(np.abs(counts - expected)[often] <= 5.5 * np.sqrt(expected[often]))


@pytest.mark.parametrize(
    "value", [pytest.param(value, marks=() if value in (-1.0, np.inf) else pytest.mark.nightly) for value in HOSTILE]
)
def test_draws_end_whatever_a_row_holds(value):
    value = jnp.asarray(value)
    laws = [
        dist.BinomialProbs(value, 12),
        dist.BinomialProbs(0.5, value),
        dist.MultinomialProbs(value * SHARES, 4),
        dist.MultinomialProbs(SHARES, value),
        dist.DirichletMultinomial(value * SHARES, 4),
        dist.BetaNegativeBinomial(value, 2.0, 3.0),
        dist.BetaNegativeBinomial(2.0, value, 3.0),
        dist.BetaNegativeBinomial(2.0, 2.0, value),
        _hurdle("HurdlePoisson", value, 2.0),
        _hurdle("HurdlePoisson", 0.3, value),
        _hurdle("HurdleNegativeBinomial2", 0.3, value, 2.0),
        _hurdle("HurdleNegativeBinomial2", 0.3, 2.0, value),
    ]
    for law in laws:
        if law is not None:
            jax.block_until_ready(jax.jit(_ending(law).sample)(jax.random.key(0)))


def test_counts_of_categories_keep_their_totals():
    totals = jnp.array([0, 1, 5, 1000])
    for law in (dist.MultinomialProbs(SHARES, totals), dist.DirichletMultinomial(SHARES, totals)):
        drawn = np.asarray(_ending(law).sample(jax.random.key(1), (50,)))
        assert np.array_equal(drawn.sum(-1), np.broadcast_to(totals, (50, 4)))
        assert drawn.min() >= 0


_PLAIN = {
    "BetaNegativeBinomial": (lambda p: dist.BetaNegativeBinomial(p[0], p[1], p[2]), [2.0, 6.0, 3.0]),
    "Dagum": (lambda p: dist.Dagum(p[0], p[1], p[2]), [3.0, 2.0, 1.5]),
    "DoublyTruncatedPowerLaw": (lambda p: dist.DoublyTruncatedPowerLaw(-1 - p[0], 10.0, 50.0), [0.85]),
    "FoldedDistribution": (lambda p: dist.FoldedDistribution(dist.Normal(p[0], p[1])), [0.5, 1.2]),
    "GaussianRandomWalk": (lambda p: dist.GaussianRandomWalk(p[0], 5), [0.7]),
    "Gompertz": (lambda p: dist.Gompertz(p[0], p[1]), [1.5, 0.7]),
    "HurdleGamma": (lambda p: _hurdle("HurdleGamma", p[0], p[1], p[2]), [0.3, 2.0, 1.5]),
    "HurdleLogNormal": (lambda p: _hurdle("HurdleLogNormal", p[0], p[1], p[2]), [0.3, 0.5, 0.8]),
    "Kumaraswamy": (lambda p: dist.Kumaraswamy(p[0], p[1]), [1.5, 2.0]),
    "Levy": (lambda p: dist.Levy(1.0, p[0]), [0.7]),
    "LowerTruncatedPowerLaw": (lambda p: dist.LowerTruncatedPowerLaw(-1 - p[0], 10.0), [0.85]),
    "MatrixNormal": (
        lambda p: dist.MatrixNormal(
            jnp.outer(p[:2], jnp.ones(2)),
            jnp.eye(2).at[1].set(jnp.stack([0.3 * p[2], p[2]])),
            jnp.array([[1.0, 0.0], [0.2, 0.8]]),
        ),
        [1.0, 2.0, 0.7],
    ),
    "ProjectedNormal": (dist.ProjectedNormal, [0.7, 0.3]),
}


@pytest.mark.parametrize("name", [name for name in _PLAIN if hasattr(dist, name)])
def test_the_score_of_what_is_drawn_is_0_on_average(name, x64):
    law, parameters = _PLAIN[name]
    at, draws = jnp.array(parameters), 100_000
    assert is_drawable(law(at))
    values = law(at).sample(jax.random.key(7), (draws,))
    scores = np.asarray(jax.jit(jax.vmap(lambda x: jax.grad(lambda p: law(p).log_prob(x))(at)))(values))
    assert np.all(np.abs(scores.mean(0)) <= 5.5 * scores.std(0) / np.sqrt(draws))


def _cut(model, *args):
    return find_cut(separate(model, args), args, {})


@pytest.mark.nightly
def test_a_total_may_be_that_of_the_outcome():
    """Given how many there are, a row's law says of which kind. Of a law of other numbers that would be no draw."""

    def by_category(law):
        def model(X, y):
            b = numpyro.sample("b", dist.Normal(0, 1).expand([2, 3]).to_event(2))
            with numpyro.plate("rows", len(y)):
                numpyro.sample("y", law(X @ b, y), obs=y)

        return model

    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(9, 2)).astype(np.float32), rng.integers(0, 6, (9, 3))
    multinomial = by_category(lambda eta, y: dist.Multinomial(y.sum(-1), logits=eta))
    dirichlet = by_category(lambda eta, y: dist.DirichletMultinomial(jnp.exp(eta), jnp.sum(y, -1)))
    by_first = by_category(lambda eta, y: dist.Multinomial(10 + y[:, 0], logits=eta))
    poisson = by_category(lambda eta, y: dist.Poisson(jnp.exp(eta) * y.sum(-1, keepdims=True)).to_event(1))
    for model, is_drawn in ((multinomial, True), (dirichlet, True), (by_first, False), (poisson, False)):
        cut = _cut(model, X, y)
        assert (cut.drawn_log_density is not None) == is_drawn
    cut = _cut(multinomial, X, y)
    row, words = (X[:1], y[:1]), jnp.arange(2, dtype=jnp.uint32)
    other = (X[:1], y[:1, ::-1])  # with the same total
    phi = jnp.zeros(cut.size)
    assert cut.drawn_log_density(phi, row, words) == cut.drawn_log_density(phi, other, words)


@pytest.mark.nightly
@pytest.mark.parametrize("in_double_precision", [False, True])
def test_binomial_outcomes_are_drawn_by_probabilities_too(in_double_precision):
    def model(x, n, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Binomial(n, probs=jax.nn.sigmoid(b[0] + b[1] * x)), obs=y)

    x, n = np.linspace(-1, 1, 9, dtype=np.float32), np.arange(20, 29)
    for kind in (np.int64, np.int32, np.uint8, np.float32):
        with jax.enable_x64(in_double_precision):
            assert _cut(model, x, n.astype(kind), np.arange(9)).drawn_log_density is not None


# -- Several outcomes, masks, weights, and laws of the user's own ------------------------------------------------------

_N = 9
_ROWS = np.random.default_rng(3).normal(size=(4, _N)).astype(np.float32)
_SEEN = np.arange(_N) % 3


def _parameters():
    return numpyro.sample("a", dist.Normal(0, 1)), numpyro.sample("s", dist.HalfNormal(1))


def _masked(observe):
    """A model of x, y, z and of a column that says which of them was seen."""

    def model(x, y, z, seen):
        a, s = _parameters()
        with numpyro.plate("rows", len(y)):
            observe(a, s, x, y, z, seen)

    return model


def _missing(a, s, x, y, z, seen):
    with numpyro.handlers.mask(mask=~jnp.isnan(y)):
        numpyro.sample("y", dist.Normal(a * x, s), obs=jnp.where(jnp.isnan(y), 0.0, y))


def _both_may_be_missing(a, s, x, y, z, seen):
    with numpyro.handlers.mask(mask=jnp.isfinite(y)):
        numpyro.sample("y", dist.Normal(a * x, s), obs=jnp.nan_to_num(y))
    with numpyro.handlers.mask(mask=seen == 1):
        numpyro.sample("z", dist.Normal(a, 1), obs=z)


def _one_or_the_other(a, s, x, y, z, seen):
    with numpyro.handlers.mask(mask=seen == 1):
        numpyro.sample("y", dist.Normal(a * x, s), obs=y)
    with numpyro.handlers.mask(mask=seen != 1):
        numpyro.sample("z", dist.Normal(a, 1), obs=z)


def _positive_only(a, s, x, y, z, seen):
    numpyro.sample("y", dist.Normal(a * x, s).mask(y > 0), obs=y)


def _one_after_the_other(a, s, x, y, z, seen):
    numpyro.sample("y", dist.Normal(a * x, s), obs=y)
    numpyro.sample("z", dist.Normal(a + s * y, 1), obs=z)


def _each_by_the_other(a, s, x, y, z, seen):
    numpyro.sample("y", dist.Normal(a * x + 0.4 * z, s), obs=y)
    numpyro.sample("z", dist.Normal(a + 0.4 * y, s), obs=z)


def _what_follows_a_computed_one(a, s, x, y, z, seen):
    numpyro.sample("y", dist.Normal(a * x, s), obs=2 * y)
    numpyro.sample("z", dist.Normal(a + s * y, 1), obs=z)


@pytest.mark.parametrize(
    ("observe", "is_drawn"),
    [
        (_missing, True),
        (_both_may_be_missing, True),
        (_one_or_the_other, False),  # as where values beyond a limit of detection have a site of their own
        (_positive_only, False),
        (_one_after_the_other, True),
        (_each_by_the_other, False),
        (_what_follows_a_computed_one, False),
    ],
)
def test_outcomes_are_drawn_where_masks_say_what_is_missing_and_each_follows_others(observe, is_drawn):
    cut = _cut(_masked(observe), *_ROWS[:3], _SEEN)
    assert (cut.drawn_log_density is not None) == is_drawn


def _series(law):
    def model(x, Y):
        a, s = _parameters()
        r = numpyro.sample("r", dist.Uniform(-0.4, 0.4))
        with numpyro.plate("rows", len(Y)):
            numpyro.sample("y", law(a * x[:, None], r, s, Y).to_event(1), obs=Y)

    return model


def _last(Y):
    return jnp.concatenate([jnp.zeros((Y.shape[0], 1)), Y[:, :-1]], 1)


def _longer_than(k):
    return np.random.default_rng(4).normal(size=(_N, k)).astype(np.float32)


@pytest.mark.nightly
def test_a_series_in_a_row_is_drawn_in_order():
    by_last = _series(lambda m, r, s, Y: dist.Normal(m + r * _last(Y), s))
    by_others = _series(lambda m, r, s, Y: dist.Normal(m + r * (Y.sum(1, keepdims=True) - Y), s))
    by_itself = _series(lambda m, r, s, Y: dist.Normal(m, s).expand(Y.shape).mask(r < Y))
    for model, k, is_drawn in ((by_last, 5, True), (by_last, 13, False), (by_others, 5, False), (by_itself, 5, False)):
        assert (_cut(model, _ROWS[0], _longer_than(k)).drawn_log_density is not None) == is_drawn
    # A draw is that of the same noise, whatever the row's own values are; and they follow each other as the law says.
    cut, Y = _cut(by_last, _ROWS[0], _longer_than(3)), _longer_than(3)
    names, words = list(cut.names), np.random.default_rng(5).integers(0, 2**32, (4000, 2), dtype=np.uint32)
    phi = jnp.zeros(3).at[names.index("r")].set(3.0)
    one, other = ((_ROWS[0][:1], Y[k : k + 1]) for k in (0, 1))

    def scores(row):
        return np.asarray(jax.jit(jax.vmap(lambda k: jax.grad(lambda p: cut.drawn_log_density(p, row, k))(phi)))(words))

    found = scores(one)
    np.testing.assert_allclose(found, scores((one[0], other[1])), rtol=1e-4, atol=1e-5)
    assert np.all(np.abs(found.mean(0)) < 5.5 * found.std(0) / np.sqrt(len(words)))


class _OwnNormal(dist.Distribution):
    arg_constraints = {"mean_of_it": dist.constraints.real, "scale": dist.constraints.positive}  # noqa: RUF012
    support = dist.constraints.real
    too_wide = 1.0

    def __init__(self, mean_of_it, scale, *, validate_args=None):
        self.mean_of_it, self.scale = mean_of_it, scale
        shape = jax.lax.broadcast_shapes(jnp.shape(mean_of_it), jnp.shape(scale))
        super().__init__(shape, validate_args=validate_args)

    def log_prob(self, value):
        return dist.Normal(self.mean_of_it, self.scale).log_prob(value)

    def sample(self, key, sample_shape=()):
        normal = jax.random.normal(key, sample_shape + self.batch_shape)
        return self.mean_of_it + self.too_wide * self.scale * normal


class _TooWide(_OwnNormal):
    too_wide = 1.2


class _WithoutSupport(_OwnNormal):
    support = None


class _WithoutSampler(_OwnNormal):
    def sample(self, key, sample_shape=()):
        raise NotImplementedError


class _MayNotEnd(_OwnNormal):
    def sample(self, key, sample_shape=()):
        return jax.lax.while_loop(lambda x: jnp.any(x < -50.0), lambda x: x + 1, super().sample(key, sample_shape))


@pytest.mark.parametrize(
    ("law", "is_drawn"),
    [
        (_OwnNormal, True),
        (_WithoutSupport, True),
        (_TooWide, False),
        (_WithoutSampler, False),
        (_MayNotEnd, False),
    ],
)
def test_a_law_of_the_users_own_is_drawn_if_its_sampler_ends_and_its_scores_are_0_on_average(law, is_drawn):
    cut = _cut(_masked(lambda a, s, x, y, z, seen: numpyro.sample("y", law(a * x, s), obs=y)), *_ROWS[:3], _SEEN)
    assert (cut.drawn_log_density is not None) == is_drawn


def _scaled(scale, observe=lambda a, s, x, y: numpyro.sample("y", dist.Normal(a * x, s), obs=y)):
    def model(x, y, w):
        a, s = _parameters()
        with numpyro.plate("rows", len(y)), numpyro.handlers.scale(scale=scale(a, w, y)):
            observe(a, s, x, y)

    return model


def _scaled_in_a_plate_of(n):
    def model(x, y, w):
        a, s = _parameters()
        with numpyro.plate("rows", n), numpyro.handlers.scale(scale=w):
            numpyro.sample("y", dist.Normal(a * x, s), obs=y)

    return model


def _two_scales(a, s, x, y):
    numpyro.sample("y", dist.Normal(a * x, s), obs=y)
    with numpyro.handlers.scale(scale=2.0):
        numpyro.sample("again", dist.Normal(a * x, s), obs=y)


WEIGHTED = {
    "weights": (_scaled(lambda a, w, y: w), True, True),
    "weights, and the plate's size as a number": (_scaled_in_a_plate_of(_N), True, True),
    "a number": (_scaled(lambda a, w, y: 3.0), True, True),
    "by a parameter": (_scaled(lambda a, w, y: w * jnp.exp(a)), False, False),
    "by the outcome": (_scaled(lambda a, w, y: jnp.abs(y)), True, False),
    "of parts": (_scaled(lambda a, w, y: w, _two_scales), False, False),
    "of a factor": (
        _scaled(lambda a, w, y: w, lambda a, s, x, y: numpyro.factor("f", -((y - a * x) ** 2))),
        True,
        False,
    ),
}


def test_outcomes_are_drawn_where_the_model_has_the_plates_size_as_a_number():
    def model(x, y):
        a, s = _parameters()
        with numpyro.plate("rows", _N):
            numpyro.sample("y", dist.Normal(a * x, s), obs=y)

    cut = _cut(model, *_ROWS[:2])
    assert cut.drawn_log_density is not None
    assert cut.row_weight is None


@pytest.mark.parametrize("name", WEIGHTED)
def test_how_often_a_row_counts_is_read_off_the_scale_of_what_it_observes(name):
    """If the row alone says it; and an outcome is drawn if it has no part in that."""
    model, is_weighted, is_drawn = WEIGHTED[name]
    w = np.exp(_ROWS[3])
    cut = _cut(model, _ROWS[0], _ROWS[1], w)
    assert (cut.row_weight is not None) == is_weighted
    assert (cut.drawn_log_density is not None) == is_drawn
    row = tuple(jnp.asarray(part[:1]) for part in (_ROWS[0], _ROWS[1], w))
    if is_weighted:
        expected = {"a number": 3.0, "by the outcome": abs(_ROWS[1][0])}.get(name, w[0])
        assert float(cut.row_weight(row)) == pytest.approx(float(expected), rel=1e-6)
    if is_drawn:  # it counts once
        once = _cut(_scaled(lambda a, w, y: 1.0), _ROWS[0], _ROWS[1], w)
        phi, words = jnp.array([0.3, 0.2]), jnp.arange(2, dtype=jnp.uint32)
        found, expected = (each.drawn_log_density(phi, row, words) for each in (cut, once))
        assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("kind", [np.int32, np.uint8, bool])
def test_whole_numbers_and_yes_or_no_are_weights_too(kind):
    w = (np.arange(_N) % 3).astype(kind)
    cut = _cut(_scaled(lambda a, w, y: w), _ROWS[0], _ROWS[1], w)
    weight = cut.row_weight(tuple(jnp.asarray(part[2:3]) for part in (_ROWS[0], _ROWS[1], w)))
    assert weight.dtype == jnp.result_type(float)
    assert float(weight) == float(w[2])


def test_rows_whose_latents_are_integrated_out_are_not_drawn_where_they_are_scaled():
    def model(x, y, w):
        a, s = _parameters()
        with numpyro.plate("rows", len(y)), numpyro.handlers.scale(scale=w):
            u = numpyro.sample("u", dist.Normal(0, s))
            numpyro.sample("y", dist.Normal(a * x + u, 1), obs=y)

    assert _cut(model, _ROWS[0], _ROWS[1], np.ones(_N, np.float32)).drawn_log_density is None
