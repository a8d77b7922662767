"""The likelihood as the preparation may see it: noisy sums of clipped derivatives, in the coordinates of a cut.

Coordinates are ``phi = center + whitening @ u``. All questions are about ``u`` near 0; each answer is a release of a
`PrivateTarget`, with its own `Draw`, and each row enters it with a norm of at most the bound that goes with it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.arguments import UnsupportedModelError
from numpyro_dp.cut import Cut
from numpyro_dp.isolation import RowsMeetError, alone, describe_hazard, one_row
from numpyro_dp.kernels.target import Draw, Grid, PrivateTarget, Released


class Frame(NamedTuple):
    """Coordinates ``phi = center + whitening @ u``; released or public.

    :ivar center: shape (m,).
    :ivar whitening: shape (m, m).
    """

    center: np.ndarray | jax.Array
    whitening: np.ndarray | jax.Array

    def at(self, u: jax.Array) -> jax.Array:
        """phi of `u`."""
        return jnp.asarray(self.center) + jnp.asarray(self.whitening) @ u


class Survey:
    """Questions about the log likelihood as a function of phi (tempered by the target's power).

    Programs take the rows as arguments: as constants they would be copied into each, and into JAX's cache on disk.
    """

    def __init__(self, target: PrivateTarget, cut: Cut):
        self._target = target
        self.cut = cut
        self.size = cut.size
        self.power = target.power
        self.num_rows = target.num_rows
        self.dtype = jnp.result_type(float)
        self._bounds = jax.jit(self._find_bounds, static_argnums=3)
        self._derivatives = jax.jit(self._sum_derivatives, static_argnums=4)
        self._gains = jax.jit(self._sum_gains)
        self._residual_bound = jax.jit(self._find_residual_bound, static_argnums=3)
        self._residuals = jax.jit(self._sum_residuals)
        self._slope = jax.jit(self._find_slope, static_argnums=3)

    def require_derivatives(self) -> None:
        """Make sure, on shapes alone, that rows have the derivatives that will be asked for.

        :raises UnsupportedModelError: if they have not.
        """
        frame = Frame(np.zeros(self.size, self.dtype), np.eye(self.size, dtype=self.dtype))
        try:
            alone(lambda row: row_derivatives(self.cut, frame, row), one_row(self._target.rows))
        except RowsMeetError as error:
            raise UnsupportedModelError([describe_hazard(name) for name in error.hazards]) from None
        except Exception as error:
            raise UnsupportedModelError(
                [
                    "the preparation needs second derivatives of a row's log density, and JAX cannot form them for "
                    f"this model ({type(error).__name__}). Use the sampler without preparation: `prepare=False`"
                ]
            ) from error

    def bounds(
        self,
        draws: Draw,
        frame: Frame,
        grids: tuple[Grid, Grid],
        smallest: tuple[float, float],
        thresholds: tuple[float, float],
    ) -> np.ndarray:
        """Clip bounds for the rows' gradients and Hessians, see `PrivateTarget.find_bounds`: shape (2,)."""
        numbers = (jnp.asarray(x, self.dtype) for x in (smallest, thresholds))
        counts, settings = _split(grids)
        return np.asarray(self._bounds(self._target.rows, draws, self._cast(frame), counts, settings, *numbers), float)

    @property
    def centres(self) -> bool:
        """Whether `derivatives` can be centred: the model tells how rows come about, and a row's place is public."""
        return self.cut.drawn_log_density is not None and self._target.has_public_places

    def derivatives(
        self, draws: tuple[Draw, Draw], frame: Frame, bounds: np.ndarray, centred: bool = False
    ) -> tuple[np.ndarray, float, np.ndarray, float]:
        """Gradient and Hessian of the log likelihood with respect to ``u`` at 0.

        :param bounds: of one row's gradient norm and of one row's Hessian's Frobenius norm, not tempered.
        :param centred: whether rows' derivatives are those of `centred_gradient` and `centred_hessian`.
        :return: gradient (m,), standard deviation of its noise in each entry; Hessian (m, m), standard deviation of
            the noise in its diagonal (off the diagonal it is smaller by the square root of 2).
        """
        gradient, hessian = self._derivatives(
            self._target.rows, draws, self._cast(frame), jnp.asarray(bounds, self.dtype), centred
        )
        flat = np.asarray(hessian.value, float)
        matrix = np.zeros((self.size, self.size))
        rows, columns = np.tril_indices(self.size)
        matrix[rows, columns] = flat / np.where(rows == columns, 1, np.sqrt(2))
        matrix += np.tril(matrix, -1).T
        return np.asarray(gradient.value, float), float(gradient.scale), matrix, float(hessian.scale)

    def gains(self, draw: Draw, start: np.ndarray, ends: np.ndarray, bounds: np.ndarray) -> tuple:
        """How much the log likelihood rises from `start` to each of `ends`, one release for all of them.

        :param ends: shape (k, m).
        :param bounds: shape (k,): largest rise or fall of one row that is counted in full.
        :return: rises (k,) and standard deviations of their noise (k,).
        """
        numbers = (jnp.asarray(x, self.dtype) for x in (start, ends, bounds))
        found = self._gains(self._target.rows, draw, *numbers)
        return np.asarray(found.value, float) * np.asarray(bounds), float(found.scale) * np.asarray(bounds)

    def residual_bound(
        self, draws: Draw, frame: Frame, bounds: np.ndarray, points: np.ndarray, grid: Grid, smallest: float, thr: float
    ) -> float:
        """A bound for the norm of one row's `residuals` at `points`."""
        numbers = (jnp.asarray(x, self.dtype) for x in (bounds, points, [smallest], [thr]))
        return float(self._residual_bound(self._target.rows, draws, self._cast(frame), *_split([grid]), *numbers))

    def residuals(
        self, draw: Draw, frame: Frame, bounds: np.ndarray, points: np.ndarray, bound: float
    ) -> tuple[np.ndarray, float]:
        """The log likelihood minus its quadratic expansion at public points ``u``, one release for all of them.

        The expansion is made of the rows' clipped derivatives: the residual gives back what the clip takes.

        :param bounds: of the derivatives.
        :param points: shape (k, m).
        :return: residuals (k,), standard deviation of the noise in each.
        """
        numbers = (jnp.asarray(x, self.dtype) for x in (bounds, points, bound))
        found = self._residuals(self._target.rows, draw, self._cast(frame), *numbers)
        return np.asarray(found.value, float), float(found.scale)

    def slope(
        self,
        draws: Draw,
        frame: Frame,
        pairs: np.ndarray,
        grid: Grid,
        smallest: float,
        thr: float,
        bounds: np.ndarray | None = None,
    ) -> float:
        """A bound of the rows' changes between public points, per unit of `distance`.

        Of each row, the root mean square over the pairs counts.

        :param pairs: shape (k, 2, m).
        :param bounds: of the derivatives, for changes of the residual per unit of `residual_distance`.
        """
        numbers = [jnp.asarray(x, self.dtype) for x in (pairs, [smallest], [thr])]
        numbers += [] if bounds is None else [jnp.asarray(bounds, self.dtype)]
        return float(self._slope(self._target.rows, draws, self._cast(frame), *_split([grid]), *numbers))

    def _cast(self, frame: Frame) -> Frame:
        return Frame(*(jnp.asarray(part, self.dtype) for part in frame))

    # -- Programs ----------------------------------------------------------------------------------------------------

    def _find_bounds(self, rows, draws, frame, counts, settings, smallest, thresholds) -> jax.Array:
        def norms(row: tuple) -> jax.Array:
            return jnp.stack([jnp.linalg.norm(x) for x in row_derivatives(self.cut, frame, row)])

        return self._target.on(rows).find_bounds(
            draws, norms, _join(counts, settings), smallest, thresholds, self.size**2
        )

    def _sum_derivatives(self, rows, draws, frame, bounds, centred) -> tuple[Released, Released]:
        target = self._target.on(rows)
        rows_, columns = np.tril_indices(self.size)
        weights = jnp.asarray(np.where(rows_ == columns, 1, np.sqrt(2)), self.dtype)  # the vector has the matrix's norm

        def gradient(row: tuple) -> jax.Array:
            return row_gradient(self.cut, frame, row)

        def centred_at(numbered: tuple) -> jax.Array:
            *row, number = numbered
            return centred_gradient(self.cut, frame, bounds[0], tuple(row), number[0])

        def hessian(row: tuple) -> jax.Array:
            return row_derivatives(self.cut, frame, row)[1][rows_, columns] * weights

        def centred_hessian_at(numbered: tuple) -> jax.Array:
            *row, number = numbered
            return centred_hessian(self.cut, frame, bounds[0], tuple(row), number[0])[rows_, columns] * weights

        if centred:
            numbered = target.on((*rows, jnp.arange(rows[0].shape[0])))
            first = numbered.release_sum(draws[0], centred_at, bounds[0], self.size * CENTRE_DRAWS, may_loop=True)
            second = numbered.release_sum(
                draws[1], centred_hessian_at, bounds[1], self.size**2 * CENTRE_DRAWS, may_loop=True
            )
        else:
            first = target.release_sum(draws[0], gradient, bounds[0], self.size)
            second = target.release_sum(draws[1], hessian, bounds[1], self.size**2)
        return self._tempered(first), self._tempered(second)

    def _sum_gains(self, rows, draw, start, ends, bounds) -> Released:
        density = self.cut.row_log_density

        def rise(row: tuple) -> jax.Array:
            rises = (jax.vmap(lambda end: density(end, row))(ends) - density(start, row)) / bounds
            return jnp.clip(jnp.nan_to_num(rises, nan=-1.0), -1, 1)

        largest = math.sqrt(ends.shape[0]) * (1 + 1.5e-3)  # a little room: the clip rounds down
        return self._tempered(self._target.on(rows).release_sum(draw, rise, largest, ends.size))

    def _find_residual_bound(self, rows, draws, frame, counts, settings, bounds, points, smallest, thr) -> jax.Array:
        residual = row_residual(self.cut, frame, bounds)

        def norm(row: tuple) -> jax.Array:
            return jnp.linalg.norm(residual(points, row))[None]

        width = self.size**2 + points.size
        return self._target.on(rows).find_bounds(draws, norm, _join(counts, settings), smallest, thr, width)[0]

    def _sum_residuals(self, rows, draw, frame, bounds, points, bound) -> Released:
        residual = row_residual(self.cut, frame, bounds)
        width = self.size**2 + points.size
        return self._tempered(self._target.on(rows).release_sum(draw, lambda row: residual(points, row), bound, width))

    def _find_slope(self, rows, draws, frame, counts, settings, pairs, smallest, thr, bounds=None) -> jax.Array:
        flat = pairs.reshape(-1, self.size)
        values: Callable[[jax.Array, tuple], jax.Array]
        if bounds is None:
            measure = distance

            def values(points: jax.Array, row: tuple) -> jax.Array:
                return jax.vmap(lambda u: self.cut.row_log_density(frame.at(u), row))(points)

        else:
            measure, values = residual_distance, row_residual(self.cut, frame, bounds)
        distances = jax.vmap(measure)(pairs[:, 0], pairs[:, 1])

        def root_mean_square(row: tuple) -> jax.Array:
            found = values(flat, row).reshape(pairs.shape[:2])
            return jnp.sqrt(jnp.mean(((found[:, 1] - found[:, 0]) / distances) ** 2))[None]

        width = self.size**2 + flat.size
        return self._target.on(rows).find_bounds(
            draws, root_mean_square, _join(counts, settings), smallest, thr, width
        )[0]

    def _tempered(self, released: Released) -> Released:
        return Released(self.power * released.value, self.power * released.scale)


# -- One row -----------------------------------------------------------------------------------------------------------


def row_gradient(cut: Cut, frame: Frame, row: tuple) -> jax.Array:
    """Gradient (m,) of a row's log density with respect to u, at 0."""
    return jax.grad(lambda u: cut.row_log_density(frame.at(u), row))(jnp.zeros_like(jnp.asarray(frame.center)))


CENTRE_DRAWS = 8
"""Outcomes that are drawn for a row; they add less than an eighth of what the clip takes of the score's variance."""
CENTRE_STEPS = 3
"""In which the equation for what is given back is solved. Of 400,000 rows one leaves a scale 7.5 standard deviations
off, three .7."""


def centred_gradient(cut: Cut, frame: Frame, bound: jax.Array, row: tuple, number: jax.Array) -> jax.Array:
    """A row's gradient, moved so that, clipped, it is 0 on average if the model holds at the centre.

    The rows that are clipped are those with surprising outcomes, and they pull one way: the sum of clipped gradients
    is not 0 on average where that of the gradients is, and whoever takes it for a score is biased. With the expected
    loss given back, row by row, before the clip, it is (Künsch, Stefanski and Carroll 1989, for the estimating
    equations of bounded influence). Whoever adds it up clips it.

    :param number: the position of the row.
    """
    _, lost = _drawn_losses(cut, frame, bound, row, number)
    return row_gradient(cut, frame, row) + jnp.mean(lost, 0)


def centred_hessian(cut: Cut, frame: Frame, bound: jax.Array, row: tuple, number: jax.Array) -> jax.Array:
    """A row's Hessian (m, m) without what the clip takes of it: how its `centred_gradient` answers to the parameters.

    The derivative of ``E c(y)`` with respect to the parameters is ``E c(y) g(y)'``, with the score g of an outcome: the
    Fisher information for the whole gradient, less ``E (g - c) g'`` for a clipped one.
    """
    drawn, lost = _drawn_losses(cut, frame, bound, row, number)
    taken = lost.T @ drawn / CENTRE_DRAWS
    return row_derivatives(cut, frame, row)[1] + (taken + taken.T) / 2


def _drawn_losses(cut: Cut, frame: Frame, bound: jax.Array, row: tuple, number: jax.Array) -> tuple:
    """Gradients (k, m) at outcomes drawn from the model for the row's covariates, and what a clip takes of each.

    Before it is clipped, each gets the mean loss of the others, as the row itself will. The pseudo-random numbers are
    public, and depend on the row's position only.
    """
    assert cut.drawn_log_density is not None
    density = cut.drawn_log_density
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), number)
    words = jax.random.key_data(jax.random.split(key, CENTRE_DRAWS))

    def gradient(words: jax.Array) -> jax.Array:
        drawn = jax.grad(lambda u: density(frame.at(u), row, words))(jnp.zeros_like(jnp.asarray(frame.center)))
        return jnp.where(jnp.all(jnp.isfinite(drawn)), drawn, 0)

    drawn = jax.vmap(gradient)(words)
    lost = jnp.zeros_like(drawn)
    for _ in range(CENTRE_STEPS):
        moved = drawn + (jnp.sum(lost, 0) - lost) / (CENTRE_DRAWS - 1)
        lost = moved - jax.vmap(lambda x: clip_norm(x, bound))(moved)
    return drawn, lost


def row_derivatives(cut: Cut, frame: Frame, row: tuple) -> tuple[jax.Array, jax.Array]:
    """Gradient (m,) and Hessian (m, m) of a row's log density with respect to u, at 0."""
    gradient = jax.grad(lambda u: cut.row_log_density(frame.at(u), row))
    zero = jnp.zeros_like(jnp.asarray(frame.center))
    value, push = jax.linearize(gradient, zero)
    return value, jax.vmap(push)(jnp.eye(cut.size, dtype=zero.dtype))


def row_residual(cut: Cut, frame: Frame, bounds: jax.Array) -> Callable[[jax.Array, tuple], jax.Array]:
    """``(points (k, m), row) -> (k,)``: a row's log density minus its expansion of clipped derivatives; 0 at u = 0."""

    def residual(points: jax.Array, row: tuple) -> jax.Array:
        def density(u: jax.Array) -> jax.Array:
            return cut.row_log_density(frame.at(u), row)

        derivatives = row_derivatives(cut, frame, row)
        gradient, hessian = (clip_norm(x, bound) for x, bound in zip(derivatives, bounds, strict=True))
        at_center = density(jnp.zeros_like(gradient))
        return jax.vmap(lambda u: density(u) - at_center - u @ gradient - u @ hessian @ u / 2)(points)

    return residual


def _split(grids: Sequence[Grid]) -> tuple[tuple[int, ...], jax.Array]:
    """What decides about a program, and what is an argument of it."""
    numbers = [(grid.ratio, grid.no_rows) for grid in grids]
    return tuple(grid.num_counts for grid in grids), jnp.asarray(numbers)


def _join(counts: Sequence[int], numbers: jax.Array) -> list[Grid]:
    return [Grid(ratio, count, no_rows) for count, (ratio, no_rows) in zip(counts, numbers, strict=True)]


def distance(u: jax.Array, u_new: jax.Array) -> jax.Array:
    """How far a jump goes, in whitened coordinates: a row's log density changes in proportion to it."""
    return jnp.linalg.norm(u_new - u)


def residual_distance(u: jax.Array, u_new: jax.Array) -> jax.Array:
    """The same for the residual of a quadratic expansion at 0, which grows as the third power."""
    return distance(u, u_new) * (u @ u + u_new @ u_new) / 2


def clip_norm(x: jax.Array, bound: jax.Array) -> jax.Array:
    """`x` shortened to norm `bound`, as a clipped sum does it, up to rounding; 0 where it is not finite."""
    norm = jnp.linalg.norm(x)
    factor = jnp.minimum(1, bound / jnp.maximum(norm, jnp.finfo(x.dtype).tiny))
    return jnp.where(jnp.isfinite(norm), x * factor, 0)
