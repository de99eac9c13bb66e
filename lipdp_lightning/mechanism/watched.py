"""What a step starts from: the tensors of a model, and the certificate's numbers."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping

from torch import Tensor, nn

from ..bounds.certificate import Certificate


class WatchedTensors:
    """Parameters and buffers by name, and whether any of them changed.

    They are looked up once: that the network holds others is seen by its identity, before anything is released.
    """

    def __init__(self, model: nn.Module) -> None:
        self._named: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def named(self) -> dict[str, Tensor]:
        """Returns the tensors by their first name, parameters first."""
        return self._named

    def versions(self) -> list[int]:
        """Changes when a tensor is replaced, or changed in place by an operation that torch sees."""
        return versions_of(self.named())


def versions_of(named: Mapping[str, Tensor]) -> list[int]:
    tensors = named.values()
    return [t._version for t in tensors] + [t.data_ptr() for t in tensors]


def bounds_of(certificate: Certificate) -> bytes:
    """All numbers of the certificate that a step depends on; its names are those of the model."""
    uses = [(u.cotangent_bound, u.gradient_factor, u.input_bound) for g in certificate.groups for u in g.uses]
    return struct.pack(f"{3 * len(uses)}d", *itertools.chain.from_iterable(uses))
