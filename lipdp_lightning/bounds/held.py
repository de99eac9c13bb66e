"""What a model holds, without a walk over all names."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

_kinds = itemgetter("_parameters", "_buffers", "_modules")


class HeldTensors:
    """Parameters and buffers by name, and the modules that hold them.

    Names are collected anew when any module holds other parameters, buffers or modules than before; whether it does is
    seen from the identities of what it holds, which are alive here and hence belong to nothing else.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._attributes: list[dict[str, Any]] = []
        self._held: tuple[list[int], list[int]] = ([], [])
        self._named: dict[str, Tensor] = {}
        self._names: dict[str, nn.Parameter] = {}
        self._name_of: dict[int, str] = {}
        self._parameters: list[nn.Parameter] = []

    def named(self) -> dict[str, Tensor]:
        if not self._modules or _identities(self._attributes) != self._held:
            self._modules = list(self._model.modules())
            self._attributes = [module.__dict__ for module in self._modules]
            self._held = _identities(self._attributes)
            self._names = dict(self._model.named_parameters())
            self._named = self._names | dict(self._model.named_buffers())
            self._name_of = {id(tensor): name for name, tensor in self._named.items()}
            self._parameters = [tensor for tensor in self._named.values() if isinstance(tensor, nn.Parameter)]
        return self._named

    def named_parameters(self) -> dict[str, nn.Parameter]:
        self.named()
        return self._names

    def name_of(self, tensor: Tensor) -> str | None:
        """Returns the first name of a parameter or buffer, as of the last call of :meth:`named`; None for others."""
        return self._name_of.get(id(tensor))

    def parameters_and_modules(self) -> tuple[list[nn.Parameter], list[nn.Module]]:
        """Both by one look."""
        self.named()
        return self._parameters, self._modules


def _identities(attributes: list[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """How many each module holds of each kind, and which ones."""
    held = list(chain.from_iterable(map(_kinds, attributes)))
    return list(map(len, held)), list(map(id, chain.from_iterable(map(dict.values, held))))
