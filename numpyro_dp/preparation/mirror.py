"""Other humps of a posterior, where the likelihood is the same as at the one that was released."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from numpyro_dp.model.coordinates import Cut
from numpyro_dp.model.symmetry import Symmetry
from numpyro_dp.preparation.surrogate import Surrogate


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
