"""A unit other than the row: a person, a household, a hospital visit's owner, with many rows.

All rows of a unit are taken together: their log densities are added up before anything is clipped, so that the clip
bounds what the unit as a whole can do. To the rest of the package a unit then *is* a row.

Which rows are whose is public, and with it how many each unit has: neighbouring tables differ in the content of one
unit's rows (`PublicUnits`). With a public cap on a unit's rows it is private: neighbouring tables differ in one unit's
rows, of which there may be any number; what is beyond the cap is left out (`PrivateUnits`).
"""

import dataclasses
import hashlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from numpyro_dp.model.arguments import is_streamed, list_problems, name_leaves, placeholder_rows, raise_if
from numpyro_dp.model.latents import Parts, integrated
from numpyro_dp.model.separable import SeparableModel, split_words
from numpyro_dp.privacy.passes import StreamedColumn, StreamedUnits

MANY_UNITS = 50
"""A parameter that is as long as there are so many units or more is taken for the units' own."""
MOST_PADDING = 8
"""Public units are laid out with as many places as the largest needs; so many times the table's rows at most."""


class Layout:
    """Where the rows of each unit are.

    :ivar index: rows of each unit, shape (units, most rows of one); its own first row where it has no more.
    :ivar present: which of these places are rows, same shape.
    """

    def __init__(self, number: np.ndarray, most: int):
        """
        :param number: of each row's unit, from 0, shape (n,).
        :param most: rows of a unit, in the table's order, that there is a place for.
        """
        sizes = np.bincount(number)
        order = np.argsort(number, kind="stable")
        first = np.cumsum(sizes) - sizes
        place = np.arange(most)
        self.present = place < sizes[:, None]
        self.index = order[first[:, None] + np.where(self.present, place, 0)]


@dataclasses.dataclass(frozen=True, eq=False)
class UnitModel(SeparableModel):
    """A model whose "rows" are units. `num_rows` is their number.

    :ivar row_model: the same model, row by row.
    :ivar most_rows: of a unit.
    """

    row_model: SeparableModel
    most_rows: int

    @abstractmethod
    def layout(self, args: tuple, kwargs: dict) -> Layout: ...

    @property
    def of_rows(self) -> SeparableModel:
        return self.row_model

    @property
    def rows_per_unit(self) -> int:
        return self.most_rows

    def rows(self, args: tuple, kwargs: dict) -> tuple[jax.Array, ...]:
        """The private leaves, units and their rows on the leading axes; and which of the places are rows."""
        layout = self.layout(args, kwargs)
        return (*(leaf[layout.index] for leaf in super().rows(args, kwargs)), jnp.asarray(layout.present))

    def integrate(self, parts: Callable[[jax.Array], Parts]) -> Callable[..., jax.Array]:
        latents = self.latents
        assert latents is not None
        if not latents.plates:  # each row has its own
            return self.per_unit(super().integrate(parts))

        def density(z: jax.Array, unit: tuple, *words: jax.Array) -> jax.Array:
            *rows, present = (part[0] for part in unit)
            keys = [split_words(words[0], 1 + present.shape[0])] if words else []
            keys = [key for split in keys for key in (split[0], split[1:])]
            return integrated(latents, parts, z, tuple(part[:, None] for part in rows), present, *keys)

        return density

    def per_unit(self, density: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def total(z: jax.Array, unit: tuple, *key: jax.Array) -> jax.Array:
            *rows, present = (part[0] for part in unit)
            keys = [split_words(words, present.shape[0]) for words in key]
            each = jax.vmap(lambda row, *key: density(z, tuple(part[None] for part in row), *key))(rows, *keys)
            return jnp.sum(jnp.where(present, each, 0))

        return total


@dataclasses.dataclass(frozen=True, eq=False)
class PublicUnits(UnitModel):
    """Units of which everybody knows which rows are theirs.

    :ivar number: of each row's unit, shape (n,), in the order in which units appear.
    """

    number: np.ndarray

    @property
    def identity(self) -> str:
        """A hash of which rows belong together."""
        return hashlib.sha256(self.number.astype("<i8").tobytes()).hexdigest()

    def layout(self, args: tuple, kwargs: dict) -> Layout:
        return Layout(self.number, self.most_rows)

    def require_same(self, unit: str, args: tuple, kwargs: dict) -> None:
        named = _named(self.row_model, unit, args, kwargs)
        if not isinstance(named, jax.core.Tracer) and not np.array_equal(
            number_units(_values(self.row_model, unit, args, kwargs, has_public_size=True)), self.number
        ):
            raise ValueError(
                f"unit={unit!r} says otherwise than before which rows are whose, and this kernel has grouped them "
                "already. Make a new kernel"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class PrivateUnits(UnitModel):
    """Units of which the cap on their rows is public, and perhaps the number. Holds nothing of who has which.

    :ivar unit: the name of the model's argument, a private one, that says so.
    :ivar are_counted: whether their number is public.
    """

    unit: str
    are_counted: bool

    @property
    def identity(self) -> str:
        return f"private {self.unit!r}, up to {self.most_rows} rows"

    @property
    def has_public_places(self) -> bool:
        return False

    def layout(self, args: tuple, kwargs: dict) -> Layout:
        number = number_units(_values(self.row_model, self.unit, args, kwargs, has_public_size=False))
        found = len(np.bincount(number))
        if found != self.num_rows:  # what was planned, a batch above all, is for so many
            counts = f"{self.num_rows} units, and there are {found}" if self.are_counted else "another number of units"
            raise ValueError(f"this kernel was planned for {counts}. Make a new kernel")
        return Layout(number, self.most_rows)


@dataclasses.dataclass(frozen=True, eq=False)
class StreamedUnitModel(UnitModel):
    """Units of a table that is read in pieces.

    :ivar unit: the name of the model's argument that says whose a row is, or of a column of the table.
    :ivar cap: on the rows that count; None if it is public which rows are whose.
    :ivar units_identity: a name for which rows belong together.
    """

    unit: str
    cap: int | None
    units_identity: str

    @property
    def identity(self) -> str:
        return self.units_identity

    @property
    def has_public_places(self) -> bool:
        return self.cap is None

    def layout(self, args: tuple, kwargs: dict) -> Layout:
        raise NotImplementedError("the pieces of the table group their own rows")

    def rows(self, args: tuple, kwargs: dict) -> tuple[Any, ...]:
        table = self._table(args, kwargs)
        leaves: tuple[Any, ...] = SeparableModel.rows(self, args, kwargs)
        return (*map(table.of_units, leaves), table.present)

    def require_same(self, unit: str, args: tuple, kwargs: dict) -> None:
        self._table(args, kwargs)

    def _table(self, args: tuple, kwargs: dict) -> StreamedUnits:
        column = _streamed_column(self.row_model, self.unit, args, kwargs)
        assert column is not None
        table = column.table.by_unit(column, self.cap)
        if (table.num_rows, table.most_rows) != (self.num_rows, self.most_rows):
            raise ValueError(
                "another table is grouped otherwise than the one this kernel was made for: make a new kernel"
            )
        return table


def _streamed_column(separated: SeparableModel, unit: Any, args: tuple, kwargs: dict) -> StreamedColumn | None:
    """The column that says whose a row is, of a table that is read in pieces; None for a table in memory."""
    streamed = {name: leaf for name, leaf in _named_leaves(separated, args, kwargs).items() if is_streamed(leaf)}
    if not streamed:
        return None
    if not isinstance(unit, str):
        raise ValueError(
            "unit must be a name where the table is read in pieces: that of a model's argument or of a column"
        )
    return streamed[unit] if unit in streamed else next(iter(streamed.values())).table.unit(unit)


def _require_unused(separated: SeparableModel, unit: str, args: tuple, kwargs: dict) -> None:
    """Refuse a model that uses the number of a row's unit where that is private: it would go by other units' rows."""
    names = [argument.name for argument in separated.private_arguments()]
    if unit not in names:
        return
    rows = placeholder_rows(separated.arguments)
    z = jax.eval_shape(separated.ravel, separated.prototype)
    closed = jax.make_jaxpr(separated.row_log_density(args, kwargs))(z, rows)
    _, used = dce_jaxpr(closed.jaxpr, [True])
    if used[1 + names.index(unit)]:
        raise ValueError(
            f"with max_rows_per_unit it is private which rows are whose, and the model uses {unit!r} otherwise than to "
            "pick a latent of its unit. Units have no public numbers then: pass what the model needs as a column"
        )


def group_rows(
    separated: SeparableModel,
    unit: Any,
    args: tuple,
    kwargs: dict,
    max_rows_per_unit: int | None = None,
    are_counted: bool = True,
    private_is_named: bool = False,
) -> UnitModel:
    """The model with units in the place of rows.

    :param unit: whose each row is: integers, texts or dates, shape (n,); or the name of the model's argument that says
        so.
    :param max_rows_per_unit: makes it private which rows are whose; a unit's first so many rows count.
    :param are_counted: whether the number of units is public. If not, no refusal depends on it.
    :param private_is_named: whether the user has said which arguments are private: then the others are meant to be
        public.
    :raises ValueError: if `unit` says no such thing, or if public sizes differ too much.
    """
    column, is_private = _streamed_column(separated, unit, args, kwargs), max_rows_per_unit is not None
    if column is not None:
        table = column.table.by_unit(column, max_rows_per_unit)
        units, most, rows = table.num_rows, table.most_rows, table.num_table_rows
    else:
        if is_private:
            _require_private(separated, unit, args, kwargs)
        ids = _values(separated, unit, args, kwargs, has_public_size=not is_private)
        number = number_units(ids)
        sizes = np.bincount(number)
        units, most, rows = len(sizes), int(np.max(sizes, initial=0)), len(ids)
    if are_counted:
        if units < 2:
            raise ValueError("unit says that all rows belong to one and the same: there is nobody to hide among")
        _require_own_latents(separated, unit, units)
        if not private_is_named:
            _require_no_table_of_units(separated, args, kwargs, units)
    if not is_private and units * most > MOST_PADDING * rows:
        raise ValueError(
            f"the largest unit has {most} of {rows} rows, and the mean of the {units} units is {rows / units:.3g}: all "
            "would need as much room as the largest. Keep fewer rows of the largest units: `max_rows_per_unit=` does"
        )
    fields = {**vars(separated), "num_rows": units, "row_model": separated}
    if column is not None:
        if is_private:
            _require_unused(separated, unit, args, kwargs)
        else:
            _require_members(separated, unit, units)
        identity = f"private {unit!r}, up to {most} rows" if is_private else table.identity
        return StreamedUnitModel(**fields, most_rows=most, unit=unit, cap=max_rows_per_unit, units_identity=identity)
    if max_rows_per_unit is not None:
        return PrivateUnits(**fields, most_rows=max_rows_per_unit, unit=unit, are_counted=are_counted)
    _require_codes(separated, unit, ids)
    return PublicUnits(**fields, most_rows=most, number=number)


def _require_own_latents(separated: SeparableModel, unit: Any, units: int) -> None:
    """Refuse parameters of which each unit seems to have one."""
    found = [name for name, x in separated.prototype.items() if units >= MANY_UNITS and units in x.shape]
    if not found:
        return
    one = f"latent site '{found[0]}' has shape {separated.prototype[found[0]].shape}, one value for each of the {units}"
    if not isinstance(unit, str):
        raise ValueError(
            f"{one} units. To have it integrated out, name the model's argument by which rows pick their unit's value, "
            "unit='person' say, instead of giving the array"
        )
    raise ValueError(
        f"{one} units, but it is in no plate, or rows do not pick from it by {unit!r}, so it cannot be integrated out. "
        f"Draw it in a plate, `with numpyro.plate('units', {units}):`, and pick `{found[0]}[{unit}]` with codes 0, 1, "
        "2, ... (`pandas.factorize(ids)[0]` makes them). Effects of other groups are parameters: fewer of them"
    )


def _require_no_table_of_units(separated: SeparableModel, args: tuple, kwargs: dict, units: int) -> None:
    """Refuse arguments that would be public and seem to hold what each unit is."""
    if units >= MANY_UNITS:
        raise_if(list_problems(separated.model, args, kwargs, units, "units"))
    for argument in separated.arguments:
        if not argument.private and argument.shape and argument.shape[0] == units >= MANY_UNITS:
            raise ValueError(
                f"argument '{argument.name}' has one entry for each of the {units} units, and would be public. Give "
                "each row its unit's, as a column, computed beforehand. If it is public, and as long by chance, list "
                "the arguments that hold rows in `private_args`"
            )


def _require_members(separated: SeparableModel, unit: Any, units: int) -> None:
    """Refuse more units than a plate has members that rows pick from by the units' numbers."""
    for plate, size in ({} if separated.latents is None else separated.latents.sizes).items():
        if units > size:
            raise ValueError(
                f"unit={unit!r} has {units} units, and plate '{plate}' has {size} members: give it as many"
            )


def _require_codes(separated: SeparableModel, unit: Any, ids: np.ndarray) -> None:
    """Refuse public numbers of units that are none of the members of a plate that rows pick from by them."""
    for plate, size in ({} if separated.latents is None else separated.latents.sizes).items():
        if ids.min() < 0 or ids.max() >= size:
            raise ValueError(
                f"unit={unit!r} has codes from {ids.min()} to {ids.max()}, and plate '{plate}' has {size} members: "
                f"codes must be 0 to {size - 1} (`pandas.factorize(ids)[0]` makes them)"
            )


def _require_private(separated: SeparableModel, unit: str, args: tuple, kwargs: dict) -> None:
    _named(separated, unit, args, kwargs)
    if unit not in [argument.name for argument in separated.private_arguments()]:
        raise ValueError(
            f"with max_rows_per_unit it is private which rows are whose, but unit={unit!r} names a public argument: "
            "name it in private_args"
        )


_IDS = "iubUSM"
"""Kinds of ids: of other objects, NaN among them, equal ones may not be found."""


def number_units(ids: np.ndarray) -> np.ndarray:
    """Units numbered in the order in which they appear."""
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.ravel()]


def without_names(ids: np.ndarray) -> np.ndarray:
    """Numbers in the place of ids that are good for units: which rows are whose is public, and not who they are."""
    return number_units(ids) if ids.ndim == 1 and ids.dtype.kind in _IDS else ids


def _named(separated: SeparableModel, unit: str, args: tuple, kwargs: dict) -> Any:
    leaves = _named_leaves(separated, args, kwargs)
    if unit not in leaves:
        raise ValueError(f"unit={unit!r} names no argument of the model: {', '.join(leaves)}")
    return leaves[unit]


def _named_leaves(separated: SeparableModel, args: tuple, kwargs: dict) -> dict[str, Any]:
    names = [argument.name for argument in name_leaves(separated.model, args, kwargs)]
    return dict(zip(names, jax.tree.leaves((args, kwargs)), strict=True))


def _values(separated: SeparableModel, unit: Any, args: tuple, kwargs: dict, *, has_public_size: bool) -> np.ndarray:
    described = "unit"
    if isinstance(unit, str):
        described, unit = f"unit={unit!r}", _named(separated, unit, args, kwargs)
    if isinstance(unit, jax.core.Tracer):
        raise ValueError(
            f"{described} must be known before a step is compiled, and is traced here. Where it is public, give the "
            "kernel the array itself; with max_rows_per_unit, leave out jit_model_args"
        )
    values = np.asarray(unit)
    # An argument with rows is as long as the others: `separate` has seen to that.
    is_column = values.shape == (separated.num_rows,) if has_public_size else values.ndim == 1
    if is_column and values.dtype.kind in _IDS:
        return values
    wanted, got = f"the {separated.num_rows} rows", f"shape {values.shape}, {values.dtype}"
    wanted, got = (wanted, got) if has_public_size else ("the rows", f"{values.ndim} axes, {values.dtype}")
    shape = f" of shape ({separated.num_rows},)" if has_public_size else ""
    raise ValueError(
        f"{described} must say whose each of {wanted} is, as integers{shape}, none of them missing; got {got}. "
        "`pandas.factorize(ids)[0]` makes integers of anything"
    )
