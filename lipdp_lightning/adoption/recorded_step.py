"""A training step of a project on made-up rows: which of its parts it calls, on what, and with which loss function.

No private row is ever seen here: the private step is built from what is found, and ``training_step`` itself does not
run on private rows.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Key = int | str
"""The place of a tensor in a batch: an index, or a key of a dictionary."""

LOSSES: Mapping[Callable[..., Any], type[nn.Module]] = MappingProxyType({
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.huber_loss: nn.HuberLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.l1_loss: nn.L1Loss,
    F.mse_loss: nn.MSELoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.kl_div: nn.KLDivLoss,
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a part of the project with one tensor.

    Attributes:
        path: The part's path; it is empty for the project's own forward.
        part: The part.
        given: What it was given.
        returned: What it returned.
        within: The number of the call during which it was made; -1 for none.
    """

    path: str
    part: nn.Module
    given: Tensor
    returned: Tensor
    within: int


@dataclass(frozen=True, eq=False)
class LossCall:
    """A call of one of torch's loss functions, with its arguments by name."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    returned: Tensor

    @property
    def name(self) -> str:
        """The function's name."""
        return str(getattr(self.function, "__name__", self.function))


@dataclass(frozen=True)
class RecordedStep:
    """A training step on a made-up batch, as it was observed.

    Attributes:
        batch: The tensors of the batch by their place, as they were given.
        calls: The calls of parts, in the order in which they began; None for a call on several tensors, or for
            several results.
        places: For each of the calls, the part's path and the number of the call during which it was made.
        losses: The calls of loss functions, in order.
        returned: The tensor that is returned as the loss; None if nothing is.
        logged: The names that were logged.
    """

    batch: Mapping[Key, Tensor]
    calls: tuple[Call | None, ...]
    places: tuple[tuple[str, int], ...]
    losses: tuple[LossCall, ...]
    returned: Tensor | None
    logged: tuple[str, ...]


@dataclass
class _Recorder:
    calls: list[Call | None] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    losses: list[LossCall] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    open: list[tuple[int, Any]] = field(default_factory=list)

    def begin(self, path: str, part: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.places.append((path, self.open[-1][0] if self.open else -1))
        self.open.append((len(self.calls), _only_tensor(arguments, keywords)))
        self.calls.append(None)

    def end(self, path: str, part: nn.Module, returned: Any) -> None:
        number, given = self.open.pop()
        if given is not None and isinstance(returned, Tensor):
            self.calls[number] = Call(path, part, given, returned, self.places[number][1])

    def log(self, name: str, *_: Any, **__: Any) -> None:
        self.logged.append(name)

    def log_all(self, values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self.logged += list(values)


class _LossFunctions(TorchFunctionMode):
    """Notes the calls of loss functions; log_softmax and nll_loss in the step itself are one, of the logits."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._logits: list[tuple[Tensor, Tensor]] = []  # what log_softmax has returned, and what it was given

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        returned = function(*arguments, **(keywords or {}))
        if getattr(function, "__name__", "") == "log_softmax" and not self._recorder.open:
            self._logits.append((returned, (*arguments, *(keywords or {}).values())[0]))
        if function in LOSSES:
            bound = inspect.signature(function).bind(*arguments, **(keywords or {}))
            bound.apply_defaults()
            named = dict(bound.arguments)
            if function is F.nll_loss:
                named["input"] = next((x for made, x in self._logits if made is named["input"]), named["input"])
            self._recorder.losses.append(LossCall(function, named, returned))
        return returned


def _only_tensor(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Tensor | None:
    given = [*arguments, *keywords.values()]
    return given[0] if len(given) == 1 and isinstance(given[0], Tensor) else None


@contextlib.contextmanager
def recording(project: lightning.LightningModule) -> Iterator[_Recorder]:
    """Notes what the project calls and logs within the block, and leaves it as it was."""
    recorder, handles = _Recorder(), []
    for path, part in project.named_modules():
        if part is project:
            continue
        handles.append(part.register_forward_pre_hook(partial(recorder.begin, path), with_kwargs=True))
        handles.append(part.register_forward_hook(partial(_end, recorder, path)))
    forward = project.forward

    def recorded_forward(*arguments: Any, **keywords: Any) -> Any:  # also where forward is called without __call__
        recorder.begin("", project, arguments, keywords)
        returned = forward(*arguments, **keywords)
        recorder.end("", project, returned)
        return returned

    replaced = {"forward": recorded_forward, "log": recorder.log, "log_dict": recorder.log_all}
    vars(project).update(replaced)
    try:
        with _LossFunctions(recorder):
            yield recorder
    finally:
        for name in replaced:
            vars(project).pop(name, None)
        for handle in handles:
            handle.remove()


def _end(recorder: _Recorder, path: str, part: nn.Module, given: Any, returned: Any) -> None:
    recorder.end(path, part, returned)


def record(project: lightning.LightningModule, batch: Any) -> RecordedStep:
    """Runs ``training_step`` on a made-up batch, and returns what it did.

    Raises:
        ValueError: If it changes its batch, or computes gradients itself.
    """
    tensors = tensors_of(batch)
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    with recording(project) as recorder, torch.enable_grad():
        result = _step_of(project)(batch)
    if any(not torch.equal(tensor, before[key]) for key, tensor in tensors.items()):
        raise ValueError(
            "training_step changes its batch in place, and the rows are drawn and bounded as the data set gives them. "
            "HINT: move the change into forward(), or into the data set's transform."
        )
    if any(parameter.grad is not None for parameter in project.parameters()):
        raise ValueError(
            "training_step runs a backward pass of its own, and reads or adds gradients without noise. "
            "HINT: return the loss; the private step runs the one backward pass."
        )
    returned = result.get("loss") if isinstance(result, Mapping) else result
    return RecordedStep(
        before, tuple(recorder.calls), tuple(recorder.places), tuple(recorder.losses),
        returned if isinstance(returned, Tensor) else None, tuple(dict.fromkeys(recorder.logged)),
    )  # fmt: skip


def _step_of(project: lightning.LightningModule) -> Callable[[Any], Any]:
    """Returns ``training_step`` as a function of the batch; as in Lightning, it may take the batch's number, too."""
    takes = len(inspect.signature(project.training_step).parameters)
    return (lambda batch: project.training_step(batch, 0)) if takes > 1 else project.training_step


def tensors_of(batch: Any) -> dict[Key, Tensor]:
    """Returns the tensors of a batch by their index or key."""
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, tuple | list) else ()
    return {key: value for key, value in items if isinstance(value, Tensor)}
