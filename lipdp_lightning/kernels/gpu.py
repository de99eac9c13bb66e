"""Kernels over tensors in a GPU's memory, compiled by Triton; the file that calls one holds its reference in torch.

Every float64 operation is rounded as IEEE 754 says, and none is fused with another unless it is written so: kernels
are launched with ``enable_fp_fusion=False``. A kernel that draws noise therefore returns the bits of the loop in
``cpu.py``, whose constants it takes. Triton compiles a kernel when it is launched for the first time, and keeps the
machine code in the user's cache directory.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import cpu

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

NORMALS_IN_A_BLOCK = 8
BLOCKS_AT_ONCE = 128  # blocks of ChaCha20 in one program, which draws eight times as many normals
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_COUNTERS = 1 << 32
TERMS_AT_ONCE = 64  # terms of a weight's gradient that are added in float32
TERMS_OF_A_PART = 1 << 13  # fewer are not worth a program of their own
OF_A_SUM = {"num_warps": 8, "enable_fp_fusion": False}  # with four, an H100 has too few registers
TILE, PROGRAMS = 64, 864  # eight programs for each of an A100's 108 multiprocessors
_COLUMNS = 1024  # words of a row that one program reads at once

# "expa", "nd 3", "2-by", "te k": the first row of ChaCha20's state
_C0, _C1 = tl.constexpr(0x61707865), tl.constexpr(0x3320646E)
_C2, _C3 = tl.constexpr(0x79622D32), tl.constexpr(0x6B206574)

_RADIANS, _SMALLEST = tl.constexpr(cpu._RADIANS), tl.constexpr(cpu._SMALLEST)
_ROOT_OF_HALF = tl.constexpr(cpu._ROOT_OF_HALF)
_LN2, _LN2_REST = tl.constexpr(cpu._LN2), tl.constexpr(cpu._LN2_REST)
_C_2, _C_4, _C_6, _C_8 = (tl.constexpr(c) for c in (cpu._C2, cpu._C4, cpu._C6, cpu._C8))
_C_10, _C_12, _C_14, _C_16 = (tl.constexpr(c) for c in (cpu._C10, cpu._C12, cpu._C14, cpu._C16))
_S_3, _S_5, _S_7, _S_9 = (tl.constexpr(c) for c in (cpu._S3, cpu._S5, cpu._S7, cpu._S9))
_S_11, _S_13, _S_15 = (tl.constexpr(c) for c in (cpu._S11, cpu._S13, cpu._S15))
_L_3, _L_5, _L_7, _L_9, _L_11 = (tl.constexpr(c) for c in (cpu._L3, cpu._L5, cpu._L7, cpu._L9, cpu._L11))
_L_13, _L_15, _L_17, _L_19, _L_21 = (tl.constexpr(c) for c in (cpu._L13, cpu._L15, cpu._L17, cpu._L19, cpu._L21))


@triton.jit
def _constant(like, value: tl.constexpr):
    """Returns a constant in float64; a bare number would be rounded to float32 by some versions of Triton."""
    return tl.full(like.shape, value, tl.float64)


@triton.jit
def _step(x, z, coefficient: tl.constexpr):
    """Takes one step of Horner's scheme, rounded once."""
    return tl.fma(z, x, _constant(z, coefficient))


# ---- words: ChaCha20 of RFC 8439


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _word(low, high):
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@triton.jit
def block_words(counter, stream, k0, k1, k2, k3, k4, k5, k6, k7):
    """Returns the eight 64-bit words of one block of the key stream; all arguments are uint32 of one shape."""
    zero = counter ^ counter
    c0, c1, c2, c3 = zero + _C0, zero + _C1, zero + _C2, zero + _C3
    x0, x1, x2, x3, x4, x5, x6, x7 = c0, c1, c2, c3, k0, k1, k2, k3
    x8, x9, x10, x11, x12, x13, x14, x15 = k4, k5, k6, k7, counter, stream, zero, zero
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    w0, w1 = _word(x0 + c0, x1 + c1), _word(x2 + c2, x3 + c3)
    w2, w3 = _word(x4 + k0, x5 + k1), _word(x6 + k2, x7 + k3)
    w4, w5 = _word(x8 + k4, x9 + k5), _word(x10 + k6, x11 + k7)
    w6, w7 = _word(x12 + counter, x13 + stream), _word(x14, x15)
    return w0, w1, w2, w3, w4, w5, w6, w7


# ---- normals: ``transform_pairs`` of cpu.py, operation for operation


@triton.jit
def pair(radius, angle):
    """Returns the two normals of two int64 words."""
    word = radius.to(tl.float64)
    one = _constant(word, 1.0)
    bits = ((word * word + one) * _constant(word, _SMALLEST)).to(tl.int64, bitcast=True)
    k = (bits - _ROOT_OF_HALF) >> 52
    m = (bits - (k << 52)).to(tl.float64, bitcast=True)
    s = (m - one) / (m + one)
    z = s * s
    rest = _step(_step(_step(_constant(z, _L_21), z, _L_19), z, _L_17), z, _L_15)
    rest = _step(_step(_step(_step(_step(_step(rest, z, _L_13), z, _L_11), z, _L_9), z, _L_7), z, _L_5), z, _L_3)
    exponent, twice = k.to(tl.float64), _constant(s, 2.0) * s
    low = tl.fma(exponent, _constant(s, _LN2_REST), twice)
    logarithm = tl.fma(exponent, _constant(s, _LN2), tl.fma(twice * z, rest, low))
    r = tl.sqrt(-logarithm)
    q = (angle + (1 << 61)) >> 62
    x = (angle - (q << 62)).to(tl.float64) * _constant(s, _RADIANS)
    z = -x * x
    rest = _step(_step(_step(_constant(z, _S_15), z, _S_13), z, _S_11), z, _S_9)
    sine = tl.fma(x * z, _step(_step(_step(rest, z, _S_7), z, _S_5), z, _S_3), x)
    rest = _step(_step(_step(_step(_constant(z, _C_16), z, _C_14), z, _C_12), z, _C_10), z, _C_8)
    cosine = tl.fma(z, _step(_step(_step(rest, z, _C_6), z, _C_4), z, _C_2), one)
    odd = (q & 1) != 0
    of_sine = tl.where(odd, cosine, sine)
    of_cosine = tl.where(odd, sine, cosine)
    of_cosine = tl.where(((q + 1) & 2) != 0, -of_cosine, of_cosine)
    of_sine = tl.where((q & 2) != 0, -of_sine, of_sine)
    return r * of_cosine, r * of_sine


# ---- the release of a sum


@triton.jit
def _complete(values, apart, at, mask, normal, own, share, shift, factor,
              FURTHER: tl.constexpr):  # fmt: skip
    total = tl.load(values + at, mask=mask, other=0.0).to(tl.float64)
    if FURTHER:
        total = total + tl.load(apart + at, mask=mask, other=0.0)
    noisy = normal * own + total * share
    noisy = tl.where(shift > 0.0, (noisy + shift) - shift, noisy)
    tl.store(values + at, (noisy * factor).to(values.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "first", "stream", "k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7"])
def release_kernel(values, apart, count: tl.int64, first: tl.int64, stream: tl.int64, k0: tl.int32, k1: tl.int32,
                   k2: tl.int32, k3: tl.int32, k4: tl.int32, k5: tl.int32, k6: tl.int32, k7: tl.int32, own: tl.float64,
                   share: tl.float64, shift: tl.float64, factor: tl.float64, mean: tl.float64, FURTHER: tl.constexpr,
                   SAMPLES: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """values[i] <- grid((values[i] + apart[i]) * share + own * normal i) * factor, from block ``first`` on."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    counter = (block + first).to(tl.uint32)
    zero = counter ^ counter
    stream = zero + stream.to(tl.uint32)
    k0, k1 = zero + k0.to(tl.uint32, bitcast=True), zero + k1.to(tl.uint32, bitcast=True)
    k2, k3 = zero + k2.to(tl.uint32, bitcast=True), zero + k3.to(tl.uint32, bitcast=True)
    k4, k5 = zero + k4.to(tl.uint32, bitcast=True), zero + k5.to(tl.uint32, bitcast=True)
    k6, k7 = zero + k6.to(tl.uint32, bitcast=True), zero + k7.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3, w4, w5, w6, w7 = block_words(counter, stream, k0, k1, k2, k3, k4, k5, k6, k7)
    n0, n1 = pair(w0, w1)
    n2, n3 = pair(w2, w3)
    n4, n5 = pair(w4, w5)
    n6, n7 = pair(w6, w7)
    for sample in range(1, SAMPLES):
        w0, w1, w2, w3, w4, w5, w6, w7 = block_words(counter, stream + sample, k0, k1, k2, k3, k4, k5, k6, k7)
        a, b = pair(w0, w1)
        n0, n1 = n0 + a, n1 + b
        a, b = pair(w2, w3)
        n2, n3 = n2 + a, n3 + b
        a, b = pair(w4, w5)
        n4, n5 = n4 + a, n5 + b
        a, b = pair(w6, w7)
        n6, n7 = n6 + a, n7 + b
    mean = tl.full((BLOCKS,), mean, tl.float64)
    own, share = tl.full((BLOCKS,), own, tl.float64), tl.full((BLOCKS,), share, tl.float64)
    shift, factor = tl.full((BLOCKS,), shift, tl.float64), tl.full((BLOCKS,), factor, tl.float64)
    at = block * 8
    _complete(values, apart, at, at < count, n0 * mean, own, share, shift, factor, FURTHER)
    _complete(values, apart, at + 1, at + 1 < count, n1 * mean, own, share, shift, factor, FURTHER)
    _complete(values, apart, at + 2, at + 2 < count, n2 * mean, own, share, shift, factor, FURTHER)
    _complete(values, apart, at + 3, at + 3 < count, n3 * mean, own, share, shift, factor, FURTHER)
    _complete(values, apart, at + 4, at + 4 < count, n4 * mean, own, share, shift, factor, FURTHER)
    _complete(values, apart, at + 5, at + 5 < count, n5 * mean, own, share, shift, factor, FURTHER)
    _complete(values, apart, at + 6, at + 6 < count, n6 * mean, own, share, shift, factor, FURTHER)
    _complete(values, apart, at + 7, at + 7 < count, n7 * mean, own, share, shift, factor, FURTHER)


def release_(
    values: Tensor,
    key: bytes,
    deviation: float,
    *,
    stream: int = 0,
    apart: Tensor | None = None,
    start: int = 0,
    samples: int = 1,
    share: float = 1.0,
    shift: float = 0.0,
    factor: float = 1.0,
) -> None:
    """Computes ``kernels.normals.release_`` without a wait: no noise vector exists, and nothing is copied.

    The normal of entry i is number ``start`` + i of its stream, with ``start`` a multiple of the 8 of one block.
    """
    blocks, first = -(-values.numel() // NORMALS_IN_A_BLOCK), start // NORMALS_IN_A_BLOCK
    assert len(key) == 32 and start % NORMALS_IN_A_BLOCK == 0 and first + blocks <= _COUNTERS
    assert 0 <= stream <= _COUNTERS - samples
    assert apart is None or (apart.dtype == torch.float64 and apart.numel() == values.numel())
    if not blocks:
        return
    exact = values.dtype in (torch.float32, torch.float64)
    flat = (values if exact else values.float()).contiguous().view(-1)
    further = flat if apart is None else apart.contiguous().view(-1)
    with torch.cuda.device_of(flat):
        release_kernel[(-(-blocks // BLOCKS_AT_ONCE),)](
            flat, further, flat.numel(), first, stream, *struct.unpack("<8i", key), deviation, share, shift, factor,
            1 / math.sqrt(samples), FURTHER=apart is not None, SAMPLES=samples, BLOCKS=BLOCKS_AT_ONCE, **OPTIONS,
        )  # fmt: skip
    if flat.data_ptr() != values.data_ptr():
        values.copy_(flat.view_as(values))


# ---- weight gradients on tensor cores


@triton.jit
def _cut(x):
    """Returns x with the 11 bits that TF32 has; what tensor cores do with further ones is not documented."""
    return (x.to(tl.float32).to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["terms", "share"])
def weight_gradient_kernel(cotangent, inputs, out, terms: tl.int64, share: tl.int64, d0, d1, d2, d3, x0, x1, x2, x3,
                           OUT: tl.constexpr,
                           IN: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
                           COLUMNS: tl.constexpr, TAPS_Y: tl.constexpr, TAPS_X: tl.constexpr, STEP_Y: tl.constexpr,
                           STEP_X: tl.constexpr, PAD_Y: tl.constexpr, PAD_X: tl.constexpr, WIDE_Y: tl.constexpr,
                           WIDE_X: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr):  # fmt: skip
    """out[part, o, f] <- the sum over this part's terms, examples times positions, of cotangent times patch.

    ``d0`` to ``d3`` and ``x0`` to ``x3`` are the strides of cotangent and inputs (examples, channels, height, width).
    The products of ``AT_ONCE`` terms are added in float32, beginning with 0, and these sums in float64.
    """
    FEATURES: tl.constexpr = IN * TAPS_Y * TAPS_X
    POSITIONS: tl.constexpr = ROWS * COLUMNS
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    feature = tl.program_id(1) * TILE + tl.arange(0, TILE)
    part = tl.program_id(2).to(tl.int64)
    source, tap = feature // (TAPS_Y * TAPS_X), feature % (TAPS_Y * TAPS_X)
    down, across = tap // TAPS_X * WIDE_Y - PAD_Y, tap % TAPS_X * WIDE_X - PAD_X
    total = tl.zeros((TILE, TILE), tl.float64)
    last = tl.minimum((part + 1) * share, terms)
    for start in range(part * share, last, AT_ONCE):
        term = start + tl.arange(0, AT_ONCE)
        example, position = term // POSITIONS, (term % POSITIONS).to(tl.int32)
        there = term < last
        row, column = position // COLUMNS, position % COLUMNS
        left = tl.load(cotangent + (example * d0 + row * d2 + column * d3)[None, :] + channel[:, None] * d1,
                       mask=there[None, :] & (channel < OUT)[:, None], other=0.0)  # fmt: skip
        y, x = (row * STEP_Y)[:, None] + down[None, :], (column * STEP_X)[:, None] + across[None, :]
        inside = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH) & there[:, None] & (feature < FEATURES)[None, :]
        place = (example * x0)[:, None] + source[None, :] * x1 + y * x2 + x * x3
        right = tl.load(inputs + place, mask=inside, other=0.0)
        if left.dtype != right.dtype or left.dtype == tl.float32:
            total += tl.dot(_cut(left), _cut(right), input_precision="tf32").to(tl.float64)
        else:
            total += tl.dot(left, right).to(tl.float64)
    at = (part * OUT + channel[:, None]) * FEATURES + feature[None, :]
    tl.store(out + at, total, mask=(channel < OUT)[:, None] & (feature < FEATURES)[None, :])


def weight_gradient(cotangent: Tensor, inputs: Tensor, shape: Sequence[int], options: Sequence[Any] | None) -> Tensor:
    """Returns the gradient of a weight in float64, formed on tensor cores from factors that are read as they are.

    Two factors in bfloat16 are multiplied as they are, others are first cut to the 11 bits of TF32, and each product is
    exact in float32. An entry is rounded where the products of ``TERMS_AT_ONCE`` terms are added on tensor
    cores, and by the 2^-53 of float64.

    Args:
        cotangent: The cotangent at the layer's output.
        inputs: The layer's inputs.
        shape: The shape of the weight.
        options: The stride, padding, dilation and groups of a convolution, with groups=1; None for a linear layer.
    """
    assert {cotangent.dtype, inputs.dtype} <= {torch.bfloat16, torch.float32} and (options is None or options[3] == 1)
    if options is None:
        left, right = cotangent.reshape(-1, shape[0], 1, 1), inputs.reshape(-1, shape[1], 1, 1)
        stride, padding, dilation = (1, 1), (0, 0), (1, 1)
    else:
        missing = 4 - len(shape)  # the axis that a convolution over one axis does not have
        left, right = (t.unsqueeze(2) if missing else t for t in (cotangent, inputs))
        stride, padding, dilation = (
            (fill,) * missing + tuple(given) for fill, given in zip((1, 0, 1), options, strict=False)
        )
    taps = (1, 1, *shape[2:])[-2:]
    features, terms = math.prod(shape[1:]), left.shape[0] * left.shape[2] * left.shape[3]
    tiles = -(-shape[0] // TILE) * -(-features // TILE)
    parts = max(1, min(-(-terms // TERMS_OF_A_PART), PROGRAMS // tiles))
    share = -(-terms // (parts * TERMS_AT_ONCE)) * TERMS_AT_ONCE
    out = torch.empty((parts, shape[0], features), dtype=torch.float64, device=left.device)
    with torch.cuda.device_of(left):
        weight_gradient_kernel[(-(-shape[0] // TILE), -(-features // TILE), parts)](
            left, right, out, terms, share, *left.stride(), *right.stride(), shape[0], *right.shape[1:],
            *left.shape[2:], *taps, *stride, *padding, *dilation, TILE=TILE, AT_ONCE=TERMS_AT_ONCE, **OF_A_SUM,
        )  # fmt: skip
    return out.sum(0).view(*shape)


# ---- the sums of a keyed hash, as kernels/multilinear.py defines them


@triton.jit
def row_sums_kernel(rows, key, out, ROW: tl.constexpr, SUMS: tl.constexpr, COLUMNS: tl.constexpr):
    """out[r, s] <- the sum of key[s, i] * rows[r, i] over i, in wrapping 64-bit integers."""
    row, one = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros((COLUMNS,), tl.int64)
    for start in range(0, ROW, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        total += tl.load(rows + row * ROW + at).to(tl.int64) * tl.load(key + one * ROW + at)
    tl.store(out + row * SUMS + one, tl.sum(total, axis=0))


def row_sums(rows: Tensor, key: Tensor) -> Tensor:
    """Returns the sums of every row of int32 words, for int64 keys of one row each."""
    out = torch.empty(len(rows), len(key), dtype=torch.int64, device=rows.device)
    assert rows.is_contiguous() and key.is_contiguous() and rows.shape[1] == key.shape[1]
    assert rows.dtype == torch.int32 and key.dtype == torch.int64 and rows.shape[1] % _COLUMNS == 0
    with torch.cuda.device_of(rows):
        row_sums_kernel[(len(rows), len(key))](
            rows, key, out, ROW=rows.shape[1], SUMS=len(key), COLUMNS=_COLUMNS, **OPTIONS
        )  # fmt: skip
    return out
