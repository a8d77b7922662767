"""P14: a posterior, not just privacy. Tolerances come from the estimates' own Monte Carlo error, about 5 sigma.

Invariance is tested on thousands of independent chains that start from exact posterior draws: after some iterations
their law must still be the exact posterior. Draws are independent across chains, so the error of each statistic is
known without estimating an autocorrelation.
"""

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest
from helpers.tiers import some_every_day
from numpyro.infer import NUTS
from scipy import stats

import numpyro_dp.kernels.exponential_family
import numpyro_dp.privacy.draws
import numpyro_dp.privacy.ledger
import numpyro_dp.privacy.release
from numpyro_dp import (
    DPHMC,
    DPSGHMC,
    DPSGLD,
    DPSGNHT,
    MCMC,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    FixedBatches,
    PoissonBatches,
)
from numpyro_dp.chain.target import PrivateTarget
from numpyro_dp.kernels.barker_correction import Correction, ExponentialCorrection
from numpyro_dp.model.families import BoundFamily
from numpyro_dp.privacy.release import Released
from tests.helpers.drawn import given_draw

pytestmark = pytest.mark.optimized


@pytest.fixture
def fast_callbacks(monkeypatch):
    """One callback an iteration instead of one a chain, which is ten times as fast; the ledger is asked all the same.

    What the plan costs is not computed.
    """

    def callback(host, shapes, *args):
        def all_chains(*args):
            args = [np.asarray(arg) for arg in args]
            if args[2].ndim == 0:  # the iteration, of a single chain
                return host(*args)
            return jax.tree.map(
                lambda *parts: np.stack(parts), *(host(*of_chain) for of_chain in zip(*args, strict=True))
            )

        return jax.pure_callback(all_chains, shapes, *args, vmap_method="broadcast_all")

    monkeypatch.setattr(numpyro_dp.privacy.draws, "io_callback", callback)
    monkeypatch.setattr(numpyro_dp.privacy.ledger.accounting, "composed_eps", lambda *_: 1.0)


# -- Invariance under noise --------------------------------------------------------------------------------------------

N, CHAINS, ITERATIONS = 30, 3000, 12
_rng = np.random.default_rng(0)
SCALE = np.array([1.0, 3.0])
Y = np.array([0.4, -1.0]) + SCALE * _rng.normal(size=(N, 2))
PRIOR_SD = 1.0


def posterior(power=1.0):
    """Mean and standard deviation of the posterior, tempered."""
    sd = 1 / np.sqrt(1 / PRIOR_SD**2 + power * N / SCALE**2)
    return sd**2 * power * Y.sum(0) / SCALE**2, sd


POSTERIOR_MEAN, POSTERIOR_SD = posterior()


def conjugate(Y):
    mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD).expand([2]).to_event(1))
    with numpyro.plate("rows", Y.shape[0]):
        numpyro.sample("Y", dist.Normal(mu, SCALE).to_event(1), obs=Y)


def z_scores(kernel, seed=0, power=1.0, iterations=ITERATIONS):
    """|z| of means, variances and of the covariance of the final points, and the acceptance rate.

    Row ratios are below 20 per unit of distance here, and gradients below 10 except for a few: nothing is clipped in
    the ratios, and the noise in the log ratio is of order 1.
    """
    mean, sd = posterior(power)
    start = mean + sd * np.random.default_rng(seed).normal(size=(CHAINS, 2))
    state = kernel.init(
        jax.random.split(jax.random.key(seed), CHAINS), 0, {"mu": jnp.asarray(start, jnp.float32)}, (Y,), {}
    )
    step = jax.jit(lambda s: kernel.sample(s, (Y,), {}))
    accepted, noise = [], []
    for _ in range(iterations):
        state = step(state)
        accepted.append(float(state.accepted.mean()))
        noise.append(float(jnp.median(state.noise_scale)))
    standard = (np.asarray(state.z["mu"], float) - mean) / sd
    z = [
        *(standard.mean(0) * np.sqrt(CHAINS)),
        *((standard.var(0) - 1) * np.sqrt(CHAINS / 2)),
        standard.prod(1).mean() * np.sqrt(CHAINS),
        *(stats.norm.isf(stats.kstest(column, "norm").pvalue / 2) for column in standard.T),
    ]
    return np.abs(z), np.mean(accepted), np.median(noise)


def larger_downwards(before, after):
    """A bound of which one side is three times the other's."""
    step = after["mu"] - before["mu"]
    return 20 * jnp.linalg.norm(step) * jnp.where(step.sum() < 0, 1.0, 1 / 3)


COMMON = {"num_iterations": ITERATIONS, "num_chains": CHAINS, "adapt_step_size": False, "noise_multiplier_ratio": 0.15}
MASS = {"inverse_mass_matrix": POSTERIOR_SD**2}
HMC = {**COMMON, **MASS, "clip_ratio": 20.0, "step_size": 0.5, "num_steps": 3}
WALK = {**COMMON, "clip_ratio": 20.0, "step_size": 1.0}
BARKER = {**COMMON, **MASS, "clip_ratio": 6.0, "step_size": 1.0}
STATISTICS = {k: v for k, v in {**COMMON, **MASS}.items() if k != "noise_multiplier_ratio"} | {
    "bounds": (np.array([-4.0, -12.0]), np.array([5.0, 10.0])),  # around all rows
    "step_size": 1.0,
    "noise_multiplier_statistics": 0.3,
}
OWNERS = np.arange(N) % 3
DENSE = np.diag(POSTERIOR_SD**2) + 0.3 * POSTERIOR_SD.prod() * (1 - np.eye(2))
INVARIANT = {
    "walk": lambda: DPPenalty(conjugate, **WALK, **MASS),
    "walk_dense": lambda: DPPenalty(conjugate, **WALK, prepare=False, inverse_mass_matrix=DENSE, dense_mass=True),
    "guided": lambda: DPPenalty(conjugate, **WALK, **MASS, prepare=False, guided=True),
    "one_component": lambda: DPPenalty(conjugate, **WALK, **MASS, prepare=False, one_component=True),
    "one_component_guided": lambda: DPPenalty(
        conjugate, **WALK, **MASS, prepare=False, one_component=True, guided=True
    ),
    "walk_told_bound": lambda: DPPenalty(conjugate, **WALK | {"clip_ratio": larger_downwards}, **MASS, prepare=False),
    "hmc_position": lambda: DPHMC(conjugate, **HMC, clip_grad=10.0, noise_multiplier_grad=0.2),
    "hmc_fresh": lambda: DPHMC(conjugate, **HMC, clip_grad=10.0, noise_multiplier_grad=0.2, leapfrog="fresh"),
    "hmc_reuse": lambda: DPHMC(conjugate, **HMC, clip_grad=10.0, noise_multiplier_grad=0.2, leapfrog="reuse"),
    # Clipping the *gradients* hard must not matter.
    "hmc_clipped_gradients": lambda: DPHMC(conjugate, **HMC, clip_grad=0.3, noise_multiplier_grad=2.0),
    "hmc_dense": lambda: DPHMC(
        conjugate,
        **{**HMC, "inverse_mass_matrix": DENSE},
        dense_mass=True,
        clip_grad=10.0,
        noise_multiplier_grad=0.2,
    ),
    "penalty_owners": lambda: DPPenalty(conjugate, **WALK, **MASS, prepare=False, owners=OWNERS),
    "hmc_owners": lambda: DPHMC(
        conjugate, **HMC | {"noise_multiplier_ratio": 0.1}, clip_grad=10.0, noise_multiplier_grad=0.1, owners=OWNERS
    ),
    "barker": lambda: DPBarker(conjugate, **BARKER),
    "barker_exponential": lambda: DPBarker(conjugate, **BARKER, variance=1.0, one_component=True, guided=True),
    "barker_logistic": lambda: DPBarker(conjugate, **BARKER, variance=1.0, correction="logistic"),
    "barker_owners": lambda: DPBarker(conjugate, **BARKER, variance=3.0, owners=OWNERS),
    "exponential_family": lambda: DPExponentialFamily(conjugate, **STATISTICS),
    "exponential_family_owners": lambda: DPExponentialFamily(conjugate, **STATISTICS, owners=OWNERS),
    "exponential_family_counted": lambda: DPExponentialFamily(
        conjugate, **STATISTICS, neighboring_relation="add_or_remove_one", delta=1e-3
    ),
}
TEMPERED = {
    "penalty": lambda power: DPPenalty(conjugate, **WALK, **MASS, power=power),
    "hmc": lambda power: DPHMC(conjugate, **HMC, clip_grad=10.0, noise_multiplier_grad=0.2, power=power),
    "barker": lambda power: DPBarker(conjugate, **BARKER, power=power),
    "exponential_family": lambda power: DPExponentialFamily(
        conjugate, **STATISTICS | {"noise_multiplier_statistics": 0.8}, power=power
    ),
}


VARIANTS = ("walk_dense", "one_component", "hmc_dense", "barker_exponential", "exponential_family_owners", "hmc")


def kernels(of: dict):
    """Variants are nightly."""
    marked = [pytest.param(m, id=k, marks=pytest.mark.nightly if k in VARIANTS else ()) for k, m in of.items()]
    return pytest.mark.parametrize("make", marked)


@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
@kernels(INVARIANT)
def test_noise_leaves_the_exact_posterior_invariant(make):
    z, accepted, noise = z_scores(make())
    assert 0.05 < accepted < 0.98
    assert 0.3 < noise < 10  # noise that matters
    assert z.max() < 6, z


@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
@pytest.mark.parametrize("make", [INVARIANT["walk"], INVARIANT["hmc_position"]], ids=["walk", "hmc"])
def test_without_the_penalty_the_posterior_is_wrong(make, monkeypatch):
    """A negative control: the same test must fail when the noise is not corrected for."""
    monkeypatch.setattr(
        numpyro_dp.privacy.release, "noise_scale", lambda bound, *_: jnp.zeros_like(jnp.asarray(bound)) + 0.0
    )
    z, _, _ = z_scores(make())
    assert z.max() > 7


@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
@kernels(TEMPERED)
def test_noise_leaves_the_tempered_posterior_invariant(make):
    z, accepted, noise = z_scores(make(0.3), power=0.3)
    assert 0.05 < accepted < 0.98
    assert 0.3 < noise < 10
    assert z.max() < 6, z
    z, _, _ = z_scores(make(0.3), power=1.0)
    assert z.max() > 7  # it is another posterior


@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
def test_noise_that_is_not_tempered_in_the_penalty_would_be_noticed(monkeypatch):
    """The penalty of a tempered test is half of ``power**2 sigma**2``."""
    log_ratio = PrivateTarget.log_ratio

    def without_power(self, *args):
        value, scale = log_ratio(self, *args)
        return Released(value, scale / self.power)

    monkeypatch.setattr(PrivateTarget, "log_ratio", without_power)
    # With more noise, the wrong penalty rejects so much that the chains stay at the exact draws that they start from.
    kernel = DPPenalty(conjugate, **WALK | {"noise_multiplier_ratio": 0.06}, **MASS, power=0.3)
    z, _, _ = z_scores(kernel, power=0.3)
    assert z.max() > 7


@pytest.mark.nightly
@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
def test_noise_as_if_it_were_drawn_for_each_end_would_be_noticed(monkeypatch):
    """Both ends of a jump share the noise of the statistics: its variance is not the sum of two."""
    ends = []
    change, accept = BoundFamily.change, numpyro_dp.kernels.exponential_family.accept_with_penalty

    def remembered(self, z, z_new):
        ends.append((self.natural_parameters(z), self.natural_parameters(z_new)))
        return change(self, z, z_new)

    def independent(key, log_ratio, scale, z_new):
        before, after = ends[-1]
        two = jnp.sqrt(before @ before + after @ after) / jnp.linalg.norm(after - before)
        return accept(key, log_ratio, scale * two, z_new)

    monkeypatch.setattr(BoundFamily, "change", remembered)
    monkeypatch.setattr(numpyro_dp.kernels.exponential_family, "accept_with_penalty", independent)
    iterations = 40
    options = STATISTICS | {"num_iterations": iterations, "noise_multiplier_statistics": 0.25}
    z, _, _ = z_scores(DPExponentialFamily(conjugate, **options), iterations=iterations)
    assert z.max() > 7


@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
@pytest.mark.parametrize("name", ["barker_exponential", "barker_logistic"])
def test_gaussian_noise_alone_would_not_be_barkers_test(name, monkeypatch):
    for law in (Correction, ExponentialCorrection):
        monkeypatch.setattr(law, "sample", lambda self, key, shape, dtype: jnp.zeros(shape, dtype))
    z, _, _ = z_scores(INVARIANT[name]())
    assert z.max() > 7


@pytest.mark.statistical
def test_a_scaled_likelihood_is_a_tempered_one():
    """`numpyro.handlers.scale` gives what `power` gives, with the same noise, if the clip bounds are scaled, too."""

    def weighted(weight):
        def model(Y):
            mu = numpyro.sample("mu", dist.Normal(0, PRIOR_SD).expand([2]).to_event(1))
            with numpyro.plate("rows", Y.shape[0]), numpyro.handlers.scale(scale=weight):
                numpyro.sample("Y", dist.Normal(mu, jnp.array([1.0, 3.0])).to_event(1), obs=Y)

        return model

    def released(model, power, bound):
        kernel = DPHMC(model, eps=1.0, prepare=False, num_iterations=1, power=power)
        kernel.init(jax.random.key(0), 0, None, (Y,), {})
        target = kernel.target(kernel.separate((Y,), {}), (Y,), {})
        ratio = target.log_ratio(draw_with_noise(kernel, ()), jnp.zeros(2), jnp.array([0.3, -0.4]), bound)
        gradient = target.gradient(draw_with_noise(kernel, (2,)), jnp.array([0.3, -0.4]), bound)
        return [np.asarray(leaf) for leaf in jax.tree.leaves((ratio, gradient))]

    tempered = released(weighted(1.0), 0.3, 1.0)  # some rows are clipped
    assert tempered[1] == pytest.approx(0.3 * 2 * 2.0)  # replace-one, noise multiplier 2
    for ours, theirs in zip(tempered, released(weighted(0.3), 1.0, 0.3), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def draw_with_noise(kernel, shape, noise=(1, 12345)):
    """A draw with given noise in steps, ``2**24`` times the first number plus the second."""
    return given_draw(*shape, hi=noise[0], lo=noise[1], noise_multiplier=2.0, ledger=kernel.ledger)


@pytest.mark.statistical
def test_an_independent_gradient_after_rejection_would_be_a_bug():
    """`leapfrog="reuse"` keeps the gradient of a rejected proposal's start."""
    kernel = DPHMC(
        conjugate,
        **{**HMC, "num_chains": 50, "step_size": 2.5},
        clip_grad=10.0,
        noise_multiplier_grad=0.2,
        leapfrog="reuse",
    )
    keys = jax.random.split(jax.random.key(0), 50)
    state = kernel.init(keys, 0, None, (Y,), {})
    step = jax.jit(lambda s: kernel.sample(s, (Y,), {}))
    first = step(state)
    second = step(first)
    rejected = ~np.asarray(second.accepted)
    assert rejected.any()
    assert (second.carry.gradient[rejected] == first.carry.gradient[rejected]).all()
    assert (second.carry.gradient[~rejected] != first.carry.gradient[~rejected]).all()


# -- Batches: approximate, as theory says ------------------------------------------------------------------------------

ROWS, POWER = 400, 0.1
VALUES = np.random.default_rng(5).normal(0.5, 1.0, ROWS)
SIGNS = np.resize([1.0, -1.0], 1000)  # all rows have about the same slope


def normal_mean(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def width(y, power):
    return (1 + power * len(y)) ** -0.5


def variance_ratio(make, y, power, chains, iterations, discarded):
    """Variance of the chains over that of the posterior, with its standard error.

    Chains start from exact draws and are independent; each of them gives one average over its later iterations.
    """
    kernel = make(num_iterations=iterations, num_chains=chains, power=power, adapt_step_size=False)
    sd = width(y, power)
    mean = power * y.sum() * sd**2
    start = jnp.asarray(mean + sd * np.random.default_rng(0).normal(size=chains), jnp.float32)
    state = kernel.init(jax.random.split(jax.random.key(0), chains), 0, {"mu": start}, (y,), {})
    step = jax.jit(lambda s: kernel.sample(s, (y,), {}))
    squares = []
    for i in range(iterations):
        state = step(state)
        if i >= discarded:
            squares.append(((np.asarray(state.z["mu"], float) - mean) / sd) ** 2)
    assert not state.exhausted.any()
    of_chains = np.mean(squares, 0)
    return of_chains.mean(), of_chains.std() / np.sqrt(chains)


def on_batches(batches, **options):
    """Steps of one posterior width: a sampling variance of the log ratio of about 0.4 (rate 0.2) or 1.9 (rate 0.05)."""
    options = {"eps": float("inf"), "clip_ratio": 1e3} | options
    return lambda **others: DPPenalty(
        normal_mean, prepare=False, batch_size=batches, step_size=width(VALUES, POWER), **options, **others
    )


@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(on_batches(PoissonBatches(rate=0.2)), 1.007, id="poisson", marks=pytest.mark.nightly),
        pytest.param(on_batches(FixedBatches(80)), 1.003, id="fixed", marks=pytest.mark.nightly),
        pytest.param(on_batches(PoissonBatches(rate=0.05)), 1.078, id="small_poisson", marks=pytest.mark.nightly),
        pytest.param(on_batches(FixedBatches(20)), 1.030, id="small_fixed", marks=pytest.mark.nightly),
        pytest.param(
            on_batches(PoissonBatches(rate=0.2), eps=None, noise_multiplier_ratio=1.0, clip_ratio=4.0),
            1.002,
            id="poisson_noise",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            on_batches(
                PoissonBatches(rate=0.2),
                eps=None,
                noise_multiplier_ratio=0.5,
                clip_ratio=4.0,
                owners=np.arange(len(VALUES)) % 4,
            ),
            1.002,
            id="poisson_noise_of_owners",
        ),
    ],
)
def test_penalty_on_batches_has_the_variance_of_its_theory(make, expected):
    """As 200,000 chains of the same length have it, in NumPy with sums over real batches (known to .0015)."""
    found, error = variance_ratio(make, VALUES, POWER, chains=2500, iterations=50, discarded=20)
    assert error < 0.02
    assert abs(found - expected) < 6 * error


@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
@pytest.mark.parametrize("corrected", [True, False])
def test_penalty_on_batches_needs_its_variance_term(corrected, monkeypatch):
    """Without it the variance ratio is 1.64 after so few iterations, not 1.03, on batches of one row in 20."""
    if not corrected:
        original = numpyro_dp.privacy.release.penalized_sum
        monkeypatch.setattr(
            numpyro_dp.privacy.release, "penalized_sum", lambda moments, weight, _: original(moments, weight, 0.0)
        )
    found, error = variance_ratio(on_batches(FixedBatches(20)), VALUES, POWER, chains=1600, iterations=40, discarded=20)
    assert abs(found - (1.03 if corrected else 1.64)) < 6 * error
    assert error < 0.05


def hmc_on_batches(rate, **options):
    """Two leapfrog steps of .7 posterior widths; each gradient and each ratio is of a batch of its own."""
    options = {"eps": float("inf"), "clip_ratio": 1e3, "clip_grad": 1e3} | options
    steps = {"num_steps": 2, "jitter": 0.0, "step_size": 0.7 * width(VALUES, POWER)}
    return lambda **others: DPHMC(
        normal_mean, prepare=False, batch_size=PoissonBatches(rate=rate), **steps, **options, **others
    )


@pytest.mark.statistical
@pytest.mark.nightly
@pytest.mark.usefixtures("fast_callbacks")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(hmc_on_batches(0.2), 1.006, id="poisson"),
        pytest.param(hmc_on_batches(0.2, leapfrog="reuse"), 1.006, id="reuse"),
        pytest.param(hmc_on_batches(0.05), 1.125, id="small_poisson"),
    ],
)
def test_hmc_on_batches_has_the_variance_of_its_theory(make, expected):
    """As 100,000 chains of the same length have it, in NumPy with sums over real batches (known to .003)."""
    found, error = variance_ratio(make, VALUES, POWER, chains=2500, iterations=50, discarded=20)
    assert error < 0.03
    assert abs(found - expected) < 6 * error


def barker_on_batches(**options):
    """Slopes are at most ``1 + 4 posterior widths``: none is clipped. Jumps are as long as the clip allows."""
    largest = 1 + 4 * width(SIGNS, 0.05)
    options = {"batch_size": 50, "clip_ratio": largest, "noise_multiplier_ratio": 0.8} | options
    return lambda **others: DPBarker(normal_mean, step_size=10.0, **options, **others)


@pytest.mark.nightly
@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(barker_on_batches(), id="exponential"),
        pytest.param(
            barker_on_batches(variance=1.0, correction="logistic", noise_multiplier_ratio=1.15), id="logistic"
        ),
    ],
)
def test_barker_on_small_batches_has_the_variance_of_the_posterior(make):
    found, error = variance_ratio(make, SIGNS, 0.05, chains=2500, iterations=50, discarded=20)
    assert error < 0.02
    assert abs(found - 1) < 6 * error


@pytest.mark.nightly
@pytest.mark.usefixtures("fast_callbacks")
def test_barker_on_batches_must_count_the_noise_of_the_batch(monkeypatch):
    """The batch brings a third of the test's variance. If noise of the full variance is added to it, that shows."""
    original = numpyro_dp.privacy.release.release_batch_bit

    def with_full_noise(moments, *others):
        return original(moments._replace(second=moments.first**2 / moments.size), *others)

    monkeypatch.setattr(numpyro_dp.privacy.release, "release_batch_bit", with_full_noise)
    found, error = variance_ratio(barker_on_batches(), SIGNS, 0.05, chains=8000, iterations=50, discarded=20)
    assert found > 1 + 5 * error


# -- The integrators, without noise ------------------------------------------------------------------------------------


@pytest.mark.statistical
@pytest.mark.parametrize(
    "leapfrog", ["position", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("fresh", "reuse"))]
)
def test_acceptance_tends_to_one_with_the_step_size(leapfrog, x64):
    """Second order: the error of the energy falls fourfold when the step is halved; a wrong sign never gets there."""
    rejection = []
    for step_size, num_steps in ((0.4, 4), (0.2, 8), (0.1, 16)):
        kernel = DPHMC(
            conjugate,
            eps=float("inf"),
            prepare=False,
            clip_ratio=float("inf"),
            clip_grad=float("inf"),
            num_iterations=1,
            num_chains=2000,
            adapt_step_size=False,
            jitter=0.0,
            leapfrog=leapfrog,
            step_size=step_size,
            num_steps=num_steps,
            **MASS,
        )
        start = POSTERIOR_MEAN + POSTERIOR_SD * np.random.default_rng(0).normal(size=(2000, 2))
        state = kernel.init(jax.random.split(jax.random.key(0), 2000), 0, {"mu": jnp.asarray(start)}, (Y,), {})
        state = jax.jit(lambda s, kernel=kernel: kernel.sample(s, (Y,), {}))(state)
        rejection.append(1 - float(state.accept_prob.mean()))
    assert rejection[-1] < 0.005
    assert rejection[0] / rejection[1] > 3
    assert rejection[1] / rejection[2] > 3


def test_step_size_jitter_covers_its_interval_evenly():
    kernel = DPHMC(conjugate, eps=1.0, prepare=False, jitter=0.2)
    factors = np.asarray(jax.vmap(lambda i: kernel._step_factor(i, jnp.uint32(0x9E3779B9)))(jnp.arange(64)))
    counts, _ = np.histogram(factors, bins=16, range=(0.8, 1.2))
    assert (counts == 4).all()


# -- Against NUTS ------------------------------------------------------------------------------------------------------


def logistic_data():
    X = np.random.default_rng(1).uniform(-1, 1, (500, 3))
    y = np.random.default_rng(2).random(500) < 1 / (1 + np.exp(-X @ np.array([0.5, -1.0, 1.0])))
    return X, y.astype(int)


def logistic(X, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def hierarchical(x, y, group):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.LogNormal(0, 0.5))
    with numpyro.plate("groups", 4):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(alpha[group] + x, sigma), obs=y)


def hierarchical_data():
    rng = np.random.default_rng(3)
    group = rng.integers(0, 4, 200)
    x = rng.normal(size=200)
    return x, np.array([-1.0, 0, 0.5, 1.5])[group] + x + 0.7 * rng.normal(size=200), group


def simplex(y):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(3)))
    rate = numpyro.sample("rate", dist.Gamma(2, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Multinomial(5, p).mask(True), obs=y[:, :3].astype(int))
        numpyro.sample("count", dist.Poisson(rate).to_event(1), obs=y[:, 3:])


def simplex_data():
    rng = np.random.default_rng(4)
    return (np.hstack([rng.multinomial(5, [0.2, 0.3, 0.5], 100), rng.poisson([1.0, 2, 4], (100, 3))]),)


def visits(person, x, y, persons):
    """Each person's intercept is integrated out by `numpyro_dp`, and sampled by NUTS."""
    b, tau = numpyro.sample("b", dist.Normal(0, 1)), numpyro.sample("tau", dist.LogNormal(0, 0.5))
    with numpyro.plate("persons", persons):
        u = numpyro.sample("u", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b * x + tau * u[person]), obs=y)


def visits_data():
    rng = np.random.default_rng(5)
    person, x = np.repeat(np.arange(60), 4), rng.normal(size=240)
    return person, x, rng.binomial(1, 1 / (1 + np.exp(-x - 1.2 * rng.normal(size=60)[person]))), 60


def moments(mcmc):
    """Posterior means and standard deviations with their Monte Carlo standard errors, per scalar."""
    result = {}
    for name, draws in mcmc.get_samples(group_by_chain=True).items():
        draws = np.asarray(draws, float).reshape(*draws.shape[:2], -1)
        for k in range(draws.shape[-1]):
            x = draws[..., k]
            ess = float(min(arviz.ess(x.copy()), arviz.ess((x - x.mean()) ** 2)))
            assert ess > 150, (name, ess)
            spread = x.std()
            excess = stats.kurtosis(x.ravel()) + 2
            result[name, k] = (x.mean(), spread, spread / ess**0.5, spread * max(excess, 0.5) ** 0.5 / (2 * ess**0.5))
    return result


TABLES = {logistic: logistic_data, hierarchical: hierarchical_data, simplex: simplex_data, visits: visits_data}
# Without the exact chain of Barker's on `visits`, which takes half an hour: how units add up is no matter of its test.
PAIRS = [(k, m) for k in ("hmc", "penalty", "barker") for m in TABLES if (k, m) != ("barker", visits)]


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("kernel", "model"),
    some_every_day(PAIRS, [("hmc", hierarchical)]),
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.usefixtures("fast_callbacks")
def test_without_noise_and_clipping_it_is_the_posterior_of_nuts(kernel, model):
    args = TABLES[model]()
    free = {"eps": float("inf"), "clip_ratio": float("inf"), "adapt_mass_matrix": True}
    free |= {"unit": "person"} if model is visits else {}
    sampler, samples = {
        "hmc": (DPHMC(model, prepare=False, clip_grad=float("inf"), num_steps=8, target_accept_prob=0.8, **free), 2000),
        "penalty": (DPPenalty(model, **free), 30000),
        "barker": (DPBarker(model, **free), 30000),
    }[kernel]
    ours = MCMC(
        sampler, num_warmup=1000, num_samples=samples, num_chains=4, chain_method="vectorized", progress_bar=False
    )
    ours.run(jax.random.key(0), *args)
    reference = numpyro.infer.MCMC(
        NUTS(model), num_warmup=1000, num_samples=2000, num_chains=4, chain_method="vectorized", progress_bar=False
    )
    reference.run(jax.random.key(1), *args)
    expected = moments(reference)
    for site, (mean, spread, mean_error, spread_error) in moments(ours).items():
        other_mean, other_spread, other_mean_error, other_spread_error = expected[site]
        assert abs(mean - other_mean) < 6 * np.hypot(mean_error, other_mean_error), site
        assert abs(spread - other_spread) < 6 * np.hypot(spread_error, other_spread_error), site


def excess_of_second_moment(kernel, args, mean, sd, chains=3000):
    """By how much the second moments exceed the posterior's, after 80 steps and later; with the standard error."""
    start = mean + sd * np.random.default_rng(0).normal(size=(chains, len(mean)))
    keys = jax.random.split(jax.random.key(0), chains)
    state = kernel.init(keys, 0, {"b": jnp.asarray(start, jnp.float32)}, args, {})
    step = jax.jit(lambda s: kernel.sample(s, args, {}))
    squares = []
    for i in range(6):
        state = step(state)
        if i >= 2:
            squares.append((((np.asarray(state.z["b"], float) - mean) / sd) ** 2).mean(1))
    of_chains = np.mean(squares, 0)
    return of_chains.mean() - 1, of_chains.std() / np.sqrt(chains)


@pytest.mark.statistical
@pytest.mark.usefixtures("fast_callbacks")
@pytest.mark.parametrize(
    ("make", "options", "step_size"),
    [
        pytest.param(DPSGLD, {}, 0.5, id="sgld"),
        pytest.param(DPSGHMC, {"friction": 2.0}, 0.5, id="sghmc", marks=pytest.mark.nightly),
        pytest.param(DPSGNHT, {"friction": 1.0}, 0.2, id="sgnht"),
    ],
)
def test_without_noise_the_bias_shrinks_with_the_step_size(make, options, step_size):
    """Step sizes are in units of the posterior's widths (squared, for SGLD), thanks to the preconditioner."""
    args = tuple(part[:150] for part in logistic_data())
    reference = numpyro.infer.MCMC(
        NUTS(logistic), num_warmup=1000, num_samples=10000, num_chains=4, chain_method="vectorized", progress_bar=False
    )
    reference.run(jax.random.key(1), *args)
    (mean, sd, _, sd_error) = (np.array(column) for column in zip(*moments(reference).values(), strict=True))
    bias, error = np.transpose(
        [
            excess_of_second_moment(
                make(
                    logistic,
                    eps=float("inf"),
                    clip_grad=float("inf"),
                    step_size=h,
                    num_steps=40,
                    inverse_mass_matrix=sd**2,
                    num_iterations=6,
                    num_chains=3000,
                    **options,
                ),
                args,
                mean,
                sd,
            )
            for h in (step_size, step_size / 4)
        ]
    )
    error_of_reference = 2 * np.mean(sd_error / sd)
    assert abs(bias[0] - bias[1]) > 5 * np.hypot(*error)
    assert abs(bias[1]) < abs(bias[0]) / 4 + 5 * np.hypot(error[1], error_of_reference)


# -- Discrete latents of rows ------------------------------------------------------------------------------------------


def mixture(y):
    """Whether each row belongs to the second component is a latent of that row."""
    share = numpyro.sample("share", dist.Beta(2, 2))
    loc = numpyro.sample("loc", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        member = numpyro.sample("member", dist.Bernoulli(share))
        numpyro.sample("y", dist.Normal(loc[member], 0.7), obs=y)


def marginal_mixture(y):
    share = numpyro.sample("share", dist.Beta(2, 2))
    loc = numpyro.sample("loc", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        weights = jnp.stack([1 - share, share])
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(loc, 0.7)), obs=y)


MIXED = np.random.default_rng(7).normal(np.resize([-1.0, 2.0], 50), 0.7)


@pytest.mark.statistical
def test_latent_memberships_are_summed_out_exactly():
    """With noise that happens to be 0, what a mixture releases is what the same model summed out by hand does."""
    pytest.importorskip("funsor")
    z, z_new = jnp.array([0.3, -1.2, 0.4]), jnp.array([0.1, 1.5, -0.2])
    values = []
    for model in (mixture, marginal_mixture):
        kernel = DPHMC(model, eps=1.0, prepare=False, num_iterations=1)
        kernel.init(jax.random.key(0), 0, None, (MIXED,), {})
        target = kernel.target(kernel.separate((MIXED,), {}), (MIXED,), {})
        ratio = target.log_ratio(draw_with_noise(kernel, (), (0, 0)), z, z_new, 30.0).value
        gradient = target.gradient(draw_with_noise(kernel, (3,), (0, 0)), z, 30.0).value
        values.append([ratio, *gradient, target.log_prior(z)])
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4)
    assert np.linalg.norm(values[0][1:4]) > 1


@pytest.mark.statistical
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda model: DPPenalty(model, eps=500.0, noise_seed=3, prepare=False, step_size=0.05),
            id="penalty",
            marks=pytest.mark.nightly,
        ),
        pytest.param(lambda model: DPSGLD(model, eps=20.0, noise_seed=3, batch_size=20), id="sgld"),
    ],
)
def test_chains_of_models_with_latent_memberships(make, monkeypatch):
    """With the same noise the chain is that of the model that was summed out by hand."""
    pytest.importorskip("funsor")
    monkeypatch.setattr(numpyro_dp.kernels.base, "fingerprint", lambda *args: "")  # two models have different noise
    chains = []
    for model in (mixture, marginal_mixture):
        mcmc = MCMC(make(model), num_warmup=5, num_samples=10, progress_bar=False)
        mcmc.run(jax.random.key(0), MIXED)
        chains.append(mcmc.get_samples())
    assert set(chains[0]) == {"share", "loc"}
    assert len(np.unique(chains[0]["share"])) > 2
    for name, draws in chains[0].items():
        np.testing.assert_allclose(draws, chains[1][name], rtol=1e-3, atol=1e-4)
