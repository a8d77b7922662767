"""What a computation is, as a hash: the same in every process, and another one for another number in it.

A noise seed must not draw the same noise for two models, since the difference of what is released would be the exact
difference of their sums. So the noise is derived from a fingerprint of the model, too.

A computation is known by its jaxpr (JAX's record of it) at given shapes. The jaxpr is read equation by equation: its
text shows no arrays that a function closes over, and of large ones in parameters the first and last entries only.

Proof: docs/proofs/budget.md.
"""

import functools
import hashlib
import re
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

_PLACES = (jax.sharding.Sharding, jax.sharding.Mesh, jax.sharding.AbstractMesh)
"""Where something is computed, which is no part of what is; chains that run in parallel have a mesh."""

_LIBRARIES = ("jax", "jaxlib", "numpy", "numpyro", "numpyro_dp")

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprint(functions: Sequence[tuple[Callable, tuple]], values: Sequence[Any]) -> str:
    """A hash of functions and of values.

    Functions are hashed with their first derivatives by the first argument, where they have any: a derivative may be
    defined apart from its function.

    :param functions: each with arrays of the shapes and dtypes of its arguments, of which nothing else matters.
    :param values: arrays, numbers, texts, functions, and trees of these.
    :raises ValueError: if a value is traced, so that it is not known.
    """
    digest = _Digest()
    for function, inputs in functions:
        digest.add([jax.make_jaxpr(function)(*inputs), *_derivatives(function, inputs)])
    digest.add(tuple(values))
    return digest.hexdigest()


def computed_by() -> tuple[Any, ...]:
    """Which numbers JAX makes of a key, and what asks and computes: another version of this package may ask a row for
    something else, and with other libraries, or on another kind of device, the last bits of a value may differ."""
    generator = jax.config.jax_default_prng_impl, jax.config.jax_threefry_partitionable
    return *generator, jax.default_backend(), *map(version, _LIBRARIES)


def _derivatives(function: Callable, inputs: tuple) -> list[Any]:
    """The jaxprs of a function's derivatives, forward and backward."""
    found = []
    for derivative in (
        lambda z, *rest: jax.jvp(lambda z: function(z, *rest), (z,), (z,)),
        lambda z, *rest: jax.grad(lambda z: function(z, *rest))(z),
    ):
        with suppress(Exception):  # a function that has no such derivative is never asked for it
            found.append(jax.make_jaxpr(derivative)(*inputs))
    return found


class _Digest:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._open: set[int] = set()  # functions that refer to themselves

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def _text(self, text: str) -> None:
        self._bytes(text.encode())

    def _bytes(self, data: bytes) -> None:
        self._hash.update(len(data).to_bytes(8, "big") + data)

    def add(self, value: Any) -> None:
        """Hash a value with its type, and everything in it."""
        value = None if isinstance(value, _PLACES) else value
        is_array = hasattr(value, "dtype") and hasattr(value, "__array__")
        self._text("array" if is_array else type(value).__name__)  # of whatever library
        if isinstance(value, ClosedJaxpr | Jaxpr):
            self._jaxpr(value)
        elif isinstance(value, jax.core.Tracer):
            raise ValueError(
                "noise_seed: the noise is derived from the values of the model's public arguments, too, and here they "
                "are traced. Pass them outside of jax.jit and the like, or bind them to the model with "
                "`functools.partial`"
            )
        elif is_array:
            self._array(value)
        elif isinstance(value, bytes):
            self._bytes(value)
        elif isinstance(value, str):
            self._text(value)
        elif isinstance(value, tuple | list):
            self._sequence(value)
        elif isinstance(value, set | frozenset):  # in an order that is not that of the process
            self._sequence(sorted(map(_own_digest, value)))
        elif isinstance(value, dict):
            self._sequence(sorted((_own_digest(key), _own_digest(item)) for key, item in value.items()))
        elif isinstance(value, functools.partial):
            self._sequence((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.CodeType):
            self._sequence((value.co_code, value.co_consts, value.co_names))
        else:
            self._text(_ADDRESS.sub("", repr(value)))

    def _sequence(self, values: Sequence[Any]) -> None:
        self._text(str(len(values)))
        for value in values:
            self.add(value)

    def _array(self, value: Any) -> None:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            self._text(str(value.dtype))
            value = jax.random.key_data(value)
        array = np.asarray(value)
        self._text(f"{array.dtype} {array.shape}")
        if array.dtype.hasobject:
            self._sequence(array.ravel().tolist())
        else:
            self._bytes(array.tobytes())

    def _function(self, function: types.FunctionType) -> None:
        self._text(f"{function.__module__}.{function.__qualname__}")
        if id(function) in self._open:
            return
        self._open.add(id(function))
        closure = []
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # an empty one
                closure.append(cell.cell_contents)
        self._sequence((function.__code__, function.__defaults__, function.__kwdefaults__, closure))
        self._open.remove(id(function))

    def _jaxpr(self, jaxpr: Any) -> None:
        self._sequence(getattr(jaxpr, "consts", ()))
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        numbers: dict[Any, int] = {}  # of the variables, in the order in which they appear

        def atoms(found: Sequence[Any]) -> None:
            self._text(str(len(found)))
            for atom in found:
                self._text(" ".join(str(getattr(atom.aval, name, None)) for name in ("dtype", "shape", "weak_type")))
                if isinstance(atom, Literal):
                    self.add(atom.val)
                else:
                    self._text(str(numbers.setdefault(atom, len(numbers))))

        atoms(jaxpr.constvars)
        atoms(jaxpr.invars)
        for equation in jaxpr.eqns:
            self._text(equation.primitive.name)
            for name, parameter in sorted(equation.params.items()):
                self._text(name)
                self.add(parameter)
            atoms(equation.invars)
            atoms(equation.outvars)
        atoms(jaxpr.outvars)


def _own_digest(value: Any) -> str:
    digest = _Digest()
    digest.add(value)
    return digest.hexdigest()
