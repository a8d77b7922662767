"""What a kernel knows of its model: read once for arguments of the same shapes, without a look at rows."""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from numpyro_dp.kernels.settings import Settings
from numpyro_dp.model.arguments import is_streamed, quote
from numpyro_dp.model.marginal import doubts_of_latents, with_rule
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.model.separate import separate
from numpyro_dp.model.units import group_rows


class ModelReader:
    """Reads the model of a kernel with these settings.

    :ivar outcomes: the observed sites of rows, once the model has been read.
    :ivar doubts: about the integral over latents of rows or units.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self._read: dict[Any, SeparableModel] = {}
        self.outcomes: frozenset[str] | None = None
        self.doubts: list[str] = []

    def known(self, args: tuple, kwargs: dict) -> SeparableModel | None:
        """The model for arguments of these shapes, if it has been read."""
        return self._read.get(signature(args, kwargs))

    def read(self, args: tuple, kwargs: dict) -> SeparableModel:
        """The model for arguments of these shapes: checked once, and again only for other shapes.

        :raises UnsupportedModelError: if it has no log density per row.
        """
        settings, separated = self._settings, self.known(args, kwargs)
        if separated is not None:
            if isinstance(settings.unit, str):
                separated.require_same(settings.unit, args, kwargs)
            return separated
        options = settings.row_plate, settings.private_args, settings.table_size_is_public
        named = settings.unit if isinstance(settings.unit, str) else None
        separated = separate(settings.model, args, kwargs, *options, named)
        if settings.unit is not None:
            separated = group_rows(
                separated,
                settings.unit,
                args,
                kwargs,
                settings.max_rows_per_unit,
                are_counted=settings.size_is_public,
                private_is_named=settings.private_args is not None,
            )
        if separated.latents is not None:
            public_size = separated.num_rows if settings.size_is_public else None
            separated = with_rule(separated, args, kwargs, public_size)
            self.doubts = doubts_of_latents(separated, public_size)
        self._read[signature(args, kwargs)] = separated
        self.outcomes = separated.outcomes | (self.outcomes or frozenset())
        return separated

    def __getstate__(self):
        # What was read holds jitted closures, and shapes: under add/remove the number of rows is private.
        return self.__dict__ | {"_read": {}}


def signature(args: tuple, kwargs: dict) -> tuple:
    """Structure, shapes and dtypes of the arguments, and values of what is no array."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    return (treedef, *(_leaf_signature(leaf) for leaf in leaves))


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        is_known = leaf.shape == () and not isinstance(leaf, jax.core.Tracer)
        # A public number by its bytes, by which NaN is itself.
        return leaf.shape, str(leaf.dtype), np.asarray(leaf).tobytes() if is_known else None
    if is_streamed(leaf):
        return "streamed", leaf.shape, str(leaf.dtype)
    return leaf if isinstance(leaf, Hashable) else id(leaf)


def private_arrays(separated: SeparableModel, args: tuple, kwargs: dict) -> list:
    """The private arrays themselves; none where they are traced, and so have no identity."""
    leaves = jax.tree.leaves((args, kwargs))
    private = [leaf for leaf, a in zip(leaves, separated.arguments, strict=True) if a.private]
    return [] if any(isinstance(leaf, jax.core.Tracer) for leaf in private) else private


def require_streamable(
    kernel: str, asks_beforehand: bool, separated: SeparableModel, args: tuple, kwargs: dict
) -> None:
    """Refuse what a table that is read in pieces (`numpyro_dp.scan`) cannot do.

    :param kernel: its name.
    :param asks_beforehand: whether all that is asked of the table is asked before the chains start.
    :raises ValueError: with the way out.
    """
    named = list(zip(separated.arguments, jax.tree.leaves((args, kwargs)), strict=True))
    streamed = [argument for argument, leaf in named if is_streamed(leaf)]
    if not streamed:
        return
    if public := [argument.name for argument in streamed if not argument.private]:
        raise ValueError(f"{quote(public)}: a column of a scan holds rows, and private_args leaves it out: name it")
    if held := [argument.name for argument, leaf in named if argument.private and not is_streamed(leaf)]:
        raise ValueError(
            f"{quote(held)} is an array of rows, beside columns of a scan ({quote(a.name for a in streamed)}): all "
            "must be columns of the same one"
        )
    if not asks_beforehand:
        raise ValueError(
            f"this {kernel} asks the table in each iteration, and a table that is read in pieces is asked before the "
            "chains start, once for each stage: use DPHMC as it is by default, or put the table into memory"
        )
