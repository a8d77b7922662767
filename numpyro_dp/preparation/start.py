"""Where chains start: parameters near the posterior, by what was released about the likelihood's coordinates."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import least_squares

from numpyro_dp.model.coordinates import Cut
from numpyro_dp.preparation.frames import Frame, NormalPrior


def start_near(cut: Cut, frame: Frame, z_prior: NormalPrior) -> tuple[np.ndarray, np.ndarray]:
    """A point near the posterior, and its covariance there, by Gauss-Newton with a rough normal prior of z.

    Not the mode: where group effects have a prior of unknown scale, that is at scale 0.

    :param frame: in which the posterior is about N(0, I).
    """
    inverse = np.linalg.inv(np.asarray(frame.whitening))
    root_prior = np.linalg.inv(np.linalg.cholesky(z_prior.covariance))
    dtype = jnp.result_type(float)
    phi, slope = jax.jit(cut.coordinates), jax.jit(jax.jacobian(cut.coordinates))

    def misfit(z: np.ndarray) -> np.ndarray:
        u = inverse @ (np.asarray(phi(jnp.asarray(z, dtype)), float) - frame.center)
        return np.concatenate([u, root_prior @ (z - z_prior.mean)])

    def jacobian(z: np.ndarray) -> np.ndarray:
        return np.concatenate([inverse @ np.asarray(slope(jnp.asarray(z, dtype)), float), root_prior])

    start = least_squares(misfit, z_prior.mean, jacobian, max_nfev=200).x
    root = jacobian(start)
    precisions, vectors = np.linalg.eigh(root.T @ root)
    # Beyond that, rounding decides whether it is positive definite.
    precisions = np.maximum(precisions, 1e-10 * precisions[-1])
    return start, (vectors / precisions) @ vectors.T
