"""Pictures of posteriors, private ones beside others. Matplotlib is imported when a picture is drawn."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import gaussian_kde

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from numpyro_dp.auditing import AuditResult

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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'numpyro_dp[plots]'") from error
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
    figure = Figure(figsize=(4.5 * columns, height), dpi=150)
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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'numpyro_dp[plots]'") from error
    first, second = result.scores
    thresholds = np.unique(np.quantile(np.concatenate(result.scores), np.linspace(0, 1, 500)))
    false_positives = np.array([1.0, *(np.mean(second > t) for t in thresholds)])
    false_negatives = np.array([0.0, *(np.mean(first <= t) for t in thresholds)])
    alpha = np.linspace(0, 1, 500)
    allowed = result.trade_off(alpha)
    figure = Figure(figsize=(5, 4.8), dpi=150, layout="constrained")
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
