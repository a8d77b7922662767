"""The relation under which a row counts for nothing: what a sum's noise hides, and what releases cost."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant

from numpyro_dp import DPSGLD, MCMC, DPBarker, DPPenalty, FixedBatches, PrivacyBudget, PrivacyBudgetError, release_sum
from numpyro_dp.privacy.accounting import composed_delta, composed_eps, gaussian_delta
from numpyro_dp.privacy.clipping import GRID, clipped_sum, sensitivity_steps
from numpyro_dp.privacy.mechanisms import FixedBatchGaussian, Gaussian, PoissonGaussian, TruncatedPoissonGaussian
from numpyro_dp.tools.events import event_of

HOSTILE = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.3, -7.0], np.float32)


def model(x):
    theta = numpyro.sample("theta", dist.Normal(0, 3))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("x", dist.Normal(theta, 1), obs=x)


@pytest.mark.parametrize("value", HOSTILE)
def test_a_row_that_counts_for_nothing_moves_a_sum_by_no_more_than_the_claim(value):
    rows = np.concatenate([np.random.default_rng(0).normal(size=300).astype(np.float32), [value]])
    counts = np.append(np.ones(300, np.float32), np.float32(1))
    without = np.append(np.ones(300, np.float32), np.float32(0))

    def total(weight):
        found = clipped_sum(lambda row: jnp.where(row[1][0] > 0, row[0][0], 0.0), (rows, weight), 0.5)
        return int(found.hi) * 2**24 + int(found.lo)

    assert abs(total(counts) - total(without)) <= sensitivity_steps("zero_out") == GRID


def test_all_rows_and_poisson_batches_cost_what_they_cost_under_add_or_remove():
    for mechanism in (Gaussian(2.0), PoissonGaussian(1.1, 0.02), TruncatedPoissonGaussian(1.1, 0.02, 1000, 60)):
        releases = [(mechanism, 50)]
        assert composed_eps(releases, 1e-6, "zero_out") == composed_eps(releases, 1e-6, "add_or_remove_one")


def test_poisson_batches_against_dp_accounting():
    mechanism = PoissonGaussian(0.9, 0.05)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL, 1e-4)
    accountant.compose(event_of(mechanism, "zero_out"), 40)
    assert composed_eps([(mechanism, 40)], 1e-6, "zero_out") == pytest.approx(accountant.get_epsilon(1e-6), rel=2e-3)


def test_a_batch_of_fixed_size_gains_nothing():
    # With noise of sd m B: under replace-one that is m / 2 in units of the sensitivity.
    ours = composed_eps([(FixedBatchGaussian(3.0, 50, 1000), 20)], 1e-6, "zero_out")
    assert ours == composed_eps([(FixedBatchGaussian(1.5, 50, 1000), 20)], 1e-6, "replace_one")


def test_a_batch_of_fixed_size_is_no_cheaper_than_the_worst_table():
    """A table of two rows in batches of one: the row is drawn with probability 1/2, or else the other one, at -B."""
    noise, eps = 1.3, 0.4
    grid = np.linspace(-12, 12, 200_001)

    def density(at):
        return np.exp(-((grid - at) ** 2) / (2 * noise**2)) / (noise * np.sqrt(2 * np.pi))

    with_row = (density(1.0) + density(-1.0)) / 2
    without = (density(0.0) + density(-1.0)) / 2
    worst = max(
        np.trapezoid(np.maximum(one - np.exp(eps) * other, 0), grid)
        for one, other in ((with_row, without), (without, with_row))
    )
    assert composed_delta([(FixedBatchGaussian(noise, 1, 2), 1)], eps, "zero_out") >= worst


def test_a_released_sum_has_half_the_noise_of_replace_one():
    rows = np.linspace(0, 1, 1000, dtype=np.float32)
    scales = {
        relation: release_sum(lambda x: x, rows, bound=1.0, eps=1.0, neighboring_relation=relation).noise_sd
        for relation in ("replace_one", "zero_out")
    }
    assert scales["replace_one"] == pytest.approx(2 * scales["zero_out"], rel=1e-12)
    multiplier = scales["zero_out"]
    assert gaussian_delta(1.0, 1 / (2 * multiplier**2)) <= 1e-4 * (1 + 1e-9)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda **options: DPPenalty(model, eps=4.0, prepare=False, clip_ratio=2.0, **options),
        pytest.param(lambda **options: DPBarker(model, eps=4.0, clip_ratio=2.0, **options), marks=pytest.mark.nightly),
        pytest.param(lambda **options: DPSGLD(model, eps=4.0, clip_grad=2.0, **options), marks=pytest.mark.nightly),
        lambda **options: DPPenalty(model, eps=4.0, prepare=False, clip_ratio=2.0, batch_size=50, **options),
        lambda **options: DPPenalty(
            model, eps=4.0, prepare=False, clip_ratio=2.0, batch_size=FixedBatches(50), **options
        ),
    ],
    ids=["penalty", "barker", "sgld", "poisson", "fixed"],
)
def test_kernels_run_and_report_it(kernel):
    x = np.random.default_rng(0).normal(1, 1, 400).astype(np.float32)
    mcmc = MCMC(kernel(neighboring_relation="zero_out"), num_warmup=0, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), x)
    report = mcmc.privacy
    assert report.num_rows == 400
    assert report.delta == 0.1 / 400
    assert "zeroing out one row" in report.guarantee()
    assert report.eps_spent <= 4.0


def test_a_budget_under_another_relation_refuses(tmp_path):
    with pytest.warns(UserWarning, match="a new privacy budget"):
        budget = PrivacyBudget(tmp_path / "table.budget", eps=3.0, delta=1e-4, witness=False)
    with pytest.raises(PrivacyBudgetError, match="zero_out"):
        release_sum(
            lambda x: x,
            np.ones(1000, np.float32),
            bound=1.0,
            eps=1.0,
            neighboring_relation="zero_out",
            budget=budget,
        )
