"""What must hold before a certificate is given: arguments, parameters, and bounds that noise can be scaled to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx, nn

from . import rules
from .alterations import alterations
from .certificate import GroupBound
from .losses import Loss, as_loss
from .registry import Rule
from .trace import CertificationError, Problem, trace, unsupported
from .values import Bound, Unbounded, Value

# Rounding of one operation in the dtype it is computed in, relative to its bound: under bfloat16 autocast that of
# the operand as it is cast, and that of the result; weights are the matter of rounded_norms
OPERATION_MARGIN = {torch.float64: 0.0, torch.float32: 2.0**-21, torch.bfloat16: (1 + 2.0**-8) ** 2 - 1}

# Below this, no value, square or partial sum of a float32 pass over a bounded input can overflow
LARGEST_BOUND = 1e15

# Below this, and above zero, rounding to multiples of float32's smallest number may exceed the margins
SMALLEST_BOUND = 1e-30


def check_arguments(model: nn.Module, input_bound: float, loss: Any, compute_dtype: torch.dtype) -> Loss:
    problems = []
    if not (isinstance(input_bound, int | float) and math.isfinite(input_bound) and input_bound > 0):
        hint = "the radius of the ball that BoundedInput keeps every example in, such as 1.0"
        problems.append(Problem("input_bound", f"{input_bound!r} is not a positive, finite number", hint))
    if compute_dtype not in OPERATION_MARGIN:
        hint = "float32, float64 or bfloat16; float16 needs a loss scaler, which changes every bound"
        problems.append(Problem("compute_dtype", f"{compute_dtype} is not a supported floating dtype", hint))
    for name, parameter in model.named_parameters():
        if parameter.dtype not in OPERATION_MARGIN:
            hint = "convert the parameter with .float()"
            problems.append(Problem(name, f"its dtype {parameter.dtype} is not float32, float64 or bfloat16", hint))
        elif parameter.requires_grad and parameter.dtype == torch.bfloat16:
            reason = "it is trained in bfloat16, which would round the gradient's sum over the batch"
            problems.append(Problem(name, reason, "keep it in float32 and compute under bfloat16 autocast"))
    certified: Loss | None = None
    try:
        certified = as_loss(loss)
    except ValueError as error:
        problems.append(loss_problem(error))
    if problems or certified is None:
        raise CertificationError(problems + _structural_problems(model))
    return certified


def loss_problem(error: ValueError) -> Problem:
    reason, _, hint = str(error).partition(" HINT: ")
    return Problem("loss", reason.rstrip("."), hint.rstrip("."))


def check_parameters(module: nn.Module | None, arguments: Sequence[Iterable[Any]], bound: Bound) -> None:
    """Every trained parameter that the operation holds, or reads among its ``arguments``, needs a bound on this use.

    A bound on another use of the same parameter does not serve: the gradients of the uses add.
    """
    read = _parameters_of(module)
    for argument in chain(*arguments):
        if type(argument) is Value:
            continue
        if isinstance(argument, nn.Parameter):
            read.append(argument)
        elif isinstance(argument, tuple | list | dict | slice):
            fx.node.map_aggregate(argument, lambda a: read.append(a) if isinstance(a, nn.Parameter) else None)
    if not read:
        return
    covered = {id(p) for use in bound.uses for p in use.parameters}
    if any(p.requires_grad and id(p) not in covered for p in read):
        raise Unbounded(
            "its rule bounds no gradient for a trained parameter that it uses",
            "return a ParameterUse for it, or freeze it with requires_grad_(False)",
        )


def _parameters_of(module: nn.Module | None) -> list[nn.Parameter]:
    if module is None:
        return []
    if module._modules:
        return list(module.parameters())
    return [p for p in module._parameters.values() if p is not None]  # the same for a leaf, in a tenth of the time


_KEEPS_FLOAT32 = (rules.structure.add, rules.structure.subtract_from, rules.structure.multiply)


def check_accumulation(rule: Rule | None, module: nn.Module | None, bound: Bound) -> None:
    """Under bfloat16 autocast a parameter's gradient must still be summed over the batch in float32.

    The scaled layers do so, and arithmetic with a float32 parameter that is not a scalar, which torch carries
    out in float32.
    """
    if getattr(module, "scales_gradient", False):
        return
    if rule in _KEEPS_FLOAT32 and all(p.dim() > 0 for use in bound.uses for p in use.parameters):
        return
    if bound.uses:
        raise Unbounded(
            "under bfloat16 its gradient would be summed over the batch in bfloat16",
            "use nn.Linear, nn.Conv1d or nn.Conv2d and make_private, or train in float32",
        )


def _structural_problems(model: nn.Module) -> list[Problem]:
    try:
        return alterations(model) + unsupported(trace(model))
    except CertificationError as error:
        return list(error.problems)


def unbounded(groups: tuple[GroupBound, ...], named: Mapping[str, nn.Parameter]) -> list[Problem]:
    """Trained parameters that no use bounds, and groups whose bound is not a number that noise can be scaled to."""
    problems = []
    covered = {name for group in groups for name in group.parameters}
    for name, parameter in named.items():
        if parameter.requires_grad and name not in covered:
            hint = (
                "freeze it with requires_grad_(False), remove it, or return a ParameterUse for it from the rule of "
                "the layer that holds it"
            )
            problems.append(Problem(name, "this trained parameter has no bound: no certified operation uses it", hint))
    for group in groups:
        if not group.worst_case < LARGEST_BOUND:
            hint = "limit the layers' norms by a projection, or put BoundedInput first"
            problems.append(Problem(group.name, f"its sensitivity bound is {group.worst_case}", hint))
    return problems
