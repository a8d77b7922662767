"""The state of a private chain, and where it starts: by public numbers."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro.infer.hmc_util import HMCAdaptState
from numpyro.util import is_prng_key

from numpyro_dp.kernels.settings import Settings
from numpyro_dp.model.separable import SeparableModel


class DPState(NamedTuple):
    """State of a private chain. Every field is released: it depends on the table through noisy clipped sums only.

    :ivar i: iterations done, warmup included.
    :ivar z: unconstrained parameters, a dict keyed by site.
    :ivar accepted: whether the last proposal was accepted.
    :ivar accept_prob: estimate of its acceptance probability from the *noisy* log ratio.
    :ivar mean_accept_prob: its running mean since the start or the end of warmup.
    :ivar noise_scale: standard deviation of the privacy noise in the last log ratio (about 1 to 2.5 is best; far above,
        the chain stands still); for kernels without an acceptance test, in each entry of the last gradient.
    :ivar exhausted: the budget did not allow this iteration; `z` is a copy of the one before and no draw.
    :ivar diverging: NUTS's warning that its trajectory went astray, where a prepared kernel runs NUTS on a released
        likelihood.
    :ivar adapt_state: NumPyro's ``HMCAdaptState``: step size, inverse mass matrix and their adaptation.
    :ivar carry: what the algorithm itself carries along; see the kernel.
    :ivar rng_key: key of the public randomness (proposals, accept draws). Privacy noise does not come from it.
    :ivar origin: hash of where the chain began and of the length of its warmup, shape (2,): with `noise_seed`, chains
        that begin elsewhere ask something else, and so must not have the same noise.
    """

    i: jax.Array
    z: dict[str, jax.Array]
    accepted: jax.Array
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    noise_scale: jax.Array
    exhausted: jax.Array
    diverging: jax.Array
    adapt_state: Any
    carry: Any
    rng_key: Any
    origin: jax.Array


def initial_params(
    settings: Settings, rng_key: jax.Array, init_params: Any, separated: SeparableModel, args: tuple, kwargs: dict
) -> dict[str, jax.Array]:
    """Unconstrained values of the sites: the user's, or by the strategy from the prior. No row is looked at.

    :param rng_key: one, or one for each chain.
    """
    if init_params is None:
        params, valid = separated.init_params(rng_key, cast(Callable, settings.init_strategy), args, kwargs)
        if not isinstance(valid, jax.core.Tracer) and not bool(jnp.all(valid)):
            raise ValueError(
                "init_strategy found no starting point at which the log prior is finite (the rows are not looked "
                "at): give `init_params=` or `init_strategy=init_to_value(values=...)`"
            )
        return params
    require_init_params(init_params, separated, () if is_prng_key(rng_key) else (rng_key.shape[0],))
    return {name: jnp.asarray(init_params[name], zero.dtype) for name, zero in separated.prototype.items()}


def require_init_params(init_params: Any, separated: SeparableModel, chains: tuple[int, ...]) -> None:
    """Check that there is a starting value for each site.

    :param chains: the leading axis of each value, if there is one.
    :raises ValueError: if they are not values for all sites.
    """
    expected = {name: (*chains, *jnp.shape(zero)) for name, zero in separated.prototype.items()}
    if not isinstance(init_params, Mapping):
        raise ValueError(f"init_params must be a dict of unconstrained values for the sites {sorted(expected)}")
    found = {name: jnp.shape(value) for name, value in init_params.items()}
    if found != expected:
        raise ValueError(
            f"init_params must hold unconstrained values of shapes {expected} (a leading axis for the chains "
            f"counts), got {found}"
        )


def require_fields(extra_fields: Any, sites: Collection[str], released: Collection[str], carry: Callable) -> None:
    """Refuse fields that no state has.

    :param sites: unconstrained ones, which the state holds.
    :param released: those that the draws have, from which ``~z.site`` takes one out.
    :param carry: gives what the state will hold there, whatever its leaves are. Called where a field is within it: to
        trace NUTS takes a second.
    :raises ValueError: naming the field, and what there is.
    """
    if not isinstance(extra_fields, tuple | list):
        raise ValueError(f"extra_fields must be a tuple of names, such as ('accept_prob',), got {extra_fields!r}")
    for field in extra_fields:
        first, *rest = field.removeprefix("~").split(".")
        if field.startswith("~"):
            known, is_there = [f"~z.{site}" for site in released], first == "z" and rest and rest[0] in released
        elif first not in DPState._fields or not rest:
            known, is_there = [*DPState._fields], first in DPState._fields
        elif first == "carry":
            held = carry()
            known = [f"carry.{name}" for name in getattr(held, "_fields", ())] or ["carry"]
            is_there = _has(held, rest)
        else:
            within = {"z": sites, "adapt_state": HMCAdaptState._fields}.get(first, ())
            known, is_there = [f"{first}.{name}" for name in within] or [first], rest[0] in within
        if not is_there or (len(rest) > 1 and first != "carry"):
            raise ValueError(
                f"extra_fields names {field!r}, which is not there; there is {', '.join(known)}. (Other fields of "
                "NumPyro's kernels, such as potential_energy, would tell about the rows.)"
            )


def _has(structure: Any, path: list[str]) -> bool:
    """Whether named tuples within one another have the fields of a path."""
    for name in path:
        if name not in getattr(structure, "_fields", ()):
            return False
        structure = getattr(structure, name)
    return True


def flat_mass_matrix(settings: Settings, separated: SeparableModel, dtype: Any) -> jax.Array | None:
    """The user's inverse mass matrix over the flat parameter vector: (d,), or (d, d) with `dense_mass`."""
    given = settings.inverse_mass_matrix
    if given is None:
        return None
    size = separated.num_params
    if isinstance(given, Mapping):
        unknown = set(given) - set(separated.prototype)
        if unknown:
            raise ValueError(
                f"inverse_mass_matrix names {sorted(unknown)}, but the sites are {sorted(separated.prototype)}"
            )
        matrix = separated.ravel(
            {
                name: jnp.broadcast_to(jnp.asarray(given.get(name, 1.0), dtype), jnp.shape(zero))
                for name, zero in separated.prototype.items()
            }
        )
    else:
        matrix = jnp.asarray(given, dtype)
        matrix = jnp.full((size,), matrix) if matrix.ndim == 0 else matrix
    if matrix.shape not in ((size,), (size, size)):
        raise ValueError(
            f"inverse_mass_matrix has shape {matrix.shape}; the model has {size} unconstrained parameters: give a "
            f"number, ({size},) for a diagonal, ({size}, {size}) for a dense one, or a dict by site"
        )
    if settings.dense_mass and matrix.ndim == 1:
        matrix = jnp.diag(matrix)
    if not settings.dense_mass and matrix.ndim == 2:
        raise ValueError("a dense inverse_mass_matrix needs dense_mass=True")
    return matrix


def origin_of(z: jax.Array, num_warmup: int) -> jax.Array:
    """64 bits that are others for another start or another length of the warmup."""
    z = z.astype(jnp.promote_types(z.dtype, jnp.float32))  # of at least one word
    words = jnp.ravel(lax.bitcast_convert_type(z, jnp.uint32))
    key = random.key(num_warmup, impl="threefry2x32")
    return random.key_data(lax.scan(lambda key, word: (random.fold_in(key, word), None), key, words)[0])


def batched_with(tree: Any) -> jax.Array:
    """A number of every array that a step depends on; see `ask_ledger`. Nobody reads it."""
    leaves = jax.tree.leaves(tree)
    return jnp.concatenate([jnp.ravel(leaf[:1] if leaf.ndim else leaf)[:1].astype(jnp.float32) for leaf in leaves])
