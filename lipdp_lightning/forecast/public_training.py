"""Trains a copy of a network on public rows, with the noise of a plan, in a few coarse steps."""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..bounds.certifier import Certifier
from ..layers import ScaledLayer, scale_cotangent
from ..layers.cotangents import attach_cotangent_clips
from ..layers.scaled import reports_of
from ..mechanism.noise import Sum
from ..mechanism.scaling import StepNumbers
from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.plan import PrivacyPlan
from ..training.model_checks import optimizers_of
from ..training.module import PrivateModule
from ..training.set_up import matching_modules
from .public_rows import PublicRows

MOST_STEPS, FEWEST_STEPS = 32, 8
MOST_ROWS, FEWEST_ROWS = 64, 20
MOST_FASTER = 4.0  # longer steps may diverge where those of the run do not
_SECRET = bytes(16)  # the rows are public, so their noise may be known, and a forecast repeats itself
_ADAPTIVE = {"betas", "alpha", "rho", "lr_decay"}  # arguments of optimizers that divide by the size of gradients


@dataclass(frozen=True)
class Size:
    """The number of steps of a forecast, and of the rows in each."""

    steps: int
    rows: int


@dataclass(frozen=True)
class LayerSignal:
    """Compares what the steps of a run say of a layer with their noise.

    Attributes:
        name: the name of the parameter group.
        per_step: the norm of the mean scaled gradient over the expected norm of the noise in it.
        over_run: the same over all steps, in which noise grows by a square root: sqrt(steps) times as much.
    """

    name: str
    per_step: float
    over_run: float


@dataclass(frozen=True)
class Outcome:
    """Holds what training on public rows came to.

    Attributes:
        signals: the signal of each layer.
        score: the accuracy on further rows, or for regression the explained share of the variance.
        chance: the score of a network that learns nothing.
        size: how many steps and rows were taken.
    """

    signals: tuple[LayerSignal, ...]
    score: float
    chance: float
    size: Size


class _Recorded(Mechanism):
    """Keeps the product of every second sum with the one before it: other rows at the same weights.

    In their mean, the noise of sampling cancels, and so does any oscillation of the weights.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.products: dict[str, list[float]] = defaultdict(list)
        self.noise: dict[str, list[float]] = defaultdict(list)
        self._before: dict[str, Tensor] = {}
        super().__init__(*arguments, **options)

    def _sums(self, numbers: StepNumbers) -> list[Sum]:
        sums = super()._sums(numbers)
        left = iter(sums)
        for group in numbers.certificate.groups:
            own = torch.cat([next(left).total() for _ in group.parameters])
            before = self._before.pop(group.name, None)
            if before is None:
                self._before[group.name] = own
            else:
                self.products[group.name].append(float(own @ before))
            self.noise[group.name].append(numbers.deviations[group.name] * math.sqrt(group.numel))
        return sums


class PublicTraining:
    """A copy of a module under a plan, which is trained on public rows.

    Steps are coarse: S steps stand for the T of the plan, with noise smaller by sqrt(S / T), and step sizes larger by
    T / S, or sqrt(T / S) for optimizers that divide by the size of gradients, but at most by ``MOST_FASTER``. To first
    order, the signal outweighs the noise as much as after T steps. A batch is smaller than the plan's, with the noise
    that its mean would have.

    Args:
        module: the module, which stays as it is.
        plan: the settled plan of the run.
        shape: the declared shape of an example.
    """

    def __init__(self, module: PrivateModule, plan: PrivacyPlan, shape: tuple[int, ...]) -> None:
        self._module, self._plan, self._shape = module, plan, tuple(shape)
        self.network, self._bounded = _detached_copy(module)
        self._loss = module.private_loss(plan.loss_clip)

    def operations(self, x: Tensor) -> float:
        """Returns the operations of a forward and backward pass of one row."""
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self._output(x[:1])
        return 3.0 * float(counter.get_total_flops())

    @torch.no_grad()
    def outputs(self, x: Tensor) -> int:
        """Returns the number of outputs for one row."""
        return self._output(x[:1]).numel()

    def _output(self, x: Tensor) -> Tensor:
        output: Tensor = self.network(self._bounded(x))
        return output

    def run(self, rows: PublicRows, size: Size) -> Outcome:
        """Trains and evaluates; rows are taken in turn, and the last ones are for the evaluation."""
        test = max(1, min(len(rows) // 4, 4 * size.rows))
        x, y = rows.x[:-test], rows.y[:-test]
        mechanism = self._mechanism(size)
        optimizers = self._optimizers(size)
        try:
            mechanism.project_()
            for step in range(size.steps):
                self._release_halves(mechanism, step, size, x, y)
                for optimizer in optimizers:
                    optimizer.step()
                mechanism.project_()
        finally:
            mechanism.close()
        score, chance = self._score(rows.x[-test:], rows.y[-test:])
        return Outcome(self._signals(mechanism, size), score, chance, size)

    def _release_halves(self, mechanism: Mechanism, step: int, size: Size, x: Tensor, y: Tensor) -> None:
        """Leaves the mean of two releases as the gradient, of different rows at the same weights."""
        half, parameters = size.rows // 2, [p for p in self.network.parameters() if p.requires_grad]
        before: list[Tensor | None] = [None] * len(parameters)
        for number in (2 * step, 2 * step + 1):
            mechanism.begin_step(number)
            taken = torch.arange(number * half, (number + 1) * half) % len(x)
            self._backward(mechanism, x[taken], y[taken])
            mechanism.privatize_(number)
            for i, parameter in enumerate(parameters):
                first, own = before[i], parameter.grad
                parameter.grad = own if own is None or first is None else (own + first) / 2
                before[i] = own

    def _mechanism(self, size: Size) -> _Recorded:
        plan, clips = self._plan, matching_modules(self.network, self._plan.cotangent_clip)
        certifier = Certifier(
            self.network, self._shape, self._module.input_bound, self._loss, norms=Follower(), cotangent_caps=clips
        )
        attach_cotangent_clips(self.network, clips)
        noise = plan.noise_multiplier * size.rows / plan.expected_batch_size * math.sqrt(size.steps / plan.steps)
        options = {
            "dataset_size": max(plan.dataset_size, size.rows), "expected_batch_size": size.rows // 2,
            "steps": 2 * size.steps,
            "noise_multiplier": noise / math.sqrt(2), "preliminary": (),
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            coarse = PrivacyPlan.from_dict(plan.to_dict() | options)
        return _Recorded(self.network, certifier, coarse, _SECRET)

    def _optimizers(self, size: Size) -> list[torch.optim.Optimizer]:
        names = {id(p): n for n, p in self._module.network.named_parameters()}
        own = dict(self.network.named_parameters())
        ratio = self._plan.steps / size.steps
        made = []
        for optimizer in optimizers_of(self._module):
            faster = min(math.sqrt(ratio) if _ADAPTIVE & optimizer.defaults.keys() else ratio, MOST_FASTER)
            groups = []
            for group in optimizer.param_groups:
                parameters = [own[names[id(p)]] for p in group["params"] if id(p) in names]
                groups.append({**group, "params": parameters, "lr": group["lr"] * faster})
            kind: Any = type(optimizer)
            made.append(kind(groups))
        return made

    def _backward(self, mechanism: Mechanism, x: Tensor, y: Tensor) -> None:
        self.network.zero_grad(set_to_none=True)
        mechanism.begin_pass(len(x), len(x))
        logits = self._output(x)
        factor = mechanism.scaling.example_factor(len(x), logits.device)
        self._loss.per_example(logits if factor is None else scale_cotangent(logits, factor), y).sum().backward()

    @torch.no_grad()
    def _score(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        output = self._output(x)
        if self._module.task == "classification":
            classes = output.shape[1]
            return float((output.argmax(1) == y).double().mean()), 1 / classes
        if self._module.task == "binary":
            return float(((output.flatten() > 0) == (y.flatten() > 0.5)).double().mean()), 0.5
        error = (output.flatten() - y.flatten()).square().mean()
        return max(0.0, 1 - float(error / y.double().var(unbiased=False).clamp_min(1e-12))), 0.0

    def _signals(self, mechanism: _Recorded, size: Size) -> tuple[LayerSignal, ...]:
        # sums of the coarse steps had less noise than those of the plan, and those of their halves had more
        finer = math.sqrt(2 * size.steps / self._plan.steps)
        found = []
        for name, products in mechanism.products.items():
            signal = math.sqrt(max(math.fsum(products) / len(products), 0.0))
            noise = math.fsum(mechanism.noise[name]) / len(mechanism.noise[name]) / finer
            per_step = signal / noise if noise > 0 else 0.0
            found.append(LayerSignal(name, per_step, per_step * math.sqrt(self._plan.steps)))
        return tuple(found)


def _detached_copy(module: PrivateModule) -> tuple[nn.Module, nn.Module]:
    """Returns copies of network and input bound, without what a mechanism has attached to the layers."""
    memo: dict[int, object] = {}
    for layer in module.network.modules():
        if isinstance(layer, ScaledLayer):
            memo |= {id(receiver): None for receiver in reports_of(layer) if callable(receiver)}
    return copy.deepcopy(module.network, memo).cpu().eval(), copy.deepcopy(module.bounded_input).cpu()


def size_of(operations: float, steps: int, classes: int, most: float) -> Size:
    """Returns how many steps and rows a forecast takes.

    Args:
        operations: the operations for one row.
        steps: the steps of the plan.
        classes: the number of classes.
        most: the operations of all rows together, unless the smallest size takes more.
    """
    rows = min(MOST_ROWS, max(32, 4 * classes))
    affordable = most / max(operations, 1.0)
    taken = int(max(2, min(steps, MOST_STEPS, max(FEWEST_STEPS, affordable / rows))))
    return Size(taken, int(max(FEWEST_ROWS, min(rows, affordable / taken))))
