"""Definitions that a GPU runs compiled: lipdp_lightning/kernels/loops.py."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lipdp_lightning.kernels import rows
from lipdp_lightning.kernels.loops import Fused


class OnGpu(Tensor):
    """A tensor that says that it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True


def on_gpu(x: Tensor) -> Tensor:
    return x.as_subclass(OnGpu)


def doubled(x: Tensor, more: float = 0.0) -> Tensor:
    if x.numel() == 3:
        raise ValueError("three numbers are refused")
    return 2 * x + more


def test_a_compiler_that_fails_leaves_the_definition_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def broken(definition: Any, **_: Any) -> Any:
        def fails(*_: Any) -> Any:
            tried.append(1)
            raise RuntimeError("Cannot find a working\ntriton installation")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    own = Fused(doubled)
    with pytest.warns(RuntimeWarning, match=r"doubled .*working triton installation.*HINT: run `lipdp doctor`"):
        assert torch.equal(own(on_gpu(torch.ones(2)), 1.0), torch.full((2,), 3.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(own(on_gpu(torch.ones(4))), torch.full((4,), 2.0))
    assert len(tried) == 1


def test_a_compiler_that_cannot_be_loaded_is_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "compile")
    with pytest.warns(RuntimeWarning, match="AttributeError"):
        assert torch.equal(Fused(doubled)(on_gpu(torch.ones(2))), torch.full((2,), 2.0))


def test_an_error_of_the_definition_is_its_own_and_the_compiler_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    def compiled(definition: Any, **options: Any) -> Any:
        assert options == {"dynamic": True, "fullgraph": True}

        def run(*given: Any) -> Any:
            used.append(1)
            return definition(*given)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    own = Fused(doubled)
    with pytest.raises(ValueError, match="three numbers are refused"):
        own(on_gpu(torch.ones(3)))
    own(on_gpu(torch.ones(2)))
    assert len(used) == 2


def test_on_a_cpu_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "compile")
    assert torch.equal(Fused(doubled)(torch.ones(2), 1.0), torch.full((2,), 3.0))


@pytest.mark.parametrize("fails", [False, True])
def test_the_layers_use_what_is_compiled_and_keep_their_values_and_gradients(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled definition in place of the loops, and the definition itself where it fails."""
    used: list[str] = []

    class Noted(Fused):
        def __call__(self, x: Tensor, *more: Any) -> Any:
            used.append(self._definition.__name__)
            self._failed = fails
            self._compiled = self._definition
            return super().__call__(on_gpu(x), *more)

    for name in ("_ordered", "_exchanged", "_floored", "_pulled_back"):
        monkeypatch.setattr(rows, name, Noted(getattr(rows, name)._definition))
    monkeypatch.setattr(rows, "usable", lambda *_: False)
    monkeypatch.setattr(rows, "is_traced", lambda: False)
    torch.manual_seed(0)
    x, direction = torch.randn(3, 4, 6), torch.randn(3, 4, 6)
    for function, plain in (
        (rows.larger_first, lambda t: rows.ordered_by_torch(t)[0]),
        (lambda t: rows._Floored.apply(t, 0.1, False), lambda t: rows.floored_by_torch(t, 0.1)),
    ):
        own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, expected = function(own), plain(other)
        torch.testing.assert_close(torch.Tensor(found), expected)
        found.backward(direction), expected.backward(direction)
        torch.testing.assert_close(torch.Tensor(own.grad), other.grad)
    assert used == ["ordered_by_torch", "swapped_by_torch", "floored_by_torch", "pulled_back_by_torch"]


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 30.0])
def test_the_backward_definition_is_the_gradient_of_the_forward_one(scale: float) -> None:
    torch.manual_seed(1)
    x = (scale * torch.randn(4, 3, 9, dtype=torch.float64)).requires_grad_()
    direction = torch.randn(4, 3, 9, dtype=torch.float64)
    (expected,) = torch.autograd.grad(rows.floored_by_torch(x, 0.1), x, direction)
    found = rows.pulled_back_by_torch(x.detach(), direction, 0.1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    constant = torch.full((1, 1, 5), 3.0, dtype=torch.float64)
    assert bool(rows.pulled_back_by_torch(constant, torch.ones_like(constant), 0.1).isfinite().all())


def test_torch_compiles_each_definition_to_one_kernel_for_each_output_on_an_a100() -> None:
    """Torch's compiler runs without a GPU, up to the source of the kernels."""
    pytest.importorskip("triton")
    program = Path(__file__).with_name("generated_kernels.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 10
    for name, kernel in found.items():
        several = name == "pairs"  # two outputs
        assert len(kernel["kernels"]) == 1 + several and not kernel["library calls"], (name, kernel)
        in_float64 = name in ("norms of rows", "clipped cotangents", "weighed cotangents", "bounded input")
        roots = {"sqrt"} if in_float64 else {"sqrt_rn"}  # in float64, every root is rounded to the nearest
        assert kernel["stores"] == len(kernel["kernels"]) and set(kernel["functions"]) <= roots, (name, kernel)
