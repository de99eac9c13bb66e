"""What a step starts from: the tensors of a model, without a walk over all names, and the certificate's numbers."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping

from torch import Tensor

from ..bounds.certificate import Certificate
from ..bounds.held import HeldTensors


class WatchedTensors(HeldTensors):
    """Parameters and buffers by name, and whether any of them changed."""

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
