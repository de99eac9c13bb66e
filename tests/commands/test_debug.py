"""`lipdp debug` on an opacus script that is right and on three that are not, and on networks of other kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lipdp_lightning.audit.blackbox.user_script import wrapped
from lipdp_lightning.cli import main
from lipdp_lightning.commands.debug import three_tests
from lipdp_lightning.studies.debugging import opacus_script
from lipdp_lightning.studies.debugging.small_networks import Transformer, images, resnet_20, tokens

SCRIPT = Path(opacus_script.__file__)
SMALL = ["--largest-batch", "32", "--models", "3", "--bounds", "6"]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("function", "optimizer", "broken"),
    [
        ("train", "sgd", ""),
        pytest.param("train", "adam", "", marks=pytest.mark.slow),
        ("train_without_clipping", "sgd", "bound"),
        pytest.param("train_without_clipping", "adam", "bound", marks=pytest.mark.slow),
        ("train_with_a_clipped_mini_batch", "sgd", "per example"),
        ("train_with_uncalibrated_noise", "sgd", "calibration"),
    ],
)
def test_the_three_mistakes_are_found_and_the_healthy_script_passes(
    function: str, optimizer: str, broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["debug", "--script", f"{SCRIPT}:{function}", "--optimizer", optimizer, "--out", str(tmp_path), *SMALL]
    assert main(words) == (1 if broken else 0)
    shown = capsys.readouterr().out
    found = {f["name"].partition(",")[0]: f["verdict"] for f in json.loads((tmp_path / "debug.json").read_text())}
    assert set(found) == {"bound", "per example", "calibration"}
    assert (found[broken] == "violation") if broken else set(found.values()) == {"pass"}, shown
    assert "prove no epsilon" in shown if not broken else "Faults: " in shown
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_scripts_that_cannot_be_tested_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.py"
    empty.write_text("")
    for words, said in (
        (["--script", "nothing"], "names no function"), (["--script", str(tmp_path / "none.py:train")], "no file"),
        (["--script", f"{empty}:train"], "has no train"), (["--script", f"{SCRIPT}:train", "--models", "1"], "too few"),
    ):  # fmt: skip
        assert main(["debug", *words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="rows, outputs"):
        wrapped("a", lambda *a, **b: None, lambda: nn.Identity(), lambda n, g: torch.zeros(n, 2, 2), "huber")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ResNet-20", "transformer"])
def test_deep_networks_pass_and_fail_the_same_tests(kind: str) -> None:
    build, inputs = (resnet_20, images) if kind == "ResNet-20" else (Transformer, tokens)
    for function, broken in (
        (opacus_script.train, None), (opacus_script.train_without_clipping, 0),
        (opacus_script.train_with_a_clipped_mini_batch, 1), (opacus_script.train_with_uncalibrated_noise, 2),
    ):  # fmt: skip
        findings = three_tests(wrapped(kind, function, build, inputs, "cross_entropy"), "sgd", 32, 3, 5)
        for index, found in enumerate(findings):
            if broken is None or index == broken:
                assert found.violated == (index == broken), found.statement
