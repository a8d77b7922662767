"""Rows whose gradients are longer than the model expects: which bound of the score they ask for.

What a clip takes of the outcomes that a model draws is given back; what it takes of rows that are not as the model says
is given back by nothing, and such rows pull one way: scales come out too small. Rows of real tables are seldom as a
model says. So noisy counts tell how many rows are longer than the model expects, and by how much; a larger bound takes
less of them, and has more noise. Constants were chosen on the half `"seen"` of `benchmarks/real.py`.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from numpyro_dp.preparation.frames import Frame, typical_norm
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.preparation.survey import Survey

LONG_ROWS_SHARE = 0.04
"""Of the budget, for these counts, each time."""
EDGES = 1.6 * 1.75 ** np.arange(5)
"""Bounds of the score that are compared, over the root mean square of a row's norm in a frame that is right."""
_BELIEVED, _BELIEVED_ALONE, _LIKELY = 2.5, 3.5, 1.0
"""Standard deviations of noise from which a count is believed, and with it those of shorter rows: if the next shorter
ones are likely to be there, too; and the shortest ones."""
_CONFIRMED = 3.5
"""Standard deviations from which several counts together are believed. The first is made where tight bounds have led,
which may be some way off, and alone is wrong too often (docs/preparation.md)."""
_LOUDEST = 2.5
"""Noise in each coordinate, in posterior standard deviations, beyond which no bound is raised."""
_LEAST_EXPECTED = 1.0
"""Rows beyond an edge: of a single one nobody can tell whether it is by chance."""
_ONE_WAY = 0.7
"""Of what the clip takes of such rows, about so much does not cancel."""


class LongRows(NamedTuple):
    """What the counts ask for.

    :ivar bound: of the score, over the root mean square of a row's norm; 0 if that for rows as the model says is best.
    :ivar taken: about how far the posterior moves by what that bound still takes, in its standard deviations.
    :ivar counts: so many have been made since there were such rows.
    :ivar clear: shape (edges,): the sum of their counts, each over its standard deviation if the model holds.
    """

    bound: float = 0.0
    taken: float = 0.0
    counts: int = 0
    clear: Any = np.zeros(len(EDGES) - 1)


def count_long_rows(
    survey: Survey, fund: Fund, frame: Frame, rho: float, n: float, off: float, before: LongRows
) -> LongRows:
    """The bound with the least error: of the squares of what it takes, as far as counts tell, and of the noise.

    Where no longer rows are counted than noise and chance may have made, there are taken to be none, unless earlier
    counts have told of some: then what these may hide counts, too. Beyond the last edge there are as many as just below
    it. Where all counts together are not clear, there are none after all.

    :param rho: for the counts.
    :param off: mean square of how far the frame's centre is from the mode, in posterior standard deviations.
    :param before: what earlier counts have told.
    """
    edges = typical_norm(survey.size, survey.power * n) * EDGES
    draw = fund.ask(long_rows=Wish(rho, 1, (len(edges) - 1,)))["long_rows"]
    counts, noise_scale = survey.long_rows(draw, frame, edges)
    scale = np.hypot(noise_scale, np.sqrt(variance_by_chance(n, off)))
    are_known, number, total = before.bound > 0, before.counts + 1, before.clear + counts / scale
    if are_known and np.max(total) < _CONFIRMED * math.sqrt(number):
        return LongRows()
    clear = counts > _BELIEVED * scale
    clear[0] = counts[0] > _BELIEVED_ALONE * scale[0]
    clear[1:] &= counts[:-1] > _LIKELY * scale[:-1]
    believed = np.maximum.accumulate(clear[::-1])[::-1]
    widths = _ONE_WAY * survey.power * np.append(np.diff(edges), edges[-1])
    taken = _from_here(widths * np.append(believed * counts, believed[-1] * counts[-1]))
    hidden = np.append(_from_here((widths[:-1] * scale) ** 2), 0) if are_known else 0.0
    noise = survey.power * edges * math.sqrt(2 * survey.size / fund.left)
    is_quiet = noise < max(_LOUDEST * math.sqrt(survey.size), 1.01 * noise[0])
    best = int(np.argmin(np.where(is_quiet, taken**2 + hidden + noise**2, np.inf)))
    if not (best or are_known):
        return LongRows(taken=float(taken[0]))
    return LongRows(float(EDGES[best]), abs(float(taken[best])), number, total)


def variance_by_chance(n: float, off: float) -> np.ndarray:
    """Of the number of rows beyond each edge but the last, where the model holds.

    The model is private, so this is of rows whose score is that of an exponential outcome, ``x - 1``, which has longer
    tails than most: ``exp(-(1 + edge))`` of them are beyond an edge. Where the frame is off by a posterior standard
    deviation along that score, there are ``sqrt(n) (1 + edge) exp(-(1 + edge))`` more, or fewer.
    """
    beyond = np.exp(-(1 + EDGES[:-1]))
    return np.maximum(n * beyond, _LEAST_EXPECTED) + off * n * ((1 + EDGES[:-1]) * beyond) ** 2


def _from_here(values: np.ndarray) -> np.ndarray:
    """Sums of each value and all behind it."""
    return np.cumsum(values[::-1])[::-1]
