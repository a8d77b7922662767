"""Pictures of what a run is expected to do, costs, and finds: all of them of released or public numbers.

As in ArviZ, each function takes Matplotlib axes (``ax``), or makes a figure of its own, and returns the axes:
``plt.show()`` shows it, and ``plt.savefig(path)`` writes it. Matplotlib is imported when a picture is drawn.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # its `stats`, which take long to import, come when they are asked for
from scipy.special import ndtr

from numpyro_dp import statements
from numpyro_dp.chain.worth import FEW_DRAWS, GOOD_ERROR, MANY_DRAWS, ROUGH_ERROR
from numpyro_dp.privacy import accounting
from numpyro_dp.privacy.budget import PrivacyBudget
from numpyro_dp.privacy.ledger import Releases, flat_releases
from numpyro_dp.privacy.mechanisms import BarkerBatch, LogisticBit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from numpyro_dp.report import PrivacyReport
    from numpyro_dp.tools.auditing import AuditResult
    from numpyro_dp.tools.planning import RunPlan
    from numpyro_dp.tools.rehearsal import Rehearsal

# Grey first, then colours that the colour-blind tell apart.
_COLOURS = "#9a9a9a", "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_LARGEST_ERROR = 60.0  # that `plot_plan` has room for
_ENOUGH_TABLES = 10
"""Of fewer simulated tables, intervals that cover all or none say nothing about a level."""


def plot_posteriors(
    results: Mapping[str, Any],
    var_names: Sequence[str] | None = None,
    labels: Mapping[str, str] | None = None,
    title: str | None = None,
    ax: Any = None,
) -> np.ndarray:
    """One panel for each parameter: the posterior density of every result, and under it its mean and 90% interval.

    :param results: from a name for the legend to draws: ``InferenceData`` (ArviZ 0.2x), ``DataTree`` (ArviZ 1.x), or a
        dict from site to array, as `get_samples` returns. The first one is drawn in grey, as the reference.
    :param var_names: sites to draw; default all that the first result has. Of an array-valued site every entry is drawn
        (``name[i]``); of a dict of arrays, the first axis is that of the draws.
    :param labels: what to print above a panel instead of the parameter's name.
    :param title: above a figure of its own.
    :param ax: an array of axes, one for each parameter at least.
    :return: the axes, shape (parameters,).
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

    panels = _axes(ax, len(parameters), 4.5, 2.7, columns=3 if len(parameters) <= 3 else 2)
    for axes, parameter in zip(panels, parameters, strict=True):
        _draw_panel(axes, {name: found[parameter] for name, found in draws.items()})
        axes.set_title((labels or {}).get(parameter, parameter), fontsize=10, loc="left")
    legend = {"frameon": False, "fontsize": 9, "title_fontsize": 8.5, "alignment": "left"}
    legend |= {"title": "Curve: density. Bar: mean and central 90%."}
    if ax is not None:
        panels[0].legend(**legend)
        return panels
    figure = panels[0].figure
    if title:
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, fontweight="bold")
    columns = min(len(results), 4) if len(parameters) > 1 else 1
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=columns, **legend)
    return panels


def plot_audit(result: "AuditResult", ax: "Axes | None" = None) -> "Axes":
    """Errors of the guess in an audit, beside the fewest that the claimed guarantee allows.

    The band is what so many trials tell of each pair of errors, by exact 95% intervals of both (Clopper and Pearson
    1934). A few trials tell little: the curve itself may enter what the claim rules out by chance, its whole band not.

    :param result: from `numpyro_dp.audit`.
    :param ax: where to draw; default a figure of its own.
    """
    _require(result, "scores", "an audit: give what numpyro_dp.audit returns")
    first, second = result.scores
    thresholds = np.unique(np.quantile(np.concatenate(result.scores), np.linspace(0, 1, 500)))
    positives = np.array([len(second), *(np.sum(second > t) for t in thresholds)])
    negatives = np.array([0, *(np.sum(first <= t) for t in thresholds)])
    alpha = np.linspace(0, 1, 500)
    allowed = result.trade_off(alpha)
    (axes,) = _axes(ax, 1, 5, 4.8)
    axes.fill_between(alpha, 0, allowed, color=_COLOURS[0], alpha=0.35, linewidth=0, label="ruled out by the claim")
    axes.plot(alpha, allowed, color=_COLOURS[0], linewidth=1.2)
    axes.plot(alpha, 1 - alpha, color="#444444", linewidth=0.8, linestyle=":", label="guessing blindly")
    low, high = zip(exact_interval(positives, len(second)), exact_interval(negatives, len(first)), strict=True)
    fewest, most = (np.interp(alpha, of[0][::-1], of[1][::-1]) for of in (low, high))
    axes.fill_between(
        alpha, fewest, most, color=_COLOURS[1], alpha=0.2, linewidth=0, label="95% band of so many trials"
    )
    axes.plot(
        positives / len(second), negatives / len(first), color=_COLOURS[1], linewidth=1.8, label="this audit's guess"
    )
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="false positives", ylabel="false negatives", aspect="equal")
    lower = math.floor(1_000 * max(result.eps_lower, 0)) / 1_000  # never more than was found
    title = (
        f"claimed: eps {result.eps:.3g} at delta {result.delta:.2g}\n"
        f"found in {len(first):,} + {len(second):,} trials: at least {lower:.3f} "
        f"(confidence {result.confidence:.5g})"
    )
    return _finish(axes, title, fontsize=9)


def exact_interval(counts: np.ndarray, trials: int, error: float = 0.05) -> tuple[np.ndarray, np.ndarray]:
    """Intervals of a probability, from counts (Clopper and Pearson 1934); each end is wrong with half of `error`."""
    some, fewer = np.maximum(counts, 1), np.maximum(trials - counts, 1)
    low = np.where(counts > 0, scipy.stats.beta.ppf(error / 2, some, trials - some + 1), 0.0)
    high = np.where(counts < trials, scipy.stats.beta.ppf(1 - error / 2, counts + 1, fewer), 1.0)
    return low, high


def plot_plan(plan: "RunPlan", ax: Any = None) -> np.ndarray:
    """What each sampler can be expected to do: its error against eps, and a walk's effective draws by its clip bound.

    :param plan: from `numpyro_dp.plan`.
    :param ax: two axes; default those of a figure of its own.
    :return: the two axes.
    """
    _require(plan, "outlooks", "a plan: give what numpyro_dp.plan returns")
    left, right = panels = _axes(ax, 2, 5, 4.2)
    budgets = plan.eps * np.geomspace(0.1, 20, 25)
    by_budget = [plan.at(eps=eps) for eps in budgets]
    stands = beyond = False
    for place, outlook in enumerate(plan.outlooks):
        errors = np.array([found[place].error for found in by_budget])
        colour = _COLOURS[(place + 1) % len(_COLOURS)]
        left.plot(budgets, errors, color=colour, linewidth=1.8, label=outlook.sampler)
        moves, inside = outlook.effective_draws >= FEW_DRAWS, outlook.error < _LARGEST_ERROR
        face, marker = colour if moves else "white", "o" if inside else "^"
        height = min(outlook.error, 0.8 * _LARGEST_ERROR)
        left.plot([plan.eps], [height], color=colour, marker=marker, markersize=6, markerfacecolor=face)
        stands, beyond = stands or not moves, beyond or not inside
    _mark(
        left.axhspan,
        (1e-9, GOOD_ERROR),
        (ROUGH_ERROR, _LARGEST_ERROR),
        f"good: below {GOOD_ERROR:g}",
        f"hopeless: above {ROUGH_ERROR:g}",
    )
    if stands:
        left.plot([], [], "o", color="#444444", markerfacecolor="white", label=f"hopeless: under {FEW_DRAWS:g} draws")
    if beyond:
        left.plot([], [], "^", color="#444444", markerfacecolor="white", label=f"above {_LARGEST_ERROR:g}")
    left.axvline(plan.eps, color="#444444", linewidth=0.8, linestyle=":")
    smallest = min(outlook.error for found in by_budget for outlook in found)
    left.set(xscale="log", yscale="log", xlabel="eps", xlim=(budgets[0], budgets[-1]))
    left.set_ylim(min(0.01, smallest / 2), _LARGEST_ERROR)
    left.set_ylabel("error of a mean, in posterior sds")
    _finish(left, f"{plan.n:,.0f} rows, {plan.d} parameters: dots at eps {plan.eps:g}", loc="best")

    clips, fewest = np.geomspace(0.5, 20, 25), 0.01
    by_clip = [plan.at(slope=clip * plan.slope) for clip in clips]
    for place, outlook in enumerate(plan.outlooks):
        if outlook.jump is None:
            continue
        draws = [found[place].effective_draws for found in by_clip]
        fewest = min(fewest, *draws)
        right.plot(clips, draws, color=_COLOURS[(place + 1) % len(_COLOURS)], linewidth=1.8, label=outlook.sampler)
    _mark(
        right.axhspan,
        (MANY_DRAWS, 1e9),
        (1e-9, FEW_DRAWS),
        f"good: above {MANY_DRAWS:g}",
        f"hopeless: below {FEW_DRAWS:g}",
    )
    right.axvline(1, color="#444444", linewidth=0.8, linestyle=":")
    right.set(xscale="log", yscale="log", xlim=(clips[0], clips[-1]), ylim=(max(fewest, 1e-6), 1e4))
    right.set(xlabel="clip bound, relative to the planned one", ylabel="effective draws, all chains")
    _finish(right, "Walks only: half the clip bound, four times the draws", loc="best")
    return panels


def plot_rehearsal(found: "Rehearsal", ax: Any = None) -> np.ndarray:
    """Coverage of the intervals at every level, and for each parameter how far private means are from exact ones.

    :param found: from `numpyro_dp.rehearse`.
    :param ax: two axes; default those of a figure of its own.
    :return: the two axes.
    """
    _require(found, "coverage", "a rehearsal: give what numpyro_dp.rehearse returns")
    left, right = panels = _axes(ax, 2, 5, max(4.2, 1.4 + 0.28 * len(found.names)))
    levels, count = np.linspace(0.02, 0.98, 49), len(found.mean)
    allowed = scipy.stats.binom.ppf([[0.025], [0.975]], count, levels) / count
    left.fill_between(levels, *allowed, color=_COLOURS[0], alpha=0.35, linewidth=0, label="95% range, one parameter")
    left.plot([0, 1], [0, 1], color="#444444", linewidth=0.8, linestyle=":")
    covered = np.array([found.coverage(level) for level in levels])
    if np.isfinite(covered).all():
        left.plot(levels, covered, color=_COLOURS[1], linewidth=0.6, alpha=0.5)
        left.plot(levels, covered.mean(1), color=_COLOURS[1], linewidth=2.2, label="mean of all parameters")
        left.plot([], [], color=_COLOURS[1], linewidth=0.6, label="each parameter")
    left.set(xlim=(0, 1), ylim=(0, 1), xlabel="level of the interval", ylabel="share that covers the truth")
    few = "" if count >= _ENOUGH_TABLES else ": too few to judge coverage by"
    _finish(left, f"{count} simulated table(s), eps {found.eps:g}{few}", loc="upper left")

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
    return panels


def plot_privacy(report: "PrivacyReport", ax: "Axes | None" = None) -> "Axes":
    """The guarantee at every eps: the smallest delta of everything that was planned, and of what has been released.

    :param report: `mcmc.privacy`.
    :param ax: where to draw; default a figure of its own.
    :raises ValueError: if the run was not private.
    """
    _require(report, "private", _OF_REPORT)
    if not report.private:
        raise ValueError("a run without noise guarantees nothing: there is no curve to draw")
    (axes,) = _axes(ax, 1, 5.4, 4.2)
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
        xytext=(-8, -8),
        ha="right",
        va="top",
        fontsize=9,
    )
    axes.set(yscale="log", xlabel="eps", ylabel="delta", xlim=(0, grid[-1]))
    axes.set_ylim(max(report.delta * 1e-4, 1e-15), 1)
    return _finish(axes, f"Every point of the curve holds at once ({report.kernel})")


def plot_label(report: "PrivacyReport", ax: "Axes | None" = None) -> "Axes":
    """A label for who reads a published posterior: how much privacy was lost, whose, and what is not covered.

    :param report: `mcmc.privacy`. `mcmc.privacy.label_html()` is the same for a page; this is a picture.
    :param ax: where to draw; default a figure of its own.
    """
    _require(report, "private", _OF_REPORT)
    (headline, *facts) = statements.label(report, version("numpyro_dp"))
    (axes,) = _axes(ax, 1, 6.4, 0.9 + 0.5 * len(facts))
    axes.set(xticks=[], yticks=[], xlim=(0, 1), ylim=(len(facts) + 1.6, 0))
    axes.set_title("Privacy facts", loc="left", fontsize=16, fontweight="bold")
    axes.text(0.02, 0.8, f"{headline[0]}: {headline[1]}", fontsize=13, fontweight="bold", va="center")
    axes.axhline(1.5, color="k", linewidth=3)
    for place, (name, text) in enumerate(facts):
        axes.text(0.02, place + 2, textwrap.fill(name, 19), fontsize=9, fontweight="bold", va="center")
        axes.text(0.31, place + 2, textwrap.fill(text, 50, max_lines=3), fontsize=9, va="center")
        if place:
            axes.axhline(place + 1.5, color="0.75", linewidth=0.6)
    return axes


def plot_budget(of: "PrivacyReport | PrivacyBudget", ax: "Axes | None" = None) -> "Axes":
    """How a budget is used up: by the runs that were charged to it, or by what one run released.

    Of a `PrivacyBudget`: what each run costs alone, and what all cost together, which is less than their sum. Of a run
    that asks the table in each iteration: eps from iteration to iteration, as planned, and how much has been released
    by now; what comes before the first iteration (a preparation) is the height at which the curve begins. Of one that
    asks before the first iteration only, as the default does: the share of rho that each kind of release has.

    :param of: a `PrivacyBudget`, or `mcmc.privacy`.
    :param ax: where to draw; default a figure of its own.
    :raises ValueError: if the run was not private.
    """
    if isinstance(of, PrivacyBudget):
        return _draw_charges(of, ax)
    _require(of, "private", f"a PrivacyBudget, or of {_OF_REPORT}")
    if not of.private:
        raise ValueError("a run without noise has no budget to draw")
    if not any(_is_of_chains(name, kind, of.num_iterations) for name, kind in of.kinds.items()):
        return _draw_shares(of, ax)
    (axes,) = _axes(ax, 1, 5.4, 4.2)
    iterations = np.unique(np.linspace(0, of.num_iterations, 25).astype(int))
    spent = []
    for done in iterations:
        counts = {name: _counts_after(name, kind, int(done), of.num_iterations) for name, kind in of.kinds.items()}
        releases = flat_releases(of.kinds, counts)
        eps = accounting.composed_eps(releases, of.delta, of.neighboring_relation) if releases else 0.0
        spent.append(min(eps, of.eps))
    axes.plot(iterations, spent, color=_COLOURS[1], linewidth=1.8, label="as planned")
    _mark_budget(axes.axhline, of.eps)
    axes.axhline(of.eps_spent, color=_COLOURS[2], linewidth=1.2, linestyle="--", label="released so far")
    axes.set(xlim=(0, of.num_iterations), ylim=(0, 1.15 * of.eps), xlabel="iterations of each chain")
    axes.set_ylabel(f"eps at delta {of.delta:.2g}")
    return _finish(axes, f"{of.kernel}, {of.num_chains} chain(s)", loc="lower right")


def _draw_shares(report: "PrivacyReport", ax: Any) -> "Axes":
    names = list(report.kinds)
    costs = np.array(
        [
            sum(count * (mechanism.rho or 0.0) for mechanism, count in flat_releases({name: kind}))
            for name, kind in report.kinds.items()
        ]
    )
    (axes,) = _axes(ax, 1, 5.4, max(2.4, 1.4 + 0.3 * len(names)))
    shares = 100 * costs / np.sum(costs)
    bars = axes.barh(range(len(names)), shares, color=_COLOURS[1], height=0.6)
    axes.bar_label(bars, fmt="%.2g%%", padding=3, fontsize=8.5)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set(xlim=(0, 1.15 * np.max(shares)), xlabel="share of rho, %")
    title = f"{report.kernel}: what eps {report.eps:g} was spent on, before the first iteration"
    axes.set_title(title, fontsize=10, loc="left")
    return axes


def _draw_charges(budget: PrivacyBudget, ax: Any) -> "Axes":
    charges, spent = budget.charges, budget.eps_spent
    names = [charge.what for charge in charges] + ["all together"]
    (axes,) = _axes(ax, 1, 5.4 + 0.075 * max(map(len, names)), max(2.4, 1.6 + 0.3 * len(charges)))
    values = [charge.eps for charge in charges] + [spent]
    colours = [_COLOURS[1]] * len(charges) + [_COLOURS[2]]
    axes.barh(range(len(names)), values, color=colours, height=0.6)
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    _mark_budget(axes.axvline, budget.eps)
    axes.set_xlim(0, 1.1 * max(budget.eps, *values))
    axes.set_xlabel("eps, each run at its own delta")
    return _finish(axes, f"{budget.path.name}: eps {spent:.3g} of {budget.eps:g} is spent", loc="best")


def _mark_budget(line: Any, eps: float) -> None:
    line(eps, color="#222222", linewidth=1.4, linestyle=":", zorder=5, label=f"budget, eps {eps:g}")


def plot_noise(mcmc: Any, ax: "Axes | None" = None) -> "Axes":
    """Acceptance against the noise in the log ratio, for each iteration after warmup, beside what noise alone allows.

    :param mcmc: a `numpyro_dp.MCMC` that has run with ``extra_fields=("noise_scale",)``.
    :param ax: where to draw; default a figure of its own.
    :raises ValueError: if that field was not collected, or the kernel has no noisy log ratio.
    """
    _require(mcmc, "privacy", "a run: give the numpyro_dp.MCMC")
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
    (axes,) = _axes(ax, 1, 5.4, 4.2)
    largest = max(4.0, float(np.quantile(noise, 0.99)))
    grid = np.linspace(0, largest, 200)
    axes.axvspan(1, 2.5, color=_COLOURS[0], alpha=0.25, linewidth=0, label="good")
    # Of proposals as good as where the chain is (Ceperley and Dewing 1999).
    axes.plot(grid, 2 * ndtr(-grid / 2), color="#444444", linewidth=1.0)
    axes.plot([], [], color="#444444", linewidth=1.0, label="noise alone: nothing else is refused")
    for chain, (scale, taken) in enumerate(zip(noise, accepted, strict=True)):
        edges = np.unique(np.quantile(scale, np.linspace(0, 1, 9)))
        group = np.clip(np.searchsorted(edges, scale, side="right") - 1, 0, max(len(edges) - 2, 0))
        colour = _COLOURS[1 + chain % (len(_COLOURS) - 1)]
        centres = [scale[group == k].mean() for k in np.unique(group)]
        shares = [taken[group == k].mean() for k in np.unique(group)]
        axes.plot(centres, shares, color=colour, marker="o", markersize=5, linewidth=1.0, label=f"chain {chain}")
    axes.set(xlim=(0, largest), ylim=(0, 1), xlabel="sd of the noise in the log ratio", ylabel="share accepted")
    return _finish(axes, "Acceptance under privacy noise")


def _require(given: Any, attribute: str, of: str) -> None:
    """:raises TypeError: if a picture is asked for of another thing."""
    if not hasattr(given, attribute):
        raise TypeError(f"this picture is of {of}, got a {type(given).__name__}")


_OF_REPORT = "a run's report: give mcmc.privacy"
_OF_CHAINS = ("ratio", "grad", "statistics")
"""Kinds of release that chains make, iteration by iteration; preparations make the others before."""


def _is_of_chains(name: str, kind: Releases, num_iterations: int) -> bool:
    """Whether each iteration makes such releases. Statistics may be released once, before the first."""
    return name in _OF_CHAINS and sum(kind.counts) >= num_iterations


def _counts_after(name: str, kind: Releases, done: int, num_iterations: int) -> tuple[int, ...]:
    """How many releases there have been after so many iterations."""
    if not _is_of_chains(name, kind, num_iterations):
        return kind.counts
    if len(kind.mechanisms) > 1:  # one for each iteration
        return tuple(count if k < done else 0 for k, count in enumerate(kind.counts))
    return (round(kind.counts[0] * done / num_iterations),)


def _finish(axes: "Axes", title: str, **legend: Any) -> "Axes":
    axes.set_title(title, fontsize=10, loc="left")
    axes.legend(**{"frameon": False, "fontsize": 8.5, **legend})
    return axes


def _mark(span: Any, good: tuple[float, float], bad: tuple[float, float], *labels: str) -> None:
    for place, colour, label in zip((good, bad), (_COLOURS[3], _COLOURS[2]), labels, strict=True):
        span(*place, color=colour, alpha=0.16, linewidth=0, label=label)


def _axes(given: Any, count: int, width: float, height: float, columns: int | None = None) -> np.ndarray:
    """`count` axes: those that were given, or of a new figure with panels of this size in inches.

    :param columns: of panels, at most; default all in one row.
    """
    if given is not None:
        found = np.ravel(np.asarray(given, object))
        if len(found) < count:
            raise ValueError(f"this picture has {count} panel(s), and `ax` has {len(found)} axes")
        return found[:count]
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'numpyro_dp[plots]'") from error
    columns = min(count, columns or count)
    rows = -(-count // columns)
    size = (columns * width, rows * height)
    _, panels = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in panels.ravel()[count:]:
        axes.set_visible(False)
    return panels.ravel()[:count]


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
    return grid, scipy.stats.gaussian_kde(draws)(grid)
