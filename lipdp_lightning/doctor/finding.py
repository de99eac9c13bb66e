"""Defines one line of the doctor's page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Holds the finding about one subject.

    Attributes:
        text: the observation in a few words.
        hint: the remedy; empty if all is well.
        numbers: the measurements, for the JSON.
    """

    text: str
    hint: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not self.hint


Check = Callable[[], Finding]


def examine(check: Check) -> Finding:
    """Returns what a check finds; an error is a finding, too."""
    try:
        return check()
    except Exception as error:
        words = " ".join(str(error).split()) or "no message"
        problem, _, hint = words.partition("HINT:")
        return Finding(
            f"{type(error).__name__}: {problem.strip()[:300]}",
            hint.strip() or "this part does not work here; lipdp doctor --device cpu tells whether the device is why.",
        )
