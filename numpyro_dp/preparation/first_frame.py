"""Where the search starts, how wide, and how wide frames may become for the sake of few rows.

A clip bound is made for rows of which each says about as much as the others. Of a group's effect, or of a covariate
that is 0 for nearly all, few rows say anything, and each of them says much. In a frame as wide as the posterior the
clip would take most of it, what is left would seem to know less, the next frame would be wider, and take more: in the
end such an effect would have its prior. So no frame is wider along such a coordinate than one in which a typical one
of its rows is clipped by half. To find out is paid for:

    1. for each kind of coordinate (`Survey.kinds`), a bound that some of the rows' derivatives exceed;
    2. how many rows have a derivative at all, by each coordinate;
    3. if some coordinates have few, and not next to none, a better bound for these.

Constants were chosen on rows and models that are in no benchmark: see docs/preparation.md.
"""

import math

import numpy as np

from numpyro_dp.preparation.frames import SCORE_ROOM, Frame, NormalPrior, typical_norm, within_reason
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.preparation.survey import RARE_GRID, SCALE_GRID, Survey

LEAST_SCALE = 2.0**-20
"""Derivatives that are smaller are none."""
_SPARSE, SPARSE_PRICE, SPARSE_SHARE = 0.03, 50.0, 0.03
"""A scale is searched for that so many of the rows exceed, if their count can be told: a group's effect is in the rows
of the group only. It is paid for up to so many times, if that is no more than this share of the budget."""
_TELLS, _HALF = 4.0, 0.5
"""A count can be told that is so many standard deviations of its noise; but no more than half of the rows are asked
for. There are some four counts for each coordinate above which no row is. At 3, one run in 16 of 12 coordinates would
take noise for rows, and start in a frame that is far too narrow."""
_MET_SHARE, _MET = 0.02, 1 / 64
"""Of the budget, for the counts of rows that have a derivative at all: above this part of the bound that was found."""
_FEW, _FEW_OF_MANY = 0.25, 0.6
"""Rows of a coordinate are few below this share of all, and below this part of the share of one coordinate: of more,
the clip leaves what fits the frame."""
_RARE_SHARE, _RARE_TELLS, _MOST_RARE = 0.08, 3.0, 0.1
"""Of the budget, for better bounds; which counts they can tell; and of the rows, what that may be at most."""
_RESOLVED, _GROUP_RESOLVED = 9.4, 6.5
"""Times ``sqrt(m / rho)``: what fewer rows say in such a frame, the noise in the information would hide. The second is
for groups, whose bound is that of all groups' rows."""
TYPICAL = 1 / 6
"""Of a bound that was found, what shall not be clipped. A typical derivative is a third: few rows exceed the bound, and
the grid's steps round up. The rest is room for coordinates that are correlated (a flag, and its product with another
covariate): with a third, the frame was too narrow where their sum is known best, and noise hid what is left."""


def first_frame(
    survey: Survey, prior: NormalPrior, near: NormalPrior, fund: Fund, price: float, n: float
) -> tuple[Frame, NormalPrior]:
    """Around the start, as wide as the prior or as the rows' derivatives there allow, whatever is less.

    :param price: of the first bounds, in rho.
    :param n: number of rows.
    :return: and the prior, with the precision that all frames have beside it, and with how steep rows are.
    """
    kinds, widths = survey.kinds, np.sqrt(np.diag(near.covariance))
    whole, counted = fund.left, survey.power * n
    frame = Frame(near.mean, np.diag(widths))
    draws = fund.ask(scales=Wish(price, SCALE_GRID.num_counts, (len(kinds),)))["scales"]
    exceeding = min(max(_SPARSE * n, _TELLS * _noise(len(kinds), SCALE_GRID.num_counts, price)), _HALF * n)
    bounds = survey.scales(draws, frame, SCALE_GRID, LEAST_SCALE, exceeding, kinds)
    found = bounds > 1.5 * LEAST_SCALE
    steepest = np.where(found, bounds, 0) @ kinds
    shared = bounds / np.sqrt(kinds.sum(1))  # each has its share of rows
    narrowed = 1 / np.maximum(1, shared @ kinds * math.sqrt(counted) / 2)
    least, of_group = (factor * math.sqrt(survey.size / whole) for factor in (_RESOLVED, _GROUP_RESOLVED))
    if least > _MOST_RARE * n:
        frame = frame._replace(whitening=within_reason(np.diag(widths * narrowed), prior))
        return frame, prior._replace(of_frames=np.zeros(survey.size), steepest=steepest / widths)

    is_group = kinds.sum(1) > 1
    draw = fund.ask(row_counts=Wish(_MET_SHARE * whole, 1, (survey.size,)))["row_counts"]
    met = survey.row_counts(draw, frame, np.where(found, _MET * bounds, LEAST_SCALE) @ kinds)
    unclipped = SCORE_ROOM * typical_norm(survey.size, counted)
    are_few = met < min(_FEW, _FEW_OF_MANY / survey.size) * n
    of_groups = np.where(are_few & (met > of_group), (bounds * (found & is_group)) @ kinds, 0)
    few = kinds[~is_group & (~found | kinds @ are_few) & (kinds @ met > least / 2)]
    of_rare = _rare(survey, fund, frame, few, met, _RARE_SHARE * whole, least, n, unclipped)
    too_wide = TYPICAL * (of_groups + of_rare) / unclipped  # so many times, if above 1
    narrowed = np.where(of_rare > 0, np.minimum(narrowed, 1 / np.maximum(too_wide, 1)), narrowed)
    steepest = np.where(of_rare > 0, of_rare, steepest) / widths
    frame = frame._replace(whitening=within_reason(np.diag(widths * narrowed), prior))
    return frame, prior._replace(of_frames=(too_wide / widths) ** 2, steepest=steepest)


def _rare(
    survey: Survey,
    fund: Fund,
    frame: Frame,
    few: np.ndarray,
    met: np.ndarray,
    price: float,
    least: float,
    n: float,
    smallest: float,
) -> np.ndarray:
    """Bounds of the derivatives by coordinates that few rows have, shape (m,); 0 where none was found.

    :param few: these coordinates, as kinds.
    """
    most = max(_RARE_TELLS * _noise(len(few), RARE_GRID.num_counts, price), least)
    if not len(few) or most > _MOST_RARE * n:
        return np.zeros(survey.size)
    draws = fund.ask(rare_scales=Wish(price, RARE_GRID.num_counts, (len(few),)))["rare_scales"]
    found = survey.scales(draws, frame, RARE_GRID, smallest, np.maximum(most, few @ met / 4), few)
    return np.where(found > 1.5 * smallest, found, 0) @ few


def _noise(size: int, counts: int, price: float) -> float:
    """Standard deviation of a count of rows, where so many counts of so many numbers cost `price`."""
    return math.sqrt(size * counts / (2 * price))
