"""What one row says of the parameters, in the coordinates of a frame, before a sum clips it.

Nothing here is trusted: `numpyro_dp.preparation.survey` adds these up, and whoever adds them clips each.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.model.arguments import UnsupportedModelError
from numpyro_dp.model.coordinates import Cut
from numpyro_dp.preparation.frames import Frame

CENTRE_DRAWS = 8
"""Outcomes that are drawn for a row; they add less than an eighth of what the clip takes of the score's variance."""
LISTED_COUNTS = 4
"""Counts below are listed, each with its probability; others are drawn. Of a rare event, eight draws see nothing."""
CENTRE_STEPS = 3
"""In which the equation for what is given back is solved. Of 400,000 rows one leaves a scale 7.5 standard deviations
off, three .7."""
_FAR = 3.0
"""A gradient so many times as long as the longest of the outcomes that the model draws for its row is outlying."""
_SURPRISING = 1e-4
"""An outcome with a listed chance is outlying if one whose gradient is about as long is less likely than this. Rare
events that a model expects are not: most of what it says of the parameters comes from them."""
_INWARD = 0.5**0.5
"""Of a step, where the information is compared: ``x d(x)`` is the integral of ``d`` from 0 to 1, if that is odd and
cubic."""
SHARE_OF_FEW = 0.45
"""Where the model expects more often than this that a row is longer than some edge, that is due to its covariates: it
adds nothing to the count of long rows beyond that edge."""


def no_derivatives(error: Exception) -> UnsupportedModelError:
    """What is raised where JAX cannot form a row's derivatives."""
    return UnsupportedModelError([_NO_DERIVATIVES.format(type(error).__name__)])


_NO_DERIVATIVES = (
    "the preparation needs the derivatives of a row's log density, and JAX cannot form them for this model ({}). Use "
    "the sampler without preparation: `prepare=False`"
)


def row_gradient(cut: Cut, frame: Frame, row: tuple) -> jax.Array:
    """Gradient (m,) of a row's log density with respect to u, at 0; see `_gradient_at`."""
    return _gradient_at(cut, frame, row)(jnp.zeros_like(jnp.asarray(frame.center)))


def _gradient_at(cut: Cut, frame: Frame, row: tuple) -> Callable[[jax.Array], jax.Array]:
    """The gradient (m,) of a row's log density with respect to u.

    It is no number where the density is none, or 0: there a distribution that checks its support has a gradient of 0,
    as if the row said nothing, and nobody would count the row.
    """
    with_value = jax.value_and_grad(lambda u: cut.row_log_density(frame.at(u), row))

    def gradient_at(u: jax.Array) -> jax.Array:
        value, gradient = with_value(u)
        return jnp.where(jnp.isfinite(value), gradient, jnp.nan)

    return gradient_at


def tangent_distances(cut: Cut, frame: Frame, points: jax.Array, row: tuple) -> jax.Array:
    """By how much a row's log density is above its tangent at 0, at each of `points` (k, m)."""

    def density(u: jax.Array) -> jax.Array:
        return cut.row_log_density(frame.at(u), row)

    value, gradient = jax.value_and_grad(density)(jnp.zeros_like(jnp.asarray(frame.center)))
    return jax.vmap(lambda u: density(u) - value - u @ gradient)(points)


def turn(cut: Cut, frame: Frame, points: jax.Array, row: tuple) -> jax.Array:
    """By how much the square of a row's slope along `points` (k, m) is larger there than at 0, on average.

    Summed over rows it is by how much the information along the way grows. With each point ``u`` there should be
    ``-u``, so that it grows where ways bend, and not where it is larger at the one side and smaller at the other.
    """

    def density(u: jax.Array) -> jax.Array:
        return cut.row_log_density(frame.at(u), row)

    here = points @ jax.grad(density)(jnp.zeros_like(jnp.asarray(frame.center)))
    there = jax.vmap(lambda u: jax.jvp(density, (u,), (u,))[1])(points)
    return jnp.mean(there**2 - here**2)


class RowScores(NamedTuple):
    """A row's derivatives before they are clipped.

    :ivar score: gradient (m,), centred if the model tells how.
    :ivar information: (m, m): how the clipped score answers to the parameters. Symmetric; positive semidefinite, but
        for minus a Hessian.
    :ivar unclipped: the same for a score that is not clipped.
    :ivar square: what the model expects of the square of the clipped score's norm.
    :ivar clipped: whether the clip shortens the score, as 0 or 1, less how likely the model says that is, if it does.
        Where the model says so, rows that are outlying do not count here.
    :ivar outlying: the same of whether the gradient is clipped, and far longer than those of the model's outcomes. It
        is above 0 if the row is.
    :ivar given: what the score has been given back for what the clip takes of the model's outcomes, shape (m,).
    """

    score: jax.Array
    information: jax.Array
    unclipped: jax.Array
    square: jax.Array
    clipped: jax.Array
    outlying: jax.Array
    given: jax.Array


def plain_scores(cut: Cut, frame: Frame, bound: jax.Array, row: tuple, is_smooth: bool) -> RowScores:
    """The gradient, and minus the Hessian; or the gradient's square, which on average is the same at the posterior."""
    zero = jnp.zeros_like(jnp.asarray(frame.center))
    gradient_at = _gradient_at(cut, frame, row)
    if is_smooth:
        gradient, push = jax.linearize(gradient_at, zero)
        information = unclipped = -jax.vmap(push)(jnp.eye(cut.size, dtype=zero.dtype))
    else:
        gradient = gradient_at(zero)
        factor = jnp.minimum(1, bound / jnp.maximum(jnp.linalg.norm(gradient), jnp.finfo(gradient.dtype).tiny))
        unclipped = jnp.outer(gradient, gradient)
        information = factor * unclipped
    none, within = jnp.zeros((), zero.dtype), jnp.linalg.norm(gradient) <= bound  # not so where it is no number
    return RowScores(gradient, information, unclipped, none, 1 - within.astype(zero.dtype), none, zero)


def row_fall(cut: Cut, frame: Frame, bound: jax.Array, row: tuple, reach: jax.Array) -> jax.Array:
    """By how much a row's clipped gradient falls from one side of 0 to the other, per distance; symmetric, (m, m).

    Where a row's log density has kinks, as a check loss has, only the sum over rows is curved, at the width at which
    the kinks of many rows lie. The gradient's square says how curved it would be if rows were the model's own draws:
    those of a check loss hardly ever are, and whoever steps by the square stops a part of the way from the mode.

    :param reach: how far from 0 gradients are compared.
    """
    gradient_at = _gradient_at(cut, frame, row)

    def shortened(u: jax.Array) -> jax.Array:
        return clip_norm(gradient_at(u), bound)

    ends = reach * jnp.eye(cut.size, dtype=reach.dtype)
    fall = (jax.vmap(shortened)(-ends) - jax.vmap(shortened)(ends)) / (2 * reach)
    return (fall + fall.T) / 2


def has_kinks(cut: Cut, points: np.ndarray, rows: tuple) -> bool:
    """Whether a row's log density has a coordinate that it depends on without curvature, as a Laplace law's location.

    :param points: phi, shape (k, m).
    :param rows: synthetic ones.
    :raises UnsupportedModelError: if JAX cannot form the derivatives.
    """

    def slopes(phi: jax.Array, row: tuple) -> tuple:
        def gradient_at(phi: jax.Array) -> jax.Array:
            return jax.grad(lambda phi: cut.row_log_density(phi, row))(phi)

        return jnp.abs(gradient_at(phi)), jnp.abs(jnp.diagonal(jax.jacobian(gradient_at)(phi)))

    over_rows = jax.vmap(slopes, (None, 0))
    try:
        found = jax.jit(jax.vmap(over_rows, (0, None)))(jnp.asarray(points, jnp.result_type(float)), rows)
    except Exception as error:
        raise no_derivatives(error) from error
    gradient, hessian = (np.nan_to_num(np.asarray(part, float), posinf=0).sum((0, 1)) for part in found)
    return bool(np.any((hessian == 0) & (gradient > 0)))


def centred_scores(cut: Cut, frame: Frame, bound: jax.Array, row: tuple, number: jax.Array) -> RowScores:
    """A row's gradient, moved so that, clipped, it is 0 on average if the model holds at the centre.

    The rows that are clipped are those with surprising outcomes, and they pull one way: the sum of clipped gradients
    is not 0 on average where that of the gradients is, and whoever takes it for a score is biased. With the expected
    loss given back, row by row, before the clip, it is (Künsch, Stefanski and Carroll 1989, for the estimating
    equations of bounded influence). Whoever adds it up clips it.

    The information is that of the row's law. The derivative of the mean clipped score with respect to the parameters is
    ``E c g'``, with the gradient g and the clipped score c: where outcomes are listed, it is that. As c is 0 on
    average, it is ``E s h h'``, too, with the moved gradient h and the factor s by which the clip shortens it: positive
    semidefinite wherever the parameters are, which a Hessian is not. For outcomes that are drawn, it is the mean of
    ``s g g'``, the main part of that.

    Where the outcome can have few values, none is drawn: each counts by its probability. Draws would not do where one
    of them is rare, and so says nearly all. Of a count, the first few values are such ones, and larger ones are drawn.
    Pseudo-random numbers are public, and depend on the row's position only.

    A row that counts w times has the gradient w g, but outcomes of the law with the gradient g: then the information
    is the mean of ``c g'``, or of ``s w g g'``.

    :param number: the position of the row.
    """
    if cut.num_outcomes is not None:
        return _scores_by_outcome(cut, frame, bound, row)
    if cut.count_log_density is not None:
        return _scores_by_count(cut, frame, bound, row, number)
    _, of_law, drawn = _drawn_gradients(cut, frame, row, _words(number))
    own = row_gradient(cut, frame, row)
    moved, lost = _recentred(drawn, bound)
    given = jnp.mean(lost, 0)
    factors = _factors(moved, bound)
    # The row among the draws: if the model holds, each of them is as likely to be clipped.
    is_finite = jnp.all(jnp.isfinite(own))
    together, _ = _recentred(jnp.concatenate([jnp.where(is_finite, own, 0)[None], drawn]), bound)
    clipped = (_norms(together) > bound).astype(own.dtype).at[0].max(1 - is_finite.astype(own.dtype))
    norms = jnp.append(jnp.where(is_finite, jnp.linalg.norm(own), jnp.inf), _norms(drawn))
    order = jnp.sort(norms)
    others = jnp.where(norms == order[-1], order[-2], order[-1])  # the longest of the others
    outlying = clipped * (norms > _FAR * others)
    # Each of the nine may be the outlying one, so without all of them what is expected is still 0.
    within = clipped * (1 - jnp.max(outlying))
    return RowScores(
        own + given,
        (drawn * factors[:, None]).T @ of_law / CENTRE_DRAWS,
        drawn.T @ of_law / CENTRE_DRAWS,
        jnp.mean((factors * _norms(moved)) ** 2),
        within[0] - jnp.mean(within[1:]),
        outlying[0] - jnp.mean(outlying[1:]),
        given,
    )


def _parts(norm: jax.Array, edges: jax.Array) -> jax.Array:
    """Of each interval between edges, which part lies below `norm`; 0 where that is no number. Shape (k,)."""
    found = jnp.clip((norm - edges[:-1]) / (edges[1:] - edges[:-1]), 0, 1)
    return jnp.where(jnp.isfinite(norm), found, 0)


def row_excesses(cut: Cut, frame: Frame, edges: jax.Array, row: tuple, number: jax.Array) -> jax.Array:
    """How far a row's gradient is beyond each edge (`_parts`), less what the model expects: of mean 0 if it holds.

    Each is between ``-SHARE_OF_FEW`` and 1. All are 0 of a gradient that is not finite: it adds nothing to a score,
    either.

    :param number: the position of the row.
    """
    gradient = row_gradient(cut, frame, row)
    own = jnp.linalg.norm(gradient)
    if cut.num_outcomes is not None:
        _, gradients, chances = _outcomes(cut, frame, row)
    elif cut.count_log_density is not None:
        _, gradients, chances = _counts(cut, frame, row, number)
    else:
        _, _, gradients = _drawn_gradients(cut, frame, row, _words(number))
        gradients = jnp.concatenate([jnp.where(jnp.isfinite(own), gradient, 0)[None], gradients])
        chances = jnp.full(len(gradients), 1 / len(gradients), own.dtype)
    norms = _norms(gradients)
    expected = chances @ jax.vmap(lambda norm: _parts(norm, edges))(norms)
    is_rare = chances @ (norms[:, None] > edges[:-1]).astype(own.dtype) < SHARE_OF_FEW
    return jnp.where(is_rare & jnp.isfinite(own), _parts(own, edges) - expected, 0)


def _drawn_gradients(cut: Cut, frame: Frame, row: tuple, words: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log densities of the row with other outcomes, one for each of the words; their gradients, 0 if not finite; and
    these as often as the row counts.
    """
    assert cut.drawn_log_density is not None
    density, zero = cut.drawn_log_density, jnp.zeros_like(jnp.asarray(frame.center))
    values, gradients = jax.vmap(lambda k: jax.value_and_grad(lambda u: density(frame.at(u), row, k))(zero))(words)
    gradients = _finite(gradients)
    return values, gradients, gradients if cut.row_weight is None else _finite(cut.row_weight(row) * gradients)


def _finite(vectors: jax.Array) -> jax.Array:
    return jnp.where(jnp.all(jnp.isfinite(vectors), 1, keepdims=True), vectors, 0)


def _words(number: jax.Array) -> jax.Array:
    """Of which a row's outcomes are drawn: public, and by the row's position alone."""
    key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), number)
    return jax.random.key_data(jax.random.split(key, CENTRE_DRAWS))


def _outcomes(cut: Cut, frame: Frame, row: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The row's gradients with all values that its outcome can have, these as often as it counts, and the probability
    of each."""
    assert cut.num_outcomes is not None
    values, of_law, gradients = _drawn_gradients(cut, frame, row, _words_of_outcomes(cut.num_outcomes))
    return of_law, gradients, _chances(values)


def _chances(values: jax.Array) -> jax.Array:
    """Of outcomes, by their log densities; 0 if none is possible."""
    chances = jax.nn.softmax(jnp.where(jnp.isfinite(values), values, -jnp.inf))
    return jnp.where(jnp.all(jnp.isfinite(chances)), chances, 0)


def _shift_and_factors(gradients: jax.Array, chances: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is given back to a row (m,), and by what the clip then shortens the gradient of each outcome."""
    shift = jnp.zeros_like(gradients[0])
    for _ in range(2 * CENTRE_STEPS):
        moved = gradients + shift
        shift = chances @ (moved - jax.vmap(lambda x: clip_norm(x, bound))(moved))
    return shift, _factors(gradients + shift, bound)


def _factors(vectors: jax.Array, bound: jax.Array) -> jax.Array:
    """By what the clip shortens each of `vectors` (k, m), shape (k,)."""
    return jnp.minimum(1, bound / jnp.maximum(_norms(vectors), jnp.finfo(vectors.dtype).tiny))


def row_bends(cut: Cut, frame: Frame, bound: jax.Array, steps: jax.Array, row: tuple, number: jax.Array) -> jax.Array:
    """How unevenly a row's clipped score answers along each of `steps`: what one ahead and one back add up to, (k,).

    At a distance of u along a step of length l, the model expects a clipped score of ``r(u)`` along it, which is 0 at
    0. If that were linear, as a quadratic log likelihood has it, ``(r(l) + r(-l)) / l`` would be 0. Along the
    coefficient of a few rows that nearly all have the same outcome it is not, but flattens out.

    Where the outcome can have few values, each counts by its probability, at both places. Of drawn outcomes, ``r(u)``
    is the integral of the information on the way, ``s g g'`` of outcomes that are drawn there: by a rule with one point
    on each side, which is exact if the difference of both sides is a cubic of the distance.

    :param steps: in u, as columns.
    :param number: the position of the row.
    """
    squares = jnp.sum(steps**2, 0)
    if cut.num_outcomes is None:
        words = _words(number)

        def told_at(u: jax.Array, step: jax.Array) -> jax.Array:
            if cut.count_log_density is not None:
                of_law, counted, chances = _counts(cut, frame._replace(center=frame.at(u)), row, number)
                moved, _ = _recentred_counts(counted, chances, bound)
                return (chances * _factors(moved, bound) * (moved @ step)) @ (of_law @ step)
            _, of_law, drawn = _drawn_gradients(cut, frame._replace(center=frame.at(u)), row, words)
            return jnp.mean(_factors(_recentred(drawn, bound)[0], bound) * (drawn @ step) * (of_law @ step))

        both = jnp.concatenate([steps, -steps], 1).T  # one program for both sides
        ahead, back = jnp.split(jax.vmap(told_at)(_INWARD * both, both), 2)
        return _INWARD * (ahead - back) / squares
    assert cut.drawn_log_density is not None
    density, words = cut.drawn_log_density, _words_of_outcomes(cut.num_outcomes)
    _, gradients, chances = _outcomes(cut, frame, row)
    shift, factors = _shift_and_factors(gradients, chances, bound)
    clipped = ((gradients + shift) * factors[:, None]) @ steps

    def chances_at(u: jax.Array) -> jax.Array:
        return _chances(jax.vmap(lambda word: density(frame.at(u), row, word))(words))

    ahead, back = jax.vmap(chances_at)(steps.T), jax.vmap(chances_at)(-steps.T)
    return jnp.sum((ahead + back - 2 * chances) * clipped.T, 1) / squares


def _words_of_outcomes(number: int) -> jax.Array:
    numbers = jnp.arange(number, dtype=jnp.uint32)
    return jnp.stack([numbers, jnp.zeros_like(numbers)], 1)


def _scores_by_outcome(cut: Cut, frame: Frame, bound: jax.Array, row: tuple) -> RowScores:
    """`centred_scores` by all values that the outcome can have, each with its probability."""
    of_law, gradients, chances = _outcomes(cut, frame, row)
    own = row_gradient(cut, frame, row)
    shift, factors = _shift_and_factors(gradients, chances, bound)
    lengths = _norms(gradients + shift)
    # How likely an outcome is whose gradient is of about this length, or longer.
    rarity = (_norms(gradients)[None] * _FAR >= _norms(gradients)[:, None]) @ chances
    of_own = (_norms(gradients) * _FAR >= jnp.linalg.norm(own)) @ chances
    is_finite = jnp.all(jnp.isfinite(own))
    is_clipped = jnp.where(is_finite, jnp.linalg.norm(own + shift) > bound, True).astype(own.dtype)
    is_outlying = jnp.where(is_finite, is_clipped * (of_own < _SURPRISING), 1)
    are_clipped, are_outlying = lengths > bound, (rarity < _SURPRISING) & (lengths > bound)
    return RowScores(
        own + shift,
        _answer((gradients + shift) * (chances * factors)[:, None], of_law),
        (gradients * chances[:, None]).T @ of_law,
        chances @ (factors * lengths) ** 2,
        is_clipped - is_outlying - chances @ (are_clipped & ~are_outlying),
        is_outlying - chances @ are_outlying,
        shift,
    )


def _counts(cut: Cut, frame: Frame, row: tuple, number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The row's gradients with the first few counts and with drawn ones, these as often as it counts, and how likely
    each is: a drawn count stands for an eighth of the larger ones, and one that is not larger for nothing.
    """
    assert cut.draw_count is not None
    assert cut.count_log_density is not None
    draw, density, zero = cut.draw_count, cut.count_log_density, jnp.zeros_like(jnp.asarray(frame.center))
    drawn = jax.vmap(lambda words: draw(frame.at(zero), row, words))(_words(number))
    counts = jnp.concatenate([jnp.arange(LISTED_COUNTS, dtype=drawn.dtype), drawn])
    values, gradients = jax.vmap(lambda k: jax.value_and_grad(lambda u: density(frame.at(u), row, k))(zero))(counts)
    of_larger = jnp.where(counts < LISTED_COUNTS, 0, 1 / CENTRE_DRAWS).astype(values.dtype)
    chances = jnp.where(_are_listed(counts), jnp.exp(values), of_larger)
    chances = jnp.where(jnp.isfinite(values) & jnp.isfinite(chances), chances, 0)
    gradients = _finite(gradients)
    return gradients, gradients if cut.row_weight is None else _finite(cut.row_weight(row) * gradients), chances


def _are_listed(nodes: jax.Array) -> jax.Array:
    """Of the counts of `_counts`, which are listed."""
    return jnp.arange(len(nodes)) < LISTED_COUNTS


_OTHERS = CENTRE_DRAWS / (CENTRE_DRAWS - 1)
"""Where a drawn count is left out, the others stand for it, too."""


def _recentred_counts(gradients: jax.Array, chances: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each of the gradients of `_counts`, moved by what the clip takes on average; and what a row is moved by (m,).

    As in `_recentred`, a drawn one is not among the others that it is moved by.
    """
    are_listed = _are_listed(gradients)[:, None]
    moved, shift = gradients, jnp.zeros_like(gradients[0])
    for _ in range(2 * CENTRE_STEPS):
        given = chances[:, None] * (moved - jax.vmap(lambda x: clip_norm(x, bound))(moved))
        shift, of_drawn = jnp.sum(given, 0), jnp.sum(jnp.where(are_listed, 0, given), 0)
        moved = gradients + jnp.where(are_listed, shift, shift - of_drawn + _OTHERS * (of_drawn - given))
    return moved, shift


def _scores_by_count(cut: Cut, frame: Frame, bound: jax.Array, row: tuple, number: jax.Array) -> RowScores:
    """`centred_scores` by the first few counts, each with its probability, and larger ones that are drawn."""
    of_law, gradients, chances = _counts(cut, frame, row, number)
    own = row_gradient(cut, frame, row)
    moved, shift = _recentred_counts(gradients, chances, bound)
    factors, lengths = _factors(moved, bound), _norms(moved)
    # How likely a gradient is of about a length, or longer. None of the drawn ones counts for itself, and for the row's
    # own gradient the first of them does not count: then rows and draws are outlying equally often.
    are_listed = _are_listed(chances)
    is_other = ~jnp.eye(len(chances), dtype=bool)
    without = jnp.where(are_listed, chances, _OTHERS * chances * is_other)
    without = jnp.where(are_listed[:, None], chances, without)
    rarity = jnp.sum(without * (_norms(gradients)[None] * _FAR >= _norms(gradients)[:, None]), 1)
    of_own = (_norms(gradients) * _FAR >= jnp.linalg.norm(own)) @ without[LISTED_COUNTS]
    is_finite = jnp.all(jnp.isfinite(own))
    is_clipped = jnp.where(is_finite, jnp.linalg.norm(own + shift) > bound, True).astype(own.dtype)
    is_outlying = jnp.where(is_finite, is_clipped * (of_own < _SURPRISING), 1)
    are_clipped, are_outlying = lengths > bound, (rarity < _SURPRISING) & (lengths > bound)
    # Chances add up to 1 on average only.
    expected = jnp.minimum(chances @ (are_clipped & ~are_outlying), 1)
    return RowScores(
        own + shift,
        _answer(moved * (chances * factors)[:, None], of_law),
        (gradients * chances[:, None]).T @ of_law,
        chances @ (factors * lengths) ** 2,
        is_clipped - is_outlying - expected,
        is_outlying - jnp.minimum(chances @ are_outlying, 1),
        shift,
    )


def _answer(clipped: jax.Array, gradients: jax.Array) -> jax.Array:
    """How a row's clipped score answers to the parameters, ``E c g'``; see `centred_scores`.

    :param clipped: c of each outcome, times its probability, shape (k, m).
    :param gradients: g of each, of the law.
    """
    answer = clipped.T @ gradients
    return (answer + answer.T) / 2


def _recentred(gradients: jax.Array, bound: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each of the gradients (k, m) with the mean of what the clip takes of the others; and what it takes of each."""
    moved, lost = gradients, jnp.zeros_like(gradients)
    for _ in range(CENTRE_STEPS):
        moved = gradients + (jnp.sum(lost, 0) - lost) / (len(gradients) - 1)
        lost = moved - jax.vmap(lambda x: clip_norm(x, bound))(moved)
    return moved, lost


def _norms(vectors: jax.Array) -> jax.Array:
    return jnp.linalg.norm(vectors, axis=1)


def clip_norm(x: jax.Array, bound: jax.Array) -> jax.Array:
    """`x` shortened to norm `bound`, as a clipped sum does it, up to rounding; 0 where it is not finite."""
    norm = jnp.linalg.norm(x)
    factor = jnp.minimum(1, bound / jnp.maximum(norm, jnp.finfo(x.dtype).tiny))
    return jnp.where(jnp.isfinite(norm), x * factor, 0)
