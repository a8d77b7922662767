"""Outcomes that can have few values are enumerated, so that a rare one is not lost."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import DPHMC, MCMC
from numpyro_dp.model.coordinates import find_cut
from numpyro_dp.model.separate import separate
from numpyro_dp.preparation.derivatives import Frame, centred_scores, clip_norm

N = 8000
_rng = np.random.default_rng(0)
X = np.column_stack([np.ones(N), _rng.normal(size=(N, 2))]).astype(np.float32)
TRUTH = np.array([-4.2, 0.5, -0.3])
Y = (_rng.random(N) < 1 / (1 + np.exp(-X @ TRUTH))).astype(np.int32)


def logistic(X, y):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def cut_of(model, *args):
    return find_cut(separate(model, args, {}, None, None, True), args, {})


def scaled(X, y):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]), numpyro.handlers.scale(scale=0.5):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def ordinal(X, y):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(X @ b, jnp.array([-1.0, 0.0, 1.0])), obs=y)


def poisson(X, y):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)


def two_outcomes(X, y):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)
        numpyro.sample("x", dist.Bernoulli(logits=b[0]), obs=y)


def several_answers(X, y):
    """NumPyro would list two outcomes of four answers: all no, all yes."""
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0], dim=-2), numpyro.plate("answers", 4):
        numpyro.sample("y", dist.Bernoulli(logits=(X @ b)[:, None] + jnp.arange(4)), obs=jnp.stack([y] * 4, 1))


def answers_as_an_event(X, y):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        law = dist.Bernoulli(logits=(X @ b)[:, None] + jnp.arange(4)).to_event(1)
        numpyro.sample("y", law, obs=jnp.stack([y] * 4, 1))


def masked(X, y):
    b = numpyro.sample("b", dist.Normal(0, 5).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]), numpyro.handlers.mask(mask=X[:, 0] > 0):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


FEW = [(logistic, 2), (ordinal, 4), (masked, 2)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [*FEW, *((model, None) for model in (poisson, scaled, two_outcomes, several_answers, answers_as_an_event))],
)
def test_outcomes_are_enumerated_where_they_can_have_few_values(model, expected):
    cut = cut_of(model, X, Y)
    assert cut.num_outcomes == expected
    assert cut.drawn_log_density is not None


@pytest.mark.parametrize("bound", [0.025, 0.1, 1e3])
def test_scores_and_information_are_the_exact_expectations(bound, x64):
    """Of all rows together, against sums over both outcomes by hand: clipped scores have a mean of 0."""
    cut, rows = cut_of(logistic, X.astype(float), Y), slice(0, 300)
    center, x = TRUTH + [0.2, 0.1, 0.0], X[rows].astype(float)
    frame = Frame(center, np.diag([0.1, 0.2, 0.15]))
    found = jax.vmap(lambda x, y: centred_scores(cut, frame, jnp.asarray(bound), (x[None], y[None]), jnp.array(0)))
    by_outcome = [found(x, np.full(300, k, np.int32)) for k in (0, 1)]
    p = 1 / (1 + np.exp(-x @ center))
    chances = np.stack([1 - p, p])
    clipped = [jax.vmap(lambda s: clip_norm(s, jnp.asarray(bound)))(out.score) for out in by_outcome]
    scale = chances[1][:, None] * np.minimum(bound, np.linalg.norm(x * [0.1, 0.2, 0.15], axis=1))[:, None]
    np.testing.assert_allclose(
        chances[0][:, None] * clipped[0] + chances[1][:, None] * clipped[1], 0, atol=1e-2 * scale.max()
    )
    gradients = [(k - p)[:, None] * x * [0.1, 0.2, 0.15] for k in (0, 1)]
    exact = sum(c[:, None, None] * g[:, :, None] * g[:, None] for c, g in zip(chances, gradients, strict=True))
    np.testing.assert_allclose(by_outcome[0].unclipped, exact, rtol=1e-6, atol=1e-12)
    lengths = [np.linalg.norm(out.score, axis=1) for out in by_outcome]
    answer = sum(
        (c * np.minimum(1, bound / n))[:, None, None] * g[:, :, None] * g[:, None]
        for c, n, g in zip(chances, lengths, gradients, strict=True)
    )
    np.testing.assert_allclose(by_outcome[1].information, answer, rtol=2e-2, atol=1e-12)
    square = sum(c * np.minimum(n, bound) ** 2 for c, n in zip(chances, lengths, strict=True))
    np.testing.assert_allclose(by_outcome[1].square, square, rtol=2e-2, atol=1e-15)
    expected = sum(c * np.asarray(out.clipped) for c, out in zip(chances, by_outcome, strict=True))
    np.testing.assert_allclose(expected, 0, atol=1e-6)
    expected = sum(c * np.asarray(out.outlying) for c, out in zip(chances, by_outcome, strict=True))
    np.testing.assert_allclose(expected, 0, atol=1e-6)


@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore::numpyro_dp.PosteriorWarning")
def test_a_rare_outcome_is_found():
    """1.6% of the rows, eps = 3: it was lost when outcomes were drawn, and the intercept ran away.

    Wide, and now and then flagged, but there.
    """
    errors = []
    for key in range(3):
        mcmc = MCMC(DPHMC(logistic, eps=3.0), num_warmup=300, num_samples=600, progress_bar=False)
        mcmc.run(jax.random.key(key), X, Y)
        away = np.asarray(mcmc.get_samples()["b"], float).mean(0) - TRUTH
        errors.append(np.sqrt(np.mean((away / 0.09) ** 2)))  # in standard deviations of sampling
    assert np.median(errors) < 4, errors
