"""Likelihoods with sufficient statistics: one noisy vector says all that the rows have to say (Yıldırım 2017, 3.3).

The rows' log density is an exponential family in the parameters:

    ``log p(row | z) = <eta(z), T(row)> - A(z) + h(row)``

so that a jump from ``z`` to ``z'`` changes the log likelihood by ``<eta(z') - eta(z), sum_i T(row_i)> - n (A(z') -
A(z))``: the rows enter through the sum of `T` alone, which has the same bound for every jump. `family_of` reads
``eta``, ``A`` and ``T`` off a NumPyro model for the likelihoods in the table, or takes them from the user
(`ExponentialFamily`); either way they are compared with the model's own density before they are used.

What a row contributes is a vector of bounded norm, and noise of the same size in all of its directions drowns the short
ones. So statistics are moved and scaled first: ``T`` stands for ``root^-1 (T - center)``, where ``center + root @ (unit
ball)`` is the smallest ellipsoid around the values that it can take.

=========================================  ==========================  =========================================
observed site                              statistic of one value      `bounds`
=========================================  ==========================  =========================================
`Normal`                                   y and y^2; one of them if   needed
                                           loc or scale is a constant
`Gamma`                                    log y and y; one of them    needed, above 0
                                           if a parameter is constant
`Exponential`                              y                           needed, from 0
`Poisson`                                  y                           needed, from 0
`Bernoulli`, `Binomial` (probs, logits)    y                           none
`Categorical` (probs, logits)              one indicator a category    none
=========================================  ==========================  =========================================

A value outside of `bounds` is moved to the nearest bound. That makes another table, of which the sampler is exact: give
bounds that few values exceed. A row with a value that is not finite or that the likelihood excludes (a count of 2.5)
counts as the centre. Both depend on that row alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.interpreters.partial_eval import dce_jaxpr
from jax.scipy.special import gammaln, logsumexp
from numpyro.handlers import substitute, trace
from numpyro.infer.util import constrain_fn
from numpyro.primitives import Messenger

from numpyro_dp.model.arguments import compiled, quote, traced
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.synthetic import tolerance
from numpyro_dp.model.tracing import keep_sites

__all__ = ["BoundFamily", "ExponentialFamily", "UnsupportedFamilyError", "family_of"]

_TABLES = 112  # synthetic ones, of one row each
Bounds = Any  # (low, high), numbers or arrays; for a family of the user's also a dict of such pairs by argument


class UnsupportedFamilyError(ValueError):
    """The rows have no sufficient statistics, or not those given; the message names the site and the way out."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExponentialFamily:
    """Sufficient statistics as the user gives them: ``<eta, T(row)> - A + h(row)`` is one row's log density.

    :ivar statistic: T, from one row, a dict of the private arguments by name without their leading axis, to a vector
        (m,). Leaves of a nested argument have names such as ``data['y']``. Where T is not finite, the row counts as
        `center`.
    :ivar natural_parameters: eta, from a dict of the model's sites in their own (constrained) units to a vector (m,).
    :ivar log_partition: A, from the same dict to a scalar. Terms that involve no parameter may be left out.
    :ivar bound: the largest L2 norm of ``T(row) - center`` over all rows that may occur, a public constant. Rows
        beyond it are clipped, so a wrong number costs accuracy, not privacy.
    :ivar center: a public vector (m,), or one number for all entries. The middle of the values of T makes `bound`, and
        with it the noise, smallest; components of similar size make the best of that noise.

    None of these may be computed from the table.
    """

    statistic: Callable[[dict[str, jax.Array]], jax.Array]
    natural_parameters: Callable[[dict[str, jax.Array]], jax.Array]
    log_partition: Callable[[dict[str, jax.Array]], jax.Array]
    bound: float
    center: Any = 0.0

    def __post_init__(self):
        if not (0 < self.bound < math.inf):
            raise ValueError(f"bound must be a positive finite number, got {self.bound}")
        if not np.all(np.isfinite(self.center)) or np.ndim(self.center) > 1:
            raise ValueError(f"center must be a vector of finite numbers, or one such number, got {self.center}")


@dataclasses.dataclass(frozen=True, eq=False)
class BoundFamily:
    """The exponential family of one model, centred, as functions of the flat unconstrained ``z``. Holds no rows.

    ``log p(row | z) = <natural_parameters(z), statistic(row)> - log_partition(z) + h(row)``

    **Formal guarantee.** `statistic` reads the one row that it is given and public values, and is finite for rows of
    any content. Its norm is at most `bound` up to rounding (for a family of the user's: if the user is right), which
    `numpyro_dp.privacy.clipping.clipped_sum` does not rely upon.

    :ivar site: name of the observed site (several, for a family of the user's).
    :ivar size: m.
    :ivar bound: the largest norm of `statistic`.
    :ivar statistic: from one-row slices of ``separated.rows(...)`` to ``T(row) - center``, (m,).
    :ivar natural_parameters: eta(z), (m,).
    :ivar log_partition: ``A(z) - <eta(z), center>``, a scalar.
    :ivar log_partition_of_eta: the same of natural parameters, of any that the family has, not only those of some z;
        NaN where it has none, or values are weighted. None for a family of the user's.
    :ivar is_moved: from one-row slices to 1. if the row does not count as it is: a value is outside of the bounds, or
        none of the likelihood's.
    """

    site: str
    size: int
    bound: float
    statistic: Callable[[tuple], jax.Array]
    natural_parameters: Callable[[jax.Array], jax.Array]
    log_partition: Callable[[jax.Array], jax.Array]
    log_partition_of_eta: Callable[[jax.Array], jax.Array] | None
    is_moved: Callable[[tuple], jax.Array]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the natural parameters."""
        return tuple(f"eta[{k}] of {self.site}" for k in range(self.size))

    def change(self, z: jax.Array, z_new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``eta(z_new) - eta(z)`` and the same of the log partition, without the rounding of the terms.

        They are multiplied by sums over all rows. In float32, the rounding of eta and A, of a size far above that of
        their difference for a short jump, would grow with n until it drowns the log ratio. So the difference is the
        integral of the derivative along the jump (Gauss-Legendre, exact to rounding for the jumps of a sampler),
        wherever that agrees with the plain difference to the latter's precision.
        """

        def parameters(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.natural_parameters(x), self.log_partition(x)

        def derivative(t: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jax.jvp(parameters, (z + t * (z_new - z),), (z_new - z,))[1]

        before, after = parameters(z), parameters(z_new)
        rounding = 64 * jnp.finfo(z.dtype).eps * sum(jnp.sum(jnp.abs(x)) for x in (*before, *after))
        nodes, weights = (jnp.asarray(x / 2, z.dtype) for x in np.polynomial.legendre.leggauss(8))

        def difference(old: jax.Array, new: jax.Array, slopes: jax.Array) -> jax.Array:
            integral = jnp.tensordot(weights, slopes, 1)
            return jnp.where(jnp.abs(integral - (new - old)) <= rounding, integral, new - old)

        eta, log_partition = map(difference, before, after, jax.vmap(derivative)(nodes + 0.5))
        return eta, log_partition


class _Functions(NamedTuple):
    """A family, centred, before it is checked."""

    statistic: Callable[[tuple], jax.Array]  # NaN where the row is none of the family's
    parameters: Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # z -> eta, A
    unmoved: Callable[[tuple], jax.Array]  # whether the row's values are within `bounds`
    bound: float
    log_partition_of_eta: Callable[[jax.Array], jax.Array] | None = None


Build = Callable[[tuple, dict], _Functions]  # from the public arguments


def family_of(
    separated: SeparableModel,
    args: tuple,
    kwargs: dict,
    bounds: Bounds = None,
    family: ExponentialFamily | None = None,
) -> BoundFamily:
    """The exponential family that the rows of a model have, checked on synthetic rows. Reads no private value.

    :param bounds: public limits ``(low, high)`` of the observed values, numbers or arrays that broadcast against one
        row's values; see the table above for who needs them. With `family`: where the private arguments may lie
        (a pair, or a dict of pairs by argument), for a statistic that moves the values beyond.
    :param family: for likelihoods that are not in the table, and for models with covariates that have sufficient
        statistics all the same (linear regression).
    :raises UnsupportedFamilyError: if there is none, or `family` is another one than the model's.
    :raises ValueError: if `bounds` are missing, not needed, or no bounds of such values.
    """
    public = separated.without_private(args, kwargs)  # what is kept holds no rows
    name = ", ".join(sorted(separated.row_sites))
    if family is None:
        build = _ready_family(separated, *public, bounds)
    else:
        build = functools.partial(_given_family, family, separated)
    functions = build(*public)
    size = _check_shapes(separated, functions, name)
    _check_densities(separated, build, *public, name, bounds, ready=family is None)

    @functools.partial(jax.jit, inline=True)
    def statistic(row: tuple) -> jax.Array:
        centred = functions.statistic(row)
        return jnp.where(jnp.all(jnp.isfinite(centred)), centred, 0.0)

    return BoundFamily(
        site=name,
        size=size,
        bound=functions.bound,
        statistic=statistic,
        natural_parameters=lambda z: functions.parameters(z)[0],
        log_partition=lambda z: functions.parameters(z)[1],
        log_partition_of_eta=functions.log_partition_of_eta,
        is_moved=lambda row: 1.0 - functions.unmoved(row),
    )


# -- A family of the user's --------------------------------------------------------------------------------------------


def _given_family(family: ExponentialFamily, separated: SeparableModel, args: tuple, kwargs: dict) -> _Functions:
    names = [a.name for a in separated.private_arguments()]
    constrain = separated.constrain(args, kwargs)

    def statistic(row: tuple) -> jax.Array:
        values = {name: x[0] for name, x in zip(names, row, strict=True)}
        return _float(family.statistic(values)) - _float(family.center)

    def parameters(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        sites = constrain(separated.unravel(z))
        eta = _float(family.natural_parameters(sites))
        return eta, _float(family.log_partition(sites)) - jnp.sum(eta * _float(family.center))

    def unmoved(row: tuple) -> jax.Array:
        return jnp.linalg.norm(statistic(row)) <= family.bound * (1 + 1e-6)

    return _Functions(statistic, parameters, unmoved, float(family.bound))


def _origin(separated: SeparableModel) -> jax.Array:
    return ravel_pytree(separated.prototype)[0]


def _float(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.result_type(float))


# -- Likelihoods with statistics of their own --------------------------------------------------------------------------


class _Terms(NamedTuple):
    """The family of k values of one row, each for itself, and the ellipsoids that hold the features."""

    features: jax.Array  # (k, m)
    natural: jax.Array  # (k, m)
    log_partition: Callable[[jax.Array], jax.Array]  # of natural parameters (k, m): (k,)
    center: Any  # (k, m), or what broadcasts against it
    root: Any  # (k, m, m), likewise: features are center + root @ (a vector of norm 1 at most)
    support: tuple[Any, Any] = (-math.inf, math.inf)


Array = Any  # JAX's, or NumPy's where it comes from `bounds`
Known = frozenset[str]  # parameters that are public constants: terms of theirs are no statistics


def _interval(feature: Array, natural: Array, log_partition: Callable, low: Array, high: Array, **support) -> _Terms:
    """One statistic, between `low` and `high`; `log_partition` is of (k,) natural parameters."""
    center, root = (low + high) / 2, (high - low) / 2
    column = functools.partial(jnp.reshape, shape=(-1, 1))
    of_natural = _of_columns(log_partition)
    return _Terms(column(feature), column(natural), of_natural, column(center), column(root)[..., None], **support)


def _of_columns(function: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
    return lambda natural: function(*jnp.unstack(natural, axis=-1))


def _arc(features: Sequence, natural: Sequence, log_partition: Callable, curves: Sequence[np.ndarray]) -> _Terms:
    """Two statistics of one value; each of `curves` (points, 2) is where those of a value may lie."""
    center, root = map(np.array, zip(*map(_ellipse_around, curves), strict=True))
    return _Terms(jnp.stack(features, -1), jnp.stack(natural, -1), _of_columns(log_partition), center, root)


def _ellipse_around(curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest ellipse ``center + root @ (unit disc)`` through both ends of a convex arc and its farthest point.

    It is Steiner's ellipse of that triangle, enlarged until it holds the whole arc. For the arcs of this module its
    area is within 1e-4 of the smallest ellipse's.
    """
    first, last = curve[0], curve[-1]
    chord = last - first
    farthest = curve[np.argmax(np.abs((curve - first) @ (-chord[1], chord[0])))]
    corners = np.stack([first, last, farthest])
    center = corners.mean(0)
    root = np.linalg.cholesky((corners - center).T @ (corners - center) * 2 / 3)
    return center, root * np.max(np.linalg.norm(np.linalg.solve(root, (curve - center).T), axis=0))


_GRID = np.linspace(-1, 1, 2001)


def _normal(y: Array, loc: Array, scale: Array, known: Known, low: np.ndarray, high: np.ndarray) -> _Terms:
    middle, half = (low + high) / 2, (high - low) / 2
    u, loc, scale = (y - middle) / half, (loc - middle) / half, scale / half  # y^2 itself would lose digits
    precision = 1 / scale**2
    if "scale" in known:
        return _interval(u, loc * precision, lambda eta: eta**2 / precision / 2, -np.ones_like(low), np.ones_like(low))
    if "loc" in known:
        nearest, farthest = jnp.maximum(jnp.abs(loc) - 1, 0), jnp.abs(loc) + 1
        return _interval((u - loc) ** 2, -precision / 2, lambda eta: -jnp.log(-2 * eta) / 2, nearest**2, farthest**2)
    curve = np.stack([_GRID, _GRID**2], -1)
    return _arc(
        [u, u**2],
        [loc * precision, -precision / 2],
        lambda first, second: -(first**2) / (4 * second) - jnp.log(-2 * second) / 2,
        [curve] * len(low),
    )


def _gamma(y: Array, concentration: Array, rate: Array, known: Known, low: np.ndarray, high: np.ndarray) -> _Terms:
    x, rate, lowest = y / high, rate * high, low / high

    def log_partition(concentration: jax.Array, minus_rate: jax.Array) -> jax.Array:
        return gammaln(concentration) - concentration * jnp.log(-minus_rate)

    if "concentration" in known:
        of_rate = functools.partial(log_partition, concentration)
        return _interval(x, -rate, of_rate, lowest, np.ones_like(low), support=(0, math.inf))
    if "rate" in known:
        of_concentration = functools.partial(log_partition, minus_rate=-rate)
        return _interval(
            jnp.log(x), concentration, of_concentration, np.log(lowest), np.zeros_like(low), support=(0, math.inf)
        )
    points = (lowest[:, None] + 1) / 2 + (1 - lowest[:, None]) / 2 * _GRID
    terms = _arc([jnp.log(x), x], [concentration, -rate], log_partition, [*np.stack([np.log(points), points], -1)])
    return terms._replace(support=(0, math.inf))


def _exponential(y: Array, rate: Array, known: Known, low: np.ndarray, high: np.ndarray) -> _Terms:
    def log_partition(minus_rate: jax.Array) -> jax.Array:
        return -jnp.log(-minus_rate)

    return _interval(y / high, -rate * high, log_partition, low / high, np.ones_like(low), support=(0, math.inf))


def _poisson(y: Array, rate: Array, known: Known, low: np.ndarray, high: np.ndarray) -> _Terms:
    return _interval(y, jnp.log(rate), jnp.exp, low, high, support=(0, math.inf))


def _binomial(
    y: Array, known: Known, probs: Array = None, logits: Array = None, total_count: Array | None = None
) -> _Terms:
    total = jnp.ones_like(y) if total_count is None else total_count
    if logits is None:
        logits = jnp.log(probs) - jnp.log1p(-probs)
    return _interval(y, logits, lambda eta: total * jax.nn.softplus(eta), jnp.zeros_like(y), total, support=(0, total))


def _categorical(y: Array, known: Known, probs: Array = None, logits: Array = None) -> _Terms:
    logits = jnp.log(probs) if logits is None else logits
    # The indicators add up to 1: noise along that direction says nothing, and natural parameters that add up to 0
    # ignore it.
    natural = logits - jnp.mean(logits, -1, keepdims=True)
    categories = natural.shape[-1]
    features = (y[:, None] == jnp.arange(categories)).astype(y.dtype)
    root = math.sqrt(1 - 1 / categories) * np.eye(categories)
    center = np.full(categories, 1 / categories)
    return _Terms(features, natural, functools.partial(logsumexp, axis=-1), center, root, (0, categories - 1))


class _Likelihood(NamedTuple):
    terms: Callable[..., _Terms]
    parameters: tuple[str, ...]
    whole: bool = False  # values are whole numbers
    least: float | None = None  # `bounds` are needed, and start here or above
    open: bool = False  # above only


_LIKELIHOODS: dict[type, _Likelihood] = {
    dist.Normal: _Likelihood(_normal, ("loc", "scale"), least=-math.inf),
    dist.Gamma: _Likelihood(_gamma, ("concentration", "rate"), least=0, open=True),
    dist.Exponential: _Likelihood(_exponential, ("rate",), least=0),
    dist.Poisson: _Likelihood(_poisson, ("rate",), whole=True, least=0),
    dist.BernoulliProbs: _Likelihood(_binomial, ("probs",), whole=True),
    dist.BernoulliLogits: _Likelihood(_binomial, ("logits",), whole=True),
    dist.BinomialProbs: _Likelihood(_binomial, ("probs", "total_count"), whole=True),
    dist.BinomialLogits: _Likelihood(_binomial, ("logits", "total_count"), whole=True),
    dist.CategoricalProbs: _Likelihood(_categorical, ("probs",), whole=True),
    dist.CategoricalLogits: _Likelihood(_categorical, ("logits",), whole=True),
}


# -- Read off a model --------------------------------------------------------------------------------------------------


class _Outcome(NamedTuple):
    """What shapes and dependencies say about the observed site."""

    name: str
    likelihood: _Likelihood
    shape: tuple[int, ...]  # of the values of one row
    known: Known
    limits: dict[str, np.ndarray]  # low and high of each value, flat, where the likelihood needs them


def _ready_family(separated: SeparableModel, args: tuple, kwargs: dict, bounds: Bounds) -> Build:
    """How to build the family of the observed site; refuses one that has none."""
    outcome = _inspect(separated, args, kwargs, bounds)

    def build(args: tuple, kwargs: dict) -> _Functions:
        origin = _origin(separated)  # what a row contributes is the same for all parameters

        @functools.partial(jax.jit, inline=True)  # NumPyro validates concrete values only
        def of_row(z: jax.Array, row: tuple) -> tuple[jax.Array, jax.Array]:
            return _statistic(_read(outcome, separated, *separated.with_private(args, kwargs, row), z))

        def parameters(args: tuple, kwargs: dict, z: jax.Array) -> tuple[jax.Array, jax.Array]:
            return _parameters(_read(outcome, separated, args, kwargs, z))

        def log_partition_of_eta(args: tuple, kwargs: dict, eta: jax.Array) -> jax.Array:
            return _log_partition_of_eta(_read(outcome, separated, args, kwargs, origin), eta)

        return _Functions(
            statistic=lambda row: of_row(origin, row)[0],
            unmoved=lambda row: of_row(origin, row)[1],
            parameters=traced(parameters, args, kwargs),
            bound=math.sqrt(math.prod(outcome.shape)),  # each value's part has norm 1
            log_partition_of_eta=traced(log_partition_of_eta, args, kwargs),
        )

    return build


class _Values(NamedTuple):
    """The values of one row, and the family of each."""

    terms: _Terms
    weight: jax.Array  # (k,), what the log density is multiplied by
    allowed: jax.Array  # (k,), whether the likelihood gives the value a density
    kept: jax.Array  # (k,), whether it is, and within bounds


def _read(outcome: _Outcome, separated: SeparableModel, args: tuple, kwargs: dict, z: jax.Array) -> _Values:
    """Of one row. A compiler drops what is not used."""
    site, (shape, limits) = _site(separated, args, kwargs, z, outcome.name), (outcome.shape, outcome.limits)
    base, likelihood = _base(site["fn"]), outcome.likelihood
    values = jnp.broadcast_to(_float(site["value"]), shape).ravel()
    moved = jnp.clip(values, limits["low"], limits["high"]) if limits else values
    params = {}
    for name in likelihood.parameters:
        x = _float(getattr(base, name))
        of_one = x.shape[len(base.batch_shape) :]  # the categories' axis
        params[name] = jnp.broadcast_to(x, shape + of_one).reshape(values.size, *of_one)
    terms = likelihood.terms(moved, known=outcome.known, **params, **limits)
    allowed = jnp.isfinite(values) & (values >= terms.support[0]) & (values <= terms.support[1])
    if likelihood.whole:
        allowed &= values == jnp.round(values)
    weight = jnp.broadcast_to(_weight(site), shape).ravel()
    return _Values(terms, weight, allowed, allowed & (values == moved))


def _statistic(of_row: _Values) -> tuple[jax.Array, jax.Array]:
    """The values' features, each in the unit ball, side by side; and whether nothing was moved."""
    terms, root = of_row.terms, of_row.terms.root
    inverse = 1 / root if root.shape[-1] == 1 else np.linalg.inv(root)
    unit = jnp.sum(inverse * (terms.features - terms.center)[:, None, :], -1)
    return jnp.where(jnp.all(of_row.allowed), unit.ravel(), jnp.nan), jnp.all(of_row.kept)


def _parameters(of_row: _Values) -> tuple[jax.Array, jax.Array]:
    """eta and A."""
    terms, weight = of_row.terms, of_row.weight[:, None]
    eta = weight * jnp.sum(terms.root * terms.natural[:, :, None], -2)
    return eta.ravel(), _log_partition(terms, of_row.weight, terms.natural)


def _log_partition(terms: _Terms, weight: jax.Array | float, natural: jax.Array) -> jax.Array:
    return jnp.sum(weight * (terms.log_partition(natural) - jnp.sum(natural * terms.center, -1)))


def _log_partition_of_eta(of_row: _Values, eta: jax.Array) -> jax.Array:
    """A, of any eta: natural parameters that no parameters of the model may have. NaN if the weights are not 1."""
    terms = of_row.terms
    inverse = 1 / terms.root if terms.root.shape[-1] == 1 else np.linalg.inv(terms.root)
    natural = jnp.sum(inverse * eta.reshape(terms.natural.shape)[:, :, None], -2)
    return jnp.where(jnp.all(of_row.weight == 1), _log_partition(terms, 1.0, natural), jnp.nan)


def _site(separated: SeparableModel, args: tuple, kwargs: dict, z: jax.Array, name: str) -> dict:
    """NumPyro's record of a site at one row and at `z`."""
    model = keep_sites(_no_hidden_sites(separated), lambda _: True, separated.row_plates, 1)
    params = constrain_fn(model, args, kwargs, separated.unravel(z))
    return trace(substitute(model, data=params)).get_trace(*args, **kwargs)[name]


class _no_hidden_sites(Messenger):
    """Refuse a model with latent sites that are no parameters."""

    def __init__(self, separated: SeparableModel):
        self.parameters = set(separated.prototype)
        super().__init__(separated.model)

    def process_message(self, msg):
        if msg["type"] == "sample" and not msg["is_observed"] and msg["name"] not in self.parameters:
            raise UnsupportedFamilyError(
                f"site '{msg['name']}' is summed out of each row, and mixtures have no sufficient statistics: use "
                "DPPenalty, which needs none"
            )


def _weight(site: dict) -> jax.Array:
    """What `numpyro.handlers.scale` multiplies the log density with."""
    return _float(1.0 if site["scale"] is None else site["scale"])


def _base(fn: dist.Distribution) -> dist.Distribution:
    while isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        fn = fn.base_dist
    return fn


def _inspect(separated: SeparableModel, args: tuple, kwargs: dict, bounds: Bounds) -> _Outcome:
    """What the observed site is, from shapes and dependencies; refuses one that has no sufficient statistics."""
    name, *others = sorted(separated.row_sites)
    fn: dist.Distribution = None

    def outputs(z: jax.Array, rows: tuple) -> tuple[list, jax.Array, jax.Array]:
        nonlocal fn
        site = _site(separated, *separated.with_private(args, kwargs, rows), z, name)
        if others:
            raise UnsupportedFamilyError(
                f"the rows are observed at several sites, {quote([name, *others])}: give the statistics of all of them "
                "together as an ExponentialFamily, or use DPPenalty, which needs none"
            )
        fn = site["fn"]
        base = _base(fn)
        if type(base) not in _LIKELIHOODS:
            raise UnsupportedFamilyError(_not_supported(name, base))
        params = [jnp.asarray(getattr(base, key)) for key in _LIKELIHOODS[type(base)].parameters]
        return params, _weight(site), jnp.asarray(site["value"])

    closed, shapes = jax.make_jaxpr(outputs, return_shape=True)(_origin(separated), separated.rows(args, kwargs))
    likelihood, what = _LIKELIHOODS[type(_base(fn))], f"'{name}' ({type(_base(fn)).__name__})"
    labels = [*likelihood.parameters, "weight", "value"]
    reads = dict(zip(labels, map(functools.partial(_inputs_read, closed.jaxpr), range(len(labels))), strict=True))
    private = [a.name for a in separated.private_arguments()]
    for label in labels[:-1]:
        if used := [argument for argument, flag in zip(private, reads[label][1:], strict=True) if flag]:
            raise UnsupportedFamilyError(
                f"the {label} of {what} is computed from private argument {quote(used)}, so that each row has one of "
                "its own: with covariates or weights, the outcomes alone are not sufficient. Use DPPenalty, which "
                "needs no statistics, or give an ExponentialFamily whose statistic includes them"
            )
    for label in labels[-2:]:
        if reads[label][0]:
            raise UnsupportedFamilyError(
                f"the {label} of {what} is computed from latent sites, so that its statistics would depend on the "
                "parameters: let them be the distribution's, or use DPPenalty, which needs no statistics"
            )
    shape = lax.broadcast_shapes(shapes[-1].shape, fn.batch_shape + fn.event_shape)
    known = frozenset(label for label in likelihood.parameters if not reads[label][0])
    return _Outcome(name, likelihood, shape, known, _limits(bounds, likelihood, shape, what))


def _inputs_read(jaxpr: Any, output: int) -> list[bool]:
    return dce_jaxpr(jaxpr, [k == output for k in range(len(jaxpr.outvars))])[1]


def _not_supported(name: str, fn: dist.Distribution) -> str:
    if isinstance(fn, dist.MaskedDistribution):
        return (
            f"site '{name}' is masked, so that rows differ in what they say about the parameters: leave masked rows "
            "out of the table if that is public, or use DPPenalty, which needs no statistics"
        )
    ready = ", ".join(sorted(kind.__name__ for kind in _LIKELIHOODS))
    return (
        f"no sufficient statistics are known for site '{name}' ({type(fn).__name__}), only for {ready}: give them as "
        "an ExponentialFamily (or observe transformed values, such as logarithms, if that makes one of these), or use "
        "DPPenalty, which needs none"
    )


def _limits(bounds: Bounds, likelihood: _Likelihood, shape: tuple[int, ...], what: str) -> dict[str, np.ndarray]:
    """The limits of each value, flat."""
    if likelihood.least is None:
        if bounds is not None:
            raise ValueError(f"the values of {what} are bounded by themselves: leave `bounds` out")
        return {}
    if bounds is None:
        raise ValueError(
            f"the values of {what} have no bounds of their own: give `bounds=(low, high)` from public knowledge, not "
            "from the table; values beyond are moved there"
        )
    if not isinstance(bounds, tuple | list | np.ndarray | jax.Array) or len(bounds) != 2:
        raise ValueError(f"bounds of {what} must be a pair (low, high), got {bounds!r}")
    low, high = (np.asarray(b, np.float64) for b in bounds)
    least = likelihood.least
    if not (np.all(np.isfinite(low)) and np.all(np.isfinite(high)) and np.all(low < high)):
        raise ValueError(f"bounds of {what} must be finite numbers, low < high, got {bounds}")
    if np.any(low < least) or (likelihood.open and np.any(low == least)):
        raise ValueError(
            f"bounds of {what} must {'lie above' if likelihood.open else 'start at'} {least:g}"
            f"{'' if likelihood.open else ' or above'}, got {bounds}"
        )
    try:
        return {"low": np.broadcast_to(low, shape).ravel(), "high": np.broadcast_to(high, shape).ravel()}
    except ValueError:
        raise ValueError(
            f"bounds of {what} must broadcast against the values of one row, {shape}, got {bounds}"
        ) from None


# -- Is it the model's? ------------------------------------------------------------------------------------------------


def _check_shapes(separated: SeparableModel, functions: _Functions, name: str) -> int:
    """The length of the statistic, which the natural parameters must share."""
    rows = tuple(jax.ShapeDtypeStruct((1, *a.row_shape), a.dtype) for a in separated.private_arguments())
    statistic = jax.eval_shape(functions.statistic, rows).shape
    eta, log_partition = (x.shape for x in jax.eval_shape(functions.parameters, _origin(separated)))
    if len(statistic) != 1 or eta != statistic or log_partition:
        raise UnsupportedFamilyError(
            f"the family of '{name}' has a statistic (minus center) of shape {statistic}, natural parameters of shape "
            f"{eta} and a log partition of shape {log_partition}: they must be vectors (m,), (m,) and a scalar"
        )
    return statistic[0]


def _check_densities(
    separated: SeparableModel, build: Build, args: tuple, kwargs: dict, name: str, bounds: Bounds, ready: bool
) -> None:
    """Compare the changes of log densities between parameters with the model's, on synthetic rows."""
    lacks_values = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))

    def compare(args: tuple, kwargs: dict, points: jax.Array, rows: tuple) -> tuple[jax.Array, ...]:
        functions, density = build(args, kwargs), separated.row_log_density(args, kwargs)
        statistic = jax.vmap(functions.statistic)(rows)
        eta, log_partition = jax.vmap(functions.parameters)(points)
        of_model = jax.vmap(jax.vmap(density, (0, None)), (None, 0))(points, rows)
        magnitude = jnp.abs(statistic) @ jnp.abs(eta).T + jnp.abs(log_partition) + jnp.abs(of_model)
        return of_model, statistic @ eta.T - log_partition, magnitude, jax.vmap(functions.unmoved)(rows)

    rng = np.random.default_rng(0)
    points = rng.uniform(-1, 1, (4, separated.num_params)).astype(_origin(separated).dtype)
    rows = tuple(
        _synthetic_rows(a.dtype, a.row_shape, bounds.get(a.name) if isinstance(bounds, Mapping) else bounds, ready, rng)
        for a in separated.private_arguments()
    )
    of_model, of_family, magnitude, unmoved = compiled(compare, args, kwargs, points, rows)(points, rows)
    usable = unmoved & np.all(np.isfinite(of_model) & np.isfinite(of_family), 1)
    if not usable.any():
        if lacks_values:
            return
        raise UnsupportedFamilyError(
            f"the family of '{name}' cannot be compared with the model: on no synthetic row are the log density and "
            "the statistic finite and within their bounds. Check `bound`, `center` and `bounds`"
        )
    change_of_model, change_of_family = (np.diff(x[usable], axis=1) for x in (of_model, of_family))
    excess = np.abs(change_of_model - change_of_family) / (1 + magnitude[usable, 1:] + magnitude[usable, :-1])
    if np.max(excess) > tolerance(separated.arguments, of_model.dtype):
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        hint = (
            "The model does more with this site than its distribution says: use DPPenalty, which needs no statistics"
            if ready
            else "Check `statistic`, `natural_parameters` and `log_partition`: only terms without parameters may be "
            "left out. If the statistic moves extreme values, give `bounds` within which it moves none"
        )
        raise UnsupportedFamilyError(
            f"the family of '{name}' is not the model's: between two points, the log density of a synthetic row "
            f"changes by {change_of_model[worst]:.6g} in the model and by {change_of_family[worst]:.6g} in the "
            f"family. {hint}"
        )


def _synthetic_rows(
    dtype: Any, shape: tuple[int, ...], bounds: Bounds, ready: bool, rng: np.random.Generator
) -> np.ndarray:
    """One argument of one-row tables of many kinds, stacked: (tables, 1, *shape)."""
    size = (16, 1, *shape)
    kinds: list[np.ndarray] = [rng.normal(size=size), rng.uniform(size=size), rng.gamma(2.0, size=size)]
    kinds += [rng.integers(0, 2, size), rng.integers(0, 6, size)]
    if bounds is not None:
        # Those of a likelihood are the observed values'; which arguments give such a value is the model's affair.
        low, high = (np.min(bounds[0]), np.max(bounds[1])) if ready else bounds
        inside = rng.uniform(low, high, size)
        whole = np.round(inside)
        within = [inside, np.where((low <= whole) & (whole <= high), whole, inside)]
        kinds = [*kinds, *within] if ready else within
    values = np.resize(np.concatenate(kinds), (_TABLES, 1, *shape))
    return values > np.median(values) if jnp.issubdtype(dtype, jnp.bool_) else values.astype(dtype)
