"""Pictures of what a run is expected to do, costs, and finds: all of them of released or public numbers.

Each function returns a figure; ``figure.savefig(path)`` writes it. Matplotlib is imported when a picture is drawn.
"""

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom, gaussian_kde

from numpyro_dp.chain.worth import FEW_DRAWS, GOOD_ERROR, MANY_DRAWS, ROUGH_ERROR
from numpyro_dp.privacy import accounting
from numpyro_dp.privacy.ledger import Releases, flat_releases
from numpyro_dp.privacy.mechanisms import BarkerBatch, LogisticBit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from numpyro_dp.report import PrivacyReport
    from numpyro_dp.tools.auditing import AuditResult
    from numpyro_dp.tools.planning import RunPlan
    from numpyro_dp.tools.rehearsal import Rehearsal

_COLOURS = (
    "#9a9a9a",
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
)  # grey first, then colours that the colour-blind tell apart


def plot_posteriors(
    results: Mapping[str, Any],
    var_names: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    title: str | None = None,
) -> "Figure":
    """One panel for each parameter: the posterior density of every result, and under it its mean and 90% interval.

    :param results: from a name for the legend to draws: ``InferenceData`` (ArviZ 0.2x), ``DataTree`` (ArviZ 1.x), or a
        dict from site to array, as `get_samples` returns. The first one is drawn in grey, as the reference.
    :param var_names: sites to draw; default all that the first result has. Of an array-valued site every entry is drawn
        (``name[i]``); of a dict of arrays, the first axis is that of the draws.
    :param labels: what to print above a panel instead of the parameter's name.
    :return: the figure; ``figure.savefig(path)`` writes it.
    """
    if not results:
        raise ValueError("plot_posteriors needs at least one result to draw")
    draws = {name: _scalar_draws(result, var_names) for name, result in results.items()}
    parameters = list(next(iter(draws.values())))
    if not parameters:
        raise ValueError("the first result has no parameter to draw")
    for name, found in draws.items():
        if missing := [parameter for parameter in parameters if parameter not in found]:
            raise ValueError(f"result {name!r} has no draws of {', '.join(missing)}")

    columns = len(parameters) if len(parameters) <= 3 else 2
    rows = -(-len(parameters) // columns)
    legend_lines = 1 if columns > 1 and len(results) <= 4 else len(results)
    header = 0.45 + 0.2 * legend_lines + (0.35 if title else 0)  # inches
    height = header + 2.7 * rows
    figure = _figure(4.5 * columns, height)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, parameter in zip(panels.flat, parameters, strict=False):
        _draw_panel(axes, {name: found[parameter] for name, found in draws.items()})
        axes.set_title((labels or {}).get(parameter, parameter), fontsize=10, loc="left")
    for axes in list(panels.flat)[len(parameters) :]:
        axes.set_visible(False)

    figure.tight_layout(rect=(0.01, 0.0, 0.99, 1 - header / height), h_pad=1.6, w_pad=2.0)
    if title:
        figure.text(0.03, 1 - 0.12 / height, title, ha="left", va="top", fontsize=12, fontweight="bold")
    handles, names = panels.flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        names,
        loc="upper left",
        bbox_to_anchor=(0.02, 1 - (0.36 if title else 0.05) / height),
        ncols=1 if legend_lines > 1 else len(results),
        frameon=False,
        fontsize=9,
        title="Curve: density. Bar: mean and central 90%.",
        title_fontsize=8.5,
        alignment="left",
    )
    return figure


def plot_audit(result: "AuditResult") -> "Figure":
    """Errors of the guess in an audit, beside the fewest that the claimed guarantee allows.

    :param result: from `numpyro_dp.audit`.
    :return: the figure; ``figure.savefig(path)`` writes it.
    """
    first, second = result.scores
    thresholds = np.unique(np.quantile(np.concatenate(result.scores), np.linspace(0, 1, 500)))
    false_positives = np.array([1.0, *(np.mean(second > t) for t in thresholds)])
    false_negatives = np.array([0.0, *(np.mean(first <= t) for t in thresholds)])
    alpha = np.linspace(0, 1, 500)
    allowed = result.trade_off(alpha)
    figure = _figure(5, 4.8, layout="constrained")
    axes = figure.subplots()
    axes.fill_between(alpha, 0, allowed, color=_COLOURS[0], alpha=0.35, linewidth=0, label="ruled out by the claim")
    axes.plot(alpha, allowed, color=_COLOURS[0], linewidth=1.2)
    axes.plot(alpha, 1 - alpha, color="#444444", linewidth=0.8, linestyle=":", label="guessing blindly")
    axes.plot(false_positives, false_negatives, color=_COLOURS[1], linewidth=1.8, label="this audit's guess")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="false positives", ylabel="false negatives", aspect="equal")
    axes.set_title(
        f"claimed: eps {result.eps:.3g} at delta {result.delta:.2g}\n"
        f"found: at least {result.eps_lower:.3g} (confidence {result.confidence:.5g})",
        fontsize=10,
        loc="left",
    )
    axes.legend(frameon=False, fontsize=9)
    return figure


def plot_plan(plan: "RunPlan") -> "Figure":
    """What each sampler can be expected to do: its error against eps, and a walk's effective draws by its clip bound.

    :param plan: from `numpyro_dp.plan`.
    """
    figure = _figure(10, 4.2, layout="constrained")
    left, right = figure.subplots(1, 2)
    budgets = plan.eps * np.geomspace(0.1, 20, 25)
    by_budget = [plan.at(eps=eps) for eps in budgets]
    for place, outlook in enumerate(plan.outlooks):
        errors = np.array([found[place].error for found in by_budget])
        colour = _COLOURS[(place + 1) % len(_COLOURS)]
        left.plot(budgets, np.minimum(errors, 50), color=colour, linewidth=1.8, label=outlook.sampler)
        left.plot([plan.eps], [min(outlook.error, 50)], color=colour, marker="o", markersize=6)
    _mark(left.axhspan, (0, GOOD_ERROR), (ROUGH_ERROR, 60))
    left.axvline(plan.eps, color="#444444", linewidth=0.8, linestyle=":")
    smallest = min(outlook.error for found in by_budget for outlook in found)
    left.set(xscale="log", yscale="log", xlabel="eps", xlim=(budgets[0], budgets[-1]))
    left.set_ylim(min(0.01, smallest / 2), 60)
    left.set_ylabel("error of a mean, in posterior sds")
    left.set_title(f"{plan.n:,.0f} rows, {plan.d} parameters: dots at eps {plan.eps:g}", fontsize=10, loc="left")
    left.legend(frameon=False, fontsize=8.5, loc="upper right")

    clips, fewest = np.geomspace(0.5, 20, 25), 0.01
    by_clip = [plan.at(slope=clip * plan.slope) for clip in clips]
    for place, outlook in enumerate(plan.outlooks):
        if outlook.jump is None:
            continue
        draws = [found[place].effective_draws for found in by_clip]
        fewest = min(fewest, *draws)
        right.plot(clips, draws, color=_COLOURS[(place + 1) % len(_COLOURS)], linewidth=1.8, label=outlook.sampler)
    _mark(right.axhspan, (MANY_DRAWS, 1e9), (1e-9, FEW_DRAWS))
    right.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    right.set(xscale="log", yscale="log", xlim=(clips[0], clips[-1]), ylim=(max(fewest, 1e-6), 1e4))
    right.set(xlabel="clip bound, relative to the planned one", ylabel="effective draws, all chains")
    right.set_title("What a clip bound costs: half of it, four times the draws", fontsize=10, loc="left")
    right.legend(frameon=False, fontsize=8.5, loc="upper right")
    return figure


def plot_rehearsal(found: "Rehearsal") -> "Figure":
    """Coverage of the intervals at every level, and for each parameter how far private means are from exact ones.

    :param found: from `numpyro_dp.rehearse`.
    """
    figure = _figure(10, max(4.2, 1.4 + 0.28 * len(found.names)), layout="constrained")
    left, right = figure.subplots(1, 2)
    levels, count = np.linspace(0.02, 0.98, 49), len(found.mean)
    allowed = binom.ppf([[0.025], [0.975]], count, levels) / count
    left.fill_between(levels, *allowed, color=_COLOURS[0], alpha=0.35, linewidth=0, label="95% range, one parameter")
    left.plot([0, 1], [0, 1], color="#444444", linewidth=0.8, linestyle=":")
    covered = np.array([found.coverage(level) for level in levels])
    if np.isfinite(covered).all():
        left.plot(levels, covered, color=_COLOURS[1], linewidth=0.6, alpha=0.5)
        left.plot(levels, covered.mean(1), color=_COLOURS[1], linewidth=2.2, label="mean of all parameters")
        left.plot([], [], color=_COLOURS[1], linewidth=0.6, label="each parameter")
    left.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the interval", ylabel="share that covers the truth")
    left.set_title(f"{count} simulated tables, eps {found.eps:g}", fontsize=10, loc="left")
    left.legend(frameon=False, fontsize=8.5, loc="upper left")

    exact = np.isfinite(found.error).any()
    values = found.error if exact else (found.mean - found.truth) / found.sd
    places = np.arange(len(found.names))
    right.plot(values.T, places, color=_COLOURS[1], marker="o", markersize=4, linestyle="", alpha=0.6)
    right.axvline(0, color="#444444", linewidth=0.8, linestyle=":")
    right.axvspan(-1, 1, color=_COLOURS[0], alpha=0.2, linewidth=0)
    right.set_yticks(places, found.names, fontsize=8.5)
    right.set_ylim(len(found.names) - 0.5, -0.5)
    widest = 1.1 * max(2.0, float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 2.0)
    right.set_xlim(-widest, widest)
    right.set_xlabel("private mean - exact mean, in exact sds" if exact else "private mean - truth, in private sds")
    right.set_title("One dot for each table", fontsize=10, loc="left")
    return figure


def plot_privacy(report: "PrivacyReport") -> "Figure":
    """The guarantee at every eps: the smallest delta of everything that was planned, and of what has been released.

    :param report: `mcmc.privacy`.
    :raises ValueError: if the run was not private.
    """
    if not report.private:
        raise ValueError("a run without noise guarantees nothing: there is no curve to draw")
    figure = _figure(5.4, 4.2, layout="constrained")
    axes = figure.subplots()
    grid = np.linspace(0, 1.6 * report.eps, 33)
    curves = {"planned: the guarantee": flat_releases(report.kinds)}
    if spent := flat_releases(report.kinds, report.made):
        curves["released so far (bookkeeping)"] = spent
    for place, (label, releases) in enumerate(curves.items()):
        deltas = [accounting.composed_delta(releases, float(eps), report.neighboring_relation) for eps in grid]
        style = "-" if place == 0 else "--"
        axes.plot(grid, deltas, color=_COLOURS[place + 1], linewidth=1.8, linestyle=style, label=label)
    axes.plot([report.eps], [report.delta], color=_COLOURS[1], marker="o", markersize=6)
    axes.annotate(
        f"budget: eps {report.eps:.3g}, delta {report.delta:.2g}",
        (report.eps, report.delta),
        textcoords="offset points",
        xytext=(8, 6),
        fontsize=9,
    )
    axes.set(yscale="log", xlabel="eps", ylabel="delta", xlim=(0, grid[-1]))
    axes.set_ylim(max(report.delta * 1e-4, 1e-15), 1)
    axes.set_title(f"Every point of the curve holds at once ({report.kernel})", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def plot_budget(report: "PrivacyReport") -> "Figure":
    """How the budget is used up from iteration to iteration, as planned, and how much has been by now.

    What is released before the first iteration (a preparation) is the height at which the curve begins.

    :param report: `mcmc.privacy`.
    :raises ValueError: if the run was not private.
    """
    if not report.private:
        raise ValueError("a run without noise has no budget to draw")
    figure = _figure(5.4, 4.2, layout="constrained")
    axes = figure.subplots()
    iterations = np.unique(np.linspace(0, report.num_iterations, 25).astype(int))
    spent = []
    for done in iterations:
        counts = {
            name: _counts_after(name, kind, int(done), report.num_iterations) for name, kind in report.kinds.items()
        }
        releases = flat_releases(report.kinds, counts)
        eps = accounting.composed_eps(releases, report.delta, report.neighboring_relation) if releases else 0.0
        spent.append(min(eps, report.eps))
    axes.plot(iterations, spent, color=_COLOURS[1], linewidth=1.8, label="as planned")
    axes.axhline(report.eps, color="#444444", linewidth=0.8, linestyle=":", label=f"budget, eps {report.eps:g}")
    axes.axhline(report.eps_spent, color=_COLOURS[2], linewidth=1.2, linestyle="--", label="released so far")
    axes.set(xlim=(0, report.num_iterations), ylim=(0, 1.15 * report.eps), xlabel="iterations of each chain")
    axes.set_ylabel(f"eps at delta {report.delta:.2g}")
    axes.set_title(f"{report.kernel}, {report.num_chains} chain(s)", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8.5, loc="lower right")
    return figure


def plot_noise(mcmc: Any) -> "Figure":
    """Acceptance against the noise in the log ratio, for each iteration after warmup, beside what noise alone allows.

    :param mcmc: a `numpyro_dp.MCMC` that has run with ``extra_fields=("noise_scale",)``.
    :raises ValueError: if that field was not collected, or the kernel has no noisy log ratio.
    """
    kinds = [kind for name, kind in mcmc.privacy.kinds.items() if name in ("ratio", "statistics")]
    if not kinds or isinstance(kinds[0].mechanisms[0], LogisticBit | BarkerBatch):
        raise ValueError(
            f"this {mcmc.privacy.kernel} run has no noisy log ratio to draw: that is of DPPenalty, DPExponentialFamily "
            "and DPHMC where they test each proposal"
        )
    fields = mcmc.get_extra_fields(group_by_chain=True)
    if "noise_scale" not in fields or "accepted" not in fields:
        raise ValueError('the run has not kept its noise: give mcmc.run extra_fields=("noise_scale",)')
    noise, accepted = np.asarray(fields["noise_scale"]), np.asarray(fields["accepted"], float)
    figure = _figure(5.4, 4.2, layout="constrained")
    axes = figure.subplots()
    largest = max(4.0, float(np.quantile(noise, 0.99)))
    grid = np.linspace(0, largest, 200)
    axes.axvspan(1, 2.5, color=_COLOURS[0], alpha=0.25, linewidth=0, label="good")
    axes.plot(grid, _noise_alone(grid), color="#444444", linewidth=1.0)
    axes.plot([], [], color="#444444", linewidth=1.0, label="noise alone: nothing else is refused")
    for chain, (scale, taken) in enumerate(zip(noise, accepted, strict=True)):
        edges = np.unique(np.quantile(scale, np.linspace(0, 1, 9)))
        group = np.clip(np.searchsorted(edges, scale, side="right") - 1, 0, max(len(edges) - 2, 0))
        colour = _COLOURS[1 + chain % (len(_COLOURS) - 1)]
        centres = [scale[group == k].mean() for k in np.unique(group)]
        shares = [taken[group == k].mean() for k in np.unique(group)]
        axes.plot(centres, shares, color=colour, marker="o", markersize=5, linewidth=1.0, label=f"chain {chain}")
    axes.set(xlim=(0, largest), ylim=(0, 1), xlabel="sd of the noise in the log ratio", ylabel="share accepted")
    axes.set_title("Acceptance under privacy noise", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def _noise_alone(noise: np.ndarray) -> np.ndarray:
    """Acceptance of proposals as good as where the chain is: ``2 Phi(-noise / 2)`` (Ceperley and Dewing 1999)."""
    return 2 * ndtr(-noise / 2)


_OF_CHAINS = ("ratio", "grad", "statistics")
"""Kinds of release that chains make, iteration by iteration; preparations make the others before."""


def _counts_after(name: str, kind: Releases, done: int, num_iterations: int) -> tuple[int, ...]:
    """How many releases there have been after so many iterations."""
    if name not in _OF_CHAINS:
        return kind.counts
    if len(kind.mechanisms) > 1:  # one for each iteration
        return tuple(count if k < done else 0 for k, count in enumerate(kind.counts))
    return (round(kind.counts[0] * done / num_iterations),)


def _mark(span: Any, good: tuple[float, float], bad: tuple[float, float]) -> None:
    span(*good, color=_COLOURS[3], alpha=0.10, linewidth=0)
    span(*bad, color=_COLOURS[2], alpha=0.10, linewidth=0)


def _figure(width: float, height: float, **options: Any) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'numpyro_dp[plots]'") from error
    figure = Figure(figsize=(width, height), dpi=150, **options)
    figure._repr_png_ = partial(_as_png, figure)  # type: ignore[attr-defined]  # for notebooks without pyplot
    return figure


def _as_png(figure: "Figure") -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=80)
    return data.getvalue()


def _scalar_draws(result: Any, var_names: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Flat draws of every scalar parameter."""
    posterior = getattr(result, "posterior", result)
    in_chains = posterior is not result  # ArviZ keeps the axes (chain, draw)
    names = (posterior.data_vars if in_chains else posterior) if var_names is None else var_names
    found = {}
    for name in names:
        if name not in posterior:
            raise ValueError(f"there are no draws of {name!r}; there are of {', '.join(map(str, posterior))}")
        values = np.asarray(posterior[name])
        values = values.reshape(-1, *values.shape[2 if in_chains else 1 :])
        for index in np.ndindex(values.shape[1:]):
            found[f"{name}[{','.join(map(str, index))}]" if index else str(name)] = values[(slice(None), *index)]
    return found


def _draw_panel(axes: "Axes", draws: Mapping[str, np.ndarray]) -> None:
    top = 0.0
    curves = []
    for draw in draws.values():
        grid, density = _density(draw)
        curves.append((grid, density))
        top = max(top, float(density.max()))
    for place, ((name, draw), (grid, density)) in enumerate(zip(draws.items(), curves, strict=True)):
        colour = _COLOURS[place % len(_COLOURS)]
        if place == 0:
            axes.fill_between(grid, density, color=colour, alpha=0.35, linewidth=0)
        axes.plot(grid, density, color=colour, linewidth=1.8, label=name)
        low, high = np.quantile(draw, [0.05, 0.95])
        height = -top * (0.10 + 0.10 * place)
        axes.plot([low, high], [height, height], color=colour, linewidth=2.5, solid_capstyle="round")
        axes.plot([np.mean(draw)], [height], color=colour, marker="o", markersize=5)
    axes.axhline(0, color="#444444", linewidth=0.6)
    axes.set_ylim(-top * (0.10 + 0.10 * len(draws)), top * 1.08)
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _density(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A density estimate on a grid; draws that are all alike get a narrow peak."""
    spread = float(np.std(draws))
    centre = float(np.mean(draws))
    if spread <= 1e-6 * max(abs(centre), 1e-6):
        width = 1e-3 * max(abs(centre), 1.0)
        grid = centre + width * np.linspace(-1, 1, 5)
        return grid, np.array([0.0, 0.0, 1.0, 0.0, 0.0]) / width
    grid = np.linspace(np.min(draws) - spread, np.max(draws) + spread, 300)
    return grid, gaussian_kde(draws)(grid)
