"""What a function reads that is in none of its array arguments: globals, closures, attributes, and what helpers read.

A jaxpr shows the arrays that JAX computes with. It does not show what Python or NumPy reduce to a number while the
function is traced: a list of ages, of which a prior takes the mean. `read_outside` looks for that in the bytecode of
the function, and follows it into helper functions, containers and objects.

It looks at types and lengths, never at numbers, and runs none of the user's code: no property, no ``__getattr__``, no
iterator. So it sees what *is stored* under a name that the code reads. Not seen is what Python code or an extension
fetches when it runs: from files and databases, through a ``__getattr__`` hook, by ``eval``, from an installed library's
own variables. Nor is what lies deeper, or among more objects, than the bounds below.
"""

import array
import collections
import collections.abc
import datetime
import decimal
import dis
import enum
import fractions
import functools
import gc
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from numpyro.primitives import Messenger

from numpyro_dp.model.arguments import NO_VALUE, is_array, is_theirs, shape_of

MAX_DEPTH = 20
MAX_OBJECTS = 20_000
MAX_ITEMS = 1_000
"""Of a container only the first so many items are looked at; its length counts whole."""


@dataclass(frozen=True)
class Outside:
    """Something that a function reads and that is none of its array arguments.

    :ivar name: as the code calls it, as far as that is known.
    :ivar kind: the name of its type.
    :ivar shape: of an array; the length of a container; () for a number.
    :ivar is_array: whether `shape` is that of an array.
    :ivar is_iterator: whether its content cannot be seen.
    :ivar has_numbers: False for texts and dates alone.
    :ivar is_part: whether it is an item of a container that is itself named.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    is_array: bool = False
    is_iterator: bool = False
    has_numbers: bool = True
    is_part: bool = False

    def __str__(self) -> str:
        if not self.shape:
            return self.name
        return f"{self.name} {self.shape}" if self.is_array else f"{self.name} ({self.kind} of {self.shape[0]})"

    def describe(self) -> str:
        """In a sentence, up to its comma."""
        if self.is_array:
            return f"'{self.name}', an array of shape {self.shape},"
        return f"'{self.name}', {'an' if self.kind[:1] in 'aeiou' else 'a'} {self.kind} of length {self.shape[0]},"


def read_outside(function: Callable, named: Sequence[tuple[str, Any]] = ()) -> list[Outside]:
    """Everything that `function` may read besides its array arguments and that holds numbers, texts or dates.

    :param named: its arguments under the names of the parameters that receive them, whose defaults are not used.
        Objects and functions among them are looked into.
    """
    walk = _Walk()
    for _ in range(MAX_DEPTH):  # an attribute that is read may hold code that reads further ones
        walk = _Walk(walk.attributes, walk.texts)
        walk.read(function, [name for name, _ in named])
        for name, value in _objects(named):
            walk.visit(name, value, 0)
        if walk.attributes <= walk.known:
            break
    return list({(item.name, item.shape, item.is_part): item for item in walk.found}.values())


def listed(outside: Iterable[Outside]) -> tuple[str, ...]:
    """What holds numbers, for whoever decides whether it may be public."""
    return tuple(dict.fromkeys(str(item) for item in outside if item.has_numbers and not item.is_part))


def iterator_problems(outside: Iterable[Outside], whose: str = "the model") -> list[str]:
    return [
        f"{whose} reads '{item.name}', an iterator ({item.kind}), whose content cannot be seen and is gone once it was "
        "read: pass an array"
        for item in outside
        if item.is_iterator
    ]


# -- The walk ----------------------------------------------------------------------------------------------------------

_NOTHING, _TEXTS, _NUMBERS = range(3)  # what a value holds

_NUMBER = (int, float, complex, np.generic, decimal.Decimal, fractions.Fraction)  # within a container, flags as well
_TEXT = (str, bytes, datetime.date, datetime.time, datetime.timedelta)
_BYTES = (bytes, bytearray, array.array)
_VIEWS: tuple[Iterable, ...] = ({}.keys(), {}.values(), {}.items())
# By the type's own methods: those of a subclass may run the user's code.
_ITEMS: dict[type, Callable[[Any], Iterable]] = {
    dict: dict.items,
    **{kind: kind.__iter__ for kind in (list, tuple, set, frozenset, collections.deque)},
    **{type(view): type(view).__iter__ for view in _VIEWS},
}


@dataclass
class _Walk:
    """One walk.

    :ivar known: names of the attributes that count, of an object of the user's.
    :ivar spelt: texts that the code spells out.
    :ivar attributes, texts: both as far as they were met in this walk.
    :ivar module: of the function itself, whose helpers are read wherever it is installed.
    """

    known: AbstractSet[str] = frozenset()
    spelt: AbstractSet[str] = frozenset()
    attributes: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    found: list[Outside] = field(default_factory=list)
    module: Any = None
    held: dict[int, int] = field(default_factory=dict)
    alive: list = field(default_factory=list)  # an object that is gone may leave its number to another

    def read(self, function: Any, passed: Sequence[str]) -> None:
        """The function itself, with what wraps it."""
        pairs: list[tuple[str, Any]] = []
        while _is(function, Messenger, functools.partial):
            if _is(function, functools.partial):
                pairs += [(f"args[{k}] of the partial", value) for k, value in enumerate(function.args)]
                pairs += function.keywords.items()
                function = function.func
            else:
                pairs += [(name, value) for name, value in vars(function).items() if name != "fn"]
                function = function.fn
        if not inspect.isroutine(function):
            pairs.append(("self", function))
            function = type(function).__call__
        elif inspect.ismethod(function):
            pairs.append(("self", function.__self__))
            function = function.__func__
        function = inspect.unwrap(function)
        self.module = getattr(function, "__module__", None)
        if inspect.isfunction(function):
            self._read_function(function, 0, passed)
        for name, value in pairs:
            self.visit(name, value, 0)

    def visit(self, name: str, value: Any, depth: int, is_part: bool = False) -> int:
        """Look into a value, and say what it holds."""
        if depth > MAX_DEPTH or len(self.alive) > MAX_OBJECTS or value is None or _is(value, bool, str, range):
            return _NOTHING
        if _is(value, *_NUMBER):
            return self._add(name, value, (), is_part)
        if id(value) not in self.held:
            self.held[id(value)] = _NOTHING  # until it is known: it may hold itself
            self.alive.append(value)
            self.held[id(value)] = self._look_into(name, value, depth, is_part)
        return self.held[id(value)]

    def _add(self, name: str, value: Any, shape: tuple[int, ...], is_part: bool, **what: bool) -> int:
        self.found.append(Outside(name, type(value).__name__, shape, is_part=is_part, **what))
        return _NUMBERS

    def _look_into(self, name: str, value: Any, depth: int, is_part: bool) -> int:
        if _is(value, np.ndarray, jax.Array, *NO_VALUE):
            return self._add(name, value, tuple(value.shape), is_part, is_array=bool(value.shape))
        if _is(value, *_BYTES):
            return self._add(name, value, (len(memoryview(value)),), is_part)
        if _is(value, memoryview):
            return self._add(name, value, tuple(value.shape or ()), is_part, is_array=True)
        if _is(value, types.ModuleType):
            if self._is_theirs(vars(value).get("__name__")):
                self._read_attributes(name, vars(value), depth)
            return _NOTHING
        if _is(value, type):
            self._read_class(name, value, depth, _NEVER_READ_OF_CLASSES)
            return _NOTHING
        if (parts := _within(value)) is not None:
            for part in parts:
                self.visit(name, part, depth + 1)
            return _NOTHING
        if _is(value, types.FunctionType):
            self._read_function(value, depth)
            return _NOTHING
        of_items = self._read_items(name, value, depth, is_part)
        if of_items == _NOTHING and _is(value, collections.abc.Iterator):
            return self._add(name, value, (), is_part, is_iterator=True, has_numbers=False)
        return max(of_items, self._read_object(name, value, depth, is_part))

    def _read_items(self, name: str, value: Any, depth: int, is_part: bool) -> int:
        """A container's items. It is named before them, if they hold anything."""
        kind: Any = next((kind for kind in _ITEMS if _is(value, kind)), None)
        if kind is None:
            return _NOTHING
        size, first = kind.__len__(value), itertools.islice(_ITEMS[kind](value), MAX_ITEMS)
        pairs = list(first if kind is dict else enumerate(first))
        place = len(self.found)
        holds = _NUMBERS if any(_is(key, *_NUMBER) for key, _ in pairs if kind is dict) else _NOTHING
        for key, item in pairs:
            if _is(item, *_NUMBER, *_TEXT):
                holds = max(holds, _NUMBERS if _is(item, *_NUMBER) else _TEXTS)
                continue
            # A key may be a person's name; one that the code itself spells out is not.
            is_spelt = key in self.spelt if kind is dict and type(key) is str else kind is not dict and size <= 10
            part = f"{name}[{key!r}]" if is_spelt else f"{name}[...]"
            holds = max(holds, self.visit(part, item, depth + 1, is_part or kind is not dict))
        if holds:
            # Of a dict of tables, these are named.
            is_part = is_part or (kind is dict and not any(_is(item, *_NUMBER) for _, item in pairs))
            container = Outside(name, type(value).__name__, (size,), has_numbers=holds == _NUMBERS, is_part=is_part)
            self.found.insert(place, container)
        return holds

    def _read_object(self, name: str, value: Any, depth: int, is_part: bool) -> int:
        """What an object stores: of one of the user's own classes what the code reads, of a library's all."""
        kind = type(value)
        if _is(value, enum.Enum):
            return self.visit(name, _stored(value).get("_value_"), depth + 1, is_part)
        if self._is_theirs(_module_of(kind)) or kind is types.SimpleNamespace:
            shape = inspect.getattr_static(value, "shape", None)
            of_array = (
                self._add(name, value, shape, is_part, is_array=True) if _is(shape, tuple) and shape else _NOTHING
            )
            self._read_class(name, kind, depth, _NEVER_READ_OF_OBJECTS)
            return max(of_array, self._read_attributes(name, _stored(value), depth, is_part))
        if _module_of(kind).partition(".")[0] in _KEEP_NO_TABLE:
            return _NOTHING
        if shape := shape_of(value):
            return self._add(name, value, shape, is_part, is_array=True)
        before = len(self.found)
        stored = _stored(value) | {"__wrapped__": getattr(value, "__wrapped__", None)}
        for key, part in stored.items():
            if not (_is(part, *_NUMBER) or _is_shape(part)):
                self.visit(f"{name}.{key}", part, depth + MAX_DEPTH // 4, is_part)
        self.found[before:] = [item for item in self.found[before:] if item.has_numbers]  # texts are its own
        return _NUMBERS if self.found[before:] else _NOTHING

    def _read_attributes(self, name: str, stored: dict[str, Any], depth: int, is_part: bool = False) -> int:
        read = [key for key in stored if key in self.known]
        return max((self.visit(f"{name}.{key}", stored[key], depth + 1, is_part) for key in read), default=_NOTHING)

    def _read_class(self, name: str, kind: type, depth: int, never: frozenset[str]) -> None:
        """Variables of a class that the code reads, and methods, which operators may call unseen."""
        for base in kind.__mro__:
            for attribute, stored in [*vars(base).items()] if self._is_theirs(_module_of(base)) else ():
                is_operator = attribute.startswith("__") and _is(stored, types.FunctionType) and attribute not in never
                if attribute in self.known or is_operator:
                    self.visit(f"{name}.{attribute}", stored, depth + 1)

    def _read_function(self, function: types.FunctionType, depth: int, passed: Sequence[str] = ()) -> None:
        """Globals and closed-over variables that a function reads, its defaults, and what is stored on it."""
        module, cells = function.__globals__.get("__name__"), dict(_cells(function))
        if not self._is_theirs(module, function.__code__.co_filename):
            # A library's wrapper around a function of the user's.
            wrapped = [value for value in (*cells.values(), *vars(function).values()) if callable(value)]
            for value in wrapped:
                self.visit("", value, depth + 1)
            return
        reads = _reads(function.__code__)
        self.attributes |= reads.attributes
        self.texts |= reads.texts
        variables = {name: function.__globals__[name] for name in reads.variables & function.__globals__.keys()}
        if module != self.module:
            variables = {f"{module}.{name}": value for name, value in variables.items()}
        variables |= {name: sys.modules[name] for name in reads.modules & sys.modules.keys()}
        defaults = {name: value for name, value in _defaults(function).items() if name not in passed}
        for name, value in sorted((variables | defaults | cells | vars(function)).items()):
            self.visit(name, value, depth + 1)

    def _is_theirs(self, module: Any, file: str | None = None) -> bool:
        if not _is(module, str) or module == self.module:
            return _is(module, str)
        return is_theirs(module, file or getattr(sys.modules.get(module), "__file__", None) or "")


# Of the standard library's objects, loggers and threads, say, hold much that is no table; containers do.
_KEEP_NO_TABLE = sys.stdlib_module_names - {"collections"}
_WHEN_MADE = frozenset(("__init__", "__new__", "__post_init__"))
_NEVER_READ_OF_CLASSES = frozenset(
    (
        *("__class_getitem__", "__copy__", "__deepcopy__", "__del__", "__dir__", "__eq__", "__format__"),
        *("__getstate__", "__hash__", "__init_subclass__", "__reduce__", "__reduce_ex__", "__replace__", "__repr__"),
        *("__setstate__", "__sizeof__", "__str__"),
    )
)
_NEVER_READ_OF_OBJECTS = _NEVER_READ_OF_CLASSES | _WHEN_MADE


def _is(value: Any, *kinds: type) -> bool:
    """`isinstance`, which would ask the value itself for its class."""
    return issubclass(type(value), kinds)


def _module_of(kind: type) -> str:
    module = type.__dict__["__module__"].__get__(kind)  # a metaclass may have another one
    return module if _is(module, str) else ""


def _is_shape(value: Any) -> bool:
    return _is(value, tuple) and all(_is(item, int) for item in tuple.__iter__(value))


def _within(value: Any) -> Sequence | None:
    """What a bound method, a partial, a cache or a descriptor is made of."""
    if _is(value, types.MethodType):
        return value.__func__, value.__self__
    if _is(value, functools.partial):
        return value.func, value.args, value.keywords
    if _is(value, staticmethod, classmethod):
        return (value.__func__,)
    if _is(value, property):
        return (value.fget,)
    if _is(value, _CACHE):
        return (value.__wrapped__,)
    if _is(value, types.MappingProxyType):
        return gc.get_referents(value)
    return (value.func,) if _is(value, functools.cached_property) else None


_CACHE = type(functools.cache(lambda: None))


def _stored(value: Any) -> dict[str, Any]:
    """An object's attributes as they are stored: in its dict and in its slots."""
    found: dict[str, Any] = {}
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if _is(slot, types.MemberDescriptorType) and not _is(value, type):
                try:
                    found[name] = slot.__get__(value)
                except AttributeError:  # nothing is stored there yet
                    continue
    try:
        return found | object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found


def _objects(named: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Arguments that are neither arrays, numbers nor texts, and what a pytree of the user's keeps beside its leaves."""
    queue = list(named)
    while queue:
        name, value = queue.pop(0)
        if _is(value, dict):
            queue.extend((f"{name}[{key!r}]", item) for key, item in dict.items(value))
        elif _is(value, list, tuple):
            queue.extend((f"{name}[{k}]", item) for k, item in enumerate(value))
        elif not (_is(value, collections.abc.Iterator) or jax.tree_util.all_leaves([value])):
            yield from ((f"{name} (static)", part) for part in _static(jax.tree.structure(value)))
        elif not (is_array(value) or _is(value, *_NUMBER, *_TEXT)):
            yield name, value


def _static(structure: Any) -> Iterator[Any]:
    if (node := structure.node_data()) is not None and not issubclass(node[0], dict | list | tuple | collections.deque):
        yield node[1]
    for child in structure.children():
        yield from _static(child)


# -- What code reads ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reads:
    """Names in a function's bytecode, and in that of functions within it."""

    variables: frozenset[str]
    attributes: frozenset[str]
    modules: frozenset[str]
    texts: frozenset[str]


_OF_VARIABLES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_BY_TEXT = frozenset(("getattr", "vars", "attrgetter", "__dict__", "__getattribute__"))


@functools.lru_cache(1_000)
def _reads(code: types.CodeType) -> _Reads:
    variables, attributes, modules, texts = set[str](), set[str](), set[str](), set[str]()
    read_by = dict.fromkeys(_OF_VARIABLES, variables) | dict.fromkeys(_OF_ATTRIBUTES, attributes)
    read_by["IMPORT_NAME"] = modules
    todo = [code]
    while todo:
        current = todo.pop()
        for instruction in dis.get_instructions(current):
            if (names := read_by.get(instruction.opname)) is not None:
                names.add(instruction.argval)
        todo += [const for const in current.co_consts if isinstance(const, types.CodeType)]
        texts |= {const for const in current.co_consts if isinstance(const, str)}
    if _BY_TEXT & (variables | attributes):
        attributes |= {text for text in texts if text.isidentifier()}
    return _Reads(*map(frozenset, (variables, attributes, modules, texts)))


def _cells(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # empty
            continue


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    return dict(zip(names, given, strict=True)) | (function.__kwdefaults__ or {})
