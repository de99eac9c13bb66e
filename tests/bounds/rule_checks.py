"""What every rule is held to: the exact Jacobian and the exact output, at inputs searched for the worst."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lipdp_lightning.bounds import certify

SLACK = 1 + 1e-9


class Forward(nn.Module):
    """A module from a plain function of (module, x), with some public and frozen tensors to use."""

    def __init__(self, function: Callable[[Forward, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("scale", torch.randn(4, generator=generator, dtype=torch.float64))
        self.register_buffer("mask", torch.tensor([True, False, True, True]))
        self.frozen = nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def asserted(m: Forward, x: Tensor) -> Tensor:
    """Asserts sizes; pytest would rewrite the assert in a file of tests."""
    assert x.shape[-1] in (4, 8) and x.ndim == 3
    torch._assert(x.shape[1] == 4, "four channels")
    return x[:, :, : x.size(2) // 2] if x.shape[1:] == (4, 8) else 2 * x


def bounds_of(model: nn.Module, shape: tuple[int, ...], radius: float = 1.0) -> tuple[float, float]:
    """Certified Lipschitz constant from the input to the output, and the certified norm of the output."""
    certificate = certify(model.double(), shape, radius, "binary_cross_entropy", compute_dtype=torch.float64)
    lipschitz = certificate.nodes[0].cotangent / certificate.loss_lipschitz
    return lipschitz, certificate.node(certificate.output).forward


def jacobian_norm(model: nn.Module, x: Tensor) -> float:
    """Largest singular value of the Jacobian at one example, in float64."""
    rows = torch.autograd.functional.jacobian(lambda z: model(z).flatten(), x.double()[None])
    return float(torch.linalg.matrix_norm(rows.reshape(len(rows), -1), 2))


def climb(score: Callable[[Tensor], float], starts: Tensor, steps: int, seed: int = 0) -> float:
    """The best score that random perturbations of shrinking size find, from the best of the starts."""
    generator = torch.Generator().manual_seed(seed)
    scored = [(score(x), i) for i, x in enumerate(starts)]
    best, index = max(scored)
    x = starts[index]
    size = 1.0
    for _ in range(steps):
        trial = x + size * x.abs().max().clamp_min(1e-3) * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        found = score(trial)
        if found > best:
            best, x = found, trial
        else:
            size = max(size * 0.93, 1e-4)
    return best


def starts(shape: tuple[int, ...], radius: float, count: int = 12, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    x[0] = 0.0
    if count > 3:
        x[1] = 1.0
        x[2] = -1.0
        x[3] = 0.0
        x[3].view(-1)[0] = 1.0
    return x * (radius / x.flatten(1).norm(dim=1).clamp_min(1e-12)).reshape(-1, *(1,) * len(shape))


def steepest(model: nn.Module, shape: tuple[int, ...], radius: float = 3.0, steps: int = 60) -> float:
    """Largest Jacobian norm found; no ball limits the inputs, for constants hold everywhere."""
    return climb(lambda x: jacobian_norm(model.double(), x), starts(shape, radius), steps)


def largest_output(model: nn.Module, shape: tuple[int, ...], radius: float, steps: int = 60) -> float:
    """Largest output norm found over the ball, by projected gradient ascent from several starts."""
    model = model.double()
    x = starts(shape, radius).requires_grad_(True)
    best = 0.0
    for _ in range(steps):
        norms = model(x).unsqueeze(-1).flatten(1).norm(dim=1)
        best = max(best, float(norms.detach().max()))
        (gradient,) = torch.autograd.grad(norms.sum(), x)
        with torch.no_grad():
            size = gradient.flatten(1).norm(dim=1).clamp_min(1e-12).reshape(-1, *(1,) * len(shape))
            x += 0.3 * radius * gradient / size
            x *= (radius / x.flatten(1).norm(dim=1).clamp_min(radius)).reshape(size.shape)
    return best
