"""Outcomes drawn from the model, row by row: what clipped gradients are centred by.

An outcome is drawn only from a law whose sampler is known to end, whatever a row holds, and to draw from its density;
where that is not known, numbers must bear it out (`numpyro_dp.model.drawing_checks`).
"""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.extend.core import Jaxpr
from numpyro.distributions import biject_to, discrete
from numpyro.handlers import seed, substitute, trace
from numpyro.primitives import Messenger

from numpyro_dp.model.tracing import Params
from numpyro_dp.privacy.isolation import jaxprs_in


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
    is_checked: bool = False,
) -> dict[str, jax.Array]:
    """Values of a row's observed sites, drawn from the model at `z`.

    :param model: with these sites unobserved; other sites have one row.
    :param latents: discrete latents of the row, which are drawn on the way.
    :param is_checked: whether masks may hide some of several sites (see `are_all_seen`), and laws may be the user's own
        (see `is_own`). A mask that hides all that is observed of a row leaves the row out, and its draw with it.
    :raises CannotDrawError: if a site is a factor, or its law is not known to be drawn right (see `is_drawable`).
    """

    sites = sites_at(model, z, rng_key, args, kwargs)
    for name in outcomes | latents:
        site = sites.get(name)
        allows_mask = name in outcomes and (is_checked or len(outcomes) == 1)
        if site is None or site["is_observed"] or not is_drawable(site["fn"], allows_mask, is_checked):
            raise CannotDrawError(f"site {name}")
    if latents and not all(is_unscaled(sites[name]) for name in outcomes | latents):
        raise CannotDrawError("a sum over values is of densities that are scaled")
    return {name: sites[name]["value"] for name in outcomes}


def leaves_of(
    model: Callable, z: Params, outcomes: frozenset[str], row: tuple, args: tuple, kwargs: dict
) -> dict[str, int]:
    """Which of a row's arrays each of its observed sites observes.

    :param model: with all that it observes, at one row.
    :param row: the arrays, in `args` and `kwargs`.
    :raises CannotDrawError: if a site observes something that is computed from them.
    """
    sites = sites_at(model, z, jax.random.key(0), args, kwargs)
    found = {name: [k for k, leaf in enumerate(row) if sites[name]["value"] is leaf] for name in outcomes}
    if not all(found.values()):
        raise CannotDrawError("a site observes what is computed from arguments")
    return {name: leaves[0] for name, leaves in found.items()}


def are_all_seen(
    model: Callable, z: Params, outcomes: frozenset[str], rng_key: jax.Array, args: tuple, kwargs: dict
) -> jax.Array | None:
    """Whether no mask hides one of a row's observed sites; None where there is no mask, or a single site.

    A mask may say that an outcome is missing: then the others may be drawn beside it. Or it says which of several sites
    tells of the same outcome, as where those beyond a limit of detection have a site of their own: then no row has all.

    :param model, z, outcomes: as in `draw_outcomes`.
    """
    sites = sites_at(model, z, rng_key, args, kwargs)
    if len(outcomes) == 1 or not any(_is_masked(sites[name]["fn"]) for name in outcomes):
        return None
    seen = [jnp.any(sites[name]["fn"].log_prob(sites[name]["value"]) != 0) for name in sorted(outcomes)]
    return jnp.all(jnp.stack(seen))


def weight_of(model: Callable, z: Params, outcomes: frozenset[str], args: tuple, kwargs: dict) -> jax.Array | None:
    """How often a row's density counts (`handlers.scale`), as a survey's weights say; None if once.

    :param model: at one row.
    :param z, outcomes: as in `draw_outcomes`.
    :raises CannotDrawError: if what is observed of the row counts differently.
    """
    sites = sites_at(model, z, jax.random.key(0), args, kwargs)
    first, *others = (sites[name] for name in sorted(outcomes))
    if all(map(is_unscaled, (first, *others))):
        return None
    scale = first["scale"]
    if any(site["scale"] is not scale for site in others) or jnp.size(scale) != 1:
        raise CannotDrawError("outcomes are scaled in different ways")
    return jnp.reshape(scale, ())


FEW = 12


def few_outcomes(
    model: Callable, z: Params, outcomes: frozenset[str], latents: frozenset[str], args: tuple, kwargs: dict
) -> dict[str, jax.Array] | None:
    """All values that a row's outcome can have, on a new leading axis, if one site observes it and they are `FEW`.

    :param model, z, outcomes, latents: as in `draw_outcomes`.
    """
    sites = sites_at(model, z, jax.random.key(0), args, kwargs)
    site: dict[str, Any] | None = sites.get(next(iter(outcomes))) if len(outcomes) == 1 else None
    if site is None or latents or site["is_observed"] or not is_drawable(site["fn"], True):
        return None
    if math.prod(site["fn"].shape()) != 1:  # NumPyro would let all of a row's answers be the same
        return None
    try:
        values = site["fn"].enumerate_support(expand=True)
    except Exception:  # not finite, or not known while a model is traced
        return None
    return {site["name"]: values} if len(values) <= FEW else None


def is_count(
    model: Callable, z: Params, outcomes: frozenset[str], latents: frozenset[str], args: tuple, kwargs: dict
) -> bool:
    """Whether a row's outcome is one count, of which 0 is the least, and can be drawn.

    :param model: at one row.
    :param z, outcomes, latents: as in `draw_outcomes`.
    """
    if len(outcomes) != 1 or latents:
        return False
    (law,) = laws_of(model, z, outcomes, args, kwargs)
    is_one = math.prod(law.shape()) == 1 and _counts_from_zero(law.support)
    return is_one and not is_own(law) and is_drawable(_ending(law), True)


def _counts_from_zero(support: Any) -> bool:
    least = getattr(support, "lower_bound", None)
    return support.is_discrete and isinstance(least, int) and least == 0


def laws_of(model: Callable, z: Params, outcomes: frozenset[str], args: tuple, kwargs: dict) -> list[dist.Distribution]:
    """Of a row's outcomes, as they are drawn."""
    sites = sites_at(model, z, jax.random.key(0), args, kwargs)
    return [sites[name]["fn"] for name in outcomes]


def is_discrete(fn: dist.Distribution) -> bool:
    """Whether a law is of counts, or of few values. One of the user's own may not say what its support is."""
    return getattr(fn.support, "is_discrete", False)


def keeps_total(fn: dist.Distribution) -> bool:
    """Whether what is drawn are counts of categories, with the total that the model was given."""
    return type(_base(fn)) is _Multinomial


def _base(fn: dist.Distribution) -> dist.Distribution:
    return _base(fn.base_dist) if type(fn) in _SHAPED else fn


def sites_at(model: Callable, z: Params, rng_key: jax.Array, args: tuple, kwargs: dict) -> dict[str, Any]:
    def value(site: dict) -> jax.Array | None:
        is_given = site["type"] == "sample" and site["name"] in z
        return biject_to(site["fn"].support)(z[site["name"]]) if is_given else None

    return trace(seed(substitute(_always_end(model), substitute_fn=value), rng_key)).get_trace(*args, **kwargs)


def is_unscaled(site: Mapping[str, Any]) -> bool:
    """Whether a site's density counts once; where a plate's size is a number in the model, it has a scale of 1 then."""
    return site["scale"] is None or (isinstance(site["scale"], int | float) and site["scale"] == 1)


def is_drawable(fn: dist.Distribution, allows_mask: bool = False, allows_own: bool = False) -> bool:
    """Whether NumPyro's sampler draws from the law that the density is of, and ends, whatever a row holds.

    Not of censored laws, of which a draw is not what is seen; not of `AsymmetricLaplaceQuantile`, which is there for a
    quantile's check loss: hardly anyone's rows are its draws. Of a user's own it is known that the sampler ends, if it
    has no loop; that it draws from the density is for numbers to tell (`is_own`).

    :param fn: as `sites_at` has it.
    """
    if type(fn) in _HURDLES:
        return not fn.support.is_discrete and is_drawable(fn.base_dist)
    if type(fn) is dist.MixtureGeneral:
        return all(map(is_drawable, fn.component_distributions))
    if type(fn) is dist.MixtureSameFamily:
        return is_drawable(fn.component_distribution)
    if type(fn) in _WRAPPERS or (allows_mask and type(fn) is dist.MaskedDistribution):
        return is_drawable(fn.base_dist, allows_mask, allows_own)
    return type(fn) in _DRAWABLE or (
        allows_own and is_own(fn) and not _loops(jax.make_jaxpr(fn.sample)(jax.random.key(0)).jaxpr)
    )


def is_own(fn: dist.Distribution) -> bool:
    """Whether a law is of a class that is not NumPyro's, or made of one."""
    if type(fn) in _WRAPPERS or type(fn) is dist.MaskedDistribution:
        return is_own(fn.base_dist)
    return type(fn) not in _REPLACED and not type(fn).__module__.startswith("numpyro.")


def _loops(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name in ("while", "random_gamma") or any(map(_loops, jaxprs_in(eqn.params))) for eqn in jaxpr.eqns
    )


def _is_masked(fn: dist.Distribution) -> bool:
    return type(fn) is dist.MaskedDistribution or (type(fn) in _WRAPPERS and _is_masked(fn.base_dist))


_WRAPPERS = {
    dist.ExpandedDistribution,
    dist.FoldedDistribution,
    dist.Independent,
    dist.LeftTruncatedDistribution,
    dist.RightTruncatedDistribution,
    dist.TransformedDistribution,
    dist.TwoSidedTruncatedDistribution,
    discrete.ZeroInflatedLogits,
    discrete.ZeroInflatedProbs,
}
_DRAWABLE_NAMES = """
    AsymmetricLaplace BernoulliLogits BernoulliProbs Beta BetaBinomial BetaNegativeBinomial BetaProportion
    BinomialLogits CategoricalLogits CategoricalProbs Cauchy Chi2 Dagum Dirichlet DoublyTruncatedPowerLaw Exponential
    Gamma GammaPoisson GaussianRandomWalk GeometricLogits GeometricProbs Gompertz Gumbel HalfCauchy HalfNormal
    InverseGamma Kumaraswamy Laplace Levy LogNormal LogUniform Logistic LowerTruncatedPowerLaw
    LowRankMultivariateNormal MatrixNormal MultivariateNormal MultivariateStudentT NegativeBinomial2
    NegativeBinomialLogits NegativeBinomialProbs Normal OrderedLogistic Pareto Poisson ProjectedNormal SoftLaplace
    StudentT Uniform VonMises Weibull ZeroInflatedPoisson
"""
_HURDLE_NAMES = "HurdleGamma HurdleLogNormal HurdleLogits HurdlePoisson HurdleProbs"
_HURDLES = {getattr(dist, name) for name in _HURDLE_NAMES.split() if hasattr(dist, name)}  # since NumPyro 0.22


# -- Samplers that end -------------------------------------------------------------------------------------------------


class _always_end(Messenger):
    """Draw from the same laws by samplers that end whatever a row holds."""

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["value"] is None:
            msg["fn"] = _ending(msg["fn"])


def _ending(fn: dist.Distribution) -> dist.Distribution:
    """The same law, by another sampler where NumPyro's may not end."""
    if type(fn) is dist.BinomialProbs or (type(fn) is dist.BinomialLogits and _is_other(fn.total_count)):
        return _Binomial(fn)
    if type(fn) in _HURDLES and fn.support.is_discrete and _events_of(fn.base_dist) is not None:
        return _HurdleCounts(fn)
    if type(fn) in _MULTINOMIAL and fn.event_shape[0] <= FEW:
        return _Multinomial(fn)
    if type(fn) in _SHAPED and (base := _ending(fn.base_dist)) is not fn.base_dist:
        fn = copy.copy(fn)
        fn.base_dist = base
    return fn


_SHAPED = (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)


class _Binomial(dist.BinomialProbs):
    """With a probability within [0, 1]: beyond it a row has no density, and NumPyro's sampler no end."""

    def __init__(self, fn: Any):
        total = _whole(fn.total_count) if _is_other(fn.total_count) else fn.total_count
        super().__init__(jnp.clip(jnp.nan_to_num(fn.probs), 0, 1), total)


def _is_other(x: Any) -> bool:
    """Whether it is written as something else than JAX's usual whole numbers, which NumPyro's sampler needs."""
    return jnp.result_type(x) != jnp.result_type(int)


def _whole(x: Any) -> jax.Array:
    return jnp.clip(jnp.nan_to_num(x), 0, 2**30).astype(int)


_MULTINOMIAL = {dist.DirichletMultinomial, dist.MultinomialLogits, dist.MultinomialProbs}


class _Multinomial(dist.Distribution):
    """One category after the other, of what is left: NumPyro's sampler has to know the largest total beforehand."""

    support = dist.constraints.independent(dist.constraints.nonnegative_integer, 1)

    def __init__(self, fn: Any):
        self._fn = fn
        super().__init__(fn.batch_shape, fn.event_shape)

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        shape, size = sample_shape + self.batch_shape, self.event_shape[0]
        of_shares, *keys = jax.random.split(key, size)
        if isinstance(self._fn, dist.DirichletMultinomial):
            shares = jax.random.dirichlet(of_shares, self._fn.concentration, shape)
        else:
            shares = jnp.broadcast_to(self._fn.probs, (*shape, size))
        left = jnp.broadcast_to(_whole(self._fn.total_count), shape)
        beyond = jnp.cumsum(shares[..., ::-1], -1)[..., ::-1]  # of this category and those that follow
        counts = []
        for k, own_key in enumerate(keys):
            law = dist.BinomialProbs(shares[..., k] / beyond[..., k], left)
            counts.append(_Binomial(law).sample(own_key))
            left = left - counts[-1]
        return jnp.stack([*counts, left], -1)


class _HurdleCounts(dist.Distribution):
    """Counts above a hurdle, without the rejections of zeros by which NumPyro draws: of a tiny rate all are zeros.

    A count is how often something happened in a time of 1. The first time is drawn on condition that it is before the
    end, and what follows by the law of the time that is left.
    """

    support = dist.constraints.nonnegative_integer

    def __init__(self, fn: Any):
        events = _events_of(fn.base_dist)
        assert events is not None
        self._gate, self._events = fn.gate, events
        super().__init__(fn.batch_shape)

    def sample(self, key: jax.Array, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        shape = sample_shape + self.batch_shape
        of_gate, of_first, of_rate, of_rest = jax.random.split(key, 4)
        rate, u = jnp.broadcast_to(self._events.rate, shape), jax.random.uniform(of_first, shape)
        if self._events.concentration is None:
            first = -jnp.log1p(u * jnp.expm1(-rate)) / rate
        else:  # the rate itself is drawn, of a gamma law
            concentration = jnp.broadcast_to(self._events.concentration, shape)
            some = -jnp.expm1(-concentration * jnp.log1p(1 / rate))
            first = rate * jnp.expm1(-jnp.log1p(-u * some) / concentration)
            rate = jax.random.gamma(of_rate, concentration + 1) / (rate + first)
        rest = jax.random.poisson(of_rest, jnp.nan_to_num(rate * jnp.clip(1 - first, 0, 1)))
        return jnp.where(jax.random.bernoulli(of_gate, self._gate, shape), 0, 1 + rest)


class _Events(NamedTuple):
    """What is counted: events at a rate, which is drawn itself of a gamma law if that has a concentration."""

    rate: Any
    concentration: Any = None


def _events_of(base: dist.Distribution) -> _Events | None:
    """What a law of counts counts, if it is one of these."""
    base = base.base_dist if type(base) is dist.ExpandedDistribution else base
    if type(base) is dist.Poisson:
        return _Events(base.rate)
    if isinstance(base, dist.GammaPoisson) and type(base).__module__ == dist.GammaPoisson.__module__:
        return _Events(base.rate, base.concentration)
    return None


_REPLACED = {_Binomial, _HurdleCounts, _Multinomial}
_DRAWABLE = {*_REPLACED, *(getattr(dist, name) for name in _DRAWABLE_NAMES.split())}
