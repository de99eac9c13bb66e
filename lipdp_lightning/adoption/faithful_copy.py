"""Comparison of a project's training step with the private step that takes its place, on made-up rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from ..bounds.losses import Loss
from .certified_path import CertifiedPath, find_path
from .kept_state import own_state, read_in_training
from .recorded_step import LossCall, RecordedStep, record, recording, tensors_of
from .torch_losses import certified_loss

MakeUp = Callable[[int, torch.Generator, int], Any]
"""Makes up a batch of so many rows, with labels below a number of classes."""

ROWS = (5, 32, 3)
_CLOSE = 1e-3  # relative to the gradient as a whole; the two compute the same in other orders
_HINTS = (
    "HINT: weight decay is an option of the optimizer; a loss that differs from torch's is a subclass of "
    "lipdp_lightning.bounds.losses.Loss, given as loss=..., which then replaces what training_step computes."
)


@dataclass(frozen=True)
class Understood:
    """A project's network, its certified loss, and the places of rows and targets in a batch.

    Attributes:
        path: The network and the places in the batch.
        loss: The certified loss of each example.
        logged: The names that ``training_step`` logs.
        summed: Whether the project sums its loss over the batch in place of taking the mean.
        kept: The attributes that ``training_step`` changes, such as lists of outputs and metrics.
    """

    path: CertifiedPath
    loss: Loss
    logged: tuple[str, ...]
    summed: bool
    kept: tuple[str, ...] = ()


def understand(project: lightning.LightningModule, make_up: MakeUp, told: Loss | None) -> Understood:
    """Finds what a project trains, and compares it with what its ``training_step`` computes.

    Args:
        project: The project; its parts become those of the network.
        make_up: Makes up batches of the data set's structure.
        told: The loss, if it is given; what ``training_step`` returns is then not compared.

    Raises:
        ValueError: If a step cannot be understood, or if the private step would train something else.
    """
    tried = independent_copy(project)  # its metrics and lists will hold what made-up rows have left
    with torch.random.fork_rng(devices=[]), _without_chance(tried):
        before = own_state(tried)
        step = _recorded(tried, make_up(ROWS[0], torch.Generator().manual_seed(0), 2))
        after = own_state(tried)
        kept = tuple(name for name in after if after[name] != before.get(name))
        if problems := read_in_training(project, kept):
            raise ValueError("\n".join(problems))
        call = _last_loss(step, told)
        path = find_path(tried, step, call)
        loss = certified_loss(call) if told is None and call is not None else told
        assert loss is not None
        summed = call is not None and call.arguments.get("reduction") == "sum"
        for batch in _batches(make_up, path):
            _compare(tried, batch, path, None if told is not None else loss)
    network = copy.deepcopy(path.network, _counterparts(tried, project))
    return Understood(replace(path, network=network), loss, step.logged, summed, kept)


def _counterparts(tried: nn.Module, project: nn.Module) -> dict[int, Any]:
    """Returns the parts and tensors of a project by the identities of those of its copy, for deepcopy to put in."""
    pairs = zip(
        [*tried.modules(), *tried.parameters(), *tried.buffers()],
        [*project.modules(), *project.parameters(), *project.buffers()],
        strict=True,
    )
    return {id(own): other for own, other in pairs}


def _recorded(project: lightning.LightningModule, batch: Any) -> RecordedStep:
    try:
        return record(project, batch)
    except ValueError as error:
        if "HINT" in str(error):
            raise
        problem: Exception = error
    except Exception as error:
        problem = error
    message = " ".join(str(problem).split())[:200].rstrip(".")
    raise ValueError(
        f"training_step fails on a batch of made-up rows: {type(problem).__name__}: {message}. It is run once, before "
        "training and without a trainer, to find the network and the loss. HINT: let it use the batch alone; what it "
        "draws or logs besides belongs into validation_step or a callback."
    )


def _last_loss(step: RecordedStep, told: Loss | None) -> LossCall | None:
    if told is not None:
        if any(call.arguments["input"] is not step.losses[-1].arguments["input"] for call in step.losses):
            names = ", ".join(call.name for call in step.losses)
            raise ValueError(
                f"training_step calls several loss functions, each on outputs of its own ({names}), and loss=... is "
                "the loss of one tensor of outputs. HINT: let forward return all outputs in one tensor, and give a "
                "subclass of lipdp_lightning.bounds.losses.Loss that takes them apart."
            )
        return step.losses[-1] if step.losses else None
    if not step.losses:
        raise ValueError(
            "training_step calls no loss function of torch. HINT: call one of torch.nn.functional, such as "
            "F.cross_entropy, or give the certified loss as loss=..., for example loss='cross_entropy'."
        )
    if step.returned is None:
        raise ValueError("training_step returns no loss. HINT: return it, alone or under the key 'loss'.")
    for call in reversed(step.losses):
        if call.returned is step.returned or (call.returned.dim() and _is_mean_or_sum(step.returned, call.returned)):
            return call
    names = ", ".join(call.name for call in step.losses)
    raise ValueError(
        f"training_step returns something else than the value of its loss function ({names}): a penalty or a factor, "
        f"or a sum of several losses. What is added has no bound here, and nothing trains without one. {_HINTS}"
    )


def _is_mean_or_sum(returned: Tensor, values: Tensor) -> bool:
    return any(torch.equal(returned.detach(), one.detach()) for one in (values.mean(), values.sum()))


def _batches(make_up: MakeUp, path: CertifiedPath) -> Iterator[Any]:
    """Yields batches of several sizes, also with rows far from zero, and with labels that are all the same."""
    classes = _classes(path.outputs)
    for seed, rows in enumerate(ROWS):
        generator = torch.Generator().manual_seed(seed)
        yield make_up(rows, generator, classes)
        batch = make_up(rows, generator, classes)
        changed = tensors_of(batch)
        if path.y == path.x:  # an autoencoder, whose loss may need targets in [0, 1]
            changed[path.x].mul_(0.1)
            yield batch
            continue
        if changed[path.x].is_floating_point():
            changed[path.x].mul_(20).sub_(10)
        changed[path.y].copy_(changed[path.y][:1].expand_as(changed[path.y]) if seed else changed[path.y].amax())
        yield batch


def _classes(outputs: Tensor) -> int:
    return outputs.shape[1] if outputs.dim() > 1 and outputs.shape[1] > 1 else 2


def _compare(project: lightning.LightningModule, batch: Any, path: CertifiedPath, loss: Loss | None) -> None:
    """Compares outputs, and with a loss its value and all gradients, with those of ``training_step``."""
    tensors = {key: tensor.clone() for key, tensor in tensors_of(batch).items()}
    step = _recorded(project, batch)
    if loss is None:
        return
    parameters = [p for p in project.parameters() if p.requires_grad]
    if step.returned is None:
        raise ValueError(f"training_step returns no loss for some batches. {_HINTS}")
    theirs = torch.autograd.grad(step.returned, parameters, allow_unused=True)
    x, y = tensors[path.x], tensors[path.y]
    losses = loss.per_example(_outputs(path.network, x), y)
    total = losses.sum() if _sums(step) else losses.mean()
    ours = torch.autograd.grad(total, parameters, allow_unused=True)
    found = [n for n, p in project.named_parameters() if p.requires_grad]
    size = max((float(g.norm()) for g in theirs if g is not None), default=0.0)
    apart = [name for name, a, b in zip(found, theirs, ours, strict=True) if not _close(a, b, size)]
    if apart or not torch.allclose(step.returned.detach(), total.detach(), rtol=_CLOSE, atol=1e-5):
        where = f", and the gradients of {', '.join(apart[:3])} differ" if apart else ""
        raise ValueError(
            f"training_step returns {float(step.returned):.4g} for a batch of made-up rows, and the "
            f"{'sum' if _sums(step) else 'mean'} of the certified loss is {float(total):.4g}{where}: it trains "
            "something besides this loss of this network, or it decides by the values of the batch. " + _HINTS
        )


def _outputs(network: nn.Module, x: Tensor) -> Tensor:
    """Returns the outputs of the network that was found, which holds the parts that training_step has called."""
    try:
        outputs: Tensor = network(x if x.is_floating_point() else x.float())
    except Exception as error:
        message = " ".join(str(error).split())[:200].rstrip(".")
        raise ValueError(
            f"the parts that training_step calls do not make a network by themselves: {type(error).__name__}: "
            f"{message}. HINT: let forward(x) call every part that it uses, as in self.part(x), and read no other."
        ) from None
    return outputs


def _sums(step: RecordedStep) -> bool:
    return bool(step.losses) and step.losses[-1].arguments.get("reduction") == "sum"


def _close(a: Tensor | None, b: Tensor | None, size: float) -> bool:
    if a is None or b is None:
        other = b if a is None else a
        return other is None or float(other.norm()) <= _CLOSE * size
    return float((a - b).norm()) <= _CLOSE * size + 1e-7


class _without_chance:
    """Puts a project into training mode for the block, with dropout switched off."""

    def __init__(self, project: nn.Module) -> None:
        self._project = project
        self._modes = [(part, part.training) for part in project.modules()]

    def __enter__(self) -> None:
        self._project.train()
        for part in self._project.modules():
            if isinstance(part, nn.modules.dropout._DropoutNd):
                part.training = False

    def __exit__(self, *_: Any) -> None:
        for part, mode in self._modes:
            part.training = mode


def independent_copy(project: lightning.LightningModule) -> lightning.LightningModule:
    """Returns a copy of a project that shares nothing with it; the given one stays as it is."""
    trainer, project._trainer = project._trainer, None
    try:
        return copy.deepcopy(project)
    finally:
        project._trainer = trainer


def validation_names(project: lightning.LightningModule, batch: Any) -> Iterator[str]:
    """Yields the names that ``validation_step`` logs for a made-up batch; none if it cannot be run on one."""
    tried = independent_copy(project)
    try:
        with recording(tried) as recorder, torch.no_grad():
            tried.validation_step(batch, 0)
            tried.on_validation_epoch_end()
    except Exception:  # held-out batches may have another structure
        return
    yield from recorder.logged
