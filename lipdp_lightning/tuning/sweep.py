"""Writes the search as a sweep of Weights & Biases, whose agents call ``lipdp fit``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from .space import Choice, Range, Space

_METHODS = {"tpe": "bayes", "botorch": "bayes", "random": "random"}


def sweep_yaml(config: str, overrides: Mapping[str, Any], space: Space, sampler: str, metric: tuple[str, str]) -> str:
    """Returns the input of ``wandb sweep``; the metric is one that ``lipdp fit`` logs."""
    fixed = [
        f"--{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}" for key, value in overrides.items()
    ]
    command: Sequence[str] = ["lipdp", "fit", "--config", config, "--wandb", "online", *fixed, "${args}"]
    content = {
        "method": _METHODS[sampler],
        "metric": {"name": metric[0], "goal": metric[1]},
        "command": list(command),
        "parameters": {key: _parameter(entry) for key, entry in space.items()},
    }
    note = (
        "# wandb sweep sweep.yaml; every run of an agent spends its own epsilon, and no number counts them together.\n"
    )
    return note + str(yaml.safe_dump(content, sort_keys=False))


def _parameter(entry: Range | Choice) -> dict[str, Any]:
    if isinstance(entry, Choice):
        return {"values": list(entry.values)}
    if entry.integer:
        kind = "q_log_uniform_values" if entry.log else "int_uniform"
        return {"distribution": kind, "min": int(entry.low), "max": int(entry.high)}
    kind = "log_uniform_values" if entry.log else "uniform"
    return {"distribution": kind, "min": entry.low, "max": entry.high}
