"""Names from configurations, columns and files reach no terminal and no page as anything but visible text."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable

import pytest
from report_examples import healthy

from lipdp_lightning.report.formats import NO_BREAK_SPACES
from lipdp_lightning.report.model import RunFacts, report_json
from lipdp_lightning.report.render_html import render_html
from lipdp_lightning.report.render_markdown import render_markdown
from lipdp_lightning.report.show import show
from lipdp_lightning.report.tables import certificate_table, plan_table, render_table

# a title of the window, a cleared screen, colours, a turned direction, a byte that is no text
ODD = "\x1b]0;t\x07\x1b[2J\u202e\r\x9b31m\x00<script>alert(1)</script>\"'\udcff"


def hostile() -> RunFacts:
    """Every place of a report that holds a name or a text."""
    facts = healthy()
    return dataclasses.replace(
        facts, config=f"a: {ODD}\nb: 2\n", title=ODD, notes=[ODD], metrics={ODD: 0.5, f"validation/{ODD}": 0.2},
        versions={ODD: ODD}, history=[{"step": 1, ODD: 2.0}], unit=ODD, scaling=ODD, accountant=ODD,
        groups=[{**facts.groups[0], "name": ODD}], ledger=[{"mechanism": ODD, ODD: ODD}], nonprivate_released=[ODD],
    )  # fmt: skip


def invisible(text: str) -> list[str]:
    return sorted({hex(ord(c)) for c in text if not c.isprintable() and c not in f"\n{NO_BREAK_SPACES}"})


@pytest.mark.parametrize("render", [render_html, render_markdown])
def test_a_report_holds_visible_text_alone(render: Callable[[RunFacts], str]) -> None:
    page = render(hostile())
    assert invisible(page) == [] and page.encode("utf-8")
    own = 1 if render is render_html else 0
    assert page.partition("```yaml")[0].count("<script") == own, "in a fence of Markdown it is text"


def test_the_machine_readable_report_is_plain() -> None:
    text = report_json(hostile())
    assert invisible(text) == [] and RunFacts.from_dict(json.loads(text)).title == ODD


def test_tables_of_the_terminal_hold_visible_text_alone() -> None:
    rows = [plan_table({"unit": ODD, ODD: ODD, "delta": 1e-5}), render_table((ODD,), [(ODD,), (None,)], title=ODD)]
    rows.append(certificate_table([{**healthy().groups[0], "name": ODD}], title=ODD))
    for text in rows:
        assert invisible(text) == []


def test_show_keeps_lines_and_nothing_else() -> None:
    stream = io.StringIO()
    show(f"one\n{ODD}\ntwo\u00a0three\n", stream)
    assert invisible(stream.getvalue()) == [] and stream.getvalue().count("\n") == 3
    assert stream.getvalue().endswith("two\u00a0three\n")
