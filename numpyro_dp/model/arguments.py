"""The arguments of a model, leaf by leaf: what each is called, which are arrays, and what is refused on sight.

Protection starts with the arguments: an array is traced, and may be private (its rows are protected); anything else
reaches the model as it is and is public. So whatever might hold rows without being a plain numeric array is refused
here, by name, before the model is run.

`UnsupportedModelError` is defined here, too, because every stage of the check in `numpyro_dp.model.separable` raises
it.
"""

import array
import collections
import dataclasses
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.primitives import Messenger

from numpyro_dp.privacy.passes import StreamedColumn


class UnsupportedModelError(ValueError):
    """The model cannot be written as a data-free prior times one factor per row; the message lists every reason."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        lines = "\n".join(f"  {k}. {problem}" for k, problem in enumerate(problems, 1))
        super().__init__(f"numpyro_dp cannot protect the rows of this model:\n{lines}")


def raise_if(problems: Iterable[str]) -> None:
    if problems := list(problems):
        raise UnsupportedModelError(problems)


def quote(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}{describe_place(error)}"


def describe_place(error: Exception) -> str:
    """The line of the user's code in which an error was raised, in brackets; nothing if there is none."""
    lines = zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True)
    theirs = [line for (frame, _), line in lines if is_theirs(str(frame.f_globals.get("__name__")), line.filename)]
    if not theirs:
        return ""
    code = f": `{theirs[-1].line}`" if theirs[-1].line else ""
    return f" (line {theirs[-1].lineno} of {Path(theirs[-1].filename).name}{code})"


def is_theirs(module: str, file: str) -> bool:
    return module.partition(".")[0] not in _NOT_THEIRS and not _INSTALLED & set(Path(file).parts)


_INSTALLED = {"site-packages", "dist-packages"}
_NOT_THEIRS = sys.stdlib_module_names | {"numpyro_dp", "numpyro", "jax", "jaxlib", "numpy", "funsor"}


@dataclasses.dataclass(frozen=True)
class Argument:
    """One leaf of the model's arguments: its name, its shape and how it is treated."""

    name: str
    shape: tuple[int, ...] | None  # None: not an array, passed to the model as it is
    dtype: Any
    private: bool = False

    def __str__(self) -> str:
        return self.name if self.shape is None else f"{self.name} {self.shape}"

    @property
    def parameter(self) -> str:
        """The model's parameter that this leaf is a part of."""
        return self.name.split("[")[0]

    @property
    def length(self) -> int | None:
        """Of the leading axis, if there is one."""
        return self.shape[0] if self.shape else None

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.shape else ()


# -- Leaves and their names --------------------------------------------------------------------------------------------


NO_VALUE = (jax.core.Tracer, jax.ShapeDtypeStruct)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is traced. Concrete scalars (sizes, scales) reach the model as they are, and are public."""
    if isinstance(leaf, NO_VALUE) or is_streamed(leaf):
        return True
    return isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim > 0


def is_streamed(leaf: Any) -> bool:
    """Whether a leaf is a column of a table that is read in pieces."""
    return isinstance(leaf, StreamedColumn)


def name_leaves(model: Callable, args: tuple, kwargs: dict) -> list[Argument]:
    """Every leaf of the arguments under the name of the model's parameter that receives it."""
    positional = _positional_names(model, args)
    named = []
    for (group, first, *rest), leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]:
        head = positional[first.idx] if group.idx == 0 else str(first.key)
        name = head + jax.tree_util.keystr(tuple(rest))
        shape, dtype = (tuple(leaf.shape), canonical(leaf.dtype)) if is_array(leaf) else (None, None)
        named.append(Argument(name, shape, dtype))
    return named


def _positional_names(model: Callable, args: tuple) -> list[str]:
    while isinstance(model, Messenger):
        model = model.fn
    names = [f"args[{k}]" for k in range(len(args))]
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except (TypeError, ValueError):
        return names
    for k, parameter in enumerate(parameters[: len(args)]):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            break
        names[k] = parameter.name
    return names


def named_values(model: Callable, args: tuple, kwargs: dict) -> list[tuple[str, Any]]:
    """The arguments themselves, each under the name of the parameter that receives it."""
    return [*zip(_positional_names(model, args), args, strict=True), *kwargs.items()]


def canonical(dtype: Any) -> Any:
    """The dtype that JAX gives to an array of this one; unknown ones are refused later, by name."""
    try:
        return jax.dtypes.canonicalize_dtype(dtype)
    except (TypeError, ValueError):
        return dtype


def shape_of(leaf: Any) -> tuple[int, ...]:
    """The shape of anything that looks like an array (a DataFrame, a tensor), and () for all else."""
    shape = getattr(leaf, "shape", ())
    return tuple(shape) if isinstance(shape, tuple | list) else ()


def mark_chosen(named: list[Argument], private_args: Sequence[str] | None) -> list[Argument]:
    """Mark the arguments that the user calls private, by the name of the parameter or of one leaf in it."""
    if private_args is None:
        return named
    names = [private_args] if isinstance(private_args, str) else list(private_args)
    known = [set() if a.shape is None else {a.name, a.parameter} for a in named]
    arrays = quote(a.name for a in named if a.shape is not None) or "none"
    raise_if(
        f"private_args names '{name}', but the model's array arguments are: {arrays}"
        for name in names
        if not any(name in group for group in known)
    )
    return [dataclasses.replace(a, private=not k.isdisjoint(names)) for a, k in zip(named, known, strict=True)]


# -- Refused on sight --------------------------------------------------------------------------------------------------


def argument_problems(named: list[Argument], args: tuple, kwargs: dict) -> Iterator[str]:
    for argument, leaf in zip(named, jax.tree.leaves((args, kwargs)), strict=True):
        name, kind = argument.name, type(leaf).__name__
        if argument.shape is None:
            if isinstance(leaf, set | frozenset):
                yield f"argument '{name}' is a {kind}, which may hold rows and would be public: pass an array"
            elif shape_of(leaf):
                yield (
                    f"argument '{name}' is a {kind}: pass a NumPy or JAX array (for pandas, `{name}.to_numpy()`; "
                    f"{_codes(name)})"
                )
            elif not (callable(leaf) or isinstance(leaf, jax.Array)) and any(map(is_array, _attributes(leaf))):
                yield (
                    f"argument '{name}' is a {kind} with arrays in its attributes, which would be public: pass the "
                    "arrays themselves, or register it as a JAX pytree"
                )
        elif isinstance(leaf, np.ma.MaskedArray):
            yield (
                f"argument '{name}' is a {kind}, whose mask JAX ignores: pass `{name}.filled(0.0)`, pass the mask as "
                "an array of its own, and use it in the model with `numpyro.handlers.mask`"
            )
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
            yield (
                f"argument '{name}' has dtype {leaf.dtype}, of another byte order than this machine's: pass "
                f"`{name}.astype({name}.dtype.newbyteorder('='))`"
            )
        elif not _is_numeric(argument.dtype):
            yield (
                f"argument '{name}' has dtype {argument.dtype}: encode it as numbers before the model sees it (of "
                f"numbers, or of true and false, `{name}.astype(float)`; {_codes(name)})"
            )
        elif argument.length == 0:
            yield f"argument '{name}' has no rows: its shape is {argument.shape}"


def _codes(name: str) -> str:
    """Codes that do not depend on which rows there are, nor on their order."""
    return (
        f"of texts, codes in an order that you fix, `pandas.Categorical({name}, ['no', 'yes']).codes`; of ids, for "
        f"`unit=`, `pandas.factorize({name})[0]`"
    )


def _attributes(leaf: Any) -> Iterable[Any]:
    return vars(leaf).values() if hasattr(leaf, "__dict__") else ()


def _is_numeric(dtype: Any) -> bool:
    if jnp.issubdtype(dtype, jnp.floating):
        return dtype.itemsize <= 8  # JAX has no long doubles
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


_CONTAINERS = (Mapping, list, tuple, collections.deque)
_BYTES = (bytes, bytearray, memoryview, array.array)


def list_problems(model: Callable, args: tuple, kwargs: dict, size: int | None, members: str = "rows") -> Iterator[str]:
    """What may hold rows and would be public: sparse matrices, whose parts have other lengths, and what Python keeps
    values in, other than arrays.

    :param size: how many rows, or other `members`, there are: containers of as many values are refused. None if nobody
        may know that: then all of them are, in the same words however many values they hold.
    """
    queue = named_values(model, args, kwargs)
    while queue:
        name, value = queue.pop(0)
        kind = _kind(value)
        if type(value).__module__.startswith("jax.experimental.sparse"):
            yield f"argument '{name}' is {kind}, a sparse matrix: pass `{name}.todense()`"
            continue
        if not isinstance(value, (*_CONTAINERS, *_BYTES)):
            continue
        parts: list[tuple[Any, Any]] = [*(value.items() if isinstance(value, Mapping) else enumerate(value))]
        plain = [item for _, item in parts if not _holds_columns(item, size)]
        single = [item for item in plain if not _holds_columns(item, None)]
        if size is None and len(plain) == len(parts):
            yield (
                f"argument '{name}' is {kind} that may hold rows, and that the model would see as public constants: "
                f"pass an array, `jnp.array({name})`, of codes if it holds texts "
                "(`np.unique(..., return_inverse=True)[1]`); if it holds no rows, say which arguments do with "
                "`private_args=`"
            )
        elif len(plain) > 1 and size in (len(single), len(plain), len(parts)) and 2 * len(plain) > len(parts):
            yield _as_many(name, value, plain, size, members)
        elif not isinstance(value, _BYTES):
            queue.extend((f"{name}[{key!r}]", item) for key, item in parts)


def _holds_columns(item: Any, size: int | None) -> bool:
    """Whether there are arrays in it, which are looked at as arguments of their own. One that is not as long as there
    are rows may be a row itself."""
    return any(is_array(leaf) and size in (None, *shape_of(leaf)[:1]) for leaf in jax.tree.leaves(item))


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def _as_many(name: str, value: Any, plain: list, size: int, members: str) -> str:
    kind, leaves = _kind(value), jax.tree.leaves(plain)
    if not any(_is_number(leaf) or is_array(leaf) for leaf in leaves):
        return (
            f"argument '{name}' is {kind} as long as there are {members}, which the model would see as public "
            "constants: pass an array of codes, `np.unique(..., return_inverse=True)[1]`"
        )
    what = "numbers or lists of numbers" if all(map(_is_number, leaves)) else "values"
    values = f"list({name}.values())" if isinstance(value, Mapping) else name
    return (
        f"argument '{name}' is {kind} of {size} {what}, as many as there are {members}, which the model would see as "
        f"public constants: pass an array, `jnp.array({values})`"
    )


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | np.number) or (isinstance(leaf, np.ndarray | jax.Array) and leaf.ndim == 0)


def overlooked(arguments: Sequence[Argument], num_rows: int) -> str:
    """A hint for models that fail on fewer rows: public arguments that keep all of theirs."""
    names = [a.name for a in arguments if not a.private and a.length == num_rows]
    return f"; {quote(names)} is as long as there are rows, but not listed in `private_args=`" if names else ""


# -- Arrays out of the arguments and back in ---------------------------------------------------------------------------


def take_arrays(args: tuple, kwargs: dict) -> tuple[list, Callable[[Sequence], tuple[tuple, dict]]]:
    """The array leaves of the arguments, and a function that puts others in their places."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    flags = [is_array(leaf) for leaf in leaves]
    static = [None if flag else leaf for leaf, flag in zip(leaves, flags, strict=True)]

    def merge(arrays: Sequence) -> tuple[tuple, dict]:
        supply = iter(arrays)
        merged = [next(supply) if flag else leaf for leaf, flag in zip(static, flags, strict=True)]
        return jax.tree.unflatten(treedef, merged)

    return [leaf for leaf, flag in zip(leaves, flags, strict=True) if flag], merge


def traced(fn: Callable, args: tuple, kwargs: dict) -> Callable:
    """``(*rest) -> fn(args, kwargs, *rest)`` with the array arguments traced: NumPyro validates concrete values only,
    and a placeholder row need not be a valid one."""
    arrays, merge = take_arrays(args, kwargs)

    @jax.jit
    def run(arrays: list, *rest):
        return fn(*merge(arrays), *rest)

    return lambda *rest: run(arrays, *rest)


def compiled(function: Callable, args: tuple, kwargs: dict, *inputs) -> Callable:
    """``(*inputs) -> function(args, kwargs, *inputs)`` for inputs like these. An array without a value counts as ones.

    Compiled ahead of time, a function gives numbers even where the model is being traced.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    leaves = [np.ones(x.shape, canonical(x.dtype)) if isinstance(x, NO_VALUE) else x for x in leaves]
    arrays, merge = take_arrays(*jax.tree.unflatten(treedef, leaves))
    program = jax.jit(lambda arrays, *inputs: function(*merge(arrays), *inputs)).lower(arrays, *inputs).compile()
    return lambda *inputs: jax.device_get(program(arrays, *inputs))


def abstract(arrays: Sequence) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, canonical(x.dtype)) for x in arrays]


class PublicArguments(NamedTuple):
    """What may be seen of a model's arguments by who must not see the table.

    :ivar args, kwargs: with one placeholder row in the place of the table.
    :ivar leaves: the public ones, as they were passed.
    :ivar at_hand: whether all arguments, also private ones, have values rather than being traced.
    """

    args: tuple
    kwargs: dict
    leaves: list
    at_hand: bool


def placeholder_rows(arguments: Sequence[Argument]) -> tuple[np.ndarray, ...]:
    return tuple(np.zeros((1, *a.row_shape), a.dtype) for a in arguments if a.private)


def as_arguments(table: tuple | Mapping[str, Any]) -> tuple[tuple, dict]:
    """A model's arguments and keywords, given as the tuple or the dict of them."""
    if isinstance(table, Mapping):
        return (), dict(table)
    if isinstance(table, tuple):
        return table, {}
    raise TypeError(f"a table is the tuple or the dict of the model's arguments, got {type(table).__name__}")
