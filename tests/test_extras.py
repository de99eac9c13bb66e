"""The library where no extra is installed: it imports, trains and reports, and names what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lipdp_lightning.extras import EXTRAS, imported, is_installed, require

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("matplotlib", "wandb", "torchvision", "timm", "kymatio", "optuna", "pyarrow", "pandas", "botorch")
PROGRAM = """
import contextlib, importlib, importlib.metadata, io, json, pkgutil, sys, time
from importlib.machinery import PathFinder

missing = set(sys.argv[2].split())
find, named = PathFinder.find_spec, importlib.metadata.Distribution.from_name.__func__


class NotInstalled(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else find(name, path, target)


def from_name(kind, name):
    if name.lower() in missing:
        raise importlib.metadata.PackageNotFoundError(name)
    return named(kind, name)


sys.meta_path[sys.meta_path.index(PathFinder)] = NotInstalled
importlib.metadata.Distribution.from_name = classmethod(from_name)
began = time.perf_counter()
import lipdp_lightning
took, early = time.perf_counter() - began, [name for name in ("torch", "numpy", "lightning") if name in sys.modules]
from lipdp_lightning.cli import main

lipdp_lightning.privatize, lipdp_lightning.Engine, lipdp_lightning.convert, lipdp_lightning.PrivateData
for name in ("audit.audit_page", "callbacks", "curves.curve_plots", "data_modules", "report.comparison", "commands"):
    importlib.import_module("lipdp_lightning." + name)
for found in pkgutil.iter_modules(sys.modules["lipdp_lightning.commands"].__path__):
    importlib.import_module("lipdp_lightning.commands." + found.name)
answers = []
for words in json.loads(sys.argv[1]):
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        code = main(words)
    answers.append([code, said.getvalue(), wrong.getvalue()])
loaded = [name for name in sys.modules if name.partition(".")[0] in missing]
print("\\n" + json.dumps({"took": took, "early": early, "answers": answers, "loaded": loaded}))
"""
FITTED = [
    ["fit", "--config", "quickstart", "--run_dir", "run", "--privacy.epochs", "2"],
    ["compare", "run", "--output", "compare.html"],
    ["report", "--run_dir", "run"],
]
REFUSED = {
    "wandb": ["fit", "--config", "quickstart", "--wandb", "offline", "--run_dir", "other"],
    "tune": ["tune", "--config", "digits_dpsgd", "--out", "search"],
    "plots": ["reproduce", "table_5_4"],
    "parquet": ["init", "table.parquet", "--label", "y"],
}


@pytest.mark.slow
def test_without_extras_everything_imports_a_run_is_trained_and_reported(tmp_path: Path) -> None:
    (tmp_path / "table.parquet").write_bytes(b"PAR1PAR1")
    words = [json.dumps([*FITTED, *REFUSED.values()]), " ".join(LEFT_OUT)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["early"] == [] and found["loaded"] == []
    print(f"import lipdp_lightning: {1000 * found['took']:.1f} ms")
    fitted, refused = found["answers"][: len(FITTED)], found["answers"][len(FITTED) :]
    assert [code for code, *_ in fitted] == [0, 0, 0], fitted
    for page in (tmp_path / "run/report.html", tmp_path / "compare.html"):
        text = page.read_text()
        assert "<svg" not in text and "pip install" in text and "lipdp-lightning[plots]" in text
    assert json.loads((tmp_path / "run/privacy_report.json").read_text())["certified"] is True
    for (code, _, wrong), extra in zip(refused, REFUSED, strict=True):
        assert code == 2 and f"HINT: pip install 'lipdp-lightning[{extra}]'" in wrong, (code, wrong)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "compare.html", "table.parquet"}
    assert not (tmp_path / "run/wandb").exists()


def test_extras_are_those_of_the_package() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    for package, extra in EXTRAS.items():
        (line,) = (line for line in text.splitlines() if line.startswith(f"{extra} = ["))
        assert f'"{package}' in line


def test_a_missing_package_is_an_error_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require("wandb", "it")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert not is_installed("wandb")
    with pytest.raises(ValueError, match=r"it needs wandb, which is not installed. HINT: pip install .*\[wandb\]"):
        require("wandb", "it")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"t.parquet needs pyarrow.*\[parquet\]"):
        imported("pyarrow.parquet", "t.parquet")
