"""P2: nothing that a run hands out depends on the rows except through the noisy sums.

The sums are replaced by constants; then everything reachable must be the same, bit for bit, for any two tables of the
same shape. A mutation that lets one exact number out is caught the same way.
"""

import functools
import importlib
import io
import itertools
import pickle
import re
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from types import FunctionType, MethodType, ModuleType

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest
from helpers.constant_sums import SECRET, ConstantSums, constant_moments, constant_sum
from jax.experimental.compilation_cache import compilation_cache

import numpyro_dp.kernels.base
import numpyro_dp.preparation.prepare
import numpyro_dp.privacy.release
from numpyro_dp import DPHMC, DPSGHMC, DPSGNHT, MCMC, DPBarker, DPPenalty, FixedBatches, to_arviz
from numpyro_dp.mcmc import _no_compilation_cache_on_disk as no_compilation_cache_on_disk
from numpyro_dp.preparation import Preparation
from tests.helpers.drawn import given_draw

pytestmark = pytest.mark.usefixtures("shared_surveys")

N, D = 40, 2


def model(X, y=None, group=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([D]).to_event(1))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.deterministic("contrast", b[0] - b[1])
    with numpyro.plate("rows", X.shape[0]):
        eta = numpyro.deterministic("eta", X @ b + a[group])
        numpyro.sample("y", dist.Normal(eta, 1.0), obs=y)


def tables():
    rng = np.random.default_rng(0)
    first = (np.full((N, D), SECRET), np.full(N, SECRET), np.zeros(N, int))
    second = (rng.normal(size=(N, D)), np.full(N, np.nan), np.full(N, 2))
    return first, second


KERNELS = {
    "hmc": lambda **options: DPHMC(model, eps=3.0, prepare=False, num_steps=2, **options),
    "hmc_reuse": lambda **options: DPHMC(model, eps=3.0, prepare=False, num_steps=2, leapfrog="reuse", **options),
    "penalty": lambda **options: DPPenalty(model, eps=3.0, prepare=False, guided=True, **options),
    "penalty_poisson": lambda **options: DPPenalty(model, eps=3.0, prepare=False, batch_size=10, **options),
    "penalty_fixed": lambda **options: DPPenalty(model, eps=3.0, prepare=False, batch_size=FixedBatches(10), **options),
    "barker": lambda **options: DPBarker(model, eps=3.0, **options),
    "sghmc": lambda **options: DPSGHMC(model, eps=3.0, num_steps=2, batch_size=10, **options),
    "sgnht": lambda **options: DPSGNHT(model, eps=3.0, **options),
    "hmc_prepared": lambda **options: DPHMC(model, eps=3.0, prepare=Preparation(force=True), **options),
    "hmc_walk": lambda **options: DPHMC(model, eps=3.0, prepare=Preparation(mode="walk", force=True), **options),
    "penalty_prepared": lambda **options: DPPenalty(model, eps=3.0, prepare=Preparation(force=True), **options),
    "hmc_unit": lambda **options: DPHMC(
        model, eps=3.0, prepare=Preparation(force=True), unit=np.arange(N) // 4, **options
    ),
}


@pytest.fixture
def constant_sums(monkeypatch):
    """The mechanism, told nothing: every clipped sum is the same number."""
    monkeypatch.setattr(numpyro_dp.privacy.release, "StructuredRows", ConstantSums)
    monkeypatch.setattr(numpyro_dp.privacy.release, "clipped_sum", constant_sum)
    monkeypatch.setattr(numpyro_dp.privacy.release, "clipped_moments", constant_moments)


def run(make, table, *, stock, chain_method, progress_bar=False):
    """Everything that a run hands out, by name."""
    X, y, group = table
    planned = {"num_iterations": 9, "num_chains": 2} if stock else {}
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        kernel = make(noise_seed=11, **planned)
        mcmc = (numpyro.infer.MCMC if stock else MCMC)(
            kernel, num_warmup=4, num_samples=5, num_chains=2, chain_method=chain_method, progress_bar=progress_bar
        )
        fields = tuple(f for f in numpyro_dp.kernels.base.DPState._fields if f != "z") + ("z.b",)
        mcmc.run(jax.random.PRNGKey(0), X, y=y, group=group, extra_fields=fields)
        mcmc.print_summary()
        idata = to_arviz(mcmc)
        print(arviz.summary(idata))
    released = {
        "samples": mcmc.get_samples(group_by_chain=True),
        "extra": mcmc.get_extra_fields(group_by_chain=True),
        "last_state": mcmc.last_state,
        "kernel": pickle.dumps(kernel),
        "prepared": pickle.dumps(getattr(kernel, "prepared", None)),
        "text": re.sub(r"\d\d:\d\d| *[\d.?]+(it/s|s/it)", "", text.getvalue()),
        "warnings": [str(w.message) for w in warned],
        "report": mcmc.sampler.privacy.to_json(),
        "arviz": {
            f"{group}/{name}": np.asarray(idata[group][name])
            for group in ("posterior", "sample_stats")
            for name in idata[group].data_vars
        },
        "attributes": dict(idata.attrs),
        "from_numpyro": _groups(arviz.from_numpyro(mcmc)),
    }
    if not stock:
        released["mcmc"] = pickle.dumps(mcmc)
    return released, mcmc


def _groups(idata):
    names = idata.groups() if callable(idata.groups) else [g.strip("/") for g in idata.groups if g != "/"]
    return {name: {v: np.asarray(idata[name][v]) for v in idata[name].data_vars} for name in names}


def assert_same(first, second, path=""):
    assert type(first) is type(second), path
    if isinstance(first, dict):
        assert first.keys() == second.keys(), path
        for key in first:
            assert_same(first[key], second[key], f"{path}.{key}")
    elif isinstance(first, str | bytes | list):
        assert first == second, path
    else:
        leaves, others = jax.tree.leaves(first), jax.tree.leaves(second)
        assert len(leaves) == len(others), path
        for a, b in zip(leaves, others, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=path)


# All kernels, options and chain methods, and more of what is reachable: `tests/privacy/test_taint.py`.
@pytest.mark.parametrize(
    ("name", "chain_method"),
    [
        ("penalty", "vectorized"),
        pytest.param("penalty_prepared", "vectorized", marks=pytest.mark.nightly),
        pytest.param("hmc", "parallel", marks=pytest.mark.nightly),
    ],
)
def test_everything_released_is_the_same_for_any_table(name, chain_method, constant_sums):
    first, second = (run(KERNELS[name], table, stock=False, chain_method=chain_method)[0] for table in tables())
    assert_same(first, second)
    assert set(first["samples"]) == {"a", "b", "contrast"}
    assert set(first["from_numpyro"]) <= {"posterior", "sample_stats"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["penalty_poisson", "hmc_prepared"])
def test_also_in_the_stock_mcmc(name, constant_sums):
    first, second = (run(KERNELS[name], table, stock=True, chain_method="vectorized")[0] for table in tables())
    assert_same(first, second)
    assert set(first["from_numpyro"]) <= {"posterior", "sample_stats"}


def test_the_progress_bar_shows_nothing_private(constant_sums, monkeypatch):
    """How often it is drawn is a matter of time; what it says of an iteration must be the same."""
    monkeypatch.delenv("COLUMNS", raising=False)  # else a bar ends where its times leave no room

    def shown(table):
        released = run(KERNELS["hmc"], table, stock=False, chain_method="sequential", progress_bar=True)[0]
        bars, chain, before = {}, 0, -1
        for line in re.split("[\r\n]", released.pop("text")):
            if percent := re.search(r"(\d+)%\|", line):
                chain += int(percent[1]) < before  # the next one begins
                before = int(percent[1])
                bars[chain, line.split("|")[0]] = line
        return bars, released

    (first, first_released), (second, second_released) = map(shown, tables())
    assert all(bar.endswith("]") for bar in first.values())
    assert any("of eps 3 spent, acc. prob" in bar for bar in first.values())
    common = first.keys() & second.keys()
    assert len(common) >= 2
    assert {key: first[key] for key in common} == {key: second[key] for key in common}
    assert_same(first_released, second_released)


def test_a_mutation_that_releases_an_exact_value_is_caught(constant_sums, monkeypatch):
    exact = numpyro_dp.kernels.base.DPKernel._step

    def leaking(self, separated, target, traced, state):
        new = exact(self, separated, target, traced, state)
        row = target._row_log_density(separated.ravel(state.z), tuple(x[:1] for x in target.vault._rows))
        return new._replace(mean_accept_prob=new.mean_accept_prob + 1e-6 * jnp.nan_to_num(row))

    monkeypatch.setattr(numpyro_dp.kernels.base.DPKernel, "_step", leaking)
    first, second = (run(KERNELS["penalty"], t, stock=False, chain_method="vectorized")[0] for t in tables())
    with pytest.raises(AssertionError):
        assert_same(first, second)


@pytest.mark.nightly
def test_a_preparation_that_lets_an_exact_number_out_is_caught(constant_sums, monkeypatch):
    exact = numpyro_dp.preparation.prepare.search

    def leaking(survey, *args):
        found = exact(survey, *args)
        value = float(np.ravel(survey._target.vault._rows[0])[0])
        return found._replace(frame=found.frame._replace(center=found.frame.center + 1e-6 * value))

    monkeypatch.setattr(numpyro_dp.preparation.prepare, "search", leaking)
    first, second = (run(KERNELS["penalty_prepared"], t, stock=False, chain_method="vectorized")[0] for t in tables())
    with pytest.raises(AssertionError):
        assert_same(first, second)


# -- A search that decides as it goes ----------------------------------------------------------------------------------


def logistic(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def neighbours(n=1500):
    """Two tables that differ in one row, which is as far away as can be in one of them."""
    rng = np.random.default_rng(2)
    X = rng.normal(size=(n, 2))
    y = (rng.uniform(size=n) < 1 / (1 + np.exp(-X @ [1.0, -2.0]))).astype(int)
    other = X.copy()
    other[7] = 1e30, np.nan
    return (X, y), (other, y)


def prepared_on(table, mode):
    """All that a preparation decided and released, and how its budget was spent."""
    kernel = DPHMC(logistic, eps=4.0, prepare=Preparation(mode=mode, force=True), noise_seed=3, num_iterations=50)
    kernel.prepare(table[0], y=table[1])
    return {
        "prepared": kernel.prepared._replace(mode=0, coordinates=(), mirror=None),
        "what": [kernel.prepared.mode, str(kernel.prepared.mirror)],
        "plan": list(kernel.ledger.plan.kinds.items()),
        "made": kernel.ledger.spent(),
        "report": kernel.privacy.to_json(),
    }


@pytest.fixture
def sums_of_another_table(monkeypatch):
    """All sums are of a third table: they say what a table may say, and nothing about the one that is given."""
    others = tuple(jnp.asarray(part) for part in neighbours()[0])
    of = numpyro_dp.privacy.release.Vault._of

    def elsewhere(self, rows):
        return of(self, tuple(other.astype(row.dtype) for other, row in zip((*others, *rows[2:]), rows, strict=False)))

    monkeypatch.setattr(numpyro_dp.privacy.release.Vault, "_of", elsewhere)


@pytest.mark.parametrize("mode", ["surrogate", pytest.param("walk", marks=pytest.mark.nightly)])
def test_a_search_goes_by_its_sums_only(mode, sums_of_another_table):
    """How many stages there are, what each costs and where it looks: on another table that is the same, bit for bit.

    The sums here are such that it goes on for several rounds, arrives and ends: it decides something.
    """
    rng = np.random.default_rng(4)
    given = neighbours()[1], (np.full((1500, 2), SECRET), rng.integers(0, 2, 1500))
    first, second = (prepared_on(table, mode) for table in given)
    assert_same(first, second)
    stages = [name for name, _ in first["plan"] if name.startswith("derivatives")]
    assert len(stages) >= 3
    assert len({first["plan"][k][1].mechanisms[0].noise_multiplier for k in range(len(first["plan"]))}) > 5


def test_with_sums_of_its_own_a_neighbour_has_another_preparation():
    """So that the test above can fail: with the same noise one row shows, in what depends on sums."""
    first, second = (prepared_on(table, "surrogate") for table in neighbours())
    with pytest.raises(AssertionError):
        assert_same(first, second)


def test_a_search_that_goes_by_a_row_is_caught(sums_of_another_table, monkeypatch):
    """One that ends a round earlier or later as a row says."""
    module = importlib.import_module("numpyro_dp.preparation.search")
    once = module._round

    def leaking(survey, *args):
        here = once(survey, *args)
        row = float(survey._target.vault._rows[0][7, 0])
        return here._replace(edge=here.edge * (100 if row > 1e29 else 1))

    monkeypatch.setattr(module, "_round", leaking)
    first, second = (prepared_on(table, "surrogate") for table in neighbours())
    assert first["plan"] != second["plan"]


def arrays_reachable_from(thing, seen):
    """All arrays, also those in closures, but not those that only JAX's own caches know."""
    if id(thing) in seen or isinstance(thing, str | bytes | type | ModuleType):
        return
    seen[id(thing)] = thing
    if isinstance(thing, np.ndarray | jax.Array):
        yield thing
        return
    inside = []
    if isinstance(thing, FunctionType):
        inside = [cell.cell_contents for cell in thing.__closure__ or ()]
    elif isinstance(thing, MethodType):
        inside = [thing.__self__, thing.__func__]
    elif isinstance(thing, functools.partial):
        inside = [thing.func, thing.args, thing.keywords]
    elif isinstance(thing, dict | Mapping):
        inside = list(thing.values())
    elif isinstance(thing, list | tuple):
        inside = list(thing)
    for item in (*inside, *getattr(thing, "__dict__", {}).values()):
        yield from arrays_reachable_from(item, seen)


@pytest.mark.parametrize("name", ["penalty", pytest.param("penalty_prepared", marks=pytest.mark.nightly)])
def test_no_row_can_be_reached_from_a_kernel(name):
    table = [part[: N - 1] for part in tables()[0]]  # of its own shape, so that nothing is shared with other tests
    _, mcmc = run(KERNELS[name], table, stock=False, chain_method="vectorized")
    found = [np.asarray(array) for array in arrays_reachable_from(vars(mcmc), {}) if is_numeric(array)]
    assert len(found) > 10
    assert not any(np.isclose(array, SECRET).any() for array in found)


def is_numeric(array):
    return not jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) and np.issubdtype(array.dtype, np.number)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=() if name == "penalty" else pytest.mark.nightly)
        for name, make in KERNELS.items()
    ],
)
def test_pickles_hold_no_row(make):
    """Without any stub: the bytes of a row's values are nowhere in what is kept."""
    table = tables()[0]
    released, mcmc = run(make, table, stock=False, chain_method="vectorized")
    everything = [released["mcmc"], released["kernel"], pickle.dumps(jax.device_get(released["last_state"]))]
    for data in everything:
        for dtype in (np.float64, np.float32):
            assert np.array(SECRET, dtype).tobytes() not in data
    assert str(SECRET)[:6] not in released["text"]
    again = pickle.loads(released["mcmc"])
    assert again.privacy == mcmc.privacy
    np.testing.assert_array_equal(again.get_samples()["b"], mcmc.get_samples()["b"])
    with np.errstate(all="ignore"):  # of chains that stood still
        again.print_summary()
    np.testing.assert_array_equal(to_arviz(again)["posterior"]["b"], mcmc.get_samples(group_by_chain=True)["b"])


@pytest.mark.parametrize("options", [{"jit_model_args": True}, {}], ids=["as an argument", "since it is large"])
def test_no_value_is_warned_of_where_programs_take_the_table_as_an_argument(options, monkeypatch):
    """NumPy would warn of one beyond single precision, whoever casts it."""
    monkeypatch.setattr(numpyro_dp.kernels.base, "_LARGE_TABLE", 0)

    def location(y):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(b, 1.0), obs=y)

    kernel = DPPenalty(location, eps=1.0, prepare=False)
    mcmc = MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False, **options)
    mcmc.run(jax.random.key(0), np.append(np.zeros(300), 1e300))  # warnings are errors


def test_the_noise_seed_is_not_in_pickles():
    seed = 987654321987654321
    kernel = DPPenalty(model, eps=1.0, prepare=False, noise_seed=seed)
    mcmc = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    X, y, group = tables()[1]
    mcmc.run(jax.random.key(0), X, y=y, group=group)
    assert str(seed) not in mcmc.privacy.to_json() + str(mcmc.privacy)
    # The last state's typed key cannot be pickled by JAX; its data can.
    state = mcmc.last_state._replace(rng_key=jax.random.key_data(mcmc.last_state.rng_key))
    for data in (pickle.dumps(kernel), pickle.dumps(jax.device_get(state))):
        assert seed.to_bytes(8, "little") not in data
        assert str(seed).encode() not in data


def test_equal_noise_on_neighbouring_tables_moves_only_the_sums():
    """P11: with the same noise, replacing one row changes a released sum by at most the sensitivity."""
    rng = np.random.default_rng(1)
    X, y, group = rng.normal(size=(N, D)), rng.normal(size=N), rng.integers(0, 3, N)
    neighbour = X.copy()
    neighbour[3] = 1e30
    kernel = DPHMC(model, eps=3.0, prepare=False, num_iterations=5)
    kernel.init(jax.random.key(0), 2, None, (X,), {"y": y, "group": group})
    sums = []
    for table in (X, neighbour):
        separated = kernel.separate((table,), {"y": y, "group": group})
        target = kernel.target(separated, (table,), {"y": y, "group": group})
        draw = given_draw(5, hi=jnp.arange(5), lo=jnp.arange(5), ledger=kernel.ledger)
        sums.append(np.asarray(target.gradient(draw, jnp.linspace(-1, 1, 5), 0.7).value, float))
    moved = np.linalg.norm(sums[0] - sums[1])
    assert 0 < moved <= 2 * 0.7 + 1e-3  # float32 resolves no more beside the noise


def test_fresh_noise_makes_two_equal_runs_different():
    """P9: the key that a user passes is not enough to replay the noise."""
    X, y, group = tables()[1]
    draws = []
    for _ in range(2):
        mcmc = MCMC(DPPenalty(model, eps=1.0, prepare=False), num_warmup=2, num_samples=20, progress_bar=False)
        mcmc.run(jax.random.key(0), X, y=y, group=group, extra_fields=("accept_prob",))
        draws.append(mcmc.get_extra_fields()["accept_prob"])
    assert (draws[0] != draws[1]).any()


def test_an_error_in_the_run_leaves_no_data_behind():
    X, y, group = tables()[0]
    mcmc = MCMC(DPPenalty(model, eps=1.0, prepare=False), num_warmup=2, num_samples=4, progress_bar=False)
    with pytest.raises(ValueError, match="init_params"):
        mcmc.run(jax.random.key(0), X, y=y, group=group, init_params={"b": jnp.zeros(7)})
    assert np.array(SECRET, np.float32).tobytes() not in pickle.dumps(mcmc)
    assert np.array(SECRET).tobytes() not in pickle.dumps(mcmc)


def test_pickles_under_add_or_remove_do_not_tell_n():
    X, y, group = tables()[1]
    rows = [np.resize(part, (43, *part.shape[1:])) for part in (X, y, group)]
    kernel = DPPenalty(model, eps=1.0, prepare=False, delta=1e-6, neighboring_relation="add_or_remove_one")
    mcmc = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), rows[0], y=rows[1], group=rows[2])
    again = pickle.loads(pickle.dumps(mcmc))
    assert again.privacy == mcmc.privacy
    assert again.privacy.num_rows is None

    def numbers(value, seen):
        """Every integer that can be reached."""
        if id(value) in seen or isinstance(value, str | bytes | type):
            return
        seen.add(id(value))
        if isinstance(value, int):
            yield value
        elif isinstance(value, np.ndarray | jax.Array):
            yield from value.shape
        elif isinstance(value, dict):
            for item in value.values():
                yield from numbers(item, seen)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from numbers(item, seen)
        elif hasattr(value, "__dict__") and not callable(value):
            yield from numbers(vars(value), seen)

    assert 43 not in set(numbers(vars(again), set()))


@pytest.fixture
def cache(tmp_path):
    """JAX's persistent cache, which keeps each program on disk; NumPyro's programs hold the arguments."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_enable_compilation_cache")
    before = [getattr(jax.config, name) for name in names]
    for name, value in zip(names, (str(tmp_path), 0.0, True), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def require_no_program_with_rows(folder):
    for path in folder.rglob("*"):
        assert "fori_collect" not in path.name
        data = path.read_bytes() if path.is_file() else b""
        assert np.full(4, SECRET, np.float32).tobytes() not in data


def is_on(folder):
    """Whether a program that nobody has compiled before is kept."""
    kept, number = len(list(folder.rglob("*"))), float(next(_numbers))
    jax.jit(lambda x: x * number)(np.ones(5)).block_until_ready()
    return len(list(folder.rglob("*"))) > kept


_numbers = itertools.count(3)


class Watched(DPPenalty):
    """A kernel that does something in a run, before the run's programs are compiled."""

    def __init__(self, act):
        super().__init__(model, eps=1.0, prepare=False)
        self._act = act

    def prepare(self, *args, **kwargs):
        self._act()
        super().prepare(*args, **kwargs)


def run_on_secrets(kernel):
    X, y, group = tables()[0]
    mcmc = MCMC(kernel, num_warmup=2, num_samples=4, progress_bar=False)
    mcmc.run(jax.random.key(0), X, y=y, group=group)


def test_no_compiled_program_with_the_table_is_kept_on_disk(cache):
    assert is_on(cache)
    run_on_secrets(DPPenalty(model, eps=1.0, prepare=False))
    require_no_program_with_rows(cache)
    assert is_on(cache)


def test_no_program_is_kept_while_another_thread_has_a_private_run(cache):
    """A run that ends must not switch the cache on under one that is about to compile, nor leave it off."""
    first_has_begun, second_has_begun, first_has_ended = (threading.Event() for _ in range(3))

    def first():
        first_has_begun.set()
        assert second_has_begun.wait(60)

    def second():
        second_has_begun.set()
        assert first_has_ended.wait(60)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(run_on_secrets, Watched(first))
        assert first_has_begun.wait(60)
        other = pool.submit(run_on_secrets, Watched(second))
        one.result()
        first_has_ended.set()
        other.result()
    require_no_program_with_rows(cache)
    assert is_on(cache)


def test_no_program_is_kept_where_the_folder_of_the_cache_is_named_during_a_run(cache):
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    run_on_secrets(Watched(lambda: jax.config.update("jax_compilation_cache_dir", str(cache))))
    require_no_program_with_rows(cache)
    assert is_on(cache)


def test_another_folder_that_is_named_during_a_run_is_used_after_it(cache, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    run_on_secrets(Watched(lambda: jax.config.update("jax_compilation_cache_dir", str(other))))
    for folder in (cache, other):
        require_no_program_with_rows(folder)
    assert is_on(other)
    assert not is_on(cache)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_cache_is_afterwards_as_it_was(cache, enabled):
    """After runs that overlap in any order, runs within runs, and errors."""
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()
    runs = [no_compilation_cache_on_disk() for _ in range(3)]
    for k in range(3):
        runs[k].__enter__()
        assert not is_on(cache)
    for k in (1, 0):
        runs[k].__exit__(None, None, None)
        assert not is_on(cache)
    interrupt = KeyboardInterrupt()
    assert not runs[2].__exit__(KeyboardInterrupt, interrupt, None)
    assert is_on(cache) == enabled
    with pytest.raises(ZeroDivisionError):
        run_on_secrets(Watched(lambda: 1 / 0))
    assert is_on(cache) == enabled


def test_a_cache_that_is_enabled_during_a_run_is_switched_off_by_the_next_and_on_in_the_end(cache):
    jax.config.update("jax_enable_compilation_cache", False)
    with no_compilation_cache_on_disk():
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
        run_on_secrets(DPPenalty(model, eps=1.0, prepare=False))
        assert not is_on(cache)
    require_no_program_with_rows(cache)
    assert is_on(cache)
