"""The default, from the first look at the table to the last: search, last releases, a look at the fit.

Or, where a chain is to ask the table in each iteration, the search alone, and a clip bound for that chain.
"""

import math
from collections.abc import Callable

import numpy as np

from numpyro_dp.preparation.begin import Begun, asked_in_search
from numpyro_dp.preparation.chains import Prepared
from numpyro_dp.preparation.frames import as_wide_as_the_posterior
from numpyro_dp.preparation.fund import Fund, Wish, silent
from numpyro_dp.preparation.last_look import FIT_SHARE, check
from numpyro_dp.preparation.last_release import last_releases, recentred
from numpyro_dp.preparation.mirror import find_mirror
from numpyro_dp.preparation.row_slopes import SLOPE_GRID, find_slope
from numpyro_dp.preparation.search import Found, search
from numpyro_dp.preparation.start import start_near
from numpyro_dp.preparation.survey import WEIGHT_GRID, Survey
from numpyro_dp.privacy.accounting import noise_multiplier_for
from numpyro_dp.privacy.ledger import Ledger, Releases
from numpyro_dp.privacy.mechanisms import Gaussian, bounds_per_row

_WEIGHTS_NOISE, _WEIGHTS_SHARE, _EXCEEDING_WEIGHT = 0.06, 0.02, 0.2
"""Of the rows: the noise of counts of weights above some, unless that would cost more than this share of the budget;
and how many have a weight above a typical one."""


def prepare(begun: Begun, ledger: Ledger, announce: Callable[[str], None] = silent) -> Prepared:
    """Ask the table, and decide by its noisy answers.

    **Formal guarantee.** What it returns follows from releases that `ledger` has granted and charged: Gaussian
    mechanisms, adaptively chosen, under a filter on their total cost (Smith and Thakurta 2022).

    :param announce: is told of each stage, for who waits.
    """
    survey, prior, n = begun.survey, begun.prior, ledger.plan.num_rows
    fund = Fund(ledger, announce, asked_in_search(begun, ledger) if begun.asked is None else begun.asked)
    whole, cut = fund.left, survey.cut
    walks = begun.own is not None or begun.options.mode == "walk"
    if cut.row_weight is not None and n is not None and not walks:
        survey = _of_rows_that_count_once(survey, fund, n)
    found = search(survey, prior, begun.near, fund, n)
    if walks:
        found = found._replace(frame=as_wide_as_the_posterior(found.frame, found.of_frames))
        return _walk(begun, ledger, fund, found) if begun.own is None else _own(begun, fund, found)
    if not survey.centres and found.weight != 1:
        survey = survey.in_units_of(found.weight)
    for_last = fund.left - FIT_SHARE * whole
    found, surrogates, stages, guide = last_releases(survey, found, prior, fund, for_last, not begun.improper)
    checked, surrogate = check(survey, found, surrogates, stages, guide, fund, fund.left)
    start, covariance = start_near(cut, recentred(surrogate, prior), begun.z_prior)
    return Prepared(
        "surrogate",
        cut.names,
        start,
        covariance,
        surrogate.frame,
        len(found.rounds),
        surrogate=surrogate,
        check=checked,
        bounds=stages[-1].bounds,
        centred=survey.centres,
        mirror=find_mirror(begun.symmetries, cut, surrogate, start),
        steps=begun.steps,
    )


def _of_rows_that_count_once(survey: Survey, fund: Fund, n: float) -> Survey:
    price = min(WEIGHT_GRID.num_counts / (2 * (_WEIGHTS_NOISE * n) ** 2), _WEIGHTS_SHARE * fund.left)
    draws = fund.ask(weights=Wish(price, WEIGHT_GRID.num_counts, (1,)))["weights"]
    return survey.of_rows_that_count_once(draws, _EXCEEDING_WEIGHT * n)


def _walk(begun: Begun, ledger: Ledger, fund: Fund, found: Found) -> Prepared:
    """Plan a walk: what is left pays for its steps.

    Short jumps need little noise: where the noise decides, one standard deviation of about 2 mixes best, and the more
    iterations there are, the shorter they are.
    """
    survey, plan = begun.survey, ledger.plan
    m = survey.size
    pairs = np.random.default_rng(1).standard_normal((8, 2, m))
    draws = fund.ask(slope=Wish(0.03 * fund.left, SLOPE_GRID.num_counts, (1,)))["slope"]
    most = 5 * math.sqrt(SLOPE_GRID.num_counts / (2 * 0.03 * fund.left))  # rows that noise may hide
    slope = 2 * survey.slope(draws, found.frame, pairs, SLOPE_GRID, 2.0**-30, most)
    steps, left = plan.num_iterations * plan.num_chains, fund.left
    ratio = Gaussian(noise_multiplier_for(left, steps))
    fund.assign({"ratio": Releases((ratio,), (steps,))})
    noise = ratio.noise_multiplier * survey.power * slope * bounds_per_row(plan.neighboring_relation)
    start, covariance = start_near(survey.cut, found.frame, begun.z_prior)
    return Prepared(
        "walk",
        survey.cut.names,
        start,
        covariance,
        found.frame,
        len(found.rounds),
        slope=slope,
        step=min(2.38 / math.sqrt(m), 2 / (noise * math.sqrt(m))),
        has_arrived=found.has_arrived,
    )


def _own(begun: Begun, fund: Fund, found: Found) -> Prepared:
    """Coordinates and clip bound of the kernel's own chain; what is left of the reserve pays for the bound."""
    assert begun.own is not None
    start, covariance = start_near(begun.survey.cut, found.frame, begun.z_prior)
    names, arrived, kind = begun.survey.cut.names, found.has_arrived, begun.own.kind
    prepared = Prepared("own", names, start, covariance, found.frame, len(found.rounds), has_arrived=arrived)
    frame = prepared.z_frame
    slope = find_slope(
        begun.target,
        lambda y, row: begun.row_log_density(frame.at(y), row),
        len(start),
        kind,
        fund,
        found.num_rows,
    )
    steps = begun.steps if kind == "grad" else ()  # an acceptance test sees them
    return prepared._replace(slope=slope, steps=steps)
