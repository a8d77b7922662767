"""The contract that every private kernel keeps, whatever drives it."""

import copy
import dataclasses
import functools
import pickle
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest
from helpers.drawn import recorded_noise
from helpers.tiers import some_every_day
from numpyro.infer import init_to_uniform, init_to_value

import numpyro_dp.kernels.base
import numpyro_dp.privacy.noise
from numpyro_dp import (
    DPHMC,
    DPSGHMC,
    DPSGLD,
    DPSGNHT,
    MCMC,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    FixedBatches,
    PoissonBatches,
    PosteriorWarning,
    PrivacyBudget,
    PrivacyBudgetError,
    UnsupportedModelError,
    decreasing_steps,
)
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.accounting import gaussian_eps
from numpyro_dp.privacy.clipping import BrokenCompilerError
from numpyro_dp.privacy.ledger import Ledger, Request

pytestmark = pytest.mark.usefixtures("shared_surveys")


@pytest.fixture(autouse=True)
def _nuts_has_no_warmup_of_its_own(monkeypatch):
    """In hundreds of its iterations what differs by rounding comes apart, and these tests compare draw by draw."""
    monkeypatch.setattr("numpyro_dp.preparation.chains.LEAST_WARMUP", 0)
    monkeypatch.setattr("numpyro_dp.preparation.chains.THINNING", 1)


N, D = 60, 3
_rng = np.random.default_rng(0)
X = _rng.uniform(-1, 1, (N, D))
Y = _rng.integers(0, 2, N)


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.deterministic("odds", jnp.exp(b[0]))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.deterministic("eta", X @ b)
        numpyro.sample("y", dist.Bernoulli(logits=scale * (X @ b)), obs=y)


def hmc(**options):
    return DPHMC(model, **{"prepare": False, "num_steps": 3, **options})


def penalty(**options):
    return DPPenalty(model, **{"prepare": False, **options})


def barker(**options):
    return DPBarker(model, **options)


def sghmc(**options):
    return DPSGHMC(model, **{"num_steps": 3, **options})


def prepared(kernel, mode, step_size=None, **options):
    """It finds its own step size."""
    return kernel(model, prepare=Preparation(mode=mode, force=True), **options)


OWNERS = np.arange(N) % 3

PREPARED = {
    "hmc_prepared": functools.partial(prepared, DPHMC, "surrogate"),
    "hmc_walk": functools.partial(prepared, DPHMC, "walk"),
    "penalty_prepared": functools.partial(prepared, DPPenalty, None),
}

KERNELS = {
    "hmc": hmc,
    "hmc_fresh": lambda **options: hmc(leapfrog="fresh", **options),
    "hmc_reuse": lambda **options: hmc(leapfrog="reuse", **options),
    "hmc_dense": lambda **options: hmc(dense_mass=True, adapt_mass_matrix=True, **options),
    "penalty": penalty,
    "penalty_guided": lambda **options: penalty(guided=True, **options),
    "penalty_component": lambda **options: penalty(one_component=True, **options),
    "penalty_component_guided": lambda **options: penalty(one_component=True, guided=True, **options),
    "penalty_dense": lambda **options: penalty(dense_mass=True, adapt_mass_matrix=True, **options),
    "penalty_poisson": lambda **options: penalty(batch_size=20, **options),
    "penalty_fixed": lambda **options: penalty(batch_size=FixedBatches(20), one_component=True, **options),
    "penalty_owners": lambda **options: penalty(owners=OWNERS, **options),
    "penalty_owners_poisson": lambda **options: penalty(owners=OWNERS, batch_size=20, **options),
    "hmc_poisson": lambda **options: hmc(batch_size=20, leapfrog="reuse", **options),
    "hmc_fixed": lambda **options: hmc(batch_size=FixedBatches(20), **options),
    "hmc_owners": lambda **options: hmc(owners=OWNERS, **options),
    "barker": barker,
    "barker_gaussian": lambda **options: barker(variance=1.0, guided=True, **options),
    "barker_logistic": lambda **options: barker(variance=1.0, correction="logistic", one_component=True, **options),
    "barker_batch": lambda **options: barker(batch_size=20, **options),
    "barker_owners": lambda **options: barker(owners=OWNERS, **options),
    "sgld": lambda **options: DPSGLD(model, **options),
    "sgld_poisson": lambda **options: DPSGLD(model, batch_size=20, num_steps=2, **options),
    "sgnht_fixed": lambda **options: DPSGNHT(model, batch_size=FixedBatches(20), **options),
    "sghmc_truncated": lambda **options: sghmc(batch_size=PoissonBatches(20, max_batch_size=24), **options),
    "sghmc_schedule": lambda **options: sghmc(**{**options, "batch_size": 20, "step_size": decreasing_steps(1e-3)}),
    **PREPARED,
}
FEW = ["hmc", "penalty"]
EVERYDAY = ["penalty", "hmc_prepared", "penalty_owners", "barker_batch", "sghmc_schedule"]


def kernels(names, everyday=("penalty",)):
    """Some kernels; those of them that share all code with an everyday one which a test is about run nightly."""
    marked = [pytest.param(KERNELS[k], id=k, marks=() if k in everyday else pytest.mark.nightly) for k in names]
    return pytest.mark.parametrize("make", marked)


every_kernel, few_kernels = kernels(KERNELS, EVERYDAY), kernels(FEW)
few_or_prepared = kernels(["penalty", "hmc_prepared", "penalty_prepared"])
few_or_tested = kernels(["penalty", "hmc", "hmc_walk", "penalty_prepared"])  # each draw is paid for


def run(kernel, *, stock=False, seed=0, key=jax.random.key, fields=("i", "noise_scale"), table=(X, Y), **options):
    options = {"num_warmup": 4, "num_samples": 6, "num_chains": 2, "chain_method": "vectorized"} | options
    options.setdefault("progress_bar", False)
    mcmc = (numpyro.infer.MCMC if stock else MCMC)(kernel, **options)
    mcmc.run(key(seed), table[0], y=table[1], extra_fields=fields)
    return mcmc


@functools.cache
def reference(make):
    """The run that others are compared with: vectorized chains in `numpyro_dp.MCMC`, repeatable noise."""
    return run(make(eps=5.0, noise_seed=1))


def made(kernel):
    """How many iterations have released something, over all chains."""
    releases = kernel.privacy.releases
    if "ratio" in releases:
        return releases["ratio"]["made"]
    return releases["grad"]["made"] // kernel._num_steps


def assert_same_draws(first, second, **tolerance):
    for name, draws in first.get_samples(group_by_chain=True).items():
        np.testing.assert_allclose(
            draws, second.get_samples(group_by_chain=True)[name], **(tolerance or {"rtol": 1e-4})
        )


def tolerance_of(make):
    """NUTS's trajectories are long, and what rounding does to them grows; another chain differs by about 1."""
    return {"rtol": 1e-3, "atol": 5e-3} if make is KERNELS["hmc_prepared"] else {}


@pytest.mark.nightly
@kernels(["penalty", "hmc", "barker", "sgld_poisson", "hmc_prepared"])
def test_runs_and_moves_in_float64(make, x64):
    check_run(make, "float64")


@every_kernel
def test_runs_and_moves(make):
    check_run(make, "float32")


def check_run(make, precision):
    """It moves, and the committed guarantee is the budget, to the last release."""
    # JAX keeps the constants of compiled functions by array, in the precision of the time: a copy of the table.
    mcmc = run(make(eps=50.0, step_size=0.05, noise_seed=1), num_warmup=10, num_samples=20, table=(X.copy(), Y.copy()))
    samples = mcmc.get_samples(group_by_chain=True)
    assert samples["b"].shape == (2, 20, D)
    assert samples["b"].dtype == jnp.dtype(precision)
    assert set(samples) == {"b", "scale", "odds"}
    assert all(bool(jnp.isfinite(v).all()) for v in samples.values())
    extra = mcmc.get_extra_fields(group_by_chain=True)
    assert (extra["i"][0] == jnp.arange(11, 31)).all()
    assert not extra["exhausted"].any()
    moved = (jnp.diff(samples["b"], axis=1) != 0).any(-1) | (jnp.diff(samples["scale"], axis=1) != 0)
    if make is not KERNELS["hmc_prepared"]:  # NUTS has nothing to accept
        assert (moved == extra["accepted"][:, 1:]).all()
    assert moved.any()
    report = mcmc.privacy
    assert report.eps == 50.0
    if make is not KERNELS["barker_batch"]:  # whose clip has a limit of its own
        assert report.eps_spent == pytest.approx(50.0, rel=1e-6 if "closed form" in str(report) else 0.03)
    made = {kind: release["made"] for kind, release in report.releases.items()}
    kernel = mcmc.sampler
    if make in PREPARED.values():
        assert kernel.prepared.mode == ("surrogate" if make is KERNELS["hmc_prepared"] else "walk")
        assert made.get("ratio") == (None if make is KERNELS["hmc_prepared"] else 60)
        assert "reserve" not in made
    elif isinstance(kernel, DPHMC):
        per_chain = {"position": 90, "fresh": 120, "reuse": 91}[kernel._leapfrog]
        assert made == {"ratio": 60, "grad": 2 * per_chain}  # 2 chains of 10 + 20 iterations
    elif hasattr(kernel, "_num_steps"):
        assert made == {"grad": 60 * kernel._num_steps}
    else:
        assert made == {"ratio": 60}
    assert made == {kind: release["planned"] for kind, release in report.releases.items()}


@kernels(["penalty", "sgld_poisson", "hmc_walk"])
@pytest.mark.parametrize(
    "chain_method",
    [
        "parallel",
        pytest.param("sequential", marks=pytest.mark.nightly),
        pytest.param(jax.vmap, id="vmap", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("stock", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["numpyro_dp", "numpyro"])
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # NumPyro's, under jax.vmap
def test_every_chain_method_gives_the_same_chains(make, chain_method, stock):
    planned = {"num_iterations": 10, "num_chains": 2} if stock else {}
    other = run(make(eps=5.0, noise_seed=1, **planned), stock=stock, chain_method=chain_method)
    assert_same_draws(reference(make), other)
    assert other.sampler.privacy.releases == reference(make).privacy.releases
    assert other.sampler.privacy.rho_spent == pytest.approx(other.sampler.privacy.rho)


@few_or_prepared
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"chain_method": "sequential", "progress_bar": True}, id="progress_bar"),
        pytest.param({"progress_bar": True, "jit_model_args": True}, id="jit_model_args", marks=pytest.mark.nightly),
        pytest.param({"key": jax.random.PRNGKey}, id="legacy_key", marks=pytest.mark.nightly),
    ],
)
def test_options_of_mcmc_do_not_change_the_chains(make, options, capfd):
    other = run(make(eps=5.0, noise_seed=1), **options)
    if make is KERNELS["hmc_prepared"]:  # a program with other rounding ends some of NUTS's trajectories elsewhere
        expected, found = (mcmc.sampler.prepared.surrogate for mcmc in (reference(make), other))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), expected, found)
    else:
        assert_same_draws(reference(make), other)
    if options.get("progress_bar"):
        assert ("spent" in capfd.readouterr().err) == (options.get("chain_method") == "sequential")


@pytest.mark.nightly
@few_or_prepared
def test_a_large_table_is_no_constant_of_the_programs(make, monkeypatch):
    seen = []

    def watched(self, *args, **kwargs):
        seen.append(self._jit_model_args)
        return original(self, *args, **kwargs)

    original = numpyro.infer.MCMC.run
    monkeypatch.setattr(numpyro.infer.MCMC, "run", watched)
    monkeypatch.setattr(numpyro_dp.kernels.base, "_LARGE_TABLE", X.nbytes - 1)
    monkeypatch.setattr(numpyro_dp.privacy.structured, "_WHOLE", 0)
    assert_same_draws(reference(make), run(make(eps=5.0, noise_seed=1)))
    monkeypatch.setattr(numpyro_dp.kernels.base, "_LARGE_TABLE", 10 * X.nbytes)
    run(make(eps=5.0, noise_seed=1))
    assert seen[-2:] == [True, False]


def test_where_n_is_private_the_tables_size_does_not_decide_on_the_program(monkeypatch):
    public, private = penalty(eps=1.0), penalty(eps=1.0, delta=1e-6, neighboring_relation="add_or_remove_one")
    found = []
    for large in (X.nbytes - 1, 10 * X.nbytes):
        monkeypatch.setattr(numpyro_dp.kernels.base, "_LARGE_TABLE", large)
        found.append([kernel.wants_table_as_argument((X,), {"y": Y}) for kernel in (public, private)])
    assert found == [[True, True], [False, True]]


@few_or_prepared
def test_a_single_chain_is_the_first_of_many(make):
    keys = jax.random.split(jax.random.key(0), 2)
    single = MCMC(
        make(eps=5.0, noise_seed=1, num_iterations=10, num_chains=2), num_warmup=4, num_samples=6, progress_bar=False
    )
    single.run(keys[0], X, y=Y)
    np.testing.assert_allclose(
        single.get_samples()["b"],
        reference(make).get_samples(group_by_chain=True)["b"][0],
        **(tolerance_of(make) or {"rtol": 1e-4, "atol": 1e-6}),
    )


@few_or_prepared
def test_thinning_keeps_every_second_draw(make):
    every = reference(make).get_samples(group_by_chain=True)["b"]
    thinned = run(make(eps=5.0, noise_seed=1), thinning=2).get_samples(group_by_chain=True)["b"]
    np.testing.assert_allclose(thinned, every[:, 1::2], rtol=1e-5)


@kernels(["penalty", "hmc_reuse", "sgld_poisson", "hmc_prepared"])
@pytest.mark.parametrize(
    ("stock", "collect"),
    [pytest.param(False, False, id="numpyro_dp"), pytest.param(True, True, id="numpyro", marks=pytest.mark.nightly)],
)
def test_warmup_then_run_is_one_run(make, stock, collect):
    planned = {"num_iterations": 10, "num_chains": 2}
    mcmc = (numpyro.infer.MCMC if stock else MCMC)(
        make(eps=5.0, noise_seed=1, **planned),
        num_warmup=4,
        num_samples=6,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    if not stock and make not in PREPARED.values():
        mcmc._compile(jax.random.key(0), X, y=Y)
        assert mcmc.privacy.rho_spent == 0
    mcmc.warmup(jax.random.key(0), X, y=Y, collect_warmup=collect)
    costly = make is not KERNELS["hmc_prepared"]
    assert not costly or made(mcmc.sampler) == 8
    mcmc.run(mcmc.post_warmup_state.rng_key, X, y=Y)
    assert_same_draws(reference(make), mcmc)
    assert not costly or made(mcmc.sampler) == 20


@few_kernels
def test_init_params_and_strategies(make):
    start = {"b": jnp.full((2, D), 0.3), "scale": jnp.full(2, -1.0)}
    state = make(eps=1.0, num_iterations=5, num_chains=2).init(
        jax.random.split(jax.random.key(0), 2), 2, start, (X,), {"y": Y}
    )
    assert (state.z["b"] == 0.3).all()
    kernel = make(
        eps=1.0, num_iterations=5, init_strategy=init_to_value(values={"b": jnp.array([1.0, 2.0, 3.0]), "scale": 1.0})
    )
    state = kernel.init(jax.random.key(0), 2, None, (X,), {"y": Y})
    np.testing.assert_allclose(state.z["b"], [1, 2, 3], rtol=1e-6)
    with pytest.raises(ValueError, match=r"init_params must hold unconstrained values of shapes.*got"):
        kernel.init(jax.random.key(0), 2, {"b": jnp.zeros(2)}, (X,), {"y": Y})


@few_kernels
def test_the_start_does_not_depend_on_the_rows(make):
    """P6: the same start for any table of this shape, also for one on which the likelihood is nowhere finite."""
    for strategy in (None, init_to_uniform):
        starts = []
        for table in (X, np.full_like(X, np.nan), 1e30 * X):
            kernel = make(eps=1.0, num_iterations=5, init_strategy=strategy)
            starts.append(kernel.init(jax.random.key(3), 2, None, (table,), {"y": Y}))
        for other in starts[1:]:
            for a, b in zip(jax.tree.leaves(starts[0].z), jax.tree.leaves(other.z), strict=True):
                assert (a == b).all()


@kernels(KERNELS, ["hmc", "penalty", "barker_batch", "sghmc_schedule"])
def test_the_chain_goes_on_over_hostile_rows(make):
    """P5: bad rows neither stop the chain nor make a released value non-finite."""
    table = X.copy()
    table[[7, 8, 9, 10], 1] = [np.nan, np.inf, -np.inf, 1e30]
    kernel = make(eps=50.0, step_size=0.02, num_iterations=20, noise_seed=1)
    state = kernel.init(jax.random.key(0), 5, None, (table,), {"y": Y})
    step = jax.jit(lambda s: kernel.sample(s, (table,), {"y": Y}))
    accepted = 0
    for _ in range(20):
        state = step(state)
        accepted += int(state.accepted)
    finite = [bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(state._replace(rng_key=0))]
    assert all(finite)
    assert accepted > 0


@few_or_prepared
def test_a_table_of_hostile_rows_only(make):
    mcmc = MCMC(make(eps=5.0), num_warmup=3, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), np.full_like(X, np.nan), y=Y)
    assert all(bool(jnp.isfinite(v).all()) for v in mcmc.get_samples().values())


@kernels(KERNELS, ["hmc"])
def test_random_keys_are_never_reused(make, request):
    """P15."""
    with jax.debug_key_reuse(True):
        kernel = make(eps=5.0, num_iterations=4)
        state = kernel.init(jax.random.key(0), 2, None, (X,), {"y": Y})
        for _ in range(2):
            state = jax.jit(lambda s: kernel.sample(s, (X,), {"y": Y}))(state)


@few_or_prepared
def test_one_trace_for_all_iterations_and_runs(make):
    traces = []

    def counted(X, y):
        traces.append(1)
        model(X, y)

    kernel = make(eps=5.0, num_iterations=20)
    kernel._settings = kernel._reader._settings = dataclasses.replace(kernel.settings, model=counted)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=8, progress_bar=False, jit_model_args=True)
    mcmc.run(jax.random.key(0), X, y=Y)
    first = len(traces)
    mcmc.run(jax.random.key(1), X, y=Y)
    assert len(traces) - first <= first / 2


# -- The budget --------------------------------------------------------------------------------------------------------


def test_default_delta_is_a_tenth_over_n():
    assert run(penalty(eps=1.0)).privacy.delta == pytest.approx(0.1 / N)


def test_add_or_remove_one_hides_n():
    n = 40_961  # no R-hat or count of draws, which noise decides, happens to be this number
    X_long, y_long = np.resize(X, (n, D)), np.resize(Y, n)
    mcmc = run(penalty(eps=1.0, delta=1e-6, neighboring_relation="add_or_remove_one"), table=(X_long, y_long))
    assert mcmc.privacy.num_rows is None
    told = rf"{n}|{n:,}"
    assert not any(re.search(told, text) for text in (str(mcmc.privacy), mcmc.privacy.to_json()))
    assert all(n not in np.shape(leaf) for leaf in jax.tree.leaves((mcmc._args, mcmc._kwargs)))


@pytest.mark.parametrize("relation", some_every_day(["replace_one", "add_or_remove_one"], ["replace_one"]))
def test_the_noise_is_that_of_the_report(relation):
    """sd of the noise in the log ratio = noise multiplier x sensitivity of a ratio clipped at clip_ratio x distance."""
    kernel = penalty(eps=3.0, delta=1e-5, neighboring_relation=relation, clip_ratio=0.7, adapt_step_size=False)
    mcmc = run(kernel, fields=("noise_scale", "z.b", "z.scale"))
    extra = mcmc.get_extra_fields(group_by_chain=True)
    z = jnp.concatenate([extra["z.b"], extra["z.scale"][..., None]], -1)
    distance = jnp.linalg.norm(jnp.diff(z, axis=1), axis=-1)
    accepted = extra["accepted"][:, 1:]
    multiplier = mcmc.privacy.releases["ratio"]["noise_multiplier"]
    sensitivity = {"replace_one": 2, "add_or_remove_one": 1}[relation] * 0.7 * distance
    np.testing.assert_allclose(extra["noise_scale"][:, 1:][accepted], (multiplier * sensitivity)[accepted], rtol=1e-4)


def test_a_bound_of_ones_own_is_that_of_the_noise():
    """In the order in which it is larger; of the sites as they are drawn (`scale` is positive)."""

    def bound(before, after):
        return 0.5 * jnp.abs(after["b"] - before["b"]).sum() + jnp.abs(jnp.log(after["scale"] / before["scale"])) * (
            1 + after["scale"]
        )

    mcmc = run(penalty(eps=300.0, clip_ratio=bound, adapt_step_size=False), fields=("noise_scale",))
    extra, draws = mcmc.get_extra_fields(group_by_chain=True), mcmc.get_samples(group_by_chain=True)
    multiplier = mcmc.privacy.releases["ratio"]["noise_multiplier"]
    pairs = [(c, i) for c in range(len(extra["accepted"])) for i in range(1, extra["accepted"].shape[1])]
    accepted = [(c, i) for c, i in pairs if extra["accepted"][c, i]]
    assert len(accepted) > 3
    for c, i in accepted:
        before, after = ({name: draws[name][c, k] for name in ("b", "scale")} for k in (i - 1, i))
        expected = 2 * multiplier * max(bound(before, after), bound(after, before))
        np.testing.assert_allclose(extra["noise_scale"][c, i], expected, rtol=1e-3)
    assert mcmc.privacy.releases["ratio"]["clip"] == "clip_ratio, a function of both places"
    assert any("changes by more than clip_ratio(before, after)" in text for text in mcmc.privacy.assumptions)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_no_positive_number_rejects_the_proposal(value):
    mcmc = run(penalty(eps=3.0, clip_ratio=lambda before, after: value), fields=("noise_scale",))
    extra = mcmc.get_extra_fields()
    assert not extra["accepted"].any()
    assert (extra["noise_scale"] == 0).all()


def test_a_bound_of_several_numbers_is_refused_before_anything_is_paid():
    kernel = penalty(eps=3.0, clip_ratio=lambda before, after: jnp.ones(2))
    with pytest.raises(ValueError, match=r"clip_ratio must return one number for two places, got .* shape \(2,\)"):
        run(kernel)
    assert not kernel.ledger.committed


def test_barker_needs_a_number():
    with pytest.raises(TypeError, match="a number; a function is for DPPenalty and DPHMC"):
        barker(eps=1.0, clip_ratio=lambda before, after: 1.0)


@few_or_tested
@pytest.mark.parametrize("stock", [False, True], ids=["numpyro_dp", "numpyro"])
def test_a_second_run_is_refused(make, stock):
    planned = {"num_iterations": 10, "num_chains": 2} if stock else {}
    mcmc = run(make(eps=1.0, **planned), stock=stock)
    before = mcmc.sampler.privacy.releases
    with pytest.raises(PrivacyBudgetError, match=r"does not allow .*Nothing was released.*num_iterations="):
        mcmc.run(jax.random.key(1), X, y=Y)
    assert mcmc.sampler.privacy.releases == before


@few_or_tested
def test_budget_kept_for_a_second_run(make):
    kernel = make(eps=50.0, num_iterations=16, num_chains=2)
    mcmc = run(kernel)
    assert mcmc.privacy.eps == 50.0
    assert mcmc.privacy.eps_spent < (49 if make in PREPARED.values() else 45)  # most of it is for the preparation
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(jax.random.key(1), X, y=Y, extra_fields=("i",))
    assert (mcmc.get_extra_fields(group_by_chain=True)["i"] == jnp.arange(11, 17)).all()
    assert mcmc.privacy.eps_spent == pytest.approx(50.0, rel=0.03)
    with pytest.raises(PrivacyBudgetError):
        mcmc.run(jax.random.key(2), X, y=Y)


@pytest.mark.parametrize("number", [1, 2])
def test_one_key_in_an_array_is_one_key(number):
    """NumPyro would take it for one chain's, whatever `num_chains` says."""
    mcmc = MCMC(
        penalty(eps=5.0), num_warmup=0, num_samples=3, num_chains=number, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(jax.random.split(jax.random.key(0), 1), X, y=Y)
    assert mcmc.get_samples(group_by_chain=True)["b"].shape[:2] == (number, 3)
    assert mcmc.get_samples()["b"].ndim == 2


@few_kernels
def test_a_run_beyond_the_plan_is_refused_before_it_starts(make):
    with pytest.raises(PrivacyBudgetError, match=r"does not allow 2 chain\(s\) of 10 iterations"):
        run(make(eps=1.0, num_iterations=9, num_chains=2))
    with pytest.raises(PrivacyBudgetError, match=r"2 more iteration\(s\)|does not allow"):
        run(make(eps=1.0, num_iterations=1, num_chains=1), stock=True)


@few_or_tested
@pytest.mark.parametrize(
    "chain_method", ["vectorized", "parallel", pytest.param("sequential", marks=pytest.mark.nightly)]
)
def test_the_budget_cannot_be_overrun_by_the_stock_mcmc(make, chain_method):
    """P4: more iterations than planned leave the state as it is, and say so."""
    kernel = make(eps=1.0, num_iterations=8, num_chains=2)
    with pytest.warns(RuntimeWarning, match="is used up") as caught:
        mcmc = run(kernel, stock=True, chain_method=chain_method)
        jax.effects_barrier()
        draws = mcmc.get_samples(group_by_chain=True)["b"]
        exhausted = mcmc.get_extra_fields(group_by_chain=True)["exhausted"]
        assert exhausted.any()
        copies = (draws[:, 1:] == draws[:, :-1]).all(-1)
        assert copies[exhausted[:, 1:]].all()
        assert not mcmc.get_extra_fields(group_by_chain=True)["accepted"][exhausted].any()
    assert sum("is used up" in str(warning.message) for warning in caught) == 1
    assert made(kernel) == 16
    assert kernel.privacy.eps_spent <= kernel.privacy.eps


@few_or_tested
def test_a_state_used_twice_does_not_fork_the_budget(make):
    kernel = make(eps=100.0, num_iterations=60, step_size=0.3)
    start = kernel.init(jax.random.key(0), 0, None, (X,), {"y": Y})
    step = jax.jit(lambda s: kernel.sample(s, (X,), {"y": Y}))
    with recorded_noise(kernel) as drawn, pytest.warns(RuntimeWarning, match="used up"):
        states = [step(start) for _ in range(60)]
        last = step(start)
        jax.effects_barrier()
    assert bool(last.exhausted)
    assert not any(bool(s.exhausted) for s in states)
    assert (last.z["b"] == start.z["b"]).all()
    assert len({noise.tobytes() for noise in drawn}) == len(drawn) >= 60  # each release from one state has its own


@few_kernels
def test_a_state_of_another_kernel_cannot_lower_the_noise(make):
    """The noise comes from the kernel's own ledger, not from the state."""
    cheap = make(eps=100.0, num_iterations=2, step_size=0.1, adapt_step_size=False)
    strict = make(eps=0.1, num_iterations=2, step_size=0.1, adapt_step_size=False)
    for kernel in (cheap, strict):
        start = kernel.init(jax.random.key(0), 0, None, (X,), {"y": Y})
    state = jax.jit(lambda s: cheap.sample(s, (X,), {"y": Y}))(start)
    moved = jax.jit(lambda s: strict.sample(s, (X,), {"y": Y}))(state)
    assert strict.privacy.rho_spent == pytest.approx(strict.privacy.rho / 2, rel=1e-3)
    assert float(moved.noise_scale) > 20 * float(state.noise_scale)


@few_or_prepared
def test_one_budget_one_table(make):
    kernel = make(eps=1.0, num_iterations=30, num_chains=2)
    run(kernel)
    other = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    with pytest.raises(PrivacyBudgetError, match="has run on other arrays"):
        other.run(jax.random.key(0), X.copy(), y=Y)
    other.run(jax.random.key(0), X, y=Y)


@kernels(["penalty", "hmc_prepared", "hmc_walk"])
@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_have_no_budget(make, duplicate):
    kernel = make(eps=1.0, num_iterations=30, num_chains=2)
    twin = duplicate(kernel)
    if duplicate is not copy.copy:  # a shallow copy shares the ledger itself
        with pytest.raises(PrivacyBudgetError, match="copy or was unpickled"):
            run(twin)
    run(kernel)
    assert duplicate(kernel).privacy == kernel.privacy


def test_stock_mcmc_needs_the_plan():
    with pytest.raises(ValueError, match=r"num_iterations.*num_chains.*numpyro_dp\.MCMC"):
        run(penalty(eps=1.0), stock=True)


@kernels(["penalty", "hmc_prepared"], ["penalty", "hmc_prepared"])
@pytest.mark.parametrize(
    ("typo", "message"),
    [
        (
            {"extra_fields": ("potential_energy",)},
            "extra_fields names 'potential_energy', which is not there; there is i, z, ",
        ),
        (
            {"extra_fields": ("accept_prob", "~z.c")},
            "names '~z.c', which is not there; there is ~z.b, ~z.odds, ~z.scale",
        ),
        ({"extra_fields": ("adapt_state.stepsize",)}, "there is adapt_state.step_size, "),
        ({"extra_fields": ("~accepted",)}, "names '~accepted', which is not there; there is ~z.b"),
        ({"extra_fields": ("carry.nothing",)}, "names 'carry.nothing', which is not there; there is carry"),
        ({"extra_fields": ("carry.z.nothing",)}, "names 'carry.z.nothing', which is not there; there is carry"),
        ({"extra_fields": ("accepted.foo",)}, "names 'accepted.foo', which is not there; there is accepted"),
        ({"extra_fields": "accept_prob"}, "must be a tuple of names"),
        ({"init_params": {"b": jnp.zeros((2, D))}}, "init_params must hold unconstrained values of shapes"),
        ({"init_params": {"b": jnp.zeros(D), "scale": jnp.zeros(())}}, "a leading axis for the chains"),
        ({"init_params": [0.0]}, "must be a dict"),
    ],
    ids=str,
)
def test_a_typo_costs_nothing(make, typo, message, tmp_path):
    with pytest.warns(UserWarning, match="a new privacy budget"):
        budget = PrivacyBudget(tmp_path / "budget", eps=5.0, delta=1e-2)
    kernel = make(eps=5.0, delta=1e-3, budget=budget)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=4, num_chains=2, chain_method="vectorized", progress_bar=False)
    with pytest.raises(ValueError, match=message):
        mcmc.run(jax.random.key(0), X, y=Y, **typo)
    assert not kernel.ledger.committed
    assert budget.charges == ()


@pytest.mark.parametrize(("key", "name"), [(0, "int"), (None, "NoneType"), (X, "ndarray")])
def test_what_is_no_key_is_an_error_that_says_what_is_one(key, name):
    kernel = penalty(eps=1.0)
    with pytest.raises(TypeError, match=rf"jax\.random\.key\(0\), \.\.\.\); got {name}$"):
        MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False).run(key, X, y=Y)
    assert not kernel.ledger.committed


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(("keys", "chains"), [(3, 2), (2, 1)])
def test_there_are_as_many_keys_as_chains_or_one(keys, chains, old):
    """NumPyro takes several keys of one chain for an axis of its draws."""
    kernel = penalty(eps=1.0)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, num_chains=chains, chain_method="sequential", progress_bar=False)
    key = jax.random.PRNGKey(0) if old else jax.random.key(0)
    with pytest.raises(ValueError, match=rf"{keys} keys for {chains} chain\(s\)"):
        mcmc.run(jax.random.split(key, keys), X, y=Y)
    assert not kernel.ledger.committed


def test_whatever_the_rows_the_report_says_what_becomes_of_missing_values():
    for x in (X, np.where(np.arange(N)[:, None] < 9, np.nan, X)):
        kernel = penalty(eps=1.0, num_iterations=2)
        kernel.prepare(x, y=Y)
        assert any("counts for nothing" in text for text in kernel.privacy.assumptions)


def test_a_chain_that_stands_still_is_flagged(capsys):
    kernel = DPPenalty(model, eps=1.0, prepare=False, clip_ratio=1.0, step_size=100.0, adapt_step_size=False)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=20, num_chains=2, chain_method="vectorized", progress_bar=False)
    with pytest.warns(PosteriorWarning, match="the posterior is off: a chain stood still: all of its draws of b"):
        mcmc.run(jax.random.key(0), X, y=Y)
    assert any("stood still" in reason for reason in mcmc.privacy.posterior.reasons)
    mcmc.print_summary()
    shown = capsys.readouterr().out
    assert "A chain stood still in b[0], b[1], b[2], scale: n_eff and r_hat of these mean nothing." in shown


@pytest.mark.parametrize("kernel", some_every_day([DPHMC, DPExponentialFamily, DPPenalty], [DPPenalty]))
def test_a_public_array_of_numpy_has_values_in_chains_that_run_in_parallel(kernel):
    """Such chains are initialised in a trace, in which an array that is converted is traced."""

    def model(y, loc):
        mu = numpyro.sample("mu", dist.Normal(loc[0], 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=mu), obs=y)

    options = {
        DPHMC: {"prepare": Preparation(force=True)},
        DPExponentialFamily: {"prepare": False},
        DPPenalty: {"prepare": False},
    }
    made = kernel(model, eps=20.0, num_iterations=12, num_chains=2, noise_seed=1, **options[kernel])
    table, loc = np.arange(400) % 2, np.array([0.5])
    if kernel is DPHMC:
        made.prepare(table, loc=loc)
    stock = numpyro.infer.MCMC(made, num_warmup=2, num_samples=4, num_chains=2, progress_bar=False)
    # Of a family that was read off in one map over devices, JAX 0.9.2 refuses the programs in another.
    for seed in range(1 if kernel is DPExponentialFamily else 2):
        stock.run(jax.random.key(seed), table, loc=loc)
        assert stock.get_samples()["mu"].shape == (8,)


def test_a_run_that_starts_while_another_is_on_its_way_keeps_its_plan(monkeypatch):
    """`MCMC.run` of chains that run in parallel returns before they have released anything."""
    grant, untouched = Ledger.grant, Ledger.untouched.fget
    seen = threading.Event()

    def grant_once_somebody_looked(self, *args):
        seen.wait(timeout=2)  # nobody looks where `init` waits for the chains
        seen.set()
        return grant(self, *args)

    def until_a_release(self):
        before = untouched(self)
        seen.set()
        for _ in range(100):
            if not before or not untouched(self):
                break
            time.sleep(0.05)
        return before

    kernel = DPPenalty(model, eps=20.0, prepare=False, num_iterations=12, num_chains=2, noise_seed=1)
    stock = numpyro.infer.MCMC(kernel, num_warmup=2, num_samples=4, num_chains=2, progress_bar=False)
    monkeypatch.setattr(Ledger, "grant", grant_once_somebody_looked)
    stock.run(jax.random.key(0), X, y=Y)
    monkeypatch.setattr(Ledger, "untouched", property(until_a_release))
    stock.run(jax.random.key(1), X, y=Y)
    assert stock.get_samples()["b"].shape == (8, X.shape[1])
    assert kernel.privacy.eps_spent <= 20.0


def test_what_cannot_move_is_not_standing(recwarn):
    def model(y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("whole", dist.Dirichlet(jnp.ones(1)))
        numpyro.deterministic("constant", jnp.ones(2))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    kernel = DPPenalty(model, eps=5000.0, prepare=False, clip_ratio=3.0, noise_seed=0)
    mcmc = MCMC(kernel, num_warmup=20, num_samples=200, progress_bar=False)
    table = np.zeros(30)
    mcmc.warmup(jax.random.key(0), table)
    mcmc.run(jax.random.key(1), table)
    assert np.ptp(mcmc.get_samples()["mu"]) > 0
    assert not any("stood still" in reason for reason in mcmc.privacy.posterior.reasons)
    assert not [w for w in recwarn if issubclass(w.category, PosteriorWarning)]


def test_draws_of_other_names_are_judged_too():
    def rename(draws):
        return {"all": jnp.zeros_like(draws["b"])}

    kernel = penalty(eps=500.0)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=20, postprocess_fn=rename, progress_bar=False)
    with pytest.warns(PosteriorWarning, match="stood still: all of its draws of \\['all'\\] are one point"):
        mcmc.run(jax.random.key(0), X, y=Y)


def test_explicit_noise_multipliers():
    report = run(hmc(noise_multiplier_ratio=30.0, noise_multiplier_grad=100.0)).privacy
    assert report.rho == pytest.approx(20 / (2 * 30**2) + 60 / (2 * 100**2))
    assert report.eps == pytest.approx(gaussian_eps(report.delta, report.rho))


def test_without_noise_nothing_is_private():
    report = run(hmc(eps=float("inf"), clip_ratio=float("inf"), clip_grad=float("inf"))).privacy
    assert not report.private
    assert "NOT PRIVATE" in str(report)
    assert report.releases["ratio"]["made"] == 20
    assert '"eps": "inf"' in report.to_json()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give the budget, eps=1.0 say; .* all of noise_multiplier_ratio, noise_multiplier_grad"),
        ({"eps": 1.0, "noise_multiplier_ratio": 2.0}, "give either `eps` or"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"eps": float("nan")}, "eps must be positive"),
        ({"eps": 1.0, "delta": 1.5}, "delta must lie strictly between 0 and 1"),
        ({"eps": 1.0, "neighboring_relation": "add_or_remove_one"}, "no default delta"),
        ({"eps": 1.0, "neighboring_relation": "swap"}, "neighboring_relation must be .*'replace_one'"),
        ({"eps": 1.0, "clip_ratio": 0.0}, "clip_ratio must be positive"),
        ({"eps": 1.0, "clip_ratio": float("nan")}, "clip_ratio must be positive"),
        ({"eps": 1.0, "clip_grad": float("inf")}, "clip_grad=inf bounds no row's influence"),
        ({"eps": 1.0, "num_iterations": 0}, "num_iterations must be a positive integer"),
        ({"eps": 1.0, "num_chains": 2.0}, "num_chains must be a positive integer"),
        ({"eps": 1.0, "leapfrog": "verlet"}, "leapfrog must be one of 'position', 'fresh', 'reuse'"),
        ({"eps": 1.0, "grad_share": 1.0}, "grad_share must lie strictly between 0 and 1"),
        ({"eps": 1.0, "jitter": 1.0}, "jitter must lie in"),
        ({"eps": 1.0, "num_steps": 0}, "num_steps must be a positive integer"),
        ({"eps": 1.0, "num_steps": 3, "trajectory_length": 1.0}, "either num_steps or trajectory_length"),
        ({"eps": 1.0, "trajectory_length": 1.0, "num_steps": None}, "trajectory_length needs a step_size"),
        ({"eps": 1.0, "step_size": -1.0}, "step_size must be positive"),
        ({"eps": 1.0, "target_accept_prob": 1.0}, "target_accept_prob must lie strictly"),
    ],
)
def test_impossible_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        hmc(**options)


def test_inverse_mass_matrices():
    def start(**options):
        kernel = penalty(eps=1.0, num_iterations=5, **options)
        return kernel.init(jax.random.key(0), 2, None, (X,), {"y": Y}).adapt_state.inverse_mass_matrix

    np.testing.assert_allclose(start(inverse_mass_matrix=2.0), np.full(4, 2.0))
    np.testing.assert_allclose(start(inverse_mass_matrix={"scale": 0.5}), [1, 1, 1, 0.5])
    np.testing.assert_allclose(start(inverse_mass_matrix=[1.0, 2, 3, 4], dense_mass=True), np.diag([1.0, 2, 3, 4]))
    with pytest.raises(ValueError, match="the model has 4 unconstrained parameters"):
        start(inverse_mass_matrix=np.ones(3))
    with pytest.raises(ValueError, match="needs dense_mass=True"):
        start(inverse_mass_matrix=np.eye(4))
    with pytest.raises(ValueError, match=r"names \['slope'\]"):
        start(inverse_mass_matrix={"slope": 1.0})


def test_trajectory_length_gives_the_number_of_steps():
    kernel = DPHMC(model, eps=1.0, prepare=False, step_size=0.1, trajectory_length=0.5)
    assert kernel._num_steps == 5


def test_a_broken_compiler_is_refused_before_the_data(monkeypatch):
    monkeypatch.setattr(numpyro_dp.privacy.clipping.jaxlib, "__version__", "0.10.2")
    with pytest.raises(BrokenCompilerError):
        run(penalty(eps=1.0))


# -- Adaptation --------------------------------------------------------------------------------------------------------


@few_kernels
def test_the_step_size_adapts_in_warmup_only(make):
    mcmc = run(make(eps=20.0), num_warmup=20, num_samples=5, fields=("adapt_state.step_size",))
    sizes = mcmc.get_extra_fields(group_by_chain=True)["adapt_state.step_size"]
    assert (sizes == sizes[:, :1]).all()
    assert (sizes != 1 / np.sqrt(N)).all()
    fixed = run(make(eps=20.0, adapt_step_size=False), num_warmup=20, num_samples=5, fields=("adapt_state.step_size",))
    np.testing.assert_allclose(fixed.get_extra_fields()["adapt_state.step_size"], 1 / np.sqrt(N), rtol=1e-6)


# -- Attacks that once succeeded ---------------------------------------------------------------------------------------


def noise_of(kernel, state):
    """The noise of the releases of one iteration."""
    with recorded_noise(kernel) as drawn:
        jax.block_until_ready(jax.jit(lambda s: kernel.sample(s, (X,), {"y": Y}))(state))
    return [part.tolist() for part in drawn]


def seeded(make, **options):
    kernel = make(**{"eps": 5.0, "noise_seed": 1, "num_iterations": 8} | options)
    return kernel, kernel.init(jax.random.key(0), 0, None, (X,), {"y": Y})


@kernels(["penalty", "hmc", "barker"])
def test_a_noise_seed_never_hides_two_queries_under_one_noise(make):
    kernel, state = seeded(make)
    first = noise_of(kernel, state)
    twin, same = seeded(make)
    assert noise_of(twin, same) == first  # a repeated run is what a seed is for
    # The same kernel, asked again at the same point, with another step size.
    assert noise_of(kernel, state) != first
    adapted = state._replace(adapt_state=state.adapt_state._replace(step_size=state.adapt_state.step_size * 2))
    assert noise_of(kernel, adapted) != first
    # Other kernels with the same seed: another budget, clip bound, step size, relation.
    others = ({"eps": 6.0}, {"clip_ratio": 2.0}, {"step_size": 0.3}, {"delta": 1e-5}, {"num_iterations": 9})
    for options in others:
        assert noise_of(*seeded(make, **options)) != first, options


@few_kernels
@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"init_params": {"b": jnp.array([0.1, 0.2, 0.3001]), "scale": jnp.array(0.4)}}, id="start"),
        pytest.param({"num_warmup": 2, "num_samples": 3}, id="warmup", marks=pytest.mark.nightly),
    ],
)
def test_runs_that_ask_something_else_have_other_noise_from_one_seed(make, other, monkeypatch):
    """The difference of what they release would be an exact difference of sums."""

    start = {"b": jnp.array([0.1, 0.2, 0.3]), "scale": jnp.array(0.4)}

    def noise(num_warmup=1, num_samples=4, init_params=start):
        drawn = []
        source = numpyro_dp.privacy.noise.NoiseSource
        monkeypatch.setattr(source, "draw", lambda *args: drawn.append(original(*args)) or drawn[-1])
        mcmc = MCMC(make(eps=5.0, noise_seed=1), num_warmup=num_warmup, num_samples=num_samples, progress_bar=False)
        mcmc.run(jax.random.key(0), X, y=Y, init_params=init_params)
        return [noise.tolist() for noise in drawn]

    original = numpyro_dp.privacy.noise.NoiseSource.draw
    first = noise()
    assert len(first) >= 5
    assert noise() == first
    assert not any(one in first for one in noise(**other))


def test_a_schedule_is_known_by_its_numbers():
    """It may read a global, which the code of the function does not show."""
    factor = {"of": 1.0}

    def noise():
        kernel = DPSGLD(model, eps=5.0, step_size=lambda t: factor["of"] * 1e-4 / t, num_iterations=4, noise_seed=1)
        return noise_of(kernel, kernel.init(jax.random.key(0), 0, None, (X,), {"y": Y}))

    first = noise()
    assert noise() == first
    factor["of"] = 2.0  # the noise multipliers depend on the ratios of the step sizes only
    assert noise() != first


def test_a_guessable_seed_is_named_so():
    def noise(seed):
        kernel = penalty(eps=1.0, num_iterations=5, noise_seed=seed)
        kernel.init(jax.random.key(0), 0, None, (X,), {"y": Y})
        return kernel.privacy.noise

    assert "found by trying" in noise(42)
    assert "found by trying" not in noise(2**100 + 1)


def test_tables_and_step_sizes_under_vmap_are_charged_one_by_one():
    kernel, state = seeded(penalty, noise_seed=None)
    accept = jax.jit(jax.vmap(lambda y: kernel.sample(state, (X,), {"y": y}).accept_prob))
    jax.block_until_ready(accept(jnp.stack([Y, 1 - Y])))
    assert kernel.privacy.releases["ratio"]["made"] == 2

    def at(step_size):
        adapt_state = state.adapt_state._replace(step_size=step_size)
        return kernel.sample(state._replace(adapt_state=adapt_state), (X,), {"y": Y}).noise_scale

    jax.block_until_ready(jax.jit(jax.vmap(at))(jnp.array([0.1, 0.2, 0.3])))
    assert kernel.privacy.releases["ratio"]["made"] == 5


def test_releases_cannot_be_taken_back():
    kernel, _ = seeded(penalty)
    with pytest.raises(ValueError, match="cannot be taken back"):
        kernel.ledger.grant({"ratio": Request(-3, (1,))}, 0, N, b"")


@pytest.mark.nightly
def test_warmup_and_run_of_the_reused_gradient():
    kernel = KERNELS["hmc_reuse"](eps=5.0)
    mcmc = MCMC(kernel, num_warmup=4, num_samples=6, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.warmup(jax.random.key(0), X, y=Y)
    mcmc.run(jax.random.key(1), X, y=Y)
    grad = mcmc.privacy.releases["grad"]
    assert grad["made"] == grad["planned"] == 2 * (10 * 3 + 1)


def test_a_failed_warmup_does_not_make_the_next_run_collect_it():
    mcmc = MCMC(penalty(eps=5.0, num_iterations=30), num_warmup=4, num_samples=6, progress_bar=False)
    with pytest.raises(ValueError, match="init_params"):
        mcmc.warmup(jax.random.key(0), X, y=Y, collect_warmup=True, init_params={"b": jnp.zeros(9)})
    mcmc.run(jax.random.key(0), X, y=Y, extra_fields=("i",))
    assert mcmc.get_extra_fields()["i"].tolist() == list(range(5, 11))


def test_a_plan_may_change_until_something_is_released():
    kernel = penalty(eps=5.0)
    with pytest.raises(ValueError, match="init_params"):
        MCMC(kernel, num_warmup=0, num_samples=10_000, progress_bar=False).run(
            jax.random.key(0), X, y=Y, init_params={"b": jnp.zeros(9)}
        )
    mcmc = run(kernel)
    assert mcmc.privacy.num_iterations == 10
    assert mcmc.privacy.eps_spent == pytest.approx(5.0, rel=1e-6)


def test_compiling_ahead_with_a_progress_bar_releases_nothing():
    mcmc = MCMC(penalty(eps=5.0), num_warmup=4, num_samples=6)
    mcmc._compile(jax.random.key(0), X, y=Y)
    assert mcmc.privacy.rho_spent == 0
    mcmc.run(jax.random.key(0), X, y=Y)


def test_the_printed_guarantee_is_rounded_up():
    kernel = penalty(eps=1.2345644, delta=0.1 / 39, num_iterations=5)
    kernel.init(jax.random.key(0), 0, None, (X,), {"y": Y})
    assert kernel.privacy.guarantee().startswith("(1.23457, 0.00257)-differentially private")


def test_other_arguments_that_are_refused_say_so():
    """The clean-up after a run must not hide its error."""
    mcmc = run(penalty(eps=5.0, num_iterations=100, num_chains=2))
    with pytest.raises(UnsupportedModelError, match=r"numpyro_dp cannot protect the rows"):
        mcmc.run(jax.random.key(0), X)
    (placeholder,) = mcmc._args  # of the run before, whose draws are still there
    assert placeholder.shape[0] == 1
