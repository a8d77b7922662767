"""A corpus: kinds of models that NumPyro's examples and tutorials teach, and the mistakes and tables that users make.

Three tables, each of which says of every entry where its kind comes from and what must become of it.

- **Good models** (`GOOD`, and those of the zoo by `FROM_THE_ZOO`): they must be admitted, and the log prior and the
  log densities of their rows must add up to the potential energy of NumPyro, in value and gradient.
- **Bad models and arguments** (`BAD`, and those that other modules test by `REFUSED_ELSEWHERE`): they must be refused
  before a row is looked at, with a message that names what is wrong and says the way out.
- **Hostile tables** (`HOSTILE`): nothing about them can be refused, since that would tell something about a row. Runs
  on them must end, with finite samples.
"""

import functools
import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.corpus import BAD, FROM_THE_ZOO, GOOD, Good, N, X, bits, coefficients, counts, group, positive, y
from helpers.zoo import BY_NAME
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.scipy.special import ndtr
from numpyro.handlers import mask, reparam, scale, scope
from numpyro.infer.reparam import LocScaleReparam
from numpyro.infer.util import potential_energy

from numpyro_dp import DPHMC, MCMC, PosteriorWarning, UnsupportedModelError
from numpyro_dp.preparation import Preparation


def admit(entry, **options):
    """Make a kernel ready for a model, up to the start of a run."""
    kernel = DPHMC(entry.model, eps=1.0, prepare=False, num_iterations=10, **{**entry.options, **options})
    kernel.prepare(*entry.args, **getattr(entry, "kwargs", {}))
    return kernel


def _good():
    for name, entry in GOOD.items():
        yield pytest.param(entry, id=name, marks=entry.marks if entry.everyday else (*entry.marks, pytest.mark.nightly))


def assert_prior_and_rows_are_the_model(entry, seeds):
    """In value and gradient, at a point for each seed."""
    separated = admit(entry).separate(entry.args, {})
    density, log_prior = separated.row_log_density(entry.args, {}), separated.log_prior(entry.args, {})
    rows = tuple(part[:, None] for part in separated.rows(entry.args, {}))

    def by_parts(z):
        terms = jax.vmap(density, (None, 0))(z, rows)
        return log_prior(z) + jnp.sum(terms), jnp.sum(jnp.abs(terms))

    def as_one(z):
        args = jax.tree.map(jnp.asarray, entry.args)
        return -potential_energy(entry.reference, args, {}, separated.unravel(z)), 0.0

    both = jax.jit(lambda z: [jax.value_and_grad(f, has_aux=True)(z) for f in (by_parts, as_one)])
    near = separated.ravel({name: zero + entry.near.get(name, 0.0) for name, zero in separated.prototype.items()})
    for seed in seeds:
        z = near + np.random.default_rng(seed).uniform(-1, 1, separated.num_params)
        ((value, magnitude), grad), ((expected, _), expected_grad) = both(z)
        assert np.isfinite(expected)
        tolerance = 1e-14 * (10 + magnitude)
        np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance)
        np.testing.assert_allclose(grad, expected_grad, rtol=0, atol=20 * tolerance)


@pytest.mark.parametrize("entry", [*_good()])
def test_good_models_are_admitted_as_what_they_are(entry, x64):
    assert_prior_and_rows_are_the_model(entry, [1, 2])


@pytest.mark.nightly
@pytest.mark.parametrize("entry", [BY_NAME[name] for name in FROM_THE_ZOO], ids=str)
def test_models_of_the_zoo_are_admitted(entry):
    admit(entry)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["patients_with_visits", "hurdle", "horse_race"])
def test_good_models_run_by_default(name):
    entry = GOOD[name]
    run_by_default(entry.model, entry.args, {}, eps=500.0, prepare=Preparation(force=True), **entry.options)


@pytest.mark.filterwarnings("ignore:.*will give a blurred posterior:UserWarning")  # before it starts
@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "eps", "seed"), [(300, 1.0, 1), (2000, 0.6, 1), (20_000, 0.1, 1), (20_000, 0.1, 2)])
def test_flat_priors_are_no_surprise_where_little_is_learned(rows, eps, seed):
    """Those of other priors spread out then; draws of a flat one may be far away: then somebody says so."""
    outcomes = np.random.default_rng(seed).normal(size=rows)
    said = Preparation(scales={"mu": 1.0, "sigma": 1.0})
    kernel = DPHMC(BY_NAME["improper"].model, eps=eps, noise_seed=seed, prepare=said)
    mcmc = MCMC(kernel, num_warmup=100, num_samples=500, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PosteriorWarning)
        mcmc.run(jax.random.key(0), outcomes)
    assert not mcmc.privacy.posterior.uninformed  # a prior without a width is never as narrow as the posterior
    mu, log_sigma = np.asarray(mcmc.get_samples()["mu"]), np.log(mcmc.get_samples()["sigma"])
    if mcmc.privacy.posterior.trusted:
        assert abs(mu.mean() - outcomes.mean()) < 5 * mu.std()
        assert abs(log_sigma.mean() - np.log(outcomes.std())) < 5 * log_sigma.std()


def run_by_default(model, args, kwargs, **options):
    """With a preparation, to finite draws."""
    kernel = DPHMC(model, **{"noise_seed": 1} | options)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), *args, **kwargs)
    assert all(np.isfinite(draws).all() for draws in mcmc.get_samples().values())


# -- Refused in other modules ------------------------------------------------------------------------------------------

REFUSED_ELSEWHERE = {
    "standardised, ranked, lagged, averaged or imputed inside": "test_model.test_rows_mixed_inside_the_model",
    "the table decomposed as a matrix": "test_model.test_table_as_a_matrix",
    "a time series whose rows are its times": "test_model.test_time_series_over_rows",
    "a Gaussian process over the rows (example gp)": "test_model.test_gaussian_process_over_rows",
    "a density scaled by the number of rows": "test_model.test_scale_by_the_number_of_rows",
    "a column against a vector": "test_model.test_broadcasting_of_column_against_vector",
    "an observed mean": "test_model.test_observed_summary",
    "a loss over all rows": "test_model.test_factor_over_all_rows",
    "a prior that reads the outcomes": "test_model.test_prior_from_private_rows",
    "a prior whose scale handler reads the outcomes": "test_model.test_prior_scaled_by_private_rows",
    "a prior that depends on the number of rows": "test_model.test_prior_that_depends_on_the_number_of_rows",
    "minibatches (examples hmcecs and stein_bnn)": "test_model.test_subsampled_plate",
    "an effect of each row without a plate": "test_model.test_latent_with_one_value_per_row_but_no_plate",
    "as many effects as rows, by a number": "test_model.test_latent_with_a_hard_coded_value_per_row",
    "spike and slab": "test_model.test_spike_and_slab_prior",
    "counts as latents of rows": "test_model.test_latents_that_cannot_be_summed_out",
    "hidden Markov models by scan (example hmm_enum)": "test_model.test_hidden_markov_models_by_scan",
    "classes of groups": "test_model.test_latents_outside_of_the_row_plate",
    "latents without funsor": "test_model.test_without_funsor",
    "data in globals, closures, defaults, partials, objects": "test_model.test_closed_over_data",
    "outcomes by a condition from outside": "test_model.test_outcomes_by_condition",
    "lists of numbers": "test_model.test_lists_of_numbers",
    "DataFrames and Series": "test_model.test_pandas",
    "arrays of texts, objects and dates": "test_model.test_arrays_that_are_no_numbers",
    "masked arrays": "test_model.test_masked_arrays",
    "random keys as rows": "test_model.test_random_keys_as_rows",
    "branches, sizes and indices from values": "test_model.test_values_used_in_python",
    "parameters without a prior": "test_model.test_param_site",
    "a model that draws random numbers": "test_model.test_random_model",
    "two plates that might be the rows'": "test_model.test_ambiguous_row_plate",
    "outcomes transposed": "test_model.test_transposed_outcomes",
    "covariates transposed": "test_model.test_transposed_covariates",
    "tables of several lengths": "test_model.test_tables_of_different_length",
    "nothing observed": "test_model.test_nothing_observed",
    "nothing to infer": "test_model.test_no_latent_site",
    "no rows": "test_model.test_empty_table",
    "sites that a handler hides": "test_model.test_hidden_sites",
    "a site for each row": "test_model.test_one_site_per_row",
    "a row plate that is not there": "test_model.test_row_plate_must_exist",
    "private arguments that are not there": "test_model.test_private_args",
    "too small an eps for the table": "test_prepared.test_a_hopeless_run_is_refused_before_anything_is_released",
    "traced rows": "test_prepared.test_traced_rows_cannot_be_prepared_on_and_the_error_says_what_to_do",
    "arguments of the kernel that make no sense": "test_kernels.test_impossible_arguments_are_refused",
    "a second run": "test_kernels.test_a_second_run_is_refused",
    "units that are none": "test_units.test_what_is_no_unit_is_named",
}


# Found by numbers, beside several evaluations of the model; the others are refused on shapes alone.
_SLOW_TO_REFUSE = {
    "classes weighted by their shares",
    "means of groups computed inside",
    "other rows as contrast",
    "rows that share a covariance",
    "one path through all rows (ODE)",
    "rows drawn anew (bootstrap)",
    "no second derivatives",
    "part of the rows",
    "weights that add up to n",
}


def _bad():
    for kind, entry in BAD.items():
        slow = (pytest.mark.nightly,) if kind in _SLOW_TO_REFUSE else ()
        yield pytest.param(entry, id=kind, marks=(*entry.marks, *slow))


@pytest.mark.parametrize("entry", [*_bad()])
def test_bad_models_and_arguments_are_refused(entry):
    """By name, with the way out, and before anything is released."""
    kernel = DPHMC(entry.model, eps=1.0, num_iterations=10, **{"prepare": False, **entry.options})
    with pytest.raises(entry.error) as caught:
        kernel.prepare(*entry.args)  # as every run does first
    message = " ".join(" ".join([str(caught.value), *getattr(caught.value, "__notes__", ())]).split())
    for pattern in entry.says:
        assert re.search(pattern, message), message
    assert not kernel.ledger.committed or kernel.ledger.untouched


def test_what_others_refuse_is_tested_there():
    for reference in REFUSED_ELSEWHERE.values():
        module, name = reference.split(".")
        (file,) = Path(__file__).parents[1].rglob(f"{module}.py")
        assert f"\ndef {name}(" in file.read_text(), reference


# == Hostile tables ====================================================================================================

ROWS = 60
_few = np.random.default_rng(6)
TABLE = {
    "X": _few.uniform(-1, 1, (ROWS, 2)).astype(np.float32),
    "y": _few.integers(0, 2, ROWS).astype(np.int32),
    "group": (np.arange(ROWS) % 4).astype(np.int32),
    "weight": np.ones(ROWS, np.float32),
}


def weighted_groups(X, y, group, weight):
    b = coefficients(X)
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]), scale(scale=weight):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b + effect[group]), obs=y)


def put(name, value, where=slice(3, 4)):
    """The table with other values in some places of a column."""
    changed = TABLE[name].copy()
    changed[where] = value
    return {**TABLE, name: changed}


HOSTILE = {
    "rows of NaN": put("X", np.nan, slice(0, 20)),
    "nothing but NaN": put("X", np.nan, slice(None)),
    "a huge value": put("X", 1e30),
    "a huge value below zero": put("X", -3e38),
    "infinity": put("X", np.inf),
    "values too small for the type": put("X", 1e-40, slice(None)),
    "a column of zeros": put("X", 0.0, (slice(None), 0)),
    "a column without variance": put("X", 7.0, (slice(None), 0)),
    "two columns that are one": {**TABLE, "X": np.repeat(TABLE["X"][:, :1], 2, 1)},
    "outcomes that a column decides": {**TABLE, "y": (TABLE["X"][:, 0] > 0).astype(np.int32)},
    "outcomes all alike": put("y", 1, slice(None)),
    "outcomes of 1 and 2": put("y", TABLE["y"] + 1, slice(None)),
    "an outcome below zero": put("y", -1),
    "the largest outcome there is": put("y", 2**31 - 1),
    "a group that is not there": put("group", 99),
    "a group below zero": put("group", -7),
    "all rows in one group": put("group", 2, slice(None)),
    "a huge weight": put("weight", 1e30),
    "weights below zero": put("weight", -1.0, slice(0, 30)),
    "no weight at all": put("weight", 0.0, slice(None)),
    "a weight that is not a number": put("weight", np.nan),
    "rows that are all the same": {name: np.repeat(column[:1], ROWS, 0) for name, column in TABLE.items()},
    "each column hostile": {
        "X": put("X", np.nan)["X"],
        "y": put("y", -5, slice(4, 5))["y"],
        "group": put("group", 2**30, slice(5, 6))["group"],
        "weight": put("weight", np.inf, slice(6, 7))["weight"],
    },
}
_STEPS = 10


@functools.cache
def _kernel_for_any_table():
    """One compiled step for all tables: they are traced, so only here may one kernel see several."""
    kernel = DPHMC(weighted_groups, eps=500.0, prepare=False, num_steps=2, num_iterations=_STEPS * len(HOSTILE))
    start = kernel.init(jax.random.key(0), 5, {"b": jnp.zeros(2), "effect": jnp.zeros(4)}, (), TABLE)
    return start, jax.jit(lambda state, table: kernel.sample(state, (), table))


@pytest.mark.parametrize("kind", HOSTILE)
def test_chains_go_on_over_hostile_tables(kind):
    state, step = _kernel_for_any_table()
    for _ in range(_STEPS):
        state = step(state, HOSTILE[kind])
    assert not state.exhausted
    for leaf in jax.tree.leaves(state._replace(rng_key=0)):
        assert np.isfinite(leaf).all()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "kind", ["each column hostile", "a huge weight", "outcomes that a column decides", "a group below zero"]
)
def test_runs_by_default_end_on_hostile_tables(kind, shared_surveys):
    run_by_default(weighted_groups, (), HOSTILE[kind], eps=20.0, prepare=Preparation(force=True))


@pytest.mark.nightly
@pytest.mark.parametrize("rows", [1, 2])
def test_runs_on_few_rows_end(rows):
    few = {name: column[:rows] for name, column in TABLE.items()}
    run_by_default(weighted_groups, (), few, eps=20.0, prepare=Preparation(force=True))


def test_values_too_large_for_single_precision_are_not_told():
    """In double precision as tables are, and in single as JAX computes; `filterwarnings` makes warnings errors."""
    table = {**TABLE, "X": TABLE["X"].astype(np.float64)}
    table["X"][3] = 1e300
    kernel = DPHMC(weighted_groups, eps=1.0, prepare=False, num_iterations=10)
    kernel.separate((), table).rows((), table)


# -- The same table in other forms -------------------------------------------------------------------------------------


def _on_disk(column, directory):
    mapped = np.memmap(directory / "column", dtype=column.dtype, mode="w+", shape=column.shape)
    mapped[:] = column
    return mapped


def _read_only(column, directory):
    column = column.copy()
    column.flags.writeable = False
    return column


FORMS = {
    "outcomes as floats": ("y", lambda column, directory: column.astype(float)),
    "outcomes as booleans": ("y", lambda column, directory: column.astype(bool)),
    "outcomes of 8 bits": ("y", lambda column, directory: column.astype(np.int8)),
    "outcomes of 64 bits without sign": ("y", lambda column, directory: column.astype(np.uint64)),
    "weights as whole numbers": ("weight", lambda column, directory: column.astype(int)),
    "columns first": ("X", lambda column, directory: np.asfortranarray(column)),
    "every second of more rows": ("X", lambda column, directory: np.repeat(column, 2, 0)[::2]),
    "a matrix of NumPy": ("X", lambda column, directory: column.view(np.matrix)),
    "read only": ("X", _read_only),
    "on disk": ("X", _on_disk),
    "of JAX": ("X", lambda column, directory: jnp.asarray(column)),
}


_OTHER_PROGRAMS = {"outcomes as booleans", "outcomes of 8 bits", "outcomes of 64 bits without sign"}


def densities(table):
    """The log density of each row at some point."""
    kernel = DPHMC(weighted_groups, eps=1.0, prepare=False, num_iterations=10)
    kernel.prepare(**table)
    separated = kernel.separate((), table)
    rows = tuple(part[:, None] for part in separated.rows((), table))
    density = jax.vmap(separated.row_log_density((), table), (None, 0))
    return density(jnp.linspace(-1, 1, separated.num_params), rows)


@functools.cache
def densities_of_the_table():
    return densities(TABLE)


@pytest.mark.parametrize(
    "form", [pytest.param(k, marks=pytest.mark.nightly) if k in _OTHER_PROGRAMS else k for k in FORMS]
)
def test_tables_in_other_forms_are_the_same(form, tmp_path):
    name, change = FORMS[form]
    changed = densities({**TABLE, name: change(TABLE[name], tmp_path)})
    np.testing.assert_allclose(changed, densities_of_the_table(), rtol=1e-6)


# == Generated models ==================================================================================================


OUTCOMES = {
    "normal": (lambda eta: dist.Normal(eta, 1.0), y),
    "scale": (lambda eta: dist.Normal(eta, numpyro.sample("sigma", dist.HalfCauchy(1))), y),
    "student": (lambda eta: dist.StudentT(numpyro.sample("nu", dist.Gamma(2.0, 0.1)), eta, 1.0), y),
    "bernoulli": (lambda eta: dist.Bernoulli(logits=eta), bits),
    "probit": (lambda eta: dist.Bernoulli(probs=ndtr(eta)), bits),
    "cloglog": (lambda eta: dist.Bernoulli(probs=-jnp.expm1(-jnp.exp(eta))), bits),
    "poisson": (lambda eta: dist.Poisson(jnp.exp(eta)), counts),
    "softplus": (lambda eta: dist.Poisson(jax.nn.softplus(eta)), counts),
    "geometric": (lambda eta: dist.Geometric(logits=eta), counts),
    "binomial": (lambda eta: dist.Binomial(20, logits=eta), counts),
    "inflated": (lambda eta: dist.ZeroInflatedPoisson(numpyro.sample("gate", dist.Beta(1, 1)), jnp.exp(eta)), counts),
    "exponential": (lambda eta: dist.Exponential(jnp.exp(eta)), positive),
    "gamma": (lambda eta: dist.Gamma(2.0, jnp.exp(-eta)), positive),
    "log_normal": (lambda eta: dist.LogNormal(eta, 1.0), positive),
}
PRIORS = {
    "normal": dist.Normal(0, 1),
    "student": dist.StudentT(3.0),
    "laplace": dist.Laplace(0.0, 1.0),
    "uniform": dist.Uniform(-2, 2),
    "truncated": dist.TruncatedNormal(0, 1, low=-1.0),
    "positive": dist.HalfNormal(1),
    "mixture": dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), dist.Normal(0.0, jnp.array([0.1, 2.0]))),
}
FORMS_OF_ROWS = ("plate", "plate of a number", "event", "bare")
EFFECTS = ("none", "centred", "not centred", "zero sum")
HANDLERS = {
    "none": lambda model: model,
    "tempered": lambda model: scale(model, scale=0.5),
    "scoped": lambda model: scope(model, prefix="part"),
    "masked": lambda model: mask(model, mask=True),
}
MIXERS = {
    "centred": lambda X: X - X.mean(0),
    "shifted": lambda X: jnp.roll(X, 1, 0),
    "cumulated": lambda X: jnp.cumsum(X, 0),
    "divided by the number of rows": lambda X: X / X.shape[0],
    "ranked": lambda X: jnp.argsort(jnp.argsort(X, 0), 0) / 3.0,
}


def generated(outcome, prior, rows, effects, handler, mixer=None):
    """A generalised linear model of given parts."""
    law, _ = OUTCOMES[outcome]

    def model(X, y, group):
        X = X if mixer is None else MIXERS[mixer](X)
        b = numpyro.sample("b", PRIORS[prior].expand([X.shape[1]]).to_event(1))
        fn = law(X @ b + (0.0 if effects == "none" else effects_of_groups(effects)[group]))
        if rows == "event":
            numpyro.sample("y", fn.to_event(1), obs=y)
        elif rows == "bare":
            numpyro.sample("y", fn, obs=y)
        else:
            with numpyro.plate("rows", N if rows == "plate of a number" else y.shape[0]):
                numpyro.sample("y", fn, obs=y)

    return HANDLERS[handler](model)


def effects_of_groups(kind):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    if kind == "zero sum":
        return numpyro.sample("effect", dist.ZeroSumNormal(tau, event_shape=(4,)))
    with reparam(config={"effect": LocScaleReparam(1 if kind == "centred" else 0)}), numpyro.plate("groups", 4):
        return numpyro.sample("effect", dist.Normal(0, tau))


parts = {
    "outcome": st.sampled_from(sorted(OUTCOMES)),
    "prior": st.sampled_from(sorted(PRIORS)),
    "rows": st.sampled_from(FORMS_OF_ROWS),
    "effects": st.sampled_from(EFFECTS),
    "handler": st.sampled_from(sorted(HANDLERS)),
}


@pytest.mark.nightly
@settings(max_examples=12)
@given(**parts, seed=st.integers(0, 2**32 - 1))
def test_generated_models_are_admitted_as_what_they_are(seed, **parts):
    with jax.enable_x64(True):
        model, outcomes = generated(**parts), OUTCOMES[parts["outcome"]][1]
        assert_prior_and_rows_are_the_model(Good("generated", "", model, (X, outcomes, group)), [seed])


@pytest.mark.nightly
@settings(max_examples=12)
@given(**parts, mixer=st.sampled_from(sorted(MIXERS)))
def test_generated_models_that_mix_rows_are_refused(**parts):
    model, outcomes = generated(**parts), OUTCOMES[parts["outcome"]][1]
    with pytest.raises(UnsupportedModelError, match=r"log density of '.*y'"):
        admit(Good("generated", "", model, (X, outcomes, group)))


# == The tables ========================================================================================================


def test_the_page_on_models_names_every_example():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    origins = [entry.origin for entry in GOOD.values()] + [origin for _, origin in FROM_THE_ZOO.values()]
    named = {
        name for o in origins for pair in re.findall(r"(?:examples?|tutorial) (\w+)(?: and (\w+))?", o) for name in pair
    }
    missing = {name for name in named - {""} if f"`{name}`" not in page}
    assert len(named) > 30
    assert not missing, missing


def test_there_are_enough_of_each():
    assert len(GOOD) >= 40
    assert GOOD.keys().isdisjoint(FROM_THE_ZOO)
    assert FROM_THE_ZOO.keys() <= BY_NAME.keys()
    assert len(BAD) >= 40
    assert len(HOSTILE) >= 20
