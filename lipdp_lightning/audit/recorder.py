"""Runs a model's graph and records what a certificate bounds: every value, its cotangent, and the layers' n_ik."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

Tensors = dict[str, Tensor]


class _Recorder(fx.Interpreter):
    """Adds a zero to every value and to the parameters of single uses; the gradient of a zero is the
    cotangent there.
    """

    def __init__(self, graph: fx.GraphModule, probes: Tensors, use_probes: Tensors, scalable: set[str]) -> None:
        super().__init__(graph)
        self.probes, self.use_probes, self.scalable = probes, use_probes, scalable
        self.values: Tensors = {}
        self.norms: Tensors = {}
        self._at = ""

    def run_node(self, n: fx.Node) -> Any:
        self._at = n.name
        result = super().run_node(n)
        if n.name in self.probes:
            result = result + self.probes[n.name]
        if isinstance(result, Tensor):
            self.values[n.name] = result.clone()  # the next operation may overwrite it
        elif isinstance(result, tuple | list) and result and all(isinstance(r, Tensor) for r in result):
            self.values[n.name] = torch.cat([r.reshape(1, -1) for r in result], 1)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(str(target))
        if self._at in self.scalable:
            self.norms[self._at] = module.example_norms(args[0])
        prefix = f"{self._at}/"
        added = {k.removeprefix(prefix): v for k, v in self.use_probes.items() if k.startswith(prefix)}
        if added:
            own = dict(module.named_parameters())
            return functional_call(module, {k: own[k] + v for k, v in added.items()}, args, kwargs)
        return module(*args, **kwargs)


class Runner(nn.Module):
    """Wraps the recorder as a module, so that functional_call can exchange the parameters."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.net = graph

    def forward(
        self, x: Tensor, probes: Tensors, use_probes: Tensors, scalable: set[str]
    ) -> tuple[Tensor, Tensors, Tensors]:
        """Returns the logits, every value by node, and n_ik by node."""
        recorder = _Recorder(self.net, probes, use_probes, scalable)
        logits = recorder.run(x)
        return logits, recorder.values, recorder.norms
