"""Whatever lies outside of `numpyro_dp.privacy` may be wrong or mean harm: what it gets by public names is noise.

Malicious algorithms, structure hints, preparations and kernels, in the place of ours. Each tries for what would make
eps wrong, and is refused or gets a release that has been paid for.
"""

import contextlib
import copy
import dataclasses
import functools
import pickle
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.drawn import given_draw
from helpers.tiers import some_every_day
from jax import lax

import numpyro_dp.privacy.release
from numpyro_dp import DPHMC, MCMC, DPExponentialFamily, DPPenalty, FixedBatches, PoissonBatches
from numpyro_dp.chain.algorithm import Transition
from numpyro_dp.preparation.fund import Fund, Wish
from numpyro_dp.privacy.batches import ALL_ROWS, Batch
from numpyro_dp.privacy.clipping import GRID, OwnerIndex, clipped_sum
from numpyro_dp.privacy.draws import Draw, Grant, Slots, ask_ledger, draws_now
from numpyro_dp.privacy.isolation import RowsMeetError
from numpyro_dp.privacy.ledger import Ledger, PrivacyBudgetError, Releases, Request, Wanted, plan_for_budget
from numpyro_dp.privacy.mechanisms import BarkerBatch, Gaussian, LogisticBit, PoissonGaussian
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.privacy.release import ChangeSum, GradientSum, Grid, PenalizedSum, RowSum, Vault
from numpyro_dp.privacy.structured import Part, RowStructure, StructuredRows

N = 64
ROWS = (np.float32(1.2345) * np.linspace(-1, 1, N, dtype=np.float32),)
SUM = RowSum(lambda row: row[0][0], 2.0)
NOISE = 12345
BATCH_BIT = BarkerBatch(1.0, 8, N, 2.0)


def vault(**options):
    return Vault(tuple(map(jnp.asarray, ROWS)), **{"neighboring_relation": "replace_one"} | options)


def noise(**options):
    return given_draw(**{"lo": NOISE} | options)


# -- A draw is good for one release ------------------------------------------------------------------------------------


def twice(vault, draw):
    return vault.ask(draw, SUM).value - vault.ask(draw, SUM._replace(bound=0.5)).value


def in_a_loop(vault, draw):
    return lax.fori_loop(0, 3, lambda k, total: total + vault.ask(draw, SUM).value, 0.0)


def in_a_scan(vault, draw):
    return lax.scan(lambda state, x: (state, vault.ask(draw, SUM._replace(bound=x)).value), 0.0, jnp.ones(3))[1]


def in_a_map(vault, draw):
    return jax.vmap(lambda x: vault.ask(draw, SUM._replace(bound=x)).value)(jnp.ones(3))


def in_a_derivative(vault, draw):
    return jax.grad(lambda x: vault.ask(draw, RowSum(lambda row: row[0][0] * x, 1.0)).value)(1.0)


def in_a_trace(vault, draw):
    return jax.make_jaxpr(lambda x: vault.ask(draw, SUM).value + x)(1.0)


def in_a_branch(vault, draw):
    return lax.cond(jnp.array(True), lambda: vault.ask(draw, SUM).value, lambda: vault.ask(draw, SUM).value)


def in_a_program(vault, draw):
    return jax.jit(lambda: vault.ask(draw, SUM).value)()


def split_and_kept(vault, draw):
    draw.split(1)
    return vault.ask(draw, SUM)


def scanned_and_kept(vault, draw):
    draw.scan(lambda state, one: (state, vault.ask(one, SUM).value), 0.0)
    return vault.ask(draw, SUM)


def granted_and_kept(vault, draw):
    Grant(jnp.array(True), {"ratio": draw}).cond(lambda grant: vault.ask(grant["ratio"], SUM).value, lambda: 0.0)
    return vault.ask(draw, SUM)


def twice_in_a_scan(vault, draw):
    return draw.scan(lambda state, one: (state, twice(vault, one)), 0.0)


def an_outer_one_in_a_scan(vault, draw):
    others = given_draw(slots=3)
    return others.scan(lambda state, one: (state, vault.ask(draw, SUM).value), 0.0)


def twice_in_programs(vault, draw):
    program = vault.program(lambda vault, draw: vault.ask(draw, SUM).value)
    return program(vault, draw), program(vault, draw)


ATTEMPTS = [
    *(twice, in_a_loop, in_a_scan, in_a_map, in_a_derivative, in_a_trace, in_a_branch, in_a_program, split_and_kept),
    *(scanned_and_kept, granted_and_kept, twice_in_a_scan, an_outer_one_in_a_scan, twice_in_programs),
]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("attempt", ATTEMPTS, ids=lambda attempt: attempt.__name__)
def test_the_same_noise_never_hides_two_sums(attempt, traced):
    with pytest.raises(PrivacyBudgetError, match="good for one release"):
        (jax.jit(lambda: attempt(vault(), noise())) if traced else lambda: attempt(vault(), noise()))()


def test_a_draw_is_handed_on_where_it_is_asked_for():
    """By `split`, `scan`, `when` and programs, each slot once, with the noise of its slot."""
    exact = float(ROWS[0].sum())
    hidden = jnp.arange(1, 5) * GRID
    first, others = given_draw(slots=4, lo=hidden).split(1)
    values = [vault().ask(first, SUM).value]
    _, scanned = others.scan(lambda state, one: (state, vault().ask(one, SUM).value), 0.0)
    np.testing.assert_allclose([*values, *scanned], exact + 2 * np.arange(1, 5), atol=1e-4)
    for wanted in (True, False):
        found = noise(lo=GRID).when(jnp.array(wanted), lambda one: vault().ask(one, SUM).value, lambda: jnp.zeros(()))
        assert float(found) == pytest.approx(exact + 2 if wanted else 0, abs=1e-4)
    program = vault().program(lambda vault, draw: vault.ask(draw, SUM).value)
    assert float(program(vault(), noise(lo=GRID))) == pytest.approx(exact + 2, abs=1e-4)


def test_a_program_is_compiled_once_however_much_noise_there_is():
    traced = []

    def ask(vault, draw):
        traced.append(1)
        return vault.ask(draw, SUM).value

    of = vault()
    program = of.program(ask)
    for multiplier in (1.0, 2.0, 7.5):
        program(of, noise(noise_multiplier=multiplier))
    assert len(traced) == 1


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("dim", [None, 3])
def test_a_release_hides_its_sum_under_the_noise_that_the_ledger_drew(number, dim, monkeypatch):
    """Word for word, of each slot its own, outside of programs and within them."""
    drawn, draw = [], NoiseSource.draw
    monkeypatch.setattr(NoiseSource, "draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    query = RowSum(lambda row: jnp.zeros(()) if dim is None else jnp.zeros(dim), 2.0)
    shape = (number,) if dim is None else (number, dim)

    def release_all(vault, draw):
        return draw.scan(lambda state, one: (state, vault.ask(one, query)), 0.0)[1]

    def now(ledger):
        draw = draws_now(ledger, {"ratio": Request(number, shape)}, b"")["ratio"]
        return release_all(vault(ledger=ledger), draw)

    @functools.partial(jax.jit, static_argnums=0)
    def in_a_program(ledger):
        return release_all(vault(ledger=ledger), asked(ledger, number, shape))

    for release in (now, in_a_program):
        ledger = ledger_for(Gaussian, number)
        released = release(ledger)
        (mechanism,) = ledger.plan.kinds["ratio"].mechanisms
        steps = as_steps(drawn.pop())
        assert abs(steps).min() > 0
        np.testing.assert_allclose(released.value, steps * 2.0 / GRID, rtol=1e-6)
        np.testing.assert_allclose(released.scale, 2 * 2.0 * mechanism.noise_multiplier, rtol=1e-5)


def as_steps(noise):
    high, low = noise
    return high.astype(float) * 2**24 + low


def asked(ledger, number, shape, owners=None, batches=ALL_ROWS):
    counter = jnp.zeros((), jnp.int32)
    grant = ask_ledger(
        ledger,
        {"ratio": (number, shape)},
        batches=batches,
        owners=owners,
        num_rows=N,
        batched=counter,
        nonce_key=jax.random.key(0),
        origin=jnp.zeros(2, jnp.uint32),
        i=counter,
        accepted=jnp.array(False),
    )
    return grant["ratio"]


def test_a_release_on_a_batch_is_on_its_rows():
    batches = PoissonBatches(20)
    ledger = ledger_for(lambda noise_multiplier: batches.mechanism(noise_multiplier, N), 2)
    draw = asked(ledger, 2, (2, 3), batches=batches)
    drawn = draw._slots[0].batch
    assert drawn.indices.shape == (2, batches.capacity(N))
    of = vault(ledger=ledger, batches=batches)
    marks = RowSum(lambda row: jnp.full(3, 1e-3) * row[0][0], 1.0)
    given = given_draw(3, batch=Batch(np.array([3, 5, 60, 0], np.int32), np.int32(3)), ledger=ledger)
    given._mechanism = draw._mechanism
    np.testing.assert_allclose(of.ask(given, marks).value, 1e-3 * ROWS[0][[3, 5, 60]].sum(), atol=1e-6)
    _, released = draw.scan(lambda state, one: (state, of.ask(one, marks).value), 0.0)
    assert released.shape == (2, 3)


def test_arguments_that_are_no_arrays_are_counted_from_0():
    of = vault()
    program = of.program(lambda vault, k, x: x * len("abc"[:k]), static=(0,))
    assert float(program(of, 2, 5.0)) == 10.0
    with pytest.raises(ValueError, match="static arguments are counted from 0"):
        of.program(lambda vault, k: k, static=(-1,))


def test_each_owner_of_rows_adds_noise_of_its_own(monkeypatch):
    drawn, draw = [], NoiseSource.draw
    monkeypatch.setattr(NoiseSource, "draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    ledger, owners = ledger_for(Gaussian, 1), OwnerIndex(np.arange(N) % 5, 5)
    of = vault(ledger=ledger, owners=owners)
    released = of.ask(asked(ledger, 1, (1, 3), owners), RowSum(lambda row: jnp.zeros(3), 2.0))
    (mechanism,) = ledger.plan.kinds["ratio"].mechanisms
    steps = as_steps(drawn.pop())
    assert steps.shape == (1, 5, 3)
    np.testing.assert_allclose(released.value, steps.sum((0, 1)) * 2.0 / GRID, rtol=1e-6)
    assert float(released.scale) == pytest.approx(5**0.5 * 2 * 2.0 * mechanism.noise_multiplier, rel=1e-5)


def test_of_a_batch_each_owner_has_the_sum_of_its_own_rows(monkeypatch):
    """Were a place in the batch taken for one in the table, an owner's noise would hide another one's rows."""
    kept = []
    release = numpyro_dp.privacy.release.release
    monkeypatch.setattr(
        numpyro_dp.privacy.release, "release", lambda total, noise: kept.append(total) or release(total, noise)
    )
    batches, owners = PoissonBatches(20), OwnerIndex(np.arange(N) % 5, 5)
    ledger = ledger_for(lambda noise_multiplier: batches.mechanism(noise_multiplier, N), 1)
    of = vault(ledger=ledger, owners=owners, batches=batches)
    drawn = np.array([3, 5, 60, 61, 0, 0], np.int32)
    given = given_draw(5, 3, batch=Batch(drawn, np.int32(4)), ledger=ledger)
    given._mechanism = asked(ledger, 1, (1, 3), owners, batches)._mechanism
    marks = RowSum(lambda row: jnp.full(3, 1e-3) * row[0][0], 1.0)
    released = of.ask(given, marks).value
    (total,) = kept
    found = (np.asarray(total.hi, float) * 2**24 + np.asarray(total.lo)) / GRID
    expected = np.zeros(5)
    np.add.at(expected, drawn[:4] % 5, 1e-3 * ROWS[0][drawn[:4]])
    np.testing.assert_allclose(found, np.repeat(expected[:, None], 3, 1), atol=1e-6)
    np.testing.assert_allclose(released, expected.sum(), atol=1e-5)


def test_a_draw_may_be_split_at_its_ends():
    for first in (0, 3):
        one, other = given_draw(slots=3).split(first)
        assert (len(one), len(other)) == (first, 3 - first)
    for first in (-1, 4):
        with pytest.raises(ValueError, match="a draw of 3 slots cannot be split after"):
            given_draw(slots=3).split(first)


def test_slots_beyond_the_number_of_releases_are_no_leave():
    for beyond in (0, 1):
        ledger = ledger_for(Gaussian)
        now = draws_now(ledger, {"ratio": Request(1 + beyond, (3,))}, b"")["ratio"]
        later = asked(ledger, 1 + beyond, (3,))
        for draw in (now, later):
            _, values = draw.scan(lambda state, one: (state, vault(ledger=one._ledger).ask(one, SUM).value), 0.0)
            assert (np.asarray(values != 0) == (np.arange(3) < 1 + beyond)).all()


def test_a_bit_needs_noise_also_where_the_plan_is_not_private():
    for mechanism in (LogisticBit(1.0), None):
        with pytest.raises(TypeError, match="a bit is private only with a clip bound and with noise"):
            vault(private=False).ask_bit(noise(noisy=False, mechanism=mechanism), SUM, jnp.zeros(()))
    of = vault(private=False, batches=FixedBatches(8))
    batch = Batch(np.arange(8, dtype=np.int32), np.int32(8))
    for draw in (noise(noisy=False, batch=batch, mechanism=BATCH_BIT), noise(batch=batch, noisy=False)):
        with pytest.raises(TypeError, match="batches of a fixed size, and noise"):
            of.ask_batch_bit(draw, SUM.per_row, 1.0, 1.0, jnp.zeros(()))


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one"])
def test_a_search_for_bounds_counts_rows_with_the_least_noise(relation, monkeypatch):
    """Indicators of k numbers have norm sqrt(k) at most, and half of that around 1/2."""
    asked = []

    def spy(per_row, rows, bound, *args, **options):
        asked.append(float(bound))
        return clipped_sum(per_row, rows, bound, *args, **options)

    monkeypatch.setattr(numpyro_dp.privacy.release, "clipped_sum", spy)
    of = vault(neighboring_relation=relation)
    grid, draws = Grid(1.02, 10), given_draw(2, slots=10)
    threshold = jnp.array([4.5, -0.5])  # of 64 rows; the last one asks for the end of the grid
    found = of.find_bounds(draws, lambda row: jnp.abs(row[0][0]) * jnp.array([100.0, 1e19]), grid, 1e-2, threshold)
    values = 100 * np.sort(abs(ROWS[0]))
    expected = next(bound for bound in 0.01 * 1.02 ** np.arange(1024) if (values > bound).sum() <= 4)
    np.testing.assert_allclose(found, [expected, 0.01 * 1.02**1023], rtol=1e-4)
    most = 2**0.5 * (0.5 if relation == "replace_one" else 1.0)
    assert all(most < bound < 1.01 * most for bound in asked)
    assert asked


def test_loops_are_refused_unless_somebody_vouches_for_them():
    def looping(row):
        return jnp.exp(jax.random.gamma(jax.random.key(0), row[0][0] + 3.0))[None]

    for ask in (
        lambda: vault().find_bounds(given_draw(1), looping, Grid(2.0, 1), 1.0, 1.0),
        lambda: vault().ask(given_draw(1), RowSum(looping, 1.0)),
    ):
        with pytest.raises(RowsMeetError, match="random_gamma"):
            ask()


class OneOther:
    """Another owner, who sends given steps."""

    num_owners = 2

    def __init__(self, steps, noise_multiplier, accepted=False):
        variance = np.array([noise_multiplier**2]).view(np.int64)
        self.theirs = np.concatenate([np.ravel(steps), variance, [int(accepted)]])

    def exchange(self, tag, mine):
        return np.stack([mine, self.theirs])


@pytest.mark.parametrize("batches", [FixedBatches(10), PoissonBatches(10, max_batch_size=20)])
@pytest.mark.parametrize("owners", [OwnerIndex(np.arange(N) % 5, 5), OneOther(0, 1.0)], ids=["here", "elsewhere"])
def test_no_batch_says_how_many_rows_of_other_owners_are_in_it(batches, owners):
    with pytest.raises(TypeError, match="data owners cannot share"):
        vault(owners=owners, batches=batches)


def test_bounds_are_not_searched_for_among_rows_of_several_owners():
    """Each of the numbers would be taken for an owner's."""
    ledger = ledger_for(Gaussian, 2)
    of = vault(ledger=ledger, owners=OwnerIndex(np.arange(N) % 3, 3))
    with pytest.raises(TypeError, match="among the rows of one owner"):
        of.find_bounds(given_draw(3, slots=2, ledger=ledger), lambda row: jnp.ones(3), Grid(2.0, 2), jnp.ones(3), 1.0)


def test_sums_of_owners_add_up_step_by_step():
    theirs = np.array([4, -3, 2**40 + 7])
    mine = jnp.array([1, 2**24 - 1, -(2**30)], jnp.int32)
    of = vault(owners=OneOther(theirs, 4.0))
    released = of.ask(given_draw(3, lo=mine, noise_multiplier=3.0), RowSum(lambda row: jnp.zeros(3), 1.0))
    np.testing.assert_array_equal(released.value, np.float32((theirs + np.asarray(mine, np.int64)) / GRID))
    assert float(released.scale) == pytest.approx(2 * 5.0, rel=1e-5)


def test_owners_whose_chains_came_apart_stop():
    of = vault(owners=OneOther(0, 1.0, accepted=True))
    with pytest.raises(Exception, match=r"come apart: the last proposal was accepted at owner\(s\) \[1\] only"):
        jax.block_until_ready(of.ask(noise(), SUM))


def test_a_draw_is_no_array():
    """It cannot be kept in a state, sent out of a program, or looped over."""
    for use in (
        lambda: jax.jit(lambda: noise())(),
        lambda: jax.jit(lambda draw: draw)(noise()),
        lambda: lax.scan(lambda state, one: (state, one), 0.0, noise()),
        lambda: jnp.asarray(noise()),
        lambda: jnp.zeros(2) + noise(),
    ):
        with pytest.raises(TypeError):
            use()


def test_no_public_name_leads_to_rows_noise_or_exact_sums():
    draw, of = noise(noise_multiplier=7.5), vault()
    kept = of.keep(SUM)
    secret = {float(x) for x in ROWS[0]} | {float(NOISE), float(ROWS[0].sum())}
    for thing in (draw, of, of.numbered(), kept, Grant(jnp.array(True), {"ratio": draw})):
        for name in dir(thing):
            value = None if name.startswith("_") else getattr(thing, name)
            arrays = [np.ravel(leaf) for leaf in jax.tree.leaves(value) if isinstance(leaf, np.ndarray | jax.Array)]
            assert not secret & {float(x) for array in arrays for x in array}, name


def test_a_draw_has_no_twin():
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        for thing in (noise(), vault()):
            with pytest.raises(TypeError, match=r"cannot be (copied|pickled)"):
                copied(thing)
    for first in (None, 1.0, -1, 2):
        with pytest.raises((TypeError, ValueError)):
            noise().split(first)


def test_two_threads_cannot_take_one_draw():
    def race():
        draw, taken = noise(slots=2), []

        def take():
            try:
                draw.split(1)
                taken.append(1)
            except PrivacyBudgetError:
                pass

        threads = [threading.Thread(target=take) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(taken)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert {race() for _ in range(50)} == {1}
    finally:
        sys.setswitchinterval(before)


def test_draws_are_made_by_the_ledger_that_the_table_is_charged_to():
    slots = Slots(None, None, jnp.ones(1), jnp.ones(1, bool), jnp.zeros((1, 1), jnp.uint32), jnp.zeros(1, bool))
    with pytest.raises(TypeError, match="made by the ledger"):
        Draw(slots, Gaussian(1.0), None)

    class Looks(Draw):
        def __init__(self):
            self._mechanism, self._ledger, self._is_private = Gaussian(1.0), None, True

    own = draws_now(ledger_for(Gaussian), {"ratio": Request(1, (1,))}, b"")["ratio"]
    for draw in (Looks(), object(), own):
        with pytest.raises(TypeError, match="a draw of the ledger that the table is charged to"):
            vault(ledger=ledger_for(Gaussian)).ask(draw, SUM)


def test_a_map_that_the_ledger_was_not_told_of_is_refused():
    """A user's `vmap` over what a kernel closes over would compute several sums beside one noise."""

    def of(scale):
        given = given_draw()
        return vault().ask(given, RowSum(lambda row: row[0][0] * scale, 2.0)).value

    with pytest.raises(PrivacyBudgetError, match="several sums would have the same noise"):
        jax.vmap(of)(jnp.arange(3.0))


def test_a_program_is_for_tables_with_its_own_settings():
    """Else one that is made for a table without privacy would open another."""
    open_to_all = vault(private=False)
    program = open_to_all.program(lambda vault: vault.exact(SUM))
    program(open_to_all)
    for other in (vault(), vault(private=False, neighboring_relation="zero_out")):
        with pytest.raises(TypeError, match="tables with the settings"):
            program(other)
    one, other = ledger_for(Gaussian), ledger_for(Gaussian)
    asked = []
    program = vault(ledger=one).program(lambda inner, draw: asked[0].ask(draw, SUM).value)
    asked.append(vault(ledger=one))
    for charged in (one, other):
        draw = draws_now(charged, {"ratio": Request(1, (1,))}, b"")["ratio"]
        with pytest.raises(TypeError, match="a draw of the ledger"):
            program(vault(ledger=charged), draw)
    draw = draws_now(other, {"ratio": Request(1, (1,))}, b"")["ratio"]
    with pytest.raises(TypeError, match="kept by a vault of another table"):
        vault(ledger=other).ask(draw, vault(ledger=one).keep(SUM))
    with pytest.raises(TypeError, match="kept by a vault of another table or with other settings"):
        vault(neighboring_relation="zero_out").ask(noise(), vault().keep(SUM))


def test_a_sum_that_is_kept_is_computed_once_wherever_it_is_asked_for():
    rows, computed = tuple(map(jnp.asarray, ROWS)), []

    def keep():
        vaults = {at_hand: Vault(rows, neighboring_relation="zero_out", at_hand=at_hand) for at_hand in (True, False)}
        kept = {at_hand: of.keep(SUM)._total.hi for at_hand, of in vaults.items()}
        computed.extend(at_hand for at_hand, hi in kept.items() if not isinstance(hi, jax.core.Tracer))

    jax.make_jaxpr(keep)()
    assert computed == [True]


def test_rows_are_touched_where_nobody_else_looks():
    """In another trace constants could be read; and a search for NaN would stop where a row has one."""
    of, given = vault(at_hand=False), given_draw(1)
    structure = RowStructure((Part("direct", np.array([0]), (1,)),), 1, lambda row: (None,), lambda v, row: v[0][0])
    for touch in (
        lambda: of.keep(SUM),
        lambda: of.with_structure(structure, 1),
        lambda: of.find_bounds(given, SUM.per_row, Grid(2.0, 1), jnp.ones(()), jnp.ones(())),
    ):
        with pytest.raises((TypeError, PrivacyBudgetError), match=r"no other trace|good for one release"):
            jax.make_jaxpr(touch)()
    rows = (jnp.full(N, 1e30),)
    overflows = RowStructure(
        (Part("dot", np.array([[0]]), (1,)),), 1, lambda row: (row[0] * 1e30,), lambda v, row: v[0][0]
    )
    with jax.debug_nans(True), jax.debug_infs(True):
        Vault(rows, neighboring_relation="replace_one").with_structure(overflows, 1)


# -- It is paid for what it is asked for -------------------------------------------------------------------------------


def test_noise_has_the_shape_of_the_sum():
    """Noise of one number for a vector would be the same for all of its entries."""
    pair = RowSum(lambda row: jnp.stack([row[0][0], -row[0][0]]), 1.0)
    with pytest.raises(PrivacyBudgetError, match=r"noise of shape \(\) was granted for a sum of shape \(2,\)"):
        vault().ask(noise(), pair)
    with pytest.raises(PrivacyBudgetError, match="takes one slot of a draw, and this draw has 2"):
        vault().ask(noise(slots=2), SUM)
    with pytest.raises(PrivacyBudgetError, match="takes 4 releases, got 3"):
        grid = Grid(2.0, 4)
        vault().find_bounds(given_draw(1, slots=3), lambda row: row[0], grid, jnp.ones(()), jnp.ones(()))


@pytest.mark.parametrize(("mechanism", "law"), [(LogisticBit(1.0), "a bit"), (BATCH_BIT, "a bit of a batch")])
def test_a_bit_is_no_sum(mechanism, law):
    """Noise for a bit has another law, and costs less than a sum would."""
    with pytest.raises(TypeError, match=f"accounted for as one of {law}, and a sum"):
        vault().ask(noise(mechanism=mechanism), SUM)
    with pytest.raises(TypeError, match="accounted for as one of a sum, and a bit"):
        vault().ask_bit(noise(), SUM, jnp.zeros(()))
    with pytest.raises(TypeError, match="accounted for as one of a sum, and a bit of a batch"):
        vault().ask_batch_bit(noise(), SUM.per_row, 1.0, 1.0, jnp.zeros(()))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_weights_by_which_the_sensitivity_is_computed_are_numbers_for_which_it_is(value):
    on_batches = vault(batches=FixedBatches(8))
    batch = Batch(np.arange(8), np.array(8))
    for weight, factor in ((value, 0.5), (1.0, value)):
        with pytest.raises(ValueError, match="weight must be positive"):
            on_batches.ask_batch_bit(noise(batch=batch, mechanism=BATCH_BIT), SUM.per_row, weight, factor, 0.0)
        with pytest.raises(ValueError, match="weight must be positive"):
            on_batches.ask(noise(batch=batch), PenalizedSum(SUM.per_row, 1.0, weight, factor))


def test_what_is_accounted_for_on_a_batch_is_asked_for_on_a_batch():
    batches = FixedBatches(8)
    for query in (vault().keep(SUM), GradientSum(jnp.zeros(1), 1.0)):
        on_batches = vault(batches=batches)
        with pytest.raises(TypeError, match="accounted for as on FixedBatches"):
            on_batches.ask(noise(batch=Batch(np.arange(8), np.array(8))), query)
    with pytest.raises(TypeError, match="this draw is not one on FixedBatches"):
        vault(batches=batches).ask(noise(), SUM)
    with pytest.raises(TypeError, match="this draw is not one on AllRows"):
        vault().ask(noise(batch=Batch(np.arange(8), np.array(8))), SUM)
    with pytest.raises(TypeError, match="batches of a fixed size"):
        vault().ask(noise(), PenalizedSum(SUM.per_row, 1.0, 1.0, 1.0))


def test_nothing_leaves_without_a_clip_bound_or_without_noise():
    unclipped = SUM._replace(bound=float("inf"))
    for ask in (
        lambda: vault().ask(noise(), unclipped),
        lambda: vault().keep(unclipped),
        lambda: vault().ask_bit(noise(mechanism=LogisticBit(1.0)), unclipped, jnp.zeros(())),
        lambda: vault().ask(noise(noisy=False), SUM),
        lambda: vault().exact(SUM),
    ):
        with pytest.raises(TypeError, match=r"without noise|no sensitivity"):
            ask()


def test_rows_that_would_meet_are_refused():
    def mixed(row):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), row[0][0])

    with pytest.raises(RowsMeetError):
        vault().ask(noise(), RowSum(mixed, 1.0))
    with pytest.raises(TypeError, match="places of these rows are private"):
        vault(public_places=False).numbered()
    structure = RowStructure((), 1, lambda row: (), lambda values, row: 0.0)
    with pytest.raises(TypeError, match="in public places"):
        vault(public_places=False).with_structure(structure, 1)


class Curious:
    """What would like to meet rows: an operand with operations of its own."""

    def __init__(self):
        self.met = []

    def meet(self, other):
        self.met.append(other)
        return other

    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__ = __radd__ = __lt__ = __gt__ = __getitem__ = meet


def test_operands_are_plain_numbers_and_arrays():
    curious = Curious()
    on_batches = vault(batches=FixedBatches(8))
    batch = Batch(np.arange(8), np.array(8))
    for ask in (
        lambda: vault().ask(noise(), SUM._replace(bound=curious)),
        lambda: vault().ask_bit(noise(mechanism=LogisticBit(1.0)), SUM, curious),
        lambda: on_batches.ask(noise(batch=batch), PenalizedSum(SUM.per_row, 1.0, curious, 1.0)),
        lambda: structured().ask(noise(), GradientSum(curious, 1.0)),
        lambda: structured().ask(noise(), ChangeSum(jnp.zeros(1), curious, 1.0)),
        lambda: vault().find_bounds(given_draw(1), lambda row: row[0], Grid(2.0, 1), curious, jnp.ones(())),
    ):
        with pytest.raises(TypeError):
            ask()
    assert not curious.met


def structured(x=lambda row: row[0], rest=lambda values, row: values[0][0], kind="dot"):
    return vault().with_structure(RowStructure((Part(kind, np.array([[0]]), (1,)),), 1, lambda row: (x(row),), rest), 1)


@pytest.mark.parametrize("bound", [np.ones(N), np.ones((1, 1)), np.ones(3), 1j, np.ones((300, 1))])
def test_a_bound_is_one_real_number(bound):
    vector = RowSum(lambda row: jnp.tile(row[0], 3), bound)
    for ask in (
        lambda: vault().ask(given_draw(3), vector),
        lambda: vault().ask(noise(), SUM._replace(bound=bound)),
        lambda: structured().ask(given_draw(1), GradientSum(jnp.zeros(1), bound)),
        lambda: structured().ask(noise(), ChangeSum(jnp.zeros(1), jnp.ones(1), bound)),
        lambda: vault().ask_bit(noise(mechanism=LogisticBit(1.0)), SUM, bound),
    ):
        with pytest.raises((ValueError, TypeError), match="one real number"):
            ask()


def test_what_a_row_contributes_is_a_real_vector():
    for per_row in (
        lambda row: jnp.tile(row[0], (3, 1)),
        lambda row: jnp.stack([row[0][0] + 0j, 1j * row[0][0]]),
    ):
        with pytest.raises(ValueError, match="a real number or a vector"):
            vault().ask(noise(), RowSum(per_row, 1.0))
    with pytest.raises(ValueError, match="one real number"):
        batch = Batch(np.arange(8), np.array(8))
        vault(batches=FixedBatches(8)).ask(noise(batch=batch), PenalizedSum(lambda row: row[0], 1.0, 1.0, 1.0))
    with pytest.raises(TypeError, match="batches of a fixed size"):
        of = vault(batches=PoissonBatches(rate=0.1))
        of.ask(noise(batch=Batch(np.arange(8), np.array(3))), PenalizedSum(SUM.per_row, 1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="a vector of real numbers"):
        vault().find_bounds(given_draw(1), lambda row: row[0][0], Grid(2.0, 1), jnp.ones(()), jnp.ones(()))


# -- Ledgers -----------------------------------------------------------------------------------------------------------


def ledger_for(mechanism, count=4):
    ledger = Ledger(NoiseSource())
    ledger.commit(
        plan_for_budget(
            eps=1.0,
            delta=1e-5,
            neighboring_relation="replace_one",
            wanted={"ratio": Wanted(lambda multiplier: (mechanism(multiplier),), (count,))},
            num_iterations=count,
            num_chains=1,
            num_rows=N,
        )
    )
    return ledger


@pytest.mark.parametrize(
    ("mechanism", "batches"),
    [
        (lambda m: PoissonGaussian(m, 0.1), None),
        (lambda m: PoissonGaussian(m, 0.1), PoissonBatches(rate=0.2)),
        (lambda m: PoissonGaussian(m, 0.1), FixedBatches(8)),
        (lambda m: BarkerBatch(max(m, 1.0), 8, N, 2.0), FixedBatches(16)),
        (LogisticBit, FixedBatches(8)),
        (lambda m: FixedBatches(8).mechanism(m, 10 * N), FixedBatches(8)),
    ],
)
def test_a_release_costs_what_its_batch_costs(mechanism, batches):
    """A kernel that plans for batches and asks on others, or on all rows, gets nothing."""
    ledger = ledger_for(mechanism)
    request = Request(1, (1,)) if batches is None else Request(1, (1,), batches)
    with pytest.raises(PrivacyBudgetError, match="are accounted for as"):
        ledger.grant({"ratio": request}, 0, N, b"")
    assert not any(map(any, ledger.spent().values()))


class Cheap(Gaussian):
    rho = 0.0


class Cheaper(float):
    def __float__(self):
        return 1e-6


@pytest.mark.parametrize(
    "kind",
    [
        Releases((Gaussian(1e-3),), (1,)),
        Releases((Gaussian(0.0),), (1,)),
        Releases((Gaussian(Cheaper(9.0)),), (1,)),
        Releases((Cheap(9.0),), (1,)),
        Releases((Gaussian(9.0),), (-1,)),
        Releases((Gaussian(9.0), LogisticBit(9.0)), (1, 1)),
        Releases((BarkerBatch(9.0, 8, N, 1e-3), BarkerBatch(9.0, 8, N, 1e3)), (0, 1)),
    ],
)
def test_a_plan_costs_what_it_says(kind):
    plan = ledger_for(Gaussian).plan
    with pytest.raises((PrivacyBudgetError, TypeError, ValueError)):
        Ledger(NoiseSource()).commit(dataclasses.replace(plan, kinds={"ratio": kind}))


def test_mechanisms_that_say_one_thing_now_and_another_later_are_noticed():
    with pytest.raises(PrivacyBudgetError, match="these releases cost eps"):
        ledger_for(lambda m: Gaussian(m if m in (1.0, 2.0) else 1e-3))


def test_a_plan_is_what_was_committed():
    mechanisms = [Gaussian(9.0)]
    plan = dataclasses.replace(ledger_for(Gaussian).plan, kinds={"ratio": Releases(mechanisms, [1])})
    ledger = Ledger(NoiseSource())
    ledger.commit(plan)
    mechanisms[0] = Gaussian(1e-6)
    assert ledger.plan.kinds == {"ratio": Releases((Gaussian(9.0),), (1,))}


def test_nothing_makes_a_private_plan_one_without_noise():
    ledger = ledger_for(Gaussian, 1)
    with pytest.raises(PrivacyBudgetError, match="nothing in a private plan is without noise"):
        ledger.assign("ratio", {"x": Releases((Gaussian(0.0),), (0,))})
    assert ledger.plan.private


class AlwaysTheFirst(PoissonBatches):
    def draw(self, words, num_rows):
        return np.zeros(8, np.int32), 1


def test_batches_are_drawn_as_they_are_accounted_for():
    batches = AlwaysTheFirst(rate=0.1)
    for ask in (
        lambda: vault(batches=batches),
        lambda: ledger_for(lambda m: PoissonGaussian(m, 0.1)).grant({"ratio": Request(1, (1,), batches)}, 0, N, b""),
        lambda: DPPenalty(model, eps=1.0, prepare=False, batch_size=batches),
    ):
        with pytest.raises(TypeError, match="batches are of the classes of"):
            ask()


# -- A malicious structure ---------------------------------------------------------------------------------------------


def shared_parts(*coordinates):
    parts = tuple(Part("direct", np.array(places), (len(places),)) for places in coordinates)
    return RowStructure(
        parts, 4, lambda row: (None,) * len(parts), lambda values, row: sum(map(jnp.sum, values)) * row[0][0]
    )


@pytest.mark.parametrize(
    "structure",
    [
        shared_parts([0, 1], [1, 2]),
        shared_parts([0, 0]),
        shared_parts([0, 7]),
        shared_parts([0, 3]),
        shared_parts([-1, 0]),
        RowStructure((Part("other", np.array([0]), (1,)),), 1, lambda row: (None,), lambda values, row: row[0][0]),
    ],
)
def test_parts_that_share_coordinates_are_refused(structure):
    """Their vectors would add up, to twice the norm that is computed."""
    with pytest.raises(ValueError, match="share no coordinate"):
        vault().with_structure(structure, 3)


def test_no_hint_makes_a_sum_of_more_rows_than_are_added_up_exactly():
    """How many numbers a row needs decides how many rows are taken at once, and a hint says it."""

    def sum_of(width):
        part = Part("dot", np.array([[0]]), (1,))
        structure = RowStructure((part,), width, lambda row: (row[0],), lambda values, row: values[0][0] * row[0][0])

        def ask(rows):
            sums = StructuredRows(structure, rows, 1, contextlib.nullcontext)
            return sums.log_ratio(jnp.zeros(1), jnp.ones(1), 1.0), sums.gradient(jnp.zeros(1), 1.0)

        return jax.eval_shape(ask, (jax.ShapeDtypeStruct((2**27,), jnp.float32),))  # needs no memory

    change, gradient = sum_of(1)
    assert (change.hi.shape, gradient.hi.shape) == ((), (1,))
    with pytest.raises(ValueError, match="at most 524288 numbers can be added up exactly at once"):
        sum_of(-2.9)


def largest_step(structure, size):
    """How far one row moves the sum, in units of the clip bound; all other rows are 0."""
    moved = []
    for value in (1e4, -1e4):
        of = Vault((jnp.zeros(N).at[5].set(value),), neighboring_relation="replace_one").with_structure(structure, size)
        moved.append(np.asarray(of.ask(given_draw(size), GradientSum(jnp.zeros(size), 1.0)).value))
    return np.linalg.norm(moved[0] - moved[1]) / 2


@pytest.mark.parametrize("members", [[0, 1, 0], [1, 0, 0], [2, 1, 0]])
def test_members_are_compared_within_a_row_and_not_among_rows(members):
    """Also where neither the first two nor the last two are the same."""
    structure = RowStructure(
        (Part("member", np.arange(3), (3,)),),
        3,
        lambda row: (jnp.array(members) + 0 * row[0][0].astype(jnp.int32),),
        lambda values, row: values[0].sum() * row[0][0],
    )
    found = largest_step(structure, 3)
    assert found <= 1
    assert (found > 0.9) == (members == [2, 1, 0])


def test_a_part_without_coordinates_ends_no_sum():
    parts = Part("direct", np.zeros(0, int), (0,)), Part("direct", np.array([0]), (1,))
    structure = RowStructure(parts, 2, lambda row: (None, None), lambda values, row: values[1][0] * row[0][0])
    assert largest_step(structure, 1) > 0.9


@pytest.mark.parametrize("x", [lambda row: row[0], lambda row: row[0][0].astype(jnp.int32)])
def test_members_are_whole_numbers_in_the_shape_that_was_told(x):
    part = Part("member", np.arange(3), (1,))
    with pytest.raises(ValueError, match="a member part needs other numbers of a row"):
        vault().with_structure(RowStructure((part,), 1, lambda row: (x(row),), lambda values, row: values[0][0]), 3)


def changes(rows, x=lambda row: row[0], bound=1.0):
    """The sum of changes, from 0 to 1, of a dot with x."""
    part = Part("dot", np.array([[0]]), (1,))
    structure = RowStructure((part,), 1, lambda row: (x(row),), lambda values, row: values[0][0])
    of = Vault((jnp.asarray(rows, jnp.float32),), neighboring_relation="replace_one").with_structure(structure, 1)
    return [
        np.asarray(of.ask(given_draw(), ChangeSum(jnp.zeros(1), jnp.ones(1), bound)).value),
        np.asarray(of.ask(given_draw(1), GradientSum(jnp.zeros(1), bound)).value)[0],
    ]


def test_rows_that_fill_a_block_or_have_no_finite_number_count_as_nothing():
    for found in changes([0.0, 0.0, 0.0]):
        assert found == 0
    one, other = changes([0.5, np.inf, np.nan], lambda row: row[0]), changes([0.5])
    np.testing.assert_allclose(one, other, rtol=1e-6)
    shifted = RowStructure(
        (Part("dot", np.array([[0]]), (1,)),), 1, lambda row: (row[0],), lambda values, row: (values[0][0] + 1) ** 2
    )
    for rows, expected in (([0.5], 1.25), ([0.5, np.inf], 1.25)):
        of = Vault((jnp.asarray(rows, jnp.float32),), neighboring_relation="replace_one").with_structure(shifted, 1)
        change = of.ask(given_draw(), ChangeSum(jnp.zeros(1), jnp.ones(1), 4.0)).value
        np.testing.assert_allclose(change, expected, rtol=1e-5)


def test_a_row_whose_norm_is_unknown_counts_as_nothing_also_by_its_other_parts():
    """Else it would count where its gradient, of which the norm is that of the numbers as they were, does not."""
    parts = Part("dot", np.array([[0]]), (1,)), Part("direct", np.array([1]), (1,))
    both = RowStructure(parts, 2, lambda row: (row[0], None), lambda values, row: values[0][0] + values[1][0])
    for rows, expected in (([0.5], 1.5), ([0.5, np.inf], 1.5), ([np.nan], 0.0)):
        of = Vault((jnp.asarray(rows, jnp.float32),), neighboring_relation="replace_one").with_structure(both, 2)
        change = of.ask(given_draw(), ChangeSum(jnp.zeros(2), jnp.ones(2), 4.0)).value
        np.testing.assert_allclose(change, expected, rtol=1e-5)
        gradient = of.ask(given_draw(2), GradientSum(jnp.zeros(2), 4.0)).value
        np.testing.assert_allclose(gradient, [0.5, 1.0] if expected else [0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("num_rows", [5, 600])
def test_several_products_of_a_row_are_those_of_its_numbers(num_rows):
    """Of one block of rows and of several."""
    rows = np.random.default_rng(0).standard_normal((num_rows, 3)).astype(np.float32)
    places, weights = np.array([[5, 0], [1, 4], [2, 3]]), np.float32([1.0, -2.0])
    part = Part("dot", places, (2,))

    def rest(values, row):
        return jnp.sin(values[0]) @ weights

    def density(z):
        return (jnp.sin(rows @ z[places]) @ weights).sum()

    structure = RowStructure((part,), 8, lambda row: (row[0][0],), rest)
    of = Vault((jnp.asarray(rows),), neighboring_relation="replace_one").with_structure(structure, 6)
    z, z_new = jnp.linspace(-1, 1, 6), jnp.linspace(0, 2, 6)
    gradient = of.ask(given_draw(6), GradientSum(z, 50.0)).value
    np.testing.assert_allclose(gradient, jax.grad(density)(z), atol=1e-3)
    change = of.ask(given_draw(), ChangeSum(z, z_new, 50.0)).value
    np.testing.assert_allclose(change, density(z_new) - density(z), atol=1e-3)


def test_members_in_the_shape_of_a_table_are_those_that_a_row_names():
    part = Part("member", np.arange(5), (2, 2))
    weights = np.float32([[1.0, 2.0], [3.0, 4.0]])
    for members, expected in (([[0, 4], [3, 1]], [1.0, 4.0, 0.0, 3.0, 2.0]), ([[0, 4], [4, 1]], np.zeros(5))):
        structure = RowStructure(
            (part,),
            4,
            lambda row, members=members: (jnp.array(members) + 0 * row[0][0].astype(jnp.int32),),
            lambda values, row: (values[0] * weights).sum(),
        )
        of = Vault((jnp.zeros(3),), neighboring_relation="replace_one").with_structure(structure, 5)
        gradient = of.ask(given_draw(5), GradientSum(jnp.zeros(5), 10.0)).value
        np.testing.assert_allclose(gradient, 3 * np.asarray(expected), atol=1e-4)


@pytest.mark.parametrize("bound", [1e-25, 1e-19, -1.0, 0.0, 1e19])
def test_gradients_within_a_bound_that_floats_cannot_square_are_0(bound):
    assert changes([1.0, 2.0], bound=bound)[1] == 0


@pytest.mark.parametrize("members", [[0, 0], [0, 3], [0, -1], [0, 99], [2, 0]])
def test_members_are_counted_as_what_they_are(members):
    """A row that names one member twice, or a coordinate of another part, would move that by more than its norm."""
    parts = Part("member", np.arange(3), (2,)), Part("direct", np.array([3, 4]), (2,))
    structure = RowStructure(
        parts,
        4,
        lambda row: (jnp.array(members), None),
        lambda values, row: (values[0].sum() + values[1].sum()) * row[0][0],
    )
    found = largest_step(structure, 5)
    assert found <= 1
    assert (found > 0.9) == (members == [2, 0])  # which is a structure


def test_a_structure_that_is_wrong_is_clipped_all_the_same():
    """It says that a row's density is another one, and a large one."""
    wrong = RowStructure(
        (Part("dot", np.arange(3)[:, None], (1,)),),
        4,
        lambda row: (jnp.full(3, 1e3) * jnp.sign(row[0][0]),),
        lambda values, row: 1e3 * values[0].sum(),
    )
    assert 0.9 < largest_step(wrong, 3) <= 1


@pytest.mark.parametrize(
    "x",
    [
        lambda row: jnp.full(1, 65536, jnp.int32),
        lambda row: jnp.ones((1, 1)),
        lambda row: jnp.ones(2),
        lambda row: None,
    ],
)
def test_numbers_of_a_row_are_those_of_which_norms_are_computed(x):
    with pytest.raises(ValueError, match="a dot part needs other numbers of a row"):
        structured(x)


def test_small_numbers_of_low_precision_are_not_lost_in_the_norm():
    half = RowStructure(
        (Part("dot", np.arange(3)[:, None], (1,)),),
        4,
        lambda row: (jnp.full(3, 1e-4, jnp.float16),),
        lambda values, row: 1e9 * values[0].sum() * row[0][0],
    )
    assert 0.9 < largest_step(half, 3) <= 1


def test_a_structure_cannot_change_after_it_was_checked():
    class Sly(Part):
        def value(self, z, coefficient):
            raise AssertionError("rows in other hands")

    places = np.array([0, 1])
    parts = [Sly("direct", places, (2,))]
    sly = RowStructure(tuple(parts), 2, lambda row: (None,), lambda values, row: values[0].sum() * row[0][0])
    of = vault().with_structure(sly, 2)
    places[:] = 0
    of.ask(given_draw(2), GradientSum(jnp.zeros(2), 1.0))
    with pytest.raises(ValueError, match="log density is one number"):
        of = structured(rest=lambda values, row: jnp.stack([values[0][0]] * 5))
        of.ask(noise(), ChangeSum(jnp.zeros(1), jnp.ones(1), 1.0))


# -- Malicious kernels and preparations --------------------------------------------------------------------------------


def model(X, y=None):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


X = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


def one_step(kernel, **options):
    kernel = kernel(model, eps=1.0, num_iterations=3, prepare=False, **options)
    state = kernel.init(jax.random.key(0), 0, None, (X,), {"y": Y})
    return kernel, jax.jit(lambda state: kernel.sample(state, (X,), {"y": Y}))(state)


class AsksTwice(DPPenalty):
    def transition(self, step):
        for scale in (1.0, 2.0):
            step.target.log_ratio(step.grant["ratio"], step.z, step.z + scale, 1.0)


class AsksInALoop(DPPenalty):
    def transition(self, step):
        draw = step.grant["ratio"]
        lax.fori_loop(0, 9, lambda k, z: z + step.target.log_ratio(draw, z, z + 1, 1.0).value, step.z)


class KeepsItsDraw(DPPenalty):
    def transition(self, step):
        return Transition(step.z, jnp.array(True), jnp.ones(()), jnp.ones(()), step.grant["ratio"])


class AsksForAVector(DPPenalty):
    def transition(self, step):
        return step.target.gradient(step.grant["ratio"], step.z, 1.0)


class ClaimsABatch(DPPenalty):
    def _mechanisms(self, kind, noise_multiplier, num_rows, num_iterations):
        return (PoissonGaussian(noise_multiplier, 1e-3),)


@pytest.mark.parametrize(
    ("kernel", "error"),
    [
        (AsksTwice, "good for one release"),
        (AsksInALoop, "good for one release"),
        (KeepsItsDraw, "not a valid JAX type|Draw"),
        (AsksForAVector, r"noise of shape \(\) was granted for a sum of shape \(2,\)"),
        (ClaimsABatch, "are accounted for as"),
    ],
)
def test_a_hostile_kernel_gets_nothing(kernel, error):
    with pytest.raises(Exception, match=error):
        jax.block_until_ready(one_step(kernel))


class PlansLess(DPPenalty):
    """It says that one iteration in ten makes a release."""

    def releases(self, num_iterations, num_chains, resumed=False):
        return {"ratio": max(num_iterations * num_chains // 10, 1)}


def test_a_kernel_that_plans_for_less_gets_no_more():
    kernel = PlansLess(model, eps=1.0, num_iterations=20, prepare=False)
    state = kernel.init(jax.random.key(0), 0, None, (X,), {"y": Y})
    step = jax.jit(lambda state: kernel.sample(state, (X,), {"y": Y}))
    exhausted = []
    with pytest.warns(RuntimeWarning, match="used up"):
        for _ in range(5):
            state = step(state)
            exhausted.append(bool(state.exhausted))
    assert exhausted == [False, False, True, True, True]
    assert kernel.ledger.spent() == {"ratio": (2,)}


class RequestsFewer(DPHMC):
    """It is charged for one gradient in an iteration, and asks for all of them."""

    def request(self, carry):
        return {"ratio": 1, "grad": 1}

    def transition(self, step):
        _, released = step.grant["grad"].scan(lambda z, draw: (z, step.target.gradient(draw, z, 1.0).value), step.z)
        carry = step.carry._replace(gradient=jnp.abs(released).sum(1))
        return Transition(step.z, jnp.array(True), jnp.ones(()), jnp.ones(()), carry)


def test_a_release_that_was_not_charged_is_nothing():
    kernel, state = one_step(RequestsFewer, num_steps=2)
    first, second = np.asarray(state.carry.gradient)
    assert first != 0
    assert second == 0
    assert kernel.ledger.spent() == {"ratio": (1,), "grad": (1,)}


def normal(y, scale):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


ADDED = ["_see", "_take_up", "_check_run", "_check_arguments", "_prepare", "_ready", "_queries", "_initial_params"]


@pytest.mark.filterwarnings("ignore::numpyro_dp.PosteriorWarning")  # a uniform table
@pytest.mark.parametrize("kernel", some_every_day([DPHMC, DPExponentialFamily], [DPHMC]))
def test_what_kernels_add_sees_placeholders_in_the_place_of_the_table(kernel, monkeypatch):
    given = {}

    def keep(name, original):
        monkeypatch.setattr(kernel, name, lambda *args: (given.setdefault(name, args[1:]) and None) or original(*args))

    for name in ADDED:
        keep(name, getattr(kernel, name))
    table = np.float32([0.0123, *np.linspace(0, 1, 3_999)])
    options = {"bounds": (0, 1)} if kernel is DPExponentialFamily else {}
    mcmc = MCMC(kernel(normal, eps=5.0, noise_seed=0, **options), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), table, scale=np.float32(0.777))
    assert given.keys() == set(ADDED)
    leaves = jax.tree.leaves(given)
    numbers = [x for x in leaves if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    assert any(np.all(x == np.float32(0.777)) for x in numbers)  # what is public, they see
    assert not [x for x in numbers if np.size(x) > 100 or np.isin(table[0], x)]
    assert not [x for x in leaves if isinstance(x, functools.partial)]  # which shows its arguments


def test_what_a_kernel_may_release_cannot_be_exchanged_by_a_public_name():
    class Swaps(DPPenalty):
        def _prepare(self, separated, public, target):
            self.ledger = Ledger(None)

    for name in ("ledger", "settings"):
        with pytest.raises(AttributeError):
            setattr(DPPenalty(model, eps=1.0, prepare=False), name, None)
    with pytest.raises(AttributeError):
        one_step(Swaps)


def test_a_preparation_cannot_spend_more_than_its_reserve():
    ledger = Ledger(NoiseSource())
    wanted = {"reserve": Wanted(lambda multiplier: (Gaussian(multiplier),), (1,))}
    plan = plan_for_budget(
        eps=1.0,
        delta=1e-5,
        neighboring_relation="replace_one",
        wanted=wanted,
        num_iterations=1,
        num_chains=1,
        num_rows=N,
    )
    ledger.commit(plan)
    fund = Fund(ledger)
    with pytest.raises(PrivacyBudgetError, match="is wanted from a reserve of"):
        fund.ask(sum=Wish(1.1 * fund.left))
    with pytest.raises(PrivacyBudgetError, match="is wanted from a reserve of"):
        fund.assign({"sums": Releases((Gaussian(1.0),), (10**6,))})
    draw = fund.ask(sum=Wish(0.5 * fund.left))["sum"]
    with pytest.raises(TypeError, match="a draw of the ledger that the table is charged to"):
        vault().ask(draw, SUM)
    of = vault(ledger=ledger)
    of.ask(draw, SUM)
    with pytest.raises(PrivacyBudgetError, match="good for one release"):
        of.ask(draw, SUM)
