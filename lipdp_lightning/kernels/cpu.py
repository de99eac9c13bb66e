"""Loops over arrays in a CPU's memory, compiled by numba; the file that calls one holds its reference in torch.

Every operation is rounded as IEEE 754 says and none is fused with another unless it is written so. Sums over the
entries of one row are taken in any order where a function is marked ``reassoc``, which vector instructions need; all
other results are the same on every processor and for every number of threads. numba notices that the machine code is
out of date when this file changes, so everything that a loop is made of stands here.

Loops run on the threads that torch itself computes with: a pool of threads of our own would compete with torch's, which
busy-wait for work between two operations. They are therefore handed to the OpenMP library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable
from functools import lru_cache
from math import factorial
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import torch
from numba import float64, types
from numba.extending import intrinsic
from torch import Tensor

THREAD_NUMBER, THREAD_COUNT = "lipdp_thread_number", "lipdp_thread_count"
MOST_FIELDS = 16
_WORTH_SHARING = 1 << 15  # entries: a single thread has finished fewer before another one has started

Kind = tuple[torch.dtype, int]
"""The dtype and the number of dimensions of a tensor that a loop takes; 0 dimensions stand for a number."""


@lru_cache(maxsize=1)
def openmp() -> Any:
    """Returns the OpenMP library whose threads torch uses, or None if its interface is not found.

    GNU's and LLVM's libraries share the interface that is used here.
    """
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")):
        try:
            library = ctypes.CDLL(str(path))  # already loaded: this finds the symbols of what it is linked with
            symbols = {THREAD_NUMBER: library.omp_get_thread_num, THREAD_COUNT: library.omp_get_num_threads}
            library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            library.GOMP_parallel.restype = None
        except (OSError, AttributeError):
            continue
        for name, function in symbols.items():
            llvmlite.binding.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
        return library
    return None


class Loop:
    """A compiled loop over tensors in a CPU's memory.

    Calling it with tensors and numbers runs its body on every thread of a team; the body finds out which thread it is,
    and reads its arguments from an array of 64-bit fields: the address and the shape of each tensor, and each number.
    The machine code is compiled when the loop is defined and kept beside its source file, or in the user's cache
    directory where that cannot be written.
    """

    def __init__(self, body: Callable[[Any], None], kinds: tuple[Kind, ...]) -> None:
        self._kinds = kinds
        self._native: Any
        try:
            self._native = numba.cfunc("void(voidptr)", error_model="numpy", cache=True)(body)
        except RuntimeError:  # there is no directory that the cache could be kept in
            self._native = numba.cfunc("void(voidptr)", error_model="numpy")(body)

    def __call__(self, entries: int, *arguments: Tensor | float) -> None:
        """Runs the loop, on several threads if there are many entries to work on.

        OpenMP may provide fewer threads than it is asked for, so a body divides its work by the number of threads that
        it finds itself in.
        """
        fields = array("q")
        for argument, (dtype, dimensions) in zip(arguments, self._kinds, strict=True):
            if dimensions:
                assert isinstance(argument, Tensor) and argument.dtype == dtype and argument.dim() == dimensions
                assert argument.is_cpu and argument.is_contiguous() and not argument.is_neg()
                fields.append(argument.data_ptr())
                fields.extend(argument.shape)
            elif dtype == torch.float64:
                fields.frombytes(array("d", (float(argument),)).tobytes())
            else:
                fields.append(int(argument))
        assert len(fields) <= MOST_FIELDS
        threads = 1 if entries < _WORTH_SHARING else torch.get_num_threads()
        if threads == 1:
            self._native.ctypes(fields.buffer_info()[0])
        else:
            openmp().GOMP_parallel(self._native.address, fields.buffer_info()[0], threads, 0)


def loop(*kinds: Kind) -> Callable[[Callable[[Any], None]], Loop]:
    """Decorates the body of a loop that takes tensors and numbers of these kinds."""
    assert openmp() is not None
    return lambda body: Loop(body, kinds)


_thread_number: Any = types.ExternalFunction(THREAD_NUMBER, types.int32())
_thread_count: Any = types.ExternalFunction(THREAD_COUNT, types.int32())

FLOATS_3, FLOATS_2, BYTES_2 = (torch.float32, 3), (torch.float32, 2), (torch.bool, 2)
FLOATS_1, DOUBLES_1, DOUBLES_2 = (torch.float32, 1), (torch.float64, 1), (torch.float64, 2)
DOUBLE, INTEGER = (torch.float64, 0), (torch.int64, 0)


def _pointer_at(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), generate


def _rounded_once(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once: an instruction of current processors, and a function with the same bits elsewhere."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return float64(float64, float64, float64), generate


carray: Any = numba.carray  # type: ignore[attr-defined]
_njit: Any = numba.njit
_pointer: Any = intrinsic(_pointer_at)
_fma: Any = intrinsic(_rounded_once)


def _compiled(function: Any) -> Any:
    return _njit(error_model="numpy")(function)


def _in_any_order(function: Any) -> Any:
    return _njit(error_model="numpy", fastmath={"reassoc"})(function)


@_compiled
def _share(length: Any) -> Any:
    """Returns where this thread's share of ``length`` items begins and ends."""
    part, parts = np.int64(_thread_number()), np.int64(_thread_count())
    return length * part // parts, length * (part + 1) // parts


@_compiled
def _floats_3(fields: Any, at: int) -> Any:
    return carray(_pointer(fields[at]), (fields[at + 1], fields[at + 2], fields[at + 3]), np.float32)


@_compiled
def _floats_2(fields: Any, at: int) -> Any:
    return carray(_pointer(fields[at]), (fields[at + 1], fields[at + 2]), np.float32)


@_compiled
def _bytes_2(fields: Any, at: int) -> Any:
    return carray(_pointer(fields[at]), (fields[at + 1], fields[at + 2]), np.uint8)


@_compiled
def _doubles_2(fields: Any, at: int) -> Any:
    return carray(_pointer(fields[at]), (fields[at + 1], fields[at + 2]), np.float64)


# ---- pairs of channels. The innermost loops are functions of their own, over indices that cannot be negative: only
# then does the compiler use vector instructions.


@_compiled
def _order(first: Any, second: Any, larger: Any, smaller: Any, swapped: Any) -> None:
    for place in range(len(first)):
        a, b = first[place], second[place]
        larger[place] = b if b > a else a
        smaller[place] = a if b > a else b
        swapped[place] = b > a


@_compiled
def _put_back(first: Any, second: Any, swapped: Any, of_first: Any, of_second: Any) -> None:
    for place in range(len(first)):
        a, b, other = first[place], second[place], swapped[place] != 0
        of_first[place] = b if other else a
        of_second[place] = a if other else b


@loop(FLOATS_3, FLOATS_3, BYTES_2)
def in_order(data: Any) -> None:
    """out[i, :, p] <- pairs[i, :, p], the larger one first; swapped[i, p] <- whether they changed places."""
    fields = carray(data, (MOST_FIELDS,), np.int64)
    pairs, out, swapped = _floats_3(fields, 0), _floats_3(fields, 4), _bytes_2(fields, 8)
    first, last = _share(len(pairs))
    if pairs.shape[2] == 1:  # one call for all pairs, and not one for each
        given, found = pairs[first:last, :, 0], out[first:last, :, 0]
        _order(given[:, 0], given[:, 1], found[:, 0], found[:, 1], swapped[first:last, 0])
        return
    for index in range(first, last):
        _order(pairs[index, 0], pairs[index, 1], out[index, 0], out[index, 1], swapped[index])


@loop(FLOATS_3, BYTES_2, FLOATS_3)
def swap(data: Any) -> None:
    """out <- pairs, whose two values change places where ``swapped`` is not 0."""
    fields = carray(data, (MOST_FIELDS,), np.int64)
    pairs, swapped, out = _floats_3(fields, 0), _bytes_2(fields, 4), _floats_3(fields, 7)
    first, last = _share(len(pairs))
    if pairs.shape[2] == 1:
        given, found = pairs[first:last, :, 0], out[first:last, :, 0]
        _put_back(given[:, 0], given[:, 1], swapped[first:last, 0], found[:, 0], found[:, 1])
        return
    for index in range(first, last):
        _put_back(pairs[index, 0], pairs[index, 1], swapped[index], out[index, 0], out[index, 1])


# ---- patches of images


@_in_any_order
def _weighted_energy(image: Any, counts: Any) -> Any:
    energy = 0.0
    for pixel in range(len(image)):
        value = np.float64(image[pixel])
        energy += value * value * counts[pixel]
    return energy


@loop(FLOATS_3, DOUBLES_1, INTEGER, INTEGER, FLOATS_1)
def patch_norms(data: Any) -> None:
    """out[i] <- the root of ``more`` plus the largest group of channels' sum of counts[p] images[i, c, p]^2."""
    fields = carray(data, (MOST_FIELDS,), np.int64)
    images, counts = _floats_3(fields, 0), carray(_pointer(fields[4]), (fields[5],), np.float64)
    groups, more, out = fields[6], fields[7], carray(_pointer(fields[8]), (fields[9],), np.float32)
    first, last = _share(len(images))
    width = images.shape[1] // groups
    for index in range(first, last):
        largest = 0.0
        for group in range(groups):
            energy = 0.0
            for channel in range(group * width, (group + 1) * width):
                energy += _weighted_energy(images[index, channel], counts)
            if not energy <= largest:  # written so that NaN remains
                largest = energy
        out[index] = np.float32(np.sqrt(largest + more))


# ---- normalisation with a floored divisor

MEAN, INVERSE, MOVES = range(3)
"""Columns of what is kept of a row, in float64: its mean, 1 / divisor, and whether the divisor is its deviation."""


@_in_any_order
def _moments(row: Any) -> Any:
    """Returns the mean of a row, and the mean of the squared differences from it."""
    total, energy = 0.0, 0.0
    for place in range(len(row)):
        total += np.float64(row[place])
    mean = total / len(row)
    for place in range(len(row)):
        value = np.float64(row[place]) - mean
        energy += value * value
    return mean, energy / len(row)


@_in_any_order
def _products(row: Any, g: Any, mean: Any) -> Any:
    """Returns the sum of g, and the sum of g times what the row is above its mean."""
    total, product = 0.0, 0.0
    for place in range(len(row)):
        total += np.float64(g[place])
        product += np.float64(g[place]) * (np.float64(row[place]) - mean)
    return total, product


@loop(FLOATS_2, DOUBLE, FLOATS_2, DOUBLES_2)
def normalize(data: Any) -> None:
    """out[i] <- (rows[i] - its mean) / max(floor, its standard deviation); ``kept`` is for ``pull_back``."""
    fields, numbers = carray(data, (MOST_FIELDS,), np.int64), carray(data, (MOST_FIELDS,), np.float64)
    rows, floor, out, kept = _floats_2(fields, 0), numbers[3], _floats_2(fields, 4), _doubles_2(fields, 7)
    first, last = _share(len(rows))
    for index in range(first, last):
        row, own = rows[index], out[index]
        mean, variance = _moments(row)
        deviation = np.sqrt(variance)
        moves = 0.0 if deviation < floor else 1.0  # written so that NaN remains
        inverse = 1.0 / (deviation if moves == 1.0 else floor)
        for place in range(len(row)):
            own[place] = np.float32((np.float64(row[place]) - mean) * inverse)
        kept[index, MEAN], kept[index, INVERSE], kept[index, MOVES] = mean, inverse, moves


@loop(FLOATS_2, DOUBLES_2, FLOATS_2, FLOATS_2)
def pull_back(data: Any) -> None:
    """out[i] <- (g - mean(g) - u mean(u g)) / divisor for row g of the gradient and the row's output u.

    The last term is left out where the divisor is the floor.
    """
    fields = carray(data, (MOST_FIELDS,), np.int64)
    rows, kept = _floats_2(fields, 0), _doubles_2(fields, 3)
    gradient, out = _floats_2(fields, 6), _floats_2(fields, 9)
    first, last = _share(len(rows))
    for index in range(first, last):
        row, g, own = rows[index], gradient[index], out[index]
        mean, inverse = kept[index, MEAN], kept[index, INVERSE]
        total, product = _products(row, g, mean)
        constant, slope = total / len(row), 0.0
        if kept[index, MOVES] != 0.0:
            slope = product * inverse * inverse / len(row)
        for place in range(len(row)):
            left = np.float64(g[place]) - constant - (np.float64(row[place]) - mean) * slope
            own[place] = np.float32(left * inverse)


# ---- normals: the transformation of Box and Muller by additions, products, quotients and square roots alone

_RADIANS = math.pi * 2.0**-63
_SMALLEST = 2.0**-126
_ROOT_OF_HALF = int(np.float64(math.sqrt(0.5)).view(np.int64))
_LN2 = round(math.log(2.0) * 2.0**32) * 2.0**-32  # its product with an exponent is exact
_LN2_REST = -4.2009150726810846e-11  # ln 2 - _LN2
_C2, _C4, _C6, _C8, _C10, _C12, _C14, _C16 = (1.0 / factorial(n) for n in range(2, 17, 2))
_S3, _S5, _S7, _S9, _S11, _S13, _S15 = (1.0 / factorial(n) for n in range(3, 16, 2))
_L3, _L5, _L7, _L9, _L11, _L13, _L15, _L17, _L19, _L21 = (1.0 / n for n in range(3, 22, 2))
_AT_ONCE = 1024  # pairs: what belongs to them stays in the nearest cache


def transform_pairs(radii: Any, angles: Any, cosines: Any, sines: Any) -> None:
    """Turns pairs of uniform 64-bit words into pairs of standard normals.

    For pair j, u^2 = (radii[j]^2 + 1) / 2^126 with u in (0, 1], so its logarithm is finite, and the angle is
    a = 2 pi angles[j] / 2^64, in [-pi, pi]. With r = sqrt(-ln u^2), cosines[j] = r cos(a) and sines[j] = r sin(a).
    The smallest u is 2^-63: r reaches 9.345, which the true law exceeds with probability 1.1e-19. Logarithm, sine and
    cosine are Taylor series up to terms below the rounding of the first one; the angle is reduced in integers, which
    is exact.
    """
    for j in range(len(radii)):
        word = np.float64(radii[j])
        # u^2 = m 2^k with m in [sqrt(1/2), sqrt(2)), and ln m = 2 artanh(s)
        bits = np.float64((word * word + 1.0) * _SMALLEST).view(np.int64)
        k = (bits - np.int64(_ROOT_OF_HALF)) >> np.int64(52)
        m = np.int64(bits - (k << np.int64(52))).view(np.float64)
        s = (m - 1.0) / (m + 1.0)
        z = s * s
        rest = _fma(z, _fma(z, _fma(z, _L21, _L19), _L17), _L15)
        rest = _fma(z, _fma(z, _fma(z, _fma(z, _fma(z, _fma(z, rest, _L13), _L11), _L9), _L7), _L5), _L3)
        logarithm = _fma(np.float64(k), _LN2, _fma(2.0 * s * z, rest, _fma(np.float64(k), _LN2_REST, 2.0 * s)))
        r = math.sqrt(-logarithm)
        # a = q pi / 2 + x with x in [-pi / 4, pi / 4]
        angle = angles[j]
        q = (angle + np.int64(1 << 61)) >> np.int64(62)
        x = np.float64(angle - (q << np.int64(62))) * _RADIANS
        z = -x * x
        rest = _fma(z, _fma(z, _fma(z, _S15, _S13), _S11), _S9)
        sine = _fma(x * z, _fma(z, _fma(z, _fma(z, rest, _S7), _S5), _S3), x)
        rest = _fma(z, _fma(z, _fma(z, _fma(z, _C16, _C14), _C12), _C10), _C8)
        cosine = _fma(z, _fma(z, _fma(z, _fma(z, rest, _C6), _C4), _C2), 1.0)
        of_sine = cosine if q & 1 else sine
        of_cosine = sine if q & 1 else cosine
        cosines[j] = r * (-of_cosine if (q + 1) & 2 else of_cosine)
        sines[j] = r * (-of_sine if q & 2 else of_sine)


_transform_pairs = _compiled(transform_pairs)


def _normals(words: Any, out: Any) -> None:
    """out[2j], out[2j + 1] <- the normals of the words 2j and 2j + 1; both arrays have the same even length."""
    radii, angles = np.empty(_AT_ONCE, np.int64), np.empty(_AT_ONCE, np.int64)
    cosines, sines = np.empty(_AT_ONCE), np.empty(_AT_ONCE)
    pairs = len(words) // 2
    for first in range(0, pairs, _AT_ONCE):
        count = min(_AT_ONCE, pairs - first)
        for j in range(count):
            radii[j], angles[j] = words[2 * (first + j)], words[2 * (first + j) + 1]
        _transform_pairs(radii[:count], angles[:count], cosines[:count], sines[:count])
        for j in range(count):
            out[2 * (first + j)], out[2 * (first + j) + 1] = cosines[j], sines[j]


def _complete(values: Any, apart: Any, drawn: Any, own: Any, share: Any, shift: Any, factor: Any) -> None:
    """values[i] <- grid((values[i] + apart[i]) * share + own * drawn[i]) * factor; ``apart`` may be empty."""
    further, rounded = len(apart) > 0, shift > 0.0
    for i in range(len(values)):
        total = np.float64(values[i])
        if further:
            total += apart[i]
        noisy = drawn[i] * own + total * share
        if rounded:
            noisy = (noisy + shift) - shift
        values[i] = noisy * factor


def _cached(function: Any, *signatures: str) -> Any:
    options = {"error_model": "numpy", "nogil": True}
    try:
        return _njit([*signatures], cache=True, **options)(function)
    except RuntimeError:
        return _njit([*signatures], **options)(function)


normals = _cached(_normals, "void(int64[::1], float64[::1])")
_REST = "float64[::1], float64[::1], float64, float64, float64, float64"
complete = _cached(_complete, f"void(float32[::1], {_REST})", f"void(float64[::1], {_REST})")
