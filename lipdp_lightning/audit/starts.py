"""Chooses where an attack begins: inputs on the ball's boundary, and targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from ..bounds.losses import (
    AbsoluteError,
    BinaryCrossEntropy,
    CosineSimilarity,
    CrossEntropy,
    Huber,
    Loss,
    MulticlassHinge,
    SmoothL1,
    SoftCrossEntropy,
    SquaredError,
)

_CLASS_LOSSES = (CrossEntropy, MulticlassHinge, CosineSimilarity)
_DISTANCES = (AbsoluteError, Huber, SmoothL1, SquaredError)
_LABELS_TRIED = 16
Targets = Callable[[int, torch.Generator], Tensor]


def project(inputs: Tensor, bound: float) -> Tensor:
    """Returns each example projected onto the ball."""
    size = torch.linalg.vector_norm(inputs.flatten(1), dim=1).clamp_min(bound)
    return inputs * (bound / size).reshape(-1, *(1,) * (inputs.dim() - 1))


def to_boundary(inputs: Tensor, bound: float) -> Tensor:
    """Returns each example scaled to the sphere; a zero example stays zero."""
    size = torch.linalg.vector_norm(inputs.flatten(1), dim=1).clamp_min(1e-30)
    return inputs * (bound / size).reshape(-1, *(1,) * (inputs.dim() - 1))


def starting_inputs(
    model: nn.Module, shape: tuple[int, ...], bound: float, count: int, generator: torch.Generator
) -> Tensor:
    """Returns constants, single pixels, a checkerboard, top singular directions of the model, and random directions."""
    ones = torch.ones(shape, dtype=torch.float64)
    flat = torch.zeros(ones.numel(), dtype=torch.float64)
    pixels = []
    for index in (0, flat.numel() // 2, flat.numel() - 1):
        pixels.append(flat.index_fill(0, torch.tensor([index]), 1.0).reshape(shape))
    board = torch.arange(flat.numel()).remainder(2).mul(2).sub(1).to(torch.float64).reshape(shape)
    smart = [ones, -ones, *pixels, -pixels[1], board]
    noise = torch.randn((max(count, 3), *shape), dtype=torch.float64, generator=generator)
    # one at a time, since keyed dropout holds the id of one example
    smart += [singular_direction(model, to_boundary(row, bound), bound)[0] for row in noise[:2].split(1)]
    chosen = torch.cat((torch.stack(smart), noise))[torch.randperm(len(smart) + len(noise), generator=generator)]
    return to_boundary(chosen[:count], bound)


def singular_direction(model: nn.Module, at: Tensor, bound: float, rounds: int = 4) -> Tensor:
    """Returns a direction of large response at the given input, by power iteration with finite differences."""
    direction = at
    for _ in range(rounds):
        with torch.no_grad():
            step = 1e-4 * bound
            response = (model(at + step * to_boundary(direction, 1.0)) - model(at)) / step
        x = at.detach().clone().requires_grad_()
        (pulled,) = torch.autograd.grad((model(x) * response).sum(), x, allow_unused=True)
        if pulled is None or not bool(torch.isfinite(pulled).all()) or float(pulled.abs().max()) == 0.0:
            break  # a table of tokens has no slope
        direction = to_boundary(pulled, bound)
    return direction


def target_source(loss: Loss, output_shape: tuple[int, ...]) -> Targets:
    """Returns a function that draws random targets for the loss; a loss of unknown kind raises ValueError."""
    if isinstance(loss, _CLASS_LOSSES):
        classes, positions = output_shape[0], output_shape[1:]
        return lambda n, g: torch.randint(classes, (n, *positions), generator=g)
    if isinstance(loss, BinaryCrossEntropy):
        return lambda n, g: torch.randint(2, (n, *output_shape), generator=g).to(torch.float64)
    if isinstance(loss, SoftCrossEntropy):
        classes, positions = output_shape[0], output_shape[1:]
        return lambda n, g: (
            one_hot(torch.randint(classes, (n, *positions), generator=g), classes).movedim(-1, 1).double()
        )
    if isinstance(loss, _DISTANCES):
        far = 1e3 * getattr(loss, "delta", 1.0)
        return lambda n, g: far * torch.randn((n, *output_shape), dtype=torch.float64, generator=g).sign()
    raise ValueError(
        f"no targets are known for the loss {type(loss).__name__}. HINT: pass targets=, a function of "
        "(count, generator) that draws them."
    )


def alternative_targets(
    loss: Loss, output_shape: tuple[int, ...], draw: Targets, count: int, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yields other targets for every candidate: each label at all positions, all outputs far on one side,
    random ones.
    """
    if isinstance(loss, _CLASS_LOSSES):
        for label in range(min(output_shape[0], _LABELS_TRIED)):
            yield torch.full((count, *output_shape[1:]), label)
    elif isinstance(loss, (BinaryCrossEntropy, *_DISTANCES)):
        sample = draw(count, generator)
        for side in (sample.min(), sample.max()):
            yield torch.full_like(sample, float(side))
    if not isinstance(loss, _CLASS_LOSSES) or len(output_shape) > 1:
        yield draw(count, generator)
