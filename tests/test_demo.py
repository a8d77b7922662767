"""The demo: its public bounds hold for every possible row, and the command does what it says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.handlers import substitute, trace

pytest.importorskip("statsmodels")
pytest.importorskip("matplotlib")

import matplotlib

matplotlib.use("Agg")

from numpyro_dp import demo
from numpyro_dp.accounting import gaussian_delta
from numpyro_dp.plots import plot_posteriors

ABSURD = [-np.inf, -1e300, -1.0, -0.0, 0.5, 10.0, 11.0, 1e300, np.inf, np.nan]


def absurd_table():
    columns = ("mdvis", "lncoins", "idp", "lpi", "fmde", "physlm", "disea", "hlthg", "hlthf", "hlthp")
    return {name: np.roll(ABSURD, shift) for shift, name in enumerate(columns)}


@pytest.fixture(scope="module")
def table():
    return demo.load_table()


def test_covariates_lie_within_their_public_ranges(table):
    covariates, visit = demo.design_matrix(table), demo.any_visit(table)
    assert covariates.shape == (20190, len(demo.COVARIATES))
    assert np.abs(covariates).max() <= 1
    assert set(np.unique(visit)) == {0, 1}
    # Clamping changes nothing in these data: the ranges are those of the definitions.
    cost_sharing = demo.COVARIATES["cost_sharing"]
    assert np.asarray(table["lncoins"]).max() <= cost_sharing.high + 1e-5
    assert np.asarray(table["lncoins"]).min() >= cost_sharing.low


def test_absurd_rows_lie_within_the_public_ranges_too():
    covariates, visit = demo.design_matrix(absurd_table()), demo.any_visit(absurd_table())
    assert np.all(np.isfinite(covariates))
    assert np.abs(covariates).max() <= 1
    assert set(np.unique(visit)) <= {0, 1}


def test_a_row_of_the_design_depends_on_that_row_alone(table):
    head = table.head(50)
    changed = head.copy()
    changed.loc[7] = 1e6
    before, after = demo.design_matrix(head), demo.design_matrix(changed)
    assert np.array_equal(np.delete(before, 7, 0), np.delete(after, 7, 0))


def test_no_possible_row_has_a_gradient_above_the_clip_bounds():
    """At every corner of the ranges, for both outcomes, near and far from the posterior."""
    corners = jnp.array(list(itertools.product((-1.0, 0.0, 1.0), repeat=len(demo.COVARIATES))))
    rng = np.random.default_rng(0)
    points = jnp.asarray(rng.normal(size=(40, len(demo.LABELS))) * np.logspace(-2, 3, 40)[:, None])

    def row_log_density(z, row, visit):
        params = dict(zip(demo.LABELS, z, strict=True))
        site = trace(substitute(demo.model, params)).get_trace(row[None], visit=visit[None])["visit"]
        return site["fn"].log_prob(site["value"])[0]

    gradient = jax.vmap(jax.vmap(jax.grad(row_log_density), (0, None, None)), (None, 0, None))
    largest = 0.0
    for visit in (0, 1):
        g = np.asarray(gradient(points, corners, jnp.array(visit)))
        assert np.linalg.norm(g, axis=-1).max() <= demo.MAX_NORM * (1 + 1e-6)
        assert np.abs(g).max() <= demo.MAX_COMPONENT * (1 + 1e-6)
        largest = max(largest, np.linalg.norm(g, axis=-1).max())
    assert largest > 0.99 * demo.MAX_NORM  # and the bound is not loose


def test_the_step_size_shrinks_with_the_budget_and_is_bounded_without_one():
    steps = [demo.hmc_step_size(eps, 20190, 400) for eps in (0.1, 1.0, 10.0, 1e6)]
    assert steps == sorted(steps)
    assert steps[0] > 0
    assert steps[-1] * demo.NUM_STEPS == pytest.approx(np.pi / np.sqrt(20190))


def test_costs_add_up_in_rho():
    class Report:
        kernel, delta = "DPHMC", 1e-6

        def __init__(self, eps):
            self.eps, self.rho = eps, demo.gaussian_rho(eps, self.delta)

    text = demo.total_cost([Report(3.0), Report(4.0)])
    together = float(text.split("together")[1].split("eps = ")[1].split()[0])
    assert 4 < together < 7
    assert gaussian_delta(together * 1.001, Report(3.0).rho + Report(4.0).rho) <= 1e-6


@pytest.mark.parametrize(
    ("shift", "r_hat", "expected"), [(0.1, 1.01, "is usable:"), (0.1, 1.4, "not fully agreed"), (2, 1.0, "not usable")]
)
def test_the_verdict_follows_from_the_numbers(shift, r_hat, expected):
    exact = {"a": demo.Estimate(0.0, 1.0, 500, 1.0), "b": demo.Estimate(5.0, 2.0, 500, 1.0)}
    found = {"a": demo.Estimate(0.0, 1.0, 60, r_hat), "b": demo.Estimate(5 - 2 * shift, 2.2, 50, 1.0)}
    text = demo.verdict("DPHMC", 3.0, exact, found)
    assert expected in text
    assert f"{shift:.2f}" in text
    assert "eps = 3" in text


@pytest.mark.slow
def test_the_command_runs_and_writes_its_results(tmp_path, capsys):
    output = tmp_path / "results"
    arguments = ["--eps", "9", "--eps-penalty", "7", "--num-samples", "45", "--num-warmup", "5", "--seed", "3"]
    assert demo.main([*arguments, "--output", str(output)]) == 0

    text = capsys.readouterr().out
    assert "(7, 4.96e-06)-differentially private with respect to replacing one row of plate 'person_years'" in text
    assert "(9, 4.96e-06)-differentially private" in text
    assert "per ROW" in text
    assert "not per person" in text
    assert "not private, shown here only because these data are public" in text
    together = float(text.split("together")[1].split("eps = ")[1].split()[0])
    assert 9 < together < 16
    for name in ("posteriors.png", "dppenalty.nc", "dphmc.nc"):
        assert (output / name).stat().st_size > 1000
        assert str(output / name) in text

    import xarray

    with xarray.open_dataset(output / "dphmc.nc", group="posterior", engine="netcdf4") as posterior:
        assert set(posterior.data_vars) == set(demo.LABELS)
        assert posterior.sizes["draw"] == 45 // (demo.NUM_STEPS + 1)
        assert posterior.attrs["privacy_eps"] == 9


@pytest.mark.parametrize("arguments", [["--eps", "inf"], ["--eps", "-1"], ["--num-samples", "0"]])
def test_the_command_refuses_nonsense(arguments, capsys):
    with pytest.raises(SystemExit):
        demo.main(arguments)
    assert "must be" in capsys.readouterr().err


def test_a_missing_dependency_is_named_with_the_way_out(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "statsmodels.datasets", None)
    assert demo.main([]) == 1
    assert "pip install 'numpyro_dp[demo]'" in capsys.readouterr().err


def test_plots_take_dicts_and_draw_every_entry_of_an_array():
    rng = np.random.default_rng(0)
    draws = {"a": rng.normal(size=100), "b": rng.normal(size=(100, 3))}
    stuck = {"a": np.zeros(100), "b": np.ones((100, 3))}
    figure = plot_posteriors({"free": draws, "stuck": stuck}, labels={"b[1]": "the second"}, title="A title")
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()]
    assert titles == ["a", "b[0]", "the second", "b[2]"]
    figure.canvas.draw()


def test_plots_name_what_is_missing():
    with pytest.raises(ValueError, match="at least one result"):
        plot_posteriors({})
    with pytest.raises(ValueError, match="no draws of 'c'"):
        plot_posteriors({"x": {"a": np.zeros(5)}}, var_names=["c"])
    with pytest.raises(ValueError, match="'y' has no draws of a"):
        plot_posteriors({"x": {"a": np.arange(5.0)}, "y": {"b": np.arange(5.0)}})
