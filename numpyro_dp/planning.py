"""Can a run work? Answered before any budget is spent, from public numbers only: n, d, eps and the length of the run.

The estimates are for a posterior that is about normal, in its own standard deviations. What rows do to it is one
number, the *slope*: by how much one row's log density may change, at its clip bound, per posterior standard deviation.
A typical row's gradient has norm ``sqrt(d / n)`` there, because n rows make d unit curvatures; a clip bound that
rarely clips is about twice that.

*A walk with the penalty test*, whose jump has length j, sees a log ratio of mean ``-j^2 / 2`` and variance ``j^2``, and
noise of variance ``s^2``, ``s = 2 slope j tau`` under replace-one. It accepts with probability
``2 Phi(-sqrt(j^2 + s^2) / 2)``, and an iteration is worth ``j^2 / (4 d)`` of that, in independent draws (the diffusion
limit of Roberts, Gelman and Gilks 1997, to which the noise adds as in Ceperley and Dewing 1999, where d is not small).
*A leapfrog* on noisy gradients is simulated on a standard normal. *A likelihood that is released once* (`DPHMC` as it
is by default) has an error from the noise in its gradient; see `released_error`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.special import ndtr

from numpyro_dp import accounting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOOD_ERROR = 0.5
"""Error of a posterior mean, in posterior standard deviations, up to which a run is said to work."""
ROUGH_ERROR = 1.5
"""Error above which it is said to be hopeless."""
TYPICAL_CLIP = 2.0
"""A clip bound that rarely clips, over the root mean square of what it bounds."""
FEW_DRAWS, MANY_DRAWS = 4.0, 100.0
"""With fewer effective draws than the one a chain is hopeless, whatever else; with as many as the other it works."""
MAX_CURVATURE_NOISE = 1.0
"""Relative noise of the curvature, as foreseen, above which a preparation refuses to begin."""

_JUMPS = np.geomspace(1e-4, 8, 400)  # posterior standard deviations
_STEPS = np.geomspace(1e-5, 2, 40)
_TRAJECTORIES = 400


@dataclass(frozen=True)
class Outlook:
    """What one sampler can be expected to do.

    :ivar sampler: as one writes it.
    :ivar error: of a posterior mean, in posterior standard deviations, about (root mean square).
    :ivar effective_draws: of all chains together; infinite where draws cost nothing.
    :ivar jump: length of a proposed jump in posterior standard deviations; None where nothing is proposed.
    :ivar noise: standard deviation of the noise in the log ratio of such a jump; None where there is none.
    :ivar acceptance: how much is accepted; None where nothing is proposed.
    """

    sampler: str
    error: float
    effective_draws: float
    jump: float | None = None
    noise: float | None = None
    acceptance: float | None = None

    @property
    def verdict(self) -> str:
        """ "works", "rough" or "hopeless"."""
        if self.error <= GOOD_ERROR and self.effective_draws >= MANY_DRAWS:
            return "works"
        return "hopeless" if self.error > ROUGH_ERROR or self.effective_draws < FEW_DRAWS else "rough"


@dataclass(frozen=True)
class RunPlan:
    """What `plan` has found; ``print`` it, or draw it with `plot`.

    :ivar outlooks: one for each sampler.
    :ivar needed_eps: for each sampler, the smallest eps with which it works at this n; infinite: none below 1000.
    :ivar needed_rows: the smallest n with which it works at this eps; infinite: none below 1e12.
    """

    n: float
    d: int
    eps: float
    delta: float
    num_warmup: int
    num_samples: int
    num_chains: int
    num_steps: int
    slope: float
    power: float
    outlooks: tuple[Outlook, ...]
    needed_eps: dict[str, float]
    needed_rows: dict[str, float]

    def __getitem__(self, sampler: str) -> Outlook:
        for outlook in self.outlooks:
            if outlook.sampler == sampler:
                return outlook
        raise KeyError(f"no sampler {sampler!r}; there are {', '.join(o.sampler for o in self.outlooks)}")

    def at(self, **changed: float) -> tuple[Outlook, ...]:
        """The outlooks with other numbers: of `eps`, `n`, or `slope` (which is otherwise kept relative to n)."""
        n = changed.get("n", self.n)
        eps = changed.get("eps", self.eps)
        slope = changed.get("slope", self.slope * math.sqrt(self.n / n))
        # A delta of one in so many rows goes by the number of rows.
        rho = accounting.gaussian_rho(eps, min(max(self.delta * self.n / n, 1e-29), 0.5))
        return _outlooks(n, self.d, rho, slope, self.power, self._run)

    @property
    def _run(self) -> "_Run":
        return _Run(self.num_warmup, self.num_samples, self.num_chains, self.num_steps)

    def plot(self) -> "Figure":
        """Two panels: the error against eps, and what a clip bound does to a walk. See `numpyro_dp.plots.plot_plan`."""
        from numpyro_dp.plots import plot_plan

        return plot_plan(self)

    def __str__(self) -> str:
        tempered = "" if self.power == 1 else f", likelihood to the power {self.power:.3g}"
        lines = [
            f"{self.n:,.0f} rows, {self.d} parameters, eps {self.eps:g}, delta {self.delta:.2g}{tempered}; "
            f"{self.num_chains} chain(s) of {self.num_warmup} + {self.num_samples} iterations",
            "",
            f"{'sampler':<24}{'error':>7}{'draws':>9}{'jump':>7}{'noise':>7}{'accepts':>9}  {'':<9} works from",
        ]
        for o in self.outlooks:
            draws = "all" if math.isinf(o.effective_draws) else f"{o.effective_draws:.2g}"
            middle = [_number(x) for x in (o.jump, o.noise, o.acceptance)]
            lines.append(
                f"{o.sampler:<24}{_number(o.error):>7}{draws:>9}{middle[0]:>7}{middle[1]:>7}{middle[2]:>9}  "
                f"{o.verdict:<9} {self._needed(o.sampler)}"
            )
        lines += [
            "",
            "error: of a posterior mean, in posterior standard deviations; draws: effective ones, of all chains;",
            "jump, in posterior standard deviations, and the noise in its log ratio (best between 1 and 2.5).",
            f"A row's clip bound is taken to be {self.slope:.3g} per posterior standard deviation. These are estimates",
            "for a posterior that is about normal: `numpyro_dp.rehearse` runs your model.",
        ]
        return "\n".join(lines)

    def _needed(self, sampler: str) -> str:
        eps, rows = self.needed_eps[sampler], self.needed_rows[sampler]
        found = [f"eps {eps:.2g}"] if eps < math.inf else []
        found += [f"n {float(f'{rows:.2g}'):,.0f}"] if rows < math.inf else []
        return " or ".join(found) or "longer chains"


class _Run:
    """How long a run is."""

    def __init__(self, num_warmup: int, num_samples: int, num_chains: int, num_steps: int):
        self.iterations = (num_warmup + num_samples) * num_chains
        self.kept = num_samples / (num_warmup + num_samples)
        self.num_steps = num_steps


def plan(
    n: float,
    d: int,
    eps: float,
    delta: float | None = None,
    *,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 4,
    num_steps: int = 8,
    clip_ratio: float | None = None,
    posterior_sd: float | None = None,
    power: float = 1.0,
) -> RunPlan:
    """Estimate what each sampler would do on a table of this size, and what would make it work. Needs no table.

        print(numpyro_dp.plan(n=20_000, d=6, eps=1.0))

    Under ``"replace_one"``, for all rows in each iteration, without owners. For a posterior that is about normal; the
    module says by which formulas. A hierarchical model counts with the coordinates in which it meets the data: its
    group effects and coefficients, without their scales. `numpyro_dp.rehearse` runs a model itself.

    :param n: rows (units, if each has many).
    :param d: parameters.
    :param eps, delta: the budget of the run; delta is ``0.1 / n`` by default.
    :param num_warmup, num_samples, num_chains: as in `numpyro_dp.MCMC`.
    :param num_steps: leapfrog steps of ``DPHMC(prepare=False)``.
    :param clip_ratio, posterior_sd: the clip bound of samplers without preparation, per unit of distance in
        unconstrained space, and a public guess of a parameter's posterior standard deviation there. By default the
        bound is twice a typical row's gradient.
    :param power: exponent of the likelihood, as in the kernels.
    :raises ValueError: if a number is out of range, or one of `clip_ratio` and `posterior_sd` is missing.
    """
    whole = {"d": d, "num_samples": num_samples, "num_chains": num_chains, "num_steps": num_steps}
    for name, value in whole.items():
        if not value >= 1 or value != int(value):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    for name, number in {"n": n, "eps": eps, "power": power}.items():
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {number!r}")
    if not num_warmup >= 0 or num_warmup != int(num_warmup):
        raise ValueError(f"num_warmup must be an integer of at least 0, got {num_warmup!r}")
    if (clip_ratio is None) != (posterior_sd is None):
        raise ValueError("give both clip_ratio and posterior_sd, or neither: what a bound does depends on both")
    delta = 0.1 / n if delta is None else delta
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}")
    slope = TYPICAL_CLIP * tight_slope(n, d, power)
    if clip_ratio is not None and posterior_sd is not None:
        if not (clip_ratio > 0 and posterior_sd > 0):
            raise ValueError(f"clip_ratio and posterior_sd must be positive, got {clip_ratio!r} and {posterior_sd!r}")
        slope = power * clip_ratio * posterior_sd
    run = _Run(num_warmup, num_samples, num_chains, num_steps)
    found = _outlooks(n, d, accounting.gaussian_rho(eps, delta), slope, power, run)
    empty = RunPlan(
        n, d, eps, delta, num_warmup, num_samples, num_chains, num_steps, slope, power, found, {}, {}
    )  # to ask what would be with other numbers
    for place, outlook in enumerate(found):
        works = functools.partial(_works_with, empty, place)
        empty.needed_eps[outlook.sampler] = _smallest(functools.partial(works, "eps"), 1e-3, 1e3)
        empty.needed_rows[outlook.sampler] = _smallest(functools.partial(works, "n"), 10.0, 1e12)
    return empty


# -- Estimates ---------------------------------------------------------------------------------------------------------


def tight_slope(num_rows: float, size: int, power: float = 1.0) -> float:
    """A typical row's gradient in posterior standard deviations: no clip bound can be below without clipping many."""
    return math.sqrt(power * size / num_rows)


def curvature_noise(size: int, num_rows: float, rho: float) -> float:
    """Noise in the curvature that a preparation releases, relative to the curvature."""
    return 4 * size / num_rows * math.sqrt(size / (0.11 * rho))


def released_error(size: int, num_rows: float, rho: float) -> float:
    """Error of the posterior's place by the noise in a gradient that is released once, in standard deviations.

    With half of the budget and a clip bound of three times a typical row's gradient: rather too large, since bounds are
    narrower than that.
    """
    return 3 * math.sqrt(2 * size / (0.5 * num_rows * rho))


def walk_draws(slope: float, size: int, rho: float) -> float:
    """How many independent draws a penalty random walk is worth, however many steps share `rho`.

    A step of length s (in posterior standard deviations) takes noise of standard deviation 2 for ``rho = (slope s)^2
    size / 2`` (sensitivity ``2 slope s sqrt(size)``), and s^-2 of them make a draw, about.

    :param slope: clip bound of a row's log ratio per unit of distance.
    """
    return 0.78 * rho / (8 * slope**2 * size)


def penalty_walk(jump: np.ndarray, slope: float, tau: float) -> tuple[np.ndarray, np.ndarray]:
    """Noise in the log ratio of jumps of some lengths, and how many of them are accepted.

    :param tau: noise multiplier.
    """
    noise = 2 * slope * tau * jump
    return noise, 2 * ndtr(-np.hypot(jump, noise) / 2)


def best_walk(size: int, slope: float, tau: float) -> tuple[float, float, float, float]:
    """The jump that gets furthest, its noise and acceptance, and how much of a draw an iteration is then worth."""
    noise, accepted = penalty_walk(_JUMPS, slope, tau)
    worth = _JUMPS**2 * accepted / (4 * size)
    best = int(np.argmax(worth))
    return float(_JUMPS[best]), float(noise[best]), float(accepted[best]), float(min(worth[best], 1.0))


def best_leapfrog(
    size: int, slope: float, tau_ratio: float, tau_grad: float, num_steps: int
) -> tuple[float, float, float, float]:
    """As `best_walk`, for so many leapfrog steps on noisy gradients of a standard normal, simulated."""
    z, p, kicks, accept = _normals(size, num_steps)
    sd = 2 * slope * tau_grad
    best = (0.0, 0.0, 0.0, -1.0)
    for step in _STEPS:
        x, v = z + step / 2 * p, p
        for k in range(num_steps):
            v = v + step * (sd * kicks[k] - x)
            x = x + step * v
        x = x - step / 2 * v
        jump = np.linalg.norm(x - z, axis=1)
        noise = 2 * slope * tau_ratio * jump
        gain = ((z**2).sum(1) - (x**2).sum(1) + (p**2).sum(1) - (v**2).sum(1)) / 2
        accepted = np.exp(np.minimum(0, gain + noise * accept - noise**2 / 2))
        moved = np.mean(accepted * jump**2) / (2 * size)  # one minus the autocorrelation, if that is positive
        worth = moved / (2 - moved) if moved < 1 else 1.0
        if worth > best[3]:
            best = float(jump.mean()), float(noise.mean()), float(accepted.mean()), float(worth)
    return best


def most_draws(size: int, slope: float, tau: float, iterations: int, drifts: bool) -> tuple[float, float]:
    """Effective draws of a chain at best, and how many there would be without noise.

    :param drifts: whether gradients lead the proposals, so that long jumps need not be refused but for the noise.
    """

    def draws(tau: float) -> float:
        noise, accepted = penalty_walk(_JUMPS, slope, tau)
        if drifts:
            accepted = 2 * ndtr(-noise / 2)
        return iterations * float(min(np.max(_JUMPS**2 * accepted) / (4 * size), 1.0))

    return draws(tau), draws(0.0)


@functools.lru_cache(maxsize=4)
def _normals(size: int, num_steps: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    start = rng.standard_normal((2, _TRAJECTORIES, size))
    return *start, rng.standard_normal((num_steps, _TRAJECTORIES, size)), rng.standard_normal(_TRAJECTORIES)


def _outlooks(n: float, d: int, rho: float, slope: float, power: float, run: _Run) -> tuple[Outlook, ...]:
    counted = n / power
    released = released_error(d, counted, rho)
    walk = walk_draws(TYPICAL_CLIP * tight_slope(n, d, power), d, 0.7 * rho)
    if curvature_noise(d, counted, rho) > MAX_CURVATURE_NOISE:  # it would refuse
        released, walk = max(released, 2 * ROUGH_ERROR), 0.0
    tau = accounting.noise_multiplier_for(rho, run.iterations)
    half = accounting.noise_multiplier_for(rho / 2, run.iterations)
    gradients = accounting.noise_multiplier_for(rho / 2, run.iterations * run.num_steps)
    return (
        Outlook("DPHMC", released, math.inf),
        _of_draws("DPPenalty", min(walk, run.iterations * run.kept / (4 * d))),
        _of_chain("DPPenalty(prepare=False)", run, best_walk(d, slope, tau)),
        _of_chain("DPHMC(prepare=False)", run, best_leapfrog(d, slope, half, gradients, run.num_steps)),
    )


def _of_chain(sampler: str, run: _Run, best: tuple[float, float, float, float]) -> Outlook:
    *step, worth = best
    return _of_draws(sampler, run.iterations * run.kept * worth, *step)


def _of_draws(sampler: str, draws: float, *step: float) -> Outlook:
    """
    :param step: jump, noise and acceptance, if there are any.
    """
    return Outlook(sampler, 1 / math.sqrt(draws) if draws > 0 else math.inf, draws, *step)


def _works_with(plan: RunPlan, place: int, name: str, value: float) -> bool:
    return plan.at(**{name: value})[place].verdict == "works"


def _smallest(works: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest number that works, to 3%, between two; infinite if none does."""
    if not works(high):
        return math.inf
    while high / low > 1.03:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return ">99" if value > 99 else f"{value:.2g}"
