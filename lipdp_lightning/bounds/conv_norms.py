"""Certified upper bounds on the spectral norm of 1-D and 2-D convolutions as torch computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lipdp_lightning.bounds.geometry import Padding, Sizes, kappa_of
from lipdp_lightning.bounds.gram import largest_norm, rounding_margin, spectral_norms
from lipdp_lightning.bounds.symbols import (
    COARSE_GRID,
    FINE_GRID,
    Convolution,
    build_convolution,
    frequencies,
    polyphase,
    reduction,
    symbol,
)

SIZE_FREE_ITERATIONS = 4
_CHUNK = 2**22
_EXACT_ENTRIES = 2**22
_EXACT_FLOPS = 2.0**29
_FINE_PRODUCTS = 2**29


def _fast(convolution: Convolution) -> float:
    norms = spectral_norms(convolution.matrices())
    return convolution.certified(float(norms.max()) * kappa_of(convolution.axes))


def _tight(convolution: Convolution) -> float:
    blocks = polyphase(convolution)
    sampled = _sampling(convolution)
    grid = [count for count, _ in sampled]
    factor = math.prod(
        inflation * math.sqrt(reduction(axis)[1])
        for (_, inflation), axis in zip(sampled, convolution.axes, strict=True)
    )
    halves = [*grid[:-1], grid[-1] // 2 + 1]
    step = max(1, _CHUNK // (math.prod(blocks.shape[:3]) * math.prod(halves[1:])))
    largest = 0.0
    for start in range(0, halves[0], step):
        values = symbol(blocks, grid, slice(start, start + step))
        largest = largest_norm(values.flatten(0, 1), floor=largest)
    return convolution.certified(largest * factor, rounding_margin(*blocks.shape[1:3]))


def _size_free(convolution: Convolution, iterations: int) -> float:
    blocks = polyphase(convolution)
    support = [2**iterations * (taps - 1) + 1 for taps in blocks.shape[3:]]
    gram_side = min(blocks.shape[1:3])
    bounds = []
    for block in blocks:
        bounds.append(_gram_of_kernel(block[None], support, gram_side, iterations))
    factor = math.prod(math.sqrt(reduction(axis)[1]) for axis in convolution.axes)
    # the inverse transform errs at every tap of the final kernel, the root divides that by 2^iterations
    transform = 1.0 + math.prod(support) * gram_side**1.5 * 2.0**-50 / 2**iterations
    return convolution.certified(max(bounds) * factor, transform * rounding_margin(*blocks.shape[1:3]))


def _gram_of_kernel(block: Tensor, support: Sequence[int], side: int, iterations: int) -> float:
    """Norm of one group by Gram iteration on its kernel: K <- K^T * K doubles the support and squares the
    norm.

    All self-correlations are taken on one grid that holds the final support, hence without wrapping round.
    """
    values = symbol(block, support)[0]
    gram = values.mH @ values if values.shape[-1] == side else values @ values.mH
    log_norm = 0.0
    for _ in range(iterations - 1):
        frobenius = float(gram.abs().square().sum().sqrt())
        if frobenius == 0.0:
            return 0.0
        gram = gram / frobenius
        gram = gram @ gram
        log_norm = 2.0 * (log_norm + math.log(frobenius))
    halved = [*support[:-1], support[-1] // 2 + 1]
    taps = torch.fft.irfftn(gram.reshape(*halved, side, side), s=list(support), dim=list(range(len(support))))
    total = float(torch.linalg.matrix_norm(taps).sum())
    return math.exp((log_norm + math.log(total)) * 2.0**-iterations) if total > 0.0 else 0.0


def _exact(convolution: Convolution) -> float:
    groups, _, inputs = convolution.kernel.shape[:3]
    sizes = [axis.known_size for axis in convolution.axes]
    pixels = inputs * math.prod(sizes)
    basis = torch.eye(pixels, dtype=torch.float64, device=convolution.kernel.device).reshape(pixels, inputs, *sizes)
    for index, axis in enumerate(convolution.axes):
        sources = axis.sources().to(basis.device)
        basis = basis.index_select(2 + index, sources.clamp_min(0))
        shape = [-1 if dim == 2 + index else 1 for dim in range(basis.ndim)]
        basis = basis * (sources >= 0).to(basis.dtype).reshape(shape)
    apply: Callable[..., Tensor] = F.conv1d if len(sizes) == 1 else F.conv2d
    stride = [axis.stride for axis in convolution.axes]
    dilation = [axis.dilation for axis in convolution.axes]
    images = apply(basis, convolution.kernel.flatten(0, 1), stride=stride, dilation=dilation).reshape(
        pixels, groups, -1
    )
    matrices = images.transpose(0, 1)
    return convolution.certified(float(spectral_norms(matrices).max()), rounding_margin(*matrices.shape[1:]))


def _matrix_flops(rows: int, columns: int) -> float:
    side = min(rows, columns)
    return 2.0 * rows * columns * side + 24.0 * side**3


def _sampling(convolution: Convolution) -> list[tuple[int, float]]:
    """Frequencies and factor of every axis: a coarse grid, 3 % high on two axes, where a fine one takes long."""
    taps = [-(-axis.span // axis.stride) for axis in convolution.axes]
    groups, rows = convolution.kernel.shape[:2]
    inputs = convolution.kernel.shape[2] * math.prod(axis.stride for axis in convolution.axes)
    for per_tap in (FINE_GRID, COARSE_GRID):
        sampled = [frequencies(axis, count, per_tap) for axis, count in zip(convolution.axes, taps, strict=True)]
        products = math.prod(count for count, _ in sampled) * groups * rows * inputs * min(rows, inputs)
        if products <= _FINE_PRODUCTS:
            break
    return sampled


def _flops(convolution: Convolution) -> dict[str, float]:
    """Rough cost of the bounds that are tight; those that do not apply are left out."""
    groups, rows = convolution.kernel.shape[:2]
    inputs = convolution.kernel.shape[2] * math.prod(axis.stride for axis in convolution.axes)
    taps = [-(-axis.span // axis.stride) for axis in convolution.axes]
    tight = [count for count, _ in _sampling(convolution)]
    support = [2**SIZE_FREE_ITERATIONS * (count - 1) + 1 for count in taps]
    complex_flops = 2.0 * groups * _matrix_flops(rows, inputs)  # four real products, half of the frequencies
    costs = {"tight": complex_flops * math.prod(tight), "size_free": complex_flops * math.prod(support)}
    if all(axis.size is not None for axis in convolution.axes):
        pixels = convolution.kernel.shape[2] * math.prod(axis.known_size for axis in convolution.axes)
        outputs = rows * math.prod(axis.outputs for axis in convolution.axes)
        if pixels * outputs <= _EXACT_ENTRIES:
            costs["exact"] = groups * _matrix_flops(outputs, pixels)
    return costs


def _auto(convolution: Convolution) -> float:
    fast = _fast(convolution)
    costs = _flops(convolution)
    exact = costs.get("exact", math.inf)
    if exact <= _EXACT_FLOPS or exact <= min(costs.values()):
        return min(fast, _exact(convolution))
    if kappa_of(convolution.axes) == 1.0:  # patches are disjoint: already the norm of the whole line
        return fast
    if costs["tight"] <= costs["size_free"]:
        return min(fast, _tight(convolution))
    return min(fast, _size_free(convolution, SIZE_FREE_ITERATIONS))


def conv_norm(
    kernel: Tensor,
    *,
    stride: Sizes = 1,
    padding: Padding = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    input_size: Sizes | None = None,
    method: str = "auto",
    iterations: int = SIZE_FREE_ITERATIONS,
    name: str = "kernel",
) -> float:
    """Certified upper bound on the spectral norm of the convolution, bias not included; arguments as in
    torch.nn.

    ``fast``: kappa s(kernel as c_out x (c_in k_h k_w)). ``tight``: largest singular value of the symbol over
    the frequencies of a sufficient torus, or over a fixed grid times a factor below 1.005 per axis (1.016 for
    large kernels) when that is smaller or ``input_size`` is None. ``size_free``: Gram iteration on the kernel
    (Delattre et al. 2024), for every input size. ``exact``: the explicit matrix, for small inputs. ``auto``:
    the exact matrix if small, else the cheaper of the tight ones by their operation counts; never above
    ``fast``. Reflect and replicate padding multiply the bound for the padded input by sqrt(copies of a pixel),
    except in ``fast`` and ``exact``, which count through the padding. All methods take the maximum over groups
    and return 0.0 for a zero kernel.
    """
    convolution = build_convolution(kernel, stride, padding, dilation, groups, padding_mode, input_size, name)
    methods: dict[str, Callable[[Convolution], float]] = {
        "auto": _auto,
        "fast": _fast,
        "tight": _tight,
        "size_free": lambda of: _size_free(of, iterations),
        "exact": _exact,
    }
    if method not in methods or iterations < 1:
        raise ValueError(
            f"method={method!r}, iterations={iterations}: not a certified norm of a convolution.\n"
            f"HINT: use one of {sorted(methods)}, and at least one iteration."
        )
    return methods[method](convolution) if convolution.scale > 0.0 else 0.0


conv_norm_fast = partial(conv_norm, method="fast")
conv_norm_tight = partial(conv_norm, method="tight")
conv_norm_size_free = partial(conv_norm, method="size_free")
conv_norm_exact = partial(conv_norm, method="exact")
