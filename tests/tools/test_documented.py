"""Pages of the site whose code is a program: it runs, as it stands there, on tables that are made up here."""

import json
import re
import types
import warnings
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dp
from experiments import at_work
from numpyro_dp import DPHMC, MCMC, PosteriorWarning

DOCS = Path(__file__).resolve().parents[2] / "docs"


def cells_of(notebook):
    cells = json.loads((DOCS.parent / "notebooks" / notebook).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def code_of(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


def run(page, code, names, **other):
    """With other numbers in place of some keywords, for tables that are smaller than a reader's."""
    for keyword, value in other.items():
        code, times = re.subn(rf"\b{keyword}=[\d.]+", f"{keyword}={value}", code)
        assert times, f"{page}: no {keyword}="
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PosteriorWarning)
        exec(compile(code, page, "exec"), names)


QUICKLY = {"eps": 50.0, "num_warmup": 20, "num_samples": 30}


def names_for(**others):
    return {"__name__": "documented", "jax": jax, "jnp": jnp, "numpyro": numpyro, "dist": dist} | {
        "MCMC": MCMC,
        "DPHMC": DPHMC,
        **others,
    }


def logistic(X, y=None, person=None, num_persons=1):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    effect = 0.0
    if person is not None:
        with numpyro.plate("persons", num_persons):
            effect = numpyro.sample("u", dist.Normal(0, 1))[person]
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b + effect), obs=y)


def visits(n=2_000):
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (n, 2)).astype(np.float32)
    y = (rng.random(n) < 1 / (1 + np.exp(-X @ [1.0, -0.5]))).astype(np.int32)
    return X, y, np.arange(n) // 4


def moved(mcmc):
    draws = np.asarray(mcmc.get_samples()["b"])
    return bool((draws.std(0) > 0).all() and np.isfinite(draws).all())


@pytest.mark.statistical
@pytest.mark.filterwarnings("ignore")
def test_what_a_run_gives_for_nothing(capsys, monkeypatch):
    pytest.importorskip("arviz", minversion="1.0")
    plt = pytest.importorskip("matplotlib.pyplot")
    names = {"__name__": "documented"}
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    for code in cells_of("afterwards.ipynb"):
        run("afterwards.ipynb", code, names)
    assert list(names["arviz_says"]["diagnosis"]) == ["✓"] * 3
    assert names["factor"] > 5 * names["error"]
    assert "in favour of b[2] = 0" in capsys.readouterr().out
    found, released = names["combined"], names["draws"]["b"]
    # Both are about one release; a mixture over 20 synthetic tables has their sampling error beside.
    assert (abs(found.mean(0) - released.mean(0)) < 6 * found.std(0) / 20**0.5).all()


@pytest.mark.statistical
def test_a_regression_by_its_formula(capsys):
    """The model that the page shows is the one that is printed, word for word, and it is a program."""
    pytest.importorskip("formulaic")
    rng, n = np.random.default_rng(0), 3_000
    data = {"age": rng.uniform(0, 100, n), "sex": rng.choice(["f", "m"], n), "clinic": rng.integers(0, 8, n)}
    data["visits"] = rng.poisson(np.exp(0.3 + 0.01 * (data["age"] - 50)))
    call, model = code_of("formulas.md")
    names = names_for(data=data)
    run("formulas.md", call, names, eps=50.0)
    assert model.strip() in capsys.readouterr().out
    assert set(names["mcmc"].get_samples()) == {"Intercept", "age", "C(sex)[T.m]", "1|clinic_sigma", "1|clinic"}
    run("formulas.md", model, names)
    with numpyro.handlers.seed(rng_seed=0):
        names["model"](np.zeros((5, 2)), np.zeros(5, int))


def test_the_gallery_shows_the_pictures_that_there_are():
    shown = re.findall(r"_static/(gallery-.*?)\)", (DOCS / "gallery.md").read_text())
    assert sorted(shown) == sorted(path.name for path in (DOCS / "_static").glob("gallery-*"))
    assert len(shown) == len(code_of("gallery.md")) - 1  # the first block fits what is drawn


def test_each_sampler_has_a_picture_of_itself_at_work():
    page = (DOCS / "samplers-at-work.md").read_text()
    shown = re.findall(r"_static/(sampler-.*?)\)", page)
    assert shown == [at_work.picture(name) for name in at_work.SAMPLERS]
    assert sorted(shown) == sorted(path.name for path in (DOCS / "_static").glob("sampler-*"))
    kernels = {name for name in numpyro_dp.__all__ if name.startswith("DP")} - {"DPKernel", "DPState"}
    assert kernels == {name.split(",")[0] for name in at_work.SAMPLERS}


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_each_block_of_the_gallery_draws_a_picture(tmp_path, monkeypatch):
    plt = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "documented"}
    for place, code in enumerate(code_of("gallery.md")):
        less = {"repetitions": 2} if "repetitions" in code else {"trials": 100} if "trials" in code else {}
        run("gallery.md", code, names, **less)
        assert len(plt.get_fignums()) == (place > 0)
        plt.close("all")


@pytest.mark.nightly
def test_effects_of_persons():
    X, y, person = visits()
    names = names_for(X=X, y=y, person=person, num_persons=int(person[-1]) + 1)
    (code,) = code_of("models.md")
    run("models.md", code, names, **QUICKLY)
    assert moved(names["mcmc"])
    assert set(names["mcmc"].get_samples()) == {"b", "tau"}


@pytest.fixture(name="ages")
def _ages(tmp_path, monkeypatch):
    """Files of visits in the current folder; the ages in them."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    X, y, person = visits()
    columns = {"age": X[:, 0], "dose": X[:, 1], "events": y, "patient": [f"P{name:05}" for name in person]}
    (tmp_path / "visits").mkdir()
    parquet.write_table(pa.table(columns), tmp_path / "visits" / "all.parquet")
    monkeypatch.chdir(tmp_path)
    return X[:, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("unit", ["row", "person"])
def test_tables_larger_than_memory(unit, ages):
    names = names_for(model=logistic, ndp=numpyro_dp)
    if unit == "person":
        names["table"] = numpyro_dp.scan("visits/*.parquet")
    run("large-tables.md", code_of("large-tables.md")[unit == "person"], names, **QUICKLY)
    assert moved(names["mcmc"])


def test_an_engine_of_ones_own(ages):
    names = names_for(ray=_ray())
    run("large-tables.md", code_of("large-tables.md")[2], names)
    table = numpyro_dp.scan("visits/*.parquet", engine=names["OnRay"]())
    total = numpyro_dp.release_sum(lambda row: row, table["age"], bound=1.0, eps=50.0, delta=1e-6)
    assert abs(total.value - ages.sum()) < 7 * total.noise_sd


def _ray():
    """What the page uses of Ray, by threads."""
    threads = ThreadPoolExecutor(2)

    def first_of(waiting):
        done = next(iter(wait(waiting, return_when=FIRST_COMPLETED).done))
        return [done], [future for future in waiting if future is not done]

    return types.SimpleNamespace(
        remote=lambda f: types.SimpleNamespace(remote=lambda *args: threads.submit(f, *args)),
        put=lambda thing: thing,
        wait=first_of,
        get=lambda future: future.result(),
    )


@pytest.mark.nightly
def test_walks_on_several_devices():
    X, y, _ = visits()
    names = names_for(model=logistic, X=X, y=y)
    one_process, several = code_of("cluster.md")
    run("cluster.md", one_process, names, **QUICKLY)
    assert len(names["X"].devices()) == len(jax.devices()) > 1
    assert moved(names["mcmc"])
    compile(several, "cluster.md", "exec")  # runs in tests/privacy/test_sharding.py
