"""Ordinary projects, and the few lines by which they become private."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parent / "examples"
LEAN: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip
WITHOUT_FILES = LEAN | {"logger": False, "enable_checkpointing": False}

# what each project reports: accuracy, the area under the curve of a rare class, or R^2
METRICS = {
    "image_classifier": "test_acc", "table_classifier": "val_acc", "multi_label": "test_acc", "regression": "test_r2",
    "rare_class": "test_auroc", "transfer": "test_acc", "data_module": "test_acc", "full_project": "val_acc",
    "compiled": "test_acc", "plain_loop": "test_acc",
}  # fmt: skip


def options_of(name: str, folder: Path) -> dict[str, Any]:
    """Returns the options that the main function of a project is called with in a test."""
    return {"plain_loop": {}, "full_project": {"folder": folder / "run", **LEAN}}.get(name, WITHOUT_FILES)


def source_with(name: str, diff: str) -> str:
    """Returns the text of a project with one of its diffs applied; as it is, for an empty name of a diff."""
    if not diff:
        return (EXAMPLES / f"{name}.py").read_text()
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    private: list[str] = []
    place = 0
    for line in (EXAMPLES / f"{name}.{diff}").read_text().splitlines():
        if line.startswith("@@"):
            start = int(line.split()[1].lstrip("-").partition(",")[0]) - 1
            private += lines[place:start]
            place = start
        elif not line.startswith(("---", "+++")):
            sign, text = line[:1], line[1:]
            if sign in " -":
                assert lines[place] == text, f"{name}.{diff} does not fit {name}.py at line {place + 1}"
                place += 1
            if sign in " +":
                private.append(text)
    return "\n".join([*private, *lines[place:]]) + "\n"


def changed_lines(name: str, diff: str = "diff") -> int:
    """Returns the number of lines of the private version that the ordinary one does not have."""
    lines = (EXAMPLES / f"{name}.{diff}").read_text().splitlines()
    return sum(line.startswith("+") and not line.startswith("+++") for line in lines)


def loaded(name: str, source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Imports a project's text as a module of its own."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    file = folder / f"{name}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def private_main(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int = 0, diff: str = "diff"
) -> Callable[..., Any]:
    """Returns the main function of a project that was made private."""
    main: Callable[..., Any] = loaded(name, source_with(name, diff), folder, monkeypatch).main
    torch.manual_seed(seed)
    return main
