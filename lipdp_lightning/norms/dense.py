"""Certified upper bounds on the largest singular value of dense matrices.

Gram iteration squares Z = W^T W until its Frobenius norm is close to its spectral norm. Because
``||Z^(2^t)||_2 <= ||Z^(2^t)||_F`` holds for every t, every iterate is an upper bound on s(W); power
iteration, by contrast, approaches s(W) from below and certifies nothing.

Weights are cast to float64, which is exact for bfloat16, float16 and float32. Every bound is then multiplied by
:func:`rounding_margin`, which covers the rounding of the float64 arithmetic. Only :func:`close_norm` takes a product in
float32, and adds what its rounding may be.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from .cholesky import largest_eigenvalue

DEFAULT_ITERATIONS = 12
"""The worst ratio after t iterations is ``rank ** (2 ** -(t + 2))``: 5e-4 above the truth at rank 4096."""

_TINY = 1e-290
_MIRRORED_SIDE, _MIRRORED_PRODUCTS = 128, 2**22
_STRIPS = 8
_ONEDNN_MODES = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")

_SHORTEST_SIDE, _LONGEST_SIDE = 128, 1024  # of close_norm: a solver is as quick below, and rounding grows with the rank
_PIECE = 512
_RANGE, _UNDERFLOW = 2.0**100, 2.0**-60  # the latter relative to the square of the largest entry


def rounding_margin(rows: int, columns: int) -> float:
    """Returns the factor >= 1 that turns a norm computed in float64 into an upper bound.

    With k = max(rows, columns), r = min(rows, columns), u = 2^-53: forming the smaller Gram matrix of a
    complex matrix errs by at most 4 k u ||W||_F^2 <= 4 k r u s(W)^2, each squaring by 4 r^2 u relative to the
    top eigenvalue (halved at every further iteration, being under one more square root), a symmetric
    eigenvalue solver by 16 r u, a bound proved by Cholesky factorisation by 8 r (r + 2) u. The bound taken
    here, 4 (k r + 16 (k + r) + 16) 2^-52, exceeds their sum on s(W).
    """
    return 1.0 + 4.0 * (rows * columns + 16 * (rows + columns) + 16) * 2.0**-52


def as_float64(weight: Tensor, name: str = "weight") -> Tensor:
    """Returns a detached float64 copy or view; refuses complex, integer and non-finite weights by name."""
    return _with_largest(weight, name)[0]


def _with_largest(weight: Tensor, name: str) -> tuple[Tensor, float]:
    """Returns a weight as :func:`as_float64` does, and its largest absolute entry."""
    if not weight.is_floating_point():
        raise ValueError(
            f"{name} has dtype {weight.dtype}: a certified norm needs real floating-point weights.\n"
            "HINT: cast it to float32 first."
        )
    device = weight.device if weight.device.type != "mps" else torch.device("cpu")  # MPS has no float64
    matrix = weight.detach().to(device=device)
    largest = largest_entry(matrix)
    if not math.isfinite(largest):
        raise ValueError(
            f"{name} contains a NaN or infinite entry: no finite bound on its norm exists, so no noise scale "
            "can make a step with it private.\n"
            "HINT: lower the learning rate, or restore the last finite checkpoint."
        )
    return matrix.to(dtype=torch.float64), largest


def largest_entry(values: Tensor) -> float:
    """Returns the largest absolute value of an entry; NaN propagates, and an empty tensor gives 0."""
    if values.numel() == 0:
        return 0.0
    least, most = torch.aminmax(values.detach())  # takes a tenth of the time of a maximum norm
    return float(torch.maximum(-least, most))


def frobenius_norm(weight: Tensor) -> float:
    """Returns an upper bound on the Frobenius norm, computed in float64 without underflow; NaN propagates."""
    largest = largest_entry(weight)
    if largest == 0.0:
        return 0.0
    values = weight.detach() if weight.device.type != "mps" else weight.detach().cpu()
    scaled = values.double() / largest
    return float(torch.linalg.vector_norm(scaled)) * largest * (1.0 + (weight.numel() + 16) * 2.0**-52)


def rows_gram(matrices: Tensor) -> Tensor:
    """Returns X X^H, batched over leading dimensions, for real or complex X.

    Large products are formed strip by strip, each entry below the diagonal once and copied above it, which is 9/16 of
    the work.
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
    """Returns W^H W or W W^H, whichever is smaller, batched over leading dimensions."""
    return rows_gram(matrices if matrices.shape[-2] < matrices.shape[-1] else matrices.mH)


def _unit_scaled(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Divides each matrix by its largest entry, so that squares neither overflow nor vanish; returns the entry too."""
    least, most = torch.aminmax(matrix.flatten(-2), dim=-1)
    scale = torch.maximum(-least, most)
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return matrix / divisor[..., None, None], scale


def _finished(bound: Tensor, scale: Tensor, matrix: Tensor) -> Tensor:
    """Undoes the scaling and adds the margin; zero matrices get exactly 0."""
    bound = bound * rounding_margin(*matrix.shape[-2:]) * scale
    # the last product may round down if it is subnormal
    above = torch.nextafter(bound, torch.full_like(bound, math.inf))
    return torch.where(scale > 0, above, torch.zeros_like(bound))


def gram_norm(matrix: Tensor, iterations: int = DEFAULT_ITERATIONS) -> Tensor:
    """Returns upper bounds on s(W) by Gram iteration (Delattre et al. 2023, Algorithm 1).

    Z <- (Z / ||Z||_F)^2 and r <- 2 (r + log ||Z||_F), from the smaller Gram matrix; the bound is
    ``exp((r + log ||Z||_F) 2^-(t+1))``. It holds at every t >= 0 and exceeds s(W) by at most
    ``rank ** (2 ** -(t + 2))``. A zero matrix gives exactly 0. Leading dimensions are a batch.
    """
    if iterations < 0:
        raise ValueError(f"iterations={iterations} is negative.\nHINT: 12 is within 1e-3 of the truth.")
    matrix = as_float64(matrix, "matrix")
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    matrix, scale = _unit_scaled(matrix)
    gram = smaller_gram(matrix)
    log_norm = torch.zeros_like(scale)
    for _ in range(iterations):
        frobenius = torch.linalg.matrix_norm(gram).clamp_min(_TINY)
        gram = gram / frobenius[..., None, None]
        gram = gram @ gram
        log_norm = 2.0 * (log_norm + frobenius.log())
    frobenius = torch.linalg.matrix_norm(gram).clamp_min(_TINY)
    bound = ((log_norm + frobenius.log()) * 2.0 ** -(iterations + 1)).exp()
    return _finished(bound, scale, matrix)


def spectral_norms(matrix: Tensor) -> Tensor:
    """Returns upper bounds on s(W) that exceed it by :func:`rounding_margin` only, batched over leading dimensions.

    They are roots of the largest eigenvalue of the smaller Gram matrix; should the solver not converge, Gram iteration
    takes its place.
    """
    matrix = as_float64(matrix, "matrix")
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-2])
    scaled, scale = _unit_scaled(matrix)
    if not bool((scale > 0).any()):
        return torch.zeros_like(scale)
    try:
        squared = torch.linalg.eigvalsh(smaller_gram(scaled))[..., -1]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return gram_norm(matrix)
    # after the scaling an entry of modulus 1 is attained, so the norm is at least 1
    return _finished(squared.clamp_min(1.0).sqrt(), scale, matrix)


def largest_norm(matrices: Tensor, floor: float = 0.0) -> float:
    """Returns an upper bound on ``max(floor, s(M_1), ..., s(M_B))`` for a batch (B, m, n) with entries of order 1.

    It is at most 0.1 % above that maximum. Matrices may be complex. The rounding of the arithmetic is not included: the
    caller adds :func:`rounding_margin`, which covers that of the Cholesky factorisations too.
    """
    return max(floor, math.sqrt(largest_eigenvalue(smaller_gram(matrices), floor * floor)))


def dense_norm(weight: Tensor, iterations: int | None = None, *, name: str = "weight") -> float:
    """Returns a certified upper bound on the spectral norm of a matrix; a bias has no part in it.

    By default it is the root of the largest eigenvalue of the smaller Gram matrix, whose only excess is
    :func:`rounding_margin`, so that orthogonal matrices are exact up to that. With ``iterations`` given, it is the
    bound of Gram iteration. A zero weight returns 0.0.

    Raises:
        ValueError: names the weight if it is not a matrix, not real or not finite.
    """
    if weight.ndim != 2:
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}: dense_norm takes a matrix.\n"
            "HINT: use conv_norm for convolution kernels, gram_norm for stacks of matrices."
        )
    matrix, largest = _with_largest(weight, name)
    if iterations is not None:
        return float(gram_norm(matrix, iterations))
    if largest == 0.0:
        return 0.0
    try:  # as spectral_norms, in plain numbers
        squared = float(torch.linalg.eigvalsh(smaller_gram(matrix / largest))[-1])
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return float(gram_norm(matrix))
    return math.nextafter(math.sqrt(max(squared, 1.0)) * rounding_margin(*matrix.shape) * largest, math.inf)


def float32_products_are_exact_to_rounding(device: torch.device) -> bool:
    """Tells whether torch multiplies float32 matrices in float32 on this device; False if that is not certain.

    torch may be told, globally, to round the factors to TF32 or bfloat16 first. (Autocast does so too, and is switched
    off around the products instead.)
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


@torch.no_grad()
def close_norm(weight: Tensor, *, name: str = "weight") -> float:
    """Returns an upper bound on the spectral norm of a matrix, about one percent above it, at half of the cost.

    The smaller Gram matrix G of X is computed in float32, in p pieces of length K along the longer side. With u = 2^-24
    every entry sums products in some order, K of them at a time and then p sums, so that ||G^ - G|| <= gamma
    ||X||_F^2 with gamma = (K + p) u / (1 - (K + p) u) (Higham 2002, section 3.5). Cholesky factorisations in float64
    then bound the eigenvalues of G^ (cholesky.py). The rounding adds gamma ||W||_F^2 / s(W)^2 / 2 of the norm, which is
    less than 2 % for 1024 equal singular values.

    Smaller and larger matrices, those of other dtypes, and float32 where products may be rounded further, are measured
    by :func:`dense_norm`.
    """
    rows = weight.detach() if weight.shape[0] <= weight.shape[1] else weight.detach().mT
    single = weight.dtype == torch.float32 and float32_products_are_exact_to_rounding(weight.device)
    largest = largest_entry(rows)
    if not (single and _SHORTEST_SIDE <= len(rows) <= _LONGEST_SIDE and 1.0 / _RANGE < largest < _RANGE):
        return dense_norm(weight, name=name)
    scale = 2.0 ** -math.frexp(largest)[1]  # a power of two: exact, and entries are below 1
    with torch.autocast(weight.device.type, enabled=False):
        product, terms = _gram_in_pieces(rows, scale)
    gram, side, rounding = product.tril().double(), len(rows), terms * 2.0**-24
    gram = gram + gram.tril(-1).mT
    gamma = rounding / (1.0 - rounding)
    # the diagonal of G^ is within gamma of that of G, whose sum is ||X||_F^2
    size = float(gram.diagonal().sum()) / (1.0 - gamma) * (1.0 + 2.0**-40)
    level = largest_eigenvalue(gram[None], tolerance=2.0**-6, iterations=20) * (
        1.0 + 8.0 * side * (side + 2) * 2.0**-53
    )
    return math.nextafter(math.sqrt(level + gamma * size + _UNDERFLOW) * (1.0 + 2.0**-50) / scale, math.inf)


def _gram_in_pieces(rows: Tensor, scale: float) -> tuple[Tensor, int]:
    """Returns X X^T of the scaled matrix in float32, and the number of terms that an entry adds up."""
    count = -(-rows.shape[1] // _PIECE)
    longest = -(-rows.shape[1] // count)
    pieces = [piece * scale for piece in rows.split(longest, dim=1)]
    total = pieces[0] @ pieces[0].mT
    for piece in pieces[1:]:
        total.addmm_(piece, piece.mT)
    return total, longest + count
