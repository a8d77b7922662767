"""Formulas on tables that are read in pieces: rows are coded as those of a table in memory are."""

import datetime
import pickle

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.tables import in_pieces
from numpyro.diagnostics import effective_sample_size

from numpyro_dp import FormulaModel, glm, scan

N = 500
FORMULA = "visits ~ bs(age, df=4) + C(sex) + since + (1 + age | clinic)"
PUBLIC = {
    "ranges": {"age": (0, 100), "years": (0.1, 3), "since": ("2020-01-01", "2020-12-31")},
    "levels": {"sex": ["f", "m"], "clinic": ["north", "south", "west"]},
    "offset": "log(years)",
}


def people():
    rng = np.random.default_rng(0)
    ages, sexes = rng.uniform(20, 80, N), rng.choice(["f", "m"], N)
    clinics = rng.choice(["north", "south", "west"], N)
    table = pd.DataFrame({"age": ages, "sex": sexes, "clinic": clinics, "years": rng.uniform(0.5, 2, N)})
    days = [datetime.date(2020, 1, 1) + datetime.timedelta(int(k)) for k in rng.integers(0, 360, N)]
    table["since"] = pd.Series(days, dtype=object)
    table["visits"] = rng.poisson(2, N)
    table.loc[5, "age"] = np.nan
    table.loc[6, "sex"], table.loc[7, "sex"] = None, "neither"
    table.loc[8, "since"], table.loc[9, "age"] = None, 1e30
    return table


def values_of(arguments):
    """What the model gets of each piece."""
    columns = [value.spec for value in arguments.values()]
    table = next(iter(arguments.values())).table
    columns = pickle.loads(pickle.dumps(columns))  # as they travel
    read = [part for piece in table._pieces for part in piece.read(columns)]
    assert all(counts.all() for _, counts in read)
    return {name: np.concatenate([arrays[k] for arrays, _ in read]) for k, name in enumerate(arguments)}


def as_they_are(table, folder):
    return table


def with_codes(table, folder):
    sex, clinic = (table.schema.get_field_index(name) for name in ("sex", "clinic"))
    table = table.set_column(sex, "sex", table["sex"].dictionary_encode())
    return table.set_column(clinic, "clinic", table["clinic"].cast(pa.large_string()))


def in_files(table, folder):
    for name, part in (("a", table.slice(0, 170)), ("b", table.slice(170))):
        pq.write_table(part, folder / f"{name}.parquet", row_group_size=64)
    return folder


@pytest.mark.parametrize("made", [as_they_are, with_codes, in_files])
def test_rows_are_coded_as_those_of_a_table_in_memory(made, tmp_path):
    model = FormulaModel(FORMULA, "poisson", **PUBLIC)
    expected = model.arguments(people())
    table = made(pa.Table.from_pandas(people(), preserve_index=False), tmp_path)
    found = model.arguments(in_pieces(table, (1, 64, 70)) if made is not in_files else scan(str(table)))
    assert {name: (value.shape, value.dtype) for name, value in found.items()} == {
        name: (value.shape, value.dtype) for name, value in expected.items()
    }
    values = values_of(found)
    for name, value in expected.items():
        np.testing.assert_array_equal(values[name], value, err_msg=name)
    assert not expected["observed"][[5, 6, 8]].any()


@pytest.mark.parametrize("with_missing", [False, True])
def test_codes_of_few_bits_may_be_as_many_as_they_can_count(with_missing):
    """128 values fill codes of 8 bits: none is left for a missing one. Chunks may have codes of their own."""
    levels = [f"g{k:03d}" for k in range(128)]
    codes = pa.array([*range(128), None if with_missing else 0], pa.int8())
    column = pa.DictionaryArray.from_arrays(codes, levels)
    other = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), ["g005", "g007"])
    chunked = pa.chunked_array([column, other.cast(column.type)])
    table = pa.table({"g": chunked, "visits": pa.array(np.ones(131, np.int64))})
    model = FormulaModel("visits ~ 1 + (1 | g)", "poisson", levels={"g": levels})
    expected = [*range(128), 0, 7, 5]
    for arguments in (model.arguments(table), values_of(model.arguments(scan(table)))):
        assert arguments["g"].tolist() == expected
        assert arguments["observed"].tolist() == [*[True] * 128, not with_missing, True, True]
    assert model.arguments(table.slice(0, 0))["g"].shape == (0,)


def test_a_frame_may_have_a_column_of_any_name():
    """One called as the method that tells a scan from a frame."""
    table = people().assign(computed=1.0)
    model = FormulaModel("visits ~ computed + age", "poisson", ranges={"computed": (0, 2), **PUBLIC["ranges"]})
    np.testing.assert_array_equal(model.arguments(table)["X"], values_of(model.arguments(scan(table)))["X"])


def test_an_argument_is_the_same_object_each_time():
    model, table = FormulaModel(FORMULA, "poisson", **PUBLIC), scan(people())
    first, second = model.arguments(table), model.arguments(table)
    assert all(first[name] is second[name] for name in first)
    other = FormulaModel(FORMULA, "poisson", **PUBLIC).arguments(table)
    assert not any(first[name] is other[name] for name in first)


@pytest.mark.parametrize("formula", ["visits ~ age + (1 | person)", "visits ~ age"])
def test_whose_a_row_is_may_be_told_by_a_column(formula):
    table = people()[["age", "visits"]]
    table["person"] = [f"p{k // 2:03d}" for k in range(N)]
    model = FormulaModel(formula, "poisson", ranges=PUBLIC["ranges"], unit="person")
    expected, found = model.arguments(table), model.arguments(scan(table))
    assert found.keys() == expected.keys()
    assert found["person"] is found["X"].table.unit("person")
    assert found.get("num_units") == expected.get("num_units")
    by_unit = found["X"].table.by_unit(found["person"], None)
    specs = [found[name].spec for name in ("X", "person")]
    read = [part for piece in by_unit._pieces for part in piece.read(specs)]
    assert by_unit.num_rows == N // 2
    np.testing.assert_array_equal(np.concatenate([arrays[0] for arrays, _ in read]).reshape(N, -1), expected["X"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda table: table.drop(columns="age"), "the data have no column 'age'"),
        (lambda table: table.drop(columns="visits"), "the data have no column 'visits'"),
        (lambda table: table.astype({"visits": str}), "the outcome 'visits' is a column of texts"),
    ],
)
def test_what_a_table_lacks_is_said_before_it_is_read(change, says):
    with pytest.raises(ValueError, match=says):
        FormulaModel(FORMULA, "poisson", **PUBLIC).arguments(scan(change(people())))


@pytest.mark.nightly
def test_glm_on_a_table_in_pieces_gives_what_it_gives_on_a_frame():
    rng = np.random.default_rng(1)
    n = 20_000
    table = pd.DataFrame({"age": rng.uniform(20, 80, n), "sex": rng.choice(["f", "m"], n)})
    table["visits"] = rng.poisson(np.exp(0.01 * (table["age"] - 50) + 0.3 * (table["sex"] == "m")))
    public = {"ranges": {"age": (0, 100)}, "levels": {"sex": ["f", "m"]}}
    options = {"eps": 100.0, "verbose": False, "progress_bar": False, "num_warmup": 200, "num_samples": 400}
    found = []
    for data in (table, scan(table)):
        mcmc = glm("visits ~ age + C(sex)", data, "poisson", **public, **options)
        found.append({name: np.asarray(values) for name, values in mcmc.get_samples().items()})
    for name, draws in found[0].items():
        # Of nearly the exact likelihood; each mean has its Monte Carlo error, and privacy's noise of less than as much.
        sizes = [effective_sample_size(each[name][None]) for each in found]
        error = draws.std(0) * np.sqrt(sum(2 / np.maximum(size, 1) for size in sizes))
        assert np.min(sizes) > 50, name
        assert np.all(np.abs(found[1][name].mean(0) - draws.mean(0)) < 6 * error), name
