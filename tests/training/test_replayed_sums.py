"""Runs that are continued with other code: no step is released twice with the same noise and another sum."""

from __future__ import annotations

import importlib.util
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Blobs, Crash, Gradients, fit, make_module, make_plan
from torch import Tensor, nn

from lipdp_lightning.callbacks import ResumeCheckpoint
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.privacy.digests import PendingDigest
from lipdp_lightning.training import context
from lipdp_lightning.training.context import code_digest

LONG = make_plan(steps=120)
ONCE = {"max_steps": 8}
LAST = "checkpoints/last.ckpt"


def session(
    directory: Path, *callbacks: Callback, crash: int | None = None, record: bool = True, **options: Any
) -> Any:
    """Start or continue a run that is saved before its first step and after its third; the trainer, if it ends."""
    directory.mkdir(exist_ok=True)
    keeper = ResumeCheckpoint(directory / "checkpoints", every_n_steps=3)
    checkpoint = directory / LAST if (directory / LAST).exists() else None
    chosen = (
        {"checkpoint": checkpoint, "trainer_options": ONCE} | ({"directory": directory} if record else {}) | options
    )
    if crash is None:
        return fit(chosen.pop("plan", LONG), *callbacks, keeper, **chosen)[1]
    with pytest.raises(InterruptedError):
        fit(chosen.pop("plan", LONG), *callbacks, Crash(crash), keeper, **chosen)
    return None


class Switched(Blobs):
    """Rows that a value outside of the code changes on their way into a step."""

    flipped = False

    def transform_batch(self, x: Tensor) -> Tensor:
        x = super().transform_batch(x)
        return x * 1.001 if type(self).flipped else x


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Changes what examples contribute in a way that no digest of code or data can see."""
    monkeypatch.setattr(Switched, "flipped", False)
    return lambda: monkeypatch.setattr(Switched, "flipped", True)


def differ_by_fresh_noise(first: Tensor | None, second: Tensor | None) -> bool:
    """Whether noise of deviation 1, over the batch of 20, is in the difference of two releases of like sums."""
    assert first is not None and second is not None
    return bool((20 * (first - second)).abs().mean() > 0.3)


# ---- changes that show in the sum alone


@pytest.mark.parametrize("chunks", [1, 3])
def test_another_sum_at_a_step_on_record_is_refused_before_its_release(
    tmp_path: Path, switch: Any, chunks: int
) -> None:
    options = {} if chunks == 1 else {"physical_batch_size": 7}
    session(tmp_path, crash=5, data=Switched(), **options)
    switch()
    seen = Gradients()
    with pytest.raises(ValueError, match=r"step 3 of this run was released before.*code.*HINT"):
        session(tmp_path, seen, data=Switched(), **options)
    assert not seen.before_step, "it was released"
    trainer = session(tmp_path, data=Switched(), **options)
    branches = trainer.strategy.branches
    assert trainer.global_step == 8 and branches.count == 2 and branches.spent(8) == 50 + 8 - 3


def test_without_a_record_another_sum_draws_other_noise(tmp_path: Path, switch: Any) -> None:
    """A run without a directory has no record of its steps: the key of the noise has the sum in it."""
    first, same, second = Gradients(), Gradients(), Gradients()
    session(tmp_path, first, crash=5, record=False, data=Switched())
    saved = (tmp_path / LAST).read_bytes()
    session(tmp_path, same, crash=5, record=False, data=Switched())
    assert torch.equal(first.before_step[3], same.before_step[0])  # type: ignore[arg-type]
    (tmp_path / LAST).write_bytes(saved)
    switch()
    session(tmp_path, second, crash=5, record=False, data=Switched())
    assert differ_by_fresh_noise(first.before_step[3], second.before_step[0])


class KeyedByTheState(Mechanism):
    """Leaves the sum out of the key."""

    def _contribution(self, *sums: Any) -> PendingDigest:
        return PendingDigest([b"any sum"])


def test_noise_keyed_by_the_state_alone_fails_the_same_check(
    tmp_path: Path, switch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lipdp_lightning.training.private_steps.Mechanism", KeyedByTheState)
    first, second = Gradients(), Gradients()
    session(tmp_path, first, crash=5, record=False, data=Switched())
    switch()
    session(tmp_path, second, crash=5, record=False, data=Switched())
    assert not differ_by_fresh_noise(first.before_step[3], second.before_step[0])


def test_a_run_that_did_not_repeat_itself_tries_no_replay_again(tmp_path: Path, switch: Any) -> None:
    """Each later start takes a new secret at once: software that is not deterministic is refused once, not always."""
    session(tmp_path, crash=5, data=Switched())
    switch()
    with pytest.raises(ValueError, match="released before"):
        session(tmp_path, data=Switched())
    session(tmp_path, crash=5, data=Switched())
    trainer = session(tmp_path, data=Switched())
    assert trainer.global_step == 8 and trainer.strategy.branches.count == 3


def test_one_bit_of_one_gradient_or_vote_is_another_contribution() -> None:
    from private_step import Harness, mlp, random_batch
    from private_step import make_plan as plan_of

    def digest(change: Any = None) -> bytes:
        torch.manual_seed(0)
        tracked = {"scaling": "radius", "radius_quantile": 0.5, "radius_noise_multiplier": 4.0}
        own = Harness(mlp(), (12,), plan_of(**tracked), kind=Mechanism)
        own.accumulate(random_batch(9, (12,), 5))
        votes = torch.tensor([0.5, -1.0], dtype=torch.float64)
        named = dict(own.module.network.named_parameters())
        apart = {named["1.weight"]: torch.ones(16, 12, dtype=torch.float64)}
        if change is not None:
            change(named, apart, votes)
        own.mechanism.scaling.take_sums = lambda: apart  # type: ignore[method-assign]
        own.mechanism.scaling.take_votes = lambda device: votes  # type: ignore[method-assign]
        found = bytes(own.mechanism._contribution(own.mechanism._sums(own.mechanism.numbers())))
        own.mechanism.close()
        return found

    def of_grad(named: Any, apart: Any, votes: Tensor) -> None:
        flat = named["5.weight"].grad.view(-1)
        flat[3] = torch.nextafter(flat[3], torch.tensor(9.0))

    def of_apart(named: Any, apart: Any, votes: Tensor) -> None:
        next(iter(apart.values()))[0, 0] += 2.0**-50

    def of_vote(named: Any, apart: Any, votes: Tensor) -> None:
        votes[1] += 0.5

    def of_missing(named: Any, apart: Any, votes: Tensor) -> None:
        named["3.bias"].grad = None

    assert digest() == digest()
    assert len({digest(c) for c in (None, of_grad, of_apart, of_vote, of_missing)}) == 5


def test_the_record_is_its_owners_and_holds_no_digest_without_the_secret(tmp_path: Path) -> None:
    """Two runs with the same sums and different secrets have nothing in common on record."""
    for name, secret in (("a", bytes(range(16))), ("b", bytes(16))):
        session(tmp_path / name, fixed_secret=secret, plan=make_plan(steps=12, expected_batch_size=60))
    lines = [(tmp_path / n / "steps.txt").read_text().split() for n in "ab"]
    assert stat.S_IMODE((tmp_path / "a" / "steps.txt").stat().st_mode) == 0o600
    assert len(lines[0]) == len(lines[1]) == 24 and not set(lines[0][2::3]) & set(lines[1][2::3])


# ---- changed files

FILES = {
    "edited_loss": "from torch.nn import functional\nSCALE = 1.0\n\n\ndef scaled(x):\n    return x * SCALE\n",
    "edited_data": "from edited_loss import scaled\nfrom small_runs import Blobs\n\n\nclass Own(Blobs):\n"
    "    def transform_batch(self, x):\n        return scaled(super().transform_batch(x))\n",
    "edited_views": "from lipdp_lightning.augmentations import Augmentation\n\n\nclass Turned(Augmentation):\n"
    "    def forward(self, x, draws):\n        return x * 1.0\n",
    "edited_module": "from lipdp_lightning.training import PrivateModule\n\n\nclass OwnModule(PrivateModule):\n"
    "    extra = 1\n",
    "unrelated": "VALUE = 1\n",
}
EDITS = {
    "edited_loss": ("SCALE = 1.0", "SCALE = 1.001"),
    "edited_data": ("scaled(super().transform_batch(x))", "1.001 * scaled(super().transform_batch(x))"),
    "edited_views": ("x * 1.0", "x * 1.001"),
    "edited_module": ("extra = 1", "extra = 2"),
}


@pytest.fixture
def user_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A user's project: a function that writes its files, with an edit, and imports them as a new process would."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

    def written(name: str = "", edit: tuple[str, str] = ("", "")) -> dict[str, ModuleType]:
        for own, text in FILES.items():
            (folder / f"{own}.py").write_text(text.replace(*edit) if own == name else text)
        found = {}
        for own in FILES:
            sys.modules.pop(own, None)
        for own in FILES:
            spec = importlib.util.spec_from_file_location(own, folder / f"{own}.py")
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[own] = module
            # no bytecode: two edits within a second would look alike to its time stamp
            exec(compile((folder / f"{own}.py").read_text(), f"{own}.py", "exec"), module.__dict__)
            found[own] = module
        return found

    yield written
    for own in FILES:
        sys.modules.pop(own, None)


def start(directory: Path, project: dict[str, ModuleType], *callbacks: Callback, **options: Any) -> Any:
    from lipdp_lightning.callbacks import AugmentationMultiplicity

    views = AugmentationMultiplicity(2, [project["edited_views"].Turned()])
    module = make_module(kind=project["edited_module"].OwnModule)
    return session(directory, *callbacks, views, module=module, data=project["edited_data"].Own(), **options)


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_file_makes_a_branch_with_fresh_noise(tmp_path: Path, user_files: Any, name: str) -> None:
    first, second = Gradients(), Gradients()
    start(tmp_path / "run", user_files(), first, crash=5)
    trainer = start(tmp_path / "run", user_files(name, EDITS[name]), second)
    branches = trainer.strategy.branches
    assert branches.count == 2 and branches.spent(8) == 50 + 8 - 3
    assert differ_by_fresh_noise(first.before_step[3], second.before_step[0])


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("", ("", "")),
        ("unrelated", ("1", "2")),
        ("edited_data", ("):\n        return", "):  # a comment\n        return")),
    ],
)
def test_files_that_say_the_same_repeat_the_run(
    tmp_path: Path, user_files: Any, name: str, edit: tuple[str, str]
) -> None:
    first, second = Gradients(), Gradients()
    start(tmp_path / "run", user_files(), first, crash=5)
    trainer = start(tmp_path / "run", user_files(name, edit), second)
    assert trainer.strategy.branches.count == 1
    assert torch.equal(first.before_step[3], second.before_step[0])  # type: ignore[arg-type]
    assert torch.equal(first.before_step[4], second.before_step[1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "packages"),
    [("late_package", 1), ("late_package", 0), ("late_package/inner", 1), ("late_package/inner", 0),
     ("late_package/inner/innermost", 0), ("late_package/inner/innermost", 2)],
)  # fmt: skip
def test_an_import_within_a_function_counts_before_it_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, packages: int
) -> None:
    """So many of the folders, from the outermost on, are packages; the others are namespaces without __init__.py."""
    monkeypatch.syspath_prepend(tmp_path)
    folder, dotted = tmp_path / place, place.replace("/", ".")
    folder.mkdir(parents=True)
    for level in range(1, packages + 1):
        tmp_path.joinpath(*place.split("/")[:level], "__init__.py").write_text("")
    (folder / "part.py").write_text("X = 1\n")
    (tmp_path / "late_user.py").write_text(f"def f():\n    from {dotted} import part\n    return part.X\n")
    spec = importlib.util.spec_from_file_location("late_user", tmp_path / "late_user.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "late_user", module)
    spec.loader.exec_module(module)
    holder = nn.Module()
    holder.__dict__["transforms"] = [module.f]
    before = code_digest([holder])
    (folder / "part.py").write_text("X = 2\n")
    after = code_digest([holder])
    assert after != before != code_digest([nn.Module()])
    for level in range(1, packages + 1):
        tmp_path.joinpath(*place.split("/")[:level], "__init__.py").write_text("Y = 1\n")
        assert code_digest([holder]) != after, "a package around it runs, too"
    importlib.invalidate_caches()
    module.f()
    assert f"{dotted}.part" in sys.modules
    again = code_digest([holder])
    for name in [name for name in sys.modules if name.startswith("late_package")]:
        sys.modules.pop(name)
    assert code_digest([holder]) == again, "what is imported already decides"


def test_the_digest_has_the_versions_of_imported_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest([Switched()])
    monkeypatch.setattr(context, "_version", lambda package: f"another {package}")
    assert code_digest([Switched()]) != before


def test_the_code_of_this_project_is_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest([])
    monkeypatch.setattr(context, "_own_code", lambda: b"another line")
    assert code_digest([]) != before


# ---- kill -9

RUN = """
import sys
from pathlib import Path
import torch
from small_runs import Slowly, fit, make_module, make_plan
from lipdp_lightning.callbacks import ResumeCheckpoint
from edited_data import Own
from small_runs import Gradients

directory, out = Path(sys.argv[1]), Path(sys.argv[2])
last = directory / "checkpoints" / "last.ckpt"


class Kept(Gradients):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        super().on_before_optimizer_step(trainer, pl_module, optimizer)
        torch.save(self.before_step[-1], out / f"{trainer.global_step}.pt")


module, trainer = fit(
    make_plan(steps=120), Kept(), Slowly(0.1), ResumeCheckpoint(directory / "checkpoints", every_n_steps=3),
    directory=directory, checkpoint=last if last.exists() else None, data=Own(), trainer_options={"max_steps": 9},
    fixed_secret=None,
)
print("branches", trainer.strategy.branches.count)
"""


def launched(tmp_path: Path, out: str) -> subprocess.Popen[str]:
    (tmp_path / out).mkdir()
    (tmp_path / "run").mkdir(exist_ok=True)
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, [tmp_path / "project", root / "tests", root]))
    return subprocess.Popen(
        [sys.executable, "-B", "-c", RUN, str(tmp_path / "run"), str(tmp_path / out)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "edited_loss"])
def test_a_killed_run_whose_file_was_edited_draws_fresh_noise(tmp_path: Path, name: str) -> None:
    (tmp_path / "project").mkdir()
    for own, text in FILES.items():
        (tmp_path / "project" / f"{own}.py").write_text(text)
    first, end = launched(tmp_path, "first"), time.monotonic() + 120
    while not (tmp_path / "first" / "5.pt").exists() and time.monotonic() < end:
        assert first.poll() is None, first.communicate()[0]
        time.sleep(0.01)
    first.kill()
    first.communicate()
    if name:
        (tmp_path / "project" / f"{name}.py").write_text(FILES[name].replace(*EDITS[name]))
    second = launched(tmp_path, "second")
    said, _ = second.communicate(timeout=120)
    assert second.returncode == 0 and f"branches {2 if name else 1}" in said, said
    steps = range(int(min(f.stem for f in (tmp_path / "second").iterdir())), 5)
    assert len(steps) >= 2
    for step in steps:
        one, other = (torch.load(tmp_path / part / f"{step}.pt") for part in ("first", "second"))
        assert differ_by_fresh_noise(one, other) if name else torch.equal(one, other)


def test_a_script_outside_of_the_repository_finds_the_code_of_this_project(tmp_path: Path) -> None:
    """An installation in development is found by a finder of its own, and not by the folders of sys.path."""
    script = tmp_path / "script.py"
    script.write_text("from lipdp_lightning.training.context import code_digest\nprint(len(code_digest([])))\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    if "No module named 'lipdp_lightning'" in result.stderr:
        pytest.skip("this project is not installed")
    assert result.stdout.strip() == "32", result.stderr
