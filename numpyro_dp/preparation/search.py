"""The private search for the posterior: from the prior to a frame in which the posterior is about N(0, I).

Coordinates of the likelihood are phi (`numpyro_dp.model.coordinates`); the prior stays outside, as a rough normal law
of phi that prior draws give. First the scale of each coordinate's derivatives is searched for, so that no coordinate
measured in large units hides the others. Then a round of the search

    1. finds clip bounds for the rows' gradients and information matrices, by noisy binary searches, unless they follow
       from public numbers;
    2. releases the sums of both, clipped;
    3. makes a Fisher scoring step, in which eigenvalues of the information that noise may have made are raised;
    4. compares the step with other lengths, by one noisy release of the log likelihood's rise along it, unless it is no
       longer than noise would make it, or noise would hide the rise;
    5. whitens anew. Where a release cannot tell how much the rows say, the frame keeps the width that it had.

A round costs next to nothing, until a released step is consistent with being there already: then each is paid better
than the one before, until the noise in a step is about a posterior's width and that in the information well below 1.
Constants were chosen on the half `"seen"` of `benchmarks/zoo.py`, but for `_HIDDEN` and `_TOO_WIDE`: by one table of
`wages_after_reform` in `benchmarks/zoo_third.py`.
"""

import math
from typing import NamedTuple

import numpy as np

from numpyro_dp.preparation.first_frame import SPARSE_PRICE, SPARSE_SHARE, first_frame
from numpyro_dp.preparation.frames import SCORE_ROOM, Frame, NormalPrior, typical_norm, within_reason
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.preparation.long_rows import EDGES, LONG_ROWS_SHARE, LongRows, count_long_rows
from numpyro_dp.preparation.shrinkage import noise_left, without_noise
from numpyro_dp.preparation.survey import BOUND_GRID, Bounds, Derivatives, Survey
from numpyro_dp.privacy.draws import Draw

SEARCH_SHARE = 0.5
"""Of the budget, the rounds of the search spend at most so much; counts of long rows may come on top."""
MOST_ROUNDS = 60
EXPECTED_ROUNDS = 8
"""So many rounds are paid for where the table is small."""
RICH, RICH_SHARE = 10.0, 0.05
"""Where so many rounds would cost less than this share of the budget, they are paid better, up to so many times."""
_WORTH_LESS = 8.0
"""The next round has so much less noise than the square of this one's step, if that is no dearer."""
ROUND_SHARE = 0.1
"""Of the budget, for the derivatives of one round, at most."""
GROWTH = 6.0
LINE = 8.0 ** np.arange(1, -8, -1)
"""Multiples of a step that are compared."""
_HIDDEN = 2.0
"""Standard deviations of the noise, by which the gain of a whole step may fall short of what is expected."""
_WITHIN = 3.0
"""No longer step than that to the mode leads where the prior is lower than so many standard deviations of a normal law
away, and those that all coordinates have."""
_UNSEEN = 0.35
"""A clip bound is searched for that so many of the rows exceed."""
_WIDENS = 1 / 16
"""A round raises eigenvalues of the posterior's precision to this, where the frame says 1: an outcome that is all but
certain says nothing about its parameters, and the frame would become as wide as the prior."""
_TOO_WIDE = 2.0
"""Times the information that a row has in a frame that is right: where more is found, the frame becomes narrower."""
_INFORMATION_ROOM = 2.0
"""Over what many rows have, for the bound of the information: norms vary more than those of gradients."""
_QUIET = 1.0
"""Edge of the information's noise above which no bound of it is raised further: it would shorten every step."""
_SCORE_OF_INFORMATION = 2.0
"""Over the root of the information's bound: where that is exceeded, scores are shortened, and few are longer."""
_TAKEN, _MOST_ROOM = 0.75, 16.0
"""If two rounds in a row were near, and the largest precision is below this where the frame says 1, the clip is to
blame: bounds double, up to so many times. Of a rare outcome, a few rows say nearly all; a frame that became wider
instead would clip them the more."""
_MOST_LOSS, _RARE_ROOM = 3.0, 4.0
"""Where the rows would say more than so many times what the clip leaves, bounds have up to that much room."""
_AFFORDABLE, _LEAST_ROOM = 0.12, 2.0
"""Of n rho / m, the square of a room whose noise a round can pay for; where that is less, nobody asks."""
_LARGEST_ROW = 8.0
"""Over the mean trace of a row's information in a frame that is right: what one row counts for there at most."""
_WIDER = 2.0
"""What a step's noise is in the posterior's own standard deviations, over what the released information says: the clip
takes of that, too."""
_STEP_FLOOR = 0.5
"""Of the noise's spectrum: eigenvalues below are raised to it in a step."""
_BLURRED = 0.5
"""A rise along a step whose noise is above this, over the square of the step's length, is not asked for."""
_ROOMIER = 3.0
"""By which bounds become larger at once where rows are longer than the model expects: elsewhere fewer may be."""
FINE_NOISE, FINE_EDGE = 8.0, 1.0
_TOLD_NOISE, _TOLD_EDGE = 16.0, 2.0
"""A round with no more noise, in a step for each coordinate and in the information, is a part of the last release."""
_LEAST, _MOST = 0.15, 5.0
"""Eigenvalues of the posterior's precision in a frame that is right enough, as released; but for what noise makes."""
_USUAL = 1.5
"""More than a third of the rows are hardly ever so many times as long as their root mean square; the grid's steps round
up, by up to the root of 2."""
_LOUD = 30.0
"""A step whose noise is above this, squared and for each coordinate, is not gone without a look at what it gains."""


class Round(NamedTuple):
    """What one round released, in its own frame, and what followed.

    :ivar step: in the frame's coordinates, before its length was chosen.
    :ivar length: multiple of it that was gone.
    :ivar distance: square of the step's length in posterior standard deviations.
    :ivar noise: what the noise adds to that on average.
    :ivar edge: about the largest eigenvalue of the noise in the information, as released (Wigner's semicircle).
    :ivar least, most: smallest and largest eigenvalue of the posterior's precision, as released.
    :ivar usual: a norm that many rows' gradients exceed, over that of a row in a frame that is right; 1 where nobody
        asked, and where it is less.
    """

    frame: Frame
    bounds: Bounds
    found: Derivatives
    step: np.ndarray
    length: float
    distance: float
    noise: float
    edge: float
    least: float
    most: float
    usual: float = 1.0

    @property
    def edge_left(self) -> float:
        """The same of the noise that `without_noise` leaves in it."""
        return noise_left(len(self.step)) * self.edge

    @property
    def is_near(self) -> bool:
        """Whether the step is no longer than noise would make it."""
        return self.distance < expected_square(len(self.step), self.noise)

    @property
    def price_factor(self) -> float:
        """How much better the next round is to be paid.

        More, where noise alone decides on the step, in a frame that is not far from right. Less, where the step is so
        long that a cheaper one would be as good.
        """
        if self.is_near and self.edge < max(4.0, len(self.step)):
            return GROWTH
        return min(max(_WORTH_LESS * self.noise / self.distance, 1 / GROWTH), 1.0)

    @property
    def is_usable(self) -> bool:
        """Whether the frame that follows may be used, should nothing better follow."""
        is_clear = self.noise < _LOUD * len(self.step) and self.edge_left < 2 * FINE_EDGE
        return self.is_near and is_clear and self.most < 2 * _MOST

    @property
    def is_enough(self) -> bool:
        """Whether the last release may be made where this round has led."""
        m = len(self.step)
        is_there = self.distance < 2 * m + self.noise * (1 + 3 * math.sqrt(2 / m))
        settled = is_there and self.length == 1 and self.noise < FINE_NOISE * m
        resolved = self.edge_left < FINE_EDGE and self.least > min(_LEAST, 1 - 1.3 * self.edge)
        return settled and resolved and self.most < _MOST


def expected_square(size: int, noise: float) -> float:
    """The square of a step is hardly above this where it starts from the posterior."""
    return 4 * size + 6 * noise


class Found(NamedTuple):
    """Where the search has ended.

    :ivar frame: in which the posterior is about N(0, I).
    :ivar rounds: what was released on the way.
    :ivar num_rows: n; with noise where it is private.
    :ivar room: of clip bounds, over those of normal covariates, where a few rows say nearly all.
    :ivar of_frames, steepest: of the prior, see `NormalPrior`.
    :ivar long_rows: whether rows are longer than the model expects.
    """

    frame: Frame
    rounds: list[Round]
    num_rows: float
    room: float = 1.0
    of_frames: np.ndarray | float = 0.0
    long_rows: LongRows = LongRows()
    steepest: np.ndarray | float = 0.0

    @property
    def near(self) -> list[Round]:
        """Rounds whose release says as much about the posterior as later ones, for its price."""
        near: list[Round] = []
        if self.long_rows.bound:  # the clip took from them what the last releases leave
            return near
        for here in reversed(self.rounds):
            if not (here.is_near and here.noise < _TOLD_NOISE * len(here.step) and here.edge_left < _TOLD_EDGE):
                break
            near.append(here)
        return near

    @property
    def weight(self) -> float:
        """How often a typical row seems to count, where no model tells and the search asked how long gradients are.

        The information identity says how long they are in a frame that is right, if a row's density is that of a law: a
        row that counts w times (a weight in a `numpyro.factor`) is ``sqrt(w)`` times as long there.
        """
        usual = self.rounds[-1].usual if self.rounds else 1.0
        return usual**2 / BOUND_GRID.ratio if usual > _USUAL else 1.0

    @property
    def has_arrived(self) -> bool:
        """Whether the last round was precise enough, and said so."""
        return bool(self.rounds) and self.rounds[-1].is_enough


class _Prices(NamedTuple):
    """In rho, of the cheap rounds; as said in `search`."""

    bounds: float
    derivatives: float
    line: float


def search(survey: Survey, prior: NormalPrior, near: NormalPrior, fund: Fund, num_rows: int | None) -> Found:
    """Search for the posterior.

    Counts are bought to 7 or 8% of the rows, sums of derivatives to a tenth of what they would be if all rows agreed;
    where that would be more than the search has, to less.

    :param near: where to start, and how wide.
    :param num_rows: n; None if it is private: then it is released.
    """
    m, rho = survey.size, fund.left
    n = float(num_rows) if num_rows is not None else survey.count(fund.ask(count=Wish(0.01 * rho))["count"])
    n = max(n, 1.0)
    allowed = fund.left - (1 - SEARCH_SHARE) * rho
    scales, bounds, derivatives, line = 600 * len(survey.kinds) / n**2, 1100 / n**2, 400 * m / n**2, 2000 / n**2
    cheapest = scales + EXPECTED_ROUNDS * (bounds + derivatives + line)
    factor = min(allowed / cheapest, max(1.0, min(RICH, RICH_SHARE * rho / cheapest)))
    prices = _Prices(*(factor * price for price in (bounds, derivatives, line)))
    of_scales = max(factor * scales, min(SPARSE_PRICE * scales, SPARSE_SHARE * rho))
    frame, prior = first_frame(survey, prior, near, fund, of_scales, n)
    start = Found(frame, [], n, of_frames=prior.of_frames, steepest=prior.steepest)
    rounds: list[Round] = []
    usable = None
    affordable = min(_RARE_ROOM, math.sqrt(_AFFORDABLE * n / survey.power * rho / m))
    room = 1.0  # of clip bounds, over those of normal covariates
    long_rows = LongRows()
    before: Found | None = None  # what was found in a frame in which the clip took most
    worth = 1.0  # of the next round's derivatives, over the cheapest
    while len(rounds) < MOST_ROUNDS:
        price = min(worth * prices.derivatives, ROUND_SHARE * rho)
        if fund.left - (price + prices.bounds + prices.line) < (1 - SEARCH_SHARE) * rho:
            break
        here = _round(survey, prior, fund, frame, prices._replace(derivatives=price), n, rounds, room)
        if rounds and rounds[-1].is_near and here.is_near and here.most + here.edge < _TAKEN:
            room = min(2 * room, _MOST_ROOM)
        if not survey.centres and here.noise < FINE_NOISE * m and affordable > room:
            # From here on what the clip takes would lead astray; further away, noise would.
            room = affordable
        rounds.append(here)
        frame = _next_frame(here, prior)
        usable = frame if here.is_usable else usable
        if here.is_enough:
            if before is not None:
                return start._replace(frame=frame, rounds=rounds, room=affordable)
            # Again where larger bounds have led. There a scale may have grown, by which the same rows look shorter: all
            # counts together decide whether there are such rows.
            had = long_rows.bound
            if survey.centres:
                off = 1 + _WIDER * here.noise / m
                long_rows = count_long_rows(survey, fund, frame, LONG_ROWS_SHARE * rho, n, off, long_rows)
            if long_rows.bound > 1.01 * room * SCORE_ROOM:
                room = min(long_rows.bound, _ROOMIER * max(room * SCORE_ROOM, EDGES[0])) / SCORE_ROOM
                worth = max(worth, room**2)
                continue
            if had or long_rows.bound:
                break
            lost = 1.0
            if survey.centres and affordable >= _LEAST_ROOM:
                lost = _lost(survey, fund, here, prices.line, n)
            if lost < _MOST_LOSS:
                break
            before = start._replace(frame=frame, rounds=list(rounds))
            room = max(room, affordable)
            frame = frame._replace(whitening=np.asarray(here.frame.whitening) / math.sqrt(lost))
        worth = max(worth * here.price_factor, 1.0)
    # Where the budget does not carry the search on from there, nobody knows where it is.
    return before or start._replace(frame=frame if usable is None else usable, rounds=rounds, long_rows=long_rows)


def _lost(survey: Survey, fund: Fund, here: Round, price: float, n: float) -> float:
    """What the rows would say without the clip, over what they say with it.

    Of a rare outcome a few rows say nearly all. In a frame that is too wide the clip takes nearly all of that, and the
    rest fits the frame: no release of clipped sums tells. What a row would say by its law, whatever its outcome is, is
    not rare.
    """
    m = survey.size
    largest = _LARGEST_ROW * m / (survey.power * n)
    draw = fund.ask(unclipped=Wish(price))["unclipped"]
    return survey.unclipped_trace(draw, here.frame, largest) / max(float(np.trace(here.found.information)), m / 2)


def _round(
    survey: Survey,
    prior: NormalPrior,
    fund: Fund,
    frame: Frame,
    prices: _Prices,
    n: float,
    rounds: list[Round],
    room: float,
) -> Round:
    m = survey.size
    frame, bounds, found, usual = _release(survey, fund, frame, prices, n, not rounds or rounds[-1].is_near, room)
    told = without_noise(found.information, found.information_scale)
    edge = noise_edge(found.information_scale, m)
    step, distance, noise = _step(found._replace(information=told), edge, prior, frame)
    length = 1.0
    # Of the rise along the whole step, under replace-one.
    blur = survey.power * float(bounds.score) * np.linalg.norm(step) * math.sqrt(2 * len(LINE) / prices.line)
    is_short = distance < expected_square(m, noise)
    if blur < _BLURRED * distance and (not rounds or not is_short or noise > _LOUD * m):
        draw = fund.ask(line_search=Wish(prices.line, 1, (len(LINE),)))["line_search"]
        length = _length(survey, draw, prior, frame, step, float(bounds.score), distance / 2)
        if length == 0 and is_short and noise < _LOUD * m:
            length = 1.0
    precisions = np.linalg.eigvalsh(found.information + prior.for_next(frame))
    least, most = float(precisions[0]), float(precisions[-1])
    return Round(frame, bounds, found, step, length, distance, noise, edge, least, most, usual)


def _release(
    survey: Survey,
    fund: Fund,
    frame: Frame,
    prices: _Prices,
    n: float,
    is_settled: bool,
    room: float,
) -> tuple[Frame, Bounds, Derivatives, float]:
    """Score and information at the frame's centre, and the clip bounds that they were released with; `Round.usual`.

    Where counts say that rows tell more than they would in a frame that is right, the frame is made narrower before.
    Else the clip would take most of the information, and what is left would hardly narrow the next frame: a scale that
    starts far too large falls in each round, and with it the width of all that it is the scale of.

    :param is_settled: whether rows' norms are about those of a right frame, so that bounds follow from public numbers:
        at the start, where the scales have been searched for, and where no step is left that is longer than the noise.
    """
    m = survey.size
    typical, usual = typical_norm(m, survey.power * n), 1.0
    wishes = {"derivatives": Wish(prices.derivatives, 1, (survey.derivative_numbers(),))}
    if survey.centres and is_settled:
        draws = fund.ask(**wishes)
        bounds = Bounds(room * SCORE_ROOM * typical, room * _INFORMATION_ROOM * typical**2)
    else:
        draws = fund.ask(bounds=Wish(prices.bounds, BOUND_GRID.num_counts, (2,)), **wishes)
        least = 2.0**-16 * np.array([typical, typical**2])
        score, information = survey.bounds(draws["bounds"], frame, least, _UNSEEN * n)
        usual = max(score / typical, 1.0)
        if survey.centres and information > _TOO_WIDE * typical**2:
            too_wide = math.sqrt(information) / typical
            frame = frame._replace(whitening=np.asarray(frame.whitening) / too_wide)
            score, information = score / too_wide, typical**2
        # Where few rows say most (a rare outcome), typical ones say little: no bound is below that of a right frame.
        score, information = max(score, typical), max(_INFORMATION_ROOM * information, typical**2)
        if survey.centres:  # what is taken from the information is taken from the score, too
            quiet = _QUIET * math.sqrt(prices.derivatives / (8 * m)) / survey.power  # half of the price pays for it
            information = min(information, max(quiet, _INFORMATION_ROOM * typical**2))
            score = min(score, _SCORE_OF_INFORMATION * math.sqrt(information))
        if room > 1:
            score = max(score, room * SCORE_ROOM * typical)
        bounds = Bounds(score, information)
    return frame, bounds, survey.derivatives(draws["derivatives"], frame, bounds, 0.5, n), usual


def _step(found: Derivatives, edge: float, prior: NormalPrior, frame: Frame) -> tuple[np.ndarray, float, float]:
    """To the mode of prior and released likelihood, given the score's noise; `Round.distance` and `Round.noise`.

    Where the rows say nothing, a score is noise, and a step that took it for one would leave the prior.
    """
    slope, precision = prior.in_frame(frame)
    values, vectors = np.linalg.eigh(found.information)
    values = np.maximum(values, max(_STEP_FLOOR * edge, _WIDENS))
    whole = (vectors * values) @ vectors.T + precision
    trust = vectors * (values / (values + found.score_scale**2))
    inverse = np.linalg.inv((trust * values) @ vectors.T + precision)
    step = inverse @ (trust @ (vectors.T @ found.score) + slope)
    spread = inverse @ trust
    noise = found.score_scale**2 * np.trace(spread.T @ whole @ spread)
    return step, float(step @ whole @ step), float(noise)


def noise_edge(scale: float, size: int) -> float:
    """About the largest eigenvalue of the noise in an information matrix (Wigner's semicircle)."""
    return scale * math.sqrt(2 * size)


def _known(found: Derivatives, edge: float) -> np.ndarray:
    """The information, but where noise hides it, so much that the frame stays as wide as it is, or widens slowly.

    What noise may have made narrows no frame.
    """
    values, vectors = np.linalg.eigh(without_noise(found.information, found.information_scale))
    clear = np.sqrt(np.maximum(values**2 - edge**2, 1))
    values = np.minimum(values, clear)
    return (vectors * np.maximum(values, min(1.0, max(edge / 4, _WIDENS)))) @ vectors.T


def _next_frame(here: Round, prior: NormalPrior) -> Frame:
    frame = here.frame
    values, vectors = np.linalg.eigh(_known(here.found, here.edge) + prior.for_next(frame))
    whitening = np.asarray(frame.whitening)
    center = frame.center + whitening @ (here.length * here.step)
    return Frame(center, within_reason(whitening @ (vectors / np.sqrt(values)), prior))


def _length(
    survey: Survey,
    draw: Draw,
    prior: NormalPrior,
    here: Frame,
    step: np.ndarray,
    bound: float,
    expected: float,
) -> float:
    """Which multiple of the step to go: the largest whose gain is clear, and not far less so than that of the clearest.

    Along a parabola the gain of the whole step is half as clear as that of a tiny one. So where noise could hide what
    is expected, the whole step is gone all the same. 0 if no gain is clear.

    :param expected: gain of the whole step.
    """
    start = np.asarray(here.center)
    ends = start + LINE[:, None] * (np.asarray(here.whitening) @ step)
    # The linear part of a row's rise is at most this; a row that falls by more is counted as falling by that much.
    largest = np.maximum(bound * np.linalg.norm(step) * LINE, 1e-30)
    gains, scales = survey.gains(draw, start, ends, largest)
    gains = gains + [prior.log_density(end) - prior.log_density(start) for end in ends]
    away = [math.sqrt(max(-2 * prior.log_density(place), 0.0)) for place in (start, *ends)]
    # The prior's tails are not known there, nor may the likelihood be computed with any precision.
    leaves = (LINE > 1) & (np.array(away[1:]) > max(_WITHIN + math.sqrt(len(step)), away[0]))
    clear = np.where(leaves, 0.0, gains / scales)
    worth = clear > max(0.25 * clear.max(), 1.0)
    worth |= (LINE == 1) & (gains > expected - _HIDDEN * scales)
    return float(LINE[int(np.argmax(worth))]) if worth.any() else 0.0
