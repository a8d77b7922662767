"""A unit with many rows: what its rows do together is clipped, and the guarantee is that of the unit."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import some_every_day
from hypothesis import given, settings
from hypothesis import strategies as st
from numpyro.infer.util import log_density
from scipy.special import expit

from numpyro_dp import (
    DPHMC,
    DPSGLD,
    MCMC,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    PrivacyBudget,
    PrivacyBudgetError,
    audit,
)
from numpyro_dp.model.separable import split_words
from numpyro_dp.model.separate import separate
from numpyro_dp.model.units import group_rows, number_units, without_names
from numpyro_dp.preparation import Preparation
from numpyro_dp.preparation.survey import Survey
from numpyro_dp.privacy import clipping
from numpyro_dp.privacy.batches import FixedBatches, PoissonBatches
from numpyro_dp.privacy.clipping import GRID, clipped_sum
from numpyro_dp.privacy.ledger import Request
from numpyro_dp.privacy.release import RowSum

RNG = np.random.default_rng(3)
N, D = 60, 2
X = RNG.normal(size=(N, D)).astype(np.float32)
Y = (RNG.random(N) < 0.5).astype(np.int32)
PERSON = np.repeat(np.arange(20), [1, 2, 3, 4, 5] * 4)
RNG.shuffle(PERSON)
ORDER = list(dict.fromkeys(PERSON.tolist()))  # units are numbered as they appear


def model(X, y=None, person=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("people", 20):
        a = numpyro.sample("a", dist.Normal(0, 0.5))
    with numpyro.plate("visits", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b + a[person]), obs=y)


ARGS, KWARGS = (X,), {"y": Y, "person": PERSON}


def units(unit=PERSON):
    return group_rows(separate(model, ARGS, KWARGS), unit, ARGS, KWARGS)


def per_unit_values(grouped, z, args=ARGS, kwargs=KWARGS):
    density = grouped.row_log_density(args, kwargs)
    rows = grouped.rows(args, kwargs)
    return np.array([density(z, tuple(part[k : k + 1] for part in rows)) for k in range(grouped.num_rows)])


def test_a_unit_has_the_log_density_of_its_rows_and_all_of_them_that_of_the_table():
    grouped = units()
    z = jnp.asarray(np.random.default_rng(0).normal(size=grouped.num_params), jnp.float32)
    found = per_unit_values(grouped, z)
    of_rows = separate(model, ARGS, KWARGS)
    density, rows = of_rows.row_log_density(ARGS, KWARGS), of_rows.rows(ARGS, KWARGS)
    each = np.array([density(z, tuple(part[k : k + 1] for part in rows)) for k in range(N)])
    np.testing.assert_allclose(found, [each[k == PERSON].sum() for k in ORDER], rtol=1e-5)
    total = log_density(model, ARGS, KWARGS, of_rows.constrain(ARGS, KWARGS)(of_rows.unravel(z)))[0]
    np.testing.assert_allclose(found.sum() + of_rows.log_prior(ARGS, KWARGS)(z), total, rtol=1e-5)


def test_the_gradient_of_a_unit_is_that_of_its_rows_and_padding_adds_nothing():
    grouped = units()
    z = jnp.zeros(grouped.num_params)
    density, rows = grouped.row_log_density(ARGS, KWARGS), grouped.rows(ARGS, KWARGS)
    gradient = jax.vmap(lambda *unit: jax.grad(density)(z, tuple(part[None] for part in unit)))(*rows)
    of_rows = separate(model, ARGS, KWARGS)
    one = of_rows.row_log_density(ARGS, KWARGS)
    each = jax.vmap(lambda *row: jax.grad(one)(z, tuple(part[None] for part in row)))(*of_rows.rows(ARGS, KWARGS))
    np.testing.assert_allclose(gradient, [np.asarray(each)[k == PERSON].sum(0) for k in ORDER], atol=1e-5)


def test_padding_is_a_row_of_the_same_unit():
    """Were it of another one, which is masked, its infinite derivative times 0 would be NaN here."""
    layout = units().layout(ARGS, KWARGS)
    own = np.array(ORDER)[:, None]
    np.testing.assert_array_equal(PERSON[layout.index], np.broadcast_to(own, layout.index.shape))
    np.testing.assert_array_equal(layout.present.sum(1), np.bincount(PERSON)[ORDER])


def capped(most, args=ARGS, kwargs=KWARGS):
    return group_rows(separate(model, args, kwargs), "person", args, kwargs, most)


def test_of_private_units_the_first_rows_count_and_no_array_is_kept():
    grouped = capped(3)
    z = jnp.asarray(np.random.default_rng(0).normal(size=grouped.num_params), jnp.float32)
    of_rows = separate(model, ARGS, KWARGS)
    density, rows = of_rows.row_log_density(ARGS, KWARGS), of_rows.rows(ARGS, KWARGS)
    each = np.array([density(z, tuple(part[k : k + 1] for part in rows)) for k in range(N)])
    expected = [each[np.flatnonzero(k == PERSON)[:3]].sum() for k in ORDER]
    np.testing.assert_allclose(per_unit_values(grouped, z), expected, rtol=1e-5)
    kept = [value for value in vars(grouped).values() if isinstance(value, np.ndarray | jax.Array)]
    assert not kept


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_rows_of_private_units_are_in_no_public_place(relation):
    """Where it is private who has which row, a row's place would tell on others: no random numbers belong to it."""
    kernel = DPPenalty(
        model,
        eps=1.0,
        delta=1e-3,
        prepare=False,
        step_size=0.1,
        unit="person",
        max_rows_per_unit=5,
        neighboring_relation=relation,
        num_iterations=1,
    )
    kernel.init(jax.random.key(0), 0, None, ARGS, KWARGS)
    target = kernel.target(kernel.separate(ARGS, KWARGS), ARGS, KWARGS)
    assert not target.vault.has_public_places
    assert target.has_public_size == (relation == "replace_one")
    assert [part.shape[:2] for part in target.vault._rows] == [(20, 5)] * 4


@pytest.mark.parametrize(
    ("options", "fixed"),
    [
        ({}, True),
        ({"neighboring_relation": "add_or_remove_one", "delta": 1e-3}, False),
        pytest.param({"unit": "person"}, True, marks=pytest.mark.nightly),
        pytest.param({"unit": "person", "max_rows_per_unit": 5}, False, marks=pytest.mark.nightly),
    ],
)
def test_vectors_are_added_up_by_blocks_only_where_places_are_public(options, fixed, monkeypatch):
    """Elsewhere a row more or less would move all later ones to other blocks, and round them with others."""
    kernel = DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, num_iterations=1, **options)
    kernel.init(jax.random.key(0), 0, None, ARGS, KWARGS)
    target = kernel.target(kernel.separate(ARGS, KWARGS), ARGS, KWARGS)
    used, original = [], clipping._sum_by_blocks
    monkeypatch.setattr(clipping, "_sum_by_blocks", lambda *args: used.append(1) or original(*args))
    target.vault._total(RowSum(lambda row: row[0][0] if "unit" not in options else row[0][0, 0], 1.0, D), None)
    assert bool(used) == fixed


def laplace(X, y, person):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("visits", X.shape[0]):
        numpyro.sample("y", dist.Laplace(X @ b, 1.0), obs=y)


def largest_move_of_a_gradient_that_jumps():
    """One person's row moves from the first place to the last, so that all others move by one place.

    Four of those lie where the gradient changes its sign with the last bit of the prediction. A compiler computes the
    last few of 1003 rows by other instructions than the rest.

    :return: how far the clipped sum moves, in claimed sensitivities.
    """
    n, d = 1003, 8
    rng = np.random.default_rng(1)
    z = jnp.asarray(rng.normal(size=d), jnp.float32)

    def table(critical, y, last):
        others, outcomes = np.zeros((n - 1, d), np.float32), np.where(np.arange(n - 1) % 2, 50, -50).astype(np.float32)
        others[:, 0], others[-4:], outcomes[-4:] = 1, critical, y
        place, mine = (n - 1, -100) if last else (0, 100)
        return (
            np.insert(others, place, np.eye(d)[0], axis=0),
            np.insert(outcomes, place, mine),
            np.insert(np.arange(1, n), place, 0),
        )

    example = table(np.zeros(d), 0.0, False)
    grouped = group_rows(separate(laplace, example), "person", example, {}, 2)
    density = grouped.row_log_density(example, {})

    @jax.jit
    def total(rows):
        return clipped_sum(lambda row: jax.grad(density)(z, row), rows, 1.0, 2 * d)

    def steps(*of):
        found = total(grouped.rows(table(*of), {}))
        return np.asarray(found.hi, float) * 2**24 + np.asarray(found.lo)

    largest = 0.0
    for _ in range(15):
        critical = (2 * rng.normal(size=d)).astype(np.float32)
        prediction = np.float32(critical @ np.asarray(z))
        for y in (prediction, *np.nextafter(prediction, np.float32([9, -9]))):
            move = np.linalg.norm(steps(critical, y, False) - steps(critical, y, True))
            largest = max(largest, move / (2 * GRID))
    return largest


@pytest.mark.nightly
def test_rows_in_private_places_are_computed_alike_in_all_of_them(monkeypatch):
    assert 0.99 < largest_move_of_a_gradient_that_jumps() <= 1
    monkeypatch.setattr(clipping, "whole_chunks", lambda rows, chunk: (tuple(rows), len(rows[0]), 1))
    if jax.default_backend() == "cpu":  # a mutation, to see that there is something to find
        assert largest_move_of_a_gradient_that_jumps() > 1.1


@pytest.mark.parametrize("batch_size", [PoissonBatches(10), FixedBatches(10)])
def test_batches_are_not_added_up_by_blocks(batch_size, monkeypatch):
    """They are accounted for as a batch with a row and the same without it, in which later rows have other places."""
    kernel = DPSGLD(model, eps=1.0, delta=1e-3, step_size=1e-3, num_iterations=1, batch_size=batch_size)
    monkeypatch.setattr(clipping, "_sum_by_blocks", lambda *args: pytest.fail("by blocks"))
    state = kernel.init(jax.random.key(0), 0, None, ARGS, KWARGS)
    kernel.sample(state, ARGS, KWARGS)
    assert sum(map(sum, kernel.privacy.made.values())) == 1


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
@pytest.mark.statistical
def test_other_private_units_are_other_units_for_a_budget(relation, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with pytest.warns(UserWarning, match="a new privacy budget"):
        budget = PrivacyBudget(tmp_path / "budget", eps=3.0, delta=1e-3, neighboring_relation=relation)
    options = {"eps": 1.0, "delta": 1e-4, "prepare": False, "step_size": 0.1, "budget": budget}
    options |= {"neighboring_relation": relation, "max_rows_per_unit": 3, "num_iterations": 1}

    def sample_once(unit):
        kernel = DPPenalty(model, **options, unit=unit)
        private = dict(KWARGS, y=(PERSON + 1) % 20)  # of 20 other units
        kernel.sample(kernel.init(jax.random.key(0), 0, None, ARGS, private), ARGS, private)

    sample_once("person")
    sample_once("person")
    with pytest.raises(PrivacyBudgetError, match="other rows belonged together"):
        sample_once("y")


hostile = st.sampled_from([0.0, 1.0, -3.0, 1e6, -1e30, np.inf, -np.inf, np.nan])


@functools.cache
def program():
    """Clipped sums of ratios and gradients over units, in steps."""
    grouped = units()
    z, z_new = jnp.zeros(grouped.num_params), jnp.ones(grouped.num_params)

    @jax.jit
    def sums(X, bound):
        density, rows = grouped.row_log_density((X,), KWARGS), grouped.rows((X,), KWARGS)
        ratio = clipped_sum(lambda row: density(z_new, row) - density(z, row), rows, bound)
        return ratio, clipped_sum(lambda row: jax.grad(density)(z, row), rows, bound)

    return sums


@pytest.mark.optimized
@settings(max_examples=40)
@given(st.integers(0, 19), st.lists(hostile, min_size=10, max_size=10), st.floats(0.01, 10))
def test_replacing_all_rows_of_a_unit_moves_a_clipped_sum_by_its_sensitivity_at_most(who, values, bound):
    changed = X.copy()
    changed[who == PERSON] = np.resize(np.array(values, np.float32), (int(np.sum(who == PERSON)), D))

    def steps(X):
        return [np.asarray(t.hi, np.int64) * 2**24 + np.asarray(t.lo) for t in program()(X, bound)]

    for first, second in zip(steps(X), steps(changed), strict=True):
        assert np.linalg.norm((first - second).astype(float)) <= 2 * GRID


@pytest.mark.optimized
@settings(max_examples=25)
@given(
    st.integers(0, 19),
    st.lists(st.tuples(hostile, st.integers(0, N)), min_size=1, max_size=9),
    st.floats(0.01, 10),
)
def test_replacing_a_private_unit_by_more_or_fewer_rows_anywhere_moves_a_sum_by_its_sensitivity_at_most(
    who, rows, bound
):
    """The neighbouring table has other rows of this person, another number of them, and in other places."""
    others = np.flatnonzero(who != PERSON)
    places = np.minimum([place for _, place in rows], len(others))
    X_new = np.insert(X[others], places, np.array([[value] * D for value, _ in rows], np.float32), axis=0)
    Y_new = np.insert(Y[others], places, 1)
    person = np.insert(PERSON[others], places, who)

    def steps(X, y, person):
        args, kwargs = (X,), {"y": y, "person": person}
        units = capped_units(len(X)).rows(args, kwargs)
        return [np.asarray(t.hi, np.int64) * 2**24 + np.asarray(t.lo) for t in capped_program()(units, bound)]

    for first, second in zip(steps(X, Y, PERSON), steps(X_new, Y_new, person), strict=True):
        assert np.linalg.norm((first - second).astype(float)) <= 2 * GRID


@functools.cache
def capped_units(num_rows):
    """Grouped units for a table of so many rows; which rows are whose is read from the arguments each time."""
    X = np.zeros((num_rows, D), np.float32)
    kwargs = {"y": np.zeros(num_rows, np.int32), "person": np.arange(num_rows) % 20}
    return capped(4, (X,), kwargs)


@functools.cache
def capped_program():
    grouped = capped_units(N)
    density = grouped.row_log_density(ARGS, KWARGS)
    z, z_new = jnp.zeros(grouped.num_params), jnp.ones(grouped.num_params)

    @jax.jit
    def sums(units, bound):
        ratio = clipped_sum(lambda row: density(z_new, row) - density(z, row), units, bound)
        return ratio, clipped_sum(lambda row: jax.grad(density)(z, row), units, bound)

    return sums


def gaussian(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def test_a_row_that_is_not_a_number_silences_its_unit_only():
    values = X[:, 0]
    grouped = group_rows(separate(gaussian, (values,)), PERSON, (values,), {})
    broken = values.copy()
    broken[np.flatnonzero(PERSON == 4)[0]] = np.nan
    before, after = (per_unit_values(grouped, jnp.ones(1), (table,), {}) for table in (values, broken))
    assert np.flatnonzero(~np.isfinite(after)).tolist() == [ORDER.index(4)]
    np.testing.assert_array_equal(np.delete(before, ORDER.index(4)), np.delete(after, ORDER.index(4)))


@pytest.mark.nightly
def test_the_preparation_asks_units_too():
    """Derivatives in the coordinates of the cut are clipped unit by unit."""
    kernel = DPHMC(model, eps=5.0, unit="person", num_iterations=1, prepare=Preparation(mode="surrogate", force=True))
    kernel.prepare(*ARGS, **KWARGS)
    assert kernel.prepared.frame.center.shape == (D,)
    survey = Survey(
        kernel.target(kernel.separate(ARGS, KWARGS), ARGS, KWARGS),
        kernel._find_cut(kernel.separate(ARGS, KWARGS), kernel.separate(ARGS, KWARGS).public(ARGS, KWARGS)),
    )
    density = survey.cut.row_log_density
    rows = kernel.separate(ARGS, KWARGS).rows(ARGS, KWARGS)
    assert rows[0].shape == (20, 5, D)
    phi = np.zeros(D, np.float32)
    alone = np.array([density(phi, tuple(part[k : k + 1] for part in rows)) for k in range(20)])
    # At b = 0, of Bernoulli outcomes with a person's effect, which is integrated out.
    effects, weights = np.polynomial.hermite_e.hermegauss(60)
    ones, of_all = np.bincount(PERSON, weights=Y)[ORDER], np.bincount(PERSON)[ORDER]
    chances = expit(0.5 * effects) ** ones[:, None] * expit(-0.5 * effects) ** (of_all - ones)[:, None]
    np.testing.assert_allclose(alone, np.log(chances @ weights / weights.sum()), rtol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DPPenalty(model, eps=2.0, prepare=False, step_size=0.05, clip_ratio=1.0, unit=PERSON),
        lambda: DPPenalty(model, eps=2.0, prepare=False, step_size=0.05, batch_size=5, unit="person"),
        pytest.param(
            lambda: DPHMC(model, eps=2.0, prepare=False, step_size=0.05, unit=list(PERSON)), marks=pytest.mark.nightly
        ),
        pytest.param(lambda: DPBarker(model, eps=2.0, step_size=0.05, unit=PERSON), marks=pytest.mark.nightly),
        pytest.param(lambda: DPSGLD(model, eps=2.0, batch_size=5, unit=PERSON), marks=pytest.mark.nightly),
    ],
)
def test_kernels_run_on_units_and_the_report_names_them(make):
    mcmc = MCMC(make(), num_warmup=3, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), *ARGS, **KWARGS)
    report = mcmc.privacy
    assert report.num_rows == 20
    assert report.delta == pytest.approx(0.1 / 20)
    assert re.search(
        r"replacing one unit( 'person')? with all of its rows \(20 units, with up to 5", report.guarantee()
    )
    assert "which rows belong to which unit is public" in report.assumptions
    assert np.isfinite(mcmc.get_samples()["b"]).all()


@pytest.mark.parametrize(
    "prepare", [False, pytest.param(Preparation(mode="surrogate", force=True), marks=pytest.mark.nightly)]
)
def test_kernels_run_on_private_units_and_the_report_tells_nothing_of_them(prepare):
    kernel = DPHMC(model, eps=5.0, unit="person", max_rows_per_unit=3, prepare=prepare)
    mcmc = MCMC(kernel, num_warmup=3, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), *ARGS, **KWARGS)
    report = str(mcmc.privacy)
    text = " ".join(report.split())
    assert "replacing one unit 'person' with all of its rows, whichever and however many they are (20 units" in text
    assert "the first 3 rows of each count" in text
    assert "rows of a unit beyond the first 3 are left out" in text
    assert "which rows belong to which unit is private" in text
    assert str(N) not in re.sub(r"[0-9.e-]*\.[0-9.e-]*", "", text)  # n is private now
    with pytest.raises(ValueError, match="leave out jit_model_args"):
        MCMC(
            DPPenalty(model, eps=5.0, prepare=False, step_size=0.1, unit="person", max_rows_per_unit=3),
            num_warmup=3,
            num_samples=4,
            progress_bar=False,
            jit_model_args=True,
        ).run(jax.random.key(0), *ARGS, **KWARGS)


@pytest.mark.nightly
def test_an_audit_of_persons_holds_with_units_and_fails_without():
    """Five rows that move together: five times the clip bound where each is clipped by itself."""

    table, neighbor = (np.array([value] * 5 + [np.nan], np.float32) for value in (1e6, -1e6))

    def found(unit):
        def make():
            return DPSGLD(gaussian, eps=1.0, delta=0.05, step_size=0.02, clip_grad=1.0, unit=unit)

        return audit(make, (table,), (neighbor,), num_samples=3, trials=1500, confidence=1 - 1e-5)

    assert found(np.array([0] * 5 + [1])).holds
    assert not found(None).holds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"unit": PERSON, "neighboring_relation": "add_or_remove_one", "delta": 1e-3},
            "unit tells n.*give max_rows_per_unit",
        ),
        ({"unit": PERSON, "max_rows_per_unit": 3}, "give `unit` as the name of the model's argument"),
        ({"max_rows_per_unit": 3}, "give `unit` as the name"),
        ({"unit": "person", "max_rows_per_unit": 0}, "max_rows_per_unit must be a positive integer, got 0"),
        ({"unit": PERSON, "n0": 10}, "give power"),
        ({"unit": PERSON, "owners": np.zeros(N, int)}, "cannot be combined"),
        ({"unit": np.ma.array(PERSON, mask=PERSON == 3)}, "masked values are nobody's"),
    ],
)
def test_what_does_not_go_with_units_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, **options)
    with pytest.raises(ValueError, match="row by row"):
        DPExponentialFamily(model, eps=1.0, unit=PERSON)


@pytest.mark.parametrize(
    ("unit", "message"),
    [
        (PERSON[:-1], r"as integers of shape \(60,\), none.*got shape \(59,\)"),
        (PERSON.astype(float), "got shape .*float64"),
        (np.array([1, np.nan, *[1] * 58], dtype=object), r"got shape .*object.*pandas\.factorize"),
        ("visitor", "names no argument of the model: X, person, y"),
        ("X", r"unit='X' must say"),
        (np.zeros(N, int), "nobody to hide among"),
        (np.repeat([0, 1, 2], [58, 1, 1]), None),
        (np.repeat([0, 1], [30, 30]), None),
        (np.repeat(np.arange(9), [52, *[1] * 8]), None),  # 7.8 places for each row
        (
            np.repeat(np.arange(11), [50, *[1] * 10]),
            r"the largest unit has 50 of 60 rows.*mean of the 11 units is 5.45",
        ),
    ],
)
def test_what_is_no_unit_is_named(unit, message):
    if message is None:
        sizes = np.bincount(unit)
        assert units(unit).layout(ARGS, KWARGS).index.shape == (len(sizes), sizes.max())
        return
    with pytest.raises(ValueError, match=message):
        units(unit)


def test_private_units_need_a_private_argument():
    def model(y, person=None):
        gaussian(y)

    kernel = DPPenalty(
        model,
        eps=1.0,
        prepare=False,
        step_size=0.1,
        unit="person",
        max_rows_per_unit=3,
        private_args=["y"],
        num_iterations=1,
    )
    with pytest.raises(ValueError, match="unit='person' names a public argument: name it in private_args"):
        kernel.init(jax.random.key(0), 0, None, (X[:, 0],), {"person": PERSON})


@pytest.mark.parametrize("are_counted", [True, False])
def test_a_number_of_units_that_is_private_is_not_told(are_counted):
    separated = separate(model, ARGS, KWARGS)
    grouped = group_rows(separated, "person", ARGS, KWARGS, max_rows_per_unit=N, are_counted=are_counted)
    other = np.arange(N)
    with pytest.raises(ValueError, match="this kernel was planned for") as error:
        grouped.layout(ARGS, KWARGS | {"person": other})
    numbers = [str(len(np.unique(unit))) for unit in (PERSON, other)]
    assert re.findall(r"\d+", str(error.value)) == (numbers if are_counted else [])


@pytest.mark.statistical
def test_other_units_are_another_query_for_a_noise_seed():
    def planned(unit, person=PERSON):
        kernel = DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, unit=unit, noise_seed=1, num_iterations=1)
        kernel.prepare(*ARGS, **KWARGS | {"person": person})
        _, drawn = kernel.ledger.grant({"ratio": Request(1, (1,))}, 0, kernel.ledger.plan.num_rows, b"")
        return kernel.ledger.plan.unit, drawn["ratio"].noise.tolist()

    assert planned(PERSON) == planned(PERSON)
    for one, other in (((PERSON,), (PERSON[::-1],)), (("person",), ("person", PERSON[::-1]))):
        assert all(a != b for a, b in zip(planned(*one), planned(*other), strict=True))


@pytest.mark.parametrize("in_place", some_every_day([False, True], [True]))
def test_rows_that_belong_to_others_later_are_refused(in_place):
    """The rows were grouped once: another column would be clipped by the groups of the first."""
    kernel = DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, unit="person", num_iterations=2)
    person = PERSON.copy()
    kernel.separate(ARGS, KWARGS | {"person": person})
    other = person if in_place else PERSON.copy()
    other[:] = PERSON[::-1]
    with pytest.raises(ValueError, match="says otherwise than before which rows are whose"):
        kernel.init(jax.random.key(0), 0, None, ARGS, KWARGS | {"person": other})


def test_an_array_that_is_changed_later_changes_nothing():
    person = PERSON.copy()
    kernel = DPPenalty(model, eps=1.0, prepare=False, step_size=0.1, unit=person)
    person[:] = 0
    np.testing.assert_array_equal(kernel.separate(ARGS, KWARGS).number, units().number)


def test_an_audit_takes_no_budget_and_no_seed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="a new privacy budget"):
        budget = PrivacyBudget(tmp_path / "table.budget", eps=3.0, delta=1e-3)
    for option in ({"noise_seed": 1}, {"budget": budget}):
        with pytest.raises(ValueError, match="leave out `budget` and `noise_seed`"):
            audit(lambda option=option: DPSGLD(gaussian, eps=1.0, **option), (X[:, 0],), (X[:, 0],))
    assert budget.charges == ()


@pytest.mark.parametrize(
    "ids", [np.array([f"Jane Doe {i}" for i in PERSON]), PERSON + 70_000_000], ids=["names", "numbers"]
)
def test_who_a_unit_is_stays_with_the_curator(ids):
    """A kernel is pickled with its units: which rows are whose is public, and not who they are."""
    kernel = DPPenalty(model, eps=2.0, prepare=False, step_size=0.05, unit=ids)
    kept = pickle.dumps(kernel)
    assert not any(np.unique(ids)[k : k + 1].tobytes() in kept for k in range(len(np.unique(ids))))
    np.testing.assert_array_equal(kernel.settings.unit, number_units(PERSON))


def test_whose_rows_are_private_is_not_told_by_what_is_wrong_with_them():
    """How many rows there are is private, too, under add-or-remove-one."""
    grouped = group_rows(separate(model, ARGS, KWARGS), "person", ARGS, KWARGS, max_rows_per_unit=2, are_counted=False)
    for wrong in (np.full(N, np.nan), np.zeros((N, 2), int)):
        with pytest.raises(ValueError, match="must say whose each of the rows is") as error:
            grouped.layout(ARGS, KWARGS | {"person": wrong})
        assert str(N) not in str(error.value)
    shorter = {"y": Y[:-1], "person": PERSON[:-1]}
    with pytest.raises(ValueError, match="must say whose each of the 60 rows is"):
        units("person").require_same("person", (X[:-1],), shorter)


def test_each_row_of_a_unit_has_a_key_of_its_own():
    grouped = units()
    words, present = jnp.array([3, 4], jnp.uint32), jnp.array([[True, True, False]])
    density = lambda z, row, key: row[0][0] * (key[0] % 1000).astype(jnp.float32)  # noqa: E731
    weights = jnp.array([[1.0, 10.0, 100.0]])
    keys = np.asarray(split_words(words, 3))[:, 0] % 1000
    found = grouped.per_unit(density)(jnp.zeros(1), (weights, present), words)
    assert float(found) == float(keys[0] + 10 * keys[1])
    assert len(set(keys.tolist())) == 3


def test_names_of_units_are_left_out_and_what_names_none_is_left_alone():
    np.testing.assert_array_equal(without_names(np.array(["b", "a", "b"])), [0, 1, 0])
    for ids in (np.array([1.5, np.nan]), np.array([[3, 1], [3, 1]])):
        np.testing.assert_array_equal(without_names(ids), ids)


def test_what_each_unit_is_is_no_public_argument():
    """It would be kept, and a deterministic site could release it."""

    def model(person, age, y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.deterministic("mean", b * age)
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(b * age[person], 1), obs=y)

    args = np.arange(180) % 60, np.linspace(-1, 1, 60).astype(np.float32), np.zeros(180, np.float32)
    with pytest.raises(ValueError, match=r"argument 'age' has one entry for each of the 60 units.*private_args"):
        DPHMC(model, eps=1.0, unit="person").separate(args, {})
    listed = args[0], dict(enumerate(args[1].tolist())), args[2]
    with pytest.raises(ValueError, match=r"argument 'age' is a dict of 60 numbers.*as many as there are units"):
        DPHMC(lambda person, age, y: model(person, jnp.ones(60), y), eps=1.0, unit="person").separate(listed, {})
    public = DPHMC(model, eps=1.0, unit="person", private_args=["person", "y"]).separate(args, {})
    assert [a.name for a in public.arguments if not a.private] == ["age"]
