"""The figures as a picture: for each model the cost of each way to recover, by the fraction lost, and the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from scar_figures import Figures
from scar_trials import LOST, METHODS, Run

LABELS = {
    "full": "full recovery",
    "partial": "partial",
    "partial_priority": "partial + priority, r = 1/8",
    "round_robin": "partial + round robin, r = 1/8",
    "random": "partial + random, r = 1/8",
}
COLOURS = {
    "full": "#4d4d4d",
    "partial": "#4878a8",
    "partial_priority": "#d1495b",
    "round_robin": "#edae49",
    "random": "#9bb8a5",
}


def plot(
    path: Path, found: Mapping[str, Figures], titles: Mapping[str, str], compared: Sequence[str], runs: Sequence[Run]
) -> None:
    """Draw bars with 95% intervals for the compared models, and for these runs each cost against its bound."""
    figure, axes = plt.subplots(1, len(compared) + 1, figsize=(3.5 * (len(compared) + 1), 4.2), layout="constrained")
    width = 0.8 / len(METHODS)
    for axis, model in zip(axes, compared, strict=False):
        for number, method in enumerate(METHODS):
            each = [found[model].costs[lost][method] for lost in LOST]
            at = [group + (number - (len(METHODS) - 1) / 2) * width for group in range(len(LOST))]
            errors = [[one.value - one.low for one in each], [one.high - one.value for one in each]]
            values = [one.value for one in each]
            axis.bar(at, values, width, color=COLOURS[method], label=LABELS[method], zorder=2)
            axis.errorbar(at, values, errors, fmt="none", ecolor="black", elinewidth=1, capsize=2, zorder=3)
        axis.set_title(titles[model], fontsize=11)
        axis.set_xticks(range(len(LOST)), list(LOST))
        axis.set_xlabel("fraction of blocks lost")
        axis.axhline(0, color="black", linewidth=0.8)
        axis.grid(axis="y", color="#dddddd", zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("iteration cost (mean, 95% interval)")
    _against_bound(axes[-1], runs)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _against_bound(axis: plt.Axes, runs: Sequence[Run]) -> None:
    most = 1.0
    for method in METHODS:
        pairs = [
            (one.bound, one.distance_cost)
            for run in runs
            for lost in LOST
            for one in run.outcomes[lost][method]
            if one.bound is not None and one.distance_cost is not None
        ]
        if pairs:
            bounds, costs = zip(*pairs, strict=True)
            axis.scatter(bounds, costs, s=9, alpha=0.5, color=COLOURS[method], linewidths=0, zorder=2)
            most = max(most, *bounds, *costs)
    axis.plot([0, most], [0, most], color="black", linewidth=1, zorder=3)
    axis.annotate("cost = bound", (0.55 * most, 0.6 * most), rotation=35, ha="right", fontsize=9)
    axis.set_title("MLR, full batch: against the bound", fontsize=11)
    axis.set_xlabel("the theorem's bound, iterations")
    axis.set_ylabel("measured cost, iterations")
    axis.grid(color="#dddddd", zorder=0)
    axis.spines[["top", "right"]].set_visible(False)
