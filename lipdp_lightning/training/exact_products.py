"""Products that are rounded as the certificate's margins assume."""

from __future__ import annotations

import torch

from ..kernels.arithmetic import check_exact_arithmetic, require_exact_arithmetic
from ..kernels.numeric_environment import require_repeated_bits


def require_exact_products(device: torch.device, deterministic: bool = False) -> None:
    """Switches off TF32 and other reduced products in this process, which torch allows by default in convolutions.

    Args:
        device: that the run trains on.
        deterministic: whether a GPU has to repeat its bits; a CPU always does.

    Raises:
        ValueError: if the environment forces other products, or bits that do not repeat.
    """
    require_exact_arithmetic()
    check_exact_arithmetic()
    if deterministic and device.type == "cuda":
        require_repeated_bits()
