"""The information of the rows' own law is minus the second derivative, of models in which the two could differ."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import some_every_day
from numpyro.handlers import scale

from numpyro_dp import DPHMC, MCMC
from numpyro_dp.model.coordinates import find_cut
from numpyro_dp.model.separate import separate
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.row_scores import centred_scores, plain_scores

N = 3000
RNG = np.random.default_rng(0)
X = RNG.normal(size=N).astype(np.float32)
Y = (1 + 2 * X + RNG.normal(size=N)).astype(np.float32)
WEIGHTS = RNG.gamma(1, 1, size=N).astype(np.float32)


def coefficients():
    return [numpyro.sample(name, dist.Normal(0, 5)) for name in "ab"]


def weighted(x, w, y):
    a, b = coefficients()
    with numpyro.plate("rows", x.shape[0]), scale(scale=w):
        numpyro.sample("y", dist.Normal(a + b * x, 1.0), obs=y)


def residual(x, y):
    a, b = coefficients()
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("e", dist.Normal(0, 1.0), obs=y - a - b * x)


def wide(x, y):
    """A law with one value of a row for three that are observed: NumPyro spreads it."""
    a, b = coefficients()
    numpyro.sample("y", dist.Normal((a + b * x)[:, None], 1.0), obs=y)


def wide_outcomes(x, y):
    a, b = coefficients()
    with numpyro.plate("rows", x.shape[0], dim=-2):
        numpyro.sample("y", dist.Bernoulli(logits=(a + b * x)[:, None]), obs=y)


THREE = (1 + 2 * X[:, None] + RNG.normal(size=(N, 3))).astype(np.float32)
CASES = {
    "plain": (weighted, (X, 1.0, Y), True),
    "scale .5": (weighted, (X, 0.5, Y), True),
    "scale 3": (weighted, (X, 3.0, Y), True),
    "weights": (weighted, (X, WEIGHTS, Y), True),
    "residual": (residual, (X, Y), False),
    "wide": (wide, (X, THREE), True),
    "wide outcomes": (wide_outcomes, (X, (THREE > 0).astype(np.int32)), True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_information_is_minus_the_second_derivative(name):
    model, args, is_drawn = CASES[name]
    separated = separate(model, args)
    cut = find_cut(separated, args, {})
    assert (cut.drawn_log_density is not None) == is_drawn
    frame = Frame(np.asarray(cut.coordinates(jnp.array([1.0, 2.0]))), np.eye(2, dtype=np.float32))
    rows = jax.tree.map(lambda x: jnp.asarray(x)[:, None], separated.rows(args, {}))
    bound = jnp.float32(jnp.inf)
    hessian = jax.jit(jax.vmap(lambda row: plain_scores(cut, frame, bound, row, True).unclipped))(rows).sum(0)
    weight = {"scale .5": 0.5, "scale 3": 3.0, "weights": WEIGHTS}.get(name, 1.0) * (3 if name == "wide" else 1)
    if name != "wide outcomes":
        expected = np.broadcast_to(weight, N) @ np.stack([np.ones(N), X * X], 1)
        np.testing.assert_allclose(np.diag(hessian), expected, rtol=1e-3)
    if is_drawn:
        numbers = jnp.arange(N, dtype=jnp.uint32)
        scores = jax.jit(jax.vmap(lambda row, k: centred_scores(cut, frame, bound, row, k)))(rows, numbers)
        # Of 3,000 rows with 8 draws each: 5 standard deviations are some 6% of the second coordinate's.
        np.testing.assert_allclose(np.diag(scores.information.sum(0)), np.diag(hessian), rtol=0.1)


@pytest.mark.statistical
@pytest.mark.parametrize(
    "name", some_every_day(["scale .5", "scale 3", "weights", "residual", "wide"], {"scale 3", "weights"})
)
def test_without_noise_the_posterior_is_that_of_the_likelihood_as_it_is_written(name):
    model, args, _ = CASES[name]
    mcmc = MCMC(DPHMC(model, eps=jnp.inf), num_warmup=300, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), *args)
    weight = {"scale .5": 0.5, "scale 3": 3.0, "weights": WEIGHTS}.get(name, 1.0) * (3 if name == "wide" else 1)
    design, y = np.stack([np.ones(N), X], 1), THREE.mean(1) if name == "wide" else Y
    precision = (design * np.broadcast_to(weight, N)[:, None]).T @ design + np.eye(2) / 25
    mean = np.linalg.solve(precision, (design * np.broadcast_to(weight, N)[:, None]).T @ y)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    for k, site in enumerate("ab"):
        draws = np.asarray(mcmc.get_samples()[site])
        assert abs(draws.mean() - mean[k]) < 0.35 * sd[k]  # the surrogate's own law is good to some .1
        assert 0.85 < draws.std() / sd[k] < 1.2
