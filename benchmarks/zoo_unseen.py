"""More models and tables as people have them, for judging only: nothing in the package was chosen by looking at them.

The format and the kinds are those of `zoo.py`. Whoever changes a constant, a threshold or an algorithm leaves this file
alone; tables of seeds 0 to 40 are for final figures.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from scipy.special import expit
from zoo import Problem, normals, rows, spline_basis

UNSEEN: dict[str, Problem] = {}


def problem(n: int, kind: str = "everyday") -> Callable:
    def register(draw: Callable) -> Callable:
        UNSEEN[draw.__name__] = Problem(draw.__name__, "unseen", kind, n, draw)
        return draw

    return register


def ages(rng: np.random.Generator, n: int, low: int, high: int) -> np.ndarray:
    """Whole years, more young than old."""
    return np.floor(low + (high + 1 - low) * rng.beta(1.4, 1.9, n))


def flags(rng: np.random.Generator, n: int, share) -> np.ndarray:
    return (rng.random(n) < share) * 1.0


# == Everyday ==========================================================================================================


@problem(6_000)
def rents(rng, n):
    """Euros a month, square metres; new houses cost more per metre."""

    def model(area, floor, new, rent):
        base = numpyro.sample("base", dist.Normal(300, 300))
        per_metre = numpyro.sample("per_metre", dist.Normal(10, 10))
        per_floor = numpyro.sample("per_floor", dist.Normal(0, 30))
        new_base = numpyro.sample("new_base", dist.Normal(0, 300))
        new_per_metre = numpyro.sample("new_per_metre", dist.Normal(0, 10))
        sigma = numpyro.sample("sigma", dist.Exponential(1 / 200))
        numpyro.deterministic("rent_of_60_metres", base + 60 * per_metre)
        with rows(rent.shape[0]):
            mean = base + per_metre * area + per_floor * floor + new * (new_base + new_per_metre * area)
            numpyro.sample("rent", dist.Normal(mean, sigma), obs=rent)

    area, floor, new = np.round(18 + rng.gamma(4, 14, n)), np.minimum(rng.poisson(1.9, n), 9) * 1.0, flags(rng, n, 0.18)
    mean = 170 + 9.2 * area + 7 * floor + new * (60 + 2.1 * area)
    return model, {"area": area, "floor": floor, "new": new, "rent": mean + 150 * rng.standard_normal(n)}


@problem(15_000)
def loan_default(rng, n):
    """Complementary log-log; yearly income in thousands of euros, late payments of the last year."""

    def model(income, debt_ratio, late, default):
        a = numpyro.sample("a", dist.StudentT(3, 0, 5))
        b_income = numpyro.sample("b_income", dist.Normal(0, 2))
        b_debt = numpyro.sample("b_debt", dist.Normal(0, 2))
        b_late = numpyro.sample("b_late", dist.Normal(0, 1))
        with rows(default.shape[0]):
            log_hazard = a + b_income * jnp.log(income / 30) + b_debt * debt_ratio + b_late * late
            numpyro.sample("default", dist.Bernoulli(probs=-jnp.expm1(-jnp.exp(log_hazard))), obs=default)

    income, debt_ratio, late = 34 * rng.lognormal(0, 0.55, n), rng.beta(2, 4.5, n), rng.poisson(0.4, n) * 1.0
    hazard = np.exp(-2.8 - 0.5 * np.log(income / 30) + 1.8 * debt_ratio + 0.4 * late)
    default = (rng.random(n) < 1 - np.exp(-hazard)).astype(int)
    return model, {"income": income, "debt_ratio": debt_ratio, "late": late, "default": default}


@problem(7_000)
def days_absent(rng, n):
    """Of 187 days of school; pupils differ."""

    def model(grade, kilometres, free_lunch, absent):
        with numpyro.plate("coefficients", 4):
            b = numpyro.sample("b", dist.Normal(jnp.array([-3.0, 0.0, 0.0, 0.0]), jnp.array([2.0, 0.5, 0.5, 1.0])))
        precision = numpyro.sample("precision", dist.HalfNormal(50))
        with rows(absent.shape[0]):
            logits = b[0] + b[1] * grade + b[2] * kilometres + b[3] * free_lunch
            there, away = precision * jax.nn.sigmoid(-logits), precision * jax.nn.sigmoid(logits)
            numpyro.sample("absent", dist.BetaBinomial(away, there, 187), obs=absent)

    grade, kilometres, free_lunch = rng.integers(1, 10, n) * 1.0, rng.gamma(1.5, 2.0, n), flags(rng, n, 0.27)
    p = expit(-3.3 + 0.04 * grade + 0.03 * kilometres + 0.35 * free_lunch)
    absent = rng.binomial(187, rng.beta(p * 14, (1 - p) * 14))
    return model, {"grade": grade, "kilometres": kilometres, "free_lunch": free_lunch, "absent": absent}


@problem(8_000)
def repair_bills(rng, n):
    """Gamma with a log link; the slope in the car's age changes at 4 and at 10 years."""

    def model(age, town, bill):
        a = numpyro.sample("a", dist.Normal(7, 2))
        slopes = normals("slopes", 0.5, 3)
        b_town = numpyro.sample("b_town", dist.Normal(0, 1))
        shape = numpyro.sample("shape", dist.LogNormal(0, 1))
        with rows(bill.shape[0]):
            aged = slopes[0] * age + slopes[1] * jnp.maximum(age - 4, 0) + slopes[2] * jnp.maximum(age - 10, 0)
            mean = jnp.exp(a + aged + b_town * town)
            numpyro.sample("bill", dist.Gamma(shape, shape / mean), obs=bill)

    age, town = np.minimum(np.floor(rng.gamma(2.2, 3.4, n)), 25), flags(rng, n, 0.62)
    mean = np.exp(7.4 + 0.02 * age + 0.07 * np.maximum(age - 4, 0) - 0.12 * np.maximum(age - 10, 0) + 0.15 * town)
    return model, {"age": age, "town": town, "bill": rng.gamma(1.7, mean / 1.7)}


@problem(6_000)
def beetles_by_altitude(rng, n):
    """Counts in traps of unequal size, a hump in altitude."""

    def model(metres, forest, area, count):
        top = numpyro.sample("top", dist.Normal(0, 3))
        linear = numpyro.sample("linear", dist.Normal(0, 2))
        square = numpyro.sample("square", dist.Normal(0, 2))
        b_forest = numpyro.sample("b_forest", dist.Normal(0, 1))
        phi = numpyro.sample("phi", dist.HalfCauchy(2))
        with rows(count.shape[0]):
            kilometres = (metres - 1000) / 1000
            log_mean = jnp.log(area) + top + linear * kilometres + square * kilometres**2 + b_forest * forest
            numpyro.sample("count", dist.GammaPoisson(phi, phi / jnp.exp(log_mean)), obs=count)

    metres, forest = np.round(250 + 2100 * rng.beta(1.5, 2.5, n)), flags(rng, n, 0.4)
    area, height = rng.choice([0.25, 0.5, 1.0, 2.0], n), (metres - 1000) / 1000
    mean = area * np.exp(1.6 + 0.5 * height - 1.3 * height**2 + 0.4 * forest)
    count = rng.poisson(mean * rng.gamma(1.2, 1 / 1.2, n))
    return model, {"metres": metres, "forest": forest, "area": area, "count": count}


@problem(8_000)
def reaction_times(rng, n):
    """Milliseconds, skewed to the right."""

    def model(age, letters, distracted, ms):
        base = numpyro.sample("base", dist.Normal(500, 200))
        per_year = numpyro.sample("per_year", dist.Normal(0, 10))
        per_letter = numpyro.sample("per_letter", dist.Normal(0, 50))
        distraction = numpyro.sample("distraction", dist.Normal(0, 100))
        scale = numpyro.sample("scale", dist.HalfNormal(200))
        with rows(ms.shape[0]):
            loc = base + per_year * (age - 18) + per_letter * letters + distraction * distracted
            numpyro.sample("ms", dist.Gumbel(loc, scale), obs=ms)

    age, letters, distracted = ages(rng, n, 18, 79), rng.integers(3, 10, n) * 1.0, flags(rng, n, 0.5)
    ms = 390 + 2.3 * (age - 18) + 11 * letters + 35 * distracted + rng.gumbel(0, 85, n)
    return model, {"age": age, "letters": letters, "distracted": distracted, "ms": ms}


@problem(12_000)
def purchases_after_mailing(rng, n):
    """Some customers have left; who is still there buys more if written to, women more than men."""

    def model(mailed, woman, months_since, y):
        gone = numpyro.sample("gone", dist.Normal(0, 1.5))
        gone_per_month = numpyro.sample("gone_per_month", dist.Normal(0, 0.5))
        b = normals("b", 1.0, 4)
        with rows(y.shape[0]):
            gate = jax.nn.sigmoid(gone + gone_per_month * months_since)
            rate = jnp.exp(b[0] + b[1] * mailed + b[2] * woman + b[3] * mailed * woman)
            numpyro.sample("y", dist.ZeroInflatedPoisson(gate, rate), obs=y)

    mailed, woman = flags(rng, n, 0.5), flags(rng, n, 0.66)
    months_since = np.minimum(np.floor(rng.exponential(9, n)), 48)
    rate = np.exp(0.5 + 0.15 * mailed + 0.1 * woman + 0.12 * mailed * woman)
    y = rng.poisson(rate) * (rng.random(n) > expit(-1.7 + 0.11 * months_since))
    return model, {"mailed": mailed, "woman": woman, "months_since": months_since, "y": y}


@problem(10_000)
def way_to_work(rng, n):
    """Car, bus or bicycle, by minutes and euros of each and by income in thousands."""

    def model(minutes, euros, income, choice):
        asc = numpyro.sample("asc", dist.Normal(0, 3).expand([2]).to_event(1))
        by_income = numpyro.sample("by_income", dist.Normal(0, 0.5).expand([2]).to_event(1))
        b_minutes = numpyro.sample("b_minutes", dist.Normal(0, 0.5))
        b_euros = numpyro.sample("b_euros", dist.Normal(0, 2))
        numpyro.deterministic("euros_per_hour", 60 * b_minutes / b_euros)
        with rows(choice.shape[0]):
            own = jnp.stack([jnp.zeros_like(income), asc[0] + by_income[0] * income, asc[1] + by_income[1] * income], 1)
            numpyro.sample("choice", dist.Categorical(logits=own + b_minutes * minutes + b_euros * euros), obs=choice)

    kilometres, income = rng.gamma(2, 3.5, n) + 0.5, 30 * rng.lognormal(0, 0.5, n)
    minutes = np.stack([6 + 1.7 * kilometres, 13 + 2.4 * kilometres, 3 + 4 * kilometres], 1)
    minutes = np.round(minutes * rng.lognormal(0, 0.2, (n, 3)))
    euros = np.stack([0.5 + 0.3 * kilometres, np.where(flags(rng, n, 0.3) == 1, 0, 2.6), np.zeros(n)], 1)
    own = np.stack([np.zeros(n), -0.2 - 0.012 * income, -0.9 - 0.002 * income], 1)
    choice = np.argmax(own - 0.05 * minutes - 0.3 * euros + rng.gumbel(size=(n, 3)), 1)
    return model, {"minutes": minutes, "euros": euros, "income": income, "choice": choice}


@problem(9_000)
def weeks_unemployed(rng, n):
    """Log-logistic, with masks for who has found work and who has not yet."""

    def model(log_weeks, found, age, degree, region_rate):
        a = numpyro.sample("a", dist.Normal(3, 2))
        b_age = numpyro.sample("b_age", dist.Normal(0, 0.5))
        b_degree = numpyro.sample("b_degree", dist.Normal(0, 1))
        b_rate = numpyro.sample("b_rate", dist.Normal(0, 0.5))
        scale = numpyro.sample("scale", dist.HalfCauchy(1))
        with rows(age.shape[0]):
            loc = a + b_age * (age - 40) / 10 + b_degree * degree + b_rate * region_rate
            with numpyro.handlers.mask(mask=found == 1):
                numpyro.sample("log_weeks", dist.Logistic(loc, scale), obs=log_weeks)
            with numpyro.handlers.mask(mask=found == 0):
                numpyro.sample("not_yet", dist.Bernoulli(logits=(loc - log_weeks) / scale), obs=jnp.ones_like(found))

    age, degree, region_rate = ages(rng, n, 18, 64), flags(rng, n, 0.31), rng.choice([3.1, 4.4, 5.2, 7.9, 11.5], n)
    log_weeks = 2.3 + 0.18 * (age - 40) / 10 - 0.35 * degree + 0.05 * region_rate + 0.65 * rng.logistic(size=n)
    end = np.log(rng.integers(8, 105, n))
    found = (log_weeks < end).astype(int)
    kwargs = {"age": age, "degree": degree, "region_rate": region_rate}
    return model, {"log_weeks": np.minimum(log_weeks, end), "found": found} | kwargs


@problem(9_000)
def birth_weights(rng, n):
    """Grams; weeks and centimetres less public constants."""

    def model(weeks, smokes, first, mother_cm, grams):
        at_term = numpyro.sample("at_term", dist.Normal(3400, 500))
        per_week = numpyro.sample("per_week", dist.Normal(0, 200))
        per_week_squared = numpyro.sample("per_week_squared", dist.Normal(0, 50))
        smoking = numpyro.sample("smoking", dist.Normal(0, 300))
        first_child = numpyro.sample("first_child", dist.Normal(0, 300))
        per_cm = numpyro.sample("per_cm", dist.Normal(0, 50))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(500))
        with rows(grams.shape[0]):
            late = weeks - 40
            mean = at_term + per_week * late + per_week_squared * late**2 + smoking * smokes + first_child * first
            numpyro.sample("grams", dist.Normal(mean + per_cm * (mother_cm - 165), sigma), obs=grams)

    weeks = np.clip(np.round(42 - rng.gamma(4, 0.65, n)), 28, 42)
    smokes, first, mother_cm = flags(rng, n, 0.11), flags(rng, n, 0.46), np.round(rng.normal(165, 6.5, n))
    mean = 3560 + 120 * (weeks - 40) - 4 * (weeks - 40) ** 2 - 190 * smokes - 110 * first + 13 * (mother_cm - 165)
    grams = mean + 420 * rng.standard_normal(n)
    return model, {"weeks": weeks, "smokes": smokes, "first": first, "mother_cm": mother_cm, "grams": grams}


@problem(6_000)
def bedtimes(rng, n):
    """Time of the day as an angle from midnight."""

    def model(age, weekend, shift_work, angle):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        per_decade = numpyro.sample("per_decade", dist.Normal(0, 0.5))
        b_weekend = numpyro.sample("b_weekend", dist.Normal(0, 0.5))
        b_shift = numpyro.sample("b_shift", dist.Normal(0, 0.5))
        kappa = numpyro.sample("kappa", dist.Gamma(2.0, 0.2))
        with rows(angle.shape[0]):
            loc = mean + per_decade * (age - 45) / 10 + b_weekend * weekend + b_shift * shift_work
            numpyro.sample("angle", dist.VonMises(loc, kappa), obs=angle)

    age, weekend, shift_work = ages(rng, n, 16, 90), flags(rng, n, 2 / 7), flags(rng, n, 0.14)
    loc = -0.2 - 0.06 * (age - 45) / 10 + 0.2 * weekend + 0.3 * shift_work
    angle = (rng.vonmises(loc, 5.0) + np.pi) % (2 * np.pi) - np.pi
    return model, {"age": age, "weekend": weekend, "shift_work": shift_work, "angle": angle}


@problem(7_000)
def years_to_promotion(rng, n):
    """Log-normal, censored at the day of the survey."""

    def model(years, promoted, female, part_time, score):
        mu = numpyro.sample("mu", dist.Normal(1, 2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        sigma = numpyro.sample("sigma", dist.Gamma(2, 2))
        with rows(years.shape[0]):
            loc = mu + b[0] * female + b[1] * part_time + b[2] * (score - 100) / 15
            law = dist.LogNormal(loc, sigma)
            still_waiting = jax.scipy.special.log_ndtr((loc - jnp.log(years)) / sigma)
            numpyro.factor("years", jnp.where(promoted == 1, law.log_prob(years), still_waiting))

    female, score = flags(rng, n, 0.44), np.round(rng.normal(103, 14, n))
    part_time = flags(rng, n, np.where(female == 1, 0.3, 0.1))
    loc = 1.5 + 0.12 * female + 0.3 * part_time - 0.1 * (score - 100) / 15
    years, since = np.exp(loc + 0.7 * rng.standard_normal(n)), 0.5 + 14 * rng.beta(1.2, 1.5, n)
    kwargs = {"female": female, "part_time": part_time, "score": score}
    return model, {"years": np.minimum(years, since), "promoted": (years < since).astype(int)} | kwargs


@problem(10_000)
def satisfied_with_life(rng, n):
    """Points; each of five levels of schooling adds to the one below it, by shares of the whole effect."""

    def model(level, age, unemployed, y):
        a = numpyro.sample("a", dist.Normal(60, 20))
        effect = numpyro.sample("effect", dist.Normal(0, 20))
        increments = numpyro.sample("increments", dist.Dirichlet(2 * jnp.ones(4)))
        per_year = numpyro.sample("per_year", dist.Normal(0, 1))
        b_unemployed = numpyro.sample("b_unemployed", dist.Normal(0, 20))
        sigma = numpyro.sample("sigma", dist.HalfNormal(30))
        above_lowest = numpyro.deterministic("above_lowest", effect * jnp.cumsum(increments))
        by_level = jnp.concatenate([jnp.zeros(1), above_lowest])
        with rows(y.shape[0]):
            mean = a + by_level[level] + per_year * (age - 50) + b_unemployed * unemployed
            numpyro.sample("y", dist.Normal(mean, sigma), obs=y)

    level, age = rng.choice(5, n, p=[0.09, 0.21, 0.34, 0.22, 0.14]), ages(rng, n, 18, 92)
    unemployed = flags(rng, n, 0.06)
    mean = 61 + np.array([0.0, 5.0, 8.5, 10.5, 12.0])[level] + 0.06 * (age - 50) - 13 * unemployed
    return model, {"level": level, "age": age, "unemployed": unemployed, "y": mean + 17 * rng.standard_normal(n)}


@problem(8_000)
def pain_after_surgery(rng, n):
    """Five grades; cut points from shares of a patient of 60 with a small operation."""

    def model(age, large, bmi, grade):
        shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(5)))
        cutpoints = numpyro.deterministic("cutpoints", jax.scipy.special.logit(jnp.cumsum(shares)[:-1]))
        per_decade = numpyro.sample("per_decade", dist.Normal(0, 1))
        operation = numpyro.sample("operation", dist.Normal(0, 1))
        per_bmi = numpyro.sample("per_bmi", dist.Normal(0, 0.2))
        with rows(grade.shape[0]):
            severity = per_decade * (age - 60) / 10 + operation * large + per_bmi * (bmi - 27)
            numpyro.sample("grade", dist.OrderedLogistic(severity, cutpoints), obs=grade)

    age, large, bmi = ages(rng, n, 18, 95), flags(rng, n, 0.3), 19 + rng.gamma(3, 2.7, n)
    severity = -0.15 * (age - 60) / 10 + 0.8 * large + 0.02 * (bmi - 27) + rng.logistic(size=n)
    grade = np.searchsorted([-1.3, 0.0, 1.1, 2.4], severity)
    return model, {"age": age, "large": large, "bmi": bmi, "grade": grade}


@problem(6_000)
def upper_and_lower_pressure(rng, n):
    """Two outcomes of a person, correlated."""

    def model(age, male, pressure):
        a = numpyro.sample("a", dist.Normal(jnp.array([120.0, 80.0]), 30.0).to_event(1))
        per_year = normals("per_year", 2.0, 2)
        b_male = normals("b_male", 20.0, 2)
        s = numpyro.sample("s", dist.HalfNormal(20).expand([2]).to_event(1))
        rho = numpyro.sample("rho", dist.Uniform(-1, 1))
        covariance = jnp.array([[s[0] ** 2, rho * s[0] * s[1]], [rho * s[0] * s[1], s[1] ** 2]])
        with rows(age.shape[0]):
            mean = a + per_year * (age[:, None] - 50) + b_male * male[:, None]
            numpyro.sample("pressure", dist.MultivariateNormal(mean, covariance_matrix=covariance), obs=pressure)

    age, male = ages(rng, n, 25, 84), flags(rng, n, 0.48)
    noise = rng.multivariate_normal([0, 0], [[15.0**2, 0.6 * 15 * 10], [0.6 * 15 * 10, 10.0**2]], n)
    mean = np.array([126.0, 78.0]) + np.outer(age - 50, [0.46, 0.12]) + np.outer(male, [4.0, 3.0])
    return model, {"age": age, "male": male, "pressure": mean + noise}


@problem(12_000)
def heating_by_temperature(rng, n):
    """Kilowatt hours of a day, a smooth function of degrees Celsius from -15 to 30."""

    def model(B, adults, flat, kwh):
        with numpyro.plate("basis", B.shape[1]):
            w = numpyro.sample("w", dist.Normal(40, 40))
        per_adult = numpyro.sample("per_adult", dist.Normal(0, 10))
        b_flat = numpyro.sample("b_flat", dist.Normal(0, 20))
        sigma = numpyro.sample("sigma", dist.HalfNormal(30))
        with rows(kwh.shape[0]):
            numpyro.sample("kwh", dist.Normal(B @ w + per_adult * adults + b_flat * flat, sigma), obs=kwh)

    celsius = np.clip(9 + 11 * np.cos(2 * np.pi * rng.random(n)) + 3.5 * rng.standard_normal(n), -15, 30)
    adults, flat = 1.0 + rng.binomial(3, 0.3, n), flags(rng, n, 0.55)
    mean = 9 + 34 / (1 + np.exp((celsius - 7) / 3.5)) + 0.5 * np.maximum(celsius - 23, 0) + 2.5 * adults - 6 * flat
    kwh = mean + 9 * rng.standard_normal(n)
    return model, {"B": spline_basis(celsius, 7, -15, 30), "adults": adults, "flat": flat, "kwh": kwh}


@problem(20_000)
def turnout_by_state(rng, n):
    """Ten states of unequal size, not centred otherwise than by the constant 45 years."""

    def model(state, age, degree, voted, states=10):
        national = numpyro.sample("national", dist.Normal(0, 1.5))
        spread = numpyro.sample("spread", dist.HalfCauchy(1))
        with numpyro.plate("states", states):
            alpha = numpyro.sample("alpha", dist.Normal(national, spread))
        per_decade = numpyro.sample("per_decade", dist.Normal(0, 1))
        b_degree = numpyro.sample("b_degree", dist.Normal(0, 1))
        with rows(voted.shape[0]):
            logits = alpha[state] + per_decade * (age - 45) / 10 + b_degree * degree
            numpyro.sample("voted", dist.Bernoulli(logits=logits), obs=voted)

    state = rng.choice(10, n, p=[0.22, 0.18, 0.14, 0.1, 0.09, 0.08, 0.07, 0.05, 0.04, 0.03])
    age, degree = ages(rng, n, 18, 93), flags(rng, n, 0.33)
    alpha = np.array([0.5, 0.9, 0.2, 0.7, 1.1, 0.4, 0.6, -0.1, 0.8, 0.3])
    voted = (rng.random(n) < expit(alpha[state] + 0.22 * (age - 45) / 10 + 0.6 * degree)).astype(int)
    return model, {"state": state, "age": age, "degree": degree, "voted": voted}


@problem(15_000)
def income_by_province(rng, n):
    """Logarithm of yearly income; years of schooling as they are, eight provinces."""

    def model(province, schooling, age, female, log_income, provinces=8):
        mu = numpyro.sample("mu", dist.Normal(9, 2))
        tau = numpyro.sample("tau", dist.HalfCauchy(0.5))
        with numpyro.plate("provinces", provinces):
            z = numpyro.sample("z", dist.Normal(0, 1))
        level = numpyro.deterministic("level", mu + tau * z)
        return_to_schooling = numpyro.sample("return_to_schooling", dist.Normal(0.1, 0.1))
        per_year = numpyro.sample("per_year", dist.Normal(0, 0.1))
        gap = numpyro.sample("gap", dist.Normal(0, 0.5))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with rows(log_income.shape[0]):
            mean = level[province] + return_to_schooling * schooling + per_year * (age - 40) + gap * female
            numpyro.sample("log_income", dist.Normal(mean, sigma), obs=log_income)

    province = rng.choice(8, n, p=[0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06, 0.04])
    schooling, age, female = (
        np.clip(np.round(rng.normal(12.5, 2.8, n)), 6, 21),
        ages(rng, n, 20, 66),
        flags(rng, n, 0.47),
    )
    level = np.array([9.35, 9.2, 9.1, 9.4, 9.0, 9.15, 9.25, 8.95])
    mean = level[province] + 0.08 * schooling + 0.009 * (age - 40) - 0.2 * female
    log_income = mean + 0.55 * rng.standard_normal(n)
    kwargs = {"province": province, "schooling": schooling, "age": age, "female": female}
    return model, kwargs | {"log_income": log_income}


@problem(5_000)
def yield_by_nitrogen(rng, n):
    """Tonnes of wheat by kilogrammes of nitrogen, which level off."""

    def model(nitrogen, tonnes):
        most = numpyro.sample("most", dist.LogNormal(2, 0.5))
        rate = numpyro.sample("rate", dist.LogNormal(-4, 1))
        in_soil = numpyro.sample("in_soil", dist.TruncatedNormal(50, 30, low=0.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(3))
        with rows(tonnes.shape[0]):
            mean = most * (1 - jnp.exp(-rate * (nitrogen + in_soil)))
            numpyro.sample("tonnes", dist.Normal(mean, sigma), obs=tonnes)

    nitrogen = np.where(rng.random(n) < 0.12, 0.0, 5 * np.round(rng.gamma(6, 24, n) / 5))
    tonnes = 8.8 * (1 - np.exp(-0.013 * (nitrogen + 42))) + 1.2 * rng.standard_normal(n)
    return model, {"nitrogen": nitrogen, "tonnes": tonnes}


@problem(9_000)
def asleep_after_dose(rng, n):
    """Hill curve of milligrams, over those who fall asleep anyway."""

    def model(mg, asleep):
        anyway = numpyro.sample("anyway", dist.Beta(1, 9))
        ed50 = numpyro.sample("ed50", dist.LogNormal(1, 1))
        hill = numpyro.sample("hill", dist.TruncatedNormal(2, 2, low=0.0))
        with rows(asleep.shape[0]):
            p = anyway + (1 - anyway) * mg**hill / (mg**hill + ed50**hill)
            numpyro.sample("asleep", dist.Bernoulli(probs=p), obs=asleep)

    mg = rng.choice([0.5, 1.0, 2.0, 4.0, 8.0, 16.0], n, p=[0.1, 0.2, 0.25, 0.25, 0.15, 0.05])
    p = 0.08 + 0.92 * mg**1.6 / (mg**1.6 + 4.5**1.6)
    return model, {"mg": mg, "asleep": (rng.random(n) < p).astype(int)}


@problem(5_000)
def hospital_bills(rng, n):
    """Euros; the logarithm is logistic."""

    def model(age, emergency, diagnoses, euros):
        a = numpyro.sample("a", dist.Normal(8, 3))
        b_age = numpyro.sample("b_age", dist.Normal(0, 0.1))
        b_emergency = numpyro.sample("b_emergency", dist.Normal(0, 1))
        b_diagnoses = numpyro.sample("b_diagnoses", dist.Normal(0, 0.5))
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        with rows(euros.shape[0]):
            loc = a + b_age * age + b_emergency * emergency + b_diagnoses * diagnoses
            law = dist.TransformedDistribution(dist.Logistic(loc, scale), dist.transforms.ExpTransform())
            numpyro.sample("euros", law, obs=euros)

    age, emergency, diagnoses = ages(rng, n, 1, 97), flags(rng, n, 0.38), 1.0 + rng.poisson(1.6, n)
    euros = np.exp(7.3 + 0.008 * age + 0.25 * emergency + 0.14 * diagnoses + 0.42 * rng.logistic(size=n))
    return model, {"age": age, "emergency": emergency, "diagnoses": diagnoses, "euros": euros}


@problem(12_000)
def medical_spending(rng, n):
    """Whether anything was spent, and if so how much."""

    def model(age, chronic, spent):
        any_a = numpyro.sample("any_a", dist.Normal(0, 3))
        any_b = numpyro.sample("any_b", dist.Normal(0, jnp.array([0.1, 1.0])).to_event(1))
        log_a = numpyro.sample("log_a", dist.Normal(6, 3))
        log_b = numpyro.sample("log_b", dist.Normal(0, jnp.array([0.1, 1.0])).to_event(1))
        sigma = numpyro.sample("sigma", dist.Exponential(1))
        with rows(spent.shape[0]):
            logits = any_a + any_b[0] * age + any_b[1] * chronic
            numpyro.sample("any", dist.Bernoulli(logits=logits), obs=(spent > 0).astype(int))
            law = dist.LogNormal(log_a + log_b[0] * age + log_b[1] * chronic, sigma)
            numpyro.sample("spent", law.mask(spent > 0), obs=jnp.where(spent > 0, spent, 1.0))

    age = ages(rng, n, 0, 95)
    chronic = rng.poisson(0.1 + 0.011 * age) * 1.0
    spends = rng.random(n) < expit(0.1 + 0.012 * age + 0.7 * chronic)
    amount = np.exp(5.2 + 0.013 * age + 0.35 * chronic + 1.3 * rng.standard_normal(n))
    return model, {"age": age, "chronic": chronic, "spent": np.where(spends, amount, 0.0)}


@problem(4_000)
def depression_trial(rng, n):
    """Points after twelve weeks, given those before; the effect depends on them."""

    def model(before, treated, after):
        a = numpyro.sample("a", dist.Normal(20, 10))
        slope = numpyro.sample("slope", dist.Normal(1, 1))
        effect = numpyro.sample("effect", dist.Normal(0, 10))
        effect_per_point = numpyro.sample("effect_per_point", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        with rows(after.shape[0]):
            centred = before - 25
            mean = a + slope * centred + treated * (effect + effect_per_point * centred)
            numpyro.sample("after", dist.Normal(mean, sigma), obs=after)

    before, treated = np.clip(np.round(14 + rng.gamma(3, 4.5, n)), 14, 63), flags(rng, n, 0.5)
    mean = 19 + 0.65 * (before - 25) - treated * (3.2 + 0.12 * (before - 25))
    return model, {"before": before, "treated": treated, "after": mean + 7.5 * rng.standard_normal(n)}


@problem(10_000)
def brands_compared(rng, n):
    """Which of two of eight brands a customer took; the first brand is 0, prices in euros."""

    def model(left, right, dearer, took_left, brands=8):
        with numpyro.plate("other_brands", brands - 1):
            others = numpyro.sample("others", dist.Normal(0, 1.5))
        worth = jnp.concatenate([jnp.zeros(1), others])
        side = numpyro.sample("side", dist.Normal(0, 0.5))
        per_euro = numpyro.sample("per_euro", dist.Normal(0, 1))
        with rows(took_left.shape[0]):
            logits = worth[left] - worth[right] + side + per_euro * dearer
            numpyro.sample("took_left", dist.Bernoulli(logits=logits), obs=took_left)

    left = rng.choice(8, n, p=[0.2, 0.18, 0.15, 0.13, 0.11, 0.09, 0.08, 0.06])
    right = (left + rng.integers(1, 8, n)) % 8
    dearer = np.round(rng.normal(0, 1.2, n), 1)
    worth = np.array([0.0, 0.4, -0.3, 0.9, 0.1, -0.8, 0.5, -0.1])
    took_left = (rng.random(n) < expit(worth[left] - worth[right] + 0.1 - 0.45 * dearer)).astype(int)
    return model, {"left": left, "right": right, "dearer": dearer, "took_left": took_left}


# == Small =============================================================================================================


@problem(600, "small")
def antibodies(rng, n):
    """Titres after one of two vaccines."""

    def model(vaccine, titre):
        mu = numpyro.sample("mu", dist.Normal(5, 3).expand([2]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(2))
        with rows(titre.shape[0]):
            numpyro.sample("titre", dist.LogNormal(mu[vaccine], sigma), obs=titre)

    vaccine = rng.integers(0, 2, n)
    return model, {"vaccine": vaccine, "titre": np.exp(np.array([5.6, 6.1])[vaccine] + 0.9 * rng.standard_normal(n))}


@problem(400, "small")
def minutes_at_the_counter(rng, n):
    def model(minutes):
        scale = numpyro.sample("scale", dist.LogNormal(2, 1))
        shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
        with rows(minutes.shape[0]):
            numpyro.sample("minutes", dist.Weibull(scale, shape), obs=minutes)

    return model, {"minutes": 11 * rng.weibull(1.3, n) + 1e-2}


@problem(1_500, "small")
def driving_tests_failed(rng, n):
    """Before the first one passed, by hours of lessons."""

    def model(hours, failed):
        a = numpyro.sample("a", dist.Normal(0, 2))
        b = numpyro.sample("b", dist.Normal(0, 0.2))
        with rows(failed.shape[0]):
            numpyro.sample("failed", dist.GeometricLogits(a + b * (hours - 30)), obs=failed)

    hours = np.round(15 + rng.gamma(3, 6, n))
    return model, {"hours": hours, "failed": rng.geometric(expit(0.3 + 0.03 * (hours - 30))) - 1}


@problem(2_400, "small")
def gave_up_smoking(rng, n):
    """Cigarettes a day as they are."""

    def model(cigarettes, patch, pregnant, quit_):
        a = numpyro.sample("a", dist.Normal(0, 2))
        per_cigarette = numpyro.sample("per_cigarette", dist.Normal(0, 0.5))
        b_patch = numpyro.sample("b_patch", dist.Normal(0, 1))
        b_pregnant = numpyro.sample("b_pregnant", dist.Normal(0, 1))
        with rows(quit_.shape[0]):
            logits = a + per_cigarette * cigarettes + b_patch * patch + b_pregnant * pregnant
            numpyro.sample("quit", dist.Bernoulli(logits=logits), obs=quit_)

    cigarettes, patch, pregnant = 1.0 + rng.negative_binomial(2.5, 0.15, n), flags(rng, n, 0.5), flags(rng, n, 0.13)
    logits = -0.4 - 0.05 * cigarettes + 0.5 * patch + 0.7 * pregnant
    quit_ = (rng.random(n) < expit(logits)).astype(int)
    return model, {"cigarettes": cigarettes, "patch": patch, "pregnant": pregnant, "quit_": quit_}


# == Large =============================================================================================================


@problem(30_000, "large")
def wages_by_industry(rng, n):
    """Logarithms; twenty industries of unequal size, experience and its square."""

    def model(industry, schooling, experience, female, log_wage, industries=20):
        with numpyro.plate("industries", industries):
            level = numpyro.sample("level", dist.Normal(2, 1))
        b = numpyro.sample("b", dist.Normal(0, 0.5).expand([4]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfCauchy(1))
        with rows(log_wage.shape[0]):
            mean = level[industry] + b[0] * (schooling - 12) + b[1] * experience + b[2] * experience**2 / 100
            numpyro.sample("log_wage", dist.Normal(mean + b[3] * female, sigma), obs=log_wage)

    industry = rng.choice(20, n, p=(w := 0.93 ** np.arange(20)) / w.sum())
    schooling = np.clip(np.round(rng.normal(12.8, 2.6, n)), 7, 20)
    experience, female = np.minimum(np.floor(rng.gamma(2.2, 8, n)), 48), flags(rng, n, 0.46)
    mean = rng.normal(2.3, 0.2, 20)[industry] + 0.07 * (schooling - 12) + 0.03 * experience - 0.05 * experience**2 / 100
    log_wage = mean - 0.16 * female + 0.45 * rng.standard_normal(n)
    kwargs = {"industry": industry, "schooling": schooling, "experience": experience, "female": female}
    return model, kwargs | {"log_wage": log_wage}


@problem(50_000, "large")
def vaccinated_by_county(rng, n):
    """Twenty-two counties and five age groups."""

    def model(county, age_group, nurse, vaccinated, counties=22):
        mu = numpyro.sample("mu", dist.Normal(0, 1.5))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("counties", counties):
            z = numpyro.sample("z", dist.Normal(0, 1))
        older = normals("older", 1.0, 4)
        b_nurse = numpyro.sample("b_nurse", dist.Normal(0, 1))
        by_age = jnp.concatenate([jnp.zeros(1), older])
        with rows(vaccinated.shape[0]):
            logits = mu + tau * z[county] + by_age[age_group] + b_nurse * nurse
            numpyro.sample("vaccinated", dist.Bernoulli(logits=logits), obs=vaccinated)

    county = rng.choice(22, n, p=rng.dirichlet(8 * np.ones(22)))
    age_group, nurse = rng.choice(5, n, p=[0.18, 0.24, 0.25, 0.2, 0.13]), flags(rng, n, 0.04)
    logits = -0.4 + 0.35 * rng.normal(size=22)[county] + np.array([0.0, 0.1, 0.4, 0.9, 1.3])[age_group] + 0.8 * nurse
    vaccinated = (rng.random(n) < expit(logits)).astype(int)
    return model, {"county": county, "age_group": age_group, "nurse": nurse, "vaccinated": vaccinated}


@problem(20_000, "large")
def patients_per_shift(rng, n):
    """Counts by hour of the day (three harmonics), day of the week and degrees Celsius (a spline)."""

    def model(hour, weekday, B, y):
        daily = normals("daily", 1.0, 6)
        with numpyro.plate("other_days", 6):
            others = numpyro.sample("others", dist.Normal(0, 0.5))
        w = numpyro.sample("w", dist.Normal(2, 1).expand([B.shape[1]]).to_event(1))
        phi = numpyro.sample("phi", dist.Exponential(0.1))
        day = jnp.concatenate([jnp.zeros(1), others])
        with rows(y.shape[0]):
            phase = 2 * jnp.pi * hour[:, None] / 24 * jnp.arange(1, 4)
            log_mean = B @ w + jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], 1) @ daily + day[weekday]
            numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(log_mean), phi), obs=y)

    hour, weekday = rng.integers(0, 24, n) * 1.0, rng.integers(0, 7, n)
    celsius = np.clip(10 + 10 * np.cos(2 * np.pi * rng.random(n)) + 3 * rng.standard_normal(n), -12, 32)
    phase = 2 * np.pi * hour / 24
    log_mean = 1.9 - 0.5 * np.sin(phase) - 0.4 * np.cos(phase) + 0.15 * np.sin(2 * phase) + 0.008 * (celsius - 10)
    log_mean = log_mean + np.array([0.2, 0.05, 0.0, 0.0, 0.05, 0.1, 0.15])[weekday]
    y = rng.poisson(np.exp(log_mean) * rng.gamma(6, 1 / 6, n))
    return model, {"hour": hour, "weekday": weekday, "B": spline_basis(celsius, 6, -12, 32), "y": y}


@problem(20_000, "large")
def body_measures(rng, n):
    """Height, weight and waist, in standard deviations of a national survey."""

    def model(age, male, smoker, measures):
        a = normals("a", 1.0, 3)
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3, 3]).to_event(2))
        spread = numpyro.sample("spread", dist.HalfNormal(2).expand([3]).to_event(1))
        corr = numpyro.sample("corr", dist.LKJCholesky(3, 2.0))
        with rows(age.shape[0]):
            X = jnp.stack([(age - 45) / 10, male, smoker], 1)
            law = dist.MultivariateNormal(a + X @ b, scale_tril=spread[:, None] * corr)
            numpyro.sample("measures", law, obs=measures)

    age, male, smoker = ages(rng, n, 18, 88), flags(rng, n, 0.49), flags(rng, n, 0.21)
    b = np.array([[-0.6, 1.2, 2.6], [13.0, 14.0, 10.0], [-0.3, -1.5, 0.5]])
    sd, corr = np.array([6.7, 13.5, 12.0]), np.array([[1.0, 0.35, 0.1], [0.35, 1.0, 0.85], [0.1, 0.85, 1.0]])
    mean = np.array([163.5, 70.0, 84.0]) + np.stack([(age - 45) / 10, male, smoker], 1) @ b
    noise = rng.multivariate_normal(np.zeros(3), corr * np.outer(sd, sd), n)
    measures = (mean + noise - np.array([170.0, 77.0, 90.0])) / np.array([9.5, 15.5, 13.5])
    return model, {"age": age, "male": male, "smoker": smoker, "measures": measures}


# == Curved ============================================================================================================


@problem(10_000, "curved")
def seen_in_some_visits(rng, n):
    """Plots where a frog lives and is seen: the product is known well, its factors by plots visited again."""

    def model(visits, seen):
        lives = numpyro.sample("lives", dist.Beta(1, 1))
        found = numpyro.sample("found", dist.Beta(1, 1))
        with rows(seen.shape[0]):
            numpyro.sample("seen", dist.Bernoulli(probs=lives * (1 - (1 - found) ** visits)), obs=seen)

    visits = rng.choice([1.0, 2.0, 3.0], n, p=[0.6, 0.3, 0.1])
    return model, {"visits": visits, "seen": (rng.random(n) < 0.4 * (1 - 0.75**visits)).astype(int)}


@problem(15_000, "curved")
def uptake_at_low_doses(rng, n):
    """Michaelis and Menten, nearly straight over the doses that were given."""

    def model(dose, uptake):
        most = numpyro.sample("most", dist.LogNormal(3, 1))
        half = numpyro.sample("half", dist.LogNormal(1.5, 1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(10))
        with rows(uptake.shape[0]):
            numpyro.sample("uptake", dist.Normal(most * dose / (half + dose), sigma), obs=uptake)

    dose = rng.choice([0.5, 1.0, 1.5, 2.0], n)
    return model, {"dose": dose, "uptake": 25 * dose / (6 + dose) + 8 * rng.standard_normal(n)}


# == Wrong =============================================================================================================


@problem(10_000, "wrong")
def missing_ages_are_999(rng, n):
    """The codebook said so."""

    def model(age, statins, cholesterol):
        a = numpyro.sample("a", dist.Normal(200, 50))
        per_year = numpyro.sample("per_year", dist.Normal(0, 5))
        b_statins = numpyro.sample("b_statins", dist.Normal(0, 50))
        sigma = numpyro.sample("sigma", dist.HalfNormal(50))
        with rows(cholesterol.shape[0]):
            mean = a + per_year * (age - 50) + b_statins * statins
            numpyro.sample("cholesterol", dist.Normal(mean, sigma), obs=cholesterol)

    age = ages(rng, n, 20, 90)
    statins = flags(rng, n, expit((age - 70) / 8))
    cholesterol = 198 + 0.7 * (age - 50) - 38 * statins + 36 * rng.standard_normal(n)
    return model, {"age": np.where(rng.random(n) < 0.01, 999.0, age), "statins": statins, "cholesterol": cholesterol}


@problem(12_000, "wrong")
def some_incomes_are_monthly(rng, n):
    """One in twenty wrote the income of a month instead of that of a year."""

    def model(schooling, rural, income):
        a = numpyro.sample("a", dist.Normal(10, 2))
        b_schooling = numpyro.sample("b_schooling", dist.Normal(0, 0.5))
        b_rural = numpyro.sample("b_rural", dist.Normal(0, 1))
        sigma = numpyro.sample("sigma", dist.Exponential(1))
        with rows(income.shape[0]):
            loc = a + b_schooling * (schooling - 12) + b_rural * rural
            numpyro.sample("income", dist.LogNormal(loc, sigma), obs=income)

    schooling, rural = np.clip(np.round(rng.normal(12.2, 2.5, n)), 5, 20), flags(rng, n, 0.24)
    income = np.exp(10.1 + 0.09 * (schooling - 12) - 0.15 * rural + 0.5 * rng.standard_normal(n))
    return model, {"schooling": schooling, "rural": rural, "income": income / np.where(rng.random(n) < 0.05, 12, 1)}
