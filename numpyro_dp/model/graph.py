"""A model's row log density as a graph of operations, in which parameters meet the data as late as they can.

JAX's record of the computation (its jaxpr) is written out, and three things are moved on the way, none of which
changes a number but for rounding. Where a row picks one entry of a value by an index of its own, and the entry is then
multiplied by, or added to, what is the same for all rows, the arithmetic is done with all entries first, and the row
picks from the results: ``mu + tau * eta[group]`` becomes ``(mu + tau * eta)[group]``. Where a row picks from one
column, ``effects[group, 0]``, the column is taken first. And what is the same for all rows multiplies parameters, not
what rows make of them: ``tau * (X @ z)``, and ``(tau * X) @ z``, become ``X @ (tau * z)``.
"""

import contextlib
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

from numpyro_dp.model.drawing import FEW, is_discrete, is_own, keeps_total
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.privacy.isolation import CALLS, called
from numpyro_dp.privacy.vmap import bind


class Op(NamedTuple):
    """One operation on numbered values."""

    eqn: JaxprEqn
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Graph:
    """The row log density as operations on numbered values, calls of functions written out.

    :ivar ops: the operations, each after those that it needs.
    :ivar constants: values known beforehand, by number.
    :ivar z, public, rows, key: numbers of the flat parameters, of the public arrays, of the row, of the key's words.
        Where latents are integrated out, the last of the row's are these, w, and the density is that of row and w.
    :ivar output, drawn: numbers of the row's log density, and of that of a row that is drawn, which counts once; None
        if none can be.
    :ivar seen: true if no mask hides a part of the row; None if no mask could.
    :ivar weight: how often the row's density counts; None if once, and where it is nothing that the row alone tells.
    :ivar start, prior, given: where latents are integrated out, the numbers of what `Parts` gives; else None. Then
        `drawn` is that of the row given w.
    :ivar count, counted: numbers of a drawn count, and of the log density of the row with the key's first word as its
        count; None where outcomes are no single counts.
    :ivar num_outcomes: how many values an outcome can have, where these are few; then it is the key's first word that
        says which of them the drawn one is.
    :ivar is_discrete: whether outcomes that are drawn are counts, or have few values each.
    :ivar passes: how often a row is drawn over, see `SeparableModel.drawn_log_density`.
    :ivar is_to_check: whether numbers must tell that what is drawn has the law of which the density is: it is drawn by
        a sampler of the user's own, or several times over.
    :ivar of_z, of_row: the values that depend on the parameters, and those that depend on the row (or on the key).
    :ivar entries: the values that are entries of z, and which: indices in the shape of the value.
    :ivar picks: the values that a row picks, by an index of its own, from a value that depends on the parameters alone.
    """

    def __init__(self, closed: ClosedJaxpr, outputs: Sequence[str], num_rows: int):
        self._original, self._density = jaxpr_as_fun(closed), list(outputs).index("density")
        self.ops: list[Op] = []
        self.op_of: dict[int, Op] = {}
        self.avals: list[Any] = []  # shape and dtype of each value
        self.constants: dict[int, Any] = {}
        self._known: dict[Any, Any] = {}
        self.picks: dict[int, Op] = {}
        self.z, self.key, *rest = inputs = [self._value(var.aval) for var in closed.jaxpr.invars]
        self.rows, self.public = rest[:num_rows], rest[num_rows:]
        self.of_z, self.of_row = {self.z}, {self.key, *self.rows}
        self.entries: dict[int, np.ndarray] = {self.z: np.arange(self.size(self.z))}
        found = dict(zip(outputs, self._write_out(closed.jaxpr, closed.consts, inputs), strict=True))
        self.output = found["density"]
        self.start, self.prior, self.given, self.drawn, self.weight, self.seen, self.count, self.counted = map(
            found.get, _OTHER_OUTPUTS
        )
        self.num_outcomes: int | None = None
        self.is_discrete = False
        self.passes, self.is_to_check = 1, False

    @property
    def needs_numbers(self) -> bool:
        """Whether it takes numbers to tell that what is drawn has the law of which the density is."""
        return self.drawn is not None and (self.is_to_check or self.seen is not None)

    def with_public(self, public: Sequence) -> dict[int, jax.Array]:
        """The public arrays, by number."""
        return {v: jnp.asarray(x, self.avals[v].dtype) for v, x in zip(self.public, public, strict=True)}

    def of_a_row(self, row: tuple) -> dict[int, jax.Array]:
        """The arrays of one row, by number."""
        return {v: jnp.asarray(x, self.avals[v].dtype) for v, x in zip(self.rows, row, strict=True)}

    def original(self, *inputs: Any) -> jax.Array:
        """The row's log density by z, key, rows and public arrays, as it was traced."""
        return self._original(*inputs)[self._density]

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

    @property
    def has_thresholds(self) -> bool:
        """Whether the density compares parameters with what a row says, such as a day of change with the row's day.

        Comparisons with constants are everywhere: they keep numbers in range.
        """
        of_row_alone = self.of_row - self.of_z
        return any(
            op.eqn.primitive.name in _COMPARISONS
            and not self.of_z.isdisjoint(op.inputs)
            and not of_row_alone.isdisjoint(op.inputs)
            for op in self.needed([self.output])
        )

    def needed(self, targets: Iterable[int], known: Collection[int] = ()) -> list[Op]:
        """The operations that compute some values from known ones, in order."""
        wanted, ops = set(targets) - set(known), []
        for op in reversed(self.ops):
            if not wanted.isdisjoint(op.outputs):
                ops.append(op)
                wanted |= set(op.inputs) - set(known)
        return ops[::-1]

    def uses(self, leaves: Sequence[int], targets: Iterable[int | None] | None = None) -> list[Op]:
        """Operations by which some arrays of the row have a part in others, beyond whether they are missing.

        :param targets: numbers of these. Default: what is drawn, which is missing where the outcome is.
        """
        values = {self.rows[k] for k in leaves}
        parts = [value for value in ([self.drawn] if targets is None else targets) if value is not None]
        return [op for op in self.needed(parts) if not values.isdisjoint(op.inputs) and not self.finds_missing(op)]

    def adds_up(self, op: Op) -> bool:
        """Whether an operation is a sum over the last axis."""
        last = len(self.avals[op.inputs[0]].shape) - 1
        return op.eqn.primitive.name == "reduce_sum" and op.eqn.params["axes"] == (last,) and last > 0

    def finds_missing(self, op: Op) -> bool:
        """Whether an operation tells only whether a value is missing (NaN), or finite."""
        name = op.eqn.primitive.name
        return name == "is_finite" or (name in ("ne", "eq") and op.inputs[0] == op.inputs[1])

    def evaluate(self, known: Mapping[int, Any], targets: Sequence[int]) -> list[Any]:
        values = {**self.constants, **known}
        for op in self.needed(targets, known):
            results = bind(op.eqn, [values[v] for v in op.inputs])
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
            if eqn.primitive.name in INLINED:
                inner = called(eqn)
                results = self._write_out(inner.jaxpr, inner.consts, operands)
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
        moved = (
            self._sliced_first(eqn, operands) if eqn.primitive.name == "gather" else self._before_picks(eqn, operands)
        )
        if moved is None:
            moved = self._with_moved_factor(eqn, operands)
        if moved is not None:
            if key is not None:
                self._known[key] = moved
            return moved
        outputs = [self._value(var.aval) for var in eqn.outvars]
        op = Op(eqn, tuple(operands), tuple(outputs))
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

        ``c * V[i]`` is ``(c * V)[i]``, and in a sum terms that are picked by the same index, or by none, come first.
        """
        name, shape = eqn.primitive.name, _shape(eqn.outvars[0])
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
        """``V[i, 0]`` as ``V[:, 0][i]``: the other columns are none of the row's concern. None if it is no such.

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

    # -- Factors that all rows share -----------------------------------------------------------------------------------

    def _with_moved_factor(self, eqn: JaxprEqn, operands: Sequence[int]) -> list[int] | None:
        """The result of an operation in which a factor of parameters alone is moved to others; None if there is none.

        ``c * (X @ z)`` is ``X @ (c * z)``, and so is ``(c * X) @ z``. No cut becomes larger: one that has c and z, or
        what they are made of, has all that their product is made of.
        """
        name = eqn.primitive.name
        found = self._factor_of_product(eqn, operands) if name in _FACTORS else None
        if found is None and name in _BILINEAR:
            found = self._factor_of_data(eqn, operands)
        return None if found is None else [found]

    def _factor_of_product(self, eqn: JaxprEqn, operands: Sequence[int]) -> int | None:
        """``c * (X @ z)`` as ``X @ (c * z)``; None if it is no such.

        :param eqn: a product or a quotient.
        """
        name = eqn.primitive.name
        for value, factor in self._times(operands, name):
            if value in self.of_z & self.of_row and self.avals[value].shape == _shape(eqn.outvars[0]):
                found = self._scaled(value, factor, name)
                if found is not None:
                    return found
        return None

    def _factor_of_data(self, eqn: JaxprEqn, operands: Sequence[int]) -> int | None:
        """``(c * X) @ z`` as ``X @ (c * z)``; None if it is no such.

        :param eqn: a product.
        """
        for value, other in (operands, operands[::-1]):
            op = self.op_of.get(value)
            if op is None or op.eqn.primitive.name not in _FACTORS or not self.of_z_alone(other):
                continue
            for data, factor in self._times(op.inputs, op.eqn.primitive.name):
                scaled = None if data in self.of_z else self._scaled(other, factor, op.eqn.primitive.name)
                if scaled is not None:
                    return self._bound(eqn, [data, scaled] if value == operands[0] else [scaled, data])
        return None

    def _times(self, operands: Sequence[int], name: str) -> list[tuple[int, int]]:
        """What is multiplied, or divided, by a single number of the parameters alone; and that number."""
        pairs = [(operands[0], operands[1])] + ([(operands[1], operands[0])] if name == "mul" else [])
        found = [(value, self._single(factor)) for value, factor in pairs]
        return [(value, factor) for value, factor in found if factor is not None]

    def _single(self, value: int) -> int | None:
        """The number of which all entries of a value are made, if it depends on the parameters alone."""
        while self.size(value) != 1:
            op = self.op_of.get(value)
            if op is None or op.eqn.primitive.name not in _SHAPES:
                return None
            value = op.inputs[0]
        return value if self.of_z_alone(value) and self.is_float(value) else None

    def _scaled(self, value: int, factor: int, name: str) -> int | None:
        """A value times a factor, or over it, where that is moved to the parameters; None if it cannot be.

        :param name: of the operation.
        """
        if self.of_z_alone(value):
            operation = jnp.multiply if name == "mul" else jnp.divide
            return self._trace_in(lambda x, c: operation(x, c.reshape(())), [value, factor])[0]
        op = self.op_of.get(value)
        if op is None or value not in self.of_z:
            return None
        parents = [v for v in op.inputs if v in self.of_z]
        inner = op.eqn.primitive.name
        is_ratio = inner == "div" and parents == [op.inputs[0]]
        is_linear = inner in _BILINEAR | _SHAPES | {"neg", "reduce_sum"} and len(parents) == 1
        is_sum = inner in _SUMS and len(parents) == 2
        if not (is_linear or is_ratio or is_sum or value in self.picks):
            return None
        scaled = {v: self._scaled(v, factor, name) for v in parents}
        parts = [scaled.get(v, v) for v in op.inputs]
        return None if None in parts else self._bound(op.eqn, [v for v in parts if v is not None])

    def _bound(self, eqn: JaxprEqn, operands: Sequence[int]) -> int:
        """The single result of an operation on other operands."""
        return self._trace_in(lambda *values: bind(eqn, values)[0], operands)[0]

    def _trace_in(self, function: Callable, operands: Sequence[int]) -> list[int]:
        """The results of a function of numbered values, as numbered values."""
        shapes = (jax.ShapeDtypeStruct(self.avals[v].shape, self.avals[v].dtype) for v in operands)
        closed = jax.make_jaxpr(function)(*shapes)
        return self._write_out(closed.jaxpr, closed.consts, operands)

    def _entries_of(self, op: Op) -> dict[int, np.ndarray]:
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


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _picks(op: Op) -> bool:
    """Whether an operation picks whole entries of a value along some of its axes."""
    if op.eqn.primitive.name != "gather":
        return False
    shape, params = _shape(op.eqn.invars[0]), op.eqn.params
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
    total, *rest = (value if sign > 0 else -value for value, sign in zip(values, signs, strict=True))
    return sum(rest, start=total)


_COMPARISONS = frozenset(("lt", "le", "gt", "ge"))
_SUMS = frozenset(("add", "add_any", "sub"))
_PRODUCTS = frozenset(("mul", "div", "neg"))
_FACTORS = frozenset(("mul", "div"))
_BILINEAR = frozenset(("mul", "dot_general"))
_SHAPES = frozenset(("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy"))

INLINED = CALLS - {"custom_jvp_call", "custom_vjp_call"}
"""Calls of functions that are written out. Those with derivatives of their own stay as they are."""


_OTHER_OUTPUTS = ("start", "prior", "given", "drawn", "weight", "seen", "count", "counted")


def trace(separated: SeparableModel, args: tuple, kwargs: dict, enumerates: bool = True) -> Graph:
    """The operations by which log densities come of parameters and rows.

    :param enumerates: whether outcomes that can have few values are enumerated rather than drawn.
    """
    num_outcomes = None
    with contextlib.suppress(Exception):
        num_outcomes = separated.num_outcomes(args, kwargs) if enumerates else None
    graph = _traced(separated, args, kwargs, num_outcomes)
    outcomes = sorted(separated.outcome_leaves or ())
    if graph.drawn is not None:
        uses = graph.uses(outcomes)
        of_row_alone = separated.latents is None
        graph.is_to_check = of_row_alone and any(separated.are_laws(is_own, args, kwargs))
        if (
            uses
            and of_row_alone
            and all(map(graph.adds_up, uses))
            and all(separated.are_laws(keeps_total, args, kwargs))
        ):
            uses = []  # a total may be given, and the drawn outcome has it, too
        passes = sum(graph.size(graph.rows[k]) for k in outcomes)
        if uses and of_row_alone and not num_outcomes and 1 < passes <= FEW:
            # An outcome has a part in the laws of others: a series' last value.
            graph, uses = _traced(separated, args, kwargs, num_outcomes, passes), []
            graph.is_to_check = True
        if uses or graph.uses(outcomes, [graph.weight]):
            graph.drawn = None  # drawn and observed outcomes together are no draw of the model
    if graph.weight in graph.of_z:
        graph.weight = graph.drawn = None
    if graph.drawn is not None:
        graph.is_discrete = all(separated.are_laws(is_discrete, args, kwargs))
    return graph


def _traced(
    separated: SeparableModel,
    args: tuple,
    kwargs: dict,
    num_outcomes: int | None,
    passes: int = 1,
) -> Graph:
    """
    :param passes: see `SeparableModel.drawn_log_density`.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))

    def log_densities(z: jax.Array, key: jax.Array, rows: tuple, public: Sequence) -> dict[str, jax.Array]:
        supply = iter(public)
        filled = [next(supply) if is_public(a) else leaf for leaf, a in zip(leaves, separated.arguments, strict=True)]
        args, kwargs = jax.tree.unflatten(treedef, filled)
        if separated.latents is not None:
            return _of_parts(separated, args, kwargs, z, key, rows)
        found = {"density": separated.row_log_density(args, kwargs)(z, rows)}
        # Whatever keeps outcomes from being drawn (a law that has no sampler, say), one can do without.
        with contextlib.suppress(Exception):
            if (weight := separated.row_weight(args, kwargs)) is not None:
                found["weight"] = weight(z, rows)
            if (seen := separated.are_all_seen(args, kwargs)(z, rows)) is not None:
                found["seen"] = seen
            if num_outcomes:
                found["drawn"] = separated.enumerated_log_density(args, kwargs)(z, rows, key[0])
            else:
                found["drawn"] = separated.drawn_log_density(args, kwargs, passes)(z, rows, key)
                if separated.has_count(args, kwargs):
                    found["count"] = separated.draw_count(args, kwargs)(z, rows, key)
                    found["counted"] = separated.count_log_density(args, kwargs)(z, rows, key[0])
        return found

    z = jax.ShapeDtypeStruct((separated.num_params,), ravel_pytree(separated.prototype)[0].dtype)
    rows = tuple(jax.ShapeDtypeStruct((1, *a.row_shape), a.dtype) for a in separated.private_arguments())
    public = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in separated.arguments if is_public(a)]
    key = jax.ShapeDtypeStruct((2,) if separated.latents is None else (4,), jnp.uint32)
    if separated.latents is not None:
        rows = (*rows, jax.ShapeDtypeStruct((separated.latents.size,), z.dtype))
    closed, outputs = jax.make_jaxpr(log_densities, return_shape=True)(z, key, rows, public)
    graph = Graph(closed, sorted(outputs), len(rows))
    graph.passes, graph.num_outcomes = passes, num_outcomes if graph.drawn is not None else None
    return graph


def _of_parts(
    separated: SeparableModel, args: tuple, kwargs: dict, z: jax.Array, key: jax.Array, rows: tuple
) -> dict[str, jax.Array]:
    """Of a row and its latents, the last of `rows`: the joint log density, then what `Parts` gives, then what is drawn.

    :param key: words of the unit's key, then of the row's.
    """
    *row, w = rows
    parts = separated.parts(args, kwargs)(z)
    prepared = parts.prepare(tuple(row))
    prior, given = parts.prior(prepared, w), parts.given(prepared, w)
    found = {"density": prior + given, "start": parts.start(prepared), "prior": prior, "given": given}
    with contextlib.suppress(Exception):
        drawn = separated.parts(args, kwargs, drawn=True)(z)
        found["drawn"] = drawn.given(drawn.prepare(tuple(row), key[:2], key[2:]), w)
    return found


def is_public(argument: Any) -> bool:
    """Whether an argument is a public array: these are traced, so that their values may be unknown."""
    return argument.shape is not None and not argument.private
