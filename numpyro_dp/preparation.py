"""The private preparation: from a data-free start to whitened coordinates and clip bounds, paid from the budget.

Coordinates of the likelihood are phi (`numpyro_dp.cut`); the prior stays outside, as a rough normal law of phi that
prior draws give. A round of the search for the posterior

    1. finds clip bounds for the rows' gradients and Hessians, by noisy binary searches (quantiles of their norms);
    2. releases the noisy sum of the clipped gradients, and that of the clipped Hessians;
    3. makes a Newton step, in which eigenvalues of the curvature that noise may have made are raised;
    4. compares the step with other lengths, by one noisy release of the log likelihood's rise along it;
    5. whitens: coordinates in which the posterior would be about N(0, I).

Then a check releases how far the log likelihood is from its quadratic expansion at public points of about posterior
width. What follows is decided by released numbers only, and paid from a reserve of fixed size; so that stages of fixed
cost follow one another, and ordinary adaptive composition holds (Dong, Roth and Su 2022, Theorem 4). No round is left
out when all goes well: its noisy derivatives are not lost, but combined with the later ones.

Shares of the budget and thresholds (`Preparation`) come from a random search over all of them at once on simulated
logistic, Poisson, negative binomial and Student-t regressions, where the optimum is flat; the rounds' growth from
`benchmarks/small_eps.py`; those of the last release, which matter most, from `Preparation.resolved`.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import least_squares

from numpyro_dp.cut import Cut
from numpyro_dp.kernels.survey import Frame, Survey
from numpyro_dp.kernels.target import Draw, Grid
from numpyro_dp.ledger import PrivacyBudgetError
from numpyro_dp.planning import (
    MAX_CURVATURE_NOISE,
    MAX_UNSEEN,
    ROUGH_ERROR,
    TYPICAL_CLIP,
    curvature_noise,
    released_error,
    tight_slope,
    unseen_rows,
    walk_draws,
)
from numpyro_dp.surrogate import Surrogate
from numpyro_dp.symmetry import Symmetry

WIDE = Grid(2.0, 6)
NARROW = Grid(2**0.125, 7, no_rows=4.0)
CHECK_GRID = Grid(2.0, 6)
_SMALLEST = 2.0**-16  # of a bound, in prior standard deviations: with less, even a million rows say little
_WIDE_ROUNDS = 2  # after them, bounds are near the last ones
MOST_ROUNDS, LEAST_ROUNDS = 5, 3
MAX_UNSEEN_AT_FIRST = 2 / 3
"""Of all rows, so many may pass for none in the first search for clip bounds."""
_BELOW = 2.0**-6  # the narrow grid starts so far below the last bound, and ends at 2**9.875 times it


# Eigenvalues below the edge of the noise's spectrum are not known. A step raises them so that noise does not lead it
# astray; coordinates raise them less, so that in the next ones they can be told from noise.
_STEP_FLOOR, _WHITENING_FLOOR = 0.5, 0.3

MIN_WALK_DRAWS = 5.0
"""Independent draws that a random walk must be worth, as foreseen."""

LINE = np.array([1.0, 0.4, 0.16, 0.064])
"""Multiples of a Newton step that are compared."""

# Clipped gradients are those of surprising rows, and pull one way: coefficients of a logistic regression come out too
# large, scales too small, and intervals cover too little. Centred, they do not (`centred_gradient`). Where the model
# cannot tell what the clip takes, bounds leave room instead, so that fewer rows are clipped. Of its standard deviations
# a normal law's scale was 3.4, 1.6 and .5 too small with 1.25 times the room (n = 5,000, 20,000, 100,000; eps = 1), and
# 1.0, .4 and -.4 with twice the room.
_ROOM = np.array([2.0, 1.0])

CHECK_POINTS = 16


@dataclasses.dataclass(frozen=True)
class Preparation:
    """How the budget is spent before a chain runs, and what is known without asking the table.

    Shares are fractions of the budget in rho. What `locate` and `check` leave is the reserve, of which the chain or the
    last release is paid.

    :param locate: share of all rounds together. Default by `resolved`.
    :param rounds: how many. Default by `resolved`: 5, or fewer where the first would see nothing.
    :param growth: each round gets so many times what the one before got.
    :param bounds, gradient, curvature, line: a round's split; they add up to 1.
    :param check: share of the check.
    :param final_bounds, final_curvature: of what is left, if the last release takes it all; the gradient gets the rest.
        `final_curvature` by default by `resolved`.
    :param start: a public guess of the posterior's place: unconstrained values by site.
    :param scales: public guesses of its width, in unconstrained space: a number for each site, or an array of its
        shape. With both given, a public start replaces the prior's place and width in the search, not in the posterior.
    :param mode: instead of letting the check decide: "surrogate", "residual" or "walk".
    :param force: go on where the size of the table and the budget promise no useful posterior.
    """

    locate: float | None = None
    rounds: int | None = None
    growth: float = 3.0
    bounds: float = 0.2
    gradient: float = 0.49
    curvature: float = 0.13
    line: float = 0.18
    check: float = 0.03
    final_bounds: float = 0.05
    final_curvature: float | None = None
    start: Mapping[str, Any] | None = None
    scales: Mapping[str, Any] | None = None
    mode: str | None = None
    force: bool = False

    def __post_init__(self):
        if self.mode not in (None, *MODES):
            raise ValueError(f"mode must be None or one of {', '.join(map(repr, MODES))}, got {self.mode!r}")
        for name in ("locate", "check", "final_bounds", "final_curvature"):
            share = getattr(self, name)
            if share is not None and not 0 < share < 1:
                raise ValueError(f"{name} must lie strictly between 0 and 1, got {share}")
        split = (self.bounds, self.gradient, self.curvature, self.line)
        if min(split) <= 0 or not math.isclose(sum(split), 1, abs_tol=1e-6):
            raise ValueError(f"bounds, gradient, curvature and line must be positive and add up to 1, got {split}")
        rounds = 1 if self.rounds is None else self.rounds
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise ValueError(f"rounds must be a positive integer, got {self.rounds!r}")
        if not 0 < self.growth < math.inf:
            raise ValueError(f"growth must be positive, got {self.growth}")
        for one, other in (("final_bounds", "final_curvature"), ("locate", "check")):
            if (getattr(self, one) or 0) + (getattr(self, other) or 0) >= 1:
                raise ValueError(f"{one} and {other} leave nothing: {getattr(self, one)} + {getattr(self, other)}")

    def resolved(self, size: int, num_rows: int | None, power: float, rho: float) -> "Preparation":
        """With the shares and the number of rounds that are not given, by public numbers.

        The error of the posterior's place has a part from the final gradient's noise, of variance ``a / (1 - h)`` if
        the curvature gets the share h, and one from the curvature's noise, ``b / h``, which grows with the distance
        that is left to go: the best h is ``r / (1 + r)`` with ``r**2 = b / a``. With clip bounds of 2.5 and 3 times a
        typical row's derivatives in whitened coordinates, ``sqrt(size / n)`` and ``size / n``, and the distance that
        the last round's noise leaves, ``r = 22 size**1.5 / (n sqrt(rho))``. Where r is large, more than three
        tenths for the curvature did not pay (d = 20). Where it is small, little is needed to locate, but the last
        round's derivatives are not lost, and the nearer the last release is to the posterior, the less the third
        derivatives matter, which no release knows (rare outcomes, d = 20: coverage).

        The first rounds get the least. One whose search for clip bounds takes most rows for none leads astray.

        :param size: number of parameters.
        :param num_rows: n; None if it is private.
        :param power: of the likelihood.
        :param rho: the whole budget.
        """
        r = 0.2 if num_rows is None else 22 * size**1.5 * power / (num_rows * math.sqrt(rho))
        curvature = min(max(r / (1 + r), 0.05), 0.3, 0.95 - self.final_bounds)
        locate = min(max(0.1 + r, 0.25), 0.4, 0.9 - self.check)
        resolved = dataclasses.replace(
            self,
            locate=locate if self.locate is None else self.locate,
            rounds=MOST_ROUNDS if self.rounds is None else self.rounds,
            final_curvature=curvature if self.final_curvature is None else self.final_curvature,
        )
        while self.rounds is None and resolved._is_blind_at_first(num_rows, rho):
            resolved = dataclasses.replace(resolved, rounds=resolved.num_rounds - 1)
        return resolved

    def _is_blind_at_first(self, num_rows: int | None, rho: float) -> bool:
        if num_rows is None or self.num_rounds == LEAST_ROUNDS:
            return False
        share = self.bounds * self.round_shares[0]
        return unseen_rows(share * rho, 2 * WIDE.num_counts, float(WIDE.no_rows)) > MAX_UNSEEN_AT_FIRST * num_rows

    @property
    def num_rounds(self) -> int:
        """How many rounds the search has, once that is resolved."""
        assert self.rounds is not None
        return self.rounds

    @property
    def round_shares(self) -> np.ndarray:
        """Share of the budget of each round."""
        weights = self.growth ** np.arange(self.num_rounds)
        return (self.locate or 0.0) * weights / weights.sum()

    @property
    def reserve(self) -> float:
        """Share that is left for what follows."""
        return 1 - (self.locate or 0.0) - self.check


MODES = ("surrogate", "residual", "walk")


class Shares(NamedTuple):
    """One kind of release in the preparation: how many in each stage, and the share of the budget of each stage."""

    counts: tuple[int, ...]
    shares: tuple[float, ...]


def preparation_releases(options: Preparation) -> dict[str, Shares]:
    """What the preparation releases up to the check."""
    rounds = options.round_shares
    grids = [_grid(r) for r in range(options.num_rounds)]
    split = options.bounds, options.gradient, options.curvature, options.line
    bounds, gradient, curvature, line = (tuple(map(float, part * rounds)) for part in split)
    once = (1,) * options.num_rounds
    return {
        "bounds": Shares(tuple(2 * grid.num_counts for grid in grids), bounds),
        "gradient": Shares(once, gradient),
        "curvature": Shares(once, curvature),
        "line search": Shares(once, line),
        "check bound": Shares((CHECK_GRID.num_counts,), (options.check / 4,)),
        "check": Shares((1,), (options.check * 3 / 4,)),
    }


class NormalPrior(NamedTuple):
    """A rough normal law of phi, from prior draws; it guides the search and enters no posterior."""

    mean: np.ndarray
    covariance: np.ndarray


def rough_normal(draws: np.ndarray) -> NormalPrior:
    """Median and covariance of `draws` (k, m), with values beyond 6 robust standard deviations pulled in."""
    draws = draws[np.isfinite(draws).all(1)]
    median = np.median(draws, 0)
    scale = np.subtract(*np.percentile(draws, [75, 25], 0)) / 1.349
    scale = np.maximum(scale, 1e-6 * np.maximum(np.abs(median), 1))
    scaled = np.clip((draws - median) / scale, -6, 6)
    covariance = np.cov(scaled, rowvar=False).reshape(scaled.shape[1], -1) + 1e-3 * np.eye(scaled.shape[1])
    return NormalPrior(median, scale[:, None] * covariance * scale)


class Round(NamedTuple):
    """What one round released, in its own frame."""

    frame: Frame
    score: np.ndarray
    score_scale: float
    curvature: np.ndarray
    curvature_scale: float
    bounds: np.ndarray
    centred: bool


Ask = Callable[[str, int, int, tuple[int, ...]], Draw]
"""``(kind, stage, number, shape of one) -> draws``, charged to the budget."""


def locate(survey: Survey, prior: NormalPrior, ask: Ask, options: Preparation, rho: float) -> tuple[Frame, list[Round]]:
    """The search for the posterior: a frame in which it is about N(0, I), and what was released on the way.

    :param rho: the whole budget.
    """
    frame = Frame(prior.mean, np.linalg.cholesky(prior.covariance))
    precision = np.linalg.inv(prior.covariance)
    rounds: list[Round] = []
    for r, share in enumerate(options.round_shares * rho):
        last = rounds[-1].bounds if r >= _WIDE_ROUNDS else None
        draws = ask("bounds", r, 2 * _grid(r).num_counts, ())
        bounds = _find_bounds(survey, draws, frame, last, (share * options.gradient, share * options.curvature))
        centred = survey.centres and last is not None  # far away, a model's outcomes are not those of the rows
        bounds = bounds if centred or last is None else bounds * _ROOM
        here = _derivatives(survey, ask, frame, bounds, ("gradient", "curvature"), r, centred)
        rounds.append(here)
        edge = _edge(here.curvature_scale, survey.size)
        of_prior = frame.whitening.T @ precision @ frame.whitening
        slope = here.score + frame.whitening.T @ precision @ (prior.mean - frame.center)
        step = np.linalg.solve(_raised(here.curvature, _STEP_FLOOR * edge) + of_prior, slope)
        length = _line_search(survey, ask("line search", r, 1, (len(LINE),)), here, step, prior.mean, precision)
        values, vectors = np.linalg.eigh(_raised(here.curvature, _WHITENING_FLOOR * edge) + of_prior)
        frame = Frame(frame.center + frame.whitening @ (length * step), frame.whitening @ (vectors / np.sqrt(values)))
    return frame, rounds


def _grid(r: int) -> Grid:
    return WIDE if r < _WIDE_ROUNDS else NARROW


def _find_bounds(survey: Survey, draws: Draw, frame: Frame, last: np.ndarray | None, rhos: tuple) -> np.ndarray:
    """Bounds at which so many rows are clipped that what they lose weighs about as much as the noise."""
    thresholds = _thresholds(survey.size, rhos)
    if last is None:
        return survey.bounds(draws, frame, (WIDE, WIDE), (_SMALLEST, _SMALLEST), thresholds)
    smallest = float(_BELOW * last[0]), float(_BELOW * last[1])
    return survey.bounds(draws, frame, (NARROW, NARROW), smallest, thresholds)


def _thresholds(m: int, rhos: tuple[float, float]) -> tuple[float, float]:
    """How many rows' gradients and Hessians may be clipped."""
    return 4.5 * math.sqrt(2 * m / rhos[0]), math.sqrt(m * (m + 1) / rhos[1])


def _derivatives(
    survey: Survey, ask: Ask, frame: Frame, bounds: np.ndarray, kinds: tuple[str, str], stage: int, centred: bool
) -> Round:
    m = survey.size
    draws = [_only(ask(kind, stage, 1, (w,))) for kind, w in zip(kinds, (m, m * (m + 1) // 2), strict=True)]
    score, score_scale, hessian, curvature_scale = survey.derivatives((draws[0], draws[1]), frame, bounds, centred)
    return Round(frame, score, score_scale, -hessian, curvature_scale, bounds, centred)


def _line_search(survey: Survey, draws: Draw, here: Round, step: np.ndarray, mean: np.ndarray, precision) -> float:
    """Which multiple of the step to go: the step itself, unless another is better by two standard deviations."""
    start = np.asarray(here.frame.center)
    ends = start + LINE[:, None] * (here.frame.whitening @ step)
    # The linear part of a row's rise is at most this; a row that falls by more is counted as falling by that much.
    largest = np.maximum(here.bounds[0] * np.linalg.norm(step) * LINE, 1e-30)
    gains, scales = survey.gains(_only(draws), start, ends, largest)

    def log_prior(phi: np.ndarray) -> float:
        return -(phi - mean) @ precision @ (phi - mean) / 2

    gains = gains + [log_prior(end) - log_prior(start) for end in ends]
    best = int(np.argmax(gains))
    whole = gains[0] > gains[best] - 2 * math.hypot(scales[0], scales[best]) and gains[0] > -2 * scales[0]
    return float(LINE[0 if whole else best])


def _edge(scale: float, size: int) -> float:
    """About the largest eigenvalue of the noise in a curvature (Wigner's semicircle)."""
    return scale * math.sqrt(2 * size)


def _raised(curvature: np.ndarray, floor: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(curvature)
    return (vectors * np.maximum(np.abs(values), floor)) @ vectors.T


class Check(NamedTuple):
    """How far the log likelihood is from a quadratic, at points of about posterior width.

    :ivar spread: standard deviation of the residual over the points, noise taken off.
    :ivar scale: standard deviation of the noise in it.
    """

    spread: float
    scale: float


def check(survey: Survey, frame: Frame, last: Round, ask: Ask) -> Check:
    """Release the residuals of the expansion at public points ``u ~ N(0, I)``."""
    points = np.random.default_rng(0).standard_normal((CHECK_POINTS, survey.size))
    # In this frame derivatives are about as large as they were in the last one.
    bounds = 2 * last.bounds
    bound = survey.residual_bound(
        ask("check bound", 0, CHECK_GRID.num_counts, ()), frame, bounds, points, CHECK_GRID, 2.0**-40, 1.0
    )
    found, scale = survey.residuals(_only(ask("check", 0, 1, (CHECK_POINTS,))), frame, bounds, points, bound)
    variance = max(np.var(found, ddof=1) - scale**2, 0.0)
    return Check(math.sqrt(variance), scale)


FINAL_STAGES = (1 / 3, 2 / 3)
"""Shares of the last releases: the second is made around the mode that the first one gives."""

MADE_UP_FOR = 4.0
"""A release around a mode makes up for so much of the way that led there."""

COMBINED = 2
"""Rounds that the last releases are combined with."""


def final_stages(alone: bool) -> tuple[float, ...]:
    """Shares of the last releases; if it stands `alone`, there is one, since nothing of a first one would be kept."""
    return (1.0,) if alone else FINAL_STAGES


def final_releases(
    survey: Survey,
    frame: Frame,
    rounds: list[Round],
    prior: NormalPrior,
    ask: Ask,
    options: Preparation,
    rho: float,
    alone: bool,
) -> tuple[Surrogate, Round, float, float]:
    """The surrogate, the derivatives that were released last for it, its `distance_to_mode` and its `disagreement`.

    :param rounds: of the search.
    :param rho: for all of it.
    :param alone: whether the rows' residuals will be given back. They know what the last clip has taken, but nothing of
        those before, nor of centres: the release is then not combined with others, and not centred.
    """
    curvature = options.final_curvature or 0.0
    gradient = 1 - options.final_bounds - curvature
    centred = survey.centres and not alone
    bounds, earlier, distance = rounds[-1].bounds, [] if alone else rounds[-COMBINED:], 0.0
    for stage, share in enumerate(final_stages(alone)):
        draws = ask("final bounds", stage, 2 * NARROW.num_counts, ())
        bounds = _find_bounds(survey, draws, frame, bounds, (gradient * share * rho, curvature * share * rho))
        bounds = bounds if centred else bounds * _ROOM
        here = _derivatives(survey, ask, frame, bounds, ("final gradient", "final curvature"), stage, centred)
        surrogate = combine(here, earlier)
        distance = max(distance / MADE_UP_FOR, distance_to_mode(surrogate, prior))
        earlier, frame = [*earlier, here], recentred(surrogate, prior)
    return surrogate, here, distance, disagreement(surrogate, here)


def combine(here: Round, earlier: list[Round]) -> Surrogate:
    """One surrogate in the frame of `here`, from releases in several frames, weighted by their precision.

    A score that was taken elsewhere is carried over with the curvature; what that may be wrong by is counted as noise.
    """
    m = len(here.score)
    weight, total = 1 / here.curvature_scale**2, here.curvature / here.curvature_scale**2
    moved = []
    for other in earlier:
        # In their coordinates a point is other.whitening @ v: v = change @ u, up to the shift.
        change = np.linalg.solve(other.frame.whitening, here.frame.whitening)
        shift = np.linalg.solve(here.frame.whitening, other.frame.center - here.frame.center)
        scale = other.curvature_scale * np.linalg.norm(change, 2) ** 2
        total = total + change.T @ other.curvature @ change / scale**2
        weight += 1 / scale**2
        moved.append((other, change, shift))
    scale = weight**-0.5
    curvature = _at_least(total / weight, _edge(scale, m))
    precision, score = np.eye(m) / here.score_scale**2, here.score / here.score_scale**2
    for other, change, shift in moved:
        too_far = np.linalg.norm(shift) > 3 * math.sqrt(m) + 3 * here.score_scale
        if too_far or other.centred != here.centred:  # for the curvature to carry it; or biased by the clip
            continue
        noise = other.score_scale**2 * change.T @ change
        noise += (other.curvature_scale**2 + scale**2) * (shift @ shift) * np.eye(m)
        other_precision = np.linalg.inv(noise)
        precision = precision + other_precision
        score = score + other_precision @ (change.T @ other.score + curvature @ shift)
    covariance = np.linalg.inv(precision)
    return Surrogate(here.frame, covariance @ score, covariance, curvature, float(scale))


def disagreement(surrogate: Surrogate, here: Round) -> float:
    """By how much the curvature that was released last is not the one that all releases have together, noise aside.

    The largest eigenvalue of the difference, in coordinates in which the posterior's precision is about 1. Where the
    log likelihood is no quadratic, curvatures at the places of the releases differ.
    """
    m = len(here.score)
    noise = math.sqrt(max(here.curvature_scale**2 - surrogate.curvature_scale**2, 0.0))
    # The surrogate's eigenvalues were raised to what noise may make.
    last = _at_least(here.curvature, _edge(surrogate.curvature_scale, m))
    largest = float(np.linalg.norm(last - surrogate.curvature, 2))
    return max(largest - 2 * _edge(noise, m), 0.0)


def _at_least(curvature: np.ndarray, floor: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(curvature)
    return (vectors * np.maximum(values, floor)) @ vectors.T


def _only(draws: Draw) -> Draw:
    """The one draw of a batch of one."""
    return jax.tree.map(lambda leaf: leaf[0], draws)


def recentred(surrogate: Surrogate, prior: NormalPrior) -> Frame:
    """The frame around the surrogate's mode, in which the posterior would be about N(0, I)."""
    frame, (shift, precision) = surrogate.frame, _mode(surrogate, prior)
    values, vectors = np.linalg.eigh(precision)
    return Frame(frame.center + frame.whitening @ shift, frame.whitening @ (vectors / np.sqrt(values)))


def _mode(surrogate: Surrogate, prior: NormalPrior) -> tuple[np.ndarray, np.ndarray]:
    """The mode of the surrogate times the prior, and their precision, in the surrogate's frame."""
    frame = surrogate.frame
    precision = frame.whitening.T @ np.linalg.inv(prior.covariance) @ frame.whitening
    slope = surrogate.score + precision @ np.linalg.solve(frame.whitening, prior.mean - frame.center)
    whole = np.asarray(surrogate.curvature + precision)
    return np.linalg.solve(whole, slope), whole


def distance_to_mode(surrogate: Surrogate, prior: NormalPrior) -> float:
    """How far the surrogate's mode is from where it was expanded, relative to what its noise explains.

    The check looks around the point of expansion: it says nothing about a mode much further away.
    """
    shift, _ = _mode(surrogate, prior)
    noise = max(1.0, math.sqrt(np.trace(surrogate.score_covariance) / len(shift)))
    return float(np.linalg.norm(shift) / (math.sqrt(len(shift)) * noise))


def start_near(
    cut: Cut, frame: Frame, surrogate: Surrogate | None, z_prior: NormalPrior
) -> tuple[np.ndarray, np.ndarray]:
    """A point near the posterior, and its covariance there, by Gauss-Newton with a rough normal prior of z.

    Not the mode: where group effects have a prior of unknown scale, that is at scale 0.
    """
    inverse = np.linalg.inv(frame.whitening)
    root_prior = np.linalg.inv(np.linalg.cholesky(z_prior.covariance))
    dtype = jnp.result_type(float)
    phi, slope = jax.jit(cut.coordinates), jax.jit(jax.jacobian(cut.coordinates))
    shift = np.zeros(cut.size)
    if surrogate is not None:  # from the frame's centre to where the surrogate's mode would be
        information = surrogate.curvature + surrogate.score_covariance
        solved = surrogate.curvature @ np.linalg.solve(information, surrogate.curvature)
        shift = np.linalg.solve(
            solved + 1e-3 * np.eye(cut.size), surrogate.curvature @ np.linalg.solve(information, surrogate.score)
        )

    def misfit(z: np.ndarray) -> np.ndarray:
        u = inverse @ (np.asarray(phi(jnp.asarray(z, dtype)), float) - frame.center)
        return np.concatenate([u - shift, root_prior @ (z - z_prior.mean)])

    def jacobian(z: np.ndarray) -> np.ndarray:
        return np.concatenate([inverse @ np.asarray(slope(jnp.asarray(z, dtype)), float), root_prior])

    start = least_squares(misfit, z_prior.mean, jacobian, max_nfev=200).x
    root = jacobian(start)
    return start, np.linalg.inv(root.T @ root)


class Mirror(NamedTuple):
    """Other parameters at which prior and likelihood are the same as where the draws are.

    :ivar what: what is exchanged or changes its sign.
    :ivar distance: how far they are, in standard deviations of the released likelihood.
    """

    what: str
    distance: float


def find_mirror(symmetries: Sequence[Symmetry], cut: Cut, surrogate: Surrogate, start: np.ndarray) -> Mirror | None:
    """The posterior's hump that is furthest from the one that was released, if any is so far that they do not merge.

    Two places whose middle the posterior is around are apart by noise only: in k coordinates about ``2 sqrt(k)``.

    :param start: unconstrained parameters near the posterior.
    """

    def coordinates(z: np.ndarray) -> np.ndarray:
        return np.asarray(cut.coordinates(jnp.asarray(z, jnp.result_type(float))), float)

    if not symmetries:
        return None
    here, found = coordinates(start), []
    of_noise = np.linalg.pinv(surrogate.curvature + surrogate.score_covariance, hermitian=True)
    for symmetry in symmetries:
        way = coordinates(symmetry.image(start)) - here
        changed = np.sum(np.abs(way) > 1e-4 * np.abs(here))
        slope = surrogate.curvature @ np.linalg.solve(surrogate.frame.whitening, way)
        distance = math.sqrt(max(slope @ of_noise @ slope, 0.0))
        if distance > 2 * (math.sqrt(changed) + _APART):
            found.append(Mirror(symmetry.what, distance))
    return max(found, key=lambda mirror: mirror.distance, default=None)


_APART = 2.0


def unseen_share(num_rows: int, rho: float, options: Preparation) -> float:
    """Share of the rows that a search for clip bounds may take for none, by public numbers only.

    :param num_rows: n.
    :param rho: the whole budget.
    """
    share = min(options.bounds * options.round_shares[-1], options.final_bounds * options.reserve * FINAL_STAGES[-1])
    if share == 0:
        return math.inf
    return unseen_rows(share * rho, 2 * NARROW.num_counts, float(NARROW.no_rows)) / num_rows


def require_sight(num_rows: int, rho: float, options: Preparation, eps: float) -> None:
    """Refuse a table in which a search for clip bounds cannot tell many rows from none, by public numbers only.

    It would end at bounds far below the rows; what is clipped there is released with little noise, and believed.

    :param num_rows: n.
    :param rho: the whole budget.
    :raises PrivacyBudgetError: if it is too small.
    """
    unseen = unseen_share(num_rows, rho, options)
    if unseen > MAX_UNSEEN:
        raise PrivacyBudgetError(
            f"eps={eps:g} with {num_rows:.6g} rows is too little to find clip bounds by: under the noise of the counts "
            f"up to {unseen * num_rows:.2g} rows would pass for none. Nothing was released. Raise eps, or give bounds "
            "that are known to be right to a kernel without preparation (prepare=False), or go on all the same with "
            "`prepare=Preparation(force=True)`"
        )


def require_hope(size: int, num_rows: float, rho: float, options: Preparation, eps: float) -> None:
    """Refuse a run from which no useful posterior can come, by public numbers only.

    :param size: m, coordinates in which the parameters meet the data.
    :param num_rows: n over the power of the likelihood.
    :param rho: the whole budget.
    :raises PrivacyBudgetError: if the curvature's noise would drown it; for a walk, if all its steps together would be
        worth less than `MIN_WALK_DRAWS` independent draws.
    """
    curvature, shift = curvature_noise(size, num_rows, rho), released_error(size, num_rows, rho)
    if curvature > MAX_CURVATURE_NOISE:
        raise PrivacyBudgetError(
            f"eps={eps:g} with {num_rows:.6g} rows cannot give a posterior of the {size} numbers in which this model's "
            f"parameters meet the data: noise would be about {curvature:.2g} of the curvature, and would shift the "
            f"posterior by about {shift:.2g} standard deviations. Nothing was released. Raise eps "
            "(`numpyro_dp.plan` says how far), use fewer parameters, or go on all the same with "
            "`prepare=Preparation(force=True)`"
        )
    draws = walk_draws(TYPICAL_CLIP * tight_slope(num_rows, size), size, options.reserve * rho)
    if options.mode == "walk" and draws < MIN_WALK_DRAWS:
        raise PrivacyBudgetError(
            f"eps={eps:g} with {num_rows:.6g} rows pays for a random walk worth about {draws:.2g} independent draws of "
            f"the {size} numbers in which this model's parameters meet the data. Nothing was released. DPHMC can do "
            "with less: it releases the likelihood once. Or raise eps, temper the likelihood (n0, power), or go on all "
            "the same with `prepare=Preparation(force=True)`"
        )


def warn_if_blurred(size: int, num_rows: float, rho: float, options: Preparation, eps: float) -> None:
    """Warn of a release whose noise will leave little of the posterior, by public numbers only.

    :param size, num_rows, rho: as in `require_hope`.
    """
    shift = released_error(size, num_rows, rho)
    if options.mode != "walk" and shift > ROUGH_ERROR:
        warnings.warn(
            f"eps={eps:g} with {num_rows:.6g} rows will give a blurred posterior of the {size} numbers in which this "
            f"model's parameters meet the data: noise shifts it by about {shift:.2g} of its standard deviations, and "
            f"makes it about {math.hypot(1, shift):.2g} times as wide. `numpyro_dp.plan` says from which eps or number "
            "of rows on it works",
            stacklevel=2,
        )
