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

Where a row picks a group's deviation before it is scaled, as in the second line, the values of all groups are scaled
first, and the row picks one of the results: that is the same number. Terms of a sum are put in order for it.

An approximation of l may be evaluated anywhere, so phi should range over all of R^m. Among cuts of the same size,
those with the fewest bounded or positive values (scales, probabilities) come first, so that a scale enters by the
parameter that it is the exponential of. In the end numbers decide: synthetic values of phi, mixed from several draws of
z and moved further out, must be values of phi, too. They are not if a value is confined, or if its entries are tied to
each other, as ordered cut points are; then the cut moves towards z, and to z itself at last. Where that takes more
numbers, the cut stays, if the row's log density goes on smoothly beyond the values of phi: ``y ~ Normal(a**2 + b**2,
1)`` is a normal likelihood of one number, although no parameters make it negative. Only a search looks there.

**No private value is read.** Rows are shapes where the function is traced, and synthetic where it is compared.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from numpyro_dp.arguments import NO_VALUE, canonical
from numpyro_dp.model import SeparableModel
from numpyro_dp.synthetic import synthetic_rows, tolerance
from numpyro_dp.tracing import Shape

__all__ = ["Cut", "find_cut"]


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """A row's log density as a function of phi(z).

    :ivar size: m, the number of coordinates of phi; at most that of z.
    :ivar trivial: whether phi is z itself.
    :ivar names: what each coordinate is: an entry of an unconstrained parameter by the name of its site, as in `b[2]`,
        or of a value by the operation that computes it, as in `add_12[2]`.
    :ivar apart: pairs of coordinates of which no row's log density depends on both, shape (m, m), such as the effects of
        two groups where each row has one. Read off the computation; other pairs may be apart, too.
    :ivar coordinates: the function ``flat z -> phi``. Sees no private argument.
    :ivar row_log_density: the function ``(phi, one-row slices of the private arguments) -> log p(row | z)``.
    :ivar drawn_log_density: the function ``(phi, one-row slices, words of a key) -> log p(row' | z)``, where row' is
        the row with its outcomes drawn at phi, constants to derivatives; None where phi does not tell their law.
    """

    size: int
    trivial: bool
    names: tuple[str, ...]
    apart: np.ndarray
    coordinates: Callable[[jax.Array], jax.Array]
    row_log_density: Callable[[jax.Array, tuple], jax.Array]
    drawn_log_density: Callable[[jax.Array, tuple, jax.Array], jax.Array] | None = None


def find_cut(separated: SeparableModel, args: tuple, kwargs: dict) -> Cut:
    """The fewest functions of the parameters that the rows see, nearest to the data; z itself if there are no better.

    :param separated: what `separate` returned for the model.
    :param args, kwargs: the model's arguments. Of the private ones nothing is used; public arrays may be traced.
    """
    graph = _trace(separated, args, kwargs)
    public = _public_arrays(separated, args, kwargs)
    computed = graph.op_of.keys() - graph.entries.keys()
    checkable = not any(isinstance(constant, jax.core.Tracer) for constant in graph.constants.values())
    banned = set() if checkable else set(computed)
    smallest = phi = _choose(graph, banned)
    for attempt in range(_ATTEMPTS + 1):
        # Entries of z range over everything.
        blamed = _check(graph, phi, separated, public) if phi.values else set()
        if not blamed:
            break
        banned |= blamed if blamed - banned and attempt + 1 < _ATTEMPTS else computed
        phi = _choose(graph, banned)
    if smallest.size < phi.size and not _check(graph, smallest, separated, public, may_be_tied=True):
        phi = smallest
    if not phi.values and phi.entries.size in (0, graph.num_params):
        return _trivial(graph, separated, args, kwargs)
    return Cut(
        size=phi.size,
        trivial=False,
        names=_names(graph, phi, separated),
        apart=_apart(graph, phi),
        coordinates=functools.partial(_coordinates, graph, phi, public),
        row_log_density=functools.partial(_row_log_density, graph, phi, public),
        drawn_log_density=functools.partial(_drawn_log_density, graph, phi, public) if _can_draw(graph, phi) else None,
    )


_ATTEMPTS = 5


def _trivial(graph: "_Graph", separated: SeparableModel, args: tuple, kwargs: dict) -> Cut:
    return Cut(
        size=separated.num_params,
        trivial=True,
        names=tuple(_entry_names(separated)),
        apart=_apart(graph, _Phi(np.arange(separated.num_params), (), (graph.z,), separated.num_params)),
        coordinates=lambda z: z,
        row_log_density=separated.row_log_density(args, kwargs),
        drawn_log_density=None if graph.drawn is None else separated.drawn_log_density(args, kwargs),
    )


# -- The computation as a graph ----------------------------------------------------------------------------------------


class _Op(NamedTuple):
    """One operation on numbered values."""

    eqn: JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class _Graph:
    """The row log density as operations on numbered values, calls of functions written out.

    :ivar ops: the operations, each after those that it needs.
    :ivar constants: values known beforehand, by number.
    :ivar z, public, rows, key: numbers of the flat parameters, of the public arrays, of the row, of the key's words.
    :ivar output, drawn: numbers of the row's log density, and of that of a row that is drawn; None if none can be.
    :ivar of_z, of_row: the values that depend on the parameters, and those that depend on the row (or on the key).
    :ivar entries: the values that are entries of z, and which: indices in the shape of the value.
    :ivar picks: the values that a row picks, by an index of its own, from a value that depends on the parameters alone.
    """

    def __init__(self, closed: ClosedJaxpr, num_rows: int):
        self.original = jaxpr_as_fun(closed)
        self.ops: list[_Op] = []
        self.op_of: dict[int, _Op] = {}
        self.avals: list[Any] = []  # shape and dtype of each value
        self.constants: dict[int, Any] = {}
        self._known: dict[Any, Any] = {}
        self.picks: dict[int, _Op] = {}
        self.z, self.key, *rest = inputs = [self._value(var.aval) for var in closed.jaxpr.invars]
        self.rows, self.public = rest[:num_rows], rest[num_rows:]
        self.of_z, self.of_row = {self.z}, {self.key, *self.rows}
        self.entries: dict[int, np.ndarray] = {self.z: np.arange(self.size(self.z))}
        self.output, *drawn = self._write_out(closed.jaxpr, closed.consts, inputs)
        self.drawn = drawn[0] if drawn else None

    @property
    def num_params(self) -> int:
        return self.size(self.z)

    def size(self, value: int) -> int:
        return math.prod(self.avals[value].shape)

    def is_float(self, value: int) -> bool:
        return jnp.issubdtype(self.avals[value].dtype, jnp.floating)

    def of_z_alone(self, value: int) -> bool:
        return value in self.of_z and value not in self.of_row

    def parents(self, value: int) -> list[int]:
        """The values that depend on the parameters of which this one is computed."""
        op = self.op_of.get(value)
        return [] if op is None else [v for v in dict.fromkeys(op.inputs) if v in self.of_z]

    def needed(self, targets: Iterable[int], known: Collection[int] = ()) -> list[_Op]:
        """The operations that compute some values from known ones, in order."""
        wanted, ops = set(targets) - set(known), []
        for op in reversed(self.ops):
            if not wanted.isdisjoint(op.outputs):
                ops.append(op)
                wanted |= set(op.inputs) - set(known)
        return ops[::-1]

    def evaluate(self, known: Mapping[int, Any], targets: Sequence[int]) -> list[Any]:
        values = {**self.constants, **known}
        for op in self.needed(targets, known):
            primitive = op.eqn.primitive
            params = primitive.get_bind_params(op.eqn.params)
            results = primitive.bind(*(values[v] for v in op.inputs), **params)
            results = results if primitive.multiple_results else [results]
            values |= {v: r for v, r in zip(op.outputs, results, strict=True) if v not in known}
        return [values[v] for v in targets]

    def _value(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def _constant(self, aval: Any, constant: Any) -> int:
        # An array that a model closes over comes anew with each trace: it is one value. Tracers and keys have no bytes.
        if isinstance(constant, jax.core.Tracer) or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
            key: Any = object()
        else:
            key = (str(aval), hashlib.sha256(np.asarray(constant).tobytes()).digest())
        if key not in self._known:
            self._known[key] = self._value(aval)
            self.constants[self._known[key]] = constant
        return self._known[key]

    def _write_out(self, jaxpr: Jaxpr, consts: Sequence, inputs: Sequence[int]) -> list[int]:
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers |= {var: self._constant(var.aval, c) for var, c in zip(jaxpr.constvars, consts, strict=True)}

        def number(atom: Any) -> int:
            return self._constant(atom.aval, atom.val) if isinstance(atom, Literal) else numbers[atom]

        for eqn in jaxpr.eqns:
            operands = [number(atom) for atom in eqn.invars]
            inner = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
            if isinstance(inner, ClosedJaxpr):
                results = self._write_out(inner.jaxpr, inner.consts, operands)
            elif isinstance(inner, Jaxpr):
                results = self._write_out(inner, (), operands)
            else:
                results = self._apply(eqn, operands)
            numbers |= dict(zip(eqn.outvars, results, strict=True))
        return [number(atom) for atom in jaxpr.outvars]

    def _apply(self, eqn: JaxprEqn, operands: Sequence[int]) -> list[int]:
        # A model may compute the same thing twice (`b[0]` in two places): it is one value.
        key: Any = (
            eqn.primitive,
            *operands,
            *(item for name in sorted(eqn.params) for item in (name, eqn.params[name])),
        )
        try:
            known = self._known.get(key)
        except TypeError:  # a parameter that cannot be hashed
            known, key = None, None
        if known is not None and not eqn.effects:
            return known
        moved = self._sliced_first(eqn, operands) if eqn.primitive.name == "gather" else self._before_picks(eqn, operands)
        if moved is not None:
            if key is not None:
                self._known[key] = moved
            return moved
        outputs = [self._value(var.aval) for var in eqn.outvars]
        op = _Op(eqn, tuple(operands), tuple(outputs))
        self.ops.append(op)
        self.op_of |= dict.fromkeys(outputs, op)
        for group in (self.of_z, self.of_row):
            if not group.isdisjoint(operands):
                group.update(outputs)
        self.entries |= self._entries_of(op)
        if _picks(op) and self.of_z_alone(operands[0]) and operands[1] in self.of_row - self.of_z:
            self.picks[outputs[0]] = op
        if key is not None:
            self._known[key] = outputs
        return outputs

    # -- Arithmetic before a row picks ---------------------------------------------------------------------------------

    def _before_picks(self, eqn: JaxprEqn, operands: Sequence[int]) -> list[int] | None:
        """The result of an operation on picked values, as one that is picked itself; None if that cannot be.

        ``c * V[i]`` is ``(c * V)[i]``, and in a sum the terms that are picked by the same index, or by none, come first.
        """
        name, shape = eqn.primitive.name, eqn.outvars[0].aval.shape
        if name in _SUMS:
            terms = [*self._terms(operands[0], 1, shape), *self._terms(operands[1], -1 if name == "sub" else 1, shape)]
            return self._sum_before_picks(terms)
        if name not in _PRODUCTS:
            return None
        pick = next((v for v in operands if v in self.picks), None)
        if pick is None or not all(self._joins(v, pick) for v in operands):
            return None

        def operation(*values: jax.Array) -> jax.Array:
            return eqn.primitive.bind(*values, **eqn.params)

        return self._pick_of(pick, operands, operation)

    def _sliced_first(self, eqn: JaxprEqn, operands: Sequence[int]) -> list[int] | None:
        """``V[i, 0]`` as ``V[:, 0][i]``, so that the other columns are none of the row's concern; None if it is no such.

        :param eqn: a gather.
        """
        source, index = operands
        joined, axes = self.op_of.get(index), eqn.params["dimension_numbers"].start_index_map
        if joined is None or joined.eqn.primitive.name != "concatenate" or len(joined.inputs) != len(axes):
            return None
        for axis, part in zip(axes, joined.inputs, strict=True):
            column, rest = self._one_constant(part), [v for v in joined.inputs if v != part]
            params = _without_axis(eqn, axis)
            if column is None or params is None or not rest or not 0 <= column < self.avals[source].shape[axis]:
                continue

            def picked(source: jax.Array, *rest: jax.Array, axis=axis, column=column, params=params) -> jax.Array:
                sliced = lax.index_in_dim(source, column, axis, keepdims=False)
                return eqn.primitive.bind(sliced, jnp.concatenate(rest, -1), **params)

            return self._trace_in(picked, [source, *rest])
        return None

    def _one_constant(self, value: int) -> int | None:
        """The number of which all entries of a value are made, if it is known."""
        ops = self.needed([value])
        inputs = {value, *(v for op in ops for v in op.inputs)} - {v for op in ops for v in op.outputs}
        if not inputs <= self.constants.keys() or any(isinstance(self.constants[v], jax.core.Tracer) for v in inputs):
            return None
        with jax.ensure_compile_time_eval():
            found = np.asarray(self.evaluate({}, [value])[0])
        return int(found.flat[0]) if found.size and (found == found.flat[0]).all() else None

    def _terms(self, value: int, sign: int, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """The terms of a sum of one shape, and their signs."""
        op = self.op_of.get(value)
        is_sum = op is not None and op.eqn.primitive.name in _SUMS and value in self.of_row and value in self.of_z
        if op is None or not is_sum or self.avals[value].shape != shape:
            return [(value, sign)]
        one, other = op.inputs
        negated = -sign if op.eqn.primitive.name == "sub" else sign
        return [*self._terms(one, sign, shape), *self._terms(other, negated, shape)]

    def _sum_before_picks(self, terms: list[tuple[int, int]]) -> list[int] | None:
        pick = next((v for v, _ in terms if v in self.picks), None)
        if pick is None:
            return None
        joined = [term for term in terms if self._joins(term[0], pick)]
        if len(joined) < 2:
            return None
        signs = [sign for _, sign in joined]
        (total,) = self._pick_of(pick, [v for v, _ in joined], lambda *values: _signed_sum(values, signs))
        others = [term for term in terms if term not in joined]
        if not others:
            return [total]
        values = [total, *(v for v, _ in others)]
        return self._trace_in(lambda *values: _signed_sum(values, [1, *(sign for _, sign in others)]), values)

    def _joins(self, value: int, pick: int) -> bool:
        """Whether a value is picked by the same index as `pick`, or the same for whatever is picked."""
        here, there = self.picks.get(value), self.picks[pick]
        if here is not None:
            same_shape = self.avals[here.inputs[0]].shape == self.avals[there.inputs[0]].shape
            return same_shape and here.inputs[1] == there.inputs[1] and here.eqn.params == there.eqn.params
        if value in self.of_row or not self.is_float(value):
            return False
        batch = [k for n, k in enumerate(self.avals[pick].shape) if n not in there.eqn.params["dimension_numbers"][0]]
        return self.size(value) == 1 or (math.prod(batch) == 1 and self.avals[value].shape == self.avals[pick].shape)

    def _pick_of(self, pick: int, operands: Sequence[int], operation: Callable) -> list[int]:
        """Pick, as `pick` does, from the results of an operation on what is picked from."""
        op = self.picks[pick]
        sources = [self.picks[v].inputs[0] if v in self.picks else v for v in operands]
        shape = self.avals[op.inputs[0]].shape
        kept = [k for k in range(len(shape)) if k not in op.eqn.params["dimension_numbers"].collapsed_slice_dims]

        def spread(value: jax.Array, is_source: bool) -> jax.Array:
            if is_source or value.size == 1:
                return jnp.broadcast_to(value if is_source else value.reshape(()), shape)
            return lax.broadcast_in_dim(value.reshape([shape[k] for k in kept]), shape, kept)

        def picked(index: jax.Array, *values: jax.Array) -> jax.Array:
            spread_out = [spread(x, v in self.picks) for x, v in zip(values, operands, strict=True)]
            return op.eqn.primitive.bind(operation(*spread_out), index, **op.eqn.params)

        return self._trace_in(picked, [op.inputs[1], *sources])

    def _trace_in(self, function: Callable, operands: Sequence[int]) -> list[int]:
        """The results of a function of numbered values, as numbered values."""
        shapes = (jax.ShapeDtypeStruct(self.avals[v].shape, self.avals[v].dtype) for v in operands)
        closed = jax.make_jaxpr(function)(*shapes)
        return self._write_out(closed.jaxpr, closed.consts, operands)

    def _entries_of(self, op: _Op) -> dict[int, np.ndarray]:
        """Which entries of z the results of an operation are, if it only picks and arranges them."""
        name, params = op.eqn.primitive.name, op.eqn.params
        if not op.inputs or op.inputs[0] not in self.entries:
            return {}
        index, out = self.entries[op.inputs[0]], op.outputs[0]
        if name == "split":
            ends = np.cumsum(params["sizes"])[:-1]
            return dict(zip(op.outputs, np.split(index, ends, axis=params["axis"]), strict=True))
        if name == "slice":
            bounds = (params["start_indices"], params["limit_indices"], params["strides"] or (1,) * index.ndim)
            return {out: index[tuple(slice(*bound) for bound in zip(*bounds, strict=True))]}
        if name == "dynamic_slice" and all(v in self.constants for v in op.inputs[1:]):
            sizes = params["slice_sizes"]
            starts = [int(self.constants[v]) for v in op.inputs[1:]]
            starts = [min(max(s, 0), n - k) for s, n, k in zip(starts, index.shape, sizes, strict=True)]
            return {out: index[tuple(slice(s, s + k) for s, k in zip(starts, sizes, strict=True))]}
        if name == "transpose":
            return {out: np.transpose(index, params["permutation"])}
        same_order = name in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "convert_element_type")
        if same_order and self.size(out) == index.size and self.is_float(out):
            return {out: index.reshape(self.avals[out].shape)}
        return {}


def _picks(op: _Op) -> bool:
    """Whether an operation picks whole entries of a value along some of its axes."""
    if op.eqn.primitive.name != "gather":
        return False
    shape, params = op.eqn.invars[0].aval.shape, op.eqn.params
    numbers = params["dimension_numbers"]
    is_whole = all(
        size == (1 if k in numbers.collapsed_slice_dims else shape[k]) for k, size in enumerate(params["slice_sizes"])
    )
    fill = params["fill_value"]
    return is_whole and not numbers.operand_batching_dims and (fill is None or bool(np.isnan(fill)))


def _without_axis(eqn: JaxprEqn, axis: int) -> dict[str, Any] | None:
    """The parameters of a gather from a value that has an axis less, one that the index reaches; None if it cannot."""
    numbers = eqn.params["dimension_numbers"]
    if axis not in numbers.collapsed_slice_dims or numbers.operand_batching_dims:
        return None

    def left(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(a - (a > axis) for a in axes if a != axis)

    numbers = numbers._replace(
        collapsed_slice_dims=left(numbers.collapsed_slice_dims), start_index_map=left(numbers.start_index_map)
    )
    sizes = tuple(size for a, size in enumerate(eqn.params["slice_sizes"]) if a != axis)
    return eqn.params | {"dimension_numbers": numbers, "slice_sizes": sizes}


def _signed_sum(values: Sequence[jax.Array], signs: Sequence[int]) -> jax.Array:
    total = None
    for value, sign in sorted(zip(values, signs, strict=True), key=lambda pair: -pair[1]):
        if total is None:
            total = value if sign > 0 else -value
        else:
            total = total + value if sign > 0 else total - value
    assert total is not None
    return total


_SUMS = frozenset(("add", "add_any", "sub"))
_PRODUCTS = frozenset(("mul", "div", "neg"))

# Functions that are called, and the parameter that holds them. Those with derivatives of their own stay as they are.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


def _trace(separated: SeparableModel, args: tuple, kwargs: dict) -> _Graph:
    leaves, treedef = jax.tree.flatten((args, kwargs))

    def log_densities(z: jax.Array, key: jax.Array, rows: tuple, public: Sequence) -> list[jax.Array]:
        supply = iter(public)
        filled = [next(supply) if _is_public(a) else leaf for leaf, a in zip(leaves, separated.arguments, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        found = [separated.row_log_density(args, kwargs)(z, rows)]
        # Whatever keeps outcomes from being drawn (a law that has no sampler, say), one can do without.
        with contextlib.suppress(Exception):
            found.append(separated.drawn_log_density(args, kwargs)(z, rows, key))
        return found

    z = jax.ShapeDtypeStruct((separated.num_params,), ravel_pytree(separated.prototype)[0].dtype)
    rows = tuple(jax.ShapeDtypeStruct((1, *a.row_shape), a.dtype) for a in separated.private_arguments())
    public = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in separated.arguments if _is_public(a)]
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    graph = _Graph(jax.make_jaxpr(log_densities)(z, key, rows, public), len(rows))
    if graph.drawn is not None:
        # Where the observed outcome has a part in the law of the drawn one (a series' last value, a weight that depends
        # on it), the two together are no draw of the model.
        outcomes = {graph.rows[k] for k in separated.outcome_leaves or ()}
        if any(not outcomes.isdisjoint(op.inputs) for op in graph.needed([graph.drawn])):
            graph.drawn = None
    return graph


def _is_public(argument: Any) -> bool:
    """Whether an argument is a public array: these are traced, so that their values may be unknown."""
    return argument.shape is not None and not argument.private


def _public_arrays(separated: SeparableModel, args: tuple, kwargs: dict) -> list:
    leaves = jax.tree.leaves((args, kwargs))
    return [leaf for leaf, a in zip(leaves, separated.arguments, strict=True) if _is_public(a)]


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


def _choose(graph: _Graph, banned: Collection[int]) -> _Phi:
    cut = _minimum_cut(graph, banned)
    for value in sorted(cut):
        cut = (cut - {value}) | {_before_affine(graph, value)}
    entries = [graph.entries[v].ravel() for v in sorted(cut) if v in graph.entries]
    index = np.unique(np.concatenate(entries)) if entries else np.zeros(0, int)
    values = tuple(sorted(cut - graph.entries.keys()))
    return _Phi(index, values, tuple(sorted(cut)), index.size + sum(map(graph.size, values)))


def _minimum_cut(graph: _Graph, banned: Collection[int]) -> set[int]:
    """The values that separate z from what depends on the row: of the smallest total size; among these, with the fewest
    entries that are confined to a range; among these, nearest to the data.

    A value is an edge from vertex 2v to vertex 2v + 1, whose width is its size. All other edges are wide.
    """
    confined, sink = _confined(graph), 2 * len(graph.avals)
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


def _confined(graph: _Graph) -> set[int]:
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


def _before_affine(graph: _Graph, value: int) -> int:
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
_JOINING = frozenset(["concatenate", "dynamic_update_slice", "scatter", "select_n", "stack"])
_AFFINE = frozenset([
    "add", "add_any", "broadcast_in_dim", "convert_element_type", "copy", "div", "expand_dims", "gather", "mul", "neg",
    "reshape", "rev", "squeeze", "sub", "transpose",
])
# fmt: on


# -- The two functions -------------------------------------------------------------------------------------------------


def _with_public(graph: _Graph, public: Sequence) -> dict[int, jax.Array]:
    return {v: jnp.asarray(x, graph.avals[v].dtype) for v, x in zip(graph.public, public, strict=True)}


def _coordinates(graph: _Graph, phi: _Phi, public: Sequence, z: jax.Array) -> jax.Array:
    z = jnp.asarray(z, graph.avals[graph.z].dtype)
    parts = graph.evaluate({graph.z: z, **_with_public(graph, public)}, phi.values)
    return jnp.concatenate([z[phi.entries], *(jnp.ravel(part).astype(z.dtype) for part in parts)])


def _row_log_density(graph: _Graph, phi: _Phi, public: Sequence, at: jax.Array, row: tuple) -> jax.Array:
    return graph.evaluate(_known(graph, phi, public, at, row), [graph.output])[0]


def _drawn_log_density(
    graph: _Graph, phi: _Phi, public: Sequence, at: jax.Array, row: tuple, key: jax.Array
) -> jax.Array:
    assert graph.drawn is not None
    return graph.evaluate({**_known(graph, phi, public, at, row), graph.key: key}, [graph.drawn])[0]


def _can_draw(graph: _Graph, phi: _Phi) -> bool:
    """Whether a row can be drawn, and phi is all that it takes."""
    if graph.drawn is None:
        return False
    known = {graph.key, *graph.rows, *graph.public, *phi.values, *_entries_in(graph, phi)}
    inputs = {v for op in graph.needed([graph.drawn], known) for v in op.inputs}
    return not any(v in graph.entries and v not in known for v in inputs)


def _apart(graph: _Graph, phi: _Phi) -> np.ndarray:
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


def _picked_by(graph: _Graph, op: _Op, value: int) -> tuple[int, Any]:
    """The index by which a row picks from a value, and the position at which it picks each entry; or `_ALWAYS`."""
    axes = op.eqn.params["dimension_numbers"].collapsed_slice_dims if graph.picks.get(op.outputs[0]) is op else ()
    if len(axes) != 1 or op.inputs[0] != value or graph.size(op.inputs[1]) != 1:
        return _ALWAYS, 0
    shape = graph.avals[value].shape
    return op.inputs[1], np.arange(shape[axes[0]]).reshape([-1 if k == axes[0] else 1 for k in range(len(shape))])


def _arranged(graph: _Graph, op: _Op, place: np.ndarray) -> np.ndarray | None:
    """Where the entries of a result come from, each of which is made of one entry and of what does not depend on z."""
    name, out = op.eqn.primitive.name, op.outputs[0]
    if out in graph.of_row or graph.size(out) != place.size or name == "gather" or name not in _AFFINE:
        return None
    if name == "transpose":
        return np.transpose(place, op.eqn.params["permutation"])
    return np.flip(place, op.eqn.params["dimensions"]) if name == "rev" else place.reshape(graph.avals[out].shape)


def _places(graph: _Graph, phi: _Phi) -> list[np.ndarray]:
    """Where in phi the entries of each of its values are."""
    ends = np.cumsum([phi.entries.size, *map(graph.size, phi.values)])
    return [
        np.arange(start, end).reshape(graph.avals[v].shape)
        for v, start, end in zip(phi.values, ends[:-1], ends[1:], strict=True)
    ]


def _entries_in(graph: _Graph, phi: _Phi) -> list[int]:
    """The values that are entries of z, all of them in phi."""
    return [v for v, index in graph.entries.items() if np.all(np.isin(index, phi.entries))]


def _known(graph: _Graph, phi: _Phi, public: Sequence, at: jax.Array, row: tuple) -> dict[int, jax.Array]:
    known = _with_public(graph, public)
    known |= {v: jnp.asarray(x, graph.avals[v].dtype) for v, x in zip(graph.rows, row, strict=True)}
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


def _entry_names(separated: SeparableModel) -> list[str]:
    shapes: dict[str, Shape] = {name: np.shape(x) for name, x in sorted(separated.prototype.items())}
    return [name for site, shape in shapes.items() for name in _indexed(site, shape)]


def _names(graph: _Graph, phi: _Phi, separated: SeparableModel) -> tuple[str, ...]:
    of_z = _entry_names(separated)
    names = [of_z[k] for k in phi.entries]
    for v in phi.values:
        names += _indexed(f"{graph.op_of[v].eqn.primitive.name}_{v}", graph.avals[v].shape)
    return tuple(names)


def _indexed(name: str, shape: Shape) -> list[str]:
    return [f"{name}[{','.join(map(str, index))}]" if index else name for index in np.ndindex(*shape)]


# -- Whether phi may take any value ------------------------------------------------------------------------------------

_DRAWS = 8  # of z
_WILD_DRAWS, _WILD = 4, 2.5  # of z, and how much further out they lie
_MIXED = 12  # values of phi whose coordinates are those of several draws, and moved
_FURTHER = 2.0  # how far those are moved, in standard deviations of the draws
_ROWS = 4  # synthetic ones of each kind
_STEPS, _CLOSE = 40, 0.05  # of the search for a z with a given phi; how close it must come, in standard deviations


class _Numbers(NamedTuple):
    by_z: np.ndarray  # log densities of rows at draws of z, the wild ones last
    by_phi: np.ndarray  # at the other draws' phi, then at mixed ones
    distance: np.ndarray  # of each coordinate of the mixed phi from what some z has, or from where densities go on


def _check(
    graph: _Graph, phi: _Phi, separated: SeparableModel, public: Sequence, may_be_tied: bool = False
) -> set[int]:
    """The values of a cut that cannot take all the values that a coordinate of their own can; empty if all is well.

    :param may_be_tied: instead, those beyond whose values the row's log density is not defined, or flat.
    """
    rng = np.random.default_rng(0)
    pick = rng.integers(0, _DRAWS, (_MIXED, phi.size))
    noise = _FURTHER * rng.normal(size=pick.shape)
    draws = rng.normal(size=(_DRAWS + _WILD_DRAWS, graph.num_params))
    draws[_DRAWS:] *= _WILD
    rows = synthetic_rows(separated.private_arguments(), _ROWS, rng)
    # Public arrays that are traced have no value here.
    public = [np.ones(x.shape, canonical(x.dtype)) if isinstance(x, NO_VALUE) else np.asarray(x) for x in public]

    def compute(public: list, z: jax.Array, rows: tuple, noise: jax.Array) -> tuple:
        def at_z(z: jax.Array, row: tuple) -> jax.Array:
            arrays = _with_public(graph, public)
            return graph.original(z, jnp.zeros(2, jnp.uint32), *row, *(arrays[v] for v in graph.public))[0]

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
            return over_rows(at_z, z), by_phi, _beyond(density, mixed, rows)
        distance = jax.vmap(lambda z, target: _distance(lambda z: coordinates(z) / scale, z, target / scale))(
            z[np.arange(_MIXED) % _DRAWS], mixed
        )
        return over_rows(at_z, z), by_phi, distance

    dtype = graph.avals[graph.z].dtype
    inputs = (public, draws.astype(dtype), rows, noise.astype(dtype))
    # Compiled ahead of time, a function gives numbers even where `find_cut` itself is being traced.
    numbers = _Numbers(*jax.device_get(jax.jit(compute).lower(*inputs).compile()(*inputs)))
    return _blame(graph, phi, separated, numbers)


def _blame(graph: _Graph, phi: _Phi, separated: SeparableModel, numbers: _Numbers) -> set[int]:
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
    by_z, by_phi = numbers.by_z[:_DRAWS, finite], numbers.by_phi[:, finite]
    allowed = tolerance(separated.arguments, by_z.dtype) * (1 + np.abs(by_z))
    well = finite.any() and np.all(np.isfinite(by_phi)) and np.all(np.abs(by_phi[:_DRAWS] - by_z) <= allowed)
    return set() if well and not tied.any() else set(phi.values)


def _beyond(density: Callable, points: jax.Array, rows: tuple) -> jax.Array:
    """0 by point and coordinate where a density goes on; infinity where it ends: where it is not defined for some row,
    or flat for all, as where it is cut off."""
    slopes = jax.vmap(lambda point: jax.vmap(lambda row: jax.grad(density)(point, row))(rows))(points)
    return jnp.where(jnp.isfinite(slopes).all(1) & (slopes != 0).any(1), 0.0, jnp.inf)


def _distance(coordinates: Callable, z: jax.Array, target: jax.Array) -> jax.Array:
    """How far, by coordinate, the nearest phi that a search finds is from the target (Levenberg and Marquardt)."""

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
    return jnp.abs(lax.fori_loop(0, _STEPS, step, state)[1])
