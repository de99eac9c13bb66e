"""Every operation with a rule, called with unusual arguments: what is certified holds, all else is refused with a hint.

The operations come from the registry and their arguments from their signatures, so that a new rule, or a new argument,
fails here until it has values to be tried with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
import torch
from generated_calls import VALUES, Call, arguments_of, base_call, name_of, pairs, rule_of, targets, variations
from rule_checks import bounds_of, starts
from torch import Tensor, nn

from lipdp_lightning.bounds import CertificationError
from lipdp_lightning.bounds.registry import Target
from lipdp_lightning.layers import CotangentClip, FrozenFeatures

SLACK = 1 + 1e-5
TRIED = 4  # variations of the calls that one rule answers for, in the fast test
PARTS = 8
LARGE = 6.0


def certified(call: Call) -> tuple[nn.Module, float, float] | None:
    """The model and its bounds, or None where it is refused, which takes a CertificationError with a hint."""
    try:
        model = call.model()
    except Exception:  # torch refuses to make the module
        assert isinstance(call.target, type)
        return None
    try:
        lipschitz, norm = bounds_of(model, call.shape, LARGE)
    except CertificationError as refused:
        assert str(refused).count("HINT: ") == len(refused.problems) >= 1, call
        return None
    except ZeroDivisionError:  # a loss of nothing: no output has a bound to exceed
        return None
    return model.eval(), lipschitz, norm


def violations(call: Call) -> list[str]:
    found = certified(call)
    if found is None:
        return []
    model, lipschitz, norm = found
    points = starts(call.shape, LARGE, count=7, seed=3)
    if norm * SLACK < _largest_output(model, points):
        return [f"{call}: an output exceeds {norm}"]
    if call.target in (FrozenFeatures, CotangentClip):
        return []  # an extractor has no Lipschitz constant, and a clip bounds what it passes on, not its slope
    steepest = max(_slope(model, x) for x in (*points[[1, 4, 5]], points[3] / 50))
    if lipschitz * SLACK + 1e-12 < steepest:
        return [f"{call}: its Jacobian has norm {steepest}, above {lipschitz}"]
    return [f"{call}: examples mix"] if _mixes(model, points) else []


def _largest_output(model: nn.Module, points: Tensor) -> float:
    """The largest output over the ball that a few steps of ascent find."""
    x, best = points.clone().requires_grad_(True), 0.0
    for _ in range(3):
        norms = model(x).unsqueeze(-1).flatten(1).norm(dim=1)
        best = max(best, float(norms.detach().max()))
        if not norms.requires_grad or norms.shape[0] == 0:
            break
        (gradient,) = torch.autograd.grad(norms.sum(), x, allow_unused=True)
        if gradient is None:
            break
        size = gradient.flatten(1).norm(dim=1).clamp_min(1e-12).reshape(-1, *(1,) * (x.dim() - 1))
        x = (x + LARGE * gradient / size).detach()
        x = (x * (LARGE / x.flatten(1).norm(dim=1).clamp_min(LARGE)).reshape(size.shape)).requires_grad_(True)
    return best


def _slope(model: nn.Module, x: Tensor) -> float:
    leaf = x[None].clone().requires_grad_(True)
    out = model(leaf).flatten()
    if not out.requires_grad or out.numel() == 0:
        return 0.0
    eye = torch.eye(out.numel(), dtype=out.dtype)
    try:
        rows = torch.autograd.grad(out, leaf, eye, is_grads_batched=True, allow_unused=True)[0]
    except RuntimeError:  # a backward that batches no cotangents
        rows = torch.stack([torch.autograd.grad(out, leaf, e, retain_graph=True)[0] for e in eye])
    if rows is None or not bool(torch.isfinite(rows).all()):
        return 0.0 if rows is None else math.inf
    return float(torch.linalg.matrix_norm(rows.reshape(len(eye), -1), 2))


def _mixes(model: nn.Module, points: Tensor) -> bool:
    """Whether the first example's output or gradient changes with the others, or with their number."""
    cotangent = torch.linspace(-1, 2, int(model(points[4:5]).numel()), dtype=points.dtype)
    seen = []
    for rows in ([4], [4, 5, 6], [4, 6, 1, 2, 3], [4, *range(7), *range(7)]):
        x = points[rows].clone().requires_grad_(True)
        out = model(x)
        if out.shape[0] != len(rows):
            return True
        goal = (out[0].flatten() * cotangent).sum()
        gradient = torch.autograd.grad(goal, x, allow_unused=True)[0] if goal.requires_grad else None
        gradient = torch.zeros_like(x) if gradient is None else gradient
        if gradient[1:].abs().sum() > 0:
            return True
        seen.append((out[0].detach(), gradient[0]))
    return any(not torch.allclose(a, b, atol=1e-9) for s in seen for a, b in zip(s, seen[0], strict=True))


def _check(calls: Iterable[Call]) -> None:
    wrong = [v for call in calls for v in violations(call)]
    assert not wrong, "\n".join(wrong)


BASES: dict[Target, Call] = {}


def base_of(target: Target) -> Call:
    if target not in BASES:
        found = base_call(target, lambda call: certified(call) is not None)
        assert found is not None, f"no call of {name_of(target)} is certified: give its arguments values"
        BASES[target] = found
    return BASES[target]


@pytest.mark.parametrize("target", targets(), ids=name_of)
def test_every_argument_has_values_to_be_tried(target):
    missing = [name for name in arguments_of(target) if name not in VALUES]
    assert not missing, f"add values for {missing} of {name_of(target)} to generated_calls.VALUES"


@pytest.mark.parametrize("part", range(PARTS))
def test_what_is_certified_holds_and_all_else_is_refused(part):
    """One call of every operation, and a few variations for every rule; the slow tests make all of them."""
    by_rule: dict[object, list[Target]] = {}
    for target in targets():
        by_rule.setdefault(rule_of(target), []).append(target)
    for i, alike in enumerate(by_rule.values()):
        if i % PARTS == part:
            _check(base_of(target) for target in alike)
            for count, some in ((TRIED, variations), (TRIED // 2, pairs)):
                calls = [call for target in alike for call in some(base_of(target))]
                _check(random.Random(i).sample(calls, min(count, len(calls))))


@pytest.mark.slow
@pytest.mark.parametrize("target", targets(), ids=name_of)
def test_every_value_of_every_argument(target):
    _check(variations(base_of(target)))


@pytest.mark.slow
@pytest.mark.parametrize("target", targets(), ids=name_of)
def test_every_pair_of_values(target):
    calls = list(pairs(base_of(target)))
    _check(random.Random(0).sample(calls, min(150, len(calls))))
