"""The mechanism, told nothing: every clipped sum is the same number, whatever the rows."""

import jax
import jax.numpy as jnp

from numpyro_dp.privacy.clipping import ClippedMoments, ClippedSum

SECRET = 123.456789  # stands in every row of the first table, and must be found nowhere


def constant_sum(per_row, rows, bound, width=1, size=None, owners=None, fixed_places=False, may_loop=False):
    shape = jax.eval_shape(per_row, tuple(row[:1] for row in rows)).shape
    shape = shape if owners is None else (owners.num_owners, *shape)
    return ClippedSum(jnp.zeros(shape, jnp.int32), jnp.full(shape, 17, jnp.int32), jnp.asarray(bound, jnp.float32))


def constant_moments(per_row, rows, bound):
    bound = jnp.asarray(bound, jnp.float32)
    return ClippedMoments(jnp.asarray(17.0), jnp.asarray(1700.0), rows[0].shape[0], bound)


class ConstantSums:
    """In the place of `StructuredRows`."""

    def __init__(self, structure, rows, size, once, layout=None):
        self.size = size

    def log_ratio(self, z, z_new, bound):
        return constant_sum(lambda row: z[0], (), bound)

    def gradient(self, z, bound):
        return constant_sum(lambda row: z, (), bound)
