"""Draws figures of released curves, in the style of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lipdp_lightning.bound_text import upper_text
from lipdp_lightning.curves.bands import Band
from lipdp_lightning.curves.ecdf import PrivateECDF
from lipdp_lightning.curves.hosmer_lemeshow import PrivateHosmerLemeshow
from lipdp_lightning.curves.reliability import PrivateReliability
from lipdp_lightning.curves.roc import PrivateROC
from lipdp_lightning.report.figure_style import COLOURS, label_axes, legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _cost(epsilon: float, delta: float) -> str:
    return f"ε = {upper_text(epsilon)}" + (f", δ = {upper_text(delta)}" if delta else "")


def plot_ecdf(raw: PrivateECDF, smoothed: PrivateECDF, band: Band | None = None) -> Figure:
    design = raw.mechanism
    figure, axes = new_figure(f"Private distribution function ({_cost(design.epsilon, design.delta)})")
    points = raw.grid.points
    if band is not None:
        label = f"{100 * band.confidence:g} % band, noise" + (" and sampling" if band.includes_sampling else "")
        axes.fill_between(points, band.lower, band.upper, color=COLOURS.soft, alpha=0.6, linewidth=0, label=label)
    axes.plot(points, raw.fractions, color=COLOURS.second, linewidth=0.7, label="released")
    axes.plot(points, smoothed.fractions, color=COLOURS.first, linewidth=1.6, label="smoothed")
    axes.set_ylim(-0.05, 1.05)
    label_axes(axes, "value", "share of records")
    legend(axes)
    return figure


def plot_roc(raw: PrivateROC, interval: tuple[float, float] | None = None) -> Figure:
    design, curve = raw.mechanism, raw.smoothed()
    figure, axes = new_figure(f"Private ROC curve ({_cost(design.epsilon, design.delta)})", height=4.2)
    area = f"area {raw.auc():.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")
    axes.plot(raw.false_positive_rate, raw.true_positive_rate, color=COLOURS.second, linewidth=0.7, label="released")
    axes.plot(
        curve.false_positive_rate,
        curve.true_positive_rate,
        color=COLOURS.first,
        linewidth=1.6,
        label=f"smoothed, {area}",
    )
    _diagonal(axes)
    label_axes(axes, "false positive rate", "true positive rate")
    legend(axes, columns=1)
    return figure


def plot_reliability(diagram: PrivateReliability) -> Figure:
    figure, axes = new_figure(f"Private reliability diagram ({_cost(diagram.release.epsilon, 0)})", height=4.2)
    low, high = diagram.observed_interval()
    observed = diagram.observed
    errors = np.maximum([observed - low, high - observed], 0.0)
    axes.errorbar(
        diagram.predicted, observed, yerr=errors, fmt="o", markersize=4, color=COLOURS.first, ecolor=COLOURS.soft,
        label="bins, with 95 % of the noise",
    )  # fmt: skip
    _diagonal(axes)
    label_axes(axes, "mean predicted probability", "share of positives")
    legend(axes, columns=1)
    return figure


def plot_hosmer_lemeshow(test: PrivateHosmerLemeshow) -> Figure:
    epsilon = sum(release.epsilon for release in test.releases)
    title = f"Private Hosmer-Lemeshow groups ({_cost(epsilon, sum(r.delta for r in test.releases))})"
    figure, axes = new_figure(title)
    place = np.arange(test.sums.shape[1]) + 1
    axes.bar(place - 0.2, test.sums[0], width=0.4, color=COLOURS.soft, label="predicted positives")
    axes.bar(place + 0.2, test.sums[2], width=0.4, color=COLOURS.first, label="observed positives")
    axes.set_xticks(place)
    label_axes(axes, "group, from low to high predictions", "records, noisy")
    legend(axes)
    return figure


def _diagonal(axes: Axes) -> None:
    axes.plot([0, 1], [0, 1], color=COLOURS.muted, linewidth=0.8, linestyle=":")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")
