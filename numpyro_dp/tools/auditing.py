"""Audits: how much a whole run gives away about one row, measured, beside the eps that is claimed for it.

A run is repeated many times on each of two neighbouring tables. Everything public is the same in all of them (start,
proposals, accept draws); what differs is the privacy noise, and the batches. Whoever sees what a run hands out guesses
which table it was; how well that can be done bounds eps from below, with a known confidence, whatever the mechanism is
(Kairouz, Oh and Viswanath 2015; Jagielski, Ullman and Oprea 2020):

    ``eps >= log((P(guess 1 | table 1) - delta) / P(guess 1 | table 2))``.

A bound above the claim proves that the claim is wrong: a bug. A bound below it proves nothing: the guess is a linear
one, and another table, or another model, may give away more. Audits are for synthetic tables: repeating a run a
thousand times on a real one would cost a thousand times its eps, and none of it is charged to anything.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.kernels.prepared import PreparedKernel
from numpyro_dp.model.arguments import as_arguments
from numpyro_dp.plots import exact_interval, plot_audit
from numpyro_dp.privacy.batches import ALL_ROWS
from numpyro_dp.privacy.ledger import Ledger, Plan
from numpyro_dp.privacy.noise import NoiseSource

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_FEATURES = 60
"""Numbers of a run that the guess may rest on: those that differ most between the tables in a third of the runs."""


@dataclasses.dataclass(frozen=True)
class AuditResult:
    """What an audit has found.

    :ivar eps_lower: with probability `confidence`, the true eps at `delta` is at least this.
    :ivar eps: the claim.
    :ivar scores: of the guess, for the runs on each table that the bound rests on: high for the first.
    :ivar profile: the claim as pairs (eps, delta), each of which is claimed.
    """

    eps_lower: float
    eps: float
    delta: float
    confidence: float
    neighboring_relation: str
    scores: tuple[np.ndarray, np.ndarray]
    profile: tuple[tuple[float, float], ...]

    @property
    def holds(self) -> bool:
        """Whether the bound is below the claim. False means a bug (or bad luck of probability ``1 - confidence``)."""
        return self.eps_lower <= self.eps

    def trade_off(self, false_positive_rate: np.ndarray) -> np.ndarray:
        """The smallest rate of false negatives that the claim allows a guess with so many false positives."""
        alpha = np.asarray(false_positive_rate, float)[..., None]
        eps, delta = np.array([pair for pair in self.profile if pair[0] < math.inf] or [(0.0, 1.0)]).T
        bounds = np.maximum(1 - delta - np.exp(eps) * alpha, np.exp(-eps) * (1 - delta - alpha))
        return np.maximum(bounds.max(-1), 0.0)

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Errors of the guess beside the fewest that the claim allows: the band must reach above the grey region."""
        return plot_audit(self, ax)

    def __str__(self) -> str:
        verdict = "below the claim" if self.holds else "ABOVE THE CLAIM: this is a bug"
        runs = f"{len(self.scores[0])} + {len(self.scores[1])} runs ({self.neighboring_relation})"
        lower = math.floor(1_000 * self.eps_lower) / 1_000  # never more than was found
        found = f"at least {lower:.3f} (confidence {self.confidence:.6g})"
        return f"Audit of {runs}: eps at delta {self.delta:.3g} is {found}, {verdict} of {self.eps:.4g}"


def audit(
    make: Callable[[], DPKernel],
    table: tuple | Mapping[str, Any],
    neighbor: tuple | Mapping[str, Any],
    *,
    num_warmup: int = 0,
    num_samples: int = 10,
    num_chains: int = 1,
    trials: int = 2000,
    delta: float | None = None,
    confidence: float = 0.95,
    init_params: Mapping[str, Any] | None = None,
    rng_key: jax.Array | None = None,
) -> AuditResult:
    """A lower bound on the eps of a whole run, from repeated runs on two neighbouring synthetic tables.

    :param make: makes the kernel, with a budget of its own: ``lambda: DPPenalty(model, eps=1.0, clip_ratio=0.1)``. Of
        a kernel that prepares itself the preparations are repeated, one after the other.
    :param table, neighbor: the model's arguments, a tuple or a dict of keywords. They must be neighbours under the
        kernel's relation: one row replaced, or added (then shapes differ). A row far out, whose clipped sums point
        one way in one table and the other way in the other, gives away most.
    :param num_warmup, num_samples, num_chains: of one run.
    :param trials: runs on each table. A third of them chooses the guess, and the others count.
    :param delta: at which eps is bounded. Default: that of the kernel's claim. A larger one needs fewer trials.
    :param confidence: of the bound, in (0, 1).
    :param init_params: where the chains start, unconstrained; by default the kernel's own start.
    :param rng_key: of the public randomness.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
    if trials < 100:
        raise ValueError(f"an audit needs at least 100 trials on each table, got {trials}")
    kernel = make()
    if not isinstance(kernel, DPKernel):
        raise TypeError(f"`make` must return a private kernel such as DPPenalty, got {type(kernel).__name__}")
    if kernel.ledger.budget is not None or kernel.ledger.reproducible:
        raise ValueError(
            "an audit repeats runs, on synthetic tables, with fresh noise: leave out `budget` and `noise_seed`"
        )
    again = make()
    if again is kernel:
        raise ValueError("`make` must make a new kernel each time: a kernel has one budget, for one table")
    key = random.key(0) if rng_key is None else rng_key
    run = _Run(num_warmup, num_samples, num_chains, init_params, key)
    first, plan = _repeat(kernel, as_arguments(table), run, trials)
    second, other = _repeat(again, as_arguments(neighbor), run, trials)
    if (plan.eps, plan.delta, plan.neighboring_relation) != (other.eps, other.delta, other.neighboring_relation):
        raise ValueError(
            f"the claims for the two tables differ, ({plan.eps:g}, {plan.delta:g}) and ({other.eps:g}, "
            f"{other.delta:g}): give the kernel `delta`"
        )
    return _result(first, second, kernel, delta, confidence)


@dataclasses.dataclass(frozen=True)
class _Run:
    """What is the same in all runs."""

    num_warmup: int
    num_samples: int
    num_chains: int
    init_params: Mapping[str, Any] | None
    rng_key: jax.Array

    @property
    def num_iterations(self) -> int:
        return self.num_warmup + self.num_samples


class _Repeated(Ledger):
    """A ledger for synthetic tables: it grants the releases of its plan as often as one likes."""

    def __init__(self, plan: Plan, noise: NoiseSource | None):
        super().__init__(noise)
        self.commit(plan)

    def begin_anew(self) -> None:
        """As if nothing had been released or assigned."""
        self._spent = {}
        self.commit(self._plan_as_committed or self.plan)

    def require(self, *args: Any) -> None:
        pass

    def grant(self, *args: Any) -> Any:
        with self._lock:
            self._spent = {name: [0] * len(counts) for name, counts in self._spent.items()}
        return super().grant(*args)


def _repeat(kernel: DPKernel, table: tuple, run: _Run, trials: int) -> tuple[np.ndarray, Plan]:
    """What so many runs hand out, a row of numbers for each; and the plan of one of them."""
    try:
        if isinstance(kernel, PreparedKernel) and kernel.preparation is not None:
            return _repeat_preparations(kernel, table, run, trials)
        return _repeat_chains(kernel, table, run, trials)
    finally:
        if kernel.ledger.committed:  # whoever has kept the kernel has no noise without end
            plan, kernel._ledger = kernel.ledger.plan, Ledger(None)
            kernel.ledger.commit(plan)


def _repeat_chains(kernel: DPKernel, table: tuple, run: _Run, trials: int) -> tuple[np.ndarray, Plan]:
    """All runs at once: each of them is `num_chains` of very many chains."""
    args, kwargs = table
    kernel.require_budget(run.num_iterations, run.num_chains, args, kwargs, run.num_iterations)
    plan = kernel.ledger.plan
    kernel._ledger = _Repeated(plan, kernel.ledger._noise)
    separated = kernel.separate(args, kwargs)
    keys = random.split(run.rng_key, run.num_chains)
    params = run.init_params
    if params is not None:
        params = {name: jnp.broadcast_to(value, (run.num_chains, *jnp.shape(value))) for name, value in params.items()}
    states = kernel.init(keys, run.num_warmup, params, args, kwargs)
    states = jax.tree.map(lambda leaf: jnp.tile(leaf, (trials, *[1] * (leaf.ndim - 1))), states)

    def step(states: Any, _: None) -> tuple:
        states = kernel.sample(states, args, kwargs)
        return states, jax.vmap(lambda s: _seen(s, separated.ravel(s.z)))(states)

    states, seen = jax.jit(lambda states: jax.lax.scan(step, states, None, run.num_iterations))(states)
    jax.block_until_ready(seen)
    if bool(jnp.any(states.exhausted)):
        raise RuntimeError("a run of the audit exceeded the plan of the kernel")
    seen = np.asarray(seen, float)  # iterations, chains, numbers
    return np.moveaxis(seen.reshape(len(seen), trials, run.num_chains, -1), 1, 0).reshape(trials, -1), plan


def _seen(state: Any, z: jax.Array) -> jax.Array:
    """Numbers that a state hands out, of which a linear guess can make use."""
    scale = jnp.where(state.noise_scale > 0, state.noise_scale, 1.0)
    log_accept = jnp.log(jnp.maximum(state.accept_prob, 1e-38))
    carry = [
        jnp.ravel(leaf).astype(z.dtype)
        for leaf in jax.tree.leaves(state.carry)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    numbers = [state.accepted, log_accept, log_accept / scale, scale, 1 / scale]
    seen = jnp.concatenate([z, jnp.stack([jnp.asarray(number, z.dtype) for number in numbers]), *carry])
    return jnp.where(jnp.isfinite(seen), seen, 0)  # a proposal that ran away


def _repeat_preparations(kernel: PreparedKernel, table: tuple, run: _Run, trials: int) -> tuple[np.ndarray, Plan]:
    """One preparation after the other; what it has released decides about draws that cost nothing."""
    args, kwargs = table
    kernel.require_budget(run.num_iterations, run.num_chains, args, kwargs, run.num_iterations)
    plan, noise = kernel.ledger.plan, kernel.ledger._noise
    kernel._ledger = ledger = _Repeated(plan, noise)
    separated = kernel.separate(args, kwargs)
    target = partial(kernel.target, separated, args, kwargs, ALL_ROWS)
    begun = kernel.before_asking(separated, separated.public(args, kwargs), target)
    rows = []
    for _ in range(trials):
        ledger.begin_anew()
        prepared = kernel.ask_table(begun)
        if not prepared.draws_are_free:
            raise ValueError(
                f"the preparation chose mode {prepared.mode!r}, whose chains cost, too: audit the preparation with "
                "`DPHMC(model, eps=...)`, and the chain by a kernel without preparation"
            )
        asked = (prepared.frame, prepared.surrogate, prepared.bounds, prepared.check, prepared.statistics)
        numbers = (*asked, prepared.start)
        rows.append(np.concatenate([np.ravel(np.asarray(leaf, float)) for leaf in jax.tree.leaves(numbers)]))
    return np.array(rows), plan


# -- From runs to a bound ----------------------------------------------------------------------------------------------


def _result(
    first: np.ndarray, second: np.ndarray, kernel: DPKernel, delta: float | None, confidence: float
) -> AuditResult:
    report = kernel.privacy
    delta = report.delta if delta is None else delta
    scores, bound = guess(first, second, delta, 1 - confidence)
    bound = max(bound, 0.0)
    deltas = sorted({delta, *np.geomspace(1e-6, 0.5, 15)})
    profile = tuple((report.eps_at(d), d) for d in deltas)
    return AuditResult(bound, report.eps_at(delta), delta, confidence, report.neighboring_relation, scores, profile)


def guess(
    first: np.ndarray, second: np.ndarray, delta: float, error: float
) -> tuple[tuple[np.ndarray, np.ndarray], float]:
    """A lower bound on the eps at `delta` of whatever drew these samples on two tables; the larger of both directions.

    Events are half-spaces: on the first third of the samples a linear discriminant and a threshold are chosen, on the
    others the probabilities are bounded (Clopper and Pearson).

    :param first, second: samples, shape (n,) or (n, features).
    :param error: probability that the bound is wrong.
    :return: scores of the last two thirds, and the bound.
    :raises ValueError: if a sample is not finite.
    """
    first, second = (np.asarray(x, float).reshape(len(x), -1) for x in (first, second))
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("what the runs handed out is not finite: start the chains elsewhere (`init_params`)")
    train = len(first) // 3
    direction = _discriminant(first[:train], second[:train])
    a, b = first @ direction, second @ direction
    bound = max(_directed(a, b, train, delta, error / 2), _directed(-b, -a, train, delta, error / 2))
    return (a[train:], b[train:]), bound


def _discriminant(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Fisher's linear discriminant, of the features that differ most; of noise-free combinations nearly all weight."""
    spread = np.std(np.concatenate([first, second]), 0)
    scale = np.where(spread > 0, spread, 1.0)
    gap = (first.mean(0) - second.mean(0)) / scale
    used = np.argsort(-np.abs(gap))[:MAX_FEATURES]
    within = np.atleast_2d(
        np.cov((first / scale)[:, used], rowvar=False) + np.cov((second / scale)[:, used], rowvar=False)
    )
    direction = np.zeros(len(gap))
    direction[used] = np.linalg.solve(within + 1e-12 * np.eye(len(used)), gap[used]) / scale[used]
    return direction


def _directed(first: np.ndarray, second: np.ndarray, train: int, delta: float, error: float) -> float:
    """The bound from an event ``{x > threshold}`` that is the likelier on the first table."""

    def bound(a: np.ndarray, b: np.ndarray, threshold: Any) -> np.ndarray:
        hits_a, hits_b = (len(x) - np.searchsorted(np.sort(x), threshold, side="right") for x in (a, b))
        lowest, _ = exact_interval(hits_a, len(a), error)
        _, highest = exact_interval(hits_b, len(b), error)
        return np.log(np.maximum(lowest - delta, 1e-300) / highest)

    candidates = np.unique(np.quantile(np.concatenate([first[:train], second[:train]]), np.linspace(0, 1, 400)))
    # Between two values where there are few of them, as with a bit.
    candidates = (candidates[1:] + candidates[:-1]) / 2 if len(candidates) > 1 else candidates
    best = candidates[np.argmax(bound(first[:train], second[:train], candidates))]
    return float(bound(first[train:], second[train:], best))
