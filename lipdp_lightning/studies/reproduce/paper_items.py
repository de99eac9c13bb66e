"""Reads `papers.yaml`: what the papers have, and what reproduces it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

STATES = ("run", "stand-in", "not run")
TITLES = {
    "000": "DP-SGD with weight clipping",
    "001": "DP-SGD without clipping: the Lipschitz neural network way",
    "002": "Finding private bugs: debugging implementations of DP-SGD",
    "003": "On the convergence and calibration of deep learning with differential privacy",
    "004": "Barczewski's thesis",
}


@dataclass(frozen=True)
class PaperItem:
    """A figure, table, algorithm or numbered statement of a paper.

    Args:
        paper: the paper's number.
        name: its kind and number, as in "figure 5.3.1".
        title: what it shows.
        state: one of `STATES`.
        by: names of entries of `lipdp reproduce`, and tests as "path::function".
        reason: what differs from the paper, or why nothing is run; empty for "run".
    """

    paper: str
    name: str
    title: str
    state: str
    by: Sequence[str]
    reason: str

    def problems(self, entries: Collection[str]) -> list[str]:
        """Returns what is inconsistent: an unknown state or entry, a missing reason, something run by nothing."""
        label = f"{self.paper} {self.name}"
        found = [] if self.state in STATES else [f"{label}: state {self.state!r} is not one of {', '.join(STATES)}"]
        if self.state == "not run" and self.by:
            found.append(f"{label}: is not run, and is run by {', '.join(self.by)}")
        if self.state in ("run", "stand-in") and not self.by:
            found.append(f"{label}: is run by nothing")
        if (self.state != "run") != bool(self.reason):
            found.append(f"{label}: a reason belongs to what is not run as the paper says, and to nothing else")
        return found + [f"{label}: no entry {name}" for name in self.by if "::" not in name and name not in entries]

    def line(self) -> str:
        """Returns the item's line of the list."""
        what = ", ".join(name.rpartition("::")[2] for name in self.by)
        return ". ".join(part for part in (what, self.reason) if part)


def paper_items() -> list[PaperItem]:
    """Returns all items of the five papers, in the order of the file."""
    import yaml

    text = files("lipdp_lightning.studies.reproduce").joinpath("papers.yaml").read_text("utf-8")
    papers: dict[str, dict[str, dict[str, object]]] = yaml.safe_load(text)
    return [_item(paper, name, given) for paper, items in papers.items() for name, given in items.items()]


def _item(paper: str, name: str, given: Mapping[str, object]) -> PaperItem:
    by, reason = _names(given.get("by")), str(given.get("reason", ""))
    return PaperItem(paper, name, str(given["title"]), str(given["state"]), by, reason)


def _names(given: object) -> tuple[str, ...]:
    return tuple(str(name) for name in given) if isinstance(given, list) else ()


def listing(items: Sequence[PaperItem]) -> list[str]:
    """Returns the lines of a list by paper, each paper headed by how many of its items are in each state."""
    lines: list[str] = []
    for paper in dict.fromkeys(item.paper for item in items):
        own = [item for item in items if item.paper == paper]
        counts = ", ".join(f"{sum(item.state == state for item in own)} {state}" for state in STATES)
        lines += ["", f"{paper}, {TITLES[paper]}: {counts}"]
        lines += [f"  {i.name:<18}{i.state:<9} {i.title}: {i.line()}" for i in own]
    return lines
