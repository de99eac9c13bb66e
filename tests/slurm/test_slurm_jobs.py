"""Real jobs on a real controller: interrupted in every way, each ends with the run that nobody interrupted."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from slurm_box import Box

from lipdp_lightning.commands.submit import main as submit

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
STEPS = 150
RELEASED = re.compile(r"^[0-9a-f]{16} (\d+) [0-9a-f]{32}$", re.MULTILINE)
SLOW = {"STEP_SECONDS": "0.15"}


@dataclass
class Job:
    id: str
    run_dir: Path
    log: Path


class Cluster:
    """Submits runs of one tiny configuration through `lipdp submit`, and looks at what came of them."""

    def __init__(self, box: Box, folder: Path) -> None:
        self.box, self.folder, self.marks = box, folder, folder / "marks"
        self.marks.mkdir()
        (folder / "jobs with spaces").mkdir()
        # the interpreter that runs the tests, whatever the PATH of a job finds
        site = {"command": f"{sys.executable} -m lipdp_lightning.cli"}
        (folder / "site.yaml").write_text(yaml.safe_dump(site))

    def config(self, devices: int = 1, nodes: int = 1) -> Path:
        content = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
        content["privacy"] = {
            "noise_multiplier": 2.0, "delta": 1e-4, "steps": STEPS, "batch_size": 64, "accountant": "pld",
            "max_norm": 1.0,
        }  # fmt: skip
        # layers whose norms are followed from step to step, and slowly: later noise depends on when they were exact
        content["model"]["network"]["init_args"] |= {"hidden": [16], "zero_init": False}
        content["optimizer"]["init_args"]["lr"] = 0.003
        content["trainer"] |= {
            "devices": devices, "num_nodes": nodes, "enable_progress_bar": False,
            "callbacks": [{"class_path": "slow_steps.SlowSteps"}],
        }  # fmt: skip
        path = self.folder / f"tiny-{nodes}x{devices}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{Path(__file__).parent}:{ROOT}", "MARKS": str(self.marks),
            "WANDB_SILENT": "true", **variables,
        }  # fmt: skip

    def script(self, name: str, config: Path, *options: str) -> tuple[str, Path]:
        run_dir = self.folder / "jobs with spaces" / name
        own, _, extra = " ".join(options).partition("-- ")
        words = ["--config", str(config), "--run_dir", str(run_dir), "--site", str(self.folder / "site.yaml")]
        after = extra.split() or ["--wandb", "off"]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert submit([*words, "--no-check", "--dry-run", *own.split(), "--", *after]) == 0
        return printed.getvalue(), run_dir

    def submit(self, script: str, run_dir: Path, **variables: str) -> Job:
        file = self.folder / f"{run_dir.name}.sbatch"
        file.write_text(script)
        id_ = self.box.run("sbatch", "--parsable", str(file), **self.environment(**variables)).strip()
        return Job(id_, run_dir, run_dir.parent / f"{run_dir.name}-{id_}.out")

    def step(self, job: str) -> int:
        """The step that a job has reached, by its own mark."""
        file = self.marks / job
        return int(file.read_text() or 0) if file.exists() else 0

    def take_nodes(self) -> str:
        """A job on the partition that may take the nodes of the other one, both of them."""
        options = ("--partition=high", "--nodes=2", "--exclusive", "--parsable", "--output=/dev/null")
        return self.box.run("sbatch", *options, "--wrap", "sleep 1").strip()

    def alone(self) -> dict[str, Any]:
        """The run of one process without Slurm, uninterrupted."""
        run_dir = self.folder / "alone"
        if not run_dir.exists():
            environment = {k: v for k, v in self.box.environment.items() if k != "SLURM_CONF"} | self.environment()
            del environment["MARKS"]
            command = [sys.executable, "-m", "lipdp_lightning.cli", "fit", "--config", str(self.config())]
            command += ["--run_dir", str(run_dir), "--wandb", "off"]
            subprocess.run(command, env=environment, check=True, capture_output=True, timeout=200)
        return result(run_dir)


def result(run_dir: Path) -> dict[str, Any]:
    """Weights, ledger and state of a run."""
    checkpoint = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=False)
    return {
        "weights": {name: value.tolist() for name, value in checkpoint["state_dict"].items()},
        "step": checkpoint["global_step"],
        "ledger": json.loads((run_dir / "ledger.json").read_text()),
        "status": json.loads((run_dir / "run.json").read_text())["status"],
        "released": [int(step) for step in RELEASED.findall((run_dir / "steps.txt").read_text())],
    }


def ended(cluster: Cluster, job: Job) -> dict[str, Any]:
    """The result of a job that has to complete."""
    state = cluster.box.wait_for_end(job.id)
    assert state == "COMPLETED", job.log.read_text()[-3000:]
    found = result(job.run_dir)
    assert found["status"] == "finished" and found["step"] == STEPS
    # each step was released once, under one secret
    assert found["released"] == list(range(STEPS)) and [b["reached"] for b in found["ledger"]["branches"]] == [STEPS]
    return found


def was_interrupted(cluster: Cluster, job: Job, times: int = 1) -> str:
    """The job's log, after checking that Slurm has restarted it and that the run went on from its checkpoint."""
    log = job.log.read_text()
    assert int(cluster.box.show(job.id)["Restarts"]) >= times
    assert "preempted at step " in log and f"continuing the run in {job.run_dir}" in log
    return log


@pytest.fixture(scope="module")
def cluster(box: Box, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith(("SLURM", "SBATCH", "WANDB", "LIPDP_SITE"))]:
        del os.environ[name]
    yield Cluster(box, tmp_path_factory.mktemp("cluster"))
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> dict[str, Job]:
    """All jobs, submitted at once and interrupted as soon as they are at a step; the tests wait for their ends."""
    two, apart, alone = cluster.config(2), cluster.config(1, nodes=2), cluster.config()
    jobs: dict[str, Job] = {}

    def send(name: str, config: Path, *options: str, without: str = "", **variables: str) -> None:
        script, run_dir = cluster.script(name, config, *options)
        lines = [line for line in script.splitlines(keepends=True) if not without or without not in line]
        jobs[name] = cluster.submit("".join(lines), run_dir, **variables)

    # the controller looks at limits every 30 s, and its signal comes up to a minute early
    send("limit", alone, "--time", "1", "--signal-before", "10", STEP_SECONDS="0.4")
    send("preempted", apart, "--partition", "low", **SLOW)
    send("terminated", alone, "--partition", "low", without="--signal", **SLOW)
    send("slow_rank", two, "--", "--wandb", "offline", RANK_SECONDS="0.2")
    send("array", alone, "--array", "seeds=1,2", **SLOW)
    send("cancelled", alone, STEP_SECONDS="1")
    send("one_node", two)
    send("two_nodes", apart)
    task = f"{jobs['array'].id}_0"
    interruptions: dict[tuple[str, ...], Callable[[], object]] = {
        (jobs["slow_rank"].id,): lambda: cluster.box.run("scancel", "--signal=USR1", jobs["slow_rank"].id),
        (task,): lambda: cluster.box.run("scancel", "--signal=USR1", task),
        (jobs["cancelled"].id,): lambda: cluster.box.run("scancel", jobs["cancelled"].id),
        (jobs["preempted"].id, jobs["terminated"].id): cluster.take_nodes,
    }

    def interrupt() -> bool:
        for ids in [ids for ids in interruptions if all(cluster.step(id_) >= 5 for id_ in ids)]:
            interruptions.pop(ids)()
        return not interruptions

    cluster.box.wait(interrupt, 240, "step 5 of every job")
    return jobs


def test_a_signal_while_one_rank_is_behind(cluster: Cluster, jobs: dict[str, Job]) -> None:
    job = jobs["slow_rank"]
    assert ended(cluster, job) == ended(cluster, jobs["one_node"])
    was_interrupted(cluster, job)
    # both parts are the same run of Weights & Biases
    parts = sorted(path.name for path in job.run_dir.rglob("offline-run-*"))
    id_ = json.loads((job.run_dir / "run.json").read_text())["id"]
    assert len(parts) == 2 and {name.rsplit("-", 1)[1] for name in parts} == {id_}


def test_a_job_makes_way_for_another_partition(cluster: Cluster, jobs: dict[str, Job]) -> None:
    assert ended(cluster, jobs["preempted"]) == ended(cluster, jobs["two_nodes"])
    was_interrupted(cluster, jobs["preempted"])


def test_a_job_makes_way_after_sigterm(cluster: Cluster, jobs: dict[str, Job]) -> None:
    """Without a signal of its own a preempted job gets SIGTERM, and would be COMPLETED if it just stopped."""
    assert ended(cluster, jobs["terminated"]) == cluster.alone()
    was_interrupted(cluster, jobs["terminated"])


def test_a_cancelled_job_is_saved_and_does_not_come_back(cluster: Cluster, jobs: dict[str, Job]) -> None:
    job = jobs["cancelled"]
    assert cluster.box.wait_for_end(job.id, 60) == "CANCELLED"
    found = result(job.run_dir)
    assert found["status"] == "stopped" and 5 <= found["step"] < STEPS
    assert cluster.box.show(job.id)["Restarts"] == "0"


def test_a_task_of_an_array_is_requeued_by_itself(cluster: Cluster, jobs: dict[str, Job]) -> None:
    array, found = jobs["array"], {}
    for seed in (1, 2):
        task = f"{array.id}_{seed - 1}"
        job = Job(task, array.run_dir / f"seed-{seed}", array.run_dir.parent / f"{array.run_dir.name}-{task}.out")
        found[seed] = ended(cluster, job)
        assert cluster.box.show(task)["Restarts"] == str(int(seed == 1))
    assert found[1]["weights"] != found[2]["weights"]


def test_a_task_count_that_is_not_the_trainers(cluster: Cluster) -> None:
    script, run_dir = cluster.script("wrong", cluster.config(2))
    job = cluster.submit(script.replace("--ntasks-per-node=2", "--ntasks-per-node=1"), run_dir)
    assert cluster.box.wait_for_end(job.id) == "FAILED"
    assert "HINT: --trainer.devices=1, or --ntasks-per-node=2" in job.log.read_text()
    assert not run_dir.exists()


def test_a_run_longer_than_the_limit(cluster: Cluster, jobs: dict[str, Job]) -> None:
    job = jobs["limit"]
    assert ended(cluster, job) == cluster.alone()
    was_interrupted(cluster, job)
