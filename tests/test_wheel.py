"""The wheel: what it installs, and a run from it in another project's folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from the files that git tracks, with the setuptools of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    subprocess.run(["tar", "-x"], cwd=source, input=files.stdout, check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(folder), "."]
    subprocess.run(command, cwd=source, check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_has_one_package_with_everything_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lipdp_lightning"}
    for folder, pattern in (("callbacks", "*.py"), ("data_modules", "*.py"), ("configs", "*.yaml")):
        expected = {f"lipdp_lightning/{folder}/{path.name}" for path in (ROOT / folder).glob(pattern)}
        assert expected and expected <= set(names)
    assert {"lipdp_lightning/py.typed", "lipdp_lightning/bench/bounds.yaml"} <= set(names)
    assert not [name for name in names if "/tests/" in name or name.endswith(".pyc")]


@pytest.mark.slow
def test_an_installed_library_trains_beside_a_projects_own_folders(wheel: Path, tmp_path: Path) -> None:
    site, project = tmp_path / "site", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(site)
    (project / "callbacks").mkdir(parents=True)
    (project / "callbacks/__init__.py").write_text(
        "import lightning\n\n\nclass Mine(lightning.Callback):\n"
        "    def on_fit_start(self, trainer, pl_module):\n        print('said by the project')\n"
    )
    code = (
        "import sys, lipdp_lightning; print(lipdp_lightning.__file__)\n"
        "from lipdp_lightning.cli import main\n"
        "import callbacks; callbacks.Mine\n"
        "sys.exit(main(sys.argv[1:]) or main(['compare', 'run', '--output', 'compare.html']))"
    )
    words = [
        "fit",
        "--config",
        "quickstart",
        "--trainer.callbacks+=callbacks.Mine",
        "--run_dir",
        "run",
        "--wandb",
        "off",
    ]
    result = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=project, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(project)])},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert str(site) in result.stdout and "said by the project" in result.stdout
    stored = yaml.safe_load((project / "run/config.yaml").read_text())
    assert stored["data"]["class_path"] == "lipdp_lightning.data_modules.Digits"
    assert "What each epsilon bought" in (project / "compare.html").read_text()
