"""Whether numbers bear out that drawn outcomes have the law of which the density is, on synthetic rows.

Structure tells of most models (`numpyro_dp.model.graph`). It does not where the sampler is a user's own, where a row is
drawn several times over (a series, of which each value has a part in the law of the next), and where masks hide some of
a row's outcomes. No private value is read.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.model.arguments import NO_VALUE, canonical
from numpyro_dp.model.graph import Graph
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.synthetic import synthetic_rows

_ROWS = 4
"""Synthetic ones of each kind."""
_FAR_OUT = ("wide", "large")
"""There laws may be so narrow, or so wide, that single precision decides on their scores."""
_POINTS, _DRAWS = 3, 2000
_FAR, _MOST_FAR = 5.0, 0.1
"""Standard errors that a row's mean score may be from 0, and how many of the rows may be further off: where an outcome
is rare, and says nearly all, the standard error comes out too small."""
_ALIKE = 1e-3


def draws_hold(graph: Graph, separated: SeparableModel, public: Sequence) -> bool:
    """Whether nothing speaks against what is drawn of the model whose graph this is.

    :param public: the model's public arrays.
    """
    rows = synthetic_rows(separated.private_arguments(), _ROWS, np.random.default_rng(0), _FAR_OUT)
    public = with_values(public)
    if graph.seen is not None and not _are_ever_seen(graph, graph.seen, rows, public):
        return False
    outcomes = sorted(separated.outcome_leaves or ())
    return not graph.is_to_check or graph.drawn is None or _scores_vanish(graph, graph.drawn, outcomes, rows, public)


def with_values(public: Sequence) -> list:
    """Public arrays; those that are traced have no value here, and are ones."""
    return [np.ones(x.shape, canonical(x.dtype)) if isinstance(x, NO_VALUE) else np.asarray(x) for x in public]


def _computed(function: Any, *inputs: Any) -> Any:
    """Compiled ahead of time, a function gives numbers even where it is called in a trace."""
    return jax.device_get(jax.jit(function).lower(*inputs).compile()(*inputs))


def _are_ever_seen(graph: Graph, seen: int, rows: tuple, public: list) -> bool:
    """Whether some row has all that a row may have, so that masks say what is missing: see `drawing.are_all_seen`."""

    def is_seen(public: list, row: tuple) -> jax.Array:
        z = jnp.zeros(graph.avals[graph.z].shape, graph.avals[graph.z].dtype)
        return graph.evaluate(graph.with_public(public) | {graph.z: z} | graph.of_a_row(row), [seen])[0]

    return bool(np.any(_computed(jax.vmap(is_seen, (None, 0)), public, rows)))


def _scores_vanish(graph: Graph, drawn: int, outcomes: Sequence[int], rows: tuple, public: list) -> bool:
    """Whether scores of drawn rows are 0 on average, as those of a density are, and are none of the row's own outcomes.

    :param outcomes: numbers of the arrays that are observed.
    """
    rng = np.random.default_rng(1)
    aval = graph.avals[graph.z]
    points = (rng.normal(size=(_POINTS, *aval.shape)) / 2).astype(aval.dtype)
    words = rng.integers(0, 2**32, (_DRAWS, 2), dtype=np.uint32)
    shape = graph.avals[graph.key].shape

    def scores(public: list, z: jax.Array, row: tuple, words: jax.Array) -> jax.Array:
        def density(z: jax.Array, word: jax.Array) -> jax.Array:
            known = graph.with_public(public) | graph.of_a_row(row)
            key = jnp.zeros(shape, jnp.uint32).at[:2].set(word)
            return graph.evaluate(known | {graph.z: z, graph.key: key}, [drawn])[0]

        return jax.vmap(jax.grad(density), (None, 0))(z, words)

    def compare(public: list, points: jax.Array, rows: tuple, others: tuple, words: jax.Array) -> tuple:
        def of_row(z: jax.Array, row: tuple, other: tuple) -> tuple:
            found, few = scores(public, z, row, words), words[:8]
            differ = jnp.abs(found[:8] - scores(public, z, other, few)) / (1 + jnp.abs(found[:8]))
            return jnp.mean(found, 0), jnp.var(found, 0) / _DRAWS, jnp.max(differ)

        return jax.vmap(jax.vmap(of_row, (None, 0, 0)), (0, None, None))(points, rows, others)

    others = tuple(np.roll(leaf, 1, 0) if k in outcomes else leaf for k, leaf in enumerate(rows))
    mean, variance, differ = (np.asarray(x, float) for x in _computed(compare, public, points, rows, others, words))
    known = np.isfinite(mean).all(-1) & np.isfinite(variance).all(-1)
    if not known.any() or not np.all(differ[known] < _ALIKE):
        return False
    far = np.abs(mean[known]) > _FAR * np.sqrt(variance[known]) + _ALIKE
    return bool(far.any(-1).mean() <= _MOST_FAR)
