"""The posterior as an algorithm may use it: an exact prior, and *released* numbers about the rows.

Every method of a `PrivateTarget` that looks at rows clips each of them, sums, adds the noise of a `Draw` and returns
the result. An algorithm written on these methods can do with what it gets whatever it likes.
"""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from numpyro_dp.fast.gradients import RowSums
from numpyro_dp.model.families import BoundFamily
from numpyro_dp.model.separable import SeparableModel
from numpyro_dp.privacy.batches import ALL_ROWS, AllRows, Batch, Batches, FixedBatches, PoissonBatches
from numpyro_dp.privacy.clipping import (
    ClippedSum,
    OwnerIndex,
    UnclippedSum,
    chunk_rows,
    clipped_moments,
    clipped_sum,
    penalized_sum,
    whole_chunks,
)
from numpyro_dp.privacy.isolation import alone, one_row
from numpyro_dp.privacy.ledger import PrivacyBudgetError
from numpyro_dp.privacy.mechanisms import size_is_public
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
from numpyro_dp.privacy.sharding import Layout


class Draw(NamedTuple):
    """Leave to make one release, and what it takes; from the ledger only. In a `Grant`, with a leading axis.

    :ivar noise: None only in runs that are declared not private.
    :ivar batch: rows to use; None for all of them.
    :ivar noise_multiplier: noise standard deviation over sensitivity.
    :ivar granted: whether it is leave at all; without it the noise is 0.
    :ivar tag: number of the release, the same for all data owners.
    :ivar accepted: whether the chain's last proposal was accepted: by it, owners see that they run the same chain.
    """

    noise: GridNoise | None
    batch: Batch | None
    noise_multiplier: jax.Array
    granted: jax.Array
    tag: jax.Array
    accepted: jax.Array


class Grant(NamedTuple):
    """Leave for the releases of one iteration: per kind, the draws."""

    granted: jax.Array
    draws: dict[str, Draw]

    def first(self, kind: str) -> Draw:
        """The first draw of a kind: the only one, where an iteration makes one release of that kind."""
        return jax.tree.map(lambda leaf: leaf[0], self.draws[kind])


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


class PrivateTarget:
    """The posterior ``p(z) * prod_i p(row_i | z)**power`` as an algorithm may use it.

    :param power: exponent of the likelihood.
    :param batches: how the rows of a release are drawn.
    :param owners: owner number of each row and how many owners there are, or how to reach the other owners.
    :param private: whether the plan is: then nothing is released without noise, whatever an algorithm asks for.
    :param layout: of the table, if it lies on several devices.
    """

    def __init__(
        self,
        separated: SeparableModel,
        args: tuple,
        kwargs: dict,
        *,
        neighboring_relation: str,
        power: float = 1.0,
        batches: Batches = ALL_ROWS,
        owners: "OwnerIndex | Exchange | None" = None,
        private: bool = True,
        layout: Layout | None = None,
    ):
        self.log_prior = separated.log_prior(args, kwargs)
        self.num_params = separated.num_params
        self.power = power
        self.num_rows = separated.num_rows
        self._rows_per_unit = separated.rows_per_unit
        self._places = separated.has_public_places
        self._traced = [leaf for leaf in jax.tree.leaves((args, kwargs)) if isinstance(leaf, jax.core.Tracer)]
        with self._once():
            self._rows = separated.rows(args, kwargs)
        self._row_log_density = separated.row_log_density(args, kwargs)
        self._relation = neighboring_relation
        self._batches = batches
        self._owners = owners
        self._private = private
        self._layout = layout
        self._sums: RowSums | None = None

    def tabulate(self) -> None:
        """Compute once what every `log_ratio` and `gradient` needs of the rows, and how they are summed fastest."""
        if self.has_public_places and isinstance(self._batches, AllRows) and not isinstance(self._owners, OwnerIndex):
            z = jax.ShapeDtypeStruct((self.num_params,), jnp.result_type(float))
            self._sums = RowSums(self._row_log_density, self._rows, z, self._once, self._layout)

    def _once(self) -> AbstractContextManager:
        """Compute what follows now, not in each iteration, if the arguments are at hand: in a trace, JAX would not."""
        return nullcontext() if self._traced else jax.ensure_compile_time_eval()

    def witness(self, state: Any) -> jax.Array:
        """A number of every array that a step depends on, for a callback to depend on them, too.

        Whatever a `vmap` batches (chains, step sizes, tables) must reach the callback that charges a step: without
        batched operands it would be called once, and its noise be shared. The host ignores the numbers.
        """
        leaves = jax.tree.leaves((state, self._traced))
        return jnp.concatenate([jnp.ravel(leaf[:1] if leaf.ndim else leaf)[:1].astype(jnp.float32) for leaf in leaves])

    # -- What may be asked -------------------------------------------------------------------------------------------

    def log_ratio(self, draw: Draw, z: jax.Array, z_new: jax.Array, bound: jax.Array | float) -> Released:
        """The change of the log likelihood from `z` to `z_new`, tempered, with noise.

        On a batch: the estimate of it, minus half the estimated variance that the sampling of the batch gives it. It is
        then the noisy log ratio of a penalty test whose only variance left to correct for is that of the privacy noise.

        :param bound: each row's change (before tempering) is clipped to +-`bound`.
        """
        self._require_noise(draw.noise)
        ratio = self._row_log_ratio(z, z_new)
        if isinstance(self._batches, AllRows):
            if self._sums is not None and _is_finite(bound):
                released = self._release(draw, self._sums.log_ratio(z, z_new, bound))
            else:
                released = self.release_sum(draw, ratio, bound)
            return Released(self.power * released.value, self.power * released.scale)
        weight = self.power * self._batches.weight(self.num_rows)
        if isinstance(self._batches, PoissonBatches):
            # E sum over the batch of w^2 (1 - q) r^2 is the variance of sum over the batch of w r.
            spread = weight**2 * (1 - self._batches.inclusion(self.num_rows)) / 2

            def penalized(row: tuple) -> jax.Array:
                r = _clip(ratio(row), bound)
                return weight * r - spread * r**2

            return self.release_sum(draw, penalized, weight * bound + spread * bound**2)
        size = self._batches.batch_size
        moments = clipped_moments(ratio, self._batch_rows(draw.batch), bound)
        total = penalized_sum(moments, weight, self._sampling_factor(size))
        scale = noise_scale(total.bound, draw.noise_multiplier, self._relation)
        return Released(in_real_units(release(total, draw.noise), total.bound), scale.astype(total.bound.dtype))

    def gradient(self, draw: Draw, z: jax.Array, bound: float) -> Released:
        """The gradient of the log likelihood at `z`, tempered, with noise; on a batch, the estimate of it.

        :param bound: each row's gradient (before tempering) is clipped to norm `bound`.
        """
        gradient = jax.grad(self._row_log_density)
        if self._sums is not None and _is_finite(bound):
            released = self._release(draw, self._sums.gradient(z, bound))
        else:
            released = self.release_sum(draw, lambda row: gradient(z, row), bound, width=self.num_params)
        weight = self.gradient_weight
        return Released(weight * released.value, weight * released.scale)

    @property
    def gradient_weight(self) -> float:
        """What the sum over a batch is multiplied by in `gradient`."""
        sampled = not isinstance(self._batches, AllRows)
        return self.power * (self._batches.weight(self.num_rows) if sampled else 1.0)  # type: ignore[union-attr]

    def log_ratio_exceeds(
        self, draw: Draw, z: jax.Array, z_new: jax.Array, bound: jax.Array | float, threshold: jax.Array
    ) -> jax.Array:
        """Whether the tempered log ratio plus standard logistic noise exceeds `threshold`: one bit (`LogisticBit`).

        :param bound: each row's change (before tempering) is clipped to +-`bound`. With the draw's noise multiplier m,
            ``2 * power * bound * m`` (replace-one) must be 1, the scale of the noise.
        """
        self._require_all_rows()
        if self._sums is not None and _is_finite(bound):
            total: ClippedSum | UnclippedSum = self._sums.log_ratio(z, z_new, bound)
        else:
            total = self._sum(None, self._row_log_ratio(z, z_new), bound, 1)
        if isinstance(total, UnclippedSum) or draw.noise is None:
            raise TypeError("a bit is private only with a clip bound and with noise")
        return release_bit(total, draw.noise, threshold / self.power)

    def batch_log_ratio_exceeds(
        self,
        draw: Draw,
        z: jax.Array,
        z_new: jax.Array,
        bound: jax.Array | float,
        variance: float,
        threshold: jax.Array,
    ) -> jax.Array:
        """Whether the batch's estimate of the tempered log ratio, brought to a total variance, exceeds `threshold`.

        :param bound: each row's change (before tempering) is clipped to +-`bound`, so that the variance of the
            estimate is at most ``(power * n * bound)**2 / batch_size``, below `variance`.
        """
        if not isinstance(self._batches, FixedBatches) or draw.noise is None:
            raise TypeError("this bit needs batches of a fixed size, and noise")
        moments = clipped_moments(self._row_log_ratio(z, z_new), self._batch_rows(draw.batch), bound)
        weight = self.power * self._batches.weight(self.num_rows)
        # Without replacement the estimate varies less the more of the rows are drawn.
        factor = min(1.0, self._sampling_factor(self._batches.batch_size))
        return release_batch_bit(moments, weight, factor, variance, draw.noise, threshold)

    def prepare_statistics(self, family: BoundFamily, counted: bool) -> None:
        """Sum the sufficient statistics, once if the rows are at hand (under `jit_model_args`: in each iteration).

        :param counted: whether the number of rows is private, and the constant `bound` a further statistic.
        """

        self._require_all_rows()

        def statistic(row: tuple) -> jax.Array:
            values = family.statistic(row)
            return jnp.append(values, jnp.asarray(family.bound, values.dtype)) if counted else values

        # A little room: the clip rounds down, and a row may lie on the bound. Sums by blocks would need more of it.
        bound = family.bound * (1 + 1e-4) * (math.sqrt(2) if counted else 1)
        with self._once():
            self._statistics = self._sum(None, statistic, bound, family.size, by_blocks=False)

    def statistics(self, draw: Draw) -> Released:
        """The sum of the sufficient statistics over all rows, with noise; not tempered."""
        return self._release(draw, self._statistics)

    def exact_log_ratio(self, z: jax.Array, z_new: jax.Array) -> jax.Array:
        """The exact tempered log ratio, for runs that are declared not private."""
        self._require_noise(None)
        total = self._sum(None, self._row_log_ratio(z, z_new), math.inf, 1)
        assert isinstance(total, UnclippedSum)
        return self.power * total.value

    # -- The one door ------------------------------------------------------------------------------------------------

    def release_sum(
        self,
        draw: Draw,
        per_row: Callable[[tuple], jax.Array],
        bound: jax.Array | float,
        width: int = 1,
        may_loop: bool = False,
    ) -> Released:
        """Sum of `per_row` over the draw's rows, clipped to `bound`, with the draw's noise; not tempered.

        :param per_row: from one-row slices to a scalar or a vector, which is clipped in norm.
        :param width: about how many numbers one row needs on the way.
        :param may_loop: see `numpyro_dp.privacy.isolation.alone`.
        """
        return self._release(draw, self._sum(draw.batch, per_row, bound, width, may_loop=may_loop))

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

        :param draws: one for each step, for vectors of length k.
        :param per_row: from one-row slices to k numbers; NaN exceeds nothing.
        :param smallest: the lower end of the grid; a number, or one for each of the k.
        :param threshold: a number of rows, or one for each of the k.
        :param width: about how many numbers one row needs on the way.
        :param may_loop: see `numpyro_dp.privacy.isolation.alone`.
        :return: shape (k,).
        """
        self._require_all_rows()

        of_row = alone(per_row, one_row(self._rows), may_loop=may_loop)

        def values_of(rows: tuple[jax.Array, ...]) -> jax.Array:
            padded, chunk = whole_chunks(jax.lax.optimization_barrier(rows), chunk_rows(width * self._rows_per_unit))
            values = jax.lax.map(lambda row: of_row.of(tuple(part[None] for part in row)), padded, batch_size=chunk)
            return values[: rows[0].shape[0]]

        values = self._layout.map(values_of, self._rows) if self._layout else values_of(self._rows)
        k = values.shape[1]
        # Centred indicators have half the norm; but where n is private it may not be added back.
        centre = 0.5 if self.has_public_size else 0.0
        largest = (1 - centre) * math.sqrt(k) * _ROOM

        def bounds(position: jax.Array) -> jax.Array:
            return smallest * grid.ratio ** position.astype(values.dtype)

        def halve(state: tuple, draw: Draw) -> tuple:
            low, high = state
            middle = (low + high) // 2
            limits = bounds(middle)

            def exceeds(row: tuple) -> jax.Array:
                return jnp.where(row[0][0] > limits, 1 - centre, -centre).astype(values.dtype)

            counts = self._release(draw, self._sum_rows((values,), exceeds, largest, k, fixed_places=False))
            few = counts.value + centre * self.num_rows <= threshold
            return (jnp.where(few, low, middle + 1), jnp.where(few, middle, high)), None

        start = (jnp.zeros(k, jnp.int32), jnp.full(k, 2**grid.num_counts - 1, jnp.int32))
        (_, found), _ = jax.lax.scan(halve, start, draws)
        return bounds(found)

    def of(self, parameters: Callable[[jax.Array], jax.Array]) -> "PrivateTarget":
        """The same target of other parameters y, of which `parameters` gives z. A constant of their densities is left
        out, so it must be affine.
        """
        other, density, log_prior = copy.copy(self), self._row_log_density, self.log_prior
        other._row_log_density = lambda y, row: density(parameters(y), row)
        other.log_prior = lambda y: log_prior(parameters(y))
        other._sums = None
        return other

    @property
    def rows(self) -> tuple[jax.Array, ...]:
        """The private arrays, for a program that takes them as arguments instead of holding them as constants."""
        return self._rows

    @property
    def has_public_size(self) -> bool:
        """Whether the number of rows is the same in neighbouring tables."""
        return size_is_public(self._relation)

    @property
    def has_public_places(self) -> bool:
        """Whether all rows but one are the same, *and* in the same places, in neighbouring tables."""
        return self.has_public_size and self._places

    def on(self, rows: tuple[jax.Array, ...]) -> "PrivateTarget":
        """The same target with its rows given anew: those of `rows`, traced."""
        other = copy.copy(self)
        other._rows, other._sums = rows, None
        return other

    def _sum(
        self,
        batch: Batch | None,
        per_row: Callable[[tuple], jax.Array],
        bound: jax.Array | float,
        width: int,
        by_blocks: bool = True,
        may_loop: bool = False,
    ) -> ClippedSum | UnclippedSum:
        size = None if batch is None else batch.size
        owners = self._owners if isinstance(self._owners, OwnerIndex) else None
        rows, width = self._batch_rows(batch), width * self._rows_per_unit
        # What a batch is accounted for compares it with itself without a row, in which the others have other places.
        fixed = by_blocks and batch is None and self.has_public_places
        if batch is None and owners is None:
            return self._sum_rows(rows, per_row, bound, width, fixed_places=fixed, may_loop=may_loop)
        return clipped_sum(per_row, rows, bound, width, size, owners, fixed, may_loop)

    def _sum_rows(
        self,
        rows: tuple[jax.Array, ...],
        per_row: Callable[[tuple], jax.Array],
        bound: jax.Array | float,
        width: int = 1,
        *,
        fixed_places: bool,
        may_loop: bool = False,
    ) -> ClippedSum | UnclippedSum:
        """Over all rows, on whatever devices they lie."""

        def of_rows(rows: tuple[jax.Array, ...]) -> ClippedSum | UnclippedSum:
            return clipped_sum(per_row, rows, bound, width, fixed_places=fixed_places, may_loop=may_loop)

        return self._layout.sum(of_rows, rows) if self._layout else of_rows(rows)

    def _release(self, draw: Draw, total: ClippedSum | UnclippedSum) -> Released:
        self._require_noise(draw.noise)
        owned = isinstance(self._owners, OwnerIndex)
        if isinstance(total, UnclippedSum):
            if draw.noise is not None:
                raise TypeError("a sum without a clip bound has no sensitivity: noise cannot make it private")
            value = total.value.sum(0) if owned else total.value
            return Released(value, jnp.zeros((), value.dtype))
        steps, multiplier = release(total, draw.noise), draw.noise_multiplier
        if isinstance(self._owners, OwnerIndex):  # each owner has added its own noise
            steps = add_up(steps)
            multiplier = multiplier * math.sqrt(self._owners.num_owners)
        elif self._owners is not None:
            steps, multiplier = _add_up_with_others(self._owners, draw, steps)
        scale = noise_scale(total.bound, multiplier, self._relation).astype(total.bound.dtype)
        return Released(in_real_units(steps, total.bound), scale)

    def _require_noise(self, noise: GridNoise | None) -> None:
        if self._private and noise is None:
            raise TypeError("the plan of this run is private: nothing is released without noise")

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
        return tuple(row[batch.indices] for row in rows)

    def _sampling_factor(self, size: int) -> float:
        """Makes the variance of a batch of `size` rows an unbiased estimate of that of its sum, given all rows."""
        return size / (size - 1) * (1 - size / self.num_rows)

    def _row_log_ratio(self, z: jax.Array, z_new: jax.Array) -> Callable[[tuple], jax.Array]:
        return lambda row: self._row_log_density(z_new, row) - self._row_log_density(z, row)


_ROOM = 1 + 1e-3  # the clip of a vector rounds down, and a row may lie on the bound


def _is_finite(bound: jax.Array | float) -> bool:
    return not (isinstance(bound, float) and math.isinf(bound))


def _clip(value: jax.Array, bound: jax.Array | float) -> jax.Array:
    return jnp.where(jnp.isnan(value), 0, jnp.clip(value, -bound, bound))


def _add_up_with_others(others: Exchange, draw: Draw, mine: NoisySteps) -> tuple[NoisySteps, jax.Array]:
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
            (total & (2**24 - 1)).astype(np.int32),
            np.asarray(math.sqrt(variances.sum()), multiplier.dtype),
        )

    multiplier = draw.noise_multiplier
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*mine, multiplier))
    hi, lo, multiplier = io_callback(host, shapes, *mine, multiplier, draw.granted, draw.tag, draw.accepted)
    return NoisySteps(hi, lo), multiplier
