"""The vault: rows stay in it, and noisy sums of clipped rows come out of it.

A `Vault` holds the rows. Whoever asks it passes a `Draw`, the leave of the ledger to make one release, and what is to
be added up: a function of one row, or a sum with a structure that is known (`numpyro_dp.privacy.structured`). The vault
checks the jaxpr that it maps over the rows, clips, adds up integers, adds the noise, and hands out a number.

What asks may be wrong in any way without eps being wrong (who hands the table to the vault may not: SECURITY.md):

- a function by which rows could act on one another is refused (`numpyro_dp.privacy.isolation`);
- a draw is opaque, and good for one release (`numpyro_dp.privacy.draws`);
- noise has the shape of the sum that it hides, and the law for which the release is accounted;
- a release that was not charged gives 0.

Python lets whoever wants to read private attributes. Against that nothing in one process is safe.

Proof: docs/proofs/draws.md.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from numpyro_dp.privacy.batches import ALL_ROWS, AllRows, Batch, Batches, FixedBatches, require_batches, shareable
from numpyro_dp.privacy.clipping import (
    GRID,
    LIMB,
    ClippedSum,
    OwnerIndex,
    UnclippedSum,
    chunk_rows,
    clipped_moments,
    clipped_sum,
    map_chunks,
    penalized_sum,
)
from numpyro_dp.privacy.draws import BATCH_BIT, BIT, SUM, Draw, Opened, Slots, law_of, trace_state
from numpyro_dp.privacy.isolation import Alone, alone, one_row
from numpyro_dp.privacy.ledger import Ledger, PrivacyBudgetError
from numpyro_dp.privacy.mechanisms import BarkerBatch, size_is_public
from numpyro_dp.privacy.noise import (
    GridNoise,
    NoisySteps,
    add_up,
    in_real_units,
    noise_scale,
    release,
    release_batch_bit,
    release_bit,
)
from numpyro_dp.privacy.passes import RowNumbers, StreamedColumn, run_program, table_of, total_over, trace_program
from numpyro_dp.privacy.sharding import Layout
from numpyro_dp.privacy.structured import RowStructure, StructuredRows

T = TypeVar("T")
_ROOM = 1 + 1e-3  # the clip of a vector rounds down, and a row may lie on the bound


class Released(NamedTuple):
    """A number or a vector that has been released.

    :ivar value: with noise.
    :ivar scale: standard deviation of the noise, of each entry; 0 without privacy.
    """

    value: jax.Array
    scale: jax.Array


class Grid(NamedTuple):
    """Candidates for a clip bound, ``smallest * ratio**j`` for j below ``2**num_counts``.

    :ivar ratio: from one candidate to the next.
    :ivar num_counts: releases that finding one of them takes.
    """

    ratio: float
    num_counts: int


class Exchange(Protocol):
    """How data owners in separate processes tell one another their noisy sums; see `numpyro_dp.owners`."""

    num_owners: int

    def check(self, tag: bytes, public: bytes) -> None:
        """Make sure that all owners pass the same."""

    def exchange(self, tag: bytes, mine: np.ndarray) -> np.ndarray:
        """All owners' int64 arrays, on a new leading axis."""


# -- What may be asked -------------------------------------------------------------------------------------------------


def batch_bit_bound(mechanism: BarkerBatch, noise_multiplier: jax.Array, weight: float) -> jax.Array:
    """The bound of a row, before it is weighted, at which a bit of a batch costs what it is accounted for."""
    size = mechanism.batch_size
    # Rounding of the sum (relative to the largest sum), and of the normal number, which has steps of 2^-23 or 24 bits
    # and is multiplied by a rounded scale; in sensitivities, which are 2 kappa / sqrt(batch size).
    of_sum = 8 * size * float(jnp.finfo(noise_multiplier.dtype).eps)
    of_noise = 40 / GRID * noise_multiplier * math.sqrt(mechanism.variance * size)
    return 1 / (noise_multiplier * weight * math.sqrt(size) * (1 + of_sum + of_noise))


class RowSum(NamedTuple):
    """The sum of `per_row` over the rows, each clipped to `bound`.

    :ivar per_row: from one-row slices to a scalar, or to a vector, which is clipped in norm.
    :ivar width: about how many numbers one row needs on the way.
    :ivar may_loop: see `numpyro_dp.privacy.isolation.alone`.
    """

    per_row: Callable[[tuple], jax.Array]
    bound: jax.Array | float
    width: int = 1
    may_loop: bool = False


class GradientSum(NamedTuple):
    """The sum of the rows' gradients at z, each clipped to norm `bound`, by the structure that the vault was told."""

    z: jax.Array
    bound: jax.Array | float


class ChangeSum(NamedTuple):
    """The sum of the rows' changes of the log density from z to z_new, each clipped, by the same structure."""

    z: jax.Array
    z_new: jax.Array
    bound: jax.Array | float


class PenalizedSum(NamedTuple):
    """``weight * sum_i r_i - v / 2`` over a batch, see `numpyro_dp.privacy.clipping.penalized_sum`."""

    per_row: Callable[[tuple], jax.Array]
    bound: jax.Array | float
    weight: float
    factor: float


class KeptSum:
    """A sum that the vault has computed once, for several releases."""

    def __init__(self, total: ClippedSum | UnclippedSum, settings: tuple, ledger: Any):
        self._total, self._settings, self._ledger = total, settings, ledger

    def __reduce__(self) -> Any:
        raise TypeError("a sum that a vault has kept cannot be copied or pickled: it is exact")


Query = RowSum | GradientSum | ChangeSum | PenalizedSum | KeptSum


class Vault:
    """The rows of a table.

    :param rows: the private arrays, units on the leading axis; or columns of a table that is read in pieces.
    :param neighboring_relation: that of the plan.
    :param private: whether the plan is: then nothing leaves without noise.
    :param rows_per_unit: how many rows a unit has at most.
    :param public_places: whether neighbouring tables have all units but one in the same places, if their number is
        public.
    :param batches: how the rows of a release are drawn.
    :param owners: owner number of each row and how many owners there are, or how to reach the other owners.
    :param layout: of the table, if it lies on several devices.
    :param ledger: whose draws are leave to ask.
    :param at_hand: whether the rows are no tracers, so that what is needed of them in each iteration is computed once.
    """

    def __init__(
        self,
        rows: "Sequence[jax.Array | StreamedColumn]",
        *,
        neighboring_relation: str,
        private: bool = True,
        rows_per_unit: int = 1,
        public_places: bool = True,
        batches: Batches = ALL_ROWS,
        owners: "OwnerIndex | Exchange | None" = None,
        layout: Layout | None = None,
        ledger: Ledger | None = None,
        at_hand: bool = True,
    ):
        self._ledger: Any = ledger  # compared with that of a draw
        self._rows: tuple[Any, ...] = tuple(rows)
        self._table, self._trace = table_of(self._rows), trace_state()
        self._relation, self._private = neighboring_relation, private
        self._rows_per_unit, self._places = rows_per_unit, public_places
        self._batches, self._owners, self._layout, self._at_hand = require_batches(batches), owners, layout, at_hand
        self._structured: StructuredRows | None = None
        if self._table is not None and not (private and isinstance(batches, AllRows) and layout is None):
            raise TypeError("of a table that is read in pieces, only private sums over all rows can be asked")
        if self._table is not None and isinstance(owners, OwnerIndex):
            raise TypeError("the rows of a table that is read in pieces have one owner")
        if owners is not None and not shareable(batches):
            raise TypeError(f"data owners cannot share {batches}: whose rows are drawn would follow from the others'")

    # -- What is public about the rows -------------------------------------------------------------------------------

    @property
    def has_public_size(self) -> bool:
        """Whether the number of rows is the same in neighbouring tables."""
        return size_is_public(self._relation)

    @property
    def has_public_places(self) -> bool:
        """Whether all rows but one are the same, *and* in the same places, in neighbouring tables."""
        return self.has_public_size and self._places

    @property
    def batches(self) -> Batches:
        """How the rows of a release are drawn."""
        return self._batches

    @property
    def one_row(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes and dtypes of one row's slices of the private arrays, leading axis 1."""
        return one_row(self._rows)

    # -- Views of the same rows --------------------------------------------------------------------------------------

    def numbered(self) -> "Vault":
        """The same rows, each with its position, which is public, as one more array."""
        if not self.has_public_places:
            raise TypeError("the places of these rows are private: they have no public numbers")
        numbers = jnp.arange(self._rows[0].shape[0]) if self._table is None else RowNumbers(self._table)
        return self._of((*self._rows, numbers))

    def with_structure(self, structure: RowStructure, size: int) -> "Vault":
        """The same rows, of a log density of which the structure is known; a wrong one makes wrong sums, not a leak.

        :param size: of z.
        """
        if not self.may_have_structure:
            raise TypeError("sums by a structure are for all rows, in public places, of one owner")
        other = self._of(self._rows)
        with self._aside():
            other._structured = StructuredRows(structure, self._rows, size, self._once, self._layout)
        return other

    def without_structure(self) -> "Vault":
        """The same rows, of another log density."""
        return self._of(self._rows)

    @property
    def may_have_structure(self) -> bool:
        """Whether sums by a structure can be asked for."""
        in_memory = self._table is None and isinstance(self._batches, AllRows)
        return self.has_public_places and in_memory and not isinstance(self._owners, OwnerIndex)

    @property
    def has_structure(self) -> bool:
        return self._structured is not None

    def program(self, function: Callable[..., T], static: Sequence[int] = ()) -> Callable[..., T]:
        """Compile ``function(vault, *args)``; the program takes the rows as arguments instead of holding them.

        :param function: of this vault and further arguments, draws among them.
        :param static: numbers of arguments that are no arrays, counted from the first after the vault.
        """

        static = tuple(map(operator.index, static))
        if any(k < 0 for k in static):
            raise ValueError(f"static arguments are counted from 0, got {static}")

        def inner(rows: tuple, opened: dict[int, Opened], *args: Any) -> T:
            # Of a ledger that nobody else has: `function` may have other vaults at hand, which nobody has charged.
            own = self._of(rows)
            own._ledger = object()
            closed = (Draw._closed(opened[k], own._ledger) if k in opened else a for k, a in enumerate(args))
            return function(own, *closed)

        if self._table is not None:
            compiled = _stage_by_stage(inner, self._rows, [k + 1 for k in static])
        else:
            compiled = jax.jit(inner, static_argnums=tuple(k + 2 for k in static))

        def run(vault: "Vault", *args: Any) -> T:
            if type(vault) is not Vault or vault._settings() != self._settings():
                raise TypeError("a program is for tables with the settings of the one that it was made for")
            # By their places: what is a draw in the program is what was one here, and nobody else's.
            opened = {k: vault._own(a)._opened() for k, a in enumerate(args) if isinstance(a, Draw)}
            return compiled(vault._rows, opened, *(None if k in opened else a for k, a in enumerate(args)))

        return run

    def _settings(self) -> tuple:
        numbers = self._relation, self._private, self._rows_per_unit, self._places, self._batches, self._at_hand
        columns = () if self._table is None else tuple((row.spec, row.shape, str(row.dtype)) for row in self._rows)
        return (*numbers, id(self._owners), self._layout, id(self._table), columns)

    def _of(self, rows: tuple) -> "Vault":
        other = object.__new__(Vault)
        other.__dict__.update(self.__dict__)
        other._rows, other._structured, other._trace = tuple(rows), None, trace_state()
        return other

    def __reduce__(self) -> Any:
        raise TypeError("a vault cannot be copied or pickled: it holds the rows")

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """For what is computed of rows without a draw, and kept: in the vault's own trace, where nobody else looks.

        Without JAX's search for NaN, which would stop where a row has one.
        """
        if self._trace != trace_state():
            raise TypeError("what is kept of the rows is computed where the vault was made, in no other trace")
        with jax.debug_nans(False), jax.debug_infs(False):
            yield

    def _once(self) -> AbstractContextManager:
        """Compute what follows now, not in each iteration, if the rows are at hand: in a trace, JAX would not."""
        return jax.ensure_compile_time_eval() if self._at_hand else nullcontext()

    # -- The one door ------------------------------------------------------------------------------------------------

    def ask(self, draw: Draw, query: Query) -> Released:
        """A clipped sum over the draw's rows, with the draw's noise: one Gaussian mechanism.

        :raises PrivacyBudgetError: if the draw is no leave for it.
        :raises RowsMeetError: while it is traced, if rows could act on one another.
        """
        slot = self._open(draw, SUM)
        return self._release(slot, self._total(query, slot.batch))

    def ask_bit(self, draw: Draw, query: Query, threshold: jax.Array) -> jax.Array:
        """Whether a clipped sum over all rows plus logistic noise exceeds `threshold`: one bit (`LogisticBit`)."""
        threshold, slot = jnp.asarray(_number(threshold, "a threshold")), self._open(draw, BIT)
        self._require_all_rows()
        total = self._total(query, None)
        if isinstance(total, UnclippedSum) or slot.noise is None:
            raise TypeError("a bit is private only with a clip bound and with noise")
        _require_shape(slot.noise, total)
        (total, threshold), noise = beside((total, threshold), slot.noise)
        return release_bit(total, noise, threshold) & slot.granted

    def ask_batch_bit(
        self,
        draw: Draw,
        per_row: Callable[[tuple], jax.Array],
        weight: float,
        factor: float,
        threshold: jax.Array,
    ) -> jax.Array:
        """Whether the batch's weighted sum, brought to a total variance, exceeds `threshold` (`BarkerBatch`).

        The variance is that of the mechanism, and rows are clipped to `batch_bit_bound`.

        :param factor: of the batch's own variance, between 0 and 1.
        """
        _require_floats(weight, factor)
        threshold = jnp.asarray(_number(threshold, "a threshold"))
        if not (0 < weight < math.inf and 0 <= factor <= 1):
            raise ValueError(f"weight must be positive and factor lie in [0, 1], got {weight} and {factor}")
        slot, mechanism = self._open(draw, BATCH_BIT), draw._mechanism
        if slot.batch is None or slot.noise is None or not isinstance(mechanism, BarkerBatch):
            raise TypeError("this bit needs batches of a fixed size, and noise")
        bound = batch_bit_bound(mechanism, slot.noise_multiplier, weight)
        moments = clipped_moments(per_row, self._batch_rows(slot.batch), bound)
        sums = moments.first, moments.second, threshold
        (first, second, threshold), noise = beside(sums, slot.noise)
        moments = moments._replace(first=first, second=second)
        return release_batch_bit(moments, weight, factor, mechanism.variance, noise, threshold) & slot.granted

    def keep(self, query: RowSum) -> KeptSum:
        """Compute a sum over all rows now, for several releases. Each row is rounded by itself."""
        self._require_all_rows()
        if self._table is not None:
            raise TypeError("of a table that is read in pieces no sum is kept: a program would hold it")
        with self._aside(), self._once():
            return KeptSum(self._row_sum(query, None, by_blocks=False), self._settings(), self._ledger)

    def find_bounds(
        self,
        draws: Draw,
        per_row: Callable[[tuple], jax.Array],
        grid: Grid,
        smallest: jax.Array,
        threshold: jax.Array,
        width: int = 1,
        may_loop: bool = False,
    ) -> jax.Array:
        """For each of k numbers that `per_row` gives, a bound that few rows exceed: k noisy binary searches at once.

        Each finds the smallest bound of a grid that at most `threshold` rows exceed. A step releases one count for each
        of the numbers, together, as one vector.

        :param draws: a slot for each step, for vectors of length k.
        :param per_row: from one-row slices to k numbers; NaN exceeds nothing.
        :param smallest: the lower end of the grid; a number, or one for each of the k.
        :param threshold: a number of rows, or one for each of the k.
        :param width: about how many numbers one row needs on the way.
        :param may_loop: see `numpyro_dp.privacy.isolation.alone`.
        :return: shape (k,).
        """
        self._require_all_rows()
        if isinstance(self._owners, OwnerIndex):
            raise TypeError("bounds are searched for among the rows of one owner")
        if len(draws) != grid.num_counts:
            raise PrivacyBudgetError(f"a search on this grid takes {grid.num_counts} releases, got {len(draws)}")
        draws = self._own(draws)
        smallest, threshold = jnp.asarray(smallest), jnp.asarray(threshold)
        of_row = alone(per_row, self.one_row, may_loop=may_loop)
        if len(of_row.shapes.shape) != 1 or not jnp.issubdtype(of_row.shapes.dtype, jnp.floating):
            raise ValueError("a search for bounds is for a vector of real numbers of each row")

        (k,), dtype = of_row.shapes.shape, of_row.shapes.dtype
        # Centred indicators have half the norm; but where n is private it may not be added back.
        centre = 0.5 if self.has_public_size else 0.0
        largest = (1 - centre) * math.sqrt(k) * _ROOM
        taken_off = centre * self._rows[0].shape[0]

        def bounds(position: jax.Array) -> jax.Array:
            return smallest * grid.ratio ** position.astype(dtype)

        width *= self._rows_per_unit
        if self._table is None:
            count = self._count_now(of_row, bounds, width, centre, largest)
        else:
            count = self._count_beforehand(of_row, bounds, width, centre, largest, 2**grid.num_counts)

        def halve(state: tuple, draw: Draw) -> tuple:
            low, high = state
            middle = (low + high) // 2
            slot = self._open(draw, SUM)
            counts = self._release(slot, count(middle))
            few = counts.value + taken_off <= threshold
            return (jnp.where(few, low, middle + 1), jnp.where(few, middle, high)), None

        start = (jnp.zeros(k, jnp.int32), jnp.full(k, 2**grid.num_counts - 1, jnp.int32))
        (_, found), _ = draws.scan(halve, start)
        return bounds(found)

    def _count_now(
        self, of_row: Alone, bounds: Callable[[jax.Array], jax.Array], width: int, centre: float, largest: float
    ) -> Callable[[jax.Array], Any]:
        """From positions in a grid to the sum of indicators of who exceeds the bounds there; values are kept."""

        def values_of(rows: tuple[jax.Array, ...]) -> jax.Array:
            return map_chunks(of_row.of, rows, chunk_rows(width))

        values = self._layout.map(values_of, self._rows) if self._layout else values_of(self._rows)

        def count(position: jax.Array) -> ClippedSum | UnclippedSum:
            limits = bounds(position)

            def exceeds(row: tuple) -> jax.Array:
                return jnp.where(row[0][0] > limits, 1 - centre, -centre).astype(values.dtype)

            return self._sum_rows((values,), RowSum(exceeds, largest, values.shape[1]), fixed_places=False)

        return count

    def _count_beforehand(
        self,
        of_row: Alone,
        bounds: Callable[[jax.Array], jax.Array],
        width: int,
        centre: float,
        largest: float,
        num_bounds: int,
    ) -> Callable[[jax.Array], Any]:
        """The same for a table that is read in pieces: in one pass, those of all bounds of the grid."""
        k = of_row.shapes.shape[0]
        limits = jax.vmap(bounds, out_axes=-1)(jnp.broadcast_to(jnp.arange(num_bounds)[:, None], (num_bounds, k)))

        def counts_of(rows: tuple, present: jax.Array) -> list:
            chunk = math.gcd(chunk_rows(width + k * num_bounds), present.shape[0])  # so that all chunks are whole

            def add(j: jax.Array, total: jax.Array) -> jax.Array:
                own, here = (
                    jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, j * chunk, chunk), x) for x in (rows, present)
                )
                values = jax.vmap(of_row.of)(tuple(part[:, None] for part in own))
                exceeding = (values[..., None] > limits) & here[:, None, None]
                return total + jnp.sum(exceeding, 0, jnp.int32)

            rows = lax.optimization_barrier(rows)
            counted = lax.fori_loop(0, present.shape[0] // chunk, add, jnp.zeros((k, num_bounds), jnp.int32))
            return [(jnp.zeros_like(counted), counted)]

        with jax.ensure_compile_time_eval():
            values = jnp.broadcast_to(jnp.array([[1 - centre], [-centre]], of_row.shapes.dtype), (2, k))
            yes, no = (_steps_of(value, largest) for value in values)

        def steps_of(counts: np.ndarray, num_rows: int) -> np.ndarray:
            return counts * yes + (num_rows - counts) * no

        ((hi, lo),) = total_over(self._rows, counts_of, steps_of)
        bound = jnp.asarray(largest, jnp.promote_types(of_row.shapes.dtype, jnp.float32))
        numbers = jnp.arange(k)
        return lambda position: ClippedSum(hi[numbers, position], lo[numbers, position], bound)

    def exact(self, query: RowSum) -> jax.Array:
        """An exact sum, for runs that are declared not private."""
        if self._private:
            raise TypeError("the plan of this run is private: nothing is released without noise")
        _require_query(query)
        total = self._row_sum(query._replace(bound=math.inf), None, by_blocks=False)
        assert isinstance(total, UnclippedSum)
        return total.value.sum(0) if isinstance(self._owners, OwnerIndex) else total.value

    # -- Behind it ---------------------------------------------------------------------------------------------------

    def _own(self, draw: Draw) -> Draw:
        """The draw, taken from whoever else may have it.

        :raises TypeError: if it is no draw of this vault's ledger.
        """
        if type(draw) is not Draw or draw._ledger is not self._ledger:
            raise TypeError("a release takes a draw of the ledger that the table is charged to")
        return draw._with(draw._take())

    def _open(self, draw: Draw, law: str) -> Slots:
        draw = self._own(draw)
        if self._private and not draw.is_private:
            raise TypeError("the plan of this run is private: nothing is released without noise")
        if draw.is_private and law_of(draw._mechanism) != law:
            raise TypeError(f"this draw is accounted for as one of {law_of(draw._mechanism)}, and {law} is asked for")
        slot = draw._take_one()
        if (slot.batch is None) != isinstance(self._batches, AllRows):
            raise TypeError(f"this draw is not one on {self._batches}")
        return slot

    def _total(self, query: Query, batch: Batch | None) -> ClippedSum | UnclippedSum:
        _require_query(query)
        if isinstance(query, RowSum):
            return self._row_sum(query, batch)
        if isinstance(query, PenalizedSum):
            if batch is None or not isinstance(self._batches, FixedBatches):
                raise TypeError("this sum needs batches of a fixed size")
            _require_floats(query.weight, query.factor)
            if not (0 < query.weight < math.inf and 0 <= query.factor < math.inf):
                raise ValueError(
                    f"weight must be positive and factor at least 0, got {query.weight} and {query.factor}"
                )
            bound = _number(query.bound, "a bound")
            moments = clipped_moments(query.per_row, self._batch_rows(batch), bound)
            return penalized_sum(moments, query.weight, query.factor)
        self._require_all_rows()
        if isinstance(query, KeptSum):
            if query._settings != self._settings() or query._ledger is not self._ledger:
                raise TypeError("this sum was kept by a vault of another table or with other settings")
            return query._total
        if self._structured is None:
            raise TypeError("nobody has told the structure of the rows' log density")
        bound = _number(query.bound, "a bound")
        if isinstance(query, GradientSum):
            return self._structured.gradient(_vector(query.z, self._structured.size), bound)
        z, z_new = (_vector(end, self._structured.size) for end in (query.z, query.z_new))
        return self._structured.log_ratio(z, z_new, bound)

    def _row_sum(self, query: RowSum, batch: Batch | None, by_blocks: bool = True) -> ClippedSum | UnclippedSum:
        _require_query(query)
        is_unclipped = type(query.bound) is float and math.isinf(query.bound)
        if is_unclipped and self._private:
            raise TypeError("a sum without a clip bound has no sensitivity: noise cannot make it private")
        query = query if is_unclipped else query._replace(bound=_number(query.bound, "a bound"))
        # What a batch is accounted for compares it with itself without a row, in which the others have other places.
        fixed = by_blocks and batch is None and self.has_public_places
        owners = self._owners if isinstance(self._owners, OwnerIndex) else None
        query = query._replace(width=query.width * self._rows_per_unit)
        if batch is None and owners is None:
            return self._sum_rows(self._rows, query, fixed_places=fixed)
        per_row, bound, width, may_loop = query
        size = None if batch is None else batch.size
        if owners is not None and batch is not None:
            owners = owners._replace(of_row=jnp.asarray(owners.of_row)[batch.indices])
        return clipped_sum(per_row, self._batch_rows(batch), bound, width, size, owners, fixed, may_loop)

    def _sum_rows(self, rows: tuple[jax.Array, ...], query: RowSum, *, fixed_places: bool) -> ClippedSum | UnclippedSum:
        """Over all rows, on whatever devices they lie."""
        per_row, bound, width, may_loop = query
        if any(isinstance(row, StreamedColumn) for row in rows):
            return _streamed_sum(rows, query)

        def of_rows(rows: tuple[jax.Array, ...]) -> ClippedSum | UnclippedSum:
            return clipped_sum(per_row, rows, bound, width, fixed_places=fixed_places, may_loop=may_loop)

        return self._layout.sum(of_rows, rows) if self._layout else of_rows(rows)

    def _release(self, slot: Slots, total: ClippedSum | UnclippedSum) -> Released:
        owned = isinstance(self._owners, OwnerIndex)
        if isinstance(total, UnclippedSum):
            if slot.noise is not None:
                raise TypeError("a sum without a clip bound has no sensitivity: noise cannot make it private")
            value = total.value.sum(0) if owned else total.value
            return Released(value, jnp.zeros((), value.dtype))
        _require_shape(slot.noise, total)
        total, noise = (total, None) if slot.noise is None else beside(total, slot.noise)
        steps, multiplier = release(total, noise), slot.noise_multiplier
        if self._private:
            steps = NoisySteps(*(jnp.where(slot.granted, limb, 0) for limb in steps))
        if isinstance(self._owners, OwnerIndex):  # each owner has added its own noise
            steps = add_up(steps)
            multiplier = multiplier * math.sqrt(self._owners.num_owners)
        elif self._owners is not None:
            steps, multiplier = _add_up_with_others(self._owners, slot, steps)
        scale = noise_scale(total.bound, multiplier, self._relation).astype(total.bound.dtype)
        return Released(in_real_units(steps, total.bound), scale)

    def _require_all_rows(self) -> None:
        """What is summed over all rows must not be accounted for as a release on a batch."""
        if not isinstance(self._batches, AllRows):
            raise TypeError(f"this release is on all rows, but is accounted for as on {self._batches}")

    def _batch_rows(self, batch: Batch | None) -> tuple[jax.Array, ...]:
        """The rows of a batch; of a table without rows zeros, which do not count."""
        if batch is None:
            return self._rows
        rows = (
            self._rows if self._rows[0].shape[0] else tuple(jnp.zeros((1, *r.shape[1:]), r.dtype) for r in self._rows)
        )
        # What is beyond the table is no row; JAX would take the last one for it, as often as it is asked for.
        return tuple(row.at[batch.indices].get(mode="fill", fill_value=0) for row in rows)


def _streamed_sum(rows: tuple, query: RowSum) -> ClippedSum:
    """Over a table that is read in pieces. Each row is rounded by itself, since pieces may end anywhere."""
    per_row, bound, width, may_loop = query
    dtypes = []

    def of_block(rows: tuple, present: jax.Array) -> list:
        total = clipped_sum(per_row, rows, bound, width, may_loop=may_loop, present=present)
        assert isinstance(total, ClippedSum)
        dtypes.append(total.bound.dtype)
        return [(total.hi, total.lo)]

    ((hi, lo),) = total_over(rows, of_block)
    return ClippedSum(hi, lo, jnp.asarray(bound, dtypes[-1]))


def _steps_of(value: jax.Array, bound: float) -> int:
    """The steps of each entry of a row's vector whose entries are all alike."""
    total = clipped_sum(lambda row: row[0][0], (value[None],), bound)
    assert isinstance(total, ClippedSum)
    return (int(total.hi[0]) << 24) + int(total.lo[0])


def _stage_by_stage(inner: Callable[..., T], rows: tuple, static: Sequence[int]) -> Callable[..., T]:
    """What `jax.jit` is for a table in memory: traced once for arguments of the same shapes, and then run.

    :param inner: of the rows and further arguments.
    """
    traced: dict[Any, tuple] = {}

    def run(_: tuple, *args: Any) -> T:
        key = [args[k] if k in static else jax.tree.map(_abstract, args[k]) for k in range(len(args))]
        leaves, tree = jax.tree.flatten([x for k, x in enumerate(key) if k not in static])
        of_static = [(type(args[k]), args[k]) for k in static]
        signature = (tree, *leaves, *of_static, jax.config.jax_enable_x64)
        if signature not in traced:
            traced[signature] = trace_program(lambda *args: inner(rows, *args), *key, static=static)
        closed, shapes = traced[signature]
        found = run_program(closed, jax.tree.leaves([x for k, x in enumerate(args) if k not in static]))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))


def _number(value: Any, what: str) -> jax.Array | float:
    """A plain number, or a real scalar as an array: objects of other kinds could do as they like with rows."""
    if type(value) in (float, int):
        return float(value)
    number = jnp.asarray(value)
    if number.shape != () or jnp.issubdtype(number.dtype, jnp.complexfloating):
        raise ValueError(f"{what} is one real number, got shape {number.shape} of {number.dtype}")
    return number


def _vector(value: Any, size: int) -> jax.Array:
    vector = jnp.asarray(value)
    if vector.shape != (size,) or not jnp.issubdtype(vector.dtype, jnp.floating):
        raise ValueError(f"z is a vector of {size} real numbers, got shape {vector.shape} of {vector.dtype}")
    return vector.astype(jnp.promote_types(vector.dtype, jnp.float32))  # the grid is too fine for 16-bit floats


def _require_query(query: Any) -> None:
    """A class of somebody else's could say something else the second time it is asked."""
    if type(query) not in (RowSum, GradientSum, ChangeSum, PenalizedSum, KeptSum):
        raise TypeError(f"queries are of the classes of {__name__}, got {type(query).__name__}")


def _require_floats(*values: Any) -> None:
    if not all(type(value) in (float, int) for value in values):
        raise TypeError(f"weights are plain Python numbers, got {[type(value).__name__ for value in values]}")


@jax.custom_batching.custom_vmap
def beside(total: Any, noise: GridNoise) -> tuple[Any, GridNoise]:
    """The same sum and noise, if `vmap` gives each sum a noise of its own.

    A user's `vmap` over something that a kernel closes over reaches the sums and not the callback that draws noise.
    """
    return total, noise


@beside.def_vmap
def _beside_mapped(axis_size: int, in_batched: list, total: Any, noise: GridNoise) -> tuple:
    of_total, of_noise = in_batched
    if any(jax.tree.leaves(of_total)) and not all(jax.tree.leaves(of_noise)):
        raise PrivacyBudgetError(
            "a map over something that the ledger was not told of: several sums would have the same noise. Pass what "
            "is mapped in the state or in the model's arguments"
        )
    return (total, noise), (of_total, of_noise)


def _require_shape(noise: GridNoise | None, total: ClippedSum) -> None:
    """Noise of fewer numbers than the sum would be the same for several of them."""
    if noise is not None and noise.hi.shape != total.hi.shape:
        raise PrivacyBudgetError(f"noise of shape {noise.hi.shape} was granted for a sum of shape {total.hi.shape}")


def _add_up_with_others(others: Exchange, slot: Slots, mine: NoisySteps) -> tuple[NoisySteps, jax.Array]:
    """Total of all owners' noisy sums, in steps, and the noise multiplier of the total.

    What is sent: this owner's noisy integers, its noise multiplier, which is public, and the last accept decision,
    which is released: machines that round differently could take different decisions one day, and would add up sums of
    different proposals from then on.
    """

    def host(hi, lo, multiplier, granted, tag, accepted):
        if not granted:
            raise PrivacyBudgetError(
                "the privacy budget of this data owner is used up: nothing more is sent to the others. Give the "
                "kernels of all owners the `num_iterations` and `num_chains` that the run needs"
            )
        steps = (np.asarray(hi, np.int64) << 24) + np.asarray(lo, np.int64)
        variance = np.array([float(multiplier) ** 2]).view(np.int64)
        message = np.concatenate([steps.ravel(), variance, [int(accepted)]])
        gathered = others.exchange(np.asarray(tag).tobytes(), message)
        if len(set(gathered[:, -1].tolist())) > 1:
            raise RuntimeError(
                "the owners' chains have come apart: the last proposal was accepted at owner(s) "
                f"{np.flatnonzero(gathered[:, -1]).tolist()} only. Run the same versions of JAX and NumPyro on "
                "the same kind of processor everywhere, or in float64"
            )
        total = gathered[:, :-2].sum(0).reshape(steps.shape)
        variances = np.ascontiguousarray(gathered[:, -2]).view(np.float64)
        return (
            (total >> 24).astype(np.int32),
            (total & (LIMB - 1)).astype(np.int32),
            np.asarray(math.sqrt(variances.sum()), multiplier.dtype),
        )

    multiplier = slot.noise_multiplier
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*mine, multiplier))
    hi, lo, multiplier = io_callback(host, shapes, *mine, multiplier, slot.granted, slot.tag, slot.accepted)
    return NoisySteps(hi, lo), multiplier
