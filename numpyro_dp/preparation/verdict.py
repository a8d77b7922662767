"""Whether released numbers vouch for the posterior, and if not, why.

Each reason compares a released number with what it would be if all were well, and with the noise in it.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.model.coordinates import Cut
from numpyro_dp.preparation.chains import Prepared
from numpyro_dp.preparation.last_look import Check
from numpyro_dp.preparation.mirror import Mirror
from numpyro_dp.preparation.surrogate import Surrogate

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
MOST_TURNED = 1.0
"""Without noise, everyday models of the parts "seen" and "third" have up to .3, mostly .02. At small eps noise also
makes the frame wider than the posterior, and then they have more: of 12 runs of "unseen", one had .9."""
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


def reasons(prepared: Prepared) -> list[str]:
    """Why released numbers do not vouch for a posterior, each with the number and what would help."""
    found = [] if prepared.check is None else reasons_of_check(prepared.check)
    if prepared.steps:
        found.append(
            f"the likelihood has steps along {', '.join(prepared.steps)}, of which derivatives, and so this "
            "posterior, know nothing. A smooth change in the model (`jax.nn.sigmoid`, not a comparison) would help"
        )
    if not prepared.has_arrived:
        found.append(
            "the search had not arrived: its last step was longer than noise explains. A larger eps, fewer "
            "parameters, or a public start and scales (`Preparation`) would help"
        )
    if prepared.mirror is not None:
        found.append(_reason_of_mirror(prepared.mirror))
    return found


def _reason_of_mirror(mirror: Mirror) -> str:
    apart = f"about {mirror.distance:.0f}" if mirror.distance < 1000 else "more than 1,000"
    is_same = abs(math.log(mirror.odds)) < 0.05
    same = "prior and likelihood are" if is_same else "the likelihood is"
    beside = "" if is_same else f"; by the prior, the other has {mirror.odds / (1 + mirror.odds):.0%} of the mass"
    return (
        f"{same} the same where {mirror.what}: the posterior has a hump for each, {apart} of its standard deviations "
        f"apart, and the draws show one of them{beside}. Say in the model which is which (by a prior that is ordered "
        "or positive), or use only what is the same at both"
    )


def reasons_of_check(check: Check) -> list[str]:
    """Why the last look at the rows does not vouch for a surrogate."""
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
    if check.turned is not None and check.turned > max(MOST_TURNED, CLEAR * check.turned_noise):
        found.append(
            f"the posterior is bent: within twice its width the information grows by {check.turned:.1f} times itself "
            f"(noise of that {check.turned_noise:.1g}), as where a product or a ratio of parameters is known much "
            "better than each of them, and the quadratic that stands for the likelihood knows nothing of it. Other "
            "parameters (the product and one of them), narrower priors or `DPPenalty` would help"
        )
    return found


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
