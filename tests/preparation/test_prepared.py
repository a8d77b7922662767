"""Kernels that prepare themselves: what they promise beyond the contract in test_kernels.py, and what they refuse."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest

import numpyro_dp.kernels.target
from numpyro_dp import DPHMC, MCMC, DPPenalty, PrivacyBudgetError, plan, preparation
from numpyro_dp.accounting import gaussian_rho
from numpyro_dp.clipping import ClippedSum
from numpyro_dp.kernels import prepared
from numpyro_dp.kernels.prepared import _doubts
from numpyro_dp.kernels.survey import Frame, Survey
from numpyro_dp.noise import sensitivity_steps
from numpyro_dp.planning import DOUBTFUL_UNSEEN
from numpyro_dp.preparation import Check, Preparation, combine, require_sight

pytestmark = pytest.mark.usefixtures("shared_surveys")

N = 100
_rng = np.random.default_rng(0)
X = _rng.uniform(-1, 1, (N, 2))
Y = (_rng.uniform(size=N) < 1 / (1 + np.exp(-X @ [2.0, -1.0]))).astype(int)
FORCE = Preparation(force=True)


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def surrogate(**options):
    return DPHMC(model, **{"eps": 20.0, "prepare": Preparation(mode="surrogate", force=True), **options})


def residual(**options):
    return DPHMC(model, **{"eps": 20.0, "prepare": Preparation(mode="residual", force=True), **options})


def walk(**options):
    return DPPenalty(model, **{"eps": 20.0, "prepare": FORCE, **options})


def run(kernel, *, stock=False, seed=0, table=(X, Y), **options):
    options = {"num_warmup": 2, "num_samples": 4, "progress_bar": False} | options
    mcmc = (numpyro.infer.MCMC if stock else MCMC)(kernel, **options)
    mcmc.run(jax.random.key(seed), table[0], y=table[1], extra_fields=("i",))
    return mcmc


def constant_sum(per_row, rows, bound, width=1, size=None, owners=None, fixed_places=False, may_loop=False):
    """In the place of `clipped_sum`: the same for all rows."""
    shape = jax.eval_shape(per_row, tuple(row[:1] for row in rows)).shape
    return ClippedSum(jnp.zeros(shape, jnp.int32), jnp.full(shape, 17, jnp.int32), jnp.asarray(bound, jnp.float32))


def made(kernel):
    return {kind: releases["made"] for kind, releases in kernel.privacy.releases.items()}


def planned(kernel):
    return {kind: releases["planned"] for kind, releases in kernel.privacy.releases.items()}


# -- When there is a preparation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [DPHMC, DPPenalty])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"eps": 1.0}, True),
        ({"eps": 1.0, "delta": 1e-5, "power": 0.5, "noise_seed": 1, "num_iterations": 5, "num_chains": 2}, True),
        ({"eps": 1.0, "prepare": True}, True),
        ({"eps": 1.0, "prepare": False}, False),
        ({"eps": 1.0, "clip_ratio": 1.0}, False),
        ({"eps": 1.0, "step_size": 0.1}, False),
        ({"eps": 1.0, "owners": [0, 1, 0]}, False),
        ({"eps": 1.0, "inverse_mass_matrix": 1.0}, False),
        ({"eps": float("inf")}, False),
    ],
    ids=str,
)
def test_a_kernel_prepares_itself_unless_it_is_told_how_to_sample(kernel, options, expected):
    assert (kernel(model, **options)._preparation is not None) == expected


@pytest.mark.parametrize("option", ["dense_mass", "adapt_mass_matrix"])
def test_an_argument_at_its_default_does_not_switch_the_preparation_off(option):
    assert DPHMC(model, eps=1.0, **{option: False})._preparation is not None


def test_arguments_that_a_prepared_kernel_does_not_use_are_refused():
    with pytest.raises(ValueError, match="adapt_step_size"):
        DPHMC(model, eps=1.0, prepare=True, adapt_step_size=False)


def test_explicit_noise_multipliers_mean_no_preparation():
    assert DPPenalty(model, noise_multiplier_ratio=1.0)._preparation is None


@pytest.mark.parametrize("prepare", [True, FORCE])
@pytest.mark.parametrize(
    ("kernel", "options", "message"),
    [
        (DPHMC, {"eps": 1.0, "clip_ratio": 1.0}, r"clip_ratio: for the sampler without preparation"),
        (DPHMC, {"eps": 1.0, "clip_grad": 1.0, "num_steps": 3}, r"clip_grad, num_steps: .*`prepare=False`"),
        (DPPenalty, {"eps": 1.0, "guided": True}, r"guided: for the sampler without preparation"),
        (DPPenalty, {"eps": 1.0, "batch_size": 10}, r"batch_size: for the sampler without preparation"),
        (DPPenalty, {"eps": 1.0, "owners": [0, 1]}, r"owners: for the sampler without preparation"),
        (DPHMC, {"eps": float("inf")}, r"needs a finite budget eps, got inf"),
        (DPHMC, {"noise_multiplier_ratio": 1.0, "noise_multiplier_grad": 1.0}, r"needs a finite budget eps, got None"),
    ],
)
def test_a_preparation_and_arguments_of_the_plain_sampler_exclude_each_other(kernel, options, message, prepare):
    with pytest.raises(ValueError, match=message):
        kernel(model, prepare=prepare, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "nuts"}, "mode must be None or one of 'surrogate', 'residual', 'walk', got 'nuts'"),
        ({"locate": 0.0}, "locate must lie strictly between 0 and 1"),
        ({"locate": float("nan")}, "locate must lie strictly between 0 and 1"),
        ({"check": 1.0}, "check must lie strictly between 0 and 1"),
        ({"final_bounds": -0.1}, "final_bounds must lie strictly between 0 and 1"),
        ({"final_curvature": 2.0}, "final_curvature must lie strictly between 0 and 1"),
        ({"bounds": 0.3}, "bounds, gradient, curvature and line must be positive and add up to 1"),
        ({"bounds": -0.2, "gradient": 0.89}, "must be positive and add up to 1"),
        ({"rounds": 0}, "rounds must be a positive integer"),
        ({"rounds": 2.5}, "rounds must be a positive integer"),
        ({"growth": 0.0}, "growth must be positive"),
        ({"growth": float("nan")}, "growth must be positive"),
        ({"locate": 0.8, "check": 0.3}, "locate and check leave nothing"),
        ({"final_bounds": 0.6, "final_curvature": 0.6}, "final_bounds and final_curvature leave nothing"),
        ({"growth": float("inf")}, "growth must be positive"),
        ({"rounds": True}, "rounds must be a positive integer"),
    ],
)
def test_impossible_preparations_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Preparation(**options)


def test_prepare_takes_a_preparation_or_a_bool_and_nothing_else():
    with pytest.raises(TypeError, match="prepare"):
        DPHMC(model, eps=1.0, prepare="surrogate")


def test_a_mode_that_a_kernel_does_not_have_is_refused():
    with pytest.raises(ValueError, match="mode"):
        DPPenalty(model, eps=1.0, prepare=Preparation(mode="residual"))


def test_a_public_start_for_a_site_that_is_not_there_is_refused_before_anything_is_released():
    kernel = surrogate(prepare=Preparation(start={"slope": 0.0}, force=True), num_iterations=6)
    with pytest.raises(ValueError, match=r"Preparation names \['slope'\], but the sites are \['b'\]"):
        kernel.prepare(X, y=Y)
    assert kernel._ledger.untouched


# -- Before anything is released ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [DPHMC, DPPenalty])
@pytest.mark.parametrize("stock", [False, True], ids=["numpyro_dp", "numpyro"])
def test_a_hopeless_run_is_refused_before_anything_is_released(kernel, stock):
    kernel = kernel(model, eps=0.05, num_iterations=6)
    with pytest.raises(PrivacyBudgetError) as caught:
        run(kernel, stock=stock)
    message = str(caught.value)
    for part in ("eps=0.05 with 100 rows", "the 2 numbers in which", "of the curvature", "standard deviations"):
        assert part in message
    for way_out in ("Nothing was released", "Raise eps", "fewer", "`prepare=Preparation(force=True)`"):
        assert way_out in message
    assert "  " not in message
    assert kernel._ledger.untouched
    assert kernel.privacy.eps_spent == 0
    assert kernel.prepared is None


@pytest.mark.parametrize(("eps", "rows"), [(1.0, 500), (0.3, 1500)])
def test_a_table_in_which_a_search_sees_no_rows_is_refused(eps, rows):
    """Its bounds would clip most rows, and the posterior be far off without a sign of it."""

    def location(x):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("x", dist.Normal(mu, 1.4), obs=x)

    kernel = DPHMC(location, eps=eps, num_iterations=6)
    with pytest.raises(PrivacyBudgetError, match=f"with {rows} rows is too little to find clip bounds by") as caught:
        kernel.prepare(np.ones(rows, np.float32))
    assert "Nothing was released" in str(caught.value)
    assert kernel._ledger.untouched
    assert plan(n=rows, d=1, eps=eps)["DPHMC"].verdict == "hopeless"
    rho = gaussian_rho(eps, 0.1 / (5 * rows))
    options = Preparation().resolved(1, 5 * rows, 1.0, rho)
    require_sight(5 * rows, rho, options, eps)


@pytest.mark.nightly
def test_with_force_a_hopeless_run_goes_on():
    mcmc = run(walk(eps=0.5, delta=1e-3))
    assert made(mcmc.sampler) == planned(mcmc.sampler)
    assert all(bool(jnp.isfinite(v).all()) for v in mcmc.get_samples().values())


def test_under_add_or_remove_nobody_is_told_how_many_rows_there_are(monkeypatch):
    """With sums that are told nothing, two tables of different sizes have the same report and the same draws.

    So whether the rows are enough for a useful run is not looked at, either (P10).
    """
    monkeypatch.setattr(numpyro_dp.kernels.target, "clipped_sum", constant_sum)
    found = []
    for n in (N, N - 7):
        kernel = DPPenalty(
            model, eps=0.5, delta=1e-6, neighboring_relation="add_or_remove_one", noise_seed=1, prepare=True
        )
        mcmc = run(kernel, table=(X[:n], Y[:n]))
        assert mcmc.privacy.num_rows is None
        assert all(n not in np.shape(leaf) for leaf in jax.tree.leaves((mcmc._args, mcmc._kwargs)))
        found.append((mcmc.privacy.to_json(), str(mcmc.privacy), np.asarray(mcmc.get_samples()["b"]).tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [walk, residual, functools.partial(DPHMC, model, eps=20.0, prepare=True)])
def test_a_run_beyond_the_plan_is_refused_before_the_preparation(make):
    kernel = make(num_iterations=5)
    with pytest.raises(PrivacyBudgetError, match=r"does not allow 1 chain\(s\) of 6.*Nothing was released"):
        run(kernel)
    assert kernel._ledger.untouched


# -- Afterwards --------------------------------------------------------------------------------------------------------


def test_a_surrogate_gives_any_number_of_draws_for_nothing():
    kernel = surrogate(num_iterations=1)
    mcmc = run(kernel)
    before = made(kernel)
    assert before == planned(kernel)
    assert kernel.privacy.eps_spent == pytest.approx(20.0, rel=1e-6)
    first = mcmc.get_samples()["b"]
    mcmc.run(jax.random.key(1), X, y=Y, extra_fields=("i",))
    assert not mcmc.get_extra_fields()["exhausted"].any()
    assert (mcmc.get_samples()["b"] != first).any()
    assert made(kernel) == before
    with pytest.raises(PrivacyBudgetError, match="has run on other arrays"):
        mcmc.run(jax.random.key(2), X.copy(), y=Y)


def test_other_public_arguments_are_refused_or_used():
    """Without an error the draws are of the posterior under the arguments that were passed."""

    def located(X, loc, y=None):
        b = numpyro.sample("b", dist.Normal(loc, 0.1).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)

    kernel = DPPenalty(located, eps=20.0, prepare=FORCE, num_iterations=20)
    kernel.init(jax.random.key(0), 0, None, (X, np.zeros(2)), {"y": Y})
    at_its_own = kernel._algorithm._log_prior(jnp.full(2, 5.0))
    try:
        kernel.init(jax.random.key(0), 0, None, (X, np.full(2, 5.0)), {"y": Y})
    except (ValueError, PrivacyBudgetError):
        return
    assert kernel._algorithm._log_prior(jnp.full(2, 5.0)) > at_its_own


@pytest.mark.nightly
def test_a_surrogate_in_the_stock_mcmc():
    kernel = surrogate(num_iterations=1, noise_seed=1)
    stock = run(kernel, stock=True)
    before = made(kernel)
    again = run(kernel, stock=True)
    np.testing.assert_array_equal(stock.get_samples()["b"], again.get_samples()["b"])
    assert made(kernel) == before


@pytest.mark.parametrize("make", [walk, pytest.param(residual, marks=pytest.mark.nightly)])
def test_the_preparation_is_made_once(make):
    kernel = make(num_iterations=12)
    with pytest.raises(RuntimeError, match="fixed when the run starts"):
        kernel.privacy  # noqa: B018
    kernel.prepare(X, y=Y)
    first, result = made(kernel), kernel.prepared
    kernel.prepare(X, y=Y)
    kernel.init(jax.random.key(0), 2, None, (X,), {"y": Y})
    assert made(kernel) == first
    assert kernel.prepared is result
    (chain,) = (kind for kind in ("ratio", "residual") if kind in first)
    assert first[chain] == 0
    run(kernel)
    run(kernel)
    assert made(kernel) == planned(kernel) == first | {chain: 12}
    with pytest.raises(PrivacyBudgetError, match=r"Nothing was\s+released"):
        run(kernel)


def test_init_params_start_the_chain_where_they_say():
    kernel = walk(num_iterations=5)
    state = kernel.init(jax.random.key(0), 2, {"b": jnp.array([0.3, 0.4])}, (X,), {"y": Y})
    np.testing.assert_allclose(state.z["b"], [0.3, 0.4], rtol=1e-6)
    near = kernel.init(jax.random.key(0), 2, None, (X,), {"y": Y})
    assert np.linalg.norm(np.asarray(near.z["b"]) - kernel.prepared.start) < 3
    with pytest.raises(ValueError, match="init_params must hold unconstrained values"):
        kernel.init(jax.random.key(0), 2, {"b": jnp.zeros(3)}, (X,), {"y": Y})


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda k: pickle.loads(pickle.dumps(k))], ids=["copy", "deepcopy", "pickle"]
)
def test_copies_of_a_prepared_kernel_keep_its_result_and_have_no_budget_of_their_own(duplicate):
    kernel = walk(num_iterations=12)
    kernel.prepare(X, y=Y)
    before = made(kernel)
    twin = duplicate(kernel)
    for part, same in zip(
        jax.tree.leaves(twin.prepared._replace(mode="")),
        jax.tree.leaves(kernel.prepared._replace(mode="")),
        strict=True,
    ):
        np.testing.assert_array_equal(part, same)
    if duplicate is copy.copy:  # it has the same ledger, which counts what either of the two releases
        run(twin)
        run(kernel)
        assert made(kernel) == planned(kernel)
        with pytest.raises(PrivacyBudgetError):
            run(twin)
        return
    with pytest.raises(PrivacyBudgetError):
        run(twin)
    assert made(kernel) == before
    run(kernel)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"check": Check(0.5, 0.05), "distance": 1.0}, "found to be 0.5 from the quadratic"),
        ({"check": Check(0.01, 0.01), "distance": 5.0}, "has its mode 5.0 times as far"),
        ({"check": Check(0.5, 0.2), "distance": 3.0}, None),  # by the noise of the check it may be nothing
        (
            {"check": Check(0.5, 0.05), "distance": 3.0, "disagreement": 0.4, "mode": "residual", "centred": False},
            None,  # it is tested
        ),
        ({"check": Check(0.01, 0.01), "distance": 1.0, "unseen": 0.2}, "20% of the rows may pass for none"),
        ({"check": Check(0.01, 0.01), "distance": 1.0, "centred": False}, "5% of the rows may pass for none"),
        ({"check": Check(0.01, 0.01), "distance": 1.0, "centred": False, "unseen": 0.03}, None),
        ({"check": Check(0.01, 0.01), "distance": 1.0, "disagreement": 0.4}, "0.4 times the posterior's precision"),
        ({"check": Check(0.5, 0.05), "distance": None, "unseen": 0.2, "disagreement": None, "mode": "walk"}, None),
    ],
)
def test_a_posterior_that_may_be_off_says_so(changes, message):
    """By warning and in the report: where the quadratic is known not to be good enough, and nothing better is paid."""
    kernel = surrogate(num_iterations=4)
    kernel.prepare(X, y=Y)
    kernel._result = kernel.prepared._replace(**{"unseen": 0.05, "centred": True, "disagreement": 0.0} | changes)
    (said,) = _doubts(kernel.prepared) or (None,)
    assert said == message or message in said
    assert ("may be off" in kernel.privacy.posterior) == (message is not None)


@pytest.mark.parametrize(
    ("num_rows", "eps", "rounds"), [(2000, 1.0, 3), (3000, 1.0, 4), (5000, 1.0, 5), (None, 0.1, 5), (100, 0.1, 3)]
)
def test_a_search_does_not_begin_with_rounds_that_see_nothing(num_rows, eps, rounds):
    rho = gaussian_rho(eps, 0.1 / (num_rows or 1000))
    assert Preparation().resolved(2, num_rows, 1.0, rho).num_rounds == rounds
    assert Preparation(rounds=7).resolved(2, num_rows, 1.0, rho).num_rounds == 7
    tempered = Preparation().resolved(2, num_rows, 0.01, rho)  # as many rows are seen, tempered or not
    assert abs(tempered.num_rounds - rounds) <= 1


def test_the_last_release_is_made_around_the_mode_of_the_one_before(monkeypatch):
    frames = []
    derivatives = Survey.derivatives

    def recorded(self, draws, frame, bounds, centred=False):
        frames.append(frame)
        return derivatives(self, draws, frame, bounds, centred)

    surrogates = []

    def combined(here, earlier):
        surrogates.append(combine(here, earlier))
        return surrogates[-1]

    monkeypatch.setattr(Survey, "derivatives", recorded)
    monkeypatch.setattr(preparation, "combine", combined)
    kernel = surrogate(num_iterations=4)
    kernel.prepare(X, y=Y)
    assert len(surrogates) == 2
    assert len(frames) == kernel._resolved.num_rounds + 2
    prior = preparation.NormalPrior(np.zeros(2), np.eye(2))
    around = preparation.recentred(surrogates[0], prior)
    # The kernel's rough prior comes from draws.
    np.testing.assert_allclose(frames[-1].center, around.center, atol=0.3 * np.linalg.norm(around.whitening))
    assert np.linalg.norm(frames[-1].center - frames[-2].center) > 0
    # What the chain takes for its coordinates is where the surrogate is.
    assert kernel.prepared.surrogate is surrogates[-1]
    assert kernel.prepared.frame is kernel.prepared.surrogate.frame is frames[-1]


class FarAway:
    """In the place of a survey whose first score leads far away, and whose second says that all is well."""

    size, centres = 1, False

    def __init__(self):
        self.scores = [400.0, 0.0]

    def bounds(self, *args):
        return np.ones(2)

    def derivatives(self, *args):
        return np.array([self.scores.pop(0)]), 1.0, -np.eye(1), 0.01


def test_a_place_that_was_far_from_the_one_before_is_doubted():
    """The last release looks around it only."""
    wide = preparation.NormalPrior(np.zeros(1), np.array([[1e6]]))
    last = preparation.Round(Frame(np.zeros(1), np.eye(1)), np.zeros(1), 1.0, np.eye(1), 0.01, np.ones(2), False)
    options = Preparation().resolved(1, 10_000, 1.0, 0.02)

    def ask(*args):
        return (np.zeros(1),)

    found, _, distance, off = preparation.final_releases(FarAway(), last.frame, [last], wide, ask, options, 0.02, False)
    assert preparation.distance_to_mode(found, wide) < 4
    assert distance > 40
    assert off == 0


@pytest.mark.parametrize(("curvature", "noise", "disagree"), [(1.0, 0.1, False), (5.0, 0.1, True), (5.0, 1.0, False)])
def test_curvatures_that_disagree_beyond_their_noise_are_told(curvature, noise, disagree):
    frame = Frame(np.zeros(2), np.eye(2))
    before = preparation.Round(frame, np.zeros(2), 0.1, np.eye(2), noise, np.ones(2), True)
    here = before._replace(curvature=curvature * np.eye(2))
    together = combine(here, [before])
    np.testing.assert_allclose(together.curvature, (1 + curvature) / 2 * np.eye(2))
    # Half of the difference, less twice the largest eigenvalue of its noise, in two dimensions about 2 / sqrt(2) of it.
    expected = (curvature - 1) / 2 - 4 * noise / np.sqrt(2) if disagree else 0.0
    assert preparation.disagreement(together, here) == pytest.approx(expected, abs=1e-9)


def test_a_curvature_that_is_raised_above_its_noise_does_not_disagree_with_itself():
    frame = Frame(np.zeros(2), np.eye(2))
    here = preparation.Round(frame, np.zeros(2), 0.1, np.diag([1.0, -0.2]), 0.5, np.ones(2), True)
    for earlier in ([], [here._replace(curvature_scale=5.0)]):
        together = combine(here, earlier)
        assert np.linalg.norm(together.curvature - here.curvature, 2) > 0.9
        assert preparation.disagreement(together, here) < 0.05


def test_a_table_in_which_few_rows_are_seen_is_doubted():
    """By public numbers: the more rows of the same kind and the larger eps, the smaller the share that is not seen."""
    few, many = surrogate(num_iterations=4), surrogate(num_iterations=4, eps=80.0)
    few.prepare(X, y=Y)
    many.prepare(X, y=Y)
    assert few.prepared.unseen > DOUBTFUL_UNSEEN > many.prepared.unseen > 0
    assert "of the rows may pass for none" in few.privacy.posterior
    assert "of the rows may pass for none" not in many.privacy.posterior


def test_a_warning_is_given_once_the_search_has_ended(monkeypatch):
    kernel = DPHMC(model, eps=80.0, noise_seed=1, prepare=Preparation(mode="surrogate"))
    monkeypatch.setattr(prepared, "check", lambda *args: Check(0.9, 0.01))
    monkeypatch.setattr(prepared, "require_hope", lambda *args: None)
    kernel.require_budget(4, 1, (X,), {"y": Y}, 4)
    with pytest.raises(RuntimeWarning, match="the posterior may be off: within a posterior's width"):
        kernel.prepare(X, y=Y)  # here warnings are errors: what was paid for is not lost
    before = made(kernel)
    run(kernel)
    assert made(kernel) == before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("relation", "centred"),
    [("replace_one", True), pytest.param("add_or_remove_one", False, marks=pytest.mark.nightly)],
)
def test_the_report_says_whether_gradients_were_centred(relation, centred):
    """Then the posterior rests on what the model says about outcomes, beside their likelihood."""
    kernel = surrogate(delta=1e-5, neighboring_relation=relation)
    rows = np.tile(X, (20, 1)), np.tile(Y, 20)  # so many that a few may be clipped
    run(kernel, table=rows)
    assert kernel.prepared.centred == centred
    said = "centred by those of outcomes drawn from the model" in " ".join(kernel.privacy.assumptions)
    assert said == centred


@pytest.mark.parametrize("table", [(np.full_like(X, np.nan), Y), (1e30 * X, Y)], ids=["nan", "huge"])
@pytest.mark.parametrize(
    "make",
    [walk, pytest.param(residual, marks=pytest.mark.nightly), pytest.param(surrogate, marks=pytest.mark.nightly)],
)
def test_a_preparation_on_hostile_rows_ends_with_finite_numbers(make, table):
    kernel = make(num_iterations=6)
    mcmc = run(kernel, table=table)
    for leaf in jax.tree.leaves(kernel.prepared._replace(mode=0.0, coordinates=())):
        assert np.isfinite(leaf).all()
    assert np.isfinite(mcmc.get_samples()["b"]).all()
    assert made(kernel) == planned(kernel)


def test_traced_rows_cannot_be_prepared_on_and_the_error_says_what_to_do():
    kernel = walk(num_iterations=6)
    with pytest.raises(ValueError, match=r"call `kernel\.prepare\(\.\.\.\)` with the model's arguments first"):
        jax.jit(lambda x: kernel.init(jax.random.key(0), 2, None, (x,), {"y": Y}).i)(X)
    assert kernel._ledger.untouched


# -- Interrupted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [surrogate, walk])
def test_an_interrupted_preparation_is_not_made_again_on_the_same_budget(make, monkeypatch):
    rounds = []
    derivatives = Survey.derivatives

    def interrupted(self, *args):
        rounds.append(1)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        return derivatives(self, *args)

    monkeypatch.setattr(Survey, "derivatives", interrupted)
    kernel = make(num_iterations=6)
    with pytest.raises(KeyboardInterrupt):
        run(kernel)
    monkeypatch.undo()
    before, plan = made(kernel), planned(kernel)
    assert 0 < before["gradient"] < plan["gradient"]
    assert kernel.prepared is None
    for again in (lambda: run(kernel), lambda: run(kernel, stock=True), lambda: kernel.prepare(X, y=Y)):
        with pytest.raises(PrivacyBudgetError, match="make a new kernel, whose eps adds to this one"):
            again()
        assert made(kernel) == before
        assert planned(kernel) == plan
    assert 0 < kernel.privacy.eps_spent <= kernel.privacy.eps


# -- A secret noise seed -----------------------------------------------------------------------------------------------


def noise_of_a_preparation(make, **options):
    """The standard normals behind the noise that the preparation adds, by kind of release."""
    kernel = make(noise_seed=1, num_iterations=6, **options)
    drawn = {}
    draw = kernel._ledger._noise.draw

    def spy(shape, mechanism, relation, nonce):
        found = draw(shape, mechanism, relation, nonce)
        steps = (found[0].astype(float) * 2**24 + found[1]) / sensitivity_steps(relation)
        drawn.setdefault(nonce.split(b"\0")[0].decode(), []).append(steps.ravel() / mechanism.noise_multiplier)
        return found

    kernel._ledger._noise.draw = spy
    kernel.prepare(X, y=Y)
    return drawn


def is_same(first, second):
    return first.shape == second.shape and np.allclose(first, second, rtol=1e-3, atol=1e-3)


def test_a_noise_seed_repeats_a_preparation():
    first, again = noise_of_a_preparation(walk), noise_of_a_preparation(walk)
    assert first.keys() == again.keys()
    assert all(is_same(a, b) for kind in first for a, b in zip(first[kind], again[kind], strict=True))
    rounds = first["gradient"]
    assert not any(is_same(rounds[i], rounds[j]) for i in range(len(rounds)) for j in range(i))


@pytest.mark.parametrize(
    "options",
    [
        {"eps": 30.0},
        pytest.param({"power": 0.5}, marks=pytest.mark.nightly),
        {"prepare": Preparation(rounds=4, force=True)},
        {"prepare": Preparation(locate=0.3, force=True)},
        {"prepare": Preparation(force=True, start={"b": 1.0})},
        {"prepare": Preparation(force=True, scales={"b": 0.1})},
    ],
    ids=["eps", "power", "rounds", "locate", "start", "scales"],
)
def test_a_noise_seed_never_hides_two_preparations_under_one_noise(options):
    """Of two queries under one noise the difference would be exact."""
    first, second = noise_of_a_preparation(walk), noise_of_a_preparation(walk, **options)
    for kind in ("bounds", "gradient", "curvature", "line search"):
        assert not any(is_same(a, b) for a, b in zip(first[kind], second[kind], strict=False))


def test_a_noise_seed_never_hides_the_last_releases_of_two_modes_under_one_noise():
    """They have other noise multipliers: of two of them on one normal, both sum and noise could be found."""
    first, second = noise_of_a_preparation(surrogate), noise_of_a_preparation(residual)
    assert not is_same(first["final gradient"][0], second["final gradient"][0])
