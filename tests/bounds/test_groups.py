"""Groups of parameters that are used together, or share a tensor."""

from __future__ import annotations

import torch
from torch import nn

from lipdp_lightning.bounds.certificate import Use, UseBound, grouped
from lipdp_lightning.bounds.certifier import Certifier


def use(bound: float, *parameters: torch.Tensor) -> Use:
    return parameters, UseBound("node", "linear", bound, 1.0, 1.0, 1.0, True)


def test_uses_that_share_a_tensor_become_one_group() -> None:
    a, b, c = (nn.Parameter(torch.zeros(n)) for n in (2, 3, 4))
    named = {"one.weight": a, "one.bias": b, "two.weight": c}
    apart = grouped([use(1.0, a, b), use(2.0, c)], named)
    assert [(g.name, g.numel, g.worst_case) for g in apart] == [("one", 5, 1.0), ("two", 4, 2.0)]
    together = grouped([use(1.0, a, b), use(2.0, c, b)], named)
    assert [(g.parameters, g.numel, g.worst_case) for g in together] == [
        (("one.weight", "one.bias", "two.weight"), 9, 3.0)
    ]
    assert len(grouped([use(1.0, a, b)], named)) == 1
    bridged = grouped([use(1.0, a), use(2.0, c), use(4.0, b), use(8.0, c, b)], named)
    assert [(g.name, g.worst_case) for g in bridged] == [("one.weight", 1.0), ("one.bias", 14.0)]
    assert [g.name for g in grouped([use(2.0, c), use(1.0, a, b)], named)] == ["one", "two"]
    renamed = {"first": a, "second": b, "third": c}
    assert [g.name for g in grouped([use(1.0, a), use(2.0, c)], renamed)] == ["first", "third"]


def test_a_layer_tied_after_set_up_joins_the_group() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    certifier = Certifier(model, (2,), 1.0, "cross_entropy")
    assert [g.parameters for g in certifier.certify().groups] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
    model[2].weight = model[0].weight
    assert [g.parameters for g in certifier.certify().groups] == [("0.weight", "0.bias", "2.bias")]
    for _ in range(3):  # a tensor may get the address of one that is gone
        model[2].weight = nn.Parameter(model[0].weight.detach().clone())
        assert [g.parameters for g in certifier.certify().groups] == [("0.weight", "0.bias"), ("2.weight", "2.bias")]
