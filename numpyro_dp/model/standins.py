"""What stands for the rows while a model is checked, where it is private how many there are.

A refusal, a message or a site that is left out for some numbers of rows only would tell their number. So the check sees
none of the table: each array with rows is replaced by a shape of a fixed public length, and the messages say "rows"
instead of that length. No length is compared with that of the table, and two tables that differ by a row are refused,
or not, with the same words.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.primitives import Messenger

from numpyro_dp.model.arguments import (
    Argument,
    UnsupportedModelError,
    abstract,
    argument_problems,
    canonical,
    describe_place,
    list_problems,
    mark_chosen,
    name_leaves,
    quote,
    raise_if,
    take_arrays,
)
from numpyro_dp.model.outside import Outside
from numpyro_dp.model.tracing import initialized

LENGTHS = (113, 131, 137, 139, 149)
"""Primes, of which the first is taken that is no other size of the model. One site per row must not take for ever."""


class StandIns(NamedTuple):
    """A model's arguments without the table.

    :ivar args, kwargs: with shapes in the places of arrays with rows.
    :ivar private_args: the names of these.
    :ivar length: of the stand-ins.
    :ivar num_rows: of the table; private.
    """

    args: tuple
    kwargs: dict
    private_args: list[str]
    length: int
    num_rows: int


def _arguments(leaves: Iterable[str]) -> str:
    """Of these arrays: a dict's keys may name persons, and there may be as many as rows."""
    within = {argument: inner for argument, inner, _ in (name.partition("[") for name in leaves)}
    return ", ".join(f"'{argument}' (arrays in it)" if inner else f"'{argument}'" for argument, inner in within.items())


def stand_ins(
    model: Callable, args: tuple, kwargs: dict, private_args: Sequence[str] | None, outside: Sequence[Outside]
) -> StandIns:
    """The arguments with stand-ins for the table.

    Which arrays hold rows is not decided by their lengths: all do that have an axis, unless `private_args` names them.

    :raises UnsupportedModelError: if they are not equally long, or something else may hold rows.
    """
    named = name_leaves(model, args, kwargs)
    chosen = [a.name for a in named if a.shape] if private_args is None else private_args
    named = mark_chosen(named, chosen)
    length = next((k for k in LENGTHS if k not in _public_sizes(named, args, kwargs, outside)), LENGTHS[0])
    lengths = {a.shape[0] for a in named if a.private and a.shape}
    named = [replace(a, shape=(length, *a.row_shape)) if a.private and a.shape else a for a in named]
    problems = list(argument_problems(named, args, kwargs))
    if private_args is None:
        problems += list_problems(model, args, kwargs, None)
    if len(lengths) > 1:
        problems.append(
            f"the arguments {_arguments(a.name for a in named if a.private)} were taken for rows, but are not equally "
            "long: where the number of rows is private, each array is, unless `private_args=` says which arguments "
            "hold rows"
        )
    raise_if(problems)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    shapes = [
        jax.ShapeDtypeStruct(a.shape, canonical(a.dtype)) if a.private and a.shape else leaf
        for a, leaf in zip(named, leaves, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(treedef, shapes)
    return StandIns(args, kwargs, list(chosen), length, lengths.pop() if lengths else 0)


def _public_sizes(named: Sequence[Argument], args: tuple, kwargs: dict, outside: Sequence[Outside]) -> set[Any]:
    sizes = {size for item in outside for size in item.shape}
    for a, leaf in zip(named, jax.tree.leaves((args, kwargs)), strict=True):
        if a.shape is not None:
            sizes |= set(a.row_shape if a.private else a.shape)
        elif isinstance(leaf, int | np.integer):
            sizes.add(int(leaf))
    return sizes


@contextmanager
def without_length(model: Callable, table: StandIns) -> Iterator[None]:
    """What is raised here says "rows" in the place of the stand-ins' length."""
    try:
        yield
    except UnsupportedModelError as error:
        raise UnsupportedModelError([_hide(problem, table.length) for problem in error.problems]) from None
    except Exception as error:
        if isinstance(error, TypeError | ValueError) and (own := _plates_of_own_size(model, table)):
            raise UnsupportedModelError([_own_sizes(own, error)]) from error
        _explain(error, table.length)
        raise


def _hide(text: str, length: int) -> str:
    number = rf"(?<![\w.-])(?<!line ){length}(?!\w|\.\d)"
    text = re.sub(rf" \({length}\)|{number} (?=(?:synthetic )?rows|members)", "", text)
    return re.sub(number, "rows", text)


def _explain(error: Exception, length: int) -> None:
    notes = [_hide(note, length) for note in getattr(error, "__notes__", [])]
    error.__notes__ = [
        *notes,
        f"How many rows there are is private: {length} stood for them, whatever the table. Sizes that go by it must be "
        "taken from the shapes of arrays with rows",
    ]


def _own_sizes(plates: Sequence[str], error: Exception) -> str:
    return (
        f"the model works for some numbers of rows only ({type(error).__name__}{describe_place(error)}), and how many "
        f"there are is private. If {quote(plates)} is a plate of rows: its size is written as a number, or passed as "
        "one, which would tell how many. Take it from an array's shape, as in `numpyro.plate('rows', y.shape[0])`"
    )


def _plates_of_own_size(model: Callable, table: StandIns) -> list[str]:
    """Plates that are not as long as the stand-ins, up to where the model cannot go on."""
    arrays, merge = take_arrays(table.args, table.kwargs)
    noted = _note_plates(initialized(model))

    def run(arrays: list) -> None:
        args, kwargs = merge(arrays)
        noted(*args, **kwargs)

    with suppress(Exception):  # the one that is being explained
        jax.eval_shape(run, abstract(arrays))
    return [name for name, size in noted.sizes.items() if size != table.length]


class _note_plates(Messenger):
    def __init__(self, fn: Callable):
        self.sizes: dict[str, int] = {}
        super().__init__(fn)

    def process_message(self, msg):
        if msg["type"] == "plate":
            self.sizes[msg["name"]] = msg["args"][0]
