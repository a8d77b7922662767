"""Models written by somebody who was told nothing of how the default works; for judging only.

The format and the kinds are those of `zoo.py`. Whoever changes a constant, a threshold or an algorithm leaves this file
alone, and nothing in the package was chosen by looking at it.
"""

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import log_ndtr, ndtr
from numpyro.infer.reparam import LocScaleReparam, TransformReparam
from scipy.special import expit
from zoo import Problem, normals, rows

FRESH: dict[str, Problem] = {}


def problem(n: int, kind: str = "everyday") -> Callable:
    def register(draw: Callable) -> Callable:
        FRESH[draw.__name__] = Problem(draw.__name__, "fresh", kind, n, draw)
        return draw

    return register


def yes(rng: np.random.Generator, share, n: int) -> np.ndarray:
    return (rng.random(n) < share) * 1.0


def told_ages(rng: np.random.Generator, n: int, low: int, high: int, rounders: float = 0.25) -> np.ndarray:
    """Whole years; some people round theirs to a multiple of five."""
    age = np.floor(low + (high + 1 - low) * rng.beta(1.6, 2.0, n))
    return np.where(rng.random(n) < rounders, np.clip(5 * np.round(age / 5), low, high), age)


class InverseGaussian(dist.Distribution):
    """Of given mean and shape; the variance is mean³ / shape."""

    arg_constraints: ClassVar = {"mean_": dist.constraints.positive, "shape_": dist.constraints.positive}
    support = dist.constraints.positive

    def __init__(self, mean, shape, *, validate_args=None):
        batch_shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(shape))
        self.mean_, self.shape_ = jnp.broadcast_to(mean, batch_shape), jnp.broadcast_to(shape, batch_shape)
        super().__init__(batch_shape, validate_args=validate_args)

    def log_prob(self, value):
        quadratic = self.shape_ * (value - self.mean_) ** 2 / (2 * self.mean_**2 * value)
        return 0.5 * jnp.log(self.shape_ / (2 * jnp.pi)) - 1.5 * jnp.log(value) - quadratic

    def sample(self, key, sample_shape=()):
        one, two = jax.random.split(key)
        shape = sample_shape + self.batch_shape
        w = self.mean_ * jax.random.normal(one, shape) ** 2 / (2 * self.shape_)
        x = self.mean_ * (1 + w - jnp.sqrt(2 * w + w**2))
        return jnp.where(jax.random.uniform(two, shape) <= self.mean_ / (self.mean_ + x), x, self.mean_**2 / x)


# == Everyday ==========================================================================================================


@problem(8_000)
def dollars_given_to_charity(rng, n):
    """Tobit: who gives nothing is censored at zero. The prior of the intercept is a hundred times too wide."""

    def model(x, dollars):
        a = numpyro.sample("a", dist.Normal(0, 100_000))
        per_year = numpyro.sample("per_year", dist.Normal(0, 50))
        per_thousand = numpyro.sample("per_thousand", dist.Normal(0, 50))
        b_married = numpyro.sample("b_married", dist.Normal(0, 1000))
        b_church = numpyro.sample("b_church", dist.Normal(0, 1000))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(1000))
        with rows(dollars.shape[0]):
            mean = a + per_year * (x["age"] - 50) + per_thousand * (x["income"] - 50_000) / 1000
            law = dist.Normal(mean + b_married * x["married"] + b_church * x["church"], sigma)
            numpyro.sample("dollars", dist.LeftCensoredDistribution(law, censored=dollars <= 0), obs=dollars)

    age = told_ages(rng, n, 20, 89)
    married, church = yes(rng, 0.2 + 0.005 * age, n), yes(rng, 0.24, n)
    income = 100 * np.round(np.exp(10.5 + 0.35 * married + 0.6 * rng.standard_normal(n)) / 100)
    mean = 60 + 9 * (age - 50) + 7 * (income - 50_000) / 1000 + 180 * married + 750 * church
    x = {"age": age, "income": income, "married": married, "church": church}
    dollars = np.maximum(np.round(mean + 900 * rng.standard_normal(n)), 0.0)
    return model, {"x": {k: v.astype(np.float32) for k, v in x.items()}, "dollars": dollars}


@problem(9_000)
def lives_of_pensioners(rng, n):
    """A Gompertz hazard from the age at which somebody came under observation to death or the end of the study."""

    def model(entry, exit_, died, male, smoker, manual):
        level = numpyro.sample("level", dist.Normal(-5, 3))
        per_year = numpyro.sample("per_year", dist.LogNormal(-2.3, 0.5))
        b_male = numpyro.sample("b_male", dist.Normal(0, 1))
        b_smoker = numpyro.sample("b_smoker", dist.Normal(0, 1))
        b_manual = numpyro.sample("b_manual", dist.Normal(0, 1))
        numpyro.deterministic("years_to_double", jnp.log(2) / per_year)
        with rows(died.shape[0]):
            eta = level + b_male * male + b_smoker * smoker + b_manual * manual
            grown = jnp.exp(per_year * (exit_ - 75)) - jnp.exp(per_year * (entry - 75))
            log_lik = died * (eta + per_year * (exit_ - 75)) - jnp.exp(eta) * grown / per_year
            numpyro.factor("lives", log_lik)

    male, smoker = yes(rng, 0.46, n), yes(rng, 0.17, n)
    manual = yes(rng, 0.25 + 0.15 * male, n)
    entry = np.round(60 + 22 * rng.beta(1.1, 2.2, n), 2)
    eta = -3.6 + 0.4 * male + 0.65 * smoker + 0.2 * manual
    death = 75 + np.log(np.exp(0.1 * (entry - 75)) + 0.1 * rng.exponential(size=n) / np.exp(eta)) / 0.1
    end = entry + np.round(rng.uniform(3, 16, n), 2)
    exit_ = np.maximum(np.minimum(death, end), entry + 0.01)
    kwargs = {"male": male, "smoker": smoker, "manual": manual}
    return model, {"entry": entry, "exit_": exit_, "died": (death < end) * 1.0} | kwargs


@problem(5_000)
def days_to_settle(rng, n):
    """Insurance claims; inverse Gaussian with a logarithmic link and three kinds of claim."""

    def model(kind, log_claim, lawyer, days):
        a = numpyro.sample("a", dist.Normal(4, 2))
        with numpyro.plate("other_kinds", 2):
            b_kind = numpyro.sample("b_kind", dist.Normal(0, 1))
        b_claim = numpyro.sample("b_claim", dist.Normal(0, 1))
        b_lawyer = numpyro.sample("b_lawyer", dist.Normal(0, 1))
        b_lawyer_claim = numpyro.sample("b_lawyer_claim", dist.Normal(0, 1))
        shape = numpyro.sample("shape", dist.LogNormal(4, 2))
        by_kind = jnp.concatenate([jnp.zeros(1), b_kind])
        with rows(days.shape[0]):
            size = log_claim - 8
            log_mean = a + by_kind[kind] + b_claim * size + lawyer * (b_lawyer + b_lawyer_claim * size)
            numpyro.sample("days", InverseGaussian(jnp.exp(log_mean), shape), obs=days)

    kind, log_claim = rng.choice(3, n, p=[0.68, 0.26, 0.06]), 7.6 + 1.1 * rng.standard_normal(n)
    lawyer = yes(rng, expit(-2 + 0.7 * (log_claim - 8)), n)
    log_mean = 3.7 + np.array([0.0, 0.25, 0.9])[kind] + 0.2 * (log_claim - 8) + lawyer * (0.4 + 0.1 * (log_claim - 8))
    days = np.maximum(np.round(rng.wald(np.exp(log_mean), 85.0), 1), 0.1)
    return model, {"kind": kind, "log_claim": log_claim, "lawyer": lawyer, "days": days}


@problem(12_000)
def visits_to_a_doctor(rng, n):
    """Zero-inflated negative binomial with months of insurance as exposure, and two priors a hundred times too wide."""

    def model(age, chronic, private, months, visits):
        a = numpyro.sample("a", dist.Normal(0, 100))
        with numpyro.plate("covariates", 4):
            b = numpyro.sample("b", dist.Normal(0, 1))
        never = numpyro.sample("never", dist.Beta(1, 1))
        phi = numpyro.sample("phi", dist.HalfCauchy(100))
        with rows(visits.shape[0]):
            decades = (age - 45) / 10
            log_rate = a + b[0] * decades + b[1] * chronic + b[2] * private + b[3] * decades * chronic
            mean = jnp.exp(log_rate + jnp.log(months / 12))
            numpyro.sample("visits", dist.ZeroInflatedNegativeBinomial2(mean, phi, gate=never), obs=visits)

    age = told_ages(rng, n, 18, 90)
    chronic, private = np.minimum(rng.poisson(0.15 + 0.012 * (age - 18)), 4) * 1.0, yes(rng, 0.1, n)
    months = np.where(rng.random(n) < 0.8, 12.0, rng.integers(1, 12, n) * 1.0)
    decades = (age - 45) / 10
    log_rate = 1.05 + 0.06 * decades + 0.35 * chronic - 0.2 * private - 0.03 * decades * chronic
    visits = rng.poisson(months / 12 * np.exp(log_rate) * rng.gamma(1.8, 1 / 1.8, n)) * (rng.random(n) > 0.17)
    return model, {"age": age, "chronic": chronic, "private": private, "months": months, "visits": visits * 1.0}


@problem(10_000)
def millimetres_of_rain(rng, n):
    """Dry or wet and how much, by season, by the day before and by hundreds of metres above the sea."""

    def model(day, wet_before, metres, mm):
        dry = numpyro.sample("dry", dist.Normal(jnp.zeros(4), jnp.array([2.0, 1.0, 1.0, 2.0])).to_event(1))
        wet = numpyro.sample("wet", dist.Normal(0, 2).expand([5]).to_event(1))
        shape = numpyro.sample("shape", dist.Gamma(2, 2))
        with rows(mm.shape[0]):
            s, c = jnp.sin(2 * jnp.pi * day / 365.25), jnp.cos(2 * jnp.pi * day / 365.25)
            gate = jax.nn.sigmoid(dry[0] + dry[1] * s + dry[2] * c + dry[3] * wet_before)
            mean = jnp.exp(wet[0] + wet[1] * s + wet[2] * c + wet[3] * wet_before + wet[4] * (metres - 400) / 100)
            numpyro.sample("mm", dist.HurdleGamma(gate, shape, shape / mean), obs=mm)

    day, wet_before = rng.integers(1, 366, n) * 1.0, yes(rng, 0.42, n)
    metres = rng.choice([35.0, 120.0, 310.0, 480.0, 760.0, 1240.0], n, p=[0.3, 0.2, 0.2, 0.15, 0.1, 0.05])
    s, c = np.sin(2 * np.pi * day / 365.25), np.cos(2 * np.pi * day / 365.25)
    dry = rng.random(n) < expit(0.9 + 0.1 * s - 0.25 * c - 1.3 * wet_before)
    mean = np.exp(1.4 - 0.1 * s - 0.2 * c + 0.3 * wet_before + 0.05 * (metres - 400) / 100)
    amount = np.maximum(np.round(rng.gamma(0.8, mean / 0.8), 1), 0.1)
    return model, {"day": day, "wet_before": wet_before, "metres": metres, "mm": np.where(dry, 0.0, amount)}


@problem(7_000)
def share_of_income_on_rent(rng, n):
    """Beta regression whose precision depends on income; six towns, centred in part."""

    def model(town, log_income, children, share, towns=6):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        tau = numpyro.sample("tau", dist.HalfNormal(0.5))
        with numpyro.plate("towns", towns), numpyro.handlers.reparam(config={"level": LocScaleReparam(0.7)}):
            level = numpyro.sample("level", dist.Normal(mu, tau))
        b_income = numpyro.sample("b_income", dist.Normal(0, 1))
        b_children = numpyro.sample("b_children", dist.Normal(0, 0.5))
        precision = numpyro.sample("precision", dist.Normal(jnp.array([2.0, 0.0]), 1.0).to_event(1))
        with rows(share.shape[0]):
            mean = jax.nn.sigmoid(level[town] + b_income * log_income + b_children * children)
            law = dist.BetaProportion(mean, jnp.exp(precision[0] + precision[1] * log_income))
            numpyro.sample("share", law, obs=share)

    town, children = rng.choice(6, n, p=[0.3, 0.24, 0.18, 0.13, 0.1, 0.05]), np.minimum(rng.poisson(0.7, n), 5) * 1.0
    log_income = rng.normal(0, 0.5, n) + 0.06 * children
    level = np.array([-0.75, -1.05, -0.6, -1.2, -0.95, -0.5])
    mean, precision = expit(level[town] - 0.5 * log_income + 0.05 * children), np.exp(2.7 + 0.3 * log_income)
    share = np.clip(np.round(rng.beta(mean * precision, (1 - mean) * precision), 3), 0.005, 0.995)
    return model, {"town": town, "log_income": log_income, "children": children, "share": share}


@problem(4_000)
def litters_with_defects(rng, n):
    """Pups with a defect of those in a litter; pups of one mother are alike."""

    def model(ppm, strain, pups, affected):
        a = numpyro.sample("a", dist.Normal(-2, 2))
        per_100_ppm = numpyro.sample("per_100_ppm", dist.Normal(0, 1))
        b_strain = numpyro.sample("b_strain", dist.Normal(0, 1))
        interaction = numpyro.sample("interaction", dist.Normal(0, 1))
        alike = numpyro.sample("alike", dist.Beta(1, 9))
        with rows(affected.shape[0]):
            dose = ppm / 100
            p = jax.nn.sigmoid(a + per_100_ppm * dose + strain * (b_strain + interaction * dose))
            m = (1 - alike) / alike
            numpyro.sample("affected", dist.BetaBinomial(p * m, (1 - p) * m, total_count=pups), obs=affected)

    ppm, strain = rng.choice([0.0, 50.0, 100.0, 250.0], n, p=[0.4, 0.2, 0.2, 0.2]), yes(rng, 0.35, n)
    pups = np.clip(rng.binomial(17, 0.68, n) - rng.poisson(0.4 * ppm / 100), 1, None)
    p = expit(-2.6 + 0.55 * ppm / 100 + strain * (0.3 + 0.2 * ppm / 100))
    affected = rng.binomial(pups, rng.beta(p * 6, (1 - p) * 6))
    return model, {"ppm": ppm, "strain": strain, "pups": pups, "affected": affected}


@problem(9_000)
def own_health(rng, n):
    """Ordinal probit of five answers, with the weights of a survey; some round their age."""

    def model(age, obese, smoker, rural, widowed, weight, answer):
        prior = dist.TransformedDistribution(dist.Normal(0, 1.5).expand([4]), dist.transforms.OrderedTransform())
        cuts = numpyro.sample("cuts", prior)
        b = normals("b", 1.0, 6)
        with rows(answer.shape[0]), numpyro.handlers.scale(scale=weight):
            decades = (age - 50) / 10
            eta = b[0] * decades + b[1] * obese + b[2] * smoker + b[3] * rural + b[4] * widowed
            eta = eta + b[5] * decades * smoker
            below = ndtr(cuts - eta[:, None])
            edge = jnp.ones((eta.shape[0], 1))
            p = jnp.diff(jnp.concatenate([0 * edge, below, edge], 1), axis=1)
            numpyro.sample("answer", dist.Categorical(probs=jnp.clip(p, 1e-7)), obs=answer)

    age, obese, smoker, rural = told_ages(rng, n, 18, 95, 0.35), yes(rng, 0.26, n), yes(rng, 0.2, n), yes(rng, 0.3, n)
    widowed, decades = yes(rng, 0.22 * expit((age - 75) / 6), n), (age - 50) / 10
    eta = 0.16 * decades + 0.35 * obese + 0.25 * smoker + 0.08 * rural + 0.15 * widowed + 0.05 * decades * smoker
    answer = np.searchsorted([-1.0, 0.1, 1.1, 2.0], eta + rng.standard_normal(n))
    weight = rng.gamma(4, 1, n) * np.where(rural == 1, 1.4, 0.9)
    kwargs = {"age": age, "obese": obese, "smoker": smoker, "rural": rural, "widowed": widowed}
    return model, kwargs | {"weight": weight / weight.mean(), "answer": answer}


@problem(4_000)
def prey_in_stomachs(rng, n):
    """Shrimps, worms, mussels and fish in the stomach of a cod; shrimps are the class of reference."""

    def model(X, prey):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1], prey.shape[1] - 1]).to_event(2))
        precision = numpyro.sample("precision", dist.LogNormal(1, 1))
        with rows(prey.shape[0]):
            logits = jnp.concatenate([jnp.zeros((X.shape[0], 1)), X @ b], 1)
            concentration = precision * jax.nn.softmax(logits, -1)
            numpyro.sample("prey", dist.DirichletMultinomial(concentration, prey.sum(-1)), obs=prey)

    cm, summer = np.round(25 + rng.gamma(3, 7, n)), yes(rng, 0.6, n)
    X = np.stack([np.ones(n), (cm - 45) / 10, summer], 1)
    logits = np.concatenate(
        [np.zeros((n, 1)), X @ np.array([[-0.4, -1.0, -0.8], [-0.1, 0.1, 0.5], [0.3, 0.5, -0.2]])], 1
    )
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    gamma = rng.gamma(5 * shares) + 1e-12
    prey = rng.multinomial(1 + rng.negative_binomial(2, 0.15, n), gamma / gamma.sum(1, keepdims=True))
    return model, {"X": X, "prey": prey}


@problem(8_000)
def train_delays(rng, n):
    """Minutes late, some early; both tails are exponential and unequal."""

    def model(kilometres, rush, snow, delay):
        base = numpyro.sample("base", dist.Normal(0, 10))
        per_100_km = numpyro.sample("per_100_km", dist.Normal(0, 5))
        b_rush = numpyro.sample("b_rush", dist.Normal(0, 5))
        b_snow = numpyro.sample("b_snow", dist.Normal(0, 10))
        scale = numpyro.sample("scale", dist.HalfNormal(10))
        asymmetry = numpyro.sample("asymmetry", dist.LogNormal(0, 0.7))
        with rows(delay.shape[0]):
            loc = base + per_100_km * kilometres / 100 + b_rush * rush + b_snow * snow
            numpyro.sample("delay", dist.AsymmetricLaplace(loc, scale, asymmetry), obs=delay)

    kilometres, rush, snow = np.round(8 + rng.gamma(1.4, 90, n), 1), yes(rng, 0.34, n), yes(rng, 0.05, n)
    loc = -0.6 + 0.9 * kilometres / 100 + 1.2 * rush + 5.5 * snow
    delay = loc - 1.1 * rng.exponential(size=n) + 4.4 * rng.exponential(size=n)
    return model, {"kilometres": kilometres, "rush": rush, "snow": snow, "delay": delay}


@problem(5_000)
def tracks_of_cranes(rng, n):
    """Direction over the ground, which is the bird's own flight and the wind in metres a second added up."""

    def model(wind, young, direction):
        speed = numpyro.sample("speed", dist.LogNormal(2.5, 0.5))
        heading = numpyro.sample("heading", dist.Normal(0, 1))
        b_young = numpyro.sample("b_young", dist.Normal(0, 0.5))
        kappa = numpyro.sample("kappa", dist.Exponential(0.1))
        with rows(direction.shape[0]):
            own = heading + b_young * young
            loc = jnp.arctan2(speed * jnp.sin(own) + wind[:, 0], speed * jnp.cos(own) + wind[:, 1])
            numpyro.sample("direction", dist.VonMises(loc, kappa), obs=direction)

    wind = np.round(rng.multivariate_normal([1.5, -0.5], [[16.0, 4.0], [4.0, 12.0]], n), 1)
    young = yes(rng, 0.22, n)
    own = 0.55 + 0.12 * young
    loc = np.arctan2(14 * np.sin(own) + wind[:, 0], 14 * np.cos(own) + wind[:, 1])
    direction = (loc + rng.vonmises(0, 8.0, n) + np.pi) % (2 * np.pi) - np.pi
    return model, {"wind": wind, "young": young, "direction": direction}


@problem(6_000)
def incomes_of_couples(rng, n):
    """Logarithms of his and her income: a bivariate t with unknown degrees of freedom."""

    def model(X, log_incomes):
        a = numpyro.sample("a", dist.Normal(10, 3).expand([2]).to_event(1))
        with numpyro.plate("covariates", X.shape[1]):
            b = numpyro.sample("b", dist.Normal(0, 0.5).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfCauchy(1).expand([2]).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(2, 2.0))
        df = numpyro.sample("df", dist.Gamma(2, 0.1))
        numpyro.deterministic("correlation", corr[1, 0])
        with rows(X.shape[0]):
            law = dist.MultivariateStudentT(df, a + X @ b, scale[:, None] * corr)
            numpyro.sample("log_incomes", law, obs=log_incomes)

    both = rng.multivariate_normal([12.7, 12.9], [[7.0, 4.2], [4.2, 6.5]], n)
    schooling, children = np.clip(np.round(both), 6, 20) - 12, np.minimum(rng.poisson(1.1, n), 6)
    X = np.column_stack([schooling, children])
    noise = (
        rng.multivariate_normal([0, 0], [[0.2, 0.06], [0.06, 0.36]], n) * np.sqrt(4.5 / rng.chisquare(4.5, n))[:, None]
    )
    b = np.array([[0.08, 0.02], [0.01, 0.1], [0.02, -0.15]])
    return model, {"X": X, "log_incomes": np.array([10.3, 9.7]) + X @ b + noise}


@problem(6_000)
def protein_and_return(rng, n):
    """Logarithm of C-reactive protein, not measured in some, and whether the patient came back within 30 days."""

    def model(age, surgery, diabetes, measured, log_crp, came_back):
        b = numpyro.sample("b", dist.Normal(0, 2).expand([4]).to_event(1))
        c = numpyro.sample("c", dist.Normal(0, 1).expand([4]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        rho = numpyro.sample("rho", dist.Uniform(-1, 1))
        with rows(age.shape[0]):
            decades = (age - 65) / 10
            mean = b[0] + b[1] * decades + b[2] * surgery + b[3] * diabetes
            with numpyro.handlers.mask(mask=measured == 1):
                numpyro.sample("log_crp", dist.Normal(mean, sigma), obs=log_crp)
            eta = c[0] + c[1] * decades + c[2] * surgery + c[3] * diabetes
            known = (eta + rho * (log_crp - mean) / sigma) / jnp.sqrt(1 - rho**2)
            p = ndtr(jnp.where(measured == 1, known, eta))
            numpyro.sample("came_back", dist.Bernoulli(probs=jnp.clip(p, 1e-6, 1 - 1e-6)), obs=came_back)

    age, surgery = told_ages(rng, n, 30, 97, 0.0), yes(rng, 0.37, n)
    diabetes, decades = yes(rng, expit(-1.9 + 0.02 * (age - 65)), n), (age - 65) / 10
    noise = rng.multivariate_normal([0, 0], [[1, 0.35], [0.35, 1]], n)
    log_crp = 2.2 + 0.12 * decades + 0.9 * surgery + 0.2 * diabetes + 1.1 * noise[:, 0]
    came_back = (-1.1 + 0.1 * decades - 0.2 * surgery + 0.3 * diabetes + noise[:, 1] > 0).astype(int)
    measured = (rng.random(n) < expit(1.6 - 0.2 * decades + 0.8 * surgery)).astype(int)
    kwargs = {"age": age, "surgery": surgery, "diabetes": diabetes, "measured": measured}
    return model, kwargs | {"log_crp": np.where(measured == 1, log_crp, 0.0), "came_back": came_back}


@problem(4_000)
def pressure_at_five_visits(rng, n):
    """mmHg read to even numbers, a row a patient; what is left over from a visit carries on to the next."""

    def model(age, drug, mmhg):
        a = numpyro.sample("a", dist.Normal(140, 20))
        per_year = numpyro.sample("per_year", dist.Normal(0, 2))
        drift = numpyro.sample("drift", dist.Normal(0, 5))
        effect = numpyro.sample("effect", dist.Normal(0, 10))
        rho = numpyro.sample("rho", dist.Beta(2, 2))
        sigma = numpyro.sample("sigma", dist.HalfNormal(20))
        with rows(mmhg.shape[0]):
            visit = jnp.arange(5.0)
            person = a + per_year * (age - 60)
            mean = person[:, None] + drift * visit + effect * drug[:, None] * (visit > 0)
            carried = rho * (mmhg - mean)[:, :-1]
            loc = mean + jnp.concatenate([jnp.zeros((mean.shape[0], 1)), carried], 1)
            scale = sigma * jnp.array([1.0, 0.0, 0.0, 0.0, 0.0]) / jnp.sqrt(1 - rho**2) + sigma * (visit > 0)
            numpyro.sample("mmhg", dist.Normal(loc, scale).to_event(1), obs=mmhg)

    age, drug, visit = told_ages(rng, n, 35, 85, 0.0), yes(rng, 0.5, n), np.arange(5)
    e = np.empty((n, 5))
    e[:, 0] = 10 / np.sqrt(1 - 0.65**2) * rng.standard_normal(n)
    for t in range(1, 5):
        e[:, t] = 0.65 * e[:, t - 1] + 10 * rng.standard_normal(n)
    mean = (152 + 0.35 * (age - 60))[:, None] - 0.8 * visit - 9 * drug[:, None] * (visit > 0)
    return model, {"age": age, "drug": drug, "mmhg": 2 * np.round((mean + e) / 2)}


@problem(5_000)
def heights_of_sunflowers(rng, n):
    """Logistic growth in centimetres by days since sowing; taller plants differ more."""

    def model(day, watered, cm):
        top = numpyro.sample("top", dist.TruncatedNormal(150, 80, low=0.0))
        b_watered = numpyro.sample("b_watered", dist.Normal(0, 0.5))
        middle = numpyro.sample("middle", dist.Uniform(10, 100))
        pace = numpyro.sample("pace", dist.LogNormal(2, 0.5))
        noise = numpyro.sample("noise", dist.HalfNormal(jnp.array([5.0, 0.3])).to_event(1))
        with rows(cm.shape[0]):
            mean = top * jnp.exp(b_watered * watered) * jax.nn.sigmoid((day - middle) / pace)
            numpyro.sample("cm", dist.Normal(mean, noise[0] + noise[1] * mean), obs=cm)

    day, watered = rng.choice([7.0, 14.0, 21.0, 28.0, 35.0, 42.0, 49.0, 56.0, 70.0, 84.0], n), yes(rng, 0.5, n)
    mean = 185 * np.exp(0.13 * watered) * expit((day - 37) / 8.5)
    return model, {
        "day": day,
        "watered": watered,
        "cm": np.round(mean + (1.5 + 0.09 * mean) * rng.standard_normal(n), 1),
    }


@problem(12_000)
def accidents_by_age(rng, n):
    """Per thousand kilometres driven; nine bands of age follow a random walk from the first one."""

    def model(band, male, night, thousand_km, accidents):
        a = numpyro.sample("a", dist.Normal(0, 100))
        tau = numpyro.sample("tau", dist.Exponential(1))
        walk = numpyro.sample("walk", dist.GaussianRandomWalk(tau, num_steps=8))
        b_male = numpyro.sample("b_male", dist.Normal(0, 1))
        b_night = numpyro.sample("b_night", dist.Normal(0, 1))
        by_band = jnp.concatenate([jnp.zeros(1), walk])
        with rows(accidents.shape[0]):
            rate = jnp.exp(a + by_band[band] + b_male * male + b_night * night)
            numpyro.sample("accidents", dist.Poisson(thousand_km * rate), obs=accidents)

    band = rng.choice(9, n, p=[0.08, 0.12, 0.14, 0.15, 0.14, 0.13, 0.11, 0.08, 0.05])
    male, night = yes(rng, 0.52, n), yes(rng, 0.1, n)
    thousand_km = np.round(np.exp(2.3 + 0.2 * male + 0.6 * rng.standard_normal(n)), 1)
    walk = np.array([0.0, -0.5, -0.85, -1.0, -1.05, -1.1, -1.0, -0.75, -0.35])
    accidents = rng.poisson(thousand_km * np.exp(-2.6 + walk[band] + 0.2 * male + 0.4 * night))
    kwargs = {"band": band, "male": male, "night": night, "thousand_km": thousand_km}
    return model, kwargs | {"accidents": accidents * 1.0}


@problem(11_000)
def incomes_in_brackets(rng, n):
    """A survey asked only for one of seven brackets in dollars; a parabola in years of age."""

    log_edges = np.log([15_000.0, 25_000, 40_000, 60_000, 90_000, 140_000])

    def model(age, degree, rural, bracket):
        a = numpyro.sample("a", dist.Normal(10, 5))
        linear = numpyro.sample("linear", dist.Normal(0, 0.5))
        square = numpyro.sample("square", dist.Normal(0, 0.5))
        b_degree = numpyro.sample("b_degree", dist.Normal(0, 1))
        b_rural = numpyro.sample("b_rural", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.Exponential(1))
        with rows(bracket.shape[0]):
            mean = a + linear * (age - 45) / 10 + square * ((age - 45) / 10) ** 2 + b_degree * degree + b_rural * rural
            z = (jnp.asarray(log_edges) - mean[:, None]) / sigma
            mirrored = z[:, :-1] > 0
            near = log_ndtr(jnp.where(mirrored, -z[:, :-1], z[:, 1:]))
            far = log_ndtr(jnp.where(mirrored, -z[:, 1:], z[:, :-1]))
            between = near + jnp.log(-jnp.expm1(far - near))
            logits = jnp.concatenate([log_ndtr(z[:, :1]), between, log_ndtr(-z[:, -1:])], 1)
            numpyro.sample("bracket", dist.Categorical(logits=logits), obs=bracket)

    age, rural = told_ages(rng, n, 20, 70, 0.2), yes(rng, 0.23, n)
    degree, decades = yes(rng, np.where(rural == 1, 0.2, 0.36), n), (age - 45) / 10
    log_income = 10.75 + 0.09 * decades - 0.08 * decades**2 + 0.45 * degree - 0.14 * rural
    bracket = np.searchsorted(log_edges, log_income + 0.6 * rng.standard_normal(n))
    return model, {"age": age, "degree": degree, "rural": rural, "bracket": bracket}


@problem(7_000)
def claims_above_the_deductible(rng, n):
    """Logarithm of dollars; nothing is known of claims below the deductible of the contract."""

    def model(car_age, sports_car, town, log_deductible, log_claim):
        a = numpyro.sample("a", dist.Normal(0, 2))
        per_year = numpyro.sample("per_year", dist.Normal(0, 0.2))
        b_sports = numpyro.sample("b_sports", dist.Normal(0, 1))
        b_town = numpyro.sample("b_town", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.InverseGamma(3, 2))
        with rows(log_claim.shape[0]):
            loc = jnp.log(1000.0) + a + per_year * car_age + b_sports * sports_car + b_town * town
            numpyro.sample("log_claim", dist.TruncatedNormal(loc, sigma, low=log_deductible), obs=log_claim)

    m = 3 * n
    car_age, sports_car, town = np.minimum(np.floor(rng.gamma(2, 3, m)), 20), yes(rng, 0.07, m), yes(rng, 0.6, m)
    log_deductible = np.log(rng.choice([250.0, 500.0, 1000.0], m, p=[0.4, 0.45, 0.15]))
    log_claim = np.log(1000) + 0.7 - 0.04 * car_age + 0.5 * sports_car - 0.15 * town + 0.9 * rng.standard_normal(m)
    kept = np.flatnonzero(log_claim > log_deductible + 0.001)[:n]
    kwargs = {"car_age": car_age, "sports_car": sports_car, "town": town, "log_deductible": log_deductible}
    return model, {k: v[kept] for k, v in (kwargs | {"log_claim": log_claim}).items()}


# == Small =============================================================================================================


@problem(2_000, "small")
def ticks_on_deer(rng, n):
    """Negative binomial by its logits."""

    def model(fawn, weeks, ticks):
        size = numpyro.sample("size", dist.HalfNormal(5))
        a = numpyro.sample("a", dist.Normal(0, 3))
        b_fawn = numpyro.sample("b_fawn", dist.Normal(0, 1))
        per_week = numpyro.sample("per_week", dist.Normal(0, 0.3))
        with rows(ticks.shape[0]):
            logits = a + b_fawn * fawn + per_week * (weeks - 10)
            numpyro.sample("ticks", dist.NegativeBinomialLogits(size, logits), obs=ticks)

    fawn, weeks = yes(rng, 0.28, n), rng.integers(1, 25, n) * 1.0
    mean = 1.4 * np.exp(1.3 - 0.5 * fawn + 0.04 * (weeks - 10))
    return model, {"fawn": fawn, "weeks": weeks, "ticks": rng.poisson(mean * rng.gamma(1.4, 1 / 1.4, n)) * 1.0}


@problem(2_400, "small")
def greatest_floods(rng, n):
    """Cubic metres a second, the greatest of a year at a gauge; the year is that of the calendar."""

    def model(year, square_km, flow):
        level = numpyro.sample("level", dist.Normal(3, 2))
        power = numpyro.sample("power", dist.Normal(0.7, 0.3))
        per_decade = numpyro.sample("per_decade", dist.Normal(0, 0.2))
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        with rows(flow.shape[0]):
            loc = jnp.exp(level + power * jnp.log(square_km / 100) + per_decade * (year - 1987) / 10)
            numpyro.sample("flow", dist.Gumbel(loc, spread * loc), obs=flow)

    year, square_km = (
        rng.integers(1950, 2024, n) * 1.0,
        np.round(np.exp(rng.normal(4.9, 1.1, 45)))[rng.integers(0, 45, n)],
    )
    loc = np.exp(2.9 + 0.76 * np.log(square_km / 100) + 0.025 * (year - 1987) / 10)
    return model, {"year": year, "square_km": square_km, "flow": loc * (1 + 0.34 * rng.gumbel(size=n))}


@problem(1_200, "small")
def blood_groups(rng, n):
    """O, A, B and AB from the shares of the three alleles."""

    def model(group):
        alleles = numpyro.sample("alleles", dist.Dirichlet(jnp.ones(3)))
        o, a, b = alleles[0], alleles[1], alleles[2]
        p = jnp.stack([o**2, a**2 + 2 * a * o, b**2 + 2 * b * o, 2 * a * b])
        with rows(group.shape[0]):
            numpyro.sample("group", dist.Categorical(probs=p), obs=group)

    genes = rng.choice(3, (n, 2), p=[0.65, 0.27, 0.08])
    has_a, has_b = (genes == 1).any(1), (genes == 2).any(1)
    return model, {"group": has_a + 2 * has_b}


@problem(700, "small")
def hectares_burnt(rng, n):
    """Fires of at least ten hectares follow a power law."""

    def model(hectares):
        steepness = numpyro.sample("steepness", dist.LogNormal(0, 1))
        with rows(hectares.shape[0]):
            numpyro.sample("hectares", dist.LowerTruncatedPowerLaw(-1 - steepness, 10.0), obs=hectares)

    return model, {"hectares": np.maximum(np.round(10 * (1 - rng.random(n)) ** (-1 / 0.85), 1), 10.05)}


# == Large =============================================================================================================


@problem(24_000, "large")
def hours_until_repair(rng, n):
    """Weibull, stopped at the end of the warranty; eighteen types of machine, not centred."""

    def model(machine, load, outdoors, hours, stopped, machines=18):
        mu = numpyro.sample("mu", dist.Normal(7, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(0.3))
        with numpyro.plate("machines", machines), numpyro.handlers.reparam(config={"level": TransformReparam()}):
            shifted = dist.transforms.AffineTransform(mu, tau)
            level = numpyro.sample("level", dist.TransformedDistribution(dist.Normal(0, 1), shifted))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
        with rows(hours.shape[0]):
            log_scale = level[machine] + b[0] * load + b[1] * outdoors + b[2] * load * outdoors
            law = dist.Weibull(jnp.exp(log_scale), shape)
            numpyro.sample("hours", dist.RightCensoredDistribution(law, censored=stopped), obs=hours)

    machine, load = rng.choice(18, n, p=rng.dirichlet(6 * np.ones(18))), rng.beta(4, 2.5, n)
    outdoors = yes(rng, 0.09, n)
    log_scale = rng.normal(8.2, 0.12, 18)[machine] - 0.9 * load - 0.1 * outdoors - 0.4 * load * outdoors
    hours, end = np.exp(log_scale) * rng.weibull(1.4, n) + 0.1, rng.choice([2000.0, 4000.0], n, p=[0.6, 0.4])
    kwargs = {"machine": machine, "load": load, "outdoors": outdoors}
    return model, kwargs | {"hours": np.minimum(hours, end), "stopped": hours > end}


@problem(20_000, "large")
def milk_by_farm(rng, n):
    """Kilograms a day; ten farms with levels and slopes of their own, centred and correlated."""

    def model(farm, months, calving, jersey, kg, farms=10):
        mu = numpyro.sample("mu", dist.Normal(jnp.array([30.0, 0.0]), jnp.array([10.0, 2.0])).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(jnp.array([5.0, 1.0])).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("farms", farms):
            by_farm = numpyro.sample("by_farm", dist.MultivariateNormal(mu, scale_tril=spread[:, None] * corr))
        later = numpyro.sample("later", dist.Normal(0, 5).expand([2]).to_event(1))
        b_jersey = numpyro.sample("b_jersey", dist.Normal(0, 10))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(5))
        by_calving = jnp.concatenate([jnp.zeros(1), later])
        with rows(kg.shape[0]):
            own = by_farm[farm]
            mean = own[:, 0] + own[:, 1] * (months - 5) + by_calving[calving] + b_jersey * jersey
            numpyro.sample("kg", dist.Normal(mean, sigma), obs=kg)

    farm = rng.choice(10, n, p=[0.2, 0.16, 0.14, 0.12, 0.1, 0.09, 0.07, 0.05, 0.04, 0.03])
    months, calving, jersey = (
        np.round(10 * rng.beta(1.1, 1.3, n), 1),
        rng.choice(3, n, p=[0.36, 0.28, 0.36]),
        yes(rng, 0.08, n),
    )
    own = rng.multivariate_normal([27.0, -1.4], [[9.0, -0.45], [-0.45, 0.09]], 10)[farm]
    mean = own[:, 0] + own[:, 1] * (months - 5) + np.array([0.0, 3.1, 4.6])[calving] - 6.5 * jersey
    kg = np.round(mean + 4.8 * rng.standard_normal(n), 1)
    return model, {"farm": farm, "months": months, "calving": calving, "jersey": jersey, "kg": kg}


# == Wrong =============================================================================================================


@problem(8_000, "wrong")
def glucose_in_two_units(rng, n):
    """One laboratory sent one in twenty-five of the values in mmol/L, the others are in mg/dL."""

    def model(age, bmi, fasting, glucose):
        a = numpyro.sample("a", dist.Normal(4.5, 1))
        per_decade = numpyro.sample("per_decade", dist.Normal(0, 0.5))
        per_bmi = numpyro.sample("per_bmi", dist.Normal(0, 0.1))
        b_fasting = numpyro.sample("b_fasting", dist.Normal(0, 0.5))
        shape = numpyro.sample("shape", dist.HalfCauchy(20))
        with rows(glucose.shape[0]):
            mean = jnp.exp(a + per_decade * (age - 50) / 10 + per_bmi * (bmi - 27) + b_fasting * fasting)
            numpyro.sample("glucose", dist.Gamma(shape, shape / mean), obs=glucose)

    age, bmi, fasting = told_ages(rng, n, 20, 90), np.round(18 + rng.gamma(3.5, 2.6, n), 1), yes(rng, 0.7, n)
    mean = np.exp(4.7 + 0.02 * (age - 50) / 10 + 0.008 * (bmi - 27) - 0.12 * fasting)
    glucose = np.round(rng.gamma(30, mean / 30))
    glucose = np.where(rng.random(n) < 0.04, np.round(glucose / 18.02, 1), glucose)
    return model, {"age": age, "bmi": bmi, "fasting": fasting, "glucose": glucose}


@problem(9_000, "wrong")
def a_batch_loaded_many_times(rng, n):
    """Forty samples of a bad instrument were loaded again and again until they made a sixth of the table."""

    def model(depth, clay, manured, nitrogen):
        a = numpyro.sample("a", dist.Normal(20, 20))
        b = numpyro.sample("b", dist.Normal(0, jnp.array([1.0, 1.0, 10.0])).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        with rows(nitrogen.shape[0]):
            mean = a + b[0] * (depth - 20) + b[1] * (clay - 25) + b[2] * manured
            numpyro.sample("nitrogen", dist.Normal(mean, sigma), obs=nitrogen)

    depth, clay = rng.choice([5.0, 15.0, 30.0, 60.0], n), np.round(60 * rng.beta(2.2, 3.2, n), 1)
    manured = yes(rng, 0.31, n)
    nitrogen = 21 - 0.18 * (depth - 20) + 0.15 * (clay - 25) + 4 * manured + 3.5 * rng.standard_normal(n)
    nitrogen[:40] += 9 * rng.standard_t(2, 40)
    source = np.where(rng.random(n) < 1 / 6, rng.integers(0, 40, n), np.arange(n))
    kwargs = {"depth": depth, "clay": clay, "manured": manured, "nitrogen": np.round(nitrogen, 2)}
    return model, {k: v[source] for k, v in kwargs.items()}
