"""Which bound of the score rows ask for that are longer than the model expects."""

import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_dp.preparation.last_release
import numpyro_dp.preparation.search
from numpyro_dp import DPHMC, MCMC, PosteriorWarning
from numpyro_dp.preparation.frames import Frame
from numpyro_dp.preparation.long_rows import EDGES, LongRows, count_long_rows, variance_by_chance
from numpyro_dp.preparation.survey import Survey
from tests.helpers.surveys import Parabola, fund_of

NONE = LongRows()


class Counted(Parabola):
    """A survey with given counts, in standard deviations of noise and of chance."""

    def __init__(self, counts, n, m, off):
        super().__init__(np.zeros(m), np.eye(m), n)
        self.counts, self.off = np.asarray(counts, float), off

    def long_rows(self, draw, frame, edges):
        _, scale = super().long_rows(draw, frame, edges)
        return self.counts * np.hypot(scale, np.sqrt(variance_by_chance(self.n, self.off))), scale


def asked(counts, before=NONE, n=20_000, rho=0.1, m=4, off=0.0):
    """
    :param counts: in standard deviations of their noise, and of what chance makes.
    """
    frame = Frame(np.zeros(m), np.eye(m))
    return count_long_rows(Counted(counts, n, m, off), fund_of(rho), frame, 0.04 * rho, n, off, before)


def is_none(found):
    return found.bound == found.taken == found.counts == 0 and not found.clear.any()


def test_no_larger_bound_is_asked_for_by_what_noise_may_have_made():
    for counts in ([2.4, 2.4, 2.4, 2.4], [-9, -9, -9, -9], [3.4, 0, 0, 0], [0, 0, 20, 0]):
        assert is_none(asked(counts))


def test_without_noise_what_chance_makes_is_not_believed():
    """Of a model that holds, the numbers of rows beyond an edge vary from table to table."""
    chance = np.sqrt(variance_by_chance(20_000, 0.0))
    for counts in (2.4 * chance, [3.4 * chance[0], 0, 0, 0], [0, 0, 0, 2.0]):
        assert is_none(asked(np.asarray(counts) / chance, rho=1e12))
    assert asked([30, 30, 0, 0], rho=1e12).bound > EDGES[0]


def test_bounds_are_as_large_as_the_rows_that_are_counted_are_long():
    """But no larger than what the noise of that bound allows."""
    bounds = [asked(counts).bound for counts in ([30, 0, 0, 0], [30, 30, 0, 0], [30, 30, 30, 0], [30, 30, 30, 30])]
    assert bounds[0] == EDGES[1]
    assert bounds == sorted(bounds)
    assert bounds[-1] > EDGES[1]
    # Where there are few rows, larger bounds would let in too much noise.
    assert asked([30, 30, 30, 30], n=500).bound < bounds[-1]


def test_what_the_largest_bound_still_takes_is_said():
    found = asked([300, 300, 300, 300])
    assert found.bound == EDGES[-1]
    assert found.taken > 10
    assert asked([30, 30, 0, 0]).taken == 0


def known_by(clear):
    return LongRows(float(EDGES[2]), 0.0, 1, np.asarray(clear, float))


def test_where_such_rows_are_known_of_noise_is_not_taken_for_their_absence():
    assert asked([0, 0, 0, 0], known_by([9, 9, 9, 9]), m=1).bound > EDGES[0]
    assert asked([0, 0, 0, 0], m=1).bound == 0


def test_what_the_next_count_does_not_confirm_is_taken_back():
    """Two counts together have twice the variance of one."""
    assert is_none(asked([0.9, 0.9, 0.9, 0.9], known_by([4, 4, 4, 4])))
    found = asked([1.0, 1.0, 1.0, 1.0], known_by([4, 4, 4, 4]))
    assert found.bound > 0
    assert (found.counts, *found.clear) == (2, 5, 5, 5, 5)


def test_a_place_that_may_be_off_makes_long_rows_by_itself():
    scale = np.sqrt(variance_by_chance(20_000, 0.0))
    off = np.sqrt(variance_by_chance(20_000, 9.0))
    rng = np.random.default_rng(0)
    rows = rng.exponential(size=(400, 20_000)) * (1 + 3 / np.sqrt(20_000) * rng.standard_normal((400, 1))) - 1
    for k, edge in enumerate(EDGES[:3]):
        beyond = np.sum(rows > edge, 1)
        spread = beyond.std() / np.sqrt(2 * len(rows))
        assert abs(beyond.std() - off[k]) < 6 * spread
        assert beyond.std() > scale[k]


def model(X, y=None):
    a = numpyro.sample("a", dist.Normal(0, 100))
    b = numpyro.sample("b", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(a + b * X, sigma), obs=y)


@pytest.mark.statistical
@pytest.mark.nightly
def test_a_normal_law_of_rows_with_heavier_tails_is_right(monkeypatch):
    """Its exact posterior is about the moments of the rows, whatever law they have. Scales are exp(x) apart by t noise
    with 5 degrees of freedom; without the counts, and without room for a misfit, the clip takes a part of the
    variance."""
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, 40_000).astype(np.float32)
    y = (50 + 3 * X + 2 * rng.standard_t(5, len(X))).astype(np.float32)
    b, a = np.polyfit(X, y, 1)
    exact = np.std(y - a - b * X)

    def away():
        mcmc = MCMC(DPHMC(model, eps=3.0), num_warmup=100, num_samples=1_000, progress_bar=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PosteriorWarning)
            mcmc.run(jax.random.key(0), X, y=y)
        sigma = np.asarray(mcmc.get_samples()["sigma"])
        return (sigma.mean() - exact) / (exact / np.sqrt(2 * len(X))), sigma.std() / (exact / np.sqrt(2 * len(X)))

    error, width = away()
    assert abs(error) < 4 * width
    for module in (numpyro_dp.preparation.search, numpyro_dp.preparation.last_release):
        monkeypatch.setattr(module, "count_long_rows", lambda *args, **options: LongRows())
    monkeypatch.setattr(Survey, "is_open", False)
    without, _ = away()
    assert without < -6
    assert abs(error) < abs(without) / 2
