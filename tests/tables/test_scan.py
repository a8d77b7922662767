"""`scan`: files, frames, columns and units; what they are read as, what is refused, and the same numbers for all."""

import datetime
import decimal
import pickle

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from helpers.tables import N, arguments, draws, draws_of_the_whole, frame, in_pieces, model, write

from numpyro_dp import DPHMC, DPSGLD, MCMC, Preparation, PrivacyBudget, TableChangedError, release_sum, scan, to_arviz
from numpyro_dp.privacy import passes
from numpyro_dp.tables import pieces as pieces_module
from numpyro_dp.tables import scan as scan_module


def rows_of(column):
    """What a model would be given, and which rows count."""
    found = [part for piece in column.table._pieces for part in piece.read([column.spec])]
    return np.concatenate([arrays[0] for arrays, _ in found]), np.concatenate([counts for _, counts in found])


def some(**columns):
    return scan(pa.table(columns))


# -- Columns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (pa.array([1.5, 2.5], pa.float64()), "float32"),
        (pa.array(np.array([1.5, 2.5], np.float16)), "float16"),
        (pa.array([1, 2], pa.int64()), "int32"),
        (pa.array([1, 2], pa.int8()), "int8"),
        (pa.array([1, 2], pa.uint8()), "uint8"),
        (pa.array([True, False]), "bool"),
        (pa.array([1, 2]).cast(pa.decimal128(25, 2)), "float32"),
        (pa.array([1.0, 2.0]).dictionary_encode(), "float32"),
    ],
    ids=str,
)
def test_numbers_are_those_of_the_table(values, dtype):
    column = some(x=values)["x"]
    found, counts = rows_of(column)
    expected = np.asarray([float(value.as_py()) for value in values])
    np.testing.assert_array_equal(found.astype(float), expected)
    assert (str(found.dtype), str(column.dtype), column.shape) == (dtype, dtype, (2,))
    assert counts.all()


def test_columns_side_by_side():
    column = some(a=[1.0, 2.0], b=[3, 4])[["b", "a"]]
    found, _ = rows_of(column)
    np.testing.assert_array_equal(found, [[3, 1], [4, 2]])
    assert (column.shape, column.dtype) == ((2, 2), np.float32)


def test_missing_values():
    table = some(x=pa.array([1.0, None, float("nan")]), k=pa.array([None, 2, 3], pa.int32()))
    assert rows_of(table["x"])[1].tolist() == [True, False, True]  # NaN is a number that says nothing
    np.testing.assert_array_equal(rows_of(table["x"].fill(7.0))[0], [1, 7, 7])
    assert rows_of(table["x"].fill(7.0))[1].all()
    # What is there, but is no level or does not fit, is not filled: `is_missing` would not say so.
    values, counts = rows_of(some(sex=["m", None, "x"])["sex"].levels(["m", "f"]).fill(1))
    assert (values.tolist()[:2], counts.tolist()) == ([0, 1], [True, True, False])
    assert rows_of(some(k=pa.array([2**40, None, 3]))["k"].fill(5))[1].tolist() == [False, True, True]
    np.testing.assert_array_equal(rows_of(table["x"].is_missing())[0], [False, True, True])
    np.testing.assert_array_equal(rows_of(table["k"])[1], [False, True, True])
    np.testing.assert_array_equal(rows_of(table["k"].fill(-1))[0], [-1, 2, 3])
    assert rows_of(table[["x", "k"]])[1].tolist() == [False, False, True]
    with pytest.raises(ValueError, match=r"0\.5 cannot stand in a column of int32"):
        table["k"].fill(0.5)


@pytest.mark.parametrize("encode", [lambda x: x, lambda x: x.dictionary_encode(), lambda x: x.cast(pa.large_string())])
def test_levels_are_public_and_others_say_nothing(encode):
    table = some(sex=encode(pa.array(["m", "f", "x", None])))
    codes, counts = rows_of(table["sex"].levels(["f", "m"]))
    assert codes[:2].tolist() == [1, 0]
    assert counts.tolist() == [True, True, False, False]
    assert rows_of(table["sex"].is_missing())[0].tolist() == [False, False, False, True]


def test_levels_of_numbers_and_dates():
    table = some(k=[10, 20, 30], day=pa.array([0, 1, None], pa.date32()))
    assert rows_of(table["k"].levels([30, 10]))[0].tolist() == [1, 0, 0]
    days, counts = rows_of(table["day"].days_since("1969-12-31"))
    assert days[:2].tolist() == [1.0, 2.0]
    assert counts.tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda t: t["nothing"], KeyError, "no column 'nothing'; there are x, sex, day, l"),
        (lambda t: t[["x", "sex"]], ValueError, r"'sex' holds texts.*levels\(\['a', 'b'\]\)"),
        (lambda t: t[["x", "day"]], ValueError, "days_since"),
        (lambda t: t[["x", "l"]], ValueError, "of which a model can make nothing"),
        (lambda t: t["x"].levels(["a"]), ValueError, "holds double, of which"),
        (lambda t: t["x"].levels([1.0, 1.0]), ValueError, "some different values"),
        (lambda t: t["x"].levels([]), ValueError, "some different values"),
        (lambda t: t[["x", "x"]].levels([1.0]), ValueError, "one column at a time"),
        (lambda t: t["day"].days_since("yesterday"), ValueError, "yesterday"),
        (lambda t: t["x"].days_since("2020-01-01"), ValueError, "'x' holds double, and no dates"),
        (lambda t: np.asarray(t["x"]), TypeError, "private arguments"),
        (pickle.dumps, TypeError, "cannot be pickled"),
        (lambda t: t.unit("who"), KeyError, "no column 'who'"),
    ],
)
def test_what_a_column_cannot_be(ask, error, says):
    table = some(x=[1.0], sex=["m"], day=pa.array([0], pa.date32()), l=[[1, 2]])
    with pytest.raises(error, match=says):
        ask(table)


def test_a_column_is_the_same_object():
    """By which a kernel knows its table again."""
    table = in_pieces(frame(10))
    assert table["a"] is table["a"]
    assert table[["a", "c"]] is table[["a", "c"]]
    assert table["a"] is not table[["a"]]


# -- Files and frames --------------------------------------------------------------------------------------------------


def test_all_ways_to_open_a_table_give_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces_module, "_READ_ROWS", 700)
    monkeypatch.setattr(scan_module, "PIECE_ROWS", 800)
    table, expected = frame(), frame()["a"].to_numpy()
    pattern = write(tmp_path, row_group_size=300)
    pa.feather.write_feather(table, str(tmp_path / "t.arrow"))
    pa.csv.write_csv(table, str(tmp_path / "t.csv"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder)
    sources = {
        "pattern": pattern,
        "folder": str(folder),
        "list": sorted(tmp_path.glob("*.parquet")),
        "arrow": tmp_path / "t.arrow",
        "csv": tmp_path / "t.csv",
        "pandas": table.to_pandas(),
        "pyarrow": table,
        "dataset": pa.dataset.dataset(str(folder)),
    }
    for name, source in sources.items():
        opened = scan(source)
        assert len(opened) == opened.num_rows == N, name
        assert opened.column_names == ["a", "c", "y"], name
        np.testing.assert_allclose(rows_of(opened["a"])[0], expected, rtol=1e-6, err_msg=name)
    assert len(scan(pattern)._pieces) == 6  # of groups of rows
    assert "3,000 rows in 6 piece(s)" in repr(scan(pattern))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.drop_columns(["c"]), "has no column 'c'"),
        (lambda t: t.set_column(1, "c", t["c"].cast(pa.float64())), "'c' of '.*1.parquet' is of type double"),
    ],
)
def test_files_that_do_not_belong_together(tmp_path, change, says):
    pq.write_table(frame(10), tmp_path / "0.parquet")
    pq.write_table(change(frame(10)), tmp_path / "1.parquet")
    with pytest.raises(ValueError, match=says):
        scan(str(tmp_path / "*.parquet"))


def test_an_empty_file_has_no_rows(tmp_path):
    pq.write_table(frame(10), tmp_path / "0.parquet")
    pq.write_table(frame(10).slice(0, 0), tmp_path / "1.parquet")
    assert len(scan(str(tmp_path))) == 10
    (tmp_path / "0.parquet").unlink()
    assert len(scan(str(tmp_path))) == 0


def test_what_is_no_table(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no files are found by .*parquet"):
        scan(str(tmp_path / "*.parquet"))
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "b.csv").write_bytes(b"")
    with pytest.raises(ValueError, match="must all be Parquet, Arrow or CSV"):
        scan(str(tmp_path))
    with pytest.raises(TypeError, match="got int"):
        scan(3)
    with pytest.raises(TypeError, match="engine must be a Dask client"):
        scan(frame(3), engine=3)


def test_no_file_is_read_twice(tmp_path):
    """Its rows would count twice, which no clip bounds."""
    pattern = write(tmp_path)
    first = str(tmp_path / "0.parquet")
    (tmp_path / "link.parquet").symlink_to(first)
    for source in ([first, first], [first, str(tmp_path)], pa.dataset.dataset([first, first]), str(tmp_path), pattern):
        with pytest.raises(ValueError, match=r"0\.parquet would be read more than once"):
            scan(source)
    (tmp_path / "link.parquet").unlink()
    for hidden in ("_temporary", ".checkpoints"):
        (tmp_path / hidden).mkdir()
        pq.write_table(frame(5), tmp_path / hidden / "0.parquet")
    assert len(scan(str(tmp_path))) == N


def test_names_with_marks_of_patterns(tmp_path):
    pq.write_table(frame(5), tmp_path / "a[1].parquet")
    assert len(scan(tmp_path / "a[1].parquet")) == 5


def test_whole_numbers_that_do_not_fit_count_as_missing():
    values, counts = rows_of(some(k=pa.array([2**32 + 5, 7, None, -(2**40)]))["k"])
    assert counts.tolist() == [False, True, False, False]
    assert values[1] == 7
    columns = pa.table({"u": pa.array([3_000_000_000, 7], pa.uint32()), "i": pa.array([1, 2], pa.int32())})
    _, counts = rows_of(in_pieces(columns)[["u", "i"]])  # of one type, into which the first one does not fit
    assert counts.tolist() == [False, True]


def test_texts_that_nobody_has_named_say_what_to_do():
    table = some(sex=["m", "f"], a=[1.0, 2.0], y=[0.0, 1.0])
    mcmc = MCMC(DPHMC(model, eps=3.0), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match=r"holds texts.*levels"):
        mcmc.run(jax.random.key(0), table["sex"], y=table["y"])


CELLS = ["5", "5.5", "abc", "", "NA", "16777217", "1e999", "true", "2020-02-30", '"1,2"', '"a\nb"', "\udcff", " 7 "]


@pytest.mark.parametrize("opened", ["csv", "objects"])
def test_no_cell_decides_how_others_are_read(opened, tmp_path):
    """Of a CSV file, and of a column of Python's objects: readers take a type from all of the values."""
    others = ["7", "", "16777217", "2020-01-03", "NA", "3.25", "x"]

    def table_of(cell):
        cells = [cell, *others]
        if opened == "csv":
            (tmp_path / "t.csv").write_bytes("\n".join(["v", *cells, ""]).encode(errors="surrogateescape"))
            return scan(tmp_path / "t.csv")
        values = {
            "5": 5,
            "5.5": 5.5,
            "": None,
            "NA": np.nan,
            "16777217": 16777217,
            "true": True,
            "2020-01-03": datetime.date(2020, 1, 3),
        }
        column = pd.Series([values.get(c, c) for c in cells], index=range(9, 9 + len(cells)), dtype=object)
        return scan(pd.DataFrame({"v": column}))

    for cell in CELLS:
        table = table_of(cell)
        assert len(table) == 1 + len(others), cell
        values, counts = rows_of(table["v"])
        np.testing.assert_array_equal(counts[1:], [True, False, True, False, False, True, False], cell)
        np.testing.assert_array_equal(values[1:][counts[1:]], np.float32([7, 16777217, 3.25]), cell)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(rows_of(table["v"].is_missing())[0][1:], [0, 1, 0, 0, 1, 0, 0], cell)
        assert rows_of(table["v"].levels([3.25, 7]))[1][1:].tolist() == [True, *[False] * 4, True, False], cell
        assert rows_of(table["v"].levels(["x", "y"]))[1][1:].tolist() == [*[False] * 6, True], cell
        days, counts = rows_of(table["v"].days_since("2020-01-01"))
        assert counts[1:].tolist() == [False, False, False, True, False, False, False], cell
        assert days[4] == 2
    expected = [5, 5.5, None, None, None, 16777216, np.inf, 1, None, None, None, None, 7]
    for cell, value in zip(CELLS, expected, strict=True):
        values, counts = rows_of(table_of(cell)["v"])
        assert counts[0] == (value is not None), cell
        assert value is None or values[0] == value, cell


def test_no_object_of_a_column_is_an_error():
    far = datetime.datetime(1, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(hours=5)))
    objects = [decimal.Decimal("1.5"), 10**5000, far, pd.NaT, pd.NA, b"x", object(), "7", np.float32(2.5)]
    table = scan(pd.DataFrame({"v": pd.Series(objects, dtype=object)}))
    values, counts = rows_of(table["v"])
    assert counts.tolist() == [True, *[False] * 6, True, True]
    assert values[counts].tolist() == [1.5, 7.0, 2.5]
    assert rows_of(table["v"].is_missing())[0].tolist() == [False, *[True] * 6, False, False]


def test_ids_in_a_csv_file_are_in_the_order_of_texts_or_of_numbers(tmp_path):
    for ids, count in (([8, 9, 9, 10], 3), ([1, 10, 10, 9], 3), (["a", "a", "b"], 2)):
        (tmp_path / "t.csv").write_text("\n".join(["person", *map(str, ids), ""]))
        table = scan(tmp_path / "t.csv")
        assert table.unit("person").num_units == count
    (tmp_path / "t.csv").write_text("person\n9\n10\n9\n")
    with pytest.raises(ValueError, match="is not sorted"):
        assert scan(tmp_path / "t.csv").unit("person").num_units


def test_a_row_of_which_a_library_can_make_nothing_counts_for_nothing():
    """NumPy raises an error where the difference of two times is too large."""
    now = 1_600_000_000_000_000
    times = pa.array([now, -(2**63) + 1, 2**63 - 1, now, None], pa.timestamp("us"))
    days, counts = rows_of(some(day=times)["day"].days_since("2020-01-01"))
    np.testing.assert_array_equal(counts, [True, True, True, True, False])
    np.testing.assert_array_equal(days[[0, 3]], np.float32(now / 86_400e6 - 18_262))

    def fails_at_13(batch):
        values = batch.column("x").to_numpy()
        if 13 in values:
            raise RuntimeError("13")
        return {"double": 2 * values}

    table = scan(pa.table({"x": np.arange(50)}))
    column = table.computed(["x"], fails_at_13, {"double": np.zeros(1, np.int64)})["double"]
    values, counts = rows_of(column)
    np.testing.assert_array_equal(np.flatnonzero(~counts), [13])
    np.testing.assert_array_equal(values, np.where(np.arange(50) == 13, 0, 2 * np.arange(50)))

    def fails_always(batch):
        raise RuntimeError("a mistake")

    column = table.computed(["x"], fails_always, {"double": np.zeros(1, np.int64)})["double"]
    with pytest.raises(RuntimeError, match="a mistake"):
        rows_of(column)


def test_an_error_quotes_no_value(tmp_path):
    """What PyArrow says of a file that it cannot read may."""
    pq.write_table(frame(10), tmp_path / "t.parquet")
    table = scan(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"secret")
    with pytest.raises(TableChangedError, match="cannot be read as a table of the columns a") as found:
        rows_of(table["a"])
    assert "secret" not in str(found.value)
    assert found.value.__suppress_context__
    (tmp_path / "long.csv").write_text("a,c,y\n" + "1.5,2.5,3.5\n" * 200_000 + "secret,2\n")
    with pytest.raises(ValueError, match=r"the rows of .*long.csv' cannot be counted") as found:
        scan(tmp_path / "long.csv")
    assert "secret" not in str(found.value)
    (tmp_path / "bad.csv").write_text("a,c\n1,2\n3,secret,4\n")
    with pytest.raises(ValueError, match="cannot be read as csv") as found:
        scan(tmp_path / "bad.csv")
    assert "secret" not in str(found.value)


@pytest.mark.filterwarnings("ignore:a new privacy budget was made")
def test_a_file_that_changes_is_noticed_and_the_charge_stays(tmp_path, monkeypatch):
    pattern = write(tmp_path)
    budget = PrivacyBudget(tmp_path / "budget", eps=3.0, delta=1e-5)
    passes = []

    def changing(self, task, pieces):
        passes.append(task)
        if len(passes) == 3:
            pq.write_table(frame(4), tmp_path / "1.parquet")
        return list(map(task, pieces))

    monkeypatch.setattr(scan_module.engine_of(None).__class__, "run", changing)
    table = scan(pattern)
    with pytest.raises((TableChangedError, ValueError), match="has changed"):
        draws(table, kernel=DPHMC(model, eps=3.0, delta=1e-6, budget=budget))
    assert len(passes) == 3
    assert 0 < budget.eps_left < 2.0  # of what the preparation got to
    with pytest.raises(TableChangedError, match=r"1\.parquet changed since the table was opened"):
        list(table.run(lambda piece: None))


# -- Runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(request):
    return draws_of_the_whole(request.node.get_closest_marker("optimized") is not None)


@pytest.mark.statistical
def test_files_and_pieces_do_not_matter(tmp_path, whole):
    """Bit by bit, with the same noise: rows have numbers, by which outcomes are drawn for centring."""
    np.testing.assert_array_equal(draws(scan(write(tmp_path, row_group_size=400))), whole)
    np.testing.assert_array_equal(draws(in_pieces(frame(), (1, 64, 2999))), whole)


@pytest.mark.statistical
def test_nothing_depends_on_rows_but_sums(monkeypatch, capsys, recwarn):
    """With sums that are constants, all that a run says and hands out is the same for any table of as many rows."""

    def constants(parts, num_rows):
        totals = add_up(parts, num_rows)
        return [np.full_like(total, 2**22) for total in totals]

    add_up = passes._add_up
    monkeypatch.setattr(passes, "_add_up", constants)
    rng = np.random.default_rng(5)
    hostile = {name: rng.choice([np.nan, np.inf, -1e30, 1e30, 0.0, None], 300).tolist() for name in ("a", "c", "y")}
    found = []
    for table in (frame(300), pa.table({name: pa.array(x, pa.float32()) for name, x in hostile.items()})):
        kernel = DPHMC(model, eps=3.0, noise_seed=1, prepare=Preparation(force=True))
        said: list[str] = []
        kernel.announce = said.append
        values = draws(in_pieces(table, (7, 100)), kernel=kernel)
        warned = [str(w.message) for w in recwarn.list]
        recwarn.clear()
        found.append((values.tobytes(), str(kernel.privacy), said, warned, capsys.readouterr()))
    assert found[0] == found[1]
    assert len(found[0][2]) > 5


@pytest.mark.statistical
def test_other_rows_give_other_numbers(whole):
    changed = frame().to_pandas()
    changed.loc[5, "y"] = 1e30
    assert not np.array_equal(draws(in_pieces(pa.Table.from_pandas(changed))), whole)


@pytest.mark.statistical
def test_the_posterior_is_that_of_the_table_in_memory(whole):
    """With noise of its own; a posterior standard deviation is .02."""
    table = frame()
    mcmc = MCMC(DPHMC(model, eps=3.0), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(jax.random.key(0), np.stack([table["a"], table["c"]], 1), y=table["y"].to_numpy())
    np.testing.assert_allclose(whole.mean(0), [1.0, -0.5], atol=0.2)
    np.testing.assert_allclose(np.asarray(mcmc.get_samples()["b"]).mean(0), whole.mean(0), atol=0.2)


@pytest.mark.filterwarnings("ignore:the posterior may be off")  # of so few draws
def test_results_hold_no_table(capsys):
    table = in_pieces(frame())
    mcmc = MCMC(DPHMC(model, eps=3.0), num_warmup=20, num_samples=20)
    mcmc.run(jax.random.key(0), **arguments(table))
    mcmc.print_summary()
    assert "X (3000, 2), y (3000,)" in capsys.readouterr().out
    assert not table.progress_bar  # it was shown for the run only
    written = pickle.dumps(mcmc)
    assert frame()["a"].to_numpy()[:2].tobytes() not in written
    assert to_arviz(mcmc)["posterior"]["b"].shape == (1, 20, 2)
    assert mcmc._args == ()


@pytest.mark.parametrize("relation", ["add_or_remove_one", "zero_out"])
@pytest.mark.statistical
def test_other_relations(relation):
    options = {"delta": 1e-5} if relation == "add_or_remove_one" else {}
    found = draws(in_pieces(frame(), (100,)), neighboring_relation=relation, **options)
    np.testing.assert_allclose(found.mean(0), [1.0, -0.5], atol=0.3)


@pytest.mark.parametrize(
    ("kernel", "options", "says"),
    [
        (lambda: DPHMC(model, eps=3.0, prepare=False, clip_grad=1.0, clip_ratio=1.0, step_size=1e-3), {}, "iteration"),
        (lambda: DPSGLD(model, eps=3.0, clip_grad=1.0, step_size=1e-6), {}, "each iteration"),
        (lambda: DPHMC(model, eps=3.0), {"jit_model_args": True}, "jit_model_args"),
        (lambda: DPHMC(model, eps=3.0, private_args=["y"]), {}, "private"),
    ],
)
def test_what_cannot_be_asked_of_a_table_in_pieces(kernel, options, says):
    mcmc = MCMC(kernel(), num_warmup=2, num_samples=2, progress_bar=False, **options)
    with pytest.raises((TypeError, ValueError), match=says):
        mcmc.run(jax.random.key(0), **arguments(in_pieces(frame())))


def test_arrays_beside_columns():
    table = in_pieces(frame())
    mcmc = MCMC(DPHMC(model, eps=3.0), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match=r"'y' is an array of rows, beside columns of a scan \('X'\)"):
        mcmc.run(jax.random.key(0), table[["a", "c"]], y=frame()["y"].to_numpy())


def test_one_more_sum():
    table, y = in_pieces(frame(), (7,)), frame()["y"].to_numpy()
    found = release_sum(lambda y, X: (y > 0) + 0.0 * X[0], (table["y"], table[["a", "c"]]), bound=1.0, eps=1.0)
    assert abs(found.value - (y > 0).sum()) < 8 * found.noise_sd
    with pytest.raises(ValueError, match="1 array"):
        release_sum(lambda y, x: y, (table["y"], y), bound=1.0, eps=1.0)


# -- Units -------------------------------------------------------------------------------------------------------------


def persons_with_slopes(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("visits", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def visits(X, person, num_persons, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("persons", num_persons):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with numpyro.plate("visits", X.shape[0]):
        numpyro.sample("y", dist.Normal(u[person] + X @ b, 1.0), obs=y)


def table_of_visits(persons=400):
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 5, persons)
    person = np.repeat(np.arange(persons), sizes)
    table = frame(len(person)).append_column("who", pa.array([f"p{k:04d}" for k in person]))
    return table, person, persons


def draws_of_visits(X, person, num_persons, y, **options):
    kernel = DPHMC(visits, eps=3.0, unit="person", noise_seed=1, **options)
    mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
    mcmc.run(jax.random.key(0), X, person, num_persons, y=y)
    return np.asarray(mcmc.get_samples()["b"]), str(mcmc.privacy)


def streamed_visits(table, cuts=(), **options):
    table = in_pieces(table, cuts)
    who = table.unit("who")
    return draws_of_visits(table[["a", "c"]], who, who.num_units, table["y"], **options)


CUTS = (1, 2, 3, 4, 5, 6, 7, 100, 101, 500)


@pytest.mark.statistical
def test_units_may_begin_and_end_in_any_piece():
    def found(cuts):
        kernel = DPHMC(persons_with_slopes, eps=3.0, unit="who", noise_seed=1)
        return draws(in_pieces(table_of_visits()[0], cuts), kernel=kernel), str(kernel.privacy)

    (whole, report), (cut, _) = found(()), found(CUTS)
    np.testing.assert_array_equal(cut, whole)
    np.testing.assert_allclose(whole.mean(0), [1.0, -0.5], atol=0.5)
    assert "one unit 'who' with all of its rows (400 units, with up to 4 rows each)" in " ".join(report.split())


@pytest.mark.nightly
def test_latents_of_units_that_begin_and_end_in_any_piece():
    (whole, _), (cut, _) = (streamed_visits(table_of_visits()[0], cuts) for cuts in ((), CUTS))
    np.testing.assert_array_equal(cut, whole)


def test_rows_of_units_are_those_of_the_table_in_memory(monkeypatch):
    """Each unit's rows, in their order, and which of its places are rows."""
    monkeypatch.setattr("numpyro_dp.tables.groups._ROWS_AT_ONCE", 37)
    table, person, persons = table_of_visits()
    opened = in_pieces(table, (3, 4, 50, 333))
    units = opened.by_unit(opened.unit("who"), None)
    assert (units.num_rows, units.most_rows, units.num_table_rows) == (persons, 4, len(person))
    specs = [units.of_units(opened["a"]).spec, units.present.spec, units.of_units(opened.unit("who")).spec]
    found = [arrays for piece in units._pieces for arrays, _ in piece.read(specs)]
    values, present, number = (np.concatenate(parts) for parts in zip(*found, strict=True))
    for k in range(persons):
        np.testing.assert_array_equal(values[k][present[k]], table["a"].to_numpy()[person == k])
        assert (number[k] == k).all()
    ends = [(piece.first, piece.num_rows) for piece in units._pieces]
    assert sum(rows for _, rows in ends) == persons
    assert [first for first, _ in ends] == np.cumsum([0, *(rows for _, rows in ends)])[:-1].tolist()


@pytest.mark.nightly
def test_a_private_number_of_rows_per_unit():
    """The same numbers as in memory: places are private, so nothing goes by them."""
    table, person, persons = table_of_visits()
    streamed, _ = streamed_visits(table, (77,), max_rows_per_unit=2)
    X = np.stack([table["a"], table["c"]], 1)
    in_memory, _ = draws_of_visits(X, person, persons, table["y"].to_numpy(), max_rows_per_unit=2)
    np.testing.assert_allclose(streamed, in_memory, rtol=1e-4)


def test_a_row_of_a_unit_with_a_missing_value_counts_for_nothing():
    table, *_ = table_of_visits(3)
    values = pa.array([None, *table["a"].to_pylist()[1:]], pa.float32())
    opened = in_pieces(table.set_column(0, "a", values))
    units = opened.by_unit(opened.unit("who"), None)
    ((_, present),) = [arrays for arrays, _ in units._pieces[0].read([opened["a"].spec, units.present.spec])]
    assert present.sum() == table.num_rows - 1
    assert not present[0][0]


def test_under_a_cap_a_unit_has_no_number():
    """It would be that of the units before it, of which one may be another in a neighbouring table."""
    table = in_pieces(table_of_visits(5)[0], (3,))
    who = table.unit("who")
    for most_rows, numbers in ((None, range(5)), (2, [0] * 5)):
        units = table.by_unit(who, most_rows)
        found = [arrays[0] for piece in units._pieces for arrays, _ in piece.read([who.spec])]
        assert np.concatenate(found)[:, 0].tolist() == list(numbers)

    def by_number(X, person, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("visits", X.shape[0]):
            numpyro.sample("y", dist.Normal(X @ b * (person % 2), 1.0), obs=y)

    kernel = DPHMC(by_number, eps=3.0, unit="person", max_rows_per_unit=2)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match="uses 'person' otherwise than to pick a latent"):
        mcmc.run(jax.random.key(0), table[["a", "c"]], who, y=table["y"])


def separate_visits(table, members=None, **options):
    opened = in_pieces(table)
    who = opened.unit("who")
    kernel = DPHMC(visits, eps=3.0, unit="person", **options)
    return kernel.separate((opened[["a", "c"]], who, members or who.num_units), {"y": opened["y"]}), opened.by_unit(
        who, None
    )


@pytest.mark.filterwarnings("ignore:the posterior may be off")  # of so few draws
@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        pytest.param({}, True, marks=pytest.mark.nightly),
        ({"neighboring_relation": "add_or_remove_one", "delta": 1e-5}, False),
        pytest.param({"max_rows_per_unit": 2}, False, marks=pytest.mark.nightly),
    ],
)
def test_a_bar_tells_of_pieces_only_where_sizes_are_public(options, is_told, capsys):
    table = in_pieces(table_of_visits()[0], (300, 700))
    who = table.unit("who")
    num_persons = who.num_units
    unit = {"unit": "person"} if "max_rows_per_unit" in options else {}
    kernel = DPHMC(visits if unit else model, eps=3.0, **unit, **options)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2)
    of_units = (who, num_persons) if unit else ()
    mcmc.run(jax.random.key(0), table[["a", "c"]], *of_units, y=table["y"])
    assert ("row/s" in capsys.readouterr().err) == is_told
    assert not table.progress_bar


def test_whose_a_row_is_belongs_to_the_plan_unless_it_is_private():
    table, _, persons = table_of_visits()
    separated, units = separate_visits(table)
    assert (separated.num_rows, separated.identity) == (persons, units.identity)
    assert separated.has_public_places
    capped, _ = separate_visits(table, max_rows_per_unit=2)
    assert not capped.has_public_places
    assert capped.identity == "private 'person', up to 2 rows"


def test_as_many_members_as_units_and_no_unit_that_has_nearly_all_rows():
    table, _, persons = table_of_visits()
    with pytest.raises(ValueError, match=f"has {persons} units, and plate 'persons' has {persons - 1} members"):
        separate_visits(table, persons - 1)
    uneven = frame(220).append_column("who", pa.array(["a"] * 200 + [f"b{k:02d}" for k in range(20)]))
    with pytest.raises(ValueError, match="the largest unit has 200 of 220 rows"):
        separate_visits(uneven)


def test_columns_of_two_tables_with_units():
    one, other = (in_pieces(table_of_visits()[0]) for _ in range(2))
    mcmc = MCMC(DPHMC(persons_with_slopes, eps=3.0, unit="who"), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(ValueError, match="one and the same"):
        mcmc.run(jax.random.key(0), one[["a", "c"]], y=other["y"])


@pytest.mark.parametrize("ids", [[1.0, float("nan"), 1.0], [[1], [2], [3]]])
def test_ids_of_which_equal_ones_may_not_be_equal(ids):
    table = in_pieces(frame(3).append_column("who", pa.array(ids)))
    with pytest.raises(ValueError, match="whole numbers, texts or dates"):
        table.unit("who")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (["a", "b", "a"], "not sorted"),
        (["b", "b", "a"], "not sorted"),
        (["a", None, "b"], "some have no value"),
        (["a", "a", "a"], "nobody to hide among"),
    ],
)
@pytest.mark.parametrize("cuts", [(), (2,)])
def test_units_that_cannot_be(ids, says, cuts):
    with pytest.raises(ValueError, match=says):
        streamed_visits(frame(3).append_column("who", pa.array(ids)), cuts)


def test_a_unit_is_named_by_an_argument_or_a_column():
    table = in_pieces(table_of_visits()[0])
    with pytest.raises(ValueError, match="unit must be a name"):
        draws(table, kernel=DPHMC(persons_with_slopes, eps=3.0, unit=np.zeros(table.num_rows, int)))
    with pytest.raises(KeyError, match="no column 'nobody'"):
        draws(table, kernel=DPHMC(persons_with_slopes, eps=3.0, unit="nobody"))


def test_a_unit_column_without_units_is_refused():
    """It would be the same for all rows."""
    table = in_pieces(table_of_visits()[0])
    with pytest.raises(ValueError, match="says whose a row is, and the kernel was not told"):
        rows_of(table.unit("who"))


def test_views_of_texts_are_texts():
    """As Polars has them."""
    table = scan(pa.table({"sex": pa.array(["m", "f"]).cast(pa.string_view())}))
    assert rows_of(table["sex"].levels(["f", "m"]))[0].tolist() == [1, 0]


def test_pandas_is_read_with_its_missing_values():
    table = scan(pd.DataFrame({"x": [1.0, np.nan], "k": pd.array([1, None], "Int64")}))
    assert rows_of(table["k"])[1].tolist() == [True, False]
    assert rows_of(table["x"].is_missing())[0].tolist() == [False, True]
