"""Released information matrices with less noise, by what is known of how noise moves eigenvalues.

Noise that is alike in all directions drives the eigenvalues of a matrix apart, by as much as its number of coordinates
says, and turns its eigenvectors. Of all estimates that keep the released eigenvectors, one has the least mean square
error, and it needs nothing but the released eigenvalues and the size of the noise:

    x_i = l_i - 2 s^2 h_i,   h_i the Hilbert transform, at l_i, of the density of the eigenvalues l

with ``2 s`` the radius of the noise's semicircle (Bun, Allez, Bouchaud and Potters 2016, "Rotational invariant
estimator for general noisy matrices", additive noise). No structure of the matrix is assumed; where all of its
eigenvalues are one, that is what is left. What is computed from a release costs nothing.
"""

import math

import numpy as np

_BANDWIDTH = 0.5
"""Of the smoothed transform, over the range of the eigenvalues and the root of their number."""


_FEWEST = 3
"""Coordinates: of two, nothing is won."""


def without_noise(information: np.ndarray, scale: float) -> np.ndarray:
    """The matrix with the least expected error, shape (m, m).

    :param information: as released, symmetric.
    :param scale: standard deviation of the noise in `Derivatives.information`: of an entry of the diagonal, and root 2
        times that of the others.
    """
    m = len(information)
    if m < _FEWEST:
        return information
    values, vectors = np.linalg.eigh(information)
    width = _BANDWIDTH * max(float(np.ptp(values)), 1e-12) / math.sqrt(m)
    apart = values[:, None] - values
    transform = np.mean(apart / (apart**2 + width**2), axis=1)
    shrunk = np.sort(values - m * scale**2 * transform)
    return (vectors * shrunk) @ vectors.T


def noise_left(size: int) -> float:
    """About how much of the noise `without_noise` leaves, root mean square, where eigenvalues differ by some 30%.

    `tests/preparation/test_shrinkage.py` has what it is.
    """
    return min(1.0, math.sqrt(2.0 * size**-0.6))
