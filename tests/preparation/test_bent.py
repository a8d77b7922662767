"""A posterior that is bent, since a product of parameters is known much better than each, is said to be so."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import DPHMC, Preparation

N = 12_000


def bitten(hours, eaten=None):
    """Lures that a fish takes at a rate, if there is one: hours are few, so ``share * rate`` is known best."""
    share = numpyro.sample("share", dist.Beta(1, 1))
    rate = numpyro.sample("rate", dist.LogNormal(-1, 1))
    with numpyro.plate("lures", hours.shape[0]):
        numpyro.sample("eaten", dist.Bernoulli(probs=share * (1 - jnp.exp(-rate * hours))), obs=eaten)


def reasons_and_growth(hours):
    eaten = np.random.default_rng(2).binomial(1, 0.6 * (1 - np.exp(-0.5 * hours)))
    kernel = DPHMC(bitten, eps=3.0, prepare=Preparation(force=True), num_iterations=1)
    kernel.prepare(hours, eaten=eaten)
    check = kernel.prepared.check
    found = [text for text in kernel.privacy.posterior.reasons if "the posterior is bent" in text]
    return found, check.turned, check.turned_noise


@pytest.mark.nightly
@pytest.mark.statistical
def test_what_knows_a_product_only_is_bent_and_what_knows_both_is_not():
    rng = np.random.default_rng(1)
    found, growth, noise = reasons_and_growth(rng.choice([0.2, 0.4], N))
    assert found, (growth, noise)
    found, growth, noise = reasons_and_growth(rng.choice([0.5, 4.0, 16.0], N))
    assert not found, (growth, noise)
