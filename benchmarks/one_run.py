"""Audits of a single run: how many of many coins can be read off what one run has released?

Each of m units has two candidate rows (for a person: all of its rows), and a fair coin says which of them the table
holds. A run is made, once. An adversary who knows the candidates, all other rows, the public randomness and every
number that came through the vault's door guesses as many coins as it likes. Under (eps, delta) a guess is right with
probability ``e^eps / (1 + e^eps)`` at most, up to delta, however the guesses hang together: so many right ones bound
eps from below (Steinke, Nasr and Jagielski 2023, Theorem 5.2). No run is repeated, unlike in `numpyro_dp.audit`.

The guess is the best linear one. Two replays of the run, in which every release answers what it answered in the run,
tell what each candidate adds to each sum; what remains is a linear regression with known noise.

    python benchmarks/one_run.py [--runs 5] [--picture docs/_static/one-run.png]
"""

import argparse
import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import scipy.stats

import numpyro_dp.privacy.noise
import numpyro_dp.privacy.release
from numpyro_dp import DPHMC, DPSGLD, MCMC, DPBarker, DPPenalty, PoissonBatches, PosteriorWarning
from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.privacy.clipping import GRID, sensitivity_steps
from numpyro_dp.privacy.noise import NoiseSource
from numpyro_dp.privacy.release import Vault

GUESSED = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Shares of the coins that are guessed, the surest first; each bound counts with its part of the error."""


# -- From guesses to a bound -------------------------------------------------------------------------------------------


def p_value(correct: int, guesses: int, coins: int, eps: float, delta: float) -> float:
    """Largest probability, under (eps, delta), that so many of the guesses are right (Theorem 5.2)."""
    right = 1 / (1 + math.exp(-eps))
    tail = scipy.stats.binom.sf(correct - 1, guesses, right)
    below = tail + np.cumsum(scipy.stats.binom.pmf(np.arange(correct - 1, -1, -1), guesses, right)) - tail
    most = (below / np.arange(1, correct + 1)).max(initial=0.0)
    return min(1.0, float(tail + 2 * coins * delta * most))


def eps_lower(scores: np.ndarray, coins: np.ndarray, delta: float, error: float) -> float:
    """A lower bound on eps, wrong with probability `error` at most; the best over `GUESSED`.

    :param scores: of each coin, positive where the guess is heads; the larger, the surer.
    :param coins: whether each was heads.
    """
    found, order = 0.0, np.argsort(-np.abs(scores))
    for share in GUESSED:
        guesses = math.ceil(share * len(coins))
        guessed = order[:guesses]
        correct = int(np.sum((scores[guessed] > 0) == coins[guessed]))
        low, high = 0.0, 50.0
        while high - low > 1e-4:
            eps = (low + high) / 2
            fits = p_value(correct, guesses, len(coins), eps, delta) > error / len(GUESSED)
            low, high = (low, eps) if fits else (eps, high)
        found = max(found, low)
    return found


# -- Who listens at the door -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Release:
    """One release: what came out, and what each of two replays would have added up.

    :ivar answer: noisy steps, or a bit.
    :ivar threshold: of a bit, in steps.
    :ivar totals: exact steps of the table of all tails, and of that of all heads.
    :ivar shares: of each canary in them, shape (m, numbers).
    """

    answer: tuple
    scale: float
    threshold: float | None
    totals: list[np.ndarray] = dataclasses.field(default_factory=list)
    shares: list[np.ndarray] = dataclasses.field(default_factory=list)


class Listener:
    """Records the answers of one run; in the next two, answers the same, and notes totals and the canaries' shares."""

    def __init__(self, coins: int):
        self.coins, self.replays = coins, 0
        self.releases: dict[bytes, Release] = {}
        self._scales: dict[bytes, float] = {}
        self._shares: dict[bytes, np.ndarray] = {}

    def replay(self) -> None:
        self.replays, self._shares = self.replays + 1, {}

    def _meet(self, noise: np.ndarray, total: np.ndarray, threshold: float | None, answer: tuple) -> tuple:
        if not noise.any():
            return answer
        key = noise.tobytes()
        if not self.replays:
            self.releases[key] = Release(answer, self._scales[key], threshold)
            return answer
        known = self.releases[key]
        known.totals.append(np.ravel(total).astype(float))
        known.shares.append(self._shares[total.tobytes()])
        return known.answer

    def _listens(self, vault: Vault, total: Any, query: Any, rows: tuple, rate: float) -> Any:
        """Note what each of the first rows adds to this total."""

        def share(*row: jax.Array) -> jax.Array:
            value = jnp.ravel(query.per_row(tuple(part[None] for part in row)))
            norm = jnp.linalg.norm(value)
            value = jnp.where(norm > query.bound, value * (query.bound / norm), value)
            return jnp.where(jnp.isfinite(norm), value, 0) * (GRID / query.bound) * rate

        def host(hi: Any, lo: Any, shares: Any) -> Any:
            self._shares[_whole(hi, lo).tobytes()] = np.asarray(shares, float)
            return np.asarray(hi)

        shares = jax.vmap(share)(*(part[: self.coins] for part in rows))
        shape = jax.ShapeDtypeStruct(total.hi.shape, total.hi.dtype)
        return total._replace(hi=_ask_host(host, shape, total.hi, total.lo, shares))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        module = numpyro_dp.privacy.release
        release, release_bit, draw = module.release, module.release_bit, NoiseSource.draw
        sum_rows, row_sum = Vault._sum_rows, Vault._row_sum

        def heard_draw(source: Any, shape: Any, mechanism: Any, relation: str, nonce: bytes) -> np.ndarray:
            noise = draw(source, shape, mechanism, relation, nonce)
            steps = _whole(*noise)  # of several releases, perhaps, one after the other
            for part in (steps, *np.atleast_1d(steps)):
                self._scales[part.tobytes()] = mechanism.noise_multiplier * sensitivity_steps(relation)
            return noise

        def heard_release(total: Any, noise: Any) -> Any:
            steps = release(total, noise)

            def host(hi, lo, noise_hi, noise_lo, *answer):
                return self._meet(_whole(noise_hi, noise_lo), _whole(hi, lo), None, tuple(map(np.asarray, answer)))

            shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in steps)
            return type(steps)(*_ask_host(host, shapes, total.hi, total.lo, *noise, *steps))

        def heard_bit(total: Any, noise: Any, threshold: Any) -> Any:
            answer = release_bit(total, noise, threshold)

            def host(hi, lo, noise_hi, noise_lo, threshold, answer):
                noise = _whole(noise_hi, noise_lo)
                return self._meet(noise, _whole(hi, lo), float(threshold), (np.asarray(answer),))[0]

            shape = jax.ShapeDtypeStruct(answer.shape, answer.dtype)
            steps = threshold / (total.bound / GRID)
            return _ask_host(host, shape, total.hi, total.lo, *noise, steps, answer)

        def heard_sum(vault: Vault, rows: tuple, query: Any, **options: Any) -> Any:
            return self._listens(vault, sum_rows(vault, rows, query, **options), query, rows, 1.0)

        def heard_row_sum(vault: Vault, query: Any, batch: Any, by_blocks: bool = True) -> Any:
            total = row_sum(vault, query, batch, by_blocks)
            if batch is None:
                return total
            rate = vault.batches.probability(vault._rows[0].shape[0])
            return self._listens(vault, total, query, vault._rows, rate)

        with contextlib.ExitStack() as stack:
            for where, name, what in [
                (module, "release", heard_release),
                (module, "release_bit", heard_bit),
                (NoiseSource, "draw", heard_draw),
                (Vault, "_sum_rows", heard_sum),
                (Vault, "_row_sum", heard_row_sum),
                (Vault, "may_have_structure", False),  # sums by a structure show no single row
            ]:
                stack.enter_context(mock.patch.object(where, name, what))
            yield

    def scores(self) -> np.ndarray:
        """The adversary's: how far each coin's mean is from 1/2, given all answers, as if coins were normal."""
        information, pull = 4 * np.eye(self.coins), np.zeros(self.coins)
        for release in self.releases.values():
            if len(release.totals) < 2:
                raise RuntimeError("a replay went another way than the run")
            step = release.shares[1] - release.shares[0]
            middle = (release.totals[0] + release.totals[1]) / 2
            if release.threshold is None:
                seen, variance = np.ravel(_whole(*release.answer)) - middle, release.scale**2
            else:  # the slope of a logistic bit's log probability, and its information
                probability = 1 / (1 + np.exp(-(middle - release.threshold) / release.scale))
                variance = release.scale**2 / np.maximum(probability * (1 - probability), 1e-12)
                seen = (np.ravel(release.answer[0]) - probability) * variance / release.scale
            information += (step / variance) @ step.T
            pull += (step / variance) @ seen
        return np.linalg.solve(information, pull)


_ask_host = partial(jax.pure_callback, vmap_method="sequential")  # in branches of chains no others are allowed


def _whole(hi: Any, lo: Any) -> np.ndarray:
    return (np.asarray(hi, np.int64) << 24) + np.asarray(lo, np.int64)


# -- What is audited ---------------------------------------------------------------------------------------------------


def line(X: Any, y: Any = None, person: Any = None) -> None:
    b = numpyro.sample("b", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, 1.0), obs=y)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel, and a table of canaries: each lies along a coordinate of its own, far out on one side or the other.

    :ivar others: rows that are no canaries.
    :ivar each: rows of each canary, a person's.
    """

    kernel: Callable[..., DPKernel]
    options: Mapping[str, Any]
    coins: int
    num_samples: int
    others: int = 200
    each: int = 1

    def table(self, heads: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
        canaries = np.repeat(np.eye(self.coins), self.each, 0)
        signs = np.repeat(np.where(heads, 1.0, -1.0), self.each)
        X = np.concatenate([canaries, rng.uniform(-1, 1, (self.others, self.coins))])
        y = np.concatenate([1e3 * signs, rng.normal(size=self.others)])
        table = {"X": X.astype(np.float32), "y": y.astype(np.float32)}
        if self.each > 1:
            people = np.arange(self.others) // self.each
            table["person"] = np.concatenate([np.repeat(np.arange(self.coins), self.each), self.coins + people])
        return table


PLAIN = {"prepare": False, "step_size": 0.1}
SUBJECTS = {
    "DPHMC, the default": Subject(DPHMC, {}, 60, 50, others=20_000),
    "DPPenalty, a walk": Subject(DPPenalty, PLAIN, 60, 1_000),
    "DPBarker, bits": Subject(DPBarker, {"step_size": 0.1}, 60, 1_000),
    "DPSGLD": Subject(DPSGLD, {"step_size": 2e-4, "clip_grad": 1.0}, 400, 40),
    "DPSGLD, batches": Subject(
        DPSGLD, {"step_size": 2e-4, "clip_grad": 1.0, "batch_size": PoissonBatches(rate=0.25)}, 400, 200
    ),
    "DPSGLD, persons": Subject(DPSGLD, {"step_size": 2e-4, "clip_grad": 1.0, "unit": "person"}, 400, 40, each=3),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """What one run gave away.

    :ivar right: share of right guesses, if all coins are guessed.
    :ivar checked: what the canaries' shares leave unexplained of the difference between the replays' totals, over the
        noise: about 0 if the adversary sees all that they do; not so with batches, of which it does not know who is in.
    """

    eps_lower: float
    eps: float
    delta: float
    right: float
    checked: float


def audit_once(subject: Subject, seed: int, *, eps: float, delta: float = 1e-5, error: float = 0.05) -> Found:
    """A lower bound on the eps of one run, from that run alone."""
    rng = np.random.default_rng(seed)
    heads, listener = rng.random(subject.coins) < 0.5, Listener(subject.coins)
    everybody = np.ones(subject.coins, bool)
    with listener.installed():
        for number, of_canaries in enumerate((heads, ~everybody, everybody)):
            if number:
                listener.replay()
            kernel = subject.kernel(line, eps=eps, delta=delta, noise_seed=2**64 + seed, **subject.options)
            mcmc = MCMC(kernel, num_warmup=0, num_samples=subject.num_samples, progress_bar=False)
            table = subject.table(of_canaries, np.random.default_rng([seed, 1]))
            mcmc.run(jax.random.key(seed), **table)
    scores = listener.scores()
    distances = [
        np.max(np.abs(r.totals[1] - r.totals[0] - (r.shares[1] - r.shares[0]).sum(0))) / r.scale
        for r in listener.releases.values()
    ]
    right = float(np.mean((scores > 0) == heads))
    return Found(eps_lower(scores, heads, delta, error), eps, delta, right, float(max(distances)))


# -- The table and the picture -----------------------------------------------------------------------------------------


def draw(found: Mapping[str, list[Found]], eps: float, path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.5 * len(found) + 1.4), layout="constrained")
    for place, (name, runs) in enumerate(found.items()):
        label = f"{name}\n{SUBJECTS[name].coins} coins"
        axes.plot([run.eps_lower for run in runs], [place] * len(runs), "o", color="C0", alpha=0.6)
        axes.text(-0.02, place, label, ha="right", va="center", transform=axes.get_yaxis_transform(), fontsize=8)
    axes.axvline(eps, color="C3")
    axes.text(eps, -0.9, "claimed ", ha="right", color="C3")
    axes.set(
        xlim=(-0.03 * eps, 1.05 * eps),
        ylim=(len(found) - 0.5, -1.2),
        yticks=[],
        xlabel="eps is at least (confidence .95)",
    )
    axes.set_title("One run each: what it gives away, and what it claims", fontsize=10)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--eps", type=float, default=4.0)
    parser.add_argument("--only", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore", PosteriorWarning)  # canaries are outliers, by design
    print(f"{'':24}{'coins':>6}{'right':>7}   eps is at least, of {options.eps:g} (confidence .95), in each run")
    found = {}
    for name in options.only:
        runs = found[name] = [audit_once(SUBJECTS[name], seed, eps=options.eps) for seed in range(options.runs)]
        right, bounds = np.mean([run.right for run in runs]), " ".join(f"{run.eps_lower:5.2f}" for run in runs)
        print(f"{name:24}{SUBJECTS[name].coins:6}{right:7.3f}   {bounds}   ({max(run.checked for run in runs):.1e})")
    if options.picture:
        draw(found, options.eps, options.picture)


if __name__ == "__main__":
    main()
