"""Chains start where prior and frame say that the posterior is."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_dp.model.coordinates import Cut
from numpyro_dp.preparation.frames import Frame, NormalPrior
from numpyro_dp.preparation.start import start_near
from tests.helpers.surveys import positive

M, D = 2, 4
_rng = np.random.default_rng(0)
SLOPE, AT_0 = _rng.normal(size=(M, D)), np.array([0.3, -0.2])
FRAME = Frame(np.array([5.0, -3.0]), np.array([[0.1, 0.0], [0.02, 0.2]]))
PRIOR = NormalPrior(_rng.normal(size=D), positive(_rng, D))


def cut_of(coordinates):
    return Cut(M, False, ("a", "b"), coordinates, lambda phi, row: jnp.zeros(()))


def by_hand(prior):
    """Where phi is linear in z: a normal law of z, and N(center, W W') for phi."""
    precision = np.linalg.inv(FRAME.whitening @ FRAME.whitening.T)
    whole = SLOPE.T @ precision @ SLOPE + np.linalg.inv(prior.covariance)
    right = SLOPE.T @ precision @ (FRAME.center - AT_0) + np.linalg.solve(prior.covariance, prior.mean)
    return np.linalg.solve(whole, right), np.linalg.inv(whole)


def test_where_coordinates_are_linear_start_and_covariance_are_the_posteriors(x64):
    found = start_near(cut_of(lambda z: AT_0 + jnp.asarray(SLOPE) @ z), FRAME, PRIOR)
    for one, expected in zip(found, by_hand(PRIOR), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-6, atol=1e-9)


def test_of_what_the_rows_do_not_tell_the_prior_decides(x64):
    """More parameters than coordinates: along the others, the prior's mean and covariance."""
    start, covariance = start_near(cut_of(lambda z: z[:M]), FRAME, PRIOR._replace(covariance=np.diag([9.0, 9, 1, 4])))
    np.testing.assert_allclose(start[M:], PRIOR.mean[M:], atol=1e-6)
    np.testing.assert_allclose(np.diag(covariance)[M:], [1, 4], rtol=1e-6)
    np.testing.assert_allclose(start[:M], FRAME.center, atol=0.02)


def test_where_the_rows_tell_far_more_of_one_direction_than_of_another_the_covariance_is_positive_definite(x64):
    frame = Frame(FRAME.center, np.diag([1e-12, 1.0]))
    _, covariance = start_near(
        cut_of(lambda z: AT_0 + jnp.asarray(SLOPE) @ z), frame, PRIOR._replace(covariance=1e8 * np.eye(D))
    )
    assert np.linalg.eigvalsh(covariance).min() > 0
    np.linalg.cholesky(covariance)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_where_they_are_not_it_is_found_by_steps(sign, x64):
    """On the side of the prior: exp(z) and z**3 of a value."""
    prior = NormalPrior(np.array([0.0, sign, 0.0, 0.0]), 100 * np.eye(D))
    frame = FRAME._replace(center=np.array([5.0, sign * 8.0]))
    start, covariance = start_near(cut_of(lambda z: jnp.stack([jnp.exp(z[0]), z[1] ** 3])), frame, prior)
    np.testing.assert_allclose(start[:2], [np.log(5), 2 * sign], atol=1e-2)
    slope = np.diag([5.0, 12.0])
    expected = np.linalg.inv(slope @ np.linalg.inv(frame.whitening @ frame.whitening.T) @ slope + np.eye(2) / 100)
    np.testing.assert_allclose(covariance[:2, :2], expected, rtol=0.05)
