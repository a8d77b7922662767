"""Symmetries of a likelihood: what may change places, or signs, without a change of the rows' densities.

The components of a mixture may be numbered otherwise, a loading and its factor may both change signs: then the
posterior has a hump for each, as high as the prior is there, and an approximation around one of them shows that one
only, with chains that agree. Looked for are

- sign changes of one site, or of two;
- exchanges of two of the first entries along an axis that some sites share, or of sites whose names differ in one
  character (``mu1`` and ``mu2``); of two components, also with a share that becomes the other's: 1 less itself, or, as
  a logit, with its sign changed.

They hold if the density of every synthetic row is the same, at draws of the prior and elsewhere, and not so half of the
way. What the prior says of two such places is known exactly. **No private value is read.**
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import compute_log_probs, constrain_fn, unconstrain_fn

from numpyro_dp.model.arguments import NO_VALUE, quote, traced
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.synthetic import synthetic_rows, tolerance

_DRAWS = 4  # of the prior, and as many of a standard normal law
_ROWS = 32  # of each kind, so that each of a few classes or groups is among them
_ENTRIES = 4  # of an axis: each is exchanged with the next one
_MOST_GROUPS = 64
_MOST_SHARES = 6  # single numbers that might be a component's share; of more, none is tried
_MOST_NUMBERS = 20_000  # of all sites; with more nothing is looked for
_PART = 0.37  # of the way to the image


class Symmetry(NamedTuple):
    """Other parameters at which the likelihood is the same.

    :ivar what: in words.
    :ivar image: from flat unconstrained parameters to those, and the prior's log density there less that here (of the
        sites' values: a change of places or signs keeps volumes).
    """

    what: str
    image: Callable[[np.ndarray], tuple[np.ndarray, float]]


class _Change(NamedTuple):
    """Of all constrained values as one vector v: ``offset + sign * v[order]``."""

    order: np.ndarray
    sign: np.ndarray
    offset: np.ndarray

    def __call__(self, v: jax.Array) -> jax.Array:
        return (self.offset + self.sign * v[self.order]).astype(v.dtype)


def find_symmetries(separated: SeparableModel, args: tuple, kwargs: dict, prior_draws: np.ndarray) -> list[Symmetry]:
    """The symmetries of a model's rows, of those that are looked for.

    :param separated: what `separate` returned for the model.
    :param args, kwargs: the model's arguments. Of the private ones nothing is used; where public ones are traced
        nothing is found.
    :param prior_draws: flat unconstrained parameters, shape (k, d).
    """
    separated = separated.of_rows
    args, kwargs = separated.without_private(args, kwargs)
    if any(isinstance(leaf, NO_VALUE) for leaf in jax.tree.leaves((args, kwargs))):
        return []
    prior, row_log_density = separated.prior_model, separated.row_log_density(args, kwargs)
    rng = np.random.default_rng(0)
    rows = synthetic_rows(separated.private_arguments(), _ROWS, rng)
    dtype = np.result_type(*separated.prototype.values())
    z = np.concatenate([rng.normal(size=(_DRAWS, separated.num_params)), prior_draws[:_DRAWS]]).astype(dtype)

    constrained, unconstrained, log_prior = (
        traced(function, args, kwargs)
        for function in (
            lambda args, kwargs, z: constrain_fn(prior, args, kwargs, separated.unravel(z)),
            lambda args, kwargs, values: separated.ravel(unconstrain_fn(prior, args, kwargs, values)),
            lambda args, kwargs, values: sum(compute_log_probs(prior, args, kwargs, values)[0].values()),
        )
    )

    def of_rows(z: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: row_log_density(z, row))(rows)

    with warnings.catch_warnings():  # NumPyro has said before what it thinks of the model
        warnings.simplefilter("ignore")
        prototype = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(constrained, z[0]))
        flat, unravel = ravel_pytree(prototype)
        if flat.size > _MOST_NUMBERS:
            return []
        changes = dict(_changes({name: x.shape for name, x in prototype.items()}))

        def compare(z: jax.Array, changes: _Change) -> tuple:
            """For each change: the rows' log densities at the images of `z`, and part of the way there."""
            v = jax.vmap(lambda z: ravel_pytree(constrained(z))[0])(z)

            def by(change: _Change) -> tuple[jax.Array, jax.Array]:
                image = jax.vmap(lambda v: unconstrained(unravel(change(v))))(v)
                there, between = jax.lax.map(jax.vmap(of_rows), jnp.stack([image, z + _PART * (image - z)]))
                return there, between

            return jax.lax.map(by, changes)

        none = _Change(np.arange(flat.size), np.ones(flat.size), np.zeros(flat.size))
        stacked = jax.tree.map(lambda *x: np.stack(x), none, *changes.values())
        # Compiled ahead of time, a function gives numbers even where this is being traced.
        compiled = jax.jit(compare).lower(z, stacked).compile()
    with jax.debug_nans(False), jax.debug_infs(False):  # many images are no parameters
        (here, *there), (_, *between) = jax.device_get(compiled(z, stacked))

    def image_by(change: _Change) -> Callable[[np.ndarray], tuple[np.ndarray, float]]:
        def image_and_odds(z: jax.Array) -> tuple[jax.Array, jax.Array]:
            v = ravel_pytree(constrained(z))[0]
            there = unravel(change(v))
            return unconstrained(there), log_prior(there) - log_prior(unravel(v))

        # Compiled now: by the time that an image is asked for, the budget is spent.
        compiled = jax.jit(image_and_odds).lower(z[0]).compile()

        def image(z: np.ndarray) -> tuple[np.ndarray, float]:
            with jax.debug_nans(False), jax.debug_infs(False):
                there, odds = compiled(np.asarray(z, dtype))
                return np.asarray(there, float), float(odds)

        return image

    allowed = tolerance(separated.arguments, here.dtype)
    return [
        Symmetry(what, image_by(change))
        for (what, change), image, part in zip(changes.items(), there, between, strict=True)
        if _same(here, image, allowed) and not _same(here, part, allowed)
    ]


def _same(here: np.ndarray, there: np.ndarray, allowed: float) -> bool:
    """Whether densities are the same, wherever they are finite."""
    finite = np.isfinite(here)
    here, there = here[finite], there[finite]
    return bool(np.all(np.abs(here - there) <= allowed * (1 + np.abs(here))))


def _changes(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, _Change]]:
    """What is tried, in words, and how the vector of all sites' values changes by it."""
    ends = np.cumsum([math.prod(shapes[name]) for name in sorted(shapes)])
    starts = dict(zip(sorted(shapes), [0, *ends[:-1]], strict=True))
    place = {name: start + np.arange(math.prod(shapes[name])).reshape(shapes[name]) for name, start in starts.items()}

    def change(moves: list[tuple[np.ndarray, np.ndarray]], negated: tuple = (), reflected: tuple = ()) -> _Change:
        """By which places get the values of others, and the sites that change signs or are 1 less themselves."""
        order, sign, offset = np.arange(ends[-1]), np.ones(ends[-1]), np.zeros(ends[-1])
        for to, source in moves:
            order[to.ravel()] = source.ravel()
        for name in (*negated, *reflected):
            sign[place[name].ravel()] = -1
        for name in reflected:
            offset[place[name].ravel()] = 1
        return _Change(order, sign, offset)

    def exchange(what: str, moves: list, shares: list[str]) -> Iterator[tuple[str, _Change]]:
        yield what, change(moves)
        for share in shares:
            yield f"{what} and '{share}' becomes 1 less itself", change(moves, reflected=(share,))
            yield f"{what} and '{share}' changes its sign", change(moves, negated=(share,))

    def shares_beside(others: Iterable[str]) -> list[str]:
        shares = sorted(name for name in shapes.keys() - set(others) if math.prod(shapes[name]) == 1)
        return shares if len(shares) <= _MOST_SHARES else []

    for sites in _groups(sorted(shapes), 2):
        verb = "changes its sign" if len(sites) == 1 else "change their signs"
        yield f"{quote(sites)} {verb}", change([], negated=sites)
    for pairs in _pairs_by_name(shapes):
        what = " and ".join(f"'{one}' and '{other}' change places" for one, other in pairs)
        moves = [(place[a], place[b]) for pair in pairs for a, b in (pair, pair[::-1])]
        yield from exchange(what, moves, shares_beside(itertools.chain(*pairs)))
    for size in sorted({size for shape in shapes.values() for size in shape if size > 1}):
        along = {name: shape for name, shape in sorted(shapes.items()) if size in shape}
        first = {name: shape.index(size) for name, shape in along.items()}
        last = {name: len(shape) - 1 - shape[::-1].index(size) for name, shape in along.items()}
        shares = shares_beside(along) if size == 2 else []
        for axes, sites in itertools.product((first, last), _groups(list(along), len(along))):
            if axes is last and all(first[name] == last[name] for name in sites):
                continue
            for k in range(min(size, _ENTRIES) - 1):
                order = np.arange(size)
                order[[k, k + 1]] = k + 1, k
                which = "" if axes is first else ", along their last axis,"
                what = f"entries {k} and {k + 1} of {quote(sites)}{which} change places"
                yield from exchange(what, [(place[s], place[s].take(order, axes[s])) for s in sites], shares)


def _groups(names: list[str], largest: int) -> list[tuple[str, ...]]:
    """Groups of up to so many sites; if they are many, single sites, and all if these are no more than that."""
    if sum(math.comb(len(names), size) for size in range(1, largest + 1)) > _MOST_GROUPS:
        return [(name,) for name in names] + ([tuple(names)] if len(names) <= largest else [])
    return [group for size in range(1, largest + 1) for group in itertools.combinations(names, size)]


def _pairs_by_name(shapes: dict[str, tuple[int, ...]]) -> list[list[tuple[str, str]]]:
    """Sites of the same shape whose names differ in one character: all that differ in the same one together."""
    pairs: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for one, other in itertools.combinations(sorted(shapes), 2):
        differ = [(a, b) for a, b in zip(one, other, strict=False) if a != b]
        if len(one) == len(other) and len(differ) == 1 and shapes[one] == shapes[other]:
            pairs.setdefault(differ[0], []).append((one, other))
    return list(pairs.values())[:_MOST_GROUPS]
