"""The law of noise and of batches at single values: a histogram does not show it, and many draws add it up."""

import contextlib
import math
from decimal import Decimal

import mpmath
import numpy as np
import pytest
from scipy import stats

from numpyro_dp.privacy import exact_sampling
from numpyro_dp.privacy.exact_sampling import LOGISTIC, NORMAL, poisson_rows, rounded
from numpyro_dp.privacy.noise import NoiseSource

LAWS = {"normal": (NORMAL, stats.norm, 0.5), "logistic": (LOGISTIC, stats.logistic, 1.0)}


def words_of(seed):
    return NoiseSource(seed).words(b"")


def no_more_words(count):
    raise AssertionError("the first words decide")


def exact_accept(law, whole, fraction):
    """The probability to accept, from the density itself, in 60 digits."""
    x = whole + fraction
    if law is NORMAL:
        target = mpmath.exp(-(x**2) / 2)
        return target / mpmath.exp(-mpmath.mpf(whole) / 2)
    return mpmath.exp(-x) / (1 + mpmath.exp(-x)) ** 2 / mpmath.exp(-mpmath.mpf(whole))


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("steps", [1, 3, 2**10 + 1])
def test_every_integer_is_as_frequent_as_the_law_says(name, steps):
    law, reference, _ = LAWS[name]
    count = 10**6
    drawn = rounded(law, steps, count, words_of(1))
    values = np.arange(-12 * steps, 12 * steps + 1)
    expected = count * (reference.cdf((values + 0.5) / steps) - reference.cdf((values - 0.5) / steps))
    seen = np.bincount(np.clip(drawn, values[0], values[-1]) - values[0], minlength=len(values))
    cells = expected > 20
    rest = count - expected[cells].sum()
    statistic = ((seen - expected)[cells] ** 2 / expected[cells]).sum()
    if rest > 20:
        statistic += (count - seen[cells].sum() - rest) ** 2 / rest
    assert stats.chi2.sf(statistic, cells.sum() - 1) > 1e-5  # the seed is fixed


@pytest.mark.parametrize("name", LAWS)
def test_the_accepting_words_are_as_many_as_the_density_says(name):
    """At 2**49 steps a single value has a probability of 2**-50. It is the share of the accepting words, which is
    counted here: by bisection, to one of 2**64. (Version 0.1.0 rounded float64 quantiles: single values were too
    frequent or too rare by 19%.)"""
    law = LAWS[name][0]
    rng = np.random.default_rng(0)
    for steps in (7, 2**24 + 1, 2**49):
        for whole in (0, 1, 5):
            step, part = int(rng.integers(steps)), int(rng.integers(2**63))
            low, high = 0, 2**64  # words below `low` accept, those from `high` on do not

            def accepts(test, steps=steps, whole=whole, step=step, part=part):
                try:
                    decide = exact_sampling._accept_exactly
                    return decide(law, steps, whole, step, part, test, no_more_words)
                except AssertionError:
                    return None  # a further word decides: this is the one on the border

            while high - low > 1:
                middle = (low + high) // 2
                found = accepts(middle)
                if found is None:
                    low, high = middle, middle + 1
                elif found:
                    low = middle
                else:
                    high = middle
            with mpmath.workdps(60):
                fraction = (step + mpmath.mpf(part) / 2**63) / steps
                expected = exact_accept(law, whole, fraction) * mpmath.mpf(2) ** 64
                assert abs(low - expected) <= 3, (steps, whole)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("steps", [1, 5, 2**30, 2**49])
def test_floating_point_decides_as_exact_arithmetic_does(name, steps, monkeypatch):
    law = LAWS[name][0]
    quick = exact_sampling._accepted(law, steps, 600, words_of(3))
    calls = []

    def decide(*arguments):
        calls.append(arguments)
        return exactly(*arguments)

    exactly = exact_sampling._accept_exactly
    monkeypatch.setattr(exact_sampling, "_accept_exactly", decide)
    monkeypatch.setattr(exact_sampling, "_OPEN", 2.0)  # as if floating point left all of them open
    slow = exact_sampling._accepted(law, steps, 600, words_of(3))
    assert len(calls) >= 300
    np.testing.assert_array_equal(slow, quick)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("off", [-(2**23), -1, 0, 1, 2**23])
def test_what_floating_point_cannot_tell_is_decided_exactly(name, off, monkeypatch):
    """The test's word lies next to the probability to accept."""
    law, part, decided = LAWS[name][0], 2**62, []
    monkeypatch.setattr(exact_sampling, "_accept_exactly", lambda *arguments: decided.append(arguments) or True)
    border = int(law.log_accept_exactly(0, Decimal(part) / 2**63).exp() * 2**64)
    proposal = np.array([2**64 * 4 // 5, 0, 2 * part, border + off], np.uint64)  # whole number 0, step, part, test
    assert len(exact_sampling._accepted(law, 1, 1, lambda count: proposal)) == 1
    assert len(decided) == 1


def test_whole_numbers_are_decided_by_as_many_bits_as_it_takes():
    """At the border between two of them, and in the tail, where the first word is 0."""
    asked = []

    def further(word):
        def words(count):
            asked.append(word)
            return np.array([word] * count, np.uint64)

        return words

    with mpmath.workdps(60):
        border = int(mpmath.floor(mpmath.exp(mpmath.mpf(-3) / 2) * mpmath.mpf(2) ** 64))
    rate = lambda: Decimal("0.5")  # noqa: E731
    decide = exact_sampling._whole_number_exactly
    assert exact_sampling._whole_numbers(0.5, np.array([border], np.uint64))[1].all()
    assert {decide(rate, border, further(0)), decide(rate, border, further(2**64 - 1))} == {2, 3}
    assert decide(rate, border - 1, no_more_words) == 3
    assert decide(rate, border + 1, no_more_words) == 2
    assert decide(rate, 0, further(2**63)) == math.floor(65 * 2 * math.log(2))  # U = 2**-65 and a little
    assert decide(rate, 2**64 - 1, further(1)) == 0
    assert asked


@pytest.mark.parametrize("rate", [1e-5, 1e-3, 0.5, 30.0])
@pytest.mark.parametrize("whole", [1, 2, 7])
def test_borders_between_whole_numbers_are_left_open_as_far_as_floats_are_off(rate, whole):
    with mpmath.workdps(60):
        border = int(mpmath.exp(-mpmath.mpf(rate) * whole) * mpmath.mpf(2) ** 64)
    if border > 2**20:
        near = [border + off for off in (-(2**9), -1, 0, 1, 2**9) if border + off < 2**64]
        assert exact_sampling._whole_numbers(rate, np.array(near, np.uint64))[1].all()


def test_tails_have_no_end():
    """float64 normals end at 9 standard deviations, float32 ones at 5.42; here only the bits drawn set a limit."""
    last = 2**63 - 1
    assert not exact_sampling._accept_exactly(NORMAL, 4, 12, 0, last, 1, no_more_words)
    tiny = exact_sampling._accept_exactly(NORMAL, 4, 12, 0, last, 0, lambda count: np.array([0, 0], np.uint64))
    assert tiny  # with enough zeros the test is passed, however rare
    drawn = rounded(NORMAL, 2**49, 4000, words_of(5))
    assert drawn.dtype == np.int64
    assert stats.kstest(drawn / 2.0**49, "norm").pvalue > 1e-5


@pytest.mark.parametrize("bit", range(6))
def test_the_last_bits_are_fair(bit):
    """A lattice in the noise shows in its last bits first."""
    drawn = rounded(NORMAL, 2**49, 10**5, words_of(6))
    share = ((drawn >> bit) & 1).mean()
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(10**5)


def test_no_steps_no_noise_and_too_many_are_refused():
    assert (rounded(NORMAL, 0, 5, words_of(1)) == 0).all()
    assert rounded(NORMAL, 3, 0, words_of(1)).shape == (0,)
    with pytest.raises(ValueError, match="steps must lie between"):
        rounded(NORMAL, 2**53, 1, words_of(1))


@pytest.mark.statistical
@pytest.mark.parametrize(("rate", "num_rows"), [(0.3, 4), (0.02, 150), (0.97, 20), (1e-9, 10**6)])
def test_poisson_batches_have_their_law_in_the_tails_too(rate, num_rows):
    """Of a batch of expected size 3, sizes that 1 of 1e4 has: NumPy's binomial numbers end where theirs are rounded."""
    count = 40_000
    words = words_of(8)
    batches = [poisson_rows(rate, num_rows, words) for _ in range(count)]
    sizes = np.array([len(rows) for rows in batches])
    assert all((np.diff(rows) > 0).all() for rows in batches)
    most = num_rows if num_rows < 200 else 20
    expected = count * stats.binom.pmf(np.arange(most + 1), num_rows, rate)
    seen = np.bincount(sizes, minlength=most + 1)
    cells = expected > 8
    statistic = ((seen[: most + 1] - expected)[cells] ** 2 / expected[cells]).sum()
    assert stats.chi2.sf(statistic, max(cells.sum(), 1)) > 1e-5
    if num_rows < 200:
        share = np.bincount(np.concatenate(batches), minlength=num_rows) / count
        assert abs(share - rate).max() < 5.5 * np.sqrt(rate * (1 - rate) / count)


def test_few_rows_join_at_a_small_rate_and_all_of_them_at_one():
    assert len(exact_sampling.poisson_rows(1e-3, 1000, words_of(1))) < 20  # by chance once in 1e16
    np.testing.assert_array_equal(exact_sampling.poisson_rows(1.0, 30, words_of(1)), np.arange(30))


def test_gaps_of_poisson_batches_are_decided_exactly(monkeypatch):
    words = words_of(9)
    quick = poisson_rows(0.05, 2000, words)
    monkeypatch.setattr(
        exact_sampling,
        "_whole_numbers",
        lambda rate, drawn, original=exact_sampling._whole_numbers: (original(rate, drawn)[0] + 17, drawn >= 0),
    )
    np.testing.assert_array_equal(poisson_rows(0.05, 2000, words_of(9)), quick)


def test_a_batch_goes_on_where_its_words_ended():
    """Words of which each makes the shortest gap: they are soon used up."""
    rows = poisson_rows(0.3, 5000, lambda count: np.full(count, 2**64 - 2**50, np.uint64))
    np.testing.assert_array_equal(rows, np.arange(5000))


@pytest.mark.parametrize("num_rows", [0, 1])
def test_batches_of_tables_without_rows(num_rows):
    assert len(poisson_rows(0.5, num_rows, words_of(1))) <= num_rows
    assert len(poisson_rows(1.0, num_rows, words_of(1))) == num_rows


def test_the_operating_systems_words_are_fresh():
    words = NoiseSource().words(b"")
    assert len(set(words(1000).tolist()) | set(words(1000).tolist())) == 2000


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize(("steps", "step", "whole"), [(1, 0, 0), (7, 5, 1), (2**49, 3, 2)])
def test_acceptance_is_decided_by_as_many_bits_as_it_takes(name, steps, step, whole):
    """Where the first words are just those of the border, the next ones decide; all bits of both count."""
    law = LAWS[name][0]
    part, more_of_part = 2**61 + 12_345, 2**63 + 678
    with mpmath.workdps(80):
        fraction = (step + (part * 2**64 + more_of_part + mpmath.mpf(1) / 2) / mpmath.mpf(2) ** 127) / steps
        border = int(mpmath.floor(exact_accept(law, whole, fraction) * mpmath.mpf(2) ** 128))
    for test, accepted in ((border - 2**40, True), (border + 2**40, False)):
        first, second = divmod(test, 2**64)
        asked = []

        def more(count, second=second, asked=asked):
            asked.append(count)
            return np.array([more_of_part, second], np.uint64)

        assert exact_sampling._accept_exactly(law, steps, whole, step, part, first, more) == accepted
        assert asked == [2]


def test_one_number_is_drawn_as_many_are():
    for seed in range(50):
        assert rounded(NORMAL, 3, 1, words_of(seed)).shape == (1,)


def imprecise_at_first(bits):
    """Arithmetic whose error is large while there are 64 bits."""
    return precise(bits) if bits > 64 else contextlib.nullcontext(Decimal("0.3"))


precise = exact_sampling._precision


@pytest.mark.parametrize("ratio", [2.9, 3.1])
def test_within_the_error_of_a_border_a_further_word_decides_on_a_whole_number(ratio, monkeypatch):
    monkeypatch.setattr(exact_sampling, "_precision", imprecise_at_first)
    asked = []
    word = int(math.exp(-ratio / 2) * 2**64)
    further = lambda count: asked.append(count) or np.array([2**63], np.uint64)  # noqa: E731
    assert exact_sampling._whole_number_exactly(lambda: Decimal("0.5"), word, further) == math.floor(ratio)
    assert asked == [1]


@pytest.mark.parametrize("accepted", [False, True])
def test_within_the_error_of_a_border_a_further_word_decides_whether_to_accept(accepted, monkeypatch):
    monkeypatch.setattr(exact_sampling, "_precision", imprecise_at_first)
    asked, part = [], 2**62
    border = int(NORMAL.log_accept_exactly(1, Decimal("0.5")).exp() * 2**64)
    test = border + (-1 if accepted else 1) * 2**50
    further = lambda count: asked.append(count) or np.array([2**63, 2**63], np.uint64)  # noqa: E731
    assert exact_sampling._accept_exactly(NORMAL, 1, 1, 0, part, test, further) == accepted
    assert asked == [2]


def test_the_smallest_word_is_left_open_and_gives_a_number():
    whole, is_open = exact_sampling._whole_numbers(0.5, np.array([0], np.uint64))
    assert np.isfinite(whole).all()
    assert is_open.all()


def counted(words, asked):
    return lambda count: asked.append(count) or words(count)


@pytest.mark.parametrize(
    ("rate", "num_rows", "most"), [(1e-3, 10**6, 1_500), (1e-15, 1, 20), (0.5, 1000, 700), (1e-9, 10**6, 20)]
)
def test_a_batch_takes_about_as_many_words_as_it_has_rows(rate, num_rows, most):
    asked = []
    poisson_rows(rate, num_rows, counted(words_of(11), asked))
    assert sum(asked) < most


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("steps", [2**10, 2**10 + 1])
def test_as_many_proposals_are_made_as_numbers_are_missing(name, steps):
    """Nearly always in one round, of which about every second or third is accepted."""
    asked = []
    assert len(rounded(LAWS[name][0], steps, 10**4, counted(words_of(12), asked))) == 10**4
    assert len(asked) == 1
    assert sum(asked) < 4 * 8 * 10**4


def test_where_the_bits_of_a_part_leave_it_open_a_further_word_decides():
    """The probability to accept falls within the part: a test word between its two ends is open."""
    rng, whole = np.random.default_rng(0), 1
    while True:
        part = int(rng.integers(2**62, 2**63 - 2))
        with mpmath.workdps(60):
            ends = [exact_accept(NORMAL, whole, mpmath.mpf(part + end) / 2**63) * 2**64 for end in (0, 1)]
            first, last = (int(mpmath.floor(end)) for end in ends)
        if first > last:
            break
    asked = []

    def further(count):
        asked.append(count)
        return np.array([2**63, 0], np.uint64)

    exact_sampling._accept_exactly(NORMAL, 1, whole, 0, part, first - 1, further)
    assert asked == [2]


def test_the_first_bit_of_a_part_is_the_sign():
    """And no other, of which the part itself is made."""
    for last_bits, sign in ((0, 1), (1, -1), (2, 1), (3, -1)):
        proposal = np.array([2**64 * 2 // 5, 0, 2**63 + last_bits, 0], np.uint64)  # whole number 1, accepted
        (found,) = exact_sampling._accepted(NORMAL, 1, 1, lambda count, proposal=proposal: proposal)
        assert np.sign(found) == sign


@pytest.mark.parametrize("steps", [-1, 2**52 + 1])
def test_steps_out_of_range_are_refused(steps):
    with pytest.raises(ValueError, match="steps must lie between"):
        rounded(NORMAL, steps, 1, words_of(1))
    assert rounded(NORMAL, 2**52, 1, words_of(1)).shape == (1,)
