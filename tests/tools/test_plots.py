"""Pictures: of axes that are given or of their own, without a number that is not released, and true at a glance."""

from types import SimpleNamespace

import numpy as np
import pytest

from numpyro_dp import PrivacyBudget, plan
from numpyro_dp.plots import (
    plot_audit,
    plot_budget,
    plot_label,
    plot_noise,
    plot_plan,
    plot_posteriors,
    plot_privacy,
    plot_rehearsal,
)
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


def test_of_a_run_that_asks_before_its_first_iteration_shares_are_drawn():
    kinds = {
        "scales": Releases((Gaussian(2.0),), (1,)),
        "last release": Releases((Gaussian(4.0), Gaussian(1.0)), (4, 2)),
    }
    report = SimpleNamespace(private=True, kinds=kinds, eps=3.0, kernel="DPHMC", num_iterations=100)
    axes = plot_budget(report)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["scales", "last release"]
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches], [100 / 10, 100 * 9 / 10])  # rho / (1/8 + 9/8)
    assert axes.get_title(loc="left") == "DPHMC: what eps 3 was spent on, before the first iteration"


def test_statistics_that_are_released_once_are_not_drawn_as_a_walk():
    once = {"statistics": Releases((Gaussian(2.0),), (1,))}
    axes = plot_budget(
        SimpleNamespace(private=True, kinds=once, eps=3.0, kernel="DPExponentialFamily", num_iterations=100)
    )
    assert [label.get_text() for label in axes.get_yticklabels()] == ["statistics"]


def test_an_error_beyond_the_frame_is_marked_as_such():
    for rows, beyond in ((100_000, False), (200, True)):
        left, _ = plan(n=rows, d=6, eps=1.0).plot()
        highest = left.get_ylim()[1]
        labels = [text.get_text() for text in left.get_legend().get_texts()]
        assert (f"above {highest:g}" in labels) == beyond
        drawn = [line for line in left.lines if len(line.get_xdata()) == 1]
        assert all(line.get_ydata()[0] < highest for line in drawn)
        assert any(line.get_marker() == "^" for line in drawn) == beyond


@pytest.mark.parametrize(
    ("draw", "what"),
    [
        (plot_audit, "an audit: give what numpyro_dp.audit returns"),
        (plot_plan, "a plan: give what numpyro_dp.plan returns"),
        (plot_rehearsal, "a rehearsal: give what numpyro_dp.rehearse returns"),
        (plot_privacy, "a run's report: give mcmc.privacy"),
        (plot_label, "a run's report: give mcmc.privacy"),
        (plot_budget, "a PrivacyBudget, or of a run's report: give mcmc.privacy"),
        (plot_noise, "a run: give the numpyro_dp.MCMC"),
    ],
)
def test_another_thing_than_what_is_drawn_is_refused_with_where_to_get_it(draw, what):
    with pytest.raises(TypeError, match=f"this picture is of {what}, got a dict"):
        draw({})
    assert not plt.get_fignums()


def test_a_run_without_noise_has_no_budget_to_draw():
    with pytest.raises(ValueError, match="a run without noise"):
        plot_budget(SimpleNamespace(private=False))
