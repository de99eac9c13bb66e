"""Padding with every kind of widths, counted apart from the rule: from where each padded entry was copied."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_checks import SLACK, Forward, bounds_of
from torch import nn

from lipdp_lightning.bounds import CertificationError, certify

MODES = ("circular", "reflect", "replicate", "constant")


def explicit(pad: Any, shape: tuple[int, ...]) -> float:
    """Norm of the padding's matrix, column by column from its forward, and from its gradient: the larger."""
    count = math.prod(shape)
    basis = torch.eye(count, dtype=torch.float64).reshape(count, *shape)
    columns = (pad(basis) - pad(torch.zeros_like(basis))).flatten(1)
    rows = torch.autograd.functional.jacobian(lambda z: pad(z[None]).flatten(), basis[0])
    norms = [float(torch.linalg.matrix_norm(m, 2)) for m in (columns, rows.reshape(-1, count)) if m.numel()]
    return max(norms, default=0.0)


def check(model: nn.Module, pad: Any, shape: tuple[int, ...]) -> bool:
    """Whether the padding is certified; what is certified must hold."""
    with contextlib.suppress(RuntimeError):
        if pad(torch.zeros(1, *shape, dtype=torch.float64)).numel() == 0:
            return False
    try:
        lipschitz, norm = bounds_of(model, shape, 1.0)
    except CertificationError as refused:
        assert "HINT" in str(refused)
        return False
    truth = explicit(pad, shape)
    assert truth <= lipschitz * SLACK
    assert truth <= norm * SLACK
    return True


@pytest.mark.parametrize("mode", MODES)
def test_widths_of_both_signs(mode: str) -> None:
    certified = set()
    for widths in itertools.product((-4, -1, 0, 2, 3), repeat=2):
        if check(
            Forward(lambda m, x, w=widths: F.pad(x, w, mode=mode)), lambda x, w=widths: F.pad(x, w, mode=mode), (1, 5)
        ):
            certified.add(widths)
    for widths in ((-1, 2, 1, -1), (2, 1, 0, -2), (1, 1, 1, 2), (-1, -1, 2, 2)):
        check(
            Forward(lambda m, x, w=widths: F.pad(x, w, mode=mode)),
            lambda x, w=widths: F.pad(x, w, mode=mode),
            (1, 4, 4),
        )
    assert {(0, 2), (2, 2), (3, 0)} <= certified
    assert ((-1, 2) in certified) == (mode != "circular")


@pytest.mark.parametrize("widths", [(-4, 2), (2, -4), (-4, 3), (-1, 0), (0, -1), (-1, -1)])
def test_circular_padding_that_crops_is_refused(widths: tuple[int, int]) -> None:
    """(-4, 2) on 5 entries has norm sqrt(3) where its gradient says sqrt(2); (-5, 2) reads memory never written."""
    for model in (Forward(lambda m, x: F.pad(x, widths, mode="circular")), nn.CircularPad1d(widths)):
        with pytest.raises(CertificationError, match="crops"):
            certify(model, (2, 5), 1.0, "binary_cross_entropy")
    both = Forward(lambda m, x: F.pad(x, (1, 1, *widths), mode="circular"))
    with pytest.raises(CertificationError, match="crops"):
        certify(both, (2, 5, 5), 1.0, "binary_cross_entropy")


MODULES = {
    1: (nn.CircularPad1d, nn.ReflectionPad1d, nn.ReplicationPad1d, nn.ZeroPad1d),
    2: (nn.CircularPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.ZeroPad2d),
}


@pytest.mark.parametrize("rank", MODULES)
def test_padding_modules(rank: int) -> None:
    shape = (1, 5) if rank == 1 else (1, 4, 3)
    for kind, widths in itertools.product(MODULES[rank], ((1, 2), (-1, 2), (2, -1), (0, 0))):
        module = kind(widths * rank)
        check(module, module, shape)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize("padding", [-1, 2, (1, -1)])
def test_paddings_of_convolutions(mode: str, padding: Any) -> None:
    layer = nn.Conv2d(1, 2, 2, padding=padding, padding_mode=mode, bias=False).requires_grad_(False)
    assert check(layer, layer.double(), (1, 4, 4)) == (padding == 2)


def test_a_convolution_whose_padding_was_changed_is_refused() -> None:
    """In every mode but zeros, forward pads by widths that were computed when the layer was made."""
    layer = nn.Conv2d(1, 2, 3, padding=3, padding_mode="circular")
    layer.padding = (1, 1)
    with pytest.raises(CertificationError, match="padding"):
        certify(layer, (1, 4, 4), 1.0, "binary_cross_entropy")


@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (1.0, 2), (1, 1, 1, 1, 1, 1), (True, [1])])
def test_other_widths_are_refused(widths: Any) -> None:
    with pytest.raises(CertificationError, match="HINT"):
        certify(Forward(lambda m, x: F.pad(x, widths)), (2, 5), 1.0, "binary_cross_entropy")
