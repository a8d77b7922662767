"""`numpyro_dp.audit`: whole runs, told apart on two tables; and the mistakes that it must find.

Bounds hold with a confidence of ``1 - 1e-5``: an honest kernel is accused once in a hundred thousand tests. With half
the noise, the bound is 2.9 on average beside a claim of 2, with a standard deviation of .16.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.mistakes import noise_divided_by

import numpyro_dp.privacy.clipping
import numpyro_dp.privacy.noise
from numpyro_dp import (
    DPHMC,
    DPSGHMC,
    DPSGLD,
    DPSGNHT,
    MCMC,
    AuditResult,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    PrivacyBudgetError,
    audit,
)
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.kernels.stochastic_gradient import StochasticGradientKernel
from numpyro_dp.preparation import Preparation
from numpyro_dp.privacy.batches import PoissonBatches
from numpyro_dp.privacy.noise import NoiseSource

pytestmark = pytest.mark.optimized

DELTA = 0.05
CONFIDENCE = 1 - 1e-5
FAR, NOTHING = 1e6, np.nan  # rows of NaN contribute nothing
UP, DOWN = (np.array([value, NOTHING], np.float32) for value in (FAR, -FAR))


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def langevin(**options):
    return lambda: DPSGLD(model, eps=2.0, delta=DELTA, step_size=0.02, clip_grad=1.0, **options)


def run(make, table=UP, neighbor=DOWN, **options):
    settings = {"num_warmup": 1, "num_samples": 3, "num_chains": 2, "trials": 2_500, "confidence": CONFIDENCE}
    return audit(make, (table,), (neighbor,), **{**settings, **options})


@pytest.mark.statistical
def test_a_run_gives_away_nearly_what_it_claims_and_no_more():
    """Two chains, warmup included: the guess is the best there is, and finds most of the eps."""
    found = run(langevin())
    assert found.holds
    # Among 150 simulated audits of this kind the bound was .93 on average, with a standard deviation of .09.
    assert 0.2 * found.eps < found.eps_lower < found.eps
    assert found.eps == pytest.approx(2.0)
    assert re.search(r"1667 \+ 1667 runs.*at least \d\.\d{3} .*below the claim of 2", str(found))
    alpha = np.linspace(0, 1, 21)
    allowed = found.trade_off(alpha)
    missed = np.array([np.mean(found.scores[0] <= np.quantile(found.scores[1], 1 - a)) for a in alpha])
    assert np.all(allowed <= 1 - alpha + 1e-12)
    # That a guess is wrong with probability alpha is an estimate, too, and the curve is steep near 0.
    n = len(found.scores[0])
    alpha_at_most = np.minimum(alpha + 5 * np.sqrt(alpha * (1 - alpha) / n) + 12 / n, 1)
    assert np.all(missed > found.trade_off(alpha_at_most) - 5 * np.sqrt(0.25 / n))


@pytest.mark.parametrize(("bound", "printed"), [(1.0033, "1.003"), (0.99996, "0.999"), (0.0, "0.000"), (2.0, "2.000")])
def test_a_lower_bound_is_printed_no_larger_than_it_is(bound, printed):
    found = AuditResult(bound, 2.0, DELTA, CONFIDENCE, "replace_one", (np.zeros(9), np.zeros(9)), ((2.0, DELTA),))
    assert f"is at least {printed} (" in str(found)


@pytest.mark.nightly
def test_the_picture_shows_the_claim_and_the_guess():
    axes = run(langevin(), trials=300).plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "ruled out by the claim",
        "guessing blindly",
        "95% band of so many trials",
        "this audit's guess",
    ]
    assert "claimed: eps 2 at delta 0.05" in axes.get_title(loc="left")


KERNELS = {
    "penalty": lambda: DPPenalty(
        model, eps=2.0, delta=DELTA, prepare=False, step_size=0.5, clip_ratio=1.0, guided=True
    ),
    "penalty_poisson": lambda: DPPenalty(
        model, eps=2.0, delta=DELTA, prepare=False, step_size=0.5, clip_ratio=0.2, batch_size=PoissonBatches(rate=0.5)
    ),
    "hmc": lambda: DPHMC(
        model, eps=2.0, delta=DELTA, prepare=False, step_size=0.3, num_steps=2, clip_ratio=1.0, clip_grad=1.0
    ),
    "hmc_reuse": lambda: DPHMC(
        model, eps=2.0, delta=DELTA, prepare=False, step_size=0.3, leapfrog="reuse", clip_grad=1.0
    ),
    "barker": lambda: DPBarker(model, eps=5.0, delta=DELTA, step_size=0.1, clip_ratio=1.0),
    "sgnht": lambda: DPSGNHT(model, eps=2.0, delta=DELTA, step_size=0.05, clip_grad=1.0),
    "sghmc": lambda: DPSGHMC(model, eps=2.0, delta=DELTA, step_size=0.05, num_steps=2, clip_grad=1.0),
    "sgld_add": langevin(neighboring_relation="add_or_remove_one"),
}


@pytest.mark.statistical
@pytest.mark.parametrize("name", [pytest.param(k, marks=() if k == "hmc" else pytest.mark.nightly) for k in KERNELS])
def test_runs_of_every_kernel_stay_below_their_claim(name):
    neighbor = DOWN[1:] if name.endswith("_add") else DOWN
    found = run(KERNELS[name], neighbor=neighbor)
    print(f"{name}: {found}")
    assert found.holds


@pytest.mark.nightly
def test_a_run_on_sufficient_statistics_stays_below_its_claim():
    def make():
        return DPExponentialFamily(
            model, eps=2.0, delta=DELTA, prepare=False, step_size=0.5, bounds=(-1.0, 1.0), guided=True
        )

    found = run(make, np.array([1.0, 0.0], np.float32), np.array([-1.0, 0.0], np.float32))
    print(found)
    assert found.holds


def prepared(mode="surrogate"):
    return DPHMC(model, eps=2.0, delta=DELTA, prepare=Preparation(mode=mode, force=True))


def audit_of_preparations():
    rows = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    one, other = (np.append(rows, np.float32(far)) for far in (1e4, -1e4))
    return run(prepared, one, other, trials=400)


@pytest.mark.nightly
def test_a_whole_preparation_stays_below_its_claim():
    """All its stages, of which each decides what the next one asks: some thirty counts, six gradients, and so on."""
    found = audit_of_preparations()
    print(found)
    assert found.holds


@pytest.mark.nightly
def test_less_noise_in_a_preparation_is_noticed(monkeypatch):
    """An eighth of it: half of it would take 1500 runs at this confidence, and a quarter is missed in one of six."""
    monkeypatch.setattr(NoiseSource, "draw", noise_divided_by(8))
    assert not audit_of_preparations().holds


@pytest.mark.statistical
def test_chains_that_a_preparation_chooses_are_not_audited_with_it():
    rows = np.random.default_rng(0).normal(size=60).astype(np.float32)
    with pytest.raises(ValueError, match="chose mode 'walk'"):
        run(lambda: prepared("walk"), rows, rows, trials=100)


@pytest.mark.statistical
@pytest.mark.nightly
def test_half_the_noise_is_noticed(monkeypatch):
    monkeypatch.setattr(NoiseSource, "draw", noise_divided_by(2))
    found = run(langevin())
    assert not found.holds
    assert "ABOVE THE CLAIM" in str(found)


@pytest.mark.nightly
def test_a_clip_that_is_left_out_is_noticed(monkeypatch):
    monkeypatch.setattr(
        numpyro_dp.privacy.clipping,
        "scalar_steps",
        lambda values, bound: jnp.round(jnp.nan_to_num(values * (numpyro_dp.privacy.clipping.GRID / bound))).astype(
            jnp.int32
        ),
    )
    kernel = KERNELS["penalty"]
    assert not run(kernel, *(np.array([value, NOTHING], np.float32) for value in (20, -20))).holds


@pytest.mark.nightly
def test_the_wrong_relation_is_noticed(monkeypatch):
    monkeypatch.setattr(
        numpyro_dp.privacy.noise, "sensitivity_steps", lambda relation: numpyro_dp.privacy.clipping.GRID
    )
    assert not run(langevin()).holds


@pytest.mark.nightly
@pytest.mark.parametrize("uncounted", ["chains", "warmup"])
def test_iterations_that_are_not_planned_for_are_noticed(uncounted, monkeypatch):
    """Of four chains one, or of four iterations only the one after warmup."""
    exact = StochasticGradientKernel.releases

    def forgetful(self, num_iterations, num_chains, resumed=False):
        if uncounted == "chains":
            return exact(self, num_iterations, 1, resumed)
        return exact(self, num_iterations - 3, num_chains, resumed)

    monkeypatch.setattr(StochasticGradientKernel, "releases", forgetful)
    monkeypatch.setattr("numpyro_dp.tools.auditing._Repeated.grant", _unlimited)
    lengths = {
        "chains": {"num_warmup": 0, "num_samples": 2, "num_chains": 4},
        "warmup": {"num_warmup": 3, "num_samples": 1},
    }
    assert not run(langevin(), **lengths[uncounted]).holds


def _unlimited(self, requests, iteration, *others):
    """As if the ledger did not look either."""
    plan = self._plan
    kinds = {name: kind._replace(counts=(10**9,) * len(kind.counts)) for name, kind in plan.kinds.items()}
    self._plan = dataclasses.replace(plan, kinds=kinds)
    try:
        return super(type(self), self).grant(requests, iteration, *others)
    finally:
        self._plan = plan


@pytest.mark.nightly
def test_the_same_noise_in_all_iterations_is_noticed(monkeypatch):
    """The row pulls in the first iteration and does not later, so that a difference is free of noise."""
    drawn = {}
    exact = NoiseSource.draw

    def repeated(self, shape, mechanism, relation, nonce):
        drawn["count"] = drawn.get("count", -1) + 1
        chain = drawn["count"] % 2_000
        if drawn["count"] < 2_000 or drawn["count"] % 8_000 < 2_000:
            drawn[chain] = exact(self, shape, mechanism, relation, nonce)
        return drawn[chain]

    tables = np.array([FAR, NOTHING], np.float32), np.array([-99, NOTHING], np.float32)
    start = {"mu": jnp.asarray(-100.0)}

    def make():
        return DPSGLD(model, eps=2.0, delta=DELTA, step_size=0.02, clip_grad=0.5)

    options = {"num_chains": 1, "init_params": start, "num_warmup": 0, "num_samples": 4, "trials": 2_000}
    assert run(make, *tables, **options).holds
    monkeypatch.setattr(NoiseSource, "draw", repeated)
    assert not run(make, *tables, **options).holds


def test_a_kernel_that_was_audited_releases_nothing_any_more():
    """It had more noise than its plan; somebody may have kept it."""
    kept = []
    run(lambda: kept.append(langevin()()) or kept[-1], trials=100)
    assert len(kept) == 2
    for kernel in kept:
        with pytest.raises(PrivacyBudgetError, match="is a copy or was unpickled"):
            MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False).run(jax.random.key(0), UP)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"confidence": 1.0}, ValueError, "confidence must lie"),
        ({"trials": 10}, ValueError, "at least 100 trials"),
    ],
)
def test_settings_that_prove_nothing_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        run(langevin(), **change)


def test_what_is_no_kernel_or_no_table_is_named():
    with pytest.raises(TypeError, match="must return a private kernel"):
        audit(lambda: model, (UP,), (DOWN,))
    kernel = langevin()()
    with pytest.raises(ValueError, match="a new kernel each time"):
        audit(lambda: kernel, (UP,), (DOWN,))
    with pytest.raises(TypeError, match="tuple or the dict"):
        audit(langevin(), UP, DOWN)
    with pytest.raises(ValueError, match="claims for the two tables differ"):
        audit(lambda: DPSGLD(model, eps=1.0, step_size=0.01), (UP,), (np.append(UP, 1),), trials=100)


def test_tables_may_be_given_by_keyword():
    found = audit(langevin(), {"y": UP}, {"y": DOWN}, trials=200, num_samples=2)
    assert isinstance(found, AuditResult)
    assert issubclass(DPSGLD, DPKernel)
    assert len(found.scores[0]) == 200 - 200 // 3
    assert jax.tree.leaves(found.scores)[0].shape == (134,)
