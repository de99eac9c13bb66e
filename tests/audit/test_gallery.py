"""Every broken implementation of the gallery is caught by its audit, which passes the sound one; docs list them all."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gallery import GALLERY
from test_mutations import CAUGHT

from lipdp_lightning.audit.findings import Finding

PAGE = Path(__file__).parents[2] / "docs/audit.md"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# audits that train more than a hundred times, or account for compositions
LONG = ("calibration", "accounting")
ALSO_FAST = ("DP-SGD: noise without the bound", "epsilon of a tenth of the steps")


def marked(name: str, caught_by: str) -> Any:
    slow = caught_by in LONG and name not in ALSO_FAST
    return pytest.param(name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("name", [marked(name, entry.caught_by) for name, entry in GALLERY.items()])
def test_a_broken_implementation_is_caught(name: str) -> None:
    found = GALLERY[name].broken()
    assert found.violated, found.statement


@lru_cache
def sound_of(caught_by: str) -> list[Finding]:
    seen: dict[object, Finding] = {}
    for entry in GALLERY.values():
        if entry.caught_by == caught_by:
            key = entry.sound.__code__, tuple(str(c.cell_contents) for c in entry.sound.__closure__ or ())
            if key not in seen:
                seen[key] = entry.sound()
    return list(seen.values())


@pytest.mark.parametrize("caught_by", [marked(c, c) for c in sorted({e.caught_by for e in GALLERY.values()})])
def test_the_sound_implementation_passes_the_same_audit(caught_by: str) -> None:
    for found in sound_of(caught_by):
        assert not found.violated, found.statement


def table(heading: str) -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    part = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert part, heading
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.group(1).splitlines() if line[:2] == "| "
    ]
    return rows[1:]


def test_the_table_of_the_docs_is_the_gallery() -> None:
    written = {row[0]: row[1].strip("`") for row in table("Gallery of broken implementations")}
    assert written == {name: entry.caught_by for name, entry in GALLERY.items()}
    assert len(GALLERY) >= 25


def test_the_table_of_the_tests_is_that_of_the_mutations() -> None:
    written = {(row[0], row[1].strip("`")) for row in table("Mutations that tests catch")}
    assert written == {
        (mutation, f"tests/{file}::{test}") for file, tests in CAUGHT.items() for mutation, test in tests.items()
    }
