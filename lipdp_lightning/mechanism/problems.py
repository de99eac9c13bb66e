"""The errors for a step that is not the certified one: another network, other weights, or other uses of layers.

If a use were missing, the later ones would be paired with the bounds of others; and no noise covers a use for which the
certificate has no bound. Hence both must agree exactly, or nothing is released.
"""

from __future__ import annotations

from collections.abc import Sequence


def trained_otherwise(names: Sequence[str]) -> ValueError:
    """Returns the error for layers thawed or frozen after set-up; their raw gradients could reach the optimizer."""
    return ValueError(
        f"{', '.join(names)}: what is trained changed after set-up, and noise is drawn for the layers "
        "trained then. HINT: freeze or thaw layers before training starts, and use one run for each phase."
    )


def changed_network(differences: Sequence[str]) -> ValueError:
    """Returns the error for a network that is another than the one that was certified."""
    return ValueError(
        f"the network was changed after set-up: {'; '.join(differences)}. Its certificate, and the noise that "
        "is drawn for its layers, are those of the network as it was. HINT: decide hooks, layers, constants "
        "and what is trained before training starts, and use one run for each phase; values of parameters "
        "and buffers may be loaded in place."
    )


def changed_weights(when: str) -> AssertionError:
    """Returns the error for weights or buffers that changed between the certificate and the release.

    It is raised as such, so that it is there also where Python leaves out assert statements.
    """
    return AssertionError(
        f"the weights changed {when}, or a buffer did: the gradients are not those of the step's certificate. "
        "HINT: change weights and buffers between steps, and keep no state that forward updates."
    )


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
