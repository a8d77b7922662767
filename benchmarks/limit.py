"""The limit of one noisy release, beside which every figure of the default stands.

    python benchmarks/limit.py            # the table of docs/small-eps.md

If the whole budget went into one Gaussian sum of clipped row gradients, centred, at the true mode and in exactly
whitened coordinates, with the clip bound that serves best, the posterior's place would still be off: by the noise, and
by the information that the clip takes. No search, no release of curvature; whoever releases one clipped sum can do no
better. With g a row's gradient in coordinates in which the posterior has variance 1, c the same clipped at C, P the
prior's precision there, ``B = sum c g'`` and ``V = sum c c'``, whoever sees the sum with noise of variance ``s^2 = (2
C)^2 / (2 rho)`` knows the parameters with the precision ``L = P + B' (V + s^2)^-1 B``, and their posterior mean is off
from the exact one by the covariance ``L^-1 - (P + sum g g')^-1``; printed is the root of its mean variance, in exact
posterior standard deviations. Replace-one.
"""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_dp.model.coordinates import find_cut
from numpyro_dp.model.separate import separate
from numpyro_dp.privacy.accounting import gaussian_rho


def limit(scores: np.ndarray, precision: np.ndarray, rho: float) -> float:
    """
    :param scores: gradients of the rows at the posterior's place, shape (n, m).
    :param precision: of the posterior, prior included, shape (m, m).
    :param rho: the budget.
    """
    n, m = scores.shape
    white = scores @ np.linalg.cholesky(np.linalg.inv(precision))
    norms = np.linalg.norm(white, axis=1)
    information = white.T @ white
    # The posterior's precision is 1 here. Rows that are not as the model says may seem to have more of their own.
    values, vectors = np.linalg.eigh(np.eye(m) - information)
    prior = (vectors * np.maximum(values, 1e-9)) @ vectors.T
    exact = np.trace(np.linalg.inv(prior + information))
    errors = []
    for bound in np.sqrt(m / n) * np.geomspace(0.2, 6, 60):
        clipped = white * np.minimum(1, bound / np.maximum(norms, 1e-30))[:, None]
        answer, noise = clipped.T @ white, (2 * bound) ** 2 / (2 * rho) * np.eye(m)
        known = prior + answer.T @ np.linalg.solve(clipped.T @ clipped + noise, answer)
        errors.append(np.sqrt(max(np.trace(np.linalg.inv(known)) - exact, 0.0) / m))
    return float(min(errors))


def limit_of(model, kwargs: dict, exact: dict, rho: float) -> float | None:
    """The limit for a model and its table, at the exact posterior's mean; None where a row's gradient is not finite.

    :param exact: draws of the posterior by site.
    """
    separated = separate(model, (), kwargs, None, None, True)
    cut = find_cut(separated, (), kwargs)
    constrained = {name: np.asarray(draws) for name, draws in exact.items() if name in separated.prototype}
    if set(constrained) != set(separated.prototype):
        return None
    draws = _unconstrained(model, kwargs, constrained)
    if draws is None:
        return None
    phi = np.asarray(jax.vmap(lambda z: cut.coordinates(separated.ravel(z)))(draws), float)
    center = jnp.asarray(phi.mean(0), jnp.result_type(float))
    rows = separated.rows((), kwargs)
    gradient = jax.grad(lambda at, *row: cut.row_log_density(at, tuple(part[None] for part in row)))
    scores = np.asarray(jax.vmap(gradient, (None, *(0,) * len(rows)))(center, *rows), float)
    precision = np.linalg.pinv(np.cov(phi, rowvar=False).reshape(cut.size, cut.size))
    return limit(scores, precision, rho) if np.isfinite(scores).all() else None


def _unconstrained(model, kwargs: dict, draws: dict):
    from numpyro.infer.util import unconstrain_fn

    try:
        return jax.vmap(lambda values: unconstrain_fn(model, (), kwargs, values))(
            {name: jnp.asarray(values) for name, values in draws.items()}
        )
    except Exception:  # a site whose draws are not its parameters: no figure is better than a wrong one
        return None


TABLES = ((500, 1), (500, 3), (1_000, 3), (2_000, 3), (10_000, 6), (20_000, 21), (20_000, 51), (100_000, 11))


def logistic_table(n: int, d: int, seed: int = 0):
    """Covariates with an intercept, true coefficients, outcomes."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d))
    X[:, 0] = 1
    b = 0.6 * rng.standard_normal(d) / np.sqrt(max(d / 5, 1))
    p = 1 / (1 + np.exp(-X @ b))
    return X, b, p, (rng.random(n) < p).astype(int)


if __name__ == "__main__":
    print(f"{'logistic, n':>12}{'d':>5}" + "".join(f"{f'eps {eps:g}':>10}" for eps in (0.3, 1.0, 3.0)))
    for n, d in TABLES:
        X, _, p, y = logistic_table(n, d)
        precision = (X * (p * (1 - p))[:, None]).T @ X
        limits = [limit((y - p)[:, None] * X, precision, gaussian_rho(eps, 0.1 / n)) for eps in (0.3, 1.0, 3.0)]
        print(f"{n:>12,}{d:>5}" + "".join(f"{found:>10.2f}" for found in limits))
