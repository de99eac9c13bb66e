"""The batch size as a number: good for naming the first dimension of a shape, refused everywhere else."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rule_checks import Forward, asserted
from torch import Tensor, nn

from lipdp_lightning.bounds import Bound, CertificationError, certify, rule
from lipdp_lightning.bounds.certifier import Certifier
from lipdp_lightning.layers import make_private

Call = Callable[[Any, Tensor], Tensor]

# n is a number made from the batch size; every one of these computes with it
USES: dict[str, Callable[[Any, Tensor, Any], Tensor]] = {
    "shift": lambda m, x, n: torch.roll(x, n, 1),
    "shift in a tuple": lambda m, x, n: x.roll((1, n), (1, 2)),
    "dim": lambda m, x, n: x.sum(n, keepdim=True),
    "lower limit": lambda m, x, n: torch.clamp(x, min=n),
    "upper limit": lambda m, x, n: x.clamp_max(n),
    "slice end": lambda m, x, n: x[:, :n],
    "slice start": lambda m, x, n: x[:, n:],
    "slice step": lambda m, x, n: x[:, :: n + 1],
    "index": lambda m, x, n: x[:, n // 64],
    "ellipsis": lambda m, x, n: x[..., :n],
    "pad": lambda m, x, n: F.pad(x, (0, n)),
    "pad value": lambda m, x, n: F.pad(x, (1, 1), value=n),
    "alpha": lambda m, x, n: torch.add(x, x, alpha=n),
    "divisor": lambda m, x, n: x / n,
    "factor": lambda m, x, n: x * n,
    "term": lambda m, x, n: x + n,
    "chunks": lambda m, x, n: x.chunk(n, 1)[0],
    "split size": lambda m, x, n: x.split(n + 1, 1)[0],
    "sections": lambda m, x, n: torch.tensor_split(x, (1, n), 1)[0],
    "copies": lambda m, x, n: x.repeat(1, n, 1),
    "expanded": lambda m, x, n: x[:, :, None].expand(-1, -1, n, -1),
    "kernel": lambda m, x, n: F.avg_pool1d(x, n),
    "stride": lambda m, x, n: F.max_pool1d(x, 2, n),
    "output size": lambda m, x, n: F.adaptive_avg_pool1d(x, n),
    "slope": lambda m, x, n: F.leaky_relu(x, n),
    "beta": lambda m, x, n: F.softplus(x, n),
    "shrinkage": lambda m, x, n: F.softshrink(x, n),
    "swapped dims": lambda m, x, n: x.transpose(1, n // 64 + 1),
    "later size": lambda m, x, n: x.reshape(x.shape[0], n, -1),
    "later size of a view": lambda m, x, n: x.view(-1, n, 12),
    "table of constants": lambda m, x, n: x + m.table[n],
    "argument of a module": lambda m, x, n: m.takes_number(x, n),
    "member": lambda m, x, n: x.unbind(1)[n],
}  # fmt: skip

# each agrees at batches of 2 and 3, or is the batch size itself
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "size": lambda x: x.size(0),
    "shape": lambda x: x.shape[0],
    "size by keyword": lambda x: x.size(dim=-3),
    "numel": lambda x: x.numel(),
    "quotient": lambda x: 1 + x.shape[0] // 4,
    "remainder": lambda x: x.shape[0] % 1 + 1,
    "of a slice": lambda x: 1 + x.shape[0:1][0] // 4,
    "shape of a shape": lambda x: x.shape[-3:][-3] // 64 + 1,
    "difference": lambda x: (x.shape[0] + 1) // 4 + 1 - x.shape[0] // 4,
    "member by quotient": lambda x: x.shape[1:][x.shape[0] // 4],
    "slice by quotient": lambda x: x.shape[1 + x.shape[0] // 4 :][0],
    "negative": lambda x: -(-x.shape[0] // 8),
    "half of the entries": lambda x: x.numel() // 24 // 4 + 1,
}  # fmt: skip


class TakesNumber(nn.Module):
    def forward(self, x: Tensor, n: int) -> Tensor:
        return x * n


@rule(TakesNumber)
def takes_number(op: Any, x: Any, n: Any) -> Bound:
    return Bound(x.norm, 1.0)


def refusal(function: Call, shape: tuple[int, ...] = (4, 3)) -> str:
    model = Forward(function)
    model.register_buffer("table", torch.arange(64.0))
    model.takes_number = TakesNumber()
    with pytest.raises(CertificationError) as refused:
        certify(model.double(), shape, 1.0, "binary_cross_entropy", compute_dtype=torch.float64)
    message = str(refused.value)
    assert message.count("HINT: ") == len(refused.value.problems) >= 1
    return message


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("number", ["shape", "quotient", "half of the entries"])
def test_the_batch_size_is_refused_wherever_it_is_not_a_shape(use: str, number: str) -> None:
    refusal(lambda m, x: USES[use](m, x, NUMBERS[number](x)))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("use", ["shift", "factor", "slice end", "later size"])
def test_every_number_made_from_the_batch_size_is_found(use: str, number: str) -> None:
    refusal(lambda m, x: USES[use](m, x, NUMBERS[number](x)))


def test_the_refusal_names_the_batch_size() -> None:
    for use in ("shift", "divisor", "slice end", "pad", "chunks", "argument of a module"):
        assert "batch size" in refusal(lambda m, x, use=use: USES[use](m, x, x.shape[0]))


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.tanh() * x.requires_grad,
        lambda m, x: x.tanh() * x.is_leaf,
        lambda m, x: x.tanh() * x.nbytes,
        lambda m, x: x.tanh() * x.data_ptr(),
        lambda m, x: x.tanh() * x.is_contiguous(),
        lambda m, x: x if x.shape[0] > 1 else 2 * x,
        lambda m, x: x if x.shape[0] == 64 else 2 * x,
        lambda m, x: x if x.size(0) // 64 else 2 * x,
        lambda m, x: x if x.shape[0] % 64 == 63 else 2 * x,
        lambda m, x: x if x.numel() > 999 else 2 * x,
        lambda m, x: x if x.numel() // 4 > 32 else 2 * x,
        lambda m, x: x if x.numel() // (x.shape[0] + 1) > 11 else 2 * x,
        lambda m, x: x if x.numel() - x.shape[0] > 99 else 2 * x,
        lambda m, x: x if x.shape[0] // 2 > 32 else 2 * x,
        lambda m, x: x if 64 // x.shape[0] > 1 else 2 * x,
        lambda m, x: x if x.shape == (64, 4, 3) else 2 * x,
        lambda m, x: x if x.shape[:2] != (64, 4) else 2 * x,
        lambda m, x: x if x.transpose(0, 1).shape[1] < 64 else 2 * x,
        lambda m, x: x if x.shape[0] not in (64, 65) else 2 * x,
        lambda m, x: x * (x.shape[0] // 64 != x.shape[0] // 65),
        lambda m, x: (torch._assert(x.shape[0] < 64, "small batches only"), x)[1],
        lambda m, x: x * min(x.shape[0], 2),
        lambda m, x: x * max(x.shape[0], 4),
        lambda m, x: x * torch.sym_max(x.shape[0], 4),
        lambda m, x: x * (x.shape[0] > 7),
        lambda m, x: x / len(x),
        lambda m, x: x * x.shape.count(4),
        lambda m, x: x * (x.shape == (2, 4, 3)),
        lambda m, x: x.view(x.shape[0] // 4 + 1, -1, 4, 3)[0],
        lambda m, x: x.view(-1, x.shape[0], 12)[0],
        lambda m, x: x.reshape(4, x.shape[0], 3).permute(1, 0, 2),
        lambda m, x: x.unflatten(1, (-1, x.shape[0] // 4 + 1)),
        lambda m, x: x.unflatten(0, (x.shape[0] // 4 + 1, -1))[0],
        lambda m, x: x.view(x.shape[0] * 4, 3),
        lambda m, x: x.view(x.shape[::-1]),
        lambda m, x: x.view_as(x),
        lambda m, x: x.expand(x.shape[0] // 4 + 1, -1, -1, -1)[0],
    ],
)
def test_other_ways_to_compute_with_the_batch_are_refused(function: Call) -> None:
    refusal(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.view(x.shape[0], -1),
        lambda m, x: x.view(x.size(0), 12),
        lambda m, x: x.reshape((x.shape[0], 12)),
        lambda m, x: torch.reshape(x, shape=(x.size(0), -1)),
        lambda m, x: x.view(x.shape),
        lambda m, x: x.view(size=x.size()),
        lambda m, x: x.view(operator.add(x.shape, (1,))),
        lambda m, x: x.view(-1, x.shape[1] * x.shape[2]),
        lambda m, x: x.view(x.size(0), x.numel() // x.shape[0]),
        lambda m, x: x.view((2 * x.shape[0]) // 2, -1),
        lambda m, x: x.view(x.shape[-3], x.shape[-1], x.shape[1]),
        lambda m, x: x[:, :, None].expand(x.shape[0], -1, 2, -1),
        lambda m, x: x[:, None].expand(operator.add(x.shape[:1], (2, 4, 3))),
        lambda m, x: x * x.shape[1] / x.size(-1),
        lambda m, x: x[:, : x.shape[1] // 2],
        lambda m, x: x * x.dim(),
        lambda m, x: torch.roll(x, x.numel() // x.shape[0] // 4, 1),
        lambda m, x: x.to(x.dtype).to(x.device) * x.ndim,
    ],
)
def test_shapes_that_keep_examples_apart_are_certified(function: Call) -> None:
    model = Forward(function).double()
    certify(model, (4, 3), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)


def test_a_wrapped_function_does_not_pass_for_arithmetic_on_shapes() -> None:
    def mul(x: Any, factor: float) -> Any:
        return 1.0 * float(x.abs().sum() > 0) * factor

    def forward(m: Any, x: Any) -> Any:
        number = x.node.graph.call_function(mul, (x.node, 2.0))
        return x * torch.fx.Proxy(number, x.tracer)

    assert "mul has no rule" in refusal(forward)


def pooled(m: Any, x: Tensor) -> Tensor:
    while x.shape[-1] > 2:
        x = F.avg_pool1d(x, 2)
    return x


DECISIONS: dict[str, tuple[Call, Call]] = {  # a forward that decides by sizes of one example, and what it computes
    "if": (lambda m, x: 3 * x if x.shape[1] > 4 else 2 * x, lambda m, x: 2 * x),
    "else": (lambda m, x: 3 * x if x.shape[1] >= 4 else 2 * x, lambda m, x: 3 * x),
    "while": (pooled, lambda m, x: F.avg_pool1d(F.avg_pool1d(x, 2), 2)),
    "assert": (asserted, lambda m, x: x[:, :, :4]),
    "not": (lambda m, x: 3 * x if not x.shape[2] % 2 else x, lambda m, x: 3 * x),
    "factor": (lambda m, x: x * (x.shape[1] == 4) * 2, lambda m, x: 2 * x),
    "entries of an example": (lambda m, x: 3 * x if x.numel() // x.shape[0] > 32 else 2 * x, lambda m, x: 2 * x),
    "ratio of sizes": (lambda m, x: 3 * x if x.numel() / (2 * x.size(0)) == 16 else 2 * x, lambda m, x: 3 * x),
    "after a constant": (lambda m, x: (x + m.table[:8]) * (2 if x.shape[2] != 8 else 3), lambda m, x: 3 * x),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions_by_sizes_of_an_example_are_made_when_the_network_is_traced(name: str) -> None:
    function, computed = DECISIONS[name]
    decides, plain = Forward(function).double(), Forward(computed).double()
    decides.register_buffer("table", torch.zeros(8, dtype=torch.float64))
    certifier = Certifier(decides, (4, 8), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)
    found, expected = certifier.certify(), certify(
        plain, (4, 8), 1.0, "binary_cross_entropy", compute_dtype=torch.float64
    )  # fmt: skip
    assert found.nodes[-1].forward == pytest.approx(expected.nodes[-1].forward, rel=1e-6)
    x = torch.randn(70, 4, 8, dtype=torch.float64)
    torch.testing.assert_close(certifier.run(x), decides(x))


def test_an_assertion_that_fails_is_refused() -> None:
    assert "cannot be traced" in refusal(asserted)


def test_layers_are_swapped_before_the_shape_is_known() -> None:
    make_private(Forward(DECISIONS["while"][0]))
    with pytest.raises(CertificationError, match="HINT: decide by sizes of an example"):
        certify(make_private(Forward(lambda m, x: x if x.shape[0] > 4 else 2 * x)), (4, 8), 1.0, "hinge")


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x if (x > 0).any() else 2 * x,
        lambda m, x: x if x.sum() == 0 else 2 * x,
        lambda m, x: x if x.sum().item() < 1 else 2 * x,
        lambda m, x: x if m.table.sum() > 0 else 2 * x,
        lambda m, x: x * (x > 0),
        lambda m, x: (torch._assert((x < 9).all(), "small values only"), x)[1],
    ],
)
def test_decisions_by_values_are_refused(function: Call) -> None:
    refusal(function)
