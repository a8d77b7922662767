"""What a preparation may spend: never more than was committed, whatever it decides on the way, and once."""

import math
import pickle

import numpy as np
import pytest

from numpyro_dp import PrivacyBudget, PrivacyBudgetError
from numpyro_dp.preparation.fund import RESERVE, Fund, Wish
from numpyro_dp.privacy.accounting import composed_eps, gaussian_rho, noise_multiplier_for
from numpyro_dp.privacy.ledger import Ledger, Plan, Releases, flat_releases
from numpyro_dp.privacy.mechanisms import Gaussian, LogisticBit
from numpyro_dp.privacy.noise import NoiseSource, sensitivity_steps

pytestmark = pytest.mark.filterwarnings("ignore:a new privacy budget was made")

EPS, DELTA = 1.0, 1e-6
RHO = gaussian_rho(EPS, DELTA)


class Watched(NoiseSource):
    """Counts what it draws."""

    drawn = 0

    def draw(self, *args):
        self.drawn += 1
        return super().draw(*args)


def ledger_of(rho=RHO, budget=None, seed=None, source=None):
    ledger = Ledger(source or NoiseSource(seed), budget, "run")
    reserve = Releases((Gaussian(noise_multiplier_for(rho, 1)),), (1,))
    ledger.commit(Plan(EPS, DELTA, "replace_one", {RESERVE: reserve}, 5, 2, 50))
    return ledger


def planned(ledger, but=""):
    """rho of all that is planned, or of all but some kinds."""
    kinds = {name: kind for name, kind in ledger.plan.kinds.items() if not but or but not in name}
    return math.fsum(count * mechanism.rho for mechanism, count in flat_releases(kinds))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "table.budget"


# -- What it costs -----------------------------------------------------------------------------------------------------


def test_what_is_left_falls_by_what_is_spent():
    """Up to rounding to the safe side, by some 2e-9 of what is left in each stage."""
    ledger = ledger_of()
    fund = Fund(ledger)
    whole = fund.left
    assert RHO * (1 - 1e-8) < whole <= RHO
    for k in range(1, 100):
        before, spent = fund.left, planned(ledger, but=RESERVE)
        fund.ask(bounds=Wish(whole / 200, 1 + k % 7, (k % 3 + 1,)), line_search=Wish(whole / 1000))
        cost = planned(ledger, but=RESERVE) - spent
        assert cost == pytest.approx(whole / 200 + whole / 1000, rel=1e-8)
        assert 0 <= before - cost - fund.left + 1e-15 < 1e-8 * before
        assert whole * (1 - 1e-6) < planned(ledger) <= whole
    fund.ask(rest=Wish(fund.left))
    assert fund.left == 0
    assert whole * (1 - 1e-6) < planned(ledger) <= whole
    assert composed_eps(flat_releases(ledger.plan.kinds), DELTA, "replace_one") <= EPS


def test_who_cannot_be_told_loses_nothing():
    def broken(text):
        raise BrokenPipeError(text)

    fund = Fund(ledger_of(), broken)
    assert fund.ask(bounds=Wish(fund.left / 2, 3)).keys() == {"bounds"}


def test_stages_whose_price_follows_from_what_was_released_cost_no_more_than_the_plan():
    """Prices that only the noise decides, until one is refused."""
    for seed in range(20):
        ledger = ledger_of(seed=seed)
        fund, stages = Fund(ledger), 0
        price = 0.05 * fund.left
        with pytest.raises(PrivacyBudgetError, match="is wanted from a reserve of"):
            while True:
                draw = fund.ask(number=Wish(price, 2, (3,)))["number"]
                assert planned(ledger) <= RHO
                stages += 1
                price = RHO * (0.01 + 0.1 * (np.asarray(draw._slots[0].noise.lo) % 7).mean() / 7)
        assert stages > 5
        made = ledger.spent()
        spent = math.fsum(sum(made[name]) * kind.mechanisms[0].rho for name, kind in ledger.plan.kinds.items())
        assert spent <= RHO
        assert spent + fund.left == pytest.approx(RHO, rel=1e-6)


def test_a_stage_that_costs_more_than_what_is_left_is_refused_and_nothing_is_drawn():
    source = Watched()
    ledger = ledger_of(source=source)
    fund = Fund(ledger)
    fund.ask(count=Wish(0.6 * fund.left))
    left, kinds, spent, drawn = fund.left, ledger.plan.kinds, ledger.spent(), source.drawn
    assert drawn == 1
    too_much = [
        {"bounds": Wish(1.001 * left)},
        {"bounds": Wish(left * (1 + 1e-8), 7, (2,))},
        {"bounds": Wish(0.6 * left), "derivatives": Wish(0.6 * left, 1, (9,))},
        {"bounds": Wish(1e6)},
    ]
    for wishes in too_much:
        with pytest.raises(PrivacyBudgetError, match="is wanted from a reserve of"):
            fund.ask(**wishes)
        assert (fund.left, ledger.plan.kinds, ledger.spent(), source.drawn) == (left, kinds, spent, drawn)
    with pytest.raises(PrivacyBudgetError, match="only Gaussian"):
        fund.assign({"other": Releases((LogisticBit(1.0),), (1,))})
    with pytest.raises(ValueError, match="whole number"):
        fund.assign({"more": Releases((Gaussian(1.0),), (3,)), "less": Releases((Gaussian(1.0),), (-3,))})
    assert (fund.left, ledger.plan.kinds, source.drawn) == (left, kinds, drawn)
    fund.ask(bounds=Wish(0.5 * left))
    assert fund.left == pytest.approx(0.5 * left, rel=1e-8)


def test_nothing_is_asked_of_an_empty_fund():
    source = Watched()
    fund = Fund(ledger_of(source=source))
    fund.ask(all_of_it=Wish(fund.left, 3))
    assert fund.left == 0
    with pytest.raises(PrivacyBudgetError, match="no untouched reserve"):
        fund.ask(more=Wish(1e-9))
    assert source.drawn == 1


def test_releases_that_are_planned_for_later_are_paid_as_well():
    """A walk's steps, that the chain asks for itself."""
    ledger = ledger_of()
    fund = Fund(ledger)
    fund.ask(slope=Wish(0.1 * fund.left, 6, (1,)))
    left = fund.left
    fund.assign({"ratio": Releases((Gaussian(noise_multiplier_for(left, 10)),), (10,))})
    assert fund.left == 0
    assert set(ledger.plan.kinds) == {"slope 1", "ratio"}
    assert ledger.spent() == {"slope 1": (6,), "ratio": (0,)}
    assert planned(ledger) <= RHO


# -- What it gives -----------------------------------------------------------------------------------------------------


def test_draws_have_the_shape_and_the_noise_that_was_paid_for():
    fund = Fund(ledger_of())
    found = fund.ask(bounds=Wish(0.1 * RHO, 7, (2,)), last_release=Wish(0.2 * RHO, 1, (20_000,)))
    assert found["bounds"]._slots[0].noise.hi.shape == (7, 2)
    for leaf, shape in (("noise_multiplier", (7,)), ("granted", (7,)), ("accepted", (7,))):
        assert getattr(found["bounds"]._slots[0], leaf).shape == shape
    assert np.asarray(found["bounds"]._slots[0].granted).all()
    # Each of 7 releases costs rho = 1 / (2 multiplier^2).
    np.testing.assert_allclose(found["bounds"]._slots[0].noise_multiplier, math.sqrt(7 / (0.2 * RHO)), rtol=1e-6)
    one = found["last_release"]._take_one()
    assert one.noise.hi.shape == (20_000,)
    steps = np.asarray(one.noise.hi, float) * 2**24 + np.asarray(one.noise.lo)
    scale = float(one.noise_multiplier) * sensitivity_steps("replace_one")
    assert abs(np.mean(steps**2) / scale**2 - 1) < 6 * math.sqrt(2 / len(steps))
    again = fund.ask(last_release=Wish(0.2 * RHO, 1, (20_000,)))["last_release"]._take_one()
    other = np.asarray(again.noise.hi, float) * 2**24 + np.asarray(again.noise.lo)
    assert abs(np.mean(steps * other)) < 6 * scale**2 / math.sqrt(len(steps))


def test_stages_are_named_and_counted():
    ledger = ledger_of()
    fund = Fund(ledger)
    for _ in range(2):
        fund.ask(line_search=Wish(0.1 * RHO, 3))
    assert set(ledger.plan.kinds) == {"line search 1", "line search 2", f"{RESERVE} 2"}
    assert ledger.spent() == {"line search 1": (3,), "line search 2": (3,), f"{RESERVE} 2": (0,)}


# -- Once --------------------------------------------------------------------------------------------------------------


def test_a_fund_is_begun_once():
    source = Watched()
    ledger = ledger_of(source=source)
    first = Fund(ledger)
    first.ask(count=Wish(0.1 * first.left))
    second = Fund(ledger)
    assert second.left == 0
    with pytest.raises(PrivacyBudgetError, match="no untouched reserve"):
        second.ask(count=Wish(0.01 * RHO))
    assert source.drawn == 1
    first.ask(count=Wish(0.1 * RHO))


def test_a_copy_that_was_pickled_before_has_nothing_to_draw_from():
    ledger = ledger_of()
    copy = pickle.loads(pickle.dumps(ledger))
    assert copy.closed
    with pytest.raises(PrivacyBudgetError, match=r"is a copy or was unpickled.*Make a new kernel"):
        Fund(copy).ask(count=Wish(0.1 * RHO))
    assert set(copy.plan.kinds) == {RESERVE}  # and its books are as they were
    assert copy.untouched
    fund = Fund(ledger)
    fund.ask(count=Wish(0.1 * fund.left))
    late = pickle.loads(pickle.dumps(ledger))
    with pytest.raises(PrivacyBudgetError):
        Fund(late).ask(count=Wish(0.1 * RHO))


def test_a_shared_budget_is_charged_once_and_before_anything_is_drawn(path):
    budget = PrivacyBudget(path, eps=1.5, delta=DELTA)

    class Checked(NoiseSource):
        def draw(self, *args):
            assert len(budget.charges) == 1
            return super().draw(*args)

    ledger = ledger_of(budget=budget, source=Checked())
    fund = Fund(ledger)
    assert budget.charges == ()
    for _ in range(4):
        fund.ask(bounds=Wish(0.2 * RHO, 7, (2,)), derivatives=Wish(0.01 * RHO, 1, (9,)))
    assert len(budget.charges) == 1
    assert budget.eps_spent == pytest.approx(EPS, rel=1e-6)
    with pytest.raises(PrivacyBudgetError, match="is wanted from a reserve of"):
        fund.ask(bounds=Wish(0.2 * RHO))
    assert budget.eps_spent == pytest.approx(EPS, rel=1e-6)


def test_a_shared_budget_that_does_not_suffice_gives_nothing(path):
    budget = PrivacyBudget(path, eps=0.5, delta=DELTA)
    source = Watched()
    with pytest.raises(PrivacyBudgetError, match="would cost"):
        Fund(ledger_of(budget=budget, source=source)).ask(count=Wish(0.01 * RHO))
    assert source.drawn == 0
    assert budget.charges == ()


@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("copies_first", [False, True], ids=["original first", "copy first"])
def test_of_a_run_and_its_copy_one_has_the_reserve(path, stages, copies_first):
    """Both from the same state, and what was drawn before is not drawn again."""
    budget = PrivacyBudget(path, eps=1.5, delta=DELTA)
    ledger = ledger_of(budget=budget)
    fund = Fund(ledger)
    for _ in range(stages):
        fund.ask(bounds=Wish(0.1 * RHO, 7, (2,)))
    copy = pickle.loads(pickle.dumps((ledger, fund)))
    if stages == 0:
        with pytest.raises(PrivacyBudgetError, match="was not charged to a PrivacyBudget before it was pickled"):
            copy[0].resume(budget)
        return
    resumed, resumed_fund = copy
    resumed.resume(budget)
    resumed_fund._ledger = resumed
    assert resumed_fund.left == pytest.approx(fund.left, rel=1e-12)
    pair = (resumed_fund, fund) if copies_first else (fund, resumed_fund)
    pair[0].ask(derivatives=Wish(0.2 * RHO))
    with pytest.raises(PrivacyBudgetError, match=r"somebody else has resumed it|no untouched reserve"):
        pair[1].ask(derivatives=Wish(0.2 * RHO))
    assert len(budget.charges) == 1
