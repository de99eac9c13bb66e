"""Every network has a configuration with which it learns from data that need no file, privately."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lipdp_lightning import models
from lipdp_lightning.experiment.short_training import run_once

CONFIGS = Path(__file__).parents[2] / "configs"
SEEDS = (1, 2, 3)
# file, and the accuracy that every seed exceeds
QUICK = {
    "digits_linear": 0.85,
    "digits_mlp": 0.80,
    "digits_convnet": 0.80,
    "digits_gabor_net": 0.85,
    "digits_norm_preserving_mlp": 0.80,
    "digits_frozen": 0.80,
}
SLOW = {
    "digits_published_convnet": 0.60,
    "digits_norm_preserving": 0.80,
    "digits_scattering": 0.85,
    "digits_vgg": 0.65,
    "digits_resnet": 0.45,
    "digits_mixer": 0.50,
    "digits_timm": 0.75,
    "digits_wide_resnet": 0.85,
    "generated_reviews_transformer": 0.78,  # single words end at 0.75
}


def content_of(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


def check(name: str, seed: int, least: float) -> None:
    content = content_of(name)
    assert content["privacy"]["epsilon"] <= 8
    result = run_once(content, {"seed_everything": seed})
    assert result.certified and result.epsilon <= content["privacy"]["epsilon"] * 1.001
    assert result.score > least


def test_every_network_has_one() -> None:
    found = {content_of(name)["model"]["network"]["class_path"].rpartition(".")[2] for name in (*QUICK, *SLOW)}
    assert found == set(models.__all__)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", QUICK)
def test_a_small_network_learns(name: str, seed: int) -> None:
    check(name, seed, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SLOW)
def test_a_larger_network_learns(name: str, seed: int) -> None:
    check(name, seed, SLOW[name])


def test_a_network_under_bounds_would_not_pass() -> None:
    """The configuration of the convolutional network, with the default of earlier versions."""
    content = content_of("digits_convnet")
    content["privacy"]["scaling"] = "joint"
    assert run_once(content).score < 0.4
