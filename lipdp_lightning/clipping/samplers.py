"""Connects opacus to this library's layers: per-example gradients, ghost norms, and what has neither.

Opacus looks samplers up by a layer's exact type, and compares types again inside them. A scaled layer is therefore
presented to it as the torch layer that it is.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from opacus.grad_sample import register_grad_sampler, register_norm_sampler
from opacus.grad_sample.conv import compute_conv_grad_sample
from opacus.grad_sample.linear import compute_linear_grad_sample
from torch import Tensor, fx

from ..bounds.graph import CertificationError
from ..bounds.shapes import trace_at
from ..layers.contribution import Contribution
from ..layers.scaled import ScaledConv1d, ScaledConv2d, ScaledLinear
from ..privacy.plan import PrivacyPlan

_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    ScaledLinear: nn.Linear,
    ScaledConv1d: nn.Conv1d,
    ScaledConv2d: nn.Conv2d,
}
_SUPPORTED = "Linear, Conv1d and Conv2d"


def _plain(layer: nn.Module) -> Any:
    """Returns a torch layer that shares every attribute, the parameters included."""
    shown: Any = object.__new__(_PLAIN[type(layer)])
    vars(shown).update(vars(layer))
    return shown


@register_grad_sampler(ScaledLinear)
def linear_gradients(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    found: dict[nn.Parameter, Tensor] = compute_linear_grad_sample(_plain(layer), activations, backprops)
    return found


@register_grad_sampler([ScaledConv1d, ScaledConv2d])
def conv_gradients(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    found: dict[nn.Parameter, Tensor] = compute_conv_grad_sample(_plain(layer), activations, backprops)
    return found


@register_norm_sampler([ScaledLinear, ScaledConv1d, ScaledConv2d])
def layer_norms(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Returns upper bounds of the norms of weight and bias together, rounding included, under the first of them.

    Opacus's own norms come from differences in float32: where the positions of an example cancel, they may lie below
    the norm of what the second backward pass adds.
    """
    trained = [p for p in (layer.weight, layer.bias) if p is not None and p.requires_grad]
    trains = layer.weight.requires_grad, layer.bias is not None and layer.bias.requires_grad
    options = None
    inputs = activations[0]
    if not isinstance(layer, nn.Linear):
        inputs, padding = layer._padded(inputs)
        options = (list(layer.stride), list(padding), list(layer.dilation), layer.groups)
    norms = Contribution(inputs, backprops, layer.weight.detach(), trains, options).norms()
    return {p: norms if i == 0 else norms.new_zeros(len(norms)) for i, p in enumerate(trained)}


def clipping_problems(network: nn.Module, input_shape: tuple[int, ...], plan: PrivacyPlan, precision: str) -> list[str]:
    """Returns the reasons why opacus cannot give the gradient of one example, by module; empty if it can."""
    problems = []
    if precision not in ("32-true", "64-true"):
        problems.append(
            f"precision={precision!r} rounds gradients per example, and norms and sums differently. "
            "HINT: use '32-true', or privacy.method=lipschitz."
        )
    try:
        graph = trace_at(network, input_shape)
    except CertificationError:
        return problems  # reported by the walk over the graph
    problems += [*_unknown_layers(network), *_borrowed_weights(network, graph), *_never_called(network, graph)]
    if plan.scaling == "clip_ghost":
        problems += _used_again(graph)
    return problems


def _unknown_layers(network: nn.Module) -> list[str]:
    problems = []
    for path, module in network.named_modules():
        own = [name for name, p in module.named_parameters(recurse=False) if p.requires_grad]
        name = path or type(module).__name__
        if own and type(module) not in _PLAIN:
            problems.append(
                f"{name} ({type(module).__name__}) trains {', '.join(own)}, and DP-SGD takes gradients per example "
                f"from {_SUPPORTED} only. HINT: freeze them with requires_grad_(False), or privacy.method=lipschitz."
            )
        elif own and getattr(module, "padding_mode", "zeros") != "zeros":
            problems.append(
                f"{name} pads with mode {module.padding_mode!r}, which opacus's gradients per example do not support. "
                "HINT: use a padding layer before a convolution without padding, or privacy.method=lipschitz."
            )
    return problems


def _borrowed_weights(network: nn.Module, graph: fx.GraphModule) -> list[str]:
    """Returns parameters that the forward pass reads without calling their layer, which hooks do not see."""
    trained = {name for name, p in network.named_parameters(remove_duplicate=False) if p.requires_grad}
    read = {str(n.target) for n in graph.graph.nodes if n.op == "get_attr"} & trained
    return [
        f"{name} is read without its layer being called, so that gradients per example would miss this use. "
        "HINT: call the layer, or privacy.method=lipschitz."
        for name in sorted(read)
        if type(network.get_submodule(name.rpartition(".")[0])) in _PLAIN
    ]


def _never_called(network: nn.Module, graph: fx.GraphModule) -> list[str]:
    called = {id(p) for n in graph.graph.nodes if n.op == "call_module" for p in _layer(graph, n).parameters()}
    return [
        f"{name} is trained, and no layer that the forward pass calls holds it. "
        "HINT: freeze it with requires_grad_(False), or remove it."
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and id(parameter) not in called and "." in name
    ]


def _layer(graph: fx.GraphModule, node: fx.Node) -> nn.Module:
    return graph.get_submodule(str(node.target))


def _used_again(graph: fx.GraphModule) -> list[str]:
    uses: dict[int, list[str]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            for parameter in _layer(graph, node).parameters(recurse=False):
                if parameter.requires_grad:
                    uses.setdefault(id(parameter), []).append(str(node.target))
    shared = sorted({", ".join(dict.fromkeys(paths)) for paths in uses.values() if len(paths) > 1})
    return [
        f"{paths}: weights that are used more than once have no ghost norm. "
        "HINT: use privacy.method=dpsgd_flat, the same mechanism with gradients per example."
        for paths in shared
    ]
