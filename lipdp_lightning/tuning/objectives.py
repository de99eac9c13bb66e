"""Defines what a search optimises: metrics of validation rows, never of test rows, and the guarantee."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..experiment.short_training import Result


@dataclass(frozen=True)
class Objective:
    """A number of a result and the better direction; ``metric`` is None for epsilon."""

    name: str
    metric: str | None
    direction: str

    def value(self, result: Result) -> float:
        if self.metric is None:
            if not math.isfinite(result.epsilon):
                raise ValueError("nothing is guaranteed, so that epsilon is infinite")
            return result.epsilon
        if self.metric not in result.metrics:
            raise ValueError(f"{self.metric} was not measured; there is {', '.join(result.metrics) or 'no metric'}")
        value = result.metrics[self.metric]
        if not math.isfinite(value):
            raise ValueError(f"{self.metric} is {value}")
        return value


OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective("accuracy", "validation/accuracy", "maximize"),
        Objective("mae", "validation/mae", "minimize"),
        Objective("loss", "validation/loss", "minimize"),
        Objective("epsilon", None, "minimize"),
    )
}


def read_objectives(text: str, task: str) -> tuple[Objective, ...]:
    """Returns ``accuracy,epsilon`` as objectives; one ValueError lists all problems."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    problems = [f"{name!r} is not one of {', '.join(OBJECTIVES)}" for name in names if name not in OBJECTIVES]
    wrong = "accuracy" if task == "regression" else "mae"
    if wrong in names:
        problems.append(f"{wrong} is not measured on a {task}")
    if not names or len(set(names)) < len(names):
        problems.append("it names no objective, or one twice")
    if names == ["epsilon"]:
        problems.append("epsilon alone is least where nothing is learnt")
    if problems:
        hint = "mae,epsilon" if task == "regression" else "accuracy,epsilon"
        raise ValueError(f"--objective {text}: {'; '.join(problems)}. HINT: {hint}")
    return tuple(OBJECTIVES[name] for name in names)
