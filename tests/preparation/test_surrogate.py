"""The surrogate is the density that it claims to be. On the host, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest, multivariate_normal

from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.surrogate import Surrogate
from tests.helpers.surveys import assert_covariance, assert_mean, positive, symmetric_noise

M = 4


def surrogate(rng, curvature_scale, noise=1.0, m=M, variance=1.0):
    return Surrogate(
        frame=Frame(rng.normal(size=m), np.eye(m) + 0.3 * rng.normal(size=(m, m))),
        score=rng.normal(size=m),
        score_covariance=noise * positive(rng, m),
        curvature=positive(rng, m),
        curvature_scale=curvature_scale,
        variance=variance,
    )


def at_most(smaller, larger):
    """In the order of symmetric matrices."""
    return np.linalg.eigvalsh(larger - smaller).min() > -1e-9 * np.abs(larger).max()


# -- The two likelihoods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, M])
@pytest.mark.parametrize("curvature_scale", [0.0, 0.1, 2.0])
@pytest.mark.parametrize("variance", [1.0, 0.4, 2.0])
def test_noise_aware_is_the_density_of_the_score_with_its_whole_covariance(variance, curvature_scale, m, x64):
    """That of the rows is the curvature, or so much times it as the clipped scores vary."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        s = surrogate(rng, curvature_scale, m=m, variance=variance)
        points = rng.normal(size=(20, m)) * rng.choice([0.1, 1.0, 10.0], (20, 1))
        expected = [
            multivariate_normal.logpdf(
                s.score,
                s.curvature @ u,
                variance * s.curvature
                + s.score_covariance
                + curvature_scale**2 / 2 * (u @ u * np.eye(m) + np.outer(u, u)),
            )
            for u in points
        ]
        found = np.asarray(jax.vmap(s.noise_aware)(jnp.asarray(points)))
        np.testing.assert_allclose(found - found[0], np.subtract(expected, expected[0]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_the_curvatures_noise_adds_to_the_score_what_it_is_said_to_add(scale):
    rng = np.random.default_rng(5)
    u = np.array([1.0, -2.0, 0.5, 0.0])
    draws = symmetric_noise(rng, 100_000, M, scale) @ u
    assert_mean(draws, 0)
    assert_covariance(draws, scale**2 / 2 * (u @ u * np.eye(M) + np.outer(u, u)))


def test_without_noise_both_likelihoods_are_the_same(x64):
    rng = np.random.default_rng(1)
    s = surrogate(rng, 0.0)._replace(score_covariance=np.zeros((M, M)))
    points = jnp.asarray(rng.normal(size=(20, M)) * 3)
    difference = jax.vmap(s.noise_aware)(points) - jax.vmap(s.plug_in)(points)
    np.testing.assert_allclose(difference, difference[0], rtol=1e-9)
    expected = [s.score @ u - u @ s.curvature @ u / 2 for u in np.asarray(points)]
    np.testing.assert_allclose(jax.vmap(s.plug_in)(points), expected, rtol=1e-9)
    # Scores that vary less than the curvature says are as good as more rows.
    precise = jax.vmap(s._replace(variance=0.5).noise_aware)(points) - 2 * jax.vmap(s.plug_in)(points)
    np.testing.assert_allclose(precise, precise[0], rtol=1e-9)


@pytest.mark.statistical
def test_noise_in_the_score_only_loses_information_and_never_makes_it(x64):
    """The posterior's precision lies between the prior's and that without noise, and falls as the noise grows."""
    rng = np.random.default_rng(2)
    for _ in range(5):
        s, prior = surrogate(rng, 0.0), positive(rng, M)
        before = prior + s.curvature
        for noise in (0.01, 1.0, 100.0, 1e6):
            noisy = s._replace(score_covariance=noise * s.score_covariance)

            def log_posterior(u, noisy=noisy, prior=prior):
                return noisy.noise_aware(u) - u @ jnp.asarray(prior) @ u / 2

            precision = -np.asarray(jax.hessian(log_posterior)(jnp.asarray(rng.normal(size=M))))
            assert at_most(prior, precision)
            assert at_most(precision, before)
            before = precision
        np.testing.assert_allclose(precision, prior, atol=1e-3 * np.abs(prior).max())


@pytest.mark.statistical
@pytest.mark.parametrize("relative", [0.0, 0.5])
def test_posteriors_with_noise_in_the_curvature_are_calibrated(relative, x64):
    """The parameter from the prior, score and curvature as they are released: the parameter's rank is uniform.

    Approximately, where the curvature's noise is not larger than the curvature: the curvature is known no better for
    the parameter's prior, and far noisier ones would draw the posterior to 0.
    """
    rng, grid, count = np.random.default_rng(6), np.linspace(-8, 8, 1001), 400
    J, S, ranks, variances = 3.0, 2.0, [], []
    for _ in range(count):
        u = rng.normal()
        curvature = np.array([[J * (1 + relative * rng.normal())]])
        curvature = np.maximum(curvature, 0)  # as `combine` raises it
        score = np.array([J * u + np.sqrt(J + S) * rng.normal()])
        s = Surrogate(Frame(np.zeros(1), np.eye(1)), score, np.array([[S]]), curvature, relative * J)
        log_density = np.asarray(jax.vmap(s.noise_aware)(jnp.asarray(grid[:, None]))) - grid**2 / 2
        weight = np.exp(log_density - log_density.max())
        weight /= weight.sum()
        ranks.append(weight[grid < u].sum())
        variances.append(weight @ grid**2 - (weight @ grid) ** 2)
    assert kstest(ranks, "uniform").pvalue > 1e-6
    exact = 1 / (1 + J**2 / (J + S))
    if relative:
        assert exact + 5 * np.std(variances) / np.sqrt(count) < np.mean(variances) < 1
    else:
        np.testing.assert_allclose(variances, exact, rtol=1e-6)


def test_whitened_undoes_the_frame(x64):
    s, u = surrogate(np.random.default_rng(3), 0.0), jnp.arange(1.0, M + 1)
    np.testing.assert_allclose(s.frame.of(s.frame.at(u)), u, rtol=1e-9)
