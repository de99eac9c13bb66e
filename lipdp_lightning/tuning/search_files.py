"""Writes the results of a search: tables, the Pareto front as a plot and as configurations, and the total cost."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..bound_text import upper_text
from ..experiment.short_training import merged
from ..extras import is_installed
from ..report.atomic import write_all_atomically, write_atomically
from .cost import Cost
from .objectives import Objective
from .plot import front_figure, write_figure
from .search import Search, error_of, front
from .sweep import sweep_yaml


def write_outputs(
    out: Path, search: Search, cost: Cost, title: str, validation: str, overrides: Mapping[str, Any], sampler: str
) -> list[Any]:
    """Writes all files, each complete or not at all, and returns the trials of the front."""
    best = front(search.study, search.objectives)
    names = list(search.space)
    page = _page(title, search, best, cost, validation)
    write_all_atomically(
        out,
        {
            "trials.csv": _csv(search.finished, search.objectives, names),
            "pareto.csv": _csv(best, search.objectives, names),
            "pareto.md": page,
            "sweep.yaml": sweep_yaml(title, overrides, search.space, sampler, _sweep_metric(search.objectives)),
        },
    )
    folder = out / "pareto"
    folder.mkdir(exist_ok=True)
    current = {f"trial-{trial.number}.yaml": trial for trial in best}
    for old in folder.glob("trial-*.yaml"):
        if old.name not in current:
            old.unlink()
    for name, trial in current.items():
        head = f"# Trial {trial.number} of a search. Training it again spends its epsilon again.\n"
        write_atomically(folder / name, head + yaml.safe_dump(merged(search.config, trial.params), sort_keys=False))
    if is_installed("matplotlib"):
        write_figure(out, "pareto", front_figure(search.complete, best, search.objectives))
    return best


def _sweep_metric(objectives: Sequence[Objective]) -> tuple[str, str]:
    measured = next(o for o in objectives if o.metric is not None)
    return str(measured.metric), measured.direction


def _csv(trials: Sequence[Any], objectives: Sequence[Objective], names: Sequence[str]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["trial", "state", *(o.name for o in objectives), *names, "error"])
    for trial in trials:
        values = list(trial.values) if trial.values else [""] * len(objectives)
        params = [trial.params.get(name, "") for name in names]
        writer.writerow([trial.number, trial.state.name.lower(), *values, *params, error_of(trial)])
    return stream.getvalue()


def _page(title: str, search: Search, best: Sequence[Any], cost: Cost, validation: str) -> str:
    finished, complete = search.finished, search.complete
    lines = [
        f"# Search over {title}",
        "",
        f"{len(complete)} trials finished, {len(finished) - len(complete)} failed. Searched: "
        + ", ".join(f"`{name}`" for name in search.space) + ".",
        "",
        "![The trials, and those that no other beats](pareto.png)",
        "",
        "## Trials that no other beats",
        "",
        *_markdown(best, search.objectives, list(search.space)),
        "",
        "The configuration of each is in `pareto/`.",
        "",
        "## What this search cost",
        "",
        *(f"* {sentence}" for sentence in cost_sentences(cost, validation)),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def cost_sentences(cost: Cost, validation: str) -> list[str]:
    """Returns what may be claimed about a search, and what may not."""
    if not math.isfinite(cost.composed):
        alone = "Some trials have no guarantee, so that the results of this search may reveal any record."
    else:
        alone = (
            f"An epsilon in the table is the guarantee of that trial alone, at delta {upper_text(cost.delta)}. It "
            "holds for the model of a trial that was chosen without looking at private rows."
        )
    together = (
        f"All {cost.trials} trials together, failed ones with all their planned steps: "
        f"{_at(cost.composed, cost.delta)} by Renyi composition, {_at(cost.summed, cost.summed_delta)} as plain sums."
    )
    chosen = {
        "private": "The scores are those of private validation rows, without noise. Choosing the best trial, this "
        "table and the plot are releases that no number here covers, the composition included.",
        "test": "The scores are those of the published test rows, so the best score is too good as an estimate for "
        "new data. If these rows are public, the composition above covers the choice.",
        "published": "The scores are those of published validation rows. If they are public, the composition above "
        "covers the choice of the best trial and this page.",
    }[validation]
    selection = "`lipdp tune --private-selection` releases one model with a guarantee that covers the choice."
    return [alone, together, chosen, selection]


def _at(epsilon: float, delta: float) -> str:
    if not math.isfinite(epsilon):
        return "no finite epsilon"
    return f"epsilon {upper_text(epsilon)} at delta {upper_text(delta)}"


def _markdown(trials: Sequence[Any], objectives: Sequence[Objective], names: Sequence[str]) -> list[str]:
    heads = ["trial", *(o.name for o in objectives), *names]
    rows = [heads, ["---:"] * len(heads)]
    for trial in trials:
        values = [_value(o, v) for o, v in zip(objectives, trial.values, strict=True)]
        rows.append([str(trial.number), *values, *(_cell(trial.params.get(name)) for name in names)])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _value(objective: Objective, value: float) -> str:
    return upper_text(value) if objective.metric is None else f"{value:.4f}"


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")
