"""Pages on a phone of 390 px: rows of wide tables become cards, which name their columns themselves."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from page_check import Page
from report_examples import healthy, stopped_early

from lipdp_lightning.report.comparison import ComparedRun, Comparison
from lipdp_lightning.report.render_html import render_html

LONG = "a/class/path/without/a/space/" * 8
SETTINGS = {"model.network": LONG, "privacy.epsilon": 3, "trainer.precision": "32-true"}
WIDTHS = """<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll(".scroll:has(.stacked)")].filter(e => e.scrollWidth > e.clientWidth);
  const shown = [...document.querySelectorAll(".stacked thead")].filter(e => e.offsetHeight > 0);
  document.body.textContent = "found " + JSON.stringify({
    inner: innerWidth, page: document.documentElement.scrollWidth, wide: wide.length, heads: shown.length});
});
</script>"""


def comparison() -> str:
    other = SETTINGS | {"model.network": LONG[::-1], "privacy.epsilon": 8}
    runs = (
        ComparedRun("first", "finished", healthy(), SETTINGS, 60.0),
        ComparedRun("sweep/" + 20 * "second", "crashed", stopped_early(), other, 30.0),
        ComparedRun("by privatize", "finished", None, {"made_private": "three lines"}),
    )
    return Comparison(runs).page()


def test_every_cell_of_a_stacked_table_names_its_column() -> None:
    page = comparison()
    assert Page(page).problems == []
    tables = re.findall(r'<table class="stacked">.*?</table>', page, re.DOTALL)
    assert len(tables) == 3
    for table in tables:
        heads = [unescape(head) for head in re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", table)]
        rows = re.findall(r"<tr><th scope=row.*?</tr>", table)
        assert rows and all(list(map(unescape, re.findall(r'data-head="(.*?)"', row))) == heads for row in rows)


def test_the_tables_of_a_report_that_are_not_folded_are_stacked() -> None:
    page = render_html(healthy())
    kinds = re.findall(r'aria-label="([^"]+)"><table class="([^"]*)"', page)
    assert {"Metrics", "Layers", "Ledger"} <= {label for label, kind in kinds if "stacked" in kind}


def test_the_bet_is_on_what_is_protected() -> None:
    for unit, word in (("example", "record"), ("group", "group")):
        assert f"Best possible bet on one {word}:" in render_html(replace(healthy(), unit=unit))


def test_settings_that_only_some_runs_have_are_counted_and_not_listed() -> None:
    first = ComparedRun("a", "finished", None, SETTINGS)
    content = Comparison((first, ComparedRun("b", "finished", None, {"made_private": "three lines"}))).settings()
    assert content.rows == (
        ("model: number of settings", "1", "not set"), ("privacy: number of settings", "1", "not set"),
        ("trainer: number of settings", "1", "not set"), ("made_private: number of settings", "not set", "1"),
    )  # fmt: skip
    changed = Comparison((first, ComparedRun("b", "finished", None, SETTINGS | {"privacy.epsilon": 8}))).settings()
    assert changed.rows == (("privacy.epsilon", "3", "8"),)


@pytest.mark.slow
@pytest.mark.parametrize("make", [comparison, lambda: render_html(healthy())], ids=["comparison", "report"])
def test_nothing_scrolls_sideways_on_a_phone(make: object, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser is installed")
    assert callable(make)
    page = re.sub(r"<meta http-equiv=\"Content-Security-Policy\".*?>", "", make())
    (tmp_path / "page.html").write_text(page.replace("</body>", WIDTHS + "</body>"))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={tmp_path}/b"]
    words = [browser, *options, "--window-size=390,800", "--dump-dom", f"file://{tmp_path}/page.html"]
    out = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    found = json.loads(unescape(out.split("found ")[1].split("</body>")[0]))
    assert found["inner"] <= 500 and found["page"] <= found["inner"] and found["wide"] == found["heads"] == 0
