"""Prints aligned plain-text tables in the terminal: the plan before training, and the certificate of the layers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lipdp_lightning.bound_text import lower_text
from lipdp_lightning.report.formats import format_bound, format_cell, is_number, plain_value

__all__ = ["certificate_columns", "certificate_table", "norm_caution", "plan_rows", "plan_table", "render_table"]

ABOVE = 1.01  # followed bounds on a norm lie a little above max_norm

GAP = 2
WIDEST = 100_000  # columns; lines are not folded, so that a log can be searched

PLAN_LABELS = {
    "epsilon": "epsilon (guarantee)",
    "epsilon_lower": "epsilon, lower end",
    "epsilon_upper": "epsilon, upper end",
    "epsilon_taken": "epsilon of the steps taken",
    "delta": "delta",
    "adjacency": "adjacency",
    "unit": "unit of privacy",
    "accountant": "accountant",
    "noise_multiplier": "noise multiplier",
    "sample_rate": "sample rate",
    "dataset_size": "data set size",
    "expected_batch_size": "expected batch size",
    "steps": "steps",
    "steps_planned": "steps planned",
    "steps_taken": "steps taken",
    "scaling": "scaling",
    "scaling_reason": "why this scaling",
    "allocation": "noise allocation",
    "projection": "projection",
    "max_norm": "maximum layer norm",
    "loss_clip": "loss gradient clipped to",
    "cotangent_clip": "cotangents clipped to",
    "method": "method",
    "clipping": "clipping function",
    "clip_norm": "example gradients clipped to",
    "switch": "switch during training",
    "secure": "secure noise",
}
ADJACENCY_NOTES = {
    "add_remove": "add_remove (one {unit} more or less)",
    "replace_one": "replace_one (one {unit} exchanged)",
}
# These values must never be printed smaller than they are.
ROUNDED_UP = {"epsilon", "epsilon_upper", "epsilon_taken", "delta"}
NOT_PRIVATE = "NOT PRIVATE: certified: false"

GROUP_COLUMNS = {
    "name": "layer",
    "parameters": "parameters",
    "input_bound": "input bound",
    "lipschitz": "Lipschitz",
    "cotangent_bound": "cotangent bound",
    "delta": "Delta",
    "noise_std": "noise std",
    "weight_norm": "weight norm",
    "max_norm": "max norm",
    "on_boundary": "on boundary",
    "signal_step": "signal / noise",
    "signal_run": "over the run",
}


def _holds_numbers(column: Sequence[Any]) -> bool:
    present = [value for value in column if plain_value(value) is not None]
    return bool(present) and all(is_number(value) for value in present)


def render_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    title: str | None = None,
    right: Sequence[bool] | None = None,
) -> str:
    """Returns an aligned table without a trailing line break.

    Columns of numbers are right-aligned and have four significant digits (integers are written in full); ``right``
    overrides the alignment. Control characters in cells are removed, so the name of a layer or a file cannot break the
    table or send commands to the terminal.
    """
    for row in rows:
        if len(row) != len(headers):
            raise ValueError(f"a row has {len(row)} cells for {len(headers)} headers: {list(row)!r}")
    table = Table(box=None, show_header=False, padding=(0, GAP, 0, 0), pad_edge=False)
    cells = [[format_cell(value) for value in row] for row in (headers, *rows)]
    for index in range(len(headers)):
        is_right = _holds_numbers([row[index] for row in rows]) if right is None else right[index]
        table.add_column(justify="right" if is_right else "left", no_wrap=True)
    rule = ["-" * max(cell_len(row[index]) for row in cells) for index in range(len(headers))]
    for line in (cells[0], rule, *cells[1:]):
        table.add_row(*map(Text, line))
    page = Console(file=io.StringIO(), width=WIDEST, color_system=None, legacy_windows=False)
    with page.capture() as captured:
        page.print(table, no_wrap=True, crop=False)
    lines = [] if title is None else [format_cell(title), ""]
    return "\n".join([*lines, *(line.rstrip() for line in captured.get().splitlines())])


def _is_certified(plan: Mapping[str, Any]) -> bool:
    return plan.get("certified", True) is not False and plan.get("scaling") not in ("batch_max", "none")


def plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns label and value of each known fact of the plan, then of any other; no epsilon without a certificate."""
    keys = [key for key in PLAN_LABELS if key in plan]
    keys += [key for key in plan if key not in PLAN_LABELS and key != "certified"]
    certified = _is_certified(plan)
    rows = []
    for key in keys:
        value = plain_value(plan[key])
        if str(key).startswith("epsilon") and (value is None or not certified):
            continue
        if key in ROUNDED_UP and is_number(value):
            text = format_bound(value)
        elif key == "epsilon_lower" and is_number(value):
            text = lower_text(value)
        elif key == "adjacency" and value in ADJACENCY_NOTES:
            text = ADJACENCY_NOTES[value].format(unit=format_cell(plan.get("unit", "example")))
        else:
            text = "none" if value is None else format_cell(value)
        rows.append((PLAN_LABELS.get(key, str(key).replace("_", " ")), text))
    return rows


def plan_table(plan: Mapping[str, Any], *, title: str = "Privacy plan") -> str:
    """Returns the plan as it is printed before training; epsilon and delta are rounded up."""
    table = render_table(("quantity", "value"), plan_rows(plan), title=title, right=(False, True))
    return table if _is_certified(plan) else f"{NOT_PRIVATE}\n\n{table}\n\n{NOT_PRIVATE}"


def certificate_columns(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns key and header of the columns for which at least one group has a value."""
    return [
        (key, header)
        for key, header in GROUP_COLUMNS.items()
        if key == "name" or any(group.get(key) is not None for group in groups)
    ]


def certificate_table(groups: Sequence[Mapping[str, Any]], *, title: str = "Certificate per layer") -> str:
    """Returns one line per parameter group, and the total number of parameters."""
    columns = certificate_columns(groups)
    rows = [[group.get(key) for key, _ in columns] for group in groups]
    counts = [group.get("parameters") for group in groups]
    if rows and all(is_number(count) for count in counts):
        total = {"name": "total", "parameters": sum(plain_value(count) for count in counts)}
        rows.append([total.get(key) for key, _ in columns])
    return render_table([header for _, header in columns], rows, title=title)


def norm_caution(groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns a caution if layers have a larger norm than ``max_norm`` after the projection; else nothing.

    The projections ``bjorck`` and ``frobenius`` bound the kernel of a convolution as a matrix.
    """
    above = {
        str(group["name"]): group["weight_norm"] / group["max_norm"]
        for group in groups
        if is_number(group.get("weight_norm")) and is_number(group.get("max_norm")) and group["max_norm"] > 0
    }
    above = {name: times for name, times in above.items() if times > ABOVE}
    if not above:
        return ""
    return (
        f"caution: the projection bounds kernels as matrices, and as convolutions {', '.join(above)} have up to "
        f"{max(above.values()):.2g} times the norm max_norm, which multiplies the sensitivities of all layers before "
        "them. HINT: --privacy.projection clip, or kernels that do not overlap."
    )
