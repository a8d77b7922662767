"""The posterior as an algorithm may use it: an exact prior, and *released* numbers about the rows.

Every method of a `PrivateTarget` that asks about rows does so through the `Vault` that holds them, and returns what was
released. An algorithm written on these methods can do with what it gets whatever it likes.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from numpyro_dp.fast.row_structure import find_structure
from numpyro_dp.model.families import BoundFamily
from numpyro_dp.privacy.batches import AllRows, FixedBatches, PoissonBatches
from numpyro_dp.privacy.draws import Draw
from numpyro_dp.privacy.release import ChangeSum, GradientSum, Grid, KeptSum, PenalizedSum, Released, RowSum, Vault

T = TypeVar("T")
ROOM = 1 + 1.5e-3
"""Over the largest norm that a row can have: the clip of a sum rounds down, and a row may lie on the bound."""


class PrivateTarget:
    """The posterior ``p(z) * prod_i p(row_i | z)**power`` as an algorithm may use it.

    :param vault: of the rows.
    :param log_prior: of flat, unconstrained z.
    :param row_log_density: ``(z, one-row slices) -> log density``.
    :param num_params: length of z.
    :param num_rows: how many rows there are; private where their number is.
    :param power: exponent of the likelihood.
    :param sites: values of the model's sites, of flat z.
    """

    def __init__(
        self,
        vault: Vault,
        log_prior: Callable[[jax.Array], jax.Array],
        row_log_density: Callable[[jax.Array, tuple], jax.Array],
        *,
        num_params: int,
        num_rows: int,
        power: float = 1.0,
        sites: Callable[[jax.Array], dict[str, jax.Array]] | None = None,
    ):
        self.vault, self.log_prior = vault, log_prior
        self.num_params, self.num_rows, self.power, self.sites = num_params, num_rows, power, sites
        self._row_log_density = row_log_density
        self._statistics: KeptSum | None = None

    def find_structure(self) -> None:
        """See how rows meet the parameters, by which sums of gradients and log ratios cost less."""
        if self.vault.may_have_structure:
            z = jax.ShapeDtypeStruct((self.num_params,), jnp.result_type(float))
            structure = find_structure(self._row_log_density, z, self.vault.one_row)
            self.vault = self.vault.with_structure(structure, self.num_params)

    # -- What may be asked -------------------------------------------------------------------------------------------

    def log_ratio(self, draw: Draw, z: jax.Array, z_new: jax.Array, bound: jax.Array | float) -> Released:
        """The change of the log likelihood from `z` to `z_new`, tempered, with noise.

        On a batch: the estimate of it, minus half the estimated variance that the sampling of the batch gives it. It is
        then the noisy log ratio of a penalty test whose only variance left to correct for is that of the privacy noise.

        :param bound: each row's change (before tempering) is clipped to +-`bound`.
        """
        ratio, batches = self._row_log_ratio(z, z_new), self.vault.batches
        if isinstance(batches, AllRows):
            released = self.vault.ask(draw, self._change(z, z_new, bound))
            return Released(self.power * released.value, self.power * released.scale)
        weight = self.power * batches.weight(self.num_rows)
        if isinstance(batches, PoissonBatches):
            # E sum over the batch of w^2 (1 - q) r^2 is the variance of sum over the batch of w r.
            spread = weight**2 * (1 - batches.inclusion(self.num_rows)) / 2

            def penalized(row: tuple) -> jax.Array:
                r = _clip(ratio(row), bound)
                return weight * r - spread * r**2

            most = weight * bound + (spread * bound**2 if spread else 0.0)  # the bound may be infinite
            return self.vault.ask(draw, RowSum(penalized, most))
        factor = self._sampling_factor(batches.batch_size)
        return self.vault.ask(draw, PenalizedSum(ratio, bound, weight, factor))

    def gradient(self, draw: Draw, z: jax.Array, bound: float) -> Released:
        """The gradient of the log likelihood at `z`, tempered, with noise; on a batch, the estimate of it.

        :param bound: each row's gradient (before tempering) is clipped to norm `bound`.
        """
        gradient = jax.grad(self._row_log_density)
        if self.vault.has_structure and _is_finite(bound):
            released = self.vault.ask(draw, GradientSum(z, bound))
        else:
            released = self.vault.ask(draw, RowSum(lambda row: gradient(z, row), bound, self.num_params))
        batches = self.vault.batches
        weight = self.power * (1.0 if isinstance(batches, AllRows) else batches.weight(self.num_rows))
        return Released(weight * released.value, weight * released.scale)

    def log_ratio_exceeds(
        self, draw: Draw, z: jax.Array, z_new: jax.Array, bound: jax.Array | float, threshold: jax.Array
    ) -> jax.Array:
        """Whether the tempered log ratio plus standard logistic noise exceeds `threshold`: one bit (`LogisticBit`).

        :param bound: each row's change (before tempering) is clipped to +-`bound`. With the draw's noise multiplier m,
            ``2 * power * bound * m`` (replace-one) must be 1, the scale of the noise.
        """
        return self.vault.ask_bit(draw, self._change(z, z_new, bound), threshold / self.power)

    def batch_log_ratio_exceeds(
        self,
        draw: Draw,
        z: jax.Array,
        z_new: jax.Array,
        threshold: jax.Array,
    ) -> jax.Array:
        """Whether the batch's estimate of the tempered log ratio, brought to a total variance, exceeds `threshold`.

        Each row's change is clipped so that the variance of the estimate stays below that, see
        `numpyro_dp.privacy.release.batch_bit_bound`.
        """
        batches = self.vault.batches
        if not isinstance(batches, FixedBatches):
            raise TypeError("this bit needs batches of a fixed size, and noise")
        # Without replacement the estimate varies less the more of the rows are drawn.
        factor = min(1.0, self._sampling_factor(batches.batch_size))
        weight = self.power * batches.weight(self.num_rows)
        return self.vault.ask_batch_bit(draw, self._row_log_ratio(z, z_new), weight, factor, threshold)

    def prepare_statistics(self, family: BoundFamily, counted: bool) -> None:
        """Sum the sufficient statistics, once if the rows are at hand (under `jit_model_args`: in each iteration).

        :param counted: whether the number of rows is private, and the constant `bound` a further statistic.
        """
        self._statistics = self.vault.keep(_statistics_of(family, counted, 1 + 1e-4))

    def release_statistics(self, draw: Draw, family: BoundFamily, counted: bool) -> Released:
        """The sum of the sufficient statistics over all rows, with noise; not tempered."""
        return self.vault.ask(draw, _statistics_of(family, counted, ROOM))

    def statistics(self, draw: Draw) -> Released:
        """The sum of the sufficient statistics over all rows, with noise; not tempered."""
        assert self._statistics is not None
        return self.vault.ask(draw, self._statistics)

    def exact_log_ratio(self, z: jax.Array, z_new: jax.Array) -> jax.Array:
        """The exact tempered log ratio, for runs that are declared not private."""
        return self.power * self.vault.exact(RowSum(self._row_log_ratio(z, z_new), math.inf))

    def release_sum(
        self,
        draw: Draw,
        per_row: Callable[[tuple], jax.Array],
        bound: jax.Array | float,
        width: int = 1,
        may_loop: bool = False,
    ) -> Released:
        """Sum of `per_row` over the draw's rows, clipped to `bound`, with the draw's noise; see `RowSum`."""
        return self.vault.ask(draw, RowSum(per_row, bound, width, may_loop))

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
        """Bounds that few rows exceed; see `Vault.find_bounds`."""
        return self.vault.find_bounds(draws, per_row, grid, smallest, threshold, width, may_loop)

    # -- Other views of the same rows --------------------------------------------------------------------------------

    def of(self, parameters: Callable[[jax.Array], jax.Array]) -> "PrivateTarget":
        """The same target of other parameters y, of which `parameters` gives z. A constant of their densities is left
        out, so it must be affine. Its structure is another one.
        """
        other, density, log_prior, sites = copy.copy(self), self._row_log_density, self.log_prior, self.sites
        other._row_log_density = lambda y, row: density(parameters(y), row)
        other.log_prior = lambda y: log_prior(parameters(y))
        other.sites = None if sites is None else lambda y: sites(parameters(y))
        other.vault = self.vault.without_structure()
        return other

    def numbered(self) -> "PrivateTarget":
        """The same target whose rows have their positions, which are public, as one more array."""
        return self._in(self.vault.numbered())

    def program(self, function: Callable[..., T], static: Sequence[int] = ()) -> "Callable[..., T]":
        """Compile ``function(target, *args)``; see `Vault.program`. It is called with a target, too."""
        compiled = self.vault.program(lambda vault, *args: function(self._in(vault), *args), static)
        return lambda target, *args: compiled(target.vault, *args)

    def _in(self, vault: Vault) -> "PrivateTarget":
        other = copy.copy(self)
        other.vault = vault
        return other

    @property
    def has_public_size(self) -> bool:
        """Whether the number of rows is the same in neighbouring tables."""
        return self.vault.has_public_size

    def _change(self, z: jax.Array, z_new: jax.Array, bound: jax.Array | float) -> ChangeSum | RowSum:
        if self.vault.has_structure and _is_finite(bound):
            return ChangeSum(z, z_new, bound)
        return RowSum(self._row_log_ratio(z, z_new), bound)

    def _sampling_factor(self, size: int) -> float:
        """Makes the variance of a batch of `size` rows an unbiased estimate of that of its sum, given all rows."""
        return size / (size - 1) * (1 - size / self.num_rows)

    def _row_log_ratio(self, z: jax.Array, z_new: jax.Array) -> Callable[[tuple], jax.Array]:
        return lambda row: self._row_log_density(z_new, row) - self._row_log_density(z, row)


def _statistics_of(family: BoundFamily, counted: bool, room: float) -> RowSum:
    """
    :param room: the clip rounds down, in sums by blocks by up to a thousandth, and a row may lie on the bound.
    """

    def statistic(row: tuple) -> jax.Array:
        values = family.statistic(row)
        return jnp.append(values, jnp.asarray(family.bound, values.dtype)) if counted else values

    return RowSum(statistic, family.bound * room * (math.sqrt(2) if counted else 1), family.size)


def _is_finite(bound: jax.Array | float) -> bool:
    return not (isinstance(bound, float) and math.isinf(bound))


def _clip(value: jax.Array, bound: jax.Array | float) -> jax.Array:
    return jnp.where(jnp.isnan(value), 0, jnp.clip(value, -bound, bound))
