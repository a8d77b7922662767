"""Models of every kind that must be supported, each with a function that makes its arguments."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import logsumexp, ndtr
from numpyro.contrib.control_flow import scan
from numpyro.handlers import condition, mask, reparam, scale, scope
from numpyro.infer.reparam import (
    CircularReparam,
    ExplicitReparam,
    LocScaleReparam,
    ProjectedNormalReparam,
    TransformReparam,
)

N = 7
_rng = np.random.default_rng(0)


def _normal(*shape):
    return _rng.normal(size=shape)


def _counts(*shape):
    return _rng.poisson(2.0, shape)


def _binary(*shape):
    return _rng.integers(0, 2, shape)


def _groups(num_groups, *shape):
    return _rng.integers(0, num_groups, shape)


def _positive(*shape):
    return _rng.gamma(2.0, size=shape)


def _unit_vectors(*shape):
    x = _rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: Callable
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)
    dropped: frozenset = frozenset()
    summed: Callable | None = None  # the same model with its discrete latents summed out by hand

    @property
    def reference(self):
        """The model as NumPyro's potential energy takes it, without enumeration."""
        return self.summed or self.model

    def __str__(self):
        return self.name


class CaseOfJaxArrays(Case):
    """Its arguments become JAX arrays where somebody asks for them: to collect tests starts no device."""

    def __getattribute__(self, name):
        value = super().__getattribute__(name)
        return tuple(map(jnp.asarray, value)) if name == "args" else value


def logistic(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def linear_without_plate(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    numpyro.sample("y", dist.Normal(X @ b, sigma), obs=y)


def to_event_over_rows(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    numpyro.sample("y", dist.Normal(X @ b, 1.0).to_event(1), obs=y)


def hard_coded_plate(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("rows", N):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)


def hard_coded_plate_scaled(y, weights):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", N), scale(scale=weights):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def two_outcomes(X, y, count):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2, X.shape[1]]).to_event(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b[0]), obs=y)
        numpyro.sample("count", dist.Poisson(jnp.exp(X @ b[1])), obs=count)


def two_plates_over_rows(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows_x", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1), obs=x)
    with numpyro.plate("rows_y", y.shape[0]):
        numpyro.sample("y", dist.Normal(-mu, 2), obs=y)


def multivariate(Y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([3]).to_event(1))
    chol = numpyro.sample("chol", dist.LKJCholesky(3, 1.0))
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([3]).to_event(1))
    with numpyro.plate("rows", Y.shape[0]):
        numpyro.sample("Y", dist.MultivariateNormal(mu, scale_tril=scales[:, None] * chol), obs=Y)


def multi_output(X, Y):
    B = numpyro.sample("B", dist.Normal(0, 1).expand([X.shape[1], 2]).to_event(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("Y", dist.Normal(X @ B, 1.0).to_event(1), obs=Y)


def nested_plates(X, Y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("items", Y.shape[1], dim=-1):
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 1))
    with numpyro.plate("rows", X.shape[0], dim=-2), numpyro.plate("items", Y.shape[1], dim=-1):
        numpyro.sample("Y", dist.Bernoulli(logits=(X @ b)[:, None] - difficulty), obs=Y)


def tempered(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("rows", X.shape[0]), scale(scale=0.05):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def survey_weights(X, y, weights):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("rows", X.shape[0]), scale(scale=weights):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def missing_by_mask(X, y, observed):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("rows", X.shape[0]), mask(mask=observed):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def hierarchical(X, y, group, num_groups):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("groups", num_groups):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
    numpyro.deterministic("icc", tau**2 / (tau**2 + 1))
    with numpyro.plate("rows", X.shape[0]):
        eta = numpyro.deterministic("eta", alpha[group] + X @ b)
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


non_centred = reparam(hierarchical, config={"alpha": LocScaleReparam(0)})


def mixture(y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    loc = numpyro.sample(
        "loc",
        dist.TransformedDistribution(dist.Normal(0, 1).expand([3]).to_event(1), dist.transforms.OrderedTransform()),
    )
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(loc, 0.5)), obs=y)


def ordinal(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    cut = numpyro.sample("cut", dist.ImproperUniform(dist.constraints.ordered_vector, (), event_shape=(2,)))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(slope * x, cut), obs=y)


def improper(y):
    mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    log_sigma = numpyro.sample("sigma", dist.ImproperUniform(dist.constraints.positive, (), ()))
    numpyro.sample("y", dist.Normal(mu, log_sigma), obs=y)


def dynamic_support(y):
    upper = numpyro.sample("upper", dist.HalfNormal(3.0))
    rate = numpyro.sample("rate", dist.Uniform(0.0, upper))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def row_factor(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    numpyro.factor("ridge", -0.1 * jnp.sum(b**4))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.factor("quantile_loss", -jnp.abs(y - X @ b))


def pytree_data(data, *, prior_scale):
    b = numpyro.sample("b", dist.Normal(0, prior_scale).to_event(1))
    with numpyro.plate("rows", data["y"].shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, data["X"]["dense"] @ b, 1.0), obs=data["y"])


def options_in_arguments(X, y, link="logit", intercept=True, prior=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    eta = X @ b + (numpyro.sample("a", dist.Normal(0, 5)) if intercept else 0.0)
    mean = {"logit": lambda e: dist.Bernoulli(logits=e), "log": lambda e: dist.Poisson(jnp.exp(e))}[link](eta)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", mean, obs=y)


def public_and_row_data(X, y, item, item_table):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([item_table.shape[1]]))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b + item_table[item] @ slope, 1.0), obs=y)


def negative_binomial_zero_inflated(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    concentration = numpyro.sample("concentration", dist.Gamma(2, 1))
    gate = numpyro.sample("gate", dist.Beta(2, 2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample(
            "y",
            dist.ZeroInflatedNegativeBinomial2(jnp.exp(X @ b), concentration, gate=gate),
            obs=y,
        )


def probit(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(probs=ndtr(X @ b)), obs=y)


def robust_regression(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand_by([X.shape[1]]).to_event(1))
    dof = numpyro.sample("dof", dist.Gamma(2.0, 0.1))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(1.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.StudentT(dof, X @ b, sigma), obs=y)


def gamma_regression(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    shape = numpyro.sample("shape", dist.Exponential(1.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Gamma(shape, shape * jnp.exp(-X @ b)), obs=y)


def beta_regression(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    precision = numpyro.sample("precision", dist.LogNormal(1.0, 0.5))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.BetaProportion(jax.nn.sigmoid(X @ b), precision), obs=y)


def rates_with_exposure(X, y, exposure):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    concentration = numpyro.sample("concentration", dist.InverseGamma(2.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.NegativeBinomial2(exposure * jnp.exp(X @ b), concentration), obs=y)


def horseshoe(X, y):
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    with numpyro.plate("features", X.shape[1]):
        lam = numpyro.sample("lam", dist.HalfCauchy(1.0))
        raw = numpyro.sample("raw", dist.Normal(0.0, 1.0))
    b = numpyro.deterministic("b", tau * lam * raw)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def crossed_effects(y, school, region, *, sizes):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    effects = {}
    for name, size in sizes.items():
        tau = numpyro.sample(f"tau_{name}", dist.HalfNormal(1))
        with numpyro.plate(f"{name}s", size):
            effects[name] = numpyro.sample(f"alpha_{name}", dist.Normal(0, tau))
    with numpyro.plate("rows", y.shape[0]):
        eta = mu + effects["school"][school] + effects["region"][region]
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def varying_slopes(x, y, group, num_groups):
    centre = numpyro.sample("centre", dist.Normal(0, 1).expand([2]).to_event(1))
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
    corr = numpyro.sample("corr", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("groups", num_groups):
        coef = numpyro.sample("coef", dist.MultivariateNormal(centre, scale_tril=scales[:, None] * corr))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(coef[group, 0] + coef[group, 1] * x, 1.0), obs=y)


def _measurement(y, prefix_scale):
    mu = numpyro.sample("mu", dist.Normal(0, prefix_scale))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def scoped_submodels(height, weight):
    scope(_measurement, prefix="height")(height, 1.0)
    scope(_measurement, prefix="weight")(weight, 2.0)


def plate_stack(Y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate_stack("cells", Y.shape):
        numpyro.sample("Y", dist.Normal(mu, 1.0), obs=Y)


def item_response(Y):
    """Abilities are integrated out by quadrature, one factor per person."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(11)
    with numpyro.plate("items", Y.shape[1]):
        slope = numpyro.sample("slope", dist.LogNormal(0, 0.5))
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 1))
    logits = slope * (nodes[:, None] - difficulty)
    with numpyro.plate("persons", Y.shape[0]):
        by_node = dist.Bernoulli(logits=logits).log_prob(Y[:, None, :]).sum(-1)
        numpyro.factor("responses", logsumexp(by_node + jnp.log(weights), axis=-1))


def censored_by_masks(X, time, event):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    rate = jnp.exp(X @ b)
    with numpyro.plate("rows", X.shape[0]):
        with mask(mask=event):
            numpyro.sample("time", dist.Exponential(rate), obs=time)
        with mask(mask=~event):
            numpyro.factor("survival", -rate * time)


def censored_by_factor(X, time, event):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    shape = numpyro.sample("shape", dist.HalfNormal(1.0))
    weibull = dist.Weibull(jnp.exp(X @ b), shape)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.factor("loss", jnp.where(event, weibull.log_prob(time), jnp.log1p(-weibull.cdf(time))))


def softmax_regression(X, y, num_classes):
    B = numpyro.sample("B", dist.Normal(0, 1).expand([X.shape[1], num_classes]).to_event(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=X @ B), obs=y)


def one_hot_multinomial(X, Y):
    B = numpyro.sample("B", dist.ZeroSumNormal(1.0, event_shape=(Y.shape[1],)).expand([X.shape[1]]))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("Y", dist.Multinomial(logits=X @ B, total_count=1), obs=Y)


def zero_inflated_poisson(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    gate = numpyro.sample("gate", dist.Uniform(0, 1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(X @ b)), obs=y)


def log_normal_outcome(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    base = dist.Normal(X @ b, 0.5)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.TransformedDistribution(base, dist.transforms.ExpTransform()), obs=y)


def robust_multivariate(Y):
    df = numpyro.sample("df", dist.Gamma(2.0, 0.1))
    loc = numpyro.sample("loc", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", Y.shape[0]):
        numpyro.sample("Y", dist.MultivariateStudentT(df, loc, jnp.eye(2)), obs=Y)


def dirichlet_multinomial(Y):
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("rows", Y.shape[0]):
        numpyro.sample("Y", dist.DirichletMultinomial(concentration, total_count=Y.sum(-1)), obs=Y)


def compositions(Y):
    concentration = numpyro.sample("concentration", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("rows", Y.shape[0]):
        numpyro.sample("Y", dist.Dirichlet(concentration), obs=Y)


def truncated_outcome(X, y):
    b = numpyro.sample("b", dist.TruncatedNormal(0, 1, low=-2, high=2).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.TruncatedNormal(X @ b, 1.0, low=0.0), obs=y)


def _directions(angle, heading):
    mu = numpyro.sample("mu", dist.VonMises(0.0, 1.0))
    pole = numpyro.sample("pole", dist.ProjectedNormal(jnp.zeros(3)))
    with numpyro.plate("rows", angle.shape[0]):
        numpyro.sample("angle", dist.VonMises(mu, 2.0), obs=angle)
        numpyro.sample("heading", dist.ProjectedNormal(2.0 * pole), obs=heading)


directions = reparam(_directions, config={"mu": CircularReparam(), "pole": ProjectedNormalReparam()})


def short_series(Y):
    """An autoregression per person; scan runs over time, the persons are a plate inside."""
    phi = numpyro.sample("phi", dist.Uniform(-1, 1))

    def step(previous, y):
        with numpyro.plate("persons", Y.shape[0]):
            numpyro.sample("y", dist.Normal(phi * previous, 1.0), obs=y)
        return y, None

    scan(step, jnp.zeros(Y.shape[0]), Y.T)


def shared_random_walk(Y):
    """A latent level per day that all persons share."""
    sigma = numpyro.sample("sigma", dist.HalfNormal(0.5))

    def step(level, y):
        level = numpyro.sample("level", dist.Normal(level, sigma))
        with numpyro.plate("persons", Y.shape[0]):
            numpyro.sample("y", dist.Normal(level, 1.0), obs=y)
        return level, None

    scan(step, 0.0, Y.T)


def _transformed_prior(y):
    scale_prior = dist.TransformedDistribution(dist.Normal(0, 1), dist.transforms.ExpTransform())
    sigma = numpyro.sample("sigma", scale_prior)
    mu = numpyro.sample("mu", dist.Normal(0, sigma))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


transform_reparam = reparam(_transformed_prior, config={"sigma": TransformReparam()})
explicit_reparam = reparam(
    _transformed_prior, config={"mu": ExplicitReparam(dist.transforms.AffineTransform(1.0, 2.0))}
)


def meta_analysis(effect, standard_error):
    """Each row has its own known error; the latent true effects are integrated out."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfCauchy(1))
    with numpyro.plate("studies", effect.shape[0]):
        numpyro.sample("effect", dist.Normal(mu, jnp.hypot(tau, standard_error)), obs=effect)


def missing_as_nan(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("rows", X.shape[0]), mask(mask=~jnp.isnan(y)):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=jnp.nan_to_num(y))


def soft_constraint(y, group, num_groups):
    alpha = numpyro.sample("alpha", dist.Normal(0, 1).expand([num_groups]))
    numpyro.sample("sum_to_zero", dist.Normal(alpha.sum(), 0.1), obs=0.0)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(alpha[group], 1.0), obs=y)


def _known_noise(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, sigma), obs=y)


conditioned = condition(_known_noise, data={"sigma": 0.7})
tempered_from_outside = scale(_known_noise, scale=0.3)


def two_column_outcome(y, group_of_item):
    """Public covariates of the items, whose number is no other axis."""
    with numpyro.plate("items", y.shape[1], dim=-1):
        level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0], dim=-2), numpyro.plate("items", y.shape[1], dim=-1):
        numpyro.sample("y", dist.Normal(level + group_of_item, 1.0), obs=y)


def mixture_of_regressions(X, y):
    B = numpyro.sample("B", dist.Normal(0, 1).expand([X.shape[1], 2]).to_event(2))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("rows", X.shape[0]):
        components = [dist.Normal(X @ B[:, 0], 1.0), dist.Normal(X @ B[:, 1], 2.0)]
        numpyro.sample("y", dist.MixtureGeneral(dist.Categorical(weights), components), obs=y)


def released_transforms(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.deterministic("exp_mu", jnp.exp(mu))
    numpyro.deterministic("repeated", jnp.full(y.shape[0], mu))
    numpyro.deterministic("total", mu * y.shape[0])
    with numpyro.plate("rows", y.shape[0]):
        numpyro.deterministic("residual", y - mu)
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


# -- Discrete latents of each row, and the same models with them summed out by hand ------------------------------------


def _weights_and_locations(*event_shape):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    loc = numpyro.sample("loc", dist.Normal(0, 2).expand([3, *event_shape]).to_event(1 + len(event_shape)))
    return weights, loc


def _sum_out(log_terms, axes=-1):
    """The factor of each row that is left of the last axes of joint log densities."""
    with numpyro.plate("rows", log_terms.shape[0]):
        numpyro.factor("summed", logsumexp(log_terms, axes))


def membership(y):
    weights, loc = _weights_and_locations()
    numpyro.deterministic("spread", loc[2] - loc[0])
    with numpyro.plate("rows", y.shape[0]):
        component = numpyro.sample("component", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(loc[component], 0.5), obs=y)


def membership_marked(y):
    weights, loc = _weights_and_locations()
    with numpyro.plate("rows", N) as index:
        component = numpyro.sample("component", dist.Categorical(weights), infer={"enumerate": "parallel"})
        numpyro.deterministic("own_loc", loc[component])
        numpyro.sample("y", dist.Normal(loc[component], 0.5), obs=jnp.asarray(y)[index])
    numpyro.deterministic("largest", component.max())
    numpyro.deterministic("spread", loc[2] - loc[0])


def membership_summed(y):
    weights, loc = _weights_and_locations()
    numpyro.deterministic("spread", loc[2] - loc[0])
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(loc, 0.5)), obs=y)


def membership_multivariate(X, Y):
    weights, loc = _weights_and_locations(2)
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 1.0))
    with numpyro.plate("rows", X.shape[0]):
        component = numpyro.sample("component", dist.Categorical(weights))
        centre = X[:, :1] + loc[component]
        numpyro.sample("Y", dist.MultivariateNormal(centre, scale_tril=chol), obs=Y)


def membership_multivariate_summed(X, Y):
    weights, loc = _weights_and_locations(2)
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 1.0))
    by_component = dist.MultivariateNormal(X[:, None, :1] + loc, scale_tril=chol).log_prob(Y[:, None])
    _sum_out(jnp.log(weights) + by_component)


def _rates_of_error(X):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    false_positive = numpyro.sample("false_positive", dist.Beta(1, 5))
    false_negative = numpyro.sample("false_negative", dist.Beta(1, 5))
    return X @ b, false_positive, false_negative


def mislabelled(X, y):
    logits, false_positive, false_negative = _rates_of_error(X)
    with numpyro.plate("rows", X.shape[0]):
        truth = numpyro.sample("truth", dist.Bernoulli(logits=logits))
        numpyro.sample("y", dist.Bernoulli(jnp.where(truth == 1, 1 - false_negative, false_positive)), obs=y)


def mislabelled_summed(X, y):
    logits, false_positive, false_negative = _rates_of_error(X)
    p = jax.nn.sigmoid(logits)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(p * (1 - false_negative) + (1 - p) * false_positive), obs=y)


def latent_zeros(X, y):
    """Zero inflation: some terms of the sums are zero, so their logarithms are not finite."""
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    gate = numpyro.sample("gate", dist.Uniform(0, 1))
    with numpyro.plate("rows", X.shape[0]):
        structural = numpyro.sample("structural", dist.Bernoulli(gate))
        with mask(mask=structural == 0):
            numpyro.sample("y", dist.Poisson(jnp.exp(X @ b)), obs=y)
        with mask(mask=structural == 1):
            numpyro.factor("zero", jnp.where(y == 0, 0.0, -jnp.inf))


def _two_levels():
    top = numpyro.sample("top", dist.Dirichlet(jnp.ones(2)))
    sub = numpyro.sample("sub", dist.Dirichlet(jnp.ones(3)).expand([2]).to_event(1))
    loc = numpyro.sample("loc", dist.Normal(0, 2).expand([2, 3]).to_event(2))
    return top, sub, loc


def dependent_latents(y):
    top, sub, loc = _two_levels()
    with numpyro.plate("rows", y.shape[0]):
        k = numpyro.sample("k", dist.Categorical(top))
        j = numpyro.sample("j", dist.Categorical(sub[k]))
        numpyro.sample("y", dist.Normal(loc[k, j], 1.0), obs=y)


def dependent_latents_summed(y):
    top, sub, loc = _two_levels()
    prior = jnp.log(top)[:, None] + jnp.log(sub)
    _sum_out(prior + dist.Normal(loc, 1.0).log_prob(y[:, None, None]), (-1, -2))


def weighted_membership(y, weight, seen):
    weights, loc = _weights_and_locations()
    with numpyro.plate("rows", N), scale(scale=weight):
        component = numpyro.sample("component", dist.Categorical(weights))
        with mask(mask=seen):
            numpyro.sample("y", dist.Normal(loc[component], 1.0), obs=y)


def weighted_membership_summed(y, weight, seen):
    weights, loc = _weights_and_locations()
    by_component = jnp.where(seen[:, None], dist.Normal(loc, 1.0).log_prob(y[:, None]), 0.0)
    _sum_out(weight[:, None] * (jnp.log(weights) + by_component))


def repeated_measures(Y, seen):
    """A class of each person, which all of its visits share."""
    weights, loc = _weights_and_locations()
    with numpyro.plate("visits", Y.shape[1], dim=-1):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("rows", Y.shape[0], dim=-2):
        component = numpyro.sample("component", dist.Categorical(weights))
        with numpyro.plate("visits", Y.shape[1], dim=-1), mask(mask=seen):
            numpyro.sample("Y", dist.Normal(loc[component] + effect, 1.0), obs=Y)


def repeated_measures_summed(Y, seen):
    weights, loc = _weights_and_locations()
    with numpyro.plate("visits", Y.shape[1], dim=-1):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    by_visit = dist.Normal(loc[:, None] + effect, 1.0).log_prob(Y[:, None])
    _sum_out(jnp.log(weights) + jnp.where(seen[:, None], by_visit, 0.0).sum(-1))


def latent_of_each_visit(Y):
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    loc = numpyro.sample("loc", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", Y.shape[0], dim=-2), numpyro.plate("visits", Y.shape[1], dim=-1):
        state = numpyro.sample("state", dist.Bernoulli(gate))
        numpyro.sample("Y", dist.Normal(loc[state], 1.0), obs=Y)


def latent_of_each_visit_summed(Y):
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    loc = numpyro.sample("loc", dist.Normal(0, 1).expand([2]).to_event(1))
    by_state = jnp.log(jnp.stack([1 - gate, gate])) + dist.Normal(loc, 1.0).log_prob(Y[..., None])
    with numpyro.plate("rows", Y.shape[0]):
        numpyro.factor("summed", logsumexp(by_state, -1).sum(-1))


def latent_size(y):
    """The values of the latents do not start at 0, or are counts."""
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("rows", y.shape[0]):
        size = numpyro.sample("size", dist.DiscreteUniform(2, 4))
        extra = numpyro.sample("extra", dist.Binomial(2, p))
        numpyro.sample("y", dist.Poisson(rate * size + extra), obs=y)


def latent_size_summed(y):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    p = numpyro.sample("p", dist.Beta(1, 1))
    extra = jnp.arange(3)
    prior = dist.Binomial(2, p).log_prob(extra) - jnp.log(3.0)
    by_values = dist.Poisson(rate * jnp.arange(2, 5)[:, None] + extra).log_prob(y[:, None, None])
    _sum_out(prior + by_values, (-1, -2))


def missing_covariate(x, seen, y):
    """Missing values of a binary covariate are imputed, which is to sum them out."""
    p = numpyro.sample("p", dist.Beta(1, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        complete = numpyro.sample("x", dist.Bernoulli(p), obs=x, obs_mask=seen)
        numpyro.sample("y", dist.Normal(slope * complete, 1.0), obs=y)


def missing_covariate_summed(x, seen, y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    values = jnp.arange(2)
    terms = dist.Bernoulli(p).log_prob(values) + dist.Normal(slope * values, 1.0).log_prob(y[:, None])
    # NumPyro's two terms are the same where the value is known, which adds log 2.
    known = dist.Bernoulli(p).log_prob(x) + dist.Normal(slope * x, 1.0).log_prob(y) + jnp.log(2.0)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.factor("summed", jnp.where(seen, known, logsumexp(terms, -1)))


def _transitions():
    start = numpyro.sample("start", dist.Dirichlet(jnp.ones(2)))
    moves = numpyro.sample("moves", dist.Dirichlet(jnp.ones(2)).expand([2]).to_event(1))
    loc = numpyro.sample("loc", dist.Normal(0, 2).expand([2]).to_event(1))
    return start, moves, loc


def short_markov_chain(Y):
    """A hidden state per person that changes between the visits."""
    start, moves, loc = _transitions()
    with numpyro.plate("persons", Y.shape[0]):
        probs = start
        for t in range(Y.shape[1]):
            state = numpyro.sample(f"state_{t}", dist.Categorical(probs))
            numpyro.sample(f"y_{t}", dist.Normal(loc[state], 1.0), obs=Y[:, t])
            probs = moves[state]


def short_markov_chain_summed(Y):
    start, moves, loc = _transitions()
    emission = dist.Normal(loc, 1.0).log_prob(Y[..., None])
    forward = jnp.log(start) + emission[:, 0]
    for t in range(1, Y.shape[1]):
        forward = logsumexp(forward[:, :, None] + jnp.log(moves), 1) + emission[:, t]
    _sum_out(forward)


def latent_class_by_group(X, y, group, num_groups):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", num_groups):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
    with numpyro.plate("rows", X.shape[0]):
        responds = numpyro.sample("responds", dist.Bernoulli(logits=alpha[group]))
        numpyro.sample("y", dist.Normal(responds * (X @ b), 1.0), obs=y)


def latent_class_by_group_summed(X, y, group, num_groups):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", num_groups):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
    responds = jnp.arange(2)
    prior = dist.Bernoulli(logits=alpha[group][:, None]).log_prob(responds)
    _sum_out(prior + dist.Normal(responds * (X @ b)[:, None], 1.0).log_prob(y[:, None]))


class Model:
    """A model that is an object with options, and is called."""

    def __init__(self, prior_scale):
        self.prior_scale = prior_scale

    def __call__(self, X, *, y, **options):
        b = numpyro.sample("b", dist.Normal(0, self.prior_scale).expand([X.shape[1]]))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b + options["offset"], 1.0), obs=y)


CASES = [
    Case("float_binary_outcome", logistic, (_normal(N, 3), _binary(N).astype(float))),
    Case("float_count_outcome", hard_coded_plate, (_normal(N, 3), _counts(N).astype(float))),
    Case("float_mixed_outcomes", two_outcomes, (_normal(N, 3), _binary(N).astype(float), _counts(N).astype(float))),
    Case("logistic", logistic, (_normal(N, 3), _binary(N))),
    Case("logistic_kwargs", logistic, (), {"X": _normal(N, 3), "y": _binary(N)}),
    Case("linear_without_plate", linear_without_plate, (_normal(N, 3), _normal(N))),
    Case("to_event_over_rows", to_event_over_rows, (_normal(N, 3), _normal(N))),
    Case("hard_coded_plate", hard_coded_plate, (_normal(N, 3), _counts(N))),
    Case("hard_coded_plate_scaled", hard_coded_plate_scaled, (_normal(N), np.abs(_normal(N)))),
    Case("two_outcomes", two_outcomes, (_normal(N, 3), _binary(N), _counts(N))),
    Case("two_plates_over_rows", two_plates_over_rows, (_normal(N), _normal(N))),
    Case("multivariate", multivariate, (_normal(N, 3),)),
    Case("multi_output", multi_output, (_normal(N, 3), _normal(N, 2))),
    Case("nested_plates", nested_plates, (_normal(N, 3), _binary(N, 4))),
    Case("tempered", tempered, (_normal(N, 3), _normal(N))),
    Case("survey_weights", survey_weights, (_normal(N, 3), _normal(N), np.abs(_normal(N)))),
    Case("missing_by_mask", missing_by_mask, (_normal(N, 3), _normal(N), _binary(N).astype(bool))),
    Case(
        "hierarchical",
        hierarchical,
        (_normal(N, 3), _binary(N), _groups(4, N), 4),
        dropped=frozenset({"eta"}),
    ),
    Case(
        "non_centred",
        non_centred,
        (_normal(N, 3), _binary(N)),
        {"group": _groups(4, N), "num_groups": 4},
        dropped=frozenset({"eta"}),
    ),
    Case("mixture", mixture, (_normal(N),)),
    Case("ordinal", ordinal, (_normal(N), _groups(3, N))),
    Case("improper", improper, (_normal(N),)),
    Case("dynamic_support", dynamic_support, (_counts(N),)),
    Case("row_factor", row_factor, (_normal(N, 3), _normal(N))),
    Case(
        "pytree_data",
        pytree_data,
        ({"X": {"dense": _normal(N, 3)}, "y": _normal(N)},),
        {"prior_scale": np.array([1.0, 2.0, 3.0])},
    ),
    Case(
        "options_in_arguments",
        options_in_arguments,
        (_normal(N, 3), _counts(N)),
        {"link": "log", "intercept": False},
    ),
    Case(
        "public_and_row_data",
        public_and_row_data,
        (_normal(N, 3), _normal(N), _groups(4, N), _normal(4, 2)),
    ),
    Case("zero_inflated", negative_binomial_zero_inflated, (_normal(N, 3), _counts(N))),
    Case("probit", probit, (_normal(N, 3), _binary(N))),
    Case("robust_regression", robust_regression, (_normal(N, 3), _normal(N))),
    Case("gamma_regression", gamma_regression, (_normal(N, 3), _positive(N))),
    Case("beta_regression", beta_regression, (_normal(N, 3), _rng.uniform(0.1, 0.9, N))),
    Case("rates_with_exposure", rates_with_exposure, (_normal(N, 3), _counts(N), _positive(N))),
    Case("horseshoe", horseshoe, (_normal(N, 3), _normal(N))),
    Case(
        "crossed_effects",
        crossed_effects,
        (_normal(N), _groups(4, N), _groups(3, N)),
        {"sizes": {"school": np.int64(4), "region": 3}},
    ),
    Case("varying_slopes", varying_slopes, (_normal(N), _normal(N), _groups(4, N), 4)),
    Case("scoped_submodels", scoped_submodels, (_normal(N), _normal(N))),
    Case("plate_stack", plate_stack, (_normal(N, 2),)),
    Case("item_response", item_response, (_binary(N, 4),)),
    Case("censored_by_masks", censored_by_masks, (_normal(N, 3), _positive(N), _binary(N).astype(bool))),
    Case("censored_by_factor", censored_by_factor, (_normal(N, 3), _positive(N), _binary(N).astype(bool))),
    Case("softmax_regression", softmax_regression, (_normal(N, 3), _groups(4, N), 4)),
    Case("one_hot_multinomial", one_hot_multinomial, (_normal(N, 3), np.eye(4, dtype=int)[_groups(4, N)])),
    Case("zero_inflated_poisson", zero_inflated_poisson, (_normal(N, 3), _counts(N))),
    Case("log_normal_outcome", log_normal_outcome, (_normal(N, 3), _positive(N))),
    Case("robust_multivariate", robust_multivariate, (_normal(N, 2),)),
    Case("dirichlet_multinomial", dirichlet_multinomial, (_counts(N, 3),)),
    Case("compositions", compositions, (_rng.dirichlet(np.ones(3), N),)),
    Case("truncated_outcome", truncated_outcome, (_normal(N, 3), _positive(N))),
    Case("directions", directions, (_rng.uniform(-3, 3, N), _unit_vectors(N, 3))),
    Case("short_series", short_series, (_normal(N, 5),)),
    Case("shared_random_walk", shared_random_walk, (_normal(N, 5),)),
    Case("transform_reparam", transform_reparam, (_normal(N),)),
    Case("explicit_reparam", explicit_reparam, (_normal(N),)),
    Case("meta_analysis", meta_analysis, (_normal(N), _positive(N))),
    Case("missing_as_nan", missing_as_nan, (_normal(N, 3), np.where(_binary(N), np.nan, _normal(N)))),
    Case("soft_constraint", soft_constraint, (_normal(N), _groups(4, N), 4)),
    Case("conditioned", conditioned, (_normal(N, 3), _normal(N))),
    Case("tempered_from_outside", tempered_from_outside, (_normal(N, 3), _normal(N))),
    Case(
        "two_column_outcome",
        two_column_outcome,
        (_normal(N, 2), _normal(2)),
        options={"private_args": ["y"]},
    ),
    Case("mixture_of_regressions", mixture_of_regressions, (_normal(N, 3), _normal(N))),
    Case(
        "released_transforms",
        released_transforms,
        (_normal(N),),
        dropped=frozenset({"repeated", "total", "residual"}),
    ),
    Case("callable_object", Model(2.0), (_normal(N, 3),), {"y": _normal(N), "offset": _normal(N)}),
    Case(
        "narrow_dtypes",
        hierarchical,
        (_normal(N, 3).astype(np.float32), _binary(N).astype(bool), _groups(4, N).astype(np.int8), 4),
        dropped=frozenset({"eta"}),
    ),
    CaseOfJaxArrays("jax_arrays", logistic, (_normal(N, 3).astype(np.float32), _binary(N).astype(np.int32))),
    Case("membership", membership, (_normal(N),), summed=membership_summed),
    Case(
        "membership_marked",
        membership_marked,
        (_normal(N),),
        dropped=frozenset({"own_loc", "largest"}),
        summed=membership_summed,
    ),
    Case(
        "membership_multivariate",
        membership_multivariate,
        (_normal(N, 2), _normal(N, 2)),
        summed=membership_multivariate_summed,
    ),
    Case("mislabelled", mislabelled, (_normal(N, 3), _binary(N)), summed=mislabelled_summed),
    Case("latent_zeros", latent_zeros, (_normal(N, 3), _counts(N)), summed=zero_inflated_poisson),
    Case("dependent_latents", dependent_latents, (_normal(N),), summed=dependent_latents_summed),
    Case(
        "weighted_membership",
        weighted_membership,
        (_normal(N), _positive(N), _binary(N).astype(bool)),
        summed=weighted_membership_summed,
    ),
    Case(
        "repeated_measures",
        repeated_measures,
        (_normal(N, 4), _binary(N, 4).astype(bool)),
        summed=repeated_measures_summed,
    ),
    Case("latent_of_each_visit", latent_of_each_visit, (_normal(N, 4),), summed=latent_of_each_visit_summed),
    Case("latent_size", latent_size, (_counts(N),), summed=latent_size_summed),
    Case(
        "missing_covariate",
        missing_covariate,
        (_binary(N), _binary(N).astype(bool), _normal(N)),
        dropped=frozenset({"x"}),
        summed=missing_covariate_summed,
    ),
    Case("short_markov_chain", short_markov_chain, (_normal(N, 4),), summed=short_markov_chain_summed),
    Case(
        "latent_class_by_group",
        latent_class_by_group,
        (_normal(N, 3), _normal(N), _groups(4, N), 4),
        summed=latent_class_by_group_summed,
    ),
]

BY_NAME = {case.name: case for case in CASES}

STRUCTURES = {
    *("logistic", "linear_without_plate", "to_event_over_rows", "hard_coded_plate_scaled", "two_outcomes"),
    *("two_plates_over_rows", "nested_plates", "missing_by_mask", "hierarchical", "mixture", "improper", "row_factor"),
    *("pytree_data", "public_and_row_data", "scoped_submodels", "plate_stack", "short_series", "missing_as_nan"),
    *("two_column_outcome", "callable_object", "narrow_dtypes", "membership_marked", "dependent_latents"),
    *("repeated_measures", "short_markov_chain"),
}
"""Models whose rows are written in different ways; the others differ from one of them in laws and formulas."""

COORDINATES = STRUCTURES | {
    *("weighted_membership", "dynamic_support", "conditioned", "options_in_arguments", "released_transforms"),
    *("horseshoe", "multivariate", "directions", "mixture_of_regressions"),
}
"""Models in which parameters meet the data in different ways: together they run all that any does of `find_cut`."""
