"""The integral of a density over a few latent values, by nodes that lie where the density is (adaptive quadrature).

    ``log integral exp(joint(w)) dw  ~  log sum_k exp(joint(m + L t_k) + log a_k) + log |L|``

The nodes ``t_k`` are made for a standard normal law. A few Newton steps find the mode of the joint density and its
curvature there (Liu and Pierce 1994). Twice then the nodes are moved to the mean m and to a root L of the covariance
that they find themselves (Naylor and Smith 1982): a density with a narrow peak on a broad base would be cut off
otherwise. A normal joint density is integrated exactly, derivatives included, by the 2 q nodes of the smallest rule.

The number of steps is fixed, and everything depends on the one density alone: how long it takes tells nothing of a
row. To derivatives the nodes are constants. What comes out is then the same rule's value of the integral of the
derivative, whose error is as small; it is why every rule has more than one node.

============  ======================================================================================================
latents       nodes
============  ======================================================================================================
any number    2 q points at distance sqrt(q) on the axes: exact for cubic polynomials
1 to 3        the product of Gauss-Hermite rules
more          a lattice, mapped to the normal law, with each point's mirror image, and moments matched up to the third
============  ======================================================================================================
"""

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.special import logsumexp

Density = Callable[[jax.Array], jax.Array]
"""The log of a density of the latents w, shape (q,)."""

MOST_LATENTS = 16
"""Of one row or unit. Lattices of more are not tried."""
_PRIOR_STEPS = 4  # of Newton: from the means of the latents' laws to the mode
_LENGTHS = (1.0, 0.4, 0.1)  # of a Newton step, tried at once
_RADII = (4.0, 2.0, 1.0, 0.25)  # within which it is tried, too, in standard deviations of the prior
_STARTS = (-5.0, -3.0, -1.5, 0.0, 1.5, 3.0, 5.0)  # in these, along each axis
_ROUNDS = 2  # in which nodes are moved to the mean and the spread that they find
_SPREADS = (0.25, 16.0)  # least and largest variance by which a round changes a scale
_FLOOR = 0.1  # curvature in units of the prior's: below that a density has no normal shape


class Rule(NamedTuple):
    """Where a density is evaluated.

    :ivar steps: of Newton; None for nodes in the place of the latents' prior, wherever the joint density lies.
    :ivar nodes: of a standard normal law, shape (k, q).
    :ivar log_weights: so that ``sum exp(log_weights) f(nodes)`` is the integral of f, shape (k,).
    """

    steps: int | None
    nodes: np.ndarray
    log_weights: np.ndarray

    def padded(self, number: int) -> "Rule":
        """The rule with so many nodes, of which those behind its own have no weight."""
        more = number - len(self.nodes)
        nodes = np.pad(self.nodes, ((0, more), (0, 0)))
        return self._replace(nodes=nodes, log_weights=np.pad(self.log_weights, (0, more), constant_values=-np.inf))


def rules(size: int) -> list[Rule]:
    """Rules for so many latents, the cheapest first; the last one only measures the others."""
    if size <= 3:
        numbers = {1: (5, 9, 15, 25, 41), 2: (4, 6, 10, 15), 3: (3, 5, 7, 10)}[size]
        sets = [_hermite(size, k) for k in numbers]
    else:
        sets = [_lattice(size, k) for k in (64, 256, 1024, 2048)]
    steps = (4, 6, 8, 12, 16)[-len(sets) :]
    return [Rule(3, *_axes(size)), *(Rule(s, *nodes) for s, nodes in zip(steps, sets, strict=True))]


def grids(size: int) -> list[Rule]:
    """Two even grids in the place of the prior, one between the other: where they agree, they are right.

    They know nothing of where a joint density lies, and so tell whether adaptive rules have found it.
    """
    reach, number = {1: (8.0, 512), 2: (7.0, 64)}[size]
    spacing = 2 * reach / number
    found = []
    for shift in (0.25, 0.75):
        side = -reach + (np.arange(number) + shift) * spacing
        nodes = np.stack([part.ravel() for part in np.meshgrid(*[side] * size, indexing="ij")], 1)
        found.append(Rule(None, nodes, np.full(len(nodes), size * math.log(spacing))))
    return found


def _with_weights(nodes: np.ndarray, log_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nodes, and weights of a sum of values from those of values in proportion to the normal density."""
    log_normal = -np.sum(nodes**2, 1) / 2 - nodes.shape[1] * math.log(2 * math.pi) / 2
    return nodes, log_weights - logsumexp(log_weights) - log_normal


def _axes(size: int) -> tuple[np.ndarray, np.ndarray]:
    nodes = math.sqrt(size) * np.concatenate([np.eye(size), -np.eye(size)])
    return _with_weights(nodes, np.zeros(2 * size))


def _hermite(size: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(number)
    grid = np.array(list(itertools.product(nodes, repeat=size)))
    log_weights = np.array([sum(w) for w in itertools.product(np.log(weights), repeat=size)])
    return _with_weights(grid, log_weights)


def _lattice(size: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Half of the points by Kronecker's sequence (the generalised golden ratio), the others opposite to them."""
    ratio = 2.0
    for _ in range(64):
        ratio = (1 + ratio) ** (1 / (size + 1))
    steps = ratio ** -np.arange(1, size + 1)
    uniform = (0.5 + np.arange(1, number // 2 + 1)[:, None] * steps) % 1
    points = np.vectorize(NormalDist().inv_cdf)(uniform)
    points = np.concatenate([points, -points])
    root = np.linalg.cholesky(points.T @ points / len(points))
    return _with_weights(np.linalg.solve(root, points.T).T, np.zeros(len(points)))


def log_integral(rule: Rule, bind: Callable, z: jax.Array) -> jax.Array:
    """The log of the integral of a joint density over its latents.

    :param bind: from the parameters z to the latents' start (q,), their log prior and the log joint density, both of w.
        The start and the prior are there to find the scale on which the joint density is looked for.
    :param z: parameters, shape (d,). Derivatives are with respect to these.
    """
    nodes, log_volume = _place(rule, *bind(lax.stop_gradient(z)))
    *_, joint = bind(z)
    values = jax.vmap(joint)(lax.stop_gradient(nodes))
    weighted = values + jnp.asarray(rule.log_weights, values.dtype)
    return jax.nn.logsumexp(weighted) + lax.stop_gradient(log_volume).astype(values.dtype)


def _place(rule: Rule, start: jax.Array, prior: Density, joint: Density) -> tuple[jax.Array, jax.Array]:
    """The nodes (k, q) in the place of a joint density, and the log of their scale's volume."""
    centre, root, log_volume = _fit(prior, start, _PRIOR_STEPS, 0.0)

    def whitened(v: jax.Array) -> jax.Array:
        return joint(centre + root @ v)

    nodes, log_weights = (jnp.asarray(part, start.dtype) for part in (rule.nodes, rule.log_weights))
    if rule.steps is None:
        return centre + nodes @ root.T, log_volume
    starts = jnp.concatenate([x * jnp.eye(start.size, dtype=start.dtype) for x in _STARTS])
    mode, inner, log_inner = _fit(whitened, _best(whitened, starts), rule.steps, _FLOOR, _RADII)

    def by_moments(placed: tuple, _: None) -> tuple[tuple, None]:
        mean, scale, log_scale = placed
        weights = jax.nn.softmax(jax.vmap(whitened)(mean + nodes @ scale.T) + log_weights)
        weights = jnp.where(jnp.all(jnp.isfinite(weights)), weights, 1 / len(nodes))
        moved = weights @ nodes
        spread, log_spread = _root((nodes - moved).T @ ((nodes - moved) * weights[:, None]), *_SPREADS)
        return (mean + scale @ moved, scale @ spread, log_scale + log_spread), None

    (mean, scale, log_scale), _ = lax.scan(by_moments, (mode, inner, log_inner), None, length=_ROUNDS)
    return centre + (mean + nodes @ scale.T) @ root.T, log_volume + log_scale


def _best(density: Density, tried: jax.Array) -> jax.Array:
    values = jax.vmap(density)(tried)
    return tried[jnp.argmax(jnp.where(jnp.isnan(values), -jnp.inf, values))]


def _fit(
    density: Density, start: jax.Array, steps: int | jax.Array, floor: float, radii: tuple[float, ...] = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The mode of a log density, a root of its inverse curvature there, and the log of the root's determinant.

    Whatever a density is, the mode and the root are finite.

    :param floor: of curvatures. What is not above that is taken for it; for 1, if it is 0.
    :param radii: to which steps are shortened. A step for counts far above their mean would overshoot a hundredfold.
    """
    gradient = jax.grad(density)
    lengths = jnp.asarray((0.0, *_LENGTHS), start.dtype)

    def curvature(w: jax.Array) -> jax.Array:
        hessian = -jax.jacfwd(gradient)(w)
        return jnp.where(jnp.all(jnp.isfinite(hessian)), hessian, jnp.eye(w.size, dtype=w.dtype))

    def step(_: jax.Array, w: jax.Array) -> jax.Array:
        root = _inverse_root(curvature(w), floor)[0]
        slope = gradient(w)
        move = root @ (root.T @ jnp.where(jnp.isfinite(slope), slope, 0))
        move = jnp.where(jnp.isfinite(move), move, 0)
        within = [jnp.minimum(1, r / jnp.maximum(jnp.linalg.norm(move), jnp.finfo(w.dtype).tiny)) for r in radii]
        shares = jnp.append(lengths, jnp.array(within, w.dtype))
        return _best(density, w + shares[:, None] * move)

    mode = lax.fori_loop(0, steps, step, start)
    return mode, *_inverse_root(curvature(mode), floor)


def _inverse_root(matrix: jax.Array, floor: float) -> tuple[jax.Array, jax.Array]:
    """A matrix R with ``R R' = inverse(matrix)``, and the log of its determinant.

    :param floor: of pivots; see `_fit`.
    """
    size = matrix.shape[0]
    root, log_determinant = _root(matrix, floor)
    rows: list[jax.Array] = []  # of the inverse of the root
    for k in range(size):
        known = sum((root[k, j] * rows[j] for j in range(k)), start=jnp.zeros(size, matrix.dtype))
        rows.append((jnp.eye(size, dtype=matrix.dtype)[k] - known) / root[k, k])
    return jnp.stack(rows).T, -log_determinant


def _root(matrix: jax.Array, least: float, largest: float = math.inf) -> tuple[jax.Array, jax.Array]:
    """Cholesky's lower factor of a matrix, and the log of its determinant.

    Written out, a column at a time: over many rows that is arithmetic on long vectors.

    :param least, largest: of pivots. Others are taken for these; for 1, if `least` is 0.
    """
    size = matrix.shape[0]
    columns: list[jax.Array] = []
    pivots: list[jax.Array] = []
    left = matrix
    for k in range(size):
        pivot = left[k, k]
        pivot = jnp.minimum(jnp.where(pivot > least, pivot, least or 1.0), largest)
        column = left[:, k] / jnp.sqrt(pivot)
        column = jnp.where(jnp.arange(size) > k, column, 0).at[k].set(jnp.sqrt(pivot))
        left = left - jnp.outer(column, column)
        columns.append(column)
        pivots.append(pivot)
    return jnp.stack(columns, 1), jnp.sum(jnp.log(jnp.stack(pivots))) / 2
