"""The configurations that come with the library, by name from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lipdp_lightning.cli import main
from lipdp_lightning.commands.configs import WIDTH, packaged, summary, with_packaged

ROOT = Path(__file__).parents[2]


def test_the_list_has_every_configuration_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
    assert all(len(line.split()) > 4 and line.endswith(".") for line in lines)


def test_a_name_after_config_is_that_of_a_packaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = str((ROOT / "configs/quickstart.yaml").resolve())
    assert with_packaged(["--config", "quickstart"]) == ["--config", path]
    assert with_packaged(["--config=quickstart.yaml", "quickstart"]) == [f"--config={path}", "quickstart"]
    assert with_packaged(["--config", "nothing", "--run_dir", "quickstart"])[1::2] == ["nothing", "quickstart"]


def test_a_file_of_the_current_folder_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.yaml").write_text("seed_everything: 3\n")
    monkeypatch.chdir(tmp_path)
    assert with_packaged(["--config", "quickstart.yaml"]) == ["--config", "quickstart.yaml"]


def test_fit_takes_a_name_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shortly = ["--privacy.epochs", "1", "--privacy.batch_size", "1400", "--wandb", "off", "--run_dir", "r"]
    assert main(["fit", "--config", "quickstart", *shortly]) == 0
    stored = yaml.safe_load((tmp_path / "r/config.yaml").read_text())
    assert stored["data"]["class_path"] == "lipdp_lightning.data_modules.Digits"


def test_copies_are_written_or_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "quickstart", "digits_exact", "--to", str(tmp_path / "mine")]) == 0
    copy = tmp_path / "mine/quickstart.yaml"
    assert copy.read_bytes() == (ROOT / "configs/quickstart.yaml").read_bytes()
    assert main(["configs", "digits_joint", "quickstart", "nothing", "--to", str(tmp_path / "mine")]) == 2
    error = capsys.readouterr().err
    assert "nothing" in error and "exists already" in error and "HINT" in error
    assert not (tmp_path / "mine/digits_joint.yaml").exists()


def test_a_summary_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# One network,\n# two lines. Another sentence.\nseed_everything: 1\n# not this\n")
    assert summary(path) == "One network, two lines."
    assert all(len(summary(path)) <= WIDTH for path in packaged())
