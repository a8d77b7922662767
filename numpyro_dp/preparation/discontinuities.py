"""Whether the likelihood has steps, of which derivatives show nothing: no private row is asked.

Looked for only where the model compares parameters with something (`Cut.has_thresholds`): far out in a prior, rounding
makes steps, too.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

_POINTS = 257
_REFINEMENTS = 2
_REACH = 3.0
"""Prior standard deviations to each side."""
_LEFT = 0.5
"""Of its height a step has so much left, where the points around it come closer; a slope has a 256th."""
_LEAST = 1e-3
"""Of a row's log density, and of the log density itself: less may be rounding."""


def find_discontinuities(
    density: Callable[[jax.Array, tuple], jax.Array],
    rows: tuple,
    names: Sequence[str],
    bases: np.ndarray,
    sd: np.ndarray,
) -> list[str]:
    """Names of coordinates along which a row's log density jumps.

    :param density: of phi and a row.
    :param rows: synthetic ones, on a leading axis.
    :param bases: values phi around which to look, shape (k, m), such as draws of the prior.
    :param sd: of the prior, shape (m,).
    """
    dtype = jnp.result_type(float)
    around, axes = jnp.asarray(bases, dtype), jnp.eye(len(sd), dtype=dtype)

    @jax.jit
    def along(low: jax.Array, high: jax.Array, rows: tuple) -> tuple:
        """The largest difference between neighbours on a grid, the place, and how large the values are."""

        def one(base: jax.Array, axis: jax.Array, low: jax.Array, high: jax.Array, row: tuple) -> tuple:
            at = low + (high - low) * jnp.linspace(0, 1, _POINTS, dtype=dtype)
            values = jax.vmap(lambda t: density(base + t * axis, row))(at)
            differences = jnp.nan_to_num(jnp.abs(jnp.diff(values)), nan=0, posinf=0)
            k = jnp.argmax(differences)
            size = jnp.where(jnp.isfinite(values[k]), jnp.abs(values[k]), jnp.inf)
            return differences[k], at[k], at[k + 1], size

        over_rows = jax.vmap(one, (None, None, 0, 0, 0))
        over_axes = jax.vmap(over_rows, (None, 0, 0, 0, None))
        return jax.vmap(over_axes, (0, None, 0, 0, None))(around, axes, low, high, rows)

    num_rows = rows[0].shape[0]
    reach = np.broadcast_to(_REACH * sd[None, :, None], (len(bases), len(sd), num_rows))
    low, high = (jnp.asarray(side, dtype) for side in (-reach, reach))
    heights = []
    for _ in range(1 + _REFINEMENTS):
        height, low, high, size = along(low, high, rows)
        heights.append(np.asarray(height, float))
    is_step = (heights[-1] > _LEFT * heights[0]) & (heights[-1] > _LEAST * np.maximum(1, np.asarray(size, float)))
    return [names[int(k)] for k in np.flatnonzero(is_step.any((0, 2)))]
