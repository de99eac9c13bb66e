"""Prints, as JSON, the kernels that torch's compiler writes for the layers' definitions on an A100; it needs no GPU.

It changes torch as a whole, and is therefore a program of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface as interfaces
import torch._inductor.compile_fx as compiler
import torch._inductor.config as options
import triton.runtime
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

from lipdp_lightning.kernels.rows import (
    clipped_by_torch,
    floored_by_torch,
    ordered_by_torch,
    patch_norms_by_torch,
    pulled_back_by_torch,
    row_norms_by_torch,
    swapped_by_torch,
    weighed_by_torch,
)
from lipdp_lightning.layers.input import bounded_by_torch

_FACTS = {
    "name": "A100", "major": 8, "minor": 0, "total_memory": 80 << 30, "multi_processor_count": 108,
    "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048, "warp_size": 32, "gcnArchName": "",
    "shared_memory_per_block_optin": 166912, "max_threads_per_block": 1024, "shared_memory_per_block": 49152,
}  # fmt: skip
A100 = namedtuple("A100", _FACTS)(**_FACTS)


class Nothing:
    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


class Driver:
    launcher_cls = None
    utils = SimpleNamespace(
        get_device_properties=lambda i: {"multiprocessor_count": 108, "max_shared_mem": 166912, "warpSize": 32}
    )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 80, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def is_active(self) -> bool:
        return True


def pretend_an_a100() -> None:
    """Lets the compiler believe that there is one; it must not launch anything."""
    cuda, kind = torch.cuda, interfaces.CudaInterface
    answers: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_properties": lambda *a, **k: A100, "synchronize": lambda *a: None, "set_device": lambda *a: None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(cuda, name, answer)
        setattr(kind, name, staticmethod(answer))
    cuda.get_device_capability = lambda *a, **k: (8, 0)
    cuda._lazy_init = lambda: None
    cuda.is_initialized = lambda: True
    cuda.get_rng_state = lambda *a: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda *a, **k: None
    cuda._exchange_device = cuda._maybe_exchange_device = lambda index: 0
    cuda.device = cuda._DeviceGuard = kind.device = Nothing
    kind.Worker.get_device_properties = staticmethod(lambda *a, **k: A100)
    kind.Worker.current_device = staticmethod(lambda: 0)
    kind.get_compute_capability = staticmethod(lambda *a: 80)
    kind.is_triton_capable = staticmethod(lambda *a: True)
    kind.raise_if_triton_unavailable = staticmethod(lambda *a: None)
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    compiler.preserve_rng_state = contextlib.nullcontext
    triton.runtime.driver.set_active(Driver())
    options.compile_threads, options.force_disable_caches = 1, True
    torch._C._ensureCUDADeviceGuardSet()


def generated(definition: Any, *shapes: tuple[tuple[int, ...], torch.dtype]) -> str:
    """Returns the source that the compiler writes for a definition."""
    written: list[str] = []

    def stop(graph: Any) -> Any:
        source, _ = graph.codegen()
        written.append(getattr(source, "value", source))
        raise NotImplementedError("there is no device to load it on")

    GraphLowering.compile_to_module = GraphLowering._compile_to_module = stop
    with FakeTensorMode(), torch.no_grad():
        given = [torch.empty(shape, device="cuda", dtype=dtype) for shape, dtype in shapes]
        traced = make_fx(lambda *x: definition(*x), decomposition_table=select_decomp_table())(*given)
        try:
            compiler.compile_fx_inner(traced, given)
        except InductorError:
            if not written:
                raise
    return written[0]


FLOAT, PAIRS, ROWS = torch.float32, (64, 32, 32, 32), (64, 16, 4096)
DEFINITIONS: dict[str, tuple[Any, ...]] = {
    "pairs": (lambda x: ordered_by_torch(x), (PAIRS, FLOAT)),
    "pairs, backward": (lambda x, s: (swapped_by_torch(x, s),), (PAIRS, FLOAT), ((64, 16, 32, 32), torch.bool)),
    "floored rows": (lambda x: (floored_by_torch(x, 0.1),), (ROWS, FLOAT)),
    "floored rows, backward": (lambda x, g: (pulled_back_by_torch(x, g, 0.1),), (ROWS, FLOAT), (ROWS, FLOAT)),
    "norms of rows": (lambda x: (row_norms_by_torch(x, 1),), ((1024, 3136), FLOAT)),
    "norms of patches": (
        lambda x, counts: (patch_norms_by_torch(x, counts, 1, 784),),
        ((1024, 32, 28, 28), FLOAT),
        ((28, 28), FLOAT),
    ),
    "norms of patches, bfloat16": (
        lambda x, counts: (patch_norms_by_torch(x, counts, 1, 0),),
        ((1024, 64, 32, 32), torch.bfloat16),
        ((32, 32), FLOAT),
    ),
    "clipped cotangents": (lambda d: (clipped_by_torch(d, 0.5),), ((1024, 10), FLOAT)),
    "weighed cotangents": (lambda d, c: (weighed_by_torch(d, c),), ((1024, 10), FLOAT), ((1024,), FLOAT)),
    "bounded input": (lambda x: (bounded_by_torch(x, 1.0, 1.0),), ((1024, 784), FLOAT)),
}

if __name__ == "__main__":
    pretend_an_a100()
    found = {}
    for name, (definition, *shapes) in DEFINITIONS.items():
        source = generated(definition, *shapes)
        found[name] = {
            "kernels": re.findall(r"async_compile\.triton\('(\w+)'", source),
            "library calls": re.findall(r"extern_kernels\.(\w+)\(", source),
            "functions": sorted(set(re.findall(r"(?:libdevice|tl_math|tl)\.(\w*(?:sqrt|div|exp|rcp)\w*)\(", source))),
            "stores": len(re.findall(r"tl\.store\(", source)),
        }
    sys.stdout.write(json.dumps(found))
