"""Record and replay: two neighbouring tables, the same noise, and the integers that every release is made of.

A run on one table is recorded: each clipped sum, in steps of the grid, under the noise that hid it. Then the run is
repeated on a neighbouring table, and each release gives out what it gave out the first time. So the second run goes the
same way, and its sums are the answers to the same questions: they must differ by no more than the sensitivity that the
noise was made for. Whatever else is handed out must be the same, bit by bit (P2), and no noise may hide two sums.

On top of that, every released number must be a function of its integer: runs in which the sums and the noise reach the
door in other limbs must hand out the same (P16).

The configurations are those of test_taint.py: every kernel, option, relation, unit and precision. And models that
people write (`laws`) run on tables in which a unit holds anything.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import laws
from helpers.configurations import (
    CONFIGURATIONS,
    LOCATION,
    MEMBERSHIPS,
    UNITS,
    Configuration,
    N,
    Tables,
    persons,
)
from helpers.observation import IN_MEMORY, _known, _known_is_forgotten, _same_world, differences, observe_run  # noqa: F401

import numpyro_dp.chain.target
import numpyro_dp.privacy.clipping
import numpyro_dp.privacy.noise
import numpyro_dp.privacy.structured
import numpyro_dp.tools.sums
from numpyro_dp.privacy.clipping import GRID, ClippedSum, clipped_sum, sensitivity_steps
from numpyro_dp.privacy.noise import GridNoise
from numpyro_dp.tools.sums import release_sum

ROW, PERSON = 5, 3  # that neighbouring tables differ in


# -- Neighbours --------------------------------------------------------------------------------------------------------


def ordinary(tables: Tables) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    table = {"y": rng.normal(size=N)}
    if tables not in (LOCATION, MEMBERSHIPS):
        table = {"x": rng.normal(size=N), **table, "kind": rng.integers(0, 3, N)}
    return table | ({"person": persons(N, 4)} if "person" in tables.first() else {})


def extreme(table: dict[str, np.ndarray], rows: Any, sign: float) -> dict[str, np.ndarray]:
    """Rows whose contributions are clipped, on one side or the other."""
    changed = {name: column.copy() for name, column in table.items()}
    changed["y"][rows] = sign * 1e6
    if "x" in changed:
        changed["x"][rows] = 3.0
    return changed


def hostile(table: dict[str, np.ndarray], rows: Any) -> dict[str, np.ndarray]:
    changed = {name: column.copy() for name, column in table.items()}
    for name in ("x", "y"):
        if name in changed:
            changed[name][rows] = np.resize([np.nan, np.inf, -1e30], np.size(changed[name][rows]))
    return changed


def without(table: dict[str, np.ndarray], rows: Any) -> dict[str, np.ndarray]:
    return {name: np.delete(column, rows) for name, column in table.items()}


def neighbours(configuration: Configuration) -> dict[str, Tables]:
    """Pairs of tables that differ in one unit, by what it is about them."""
    tables, relation = configuration.tables, configuration.options.get("neighboring_relation", "replace_one")
    table = ordinary(tables)
    # A row that is removed from the end leaves all others the numbers by which they are drawn.
    last = relation == "add_or_remove_one" and "batch_size" in configuration.options
    if "person" in table:
        unit: Any = np.flatnonzero(table["person"] == (UNITS - 1 if last else PERSON))
    else:
        unit = slice(8, 12) if "unit" in configuration.options else np.array([N - 1 if last else ROW])
    upwards = extreme(table, unit, 1.0)
    if relation == "add_or_remove_one":
        pairs = {
            "removed": (upwards, without(upwards, unit)),
            "removed, hostile": (hostile(table, unit), without(table, unit)),
        }
    else:
        pairs = {"turned": (upwards, extreme(table, unit, -1.0)), "hostile": (upwards, hostile(table, unit))}
        if "max_rows_per_unit" in configuration.options:  # of which all but the last row go
            pairs["fewer"] = upwards, without(extreme(table, unit, -1.0), unit[:-1])
    return {
        name: dataclasses.replace(tables, first=lambda pair=pair: pair[0], second=lambda pair=pair: pair[1])
        for name, pair in pairs.items()
    }


# -- The recorder ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Recorder:
    """Records the sums of a run, and replays what was released of them in another.

    :ivar known: by noise: the sum, and public numbers that came with it.
    :ivar moved: of each release that was replayed, the L2 distance of the sums over the sensitivity.
    :ivar faults: what should not have been.
    """

    sensitivity: int
    replaying: bool = False
    known: dict[bytes, tuple] = dataclasses.field(default_factory=dict)
    moved: list[float] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)

    def meet(self, noise: np.ndarray, total: np.ndarray, public: Any, answer: Any) -> Any:
        """What this release gives out."""
        if not noise.any():  # no leave was given; what the step then makes of it is compared in the end
            return answer
        key, public = noise.tobytes(), [np.asarray(x).tobytes() for x in public]
        if not self.replaying:
            if key in self.known and not np.array_equal(self.known[key][0], total):
                self.faults.append("the same noise hides two sums")
            self.known[key] = total, public, answer
            return answer
        if key not in self.known:
            self.faults.append("a release that the first run did not make")
            return answer
        before, public_before, answered = self.known[key]
        if public != public_before:
            self.faults.append("a bound or a threshold depends on the table")
        self.moved.append(float(np.linalg.norm(np.ravel(total - before).astype(float))) / self.sensitivity)
        return answered

    def install(self, patch: pytest.MonkeyPatch) -> None:
        module, original = numpyro_dp.privacy.release, numpyro_dp.privacy.noise.release
        bit, batch_bit = numpyro_dp.privacy.noise.release_bit, numpyro_dp.privacy.noise.release_batch_bit

        def release(total: ClippedSum, noise: GridNoise | None):
            steps = original(total, noise)
            if noise is None:
                return steps

            def host(hi, lo, noise_hi, noise_lo, bound, *answer):
                return self.meet(whole(noise_hi, noise_lo), whole(hi, lo), [bound], answer)

            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in steps)
            return type(steps)(*ask_host(host, shapes, total.hi, total.lo, *noise, total.bound, *steps))

        def release_bit(total, noise, threshold):
            def host(hi, lo, noise_hi, noise_lo, bound, threshold, answer):
                return self.meet(whole(noise_hi, noise_lo), whole(hi, lo), [bound, threshold], answer)

            answer = bit(total, noise, threshold)
            shape = jax.ShapeDtypeStruct(answer.shape, answer.dtype)
            return ask_host(host, shape, total.hi, total.lo, *noise, total.bound, threshold, answer)

        def release_batch_bit(moments, weight, factor, variance, noise, threshold):
            def host(first, second, noise_hi, noise_lo, bound, threshold, answer):
                noise, size = whole(noise_hi, noise_lo), moments.size
                answer = self.meet(noise, np.array([first, second]), [bound, threshold], answer)
                if self.replaying:
                    before = self.known[noise.tobytes()][0].astype(float)
                    spreads = [b - a * a / size for a, b in (before, (float(first), float(second)))]
                    of_mean = abs(float(first) - before[0]) / 2**16
                    of_variance = abs(spreads[1] - spreads[0]) / (2**32 * (1 - 1 / size))
                    self.moved[-1] = max(of_mean, of_variance)
                return answer

            answer = batch_bit(moments, weight, factor, variance, noise, threshold)
            shape = jax.ShapeDtypeStruct(answer.shape, answer.dtype)
            return ask_host(host, shape, moments.first, moments.second, *noise, moments.bound, threshold, answer)

        patch.setattr(module, "release", release)
        patch.setattr(module, "release_bit", release_bit)
        patch.setattr(module, "release_batch_bit", release_batch_bit)


# In branches of vectorized chains other callbacks are not allowed.
ask_host = partial(jax.pure_callback, vmap_method="sequential")


def whole(hi: Any, lo: Any) -> np.ndarray:
    return (np.asarray(hi, np.int64) << 24) + np.asarray(lo, np.int64)


def replayed(world: Any, configuration: Configuration, tables: Tables, observe: Callable = observe_run) -> tuple:
    """Two recorded runs, and the recorder."""
    relation = configuration.options.get("neighboring_relation", "replace_one")
    recorder = Recorder(sensitivity_steps(relation))
    _known.clear()  # programs of other tests, which other recorders listen to
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        first = observe(world, configuration, tables, 0)
        recorder.replaying = True
        second = observe(world, configuration, tables, 1)
    _known.clear()
    return first, second, recorder


def faults_of(world: Any, configuration: Configuration, tables: Tables) -> list[str]:
    faults = []
    for seed in range(8):  # of which one draws a batch with the unit, or bounds by which a person is not nothing
        options = configuration.options | ({"noise_seed": seed} if seed else {})
        found, has_seen = faults_and_sight(world, dataclasses.replace(configuration, options=options), tables)
        faults += found
        if has_seen:
            return faults
        if not configuration.options.keys() & {"batch_size", "unit"}:
            break
    return [*faults, "no sum has seen the unit"]


def faults_and_sight(world: Any, configuration: Configuration, tables: Tables) -> tuple[list[str], bool]:
    first, second, recorder = replayed(world, configuration, tables)
    hides_size = configuration.hides_its_size
    faults = [*recorder.faults, *differences(first, second, without=IN_MEMORY if hides_size else ("package",))]
    # From one row to another is twice as far as to one that counts as nothing, which is no row of any table.
    most = 2 if configuration.options.get("neighboring_relation") == "zero_out" else 1
    if recorder.moved and max(recorder.moved) > most:
        faults.append(f"a sum moved by {max(recorder.moved):.4g} times its sensitivity")
    return faults, any(recorder.moved)


def marked(everyday: Callable[[str, str], bool]) -> list:
    return [
        pytest.param(name, pair, id=f"{name}-{pair}", marks=() if everyday(name, pair) else pytest.mark.nightly)
        for name, configuration in CONFIGURATIONS.items()
        for pair in neighbours(configuration)
    ]


EVERYDAY = {"hmc_plain"}
COUNTED_AS_0 = {
    "hmc_position",
    "hmc_rate",
    "penalty_rate",
    "barker_gaussian",
    "sgld_hidden",
    "sgnht_hidden",
    "sghmc_hidden",
}
"""Where a row that is not finite adds nothing, so that no sum moves when it is removed."""


@pytest.mark.parametrize(("name", "pair"), marked(lambda name, pair: name in EVERYDAY and "hostile" not in pair))
def test_sums_of_neighbours_differ_by_their_sensitivity_and_nothing_else_does(name, pair, same_world):
    configuration = CONFIGURATIONS[name]
    tables = neighbours(configuration)[pair]
    if pair == "removed, hostile" and name in COUNTED_AS_0:
        assert faults_and_sight(same_world, configuration, tables) == ([], False)
    else:
        assert faults_of(same_world, configuration, tables) == []


# -- Models that people write, and rows that hold anything -------------------------------------------------------------


def largest_move(case: laws.Case, hostile: list[dict[str, float]], eps: float = 4.0) -> float:
    """Of any sum of a whole run, from one table to a neighbour, over its sensitivity; the draws are the same."""
    recorder, draws = Recorder(sensitivity_steps(case.relation)), []
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        for table in laws.neighbours(case, hostile):
            draws.append(laws.run(case, table, eps))
            recorder.replaying = True
    assert recorder.faults == []
    for other in draws[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, draws[0])
    # From one row to another is twice as far as to one that counts as nothing, which is no row of any table.
    return max(recorder.moved) / (2 if case.relation == "zero_out" else 1)


@pytest.mark.filterwarnings("ignore:the posterior:numpyro_dp.PosteriorWarning")
@pytest.mark.filterwarnings("ignore:.*will give a blurred posterior:UserWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.statistical if n == "logistic" else pytest.mark.nightly) for n in laws.CASES],
)
def test_whatever_a_unit_holds_no_sum_moves_by_more_than_its_sensitivity(name):
    assert 0.4 < largest_move(laws.CASES[name], laws.HOSTILE) <= 1


# -- Another split of the same total -----------------------------------------------------------------------------------


def split_otherwise(patch: pytest.MonkeyPatch, normalise: bool = True) -> None:
    """Sums and noise come to the door in limbs that have carried, or have not."""
    original = numpyro_dp.privacy.noise.release

    def release(total, noise):
        carried = jnp.where(jnp.arange(total.hi.size).reshape(total.hi.shape) % 2 == 0, 60, -60)
        total = total._replace(hi=total.hi - carried, lo=total.lo + carried * 2**24)
        if noise is not None:
            noise = GridNoise(noise.hi - 1, noise.lo + 2**24)
        if not normalise:  # as version 0.1.0 did not
            return numpyro_dp.privacy.noise.NoisySteps(total.hi + noise.hi, total.lo + noise.lo)
        return original(total, noise)

    for module in (numpyro_dp.privacy.release, numpyro_dp.privacy.noise):
        patch.setattr(module, "release", release)


def splits_that_show(world: Any, configuration: Configuration, normalise: bool = True) -> list[str]:
    table = ordinary(configuration.tables)
    tables = dataclasses.replace(configuration.tables, first=lambda: table, second=lambda: table)
    _known.clear()
    first = observe_run(world, configuration, tables, 0)
    with pytest.MonkeyPatch.context() as patch:
        split_otherwise(patch, normalise)
        second = observe_run(world, configuration, tables, 1)
    return differences(first, second, without=("package",))


SPLIT = [pytest.param(n, marks=() if n in ("hmc_plain",) else pytest.mark.nightly) for n in CONFIGURATIONS]


@pytest.mark.parametrize("name", SPLIT)
def test_released_numbers_are_images_of_their_integers(name, same_world):
    assert splits_that_show(same_world, CONFIGURATIONS[name]) == []


def test_sums_of_rows_that_are_rounded_alone_are_the_same_in_other_chunks(monkeypatch):
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(3000, 3)), jnp.float32)
    found = []
    for elements, number in ((2**15, 2**8), (1, 2**6), (1, 2**9)):
        monkeypatch.setattr(numpyro_dp.privacy.clipping, "_CHUNK_ELEMENTS", elements)
        monkeypatch.setattr(numpyro_dp.privacy.clipping, "_FEWEST_CHUNK_ROWS", number)
        total = clipped_sum(lambda row: row[0][0, 1], (rows,), 1.0)
        found.append(int(whole(total.hi, total.lo)))
    assert found[1] == found[0]
    assert found[2] == found[0]


# -- Mutations: each kind of fault is noticed --------------------------------------------------------------------------

PLAIN = CONFIGURATIONS["hmc_plain"]


@pytest.mark.nightly
def test_a_sensitivity_that_is_too_small_is_noticed(same_world, monkeypatch):
    """Gradients that are clipped to 1.02 times the bound that their noise is made for."""
    monkeypatch.setattr(numpyro_dp.privacy.structured, "GRID", int(GRID * 1.02))
    radius = numpyro_dp.privacy.clipping.radius_by_blocks
    monkeypatch.setattr(numpyro_dp.privacy.clipping, "radius_by_blocks", lambda *sizes: 1.02 * radius(*sizes))
    found = faults_of(same_world, PLAIN, neighbours(PLAIN)["turned"])
    assert any("times its sensitivity" in fault for fault in found)


@pytest.mark.parametrize(
    "name", ["penalty", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("hmc_plain", "barker_batch"))]
)
@pytest.mark.statistical
def test_a_clip_that_is_missing_is_noticed(name, same_world, monkeypatch):
    steps = numpyro_dp.privacy.clipping.scalar_steps
    monkeypatch.setattr(
        numpyro_dp.privacy.clipping, "scalar_steps", lambda values, bound: steps(values, 4.0 * bound) * 4
    )
    configuration = CONFIGURATIONS[name]
    found = faults_of(same_world, configuration, neighbours(configuration)["turned"])
    assert any("times its sensitivity" in fault for fault in found)


@pytest.mark.nightly
def test_a_choice_by_an_exact_number_is_noticed(same_world, monkeypatch):
    target = numpyro_dp.chain.target.PrivateTarget
    original = target.log_ratio

    def log_ratio(self, draw, z, z_new, bound):
        exact = jnp.sum(jnp.sign(jnp.nan_to_num(self.vault._rows[-1])))
        return original(self, draw, z, z_new, bound * (1 + 1e-3 * exact))

    monkeypatch.setattr(target, "log_ratio", log_ratio)
    found = faults_of(same_world, PLAIN, neighbours(PLAIN)["turned"])
    assert any("depends on the table" in fault for fault in found)


@pytest.mark.nightly
def test_noise_that_is_used_twice_is_noticed(same_world, monkeypatch):
    draw = numpyro_dp.privacy.noise.NoiseSource.draw
    monkeypatch.setattr(
        numpyro_dp.privacy.noise.NoiseSource,
        "draw",
        lambda self, shape, mechanism, relation, nonce: draw(self, shape, mechanism, relation, b"always"),
    )
    found = faults_of(same_world, PLAIN, neighbours(PLAIN)["turned"])
    assert any("the same noise hides two sums" in fault for fault in found)


@pytest.mark.statistical
def test_limbs_that_are_not_normalised_are_noticed(same_world):
    """The hole of version 0.1.0."""
    assert splits_that_show(same_world, PLAIN, normalise=False)


# -- Sums that are released by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
@pytest.mark.parametrize("x64", [False, True])
def test_a_sum_by_hand_moves_by_its_sensitivity(relation, x64, monkeypatch):
    rng = np.random.default_rng(0)
    table = rng.normal(size=(40, 3))
    table[ROW] = 1e6
    recorder = Recorder(sensitivity_steps(relation))
    recorder.install(monkeypatch)
    monkeypatch.setattr(
        numpyro_dp.privacy.noise.NoiseSource, "__init__", lambda self, seed=None: setattr(self, "_seed", 3)
    )
    neighbor = np.delete(table, ROW, 0)
    if relation == "replace_one":
        neighbor = table.copy()
        neighbor[ROW] *= -1
    options = {"bound": 1.0, "eps": 1.0, "delta": 1e-5, "neighboring_relation": relation}
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", x64)
    try:
        first = release_sum(lambda r: r, table, **options)
        recorder.replaying = True
        second = release_sum(lambda r: r, neighbor, **options)
    finally:
        jax.config.update("jax_enable_x64", before)
    assert recorder.faults == []
    assert first.value.tobytes() == second.value.tobytes()
    assert 0.98 < max(recorder.moved) <= 1
