"""Arguments and calls with which the noise would be that of another release than the one that is made."""

import threading

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_dp import (
    DPHMC,
    DPSGLD,
    MCMC,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    FixedBatches,
    PoissonBatches,
    PrivacyBudgetError,
)
from numpyro_dp.owners import OwnersError
from numpyro_dp.privacy.accounting import composed_eps
from numpyro_dp.privacy.batches import Batch, as_batches
from numpyro_dp.privacy.ledger import Wanted, plan_for_budget
from numpyro_dp.privacy.mechanisms import Gaussian, LogisticBit
from numpyro_dp.privacy.release import RowSum, Vault
from tests.helpers.drawn import given_draw
from tests.helpers.local_owners import LocalExchange

Y = (np.arange(200) % 2).astype(np.float32)


def model(y):
    logit = numpyro.sample("logit", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=logit), obs=y)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (DPExponentialFamily, {"batch_size": 10}),
        (DPHMC, {"shares": {"ratio": 100.0}}),
        (DPPenalty, {"shares": {"ratio": 100.0}}),
        (DPBarker, {"shares": {"ratio": 100.0}}),
        (DPSGLD, {"shares": {"grad": 100.0}}),
        (DPSGLD, {"adapt_mass_matrix": True}),  # the noise that fits in follows from the scales
    ],
)
def test_arguments_of_the_base_class_are_no_options(kernel, options):
    """With `batch_size`, sums over all rows were accounted for as Poisson batches; with `shares` eps was 19 for 1."""
    with pytest.raises(TypeError, match="this kernel has no argument " + next(iter(options))):
        kernel(model, eps=1.0, **options)


def test_dphmc_with_its_preparation_has_no_batches():
    with pytest.raises(ValueError, match="batch_size: for the sampler without preparation"):
        DPHMC(model, eps=1.0, batch_size=10)


@pytest.mark.parametrize(("option", "meant"), [("dleta", "delta"), ("epsilon", "eps"), ("noise_sed", "noise_seed")])
def test_a_misspelled_argument_is_told_what_was_meant(option, meant):
    with pytest.raises(TypeError, match=rf"no argument {option}\. Did you mean {meant}\\?"):
        DPHMC(model, **{"eps": 1.0} | {option: 1.0})


def test_an_option_of_nuts_is_told_why_it_is_not_there():
    with pytest.raises(TypeError, match=r"no argument max_tree_depth\. NumPyro's NUTS has it.* leave it out"):
        DPHMC(model, eps=1.0, max_tree_depth=5)


@pytest.mark.parametrize("value", [True, "1.0"])
def test_eps_is_a_number(value):
    with pytest.raises(TypeError, match="eps must be a number"):
        DPHMC(model, eps=value)


@pytest.mark.parametrize("release", ["statistics", "bit"])
def test_a_release_on_all_rows_is_never_accounted_for_as_one_on_a_batch(release):
    vault = Vault((jax.numpy.asarray(Y),), neighboring_relation="replace_one", batches=as_batches(10))
    query = RowSum(lambda row: row[0][0], 1.0)
    with pytest.raises(TypeError, match="accounted for as on PoissonBatches"):
        if release == "statistics":
            vault.keep(query)
        else:
            vault.ask_bit(given_draw(mechanism=LogisticBit(1.0), batch=Batch(np.arange(10), np.array(10))), query, 0.0)


@pytest.mark.parametrize("batches", [None, FixedBatches(10)])
def test_an_algorithm_gets_nothing_without_noise_in_a_private_run(batches):
    kernel = DPPenalty(model, eps=1.0, prepare=False, batch_size=batches, num_iterations=1)
    kernel.init(jax.random.key(0), 0, None, (Y,), {})
    target = kernel.target(kernel.separate((Y,), {}), (Y,), {})
    batch = None if batches is None else Batch(np.arange(10), np.array(10))
    z, z_new = np.zeros(1, np.float32), np.ones(1, np.float32)

    def draw():
        return given_draw(noisy=False, batch=batch, ledger=kernel.ledger)

    for release in (
        lambda: target.log_ratio(draw(), z, z_new, 1.0),
        lambda: target.gradient(draw(), z, 1.0),
        lambda: target.exact_log_ratio(z, z_new),
    ):
        with pytest.raises(TypeError, match="nothing is released without noise"):
            release()


def test_shares_of_the_budget_are_parts_of_it():
    wanted = {name: Wanted(lambda noise: (Gaussian(noise),), (10,), 0.6) for name in ("ratio", "grad")}
    with pytest.raises(ValueError, match="add up to 1 at most"):
        plan_for_budget(
            eps=1.0,
            delta=1e-5,
            neighboring_relation="replace_one",
            wanted=wanted,
            num_iterations=10,
            num_chains=1,
            num_rows=100,
        )


@pytest.mark.parametrize("traced", [False, True])
def test_a_budget_for_many_rows_is_none_for_few(traced):
    """10 of 200 rows are a share of 5 percent, which the noise is for; of 20 rows they are half."""
    kernel = DPSGLD(model, eps=1.0, batch_size=FixedBatches(10), num_iterations=20)
    state = kernel.init(jax.random.key(0), 0, None, (Y,), {})
    sample = jax.jit(lambda state, y: kernel.sample(state, (y,), {})) if traced else kernel.sample
    with pytest.raises(PrivacyBudgetError, match="for a table of 200 rows, and this one has 20"):
        sample(state, Y[:20]) if traced else sample(state, (Y[:20],), {})
    assert kernel.privacy.made == {"grad": (0,)}


@pytest.mark.parametrize(
    ("kernel", "batches", "elsewhere", "match"),
    [
        (DPPenalty, FixedBatches(10), False, "each data owner draws from its own rows"),
        (DPPenalty, PoissonBatches(10, max_batch_size=20), False, "each data owner draws from its own rows"),
        (DPBarker, 10, False, "each data owner draws from its own rows"),
        (DPPenalty, 10, True, r"give batch_size=PoissonBatches\(rate=...\)"),
        (DPPenalty, FixedBatches(10), True, r"give batch_size=PoissonBatches\(rate=...\)"),
        (DPPenalty, PoissonBatches(rate=0.1, max_batch_size=50), True, r"give batch_size=PoissonBatches\(rate=...\)"),
    ],
)
def test_owners_draw_batches_of_their_own_rows(kernel, batches, elsewhere, match):
    """Of a batch of a given size, an owner who knows which of its rows are in it knows how many of the others' are."""
    owners = LocalExchange.group(2, 1.0)[0] if elsewhere else np.arange(len(Y)) % 4
    with pytest.raises(ValueError, match=match):
        kernel(model, eps=1.0, delta=1e-5, prepare=False, owners=owners, batch_size=batches)


def test_a_test_with_noise_of_a_fixed_size_shares_it_among_the_owners():
    """Four owners' noise would have four times the variance that the correction is for."""
    bounds = []
    for owners in (None, np.arange(len(Y)) % 4):
        kernel = DPBarker(model, eps=1.0, variance=1.0, owners=owners, num_iterations=10)
        kernel.init(jax.random.key(0), 0, None, (Y,), {})
        (mechanism,) = kernel.ledger.plan.kinds["ratio"].mechanisms
        bounds.append(float(kernel._row_bound(mechanism.noise_multiplier, 1.0, len(Y))))
    assert bounds[0] == pytest.approx(2 * bounds[1])


def test_owners_elsewhere_whose_noise_has_another_size_are_refused():
    """Bounds and jumps follow from it, and sums of rows that were clipped to other bounds do not add up."""
    group, errors = LocalExchange.group(2, 100.0), [None, None]

    def run(index, eps):
        kernel = DPBarker(model, eps=eps, delta=1e-5, variance=1.0, owners=group[index], num_iterations=10)
        try:
            kernel.init(jax.random.key(0), 0, None, (Y,), {})
        except OwnersError as error:
            errors[index] = str(error)

    other = threading.Thread(target=run, args=(0, 1.0))
    other.start()
    assert group[1].wait_for_a_message(100.0)
    run(1, 1.5)
    other.join()
    assert all("noise multiplier, by eps and delta" in error for error in errors)


def test_a_seed_that_all_owners_know_is_refused():
    """Each could take away the others' noise, which would be its own."""
    owners = LocalExchange.group(2, 1.0)[0]
    with pytest.raises(ValueError, match="who run one script know it of one another"):
        DPPenalty(model, eps=1.0, delta=1e-5, prepare=False, owners=owners, noise_seed=7)


@pytest.mark.parametrize(("owners", "missing"), [([1, 2] * 100, 0), ([0, 3] * 100, 1), ([0, 10**9] * 100, 1)])
def test_who_has_no_row_is_no_owner(owners, missing):
    with pytest.raises(ValueError, match=f"without gaps, and no row belongs to {missing}: "):
        DPPenalty(model, eps=1.0, prepare=False, owners=np.array(owners))


@pytest.mark.parametrize("kernel", [DPPenalty, DPBarker])
def test_without_privacy_owners_share_one_sum(kernel):
    options = {"prepare": False} if kernel is DPPenalty else {}
    kernel = kernel(model, eps=float("inf"), owners=np.arange(len(Y)) % 4, num_iterations=3, step_size=0.1, **options)
    state = kernel.init(jax.random.key(0), 0, None, (Y,), {})
    state = kernel.sample(state, (Y,), {})
    assert state.z["logit"].shape == ()


def test_a_batch_of_all_rows_without_clip_bounds_is_a_walk():
    """Infinity times a sampling variance of 0 is no bound."""
    every = PoissonBatches(rate=1.0)
    kernel = DPPenalty(model, eps=float("inf"), prepare=False, clip_ratio=float("inf"), step_size=0.1, batch_size=every)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=40, progress_bar=False)
    mcmc.run(jax.random.key(0), Y)
    assert len(np.unique(mcmc.get_samples()["logit"])) > 5


def test_barkers_two_corrections_ask_something_else():
    """Of one seed, they would have the same noise for other questions."""
    noise = []
    for correction in ("exponential", "logistic"):
        kernel = DPBarker(model, eps=1.0, variance=1.0, correction=correction, num_iterations=3, noise_seed=2**70)
        kernel.init(jax.random.key(0), 0, None, (Y,), {})
        noise.append(dict(kernel._asked_by()))
    assert noise[0] != noise[1]


def test_gradient_samplers_cannot_know_the_noise_of_owners_elsewhere():
    exchange = LocalExchange.group(2, 1.0)[0]
    with pytest.raises(ValueError, match="data owners in other processes"):
        DPSGLD(model, eps=1.0, delta=1e-5, owners=exchange)


def test_gradient_samplers_count_the_noise_of_all_owners():
    """Of one owner's noise alone, what fits in a step would heat the chain once for each owner."""
    multipliers = []
    for owners in (None, np.arange(len(Y)) % 4):
        kernel = DPSGLD(
            model, step_size=1e-6, noise_multiplier_grad="matched", clip_grad=1.0, owners=owners, num_iterations=10
        )
        kernel.init(jax.random.key(0), 0, None, (Y,), {})
        multipliers.append(kernel.privacy.kinds["grad"].mechanisms[0].noise_multiplier)
    assert multipliers[1] == pytest.approx(multipliers[0] / 2)


def test_a_schedule_is_evaluated_once():
    """What it returns later must not change the releases that the budget was planned for."""
    calls = []

    def step_size(t):
        calls.append(t)
        return 1e-6 * t ** (0.3 * len(calls))

    kernel = DPSGLD(model, eps=1.0, step_size=step_size, batch_size=FixedBatches(10), num_iterations=10)
    kernel.init(jax.random.key(0), 0, None, (Y,), {})
    report = kernel.privacy
    assert composed_eps(report.committed, report.delta, "replace_one") == pytest.approx(1.0, rel=2e-3)


def test_a_spent_budget_is_not_taken_to_a_table_of_another_size():
    """The arrays themselves cannot be told apart where they are traced; their sizes can."""
    kernel = DPSGLD(model, eps=1.0, batch_size=FixedBatches(10), num_iterations=20)
    init = jax.jit(lambda y: kernel.init(jax.random.key(0), 0, None, (y,), {}))
    kernel.sample(init(Y), (Y,), {})
    jax.effects_barrier()
    with pytest.raises(PrivacyBudgetError, match="for a table of 200 rows, and this one has 20"):
        init(Y[:20])
