"""The private step that is under way: its batch, its partial sums, and the methods and objects that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor, nn

from ..bounds.identity import NetworkIdentity
from . import model_checks
from .batches import Batch, HandedOver
from .module import PrivateModule

_ATTRIBUTES = ("rows_to_multiple_of", "log_nonprivate", "loss")
_MODULES = ("network", "bounded_input")
_STRATEGY = ("mechanism", "clipper", "views", "plan", "model", "precision_plugin", "_forward_redirection")
# an audit takes the place of others, to see what is released
_MECHANISM = ("run", "begin_step", "begin_pass", "own_hooks")
_own_attributes, _own_modules = itemgetter(*_ATTRIBUTES), itemgetter(*_MODULES)


@dataclass(frozen=True)
class Step:
    """A step that has begun.

    Attributes:
        number: The number of the step, from 0 on.
        micro_batches: The number of micro-batches that have been added to the sum.
        released: Whether ``parameter.grad`` holds the release, and no sum without noise is left.
    """

    number: int
    micro_batches: int = 0
    released: bool = False


class StepIdentity:
    """The methods, the loss, the input's bound and the objects that a step uses, as set-up has checked them.

    They are compared at every micro-batch. The mechanism keeps the identity of the network itself.
    """

    def __init__(self, module: PrivateModule, strategy: Any, data: Any) -> None:
        self._module, self._strategy, self._data = module, strategy, data
        named = (
            (module, model_checks.FIXED_METHODS, "the module's"),
            (strategy, model_checks.STRATEGY_METHODS, "the Strategy's"),
            (data, model_checks.DATA_METHODS, "the data module's"),
            (strategy.mechanism, _MECHANISM, "the mechanism's"),
        )
        held = [name for name in _STRATEGY if hasattr(strategy, name)]  # an Engine has fewer
        self._of_strategy = attrgetter(*held)
        self._methods = tuple((thing, name) for thing, names, _ in named for name in names)
        # of each object: its own attributes, the names of methods, and what reads these from its class
        self._classes = [(vars(thing), names, type(thing), _reader(type(thing), names)) for thing, names, _ in named]
        self._labels = (
            *(f"{whose} {name}" for _, names, whose in named for name in names),
            *(f"the module's {name}" for name in (*_ATTRIBUTES, *_MODULES)),
            *(f"the Strategy's {name}" for name in held),
            "the class of the module", "the class of the Strategy", "trainer.accumulate_grad_batches",
        )  # fmt: skip
        self._parts = NetworkIdentity.of(module.bounded_input)  # what the loss holds is in the mechanism's identity
        self._kept = self._now()
        self._of_classes = list(chain.from_iterable(self._in_classes()))

    def _in_classes(self) -> list[tuple[Any, ...]]:
        return [read(kind) for _, _, kind, read in self._classes]

    def _objects(self) -> tuple[Any, ...]:
        module, strategy = self._module, self._strategy
        own, accumulated = vars(module), module.trainer.accumulate_grad_batches
        of_module = (*_own_attributes(own), *_own_modules(own["_modules"]))
        return (*of_module, *self._of_strategy(strategy), type(module), type(strategy), accumulated)

    def _now(self) -> list[Any]:
        return [
            *[vars(t)[n] if n in vars(t) else getattr(type(t), n, None) for t, n in self._methods],
            *self._objects(),
        ]

    def _same(self) -> bool:
        """Returns whether nothing has changed; an object with a method of its own needs the longer comparison."""
        return (
            all([own.keys().isdisjoint(names) for own, names, _, _ in self._classes])
            and all(map(is_, chain.from_iterable(self._in_classes()), self._of_classes))
            and all(map(is_, self._objects(), self._kept[len(self._methods) :]))
        )

    def differences(self) -> list[str]:
        """Returns a text for every change since set-up."""
        return self._replaced() + self._parts.differences()

    def _replaced(self) -> list[str]:
        if self._same():
            return []
        return [
            f"{label} is another than it was"
            for label, a, b in zip(self._labels, self._now(), self._kept, strict=True)
            if a is not b and not (isinstance(a, int) and a == b)
        ]

    def check(self, forward: bool = True) -> None:
        """Raises ValueError if something has changed for which the certificate and the noise were made.

        Args:
            forward: Whether the forward pass, which reads the input's bound, is still to come.
        """
        if differences := self.differences() if forward else self._replaced():
            raise ValueError(
                f"the private step was changed after set-up: {'; '.join(differences)}. The certificate and the noise "
                "are those of the step as it was. HINT: decide the loss, the input's bound and the methods before "
                "training starts, and use one run for each of them."
            )


def _reader(kind: type, names: Sequence[str]) -> Callable[[type], tuple[Any, ...]]:
    """Returns what reads the methods that a class has, as a tuple also if there are few."""
    return attrgetter("__class__", "__class__", *(name for name in names if hasattr(kind, name)))


class PartialSums:
    """Removes gradients without noise from ``grad`` until the step is complete, and then puts their sum there.

    The sum is kept in float64, so that it is rounded once for any number of micro-batches, which the margin of a
    sensitivity allows for.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = list(module.parameters())
        self._places = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._sums: dict[int, Tensor] = {}
        self._released: list[tuple[Tensor | None, int]] = [(None, 0)] * len(self._parameters)

    def check_none(self) -> None:
        """Raises ValueError if a backward pass would add to a gradient that is neither released nor zero.

        Released gradients are forgotten, so that a pass whose optimizer has set them to None does not hold them twice.
        """
        for parameter, (released, version) in zip(self._parameters, self._released, strict=True):
            gradient = parameter.grad
            if gradient is None or (gradient is released and gradient._version == version):
                continue
            if bool(gradient.count_nonzero()):
                raise ValueError(
                    "a gradient was there before the step's own backward pass, and its bound does not cover two. "
                    "HINT: call no backward() in a hook; torch.autograd.grad leaves gradients alone."
                )
        self._released = [(None, 0)] * len(self._parameters)

    def remember(self) -> None:
        """Remembers the present gradients as released ones."""
        gradients = [parameter.grad for parameter in self._parameters]
        self._released = [(g, 0 if g is None else g._version) for g in gradients]

    def take(self) -> None:
        """Adds a micro-batch's gradients to the sums, and leaves no gradient."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                before = self._sums.get(index)
                self._sums[index] = parameter.grad.double() if before is None else before.add_(parameter.grad)
                parameter.grad = None

    def complete(self, parameter: nn.Parameter) -> None:
        """Adds the sum over earlier micro-batches to the gradient that the last one has left."""
        before = self._sums.pop(self._places[id(parameter)], None)
        if before is not None and parameter.grad is not None:
            parameter.grad = before.add_(parameter.grad).to(parameter.dtype)

    def put_back(self) -> None:
        """Puts the sum over all micro-batches into ``grad``, which still holds the last of them."""
        if not self._sums:
            return
        self.take()
        for index, total in self._sums.items():
            self._parameters[index].grad = total.to(self._parameters[index].dtype)
        self._sums = {}


class CurrentStep:
    """Follows a run's private steps, one at a time, from the batch to the release.

    Args:
        module: The module that is trained.
        strategy: The Strategy that takes the steps.
        data: The data module.
    """

    def __init__(self, module: PrivateModule, strategy: Any, data: Any) -> None:
        self._identity = StepIdentity(module, strategy, data)
        self._sums = PartialSums(module)
        self._batch: HandedOver | None = None
        self._step: Step | None = None

    @property
    def between_steps(self) -> bool:
        """Returns whether no step is under way: none has begun, or the last one was released."""
        return self._step is None or self._step.released

    def hand_over(self, batch: Any) -> Batch:
        """Keeps a batch for the network, and returns a copy for hooks."""
        self._batch = HandedOver.of(batch)
        return self._batch.shown

    def opened(self, batch: Any) -> Batch:
        """Returns the batch for the network; raises ValueError if the batch or the step was changed."""
        assert self._batch is not None, "no batch was handed over"
        self._identity.check()
        return self._batch.opened(batch)

    def begin(self, number: int) -> None:
        """Begins the step of that number."""
        self._step = Step(number)

    def check_gradients(self) -> None:
        """Raises ValueError if a hook changed the step, or a gradient is there that is neither released nor zero."""
        self._identity.check(forward=False)
        self._sums.check_none()

    def is_last(self, micro_batches: int) -> bool:
        """Returns whether the micro-batch that is under way is the last of so many."""
        return self._step is not None and self._step.micro_batches + 1 == micro_batches

    def complete(self, parameter: nn.Parameter) -> None:
        """Adds to a parameter's gradient what earlier micro-batches have left of the step's sum."""
        self._sums.complete(parameter)

    def add(self, micro_batches: int) -> bool:
        """Adds a micro-batch's gradients; returns whether the sum is complete and in ``grad``.

        Args:
            micro_batches: The number of micro-batches in a step.
        """
        assert self._step is not None and not self._step.released, "gradients of a step that has not begun"
        self._step = replace(self._step, micro_batches=self._step.micro_batches + 1)
        if self._step.micro_batches < micro_batches:
            self._sums.take()
            return False
        self._sums.put_back()
        return True

    def mark_released(self) -> None:
        """Records that ``grad`` holds the release of the step."""
        assert self._step is not None
        self._sums.remember()
        self._step = replace(self._step, released=True)

    def is_released(self, number: int) -> bool:
        """Returns whether ``grad`` holds the release of the step of that number."""
        return self._step is not None and self._step.released and self._step.number == number
