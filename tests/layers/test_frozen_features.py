"""A frozen part of a network: what the certificate relies on, and everything that it must refuse."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lipdp_lightning.audit import attack
from lipdp_lightning.bounds import Certifier, certify
from lipdp_lightning.bounds.graph import CertificationError
from lipdp_lightning.layers import FrozenFeatures, make_private

SHAPE = (2, 4, 4)


def backbone() -> nn.Module:
    """Steep, with statistics, and with layers that have no rule."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.PReLU(), nn.Flatten(), nn.Linear(16, 6)
    )
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(30)
    module[1].running_mean.normal_()
    return module.requires_grad_(False).eval()


def network(extractor: nn.Module | None = None, bound: float = 0.5, mode: str = "normalize") -> nn.Sequential:
    return nn.Sequential(
        FrozenFeatures(extractor or backbone(), bound, mode), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)
    )


@pytest.mark.parametrize("mode", ["normalize", "clip"])
def test_the_ball_is_all_that_the_certificate_needs(mode: str) -> None:
    model = make_private(network(mode=mode))
    certificate = certify(model, SHAPE, 1.0, "cross_entropy")
    assert certificate.node("_0").forward == pytest.approx(0.5, rel=1e-5)
    assert certificate.group("3").worst_case < 3
    assert [g.name for g in certificate.groups] == ["1", "3"]
    report = attack(model, SHAPE, 1.0, "cross_entropy", restarts=8, steps=6)
    assert not report.violations()
    assert report.group("1").worst_case > 0.1


def test_the_attack_finds_a_ball_that_is_twice_as_large_as_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrozenFeatures, "bound", property(lambda self: self.ball.bound / 2))
    report = attack(make_private(network()), SHAPE, 1.0, "cross_entropy", restarts=8, steps=6)
    assert report.violations()


def test_it_stays_in_evaluation_mode_and_no_call_changes_it() -> None:
    model = make_private(network())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(5, *SHAPE)
    calm = model.eval()(x)
    assert torch.equal(model.train()(x), calm)
    assert not any(m.training for m in model[0].modules())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.testing.assert_close(model(x[2:3]), calm[2:3])


@pytest.mark.parametrize("change", ["training", "trained", "statistics"])
def test_what_is_not_frozen_is_refused_at_once_and_in_the_middle_of_training(change: str) -> None:
    """The rule reads the module at every certificate, so that a later change stops the next step."""
    model = make_private(network())
    certifier = Certifier(model, SHAPE, 1.0, "cross_entropy")
    certifier.certify()
    inner = model[0].extractor
    if change == "training":
        inner[1].train()
        message = r"0: .*training mode \(extractor\.1\).*HINT: call \.eval\(\)"
    elif change == "trained":
        inner[1].weight.requires_grad_(True)
        message = r"are trained \(extractor\.1\.weight\).*HINT: freeze"
    else:
        inner[1].running_mean = inner[1].running_var = None
        message = "without running statistics, which mixes examples"
    with pytest.raises(CertificationError, match=message):
        certifier.certify()
    with pytest.raises(ValueError, match="HINT"):
        FrozenFeatures(inner)


class MeanOfBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :6] - 0.1 * x.flatten(1)[:, :6].mean(0)


class RowNumber(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :6] + torch.arange(len(x), dtype=x.dtype)[:, None]


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x.flatten(1)[:, :6], 0.5, training=True)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x.flatten(1)[:, :6]


@pytest.mark.parametrize(
    ("extractor", "message"),
    [
        (MeanOfBatch(), "change with the other examples"), (RowNumber(), "change with the other examples"),
        (Draws(), "from call to call"), (Counts(), "changes its buffers"),
    ],
)  # fmt: skip
def test_an_extractor_that_mixes_examples_draws_or_counts_is_refused(extractor: nn.Module, message: str) -> None:
    with pytest.raises(CertificationError, match=message):
        certify(network(extractor.eval()), SHAPE, 1.0, "cross_entropy")


def test_nothing_trained_may_come_before_it() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), *network())
    with pytest.raises(CertificationError, match="0: its values or cotangents may reach inf"):
        certify(make_private(model), SHAPE, 1.0, "cross_entropy")
    model[0].requires_grad_(False)
    assert math.isfinite(certify(make_private(model), SHAPE, 1.0, "cross_entropy").group("2").worst_case)
