"""Clip bounds for a chain that asks the rows in each iteration, in coordinates in which the posterior is about N(0, I).

They are released before the chain starts, by noisy binary searches on counts of rows (`PrivateTarget.find_bounds`).
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.privacy.draws import Draw
from numpyro_dp.privacy.release import Grid

SLOPE_GRID = Grid(2.0**0.5, 6)
_POINTS = 8
_MAY_EXCEED = 0.6
"""So many times the root of the number of rows may exceed the bound: what they lose is then about .1 of a posterior's
standard deviation, whatever that number. (1% of 100,000 rows moved a logistic slope by .6 of one.)"""
_CLEAR = 3.0
"""Standard deviations of a count's noise, by which a bound that no row exceeds may seem to be exceeded."""
_RATIO_ROOM = 2.0
"""Over a row's root mean square over directions: it changes by more in some of them."""
_LEAST = 2.0**-6
"""The smallest bound, over a row's root mean square norm if all rows tell the same."""


def find_slope(
    target: PrivateTarget, density: Callable[[jax.Array, tuple], jax.Array], size: int, kind: str, fund: Fund, n: float
) -> float:
    """A bound that few rows exceed, or as few as the noise of the counts can tell; for all that is left.

    :param target: on all rows.
    :param density: a row's log density at y, of length `size`, where the posterior is about N(0, I).
    :param kind: "grad" for the norm of a row's gradient, "ratio" for its change over a jump, per unit of distance.
    :param n: number of rows; with noise where it is private.
    """
    rho = fund.left
    noise = math.sqrt(SLOPE_GRID.num_counts / (2 * rho))  # of a count
    threshold = min(max(_MAY_EXCEED * math.sqrt(n), _CLEAR * noise), n / 2)
    smallest = _LEAST * math.sqrt(size / (target.power * n))
    draws = fund.ask(slope=Wish(rho, SLOPE_GRID.num_counts, (1,)))["slope"]
    points = random.normal(random.key(0), (_POINTS, 2, size), jnp.result_type(float))
    slope = _SLOPES[kind](density, points)

    def find(target: PrivateTarget, draws: Draw, smallest: jax.Array, threshold: jax.Array) -> jax.Array:
        return target.find_bounds(draws, slope, SLOPE_GRID, smallest, threshold, points.size)[0]

    numbers = (jnp.asarray(x, points.dtype) for x in (smallest, threshold))
    return float(np.asarray(target.program(find)(target, draws, *numbers)))


def _gradient_norm(density: Callable, points: jax.Array) -> Callable[[tuple], jax.Array]:
    """The root mean square over the points."""

    def slope(row: tuple) -> jax.Array:
        gradients = jax.vmap(lambda y: jax.grad(density)(y, row))(points[:, 0])
        return jnp.sqrt(jnp.mean(jnp.sum(gradients**2, 1)))[None]

    return slope


def _change(density: Callable, points: jax.Array) -> Callable[[tuple], jax.Array]:
    """The root mean square over pairs of points, per unit of distance, with room for directions that matter more."""
    distances = jnp.linalg.norm(points[:, 1] - points[:, 0], axis=1)

    def slope(row: tuple) -> jax.Array:
        changes = jax.vmap(lambda pair: density(pair[1], row) - density(pair[0], row))(points)
        return _RATIO_ROOM * jnp.sqrt(jnp.mean((changes / distances) ** 2))[None]

    return slope


_SLOPES = {"grad": _gradient_norm, "ratio": _change}
