"""Models and tables as people have them, to find out whether the default is right: some to look at, some to judge by.

    from benchmarks.zoo import PROBLEMS
    model, kwargs = PROBLEMS["linear_raw"].make(seed=0)

Covariates and outcomes are on the scales on which they are measured, priors as wide as they are usually written.
Constants, thresholds and algorithms are chosen on `"seen"` ones. `"judged"` ones were run once, to judge by, and have
been looked at since. What nobody has looked at is in `zoo_unseen.py`. Each problem says how its rows come about:

=============  =========================================================================================================
kind           rows
=============  =========================================================================================================
`"everyday"`   as the model says; at most 12 numbers in which the parameters meet the rows, n at least 4,000
`"large"`      as the model says; more numbers than that
`"small"`      as the model says; fewer rows than that
`"curved"`     as the model says; the log likelihood is no quadratic anywhere near the posterior
`"wrong"`      not as the model says
=============  =========================================================================================================
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.interpolate import BSpline
from scipy.special import expit

Table = tuple[Callable, dict[str, Any]]


@dataclass(frozen=True)
class Problem:
    """:ivar draw: the function ``(random generator, n) -> model, its keyword arguments``."""

    name: str
    half: str
    kind: str
    n: int
    draw: Callable[[np.random.Generator, int], Table]

    def make(self, seed: int, n: int | None = None) -> Table:
        """The model, and one table for it.

        :param n: another number of rows than the problem's own.
        """
        rng = np.random.default_rng([seed, *self.name.encode()])
        model, kwargs = self.draw(rng, n or self.n)
        return model, {k: _narrow(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}


PROBLEMS: dict[str, Problem] = {}


def problem(half: str, n: int, kind: str = "everyday") -> Callable:
    def register(draw: Callable) -> Callable:
        PROBLEMS[draw.__name__] = Problem(draw.__name__, half, kind, n, draw)
        return draw

    return register


def _narrow(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32 if x.dtype.kind == "f" else np.int32)


def rows(n: int):
    return numpyro.plate("rows", n)


def normals(name: str, scale, size: int):
    return numpyro.sample(name, dist.Normal(0.0, scale).expand([size]).to_event(1))


def patients(rng: np.random.Generator, n: int) -> np.ndarray:
    """Age in years, body mass index, sex, systolic blood pressure."""
    age = rng.uniform(20, 85, n)
    bmi = 27 + 4.5 * rng.standard_normal(n)
    sex = rng.integers(0, 2, n)
    return np.stack([age, bmi, sex, 110 + 0.4 * age + 12 * rng.standard_normal(n)], 1)


def standard(rng: np.random.Generator, n: int, d: int, correlation: float = 0.3) -> np.ndarray:
    X = rng.standard_normal((n, d))
    for k in range(1, d):
        X[:, k] = correlation * X[:, k - 1] + np.sqrt(1 - correlation**2) * X[:, k]
    return X


# == The half to look at ===============================================================================================


@problem("seen", 4_000)
def linear_raw(rng, n):
    """Raw units, priors as wide as people write them."""

    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 100))
        b = normals("b", 100.0, X.shape[1])
        sigma = numpyro.sample("sigma", dist.HalfNormal(100))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Normal(a + X @ b, sigma), obs=y)

    X = patients(rng, n)[:, :3]
    return model, {"X": X, "y": 45 + X @ [0.3, 0.8, -4.0] + 18 * rng.standard_normal(n)}


@problem("seen", 6_000)
def linear_known_scale(rng, n):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(100, 50))
        b = normals("b", 20.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Normal(a + X @ b, 15.0), obs=y)

    X = standard(rng, n, 5)
    return model, {"X": X, "y": 101 + X @ [3.0, -1.0, 0.5, 0.0, 2.0] + 15 * rng.standard_normal(n)}


@problem("seen", 5_000)
def linear_log_earnings(rng, n):
    def model(education, age, male, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = normals("b", 10.0, 4)
        sigma = numpyro.sample("sigma", dist.Exponential(1.0))
        with rows(y.shape[0]):
            mean = a + b[0] * education + b[1] * age + b[2] * age**2 / 100 + b[3] * male
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    education, age, male = rng.integers(8, 20, n), rng.integers(18, 66, n), rng.integers(0, 2, n)
    y = 6.5 + 0.09 * education + 0.05 * age - 0.05 * age**2 / 100 + 0.2 * male + 0.7 * rng.standard_normal(n)
    return model, {"education": 1.0 * education, "age": 1.0 * age, "male": 1.0 * male, "y": y}


@problem("seen", 5_000)
def linear_standardised(rng, n):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = normals("b", 1.0, X.shape[1])
        sigma = numpyro.sample("sigma", dist.Exponential(1.0))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Normal(a + X @ b, sigma), obs=y)

    X = standard(rng, n, 10)
    return model, {"X": X, "y": X @ rng.normal(0, 0.3, 10) + 0.8 * rng.standard_normal(n)}


@problem("seen", 10_000)
def logistic(rng, n):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = normals("b", 2.5, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + X @ b), obs=y)

    X = standard(rng, n, 5)
    return model, {"X": X, "y": (rng.random(n) < expit(-0.5 + X @ [0.6, -0.4, 0.2, 0.0, 0.5])).astype(int)}


@problem("seen", 8_000)
def logistic_raw(rng, n):
    """Age and blood pressure as they are measured; one in twelve has the outcome."""

    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 20))
        b = normals("b", 5.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + X @ b), obs=y)

    X = patients(rng, n)
    return model, {"X": X, "y": (rng.random(n) < expit(-9.0 + X @ [0.05, 0.03, 0.4, 0.02])).astype(int)}


@problem("seen", 6_000)
def probit(rng, n):
    def model(X, y):
        b = normals("b", 3.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(probs=dist.Normal(0, 1).cdf(X @ b)), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 3)])
    return model, {"X": X, "y": (X @ [0.3, 0.5, -0.4, 0.1] + rng.standard_normal(n) > 0).astype(int)}


@problem("seen", 8_000)
def poisson_exposure(rng, n):
    def model(X, exposure, y):
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = normals("b", 2.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Poisson(exposure * jnp.exp(a + X @ b)), obs=y)

    X, exposure = standard(rng, n, 4), rng.uniform(0.2, 3, n)
    return model, {"X": X, "exposure": exposure, "y": rng.poisson(exposure * np.exp(0.4 + X @ [0.3, -0.2, 0.1, 0.2]))}


@problem("seen", 6_000)
def negative_binomial(rng, n):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = normals("b", 1.0, X.shape[1])
        concentration = numpyro.sample("concentration", dist.Exponential(0.5))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + X @ b), concentration), obs=y)

    X = standard(rng, n, 4)
    mean = np.exp(1.0 + X @ [0.3, -0.3, 0.2, 0.0])
    return model, {"X": X, "y": rng.poisson(mean * rng.gamma(1.5, 1 / 1.5, n))}


@problem("seen", 6_400)
def ordinal(rng, n):
    def model(X, y):
        b = normals("b", 2.0, X.shape[1])
        ordered = dist.TransformedDistribution(
            dist.Normal(0, 3).expand([4]).to_event(1), dist.transforms.OrderedTransform()
        )
        cutpoints = numpyro.sample("cutpoints", ordered)
        with rows(X.shape[0]):
            numpyro.sample("y", dist.OrderedLogistic(X @ b, cutpoints), obs=y)

    X = standard(rng, n, 3)
    utility = X @ [0.7, -0.3, 0.2] + rng.logistic(size=n)
    return model, {"X": X, "y": np.searchsorted([-2.0, -0.7, 0.6, 2.0], utility)}


@problem("seen", 8_000)
def multinomial(rng, n):
    def model(X, y):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([X.shape[1], 2]).to_event(2))
        with rows(X.shape[0]):
            logits = jnp.concatenate([jnp.zeros((X.shape[0], 1)), X @ b], 1)
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 3)])
    logits = np.column_stack([np.zeros(n), X @ rng.normal(0, 0.6, (4, 2))])
    return model, {"X": X, "y": np.argmax(logits + rng.gumbel(size=(n, 3)), 1)}


@problem("seen", 5_000)
def gamma_costs(rng, n):
    """Costs in dollars, log link."""

    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = normals("b", 2.0, X.shape[1])
        shape = numpyro.sample("shape", dist.Exponential(1.0))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Gamma(shape, shape / jnp.exp(a + X @ b)), obs=y)

    X = standard(rng, n, 3)
    return model, {"X": X, "y": rng.gamma(2.0, np.exp(7.5 + X @ [0.4, -0.2, 0.1]) / 2.0)}


@problem("seen", 5_000)
def beta_shares(rng, n):
    def model(X, y):
        b = normals("b", 2.0, X.shape[1])
        precision = numpyro.sample("precision", dist.Gamma(2.0, 0.1))
        with rows(X.shape[0]):
            mean = jax.nn.sigmoid(X @ b)
            numpyro.sample("y", dist.Beta(mean * precision, (1 - mean) * precision), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 3)])
    mean = expit(X @ [-0.4, 0.3, 0.2, 0.0])
    return model, {"X": X, "y": np.clip(rng.beta(mean * 8, (1 - mean) * 8), 1e-4, 1 - 1e-4)}


@problem("seen", 6_000)
def weibull_censored(rng, n):
    """Months of survival, a third censored."""

    def model(X, time, died):
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = normals("b", 1.0, X.shape[1])
        shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
        with rows(X.shape[0]):
            scaled = jnp.log(time) - a - X @ b
            log_hazard = jnp.log(shape) + shape * scaled - jnp.log(time)
            numpyro.factor("time", jnp.where(died == 1, log_hazard, 0.0) - jnp.exp(shape * scaled))

    X = standard(rng, n, 3)
    time = np.exp(3.0 + X @ [0.3, -0.2, 0.1]) * rng.weibull(1.4, n)
    censored = rng.uniform(5, 60, n)
    return model, {"X": X, "time": np.minimum(time, censored) + 1e-2, "died": (time < censored).astype(int)}


@problem("seen", 10_000)
def mostly_censored(rng, n):
    """Four of five leave before it happens. The likelihood is written by hand: no model tells how rows come about."""

    def model(X, time, event):
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
        shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
        with rows(time.shape[0]):
            log_hazard = jnp.log(shape) + (shape - 1) * jnp.log(time) + a + X @ b
            numpyro.factor("survival", event * log_hazard - jnp.exp(a + X @ b) * time**shape)

    X = np.column_stack([rng.standard_normal(n), rng.random(n) < 0.5])
    time, end = (rng.exponential(size=n) / np.exp(-4 + X @ [0.4, 0.6])) ** (1 / 1.3), rng.uniform(1, 10, n)
    return model, {"X": X, "time": np.minimum(time, end), "event": (time < end) * 1.0}


@problem("seen", 5_000)
def student_t_regression(rng, n):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 50))
        b = normals("b", 10.0, X.shape[1])
        sigma = numpyro.sample("sigma", dist.HalfNormal(20))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.StudentT(4.0, a + X @ b, sigma), obs=y)

    X = standard(rng, n, 4)
    return model, {"X": X, "y": 12 + X @ [2.0, -1.0, 0.5, 0.0] + 5 * rng.standard_t(4.0, n)}


@problem("seen", 5_000)
def laplace_regression(rng, n):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = normals("b", 5.0, X.shape[1])
        scale = numpyro.sample("scale", dist.HalfNormal(5))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Laplace(a + X @ b, scale), obs=y)

    X = standard(rng, n, 3)
    return model, {"X": X, "y": 2 + X @ [1.0, -0.5, 0.3] + rng.laplace(0, 1.5, n)}


@problem("seen", 6_000)
def quantile_regression(rng, n):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = normals("b", 5.0, X.shape[1])
        scale = numpyro.sample("scale", dist.HalfNormal(5))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.AsymmetricLaplaceQuantile(a + X @ b, scale, 0.25), obs=y)

    X = standard(rng, n, 2)
    noise = rng.exponential(size=n) / 0.75 * 0.5 - rng.exponential(size=n) / 0.25 * 0.5
    return model, {"X": X, "y": 1 + X @ [0.8, -0.4] - noise}


@problem("seen", 8_000)
def zero_inflated(rng, n):
    def model(X, y):
        gate = numpyro.sample("gate", dist.Beta(1, 1))
        b = normals("b", 2.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(X @ b)), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 3)])
    y = rng.poisson(np.exp(X @ [0.9, 0.3, -0.2, 0.1])) * (rng.random(n) > 0.3)
    return model, {"X": X, "y": y}


@problem("seen", 6_000)
def heteroscedastic(rng, n):
    def model(X, y):
        b = normals("b", 10.0, X.shape[1])
        g = normals("g", 3.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b, jnp.exp(X @ g)), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 2)])
    return model, {"X": X, "y": X @ [5.0, 1.0, -2.0] + np.exp(X @ [1.0, 0.3, -0.2]) * rng.standard_normal(n)}


def spline_basis(x: np.ndarray, size: int, low: float, high: float) -> np.ndarray:
    inner = np.linspace(low, high, size - 2)
    knots = np.concatenate([[low] * 3, inner, [high] * 3])
    return BSpline.design_matrix(np.clip(x, low, high - 1e-6), knots, 3).toarray()


@problem("seen", 8_000)
def spline(rng, n):
    def model(B, y):
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        start = numpyro.sample("start", dist.Normal(0, 10))
        step = numpyro.sample("step", dist.Normal(0, 1).expand([B.shape[1] - 1]).to_event(1))
        w = start + jnp.concatenate([jnp.zeros(1), tau * jnp.cumsum(step)])
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with rows(B.shape[0]):
            numpyro.sample("y", dist.Normal(B @ w, sigma), obs=y)

    x = rng.uniform(0, 10, n)
    return model, {"B": spline_basis(x, 10, 0, 10), "y": 4 + 2 * np.sin(x) + 1.5 * rng.standard_normal(n)}


@problem("seen", 8_000)
def hilbert_space_gp(rng, n):
    def model(x, y):
        size, width = 10, 1.5
        length = numpyro.sample("length", dist.InverseGamma(3.0, 1.0))
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(2))
        z = normals("z", 1.0, size)
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        frequency = jnp.arange(1, size + 1) * jnp.pi / (2 * width)
        root = amplitude * jnp.sqrt(jnp.sqrt(2 * jnp.pi) * length) * jnp.exp(-((length * frequency) ** 2) / 4)
        w = root * z
        with rows(x.shape[0]):
            basis = jnp.sin(frequency * (x[:, None] + width)) / jnp.sqrt(width)
            numpyro.sample("y", dist.Normal(basis @ w, sigma), obs=y)

    x = rng.uniform(-1, 1, n)
    return model, {"x": x, "y": np.sin(4 * x) + 0.5 * x + 0.7 * rng.standard_normal(n)}


@problem("seen", 10_000)
def horseshoe(rng, n):
    def model(X, y):
        tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
        local = numpyro.sample("local", dist.HalfCauchy(1).expand([X.shape[1]]).to_event(1))
        z = normals("z", 1.0, X.shape[1])
        a = numpyro.sample("a", dist.Normal(0, 5))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + X @ (tau * local * z)), obs=y)

    X = standard(rng, n, 10, 0.0)
    return model, {"X": X, "y": (rng.random(n) < expit(0.2 + X[:, :2] @ [1.0, -0.6])).astype(int)}


@problem("seen", 20_000)
def varying_intercepts(rng, n):
    def model(group, x, y, groups=10):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfNormal(2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        with numpyro.plate("groups", groups):
            a = numpyro.sample("alpha", dist.Normal(mu, tau))
        with rows(x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a[group] + b * x), obs=y)

    group, x = rng.integers(0, 10, n), rng.standard_normal(n)
    return model, {"group": group, "x": x, "y": (rng.random(n) < expit(rng.normal(-0.5, 0.7, 10)[group] + 0.4 * x)) * 1}


@problem("seen", 20_000, "large")
def varying_slopes(rng, n):
    """Scores of pupils in 12 schools; not centred."""

    def model(school, x, y, schools=12):
        mu = normals("mu", 50.0, 2)
        tau = numpyro.sample("tau", dist.HalfNormal(10).expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(30))
        with numpyro.plate("schools", schools):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        effects = mu + tau * z
        with rows(x.shape[0]):
            numpyro.sample("y", dist.Normal(effects[school, 0] + effects[school, 1] * x, sigma), obs=y)

    school, x = rng.integers(0, 12, n), rng.standard_normal(n)
    effects = np.array([60.0, 5.0]) + np.array([6.0, 2.0]) * rng.standard_normal((12, 2))
    return model, {"school": school, "x": x, "y": effects[school, 0] + effects[school, 1] * x + 12 * rng.normal(size=n)}


@problem("seen", 30_000, "large")
def crossed_effects(rng, n):
    def model(hospital, diagnosis, y, hospitals=12, diagnoses=8):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
        with numpyro.plate("hospitals", hospitals):
            h = numpyro.sample("h", dist.Normal(0, 1))
        with numpyro.plate("diagnoses", diagnoses):
            d = numpyro.sample("d", dist.Normal(0, 1))
        with rows(y.shape[0]):
            logits = mu + tau[0] * h[hospital] + tau[1] * d[diagnosis]
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    hospital, diagnosis = rng.integers(0, 12, n), rng.integers(0, 8, n)
    logits = -1.0 + 0.4 * rng.normal(size=12)[hospital] + 0.8 * rng.normal(size=8)[diagnosis]
    return model, {"hospital": hospital, "diagnosis": diagnosis, "y": (rng.random(n) < expit(logits)).astype(int)}


@problem("seen", 20_000)
def item_response_given_items(rng, n):
    """Answers to items of known difficulty and discrimination, by pupils of ten schools."""

    def model(school, difficulty, discrimination, y, schools=10):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("schools", schools):
            ability = numpyro.sample("ability", dist.Normal(mu, tau))
        with rows(y.shape[0]):
            logits = discrimination * (ability[school] - difficulty)
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    school, difficulty, discrimination = rng.integers(0, 10, n), rng.normal(size=n), rng.uniform(0.5, 2, n)
    logits = discrimination * (0.5 + 0.5 * rng.normal(size=10)[school] - difficulty)
    y = (rng.random(n) < expit(logits)).astype(int)
    return model, {"school": school, "difficulty": difficulty, "discrimination": discrimination, "y": y}


@problem("seen", 6_000)
def change_point(rng, n):
    """The mean changes on a day of the year, which the rows tell apart by a kink."""

    def model(day, y):
        before = numpyro.sample("before", dist.Normal(0, 20))
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        change = numpyro.sample("change", dist.Uniform(30, 330))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        with rows(day.shape[0]):
            numpyro.sample("y", dist.Normal(before + slope * jnp.where(day > change, day - change, 0.0), sigma), obs=y)

    day = rng.integers(0, 365, n) * 1.0
    return model, {"day": day, "y": 20 + 0.05 * np.maximum(day - 150, 0) + 4 * rng.standard_normal(n)}


@problem("seen", 30_000, "large")
def hierarchical_poisson(rng, n):
    def model(group, X, y, groups=15):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        b = normals("b", 1.0, X.shape[1])
        with numpyro.plate("groups", groups):
            z = numpyro.sample("z", dist.Normal(0, 1))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(mu + tau * z[group] + X @ b)), obs=y)

    group, X = rng.integers(0, 15, n), standard(rng, n, 2)
    return model, {
        "group": group,
        "X": X,
        "y": rng.poisson(np.exp(0.5 + 0.4 * rng.normal(size=15)[group] + X @ [0.3, -0.2])),
    }


@problem("seen", 500, "small")
def share(rng, n):
    def model(y):
        p = numpyro.sample("p", dist.Beta(1, 1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(p), obs=y)

    return model, {"y": (rng.random(n) < 0.3).astype(int)}


@problem("seen", 500, "small")
def ab_test(rng, n):
    def model(arm, y):
        p = numpyro.sample("p", dist.Beta(1, 1).expand([2]).to_event(1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(p[arm]), obs=y)

    arm = rng.integers(0, 2, n)
    return model, {"arm": arm, "y": (rng.random(n) < np.array([0.2, 0.3])[arm]).astype(int)}


@problem("seen", 1_000, "small")
def logistic_small(rng, n):
    def model(X, y):
        b = normals("b", 2.5, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 2)])
    return model, {"X": X, "y": (rng.random(n) < expit(X @ [-0.3, 0.6, -0.4])).astype(int)}


@problem("seen", 2_000, "small")
def normal_mean_and_scale(rng, n):
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, sigma), obs=y)

    return model, {"y": 1.5 + 2 * rng.standard_normal(n)}


@problem("seen", 20_000, "large")
def logistic_20(rng, n):
    def model(X, y):
        b = normals("b", 2.5, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 20, 0.0)])
    return model, {"X": X, "y": (rng.random(n) < expit(X @ rng.normal(0, 0.3, 21))).astype(int)}


@problem("seen", 10_000)
def uncommon_diagnoses(rng, n):
    """Covariates that are 0 for nearly all: of half, a tenth, a twentieth, a fiftieth and a hundredth of the rows."""

    def model(diagnosed, x, y):
        a = numpyro.sample("a", dist.Normal(0, 100))
        b = normals("b", 30.0, diagnosed.shape[1])
        c = numpyro.sample("c", dist.Normal(0, 30))
        sigma = numpyro.sample("sigma", dist.HalfNormal(50))
        with rows(x.shape[0]):
            numpyro.sample("y", dist.Normal(a + diagnosed @ b + c * x, sigma), obs=y)

    diagnosed = (rng.random((n, 5)) < [0.5, 0.1, 0.05, 0.02, 0.01]) * 1.0
    x = rng.standard_normal(n)
    y = 50 + diagnosed @ [5.0, -4, 6, 8, -10] + 3 * x + 15 * rng.standard_normal(n)
    return model, {"diagnosed": diagnosed, "x": x, "y": y}


@problem("seen", 10_000)
def wards_of_any_size(rng, n):
    """Effects of five wards; the smallest has a two hundredth of the rows."""

    def model(ward, age, y):
        effect = normals("effect", 2.0, 5)
        b = numpyro.sample("b", dist.Normal(0, 0.5))
        with rows(age.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=effect[ward] + b * (age - 50)), obs=y)

    ward = rng.choice(5, n, p=[0.6, 0.3, 0.08, 0.015, 0.005])
    age = rng.integers(18, 90, n) * 1.0
    y = rng.random(n) < expit(np.array([-0.5, 0.2, 0.5, 1.5, -1.5])[ward] + 0.02 * (age - 50))
    return model, {"ward": ward, "age": age, "y": y.astype(int)}


@problem("seen", 15_000)
def costs_by_department(rng, n):
    """Gamma costs; eight departments, of 40% to 1.5% of the rows."""

    def model(department, severity, cost):
        effect = numpyro.sample("effect", dist.Normal(6, 3).expand([8]).to_event(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        shape = numpyro.sample("shape", dist.LogNormal(0, 1))
        with rows(cost.shape[0]):
            mean = jnp.exp(effect[department] + b * severity)
            numpyro.sample("cost", dist.Gamma(shape, shape / mean), obs=cost)

    department = rng.choice(8, n, p=[0.4, 0.2, 0.15, 0.1, 0.07, 0.04, 0.025, 0.015])
    severity = rng.uniform(0, 3, n)
    mean = np.exp(np.array([6.0, 6.4, 5.5, 7.0, 6.2, 5.0, 7.5, 6.8])[department] + 0.4 * severity)
    return model, {"department": department, "severity": severity, "cost": rng.gamma(1.8, mean / 1.8)}


@problem("seen", 100_000, "curved")
def banana(rng, n):
    """Curvature differs by row: no coordinates straighten it."""

    def model(z, y):
        t = normals("t", 1.0, 2)
        with rows(y.shape[0]):
            mean = jnp.stack([jnp.full(z.shape, t[0]), t[1] + 20 * z * t[0] ** 2], 1)
            numpyro.sample("y", dist.Normal(mean, jnp.array([20.0, 2.5])).to_event(1), obs=y)

    z = 1 + 0.3 * rng.standard_normal(n)
    mean = np.stack([np.zeros(n), 3 + 0 * z], 1)
    return model, {"z": z, "y": mean + rng.standard_normal((n, 2)) * np.array([20.0, 2.5])}


@problem("seen", 20_000, "curved")
def two_humps(rng, n):
    """The sign of one coefficient is not identified."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + b**2 * x, 2.0), obs=y)

    x = rng.standard_normal(n)
    return model, {"x": x, "y": 1 + 1.2**2 * x + 2 * rng.standard_normal(n)}


@problem("seen", 20_000, "curved")
def mixture(rng, n):
    def model(y):
        share = numpyro.sample("share", dist.Beta(2, 2))
        means = numpyro.sample("means", dist.Normal(jnp.array([-1.0, 4.0]), 3.0).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with rows(y.shape[0]):
            parts = dist.Normal(means, sigma)
            numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.array([1 - share, share])), parts), obs=y)

    return model, {"y": np.where(rng.random(n) < 0.4, 3.5, -0.5) + rng.standard_normal(n)}


def _linear(X, y):
    a = numpyro.sample("a", dist.Normal(0, 10))
    b = normals("b", 5.0, X.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfNormal(5))
    with rows(X.shape[0]):
        numpyro.sample("y", dist.Normal(a + X @ b, sigma), obs=y)


@problem("seen", 10_000, "wrong")
def heavy_tails_under_a_normal(rng, n):
    X = standard(rng, n, 3)
    return _linear, {"X": X, "y": 1 + X @ [1.0, -0.5, 0.2] + 1.5 * rng.standard_t(3.0, n)}


@problem("seen", 10_000, "wrong")
def outliers_under_a_normal(rng, n):
    X = standard(rng, n, 3)
    noise = rng.standard_normal(n) * np.where(rng.random(n) < 0.03, 12, 1.5)
    return _linear, {"X": X, "y": 1 + X @ [1.0, -0.5, 0.2] + noise}


@problem("seen", 10_000, "wrong")
def overdispersed_under_a_poisson(rng, n):
    def model(X, y):
        b = normals("b", 2.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 3)])
    return model, {"X": X, "y": rng.poisson(np.exp(X @ [1.2, 0.3, -0.2, 0.1]) * rng.gamma(1.5, 1 / 1.5, n))}


# == The half to judge by: run once, at the end ========================================================================


@problem("judged", 5_000)
def house_prices(rng, n):
    """Dollars, square metres, years."""

    def model(area, built, y):
        a = numpyro.sample("a", dist.Normal(0, 1e6))
        per_metre = numpyro.sample("per_metre", dist.Normal(0, 1e4))
        per_year = numpyro.sample("per_year", dist.Normal(0, 1e4))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2e5))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + per_metre * area + per_year * (built - 1980), sigma), obs=y)

    area, built = rng.gamma(6, 20, n), rng.integers(1950, 2021, n) * 1.0
    y = 60_000 + 2_100 * area + 500 * (built - 1980) + 55_000 * rng.standard_normal(n)
    return model, {"area": area, "built": built, "y": y}


@problem("judged", 4_000)
def wages_by_income_of_parents(rng, n):
    """A covariate between 1 and 5,000."""

    def model(x, female, y):
        b = normals("b", 100.0, 3)
        sigma = numpyro.sample("sigma", dist.HalfCauchy(10))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(b[0] + b[1] * x + b[2] * female, sigma), obs=y)

    x, female = rng.uniform(1, 5_000, n), rng.integers(0, 2, n) * 1.0
    return model, {"x": x, "female": female, "y": 14 + 0.002 * x - 2 * female + 5 * rng.standard_normal(n)}


@problem("judged", 8_000)
def growth_curve(rng, n):
    """Height of children in centimetres: a polynomial in age, not orthogonal."""

    def model(age, boy, y):
        b = normals("b", 50.0, 4)
        sigma = numpyro.sample("sigma", dist.Exponential(0.1))
        with rows(y.shape[0]):
            mean = b[0] + b[1] * age + b[2] * age**2 + b[3] * boy
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    age, boy = rng.uniform(2, 14, n), rng.integers(0, 2, n) * 1.0
    return model, {"age": age, "boy": boy, "y": 72 + 8 * age - 0.12 * age**2 + boy + 5 * rng.standard_normal(n)}


@problem("judged", 6_000)
def dummies_and_interaction(rng, n):
    def model(treated, stage, y):
        a = normals("stage", 10.0, 3)
        effect = normals("effect", 5.0, 3)
        sigma = numpyro.sample("sigma", dist.LogNormal(0.0, 2.0))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a[stage] + effect[stage] * treated, sigma), obs=y)

    treated, stage = rng.integers(0, 2, n), rng.choice(3, n, p=[0.5, 0.35, 0.15])
    y = np.array([3.0, 5.0, 9.0])[stage] - np.array([0.2, 0.6, 1.5])[stage] * treated + 3 * rng.standard_normal(n)
    return model, {"treated": treated, "stage": stage, "y": y}


@problem("judged", 5_000)
def known_noise_and_tight_prior(rng, n):
    def model(X, y):
        b = normals("b", 0.5, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)

    X = standard(rng, n, 8, 0.6)
    return model, {"X": X, "y": X @ rng.normal(0, 0.4, 8) + rng.standard_normal(n)}


@problem("judged", 12_000)
def rare_outcome(rng, n):
    """Two in a hundred."""

    def model(X, y):
        a = numpyro.sample("a", dist.StudentT(3, 0, 5))
        b = normals("b", 1.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + X @ b), obs=y)

    X = standard(rng, n, 3)
    return model, {"X": X, "y": (rng.random(n) < expit(-4.2 + X @ [0.5, -0.3, 0.4])).astype(int)}


@problem("judged", 12_000)
def uncommon_conditions(rng, n):
    """A probit regression; of two conditions one in twenty-five and one in fourteen have them."""

    def model(has, age, y):
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = normals("b", 2.0, has.shape[1])
        c = numpyro.sample("c", dist.Normal(0, 1))
        with rows(age.shape[0]):
            numpyro.sample("y", dist.BernoulliProbs(jax.scipy.stats.norm.cdf(a + has @ b + c * age)), obs=y)

    has = (rng.random((n, 3)) < [0.04, 0.07, 0.3]) * 1.0
    age = rng.standard_normal(n)
    y = -0.4 + has @ [0.7, -0.5, 0.3] + 0.25 * age + rng.standard_normal(n) > 0
    return model, {"has": has, "age": age, "y": y.astype(int)}


@problem("judged", 30_000)
def growth_by_treatment(rng, n):
    """Three treatments, of which one in seven, one in thirty-three and one in a hundred had each."""

    def model(treated, initial, growth):
        a = numpyro.sample("a", dist.Normal(0, 50))
        b = normals("b", 20.0, treated.shape[1])
        c = numpyro.sample("c", dist.Normal(0, 5))
        sigma = numpyro.sample("sigma", dist.Exponential(0.1))
        with rows(growth.shape[0]):
            numpyro.sample("growth", dist.Normal(a + treated @ b + c * initial, sigma), obs=growth)

    treated = (rng.random((n, 3)) < [0.14, 0.03, 0.01]) * 1.0
    initial = rng.normal(20, 4, n)
    growth = 12 + treated @ [3.0, -5.0, 4.0] + 0.3 * initial + 8 * rng.standard_normal(n)
    return model, {"treated": treated, "initial": initial, "growth": growth}


@problem("judged", 9_000)
def admission(rng, n):
    """Dummies and percent, with logits of 0 to 5."""

    def model(score, region, y):
        a = normals("region", 10.0, 4)
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a[region] + slope * score), obs=y)

    score, region = rng.uniform(0, 100, n), rng.integers(0, 4, n)
    logits = np.array([-3.0, -2.0, -3.5, -2.5])[region] + 0.05 * score
    return model, {"score": score, "region": region, "y": (rng.random(n) < expit(logits)).astype(int)}


@problem("judged", 6_000)
def binomial_answers(rng, n):
    """Right answers of twenty."""

    def model(X, y):
        b = normals("b", 2.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Binomial(20, logits=X @ b), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 4)])
    return model, {"X": X, "y": rng.binomial(20, expit(X @ [0.4, 0.3, -0.1, 0.2, 0.0]))}


@problem("judged", 6_000)
def probit_of_ages(rng, n):
    def model(age, dose, y):
        b = normals("b", 5.0, 3)
        with rows(y.shape[0]):
            eta = b[0] + b[1] * (age - 50) / 10 + b[2] * jnp.log(dose)
            numpyro.sample("y", dist.Bernoulli(probs=jax.scipy.stats.norm.cdf(eta)), obs=y)

    age, dose = rng.uniform(18, 90, n), rng.choice([1.0, 2.0, 5.0, 10.0, 20.0], n)
    latent = -0.8 + 0.1 * (age - 50) / 10 + 0.5 * np.log(dose) + rng.standard_normal(n)
    return model, {"age": age, "dose": dose, "y": (latent > 0).astype(int)}


@problem("judged", 5_000)
def large_counts(rng, n):
    """Visits per day, 200 on average, from a wide prior."""

    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = normals("b", 5.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(a + X @ b)), obs=y)

    X = standard(rng, n, 3)
    return model, {"X": X, "y": rng.poisson(np.exp(5.3 + X @ [0.2, -0.1, 0.05]))}


@problem("judged", 10_000)
def deaths_per_person_year(rng, n):
    """Few events, a large exposure."""

    def model(years, group, y):
        rate = numpyro.sample("log_rate", dist.Normal(-5, 3).expand([5]).to_event(1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Poisson(years * jnp.exp(rate[group])), obs=y)

    years, group = rng.uniform(1, 40, n), rng.integers(0, 5, n)
    rate = np.exp(np.array([-5.0, -4.5, -4.0, -3.5, -3.0]))
    return model, {"years": years, "group": group, "y": rng.poisson(years * rate[group])}


@problem("judged", 8_000)
def insurance_claims(rng, n):
    """Overdispersed counts with an offset."""

    def model(X, log_exposure, y):
        b = normals("b", 3.0, X.shape[1])
        phi = numpyro.sample("phi", dist.HalfNormal(3))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(log_exposure + X @ b), phi), obs=y)

    X, log_exposure = np.column_stack([np.ones(n), standard(rng, n, 3)]), np.log(rng.uniform(0.3, 1, n))
    mean = np.exp(log_exposure + X @ [0.2, 0.4, -0.2, 0.1])
    return model, {"X": X, "log_exposure": log_exposure, "y": rng.poisson(mean * rng.gamma(0.8, 1 / 0.8, n))}


@problem("judged", 8_000)
def satisfaction(rng, n):
    """Five grades, a latent normal, increments of the cut points positive."""

    def model(X, y):
        b = normals("b", 1.0, X.shape[1])
        first = numpyro.sample("first", dist.Normal(-1, 2))
        steps = numpyro.sample("steps", dist.LogNormal(0, 1).expand([3]).to_event(1))
        cutpoints = jnp.concatenate([first[None], first + jnp.cumsum(steps)])
        with rows(X.shape[0]):
            below = jax.scipy.stats.norm.cdf(cutpoints - (X @ b)[:, None])
            ends = jnp.zeros((X.shape[0], 1))
            probs = jnp.diff(jnp.concatenate([ends, below, ends + 1], 1))
            numpyro.sample("y", dist.Categorical(probs=probs), obs=y)

    X = standard(rng, n, 4)
    latent = X @ [0.4, 0.2, -0.3, 0.0] + rng.standard_normal(n)
    return model, {"X": X, "y": np.searchsorted([-1.5, -0.5, 0.4, 1.2], latent)}


@problem("judged", 10_000)
def parties(rng, n):
    """Four parties by age and education."""

    def model(age, education, y):
        b = numpyro.sample("b", dist.Normal(0, 3).expand([3, 3]).to_event(2))
        with rows(y.shape[0]):
            X = jnp.stack([jnp.ones_like(age), (age - 50) / 15, (education - 12) / 3], 1)
            logits = jnp.concatenate([X @ b, jnp.zeros((y.shape[0], 1))], 1)
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    age, education = rng.uniform(18, 90, n), rng.integers(8, 19, n) * 1.0
    X = np.stack([np.ones(n), (age - 50) / 15, (education - 12) / 3], 1)
    logits = np.column_stack([X @ rng.normal(0, 0.5, (3, 3)), np.zeros(n)])
    return model, {"age": age, "education": education, "y": np.argmax(logits + rng.gumbel(size=(n, 4)), 1)}


@problem("judged", 5_000)
def length_of_stay(rng, n):
    """Days, gamma with a log link and a raw covariate."""

    def model(age, urgent, y):
        b = normals("b", 10.0, 3)
        shape = numpyro.sample("shape", dist.HalfCauchy(2))
        with rows(y.shape[0]):
            mean = jnp.exp(b[0] + b[1] * age + b[2] * urgent)
            numpyro.sample("y", dist.Gamma(shape, shape / mean), obs=y)

    age, urgent = rng.uniform(20, 95, n), rng.integers(0, 2, n) * 1.0
    return model, {"age": age, "urgent": urgent, "y": rng.gamma(1.3, np.exp(0.5 + 0.015 * age + 0.5 * urgent) / 1.3)}


@problem("judged", 6_000)
def lognormal_claims(rng, n):
    def model(X, y):
        b = normals("b", 20.0, X.shape[1])
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.LogNormal(X @ b, sigma), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 3)])
    return model, {"X": X, "y": np.exp(X @ [8.0, 0.5, 0.2, -0.3] + 1.1 * rng.standard_normal(n))}


@problem("judged", 5_000)
def proportions_of_fat(rng, n):
    """Beta with both mean and precision regressed."""

    def model(X, y):
        b = normals("b", 1.5, X.shape[1])
        g = normals("g", 2.0, 2)
        with rows(X.shape[0]):
            mean, precision = jax.nn.sigmoid(X @ b), jnp.exp(g[0] + g[1] * X[:, 1])
            numpyro.sample("y", dist.Beta(mean * precision, (1 - mean) * precision), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 2)])
    mean, precision = expit(X @ [-1.0, 0.3, 0.1]), np.exp(2.5 + 0.2 * X[:, 1])
    return model, {"X": X, "y": np.clip(rng.beta(mean * precision, (1 - mean) * precision), 1e-4, 1 - 1e-4)}


@problem("judged", 8_000)
def exponential_censored(rng, n):
    """Proportional hazards with a constant baseline, half censored."""

    def model(X, time, event):
        a = numpyro.sample("a", dist.Normal(-3, 3))
        b = normals("b", 2.0, X.shape[1])
        with rows(X.shape[0]):
            log_rate = a + X @ b
            numpyro.factor("survival", event * log_rate - jnp.exp(log_rate) * time)

    X = standard(rng, n, 4)
    time, end = rng.exponential(np.exp(3 - X @ [0.5, -0.2, 0.1, 0.0])), rng.uniform(0, 40, n)
    return model, {"X": X, "time": np.minimum(time, end), "event": (time < end) * 1.0}


@problem("judged", 6_000)
def weibull_all_seen(rng, n):
    def model(X, y):
        b = normals("b", 3.0, X.shape[1])
        k = numpyro.sample("k", dist.LogNormal(0, 1))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Weibull(jnp.exp(X @ b), k), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 2)])
    return model, {"X": X, "y": np.exp(X @ [2.0, 0.4, -0.1]) * rng.weibull(0.9, n) + 1e-4}


@problem("judged", 6_000)
def robust_with_degrees_of_freedom(rng, n):
    def model(X, y):
        a = numpyro.sample("a", dist.Normal(0, 20))
        b = normals("b", 5.0, X.shape[1])
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        nu = numpyro.sample("nu", dist.Gamma(2.0, 0.1))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.StudentT(nu, a + X @ b, sigma), obs=y)

    X = standard(rng, n, 2)
    return model, {"X": X, "y": -6 + X @ [1.0, 2.0] + 3 * rng.standard_t(5.0, n)}


@problem("judged", 6_000)
def median_regression(rng, n):
    """Laplace errors around raw ages, of unknown scale."""

    def model(age, y):
        a = numpyro.sample("a", dist.Normal(0, 100))
        b = numpyro.sample("b", dist.Normal(0, 10))
        scale = numpyro.sample("scale", dist.Exponential(0.1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Laplace(a + b * (age - 40), scale), obs=y)

    age = rng.uniform(18, 80, n)
    return model, {"age": age, "y": 30 + 0.4 * (age - 40) + rng.laplace(0, 6, n)}


@problem("judged", 8_000)
def upper_quantile(rng, n):
    def model(x, y):
        b = normals("b", 10.0, 2)
        scale = numpyro.sample("scale", dist.HalfNormal(2))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.AsymmetricLaplaceQuantile(b[0] + b[1] * x, scale, 0.9), obs=y)

    x = rng.standard_normal(n)
    noise = rng.exponential(size=n) / 0.9 - rng.exponential(size=n) / 0.1
    return model, {"x": x, "y": 3 + 0.5 * x + 0.4 * noise}


@problem("judged", 10_000)
def hurdle(rng, n):
    """Whether at all, and how many: zeros by a logistic regression."""

    def model(X, y):
        g = normals("g", 2.0, X.shape[1])
        b = normals("b", 2.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.ZeroInflatedDistribution(dist.Poisson(jnp.exp(X @ b)), gate_logits=X @ g), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 2)])
    return model, {"X": X, "y": rng.poisson(np.exp(X @ [1.4, 0.2, -0.2])) * (rng.random(n) > expit(X @ [-0.5, 0.4, 0]))}


@problem("judged", 8_000)
def two_variances(rng, n):
    """Means and scales of four groups, standard deviations as they are written."""

    def model(group, y):
        mu = numpyro.sample("mu", dist.Normal(50, 50).expand([4]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(20).expand([4]).to_event(1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(mu[group], sigma[group]), obs=y)

    group = rng.integers(0, 4, n)
    y = np.array([60.0, 72.0, 55.0, 90.0])[group] + np.array([5.0, 12.0, 8.0, 20.0])[group] * rng.standard_normal(n)
    return model, {"group": group, "y": y}


@problem("judged", 8_000)
def fourier_season(rng, n):
    """Counts over the year, by four harmonics."""

    def model(day, y):
        a = numpyro.sample("a", dist.Normal(0, 5))
        w = normals("w", 1.0, 8)
        with rows(y.shape[0]):
            phase = 2 * jnp.pi * day[:, None] / 365.25 * jnp.arange(1, 5)
            season = jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], 1) @ w
            numpyro.sample("y", dist.Poisson(jnp.exp(a + season)), obs=y)

    day = rng.integers(0, 365, n) * 1.0
    phase = 2 * np.pi * day / 365.25
    return model, {"day": day, "y": rng.poisson(np.exp(2.0 + 0.4 * np.sin(phase) + 0.2 * np.cos(2 * phase)))}


@problem("judged", 10_000)
def logistic_spline(rng, n):
    def model(B, y):
        tau = numpyro.sample("tau", dist.Exponential(1.0))
        w = numpyro.sample("w", dist.Normal(0, 1).expand([B.shape[1]]).to_event(1))
        a = numpyro.sample("a", dist.Normal(0, 3))
        with rows(B.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + B @ (tau * w)), obs=y)

    x = rng.uniform(0, 1, n)
    return model, {"B": spline_basis(x, 8, 0, 1)[:, 1:], "y": (rng.random(n) < expit(np.sin(6 * x) - 0.5)).astype(int)}


@problem("judged", 10_000)
def laplace_prior(rng, n):
    """Bayesian lasso."""

    def model(X, y):
        scale = numpyro.sample("scale", dist.HalfCauchy(0.5))
        b = numpyro.sample("b", dist.Laplace(0, 1).expand([X.shape[1]]).to_event(1))
        sigma = numpyro.sample("sigma", dist.Exponential(0.5))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ (scale * b), sigma), obs=y)

    X = standard(rng, n, 9, 0.4)
    return model, {"X": X, "y": X[:, :3] @ [0.8, -0.5, 0.3] + 2 * rng.standard_normal(n)}


@problem("judged", 20_000)
def eight_schools_by_pupil(rng, n):
    """Not centred, raw marks."""

    def model(school, y, schools=8):
        mu = numpyro.sample("mu", dist.Normal(50, 30))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        sigma = numpyro.sample("sigma", dist.HalfNormal(30))
        with numpyro.plate("schools", schools):
            z = numpyro.sample("z", dist.Normal(0, 1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + tau * z[school], sigma), obs=y)

    school = rng.integers(0, 8, n)
    return model, {"school": school, "y": 62 + 4 * rng.normal(size=8)[school] + 14 * rng.standard_normal(n)}


@problem("judged", 20_000)
def rates_by_region(rng, n):
    """Centred intercepts of nine regions, counts."""

    def model(region, x, y, regions=9):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        tau = numpyro.sample("tau", dist.Exponential(1))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("regions", regions):
            a = numpyro.sample("a", dist.Normal(mu, tau))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(a[region] + b * x)), obs=y)

    region, x = rng.integers(0, 9, n), rng.standard_normal(n)
    return model, {"region": region, "x": x, "y": rng.poisson(np.exp(0.8 + 0.3 * rng.normal(size=9)[region] + 0.2 * x))}


@problem("judged", 40_000, "large")
def slopes_by_clinic(rng, n):
    """Intercepts and slopes of fifteen clinics, correlated, binary outcomes."""

    def model(clinic, x, y, clinics=15):
        mu = normals("mu", 2.0, 2)
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("clinics", clinics):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        effects = mu + z @ (tau[:, None] * corr).T
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=effects[clinic, 0] + effects[clinic, 1] * x), obs=y)

    clinic, x = rng.integers(0, 15, n), rng.standard_normal(n)
    effects = np.array([-0.5, 0.6]) + rng.multivariate_normal([0, 0], [[0.4, 0.1], [0.1, 0.1]], 15)
    y = (rng.random(n) < expit(effects[clinic, 0] + effects[clinic, 1] * x)).astype(int)
    return model, {"clinic": clinic, "x": x, "y": y}


@problem("judged", 50_000, "large")
def wards_in_hospitals(rng, n):
    """Nested: 24 wards in six hospitals."""

    def model(ward, y, hospitals=6, each=4):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
        with numpyro.plate("hospitals", hospitals):
            h = numpyro.sample("h", dist.Normal(0, 1))
        with numpyro.plate("wards", hospitals * each):
            w = numpyro.sample("w", dist.Normal(0, 1))
        effects = mu + tau[0] * jnp.repeat(h, each) + tau[1] * w
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=effects[ward]), obs=y)

    ward = rng.integers(0, 24, n)
    effects = -1.2 + 0.5 * np.repeat(rng.normal(size=6), 4) + 0.3 * rng.normal(size=24)
    return model, {"ward": ward, "y": (rng.random(n) < expit(effects[ward])).astype(int)}


@problem("judged", 40_000, "large")
def items_of_a_test(rng, n):
    """2PL with discriminations of twelve items, persons in ten groups."""

    def model(item, group, y, items=12, groups=10):
        discrimination = numpyro.sample("discrimination", dist.LogNormal(0, 0.5).expand([items]).to_event(1))
        difficulty = normals("difficulty", 1.5, items)
        with numpyro.plate("groups", groups):
            ability = numpyro.sample("ability", dist.Normal(0, 1))
        with rows(y.shape[0]):
            logits = discrimination[item] * (ability[group] - difficulty[item])
            numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    item, group = rng.integers(0, 12, n), rng.integers(0, 10, n)
    a, b, theta = rng.lognormal(0, 0.3, 12), rng.normal(0, 1, 12), rng.normal(size=10)
    y = (rng.random(n) < expit(a[item] * (theta[group] - b[item]))).astype(int)
    return model, {"item": item, "group": group, "y": y}


@problem("judged", 8_000)
def dose_response(rng, n):
    """Emax: a curve in three parameters."""

    def model(dose, y):
        base = numpyro.sample("base", dist.Normal(0, 20))
        emax = numpyro.sample("emax", dist.Normal(0, 20))
        ed50 = numpyro.sample("ed50", dist.LogNormal(2, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(base + emax * dose / (ed50 + dose), sigma), obs=y)

    dose = rng.choice([0.0, 2.0, 5.0, 10.0, 20.0, 50.0], n)
    return model, {"dose": dose, "y": 5 + 12 * dose / (8 + dose) + 6 * rng.standard_normal(n)}


@problem("judged", 6_000)
def step_on_a_day(rng, n):
    """The mean jumps at an unknown day, which rows tell apart by a step."""

    def model(day, y):
        level = numpyro.sample("level", dist.Normal(0, 20).expand([2]).to_event(1))
        change = numpyro.sample("change", dist.Uniform(0, 100))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        with rows(day.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.where(day > change, level[1], level[0]), sigma), obs=y)

    day = rng.uniform(0, 100, n)
    return model, {"day": day, "y": np.where(day > 37, 14.0, 10.0) + 5 * rng.standard_normal(n)}


@problem("judged", 600, "small")
def conversions(rng, n):
    """Log odds of one arm and of the difference."""

    def model(treated, y):
        a = numpyro.sample("a", dist.Normal(0, 2))
        effect = numpyro.sample("effect", dist.Normal(0, 1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + effect * treated), obs=y)

    treated = rng.integers(0, 2, n)
    return model, {"treated": treated, "y": (rng.random(n) < expit(-0.8 + 0.5 * treated)).astype(int)}


@problem("judged", 500, "small")
def mean_count(rng, n):
    def model(y):
        rate = numpyro.sample("rate", dist.Gamma(1.0, 0.1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    return model, {"y": rng.poisson(3.0, n)}


@problem("judged", 1_500, "small")
def blood_pressure(rng, n):
    def model(x, y):
        a = numpyro.sample("a", dist.Normal(120, 30))
        b = numpyro.sample("b", dist.Normal(0, 2))
        sigma = numpyro.sample("sigma", dist.HalfNormal(20))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + b * (x - 50), sigma), obs=y)

    x = rng.uniform(20, 80, n)
    return model, {"x": x, "y": 128 + 0.4 * (x - 50) + 14 * rng.standard_normal(n)}


@problem("judged", 40_000, "large")
def poisson_30(rng, n):
    def model(X, y):
        b = normals("b", 1.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 29, 0.2)])
    return model, {"X": X, "y": rng.poisson(np.exp(np.clip(X @ rng.normal(0, 0.12, 30), -4, 4)))}


@problem("judged", 60_000, "curved")
def ring(rng, n):
    """Only the squares' weighted sums are identified, by rows of different weights."""

    def model(w, y):
        t = normals("t", 2.0, 2)
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(w * t[0] ** 2 + (2 - w) * t[1] ** 2, 30.0), obs=y)

    w = 1 + 0.02 * rng.standard_normal(n)
    return model, {"w": w, "y": 4 + 30 * rng.standard_normal(n)}


@problem("judged", 15_000, "curved")
def mixture_of_lines(rng, n):
    def model(x, y):
        share = numpyro.sample("share", dist.Beta(2, 2))
        slope = numpyro.sample("slope", dist.Normal(jnp.array([-1.0, 1.0]), 1.0).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with rows(y.shape[0]):
            means = x[:, None] * slope
            parts = dist.Normal(means, sigma)
            numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.array([1 - share, share])), parts), obs=y)

    x = rng.standard_normal(n)
    return model, {"x": x, "y": x * np.where(rng.random(n) < 0.35, 1.2, -0.8) + 0.7 * rng.standard_normal(n)}


@problem("judged", 12_000, "wrong")
def wrong_link(rng, n):
    """Complementary log-log rows under a logistic regression."""

    def model(X, y):
        b = normals("b", 2.0, X.shape[1])
        with rows(X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 3)])
    p = 1 - np.exp(-np.exp(X @ [-0.3, 0.8, -0.5, 0.3]))
    return model, {"X": X, "y": (rng.random(n) < p).astype(int)}


@problem("judged", 8_000, "wrong")
def gross_errors_in_weights(rng, n):
    """One in fifty was typed in grams."""

    def model(height, y):
        a = numpyro.sample("a", dist.Normal(70, 30))
        b = numpyro.sample("b", dist.Normal(0, 3))
        sigma = numpyro.sample("sigma", dist.HalfNormal(30))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + b * (height - 170), sigma), obs=y)

    height = 170 + 9 * rng.standard_normal(n)
    y = 72 + 0.9 * (height - 170) + 10 * rng.standard_normal(n)
    return model, {"height": height, "y": y * np.where(rng.random(n) < 0.02, 1000, 1)}


@problem("judged", 10_000, "wrong")
def zeros_under_a_negative_binomial(rng, n):
    """A third never comes."""

    def model(X, y):
        b = normals("b", 2.0, X.shape[1])
        phi = numpyro.sample("phi", dist.Exponential(0.5))
        with rows(X.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ b), phi), obs=y)

    X = np.column_stack([np.ones(n), standard(rng, n, 2)])
    return model, {"X": X, "y": rng.poisson(np.exp(X @ [1.5, 0.2, -0.1])) * (rng.random(n) > 0.33)}
