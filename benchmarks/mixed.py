"""The default on mixed models, by person: error of posterior means beside the limit, and what a gradient costs.

    python benchmarks/mixed.py --tables 11-14 --eps 1 3      # the table of docs/models.md; a minute or two a run
    python benchmarks/mixed.py --gradient                    # a gradient, beside that of NumPyro's joint density

Each run is of a table of its own, with parameters drawn anew. Exact posteriors are normal at their modes: tables have
5,000 persons. In the place of an integral over all persons' latents stands the sum of the persons' integrals, which the
tests compare with NumPyro's densities.
"""

import argparse
import json
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from limit import limit
from numpyro.infer.util import potential_energy, unconstrain_fn

from numpyro_dp import DPHMC, MCMC
from numpyro_dp.privacy.accounting import gaussian_rho


def coefficients(X):
    return numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))


def logistic_intercept(person, X, y=None, persons=1):
    b, tau = coefficients(X), numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("persons", persons):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b + u[person]), obs=y)


def poisson_intercept(person, X, y=None, persons=1):
    b, tau = coefficients(X), numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("persons", persons):
        u = numpyro.sample("u", dist.Normal(0, 1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ b + tau * u[person])), obs=y)


def normal_slope(person, X, y=None, persons=1):
    b, sigma = coefficients(X), numpyro.sample("sigma", dist.HalfNormal(1))
    spread = numpyro.sample("spread", dist.HalfNormal(1).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("persons", persons):
        u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(2), scale_tril=spread[:, None] * root))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b + u[person, 0] + u[person, 1] * X[:, 1], sigma), obs=y)


MODELS = {f.__name__: f for f in (logistic_intercept, poisson_intercept, normal_slope)}


def table(name: str, seed: int, persons: int, most: int) -> dict:
    """A table with 1 to `most` rows a person."""
    rng = np.random.default_rng(seed)
    person = np.repeat(np.arange(persons), rng.integers(1, most + 1, persons))
    n = len(person)
    X = np.column_stack([np.ones(n), rng.uniform(-1, 1, n), rng.integers(0, 2, n)]).astype(np.float32)
    b, tau = rng.normal(size=3) * 0.5, rng.uniform(0.4, 1.2)
    if name == "normal_slope":
        covariance = np.array([[1, 0.3], [0.3, 1]]) * np.outer([tau, 0.5], [tau, 0.5])
        u = rng.multivariate_normal([0, 0], covariance, persons)
        y = (X @ b + u[person, 0] + u[person, 1] * X[:, 1] + 0.7 * rng.normal(size=n)).astype(np.float32)
    else:
        eta = X @ b + tau * rng.normal(size=persons)[person]
        y = rng.random(n) < 1 / (1 + np.exp(-eta)) if name == "logistic_intercept" else rng.poisson(np.exp(eta))
        y = y.astype(np.int32)
    return {"person": person, "X": X, "y": y, "persons": persons}


def by_person(separated, kwargs: dict):
    """The persons' log densities, a function of flat z."""
    rows, density = separated.rows((), kwargs), separated.row_log_density((), kwargs)
    return lambda z: jax.vmap(lambda *unit: density(z, tuple(part[None] for part in unit)))(*rows)


def one_run(name: str, eps: float, seed: int, persons: int, most: int) -> dict:
    kwargs = table(name, seed, persons, most)
    kernel = DPHMC(MODELS[name], eps=eps, unit="person")
    mcmc = MCMC(kernel, num_warmup=500, num_samples=1000, num_chains=4, progress_bar=False, chain_method="vectorized")
    start = time.perf_counter()
    mcmc.run(jax.random.key(seed), **kwargs)
    seconds = time.perf_counter() - start
    separated = kernel.separate((), kwargs)
    public = separated.without_private((), kwargs)
    draws = {site: mcmc.get_samples()[site] for site in separated.prototype}
    z = jax.vmap(lambda values: separated.ravel(unconstrain_fn(separated.prior_model, *public, values)))(draws)
    z = np.asarray(z, float)

    log_prior, each = separated.log_prior((), kwargs), by_person(separated, kwargs)
    gradient = jax.jit(jax.grad(lambda z: log_prior(z) + jnp.sum(each(z))))
    hessian = jax.jit(jax.hessian(lambda z: log_prior(z) + jnp.sum(each(z))))
    mode = jnp.asarray(z.mean(0), jnp.float32)
    for _ in range(8):
        mode = mode - jnp.linalg.solve(hessian(mode), gradient(mode))
    precision = -np.asarray(hessian(mode), float)
    scores = np.asarray(jax.jit(jax.jacfwd(each))(mode), float)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    error = (z.mean(0) - np.asarray(mode, float)) / sd
    return {
        "model": name,
        "eps": eps,
        "table": seed,
        "error": float(np.sqrt(np.mean(error**2))),
        "limit": float(limit(scores, precision, gaussian_rho(eps, 0.1 / persons))),
        "width": float(np.median(z.std(0) / sd)),
        "z": [round(float(x), 2) for x in error * sd / np.sqrt(np.maximum(z.var(0) - sd**2, (0.3 * sd) ** 2))],
        "trusted": mcmc.privacy.posterior.trusted,
        "reasons": list(mcmc.privacy.posterior.reasons),
        "nodes": len(separated.latents.rule.nodes),
        "seconds": round(seconds),
    }


def gradient_times(name: str, persons: int, most: int, rounds: int = 20) -> str:
    """A gradient of the sum over persons beside one of NumPyro's joint density, in turn."""
    kwargs = table(name, 0, persons, most)
    separated = DPHMC(MODELS[name], eps=1.0, unit="person").separate((), kwargs)
    each = by_person(separated, kwargs)
    joint_z = {site: jnp.zeros(np.shape(x)) for site, x in separated.prototype.items()}
    joint_z["u"] = jnp.zeros((persons, 2) if name == "normal_slope" else persons)
    functions = {
        "integrated": (jax.jit(jax.grad(lambda z: jnp.sum(each(z)))), jnp.zeros(separated.num_params)),
        "joint": (jax.jit(jax.grad(lambda z: potential_energy(MODELS[name], (), kwargs, z))), joint_z),
    }
    times: dict[str, list[float]] = {kind: [] for kind in functions}
    for k in range(rounds + 1):
        for kind, (function, z) in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(z))
            if k:
                times[kind].append(time.perf_counter() - start)
    ratio = np.median(np.array(times["integrated"]) / np.array(times["joint"]))
    nodes = len(separated.latents.rule.nodes)
    return f"{name}: {nodes} nodes, {1e3 * np.median(times['integrated']):.1f} ms, {ratio:.1f} times the joint gradient"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", default="11-14")
    parser.add_argument("--eps", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--persons", type=int, default=5_000)
    parser.add_argument("--most", type=int, default=6, help="rows of a person")
    parser.add_argument("--gradient", action="store_true")
    options = parser.parse_args()
    if options.gradient:
        for name in options.models:
            print(gradient_times(name, options.persons, options.most), flush=True)
        return
    warnings.simplefilter("ignore")
    first, last = map(int, options.tables.split("-"))
    found = []
    for seed in range(first, last + 1):
        for name in options.models:
            for eps in options.eps:
                found.append(one_run(name, eps, seed, options.persons, options.most))
                print(json.dumps(found[-1]), flush=True)
    for name in options.models:
        for eps in options.eps:
            runs = [run for run in found if run["model"] == name and run["eps"] == eps]
            error, bound, width = (np.median([run[key] for run in runs]) for key in ("error", "limit", "width"))
            z = np.concatenate([run["z"] for run in runs])
            print(
                f"{name:<20} eps {eps:g}: error {error:.2f}, limit {bound:.2f}, width {width:.2f}, z sd {z.std():.2f}, "
                f"{sum(run['trusted'] for run in runs)} of {len(runs)} trusted"
            )


if __name__ == "__main__":
    main()
