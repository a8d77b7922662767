"""Where the number of rows is private, nothing that is said or handed out tells it: not a refusal, not a site."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import some_every_day

import numpyro_dp.privacy.release
from numpyro_dp import (
    DPHMC,
    DPSGLD,
    MCMC,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    PoissonBatches,
    release_sum,
)
from numpyro_dp.model.separate import separate
from numpyro_dp.model.standins import LENGTHS
from numpyro_dp.privacy.clipping import ClippedSum

SIZES = (0, 1, 2, 49, 50, 51)  # of neighbouring tables; 50 is also a public size
KNOTS, BINS = np.linspace(0, 1, 50), [float(k) for k in range(50)]
ADDED = {"eps": 1.0, "delta": 1e-4, "neighboring_relation": "add_or_remove_one", "noise_seed": 7}


def table(n):
    return np.linspace(-1, 1, 2 * n, dtype=np.float32).reshape(n, 2), np.full(n, 0.5, np.float32)


def words(error):
    """All that is said, but for JAX's own note, which has none of the table."""
    return type(error).__name__, str(error), getattr(error, "__notes__", [])[-2:]


# -- Models, admitted and refused --------------------------------------------------------------------------------------


def linear(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


def around(mean, prior=lambda X: dist.Normal(0, 1), **sites):
    """A model whose rows have a mean of some kind."""

    def model(X, y):
        b = numpyro.sample("b", prior(X))
        for name, value in sites.items():
            numpyro.deterministic(name, value(b, X))
        numpyro.sample("y", dist.Normal(mean(b, X), 1.0), obs=y)

    return model


def plate_of_50(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("people", 50):
        numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


def value_per_row(X, y):
    with numpyro.plate("rows", X.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


def site_per_row(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    for k in range(X.shape[0]):
        numpyro.sample(f"y{k}", dist.Normal(b, 1.0), obs=y[k])


def memberships(X, y):
    loc = numpyro.sample("loc", dist.Normal(0, 1).expand([2]))
    with numpyro.plate("rows", X.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(loc[z], 1.0), obs=y)


def fifty_groups(X, y):
    with numpyro.plate("groups", 50):
        b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(b[jnp.int32(X[:, 0] > 0)], 1.0), obs=y)


ADMITTED = {
    "linear": linear,
    "public_knots": around(lambda b, X: b * KNOTS.mean() + jnp.asarray(KNOTS).sum()),
    "list_of_bins": around(lambda b, X: b * sum(BINS)),
    "as_many_groups": fifty_groups,
    "memberships": memberships,
    "site_by_the_size": around(lambda b, X: b, d=lambda b, X: b + 2e-4 * X.shape[0], e=lambda b, X: 2 * b),
    "site_as_long_as_the_table": around(lambda b, X: b, d=lambda b, X: b + jnp.zeros(X.shape[0]), e=lambda b, X: KNOTS),
    "site_from_rows": around(lambda b, X: b, d=lambda b, X: b * X.sum(), e=lambda b, X: 2 * b),
    "branch_that_no_table_meets": around(lambda b, X: b if X.shape[0] != 50 else 2 * b),
}
REFUSED = {
    "prior_by_the_size": (around(lambda b, X: b, lambda X: dist.Normal(0, 1 + X.shape[0])), "number of rows"),
    "prior_from_rows": (around(lambda b, X: b, lambda X: dist.Normal(X.mean(), 1)), "uses private argument 'X'"),
    "as_many_as_rows": (around(lambda b, X: b, lambda X: dist.Normal(0, 1).expand([X.shape[0]])), "(rows,) with all"),
    "scaled": (around(lambda b, X: b * X.shape[0]), "is not a sum over rows"),
    "mixed": (around(lambda b, X: b * X.mean()), "is not a sum over rows"),
    "column": (around(lambda b, X: b * X[:, :1]), "has shape (rows, rows)"),
    "table_as_a_matrix": (around(lambda b, X: b + jnp.linalg.pinv(X).sum()), ""),
    "shapes": (around(lambda b, X: b @ X), "sizes that go by it"),
    "values": (around(lambda b, X: b * float(X[0, 0])), "needs the values"),
    "plate_of_50": (plate_of_50, "'people' is a plate of rows: its size is written as a number"),
    "value_per_row": (value_per_row, "no latent sites beside 'b', which are integrated out"),
    "site_per_row": (site_per_row, "exists only for some numbers of rows"),
    "knots_beside_rows": (around(lambda b, X: b * jnp.asarray(KNOTS)), ""),
}


def outcome(model, args, **options):
    try:
        separated = separate(model, args, **options, public_size=False)
    except Exception as error:
        return words(error)
    return vars(separated) | {"num_rows": None, "prototype": jax.tree.map(np.shape, separated.prototype)}


LIKE_OTHERS = {"public_knots", "list_of_bins", "site_by_the_size", "site_as_long_as_the_table", "mixed"}


@pytest.mark.parametrize(
    "name",
    some_every_day(
        [*ADMITTED, *REFUSED], {*ADMITTED, *REFUSED} - LIKE_OTHERS - {"site_per_row", "table_as_a_matrix", "scaled"}
    ),
)
def test_a_model_is_refused_or_admitted_whatever_the_size(name):
    model, message = REFUSED.get(name) or (ADMITTED[name], None)
    sizes = SIZES if name != "site_per_row" else (49, 50)  # which takes its time
    first, *others = (outcome(model, table(n)) for n in sizes)
    assert all(other == first for other in others)
    assert isinstance(first, dict) == (message is None)
    if message is not None:
        assert message.lower() in str(first).lower()
        assert not any(str(length) in first[1] for length in LENGTHS) or first[0] != "UnsupportedModelError"
    else:
        assert set(first["dropped_sites"]) <= {"d"}
        assert bool(first["dropped_sites"]) == name.startswith("site")


def test_the_size_itself_is_known_where_sums_need_it():
    assert [separate(linear, table(n), public_size=False).num_rows for n in SIZES] == list(SIZES)


# -- Arguments ---------------------------------------------------------------------------------------------------------


def with_extra(X, y, extra):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]))
    numpyro.sample("y", dist.Normal(X @ b + jnp.sum(jnp.asarray(extra)), 1.0), obs=y)


@pytest.mark.parametrize(
    ("extra", "options", "message"),
    [
        (KNOTS, {"private_args": ["X", "y"]}, None),
        pytest.param(BINS, {"private_args": ["X", "y"]}, None, marks=pytest.mark.nightly),
        (BINS, {}, "argument 'extra' is a list that may hold rows"),
        ((), {}, "argument 'extra' is a tuple that may hold rows"),
        ({"scale": 2.0}, {}, "argument 'extra' is a dict that may hold rows"),
        (b"", {}, "argument 'extra' is a bytes that may hold rows"),
        pytest.param(np.ones((3, 50)), {"private_args": ["X", "y"]}, None, marks=pytest.mark.nightly),
        (np.array(2.0), {}, None),
        (np.ones(0), {"private_args": ["X", "y"]}, "argument 'extra' has no rows"),
        (KNOTS, {"private_args": ["X", "z"]}, "private_args names 'z', but the model's array arguments are: 'X', 'y'"),
        (KNOTS[:48], {}, "'X', 'y', 'extra' were taken for rows, but are not equally long"),
    ],
)
def test_what_is_beside_the_table_is_no_matter_of_its_size(extra, options, message):
    first, *others = (outcome(with_extra, (*table(n), extra), **options) for n in SIZES)
    assert all(other == first for other in others)
    assert isinstance(first, dict) == (message is None), first
    assert message is None or message in first[1]


def test_rows_in_a_list_tell_nothing():
    for made, kind in ((list, "list"), (lambda values: dict(enumerate(values)), "dict"), (bytes, "bytes")):
        first, *others = (outcome(with_extra, (*table(n), made(table(n)[1].astype(int).tolist()))) for n in SIZES)
        assert f"'extra' is a {kind}" in first[1]
        assert all(other == first for other in others)


def test_of_arrays_by_person_no_name_is_told():
    def model(rows, y):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([2]))
        x = jnp.stack([rows[name] for name in rows])
        numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)

    found = [outcome(model, ({f"alice{k}": np.ones(2) for k in range(n)}, np.ones(n))) for n in (30, 31)]
    assert found[0] == found[1]
    assert "'rows' (arrays in it), 'y' were taken for rows" in found[0][1]
    assert "alice" not in found[0][1]


def test_tables_of_different_length_are_refused_without_a_number():
    X, y = table(50)
    found = {outcome(linear, (X[:a], y[:b]))[1] for a, b in ((49, 50), (50, 49), (0, 1), (3, 50))}
    (message,) = found
    assert "'X', 'y' were taken for rows, but are not equally long" in message
    assert "private_args" in message
    assert not any(c.isdigit() for c in message.replace("1.", ""))


def test_a_public_size_that_is_that_of_the_stand_ins_is_none_of_theirs():
    for length in LENGTHS[:2]:
        knots = np.ones(length)
        assert isinstance(outcome(around(lambda b, X, knots=knots: b * knots.sum()), table(3)), dict)

        def groups(X, y, num_groups):
            b = numpyro.sample("b", dist.Normal(0, 1).expand([num_groups]))
            with numpyro.plate("rows", X.shape[0]):
                numpyro.sample("y", dist.Normal(b[jnp.int32(X[:, 0])], 1.0), obs=y)

        assert isinstance(outcome(groups, (*table(3), length)), dict)


# -- Runs --------------------------------------------------------------------------------------------------------------


def location(y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.deterministic("d", b + 2e-4 * y.shape[0])
    numpyro.sample("y", dist.Normal(b * KNOTS.max(), 1.0), obs=y)


def persons(X, y, person):
    linear(X, y)


CAP = {"unit": "person", "max_rows_per_unit": 2}
RUNS = {
    "penalty": lambda: DPPenalty(location, prepare=False, **ADDED),
    "penalty_rate": lambda: DPPenalty(location, prepare=False, batch_size=PoissonBatches(rate=0.3), **ADDED),
    "sgld": lambda: DPSGLD(location, **ADDED),
    "sgld_rate": lambda: DPSGLD(location, batch_size=PoissonBatches(rate=0.3), **ADDED),
    "barker": lambda: DPBarker(location, **ADDED),
    "hmc": lambda: DPHMC(location, prepare=False, **ADDED),
    "hmc_prepared": lambda: DPHMC(location, **ADDED),
    "persons": lambda: DPPenalty(persons, prepare=False, **CAP, **ADDED),
    "persons_rate": lambda: DPSGLD(persons, batch_size=PoissonBatches(rate=0.3), **CAP, **ADDED),
    "statistics": lambda: DPExponentialFamily(normal, bounds=(-3.0, 3.0), **ADDED),
}
REFUSED_RUNS = {
    "plate_of_50": lambda: DPPenalty(plate_of_50, prepare=False, **ADDED),
    "site_per_row": lambda: DPSGLD(site_per_row, **ADDED),
    "unit_of_no_kind": lambda: DPSGLD(persons, **(CAP | {"unit": "X"}), **ADDED),
    "unit_that_is_public": lambda: DPSGLD(persons, private_args=["X", "y"], **CAP, **ADDED),
    "fixed_batches": lambda: DPSGLD(location, batch_size=10, **ADDED),
}


def normal(y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(b, 1.0), obs=y)


def arguments(name, n, num_persons=None):
    X, y = table(n)
    if "person" in name or name.startswith("unit"):
        return X, y, np.arange(n, dtype=np.int32) % (num_persons or max(n // 2, 1))
    return (X, y) if name in REFUSED_RUNS and name != "fixed_batches" else (y,)


def handed_out(make, args):
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            mcmc = MCMC(make(), num_warmup=1, num_samples=2, progress_bar=False)
            mcmc.run(jax.random.key(0), *args)
        except Exception as error:
            return words(error), [str(w.message) for w in warned]
    samples = {name: np.asarray(value).tolist() for name, value in mcmc.get_samples().items()}
    return samples, str(mcmc.privacy), mcmc.privacy.to_json(), [str(w.message) for w in warned]


def constant_sum(per_row, rows, bound, width=1, size=None, owners=None, fixed_places=False, may_loop=False):
    """In the place of `clipped_sum`: the same for all rows, and for none."""
    shape = jax.eval_shape(per_row, tuple(jax.ShapeDtypeStruct((1, *r.shape[1:]), r.dtype) for r in rows)).shape
    return ClippedSum(jnp.zeros(shape, jnp.int32), jnp.full(shape, 17, jnp.int32), jnp.asarray(bound, jnp.float32))


@pytest.mark.parametrize(
    "name",
    some_every_day([*RUNS, *REFUSED_RUNS], {"hmc_prepared", "persons", *REFUSED_RUNS} - {"site_per_row"}),
)
def test_two_tables_that_differ_by_a_row_hand_out_the_same(name, monkeypatch):
    """With sums that are told nothing and noise that is the same."""
    monkeypatch.setattr(numpyro_dp.privacy.release, "clipped_sum", constant_sum)
    make = RUNS.get(name) or REFUSED_RUNS[name]
    sizes = (0, 1, 50, 51)
    if name in (
        "hmc_prepared",
        "unit_that_is_public",
    ):  # a search for bounds; a public argument, which may not be empty
        sizes = sizes[1:]
    first, *others = (handed_out(make, arguments(name, n)) for n in sizes)
    assert all(other == first for other in others)
    assert (len(first) == 4) == (name in RUNS), first
    if name in RUNS:
        assert "n is private" in first[1]


def test_one_person_alone_is_not_refused(monkeypatch):
    """How many there are is private; under replace-one it is public, and a single one is refused."""
    monkeypatch.setattr(numpyro_dp.privacy.release, "clipped_sum", constant_sum)
    one, two = (handed_out(RUNS["persons"], arguments("persons", 4, num_persons)) for num_persons in (1, 2))
    assert one == two
    make = functools.partial(
        DPPenalty, persons, prepare=False, **CAP, **(ADDED | {"neighboring_relation": "replace_one"})
    )
    refusal, _ = handed_out(make, arguments("persons", 4, 1))
    assert "nobody to hide among" in refusal[1]


@pytest.mark.parametrize("relation", some_every_day(["replace_one", "add_or_remove_one"], ["replace_one"]))
def test_where_a_person_may_have_more_rows_their_number_is_private(relation, monkeypatch):
    monkeypatch.setattr(numpyro_dp.privacy.release, "clipped_sum", constant_sum)
    make = functools.partial(DPPenalty, persons, prepare=False, **CAP, **(ADDED | {"neighboring_relation": relation}))
    first, *others = (handed_out(make, arguments("persons", n, 5)) for n in (49, 50, 51))
    assert all(other == first for other in others)
    refused = functools.partial(DPPenalty, plate_of_50, prepare=False, **(CAP | {"unit": "y"}), **ADDED)
    first, *others = (handed_out(refused, table(n)) for n in (49, 50, 51))
    assert "is a plate of rows" in first[0][1]
    assert all(other == first for other in others)


@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", some_every_day(RUNS, {"hmc_prepared", "persons_rate"}))
def test_runs_on_no_row_and_on_one(name, n):
    samples, *_ = handed_out(RUNS[name], arguments(name, n))
    assert isinstance(samples, dict), samples
    assert np.isfinite(samples["b"]).all()


def test_sums_over_no_row_and_over_one():
    options = {"bound": 1.0, "eps": 1e4, "delta": 1e-4, "neighboring_relation": "add_or_remove_one"}

    def pair(x, y):
        return jnp.stack([y, x[0] - x[0]])

    for n in (0, 1, 2):
        found = release_sum(pair, (np.ones((n, 2)), np.full(n, 0.5)), **options)
        np.testing.assert_allclose(found.value, [0.5 * n, 0], atol=0.1)
        assert "under add_or_remove_one" in str(found)
        assert release_sum(lambda y: y > 0, np.full(n, 0.5), **options).value == pytest.approx(n, abs=0.1)
    with pytest.raises(ValueError, match="argument 'y' has no rows"):
        release_sum(lambda y: y, np.ones(0), bound=1.0, eps=1.0)
