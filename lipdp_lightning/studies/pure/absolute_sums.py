"""Bounds on one example's gradient in the l1 norm and in its largest entry (004, section 5.2, for p = 1 and infinity).

The norm of a matrix from l1 to l1 is its largest column sum of absolute values, and from l-infinity to l-infinity its
largest row sum: both are computed exactly, where the spectral norm is only bounded. An example goes forward, x' = W x
+ b, and its cotangent backward, g = W^T g', so that in l1 the column sums of W bound outputs, and its row sums bound
cotangents; for the largest entry it is the other way round. The gradient of a dense layer is the outer product g' x^T,
whose entries sum to ||g'||_1 ||x||_1 and are at most ||g'||_inf ||x||_inf, and that of its bias is g'. For a
convolution, every output position reads distinct input positions, so that its gradient has an l1 norm of at most
||g'||_1 ||x||_1, and no entry above the smaller of ||g'||_1 ||x||_inf and ||g'||_inf ||x||_1. Weights and inputs are
float64, whose rounding a margin of 1e-9 covers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipdp_lightning.bounds.losses import AbsoluteError, BinaryCrossEntropy, CrossEntropy, Huber, Loss

MARGIN = 1 + 1e-9
_ONE_LIPSCHITZ = (nn.Identity, nn.Flatten, nn.ReLU, nn.Tanh)  # each entry by itself, and 0 at 0


@dataclass(frozen=True)
class Sizes:
    """Bounds on the sum of absolute entries, and on the largest one."""

    total: float
    largest: float

    def within(self, entries: int) -> Sizes:
        """Returns the bounds, each tightened by the other: the largest entry is at most the sum, and the sum at most
        the largest entry times their number.
        """
        return Sizes(min(self.total, entries * self.largest) * MARGIN, min(self.largest, self.total) * MARGIN)


@dataclass(frozen=True)
class AbsoluteBound:
    """Bounds how far one example moves the summed gradient of a layer, in l1 (total) and in its largest entry."""

    name: str
    numel: int
    sizes: Sizes


def loss_sizes(loss: Loss, shape: tuple[int, ...]) -> Sizes:
    """Returns bounds on an example's gradient with respect to the outputs.

    Softmax cross-entropy has the gradient p - y, whose entries sum to 2 (1 - p_y) in absolute value.
    """
    entries, positions = math.prod(shape), math.prod(shape[1:])
    if type(loss) is CrossEntropy and loss.class_weights is None:
        return Sizes(2.0 * positions / loss.temperature, 1.0 / loss.temperature)
    if type(loss) is BinaryCrossEntropy:
        return Sizes(float(entries), 1.0)
    if type(loss) is AbsoluteError:
        return Sizes(float(entries), 1.0)
    if type(loss) is Huber:
        return Sizes(entries * loss.delta, loss.delta)
    raise ValueError(
        f"the loss {type(loss).__name__} has no constant in l1 here. HINT: use CrossEntropy, BinaryCrossEntropy, "
        "AbsoluteError or Huber."
    )


def absolute_bounds(
    network: nn.Sequential, input_shape: tuple[int, ...], inputs: Sizes, loss: Loss
) -> list[AbsoluteBound]:
    """Returns the bounds of every layer with parameters, in order, for every example within ``inputs``.

    Raises:
        ValueError: if a layer has no exact operator sums here, or weights are not float64.
    """
    sample = torch.zeros(1, *input_shape, dtype=torch.float64)
    walked: list[tuple[str, nn.Module, Sizes, tuple[int, ...]]] = []
    sizes = inputs.within(math.prod(input_shape))
    for name, layer in network.named_children():
        _check(name, layer)
        if isinstance(layer, nn.Linear) and sample.dim() != 2:
            raise ValueError(f"layer {name} ({layer}) is used at several positions. HINT: put Flatten before it.")
        walked.append((name, layer, sizes, tuple(sample.shape[1:])))
        sample = layer(sample)
        sizes = _forward(layer, sizes).within(sample[0].numel())
    cotangent = loss_sizes(loss, tuple(sample.shape[1:]))
    found: list[AbsoluteBound] = []
    for name, layer, entering, shape in reversed(walked):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            numel = sum(p.numel() for p in layer.parameters())
            found.append(AbsoluteBound(name, numel, _gradient(layer, cotangent, entering)))
            rows, columns = operator_sums(layer)
            cotangent = Sizes(rows * cotangent.total, columns * cotangent.largest)
        cotangent = cotangent.within(math.prod(shape))
    return found[::-1]


def operator_sums(layer: nn.Linear | nn.Conv2d) -> tuple[float, float]:
    """Returns the largest row sum and the largest column sum of absolute weights of the layer's matrix.

    A convolution's row belongs to an output channel, and its column to an input channel: a position at the border has
    fewer terms, and one inside has all of them if the stride is 1.
    """
    size = layer.weight.detach().abs()
    over = tuple(range(2, size.dim()))
    return float(size.sum(dim=(1, *over)).max()), float(size.sum(dim=(0, *over)).max())


def _forward(layer: nn.Module, entering: Sizes) -> Sizes:
    if not isinstance(layer, nn.Linear | nn.Conv2d):
        return entering
    rows, columns = operator_sums(layer)
    total, largest = columns * entering.total, rows * entering.largest
    if layer.bias is not None:
        bias = layer.bias.detach().abs()
        # a convolution repeats its bias at every position; `within` then bounds the sum by the largest entry
        total = total + float(bias.sum()) if isinstance(layer, nn.Linear) else math.inf
        largest += float(bias.max())
    return Sizes(total, largest)


def _gradient(layer: nn.Linear | nn.Conv2d, cotangent: Sizes, entering: Sizes) -> Sizes:
    total = cotangent.total * (entering.total + (layer.bias is not None))
    if isinstance(layer, nn.Linear):
        largest = cotangent.largest * max(entering.largest, float(layer.bias is not None))
    else:
        largest = min(cotangent.total * entering.largest, cotangent.largest * entering.total)
        largest = max(largest, cotangent.total) if layer.bias is not None else largest
    return Sizes(total * MARGIN, largest * MARGIN)


def _check(name: str, layer: nn.Module) -> None:
    plain = type(layer) in (*_ONE_LIPSCHITZ, nn.Linear, nn.Conv2d)
    if isinstance(layer, nn.Conv2d):
        plain = plain and layer.groups == 1 and layer.padding_mode == "zeros"
    if not plain:
        raise ValueError(
            f"layer {name} ({layer}) has no exact sums of rows and columns here. "
            "HINT: use a Sequential of Linear, Conv2d "
            "(one group, zero padding), ReLU, Tanh, Flatten."
        )
    if any(p.dtype != torch.float64 for p in layer.parameters()):
        raise ValueError(f"layer {name} has weights that are not float64, whose rounding has no margin here. HINT: "
                         "network.double()")  # fmt: skip


def into_box_and_l1_ball(inputs: Tensor, sizes: Sizes) -> Tensor:
    """Returns each example clamped to the largest entry, and scaled down to the sum if it is above; nan becomes 0."""
    flat = torch.nan_to_num(inputs.double()).clamp(-sizes.largest, sizes.largest).flatten(1)
    factor = (sizes.total / flat.abs().sum(1, keepdim=True).clamp_min(1e-300)).clamp_max(1.0)
    return (flat * factor).reshape(inputs.shape)


def per_example_sizes(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the l1 norm and largest entry of each example's gradient, (examples, 2), from gradients by example."""
    flat = torch.cat([g.flatten(1).abs() for g in gradients], dim=1)
    return torch.stack((flat.sum(1), flat.max(1).values), dim=1)
