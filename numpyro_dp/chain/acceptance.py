"""The penalty test: an accept decision that is exact under Gaussian noise in the log ratio.

Accepting where ``log u < R - sigma^2 / 2``, with R the log acceptance ratio plus noise ``N(0, sigma^2)``, leaves the
target invariant as the test without noise does (Ceperley and Dewing 1999).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import random

from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.privacy.draws import Draw


def penalty_test(
    target: PrivateTarget,
    draw: Draw,
    rng_key: jax.Array,
    z: jax.Array,
    z_new: jax.Array,
    public_log_ratio: jax.Array,
    clip_ratio: float | Callable,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The accept decision for ``z -> z_new``, shared by all penalty kernels.

    :param public_log_ratio: the part of the log acceptance ratio that no row enters: prior, proposal, momentum.
    :param clip_ratio: each row's log ratio is clipped to this times the distance; or, if it is a function, to its value
        for the sites' values at both places, in the order in which it is larger. Where that is no positive number, the
        proposal is rejected.
    :return: accepted; estimated acceptance probability, from the noisy ratio; noise standard deviation.
    """
    bound: jax.Array | float
    if callable(clip_ratio):
        assert target.sites is not None
        # Noise of another size on the way back would make the test another one there.
        ends = target.sites(z), target.sites(z_new)
        there, back = (jnp.asarray(clip_ratio(*pair), z.dtype) for pair in (ends, ends[::-1]))
        bound = jnp.maximum(there, back)
        usable = (bound > 0) & jnp.isfinite(bound)
        bound, public_log_ratio = jnp.where(usable, bound, 0.0), jnp.where(usable, public_log_ratio, -jnp.inf)
    else:
        bound = clip_ratio if math.isinf(clip_ratio) else clip_ratio * jnp.linalg.norm(z_new - z)
    ratio, scale = target.log_ratio(draw, z, z_new, bound)
    return accept_with_penalty(rng_key, ratio + public_log_ratio, scale, z_new)


def accept_with_penalty(
    rng_key: jax.Array, log_ratio: jax.Array, scale: jax.Array, z_new: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accept by a log ratio that carries normal noise of standard deviation `scale`; see `penalty_test`."""
    log_accept = log_ratio - scale**2 / 2
    # A jump to nowhere is a matter of released values; what the rows said about it is not used.
    possible = jnp.all(jnp.isfinite(z_new)) & ~jnp.isnan(log_accept)
    log_accept = jnp.where(possible, log_accept, -jnp.inf)
    # The logarithm of a float32 uniform number is -inf once in 2**23 draws, and would accept anything.
    accepted = -random.exponential(rng_key, dtype=z_new.dtype) < log_accept
    return accepted, jnp.exp(jnp.minimum(log_accept, 0.0)), jnp.asarray(scale, log_ratio.dtype)
