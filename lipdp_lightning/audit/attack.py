"""Attacks a certificate by gradient ascent on every ratio of a measured norm to its certified bound.

No ratio may exceed 1. An attack can prove a certificate false but never true: its result is a lower bound on how tight
the certificate is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..bounds.certificate import Certificate
from ..bounds.certifier import Certifier
from ..bounds.losses import Loss, as_loss
from ..layers.dropout import KeyedDropout
from ..layers.scaled import ScaledLayer
from .independence import interaction
from .measure import Meter, quantity_names, slopes
from .production import training_ratios
from .ratios import AttackReport, GroupRatio, NodeRatio
from .starts import Targets, alternative_targets, project, starting_inputs, target_source
from .weights import ascend_weights


@dataclass
class Best:
    """Keeps the largest value of every quantity so far, and the example that attained it."""

    values: Tensor
    inputs: Tensor
    targets: Tensor

    @classmethod
    def nothing(cls, quantities: int, inputs: Tensor, targets: Tensor) -> Best:
        first = torch.zeros(quantities, dtype=torch.long)
        return cls(torch.zeros(quantities, dtype=inputs.dtype), inputs[first].clone(), targets[first].clone())

    def see(self, ratios: Tensor, inputs: Tensor, targets: Tensor) -> None:
        """Takes the ratios of a batch into account; NaN counts as infinite, since nothing bounds it."""
        values, rows = torch.nan_to_num(ratios.detach(), nan=torch.inf, posinf=torch.inf).max(0)
        better = values > self.values
        self.values = torch.where(better, values, self.values)
        self.inputs[better] = inputs.detach()[rows[better]]
        self.targets[better] = targets[rows[better]]


def attack(
    model: nn.Module,
    input_shape: tuple[int, ...],
    input_bound: float,
    loss: Loss | nn.Module | str,
    *,
    restarts: int = 24,
    steps: int = 40,
    seed: int = 0,
    weights: bool = False,
    weight_rounds: int = 3,
    targets: Targets | None = None,
) -> AttackReport:
    """Searches for the largest ratio of measured to certified for every claim of the model's certificate.

    Each of ``restarts`` inputs in the ball ascends one ratio for ``steps`` steps, and every point on the way is
    measured on all ratios. The search runs in float64, where a certificate carries no margin for rounding; the best
    candidates are measured again in float32 through the layers' own backward. The model is not modified.

    Args:
        model: the network under attack.
        input_shape: the shape of one example.
        input_bound: the largest norm of an example.
        loss: the loss that the certificate is for.
        restarts: the number of candidates.
        steps: ascent steps of each candidate.
        seed: seed of the random starting points.
        weights: whether the weights ascend as well, with every layer's norm kept constant. Each ratio then uses the
            certificate of the weights that it was measured with.
        weight_rounds: how often inputs and weights take turns.
        targets: draws targets as ``targets(count, generator)``; by default they suit the loss, and labels are
            enumerated where possible.

    Returns:
        One ratio for every claim, with the examples that attained it.

    Raises:
        ValueError: if there are no restarts or a negative number of steps, or if no targets are known for the loss.

    Example:
        >>> report = attack(network, (3, 32, 32), input_bound=1.0, loss="cross_entropy")
        >>> report.violations()
        ()
    """
    if restarts < 1 or steps < 0:
        raise ValueError(f"restarts={restarts}, steps={steps} leave nothing to attack with. HINT: use 24 and 40.")
    certified_loss = as_loss(loss)
    subject = prepared(model, seed)
    certifier = Certifier(subject, input_shape, input_bound, certified_loss, compute_dtype=torch.float64)
    certificate = certifier.certify()
    output_shape = certificate.node(certificate.output).shape
    draw = targets or target_source(certified_loss, output_shape)
    generator = torch.Generator().manual_seed(seed)
    inputs = starting_inputs(subject, input_shape, input_bound, restarts, generator)
    labels = draw(len(inputs), generator)
    meter = Meter(subject, input_shape, certified_loss, certificate)
    names = quantity_names(certificate)
    best = Best.nothing(len(names), inputs, labels)
    goals = assigned_goals(certificate, len(inputs))
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels of attention have no second derivative
        for round_ in range(1 + weight_rounds * weights):
            if round_ > 0:
                certificate = ascend_weights(meter, certifier, certificate, inputs, labels, goals, best, steps)
            for part in (steps - steps // 2, steps // 2):
                others = alternative_targets(certified_loss, output_shape, draw, len(inputs), generator)
                labels = best_labels(meter, certificate, inputs, labels, goals, best, others)
                inputs = ascend_inputs(meter, certificate, inputs, labels, goals, best, part, input_bound, generator)
    setting = (restarts, steps, seed, weights)
    return _report(subject, input_shape, input_bound, certified_loss, certificate, best, setting)


def prepared(model: nn.Module, seed: int) -> nn.Module:
    """Returns a float64 copy in evaluation mode; keyed dropout stays on, with one mask for all candidates."""
    subject = copy.deepcopy(model).double().eval()
    for index, module in enumerate(subject.modules()):
        if isinstance(module, ScaledLayer):
            module.gradient_scaler = None
        if isinstance(module, KeyedDropout):
            module.train()
            module.context = (seed + index, torch.zeros(1, dtype=torch.int64))
    return subject


def assigned_goals(certificate: Certificate, count: int) -> Tensor:
    """Returns the quantity that each candidate ascends: groups, joint and loss in turn, then the nodes."""
    groups, nodes = len(certificate.groups), len(certificate.nodes)
    main = list(range(2 * groups + 2))
    rest = list(range(2 * groups + 2, 2 * groups + 2 + 2 * nodes))
    order = main + rest if count >= 2 * len(main) else main
    return torch.tensor([order[i % len(order)] for i in range(count)])


def _goal_values(ratios: Tensor, goals: Tensor) -> Tensor:
    return ratios.gather(1, goals.unsqueeze(1)).squeeze(1)


def best_labels(
    meter: Meter, certificate: Certificate, inputs: Tensor, labels: Tensor, goals: Tensor, best: Best,
    others: Iterable[Tensor],
) -> Tensor:  # fmt: skip
    """Returns for each candidate the target, its own or another, that makes the ratio of its goal largest."""
    chosen, value = labels, torch.full((len(inputs),), -torch.inf, dtype=inputs.dtype)
    for targets in (labels, *others):
        ratios = meter.ratios(inputs, targets, certificate, differentiable=False).flat()
        best.see(ratios, inputs, targets)
        reached = _goal_values(ratios, goals)
        better = reached > value
        value = torch.where(better, reached, value)
        chosen = torch.where(better.reshape(-1, *(1,) * (targets.dim() - 1)), targets, chosen)
    return chosen


def ascend_inputs(
    meter: Meter, certificate: Certificate, inputs: Tensor, labels: Tensor, goals: Tensor, best: Best,
    steps: int, bound: float, generator: torch.Generator,
) -> Tensor:  # fmt: skip
    """Ascends by projected gradients; each candidate's step size grows on success and shrinks on failure."""
    shape = (-1, *(1,) * (inputs.dim() - 1))
    held, value, direction = inputs, torch.full((len(inputs),), -torch.inf, dtype=inputs.dtype), inputs * 0
    size = torch.full((len(inputs),), 0.3 * bound, dtype=inputs.dtype)
    for _ in range(steps + 1):
        point = project(held + size.reshape(shape) * direction, bound).detach().requires_grad_()
        ratios = meter.ratios(point, labels, certificate).flat()
        best.see(ratios, point, labels)
        goal = _goal_values(ratios, goals)
        slope = slopes(goal.clamp_min(1e-30).log().sum(), [point])
        better = (goal.detach() > value).reshape(shape)
        held = torch.where(better, point.detach(), held)
        # where torch has no second derivative, the direction is random
        fresh = torch.randn(point.shape, dtype=point.dtype, generator=generator) if slope is None else slope[0]
        length = torch.linalg.vector_norm(fresh.flatten(1), dim=1).clamp_min(1e-300).reshape(shape)
        direction = torch.where(better | (slope is None), fresh / length, direction)
        value = torch.where(better.flatten(), goal.detach(), value)
        size = size * torch.where(better.flatten(), 1.4, 0.5 if slope is not None else 0.8)
    return held


def _report(
    subject: nn.Module, input_shape: tuple[int, ...], input_bound: float, loss: Loss, certificate: Certificate,
    best: Best, setting: tuple[int, int, int, bool],
) -> AttackReport:  # fmt: skip
    groups, nodes = len(certificate.groups), len(certificate.nodes)
    main = 2 * groups + 2
    candidates = best.inputs[:main], best.targets[:main]
    arguments = (subject, input_shape, input_bound, loss, *candidates)
    double, single = (training_ratios(*arguments, dtype) for dtype in (torch.float64, torch.float32))
    mixed = interaction(subject, best.inputs)
    value = best.values.tolist()
    group_ratios = tuple(
        GroupRatio(
            g.name, max(value[i], double.worst_case[g.name]), max(value[groups + i], double.layerwise[g.name]),
            single.worst_case[g.name], single.layerwise[g.name],
        )
        for i, g in enumerate(certificate.groups)
    )  # fmt: skip
    node_ratios = tuple(
        NodeRatio(n.name, n.operation, value[main + i], value[main + nodes + i], is_input=not n.lipschitz)
        for i, n in enumerate(certificate.nodes)
    )
    names = quantity_names(certificate)
    witnesses = {names[i]: (best.inputs[i], best.targets[i]) for i in range(len(names))}
    return AttackReport(
        group_ratios, node_ratios, max(value[2 * groups], double.joint), single.joint, value[2 * groups + 1],
        mixed, *setting, witnesses,
    )  # fmt: skip
