"""Sums over a table that is read in pieces are those of the table in memory, whatever the pieces."""

import contextlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from helpers.drawn import given_draw
from helpers.tables import frame, in_pieces
from hypothesis import given, settings
from hypothesis import strategies as st

from numpyro_dp import FixedBatches
from numpyro_dp.privacy import passes
from numpyro_dp.privacy.clipping import GRID, OwnerIndex, clipped_sum
from numpyro_dp.privacy.isolation import RowsMeetError
from numpyro_dp.privacy.passes import BLOCK_ROWS, Part, StreamedTable, table_of, total_over, trace_program
from numpyro_dp.privacy.release import Grid, RowSum, Vault
from numpyro_dp.tables import pieces
from numpyro_dp.tables.engines import Threads
from numpyro_dp.tables.scan import Table

HOSTILE = [np.nan, np.inf, -np.inf, 1e30, -1e30, 1e-40, 0.0, 3.0]


def table(values, cuts=()):
    return in_pieces(pa.table({"x": np.asarray(values, np.float32)}), cuts)


def steps(hi, lo):
    return (np.asarray(hi, np.int64) << 24) + np.asarray(lo, np.int64)


def vector(row):
    x = row[0][0]
    return jnp.stack([x, x * x, jnp.sin(x)])


def streamed(values, per_row=vector, bound=2.0, cuts=()):
    vault = Vault([table(values, cuts)["x"]], neighboring_relation="replace_one")
    return vault.ask(given_draw(*((3,) if per_row is vector else ())), RowSum(per_row, bound)).value


def in_memory(values, per_row=vector, bound=2.0):
    """Each row rounded by itself, as where places are private."""
    vault = Vault([jnp.asarray(values, jnp.float32)], neighboring_relation="replace_one", public_places=False)
    return vault.ask(given_draw(*((3,) if per_row is vector else ())), RowSum(per_row, bound)).value


LENGTHS = (1, 63, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS + 5)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_sum_is_that_of_the_table_in_memory(length):
    values = np.random.default_rng(length).standard_normal(length)
    values[:: max(length // 8, 1)] = np.resize(HOSTILE, len(values[:: max(length // 8, 1)]))
    cuts = sorted({0, 1, length // 3, length - 1} - {0, length})
    # A program for other numbers of rows may round the last bits of a row otherwise.
    np.testing.assert_allclose(streamed(values, cuts=cuts), in_memory(values), rtol=1e-6)
    one = lambda row: row[0][0]  # noqa: E731
    np.testing.assert_array_equal(streamed(values, one, cuts=cuts), in_memory(values, one))


@settings(max_examples=12)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40), st.data())
def test_pieces_do_not_matter(values, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(values) - 1, 1)), max_size=4)))
    cuts = [cut for cut in cuts if cut < len(values)]
    np.testing.assert_array_equal(streamed(values, cuts=cuts), streamed(values))


@settings(max_examples=12)
@given(st.lists(st.sampled_from(HOSTILE), min_size=2, max_size=20), st.sampled_from(HOSTILE), st.data())
def test_a_row_moves_the_sum_by_no_more_than_is_claimed(values, other, data):
    place = data.draw(st.integers(0, len(values) - 1))
    neighbour = [*values[:place], other, *values[place + 1 :]]

    def total(values):
        def of_block(rows, present):
            found = clipped_sum(vector, rows, 2.0, present=present)
            return [(found.hi, found.lo)]

        ((hi, lo),) = total_over([table(values)["x"]], of_block)
        return steps(hi, lo)

    assert np.linalg.norm(total(values) - total(neighbour)) <= 2 * GRID


def test_a_row_is_counted_in_its_place_by_its_number():
    """`numbered` is what the chunks of a table in memory are, too."""
    values, cuts = np.ones(BLOCK_ROWS + 100), (77, BLOCK_ROWS + 1)

    def weighted(row):
        return row[1][0] / (BLOCK_ROWS + 100) * row[0][0]

    vault = Vault([table(values, cuts)["x"]], neighboring_relation="replace_one").numbered()
    found = vault.ask(given_draw(), RowSum(weighted, 1.0)).value
    memory = Vault([jnp.asarray(values, jnp.float32)], neighboring_relation="replace_one").numbered()
    np.testing.assert_array_equal(found, memory.ask(given_draw(), RowSum(weighted, 1.0)).value)


def test_a_piece_may_be_read_some_rows_at_a_time(monkeypatch):
    """Rows have their numbers then, too; and columns side by side are a row's vector."""
    monkeypatch.setattr(pieces, "_READ_ROWS", BLOCK_ROWS)
    size = 3 * BLOCK_ROWS + 7
    columns = in_pieces(pa.table({"a": np.ones(size, np.float32), "b": np.full(size, 2, np.float32)}), (100,))

    def weighted(row):
        return row[1][0] / size * row[0][0]

    vault = Vault([columns[["a", "b"]]], neighboring_relation="replace_one").numbered()
    found = vault.ask(given_draw(2), RowSum(weighted, 3.0)).value
    np.testing.assert_allclose(found, np.arange(size).sum() / size * np.array([1.0, 2.0]), rtol=1e-5)


def test_several_totals_at_once():
    def of_block(rows, present):
        counted = jnp.sum(present, dtype=jnp.int32)
        return [(counted, 2 * counted), (3 * counted, 4 * counted)]

    found = total_over([table(np.ones(5), (2,))["x"]], of_block)
    assert [(int(hi), int(lo)) for hi, lo in found] == [(5, 10), (15, 20)]


def test_several_totals_over_a_table_without_rows():
    """Each has its own shape."""

    def of_block(rows, present):
        zeros = [jnp.zeros(shape, jnp.int32) for shape in ((), (2,), (3,))]
        return [(zero, zero) for zero in zeros]

    found = total_over([table(np.ones(0))["x"]], of_block)
    assert [(hi.shape, lo.shape) for hi, lo in found] == [((), ()), ((2,), (2,)), ((3,), (3,))]


def test_a_column_is_as_long_as_its_table():
    column = in_pieces(frame(5))[["a", "c"]]
    assert (len(column), column.ndim, column.shape) == (5, 2, (5, 2))
    assert StreamedTable.progress_bar is False


@pytest.mark.parametrize(("size", "fits"), [(2**31 - 1, True), (2**31, False)])
def test_rows_have_numbers_of_32_bits(size, fits):
    piece = pieces.FramePiece(frame(1), 0, size)
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="up to 2,147,483,647 rows"):
        assert len(Table([piece], frame(1).schema, Threads())) == size


@pytest.mark.parametrize("relation", ["replace_one", "add_or_remove_one", "zero_out"])
def test_bounds_are_those_of_the_table_in_memory(relation):
    """Counts of all bounds in one pass are those of one bound at a time, as whole numbers."""
    values = np.concatenate([np.random.default_rng(0).lognormal(0, 2, BLOCK_ROWS + 50), HOSTILE])
    values[:9] = 0.125 * 2.0 ** np.arange(9)  # just at bounds
    grid = Grid(2.0, 6)

    def both(row):
        return jnp.stack([row[0][0], 1 / row[0][0]])

    def found(rows, threshold):
        draws = given_draw(2, slots=6)
        vault = Vault(rows, neighboring_relation=relation)
        return np.asarray(vault.find_bounds(draws, both, grid, jnp.float32(0.125), jnp.float32(threshold)))

    for threshold in (10.0, 500.0, 9000.0):
        of_pieces = found([table(values, (5, BLOCK_ROWS))["x"]], threshold)
        np.testing.assert_array_equal(of_pieces, found([jnp.asarray(values, jnp.float32)], threshold))


def test_a_row_at_a_bound_does_not_exceed_it():
    for rows in ([table(np.full(99, 4.0))["x"]], [jnp.full(99, 4.0, jnp.float32)]):
        vault = Vault(rows, neighboring_relation="replace_one")
        found = vault.find_bounds(given_draw(1, slots=6), lambda row: row[0], Grid(2.0, 6), jnp.float32(0.125), 50.0)
        np.testing.assert_array_equal(found, [4.0])


def test_a_row_with_a_missing_value_counts_for_nothing():
    whole = in_pieces(pa.table({"x": pa.array([1.0, None, 0.5, None], pa.float32())}))
    vault = Vault([whole["x"]], neighboring_relation="replace_one")
    found = vault.ask(given_draw(3), RowSum(vector, 2.0)).value
    np.testing.assert_array_equal(found, in_memory([1.0, 0.5]))


def test_only_rows_that_are_there_are_counted():
    """The rest of a block is zeros, and so is a missing value; each would count as one."""
    whole = in_pieces(pa.table({"x": pa.array([1.0, None, 0.5, None, 2.0], pa.float32())}), (1, 3))
    vault = Vault([whole["x"]], neighboring_relation="replace_one")
    found = vault.ask(given_draw(), RowSum(lambda row: jnp.ones_like(row[0][0]), 1.0)).value
    assert float(found) == 3.0


def test_a_table_without_rows():
    np.testing.assert_array_equal(streamed([]), in_memory(np.zeros(0)))


def test_what_a_task_holds_is_public():
    """The program, numbers that were given, and names of columns: no row."""
    sent, table_of_pieces = [], table([0.123456, 0.654321])
    run = table_of_pieces.run
    table_of_pieces.run = lambda task: (sent.append(task), run(task))[1]
    vault = Vault([table_of_pieces["x"]], neighboring_relation="replace_one")
    vault.ask(given_draw(), RowSum(lambda row: row[0][0], 1.0))
    written = pickle.dumps(sent)
    assert np.float32(0.123456).tobytes() not in written
    assert b"x" in written


# -- Pieces that are not what they should be ---------------------------------------------------------------------------


class Badly(StreamedTable):
    """Runs the pieces of another table in another way."""

    def __init__(self, table, how):
        self._table, self._how = table, how

    num_rows = property(lambda self: self._table.num_rows)

    def run(self, task):
        return self._how(list(self._table.run(task)))


def shifted(parts):
    return [parts[0], *(part._replace(first=part.first + 1) for part in parts[1:])]


BAD = {
    "twice": lambda parts: [*parts, parts[0]],
    "one is missing": lambda parts: parts[:-1],
    "none": lambda parts: [],
    "in another place": shifted,
    "one more": lambda parts: [*parts, Part(10, 1, parts[0].totals)],
    "one behind a gap": lambda parts: [*parts, Part(11, 1, parts[0].totals)],
    "one without rows": lambda parts: [*parts, Part(10, 0, parts[0].totals)],
}


@pytest.mark.parametrize("how", BAD)
def test_each_piece_counts_once(how):
    columns = table(np.ones(10), (3, 7))
    column = passes.StreamedColumn(Badly(columns, BAD[how]), (), np.float32, columns["x"].spec)
    vault = Vault([column], neighboring_relation="replace_one")
    with pytest.raises(RuntimeError, match="came back"):
        vault.ask(given_draw(), RowSum(lambda row: row[0][0], 1.0))


def test_the_order_of_pieces_does_not_matter():
    columns = table(np.arange(10.0), (3, 7))
    column = passes.StreamedColumn(Badly(columns, lambda parts: parts[::-1]), (), np.float32, columns["x"].spec)
    vault = Vault([column], neighboring_relation="replace_one")
    found = vault.ask(given_draw(), RowSum(lambda row: row[0][0], 9.0)).value
    np.testing.assert_array_equal(found, streamed(np.arange(10.0), lambda row: row[0][0], 9.0))


def test_a_piece_with_another_number_of_rows_is_noticed():
    columns = table(np.ones(10), (3,))
    object.__setattr__(columns._pieces[0], "num_rows", 4)
    vault = Vault([columns["x"]], neighboring_relation="replace_one")
    with pytest.raises(ValueError, match="has changed"):
        vault.ask(given_draw(), RowSum(lambda row: row[0][0], 1.0))


# -- What is refused ---------------------------------------------------------------------------------------------------


def test_rows_that_meet_are_refused():
    vault = Vault([table(np.ones(4))["x"]], neighboring_relation="replace_one")
    with pytest.raises(RowsMeetError):
        vault.ask(given_draw(), RowSum(lambda row: jax.pure_callback(lambda x: x, row[0][0], row[0][0]), 1.0))


@pytest.mark.parametrize(
    "options",
    [
        {"private": False},
        {"batches": FixedBatches(2)},
        {"owners": OwnerIndex(np.zeros(4, int), 1)},
    ],
    ids=str,
)
def test_only_private_sums_over_all_rows(options):
    with pytest.raises(TypeError, match="read in pieces"):
        Vault([table(np.ones(4))["x"]], **{"neighboring_relation": "replace_one"} | options)


def test_not_in_a_loop_of_a_program():
    vault = Vault([table(np.ones(4))["x"]], neighboring_relation="replace_one")

    def asks(vault, draws):
        step = lambda state, draw: (state, vault.ask(draw, RowSum(lambda row: row[0][0], 1.0)).value)  # noqa: E731
        return draws.scan(step, 0.0)[1]

    with pytest.raises(TypeError, match="as a whole"):
        vault.program(asks)(vault, given_draw(slots=2))
    with pytest.raises(TypeError, match="as a whole"):
        asks(vault, given_draw(slots=2))


@pytest.mark.parametrize("around", [jax.checkpoint, jax.jit], ids=lambda around: around.__name__)
def test_not_in_a_program_inside_of_another(around):
    """Whoever runs that might run it several times."""
    (column,) = [table(np.ones(4))["x"]]

    def asks():
        return total_over([column], lambda rows, present: [(jnp.sum(present, dtype=jnp.int32),) * 2])[0]

    assert trace_program(asks)
    with pytest.raises(TypeError, match="as a whole"):
        trace_program(around(asks))


def test_a_program_is_traced_once():
    vault = Vault([table(np.ones(4))["x"]], neighboring_relation="replace_one")
    traced = []

    def ask(vault, draw, bound):
        traced.append(bound)
        return vault.ask(draw, RowSum(lambda row: row[0][0], bound)).value

    program = vault.program(ask)
    found = [float(program(vault, given_draw(), jnp.float32(bound))) for bound in (0.5, 1.0, 2.0)]
    np.testing.assert_allclose(found, [2.0, 4.0, 4.0], rtol=1e-5)
    assert len(traced) == 1


def test_arguments_of_a_program_that_are_no_arrays_are_counted_from_0():
    vault = Vault([table(np.ones(4))["x"]], neighboring_relation="replace_one")

    def ask(vault, letters, draw, bound):
        return len("abc"[:letters]) * vault.ask(draw, RowSum(lambda row: row[0][0], bound)).value

    program = vault.program(ask, static=(0,))
    found = [float(program(vault, letters, given_draw(), jnp.float32(1.0))) for letters in (2, 3)]
    np.testing.assert_allclose(found, [8.0, 12.0], rtol=1e-5)


def test_a_program_is_for_the_columns_that_it_was_made_for():
    columns = in_pieces(frame(10))
    one, other = (Vault([columns[name]], neighboring_relation="replace_one") for name in ("a", "c"))
    program = one.program(lambda vault, draw: vault.ask(draw, RowSum(lambda row: row[0][0], 1.0)).value)
    for wrong in (other, one.numbered(), Vault([in_pieces(frame(10))["a"]], neighboring_relation="replace_one")):
        with pytest.raises(TypeError, match="for tables with the settings"):
            program(wrong, given_draw())


def test_no_sum_is_kept():
    """A program would hold it, exactly."""
    vault = Vault([table(np.ones(4))["x"]], neighboring_relation="replace_one")
    with pytest.raises(TypeError, match="no sum is kept"):
        vault.keep(RowSum(lambda row: row[0][0], 1.0))


def test_columns_of_one_table_only():
    one, other = frame(10), frame(10)
    with pytest.raises(ValueError, match="2 scan"):
        table_of([in_pieces(one)["a"], in_pieces(other)["a"]])
    with pytest.raises(ValueError, match="1 array"):
        table_of([in_pieces(one)["a"], np.ones(10)])
    assert table_of([np.ones(10)]) is None
