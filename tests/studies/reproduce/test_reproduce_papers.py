"""The catalogue of the papers' items is complete, consistent, and names what exists."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from lipdp_lightning.cli import main
from lipdp_lightning.studies.reproduce.catalogue import catalogue
from lipdp_lightning.studies.reproduce.paper_items import PaperItem, listing, paper_items

ROOT = Path(__file__).parents[3]


# The captions and numbered statements of the papers' texts, written down once by reading them.
CONTENTS = {
    "000": {"figure": "1 2 3 4 5", "table": "1 2 3 4 5", "algorithm": "1 2 3", "theorem": "7 8 9", "lemma": "4"},
    "001": {"figure": "1 2 3 4 5", "algorithm": "1 2", "theorem": "1"},
    "002": {"figure": "1 2 3 4 5 6 7 8", "algorithm": "1", "theorem": "1"},
    "003": {
        "figure": "1 2 3 4 5 6 7 8 9 10 11 12", "table": "1 2", "algorithm": "1 2", "theorem": "1 2 3", "fact": "4.1",
        "lemma": "5.2",
    },
    "004": {
        "figure": "2.4.1 3.1.1 3.1.2 3.1.3 3.1.4 5.2.1 5.3.1 5.3.2 5.3.3 6.5.1 6.5.2 6.5.3 6.6.1 6.6.2 6.6.3 6.6.4 "
        "6.6.5 6.6.6 6.6.7",
        "table": "5.1 5.2 5.3 5.4 6.1", "algorithm": "1 2 3 4 5 6 7 8 9 10",
        "theorem": "2.8.1 3.1.1 3.1.2 3.1.3 3.1.4 3.1.5 3.1.6 3.1.7 3.1.8 3.1.9 3.2.1 3.2.2 3.2.3 3.2.4 5.2.1 5.2.2 "
        "5.2.3 6.3.1 6.3.2 6.5.1",
        "lemma": "6.3.1",
    },
}  # fmt: skip
COUNTS = {"000": 17, "001": 8, "002": 10, "003": 21, "004": 55}


def missing_tests(items: list[PaperItem]) -> list[str]:
    found = []
    for name in (name for item in items for name in item.by if "::" in name):
        path, _, function = name.partition("::")
        if not (ROOT / path).is_file() or not re.search(rf"^def {function}\(", (ROOT / path).read_text(), re.M):
            found.append(name)
    return found


@pytest.mark.parametrize("paper", CONTENTS)
def test_every_item_of_a_paper_is_in_the_catalogue(paper: str) -> None:
    names = [item.name for item in paper_items() if item.paper == paper]
    assert sorted(names) == sorted(f"{kind} {n}" for kind, text in CONTENTS[paper].items() for n in text.split())
    assert len(names) == COUNTS[paper]


def test_what_runs_an_item_exists_and_what_differs_has_its_reason() -> None:
    items, entries = paper_items(), catalogue()
    assert [problem for item in items for problem in item.problems(entries)] == []
    assert missing_tests(items) == []
    named = {name for item in items for name in item.by}
    ours = {name for name in entries if name.startswith("results")}  # of this repository, and of no paper
    assert set(entries) - named == ours, "an entry reproduces nothing of the papers"


def test_broken_items_are_found() -> None:
    entries, item = catalogue(), next(item for item in paper_items() if item.state == "run" and item.paper == "000")
    for broken, text in (
        (replace(item, by=()), "by nothing"), (replace(item, by=("nonsense",)), "no entry"),
        (replace(item, state="done"), "is not one of"), (replace(item, state="stand-in"), "reason"),
        (replace(item, reason="because"), "reason"), (replace(item, state="not run", reason="so"), "is run by"),
    ):  # fmt: skip
        assert any(text in problem for problem in broken.problems(entries)), text
    assert missing_tests([replace(item, by=("tests/test_docs.py::test_of_nothing",))])


def test_the_command_prints_every_item_with_its_state(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    shown = capsys.readouterr().out
    for item in paper_items():
        assert f"  {item.name:<18}{item.state:<9} {item.title}: {item.line()}\n" in shown
    states = Counter(item.state for item in paper_items() if item.paper == "004")
    assert f"004, Barczewski's thesis: {states['run']} run, {states['stand-in']} stand-in" in shown
    assert listing([]) == []
