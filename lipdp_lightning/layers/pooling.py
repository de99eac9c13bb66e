"""Norm-preserving pooling."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..bounds.registry import rule
from ..bounds.values import Bound, Operation, Unbounded, Value


class ScaledL2Pool2d(nn.Module):
    """The l2 norm of every non-overlapping window: 1-Lipschitz, and the example's norm is preserved.

    It is l2 average pooling times the root of the window's size. At an all-zero window the gradient is zero.
    """

    def __init__(self, kernel_size: int = 2) -> None:
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"kernel_size={kernel_size} is not positive. HINT: 2.")
        self.kernel_size = kernel_size

    def forward(self, x: Tensor) -> Tensor:
        k = self.kernel_size
        windows = torch.unflatten(torch.unflatten(x, 3, (-1, k)), 2, (-1, k))
        # in float32 the squares of entries near 1e-23 lose their digits, and the gradient exceeds its bound by 1.2
        return torch.linalg.vector_norm(windows, dim=(3, 5), dtype=torch.float64).to(x.dtype)


@rule(ScaledL2Pool2d)
def scaled_l2_pool(op: Operation, x: Value) -> Bound:
    assert isinstance(op.module, ScaledL2Pool2d)
    if len(x.shape) != 3 or x.shape[1] % op.module.kernel_size or x.shape[2] % op.module.kernel_size:
        raise Unbounded(
            f"an example of shape {x.shape} does not split into windows", "choose a kernel_size that divides"
        )
    return Bound(x.norm, 1.0)
