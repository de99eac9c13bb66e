"""What the benchmark of the certificate measures is what it says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipdp_lightning.bench import certificate_cost as certificate
from lipdp_lightning.bench.certificate_cost import Passes, RandomUpdates, measure


@pytest.mark.parametrize("size", [0.002, 0.1])
def test_updates_have_the_size_asked_for_and_are_not_all_alike(size: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Conv2d(3, 8, 3))
    update, changes = RandomUpdates(model, size), []
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        update()
        changes.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
        for change, old in zip(changes[-1], before, strict=True):
            assert float(change.norm()) == pytest.approx(size * float(old.norm()), rel=1e-3)
    first, second = (torch.cat([c.flatten() for c in change]) for change in changes)
    assert abs(float(nn.functional.cosine_similarity(first, second, dim=0))) < 0.2


def test_long_passes_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    passes = Passes(model, (3, 2, 2), [2, 4], repeats=3)
    for limit, expected in ((1e9, 1), (1e9, 2), (0.0, 2)):
        monkeypatch.setattr(certificate, "LONG_PASS", limit)
        passes.take()
        assert [len(taken) for taken in passes.seconds.values()] == [expected] * 2


def test_parts_of_a_batch_add_up_to_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    passes = Passes(model, (3, 2, 2), [7], repeats=1)
    batch, gradients = (torch.randn(7, 3, 2, 2), torch.randint(0, 10, (7,))), []
    for part in (7, 2):
        monkeypatch.setattr(certificate, "MICRO_BATCH", part)
        passes._run(*batch)
        gradients.append(model[1].weight.grad)
    torch.testing.assert_close(*gradients)


def test_every_layer_is_charged_with_an_exact_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates too small for any bound to move beyond its slack: the exact norms are charged all the same."""
    monkeypatch.setitem(certificate.MODELS, "tiny", (lambda: nn.Sequential(nn.Flatten(), nn.Linear(27, 20)), (3, 3, 3)))
    monkeypatch.setattr(certificate, "_MAX_NORM", 100.0)
    (cost,) = measure("tiny", [2], repeats=1, steps=5, update_size=1e-9)
    assert cost.refreshes_per_step == 1 / 5
    (moving,) = measure("tiny", [2], repeats=1, steps=5, update_size=0.5)
    assert moving.refreshes_per_step > 1 / 5
    assert cost.percent_of_step == pytest.approx(100 * cost.amortised / cost.forward_backward)
    assert cost.amortised > cost.projection > 0
