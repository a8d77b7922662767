"""`DPExponentialFamily`: one noisy vector of statistics an iteration, read off the model, whatever drives the chain.

The families themselves are the matter of `test_families`, invariance under noise of `test_statistics`.
"""

import copy
import functools
import pickle
import re
import secrets

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest
from helpers.drawn import recorded_noise
from helpers.jaxprs import shapes_in
from helpers.laplace import laplace, laplace_family
from helpers.tiers import some_every_day
from scipy import stats
from scipy.special import gammaln

import numpyro_dp.privacy.release
from numpyro_dp import (
    MCMC,
    DPExponentialFamily,
    PrivacyBudgetError,
    UnsupportedModelError,
    to_arviz,
)
from numpyro_dp.model.families import UnsupportedFamilyError
from tests.helpers.drawn import given_draw

N = 97  # no other axis here is this long
_rng = np.random.default_rng(0)
Y = np.clip(_rng.normal(1.0, 2.0, N), -7, 7)
BOUNDS = (-8.0, 8.0)


def normal(y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 1))
    numpyro.deterministic("ratio", mu / sigma)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def make(model=normal, **options):
    return DPExponentialFamily(model, **{"bounds": BOUNDS, "prepare": False, "step_size": 0.1} | options)


def run(kernel, *, stock=False, table=Y, fields=("i", "noise_scale"), seed=0, **options):
    options = {"num_warmup": 4, "num_samples": 6, "num_chains": 2, "chain_method": "vectorized"} | options
    mcmc = (numpyro.infer.MCMC if stock else MCMC)(kernel, progress_bar=False, **options)
    mcmc.run(jax.random.key(seed), table, extra_fields=fields)
    return mcmc


@functools.cache
def reference():
    return run(make(eps=20.0, noise_seed=1))


def draws_of(mcmc):
    return {name: np.asarray(draws) for name, draws in mcmc.get_samples(group_by_chain=True).items()}


def assert_same_draws(first, second):
    for name, draws in draws_of(first).items():
        np.testing.assert_allclose(draws, draws_of(second)[name], rtol=1e-4, atol=1e-5)


# -- A kernel like the others ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", pytest.param("float64", marks=pytest.mark.nightly)], indirect=True)
def test_it_runs_moves_and_spends_its_budget(precision):
    mcmc = run(make(eps=50.0, noise_seed=1), num_warmup=10, num_samples=20)
    samples = draws_of(mcmc)
    assert set(samples) == {"mu", "sigma", "ratio"}
    assert samples["mu"].shape == (2, 20)
    assert samples["mu"].dtype == precision
    extra = mcmc.get_extra_fields(group_by_chain=True)
    assert not extra["exhausted"].any()
    moved = np.diff(samples["mu"], axis=1) != 0
    assert (moved == extra["accepted"][:, 1:]).all()
    assert moved.any()
    assert mcmc.privacy.releases["statistics"]["made"] == 60
    assert mcmc.privacy.eps == 50.0
    assert mcmc.privacy.eps_spent == pytest.approx(50.0)


@pytest.mark.parametrize(
    "chain_method",
    ["sequential", "parallel", pytest.param(jax.vmap, id="vmap")],
)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # NumPyro's, under jax.vmap
@pytest.mark.nightly
def test_every_chain_method_gives_the_same_chains(chain_method):
    other = run(make(eps=20.0, noise_seed=1), chain_method=chain_method)
    assert_same_draws(reference(), other)
    assert other.privacy.releases == reference().privacy.releases


@pytest.mark.nightly
def test_the_stock_mcmc_gives_the_same_chains():
    kernel = make(eps=20.0, noise_seed=1, num_iterations=10, num_chains=2)
    run_by_numpyro = run(kernel, stock=True)
    assert_same_draws(reference(), run_by_numpyro)
    assert kernel.privacy.releases == reference().privacy.releases


@pytest.mark.nightly
def test_traced_model_arguments_give_the_same_chains():
    assert_same_draws(reference(), run(make(eps=20.0, noise_seed=1), jit_model_args=True))


@pytest.mark.parametrize(
    "options", [{"one_component": True, "guided": True}, {"guided": True}, {"dense_mass": True}], ids=str
)
@pytest.mark.nightly
def test_variants_of_the_walk(options):
    mcmc = run(make(eps=500.0, **options), num_samples=20, fields=("carry",))
    moves = np.stack([np.diff(draws_of(mcmc)[name], axis=1) != 0 for name in ("mu", "sigma")])
    assert moves.any()
    if options.get("one_component"):
        assert not moves.all(0).any()
    turned = (np.diff(mcmc.get_extra_fields(group_by_chain=True)["carry"], axis=1) != 0).any()
    assert turned == options.get("guided", False)


def test_results_for_arviz():
    assert set(to_arviz(reference()).posterior.data_vars) == {"mu", "sigma", "ratio"}


@pytest.mark.nightly
def test_random_keys_are_never_reused():
    with jax.debug_key_reuse(True):
        kernel = make(eps=5.0, num_iterations=4)
        state = kernel.init(jax.random.key(0), 2, None, (Y,), {})
        for _ in range(2):
            state = jax.jit(lambda s: kernel.sample(s, (Y,), {}))(state)


# -- What is released --------------------------------------------------------------------------------------------------


def drawn_by(kernel, state, iterations):
    """The noise of some iterations, in steps."""
    step = jax.jit(lambda s: kernel.sample(s, (Y,), {}))
    with recorded_noise(kernel) as drawn:
        for _ in range(iterations):
            state = jax.block_until_ready(step(state))
    return drawn


@pytest.mark.parametrize("seed", some_every_day([None, 5], [None]), ids=["entropy", "seed"])
def test_the_noise_is_fresh_in_each_iteration(seed):
    kernel = make(eps=5.0, num_iterations=8, noise_seed=seed)
    noise = drawn_by(kernel, kernel.init(jax.random.key(0), 0, None, (Y,), {}), 8)
    assert all(part.shape == (2, 1, 2) for part in noise)
    assert len({part.tobytes() for part in noise}) == 8


def target_of(kernel, table):
    kernel.init(jax.random.key(0), 0, None, (table,), {})
    return kernel.target(kernel.separate((table,), {}), (table,), {})


def statistics_of(target, shape, noise_multiplier=1.0):
    """Without noise, though with a scale of it."""
    return target.statistics(given_draw(*shape, noise_multiplier=noise_multiplier, ledger=target.vault._ledger))


@pytest.mark.parametrize("relation", some_every_day(["replace_one", "add_or_remove_one"], ["add_or_remove_one"]))
def test_the_sums_say_what_the_model_says(relation):
    """Without noise, the log ratio of a jump is that of the model; n is one more sum where it is private."""
    counted = relation == "add_or_remove_one"
    kernel = make(eps=1.0, delta=1e-3, num_iterations=5, neighboring_relation=relation)
    target, family = target_of(kernel, Y), kernel._known_family
    statistics, sd = statistics_of(target, (family.size + counted,))
    assert statistics.shape == (2 + counted,)
    room = 1 + 1e-4
    assert float(sd) == pytest.approx(family.bound * room * (np.sqrt(2) if counted else 2))
    if counted:
        assert float(statistics[-1]) / family.bound == pytest.approx(N, rel=1e-5)
    z, z_new = jnp.array([0.3, 0.2]), jnp.array([0.7, 0.6])
    change, log_partition = family.change(z, z_new)
    count = statistics[-1] / family.bound if counted else N
    density = [stats.norm(mu, np.exp(log_sigma)).logpdf(Y).sum() for mu, log_sigma in (z, z_new)]
    assert float(change @ statistics[:2] - count * log_partition) == pytest.approx(density[1] - density[0], rel=1e-3)


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_a_row_moves_the_sums_by_at_most_the_sensitivity(relation):
    """P5, P11: also the one that the noise is scaled to."""
    replaces = relation == "replace_one"
    kernel = make(eps=1.0, delta=1e-3, num_iterations=5, neighboring_relation=relation)
    assert kernel._counts_rows == (not replaces)
    kernel.init(jax.random.key(0), 0, None, (Y,), {})

    @jax.jit
    def statistics(y):
        separated = kernel.separate((y,), {})
        return statistics_of(kernel.target(separated, (y,), {}), (2 + (not replaces),))

    sums, sensitivity = statistics(Y)
    for row in [np.nan, np.inf, -np.inf, 1e30, -8.0, 8.0, 0.0]:
        changed, _ = statistics(np.append(Y[:-1] if replaces else Y, row))
        assert np.isfinite(changed).all()
        assert np.linalg.norm(np.asarray(sums, float) - np.asarray(changed, float)) <= float(sensitivity) + 1e-3


def test_extreme_rows_use_the_whole_sensitivity():
    """The noise is not larger than these rows need."""
    lowest, highest = np.full(N, -8.0), np.append(np.full(N - 1, -8.0), 8.0)

    def mean_only(y):
        mu = numpyro.sample("mu", dist.Normal(0, 3))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    values = []
    for table in (lowest, highest):
        target = target_of(make(mean_only, eps=1.0, num_iterations=5), table)
        value, sensitivity = statistics_of(target, (1,))
        values.append(float(value[0]))
    assert values[1] - values[0] == pytest.approx(float(sensitivity), rel=1e-3)


def test_the_chain_goes_on_over_hostile_rows():
    table = Y.copy()
    table[:4] = [np.nan, np.inf, -np.inf, 1e30]
    mcmc = run(make(eps=500.0), table=table, num_samples=20)
    assert all(np.isfinite(draws).all() for draws in draws_of(mcmc).values())
    assert mcmc.get_extra_fields()["accepted"].any()


def test_the_start_does_not_depend_on_the_rows():
    starts = [
        make(eps=1.0, num_iterations=5).init(jax.random.key(3), 2, None, (table,), {}).z
        for table in (Y, np.full(N, np.nan), 1e30 * Y)
    ]
    assert starts[0] == starts[1] == starts[2]


# -- The price, and what is said about it ------------------------------------------------------------------------------


def test_the_report():
    report = reference().privacy
    text = " ".join(str(report).split())
    assert report.eps == 20.0
    assert report.releases["statistics"]["planned"] == report.releases["statistics"]["made"] == 20
    assert "2 statistics of values in bounds (-8.0, 8.0), of norm up to 1" in text
    assert "exact for the table with its values moved into the bounds" in text
    assert f"n = {N}" in text
    multiplier = report.releases["statistics"]["noise_multiplier"]
    assert report.rho == pytest.approx(20 / (2 * multiplier**2))


def test_add_or_remove_one_hides_n():
    kernel = make(eps=50.0, delta=1e-6, neighboring_relation="add_or_remove_one")
    n = 40_961  # no R-hat or count of draws, which noise decides, happens to be this number
    mcmc = run(kernel, table=np.resize(Y, n))
    assert mcmc.privacy.num_rows is None
    assert not any(re.search(rf"{n}|{n:,}", text) for text in (str(mcmc.privacy), mcmc.privacy.to_json()))
    assert draws_of(mcmc)["mu"].shape == (2, 6)


@pytest.mark.nightly
def test_a_noise_multiplier_instead_of_eps():
    mcmc = run(make(noise_multiplier_statistics=30.0))
    assert mcmc.privacy.rho == pytest.approx(20 / (2 * 30**2))


def test_without_noise_nothing_is_private():
    mcmc = run(make(eps=float("inf")))
    assert "NOT PRIVATE" in str(mcmc.privacy)
    assert (mcmc.get_extra_fields()["noise_scale"] == 0).all()


def test_the_budget_cannot_be_overrun():
    mcmc = run(make(eps=5.0))
    with pytest.raises(PrivacyBudgetError, match="does not allow"):
        mcmc.run(jax.random.key(1), Y)
    kernel = make(eps=5.0, num_iterations=8, num_chains=2)
    with pytest.warns(RuntimeWarning, match="is used up"):
        beyond = run(kernel, stock=True)
        jax.effects_barrier()
        assert beyond.get_extra_fields()["exhausted"].any()
    assert kernel.privacy.releases["statistics"]["made"] == 16


def test_one_budget_one_table():
    """The sums are those of the table that the budget was committed for."""
    kernel = make(eps=5.0, num_iterations=30, num_chains=2)
    run(kernel)
    with pytest.raises(PrivacyBudgetError, match="has run on other arrays"):
        run(kernel, table=Y.copy())


def test_owners_add_noise_of_their_own():
    alone = make(noise_multiplier_statistics=3.0, num_iterations=5)
    shared = make(noise_multiplier_statistics=3.0, num_iterations=5, owners=np.arange(N) % 4)
    together, scale = statistics_of(target_of(alone, Y), (2,), 3.0)
    of_owners, larger = statistics_of(target_of(shared, Y), (4, 2), 3.0)
    np.testing.assert_allclose(of_owners, together, rtol=1e-5, atol=1e-4)
    assert float(larger) == pytest.approx(2 * float(scale))


@pytest.mark.nightly
def test_a_run_with_owners():
    mcmc = run(make(eps=20.0, owners=np.arange(N) % 4))
    assert "belong to 4 data owners" in " ".join(str(mcmc.privacy).split())
    assert mcmc.privacy.eps == 20.0


# -- The rows are read once --------------------------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch):
    """One entry for each sum over the table."""
    made = []
    original = numpyro_dp.privacy.release.clipped_sum
    monkeypatch.setattr(
        numpyro_dp.privacy.release, "clipped_sum", lambda *args, **options: made.append(1) or original(*args, **options)
    )
    return made


@pytest.mark.nightly
def test_the_number_of_passes_does_not_depend_on_the_length_of_the_run(passes):
    counts = []
    for num_samples in (5, 60):
        passes.clear()
        run(make(eps=20.0), num_samples=num_samples)
        counts.append(len(passes))
    assert counts[0] == counts[1] <= 3


def test_an_iteration_has_no_array_as_long_as_the_table():
    kernel = make(eps=20.0, num_iterations=5)
    state = kernel.init(jax.random.key(0), 0, None, (Y,), {})
    closed = jax.make_jaxpr(lambda s: kernel.sample(s, (Y,), {}))(state)
    assert not any(N in shape for shape in shapes_in(closed.jaxpr))
    assert not any(N in np.shape(constant) for constant in closed.consts)
    traced = jax.make_jaxpr(lambda s, y: kernel.sample(s, (y,), {}))(state, Y)
    assert any(N in shape for shape in shapes_in(traced.jaxpr))  # the search finds what is there


def test_pickles_hold_no_sums():
    mcmc = reference()
    kernel = mcmc.sampler
    sums = np.asarray(statistics_of(target_of(make(eps=1.0, num_iterations=5), Y), (2,)).value)
    for data in (pickle.dumps(kernel), pickle.dumps(mcmc)):
        assert not any(part.tobytes() in data for part in (*sums, *sums.astype(float), *Y, *Y.astype(np.float32)))
    again = pickle.loads(pickle.dumps(mcmc))
    assert_same_draws(mcmc, again)
    assert again.sampler._family is None
    assert not hasattr(kernel, "_statistics")


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_tell_the_same_guarantee(duplicate):
    kernel = reference().sampler
    assert duplicate(kernel).privacy == kernel.privacy


# -- Families of the user's --------------------------------------------------------------------------------------------


def test_a_family_of_the_users():
    kernel = make(laplace, eps=1000.0, family=laplace_family(), noise_seed=1)
    mcmc = run(kernel, num_warmup=300, num_samples=1500, num_chains=2)
    draws = draws_of(mcmc)["scale"]
    grid = np.linspace(0.5, 4, 4000)
    log_density = stats.lognorm(1).logpdf(grid) - np.abs(Y).sum() / grid - N * np.log(grid)
    assert_posterior(draws, grid, np.exp(log_density - log_density.max()))


def test_a_wrong_family_reaches_the_user():
    kernel = make(laplace, eps=1.0, family=laplace_family(log_partition=lambda sites: 2 * jnp.log(sites["scale"])))
    with pytest.raises(UnsupportedFamilyError, match="is not the model's"):
        run(kernel)


# -- Refused -----------------------------------------------------------------------------------------------------------


def regression(y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(b * y**2, 1.0), obs=y)


def coin(y):
    p = numpyro.sample("p", dist.Uniform(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(p), obs=y)


def prior_from_rows(y):
    mu = numpyro.sample("mu", dist.Normal(y.mean(), 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (regression, {}, UnsupportedFamilyError, r"computed from private argument 'y'.*DPPenalty"),
        (laplace, {}, UnsupportedFamilyError, r"no sufficient statistics are known for site 'y' \(Laplace\)"),
        (normal, {"bounds": None}, ValueError, r"give `bounds=\(low, high\)` from public knowledge"),
        (normal, {"bounds": (1.0, -1.0)}, ValueError, r"low < high, got \(1.0, -1.0\)"),
        (coin, {}, ValueError, r"leave `bounds` out"),
        (prior_from_rows, {}, UnsupportedModelError, r"numpyro_dp cannot protect the rows"),
    ],
    ids=["covariates", "unknown", "no_bounds", "empty_bounds", "needless_bounds", "no_rows"],
)
def test_models_without_statistics_are_refused(model, options, error, message):
    kernel = make(model, eps=1.0, **options)
    with pytest.raises(error, match=f"(?s){message}"):
        run(kernel, table=(Y > 0).astype(int) if model is coin else Y)
    with pytest.raises(RuntimeError, match="no guarantee yet"):
        _ = kernel.privacy


class Exchange:
    """Of owners in separate processes."""

    num_owners = 2

    def check(self, tag, public):
        """All owners pass the same."""

    def exchange(self, tag, mine):
        return np.stack([mine, mine])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guided": True, "dense_mass": True}, "needs a diagonal mass matrix"),
        ({"owners": Exchange()}, "neighboring_relation='add_or_remove_one'"),
        ({"eps": None}, "give the budget, eps=1.0 say; .* all of noise_multiplier_statistics"),
        ({"noise_multiplier_statistics": 1.0}, "not both"),
    ],
)
def test_impossible_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**{"eps": 1.0} | options)


# -- The posterior, at a generous budget -------------------------------------------------------------------------------


def assert_posterior(draws, grid, weights):
    """Mean and standard deviation are within 6 standard errors of those of a density on a grid."""
    weights = weights / weights.sum()
    mean = (weights * grid).sum()
    of_grid = (grid - mean) ** 2
    for values, exact in ((draws, grid), ((draws - mean) ** 2, of_grid)):
        expected = (weights * exact).sum()
        sd = np.sqrt((weights * (exact - expected) ** 2).sum())
        ess = float(arviz.ess(values.copy()))
        assert ess > 100
        assert abs(values.mean() - expected) < 6 * sd / np.sqrt(ess)


def posterior_draws(model, table, bounds=None, eps=4000.0, num_samples=3000, **options):
    mcmc = run(
        make(model, eps=eps, bounds=bounds, adapt_mass_matrix=True, **options),
        table=table,
        num_warmup=400,
        num_samples=num_samples,
        seed=secrets.randbits(32),  # the same jumps in each run would be off by the same 2 standard errors in each
    )
    noise = np.median(mcmc.get_extra_fields()["noise_scale"])
    assert 0.05 < noise < 5, noise
    return draws_of(mcmc)


@pytest.mark.statistical
def test_normal_posterior():
    draws = posterior_draws(normal, Y, BOUNDS, eps=20000.0, num_samples=6000)
    mu, log_sigma = np.meshgrid(np.linspace(-2, 4, 400), np.linspace(-0.5, 1.5, 400), indexing="ij")
    sigma = np.exp(log_sigma)
    log_density = stats.norm(0, 3).logpdf(mu) + stats.norm(0, 1).logpdf(log_sigma)
    log_density += -N * log_sigma - (N * Y.var() + N * (Y.mean() - mu) ** 2) / (2 * sigma**2)
    density = np.exp(log_density - log_density.max())
    assert_posterior(draws["mu"], mu, density)
    assert_posterior(draws["sigma"], sigma, density)


def rate(y):
    rate = numpyro.sample("rate", dist.Gamma(2, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


@pytest.mark.statistical
def test_poisson_posterior():
    counts = np.random.default_rng(1).poisson(3.0, N)
    draws = posterior_draws(rate, counts, (0, 12))
    grid = np.linspace(1, 6, 4000)
    assert_posterior(draws["rate"], grid, stats.gamma(2 + counts.sum(), scale=1 / (1 + N)).pdf(grid))


@pytest.mark.statistical
def test_bernoulli_posterior():
    outcomes = (np.random.default_rng(2).random(N) < 0.3).astype(int)
    draws = posterior_draws(coin, outcomes)
    grid = np.linspace(0, 1, 4000)
    assert_posterior(draws["p"], grid, stats.beta(1 + outcomes.sum(), 1 + N - outcomes.sum()).pdf(grid))


def shares(y):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Categorical(p), obs=y)


@pytest.mark.nightly
@pytest.mark.statistical
def test_categorical_posterior():
    outcomes = np.random.default_rng(3).choice(3, N, p=[0.2, 0.3, 0.5])
    draws = posterior_draws(shares, outcomes)
    grid, counts = np.linspace(0, 1, 4000), np.bincount(outcomes, minlength=3)
    for k in range(3):
        assert_posterior(draws["p"][..., k], grid, stats.beta(1 + counts[k], 2 + N - counts[k]).pdf(grid))


def times(y):
    a = numpyro.sample("a", dist.LogNormal(0, 1))
    b = numpyro.sample("b", dist.LogNormal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Gamma(a, b), obs=y)


@pytest.mark.statistical
@pytest.mark.nightly
def test_gamma_posterior():
    values = np.clip(np.random.default_rng(4).gamma(2.0, 0.7, N), 0.05, 10)
    draws = posterior_draws(times, values, (0.05, 10.0), eps=20000.0, num_samples=8000, dense_mass=True)
    log_a, log_b = np.meshgrid(np.linspace(-0.5, 2, 500), np.linspace(-0.8, 2.2, 500), indexing="ij")
    a, b = np.exp(log_a), np.exp(log_b)
    log_density = stats.norm(0, 1).logpdf(log_a) + stats.norm(0, 1).logpdf(log_b)
    log_density += N * (a * log_b - gammaln(a)) + (a - 1) * np.log(values).sum() - b * values.sum()
    density = np.exp(log_density - log_density.max())
    assert_posterior(draws["a"], a, density)
    assert_posterior(draws["b"], b, density)
