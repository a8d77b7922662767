"""Continuous latents of rows and of units: what is found, how exactly they are integrated out, what is refused."""

import dataclasses
import gc
import warnings
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.mixed import MIXED, PERSONS, Mixed, log_density_by_grid, person, random_intercept, visits_of_a_row
from helpers.tiers import NIGHTLY, some_every_day
from numpyro.infer import Predictive

from numpyro_dp import MCMC, DPPenalty, UnsupportedModelError, to_arviz
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.model.coordinates import find_cut
from numpyro_dp.model.integration import log_integral, rules
from numpyro_dp.model.marginal import with_rule
from numpyro_dp.model.separate import separate
from numpyro_dp.model.units import group_rows
from numpyro_dp.privacy.isolation import alone

EVERYDAY = {"effect_of_some", "missing_covariate", "random_slope"}
CASES = some_every_day(sorted(MIXED), EVERYDAY)


def admitted(case: Mixed, rule=-1):
    """A case's model by unit, with one of the rules."""
    separated = separate(case.model, case.args, unit=case.unit)
    latents = dataclasses.replace(separated.latents, rule=rules(separated.latents.size)[rule])
    separated = dataclasses.replace(separated, latents=latents)
    return group_rows(separated, case.unit, case.args, {}) if case.unit else separated


def one_unit(separated, case, k):
    return tuple(part[k : k + 1] for part in separated.rows(case.args, {}))


def somewhere(separated, seed=1):
    return 0.7 * np.random.default_rng(seed).normal(size=separated.num_params)


# -- The integral ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.statistical
def test_a_units_density_is_the_integral_of_numpyros(name, x64):
    case = MIXED[name]
    separated = admitted(case)
    assert separated.latents.names == set(case.latents)
    assert separated.prototype.keys().isdisjoint(case.latents)
    assert set(separated.dropped_sites) == set(case.dropped)
    density, z = separated.row_log_density(case.args, {}), somewhere(separated)
    for k in (0, separated.num_rows - 1):
        unit, reference = one_unit(separated, case, k), log_density_by_grid(case, k)
        value, slope = jax.value_and_grad(density)(z, unit)
        expected, expected_slope = jax.value_and_grad(lambda z: reference(separated.unravel(z)))(z)  # noqa: B023
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(slope, expected_slope, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.statistical
@pytest.mark.parametrize("name", sorted(MIXED))
def test_the_cut_of_the_joint_density_gives_the_same(name, x64):
    case = MIXED[name]
    separated = admitted(case)
    cut, z = find_cut(separated.of_rows, case.args, {}), somewhere(separated)
    assert cut.size <= separated.num_params
    unit = one_unit(separated, case, 0)
    by_cut = separated.integrate(cut.parts)(cut.coordinates(z), unit)
    np.testing.assert_allclose(by_cut, separated.row_log_density(case.args, {})(z, unit), rtol=1e-9)
    if cut.drawn_parts is not None:
        words = jnp.array([3, 4], jnp.uint32)
        by_cut = separated.integrate(cut.drawn_parts)(cut.coordinates(z), unit, words)
        np.testing.assert_allclose(by_cut, separated.drawn_log_density(case.args, {})(z, unit, words), rtol=1e-9)


def test_a_hierarchy_of_groups_stays_before_the_cut():
    case = MIXED["random_intercept_beside_groups"]
    cut = find_cut(admitted(case).of_rows, case.args, {})
    assert cut.size == 4  # three groups' effects, and the scale of the persons'
    assert admitted(case).num_params == 6


@pytest.mark.parametrize("size", some_every_day([1, 2, 3, 4, 10], [2]))
@pytest.mark.statistical
def test_rules_are_exact_for_normal_densities(size, x64):
    rng = np.random.default_rng(size)
    root = rng.normal(size=(size, size)) + 2 * np.eye(size)

    def joint(z, w):
        return -jnp.sum((root @ (w - z[:size])) ** 2) * jnp.exp(z[size]) / 2

    def bind(z):
        return jnp.zeros(size), lambda w: -jnp.sum(w**2) / 200, lambda w: joint(z, w)

    z = jnp.asarray(rng.normal(size=size + 1))
    exact = size * np.log(2 * np.pi) / 2 - np.linalg.slogdet(root)[1] - size * z[size] / 2
    for rule in rules(size):
        value, slope = jax.value_and_grad(lambda z: log_integral(rule, bind, z))(z)  # noqa: B023
        np.testing.assert_allclose(value, exact, atol=1e-8)
        np.testing.assert_allclose(slope, [*np.zeros(size), -size / 2], atol=1e-7)


@pytest.mark.statistical
def test_a_path_of_ten_steps(x64):
    """Beyond three latents nodes are a lattice: against importance sampling of the prior, by its own error."""

    def volatility(returns):
        step, level = numpyro.sample("step", dist.HalfNormal(0.5)), numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("persons", returns.shape[0]):
            path = numpyro.sample("path", dist.GaussianRandomWalk(step, num_steps=10))
            numpyro.sample("returns", dist.Normal(0, jnp.exp(level + path)).to_event(1), obs=returns)

    rng = np.random.default_rng(0)
    returns = rng.normal(size=(7, 10)) * np.exp(0.3 * rng.normal(size=(7, 10)).cumsum(1))
    separated = separate(volatility, (returns,))
    density, z = separated.row_log_density((returns,), {}), separated.ravel({"step": jnp.log(0.3), "level": 0.0})
    paths = 0.3 * rng.normal(size=(200_000, 10)).cumsum(1)
    for row in returns[:3]:
        terms = dist.Normal(0, np.exp(paths)).log_prob(row).sum(-1)
        weights = np.exp(terms - terms.max())
        exact = terms.max() + np.log(weights.mean())
        error = weights.std() / weights.mean() / np.sqrt(len(weights))
        assert abs(density(z, (row[None],)) - exact) < 6 * error + 2e-3


# -- How many nodes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", some_every_day(["eight_schools", "random_slope", "random_intercept", "frailty"], ["random_intercept"])
)
@pytest.mark.statistical
def test_as_few_nodes_as_do(name, x64):
    case = MIXED[name]
    chosen = with_rule(admitted(case), case.args, {}, 10_000).latents
    known = [len(rule.nodes) for rule in rules(chosen.size)]
    assert chosen.error < 1.1e-3
    assert (len(chosen.rule.nodes) == known[0]) == case.exact
    # Of a table of whatever size 5e-4 is asked; the most nodes that there are leave slightly more for the frailty.
    assert with_rule(admitted(case), case.args, {}, None).latents.error < 1e-3


@NIGHTLY
@pytest.mark.statistical
def test_the_error_that_is_reported_is_that_of_other_rows(x64):
    """Mean scores of rows drawn from the model, by few nodes and by many."""
    case, n = MIXED["random_intercept"], 400
    rng = np.random.default_rng(8)
    args = (np.repeat(np.arange(n), 3), rng.normal(size=(3 * n, 2)), rng.integers(0, 2, 3 * n), n)
    case = dataclasses.replace(case, args=args)
    chosen, exact = with_rule(admitted(case), args, {}, n), admitted(case)
    z = jnp.array([0.5, -0.5, 0.0])

    def scores(separated):
        gradient = jax.grad(separated.row_log_density(args, {}))
        return np.asarray(jax.vmap(lambda *unit: gradient(z, tuple(x[None] for x in unit)))(*separated.rows(args, {})))

    few, many = scores(chosen), scores(exact)
    error = np.linalg.norm((few - many).mean(0)) / np.sqrt((many**2).sum(1).mean())
    assert error < 4 * max(chosen.latents.error, 1e-4)


# -- Rows that are drawn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", some_every_day(["random_intercept", "random_slope", "overdispersed_counts", "abilities"], ["abilities"])
)
@pytest.mark.statistical
def test_scores_of_rows_that_are_drawn_add_up_to_nothing(name, x64):
    """As scores do only if outcomes have the law that they are judged by, their latents integrated out."""
    case = MIXED[name]
    separated = admitted(case, 3)
    drawn, z = separated.drawn_log_density(case.args, {}), somewhere(separated)
    words = jnp.asarray(np.random.default_rng(0).integers(0, 2**32, (4000, 2)), jnp.uint32)
    unit = one_unit(separated, case, 0)
    scores = np.asarray(jax.jit(jax.vmap(lambda w: jax.grad(drawn)(z, unit, w)))(words))
    error = scores.std(0) / np.sqrt(len(scores))
    assert np.all(np.abs(scores.mean(0)) < 6 * error + 1e-6)


def test_what_was_observed_has_no_part_in_what_is_drawn():
    case = MIXED["random_intercept"]
    separated = admitted(case)
    unit, words = one_unit(separated, case, 0), jnp.array([1, 2], jnp.uint32)
    other = (*unit[:2], 1 - unit[2], *unit[3:])
    drawn, z = separated.drawn_log_density(case.args, {}), somewhere(separated)
    assert drawn(z, unit, words) == drawn(z, other, words)
    assert drawn(z, unit, words) != drawn(z, unit, words + 1)


# -- Any row -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_rows_are_alone(name):
    """No operation by which one unit could act on another, and no loop that a row could keep going."""
    case = MIXED[name]
    separated = admitted(case)
    rows = separated.rows(case.args, {})
    one_row = tuple(jax.ShapeDtypeStruct((1, *row.shape[1:]), row.dtype) for row in rows)
    density, z = separated.row_log_density(case.args, {}), somewhere(separated)
    alone(lambda row: jax.grad(lambda z: density(z, row))(z), one_row)


@pytest.mark.parametrize("bad", some_every_day([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0], [np.nan]))
@pytest.mark.parametrize(
    "name", some_every_day(["random_slope", "frailty", "measurement_error", "weights_of_rows"], ["random_slope"])
)
def test_hostile_rows_leave_others_alone(name, bad):
    case = MIXED[name]
    separated = admitted(case, 2)
    gradient, z = jax.grad(separated.row_log_density(case.args, {})), somewhere(separated)

    @jax.jit
    def scores(*rows):
        return jax.vmap(lambda *row: gradient(z, tuple(x[None] for x in row)))(*rows)

    rows = separated.rows(case.args, {})
    hostile = tuple(r.at[0].set(bad) if jnp.issubdtype(r.dtype, jnp.floating) else r for r in rows)
    np.testing.assert_array_equal(scores(*rows)[1:], scores(*hostile)[1:])


@pytest.mark.statistical
def test_units_that_say_little(x64):
    case = MIXED["random_intercept"]
    n = 6
    alike = np.repeat([0, 1, 1, 0, 1, 0], 3)
    args = (np.repeat(np.arange(n), 3), np.zeros((3 * n, 2)), alike, n)
    separated = admitted(dataclasses.replace(case, args=args))
    density = separated.row_log_density(args, {})
    for log_tau in (-9.0, 0.0, 2.0):
        unit = tuple(part[:1] for part in separated.rows(args, {}))
        value, slope = jax.value_and_grad(density)(jnp.array([0.0, 0.0, log_tau]), unit)
        assert np.isfinite(value)
        assert np.all(np.isfinite(slope))
        assert -3 * np.log(2) - 1e-6 <= value <= np.log(0.5) + 1e-6  # from independent to all alike
    unseen = MIXED["visits_of_a_row"]
    args = (unseen.args[0], np.zeros_like(unseen.args[1]), unseen.args[2])
    separated = separate(visits_of_a_row, args)
    row = tuple(part[:1] for part in separated.rows(args, {}))
    value, slope = jax.value_and_grad(separated.row_log_density(args, {}))(somewhere(separated), row)
    np.testing.assert_allclose([value, *slope], 0, atol=1e-7)


# -- Refusals ----------------------------------------------------------------------------------------------------------


def by_person(
    pick=lambda u, person: u[person], *, law=lambda tau, z: dist.Normal(0, tau), plate=True, own=False, total=False
):
    def model(person, x, y, num_persons, z=None):
        b, tau = numpyro.sample("b", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
        if plate:
            with numpyro.plate("persons", num_persons):
                u = numpyro.sample("u", law(tau, z))
        else:
            u = numpyro.sample("u", law(tau, z).expand([num_persons]))
        with numpyro.plate("rows", x.shape[0]):
            e = numpyro.sample("e", dist.Normal(0, 1)) if own else 0.0
            numpyro.sample("y", dist.Normal(b * x + pick(u, person) + e, 1.0), obs=y)
        if total:
            numpyro.factor("total", -(jnp.sum(u) ** 2))

    return model


P = 60
_codes = np.repeat(np.arange(P), 2)
_x = np.random.default_rng(0).normal(size=2 * P)
REFUSED = {
    "codes from 1": (by_person(lambda u, p: u[p - 1]), {}, "one value for each of the 60 units.*factorize"),
    "shared by two units": (by_person(lambda u, p: u[p // 2]), {}, "rows do not pick from it by 'person'"),
    "outside of the rows": (
        by_person(total=True),
        {},
        "site 'total' uses 'u', of which each unit has its own, outside",
    ),
    "more than a pick": (by_person(lambda u, p: u[p] + 0.01 * p), {}, "'person' does more than pick a row's own 'u'"),
    "codes with gaps": (by_person(), {"person": 2 * _codes}, "codes from 0 to 118, and plate 'persons' has 60"),
    "codes below 0": (by_person(), {"person": _codes - 1}, "codes from -1 to 58, and plate 'persons' has 60"),
    "nobody said how many": (by_person(), {"num_persons": 1}, "plate 'persons' has one member.*num_persons"),
    "texts": (by_person(), {"person": _codes.astype(str)}, "encode it as numbers"),
    "no plate": (by_person(plate=False), {}, "no plate, or rows do not pick"),
    "an array": (by_person(), {"unit": _codes}, "name the model's argument"),
    "covariates of units": (
        by_person(law=lambda tau, z: dist.Normal(z, tau)),
        {"z": np.arange(P) / P},
        "'z' has one entry for each member of plate 'persons'.*`z.person.`",
    ),
    "both rows and units": (by_person(own=True), {}, "each row has latents of its own, 'e', and each unit has 'u'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_integrated_out(kind):
    model, changes, words = REFUSED[kind]
    args = (changes.get("person", _codes), _x, _x, changes.get("num_persons", P), changes.get("z"))
    with pytest.raises((UnsupportedModelError, ValueError), match=f"(?s){words}"):
        DPKernel.separate(DPPenalty(model, eps=1.0, unit=changes.get("unit", "person")), args, {})


def _mean_of_unit(person, x, y):
    numbers = jax.ops.segment_sum(jnp.ones_like(x), person, P)
    return x - (jax.ops.segment_sum(x, person, P) / jnp.maximum(numbers, 1))[person]


def _row_before(person, x, y):
    return x + jnp.concatenate([jnp.zeros(1), jnp.where(person[1:] == person[:-1], y[:-1], 0.0)])


@pytest.mark.parametrize("mix", [_mean_of_unit, _row_before])
def test_rows_of_a_unit_that_are_mixed(mix):
    """Beside latents of units: rows of one unit differ, or nobody would see it."""

    def model(person, x, y):
        b, tau = numpyro.sample("b", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("persons", P):
            u = numpyro.sample("u", dist.Normal(0, tau))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b * mix(person, x, y) + u[person], 1.0), obs=y)

    with pytest.raises(UnsupportedModelError, match="rows are mixed"):
        DPKernel.separate(DPPenalty(model, eps=1.0, unit="person"), (_codes, _x, _x), {})


@pytest.mark.parametrize("lookup", [np.arange(30) % 5, np.arange(30) // 6, np.arange(30) // 3])
def test_effects_of_groups_that_units_share_are_parameters(lookup):
    def model(school, y, groups):
        mu, tau = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("regions", groups):
            v = numpyro.sample("v", dist.Normal(0, tau))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + v[jnp.asarray(lookup)[school]], 1.0), obs=y)

    args = (np.arange(90) % 30, _x[:90], int(lookup.max()) + 1)
    separated = separate(model, args, unit="school", private_args=["school", "y"])
    assert separated.latents is None
    assert "v" in separated.prototype


def test_small_integers_as_codes():
    separated = separate(by_person(), (_codes.astype(np.int8), _x, _x, 100), unit="person")
    assert separated.latents.names == {"u"}


@pytest.mark.statistical
def test_laws_that_cannot_be_drawn_from():
    model, args = by_person(law=lambda tau, z: dist.ImproperUniform(dist.constraints.real, (), ())), (_codes, _x, _x, P)
    assert np.isfinite(with_rule(separate(model, args, unit="person"), args, {}, P).latents.error)


def counts(c):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 3)), numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("rows", c.shape[0]):
        u = numpyro.sample("u", dist.Normal(mu, tau))
        numpyro.sample("c", dist.Poisson(jnp.exp(u)), obs=c)


@pytest.mark.statistical
def test_counts_far_above_their_mean(x64):
    """Newton's steps would overshoot a hundredfold."""
    column = np.array([0, 1_000, 5_000])
    separated = with_rule(separate(counts, (column,)), (column,), {}, 3_000)
    density, z = separated.row_log_density((column,), {}), jnp.array([np.log(20.0), np.log(2.0)])
    for k in range(3):
        value, slope = jax.value_and_grad(density)(z, (column[k : k + 1],))
        grid = log_density_by_grid(Mixed(counts, (column,), ("u",)), k)
        expected = jax.grad(lambda z: grid({"mu": z[0], "tau": z[1]}))(z)  # noqa: B023
        np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(value, grid({"mu": z[0], "tau": z[1]}), atol=1e-3)


@pytest.mark.statistical
def test_an_integral_that_misses_a_hump_says_so():
    def model(y):
        m = numpyro.sample("m", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            humps = dist.Normal(jnp.array([-3.0, 3.0]) + m, 0.3)
            u = numpyro.sample("u", dist.MixtureSameFamily(dist.Categorical(jnp.array([0.5, 0.5])), humps))
            numpyro.sample("y", dist.Normal(u, 2.0), obs=y)

    kernel = DPPenalty(model, eps=1.0, prepare=False)
    kernel.separate((_x,), {})
    assert "latents 'u' are integrated out with an error of" in " ".join(kernel.doubts())


def test_crossed_effects_of_few_groups_are_parameters():
    def model(person, item, y, num_persons):
        with numpyro.plate("persons", num_persons):
            u = numpyro.sample("u", dist.Normal(0, 1))
        with numpyro.plate("items", 4):
            v = numpyro.sample("v", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(u[person] + v[item], 1.0), obs=y)

    separated = separate(model, (_codes, _codes % 4, _x, P), unit="person")
    assert separated.latents.names == {"u"}
    assert separated.prototype.keys() == {"v"}


# -- Published estimates, and the kernels ------------------------------------------------------------------------------


def _dietox():
    """Weights of 72 pigs, week by week."""
    import pandas
    import statsmodels

    folder = Path(statsmodels.__file__).parent / "regression/tests/results"
    table = pandas.read_csv(folder / "dietox.csv")
    return table["Pig"].factorize()[0], table[["Time"]].to_numpy(float), table["Weight"].to_numpy(float)


def _grunfeld():
    """Investment of eleven firms, year by year."""
    from statsmodels.datasets import grunfeld

    table = grunfeld.load_pandas().data
    return table["firm"].factorize()[0], table[["value", "capital"]].to_numpy(float), table["invest"].to_numpy(float)


@pytest.mark.parametrize(
    ("load", "slope"),
    [
        (_dietox, True),
        *(pytest.param(*case, marks=NIGHTLY) for case in [(_dietox, False), (_grunfeld, False), (_grunfeld, True)]),
    ],
)
@pytest.mark.statistical
def test_likelihoods_of_statsmodels(load, slope, x64):
    """Real tables: the log likelihood where `MixedLM` ends, and, where it says that it is there, the maximum."""
    from statsmodels.regression.mixed_linear_model import MixedLM
    from statsmodels.tools.sm_exceptions import ModelWarning

    unit, x, outcome = load()
    fixed, outcome = np.column_stack([np.ones(len(x)), x / x.std(0)]), outcome / outcome.std()
    varying = fixed[:, :2] if slope else fixed[:, :1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        found = MixedLM(outcome, fixed, unit, exog_re=varying).fit(reml=False)
    q = varying.shape[1]

    def model(unit, fixed, varying, outcome, units):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([fixed.shape[1]]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        spread = numpyro.sample("spread", dist.HalfNormal(1).expand([q]).to_event(1))
        root = numpyro.sample("root", dist.LKJCholesky(q, 1.0)) if slope else jnp.eye(1)
        with numpyro.plate("units", units):
            u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(q), scale_tril=spread[:, None] * root))
        with numpyro.plate("rows", fixed.shape[0]):
            mean = fixed @ b + jnp.sum(varying * u[unit], -1)
            numpyro.sample("outcome", dist.Normal(mean, sigma), obs=outcome)

    args = (unit, fixed, varying, outcome, int(unit.max()) + 1)
    separated = admitted(Mixed(model, args, ("u",), unit="unit"), 0)
    covariance = np.asarray(found.cov_re)
    spread = np.sqrt(np.diag(covariance))
    z = {"b": np.asarray(found.fe_params), "sigma": np.log(found.scale) / 2, "spread": np.log(spread)}
    if slope:
        z["root"] = np.arctanh(covariance[1:2, 0] / spread.prod())
    density = separated.row_log_density(args, {})

    def total(z):
        each = jax.vmap(lambda *unit: density(z, tuple(part[None] for part in unit)))(*separated.rows(args, {}))
        return jnp.sum(each)

    z = separated.ravel(jax.tree.map(jnp.asarray, z))
    value, slopes = jax.value_and_grad(total)(z)
    np.testing.assert_allclose(value, found.llf, rtol=1e-6)
    if found.converged and not slope:
        information = -jax.hessian(total)(z)
        standard_errors = jnp.linalg.solve(information, slopes) * jnp.sqrt(jnp.diagonal(information))
        np.testing.assert_allclose(standard_errors, 0, atol=1e-2)


def test_what_is_computed_from_latents_is_no_sample():
    def model(person, y, persons):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.deterministic("twice", 2 * mu)
        with numpyro.plate("persons", persons):
            u = numpyro.sample("u", dist.Normal(mu, 1))
        numpyro.deterministic("mean", jnp.mean(u))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(u[person], 1.0), obs=y)

    args = (_codes, _x, P)
    separated = separate(model, args, unit="person")
    assert separated.dropped_sites == {"mean": "computed from latents that are integrated out"}
    assert separated.constrain(args, {})({"mu": jnp.ones(())}).keys() == {"mu", "twice"}


@pytest.mark.parametrize("drawn", [False, True])
def test_who_keeps_a_density_keeps_no_table(drawn):
    case = MIXED["random_intercept"]
    separated, table = admitted(case), case.args[1].copy()
    args = (case.args[0], table, *case.args[2:])
    density = separated.drawn_log_density(args, {}) if drawn else separated.row_log_density(args, {})
    kept = weakref.ref(table)
    del table, args
    gc.collect()
    assert kept() is None
    del density


@pytest.mark.parametrize("is_public", [True, False])
def test_nodes_do_not_go_by_a_private_number_of_units(is_public, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "numpyro_dp.kernels.reading.with_rule", lambda separated, args, kwargs, n: asked.append(n) or separated
    )
    monkeypatch.setattr("numpyro_dp.kernels.reading.doubts_of_latents", lambda separated, n: asked.append(n) or [])
    private = {"max_rows_per_unit": 9, "neighboring_relation": "add_or_remove_one", "delta": 1e-4}
    options = {} if is_public else private | {"private_args": ["person", "X", "y"]}
    kernel = DPPenalty(random_intercept, eps=5.0, unit="person", prepare=False, **options)
    kernel.separate(MIXED["random_intercept"].args, {})
    assert asked == [PERSONS if is_public else None] * 2


@pytest.mark.statistical
def test_a_run_and_what_it_says():
    args = MIXED["random_intercept"].args
    kernel = DPPenalty(random_intercept, eps=5.0, unit="person", prepare=False)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=6, progress_bar=False)
    mcmc.run(jax.random.key(0), *args)
    samples = mcmc.get_samples()
    assert samples.keys() == {"b", "tau"}
    assert "integrated out: by" in mcmc.privacy.dropped_sites["u"]
    assert "left out     site 'u' (one value for each unit would publish it" in str(mcmc.privacy)
    assert set(to_arviz(mcmc)["posterior"].data_vars) == {"b", "tau"}
    newcomers = (np.array([0, 0, 1]), np.zeros((3, 2)), None, 2)
    drawn = Predictive(random_intercept, samples, return_sites=["u", "y"])(jax.random.key(1), *newcomers)
    assert drawn["u"].shape == (6, 2)
    assert len(np.unique(drawn["u"])) == 12
    assert drawn["y"].shape == (6, 3)
    assert len(person) > PERSONS
