"""The Python example of docs/baselines.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "baselines.md"


def test_the_example_compares_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    results = names["results"]
    assert [r.certified for r in results.values()] == [True, True, False]
    assert results["lipschitz"].epsilon == results["dpsgd_flat"].epsilon <= 2.0
    assert all(r.score > 0.5 for r in results.values()) and list(tmp_path.iterdir()) == []
