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
Normality of the score, and J for its variance, are approximations: they need many rows, few of them clipped, and a
model that holds. Tempered, both are those of the tempered likelihood.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.preparation.frames import Frame


class Surrogate(NamedTuple):
    """A quadratic log likelihood in the coordinates of a frame, with the law of its noise. Released as a whole.

    :ivar frame: ``phi = center + whitening @ u``.
    :ivar score: shape (m,).
    :ivar score_covariance: of its noise, shape (m, m).
    :ivar curvature: shape (m, m), positive semidefinite.
    :ivar curvature_scale: standard deviation of the noise in its diagonal.
    :ivar variance: of the score that the rows themselves give, over the curvature: 1 where the model holds and no row
        is clipped; less for clipped scores.
    """

    frame: Frame
    score: np.ndarray
    score_covariance: np.ndarray
    curvature: np.ndarray
    curvature_scale: float
    variance: float = 1.0

    def plug_in(self, u: jax.Array) -> jax.Array:
        """The quadratic itself, as if it had no noise."""
        score, curvature = (jnp.asarray(x, u.dtype) for x in (self.score, self.curvature))
        return u @ score - u @ curvature @ u / 2

    def noise_aware(self, u: jax.Array) -> jax.Array:
        """The log likelihood of `u` given what was released."""
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
