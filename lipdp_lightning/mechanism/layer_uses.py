"""The layers that a forward pass must use with gradients, and the errors for one that uses others.

If a use were missing, the later ones would be paired with the bounds of others; and no noise covers a use for which the
certificate has no bound. Hence both must agree exactly, or nothing is released.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..bounds.certificate import Certificate, UseBound


def scalable_uses(certificate: Certificate) -> list[tuple[int, UseBound]]:
    """Returns each use of a layer that reports it, with the number of its group, in the order of the graph."""
    order = {node.name: place for place, node in enumerate(certificate.nodes)}
    uses = [(index, use) for index, group in enumerate(certificate.groups) for use in group.uses if use.scalable]
    return sorted(uses, key=lambda numbered: order.get(numbered[1].node, 0))


def other_uses(used: Sequence[str], expected: Sequence[str]) -> ValueError:
    """Returns the error for uses that the certificate does not have."""
    return ValueError(
        f"a forward pass with gradients used the layers {_listed(used)}, and the certificate bounds the uses "
        f"{_listed(expected)}, in this order: the bounds would belong to other gradients than those that "
        "are released. HINT: one forward pass of the certified network for each micro-batch, without "
        "torch.no_grad() around trained layers and without checkpointing; look at it under torch.no_grad()."
    )


def replaced_reports() -> ValueError:
    """Returns the error for a layer that reports to something else than the mechanism has set."""
    return ValueError(
        "a layer's gradient_scaler or gradient_keeper was replaced after the mechanism had set it: the "
        "gradients are not scaled as the noise assumes. HINT: leave them to the mechanism."
    )


def _listed(paths: Sequence[str]) -> str:
    shown = ", ".join(path or "the network" for path in paths[:12]) or "(none)"
    return shown + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")
