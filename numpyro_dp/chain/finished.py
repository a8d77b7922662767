"""What the draws of a finished run tell by themselves: whether chains moved and mixed, and left the prior."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

from numpyro_dp.statements import some_of

LEAST_DRAWS = 4
"""Of a chain, to tell whether it moves and has converged."""
ENOUGH_DRAWS = 100
"""Of a chain, to tell whether more iterations to a draw would help it."""
HARDLY_NARROWER = 0.8
"""Interquartile range of the draws over that of the prior, from which they say little more than the prior does."""


def draws_of_parameters(draws: Any, parameters: Mapping[str, Any], num_chains: int) -> dict[str, Any]:
    """Chains and draws leading; coordinate by coordinate where each is a parameter of its own.

    Without what may be constant: deterministic sites, and sites without a free parameter. If a `postprocess_fn` has
    given them other names, all that it gives.

    :param parameters: of the last state, chains leading.
    """
    named = {name: draws[name] for name in parameters if name in draws} if isinstance(draws, Mapping) else {}
    if not named:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(draws)}
    free = {name: np.size(parameters[name]) // num_chains for name in named}
    return by_coordinate(named, free, 2)


def by_coordinate(values: Mapping[str, Any], free: Mapping[str, int], leading: int) -> dict[str, np.ndarray]:
    """Values of sites, coordinate by coordinate where each is a parameter of its own.

    Without sites that have no free parameter.

    :param free: how many free parameters each site has.
    :param leading: number of leading axes, of draws.
    """
    found: dict[str, np.ndarray] = {}
    for name, value in values.items():
        value, places = np.asarray(value), np.shape(value)[leading:]
        if free[name] > 1 and free[name] == math.prod(places):
            whole = (slice(None),) * leading
            found |= {f"{name}[{','.join(map(str, k))}]": value[(*whole, *k)] for k in np.ndindex(places)}
        elif free[name]:
            found[name] = value
    return found


def widths(draws: Mapping[str, Any]) -> dict[str, float]:
    """Interquartile range of the finite draws of each coordinate, as `by_coordinate` has them; 0 where there are none.

    Without sites of which not each entry is a parameter.
    """
    flat = {name: np.asarray(values, float).ravel() for name, values in draws.items() if np.ndim(values) <= 2}
    finite = {name: values[np.isfinite(values)] for name, values in flat.items()}
    return {
        name: float(np.subtract(*np.quantile(values, [0.75, 0.25]))) if values.size else 0.0
        for name, values in finite.items()
    }


def uninformed(draws: Mapping[str, Any], prior: Mapping[str, float]) -> list[str]:
    """Coordinates whose draws are hardly narrower than the prior: noise hides what rows say, or they say little.

    :param draws: of the posterior, as `by_coordinate` has them.
    :param prior: `widths` of the prior's.
    """
    return [name for name, width in widths(draws).items() if width > HARDLY_NARROWER * prior.get(name, 0.0) > 0]


def standing(draws: Mapping[str, Any]) -> list[str]:
    """The sites of which all draws of a chain are one point.

    :param draws: of each site, chains and draws leading.
    """
    long_enough = {name: leaf for name, leaf in _by_site(draws).items() if leaf.shape[1] >= LEAST_DRAWS}
    return [name for name, leaf in long_enough.items() if (np.ptp(leaf, axis=1) == 0).all(-1).any()]


def _by_site(draws: Mapping[str, Any]) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(leaf, float) for name, leaf in draws.items()}
    return {name: leaf.reshape(*leaf.shape[:2], -1) for name, leaf in arrays.items() if leaf.size}


class _Mixing(NamedTuple):
    """How well chains have mixed: the largest R-hat and the least effective size, of `length` draws of each chain."""

    r_hat: float
    size: float
    chains: int
    length: int

    @property
    def has_converged(self) -> bool:
        # Of independent draws R-hat is above 1 by about 1 / length.
        return self.r_hat < 1.01 + 10 / self.length

    def has_effective(self, share: float) -> bool:
        """Whether the effective size is 400, or at least that share of the draws."""
        return self.size > min(400, share * self.chains * self.length)


def _mixing(draws: Mapping[str, Any]) -> _Mixing:
    flat = np.concatenate([*_by_site(draws).values()], 2)
    if not np.isfinite(flat).all():
        return _Mixing(math.inf, 0.0, *flat.shape[:2])
    with np.errstate(all="ignore"):
        r_hat, size = split_gelman_rubin(flat), effective_sample_size(flat)
    size = np.where(size < 0, np.inf, size)  # so it is of a few draws that alternate: better than independent ones
    return _Mixing(float(np.nanmax(r_hat, initial=1.0)), float(np.nanmin(size, initial=np.inf)), *flat.shape[:2])


def should_thin_more(draws: Mapping[str, Any]) -> bool:
    """Whether more iterations to a draw would make the draws of a finished run better, as far as they tell.

    :param draws: of each site, chains and draws leading.
    """
    if not any(leaf.shape[1] >= ENOUGH_DRAWS for leaf in _by_site(draws).values()) or standing(draws):
        return False
    mixing = _mixing(draws)
    return not (mixing.has_converged and mixing.has_effective(0.5))


def unmixed(draws: Mapping[str, Any]) -> list[str]:
    """Why the chains of a finished run have not converged.

    :param draws: of each site, chains and draws leading.
    """
    leaves = [*_by_site(draws).values()]
    if not leaves:
        return []
    if leaves[0].shape[1] < LEAST_DRAWS:
        return ["four draws at least tell whether chains have converged"]
    if still := standing(draws):
        return [
            f"a chain stood still: all of its draws of {some_of(still)} are one point, so R-hat and effective sizes "
            "mean nothing. Shorter steps or a larger eps let a walk move; where draws are free (`DPHMC`'s default), "
            "such a parameter lies at the border of what its law allows (a scale at 0)"
        ]
    mixing = _mixing(draws)
    if mixing.has_converged and mixing.has_effective(0.2):
        return []
    return [
        f"the chains have not converged: R-hat {mixing.r_hat:.3f}, effective size {mixing.size:.0f} of "
        f"{mixing.chains * mixing.length} draws. A longer warmup and more draws cost no privacy with DPHMC's default, "
        "and eps otherwise"
    ]
