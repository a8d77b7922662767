"""Pictures: of axes that are given or of their own, without a number that is not released, and true at a glance."""

from types import SimpleNamespace

import numpy as np
import pytest

from numpyro_dp import PrivacyBudget
from numpyro_dp.plots import plot_audit, plot_budget, plot_posteriors
from numpyro_dp.privacy.ledger import Plan, Releases
from numpyro_dp.privacy.mechanisms import Gaussian
from numpyro_dp.tools.auditing import AuditResult

plt = pytest.importorskip("matplotlib.pyplot")


def audit_of(trials, shift, eps=2.0):
    rng = np.random.default_rng(0)
    scores = rng.normal(shift, 1, trials), rng.normal(0, 1, trials)
    return AuditResult(0.0, eps, 0.05, 0.999, "replace_one", scores, ((eps, 0.05),))


def band_of(axes):
    (band,) = (found for found in axes.collections if found.get_label() == "95% band of so many trials")
    return band.get_paths()[0]


def test_a_picture_of_its_own_is_the_current_figure_and_can_be_written(tmp_path):
    axes = plot_audit(audit_of(50, 1.0))
    assert plt.gcf() is axes.figure
    plt.savefig(tmp_path / "audit.png")
    assert (tmp_path / "audit.png").stat().st_size > 5000


def test_axes_that_are_given_are_drawn_on_and_no_figure_is_made():
    figure, (left, right) = plt.subplots(1, 2)
    assert plot_audit(audit_of(50, 1.0), ax=left) is left
    (panel,) = plot_posteriors({"a run": {"a": np.arange(9.0)}}, ax=right)
    assert panel is right
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["a run"]
    assert plt.get_fignums() == [figure.number]
    with pytest.raises(ValueError, match=r"this picture has 2 panel\(s\), and `ax` has 1 axes"):
        plot_posteriors({"a run": {"a": np.arange(9.0), "b": np.arange(9.0)}}, ax=left)


@pytest.mark.parametrize("trials", [20, 2000])
def test_an_audit_that_keeps_the_claim_has_a_band_that_reaches_what_is_allowed(trials):
    """However few its trials are, and although its curve itself may be below."""
    result = audit_of(trials, 1.5)
    highest = np.array(
        [max(y for x, y in band_of(plot_audit(result)).vertices if abs(x - at) < 2e-3) for at in (0.1, 0.2, 0.4)]
    )
    assert np.all(highest > result.trade_off([0.1, 0.2, 0.4]))


def test_an_audit_that_breaks_the_claim_has_a_band_below_what_is_allowed():
    result = audit_of(2000, 4.0, eps=0.5)
    band = band_of(plot_audit(result))
    highest = max(y for x, y in band.vertices if abs(x - 0.2) < 2e-3)
    assert highest < result.trade_off(0.2)


def test_a_budget_is_drawn_run_by_run(tmp_path):
    with pytest.warns(UserWarning, match="a new privacy budget was made"):
        budget = PrivacyBudget(tmp_path / "patients.budget", eps=3.0, delta=1e-6, witness=False)
    axes = plot_budget(budget)
    assert axes.get_title(loc="left") == "patients.budget: eps 0 of 3 is spent"
    kinds = {"release": Releases((Gaussian(6.0),), (1,))}
    for what in ("DPHMC of first", "DPHMC of second"):
        budget.charge(Plan(1.0, 1e-6, "replace_one", kinds, 100, 1, None), what)
    axes = plot_budget(budget)
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "DPHMC of first",
        "DPHMC of second",
        "all together",
    ]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths[:2] == [1.0, 1.0]
    assert widths[2] == budget.eps_spent < 2.0
    assert axes.get_xlim()[1] > 3.0


def test_a_run_without_noise_has_no_budget_to_draw():
    with pytest.raises(ValueError, match="a run without noise"):
        plot_budget(SimpleNamespace(private=False))
