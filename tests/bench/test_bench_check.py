"""The regression guard: a slower step fails it, the same step does not, and a bad file of bounds is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lipdp_lightning.bench import check as guard
from lipdp_lightning.bench.check import OWN_BOUNDS, Bound, check, printed, read_bounds, with_room
from lipdp_lightning.bench.contender_rows import FAILED, Row
from lipdp_lightning.bench.contenders import Job
from lipdp_lightning.cli import main

OWN = """
from lipdp_lightning.bench.contenders import _trains, torch_loop, sgd
import torch.nn.functional as F

def passes(number):
    def make(job, model):
        optimizer = sgd(model.parameters())
        def step(x, y):
            optimizer.zero_grad(set_to_none=True)
            for _ in range(number):
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return step
    return _trains(make)

same, doubled = passes(1), passes(2)
"""


def bounds_file(folder: Path, at_most: float, names: Sequence[str]) -> Path:
    entries = [
        f"- {{name: {n} step, quantity: step_time, model: mlp-512x4, batch_size: 128, contender: 'own:{n}', "
        f"at_most: {at_most}}}"
        for n in names
    ]
    file = folder / "bounds.yaml"
    file.write_text("\n".join(entries))
    return file


@pytest.mark.slow
def test_a_slowed_step_exceeds_its_bound_and_the_same_step_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    file = bounds_file(tmp_path, 1.4, ("same", "doubled"))
    assert main(["bench", "--check", str(file), "--repeats", "5"]) == 1
    table, *_ = capsys.readouterr().out.split("doubled step:")
    verdicts = {line.split()[0]: "EXCEEDED" in line for line in table.splitlines() if " step " in line}
    assert verdicts == {"same": False, "doubled": True}


BOUND = Bound("ours", "step_time", at_most=1.2, model="mlp-8x2", batch_size=8, contender="joint")
MEMORY = Bound("memory", "peak_memory", at_most=1.2, model="mlp-8x2", batch_size=8, contender="joint")


def measured(monkeypatch: pytest.MonkeyPatch, ratios: Sequence[float], status: str = "ok") -> list[int]:
    """Let each measurement find the next ratio; how many rounds each was given."""
    rounds: list[int] = []

    def cell(jobs: Sequence[Job], effort: guard.Effort, memory_of: set[str]) -> list[Row]:
        assert memory_of in (set(), {"torch", "joint"})
        ratio = ratios[len(rounds)]
        rounds.append(effort.rounds)
        plain = Row("mlp-8x2", 8, "torch", round_seconds=dict.fromkeys(range(3), 1.0), peak_memory=100)
        ours = dict.fromkeys(range(3), ratio)
        row = Row("mlp-8x2", 8, "joint", status, round_seconds=ours, peak_memory=round(100 * ratio))
        return [plain, row]

    monkeypatch.setattr(guard, "measure_cell", cell)
    return rounds


@pytest.mark.parametrize(
    ("ratios", "kept", "times"), [([1.1], True, 1), ([1.3, 1.1], True, 2), ([1.3, 1.25], False, 2)]
)
def test_what_exceeds_its_bound_is_measured_once_more(
    ratios: list[float], kept: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = measured(monkeypatch, ratios)
    verdicts = check([BOUND, MEMORY], rounds=3)
    assert [v.kept for v in verdicts] == [kept, kept]
    assert [v.ratio for v in verdicts] == [pytest.approx(ratios[-1])] * 2
    assert rounds == [3, 6][:times]
    assert ("1.25" in printed(verdicts).splitlines()[-1]) == (not kept)


@pytest.mark.parametrize(
    ("ratios", "kept"),
    [
        ((1.25, 1.26, 1.25, 1.24), False),  # a quiet machine, and a step that is slower
        ((1.21, 1.3, 1.5, 1.24), True),  # a machine whose rounds differ by more than what exceeds the bound
        ((2.4, 2.5, 3.0, 2.6), False),  # no such noise makes up for a step that takes twice as long
    ],
)
def test_noise_excuses_a_ratio_by_as_much_as_the_rounds_differ(ratios: Sequence[float], kept: bool) -> None:
    over = Row("mlp-8x2", 8, "torch", round_seconds=dict.fromkeys(range(4), 1.0))
    assert guard._verdict(BOUND, Row("mlp-8x2", 8, "joint", round_seconds=dict(enumerate(ratios))), over).kept is kept
    faster = Bound("ours", "step_time", at_least=1 / 1.2, model="mlp-8x2", batch_size=8, contender="joint")
    inverse = {turn: 1 / ratio for turn, ratio in enumerate(ratios)}
    assert guard._verdict(faster, Row("mlp-8x2", 8, "joint", round_seconds=inverse), over).kept is kept


def test_room_loosens_the_limits_of_step_times_alone() -> None:
    least = Bound("advantage", "step_time", at_least=8, model="mlp-8x2", batch_size=8, contender="opacus", over="joint")
    loosened = with_room([BOUND, MEMORY, least], 1.5)
    assert [(b.at_most, b.at_least) for b in loosened] == [(pytest.approx(1.8), None), (1.2, None), (None, 8 / 1.5)]


@pytest.mark.parametrize("room", ["0.9", "nan", "inf", "-2"])
def test_bad_room_is_refused(room: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--check", "--room", room]) == 2
    assert f"--room {float(room)} is not a number of at least 1" in capsys.readouterr().err


def test_a_contender_that_cannot_run_keeps_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, [1.0, 1.0], status=FAILED)
    verdicts = check([BOUND], rounds=3)
    assert not verdicts[0].kept and "cannot run" in verdicts[0].note


def test_a_lower_bound_is_one() -> None:
    faster = Bound("hooks", "step_time", at_least=5.0)
    assert faster.kept_by(6.0) and not faster.kept_by(4.0) and not faster.kept_by(float("nan"))


def test_the_bounds_of_the_library_say_what_the_guard_promises() -> None:
    bounds = read_bounds(OWN_BOUNDS)
    assert {(b.quantity, b.model) for b in bounds} == {
        ("step_time", "convnet-1.6m"), ("peak_memory", "convnet-1.6m"), ("step_time", "mlp-table"),
        ("start_up", ""), ("help", ""),
    }  # fmt: skip
    assert ("opacus", "joint") in {(b.contender, b.over) for b in bounds}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- {name: a", "not YAML"),
        ("name: a", "not a list"),
        ("- {name: a, quantity: speed, at_most: 1}", "quantity 'speed'"),
        ("- {name: a, quantity: help}", "neither at_most nor at_least"),
        ("- {name: a, quantity: help, at_most: -1, at_mots: 2}", "(?s)at_mots.*-1 is not a positive"),
        ("- {quantity: step_time, at_most: 2, model: alexnet, batch_size: 0, contender: ours}",
         "(?s)no name.*alexnet.*batch_size 0.*contender ours"),
    ],
)  # fmt: skip
def test_a_bad_file_of_bounds_is_refused(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "bounds.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=named) as error:
        read_bounds(file)
    assert "HINT" in str(error.value)


def test_a_missing_file_of_bounds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--check", "none_such.yaml"]) == 2
    assert "none_such.yaml" in capsys.readouterr().err
