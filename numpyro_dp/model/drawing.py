"""Outcomes drawn from the model, row by row: what clipped gradients are centred by.

An outcome is drawn only from a law whose sampler is known to draw from its density, and to end whatever a row holds.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpyro.distributions as dist
from numpyro.distributions import biject_to, discrete
from numpyro.handlers import seed, substitute, trace

from numpyro_dp.model.tracing import Params


class CannotDrawError(Exception):
    """The model does not say how a row's outcomes come about. Never shown: what needs to know does without."""


def draw_outcomes(
    model: Callable,
    z: Params,
    outcomes: frozenset[str],
    latents: frozenset[str],
    rng_key: jax.Array,
    args: tuple,
    kwargs: dict,
) -> dict[str, jax.Array]:
    """Values of a row's observed sites, drawn from the model at `z`.

    :param model: with these sites unobserved; other sites have one row.
    :param latents: discrete latents of the row, which are drawn on the way.
    :raises CannotDrawError: if a site is a factor, or its law is not known to be drawn right (see `is_drawable`).
    """

    sites = sites_at(model, z, rng_key, args, kwargs)
    for name in outcomes | latents:
        site = sites.get(name)
        # One mask for all that is observed of a row leaves the row out, and its draw with it; several say what is seen.
        allows_mask = name in outcomes and len(outcomes) == 1
        if site is None or site["is_observed"] or not is_drawable(site["fn"], allows_mask):
            raise CannotDrawError(f"site {name}")
        # What is drawn has the law that is not scaled: its information is off by a factor of the scale.
        if not is_unscaled(site):
            raise CannotDrawError(f"site {name} is scaled")
    return {name: sites[name]["value"] for name in outcomes}


FEW = 12


def few_outcomes(
    model: Callable, z: Params, outcomes: frozenset[str], latents: frozenset[str], args: tuple, kwargs: dict
) -> dict[str, jax.Array] | None:
    """All values that a row's outcome can have, on a new leading axis, if one site observes it and they are `FEW`.

    :param model, z, outcomes, latents: as in `draw_outcomes`.
    """
    sites = sites_at(model, z, jax.random.key(0), args, kwargs)
    site: dict[str, Any] | None = sites.get(next(iter(outcomes))) if len(outcomes) == 1 else None
    # A law that is scaled is another one than that of the rows.
    if site is None or latents or site["is_observed"] or not is_unscaled(site) or not is_drawable(site["fn"], True):
        return None
    if math.prod(site["fn"].shape()) != 1:  # NumPyro would let all of a row's answers be the same
        return None
    try:
        values = site["fn"].enumerate_support(expand=True)
    except Exception:  # not finite, or not known while a model is traced
        return None
    return {site["name"]: values} if len(values) <= FEW else None


def sites_at(model: Callable, z: Params, rng_key: jax.Array, args: tuple, kwargs: dict) -> dict[str, Any]:
    def value(site: dict) -> jax.Array | None:
        is_given = site["type"] == "sample" and site["name"] in z
        return biject_to(site["fn"].support)(z[site["name"]]) if is_given else None

    return trace(seed(substitute(model, substitute_fn=value), rng_key)).get_trace(*args, **kwargs)


def is_unscaled(site: Mapping[str, Any]) -> bool:
    """Whether a site's density counts once; where a plate's size is a number in the model, it has a scale of 1 then."""
    return site["scale"] is None or (isinstance(site["scale"], int | float) and site["scale"] == 1)


def is_drawable(fn: dist.Distribution, allows_mask: bool = False) -> bool:
    """Whether NumPyro's sampler draws from the law that the density is of, and ends, whatever a row holds.

    Not of masked laws, unless there is one mask for all that is observed of a row; not of censored ones, of which a
    draw is not what is seen; not of a user's own, of which nothing is known; not of `BinomialProbs` (a probability
    above 1 in one row would keep everyone waiting for ever) or the hurdle laws; not of
    `AsymmetricLaplaceQuantile`, which is there for a quantile's check loss: hardly anyone's rows are its draws.
    """
    if type(fn) is dist.MixtureGeneral:
        return all(map(is_drawable, fn.component_distributions))
    if type(fn) is dist.MixtureSameFamily:
        return is_drawable(fn.component_distribution)
    if type(fn) in _WRAPPERS or (allows_mask and type(fn) is dist.MaskedDistribution):
        return is_drawable(fn.base_dist, allows_mask)
    return type(fn) in _DRAWABLE


_WRAPPERS = {
    dist.ExpandedDistribution,
    dist.Independent,
    dist.LeftTruncatedDistribution,
    dist.RightTruncatedDistribution,
    dist.TransformedDistribution,
    dist.TwoSidedTruncatedDistribution,
    discrete.ZeroInflatedLogits,
    discrete.ZeroInflatedProbs,
}
_DRAWABLE_NAMES = """
    AsymmetricLaplace BernoulliLogits BernoulliProbs Beta BetaBinomial BetaProportion BinomialLogits
    CategoricalLogits CategoricalProbs Cauchy Chi2 Dirichlet Exponential Gamma GammaPoisson GeometricLogits
    GeometricProbs Gumbel HalfCauchy HalfNormal InverseGamma Laplace LogNormal LogUniform Logistic
    LowRankMultivariateNormal MultivariateNormal MultivariateStudentT NegativeBinomial2 NegativeBinomialLogits
    NegativeBinomialProbs Normal OrderedLogistic Pareto Poisson SoftLaplace StudentT Uniform VonMises Weibull
    ZeroInflatedPoisson
"""
_DRAWABLE = {getattr(dist, name) for name in _DRAWABLE_NAMES.split()}
