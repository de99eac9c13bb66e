"""The Markdown report."""

from __future__ import annotations

import json
import re

import pytest
from report_examples import empty, healthy, layer_groups, not_private, stopped_early

from lipdp_lightning.report.model import RunFacts, report_json
from lipdp_lightning.report.render_html import render_html
from lipdp_lightning.report.render_markdown import escape_markdown, render_markdown


def cells(line: str) -> int:
    return len(re.findall(r"(?<!\\)\|", line))


@pytest.mark.parametrize("facts", [healthy(), stopped_early(), not_private(), empty()])
def test_the_rows_of_each_table_have_as_many_cells_as_its_header(facts: RunFacts) -> None:
    blocks = [block.splitlines() for block in render_markdown(facts).split("\n\n") if block.startswith("|")]
    assert blocks
    for block in blocks:
        assert {cells(line) for line in block} == {cells(block[0])}
        assert set(block[1]) <= set("|-: ")


def test_a_pipe_in_a_name_does_not_split_a_cell() -> None:
    text = render_markdown(healthy(groups=[{**layer_groups()[0], "name": "a|b\nc"}]))
    (line,) = [line for line in text.splitlines() if "a\\|b c" in line]
    header = next(line for line in text.splitlines() if line.startswith("| layer"))
    assert cells(line) == cells(header)


@pytest.mark.parametrize("attack", ["<script>alert(1)</script>", "![x](javascript:1)", "`code`", "# head", "**b**"])
def test_strings_of_the_user_are_not_markup(attack: str) -> None:
    text = escape_markdown(attack)
    assert "<" not in text
    assert not re.search(r"(?<!\\)[`\[\]*#]", text)
    assert re.search(r"(?<!\\)[`\[\]*#<]", attack)


def test_names_of_parameters_stay_readable() -> None:
    assert escape_markdown("block_1.conv_a.weight") == "block_1.conv_a.weight"
    assert escape_markdown("__init__") == "\\_\\_init\\_\\_"


def test_a_configuration_cannot_leave_its_block() -> None:
    text = render_markdown(healthy(config="a: 1\n```\n<script>1</script>\n````\n"))
    block = text[text.index("## Configuration") : text.index("## Versions")]
    assert block.count("`````") == 2


def test_the_guarantee_stands_first() -> None:
    head = render_markdown(healthy())[:400]
    assert "certified: true. epsilon = 2.392 at delta = 1e-05" in head
    assert "one example added to or removed from the training data" in head


def test_without_a_certificate_there_is_no_epsilon() -> None:
    text = render_markdown(not_private(ledger=[{"mechanism": "gaussian", "epsilon": 2.39185}]))
    assert "2.39" not in text and "2.37" not in text
    assert "2.39" in render_markdown(healthy())
    lines = [line for line in text.splitlines() if line]
    assert "NOT PRIVATE: certified: false" in " ".join(lines[:4])
    assert lines[-1] == "**NOT PRIVATE: certified: false**"


def test_what_was_not_private_is_always_a_section() -> None:
    assert "mean loss over the training records" in render_markdown(healthy())
    assert "## What was not private\n\nNothing else was released." in render_markdown(empty())


def test_what_was_declared_is_in_every_form_of_the_report() -> None:
    """A line for each fact, also from the JSON report that `lipdp report` starts from; a name is no markup."""
    facts = healthy(data=["CSVTable: binary, 2000 rows declared, N = 1600", "columns: <b># meds</b> in [0, 9]"])
    for shown in (facts, RunFacts.from_dict(json.loads(report_json(facts)))):
        text = render_markdown(shown)
        assert "## What was declared\n\n- CSVTable: binary, 2000 rows declared, N = 1600\n- columns: " in text
        assert "What was declared</h2>" in render_html(shown)
        assert "<b>" not in text and "<b># meds" not in render_html(shown)
    assert "What was declared" not in render_markdown(healthy()) + render_html(healthy())
