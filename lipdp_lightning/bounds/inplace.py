"""In-place operations: sound only where nothing else can see the tensor they overwrite."""

from __future__ import annotations

import operator

from torch import fx, nn

_IN_PLACE_FUNCTIONS = frozenset(
    {
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
    }
)
_VIEWS = frozenset(
    {"view", "reshape", "flatten", "chunk", "split", "getitem", "permute", "transpose", "squeeze", "unsqueeze",
     "contiguous", "unbind", "unflatten", "swapaxes", "to", "float", "double", "tensor_split", "movedim", "expand",
     "detach", "getattr", "pos", "pixel_shuffle", "pixel_unshuffle"}
)  # fmt: skip
_VIEW_MODULES = (
    nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle
)  # fmt: skip
_KNOWN = ("torch.nn", "lipdp_lightning")


def _overwrites(node: fx.Node, module: nn.Module | None) -> bool:
    if node.op == "call_module":
        return bool(getattr(module, "inplace", False))
    # torch names what overwrites with a trailing underscore: relu_, add_, F.elu_
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name.endswith("_") and not name.endswith("__"):
        return True
    return node.target in _IN_PLACE_FUNCTIONS or bool(node.kwargs.get("inplace", False))


def _may_alias(node: fx.Node, module: nn.Module | None) -> bool:
    if node.op == "call_module":
        # a user's own module may return what it was given
        return isinstance(module, _VIEW_MODULES) or not type(module).__module__.startswith(_KNOWN)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op in ("placeholder", "get_attr") or name in _VIEWS


def overwrites_shared_value(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether the node overwrites a tensor that another node reads, directly or through a view.

    The graph would then show that reader the old value, with the old bound.
    """
    if node.op not in ("call_module", "call_function", "call_method"):
        return False
    if not _overwrites(node, modules.get(str(node.target)) if node.op == "call_module" else None):
        return False
    operand = node.args[0] if node.args else next(iter(node.all_input_nodes), None)
    if not isinstance(operand, fx.Node):
        return False
    source = modules.get(str(operand.target)) if operand.op == "call_module" else None
    return len(operand.users) > 1 or _may_alias(operand, source)
