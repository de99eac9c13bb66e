"""The uses of layers in a micro-batch, against those that the certificate has bounded."""

from __future__ import annotations

from ..bounds.certificate import Certificate


class LayerUses:
    """Which layers a forward pass has used with gradients, in order.

    A use that the certificate has no term for is covered by no noise, and a term whose use is missing leaves the
    terms after it to other uses: the two must agree exactly, or nothing is released.
    """

    def __init__(self) -> None:
        self._expected: list[str] = []
        self.seen: list[str] = []
        self._passed = False  # the micro-batch has had its forward pass

    def begin(self, certificate: Certificate) -> None:
        """Expect the uses of a step's certificate, in the order of its graph."""
        order = {node.name: place for place, node in enumerate(certificate.nodes)}
        uses = [use for group in certificate.groups for use in group.uses if use.scalable]
        self._expected = [use.module for use in sorted(uses, key=lambda use: order.get(use.node, 0))]
        self.seen, self._passed = [], False

    def note(self, path: str) -> None:
        """A layer is used."""
        self.seen.append(path)

    def check(self) -> None:
        """Raise ValueError if the uses since the last check are not those of one forward pass; forget them."""
        seen, self.seen, self._passed = self.seen, [], True
        if seen != self._expected:
            raise self.refusal(seen)

    def settle(self) -> None:
        """End a micro-batch; raise ValueError if it has used layers in more than its one forward pass."""
        if self.seen and self._passed:
            raise self.refusal([*self._expected, *self.seen])
        if self.seen:
            self.check()
        self._passed = False

    def refusal(self, seen: list[str]) -> ValueError:
        """The error for uses that the certificate does not have."""
        return ValueError(
            f"a forward pass with gradients used the layers {_listed(seen)}, and the certificate bounds the uses "
            f"{_listed(self._expected)}, in this order: the bounds would belong to other gradients than those that "
            "are released. HINT: one forward pass of the certified network for each micro-batch, without "
            "torch.no_grad() around trained layers and without checkpointing; look at it under torch.no_grad()."
        )


def _listed(paths: list[str]) -> str:
    shown = ", ".join(path or "the network" for path in paths[:12]) or "(none)"
    return shown + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")
