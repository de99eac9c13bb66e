"""Plain-text tables."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_examples import healthy, layer_groups

from lipdp_lightning.report.formats import format_bound, format_number
from lipdp_lightning.report.tables import certificate_table, plan_table, render_table
from lipdp_lightning.report.words import plan_facts


def test_numbers_are_right_aligned_and_text_left() -> None:
    table = render_table(["layer", "count", "Delta"], [["a", 5, 0.123456], ["longer", 123456, 12.0]], title="T")
    assert table.splitlines() == [
        "T",
        "",
        "layer    count   Delta",
        "------  ------  ------",
        "a            5  0.1235",
        "longer  123456      12",
    ]


def test_a_column_with_missing_numbers_stays_a_column_of_numbers() -> None:
    lines = render_table(["x"], [[1.5], [None], [100]]).splitlines()
    assert lines[2:] == ["1.5", "  -", "100"]


@given(
    st.lists(
        st.tuples(st.text(max_size=12), st.floats(), st.integers() | st.none(), st.booleans()), min_size=0, max_size=6
    )
)
def test_columns_start_and_end_where_their_rule_does(rows: list[tuple[object, ...]]) -> None:
    lines = render_table(["name", "value", "count", "flag"], rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert all(character.isprintable() or character == "\u00a0" for line in lines for character in line)
    if all(str(row[0]).isascii() for row in rows):
        columns = [match.span() for match in re.finditer(r"-+", lines[1])]
        for line in lines:
            line = line.ljust(len(lines[1]))
            assert len(line) == len(lines[1])
            for (_, end), (start, _) in pairwise(columns):
                assert line[end:start] == "  "


def test_wide_letters_count_twice() -> None:
    lines = render_table(["n", "v"], [["層", 1], ["ab", 22]]).splitlines()
    assert lines[2:] == ["層   1", "ab  22"]


def test_a_name_cannot_break_the_table_or_command_the_terminal() -> None:
    table = render_table(["name"], [["a\nb\x1b[31m\tc\r"]])
    assert table.splitlines()[-1] == "a b [31m c"


def test_a_row_of_the_wrong_length_is_named() -> None:
    with pytest.raises(ValueError, match="2 cells for 3 headers"):
        render_table(["a", "b", "c"], [[1, 2]])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0042666666, "0.004267"),
        (14062, "14062"),
        (60000.0, "60000"),
        (123456.7, "123457"),
        (1e-5, "1e-05"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (-0.5, "-0.5"),
        (1.25e9, "1.25e+09"),
    ],
)
def test_numbers_have_four_significant_digits(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.floats(min_value=1e-12, max_value=1e12))
def test_a_bound_is_never_printed_smaller_than_it_is(value: float) -> None:
    printed = float(format_bound(value))
    assert printed >= value * (1 - 1e-11)
    assert printed <= value * 1.0011


def test_rounding_to_nearest_would_print_too_small_a_bound() -> None:
    assert float(format_number(2.39149)) < 2.39149 <= float(format_bound(2.39149))
    assert format_bound(3.0000000000000004) == "3"
    assert format_bound(0.0) == "0"


def test_the_plan_table_rounds_epsilon_up_and_names_the_relation() -> None:
    table = plan_table(plan_facts(healthy(epsilon=2.39101, epsilon_upper=2.39101)))
    assert re.search(r"^epsilon \(guarantee\) +2\.392$", table, re.MULTILINE)
    assert re.search(r"^adjacency +add_remove \(one example more or less\)$", table, re.MULTILINE)
    assert len({len(line) for line in table.splitlines()[2:]}) == 1
    assert "NOT PRIVATE" not in table


@pytest.mark.parametrize("change", [{"certified": False}, {"scaling": "batch_max"}])
def test_a_plan_without_a_certificate_shows_no_epsilon(change: dict[str, object]) -> None:
    plan = plan_facts(healthy()) | change
    table = plan_table(plan)
    assert "2.39" not in table and "epsilon" not in table
    assert table.startswith("NOT PRIVATE: certified: false") and table.endswith("NOT PRIVATE: certified: false")
    assert "2.39" in plan_table(plan_facts(healthy()))


def test_unknown_facts_of_a_plan_are_shown_too() -> None:
    assert re.search(r"^max views +4$", plan_table({"delta": 1e-5, "max_views": 4}), re.MULTILINE)


def test_the_certificate_table_has_a_line_per_group_and_the_total() -> None:
    table = certificate_table(layer_groups())
    lines = table.splitlines()
    assert len(lines) == 4 + 6 + 1
    assert re.match(r"total +60618\b", lines[-1])
    assert lines[2].split("  ")[0] == "layer"
    narrow = certificate_table([{"name": "a", "delta": 1.0}])
    assert narrow.splitlines()[2:] == ["layer  Delta", "-----  -----", "a          1"]


def test_tables_of_nothing() -> None:
    assert render_table(["a"], []).splitlines() == ["a", "-"]
    assert certificate_table([]).splitlines()[-1] == "-----"
