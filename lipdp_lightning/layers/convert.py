"""Conversion of a torch model to layers that the mechanism can work with."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..bounds.graph import CertificationError, Problem, structural_problems
from .dropout import KeyedDropout
from .scaled import ScaledConv1d, ScaledConv2d, ScaledConvTranspose1d, ScaledConvTranspose2d, ScaledLinear

_SWAPS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: ScaledLinear,
    nn.Conv1d: ScaledConv1d,
    nn.Conv2d: ScaledConv2d,
    nn.ConvTranspose1d: ScaledConvTranspose1d,
    nn.ConvTranspose2d: ScaledConvTranspose2d,
    nn.Dropout: KeyedDropout,
}


def make_private(model: nn.Module) -> nn.Module:
    """Swaps Linear, Conv and Dropout layers for layers that the mechanism can work with.

    Parameters, buffers, hooks and state_dict keys stay as they are. A layer that is used in several places stays one
    layer.

    Args:
        model: The network, which is changed in place.

    Returns:
        The model, or the new layer if the model itself is such a layer.

    Raises:
        CertificationError: If the model cannot be certified; it lists every reason, and the model is left unchanged.
    """
    problems = structural_problems(model) + _unkeyed_dropouts(model)
    if problems:
        raise CertificationError(problems)
    if type(model) in _SWAPS:
        return _swapped(model)
    replaced: dict[int, nn.Module] = {}
    for parent in list(model.modules()):
        # named_children would pass over the second name of a child
        for name, child in list(parent._modules.items()):
            if child is not None and type(child) in _SWAPS:
                fresh = replaced.setdefault(id(child), _swapped(child))
                setattr(parent, name, fresh)
    return model


def _swapped(layer: nn.Module) -> nn.Module:
    """Returns a layer of the private class that shares every attribute with the old one."""
    fresh: Any = object.__new__(_SWAPS[type(layer)])
    vars(fresh).update(vars(layer))  # Python 3.13.0 loses the attributes of two objects with one __dict__
    return fresh


def _unkeyed_dropouts(model: nn.Module) -> list[Problem]:
    """Finds subclasses of Dropout, which are not swapped and would draw their masks by the row in the batch."""
    kinds = (nn.Dropout, KeyedDropout)
    return [
        Problem(
            path,
            f"{type(module).__name__} keys its masks by the row in the batch",
            "use nn.Dropout itself, which is swapped for one keyed by example",
        )
        for path, module in model.named_modules()
        if isinstance(module, nn.Dropout) and type(module) not in kinds
    ]
