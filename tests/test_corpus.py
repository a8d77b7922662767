"""A corpus: kinds of models that NumPyro's examples and tutorials teach, and the mistakes and tables that users make.

Three tables, each of which says of every entry where its kind comes from and what must become of it.

- **Good models** (`GOOD`, and those of the zoo by `FROM_THE_ZOO`): they must be admitted, and the log prior and the
  log densities of their rows must add up to the potential energy of NumPyro, in value and gradient.
- **Bad models and arguments** (`BAD`, and those that other modules test by `REFUSED_ELSEWHERE`): they must be refused
  before a row is looked at, with a message that names what is wrong and says the way out.
- **Hostile tables** (`HOSTILE`): nothing about them can be refused, since that would tell something about a row. Runs
  on them must end, with finite samples.
"""

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import sparse
from jax.experimental.ode import odeint
from jax.scipy.special import logsumexp, ndtr
from numpyro.contrib.control_flow import cond, scan
from numpyro.distributions import constraints
from numpyro.handlers import condition, do, lift, mask, reparam, scale, scope
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import potential_energy
from zoo import BY_NAME

from numpyro_dp import DPHMC, MCMC, PrivacyBudgetError, UnsupportedModelError
from numpyro_dp.preparation import Preparation

N = 11  # unlike the number of anything else below, and of the coefficients in JAX's own special functions
_rng = np.random.default_rng(5)
X, y, positive, bits = _rng.normal(size=(N, 3)), _rng.normal(size=N), _rng.gamma(2.0, size=N), _rng.integers(0, 2, N)
counts, group = _rng.poisson(2.0, N), np.arange(N) % 4
_OUTSIDE_IS_IMPOSSIBLE = tuple(map(int, numpyro.__version__.split(".")[:2])) >= (0, 22)


def finding(reason, condition=True):
    """Mark what does not become what it must, until it does."""
    return (pytest.mark.xfail(condition, reason=reason, strict=True),)


# NumPyro from 0.22 on gives values outside of a law's support no density, and no random row adds up to 30 words.
# Before, it gives some of them the lowest of all numbers, and NumPy warns where the check adds two up.
_NO_ROW_IS_TRIED = finding("no synthetic row lies in the support of this law", _OUTSIDE_IS_IMPOSSIBLE)
_SUMS_OVERFLOW = finding("the check of synthetic rows warns of an overflow", not _OUTSIDE_IS_IMPOSSIBLE)


# == Good models =======================================================================================================


@dataclasses.dataclass(frozen=True)
class Good:
    """A model that must be admitted.

    :ivar kind: what it is.
    :ivar origin: the example or tutorial of NumPyro that is of this kind.
    :ivar options: of the kernel.
    :ivar summed: the same model with its discrete latents summed out by hand, for NumPyro's potential energy.
    :ivar near: unconstrained parameters to compare at; 0 by default.
    :ivar everyday: whether it is tested every day; the others nightly, since compiling takes seconds.
    :ivar marks: of pytest.
    """

    kind: str
    origin: str
    model: Callable
    args: tuple
    options: dict = dataclasses.field(default_factory=dict)
    summed: Callable | None = None
    near: dict = dataclasses.field(default_factory=dict)
    everyday: bool = False
    marks: tuple = ()

    @property
    def reference(self) -> Callable:
        return self.summed or self.model


GOOD: dict[str, Good] = {}


def good(kind, origin, *args, **fields):
    """Enter the model below into the table, with its arguments."""

    def enter(model):
        name = model.__name__ if inspect.isfunction(model) else kind.replace(" ", "_")
        assert name not in GOOD
        GOOD[name] = Good(kind, origin, model, args, **fields)
        return model

    return enter


def coefficients(X, name="b"):
    return numpyro.sample(name, dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))


# -- Regression --------------------------------------------------------------------------------------------------------


@good("regression that may take minibatches", "example hmcecs, tutorial covtype", X, bits, everyday=True)
def minibatches_not_used(X, y, subsample_size=None):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0], subsample_size=subsample_size):
        rows, outcomes = numpyro.subsample(X, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=rows @ b), obs=outcomes)


@good("two proportions", "example proportion_test", bits, group % 2)
def proportion_test(bought, campaign):
    rates = numpyro.sample("rates", dist.Beta(1, 1).expand([2]))
    numpyro.deterministic("difference", rates[1] - rates[0])
    with numpyro.plate("visitors", bought.shape[0]):
        numpyro.sample("bought", dist.Bernoulli(probs=rates[campaign]), obs=bought)


@good("Bayesian neural network", "examples bnn and stein_bnn", X, y[:, None])
def neural_network(X, Y, hidden=4):
    def weights(name, *shape):
        return numpyro.sample(name, dist.Normal(jnp.zeros(shape), jnp.ones(shape)).to_event(2))

    layer = jnp.tanh(X @ weights("w1", X.shape[1], hidden))
    layer = jnp.tanh(layer @ weights("w2", hidden, hidden))
    mean = layer @ weights("w3", hidden, 1)
    precision = numpyro.sample("precision", dist.Gamma(3.0, 1.0))
    with numpyro.plate("data", X.shape[0]):
        numpyro.sample("Y", dist.Normal(mean, precision**-0.5).to_event(1), obs=Y)


@good("spline with a random walk of weights", "tutorial hsgp_example", np.abs(X), y)
def spline(basis, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    walk = numpyro.sample("walk", dist.GaussianRandomWalk(1.0, num_steps=basis.shape[1]))
    with numpyro.plate("rows", basis.shape[0]):
        numpyro.sample("y", dist.Normal(basis @ (tau * walk), 1.0), obs=y)


@good("Gaussian process by basis functions", "example hsgp", X[:, 0], y, everyday=True)
def approximate_gaussian_process(x, y, num_functions=4, end=3.0):
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0, 1))
    length = numpyro.sample("length", dist.InverseGamma(3.0, 2.0))
    frequency = jnp.arange(1, num_functions + 1) * jnp.pi / (2 * end)
    phi = jnp.sin(frequency * (x[:, None] + end)) / jnp.sqrt(end)
    spectrum = amplitude * jnp.sqrt(length) * jnp.exp(-0.25 * (length * frequency) ** 2)
    with numpyro.plate("functions", num_functions):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(phi @ (spectrum * beta), 0.5), obs=y)


@good("quantile regression", "tutorial bayesian_regression", X, y)
def quantile_regression(X, y, quantile=0.9):
    b, sigma = coefficients(X), numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.AsymmetricLaplaceQuantile(X @ b, sigma, quantile), obs=y)


@good("ordinal outcome with a prior on its probabilities", "tutorial ordinal_regression", X[:, 0], group)
def ordinal_with_a_dirichlet(x, y, num_classes=4):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    to_cut_points = dist.transforms.SimplexToOrderedTransform(0.0)
    cut = numpyro.sample("cut", dist.TransformedDistribution(dist.Dirichlet(jnp.ones(num_classes)), to_cut_points))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(slope * x, cut), obs=y)


@good("ordinal covariate with monotonic steps", "tutorial ordinal_regression", group, counts)
def monotonic_steps(education, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    steps = numpyro.sample("steps", dist.Dirichlet(2 * jnp.ones(3)))
    height = jnp.concatenate([jnp.zeros(1), jnp.cumsum(steps)])
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(slope * height[education])), obs=y)


@good("ordered probit of grouped values", "tutorial ordinal_regression", X, group % 3, marks=_SUMS_OVERFLOW)
def grouped_values(X, y):
    b, sigma = coefficients(X), numpyro.sample("sigma", dist.LogNormal(0, 0.5))
    below = ndtr((jnp.array([-0.5, 0.5]) - (X @ b)[:, None]) / sigma)
    edges = jnp.pad(below, ((0, 0), (1, 1)), constant_values=(0.0, 1.0))
    edges = edges.at[:, 0].set(0.0)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Categorical(probs=jnp.diff(edges)), obs=y)


@good("regularised horseshoe", "examples horseshoe_regression and sparse_regression", X, bits)
def regularised_horseshoe(X, y):
    tau = numpyro.sample("tau", dist.HalfCauchy(0.1))
    slab = numpyro.sample("slab", dist.InverseGamma(2.0, 2.0))
    with numpyro.plate("features", X.shape[1]):
        lam = numpyro.sample("lam", dist.HalfCauchy(1.0))
        raw = numpyro.sample("raw", dist.Normal(0, 1))
    shrunk = jnp.sqrt(slab * lam**2 / (slab + (tau * lam) ** 2))
    b = numpyro.deterministic("b", tau * shrunk * raw)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


@good("spike and slab, summed out in the prior", "example sparse_regression", X, y, everyday=True)
def spike_and_slab(X, y):
    prior = dist.MixtureSameFamily(dist.Categorical(jnp.array([0.8, 0.2])), dist.Normal(0.0, jnp.array([0.1, 2.0])))
    with numpyro.plate("features", X.shape[1]):
        b = numpyro.sample("b", prior)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Laplace(X @ b, 1.0), obs=y)


@good("parameters tied by a soft identity", "tutorial bad_posterior_geometry", X[:, 0], y)
def two_ways_to_one_mean(x, y):
    """A factor of the prior, observed at a public number."""
    first, second = (numpyro.sample(name, dist.Normal(0, 5)) for name in ("first", "second"))
    numpyro.sample("close", dist.Normal(first - second, 0.3), obs=0.0)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(first + second * x, 1.0), obs=y)


# -- Outcomes of other kinds -------------------------------------------------------------------------------------------


@good("counts out of trials, pooled", "example baseball", np.arange(10, 10 + N), counts)
def batting_averages(at_bats, hits):
    chance = numpyro.sample("chance", dist.Uniform(0, 1))
    with numpyro.plate("players", at_bats.shape[0]):
        numpyro.sample("hits", dist.Binomial(at_bats, probs=chance), obs=hits)


@good("counts out of trials, partially pooled", "example baseball", np.arange(10, 10 + N), counts)
def batting_averages_that_vary(at_bats, hits):
    """The chance of each player is integrated out."""
    mean = numpyro.sample("mean", dist.Uniform(0, 1))
    size = numpyro.sample("size", dist.Pareto(1.0, 1.5))
    with numpyro.plate("players", at_bats.shape[0]):
        numpyro.sample("hits", dist.BetaBinomial(mean * size, (1 - mean) * size, at_bats), obs=hits)


@good("hurdle by two parts", "example zero_inflated_poisson", X, counts)
def hurdle(X, y):
    b, c = coefficients(X), coefficients(X, "c")
    rate = jnp.exp(X @ c)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("any", dist.Bernoulli(logits=X @ b), obs=(y > 0).astype(int))
        with mask(mask=y > 0):
            numpyro.sample("y", dist.Poisson(rate), obs=y)
            numpyro.factor("truncation", -jnp.log(-jnp.expm1(-rate)))


@good("waiting times in whole steps", "distributions of NumPyro", X, counts)
def geometric_waiting_times(X, y):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Geometric(logits=X @ b), obs=y)


@good(
    "counts of categories, with a public total",
    "examples lda and prodlda",
    _rng.multinomial(30, [1 / 5] * 5, N),
    marks=_NO_ROW_IS_TRIED,
    everyday=True,
)
def words_of_documents(Y):
    topics = numpyro.sample("topics", dist.Dirichlet(jnp.ones(Y.shape[1])))
    with numpyro.plate("documents", Y.shape[0]):
        numpyro.sample("Y", dist.Multinomial(total_count=30, probs=topics), obs=Y)


@good("counts of categories, with their own totals", "examples lda and prodlda", _rng.poisson(2.0, (N, 3)))
def words_of_documents_of_any_length(Y):
    topics = numpyro.sample("topics", dist.Dirichlet(jnp.ones(Y.shape[1])))
    with numpyro.plate("documents", Y.shape[0]):
        numpyro.sample("Y", dist.Multinomial(total_count=Y.sum(-1), probs=topics), obs=Y)


@good(
    "values above a public threshold",
    "tutorial truncated_distributions",
    10_000 * (1 + positive),
    marks=_NO_ROW_IS_TRIED,
    everyday=True,
)
def top_incomes(income):
    tail = numpyro.sample("tail", dist.LogNormal(0, 1))
    with numpyro.plate("persons", income.shape[0]):
        numpyro.sample("income", dist.Pareto(10_000.0, tail), obs=income)


@good(
    "values within public limits",
    "tutorial truncated_distributions",
    1500 + 100 * y,
    marks=_NO_ROW_IS_TRIED,
    everyday=True,
)
def calories(eaten):
    mu = 1500 + 200 * numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("persons", eaten.shape[0]):
        numpyro.sample("eaten", dist.TruncatedNormal(mu, 100.0, low=1000.0, high=2000.0), obs=eaten)


@good(
    "values within public limits, far from 0",
    "tutorial truncated_distributions",
    170 + 10 * y,
    near={"mu": 170.0},
    everyday=True,
)
def heights(height):
    mu = numpyro.sample("mu", dist.Normal(170, 10))
    with numpyro.plate("persons", height.shape[0]):
        numpyro.sample("height", dist.TruncatedNormal(mu, 8.0, low=120.0, high=230.0), obs=height)


@good("two outcomes that vary together", "tutorial bayesian_regression (instruments)", X, _rng.normal(size=(N, 2)))
def instrumental_variable(X, Y):
    effect = numpyro.sample("effect", dist.Normal(0, 1))
    b = coefficients(X)
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 2.0))
    scales = numpyro.sample("scales", dist.Exponential(1.0).expand([2]).to_event(1))
    mean = jnp.stack([X @ b, effect * Y[:, 0]], -1)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("Y", dist.MultivariateNormal(mean, scale_tril=scales[:, None] * chol), obs=Y)


@good("probabilistic PCA", "tutorial other_samplers, example vae (linear)", _rng.normal(size=(N, 4)))
def principal_components(Y, num_factors=2):
    """The factors of each row are integrated out."""
    W = numpyro.sample("W", dist.Normal(0, 1).expand([Y.shape[1], num_factors]).to_event(2))
    noise = numpyro.sample("noise", dist.HalfNormal(1).expand([Y.shape[1]]).to_event(1))
    with numpyro.plate("rows", Y.shape[0]):
        numpyro.sample("Y", dist.LowRankMultivariateNormal(jnp.zeros(Y.shape[1]), W, noise), obs=Y)


@good("copula", "distributions of NumPyro", _rng.gamma(2.0, size=(N, 2)))
def copula(Y):
    spread = numpyro.sample("spread", dist.LogNormal(0, 0.3).expand([2]).to_event(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 1.0))
    with numpyro.plate("rows", Y.shape[0]):
        numpyro.sample("Y", dist.GaussianCopula(dist.LogNormal(0.0, spread), correlation_cholesky=chol), obs=Y)


@good("circular regression", "example ssbvm_mixture", X, _rng.uniform(-3, 3, N))
def circular_regression(X, angle):
    b, concentration = coefficients(X), numpyro.sample("concentration", dist.Gamma(2.0, 1.0))
    centre = numpyro.sample("centre", dist.VonMises(0.0, 1.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("angle", dist.VonMises(centre + 2 * jnp.arctan(X @ b), concentration), obs=angle)


@good("pairs of angles", "example ssbvm_mixture", _rng.uniform(-2, 2, (N, 2)))
def torsion_angles(pairs):
    mean = numpyro.sample("mean", dist.Uniform(-3, 3).expand([2]).to_event(1))
    weight = numpyro.sample("weight", dist.Uniform(-1, 1))
    with numpyro.plate("residues", pairs.shape[0]):
        law = dist.SineBivariateVonMises(mean[0], mean[1], 2.0, 3.0, weighted_correlation=weight)
        numpyro.sample("pairs", law, obs=pairs)


@good("heavy and skewed tails", "tutorial truncated_distributions", positive, y)
def heavy_tails(claim, surprise):
    tail = numpyro.sample("tail", dist.LogNormal(0, 1))
    skew = numpyro.sample("skew", dist.LogNormal(0, 1))
    with numpyro.plate("policies", claim.shape[0]):
        numpyro.sample("claim", dist.Pareto(0.01, tail), obs=claim + 0.1)
        numpyro.sample("surprise", dist.AsymmetricLaplace(0.0, 1.0, skew), obs=surprise)
        numpyro.sample("largest", dist.Gumbel(0.0, tail), obs=surprise)


class AtLeastOne(dist.Distribution):
    """A user's own law: Poisson counts of those that were seen at all."""

    support = constraints.positive_integer
    arg_constraints = {"rate": constraints.positive}  # noqa: RUF012

    def __init__(self, rate):
        self.rate = rate
        super().__init__(batch_shape=jnp.shape(rate))

    def log_prob(self, value):
        return dist.Poisson(self.rate).log_prob(value) - jnp.log(-jnp.expm1(-self.rate))


@good("a law of the user's own", "tutorial truncated_distributions", X, counts + 1, everyday=True)
def truncated_counts(X, y):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", AtLeastOne(jnp.exp(X @ b)), obs=y)


@good(
    "truncated on both sides",
    "tutorial truncated_distributions",
    X,
    np.clip(y, -1.9, 1.9),
    marks=(pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="refused: see test_rows_alone"),),
)
def truncated_on_both_sides(X, y):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.TruncatedDistribution(dist.StudentT(4.0, X @ b, 1.0), low=-2.0, high=2.0), obs=y)


# -- Groups ------------------------------------------------------------------------------------------------------------


@good("eight schools with a row per pupil", "README of NumPyro (eight schools)", y, group, everyday=True)
def schools_with_pupils(score, school, num_schools=4):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with reparam(config={"theta": LocScaleReparam(0)}), numpyro.plate("schools", num_schools):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("pupils", score.shape[0]):
        numpyro.sample("score", dist.Normal(theta[school], sigma), obs=score)


@good("radon with a covariate per county", "tutorial bayesian_hierarchical_linear_regression", y, bits, group)
def radon(log_radon, floor, county, uranium=(0.1, -0.3, 0.2, 0.4)):
    level, slope = (numpyro.sample(name, dist.Normal(0, 1)) for name in ("level", "slope"))
    tau, sigma = (numpyro.sample(name, dist.HalfCauchy(1)) for name in ("tau", "sigma"))
    with numpyro.plate("counties", len(uranium)):
        effect = numpyro.sample("effect", dist.Normal(level + slope * jnp.array(uranium), tau))
        on_floor = numpyro.sample("on_floor", dist.Normal(0, 1))
    with numpyro.plate("houses", log_radon.shape[0]):
        numpyro.sample("log_radon", dist.Normal(effect[county] + on_floor[county] * floor, sigma), obs=log_radon)


@good("varying slopes of counts out of trials", "example ucbadmit", group, bits, counts + 5, counts)
def admissions(department, male, applied, admitted, num_departments=4):
    mean = numpyro.sample("mean", dist.Normal(0, 1).expand([2]).to_event(1))
    scales = numpyro.sample("scales", dist.HalfCauchy(2).expand([2]).to_event(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("departments", num_departments):
        raw = numpyro.sample("raw", dist.Normal(0, 1).expand([2]).to_event(1))
    effect = mean + raw @ (scales[:, None] * chol).T
    with numpyro.plate("cells", department.shape[0]):
        logits = effect[department, 0] + effect[department, 1] * male
        numpyro.sample("admitted", dist.Binomial(applied, logits=logits), obs=admitted)


@good("effects that add up to zero", "distributions of NumPyro", y, group)
def zero_sum_effects(y, group, num_groups=4):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.ZeroSumNormal(tau, event_shape=(num_groups,)))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + effect[group], 1.0), obs=y)


@good("regions with neighbours", "example mortality", counts, positive, group)
def neighbouring_regions(deaths, population, region):
    ring = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]])
    mu, tau = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("tau", dist.Gamma(2.0, 1.0))
    rho = numpyro.sample("rho", dist.Uniform(0, 1))
    effect = numpyro.sample("effect", dist.CAR(jnp.zeros(4), rho, tau, ring))
    with numpyro.plate("rows", deaths.shape[0]):
        numpyro.sample("deaths", dist.Poisson(population * jnp.exp(mu + effect[region])), obs=deaths)


# -- Annotators, classes, captures -------------------------------------------------------------------------------------


def confusion(num_annotators):
    prevalence = numpyro.sample("prevalence", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("annotators", num_annotators, dim=-1), numpyro.plate("classes", 2, dim=-2):
        beta = numpyro.sample("beta", dist.Dirichlet(jnp.ones(3)))  # class, annotator, answer
    return prevalence, beta


def dawid_skene_summed(answers):
    prevalence, beta = confusion(answers.shape[1])
    by_class = jnp.log(beta)[jnp.arange(2)[:, None], jnp.arange(answers.shape[1]), answers[:, None, :]].sum(-1)
    with numpyro.plate("items", answers.shape[0]):
        numpyro.factor("summed", logsumexp(jnp.log(prevalence) + by_class, -1))


@good("annotators (Dawid and Skene)", "example annotation", _rng.integers(0, 3, (N, 2)), summed=dawid_skene_summed)
def dawid_skene(answers):
    prevalence, beta = confusion(answers.shape[1])
    with numpyro.plate("items", answers.shape[0], dim=-2):
        truth = numpyro.sample("truth", dist.Categorical(prevalence), infer={"enumerate": "parallel"})
        with numpyro.plate("annotators", answers.shape[1], dim=-1):
            law = dist.Categorical(beta[truth, jnp.arange(answers.shape[1])])
            numpyro.sample("answers", law, obs=answers)


def guessing(num_annotators):
    with numpyro.plate("annotators", num_annotators, dim=-1):
        spam = numpyro.sample("spam", dist.Dirichlet(jnp.ones(2)))
        honest = numpyro.sample("honest", dist.Beta(2, 1))
    return spam, honest


def spamming_annotators_summed(answers):
    spam, honest = guessing(answers.shape[1])
    guess = jnp.take_along_axis(spam[None], answers[..., None], -1)[..., 0]
    by_truth = jnp.stack([jnp.log(honest * (answers == k) + (1 - honest) * guess).sum(-1) for k in range(2)], -1)
    with numpyro.plate("items", answers.shape[0]):
        numpyro.factor("summed", logsumexp(by_truth, -1) - jnp.log(2))


@good(
    "annotators who guess (MACE)",
    "example annotation",
    _rng.integers(0, 2, (N, 3)),
    summed=spamming_annotators_summed,
    marks=_SUMS_OVERFLOW,
)
def spamming_annotators(answers):
    spam, honest = guessing(answers.shape[1])
    with numpyro.plate("items", answers.shape[0], dim=-2):
        truth = numpyro.sample("truth", dist.DiscreteUniform(0, 1), infer={"enumerate": "parallel"})
        with numpyro.plate("annotators", answers.shape[1], dim=-1):
            guesses = numpyro.sample("guesses", dist.Bernoulli(1 - honest), infer={"enumerate": "parallel"})
            known = jnp.where(truth[..., None] == jnp.arange(2), 1.0, 0.0)
            law = dist.Categorical(probs=jnp.where(guesses[..., None] == 1, spam, known))
            numpyro.sample("answers", law, obs=answers)


def three_coins():
    return (numpyro.sample(name, dist.Beta(1, 1).expand([2]).to_event(1)) for name in ("a", "b", "c"))


def toy_mixture_summed(y):
    a, b, c = three_coins()
    given_a = jnp.array([1 - a[0], a[0]])
    given_b = jnp.stack([1 - b, b], -1)
    by_values = dist.Bernoulli(c).log_prob(y[:, None])[:, None, :]
    with numpyro.plate("rows", y.shape[0]):
        numpyro.factor("summed", logsumexp(jnp.log(given_a[:, None] * given_b) + by_values, (-1, -2)))


@good("discrete latents in a chain", "example toy_mixture_model_discrete_enumeration", bits, summed=toy_mixture_summed)
def toy_mixture(y):
    a, b, c = three_coins()
    with numpyro.plate("rows", y.shape[0]):
        first = numpyro.sample("first", dist.Bernoulli(a[0]))
        second = numpyro.sample("second", dist.Bernoulli(b[first]))
        numpyro.sample("y", dist.Bernoulli(c[second]), obs=y)


@good("hidden Markov model with known states", "example hmm", _rng.integers(0, 3, (N, 5)), _rng.integers(0, 2, (N, 5)))
def supervised_sequences(states, words):
    moves = numpyro.sample("moves", dist.Dirichlet(jnp.ones(3)).expand([3]).to_event(1))
    says = numpyro.sample("says", dist.Dirichlet(jnp.ones(2)).expand([3]).to_event(1))
    with numpyro.plate("sentences", states.shape[0]):
        numpyro.sample("states", dist.Categorical(moves[states[:, :-1]]).to_event(1), obs=states[:, 1:])
        numpyro.sample("words", dist.Categorical(says[states]).to_event(1), obs=words)


@good("capture and recapture (Cormack, Jolly and Seber)", "example capture_recapture", _rng.integers(0, 2, (N, 4)))
def capture_recapture(seen):
    """Whether an animal is alive is summed out by a recursion, backwards from the last occasion."""
    survive, detect = (numpyro.sample(name, dist.Uniform(0, 1)) for name in ("survive", "detect"))
    later = jnp.cumsum(seen[:, ::-1], 1)[:, ::-1] - seen  # how often it is seen after each occasion
    earlier = jnp.cumsum(seen, 1) - seen
    unseen, log_density = jnp.ones(seen.shape[0]), jnp.zeros(seen.shape[0])
    for t in reversed(range(1, seen.shape[1])):
        known_alive = (earlier[:, t] > 0) & (seen[:, t] + later[:, t] > 0)
        step = jnp.log(survive) + jnp.where(seen[:, t] == 1, jnp.log(detect), jnp.log1p(-detect))
        last_seen = (seen[:, t] == 1) & (later[:, t] == 0)
        log_density += jnp.where(known_alive, step, 0.0) + jnp.where(last_seen, jnp.log(unseen), 0.0)
        unseen = 1 - survive + survive * (1 - detect) * unseen
    first_is_last = (seen[:, 0] == 1) & (later[:, 0] == 0)
    with numpyro.plate("animals", seen.shape[0]):
        numpyro.factor("history", log_density + jnp.where(first_is_last, jnp.log(unseen), 0.0))


# -- Survival ----------------------------------------------------------------------------------------------------------


@good("censored on the right", "tutorial censoring", X, positive, bits, everyday=True)
def right_censored(X, time, lost):
    b, shape = coefficients(X), numpyro.sample("shape", dist.LogNormal(0, 0.5))
    with numpyro.plate("patients", X.shape[0]):
        law = dist.RightCensoredDistribution(dist.Weibull(jnp.exp(X @ b), shape), lost)
        numpyro.sample("time", law, obs=time)


@good("censored to intervals", "tutorial censoring", X, np.stack([positive, positive + 1], -1))
def interval_censored(X, interval):
    b = coefficients(X)
    law = dist.LogNormal(X @ b, 1.0)
    with numpyro.plate("patients", X.shape[0]):
        numpyro.factor("interval", jnp.log(law.cdf(interval[:, 1]) - law.cdf(interval[:, 0])))


@good("piecewise exponential", "tutorial censoring", X, positive, bits)
def piecewise_exponential(X, time, event, edges=(0.0, 1.0, 2.0)):
    b = coefficients(X)
    with numpyro.plate("pieces", len(edges)):
        log_hazard = numpyro.sample("log_hazard", dist.Normal(0, 1))
    start = jnp.array(edges)
    end = jnp.append(start[1:], jnp.inf)
    exposed = jnp.clip(time[:, None], start, end) - start
    piece = jnp.searchsorted(start, time, side="right") - 1
    log_rate = log_hazard + (X @ b)[:, None]
    here = jnp.take_along_axis(log_rate, piece[:, None], 1)[:, 0]
    with numpyro.plate("patients", X.shape[0]):
        numpyro.factor("likelihood", event * here - (jnp.exp(log_rate) * exposed).sum(-1))


@good("survival with a cured fraction", "tutorial censoring", X, positive, bits)
def cured_fraction(X, time, event):
    b, cured = coefficients(X), numpyro.sample("cured", dist.Beta(1, 1))
    law = dist.Gompertz(1.0, jnp.exp(X @ b))
    with numpyro.plate("patients", X.shape[0]):
        dies = jnp.log1p(-cured) + law.log_prob(time)
        lives = jnp.log(cured + (1 - cured) * (1 - law.cdf(time)))
        numpyro.factor("likelihood", jnp.where(event == 1, dies, lives))


# -- Dynamics within a row ---------------------------------------------------------------------------------------------


@good("differential equation, solved for each row", "example ode", positive, _rng.uniform(0.1, 0.9, N), everyday=True)
def growth_curve(time, size):
    rate, capacity = (numpyro.sample(name, dist.LogNormal(0, 0.5)) for name in ("rate", "capacity"))

    def step(state, _):
        slope = rate * state * (1 - state / capacity)
        middle = state + time / 16 * slope
        return state + time / 8 * rate * middle * (1 - middle / capacity), None

    state, _ = jax.lax.scan(step, jnp.full(time.shape, 0.2), length=8)
    with numpyro.plate("plants", time.shape[0]):
        numpyro.sample("size", dist.LogNormal(jnp.log(state), 0.3), obs=size)


@good("stochastic differential equation per row", "distributions of NumPyro", _rng.normal(size=(N, 4)))
def mean_reverting_paths(Y):
    speed, level = numpyro.sample("speed", dist.LogNormal(0, 0.5)), numpyro.sample("level", dist.Normal(0, 1))

    def drift_and_noise(x, t):
        return speed * (level - x), 0.5

    with numpyro.plate("persons", Y.shape[0]):
        law = dist.EulerMaruyama(jnp.linspace(0, 1, Y.shape[1]), drift_and_noise, dist.Normal(level, 1.0))
        numpyro.sample("Y", law, obs=Y)


@good("second-order autoregression per row", "examples ar2 and holt_winters", _rng.normal(size=(N, 5)))
def autoregressions(Y):
    first, second, mean = (numpyro.sample(name, dist.Normal(0, 0.5)) for name in ("first", "second", "mean"))

    def step(carry, y):
        with numpyro.plate("persons", Y.shape[0]):
            numpyro.sample("y", dist.Normal(mean + first * carry[0] + second * carry[1], 1.0), obs=y)
        return (y, carry[0]), None

    scan(step, (Y[:, 1], Y[:, 0]), Y[:, 2:].T)


@good("points of a process, with a public integral", "`numpyro.factor`", positive, everyday=True)
def poisson_process(times, end=10.0):
    level, slope = numpyro.sample("level", dist.Normal(0, 1)), numpyro.sample("slope", dist.Normal(0, 0.1))
    grid = jnp.linspace(0, end, 21)
    numpyro.factor("no_others", -jnp.mean(jnp.exp(level + slope * grid)) * end)
    with numpyro.plate("events", times.shape[0]):
        numpyro.factor("event", level + slope * times)


# -- Rankings ----------------------------------------------------------------------------------------------------------


@good("paired comparisons (Bradley and Terry)", "tutorial tbip", group, (group + 1) % 4, bits, everyday=True)
def bradley_terry(home, away, won, num_teams=4):
    advantage, tau = numpyro.sample("advantage", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("teams", num_teams):
        skill = numpyro.sample("skill", dist.Normal(0, tau))
    with numpyro.plate("matches", won.shape[0]):
        numpyro.sample("won", dist.Bernoulli(logits=advantage + skill[home] - skill[away]), obs=won)


@good("horse race (Plackett and Luce)", "tutorial tbip", np.argsort(_rng.normal(size=(N, 4)), 1), everyday=True)
def horse_race(order, num_horses=4):
    with numpyro.plate("horses", num_horses):
        strength = numpyro.sample("strength", dist.Normal(0, 1))
    ranked = strength[order]
    left = jax.lax.cumlogsumexp(ranked, axis=1, reverse=True)
    with numpyro.plate("races", order.shape[0]):
        numpyro.factor("order", jnp.sum(ranked - left, -1))


# -- Handlers and idioms -----------------------------------------------------------------------------------------------


@good("stacking of models", "tutorial bayesian_hierarchical_stacking", X, _rng.normal(size=(N, 2)))
def stacking(X, log_predictive):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([X.shape[1], 1]).to_event(2))
    logits = jnp.concatenate([X @ beta, jnp.zeros((X.shape[0], 1))], 1)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.factor("stacked", logsumexp(log_predictive + jax.nn.log_softmax(logits), -1))


def _with_an_intervention(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(a, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a + b, 1.0), obs=y)


good("intervention", "`numpyro.handlers`", y, everyday=True)(do(_with_an_intervention, data={"b": 0.5}))


def _with_a_param(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    sigma = numpyro.param("sigma", 1.0, constraint=constraints.positive)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


good("parameter that is given a prior", "example minipyro", y, everyday=True)(
    lift(_with_a_param, prior={"sigma": dist.Gamma(2.0)})
)
good("option set by a partial", "example bnn", X, y[:, None])(functools.partial(neural_network, hidden=2))


@good("branch on a parameter", "`numpyro.contrib.control_flow`", y, everyday=True)
def branch_on_a_parameter(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))

    def squared(mu):
        return numpyro.deterministic("mean", mu**2)

    def plain(mu):
        return numpyro.deterministic("mean", 2 * mu)

    mean = cond(mu > 0, squared, plain, mu)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@good(
    "patients with several visits",
    "tutorial bayesian_hierarchical_linear_regression",
    y,
    bits,
    options={"unit": group},
    everyday=True,
)
def patients_with_visits(volume, clinic):
    """The unit is the patient, with all visits."""
    mu, sigma = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("clinics", 2):
        effect = numpyro.sample("effect", dist.Normal(mu, 1))
    with numpyro.plate("visits", volume.shape[0]):
        numpyro.sample("volume", dist.Normal(effect[clinic], sigma), obs=volume)


@good(
    "two plates of one size",
    "example baseball",
    _rng.normal(size=(N, N)),
    options={"row_plate": "players"},
    everyday=True,
)
def as_many_games_as_players(score):
    with numpyro.plate("games", score.shape[1], dim=-1):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("players", score.shape[0], dim=-2), numpyro.plate("games", score.shape[1], dim=-1):
        numpyro.sample("score", dist.Normal(effect, 1.0), obs=score)


@good("outcomes given by `condition`", "`numpyro.handlers`", X, y, everyday=True)
def conditioned_inside(X, y):
    def unconditioned(X):
        b = coefficients(X)
        with numpyro.plate("rows", X.shape[0]) as rows:
            numpyro.sample("y", dist.Normal(X[rows] @ b, 1.0))

    condition(unconditioned, data={"y": y})(X)


@good("words as vectors that are learned", "example prodlda", _rng.integers(0, 20, (N, 5)), bits)
def bag_of_vectors(words, y, vocabulary=20):
    vectors = numpyro.sample("vectors", dist.Normal(0, 1).expand([vocabulary, 2]).to_event(2))
    weights = numpyro.sample("weights", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("reviews", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=vectors[words].mean(1) @ weights), obs=y)


@good("as many rows as columns", "tutorial bayesian_regression", X[:3], y[:3])
def square_table(X, y):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


# -- Models of the zoo -------------------------------------------------------------------------------------------------
#
# `test_model.py` compares them with NumPyro. Here stands where their kinds come from.

FROM_THE_ZOO = {
    "logistic": ("logistic regression", "tutorial logistic_regression, example covtype"),
    "linear_without_plate": ("linear regression", "tutorial bayesian_regression"),
    "to_event_over_rows": ("linear regression, one event", "tutorial bayesian_regression"),
    "hard_coded_plate": ("Poisson regression", "README of NumPyro"),
    "probit": ("probit regression", "tutorial logistic_regression"),
    "robust_regression": ("Student's t regression", "tutorial bayesian_regression"),
    "gamma_regression": ("gamma regression", "distributions of NumPyro"),
    "beta_regression": ("beta regression", "distributions of NumPyro"),
    "log_normal_outcome": ("transformed outcome", "distributions of NumPyro"),
    "softmax_regression": ("softmax regression", "example covtype"),
    "one_hot_multinomial": ("softmax regression, effects add up to zero", "distributions of NumPyro"),
    "horseshoe": ("horseshoe regression", "example horseshoe_regression"),
    "rates_with_exposure": ("rates with exposure", "example mortality"),
    "zero_inflated_poisson": ("zero inflation", "example zero_inflated_poisson"),
    "zero_inflated": ("zero-inflated negative binomial", "example zero_inflated_poisson"),
    "latent_zeros": ("zero inflation by a latent", "example zero_inflated_poisson"),
    "ordinal": ("ordinal regression", "tutorial ordinal_regression"),
    "hierarchical": ("effects of groups", "tutorial bayesian_hierarchical_linear_regression"),
    "non_centred": ("effects of groups, not centred", "tutorial bad_posterior_geometry"),
    "varying_slopes": ("correlated effects", "example ucbadmit"),
    "crossed_effects": ("crossed effects", "example mortality"),
    "nested_plates": ("items within persons", "example annotation"),
    "meta_analysis": ("eight schools, integrated", "README of NumPyro (eight schools)"),
    "soft_constraint": ("soft constraint", "tutorial bad_posterior_geometry"),
    "multivariate": ("multivariate outcome, LKJ prior", "distributions of NumPyro"),
    "robust_multivariate": ("multivariate Student's t", "distributions of NumPyro"),
    "compositions": ("compositions", "distributions of NumPyro"),
    "dirichlet_multinomial": ("overdispersed counts of categories", "examples lda and prodlda"),
    "directions": ("circular outcomes and parameters", "example ssbvm_mixture"),
    "truncated_outcome": ("truncation", "tutorial truncated_distributions"),
    "censored_by_masks": ("censoring by masks", "tutorial censoring"),
    "censored_by_factor": ("censoring by a factor", "tutorial censoring"),
    "item_response": ("item response, integrated", "tutorial tbip"),
    "mixture": ("mixture", "tutorial gmm"),
    "mixture_of_regressions": ("mixture of regressions", "tutorial gmm"),
    "membership": ("mixture with memberships", "tutorial gmm"),
    "mislabelled": ("mislabelled outcomes", "example annotation"),
    "missing_by_mask": ("missing outcomes", "tutorial bayesian_imputation"),
    "missing_as_nan": ("missing outcomes as NaN", "tutorial bayesian_imputation"),
    "missing_covariate": ("missing discrete covariate", "tutorial discrete_imputation"),
    "short_markov_chain": ("hidden Markov model", "example hmm_enum"),
    "short_series": ("autoregression", "example ar2"),
    "shared_random_walk": ("level over time", "tutorial time_series_forecasting, example holt_winters"),
    "transform_reparam": ("TransformReparam", "tutorial bad_posterior_geometry"),
    "explicit_reparam": ("ExplicitReparam", "tutorial variationally_inferred_parameterization"),
    "scoped_submodels": ("scope", "`numpyro.handlers`"),
    "conditioned": ("condition", "`numpyro.handlers`"),
    "survey_weights": ("weights of rows", "`numpyro.handlers`"),
    "row_factor": ("factor per row", "`numpyro.factor`"),
    "options_in_arguments": ("options as arguments", "tutorial bayesian_regression"),
    "pytree_data": ("table as a dictionary", "tutorial bayesian_imputation"),
    "callable_object": ("model with state", "example bnn"),
}


def admit(entry, **options):
    """Make a kernel ready for a model, up to the start of a run."""
    kernel = DPHMC(entry.model, eps=1.0, prepare=False, num_iterations=10, **{**entry.options, **options})
    kernel.prepare(*entry.args, **getattr(entry, "kwargs", {}))
    return kernel


def _good():
    for name, entry in GOOD.items():
        yield pytest.param(entry, id=name, marks=entry.marks if entry.everyday else (*entry.marks, pytest.mark.nightly))


def assert_prior_and_rows_are_the_model(entry, seeds):
    """In value and gradient, at a point for each seed."""
    separated = admit(entry)._separate(entry.args, {})
    density, log_prior = separated.row_log_density(entry.args, {}), separated.log_prior(entry.args, {})
    rows = tuple(part[:, None] for part in separated.rows(entry.args, {}))

    def by_parts(z):
        terms = jax.vmap(density, (None, 0))(z, rows)
        return log_prior(z) + jnp.sum(terms), jnp.sum(jnp.abs(terms))

    def as_one(z):
        args = jax.tree.map(jnp.asarray, entry.args)
        return -potential_energy(entry.reference, args, {}, separated.unravel(z)), 0.0

    both = jax.jit(lambda z: [jax.value_and_grad(f, has_aux=True)(z) for f in (by_parts, as_one)])
    near = separated.ravel({name: zero + entry.near.get(name, 0.0) for name, zero in separated.prototype.items()})
    for seed in seeds:
        z = near + np.random.default_rng(seed).uniform(-1, 1, separated.num_params)
        ((value, magnitude), grad), ((expected, _), expected_grad) = both(z)
        assert np.isfinite(expected)
        tolerance = 1e-14 * (10 + magnitude)
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(grad, expected_grad, rtol=0, atol=20 * tolerance)


@pytest.mark.parametrize("entry", [*_good()])
def test_good_models_are_admitted_as_what_they_are(entry, x64):
    assert_prior_and_rows_are_the_model(entry, [1, 2])


@pytest.mark.nightly
@pytest.mark.parametrize("entry", [BY_NAME[name] for name in FROM_THE_ZOO], ids=str)
def test_models_of_the_zoo_are_admitted(entry):
    admit(entry)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["patients_with_visits", "hurdle", "horse_race"])
def test_good_models_run_by_default(name):
    entry = GOOD[name]
    run_by_default(entry.model, entry.args, {}, eps=5.0, prepare=Preparation(force=True), **entry.options)


@pytest.mark.filterwarnings("ignore:.*will give a blurred posterior:UserWarning")  # before it starts
@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "eps", "seed"), [(300, 1.0, 1), (2000, 0.6, 1), (20_000, 0.1, 1), (20_000, 0.1, 2)])
def test_flat_priors_are_no_surprise_where_little_is_learned(rows, eps, seed):
    """Draws of other priors spread out then; those of a flat one are infinite, or far away, and somebody says so."""
    outcomes = np.random.default_rng(seed).normal(size=rows)
    with pytest.raises((PrivacyBudgetError, RuntimeWarning), match=r"too little to find clip bounds|may be off"):
        run_by_default(BY_NAME["improper"].model, (outcomes,), {}, eps=eps, noise_seed=seed)


def run_by_default(model, args, kwargs, **options):
    """With a preparation, to finite draws."""
    kernel = DPHMC(model, **{"noise_seed": 1} | options)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), *args, **kwargs)
    assert all(np.isfinite(draws).all() for draws in mcmc.get_samples().values())


# == Bad models and arguments ==========================================================================================


@dataclasses.dataclass(frozen=True)
class Bad:
    """A model, or arguments for one, that must be refused.

    :ivar says: patterns that the message must have: what is wrong, by name, and the way out.
    :ivar options: of the kernel.
    :ivar marks: of pytest.
    """

    model: Callable
    args: tuple
    says: tuple
    error: type | tuple = UnsupportedModelError
    options: dict = dataclasses.field(default_factory=dict)
    marks: tuple = ()


BAD: dict[str, Bad] = {}
_IN_ROW_PLATE = "sum or integrate it out"
_MIXED = "not a sum over rows.*do it beforehand with public constants"
_IN_PYTHON = "needs the values of an array argument in Python.*Compute sizes beforehand"


def bad(kind, *args, **fields):
    """Enter the model below into the table by what is wrong, with its arguments."""

    def enter(model):
        assert kind not in BAD
        BAD[kind] = Bad(model, args, **fields)
        return model

    return enter


def linear(X, y):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def average(*others):
    """A model of the last argument, which does not use the others."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", others[-1].shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=others[-1])


# -- A value for each row ----------------------------------------------------------------------------------------------


@bad("eight schools, a row each", positive, y, says=("'theta' lives in the row plate 'schools'", _IN_ROW_PLATE))
def eight_schools(sigma, y):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", y.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


bad("the same, not centred", positive, y, says=("'theta_decentered' lives in the row plate 'schools'", _IN_ROW_PLATE))(
    reparam(eight_schools, config={"theta": LocScaleReparam(0)})
)


@bad("batting averages, not pooled", counts + 9, counts, says=("'chance' lives in the row plate", _IN_ROW_PLATE))
def batting_averages_not_pooled(at_bats, hits):
    with numpyro.plate("players", hits.shape[0]):
        chance = numpyro.sample("chance", dist.Uniform(0, 1))
        numpyro.sample("hits", dist.Binomial(at_bats, probs=chance), obs=hits)


@bad("abilities of persons", X > 0, says=("'ability' lives in the row plate 'persons'", _IN_ROW_PLATE))
def abilities(answers):
    with numpyro.plate("items", answers.shape[1], dim=-1):
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 1))
    with numpyro.plate("persons", answers.shape[0], dim=-2):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
        with numpyro.plate("items", answers.shape[1], dim=-1):
            numpyro.sample("answers", dist.Bernoulli(logits=ability - difficulty), obs=answers)


@bad("topics of documents (LDA)", _rng.integers(0, 4, (N, 5)), says=("'theta' lives in the row plate", _IN_ROW_PLATE))
def topics_of_documents(words):
    topics = numpyro.sample("topics", dist.Dirichlet(jnp.ones(4)).expand([2]).to_event(1))
    with numpyro.plate("documents", words.shape[0], dim=-2):
        theta = numpyro.sample("theta", dist.Dirichlet(jnp.ones(2)))
        with numpyro.plate("places", words.shape[1], dim=-1):
            topic = numpyro.sample("topic", dist.Categorical(theta))
            numpyro.sample("words", dist.Categorical(topics[topic]), obs=words)


@bad("true values behind measurements", X, positive, y, says=("'true' lives in the row plate", _IN_ROW_PLATE))
def latent_true_values(X, error, y):
    b = coefficients(X)
    with numpyro.plate("states", X.shape[0]):
        true = numpyro.sample("true", dist.Normal(X @ b, 1.0))
        numpyro.sample("y", dist.Normal(true, error), obs=y)


@bad("outliers by weights of rows", X, y, says=("'weight' lives in the row plate", _IN_ROW_PLATE))
def weights_of_rows(X, y):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]):
        weight = numpyro.sample("weight", dist.Gamma(2.0, 2.0))
        numpyro.sample("y", dist.Normal(X @ b, weight**-0.5), obs=y)


@bad("stochastic volatility", y, says=(r"'volatility' has shape \(11,\) with all rows", _IN_ROW_PLATE))
def stochastic_volatility(returns):
    step = numpyro.sample("step", dist.Exponential(50.0))
    volatility = numpyro.sample("volatility", dist.GaussianRandomWalk(step, num_steps=returns.shape[0]))
    numpyro.sample("returns", dist.StudentT(4.0, 0.0, jnp.exp(volatility)), obs=returns)


@bad("a plate of rows under another name", y, says=("works with all 11 rows but not with 3", "Take sizes from"))
def persons_in_a_plate_of_their_own(y):
    with numpyro.plate("persons", N):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)


@bad(
    "a parameter that slipped into the plate",
    X,
    y,
    says=("'sigma' lives in the row plate 'rows'", "before|outside|out of"),
)
def scale_within_the_plate(X, y):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]):
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        numpyro.sample("y", dist.Normal(X @ b, sigma), obs=y)


# -- No distribution, or one without data ------------------------------------------------------------------------------


@bad("a distribution without data (funnel)", says=("no site of the model is observed", "give them to `obs=`"))
def funnel():
    spread = numpyro.sample("spread", dist.Normal(0, 3))
    numpyro.sample("x", dist.Normal(0, jnp.exp(spread / 2)).expand([9]))


@bad("a function that returns a density", X, y, says=("no site of the model is observed", "give them to `obs=`"))
def density_as_a_function(X, y):
    return -jnp.sum((y - X.sum(-1)) ** 2)


@bad("a decoder with weights to optimise (VAE)", X, says=("'decoder' is a numpyro.param site", "`numpyro.sample` site"))
def variational_autoencoder(images):
    decoder = numpyro.param("decoder", jnp.ones((2, 3)))
    with numpyro.plate("batch", images.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
        numpyro.sample("images", dist.Normal(z @ decoder, 1.0).to_event(1), obs=images)


@bad("a centring to be learned", y, group, says=("'effect_centered' is a numpyro.param site", "`numpyro.sample` site"))
def learned_centring(y, group):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", 4), reparam(config={"effect": LocScaleReparam(None)}):
        effect = numpyro.sample("effect", dist.Normal(0, tau))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(effect[group], 1.0), obs=y)


@bad("no noise about the outcome", X, y, says=("density of 'y' is not finite on any synthetic", "ordinary data"))
def outcome_without_noise(X, y):
    numpyro.sample("y", dist.Delta(X @ coefficients(X)), obs=y)


@bad("two submodels of one name", X, y, says=("`b`",), error=AssertionError)
def the_same_names_twice(X, y):
    linear(X, y)
    linear(X, y)


# -- Rows that depend on one another -----------------------------------------------------------------------------------


@bad("batch normalisation", X, y, says=("density of 'y'", _MIXED))
def batch_normalisation(X, y):
    W = numpyro.sample("W", dist.Normal(0, 1).expand([X.shape[1], 4]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([4]).to_event(1))
    hidden = X @ W
    hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-5)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.tanh(hidden) @ v, 1.0), obs=y)


@bad("weights that add up to n", X, y, positive, says=("density of 'y'", _MIXED))
def normalised_weights(X, y, weight):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]), scale(scale=weight * len(weight) / weight.sum()):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


@bad("classes weighted by their shares", X, bits, says=("density of 'y'", _MIXED))
def balanced_classes(X, y):
    b = coefficients(X)
    with numpyro.plate("rows", X.shape[0]), scale(scale=jnp.where(y == 1, 1 / y.mean(), 1 / (1 - y.mean()))):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


@bad("means of groups computed inside", X, y, group, says=("density of 'y'", _MIXED))
def contextual_effects(X, y, group):
    b = coefficients(X)
    size = jnp.maximum(jax.ops.segment_sum(jnp.ones(y.shape), group, 4), 1)
    mean = jax.ops.segment_sum(X, group, 4) / size[:, None]
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(mean[group] @ b, 1.0), obs=y)


@bad("Cox's partial likelihood", X, positive, bits, says=("density of 'partial'", _MIXED))
def partial_likelihood(X, time, event):
    eta = X @ coefficients(X)
    order = jnp.argsort(-time)
    at_risk = jax.lax.cumlogsumexp(eta[order])
    with numpyro.plate("patients", X.shape[0]):
        numpyro.factor("partial", event[order] * (eta[order] - at_risk))


@bad("all pairs of rows", X, y, says=("factor 'pairs' is computed from .* over all rows", "one factor per row"))
def pairwise_ranking(X, y):
    eta = X @ coefficients(X)
    numpyro.factor("pairs", jnp.sum(jax.nn.log_sigmoid((eta[:, None] - eta) * jnp.sign(y[:, None] - y))))


@bad("stacking in one sum", X, says=("factor 'stacked' is computed from .* over all rows", "one factor per row"))
def stacking_in_one_sum(log_predictive):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    numpyro.factor("stacked", jnp.sum(logsumexp(log_predictive + jnp.log(weights), -1)))


@bad("other rows as contrast", X, _rng.normal(size=(N, 3)), says=("density of 'contrast'", _MIXED))
def contrastive_loss(X, Z):
    temperature = numpyro.sample("temperature", dist.HalfNormal(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.factor("contrast", jnp.diag(jax.nn.log_softmax(temperature * X @ Z.T)))


@bad("rows that share a covariance", X, y, says=("density of 'y'", _MIXED))
def exchangeable_rows(X, y):
    rho = numpyro.sample("rho", dist.Uniform(0, 1))
    covariance = (1 - rho) * jnp.eye(y.shape[0]) + rho
    numpyro.sample("y", dist.MultivariateNormal(X @ coefficients(X), covariance), obs=y)


@bad("regions as rows", y, says=(r"closes over an array of shape \(11, 11\)", "pass it as an argument"))
def regions_as_rows(y):
    ring = np.roll(np.eye(N, dtype=int), 1, 0) + np.roll(np.eye(N, dtype=int), -1, 0)
    rho = numpyro.sample("rho", dist.Uniform(0, 1))
    numpyro.sample("y", dist.CAR(0.0, rho, 1.0, ring), obs=y)


@bad(
    "one path through all rows (ODE)", positive, _rng.gamma(3.0, size=(N, 2)), says=("a loop", "fixed number of steps")
)
def one_path_through_all_rows(times, Y):
    theta = numpyro.sample("theta", dist.LogNormal(0, 0.1).expand([2]).to_event(1))
    path = odeint(lambda z, t, theta: theta * z * (1 - z), 0.1 * jnp.ones(2), times, theta)
    numpyro.sample("Y", dist.LogNormal(jnp.log(path), 0.5).to_event(1), obs=Y)


@bad("one series over all rows", y, says=("density of 'y'", _MIXED))
def one_series(y):
    phi = numpyro.sample("phi", dist.Normal(0, 0.5).expand([2]))

    def step(past, value):
        numpyro.sample("y", dist.Normal(phi[0] * past[0] + phi[1] * past[1], 1.0), obs=value)
        return (value, past[0]), None

    scan(step, (y[1], y[0]), y[2:])


@bad("part of the rows", X, y, says=("density of 'y' is not a sum over rows",))
def part_of_the_rows(X, y):
    numpyro.sample("y", dist.Normal(X[:5] @ coefficients(X), 1.0), obs=y[:5])


@bad("rows drawn anew (bootstrap)", X, y, says=("density of 'y' is not a sum over rows",))
def bootstrap(X, y):
    drawn = jax.random.randint(jax.random.key(0), y.shape, 0, y.shape[0])
    linear(X[drawn], y[drawn])


@bad("a prior from the design", X, y, says=("prior of 'b' uses private argument 'X'", "separate public arguments"))
def zellners_prior(X, y):
    b = numpyro.sample("b", dist.MultivariateNormal(0.0, precision_matrix=X.T @ X / len(X) + jnp.eye(3)))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


@bad(
    "a loop that a row may keep from ending",
    y,
    says=("loop",),
)
def loop_until_small(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    small = jax.lax.while_loop(lambda v: jnp.any(jnp.abs(v) > 1), lambda v: jnp.where(jnp.abs(v) > 1, v / 2, v), y)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=small)


# -- Values in Python --------------------------------------------------------------------------------------------------


@bad("a NumPy function", X, y, says=(_IN_PYTHON, "use jax.numpy"))
def numpy_within(X, y):
    linear(np.log1p(np.abs(X)), y)


@bad("a look for missing values", X, y, says=(_IN_PYTHON, "`jnp.where`"))
def look_for_missing_values(X, y):
    if jnp.isnan(y).any():
        raise ValueError("missing values")
    linear(X, y)


@bad("rows with missing values left out", X, y, says=(_IN_PYTHON, "`handlers.mask`"))
def missing_values_left_out(X, y):
    seen = ~jnp.isnan(y)
    linear(X[seen], y[seen])


# -- Arguments ---------------------------------------------------------------------------------------------------------


@bad("an outcome that is a number", 3.0, says=("no observed site is computed from an array argument", "`obs=`"))
def one_number(y):
    numpyro.sample("y", dist.Normal(numpyro.sample("mu", dist.Normal(0, 1)), 1.0), obs=y)


@bad("persons of several lengths", [y[:3], y[:4], y], says=("different leading axes", "`row_plate=`"))
def several_lengths(persons):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    for k, values in enumerate(persons):
        numpyro.sample(f"y{k}", dist.Normal(mu, 1.0), obs=values)


@jax.custom_vjp
def solution(x):
    """As `odeint`, whose derivative is such a solution again, it has no derivative forwards."""
    return jnp.exp(x)


solution.defvjp(lambda x: (solution(x), x), lambda x, cotangent: (cotangent * solution(x),))


@bad(
    "no second derivatives",
    X,
    y,
    says=("the preparation needs second derivatives", "`prepare=False`"),
    options={"prepare": Preparation(force=True)},
)
def without_second_derivatives(X, y):
    mean = solution(X @ coefficients(X))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@bad(
    "an equation solved by odeint (tutorial lotka_volterra_multiple)",
    _rng.gamma(3.0, size=(N, 3, 2)),
    says=("loop that goes on or ends as a row says", "fixed number of steps"),
)
def predators_and_prey(Y):
    """The derivative by a parameter is solved backward from a row, in as many steps as that row says."""
    theta = numpyro.sample("theta", dist.TruncatedNormal(0.5, 0.2, low=0.05).expand([4]).to_event(1))

    def slope(z, t):
        return jnp.array([(theta[0] - theta[1] * z[1]) * z[0], (theta[2] * z[0] - theta[3]) * z[1]])

    path = odeint(slope, jnp.array([1.0, 1.0]), jnp.arange(Y.shape[1] * 1.0), rtol=1e-6, atol=1e-6)
    with numpyro.plate("places", Y.shape[0]):
        numpyro.sample("Y", dist.LogNormal(jnp.log(path), 0.5).to_event(2), obs=Y)


bad("a matrix of SciPy", scipy.sparse.csr_matrix(X), y, says=("'X' is a csr_matrix", "NumPy or JAX array"))(linear)
bad("a structured array", np.zeros(N, [("a", float), ("b", int)]), y, says=("'X' has dtype", "as numbers"))(linear)
bad(
    "one row, small eps",
    X[:1],
    y[:1],
    says=("eps=1 with 1 rows", "Raise eps", "force=True"),
    error=PrivacyBudgetError,
    options={"prepare": None},
)(linear)
bad(
    "more outcomes than rows",
    X[:-1],
    y,
    says=(r"incompatible shapes.*its array arguments are 'X' \(10, 3\), 'y' \(11,\)",),
    error=(TypeError, ValueError),  # NumPyro's or JAX's own, with a note
)(linear)
bad(
    "a matrix of JAX with few entries",
    sparse.BCOO.fromdense(X),
    y,
    says=("'X", "sparse|BCOO|dense"),
)(linear)
bad(
    "bytes in another order",
    X.astype(">f8"),
    y,
    says=("'X'", "dtype"),
)(linear)
bad(
    "texts as a list",
    ["f", "m"] * 5 + ["f"],
    y,
    says=("list",),
)(average)
bad(
    "rows as records",
    [{"sex": "f", "age": 30.5}] * N,
    y,
    says=("list",),
    marks=finding("admitted, since some of a record is text and some a number"),
)(average)
bad(
    "a table within an object",
    types.SimpleNamespace(table=X),
    y,
    says=("SimpleNamespace|array",),
)(average)
bad(
    "no columns, so no parameters",
    X[:, :0],
    y,
    says=("nothing to infer|no parameters",),
)(linear)


# -- Refused in other modules ------------------------------------------------------------------------------------------

REFUSED_ELSEWHERE = {
    "standardised, ranked, lagged, averaged or imputed inside": "test_model.test_rows_mixed_inside_the_model",
    "the table decomposed as a matrix": "test_model.test_table_as_a_matrix",
    "a time series whose rows are its times": "test_model.test_time_series_over_rows",
    "a Gaussian process over the rows (example gp)": "test_model.test_gaussian_process_over_rows",
    "a density scaled by the number of rows": "test_model.test_scale_by_the_number_of_rows",
    "a column against a vector": "test_model.test_broadcasting_of_column_against_vector",
    "an observed mean": "test_model.test_observed_summary",
    "a loss over all rows": "test_model.test_factor_over_all_rows",
    "a prior that reads the outcomes": "test_model.test_prior_from_private_rows",
    "a prior whose scale handler reads the outcomes": "test_model.test_prior_scaled_by_private_rows",
    "a prior that depends on the number of rows": "test_model.test_prior_that_depends_on_the_number_of_rows",
    "minibatches (examples hmcecs and stein_bnn)": "test_model.test_subsampled_plate",
    "imputation by obs_mask (tutorial bayesian_imputation)": "test_model.test_imputation_by_obs_mask",
    "an effect of each row": "test_model.test_latent_in_the_row_plate",
    "an effect of each row without a plate": "test_model.test_latent_with_one_value_per_row_but_no_plate",
    "as many effects as rows, by a number": "test_model.test_latent_with_a_hard_coded_value_per_row",
    "spike and slab": "test_model.test_spike_and_slab_prior",
    "counts as latents of rows": "test_model.test_latents_that_cannot_be_summed_out",
    "hidden Markov models by scan (example hmm_enum)": "test_model.test_hidden_markov_models_by_scan",
    "classes of groups": "test_model.test_latents_outside_of_the_row_plate",
    "latents without funsor": "test_model.test_without_funsor",
    "data in globals, closures, defaults, partials, objects": "test_model.test_closed_over_data",
    "outcomes by a condition from outside": "test_model.test_outcomes_by_condition",
    "lists of numbers": "test_model.test_lists_of_numbers",
    "DataFrames and Series": "test_model.test_pandas",
    "arrays of texts, objects and dates": "test_model.test_arrays_that_are_no_numbers",
    "masked arrays": "test_model.test_masked_arrays",
    "random keys as rows": "test_model.test_random_keys_as_rows",
    "branches, sizes and indices from values": "test_model.test_values_used_in_python",
    "parameters without a prior": "test_model.test_param_site",
    "a model that draws random numbers": "test_model.test_random_model",
    "two plates that might be the rows'": "test_model.test_ambiguous_row_plate",
    "outcomes transposed": "test_model.test_transposed_outcomes",
    "covariates transposed": "test_model.test_transposed_covariates",
    "tables of several lengths": "test_model.test_tables_of_different_length",
    "nothing observed": "test_model.test_nothing_observed",
    "nothing to infer": "test_model.test_no_latent_site",
    "no rows": "test_model.test_empty_table",
    "sites that a handler hides": "test_model.test_hidden_sites",
    "a site for each row": "test_model.test_one_site_per_row",
    "a row plate that is not there": "test_model.test_row_plate_must_exist",
    "private arguments that are not there": "test_model.test_private_args",
    "too small an eps for the table": "test_prepared.test_a_hopeless_run_is_refused_before_anything_is_released",
    "traced rows": "test_prepared.test_traced_rows_cannot_be_prepared_on_and_the_error_says_what_to_do",
    "arguments of the kernel that make no sense": "test_kernels.test_impossible_arguments_are_refused",
    "a second run": "test_kernels.test_a_second_run_is_refused",
    "units that are none": "test_units.test_what_is_no_unit_is_named",
}


# Found by numbers, beside several evaluations of the model; the others are refused on shapes alone.
_SLOW_TO_REFUSE = {
    "classes weighted by their shares",
    "means of groups computed inside",
    "other rows as contrast",
    "rows that share a covariance",
    "one path through all rows (ODE)",
    "rows drawn anew (bootstrap)",
    "no second derivatives",
    "part of the rows",
    "weights that add up to n",
}


def _bad():
    for kind, entry in BAD.items():
        slow = (pytest.mark.nightly,) if kind in _SLOW_TO_REFUSE else ()
        yield pytest.param(entry, id=kind, marks=(*entry.marks, *slow))


@pytest.mark.parametrize("entry", [*_bad()])
def test_bad_models_and_arguments_are_refused(entry):
    """By name, with the way out, and before anything is released."""
    kernel = DPHMC(entry.model, eps=1.0, num_iterations=10, **{"prepare": False, **entry.options})
    with pytest.raises(entry.error) as caught:
        kernel.prepare(*entry.args)  # as every run does first
    message = " ".join(" ".join([str(caught.value), *getattr(caught.value, "__notes__", ())]).split())
    for pattern in entry.says:
        assert re.search(pattern, message), message
    assert not kernel._ledger.committed or kernel._ledger.untouched


def test_what_others_refuse_is_tested_there():
    for reference in REFUSED_ELSEWHERE.values():
        module, name = reference.split(".")
        assert f"\ndef {name}(" in Path(__file__).with_name(f"{module}.py").read_text(), reference


# == Hostile tables ====================================================================================================

ROWS = 60
_few = np.random.default_rng(6)
TABLE = {
    "X": _few.uniform(-1, 1, (ROWS, 2)).astype(np.float32),
    "y": _few.integers(0, 2, ROWS).astype(np.int32),
    "group": (np.arange(ROWS) % 4).astype(np.int32),
    "weight": np.ones(ROWS, np.float32),
}


def weighted_groups(X, y, group, weight):
    b = coefficients(X)
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]), scale(scale=weight):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b + effect[group]), obs=y)


def put(name, value, where=slice(3, 4)):
    """The table with other values in some places of a column."""
    changed = TABLE[name].copy()
    changed[where] = value
    return {**TABLE, name: changed}


HOSTILE = {
    "rows of NaN": put("X", np.nan, slice(0, 20)),
    "nothing but NaN": put("X", np.nan, slice(None)),
    "a huge value": put("X", 1e30),
    "a huge value below zero": put("X", -3e38),
    "infinity": put("X", np.inf),
    "values too small for the type": put("X", 1e-40, slice(None)),
    "a column of zeros": put("X", 0.0, (slice(None), 0)),
    "a column without variance": put("X", 7.0, (slice(None), 0)),
    "two columns that are one": {**TABLE, "X": np.repeat(TABLE["X"][:, :1], 2, 1)},
    "outcomes that a column decides": {**TABLE, "y": (TABLE["X"][:, 0] > 0).astype(np.int32)},
    "outcomes all alike": put("y", 1, slice(None)),
    "outcomes of 1 and 2": put("y", TABLE["y"] + 1, slice(None)),
    "an outcome below zero": put("y", -1),
    "the largest outcome there is": put("y", 2**31 - 1),
    "a group that is not there": put("group", 99),
    "a group below zero": put("group", -7),
    "all rows in one group": put("group", 2, slice(None)),
    "a huge weight": put("weight", 1e30),
    "weights below zero": put("weight", -1.0, slice(0, 30)),
    "no weight at all": put("weight", 0.0, slice(None)),
    "a weight that is not a number": put("weight", np.nan),
    "rows that are all the same": {name: np.repeat(column[:1], ROWS, 0) for name, column in TABLE.items()},
    "each column hostile": {
        "X": put("X", np.nan)["X"],
        "y": put("y", -5, slice(4, 5))["y"],
        "group": put("group", 2**30, slice(5, 6))["group"],
        "weight": put("weight", np.inf, slice(6, 7))["weight"],
    },
}
_STEPS = 10


@functools.cache
def _kernel_for_any_table():
    """One compiled step for all tables: they are traced, so only here may one kernel see several."""
    kernel = DPHMC(weighted_groups, eps=500.0, prepare=False, num_steps=2, num_iterations=_STEPS * len(HOSTILE))
    start = kernel.init(jax.random.key(0), 5, {"b": jnp.zeros(2), "effect": jnp.zeros(4)}, (), TABLE)
    return start, jax.jit(lambda state, table: kernel.sample(state, (), table))


@pytest.mark.parametrize("kind", HOSTILE)
def test_chains_go_on_over_hostile_tables(kind):
    state, step = _kernel_for_any_table()
    for _ in range(_STEPS):
        state = step(state, HOSTILE[kind])
    assert not state.exhausted
    for leaf in jax.tree.leaves(state._replace(rng_key=0)):
        assert np.isfinite(leaf).all()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind", ["each column hostile", "a huge weight", "outcomes that a column decides", "a group below zero"]
)
def test_runs_by_default_end_on_hostile_tables(kind, shared_surveys):
    run_by_default(weighted_groups, (), HOSTILE[kind], eps=20.0, prepare=Preparation(force=True))


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [1, 2])
def test_runs_on_few_rows_end(rows):
    few = {name: column[:rows] for name, column in TABLE.items()}
    run_by_default(weighted_groups, (), few, eps=20.0, prepare=Preparation(force=True))


def test_values_too_large_for_single_precision_are_not_told():
    """In double precision as tables are, and in single as JAX computes; `filterwarnings` makes warnings errors."""
    table = {**TABLE, "X": TABLE["X"].astype(np.float64)}
    table["X"][3] = 1e300
    kernel = DPHMC(weighted_groups, eps=1.0, prepare=False, num_iterations=10)
    kernel._separate((), table).rows((), table)


# -- The same table in other forms -------------------------------------------------------------------------------------


def _on_disk(column, directory):
    mapped = np.memmap(directory / "column", dtype=column.dtype, mode="w+", shape=column.shape)
    mapped[:] = column
    return mapped


def _read_only(column, directory):
    column = column.copy()
    column.flags.writeable = False
    return column


FORMS = {
    "outcomes as floats": ("y", lambda column, directory: column.astype(float)),
    "outcomes as booleans": ("y", lambda column, directory: column.astype(bool)),
    "outcomes of 8 bits": ("y", lambda column, directory: column.astype(np.int8)),
    "outcomes of 64 bits without sign": ("y", lambda column, directory: column.astype(np.uint64)),
    "weights as whole numbers": ("weight", lambda column, directory: column.astype(int)),
    "columns first": ("X", lambda column, directory: np.asfortranarray(column)),
    "every second of more rows": ("X", lambda column, directory: np.repeat(column, 2, 0)[::2]),
    "a matrix of NumPy": ("X", lambda column, directory: column.view(np.matrix)),
    "read only": ("X", _read_only),
    "on disk": ("X", _on_disk),
    "of JAX": ("X", lambda column, directory: jnp.asarray(column)),
}


_OTHER_PROGRAMS = {"outcomes as booleans", "outcomes of 8 bits", "outcomes of 64 bits without sign"}


def densities(table):
    """The log density of each row at some point."""
    kernel = DPHMC(weighted_groups, eps=1.0, prepare=False, num_iterations=10)
    kernel.prepare(**table)
    separated = kernel._separate((), table)
    rows = tuple(part[:, None] for part in separated.rows((), table))
    density = jax.vmap(separated.row_log_density((), table), (None, 0))
    return density(jnp.linspace(-1, 1, separated.num_params), rows)


@functools.cache
def densities_of_the_table():
    return densities(TABLE)


@pytest.mark.parametrize(
    "form", [pytest.param(k, marks=pytest.mark.nightly) if k in _OTHER_PROGRAMS else k for k in FORMS]
)
def test_tables_in_other_forms_are_the_same(form, tmp_path):
    name, change = FORMS[form]
    changed = densities({**TABLE, name: change(TABLE[name], tmp_path)})
    np.testing.assert_allclose(changed, densities_of_the_table(), rtol=1e-6)


# == Generated models ==================================================================================================


OUTCOMES = {
    "normal": (lambda eta: dist.Normal(eta, 1.0), y),
    "scale": (lambda eta: dist.Normal(eta, numpyro.sample("sigma", dist.HalfCauchy(1))), y),
    "student": (lambda eta: dist.StudentT(numpyro.sample("nu", dist.Gamma(2.0, 0.1)), eta, 1.0), y),
    "bernoulli": (lambda eta: dist.Bernoulli(logits=eta), bits),
    "probit": (lambda eta: dist.Bernoulli(probs=ndtr(eta)), bits),
    "cloglog": (lambda eta: dist.Bernoulli(probs=-jnp.expm1(-jnp.exp(eta))), bits),
    "poisson": (lambda eta: dist.Poisson(jnp.exp(eta)), counts),
    "softplus": (lambda eta: dist.Poisson(jax.nn.softplus(eta)), counts),
    "geometric": (lambda eta: dist.Geometric(logits=eta), counts),
    "binomial": (lambda eta: dist.Binomial(20, logits=eta), counts),
    "inflated": (lambda eta: dist.ZeroInflatedPoisson(numpyro.sample("gate", dist.Beta(1, 1)), jnp.exp(eta)), counts),
    "exponential": (lambda eta: dist.Exponential(jnp.exp(eta)), positive),
    "gamma": (lambda eta: dist.Gamma(2.0, jnp.exp(-eta)), positive),
    "log_normal": (lambda eta: dist.LogNormal(eta, 1.0), positive),
}
PRIORS = {
    "normal": dist.Normal(0, 1),
    "student": dist.StudentT(3.0),
    "laplace": dist.Laplace(0.0, 1.0),
    "uniform": dist.Uniform(-2, 2),
    "truncated": dist.TruncatedNormal(0, 1, low=-1.0),
    "positive": dist.HalfNormal(1),
    "mixture": dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), dist.Normal(0.0, jnp.array([0.1, 2.0]))),
}
FORMS_OF_ROWS = ("plate", "plate of a number", "event", "bare")
EFFECTS = ("none", "centred", "not centred", "zero sum")
HANDLERS = {
    "none": lambda model: model,
    "tempered": lambda model: scale(model, scale=0.5),
    "scoped": lambda model: scope(model, prefix="part"),
    "masked": lambda model: mask(model, mask=True),
}
MIXERS = {
    "centred": lambda X: X - X.mean(0),
    "shifted": lambda X: jnp.roll(X, 1, 0),
    "cumulated": lambda X: jnp.cumsum(X, 0),
    "divided by the number of rows": lambda X: X / X.shape[0],
    "ranked": lambda X: jnp.argsort(jnp.argsort(X, 0), 0) / 3.0,
}


def generated(outcome, prior, rows, effects, handler, mixer=None):
    """A generalised linear model of given parts."""
    law, _ = OUTCOMES[outcome]

    def model(X, y, group):
        X = X if mixer is None else MIXERS[mixer](X)
        b = numpyro.sample("b", PRIORS[prior].expand([X.shape[1]]).to_event(1))
        fn = law(X @ b + (0.0 if effects == "none" else effects_of_groups(effects)[group]))
        if rows == "event":
            numpyro.sample("y", fn.to_event(1), obs=y)
        elif rows == "bare":
            numpyro.sample("y", fn, obs=y)
        else:
            with numpyro.plate("rows", N if rows == "plate of a number" else y.shape[0]):
                numpyro.sample("y", fn, obs=y)

    return HANDLERS[handler](model)


def effects_of_groups(kind):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    if kind == "zero sum":
        return numpyro.sample("effect", dist.ZeroSumNormal(tau, event_shape=(4,)))
    with reparam(config={"effect": LocScaleReparam(1 if kind == "centred" else 0)}), numpyro.plate("groups", 4):
        return numpyro.sample("effect", dist.Normal(0, tau))


parts = {
    "outcome": st.sampled_from(sorted(OUTCOMES)),
    "prior": st.sampled_from(sorted(PRIORS)),
    "rows": st.sampled_from(FORMS_OF_ROWS),
    "effects": st.sampled_from(EFFECTS),
    "handler": st.sampled_from(sorted(HANDLERS)),
}


@pytest.mark.nightly
@settings(max_examples=12)
@given(**parts, seed=st.integers(0, 2**32 - 1))
def test_generated_models_are_admitted_as_what_they_are(seed, **parts):
    with jax.enable_x64(True):
        model, outcomes = generated(**parts), OUTCOMES[parts["outcome"]][1]
        assert_prior_and_rows_are_the_model(Good("generated", "", model, (X, outcomes, group)), [seed])


@pytest.mark.nightly
@settings(max_examples=12)
@given(**parts, mixer=st.sampled_from(sorted(MIXERS)))
def test_generated_models_that_mix_rows_are_refused(**parts):
    model, outcomes = generated(**parts), OUTCOMES[parts["outcome"]][1]
    with pytest.raises(UnsupportedModelError, match=r"log density of '.*y'"):
        admit(Good("generated", "", model, (X, outcomes, group)))


# == The tables ========================================================================================================


def test_the_page_on_models_names_every_example():
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text()
    origins = [entry.origin for entry in GOOD.values()] + [origin for _, origin in FROM_THE_ZOO.values()]
    named = {
        name for o in origins for pair in re.findall(r"(?:examples?|tutorial) (\w+)(?: and (\w+))?", o) for name in pair
    }
    missing = {name for name in named - {""} if f"`{name}`" not in page}
    assert len(named) > 30
    assert not missing, missing


def test_there_are_enough_of_each():
    assert len(GOOD) >= 40
    assert GOOD.keys().isdisjoint(FROM_THE_ZOO)
    assert FROM_THE_ZOO.keys() <= BY_NAME.keys()
    assert len(BAD) >= 40
    assert len(HOSTILE) >= 20
