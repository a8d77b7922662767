"""`jax.vmap` over rows and over chains, in less time.

*Over rows*, `vmap_last` keeps rows on the last axis, of the arguments and of all that is computed on the way. Where
what each row has meets what all rows share, `jax.vmap` puts rows on the first axis. A row has few numbers, and
compilers vectorise along the last axis: with rows there, gradients of models with several components or outcomes take
a half to a tenth of the time on some versions of XLA.

*Over chains*, `vmap_chains` and `cond_of_chains` keep one table for all. `jax.vmap` turns a `cond` whose condition
differs between chains into a select, and repeats for each chain what its branches close over.

Proof: docs/proofs/isolation.md.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from numpyro_dp.privacy.isolation import CALLS, alone, called

# Of these, each element of the result is computed from the elements in the same place, or from scalars.
_ELEMENTWISE = frozenset(
    (
        "abs add add_any and ceil clamp convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp "
        "exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg not or "
        "pow rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh xor "
    ).split()
)
# The parameters of these name axes, which are counted from the left and so stay what they are.
_ALONG_AXES = frozenset(
    (
        "argmax argmin concatenate cumlogsumexp cummax cummin cumprod cumsum reduce_and reduce_max reduce_min "
        "reduce_or reduce_prod reduce_sum rev split squeeze stack unstack "
    ).split()
)


_CHAINS = "numpyro_dp_chains"  # the axis that `vmap_chains` maps


def vmap_chains(function: Callable) -> Callable:
    """`jax.vmap`; `cond_of_chains` may be used in it."""
    return jax.vmap(function, axis_name=_CHAINS)


def cond_of_chains(wanted: jax.Array, costly: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """``lax.cond(wanted, costly, otherwise)``; in `vmap_chains`, both are computed if any chain wants the first."""
    if wanted.dtype != jnp.bool_:  # of other numbers `where` and what is charged may not take the same for true
        raise TypeError(f"a condition is a bool, got {wanted.dtype}")
    try:
        any_wants = lax.pmax(wanted.astype(jnp.int32), _CHAINS) > 0
    except NameError:  # no axis of that name
        return lax.cond(wanted, costly, otherwise)
    chosen = functools.partial(jnp.where, wanted)
    return lax.cond(any_wants, lambda: jax.tree.map(chosen, costly(), otherwise()), otherwise)


class _Value(NamedTuple):
    """Of a variable in the trace of a row.

    :ivar array: if `of_rows`, with rows on a further axis, the last one.
    """

    array: Any
    of_rows: bool


def vmap_last(function: Callable, shared: Sequence[bool]) -> Callable:
    """Map a function over the last axis of its arguments, and stack what it returns on a new last axis.

    It is checked to keep rows apart, see `numpyro_dp.privacy.isolation`.

    :param shared: of each argument, whether it is the same for all rows, and so without that axis.
    """

    def mapped(*args: Any) -> Any:
        flags = [flag for flag, arg in zip(shared, args, strict=True) for _ in jax.tree.leaves(arg)]
        leaves, treedef = jax.tree.flatten(args)
        values = [_Value(x, not flag) for x, flag in zip(leaves, flags, strict=True)]
        (num_rows,) = {x.shape[-1] for x, of_rows in values if of_rows}
        row = [jax.ShapeDtypeStruct(x.shape[:-1] if of_rows else x.shape, x.dtype) for x, of_rows in values]
        of_row = alone(function, *jax.tree.unflatten(treedef, row), of_rows=[not flag for flag in shared])
        used = [value for value, use in zip(values, of_row.used, strict=True) if use]
        outputs = _evaluate(of_row.jaxpr, used, num_rows)
        avals = of_row.jaxpr.out_avals
        arrays = [_with_rows(value, s.shape, num_rows) for value, s in zip(outputs, avals, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(of_row.shapes), arrays)

    return mapped


def _evaluate(closed: ClosedJaxpr, inputs: Sequence[_Value], num_rows: int) -> list[_Value]:
    env = dict(zip(closed.jaxpr.constvars, (_Value(x, False) for x in closed.consts), strict=True))
    env.update(zip(closed.jaxpr.invars, inputs, strict=True))

    def value(v: Any) -> _Value:
        return _Value(jnp.asarray(v.val, aval(v).dtype), False) if isinstance(v, Literal) else env[v]

    for eqn in closed.jaxpr.eqns:
        values = [value(v) for v in eqn.invars]
        if not any(v.of_rows for v in values):
            outputs = [_Value(x, False) for x in bind(eqn, [v.array for v in values])]
        elif eqn.primitive.name in CALLS:
            outputs = _evaluate(called(eqn), values, num_rows)
        else:
            outputs = [_Value(x, True) for x in _of_rows(eqn, values, num_rows)]
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [value(v) for v in closed.jaxpr.outvars]


def _of_rows(eqn: JaxprEqn, values: Sequence[_Value], num_rows: int) -> list:
    """One operation of which an operand differs from row to row."""
    name, params, shape = eqn.primitive.name, eqn.params, aval(eqn.outvars[0]).shape
    axis = len(shape)  # of the rows in the result
    if name in _ELEMENTWISE:
        return bind(eqn, [_with_rows(v, shape, num_rows) for v in values])
    if name in _ALONG_AXES:
        arrays = [_with_rows(v, aval(x).shape, num_rows) for v, x in zip(values, eqn.invars, strict=True)]
        return bind(eqn, arrays)
    if len(values) == 1:
        (x,) = (v.array for v in values)
        if name == "broadcast_in_dim":
            return [lax.broadcast_in_dim(x, (*shape, num_rows), (*params["broadcast_dimensions"], axis))]
        if name == "reshape" and params["dimensions"] is None:
            return [lax.reshape(x, (*shape, num_rows))]
        if name == "transpose":
            return [lax.transpose(x, (*params["permutation"], axis))]
        if name == "slice":
            strides = None if params["strides"] is None else (*params["strides"], 1)
            return [lax.slice(x, (*params["start_indices"], 0), (*params["limit_indices"], num_rows), strides)]
    if name == "dot_general":
        return [_dot(params, *values)]
    if name == "gather" and not values[1].of_rows:
        return _in_windows(eqn, "offset_dims", axis, values, num_rows)
    if name == "scatter-add" and not values[1].of_rows:
        return _in_windows(eqn, "update_window_dims", len(aval(eqn.invars[2]).shape), values, num_rows)
    axes = tuple(-1 if v.of_rows else None for v in values)
    mapped = jax.vmap(lambda *x: bind(eqn, x), in_axes=axes, out_axes=-1)
    return mapped(*(v.array for v in values))


def _in_windows(eqn: JaxprEqn, windows: str, axis: int, values: Sequence[_Value], num_rows: int) -> list:
    """Gather or scatter elements at places that all rows share: with a further axis of each window, the rows."""
    numbers = eqn.params["dimension_numbers"]
    params = {"dimension_numbers": numbers._replace(**{windows: (*getattr(numbers, windows), axis)})}
    if "slice_sizes" in eqn.params:
        params["slice_sizes"] = (*eqn.params["slice_sizes"], num_rows)
    arrays = [
        v.array if k == 1 else _with_rows(v, aval(x).shape, num_rows)
        for k, (v, x) in enumerate(zip(values, eqn.invars, strict=True))
    ]
    return bind(eqn.replace(params=eqn.params | params), arrays)


def _dot(params: dict, one: _Value, other: _Value) -> jax.Array:
    """A product of which a factor differs from row to row."""
    contracted, batch = params["dimension_numbers"]
    free = [
        tuple(k for k in range(v.array.ndim - v.of_rows) if k not in (*c, *b))
        for v, c, b in zip((one, other), contracted, batch, strict=True)
    ]
    options = {"precision": params["precision"], "preferred_element_type": params["preferred_element_type"]}
    if one.of_rows and other.of_rows:
        # Rows are no matter of matrices: elementwise, with an axis for each number that is contracted or free.
        x, y = (
            v.array.transpose(*b, *f, *c, v.array.ndim - 1)
            for v, c, b, f in zip((one, other), contracted, batch, free, strict=True)
        )
        num_batch, num_free = len(batch[0]), len(free[0])
        x = jnp.expand_dims(x, tuple(num_batch + num_free + k for k in range(len(free[1]))))
        y = jnp.expand_dims(y, tuple(num_batch + k for k in range(num_free)))
        last = num_batch + num_free + len(free[1])
        kind = params["preferred_element_type"] or jnp.result_type(x, y)
        return jnp.sum(x.astype(kind) * y.astype(kind), tuple(last + k for k in range(len(contracted[0]))))
    if batch[0]:
        axes = tuple(-1 if v.of_rows else None for v in (one, other))
        dot = jax.vmap(lambda x, y: lax.dot_general(x, y, params["dimension_numbers"], **options), axes, -1)
        return dot(one.array, other.array)
    if other.of_rows:
        return lax.dot_general(one.array, other.array, params["dimension_numbers"], **options)
    products = lax.dot_general(other.array, one.array, ((contracted[1], contracted[0]), ((), ())), **options)
    after = len(free[1])
    return products.transpose(*range(after, after + len(free[0])), *range(after), products.ndim - 1)


def _with_rows(value: _Value, shape: tuple[int, ...], num_rows: int) -> jax.Array:
    """An array, or a scalar, in this shape, with an axis of rows behind it."""
    array, of_rows = value
    if of_rows and array.ndim == len(shape) + 1:
        return array
    here = (len(shape),) if of_rows else tuple(range(array.ndim))
    return lax.broadcast_in_dim(array, (*shape, num_rows), here)


def aval(v: Any) -> Any:
    """Shape and dtype of a variable of a jaxpr."""
    return v.aval


def bind(eqn: JaxprEqn, inputs: Sequence) -> list:
    """Evaluate one equation of a jaxpr."""
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    outputs = eqn.primitive.bind(*functions, *inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]
