"""The path of a row through a project: from the batch through its parts to the loss, as one network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning
from torch import Tensor, nn

from .recorded_step import Call, Key, LossCall, RecordedStep

_HINT = (
    "HINT: let forward(x) return what the loss function is given, and let training_step be loss = "
    "F.cross_entropy(self(x), y)."
)


@dataclass(frozen=True)
class CertifiedPath:
    """A network that takes one tensor of the batch to the outputs of the loss.

    Attributes:
        network: The network, of the project's own parts.
        x: The place in the batch of what it reads.
        y: The place in the batch of the targets.
        outputs: What the network returned on the made-up batch.
    """

    network: nn.Module
    x: Key
    y: Key
    outputs: Tensor


def find_path(project: lightning.LightningModule, step: RecordedStep, call: LossCall | None) -> CertifiedPath:
    """Returns the path from a tensor of the batch to a call of a loss function.

    Args:
        project: The project whose training step was recorded.
        step: The recorded step.
        call: The call of the loss function; None if none was recorded, and the path then ends with the last part.

    Raises:
        ValueError: If something between the batch and the loss is not a part of the project.
    """
    calls = [one for one in step.calls if one is not None]
    if call is None:
        ends = [one.returned for one in calls if one.within == -1 and not isinstance(one.part, nn.modules.loss._Loss)]
        if not ends:
            raise ValueError(f"training_step calls no part of the project with one tensor. {_HINT}")
        end = ends[-1]
    else:
        end = call.arguments["input"]
    chain, x = _chain(step, -1, end, dict(step.batch))
    if x is None or not chain:
        raise ValueError(
            "what the loss is computed of is not the output of a part of the project that was given a tensor of the "
            f"batch: training_step changes it on the way{_known(chain)}. {_HINT}"
        )
    network = _network(project, step, chain, end)
    return CertifiedPath(network, x, _target(step, call, x), chain[-1].returned)


def same_values(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors hold the same rows, in any shape of a row and any type of number."""
    if not (a.dim() and b.dim() and len(a) == len(b) and a.numel() == b.numel()):
        return False
    return bool((a.detach().flatten().double() == b.detach().flatten().double()).all())


def _chain(step: RecordedStep, within: int, end: Tensor, starts: dict[Any, Tensor]) -> tuple[list[Call], Any]:
    """Returns calls that lead to a tensor, each on the result of the one before, and the key of the start."""
    made = [call for call in step.calls if call is not None and call.within == within]
    chain: list[Call] = []
    while True:
        for key, start in starts.items():
            if same_values(start, end) and (chain or end.grad_fn is None):
                return chain, key
        before = next((call for call in reversed(made) if same_values(call.returned, end)), None)
        if before is None:
            return chain, None
        made = made[: made.index(before)]
        chain.insert(0, before)
        end = before.given


def _known(chain: Sequence[Call]) -> str:
    return f", before {chain[0].path or 'forward'}" if chain else ""


def _network(project: lightning.LightningModule, step: RecordedStep, chain: list[Call], end: Tensor) -> nn.Module:
    """Returns the calls of a chain as one network; the project's own forward is replaced by the parts it calls."""
    parts: list[tuple[str, nn.Module]] = []
    before: Tensor = next(tensor for tensor in step.batch.values() if same_values(tensor, chain[0].given))
    for call in chain:
        inner = _expanded(step, call)
        parts += [("reshaped", layer) for layer in _reshaped(before, call.given)]
        before = call.given
        for one in inner:
            parts += [*(("reshaped", layer) for layer in _reshaped(before, one.given)), (one.path, one.part)]
            before = one.returned
        if not inner:
            parts.append(("forward", _standalone(project, step, call)))
            before = call.returned
    if end.dim() > 1:
        parts += [("reshaped", layer) for layer in _reshaped(before, end)]
    return parts[0][1] if len(parts) == 1 else _joined(parts)


def _joined(parts: list[tuple[str, nn.Module]]) -> nn.Module:
    """Returns the parts in a row, under the names that they have in the project, as far as these are free."""
    named: dict[str, nn.Module] = {}
    for path, part in parts:
        name = path.replace(".", "_")
        while name in named or hasattr(nn.Sequential, name):
            name += "_"
        named[name] = part
    return nn.Sequential(OrderedDict(named))


def _expanded(step: RecordedStep, call: Call) -> list[Call]:
    """Returns the parts that a call of forward calls one after the other; none if it does more than that."""
    if call.path:
        return [call]
    chain, start = _chain(step, step.calls.index(call), call.returned, {"given": call.given})
    return chain if start is not None else []


def _reshaped(before: Tensor, given: Tensor) -> list[nn.Module]:
    """Returns layers that give the rows the shape in which the next part received them."""
    if before.shape == given.shape:
        return []
    flat: list[nn.Module] = [nn.Flatten()] if before.dim() != 2 else []
    return flat if given.dim() == 2 else [*flat, nn.Unflatten(1, tuple(given.shape[1:]))]


def _target(step: RecordedStep, call: LossCall | None, x: Key) -> Key:
    others = {key: tensor for key, tensor in step.batch.items() if key != x}
    if call is not None:
        goal = call.arguments["target"]
        found = [key for key, tensor in others.items() if isinstance(goal, Tensor) and same_values(tensor, goal)]
        if not found and isinstance(goal, Tensor) and same_values(step.batch[x], goal):
            return x  # an autoencoder
        if len(found) == 1:
            return found[0]
        raise ValueError(
            f"the targets of {call.name} are not a tensor of the batch: training_step computes them from it. "
            "HINT: let the data set return them as the loss function takes them."
        )
    if len(others) != 1:
        raise ValueError(
            f"the batch holds {len(others)} tensors besides the one that the network reads, and it is not known which "
            "are the targets. HINT: use a data set that returns (x, y)."
        )
    return next(iter(others))


# ---- a forward of the project's own

_NAMES_OF_LIGHTNING = frozenset(dir(lightning.LightningModule)) - {"forward"}


def _standalone(project: lightning.LightningModule, step: RecordedStep, call: Call) -> nn.Module:
    """Returns a network whose forward is that of the project, with the parts that it uses and no trainer."""
    kinds = type(project).__mro__
    own: dict[str, Any] = {}
    for kind in reversed(kinds[: kinds.index(lightning.LightningModule)]):
        own |= {n: v for n, v in vars(kind).items() if not n.startswith("__") and n not in _NAMES_OF_LIGHTNING}
    kind = type(f"{type(project).__name__}Network", (nn.Module,), own | {"__module__": type(project).__module__})
    network: nn.Module = kind()
    number = step.calls.index(call)
    used = {path.split(".")[0] for path, within in step.places if _is_within(step, within, number)}
    strange = vars(lightning.LightningModule()).keys()
    for name, value in vars(project).items():
        if name not in strange and name not in ("log", "log_dict", "forward"):
            object.__setattr__(network, name, value)
    for name, child in project.named_children():
        if name in used:
            network.add_module(name, child)
    for name, parameter in project._parameters.items():
        network.register_parameter(name, parameter)
    for name, buffer in project._buffers.items():
        network.register_buffer(name, buffer)
    if project.hparams:
        object.__setattr__(network, "hparams", dict(project.hparams))
    return network


def _is_within(step: RecordedStep, within: int, number: int) -> bool:
    while within not in (-1, number):
        within = step.places[within][1]
    return within == number
