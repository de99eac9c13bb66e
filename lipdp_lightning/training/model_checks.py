"""Reasons to refuse a module, its optimizer and its outputs before a run starts."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import lightning
import torch
from torch import Tensor
from torch._dynamo import OptimizedModule

from ..bounds.graph import compiles
from ..bounds.losses import Loss
from ..privacy.plan import PrivacyPlan
from .batches import defined_here
from .module import PrivateModule

# the methods that a private step calls before noise is in its gradients
FIXED_METHODS = (
    "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__",
    "forward", "training_step", "_summed_loss", "_output", "_of_bounded", "_views", "_key_dropout",
    "private_loss", "clip_loss", "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
    "backward", "manual_backward", "optimizer_step", "optimizer_zero_grad", "optimizers",
    "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer", "clip_gradients",
)  # fmt: skip
STRATEGY_METHODS = (
    "training_step", "backward", "optimizer_step", "batch_to_device", "numbered", "step_key", "dropout_key",
    "_take_step", "_next_batch", "_finish",  # of the Engine
    "_begin_pass", "_end_pass", "_begin_step", "_release", "_draw", "_seal", "_put_on_record", "_make_mechanism",
    "_all_reduce", "_begin_all_reduce", "_backward_pass", "_gather",
)  # fmt: skip
DATA_METHODS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "transform_batch")
_OWN = MappingProxyType({name: getattr(PrivateModule, name, None) for name in FIXED_METHODS})


def module_problems(module: Any) -> list[str]:
    """Returns every reason not to train a module, each with its HINT."""
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
        problems.append(
            "manual optimization bypasses the step that adds noise. HINT: set automatic_optimization = True."
        )
    return problems + _compiled_problems(module) + _optimizer_problems(module) + hooked(module)


def strategy_problems(strategy: Any) -> list[str]:
    """Returns the reasons why a Strategy's step is not the one that the certificate and the ledger describe."""
    return [
        f"{type(strategy).__name__}.{name} is not PrivateStrategy's, which is where noise is added and steps are "
        "counted. HINT: watch a step from a callback: on_before_optimizer_step and on_train_batch_end see what is "
        "released; a Strategy of your own may override set-up, tear-down and hooks around a batch."
        for name in STRATEGY_METHODS
        if not defined_here(strategy, name)
    ]


def _is_own(module: PrivateModule, name: str) -> bool:
    """Returns whether class and instance have PrivateModule's method; on the instance, torch.compile may wrap it."""
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
        "HINT: use network.compile(), which wraps nothing, or torch.compile(PrivateModule(network)) for the whole step."
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
        problems.append("LBFGS evaluates the gradient several times in a step. HINT: use SGD, Adam, AdamW or RMSprop.")
    if isinstance(optimizer, torch.optim.SparseAdam):
        problems.append("SparseAdam takes sparse gradients, and noise is in every entry. HINT: use Adam or AdamW.")
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
    """Returns the optimizers of configure_optimizers, in any of the forms that Lightning accepts."""
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
    """Returns a problem for hooks that would be called with gradients or cotangents without noise."""
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


MADE_UP_ROWS = 3
_FOR = {
    "classification": "'cross_entropy' or 'hinge'",
    "binary": "'binary_cross_entropy', with one output",
    "regression": "'huber' or 'squared_error', with one output",
}


def output_problems(loss: Loss, shape: tuple[int, ...], data: Any) -> list[str]:
    """Returns the reasons why a loss cannot compare outputs of a shape with the labels of a data module.

    Args:
        loss: The loss of the module.
        shape: The shape of the network's output for one example.
        data: The data module; if it declares no `task`, nothing is compared.
    """
    task, classes = getattr(data, "task", None), getattr(data, "num_classes", None)
    name = type(loss).__name__
    if loss.task is None or task is None:
        return []
    if loss.task != task:
        kind = f"{classes} classes" if task == "classification" else f"task {task!r}"
        return [
            f"the loss {name} is for {loss.task}, and {type(data).__name__} declares {kind}. "
            f"HINT: set model.loss={_FOR.get(task, 'one for that task')}."
        ]
    checks = {"classification": _class_scores, "binary": _one_output, "regression": _one_output}
    return list(checks[task](loss, shape, classes, data))


def refuse_outputs(loss: Loss, shape: tuple[int, ...], data: Any) -> None:
    """Raises ValueError with `output_problems`, if there are any."""
    if problems := output_problems(loss, shape, data):
        raise ValueError("\n".join(problems))


def _class_scores(loss: Loss, shape: tuple[int, ...], classes: int | None, data: Any) -> Iterator[str]:
    least, name = max(2, int(classes or 2)), type(data).__name__
    if len(shape) != 1:
        yield (
            f"the network's output has shape {_with_batch(shape)}, and {name} has one label for each example. "
            f"HINT: return an output of shape (batch, {least})."
        )
    elif shape[0] < least:
        yield (
            f"the network has {shape[0]} output{'s' * (shape[0] != 1)}, and {name} declares {least} classes. "
            f"HINT: use {least} outputs, one for each class; or the number of classes that the data module declares."
        )
    weights = getattr(loss, "class_weights", None)
    if weights is not None and shape and len(weights) != shape[0]:
        yield (
            f"class_weights are {len(weights)} numbers for {shape[0]} outputs of the network. "
            "HINT: give one weight for each class."
        )


def _one_output(loss: Loss, shape: tuple[int, ...], classes: int | None, data: Any) -> Iterator[str]:
    wanted = math.prod(getattr(data, "target_shape", ()))
    if math.prod(shape) != wanted:
        yield (
            f"the network's output has shape {_with_batch(shape)}, and the targets of {type(data).__name__} are "
            f"{wanted} number{'s' * (wanted != 1)} for each example. HINT: use {wanted} output{'s' * (wanted != 1)}."
        )


def _with_batch(shape: tuple[int, ...]) -> str:
    return f"(batch{''.join(f', {size}' for size in shape)})"


def rehearsal_problems(trainer: lightning.Trainer, module: PrivateModule, plan: PrivacyPlan, data: Any) -> list[str]:
    """Returns the reasons why network, loss, gradient, optimizer or schedule fail on a batch of made-up rows.

    The rows are zeros of the declared shape, so the messages of errors are public. Nothing of the run changes.
    """
    batch = getattr(data, "made_up_batch", _nothing)(MADE_UP_ROWS)
    if batch is None:
        return []
    training = {m: m.training for m in module.modules()}
    double = str(trainer.precision) == "64-true"
    try:
        module.eval()  # in training mode, dropout would need the ids of rows in the data set
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            _rehearse(trainer, module, plan, batch, double)
    except Exception as error:
        message = " ".join(str(error).split())
        hint = "" if "HINT" in message else " HINT: run the network and the loss on such a batch to see where."
        rows = f"{MADE_UP_ROWS} made-up rows of shape {_with_batch(tuple(data.input_shape))}"
        return [f"a step fails on {rows}: {type(error).__name__}: {message[:300]}{hint}"]
    finally:
        for part, mode in training.items():
            part.training = mode
    return _step_sizes(module) + _schedule_problems(module)


def _rehearse(
    trainer: lightning.Trainer, module: PrivateModule, plan: PrivacyPlan, batch: tuple[Tensor, Tensor], double: bool
) -> None:
    x, y = batch
    x = x.double() if double else x
    kept = {n: b.clone() for n, b in module.network.named_buffers()}
    values = {n: p.detach().to(torch.float64) if double else p.detach() for n, p in module.network.named_parameters()}
    frozen = {n for n, p in module.network.named_parameters() if not p.requires_grad}
    tensors = {n: v.requires_grad_(v.is_floating_point() and n not in frozen) for n, v in values.items()}
    buffers = {n: b.double() if double and b.is_floating_point() else b for n, b in kept.items()}
    loss = module.private_loss(plan.loss_clip)
    with trainer.precision_plugin.forward_context(), torch.enable_grad():
        logits = torch.func.functional_call(module.network, (tensors, buffers), (module.bounded_input(x),))
        losses = loss.per_example(logits, y)
        if losses.shape != (len(x),):
            raise ValueError(
                f"the loss returns shape {tuple(losses.shape)} for {len(x)} rows. "
                "HINT: return one number for each example."
            )
        trained = [t for t in tensors.values() if t.requires_grad]
        torch.autograd.grad(losses.sum(), trained, allow_unused=True)


def _move_twice(schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    """Moves a schedule and restores it and its optimizer, since the run may use the same objects later."""
    state, groups = copy.deepcopy(schedule.state_dict()), schedule.optimizer.param_groups
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a schedule that moves before its optimizer
            schedule.step()
            schedule.step()
        if not all(math.isfinite(group["lr"]) for group in groups):
            raise ValueError(f"the rate becomes {[float(group['lr']) for group in groups]}")
    finally:
        schedule.load_state_dict(state)
        for group, before in zip(groups, options, strict=True):
            group.update(before)


def _schedule_problems(module: PrivateModule) -> list[str]:
    """Returns the problem of a new schedule that cannot be moved twice; one that follows a metric is not tried."""
    try:
        made = module.configure_optimizers()
        chosen = made.get("lr_scheduler") if isinstance(made, dict) else None
        schedule = chosen.get("scheduler") if isinstance(chosen, dict) else chosen
        if not isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
            return []
        if not isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            _move_twice(schedule)
        elif not (isinstance(chosen, dict) and "monitor" in chosen):
            return ["ReduceLROnPlateau follows a metric, and none is named. HINT: use "
                    "lightning.pytorch.cli.ReduceLROnPlateau, with monitor: validation/loss."]  # fmt: skip
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return [f"the schedule fails when it moves, {message}. HINT: check lr_scheduler.init_args."]
    return []


def _nothing(rows: int) -> None:
    return None


def _step_sizes(module: PrivateModule) -> list[str]:
    """Finds numbers of the optimizer that are not finite; torch only refuses negative ones."""
    problems = []
    for optimizer in optimizers_of(module):
        for name, value in optimizer.defaults.items():
            values = value if isinstance(value, tuple | list) else (value,)
            if any(isinstance(v, float) and not math.isfinite(v) for v in values):
                problems.append(
                    f"the optimizer's {name} is {value}, and steps would not be finite. HINT: use {name}=0.01."
                )
    return problems
