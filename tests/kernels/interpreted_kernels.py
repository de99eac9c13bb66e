"""Runs the kernels of kernels/gpu.py in Triton's interpreter, beside their definitions on a CPU, and saves both.

``python interpreted_kernels.py FILE`` with TRITON_INTERPRET=1, which is read when a kernel is defined.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from lipdp_lightning.kernels import gpu
from lipdp_lightning.kernels import normals as normals_module
from lipdp_lightning.kernels.multilinear import key_table
from lipdp_lightning.mechanism.noise import Place, StepNoise, Sum
from lipdp_lightning.mechanism.reductions import release_

SECRET, DIGEST = bytes(range(16)), b"d" * 32
DEVIATION, SHARE, DIVISOR = 1.7, 1 / 3, 409.6
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One release: of how many entries, of which dtype and layout, with what besides."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    apart: bool = False
    secure: bool = False
    grid: bool = True
    transposed: bool = False
    deviation: float = DEVIATION
    ranks: int = 1
    sums_released: int = 1

    def sums(self) -> list[Sum]:
        """Returns random sums, with zeros, a subnormal number and a large one among them."""
        generator = torch.Generator().manual_seed(0)

        def values(dtype: torch.dtype) -> Tensor:
            return (torch.randn(self.shape, generator=generator, dtype=torch.float64) * 3).to(dtype)

        own = values(DTYPES[self.dtype])
        own.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-40, 3e30], dtype=own.dtype)[: own.numel()]
        if self.transposed:
            own = own.t().contiguous().t()
        apart = values(torch.float64) if self.apart else None
        first = Sum(own, self.deviation, SHARE, DIVISOR, apart)
        return [first, *(Sum(own.clone(), self.deviation) for _ in range(1, self.sums_released))]


CASES = {
    "one": Case((1,)),
    "seven": Case((7,)),
    "eight": Case((8,)),
    "a whole program": Case((1024,)),
    "two sums of several programs": Case((2049,), sums_released=2),
    "float64": Case((131,), "float64"),
    "bfloat16": Case((131,), "bfloat16"),
    "kept apart": Case((131,), apart=True),
    "secure": Case((131,), secure=True, apart=True),
    "two secure sums": Case((131,), secure=True, sums_released=2),
    "no grid": Case((131,), grid=False),
    "no grid, float64": Case((131,), "float64", grid=False),
    "transposed": Case((13, 7), transposed=True),
    "small deviation": Case((131,), "float64", deviation=3e-9),
    "no deviation": Case((131,), deviation=0.0),
    "two ranks, bfloat16": Case((5, 21), "bfloat16", ranks=2, apart=True),
}


def released(case: Case) -> Tensor:
    """Returns what is released, in float64, which holds every dtype's values."""
    sums = case.sums()
    noise = StepNoise.of(SECRET, 5, Place(case.ranks - 1, case.ranks), DIGEST, case.secure, case.grid)
    release_(sums, noise, None if case.ranks == 1 else lambda whole: None)
    return torch.cat([one.values.double().reshape(-1) for one in sums])


def released_unfused(case: Case) -> Tensor:
    """Returns what a kernel would release whose products are rounded before something is added to them."""
    fused = InterpreterBuilder.create_fma

    def unfused(self: Any, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

    InterpreterBuilder.create_fma = unfused
    try:
        return released(case)
    finally:
        InterpreterBuilder.create_fma = fused


def words_of_a_block(key: bytes, counter: int, stream: int) -> bytes:
    """Returns the words of one block, as the kernel draws them."""
    out = torch.empty(8, dtype=torch.int64)
    _words_kernel[(1,)](out, counter, stream, *struct.unpack("<8i", key))
    return out.numpy().tobytes()


tl, block_words = gpu.tl, gpu.block_words


@gpu.triton.jit
def _words_kernel(out, counter, stream, k0, k1, k2, k3, k4, k5, k6, k7):
    zero = tl.arange(0, 1).to(tl.uint32)
    k0, k1 = zero + k0.to(tl.uint32, bitcast=True), zero + k1.to(tl.uint32, bitcast=True)
    k2, k3 = zero + k2.to(tl.uint32, bitcast=True), zero + k3.to(tl.uint32, bitcast=True)
    k4, k5 = zero + k4.to(tl.uint32, bitcast=True), zero + k5.to(tl.uint32, bitcast=True)
    k6, k7 = zero + k6.to(tl.uint32, bitcast=True), zero + k7.to(tl.uint32, bitcast=True)
    counter, stream = zero + counter.to(tl.uint32), zero + stream.to(tl.uint32)
    w0, w1, w2, w3, w4, w5, w6, w7 = block_words(counter, stream, k0, k1, k2, k3, k4, k5, k6, k7)
    at = tl.arange(0, 1)
    tl.store(out + at, w0)
    tl.store(out + at + 1, w1)
    tl.store(out + at + 2, w2)
    tl.store(out + at + 3, w3)
    tl.store(out + at + 4, w4)
    tl.store(out + at + 5, w5)
    tl.store(out + at + 6, w6)
    tl.store(out + at + 7, w7)


def late_part(start: int, count: int) -> Tensor:
    """Returns the normals from a late position on, drawn by the kernel."""
    values = torch.zeros(count, dtype=torch.float64)
    gpu.release_(values, SECRET * 2, 1.0, start=start)
    return values


PARTS = [(8, 5), (8 * 127, 17), (8 * ((1 << 31) - 1), 17), (8 * ((1 << 32) - 2), 16)]
BLOCKS = [(bytes(range(32)), 1, 0), (bytes(32), 0, 0), (b"\xff" * 32, (1 << 32) - 1, 3)]


def hashed_rows() -> tuple[Tensor, Tensor]:
    """Returns rows of words, extreme ones among them, and a key."""
    rows = torch.randint(-(1 << 31), 1 << 31, (3, 4096), generator=torch.Generator().manual_seed(0)).int()
    rows[0, :3] = torch.tensor([-(1 << 31), (1 << 31) - 1, -1])
    return rows, key_table(bytes(range(32)))[0, :, :4096].contiguous()


SUMMED: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[Any, ...] | None]] = {
    "convolution": ((5, 7, 9, 8), (10, 7, 3, 3), ((1, 1), (1, 1), (1, 1), 1)),
    "steps, holes and sides": ((3, 4, 11, 10), (6, 4, 3, 2), ((2, 1), (0, 1), (1, 2), 1)),
    "one axis": ((4, 5, 30), (70, 5, 4), ((2,), (1,), (3,), 1)),
    "channels last": ((5, 7, 9, 8), (10, 7, 3, 3), ((1, 1), (1, 1), (1, 1), 1)),
    "cut to TF32": ((6, 5, 7, 7), (9, 5, 3, 3), ((1, 1), (1, 1), (1, 1), 1)),
    "linear": ((9, 33), (70, 33), None),
    "linear, with positions": ((2, 5, 33), (3, 33), None),
    "several parts": ((40, 2, 16, 16), (3, 2, 1, 1), ((1, 1), (0, 0), (1, 1), 1)),
}
"""Shapes of the inputs and of the weight, and the options of the layer."""


def factors(name: str, whole: bool = True) -> tuple[Tensor, Tensor]:
    """Returns cotangent and inputs of a layer in float32, ``whole`` or as a product reads them.

    The interpreter adds nothing in bfloat16.
    """
    shape, weight, options = SUMMED[name]
    generator = torch.Generator().manual_seed(1)
    bits = -1 << (13 if name == "cut to TF32" else 16)  # what a product reads of 32 bits
    x = torch.randn(shape, generator=generator)
    if options is None:
        outputs: tuple[int, ...] = (*shape[:-1], weight[0])
    else:
        convolve = torch.conv1d if len(weight) == 3 else torch.conv2d
        outputs = tuple(convolve(x, torch.zeros(weight), None, *options).shape)
    d = torch.randn(outputs, generator=generator)
    if name != "cut to TF32" or not whole:
        x, d = ((t.view(torch.int32) & bits).view(torch.float32) for t in (x, d))
    if name == "channels last":
        return d.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    return d, x


def main(file: str) -> None:
    """Saves everything that the tests compare."""
    on_cpu = {name: released(case) for name, case in CASES.items()}
    loop = normals_module._release_in_pieces

    def release(values: Tensor, key: bytes, deviation: float, apart: Tensor | None, **numbers: Any) -> None:
        if deviation > 0:  # the interpreter reads a CPU's memory
            gpu.release_(values, key, deviation, apart=apart, **numbers)
        else:
            loop(values, key, deviation, apart, **numbers)

    normals_module._release_in_pieces = release
    on_gpu = {name: released(case) for name, case in CASES.items()}
    unfused = released_unfused(CASES["no grid, float64"])
    parts = {part: late_part(*part) for part in PARTS}
    words = {block: words_of_a_block(*block) for block in BLOCKS}
    rows = gpu.row_sums(*hashed_rows())
    sums = {name: gpu.weight_gradient(*factors(name), *SUMMED[name][1:]) for name in SUMMED}
    kept = {
        "sums": sums,
        "rows": rows,
        "cpu": on_cpu,
        "gpu": on_gpu,
        "parts": parts,
        "words": words,
        "unfused": unfused,
    }
    torch.save(kept, file)


if __name__ == "__main__":
    main(sys.argv[1])
