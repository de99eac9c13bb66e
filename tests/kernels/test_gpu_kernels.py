"""The kernels for a GPU, without one: lipdp_lightning/kernels/gpu.py.

Their bits are compared in Triton's interpreter, and the machine code of the noise is read for two generations of GPUs.
What that leaves open is listed in docs/gpu.md.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from lipdp_lightning.kernels import cpu, loops

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

import triton
from interpreted_kernels import BLOCKS, CASES, PARTS, SECRET, SUMMED, factors, hashed_rows
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lipdp_lightning.kernels import gpu
from lipdp_lightning.kernels.multilinear import row_sums_by_torch
from lipdp_lightning.layers.contribution import weighted_gradients

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


# ---- bits


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the interpreter returned, in a process of its own."""
    file = tmp_path_factory.mktemp("interpreted") / "released.pt"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    script = HERE / "interpreted_kernels.py"
    done = subprocess.run([sys.executable, str(script), str(file)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(torch.load(file))


@pytest.mark.parametrize("name", CASES)
def test_a_release_on_the_device_has_the_bits_of_the_cpu(name: str, interpreted: dict[str, Any]) -> None:
    on_cpu, on_gpu = interpreted["cpu"][name], interpreted["gpu"][name]
    assert len(on_cpu) == CASES[name].sums_released * int(np.prod(CASES[name].shape))
    assert torch.equal(on_cpu.view(torch.int64), on_gpu.view(torch.int64))


def test_products_that_are_rounded_by_themselves_are_noticed(interpreted: dict[str, Any]) -> None:
    # without a grid, which would hide the last bits
    assert not torch.equal(interpreted["unfused"], interpreted["cpu"]["no grid, float64"])
    assert torch.equal(interpreted["gpu"]["no grid, float64"], interpreted["cpu"]["no grid, float64"])


def key_stream(key: bytes, counter: int, stream: int, length: int) -> bytes:
    nonce = counter.to_bytes(4, "little") + stream.to_bytes(12, "little")
    return Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(length))


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_of_words_are_those_of_the_standard(block: tuple[bytes, int, int], interpreted: dict[str, Any]) -> None:
    assert interpreted["words"][block] == key_stream(*block, 64)


def test_the_first_block_of_zeros_is_that_of_the_standard(interpreted: dict[str, Any]) -> None:
    """The first test vector of RFC 8439, appendix A.1."""
    assert interpreted["words"][bytes(32), 0, 0].hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )


@pytest.mark.parametrize("part", PARTS)
def test_any_part_of_a_stream_is_drawn_alike(part: tuple[int, int], interpreted: dict[str, Any]) -> None:
    start, count = part
    words = np.frombuffer(key_stream(SECRET * 2, start // 8, 0, 8 * (count + count % 2)), "<i8").copy()
    normals = np.empty(len(words))
    cpu.normals(words, normals)
    assert torch.equal(interpreted["parts"][part], torch.from_numpy(normals)[:count])


def test_the_sums_of_a_hash_are_those_of_its_definition(interpreted: dict[str, Any]) -> None:
    rows, key = hashed_rows()
    assert torch.equal(interpreted["rows"], row_sums_by_torch(rows, key))


@pytest.mark.parametrize("name", SUMMED)
def test_the_gradient_of_a_weight_is_that_of_torch_in_float64(name: str, interpreted: dict[str, Any]) -> None:
    (_, shape, options), (cotangent, inputs) = SUMMED[name], factors(name, whole=False)
    weight = torch.zeros(shape, dtype=torch.float64)
    exact, _ = weighted_gradients(inputs.double(), cotangent.double(), weight, None, (True, False), options)
    sizes, _ = weighted_gradients(inputs.double().abs(), cotangent.double().abs(), weight, None, (True, False), options)
    assert exact is not None and sizes is not None
    assert bool(((interpreted["sums"][name] - exact).abs() <= 64 * 2.0**-24 * sizes).all())


# ---- machine code


@lru_cache(maxsize=8)
def compiled(capability: int, element: str = "fp32", samples: int = 1, fusion: bool = False) -> Any:
    """The kernel for a GPU that is not here."""
    names = gpu.release_kernel.arg_names
    kinds = {"values": f"*{element}", "apart": "*fp64", "count": "i64", "first": "i64", "stream": "i64"}
    kinds |= {name: "i32" for name in names if re.fullmatch(r"k\d", name)}
    kinds |= {name: "fp64" for name in ("own", "share", "shift", "factor", "mean")}
    constants = {"FURTHER": True, "SAMPLES": samples, "BLOCKS": gpu.BLOCKS_AT_ONCE}
    source = ASTSource(
        fn=gpu.release_kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    options = {**gpu.OPTIONS, "enable_fp_fusion": fusion}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def test_numbers_are_handed_over_in_all_their_bits() -> None:
    """A Python float would be a float32, and a key would be compiled in, if a launch decided by the values."""
    kinds = {parameter.name: parameter.annotation_type for parameter in gpu.release_kernel.params}
    assert {kinds[name] for name in ("own", "share", "shift", "factor", "mean")} == {"fp64"}
    assert {kinds[f"k{number}"] for number in range(8)} == {"i32"} and {
        kinds[n] for n in ("count", "first", "stream")
    } == {"i64"}
    assert all(
        p.do_not_specialize for p in gpu.release_kernel.params if re.fullmatch(r"k\d|count|first|stream", p.name)
    )
    assert gpu.OPTIONS["enable_fp_fusion"] is False


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def float64_operations(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"\b((?:fma|mul|add|sub|div|sqrt|rcp|rsqrt|ex2|lg2|sin|cos|mad)\.[\w.]*f64)\b", ptx))


def fused_in_the_source() -> int:
    """How many products of ``pair`` are written to be rounded together with a sum."""
    functions = {name: ast.parse(inspect.getsource(getattr(gpu, name).fn)) for name in ("pair", "_step")}
    calls = [ast.unparse(node.func) for node in ast.walk(functions["pair"]) if isinstance(node, ast.Call)]
    return calls.count("tl.fma") + calls.count("_step")


@pytest.mark.parametrize("capability", [80, 90])
def test_no_operation_is_fused_that_the_source_keeps_apart(capability: int) -> None:
    counted = float64_operations(compiled(capability).asm["ptx"])
    assert fused_in_the_source() == 27
    assert counted["fma.rn.f64"] == 4 * fused_in_the_source()
    assert counted["div.rn.f64"] == counted["sqrt.rn.f64"] == 4
    assert all(".rn." in operation for operation in counted), counted


def test_fusing_further_is_noticed() -> None:
    counted = float64_operations(compiled(80, fusion=True).asm["ptx"])
    assert counted["fma.rn.f64"] > 4 * fused_in_the_source()


def test_constants_are_those_of_the_loop_in_all_their_bits() -> None:
    ptx = compiled(80).asm["ptx"].lower()
    named = [value for name, value in vars(cpu).items() if re.fullmatch(r"_[CSL]\d+|_LN2(_REST)?|_RADIANS", name)]
    assert len(named) == 28
    missing = [value for value in named if f"0d{struct.unpack('<Q', struct.pack('<d', value))[0]:016x}" not in ptx]
    assert missing == []


def test_small_numbers_are_not_flushed_and_noise_is_not_narrowed() -> None:
    """The one conversion to float32 for each entry is that of the result."""
    ptx = compiled(90).asm["ptx"]
    assert ".ftz" not in ptx and "approx" not in ptx
    assert len(re.findall(r"cvt\.rn\.f32\.f64", ptx)) == 8
    assert len(re.findall(r"\.f32\b", compiled(90, "fp64").asm["ptx"])) == 0


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("samples", [1, 4])
def test_nothing_spills(capability: int, samples: int, tmp_path: Path) -> None:
    """What does not fit into registers would be kept in local memory, on the stack."""
    used = resources(compiled(capability, samples=samples), tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and 16 < used["REG"] <= 80, used


def resources(code: Any, folder: Path) -> dict[str, int]:
    """Returns the registers and bytes of the stack that the machine code of a kernel uses."""
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not reader.is_file():
        pytest.skip("Triton comes without cuobjdump here, and PTX does not tell what the assembler spills")
    machine_code = folder / "kernel.cubin"
    machine_code.write_bytes(code.asm["cubin"])
    report = subprocess.run([reader, "-res-usage", machine_code], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}


def test_the_hash_compiles_for_a_gpu_without_a_spill(tmp_path: Path) -> None:
    kinds = {"rows": "*i32", "key": "*i64", "out": "*i64"}
    names = gpu.row_sums_kernel.arg_names
    constants = {"ROW": 1 << 14, "SUMS": 4, "COLUMNS": 1024}
    source = ASTSource(
        fn=gpu.row_sums_kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    code = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=gpu.OPTIONS)
    assert "st.global.b64" in code.asm["ptx"] or "st.global.u64" in code.asm["ptx"]
    assert "f64" not in code.asm["ptx"] and ".local" not in code.asm["ptx"]


GEOMETRIES = {
    "convolution": (128, 64, 32, 32, 32, 32, 3, 3, 1, 1, 1, 1, 1, 1),
    "linear": (512, 3136, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1),
}


def compiled_sum(capability: int, geometry: str, inputs: str = "bf16") -> Any:
    names = gpu.weight_gradient_kernel.arg_names
    kinds = {"cotangent": "*bf16", "inputs": f"*{inputs}", "out": "*fp64", "terms": "i64", "share": "i64"}
    kinds |= {f"{tensor}{axis}": "i32" for tensor in "dx" for axis in range(4)}
    numbers = (*GEOMETRIES[geometry], gpu.TILE, gpu.TERMS_AT_ONCE)
    constants = dict(zip(names[len(kinds) :], numbers, strict=True))
    source = ASTSource(
        fn=gpu.weight_gradient_kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=gpu.OF_A_SUM)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("capability", [80, 90])
def test_gradients_of_weights_use_tensor_cores_in_float32_and_nothing_spills(
    capability: int, geometry: str, tmp_path: Path
) -> None:
    code = compiled_sum(capability, geometry)
    products = set(re.findall(r"\b(?:wg)?mma\.(?:mma_async\.)?sync\S*", code.asm["ptx"])) - {"wgmma.fence.sync.aligned"}
    products = {p for p in products if "bf16" in p}
    assert products and all(re.search(r"\.f32\.bf16\.bf16", product) for product in products), products
    assert len(re.findall(r"\badd\.(?:rn\.)?f64", code.asm["ptx"])) == gpu.TILE**2 // (32 * gpu.OF_A_SUM["num_warps"])
    used = resources(code, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, used


@pytest.mark.parametrize("capability", [80, 90])
def test_inputs_in_float32_are_cut_to_tf32_before_they_are_multiplied(capability: int, tmp_path: Path) -> None:
    code = compiled_sum(capability, "convolution", "fp32")
    assert re.search(r"and\.b32\s+%r\d+, %r\d+, -8192", code.asm["ptx"])
    assert re.findall(r"mma\S*\.f32\.tf32\.tf32", code.asm["ptx"]) and "bf16.bf16" not in code.asm["ptx"]
    used = resources(code, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, used


# ---- the choice


def test_a_cpu_never_imports_triton_for_noise() -> None:
    code = (
        "import sys, torch; from lipdp_lightning.kernels import loops;"
        "from lipdp_lightning.mechanism import noise as n;"
        "s = n.StepNoise.of(bytes(16), 0, n.Place(), bytes(32)); n.complete_({0: n.Sum(torch.zeros(9), 1.0)}, s);"
        "assert loops.gpu_kernels(torch.device('cpu')) is None;"
        "print([m for m in sys.modules if m.split('.')[0] == 'triton' or m.endswith('kernels.gpu')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_gpu_is_given_the_kernels_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loops.gpu_kernels(torch.device("cuda", 0)) is gpu
    assert loops.gpu_kernels(torch.device("meta")) is None
    with monkeypatch.context() as of_another_maker:
        of_another_maker.setattr(torch.version, "hip", "7.0")
        assert loops.gpu_kernels(torch.device("cuda", 0)) is None
    loops._triton_kernels.cache_clear()
    try:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert loops.gpu_kernels(torch.device("cuda", 0)) is None
    finally:
        loops._triton_kernels.cache_clear()
