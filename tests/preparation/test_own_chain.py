"""Kernels that go on with their own chain, in whitened coordinates that the preparation has found."""

import itertools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import NIGHTLY, some_every_day

from numpyro_dp import (
    DPSGHMC,
    DPSGLD,
    DPSGNHT,
    MCMC,
    DPBarker,
    FixedBatches,
    Preparation,
    PrivacyBudgetError,
)
from numpyro_dp.chain.algorithm import Algorithm, Step, Transition
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.kernels.prepared import OWN_SHARE
from numpyro_dp.model.separate import separate
from numpyro_dp.preparation.chains import OwnChain, Prepared
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.fund import RESERVE, Fund
from numpyro_dp.preparation.row_slopes import SLOPE_GRID
from numpyro_dp.privacy.accounting import gaussian_rho
from numpyro_dp.privacy.ledger import Ledger
from numpyro_dp.privacy.release import Vault
from tests.helpers.drawn import given_draw

KERNELS = [DPBarker, DPSGLD, DPSGNHT, DPSGHMC]
N = 400
_rng = np.random.default_rng(0)
X = np.column_stack([np.ones(N), _rng.normal(50.0, 10.0, N)])
Y = X @ [20.0, -0.7] + 3.0 * _rng.normal(size=N)
SCALES = np.array([100.0, 2.0])
PRECISION = np.diag(SCALES**-2.0) + X.T @ X / 9
EXACT = np.linalg.solve(PRECISION, X.T @ Y / 9), np.linalg.inv(PRECISION)
FORCE = Preparation(force=True)


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, jnp.asarray(SCALES)).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 3.0), obs=y)


def prepared(kernel, **options):
    return kernel(model, **{"eps": 20.0, "prepare": FORCE, **options})


def run(kernel, table=(X, Y), **options):
    mcmc = MCMC(kernel, **{"num_warmup": 2, "num_samples": 4, "progress_bar": False, **options})
    mcmc.run(jax.random.key(0), *table)
    return mcmc


def made(kernel):
    return {kind: releases["made"] for kind, releases in kernel.privacy.releases.items()}


def planned(kernel):
    return {kind: releases["planned"] for kind, releases in kernel.privacy.releases.items()}


# -- When there is a preparation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_there_is_a_preparation_where_it_is_asked_for(kernel):
    assert kernel(model, eps=1.0).preparation is None
    assert kernel(model, eps=1.0, prepare=False).preparation is None
    assert kernel(model, eps=1.0, prepare=True).preparation == Preparation()
    assert kernel(model, eps=1.0, prepare=Preparation(start={"b": 1.0})).preparation.start == {"b": 1.0}


@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        (DPBarker, {"clip_ratio": 1.0}, "clip_ratio: for the sampler without preparation"),
        (DPBarker, {"adapt_mass_matrix": True}, "adapt_mass_matrix: for the sampler"),
        (DPBarker, {"target_accept_prob": 0.3}, "target_accept_prob: for the sampler"),
        (DPSGLD, {"clip_grad": 1.0, "step_size": 0.1}, "clip_grad, step_size: .*prepare=False"),
        (DPSGLD, {"inverse_mass_matrix": 2.0}, "inverse_mass_matrix: for the sampler"),
        (DPSGLD, {"owners": np.arange(N) % 2}, "owners: for the sampler"),
        (DPSGNHT, {"friction": 2.0}, "friction: for the sampler"),
        (DPSGHMC, {"gradient_noise": 0.1}, "gradient_noise: for the sampler"),
        (DPSGHMC, {"friction": 0.0}, "friction: for the sampler"),
        (DPSGLD, {"eps": None, "noise_multiplier_grad": 1.0}, "needs a finite budget eps, got None"),
        (DPBarker, {"eps": math.inf}, "needs a finite budget eps, got inf"),
    ],
)
def test_what_the_preparation_finds_cannot_be_given(kernel, options, message):
    with pytest.raises(ValueError, match=message):
        kernel(model, **{"eps": 1.0, "prepare": True, **options})


@pytest.mark.parametrize("mode", ["surrogate", "walk"])
def test_modes_are_for_other_kernels(mode):
    with pytest.raises(ValueError, match=f"mode '{mode}' is for DPHMC and DPPenalty: this kernel goes on with its own"):
        DPSGLD(model, eps=1.0, prepare=Preparation(mode=mode))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_chain_that_would_hardly_move_is_refused_before_anything_is_released(kernel):
    kernel = prepared(kernel, eps=0.5, prepare=True)
    with pytest.raises(
        PrivacyBudgetError, match=r"(worth about|cannot give).*Nothing was released.*force=True"
    ) as told:
        run(kernel)
    assert "  " not in str(told.value)
    assert kernel.ledger.untouched
    assert kernel.prepared is None


def test_what_a_chain_is_worth_grows_with_the_budget_and_the_rows():
    """Of Langevin steps it is the time that the privacy noise allows: in proportion to both."""
    found = []
    for n, eps in ((1000, 1.0), (1000, 4.0), (4000, 1.0)):
        kernel = prepared(DPSGLD, eps=eps, delta=1e-5, num_iterations=2000)
        kernel.require_budget(2000, 1, (np.tile(X, (n // N + 1, 1))[:n], np.resize(Y, n)), {}, 2000)
        found.append(kernel._worth(2 * math.sqrt(2 / n), 2, n))
    assert found[1] > 8 * found[0]
    assert found[2] == pytest.approx(4 * found[0], rel=1e-3)


# -- Budget ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "batch"),
    some_every_day([(kernel, batch) for kernel in KERNELS for batch in (None, 100)], [(DPSGLD, 100)]),
)
def test_preparation_and_chain_together_cost_what_was_committed(kernel, batch, monkeypatch):
    """Whatever stages the search has gone through; and the chain's noise is that of the budget that was left for it."""
    reserves, assign = [], Ledger.assign

    def watched(self, reserve, kinds):
        reserves.append(self.plan.kinds[reserve].mechanisms[0].rho)
        assign(self, reserve, kinds)

    monkeypatch.setattr(Ledger, "assign", watched)
    kernel = prepared(kernel, **({} if batch is None else {"batch_size": batch}))
    mcmc = run(kernel)
    assert len(reserves) > 2
    assert reserves[0] == pytest.approx(OWN_SHARE * gaussian_rho(20.0, 0.1 / N), rel=1e-6)
    assert all(later < earlier for earlier, later in itertools.pairwise(reserves))
    # Of what was committed, composed anew; a batch's test can use no more than its variance.
    least = 9.0 if batch and isinstance(kernel, DPBarker) else 19.9
    assert least < mcmc.privacy.eps_at(0.1 / N) <= 20.0 * (1 + 1e-9)
    assert made(kernel) == planned(kernel)
    assert RESERVE not in planned(kernel)
    assert least - 0.5 < mcmc.privacy.eps_spent <= 20.0
    with pytest.raises(PrivacyBudgetError, match="Nothing was released"):
        run(kernel)


@pytest.mark.parametrize("kernel", some_every_day([DPBarker, DPSGNHT], [DPSGNHT]))
def test_the_preparation_is_made_once_and_pickled_with_its_kernel(kernel):
    kernel = prepared(kernel, num_iterations=12)
    kernel.prepare(X, Y)
    first, result = made(kernel), kernel.prepared
    kernel.prepare(X, Y)
    assert made(kernel) == first
    assert kernel.prepared is result
    again = pickle.loads(pickle.dumps(kernel))
    np.testing.assert_array_equal(again.prepared.covariance, result.covariance)
    (kind,) = kernel.settings.clips
    assert again.clip(kind) == kernel.clip(kind) == result.slope
    with pytest.raises(PrivacyBudgetError):
        run(again)
    run(kernel)
    run(kernel)
    assert made(kernel) == planned(kernel)


@pytest.mark.parametrize("kernel", some_every_day(KERNELS, [DPBarker]))
def test_a_report_says_what_was_found_and_in_which_coordinates(kernel):
    mcmc = run(prepared(kernel))
    report, slope = mcmc.privacy, f"{mcmc.sampler.prepared.slope:g}"
    assert "whitened coordinates that were found privately" in str(report.posterior)
    assert any(slope in text for text in report.clips.values())
    assert "unconstrained space" not in " ".join(report.assumptions)
    assert not any("default" in text for text in report.assumptions)


@pytest.mark.parametrize("kernel", some_every_day(KERNELS, [DPBarker]))
@pytest.mark.parametrize("bad", some_every_day([np.nan, 1e30, np.inf], [1e30]))
def test_hostile_rows_leave_finite_numbers(kernel, bad):
    x = X.copy()
    x[::3] = bad
    mcmc = run(prepared(kernel), table=(x, Y))
    assert np.isfinite(mcmc.get_samples()["b"]).all()
    assert np.isfinite(mcmc.sampler.prepared.slope)
    assert made(mcmc.sampler) == planned(mcmc.sampler)


def test_a_search_that_did_not_arrive_is_a_reason_for_doubt():
    kernel = prepared(DPSGLD, num_iterations=6)
    kernel.prepare(X, Y)
    assert not any("had not arrived" in reason for reason in kernel.privacy.posterior.reasons)
    kernel._result = kernel.prepared._replace(has_arrived=False)
    assert "the search had not arrived" in kernel.privacy.posterior.reasons[0]


# -- Coordinates -------------------------------------------------------------------------------------------------------

START = np.array([1.0, -2.0])
ROOT = np.array([[2.0, 0.0], [0.5, 0.1]])


class Shift(Algorithm):
    """Moves by 1 in each coordinate, if it is told to."""

    releases = noise_shapes = request = None

    def init_carry(self, rng_key, z):
        return z

    def transition(self, step):
        zero = jnp.zeros(())
        return Transition(step.z + 1, step.carry, zero, zero, step.z)


def own_chain():
    found = Prepared("own", (), START, ROOT @ ROOT.T, Frame(START, ROOT), slope=1.0)
    return OwnChain(found, Shift())


@pytest.mark.parametrize("accepted", [True, False])
def test_a_chain_moves_in_whitened_coordinates_and_stays_exactly_where_it_is(accepted):
    chain, y = own_chain(), np.array([0.3, -0.7])
    z = jnp.asarray(START + ROOT @ y, jnp.float32)
    np.testing.assert_allclose(chain.init_carry(jax.random.key(0), z), y, rtol=1e-5)
    moved = chain.transition(Step(None, None, None, 0, z, None, jnp.array(accepted)))
    np.testing.assert_allclose(moved.carry, y, rtol=1e-5)
    if accepted:
        np.testing.assert_allclose(moved.z, START + ROOT @ (y + 1), rtol=1e-5)
    else:
        np.testing.assert_array_equal(moved.z, z)


def targets():
    rows = X.astype(np.float32), Y.astype(np.float32)
    separated = separate(model, rows, {}, None, None, True)
    vault = Vault(separated.rows(rows, {}), neighboring_relation="replace_one", private=False)
    densities = separated.log_prior(rows, {}), separated.row_log_density(rows, {})
    target = PrivateTarget(vault, *densities, num_params=separated.num_params, num_rows=separated.num_rows)
    return target, target.of(own_chain().parameters)


@pytest.mark.parametrize("tabulated", some_every_day([False, True], [False]))
def test_a_target_in_other_parameters_is_the_same_target(tabulated):
    """Log ratios do not depend on coordinates; gradients follow the chain rule; both are clipped in the new ones."""
    target, of_y = targets()
    if tabulated:
        target.find_structure()
        of_y.find_structure()
    y, y_new = jnp.array([0.1, 0.2]), jnp.array([0.3, -0.1])
    z, z_new = (jnp.asarray(START + ROOT @ np.asarray(point), jnp.float32) for point in (y, y_new))
    np.testing.assert_allclose(of_y.exact_log_ratio(y, y_new), target.exact_log_ratio(z, z_new), rtol=1e-3)
    np.testing.assert_allclose(of_y.log_prior(y), target.log_prior(z), rtol=1e-5)
    residual = Y - X @ np.asarray(z, float)
    rows = residual[:, None] * X / 9 @ ROOT
    bound = float(np.median(np.linalg.norm(rows, axis=1)))
    clipped = rows * np.minimum(1, bound / np.linalg.norm(rows, axis=1))[:, None]
    found = of_y.gradient(given_draw(noisy=False, noise_multiplier=0.0), y, bound)
    np.testing.assert_allclose(found.value, clipped.sum(0), rtol=1e-2)  # tables round the clip down


@pytest.mark.parametrize("kernel", some_every_day([DPBarker, DPSGLD], [DPBarker]))
def test_the_clip_bound_is_what_few_rows_exceed_in_the_coordinates_of_the_chain(kernel):
    """Rows' gradients there are known: linear in the residual."""
    kernel = prepared(kernel, eps=1e4, num_iterations=2)
    kernel.prepare(X, Y)
    found = kernel.prepared
    root = np.linalg.cholesky(found.covariance)
    y = np.random.default_rng(1).normal(size=(200, 2))
    residuals = Y - (found.start + y @ root.T) @ X.T
    sizes = np.sqrt((residuals**2).mean(0)) * np.linalg.norm(X @ root, axis=1) / 9
    if kernel.settings.clips.keys() == {"ratio"}:
        sizes = sizes * math.sqrt(2)  # twice the root mean square over directions
    exceeding = [np.sum(sizes > found.slope * factor) for factor in (1.0, 1 / SLOPE_GRID.ratio)]
    wanted = 0.6 * math.sqrt(N)
    assert exceeding[0] <= 2 * wanted + 5
    assert exceeding[1] > wanted / 4


# -- Posteriors --------------------------------------------------------------------------------------------------------

CHAINS = 400


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("kernel", "options", "iterations", "low", "high"),
    [
        pytest.param(DPSGLD, {}, 80, 0.9, 1.2, id="sgld", marks=NIGHTLY),
        pytest.param(
            DPSGLD, {"batch_size": FixedBatches(200)}, 120, 0.9, 1.4, id="sgld_on_batches", marks=pytest.mark.nightly
        ),
        pytest.param(DPSGNHT, {}, 120, 0.8, 1.25, id="sgnht", marks=NIGHTLY),
        pytest.param(DPSGHMC, {}, 30, 0.9, 1.2, id="sghmc", marks=NIGHTLY),
        pytest.param(DPBarker, {}, 80, 0.9, 1.1, id="barker"),
    ],
)
def test_a_prepared_chain_has_the_exact_posterior_on_raw_scales(kernel, options, iterations, low, high):
    """Intercept and slope of a covariate around 50 are correlated by -.98, and the prior is far wider than they are.

    Chains are independent: errors of a mean and a variance over `CHAINS` of them are known. Beside these, variances
    may be off by what the step size does (SGLD: 1 / (1 - h / 2)), and means by clipped rows (a tenth of an sd).
    """
    kernel = prepared(kernel, eps=1e7, num_iterations=iterations, num_chains=CHAINS, **options)
    states = kernel.init(jax.random.split(jax.random.key(0), CHAINS), iterations // 2, None, (X, Y), {})
    states = jax.jit(
        lambda states: jax.lax.fori_loop(0, iterations, lambda _, s: kernel.sample(s, (X, Y), {}), states)
    )(states)
    mean, covariance = EXACT
    axes = np.linalg.cholesky(np.linalg.inv(covariance))
    standard = (np.asarray(states.z["b"], float) - mean) @ axes
    assert (np.abs(standard.mean(0)) < 5 / math.sqrt(CHAINS) + 0.1).all(), standard.mean(0)
    error = 5 * math.sqrt(2 / CHAINS)
    assert (low - error < standard.var(0)).all()
    assert (standard.var(0) < high + error).all(), standard.var(0)
    assert Fund(kernel.ledger).left == 0


def test_the_report_says_of_each_release_what_bounds_it():
    """And not of all of them what bounds the jumps."""
    kernel = DPBarker(model, eps=1.0, prepare=True)
    assert "jumps" not in kernel.describe_clip("scales") + kernel.describe_clip("count")
