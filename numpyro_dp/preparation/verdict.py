"""Whether released numbers vouch for the posterior, and if not, why.

Each reason compares a released number with what it would be if all were well, and with the noise in it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from scipy.special import chdtrc

from numpyro_dp.model.coordinates import Cut
from numpyro_dp.model.symmetry import Symmetry
from numpyro_dp.preparation.combination import LastRelease
from numpyro_dp.preparation.frames import Frame, NormalPrior
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.preparation.last_release import recentred, unresolved, way_from
from numpyro_dp.preparation.long_rows import EDGES
from numpyro_dp.preparation.search import Found
from numpyro_dp.preparation.surrogate import Surrogate
from numpyro_dp.preparation.survey import CURVE_GRID, Fit, Survey
from numpyro_dp.statements import some_of

FIT_SHARE = 0.1
"""Of the budget, for the last look at the rows."""
_BOUND_SHARE = 0.3
"""Of that, for a bound of the rows' distances from their tangents."""
_POINTS = 4  # pairs of them
_LEAST_VARIANCE, _MOST_VARIANCE = 0.3, 3.0
_OF_SAMPLING = 0.12
"""Standard deviation of whether a row is outlying, less the share of eight others that are, if the nine are alike and
their law has tails as long as an exponential one. A single scale has .15, the longest of usual laws .18: there
`CLEAR_OUTLYING` has false alarms in up to 1% of the runs."""


class Check(NamedTuple):
    """What released numbers say about a surrogate; all of it would be about as named if the surrogate were right.

    :ivar has_arrived: whether the search for the posterior ended with a step of no significance: yes.
    :ivar moved: how far the mode moved between the last two releases, as a chi-square statistic over its degrees of
        freedom: 1.
    :ivar chance: how often noise alone would move it so far.
    :ivar reach: length of that move over the square root of the number of coordinates, in posterior standard
        deviations: about 1, or what the noise makes of it.
    :ivar unresolved: the largest part of a coordinate's precision that the information's noise may have made: below 1.
    :ivar clipped: share of the rows that were clipped beyond what the model expects: 0; None where no model tells.
    :ivar outlying: the same of rows that are far further out than the outcomes that the model draws for them.
    :ivar clipped_noise, outlying_noise: standard deviations of the noise in these; of the rows' own chance, too, in the
        second.
    :ivar variance: of the clipped scores over the information, as released: that of the surrogate, but where it has 1.
    :ivar varied: by how many standard deviations of noise the clipped scores vary by more than half of what the model
        expects; None where no model tells.
    :ivar curve: by how much the log likelihood is above the surrogate's, at each of some points of about a posterior's
        width: 0.
    :ivar curve_noise: standard deviation of the noise in it.
    :ivar lost: share of the rows with kinks that were clipped, where nobody knows what that takes: 0; None elsewhere.
    :ivar shortened: share of the rows that were clipped, where they have no kinks and no model tells how many are: few.
    :ivar taken: about how far the clip still moves the posterior by what it takes of rows that are longer than the
        model expects, in standard deviations of the noise-aware posterior: 0.
    :ivar room: the score's bound, over the least that it ever has, where rows are longer than the model expects: what
        it takes of each is so many times as long. 1 where outcomes can have few values: such rows are not far out.
    :ivar width: of the posterior, in units of these points' distance: 1, or less where clipped scores vary less.
    """

    has_arrived: bool
    moved: float
    chance: float
    reach: float
    unresolved: float
    clipped: float | None
    outlying: float | None
    clipped_noise: float
    outlying_noise: float
    variance: float
    varied: float | None
    curve: np.ndarray
    curve_noise: float
    width: float = 1.0
    lost: float | None = None
    shortened: float | None = None
    taken: float = 0.0
    room: float = 1.0


def check(
    survey: Survey,
    found: Found,
    surrogates: Sequence[Surrogate],
    stages: Sequence[LastRelease],
    prior: NormalPrior,
    fund: Fund,
    rho: float,
) -> tuple[Check, Surrogate]:
    """Look at the rows once more; also the surrogate, with the variance of the clipped scores as released.

    :param surrogates, stages, prior: of `last_releases`.
    """
    m, n, surrogate = survey.size, found.num_rows, surrogates[-1]
    frame, last = recentred(surrogate, prior), stages[-1]
    of_bound = _BOUND_SHARE * rho
    half = np.random.default_rng(0).standard_normal((_POINTS, m))
    points = np.concatenate([half, -half])
    draws = fund.ask(
        fit_bound=Wish(of_bound, CURVE_GRID.num_counts, (1,)),
        fit=Wish(rho - of_bound, 1, (survey.fit_numbers(len(points)),)),
    )
    typical = m / (survey.power * n)
    # Where few rows are far from their tangent (kinks), a bound that many exceed would hide them.
    most = min(max(0.005 * n, math.sqrt(CURVE_GRID.num_counts / of_bound)), 0.3 * n)
    looked = draws["fit_bound"], draws["fit"]
    fit = survey.fit(*looked, frame, last.bounds, points, typical / 16, most, last.found.answer)
    variance = _variance(survey, fit, surrogate, frame)
    # Where few rows alone tell of a coordinate, they are clipped more than others: of those the mean says too little.
    surrogate = surrogate._replace(variance=max(variance, 1.0) if np.any(found.of_frames) else variance)
    _, precision = prior.in_frame(surrogate.frame)
    room = max(found.long_rows.bound / float(EDGES[0]), 1.0)
    moved, reach = _moved(stages[-1], surrogates[-2], prior)
    return Check(
        has_arrived=found.has_arrived,
        moved=moved,
        chance=float(chdtrc(m, moved * m)),
        reach=reach,
        unresolved=unresolved(surrogate, prior),
        clipped=fit.clipped / n if survey.centres else None,
        outlying=fit.outlying / n if survey.centres else None,
        clipped_noise=fit.clipped_scale / n,
        outlying_noise=math.hypot(fit.outlying_scale / n, _OF_SAMPLING / (room * math.sqrt(n))),
        variance=variance,
        varied=_varied(fit) if survey.centres else None,
        curve=fit.curve - _beyond_quadratic(surrogate, frame, points),
        curve_noise=fit.curve_scale,
        width=_width(surrogate, precision, frame),
        lost=fit.clipped / n if survey.has_kinks else None,
        shortened=None if survey.centres or survey.has_kinks else fit.clipped / n,
        taken=found.long_rows.taken / math.hypot(1.0, last.found.score_scale),
        room=room if survey.is_open else 1.0,
    ), surrogate


def _beyond_quadratic(surrogate: Surrogate, frame: Frame, points: np.ndarray) -> np.ndarray:
    """By how much the surrogate itself, without noise, is above a quadratic around the centre of `frame`: 0, but for
    its rates."""
    if surrogate.rates is None:
        return np.zeros(len(points))
    start = np.linalg.solve(surrogate.frame.whitening, np.asarray(frame.center) - surrogate.frame.center)
    ways = points @ np.linalg.solve(surrogate.frame.whitening, np.asarray(frame.whitening, float)).T
    steps = np.linspace(0, 1, 65)
    places = start + steps[:, None, None] * ways
    answers = np.asarray(jax.vmap(jax.vmap(surrogate.straightened))(jnp.asarray(places, jnp.result_type(float))))
    rises = np.einsum("ski,ij,kj->sk", answers - answers[0], surrogate.curvature, ways)
    return rises[1] / steps[1] / 2 - np.trapezoid(rises, steps, axis=0)


def _width(surrogate: Surrogate, prior_precision: np.ndarray, frame: Frame) -> float:
    """`Check.width`: the root of the posterior's mean variance in `frame`, at most 1."""
    inverse = np.linalg.inv(surrogate.curvature + prior_precision)
    spread = surrogate.variance * surrogate.curvature + surrogate.score_covariance + prior_precision
    change = np.linalg.solve(np.asarray(frame.whitening), np.asarray(surrogate.frame.whitening))
    covariance = change @ inverse @ spread @ inverse @ change.T
    return math.sqrt(min(float(np.trace(covariance)) / len(covariance), 1.0))


def _variance(survey: Survey, fit: Fit, surrogate: Surrogate, frame: Frame) -> float:
    """Of the clipped scores over the information: the ratio of their traces, in the frame of the last look."""
    # The information is not the scores' variance, but what the posterior's width goes by, where it is minus the second
    # derivative: a likelihood that is scaled, or a check loss, is not that of the law by which rows come about.
    if survey.has_kinks or not survey.centres or survey.is_weighted:
        return 1.0
    change = np.linalg.solve(np.asarray(surrogate.frame.whitening), np.asarray(frame.whitening))
    information = float(np.trace(change.T @ surrogate.curvature @ change))
    if not information > 0:  # a release that is all noise: rows told nothing
        return 1.0
    square = survey.power * fit.square
    ratio, noise = square / information, survey.power * fit.square_scale / information
    # Where the noise tells nothing, 1: with that, intervals are rather too wide.
    weight = 1 / (1 + (noise / 0.2) ** 2)
    return float(np.clip(weight * ratio + (1 - weight), _LEAST_VARIANCE, _MOST_VARIANCE))


def _varied(fit: Fit) -> float:
    """`Check.varied`. The surplus has twice the noise of the square."""
    return (fit.square - (fit.square - fit.surplus) / 2) / (math.sqrt(5) / 2 * fit.square_scale)


def _moved(here: LastRelease, guide: Surrogate, prior: NormalPrior) -> tuple[float, float]:
    """How far the mode moved with the last release: `Check.moved` and `Check.reach`.

    :param guide: the surrogate around whose mode that release was made, so that it was at 0.
    """
    step, whole, noise = way_from(guide, here, prior)
    m = len(step)
    return float(step @ np.linalg.solve(noise, step) / m), math.sqrt(max(step @ whole @ step, 0.0) / m)


# Thresholds were chosen on the half "seen" of `benchmarks/zoo.py`: docs/measurements.md has how often they are wrong.
LEAST_CHANCE, UNSURE_CHANCE = 1e-3, 1e-2
"""Of a move by noise; the second where the search has not ended by itself."""
MOST_REACH = 1.2
MOST_UNRESOLVED = 0.85
"""Up to that, noise-aware intervals cover: see `numpyro_dp.preparation.surrogate`. It is of an information without much
of its noise, whose smallest eigenvalue is by about so much larger than the released one where that is 1."""
CLEAR = 4.0
"""Standard deviations of the noise that a number must be away from where it should be."""
CLEAR_OUTLYING = 2.8
"""Of the count of outlying rows, which says something only if there are more than expected. At n * eps = 10,000, 1% of
gross outliers are some 4 standard deviations."""
MOST_UNEXPECTED = 0.005
MOST_CLIPPED, CLEAR_LOST = 0.012, 3.0
"""Chosen on quantile regressions of rows that are no draws of the model's, tables 0 to 2 of `benchmarks/working.py`."""
MOST_SHORTENED = 0.04
"""Chosen on the half "seen", censored outcomes and others under add-or-remove, and on regressions whose rows count 1 to
30 times: the former have up to .03, in a search that did not arrive .08; of the latter those that were off had .05 and
more."""
MOST_TAKEN = 2.0
"""Chosen on the half "seen" of `benchmarks/real.py`."""
MOST_CURVED = 1.0
MOST_VARIED = 2.0
LEAST_VARIED, CLEARLY_VARIED = 0.5, 2.0
"""Of a table in which all outcomes are the same, or nearly, rows vary hardly at all; everyday models have .8 to 1.3.
Where an outcome is rare, clipped scores vary as little, too, but not less than the model expects."""


_SILENT_ROWS = (
    "Among them would be rows that say nothing, if there are any: with a missing value (NaN: mask them), an outcome "
    "outside of the law's support (1 and 2 for no and yes), or a value outside of a formula's `ranges` or `levels`. "
)
_MOST_ROWS = (
    "These are most of the rows: look first whether the outcome is coded as the model has it (0 and 1), and whether a "
    "formula's `levels` are spelt, and its `ranges` measured, as in the table. "
)


def reasons(check: Check) -> list[str]:
    """Why released numbers do not vouch for a surrogate, each with the number and what would help."""
    found = []
    if check.chance < (LEAST_CHANCE if check.has_arrived else UNSURE_CHANCE) and check.reach > MOST_REACH:
        by_chance = "next to never" if check.chance < 1e-9 else f"{check.chance:.0e} of the time"
        found.append(
            f"the search had not arrived: between the last two releases the mode moved {check.reach:.1f} standard "
            f"deviations, {check.moved:.1f} times what noise explains (by chance, {by_chance}). A larger eps, fewer "
            "parameters, or a public start and scales (`Preparation`) would help"
        )
    if check.unresolved > MOST_UNRESOLVED:
        found.append(
            f"noise may have made {min(check.unresolved, 1.0):.0%} of what is known in some direction of the "
            "parameters. A larger eps, fewer parameters or a narrower prior would help"
        )
    unexpected = [
        ("clipped", check.clipped, check.clipped_noise, CLEAR),
        ("far further out than what it draws", check.outlying, check.outlying_noise, CLEAR_OUTLYING),
    ]
    for what, share, noise, clear in unexpected:
        if share is not None and abs(share) > max(clear * noise, MOST_UNEXPECTED) and (share > 0 or what == "clipped"):
            silent = _MOST_ROWS if share > 0.5 else _SILENT_ROWS if share > 0 else ""
            found.append(
                f"the rows are not as the model says: {abs(share):.1%} {'more' if share > 0 else 'fewer'} of them than "
                f"it expects are {what} (noise of that count {noise:.1%}). {silent}What the "
                "clip takes moves the posterior, scales and intervals above all. A law with other tails (Student's t, "
                "a negative binomial) or a missing covariate would help"
            )
            break
    else:
        if check.taken > MOST_TAKEN:
            found.append(
                "the rows are not as the model says: some are so much longer than it expects that what the clip takes "
                f"from them still moves the posterior by about {check.taken:.1f} of its standard deviations, scales "
                "and intervals above all. A law with other tails (Student's t, a negative binomial), or the outcome's "
                "logarithm, would help"
            )
        elif check.clipped is not None and check.room > 1:
            found.append(
                "the rows are not as the model says: noisy counts found some that are longer than it expects. Clip "
                f"bounds became {check.room:.1f} times as large for them; what lies beyond counts for less than in the "
                "exact posterior, and nobody knows how much of that there is: scales and intervals may be too small. A "
                "law with other tails (Student's t, a negative binomial), or the outcome's logarithm, would help"
            )
    if check.lost is not None and check.lost > max(CLEAR_LOST * check.clipped_noise, MOST_CLIPPED):
        found.append(
            f"{check.lost:.1%} of the rows were clipped or have missing values (noise of that count "
            f"{check.clipped_noise:.1%}), and nothing gives back what that takes: where they pull one way, the "
            "posterior is off the other way. A quantile nearer to the middle, a law that says how its rows come about, "
            "or a relation under which the number of rows is public, would help"
        )
    if check.shortened is not None and check.shortened > MOST_SHORTENED + CLEAR_LOST * check.clipped_noise:
        found.append(
            f"{check.shortened:.0%} of the rows were clipped (noise of that count {check.clipped_noise:.1%}), and "
            "nothing gives back what that takes: rows count more often than once (weights: normalise them, and give "
            "them by `handlers.scale`), or are not as the model says, or the place is wrong. A model that says how its "
            "rows come about (`numpyro.sample(..., obs=)`, not `numpyro.factor`) would help"
        )
    if check.variance > MOST_VARIED:
        found.append(
            f"the rows' scores vary {check.variance:.1f} times as much as the model says (1 if it holds): intervals "
            "are too narrow for rows that are not as the model says, or the place is wrong. Another law or a larger "
            "eps would help"
        )
    if check.variance < LEAST_VARIED and not (check.varied is not None and check.varied > CLEARLY_VARIED):
        found.append(
            f"the rows' scores vary only {check.variance:.1f} times as much as the model says (1 if it holds), as "
            "where (nearly) all outcomes are the same: then the prior decides how far the parameters go, and the "
            "quadratic that stands for the likelihood does not reach there. A narrower prior would help"
        )
    curve, noise = float(np.sqrt(np.mean(check.curve**2))), check.curve_noise
    # What is beyond a quadratic is cubic, to begin with.
    excess = check.width**3 * math.sqrt(max(curve**2 - noise**2, 0.0))
    # Of k squares of noise, whose mean has a relative standard deviation of sqrt(2 / k).
    if curve**2 > noise**2 * (1 + CLEAR * math.sqrt(2 / len(check.curve))) and excess > MOST_CURVED:
        found.append(
            f"within a posterior's width the log likelihood is {excess:.1f} from the quadratic that stands for it (1 "
            f"is a factor of e in the density; noise of that {check.width**3 * noise:.1g}). Parameters in which it is "
            "closer to a normal one, or `DPPenalty`, would help"
        )
    return found


LEAST_DRAWS = 4
"""Of a chain, to tell whether it moves and has converged."""
ENOUGH_DRAWS = 100
"""Of a chain, to tell whether more iterations to a draw would help it."""
HARDLY_NARROWER = 0.8
"""Interquartile range of the draws over that of the prior, from which they say little more than the prior does."""


def draws_of_parameters(draws: Any, parameters: Mapping[str, Any], num_chains: int) -> dict[str, Any]:
    """Chains and draws leading; coordinate by coordinate where each is a parameter of its own.

    Without what may be constant: deterministic sites, and sites without a free parameter. If a `postprocess_fn` has
    given them other names, all that it gives.

    :param parameters: of the last state, chains leading.
    """
    named = {name: draws[name] for name in parameters if name in draws} if isinstance(draws, Mapping) else {}
    if not named:
        return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(draws)}
    free = {name: np.size(parameters[name]) // num_chains for name in named}
    return by_coordinate(named, free, 2)


def by_coordinate(values: Mapping[str, Any], free: Mapping[str, int], leading: int) -> dict[str, np.ndarray]:
    """Values of sites, coordinate by coordinate where each is a parameter of its own.

    Without sites that have no free parameter.

    :param free: how many free parameters each site has.
    :param leading: number of leading axes, of draws.
    """
    found: dict[str, np.ndarray] = {}
    for name, value in values.items():
        value, places = np.asarray(value), np.shape(value)[leading:]
        if free[name] > 1 and free[name] == math.prod(places):
            whole = (slice(None),) * leading
            found |= {f"{name}[{','.join(map(str, k))}]": value[(*whole, *k)] for k in np.ndindex(places)}
        elif free[name]:
            found[name] = value
    return found


def widths(draws: Mapping[str, Any]) -> dict[str, float]:
    """Interquartile range of the finite draws of each coordinate, as `by_coordinate` has them; 0 where there are none.

    Without sites of which not each entry is a parameter.
    """
    flat = {name: np.asarray(values, float).ravel() for name, values in draws.items() if np.ndim(values) <= 2}
    finite = {name: values[np.isfinite(values)] for name, values in flat.items()}
    return {
        name: float(np.subtract(*np.quantile(values, [0.75, 0.25]))) if values.size else 0.0
        for name, values in finite.items()
    }


def uninformed(draws: Mapping[str, Any], prior: Mapping[str, float]) -> list[str]:
    """Coordinates whose draws are hardly narrower than the prior: noise hides what rows say, or they say little.

    :param draws: of the posterior, as `by_coordinate` has them.
    :param prior: `widths` of the prior's.
    """
    return [name for name, width in widths(draws).items() if width > HARDLY_NARROWER * prior.get(name, 0.0) > 0]


_TOLD, _WELL_TOLD = 3.0, 10.0
"""What a release tells of a coordinate, over the standard deviation of the noise in that: no more of those of which
nothing is told; and of the median one at least, or all of them are noisy."""


def untold(surrogate: Surrogate, cut: Cut, start: np.ndarray, names: Sequence[str]) -> list[str]:
    """Entries of parameters of which rows tell nothing that noise does not hide, while they tell of others: the effect
    of a group whose code no row has. Their draws may be far narrower than the prior, by what the other groups say.

    :param start: flat unconstrained parameters near the posterior.
    :param names: of these.
    """
    inverse = np.linalg.inv(np.asarray(surrogate.frame.whitening))
    told = np.einsum("ij,ik,kj->j", inverse, surrogate.curvature, inverse)
    noise = math.sqrt(2) * surrogate.curvature_scale * np.sum(inverse**2, 0)
    clear = told / np.maximum(noise, np.finfo(float).tiny)
    hidden = clear < _TOLD
    if not hidden.any() or np.median(clear) < _WELL_TOLD:
        return []
    slopes = np.asarray(jax.jacobian(cut.coordinates)(jnp.asarray(start, jnp.result_type(float))))
    counts = slopes[hidden].any(0) & ~slopes[~hidden].any(0)
    return [name for name, count in zip(names, counts, strict=True) if count]


def standing(draws: Mapping[str, Any]) -> list[str]:
    """The sites of which all draws of a chain are one point.

    :param draws: of each site, chains and draws leading.
    """
    long_enough = {name: leaf for name, leaf in _by_site(draws).items() if leaf.shape[1] >= LEAST_DRAWS}
    return [name for name, leaf in long_enough.items() if (np.ptp(leaf, axis=1) == 0).all(-1).any()]


def _by_site(draws: Mapping[str, Any]) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(leaf, float) for name, leaf in draws.items()}
    return {name: leaf.reshape(*leaf.shape[:2], -1) for name, leaf in arrays.items() if leaf.size}


class _Mixing(NamedTuple):
    """How well chains have mixed: the largest R-hat and the least effective size, of `length` draws of each chain."""

    r_hat: float
    size: float
    chains: int
    length: int

    @property
    def has_converged(self) -> bool:
        # Of independent draws R-hat is above 1 by about 1 / length.
        return self.r_hat < 1.01 + 10 / self.length

    def has_effective(self, share: float) -> bool:
        """Whether the effective size is 400, or at least that share of the draws."""
        return self.size > min(400, share * self.chains * self.length)


def _mixing(draws: Mapping[str, Any]) -> _Mixing:
    flat = np.concatenate([*_by_site(draws).values()], 2)
    if not np.isfinite(flat).all():
        return _Mixing(math.inf, 0.0, *flat.shape[:2])
    with np.errstate(all="ignore"):
        r_hat, size = split_gelman_rubin(flat), effective_sample_size(flat)
    size = np.where(size < 0, np.inf, size)  # so it is of a few draws that alternate: better than independent ones
    return _Mixing(float(np.nanmax(r_hat, initial=1.0)), float(np.nanmin(size, initial=np.inf)), *flat.shape[:2])


def should_thin_more(draws: Mapping[str, Any]) -> bool:
    """Whether more iterations to a draw would make the draws of a finished run better, as far as they tell.

    :param draws: of each site, chains and draws leading.
    """
    if not any(leaf.shape[1] >= ENOUGH_DRAWS for leaf in _by_site(draws).values()) or standing(draws):
        return False
    mixing = _mixing(draws)
    return not (mixing.has_converged and mixing.has_effective(0.5))


def unmixed(draws: Mapping[str, Any]) -> list[str]:
    """Why the chains of a finished run have not converged.

    :param draws: of each site, chains and draws leading.
    """
    leaves = [*_by_site(draws).values()]
    if not leaves:
        return []
    if leaves[0].shape[1] < LEAST_DRAWS:
        return ["four draws at least tell whether chains have converged"]
    if still := standing(draws):
        return [
            f"a chain stood still: all of its draws of {some_of(still)} are one point, so R-hat and effective sizes "
            "mean nothing. Shorter steps or a larger eps let a walk move; where draws are free (`DPHMC`'s default), "
            "such a parameter lies at the border of what its law allows (a scale at 0)"
        ]
    mixing = _mixing(draws)
    if mixing.has_converged and mixing.has_effective(0.2):
        return []
    return [
        f"the chains have not converged: R-hat {mixing.r_hat:.3f}, effective size {mixing.size:.0f} of "
        f"{mixing.chains * mixing.length} draws. A longer warmup and more draws cost no privacy with DPHMC's default, "
        "and eps otherwise"
    ]


class Mirror(NamedTuple):
    """Other parameters at which the likelihood is the same as where the draws are.

    :ivar what: what is exchanged or changes its sign.
    :ivar distance: how far they are, in standard deviations of the released likelihood.
    :ivar odds: of the posterior there, against that here: the prior's.
    """

    what: str
    distance: float
    odds: float


_APART = 2.0
_LEAST_ODDS = 0.01


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
        image, log_odds = symmetry.image(start)
        if not log_odds > math.log(_LEAST_ODDS):
            continue
        way = coordinates(image) - here
        changed = np.sum(np.abs(way) > 1e-4 * np.abs(here))
        slope = surrogate.curvature @ np.linalg.solve(surrogate.frame.whitening, way)
        distance = math.sqrt(max(slope @ of_noise @ slope, 0.0))
        if distance > 2 * (math.sqrt(changed) + _APART):
            found.append(Mirror(symmetry.what, distance, math.exp(min(log_odds, 300.0))))
    return max(found, key=lambda mirror: mirror.distance, default=None)
