"""Renders the calibration of a model, as measured by `callbacks.CalibrationMetrics`, as tables and words."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from lipdp_lightning.report.contents import Table, make_table
from lipdp_lightning.report.words import SOURCES

__all__ = ["HELD_OUT", "calibration_words", "class_csv", "class_table", "result_table"]

HELD_OUT = SOURCES["validation"]
_SCORES = ("nll", "ece", "mce", "brier")


def class_table(result: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Returns columns and rows: all classes together and each by itself, or nominal and empirical coverage by level."""
    scores, source = result["scores"], result["computed_on"]
    if result["task"] == "regression":
        columns = ["level", "coverage", "half width", "computed on"]
        parts = zip(scores["levels"], scores["coverage"], scores["half_widths"], strict=True)
        return columns, [[level, share, width, source] for level, share, width in parts]
    columns = ["class", "rows", "NLL", "ECE", "MCE", "Brier score", "computed on"]
    rows = [["all", scores["rows"], *(scores[name] for name in _SCORES), source]]
    for index, each in enumerate(scores["per_class"]):
        rows.append([str(index), each["rows"], *(each[name] for name in _SCORES), source])
    return columns, rows


def class_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return stream.getvalue()


def result_table(result: Mapping[str, Any]) -> Table:
    """Returns :func:`class_table` for a report, whose heading names the rows it was measured on."""
    columns, rows = class_table(result)
    return make_table(columns[:-1], [row[:-1] for row in rows])


def calibration_words(result: Mapping[str, Any], certified: bool = True) -> str:
    """Returns the sentences under the heading: on which rows, of which model, and at which temperature."""
    scores = result["scores"]
    text = f"Measured exactly on {scores['rows']} {result['stage']} rows"
    text += f": {result['computed_on']}." if certified else "."
    if result["task"] == "regression":
        return (
            f"{text} Central intervals around the predictions. Residual model: {scores['residual_model']}. "
            f"Mean difference of nominal and empirical coverage: {_percent(scores['mean_error'])}."
        )
    text += (
        f" Confidence {_percent(scores['confidence'])} on average, accuracy {_percent(scores['accuracy'])}; the mean "
        f"ECE of the classes, each against the rest, is {_percent(scores['classwise_ece'])}."
    )
    before = result.get("without_temperature")
    if before is not None:
        text += (
            f" Class scores are divided by the temperature {result['temperature']:.4g}; without it ECE is "
            f"{_percent(before['ece'])} and NLL {_number(before['nll'])}."
        )
    if scores["undefined"]:
        text += f" {scores['undefined']} rows have no finite output, so that no score is defined."
    return text


def _percent(value: float | None) -> str:
    return "undefined" if value is None or value != value else f"{100 * value:.3g}\u00a0%"


def _number(value: float | None) -> str:
    return "undefined" if value is None or value != value else f"{value:.4g}"
