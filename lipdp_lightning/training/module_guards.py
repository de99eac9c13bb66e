"""Reasons to refuse a module and its optimizer: what would reach a parameter past the noise."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import OptimizedModule

from ..bounds.losses import Loss
from ..mechanism.watched import WatchedTensors
from .module import PrivateModule

FIXED_METHODS = ("forward", "training_step", "optimizer_step", "backward", "manual_backward")


def module_problems(module: Any) -> list[str]:
    """Every reason not to train a module, each with its HINT."""
    if not isinstance(module, PrivateModule):
        return [
            f"the module is a {type(module).__name__}. HINT: put the network into PrivateModule(network, loss=...)."
        ]
    problems = [
        f"{type(module).__name__}.{name} replaces PrivateModule's, on which the certificate and the noise rest. "
        "HINT: put the computation into the network, or a subclass of lipdp_lightning.bounds.losses.Loss."
        for name in FIXED_METHODS
        if getattr(type(module), name) is not getattr(PrivateModule, name)
    ]
    if not isinstance(module.loss, Loss):
        problems.append(
            f"the loss is a {type(module.loss).__name__}. HINT: pass it to PrivateModule(network, loss=...), which "
            "checks that it is a sum over examples."
        )
    if not module.automatic_optimization:
        problems.append("manual optimization bypasses the step that adds noise. HINT: automatic_optimization = True.")
    return problems + _compiled_problems(module) + _optimizer_problems(module) + hooked(module)


def _compiled_problems(module: PrivateModule) -> list[str]:
    wrapped = [p or "the network" for p, m in module.network.named_modules() if isinstance(m, OptimizedModule)]
    if not wrapped:
        return []
    return [
        f"{', '.join(wrapped)} is wrapped by torch.compile, and the certificate cannot be traced through the wrapper. "
        "HINT: network.compile(), which wraps nothing, or torch.compile(PrivateModule(network)) for the whole step."
    ]


def _optimizer_problems(module: PrivateModule) -> list[str]:
    try:
        optimizers = optimizers_of(module)
    except (ValueError, TypeError) as error:
        return [f"configure_optimizers fails: {error}. HINT: check the optimizer's options."]
    if len(optimizers) != 1:
        return [f"{len(optimizers)} optimizers are configured. HINT: return one."]
    problems = []
    optimizer = optimizers[0]
    if isinstance(optimizer, torch.optim.LBFGS):
        problems.append("LBFGS evaluates the gradient several times in a step. HINT: SGD, Adam, AdamW or RMSprop.")
    held = {id(p) for g in optimizer.param_groups for p in g["params"]}
    missing = [n for n, p in module.network.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        problems.append(
            f"the optimizer does not hold {', '.join(missing)}, which would spend budget without training. "
            "HINT: pass all trained parameters, or freeze these with requires_grad_(False)."
        )
    own = {id(p) for p in module.network.parameters()}
    outside = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in own]
    foreign = len(held - {id(p) for p in module.parameters()})
    if outside or foreign:
        names = [*outside, *([f"{foreign} tensors of other modules"] if foreign else [])]
        problems.append(
            f"no bound covers {', '.join(names)}: outside the network no noise would be added. "
            "HINT: move them into the network, or freeze them with requires_grad_(False)."
        )
    return problems


def optimizers_of(module: PrivateModule) -> list[torch.optim.Optimizer]:
    """What configure_optimizers returns, in any of the forms that Lightning knows."""
    made = module.configure_optimizers()
    if isinstance(made, torch.optim.Optimizer):
        return [made]
    if isinstance(made, dict):
        return [made["optimizer"]]
    if isinstance(made, tuple | list):
        first = made[0] if made and isinstance(made[0], tuple | list) else made
        return [o["optimizer"] if isinstance(o, dict) else o for o in first]
    return []


def hooked(module: torch.nn.Module) -> list[str]:
    """Hooks that would be called with gradients or cotangents before noise is in them."""
    names = [
        name
        for name, p in module.named_parameters()
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    names += [
        path or type(module).__name__
        for path, m in module.named_modules()
        if m._backward_hooks or m._backward_pre_hooks
    ]
    if not names:
        return []
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [
        f"a backward hook is attached to {shown}; it would see gradients before noise is added, as "
        "WandbLogger.watch(log='gradients') does. HINT: remove it; callbacks.GradientNoiseMonitor logs private "
        "gradient norms, and on_before_optimizer_step sees private gradients."
    ]


class LiveChecks:
    """What set-up has checked and a callback could change later; looked at before every step."""

    def __init__(self, module: PrivateModule) -> None:
        self._module = module
        self._tensors = WatchedTensors(module)
        self._trained = [p.requires_grad for p in self._tensors.parameters_and_modules()[0]]

    def check(self) -> None:
        """Raise if a parameter was unfrozen or added, or a backward hook attached, since set-up."""
        parameters, modules = self._tensors.parameters_and_modules()
        # lists in place of generators: this is looked at before every step
        if [p.requires_grad for p in parameters] != self._trained:
            raise ValueError(
                "a parameter was frozen, unfrozen or added after set-up, so the certificate does not cover it. "
                "HINT: decide what is trained before the run, with requires_grad_."
            )
        on_parameters = [p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters]  # type: ignore[attr-defined]
        if any(on_parameters) or any([m._backward_hooks or m._backward_pre_hooks for m in modules]):
            raise ValueError(hooked(self._module)[0])
