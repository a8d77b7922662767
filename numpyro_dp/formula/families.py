"""Laws of outcomes: their priors and likelihoods as lines of a NumPyro model.

Priors are weakly informative by what is public, as rstanarm's are by the table: with S the scale of the linear
predictor, a coefficient is normal with standard deviation 2.5 S over the spread of its column.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpyro.distributions as dist

from numpyro_dp.formula.columns import LARGEST_COUNT

NUMBERS, POSITIVE, SHARES, COUNTS, YES_NO, GRADES = "numbers", "positive", "shares", "counts", "yes or no", "grades"


@dataclass(frozen=True)
class Family:
    """A law of outcomes.

    :ivar outcomes: what they are.
    :ivar likelihood: text of the outcome's distribution, of the linear predictor `eta`.
    :ivar priors: lines for its further parameters, of the predictor's scale and the number of levels.
    :ivar has_intercept: whether the linear predictor may have one.
    :ivar is_multiple: whether there is a linear predictor for each level but the first.
    """

    outcomes: str
    likelihood: str
    priors: tuple[str, ...] = ()
    has_intercept: bool = True
    is_multiple: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether the predictor is on the outcome's own scale."""
        return self.outcomes == NUMBERS

    @property
    def has_levels(self) -> bool:
        return self.outcomes == GRADES


_SIGMA = 'sigma = numpyro.sample("sigma", dist.HalfNormal({scale}))'
_CUTS = (
    "first = dist.Normal(jnp.linspace(-2.0, 2.0, {levels} - 1), 2.0).to_event(1)",
    'cuts = numpyro.sample("cuts", dist.TransformedDistribution(first, dist.transforms.OrderedTransform()))',
)

FAMILIES = {
    "gaussian": Family(NUMBERS, "dist.Normal(eta, sigma)", (_SIGMA,)),
    "student_t": Family(
        NUMBERS,
        "dist.StudentT(df, eta, sigma)",
        ('df = numpyro.sample("df", dist.Gamma(2.0, 0.1))', _SIGMA),
    ),
    "bernoulli": Family(YES_NO, "dist.Bernoulli(logits=eta)"),
    "poisson": Family(COUNTS, "dist.Poisson(jnp.exp(eta))"),
    "negative_binomial": Family(
        COUNTS,
        "dist.NegativeBinomial2(jnp.exp(eta), concentration)",
        ('concentration = numpyro.sample("concentration", dist.LogNormal(1.0, 1.5))',),
    ),
    "gamma": Family(
        POSITIVE,
        "dist.Gamma(shape, shape * jnp.exp(-eta))",
        ('shape = numpyro.sample("shape", dist.LogNormal(0.5, 1.0))',),
    ),
    "beta": Family(
        SHARES,
        "dist.BetaProportion(jax.nn.sigmoid(eta), precision)",
        ('precision = numpyro.sample("precision", dist.LogNormal(2.0, 1.0))',),
    ),
    "ordinal": Family(GRADES, "dist.OrderedLogistic(eta, cuts)", _CUTS, has_intercept=False),
    "categorical": Family(
        GRADES,
        "dist.Categorical(logits=jnp.concatenate([jnp.zeros_like(eta[:, :1]), eta], axis=1))",
        is_multiple=True,
    ),
}
"""By the names that they have in bambi and brms. Links: identity, logit (yes or no, shares, grades), log."""


def predictor_scale(family: Family, ends: tuple[float, float] | None) -> tuple[float, float]:
    """Where the linear predictor is, and its scale, by the outcome's public range (transformed), if it has one."""
    if family.is_identity:
        assert ends is not None
        return (ends[0] + ends[1]) / 2, (ends[1] - ends[0]) / 4
    if family.outcomes in (COUNTS, POSITIVE) and ends is not None:
        # A range from 0 on says nothing of the lower end: to its log, that is 1, or as far below the upper end.
        top = math.log(ends[1])
        bottom = math.log(ends[0]) if ends[0] > 0 else min(0.0, top - 4)
        return (bottom + top) / 2, max(1.0, (top - bottom) / 4)
    return 0.0, 1.0


def _whole(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & (values <= LARGEST_COUNT) & (values == np.floor(values))


_TINY = float(np.finfo(np.float32).tiny)  # JAX takes what is smaller for 0

CAN_BE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    NUMBERS: np.isfinite,
    POSITIVE: lambda values: (values >= _TINY) & np.isfinite(values),
    SHARES: lambda values: (values >= _TINY) & (values < 1),
    COUNTS: _whole,
    YES_NO: lambda values: (values == 0) | (values == 1),
    GRADES: lambda values: values >= 0,
}
"""Which values an outcome can have, row by row."""

CANNOT_BE = {NUMBERS: math.nan, POSITIVE: math.nan, SHARES: math.nan, COUNTS: -1, YES_NO: -1}
"""A value that each law refuses; of grades, whatever is beyond the last."""


def law_refuses() -> bool:
    """Whether NumPyro gives no density to a value that a law cannot have: not before 0.22, nor without validation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of 0.22, about such a value
        return not bool(np.isfinite(dist.Bernoulli(logits=0.0).log_prob(-1)))
