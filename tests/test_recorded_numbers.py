"""Certificates, sensitivities, released sums and projections stay what they were when they were recorded."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

RECORDED = Path(__file__).parent / "recorded"
_spec = importlib.util.spec_from_file_location("numbers_of_networks", RECORDED / "numbers_of_networks.py")
assert _spec is not None and _spec.loader is not None
numbers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(numbers)

EXPECTED: dict[str, Any] = json.loads(numbers.FILE.read_text(encoding="utf-8"))
RELATIVE = 1e-4  # float32 sums in another order


def differences(expected: Any, found: Any, path: str = "", scale: float = 0.0) -> list[str]:
    """Lists the numbers that moved; entries of a vector are compared on the scale of its norm."""
    if isinstance(expected, dict):
        if expected.keys() != found.keys():
            return [f"{path}: {sorted(expected.keys() ^ found.keys())}"]
        return [d for key in expected for d in differences(expected[key], found[key], f"{path}/{key}")]
    if isinstance(expected, list):
        size = max(map(abs, expected))
        return [d for e, f in zip(expected, found, strict=True) for d in differences(e, f, path, size)]
    close = math.isclose(expected, found, rel_tol=RELATIVE, abs_tol=max(1e-7, RELATIVE * scale))
    return [] if close else [f"{path}: {expected} became {found}"]


@pytest.mark.parametrize("name", EXPECTED)
def test_numbers_are_those_that_were_recorded(name: str) -> None:
    torch.set_num_threads(1)
    build, shape, classes = numbers.networks()[name]
    assert differences(EXPECTED[name], numbers.numbers_of(build, shape, classes)) == []


def test_a_moved_number_is_found() -> None:
    first = {"a": {"b": [1.0, 0.001]}, "c": 2.0}
    assert differences(first, {"a": {"b": [1.0, 0.001]}, "c": 2.0}) == []
    assert len(differences(first, {"a": {"b": [1.0, 0.002]}, "c": 2.001})) == 2
    assert differences(first, {"a": {"b": [1.0, 0.001]}}) == [": ['c']"]
