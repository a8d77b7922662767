"""Information matrices with less noise: no further from the true ones, nearer by as much as the search counts on."""

import numpy as np
import pytest

from numpyro_dp.preparation.shrinkage import noise_left, without_noise


def noise(rng, m, scale):
    """As `Survey.derivatives` has it: of entries off the diagonal a root of 2 less."""
    lower = np.tril(rng.normal(size=(m, m)), -1) * scale / np.sqrt(2)
    return lower + lower.T + np.diag(rng.normal(size=m)) * scale


def matrix(rng, m, spread):
    turned, _ = np.linalg.qr(rng.normal(size=(m, m)))
    return turned * np.exp(spread * rng.normal(size=m)) @ turned.T


def errors(m, spread, scale, make=matrix, repetitions=60):
    """Root mean squares of what is wrong with matrices, before and after."""
    rng = np.random.default_rng(m)
    found = []
    for _ in range(repetitions):
        true = make(rng, m, spread)
        released = true + noise(rng, m, scale)
        found.append([np.sum((x - true) ** 2) for x in (released, without_noise(released, scale))])
    return np.sqrt(np.mean(found, 0))


@pytest.mark.parametrize("m", [2, 3, 6, 21, 51])
@pytest.mark.parametrize("scale", [0.05, 0.15, 0.3])
@pytest.mark.parametrize("spread", [0.0, 0.3, 0.6, 1.5])
def test_the_matrix_is_no_further_from_the_true_one(m, scale, spread):
    before, after = errors(m, spread, scale)
    assert after < 1.03 * before
    if spread <= 0.3 and scale >= 0.15 and m >= 3:
        assert after < 1.15 * noise_left(m) * before


def test_one_direction_of_which_rows_tell_far_more_or_less_stays():
    """Two covariates that are all but collinear, among many that are not."""

    def pair(rng, m, spread):
        true = np.eye(m)
        true[0, 1] = true[1, 0] = 0.95
        return true

    before, after = errors(21, 0.0, 0.1, pair)
    assert after < 0.7 * before
    rng = np.random.default_rng(0)
    true = pair(rng, 21, 0.0)
    found = [without_noise(true + noise(rng, 21, 0.1), 0.1) for _ in range(60)]
    along = np.zeros(21)
    along[:2] = np.sqrt(0.5)
    # Eigenvectors are as noisy as before: a direction has something of the others.
    assert np.mean([along @ x @ along for x in found]) == pytest.approx(1.95, abs=0.3)
    along[1] *= -1
    assert np.mean([along @ x @ along for x in found]) == pytest.approx(0.05, abs=0.3)
    # Where it is clear of the noise, hardly anything.
    found = [without_noise(true + noise(rng, 21, 0.01), 0.01) for _ in range(60)]
    assert np.mean([along @ x @ along for x in found]) == pytest.approx(0.05, abs=0.01)


def test_without_noise_a_matrix_stays_and_so_does_a_number():
    true = matrix(np.random.default_rng(0), 7, 0.5)
    np.testing.assert_allclose(without_noise(true, 0.0), true, atol=1e-12)
    assert without_noise(np.array([[0.3]]), 0.2) == pytest.approx(0.3)
    assert np.isfinite(without_noise(np.zeros((3, 3)), 0.1)).all()


def test_less_is_left_of_more_coordinates():
    assert noise_left(1) == noise_left(3) == 1.0
    assert 0.25 < noise_left(100) < noise_left(20) < noise_left(5) < 1.0
