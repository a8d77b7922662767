"""One budget for a table: kernels, threads and processes draw on a file, and nothing makes it count too little."""

import contextlib
import copy
import dataclasses
import errno
import json
import math
import multiprocessing
import os
import pickle
import re
import shutil
import sys
import threading
import types
import warnings
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import some_every_day

import numpyro_dp.preparation.prepare
import numpyro_dp.privacy.budget
from numpyro_dp import (
    DPHMC,
    DPSGLD,
    MCMC,
    DPBarker,
    DPPenalty,
    FixedBatches,
    PoissonBatches,
    Preparation,
    PrivacyBudget,
    PrivacyBudgetError,
)
from numpyro_dp.kernels.prepared import _hash
from numpyro_dp.preparation.survey import Survey
from numpyro_dp.privacy.accounting import MIN_DELTA, MIN_EPS, composed_eps, gaussian_delta, gaussian_eps, gaussian_rho
from numpyro_dp.privacy.ledger import Ledger, Plan, Releases, Request, Wanted, flat_releases, plan_for_budget
from numpyro_dp.privacy.mechanisms import Gaussian, LogisticBit, PoissonGaussian
from numpyro_dp.privacy.noise import NoiseSource

pytestmark = pytest.mark.filterwarnings("ignore:a new privacy budget was made")

X = np.random.default_rng(0).normal(size=50).astype(np.float32)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.budget"


def plan(eps, delta=1e-6, relation="replace_one", count=10):
    rho = gaussian_rho(eps, delta)
    return Plan(
        eps, delta, relation, {"ratio": Releases((Gaussian(math.sqrt(count / (2 * rho))),), (count,))}, 5, 2, 50
    )


def fit(kernel, iterations=4):
    mcmc = MCMC(kernel, num_warmup=iterations // 2, num_samples=iterations - iterations // 2, progress_bar=False)
    mcmc.run(jax.random.key(0), X)
    return mcmc


# -- What it adds up ---------------------------------------------------------------------------------------------------


def test_runs_add_up_as_one_gaussian_and_the_last_that_does_not_fit_is_refused(path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    for _ in range(3):  # in rho: eps of 1 costs less than a third of what eps of 2 does
        budget.charge(plan(1.0), "run")
    total = 3 * gaussian_rho(1.0, 1e-6)
    assert budget.eps_spent == pytest.approx(gaussian_eps(1e-6, total), rel=1e-8)
    with pytest.raises(PrivacyBudgetError, match=r"would cost \(1, 1e-06\).*\(2, 1e-06\).*at most eps=0\.\d+ is left"):
        budget.charge(plan(1.0), "one more")
    assert len(budget.charges) == 3
    budget.charge(plan(budget.eps_left), "the rest")
    assert 2.0 * (1 - 1e-6) < budget.eps_spent <= 2.0 * (1 + 1e-8)
    assert gaussian_delta(2.0, math.fsum(c.rho for c in budget.charges)) <= 1e-6
    assert budget.eps_left == 0
    with pytest.raises(PrivacyBudgetError, match="nothing is left"):
        budget.charge(plan(0.1), "one more")


def test_one_run_may_take_the_whole_budget(path):
    PrivacyBudget(path, eps=1.0, delta=1e-6).charge(plan(1.0, count=12_345), "all")


def test_of_a_budget_that_is_spent_to_the_last_digit_nothing_is_left(path):
    """What is charged may exceed what was rounded down, by next to nothing."""
    budget, rho = PrivacyBudget(path, eps=1.0, delta=1e-6), gaussian_rho(1.0, 1e-6) * (1 + 5e-11)
    of_all = Releases((Gaussian(math.sqrt(1 / (2 * rho))),), (1,))
    budget.charge(dataclasses.replace(plan(1.0), kinds={"ratio": of_all}), "all")
    assert budget.eps_left == 0
    with pytest.raises(PrivacyBudgetError, match="nothing is left"):
        budget.charge(plan(MIN_EPS), "one more")


def test_what_is_left_counts_at_another_delta(path):
    budget = PrivacyBudget(path, eps=1.0, delta=1e-6)
    assert budget.eps_left_at(1e-3) < budget.eps_left_at(1e-6) < budget.eps_left_at(1e-9)
    budget.charge(plan(budget.eps_left_at(1e-3), 1e-3), "run")
    assert budget.eps_spent == pytest.approx(1.0, rel=1e-6)


@pytest.mark.nightly
def test_a_release_that_is_not_gaussian_needs_a_part_of_its_own(path):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-4, other=(2.0, 5e-5))

    def noisy(eps):
        return DPSGLD(model, eps=eps, delta=2e-5, batch_size=10, step_size=1e-3, budget=budget)

    fit(noisy(1.0))
    fit(noisy(1.0))
    assert budget.eps_spent == pytest.approx(2.0, rel=1e-6)
    with pytest.raises(PrivacyBudgetError, match=r"not all Gaussian.*2, 5e-05.*\(\d\S*, 1e-05\) is left"):
        fit(noisy(0.5))
    fit(DPPenalty(model, eps=0.9, delta=4e-5, prepare=False, step_size=0.1, budget=budget))
    assert 2.0 < budget.eps_spent <= 3.0
    assert [charge.rho is None for charge in budget.charges] == [True, True, False]


def bits(eps, delta):
    wanted = {"bit": Wanted(lambda scale: (LogisticBit(scale),), (1,))}
    options = {"neighboring_relation": "replace_one", "num_iterations": 1, "num_chains": 1, "num_rows": 50}
    return plan_for_budget(eps=eps, delta=delta, wanted=wanted, **options)


def test_what_is_set_aside_for_other_runs_is_used_up_by_them_alone(path):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-4, other=(2.0, 5e-5))
    budget.charge(plan(0.5), "Gaussian")
    for eps in (1.0, 0.9):
        budget.charge(bits(eps, 2e-5), "bits")
    for eps, delta in ((0.2, 1e-6), (0.05, 2e-5)):
        with pytest.raises(PrivacyBudgetError, match=r"\(0\.1\d*, 1e-05\) is left"):
            budget.charge(bits(eps, delta), "too much")
    budget.charge(bits(0.09, 9e-6), "bits")
    assert len(budget.charges) == 4


@pytest.mark.parametrize("share", [0.1234567, 0.6, 0.99999])
def test_what_a_budget_says_is_left_can_be_had(path, share):
    """In its message and in what it prints, too, where digits are cut off."""
    budget = PrivacyBudget(path, eps=1.0, delta=1e-6)
    budget.charge(plan(share), "first")
    with pytest.raises(PrivacyBudgetError, match="at most eps=") as refused:
        budget.charge(plan(1.0), "too much")
    said = [re.search(r"at most eps=(\S+) is left", str(refused.value)), re.search(r"may cost eps (\S+)", str(budget))]
    for eps in (*(float(found.group(1)) for found in said), budget.eps_left):
        budget.require(plan(eps))
        assert eps == pytest.approx(budget.eps_left, rel=1e-3)
        with pytest.raises(PrivacyBudgetError):
            budget.require(plan(eps * 1.001 + 1e-4))


@pytest.mark.parametrize("kernel", [DPSGLD, DPBarker])
def test_without_such_a_part_it_is_refused_before_anything_is_released(path, kernel):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-2)
    options = {"batch_size": 10} if kernel is DPSGLD else {}
    made = kernel(model, eps=1.0, step_size=1e-3, budget=budget, **options)
    with pytest.raises(PrivacyBudgetError, match="not all Gaussian"):
        fit(made)
    assert not made.ledger.committed
    assert budget.charges == ()


def test_the_other_relation_and_runs_without_noise_are_refused(path):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-6)
    with pytest.raises(PrivacyBudgetError, match="'replace_one', and this run is under 'add_or_remove_one'"):
        budget.require(plan(1.0, relation="add_or_remove_one"))
    with pytest.raises(PrivacyBudgetError, match=r"cost \(inf"):
        fit(DPPenalty(model, eps=math.inf, prepare=False, step_size=0.1, budget=budget))


def test_another_table_or_another_unit_is_refused(path):
    """Guarantees for rows and for persons do not add up, nor does a choice of rows that depends on them."""
    budget = PrivacyBudget(path, eps=3.0, delta=1e-2)
    fit(DPPenalty(model, eps=0.5, prepare=False, step_size=0.1, budget=budget))
    with pytest.raises(PrivacyBudgetError, match=r"on 50 units .* and this one is on 10"):
        fit(DPPenalty(model, eps=0.5, prepare=False, step_size=0.1, budget=budget, unit=np.repeat(np.arange(10), 5)))
    with pytest.raises(PrivacyBudgetError, match="and this one is on 20"):
        mcmc = MCMC(DPPenalty(model, eps=0.5, prepare=False, step_size=0.1, budget=budget), num_warmup=1, num_samples=1)
        mcmc.run(jax.random.key(0), X[:20])
    assert len(budget.charges) == 1


# -- Kernels that draw on it -------------------------------------------------------------------------------------------


def test_kernels_charge_their_whole_plan_once_and_before_the_first_noise(path, monkeypatch):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    seen = []
    draw = NoiseSource.draw

    def watched(self, *args):
        seen.append(len(budget.charges))
        return draw(self, *args)

    monkeypatch.setattr(NoiseSource, "draw", watched)
    mcmc = fit(DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget))
    assert set(seen) == {1}
    (charge,) = budget.charges
    assert charge.what == "DPPenalty of model"
    assert charge.rho == pytest.approx(mcmc.privacy.rho, rel=1e-12)
    assert charge.eps == 1.0
    assert "charged to a budget of eps 2, delta 0.001" in " ".join(str(mcmc.privacy).split())
    fit(DPHMC(model, eps=1.0, prepare=False, step_size=0.1, budget=budget))
    assert len(budget.charges) == 2
    refused = DPPenalty(model, eps=1.5, prepare=False, step_size=0.1, budget=budget)
    with pytest.raises(PrivacyBudgetError, match=r"after 2 run\(s\)"):
        fit(refused)
    assert len(budget.charges) == 2


def prepared(mode, budget, **options):
    return DPHMC(model, eps=20.0, budget=budget, prepare=Preparation(mode=mode, force=True), **options)


def rho_of(plan):
    return math.fsum(n * m.rho for kind in plan.kinds.values() for m, n in zip(*kind, strict=True))


@pytest.mark.usefixtures("shared_surveys")
@pytest.mark.parametrize("mode", ["surrogate", "walk"])
def test_stages_of_a_preparation_are_part_of_one_charge(path, mode):
    """What it decides as it goes is claimed stage by stage, and never more than what was charged beforehand."""
    budget = PrivacyBudget(path, eps=21.0, delta=1e-3)
    kernel = prepared(mode, budget)
    mcmc = fit(kernel)
    (charge,) = budget.charges
    ledger = kernel.ledger
    assert rho_of(ledger.plan) <= charge.rho <= gaussian_rho(20.0, 0.1 / len(X)) * (1 + 1e-12)
    assert rho_of(ledger.plan) > charge.rho * (1 - 1e-7)
    assert len([name for name in ledger.plan.kinds if re.search(r" \d+$", name)]) >= 3
    claimed = budget.claimed(charge.run, ledger.plan)
    assert {name: counts for name, counts in claimed.items() if name in ledger.plan.kinds} == ledger.spent()
    assert all(name.startswith("reserve") for name in claimed.keys() - ledger.plan.kinds.keys())  # decided on since
    assert all(kind.counts == ledger.spent()[name] for name, kind in ledger.plan.kinds.items())
    assert mcmc.privacy.rho_spent <= charge.rho * (1 + 1e-12)
    with pytest.raises(PrivacyBudgetError, match=r"after 1 run\(s\)"):
        fit(prepared(mode, budget))
    assert len(budget.charges) == 1


@pytest.mark.usefixtures("shared_surveys")
def test_a_preparation_that_breaks_off_is_charged_in_full_and_cannot_go_on(path, monkeypatch):
    """Neither in this kernel, nor in a copy of it that resumes; whoever pays anew, pays for all of it."""
    budget = PrivacyBudget(path, eps=30.0, delta=1e-3)
    kernel = prepared("surrogate", budget, num_iterations=6)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    with monkeypatch.context() as patched:

        def interrupted(*args):
            raise KeyboardInterrupt

        patched.setattr(Survey, "derivatives", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mcmc.run(jax.random.key(0), X)
    spent = kernel.ledger.spent()
    assert any(map(any, spent.values()))
    assert kernel.prepared is None
    with pytest.raises(PrivacyBudgetError, match="make a new kernel, whose eps adds to this one's"):
        mcmc.run(jax.random.key(0), X)
    resumed = pickle.loads(pickle.dumps(mcmc))
    resumed.resume(budget)
    with pytest.raises(PrivacyBudgetError, match="make a new kernel, whose eps adds to this one's"):
        resumed.run(jax.random.key(0), X)
    assert kernel.ledger.spent() == spent
    (charge,) = budget.charges
    assert charge.rho == pytest.approx(gaussian_rho(20.0, 0.1 / len(X)), rel=1e-8)
    kernel.settle()
    assert budget.eps_spent == pytest.approx(gaussian_eps(1e-3, charge.rho), rel=1e-6)
    with pytest.raises(PrivacyBudgetError, match=r"after 1 run\(s\)"):
        fit(prepared("surrogate", budget))


@pytest.mark.usefixtures("shared_surveys")
@pytest.mark.parametrize("charged", some_every_day([False, True], [True]))
def test_a_copy_from_before_the_preparation_cannot_prepare(path, charged):
    """A pickle that is older than the releases knows nothing of them, and has no budget for others."""
    budget = PrivacyBudget(path, eps=50.0, delta=1e-3) if charged else None
    kernel = prepared("surrogate", budget, num_iterations=6)
    kernel.require_budget(6, 1, (X,), {}, 6)
    assert kernel.ledger.committed
    copies = [pickle.loads(pickle.dumps(kernel)), copy.deepcopy(kernel)]
    fit(kernel)
    spent = kernel.ledger.spent()
    for twin in copies:
        with pytest.raises(PrivacyBudgetError, match="copy or was unpickled"):
            twin.prepare(X)
        with pytest.raises(PrivacyBudgetError, match="copy or was unpickled"):
            twin.ledger.assign("reserve", {"mine": twin.ledger.plan.kinds["reserve"]})
        with pytest.raises(PrivacyBudgetError, match="was not charged to a PrivacyBudget before it was pickled"):
            twin.resume(PrivacyBudget(path, eps=50.0, delta=1e-3) if budget is None else budget)
        assert twin.prepared is None
        assert not any(map(any, twin.ledger.spent().values()))
    assert kernel.ledger.spent() == spent
    assert budget is None or len(budget.charges) == 1


def test_a_run_that_is_refused_by_its_precheck_costs_nothing(path):
    budget = PrivacyBudget(path, eps=50.0, delta=1e-3)
    with pytest.raises(PrivacyBudgetError, match="cannot give a posterior"):
        fit(DPHMC(model, eps=0.01, budget=budget))
    assert budget.charges == ()


def test_a_run_that_breaks_off_has_been_charged(path, monkeypatch):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    kernel = DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget, num_iterations=10)
    kernel.init(jax.random.key(0), 2, None, (X,), {})
    assert budget.charges == ()  # nothing has been released

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(NoiseSource, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kernel.ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert len(budget.charges) == 1


def test_copies_of_a_kernel_draw_on_no_budget(path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    mcmc = fit(DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget))
    for same in (copy.copy(mcmc.sampler), copy.deepcopy(mcmc.sampler), pickle.loads(pickle.dumps(mcmc.sampler))):
        assert same.ledger is mcmc.sampler.ledger or same.ledger.budget is None  # of a shallow copy it is the same
        assert "charged to a budget of eps 2" in " ".join(str(same.privacy).split())
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="open it anew"):
            duplicate(budget)
    assert len(budget.charges) == 1


def test_a_shallow_copy_shares_the_budget_and_cannot_run_without_it(path):
    """It has the same ledger, and what that grants is charged, whichever of the two asks."""
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    for first in ("copy", "original"):
        kernel = DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget, num_iterations=4)
        same = copy.copy(kernel)
        if first == "original":  # the copy commits last
            kernel.init(jax.random.key(0), 2, None, (X,), {})
            same.init(jax.random.key(0), 2, None, (X,), {})
        before = len(budget.charges)
        fit(same if first == "copy" else kernel)
        assert len(budget.charges) == before + 1


def test_a_plan_that_is_changed_after_a_charge_is_charged_again(path, monkeypatch):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    ledger = Ledger(NoiseSource(), budget, "run")
    ledger.commit(plan(0.5))
    ledger._run = budget.charge(ledger.plan, "run").run  # as after an interrupt between the charge and the books
    ledger.commit(plan(1.0))
    ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert [charge.eps for charge in budget.charges] == [0.5, 1.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_of_the_process_has_no_budget(path):
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0))
    child = os.fork()
    if not child:
        warnings.simplefilter("ignore")
        granted, drawn = ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
        os._exit(int(granted or bool(drawn["ratio"].noise.any())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")[0]


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_with_the_number_of_its_parent_has_no_budget(monkeypatch):
    """As between two containers, in each of which the process is the first; and so for a fork of the fork."""
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0))
    number = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: number)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        warnings.simplefilter("ignore")
        os.write(write, _seen_in_a_fork(ledger))
        grandchild = os.fork()
        if grandchild:
            os.waitpid(grandchild, 0)
        else:
            os.write(write, _seen_in_a_fork(ledger))
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"closed, refused, new ones are open\n" * 2
    assert not ledger.closed
    assert grants(ledger, 1) == 1


def _seen_in_a_fork(ledger):
    own = Ledger(NoiseSource())
    own.commit(plan(1.0))
    said = "closed" if ledger.closed else "open"
    granted = "granted" if ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")[0] else "refused"
    return f"{said}, {granted}, new ones are {'closed' if own.closed else 'open'}\n".encode()


def test_persons_that_are_others_do_not_share_a_budget(path):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-1)

    def on(unit):
        return fit(DPPenalty(model, eps=0.5, prepare=False, step_size=0.1, budget=budget, unit=unit))

    on(np.repeat(np.arange(10), 5))
    on(np.repeat(list("abcdefghij"), 5))  # the same people under other names
    with pytest.raises(PrivacyBudgetError, match="other rows belonged together"):
        on(np.tile(np.arange(10), 5))
    same = copy.copy(
        DPPenalty(model, eps=0.5, prepare=False, step_size=0.1, budget=budget, unit=np.tile(np.arange(10), 5))
    )
    with pytest.raises(Exception, match="other rows belonged together"):  # though the original has grouped nothing
        fit(same)
    assert len(budget.charges) == 2


def test_numbers_of_numpy_are_written_as_numbers(path):
    budget = PrivacyBudget(path, eps=np.float32(2.0), delta=np.float64(1e-3))
    fit(DPPenalty(model, eps=np.float32(0.5), prepare=False, step_size=0.1, budget=budget))
    assert budget.charges[0].eps == 0.5


def test_what_is_no_budget_is_named():
    with pytest.raises(TypeError, match="the number is `eps`"):
        DPPenalty(model, eps=1.0, budget=3.0)


# -- The file ----------------------------------------------------------------------------------------------------------


def test_it_is_opened_again_by_its_path(path):
    PrivacyBudget(path, eps=2.0, delta=1e-6, neighboring_relation="add_or_remove_one").charge(
        plan(1.0, relation="add_or_remove_one"), "first"
    )
    again = PrivacyBudget(path)
    assert (again.eps, again.delta, again.neighboring_relation) == (2.0, 1e-6, "add_or_remove_one")
    assert [charge.what for charge in again.charges] == ["first"]
    left = f"one more run with Gaussian releases and delta {again.delta:g} may cost eps "
    assert re.search(rf"1 run\(s\) cost eps 1 together, at that delta\n  {left}\S+\n.*first: \(1, 1e-06\)", str(again))
    assert again._repr_html_().startswith(f"<progress value='{again.eps_spent / 2:.4f}' max='1'>")
    PrivacyBudget(path, eps=2.0, delta=1e-6)
    for name, value in {"eps": 5.0, "delta": 1e-5, "neighboring_relation": "replace_one"}.items():
        with pytest.raises(PrivacyBudgetError, match=f"with {name}="):
            PrivacyBudget(path, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give `eps` and `delta` to make one"),
        ({"eps": 1.0}, "give `eps` and `delta`"),
        ({"eps": math.inf, "delta": 1e-6}, "positive eps"),
        ({"eps": 0.0, "delta": 1e-6}, "positive eps"),
        ({"eps": 1.0, "delta": 1e-31}, "delta between 0 and 1"),
        ({"eps": 1.0, "delta": 0.0}, "delta between 0 and 1"),
        ({"eps": 1.0, "delta": 1.0}, "delta between 0 and 1"),
        ({"eps": 1.0, "delta": 1e-6, "neighboring_relation": "swap"}, "must be one of"),
        ({"eps": 1.0, "delta": 1e-6, "other": (2.0, 0.0)}, "part .* of the budget"),
        ({"eps": 1.0, "delta": 1e-6, "other": (0.5, 1e-6)}, "part .* of the budget"),
    ],
)
def test_a_new_file_needs_a_budget_that_makes_sense(path, options, message):
    with pytest.raises(ValueError, match=message):
        PrivacyBudget(path, **options)
    assert not path.exists()


def _edited(lines):
    entry = json.loads(lines[1])
    return [lines[0], json.dumps(entry | {"rho": entry["rho"] / 2}), lines[2]]


@pytest.mark.parametrize(
    "change",
    [
        _edited,
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[0], lines[2], lines[1]],
        lambda lines: [lines[0], lines[1], lines[1]],
        lambda lines: [lines[0], lines[1], lines[2][:30]],
        lambda lines: lines[1:],
        lambda lines: [*lines[:2], ""],
        lambda lines: [*lines[:2], "null"],
        lambda lines: [json.dumps(json.loads(lines[0]) | {"eps": 100.0}), *lines[1:]],
    ],
    ids=["edited", "cut out", "swapped", "repeated", "torn", "beheaded", "emptied", "nothing", "raised"],
)
def test_a_file_that_was_changed_is_refused(path, change):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    for what in "ab":
        budget.charge(plan(0.5), what)
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    for act in (lambda: budget.charge(plan(0.1), "c"), lambda: budget.charges, lambda: PrivacyBudget(path)):
        with pytest.raises(PrivacyBudgetError, match=r"line \d of .* is not what was written there"):
            act()


def test_a_file_that_was_rolled_back_is_refused(path, tmp_path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    budget.charge(plan(1.0), "a")
    shutil.copy(path, tmp_path / "backup")
    budget.charge(plan(1.0), "b")
    newer = path.read_text()
    shutil.copy(tmp_path / "backup", path)
    for act in (lambda: budget.charge(plan(0.1), "c"), lambda: PrivacyBudget(path)):
        with pytest.raises(PrivacyBudgetError, match=r"has 2 line\(s\), and its witness .* has seen 3.*rolled back"):
            act()
    path.write_text(newer)
    assert len(PrivacyBudget(path).charges) == 2


def test_two_histories_from_one_copy_are_noticed(path, tmp_path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6, witness=tmp_path / "witness")
    elsewhere = tmp_path / "elsewhere"
    shutil.copy(path, elsewhere)
    PrivacyBudget(elsewhere, witness=False).charge(plan(1.0), "there")
    budget.charge(plan(1.0), "here")
    shutil.copy(elsewhere, path)
    with pytest.raises(PrivacyBudgetError, match="of which the last was another"):
        PrivacyBudget(path, witness=tmp_path / "witness")


def test_a_history_that_went_another_way_is_noticed_even_if_it_is_longer(path, tmp_path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    shutil.copy(path, tmp_path / "elsewhere")
    elsewhere = PrivacyBudget(tmp_path / "elsewhere", witness=False)
    budget.charge(plan(1.9), "here")
    for _ in range(3):
        elsewhere.charge(plan(0.1), "there")
    shutil.copy(tmp_path / "elsewhere", path)
    for act in (lambda: budget.charge(plan(0.1), "c"), lambda: PrivacyBudget(path)):
        with pytest.raises(PrivacyBudgetError, match="of which the last was another"):
            act()


def test_a_link_to_the_file_is_the_file(path, tmp_path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    (tmp_path / "link").symlink_to(path)
    link = PrivacyBudget(tmp_path / "link")
    assert link.path == budget.path
    with budget._locked():
        waiting = threading.Thread(target=lambda: link.charge(plan(1.0), "by the link"))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join()
    assert len(budget.charges) == 1


def test_a_new_budget_says_that_it_is_new(path):
    with pytest.warns(UserWarning, match=r"a new privacy budget .* nothing is charged yet: .*table\.budget"):
        PrivacyBudget(path, eps=2.0, delta=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivacyBudget(path)


def test_what_is_set_aside_for_other_runs_cannot_be_changed(path):
    PrivacyBudget(path, eps=2.0, delta=1e-6, other=(1.0, 1e-7))
    assert PrivacyBudget(path, other=(1.0, 1e-7)).other == (1.0, 1e-7)
    with pytest.raises(PrivacyBudgetError, match="with other="):
        PrivacyBudget(path, other=(1.5, 1e-7))


@pytest.mark.parametrize("other", [(-0.5, 0.0), (3.0, 0.0), (1.0, -1e-9), (1.0, 1e-6), (math.nan, 0.0)])
def test_what_is_set_aside_is_a_part_of_the_budget(path, other):
    with pytest.raises(ValueError, match="other must be a part"):
        PrivacyBudget(path, eps=2.0, delta=1e-6, other=other)
    assert not path.exists()


def test_what_is_set_aside_may_be_a_list_and_leaves_a_delta_that_can_be_computed_with(path):
    assert PrivacyBudget(path, eps=2.0, delta=1e-5, other=[0.5, 1e-6]).other == (0.5, 1e-6)
    assert PrivacyBudget(path, other=[0.5, 1e-6]).eps_left > 0
    with pytest.raises(ValueError, match="other leaves a delta of 1e-31, too little"):
        PrivacyBudget(path.with_name("small"), eps=2.0, delta=1e-29, other=(0.5, 0.99e-29))
    assert PrivacyBudget(path.with_name("all"), eps=0.5, delta=1e-29, other=(0.5, 0.99e-29)).eps_left == 0


def test_a_witness_that_cannot_be_read_is_named(path, tmp_path):
    PrivacyBudget(path, eps=2.0, delta=1e-6, witness=tmp_path / "witness")
    (tmp_path / "witness").write_text("")
    with pytest.raises(PrivacyBudgetError, match=r"the witness of .* is not what was written there"):
        PrivacyBudget(path, witness=tmp_path / "witness")


def test_a_file_that_was_deleted_does_not_begin_again(path):
    PrivacyBudget(path, eps=2.0, delta=1e-6).charge(plan(1.0), "a")
    path.unlink()
    with pytest.raises(PrivacyBudgetError, match="the file is gone"):
        PrivacyBudget(path, eps=2.0, delta=1e-6)


def test_a_witness_that_is_missing_or_of_another_budget_is_named(path, tmp_path):
    PrivacyBudget(path, eps=2.0, delta=1e-6).charge(plan(1.0), "a")
    moved = tmp_path / "moved.budget"
    shutil.move(path, moved)
    with pytest.warns(RuntimeWarning, match=r"has no witness at .* It has 1 line\(s\) of charges and claims"):
        PrivacyBudget(moved)
    PrivacyBudget(moved)  # now it has one
    roll_back(moved)
    with pytest.raises(PrivacyBudgetError, match="rolled back"):
        PrivacyBudget(moved)
    PrivacyBudget(tmp_path / "third", eps=1.0, delta=1e-6, witness=tmp_path / "witness")
    with pytest.raises(PrivacyBudgetError, match="witness of another budget"):
        PrivacyBudget(moved, witness=tmp_path / "witness")


def roll_back(path):
    """The file as it was before its last line."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_a_witness_that_cannot_be_written_is_named(path, tmp_path):
    (tmp_path / "in the way").write_text("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PrivacyBudget(path, eps=2.0, delta=1e-6, witness=tmp_path / "in the way" / "witness")
    messages = " ".join(str(warning.message) for warning in caught)
    assert re.search("the witness of .* could not be written .* Give `witness=` another place, or False", messages)


def test_a_crash_between_a_charge_and_its_witness_loses_nothing(path, monkeypatch):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    budget.charge(plan(0.1), "before")
    with monkeypatch.context() as patched:
        patched.setattr(PrivacyBudget, "_update_witness", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            budget.charge(plan(1.0), "a")
    for _ in range(2):  # the first one brings the witness up to date
        assert len(budget.charges) == 2
        assert len(PrivacyBudget(path).charges) == 2
    roll_back(path)
    with pytest.raises(PrivacyBudgetError, match="rolled back"):
        PrivacyBudget(path)


# -- Many at a time ----------------------------------------------------------------------------------------------------


def _charge_until_refused(path, number):
    budget, charged = PrivacyBudget(path), 0
    for _ in range(20):
        try:
            budget.charge(plan(0.3), f"run {number}")
            charged += 1
        except PrivacyBudgetError:
            pass
    return charged


@pytest.mark.nightly
def test_processes_and_threads_never_charge_more_than_there_is(path):
    allowed = int(gaussian_rho(1.0, 1e-6) / gaussian_rho(0.3, 1e-6))
    PrivacyBudget(path, eps=1.0, delta=1e-6)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        counts = pool.starmap(_charge_until_refused, [(path, 0), (path, 1)])
    assert sum(counts) == allowed
    assert len(PrivacyBudget(path).charges) == allowed


def test_threads_that_share_one_budget_never_charge_more_than_there_is(path):
    budget = PrivacyBudget(path, eps=1.0, delta=1e-6)
    refused = []

    def charge():
        for _ in range(10):
            try:
                budget.charge(plan(0.3), "run")
            except PrivacyBudgetError:
                refused.append(1)

    threads = [threading.Thread(target=charge) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(budget.charges) == 40 - len(refused) == int(gaussian_rho(1.0, 1e-6) / gaussian_rho(0.3, 1e-6))


def test_two_kernels_that_both_would_fit_alone_cannot_both_run(path):
    """Both pass the check beforehand; the second is refused when it asks for its first noise."""
    budget = PrivacyBudget(path, eps=1.0, delta=1e-6)
    ledgers = [Ledger(NoiseSource(), budget, "run") for _ in range(2)]
    for ledger in ledgers:
        budget.require(plan(0.9))
        ledger.commit(plan(0.9))
    granted, _ = ledgers[0].grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert granted
    with pytest.raises(PrivacyBudgetError, match=r"after 1 run\(s\)"):
        ledgers[1].grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert ledgers[1].untouched
    ledgers[0].grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert len(budget.charges) == 1


def test_a_charge_that_is_not_written_is_not_granted(path, monkeypatch):
    """A mutation of the order: were noise drawn first, it would be out although the disk is full."""
    budget = PrivacyBudget(path, eps=1.0, delta=1e-6)
    ledger = Ledger(NoiseSource(), budget, "run")
    ledger.commit(plan(0.9))

    def full(*args):
        raise OSError("no space left")

    monkeypatch.setattr(numpyro_dp.privacy.budget.os, "fsync", full)
    monkeypatch.setattr(NoiseSource, "draw", lambda *args: pytest.fail("noise was drawn"))
    with pytest.raises(OSError, match="no space"):
        ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert ledger.untouched


# -- Runs that are resumed ---------------------------------------------------------------------------------------------


def part(sampler, draws=4, warmup=2):
    mcmc = MCMC(sampler, num_warmup=warmup, num_samples=draws, progress_bar=False)
    mcmc.run(jax.random.key(0), X)
    return mcmc


def decreasing(t):
    return 1e-3 / (1 + t)


def again(mcmc):
    """A copy as another process would have it, of which nothing is shared."""
    return pickle.loads(pickle.dumps(mcmc))


def go_on(mcmc):
    mcmc.post_warmup_state = mcmc.last_state  # as `resume` does
    mcmc.run(mcmc.last_state.rng_key, X)
    return mcmc


def test_a_run_goes_on_from_a_pickle_until_its_plan_is_used_up(path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    first = part(DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget, num_iterations=14))
    with pytest.raises(PrivacyBudgetError, match="copy or was unpickled"):
        go_on(again(first))
    second = again(first)
    second.resume(PrivacyBudget(path))
    assert second.sampler.privacy.made == {"ratio": (6,)}
    assert go_on(second).sampler.privacy.made == {"ratio": (10,)}
    assert int(second.last_state.i) == 10
    assert not bool(second.last_state.exhausted)
    third = again(second)
    third.resume(PrivacyBudget(path))
    assert go_on(third).sampler.privacy.made == {"ratio": (14,)}
    with pytest.raises(PrivacyBudgetError, match="0 of 4 ratio releases left"):
        go_on(third)
    assert len(budget.charges) == 1
    assert third.privacy.eps == first.privacy.eps == 1.0


def test_pickles_of_one_run_and_the_run_itself_share_what_is_left(path):
    """An old pickle is a roll-back of the run: the file knows better."""
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    first = part(DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget, num_iterations=14))
    old = [again(first) for _ in range(3)]
    for mcmc in old:
        mcmc.resume(budget)  # all of them before any goes on
    go_on(old[0])
    go_on(first)
    with pytest.raises(PrivacyBudgetError, match="0 of 4 ratio releases left"):
        go_on(old[1])
    assert old[1].sampler.privacy.made == {"ratio": (6,)}  # by its own books there was enough
    old[2].sampler.ledger._claimed["ratio"][0] -= 1  # a mutation of the books does not help
    with pytest.warns(RuntimeWarning, match="is used up"):
        assert not old[2].sampler.ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")[0]
    (run,) = budget.charges
    assert budget.claimed(run.run, first.sampler.ledger.plan) == {"ratio": (14,)}


def test_what_a_crashed_process_had_claimed_is_gone(path):
    """It may have been released; nobody knows. At most a twentieth of the plan."""
    budget = PrivacyBudget(path, eps=1.0, delta=1e-3)
    ledger = Ledger(NoiseSource(), budget, "run")
    ledger.commit(plan(0.5, count=100))
    pickled = pickle.dumps(ledger)
    for _ in range(7):
        assert ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")[0]
    with pytest.raises(PrivacyBudgetError, match="not charged to a PrivacyBudget before it was pickled"):
        pickle.loads(pickled).resume(budget)
    resumed = pickle.loads(pickle.dumps(ledger))
    resumed.resume(budget)
    assert resumed.spent() == {"ratio": (10,)}
    grants = 0
    with pytest.warns(RuntimeWarning, match="used up"):
        while resumed.grant({"ratio": Request(1, (1,))}, 0, 50, b"")[0]:
            grants += 1
    assert grants == 90
    with pytest.warns(RuntimeWarning, match="used up"):
        own = [ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")[0] for _ in range(4)]
    assert own == [True, True, True, False]  # three it had claimed before


def test_claims_are_on_the_disk_before_there_is_noise(path, monkeypatch):
    budget = PrivacyBudget(path, eps=1.0, delta=1e-3)
    ledger = Ledger(NoiseSource(), budget, "run")
    ledger.commit(plan(0.5, count=100))
    made, draw = [], NoiseSource.draw

    def watched(self, *args):
        made.append(1)
        (run,) = budget.charges
        assert budget.claimed(run.run, ledger.plan)["ratio"][0] >= len(made)
        return draw(self, *args)

    monkeypatch.setattr(NoiseSource, "draw", watched)
    for _ in range(30):
        ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert len(made) == 30
    ledger.settle()
    assert budget.claimed(budget.charges[0].run, ledger.plan) == {"ratio": (30,)}
    ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert budget.claimed(budget.charges[0].run, ledger.plan) == {"ratio": (35,)}


def _grants(path, pickled):
    warnings.simplefilter("ignore")
    ledger = pickle.loads(pickled)
    ledger.resume(PrivacyBudget(path))
    return sum(ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")[0] for _ in range(100))


@pytest.mark.nightly
def test_processes_that_resume_one_run_never_release_more_than_its_plan(path):
    budget = PrivacyBudget(path, eps=1.0, delta=1e-3)
    ledger = Ledger(NoiseSource(), budget, "run")
    ledger.commit(plan(0.5, count=100))
    ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    ledger.settle()
    pickled = pickle.dumps(ledger)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        counts = pool.starmap(_grants, [(path, pickled), (path, pickled)])
    assert sum(counts) == 99


def test_noise_that_changes_over_time_is_claimed_iteration_by_iteration(path):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-2, other=(2.0, 5e-3))
    kernel = DPSGLD(model, eps=1.0, delta=1e-3, step_size=decreasing, budget=budget, num_iterations=8)
    first = part(kernel, draws=3, warmup=0)
    resumed = again(first)
    resumed.resume(budget)
    (made,) = resumed.privacy.made.values()
    assert sum(made) == 3
    go_on(resumed)
    assert sum(*resumed.privacy.made.values()) == 6


def test_after_a_crash_noise_that_changes_over_time_goes_on_where_nothing_is_gone(path):
    """Otherwise the pickle's next iteration, which the crashed process had claimed, would end the run."""
    budget = PrivacyBudget(path, eps=3.0, delta=1e-2, other=(2.0, 5e-3))
    kernel = DPSGLD(model, eps=1.0, delta=1e-3, step_size=decreasing, budget=budget, num_iterations=40)
    first = part(kernel, draws=5, warmup=0)
    resumed = again(first)
    kernel.sample(first.last_state, (X,), {})  # and crashes: two iterations were claimed, and not given back
    assert resumed.last_state.i == 5
    resumed.resume(PrivacyBudget(path))
    assert resumed.post_warmup_state.i == 7
    resumed.run(resumed.post_warmup_state.rng_key, X)
    assert not resumed.last_state.exhausted
    assert resumed.last_state.i == 12
    (made,) = resumed.privacy.made.values()
    assert made == (1,) * 12 + (0,) * 28


def ratio(*counts):
    return {"ratio": counts}


def grants(ledger, most=1000):
    """How many releases are granted until none is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")[0] for _ in range(most))


def test_nobody_can_give_back_releases_that_were_made(path):
    """By whatever public method: a run that made 5 of 10 releases has 5 left, wherever it is resumed."""
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    ledger = Ledger(NoiseSource(), budget, "run")
    ledger.commit(plan(1.0))
    assert grants(ledger, 5) == 5
    (charge,) = budget.charges
    for attempt in (
        lambda: budget.claim(charge.run, ratio(-5), ledger.plan.kinds),  # which version 0.1.0 had
        lambda: budget.take_up(charge.run, ledger.plan).claim(ratio(-5), ledger.plan.kinds),
        lambda: budget.take_up(charge.run, ledger.plan).give_back(ratio(0)),
        lambda: budget.take_up(charge.run, ledger.plan).give_back(ratio(-5)),
        ledger.settle,
    ):
        with contextlib.suppress(AttributeError, ValueError):
            attempt()
        assert budget.claimed(charge.run, ledger.plan) == ratio(5)
    resumed = pickle.loads(pickle.dumps(ledger))
    resumed.resume(PrivacyBudget(path))
    assert grants(resumed) == 5


def test_a_claimant_gives_back_what_it_claimed_itself_and_did_not_make(path):
    budget, planned = PrivacyBudget(path, eps=2.0, delta=1e-6), plan(1.0)
    with pytest.raises(PrivacyBudgetError, match="this run was not charged to"):
        budget.take_up("another", planned)
    run = budget.charge(planned, "run").run
    first, second = (budget.take_up(run, planned) for _ in range(2))
    assert first.claim(ratio(4), planned.kinds)
    assert second.claim(ratio(3), planned.kinds)
    assert not second.claim(ratio(4), planned.kinds)
    with pytest.raises(ValueError, match=r"\[5\] ratio releases cannot have been made, of which \[4\] were claimed"):
        first.give_back(ratio(5))
    first = budget.take_up(run, planned)
    assert first.claim(ratio(3), planned.kinds)
    first.give_back(ratio(2))
    assert budget.claimed(run, planned) == ratio(9)
    first.give_back(ratio(2))
    assert budget.claimed(run, planned) == ratio(9)
    assert first.claim(ratio(1), planned.kinds)
    with pytest.raises(ValueError, match=r"\[2\] ratio releases were made before, and cannot be \[0\] now"):
        first.give_back(ratio(0))
    assert budget.claimed(run, planned) == ratio(10)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a claimant cannot be copied"):
            duplicate(first)


@pytest.mark.parametrize("counts", [(-1,), (1.5,), (math.nan,), ("1",), (1, 1), (-(2**70),)])
def test_a_claim_is_counted_by_whole_numbers(path, counts):
    budget, planned = PrivacyBudget(path, eps=2.0, delta=1e-6), plan(1.0)
    run = budget.charge(planned, "run").run
    claimant = budget.take_up(run, planned)
    for act in (lambda: claimant.claim(ratio(*counts), planned.kinds), lambda: claimant.give_back(ratio(*counts))):
        with pytest.raises(ValueError, match="ratio releases"):
            act()
    assert budget.claimed(run, planned) == {}
    assert not claimant.claim(ratio(2**63 - 1), planned.kinds)


def test_a_file_that_was_written_before_is_read(path):
    """Of its lines, the hashes are over the same bytes in all versions."""
    shutil.copy(Path(__file__).with_name("written_before.budget"), path)
    budget = PrivacyBudget(path, witness=False)
    assert (budget.eps, budget.delta, budget.other) == (2.0, 1e-6, (0.5, 1e-7))
    (charge,) = budget.charges
    assert (charge.what, charge.eps, charge.num_rows) == ("DPPenalty", 1.0, 50)
    assert budget.claimed(charge.run, plan(1.0)) == ratio(4)
    budget.charge(plan(0.1), "another")
    assert [c.what for c in PrivacyBudget(path, witness=False).charges] == ["DPPenalty", "another"]


@pytest.fixture
def windows(monkeypatch):
    """Locks as Windows has them: each attempt may give up. A list of errors to come, and one of what was done."""
    errors, done = [], []

    def locking(descriptor, mode, length):
        done.append((mode, os.lseek(descriptor, 0, os.SEEK_CUR), length))
        if errors:
            raise OSError(errors.pop(), "no lock")

    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", types.SimpleNamespace(LK_LOCK="lock", LK_UNLCK="free", locking=locking))
    return errors, done


def test_where_an_attempt_to_lock_gives_up_another_one_is_made(path, windows):
    errors, done = windows
    errors += [errno.EDEADLK, errno.EDEADLK]
    PrivacyBudget(path, eps=2.0, delta=1e-6)
    assert [mode for mode, *_ in done] == ["lock", "lock", "lock", "free"]
    assert {place for _, place, _ in done} == {2**40}  # of all versions, or they would not see each other


def test_a_file_that_was_replaced_while_somebody_waited_is_locked_anew(path, tmp_path, monkeypatch):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    lock, locked = numpyro_dp.privacy.budget._lock, []

    def lock_what_is_replaced_first(file):
        locked.append(os.fstat(file.fileno()).st_ino)
        if len(locked) == 1:
            shutil.copy(path, tmp_path / "copy")
            os.replace(tmp_path / "copy", path)
        lock(file)

    monkeypatch.setattr(numpyro_dp.privacy.budget, "_lock", lock_what_is_replaced_first)
    budget.charge(plan(1.0), "run")
    assert locked[1:] == [path.stat().st_ino]
    assert locked[0] != locked[1]


def test_what_cannot_be_locked_is_not_used(path, windows):
    errors, _ = windows
    errors.append(errno.ENOLCK)
    with pytest.raises(OSError, match="no lock"):
        PrivacyBudget(path, eps=2.0, delta=1e-6)


def test_files_of_version_0_1_0_are_read_and_their_claims_stay(path):
    """They name no claimant, so nobody knows whether what was given back had been made."""
    budget, planned = PrivacyBudget(path, eps=2.0, delta=1e-6), plan(1.0)
    run = budget.charge(planned, "run").run
    for count in (4, -3, 2):
        with budget._locked():
            budget._append({"kind": "claim", "run": run, "counts": {"ratio": [count]}}, budget._read())
    again = PrivacyBudget(path)
    assert again.claimed(run, planned) == ratio(6)
    claimant = again.take_up(run, planned)
    claimant.give_back(ratio(0))
    assert again.claimed(run, planned) == ratio(6)
    assert not claimant.claim(ratio(5), planned.kinds)
    assert claimant.claim(ratio(4), planned.kinds)
    with again._locked():
        again._append({"kind": "claim", "run": run, "counts": {"ratio": [1]}}, again._read())
    assert again.claimed(run, planned) == ratio(10)  # though 11 were claimed, some of them twice


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "give back", "claimant": "a", "counts": {"ratio": [5]}}, "more ratio releases .* given back than"),
        ({"kind": "give back", "claimant": "b", "counts": {"ratio": [1]}}, "more ratio releases .* given back than"),
        ({"kind": "give back", "counts": {"ratio": [1]}}, "more ratio releases .* given back than"),
        ({"kind": "claim", "claimant": "a", "counts": {"ratio": [-1]}}, "more ratio releases .* given back than"),
        ({"kind": "charge", "rho": math.nan}, "a charge below 0, or of no number"),
        ({"kind": "charge", "rho": None, "eps": -1.0}, "a charge below 0, or of no number"),
        ({"kind": "charge", "rho": None, "delta": -1e-6}, "a charge below 0, or of no number"),
    ],
)
def test_a_file_that_gives_back_what_was_not_claimed_is_refused(path, entry, message):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    charge = budget.charge(plan(1.0), "run")
    with budget._locked():
        budget._append({"kind": "claim", "run": charge.run, "claimant": "a", "counts": {"ratio": [4]}}, budget._read())
        budget._append(dataclasses.asdict(charge) | entry, budget._read())
    for act in (lambda: budget.charges, lambda: budget.charge(plan(0.1), "c"), lambda: PrivacyBudget(path)):
        with pytest.raises(PrivacyBudgetError, match=message):
            act()


def weird(**changes):
    kinds = {"ratio": Releases((PoissonGaussian(2.0, 0.1),), (10,))}
    return dataclasses.replace(plan(1.0), kinds=kinds, **changes)


def with_counts(*counts):
    planned = plan(1.0)
    kinds = {str(k): Releases(planned.kinds["ratio"].mechanisms, (count,)) for k, count in enumerate(counts)}
    return dataclasses.replace(planned, kinds=kinds)


@pytest.mark.parametrize(
    ("planned", "error", "message"),
    [
        (with_counts(10, -9), ValueError, "whole number"),
        (with_counts(math.nan), ValueError, "whole number"),
        (with_counts(0.5), ValueError, "whole number"),
        (dataclasses.replace(plan(1.0), eps=math.nan), PrivacyBudgetError, "positive eps"),
        (dataclasses.replace(plan(1.0), delta=math.nan), PrivacyBudgetError, "positive eps"),
        (weird(eps=-1.0), PrivacyBudgetError, "positive eps"),
        (dataclasses.replace(plan(1.0), eps=0.0), PrivacyBudgetError, "positive eps"),
        (weird(delta=-1e-6), PrivacyBudgetError, "positive eps"),
        (weird(eps=0.01), PrivacyBudgetError, "its releases cost"),
        (weird(eps=math.inf), PrivacyBudgetError, "would cost"),
        (
            dataclasses.replace(plan(1.0), kinds={"ratio": Releases((Gaussian(0.0),), (1,))}),
            PrivacyBudgetError,
            "its releases cost inf",
        ),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value,
)
def test_a_plan_whose_price_is_none_is_not_charged(path, planned, error, message):
    """A negative one would pay for others, and after NaN every sum would be one."""
    budget = PrivacyBudget(path, eps=3.0, delta=1e-5, other=(1.5, 5e-6))
    for act in (budget.require, lambda planned: budget.charge(planned, "run")):
        with pytest.raises(error, match=message):
            act(planned)
    assert budget.charges == ()


def test_what_a_reserve_is_spent_on_is_counted_by_whole_numbers():
    """Two releases and minus one cost as little as one."""
    (mechanism,) = plan(1.0).kinds["ratio"].mechanisms
    ledger = Ledger(NoiseSource())
    ledger.commit(dataclasses.replace(plan(1.0), kinds={"reserve": Releases((mechanism,), (1,))}))
    for kinds, error in (
        ({"a": Releases((mechanism,), (2,)), "b": Releases((mechanism,), (-1,))}, ValueError),
        ({"a": Releases((mechanism,), (math.nan,))}, ValueError),
        ({"a": Releases((Gaussian(1e-3),), (1,))}, PrivacyBudgetError),
        ({"a": Releases((mechanism,), (1,)), "b": Releases((Gaussian(0.0),), (0,))}, PrivacyBudgetError),
    ):
        with pytest.raises(error):
            ledger.assign("reserve", kinds)
    assert ledger.plan.kinds == {"reserve": Releases((mechanism,), (1,))}


def test_a_reserve_becomes_what_it_is_spent_on():
    (mechanism,) = plan(1.0).kinds["ratio"].mechanisms
    ledger = Ledger(NoiseSource())
    ledger.commit(dataclasses.replace(plan(1.0), kinds={"reserve": Releases((mechanism,), (1,))}))
    half = Gaussian(mechanism.noise_multiplier * 2**0.5)
    ledger.assign("reserve", {"walk": Releases((half,), (2,))})
    assert ledger.committed_releases == ((mechanism, 1),)
    assert [ledger.grant({"walk": Request(1, (1,))}, 0, 50, b"")[0] for _ in range(2)] == [True, True]
    with pytest.warns(RuntimeWarning, match="used up"):
        assert not ledger.grant({"walk": Request(1, (1,))}, 0, 50, b"")[0]
    with pytest.raises(KeyError):
        ledger.grant({"reserve": Request(1, (1,))}, 0, 50, b"")


def test_a_request_is_a_whole_number():
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0))
    with pytest.raises(TypeError):
        ledger.grant({"ratio": Request(0.5, (1,))}, 0, 50, b"")
    with pytest.raises(ValueError, match="cannot be taken back, got a count of -1 for ratio"):
        ledger.grant({"ratio": Request(-1, (1,))}, 0, 50, b"")
    assert ledger.untouched


def test_a_batch_is_accounted_for_as_what_it_is():
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0))
    for batches in (FixedBatches(5), PoissonBatches(5)):
        with pytest.raises(PrivacyBudgetError, match="are accounted for as Gaussian, all rows, and asked for on"):
            ledger.grant({"ratio": Request(1, (1,), batches)}, 0, 50, b"")
    with pytest.raises(TypeError, match="batches are of the classes of"):
        ledger.grant({"ratio": Request(1, (1,), object())}, 0, 50, b"")
    assert ledger.untouched


def test_batches_are_drawn_for_each_slot():
    batches, ledger = PoissonBatches(20), Ledger(NoiseSource())
    kinds = {"grad": Releases((batches.mechanism(200.0, 50),), (3,))}
    ledger.commit(dataclasses.replace(plan(1.0), kinds=kinds))
    _, drawn = ledger.grant({"grad": Request(2, (2, 3), batches)}, 0, 50, b"")
    indices, sizes = drawn["grad"].indices, drawn["grad"].sizes
    assert indices.shape == (2, batches.capacity(50))
    assert sizes.shape == (2,)
    for rows, size in zip(indices, sizes, strict=True):
        assert 0 < size < 50
        assert len(set(rows[:size])) == size
        assert not rows[size:].any()


def test_a_plan_that_says_too_low_a_price_is_not_committed():
    for kinds in (plan(1.0).kinds, {"grad": Releases((PoissonGaussian(3.0, 0.5, 1e-40),), (10,))}):
        ledger = Ledger(NoiseSource())
        with pytest.raises(PrivacyBudgetError, match="these releases cost eps"):
            ledger.commit(dataclasses.replace(plan(1.0), eps=0.9, kinds=kinds))
        assert not ledger.committed


def test_noise_for_batches_goes_by_shares_and_counts():
    def wanted(share, count):
        return Wanted(lambda multiplier: (PoissonGaussian(multiplier, 0.01, 1e-40),), (count,), share)

    options = {"delta": 1e-6, "neighboring_relation": "replace_one", "num_iterations": 10, "num_chains": 1}
    shares = {"a": wanted(0.2, 10), "b": wanted(0.6, 40)}
    kinds = plan_for_budget(eps=1.0, wanted=shares, num_rows=50, **options).kinds
    a, b = (kinds[name].mechanisms[0].noise_multiplier for name in "ab")
    assert a / b == pytest.approx(math.sqrt((10 / 0.2) / (40 / 0.6)))
    assert 0.998 < composed_eps(flat_releases(kinds), 1e-6, "replace_one") <= 1.0
    without = plan_for_budget(eps=math.inf, wanted=shares, num_rows=50, **options)
    assert {m.noise_multiplier for kind in without.kinds.values() for m in kind.mechanisms} == {0.0}
    many = {"a": wanted(0.2, 10), "b": Wanted(lambda scale: (Gaussian(scale),), (10**14,), 0.6)}
    with pytest.raises(
        PrivacyBudgetError, match=r"100000000000000 b releases needs a noise multiplier of \d\S+, above"
    ):
        plan_for_budget(eps=0.1, wanted=many, num_rows=50, **options)


def test_a_nonce_that_comes_again_has_other_noise():
    """Of a seed: the same noise under two queries would cancel out."""
    ledger, drawn = Ledger(NoiseSource(seed=3)), []
    ledger.commit(plan(1.0))
    for _ in range(3):
        granted, found = ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"the same")
        assert granted
        drawn.append(tuple(np.ravel(found["ratio"].noise).tolist()))
    assert len(set(drawn)) == 3


def test_a_copy_of_a_ledger_says_nothing_where_the_original_would():
    """It has no noise to grant: its run is used up in another process, and that says so."""
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        granted, _ = pickle.loads(pickle.dumps(ledger)).grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert not granted


def test_releases_of_a_schedule_are_claimed_for_the_iterations_that_make_them(path):
    budget = PrivacyBudget(path, eps=1.0, delta=1e-4)
    ledger, stages = Ledger(NoiseSource(), budget), (Gaussian(30.0), Gaussian(50.0), Gaussian(90.0))
    ledger.commit(dataclasses.replace(plan(0.9), kinds={"ratio": Releases(stages, (1, 1, 1))}))
    assert [ledger.grant({"ratio": Request(1, (1,))}, k, 50, b"")[0] for k in range(3)] == [True] * 3
    with pytest.warns(RuntimeWarning, match="used up"):
        assert not ledger.grant({"ratio": Request(1, (1,))}, 3, 50, b"")[0]


def test_what_is_claimed_ahead_never_stands_for_what_is_missing(path):
    ledger = Ledger(NoiseSource(), PrivacyBudget(path, eps=1.0, delta=1e-4))
    ledger.commit(dataclasses.replace(plan(0.9), kinds={"ratio": Releases((Gaussian(30.0), Gaussian(50.0)), (1, 40))}))
    assert not ledger._claim({"ratio": (0, 2)})
    assert ledger._claim({"ratio": (0, 1)})
    assert not ledger._claim({"ratio": (0, 2)})
    assert ledger._claim({"ratio": (1, 40)})


def test_the_witness_lies_where_states_do(path, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of mine"))
    PrivacyBudget(path, eps=1.0, delta=1e-5)
    assert len(list((tmp_path / "state of mine" / "numpyro_dp").glob("*.json"))) == 1
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr("pathlib.Path.home", lambda: tmp_path / "home")
    PrivacyBudget(tmp_path / "another", eps=1.0, delta=1e-5)
    assert len(list((tmp_path / "home" / ".local" / "state" / "numpyro_dp").glob("*.json"))) == 1


def test_kinds_that_are_not_planned_do_not_hide_what_is_missing():
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0))
    with pytest.raises(PrivacyBudgetError, match="10 of 11 ratio releases left"):
        ledger.require({"grad": 3, "ratio": 11}, 1, 0, "this run")
    ledger.require({"grad": 3, "ratio": 10}, 1, 0, "this run")


def test_nothing_may_be_asked_for():
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0))
    assert ledger.grant({"ratio": Request(0, (1,))}, 0, 50, b"")[0]
    assert ledger.untouched


def test_each_iteration_of_a_schedule_has_the_noise_of_its_own():
    ledger, stages = Ledger(NoiseSource()), (Gaussian(30.0), Gaussian(50.0), Gaussian(90.0))
    ledger.commit(dataclasses.replace(plan(1.0), kinds={"ratio": Releases(stages, (1, 1, 1))}))
    drawn = [ledger.grant({"ratio": Request(1, (1,))}, k, 50, b"")[1]["ratio"] for k in range(3)]
    assert [one.noise_multiplier for one in drawn] == [30.0, 50.0, 90.0]


def test_a_schedule_costs_no_more_than_its_share():
    stages = [1.0 + k / 7 for k in range(50)]
    wanted = Wanted(lambda scale: tuple(Gaussian(scale * stage) for stage in stages), (1,) * 50, share=0.7)
    for eps in (0.1, 0.5, 1.0, 3.0):
        planned = plan_for_budget(
            eps=eps,
            delta=1e-6,
            neighboring_relation="replace_one",
            wanted={"grad": wanted},
            num_iterations=50,
            num_chains=1,
            num_rows=50,
        )
        rho = math.fsum(mechanism.rho for mechanism in planned.kinds["grad"].mechanisms)
        assert rho <= 0.7 * gaussian_rho(eps, 1e-6)
        assert rho >= 0.7 * gaussian_rho(eps, 1e-6) * (1 - 3e-9)


def test_a_ledger_is_for_the_arrays_that_it_has_seen():
    ledger, first, second = Ledger(NoiseSource()), np.zeros(3), np.zeros(3)
    ledger.bind_table([first])
    ledger.bind_table([first])
    with pytest.raises(PrivacyBudgetError, match="has run on other arrays before"):
        ledger.bind_table([second])


def test_without_a_grant_there_is_no_noise():
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0, count=1))
    assert ledger.grant({"ratio": Request(1, (1, 3))}, 0, 50, b"")[1]["ratio"].noise.any()
    with pytest.warns(RuntimeWarning, match="used up"):
        granted, drawn = ledger.grant({"ratio": Request(1, (1, 3))}, 0, 50, b"")
    assert not granted
    assert drawn["ratio"].noise.shape == (2, 1, 3)
    assert not drawn["ratio"].noise.any()


def test_releases_that_are_alike_in_all_iterations_leave_no_gap():
    ledger = Ledger(NoiseSource())
    ledger.commit(plan(1.0))
    for _ in range(4):
        ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    assert ledger.first_iteration_left() == 0


def test_whoever_changes_a_report_or_a_plan_of_theirs_changes_no_budget(path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    mcmc = fit(DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget))
    kinds = mcmc.privacy.kinds
    kinds["ratio"] = Releases(kinds["ratio"].mechanisms, (1000,))
    assert grants(mcmc.sampler.ledger) == 0
    mine = plan(1.0)
    ledger = Ledger(NoiseSource())
    ledger.commit(mine)
    mine.kinds["ratio"] = Releases(mine.kinds["ratio"].mechanisms, (1000,))
    assert grants(ledger) == 10


def test_what_was_promised_cannot_be_assigned(path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    for name, value in (
        ("eps", 9.0),
        ("delta", 0.1),
        ("other", (9.0, 0.1)),
        ("neighboring_relation", "x"),
        ("path", ""),
    ):
        with pytest.raises(AttributeError):
            setattr(budget, name, value)


def test_a_run_is_resumed_with_a_real_budget_only(path):
    class Forgetful:
        def claimed(self, *args):
            return {}

        def take_up(self, *args):
            return self

        def claim(self, *args):
            return True

    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    first = part(DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget, num_iterations=14))
    with pytest.raises(TypeError, match=r"budget must be a numpyro_dp\.PrivacyBudget"):
        again(first).resume(Forgetful())


def test_whoever_grants_settles_and_resumes_in_any_order_releases_no_more_than_the_plan(path):
    """Ledgers that settle twice, or after others have taken up the run; some crash, and some come from old pickles."""
    rng = np.random.default_rng(0)
    budget = PrivacyBudget(path, eps=1.0, delta=1e-3)
    ledger = Ledger(NoiseSource(), budget, "run")
    ledger.commit(plan(0.5, count=60))
    made = grants(ledger, 1)
    ledgers, pickles = [ledger], [pickle.dumps(ledger)]
    for _ in range(200):
        one = ledgers[rng.integers(len(ledgers))]
        act = rng.choice(["grant", "settle", "pickle", "resume", "crash"], p=[0.4, 0.3, 0.1, 0.15, 0.05])
        if act == "grant":
            made += grants(one, 1)
        elif act == "settle":
            one.settle()
        elif act == "pickle":
            pickles.append(pickle.dumps(one))
        elif act == "resume":
            ledgers.append(pickle.loads(pickles[rng.integers(len(pickles))]))
            ledgers[-1].resume(budget)
        elif len(ledgers) > 1:
            ledgers.remove(one)
        assert made <= sum(budget.claimed(budget.charges[0].run, ledger.plan)["ratio"]) <= 60
    for one in ledgers:
        made += grants(one, 60)
        one.settle()
    assert 50 <= made <= 60


def test_a_plan_that_is_committed_only_in_part_has_no_charge(path):
    """An interrupt while a plan is replaced must not leave the new one beside the charge of the old."""
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    ledger = Ledger(NoiseSource(), budget, "run")
    ledger.commit(plan(0.1))
    ledger._run = budget.charge(ledger.plan, "run").run

    class Interrupted(dict):
        def items(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.commit(dataclasses.replace(plan(1.0), kinds=Interrupted(plan(1.0).kinds)))
    assert ledger._run is None


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["surrogate", "walk"])
def test_a_prepared_kernel_goes_on_without_asking_the_table_anew(path, mode, monkeypatch):
    budget = PrivacyBudget(path, eps=50.0, delta=1e-3)
    options = {"prepare": Preparation(mode=mode, force=True), "num_iterations": 20}
    first = part(DPHMC(model, eps=20.0, budget=budget, **options))
    resumed = again(first)
    resumed.resume(budget)
    monkeypatch.setattr(numpyro_dp.preparation.prepare, "search", lambda *a: pytest.fail("it was prepared again"))
    go_on(resumed)
    assert resumed.sampler.prepared.mode == mode
    assert np.isfinite(resumed.get_samples()["mu"]).all()
    made = resumed.privacy.made
    assert made.get("ratio", ()) == ((10,) if mode == "walk" else ())
    assert {k: v for k, v in made.items() if k != "ratio"} == {
        k: v for k, v in first.privacy.made.items() if k != "ratio"
    }


def in_units(y, unit_of_y=1.0):
    """A model with a public number, on which its coordinates rest."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu * unit_of_y, 1.0), obs=y)


@pytest.mark.nightly
@pytest.mark.parametrize("as_what", [float, np.float32, np.array, jax.numpy.asarray])
def test_a_prepared_kernel_is_not_resumed_with_other_public_arguments(path, as_what):
    budget = PrivacyBudget(path, eps=50.0, delta=1e-3)
    kernel = DPHMC(
        in_units, eps=20.0, budget=budget, prepare=Preparation(mode="surrogate", force=True), num_iterations=20
    )
    first = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    first.run(jax.random.key(0), X, unit_of_y=as_what(1.0))
    resumed = again(first)
    resumed.resume(budget)
    with pytest.raises(ValueError, match="prepared with another model or other public arguments"):
        resumed.run(resumed.last_state.rng_key, X, unit_of_y=as_what(10.0))
    resumed.run(resumed.last_state.rng_key, X, unit_of_y=as_what(1.0))


class Unwilling:
    def __reduce__(self):
        raise RuntimeError("not to be pickled")


def test_public_arguments_are_known_again_by_their_content():
    """Of arrays and scalars of any library, and of other objects; what cannot be compared is no match."""
    ones = (1.0, np.float32(1), np.ones(3), jax.numpy.ones(3), "a", None, jax.random.key(1), plan(1.0), X.dtype)
    others = (2.0, np.float32(2), 2 * np.ones(3), 2 * jax.numpy.ones(3), "b", 0, jax.random.key(2), plan(2.0), np.int8)
    for one, other in zip(ones, others, strict=True):
        assert _hash([one]) == _hash([copy.deepcopy(one)]) != _hash([other])
    assert _hash([1.0, lambda: 1]) is None
    assert _hash([Unwilling()]) is None


def persons(y, person):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + 0 * person, 1.0), obs=y)


def test_a_resumed_run_has_the_same_persons(path):
    """By `run` and by hand: what a person's rows do together was promised for these persons."""
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    kernel = DPPenalty(persons, eps=1.0, prepare=False, step_size=0.1, budget=budget, num_iterations=14, unit="person")
    first = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    column, another = np.tile(np.arange(10), 5), np.repeat(np.arange(10), 5)
    first.run(jax.random.key(0), X, column)
    for go in (
        lambda mcmc: mcmc.run(mcmc.last_state.rng_key, X, another),
        lambda mcmc: mcmc.sampler.sample(mcmc.last_state, (X, another), {}),
    ):
        resumed = again(first)
        resumed.resume(budget)
        with pytest.raises(ValueError, match="other rows belong together here"):
            go(resumed)
    resumed = again(first)
    resumed.resume(budget)
    resumed.run(resumed.last_state.rng_key, X, column)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="finds the open file as Linux shows it")
def test_a_fork_does_not_keep_the_file_locked(path):
    """A child that was forked while its parent had the lock has the file open, too."""
    budget = PrivacyBudget(path, eps=2.0, delta=1e-6)
    with budget._locked():
        twin = os.dup(_open_descriptor(path))  # what a fork does
    try:
        thread = threading.Thread(target=lambda: budget.charges, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    finally:
        os.close(twin)


def _open_descriptor(path):
    return next(
        fd
        for fd in map(int, os.listdir("/proc/self/fd"))
        if os.path.realpath(f"/proc/self/fd/{fd}") == os.path.realpath(path)
    )


def test_who_shows_a_warning_may_ask_the_budget(path):
    """A hook that logs the budget's state must not wait for itself."""
    seen = []

    def use():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda *args, **kw: seen.append(len(PrivacyBudget(path).charges))
            PrivacyBudget(path, eps=2.0, delta=1e-6)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert seen == [0]


def test_what_to_do_with_a_reserve_is_decided_once(path):
    """Two pickles from before the decision would spend it twice."""
    budget = PrivacyBudget(path, eps=1.0, delta=1e-3)
    ledger = Ledger(NoiseSource(), budget, "run")
    both = plan(0.5, count=10)
    kinds = {
        "ratio": Releases(both.kinds["ratio"].mechanisms, (9,)),
        "reserve": Releases(both.kinds["ratio"].mechanisms, (1,)),
    }
    ledger.commit(dataclasses.replace(both, kinds=kinds))
    ledger.grant({"ratio": Request(1, (1,))}, 0, 50, b"")
    ledgers = [pickle.loads(pickle.dumps(ledger)) for _ in range(2)]
    for resumed in ledgers:
        resumed.resume(budget)
    ledgers[0].assign("reserve", {"walk": kinds["reserve"]})
    with pytest.raises(PrivacyBudgetError, match="somebody else has resumed it"):
        ledgers[1].assign("reserve", {"surrogate": kinds["reserve"]})
    later = pickle.loads(pickle.dumps(ledger))
    later.resume(budget)
    with pytest.raises(PrivacyBudgetError, match="no untouched reserve"):
        later.assign("reserve", {"surrogate": kinds["reserve"]})


def test_what_cannot_be_resumed_says_why(path, tmp_path):
    budget = PrivacyBudget(path, eps=2.0, delta=1e-3)
    first = part(DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, budget=budget, num_iterations=14))
    with pytest.raises(PrivacyBudgetError, match="this kernel has its budget"):
        first.resume(budget)
    with pytest.raises(PrivacyBudgetError, match="begun with another budget"):
        again(first).resume(PrivacyBudget(tmp_path / "another.budget", eps=2.0, delta=1e-3))
    with pytest.raises(PrivacyBudgetError, match="not charged to a PrivacyBudget"):
        again(part(DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, num_iterations=14))).resume(budget)
    seeded = part(
        DPPenalty(model, eps=0.1, prepare=False, step_size=0.1, budget=budget, num_iterations=14, noise_seed=3**90)
    )
    with pytest.raises(PrivacyBudgetError, match="same under other queries"):
        again(seeded).resume(budget)


def test_the_line_that_was_changed_is_named(path):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-5)
    for _ in range(3):
        budget.charge(plan(0.5), "a run")
    lines = path.read_text().splitlines(keepends=True)
    for k in (1, 3):
        path.write_text("".join([*lines[:k], lines[k].replace("a run", "another"), *lines[k + 1 :]]))
        with pytest.raises(PrivacyBudgetError, match=f"line {k + 1} of "):
            PrivacyBudget(path)


def test_a_witness_that_was_lost_remembers_the_last_line(path, tmp_path):
    """From then on a roll-back to any earlier line is noticed again."""
    witness = tmp_path / "witness"
    budget = PrivacyBudget(path, eps=3.0, delta=1e-5, witness=witness)
    for _ in range(3):
        budget.charge(plan(0.5), "a run")
    witness.unlink()
    with pytest.warns(RuntimeWarning, match="has no witness"):
        PrivacyBudget(path, witness=witness)
    known = json.loads(witness.read_text())
    last = json.loads(path.read_text().splitlines()[-1])
    assert (known["count"], known["hash"]) == (len(path.read_text().splitlines()), last["hash"])


def test_a_run_that_a_full_budget_refuses_is_told_that_nothing_is_left(path):
    budget = PrivacyBudget(path, eps=1.0, delta=1e-5)
    budget.charge(plan(budget.eps_left, delta=1e-5), "all of it")
    with pytest.raises(PrivacyBudgetError, match="nothing is left"):
        budget.charge(plan(0.5, delta=1e-5), "more")


def test_a_budget_that_is_all_set_aside_has_nothing_for_gaussian_runs(path):
    budget = PrivacyBudget(path, eps=1.0, delta=1e-5, other=(1.0, 5e-6))
    with pytest.raises(PrivacyBudgetError, match="nothing is left"):
        budget.charge(plan(0.5, delta=1e-5), "one run")


def test_what_is_set_aside_is_not_left_for_gaussian_runs(path):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-5, other=(2.0, 4e-6))
    assert budget.eps_left_at(6e-6) == pytest.approx(1.0, rel=1e-6)


def test_releases_on_batches_are_charged_to_their_part(path):
    budget = PrivacyBudget(path, eps=3.0, delta=1e-5, other=(2.0, 5e-6))
    batches = {"grad": Releases((PoissonGaussian(20.0, 0.1, 1e-40),), (10,))}
    eps = composed_eps(flat_releases(batches), 1e-6, "replace_one")
    budget.charge(dataclasses.replace(plan(1.0), eps=eps, delta=1e-6, kinds=batches), "a run on batches")
    for said in (eps / 1.5, eps * (1 - 1e-6)):
        with pytest.raises(PrivacyBudgetError, match="this plan says that it costs"):
            budget.charge(dataclasses.replace(plan(1.0), eps=said, delta=1e-6, kinds=batches), "too cheap")
    (charge,) = PrivacyBudget(path).charges
    assert charge.rho is None
    assert PrivacyBudget(path).eps_spent == pytest.approx(eps)


def test_the_smallest_eps_makes_a_budget(path):
    PrivacyBudget(path, eps=MIN_EPS, delta=1e-6).charge(plan(MIN_EPS), "all of it")


def test_folders_of_a_budget_are_made(tmp_path):
    assert PrivacyBudget(tmp_path / "a" / "b" / "table.budget", eps=1.0, delta=1e-5).path.exists()


def test_the_smallest_delta_makes_a_budget(path):
    assert PrivacyBudget(path, eps=1.0, delta=MIN_DELTA).delta == MIN_DELTA


def test_a_witness_stays_where_it_was_when_the_budget_was_opened(tmp_path, monkeypatch):
    """Looked for in the folder of the day, it was not there, and a file that had been rolled back was taken."""
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    with pytest.warns(UserWarning, match="a new privacy budget was made"):
        budget = PrivacyBudget("table.budget", 1.0, 1e-6, witness="witness.json")
    before = budget.path.read_bytes()
    budget.charge(plan(0.9), "a")
    monkeypatch.chdir(tmp_path / "other")
    budget.path.write_bytes(before)
    with pytest.raises(PrivacyBudgetError, match="rolled back"):
        budget.charge(plan(0.9), "b")
    assert not list((tmp_path / "other").iterdir())


def test_a_relative_state_folder_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="a new privacy budget was made"):
        PrivacyBudget("table.budget", 1.0, 1e-6)
    assert not (tmp_path / "state").exists()
    assert list((tmp_path / "home" / ".local" / "state" / "numpyro_dp").iterdir())


@pytest.mark.parametrize("witness", [True, False])
def test_an_open_budget_notices_that_its_file_is_another_one(path, witness):
    """It knows what the old one allowed, and would charge that to the new one."""
    with pytest.warns(UserWarning, match="a new privacy budget was made"):
        old = PrivacyBudget(path, 3.0, 1e-6, witness=witness)
    path.unlink()
    if old._witness is not None:
        old._witness.unlink()
    with pytest.warns(UserWarning, match="a new privacy budget was made"):
        PrivacyBudget(path, 1.0, 1e-6, witness=witness)
    for use in (lambda: old.charge(plan(2.5), "a"), lambda: old.require(plan(2.5)), lambda: old.charges):
        with pytest.raises(PrivacyBudgetError, match=r"not what it was when this object read it|witness of another"):
            use()


def test_an_open_budget_without_a_witness_notices_that_it_was_rolled_back(path):
    with pytest.warns(UserWarning, match="a new privacy budget was made"):
        budget = PrivacyBudget(path, 1.0, 1e-6, witness=False)
    before = path.read_bytes()
    budget.charge(plan(0.9), "a")
    path.write_bytes(before)
    with pytest.raises(PrivacyBudgetError, match="not what it was when this object read it"):
        budget.charge(plan(0.9), "b")
