"""Short names of this project's classes, and the user's own folders of the same names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lipdp_lightning.experiment.short_names import full_name, with_full_names, with_full_words

QUICK = ["--privacy.epochs", "1", "--privacy.batch_size", "1400", "--wandb", "off"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("data_modules.Digits", "lipdp_lightning.data_modules.Digits"),
        ("data_modules.text.HashedWords", "lipdp_lightning.data_modules.text.HashedWords"),
        ("callbacks.ParameterAveraging", "lipdp_lightning.callbacks.ParameterAveraging"),
        ("callbacks.MyOwn", "callbacks.MyOwn"),
        ("callbacks.mine.ParameterAveraging", "callbacks.mine.ParameterAveraging"),
        ("lipdp_lightning.data_modules.Digits", "lipdp_lightning.data_modules.Digits"),
        ("torch.optim.Adam", "torch.optim.Adam"),
        ("callbacks", "callbacks"),
        ("see callbacks.ParameterAveraging", "see callbacks.ParameterAveraging"),
    ],
)
def test_a_short_name_stands_for_a_class_of_this_project(given: str, expected: str) -> None:
    assert full_name(given) == expected


def test_only_class_paths_are_replaced() -> None:
    content = {"title": "data_modules.Digits", "data": [{"class_path": "data_modules.Digits", "init_args": {"x": 1}}]}
    full = {"class_path": "lipdp_lightning.data_modules.Digits", "init_args": {"x": 1}}
    assert with_full_names(content) == {"title": "data_modules.Digits", "data": [full]}
    words = ["--data", "data_modules.Digits", "--data=data_modules.Digits", "--seed", "3"]
    full_words = [word.replace("data_modules", "lipdp_lightning.data_modules") for word in words]
    assert with_full_words(words) == full_words


def test_a_projects_own_folders_stay_its_own(tmp_path: Path) -> None:
    """A project has folders callbacks/ and data_modules/, and names classes of both in one configuration."""
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "data_modules").mkdir()
    (tmp_path / "data_modules/__init__.py").write_text("raise RuntimeError('not asked for')\n")
    (tmp_path / "callbacks/__init__.py").write_text(
        "import lightning\n\n\nclass Says(lightning.Callback):\n"
        "    def on_fit_start(self, trainer, pl_module):\n        print('said by the project')\n"
    )
    config = yaml.safe_load((Path(__file__).parents[2] / "configs/quickstart.yaml").read_text())
    config["trainer"]["callbacks"] = [{"class_path": "callbacks.Says"}, {"class_path": "callbacks.ParameterAveraging"}]
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "lipdp_lightning.cli", "fit", "--config", "own.yaml", "--run_dir", "r", *QUICK]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "said by the project" in result.stdout
    stored = yaml.safe_load((tmp_path / "r/config.yaml").read_text())
    names = [callback["class_path"] for callback in stored["trainer"]["callbacks"]]
    assert names == ["callbacks.Says", "lipdp_lightning.callbacks.ParameterAveraging"]
