"""Weight standardisation of convolutions as a projection after the step: what is certified are plain weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def standardize(weight: Tensor, variance: bool) -> None:
    """Give every output channel's kernel mean 0 and, with ``variance``, the same norm, in place.

    The mean is taken away by the Euclidean projection onto a linear space, so that an average of such kernels has it
    too. With ``variance``, every channel's kernel is then scaled to the root mean square of their norms, as a
    standardised weight times one gain; the gain is bounded by the norm projection that follows. A channel of which
    nothing is left stays zero. Radial scaling and cutting of singular values keep the means at 0.
    """
    rows = weight.double().reshape(weight.shape[0], -1)
    rows = rows - rows.mean(1, keepdim=True)
    if variance:
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        common = norms.square().mean().sqrt()
        rows = torch.where(norms > 0, rows / norms.clamp_min(torch.finfo(torch.float64).tiny) * common, 0.0)
    weight.copy_(rows.reshape(weight.shape))


def standardized_layers(weights: Mapping[str, Tensor], kind: str, free: frozenset[str]) -> dict[str, Tensor]:
    """The convolutions among the layers that standardisation applies to; ValueError where it would leave nothing."""
    if kind == "none":
        return {}
    chosen = {name: w for name, w in weights.items() if w.dim() > 2 and name not in free}
    single = [name for name, w in chosen.items() if w[0].numel() == 1]
    if single or not chosen:
        reason = f"a kernel of one weight is its own mean: {', '.join(single)}" if single else "there is no convolution"
        raise ValueError(
            f"standardize={kind!r} cannot apply; {reason}.\nHINT: list such layers in free_layers, or leave it out."
        )
    return chosen
