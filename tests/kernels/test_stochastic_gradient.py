"""The samplers without an acceptance test, against what theory says of them on a normal posterior.

There a step is a linear map with normal noise, so that the law after any number of steps is known, discretisation bias
and sampling noise included. Chains start from exact posterior draws and are independent: the error of a variance over
`CHAINS` of them is ``sqrt(2 / CHAINS)``, and tolerances are 5 of those.
"""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.tiers import some_every_day

import numpyro_dp.kernels.sgld
from numpyro_dp import (
    DPSGHMC,
    DPSGLD,
    DPSGNHT,
    MCMC,
    FixedBatches,
    PoissonBatches,
    PrivacyBudgetError,
    decreasing_steps,
)
from numpyro_dp.kernels.stochastic_gradient import added_noise

pytestmark = pytest.mark.optimized

N, CHAINS, STEPS = 60, 1500, 40
Y = np.random.default_rng(0).normal(0.5, 1.0, N)
PRECISION = 1 + N
MEAN, WIDTH = Y.sum() / PRECISION, PRECISION**-0.5
ERROR = 6 * np.sqrt(2 / CHAINS)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def variance_after(kernel, iterations=1):
    """Variance of the final points over the posterior's, from exact draws, and whether the mean is right."""
    start = MEAN + WIDTH * np.random.default_rng(0).normal(size=CHAINS)
    keys = jax.random.split(jax.random.key(0), CHAINS)
    state = kernel.init(keys, 0, {"mu": jnp.asarray(start, jnp.float32)}, (Y,), {})
    step = jax.jit(lambda s: kernel.sample(s, (Y,), {}))
    for _ in range(iterations):
        state = step(state)
    standard = (np.asarray(state.z["mu"], float) - MEAN) / WIDTH
    assert np.isfinite(standard).all()
    assert abs(standard.mean()) < 5 * standard.std() / np.sqrt(CHAINS) + 0.02
    return standard.var()


def options(**others):
    return {"clip_grad": 8.0, "num_steps": STEPS, "num_iterations": 1, "num_chains": CHAINS, **others}


NOISE = {
    "none": {"eps": float("inf"), "clip_grad": float("inf")},
    "some": {"noise_multiplier_grad": 0.5},
    "matched": {"noise_multiplier_grad": "matched"},
}


def langevin_variance(h, steps, sampling_variance=0.0):
    """Of SGLD after `steps` from variance 1; h in units of the squared width."""
    variance = 1.0
    for _ in range(steps):
        variance = (1 - h) ** 2 * variance + 2 * h + h**2 * sampling_variance
    return variance


@pytest.mark.statistical
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
def test_sgld_has_the_variance_of_its_theory(noise):
    """Privacy noise takes the place of Langevin noise; the bias is 1 / (1 - h / 2), and shrinks with h."""
    for h in (0.4, 0.1):
        found = variance_after(DPSGLD(model, **options(step_size=h * WIDTH**2) | noise))
        expected = langevin_variance(h, STEPS)
        assert abs(found / expected - 1) < ERROR
    assert langevin_variance(0.4, STEPS) > 1.2  # the bias that is seen at the larger step


@pytest.mark.statistical
def test_privacy_noise_on_top_of_langevin_noise_would_be_noticed(monkeypatch):
    monkeypatch.setattr(numpyro_dp.kernels.sgld, "added_noise", lambda h, friction, scale: added_noise(h, friction, 0))
    found = variance_after(DPSGLD(model, **options(step_size=0.4 * WIDTH**2, **NOISE["matched"])))
    assert found / langevin_variance(0.4, STEPS) - 1 > 2 * ERROR


@pytest.mark.statistical
@pytest.mark.parametrize("batches", [PoissonBatches(rate=0.25), FixedBatches(15)], ids=["poisson", "fixed"])
def test_sgld_on_batches_has_the_sampling_noise_of_its_batches_on_top(batches):
    h = 0.2
    found = variance_after(DPSGLD(model, **options(step_size=h * WIDTH**2, batch_size=batches, **NOISE["matched"])))
    gradients = Y - MEAN
    total = (gradients**2).sum() * (1 - 0.25) / 0.25  # without replacement: less the mean, which is about 0 here
    expected = langevin_variance(h, STEPS, total / PRECISION)
    assert (
        abs(found / expected - 1) < ERROR + 0.03
    )  # the gradients at the other points of the posterior differ a little
    assert expected > 1.2


def hamiltonian_variance(h, friction, steps, gradient_noise=0.0, damping=None):
    """Of SGHMC after `steps` from variance 1 and a fresh momentum, in units of the width."""
    covariance = np.eye(2)
    damping = h * friction if damping is None else damping
    drift = np.array([[1, h], [0, 1]])
    kick = np.array([[1, 0], [-h, 1 - damping]])
    for _ in range(steps):
        covariance = kick @ (drift @ covariance @ drift.T) @ kick.T
        covariance[1, 1] += 2 * h * friction + h**2 * gradient_noise
    return covariance[0, 0]


@pytest.mark.statistical
@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE.keys())
@pytest.mark.parametrize("h", [0.5, 0.1])
def test_sghmc_has_the_variance_of_its_theory(noise, h):
    kernel = DPSGHMC(model, **options(step_size=h * WIDTH, friction=1 / WIDTH) | noise)
    # The momentum's unit of time is the width: z' = z + h p.
    assert abs(variance_after(kernel) / hamiltonian_variance(h, 1.0, STEPS) - 1) < ERROR


@pytest.mark.statistical
def test_sghmc_without_friction_heats_up():
    """The naive sampler of Lode (2019): by as much as theory says, with friction not at all."""
    h, multiplier = 0.1, 1.0
    kernel = DPSGHMC(model, **options(step_size=h * WIDTH, friction=0.0, noise_multiplier_grad=multiplier))
    noise = (2 * 8.0 * multiplier * WIDTH) ** 2  # replace-one: twice the clip bound, in units of 1 / width
    expected = hamiltonian_variance(h, 0.0, STEPS, noise)
    assert abs(variance_after(kernel) / expected - 1) < ERROR
    assert expected > 1.5


@pytest.mark.statistical
def test_sghmc_makes_room_for_sampling_noise_that_is_known():
    """`gradient_noise`: the part of the friction that batches use up."""
    h, rate = 0.3, 0.25
    sampling = ((Y - MEAN) ** 2).sum() * (1 - rate) / rate
    common = {"step_size": h * WIDTH, "friction": 2 / WIDTH, "batch_size": PoissonBatches(rate=rate)}
    known = h * WIDTH * sampling / 2
    found = variance_after(
        DPSGHMC(model, **options(**common, gradient_noise=known, noise_multiplier_grad=0.1, clip_grad=8.0))
    )
    assert abs(found / hamiltonian_variance(h, 2.0, STEPS) - 1) < ERROR + 0.03


@pytest.mark.statistical
@pytest.mark.parametrize("noise", ["none", "matched"])
def test_sgnht_keeps_the_posterior_at_small_steps(noise):
    h = 0.1
    kernel = DPSGNHT(model, **options(step_size=h * WIDTH, friction=1 / WIDTH) | NOISE[noise])
    assert abs(variance_after(kernel) - 1) < ERROR + 0.03


@pytest.mark.nightly
def test_sgnht_takes_up_the_sampling_noise_of_batches():
    """With a thermostat the variance stays near 1 where SGHMC's is far above."""
    h, rate = 0.15, 0.1
    common = {"step_size": h * WIDTH, "friction": 1 / WIDTH, "batch_size": PoissonBatches(rate=rate)}
    sampling = ((Y - MEAN) ** 2).sum() * (1 - rate) / rate / PRECISION
    heated = hamiltonian_variance(h, 1.0, 400, sampling)
    found = variance_after(DPSGNHT(model, **options(**common, eps=float("inf"), num_iterations=20)), iterations=20)
    assert heated > 1.5
    assert found < 1 + (heated - 1) / 2


def test_decreasing_steps_and_their_noise():
    """Each iteration is a mechanism of its own: the noise grows like 1 / sqrt(h), and the ledger gives each its own."""
    kernel = DPSGHMC(
        model,
        eps=5.0,
        clip_grad=8.0,
        num_steps=2,
        step_size=decreasing_steps(0.05 * WIDTH),
        friction=40 / WIDTH,
        batch_size=30,
    )
    mcmc = MCMC(kernel, num_warmup=3, num_samples=24, progress_bar=False)
    mcmc.run(jax.random.key(0), Y, extra_fields=("carry.step_size", "noise_scale"))
    extra = mcmc.get_extra_fields()
    t = np.arange(4, 28)
    np.testing.assert_allclose(extra["carry.step_size"], 0.05 * WIDTH * t ** (-1 / 3), rtol=1e-5)
    np.testing.assert_allclose(extra["noise_scale"] / extra["noise_scale"][0], (t / t[0]) ** (1 / 6), rtol=1e-5)
    kinds = mcmc.privacy.kinds["grad"]
    assert kinds.counts == (2,) * 27
    multipliers = [mechanism.noise_multiplier for mechanism in kinds.mechanisms]
    np.testing.assert_allclose(np.array(multipliers) / multipliers[0], np.arange(1, 28) ** (1 / 6), rtol=1e-5)
    assert mcmc.privacy.eps == 5.0
    assert 4.8 < mcmc.privacy.eps_spent <= 5.0


def test_a_schedule_cannot_be_run_again_from_its_start():
    kernel = DPSGLD(model, eps=5.0, step_size=decreasing_steps(1e-4), num_iterations=10)
    mcmc = MCMC(kernel, num_warmup=0, num_samples=5, progress_bar=False)
    mcmc.run(jax.random.key(0), Y)
    state = mcmc.last_state
    again = MCMC(kernel, num_warmup=0, num_samples=5, progress_bar=False)
    with pytest.raises(PrivacyBudgetError):
        again.run(jax.random.key(1), Y)
    again.post_warmup_state = state
    again.run(jax.random.key(1), Y, extra_fields=("i",))
    assert again.get_extra_fields()["i"].tolist() == [6, 7, 8, 9, 10]
    assert kernel.privacy.eps_spent == pytest.approx(5.0, rel=1e-2)


def test_matched_noise_has_the_eps_of_its_steps():
    small, large = (
        DPSGLD(model, noise_multiplier_grad="matched", step_size=h, clip_grad=2.0, num_iterations=10, batch_size=10)
        for h in (1e-4, 4e-4)
    )
    for kernel in (small, large):
        kernel.init(jax.random.key(0), 0, None, (Y,), {})
    ratio = [k.privacy.releases["grad"]["noise_multiplier"] for k in (small, large)]
    assert ratio[0] / ratio[1] == pytest.approx(2.0)
    # z = sqrt(2 / h) / (w b) in units of one row's bound; ours counts the sensitivity, twice that.
    assert ratio[0] == pytest.approx(np.sqrt(2 / 1e-4) / (6 * 2.0) / 2)
    assert large.privacy.eps > small.privacy.eps


@pytest.mark.parametrize("make", some_every_day([DPSGLD, DPSGNHT, DPSGHMC], [DPSGNHT]))
def test_steps_that_the_noise_would_overheat_are_refused(make):
    kernel = make(model, eps=0.1, step_size=1.0)
    mcmc = MCMC(kernel, num_warmup=10, num_samples=10, progress_bar=False)
    with pytest.raises(ValueError, match=r"step size of 1 is too large for this budget.*largest that it allows is"):
        mcmc.run(jax.random.key(0), Y)
    default = MCMC(make(model, eps=0.1), num_warmup=5, num_samples=5, progress_bar=False)
    default.run(jax.random.key(0), Y, extra_fields=("carry.step_size",))
    assert (default.get_extra_fields()["carry.step_size"] > 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPSGLD(model), "give the budget, eps=1.0 say; .* all of noise_multiplier_grad"),
        (lambda: DPSGLD(model, noise_multiplier_grad="match"), "must be a number or 'matched'"),
        (lambda: DPSGLD(model, noise_multiplier_grad="matched"), "give step_size"),
        (lambda: DPSGLD(model, eps=1.0, noise_multiplier_grad="matched", step_size=0.1), "not both"),
        (lambda: DPSGLD(model, eps=1.0, num_steps=0), "num_steps must be a positive integer"),
        (lambda: DPSGHMC(model, eps=1.0, friction=-1.0), "friction must be at least 0"),
        (lambda: DPSGHMC(model, eps=1.0, friction=1.0, gradient_noise=1.0), "between 0 and the friction"),
        (lambda: DPSGHMC(model, noise_multiplier_grad="matched", step_size=1, friction=0), "no noise matches"),
        (lambda: DPSGNHT(model, eps=1.0, friction=0.0), "friction must be positive"),
        (lambda: decreasing_steps(-1.0), "initial must be positive"),
    ],
)
def test_impossible_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_that_is_none_is_refused():
    for schedule, message in ((lambda t: -t, "one positive number"), (lambda t: float(t), "must map the iteration")):
        with pytest.raises(ValueError, match=message):
            MCMC(DPSGLD(model, eps=1.0, step_size=schedule), num_warmup=1, num_samples=4, progress_bar=False).run(
                jax.random.key(0), Y
            )


def test_a_mass_matrix_by_site_is_of_all_sites():
    """Noise is fitted to its largest entry, and that of a site that is left out is 1."""

    def two(y):
        b, c = (numpyro.sample(name, dist.Normal(0, 1)) for name in "bc")
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(b + c, 1.0), obs=y)

    kernel = DPSGLD(two, eps=1.0, inverse_mass_matrix={"b": 1e-4})
    with pytest.raises(ValueError, match="leaves out c: noise is fitted to its largest entry"):
        MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False).run(jax.random.key(0), Y)
    assert not kernel.ledger.committed


def test_gradient_noise_is_below_the_friction_also_where_that_is_the_default():
    kernel = DPSGHMC(model, eps=1.0, gradient_noise=1e4)
    with pytest.raises(
        ValueError, match=r"gradient_noise is 10000, and must be below the friction, which is 7.746 here"
    ):
        MCMC(kernel, num_warmup=1, num_samples=1, progress_bar=False).run(jax.random.key(0), Y)
    assert not kernel.ledger.committed
