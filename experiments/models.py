"""The papers' models: as ordinary NumPyro models, with tables to a seed and draws of their exact posteriors.

    from experiments.models import PROBLEMS
    problem = PROBLEMS["banana"]
    model, args, kwargs, truth = problem.table()
    draws = problem.exact(1000)  # {site: independent draws of the exact posterior}

References are no long chains. The posterior is drawn from where it has a closed form; elsewhere draws come from a fine
grid, or by importance sampling with a check of its effective sample size; all in float64. Every function that draws
also takes `n0`: the rows then count as if there were so many of them, ``prior x likelihood**(n0 / n)``.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro.infer.util import initialize_model, potential_energy
from numpyro.primitives import Messenger
from scipy.special import logsumexp

DRAWS = 4000
"""Exact draws, unless a number is asked for."""

Draws = dict[str, np.ndarray]
"""Draws by site; the first axis is the draws'."""


# -- Models ------------------------------------------------------------------------------------------------------------


def banana(X, *, a, scale, m=0.0, b=0.0):
    """The papers' curved posterior (Räisä et al. 2021, Section 4; Räisä 2021, Theorem 12).

    The rows have mean ``(theta_1, theta_2 + a (theta_1 - m)**2 + b, rest)`` and known scales; prior and likelihood are
    normal in that mean, with a prior variance of 1000, so the posterior is a banana that is known exactly.
    """
    theta_1 = numpyro.sample("theta_1", dist.Normal(0, np.sqrt(1000)))
    theta_2 = numpyro.sample("theta_2", dist.Normal(-a * (theta_1 - m) ** 2 - b, np.sqrt(1000)))
    loc = [theta_1, theta_2 + a * (theta_1 - m) ** 2 + b]
    if X.shape[1] > 2:
        loc += list(numpyro.sample("rest", dist.Normal(0, np.sqrt(1000)).expand([X.shape[1] - 2]).to_event(1)))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("x", dist.Normal(jnp.stack(loc), scale).to_event(1), obs=X)


def curved_banana(X, z):
    """A banana whose curvature differs by row, so that no coordinates make the likelihood a normal one."""
    theta_1 = numpyro.sample("theta_1", dist.Normal(0, np.sqrt(1000)))
    theta_2 = numpyro.sample("theta_2", dist.Normal(0, np.sqrt(1000)))
    with numpyro.plate("rows", X.shape[0]):
        loc = jnp.stack([jnp.broadcast_to(theta_1, z.shape), theta_2 + 20 * z * theta_1**2], -1)
        numpyro.sample("x", dist.Normal(loc, np.sqrt(np.array([2000.0, 2500.0], np.float32))).to_event(1), obs=X)


def gaussian_mean(X, *, W, prior_sd=100.0):
    """Unknown mean, known covariance.

    Rows come whitened by `W`, the inverse of the covariance's Cholesky factor: the posterior is the same, and an
    iteration is many times faster than with ``MultivariateNormal``, whose triangular solves are slow row by row.
    """
    theta = numpyro.sample("theta", dist.Normal(0, prior_sd).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("x", dist.Normal(W @ theta, 1).to_event(1), obs=X)


def tempered_mixture(x):
    """Of Welling and Teh (2011), Seita et al. (2017) and Heikkilä et al. (2019); the kernel tempers it to 100 rows."""
    theta_1 = numpyro.sample("theta_1", dist.Normal(0, np.sqrt(10)))
    theta_2 = numpyro.sample("theta_2", dist.Normal(0, 1))
    components = dist.Normal(jnp.stack([theta_1, theta_1 + theta_2]), np.sqrt(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.5, 0.5])), components), obs=x)


def circle(r):
    """Räisä's circle. Its prior is flat; this one is proper and round. The likelihood is not normalised in r."""
    x = numpyro.sample("x", dist.Normal(0, 10))
    y = numpyro.sample("y", dist.Normal(0, 10))
    with numpyro.plate("rows", r.shape[0]):
        numpyro.factor("r", -1e-5 * (x**2 + y**2 - r**2) ** 2)


def softmax(X, y=None):
    """Softmax regression as in Lode (2019), Section 6.3: five classes, an intercept and two covariates, no baseline.

    A constant added to one covariate's five coefficients changes nothing: three directions are the prior's alone.
    """
    theta = numpyro.sample("theta", dist.Normal(0, np.sqrt(10)).expand([X.shape[1], 5]).to_event(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=X @ theta), obs=y)


def normal_mean(y):
    """The mean of a normal law of sd 2 (Lode 2019, Sections 6.1 and 6.2)."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 2), obs=y)


GAUSSIAN = 1
"""Of the draws of a covariance, the first for which the paper's clip bounds cut less than a fifth of its samplers' log
ratios, which is its authors' own rule."""


# -- Tables ------------------------------------------------------------------------------------------------------------


def make_banana(rows, scales, a):
    scales = np.asarray(scales, float)

    def make(seed):
        rng = np.random.default_rng([10, rows, len(scales), round(a), seed])
        theta = np.zeros(len(scales))
        theta[1] = 3.0
        loc = theta.copy()
        loc[1] += a * theta[0] ** 2
        X = loc + scales * rng.standard_normal((rows, len(scales)))
        truth = {"theta_1": theta[0], "theta_2": theta[1]}
        if len(scales) > 2:
            truth["rest"] = theta[2:]
        model = partial(banana, a=a, scale=np.asarray(scales, np.float32))
        return model, (np.asarray(X, np.float32),), {}, truth

    return make


def make_curved_banana(seed, rows=100_000):
    """Rows have z from 0 to 2, so that the banana of the average row is the DP-HMC paper's."""
    rng = np.random.default_rng([18, seed])
    z = rng.uniform(0, 2, rows)
    X = [0.0, 3.0] + np.sqrt([2000.0, 2500.0]) * rng.standard_normal((rows, 2))
    arrays = np.asarray(X, np.float32), np.asarray(z, np.float32)
    return curved_banana, arrays, {}, {"theta_1": np.array(0.0), "theta_2": np.array(3.0)}


def make_gaussian(seed, rows=100_000):
    """Covariance as in the DP-HMC paper: gamma(1/2) eigenvalues, eigenvectors from a uniform random matrix.

    One covariance for all tables, as there: the paper's own is not published, and its settings do not fit all draws.
    """
    columns = 10
    rng = np.random.default_rng([7, GAUSSIAN])
    eigenvalues = np.maximum(rng.gamma(0.5, 1.0, columns), 1e-3)  # smaller ones are beyond float32
    vectors, _ = np.linalg.qr(rng.random((columns, columns)))
    W = np.linalg.inv(np.linalg.cholesky(vectors * eigenvalues @ vectors.T))
    rng = np.random.default_rng([7, GAUSSIAN, seed])
    theta = rng.standard_normal(columns)
    X = W @ theta + rng.standard_normal((rows, columns))
    model = partial(gaussian_mean, W=np.asarray(W, np.float32))
    return model, (np.asarray(X, np.float32),), {}, {"theta": theta}


def make_gaussian_of(rows, covariance, truth, prior_sd):
    """A given covariance of the rows, shape (d, d), and mean, shape (d,)."""
    W = np.linalg.inv(np.linalg.cholesky(np.asarray(covariance, float)))
    truth = np.asarray(truth, float)

    def make(seed):
        rng = np.random.default_rng([15, rows, len(W), seed])
        X = W @ truth + rng.standard_normal((rows, len(W)))
        model = partial(gaussian_mean, W=np.asarray(W, np.float32), prior_sd=prior_sd)
        return model, (np.asarray(X, np.float32),), {}, {"theta": truth}

    return make


def make_mixture(seed, rows=100_000):
    rng = np.random.default_rng([8, seed])
    x = rng.normal(1.0 * (rng.random(rows) < 0.5), np.sqrt(2))
    truth = {"theta_1": np.array(0.0), "theta_2": np.array(1.0)}
    return tempered_mixture, (np.asarray(x, np.float32),), {}, truth


def make_circle(seed, rows=100_000):
    r = np.random.default_rng([11, seed]).normal(3, 1, rows)
    return circle, (np.asarray(r, np.float32),), {}, {"x": np.array(0.0), "y": np.array(0.0)}


SOFTMAX = np.array(
    [
        [2.0, 1.1, -0.9, -1.4, -1.8],
        [2.0, -1.5, -0.4, 0.2, -0.3],
        [-0.6, 0.7, 0.2, -0.5, 0.2],
    ]
)
"""Coefficients of the synthetic table: two of five classes are frequent, as in Lode's."""


def make_softmax(seed, rows=12_573):
    """Of the size and shape of Lode's radon table, which is not distributed here: covariates of sd 1/2."""
    rng = np.random.default_rng([16, seed])
    X = np.column_stack([np.ones(rows), 0.5 * rng.standard_normal((rows, 2))])
    y = np.argmax(X @ SOFTMAX + rng.gumbel(size=(rows, 5)), axis=1)
    return softmax, (np.asarray(X, np.float32), np.asarray(y, np.int32)), {}, {"theta": SOFTMAX}


def make_normal_mean(seed, rows=500):
    y = np.random.default_rng([17, seed]).normal(1, 2, rows)
    return normal_mean, (np.asarray(y, np.float32),), {}, {"mu": np.array(1.0)}


# -- Exact posteriors --------------------------------------------------------------------------------------------------


class temper(Messenger):
    """The likelihood of a model, raised to a power."""

    def __init__(self, model: Callable, power: float):
        self._power = power
        super().__init__(model)

    def process_message(self, msg):
        if msg["type"] == "sample" and msg["is_observed"]:
            msg["scale"] = self._power * (1.0 if msg.get("scale") is None else msg["scale"])


def draw_gaussian(model, args, kwargs, rng, n0=None, size=DRAWS):
    """Closed form; in antithetic pairs, so that the draws have the exact mean."""
    (X,), W = args, np.asarray(model.keywords["W"], float)
    power = _power(n0, len(X))
    prior_sd = model.keywords.get("prior_sd", 100.0)
    precision = power * len(X) * W.T @ W + np.eye(X.shape[1]) / prior_sd**2
    mean = np.linalg.solve(precision, power * W.T @ np.asarray(X, float).sum(0))
    half = rng.standard_normal((size // 2, len(mean))) @ np.linalg.inv(np.linalg.cholesky(precision))
    return {"theta": mean + np.concatenate([half, -half])}, None


def banana_posterior(model, args, n0=None) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of the banana's normal coordinates (Räisä 2021, Theorem 12)."""
    (X,), scale = args, np.asarray(model.keywords["scale"], float)
    weight = _power(n0, len(X)) * len(X) / scale**2
    precision = weight + 1 / 1000
    return weight * np.asarray(X, float).mean(0) / precision, 1 / np.sqrt(precision)


def banana_moments(model, args, n0=None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of ``(theta_1, theta_2)`` under the exact posterior."""
    mean, sd = banana_posterior(model, args, n0)
    a, m, b = (model.keywords.get(name, 0.0) for name in ("a", "m", "b"))
    away, var = mean[0] - m, sd[0] ** 2
    centre = np.array([mean[0], mean[1] - a * (var + away**2) - b])
    across = -2 * a * away * var
    return centre, np.array([[var, across], [across, sd[1] ** 2 + a**2 * (2 * var**2 + 4 * var * away**2)]])


def draw_banana(model, args, kwargs, rng, n0=None, size=DRAWS):
    """Closed form: normal coordinates, bent."""
    mean, sd = banana_posterior(model, args, n0)
    a, m, b = (model.keywords.get(name, 0.0) for name in ("a", "m", "b"))
    u = mean + rng.standard_normal((size, len(mean))) * sd
    draws = {"theta_1": u[:, 0], "theta_2": u[:, 1] - a * (u[:, 0] - m) ** 2 - b}
    if len(mean) > 2:
        draws["rest"] = u[:, 2:]
    return draws, None


def draw_curved_banana(model, args, kwargs, rng, n0=None, size=DRAWS):
    """On a grid, of theta_1 and of theta_2 around its mean given theta_1."""
    X, z = (np.asarray(arg, float) for arg in args)
    n, first = len(X), np.linspace(-0.6, 0.6, 6001)
    bend = 20 * first**2
    # Given theta_1, theta_2 is normal; without it, its integral is one of least squares.
    precision = n / 2500 + 1 / 1000
    mean = (X[:, 1].sum() - bend * z.sum()) / 2500 / precision
    squares = (X[:, 1] ** 2).sum() - 2 * bend * (z * X[:, 1]).sum() + bend**2 * (z**2).sum()
    log_density = -squares / 5000 + precision * mean**2 / 2
    log_density += -((n * first**2 - 2 * first * X[:, 0].sum()) / 4000) - first**2 / 2000
    (theta_1,) = _from_grid(rng, log_density, size, first)
    theta_2 = np.interp(theta_1, first, mean) + rng.standard_normal(size) / np.sqrt(precision)
    return {"theta_1": theta_1, "theta_2": theta_2}, None


def draw_mixture(model, args, kwargs, rng, n0=100, size=DRAWS):
    """On a grid; the rows in narrow bins."""
    x = np.asarray(args[0], float)
    counts, edges = np.histogram(x, 3000)
    x, counts = (edges[1:] + edges[:-1])[counts > 0] / 2, counts[counts > 0]
    first, second = np.linspace(-3, 4, 211), np.linspace(-5, 5, 301)
    kernel = np.exp(-((x - np.arange(-8, 9.0001, 1 / 30)[:, None]) ** 2) / 4)  # on multiples of 1/30, as both grids are
    log_density = np.empty((len(first), len(second)))
    for i, loc in enumerate(first):
        others = kernel[np.round(30 * (loc + second + 8)).astype(int)]
        log_density[i] = np.log(0.5 * kernel[round(30 * (loc + 8))] + 0.5 * others) @ counts
    log_density *= n0 / len(args[0])
    log_density += -(first[:, None] ** 2) / 20 - second**2 / 2
    theta_1, theta_2 = _from_grid(rng, log_density, size, first, second)
    return {"theta_1": theta_1, "theta_2": theta_2}, None


def draw_circle(model, args, kwargs, rng, n0=None, size=DRAWS):
    """In polar coordinates; u, the squared radius, is uniform under the plane's area."""
    r2 = np.asarray(args[0], float) ** 2
    u = np.linspace(0.0005, 25, 25_000)
    log_density = -1e-5 * _power(n0, len(r2)) * (len(r2) * u**2 - 2 * u * r2.sum() + (r2**2).sum()) - u / 200
    (u,) = _from_grid(rng, log_density, size, u)
    angle = 2 * np.pi * (rng.permutation(size) + rng.random(size)) / size
    return {"x": np.sqrt(np.abs(u)) * np.cos(angle), "y": np.sqrt(np.abs(u)) * np.sin(angle)}, None


def draw_normal_mean(model, args, kwargs, rng, n0=None, size=DRAWS):
    """Closed form, in antithetic pairs."""
    y = np.asarray(args[0], float)
    power = _power(n0, len(y))
    precision = 1 + power * len(y) / 4
    half = rng.standard_normal(size // 2) / np.sqrt(precision)
    return {"mu": power * y.sum() / 4 / precision + np.concatenate([half, -half])}, None


def draw_smooth(model, args, kwargs, rng, n0=None, size=DRAWS):
    """Importance sampling in unconstrained space from a multivariate t at the mode, in antithetic pairs."""
    with jax.enable_x64(True):
        args = tuple(_double(value) for value in args)
        kwargs = {name: _double(value) for name, value in kwargs.items()}
        if n0 is not None:
            model = temper(model, _power(n0, len(args[0])))
        info = initialize_model(
            jax.random.key(0), model, model_args=args, model_kwargs=kwargs, init_strategy=numpyro.infer.init_to_median
        )
        start, unravel = ravel_pytree(info.param_info.z)

        def potential(flat_z):
            return potential_energy(model, args, kwargs, unravel(flat_z))

        value_and_slope = jax.jit(jax.value_and_grad(potential))
        curvature = jax.jit(
            lambda z: jax.lax.map(lambda v: jax.jvp(jax.grad(potential), (z,), (v,))[1], jnp.eye(len(z)))
        )
        mode, hessian = _newton(value_and_slope, curvature, np.asarray(start, float))
        energy = jax.jit(lambda points: jax.lax.map(potential, points))
        centre, factor, df = mode, np.linalg.inv(np.linalg.cholesky(hessian)).T, 20.0
        for _ in range(_ROUNDS):
            z, log_weights = _proposed(rng, energy, centre, factor, df, size)
            weights = np.exp(log_weights - logsumexp(log_weights))
            if 1 / (weights**2).sum() > 0.3 * size:
                break
            # Skew posteriors, such as tempered ones: proposals of the shape of the draws so far.
            weights = np.sqrt(weights) / np.sqrt(weights).sum()
            centre = weights @ z
            factor = np.linalg.cholesky((weights * (z - centre).T) @ (z - centre))
            df = 8.0
        constrained = jax.jit(jax.vmap(lambda point: info.postprocess_fn(unravel(point))))(z)
        return {name: np.asarray(value) for name, value in constrained.items()}, log_weights


_ROUNDS = 8


def _proposed(rng, energy, centre, factor, df, size):
    """Draws of a multivariate t in antithetic pairs, and the log of their importance weights."""
    d = len(centre)
    half = rng.standard_normal((size // 2, d)) * np.sqrt(df / rng.chisquare(df, (size // 2, 1)))
    t = np.concatenate([half, -half])
    z = centre + t @ factor.T
    log_proposal = -(df + d) / 2 * np.log1p((t**2).sum(1) / df)
    return z, -np.asarray(energy(z)) - log_proposal


def resampled(rng, draws: Draws, log_weights, size=DRAWS) -> Draws:
    """Equally weighted draws (systematic resampling), in random order."""
    weights = np.exp(log_weights - logsumexp(log_weights))
    points = (rng.random() + np.arange(size)) / size
    index = np.minimum(np.searchsorted(np.cumsum(weights), points), len(weights) - 1)
    index = rng.permutation(index)
    return {name: value[index] for name, value in draws.items()}


def _power(n0, rows) -> float:
    return 1.0 if n0 is None else n0 / rows


def _from_grid(rng, log_density, size, *axes):
    """Draws from a density on a grid of equal cells, uniform within a cell."""
    weights = np.exp(log_density - log_density.max()).ravel()
    index = np.unravel_index(rng.choice(len(weights), size, p=weights / weights.sum()), log_density.shape)
    return [axis[i] + (axis[1] - axis[0]) * (rng.random(size) - 0.5) for axis, i in zip(axes, index, strict=True)]


def _newton(value_and_slope, curvature, z):
    value, slope = value_and_slope(z)
    for _ in range(100):
        hessian = np.asarray(curvature(z))
        eigenvalues, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
        safe = np.maximum(np.abs(eigenvalues), 1e-6 * np.abs(eigenvalues).max())
        step = -vectors @ ((vectors.T @ np.asarray(slope)) / safe)
        if -slope @ step < 1e-9 and eigenvalues.min() > 0:
            return z, hessian
        for _ in range(30):
            new_value, new_slope = value_and_slope(z + step)
            if np.isfinite(new_value) and new_value < value:
                break
            step = step / 2
        else:
            if eigenvalues.min() > 0:
                return z, hessian  # as far as rounding allows
            raise RuntimeError("no mode found")
        z, value, slope = z + step, new_value, new_slope
    raise RuntimeError("Newton's method did not converge")


def _double(value):
    value = np.asarray(value) if isinstance(value, np.ndarray | jax.Array) else value
    return value.astype(np.float64) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value


# -- Problems ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Problem:
    """A model with a table and its exact posterior.

    :ivar make: from a seed to the model, its positional and keyword arguments, and the parameters that made the table.
    :ivar draw: from model, arguments, a random generator, `n0` and `size` to draws by site, and log weights or None.
    :ivar n0: what the rows are tempered to; None for not at all.
    :ivar start_sd: chains start so far around `start`; None: the mean of the posterior's standard deviations.
    :ivar start: where chains start, by site; default: at the parameters that made the table, as in the papers.
    """

    name: str
    make: Callable
    draw: Callable
    n0: float | None = None
    start_sd: float | None = None
    start: dict[str, Any] | None = None

    def table(self, seed: int = 0) -> tuple[Callable, tuple, dict, Draws]:
        """The model, its positional and keyword arguments, and the parameters that made the table."""
        return _table(self, seed)

    @property
    def rows(self) -> int:
        return _rows(self)

    @property
    def delta(self) -> float:
        """The papers' and this package's: 0.1 / n."""
        return 0.1 / self.rows

    def exact(self, size: int = DRAWS, seed: int = 0) -> Draws:
        """Equally weighted draws of the exact posterior, {site: (size, ...)}; the same ones each time.

        :raises RuntimeError: if importance sampling has too few effective draws.
        """
        return _exact(self, size, seed)

    def starts(self, chains: int, repeat: int, seed: int = 0) -> dict[str, np.ndarray]:
        """Where chains start, {site: (chains, ...)}: the same for all samplers. Knowing this is free in the papers."""
        truth = {name: np.asarray(value, float) for name, value in (self.start or self.table(seed)[3]).items()}
        sd = self.start_sd
        if sd is None:
            sd = flat(self.exact(seed=seed)).std(0).mean()
        rng = np.random.default_rng([14, repeat])
        return {
            name: np.asarray(value + sd * rng.standard_normal((chains, *np.shape(value))), np.float32)
            for name, value in sorted(truth.items())
        }


@functools.lru_cache(maxsize=3)  # tables are large
def _table(problem: Problem, seed: int):
    return problem.make(seed)


@functools.cache
def _rows(problem: Problem) -> int:
    return len(problem.table()[1][0])


@functools.lru_cache(maxsize=32)
def _exact(problem: Problem, size: int, seed: int) -> Draws:
    model, args, kwargs, _ = problem.table(seed)
    rng = np.random.default_rng([0, seed])
    options = {} if problem.n0 is None else {"n0": problem.n0}
    draws, log_weights = problem.draw(model, args, kwargs, rng, size=size, **options)
    if log_weights is None:
        return draws
    weights = np.exp(log_weights - logsumexp(log_weights))
    if 1 / (weights**2).sum() < 0.2 * len(weights):
        raise RuntimeError(f"{problem.name}: {1 / (weights**2).sum():.0f} effective draws of {len(weights)}")
    return resampled(rng, draws, log_weights, size)


def flat(draws: Draws) -> np.ndarray:
    """Draws as one matrix (draws, scalars); sites in alphabetical order."""
    return np.concatenate([np.reshape(draws[name], (len(draws[name]), -1)) for name in sorted(draws)], axis=1)


_FLAT = [20**0.5, 2.5**0.5]

PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        # The DP-HMC paper (Section 4)
        Problem("banana", make_banana(100_000, [2000**0.5, 2500**0.5], 20.0), draw_banana),
        Problem("gauss", make_gaussian, draw_gaussian),
        Problem("curved-banana", make_curved_banana, draw_curved_banana),
        # Räisä's thesis (Table 6.1)
        Problem("flat-banana", make_banana(100_000, _FLAT, 20.0), draw_banana, start_sd=0.02),
        Problem("flat-banana-10", make_banana(200_000, [*_FLAT, *[1.0] * 8], 20.0), draw_banana, start_sd=0.02),
        Problem("tempered-banana", make_banana(100_000, _FLAT, 20.0), draw_banana, n0=1000, start_sd=0.02),
        Problem(
            "tempered-banana-10",
            make_banana(200_000, [*_FLAT, *[1.0] * 8], 20.0),
            draw_banana,
            n0=1000,
            start_sd=0.02,
        ),
        Problem(
            "gauss-30",
            make_gaussian_of(200_000, np.diag([20.0, 2.5, *[1.0] * 28]), [0.0, 3.0, *[0.0] * 28], 1000**0.5),
            draw_gaussian,
            start_sd=0.02,
        ),
        Problem("narrow-banana", make_banana(150_000, _FLAT, 350.0), draw_banana, start_sd=0.02),
        Problem(
            "correlated-gauss",
            make_gaussian_of(200_000, [[1.0, 0.999], [0.999, 1.0]], [0.0, 0.0], 100.0),
            draw_gaussian,
            start_sd=0.005,
        ),
        Problem("circle", make_circle, draw_circle, start_sd=0.1, start={"x": np.array(0.0), "y": np.array(1.0)}),
        # Heikkilä et al. (Section 4)
        Problem("mixture", partial(make_mixture, rows=1_000_000), draw_mixture, n0=100),
        # Lode's thesis (Chapter 6)
        Problem("normal", make_normal_mean, draw_normal_mean),
        Problem("softmax", make_softmax, draw_smooth),
        Problem("softmax-one", make_softmax, draw_smooth, n0=1),
    )
}
"""By name."""
