"""Where the search starts, and how wide frames may become along what few rows tell."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random

import numpyro_dp.preparation.search
from numpyro_dp import DPHMC, MCMC, PosteriorWarning
from numpyro_dp.preparation import first_frame as module
from numpyro_dp.preparation.first_frame import first_frame
from numpyro_dp.preparation.frames import SCORE_ROOM, Frame, NormalPrior, as_wide_as_the_posterior, typical_norm
from tests.helpers.surveys import M, fund_of, linear, positive, spent_by, survey_of

N = 20_000
WIDE = NormalPrior(np.zeros(M), 100 * np.eye(M))
PRICE = 1e-3


def start_of(X, rho=0.05, n=N, apart=None, price=PRICE):
    """The first frame of a linear regression with errors of standard deviation 1 and slopes 0; and the fund."""
    y = np.random.default_rng(0).normal(size=len(X))
    fund = fund_of(rho)
    survey = survey_of((X, y), linear, power=1.0, can_draw=False, apart=apart, ledger=fund._ledger)
    frame, prior = first_frame(survey, WIDE, WIDE, fund, price, n)
    return frame, prior, fund


def with_a_flag(share, n=N):
    rng = np.random.default_rng(1)
    return np.stack([np.ones(n), rng.normal(size=n), rng.random(n) < share], 1)


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_what_few_rows_tell_is_not_clipped(share):
    frame, prior, fund = start_of(with_a_flag(share))
    assert prior.of_frames[0] == prior.of_frames[1] == 0
    # In the widest frame a typical row of the few, whose derivative by phi is 1, is a few times as long as the bound.
    widest = prior.of_frames[2] ** -0.5
    assert np.diag(frame.whitening)[2] <= widest * (1 + 1e-9)
    assert 1 < widest / (SCORE_ROOM * typical_norm(M, N)) < 6
    assert "rare scales" in spent_by(fund)


def test_who_has_no_rare_covariate_pays_for_no_search():
    frame, prior, fund = start_of(with_a_flag(0.5))
    assert not prior.of_frames.any()
    assert "rare scales" not in spent_by(fund)
    assert np.diag(frame.whitening).max() < 0.1


def test_so_few_that_nobody_could_tell_are_left_alone():
    frame, prior, _ = start_of(with_a_flag(0.0005))
    assert not prior.of_frames.any()
    assert np.diag(frame.whitening)[2] == 10


def test_a_small_budget_asks_for_scales_only():
    X = with_a_flag(0.1)
    frame, prior, fund = start_of(X, rho=1e-5, price=1e-6)
    assert not prior.of_frames.any()
    assert not {"row counts", "rare scales"} & set(spent_by(fund))
    assert np.isfinite(frame.whitening).all()


def test_groups_are_as_narrow_as_their_rows_say_unless_they_have_next_to_none():
    """The bound is that of all groups' rows, of whatever size a group is. Large ones need none."""
    sizes = np.array([0.87, 0.1299, 0.0001])
    X = np.eye(M)[np.repeat(np.arange(M), np.round(sizes * N).astype(int))]
    frame, prior, fund = start_of(X, apart=~np.eye(M, dtype=bool))
    assert prior.of_frames[0] == prior.of_frames[2] == 0
    assert 1 < prior.of_frames[1] ** -0.5 / (SCORE_ROOM * typical_norm(M, N)) < 6
    assert "rare scales" not in spent_by(fund)
    assert np.all(np.diag(frame.whitening) > 0)


def test_noise_is_hardly_ever_taken_for_rows_whose_derivatives_are_large(monkeypatch):
    """Here all derivatives are 0, so that no coordinate is to be narrower than its start."""
    monkeypatch.setattr(module, "_MOST_RARE", 0.0)
    n, price, times = 200, 0.0225, 300  # a count's noise is a tenth of the rows
    start = NormalPrior(np.zeros(M), np.eye(M))
    fund = fund_of(1.1 * times * price)
    survey = survey_of((np.zeros((n, M)), np.zeros(n)), ledger=fund._ledger)
    found = [first_frame(survey, start, start, fund, price, n) for _ in range(times)]
    assert np.all(np.array([np.diag(frame.whitening) for frame, _ in found]) == 1)
    assert not np.any([prior.of_frames for _, prior in found])


def test_a_frame_is_as_wide_as_the_posterior_without_what_was_added():
    rng = np.random.default_rng(0)
    precision, added = positive(rng, M), np.array([0.0, 3.0, 0.5])
    narrow = np.linalg.inv(np.linalg.cholesky(precision + np.diag(added))).T
    frame = as_wide_as_the_posterior(Frame(np.ones(M), narrow), added)
    np.testing.assert_allclose(frame.whitening @ frame.whitening.T, np.linalg.inv(precision), rtol=1e-9)
    np.testing.assert_array_equal(frame.center, np.ones(M))
    same = as_wide_as_the_posterior(Frame(np.ones(M), narrow), 0.0)
    np.testing.assert_allclose(same.whitening @ same.whitening.T, narrow @ narrow.T, rtol=1e-9)
    # Where nothing else is known, it does not become wider without end.
    all_added = as_wide_as_the_posterior(Frame(np.ones(M), narrow), np.diag(np.linalg.inv(narrow @ narrow.T)) + 100)
    assert np.linalg.norm(all_added.whitening, 2) < 20 * np.linalg.norm(narrow, 2)


def flagged(flags, x, y=None):
    a = numpyro.sample("a", dist.Normal(0, 100))
    b = numpyro.sample("b", dist.Normal(0, 30).expand([flags.shape[1]]).to_event(1))
    c = numpyro.sample("c", dist.Normal(0, 30))
    sigma = numpyro.sample("sigma", dist.HalfNormal(50))
    with numpyro.plate("people", len(x)):
        numpyro.sample("y", dist.Normal(a + flags @ b + c * x, sigma), obs=y)


@pytest.mark.nightly
@pytest.mark.statistical
@pytest.mark.parametrize("keeps", [True, pytest.param(False, id="without it: the prior")])
def test_a_flag_of_one_row_in_twenty_is_told(keeps, monkeypatch):
    """A regression with a covariate that is 0 for nearly all. By the clip alone its coefficient had the prior's width,
    14 to 20 times the exact one."""
    if not keeps:
        monkeypatch.setattr(
            numpyro_dp.preparation.search, "first_frame", lambda *args: (first_frame(*args)[0], args[1])
        )
    n, rng = 10_000, np.random.default_rng(0)
    flags = (rng.random((n, 2)) < [0.5, 0.05]).astype(float)
    x = rng.normal(size=n)
    y = 50 + flags @ [5.0, 6.0] + 3 * x + 15 * rng.normal(size=n)
    X = np.column_stack([np.ones(n), flags, x])
    exact, sd = np.linalg.solve(X.T @ X, X.T @ y), 15 * np.sqrt(np.diag(np.linalg.inv(X.T @ X)))
    mcmc = MCMC(DPHMC(flagged, eps=1.0), num_warmup=100, num_samples=500, progress_bar=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PosteriorWarning)
        mcmc.run(random.key(0), jnp.asarray(flags), jnp.asarray(x), y=jnp.asarray(y))
    draws = jax.tree.map(np.asarray, mcmc.get_samples())
    b = draws["b"][:, 1]
    if keeps:
        assert b.std() < 4 * sd[2]
        assert abs(b.mean() - exact[2]) < 6 * b.std()
    else:
        assert b.std() > 6 * sd[2]
