"""Steps of a likelihood, of which derivatives show nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import DPHMC, DPSGLD, Preparation
from numpyro_dp.model.coordinates import find_cut
from numpyro_dp.model.separate import separate
from numpyro_dp.preparation.discontinuities import find_discontinuities

NAMES = ("a", "b")
ROWS = (np.array([[0.5], [3.0]]),)
BASES = np.array([[0.0, 0.0], [0.3, -0.2]])


@pytest.mark.parametrize(
    ("density", "expected"),
    [
        (lambda phi, x: -jnp.sum((x - phi) ** 2), []),
        (lambda phi, x: -1e6 * (x - phi[0]) ** 2 - jnp.abs(x - phi[1]), []),  # steep, and with a kink
        (lambda phi, x: jnp.where(x > phi[0], 1.0, 0.0) * phi[1], ["a"]),
        (lambda phi, x: jnp.floor(10 * phi[1] + x) - phi[0] ** 2, ["b"]),
        (lambda phi, x: jnp.where(x > phi[0], 1.0, 2.0) + jnp.sign(phi[1] - 0.1), ["a", "b"]),
        (lambda phi, x: jnp.where(phi[0] > 0.5, -jnp.inf, -(phi[0] ** 2)), []),  # the end of a support
        (lambda phi, x: -jnp.exp(400 * phi[0] * x), []),
    ],
)
def test_steps_are_told_from_slopes_and_kinks(density, expected):
    found = find_discontinuities(lambda phi, row: density(phi, row[0][0]), ROWS, NAMES, BASES, np.array([1.0, 1.0]))
    assert found == expected


def step(day, y):
    level = numpyro.sample("level", dist.Normal(0, 20).expand([2]).to_event(1))
    change = numpyro.sample("change", dist.Uniform(0, 100))
    with numpyro.plate("rows", day.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.where(day > change, level[1], level[0]), 2.0), obs=y)


def smooth(day, y):
    level = numpyro.sample("level", dist.Normal(0, 20).expand([2]).to_event(1))
    change = numpyro.sample("change", dist.Uniform(0, 100))
    with numpyro.plate("rows", day.shape[0]):
        part = jax.nn.sigmoid(day - change)
        numpyro.sample("y", dist.Normal(level[0] * (1 - part) + level[1] * part, 2.0), obs=y)


DAY = np.random.default_rng(0).uniform(0, 100, 3000)
Y = np.where(DAY > 40, 12.0, 8.0) + 2 * np.random.default_rng(1).normal(size=3000)


@pytest.mark.parametrize(("model", "expected"), [(step, True), (smooth, False)])
def test_parameters_that_are_compared_with_rows_are_known_from_the_graph(model, expected):
    cut = find_cut(separate(model, (DAY, Y), {}, None, None, True), (DAY, Y), {})
    assert cut.has_thresholds is expected


@pytest.mark.parametrize("sampler", [DPHMC, DPSGLD])
@pytest.mark.statistical
def test_a_posterior_of_a_likelihood_with_steps_is_not_to_be_trusted(sampler):
    kernel = sampler(step, eps=3.0, prepare=Preparation(force=True), num_iterations=1)
    kernel.prepare(DAY, Y)
    assert kernel.prepared.steps == ("change",)
    (reason,) = [text for text in kernel.privacy.posterior.reasons if "steps" in text]
    assert "the likelihood has steps along change, of which derivatives" in reason
