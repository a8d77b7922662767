"""Run a private analysis on simulated tables, as often as one likes, before any budget is spent.

Parameters are drawn from the prior (or given), outcomes from the model, and the kernel runs on them as it would on the
real table. Because the truth is known, two things can be seen that a private run cannot show: how often its intervals
cover the truth, and how far it is from the posterior without privacy. Intervals are calibrated, over draws from the
prior, if the posterior's rank of the truth is uniform (Talts et al. 2018, simulation-based calibration).
"""

import html
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC as ExactMCMC
from numpyro.infer import NUTS
from tqdm.auto import tqdm

from numpyro_dp.kernels.base import DPKernel
from numpyro_dp.mcmc import MCMC
from numpyro_dp.model.arguments import as_arguments
from numpyro_dp.plots import plot_rehearsal

_RECORDED = ("truth", "mean", "sd", "rank", "exact_mean", "exact_sd")


@dataclass(frozen=True)
class Rehearsal:
    """What `rehearse` has found; ``print`` it, or draw it with `plot`. All of it is about simulated tables.

    :ivar names: of the parameters, scalar by scalar.
    :ivar truth: shape (repetitions, parameters); NaN where outcomes were not simulated.
    :ivar mean, sd: of the private posterior, of the same shape.
    :ivar rank: share of the private draws that are below the truth, of the same shape.
    :ivar exact_mean, exact_sd: of the posterior without privacy; NaN where there was no comparison.
    :ivar messages: warnings of the private runs, with how many of them gave each.
    :ivar flagged: how many posteriors released numbers did not vouch for (`PrivacyReport.posterior`).
    """

    kernel: str
    eps: float
    num_rows: int | None
    names: tuple[str, ...]
    truth: np.ndarray
    mean: np.ndarray
    sd: np.ndarray
    rank: np.ndarray
    exact_mean: np.ndarray
    exact_sd: np.ndarray
    messages: Mapping[str, int] = field(default_factory=dict)
    flagged: int = 0

    @property
    def error(self) -> np.ndarray:
        """Private posterior mean minus exact one, in exact posterior standard deviations."""
        return (self.mean - self.exact_mean) / self.exact_sd

    @property
    def sd_ratio(self) -> np.ndarray:
        """Private posterior standard deviation over the exact one."""
        return self.sd / self.exact_sd

    def coverage(self, level: float = 0.9) -> np.ndarray:
        """How often the central interval of each parameter covers the truth, shape (parameters,)."""
        covered = np.abs(self.rank - 0.5) <= level / 2
        return np.where(np.isnan(self.rank).any(0), np.nan, covered.mean(0))

    def plot(self, ax: Any = None) -> np.ndarray:
        """Two panels: coverage at every level, the error of each parameter. See `numpyro_dp.plots.plot_rehearsal`."""
        return plot_rehearsal(self, ax)

    def __str__(self) -> str:
        size = "" if self.num_rows is None else f", n = {self.num_rows:,}"
        lines = [
            f"Rehearsal of {self.kernel} at eps {self.eps:g}{size}: {len(self.mean)} simulated table(s)",
            "",
            f"{'parameter':<24}{'covered, 50%':>14}{'90%':>7}{'error':>9}{'sd ratio':>10}",
        ]
        inner, outer = self.coverage(0.5), self.coverage(0.9)
        for k, name in enumerate(self.names):
            lines.append(
                f"{name:<24}{_percent(inner[k]):>14}{_percent(outer[k]):>7}{_typical(self.error[:, k]):>9}"
                f"{_typical(self.sd_ratio[:, k]):>10}"
            )
        lines.append(
            f"{'all':<24}{_percent(inner.mean()):>14}{_percent(outer.mean()):>7}{_typical(self.error):>9}"
            f"{_typical(self.sd_ratio):>10}"
        )
        spread = 0.3 / np.sqrt(len(self.mean))  # of a share of 90%
        lines += [
            "",
            "covered: how often intervals of that level hold the true value"
            + (f" (90% may be off by {2 * spread:.0%} by chance);" if np.isfinite(outer).all() else ";"),
            "error: distance of private from exact posterior means, in standard deviations (root mean square).",
        ]
        lines.append(f"{self.flagged} of {len(self.mean)} posteriors are not vouched for by released numbers.")
        lines += [f"{count} of {len(self.mean)} runs warned: {text}" for text, count in self.messages.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def rehearse(
    make: Callable[[], DPKernel],
    table: tuple | Mapping[str, Any],
    *,
    repetitions: int = 10,
    num_warmup: int = 500,
    num_samples: int = 1000,
    num_chains: int = 1,
    simulate: bool = True,
    truth: Mapping[str, Any] | None = None,
    outcomes: Mapping[str, str] | None = None,
    compare: bool = True,
    rng_key: jax.Array | None = None,
    progress_bar: bool = True,
) -> Rehearsal:
    """Run the kernel on simulated tables that have the shape of `table`, beside NUTS without privacy.

        found = rehearse(lambda: DPHMC(model, eps=1.0), (X_like_yours, None))
        print(found)
        found.plot()

    **Not private**: everything that is in `table` may show in the result. Give covariates that are public or made up,
    never the real ones.

    :param make: makes the kernel, anew for each table: ``lambda: DPHMC(model, eps=1.0)``.
    :param table: the model's arguments, a tuple or a dict of keywords: covariates as the real ones may look, and for
        the outcomes, which are simulated, None or an array.
    :param repetitions: how many tables.
    :param num_warmup, num_samples, num_chains: of each run, as you would run it.
    :param simulate: False takes `table` as it is: a public table that is like yours. Then nothing is known of coverage.
    :param truth: values of parameters by site, for all tables; others are drawn from the prior.
    :param outcomes: from an argument's name to the observed site whose values it holds, where that is not clear: names
        or values are not the same.
    :param compare: whether NUTS runs without privacy on the same tables, which takes longer than the private runs.
    :param rng_key: of the simulation and the chains; privacy noise is drawn as in a real run.
    :raises ValueError: if it is not clear which arguments are outcomes, or the kernel would charge a `budget`.
    :raises PrivacyBudgetError: if the kernel refuses a table of this size.
    """
    if not callable(make):
        raise TypeError(
            f"rehearse needs a function that makes kernels, one for each table: rehearse(lambda: "
            f"{type(make).__name__}(...), ...), got a {type(make).__name__}"
        )
    if repetitions < 1:
        raise ValueError(f"repetitions must be at least 1, got {repetitions}")
    if truth is not None and not simulate:
        raise ValueError("`truth` is for simulated outcomes: leave it out, or simulate=False")
    args, kwargs = as_arguments(table)
    key = random.key(0) if rng_key is None else rng_key
    run: dict[str, Any] = {"num_warmup": num_warmup, "num_samples": num_samples, "num_chains": num_chains}
    run |= {"progress_bar": False, "chain_method": "vectorized"}
    records: list[dict[str, Any]] = []
    messages: dict[str, int] = {}
    earlier: list[DPKernel] = []
    flagged = 0
    for k in tqdm(range(repetitions), desc="rehearsing", disable=not progress_bar):
        kernel = make()
        _check_kernel(kernel, earlier, compare)
        earlier.append(kernel)
        simulate_key, private_key, exact_key = random.split(random.fold_in(key, k), 3)
        values: dict[str, jax.Array] = {}
        if simulate:
            given, named, values = _simulated(kernel, simulate_key, args, kwargs, truth or {}, outcomes)
        else:
            given, named = args, kwargs
        private = MCMC(kernel, **run)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            private.run(private_key, *given, **named)
        for text in {str(w.message) for w in caught if issubclass(w.category, UserWarning)}:
            messages[text] = messages.get(text, 0) + 1
        flagged += not private.privacy.posterior.trusted
        exact: dict[str, jax.Array] = {}
        if compare:
            without_privacy = ExactMCMC(NUTS(kernel.settings.model), **run)
            without_privacy.run(exact_key, *given, **named)
            exact = without_privacy.get_samples()
        records.append(_record(private, exact, values))
    report = private.privacy
    names = tuple(records[0]["mean"])
    columns = {what: np.array([[record[what][name] for name in names] for record in records]) for what in _RECORDED}
    return Rehearsal(report.kernel, report.eps, report.num_rows, names, **columns, messages=messages, flagged=flagged)


def _check_kernel(kernel: Any, earlier: list[DPKernel], compare: bool) -> None:
    if not isinstance(kernel, DPKernel):
        raise TypeError(f"`make` must return a private kernel such as DPHMC, got {type(kernel).__name__}")
    if kernel.ledger.budget is not None:
        raise ValueError("a rehearsal spends no budget: leave `budget` out of the kernel that `make` returns")
    if kernel.ledger.reproducible:
        raise ValueError("with `noise_seed` all repetitions would have the same noise: leave it out of a rehearsal")
    if compare and kernel.settings.is_tempered:
        raise ValueError(
            "the kernel is tempered (`power`, `n0`), and NUTS, which it is compared with, is not: compare=False"
        )
    if any(kernel is other for other in earlier):
        raise ValueError("`make` must make a new kernel each time: a kernel has one budget, for one table")


# -- Simulation --------------------------------------------------------------------------------------------------------


def _simulated(
    kernel: DPKernel, key: jax.Array, args: tuple, kwargs: dict, truth: Mapping[str, Any], outcomes: Mapping | None
) -> tuple[tuple, dict, dict[str, jax.Array]]:
    """The arguments with outcomes drawn from the model, and the values of all sites."""
    fixed = _fixed_parameters(kernel.settings.model, args, kwargs)
    given = {name: jnp.asarray(value) for name, value in truth.items()}
    model = handlers.condition(kernel.model, fixed | given)
    try:
        trace = handlers.trace(handlers.seed(model, key)).get_trace(*args, **kwargs)
    except NotImplementedError as error:
        raise ValueError(
            "a site of this model cannot be drawn from (an improper prior?): give its value by `truth`, or use a "
            "public table with simulate=False"
        ) from error
    if unknown := sorted(set(truth) - set(trace)):
        raise ValueError(f"`truth` has {', '.join(unknown)}, which the model has no site of: it has {', '.join(trace)}")
    values = {name: site["value"] for name, site in trace.items() if site["type"] in ("sample", "deterministic")}
    signature = inspect.signature(kernel.settings.model)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()):
        raise ValueError(
            "a rehearsal needs the names of the model's arguments: write them in the place of *args, **kwargs"
        )
    bound = signature.bind(*args, **kwargs)
    sites = _outcome_sites(kernel.settings.model, bound, trace) if outcomes is None else dict(outcomes)
    for argument, site in sites.items():
        if argument not in bound.signature.parameters or site not in values:
            raise ValueError(f"outcomes={{{argument!r}: {site!r}}}: the model has no such argument, or no such site")
        placeholder, drawn = bound.arguments.get(argument), np.asarray(values[site])
        as_given = placeholder is not None
        bound.arguments[argument] = _as_given(argument, drawn, np.asarray(placeholder).dtype) if as_given else drawn
    return bound.args, bound.kwargs, values


def _observed(model: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Observed sites of the model as it is, factors apart."""
    trace = handlers.trace(handlers.seed(model, random.key(0))).get_trace(*args, **kwargs)
    of_samples = ((name, site) for name, site in trace.items() if site["type"] == "sample")
    return {n: s for n, s in of_samples if s["is_observed"] and not s["infer"].get("is_auxiliary")}


def _fixed_parameters(model: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Observed sites that hold no argument's values: nothing of the arguments is as long."""
    lengths = {np.shape(leaf)[0] for leaf in jax.tree.leaves((args, kwargs)) if np.ndim(leaf)}
    values = {name: site["value"] for name, site in _observed(model, args, kwargs).items()}
    return {name: value for name, value in values.items() if not np.ndim(value) or np.shape(value)[0] not in lengths}


def _as_given(argument: str, drawn: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Outcomes that were drawn, in the place of those that were given.

    :raises ValueError: if they are others in that dtype.
    """
    found = drawn.astype(dtype)
    if dtype.kind != "f" and not np.array_equal(found, drawn):
        raise ValueError(
            f"{argument!r} was given as {dtype}, and the model draws outcomes that are none of that: pass an array of "
            "floats in its place, or None where the model takes that"
        )
    return found


def _outcome_sites(model: Callable, bound: inspect.BoundArguments, trace: Mapping) -> dict[str, str]:
    """From argument to the observed site whose values it holds: the one of its name, or with these values."""
    bound.apply_defaults()
    arguments, fixed = bound.arguments, _fixed_parameters(model, bound.args, bound.kwargs)
    observed = handlers.trace(handlers.seed(model, random.key(0))).get_trace(*bound.args, **bound.kwargs)
    found = {}
    for name, site in observed.items():
        if site["type"] != "sample" or site["infer"].get("is_auxiliary"):
            continue
        if name in arguments and (site["is_observed"] or arguments[name] is None):
            found[name] = name
        elif site["is_observed"] and name not in fixed:
            same = [argument for argument, value in arguments.items() if _equal(value, site["value"])]
            if len(same) != 1:
                raise ValueError(
                    f"it is not clear which argument of the model holds the values of site '{name}': say so by "
                    f"outcomes={{'argument': '{name}'}}, or pass None where the model takes that, with an argument and "
                    "a site of the same name"
                )
            found[same[0]] = name
    if not found:
        missing = [repr(argument) for argument, value in arguments.items() if value is None]
        raise ValueError(
            f"it is not clear which outcomes to simulate: {', '.join(missing) or 'no argument'} given as None and not "
            f"the name of a site. Say so by outcomes={{'argument': 'site'}}; sites are {', '.join(trace)}"
        )
    return found


def _equal(one: Any, other: Any) -> bool:
    if one is None or np.shape(one) != np.shape(other):
        return False
    return one is other or bool(np.array_equal(np.asarray(one), np.asarray(other)))


# -- One table ---------------------------------------------------------------------------------------------------------


def _record(private: MCMC, exact: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """For each scalar parameter, what there is to know."""
    record: dict[str, dict[str, float]] = {what: {} for what in _RECORDED}
    for site, draws in private.get_samples().items():
        draws = np.asarray(draws, float)
        others = np.asarray(exact[site], float) if site in exact else np.full_like(draws, np.nan)
        true = np.asarray(values[site], float) if site in values else np.full(draws.shape[1:], np.nan)
        if true.shape != draws.shape[1:]:
            continue
        for index in np.ndindex(draws.shape[1:]):
            name = f"{site}[{','.join(map(str, index))}]" if index else site
            column, other = draws[(slice(None), *index)], others[(slice(None), *index)]
            record["truth"][name] = float(true[index])
            record["mean"][name], record["sd"][name] = float(column.mean()), float(column.std())
            record["rank"][name] = float(np.mean(column < true[index])) if np.isfinite(true[index]) else np.nan
            record["exact_mean"][name], record["exact_sd"][name] = float(other.mean()), float(other.std())
    return record


def _percent(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.0%}"


def _typical(values: np.ndarray) -> str:
    """Root mean square."""
    return "-" if np.isnan(values).all() else f"{np.sqrt(np.nanmean(values**2)):.2f}"
