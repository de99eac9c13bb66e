"""The attack comes close to tight bounds, and exceeds none that is sound."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipdp_lightning.audit import (
    AttackReport,
    NodeRatio,
    attack,
    certificate_json,
    certificate_table,
)
from lipdp_lightning.bounds import certify
from lipdp_lightning.bounds.losses import CrossEntropy, Huber
from lipdp_lightning.layers import CotangentClip, MaxMin, Residual, make_private


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def attacked(model: nn.Module, shape: tuple[int, ...], loss: Any = None, **options: Any) -> AttackReport:
    return attack(make_private(model), shape, 1.0, loss or Huber(), **{"restarts": 16, "steps": 16, **options})


def assigned(layer: nn.Module, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    with torch.no_grad():
        layer.weight.copy_(weight.reshape(layer.weight.shape))
        if layer.bias is not None:
            layer.bias.copy_(torch.zeros_like(layer.bias) if bias is None else bias)
    return layer


def test_a_linear_layers_weight_and_bias_attain_their_bound() -> None:
    report = attacked(nn.Sequential(nn.Linear(6, 3)), (6,))
    assert 0.95 <= report.group("0").worst_case <= 1 + 1e-9
    assert 0.95 <= report.group("0").layerwise <= 1 + 1e-9


def test_a_deep_linear_layers_weight_attains_its_bound() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False))
    report = attacked(model, (4,))
    assert 0.95 <= report.group("0").worst_case <= 1 + 1e-9


def test_a_convolutions_weight_comes_close_to_its_bound() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, bias=False), nn.Flatten())
    report = attacked(model, (1, 8, 8), Huber(delta=10.0), steps=30)
    assert 0.8 <= report.group("0").worst_case <= 1 + 1e-9
    report = attacked(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.Flatten()), (1, 8, 8), Huber(delta=10.0))
    assert 0.95 <= report.group("0").worst_case <= 1 + 1e-9


def test_cross_entropy_attains_its_constant() -> None:
    model = nn.Sequential(assigned(nn.Linear(2, 2), 20 * torch.eye(2)))
    report = attacked(model, (2,), CrossEntropy())
    assert 0.99 <= report.loss_gradient <= 1 + 1e-9
    assert 0.99 <= report.group("0").worst_case <= 1 + 1e-9


def test_joint_scaling_attains_its_bound() -> None:
    report = attacked(nn.Sequential(nn.Linear(4, 2, bias=False)), (4,))
    assert 0.99 <= report.joint <= 1 + 1e-9


def test_ascent_over_the_weights_finds_more_and_leaves_the_model_alone() -> None:
    model = make_private(nn.Sequential(nn.Linear(5, 6), MaxMin(), nn.Linear(6, 6), MaxMin(), nn.Linear(6, 3)))
    before = copy.deepcopy(model.state_dict())
    fixed = attack(model, (5,), 1.0, Huber(), restarts=12, steps=16)
    free = attack(model, (5,), 1.0, Huber(), restarts=12, steps=16, weights=True)
    assert not fixed.violations() and not free.violations()
    assert free.group("0").worst_case > 1.3 * fixed.group("0").worst_case
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_an_attack_is_reproducible_and_its_witnesses_attain_what_it_reports() -> None:
    model = make_private(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    first, again = (attack(model, (5,), 2.0, CrossEntropy(), restarts=8, steps=8, seed=3) for _ in range(2))
    assert first == again
    x, y = first.witnesses["group 0, worst_case"]
    assert float(x.norm()) <= 2.0 * (1 + 1e-12)
    net = copy.deepcopy(model).double()
    CrossEntropy().per_example(net(x.unsqueeze(0)), y.unsqueeze(0)).sum().backward()
    size = math.hypot(float(net[0].weight.grad.norm()), float(net[0].bias.grad.norm()))
    bound = certify(net, (5,), 2.0, CrossEntropy(), compute_dtype=torch.float64).group("0").worst_case
    assert size / bound == pytest.approx(first.group("0").worst_case, rel=1e-9)


class Cropped(nn.Module):
    """As many numbers as before, three of them padding."""

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (-3, 3), value=9.0)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 4), CotangentClip(0.05), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)), (4,)),
        (nn.Linear(3, 2), (3,)),
        (nn.Sequential(nn.Linear(4, 4), nn.Hardsigmoid(), nn.Linear(4, 2)), (4,)),
        (nn.Sequential(Cropped(), nn.Linear(4, 2)), (4,)),
        (nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.ReLU(), nn.Linear(4, 2)), (4,)),
        (
            nn.Sequential(
                Residual(nn.Sequential(nn.Conv1d(2, 2, 3, padding="same"), nn.ReLU())), nn.Flatten(), nn.Linear(10, 2)
            ),
            (2, 5),
        ),
    ],
    ids=["clip and dropout", "bare layer", "no second derivative", "cropped", "frozen", "residual"],
)  # fmt: skip
@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy", "hinge", "cosine", "huber", "squared_error"])
def test_sound_certificates_stand(model: nn.Module, shape: tuple[int, ...], loss: str) -> None:
    report = attack(make_private(copy.deepcopy(model)), shape, 1.5, loss, restarts=8, steps=5)
    assert not report.violations()
    assert report.worst.ratio > 0.3


def test_dropout_of_everything_is_the_identity_in_evaluation() -> None:
    """Its factor 1 / (1 - p) has no limit to take: trained in evaluation mode, the layer passes everything on."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(1.0), nn.Linear(3, 2))
    report = attack(model, (3,), 1.0, Huber(), restarts=8, steps=4)
    assert not report.violations()
    assert report.group("0").worst_case > 0.1


def test_reports_are_plain_data() -> None:
    report = attacked(nn.Sequential(nn.Linear(3, 2)), (3,), steps=3)
    data = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert data["groups"][0]["name"] == "0" and data["violations"] == []
    assert data["worst"]["ratio"] == report.worst.ratio <= 1 + 1e-9


def test_the_input_itself_is_no_claim_and_a_ratio_that_is_no_number_is_a_violation() -> None:
    report = attacked(nn.Sequential(nn.Linear(3, 2)), (3,), steps=3)
    assert not any("input" in f.claim and "forward" in f.claim for f in report.claims())
    broken = dataclasses.replace(report, nodes=(NodeRatio("v", "op", math.nan, 0.0),))
    assert "node v" in broken.violations()[0].claim and "node v" in broken.worst.claim
    slightly = dataclasses.replace(report, joint=1 + 5e-6)
    assert not slightly.violations() and slightly.violations(tolerance=1e-6)


def test_table_and_json_show_every_group_node_and_violation() -> None:
    model = make_private(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    certificate = certify(model, (3,), 1.0, "hinge")
    report = attack(model, (3,), 1.0, "hinge", restarts=4, steps=2)
    text = certificate_table(certificate, report)
    for word in (
        "worst_case",
        "layerwise",
        "cotangent",
        "attained",
        "no bound exceeded",
        *(n.name for n in certificate.nodes),
    ):
        assert word in text, word
    assert f"{certificate.group('0').worst_case:.4g}" in text
    false = dataclasses.replace(report, joint=1.5)
    assert "joint: 1.5 times its bound" in certificate_table(certificate, false)
    assert "attained" not in certificate_table(certificate)
    infinite = dataclasses.replace(certificate, nodes=(dataclasses.replace(certificate.nodes[0], cotangent=math.inf),))
    data = json.loads(certificate_json(infinite, report))
    assert data["certificate"]["nodes"][0]["cotangent"] == "inf"
    assert data["attack"]["groups"][1]["name"] == "2"


@pytest.mark.parametrize("options", [{"restarts": 0}, {"steps": -1}])
def test_an_attack_without_effort_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="HINT"):
        attacked(nn.Sequential(nn.Linear(3, 2)), (3,), **options)
