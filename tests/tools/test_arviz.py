import json
import pickle
from types import SimpleNamespace

import arviz
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest
from numpyro.infer import HMC, Predictive
from scipy import stats

from numpyro_dp import DPHMC, MCMC, DPPenalty, to_arviz
from numpyro_dp.arviz import _by_chain, _public_lengths

ARVIZ_1 = int(arviz.__version__.split(".")[0]) >= 1
N = 50
_rng = np.random.default_rng(0)
X, Y, GROUP = _rng.normal(size=(N, 2)), _rng.integers(0, 2, N), _rng.integers(0, 3, N)


def model(X, y=None, group=None, num_groups=3):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1), infer={"event_dims": ["covariate"]})
    with numpyro.plate("groups", num_groups):
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.deterministic("odds", jnp.exp(a))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b + a[group]), obs=y)


EPS = 500.0  # little noise, so that no chain stands still: pictures and R-hat do not work on constants


@pytest.fixture(scope="module")
def mcmc():
    kernel = DPHMC(model, eps=EPS, prepare=False, step_size=0.04, adapt_step_size=False)
    mcmc = MCMC(kernel, num_warmup=30, num_samples=60, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), X, y=Y, group=GROUP, extra_fields=("noise_scale", "adapt_state.step_size", "carry"))
    return mcmc


@pytest.fixture(scope="module")
def prepared_mcmc():
    """With a budget that is enough, and rows as the model says, so that nothing is doubted: warnings are errors."""
    rng = np.random.default_rng(1)
    x, group = rng.normal(size=(40 * N, 2)), rng.integers(0, 3, 40 * N)
    logits = x @ [0.5, -0.3] + np.array([0.2, -0.4, 0.1])[group]
    table = x, (rng.random(40 * N) < 1 / (1 + np.exp(-logits))).astype(int), group
    mcmc = MCMC(DPHMC(model, eps=20.0, noise_seed=1), num_warmup=200, num_samples=500, progress_bar=False)
    mcmc.run(jax.random.key(0), table[0], y=table[1], group=table[2])
    return mcmc


def groups(idata):
    return set(idata.groups()) if callable(idata.groups) else {g.strip("/") for g in idata.groups} - {""}


def test_posterior_and_sample_stats_only(mcmc):
    idata = to_arviz(mcmc)
    assert groups(idata) == {"posterior", "sample_stats"}
    assert set(idata["posterior"].data_vars) == {"a", "b", "odds"}
    assert {"accepted", "acceptance_rate", "diverging", "exhausted", "noise_scale", "step_size"} == set(
        idata["sample_stats"].data_vars
    )
    assert idata["posterior"]["a"].dims == ("chain", "draw", "groups")
    assert idata["posterior"]["b"].dims == ("chain", "draw", "covariate")
    np.testing.assert_array_equal(idata["posterior"]["b"], mcmc.get_samples(group_by_chain=True)["b"])


def test_attributes_carry_the_guarantee(mcmc):
    for attributes in (to_arviz(mcmc).attrs, to_arviz(mcmc)["posterior"].attrs):
        assert attributes["privacy_eps"] == EPS
        assert attributes["privacy_delta"] == pytest.approx(0.1 / N)
        assert attributes["privacy_neighboring_relation"] == "replace_one"
        assert json.loads(attributes["privacy_report"])["num_iterations"] == 90


@pytest.mark.parametrize(
    ("name", "trusted", "reason"), [("mcmc", 0, "no release looked whether"), ("prepared_mcmc", 1, "")]
)
@pytest.mark.statistical
def test_attributes_and_files_say_whether_to_believe_the_posterior(name, trusted, reason, request, tmp_path):
    run = request.getfixturevalue(name)
    posterior = run.privacy.posterior
    assert posterior.trusted == bool(trusted), posterior.reasons
    idata = to_arviz(run)
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    again = arviz.from_netcdf(str(tmp_path / "fit.nc"))
    for attributes in (idata.attrs, idata["posterior"].attrs, again["posterior"].attrs):
        assert attributes["privacy_posterior"] == posterior.description
        assert attributes["privacy_posterior_trusted"] == trusted
        assert attributes["privacy_posterior_reasons"] == "; ".join(posterior.reasons)
        assert attributes["privacy_posterior_reasons"].startswith(reason)
        told = json.loads(attributes["privacy_report"])["posterior"]
        assert told == {
            "description": posterior.description,
            "reasons": list(posterior.reasons),
            "trusted": bool(trusted),
            "uninformed": list(posterior.uninformed),
        }
    expected = "vouched for by released numbers" if trusted else "NOT TO BE TRUSTED: no release looked"
    assert str(run.privacy).split("\n  verdict ")[1].strip().startswith(expected)


def test_coordinates_and_dimensions_can_be_named(mcmc):
    idata = to_arviz(mcmc, coords={"covariate": ["age", "sex"]}, dims={"b": ["covariate"]})
    assert list(idata["posterior"]["covariate"].values) == ["age", "sex"]


def far_plates(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("far", 2, dim=-3), numpyro.plate("near", 4, dim=-1):
        effects = numpyro.sample("effects", dist.Normal(0, 1))
    with numpyro.plate("fours", 4):
        wide = numpyro.sample("wide", dist.Normal(jnp.zeros((3, 1)), 1))
        numpyro.deterministic("mean", wide.mean())
        numpyro.deterministic("doubled", 2 * wide)
    numpyro.deterministic("both", {"once": mu, "twice": (mu, 2 * mu)})
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + effects.sum() + wide.sum(), 1), obs=y)


def test_a_plate_names_the_axis_that_is_its_own():
    """Counted from the right of the batch, as NumPyro does; and of no axis of another length."""
    mcmc = MCMC(DPPenalty(far_plates, eps=1.0, prepare=False), num_warmup=2, num_samples=3, progress_bar=False)
    mcmc.run(jax.random.key(0), np.zeros(20))
    posterior = to_arviz(mcmc)["posterior"]
    assert posterior["effects"].dims[2:] == ("far", "effects_dim_1", "near")
    assert posterior["wide"].dims[2:] == ("wide_dim_0", "fours")
    assert posterior["doubled"].dims[2:] == ("doubled_dim_0", "fours")
    assert posterior["mean"].dims[2:] == ()
    np.testing.assert_allclose(posterior["both.twice.1"], 2 * posterior["mu"], rtol=1e-6)


def test_numbers_of_numpy_tell_how_long_a_run_is():
    kernel = DPPenalty(model, eps=1.0, prepare=False)
    two = np.int64(2)
    mcmc = MCMC(kernel, num_warmup=two, num_samples=two, num_chains=two, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), X, y=Y, group=GROUP)
    assert to_arviz(mcmc)["posterior"]["b"].shape == (2, 2, 2)
    assert json.loads(mcmc.privacy.to_json())["num_chains"] == 2


def test_a_public_number_that_is_none_is_known_again():
    def with_offset(y, offset):
        mu = numpyro.sample("mu", dist.Normal(jnp.nan_to_num(offset), 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    mcmc = MCMC(DPPenalty(with_offset, eps=1.0, prepare=False), num_warmup=2, num_samples=3, progress_bar=False)
    mcmc.run(jax.random.key(0), np.zeros(20), np.float32(np.nan))
    assert to_arviz(mcmc)["posterior"]["mu"].shape == (1, 3)


@pytest.mark.nightly
@pytest.mark.statistical
def test_a_prior_that_is_scaled_is_scaled_and_factors_are_part_of_it():
    def scaled(y):
        with numpyro.handlers.scale(scale=10.0):
            mu = numpyro.sample("mu", dist.Normal(0, 5))
        spread = numpyro.sample("spread", dist.HalfNormal(2))
        numpyro.factor("not too far", -100 * (spread - 1) ** 2)
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, spread), obs=y)

    mcmc = MCMC(DPHMC(scaled, eps=20.0, noise_seed=1), num_warmup=50, num_samples=100, progress_bar=False)
    mcmc.run(jax.random.key(0), np.random.default_rng(0).normal(size=2000))
    results = to_arviz(mcmc, log_densities=True)
    mu = np.asarray(results["posterior"]["mu"])
    np.testing.assert_allclose(results["log_prior"]["mu"], 10 * stats.norm.logpdf(mu, 0, 5), rtol=1e-4)
    spread, factors = np.asarray(results["posterior"]["spread"]), np.asarray(results["log_prior"]["factors"])
    expected = -100 * (spread - 1) ** 2
    np.testing.assert_allclose(factors - factors.mean(), expected - expected.mean(), atol=0.02)


def test_summary_plots_and_files(mcmc, tmp_path):
    idata = to_arviz(mcmc)
    summary = arviz.summary(idata)
    assert "a[0]" in summary.index
    arviz.plot_trace(idata)
    arviz.plot_forest(idata)
    plt.close("all")
    idata.to_netcdf(str(tmp_path / "fit.nc"))
    again = arviz.from_netcdf(str(tmp_path / "fit.nc"))
    assert groups(again) == {"posterior", "sample_stats"}
    np.testing.assert_array_equal(again["posterior"]["b"], idata["posterior"]["b"])
    assert again["posterior"].attrs["privacy_eps"] == EPS


@pytest.mark.parametrize("stock", [False, True], ids=["numpyro_dp", "numpyro"])
def test_from_numpyro_does_not_leak(stock):
    """What everybody calls by habit: no outcomes, and no log likelihood even when asked for."""
    kernel = DPPenalty(model, eps=8.0, prepare=False, num_iterations=12, num_chains=1)
    mcmc = (numpyro.infer.MCMC if stock else MCMC)(kernel, num_warmup=4, num_samples=8, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y=Y, group=GROUP)
    idata = arviz.from_numpyro(mcmc, log_likelihood=True)
    filled = {g for g in groups(idata) if len(idata[g].data_vars)}
    assert filled == {"posterior", "sample_stats"}
    assert idata["posterior"]["a"].dims == ("chain", "draw", "groups")
    assert groups(to_arviz(mcmc)) == {"posterior", "sample_stats"}


def test_predictive_works(mcmc):
    new = _rng.normal(size=(7, 2))
    for fitted in (model, mcmc.sampler.model):
        predicted = Predictive(fitted, mcmc.get_samples())(jax.random.key(1), new, group=np.zeros(7, int))
        assert predicted["y"].shape == (120, 7)


def test_predictions_for_public_covariates_are_a_group(mcmc):
    new = _rng.normal(size=(7, 2))
    predicted = Predictive(model, mcmc.get_samples())(jax.random.key(1), new, group=np.zeros(7, int))
    idata = to_arviz(mcmc, posterior_predictive={"y": predicted["y"]}, dims={"y": ["made_up"]})
    assert groups(idata) == {"posterior", "sample_stats", "posterior_predictive"}
    assert idata["posterior_predictive"]["y"].dims == ("chain", "draw", "made_up")
    np.testing.assert_array_equal(idata["posterior_predictive"]["y"], np.reshape(predicted["y"], (2, 60, 7)))


def test_predictions_for_the_rows_are_refused(mcmc):
    predicted = Predictive(model, mcmc.get_samples())(jax.random.key(1), X, group=GROUP)
    with pytest.raises(ValueError, match=r"'y'\] has shape \(120, 50\), and the table has 50 rows.*public covariates"):
        to_arviz(mcmc, posterior_predictive=predicted)
    with pytest.raises(ValueError, match=r"'y'\] has shape \(3, 7\); of 2 chain.* 60 draws.* would be 120"):
        to_arviz(mcmc, posterior_predictive={"y": np.zeros((3, 7))})


def test_predictions_for_as_many_as_there_are_rows_or_units_are_refused():
    """With `unit=` a table has two public lengths."""
    report = SimpleNamespace(private_arguments=("X (800, 3)", "y (800,)", "person"), num_rows=90)
    assert _public_lengths(report) == {90, 800}
    assert _public_lengths(SimpleNamespace(private_arguments=("X", "y"), num_rows=None)) == set()
    for length in (90, 800):
        with pytest.raises(ValueError, match=rf"the table has {length} rows: predictions for its rows"):
            _by_chain({"y": np.zeros((10, length))}, (2, 5), {90, 800})
    assert _by_chain({"y": np.zeros((10, 91))}, (2, 5), {90, 800})["y"].shape == (2, 5, 91)


@pytest.mark.statistical
def test_the_released_likelihood_reweights_draws(prepared_mcmc):
    """All parameters are real: log prior and released log likelihood add up to what NUTS went by."""
    idata = to_arviz(prepared_mcmc, log_densities=True)
    assert groups(idata) == {"posterior", "sample_stats", "log_prior", "log_likelihood"}
    prior, released = idata["log_prior"], idata["log_likelihood"]["released"]
    draws = prepared_mcmc.get_samples(group_by_chain=True)
    for name, axes in {"a": 2, "b": 2}.items():
        expected = np.sum(stats.norm.logpdf(draws[name]), axis=axes)
        np.testing.assert_allclose(prior[name], expected, rtol=1e-4, atol=1e-4)
    total = np.asarray(prior["a"] + prior["b"] + released)
    energy = np.ravel(prepared_mcmc.last_state.carry.potential_energy)[0]
    np.testing.assert_allclose(total[0, -1], -energy, rtol=1e-4, atol=1e-2)


def test_no_likelihood_was_released(mcmc, prepared_mcmc):
    with pytest.raises(ValueError, match="a chain that asks the table in each iteration"):
        to_arviz(mcmc, log_densities=True)
    with pytest.raises(ValueError, match="the kernel was pickled since"):
        to_arviz(pickle.loads(pickle.dumps(prepared_mcmc)), log_densities=True)


def test_draws_beyond_the_budget_are_left_out():
    mcmc = numpyro.infer.MCMC(
        DPPenalty(model, eps=8.0, prepare=False, num_iterations=10, num_chains=1),
        num_warmup=4,
        num_samples=10,
        progress_bar=False,
    )
    with pytest.warns(RuntimeWarning, match="is used up"):
        mcmc.run(jax.random.key(0), X, y=Y, group=GROUP)
        jax.block_until_ready(mcmc.last_state)
    with pytest.warns(RuntimeWarning, match="after 6 of 10 draws"):
        idata = to_arviz(mcmc)
    assert idata["posterior"].sizes["draw"] == 6


def test_other_kernels_are_sent_elsewhere():
    mcmc = numpyro.infer.MCMC(HMC(model), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(TypeError, match=r"private kernel.*az\.from_numpyro"):
        to_arviz(mcmc)
    with pytest.raises(TypeError, match=r"needs a private kernel such as DPHMC, got HMC"):
        MCMC(HMC(model), num_warmup=1, num_samples=1)


def test_the_summary_ends_with_the_guarantee(mcmc, capsys):
    mcmc.print_summary()
    text = capsys.readouterr().out
    assert text.index("b[0]") < text.index("(500, 0.002)-differentially private with respect to replacing one row")
    assert "verdict      NOT TO BE TRUSTED: no release looked" in text
