"""Models at a border: laws that fall back to a simpler one, parameters too many, rows that tell very unequally much.

The format and the kinds are those of `zoo.py`. docs/measurements.md says which tables were judged by.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import scipy.special
from jax.scipy.special import ndtr
from scipy.special import expit
from zoo import Problem, normals, patients, rows

AWKWARD: dict[str, Problem] = {}


def problem(n: int, kind: str = "everyday") -> Callable:
    def register(draw: Callable) -> Callable:
        AWKWARD[draw.__name__] = Problem(draw.__name__, "awkward", kind, n, draw)
        return draw

    return register


# == Laws that fall back to a simpler one ==============================================================================


@problem(8_000)
def no_overdispersion(rng, n):
    """A negative binomial on counts that are Poisson."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = normals("b", 2.0, 2)
        concentration = numpyro.sample("concentration", dist.Gamma(2, 0.1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + x @ b), concentration), obs=y)

    x = rng.standard_normal((n, 2))
    return model, {"x": x, "y": rng.poisson(np.exp(0.8 + x @ [0.3, -0.2]))}


@problem(8_000)
def no_heavy_tails(rng, n):
    """Student's t with a free number of degrees on outcomes that are normal."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 100))
        b = normals("b", 10.0, 2)
        sigma = numpyro.sample("sigma", dist.HalfCauchy(10))
        df = numpyro.sample("df", dist.Gamma(2, 0.1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.StudentT(df, a + x @ b, sigma), obs=y)

    x = rng.standard_normal((n, 2))
    return model, {"x": x, "y": 30 + x @ [2.0, -1.0] + 6 * rng.standard_normal(n)}


@problem(8_000)
def no_zero_inflation(rng, n):
    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 5))
        b = numpyro.sample("b", dist.Normal(0, 2))
        gate = numpyro.sample("gate", dist.Beta(1, 1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(a + b * x)), obs=y)

    x = rng.standard_normal(n)
    return model, {"x": x, "y": rng.poisson(np.exp(0.7 + 0.3 * x))}


@problem(10_000)
def groups_all_alike(rng, n):
    """Varying intercepts (not centred) of groups that do not vary."""

    def model(group, x, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 10))
        tau = numpyro.sample("tau", dist.HalfNormal(5))
        with numpyro.plate("groups", 10):
            z = numpyro.sample("z", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + tau * z[group] + b * x, sigma), obs=y)

    x = rng.standard_normal(n)
    return model, {"group": rng.integers(0, 10, n), "x": x, "y": 3 + x + 2 * rng.standard_normal(n)}


@problem(10_000)
def groups_all_alike_centred(rng, n):
    def model(group, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        with numpyro.plate("groups", 8):
            level = numpyro.sample("level", dist.Normal(a, tau))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=level[group]), obs=y)

    return model, {"group": rng.integers(0, 8, n), "y": rng.binomial(1, 0.4, n)}


@problem(6_000)
def no_extra_binomial(rng, n):
    """A beta-binomial on answers that are binomial."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = numpyro.sample("b", dist.Normal(0, 3))
        kappa = numpyro.sample("kappa", dist.HalfNormal(100))
        with rows(y.shape[0]):
            p = 1 / (1 + jnp.exp(-(a + b * x)))
            numpyro.sample("y", dist.BetaBinomial(p * kappa, (1 - p) * kappa, 10), obs=y)

    x = rng.standard_normal(n)
    return model, {"x": x, "y": rng.binomial(10, expit(0.3 + 0.5 * x))}


@problem(5_000)
def slope_at_its_border(rng, n):
    """Effects that cannot be negative, of which one is none."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        with numpyro.plate("effects", 3):
            b = numpyro.sample("b", dist.HalfNormal(5))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + x @ b, sigma), obs=y)

    x = rng.standard_normal((n, 3))
    return model, {"x": x, "y": 5 + x @ [2.0, 0.0, 0.7] + 4 * rng.standard_normal(n)}


@problem(5_000, "small")
def three_cases(rng, n):
    """Prevalence of three in five thousand."""

    def model(ill):
        share = numpyro.sample("share", dist.Beta(1, 1))
        with rows(ill.shape[0]):
            numpyro.sample("ill", dist.Bernoulli(share), obs=ill)

    return model, {"ill": rng.permutation(np.arange(n) < 3) * 1}


def deaths_by_condition(age, condition, died):
    """Of which one in thirty, or in twenty-five, has the condition; weak priors."""
    a = numpyro.sample("a", dist.Normal(0, 10))
    b_age = numpyro.sample("b_age", dist.Normal(0, 10))
    b_condition = numpyro.sample("b_condition", dist.Normal(0, 5))
    with rows(died.shape[0]):
        logits = a + b_age * (age - 60) / 10 + b_condition * condition
        numpyro.sample("died", dist.Bernoulli(logits=logits), obs=died)


@problem(6_000)
def nearly_separated(rng, n):
    """All of the one in thirty with a condition die."""
    age, condition = rng.uniform(40, 90, n), (rng.random(n) < 1 / 30) * 1.0
    died = np.where(condition > 0, 1, rng.binomial(1, expit(-1 + 0.04 * (age - 60))))
    return deaths_by_condition, {"age": age, "condition": condition, "died": died}


@problem(6_000)
def nearly_all_die(rng, n):
    """Of the one in twenty-five with a condition, 96% die."""
    age, condition = rng.uniform(40, 90, n), (rng.random(n) < 1 / 25) * 1.0
    died = rng.binomial(1, np.where(condition > 0, 0.96, expit(-1 + 0.04 * (age - 60))))
    return deaths_by_condition, {"age": age, "condition": condition, "died": died}


@problem(10_000)
def no_side_effect_under_placebo(rng, n):
    """A probit regression with three arms; in the least, one in twenty-five, nobody has the outcome."""

    def model(arm, x, y):
        effect = normals("effect", 3.0, 3)
        b = normals("b", 2.0, 2)
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(probs=ndtr(effect[arm] + x @ b)), obs=y)

    arm, x = rng.choice(3, n, p=[0.04, 0.48, 0.48]), rng.standard_normal((n, 2))
    chance = scipy.special.ndtr(np.array([-9.0, -0.8, -0.2])[arm] + x @ [0.3, -0.2])
    return model, {"arm": arm, "x": x, "y": rng.binomial(1, chance)}


@problem(5_000)
def all_with_a_voucher_return(rng, n):
    """How many of three reminders are answered, by all of the one in twenty with a voucher."""

    def model(voucher, x, answered):
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = normals("b", 2.0, 3)
        b_voucher = numpyro.sample("b_voucher", dist.Normal(0, 10))
        with rows(answered.shape[0]):
            numpyro.sample("answered", dist.Binomial(3, logits=a + x @ b + b_voucher * voucher), obs=answered)

    voucher, x = (rng.random(n) < 1 / 20) * 1.0, rng.standard_normal((n, 3))
    answered = np.where(voucher > 0, 3, rng.binomial(3, expit(-0.5 + x @ [0.5, 0.0, -0.4])))
    return model, {"voucher": voucher, "x": x, "answered": answered}


@problem(8_000)
def all_on_a_ward_content(rng, n):
    """Four ordered answers; on one of five wards, of 3% of the patients, all give the last one."""

    def model(ward, y):
        effect = normals("effect", 4.0, 4)
        cuts = numpyro.sample(
            "cuts",
            dist.TransformedDistribution(dist.Normal(0, 3).expand([3]).to_event(1), dist.transforms.OrderedTransform()),
        )
        with rows(y.shape[0]):
            shift = jnp.concatenate([jnp.zeros(1), effect])[ward]
            numpyro.sample("y", dist.OrderedLogistic(shift, cuts), obs=y)

    ward = rng.choice(5, n, p=[0.4, 0.27, 0.2, 0.1, 0.03])
    latent = np.array([0, 0.5, -0.4, 0.3, 60])[ward] + rng.logistic(size=n)
    return model, {"ward": ward, "y": np.searchsorted([-1.5, 0.0, 1.2], latent)}


@problem(6_000)
def no_falls_on_a_ward(rng, n):
    """Counts of falls; on one of four wards, of 4% of the patients, nobody falls."""

    def model(ward, age, falls):
        rate = normals("rate", 4.0, 4)
        b_age = numpyro.sample("b_age", dist.Normal(0, 1))
        with rows(falls.shape[0]):
            numpyro.sample("falls", dist.Poisson(jnp.exp(rate[ward] + b_age * (age - 70) / 10)), obs=falls)

    ward, age = rng.choice(4, n, p=[0.4, 0.3, 0.26, 0.04]), rng.uniform(50, 90, n)
    mean = np.exp(np.array([-0.5, 0.1, -1.0, -30])[ward] + 0.2 * (age - 70) / 10)
    return model, {"ward": ward, "age": age, "falls": rng.poisson(mean)}


@problem(8_000)
def nobody_dies_under_a_treatment(rng, n):
    """Constant hazards, most times censored; under a treatment that 5% get nobody dies."""

    def model(treated, age, time, died):
        a = numpyro.sample("a", dist.Normal(-3, 3))
        b_treated = numpyro.sample("b_treated", dist.Normal(0, 4))
        b_age = numpyro.sample("b_age", dist.Normal(0, 1))
        with rows(time.shape[0]):
            log_rate = a + b_treated * treated + b_age * (age - 60) / 10
            numpyro.factor("survival", died * log_rate - jnp.exp(log_rate) * time)

    treated, age = rng.random(n) < 0.05, rng.uniform(40, 80, n)
    time, end = rng.exponential(np.exp(3.5 - 0.3 * (age - 60) / 10 + 30 * treated)), rng.uniform(5, 40, n)
    return model, {"treated": treated * 1.0, "age": age, "time": np.minimum(time, end), "died": (time < end) * 1.0}


@problem(8_000)
def an_answer_never_given(rng, n):
    """Seven ordered answers, of which nobody gives the sixth."""

    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 2))
        cuts = numpyro.sample(
            "cuts",
            dist.TransformedDistribution(dist.Normal(0, 3).expand([6]).to_event(1), dist.transforms.OrderedTransform()),
        )
        with rows(y.shape[0]):
            numpyro.sample("y", dist.OrderedLogistic(b * x, cuts), obs=y)

    x = rng.standard_normal(n)
    y = np.searchsorted([-2.0, -1.0, 0.0, 1.0, 2.0], 0.7 * x + rng.logistic(size=n))
    return model, {"x": x, "y": np.where(y == 5, 6, y)}


# == Parameters too many, or nearly so =================================================================================


@problem(8_000)
def all_dummies_and_an_intercept(rng, n):
    def model(region, x, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        of_region = normals("of_region", 10.0, 4)
        b = numpyro.sample("b", dist.Normal(0, 10))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + of_region[region] + b * x), obs=y)

    region, x = rng.integers(0, 4, n), rng.standard_normal(n)
    return model, {"region": region, "x": x, "y": rng.binomial(1, expit(np.array([-1, 0, 0.5, 1])[region] + 0.5 * x))}


@problem(8_000)
def calendar_years(rng, n):
    """A trend by year, as the calendar counts it."""

    def model(year, y):
        a = numpyro.sample("a", dist.Normal(0, 10_000))
        b = numpyro.sample("b", dist.Normal(0, 10))
        sigma = numpyro.sample("sigma", dist.HalfNormal(50))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + b * year, sigma), obs=y)

    year = rng.integers(1995, 2021, n) * 1.0
    return model, {"year": year, "y": 170 + 0.2 * (year - 2000) + 9 * rng.standard_normal(n)}


@problem(10_000)
def age_and_its_square(rng, n):
    def model(age, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = numpyro.sample("b", dist.Normal(0, 1))
        c = numpyro.sample("c", dist.Normal(0, 0.1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=a + b * age + c * age**2), obs=y)

    age = rng.integers(18, 90, n) * 1.0
    return model, {"age": age, "y": rng.binomial(1, expit(-4 + 0.15 * age - 0.0014 * age**2))}


@problem(8_000)
def tiny_units(rng, n):
    """Grams in tonnes: effects of 1e-6 under priors of 1."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = normals("b", 1.0, 2)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + x @ b, sigma), obs=y)

    x = np.stack([rng.uniform(20, 80, n), rng.binomial(1, 0.5, n)], 1)
    return model, {"x": x, "y": 1e-4 + x @ [2e-6, -3e-5] + 4e-5 * rng.standard_normal(n)}


# == Rows that tell very unequally much ================================================================================


@problem(50_000)
def incidence_of_a_disease(rng, n):
    """Two cases in a hundred persons, most of whom were watched for some years."""

    def model(age, male, years, cases):
        a = numpyro.sample("a", dist.Normal(-4, 3))
        by_decade = numpyro.sample("by_decade", dist.Normal(0, 1))
        of_men = numpyro.sample("of_men", dist.Normal(0, 1))
        with rows(cases.shape[0]):
            rate = years * jnp.exp(a + by_decade * (age - 50) / 10 + of_men * male)
            numpyro.sample("cases", dist.Poisson(rate), obs=cases)

    age, male, years = rng.uniform(20, 80, n), rng.random(n) < 0.5, rng.uniform(0.5, 6, n)
    rate = years * np.exp(-5.3 + 0.3 * (age - 50) / 10 + 0.4 * male)
    return model, {"age": age, "male": male * 1.0, "years": years, "cases": rng.poisson(rate)}


@problem(20_000)
def injuries_at_work(rng, n):
    """One in ten persons and years, and more of them than others."""

    def model(x, injuries):
        a = numpyro.sample("a", dist.Normal(0, 3))
        b = normals("b", 1.0, 3)
        concentration = numpyro.sample("concentration", dist.Gamma(2, 1))
        with rows(injuries.shape[0]):
            numpyro.sample("injuries", dist.NegativeBinomial2(jnp.exp(a + x @ b), concentration), obs=injuries)

    x = rng.standard_normal((n, 3))
    mean = np.exp(-2.4 + x @ [0.4, -0.2, 0.1])
    return model, {"x": x, "injuries": rng.poisson(mean * rng.gamma(0.7, 1 / 0.7, n))}


@problem(20_000)
def falls_among_inpatients(rng, n):
    """Some thousand admissions to each of eight wards; of each some hundred with a fall, or some ten."""

    def model(ward, age, falls):
        base = numpyro.sample("base", dist.Normal(-3, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("wards", 8):
            z = numpyro.sample("z", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 0.5))
        with rows(falls.shape[0]):
            numpyro.sample("falls", dist.Poisson(jnp.exp(base + (tau * z)[ward] + b * (age - 65) / 10)), obs=falls)

    ward, age = rng.integers(0, 8, n), rng.normal(65, 15, n)
    rate = np.exp(-3.5 + 0.7 * rng.standard_normal(8)[ward] + 0.2 * (age - 65) / 10)
    return model, {"ward": ward, "age": age, "falls": rng.poisson(rate)}


@problem(4_000)
def deaths_by_county(rng, n):
    """Populations from a thousand to some millions: few rows tell most."""

    def model(people, poverty, deaths):
        a = numpyro.sample("a", dist.Normal(-5, 3))
        b = numpyro.sample("b", dist.Normal(0, 1))
        with rows(deaths.shape[0]):
            numpyro.sample("deaths", dist.Poisson(people * jnp.exp(a + b * poverty)), obs=deaths)

    people, poverty = np.exp(10 + 1.4 * rng.standard_normal(n)), rng.standard_normal(n)
    return model, {"people": people, "poverty": poverty, "deaths": rng.poisson(people * np.exp(-6 + 0.1 * poverty))}


@problem(4_000)
def pupils_by_school(rng, n):
    """Binomial outcomes of schools of 5 to 2,000 pupils."""

    def model(pupils, rural, passed):
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 2))
        with rows(passed.shape[0]):
            numpyro.sample("passed", dist.Binomial(pupils, logits=a + b * rural), obs=passed)

    pupils, rural = np.clip(np.exp(4.5 + 1.2 * rng.standard_normal(n)), 5, 2000).astype(int), rng.binomial(1, 0.3, n)
    return model, {"pupils": pupils, "rural": rural * 1.0, "passed": rng.binomial(pupils, expit(0.8 - 0.3 * rural))}


@problem(2_000, "small")
def known_standard_errors(rng, n):
    """A meta-analysis: standard errors differ a hundredfold."""

    def model(error, effect):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(1))
        with rows(effect.shape[0]):
            numpyro.sample("effect", dist.Normal(mu, jnp.sqrt(tau**2 + error**2)), obs=effect)

    error = np.exp(rng.uniform(np.log(0.02), np.log(2), n))
    return model, {"error": error, "effect": 0.3 + np.sqrt(0.2**2 + error**2) * rng.standard_normal(n)}


@problem(6_000)
def large_visits(rng, n):
    """Counts of a hundred thousand."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 20))
        b = normals("b", 5.0, 2)
        phi = numpyro.sample("phi", dist.HalfNormal(50))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + x @ b), phi), obs=y)

    x = np.stack([rng.standard_normal(n), rng.binomial(1, 0.4, n)], 1)
    mean = np.exp(11.5 + x @ [0.2, -0.5])
    return model, {"x": x, "y": rng.poisson(mean * rng.gamma(8, 1 / 8, n))}


# == Working laws ======================================================================================================


@problem(10_000, "wrong")
def linear_probability(rng, n):
    """A normal law for yes and no, as economists fit it."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = normals("b", 1.0, 3)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + x @ b, sigma), obs=y)

    x = np.stack([rng.uniform(20, 65, n), rng.binomial(1, 0.5, n), rng.integers(8, 20, n)], 1) * 1.0
    p = np.clip(-0.2 + x @ [0.006, -0.1, 0.03], 0.02, 0.98)
    return model, {"x": x, "y": 1.0 * rng.binomial(1, p)}


@problem(10_000, "wrong")
def answers_of_one_to_five(rng, n):
    """A normal law for answers on a scale of five."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(3, 5))
        b = normals("b", 2.0, 3)
        sigma = numpyro.sample("sigma", dist.HalfNormal(3))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + x @ b, sigma), obs=y)

    x = patients(rng, n)[:, :3]
    y = np.clip(np.round(4.5 - 0.02 * x[:, 0] + 0.3 * x[:, 2] + 1.2 * rng.standard_normal(n)), 1, 5)
    return model, {"x": x, "y": y}


@problem(8_000, "wrong")
def poisson_of_dollars(rng, n):
    """A Poisson law for dollars spent."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = normals("b", 2.0, 2)
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(a + x @ b)), obs=y)

    x = np.stack([rng.standard_normal(n), rng.binomial(1, 0.4, n)], 1)
    return model, {"x": x, "y": np.round(np.exp(3 + x @ [0.3, 0.4]) * rng.gamma(2, 0.5, n))}


@problem(8_000, "wrong")
def log_of_one_and_dollars(rng, n):
    """A normal law for log(1 + dollars), of which a quarter are none."""

    def model(x, y):
        a = numpyro.sample("a", dist.Normal(0, 10))
        b = normals("b", 2.0, 2)
        sigma = numpyro.sample("sigma", dist.HalfNormal(5))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Normal(a + x @ b, sigma), obs=jnp.log1p(y))

    x = np.stack([rng.standard_normal(n), rng.binomial(1, 0.4, n)], 1)
    spent = np.exp(5 + x @ [0.3, 0.4] + 1.1 * rng.standard_normal(n))
    return model, {"x": x, "y": np.where(rng.random(n) < 0.25, 0, spent)}


@problem(3_000, "wrong")
def highest_of_a_uniform(rng, n):
    """The law's border is the parameter: nothing about it is smooth."""

    def model(y):
        top = numpyro.sample("top", dist.HalfNormal(100))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Uniform(0, top), obs=y)

    return model, {"y": rng.uniform(0, 42, n)}


@problem(5_000, "wrong")
def earliest_arrival(rng, n):
    """A shifted exponential law, whose shift is a parameter."""

    def model(y):
        shift = numpyro.sample("shift", dist.HalfNormal(10))
        rate = numpyro.sample("rate", dist.HalfNormal(5))
        with rows(y.shape[0]):
            numpyro.factor("y", jnp.where(y > shift, jnp.log(rate) - rate * (y - shift), -jnp.inf))

    return model, {"y": 4 + rng.exponential(0.8, n)}


@problem(6_000, "wrong")
def pareto_of_incomes(rng, n):
    def model(y):
        least = numpyro.sample("least", dist.HalfNormal(100))
        alpha = numpyro.sample("alpha", dist.HalfNormal(5))
        with rows(y.shape[0]):
            numpyro.sample("y", dist.Pareto(least, alpha), obs=y)

    return model, {"y": 20 * (1 + rng.pareto(2.5, n))}
