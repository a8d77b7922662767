"""What is made of information matrices that were released: noise taken off, and how far the rows answer as they say."""

import math
from typing import Any

import numpy as np

_UNSURE_ANSWER = 0.25
"""Noise of an answer with which it counts half."""
_UNSURE_EDGE = 0.5
"""Largest eigenvalue of the noise in how gradients fall, over what that is on average, with which it counts half."""
_ANSWERS = 0.1, 4.0
_LEAST_TRACE = 4.0
"""Standard deviations of the trace's noise below which it says nothing."""


def answered(
    squares: np.ndarray, squares_scale: float, fall: np.ndarray, fall_scale: float
) -> tuple[np.ndarray, float, float]:
    """How a score answers to the parameters: the gradients' squares, as far as noise hides how gradients fall.

    First all squares by one factor, which little noise hides; then, as far as they can be told, each by its own.

    :param squares, fall: sums over rows, in the frame, with the standard deviations of the noise in their diagonals.
    :return: the information, that of the noise in it, and the one factor (`Derivatives.answer`).
    """
    m, trace = len(squares), float(np.trace(squares))
    if trace < _LEAST_TRACE * math.sqrt(m) * squares_scale:
        return squares, squares_scale, 1.0
    noise = math.sqrt(m) * fall_scale / trace
    sure = 1 / (1 + (noise / _UNSURE_ANSWER) ** 2)
    answer = float(np.clip(1 + sure * (np.trace(fall) / trace - 1), *_ANSWERS))
    edge = math.sqrt(2 * m) * fall_scale / (answer * trace / m)  # of the noise, over what it is in
    sure = 1 / (1 + (edge / _UNSURE_EDGE) ** 2)
    information = (1 - sure) * answer * squares + sure * fall
    return information, math.hypot((1 - sure) * answer * squares_scale, sure * fall_scale), answer


def without_apart(
    information: np.ndarray, scale: float, whitening: np.ndarray, apart: np.ndarray | None
) -> tuple[np.ndarray, float]:
    """The information nearest to a released one that has nothing where it can have nothing, and the noise left in it.

    In the coordinates phi it is 0 for each pair that no row depends on both of, so what was released there is noise.

    :param information, scale: in the frame, and the standard deviation of the noise in its diagonal.
    :param apart: `Cut.apart`.
    """
    if apart is None or not apart.any():
        return information, scale
    m = len(apart)
    rows, columns = np.nonzero(np.tril(~apart))
    # Matrices of the frame whose noise, as vectors, has the same standard deviation in all directions.
    basis = [np.outer(whitening[i], whitening[j]) for i, j in zip(rows, columns, strict=True)]
    space, _ = np.linalg.qr(np.array([vector_of(b + b.T) for b in basis]).T)
    noise = np.random.default_rng(0).standard_normal((16, len(space))) @ space @ space.T
    edge = np.mean([np.abs(np.linalg.eigvalsh(matrix_of(x, m))).max() for x in noise])
    return matrix_of(space @ (space.T @ vector_of(information)), m), scale * min(float(edge) / math.sqrt(2 * m), 1.0)


def vector_of(matrix: Any) -> Any:
    """The lower triangle of a symmetric matrix, weighted so that the vector's norm is the matrix's."""
    rows, columns = np.tril_indices(matrix.shape[0])
    return matrix[rows, columns] * np.where(rows == columns, 1, np.sqrt(2)).astype(matrix.dtype)


def matrix_of(vector: np.ndarray, size: int) -> np.ndarray:
    """The symmetric matrix of a `vector_of`."""
    rows, columns = np.tril_indices(size)
    matrix = np.zeros((size, size))
    matrix[rows, columns] = vector / np.where(rows == columns, 1, np.sqrt(2))
    return matrix + np.tril(matrix, -1).T
