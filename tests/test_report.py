"""The report as text and in a notebook."""

import dataclasses
import html
import json
import warnings
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.local_owners import LocalExchange
from helpers.tiers import some_every_day

from numpyro_dp import MCMC, DPPenalty, plan
from numpyro_dp.plots import plot_label
from numpyro_dp.statements import label, round_up


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@pytest.mark.filterwarnings("ignore:the posterior")
def test_a_notebook_shows_what_print_says():
    kernel = DPPenalty(model, eps=1.0, prepare=False, clip_ratio=1.0, step_size=0.1, row_plate="rows")
    mcmc = MCMC(kernel, num_warmup=1, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), np.linspace(-1, 1, 50).astype(np.float32))
    text, shown = str(mcmc.privacy), html.unescape(mcmc.privacy._repr_html_())
    first, rest = shown.split("<details>")
    assert mcmc.privacy.guarantee() in first
    assert "NOT TO BE TRUSTED" in first
    assert "<details>" not in rest
    for line in ("covers", "accounting", "spent", "private", "assumes"):
        assert f">{line}</th>" in rest
        assert f"\n  {line} " in text
    assert text.startswith("Privacy of this DPPenalty run\n  guarantee    (1, 0.002)-differentially private")


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({}, []),
        ({"eps": 10.0, "delta": 1 / 50}, []),
        ({"eps": 12.0}, ["eps = 12 promises next to nothing: odds of 1.6e+05 to 1"]),
        ({"eps": 1000.0}, ["eps = 1000 promises next to nothing: odds of e^1e+03 to 1"]),
        ({"delta": 0.1}, ["delta = 0.1 is above 1 / n: who publishes one row in 10, at random, passes"]),
        ({"delta": 0.1, "num_rows": None}, []),  # n is private
        ({"eps": float("inf"), "delta": 0.1}, []),  # there is no guarantee to be cautious of
    ],
)
@pytest.mark.parametrize("report", ["replace_one"], indirect=True)
def test_a_guarantee_that_promises_little_says_so(report, numbers, says):
    found = dataclasses.replace(report, **numbers)
    assert len(found.cautions) == len(says)
    for caution, part in zip(found.cautions, says, strict=True):
        assert caution.startswith(part)
    for text in (found.brief(), str(found)):
        assert text.count("\n  but  ") == len(says)


@pytest.mark.parametrize("report", ["replace_one"], indirect=True)
def test_after_each_run_the_main_lines_are_read(report):
    brief, text = report.brief(), str(report)
    first, *lines = brief.splitlines()
    assert first == "Privacy of this DPPenalty run; print(mcmc.privacy) says more"
    assert set(lines) < set(text.splitlines())
    shown = [line.split()[0] for line in lines if line[2] != " "]
    assert shown == ["guarantee", "spent", "private", "public", "verdict"]


@pytest.fixture(
    scope="module",
    params=some_every_day(["replace_one", "add_or_remove_one", "zero_out", "inf"], ["add_or_remove_one", "inf"]),
)
def report(request):
    options = {"eps": 1.0, "neighboring_relation": request.param, "delta": 1e-4}
    options = {"eps": float("inf")} if request.param == "inf" else options
    kernel = DPPenalty(model, prepare=False, clip_ratio=1.0, step_size=0.1, row_plate="rows", **options)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=4, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mcmc.run(jax.random.key(0), np.linspace(-1, 1, 50).astype(np.float32))
    return mcmc.privacy


def test_a_paragraph_for_a_paper_says_what_the_report_says(report):
    text = report.methods()
    assert "\n" not in text
    if not report.private:
        assert "without differential privacy" in text
        return
    for words in (
        report.guarantee(),
        report.kernel,
        report.noise,
        report.posterior.description,
        f"{round_up(report.rho, 4)}-zero",
    ):
        assert words in text
    assert ("n = 50" in text) == (report.num_rows is not None)
    assert "do not vouch" in text  # five iterations
    named = {"replace_one": "replaced by another", "add_or_remove_one": "added or removed", "zero_out": "for nothing"}
    assert [word in text for word in named.values()] == [name == report.neighboring_relation for name in named]


REGISTRY = {
    "basic": "name data_curators intended_use data_product_type data_product_region description publication_date "
    "data_product_sector",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters privacy_parameters_details",
    "deployment_model": "model_name model_name_details actors release_type release_type_details data_source_type "
    "data_source_type_details access_type access_type_details",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms justification",
    "administrative": "sources notes registry_authors",
}
"""Sections and fields of entries in the registry's repository, July 2026; no others are allowed."""

TOLD = {
    "name": "Visits to a doctor",
    "data_curators": ["A statistics office"],
    "intended_use": "Planning",
    "data_product_region": "Finland",
    "publication_date": "2026-11-29",
    "registry_authors": ["A statistician"],
    "url_slug": "visits-2026",
}


def test_an_entry_for_the_registry_has_its_fields(report):
    found = json.loads(json.dumps(report.to_registry(**TOLD)))
    assert sorted(found) == ["deployment", "status", "tier", "url_slug"]
    entry = found["deployment"]
    for section, fields in entry.items():
        assert set(fields) <= set(REGISTRY[section].split())
        lists = {"data_curators", "registry_authors", "privacy_parameters"}
        assert all(isinstance(value, str) for name, value in fields.items() if name not in lists)
    assert {name: (entry["basic"] | entry["administrative"] | found)[name] for name in TOLD} == TOLD
    assert ("privacy_loss" in entry) == ("dp_variant" in entry) == report.private
    if report.private:
        assert entry["privacy_loss"]["privacy_parameters"] == {"epsilon": report.eps, "delta": report.delta}
        assert entry["privacy_loss"]["privacy_unit"] == report.unit
        assert report.neighboring_relation.replace("_", "-") in entry["privacy_loss"]["privacy_unit_details"]
        assert ("private" in entry["dp_variant"]["unprotected_quantities"]) == (report.num_rows is None)
    assert all(f"- {kind}: " in entry["implementation"]["mechanisms"] for kind in report.releases)
    assert "do not vouch" in entry["basic"]["description"]  # five iterations


@pytest.mark.filterwarnings("ignore:the posterior")
def test_further_arguments_of_a_later_run_are_listed_too():
    """Whatever was taken for public, in whichever run, is the user's part of the guarantee."""

    def with_table(y, table=None):
        mu = numpyro.sample("mu", dist.Normal(0 if table is None else jnp.mean(table), 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    y = np.linspace(-1, 1, 50).astype(np.float32)
    kernel = DPPenalty(with_table, eps=1.0, prepare=False, clip_ratio=1.0, step_size=0.1, num_iterations=20)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), y)
    assert mcmc.privacy.public_arguments == ()
    mcmc.run(jax.random.key(0), y, table=np.ones(7))
    mcmc.run(jax.random.key(0), y)
    assert mcmc.privacy.public_arguments == ("table (7,)",)
    assert mcmc.privacy.private_arguments == ("y (50,)",)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_owners_in_processes_of_their_own_are_a_federation(elsewhere):
    y = np.linspace(-1, 1, 50).astype(np.float32)
    owners = LocalExchange.group(1)[0] if elsewhere else np.zeros(len(y), int)
    kernel = DPPenalty(model, eps=1.0, delta=1e-3, prepare=False, owners=owners, num_iterations=5)
    kernel.init(jax.random.key(0), 0, None, (y,), {})
    entry = kernel.privacy.to_registry()["deployment"]["deployment_model"]
    assert entry["model_name"] == ("Federated" if elsewhere else "Central")


@pytest.mark.parametrize("report", ["replace_one"], indirect=True)
def test_of_an_entry_the_curator_is_not_made_up(report):
    entry = report.to_registry()
    assert entry["url_slug"] is None
    empty = [name for name, value in entry["deployment"]["basic"].items() if value is None]
    assert empty == ["name", "data_curators", "intended_use", "data_product_region", "publication_date"]
    with pytest.raises(TypeError, match="an entry has no curator; of the curator are name, data_curators"):
        report.to_registry(curator="me")


def test_a_label_says_what_the_report_says_within_its_frame(report):
    plt = pytest.importorskip("matplotlib.pyplot")
    long = dataclasses.replace(report, public_arguments=tuple(f"argument_{k} (500, 3)" for k in range(30)))
    for of in (report, long):
        axes = plot_label(of)
        shown = " ".join(text.get_text().replace("\n", " ") for text in axes.texts)
        if not report.private:
            assert "not private" in shown
        else:
            assert f"eps {report.eps:g}, delta {report.delta:g}" in shown
            assert report.unit in shown
            assert ("their number, 50, is public" in shown) == (report.num_rows is not None)
            assert ("Vouched for by released numbers yes" in shown) == report.posterior.trusted
        axes.figure.canvas.draw()
        frame = axes.get_window_extent()
        for text in axes.texts:
            place = text.get_window_extent()
            assert frame.x0 < place.x0, text
            assert place.x1 < frame.x1, text
        plt.close(axes.figure)


def test_a_label_for_a_page_says_what_the_picture_says(report):
    names = dataclasses.replace(report, public_arguments=("a<b>",))
    page = names.label_html()
    for name, fact in label(names, version("numpyro_dp")):
        assert html.escape(name) in page
        assert html.escape(fact) in page
    assert "a<b>" not in page
    assert [page.count(f"<{tag}") for tag in ("div", "table", "tr>")] == [1, 1, len(label(names, "")) - 1]


def test_a_plan_in_a_notebook():
    found = plan(n=1000, d=2, eps=1.0)
    assert found._repr_html_().startswith("<pre>1,000 rows, 2 parameters")
