"""What was released about a likelihood, as a likelihood: a quadratic in u, and what its noise does to an inference.

Released once: the score ``g = G + e`` (the sum of clipped gradients at ``u = 0``) and the curvature ``K = J + E`` (how
that sum answers to the parameters), with noise e and E of known law. Two log likelihoods can be made of them:

============  ====================================================  ===============================================
plug-in       ``g'u - u'Ku / 2``                                    the exact one plus a fixed noise polynomial
noise-aware   ``log N(g; K u, v K + cov(e) + cov(E u))``            what an observer of g and K knows about u
============  ====================================================  ===============================================

The second treats the release as the data. Given the parameters, the score is normal around ``J u`` with the variance v
J (that of the rows; v is 1 by the information identity, less for clipped scores, more for rows that vary more than the
model says) plus that of the noise; ``cov(E u) = s^2 (|u|^2 I + u u') / 2`` for a symmetric noise matrix whose diagonal
has standard deviation s. Without noise, and with a v of 1, both are the same function; with another v the second has
the width that the rows' own spread gives (a sandwich). Where the model does not tell how rows come about, v is 1. With
noise, the second has intervals that cover the truth about as often as they say, as long as the
noise in the curvature is below the curvature: in one dimension 90% intervals cover .89 to .94 at relative noise of .5,
.87 to .91 at 1, .75 at 3; runs that would have more than 1 are refused (`numpyro_dp.preparation.options.require_hope`).
Where scores were released to answer unevenly, u is straightened first (`Surrogate.straightened`), and as far as noise
hides how unevenly, the noise-aware likelihood is a mixture (`numpyro_dp.preparation.rates`).
Normality of the score, and J for its variance, are approximations: they need many rows, few of them clipped, and a
model that holds. Tempered, both are those of the tempered likelihood.
"""

from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.rates import Rates, told

_POINTS = 32
"""Rates that stand for all that released numbers leave open."""


class Surrogate(NamedTuple):
    """A quadratic log likelihood in the coordinates of a frame, with the law of its noise. Released as a whole.

    :ivar frame: ``phi = center + whitening @ u``.
    :ivar score: shape (m,).
    :ivar score_covariance: of its noise, shape (m, m).
    :ivar curvature: shape (m, m), positive semidefinite.
    :ivar curvature_scale: standard deviation of the noise in its diagonal.
    :ivar variance: of the score that the rows themselves give, over the curvature: 1 where the model holds and no row
        is clipped; less for clipped scores.
    :ivar rates: by which what rows say falls along coordinates; None where nobody asked.
    """

    frame: Frame
    score: np.ndarray
    score_covariance: np.ndarray
    curvature: np.ndarray
    curvature_scale: float
    variance: float = 1.0
    rates: Rates | None = None

    def straightened(self, u: jax.Array, rates: np.ndarray | jax.Array | None = None) -> jax.Array:
        """u', so that the score that is expected at u is the curvature times u'; see `numpyro_dp.preparation.rates`.

        :param rates: of the coordinates that have any (`_bent`), over a step; by default, as released.
        """
        which = self._bent
        if self.rates is None or not which.size:
            return u
        rates = jnp.asarray(self.rates.values[which] if rates is None else rates, u.dtype)
        whitening, lengths = np.asarray(self.frame.whitening, float), self.rates.steps[which]
        v = jnp.asarray(whitening[which] / lengths[:, None], u.dtype) @ u
        steps = jnp.asarray(np.linalg.inv(whitening)[:, which] * lengths, u.dtype)
        bent = told(v, rates, jnp.asarray(self.rates.steepest[which], u.dtype))
        return u + steps @ (bent - v)

    @property
    def _bent(self) -> np.ndarray:
        """Coordinates along which scores answer unevenly, or may."""
        return np.zeros(0, int) if self.rates is None else np.flatnonzero(self.rates.steepest)

    def plug_in(self, u: jax.Array) -> jax.Array:
        """The quadratic, of u as `straightened` has it, as if it had no noise."""
        u = self.straightened(u)
        score, curvature = (jnp.asarray(x, u.dtype) for x in (self.score, self.curvature))
        return u @ score - u @ curvature @ u / 2

    def noise_aware(self, u: jax.Array) -> jax.Array:
        """The log likelihood of `u` given what was released."""
        if self.rates is None or not self.rates.scales.any():
            return self._log_density(self.straightened(u))
        which = self._bent
        rates = jnp.asarray(self.rates.values[which] + self.rates.scales[which] * _spread(len(which)), u.dtype)
        return logsumexp(jax.vmap(lambda x: self._log_density(self.straightened(u, x)))(rates))

    def _log_density(self, u: jax.Array) -> jax.Array:
        """Of the released score, where that times the curvature is expected."""
        values, vectors = np.linalg.eigh(self.variance * self.curvature + self.score_covariance)
        to_axes = jnp.asarray(vectors.T, u.dtype)
        residual = to_axes @ (jnp.asarray(self.score, u.dtype) - jnp.asarray(self.curvature, u.dtype) @ u)
        along = to_axes @ u
        weight = self.curvature_scale**2 / 2
        # The covariance is diagonal in these axes but for the term weight * along along'.
        variance = jnp.asarray(values, u.dtype) + weight * (u @ u)
        scaled = residual / variance
        overlap = 1 + weight * along @ (along / variance)
        square = residual @ scaled - weight * (along @ scaled) ** 2 / overlap
        return -(square + jnp.sum(jnp.log(variance)) + jnp.log(overlap)) / 2


def _spread(size: int) -> np.ndarray:
    """Points that stand for N(0, I), shape (k, size): each coordinate has the same values (a Latin hypercube)."""
    values = [NormalDist().inv_cdf((k + 0.5) / _POINTS) for k in range(_POINTS)]
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(values) for _ in range(size)], 1)
