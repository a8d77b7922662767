"""The likelihood as the preparation may see it: noisy sums of clipped derivatives, in the coordinates of a cut.

Coordinates are ``phi = center + whitening @ u``. All questions are about ``u`` near 0; each answer is a release of a
`PrivateTarget`, with its own `Draw`, and each row enters it with a norm of at most the bound that goes with it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from numpyro_dp.chain.target import ROOM, PrivateTarget
from numpyro_dp.model.arguments import UnsupportedModelError
from numpyro_dp.model.coordinates import Cut
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.information import answered, matrix_of, vector_of, without_apart
from numpyro_dp.preparation.row_scores import (
    CENTRE_DRAWS,
    SHARE_OF_FEW,
    RowScores,
    centred_scores,
    clip_norm,
    no_derivatives,
    plain_scores,
    row_bends,
    row_excesses,
    row_fall,
    row_gradient,
    tangent_distances,
    turn,
)
from numpyro_dp.privacy.draws import Draw
from numpyro_dp.privacy.isolation import RowsMeetError, alone, describe_hazard
from numpyro_dp.privacy.release import Grid, Released

_LIGHT, _OUTLYING = 0.5, 2.5
"""Weights of parts of the last look, beside the count of clipped rows. A row that is outlying adds nothing to the other
parts, so the count of such rows can be a large part of the look, and hardly raises its norm."""
_REACH = 0.5
"""So far from the centre gradients are compared that a typical row's log density changes by this on the way. With n
rows the sum is curved on a scale of sqrt(n) standard deviations, and the farther, the less noise."""
_FALL_ROOM = 2.5
"""Bound of `row_fall`, over sqrt(m) times what the gradients' squares have: few rows have a kink on the way, and then
it is large."""
_FALL_SHARE = 0.2
"""Of the price of derivatives, for the fall."""
_GIVEN_SHARE, _GIVEN_ROOM = 0.05, 0.3
"""Of the same, for what rows are given back; and its bound, over that of the score."""
SCALE_GRID, RARE_GRID = Grid(2.0, 6), Grid(2.0, 5)
WEIGHT_GRID, LEAST_WEIGHT = Grid(2.0, 6), 2.0**-32
BOUND_GRID = Grid(2.0**0.5, 7)
LAST_BOUND_GRID = Grid(2.0**0.5, 4)
CURVE_GRID = Grid(2.0, 5)
_OFF_OUTLYING = (1 - (1 + 4 * _LIGHT**2) / _OUTLYING**2) / 2
"""Taken off each row's part in the count of outlying ones. With it an outlying row, which adds that alone, is no longer
than one that is not: clipped, and with light parts (a square, its surplus, distances, a turn) of norm `_LIGHT` each."""
TURN_REACH = 2.0
"""How far from 0 information is compared, over the points at which distances are looked at."""
_TURN_ROOM = 4.0
"""Bound of a row's `turn`, over what a typical row's would be if its slope were 0 at 0."""
_LONG_ROWS_MIDDLE, _LONG_ROWS_HALF = (1 - SHARE_OF_FEW) / 2, (1 + SHARE_OF_FEW) / 2
"""What is taken off a row's part in these counts, which is between ``-SHARE_OF_FEW`` and 1, and how far the rest is
from 0 at most."""


class Bounds(NamedTuple):
    """Clip bounds of one row, not tempered.

    :ivar score: of the norm of its gradient.
    :ivar information: of the Frobenius norm of its information matrix.
    """

    score: float | jax.Array
    information: float | jax.Array


class Steps(NamedTuple):
    """Ways of k coordinates phi that change alone.

    :ivar coordinates: which, shape (k,).
    :ivar ahead: in u, as columns, shape (m, k).
    :ivar steepest: about how steep rows are along each, shape (k,); see `numpyro_dp.preparation.rates`.
    """

    coordinates: np.ndarray = np.zeros(0, int)
    ahead: np.ndarray = np.zeros((0, 0))
    steepest: np.ndarray = np.zeros(0)


NO_STEPS = Steps()


class Derivatives(NamedTuple):
    """What was released about the log likelihood at the centre of a frame, in its coordinates; tempered.

    :ivar score: sum of clipped gradients, shape (m,).
    :ivar score_scale: standard deviation of its noise, in each entry.
    :ivar information: sum of clipped information matrices, shape (m, m); of rows with kinks see `answered`.
    :ivar information_scale: standard deviation of the noise in its diagonal; off the diagonal it is smaller by the
        square root of 2. Where noise was taken off (`without_apart`), that of a noise of the same largest eigenvalue.
    :ivar answer: by how much the score answers to the parameters, over the gradients' squares: see `row_fall`.
    :ivar steps: that were asked for.
    :ivar bends: how unevenly the score answers along each (`row_bends`), per square of its length, shape (k,).
    :ivar bends_scale: standard deviation of the noise in them: the information's, before any was taken off.
    :ivar given: sum of what rows have been given back for what the clip takes of the model's outcomes, shape (m,); none
        where outcomes are not drawn, or are counts.
    :ivar given_scale: standard deviation of the noise in each entry.
    """

    score: np.ndarray
    score_scale: float
    information: np.ndarray
    information_scale: float
    answer: float = 1.0
    steps: Steps = NO_STEPS
    bends: np.ndarray = np.zeros(0)
    bends_scale: float = 0.0
    given: np.ndarray = np.zeros(0)
    given_scale: float = 0.0


class Fit(NamedTuple):
    """What the last look at the rows released: whether they are as the surrogate says. Sums over rows.

    :ivar clipped: rows whose gradient was clipped, less those that the model expects, if it tells.
    :ivar curve: at each of the points, by how much the log likelihood is above the quadratic of its tangent and of the
        information at 0, nothing of which is clipped; tempered, shape (k,). Without outlying rows.
    :ivar outlying: of the clipped rows, those whose gradient is far longer than those of outcomes that the model draws
        for them, less those that the model expects. This and what follows is 0 where no model tells.
    :ivar square: of the norms of the clipped gradients, shortened as in a release.
    :ivar surplus: that, less what the model expects.
    :ivar turned: at points `TURN_REACH` times as far, by how much the information along the way is larger than at 0,
        over the way's square, which it is itself where rows alone tell of a posterior.
    :ivar turned_scale: standard deviation of the noise in it.
    :ivar clipped_scale, curve_scale, outlying_scale, square_scale: standard deviations of the noise.
    """

    clipped: float
    clipped_scale: float
    curve: np.ndarray
    curve_scale: float
    outlying: float = 0.0
    outlying_scale: float = 0.0
    square: float = 0.0
    square_scale: float = 0.0
    surplus: float = 0.0
    turned: float | None = None
    turned_scale: float = 0.0


def is_centred(cut: Cut, target: PrivateTarget) -> bool:
    """Whether the model tells how rows come about, and a row's place is public, so that gradients can be centred."""
    return cut.drawn_log_density is not None and target.vault.has_public_places


def kinds_of(size: int, apart: np.ndarray | None) -> np.ndarray:
    """Which coordinates are of a kind, such as the effects of a factor's groups: a row tells of one of them.

    :param apart: see `Cut.apart`.
    :return: shape (kinds, size): each coordinate is in one of them.
    """
    kinds: list[list[int]] = []
    for k in range(size):
        mine = next((kind for kind in kinds if apart is not None and apart[k, kind].all()), None)
        if mine is None:
            kinds.append([k])
        else:
            mine.append(k)
    return np.array([np.isin(np.arange(size), kind) for kind in kinds])


class Survey:
    """Questions about the log likelihood as a function of phi (tempered by the target's power).

    :param is_smooth: whether a row's log density has second derivatives that say something: see `has_kinks`.

    Programs take the rows as arguments: as constants they would be copied into each, and into JAX's cache on disk.
    """

    def __init__(self, target: PrivateTarget, cut: Cut, is_smooth: bool = True):
        self._target = target
        self._is_smooth = is_smooth
        self.cut = cut
        self.size = cut.size
        self.power = target.power
        self.dtype = jnp.result_type(float)
        self._one = jnp.ones((), self.dtype)
        self._count = target.program(self._count_rows)
        self.kinds = kinds_of(cut.size, cut.apart)
        self._scales = target.program(self._find_scales, static=(2,))
        self._weights = target.program(self._find_weight)
        self._row_counts = target.program(self._sum_row_counts)
        self._bounds = target.program(self._find_bounds, static=(2,))
        self._derivatives = target.program(self._sum_derivatives)
        self._unclipped_trace = target.program(self._sum_unclipped_trace)
        self._long_rows = target.program(self._sum_long_rows)
        self._gains = target.program(self._sum_gains)
        self._fit = target.program(self._sum_fit)
        self._slope = target.program(self._find_slope, static=(2,))

    def require_derivatives(self) -> None:
        """Make sure, on shapes alone, that rows have the derivatives that will be asked for.

        :raises UnsupportedModelError: if they have not.
        """
        frame = Frame(np.zeros(self.size, self.dtype), np.eye(self.size, dtype=self.dtype))

        def asked_for(row: tuple) -> tuple:
            if self.centres:
                return (row_gradient(self.cut, frame, row),)
            return plain_scores(self.cut, frame, jnp.ones((), self.dtype), row, self._is_smooth)[:2]

        try:
            alone(asked_for, self._target.vault.one_row)
        except RowsMeetError as error:
            raise UnsupportedModelError([describe_hazard(name) for name in error.hazards]) from None
        except Exception as error:
            raise no_derivatives(error) from error

    def of_one_row(self) -> ClosedJaxpr:
        """What is asked of a row beside its log density: drawn outcomes decide on it, too."""
        row = self._numbered(self._target).vault.one_row
        center, bound = np.zeros(self.size, self.dtype), self._one

        def scores(center: jax.Array, row: tuple) -> RowScores:
            return self._row_scores(Frame(center, jnp.eye(self.size, dtype=self.dtype)), bound)(row)

        return jax.make_jaxpr(scores)(center, row)

    @property
    def centres(self) -> bool:
        """Whether the model tells how rows come about, and a row's place is public, so that gradients are centred."""
        return is_centred(self.cut, self._target)

    @property
    def is_weighted(self) -> bool:
        """Whether rows may count more often than once, or less: then scores vary by more than the information says."""
        return self.cut.row_weight is not None

    @property
    def is_open(self) -> bool:
        """Whether gradients are centred by outcomes that are drawn: there may be any, and of any size."""
        return self.centres and self.cut.num_outcomes is None

    @property
    def is_listed(self) -> bool:
        """Whether gradients are centred by all outcomes that there can be."""
        return self.centres and not self.is_open

    @property
    def tells_given(self) -> bool:
        """Whether `derivatives` also releases what rows are given back: outcomes may be of any size, on a line."""
        return self.is_open and not self.is_discrete

    @property
    def is_discrete(self) -> bool:
        """Whether gradients are centred by outcomes that are counts, or have few values each."""
        return self.centres and self.cut.is_discrete

    @property
    def has_kinks(self) -> bool:
        """Whether only many rows together have curvature, and no model tells how much."""
        return not self.centres and not self._is_smooth

    def derivative_numbers(self, num_steps: int = 0) -> int:
        """How many numbers `derivatives` releases at once."""
        m = self.size
        return m + (1 + self.has_kinks) * m * (m + 1) // 2 + num_steps + (m if self.tells_given else 0)

    def fit_numbers(self, num_points: int) -> int:
        """How many numbers `fit` releases at once."""
        return num_points + (5 if self.centres else 1)

    def count(self, draw: Draw) -> float:
        """How many rows there are, with noise."""
        return float(self._count(self._target, draw))

    def scales(
        self,
        draws: Draw,
        frame: Frame,
        grid: Grid,
        smallest: float,
        threshold: float | np.ndarray,
        kinds: np.ndarray,
    ) -> np.ndarray:
        """For each of some kinds of coordinates, a bound that so many rows' derivatives exceed: their own, or what the
        model's outcomes have (the root of their mean square), if that is more.

        See `PrivateTarget.find_bounds`. A row has a derivative by one coordinate of a kind, so all rows are counted.

        :param kinds: some of `Survey.kinds`.
        """
        numbers = (jnp.asarray(x, self.dtype) for x in (smallest, threshold))
        found = self._scales(self._target, draws, self._cast(frame), grid, *numbers, jnp.asarray(kinds))
        return np.asarray(found, float)

    def of_rows_that_count_once(self, draws: Draw, threshold: float) -> "Survey":
        """The same survey, but a weight that about so many rows exceed is taken from the rows' densities, and is a part
        of the likelihood's power. So a row's typical gradient is known, whatever the unit of the weights is.

        :param draws: for `WEIGHT_GRID`.
        """
        numbers = (jnp.asarray(x, self.dtype) for x in (LEAST_WEIGHT, threshold))
        found = float(self._weights(self._target, draws, *numbers))
        if found < 1.5 * LEAST_WEIGHT:  # hardly a row counts
            return self
        return self.in_units_of(found / math.sqrt(WEIGHT_GRID.ratio))  # the grid's steps round up

    def in_units_of(self, weight: float) -> "Survey":
        """The same survey of rows that count so many times less, in a likelihood whose power is as often larger."""
        other = Survey(self._target, self.cut.counting(1 / weight), self._is_smooth)
        other.power = weight * self.power
        return other

    def row_counts(self, draw: Draw, frame: Frame, least: np.ndarray) -> np.ndarray:
        """How many rows have a derivative above `least` by each of the coordinates, shape (m,); with noise."""
        centre = self._centre_of_row_counts()
        found = self._row_counts(self._target, draw, self._cast(frame), jnp.asarray(least, self.dtype))
        return np.asarray(found.value, float) + centre * (self._target.num_rows if centre.any() else 0)

    def bounds(
        self, draws: Draw, frame: Frame, smallest: np.ndarray, threshold: float | np.ndarray, grid: Grid = BOUND_GRID
    ) -> np.ndarray:
        """Bounds of the norms of gradients and of information matrices that so many rows exceed, shape (2,).

        :param threshold: a number of rows, or one for each.
        """
        numbers = (jnp.asarray(x, self.dtype) for x in (smallest, threshold))
        return np.asarray(self._bounds(self._target, draws, self._cast(frame), grid, *numbers), float)

    def derivatives(
        self,
        draw: Draw,
        frame: Frame,
        bounds: Bounds,
        share: float,
        num_rows: float,
        steps: Steps = NO_STEPS,
    ) -> Derivatives:
        """Score and information at ``u = 0``, in one release of both; where rows have kinks, also `Derivatives.answer`.

        :param draw: for vectors of `derivative_numbers`.
        :param share: of the price of score and information that is for the information.
        :param steps: along which scores may answer unevenly.
        """
        m, typical = self.size, math.sqrt(self.size / (self.power * num_rows))
        third = _FALL_SHARE if self.has_kinks else _GIVEN_SHARE if self.tells_given else 0.0
        prices = (1 - third) * (1 - share), (1 - third) * share, third
        of_third = _FALL_ROOM * math.sqrt(m) * typical**2 if self.has_kinks else _GIVEN_ROOM * float(bounds.score)
        limits = float(bounds.score), float(bounds.information), of_third
        weights = [math.sqrt(price) for price in prices]
        ahead = steps.ahead.reshape(m, -1)
        numbers = [jnp.asarray(x, self.dtype) for x in (*limits, *weights, _REACH / typical, ahead)]
        released = self._derivatives(self._target, draw, self._cast(frame), *numbers)
        scale, known = self.power * float(released.scale), m + m * (m + 1) // 2
        ends = [m, known, known + steps.steepest.size]
        parts = np.split(self.power * np.asarray(released.value, float), ends)
        units = [limit / weight if weight else 0.0 for limit, weight in zip(limits, weights, strict=True)]
        score, information = units[0] * parts[0], matrix_of(units[1] * parts[1], m)
        information_scale, answer = units[1] * scale, 1.0
        if self.has_kinks:
            fall = matrix_of(units[2] * parts[3], m)
            information, information_scale, answer = answered(information, information_scale, fall, units[2] * scale)
        left = without_apart(information, information_scale, np.asarray(frame.whitening, float), self.cut.apart)
        of_bends, of_given = (units[1] * parts[2], information_scale), (np.zeros(0), 0.0)
        if self.tells_given:
            of_given = units[2] * parts[3], units[2] * scale
        return Derivatives(score, units[0] * scale, *left, answer, steps, *of_bends, *of_given)

    def unclipped_trace(self, draw: Draw, frame: Frame, largest: float) -> float:
        """Trace of the information that the rows would have if no gradient were clipped, tempered; with noise.

        Asked for where gradients are centred, so the number of rows is public.

        :param largest: what one row counts for at most.
        """
        bound = jnp.asarray(jnp.inf, self.dtype)
        found = self._unclipped_trace(self._target, draw, self._cast(frame), bound, jnp.asarray(largest, self.dtype))
        return self.power * largest * (float(found.value) + self._target.num_rows / 2)

    def long_rows(self, draw: Draw, frame: Frame, edges: np.ndarray) -> tuple[np.ndarray, float]:
        """How many rows' gradients are longer than each edge, less those that the model expects; where that tells.

        A row that lies between two edges counts for the part of the way that it has gone.

        :param edges: increasing, shape (k + 1,).
        :return: (k,), and the standard deviation of the noise in each.
        """
        found = self._long_rows(self._target, draw, self._cast(frame), jnp.asarray(edges, self.dtype))
        counts = _LONG_ROWS_HALF * np.asarray(found.value, float) + _LONG_ROWS_MIDDLE * self._target.num_rows
        return counts, _LONG_ROWS_HALF * float(found.scale)

    def gains(self, draw: Draw, start: np.ndarray, ends: np.ndarray, bounds: np.ndarray) -> tuple:
        """How much the log likelihood rises from `start` to each of `ends`, one release for all of them.

        :param ends: shape (k, m).
        :param bounds: shape (k,): largest rise or fall of one row that is counted in full.
        :return: rises (k,) and standard deviations of their noise (k,).
        """
        numbers = (jnp.asarray(x, self.dtype) for x in (start, ends, bounds))
        found = self._gains(self._target, draw, *numbers)
        return np.asarray(found.value, float) * np.asarray(bounds), float(found.scale) * np.asarray(bounds)

    def fit(
        self,
        search: Draw,
        draw: Draw,
        frame: Frame,
        bounds: Bounds,
        points: np.ndarray,
        typical: float,
        threshold: float,
        answer: float = 1.0,
    ) -> Fit:
        """See `Fit`. First a bound for a row's distances from the tangent is searched.

        :param points: ``u``, shape (k, m).
        :param typical: square of a row's slope along such a point, not tempered.
        :param answer: of `Derivatives`.
        """
        k, bound = len(points), float(bounds.score)
        most_turned = _TURN_ROOM * TURN_REACH**2 * typical
        given = *bounds, points, typical / 16, threshold, answer, most_turned
        numbers = (jnp.asarray(x, self.dtype) for x in given)
        found, largest = self._fit(self._target, search, draw, self._cast(frame), *numbers)
        value, scale = np.asarray(found.value, float), float(found.scale)
        light, light_scale = value[1:] / _LIGHT, scale / _LIGHT
        unit = self.power * float(largest) * math.sqrt(k)
        turned = self.power * most_turned / np.mean(np.sum((TURN_REACH * points) ** 2, 1))
        # What was taken off each row, where their number is public.
        rows = self._target.num_rows if self._target.has_public_size else 0
        if not self.centres:
            return Fit(value[0] + rows / 2, scale, unit * light, unit * light_scale)
        outlying = value[-1] / _OUTLYING + _OFF_OUTLYING * rows
        outlying_scale = scale / _OUTLYING
        return Fit(
            clipped=value[0] + outlying,
            clipped_scale=math.hypot(scale, outlying_scale),
            curve=unit * light[2 : 2 + k],
            curve_scale=unit * light_scale,
            turned=turned * light[2 + k],
            turned_scale=turned * light_scale,
            outlying=outlying,
            outlying_scale=outlying_scale,
            square=bound**2 * (light[0] + rows) / 2,
            square_scale=bound**2 * light_scale / 2,
            surplus=bound**2 * light[1],
        )

    def slope(self, draws: Draw, frame: Frame, pairs: np.ndarray, grid: Grid, smallest: float, thr: float) -> float:
        """A bound of the rows' changes between public points, per unit of distance.

        Of each row, the root mean square over the pairs counts.

        :param pairs: shape (k, 2, m).
        """
        numbers = [jnp.asarray(x, self.dtype) for x in (pairs, smallest, thr)]
        return float(self._slope(self._target, draws, self._cast(frame), grid, *numbers))

    def _cast(self, frame: Frame) -> Frame:
        return Frame(*(jnp.asarray(part, self.dtype) for part in frame))

    # -- Programs ----------------------------------------------------------------------------------------------------

    def _numbered(self, target: PrivateTarget) -> PrivateTarget:
        """The rows with their positions, from which pseudo-random outcomes are drawn, if they are."""
        return target.numbered() if self.centres else target

    def _row_scores(self, frame: Frame, bound: jax.Array) -> Callable[[tuple], RowScores]:
        """From a (numbered) row to its gradients."""

        def scores(row: tuple) -> RowScores:
            if self.centres:
                return centred_scores(self.cut, frame, bound, row[:-1], row[-1][0])
            return plain_scores(self.cut, frame, bound, row, self._is_smooth)

        return scores

    def _weighted(self, found: RowScores, bound: jax.Array, answers: jax.Array, largest: jax.Array) -> jax.Array:
        """The clipped score, shortened by `_weight`."""
        score = clip_norm(found.score, bound)
        return jnp.where(jnp.isfinite(score), score * self._weight(answers, largest), 0)

    def _weight(self, answers: jax.Array, largest: jax.Array) -> jax.Array:
        """The factor by which a row's information, as a vector, is clipped; 0 where that is not finite.

        So the sum of informations says how the sum of scores answers to the parameters, however many are clipped.
        Without it a few rows that alone inform a direction (the end of a spline) would seem to know less than they
        say, and each step along it would be too long. Only where the information does not depend on the outcome: there
        the score's mean stays 0 where the model holds.
        """
        norm = jnp.linalg.norm(answers)
        if not self.centres:
            return jnp.ones_like(norm)
        factor = jnp.minimum(1, largest / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        return jnp.where(jnp.isfinite(norm), factor, 0)

    def _count_rows(self, target: PrivateTarget, draw: Draw) -> jax.Array:
        return target.release_sum(draw, lambda row: jnp.ones((), self.dtype), 1.0).value

    def _find_weight(self, target, draws, smallest, threshold) -> jax.Array:
        weight = self.cut.row_weight
        assert weight is not None
        return target.find_bounds(draws, lambda row: weight(row)[None], WEIGHT_GRID, smallest, threshold)[0]

    def _find_scales(self, target, draws, frame, grid, smallest, threshold, kinds) -> jax.Array:
        scores = self._row_scores(frame, jnp.asarray(jnp.inf, self.dtype))

        def steepness(row: tuple) -> jax.Array:
            """Of a row's log density, by each coordinate; as steep as the model expects at least.

            Where a scale starts far too large, its own outcome makes it flat, and the model does not.
            """
            if not self.centres:
                return jnp.abs(row_gradient(self.cut, frame, row))
            own = jnp.abs(row_gradient(self.cut, frame, row[:-1]))
            expected = jnp.sqrt(jnp.maximum(jnp.diagonal(scores(row).unclipped), 0))
            return jnp.where(jnp.isfinite(expected), jnp.maximum(own, expected), own)

        def of_kinds(row: tuple) -> jax.Array:
            return jnp.max(jnp.where(kinds, steepness(row), 0), 1)

        width = self.size * (1 + CENTRE_DRAWS)
        return self._numbered(target).find_bounds(draws, of_kinds, grid, smallest, threshold, width, self.centres)

    def _centre_of_row_counts(self) -> np.ndarray:
        """What is taken off each row's part: the middle, but of kinds of which a row has one coordinate."""
        alone = self.kinds[self.kinds.sum(1) == 1].any(0)
        return 0.5 * alone if self._target.has_public_size else np.zeros(self.size)

    def _sum_row_counts(self, target, draw, frame, least) -> Released:
        centre = self._centre_of_row_counts()
        # Of each kind a row has one coordinate, or its single one.
        norm = math.sqrt(sum(centre[kind].max() ** 2 or 1.0 for kind in self.kinds))

        def met(row: tuple) -> jax.Array:
            found = jnp.abs(row_gradient(self.cut, frame, row)) > least
            return found.astype(self.dtype) - jnp.asarray(centre, self.dtype)

        return target.release_sum(draw, met, norm * ROOM, self.size)

    def _find_bounds(self, target, draws, frame, grid, smallest, threshold) -> jax.Array:
        scores = self._row_scores(frame, jnp.asarray(jnp.inf, self.dtype))

        def norms(row: tuple) -> jax.Array:
            found = scores(row)
            return jnp.stack([jnp.linalg.norm(found.score), jnp.linalg.norm(found.information)])

        return self._numbered(target).find_bounds(
            draws, norms, grid, smallest, threshold, self.size**2 + self.size * CENTRE_DRAWS, self.centres
        )

    def _sum_derivatives(
        self,
        target,
        draw,
        frame,
        bound,
        largest,
        of_third,
        score_weight,
        information_weight,
        third_weight,
        reach,
        steps,
    ) -> Released:
        scores = self._row_scores(frame, bound)

        def both(row: tuple) -> jax.Array:
            found = scores(row)
            answers = vector_of(found.information)
            if steps.shape[1]:
                bends = row_bends(self.cut, frame, bound, steps, row[:-1], row[-1][0])
                answers = jnp.concatenate([answers, bends])
            score = self._weighted(found, bound, answers, largest) * (score_weight / bound)
            information = clip_norm(answers, largest) * (information_weight / largest)
            if self.tells_given:
                third = clip_norm(found.given, of_third)
            elif self.has_kinks:
                third = clip_norm(vector_of(row_fall(self.cut, frame, bound, row, reach)), of_third)
            else:
                return jnp.concatenate([score, information])
            return jnp.concatenate([score, information, third * (third_weight / of_third)])

        width = self.size**2 + self.size * CENTRE_DRAWS * (1 + 2 * steps.shape[1])
        return self._numbered(target).release_sum(draw, both, ROOM, width, may_loop=self.centres)

    def _sum_unclipped_trace(self, target, draw, frame, bound, largest) -> Released:
        scores = self._row_scores(frame, bound)

        def share(row: tuple) -> jax.Array:
            return jnp.clip(jnp.nan_to_num(jnp.trace(scores(row).unclipped) / largest, posinf=0.0), 0, 1) - 0.5

        return self._numbered(target).release_sum(draw, share, 0.5 * ROOM, may_loop=self.centres)

    def _sum_long_rows(self, target, draw, frame, edges) -> Released:
        k = edges.shape[0] - 1

        def parts(row: tuple) -> jax.Array:
            return (row_excesses(self.cut, frame, edges, row[:-1], row[-1][0]) - _LONG_ROWS_MIDDLE) / _LONG_ROWS_HALF

        width = self.size * (CENTRE_DRAWS + 1)
        return self._numbered(target).release_sum(draw, parts, math.sqrt(k) * ROOM, width, may_loop=True)

    def _sum_gains(self, target, draw, start, ends, bounds) -> Released:
        density = self.cut.row_log_density

        def rise(row: tuple) -> jax.Array:
            rises = (jax.vmap(lambda end: density(end, row))(ends) - density(start, row)) / bounds
            return jnp.clip(jnp.nan_to_num(rises, nan=-1.0), -1, 1)

        largest = math.sqrt(ends.shape[0]) * ROOM
        found = target.release_sum(draw, rise, largest, ends.size)
        return Released(self.power * found.value, self.power * found.scale)

    def _sum_fit(
        self, target, search, draw, frame, bound, information, points, smallest, threshold, answer, most_turned
    ) -> tuple[Released, jax.Array]:
        middle = 0.5 if target.has_public_size else 0.0
        target, scores = self._numbered(target), self._row_scores(frame, bound)

        def beyond(row: tuple, found: RowScores) -> jax.Array:
            expected = answer * jnp.einsum("ki,ij,kj->k", points, found.unclipped, points) / 2
            row = row[:-1] if self.centres else row
            return tangent_distances(self.cut, frame, points, row) + expected

        def distance(row: tuple) -> jax.Array:
            return jnp.linalg.norm(beyond(row, scores(row)))[None]

        width = self.size * CENTRE_DRAWS + 2 * points.size
        largest = target.find_bounds(search, distance, CURVE_GRID, smallest, threshold, width, self.centres)[0]

        def seen(row: tuple) -> jax.Array:
            found = scores(row)
            distances = clip_norm(beyond(row, found), largest) / largest
            if not self.centres:
                return jnp.append(found.clipped - middle, _LIGHT * distances)
            answers = vector_of(found.information)
            score = self._weighted(found, bound, answers, information) / bound
            square = jnp.sum(score**2)
            expected = found.square * (self._weight(answers, information) / bound) ** 2
            surplus = jnp.clip(jnp.nan_to_num(square - expected), -1, 1)
            clipped, outlying = jnp.nan_to_num(found.clipped), jnp.nan_to_num(found.outlying)
            of_row = turn(self.cut, frame, TURN_REACH * points, row[:-1]) / most_turned
            turned = jnp.clip(jnp.nan_to_num(of_row), -1, 1)
            light = [2 * square - 1, surplus, *distances, turned]
            others = [clipped, *(_LIGHT * part for part in light)]
            kept = jnp.where(outlying > 0, 0, jnp.stack(others))
            return jnp.append(kept, _OUTLYING * (outlying - _OFF_OUTLYING))

        norm = _OUTLYING * (1 - _OFF_OUTLYING) if self.centres else math.hypot(1 - middle, _LIGHT)
        found = target.release_sum(draw, seen, norm * ROOM, width, may_loop=self.centres)
        # A row's distances have a norm of at most 1 here: `Survey.fit` puts them in their units.
        return found, largest / math.sqrt(points.shape[0])

    def _find_slope(self, target, draws, frame, grid, pairs, smallest, thr) -> jax.Array:
        flat = pairs.reshape(-1, self.size)
        distances = jnp.linalg.norm(pairs[:, 1] - pairs[:, 0], axis=1)

        def root_mean_square(row: tuple) -> jax.Array:
            found = jax.vmap(lambda u: self.cut.row_log_density(frame.at(u), row))(flat).reshape(pairs.shape[:2])
            return jnp.sqrt(jnp.mean(((found[:, 1] - found[:, 0]) / distances) ** 2))[None]

        return target.find_bounds(draws, root_mean_square, grid, smallest, thr, flat.size)[0]
