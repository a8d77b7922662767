"""Continuous latents of a row or a unit, such as a person's own intercept: what is integrated out, and over what.

    ``log p(unit | z) = log integral p(w | z) prod_j p(row_j | z, w) dw``

w are all of the unit's latents together, unconstrained. They are written as everyone writes them: inside the row plate,
one for each row, or in a plate of units, from which each row picks by its unit's number (``u[person]``). The rows of a
unit are evaluated one by one with a plate of one unit, so no row can pick another unit's latents.

`Parts` are the two factors for given parameters, in two steps: what a row gives does not depend on w, and is computed
once for all nodes of the integral.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.handlers import condition

from numpyro_dp.model.drawing import CannotDrawError, is_drawable, is_unscaled, sites_at
from numpyro_dp.model.integration import Rule, log_integral
from numpyro_dp.model.tracing import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Latents:
    """The continuous latents that are integrated out.

    :ivar prototype: zeros in the shapes of their unconstrained values beside one row.
    :ivar axes: for each, the axis of its unconstrained value, from the right, that counts rows or units.
    :ivar plates: the plates of units that they are in; empty, if each row has its own.
    :ivar sizes: of these plates, as the model has them.
    :ivar codes: which of the private arguments says whose a row is, by its number among them; None without plates.
    :ivar rule: how they are integrated out.
    :ivar error: what that adds to a row's gradient, as a part of the gradient's root mean square; by synthetic rows.
    """

    prototype: dict[str, np.ndarray]
    axes: dict[str, int]
    plates: frozenset[str]
    sizes: dict[str, int]
    codes: int | None
    rule: Rule
    error: float = float("nan")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.prototype)

    @property
    def size(self) -> int:
        """q, how many numbers a row or unit has."""
        return ravel_pytree(self.prototype)[0].size

    @property
    def unravel(self) -> Callable[[jax.Array], Params]:
        return ravel_pytree(self.prototype)[1]

    def own(self, rows: Sequence) -> tuple:
        """Rows that pick the only unit there is."""
        return tuple(jnp.zeros_like(row) if k == self.codes else row for k, row in enumerate(rows))


class Parts(NamedTuple):
    """The two factors of a row, for some parameters.

    :ivar prepare: from a row (and, for a row that is drawn, two keys' words: of its unit, and of the row) to what the
        others need of it.
    :ivar start: of that, to the latents' means, where a search for the mode may begin; shape (q,).
    :ivar prior: of that and w, to log p(w | z). Of a row that is not the first of its unit it is not asked.
    :ivar given: of that and w, to log p(row | z, w).
    """

    prepare: Callable[..., Any]
    start: Callable[[Any], jax.Array]
    prior: Callable[[Any, jax.Array], jax.Array]
    given: Callable[[Any, jax.Array], jax.Array]


def integrated(
    latents: Latents, parts: Callable[[jax.Array], Parts], z: jax.Array, rows: tuple, present: jax.Array, *keys: Any
) -> jax.Array:
    """The log density of all rows of a unit.

    :param parts: from parameters to their `Parts`.
    :param rows: of the unit, each a table of one row: arrays (m, 1, ...).
    :param present: which of them count, shape (m,).
    :param keys: for rows that are drawn: the words of the unit's key (2,) and of the rows' keys (m, 2).
    """
    of_unit, of_rows = (keys[:1], keys[1:]) if keys else ((), ())

    def bind(z: jax.Array) -> tuple:
        own = parts(z)
        first = own.prepare(tuple(part[0] for part in rows), *of_unit, *(words[0] for words in of_rows))
        if present.shape[0] == 1:
            return own.start(first), lambda w: own.prior(first, w), lambda w: own.prior(first, w) + own.given(first, w)
        every = jax.vmap(lambda row, *words: own.prepare(row, *of_unit, *words))(rows, *of_rows)

        def joint(w: jax.Array) -> jax.Array:
            each = jax.vmap(lambda prepared: own.given(prepared, w))(every)
            return own.prior(first, w) + jnp.sum(jnp.where(present, each, 0))

        return own.start(first), lambda w: own.prior(first, w), joint

    return log_integral(latents.rule, bind, z)


# -- The model at one row, its latents given ---------------------------------------------------------------------------


def fix_continuous(model: Callable, names: Collection[str]) -> Callable:
    """The model with some latents observed, at values that do not matter."""

    def value(site: dict) -> jax.Array | None:
        if site["type"] != "sample" or site["name"] not in names:
            return None
        return _at_zero(site["fn"])

    return condition(model, condition_fn=value) if names else model


def latent_log_density(
    model: Callable, z: Params, w: Params, args: tuple, kwargs: dict, is_proper: bool = True
) -> jax.Array:
    """log p(w | z), Jacobians included.

    :param model: at one row and one unit.
    :param is_proper: latents that are masked (NumPyro gives an outcome that was observed such a latent beside it) have
        a standard normal law, so that they integrate to 1. In NumPyro's density they have none.
    """
    sites = sites_at(model, {**z, **w}, jax.random.key(0), args, kwargs)
    total = jnp.zeros(())
    for name, at in w.items():
        fn, value, scale = (sites[name][key] for key in ("fn", "value", "scale"))
        mask: Any = True
        transform = biject_to(fn.support)
        while isinstance(fn, dist.MaskedDistribution):
            fn, mask = fn.base_dist, mask & jnp.asarray(fn._mask)
        log_prob = fn.log_prob(value)
        if scale is not None:
            log_prob = scale * log_prob
        jacobian = _sum_to(transform.log_abs_det_jacobian(at, value), jnp.ndim(log_prob))
        if is_proper:
            others = at.size / max(log_prob.size, 1) * math.log(2 * math.pi) / 2
            normal = -_sum_to(at**2, jnp.ndim(log_prob)) / 2 - others
            total = total + jnp.sum(jnp.where(mask, log_prob + jacobian, normal))
        else:
            total = total + jnp.sum(jnp.where(mask, log_prob, 0)) + jnp.sum(jacobian)
    return total


def latent_means(model: Callable, z: Params, names: Collection[str], args: tuple, kwargs: dict) -> Params:
    """Unconstrained values of the latents at the means of their laws, each given those before it; 0 without one."""
    found: dict[str, jax.Array] = {}

    def value(site: dict) -> jax.Array | None:
        if site["type"] != "sample" or site["name"] not in names:
            return None
        transform, neutral = biject_to(site["fn"].support), _at_zero(site["fn"])
        found[site["name"]] = transform.inv(neutral)
        with contextlib.suppress(NotImplementedError, AttributeError, ValueError, TypeError):
            mean = transform.inv(jnp.broadcast_to(site["fn"].mean, neutral.shape))
            found[site["name"]] = jnp.where(jnp.isfinite(mean), mean, 0)
        return transform(found[site["name"]])

    sites_at(condition(model, condition_fn=value), z, jax.random.key(0), args, kwargs)
    return found


def draw_latents(
    model: Callable, z: Params, names: Collection[str], rng_key: jax.Array, args: tuple, kwargs: dict
) -> Params:
    """Unconstrained values of the latents, drawn from their laws.

    :param model: with its outcomes unobserved.
    :raises CannotDrawError: if a law is not known to be drawn right.
    """
    sites = sites_at(model, z, rng_key, args, kwargs)
    for name in names:
        if not is_drawable(sites[name]["fn"]) or not is_unscaled(sites[name]):
            raise CannotDrawError(f"latent site {name}")
    return {name: biject_to(sites[name]["fn"].support).inv(sites[name]["value"]) for name in sorted(names)}


def _at_zero(fn: dist.Distribution) -> jax.Array:
    """The value of the unconstrained 0."""
    transform = biject_to(fn.support)
    return transform(jnp.zeros(transform.inverse_shape(fn.shape()), jnp.result_type(float)))


def _sum_to(x: jax.Array, ndim: int) -> jax.Array:
    return jnp.sum(x, tuple(range(ndim, jnp.ndim(x))))
