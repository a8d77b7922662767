"""The law of released statistics, beside laws that are known; and one release in a run."""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import some_every_day
from numpyro.handlers import scale
from scipy import stats
from scipy.special import logsumexp

from numpyro_dp import MCMC, DPExponentialFamily, ExponentialFamily, PosteriorWarning, scan
from numpyro_dp.model.families import family_of
from numpyro_dp.model.separate import separate
from numpyro_dp.preparation.statistics import Statistics, SumLaw


def observed(likelihood, **priors):
    def model(y):
        params = {name: numpyro.sample(name, prior) for name, prior in priors.items()}
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", likelihood(**params), obs=y)

    return model


POSITIVE = dist.LogNormal(0.0, 1.0)
coin = observed(dist.Bernoulli, probs=dist.Beta(1, 1))
times = observed(dist.Exponential, rate=POSITIVE)
counts = observed(dist.Poisson, rate=POSITIVE)
normal = observed(dist.Normal, loc=dist.Normal(0, 10), scale=POSITIVE)
groups = observed(dist.Categorical, probs=dist.Dirichlet(jnp.ones(3)))


def law_of(model, y, bounds=None, *, sd, n, n_sd=0.0):
    """``(z, S') -> log p(S' | z)``, and from constrained values to z."""
    separated = separate(model, (y,), {})
    family = family_of(separated, (y,), {}, bounds)
    law = SumLaw(family, separated.num_params, sd, n_sd > 0)

    @jax.jit
    def density(values, num_rows, z):
        found = Statistics(values, sd, num_rows, n_sd, 0.0, 1.0)
        return law.log_density(found, law.middle(found), z)

    return density, family


def assert_same_up_to_a_constant(found, exact, most):
    """Where the exact density is above e-10 of its largest value."""
    seen = exact > exact.max() - 10
    assert seen.sum() > 3
    difference = (found - exact)[seen]
    assert np.ptp(difference) < most, difference


@pytest.mark.parametrize(
    ("n", "heads", "sd"),
    some_every_day(
        [(20, 5.0, 4.0), (50, 3.0, 1.0), (50, 0.0, 1.0), (50, -1.5, 1.0), (500, 20.0, 3.0), (500, 250.0, 15.0)],
        [(50, -1.5, 1.0), (500, 20.0, 3.0)],
    ),
)
def test_a_count_of_heads(n, heads, sd):
    density, _ = law_of(coin, np.arange(n) % 2, sd=2 * sd, n=n)  # a statistic is -1 or 1
    z = np.linspace(-7, 5, 61)
    found = np.array([density(jnp.array([2 * heads - n]), n, jnp.array([x])) for x in z])
    k = np.arange(n + 1)
    exact = stats.binom.logpmf(k, n, 1 / (1 + np.exp(-z[:, None]))) + stats.norm.logpdf(heads, k, sd)
    assert_same_up_to_a_constant(found, logsumexp(exact, 1), 1.5 / n)


def test_a_count_of_heads_among_rows_whose_number_is_private():
    heads, n, sd = 30.0, 95.0, 4.0  # both released with noise
    density, family = law_of(coin, np.arange(100) % 2, sd=2 * sd, n=n, n_sd=2 * sd)
    z = np.linspace(-4, 3, 41)
    found = np.array([density(jnp.array([2 * heads - n]), n, jnp.array([x])) for x in z])
    rows, k = np.arange(40, 160)[:, None], np.arange(160)
    of_noise = stats.norm.logpdf(2 * heads - n, 2 * k - rows, 2 * sd) + stats.norm.logpdf(n, rows, 2 * sd)
    exact = [logsumexp(stats.binom.logpmf(k, rows, p) + of_noise) for p in 1 / (1 + np.exp(-z))]
    assert family.bound == 1.0
    assert_same_up_to_a_constant(found, np.array(exact), 0.02)


@pytest.mark.parametrize(("n", "total", "sd"), [(40, 60.0, 3.0), (400, 300.0, 30.0)])
def test_sums_of_waiting_times(n, total, sd):
    high = 20.0
    density, _ = law_of(times, np.ones(n), (0.0, high), sd=sd * 2 / high, n=n)
    z = np.linspace(-2.5, 2.5, 61)
    released = (total - n * high / 2) * 2 / high  # of values centred and scaled to [-1, 1]
    found = np.array([density(jnp.array([released]), n, jnp.array([x])) for x in z])
    t = np.linspace(1e-3, total + 10 * sd, 20_001)
    weight = stats.norm.logpdf(total, t, sd)
    exact = [logsumexp(stats.gamma.logpdf(t, n, scale=math.exp(-x)) + weight) for x in z]
    assert_same_up_to_a_constant(found, np.array(exact), 0.02)


def test_sums_of_counts():
    n, total, sd, high = 30, 45.0, 5.0, 10.0
    density, _ = law_of(counts, np.ones(n, int), (0.0, high), sd=sd * 2 / high, n=n)
    z = np.linspace(-2, 2, 41)
    found = np.array([density(jnp.array([(total - n * high / 2) * 2 / high]), n, jnp.array([x])) for x in z])
    k = np.arange(600)
    exact = stats.poisson.logpmf(k, n * np.exp(z[:, None])) + stats.norm.logpdf(total, k, sd)
    assert_same_up_to_a_constant(found, logsumexp(exact, 1), 0.01)


@pytest.mark.statistical
def test_counts_of_three_categories():
    n, sd = 14, 1.5
    y = np.arange(n) % 3
    density, family = law_of(groups, y, sd=sd, n=n)
    released = np.array([7.0, 5.5, 1.0])
    root = math.sqrt(2 / 3)
    k = np.array([(i, j, n - i - j) for i in range(n + 1) for j in range(n + 1 - i)])
    noise = stats.norm.logpdf((released - n / 3) / root, (k - n / 3) / root, sd).sum(1)
    separated = separate(groups, (y,), {})
    points = np.random.default_rng(0).normal(size=(60, 2))
    found, exact = [], []
    for point in points:
        z = jnp.asarray(point, jnp.float32)
        probs = np.asarray(separated.constrain((y,), {})(separated.unravel(z))["probs"], float)
        found.append(float(density(jnp.asarray((released - n / 3) / root, jnp.float32), n, z)))
        exact.append(logsumexp(stats.multinomial.logpmf(k, n, probs / probs.sum()) + noise))
    assert family.size == 3
    assert_same_up_to_a_constant(np.array(found), np.array(exact), 0.05)


@pytest.mark.statistical
def test_two_statistics_of_a_normal_law():
    """Of n rows whose mean and variance have laws of their own; the noise is integrated out on a grid."""
    n, sd = 30, 2.0
    y = np.random.default_rng(0).normal(size=n)
    density, family = law_of(normal, y, (-5.0, 5.0), sd=sd, n=n)
    separated = separate(normal, (y,), {})
    statistic = jax.vmap(family.statistic)
    sums = np.asarray(statistic((jnp.asarray(y, jnp.float32)[:, None],)), float).sum(0)
    released = sums + sd * np.array([0.4, -0.3])
    # T is affine in (y, y^2).
    at = np.asarray(statistic((jnp.array([0.0, 1.0, -1.0])[:, None],)), float)
    zero, linear, square = at[0], (at[1] - at[2]) / 2, (at[1] + at[2]) / 2 - at[0]
    mean, variance = np.meshgrid(np.linspace(-4, 4, 801), np.linspace(1e-3, 24, 1200), indexing="ij")
    total = n * zero + n * mean[..., None] * linear + n * (variance + mean**2)[..., None] * square
    noise = stats.norm.logpdf(released, total, sd).sum(-1)
    found, exact = [], []
    for mu in np.linspace(-1.5, 1.5, 7):
        for log_sigma in np.linspace(-0.7, 1.0, 7):
            params = {"loc": jnp.array(mu), "scale": jnp.array(log_sigma)}
            found.append(float(density(jnp.asarray(released, jnp.float32), n, separated.ravel(params))))
            sigma = math.exp(log_sigma)
            law = stats.norm.logpdf(mean, mu, sigma / math.sqrt(n))
            law = law + stats.gamma.logpdf(variance, (n - 1) / 2, scale=2 * sigma**2 / n)
            exact.append(logsumexp(law + noise))
    assert_same_up_to_a_constant(np.array(found), np.array(exact), 0.1)


def test_little_noise_leaves_the_likelihood():
    """Both below and above the noise at which the plain likelihood is taken."""
    n, total = 60, 2 * 22.0 - 60
    z = np.linspace(-2, 1, 31)
    p = 1 / (1 + np.exp(-z))
    exact = 22 * np.log(p) + 38 * np.log1p(-p)
    for sd in (0.05, 0.15):
        density, _ = law_of(coin, np.arange(n) % 2, sd=sd, n=n)
        found = np.array([density(jnp.array([total]), n, jnp.array([x])) for x in z])
        assert_same_up_to_a_constant(found, exact, 0.01)


def test_parameters_that_are_excluded_have_no_density():
    """A thousandth of the scale, where precisions are a million and single precision has no digits left."""
    n = 2000
    density, _ = law_of(normal, np.ones(n), (-5.0, 7.0), sd=9.0, n=n)
    slope = jax.jit(jax.grad(lambda z: density(jnp.array([0.0, -0.9 * n]), n, z)))
    likely = float(density(jnp.array([0.0, -0.9 * n]), n, jnp.array([1.0, 0.3])))
    found = [float(density(jnp.array([0.0, -0.9 * n]), n, jnp.array([3.0, x]))) for x in (-2, -5, -8, -11, -20)]
    assert np.isfinite(found).all()
    assert max(found) < likely - 1000, (found, likely)
    assert all(np.isfinite(slope(jnp.array([3.0, x]))).all() for x in (-2.0, -8.0, -11.0))


def test_derivatives_see_how_the_saddlepoint_moves():
    density, _ = law_of(coin, np.arange(50) % 2, sd=4.0, n=50)
    slope = jax.jit(jax.grad(lambda z: density(jnp.array([-30.0]), 50, z)))
    z, h = np.linspace(-3, 1, 9), 0.05
    for x in z:
        rise = density(jnp.array([-30.0]), 50, jnp.array([x + h])) - density(jnp.array([-30.0]), 50, jnp.array([x - h]))
        assert float(slope(jnp.array([x]))[0]) == pytest.approx(float(rise) / (2 * h), abs=0.02)


@pytest.mark.parametrize("n", some_every_day([10**4, 10**6, 10**8], [10**8]))
def test_single_precision_is_enough_for_many_rows(n):
    """The rounding of a sum over all rows is far above a change that matters."""
    density, _ = law_of(coin, np.arange(10) % 2, sd=3.0, n=n)
    heads = 0.3 * n
    width = 1 / math.sqrt(n * 0.21)
    z = math.log(3 / 7) + width * np.linspace(-3, 3, 13)
    found = np.array([density(jnp.array([2 * heads - n]), n, jnp.array([x])) for x in z])
    p = 1 / (1 + np.exp(-np.float32(z).astype(float)))
    exact = heads * np.log(p / 0.3) + (n - heads) * np.log((1 - p) / 0.7)
    assert_same_up_to_a_constant(found, exact, 0.05)


# -- In a run ----------------------------------------------------------------------------------------------------------

Y = (np.arange(500) % 10 < 3).astype(int)


def run(kernel, *args, samples=500, **options):
    options = {"num_chains": 2, "chain_method": "vectorized"} | options
    mcmc = MCMC(kernel, num_warmup=100, num_samples=samples, progress_bar=False, **options)
    mcmc.run(jax.random.key(0), *args)
    return mcmc


@functools.cache
def proportion():
    """The project's smallest case: one proportion, 500 rows, eps 1."""
    return run(DPExponentialFamily(coin, eps=1.0, noise_seed=1), Y, samples=200)


def test_one_release_gives_the_posterior_of_what_was_released():
    mcmc = proportion()
    found = mcmc.sampler.prepared.statistics
    p = np.linspace(0.001, 0.999, 2000)
    k = np.arange(501)
    noise = stats.norm.logpdf(found.values[0], 2 * k - 500, found.sd)
    exact = np.exp([logsumexp(stats.binom.logpmf(k, 500, x) + noise) for x in p])
    exact /= exact.sum()
    mean = exact @ p
    sd = math.sqrt(exact @ (p - mean) ** 2)
    draws = np.asarray(mcmc.get_samples()["probs"])
    assert abs(draws.mean() - mean) < 6 * sd / math.sqrt(160)  # draws are as good as independent, or nearly
    assert abs(draws.std() / sd - 1) < 6 / math.sqrt(2 * 160)
    assert abs(mean - 0.3) < 6 * sd
    assert mcmc.privacy.posterior.trusted


def test_it_is_paid_once():
    mcmc = proportion()
    report = mcmc.privacy
    assert {kind: of["made"] for kind, of in report.releases.items() if of["made"]} == {"statistics": 1, "moved": 1}
    assert report.eps_spent == pytest.approx(1.0, rel=1e-6)
    before = np.asarray(mcmc.get_samples()["probs"]).mean()
    mcmc.run(jax.random.key(1), Y)
    assert mcmc.privacy.eps_spent == pytest.approx(1.0, rel=1e-6)
    assert np.asarray(mcmc.get_samples()["probs"]).mean() == pytest.approx(before, abs=0.02)


@pytest.mark.statistical
def test_without_privacy_it_is_the_exact_posterior():
    mcmc = run(DPExponentialFamily(coin, eps=math.inf, noise_seed=1), Y)
    draws, exact = np.asarray(mcmc.get_samples()["probs"]), stats.beta(151, 351)
    assert abs(draws.mean() - exact.mean()) < 6 * exact.std() / math.sqrt(400)
    assert abs(draws.std() / exact.std() - 1) < 6 / math.sqrt(2 * 400)


@pytest.mark.nightly
@pytest.mark.statistical
@pytest.mark.parametrize(
    ("bad", "what"), [(-9.0, "moved to the bounds"), (np.nan, "missing"), (math.inf, "impossible")]
)
def test_rows_that_do_not_count_as_they_are(bad, what):
    """A tenth of the rows, which the count that is paid for shows."""
    y = np.clip(np.random.default_rng(0).normal(1, 1, 2000), -4.9, 6.9)
    kernel = functools.partial(DPExponentialFamily, normal, eps=1.0, bounds=(-5.0, 7.0), noise_seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(kernel(), y, samples=50).privacy.posterior.trusted
    y[::10] = bad
    with pytest.warns(PosteriorWarning, match=r"about \d+ \(\+-\d+\) of the 2000 rows are none that .*" + what):
        mcmc = run(kernel(), y, samples=50)
    assert not mcmc.privacy.posterior.trusted


@pytest.mark.statistical
def test_two_humps_are_named():
    def squared(y):
        loc = numpyro.sample("loc", dist.Normal(0, 3))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(loc**2, 1.0), obs=y)

    with pytest.warns(PosteriorWarning, match="several humps"):
        run(DPExponentialFamily(squared, eps=1.0, bounds=(-10.0, 15.0)), np.full(1000, 4.0), samples=50)


@pytest.mark.nightly
@pytest.mark.statistical
def test_a_table_that_is_read_in_pieces(tmp_path):
    import pandas as pd

    pd.DataFrame({"y": Y}).to_parquet(tmp_path / "rows.parquet")
    table = scan(tmp_path / "rows.parquet")
    mcmc = run(DPExponentialFamily(coin, eps=1.0, noise_seed=1), table["y"], samples=200)  # noise goes by the plan
    found, expected = (of.sampler.prepared.statistics.values for of in (mcmc, proportion()))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


OWN = ExponentialFamily(lambda row: row["y"][None], lambda s: s["probs"][None], lambda s: s["probs"], 1.0)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"step_size": 0.1}, r"step_size: for the sampler without preparation.*prepare=False"),
        ({"guided": True}, r"guided: for the sampler"),
        ({"family": OWN, "prepare": True}, "statistics of your own vary is not known"),
    ],
)
def test_options_of_the_other_sampler_are_refused(options, what):
    with pytest.raises(ValueError, match=what):
        DPExponentialFamily(coin, eps=1.0, **options)


def test_weighted_rows_are_refused_before_anything_is_paid():
    def weighted(y):
        rate = numpyro.sample("rate", POSITIVE)
        with numpyro.plate("rows", y.shape[0]), scale(scale=0.3):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    kernel = DPExponentialFamily(weighted, eps=1.0, bounds=(0, 10))
    with pytest.raises(ValueError, match=r"site 'y' is weighted .*prepare=False"):
        run(kernel, np.arange(50) % 4)
    assert not kernel.ledger.spent() or not sum(map(sum, kernel.ledger.spent().values()))
