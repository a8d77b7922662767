"""Models in which each row, or each unit with several rows, has continuous latents of its own."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to
from numpyro.handlers import mask, reparam, seed, trace
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import compute_log_probs, constrain_fn

PERSONS, N = 5, 13  # unlike the number of anything else
_rng = np.random.default_rng(3)
person = np.sort(np.concatenate([np.arange(PERSONS), _rng.integers(0, PERSONS, N - PERSONS)]))
X, y, positive = _rng.normal(size=(N, 2)), _rng.normal(size=N), _rng.gamma(2.0, size=N)
bits, counts, group = _rng.integers(0, 2, N), _rng.poisson(2.0, N), _rng.integers(0, 3, N)
answers = _rng.integers(0, 2, (N, 4))


@dataclasses.dataclass(frozen=True)
class Mixed:
    """
    :ivar args: of the model; where `unit` is given the first one says whose each row is, and the last one is how many
        units there are.
    :ivar latents: the sites that are integrated out.
    :ivar unit: "person", where a person has several rows.
    :ivar exact: whether the joint density is normal in the latents, so that the smallest rule does.
    :ivar dropped: deterministic sites that are not released.
    :ivar reference: the same model, where NumPyro's own density is another: with its discrete latents summed out by
        hand, or with a law for latents that are masked.
    """

    model: Callable
    args: tuple
    latents: tuple
    unit: str | None = None
    exact: bool = False
    dropped: tuple = ()
    reference: Callable | None = None

    def of_unit(self, k: int) -> tuple:
        """The arguments for the rows of unit k alone."""
        if self.unit is None:
            return tuple(a[k : k + 1] for a in self.args)
        own = self.args[0] == k
        return (np.zeros(own.sum(), int), *(a[own] for a in self.args[1:-1]), 1)

    @property
    def num_units(self) -> int:
        return len(self.args[0]) if self.unit is None else self.args[-1]


MIXED: dict[str, Mixed] = {}


def mixed(args, *latents, **fields):
    def enter(model):
        MIXED[model.__name__] = Mixed(model, args, latents, **fields)
        return model

    return enter


def normal(name, scale=1.0):
    return numpyro.sample(name, dist.Normal(0, scale))


def positive_scale(name="tau"):
    return numpyro.sample(name, dist.HalfNormal(1))


# -- A latent for each row ---------------------------------------------------------------------------------------------


@mixed((positive, y), "theta", exact=True)
def eight_schools(sigma, y):
    mu, tau = normal("mu", 5.0), positive_scale()
    with numpyro.plate("schools", y.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


@mixed((positive, y), "theta_decentered", exact=True, dropped=("theta",))
def eight_schools_not_centred(sigma, y):
    with reparam(config={"theta": LocScaleReparam(0)}):
        eight_schools(sigma, y)


@mixed((counts + 9, counts), "chance")
def batting_averages(at_bats, hits):
    a, b = numpyro.sample("a", dist.Gamma(2.0, 1.0)), numpyro.sample("b", dist.Gamma(2.0, 1.0))
    with numpyro.plate("players", hits.shape[0]):
        chance = numpyro.sample("chance", dist.Beta(a, b))
        numpyro.sample("hits", dist.Binomial(at_bats, probs=chance), obs=hits)


@mixed((answers,), "ability")
def abilities(answers):
    with numpyro.plate("items", answers.shape[1], dim=-1):
        difficulty = normal("difficulty")
    with numpyro.plate("persons", answers.shape[0], dim=-2):
        ability = normal("ability")
        with numpyro.plate("items", answers.shape[1], dim=-1):
            numpyro.sample("answers", dist.Bernoulli(logits=ability - difficulty), obs=answers)


@mixed((X, y), "weight")
def weights_of_rows(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        weight = numpyro.sample("weight", dist.Gamma(2.0, 2.0))
        numpyro.sample("y", dist.Normal(X @ b, weight**-0.5), obs=y)


@mixed((X, counts), "effect")
def overdispersed_counts(X, counts):
    b, tau = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1)), positive_scale()
    with numpyro.plate("rows", X.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(X @ b, tau))
        numpyro.sample("counts", dist.Poisson(jnp.exp(effect)), obs=counts)


@mixed((y, bits), "true")
def measurement_error(measured, outcome):
    b, mu, tau = normal("b"), normal("mu"), positive_scale()
    with numpyro.plate("rows", measured.shape[0]):
        true = numpyro.sample("true", dist.Normal(mu, tau))
        numpyro.sample("measured", dist.Normal(true, 0.5), obs=measured)
        numpyro.sample("outcome", dist.Bernoulli(logits=b * true), obs=outcome)


@mixed((answers, answers >= 0, X), "effects")
def visits_of_a_row(outcomes, seen, x):
    """The outcomes of a person's visits are the columns; intercept and slope vary together."""
    b = normal("b")
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("persons", outcomes.shape[0], dim=-2):
        effects = numpyro.sample("effects", dist.MultivariateNormal(0, scale_tril=scales[:, None] * root))
        with numpyro.plate("visits", outcomes.shape[1], dim=-1), mask(mask=seen):
            logits = b * x[:, :1] + effects[..., 0] + effects[..., 1] * jnp.linspace(-1, 1, outcomes.shape[1])
            numpyro.sample("outcomes", dist.Bernoulli(logits=logits), obs=outcomes)


def topics_summed(words):
    topics = numpyro.sample("topics", dist.Dirichlet(jnp.ones(4)).expand([2]).to_event(1))
    with numpyro.plate("documents", words.shape[0]):
        theta = numpyro.sample("theta", dist.Dirichlet(jnp.ones(2)))
        numpyro.factor("words", jnp.log((theta @ topics)[jnp.arange(len(words))[:, None], words]).sum(-1))


@mixed((_rng.integers(0, 4, (N, 5)),), "theta", reference=topics_summed)
def topics_of_documents(words):
    topics = numpyro.sample("topics", dist.Dirichlet(jnp.ones(4)).expand([2]).to_event(1))
    with numpyro.plate("documents", words.shape[0], dim=-2):
        theta = numpyro.sample("theta", dist.Dirichlet(jnp.ones(2)))
        with numpyro.plate("places", words.shape[1], dim=-1):
            topic = numpyro.sample("topic", dist.Categorical(theta))
            numpyro.sample("words", dist.Categorical(topics[topic]), obs=words)


def sometimes_summed(y):
    mu, share = normal("mu"), numpyro.sample("share", dist.Beta(2.0, 2.0))
    with numpyro.plate("rows", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mu, 1))
        parts = [
            jnp.log(share) + dist.Normal(effect, 0.5).log_prob(y),
            jnp.log1p(-share) + dist.Normal(0, 0.5).log_prob(y),
        ]
        numpyro.factor("y", jax.nn.logsumexp(jnp.stack(parts), 0))


@mixed((y,), "effect", reference=sometimes_summed)
def effect_of_some(y):
    """A discrete latent beside the continuous one."""
    mu, share = normal("mu"), numpyro.sample("share", dist.Beta(2.0, 2.0))
    with numpyro.plate("rows", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(mu, 1))
        has = numpyro.sample("has", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(effect * has, 0.5), obs=y)


def always_latent(x, seen, y):
    b, mu, tau = normal("b"), normal("mu"), positive_scale()
    with numpyro.plate("rows", y.shape[0]):
        latent = numpyro.sample("x_unobserved", dist.Normal(mu, tau))
        with mask(mask=seen):
            numpyro.sample("x_observed", dist.Normal(mu, tau), obs=x)
        numpyro.sample("y", dist.Normal(b * jnp.where(seen, x, latent), 1.0), obs=y)


@mixed((X[:, 0], np.arange(N) % 3 > 0, y), "x_unobserved", reference=always_latent, dropped=("x",))
def missing_covariate(x, seen, y):
    """NumPyro gives a row a latent beside its observed value, too, which nothing depends on."""
    b, mu, tau = normal("b"), normal("mu"), positive_scale()
    with numpyro.plate("rows", y.shape[0]):
        x = numpyro.sample("x", dist.Normal(mu, tau), obs=x, obs_mask=seen)
        numpyro.sample("y", dist.Normal(b * x, 1.0), obs=y)


# -- A latent for each person, who has several rows --------------------------------------------------------------------


@mixed((person, X, bits, PERSONS), "u", unit="person")
def random_intercept(person, X, y, num_persons):
    b, tau = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1)), positive_scale()
    with numpyro.plate("persons", num_persons):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b + u[person]), obs=y)


@mixed((person, X, counts, group, PERSONS), "u_decentered", unit="person", dropped=("u",))
def random_intercept_beside_groups(person, X, counts, group, num_persons):
    """Effects of groups are parameters."""
    mu, spread, tau = normal("mu"), positive_scale("spread"), positive_scale()
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal(mu, spread))
    with numpyro.plate("persons", num_persons), reparam(config={"u": LocScaleReparam(0)}):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("counts", dist.Poisson(jnp.exp(effect[group] + u[person])), obs=counts)


@mixed((person, X, y, PERSONS), "u", unit="person", exact=True)
def random_slope(person, X, y, num_persons):
    b, sigma = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1)), positive_scale("sigma")
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("persons", num_persons):
        u = numpyro.sample("u", dist.MultivariateNormal(b, scale_tril=scales[:, None] * root))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.sum(X * u[person], -1), sigma), obs=y)


@mixed((person, X, bits, PERSONS), "intercept", "slope", unit="person")
def two_latents(person, X, y, num_persons):
    mu, tau = normal("mu"), positive_scale()
    with numpyro.plate("persons", num_persons):
        intercept = numpyro.sample("intercept", dist.Normal(mu, tau))
        slope = numpyro.sample("slope", dist.Normal(0.0, 0.5 * tau))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept[person] + slope[person] * X[:, 0]), obs=y)


@mixed((person, positive, bits, PERSONS), "frailty", unit="person")
def frailty(person, time, event, num_persons):
    rate, shape = numpyro.sample("rate", dist.Gamma(2.0, 2.0)), numpyro.sample("shape", dist.Gamma(3.0, 1.0))
    with numpyro.plate("persons", num_persons):
        frailty = numpyro.sample("frailty", dist.Gamma(shape, shape))
    with numpyro.plate("rows", time.shape[0]):
        hazard = rate * frailty[person]
        numpyro.factor("survival", event * jnp.log(hazard) - hazard * time)


@mixed((person, bits, PERSONS), "chance", unit="person")
def chances(person, y, num_persons):
    a, b = numpyro.sample("a", dist.Gamma(2.0, 1.0)), numpyro.sample("b", dist.Gamma(2.0, 1.0))
    with numpyro.plate("persons", num_persons):
        chance = numpyro.sample("chance", dist.Beta(a, b))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(probs=chance[person]), obs=y)


# -- The same by NumPyro and a grid ------------------------------------------------------------------------------------


def log_density_by_grid(case: Mixed, k: int) -> Callable:
    """From unconstrained parameters to log p(rows of unit k | z), by NumPyro's densities of the model at these rows."""
    args = case.of_unit(k)
    model = case.reference or case.model
    sites = trace(seed(model, 0)).get_trace(*args)
    laws = {name: biject_to(sites[name]["fn"].support) for name in case.latents}
    zeros, unravel = ravel_pytree({name: laws[name].inv(sites[name]["value"]) for name in case.latents})
    side = np.linspace(*{1: (-14, 14, 2001), 2: (-9, 9, 121)}[zeros.size])
    grid = np.stack([part.ravel() for part in np.meshgrid(*[side] * zeros.size, indexing="ij")], 1)

    def joint(z: dict, w: dict) -> jax.Array:
        values = constrain_fn(model, args, {}, {**z, **w})
        found = compute_log_probs(model, args, {}, values)[0]
        volume = sum(jnp.sum(laws[name].log_abs_det_jacobian(w[name], values[name])) for name in case.latents)
        return sum(value for name, value in found.items() if name not in z) + volume

    def log_density(z: dict) -> jax.Array:
        values = jax.lax.map(lambda w: joint(z, unravel(w)), jnp.asarray(grid), batch_size=2048)
        return jax.nn.logsumexp(values) + zeros.size * np.log(side[1] - side[0])

    return log_density
