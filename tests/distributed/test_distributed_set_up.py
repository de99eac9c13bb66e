"""What ranks must agree on, what they refuse together, and how a world ends when one of its processes does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worlds import THREADS, Worlds, free_port

from lipdp_lightning.experiment.experiment import parse_experiment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"mode": "distributed"}),
        pytest.param(4, {"mode": "replicated"}, marks=pytest.mark.slow),
        (2, {"mode": "replicated", "projection": "bjorck", "scaling": "layerwise"}),
        pytest.param(
            4, {"mode": "distributed", "projection": "frobenius", "scaling": "radius"}, marks=pytest.mark.slow
        ),
        (2, {"mode": "replicated", "scaling": "radius"}),
        (2, {"mode": "distributed", "precision": "bf16-mixed"}),
    ],
)
def test_ranks_hold_the_same_state_at_every_step(worlds: Worlds, size: int, options: dict[str, Any]) -> None:
    """Ranks start from other weights and buffers; rank 0's count, and projection keeps them equal to the last bit."""
    ranks = worlds.run("agreement", size, **options)
    assert len({rank["before"] for rank in ranks}) == size
    for name in ("states", "digests", "secret", "keys", "radii", "deviations"):
        assert all(rank[name] == ranks[0][name] for rank in ranks), name
    assert all(rank["buffer"] == [0.0, 0.0, 0.0] for rank in ranks)
    assert len(set(ranks[0]["states"])) == len(set(ranks[0]["digests"])) == 12
    if options.get("scaling") == "radius":
        assert len(set(ranks[0]["radii"].values())) > 1, "the radii were not tracked"


def test_every_run_takes_a_new_secret(worlds: Worlds) -> None:
    runs = [worlds.run("agreement", 2, mode=mode)[0]["secret"] for mode in ("distributed", "replicated")]
    assert runs[0] != runs[1]


def test_bf16_runs_and_keeps_the_sum_in_fp32(worlds: Worlds) -> None:
    one, *two = [*worlds.run("mixed", 1), *worlds.run("mixed", 2)]
    for run in (one, *two):
        assert run["compute"] == "torch.bfloat16" and run["parameters"] == "torch.float32"
        assert run["rounded"] < 0.2, "the sum over examples was rounded to bfloat16"
        # examples are computed in bfloat16 row by row, and summed in float32
        total = np.array(one["first"])
        assert np.abs(np.array(run["first"]) - total).max() <= 2 * 60 * 2.0**-24 * 60 * np.abs(total).max()


@pytest.mark.slow
def test_held_out_metrics_and_the_released_loss_are_those_of_one_process(worlds: Worlds) -> None:
    one = worlds.run("metrics", 1)[0]
    assert {"fit nonprivate/loss", "fit validation/accuracy", "validation/loss"} <= set(one)
    for size in (2, 4):
        for rank in worlds.run("metrics", size):
            assert rank == pytest.approx(one, rel=1e-6)


def test_only_rank_0_writes(worlds: Worlds, tmp_path: Path) -> None:
    first, second = worlds.run("files", 2, folder=str(tmp_path / "run"))
    assert second == []
    written = " ".join(first)
    assert all(name in written for name in ("last.ckpt", "ledger", "steps.txt", "report.html", "run.json"))


def test_what_one_rank_finds_wrong_all_refuse_without_waiting(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run("refusals", 2, folder=str(tmp_path / "refusals"))
    expected = {
        "data absent on the last rank": "blobs.csv", "data absent on rank 0": "blobs.csv",
        "a row changed on the last rank": "the training data", "another plan on the last rank": "the privacy plan",
        "another rate on the last rank": "the optimizer", "another network on the last rank": "the network",
        "a ledger of another plan": "another privacy plan", "batch_max": "one process", "drift": "drifted apart",
        "a checkpoint that only rank 0 sees": "the checkpoint to continue from",
    }  # fmt: skip
    for rank in ranks:
        for name, message in expected.items():
            assert message in rank[name] and "HINT" in rank[name], (name, rank[name])
        assert rank["drift unseen"] == rank["nothing wrong"] == rank["stopped"] == "trained"
    # steps are compared at 0, 2, 4: the drift after the fourth step is found before the fifth
    assert "before step 4 " in ranks[0]["drift"]


def test_a_failure_of_rank_0_in_training_ends_the_others(worlds: Worlds, tmp_path: Path) -> None:
    outcome = worlds.attempt("late_failure", 2, folder=str(tmp_path / "run"))
    assert all(code not in (0, None) for code in outcome.codes), outcome.codes
    assert "no space left" in outcome.logs[0]


@pytest.mark.parametrize("changed_on", [0, 1])
def test_a_step_that_the_record_refuses_ends_every_rank_with_one_line(
    worlds: Worlds, tmp_path: Path, changed_on: int
) -> None:
    said = worlds.run("refused_by_the_record", 2, folder=str(tmp_path), changed_on=changed_on)
    assert all("step 3 of this run was released before" in message and "HINT" in message for message in said), said
    assert all(message.startswith("ValueError: ") and "\n" not in message for message in said), said


@pytest.mark.parametrize("ranks", [[0], *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in ([1], [0, 1]))])
def test_kill_9_ends_the_job_and_a_resume_ends_with_the_same_bits(
    worlds: Worlds, tmp_path: Path, ranks: list[int]
) -> None:
    folder = str(tmp_path / "run")
    outcome = worlds.attempt("killed", 2, folder=folder, slow=9, kill={"when": f"{folder}/reached", "ranks": ranks})
    assert [code == -9 for code in outcome.codes] == [rank in ranks for rank in (0, 1)], outcome.codes
    assert all(code not in (0, None) for code in outcome.codes), "a rank was left waiting"
    whole = worlds.run("killed", 2, folder=str(tmp_path / "whole"))
    for after, expected in zip(worlds.run("killed", 2, folder=folder), whole, strict=True):
        assert after == expected
        assert (after["step"], after["spent"], after["branches"]) == (40, 40, 1)


@pytest.mark.slow
def test_four_processes_survive_two_kills_with_micro_batches(worlds: Worlds, tmp_path: Path) -> None:
    folder, options = str(tmp_path / "run"), {"chunks": 3, "precision": "bf16-mixed"}
    for step, ranks in ((9, [3]), (21, [0, 2])):
        Path(folder, "reached").unlink(missing_ok=True)
        kill = {"when": f"{folder}/reached", "ranks": ranks}
        outcome = worlds.attempt("killed", 4, folder=folder, slow=step, kill=kill, **options)
        assert all(code not in (0, None) for code in outcome.codes), outcome.codes
    whole = worlds.run("killed", 4, folder=str(tmp_path / "whole"), **options)
    assert worlds.run("killed", 4, folder=folder, **options) == whole


# ---- strategies that are refused


def test_other_strategies_are_refused(worlds: Worlds) -> None:
    for said in worlds.run("sharded", 2):
        assert set(said) == {"DDPStrategy", "ModelParallelStrategy"}
        assert all("raw gradients" in message and "HINT" in message for message in said.values())


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed", "ddp_spawn"])
def test_sharded_strategies_are_refused_from_a_configuration(strategy: str) -> None:
    arguments = ["--config", str(ROOT / "configs/quickstart.yaml"), "--trainer.strategy", strategy]
    with pytest.raises(ValueError, match=r"(?s)cannot hold the private step.*HINT"):
        parse_experiment(arguments, None)


# ---- the command


def command(folder: Path, *extra: str) -> list[str]:
    return [
        sys.executable, "-m", "lipdp_lightning.cli", "fit", "--config", str(ROOT / "configs/quickstart.yaml"),
        "--run_dir", str(folder), "--wandb", "off", "--trainer.devices", "2", "--trainer.enable_progress_bar", "false",
        *extra,
    ]  # fmt: skip


def environment(**more: str) -> dict[str, str]:
    return os.environ | dict.fromkeys(THREADS, "1") | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""} | more


@pytest.mark.slow
def test_lipdp_fit_starts_its_own_processes(tmp_path: Path) -> None:
    run = subprocess.run(
        command(tmp_path / "run", "--privacy.epochs", "4"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"
    assert run.stdout.count("epsilon  ") <= 1 or run.stdout.count("report  ") == 1


@pytest.mark.slow
def test_lipdp_fit_under_a_launcher_that_starts_all_at_once(tmp_path: Path) -> None:
    """Two nodes of one process each, both looking at the run directory while rank 0 writes it; then again, finished."""
    port = str(free_port())
    arguments = command(tmp_path / "run", "--privacy.epochs", "4", "--trainer.devices", "1", "--trainer.num_nodes", "2")

    def launch() -> list[tuple[int, str]]:
        ranks = []
        for node in (0, 1):
            variables = environment(LOCAL_RANK="0", NODE_RANK=str(node), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            with open(tmp_path / f"{node}.log", "w") as log:
                ranks.append(subprocess.Popen(arguments, env=variables, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [rank.wait(150) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        return [(code, (tmp_path / f"{node}.log").read_text()) for node, code in enumerate(codes)]

    for code, log in launch():
        assert code == 0, log[-3000:]
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "finished"
    for code, log in launch():
        assert code == 2 and "finished" in log, log[-3000:]
