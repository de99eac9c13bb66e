"""Float32 products that are rounded like float32, as the certificate's margins assume."""

from __future__ import annotations

import torch


def require_exact_products() -> None:
    """Switch off TF32 and other reduced products in this process, which torch allows by default in convolutions."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
