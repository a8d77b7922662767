"""The models of `benchmarks/small_eps.py`: as an ordinary user writes them, data to a seed, and their exact posteriors.

    from benchmarks.small_eps_models import CASES, moments, reference
    model, args, kwargs, truth = CASES["logistic-1e4-5"].make(0)
    exact = reference("logistic-1e4-5", 0)  # {site: draws of the exact posterior}, cached in benchmark-output/small_eps

References do not come from long chains. Where the posterior is known it is drawn from. Elsewhere: importance sampling,
from a multivariate t at the mode (smooth models), from the prior times a Gaussian likelihood (hierarchical ones), from
a grid (curved ones in two dimensions); in float64, with the effective sample size checked. The papers' own models
(Gaussian, mixture, bananas, circle) and the ways to draw from posteriors are in `experiments/models.py`.
"""

import argparse
import hashlib
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import expit, logsumexp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for those who run this as a script

from experiments.models import (
    draw_banana,
    draw_circle,
    draw_gaussian,
    draw_mixture,
    draw_smooth,
    flat,
    make_banana,
    make_circle,
    make_gaussian,
    make_mixture,
    resampled,
)

CACHE = Path(__file__).resolve().parents[1] / "benchmark-output" / "small_eps"

# -- Models ------------------------------------------------------------------------------------------------------------


def logistic(X, y):
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def logistic_with_intercept(X, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ b), obs=y)


def poisson(X, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(intercept + X @ b)), obs=y)


def negative_binomial(X, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 0.5))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(intercept + X @ b), concentration), obs=y)


def student_t_known_nu(X, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2.5))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4, intercept + X @ b, sigma), obs=y)


def student_t(X, y):
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 2.5).expand([X.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0))
    nu = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.StudentT(nu, intercept + X @ b, sigma), obs=y)


def hierarchical_centred(group, X, y, groups):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("groups", groups):
        alpha = numpyro.sample("alpha", dist.Normal(mu, sigma))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=alpha[group] + X @ b), obs=y)


def hierarchical_noncentred(group, X, y, groups):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("groups", groups):
        z = numpyro.sample("z", dist.Normal(0, 1))
    alpha = mu + sigma * z
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=alpha[group] + X @ b), obs=y)


# -- Data --------------------------------------------------------------------------------------------------------------


def _columns(rng, rows, columns, correlation=0.0):
    """Standard normal covariates, AR(1) across columns."""
    X = rng.standard_normal((rows, columns))
    for k in range(1, columns):
        X[:, k] = correlation * X[:, k - 1] + np.sqrt(1 - correlation**2) * X[:, k]
    return X


def _table(X, y, dtype=np.int32):
    return np.asarray(X, np.float32), np.asarray(y, dtype)


def make_logistic(rows, columns, correlation=0.0):
    def make(seed):
        rng = np.random.default_rng([1, rows, columns, seed])
        X = _columns(rng, rows, columns, correlation)
        b = 0.5 * rng.standard_normal(columns)
        y = rng.random(rows) < expit(X @ b)
        return logistic, _table(X, y), {}, {"b": b}

    return make


def make_heavy_tailed(seed):
    """Student-t covariates with 3 degrees of freedom: a few rows have most of the leverage."""
    rows, columns = 20_000, 6
    rng = np.random.default_rng([2, seed])
    X = rng.standard_t(3, (rows, columns))
    b = 0.5 * rng.standard_normal(columns)
    y = rng.random(rows) < expit(X @ b)
    return logistic, _table(X, y), {}, {"b": b}


def make_rare(seed):
    """2% of the outcomes are positive."""
    rows, columns = 50_000, 5
    rng = np.random.default_rng([3, seed])
    X = _columns(rng, rows, columns)
    b = 0.5 * rng.standard_normal(columns)
    low, high = -20.0, 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expit(middle + X @ b).mean() < 0.02 else (low, middle)
    y = rng.random(rows) < expit(low + X @ b)
    return logistic_with_intercept, _table(X, y), {}, {"intercept": np.array(low), "b": b}


def make_poisson(seed):
    rows, columns = 20_000, 5
    rng = np.random.default_rng([4, seed])
    X = _columns(rng, rows, columns)
    intercept, b = np.array(0.5), 0.3 * rng.standard_normal(columns)
    y = rng.poisson(np.exp(intercept + X @ b))
    return poisson, _table(X, y), {}, {"intercept": intercept, "b": b}


def make_negative_binomial(seed):
    rows, columns = 20_000, 5
    rng = np.random.default_rng([5, seed])
    X = _columns(rng, rows, columns)
    intercept, b, concentration = np.array(1.0), 0.3 * rng.standard_normal(columns), np.array(2.0)
    y = rng.poisson(np.exp(intercept + X @ b) * rng.gamma(concentration, 1 / concentration, rows))
    return negative_binomial, _table(X, y), {}, {"intercept": intercept, "b": b, "concentration": concentration}


def make_student_t(seed):
    rows, columns = 20_000, 5
    rng = np.random.default_rng([6, seed])
    X = _columns(rng, rows, columns)
    intercept, b = np.array(1.0), rng.standard_normal(columns)
    sigma, nu = np.array(1.0), np.array(4.0)
    y = intercept + X @ b + sigma * rng.standard_t(nu, rows)
    return student_t, _table(X, y, np.float32), {}, {"intercept": intercept, "b": b, "sigma": sigma, "nu": nu}


def make_student_t_known_nu(seed):
    """Four degrees of freedom, as they were drawn with."""
    _, args, kwargs, truth = make_student_t(seed)
    return student_t_known_nu, args, kwargs, {name: value for name, value in truth.items() if name != "nu"}


def make_hierarchical(rows, groups, model):
    def make(seed):
        rng = np.random.default_rng([9, rows, groups, seed])  # the same table, centred or not
        group = rng.integers(0, groups, rows)
        X = _columns(rng, rows, 3)
        mu, sigma, b = np.array(-0.5), np.array(0.7), 0.5 * rng.standard_normal(3)
        z = rng.standard_normal(groups)
        alpha = mu + sigma * z
        y = rng.random(rows) < expit(alpha[group] + X @ b)
        truth = {"b": b, "mu": mu, "sigma": sigma, "alpha": alpha, "z": z}
        return model, (np.asarray(group, np.int32), *_table(X, y)), {"groups": groups}, truth

    return make


# -- Cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What default fits should reach at some eps, in the median.

    :ivar at_most: error or MMD, see `Case.metric`.
    :ivar coverage: least and largest coverage of exact draws, in the mean.
    :ivar or_refused: whether a refusal, before anything is spent, is as good.
    """

    at_most: float
    coverage: tuple[float, float] | None = None
    or_refused: bool = False

    def __str__(self):
        parts = [f"{self.at_most:g}"]
        if self.coverage:
            low, high = self.coverage
            parts.append(f"coverage above {low:g}" if high == 1 else f"coverage {low:g} to {high:g}")
        return ", ".join(parts) + " or refused" * self.or_refused


@dataclass(frozen=True)
class Case:
    """A model with tables to draw.

    :ivar make: from a seed to the model, its positional and keyword arguments, and the parameters that made the table.
    :ivar draw: from model, arguments and a random generator to exact draws by site, and log weights or None.
    :ivar options: of the kernel, for every method.
    :ivar metric: what the targets are about: "means", or "mmd" for curved posteriors.
    :ivar targets: by eps.
    :ivar papers: settings of the published samplers for this model, for the methods plain-hmc and plain-penalty.
    :ivar start: where the published samplers start, if not around the true parameters.
    """

    name: str
    make: Callable
    draw: Callable
    options: dict[str, Any] = field(default_factory=dict)
    metric: str = "means"
    targets: dict[float, Target] = field(default_factory=dict)
    papers: dict[str, dict[str, Any]] = field(default_factory=dict)
    start: dict[str, Any] | None = None

    def quantities(self, samples) -> dict[str, np.ndarray]:
        """What is compared: the sampled sites, group effects centred, as {site: (draws, size)}."""
        samples = {name: np.asarray(value, float) for name, value in samples.items()}
        if "z" in samples:
            z = samples.pop("z")
            samples["alpha"] = samples["mu"][..., None] + samples["sigma"][..., None] * z
        return {name: value.reshape(len(value), -1) for name, value in samples.items()}

    def true_quantities(self, truth) -> np.ndarray:
        """The generating parameters, in the order of `flat`."""
        return flat(self.quantities({name: np.asarray(value, float)[None] for name, value in truth.items()}))[0]


# -- Exact posteriors --------------------------------------------------------------------------------------------------


def draw_hierarchical(model, args, kwargs, rng):
    """Importance sampling from prior x Gaussian likelihood in (group effects, coefficients), itself sampled by NUTS."""
    group, X, y = args
    groups, columns = kwargs["groups"], X.shape[1]
    X, signs = np.asarray(X, float), 2.0 * y - 1
    design = np.concatenate([np.eye(groups)[group], X], axis=1)
    phi = np.zeros(groups + columns)
    for _ in range(30):
        p = expit(design @ phi)
        information = (design * (p * (1 - p))[:, None]).T @ design + 1e-3 * np.eye(len(phi))
        step = np.linalg.solve(information, design.T @ (y - p) - 1e-3 * phi)
        phi = phi + step
    # With the 1e-3 above, a group without positives has a mode too; the weights correct for it.
    factor = np.linalg.cholesky(information).T

    def surrogate():
        b = numpyro.sample("b", dist.Normal(0, 1).expand([columns]).to_event(1))
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        alpha = numpyro.sample("alpha", dist.Normal(mu, sigma).expand([groups]).to_event(1))
        numpyro.factor("likelihood", -0.5 * ((jnp.asarray(factor) @ (jnp.concatenate([alpha, b]) - phi)) ** 2).sum())

    with jax.enable_x64(True):
        start = {"b": phi[groups:], "mu": phi[:groups].mean(), "sigma": phi[:groups].std(), "alpha": phi[:groups]}
        kernel = numpyro.infer.NUTS(surrogate, dense_mass=True, init_strategy=numpyro.infer.init_to_value(values=start))
        mcmc = numpyro.infer.MCMC(
            kernel, num_warmup=1000, num_samples=4000, num_chains=1, chain_method="sequential", progress_bar=False
        )
        mcmc.run(jax.random.key(int(rng.integers(2**31))))
        draws = {name: np.asarray(value) for name, value in mcmc.get_samples().items()}
    points = np.concatenate([draws["alpha"], draws["b"]], axis=1)
    log_weights = 0.5 * (((points - phi) @ factor.T) ** 2).sum(1)
    with jax.enable_x64(True):
        likelihood = jax.jit(lambda points, signed: jax.nn.log_sigmoid(points @ signed.T).sum(1))
        for start_row in range(0, len(y), 2000):
            log_weights += np.asarray(likelihood(points, signs[start_row:][:2000, None] * design[start_row:][:2000]))
    draws["z"] = (draws["alpha"] - draws["mu"][:, None]) / draws["sigma"][:, None]
    return draws, log_weights


def _case(name, make, draw, **options):
    return name, Case(name, make, draw, **options)


_HIERARCHICAL = {"targets": {1: Target(0.45, (0.85, 0.95)), 3: Target(0.15, (0.85, 0.95))}}
_GAUSS = {  # clip bounds, and leapfrog steps, of the DP-HMC paper
    "plain-hmc": {"clip_ratio": 6.0, "clip_grad": 6.0, "num_steps": 12},
    "plain-penalty": {"clip_ratio": 10.0},
}
_BANANA = {
    "plain-hmc": {"clip_ratio": 0.1, "clip_grad": 0.1, "num_steps": 25},
    "plain-penalty": {"clip_ratio": 0.15},
}
_RAISA = [20**0.5, 2.5**0.5]

CASES: dict[str, Case] = dict(
    [
        _case(
            "logistic-1e4-5",
            make_logistic(10_000, 5),
            draw_smooth,
            targets={1: Target(0.55), 3: Target(0.2), 10: Target(0.08)},
        ),
        _case(
            "logistic-1e5-10",
            make_logistic(100_000, 10, 0.6),
            draw_smooth,
            targets={0.3: Target(0.85), 1: Target(0.33)},
        ),
        _case("logistic-2e4-20", make_logistic(20_000, 20), draw_smooth, targets={1: Target(1.5, or_refused=True)}),
        _case("poisson", make_poisson, draw_smooth, targets={1: Target(0.65)}),
        _case("gaussian-10", make_gaussian, draw_gaussian, targets={1: Target(0.18)}, papers=_GAUSS),
        _case("mixture", make_mixture, draw_mixture, options={"n0": 100}, metric="mmd", targets={1: Target(0.05)}),
        _case(
            "hierarchical-8", make_hierarchical(20_000, 8, hierarchical_noncentred), draw_hierarchical, **_HIERARCHICAL
        ),
        _case(
            "hierarchical-8-centred",
            make_hierarchical(20_000, 8, hierarchical_centred),
            draw_hierarchical,
            **_HIERARCHICAL,
        ),
        _case(
            "hierarchical-30",
            make_hierarchical(50_000, 30, hierarchical_noncentred),
            draw_hierarchical,
            **_HIERARCHICAL,
        ),
        _case(
            "hierarchical-30-centred",
            make_hierarchical(50_000, 30, hierarchical_centred),
            draw_hierarchical,
            **_HIERARCHICAL,
        ),
        _case("student-t", make_student_t_known_nu, draw_smooth, targets={1: Target(0.5)}),
        _case("student-t-nu", make_student_t, draw_smooth),
        _case("negative-binomial", make_negative_binomial, draw_smooth, targets={1: Target(0.9)}),
        _case("heavy-tailed", make_heavy_tailed, draw_smooth, targets={1: Target(0.9)}),
        _case("rare", make_rare, draw_smooth, targets={1: Target(1.2, (0.8, 1), or_refused=True), 3: Target(0.5)}),
        _case(
            "banana",
            make_banana(100_000, [2000**0.5, 2500**0.5], 20.0),
            draw_banana,
            metric="mmd",
            targets={1: Target(0.08), 3: Target(0.04)},
            papers=_BANANA,
        ),
        _case("narrow-banana", make_banana(150_000, _RAISA, 350.0), draw_banana, metric="mmd"),
        _case("banana-10", make_banana(200_000, [*_RAISA, *[1.0] * 8], 20.0), draw_banana, metric="mmd"),
        _case("circle", make_circle, draw_circle, metric="mmd", start={"x": np.array(0.0), "y": np.array(3.0)}),
    ]
)
"""By name. The hierarchical ones without a suffix are non-centred."""


@dataclass(frozen=True)
class Exact:
    """An exact posterior.

    :ivar draws: {site: draws}, equally weighted.
    :ivar mean, sd: of the quantities that are compared (`flat`), with the importance weights.
    :ivar ess: effective number of draws behind them.
    :ivar seconds: what they took.
    """

    draws: dict[str, np.ndarray]
    mean: np.ndarray
    sd: np.ndarray
    ess: float
    seconds: float


def exact(name: str, seed: int) -> Exact:
    """The exact posterior of a case, from the cache if it is there."""
    name = name.removesuffix("-centred")  # the same table and posterior
    case = CASES[name]
    model, args, kwargs, _ = case.make(seed)
    function, settings = (model.func, model.keywords) if isinstance(model, partial) else (model, {})
    made_of = hashlib.sha256(inspect.getsource(function).encode())
    for leaf in jax.tree.leaves((args, kwargs, settings)):
        made_of.update(np.asarray(leaf).tobytes())
    path = CACHE / f"{name}-{seed}-{made_of.hexdigest()[:16]}.npz"
    if path.exists():
        with np.load(path) as stored:
            draws = {key.removeprefix("draws_"): stored[key] for key in stored.files if key.startswith("draws_")}
            return Exact(draws, stored["mean"], stored["sd"], float(stored["ess"]), float(stored["seconds"]))
    start = time.perf_counter()
    rng = np.random.default_rng([0, seed])
    draws, log_weights = case.draw(model, args, kwargs, rng)
    size = len(next(iter(draws.values())))
    if log_weights is None:
        log_weights = np.zeros(size)
    weights = np.exp(log_weights - logsumexp(log_weights))
    ess = 1 / (weights**2).sum()
    if ess < 0.2 * size:
        raise RuntimeError(f"{name}, seed {seed}: {ess:.0f} effective draws of {size}")
    values = flat(case.quantities({key: draws[key] for key in draws if key != "alpha" or "z" not in draws}))
    mean = weights @ values
    sd = np.sqrt(weights @ (values - mean) ** 2)
    if (weights != weights[0]).any():
        draws = resampled(rng, draws, log_weights)
    seconds = time.perf_counter() - start
    CACHE.mkdir(parents=True, exist_ok=True)
    np.savez(path, mean=mean, sd=sd, ess=ess, seconds=seconds, **{f"draws_{key}": draws[key] for key in draws})
    return Exact(draws, mean, sd, float(ess), seconds)


def reference(case: str, seed: int) -> dict[str, np.ndarray]:
    """Draws of the exact posterior, {site: draws}; for hierarchical models both `alpha` and `z`."""
    return exact(case, seed).draws


def moments(case: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of the exact posterior, of the quantities that are compared (`flat`)."""
    posterior = exact(case, seed)
    return posterior.mean, posterior.sd


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    print("| case | seed | effective draws | seconds | (mean - truth) / sd, rms |")
    print("|---|---|---|---|---|")
    for name in options.cases:
        for seed in range(options.seeds):
            posterior = exact(name, seed)
            truth = CASES[name].true_quantities(CASES[name].make(seed)[3])
            off = np.sqrt((((posterior.mean - truth) / posterior.sd) ** 2).mean())
            print(f"| {name} | {seed} | {posterior.ess:.0f} | {posterior.seconds:.1f} | {off:.2f} |", flush=True)


if __name__ == "__main__":
    main()
