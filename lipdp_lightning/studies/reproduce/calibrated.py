"""Trains models whose predictions are scored for calibration, for the entries of paper 003."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lipdp_lightning.studies.reproduce.entry import Row, Rows, Value
from lipdp_lightning.studies.reproduce.summary import mean_and_deviation, number

if TYPE_CHECKING:
    from lipdp_lightning.calibration.scores import Diagram
    from lipdp_lightning.experiment.short_training import Prepared

CURVE = ("curve_steps", "curve_nll", "curve_accuracy", "curve_ece")
SCORES = ("accuracy", "nll", "ece", "mce", "brier", "confidence")


@dataclass(frozen=True)
class Setting:
    """The settings that a method changes: the privacy group, the step size, and the temperature of the loss."""

    privacy: Mapping[str, Any]
    lr: float
    temperature: float = 1.0


def secret_of(cell: Mapping[str, Value]) -> bytes:
    """Returns a secret that follows from the cell, so that it can be repeated; a private run draws its secret."""
    return hashlib.sha256(repr(sorted(cell.items())).encode()).digest()[:16]


def scores_of(prepared: Prepared) -> Any:
    """Returns `calibration.scores.ClassificationScores` of the test rows under the present weights."""
    from lipdp_lightning.calibration.probabilities import log_probabilities
    from lipdp_lightning.calibration.scores import scores_of_sums
    from lipdp_lightning.calibration.sums import binned_sums
    from lipdp_lightning.training.predictions import class_scores, predict_rows

    module, data = prepared.experiment.model, prepared.experiment.datamodule
    outputs, labels, _ = predict_rows(module, data, data.test_dataloader())
    return scores_of_sums(binned_sums(log_probabilities(class_scores(module, outputs)), labels))


def trained(prepared: Prepared, moments: Sequence[int] = ()) -> Row:
    """Trains, and scores the test rows: at the end, and as a curve after the steps of ``moments``."""
    curve: list[tuple[int, Any]] = []
    if moments:
        prepared.experiment.trainer.callbacks.append(_scoring(prepared, set(moments), curve))  # type: ignore[attr-defined]
    found = prepared.run()
    scores = scores_of(prepared)
    row: dict[str, Value] = {name: float(getattr(scores, name)) for name in SCORES}
    row["diagram"] = diagram_text(scores.diagram)
    for name in CURVE if moments else ():
        part = name.removeprefix("curve_")
        row[name] = " ".join(f"{step if part == 'steps' else getattr(s, part):.5g}" for step, s in curve)
    return {**row, **stated(found)}


def stated(found: Any) -> dict[str, Value]:
    """Returns the privacy of a result."""
    return {
        "noise_multiplier": found.plan.noise_multiplier,
        "certified_epsilon": found.epsilon,
        "delta": found.plan.delta,
        "adjacency": found.plan.adjacency,
    }


def _scoring(prepared: Prepared, moments: set[int], curve: list[tuple[int, Any]]) -> Any:
    import lightning

    class Scoring(lightning.Callback):
        """Scores released weights on test rows."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            step = trainer.global_step
            if step in moments and (not curve or curve[-1][0] != step):
                curve.append((step, scores_of(prepared)))

    return Scoring()


def moments_of(steps: int, count: int = 10) -> list[int]:
    """Returns about ``count`` steps, evenly spread, the last among them."""
    return sorted({max(1, round(steps * (i + 1) / count)) for i in range(count)})


# ---- diagrams in a column of text: rows/predicted/observed of every bin


def diagram_text(diagram: Diagram) -> str:
    parts = zip(diagram.rows, diagram.predicted, diagram.observed, strict=True)
    return " ".join(f"{n}/{p or 0:.6g}/{o or 0:.6g}" for n, p, o in parts)


def diagram_of(text: Value) -> list[tuple[int, float, float]]:
    return [(int(n), float(p), float(o)) for n, p, o in (entry.split("/") for entry in str(text).split())]


def numbers_of(text: Value) -> list[float]:
    return [float(part) for part in str(text).split()]


# ---- what the entries say of their rows


def select(rows: Rows, **where: Value) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def mean_of(rows: Rows, column: str) -> float:
    return mean_and_deviation([number(row[column]) for row in rows])[0] if rows else math.nan


def panels(count: int, title: str, height: float = 2.6) -> tuple[Any, list[Any]]:
    """Returns a figure with panels side by side, in the style of the report."""
    from lipdp_lightning.report.figure_style import WIDTH, new_figure

    figure, first = new_figure(title, height=height)
    first.remove()
    figure.set_size_inches(WIDTH * max(1.0, 0.62 * count), height)
    figure.suptitle(title, fontsize=10)
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def draw_reliability(axes: Any, text: Value, title: str) -> None:
    """Draws the observed share against confidence; bars of few rows are pale, and the diagonal is calibration."""
    from lipdp_lightning.report.figure_style import COLOURS

    bins = diagram_of(text)
    width = 1 / len(bins)
    for i, (count, _, observed) in enumerate(bins):
        if count:
            axes.bar((i + 0.5) * width, observed, width * 0.94, color=COLOURS.first, alpha=1.0 if count >= 20 else 0.35)
            axes.plot([(i + 0.03) * width, (i + 0.97) * width], [bins[i][1]] * 2, color=COLOURS.second, linewidth=1.2)
    axes.plot([0, 1], [0, 1], linestyle=":", color=COLOURS.ink, linewidth=0.9)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_title(title, fontsize=8)
    axes.set_xlabel("confidence", fontsize=8)
    axes.tick_params(labelsize=7)


def draw_curves(axes: Any, rows: Rows, column: str, by: str, label: str) -> None:
    """Draws means over the seeds along training, one line per value of ``by``."""
    for name in dict.fromkeys(str(row[by]) for row in rows):
        of_name = [row for row in rows if row[by] == name]
        steps = numbers_of(of_name[0]["curve_steps"])
        curves = [numbers_of(row[column]) for row in of_name]
        means = [math.fsum(values) / len(values) for values in zip(*curves, strict=True)]
        axes.plot(steps, means, linewidth=1.4, label=name)
    axes.set_title(label, fontsize=8)
    axes.set_xlabel("step", fontsize=8)
    axes.tick_params(labelsize=7)
