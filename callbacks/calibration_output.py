"""Sends the results of `CalibrationMetrics` to loggers and files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lipdp_lightning.files import write_bytes_atomically
from lipdp_lightning.report.atomic import write_all_atomically
from lipdp_lightning.report.calibration_summary import class_csv, class_table
from lipdp_lightning.report.figure_style import figure_to_png
from lipdp_lightning.report.model import json_ready
from lipdp_lightning.report.plots_calibration import calibration_figures

FOLDER = "calibration"
MOST_CLASS_SCALARS = 100


def log_classes(loggers: Iterable[Any], result: Mapping[str, Any]) -> None:
    """Logs scalars per class, which the report shows in a table."""
    per_class = result["scores"].get("per_class", ())
    if len(per_class) > MOST_CLASS_SCALARS:
        return
    names = ("nll", "ece", "mce", "brier")
    row = {f"{result['stage']}/class_{k}/{n}": c[n] for k, c in enumerate(per_class) for n in names}
    for logger in loggers if row else []:
        logger.log_metrics(row, step=result["step"])


def show(loggers: Iterable[Any], directory: Path | None, result: Mapping[str, Any]) -> None:
    """Sends images and tables to the loggers that accept them, and writes JSON, CSV and PNG files to a directory."""
    stage, figures = result["stage"], calibration_figures(result)
    columns, rows = class_table(result)
    for logger in loggers:
        if hasattr(logger, "log_image"):
            for name, figure in figures.items():
                logger.log_image(key=f"{FOLDER}/{stage}_{name}", images=[_picture(figure)])
        if hasattr(logger, "log_table"):
            logger.log_table(key=f"{FOLDER}/{stage}", columns=columns, data=rows)
    if directory is None:
        return
    content = json.dumps(json_ready(result, []), indent=1, allow_nan=False) + "\n"
    folder = directory / FOLDER
    write_all_atomically(folder, {f"{stage}.json": content, f"{stage}.csv": class_csv(columns, rows)})
    for name, figure in figures.items():
        write_bytes_atomically(folder / f"{stage}_{name}.png", figure_to_png(figure))


def _picture(figure: Any) -> Any:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3]
