"""Random integers whose law is exact: rounded normal and logistic numbers, and the rows of a Poisson batch.

A normal number in floating point has a lattice of its own. Multiplied up and rounded to whole steps, it takes some
integers too often and others never, and whoever sees many of them learns from it which part of a sum was noise. Here
every integer has the probability that the law gives it, given uniformly random bits.

*How.* A number is proposed from bits alone and accepted with a probability that floating point knows up to a small
error. Where that error, or the bits drawn so far, leave a decision open (in fewer than one of 1e6 numbers), further
bits are drawn, and decimal arithmetic of as many digits as it needs decides. The proposal is that of Karney (2016),
"Sampling exactly from the normal distribution", algorithm N.

*What is assumed of floating point*: NumPy's ``log``, ``log1p`` and ``exp`` are right to 2**-46, relative, in float64.

Proof: docs/proofs/noise.md.
"""

import contextlib
import decimal
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import NamedTuple

import numpy as np

Words = Callable[[int], np.ndarray]
"""So many fresh, uniformly random 64-bit words, as an array of uint64."""

_OPEN = 2.0**-40
"""How near two probabilities may be for floating point to say which is larger."""
_DIGITS = 25  # of decimal arithmetic beyond those of the bits
_SPARE = 16  # proposals beyond the expected number, so that one round is nearly always enough

LARGEST_STEPS = 2**52
"""Steps per unit of scale, at most: they are exact in float64."""


class Law(NamedTuple):
    """A symmetric density on the line, ``|x| = k + f`` with a whole number k, proposed with probability
    ``(1 - e^-rate) e^(-rate k)``, and a fraction f, proposed uniformly.

    :ivar rate: of the whole numbers.
    :ivar log_accept: log of the probability to accept (k, f); decreases in f. On arrays of float64.
    :ivar log_accept_exactly: the same in decimal arithmetic.
    :ivar accepted: share of the proposals that are accepted.
    """

    rate: float
    log_accept: Callable[[np.ndarray, np.ndarray], np.ndarray]
    log_accept_exactly: Callable[[int, Decimal], Decimal]
    accepted: float


NORMAL = Law(
    0.5,
    lambda k, f: -(k * (k - 1) + f * (2 * k + f)) / 2,
    lambda k, f: -(k * (k - 1) + f * (2 * k + f)) / 2,
    0.49,
)
LOGISTIC = Law(
    1.0,
    lambda k, f: -f - 2 * np.log1p(np.exp(-k - f)),
    lambda k, f: -f - 2 * (1 + (-k - f).exp()).ln(),
    0.31,
)


def rounded(law: Law, steps: int, size: int, words: Words) -> np.ndarray:
    """Whole numbers nearest to ``steps * X``, X of the law; exactly so distributed, and independent.

    :param steps: per unit of X, from 0 to `LARGEST_STEPS`.
    :param size: how many numbers.
    :return: int64 array of shape (size,).
    """
    if not 0 <= steps <= LARGEST_STEPS:
        raise ValueError(f"steps must lie between 0 and 2**52, got {steps}")
    if steps == 0:
        return np.zeros(size, np.int64)
    found: list[np.ndarray] = []
    missing = size
    while missing > 0:
        accepted = _accepted(law, steps, _proposals(law, steps, missing), words)[:missing]
        found.append(accepted)
        missing -= len(accepted)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _proposals(law: Law, steps: int, missing: int) -> int:
    usable = steps / 2.0 ** (steps - 1).bit_length()
    return int(1.1 * missing / (law.accepted * usable)) + _SPARE


def _accepted(law: Law, steps: int, count: int, words: Words) -> np.ndarray:
    """The accepted ones of so many proposals, in their order."""
    for_whole, for_step, for_part, for_test = words(4 * count).reshape(4, count)
    step = (for_step & np.uint64(2 ** (steps - 1).bit_length() - 1)).astype(np.int64)
    within = step < steps  # uniform below `steps`
    for_whole, step, for_part, for_test = (x[within] for x in (for_whole, step, for_part, for_test))
    negative = (for_part & np.uint64(1)).astype(bool)
    part = for_part >> np.uint64(1)  # of a step, in units of 2**-63
    whole, is_open = _whole_numbers(law.rate, for_whole)
    fraction = (step + part * 2.0**-63) / steps
    with np.errstate(under="ignore"):
        margin = for_test * 2.0**-64 - np.exp(law.log_accept(whole, fraction))
    accepted = margin < 0
    is_open |= np.abs(margin) < _OPEN
    whole = whole.astype(np.int64)
    for j in np.flatnonzero(is_open):
        whole[j] = _whole_number_exactly(lambda: Decimal(law.rate), int(for_whole[j]), words)
        accepted[j] = _accept_exactly(law, steps, int(whole[j]), int(step[j]), int(part[j]), int(for_test[j]), words)
    magnitude = steps * whole + step + (part >> np.uint64(62)).astype(np.int64)  # rounded: the first bit of the part
    return np.where(negative, -magnitude, magnitude)[accepted]


def _whole_numbers(rate: float, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``floor(-log(U) / rate)`` with U in ``[w, w + 1) / 2**64``, as floats, and where that is left open."""
    unit = words + 0.5
    ratio = -np.log(unit * 2.0**-64) / rate
    error = (2.0**-50 + 2 / unit) / rate + 2.0**-44 * ratio  # of rounding, of the bits not drawn, of the logarithm
    is_open = (np.abs(ratio - np.rint(ratio)) < error) | (words < np.uint64(2**40))
    return np.floor(ratio), is_open


def _whole_number_exactly(rate: Callable[[], Decimal], word: int, words: Words) -> int:
    """``floor(-log(U) / rate)`` for the uniform U that begins with `word`, by as many further words as it takes."""
    bits = 64
    while True:
        with _precision(bits) as error:
            unit = Decimal(2) ** bits
            low = max(-((word + 1) / unit).ln() / rate() - error, Decimal(0))
            high = -(word / unit).ln() / rate() + error if word else Decimal("Infinity")
            if high.is_finite() and math.floor(low) == math.floor(high):
                return math.floor(low)
        word, bits = (word << 64) + int(words(1)[0]), bits + 64


def _accept_exactly(law: Law, steps: int, whole: int, step: int, part: int, test: int, words: Words) -> bool:
    """Whether ``V < exp(log_accept(whole, (step + W) / steps))``, with V beginning with `test` and W with `part`."""
    bits = 64  # of `test`; `part` has one less
    while True:
        with _precision(bits) as error:
            largest, smallest = (
                law.log_accept_exactly(whole, (step + (part + end) / Decimal(2) ** (bits - 1)) / steps).exp()
                for end in (0, 1)
            )
            if (test + 1) / Decimal(2) ** bits <= smallest - error:
                return True
            if test / Decimal(2) ** bits >= largest + error:
                return False
        more = words(2)
        part, test, bits = (part << 64) + int(more[0]), (test << 64) + int(more[1]), bits + 64


@contextlib.contextmanager
def _precision(bits: int) -> Iterator[Decimal]:
    """Decimal arithmetic for numbers of so many bits; gives a bound on the error of a short computation."""
    digits = math.ceil(bits * math.log10(2)) + 2 * _DIGITS
    with decimal.localcontext(prec=digits, Emin=-(10**9), Emax=10**9):
        yield Decimal(10) ** (_DIGITS - digits)


def poisson_rows(rate: float, num_rows: int, words: Words) -> np.ndarray:
    """Which of the rows are in a batch that each of them joins independently with probability `rate`; exactly so.

    The gaps between them are geometric: of each row that joins, the next one is found by one uniform number.

    :return: row numbers in increasing order, int64.
    """
    if rate >= 1:
        return np.arange(num_rows)
    log_rate = -math.log1p(-rate)
    found, last = [np.zeros(0, np.int64)], -1
    while last < num_rows:
        expected = (num_rows - last) * rate
        drawn = words(int(expected + 4 * math.sqrt(expected)) + _SPARE)
        gaps, is_open = _whole_numbers(log_rate, drawn)
        gaps = np.minimum(gaps, num_rows).astype(np.int64)
        for j in np.flatnonzero(is_open):
            gaps[j] = min(_whole_number_exactly(lambda: -(1 - Decimal(rate)).ln(), int(drawn[j]), words), num_rows)
        places = last + np.cumsum(gaps + 1)
        found.append(places)
        last = int(places[-1])
    places = np.concatenate(found)
    return places[places < num_rows]
