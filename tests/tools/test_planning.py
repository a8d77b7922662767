"""Estimates before a run: they agree with runs, and say what would work."""

import math
import re
import warnings

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_value
from scipy import stats

from numpyro_dp import DPHMC, MCMC, DPPenalty, PrivacyBudgetError, plan
from numpyro_dp.chain.worth import (
    MAX_CURVATURE_NOISE,
    best_leapfrog,
    best_walk,
    curvature_noise,
    most_draws,
    penalty_walk,
)
from numpyro_dp.preparation import Preparation
from numpyro_dp.preparation.options import require_hope, warn_if_blurred
from numpyro_dp.privacy.accounting import gaussian_rho, noise_multiplier_for

SAMPLERS = ("DPHMC", "DPPenalty", "DPPenalty(prepare=False)", "DPHMC(prepare=False)")


def location(x):
    mu = numpyro.sample("mu", dist.Normal(0, 100).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1).to_event(1), obs=x)


N, D = 4000, 5


@pytest.fixture(scope="module")
def table():
    x = np.random.default_rng(0).normal(size=(N, D)).astype(np.float32)
    return x, init_to_value(values={"mu": jnp.asarray(x.mean(0))})


@pytest.mark.nightly
@pytest.mark.statistical
@pytest.mark.optimized
def test_acceptance_and_speed_of_a_walk_are_as_foreseen(table):
    """In a normal posterior, from its middle, with steps of a chosen length: up to Monte Carlo error."""
    x, start = table
    sd, step, clip, eps = N**-0.5, 0.25, 8.0, 30.0
    kernel = DPPenalty(
        location,
        eps=eps,
        prepare=False,
        clip_ratio=clip,
        step_size=step * sd,
        adapt_step_size=False,
        init_strategy=start,
    )
    mcmc = MCMC(kernel, num_warmup=200, num_samples=3000, num_chains=2, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(1), x, extra_fields=("noise_scale",))
    accepted = np.asarray(mcmc.get_extra_fields(group_by_chain=True)["accepted"], float)
    tau = noise_multiplier_for(gaussian_rho(eps, 0.1 / N), 6400)
    jumps = step * stats.chi(D).ppf(np.linspace(0.0005, 0.9995, 1000))
    noise, expected = penalty_walk(jumps, clip * sd, tau)
    scales = np.asarray(mcmc.get_extra_fields()["noise_scale"])
    assert scales.mean() == pytest.approx(noise.mean(), abs=5 * scales.std() / np.sqrt(scales.size) + 0.002)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])
    moved = np.sum(np.diff(draws, axis=1) ** 2, -1) / sd**2
    for found, foreseen in ((accepted, expected), (moved, jumps**2 * expected)):
        ess = float(arviz.ess(found.copy()))
        assert ess > 200
        assert abs(found.mean() - foreseen.mean()) < 6 * found.std() / np.sqrt(ess)


def test_a_leapfrog_without_noise_makes_independent_draws():
    *_, accepted, worth = best_leapfrog(6, 0.0, 1.0, 1.0, 8)
    assert accepted > 0.8
    assert worth > 0.5
    noisy = best_leapfrog(6, 0.05, 20.0, 20.0, 8)
    assert noisy[3] < 0.2 * worth


def test_a_walk_without_noise_jumps_as_the_theory_of_scaling_says():
    jump, noise, accepted, worth = best_walk(10, 0.0, 1.0)
    assert jump == pytest.approx(2.38, rel=0.03)
    assert accepted == pytest.approx(0.234, abs=0.01)
    assert worth == pytest.approx(0.331 / 10, rel=0.01)
    assert noise == 0


@pytest.mark.statistical
def test_what_is_needed_works_and_a_little_less_does_not():
    found = plan(n=20_000, d=6, eps=1.0)
    assert [o.sampler for o in found.outlooks] == list(SAMPLERS)
    for place, sampler in enumerate(SAMPLERS):
        eps, rows = found.needed_eps[sampler], found.needed_rows[sampler]
        assert plan(n=20_000, d=6, eps=eps)[sampler].verdict == "works"
        assert plan(n=20_000, d=6, eps=0.9 * eps)[sampler].verdict != "works"
        assert found.at(n=rows)[place].verdict == "works"
        assert found.at(n=0.9 * rows)[place].verdict != "works"


def test_a_run_that_would_be_refused_is_said_to_be_hopeless():
    """Noise would drown the curvature of 60 parameters; with fewer of them the same table is enough."""
    for d, refused in ((60, True), (4, False)):
        assert (plan(n=8000, d=d, eps=1.0)["DPHMC"].verdict == "hopeless") == refused
        assert (curvature_noise(d, 8000, gaussian_rho(1.0, 0.1 / 8000)) > MAX_CURVATURE_NOISE) == refused
    few = plan(n=900, d=2, eps=0.2)  # for another reason than a blurred mean
    assert few["DPHMC"].verdict == few["DPPenalty"].verdict == "hopeless"


def test_more_of_anything_helps():
    base = plan(n=20_000, d=6, eps=2.0)
    for better in (plan(n=20_000, d=6, eps=4.0), plan(n=80_000, d=6, eps=2.0), plan(n=20_000, d=3, eps=2.0)):
        for one, other in zip(better.outlooks, base.outlooks, strict=True):
            assert one.error < other.error
    tempered = plan(n=20_000, d=6, eps=2.0, power=0.01)
    assert tempered["DPPenalty(prepare=False)"].error < base["DPPenalty(prepare=False)"].error
    wide = plan(n=20_000, d=6, eps=2.0, clip_ratio=10.0, posterior_sd=0.02)
    assert wide.slope == pytest.approx(0.2)
    assert wide["DPPenalty(prepare=False)"].effective_draws < base["DPPenalty(prepare=False)"].effective_draws


def test_it_prints_a_table_and_draws_a_picture(tmp_path):
    found = plan(n=20_000, d=6, eps=1.0)
    text = str(found)
    for word in (*SAMPLERS, "20,000 rows", "eps 1", "works from"):
        assert word in text
    found.plot()[0].figure.savefig(tmp_path / "plan.png")
    with pytest.raises(KeyError, match="no sampler 'NUTS'; there are DPHMC"):
        found["NUTS"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be positive"),
        ({"d": 0}, "d must be a positive integer"),
        ({"d": 1.5}, "d must be a positive integer"),
        ({"eps": float("inf")}, "eps must be positive and finite"),
        ({"delta": 0.0}, "delta must lie"),
        ({"num_warmup": -1}, "num_warmup must be"),
        ({"num_warmup": 1.5}, "num_warmup must be"),
        ({"clip_ratio": 1.0}, "give both clip_ratio and posterior_sd"),
        ({"clip_ratio": 1.0, "posterior_sd": 0.0}, "must be positive"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"n": 1000, "d": 3, "eps": 1.0, **options})


# -- A hopeless run says so before it starts ---------------------------------------------------------------------------


HOPELESS = re.compile("will hardly move: .*pays for about .* effective draws")


def test_a_preparation_warns_before_it_blurs_the_posterior():
    """Where `plan` says that it is hopeless, and it is not refused."""
    options, rho = Preparation(), gaussian_rho(1.0, 2.2e-5)
    assert plan(4526, 12, 1.0, 2.2e-5)["DPHMC"].verdict == "hopeless"
    told = r"12 numbers .* about 1\.6 of its standard .* at least 1\.8 times as.* 1\.5, about eps=1\.1 or 4,900 rows at"
    with pytest.warns(UserWarning, match=told):
        warn_if_blurred(12, 4526, rho, options, 1.0, 2.2e-5)
    assert plan(6000, 12, 1.0)["DPHMC"].verdict == "rough"
    warn_if_blurred(12, 6000, gaussian_rho(1.0, 0.1 / 6000), options, 1.0, 0.1 / 6000)  # a warning would be an error


@pytest.mark.parametrize(("size", "n", "eps"), [(2, 400, 0.01), (2, 40, 1.0), (12, 900, 0.5), (30, 300, 0.02)])
def test_a_refusal_and_a_warning_say_what_would_do(size, n, eps):
    """And it does: at that eps, and with so many rows."""
    delta, options = 0.1 / n, Preparation()

    def asked(check, n, eps):
        check(size, n, gaussian_rho(eps, delta), options, eps, delta)

    for check, kind in ((require_hope, PrivacyBudgetError), (warn_if_blurred, UserWarning)):
        with pytest.raises(kind) as told:
            asked(check, n, eps)
        found = re.search(r"about (?:eps=([\d.e+]+) or )?([\d,]+) rows at this eps would do", str(told.value))
        rows = int(found[2].replace(",", ""))
        asked(check, rows, eps)
        asked(warn_if_blurred, rows, eps)  # what a refusal advises is not warned of in turn
        assert rows < 20 * n or eps < 0.1
        if found[1] is not None:
            assert eps < float(found[1]) <= 20
            asked(check, n, float(found[1]))
        else:
            with pytest.raises(kind):
                asked(check, n, 19.0)


def test_a_refusal_without_privacy_says_how_many_rows_would_do():
    with pytest.raises(PrivacyBudgetError, match=r"eps=inf with 10 rows .*; about [\d,]+ rows at this eps would do"):
        require_hope(100, 10, 1e6, Preparation(), math.inf, 0.01)
    with pytest.raises(PrivacyBudgetError, match=r"10 units .*; about [\d,]+ units at this eps would do"):
        require_hope(100, 10, 1e6, Preparation(), math.inf, 0.01, "units")


@pytest.mark.parametrize("make", [DPPenalty, DPHMC])
def test_a_kernel_warns_before_a_hopeless_run(make, table):
    x, _ = table
    kernel = make(location, eps=0.05, prepare=False, num_iterations=400)
    with pytest.warns(UserWarning, match=HOPELESS):
        kernel.init(jax.random.key(0), 0, None, (x,), {})
    assert kernel.privacy.eps_spent == 0


@pytest.mark.parametrize("make", [DPPenalty, DPHMC])
def test_a_run_with_a_chance_does_not_warn(make, table):
    x, _ = table
    kernel = make(location, eps=100.0, prepare=False, num_iterations=400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel.init(jax.random.key(0), 0, None, (x,), {})


def test_few_draws_for_another_reason_than_noise_are_no_reason_to_warn():
    draws, without_noise = most_draws(10, 1e-4, 1.0, 20, False)
    assert draws < 1
    assert draws == pytest.approx(without_noise, rel=1e-3)
