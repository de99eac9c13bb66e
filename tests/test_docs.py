"""The documentation is run: its code, its commands, its links, its tables and its list of tests."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

import lipdp_lightning.layers
from lipdp_lightning.bounds import registry
from lipdp_lightning.bounds.losses import LOSSES
from lipdp_lightning.callbacks import PrivacyAccountant
from lipdp_lightning.cli import COMMANDS, main
from lipdp_lightning.experiment.experiment import Experiment, parse_experiment
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.studies.reproduce import Options, Output
from lipdp_lightning.studies.reproduce.entry import checked_cells, checked_result

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMESPACE = "documentation_example"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> Iterator[tuple[int, str]]:
    """First line and text of every fenced block of a language."""
    text = path.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        if match.group(1) == language:
            yield text.count("\n", 0, match.start(2)) + 1, match.group(2)


def section(page: str, heading: str) -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
    match = re.search(rf"^## {re.escape(heading)}.*?$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert match, f"{page} has no section {heading!r}"
    return match.group(1)


# ---- code


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[types.ModuleType]:
    """A fresh module to run examples in, in an empty folder; rules that they register go with it."""
    module = types.ModuleType(NAMESPACE)
    monkeypatch.setitem(sys.modules, NAMESPACE, module)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)  # the attacks of the examples start from random weights
    before = dict(registry._RULES)
    yield module
    registry._RULES.clear()
    registry._RULES.update(before)


def run_python(path: Path, module: types.ModuleType) -> None:
    for line, text in blocks(path, "python"):
        code = "\n" * (line - 1) + text  # so that errors name the page's own lines
        exec(compile(code, str(path), "exec"), module.__dict__)


def test_no_page_with_code_is_left_out() -> None:
    """Pages whose code is run below, each by a test of its own."""
    assert [name_of(p) for p in PAGES if list(blocks(p, "python"))] == [
        "README.md",
        "CONTRIBUTING.md",
        "docs/baselines.md",  # in tests/clipping/test_baseline_docs.py
        "docs/bring_your_own_data.md",  # in tests/data_modules/test_data_own.py
        "docs/coming_from_opacus.md",
        "docs/convert.md",
        "docs/kit.md",
        "docs/parties.md",
        "docs/reproduce.md",
        "docs/transformers.md",
        "docs/your_project.md",
    ]


def test_the_python_example_of_parties_counts_scores(example: types.ModuleType) -> None:
    run_python(ROOT / "docs/parties.md", example)
    truth = [(example.scores > threshold).sum() for threshold in (63, 127, 191)]
    assert all(abs(noised - exact) < 200 for noised, exact in zip(example.above, truth, strict=True))


def test_the_python_example_of_transformers_is_certified(
    example: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run_python(ROOT / "docs/transformers.md", example)
    assert "blocks.0.0.body.1.query" in capsys.readouterr().out


def test_the_python_examples_of_convert_are_certified(
    example: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run_python(ROOT / "docs/convert.md", example)
    said = capsys.readouterr().out
    assert "outputs moved by" in said and "certified: " in said
    assert "fc.weight" in said and example.report.blocks == 1


def test_the_python_example_of_reproduce_is_an_entry(example: types.ModuleType, tmp_path: Path) -> None:
    run_python(ROOT / "docs/reproduce.md", example)
    entry = example.ENTRY
    rows = [{**cell, **checked_result(cell, entry.run(cell))} for cell in checked_cells(entry, Options(seeds=200))]
    assert "Over 400 releases" in entry.finish(rows, Output(tmp_path, entry.name))
    assert float(entry.claims[0].ours(rows)) == pytest.approx(1, abs=0.3)


def test_a_project_of_its_own_page_becomes_private(example: types.ModuleType, tmp_path: Path) -> None:
    run_python(ROOT / "docs/your_project.md", example)
    assert example.trainer.callback_metrics["val_acc"] > 0.7 and example.accuracy > 0.7
    assert example.trainer.strategy.branches.spent(225) == 225 == example.step.number + 1
    assert (tmp_path / "runs/loop/report.html").is_file()


def test_our_side_of_coming_from_opacus_runs(example: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    run_python(ROOT / "docs/coming_from_opacus.md", example)
    assert example.step.number == example.plan.steps - 1 and 0 < example.step.epsilon <= 3
    assert all("down" in name or "up" in name for name, p in example.adapted.named_parameters() if p.requires_grad)
    assert "BatchNorm2d): normalises each example" in capsys.readouterr().out


def test_opacus_side_of_coming_from_opacus_names_what_opacus_has() -> None:
    opacus = pytest.importorskip("opacus")
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.utils.batch_memory_manager import BatchMemoryManager
    from opacus.validators import ModuleValidator

    engine = opacus.PrivacyEngine
    known = {
        "PrivacyEngine": engine,
        "BatchMemoryManager": BatchMemoryManager,
        "ModuleValidator.fix": ModuleValidator.fix,
    }
    known |= {f"engine.{name}": getattr(engine, name) for name in dir(engine) if not name.startswith("_")}
    known["DifferentiallyPrivateDistributedDataParallel"] = DifferentiallyPrivateDistributedDataParallel
    called = 0
    for _, text in blocks(ROOT / "docs/coming_from_opacus.md", "py"):
        for call in [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]:
            if function := known.get(ast.unparse(call.func)):
                accepted = inspect.signature(function).parameters
                flexible = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
                names = {keyword.arg for keyword in call.keywords}
                assert flexible or names <= set(accepted), ast.unparse(call)
                called += 1
    assert called >= 8


def test_the_python_examples_of_contributing_run(example: types.ModuleType) -> None:
    run_python(ROOT / "CONTRIBUTING.md", example)
    assert len(example.watcher.norms) == example.plan.steps


def test_the_python_example_of_readme_trains(example: types.ModuleType) -> None:
    run_python(ROOT / "README.md", example)
    assert example.data.dataset_size == 1000
    before, after = example.Classifier().model, example.model.network
    assert before.state_dict().keys() == after.state_dict().keys()


def test_the_parts_by_hand_write_a_report(example: types.ModuleType, tmp_path: Path) -> None:
    run_python(ROOT / "docs/kit.md", example)
    assert (tmp_path / "runs/api/report.html").is_file()
    assert 0 < example.plan.noise_multiplier < 20


def test_a_wrong_constant_in_the_rule_of_contributing_is_caught(example: types.ModuleType) -> None:
    path = ROOT / "CONTRIBUTING.md"
    text = "\n".join(block for _, block in blocks(path, "python"))
    wrong = text.replace(
        "(ParameterUse((op.module.weight,), x.norm),)", "(ParameterUse((op.module.weight,), 0.1 * x.norm),)"
    )
    assert wrong != text
    with pytest.raises(AssertionError):
        exec(compile(wrong, str(path), "exec"), example.__dict__)


def test_the_data_module_of_contributing_is_the_tested_one() -> None:
    source = (ROOT / "tests/data_modules/test_data_new_module.py").read_text(encoding="utf-8")
    tested = re.search(r"^class Thermometers.*?(?=\n\n\n)", source, re.MULTILINE | re.DOTALL)
    assert tested and tested.group().rstrip() in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


# ---- configurations and commands


def yaml_examples() -> list[Any]:
    found = [(path, line, text) for path in PAGES for line, text in blocks(path, "yaml")]
    return [pytest.param(text, id=f"{name_of(path)}:{line}") for path, line, text in found]


def config_options(text: str, folder: Path) -> list[str]:
    """An example that is only a part is laid over the quick start."""
    file = folder / "example.yaml"
    file.write_text(text, encoding="utf-8")
    groups = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    complete = {"model", "data", "privacy"} <= groups
    base = [] if complete else ["--config", str(ROOT / "configs/quickstart.yaml")]
    return [*base, "--config", str(file)]


@pytest.mark.parametrize("text", yaml_examples())
def test_yaml_examples_are_configurations(text: str, tmp_path: Path) -> None:
    experiment = parse_experiment(config_options(text, tmp_path), None, "off")
    assert experiment.plan.certified


def test_a_misspelt_key_in_an_example_would_be_found(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="temprature"):
        loss = "{class_path: lipdp_lightning.bounds.losses.CrossEntropy, init_args: {temprature: 1}}"
        text = f"model:\n  loss: {loss}\n"
        parse_experiment(config_options(text, tmp_path), None, "off")


@pytest.mark.slow
@pytest.mark.parametrize("text", yaml_examples())
def test_yaml_examples_train(text: str, tmp_path: Path) -> None:
    options = ["fit", *config_options(text, tmp_path), "--run_dir", str(tmp_path / "run"), "--wandb", "off"]
    assert main([*options, "--trainer.enable_progress_bar", "false"]) == 0
    assert (tmp_path / "run/report.html").is_file()


def command_lines(program: str) -> list[Any]:
    found = []
    for path in PAGES:
        for line, text in blocks(path, "bash"):
            joined = text.replace("\\\n", " ")
            words = [shlex.split(command, comments=True) for command in joined.splitlines()]
            found += [
                pytest.param(w[1:], id=f"{name_of(path)}:{line}:{' '.join(w)[:60]}")
                for w in words
                if w[:1] == [program]
            ]
    return found


def partition(words: list[str], mark: str) -> tuple[list[str], list[str], list[str]]:
    cut = words.index(mark) if mark in words else len(words)
    return words[:cut], words[cut : cut + 1], words[cut + 1 :]


def parse_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the words to the command's own parser, and to that of the configuration; run nothing."""
    name, *rest = words
    assert name in COMMANDS, f"lipdp has no command {name}"
    command: Any = importlib.import_module(f"lipdp_lightning.commands.{name}")
    if not hasattr(command, "main"):
        import argparse

        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        parser.parse_args(rest)
        return
    if name == "submit":  # what follows -- goes to lipdp fit
        own, _, extra = partition(rest, "--")
        options = ["--config", command._parser().parse_args(own).config, *extra]
    else:
        splits = getattr(command, "split", None) or command._split
        options = list(splits(rest)[1])
    monkeypatch.setattr(Experiment, "instantiate_classes", lambda self: None)
    if "--config" not in options:  # that of a run directory
        options = ["--config", "configs/quickstart.yaml", *options]
    for config in (b for a, b in itertools.pairwise(options) if a == "--config"):
        assert (ROOT / config).is_file(), f"{config} does not exist"
    monkeypatch.chdir(ROOT)
    parse_experiment(options, None, "off")


@pytest.mark.parametrize("words", command_lines("lipdp"))
def test_commands_parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parse_command(words, monkeypatch)


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--config", "configs/quickstart.yaml", "--privacy.epsilom", "1"],
        ["fit", "--config", "configs/none_such.yaml"],
        ["budget", "--data-size", "10"],
        ["train"],
    ],
)
def test_wrong_commands_do_not(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((ValueError, AssertionError, SystemExit)):
        parse_command(words, monkeypatch)


def test_readme_is_short_and_says_how_to_test() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150 and "```bash\nmake test\n```" in text
    first_screen = "\n".join(text.splitlines()[:45])
    assert all(part in first_screen for part in ("privatize(", "**What it does.**", "**What it is not.**"))


def test_every_command_is_in_readme_and_every_target_in_the_makefile() -> None:
    shown = {param.values[0][0] for param in command_lines("lipdp")}
    assert shown == set(COMMANDS)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = {word for param in command_lines("make") for word in param.values[0] if "=" not in word}
    assert {"demo", "test", "lint"} <= asked <= targets


# ---- links and names


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(path: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        file = (path.parent / place).resolve() if place else path
        if not file.exists():
            broken.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(slug, headings):
                broken.append(target)
    return broken


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_resolve(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


def test_a_broken_link_and_a_broken_anchor_are_found() -> None:
    text = "[a](docs/gone.md) [b](docs/guarantee.md#no-such-part) [c](docs/guarantee.md#12-certificates)"
    assert broken_links(ROOT / "README.md", text) == ["docs/gone.md", "docs/guarantee.md#no-such-part"]


def unresolved(text: str) -> list[str]:
    """Files and dotted names in backticks that do not exist."""
    missing = []
    for word in re.findall(r"`([\w./]+)`", text):
        if word.endswith((".py", ".yaml")) and "/" in word:
            if not any((base / word).exists() for base in (ROOT, ROOT / "lipdp_lightning")):
                missing.append(word)
        elif re.match(r"(lipdp_lightning\.|data_modules\.|callbacks\.|(bounds|mechanism|privacy)\.\w+\.)\w", word):
            package = word if word.startswith("lipdp_lightning") else f"lipdp_lightning.{word}"
            if not imports(package):
                missing.append(word)
    return missing


def imports(name: str) -> bool:
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_files_and_names_exist(path: Path) -> None:
    assert unresolved(path.read_text(encoding="utf-8")) == []


def test_a_name_that_does_not_exist_is_found() -> None:
    assert unresolved("`tests/test_nothing.py` `data_modules.Nothing` `bounds.certifier.nothing`") != []
    assert unresolved("`tests/test_docs.py` `privacy/plan.py` `data_modules.Digits` `bounds.certifier.certify`") == []


# ---- tests and functions that pages name


def named_tests(text: str) -> set[str]:
    return set(re.findall(r"\btests/[\w/]+\.py::\w+", text))


def named_functions(text: str) -> set[str]:
    """Functions of the library that a page names as ``folder/file.py::Class.method``."""
    return set(re.findall(r"`((?!tests/)[\w/]+\.py::[\w.]+)`", text))


def is_defined(name: str) -> bool:
    """Whether a file of the library defines a class or a function of this name, methods after a dot."""
    file, _, dotted = name.partition("::")
    if not (ROOT / "lipdp_lightning" / file).is_file():
        return False
    body = ast.parse((ROOT / "lipdp_lightning" / file).read_text(encoding="utf-8")).body
    for part in dotted.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_every_test_that_a_page_names_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert [test for test in sorted(named_tests(text)) if not exists(test)] == []


def stations() -> dict[str, str]:
    """The numbered sections of the walk through the core."""
    return sections_called(r"\d+\. ")


def appendices() -> dict[str, str]:
    """The lettered sections after it, each of which can be judged by itself."""
    return sections_called(r"[A-Z]\. ")


def sections_called(mark: str) -> dict[str, str]:
    parts = re.split(r"^## ", (ROOT / "docs/read_the_core.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts if re.match(mark, part)}


@pytest.mark.parametrize("title", [*stations(), *appendices()])
def test_every_station_of_the_core_has_a_claim_code_and_tests(title: str) -> None:
    text = (stations() | appendices())[title]
    assert [text.count(mark) for mark in ("**Claim.**", "**Read.**", "**Breaks.**")] == [1, 1, 1]
    functions = named_functions(text)
    assert functions and named_tests(text)
    assert [name for name in sorted(functions) if not is_defined(name)] == []


def test_the_stations_of_the_core_are_numbered() -> None:
    assert [int(title.partition(".")[0]) for title in stations()] == list(range(1, 14))
    assert [title[0] for title in appendices()] == list("ABCDEFGH")
    asked_for = set(re.findall(r"\b[Aa]ppendix ([A-Z])\b", "".join(stations().values())))
    assert asked_for == set("ABCDEFGH"), "an appendix that no station rests on, or one that is not there"


def test_a_function_and_a_test_that_do_not_exist_are_found() -> None:
    assert named_functions("`a/b.py::C.d` and `tests/a.py::test_b`") == {"a/b.py::C.d"}
    assert named_tests("`tests/test_docs.py::test_gone`") == {"tests/test_docs.py::test_gone"}
    assert is_defined("privacy/plan.py::PrivacyPlan.digest") and is_defined("privacy/sampling.py::_words")
    for gone in ("privacy/plan.py::PrivacyPlan.gone", "privacy/plan.py::gone", "privacy/gone.py::gone"):
        assert not is_defined(gone)


# ---- how large the core is


CORE = ("accounting", "bounds", "kernels", "layers", "mechanism", "norms", "privacy")
FOUR_LAYERS = (6, 16, 16, 16, 3)


def lines_of(files: set[str]) -> int:
    return sum(len((ROOT / "lipdp_lightning" / file).read_text(encoding="utf-8").splitlines()) for file in files)


PACKAGES = ("lipdp_lightning", "callbacks", "data_modules")
DRIVERS = ("lipdp_lightning/training", "callbacks", "data_modules")


class Traced(Callback):
    """Notes the library's functions that are called from the end of one step to the end of the next.

    ``every`` counts all functions, those of torch, Lightning and of C included: about what a small step takes, the same
    on every machine.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.calls: list[tuple[str, str]] = []
        self.every = 0

    def _note(self, frame: types.FrameType, event: str, argument: Any) -> None:
        self.every += event in ("call", "c_call")
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(f"{ROOT}/"):
            path = re.sub("^lipdp_lightning/(?=callbacks/|data_modules/)", "", file.removeprefix(f"{ROOT}/"))
            if path.partition("/")[0] in PACKAGES:
                self.calls.append((path, frame.f_code.co_name))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in (self.step, self.step + 1):
            sys.setprofile(self._note if trainer.global_step == self.step else None)


def walk_in_a_trainer(directory: Path) -> tuple[list[tuple[str, list[str]]], int]:
    """The files that a steady step of a run on disk enters, in order, each with the functions that are called there.

    The number is that of all calls of functions in the step.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(FOUR_LAYERS)]
    network = nn.Sequential(*[part for layer in layers for part in (layer, MaxMin())][:-1])
    plan = small_runs.make_plan(expected_batch_size=6, steps=30, allocation="optimal")
    traced = Traced(5)  # in the middle of an epoch, and no step at which epsilon is worked out anew
    try:
        small_runs.fit(
            plan, PrivacyAccountant(), traced, module=small_runs.make_module(network=network), directory=directory
        )
    finally:
        sys.setprofile(None)
    grouped = itertools.groupby(traced.calls, key=lambda call: call[0])
    return [(file, [name for _, name in calls]) for file, calls in grouped], traced.every


def extent(files: list[str]) -> tuple[int, int]:
    """How many files, and how often another one is entered."""
    return len(set(files)), max(0, len(files) - 1)


def counts_of_the_core(walk: list[str]) -> dict[str, int]:
    spine = {name.partition("::")[0] for text in stations().values() for name in named_functions(text)}
    named = {name.partition("::")[0] for text in appendices().values() for name in named_functions(text)}
    library = ROOT / "lipdp_lightning"
    core = {str(path.relative_to(library)) for room in CORE for path in (library / room).rglob("*.py")}
    (files, changes), (own, own_changes) = extent(walk), extent([file for file in walk if file.startswith(DRIVERS)])
    return {
        "lines of the spine": lines_of(spine),
        "files of the spine": len(spine),
        "lines of the appendices": lines_of(named - spine),
        "lines of the core": lines_of(core),
        "files of the core": len(core),
        "files that a step walks through": files,
        "changes of file in a step": changes,
        "files that drive the step": own,
        "changes of file among these": own_changes,
    }


def test_the_core_is_no_larger_than_the_page_says(tmp_path: Path) -> None:
    walk, calls = walk_in_a_trainer(tmp_path)
    for file, functions in walk:
        print(f"{file}: {' '.join(dict.fromkeys(functions))}")
    files = [file for file, _ in walk]
    assert "lipdp_lightning/mechanism/step.py" in files and "data_modules/poisson.py" in files
    text = section("docs/architecture.md", "What is not reached yet")
    rows = re.findall(r"^\| (.+?) \| (?:[\d,]+|-) \| ([\d,]+) \|$", text, re.MULTILINE)
    stated = {name: int(number.replace(",", "")) for name, number in rows}
    counted = counts_of_the_core(files) | {"calls of functions in a step": calls}
    print(*(f"{name}: {number}" for name, number in counted.items()), sep="\n")
    assert stated.keys() == counted.keys()
    assert {name: number for name, number in counted.items() if number > stated[name]} == {}


# ---- the papers' mistakes


def exists(test: str) -> bool:
    """A file of tests, or ``file::name`` of one in it."""
    file, _, name = test.partition("::")
    return (ROOT / file).is_file() and (f"def {name}(" if name else "def test_") in (ROOT / file).read_text(
        encoding="utf-8"
    )


def unheld(text: str) -> list[str]:
    """Items of a numbered list that name no test, or one that does not exist."""
    items = re.split(r"^(?=\d+\. )", text, flags=re.MULTILINE)[1:]
    without = []
    for item in items:
        named = re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", item)
        # as soon as curves have tests, the entry must name one
        absent = "no private curves" in item and not list((ROOT / "tests/curves").glob("test_*.py"))
        gone = [test for test in named if not exists(test)]
        if gone or not (named or absent):
            without.append(f"{item.split()[0]} {' '.join(gone)}".strip())
    return without


def test_every_mistake_of_the_papers_is_held_by_a_test() -> None:
    text = section("docs/guarantee.md", "1.10")
    assert len(re.findall(r"^\d+\. ", text, re.MULTILINE)) == 12
    assert unheld(text) == []


def test_a_mistake_without_a_test_is_found() -> None:
    text = "1. `tests/test_docs.py::test_links_resolve`\n2. *B.*\n3. `tests/test_gone.py`\n"
    text += "4. `tests/test_docs.py::test_gone`\n"
    assert unheld(text) == ["2.", "3. tests/test_gone.py", "4. tests/test_docs.py::test_gone"]


# ---- the tables of rules


def first_column(text: str) -> set[str]:
    """Names in backticks in the first column of the tables."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return {word for row in rows for word in re.findall(r"`([\w.]+)`", row)}


def registered_name(target: registry.Target) -> str:
    """As the page writes it: nn.Name for torch's modules, Name for ours, bare names of functions and methods."""
    if isinstance(target, str):
        return target.strip("_")
    if inspect.isclass(target):
        return f"nn.{target.__name__}" if target.__module__.startswith("torch.nn") else target.__name__
    return target.__name__.strip("_")


def public(table: dict[registry.Target, Any]) -> set[str]:
    """Without the rules that tests register."""

    def shipped(target: registry.Target) -> bool:
        home = getattr(target, "__module__", None) or "torch"
        return home.split(".")[0] in ("torch", "lipdp_lightning", "_operator", "builtins")

    return {registered_name(target) for target in table if shipped(target)}


@pytest.mark.parametrize(("heading", "table"), [("Rules", registry._RULES), ("Refused", registry._REFUSALS)])
def test_the_tables_are_those_of_the_registry(heading: str, table: dict[registry.Target, Any]) -> None:
    assert lipdp_lightning.layers is not None  # registers the rules of our own layers
    written = first_column(section("docs/layers.md", heading)) - {"MaxMin"}  # which is a GroupSort
    assert public(table) - written == set(), "not in docs/layers.md"
    assert written - public(table) == set(), "in docs/layers.md only"


def test_every_loss_is_in_the_table() -> None:
    assert first_column(section("docs/layers.md", "Losses")) == set(LOSSES)


def test_constants_of_the_activations_are_those_of_the_code() -> None:
    from lipdp_lightning.bounds.rules import activations

    text = section("docs/layers.md", "Rules")
    for name in ("SELU", "GELU_ERF", "GELU_TANH", "SILU", "MISH"):
        assert f"{getattr(activations, name):.6f}" in text, name


def test_every_setting_of_a_run_is_explained() -> None:
    """In the help text, of which the docstring is the source; settings.md treats the ones that need judgement."""
    from lipdp_lightning.training.settings import PrivacySettings

    described = set(re.findall(r"^\s+(\w+): ", inspect.getdoc(PrivacySettings) or "", re.MULTILINE))
    assert set(inspect.signature(PrivacySettings).parameters) <= described
