"""Checks before a certificate is given: the arguments, and whether noise can be scaled to the bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsBytes

import torch
from torch import Tensor, nn

from ..norms.operators import NormSource, Operator
from .certificate import GroupBound
from .graph import CertificationError, Problem, alterations, structural_problems
from .losses import Loss, as_loss

# The rounding of one operation, relative to its bound, by the dtype that it is computed in. Under bfloat16 autocast the
# operand and the result are rounded; RoundedNorms covers the rounding of the weights.
OPERATION_MARGIN = {torch.float64: 0.0, torch.float32: 2.0**-21, torch.bfloat16: (1 + 2.0**-8) ** 2 - 1}

# If all bounds are below this, no value, square or partial sum of a float32 pass over a bounded input can overflow.
LARGEST_BOUND = 1e15

# For positive bounds below this, rounding to multiples of float32's smallest number may exceed the margins.
SMALLEST_BOUND = 1e-30

ROUNDING = 2.0**-8
"""The largest relative error of rounding one number to bfloat16."""


class RoundedNorms(NormSource):
    """Bounds norms of the weights rounded to bfloat16, by the norms that another source gives for the weights.

    Rounding changes every entry by at most 2^-8 of it, hence the weight by D with ||D||_F <= 2^-8 ||W||_F,
    and its operator's norm by at most ``deviation_factor(weight)`` times that. The change is not relative to the norm:
    if the norm is small because entries cancel, rounding may undo the cancellation.
    """

    def __init__(self, source: NormSource) -> None:
        self._source = source

    def begin(self, state: SupportsBytes = b"") -> None:
        self._source.begin(state)

    def operator_norm(self, name: str, weight: Tensor, operator: Operator) -> float:
        norm = self._source.operator_norm(name, weight, operator)
        return norm + operator.deviation_factor(weight) * ROUNDING * self._source.frobenius_norm(name, weight)

    def vector_norm(self, vector: Tensor) -> float:
        return self._source.vector_norm(vector) * (1 + ROUNDING)


def refuse_all(problems: list[Problem]) -> None:
    if problems:
        raise CertificationError(problems)


def checked_loss(model: nn.Module, input_bound: float, loss: Any, compute_dtype: torch.dtype) -> Loss:
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
        raise CertificationError(problems + alterations(model) + structural_problems(model))
    return certified


def loss_problem(error: ValueError) -> Problem:
    reason, _, hint = str(error).partition(" HINT: ")
    return Problem("loss", reason.rstrip("."), hint.rstrip("."))


def unbounded(groups: tuple[GroupBound, ...], named: Mapping[str, nn.Parameter]) -> list[Problem]:
    """Finds trained parameters that no use bounds, and groups whose bound is too large to scale noise to."""
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
