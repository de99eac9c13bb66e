"""What a step starts from: the tensors of a model, without a walk over all names, and the certificate's numbers."""

from __future__ import annotations

import itertools
import struct

from torch import Tensor, nn

from ..bounds.certificate import Certificate


class WatchedTensors:
    """Parameters and buffers by name, and the modules that hold them.

    Names are collected anew when any module holds other parameters, buffers or modules than before; whether it does is
    seen from the identities of what it holds.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: tuple[tuple[nn.Module, tuple[int, ...]], ...] = ()
        self._named: dict[str, Tensor] = {}

    def named(self) -> dict[str, Tensor]:
        if not self._held or any(_identities(module) != held for module, held in self._held):
            self._held = tuple((module, _identities(module)) for module in self._model.modules())
            self._named = dict(self._model.named_parameters()) | dict(self._model.named_buffers())
        return self._named

    def parameters(self) -> list[nn.Parameter]:
        return [tensor for tensor in self.named().values() if isinstance(tensor, nn.Parameter)]

    def modules(self) -> list[nn.Module]:
        self.named()
        return [module for module, _ in self._held]

    def versions(self) -> tuple[int, ...]:
        """Changes when a tensor is replaced, or changed in place by an operation that torch sees."""
        tensors = self.named().values()
        return tuple(t._version for t in tensors) + tuple(t.data_ptr() for t in tensors)


def _identities(module: nn.Module) -> tuple[int, ...]:
    held = (module._parameters, module._buffers, module._modules)
    return tuple(id(value) for values in held for value in values.values())


def bounds_of(certificate: Certificate) -> bytes:
    """All numbers of the certificate that a step depends on; its names are those of the model."""
    uses = [(u.cotangent_bound, u.gradient_factor, u.input_bound) for g in certificate.groups for u in g.uses]
    return struct.pack(f"{3 * len(uses)}d", *itertools.chain.from_iterable(uses))
