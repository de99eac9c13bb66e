"""Reasons to refuse a module and its optimizer: what would reach a parameter past the noise."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch._dynamo import OptimizedModule

from ..bounds.graph import compiles
from ..bounds.losses import Loss
from .module import PrivateModule

# what a private step goes through before noise is in its gradients
FIXED_METHODS = (
    "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__",
    "forward", "training_step", "_summed_loss", "_output", "_views", "_key_dropout", "private_loss", "clip_loss",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "backward", "manual_backward", "optimizer_step", "optimizer_zero_grad", "optimizers",
    "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "clip_gradients",
)  # fmt: skip
_OWN = MappingProxyType({name: getattr(PrivateModule, name, None) for name in FIXED_METHODS})


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
        if not _is_own(module, name)
    ]
    if not isinstance(module.loss, Loss):
        problems.append(
            f"the loss is a {type(module.loss).__name__}. HINT: pass it to PrivateModule(network, loss=...), which "
            "checks that it is a sum over examples."
        )
    if not module.automatic_optimization:
        problems.append("manual optimization bypasses the step that adds noise. HINT: automatic_optimization = True.")
    return problems + _compiled_problems(module) + _optimizer_problems(module) + hooked(module)


def _is_own(module: PrivateModule, name: str) -> bool:
    """Whether the method is PrivateModule's: on the class, and on the instance, where torch.compile may wrap it."""
    found = getattr(type(module), name, None)
    if found is not getattr(PrivateModule, name, None) or found is not _OWN.get(name, found):
        return False
    if name not in vars(module):
        return True
    return compiles(module, vars(module)[name], found)


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
