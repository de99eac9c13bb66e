"""What `lipdp fit` prints before the first step is the certificate of the weights that train."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_runs import ROOT, SMALL, fit

from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.report.tables import norm_caution

BALL = [*SMALL, "--privacy.max_norm", "0.01", "--privacy.steps", "1"]


def lipschitz(printed: str) -> float:
    """The column of the one layer."""
    lines = printed.splitlines()
    header = next(i for i, line in enumerate(lines) if "Lipschitz" in line)
    names = re.split(r"\s{2,}|\s*[|│]\s*", lines[header].strip())
    row = next(line for line in lines[header + 1 :] if "layers.1" in line)
    return float(re.split(r"\s{2,}|\s*[|│]\s*", row.strip())[names.index("Lipschitz")])


RANDOM = ["--model.network.init_args.zero_init", "false"]


def test_it_is_that_of_projected_weights(tmp_path: Path) -> None:
    outcome = fit(tmp_path / "run", *BALL, *RANDOM)
    assert outcome.code == 0 and lipschitz(outcome.out) <= 0.01 * 1.001


def test_a_certificate_from_before_the_projection_fails_the_same_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mechanism, "refresh_certificate", lambda self: self.certificate)
    outcome = fit(tmp_path / "run", *BALL, *RANDOM)
    assert outcome.code == 0 and lipschitz(outcome.out) > 0.02


CONVNET = ["--config", str(ROOT / "configs/digits_convnet.yaml"), "--privacy.epsilon", "null", "--privacy.steps", "1",
           "--privacy.epochs", "null", "--privacy.noise_multiplier", "1.5", "--privacy.scaling", "joint",
           "--privacy.max_norm", "1"]  # fmt: skip


@pytest.mark.parametrize(("projection", "told"), [("bjorck", True), ("clip", False)])
def test_layers_beyond_their_ball_are_named(tmp_path: Path, projection: str, told: bool) -> None:
    outcome = fit(tmp_path / "run", *CONVNET, "--privacy.projection", projection)
    assert outcome.code == 0 and ("caution: the projection bounds kernels" in outcome.out) is told


def test_only_layers_above_their_norm_are_counted() -> None:
    rows = [{"name": "a", "weight_norm": 3.0, "max_norm": 1.0}, {"name": "b", "weight_norm": 1.005, "max_norm": 1.0}]
    assert "convolutions a have up to 3 times" in norm_caution(rows)
    assert norm_caution(rows[1:]) == norm_caution([{"name": "c", "weight_norm": None, "max_norm": None}]) == ""
