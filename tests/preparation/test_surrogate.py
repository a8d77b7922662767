"""The surrogate is the density that it claims to be, and combined releases have the errors that they claim to have.

On the host, in float64. Tolerances of averages are 5 standard errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest, multivariate_normal

from numpyro_dp.kernels.survey import Frame
from numpyro_dp.preparation import Round, combine
from numpyro_dp.surrogate import Surrogate

M = 4


def positive(rng, m=M, scale=1.0):
    root = rng.normal(size=(m, m + 2))
    return scale * root @ root.T / m


def surrogate(rng, curvature_scale, noise=1.0, m=M):
    return Surrogate(
        frame=Frame(rng.normal(size=m), np.eye(m) + 0.3 * rng.normal(size=(m, m))),
        score=rng.normal(size=m),
        score_covariance=noise * positive(rng, m),
        curvature=positive(rng, m),
        curvature_scale=curvature_scale,
    )


def symmetric_noise(rng, count, m, scale):
    """Noise as the survey releases it: independent in the packed entries, whose off-diagonal is times sqrt(2)."""
    rows, columns = np.tril_indices(m)
    noise = np.zeros((count, m, m))
    noise[:, rows, columns] = scale * rng.normal(size=(count, len(rows))) / np.where(rows == columns, 1, np.sqrt(2))
    return noise + np.swapaxes(np.tril(noise, -1), 1, 2)


def assert_mean(draws, expected):
    """The average over the first axis, within 5 standard errors and rounding."""
    error = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - expected) <= 5 * error + 1e-12), (draws.mean(0) - expected) / error


def assert_covariance(draws, expected):
    centred = draws - draws.mean(0)
    assert_mean(centred[:, :, None] * centred[:, None], expected)


def at_most(smaller, larger):
    """In the order of symmetric matrices."""
    return np.linalg.eigvalsh(larger - smaller).min() > -1e-9 * np.abs(larger).max()


# -- The two likelihoods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, M])
@pytest.mark.parametrize("curvature_scale", [0.0, 0.1, 2.0])
def test_noise_aware_is_the_density_of_the_score_with_its_whole_covariance(curvature_scale, m, x64):
    rng = np.random.default_rng(0)
    for _ in range(5):
        s = surrogate(rng, curvature_scale, m=m)
        points = rng.normal(size=(20, m)) * rng.choice([0.1, 1.0, 10.0], (20, 1))
        expected = [
            multivariate_normal.logpdf(
                s.score,
                s.curvature @ u,
                s.curvature + s.score_covariance + curvature_scale**2 / 2 * (u @ u * np.eye(m) + np.outer(u, u)),
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


@pytest.mark.statistical
def test_noise_in_the_score_only_loses_information_and_never_makes_it(x64):
    """The posterior's precision lies between the prior's and that without noise, and falls as the noise grows."""
    rng = np.random.default_rng(2)
    for _ in range(5):
        s, prior = surrogate(rng, 0.0), positive(rng)
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
        curvature = np.maximum(curvature, relative * J * np.sqrt(2))  # as `combine` raises it
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
    np.testing.assert_allclose(s.whitened(s.frame.at(u)), u, rtol=1e-9)


# -- Several releases as one -------------------------------------------------------------------------------------------

PLACE = np.array([0.4, -0.3, 0.2, 0.1])  # the mode of a quadratic log likelihood of phi
PRECISION = 400 * positive(np.random.default_rng(4)) + 400 * np.eye(M)
COUNT = 3000


def frame_near(center, whitening_noise=0.0, size=0.05, seed=5):
    rng = np.random.default_rng(seed)
    turned = np.linalg.qr(rng.normal(size=(M, M)))[0]
    return Frame(np.asarray(center, float), size * (np.eye(M) + whitening_noise * rng.normal(size=(M, M))) @ turned)


def derivatives(frame):
    """Of the quadratic, in a frame at u = 0: its score, and its curvature."""
    W = np.asarray(frame.whitening)
    return W.T @ PRECISION @ (PLACE - frame.center), W.T @ PRECISION @ W


def released(rng, frame, score_scale, curvature_scale):
    score, curvature = derivatives(frame)
    noise = symmetric_noise(rng, 1, M, curvature_scale)[0]
    return Round(
        frame,
        score + score_scale * rng.normal(size=M),
        score_scale,
        curvature + noise,
        curvature_scale,
        np.ones(2),
        centred=True,
    )


def combined(here, earlier, told=None):
    """Many repetitions of releases of given (frame, score scale, curvature scale).

    :param told: the frames that `combine` is told of, instead of the earlier ones.
    """
    rng, told = np.random.default_rng(9), told or [frame for frame, _, _ in earlier]

    def one():
        rounds = [released(rng, *other)._replace(frame=frame) for other, frame in zip(earlier, told, strict=True)]
        return combine(released(rng, *here), rounds)

    runs = [one() for _ in range(COUNT)]
    for run in runs[1:]:  # they depend on the scales of the noise, not on the noise
        np.testing.assert_array_equal(run.score_covariance, runs[0].score_covariance)
        assert run.curvature_scale == runs[0].curvature_scale
    return np.stack([run.score for run in runs]), np.stack([run.curvature for run in runs]), runs[0]


def packed(matrices, scale):
    """What is N(0, I) if a symmetric matrix has noise of that scale."""
    rows, columns = np.tril_indices(M)
    return matrices[:, rows, columns] / scale * np.where(rows == columns, 1, np.sqrt(2))


def test_one_release_is_kept_as_it_is():
    rng = np.random.default_rng(6)
    one = released(rng, frame_near(PLACE), 0.5, 0.02)
    s = combine(one, [])
    np.testing.assert_allclose(s.score, one.score)
    np.testing.assert_allclose(s.score_covariance, 0.25 * np.eye(M))
    np.testing.assert_allclose(s.curvature, one.curvature)
    assert s.curvature_scale == pytest.approx(0.02)


def test_releases_in_turned_coordinates_combine_with_exactly_the_claimed_errors():
    """The same centre and the same size: nothing has to be carried over, nothing is only bounded."""
    center = PLACE + 0.02
    here = (frame_near(center), 0.5, 0.02)
    same_size = [
        Frame(center, here[0].whitening @ np.linalg.qr(np.random.default_rng(k).normal(size=(M, M)))[0]) for k in (7, 8)
    ]
    score, curvature, claimed = combined(here, [(same_size[0], 0.7, 0.03), (same_size[1], 1.5, 0.05)])
    exact = derivatives(here[0])
    assert_mean(score, exact[0])
    assert_mean(curvature, exact[1])
    assert_covariance(score, claimed.score_covariance)
    np.testing.assert_allclose(
        claimed.score_covariance, np.eye(M) / (0.5**-2 + 0.7**-2 + 1.5**-2), rtol=1e-9, atol=1e-12
    )
    assert claimed.curvature_scale == pytest.approx((0.02**-2 + 0.03**-2 + 0.05**-2) ** -0.5)
    assert_covariance(packed(curvature - exact[1], claimed.curvature_scale), np.eye(len(np.tril_indices(M)[0])))


SHIFTS = {"near": 0.02, "far": 0.1, "too far": 3.0}


@pytest.mark.statistical
@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS.keys())
def test_releases_in_other_frames_combine_without_bias_and_with_errors_as_claimed_or_smaller(shift):
    """What the curvature carries over may be wrong by its noise; that is counted, generously."""
    here = (frame_near(PLACE + 0.01, 0.2), 0.5, 0.02)
    others = [
        (frame_near(PLACE + shift * np.array([1, -1, 0.5, 0]), 0.2, 0.08, seed=6), 0.8, 0.06),
        (frame_near(PLACE - shift * np.array([0, 0.5, 1, 1]), 0.2, 0.04, seed=7), 0.6, 0.03),
    ]
    score, curvature, claimed = combined(here, others)
    exact = derivatives(here[0])
    assert_mean(score, exact[0])
    assert_mean(curvature, exact[1])
    centred = score - score.mean(0)
    values, vectors = np.linalg.eigh(claimed.score_covariance)
    standard = centred @ vectors / np.sqrt(values)
    excess = np.linalg.eigvalsh(np.cov(standard, rowvar=False)).max()
    curvature_excess = np.linalg.eigvalsh(np.cov(packed(curvature, claimed.curvature_scale), rowvar=False)).max()
    # The largest eigenvalue of a sample covariance of n standard normals in m dimensions is about (1 + sqrt(m/n))^2.
    for largest, dimension in ((excess, M), (curvature_excess, M * (M + 1) // 2)):
        assert largest < (1 + np.sqrt(dimension / COUNT)) ** 2 + 5 * np.sqrt(2 / COUNT)
    if shift < 1:  # they do help
        assert at_most(claimed.score_covariance, 0.25 * np.eye(M) * 0.99)
    else:
        np.testing.assert_allclose(claimed.score_covariance, 0.25 * np.eye(M), rtol=1e-6)


def test_a_score_carried_the_wrong_way_would_be_noticed():
    """A negative control: the earlier centre on the other side."""
    here, other = (frame_near(PLACE), 0.5, 0.02), (frame_near(PLACE + 0.03), 0.5, 0.02)
    mirrored = other[0]._replace(center=2 * here[0].center - other[0].center)
    score, _, _ = combined(here, [other], [mirrored])
    with pytest.raises(AssertionError):
        assert_mean(score, derivatives(here[0])[0])


def test_a_curvature_below_the_edge_of_its_noise_is_raised_to_it():
    frame = frame_near(PLACE)
    one = Round(frame, np.zeros(M), 0.5, np.diag([-3.0, 0.01, 1.0, 5.0]), 0.2, np.ones(2), False)
    np.testing.assert_allclose(
        np.linalg.eigvalsh(combine(one, []).curvature), [*(0.2 * np.sqrt(2 * M),) * 2, 1.0, 5.0], rtol=1e-9
    )


def test_a_score_that_the_clip_has_biased_is_not_mixed_with_one_that_is_centred():
    frame = Frame(np.zeros(M), np.eye(M))
    here = Round(frame, np.zeros(M), 1.0, np.eye(M), 0.1, np.ones(2), centred=True)
    biased = Round(frame, np.full(M, 5.0), 0.5, np.eye(M), 0.1, np.ones(2), centred=False)
    alone, both = combine(here, []), combine(here, [biased])
    np.testing.assert_array_equal(both.score, alone.score)
    np.testing.assert_array_equal(both.score_covariance, alone.score_covariance)
    assert both.curvature_scale < alone.curvature_scale
    assert np.all(combine(here, [biased._replace(centred=True)]).score > 1)
