"""What is made of released information matrices: noise between pairs that are apart goes, and answers count if sure."""

import math

import numpy as np
import pytest

from numpyro_dp.preparation.information import answered, without_apart


def test_how_gradients_fall_counts_as_far_as_noise_leaves_it():
    """First by one factor for all squares; then each by its own."""
    squares, fall = np.diag([100.0, 100.0]), np.array([[40.0, 10.0], [10.0, 60.0]])
    information, scale, answer = answered(squares, 1.0, fall, 0.0)
    np.testing.assert_allclose(information, fall)
    assert (answer, scale) == (pytest.approx(0.5), 0.0)
    # Noise that hides the matrix, and hardly the factor.
    noise = 25.0 / math.sqrt(2)
    information, scale, answer = answered(squares, 1.0, fall, noise)
    assert answer == pytest.approx(1 - 0.5 / (1 + (noise * math.sqrt(2) / 200 / 0.25) ** 2))
    sure = 1 / (1 + (2 * noise / (100 * answer) / 0.5) ** 2)
    np.testing.assert_allclose(information, (1 - sure) * answer * squares + sure * fall)
    assert scale == pytest.approx(math.hypot((1 - sure) * answer, sure * noise))
    # Noise that hides all, squares that are noise, and a sum that does not fall.
    assert answered(squares, 1.0, fall, 1e9)[2] == pytest.approx(1.0)
    np.testing.assert_allclose(answered(squares, 1.0, fall, 1e9)[0], squares, atol=1e-6)
    np.testing.assert_array_equal(answered(squares, 40.0, fall, 0.0)[0], squares)
    assert answered(squares, 1.0, -fall, 0.0)[2] == 0.1


_GROUPED = np.array([[False, True, True, False], [True, False, True, False], [True, True, False, False], 4 * [False]])


def _grouped_information(whitening):
    diagonal = np.diag([3.0, 2.0, 1.0, 5.0])
    diagonal[3, :3] = diagonal[:3, 3] = [0.5, -0.4, 0.3]
    return whitening.T @ diagonal @ whitening


@pytest.mark.parametrize("whitening", [np.eye(4), np.random.default_rng(1).standard_normal((4, 4))])
def test_an_information_without_pairs_that_are_apart_stays_what_it_is(whitening):
    information = _grouped_information(whitening)
    found, scale = without_apart(information, 0.1, whitening, _GROUPED)
    np.testing.assert_allclose(found, information, rtol=1e-10, atol=1e-10)
    assert scale < 0.1


@pytest.mark.parametrize("apart", [None, np.zeros((4, 4), bool)])
def test_nothing_is_taken_off_where_no_pair_is_apart(apart):
    information = _grouped_information(np.eye(4))
    assert without_apart(information, 0.1, np.eye(4), apart) == (information, 0.1)


def test_noise_between_pairs_that_are_apart_is_taken_off():
    rng, size = np.random.default_rng(0), 20
    apart = ~np.eye(size, dtype=bool)
    apart[0] = apart[:, 0] = False
    whitening = np.diag(rng.lognormal(0, 1, size)) + 0.1 * rng.standard_normal((size, size))
    truth = whitening.T @ (np.eye(size) + ~apart) @ whitening
    before, after = [], []
    for _ in range(50):
        noise = rng.standard_normal((size, size))
        noisy = truth + 0.3 * (noise + noise.T) / math.sqrt(4)
        found, scale = without_apart(noisy, 0.3, whitening, apart)
        before.append(np.abs(np.linalg.eigvalsh(noisy - truth)).max())
        after.append(np.abs(np.linalg.eigvalsh(found - truth)).max())
        assert np.linalg.norm(found - truth) < np.linalg.norm(noisy - truth)
    # Standard errors of both are below 2%, as is that of the 16 draws by which the scale is found.
    np.testing.assert_allclose(np.mean(after), scale * math.sqrt(2 * size), rtol=0.12)
    assert np.mean(after) < 0.7 * np.mean(before)
