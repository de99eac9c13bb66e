"""Products of matrices with their own transposes, and when float32 ones can be trusted."""

from __future__ import annotations

import os

import torch
from torch import Tensor

_MIRRORED_SIDE, _MIRRORED_PRODUCTS = 128, 2**22
_STRIPS = 8
_ONEDNN_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")


def rows_gram(matrices: Tensor) -> Tensor:
    """X X^H, batched over leading dimensions, real or complex.

    Large ones strip by strip, each entry above the diagonal once and copied below it: 9/16 of the work.
    """
    rows, columns = matrices.shape[-2:]
    if rows < _MIRRORED_SIDE or rows * rows * columns < _MIRRORED_PRODUCTS:
        return matrices @ matrices.mH
    product = matrices.new_empty(*matrices.shape[:-1], rows)
    width = -(-rows // _STRIPS)
    for start in range(0, rows, width):
        strip = slice(start, start + width)
        below = matrices[..., start:, :] @ matrices[..., strip, :].mH
        product[..., start:, strip] = below
        product[..., strip, start:] = below.mH
    return product


def smaller_gram(matrices: Tensor) -> Tensor:
    """W^H W or W W^H, whichever is smaller; batched over leading dimensions, real or complex."""
    return rows_gram(matrices if matrices.shape[-2] < matrices.shape[-1] else matrices.mH)


def float32_products_are_exact_to_rounding(device: torch.device) -> bool:
    """Whether torch multiplies float32 matrices in float32 on this device; False if that is not certain.

    torch may be told, globally, to round the factors to TF32 or bfloat16 first. (Under autocast it does too,
    which is not looked at here.)
    """
    if device.type not in ("cpu", "cuda"):
        return False
    if any(os.environ.get(name, "STRICT").upper() not in ("", "STRICT") for name in _ONEDNN_MODES):
        return False
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return False
    except RuntimeError:  # set through several interfaces that disagree
        return False
    backends = torch.backends
    settings = (backends, backends.mkldnn, getattr(backends.mkldnn, "matmul", None), backends.cuda.matmul)
    return all(getattr(setting, "fp32_precision", "none") in ("none", "ieee") for setting in settings)
