"""Names that code reads are found in every function that it defines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lipdp_lightning.bounds.reachable import reachable_names

HIDDEN: list[int] = []
BY_TEXT = 1.0


def _reads_in_a_comprehension(x: list[Any]) -> list[Any]:
    return [y for y in x if y in HIDDEN]


def _reads_in_an_inner_function() -> Callable[[], Callable[[], Any]]:
    return lambda: lambda: HIDDEN


def _reads_by_a_text() -> Any:
    return globals()["BY_TEXT"]


def test_globals_of_inner_functions_and_comprehensions_are_found() -> None:
    for function in (_reads_in_a_comprehension, _reads_in_an_inner_function):
        named: set[str] = set()
        assert (globals(), "HIDDEN") in list(reachable_names(function, named)) and "HIDDEN" in named


def test_a_text_counts_as_a_name() -> None:
    named: set[str] = set()
    assert list(reachable_names(_reads_by_a_text, named)) and "BY_TEXT" in named
