"""Models of every kind that must be supported, each with a function that makes its arguments."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import mask, reparam, scale
from numpyro.infer.reparam import LocScaleReparam

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


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    model: Callable
    args: tuple = ()
    kwargs: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)
    dropped: frozenset = frozenset()

    def __str__(self):
        return self.name


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
        dist.TransformedDistribution(
            dist.Normal(0, 1).expand([3]).to_event(1), dist.transforms.OrderedTransform()
        ),
    )
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample(
            "y", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(loc, 0.5)), obs=y
        )


def ordinal(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    cut = numpyro.sample(
        "cut", dist.ImproperUniform(dist.constraints.ordered_vector, (), event_shape=(2,))
    )
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


CASES = [
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
]
