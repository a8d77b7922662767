"""Where the parameters meet the data: the few functions of the parameters that a row's log density depends on.

    ``log p(row | z) = l(phi(z), row)``

A model computes much from its unconstrained parameters z before any row comes in: groups' effects from their mean,
scale and standardised deviations, say, or a curve in z. The rows see only the results. `find_cut` reads them off the
jaxpr (JAX's record of the computation) of the row log density, as a minimum vertex cut between z and all that depends
on the row: the fewest real numbers phi, never more than there are parameters. Among the cuts of that size it takes the
one nearest to the data, where likelihoods are simplest: whatever is curved or hierarchical about the parameters lies
before it, in `Cut.coordinates`, and stays exact when ``l(phi, row)`` is replaced by an approximation.

===========================================================  =================================================
model                                                        phi
===========================================================  =================================================
regression on coefficients                                   the coefficients; z itself
groups' effects ``mu + tau * eta[group]``                    ``mu + tau * eta``; mu, tau and eta are two numbers more
``x ~ Normal(a, 1)``, ``y ~ Normal(b + a**2, 1)``            a and ``b + a**2``
``y ~ Normal(m, sigma)``, sigma positive                     m and z's coordinate of sigma
``y ~ Normal(a**2 + b**2, 1)``                               ``a**2 + b**2``
===========================================================  =================================================

Where a row picks a group's deviation before it is scaled, the values of all groups are scaled first (see
`numpyro_dp.model.graph`).

An approximation of l may be evaluated anywhere, so phi should range over all of R^m. Among cuts of the same size,
those with the fewest bounded or positive values (scales, probabilities) come first, so that a scale enters by the
parameter that it is the exponential of. In the end numbers decide: synthetic values of phi, mixed from several draws of
z and moved further out, must be values of phi, too. They are not if a value is confined, or if its entries are tied to
each other, as ordered cut points are; then the cut moves towards z, and to z itself at last. Where that takes more
numbers, the cut stays, if the row's log density goes on smoothly beyond the values of phi: ``y ~ Normal(a**2 + b**2,
1)`` is a normal likelihood of one number, although no parameters make it negative. Only a search looks there.

**No private value is read.** Rows are shapes where the function is traced, and synthetic where it is compared.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.sparse.linalg import cg
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from numpyro_dp.model.drawing_checks import draws_hold, with_values
from numpyro_dp.model.graph import Graph, Op, is_public, trace
from numpyro_dp.model.latents import Parts
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.synthetic import synthetic_rows, tolerance
from numpyro_dp.model.tracing import Shape

__all__ = ["Cut", "find_cut"]


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A row's log density as a function of phi(z).

    :ivar size: m, the number of coordinates of phi; at most that of z.
    :ivar trivial: whether phi is z itself.
    :ivar names: what each coordinate is: an entry of an unconstrained parameter by the name of its site, as in `b[2]`,
        or of a value by the operation that computes it, as in `add_12[2]`.
    :ivar coordinates: the function ``flat z -> phi``. Sees no private argument.
    :ivar row_log_density: the function ``(phi, one-row slices of the private arguments) -> log p(row | z)``.
    :ivar drawn_log_density: the function ``(phi, one-row slices, words of a key) -> log p(row' | z)``, where row' is
        the row with its outcomes drawn at phi, constants to derivatives; None where phi does not tell their law. It
        counts once.
    :ivar row_weight: the function ``one-row slices -> how often the row's density counts``; None if once, and where the
        model does not say it by `handlers.scale`.
    :ivar draw_count, count_log_density: where the row's outcome is one count, of which 0 is the least, the functions
        ``(phi, one-row slices, words of a key) -> count`` and ``(phi, one-row slices, count) -> log p(row' | z)``; else
        None.
    :ivar num_outcomes: how many values the row's outcome can have, where these are few and nothing else is drawn: then
        the first of the words, a number below that, says which of them row' has.
    :ivar is_discrete: whether outcomes that are drawn are counts, or have few values each.
    :ivar has_thresholds: whether parameters are compared with values that are no constants, so that there may be steps.
    :ivar apart: pairs of coordinates of which no row's log density depends on both, shape (m, m), such as the effects
        of two groups where each row has one: read off the graph, so that other pairs may be apart, too; or None.
    :ivar parts, drawn_parts: where latents are integrated out, the factors of `row_log_density` and of
        `drawn_log_density` as functions of phi; else None.
    """

    size: int
    trivial: bool
    names: tuple[str, ...]
    coordinates: Callable[[jax.Array], jax.Array]
    row_log_density: Callable[[jax.Array, tuple], jax.Array]
    drawn_log_density: Callable[[jax.Array, tuple, jax.Array], jax.Array] | None = None
    row_weight: Callable[[tuple], jax.Array] | None = None
    draw_count: Callable[[jax.Array, tuple, jax.Array], jax.Array] | None = None
    count_log_density: Callable[[jax.Array, tuple, jax.Array], jax.Array] | None = None
    num_outcomes: int | None = None
    is_discrete: bool = False
    has_thresholds: bool = False
    apart: np.ndarray | None = None
    parts: Callable[[jax.Array], Parts] | None = None
    drawn_parts: Callable[[jax.Array], Parts] | None = None

    def counting(self, factor: float) -> "Cut":
        """Of rows that count so many times as often."""
        density, weight = self.row_log_density, self.row_weight
        return dataclasses.replace(
            self,
            row_log_density=lambda phi, row: factor * density(phi, row),
            row_weight=lambda row: jnp.asarray(factor) if weight is None else factor * weight(row),
        )


def find_cut(separated: SeparableModel, args: tuple, kwargs: dict, enumerates: bool = True) -> Cut:
    """The fewest functions of the parameters that the rows see, nearest to the data; z itself if there are no better.

    :param separated: what `separate` returned for the model.
    :param args, kwargs: the model's arguments. Of the private ones nothing is used; public arrays may be traced.
    :param enumerates: whether outcomes that can have few values are enumerated rather than drawn.
    """
    graph = trace(separated, args, kwargs, enumerates)
    public = _public_arrays(separated, args, kwargs)
    computed = graph.op_of.keys() - graph.entries.keys()
    checkable = not any(isinstance(constant, jax.core.Tracer) for constant in graph.constants.values())
    if graph.needs_numbers and not (checkable and draws_hold(graph, separated, public)):
        graph.drawn = None
    banned = set() if checkable else set(computed)
    smallest = phi = _choose(graph, banned)
    for attempt in range(_ATTEMPTS + 1):
        blamed = _check(graph, phi, separated, public) if checkable and not _is_z(graph, phi) else set()
        if not blamed:
            break
        if not phi.values:
            return _trivial(graph, separated, args, kwargs)
        banned |= blamed if blamed - banned and attempt + 1 < _ATTEMPTS else computed
        phi = _choose(graph, banned)
    if smallest.size < phi.size and not _check(graph, smallest, separated, public, may_be_tied=True):
        phi = smallest
    elif checkable and (weights := _confined(graph) & _linear(graph)):
        # The likelihood of a positive slope is a parabola in the slope, and goes on below 0. Its logarithm bends it.
        of_weights = _choose(graph, banned, _confined(graph) - weights)
        if of_weights.size == phi.size and not _check(graph, of_weights, separated, public, may_be_tied=True):
            phi = of_weights
    return _trivial(graph, separated, args, kwargs) if _is_z(graph, phi) else _cut(graph, phi, separated, public)


_ATTEMPTS = 5


def _is_z(graph: Graph, phi: "_Phi") -> bool:
    return not phi.values and phi.entries.size in (0, graph.num_params)


def _drawn_of_z(graph: Graph, separated: SeparableModel, args: tuple, kwargs: dict) -> Callable | None:
    if graph.drawn is None:
        return None
    if graph.num_outcomes is None:
        return separated.drawn_log_density(args, kwargs, graph.passes)
    enumerated = separated.enumerated_log_density(args, kwargs)
    return lambda z, row, words: enumerated(z, row, words[0])


def _trivial(graph: Graph, separated: SeparableModel, args: tuple, kwargs: dict) -> Cut:
    of_z = _Phi(np.arange(graph.num_params), (), (graph.z,), graph.num_params)
    cut = _cut(graph, of_z, separated, _public_arrays(separated, args, kwargs))
    cut = dataclasses.replace(cut, trivial=True, coordinates=lambda z: z)
    if separated.latents is not None:
        return cut
    drawn = _drawn_of_z(graph, separated, args, kwargs)
    return dataclasses.replace(cut, row_log_density=separated.row_log_density(args, kwargs), drawn_log_density=drawn)


def _cut(graph: Graph, phi: "_Phi", separated: SeparableModel, public: Sequence) -> Cut:
    """The density of a row at phi. Latents are integrated out beyond it: there it is cut jointly with them."""
    density: Callable = functools.partial(_row_log_density, graph, phi, public)
    drawn: Callable = functools.partial(_drawn_log_density, graph, phi, public)
    parts = drawn_parts = None
    if separated.latents is not None:
        parts, drawn_parts = (functools.partial(_parts, graph, phi, public, is_drawn) for is_drawn in (False, True))
        density, drawn = map(separated.integrate, (parts, drawn_parts))
    can_draw = _can_draw(graph, phi)
    has_count = can_draw and graph.counted is not None and not graph.needs_numbers
    return Cut(
        size=phi.size,
        trivial=False,
        names=_names(graph, phi, separated),
        coordinates=functools.partial(_coordinates, graph, phi, public),
        row_log_density=density,
        drawn_log_density=drawn if can_draw else None,
        row_weight=None if graph.weight is None else functools.partial(_row_weight, graph, public),
        draw_count=functools.partial(_draw_count, graph, phi, public) if has_count else None,
        count_log_density=functools.partial(_count_log_density, graph, phi, public) if has_count else None,
        num_outcomes=graph.num_outcomes,
        is_discrete=graph.is_discrete,
        has_thresholds=graph.has_thresholds,
        apart=_apart(graph, phi),
        parts=parts,
        drawn_parts=drawn_parts if can_draw else None,
    )


def _parts(graph: Graph, phi: "_Phi", public: Sequence, drawn: bool, at: jax.Array) -> Parts:
    """The factors of a row at phi. What does not depend on the latents is evaluated before them."""
    *rows, latent = graph.rows
    prior, start = graph.prior, graph.start
    given = graph.drawn if drawn else graph.given
    assert prior is not None
    assert start is not None
    assert given is not None
    targets = [start, prior, given]
    before = _known(graph, phi, public, at, ())
    before |= _frontier(graph, targets, before, {graph.key, *graph.rows})
    of_row = {graph.key, *rows}

    def prepare(row: tuple, *words: jax.Array) -> dict[int, jax.Array]:
        known = {v: jnp.asarray(x, graph.avals[v].dtype) for v, x in zip(rows, row, strict=True)}
        known[graph.key] = jnp.concatenate(words) if words else jnp.zeros(4, jnp.uint32)
        later = _frontier(graph, targets, before | known, {latent})
        return {v: x for v, x in later.items() if v not in before} | {v: known[v] for v in of_row}

    def evaluate(target: int) -> Callable[..., jax.Array]:
        return lambda prepared, w: graph.evaluate(before | prepared | {latent: w}, [target])[0]

    nothing = jnp.zeros(graph.avals[latent].shape, graph.avals[latent].dtype)
    return Parts(prepare, lambda prepared: evaluate(start)(prepared, nothing), evaluate(prior), evaluate(given))


def _frontier(graph: Graph, targets: Sequence[int], known: dict[int, Any], later: Collection[int]) -> dict[int, Any]:
    """The values that operations which depend on `later` take from those that do not, and the targets among these."""
    depends, wanted = set(later), set[int]()
    ops = graph.needed(targets, known.keys())
    for op in ops:
        if not depends.isdisjoint(op.inputs):
            depends.update(op.outputs)
    for op in ops:
        if not depends.isdisjoint(op.inputs):
            wanted.update(op.inputs)
    wanted = (wanted | set(targets)) - depends - known.keys() - graph.constants.keys()
    order = sorted(wanted)
    return dict(zip(order, graph.evaluate(known, order), strict=True))


def _public_arrays(separated: SeparableModel, args: tuple, kwargs: dict) -> list:
    leaves = jax.tree.leaves((args, kwargs))
    return [leaf for leaf, a in zip(leaves, separated.arguments, strict=True) if is_public(a)]


# -- The minimum cut ---------------------------------------------------------------------------------------------------


class _Phi(NamedTuple):
    """The values that a cut consists of.

    :ivar entries: indices of the entries of z among them, in order.
    :ivar values: numbers of the others.
    :ivar cut: numbers of all of them.
    """

    entries: np.ndarray
    values: tuple[int, ...]
    cut: tuple[int, ...]
    size: int


def _choose(graph: Graph, banned: Collection[int], confined: Collection[int] | None = None) -> _Phi:
    """
    :param confined: values that had better not be a part of it; by default, `_confined`.
    """
    cut = _minimum_cut(graph, banned, _confined(graph) if confined is None else confined)
    for value in sorted(cut):
        cut = (cut - {value}) | {_before_affine(graph, value)}
    entries = [graph.entries[v].ravel() for v in sorted(cut) if v in graph.entries]
    index = np.unique(np.concatenate(entries)) if entries else np.zeros(0, int)
    values = tuple(sorted(cut - graph.entries.keys()))
    return _Phi(index, values, tuple(sorted(cut)), index.size + sum(map(graph.size, values)))


def _minimum_cut(graph: Graph, banned: Collection[int], confined: Collection[int]) -> set[int]:
    """The values that separate z from what depends on the row: of the smallest total size; among these, with the fewest
    entries that are confined to a range; among these, nearest to the data.

    A value is an edge from vertex 2v to vertex 2v + 1, whose width is its size. All other edges are wide.
    """
    sink = 2 * len(graph.avals)
    wide: set[tuple[int, int]] = {(2 * graph.output + 1, sink)} if graph.of_z_alone(graph.output) else set()
    values = {graph.z}
    for op in graph.needed([graph.output]):
        inputs = [v for v in op.inputs if graph.of_z_alone(v)]
        values.update(inputs)
        for v in inputs:
            wide.update((2 * v + 1, sink if w in graph.of_row else 2 * w) for w in op.outputs)
    # One more entry is worse than all entries confined. SciPy counts in 32 bits: beyond, confined entries are no worse.
    unit = graph.num_params + 1 if graph.num_params < _LARGE else 1
    infinite = (graph.num_params + 1) * (unit + 1)
    may_cut = [v for v in values if graph.is_float(v) and _before_affine(graph, v) not in banned]
    edges = dict.fromkeys([*wide, *((2 * v, 2 * v + 1) for v in values)], infinite)
    for v in may_cut:
        edges[2 * v, 2 * v + 1] = min(graph.size(v) * (unit + (v in confined and unit > 1)), infinite)
    tails, heads = np.array(list(edges), np.int32).T
    capacity = csr_array((np.array(list(edges.values()), np.int32), (tails, heads)), shape=(sink + 1, sink + 1))
    left = capacity - maximum_flow(capacity, 2 * graph.z, sink).flow
    left.data = (left.data > 0).astype(np.int32)
    left.eliminate_zeros()
    reach = set(breadth_first_order(csr_array(left.T), sink, return_predecessors=False).tolist())
    return {v for v in may_cut if 2 * v + 1 in reach and 2 * v not in reach}


_LARGE = 30_000


def _confined(graph: Graph) -> set[int]:
    """Values that look as if they did not range over all real numbers. A guess: numbers decide in the end."""
    confined: set[int] = set()
    for op in graph.ops:
        parents = [v for v in dict.fromkeys(op.inputs) if graph.of_z_alone(v) and graph.is_float(v)]
        within = [v in confined for v in parents]
        name = op.eqn.primitive.name
        divides = name == "div" and op.inputs[1] in parents
        if parents and (name in _CONFINING or divides or (any if name in _JOINING else all)(within)):
            confined.update(op.outputs)
    return confined


def _linear(graph: Graph) -> set[int]:
    """Values of z that meet a row as terms and factors only, such as weights of covariates. Each entry is made of one
    entry of z: of values that are ordered, say, a likelihood may end where the order does."""
    used, bent = set[int](), set[int]()
    for op in reversed(graph.needed([graph.output])):
        name = op.eqn.primitive.name
        is_bent = name not in _LINEAR or any(graph.of_z_alone(v) for v in op.outputs)
        if name in _PICKING:
            is_bent = not bent.isdisjoint(op.outputs)
        used.update(op.inputs)
        if is_bent:
            bent.update(op.inputs)
    return {v for v in used - bent if graph.of_z_alone(v) and _entries_behind(graph, v) is not None}


def _before_affine(graph: Graph, value: int) -> int:
    """The value of the same size that one of a cut is an affine function of: best an entry of z, which has a name."""
    while value not in graph.entries:
        op, parents = graph.op_of[value], graph.parents(value)
        scales = op.eqn.primitive.name != "div" or op.inputs[0] in parents
        same_size = len(parents) == 1 and graph.size(parents[0]) == graph.size(value) and graph.is_float(parents[0])
        if op.eqn.primitive.name not in _AFFINE or not scales or not same_size or op.inputs.count(parents[0]) > 1:
            break
        value = parents[0]
    return value


# By the names of JAX's operations: results lie in a part of the real line; some results are confined if some operand
# is (others only if all are, as a product of a scale and a normal is not); affine functions of a single operand.
# fmt: off
_CONFINING = frozenset([
    "abs", "acosh", "asinh", "atan", "ceil", "clamp", "cos", "cosh", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "erf", "erfc", "exp", "exp2", "expm1", "floor", "integer_pow", "log1p", "logistic", "max",
    "min", "pow", "reduce_max", "reduce_min", "rem", "round", "rsqrt", "sign", "sin", "sqrt", "square", "tanh",
])
_LINEAR = frozenset(["add", "add_any", "dot_general", "mul", "sub"])
_PICKING = frozenset([
    "broadcast_in_dim", "convert_element_type", "gather", "reshape", "select_n", "slice", "squeeze", "transpose",
])
_JOINING = frozenset(["concatenate", "dynamic_update_slice", "scatter", "select_n", "stack"])
_AFFINE = frozenset([
    "add", "add_any", "broadcast_in_dim", "convert_element_type", "copy", "div", "expand_dims", "gather", "mul", "neg",
    "reshape", "rev", "squeeze", "sub", "transpose",
])
# fmt: on
_ONE_BY_ONE = (_AFFINE | _CONFINING) - {"gather", "rev", "transpose"}


# -- The two functions -------------------------------------------------------------------------------------------------


def _coordinates(graph: Graph, phi: _Phi, public: Sequence, z: jax.Array) -> jax.Array:
    z = jnp.asarray(z, graph.avals[graph.z].dtype)
    parts = graph.evaluate({graph.z: z, **graph.with_public(public)}, phi.values)
    return jnp.concatenate([z[phi.entries], *(jnp.ravel(part).astype(z.dtype) for part in parts)])


def _row_log_density(graph: Graph, phi: _Phi, public: Sequence, at: jax.Array, row: tuple) -> jax.Array:
    return graph.evaluate(_known(graph, phi, public, at, row), [graph.output])[0]


def _drawn_log_density(
    graph: Graph, phi: _Phi, public: Sequence, at: jax.Array, row: tuple, key: jax.Array
) -> jax.Array:
    assert graph.drawn is not None
    return graph.evaluate({**_known(graph, phi, public, at, row), graph.key: key}, [graph.drawn])[0]


def _draw_count(graph: Graph, phi: _Phi, public: Sequence, at: jax.Array, row: tuple, key: jax.Array) -> jax.Array:
    assert graph.count is not None
    return graph.evaluate({**_known(graph, phi, public, at, row), graph.key: key}, [graph.count])[0]


def _count_log_density(
    graph: Graph, phi: _Phi, public: Sequence, at: jax.Array, row: tuple, count: jax.Array
) -> jax.Array:
    assert graph.counted is not None
    words = jnp.stack([jnp.asarray(count, jnp.uint32), jnp.zeros((), jnp.uint32)])
    return graph.evaluate({**_known(graph, phi, public, at, row), graph.key: words}, [graph.counted])[0]


def _row_weight(graph: Graph, public: Sequence, row: tuple) -> jax.Array:
    assert graph.weight is not None
    weight = graph.evaluate(graph.with_public(public) | graph.of_a_row(row), [graph.weight])[0]
    return jnp.asarray(weight, graph.avals[graph.z].dtype)  # whole numbers, or yes and no, are weights, too


def _can_draw(graph: Graph, phi: _Phi) -> bool:
    """Whether a row can be drawn, and phi is all that it takes."""
    if graph.drawn is None:
        return False
    known = {graph.key, *graph.rows, *graph.public, *phi.values, *_entries_in(graph, phi)}
    targets = [v for v in (graph.drawn, graph.count, graph.counted) if v is not None]
    inputs = {v for op in graph.needed(targets, known) for v in op.inputs}
    return not any(v in graph.entries and v not in known for v in inputs)


def _apart(graph: Graph, phi: _Phi) -> np.ndarray:
    """`Cut.apart`: a row picks one entry of a value, and by the same index one of another."""
    place = dict(zip(phi.values, _places(graph, phi), strict=True))  # where in phi the entries of a value are
    of_entry = np.zeros(graph.num_params, int)
    of_entry[phi.entries] = np.arange(phi.entries.size)
    place |= {v: of_entry[graph.entries[v]] for v in _entries_in(graph, phi)}
    index, position = np.full(phi.size, _UNSEEN), np.zeros(phi.size, int)
    targets = [graph.output] if graph.drawn is None else [graph.output, graph.drawn]
    for op in graph.needed(targets, {*place, *graph.rows, *graph.public, graph.key}):
        seen = [v for v in dict.fromkeys(op.inputs) if v in place]
        if len(seen) == 1 and (arranged := _arranged(graph, op, place[seen[0]])) is not None:
            place[op.outputs[0]] = arranged
            continue
        for v in seen:
            by, at = _picked_by(graph, op, v)
            here = index[place[v]]
            same = (here == _UNSEEN) | ((here == by) & (position[place[v]] == at))
            index[place[v]], position[place[v]] = np.where(same, by, _ALWAYS), at
    by_one = (index[:, None] == index) & (index >= 0)
    return by_one & (position[:, None] != position)


_UNSEEN, _ALWAYS = -1, -2  # by no row; not by one index alone


def _picked_by(graph: Graph, op: Op, value: int) -> tuple[int, Any]:
    """The index by which a row picks from a value, and the position at which it picks each entry; or `_ALWAYS`."""
    is_pick = graph.picks.get(op.outputs[0]) is op
    axes: tuple[int, ...] = op.eqn.params["dimension_numbers"].collapsed_slice_dims if is_pick else ()
    if len(axes) != 1 or op.inputs[0] != value or graph.size(op.inputs[1]) != 1:
        return _ALWAYS, 0
    shape = graph.avals[value].shape
    return op.inputs[1], np.arange(shape[axes[0]]).reshape([-1 if k == axes[0] else 1 for k in range(len(shape))])


def _arranged(graph: Graph, op: Op, place: np.ndarray) -> np.ndarray | None:
    """Where the entries of a result come from, each of which is made of one entry and of what does not depend on z."""
    name, out = op.eqn.primitive.name, op.outputs[0]
    if out in graph.of_row or graph.size(out) != place.size or name == "gather" or name not in _AFFINE:
        return None
    if name == "transpose":
        return np.transpose(place, op.eqn.params["permutation"])
    return np.flip(place, op.eqn.params["dimensions"]) if name == "rev" else place.reshape(graph.avals[out].shape)


def _places(graph: Graph, phi: _Phi) -> list[np.ndarray]:
    """Where in phi the entries of each of its values are."""
    ends = np.cumsum([phi.entries.size, *map(graph.size, phi.values)])
    return [
        np.arange(start, end).reshape(graph.avals[v].shape)
        for v, start, end in zip(phi.values, ends[:-1], ends[1:], strict=True)
    ]


def _entries_in(graph: Graph, phi: _Phi) -> list[int]:
    """The values that are entries of z, all of them in phi."""
    return [v for v, index in graph.entries.items() if np.all(np.isin(index, phi.entries))]


def _known(graph: Graph, phi: _Phi, public: Sequence, at: jax.Array, row: tuple) -> dict[int, jax.Array]:
    known = graph.with_public(public)
    known |= graph.of_a_row(row) if row else {}
    at = jnp.asarray(at, graph.avals[graph.z].dtype)
    start = phi.entries.size
    # The other entries of z reach nothing.
    z = jnp.zeros(graph.num_params, at.dtype).at[phi.entries].set(at[:start])
    known |= {v: z[graph.entries[v]].astype(graph.avals[v].dtype) for v in _entries_in(graph, phi)}
    for v in phi.values:
        aval, size = graph.avals[v], graph.size(v)
        known[v] = at[start : start + size].reshape(aval.shape).astype(aval.dtype)
        start += size
    return known


def entry_names(separated: SeparableModel) -> list[str]:
    """What each of the flat unconstrained parameters is called, as in `b[2]`."""
    shapes: dict[str, Shape] = {name: np.shape(x) for name, x in sorted(separated.prototype.items())}
    return [name for site, shape in shapes.items() for name in _indexed(site, shape)]


def _names(graph: Graph, phi: _Phi, separated: SeparableModel) -> tuple[str, ...]:
    of_z = entry_names(separated)
    names = [of_z[k] for k in phi.entries]
    for v in phi.values:
        entries = _entries_behind(graph, v)
        if entries is None:
            names += _indexed(f"{graph.op_of[v].eqn.primitive.name}_{v}", graph.avals[v].shape)
        else:
            names += [of_z[k] for k in entries.ravel()]
    return tuple(names)


def _entries_behind(graph: Graph, value: int) -> np.ndarray | None:
    """The entries of z that a value is a function of, one of each, such as a positive weight of its logarithm."""
    while value not in graph.entries:
        parents, name = graph.parents(value), graph.op_of[value].eqn.primitive.name
        if len(parents) != 1 or graph.size(parents[0]) != graph.size(value) or name not in _ONE_BY_ONE:
            return None
        (value,) = parents
    return graph.entries[value]


def _indexed(name: str, shape: Shape) -> list[str]:
    return [f"{name}[{','.join(map(str, index))}]" if index else name for index in np.ndindex(*shape)]


# -- Whether phi may take any value ------------------------------------------------------------------------------------

_DRAWS = 8  # of z
_WILD_DRAWS, _WILD = 4, 2.5  # of z, and how much further out they lie
_MIXED = 12  # values of phi whose coordinates are those of several draws, and moved
_FURTHER = 2.0  # how far those are moved, in standard deviations of the draws
_NEAR = 0.3  # spread of the latents of synthetic rows
_ROWS = 4  # synthetic ones of each kind
_STEPS, _CLOSE = 40, 0.05  # of the search for a z with a given phi; how close it must come, in standard deviations


class _Numbers(NamedTuple):
    by_z: np.ndarray  # log densities of rows at draws of z, the wild ones last
    by_phi: np.ndarray  # at the other draws' phi, then at mixed ones
    distance: np.ndarray  # of each coordinate of the mixed phi from what some z has, or from where densities go on
    at_mixed: np.ndarray  # log densities of rows at these z; 0 where none was looked for


def _check(graph: Graph, phi: _Phi, separated: SeparableModel, public: Sequence, may_be_tied: bool = False) -> set[int]:
    """The values of a cut that cannot take all the values that a coordinate of their own can; empty if all is well.

    :param may_be_tied: instead, values of a cut outside of whose range the row's log density is undefined or flat.
    """
    rng = np.random.default_rng(0)
    pick = rng.integers(0, _DRAWS, (_MIXED, phi.size))
    noise = _FURTHER * rng.normal(size=pick.shape)
    draws = rng.normal(size=(_DRAWS + _WILD_DRAWS, graph.num_params))
    draws[_DRAWS:] *= _WILD
    rows = synthetic_rows(separated.private_arguments(), _ROWS, rng)
    if separated.latents is not None:
        near = _NEAR * rng.normal(size=(len(rows[0]), separated.latents.size))  # further out a scale may overflow
        rows = (*rows, near.astype(graph.avals[graph.z].dtype))
    public = with_values(public)

    def compute(public: list, z: jax.Array, rows: tuple, noise: jax.Array) -> tuple:
        def at_z(z: jax.Array, row: tuple) -> jax.Array:
            arrays = graph.with_public(public)
            return graph.original(
                z, jnp.zeros(graph.avals[graph.key].shape, jnp.uint32), *row, *(arrays[v] for v in graph.public)
            )

        def over_rows(density: Callable, points: jax.Array) -> jax.Array:
            return jax.vmap(lambda p: jax.vmap(lambda row: density(p, row))(rows))(points)

        coordinates = functools.partial(_coordinates, graph, phi, public)
        of_draws = jax.vmap(coordinates)(z[:_DRAWS])
        scale = jnp.std(of_draws, 0)
        scale = jnp.where(scale > 0, scale, 1.0)
        mixed = of_draws[pick, jnp.arange(phi.size)] + noise * scale
        density = functools.partial(_row_log_density, graph, phi, public)
        by_phi = over_rows(density, jnp.concatenate([of_draws, mixed]))
        if may_be_tied:
            goes_on = _beyond(density, of_draws, mixed, rows, _places(graph, phi))
            return over_rows(at_z, z), by_phi, goes_on, jnp.zeros((_MIXED, len(rows[0])))
        nearest, distance = jax.vmap(lambda z, target: _nearest(lambda z: coordinates(z) / scale, z, target / scale))(
            z[np.arange(_MIXED) % _DRAWS], mixed
        )
        return over_rows(at_z, z), by_phi, distance, over_rows(at_z, nearest)

    dtype = graph.avals[graph.z].dtype
    inputs = (public, draws.astype(dtype), rows, noise.astype(dtype))
    # Compiled ahead of time, a function gives numbers even where `find_cut` itself is being traced.
    numbers = _Numbers(*jax.device_get(jax.jit(compute).lower(*inputs).compile()(*inputs)))
    return _blame(graph, phi, separated, numbers)


def _blame(graph: Graph, phi: _Phi, separated: SeparableModel, numbers: _Numbers) -> set[int]:
    tied = ~(np.max(numbers.distance, 0) <= _CLOSE)
    start, blamed = phi.entries.size, set()
    for v in phi.values:
        if np.any(tied[start : start + graph.size(v)]):
            blamed.add(v)
        start += graph.size(v)
    if blamed:
        return blamed
    # Rows whose density overflows further out say nothing.
    finite = np.all(np.isfinite(numbers.by_z), 0)
    by_z, by_phi = numbers.by_z[:_DRAWS, finite], numbers.by_phi[:_DRAWS, finite]
    allowed = tolerance(separated.arguments, by_z.dtype) * (1 + np.abs(by_z))
    well = finite.any() and np.all(np.abs(by_phi - by_z) <= allowed)
    # Where the model itself overflows, so may its density by phi.
    well = well and np.all(np.isfinite(numbers.by_phi[_DRAWS:]) | ~np.isfinite(numbers.at_mixed), where=finite)
    return set() if well and not tied.any() else set(phi.values) or {graph.z}


def _beyond(
    density: Callable, within: jax.Array, beyond: jax.Array, rows: tuple, places: Sequence[np.ndarray]
) -> jax.Array:
    """0 by point beyond and coordinate where a density goes on; infinity where it ends: where it is not defined for
    some row, or flat for all, as where it is cut off.

    :param within, beyond: points, shape (count, m).
    :param places: of each value, its coordinates. Where rows pick from it, the others are taken to be as those that
        some row sees.
    """
    slopes = jax.vmap(lambda point: jax.vmap(lambda row: jax.grad(density)(point, row))(rows))
    at_within, at_beyond = slopes(within), slopes(beyond)
    is_seen = (at_within != 0).any((0, 1))
    for place in places:
        is_seen = is_seen.at[place].set(jnp.where(is_seen[place].any(), is_seen[place], True))
    goes_on = jnp.isfinite(at_beyond).all(1) & ((at_beyond != 0).any(1) | ~is_seen)
    return jnp.where(goes_on, 0.0, jnp.inf)


def _nearest(coordinates: Callable, z: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The z with the nearest phi that a search finds (Levenberg and Marquardt), and how far that is, by coordinate."""

    def step(_: int, state: tuple) -> tuple:
        z, residual, damping = state
        _, forward = jax.linearize(coordinates, z)
        backward = jax.linear_transpose(forward, z)
        solution, _ = cg(lambda v: forward(backward(v)[0]) + damping * v, residual, maxiter=30)
        moved = z + backward(solution)[0]
        left = target - coordinates(moved)
        better = jnp.sum(left**2) < jnp.sum(residual**2)
        z, residual = jax.tree.map(lambda a, b: jnp.where(better, a, b), (moved, left), (z, residual))
        return z, residual, jnp.clip(damping * jnp.where(better, 0.2, 5.0), 1e-6, 1e6)

    state = (z, target - coordinates(z), jnp.ones((), z.dtype))
    z, residual, _ = lax.fori_loop(0, _STEPS, step, state)
    return z, jnp.abs(residual)
