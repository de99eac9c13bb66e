"""docs/models.md: its examples build, and its table is what their certificates say."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from private_step import Harness, make_plan
from torch import nn

from lipdp_lightning import models
from lipdp_lightning.bounds import certify
from lipdp_lightning.bounds.losses import CrossEntropy

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```yml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLES = [example for text in BLOCKS for example in yaml.safe_load(text)]
ROWS = {
    name: [cell.strip() for cell in cells.split("|")[-6:-1]]
    for name, cells in re.findall(r"^\| `(\w+)` \|(.*)$", PAGE, re.MULTILINE)
    if cells.count("|") == 6
}


def build(example: dict[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    module, _, name = example["class_path"].rpartition(".")
    torch.manual_seed(0)
    network = getattr(importlib.import_module(module), name)(**example["init_args"])
    default = (1, 28, 28) if name == "PublishedConvNet" else (3, 32, 32)
    return network, tuple(example["init_args"].get("input_shape", default))


def name_of(example: dict[str, Any]) -> str:
    return example["class_path"].rpartition(".")[2]


SLOW = {"ShallowVGG", "WideResNet"}  # norms on a torus of 32 x 32
TABLE = [pytest.param(e, id=name_of(e), marks=[pytest.mark.slow] * (name_of(e) in SLOW)) for e in EXAMPLES]


def row(network: nn.Module, shape: tuple[int, ...]) -> list[str]:
    """Parameters, layers, first, last and joined sensitivities at norm 1, without biases."""
    trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if name.endswith("bias"):
            parameter.data.zero_()
        elif not bool(parameter.any()):
            nn.init.ones_(parameter)
    harness = Harness(network, shape, make_plan(projection="fixed", max_norm=1.0))
    groups = certify(harness.module.network, shape, 1.0, "cross_entropy").groups
    assert max(u.lipschitz for g in groups for u in g.uses) <= 1 + 1e-4
    deltas = [g.worst_case for g in groups]
    count = sum(p.numel() for p in trained.values())
    return [f"{count:,}", str(len(deltas)), *(f"{v:.3g}" for v in (deltas[0], deltas[-1], math.hypot(*deltas)))]


def test_every_network_has_a_row_and_an_example() -> None:
    assert {*ROWS, "FrozenNetwork"} == set(models.__all__)
    assert list(ROWS) == [name_of(e) for e in EXAMPLES]


@pytest.mark.parametrize("example", TABLE)
def test_the_table_is_what_the_certificates_say(example: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    assert row(*build(example)) == ROWS[name_of(example)]


def test_the_loss_floor_of_a_temperature() -> None:
    """The page's formula: attained by the best logits of norm X, and below what random ones reach."""
    classes, largest = 10, 1.0
    for temperature, printed in ((1.0, 1.420), (0.3, 0.238), (0.1, 0.0002)):
        margin = largest * math.sqrt(classes / (classes - 1)) / temperature
        floor = math.log1p((classes - 1) * math.exp(-margin))
        assert floor == pytest.approx(printed, abs=6e-4)
        loss = CrossEntropy(temperature=temperature)
        best = torch.full((1, classes), -1 / classes, dtype=torch.float64)
        best[0, 0] += 1
        best *= largest / best.norm()
        assert float(loss.per_example(best, torch.tensor([0]))) == pytest.approx(floor, rel=1e-9)
        others = torch.randn(2000, classes, dtype=torch.float64) + 3 * best
        others *= largest / others.norm(dim=1, keepdim=True)
        assert float(loss.per_example(others, torch.zeros(2000, dtype=torch.long)).min()) > floor
