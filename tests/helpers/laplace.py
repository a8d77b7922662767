"""A model whose family a user gives: NumPyro's Laplace is in no list of families."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_dp import ExponentialFamily


def laplace(y):
    """Of known centre: |y| is sufficient."""
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Laplace(0, scale), obs=y)


def laplace_family(**changes):
    parts = {
        "statistic": lambda row: jnp.minimum(jnp.abs(row["y"]), 8.0)[None],
        "natural_parameters": lambda sites: -1 / sites["scale"][None],
        "log_partition": lambda sites: jnp.log(sites["scale"]),
        "bound": 4.0,
        "center": 4.0,
    }
    return ExponentialFamily(**(parts | changes))
