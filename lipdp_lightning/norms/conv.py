"""Certified upper bounds on the spectral norm of 1-D and 2-D convolutions as torch computes them.

Along each axis a padded, strided convolution is R T E. E embeds the input (and copies border pixels, if the
padding does), T is a stride-free convolution between polyphase components, on a torus or on the whole line,
and R keeps some of its outputs. Hence s(conv) <= ||R|| ||E|| s(T), and s(T) is the largest singular value of
T's symbol: the matrix-valued trigonometric polynomial sum_a W_a exp(-i a theta), where W_a holds the taps
``s a, ..., s a + s - 1`` of the dilated kernel side by side (space-to-depth by the stride s, exact).

Padding of every mode torch offers maps each padded position to one input pixel or, for zeros, to none, and does so axis
by axis. The number of (output, tap) pairs that read a pixel is therefore the product over axes of one-dimensional
counts, which are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dense import as_float64, largest_norm, rounding_margin, spectral_norms
from .operators import Operator

PADDING_MODES = ("zeros", "circular", "reflect", "replicate")

Sizes = int | Sequence[int]
Padding = int | str | Sequence[int] | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Axis:
    """Describes one spatial axis; the size of the input is None if it is not known."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    mode: str
    size: int | None

    @property
    def span(self) -> int:
        """The length of the dilated kernel."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def known_size(self) -> int:
        if self.size is None:
            raise ValueError(
                f"padding_mode={self.mode!r}, stride {self.stride}, padding {(self.before, self.after)}: how "
                "often a pixel is read depends on the input size, which was not given.\n"
                "HINT: pass input_size, or use zero padding."
            )
        return self.size

    @property
    def padded(self) -> int:
        return self.known_size + self.before + self.after

    @property
    def outputs(self) -> int:
        return (self.padded - self.span) // self.stride + 1

    def sources(self) -> Tensor:
        """Returns for every padded position the input pixel that it copies, or -1 for a zero."""
        size = self.known_size
        position = torch.arange(-self.before, size + self.after)
        if self.mode == "zeros":
            return torch.where((position >= 0) & (position < size), position, -1)
        if self.mode == "circular":
            return position % size
        if self.mode == "replicate":
            return position.clamp(0, size - 1)
        return (size - 1) - ((size - 1) - position.abs()).abs()

    def reads(self) -> Tensor:
        """Returns for every input pixel the number of (output, tap) pairs that read it."""
        outputs = torch.arange(self.outputs)[:, None] * self.stride
        taps = torch.arange(self.kernel)[None, :] * self.dilation
        read = self.sources()[outputs + taps]
        return torch.bincount(read[read >= 0], minlength=self.known_size)

    def max_reads(self) -> int:
        """Returns the largest entry of :meth:`reads`; for zero padding of unknown size, the supremum over sizes.

        Pairs (t, j) with s t + d j fixed have j in one residue class modulo s / gcd(s, d).
        """
        if self.size is None and (self.mode == "zeros" or self.before == self.after == 0):
            return -(-self.kernel * math.gcd(self.stride, self.dilation) // self.stride)
        return int(self.reads().max())

    def max_copies(self) -> int:
        """Returns the largest number of padded positions that hold one input pixel: s(padding)^2, exactly."""
        if self.mode == "zeros" or self.before == self.after == 0:
            return 1
        sources = self.sources()
        return int(torch.bincount(sources[sources >= 0]).max())


def _per_axis(value: Sizes, count: int, name: str, least: int) -> tuple[int, ...]:
    values = (value,) * count if isinstance(value, int) else tuple(int(v) for v in value)
    if len(values) == 1:
        values = values * count
    if len(values) != count or min(values) < least:
        raise ValueError(
            f"{name}={value!r}: expected one or {count} integers, none below {least}.\n"
            f"HINT: give {name} as torch.nn.Conv2d takes it."
        )
    return values


def _padding_pairs(
    padding: Padding, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    if isinstance(padding, str):
        if padding == "valid":
            return [(0, 0)] * len(kernel)
        if padding != "same" or any(s != 1 for s in stride):
            raise ValueError(
                f"padding={padding!r} with stride {tuple(stride)}: only 'valid', and 'same' at stride 1.\n"
                "HINT: give the padding as integers."
            )
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]  # torch puts the odd one after
    if not isinstance(padding, int) and all(not isinstance(p, int) for p in padding):
        pairs = [tuple(_per_axis(p, 2, "padding", 0)) for p in padding]
        if len(pairs) != len(kernel):
            raise ValueError(f"padding={padding!r}: one pair per axis is needed.\nHINT: or give integers.")
        return [(before, after) for before, after in pairs]
    return [(p, p) for p in _per_axis(padding, len(kernel), "padding", 0)]  # type: ignore[arg-type]


def convolution_axes(
    kernel_size: Sizes,
    stride: Sizes = 1,
    dilation: Sizes = 1,
    padding: Padding = 0,
    padding_mode: str = "zeros",
    input_size: Sizes | None = None,
) -> tuple[Axis, ...]:
    """Returns the axes of a convolution as torch.nn.Conv1d and Conv2d read the same arguments.

    ``padding`` also takes one (before, after) pair per axis. An int ``kernel_size`` means one axis.

    Raises:
        ValueError: If torch would refuse the arguments.
    """
    kernel = (kernel_size,) if isinstance(kernel_size, int) else tuple(int(k) for k in kernel_size)
    kernel = _per_axis(kernel, len(kernel), "kernel_size", 1)
    strides = _per_axis(stride, len(kernel), "stride", 1)
    dilations = _per_axis(dilation, len(kernel), "dilation", 1)
    pairs = _padding_pairs(padding, kernel, strides, dilations)
    if padding_mode not in PADDING_MODES:
        raise ValueError(f"padding_mode={padding_mode!r} is not one of {PADDING_MODES}.\nHINT: use 'zeros'.")
    sizes: Sequence[int | None] = [None] * len(kernel)
    if input_size is not None:
        sizes = _per_axis(input_size, len(kernel), "input_size", 1)
    axes = tuple(
        Axis(k, s, d, before, after, padding_mode, size)
        for k, s, d, (before, after), size in zip(kernel, strides, dilations, pairs, sizes, strict=True)
    )
    for axis in axes:
        _check_axis(axis)
    return axes


def _check_axis(axis: Axis) -> None:
    if axis.size is None:
        return
    if axis.outputs < 1:
        raise ValueError(
            f"an input of {axis.size} padded by ({axis.before}, {axis.after}) is shorter than the dilated "
            f"kernel, {axis.span}: the convolution has no output.\nHINT: check input_size and padding."
        )
    widest = max(axis.before, axis.after)
    limit = {"reflect": axis.size - 1, "circular": axis.size}.get(axis.mode, widest)
    if widest > limit:
        raise ValueError(
            f"padding_mode={axis.mode!r} cannot pad an input of {axis.size} by {widest}.\n"
            f"HINT: pad by at most {limit}, or use zero padding."
        )


def output_size(*geometry: Any, **named: Any) -> tuple[int, ...]:
    """Returns the spatial size of the output; the arguments are those of :func:`convolution_axes`."""
    return tuple(axis.outputs for axis in convolution_axes(*geometry, **named))


def root_above(integer: int) -> float:
    """Returns the square root, exact for perfect squares and rounded up otherwise."""
    exact = math.isqrt(integer)
    return float(exact) if exact * exact == integer else math.nextafter(math.sqrt(integer), math.inf)


def kappa_of(axes: Sequence[Axis]) -> float:
    """Returns kappa of the axes; see :func:`kappa`."""
    return root_above(math.prod(axis.max_reads() for axis in axes))


def kappa(*geometry: Any, **named: Any) -> float:
    """Returns kappa, with kappa^2 the largest number of (output, tap) pairs that read one input pixel.

    Then ||patches(x)||_F <= kappa ||x||, so s(conv) <= kappa s(kernel as c_out x (c_in k_h k_w)). The arguments are
    those of :func:`convolution_axes`. With ``input_size`` the count is exact, for every padding mode. Without it, zero
    padding gives the supremum over sizes, the product over axes of ceil(k gcd(s, d) / s), and any other mode that does
    pad is a ValueError.
    """
    return _kappa(*map(_hashable, geometry), **{name: _hashable(value) for name, value in named.items()})


@lru_cache(maxsize=1024)
def _kappa(*geometry: Any, **named: Any) -> float:
    """Computes kappa once per geometry, since a certificate asks for that of every convolution at every step."""
    return kappa_of(convolution_axes(*geometry, **named))


def _hashable(value: Any) -> Any:
    return value if value is None or isinstance(value, int | str) else tuple(map(_hashable, value))


def coverage(*geometry: Any, dtype: torch.dtype = torch.float64, **named: Any) -> Tensor:
    """Returns how often each input pixel is read; shape ``input_size``. Its maximum is kappa^2.

    ||patches(x)||_F^2 = sum(x^2 * coverage), exactly, for all four padding modes: each entry of a patch is
    either zero or a copy of exactly one input pixel, so its square is counted at that pixel. (A padding that
    interpolates between pixels would make this an inequality; torch has none.) The arguments are those of
    :func:`convolution_axes`, and the input size must be given.
    """
    counts = torch.ones((), dtype=torch.float64)
    for axis in convolution_axes(*geometry, **named):
        counts = counts[..., None] * axis.reads().to(torch.float64)
    return counts.to(dtype)


# ---- the symbol

FINE_GRID, COARSE_GRID = 16, 9
"""Frequencies per polyphase tap and axis when the torus is larger or its size unknown: 1.005 or 1.016 high."""

_CHUNK = 2**22
_EXACT_ENTRIES = 2**22
_EXACT_FLOPS = 2.0**29
_FINE_PRODUCTS = 2**29


@dataclass(frozen=True)
class _Convolution:
    """Holds a kernel in float64, scaled to a largest entry of 1, as (groups, outputs, inputs, *taps), and its axes."""

    kernel: Tensor
    scale: float
    axes: tuple[Axis, ...]

    @property
    def rows(self) -> int:
        return self.kernel.shape[1]

    @property
    def columns(self) -> int:
        return self.kernel[0, 0].numel()

    def matrices(self) -> Tensor:
        return self.kernel.flatten(2)

    def certified(self, norm: float, margin: float = 1.0) -> float:
        """Undoes the scaling and adds the rounding margin, absolutely, too: symbols may cancel on a small torus."""
        rounding = margin * rounding_margin(self.rows, self.columns)
        frobenius = float(self.matrices().square().sum(dim=(1, 2)).max().sqrt())
        return math.nextafter((norm * rounding + (rounding - 1.0) * frobenius) * self.scale, math.inf)


def _built(kernel: Tensor, geometry: Convolution, name: str) -> _Convolution:
    groups = geometry.groups
    if kernel.ndim not in (3, 4):
        raise ValueError(
            f"{name} has shape {tuple(kernel.shape)}: a convolution kernel needs one or two spatial axes.\n"
            "HINT: use dense_norm for matrices; three-dimensional convolutions have no certified norm here."
        )
    if groups < 1 or kernel.shape[0] % groups:
        raise ValueError(f"{name}: groups={groups} does not divide {kernel.shape[0]} outputs.\nHINT: check groups.")
    axes = convolution_axes(*geometry.of(kernel))
    values = as_float64(kernel, name)
    scale = float(values.abs().max())
    values = values / scale if scale > 0 else values
    return _Convolution(values.reshape(groups, -1, *kernel.shape[1:]), scale, axes)


def polyphase(convolution: _Convolution) -> Tensor:
    """Returns the kernel after space-to-depth: (groups, outputs, inputs * prod(stride), taps per axis)."""
    kernel = convolution.kernel
    for index, axis in enumerate(convolution.axes):
        taps = -(-axis.span // axis.stride)
        kernel = kernel.movedim(3 + index, -1)
        dilated = kernel.new_zeros(*kernel.shape[:-1], taps * axis.stride)
        dilated[..., : axis.span : axis.dilation] = kernel
        phases = dilated.reshape(*dilated.shape[:-1], taps, axis.stride).movedim(-1, 3)
        kernel = phases.flatten(2, 3).movedim(-1, 3 + index)
    return kernel


def reduction(axis: Axis) -> tuple[int | None, float]:
    """Returns the torus on which T acts (None: the whole line bounds every torus) and ||R||^2 ||E||^2.

    Zero padding: the padded input, cut into polyphase components, on any torus of at least ceil(padded /
    stride) points: no output kept by R reads across the seam. A torus of the bare input is too short.
    Circular padding whose stride divides the input: the torus of input / stride points, its outputs repeated
    when the padding yields more than one period. Otherwise: the padding is a matrix of norm sqrt(copies),
    followed by a convolution without padding.
    """
    whole_period = axis.size is not None and axis.size % axis.stride == 0
    if axis.mode == "circular" and whole_period:
        period = axis.known_size // axis.stride
        return period, float(-(-axis.outputs // period))
    if axis.size is None and (axis.mode == "zeros" or axis.before == axis.after == 0):
        return None, 1.0
    if axis.size is None and axis.mode == "circular" and axis.stride == 1 and axis.before + axis.after < axis.span:
        return None, 1.0  # at most one period of outputs, whatever the size
    return -(-axis.padded // axis.stride), float(axis.max_copies())


def frequencies(axis: Axis, taps: int, per_tap: int = FINE_GRID) -> tuple[int, float]:
    """Returns the number of sampled frequencies, and the factor from their maximum to the supremum that is needed.

    |u^* S(theta) v| is a real trigonometric polynomial of degree (taps - 1) / 2 after a shift of phase. By
    Riesz such a polynomial falls from its maximum no faster than a cosine of its degree, so N equidistant
    samples reach at least cos(pi (taps - 1) / (2 N)) of it. A torus of N points needs exactly its own N
    frequencies.
    """
    torus, _ = reduction(axis)
    sampled = 1 if taps == 1 else per_tap * (taps - 1)
    if torus is not None and torus <= sampled:
        return torus, 1.0
    return sampled, 1.0 / math.cos(math.pi * (taps - 1) / (2 * sampled))


def symbol(blocks: Tensor, grid: Sequence[int], first: slice = slice(None)) -> Tensor:
    """Returns the symbol on a grid, (groups, frequencies, outputs, inputs), with half of the last axis by conjugate
    symmetry.
    """
    symbol = blocks.to(torch.complex128)
    for index, count in enumerate(grid):
        chosen = torch.arange(count // 2 + 1 if index == len(grid) - 1 else count, device=blocks.device)
        chosen = chosen[first] if index == 0 else chosen
        taps = torch.arange(symbol.shape[3], device=blocks.device)
        angle = (taps[:, None] * chosen[None, :] % count).to(torch.float64) * (-2.0 * math.pi / count)
        symbol = torch.tensordot(symbol, torch.polar(torch.ones_like(angle), angle), dims=([3], [0]))
    return symbol.flatten(3).permute(0, 3, 1, 2)


# ---- the bounds


def _fast(convolution: _Convolution) -> float:
    norms = spectral_norms(convolution.matrices())
    return convolution.certified(float(norms.max()) * kappa_of(convolution.axes))


def _tight(convolution: _Convolution) -> float:
    blocks = polyphase(convolution)
    sampled = _sampling(convolution)
    grid = [count for count, _ in sampled]
    pairs = zip(sampled, convolution.axes, strict=True)
    factor = math.prod(inflation * math.sqrt(reduction(axis)[1]) for (_, inflation), axis in pairs)
    halves = [*grid[:-1], grid[-1] // 2 + 1]
    step = max(1, _CHUNK // (math.prod(blocks.shape[:3]) * math.prod(halves[1:])))
    largest = 0.0
    for start in range(0, halves[0], step):
        values = symbol(blocks, grid, slice(start, start + step))
        largest = largest_norm(values.flatten(0, 1), floor=largest)
    return convolution.certified(largest * factor, rounding_margin(*blocks.shape[1:3]))


def _exact(convolution: _Convolution) -> float:
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


def _sampling(convolution: _Convolution) -> list[tuple[int, float]]:
    """Returns frequencies and factor of each axis: a coarse grid, 3 % high on two axes, where a fine one takes long."""
    taps = [-(-axis.span // axis.stride) for axis in convolution.axes]
    groups, rows = convolution.kernel.shape[:2]
    inputs = convolution.kernel.shape[2] * math.prod(axis.stride for axis in convolution.axes)
    for per_tap in (FINE_GRID, COARSE_GRID):
        sampled = [frequencies(axis, count, per_tap) for axis, count in zip(convolution.axes, taps, strict=True)]
        products = math.prod(count for count, _ in sampled) * groups * rows * inputs * min(rows, inputs)
        if products <= _FINE_PRODUCTS:
            break
    return sampled


def _flops(convolution: _Convolution) -> tuple[float, float]:
    """Returns the rough costs of the tight bound and of the exact matrix; the latter is infinite if it is too large."""
    groups, rows = convolution.kernel.shape[:2]
    inputs = convolution.kernel.shape[2] * math.prod(axis.stride for axis in convolution.axes)
    # a complex product is four real ones, for half of the frequencies
    tight = 2.0 * groups * _matrix_flops(rows, inputs) * math.prod(count for count, _ in _sampling(convolution))
    if any(axis.size is None for axis in convolution.axes):
        return tight, math.inf
    pixels = convolution.kernel.shape[2] * math.prod(axis.known_size for axis in convolution.axes)
    outputs = rows * math.prod(axis.outputs for axis in convolution.axes)
    return tight, groups * _matrix_flops(outputs, pixels) if pixels * outputs <= _EXACT_ENTRIES else math.inf


def _auto(convolution: _Convolution) -> float:
    fast = _fast(convolution)
    tight, exact = _flops(convolution)
    if exact <= _EXACT_FLOPS or exact <= tight:
        return min(fast, _exact(convolution))
    if kappa_of(convolution.axes) == 1.0:  # patches are disjoint: already the norm of the whole line
        return fast
    return min(fast, _tight(convolution))


_METHODS: dict[str, Callable[[_Convolution], float]] = {"auto": _auto, "fast": _fast, "tight": _tight, "exact": _exact}


def conv_norm(kernel: Tensor, *, method: str = "auto", name: str = "kernel", **geometry: Any) -> float:
    """Returns a certified upper bound on the spectral norm of a convolution.

    ``fast``: kappa s(kernel as c_out x (c_in k_h k_w)). ``tight``: the largest singular value of the symbol over
    the frequencies of a sufficient torus, or over a fixed grid times a factor below 1.005 per axis (1.016 for
    large kernels) if that is smaller or ``input_size`` is None. ``exact``: the norm of the explicit matrix, for small
    inputs. ``auto``: the exact norm if its matrix is small, else the tight bound; never above ``fast``. Reflect and
    replicate padding multiply the tight bound for the padded input by sqrt(copies of a pixel), while the others count
    through the padding. All methods take the maximum over groups and return 0.0 for a zero kernel.

    Args:
        kernel: The weight.
        method: The way in which the norm is bounded: `auto`, `fast`, `tight` or `exact`.
        name: The name of the kernel in messages.
        geometry: The fields of :class:`Convolution`.
    """
    convolution = _built(kernel, Convolution(**geometry), name)
    if method not in _METHODS:
        raise ValueError(
            f"method={method!r}: not a certified norm of a convolution.\nHINT: use one of {sorted(_METHODS)}."
        )
    return _METHODS[method](convolution) if convolution.scale > 0.0 else 0.0


@dataclass(frozen=True)
class Convolution(Operator):
    """Applies a convolution of one or two axes; arguments are as in torch.nn, with the size of the images.

    The guarantee on changes holds for kappa: each input pixel is read by at most kappa^2 pairs of an output and a tap,
    so that the norm of the patches, on which a change of the kernel acts, is at most kappa times that of the image.
    Groups make ``D.flatten(1)`` a stack of their matrices, whose norm is not below that of any of them.
    """

    stride: Sizes = 1
    padding: Padding = 0
    dilation: Sizes = 1
    groups: int = 1
    padding_mode: str = "zeros"
    input_size: Sizes | None = None

    def of(self, weight: Tensor) -> tuple[Any, ...]:
        """Returns the arguments of :func:`convolution_axes` for a weight."""
        return tuple(weight.shape[2:]), self.stride, self.dilation, self.padding, self.padding_mode, self.input_size

    def norm(self, weight: Tensor, name: str = "weight") -> float:
        return conv_norm(weight, name=name, **vars(self))

    def deviation_factor(self, weight: Tensor) -> float:
        return kappa(*self.of(weight))
