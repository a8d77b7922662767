"""The demo: its public ranges hold for every possible row, and the command does what it says."""

import numpy as np
import pytest

pytest.importorskip("statsmodels")
pytest.importorskip("matplotlib")

import matplotlib

matplotlib.use("Agg")

from numpyro_dp import demo
from numpyro_dp.plots import plot_posteriors

pytestmark = pytest.mark.optimized

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
    for covariate in demo.COVARIATES.values():
        values = np.asarray(covariate.values(table), float)
        assert values.max() <= covariate.high + 1e-5
        assert values.min() >= covariate.low


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


def test_consecutive_years_with_the_same_covariates_are_one_persons(table):
    person = demo.persons(table)
    assert set(np.diff(person)) == {0, 1}
    assert person[0] == 0
    assert np.bincount(person).max() == demo.YEARS
    others = table.drop(columns="mdvis").to_numpy()
    same_person = np.diff(person) == 0
    assert np.all(others[1:][same_person] == others[:-1][same_person])
    made_up = {"mdvis": np.arange(14), "disea": np.repeat([3.0, 4.0, np.nan, 3.0], [2, 7, 1, 4])}
    assert demo.persons(made_up).tolist() == [0] * 2 + [1] * 5 + [2] * 2 + [2] + [2] * 2 + [3] * 2


@pytest.mark.parametrize(
    ("shift", "ratio", "r_hat", "expected"),
    [
        (0.1, 1.1, 1.01, "is usable:"),
        (1.0, 1.1, 1.01, "is usable:"),
        (0.1, 1.1, 1.4, "not fully agreed"),
        (0.1, 1.1, np.nan, "not fully agreed"),
        (1.5, 1.1, 1.01, "usable only with its own intervals"),
        (3, 4.0, 1.01, "usable only with its own intervals"),
        (2, 1.1, 1.0, "usable only with its own intervals"),  # one interval of two misses
        (3, 1.1, 1.0, "not usable"),
        (4.1, 1.0, 1.0, "not usable"),
        (0.5, 0.1, 1.0, "not usable"),
        (np.nan, 1.0, 1.0, "not usable"),
    ],
)
def test_the_verdict_follows_from_the_numbers(shift, ratio, r_hat, expected):
    exact = {"a": demo.Estimate(0.0, 1.0, 500, 1.0), "b": demo.Estimate(5.0, 2.0, 500, 1.0)}
    found = {"a": demo.Estimate(0.0, 1.0, 60, r_hat), "b": demo.Estimate(5 - 2 * shift, 2 * ratio, 50, 1.0)}
    text = demo.verdict(3.0, exact, found)
    assert expected in text
    assert f"{shift:.2f}" in text
    assert f"{ratio:.2f}" in text
    assert f"{2 if shift <= 1.645 * ratio else 1} of 2 90% intervals" in text
    assert "eps = 3" in text


def test_the_answer_is_the_odds_ratio_over_the_whole_range():
    class Run:
        def __init__(self, effect):
            self.effect = effect

        def get_samples(self):
            return {"cost_sharing": self.effect + np.linspace(-0.1, 0.1, 101)}

    text = demo.answer(Run(-0.5), Run(0.0))
    assert f"{np.exp(-1.0):.2f} times as high (90% interval {np.exp(-1.18):.2f} to {np.exp(-0.82):.2f})" in text
    assert f"without privacy 1.00 times ({np.exp(-0.18):.2f} to {np.exp(0.18):.2f})" in text


@pytest.mark.nightly
@pytest.mark.filterwarnings(
    "ignore:the posterior may be off:numpyro_dp.PosteriorWarning"
)  # which noise may bring about
def test_the_command_runs_and_writes_its_results(tmp_path, capsys):
    output = tmp_path / "results"
    arguments = ["--eps", "2", "--num-samples", "50", "--num-warmup", "50", "--seed", "3", "--output", str(output)]
    assert demo.main(arguments) == 0

    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert (
        "(2, 1.73e-05)-differentially private with respect to replacing one unit 'person' with all of its rows" in flat
    )
    assert "per PERSON" in text
    assert "site 'own' (one value for each unit would publish it" in flat
    assert "not private, shown here only because these data are public" in text
    assert "more draws cost nothing" in text
    assert "DPHMC at eps = 2 is " in text
    assert "The answer: the odds" in text
    for name in ("posteriors.png", "dphmc.nc"):
        assert (output / name).stat().st_size > 1000
        assert str(output / name) in text

    import xarray

    with xarray.open_dataset(output / "dphmc.nc", group="posterior", engine="netcdf4") as posterior:
        assert set(posterior.data_vars) == set(demo.LABELS)
        assert posterior.sizes["draw"] == 50
        assert posterior.attrs["privacy_eps"] == 2


@pytest.mark.statistical
def test_a_budget_that_cannot_give_a_posterior_ends_the_command_with_the_reason(tmp_path, capsys):
    output = tmp_path / "results"
    assert demo.main(["--eps", "0.01", "--output", str(output)]) == 1
    streams = capsys.readouterr()
    assert "Nothing was released" in " ".join(streams.err.split())
    assert "differentially private with respect to" not in streams.out
    assert not output.exists()


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
    panels = plot_posteriors({"free": draws, "stuck": stuck}, labels={"b[1]": "the second"}, title="A title")
    assert [axes.get_title(loc="left") for axes in panels] == ["a", "b[0]", "the second", "b[2]"]
    panels[0].figure.canvas.draw()


def test_plots_name_what_is_missing():
    with pytest.raises(ValueError, match="at least one result"):
        plot_posteriors({})
    with pytest.raises(ValueError, match="no draws of 'c'"):
        plot_posteriors({"x": {"a": np.zeros(5)}}, var_names=["c"])
    with pytest.raises(ValueError, match="'y' has no draws of a"):
        plot_posteriors({"x": {"a": np.arange(5.0)}, "y": {"b": np.arange(5.0)}})
