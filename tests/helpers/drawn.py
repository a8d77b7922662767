"""The noise that a kernel draws, and leave for releases with given noise."""

import contextlib

import jax
import jax.numpy as jnp

from numpyro_dp.privacy import draws
from numpyro_dp.privacy.mechanisms import Gaussian
from numpyro_dp.privacy.noise import GridNoise


@contextlib.contextmanager
def recorded_noise(kernel):
    """A list, to which each draw meanwhile is added, in steps of the grid."""
    source, drawn = kernel.ledger._noise, []
    draw = source.draw
    source.draw = lambda *arguments: drawn.append(draw(*arguments)) or drawn[-1]
    try:
        yield drawn
    finally:
        source.draw = draw


def given_draw(*shape, slots=1, hi=0, lo=0, noise_multiplier=1.0, batch=None, noisy=True, mechanism=None, ledger=None):
    """Leave for releases of `shape`, with given noise in steps of the grid: ``hi * 2**24 + lo``."""
    noise = GridNoise(*(jnp.broadcast_to(jnp.asarray(x, jnp.int32), (slots, *shape)) for x in (hi, lo)))
    return draws.Draw(
        draws.Slots(
            noise if noisy else None,
            None if batch is None else jax.tree.map(lambda x: jnp.asarray(x)[None], batch),
            jnp.full(slots, noise_multiplier, jnp.result_type(float)),
            jnp.ones(slots, bool),
            jnp.zeros((slots, 2), jnp.uint32),
            jnp.zeros(slots, bool),
        ),
        mechanism or Gaussian(noise_multiplier),
        ledger,
        draws._KEY,
    )
