"""Models that people write, and kernels for them, each with a table and neighbours of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd

from numpyro_dp import DPHMC, DPSGLD, MCMC, DPBarker, DPExponentialFamily, DPPenalty, Preparation, scan
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.privacy.batches import FixedBatches

N, PERSONS = 240, 60
WHERE = 17  # the row, or the person, that differs
_rng = np.random.default_rng(4)
X = _rng.normal([0.0, 40.0], [1.0, 15.0], (N, 2)).astype(np.float32)
LINEAR = 0.5 * X[:, 0] - 0.03 * (X[:, 1] - 40)
GROUP = _rng.integers(0, 5, N).astype(np.int32)
PERSON = np.repeat(np.arange(PERSONS), N // PERSONS).astype(np.int32)
NORMAL = (LINEAR + _rng.normal(size=N)).astype(np.float32)
BITS = (_rng.random(N) < 1 / (1 + np.exp(-LINEAR))).astype(np.int32)
COUNTS = _rng.poisson(np.exp(0.5 * LINEAR)).astype(np.int32)
WAITED = _rng.gamma(2.0, np.exp(0.3 * LINEAR)).astype(np.float32)
DIED = _rng.integers(0, 2, N).astype(np.int32)
GRADES = np.clip(np.round(LINEAR + _rng.logistic(size=N)) + 1, 0, 3).astype(np.int32)

FAR = {"f": 1e4, "i": 1}
HOSTILE: list[dict[str, float]] = [
    {"f": 1e30, "i": 2**31 - 1},
    {"f": np.nan, "i": -1},
    {"f": -3e38, "i": -(2**31)},
    {"f": np.inf, "i": 3},
]


def line(X, scale=0.05):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, jnp.array([1.0, scale])).to_event(1))
    return a + X @ b


def outcome(num_rows, law, y):
    with numpyro.plate("rows", num_rows):
        numpyro.sample("y", law, obs=y)


def logistic(X, y):
    outcome(len(X), dist.Bernoulli(logits=line(X)), y)


def normal(X, y):
    outcome(len(X), dist.Normal(line(X), numpyro.sample("sigma", dist.HalfNormal(2.0))), y)


def poisson_of_groups(X, group, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 5):
        u = numpyro.sample("u", dist.Normal(0.0, scale))
    outcome(len(X), dist.Poisson(jnp.exp(line(X) + u[group])), y)


def negative_binomial(X, y):
    k = numpyro.sample("k", dist.Gamma(2.0, 0.5))
    outcome(len(X), dist.NegativeBinomial2(jnp.exp(line(X)), k), y)


def ordinal(X, y):
    first = numpyro.sample("first", dist.Normal(-1, 1))
    gaps = numpyro.sample("gaps", dist.HalfNormal(1.0).expand([2]).to_event(1))
    cuts = first + jnp.concatenate([jnp.zeros(1), jnp.cumsum(gaps)])
    outcome(len(X), dist.OrderedLogistic(line(X), cuts), y)


def categorical(X, y):
    b = numpyro.sample("b", dist.Normal(0, jnp.array([[1.0], [0.05]])).expand([2, 3]).to_event(2))
    logits = jnp.concatenate([jnp.zeros((len(X), 1)), X @ b], -1)
    outcome(len(X), dist.Categorical(logits=logits), y)


def student(X, y):
    nu = numpyro.sample("nu", dist.Gamma(4.0, 0.5))
    outcome(len(X), dist.StudentT(nu, line(X), numpyro.sample("sigma", dist.HalfNormal(2.0))), y)


def quantile(X, y):
    law = dist.AsymmetricLaplaceQuantile(line(X), numpyro.sample("sigma", dist.HalfNormal(2.0)), 0.75)
    outcome(len(X), law, y)


def censored(X, waited, died):
    shape, scale = numpyro.sample("shape", dist.LogNormal(0.0, 0.5)), jnp.exp(line(X))
    law = dist.Weibull(scale, shape)
    with numpyro.plate("rows", len(X)):
        survived = -((waited / scale) ** shape)
        numpyro.factor("y", jnp.where(died == 1, law.log_prob(waited), survived))


def zero_inflated(X, y):
    gate = numpyro.sample("gate", dist.Beta(1.0, 3.0))
    outcome(len(X), dist.ZeroInflatedPoisson(gate, jnp.exp(line(X))), y)


def missing(X, y):
    """A missing covariate is masked row by row."""
    is_there = jnp.isfinite(X).all(-1)
    logits = line(jnp.where(is_there[:, None], X, 0.0))
    with numpyro.plate("rows", len(X)), numpyro.handlers.mask(mask=is_there):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def mixture(X, y):
    middles = numpyro.sample("middles", dist.Normal(jnp.array([-1.0, 1.0]), 1.0).to_event(1))
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    laws = dist.Normal(line(X)[:, None] + middles, 1.0)
    outcome(len(X), dist.MixtureSameFamily(dist.Categorical(jnp.array([1 - share, share])), laws), y)


def of_persons(X, person, y, num_persons=PERSONS):
    """Effects of persons are integrated out."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("persons", num_persons):
        u = numpyro.sample("u", dist.Normal(0.0, scale))
    outcome(len(X), dist.Bernoulli(logits=line(X) + u[person]), y)


def one_person_one_law(X, person, y):
    outcome(len(X), dist.Normal(line(X), 1.0), y)


def intercept(y):
    outcome(len(y), dist.Bernoulli(logits=numpyro.sample("a", dist.Normal(0, 2))), y)


@dataclasses.dataclass(frozen=True)
class Case:
    """
    :ivar table: arguments of the model.
    :ivar options: of the kernel.
    :ivar public: those arguments that hold no rows.
    :ivar in_pieces: whether the table is read in pieces.
    """

    model: Callable
    table: dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    kernel: type[DPKernel] = DPHMC
    public: tuple[str, ...] = ()
    in_pieces: bool = False

    @property
    def relation(self) -> str:
        return self.options.get("neighboring_relation", "replace_one")


ADDED = {"neighboring_relation": "add_or_remove_one", "delta": 1e-4}
ZEROED = {"neighboring_relation": "zero_out"}
PLAIN = {"prepare": False, "clip_ratio": 0.5}
CASES = {
    "logistic": Case(logistic, {"X": X, "y": BITS}),
    "logistic, added": Case(logistic, {"X": X, "y": BITS}, ADDED),
    "logistic, zeroed": Case(logistic, {"X": X, "y": BITS}, ZEROED),
    "normal": Case(normal, {"X": X, "y": NORMAL}),
    "normal, added": Case(normal, {"X": X, "y": NORMAL}, ADDED),
    "normal, in pieces": Case(normal, {"X": X, "y": NORMAL}, in_pieces=True),
    "poisson of groups": Case(poisson_of_groups, {"X": X, "group": GROUP, "y": COUNTS}),
    "poisson of groups, added": Case(poisson_of_groups, {"X": X, "group": GROUP, "y": COUNTS}, ADDED),
    "negative binomial": Case(negative_binomial, {"X": X, "y": COUNTS}),
    "ordinal": Case(ordinal, {"X": X, "y": GRADES}),
    "categorical": Case(categorical, {"X": X, "y": np.minimum(GRADES, 3)}),
    "student": Case(student, {"X": X, "y": NORMAL}),
    "quantile": Case(quantile, {"X": X, "y": NORMAL}),
    "censored": Case(censored, {"X": X, "waited": WAITED, "died": DIED}),
    "zero-inflated": Case(zero_inflated, {"X": X, "y": COUNTS}),
    "missing": Case(missing, {"X": X, "y": BITS}),
    "mixture": Case(mixture, {"X": X, "y": NORMAL}),
    "persons": Case(of_persons, {"X": X, "person": PERSON, "y": BITS}, {"unit": "person"}, public=("person",)),
    "persons, zeroed": Case(
        of_persons, {"X": X, "person": PERSON, "y": BITS}, {"unit": "person"} | ZEROED, public=("person",)
    ),
    "rows of persons": Case(
        one_person_one_law, {"X": X, "person": PERSON, "y": NORMAL}, {"unit": "person"}, public=("person",)
    ),
    "persons in private": Case(
        one_person_one_law, {"X": X, "person": PERSON, "y": NORMAL}, {"unit": "person", "max_rows_per_unit": 3}
    ),
    "walk": Case(logistic, {"X": X, "y": BITS}, kernel=DPPenalty),
    "statistics": Case(intercept, {"y": BITS}, kernel=DPExponentialFamily),
    "plain hmc": Case(logistic, {"X": X, "y": BITS}, PLAIN | {"clip_grad": 0.5, "num_steps": 2}),
    "plain hmc, persons": Case(
        of_persons,
        {"X": X, "person": PERSON, "y": BITS},
        PLAIN | {"clip_grad": 0.5, "num_steps": 2, "unit": "person"},
        public=("person",),
    ),
    "plain penalty, added": Case(logistic, {"X": X, "y": BITS}, PLAIN | ADDED, DPPenalty),
    "plain penalty, on batches": Case(
        logistic, {"X": X, "y": BITS}, PLAIN | {"batch_size": FixedBatches(80)}, DPPenalty
    ),
    "plain barker": Case(logistic, {"X": X, "y": BITS}, PLAIN, DPBarker),
    "sgld on batches": Case(logistic, {"X": X, "y": BITS}, {"clip_grad": 0.5, "batch_size": 80}, DPSGLD),
}


def neighbours(case, hostile):
    """Tables that are neighbours of the first; in that, the unit is not there or is far out.

    :param hostile: what the row, or the person, holds in them.
    """
    hidden = [name for name in case.table if name not in (*case.public, "person")]
    own = PERSON == WHERE if "unit" in case.options else np.arange(N) == WHERE

    def holding(values):
        table = dict(case.table)
        for name in hidden:
            table[name] = table[name].copy()
            table[name][own] = values[table[name].dtype.kind]
        return table

    def only(table, kept):
        return {name: column[kept] for name, column in table.items()}

    others = [holding(values) for values in hostile]
    if case.relation == "add_or_remove_one":
        return [only(case.table, ~own), holding(FAR), *others, case.table]
    if "max_rows_per_unit" in case.options:  # that person has fewer rows, or more, and anywhere
        one = own & (np.cumsum(own) == 1)
        twice = np.concatenate([np.flatnonzero(own), np.arange(N)])
        others += [only(table, kept) for table in others[:2] for kept in (~own | one, twice)]
    return [holding(FAR), *others, case.table]


def run(case, table, eps):
    if case.in_pieces:
        columns = scan(pd.DataFrame({"x0": table["X"][:, 0], "x1": table["X"][:, 1], "y": table["y"]}))
        table = {"X": columns[["x0", "x1"]], "y": columns["y"]}
    forced = {"prepare": Preparation(force=True)} if case.kernel in (DPHMC, DPPenalty) else {}
    kernel = case.kernel(case.model, eps, **{"noise_seed": 1} | forced | case.options)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), **table)
    return mcmc.get_samples()
