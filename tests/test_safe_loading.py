"""No module of the packages reads a file in a way that runs code which the file names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("lipdp_lightning", "callbacks", "data_modules")
# what a call must be given to read plain values alone
ONLY_WITH = {
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
    "timm.models.load_state_dict": ("weights_only", True),
}
NEVER_CALLED = {
    "eval", "exec", "__import__", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all",
    "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader", "torch.jit.load",
    "torch.hub.load", "torch.package.PackageImporter", "pd.read_pickle", "pandas.read_pickle", "runpy.run_path",
    "torch.export.load", "torch.serialization.load", "torch.serialization.add_safe_globals",
}  # fmt: skip
NEVER_CALLED_OF_ANYTHING = {"load_from_checkpoint", "load_state_dict_from_url", "read_pickle"}
NEVER_IMPORTED = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# CIFAR's files are pickles: they are read by an unpickler that builds arrays and nothing else (test_data_cifar.py)
IMPORTS_ALLOWED = {"data_modules/cifar.py": {"pickle"}}
CALLS_ALLOWED = {"data_modules/cifar.py": {"pickle.Unpickler", "pickle.UnpicklingError"}}


def names_of(tree: ast.AST) -> dict[str, str]:
    """What local names stand for: aliases of modules, and what is imported from them."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def problems_of(source: str, path: str = "") -> Iterator[str]:
    tree = ast.parse(source)
    names = names_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            modules += [a.name for a in node.names] if isinstance(node, ast.ImportFrom) and not node.module else []
            for module in modules:
                top = module.partition(".")[0]
                if top in NEVER_IMPORTED - IMPORTS_ALLOWED.get(path, set()):
                    yield f"{path}:{node.lineno} imports {module}"
        elif isinstance(node, ast.Constant) and node.value in NEVER_IMPORTED:
            yield f"{path}:{node.lineno} names {node.value}"
        elif isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            full = names.get(first, first) + dot + rest
            last = full.rpartition(".")[2]
            if full in NEVER_CALLED or (dot and last in NEVER_CALLED_OF_ANYTHING):
                yield f"{path}:{node.lineno} uses {full}"
            if full.startswith("pickle.") and full not in CALLS_ALLOWED.get(path, set()):
                yield f"{path}:{node.lineno} uses {full}"
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            full = {"np": "numpy"}.get(names.get(first, first), names.get(first, first)) + dot + rest
            if full in ONLY_WITH:
                wanted, value = ONLY_WITH[full]
                given = {k.arg: k.value for k in node.keywords}.get(wanted)
                if not (isinstance(given, ast.Constant) and given.value is value):
                    yield f"{path}:{node.lineno} calls {full} without {wanted}={value}"


def test_no_reader_of_the_packages_runs_code() -> None:
    found = []
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            found += list(problems_of(file.read_text(encoding="utf-8"), path))
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f)", "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=chosen)", "from torch import load\nload(f)",
        "import torch as t\nt.load(f)", "import torch\nread = torch.serialization.load", "import numpy\nnumpy.load(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)", "from numpy import load as l\nl(f)",
        "import pickle\npickle.loads(b)", "from pickle import loads", "import dill", "import marshal as m",
        "import yaml\nyaml.load(f, yaml.Loader)", "from yaml import unsafe_load\nunsafe_load(f)", "eval(text)",
        "def f():\n    import joblib", "import_module('pickle')", "Module.load_from_checkpoint(f)",
        "torch.hub.load_state_dict_from_url(u)", "pd.read_pickle(f)",
    ],
)  # fmt: skip
def test_each_way_to_run_code_would_be_noticed(source: str) -> None:
    assert list(problems_of(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f, weights_only=True)", "import yaml\nyaml.safe_load(f)",
        "import numpy as np\nnp.load(f, allow_pickle=False)", "json.load(f)", "model.eval()",
    ],
)  # fmt: skip
def test_plain_readers_are_left_alone(source: str) -> None:
    assert list(problems_of(source)) == []


def test_the_best_trial_of_a_search_is_read_without_code(tmp_path: Path) -> None:
    from lipdp_lightning.tuning.private import BestTrial

    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return open, (str(tmp_path / "ran"), "w")

    for content in (
        {"trial": 0, "score": 1.0, "params": {}, "model": Touch()},
        {"score": Touch()},
        [1],
        {"score": "x"},
    ):
        torch.save(content, tmp_path / "best.pt")
        with pytest.raises(ValueError, match=r"best.pt cannot be read.*HINT"):
            BestTrial(tmp_path / "best.pt")
        assert not (tmp_path / "ran").exists()
