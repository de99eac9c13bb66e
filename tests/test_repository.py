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
CRITICAL = ("accounting", "bounds", "budget", "mechanism", "norms", "privacy")
KEPT_OUT = ("lightning", "pytorch_lightning", "wandb", "logging", "callbacks", "data_modules")
LONGEST_MODULE = 500
TOP_LEVEL = {
    *PACKAGES, "configs", "slurm", "tests", "docs", ".ci", "pyproject.toml", "constraints.txt", "Makefile",
    "mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", ".gitignore",
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
# words that begin no sentence of a reference: what follows them has no subject
FRAGMENT = re.compile(
    r"(?:The same|Those|That of|What|Whether|Where|Which|Why|When|How|Of|As|In|On|At|To|For|From|By|With|Without|Up"
    r"|Until|Before|After|Per|Like|Its|Their|Itself|Also|And|Or|So|No|Not|Is|Does)\b(?!-)"
)
# a function does something: its docstring begins with a verb in the third person, and not with the name of its result
NO_VERB = re.compile(r"(?:A|An|The|All|Each|Every|One|Two)\b(?!-)|[^A-Za-z]")
IMPERATIVE = re.compile(
    r"(?:Add|Begin|Check|Close|Compute|Continue|Count|Find|Give|Hand|Keep|Let|Log|Make|Move|Print|Put|Raise|Read|Record"
    r"|Refuse|Replace|Restore|Return|Run|Say|Set|Show|Start|Store|Take|Train|Try|Use|Write|Yield)\b(?!-)"
)
ADDERS = ("add_argument", "add")
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


def is_property(node: ast.AST) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", ()))


def fragments(source: str) -> list[str]:
    """Returns the docstrings of a module that are not sentences, as far as their ends and first words tell."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text is None:
            continue
        summary, last = text.partition("\n\n")[0], text.splitlines()[-1]
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_property(node)
        closed = last.startswith(" ") or last.endswith((".", ".)", "?", "|", ">", "="))
        ends = summary.endswith((".", "?", "!", ":")) and closed
        if not ends or FRAGMENT.match(text) or (is_function and (NO_VERB.match(text) or IMPERATIVE.match(text))):
            found.append(f"line {getattr(node, 'lineno', 1)}: {summary!r}")
    return found


def options_without_help(source: str) -> list[str]:
    """Returns the command-line options of a module whose help is missing or begins in the middle of a sentence."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ADDERS):
            continue
        name = ast.unparse(node.args[0]).strip("'\"f") if node.args else ""
        texts = [ast.unparse(keyword.value).strip("'\"f") for keyword in node.keywords if keyword.arg == "help"]
        if name.startswith("--") and (not texts or re.match(r"of |\(|that |what |how |where ", texts[0])):
            found.append(f"line {node.lineno}: {name}")
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
        "kept_out = ('lightning', 'wandb', 'lipdp_lightning.callbacks', 'lipdp_lightning.data_modules');"
        "print([m for m in kept_out if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Which rooms a room may import, also inside functions; modules beside the rooms, such as files.py, count as rooms.
KNOWS = {
    "alive": "",
    "bound_text": "",
    "extras": "",
    "files": "",
    "hints": "",
    "kernels": "",
    "norms": "",
    "own_folders": "",
    "run_names": "",
    "schedules": "",
    "slurm": "",
    "bounds": "norms",
    "layers": "bounds kernels norms",
    "conversion": "bounds layers norms",
    "features": "files layers",
    "models": "features layers",
    "augmentations": "layers",
    "report": "bound_text extras files",
    "accounting": "bound_text",
    "budget": "accounting bound_text",
    "privacy": "accounting budget files kernels",
    "key_streams": "kernels privacy",
    "norm_balls": "norms",
    "mechanism": "bounds kernels layers norm_balls norms privacy",
    "clipping": "bounds layers privacy",
    "data_modules": "extras features files privacy",
    "training": (
        "accounting alive augmentations bounds clipping files hints kernels layers mechanism norms own_folders privacy "
        "run_names slurm"
    ),
    "curves": "bound_text files key_streams privacy report",
    "calibration": "curves",
    "forecast": "bounds layers mechanism norms privacy training",
    "callbacks": (
        "accounting augmentations bound_text bounds calibration curves data_modules extras files forecast privacy "
        "report slurm training"
    ),
    "audit": (
        "accounting bound_text bounds budget clipping data_modules extras layers mechanism norms privacy report "
        "training"
    ),
    "experiment": (
        "accounting bounds calibration callbacks data_modules extras files hints privacy report schedules training"
    ),
    "adoption": "accounting bounds budget callbacks data_modules experiment layers privacy training",
    "release": "bound_text experiment files training",
    "tuning": "accounting bound_text experiment extras files key_streams privacy report training",
    "bench": "bounds data_modules extras files kernels layers models norms privacy report training",
    "studies": (
        "accounting audit augmentations bench bound_text bounds budget calibration clipping conversion curves "
        "data_modules experiment features files forecast key_streams layers mechanism models norm_balls norms privacy "
        "report training"
    ),
    "doctor": "bounds kernels layers mechanism norms privacy",
    "commands": (
        "accounting alive audit bench bound_text bounds budget callbacks curves data_modules doctor experiment "
        "extras files forecast mechanism norms privacy release report run_names slurm studies training tuning"
    ),
    "cli": "commands experiment own_folders report",
}


def rooms() -> dict[str, list[Path]]:
    """Returns the modules of each room: a folder or a module of the library, and the other two packages."""
    found: dict[str, list[Path]] = {}
    for path in modules_of(*PACKAGES):
        package, *inner = path.relative_to(ROOT).parts
        if package == "lipdp_lightning" and inner == ["__init__.py"]:
            continue
        found.setdefault(inner[0].removesuffix(".py") if package == "lipdp_lightning" else package, []).append(path)
    return found


def imported_rooms(path: Path) -> set[str]:
    """Returns the rooms that a module imports, by relative or absolute name, at its top or inside a function."""
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
            root, _, inner = name.partition(".")
            room = inner.partition(".")[0] if root == "lipdp_lightning" else root
            if root in PACKAGES and room in KNOWS:
                found.add(room)
    return found


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """Returns rooms that cannot be put in an order in which each knows only rooms before it."""
    left = dict(graph)
    while ready := [room for room, known in left.items() if not known & set(left)]:
        for room in ready:
            del left[room]
    return sorted(left)


def test_every_room_imports_what_the_table_says() -> None:
    """The table is exact: an import that is not in it fails, and so does an entry that nothing uses."""
    used = {room: set().union(*map(imported_rooms, paths)) - {room} for room, paths in rooms().items()}
    assert {room: " ".join(sorted(known)) for room, known in used.items()} == {
        room: " ".join(sorted(known.split())) for room, known in KNOWS.items()
    }


def test_no_rooms_import_each_other() -> None:
    graph = {room: set(known.split()) for room, known in KNOWS.items()}
    assert cycle_in(graph) == []
    assert cycle_in(graph | {"norms": {"mechanism"}}) != []


def test_imports_are_found_however_they_are_written() -> None:
    assert {"bounds", "privacy", "mechanism"} <= imported_rooms(ROOT / "lipdp_lightning/mechanism/step.py")
    assert "mechanism" not in imported_rooms(ROOT / "lipdp_lightning/privacy/sampling.py")


def test_no_file_name_occurs_twice() -> None:
    """A file of ``bounds/rules`` is named after the layers that it rules, and one of ``commands`` after its command."""
    named_after = {"rules", "commands"}
    places: dict[str, list[str]] = {}
    for path in modules_of(*PACKAGES):
        if path.name != "__init__.py" and path.parent.name not in named_after:
            places.setdefault(path.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_modules_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in modules_of(*PACKAGES)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_MODULE
    }
    assert long == {}


def test_docstrings_are_sentences() -> None:
    paths = modules_of(*PACKAGES)
    assert len(paths) > 300
    found = {str(path.relative_to(ROOT)): fragments(path.read_text(encoding="utf-8")) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "docstring",
    ["Of the moduli; NaN if an entry is.", "The same as above.", "Those of the run.", "What a run holds.",
     "Whether it holds.", "Returns the norm", "The norm of a matrix.", "(rows, columns) of it.", "A copy.",
     "Returns it:\\n\\n    x\\n\\nand", "0 on success.", "With the labels.",
     "Return the norm."],
)  # fmt: skip
def test_a_docstring_that_is_no_sentence_is_found(docstring: str) -> None:
    assert fragments(f'def f():\n    "{docstring}"')


@pytest.mark.parametrize(
    "source",
    ['def f():\n    "Returns the norm of each matrix; NaN propagates."', 'class A:\n    "A norm."',
     'class A:\n    @property\n    def f(self):\n        "The norm."', '"Computes norms."', "def f():\n    return 1",
     'def f():\n    "Splits a text.\\n\\n    Args:\\n        x: the text\\n    "'],
)  # fmt: skip
def test_a_docstring_that_is_a_sentence_is_left_alone(source: str) -> None:
    assert not fragments(source)


def test_every_option_of_a_command_says_what_it_is() -> None:
    found = {
        str(p.relative_to(ROOT)): options_without_help(p.read_text(encoding="utf-8")) for p in modules_of(*PACKAGES)
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source", ['p.add_argument("--seed")', 'p.add_argument("--seed", help="of the sampler")', 'add(f"--{x}", type=int)']
)
def test_an_option_without_a_help_is_found(source: str) -> None:
    assert options_without_help(source)
    assert not options_without_help('p.add_argument("--seed", help="seed of the sampler")\nadd("the model", "why")')


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


@pytest.mark.parametrize("folder", ["callbacks", "data_modules", "configs"])
def test_folders_beside_the_library_are_parts_of_it(folder: str) -> None:
    """Installed, no top-level package but the library is there, so that they do not shadow a project's own folders."""
    link = ROOT / "lipdp_lightning" / folder
    assert link.is_symlink() and link.resolve() == (ROOT / folder).resolve()
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'include = ["lipdp_lightning*"]' in settings
    assert (ROOT / "lipdp_lightning/py.typed").is_file()


@pytest.mark.parametrize("module", ["callbacks.accountant", "data_modules.base"])
def test_a_package_has_one_name(module: str) -> None:
    """Two names of one package would make two classes of each of its classes."""
    result = subprocess.run([sys.executable, "-c", f"import {module}"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode and f"HINT: from lipdp_lightning.{module.split('.')[0]} import" in result.stderr


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
    extras = re.findall(r"^(?:vision|tune|plots|wandb|jax|docs|dev) = \[(.*)\]$", text, re.MULTILINE)
    assert main and len(extras) == 7
    lines = [line for line in main.group(1).splitlines() if not line.strip().startswith("#")]
    found = re.findall(r'"([^"]+)"', "\n".join([*lines, *extras]))
    return [requirement for requirement in found if not requirement.startswith("lipdp-lightning")]


def test_every_direct_dependency_is_pinned() -> None:
    pins: dict[str, list[str | None]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([\w.!+]+)(?:; (python_version (?:<|>=) \"3\.11\"))?", line)
        assert match, f"constraints.txt: {line!r} is not name==version"
        pins.setdefault(requirement_name(match.group(1)), []).append(match.group(3))
    newer, older = 'python_version >= "3.11"', 'python_version < "3.11"'
    assert all(markers in ([None], [older], [older, newer], [newer, older]) for markers in pins.values())
    required = {requirement_name(requirement) for requirement in direct_requirements()}
    assert {"torch", "lightning", "pyyaml", "pytest"} <= required
    assert required - set(pins) == set()


def test_every_import_of_the_packages_is_a_declared_dependency() -> None:
    """Optional ones are imported by name at run time, and say so when they are missing."""
    provided_by = {"yaml": "pyyaml", "pil": "pillow", "sklearn": "scikit-learn"}
    own = {"lipdp_lightning", *(name.lower() for name in sys.stdlib_module_names), "__future__"}
    required = {requirement_name(requirement) for requirement in direct_requirements()}
    missing = set()
    for path in modules_of(*PACKAGES):
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            package = provided_by.get(name.lower(), name.lower().replace("_", "-"))
            if name.lower() not in own and package not in required:
                missing.add(f"{path.relative_to(ROOT)}: {name}")
    assert missing == set()


@pytest.mark.slow
def test_every_module_can_be_imported() -> None:
    """Modules that only a command of their own loads are imported as well."""
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules_of(*PACKAGES)]
    full = [name if name.startswith("lipdp_lightning") else f"lipdp_lightning.{name}" for name in names]
    loaded = [name.removesuffix(".__init__") for name in full if not name.endswith("__main__")]
    assert len(loaded) > 300
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except ImportError as error:\n        print(f'{name}: {error}')\n"
    )
    result = subprocess.run([sys.executable, "-c", code, *loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == ""


def test_the_list_of_slow_tests_names_tests() -> None:
    lines = (ROOT / "tests/slow_tests.txt").read_text(encoding="utf-8").splitlines()
    cases = [line for line in lines if not line.startswith("#")]
    assert cases == sorted(set(cases))
    for file, name in {tuple(case.partition("[")[0].split("::")) for case in cases}:
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"
