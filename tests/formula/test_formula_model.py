"""The models that formulas make: plain NumPyro models, whose densities are those that the formulas mean."""

import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from helpers.tiers import needs_support, some_every_day
from numpyro.handlers import seed, substitute, trace
from scipy import stats
from scipy.special import expit, softmax

from numpyro_dp import DPHMC, MCMC, FormulaModel, PosteriorWarning, PrivacyBudgetError, glm, to_arviz
from numpyro_dp.formula.families import FAMILIES

N = 40
_rng = np.random.default_rng(0)
AGE = _rng.uniform(20, 80, N)
MALE = _rng.integers(0, 2, N)
CLINIC = _rng.integers(0, 3, N)
TABLE = pd.DataFrame({"age": AGE, "sex": np.where(MALE, "m", "f"), "clinic": CLINIC})
RANGES, LEVELS = {"age": (0, 100)}, {"sex": ["f", "m"], "clinic": [0, 1, 2]}
VALUES = {
    "Intercept": 0.3,
    "age": 0.01,
    "C(sex)[T.m]": -0.4,
    "1|clinic_sigma": 0.5,
    "1|clinic": np.array([0.2, -0.3, 0.1]),
}
ETA = 0.3 + 0.01 * (AGE - 50) - 0.4 * (MALE - 0.5) + VALUES["1|clinic"][CLINIC]

COUNTS = _rng.poisson(2, N)
GRADES = _rng.integers(0, 3, N)
POSITIVE = _rng.gamma(2, 1, N)
SHARES = _rng.beta(2, 3, N)
NAMES = np.array(["low", "mid", "high"])
CUTS = np.array([-0.5, 0.8])

# Outcomes, further parameters, and the log likelihood by hand.
CASES = {
    "gaussian": (POSITIVE, {"sigma": 1.5}, lambda y: stats.norm.logpdf(y, ETA, 1.5)),
    "student_t": (POSITIVE, {"sigma": 1.5, "df": 4.0}, lambda y: stats.t.logpdf(y, 4, ETA, 1.5)),
    "bernoulli": (MALE, {}, lambda y: stats.bernoulli.logpmf(y, expit(ETA))),
    "poisson": (COUNTS, {}, lambda y: stats.poisson.logpmf(y, np.exp(ETA))),
    "negative_binomial": (
        COUNTS,
        {"concentration": 3.0},
        lambda y: stats.nbinom.logpmf(y, 3, 3 / (3 + np.exp(ETA))),
    ),
    "gamma": (POSITIVE, {"shape": 2.0}, lambda y: stats.gamma.logpdf(y, 2, scale=np.exp(ETA) / 2)),
    "beta": (SHARES, {"precision": 5.0}, lambda y: stats.beta.logpdf(y, 5 * expit(ETA), 5 * expit(-ETA))),
}


GRADED = ("ordinal", "categorical")


def log_likelihood(model, values, arguments):
    sites = trace(substitute(seed(model, 0), values)).get_trace(**arguments)
    site = sites["out"]
    return np.asarray(site["fn"].log_prob(site["value"]))


def made(family, formula="out ~ age + C(sex) + (1 | clinic)", ranges=None, levels=None, **options):
    outcome = {} if family not in ("gaussian", "student_t", "gamma") else {"out": (0.1, 10)}
    return FormulaModel(
        formula, family, ranges=RANGES | outcome | (ranges or {}), levels=LEVELS | (levels or {}), **options
    )


@pytest.mark.parametrize("family", CASES)
def test_the_density_is_that_of_the_family(family):
    outcomes, others, by_hand = CASES[family]
    arguments = made(family).arguments(TABLE.assign(out=outcomes))
    found = log_likelihood(made(family), VALUES | others, arguments)
    y = outcomes.astype(np.float32).astype(float) if outcomes.dtype.kind == "f" else outcomes
    np.testing.assert_allclose(found, by_hand(y), rtol=1e-3, atol=2e-3)


def test_grades_have_cut_points_in_the_place_of_an_intercept():
    model = made("ordinal", levels={"out": ["low", "mid", "high"]})
    arguments = model.arguments(TABLE.assign(out=NAMES[GRADES]))
    found = log_likelihood(model, VALUES | {"cuts": CUTS}, arguments)
    below = expit(np.append(CUTS, np.inf) - (ETA - 0.3)[:, None])
    chances = np.diff(below, axis=1, prepend=0)
    np.testing.assert_allclose(found, np.log(chances[np.arange(N), GRADES]), rtol=1e-3, atol=1e-4)


def test_categories_have_a_predictor_for_each_but_the_first():
    model = made("categorical", "out ~ age + C(sex)", levels={"out": ["low", "mid", "high"]})
    values = {"Intercept": np.array([0.1, 0.2]), "age": np.array([0.01, -0.02]), "C(sex)[T.m]": np.array([0.3, -0.1])}
    eta = values["Intercept"] + np.outer(AGE - 50, values["age"]) + np.outer(MALE - 0.5, values["C(sex)[T.m]"])
    found = log_likelihood(model, values, model.arguments(TABLE.assign(out=NAMES[GRADES])))
    chances = softmax(np.column_stack([np.zeros(N), eta]), axis=1)
    np.testing.assert_allclose(found, np.log(chances[np.arange(N), GRADES]), rtol=1e-3, atol=1e-4)


OUTCOMES = {family: outcomes for family, (outcomes, *_) in CASES.items()} | dict.fromkeys(GRADED, NAMES[GRADES])


@pytest.mark.filterwarnings("ignore:the outcome .out. is a column of objects:UserWarning")
@needs_support
@pytest.mark.filterwarnings("ignore:Out-of-support values")
@pytest.mark.parametrize("family", OUTCOMES)
def test_what_is_not_public_has_no_density_and_what_is_missing_that_of_nothing(family):
    """Rows without a density are counted, and the posterior is not vouched for where there are many."""
    levels = {"out": ["low", "mid", "high"]} if family in GRADED else {}
    model = made(family, "out ~ age + C(sex)", levels=levels)
    table = TABLE.assign(out=OUTCOMES[family]).astype({"sex": object, "out": object, "age": float})
    table.loc[0, "age"], table.loc[1, "sex"], table.loc[2, "out"] = 101.0, "F", "no such outcome"
    table.loc[3, "age"], table.loc[4, "sex"], table.loc[5, "out"] = np.nan, None, None
    arguments = model.arguments(table)
    is_whole = family in ("bernoulli", "poisson", "negative_binomial", *GRADED)
    assert arguments["y"].dtype == (np.int32 if is_whole else np.float32)
    sites = trace(seed(model, 0)).get_trace(**arguments)
    values = {name: site["value"] / 10 for name, site in sites.items() if site["type"] == "sample" and name != "out"}
    found = log_likelihood(model, values, arguments)
    assert np.isneginf(found[:3]).all()
    np.testing.assert_array_equal(found[3:6], 0)
    assert np.isfinite(found[6:]).all()
    assert (found[6:] != 0).all()


@needs_support
@pytest.mark.statistical
def test_glm_does_not_vouch_for_a_posterior_of_what_was_left_when_a_level_was_forgotten():
    rng = np.random.default_rng(0)
    table = {"age": rng.uniform(20, 80, 4_000), "out": rng.choice(["no", "yes", "perhaps"], 4_000)}
    with pytest.warns(PosteriorWarning, match=r"3\d\.\d% more of them .* outside of a formula's `ranges` or `levels`"):
        glm(
            "out ~ age", table, "bernoulli", eps=3.0, ranges=RANGES, levels={"out": ["no", "yes"]},
            num_warmup=10, num_samples=20, progress_bar=False, verbose=False,
        )  # fmt: skip


def test_slopes_of_groups_offsets_and_outcomes_that_are_transformed():
    model = FormulaModel(
        "log(out) ~ age + (1 + age | clinic)",
        ranges=RANGES | {"out": (0.1, 10), "years": (1, 5)},
        levels=LEVELS,
        offset="log(years)",
    )
    years = _rng.uniform(1, 5, N)
    arguments = model.arguments(TABLE.assign(out=POSITIVE, years=years))
    slopes = np.array([0.02, -0.01, 0.0])
    values = {"Intercept": 0.3, "age": 0.01, "1|clinic": VALUES["1|clinic"], "age|clinic": slopes, "sigma": 0.7}
    values |= {"1|clinic_sigma": 0.5, "age|clinic_sigma": 0.02}
    eta = 0.3 + 0.01 * (AGE - 50) + VALUES["1|clinic"][CLINIC] + slopes[CLINIC] * (AGE - 50) + np.log(years)
    expected = stats.norm.logpdf(np.log(POSITIVE), eta, 0.7)
    np.testing.assert_allclose(log_likelihood_of(model, values, arguments), expected, rtol=1e-3, atol=1e-3)


def log_likelihood_of(model, values, arguments):
    sites = trace(substitute(seed(model, 0), values)).get_trace(**arguments)
    (site,) = (site for site in sites.values() if site["type"] == "sample" and site["is_observed"])
    return np.asarray(site["fn"].log_prob(site["value"]))


def test_priors_are_as_wide_as_the_public_ranges_say():
    """2.5 scales of the linear predictor, over the spread of the column: as rstanarm's, by what is public."""
    sites = trace(seed(made("gaussian"), 0)).get_trace(**made("gaussian").arguments(TABLE.assign(out=POSITIVE)))
    scale = (10 - 0.1) / 4
    assert sites["age"]["fn"].scale == pytest.approx(2.5 * scale / (100 / np.sqrt(12)), rel=1e-2)
    assert sites["Intercept"]["fn"].loc == pytest.approx((10 + 0.1) / 2, rel=1e-3)
    assert sites["sigma"]["fn"].scale == pytest.approx(scale, rel=1e-3)
    assert sites["1|clinic_sigma"]["fn"].scale == pytest.approx(2.5 * scale, rel=1e-3)


def test_an_intercept_makes_up_for_the_offset():
    """Of cases in towns of 1,000 to 1,000,000 people, the rate's logarithm is about -10, not 0."""
    model = FormulaModel("out ~ 1", "poisson", ranges={"people": (1e3, 1e6)}, offset="log(people)")
    arguments = model.arguments(pd.DataFrame({"out": COUNTS, "people": np.full(N, 5e4)}))
    prior = trace(seed(model, 0)).get_trace(**arguments)["Intercept"]["fn"]
    assert prior.loc == pytest.approx(-np.log(10) * 4.5, rel=1e-5)
    assert prior.scale == pytest.approx(np.hypot(2.5, np.log(10) * 1.5), rel=1e-2)


def test_the_text_is_the_model():
    """Copied into a file, it is the same model."""
    model = made("poisson")
    names = {"jax": jax, "jnp": jnp, "numpyro": numpyro, "dist": dist}
    exec(str(model), names)
    arguments = model.arguments(TABLE.assign(out=COUNTS))
    np.testing.assert_array_equal(
        log_likelihood(names["model"], VALUES, arguments), log_likelihood(model, VALUES, arguments)
    )
    assert list(inspect.signature(model).parameters) == ["X", "clinic", "observed", "y"]
    assert pickle.loads(pickle.dumps(model)).source == model.source


@pytest.mark.parametrize(
    ("family", "formula", "options", "message"),
    [
        ("gauss", "out ~ age", {}, "family must be one of gaussian, student_t"),
        ("gaussian", "out ~ age", {"ranges": {"age": (0, 1)}}, "needs a public range of the outcome"),
        ("ordinal", "out ~ age", {"ranges": {"age": (0, 1)}}, "needs the outcome's levels"),
        ("poisson", "out ~ height", {}, r"ranges=\{'height': \(lowest, highest\)\}"),
        ("poisson", "out ~ 1 + (1 | clinic)", {}, "nothing is public about 'clinic'"),
        ("poisson", "out ~ 1 + (1 | g)", {"ranges": {"g": (0, 1)}}, "not a range"),
        ("poisson", "out ~ age", {"ranges": {"age": (0, 1)}, "levels": {"out": [0, 1]}}, "has levels, but the family"),
        (
            "ordinal",
            "out ~ 0 + age",
            {"ranges": {"age": (0, 1)}, "levels": {"out": [0, 1]}},
            "the cut points are the intercepts",
        ),
        (
            "poisson",
            "out ~ (1 | g) + (0 + age | g)",
            {"ranges": {"age": (0, 1)}, "levels": {"g": [0, 1]}},
            "in one bracket",
        ),
        (
            "gaussian",
            "log(out) ~ age",
            {"ranges": {"age": (0, 1), "out": (0, 5)}},
            "not finite, or falls, on the range 0 to 5",
        ),
        (
            "poisson",
            "out ~ 1",
            {"levels": {"t": [1, 2, 5]}, "offset": "log(t)"},
            "a number needs a range, not levels",
        ),
        ("poisson", "out ~ 1", {"ranges": {"t": (0, 10)}, "offset": "log(t)"}, r"log\(t\) is not finite on all"),
        ("poisson", "out ~ 1", {"ranges": {"out": (-5, 0)}}, "must reach above 0"),
        ("categorical", "out ~ 1", {"ranges": {"t": (1, 2)}, "levels": {"out": [0, 1]}, "offset": "t"}, "or an offset"),
        ("poisson", "out ~ smokes", {}, r"\[False, True\]"),
        ("poisson", "out ~ I(2 * arm)", {"levels": {"arm": ["a", "b"]}}, "a number needs ranges"),
        ("poisson", "out ~ (1 | g) + (1 | g_sd)", {"levels": {"g": [0, 1], "g_sd": [0, 1]}}, "rename column 'g_sd'"),
        ("poisson", "out ~ arm", {"levels": {"arm": ["a\n", "b"]}}, "use printable characters"),
        ("poisson", "out ~ \u00b5g", {"ranges": {"\u00b5g": (0, 1)}}, "Python reads it as"),
        ("poisson", "out ~ Intercept", {"ranges": {"Intercept": (0, 1)}}, "rename column 'Intercept'"),
        ("poisson", "out ~ (-1 | g)", {"levels": {"g": [0, 1]}}, "no effect of the group is left"),
        ("bernoulli", "I(1 - out) ~ 1", {"levels": {"out": [0, 1]}}, "is arithmetic, but 'out' has levels"),
        ("poisson", "out ~ age", {"ranges": {"age": (1e308, 1.7e308)}}, "must be finite"),
    ],
)
def test_what_is_missing_is_said_before_a_table_is_there(family, formula, options, message):
    with pytest.raises(ValueError, match=message):
        FormulaModel(formula, family, **options)


def test_names_do_not_collide():
    levels = {"sigma": ["a", "b"], "class": [0, 1], "out": [0, 1, 2]}
    model = FormulaModel("out ~ age + (1 | sigma) + (1 | class)", "ordinal", ranges=RANGES, levels=levels)
    assert list(inspect.signature(model).parameters) == ["X", "sigma_", "class_", "observed", "y"]
    with pytest.raises(ValueError, match="rename column 'sigma'"):
        FormulaModel("out ~ sigma", ranges={"sigma": (0, 1), "out": (0, 1)})
    with pytest.raises(ValueError, match=r"levels=\{'age': \[...\]\}, not a range"):
        FormulaModel("out ~ C(age)", "poisson", ranges=RANGES)


def test_whose_rows_are_whose_is_public():
    with pytest.raises(ValueError, match="it is public whose each row is"):
        glm("out ~ age", TABLE.assign(out=COUNTS), "poisson", eps=1.0, unit="clinic", max_rows_per_unit=3)
    options = {"unit": "clinic", "neighboring_relation": "add_or_remove_one", "delta": 1e-4}
    with pytest.raises(ValueError, match="how many units there are would be private"):
        glm("out ~ age", TABLE.assign(out=COUNTS), "poisson", eps=1.0, **options)


def test_every_family_is_tested():
    assert {*CASES, "ordinal", "categorical"} == set(FAMILIES)


def people(n, seed):
    rng = np.random.default_rng(seed)
    table = pd.DataFrame(
        {"age": rng.uniform(18, 90, n), "smokes": rng.random(n) < 0.3, "clinic": rng.choice(list("abcd"), n)}
    )
    effect = dict(zip("abcd", [0.4, -0.3, 0.0, 0.2], strict=True))
    rate = np.exp(0.3 + 0.015 * (table.age - 50) + 0.5 * (table.smokes - 0.5) + table.clinic.map(effect))
    return table.assign(visits=rng.poisson(rate))


@pytest.mark.statistical
@pytest.mark.nightly  # every day test_documented.py fits one
def test_glm_goes_from_a_frame_to_a_posterior(capsys):
    table = people(20_000, 0)
    table.loc[::50, "age"] = np.nan
    table = table.astype({"smokes": object})
    table.loc[1::50, "smokes"] = None
    mcmc = glm(
        "visits ~ age + smokes + (1 | clinic)",
        table,
        "poisson",
        eps=3.0,
        ranges={"age": (0, 100)},
        levels={"clinic": list("abcd"), "smokes": [False, True]},
        num_warmup=300,
        num_samples=500,
        progress_bar=False,
    )
    assert "dist.Poisson(jnp.exp(eta))" in capsys.readouterr().out
    draws = mcmc.get_samples()
    for name, truth in {"age": 0.015, "smokes[T.True]": 0.5}.items():
        assert abs(draws[name].mean() - truth) < 6 * draws[name].std()
        assert draws[name].std() < 0.1 * truth
    assert (mcmc.privacy.eps, mcmc.privacy.posterior.trusted) == (3.0, True)
    assert {"X", "clinic", "observed", "y"} == {text.split()[0] for text in mcmc.privacy.private_arguments}
    model, idata = mcmc.sampler.settings.model, to_arviz(mcmc)
    assert list(idata["posterior"]["clinic"].values) == list("abcd")
    again = pickle.loads(pickle.dumps(mcmc))
    assert again.sampler.settings.model.source == model.source
    public = model.arguments({"age": [40.0], "smokes": [True], "clinic": ["b"]})
    predicted = numpyro.infer.Predictive(model, draws)(jax.random.key(1), **public)["visits"]
    assert predicted.shape == (500, 1)
    assert 0.5 < predicted.mean() < 3


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::numpyro_dp.PosteriorWarning")
def test_glm_of_persons_with_several_rows():
    """Effects of the protected unit are integrated out; ids may be texts."""
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(3_000), 3)
    age = rng.uniform(18, 90, 3_000)[person]
    eta = -0.2 + 0.03 * (age - 50) + rng.normal(0, 0.8, 3_000)[person]
    table = pd.DataFrame({"age": age, "ill": rng.random(9_000) < expit(eta), "person": [f"p{k}" for k in person]})
    mcmc = glm(
        "ill ~ age + (1 | person)",
        table,
        "bernoulli",
        eps=3.0,
        ranges={"age": (0, 100)},
        unit="person",
        progress_bar=False,
    )
    draws = mcmc.get_samples()
    assert set(draws) == {"Intercept", "age", "1|person_sigma"}
    assert abs(draws["age"].mean() - 0.03) < 6 * draws["age"].std()
    assert "person" in mcmc.privacy.unit


@pytest.mark.parametrize("formula", ["ill ~ age", "ill ~ age + (1 | person)"])
def test_a_row_without_an_id_is_nobodys(formula):
    """All of them together would be one more person."""
    table = pd.DataFrame({"age": [30.0, 40.0] * 10, "ill": [0, 1] * 10, "person": [1.0, None] * 10})
    model = FormulaModel(formula, "bernoulli", ranges={"age": (0, 100)}, unit="person")
    with pytest.raises(ValueError, match="unit='person': some rows have no id there"):
        model.arguments(table)


def test_without_validation_what_is_not_public_says_nothing_either(monkeypatch):
    table = pd.DataFrame({"age": [30.0, 105.0, 40.0], "ill": [0, 1, 2]})
    model = FormulaModel("ill ~ age", "bernoulli", ranges={"age": (0, 100)})
    # NumPyro's own context would leave validation on where it was off, before 0.22.
    monkeypatch.setattr(dist.Distribution, "_validate_args", False)
    assert model.arguments(table)["observed"].tolist() == [True, False, False]


def test_who_predicts_for_somebody_who_is_not_public_is_told():
    model = FormulaModel("ill ~ age", "bernoulli", ranges={"age": (0, 100)})
    with pytest.warns(UserWarning, match="some rows have a missing value, or one that was not said to be public"):
        found = model.arguments({"age": np.array([30.0, 105.0, np.nan])})
    assert found["observed"].tolist() == [True, False, False]


def test_an_unneeded_unit_is_still_the_unit():
    table = pd.DataFrame({"age": [30.0, 40.0] * 10, "ill": [0, 1] * 10, "person": np.repeat(np.arange(10), 2)})
    model = FormulaModel("ill ~ age", "bernoulli", ranges={"age": (0, 100)}, unit="person")
    assert list(inspect.signature(model).parameters) == ["X", "person", "observed", "y"]
    kernel = DPHMC(model, eps=1.0, unit="person")
    with pytest.raises(PrivacyBudgetError, match="10 units"):
        MCMC(kernel, num_warmup=5, num_samples=5).run(jax.random.key(0), **model.arguments(table))


def test_coefficients_without_an_intercept_reach_where_outcomes_are():
    model = FormulaModel("out ~ 0 + C(sex)", ranges={"out": (1000, 1010)}, levels=LEVELS)
    sites = trace(seed(model, 0)).get_trace(**model.arguments(TABLE.assign(out=1005.0)))
    assert sites["C(sex)[f]"]["fn"].scale == pytest.approx(1005 / np.sqrt(0.5), rel=1e-2)


def test_positive_outcomes_have_an_intercept_on_their_scale():
    small = FormulaModel("out ~ 1", "gamma", ranges={"out": (1e-6, 1e-4)})
    assert f"dist.Normal({np.log(1e-5):.6f}"[:20] in str(small)
    assert "dist.Normal(0.30258509" in str(FormulaModel("out ~ 1", "gamma", ranges={"out": (0, 10)}))


def test_outcomes_that_single_precision_makes_impossible_are_none():
    beta = FormulaModel("out ~ 1", "beta").arguments({"out": [0.5, 1 - 1e-12, 1e-50, 1.0, 1e-40]})
    np.testing.assert_array_equal(np.isnan(beta["y"]), [False, True, True, True, True])


@pytest.mark.parametrize(
    ("name", "argument"),
    some_every_day([("class", "class_"), ("first", "first_"), ("person", "person")], [("class", "class_")]),
)
def test_a_unit_may_have_any_name(name, argument):
    """The model's argument has another one where Python, or the model, has taken it."""
    model = FormulaModel(f"out ~ age + (1 | {name})", "poisson", ranges=RANGES, unit=name)
    assert model.unit_argument == argument
    table = {"age": np.linspace(20, 60, 40), name: np.repeat(np.arange(20), 2), "out": np.arange(40) % 3}
    kernel = DPHMC(model, eps=1.0, unit=model.unit_argument)
    with pytest.raises(PrivacyBudgetError):  # too few units for any posterior, which is said once all names are found
        glm(f"out ~ age + (1 | {name})", table, "poisson", eps=1e-3, ranges=RANGES, unit=name, verbose=False)
    assert kernel.settings.unit == argument


def test_a_table_without_rows():
    model = FormulaModel("out ~ age + (1 | person)", "poisson", ranges=RANGES, unit="person")
    found = model.arguments({"age": [], "person": [], "out": []})
    assert found["X"].shape == (0, 1)
    assert found["num_units"] == 0


def test_public_people_of_a_model_without_covariates():
    model = FormulaModel("out ~ 1", "poisson")
    assert model.arguments({"name": ["a", "b"]})["X"].shape == (2, 0)
    with pytest.raises(ValueError, match="have no columns"):
        model.arguments({})
    with pytest.raises(ValueError, match="no column 'out', the outcome; they have name"):
        glm("out ~ 1", {"name": ["a", "b"]}, "poisson", eps=1.0)


def test_levels_may_have_any_printable_characters():
    model = FormulaModel("out ~ C(unit)", "poisson", levels={"unit": ["m", "m\u00b2", "\uff21"]})
    found = model.arguments({"unit": ["m\u00b2", "A", "\uff21"], "out": [1, 1, 1]})
    np.testing.assert_array_equal(found["y"], [1, -1, 1])


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("U3", pytest.raises(ValueError, match="column of texts: say which there are, `levels=")),
        ("category", pytest.raises(ValueError, match="column of categories: say which there are, `levels=")),
        (object, pytest.warns(UserWarning, match="column of objects.* say which there are, `levels=")),
    ],
)
def test_an_outcome_of_texts_needs_levels_before_anything_is_paid(kind, told):
    """By the type alone: what the values are may follow from one row."""
    import pandas as pd

    out = pd.Series(np.where(np.arange(40) % 2, "yes", "no"))
    table = {"age": np.linspace(20, 80, 40), "out": out.astype(kind) if kind == "category" else out.to_numpy(kind)}
    with told:
        FormulaModel("out ~ age", "bernoulli", ranges=RANGES).arguments(table)
    FormulaModel("out ~ age", "bernoulli", ranges=RANGES, levels={"out": ["no", "yes"]}).arguments(table)


@pytest.mark.parametrize("options", [{}, {"neighboring_relation": "add_or_remove_one", "delta": 1e-4}])
def test_a_model_that_tells_how_many_persons_there_are_is_not_for_a_private_number_of_them(options):
    """The number would be public, though nobody typed it."""
    model = FormulaModel("ill ~ age + (1 | person)", "bernoulli", ranges={"age": (0, 100)}, unit="person")
    with pytest.raises(ValueError, match=r"tells how many units there are \(num_units\), which is private here"):
        DPHMC(model, eps=1.0, unit="person", max_rows_per_unit=3, **options)
    without = FormulaModel("ill ~ age", "bernoulli", ranges={"age": (0, 100)}, unit="person")
    DPHMC(without, eps=1.0, unit="person", max_rows_per_unit=3, **options)
