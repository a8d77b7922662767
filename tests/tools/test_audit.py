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
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.mistakes import noise_divided_by

import numpyro_dp.privacy.clipping
import numpyro_dp.privacy.noise
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
from numpyro_dp.privacy.accounting import composed_eps
from numpyro_dp.privacy.ledger import Ledger, Releases
from numpyro_dp.privacy.mechanisms import Gaussian, PoissonGaussian
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.tools.auditing import guess

pytestmark = pytest.mark.optimized

DELTA = 0.05
ERROR = 1e-5
"""Probability that a bound in one direction is wrong."""
TRIALS = 2_400
"""On each table."""
FAR, NOTHING = 1e6, np.nan


# -- From samples to a bound -------------------------------------------------------------------------------------------


def empirical_eps(first: np.ndarray, second: np.ndarray, delta: float) -> float:
    """A lower bound on the eps at `delta` of whatever drew these samples on two tables."""
    return guess(first, second, delta, 2 * ERROR)[1]


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
    :ivar trials: how many on each table.
    :ivar walks: whether the kernel is a guided walk, whose first jump goes upwards.
    """

    make: Callable[..., Any]
    first: np.ndarray
    second: np.ndarray
    released: Callable[[Any], np.ndarray] = log_accept_prob
    start: float = -0.5
    margin: float | None = None
    trials: int = TRIALS
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
    # The noise of all trials is fresh, but follows from a seed, so that a test either always passes or never.
    kernel = scenario.make(num_iterations=1, num_chains=1, delta=DELTA, noise_seed=1)
    state = kernel.init(jax.random.PRNGKey(seed), 0, {"mu": jnp.asarray(start)}, (scenario.first,), {})
    if scenario.walks:
        state = state._replace(carry=jnp.ones_like(state.carry))
    for table in (scenario.first, scenario.second):
        kernel.separate((table,), {})  # not while tracing
    privacy = kernel.privacy
    allow(kernel, 10**6)
    return Trials(privacy.eps, privacy.delta, kernel, jax.jit(lambda s, y: kernel.sample(s, (y,), {})), state)


def allow(kernel: Any, times: int) -> None:
    plan = kernel.ledger.plan
    kinds = {name: Releases(k.mechanisms, tuple(times * c for c in k.counts)) for name, k in plan.kinds.items()}
    kernel.ledger.commit(dataclasses.replace(plan, kinds=kinds, eps=math.inf))  # whatever it costs


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
    public = np.linspace(-10, 10, scenario.trials)
    states = repeated(trials.state, len(public))._replace(z={"mu": jnp.asarray(-public - 0.5, jnp.float32)})
    # Accepted where the log ratio + noise + what is drawn from the public key + public > 0.
    threshold = 20 * (float(np.mean(trials.step(states, scenario.first).accepted)) - 0.5)
    return at(trials, threshold + scenario.margin - 0.5)


def bound_of(scenario: Scenario, trials: Trials) -> float:
    tables = (scenario.first, scenario.second)
    first, second = (scenario.released(outcomes(trials, table, scenario.trials)) for table in tables)
    return empirical_eps(first, second, trials.delta)


# -- The kernels -------------------------------------------------------------------------------------------------------


def table(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


UP, DOWN, GONE = table(FAR, NOTHING), table(-FAR, NOTHING), table(NOTHING)
ALL_UP, ONE_DOWN = table(FAR, FAR, FAR), table(-FAR, FAR, FAR)
ADD = {"neighboring_relation": "add_or_remove_one"}


def sensitivity(fixed: dict) -> int:
    """Of a sum of rows clipped to 1."""
    return 1 if "neighboring_relation" in fixed else 2


def penalty(noise_multiplier, clip_ratio=None, **fixed):
    """Noise of a standard deviation of about 6 in the log ratio keeps the acceptance probability below 1, for it
    subtracts 18; a much larger one would make it underflow."""
    clip_ratio = 8.0 / sensitivity(fixed) / noise_multiplier if clip_ratio is None else clip_ratio

    def make(**options):
        return DPPenalty(
            model,
            **fixed,
            guided=True,
            step_size=1.0,
            clip_ratio=clip_ratio,
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
            clip_ratio=8.0 / sensitivity(fixed) / noise_multiplier,
            clip_grad=0.2 / sensitivity(fixed) / noise_multiplier,
            noise_multiplier_ratio=noise_multiplier,
            noise_multiplier_grad=noise_multiplier,
            **options,
        )

    return make


def gradients(kernel, noise_multiplier, **fixed):
    common = {"step_size": 0.02, "clip_grad": 1.0, "noise_multiplier_grad": noise_multiplier}
    return lambda **options: kernel(model, **{**common, **fixed}, **options)


def family(noise_multiplier, step_size=6.0, **fixed):
    common = {"guided": True, "bounds": (-1.0, 1.0), "noise_multiplier_statistics": noise_multiplier}
    return lambda **options: DPExponentialFamily(
        model, step_size=step_size / noise_multiplier, **common, **fixed, **options
    )


def stochastic(make, first, second, **others):
    return Scenario(make, first, second, position, start=0.0, walks=False, **others)


HALF = PoissonBatches(rate=0.5)

SCENARIOS = {
    "penalty": Scenario(penalty(1.1), UP, DOWN),
    "penalty_add": Scenario(penalty(1.1, **ADD), UP, GONE),
    "penalty_power": Scenario(penalty(1.1, clip_ratio=40.0 / 1.1, power=0.1), UP, DOWN),
    "penalty_poisson": Scenario(penalty(0.5, clip_ratio=0.05, batch_size=HALF), UP, DOWN, start=0.7),
    "penalty_poisson_add": Scenario(penalty(0.8, clip_ratio=0.05, batch_size=HALF, **ADD), DOWN, GONE, start=0.7),
    "penalty_fixed": Scenario(penalty(0.9, clip_ratio=0.05, batch_size=FixedBatches(2)), ALL_UP, ONE_DOWN, start=0.7),
    "barker": Scenario(barker(0.7, 0.5 / 0.7), UP, DOWN, accept_bit, margin=0.5),
    "barker_add": Scenario(barker(0.7, 1.0 / 0.7, **ADD), UP, GONE, accept_bit, margin=0.5),
    "barker_power": Scenario(barker(0.7, 5.0 / 0.7, power=0.1), UP, DOWN, accept_bit, margin=0.5),
    "barker_exponential": Scenario(barker(1.1, 0.5 / 1.1, variance=1.0), UP, DOWN, accept_bit, margin=0.4),
    "barker_logistic": Scenario(
        barker(1.1, 0.5 / 1.1, variance=1.0, correction="logistic"), UP, DOWN, accept_bit, margin=0.4
    ),
    "barker_batch": Scenario(
        barker(1.8, 2**0.5 / 2 / 1.8, batch_size=2), ALL_UP[:2], ONE_DOWN[:2], accept_bit, margin=0.5, trials=10_000
    ),
    "barker_batch_of_three": Scenario(
        barker(2.0, 2**0.5 / 3 / 2.0, batch_size=2), ALL_UP, ONE_DOWN, accept_bit, margin=-1.0, trials=7_000
    ),
    "hmc": Scenario(hmc(1.5), UP, DOWN, distance_and_ratio, start=0.0, walks=False),
    "hmc_add": Scenario(hmc(1.5, **ADD), UP, GONE, distance_and_ratio, start=0.0, walks=False),
    "hmc_reuse": Scenario(hmc(1.8, leapfrog="reuse"), UP, DOWN, with_gradient, start=0.0, walks=False, trials=4_000),
    "sgld": stochastic(gradients(DPSGLD, 1.1), UP, DOWN),
    "sgld_fixed": stochastic(gradients(DPSGLD, 0.9, batch_size=FixedBatches(2)), ALL_UP, ONE_DOWN),
    "sgld_truncated": stochastic(
        gradients(DPSGLD, 0.6, batch_size=PoissonBatches(1.5, max_batch_size=2)),
        table(FAR, NOTHING, NOTHING),
        table(-FAR, NOTHING, NOTHING),
        trials=6_000,
    ),
    "sgnht": stochastic(gradients(DPSGNHT, 1.1), UP, DOWN),
    "sgnht_poisson_add": stochastic(gradients(DPSGNHT, 0.8, batch_size=HALF, **ADD), UP, GONE),
    "sghmc": stochastic(gradients(DPSGHMC, 2.2, num_steps=4), UP, DOWN, trials=4_000),
    "sghmc_poisson": stochastic(gradients(DPSGHMC, 0.9, num_steps=4, batch_size=HALF), UP, DOWN, trials=4_800),
    "family": Scenario(family(1.1), table(1, 0), table(-1, 0), start=-2.5),
    "family_add": Scenario(family(1.1, **ADD), table(1, -1), table(-1), start=-3.5),
}
IN_CI = ("penalty", "penalty_fixed", "barker_batch", "hmc_reuse", "sgld", "family_add")


@pytest.mark.statistical
@pytest.mark.parametrize("name", [pytest.param(k, marks=() if k in IN_CI else pytest.mark.nightly) for k in SCENARIOS])
def test_one_iteration_costs_no_more_than_claimed_and_half_the_noise_is_noticed(name, monkeypatch):
    scenario = SCENARIOS[name]
    trials = ready(scenario)
    honest = bound_of(scenario, trials)
    monkeypatch.setattr(NoiseSource, "draw", noise_divided_by(2))
    halved = bound_of(scenario, trials)
    print(
        f"{name}: eps {trials.eps:.3f}, found {honest:.3f} ({honest / trials.eps:.0%}), at half the noise {halved:.3f}"
    )
    assert honest < trials.eps
    assert halved > trials.eps


@pytest.mark.statistical
def test_owners_of_rows_against_one_another_and_against_the_rest_of_the_world(monkeypatch):
    """The others know their own noise, and can take it out; to all the world the noise of both owners counts."""
    scenario = Scenario(penalty(1.1, clip_ratio=3.0, owners=np.arange(2)), UP, DOWN, trials=4_000)
    trials = ready(scenario)
    outside = composed_eps(((Gaussian(1.1 * 2**0.5), 1),), DELTA, "replace_one")
    assert bound_of(scenario, trials) < outside
    exact = NoiseSource.draw

    def known_to_the_other(self, *arguments):
        noise = exact(self, *arguments)
        noise[..., 1] = 0
        return noise

    monkeypatch.setattr(NoiseSource, "draw", known_to_the_other)
    honest = bound_of(scenario, trials)
    monkeypatch.setattr(NoiseSource, "draw", noise_divided_by(2))
    halved = bound_of(scenario, trials)
    print(f"owners: eps {trials.eps:.3f}, found {honest:.3f}, at half the noise {halved:.3f}")
    assert outside * 0.3 < honest < trials.eps
    assert halved > trials.eps


# -- Mistakes that must be noticed -------------------------------------------------------------------------------------


@pytest.mark.statistical
def test_rows_that_are_not_clipped_are_noticed(monkeypatch):
    monkeypatch.setattr(
        numpyro_dp.privacy.clipping,
        "scalar_steps",
        lambda values, bound: jnp.round(jnp.nan_to_num(values * (numpyro_dp.privacy.clipping.GRID / bound))).astype(
            jnp.int32
        ),
    )
    scenario = Scenario(penalty(1.1), table(10, NOTHING), table(-10, NOTHING))
    trials = ready(scenario)
    assert bound_of(scenario, trials) > 1.2 * trials.eps


@pytest.mark.statistical
def test_noise_for_the_other_relation_is_noticed(monkeypatch):
    """The sensitivity of adding or removing a row, where replacing one is claimed."""
    monkeypatch.setattr(
        numpyro_dp.privacy.noise, "sensitivity_steps", lambda relation: numpyro_dp.privacy.clipping.GRID
    )
    scenario = SCENARIOS["sgld"]
    trials = ready(scenario)
    assert bound_of(scenario, trials) > 1.2 * trials.eps


@pytest.mark.statistical
def test_batches_at_a_higher_rate_are_noticed(monkeypatch):
    scenario = stochastic(gradients(DPSGLD, 0.5, batch_size=PoissonBatches(rate=0.3)), UP, DOWN)
    trials = ready(scenario)
    assert bound_of(scenario, trials) < trials.eps
    draw = PoissonBatches.draw
    monkeypatch.setattr(PoissonBatches, "draw", lambda self, *arguments: draw(PoissonBatches(rate=0.9), *arguments))
    assert bound_of(scenario, trials) > 1.2 * trials.eps


@pytest.mark.statistical
def test_batches_of_a_fixed_size_that_are_accounted_for_as_poisson_are_noticed(monkeypatch):
    monkeypatch.setattr(
        FixedBatches, "mechanism", lambda self, noise, num_rows: PoissonGaussian(noise, self.batch_size / num_rows)
    )
    tables = table(*[FAR] * 5), table(-FAR, *[FAR] * 4)
    scenario = stochastic(gradients(DPSGLD, 0.4, batch_size=FixedBatches(2)), *tables, trials=3_600)
    trials = ready(scenario)
    assert bound_of(scenario, trials) > 1.2 * trials.eps


def seeded_pairs(seed: int, trials: int) -> tuple[float, np.ndarray, np.ndarray]:
    """Two chains with a noise seed, from two points between which the changed row's gradient turns round in one table,
    and does not in the other. The claim for both, and where they are after one iteration, on either table."""
    kernel = DPSGLD(
        model,
        step_size=0.4,
        clip_grad=1.0,
        noise_multiplier_grad="matched",
        noise_seed=seed,
        num_iterations=1,
        num_chains=2,
        delta=DELTA,
    )
    first, second = table(100, NOTHING), table(0, NOTHING)
    state = kernel.init(jax.random.PRNGKey(0), 0, {"mu": jnp.zeros(())}, (first,), {})
    eps = kernel.privacy.eps
    allow(kernel, 10**6)
    keys = jnp.repeat(jax.random.split(jax.random.PRNGKey(1), trials), 2, axis=0)
    states = repeated(state, 2 * trials)._replace(
        rng_key=keys, z={"mu": jnp.tile(jnp.asarray([-10.0, 10.0], jnp.float32), trials)}
    )
    step = jax.jit(lambda s, y: kernel.sample(s, (y,), {}))
    return eps, *(position(step(states, y)).reshape(trials, 2) for y in (first, second))


@pytest.mark.statistical
def test_the_same_noise_in_two_chains_is_noticed(monkeypatch):
    """A seed with a nonce, and two chains with equal keys: the ledger tells their draws apart, or should."""
    eps, first, second = seeded_pairs(seed=1, trials=1_200)
    assert empirical_eps(first, second, DELTA) < eps
    monkeypatch.setattr(Ledger, "_unrepeated", lambda self, nonce: nonce)
    eps, first, second = seeded_pairs(seed=1, trials=1_200)
    assert empirical_eps(first, second, DELTA) > 1.2 * eps
    np.testing.assert_allclose(np.diff(first) - np.diff(first).mean(), 0, atol=1e-4)  # no noise is left


@pytest.mark.statistical
def test_the_same_noise_in_two_iterations_is_noticed(monkeypatch):
    """The prior drives the chain past the row of one table, whose gradient turns round."""
    kernel = gradients(DPSGLD, 1.4, step_size=0.02, clip_grad=0.5)(
        num_iterations=2, num_chains=1, delta=DELTA, noise_seed=1
    )
    first, second = table(FAR, NOTHING), table(-99, NOTHING)
    state = kernel.init(jax.random.PRNGKey(0), 0, {"mu": jnp.asarray(-100.0)}, (first,), {})
    eps = kernel.privacy.eps
    allow(kernel, 10**6)
    step = jax.jit(lambda s, y: kernel.sample(s, (y,), {}))

    def two_iterations(y: np.ndarray) -> np.ndarray:
        drawn.clear()
        once = jax.block_until_ready(step(repeated(state, 1_200), y))
        again = iter(list(drawn))
        replay.append(again)
        twice = step(once, y)
        found = np.stack([position(once), position(twice)], 1)
        replay.clear()
        return found

    drawn, replay = [], []
    exact = NoiseSource.draw

    def once_in_two(self, *arguments):
        if replay:
            return next(replay[0])
        drawn.append(exact(self, *arguments))
        return drawn[-1]

    assert empirical_eps(two_iterations(first), two_iterations(second), DELTA) < eps
    monkeypatch.setattr(NoiseSource, "draw", once_in_two)
    assert empirical_eps(two_iterations(first), two_iterations(second), DELTA) > 1.2 * eps


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("chains", "trials"),
    [(4, 1_200), pytest.param(2, 6_000, marks=pytest.mark.nightly)],
    ids=["4_chains", "2_chains"],
)
def test_chains_that_are_not_charged_are_noticed(chains, trials, monkeypatch):
    """Of several chains only the first is within the plan. The others stand still, or should."""
    scenario = SCENARIOS["penalty"]
    one = prepare(scenario, scenario.start)
    ledger = one.kernel.ledger
    kinds = {"ratio": ledger.plan.kinds["ratio"]._replace(counts=(trials,))}
    ledger.commit(dataclasses.replace(ledger.plan, kinds=kinds, eps=math.inf))

    def releases(y: np.ndarray) -> np.ndarray:
        states = one.step(repeated(one.state, chains * trials), y)
        states = jax.block_until_ready(states)
        ledger._spent = {"ratio": [0]}  # the other table has a budget of its own
        return scenario.released(states).reshape(chains, trials).T

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the budget is used up
        honest = empirical_eps(releases(scenario.first), releases(scenario.second), DELTA)
    assert honest < one.eps
    exact, calls = Ledger.grant, itertools.count()

    def forgetful(self, *arguments):
        granted = exact(self, *arguments)
        if next(calls) % chains:
            self._spent["ratio"][0] -= 1
        return granted

    monkeypatch.setattr(Ledger, "grant", forgetful)
    uncounted = empirical_eps(releases(scenario.first), releases(scenario.second), DELTA)
    print(f"{chains} chains: eps {one.eps:.3f} for one, found {honest:.3f}, all counted as one {uncounted:.3f}")
    assert uncounted > one.eps
