"""A pretended GPU: tensors that say ``cuda:0``, hold real values in a CPU's memory and refuse what a GPU refuses.

Operations on them are counted as a driver would see them: launches of a kernel, waits of the host for a value, and
bytes that are copied either way. Tensors of both devices do not mix, but for numbers without a dimension. What a real
GPU would add is listed in docs/gpu.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from lipdp_lightning.bounds import graph, identity
from lipdp_lightning.kernels import loops
from lipdp_lightning.kernels.multilinear import row_sums_by_torch
from lipdp_lightning.kernels.normals import normals
from lipdp_lightning.layers.input import bounded_by_torch

DEVICE = torch.device("cuda", 0)
FREE_MEMORY = 40 << 30
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# their drivers read a status from the device
_CHECKED = ("_linalg_eigh", "_linalg_svd", "linalg_cholesky", "linalg_eigh", "linalg_svd")


@dataclass
class Counts:
    """What a device was asked for since the last ``clear``."""

    launches: int = 0
    waits: int = 0
    to_device: int = 0
    to_host: int = 0

    def clear(self) -> None:
        self.launches = self.waits = self.to_device = self.to_host = 0


counts = Counts()


class OnGpu(Tensor):
    """A tensor in the pretended GPU's memory; ``inner`` holds its values."""

    inner: Tensor
    # here, and not in the mode, which torch leaves for backward passes
    device = property(lambda _: DEVICE)  # type: ignore[assignment]
    is_cuda, is_cpu = property(lambda _: True), property(lambda _: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> Any:
        assert type(inner) is Tensor, type(inner)
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=inner.device, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self) -> str:
        return f"OnGpu({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = tree_flatten((args, kwargs))[0]
        if func is torch.ops.aten.copy_.default and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu):
            _copied(args[1], isinstance(args[0], OnGpu))
        elif any(type(thing) is not cls and isinstance(thing, Tensor) and thing.dim() > 0 for thing in flat):
            raise RuntimeError(f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({func})")
        _count(func, args)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        wrapped = tree_map(lambda made: OnGpu(made) if isinstance(made, Tensor) else made, out)
        if isinstance(wrapped, Tensor | list | tuple):
            return return_and_correct_aliasing(func, args, kwargs, wrapped)
        return wrapped


def _inner(thing: Any) -> Any:
    return thing.inner if isinstance(thing, OnGpu) else thing


def _count(func: Any, args: Any) -> None:
    name = func._schema.name.removeprefix("aten::")
    is_view = any(made.alias_info and not made.alias_info.is_write for made in func._schema.returns)
    masks = (
        [i for i in args[1] if isinstance(i, Tensor)] if "index" in name and isinstance(args[1], list | tuple) else []
    )
    if _WAITING & set(func.tags) or name in _CHECKED or any(mask.dtype == torch.bool for mask in masks):
        counts.waits += 1
    if not (is_view or "empty" in name or name in ("detach", "lift_fresh", "_unsafe_view")):
        counts.launches += 1


def _copied(source: Tensor, to_device: bool, waits: bool = True) -> None:
    """Counts a copy out of or into memory that is not pinned, for which the host waits."""
    size = source.numel() * source.element_size()
    counts.waits += waits
    counts.to_device += size * to_device
    counts.to_host += size * (not to_device)


class Pinned(Tensor):
    """A tensor of the host in memory that a device can read by itself."""


def to_gpu(tensor: Tensor, counted: bool = True, waits: bool = True) -> Tensor:
    """Returns a copy on the pretended GPU, which is a leaf."""
    if isinstance(tensor, OnGpu):
        return tensor
    if counted:
        _copied(tensor, True, waits)
    if isinstance(tensor, Pinned):
        tensor = tensor.as_subclass(Tensor)
    return OnGpu(tensor.detach().clone())


def to_cpu(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU, which is a leaf."""
    if not isinstance(tensor, OnGpu):
        return tensor
    _copied(tensor, False)
    return tensor.detach().inner.clone()


def module_to_gpu(module: nn.Module) -> nn.Module:
    """Moves parameters and buffers, as ``Module.to`` does."""
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, value in list(part._parameters.items()):
            if value is not None and not isinstance(value, OnGpu):
                fresh = nn.Parameter(to_gpu(value, counted=False), requires_grad=value.requires_grad)
                part._parameters[name] = moved.setdefault(id(value), fresh)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = to_gpu(buffer, counted=False)
    return module


_to_of_modules = nn.Module.to


def _moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """What ``Module.to`` is on a machine with a pretended GPU."""
    target = args[0] if args else kwargs.get("device")
    return module_to_gpu(module) if _says_cuda(target) else _to_of_modules(module, *args, **kwargs)


def _says_cuda(device: Any) -> bool:
    return isinstance(device, OnGpu) or (isinstance(device, str | torch.device) and torch.device(device).type == "cuda")


def _refuse(tensor: Tensor, *_: Any) -> Any:
    raise TypeError(
        "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it to host memory first."
    )


def _to_list(tensor: Any) -> Any:
    counts.waits += 1
    return tensor.detach().inner.tolist()


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    waits = not (kwargs.pop("non_blocking", False) and isinstance(tensor, Pinned))
    target, rest = kwargs.pop("device", None), []
    for argument in args:
        if isinstance(argument, Tensor):
            # here, within the mode, the tensor would answer with its true device
            target, argument = DEVICE if isinstance(argument, OnGpu) else argument.device, argument.dtype
        if isinstance(argument, str | torch.device):
            target = argument
        elif isinstance(argument, torch.dtype):
            rest.append(argument)
    if target is not None:
        tensor = to_gpu(tensor, waits=waits) if _says_cuda(target) else to_cpu(tensor)
    return Tensor.to(tensor, *rest, **kwargs) if rest or kwargs else tensor


_get: Any = lambda name: getattr(Tensor, name).__get__  # noqa: E731
_ANSWERS: dict[Any, Callable[..., Any]] = {
    Tensor.get_device: lambda tensor: 0,
    Tensor.data_ptr: lambda tensor: (1 << 40) + tensor.inner.data_ptr() % (1 << 32),
    Tensor.numpy: _refuse,
    Tensor.__array__: _refuse,
    Tensor.cpu: to_cpu,
    Tensor.tolist: _to_list,
    Tensor.new_tensor: lambda tensor, data, **k: to_gpu(
        torch.tensor(data, **{n: v for n, v in k.items() if n != "device"})
    ),
}


class PretendGpu(TorchFunctionMode):
    """Lets tensors and factories answer as if there were a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        own = args[0] if args and isinstance(args[0], OnGpu) else None
        if own is not None and func in _ANSWERS:
            return _ANSWERS[func](*args, **kwargs)
        if func is Tensor.pin_memory:
            return args[0].clone().as_subclass(Pinned)
        if func is Tensor.cuda:
            return to_gpu(args[0])
        if func is Tensor.to:
            return _to(*args, **kwargs)
        if not _says_cuda(kwargs.get("device")):
            host = kwargs.get("device") is not None and own is not None
            return func(*[_inner(a) for a in args], **kwargs) if host else func(*args, **kwargs)
        kwargs.pop("device")
        if own is not None:
            return func(*args, **kwargs)
        made = func(*args, **kwargs)
        if func is torch.tensor:
            return to_gpu(made)
        counts.launches += 1
        return OnGpu(made.detach()).requires_grad_(made.requires_grad)


def _release_(values: Any, key: bytes, deviation: float, *, stream: int = 0, apart: Any = None, start: int = 0,
              samples: int = 1, share: float = 1.0, shift: float = 0.0, factor: float = 1.0) -> None:  # fmt: skip
    """What the kernel of this name does, on the values themselves."""
    counts.launches += 1
    assert isinstance(values, OnGpu)
    own = values.detach().inner
    total = own.double() if apart is None else own.double() + apart.inner
    drawn = normals(key, stream, start, own.numel())
    for sample in range(1, samples):
        drawn += normals(key, stream + sample, start, own.numel())
    noisy = drawn.mul_(1 / samples**0.5).mul_(deviation).view(own.shape) + total * share
    own.copy_(((noisy + shift) - shift if shift else noisy) * factor)


def _row_sums(rows: Any, key: Any) -> Tensor:
    counts.launches += 1
    return OnGpu(row_sums_by_torch(rows.inner, key.inner))


def _compile(definition: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """The code that ``torch.compile`` makes of a definition: a kernel for each output (tests/kernels/test_fused.py)."""

    def run(*given: Any) -> Any:
        if any(isinstance(thing, Tensor) and not isinstance(thing, OnGpu) and thing.dim() > 0 for thing in given):
            raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu")
        made = definition(*map(_inner, given))
        counts.launches += len(made) if isinstance(made, tuple) else 1 + (definition is bounded_by_torch)
        return tree_map(OnGpu, made)

    return run


def _weight_gradient(cotangent: Any, inputs: Any, shape: Any, options: Any) -> Tensor:
    """What the kernel of this name and the sum of its parts do."""
    counts.launches += 2
    left, right = cotangent.inner.double(), inputs.inner.double()
    if options is None:
        return OnGpu(left.reshape(-1, shape[0]).t() @ right.reshape(-1, shape[1]))
    weight, inner = torch.zeros(*shape, dtype=torch.float64), [False, [0] * (len(shape) - 2), 1, [False, True, False]]
    exact = torch.ops.aten.convolution_backward(left, right, weight, None, *options[:3], *inner)[1]
    return OnGpu(exact)


KERNELS = SimpleNamespace(release_=_release_, row_sums=_row_sums, weight_gradient=_weight_gradient)


def _other_modes() -> list[str]:
    """Returns what ``modes_of_operations`` finds beside the pretence, which stands for torch itself here."""
    return [words for words in _true_modes() if not words.startswith(PretendGpu.__name__)]


def _other_odd_tensors(module: nn.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields what the certificate finds odd about a module's tensors, but for the class of the pretence."""
    held = vars(module) | module._parameters | module._buffers
    return (found for found in _true_odd_tensors(module) if not isinstance(held[found[0]], OnGpu))


_true_modes, _true_odd_tensors = identity.modes_of_operations, graph._odd_tensors


@contextlib.contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch, kernels: Any = KERNELS) -> Iterator[Counts]:
    """Enters a machine with one GPU and these kernels, or none; yields what is counted there."""
    with monkeypatch.context() as patched, PretendGpu():
        patched.setattr(loops, "_triton_kernels", lambda: kernels)
        for module in (graph, identity):
            patched.setattr(module, "modes_of_operations", _other_modes)
        patched.setattr(graph, "_odd_tensors", _other_odd_tensors)
        patched.setattr(torch.cuda, "is_available", lambda: True)
        patched.setattr(torch.backends.cudnn, "version", lambda: 91000)
        patched.setattr(torch.cuda, "mem_get_info", lambda device: (FREE_MEMORY, 80 << 30))
        patched.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patched.setattr(nn.Module, "to", _moved)
        patched.setattr(torch, "compile", _compile)
        patched.setattr(torch.cuda, "get_device_name", lambda device: "Pretended GPU")
        patched.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        properties = SimpleNamespace(multi_processor_count=108, total_memory=80 << 30)
        patched.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        counts.clear()
        yield counts
