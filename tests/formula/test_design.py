"""A formula's coding rests on what is public: a row is coded by itself, and what may mix rows is refused."""

import contextlib
import datetime
import decimal
import warnings
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest

from numpyro_dp.formula.columns import Levels, Range, code, describe, read
from numpyro_dp.formula.design import Design, Outcome, split
from numpyro_dp.formula.model import FormulaModel

RANGES = {"age": (18, 90), "dose": (0.5, 20), "since": ("2020-01-01", "2021-01-01")}
LEVELS = {"sex": ["f", "m"], "arm": ["a", "b", "c"], "clinic": range(4), "smokes": [False, True]}
PUBLIC = describe(RANGES, LEVELS)

TERMS = [
    "age + dose",
    "age * C(sex) + arm:dose",
    "bs(age, df=5) + cr(dose, df=4)",
    "poly(age, 3) + log(dose) + np.sqrt(age)",
    "scale(age) + center(dose) + I(age ** 2 / 100)",
    "C(arm, contr.treatment(base='b')) + C(sex, contr.sum) + smokes",
    "scale(age) + I(scale(age) ** 2) + scale(age):scale(dose)",
    "bs(age, knots=[40, 60], degree=2) + poly(log(dose), degree=2) + C(arm, contrasts=contr.helmert)",
    "0 + C(arm) + since",
    "cc(age, df=4) + maximum(age, 50) + {dose / age}",
    "1",
]


def people(n, seed=0):
    rng = np.random.default_rng(seed)
    days = rng.integers(0, 366, n).astype("timedelta64[D]")
    return pd.DataFrame(
        {
            "age": rng.uniform(18, 90, n),
            "dose": rng.uniform(0.5, 20, n),
            "since": np.datetime64("2020-01-01") + days,
            "sex": rng.choice(["f", "m"], n),
            "arm": rng.choice(["a", "b", "c"], n),
            "clinic": rng.integers(0, 4, n),
            "smokes": rng.random(n) < 0.3,
            "y": rng.normal(size=n),
        }
    )


def hostile(n=8):
    table = people(n, seed=1).astype({"age": float, "dose": float, "sex": object, "arm": object})
    table.loc[0, "age"], table.loc[1, "dose"] = np.nan, np.inf
    table.loc[2, "age"], table.loc[3, "dose"] = -1e300, 1e300
    table.loc[4, "sex"], table.loc[5, "arm"] = None, "no such arm"
    return table


def coded(table):
    return {name: code(values, PUBLIC[name]).values for name, values in read(table, list(PUBLIC)).items()}


@pytest.mark.parametrize("terms", TERMS)
def test_a_row_is_coded_by_itself(terms):
    """Alone, among others, and beside rows that are far out: the same numbers. Nothing warns of a row."""
    design = Design(terms, PUBLIC)
    table = pd.concat([people(20), hostile()], ignore_index=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = design.matrix(coded(table), len(table))
        alone = [design.matrix(coded(table.iloc[[k]]), 1) for k in range(len(table))]
    assert whole.shape == (len(table), len(design.names))
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(whole, np.concatenate(alone))


def test_levels_and_knots_are_those_of_the_public_ranges():
    one = Design("bs(age, df=4) + C(arm)", PUBLIC)
    assert [name for name in one.names if "arm" in name] == ["C(arm)[T.b]", "C(arm)[T.c]"]
    values = one.matrix({"age": np.array([18.0, 54.0, 90.0]), "arm": np.array([0, 0, 0])}, 3)
    np.testing.assert_allclose(values[0, 1:5], 0, atol=1e-12)
    assert values[2, 4] == pytest.approx(1)
    centred = Design("center(age)", PUBLIC)
    np.testing.assert_allclose(centred.matrix({"age": np.array([54.0])}, 1)[0, 1], 0, atol=1e-9)


@pytest.mark.parametrize(
    "terms",
    [
        "lag(age)",
        "I(age - age.mean())",
        "I(age / np.mean(age))",
        "np.cumsum(age)",
        "I(age[::-1])",
        "hashed(arm, levels=3)",
        "I((lambda x: x)(age))",
        "I([k for k in age])",
        "np.linalg.norm(age)",
        "secret(age)",
        "I(age > 50)",
        "I(age @ dose)",
        "bs(age, knots=dose)",
        "bs(age, df=4, lower_bound=0 * dose)",
        "poly(age, dose)",
        "np.maximum.accumulate(age)",
        "Q('age')",
        # What learns would learn from the people's rows.
        "I(scale(age) + scale(age)**2)",
        "I(center(age) * center(age))",
        "I(scale(age) * scale(dose))",
        "{scale(age)**2 + scale(age)**3}",
        "center(cr(dose, df=4))",
        "scale(bs(age, df=4))",
        "bs(scale(age), df=4)",
        # A row beyond the bounds, or the values of many, would be an error.
        "bs(age * dose, df=4)",
        "bs(abs(age - 54.1), df=4)",
        "bs(age, df=4, lower_bound=20)",
        "cr(dose, df=4, constraints='center')",
        "cr(dose, df=4, extrapolation='raise')",
        # A place of memory, or an array that is written to.
        "np.exp(age, where=False)",
        "log(age, out=dose)",
        "log(age, dose)",
        "maximum(age)",
        # Levels of the table's.
        "C(arm, levels=['a', 'b'])",
        "C((age + dose))",
        "C(log(age))",
        "C(I(arm))",
        "I(C(arm) * 2)",
        "np",
        "log",
        "Treatment(arm)",
    ],
)
def test_what_may_mix_rows_is_refused(terms):
    with pytest.raises(ValueError, match="not known to keep rows apart"):
        Design(terms, PUBLIC)


def test_nothing_of_the_callers_is_seen():
    age = np.full(5, 7.0)  # a name that formulaic would take from here
    with pytest.raises(ValueError, match="nothing is public about 'height'"):
        Design("height", PUBLIC)
    assert len(age) == 5


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ("log(age - 18)", "not finite on all of the public range"),
        ("I(0 * age)", "is the same on all of the public range"),
        ("`a column`", "rename it"),
    ],
)
def test_terms_that_make_no_sense_on_the_public_range(terms, message):
    with pytest.raises(ValueError, match=message):
        Design(terms, PUBLIC)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("y ~ age +\n (1 | clinic)", ("y", "age", ["1|clinic"])),
        ("y ~ age + C(sex) + (1 | clinic)", ("y", "age + C(sex)", ["1|clinic"])),
        ("y ~ (1 | clinic)", ("y", "1", ["1|clinic"])),
        ("log(y) ~ (0 + age | clinic) + age", ("log(y)", "age", ["0 + age|clinic"])),
        ("y ~ age + (1 | clinic) + dose + (age | arm)", ("y", "age + dose", ["1|clinic", "age|arm"])),
    ],
)
def test_effects_of_groups_are_read(formula, expected):
    outcome, terms, effects = split(formula)
    assert (outcome, " ".join(terms.split()), [str(effect) for effect in effects]) == expected


@pytest.mark.parametrize(
    "formula",
    ["y", "y ~", "~ y", "y ~ a ~ b", "y ~ (bs(age) | clinic)", "y ~ (1 | a/b)", "y ~ age(1 | g)", "y ~ (1 | g)(1 | h)"]
    + ["y ~ (| g)", "y ~ (0 | g)"],
)
def test_formulas_that_cannot_be_read(formula):
    with pytest.raises(ValueError, match=r"formula is|cannot read|a group is one column|no effect of the group"):
        split(formula)


def test_an_outcome_is_arithmetic_with_one_column():
    assert Outcome("log(y + 1)").column == "y"
    np.testing.assert_allclose(Outcome("np.log(y)")(np.array([1.0, np.e])), [0, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Outcome("log(y)")(np.array([0.0, -1.0])).shape == (2,)
    assert Outcome("(t\n + 1)").text == "(t + 1)"
    for text in (
        "a + b",
        "poly(y, 2)",
        "lag(y)",
        "y.mean()",
        "[y]",
        "Treatment(y)",
        "C(y)",
        "log(y, where=False)",
        "1",
    ):
        with pytest.raises(ValueError, match=r"must be one column|keep rows apart"):
            Outcome(text)


@pytest.mark.parametrize(
    ("ranges", "levels", "message"),
    [
        ({"age": (90, 18)}, {}, "must be finite and rise"),
        ({"age": (0, np.inf)}, {}, "must be finite and rise"),
        ({"age": "ab"}, {}, "must be a pair"),
        ({"age": (0, 1)}, {"age": [0, 1]}, "in both `ranges` and `levels`"),
        ({}, {"sex": ["f", "f"]}, "two or more values, each once"),
    ],
)
def test_what_is_public_is_checked(ranges, levels, message):
    with pytest.raises(ValueError, match=message):
        describe(ranges, levels)


AGES, DATES, GRADES = Range(0, 100), Range("2020-01-01", "2021-12-31"), Levels((30, 50, True, "f"))
WEEKS = Levels(("2020-02-01", "2020-02-08"))
END = datetime.datetime(9999, 12, 31, 23, 59)
WEST = datetime.timezone(datetime.timedelta(hours=-5))


def coded_column(values, column):
    return code(read({"it": values}, ["it"])["it"], column)


def code_column(values, column):
    """The values, and which rows say nothing, for whatever reason."""
    found = coded_column(values, column)
    assert not (found.missing & found.outside).any()
    return found.values, found.missing | found.outside


class Rude(float):
    def __float__(self):
        raise RuntimeError("secret")


class RudeText(str):
    def strip(self, *_):
        raise KeyError("secret")


ODD = [
    *(
        "x",
        "41",
        "",
        " nan ",
        "inf",
        "true",
        "\udce9",
        "20200301",
        "01/02/2020",
        "2020-03-01 10:00",
        "9" * 400,
        b"f",
        "now",
    ),
    *(
        True,
        None,
        pd.NA,
        pd.NaT,
        np.nan,
        np.inf,
        -1e308,
        1j,
        3 + 0j,
        10**30,
        2**64,
        10**400,
        Decimal(3),
        Decimal("sNaN"),
    ),
    *([1], {}, object(), Rude(3), RudeText("f"), np.float32(0.1), np.int8(-1), np.ones(2)),
    *(
        datetime.date(2020, 1, 1),
        END,
        END.replace(tzinfo=WEST),
        END.replace(tzinfo=datetime.UTC),
        datetime.timedelta(1),
    ),
    *(
        pd.Timestamp.min,
        pd.Timestamp.max,
        pd.Timestamp(np.datetime64("20000-01-01", "s")),
        pd.Timestamp("2020-02-01", tz="UTC"),
    ),
    *(
        np.datetime64("300000000000-01-01", "D"),
        np.datetime64("NaT", "D"),
        np.datetime64("1700", "Y"),
        pd.Period("2020-01"),
    ),
]
COLUMNS = {
    "numbers": ([30, 50.5], AGES),
    "texts of numbers": (["30", "50.5"], AGES),
    "truths": ([True, False], Range(0, 1)),
    "days": ([datetime.date(2020, 2, 1), datetime.date(2021, 1, 1)], DATES),
    "times": ([pd.Timestamp("2020-02-01T12"), pd.Timestamp("2020-01-01")], DATES),
    "times in zones": ([datetime.datetime(2020, 3, 1, tzinfo=WEST), datetime.datetime(2020, 2, 1, tzinfo=WEST)], DATES),
    "texts of days": (["2020-02-01", "2020-06-05T12:00+02:00"], DATES),
    "grades": ([30, 50], GRADES),
    "texts of grades": (["30.0", "f"], GRADES),
    "weeks": ([pd.Timestamp("2020-02-01"), pd.Timestamp("2020-02-08")], WEEKS),
}
CONTAINERS = {"list": list, "objects": lambda x: _objects(x), "series": lambda x: pd.Series(_objects(x), dtype=object)}


def _objects(values):
    found = np.empty(len(values), object)
    for k, value in enumerate(values):
        found[k] = value
    return found


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", COLUMNS)
def test_no_value_decides_what_others_become(kind, container):
    """Nor is one an error or a warning, nor does it become something else beside others."""
    usual, column = COLUMNS[kind]
    contain = CONTAINERS[container]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = coded_column(contain(usual), column)
        assert not (expected.missing | expected.outside).any()
        for odd in ODD:
            alone = coded_column(contain([odd]), column)
            for k in range(3):
                found = coded_column(contain([*usual[:k], odd, *usual[k:]]), column)
                for part, usual_part, alone_part in zip(found, expected, alone, strict=True):
                    np.testing.assert_array_equal(np.delete(part, k), usual_part, err_msg=repr(odd))
                    assert part[k] == alone_part[0], odd


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_value_that_is_missing_from_a_category_is_no_error(kind):
    """Pandas computes with all of its values where somebody asks whether they are dates."""
    usual, column = COLUMNS[kind]
    for k, values in enumerate(([None, *usual], [usual[0], None, usual[1]])):
        found, missing = code_column(pd.Series(pd.Categorical(values)), column)
        assert missing.tolist() == [j == k for j in range(3)]
        np.testing.assert_array_equal(found[~missing], coded_column(usual, column).values)


def test_what_odd_values_become():
    found = {repr(odd): code_column([odd], AGES) for odd in ODD}
    assert found["'41'"][0] == 41
    assert found["True"][0] == found["'true'"][0] == 1
    assert found["(3+0j)"][0] == found["Decimal('3')"][0] == 3
    nothing = (None, pd.NA, "x", b"f", np.inf, 1j, "inf", datetime.date(2020, 1, 1), 10**30, 2**64, -1e308)
    assert all(found[repr(odd)][1] for odd in nothing)
    dates = {repr(odd): code_column([odd], DATES) for odd in ODD}
    far = (pd.Timestamp.min, pd.Timestamp(np.datetime64("20000-01-01", "s")))
    assert all(dates[repr(odd)][1] for odd in (3 + 0j, "20200301", "01/02/2020", "now", None, pd.NaT, "x", *far))


@pytest.mark.parametrize("column", [AGES, DATES, GRADES], ids=["number", "date", "level"])
def test_a_missing_value_is_none_that_is_not_public(column):
    """Somebody has forgotten to say what there may be, or has misspelt it; or the value is not known."""
    for nothing in (None, np.nan, pd.NA, pd.NaT, "", " nan ", decimal.Decimal("nan"), np.datetime64("NaT", "D")):
        found = code(read({"it": [nothing]}, ["it"])["it"], column)
        assert (*found.missing, *found.outside) == (True, False), nothing
    for value in ("x", -1e308, np.inf, b"f", 1j, "1700-01-01", pd.Timestamp.min, Rude(1)):
        found = code(read({"it": [value]}, ["it"])["it"], column)
        assert (*found.missing, *found.outside) == (False, True), value


def test_a_range_has_its_ends_in_single_precision_too_and_all_of_its_last_day():
    ages = describe({"x": (0.1, 0.7)}, None)["x"]
    assert not code_column(np.array([0.1, 0.7], np.float32), ages)[1].any()
    assert code_column([0.0999, 0.7001], ages)[1].all()
    end = np.datetime64(DATES.high)
    assert not code_column([str(end) + "T23:59:59"], DATES)[1].any()
    assert code_column([str(end + np.timedelta64(1, "D"))], DATES)[1].all()


def test_each_date_is_read_by_itself():
    values = ["2020-04-03", "2020-06-05T12:00+02:00", datetime.date(2020, 2, 1), pd.Timestamp("9999-12-31")]
    found, silent = code_column(values, DATES)
    np.testing.assert_allclose(found[:3], [93, 156 + 10 / 24, 31])
    np.testing.assert_array_equal(silent, [False, False, False, True])


def test_columns_of_arrow_and_polars_are_read_value_by_value():
    pa = pytest.importorskip("pyarrow")
    far = pa.array([18415, 3_000_000, None], pa.int32())
    for days in (far.view(pa.date32()), pa.chunked_array([far.cast(pa.int64())]).cast(pa.int64())):
        found, missing = code_column(days, Range(0, 10) if days.type == pa.int64() else DATES)
        assert days.type == pa.int64() or found[0] == 153
        np.testing.assert_array_equal(missing, [days.type == pa.int64(), True, True])
    for unit in ("s", "ms", "us", "ns"):
        lowest = -(2**63) + 1 if unit == "ns" else -(2**50)
        times = pa.array([0, lowest, None], pa.int64()).cast(pa.timestamp(unit, "America/New_York"))
        found, missing = code_column(times, Range("1970-01-01", "1971-01-01"))
        assert found[0] == 0
        np.testing.assert_array_equal(missing, [False, True, True])
    texts = pa.array([b"f", b"\xff", None], pa.binary()).view(pa.string())
    np.testing.assert_array_equal(code_column(texts, Levels(("m", "f")))[0], [1, 0, 0])
    for truths in (
        pa.array([True, None]),
        pa.array([True, None]).dictionary_encode(),
        pa.array([1, None]),
        pa.array([1.0, None]),
    ):
        np.testing.assert_array_equal(code_column(truths, Levels((False, True))), [[1, 0], [False, True]])
    for odd in (
        pa.nulls(2),
        pa.array([[1], None]),
        pa.array([1, None], pa.duration("s")),
        pa.array([1, 2], pa.time64("ns")),
    ):
        assert code_column(odd, AGES)[1].all()
    with contextlib.suppress(ImportError):
        import polars

        series = polars.Series([datetime.datetime(2020, 6, 2), END]).dt.replace_time_zone("America/New_York")
        np.testing.assert_allclose(code_column(series, DATES)[0], [153 + 4 / 24, 730])
        found, missing = code_column(polars.Series([30, 2**64, 1], strict=False), AGES)
        np.testing.assert_array_equal(found[::2], [30, 1])
        np.testing.assert_array_equal(missing, [False, True, False])


@pytest.mark.parametrize(
    "values", [[0.1, 0.2], ["0.1", "0.20"], [np.float32(0.1), "0.2"], np.array([0.1, 0.2], np.float32)]
)
def test_levels_of_single_precision(values):
    np.testing.assert_array_equal(code_column(values, Levels((0.2, 0.1))), [[1, 0], [False, False]])


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "Asia/Tokyo"])
def test_dates_far_out_are_outside(unit, zone):
    lowest = np.int64(-(2**63) + (1 if zone is None else 10**14)).view(f"datetime64[{unit}]")
    if unit != "ns":
        lowest = np.datetime64("1700-01-01")
    dates = np.array(["2020-02-01T12", lowest, "2200-01-01", "NaT"], dtype=f"datetime64[{unit}]")
    for column in [dates] if zone is None else [pd.Series(dates).dt.tz_localize(zone)]:
        found, missing = code_column(column, DATES)
        assert found[0] == pytest.approx(31.5 - (9 / 24 if zone else 0))
        np.testing.assert_array_equal(missing, [False, True, True, True])


@pytest.mark.parametrize(
    "dtype", ["datetime64[Y]", "datetime64[M]", "datetime64[D]", "datetime64[W]", "datetime64[10s]"]
)
def test_dates_of_numpys_other_units(dtype):
    dates = np.array(["2020-07-02", "NaT"], dtype=dtype)
    expected = (dates[0] - np.datetime64("2020-01-01")) / np.timedelta64(1, "D")
    far = np.array([2**62, -(2**62)]).view(dtype)
    found, missing = code_column(np.concatenate([dates, far]), DATES)
    np.testing.assert_allclose(found[0], expected)
    np.testing.assert_array_equal(missing, [False, True, True, True])


def test_levels_are_the_same_whatever_type_a_column_was_read_with():
    for values in ([1, 2, 3], [1.0, 2.0, np.nan], ["1", "2", "unknown"], ["01", "2.0", None], [True, 2, None]):
        found, missing = code_column(pd.Series(values), Levels((2, 1)))
        np.testing.assert_array_equal(found[:2], [1, 0])
        np.testing.assert_array_equal(missing, [False, False, True])
    for values in ([True, False], ["True", "false"], [1, 0], pd.array([True, False], dtype="boolean")):
        np.testing.assert_array_equal(code_column(pd.Series(values), Levels((False, True)))[0], [1, 0])
    dates = Levels(("2020-01-01", "2020-07-01"))
    for values in (["2020-07-01", None], [pd.Timestamp("2020-07-01"), pd.NaT], [datetime.date(2020, 7, 1), 3]):
        np.testing.assert_array_equal(code_column(pd.Series(values), dates)[0], [1, 0])


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ({"f", "m"}, "must be a list, whose first is the reference"),
        ("fm", "must be a list"),
        ([1, "1"], "each once"),
        ([True, 1], "each once"),
        ([2**53, 2**53 + 1], "put a letter before whole numbers"),
        ([f"{2**53}", "f"], "put a letter before whole numbers"),
        ([np.nan, 1], "nan is no level"),
        (["inf", 1], "'inf' is no level"),
        (["1E2", "100"], "are the same"),
        (["", "f"], "'' is no level"),
    ],
)
def test_levels_that_could_be_mixed_up(levels, message):
    with pytest.raises(ValueError, match=message):
        describe({}, {"sex": levels})


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"age": [1, 2], "dose": [1]}, ValueError, "'age' and 'dose' are not of the same length"),
        ([{"age": 1}], TypeError, "must be a pandas, Polars or Arrow table.* got a list"),
        ({"age": [1]}, ValueError, "have no column 'dose'; they have age"),
    ],
)
def test_data_that_cannot_be_read(data, error, message):
    with pytest.raises(error, match=message):
        read(data, ["age", "dose"])


def test_a_column_that_stands_twice_is_refused():
    table = pd.DataFrame([[1, 2]], columns=["age", "age"])
    with pytest.raises(ValueError, match="have several columns 'age'"):
        read(table, ["age"])


def test_frames_of_all_kinds_give_the_same():
    pyarrow = pytest.importorskip("pyarrow")
    table = people(30)
    model = FormulaModel(
        "y ~ age + since + C(arm) + smokes + (1 | clinic)", ranges=RANGES | {"y": (-4, 4)}, levels=LEVELS
    )
    expected = model.arguments(table)
    others = [pyarrow.Table.from_pandas(table), {name: table[name].to_numpy() for name in table}]
    with contextlib.suppress(ImportError):
        import polars

        others.append(polars.from_pandas(table))
    others.append(table.convert_dtypes().set_index(np.arange(30)[::-1]))
    for other in others:
        found = model.arguments(other)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values)


def test_neighbouring_tables_differ_in_the_arguments_of_that_row_only():
    model = FormulaModel("y ~ bs(age, df=4) * arm + (age | clinic)", ranges=RANGES | {"y": (-4, 4)}, levels=LEVELS)
    table, other = people(12), people(12)
    other.loc[5, ["age", "arm", "clinic", "y"]] = [1e9, "c", 3, np.nan]
    one, two = model.arguments(table), model.arguments(other)
    for name, values in one.items():
        np.testing.assert_array_equal(np.delete(values, 5, 0), np.delete(two[name], 5, 0))
        assert values.dtype == two[name].dtype
    assert (one["observed"][5], two["observed"][5]) == (True, False)
    other.loc[5, "y"] = 1.0
    three = model.arguments(other)
    assert three["observed"].all()
    np.testing.assert_array_equal(np.isnan(three["y"]), np.arange(12) == 5)


def test_an_outcome_far_out_is_no_warning():
    model = FormulaModel("y ~ age", ranges=RANGES | {"y": (-4, 4)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = model.arguments({"age": [30.0, 40.0], "y": [1e300, np.inf]})
    assert found["y"].dtype == np.float32


def test_rows_with_missing_values_are_masked_and_those_with_others_have_no_outcome():
    """What was not said to be public says nothing, but the posterior's verdict counts it."""
    model = FormulaModel("y ~ age + dose + C(sex) + C(arm)", ranges=RANGES | {"y": (-4, 4)}, levels=LEVELS)
    table = hostile()
    found = model.arguments(table)
    np.testing.assert_array_equal(found["observed"], [False, True, True, True, False, True, True, True])
    np.testing.assert_array_equal(np.isnan(found["y"]), [False, True, True, True, False, True, False, False])
    assert np.isfinite(found["X"]).all()
    with pytest.warns(UserWarning, match="some rows have a missing value"):
        without = model.arguments(table.drop(columns="y"))
    assert "y" not in without
    np.testing.assert_array_equal(without["observed"], [False, False, False, False, False, False, True, True])


def test_a_row_that_is_not_finite_says_nothing():
    """Made-up rows do not come by 54.123; somebody may."""
    model = FormulaModel("y ~ I(1 / (age - 54.123))", ranges={"age": (18, 90), "y": (-4, 4)})
    found = model.arguments({"age": [30.0, 54.123], "y": [1.0, 1.0]})
    np.testing.assert_array_equal(found["y"], [1, np.nan])
    assert np.isfinite(found["X"]).all()


def test_what_is_coded_otherwise_by_itself_is_refused_whatever_it_is(monkeypatch):
    """The last line of defence: should formulaic learn from a table where nobody knows of it."""
    from numpyro_dp.formula import design

    ranked = {"log": lambda column: np.argsort(np.argsort(column)).astype(float)}
    monkeypatch.setattr(design, "ELEMENTWISE", design.ELEMENTWISE | ranked)
    with pytest.raises(ValueError, match="coded otherwise than among others"):
        Design("log(age)", PUBLIC)


def test_an_error_of_the_coding_says_nothing_of_rows():
    design = Design("log(age)", PUBLIC)
    with pytest.raises(RuntimeError, match=r"could not code the table \(\w+\)") as caught:
        design.matrix({"age": np.array(["secret"], object)}, 1)
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_large_numbers_are_centred_before_they_lose_digits():
    model = FormulaModel("y ~ seconds", ranges={"seconds": (1.7e9, 1.7e9 + 1000), "y": (1234560, 1234570)})
    found = model.arguments({"seconds": 1.7e9 + np.array([0.0, 60.0, 120.0]), "y": [1234565] * 3})
    np.testing.assert_allclose(np.diff(found["X"][:, 0]), 60, rtol=1e-5)
    assert "dist.Normal(1234565.0, 6.25)" in str(model)


def test_the_centre_of_a_range_around_0_is_0_and_not_what_rounding_leaves():
    assert Design("x + I(x * 3)", describe({"x": (-1, 1)}, None)).center.tolist() == [0, 0, 0]
    assert Design("x", describe({"x": (0, 1)}, None)).center[1] == pytest.approx(0.5, abs=0.01)
