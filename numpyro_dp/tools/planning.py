"""Can a run work? Answered before any budget is spent, from public numbers only: n, d, eps and the length of the run.

By the estimates of `numpyro_dp.chain.worth`.
"""

import html
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numpyro_dp.chain.worth import (
    FEW_DRAWS,
    GOOD_ERROR,
    MANY_DRAWS,
    MAX_CURVATURE_NOISE,
    ROUGH_ERROR,
    TYPICAL_CLIP,
    best_leapfrog,
    best_walk,
    curvature_noise,
    released_error,
    tight_slope,
    walk_draws,
)
from numpyro_dp.plots import plot_plan
from numpyro_dp.privacy import accounting


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
        n, d, power = changed.get("n", self.n), self.d, self.power
        slope = changed.get("slope", self.slope * math.sqrt(self.n / n))
        # A delta of one in so many rows goes by the number of rows.
        delta = self.delta if n == self.n else min(max(self.delta * self.n / n, 1e-29), 0.5)
        rho = accounting.gaussian_rho(changed.get("eps", self.eps), delta)
        released = released_error(d, n / power, rho)
        walk = walk_draws(TYPICAL_CLIP * tight_slope(n, d, power), d, 0.7 * rho)
        if curvature_noise(d, n / power, rho) > MAX_CURVATURE_NOISE:  # it would refuse
            released, walk = max(released, 2 * ROUGH_ERROR), 0.0
        kept = self.num_samples * self.num_chains
        iterations = kept + self.num_warmup * self.num_chains
        tau = accounting.noise_multiplier_for(rho, iterations)
        half = accounting.noise_multiplier_for(rho / 2, iterations)
        gradients = accounting.noise_multiplier_for(rho / 2, iterations * self.num_steps)
        *of_walk, walk_worth = best_walk(d, slope, tau)
        *of_leapfrog, leapfrog_worth = best_leapfrog(d, slope, half, gradients, self.num_steps)
        return (
            Outlook("DPHMC", released, math.inf),
            _of_draws("DPPenalty", min(walk, kept / (4 * d))),
            _of_draws("DPPenalty(prepare=False)", kept * walk_worth, *of_walk),
            _of_draws("DPHMC(prepare=False)", kept * leapfrog_worth, *of_leapfrog),
        )

    def plot(self, ax: Any = None) -> np.ndarray:
        """Two panels: the error against eps, and what a clip bound does to a walk. See `numpyro_dp.plots.plot_plan`."""
        return plot_plan(self, ax)

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

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _needed(self, sampler: str) -> str:
        eps, rows = self.needed_eps[sampler], self.needed_rows[sampler]
        found = [f"eps {eps:.2g}"] if eps < math.inf else []
        found += [f"n {float(f'{rows:.2g}'):,.0f}"] if rows < math.inf else []
        return " or ".join(found) or "longer chains"


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
        if not isinstance(number, numbers.Real) or not 0 < number < math.inf:
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
    empty = RunPlan(n, d, eps, delta, num_warmup, num_samples, num_chains, num_steps, slope, power, (), {}, {})
    found = replace(empty, outlooks=empty.at())

    def needed(name: str, place: int, low: float, high: float) -> float:
        return _smallest(lambda value: empty.at(**{name: value})[place].verdict == "works", low, high)

    for place, outlook in enumerate(found.outlooks):
        found.needed_eps[outlook.sampler] = needed("eps", place, 1e-3, 1e3)
        found.needed_rows[outlook.sampler] = needed("n", place, 10.0, 1e12)
    return found


def _of_draws(sampler: str, draws: float, *step: float) -> Outlook:
    """
    :param step: jump, noise and acceptance, if there are any.
    """
    return Outlook(sampler, 1 / math.sqrt(draws) if draws > 0 else math.inf, draws, *step)


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
