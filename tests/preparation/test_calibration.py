"""Simulation-based calibration: parameters from the prior, a table from the model, a private posterior from the table.

If posteriors are what they claim to be, the rank of the true parameter is uniform and intervals cover it as often as
they say. The preparation runs as users run it, with its budget and its noise; programs are compiled once, since all
tables have the same shape. Its surrogate posterior is integrated by importance sampling instead of NUTS, whose program
would be compiled anew for each table; that NUTS has the same posterior is tested once.

Tolerances are 5 sigma of so many repetitions; noise and tables are the same in each run.
"""

import functools

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import some_every_day
from scipy import stats
from scipy.special import logsumexp

import numpyro_dp.preparation.begin
from numpyro_dp import DPHMC, MCMC
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.preparation import Preparation, row_scores

pytestmark = pytest.mark.optimized

N, D, REPETITIONS, POINTS = 20_000, 3, 300, 2000


def logistic(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def simulated(rng):
    b, X = rng.normal(size=D), rng.normal(size=(N, D))
    return b, X, (rng.random(N) < 1 / (1 + np.exp(-X @ b))).astype(int)


@pytest.fixture
def compiled_once(monkeypatch):
    """All repetitions share the survey's programs, which take the rows as arguments, and the draws of the prior."""
    surveys, survey = [], numpyro_dp.preparation.begin.Survey

    def shared(target, cut, is_smooth):
        if not surveys:
            surveys.append(survey(target, cut, is_smooth))
        surveys[0]._target = target
        return surveys[0]

    find_cut, find_symmetries = numpyro_dp.preparation.begin.find_cut, numpyro_dp.preparation.begin.find_symmetries
    prior_draws = SeparableModel.prior_draws
    found = functools.cache(lambda function: [])

    def once(function):
        def remembered(*args):
            if not found(function):
                found(function).append(function(*args))
            return found(function)[0]

        return remembered

    monkeypatch.setattr(numpyro_dp.preparation.begin, "Survey", shared)
    monkeypatch.setattr(numpyro_dp.preparation.begin, "find_cut", once(find_cut))
    monkeypatch.setattr(numpyro_dp.preparation.begin, "find_symmetries", once(find_symmetries))
    monkeypatch.setattr(SeparableModel, "prior_draws", once(prior_draws))


def prepared_kernel(eps, X, y, noise_aware, seed):
    options = Preparation(mode="surrogate", force=True)
    kernel = DPHMC(logistic, eps=eps, num_iterations=1, prepare=options, noise_aware=noise_aware, noise_seed=seed)
    kernel.prepare(X, y)
    return kernel


def weighted_draws(chain, rng):
    """Points and weights of ``prior * S``: from normals of several widths, moved until they fit, and from the prior."""
    log_target = jax.vmap(lambda z: chain.log_prior(z) + chain.log_likelihood(z))
    prior, centers, covariance = (
        stats.multivariate_normal(np.zeros(D)),
        [chain.prepared.start],
        chain.prepared.covariance,
    )
    for _ in range(30):
        laws = [stats.multivariate_normal(center, width * covariance) for center in centers for width in WIDTHS]
        laws.append(prior)
        z = np.concatenate([law.rvs(POINTS, random_state=rng) for law in laws])
        log_proposal = logsumexp([law.logpdf(z) for law in laws], axis=0)
        log_weight = np.asarray(log_target(jnp.asarray(z, jnp.result_type(float))), float) - log_proposal
        weight = normalized(log_weight)
        if effective(weight) > 500:
            return z, weight
        # Flatter weights, of which many count, show where to look next.
        flat = next(w for w in (normalized(0.7**k * log_weight) for k in range(100)) if effective(w) > 100)
        mean = flat @ z
        covariance = np.einsum("k,ki,kj->ij", flat, z - mean, z - mean)
        centers = [mean, z[np.argmax(log_weight + log_proposal)]]
    raise NoProposalError(f"no proposal fits {chain.prepared}")


class NoProposalError(RuntimeError):
    pass


ASTRAY = 0.01  # of the searches, at most
WIDTHS = 0.1, 1.0, 10.0, 300.0


def normalized(log_weight):
    weight = np.exp(log_weight - log_weight.max())
    return weight / weight.sum()


def effective(weight):
    return 1 / np.sum(weight**2)


def ranks(eps, noise_aware=True, repetitions=REPETITIONS):
    """Posterior probability below the true value, shape (repetitions, D + 1): of each parameter and of their norm."""
    rng, found = np.random.default_rng(0), []
    for k in range(repetitions):
        b, X, y = simulated(rng)
        try:
            z, weight = weighted_draws(prepared_kernel(eps, X, y, noise_aware, seed=k)._chain, rng)
        except NoProposalError:  # a search that went astray, rarely: the posterior is a needle, and misses
            found.append(np.zeros(D + 1))
            continue
        below = np.column_stack([z < b, np.linalg.norm(z, axis=1) < np.linalg.norm(b)])
        found.append(weight @ below)
    lost = np.sum(~np.any(found, 1))
    assert lost <= stats.binom.isf(1e-6, repetitions, ASTRAY), lost
    return np.array(found)


def assert_covered(found, level=0.9):
    """Central intervals cover the parameters as often as they say, within 5 standard errors.

    The parameters of a table are counted as one: their intervals need not be independent.
    """
    covered = (np.abs(found[:, :D] - 0.5) < level / 2).mean()
    assert abs(covered - level) < 5 * np.sqrt(level * (1 - level) / len(found)), covered


@pytest.mark.statistical
@pytest.mark.parametrize("repetitions", some_every_day([REPETITIONS // 3, REPETITIONS], [REPETITIONS // 3]))
@pytest.mark.usefixtures("compiled_once")
def test_true_parameters_and_their_norm_have_uniform_ranks_and_intervals_cover_them(repetitions):
    """The norm is a direction that all tables share: it shows a bias that parameters of either sign average out."""
    found = ranks(1.0, repetitions=repetitions)
    assert_covered(found, 0.9)
    assert_covered(found, 0.5)
    p_values = [stats.kstest(column, "uniform").pvalue for column in found.T]
    assert min(p_values) > 1e-6, p_values


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_once")
def test_intervals_that_ignore_the_noise_would_be_noticed():
    """A negative control: as if the released quadratic were the likelihood."""
    with pytest.raises(AssertionError, match=r"^(np\.float64\()?0\.[1-7]"):
        assert_covered(ranks(0.12, noise_aware=False, repetitions=REPETITIONS // 3))


def location_and_scale(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 0.5))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def scale_ranks(num_rows=5000, eps=1.0, repetitions=200):
    """Rank of the log of the true scale, by a normal law around what the surrogate gives: shape (repetitions,).

    Squares tell a scale, so that clipped rows know a third of it and all pull it down.
    """
    rng, found = np.random.default_rng(0), []
    for k in range(repetitions):
        mu, log_sigma = rng.normal(), 0.5 * rng.normal()
        y = mu + np.exp(log_sigma) * rng.normal(size=num_rows)
        options = Preparation(mode="surrogate", force=True)  # without a warning where it may have gone astray
        kernel = DPHMC(location_and_scale, eps=eps, num_iterations=1, prepare=options, noise_seed=k)
        kernel.prepare(y)
        prepared = kernel.prepared
        found.append(stats.norm.cdf(log_sigma, prepared.start[1], np.sqrt(prepared.covariance[1, 1])))
    return np.array(found)


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_once")
def test_a_true_scale_has_a_uniform_rank():
    assert stats.kstest(scale_ranks(), "uniform").pvalue > 1e-6


@pytest.mark.nightly
@pytest.mark.usefixtures("compiled_once")
def test_a_scale_of_which_clipped_rows_know_a_part_would_be_noticed(monkeypatch):
    """A negative control: clipped as if they were centred."""
    monkeypatch.setattr(row_scores, "_recentred", lambda gradients, bound: (gradients, jnp.zeros_like(gradients)))
    assert stats.kstest(scale_ranks(), "uniform").pvalue < 1e-6


@pytest.mark.statistical
def test_nuts_draws_are_of_the_posterior_that_importance_sampling_integrates():
    rng = np.random.default_rng(0)
    _, X, y = simulated(rng)
    kernel = DPHMC(logistic, eps=1.0, prepare=Preparation(mode="surrogate"), noise_seed=0)
    mcmc = MCMC(kernel, num_warmup=500, num_samples=3000, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y)
    draws = np.asarray(mcmc.get_samples()["b"], float)
    z, weight = weighted_draws(mcmc.sampler._chain, rng)
    mean = weight @ z
    square = weight @ (z - mean) ** 2
    for found, expected, values in ((draws, mean, z), ((draws - mean) ** 2, square, (z - mean) ** 2)):
        ess = np.array([float(arviz.ess(column[None].copy())) for column in found.T])
        error = np.sqrt(found.var(0) / ess + weight**2 @ (values - expected) ** 2)
        assert np.all(ess > 300)
        assert np.all(np.abs(found.mean(0) - expected) < 5 * error)
