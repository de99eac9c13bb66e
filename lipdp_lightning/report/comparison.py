"""Compares several runs: what each amount of privacy bought, which settings differ, and what the runs cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lipdp_lightning.extras import is_installed
from lipdp_lightning.report.contents import Table, make_table
from lipdp_lightning.report.drawn import Drawn
from lipdp_lightning.report.figure_style import COLOURS, empty_figure, label_axes, new_figure, note, shorten
from lipdp_lightning.report.formats import clean_text, finite, format_bound
from lipdp_lightning.report.majority import Majority
from lipdp_lightning.report.model import RunFacts
from lipdp_lightning.report.pages import render_page
from lipdp_lightning.report.render_markdown import CONFIG_NOTE
from lipdp_lightning.report.words import find_primary_metric, format_metric, is_fraction, metric_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ComparedRun", "Comparison"]

NAMED_POINTS = 12  # with more runs, names would cover each other; the page names points under the pointer
ABSENT = "not set"


@dataclass(frozen=True)
class ComparedRun:
    """A run by name, with its report if there is one, its settings by dotted key, and its hours of training."""

    name: str
    state: str
    facts: RunFacts | None
    settings: Mapping[str, Any]
    seconds: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Several runs, in the order in which they are shown, and the kind of metric that most of them report."""

    runs: tuple[ComparedRun, ...]

    @cached_property
    def metric(self) -> str | None:
        """The kind of metric that is compared, such as `accuracy`, whatever a run calls it."""
        names = [find_primary_metric(run.facts) for run in self.runs if run.facts is not None]
        kinds = Counter(_kind(name) for name in names if name is not None)
        return kinds.most_common(1)[0][0] if kinds else None

    def name(self, run: ComparedRun) -> str | None:
        """Returns what a run calls the metric, or None if it has none."""
        if run.facts is None:
            return None
        names = (find_primary_metric(run.facts), *run.facts.metrics)
        return next((name for name in names if name in run.facts.metrics and _kind(name) == self.metric), None)

    def value(self, run: ComparedRun) -> float | None:
        """Returns the metric of a run, or None if it has none."""
        name = self.name(run)
        return None if run.facts is None or name is None else finite(run.facts.metrics[name])

    def results(self) -> Table:
        """Returns one line per run: number, state, metric and what belongs beside it, and the guarantee."""
        name = "metric" if self.metric is None else self.metric
        heads = ("", "run", "state", name, "majority", "balanced", "AUROC", "epsilon", "delta", "relation")
        rows = []
        for number, run in enumerate(self.runs, 1):
            facts, value = run.facts, self.value(run)
            majority = None if facts is None else Majority.of(facts.metrics, self.name(run))
            shares = [majority.rate, majority.balanced_accuracy] if majority else [None, None]
            certified = facts is not None and facts.certified
            rows.append((
                str(number), run.name, run.state, None if value is None else format_metric(name, value),
                *("-" if share is None else f"{100 * share:.3g} %" for share in shares),
                None if majority is None or majority.auroc is None else f"{majority.auroc:.3f}",
                _epsilon(facts), format_bound(facts.delta) if certified and facts is not None else None,
                f"{facts.adjacency}, {facts.unit}" if certified and facts is not None else None,
            ))  # fmt: skip
        table = make_table(heads, rows)
        return Table(table.headers, table.rows, (True, False, False, *[True] * 6, False))

    def settings(self) -> Table:
        """Returns the settings in which the runs differ: one line per key, one column per run."""
        lines = [(key, [run.settings.get(key, ABSENT) for run in self.runs]) for key in self._comparable()]
        rows = [(key, *values) for key, values in lines if any(_differs(value, values[0]) for value in values)]
        groups = Counter(_group(key) for key in self._all_settings())
        for group in groups:
            counts = [sum(_group(key) == group for key in run.settings) for run in self.runs]
            if not all(counts):
                rows.append((f"{group}: number of settings", *(count or ABSENT for count in counts)))
        table = make_table(("setting", *(str(number) for number in range(1, len(self.runs) + 1))), rows)
        return Table(table.headers, table.rows, (False,) * len(table.headers))

    def _all_settings(self) -> list[str]:
        return list(dict.fromkeys(key for run in self.runs for key in run.settings))

    def _comparable(self) -> list[str]:
        """Returns the settings of groups that every run has; a run by `privatize` has none of a configuration's."""
        groups = [{_group(key) for key in run.settings} for run in self.runs]
        return [key for key in self._all_settings() if all(_group(key) in group for group in groups)]

    def costs(self) -> Table:
        """Returns what each run took: steps, examples, parameters and hours."""
        heads = ("", "run", "steps", "planned", "examples per step", "parameters", "hours of training")
        rows = []
        for number, run in enumerate(self.runs, 1):
            facts = run.facts
            hours = None if not run.seconds else run.seconds / 3600
            counts = [None] * 4 if facts is None else [
                facts.steps_taken, facts.steps_planned, facts.expected_batch_size,
                sum(int(group.get("parameters") or 0) for group in facts.groups) or None,
            ]  # fmt: skip
            rows.append((str(number), run.name, *counts, hours))
        table = make_table(heads, rows)
        return Table(table.headers, table.rows, (True, False, *[True] * 5))

    def cautions(self) -> list[str]:
        """Returns what a reader must know before comparing the numbers."""
        facts = [run.facts for run in self.runs if run.facts is not None and run.facts.certified]
        found = []
        if len({(each.adjacency, each.unit, each.delta) for each in facts}) > 1:
            found.append("The runs have different relations, units or deltas: their epsilons must not be compared.")
        elif len(facts) > 1:
            epsilon, delta = (math.fsum(getattr(each, name) or 0.0 for each in facts) for name in ("epsilon", "delta"))
            found.append(
                f"Each epsilon is that of one run by itself. Who sees all {len(facts)} certified models of the same "
                f"records faces up to epsilon = {format_bound(epsilon)} at delta = {format_bound(delta)} (basic "
                "composition), and choosing among the runs by held-out rows is not covered by any of them."
            )
        names = sorted({name for run in self.runs if (name := self.name(run)) is not None})
        if len(names) > 1:
            found.append(
                f"What is compared as {self.metric} is called {', '.join(map(clean_text, names))}: the runs may have "
                "computed it on different held-out rows."
            )
        for run in self.runs:
            majority = None if run.facts is None else Majority.of(run.facts.metrics, self.name(run))
            if majority is not None and not majority.is_beaten:
                found.append(f"{clean_text(run.name)}: {majority.caution()}")
            if run.facts is not None and run.facts.secret_fixed:
                found.append(f"{clean_text(run.name)}: its secret was fixed by the user; it is not private.")
        return found

    def plot(self) -> Figure:
        """Plots the metric of every certified run against its epsilon."""
        label = "metric" if self.metric is None else shorten(self.metric, 32)
        title = f"{label} against epsilon"
        shown = [
            (run.name, run.facts.epsilon, value)
            for run in self.runs
            if run.facts is not None and run.facts.certified and run.facts.epsilon is not None
            for value in [self.value(run)]
            if value is not None
        ]
        if not shown:
            return empty_figure(title, "no certified run has a metric")
        figure, axes = new_figure(title, height=3.6)
        for name, epsilon, value in shown:
            axes.plot([epsilon], [value], "o", color=COLOURS.first, markersize=7, alpha=0.85, label=shorten(name, 40))
            if len(shown) <= NAMED_POINTS:
                note(axes, epsilon, value, shorten(name, 18), offset=(7, 5), fontsize=8)
        if is_fraction(str(self.metric), [value for *_, value in shown]):
            axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
        axes.margins(x=0.18, y=0.18)
        axes.set_xlim(left=0)
        label_axes(axes, "epsilon", label)
        return figure

    def page(self) -> str:
        """Returns the comparison as one HTML page that loads nothing."""
        alt = f"Points: {self.metric or 'no metric'} of each certified run against its epsilon, as in the table."
        caption = "Further up is more accurate, further left is more private."
        return render_page(
            "compare.html",
            count=len(self.runs),
            cautions=self.cautions(),
            plot=Drawn.of(self.plot(), "comparison", alt, caption, "wide") if is_installed("matplotlib") else None,
            results=self.results(),
            settings=self.settings(),
            config_note=CONFIG_NOTE,
            costs=self.costs(),
        )


def _epsilon(facts: RunFacts | None) -> str | None:
    if facts is None:
        return None
    return format_bound(facts.epsilon) if facts.certified else "not private"


def _kind(name: str) -> str:
    """Returns a metric's name in words, without that of the held-out rows."""
    words = metric_label(name).split()
    return " ".join(word for word in words if word not in ("validation", "test")) or name


def _group(key: str) -> str:
    """Returns the first part of a dotted key, such as `trainer`."""
    return key.partition(".")[0]


def _differs(one: Any, other: Any) -> bool:
    """Returns whether two settings differ; 1 and True, which Python holds equal, do."""
    return type(one) is not type(other) or one != other
