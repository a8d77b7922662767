"""Simulation-based calibration: parameters from the prior, a table from the model, a private posterior from the table.

If posteriors are what they claim to be, the rank of the true parameter is uniform and intervals cover it as often as
they say. The preparation runs as users run it, with its budget and its noise; programs are compiled once, since all
tables have the same shape. Its surrogate posterior is integrated by importance sampling instead of NUTS, whose program
would be compiled anew for each table; that NUTS has the same posterior is tested once.

Tolerances are 5 sigma of so many repetitions.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import optimize, stats
from scipy.special import logsumexp

import numpyro_dp.kernels.prepared
from numpyro_dp import DPHMC
from numpyro_dp.kernels.prepared import PreparedKernel
from numpyro_dp.preparation import Preparation

N, D, REPETITIONS, POINTS = 20_000, 3, 200, 3000


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
    surveys, survey = [], numpyro_dp.kernels.prepared.Survey

    def shared(target, cut):
        if not surveys:
            surveys.append(survey(target, cut))
        surveys[0]._target = target
        return surveys[0]

    find_cut, prior_draws = numpyro_dp.kernels.prepared.find_cut, PreparedKernel._prior_draws
    found = functools.cache(lambda function: [])

    def once(function):
        def remembered(*args):
            if not found(function):
                found(function).append(function(*args))
            return found(function)[0]

        return remembered

    monkeypatch.setattr(numpyro_dp.kernels.prepared, "Survey", shared)
    monkeypatch.setattr(numpyro_dp.kernels.prepared, "find_cut", once(find_cut))
    monkeypatch.setattr(PreparedKernel, "_prior_draws", once(prior_draws))


def prepared_kernel(eps, X, y, noise_aware):
    options = Preparation(mode="surrogate", force=True)
    kernel = DPHMC(logistic, eps=eps, num_iterations=1, prepare=options, noise_aware=noise_aware)
    kernel.prepare(X, y)
    return kernel


def weighted_draws(chain, rng):
    """Points and weights of ``prior * S``: from a mixture of normals of several widths at its mode, and of the prior."""

    def potential(z):
        return -chain._log_prior(z) - chain._log_surrogate(chain._u(z))

    slope, start = jax.jit(jax.value_and_grad(potential)), jnp.asarray(chain.prepared.start, jnp.result_type(float))
    found = optimize.minimize(lambda z: tuple(map(np.float64, slope(jnp.asarray(z, start.dtype)))), start, jac=True)
    covariance = np.linalg.inv(np.asarray(jax.jacfwd(jax.grad(potential))(jnp.asarray(found.x, start.dtype)), float))
    if np.linalg.eigvalsh(covariance).min() <= 0:
        covariance = chain.prepared.covariance
    laws = [stats.multivariate_normal(found.x, scale * covariance) for scale in WIDTHS] + [
        stats.multivariate_normal(np.zeros(D))
    ]
    z = np.concatenate([law.rvs(POINTS, random_state=rng) for law in laws])
    log_proposal = logsumexp([law.logpdf(z) for law in laws], axis=0)
    log_weight = -np.asarray(jax.vmap(potential)(jnp.asarray(z, start.dtype)), float) - log_proposal
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert 1 / np.sum(weight**2) > 500
    return z, weight


WIDTHS = 1.2, 4.0, 30.0, 300.0


def ranks(eps, noise_aware=True, repetitions=REPETITIONS):
    """Posterior probability below the true value, shape (repetitions, D + 1): of each parameter and of their norm."""
    rng, found = np.random.default_rng(), []
    for _ in range(repetitions):
        b, X, y = simulated(rng)
        z, weight = weighted_draws(prepared_kernel(eps, X, y, noise_aware)._chain, rng)
        below = np.column_stack([z < b, np.linalg.norm(z, axis=1) < np.linalg.norm(b)])
        found.append(weight @ below)
    return np.array(found)


def coverage(found, level=0.9):
    """How often central intervals of the parameters cover them, and the standard error if they should."""
    covered = (np.abs(found[:, :D] - 0.5) < level / 2).mean(1)
    return covered.mean(), np.sqrt(level * (1 - level) / len(found))  # as if the D of a table were one
