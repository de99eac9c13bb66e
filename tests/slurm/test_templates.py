"""What is in slurm/: the examples are what `lipdp submit` writes, and the scripts do what they say."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from lipdp_lightning.commands import submit

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted((ROOT / "slurm" / "templates").glob("*.sbatch"))
CONFIGS = sorted((ROOT / "configs").glob("cifar10_wrn*.yaml"))


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(submit, "_command", lambda in_container: "lipdp")
    for name in [n for n in os.environ if n.startswith(("SBATCH", "SLURM", "LIPDP_SITE"))]:
        monkeypatch.delenv(name)


def test_there_is_a_template_for_each_kind_of_job() -> None:
    kinds = {"one_gpu", "one_node", "many_nodes", "array_seeds", "array_epsilons", "container"}
    assert {path.stem for path in TEMPLATES} == kinds


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)
def test_a_template_is_what_its_command_prints(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = path.read_text()
    words = shlex.split(text.splitlines()[1].removeprefix("# "))
    assert words[:2] == ["lipdp", "submit"]
    assert submit.main(["--no-check", "--dry-run", *words[2:]]) == 0
    assert capsys.readouterr().out == text
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_large_configuration_becomes_a_job(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(path), "--run_dir", "runs/x", "--time", "24:00:00", "--dry-run"]
    assert submit.main([*words, "--no-check"]) == 0
    script = capsys.readouterr().out
    for option in ("--nodes=1", "--ntasks-per-node=8", "--gpus-per-node=8", "--signal=SIGUSR1@120", "--requeue"):
        assert f"#SBATCH {option}\n" in script


def test_the_configurations_are_the_twelve_that_were_promised() -> None:
    wanted = {f"cifar10_wrn{depth}_4_eps{epsilon}" for depth in (16, 40) for epsilon in (1, 2, 3, 4, 6, 8)}
    assert {path.stem for path in CONFIGS} == wanted
    for path in CONFIGS:
        content = yaml.safe_load(path.read_text())
        depth, epsilon = path.stem.removeprefix("cifar10_wrn").split("_4_eps")
        assert content["model"]["network"]["init_args"]["depth"] == int(depth)
        assert content["privacy"]["epsilon"] == int(epsilon) and content["privacy"]["batch_size"] == 4096


def test_the_example_of_a_site_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    site = str(ROOT / "slurm" / "site.yaml.example")
    words = ["--config", str(CONFIGS[0]), "--run_dir", "runs/x", "--site", site, "--no-check", "--dry-run"]
    assert submit.main(words) == 0
    script = capsys.readouterr().out
    for line in ("#SBATCH --account=my-project", "#SBATCH --mem=0", "module load cuda", "#SBATCH --time=24:00:00"):
        assert f"{line}\n" in script
    assert script.index("module load") < script.index("srun")
    keys = set(yaml.safe_load(Path(site).read_text()))
    assert keys == submit._SITE_KEYS - {"command"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_offline_runs_are_uploaded_in_their_order(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "sync_wandb.sh"
    program = tmp_path / "wandb"
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{tmp_path}/given"\n')
    program.chmod(0o755)
    runs = tmp_path / "my runs"
    names = ["offline-run-20260102_000000-abc", "offline-run-20260101_000000-abc"]
    for name in names:
        (runs / "a run" / "wandb" / name / "files").mkdir(parents=True)
    (runs / "a run" / "wandb" / "latest-run").symlink_to(names[0])
    environment = {**os.environ, "WANDB": str(program)}
    done = subprocess.run([script, runs], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    given = (tmp_path / "given").read_text().splitlines()
    assert given[:2] == ["sync", "--no-include-synced"] and [Path(p).name for p in given[2:]] == sorted(names)
    none = subprocess.run([script, tmp_path / "a run"], env=environment, capture_output=True, text=True)
    assert none.returncode == 2 and "HINT" in none.stderr
    help_text = (
        subprocess.run(["wandb", "sync", "--help"], capture_output=True, text=True) if shutil.which("wandb") else None
    )
    assert help_text is None or "--no-include-synced" in help_text.stdout
