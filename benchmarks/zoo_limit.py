"""Tables on which the default is held against the limit of one release, from 500 rows to 51 coefficients.

The format and the kinds are those of `zoo.py`; all rows are as the model says.
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from limit import TABLES, logistic_table
from scipy.special import expit, log_expit, logsumexp
from zoo import Problem, normals, rows

LIMIT: dict[str, Problem] = {}
PRIOR_SCALE = 2.5
_PROPOSALS, _LEAST_ESS, _DF = 4_000, 0.2, 50


def regression(X, y):
    b = normals("b", PRIOR_SCALE, X.shape[1])
    with rows(X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def draw_logistic(d, rng, n):
    X, _, _, y = logistic_table(n, d, int(rng.integers(2**31)))
    return regression, {"X": X, "y": y}


for n, d in TABLES:
    kind = "small" if n < 4_000 else "everyday" if d <= 12 else "large"
    LIMIT[f"logistic_{n}_{d}"] = Problem(f"logistic_{n}_{d}", "limit", kind, n, partial(draw_logistic, d))


def draws_of_regression(seed, X, y):
    """Of `regression`: proposals from a Student's t around the mode, resampled by their weights. Shape (2, 1000, d)."""
    rng, X, signs = np.random.default_rng(seed), np.asarray(X, float), 2.0 * np.asarray(y) - 1
    d = X.shape[1]
    mode = np.zeros(d)
    for _ in range(30):
        p = expit(X @ mode)
        information = (X * (p * (1 - p))[:, None]).T @ X + np.eye(d) / PRIOR_SCALE**2
        mode += np.linalg.solve(information, X.T @ (np.asarray(y) - p) - mode / PRIOR_SCALE**2)
    spread = np.linalg.cholesky(np.linalg.inv(information))
    u = rng.standard_normal((_PROPOSALS, d)) / np.sqrt(rng.chisquare(_DF, (_PROPOSALS, 1)) / _DF)
    b = mode + u @ spread.T
    log_weights = -(b**2).sum(1) / (2 * PRIOR_SCALE**2) + (_DF + d) / 2 * np.log1p((u**2).sum(1) / _DF)
    for part in np.array_split(np.arange(len(y)), max(len(y) // 2_000, 1)):
        log_weights += log_expit(b @ (signs[part, None] * X[part]).T).sum(1)
    weights = np.exp(log_weights - logsumexp(log_weights))
    ess = 1 / (weights**2).sum()
    if ess < _LEAST_ESS * _PROPOSALS:
        raise RuntimeError(f"{ess:.0f} effective draws of {_PROPOSALS}")
    return {"b": b[rng.choice(_PROPOSALS, (2, 1000), p=weights)]}


def visits_by_practice(group, x, y):
    """Effects of groups that are not centred."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    b = normals("b", 1.0, 2)
    with numpyro.plate("practices", 15):
        z = numpyro.sample("z", dist.Normal(0, 1))
    effect = numpyro.deterministic("effect", mu + tau * z)
    with rows(y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(effect[group] + x @ b)), obs=y)


def draw_visits(rng, n):
    group, x = rng.integers(0, 15, n), rng.standard_normal((n, 2))
    effect = 0.5 + 0.4 * rng.standard_normal(15)
    y = rng.poisson(np.exp(effect[group] + x @ [0.3, -0.2]))
    return visits_by_practice, {"group": group, "x": x, "y": y}


LIMIT["visits_by_practice"] = Problem("visits_by_practice", "limit", "large", 30_000, draw_visits)
