"""The script that `lipdp submit` writes, run by a real shell with stand-ins for Slurm's programs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_runs import QUICKSTART, SMALL, Outcome, lipdp, lipdp_process

from lipdp_lightning.commands.fit import default_run_dir
from lipdp_lightning.commands.submit import _parser, job_from
from lipdp_lightning.slurm.environment import task_problems

THOUSAND = ",".join(map(str, range(1000)))


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("SBATCH", "SLURM", "LIPDP_SITE", "LOCAL_RANK"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def config(folder: Path, **trainer: Any) -> str:
    content = yaml.safe_load(Path(QUICKSTART).read_text())
    content["trainer"] = {"accelerator": "cpu", **trainer}
    (folder / "c.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "c.yaml")


def dry(*words: str, extra: tuple[str, ...] = ()) -> Outcome:
    return lipdp("submit", "--no-check", "--dry-run", *words, *(("--", *extra) if extra else ()))


def script_of(*words: str, extra: tuple[str, ...] = ()) -> str:
    outcome = dry(*words, extra=extra)
    assert outcome.code == 0, outcome.err
    return outcome.out


def directives(script: str) -> dict[str, str]:
    found = [shlex.split(line)[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (option.removeprefix("--").partition("=") for option in found)}


def stand_in(folder: Path, name: str, body: str) -> None:
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)


def execute(folder: Path, script: str, code: int = 0, **variables: str) -> tuple[int, list[str], list[str]]:
    """Exit code of the script, what srun was given, and what scontrol was asked."""
    stand_in(folder, "srun", f"printf '%s\\n' \"$@\" > {shlex.quote(str(folder))}/srun.log\nexit {code}")
    stand_in(folder, "scontrol", f'echo "$@" >> {shlex.quote(str(folder))}/scontrol.log')
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", **variables}
    done = subprocess.run(["bash"], input=script, text=True, env=environment, cwd=folder)
    asked = folder / "scontrol.log"
    given = (folder / "srun.log").read_text().splitlines()
    return done.returncode, given, asked.read_text().splitlines() if asked.exists() else []


# ---- the script


def test_the_job_has_what_a_requeue_needs(tmp_path: Path) -> None:
    script = script_of("--config", config(tmp_path, devices=2, num_nodes=3), "--run_dir", "runs/a", "--time", "1:00:00")
    options = directives(script)
    assert options | {"output": ""} == {
        "job-name": "a", "output": "", "open-mode": "append", "requeue": "", "signal": "SIGUSR1@120", "nodes": "3",
        "ntasks-per-node": "2", "cpus-per-task": "1", "time": "1:00:00",
    }  # fmt: skip
    assert "gpus" not in script and options["output"] == "runs/a-%j.out"


@pytest.mark.parametrize(
    "name", ["with space", "quo'te", 'dou"ble', "dol$lar", "per%cent", "ba\\ck", "semi;colon", "`tick`"]
)
def test_names_reach_srun_as_they_are(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    given = config(folder)
    run_dir, value = str(folder / f"run {name}"), f"a {name}"
    options = ("--config", given, "--run_dir", run_dir, "--ntasks-per-node", "1")
    script = script_of(*options, extra=("--wandb", "off", f"--seed_everything={value}"))
    code, words, _ = execute(tmp_path, script)
    assert code == 0
    start = words.index("fit")
    assert words[start + 1 :][:6] == ["--config", given, "--run_dir", run_dir, "--wandb", "off"]
    assert words[start + 7] == f"--seed_everything={value}"
    assert directives(script)["output"].replace("%%", "%").startswith(str(folder) + "/")


def test_a_task_of_an_array_has_its_value_and_its_directory(tmp_path: Path) -> None:
    options = ("--config", config(tmp_path, devices=1), "--run_dir", "my runs/x", "--array", "epsilon=1,2.5,4")
    script = script_of(*options)
    assert directives(script)["array"] == "0-2" and directives(script)["output"] == "my runs/x-%A_%a.out"
    code, words, asked = execute(tmp_path, script, 75, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="1")
    assert words[words.index("--run_dir") + 1] == "my runs/x/epsilon-2.5" and "--privacy.epsilon=2.5" in words
    assert (code, asked) == (75, ["requeue 17_1"])
    seeds = script_of(*options[:4], "--array", "seeds=7")
    assert "--seed_everything=" in seeds and "/seed-" in seeds
    other = script_of(*options[:4], "--array", "optimizer.init_args.lr=0.1,1e-3")
    assert "--optimizer.init_args.lr=$value" in other and "/lr-" in other


def test_two_arrays_are_a_product(tmp_path: Path) -> None:
    options = ("--config", config(tmp_path, devices=1), "--run_dir", "my runs/x")
    script = script_of(*options, "--array", "seeds=1,2", "--array", "epsilon=0.5,1,4")
    assert directives(script)["array"] == "0-5"
    job = job_from(_parser().parse_args([*options, "--array", "seeds=1,2", "--array", "epsilon=0.5,1,4"]), (), {})
    seen = set()
    for task, (directory, arguments) in enumerate(job.runs()):
        _, words, _ = execute(tmp_path, script, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID=str(task))
        assert words[words.index("--run_dir") + 1] == directory
        assert tuple(words[-2:]) == arguments[-2:]
        seen.add((directory, *words[-2:]))
    assert len(seen) == 6
    assert ("my runs/x/seed-2-epsilon-0.5", "--seed_everything=2", "--privacy.epsilon=0.5") in seen


@pytest.mark.parametrize(("code", "requeues"), [(0, False), (1, False), (75, True), (130, False)])
def test_the_jobs_exit_code_is_sruns(tmp_path: Path, code: int, requeues: bool) -> None:
    script = script_of("--config", config(tmp_path, devices=1), "--run_dir", "runs/a")
    found, _, asked = execute(tmp_path, script, code)
    assert found == code and asked == (["requeue 17"] if requeues else [])


def test_a_container_runs_the_command_and_sees_the_data(tmp_path: Path) -> None:
    run_dir = tmp_path / "else where" / "a"
    options = ("--config", config(tmp_path, devices=1), "--run_dir", str(run_dir), "--container", "my image.sif")
    script = script_of(*options)
    _, words, _ = execute(tmp_path, script, LIPDP_DATA="/da ta")
    assert words[2:5] == ["apptainer", "exec", "--nv"]
    assert [words[i + 1] for i, w in enumerate(words) if w == "--bind"] == [
        str(tmp_path),
        "/da ta",
        str(run_dir.parent),
    ]
    assert words[words.index("my image.sif") + 1 :][:2] == ["lipdp", "fit"]


def test_a_new_run_directory_is_named_in_the_script(tmp_path: Path) -> None:
    """Once, when the job is submitted: a requeued job finds its run again."""
    script = script_of("--config", config(tmp_path, devices=1))
    _, words, _ = execute(tmp_path, script)
    run_dir = words[words.index("--run_dir") + 1]
    assert run_dir.startswith("runs/20") and run_dir.endswith("-c") and f"--run_dir {run_dir}" in script.splitlines()[1]


# ---- where settings come from


def test_options_come_before_the_environment_and_that_before_the_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"account": "s", "partition": "s", "constraint": "s", "time": "1:00"}))
    monkeypatch.setenv("LIPDP_SITE", str(site))
    monkeypatch.setenv("SBATCH_ACCOUNT", "e")
    monkeypatch.setenv("SBATCH_PARTITION", "e")
    options = directives(script_of("--config", config(tmp_path, devices=1), "--account", "o"))
    assert [options[k] for k in ("account", "partition", "constraint", "time")] == ["o", "e", "s", "1:00"]
    assert "qos" not in options


def test_what_was_decided_is_not_decided_again_by_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch prefers SBATCH_ variables to the script."""
    stand_in(tmp_path, "sbatch", f"env > {tmp_path}/env\ncat > {tmp_path}/script\nexit 3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in ("SBATCH_ACCOUNT", "SBATCH_SIGNAL", "SBATCH_NO_REQUEUE", "SBATCH_MEM_PER_NODE"):
        monkeypatch.setenv(name, "x")
    run_dir = tmp_path / "new" / "run"
    words = ("--config", config(tmp_path, devices=1), "--run_dir", str(run_dir), "--account", "mine")
    assert lipdp("submit", "--no-check", *words).code == 3
    seen = {line.split("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert {n for n in seen if n.startswith("SBATCH")} == {"SBATCH_MEM_PER_NODE"}
    assert "--account=mine" in (tmp_path / "script").read_text()
    assert run_dir.parent.is_dir() and not run_dir.exists(), "sbatch needs the folder of the log"


def test_without_sbatch_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    outcome = lipdp("submit", "--no-check", "--config", config(tmp_path, devices=1))
    assert outcome.code == 2 and "HINT: --dry-run" in outcome.err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"acount": "x"}, "acount is unknown"), ({"setup": "module load x"}, "setup is not a list"),
        ({"options": [1]}, "options is not a list"), (["x"], "no settings of a site"),
    ],
)  # fmt: skip
def test_a_wrong_site_file_is_refused(tmp_path: Path, content: Any, complaint: str) -> None:
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(content))
    outcome = dry("--config", config(tmp_path, devices=1), "--site", str(tmp_path / "site.yaml"))
    assert outcome.code == 2 and complaint in outcome.err and "HINT" in outcome.err


# ---- tasks and devices


@pytest.mark.parametrize(
    ("trainer", "words", "extra", "tasks", "gpus", "added"),
    [
        ({"devices": 4}, (), (), "4", None, ["--trainer.num_nodes=1"]),
        (
            {"devices": "auto"},
            ("--ntasks-per-node", "2"),
            (),
            "2",
            None,
            ["--trainer.devices=2", "--trainer.num_nodes=1"],
        ),
        ({"accelerator": "gpu", "devices": 4, "num_nodes": 1}, (), (), "4", "4", []),
        ({"accelerator": "gpu", "num_nodes": 1}, ("--gpus-per-node", "8"), (), "8", "8", ["--trainer.devices=8"]),
        ({"devices": 4, "num_nodes": 1}, (), ("--trainer.devices", "2"), "2", None, []),
        ({"devices": [0, 1], "num_nodes": 1}, (), (), "2", None, []),
        ({"devices": 4}, ("--ntasks-per-node", "2"), (), "2", None, ["--trainer.devices=2", "--trainer.num_nodes=1"]),
        (
            {"accelerator": "cpu", "devices": 1},
            ("--nodes", "2", "--gpus-per-node", "4"),
            (),
            "4",
            "4",
            ["--trainer.accelerator=gpu", "--trainer.devices=4", "--trainer.num_nodes=2"],
        ),
    ],
)
def test_one_task_per_device(
    tmp_path: Path, trainer: dict[str, Any], words: tuple[str, ...], extra: tuple[str, ...], tasks: str,
    gpus: str | None, added: list[str],
) -> None:  # fmt: skip
    script = script_of("--config", config(tmp_path, **trainer), *words, extra=extra)
    options = directives(script)
    assert options["ntasks-per-node"] == tasks and options.get("gpus-per-node") == gpus
    _, given, _ = execute(tmp_path, script)
    assert [w for w in given if w.startswith("--trainer.") and "=" in w] == added


@pytest.mark.parametrize(
    ("trainer", "words", "complaint"),
    [
        ({"devices": 2}, ("--ntasks-per-node", "2", "--", "--trainer.devices=4"), "--trainer.devices=4 after the --"),
        ({}, ("--gpus-per-node", "2", "--", "--trainer.devices", "4"), "--trainer.devices=4 after the --"),
        ({"devices": 4}, ("--nodes", "3", "--", "--trainer.num_nodes=2"), "--trainer.num_nodes=2 after the --"),
        ({"accelerator": "cpu"}, ("--gpus-per-node", "2", "--", "--trainer.accelerator=cpu"), "trains on GPUs"),
        ({"devices": "auto"}, (), "number of tasks is not known"),
        ({"devices": 4}, ("--ntasks-per-node", "4", "--gpus-per-node", "2"), "each GPU needs one task"),
        ({"devices": 1}, ("--nodes", "0"), "--nodes 0 is not positive"),
        ({"devices": 1}, ("--nodes", "two"), "invalid int"),
        ({"devices": 1}, ("--array", "epsilon"), "does not name a key"),
        ({"devices": 1}, ("--array", "epsilon=1,1"), "each once"),
        ({"devices": 1}, ("--array", "epsilon=1,$(id)"), "does not name"),
        ({"devices": 1}, ("--array", "a b=1"), "does not name"),
        ({"devices": 1}, ("--run_dir", "runs/a\n#SBATCH --uid=0"), "line break"),
        ({"devices": 1}, ("--wandb", "off"), "unrecognized arguments"),
        ({"devices": 1}, ("--", "--run_dir", "x"), "belongs before the --"),
        ({"devices": 1}, ("--array", "epsilon=1,2", "--", "--privacy.epsilon=1"), "given twice"),
        ({"devices": 1}, ("--array", "epsilon=1,2", "--array", "epsilons=3"), "names privacy.epsilon twice"),
        ({"devices": 1}, ("--array", f"seeds={THOUSAND}", "--array", "epsilon=1,2"), "makes 2000 runs"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    tmp_path: Path, trainer: dict[str, Any], words: tuple[str, ...], complaint: str
) -> None:
    outcome = dry("--config", config(tmp_path, **trainer), *words)
    assert outcome.code == 2 and complaint in outcome.err and "HINT" in outcome.err and outcome.out == ""


@pytest.mark.parametrize("content", ["a: [", "- 1"])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "c.yaml").write_text(content)
    outcome = dry("--config", str(tmp_path / "c.yaml"))
    assert outcome.code == 2 and "HINT" in outcome.err


# ---- checked before it queues


def test_a_misspelt_key_is_found_before_the_queue(tmp_path: Path) -> None:
    given = config(tmp_path, devices=1)
    outcome = lipdp("submit", "--dry-run", "--config", given, "--", "--privacy.epsilom", "1")
    assert outcome.code == 2 and "epsilom" in outcome.err
    last = lipdp("submit", "--dry-run", "--config", given, "--array", "epsilon=1,x")
    assert last.code == 2 and "epsilon" in last.err
    fine = lipdp("submit", "--dry-run", "--config", given, "--run_dir", "runs/a", "--", "--wandb", "off")
    assert fine.code == 0 and not Path("runs").exists()


def test_a_finished_run_is_refused_before_the_queue(finished: tuple[Path, Outcome]) -> None:
    words = ("--config", SMALL[1], "--run_dir", str(finished[0]), "--ntasks-per-node", "1", "--", *SMALL[2:])
    outcome = lipdp("submit", "--dry-run", *words)
    assert outcome.code == 2 and "is finished" in outcome.err


# ---- lipdp fit in a job


def test_every_task_of_a_job_step_has_one_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    found = set()
    for rank in ("0", "1"):
        monkeypatch.setenv("SLURM_PROCID", rank)
        found.add(default_run_dir(["--config", "a/b.yaml"]))
    assert found == {Path("runs/job17.0-b")}


def test_ranks_that_lightning_launches_share_the_first_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIPDP_RUN_DIR", raising=False)
    first = default_run_dir(["--config", "b.yaml"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert default_run_dir(["--config", "b.yaml"]) == first
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    time.sleep(0.005)  # names differ by milliseconds
    assert default_run_dir(["--config", "b.yaml"]) != first, "a second run of this process is another one"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ValueError, match="HINT: give --run_dir"):
        default_run_dir(["--config", "b.yaml"])


@pytest.mark.slow
def test_two_local_processes_make_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LIPDP_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    process = lipdp_process("fit", *SMALL, "--wandb", "off", "--trainer.devices", "2", cwd=tmp_path)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-2000:]
    directories = list((tmp_path / "runs").iterdir())
    assert len(directories) == 1 and json.loads((directories[0] / "run.json").read_text())["status"] == "finished"


def in_step(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    given = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NNODES": "1", **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_devices_have_to_be_the_jobs_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert task_problems(4, 2) == []  # no job
    in_step(monkeypatch, SLURM_NTASKS="4", SLURM_NTASKS_PER_NODE="2", SLURM_NNODES="2")
    assert task_problems(2, 2) == []
    assert ["devices is 4" in p for p in task_problems(4, 2)] == [True]
    assert len(task_problems(1, 1)) == 2
    monkeypatch.delenv("SLURM_NTASKS_PER_NODE")
    assert "HINT: sbatch --ntasks-per-node" in task_problems(2, 2)[0]
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    assert task_problems(1, 1) == []


def test_fit_refuses_devices_that_the_job_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    in_step(monkeypatch, SLURM_LOCALID="0", SLURM_NODEID="0", SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2")
    done = lipdp("fit", *SMALL, "--wandb", "off", "--run_dir", "x")
    assert done.code == 2 and "HINT: --trainer.devices=2, or --ntasks-per-node=1" in done.err
    assert not (tmp_path / "x").exists()


def test_a_job_that_is_requeued_after_its_end_is_no_failure(
    finished: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("fit", *SMALL, "--run_dir", finished[0], "--wandb", "off")
    assert lipdp(*words).code == 2
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    outcome = lipdp(*words)
    assert outcome.code == 0 and "was finished before" in outcome.out
