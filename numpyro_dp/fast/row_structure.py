"""How a row meets the parameters: the structure by which a clipped sum of gradients costs little more than a plain one.

A generalised linear model meets its coefficients b through a number, ``eta = x @ b``: a row's gradient with respect to
b is ``x * d log p / d eta``, and its norm is known without forming it (Goodfellow 2015, arXiv:1510.01799; for clipping,
Li et al. 2022, arXiv:2110.05679, "ghost clipping"). Nobody has to promise this structure: it is read off the jaxpr of a
row's log density. Each coordinate of z enters in one of three ways, the `Part` s of a `RowStructure`:

- ``"dot"``: through products ``x @ z[coordinates]`` with numbers x of the row;
- ``"member"``: through members ``z[j]`` that the row chooses, as the effects of its group;
- ``"direct"``: in any other way.

What is computed from parameters alone on the way (``mu + tau * raw``, a non-centred effect) is moved behind products
and choices of members. Where two parts share coordinates, these become direct; a model without any structure has a
single direct part, all of z. The density of a row is a function of the parts' values and the row, `RowStructure.rest`.

What is found is a hint: sums by it are clipped whether it is right or not (`numpyro_dp.privacy.structured`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr
from jax.lax import GatherScatterMode, Precision

from numpyro_dp.model.graph import INLINED
from numpyro_dp.privacy.isolation import called
from numpyro_dp.privacy.structured import Part, Row, RowStructure
from numpyro_dp.privacy.vmap import aval, bind


def find_structure(
    density: Callable[[jax.Array, Row], jax.Array], z: jax.ShapeDtypeStruct, row: Sequence[jax.ShapeDtypeStruct]
) -> RowStructure:
    """Read the parts off the trace of a row's log density.

    :param density: ``(flat z, one-row slices) -> log density``.
    :param z, row: shapes and dtypes of its arguments.
    """
    flat = _flatten(jax.make_jaxpr(density)(z, tuple(row)))
    moved = _move_behind(flat)
    return _Reader(moved).structure()


# -- Jaxprs ------------------------------------------------------------------------------------------------------------


def _flatten(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same computation without nested calls, and without what the result does not depend on."""

    def run(*inputs: jax.Array) -> list:
        env = dict(zip(closed.jaxpr.constvars + closed.jaxpr.invars, [*closed.consts, *inputs], strict=True))
        for eqn in closed.jaxpr.eqns:
            _evaluate(eqn, env)
        return [_read(env, v) for v in closed.jaxpr.outvars]

    flat = jax.make_jaxpr(run)(*(aval(v) for v in closed.jaxpr.invars))
    jaxpr, _ = dce_jaxpr(flat.jaxpr, [True] * len(flat.jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(jaxpr, flat.consts)


def _read(env: dict[Any, Any], v: Any) -> Any:
    return v.val if isinstance(v, Literal) else env[v]


def _evaluate(eqn: JaxprEqn, env: dict[Any, Any]) -> None:
    inputs = [_read(env, v) for v in eqn.invars]
    if eqn.primitive.name in INLINED:
        inner = called(eqn)
        inner_env = dict(zip(inner.jaxpr.constvars + inner.jaxpr.invars, [*inner.consts, *inputs], strict=True))
        for inner_eqn in inner.jaxpr.eqns:
            _evaluate(inner_eqn, inner_env)
        outputs = [_read(inner_env, v) for v in inner.jaxpr.outvars]
    else:
        outputs = bind(eqn, inputs)
    env.update(zip(eqn.outvars, outputs, strict=True))


# Of these, each element of the result is computed from the elements in the same place (or from scalars).
_ELEMENTWISE = frozenset(
    (
        *("abs", "add", "cos", "div", "erf", "erf_inv", "exp", "exp2", "expm1", "integer_pow", "log", "log1p"),
        *("logistic", "mul", "neg", "pow", "rsqrt", "sin", "sqrt", "square", "sub", "tan", "tanh"),
    )
)
# These only put elements into other places.
_PLACING = frozenset(
    (
        *("broadcast_in_dim", "concatenate", "copy", "expand_dims", "reshape", "rev", "slice", "split", "squeeze"),
        "transpose",
    )
)


class _Origins:
    """What the variables of a flat jaxpr ``(z, *row) -> density`` are computed from.

    :ivar made_by: the equation of each variable.
    :ivar views: of variables that hold elements of z: their coordinates.
    """

    def __init__(self, closed: ClosedJaxpr):
        z, *row = closed.jaxpr.invars
        self.of_z, self.of_row = {z}, set(row)
        self.made_by: dict[Any, JaxprEqn] = {}
        self.views: dict[Any, np.ndarray] = {z: np.arange(aval(z).size, dtype=np.int32)}
        for eqn in closed.jaxpr.eqns:
            inputs = [v for v in eqn.invars if isinstance(v, Var)]
            self.made_by.update(dict.fromkeys(eqn.outvars, eqn))
            for reached in (self.of_z, self.of_row):
                if any(v in reached for v in inputs):
                    reached.update(eqn.outvars)
            if eqn.primitive.name in _PLACING and all(v in self.views for v in inputs) and len(inputs):
                with jax.ensure_compile_time_eval():
                    placed = bind(eqn, [jnp.asarray(self.views[v]) for v in inputs])
                self.views.update(zip(eqn.outvars, map(np.asarray, placed), strict=True))

    def maker(self, v: Any) -> JaxprEqn | None:
        """The equation that a variable comes from."""
        return self.made_by.get(v) if isinstance(v, Var) else None

    def is_view(self, v: Any) -> bool:
        return isinstance(v, Var) and v in self.views

    def of_z_only(self, v: Any) -> bool:
        return isinstance(v, Var) and v in self.of_z and v not in self.of_row

    def of_row_only(self, v: Any) -> bool:
        return isinstance(v, Var) and v in self.of_row and v not in self.of_z

    def product(self, eqn: JaxprEqn) -> tuple[int, int] | None:
        """If it multiplies numbers of a row by parameters: which of its inputs are which."""
        for row, z in ((0, 1), (1, 0)):
            if self.of_row_only(eqn.invars[row]) and self.of_z_only(eqn.invars[z]):
                return row, z
        return None

    def is_choice(self, eqn: JaxprEqn) -> bool:
        """Whether it takes the members of parameters that a row chooses."""
        if eqn.primitive.name not in ("gather", "dynamic_slice"):
            return False
        if eqn.params.get("mode") == GatherScatterMode.FILL_OR_DROP:  # what it fills in is no parameter
            return False
        operand, *which = eqn.invars
        by_row = any(self.of_row_only(v) for v in which)
        by_parameters = any(isinstance(v, Var) and v in self.of_z for v in which)
        return self.of_z_only(operand) and by_row and not by_parameters


# -- Moving computations of parameters behind products and choices -----------------------------------------------------


class _CannotMoveError(Exception):
    pass


def _move_behind(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same computation, where possible with products and choices of elements of z, not of what is made of them."""
    origins = _Origins(closed)

    def run(*inputs: jax.Array) -> list:
        env = dict(zip(closed.jaxpr.constvars + closed.jaxpr.invars, [*closed.consts, *inputs], strict=True))
        for eqn in closed.jaxpr.eqns:
            try:
                result = _Mover(origins, env, eqn).result()
                env[eqn.outvars[0]] = jnp.broadcast_to(result, aval(eqn.outvars[0]).shape)
            except _CannotMoveError:
                _evaluate(eqn, env)
        return [_read(env, v) for v in closed.jaxpr.outvars]

    return _flatten(jax.make_jaxpr(run)(*(aval(v) for v in closed.jaxpr.invars)))


class _Mover:
    """One product or choice, with what its parameters are computed by moved behind it."""

    def __init__(self, origins: _Origins, env: dict[Any, Any], eqn: JaxprEqn):
        self.origins, self.env, self.eqn = origins, env, eqn
        self.done: dict[Any, Any] = {}

    def result(self) -> jax.Array:
        eqn, name = self.eqn, self.eqn.primitive.name
        if self.origins.is_choice(eqn):
            return self.choose(eqn.invars[0])
        if name == "dot_general" and (which := self.origins.product(eqn)):
            self.which = which
            return self.multiply(eqn.invars[which[1]])
        if name == "reduce_sum" and (product := self.origins.maker(eqn.invars[0])) is not None:
            return self.sum_of_products(product)
        raise _CannotMoveError

    def scalar(self, v: Any) -> Any:
        """The value of a number, or of one that is broadcast; None for any other variable."""
        if not aval(v).shape:
            return _read(self.env, v)
        maker = self.origins.maker(v)
        if maker is not None and maker.primitive.name == "broadcast_in_dim" and not aval(maker.invars[0]).shape:
            return _read(self.env, maker.invars[0])
        return None

    def choose(self, v: Any) -> Any:
        scalar, maker = self.scalar(v), self.origins.maker(v)
        if scalar is not None:
            return scalar
        if isinstance(v, Literal):
            raise _CannotMoveError
        if v in self.done:
            return self.done[v]
        if self.origins.is_view(v):
            (result,) = bind(self.eqn, [self.env[v], *(_read(self.env, x) for x in self.eqn.invars[1:])])
        elif maker is not None and maker.primitive.name in _ELEMENTWISE:
            (result,) = bind(maker, [self.choose(x) for x in maker.invars])
        else:
            raise _CannotMoveError
        self.done[v] = result
        return result

    def multiply(self, v: Any) -> jax.Array:
        if v in self.done:
            return self.done[v]
        maker = self.origins.maker(v)
        name, operands = (maker.primitive.name, maker.invars) if maker is not None else (None, [])
        scalars = [self.scalar(x) for x in operands]
        if self.origins.is_view(v):
            result = self.product(self.env[v])
        elif name in ("add", "sub"):
            one, other = (
                self.multiply(x) if s is None else self.product(jnp.full(aval(v).shape, s, aval(v).dtype))
                for x, s in zip(operands, scalars, strict=True)
            )
            result = one + other if name == "add" else one - other
        elif name == "mul" and scalars[0] is not None and scalars[1] is None:
            result = scalars[0] * self.multiply(operands[1])
        elif name in ("mul", "div") and scalars[0] is None and scalars[1] is not None:
            product = self.multiply(operands[0])
            result = product * scalars[1] if name == "mul" else product / scalars[1]
        elif name == "neg":
            result = -self.multiply(operands[0])
        else:
            raise _CannotMoveError
        self.done[v] = result
        return result

    def product(self, parameters: jax.Array) -> jax.Array:
        """The product with some numbers in the place of the parameters."""
        row, z = self.which
        inputs = {row: _read(self.env, self.eqn.invars[row]), z: parameters}
        (result,) = bind(self.eqn, [inputs[0], inputs[1]])
        return result

    def sum_of_products(self, product: JaxprEqn) -> jax.Array:
        """``sum(x * b)``, written as a product."""
        which = self.origins.product(product) if product.primitive.name == "mul" else None
        kept = [n for k, n in enumerate(aval(product.outvars[0]).shape) if k not in self.eqn.params["axes"]]
        if which is None or any(n != 1 for n in kept) or not self.origins.is_view(product.invars[which[1]]):
            raise _CannotMoveError
        if any(aval(v).shape != aval(product.outvars[0]).shape for v in product.invars):
            raise _CannotMoveError
        x, b = (jnp.ravel(_read(self.env, product.invars[k])) for k in which)
        return jnp.dot(x, b, precision=Precision.HIGHEST).reshape(aval(self.eqn.outvars[0]).shape)


# -- Reading the parts off ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Use:
    """A part, the variables that hold its value, and how to get its coefficient from what `needs` hold."""

    part: Part
    holders: tuple[Any, ...]
    needs: tuple[Any, ...] = ()
    coefficient: Callable[..., jax.Array] | None = None


class _Reader:
    """Finds the parts of a flat jaxpr whose products and choices are of elements of z, where they can be."""

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed
        self.z, *self.row = closed.jaxpr.invars
        self.origins = _Origins(closed)

    def structure(self) -> RowStructure:
        uses = self._disjoint_uses()
        (density,) = self.closed.jaxpr.outvars
        needs = [v for use in uses for v in use.needs]

        def coefficients(row: Row) -> tuple[jax.Array | None, ...]:
            env = self._run({}, row, needs)
            return tuple(
                None if use.coefficient is None else use.coefficient(*(_read(env, v) for v in use.needs))
                for use in uses
            )

        def rest(values: Sequence[jax.Array], row: Row) -> jax.Array:
            known = {v: x.reshape(aval(v).shape) for use, x in zip(uses, values, strict=True) for v in use.holders}
            return _read(self._run(known, row, [density]), density)

        of_rows = [v for eqn in self.closed.jaxpr.eqns for v in eqn.outvars if v in self.origins.of_row]
        width = max([1, *(aval(v).size for v in of_rows)])
        return RowStructure(tuple(use.part for use in uses), width, coefficients, rest)

    def _run(self, known: dict[Any, jax.Array], row: Row, wanted: Sequence) -> dict[Any, Any]:
        """Evaluate what is wanted, and no more, given the row and some other variables."""
        jaxpr = self.closed.jaxpr
        env = (
            dict(zip(jaxpr.constvars, self.closed.consts, strict=True)) | dict(zip(self.row, row, strict=True)) | known
        )
        needed, eqns = {v for v in wanted if isinstance(v, Var)} - env.keys(), []
        for eqn in reversed(jaxpr.eqns):
            if needed.intersection(eqn.outvars):
                eqns.append(eqn)
                needed.update(v for v in eqn.invars if isinstance(v, Var) and v not in env)
        for eqn in reversed(eqns):
            outputs = bind(eqn, [_read(env, v) for v in eqn.invars])
            env.update((v, x) for v, x in zip(eqn.outvars, outputs, strict=True) if v not in known)
        return env

    def _disjoint_uses(self) -> list[_Use]:
        ordinary: set[Any] = set()  # results of products and choices that are no parts
        while True:
            uses = self._uses(ordinary)
            times = np.zeros(aval(self.z).size, int)
            for use in uses:
                np.add.at(times, use.part.coordinates.ravel(), 1)
            shared = [use for use in uses if (times[use.part.coordinates] > 1).any()]
            if not shared:
                return uses
            demoted = {v for use in shared if use.part.kind != "direct" for v in use.holders}
            if not demoted:
                return [_Use(Part("direct", self.origins.views[self.z], aval(self.z).shape), (self.z,))]
            ordinary |= demoted

    def _uses(self, ordinary: set[Any]) -> list[_Use]:
        needed = {v for v in self.closed.jaxpr.outvars if isinstance(v, Var)}
        uses: list[_Use] = []
        direct: dict[tuple, list[Any]] = {}

        def look_at(v: Any) -> None:
            if not isinstance(v, Var) or v not in self.origins.of_z:
                return
            if self.origins.is_view(v):
                v = self._whole(v)
                same = direct.setdefault((aval(v).shape, self.origins.views[v].tobytes()), [])
                same.extend([] if v in same else [v])
            else:
                needed.add(v)

        for v in self.closed.jaxpr.outvars:
            look_at(v)
        for eqn in reversed(self.closed.jaxpr.eqns):
            if not needed.intersection(eqn.outvars):
                continue
            use = None if eqn.outvars[0] in ordinary else self._dot(eqn) or self._member(eqn)
            if use is not None:
                uses.append(use)
                continue
            for v in eqn.invars:
                look_at(v)
        for holders in direct.values():
            uses.append(_Use(Part("direct", self.origins.views[holders[0]], aval(holders[0]).shape), tuple(holders)))
        return uses

    def _whole(self, v: Any) -> Any:
        """The variable from which `v` has its elements of z, as far as that has no others."""
        coordinates = set(self.origins.views[v].ravel().tolist())
        while v in self.origins.made_by:
            before = self.origins.made_by[v].invars
            if len(before) != 1 or set(self.origins.views[before[0]].ravel().tolist()) != coordinates:
                break
            v = before[0]
        return v

    def _dot(self, eqn: JaxprEqn) -> _Use | None:
        which = self.origins.product(eqn) if eqn.primitive.name == "dot_general" else None
        if which is None or not self.origins.is_view(eqn.invars[which[1]]):
            return None
        x, b = (eqn.invars[k] for k in which)
        contracted, batch = eqn.params["dimension_numbers"]
        of_x, of_b = (contracted[k] for k in which)
        free_of_x, free_of_b = ([k for k in range(aval(v).ndim) if k not in of] for v, of in ((x, of_x), (b, of_b)))
        coordinates = self.origins.views[b].transpose(*of_b, *free_of_b)
        coordinates = coordinates.reshape(*(math.prod(part) for part in np.split(coordinates.shape, [len(of_b)])))
        is_one_row = all(aval(x).shape[k] == 1 for k in free_of_x)
        same_dtype = aval(x).dtype == aval(b).dtype == aval(eqn.outvars[0]).dtype
        if any(batch[k] for k in which) or not is_one_row or not same_dtype or not _is_one_to_one(coordinates):
            return None
        if not coordinates.size:
            return None
        part = Part("dot", coordinates, aval(eqn.outvars[0]).shape, eqn.params["precision"])
        return _Use(part, (eqn.outvars[0],), (x,), lambda x: x.transpose(*free_of_x, *of_x).ravel())

    def _member(self, eqn: JaxprEqn) -> _Use | None:
        if not self.origins.is_choice(eqn) or not self.origins.is_view(eqn.invars[0]):
            return None
        operand, *which = eqn.invars
        coordinates = self.origins.views[operand]
        chooses_once = eqn.primitive.name == "dynamic_slice" or np.prod(aval(which[0]).shape[:-1]) == 1
        if not chooses_once or not _is_one_to_one(coordinates):
            return None
        part = Part("member", coordinates, aval(eqn.outvars[0]).shape)
        return _Use(part, (eqn.outvars[0],), tuple(which), lambda *at: bind(eqn, [jnp.asarray(coordinates), *at])[0])


def _is_one_to_one(coordinates: np.ndarray) -> bool:
    return np.unique(coordinates).size == coordinates.size
