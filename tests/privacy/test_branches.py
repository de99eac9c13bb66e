"""What interruptions cost: lipdp_lightning/privacy/branches.py. The count may be high; it may never be low."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lipdp_lightning.privacy.branches import RESERVED_AT_ONCE, Branches, ResumeState

PLAN = "plan"
PLANNED = 120


def hashed(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class Stop(Exception):
    """The process is killed here."""


@dataclass
class World:
    """All that a run released, whoever remembers it; sessions of a run are driven as PrivateStrategy drives them.

    The weights after a step are a function of the weights before it, the secret, the step and the context, so two
    sessions release the same only if they agree in all of these.
    """

    kind: type[Branches]
    path: Path | None
    fixed: bytes | None = None
    released: set[tuple[bytes, str, int, str]] = field(default_factory=set)
    samples: dict[tuple[bytes, int], set[tuple[bytes, str]]] = field(default_factory=dict)
    checkpoints: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    secrets: int = 0

    def fresh_secret(self) -> bytes:
        self.secrets += 1
        return self.fixed or self.secrets.to_bytes(16, "big")

    def session(
        self, steps: int, context: bytes = b"c", resume: int | None = None, crash: bool = False, every: int = 7
    ) -> Branches | None:
        """Train up to ``steps`` steps, from a checkpoint or from the start; None where the branch is refused."""
        saved, weights = self.checkpoints[resume] if resume is not None else (None, "initial weights")
        restored = None if saved is None else ResumeState.from_dict(json.loads(json.dumps(saved, default=bytes.hex)))
        if restored is not None and saved is not None:
            restored = replace(restored, secret=saved["secret"], context=saved["context"])
        branches = self.kind(self.path)
        try:
            branches.open(restored, context, PLAN, PLANNED, self.fresh_secret(), self.fixed is not None)
        except ValueError as error:
            if "are spent" not in str(error):
                raise
            return None
        step = restored.step if restored is not None else 0
        self._save(branches, step, weights)  # as ResumeCheckpoint does, before the first step
        for _ in range(steps):
            if step >= min(PLANNED, branches.limit()):
                break
            branches.reserve(step)
            self._release(branches, context, step, weights)
            weights = hashed(weights, branches.secret, context, step)
            step += 1
            self._compare(branches, step)
            if step % every == 0:
                self._save(branches, step, weights)
        if not crash:
            branches.finish(step)
            self._save(branches, step, weights)
            self._compare(branches, step)
        return branches

    def _save(self, branches: Branches, step: int, weights: str) -> None:
        self.checkpoints.append((branches.state(step, {}).to_dict(), weights))

    def _release(self, branches: Branches, context: bytes, step: int, weights: str) -> None:
        self.released.add((branches.secret, context.hex(), step, weights))
        self.samples.setdefault((branches.secret, step), set()).add((context, weights))

    def _compare(self, branches: Branches, step: int) -> None:
        if branches.spent(step) < len(self.released):
            self.problems.append(f"{branches.spent(step)} counted at step {step}, {len(self.released)} released")
        if any(len(releases) > 1 for releases in self.samples.values()):
            self.problems.append("two releases on one Poisson sample")
        if branches.spent(step) > PLANNED:
            self.problems.append(f"{branches.spent(step)} counted of {PLANNED} planned")


def wander(world: World, seed: int) -> None:
    """A random history: sessions of any length, crashes, resumes from any checkpoint, changed or not."""
    chance = random.Random(seed)
    for _ in range(chance.randint(1, 6)):
        has = bool(world.checkpoints) and (world.path is None or chance.random() < 0.85)
        world.session(
            steps=chance.choice([0, 1, 3, 20, 60, PLANNED]),
            context=chance.choice([b"c", b"c", b"d", b"e"]),
            resume=chance.randrange(len(world.checkpoints)) if has else None,
            crash=chance.random() < 0.6,
            every=chance.choice([1, 7, 31]),
        )


def problems_of(kind: type[Branches], seeds: Iterable[int], fixed: bytes | None = None) -> list[str]:
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            world = World(kind, Path(folder) / "ledger.json", fixed)
            wander(world, seed)
            if world.problems:
                return [f"seed {seed}", *world.problems]
    return []


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("fixed", [None, bytes(range(16))])
def test_the_count_is_never_short(fixed: bytes | None) -> None:
    assert problems_of(Branches, range(250), fixed) == []


def test_the_count_is_never_short_without_a_run_directory() -> None:
    for seed in range(100):
        world = World(Branches, None)
        world.session(steps=random.Random(-seed).randint(1, 40), crash=seed % 2 == 0)
        wander(world, seed)
        assert [p for p in world.problems if "planned" not in p] == []


# ---- broken variants of the record fail the same check


class NotReserved(Branches):
    """Written when the session ends, not before the step."""

    def reserve(self, step: int) -> None:
        assert self._current is not None
        self._current.reached = max(self._current.reached, step + 1)


class ForgetsHowFarItWent(Branches):
    def finish(self, step: int) -> None:
        assert self._current is not None
        self._current.reached = step
        self._write()


class KeepsTheSecret(Branches):
    """Continues with the secret of the checkpoint whatever has changed."""

    def open(self, restored: ResumeState | None, context: bytes, *rest: Any) -> None:
        super().open(None if restored is None else replace(restored, context=context), context, *rest)


class CountsItself(Branches):
    """Leaves out the steps of other branches."""

    def _of_others(self) -> int:
        return 0


class StartsFromZero(Branches):
    """A branch counts from the checkpoint it is resumed from, not from where it began."""

    def open(self, restored: ResumeState | None, *rest: Any) -> None:
        super().open(restored, *rest)
        assert self._current is not None
        self._current.start = restored.step if restored is not None else 0


class SameFixedSecret(Branches):
    def _unused(self, secret: bytes) -> bytes:
        return secret


class NoLimit(Branches):
    def limit(self) -> int:
        return self._planned_steps


@pytest.mark.parametrize(
    "kind", [NotReserved, ForgetsHowFarItWent, KeepsTheSecret, CountsItself, StartsFromZero, NoLimit]
)
def test_broken_records_are_short(kind: type[Branches]) -> None:
    assert problems_of(kind, range(250)) != []


def test_a_fixed_secret_in_every_branch_repeats_the_samples() -> None:
    assert problems_of(SameFixedSecret, range(250), bytes(range(16))) != []
    assert problems_of(SameFixedSecret, range(20)) == []  # fresh secrets are apart anyway


# ---- single histories


@pytest.fixture
def run(tmp_path: Path) -> World:
    return World(Branches, tmp_path / "ledger.json")


def test_an_uninterrupted_run_counts_its_steps_exactly(run: World) -> None:
    branches = run.session(PLANNED)
    assert branches is not None and branches.count == 1
    assert branches.spent(PLANNED) == len(run.released) == PLANNED
    assert json.loads(run.path.read_text())["branches"][0]["reached"] == PLANNED  # type: ignore[union-attr]


def test_an_end_in_good_order_and_the_same_resume_cost_nothing(run: World) -> None:
    run.session(33)
    branches = run.session(PLANNED, resume=len(run.checkpoints) - 1)
    assert branches is not None
    assert branches.count == 1 and branches.spent(PLANNED) == len(run.released) == PLANNED


def test_an_earlier_checkpoint_replays_for_nothing(run: World) -> None:
    run.session(60)
    first = run.session(10, resume=2)  # step 14
    assert first is not None and first.spent(24) == len(run.released) == 60
    last = run.session(PLANNED, resume=2)
    assert last is not None and last.spent(PLANNED) == len(run.released) == PLANNED


def test_a_crash_counts_what_was_reserved_and_a_same_resume_repeats_it(run: World) -> None:
    run.session(20, crash=True)
    on_disk = json.loads(run.path.read_text())["branches"]  # type: ignore[union-attr]
    assert [b["reached"] for b in on_disk] == [RESERVED_AT_ONCE]
    branches = run.session(15, resume=1)  # step 7
    assert branches is not None and branches.spent(22) == RESERVED_AT_ONCE > len(run.released)
    branches = run.session(PLANNED, resume=1)
    assert branches is not None and branches.spent(PLANNED) == len(run.released) == PLANNED


def test_a_changed_resume_is_a_branch_with_a_secret_of_its_own(run: World) -> None:
    first = run.session(40)
    changed = run.session(PLANNED, context=b"d", resume=3)  # step 21
    assert first is not None and changed is not None
    assert changed.secret != first.secret and changed.count == 2
    # 50 of the first branch were reserved when its checkpoint was written; the second ends when 120 are spent
    assert changed.limit() == 120 - RESERVED_AT_ONCE + 21
    assert changed.spent(changed.limit()) == PLANNED == len(run.released) + RESERVED_AT_ONCE - 40


def test_a_budget_that_is_spent_admits_no_branch(run: World) -> None:
    run.session(PLANNED)
    assert run.session(1, context=b"d", resume=3) is None
    branches = Branches(run.path)
    with pytest.raises(ValueError, match=r"120 steps are spent.*HINT"):
        branches.open(None, b"d", PLAN, PLANNED, bytes(16), False)


def test_no_step_beyond_the_limit_is_reserved(run: World) -> None:
    """Whoever drives the steps: a Trainer without the accountant callback, min_steps above the budget."""
    run.session(40)
    branches = Branches(run.path)
    branches.open(None, b"d", PLAN, PLANNED, b"x" * 16, False)
    for step in range(80):
        branches.reserve(step)
    with pytest.raises(ValueError, match=r"step 80 is not in the budget.*HINT"):
        branches.reserve(80)
    assert branches.spent(80) == PLANNED


def test_a_crash_before_the_first_checkpoint_starts_a_second_branch(run: World) -> None:
    run.session(5, crash=True)
    run.checkpoints.clear()
    branches = run.session(PLANNED)
    assert branches is not None and branches.count == 2
    assert branches.limit() == PLANNED - RESERVED_AT_ONCE


def test_a_crash_before_the_first_step_costs_nothing(run: World) -> None:
    run.session(0, crash=True)
    branches = run.session(PLANNED, resume=0)
    assert branches is not None and len(run.released) == PLANNED == branches.limit()


def test_a_new_branch_that_crashed_before_its_first_step_costs_nothing(run: World) -> None:
    run.session(40)
    run.session(0, context=b"d", resume=len(run.checkpoints) - 1, crash=True)
    branches = run.session(PLANNED, context=b"d", resume=len(run.checkpoints) - 1)
    assert branches is not None and branches.spent(branches.limit()) == len(run.released) == PLANNED


# ---- copies, losses, damage


def copy_of(run: World, folder: Path) -> World:
    assert run.path is not None
    shutil.copytree(run.path.parent, folder)
    return replace(
        run, path=folder / run.path.name, released=set(run.released), checkpoints=list(run.checkpoints), secrets=100
    )


def test_a_copied_directory_takes_a_secret_of_its_own(tmp_path: Path) -> None:
    original = World(Branches, tmp_path / "run" / "ledger.json")
    (tmp_path / "run").mkdir()
    first = original.session(40)
    copied = copy_of(original, tmp_path / "copy")
    assert first is not None
    second = copied.session(PLANNED, resume=len(copied.checkpoints) - 1)
    assert second is not None and second.secret != first.secret and second.count == 2
    third = original.session(PLANNED, resume=len(original.checkpoints) - 1)
    assert third is not None and third.secret == first.secret
    # the two records together cover all that both runs released
    assert second.spent(PLANNED) + third.spent(PLANNED) >= len(original.released | copied.released)
    assert second.spent(PLANNED) >= len(copied.released) == PLANNED


def test_a_moved_directory_keeps_its_secret(tmp_path: Path) -> None:
    run = World(Branches, tmp_path / "run" / "ledger.json")
    (tmp_path / "run").mkdir()
    first = run.session(40)
    os.rename(tmp_path / "run", tmp_path / "renamed")
    run.path = tmp_path / "renamed" / "ledger.json"
    second = run.session(PLANNED, resume=len(run.checkpoints) - 1)
    assert first is not None and second is not None and second.secret == first.secret


def test_a_lost_record_is_refused(run: World) -> None:
    run.session(100)
    assert run.path is not None
    for record in (None, json.dumps({"plan": PLAN, "branches": []})):
        run.path.unlink()
        if record is not None:
            run.path.write_text(record)
        for context in (b"c", b"d"):
            with pytest.raises(ValueError, match=r"missing, or older.*HINT"):
                run.session(5, context=context, resume=2)
        run.path.write_text("")


def test_without_a_run_directory_a_change_is_refused_and_the_rest_repeats() -> None:
    run = World(Branches, None)
    run.session(60)
    assert run.session(1, context=b"d", resume=3) is None  # nobody knows how far the first one went
    branches = run.session(PLANNED, resume=3)
    assert branches is not None and branches.count == 1
    assert branches.spent(30) == PLANNED  # assumed
    assert len(run.released) == PLANNED


def test_a_checkpoint_from_a_run_without_a_record_is_taken_for_complete(tmp_path: Path) -> None:
    run = World(Branches, None)
    run.session(60)
    run.path = tmp_path / "ledger.json"
    assert run.session(1, resume=3) is None


def test_a_checkpoint_of_another_directory_brings_its_branches_along(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    run = World(Branches, tmp_path / "a" / "ledger.json")
    run.session(40)
    run.path = tmp_path / "b" / "ledger.json"
    branches = run.session(PLANNED, resume=len(run.checkpoints) - 1)
    assert branches is not None and branches.count == 2 and branches.spent(PLANNED) == PLANNED


def test_another_plan_is_refused_in_the_checkpoint_and_in_the_record(run: World) -> None:
    run.session(10)
    restored = ResumeState.from_dict(run.checkpoints[-1][0])
    for state, path in ((restored, None), (None, run.path)):
        with pytest.raises(ValueError, match=r"another privacy plan.*HINT"):
            Branches(path).open(state, b"c", "other", PLANNED, bytes(16), False)


DAMAGE: list[Callable[[str], str | bytes]] = [
    lambda text: text[: len(text) // 2],
    lambda text: "",
    lambda text: "null",
    lambda text: "[]",
    lambda text: "{}",
    lambda text: '{"branches": null}',
    lambda text: '{"branches": ["a"]}',
    lambda text: b"\xff\xfe\x00",
    lambda text: text.replace('"reached": 60', '"reached": -1'),
    lambda text: text.replace('"reached": 60', '"reached": NaN'),
    lambda text: text.replace('"reached": 60', '"reached": 59.5'),
    lambda text: text.replace('"reached": 60', '"reached": "60"'),
    lambda text: text.replace('"reached": 60', '"reached": null'),
    lambda text: text.replace('"start": 0', '"start": 61'),
    lambda text: text.replace('"start": 0', '"unknown": 0'),
    lambda text: json.dumps({"branches": 2 * json.loads(text)["branches"]}),
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_refused(run: World, damage: Callable[[str], str | bytes]) -> None:
    run.session(60)
    assert run.path is not None
    harmed = damage(run.path.read_text())
    assert harmed != run.path.read_text()
    run.path.write_bytes(harmed if isinstance(harmed, bytes) else harmed.encode())
    with pytest.raises(ValueError, match=r"cannot be read.*HINT"):
        Branches(run.path)


def test_the_record_is_replaced_whole_and_written_through(run: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run.session(10)
    assert run.path is not None
    before = run.path.read_text()
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    def killed(source: Any, target: Any) -> None:
        assert json.loads(Path(source).read_text())["branches"]  # complete before it takes the place of the old one
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Stop):
            run.session(PLANNED, resume=len(run.checkpoints) - 1)
    assert run.path.read_text() == before and len(synced) == 1
    synced.clear()
    run.session(PLANNED, resume=len(run.checkpoints) - 1)
    assert len(synced) >= 2  # the file, and the directory that names it


def test_states_survive_a_checkpoint_and_do_not_follow_the_run(run: World) -> None:
    branches = run.session(10)
    assert branches is not None
    state = branches.state(10, {"1": 0.5})
    again = ResumeState.from_dict(state.to_dict())
    assert again == state and again.mechanism == {"1": 0.5}
    reached = state.branches[0].reached
    branches.reserve(reached)
    assert state.branches[0].reached == reached
    assert bytes(branches.secret) not in str(json.loads(run.path.read_text())).encode()  # type: ignore[union-attr]
    assert branches.secret.hex() not in run.path.read_text()  # type: ignore[union-attr]
