"""Dimensions that are left out, empty, negative, named twice or out of range, in every rule that takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_checks import SLACK, Forward, bounds_of, jacobian_norm, starts
from torch import Tensor

from lipdp_lightning.bounds import CertificationError, certify

# by dims; the second form names them by keyword
ALONG: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "sum": lambda x, d: x.sum(d, keepdim=True), "torch.sum": lambda x, d: torch.sum(x, dim=d),
    "mean": lambda x, d: x.mean(d, keepdim=True), "mean axis": lambda x, d: x.mean(axis=d),
    "amax": lambda x, d: x.amax(d, keepdim=True), "amin": lambda x, d: torch.amin(x, dim=d),
    "flip": lambda x, d: x.flip(d), "torch.flip": lambda x, d: torch.flip(x, dims=d),
    "roll": lambda x, d: x.roll(1, d), "torch.roll": lambda x, d: torch.roll(x, shifts=1, dims=d),
    "rolls": lambda x, d: torch.roll(x, (1, 2), d), "squeeze": lambda x, d: x.squeeze(d),
    "softmax": lambda x, d: torch.softmax(x, d), "F.softmax": lambda x, d: F.softmax(x, dim=d),
    "movedim": lambda x, d: x.movedim(d, d), "cat": lambda x, d: torch.cat([x, x], dim=d),
    "stack": lambda x, d: torch.stack([x, x], d), "chunk": lambda x, d: x.chunk(2, d)[0],
    "split": lambda x, d: x.split(2, dim=d)[0], "unbind": lambda x, d: x.unbind(d)[0],
    "flatten": lambda x, d: x.flatten(d), "transpose": lambda x, d: x.transpose(d, 1),
    "unsqueeze": lambda x, d: x.unsqueeze(d), "permute": lambda x, d: x.permute(d),
    "unflatten": lambda x, d: x.unflatten(d, (1, -1)),
}  # fmt: skip

REFUSED = {
    "none": None, "empty": (), "empty list": [], "batch": 0, "batch by the end": -3, "with the batch": (0, 1),
    "with the batch by the end": (1, -3), "twice": (1, 1), "twice by the end": (1, -2), "too large": 3, "too small": -4,
    "a tuple with too large": (1, 7), "a float": 1.0, "a word": "1", "no": False, "yes": True,
}  # fmt: skip
ACCEPTED = (1, 2, -1, (1,), [2], (1, 2), (-1, 1), (0, 2, 1), (0, -1, -2))


@pytest.mark.parametrize("name", ALONG)
def test_dimensions_that_could_mix_examples_are_refused(name: str) -> None:
    missed = []
    for what, dims in REFUSED.items():
        try:
            certify(Forward(lambda m, x, d=dims: ALONG[name](x, d)).double(), (4, 3), 1.0, "binary_cross_entropy")
        except CertificationError as refused:
            assert "HINT" in str(refused)
        else:
            missed.append(what)
    # where there is one dimension more, -3 comes after the batch, and 3 is the last
    assert set(missed) <= ({"batch by the end", "too large"} if name in ("stack", "unsqueeze") else set())


@pytest.mark.parametrize("name", ALONG)
def test_dimensions_of_one_example_hold(name: str) -> None:
    accepted = 0
    for dims in ACCEPTED:
        model = Forward(lambda m, x, d=dims: ALONG[name](x, d)).double()
        try:
            lipschitz, norm = bounds_of(model, (4, 3), 1.0)
        except CertificationError:
            continue
        accepted += 1
        points = starts((4, 3), 1.0)
        assert max(jacobian_norm(model, x) for x in points[:5]) <= lipschitz * SLACK
        assert float(model(points).unsqueeze(-1).flatten(1).norm(dim=1).max()) <= norm * SLACK
    assert accepted


def test_rolling_along_no_dimension_mixes_examples() -> None:
    """The reason for the refusal: the last entry of an example becomes the first of the next."""
    x = torch.arange(6.0).reshape(3, 2)
    assert torch.roll(x, 1, ()).tolist() == [[5, 0], [1, 2], [3, 4]]
    for function in (lambda m, x: torch.roll(x, 1, dims=()), lambda m, x: x.roll(1, ()), lambda m, x: x.roll((1,))):
        with pytest.raises(CertificationError, match="all dimensions"):
            certify(Forward(function), (4,), 1.0, "binary_cross_entropy")


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.flatten(x),
        lambda m, x: m.unflatten(x),
        lambda m, x: x.T,
        lambda m, x: x.mT,
        lambda m, x: x.mH,
        lambda m, x: x.movedim(0, 1).movedim(0, 1),
        lambda m, x: x.swapaxes(0, 1).swapaxes(0, 1),
        lambda m, x: x.expand(2, -1, -1, -1)[0],
        lambda m, x: x.repeat(2, 1, 1),
        lambda m, x: x.repeat(2, 1, 1, 1)[0],
        lambda m, x: x.flatten(0, 1),
        lambda m, x: x.permute(()),
        lambda m, x: torch.roll(x, (1, 1), (1, 1)),
    ],
)
def test_shapes_that_move_the_batch_are_refused(function: Callable[[Any, Tensor], Tensor]) -> None:
    model: Any = Forward(function)
    model.flatten, model.unflatten = torch.nn.Flatten(0), torch.nn.Unflatten(0, (1, -1))
    with pytest.raises(CertificationError, match="HINT"):
        certify(model, (4, 3), 1.0, "binary_cross_entropy")
