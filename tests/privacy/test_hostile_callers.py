"""Classes of somebody else's in the place of ours: they say one thing when they are checked, and later another."""

import contextlib
import copy
import dataclasses
import math
import pickle
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.drawn import given_draw
from jax import custom_batching
from jax.extend import random as extend_random

from numpyro_dp.privacy.batches import Batch, FixedBatches, PoissonBatches
from numpyro_dp.privacy.clipping import GRID, OwnerIndex, clipped_moments, penalized_sum
from numpyro_dp.privacy.draws import Opened, Slots, draws_now
from numpyro_dp.privacy.isolation import RowsMeetError, _jaxs_wrapped, alone
from numpyro_dp.privacy.ledger import (
    Ledger,
    Plan,
    PrivacyBudgetError,
    Releases,
    Request,
    Wanted,
    plan_for_budget,
    plan_for_noise,
)
from numpyro_dp.privacy.mechanisms import BarkerBatch, Gaussian, LogisticBit, PoissonGaussian
from numpyro_dp.privacy.noise import GridNoise, NoiseSource
from numpyro_dp.privacy.release import ChangeSum, GradientSum, Grid, PenalizedSum, RowSum, Vault
from numpyro_dp.privacy.structured import Part, RowStructure

N = 64
ROWS = (np.float32(1.2345) * np.linspace(-1, 1.3, N, dtype=np.float32),)
SUM = RowSum(lambda row: row[0][0], 2.0)


def vault(rows=ROWS, **options):
    return Vault(tuple(map(jnp.asarray, rows)), **{"neighboring_relation": "replace_one"} | options)


def planned(mechanism=Gaussian, count=4, eps=1.0):
    wanted = {"ratio": Wanted(lambda multiplier: (mechanism(multiplier),), (count,))}
    options = {"neighboring_relation": "replace_one", "num_iterations": count, "num_chains": 1, "num_rows": N}
    return plan_for_budget(eps=eps, delta=1e-5, wanted=wanted, **options)


def ledger_for(mechanism=Gaussian, count=4, seed=None):
    ledger = Ledger(NoiseSource(seed))
    ledger.commit(planned(mechanism, count))
    return ledger


def drawn(ledger, number=1):
    return draws_now(ledger, {"ratio": Request(number, (number,))}, b"")["ratio"]


# -- Draws and plans ---------------------------------------------------------------------------------------------------


class Unflattened:
    """Arrays that are a draw once a program has them."""

    def __init__(self, slots):
        self.slots = slots


jax.tree_util.register_pytree_node(
    Unflattened, lambda x: ((x.slots,), None), lambda _, children: Opened(children[0], Gaussian(1.0))
)


@pytest.mark.parametrize("made", [lambda slots: Opened(slots, Gaussian(1.0)), Unflattened])
def test_nobody_else_makes_a_draw_for_a_program(made):
    ledger = ledger_for()
    none = jnp.zeros(1, jnp.int32)
    slots = Slots(GridNoise(none, none), None, jnp.ones(1), none == 0, jnp.zeros((1, 1), jnp.uint32), none > 0)
    of = vault(ledger=ledger)
    with pytest.raises(TypeError, match="takes a draw of the ledger"):
        of.program(lambda vault, draw: vault.ask(draw, SUM).value)(of, made(slots))


def test_a_program_takes_draws_and_static_arguments_in_any_place():
    ledger = ledger_for(count=2)
    of = vault(ledger=ledger)
    program = of.program(lambda vault, k, x, draw: vault.ask(draw, SUM).value * k + x, static=(0,))
    assert np.isfinite(program(of, 2, jnp.ones(()), drawn(ledger)))
    with pytest.raises(PrivacyBudgetError, match="good for one release"):
        used = drawn(ledger)
        program(of, 2, used, program(of, 3, jnp.ones(()), used))


class Zero:
    """0 when it is checked, and what it is added to is 0, too."""

    def __index__(self):
        return 0

    def __add__(self, other):
        return 0

    __radd__ = __add__


def test_static_arguments_are_plain_numbers():
    of = vault(ledger=ledger_for())
    program = of.program(lambda vault, x: x + 1, static=(Zero(),))
    assert program(of, 1) == 2


def test_a_plan_is_not_replaced_by_one_without_privacy_or_of_another_relation():
    ledger, private = ledger_for(), planned()
    for other in (planned(eps=math.inf), dataclasses.replace(private, neighboring_relation="zero_out")):
        with pytest.raises(PrivacyBudgetError, match="under the same relation"):
            ledger.commit(other)
    assert ledger.plan == private
    ledger.commit(planned(count=3))
    assert ledger.plan.private


def test_noise_of_a_seed_is_new_each_time():
    """The same under two queries would cancel out."""
    ledger = ledger_for(seed=0)
    values = [float(vault(ledger=ledger).ask(drawn(ledger), RowSum(lambda row: 0.0, 1.0)).value) for _ in range(3)]
    assert len(set(values)) == 3
    again = ledger_for(seed=0)
    assert values[0] == float(vault(ledger=again).ask(drawn(again), RowSum(lambda row: 0.0, 1.0)).value)


def test_an_iteration_that_the_plan_does_not_have_gets_nothing():
    """Also where releases of another one are left."""
    ledger, of_each = Ledger(NoiseSource()), {"neighboring_relation": "replace_one", "num_chains": 1, "num_rows": N}
    wanted = {"ratio": Wanted(lambda multiplier: (Gaussian(multiplier), Gaussian(2 * multiplier)), (2, 2))}
    ledger.commit(plan_for_budget(eps=1.0, delta=1e-5, wanted=wanted, num_iterations=2, **of_each))
    for iteration, allowed in ((0, True), (1, True), (2, False), (7, False)):
        told = pytest.warns(RuntimeWarning, match="used up") if iteration == 2 else contextlib.nullcontext()
        with told:
            granted, drawn = ledger.grant({"ratio": Request(1, (1,))}, iteration, N, bytes([iteration]))
        assert granted == allowed
        assert drawn["ratio"].noise.any() == allowed
    assert ledger.spent() == {"ratio": (1, 1)}


def test_whoever_changes_a_plan_that_was_handed_out_changes_no_ledger():
    ledger = ledger_for()
    ledger.plan.kinds["ratio"] = Releases((Gaussian(1e-6),), (10**6,))
    assert ledger.plan == planned()


class SaysOnce(Plan):
    asked = 0

    @property
    def private(self):
        SaysOnce.asked += 1
        return SaysOnce.asked <= 1


class AlwaysEqual(float):
    def __eq__(self, other):
        return True

    __hash__ = float.__hash__


def test_a_plan_is_made_anew_of_plain_numbers():
    ledger, plan = Ledger(NoiseSource()), planned()
    ledger.commit(SaysOnce(**{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}))
    assert (type(ledger.plan), ledger.plan) == (Plan, plan)
    cheap = {"ratio": Releases((Gaussian(1e-3),), (1000,))}
    with pytest.raises(PrivacyBudgetError, match="these releases cost eps"):
        Ledger(NoiseSource()).commit(dataclasses.replace(plan, eps=AlwaysEqual(0.5), kinds=cheap))


@pytest.mark.parametrize("factor", [1 - 9e-7, 1 - 1e-8])
def test_a_plan_says_no_less_than_it_costs(factor):
    plan = planned()
    with pytest.raises(PrivacyBudgetError, match="these releases cost eps"):
        Ledger(NoiseSource()).commit(dataclasses.replace(plan, eps=plan.eps * factor))


def test_noise_that_is_given_is_in_range():
    options = {"neighboring_relation": "replace_one", "num_iterations": 1, "num_chains": 1, "num_rows": N}
    wanted = {"ratio": Wanted(lambda multiplier: (Gaussian(multiplier),), (1,))}
    with pytest.raises(PrivacyBudgetError, match="needs a noise multiplier of 1e\\+08, above"):
        plan_for_noise(noise_multipliers={"ratio": 1e8}, delta=1e-5, wanted=wanted, **options)
    tiny = plan_for_noise(noise_multipliers={"ratio": 1e-200}, delta=1e-5, wanted=wanted, **options)
    assert tiny.eps == math.inf
    assert LogisticBit(1e-200).rho == math.inf


class Many:
    """1 when it is read as a number, none when it is added to what is spent, and more than any place of a slot."""

    def __index__(self):
        return 1

    def __radd__(self, other):
        return 0

    def __gt__(self, other):
        return np.ones(np.shape(other), bool) if np.shape(other) else True

    __array_ufunc__ = None


def test_a_request_is_read_once():
    ledger = ledger_for()
    draw = draws_now(ledger, {"ratio": Request(Many(), (5,))}, b"")["ratio"]
    assert draw._slots[0].granted.tolist() == [True] + [False] * 4
    assert ledger.spent() == {"ratio": (1,)}
    assert ledger.grant({"ratio": Request(Many(), (5,))}, 0, N, b"")[0]
    assert ledger.spent() == {"ratio": (2,)}


def test_what_is_accounted_for_on_a_batch_is_not_asked_for_on_all_rows_now():
    ledger = ledger_for(lambda multiplier: PoissonGaussian(multiplier, 0.01, 1e-40))
    with pytest.raises(PrivacyBudgetError, match="asked for on AllRows"):
        draws_now(ledger, {"ratio": Request(1, (1,), PoissonBatches(rate=0.01))}, b"")


def test_whether_noise_is_reproducible_cannot_be_assigned():
    ledger = ledger_for(seed=3)
    with pytest.raises(AttributeError):
        ledger.reproducible = False
    assert ledger.reproducible
    assert pickle.loads(pickle.dumps(ledger)).reproducible
    before = ledger.__getstate__()
    before["reproducible"] = before.pop("_reproducible")
    read = Ledger.__new__(Ledger)
    read.__setstate__(before)
    assert read.reproducible


# -- Queries and rows --------------------------------------------------------------------------------------------------


class ReadAgain(PenalizedSum):
    @property
    def weight(self):
        raise AssertionError("nobody should ask")


class Unpacked(RowSum):
    def __iter__(self):
        raise AssertionError("nobody should ask")


def test_queries_are_of_our_own_classes():
    on_batches = vault(batches=FixedBatches(8))
    batch = Batch(np.arange(8), np.array(8))
    unpacked = Unpacked(SUM.per_row, 2.0)
    for ask in (
        lambda: on_batches.ask(given_draw(batch=batch), ReadAgain(SUM.per_row, 2.0, 1.0, 1.0)),
        lambda: vault().ask(given_draw(), unpacked),
        lambda: vault().keep(unpacked),
        lambda: vault(private=False).exact(unpacked),
    ):
        with pytest.raises(TypeError, match="queries are of the classes of"):
            ask()


class Tree:
    """A result with methods of its own, which would meet all rows' values at once."""

    met: ClassVar[list] = []

    def __init__(self, x):
        self.x = x
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            Tree.met.append(x)

    shape = property(lambda self: self.x.shape)
    dtype = property(lambda self: self.x.dtype)

    def astype(self, dtype):
        jax.debug.callback(lambda x: Tree.met.append(x), self.x)
        return self.x.astype(dtype)

    def __sub__(self, other):
        return self.astype(jnp.float32)


jax.tree_util.register_pytree_node(Tree, lambda tree: ((tree.x,), None), lambda _, children: Tree(children[0]))


def test_what_a_row_contributes_is_of_no_class_of_the_callers():
    part = Part("dot", np.array([[0]]), (1,))
    coefficients = RowStructure((part,), 1, lambda row: (Tree(row[0]),), lambda values, row: values[0][0])
    rest = RowStructure((part,), 1, lambda row: (row[0],), lambda values, row: Tree(values[0][0]))
    on_batches, batch = vault(batches=FixedBatches(8)), Batch(np.arange(8), np.array(8))
    wrapped = lambda row: Tree(row[0][0])  # noqa: E731
    for ask in (
        lambda: vault().ask(given_draw(), RowSum(wrapped, 2.0)),
        lambda: vault().keep(RowSum(wrapped, 2.0)),
        lambda: on_batches.ask(given_draw(batch=batch), PenalizedSum(wrapped, 2.0, 1.0, 1.0)),
        lambda: vault().with_structure(coefficients, 1),
        lambda: vault().with_structure(rest, 1).ask(given_draw(), ChangeSum(jnp.zeros(1), jnp.ones(1), 1.0)),
    ):
        with pytest.raises((ValueError, TypeError)):
            ask()
    jax.effects_barrier()
    assert not Tree.met
    assert alone(lambda row: (row, None, [row]), jnp.ones(3)).shapes[1] is None


def test_a_loop_that_rows_end_does_nothing_beside():
    """How often it does it tells of the longest row."""
    ticks = []

    def per_row(row, tick=True):
        def body(state):
            if tick:
                jax.debug.callback(lambda: ticks.append(1))
            return state + 1

        return jax.lax.while_loop(lambda state: state < row[0][0], body, 0.0)

    with pytest.raises(RowsMeetError, match="debug_callback"):
        vault().ask(given_draw(), RowSum(per_row, 2.0, 1, True))
    assert np.isfinite(vault().ask(given_draw(), RowSum(lambda row: per_row(row, False), 2.0, 1, True)).value)
    assert not ticks
    gamma = lambda row: jax.random.gamma(jax.random.key(0), jnp.abs(row[0][0]) + 1)  # noqa: E731
    assert np.isfinite(vault().ask(given_draw(), RowSum(gamma, 2.0, 1, True)).value)


@custom_batching.custom_vmap
def mixed(key):
    return jnp.zeros((), jnp.uint32)


@mixed.def_vmap
def _mixed_rows(size, batched, key):
    return jnp.broadcast_to(key.sum(dtype=jnp.uint32), (size,)), True


def test_random_keys_are_threefrys_own():
    """A generator of somebody else's may call itself anything; one row would move the sum by all the others."""

    def generator(tag):
        return extend_random.define_prng_impl(
            key_shape=(2,),
            seed=lambda seed: jnp.stack([mixed(jnp.full(2, seed, jnp.uint32))] * 2),
            split=lambda key, shape: jnp.broadcast_to(key, (*shape, 2)),
            random_bits=lambda key, width, shape: jnp.broadcast_to(mixed(key), shape),
            fold_in=lambda key, data: key,
            name=tag,
            tag=tag,
        )

    other = generator("fryx")

    def bits(row):
        data = jnp.stack([row[0][0].astype(jnp.uint32)] * 2)
        return jax.random.bits(jax.random.wrap_key_data(data, impl=other)).astype(jnp.float32)

    def seed(row):
        return jax.random.key_data(jax.random.key(row[0][0].astype(jnp.uint32), impl=other)).astype(jnp.float32)[0]

    for per_row in (bits, seed):
        with pytest.raises(RowsMeetError, match="other keys than threefry's"):
            vault().ask(given_draw(), RowSum(per_row, 1.0))
    own = lambda row: jax.random.bits(jax.random.key(row[0][0].astype(jnp.uint32))).astype(jnp.float32)  # noqa: E731
    vault().ask(given_draw(), RowSum(own, 1.0))


def wrapped_operation(jaxpr):
    for eqn in jaxpr.eqns:
        if "_prim" in eqn.params:
            return eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns") and (found := wrapped_operation(inner)):
                return found
    return None


@pytest.mark.skipif(not _jaxs_wrapped(), reason="this JAX wraps no operation")
def test_an_operation_that_was_changed_is_not_jaxs_own():
    eqn = wrapped_operation(jax.make_jaxpr(lambda x: jnp.ldexp(x, 2))(jnp.float32(1.0)).jaxpr)
    changed = copy.copy(eqn.params["_prim"])
    object.__setattr__(changed, "batch", lambda axis, args, dims: (jnp.broadcast_to(args[0].sum(), args[0].shape), 0))

    def per_row(row):
        out = eqn.primitive.bind(row[0][0], jnp.int32(2), **(eqn.params | {"_prim": changed}))
        return out[0] if isinstance(out, (list, tuple)) else out

    with pytest.raises(RowsMeetError):
        vault().ask(given_draw(), RowSum(per_row, 1.0))
    vault().ask(given_draw(), RowSum(lambda row: jnp.ldexp(row[0][0], 2), 1.0))


def moved(of_vault, first=1e4, second=-1e4, others=1.0):
    """How far one row moves a sum, in units of the clip bound."""
    values = [
        np.asarray(of_vault(vault((np.r_[x, np.full(N - 1, others)].astype(np.float32),)))) for x in (first, second)
    ]
    return np.linalg.norm(values[0] - values[1])


class Kind(str):
    def __ne__(self, other):
        return True

    __hash__ = str.__hash__


def test_kinds_of_parts_are_our_own_texts():
    structure = RowStructure(
        (Part(Kind("dot"), np.array([[0]]), (1,)),), 1, lambda row: (row[0],), lambda values, row: values[0][0]
    )
    ask = lambda of: of.with_structure(structure, 1).ask(given_draw(1), GradientSum(jnp.zeros(1), 1.0)).value  # noqa: E731
    assert moved(ask) <= 2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_place_of_low_precision_has_the_sensitivity_that_is_claimed(dtype):
    part = Part("direct", np.array([0, 1]), (2,))
    structure = RowStructure(
        (part,),
        2,
        lambda row: (None,),
        lambda values, row: values[0] @ jnp.array([1, 0.37], values[0].dtype) * row[0][0].astype(values[0].dtype),
    )
    gradient = GradientSum(jnp.zeros(2, dtype), 1.0)
    change = ChangeSum(jnp.zeros(2, dtype), jnp.ones(2, dtype), 1.0)
    assert moved(lambda of: of.with_structure(structure, 2).ask(given_draw(2), gradient).value) <= 2
    assert moved(lambda of: of.with_structure(structure, 2).ask(given_draw(), change).value, 1.0, 0.0) <= 2


@pytest.mark.parametrize("where", [range(5), [*range(N - 2, N), 100, 10**6]])
def test_places_beyond_the_table_are_no_rows(where):
    batch = Batch(np.resize(np.array(where, np.int32), 100), np.array(len(where)))
    many = Batch(np.full(100, 10**6, np.int32), np.array(100))
    of = vault((np.r_[np.zeros(N - 1), 1.0],), batches=PoissonBatches(rate=0.5))
    found = float(of.ask(given_draw(batch=batch), RowSum(SUM.per_row, 1.0)).value)
    assert abs(found - sum(k == N - 1 for k in where)) < 1e-5
    assert abs(float(of.ask(given_draw(batch=many), RowSum(SUM.per_row, 1.0)).value)) < 1e-5


@pytest.mark.parametrize("bound", [1e-30, 1.0, 1e15, 1.5e19, 1e30, 1e38])
@pytest.mark.parametrize("weight", [1.0, 1e10])
def test_penalized_sums_keep_their_sensitivity_at_any_bound(bound, weight):
    """Where the square of a bound is beyond the range of floats, too."""

    def steps(x, rest):
        rows = (jnp.asarray(np.r_[x, np.resize(rest, N - 1)], jnp.float32),)
        total = penalized_sum(clipped_moments(SUM.per_row, rows, jnp.float32(bound)), weight, 1.0)
        return (int(total.hi) << 24) + int(total.lo)

    for rest in (bound, 0.0, [bound, -bound], [bound, 0.0, 0.0]):
        found = [steps(x, rest) for x in (-bound, 0.0, bound, np.nan)]
        assert max(found) - min(found) <= 2 * GRID


@pytest.mark.parametrize("factor", [0, 0.5])
def test_a_penalty_has_the_factor_that_was_asked_for(factor):
    rows, weight = np.linspace(-1, 2, 8), 0.5
    batch = Batch(np.arange(8, dtype=np.int32), np.array(8))
    of = vault((rows,), batches=FixedBatches(8))
    found = float(of.ask(given_draw(batch=batch), PenalizedSum(SUM.per_row, 5.0, weight, factor)).value)
    expected = weight * rows.sum() - 0.5 * weight**2 * factor * ((rows - rows.mean()) ** 2).sum()
    assert found == pytest.approx(expected, abs=1e-4)


def test_a_table_without_rows_has_batches_of_no_row():
    of = vault((np.zeros((0, 3)),), batches=PoissonBatches(rate=0.5))
    batch = Batch(np.zeros(4, np.int32), np.array(0))
    found = of.ask(given_draw(3, batch=batch), RowSum(lambda row: 1.0 + row[0][0], 1.0)).value
    np.testing.assert_array_equal(found, np.zeros(3))


def test_a_sum_that_is_kept_has_no_copy():
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled: it is exact"):
            copied(vault().keep(SUM))


@pytest.mark.parametrize("exceeds", [True, False])
def test_a_bit_that_is_not_granted_says_nothing(exceeds):
    """Without a grant there is no noise: the bit would be exact."""
    draw = given_draw(mechanism=LogisticBit(1.0))
    draw._slots[0] = draw._slots[0]._replace(granted=jnp.zeros(1, bool))
    assert not vault().ask_bit(draw, SUM, jnp.asarray(-GRID if exceeds else GRID, jnp.float32))
    granted = given_draw(mechanism=LogisticBit(1.0))
    assert bool(vault().ask_bit(granted, SUM, jnp.asarray(-1e6 if exceeds else 1e6, jnp.float32))) == exceeds


def test_a_bit_of_a_batch_that_is_not_granted_says_nothing():
    mechanism, batch = BarkerBatch(1.0, 8, N, 2.0), Batch(np.arange(8, dtype=np.int32), np.array(8))
    of = vault(batches=FixedBatches(8))

    def bit(granted, threshold):
        draw = given_draw(mechanism=mechanism, batch=batch)
        draw._slots[0] = draw._slots[0]._replace(granted=jnp.full(1, granted))
        return bool(of.ask_batch_bit(draw, SUM.per_row, 1.0, 1.0, threshold))

    assert [bit(False, x) for x in (-1e6, 1e6)] == [False, False]
    assert [bit(True, x) for x in (-1e6, 1e6)] == [True, False]


def test_what_is_made_of_a_row_by_jaxs_wrapped_operations_is_still_the_rows():
    got = []

    def per_row(row):
        doubled = jnp.ldexp(row[0][0], 1)
        jax.debug.callback(got.append, doubled)
        return doubled

    with pytest.raises(RowsMeetError, match="debug_callback"):
        vault().ask(given_draw(), RowSum(per_row, 1.0))
    assert not got


@pytest.mark.parametrize("above", range(0, 63, 7))
def test_a_search_finds_the_first_bound_that_few_exceed(above):
    """Each place of the grid can be found, by as many halvings as it has bits."""
    values = 2.0 ** np.arange(-0.5, N - 0.5).astype(np.float32)  # one between any two bounds
    of = Vault((jnp.asarray(values, jnp.float32),), neighboring_relation="replace_one")
    found = of.find_bounds(given_draw(1, slots=6), lambda row: row[0], Grid(2.0, 6), jnp.float32(1.0), above + 0.5)
    assert float(found[0]) == 2.0 ** (N - 1 - above)


def test_without_privacy_owners_add_up_exactly():
    of_row = np.arange(N) % 3
    of = vault(private=False, owners=OwnerIndex(of_row, 3))
    draw = given_draw(noisy=False)
    unclipped = of.ask(draw, SUM._replace(bound=math.inf)).value
    np.testing.assert_allclose(unclipped, ROWS[0].sum(), rtol=1e-5)
    marks = RowSum(lambda row: row[0][0] * jnp.arange(1.0, 5.0), math.inf)
    both = of.ask(given_draw(4, noisy=False), marks).value
    np.testing.assert_allclose(both, ROWS[0].sum() * np.arange(1, 5), rtol=1e-5)
    with pytest.raises(TypeError, match="noise cannot make it private"):
        of.ask(given_draw(3), SUM._replace(bound=math.inf))
