"""Audits: what an adversary learns from one iteration, measured, against the eps that the kernel claims for it.

Everything public is the same in all trials: starting point, key, proposal, correction of the test. What differs is what
the ledger draws, noise and batch, so that many trials on each of two neighbouring tables show how well they can be told
apart. `empirical_eps` turns that into a lower bound on eps which holds with probability ``1 - 2 * ERROR``, whatever the
mechanism is. It must stay below the claim; and since a test that nothing can fail proves nothing, it must rise above it
when the noise is halved, and for every other mistake below.

Tables are as bad as they can be: one row, far out, moves a clipped quantity from one end of its bound to the other. The
rows beside it are NaN, which contribute nothing, except where a batch has a fixed size: there an absent row is replaced
by another one, and the others equal the changed row's new value.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import beta

import numpyro_dp.clipping
import numpyro_dp.noise
from numpyro_dp import (
    DPHMC,
    DPSGHMC,
    DPSGLD,
    DPSGNHT,
    DPBarker,
    DPExponentialFamily,
    DPPenalty,
    FixedBatches,
    PoissonBatches,
)
from numpyro_dp.accounting import composed_eps
from numpyro_dp.ledger import Ledger, Releases
from numpyro_dp.mechanisms import Gaussian
from numpyro_dp.noise import NoiseSource

DELTA = 0.05
ERROR = 1e-5
"""Probability that a bound in one direction is wrong."""
TRIALS, MORE = 2_400, 5_000
"""Trials on each table: every day, and in slow tests."""
FAR, NOTHING = 1e6, np.nan


# -- From samples to a bound -------------------------------------------------------------------------------------------


def empirical_eps(first: np.ndarray, second: np.ndarray, delta: float) -> float:
    """A lower bound on the eps at `delta` of whatever drew these samples on two tables; the larger of both directions.

    Any event E gives ``eps >= log((P(E on one) - delta) / P(E on the other))``. Events are half-spaces: on the
    first third of the samples a linear discriminant and a threshold are chosen, on the others the probabilities are
    bounded (Clopper and Pearson).

    :param first, second: samples, shape (n,) or (n, features).
    """
    first, second = (np.asarray(x, float).reshape(len(x), -1) for x in (first, second))
    assert np.isfinite(first).all()
    assert np.isfinite(second).all()
    train = len(first) // 3
    direction = _discriminant(first[:train], second[:train])
    a, b = first @ direction, second @ direction
    return max(_directed(a, b, train, delta), _directed(-b, -a, train, delta))


def _discriminant(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Fisher's linear discriminant; of noise-free combinations nearly all the weight."""
    if first.shape[1] == 1:
        return np.ones(1)
    scale = np.maximum(np.std(np.concatenate([first, second]), 0), 1e-300)
    within = np.cov(first / scale, rowvar=False) + np.cov(second / scale, rowvar=False)
    gap = (first.mean(0) - second.mean(0)) / scale
    return np.linalg.solve(within + 1e-12 * np.eye(len(gap)), gap) / scale


def _directed(first: np.ndarray, second: np.ndarray, train: int, delta: float) -> float:
    """The bound from an event ``{x > threshold}`` that is the likelier on the first table."""

    def bound(a: np.ndarray, b: np.ndarray, threshold: Any) -> np.ndarray:
        hits_a, hits_b = (len(x) - np.searchsorted(np.sort(x), threshold, side="right") for x in (a, b))
        lowest = np.nan_to_num(beta.ppf(ERROR / 2, hits_a, len(a) - hits_a + 1))  # NaN without a hit
        highest = np.nan_to_num(beta.ppf(1 - ERROR / 2, hits_b + 1, len(b) - hits_b), nan=1.0)
        return np.log(np.maximum(lowest - delta, 1e-300) / highest)

    candidates = np.unique(np.quantile(np.concatenate([first[:train], second[:train]]), np.linspace(0, 1, 400)))
    # Between two values where there are few of them, as with a bit.
    candidates = (candidates[1:] + candidates[:-1]) / 2 if len(candidates) > 1 else candidates
    best = candidates[np.argmax(bound(first[:train], second[:train], candidates))]
    return float(bound(first[train:], second[train:], best))


@pytest.mark.parametrize("shift", [0.5, 1.0, 2.0])
def test_the_bound_is_below_the_eps_of_known_pairs_and_not_far_below(shift):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 30_000, 3))
    noise[0] += shift / np.sqrt(3)
    claimed = composed_eps(((Gaussian(1 / shift), 1),), DELTA, "replace_one")
    assert 0.6 * claimed < empirical_eps(noise[0], noise[1], DELTA) < claimed
    assert empirical_eps(noise[1], noise[0], DELTA) > 0.6 * claimed
    assert empirical_eps(noise[1], noise[1], DELTA) < 0


# -- The trials --------------------------------------------------------------------------------------------------------


def model(y):
    """A row's log density, and its gradient, are as large as one likes."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def log_accept_prob(state) -> np.ndarray:
    return np.log(np.maximum(np.asarray(state.accept_prob, float), 1e-38))


def position(state) -> np.ndarray:
    return np.asarray(state.z["mu"], float)


def accept_bit(state) -> np.ndarray:
    return np.asarray(state.accepted, float)


def distance_and_ratio(state) -> np.ndarray:
    """Of DPHMC. The distance tells the noisy gradient, and with it the public part of the log ratio, a quadratic in it;
    so the noisy sum of ratios over its standard deviation is a linear combination of these."""
    scale = np.asarray(state.noise_scale, float)
    return np.stack([scale, 1 / scale, log_accept_prob(state) / scale], 1)


def with_gradient(state) -> np.ndarray:
    """Of DPHMC with ``leapfrog="reuse"``, whose state carries the last noisy gradient."""
    return np.column_stack([distance_and_ratio(state), np.asarray(state.carry.gradient, float)])


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A kernel and two neighbouring tables.

    :ivar make: the kernel; `num_iterations` and the like are passed on.
    :ivar released: the features of the states that tell the tables apart.
    :ivar start: initial value. A jump upwards of length d has a log ratio of ``-d (start + d / 2)`` from the prior.
    :ivar margin: of an accept bit: how far the threshold is above the log ratio on the first table; the starting point
        follows from a pilot run.
    :ivar walks: whether the kernel is a guided walk, whose first jump goes upwards.
    """

    make: Callable[..., Any]
    first: np.ndarray
    second: np.ndarray
    released: Callable[[Any], np.ndarray] = log_accept_prob
    start: float = -0.5
    margin: float | None = None
    walks: bool = True


class Trials(NamedTuple):
    """A kernel that is ready to repeat its first iteration as often as one likes."""

    eps: float
    delta: float
    kernel: Any
    step: Callable
    state: Any


def prepare(scenario: Scenario, start: float = 0.0, seed: int = 0) -> Trials:
    """The claim of one iteration of one chain; then a ledger that grants many of them, at the same noise."""
    kernel = scenario.make(num_iterations=1, num_chains=1, delta=DELTA)
    # Not in the state: noise of the operating system. In the state: public keys, the same in all trials.
    state = kernel.init(jax.random.PRNGKey(seed), 0, {"mu": jnp.asarray(start)}, (scenario.first,), {})
    if scenario.walks:
        state = state._replace(carry=jnp.ones_like(state.carry))
    privacy = kernel.privacy
    allow(kernel, 10**6)
    return Trials(privacy.eps, privacy.delta, kernel, jax.jit(lambda s, y: kernel.sample(s, (y,), {})), state)


def allow(kernel: Any, times: int) -> None:
    plan = kernel._ledger.plan
    kinds = {name: Releases(k.mechanisms, tuple(times * c for c in k.counts)) for name, k in plan.kinds.items()}
    kernel._ledger.commit(dataclasses.replace(plan, kinds=kinds))


def repeated(state: Any, count: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *jnp.shape(x))), state)


def outcomes(trials: Trials, table: np.ndarray, count: int) -> Any:
    """States after one iteration, all from the same one."""
    states = jax.device_get(trials.step(repeated(trials.state, count), table))
    assert not states.exhausted.any()
    return states


def at(trials: Trials, start: Any) -> Trials:
    return trials._replace(state=trials.state._replace(z={"mu": jnp.asarray(start, trials.state.z["mu"].dtype)}))


def ready(scenario: Scenario) -> Trials:
    """Trials that start at the scenario's point."""
    if scenario.margin is None:
        return prepare(scenario, scenario.start)
    trials = prepare(scenario)
    public = np.linspace(-10, 10, TRIALS)
    states = repeated(trials.state, len(public))._replace(z={"mu": jnp.asarray(-public - 0.5, jnp.float32)})
    # Accepted where the log ratio + noise + what is drawn from the public key + public > 0.
    threshold = 20 * (float(np.mean(trials.step(states, scenario.first).accepted)) - 0.5)
    return at(trials, threshold + scenario.margin - 0.5)


def bound_of(scenario: Scenario, trials: Trials, count: int) -> float:
    first, second = (scenario.released(outcomes(trials, t, count)) for t in (scenario.first, scenario.second))
    return empirical_eps(first, second, trials.delta)



def halve_noise(monkeypatch):
    exact = NoiseSource.draw

    def halved(self, *arguments):
        hi, lo = exact(self, *arguments).astype(np.int64)
        steps = ((hi << 24) + lo) // 2
        return np.stack([steps >> 24, steps & (2**24 - 1)]).astype(np.int32)

    monkeypatch.setattr(NoiseSource, "draw", halved)


# -- The kernels -------------------------------------------------------------------------------------------------------

UP, DOWN, GONE = np.array([FAR, NOTHING]), np.array([-FAR, NOTHING]), np.array([NOTHING])
TWO_UP = np.array([FAR, FAR, FAR])
ALL_UP, ONE_DOWN = np.full(3, FAR), np.array([-FAR, FAR, FAR])


def penalty(noise_multiplier, clip_ratio=None, **fixed):
    """Noise of a standard deviation of about 6 in the log ratio keeps the acceptance probability below 1, for it
    subtracts 18; a larger one still shows in it in float32."""

    def make(**options):
        return DPPenalty(
            model,
            **fixed,
            guided=True,
            step_size=1.0,
            clip_ratio=4.0 / noise_multiplier if clip_ratio is None else clip_ratio,
            noise_multiplier_ratio=noise_multiplier,
            **options,
        )

    return make


def barker(noise_multiplier, row_bound, **fixed):
    """Jumps are shortened to a length of 1, at which rows are clipped at `row_bound`."""
    common = {"guided": True, "step_size": 1e3, "clip_ratio": row_bound, "noise_multiplier_ratio": noise_multiplier}
    return lambda **options: DPBarker(model, **common, **fixed, **options)


def hmc(noise_multiplier, **fixed):
    """Gradients whose noise moves the end point by a fraction of the jump."""

    def make(**options):
        return DPHMC(
            model,
            **fixed,
            step_size=1.0,
            num_steps=1,
            jitter=0.0,
            clip_ratio=4.0 / noise_multiplier,
            clip_grad=0.1 / noise_multiplier,
            noise_multiplier_ratio=noise_multiplier,
            noise_multiplier_grad=noise_multiplier,
            **options,
        )

    return make


def gradients(kernel, noise_multiplier, **fixed):
    common = {"step_size": 0.02, "clip_grad": 1.0, "noise_multiplier_grad": noise_multiplier}
    return lambda **options: kernel(model, **common, **fixed, **options)


def family(noise_multiplier, step_size=6.0, **fixed):
    common = {"guided": True, "bounds": (-1.0, 1.0), "noise_multiplier_statistics": noise_multiplier}
    return lambda **options: DPExponentialFamily(
        model, step_size=step_size / noise_multiplier, **common, **fixed, **options
    )


def stochastic(make, first, second):
    return Scenario(make, first, second, position, start=0.0, walks=False)


ADD = {"neighboring_relation": "add_or_remove_one"}
HALF = PoissonBatches(rate=0.5)

SCENARIOS = {
    "penalty": Scenario(penalty(1.1), UP, DOWN),
    "penalty_add": Scenario(penalty(1.1, clip_ratio=8.0, **ADD), UP, GONE),
    "penalty_power": Scenario(penalty(1.1, clip_ratio=40.0 / 1.1, power=0.1), UP, DOWN),
    "penalty_poisson": Scenario(penalty(0.6, clip_ratio=0.05, batch_size=HALF), UP, DOWN, start=0.7),
    "penalty_poisson_add": Scenario(penalty(0.8, clip_ratio=0.05, batch_size=HALF, **ADD), DOWN, GONE, start=0.7),
    "penalty_fixed": Scenario(
        penalty(0.9, clip_ratio=0.05, batch_size=FixedBatches(2)), ALL_UP, ONE_DOWN, start=0.7
    ),
    "penalty_fixed_reverse": Scenario(
        penalty(0.9, clip_ratio=0.05, batch_size=FixedBatches(2)), ONE_DOWN, ALL_UP, start=0.7
    ),
    "barker": Scenario(barker(0.7, 0.5 / 0.7), UP, DOWN, accept_bit, margin=0.85),
    "barker_add": Scenario(barker(0.7, 1.0 / 0.7, **ADD), UP, GONE, accept_bit, margin=0.85),
    "barker_power": Scenario(barker(0.7, 5.0 / 0.7, power=0.1), UP, DOWN, accept_bit, margin=0.85),
    "barker_exponential": Scenario(barker(1.1, 0.5 / 1.1, variance=1.0), UP, DOWN, accept_bit, margin=0.4),
    "barker_logistic": Scenario(
        barker(1.1, 0.5 / 1.1, variance=1.0, correction="logistic"), UP, DOWN, accept_bit, margin=0.4
    ),
    "barker_batch": Scenario(
        barker(1.4, 2**0.5 / 3 / 1.4, batch_size=2), ALL_UP, ONE_DOWN, accept_bit, margin=0.6
    ),
    "barker_batch_reverse": Scenario(
        barker(1.4, 2**0.5 / 3 / 1.4, batch_size=2), ONE_DOWN, ALL_UP, accept_bit, margin=0.6
    ),
    "hmc": Scenario(hmc(1.5), UP, DOWN, distance_and_ratio, start=0.0, walks=False),
    "hmc_add": Scenario(hmc(1.5, **ADD), UP, GONE, distance_and_ratio, start=0.0, walks=False),
    "hmc_reuse": Scenario(hmc(1.5, leapfrog="reuse"), UP, DOWN, with_gradient, start=0.0, walks=False),
    "sgld": stochastic(gradients(DPSGLD, 1.1), UP, DOWN),
    "sgld_matched": stochastic(
        lambda **options: DPSGLD(
            model, step_size=0.4, clip_grad=1.0, noise_multiplier_grad="matched", **options
        ),
        UP,
        DOWN,
    ),
    "sgld_fixed": stochastic(gradients(DPSGLD, 0.9, batch_size=FixedBatches(2)), ALL_UP, ONE_DOWN),
    "sgld_truncated": stochastic(
        gradients(DPSGLD, 0.9, batch_size=PoissonBatches(1.5, max_batch_size=2)), ALL_UP, ONE_DOWN
    ),
    "sgnht": stochastic(gradients(DPSGNHT, 1.1), UP, DOWN),
    "sgnht_poisson_add": stochastic(gradients(DPSGNHT, 0.8, batch_size=HALF, **ADD), UP, GONE),
    "sghmc": stochastic(gradients(DPSGHMC, 2.2, num_steps=4), UP, DOWN),
    "sghmc_poisson": stochastic(gradients(DPSGHMC, 1.1, num_steps=4, batch_size=HALF), UP, DOWN),
    "family": Scenario(family(1.1), np.array([1.0, 0.0]), np.array([-1.0, 0.0]), start=-2.5),
    "family_add": Scenario(family(1.1, **ADD), np.array([1.0, -1.0]), np.array([-1.0]), start=-3.5),
}
EVERY_DAY = ["penalty", "penalty_poisson", "barker", "barker_batch", "hmc", "sgld_fixed", "family_add"]


@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=() if k in EVERY_DAY else pytest.mark.slow) for k in SCENARIOS]
)
def test_one_iteration_costs_no_more_than_claimed_and_half_the_noise_is_noticed(name, monkeypatch):
    scenario = SCENARIOS[name]
    trials, count = ready(scenario), TRIALS if name in EVERY_DAY else MORE
    honest = bound_of(scenario, trials, count)
    halve_noise(monkeypatch)
    halved = bound_of(scenario, trials, count)
    print(f"{name}: eps {trials.eps:.3f}, found {honest:.3f} ({honest / trials.eps:.0%}), at half the noise {halved:.3f}")
    assert honest < trials.eps
    assert halved > trials.eps
