"""Rules about the repository itself: what may import what, what is small, what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lipdp_lightning

ROOT = Path(__file__).parents[1]
PACKAGES = ("lipdp_lightning", "callbacks", "data_modules")
CRITICAL = ("accounting", "bounds", "mechanism", "norms", "privacy")
KEPT_OUT = ("lightning", "pytorch_lightning", "wandb", "logging", "callbacks", "data_modules")
LONGEST_MODULE = 500
TOP_LEVEL = {
    *PACKAGES, "configs", "slurm", "tests", "docs", ".ci", "pyproject.toml", "constraints.txt", "Makefile",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", ".gitignore",
}  # fmt: skip
# put together here, so that this file does not name them
REGISTRY_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org"), ("anaconda", "org"),
        ("conda", "io"), ("registry", "npmjs", "org"), ("docker", "io"), ("quay", "io"), ("ghcr", "io"),
        ("nvcr", "io"), ("huggingface", "co"),
    )
]  # fmt: skip
MACHINE_PATH = re.compile(r"(?<![\w.~/$}-])/(?:root|home|Users|work|workspace)/")


def modules_of(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def tracked_files() -> list[Path]:
    """What git tracks or is about to, as text files."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in files if path.is_file() and b"\0" not in path.read_bytes()[:4096]]


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that a module imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def offences(source: str) -> list[str]:
    """What a privacy-critical module must not contain."""
    tree = ast.parse(source)
    found = [f"imports {name}" for name in imported(tree) if name in KEPT_OUT]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            found.append(f"line {node.lineno}: print")
        if isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: global")
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
        no_items = isinstance(value, ast.List | ast.Set) and not value.elts
        empty = no_items or (isinstance(value, ast.Dict) and not value.keys)
        if empty:
            found.append(f"line {statement.lineno}: an empty container at module level, to be filled later")
    return found


def forbidden_text(text: str) -> list[str]:
    hosts = [host for host in REGISTRY_HOSTS if host in text]
    return hosts + [match.group() for match in MACHINE_PATH.finditer(text)]


@pytest.mark.parametrize("path", modules_of(*(f"lipdp_lightning/{room}" for room in CRITICAL)), ids=lambda p: p.stem)
def test_the_critical_rooms_know_no_trainer_no_logger_and_hold_no_state(path: Path) -> None:
    found = offences(path.read_text(encoding="utf-8"))
    if path.name == "registry.py":
        found = [offence for offence in found if "empty container" not in offence]  # the table of rules
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import lightning.pytorch as pl", "from wandb import log", "def f():\n    import logging", "print(1)",
        "_CACHE = {}", "SEEN: list[int] = []", "def f():\n    global x",
    ],
)  # fmt: skip
def test_what_a_critical_room_must_not_contain_is_found(source: str) -> None:
    assert offences(source)


def test_the_critical_rooms_load_no_trainer() -> None:
    """Also not through what they import."""
    rooms = ", ".join(f"lipdp_lightning.{room}" for room in CRITICAL)
    code = (
        f"import {rooms}, lipdp_lightning.mechanism.step, lipdp_lightning.privacy.branches, sys;"
        "print([m for m in ('lightning', 'wandb', 'callbacks', 'data_modules') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_rooms_import_only_the_rooms_above_them() -> None:
    """bounds and layers know nothing of noise; privacy knows nothing of models; nothing private knows the trainer."""
    allowed = {
        "norms": {"norms"},
        "kernels": {"kernels"},
        "bounds": {"bounds", "norms"},
        "layers": {"bounds", "kernels", "layers", "norms"},
        "audit": {
            "accounting",
            "bounds",
            "layers",
            "norms",
            "privacy",
            "mechanism",
            "training",
            "baselines",
            "report",
            "audit",
        },
        "accounting": {"accounting"},
        "privacy": {"accounting", "kernels", "privacy"},
        "mechanism": {"bounds", "kernels", "layers", "norms", "privacy", "mechanism"},
        "features": {"layers", "features"},
        "models": {"layers", "features", "models"},
        "slurm": {"slurm"},
    }  # fmt: skip
    wrong = []
    for room, known in allowed.items():
        for path in modules_of(f"lipdp_lightning/{room}"):
            strangers = siblings(path) - known
            wrong += [f"{path.relative_to(ROOT)} imports {stranger}" for stranger in sorted(strangers)]
    assert wrong == []


def siblings(path: Path) -> set[str]:
    """Rooms of the library that a module imports, by relative or absolute name."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            names = [".".join([*base, *([node.module] if node.module else []), alias.name]) for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "lipdp_lightning" and len(parts) > 1 and (ROOT / "lipdp_lightning" / parts[1]).is_dir():
                found.add(parts[1])
    return found


def test_siblings_are_found_however_they_are_imported() -> None:
    found = siblings(ROOT / "lipdp_lightning/mechanism/step.py")
    assert {"bounds", "privacy", "mechanism"} <= found
    assert "mechanism" not in siblings(ROOT / "lipdp_lightning/privacy/keys.py")


def test_modules_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in modules_of(*PACKAGES)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_MODULE
    }
    assert long == {}


def test_no_file_names_a_registry_or_a_place_on_one_machine() -> None:
    found = {
        str(path.relative_to(ROOT)): hits
        for path in tracked_files()
        if path != Path(__file__) and (hits := forbidden_text(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize("text", ["--index-url https://" + REGISTRY_HOSTS[0] + "/simple", "open('/" + "home/ann/x')"])
def test_a_registry_and_a_machine_path_are_found(text: str) -> None:
    assert forbidden_text(text)
    assert not forbidden_text("framework/root/of squares, see docs/home/page and $HOME/x, ~/project/x")


def test_the_top_level_is_as_it_should_be() -> None:
    present = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    assert present == TOP_LEVEL
    assert (ROOT / ".ci/run").stat().st_mode & 0o100, ".ci/run must be executable"


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_typed_and_shipped(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert (ROOT / package / "__init__.py").is_file()
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{package}*"' in settings and f'{package} = ["py.typed"]' in settings


def test_the_version_is_the_same_everywhere() -> None:
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    newest = re.search(r"^## .*?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert declared and newest
    assert declared.group(1) == lipdp_lightning.__version__ == newest.group(1)


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def direct_requirements() -> list[str]:
    """Of the package, its extras and its developers, from pyproject.toml; pyarrow stays the user's choice."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    main = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    extras = re.findall(r"^(?:vision|tune|dev) = \[(.*)\]$", text, re.MULTILINE)
    assert main and len(extras) == 3
    lines = [line for line in main.group(1).splitlines() if not line.strip().startswith("#")]
    found = re.findall(r'"([^"]+)"', "\n".join([*lines, *extras]))
    return [requirement for requirement in found if not requirement.startswith("lipdp-lightning")]


def test_every_direct_dependency_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([\w.!+]+)", line)
        assert match, f"constraints.txt: {line!r} is not name==version"
        pins[requirement_name(match.group(1))] = match.group(2)
    required = {requirement_name(requirement) for requirement in direct_requirements()}
    assert {"torch", "lightning", "pyyaml", "pytest"} <= required
    assert required - set(pins) == set()


def test_every_import_of_the_packages_is_a_declared_dependency() -> None:
    """Optional ones are imported by name at run time, and say so when they are missing."""
    provided_by = {"yaml": "pyyaml", "pil": "pillow", "sklearn": "scikit-learn"}
    own = {*PACKAGES, *(name.lower() for name in sys.stdlib_module_names), "__future__"}
    required = {requirement_name(requirement) for requirement in direct_requirements()}
    missing = set()
    for path in modules_of(*PACKAGES):
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            package = provided_by.get(name.lower(), name.lower().replace("_", "-"))
            if name.lower() not in own and package not in required:
                missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert missing == set()
