"""alpha and reversed operands: each factor belongs to one operand, in every form of addition and subtraction."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule_checks import SLACK, Forward, bounds_of, jacobian_norm, largest_output, starts
from torch import Tensor

from lipdp_lightning.bounds import Bound, CertificationError, certify, rule

Sum = Callable[[Any, Tensor, Any, float], Tensor]

FORMS: dict[str, Sum] = {
    "torch.rsub": lambda m, y, o, k: torch.rsub(y, o, alpha=k),
    "torch.add": lambda m, y, o, k: torch.add(y, o, alpha=k),
    "torch.sub": lambda m, y, o, k: torch.sub(y, o, alpha=k),
    "torch.subtract": lambda m, y, o, k: torch.subtract(y, o, alpha=k),
    "keywords": lambda m, y, o, k: torch.sub(y, alpha=k, other=o),
    "add": lambda m, y, o, k: y.add(o, alpha=k),
    "sub": lambda m, y, o, k: y.sub(other=o, alpha=k),
    "add_": lambda m, y, o, k: (2 * y).add_(o, alpha=k),
    "sub_": lambda m, y, o, k: (2 * y).sub_(o, alpha=k),
    "o - y": lambda m, y, o, k: o - k * y,
    "y - o": lambda m, y, o, k: k * y - o,
    "iadd": lambda m, y, o, k: operator.iadd(k * y, o),
    "isub": lambda m, y, o, k: operator.isub(k * y, o),
    "iadd of a number": lambda m, y, o, k: operator.iadd(y * 2, k),
}

OTHERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "number": lambda m, y: 2.0,
    "buffer": lambda m, y: m.scale,
    "frozen parameter": lambda m, y: m.frozen,
    "value": lambda m, y: y.flip(1),
    "the same": lambda m, y: y,
    "broadcast": lambda m, y: y[:, :1],
}


@pytest.mark.parametrize("form", FORMS)
def test_factors_belong_to_their_operand(form: str) -> None:
    """With alpha 3 and -3, against the Jacobian and the largest output found."""
    for other in OTHERS:
        if other != "number" or form != "torch.rsub":
            for alpha in (3, -3, 0.25):
                _check(FORMS[form], OTHERS[other], alpha)


def test_a_reflected_subtraction_that_is_called_by_name_is_refused() -> None:
    """Tracing records it as a subtraction, and what runs is another operation."""
    with pytest.raises(CertificationError, match=r"__rsub__ in place of sub.*HINT"):
        bounds_of(Forward(lambda m, y: y.__rsub__(m.scale)), (4,), 1.5)


def _check(form: Sum, other: Callable[[Any, Tensor], Any], alpha: float) -> None:
    model = Forward(lambda m, y: form(m, y, other(m, y), alpha))
    lipschitz, norm = bounds_of(model, (4,), 1.5)
    assert jacobian_norm(model, starts((4,), 1.0)[4]) <= lipschitz * SLACK
    assert largest_output(model, (4,), 1.5, steps=8) <= norm * SLACK


def test_the_factor_of_rsub_is_on_its_first_operand() -> None:
    assert bounds_of(Forward(lambda m, x: torch.rsub(x, 1.0, alpha=-3)), (4,), 1.5) == pytest.approx((3.0, 6.5))
    assert bounds_of(Forward(lambda m, x: torch.rsub(x, x, alpha=3)), (4,), 1.0)[0] == pytest.approx(4.0)


@pytest.mark.parametrize("form", ["torch.add", "torch.sub", "add", "sub"])
def test_a_positive_factor_of_an_addition_is_on_its_second_operand(form: str) -> None:
    of_number = bounds_of(Forward(lambda m, x: FORMS[form](m, x, 1.0, 3)), (4,), 1.5)
    assert of_number == pytest.approx((1.0, 7.5))
    assert bounds_of(Forward(lambda m, x: FORMS[form](m, x, x, 3)), (4,), 1.0)[0] == pytest.approx(4.0)


@pytest.mark.parametrize("name", ["torch.rsub", "torch.add", "sub", "add_"])
def test_trained_parameters_get_their_own_factor(name: str) -> None:
    """rsub leaves the parameter alone; the others multiply it."""
    model = Forward(lambda m, y: FORMS[name](m, y, m.shift, 3.0)).double()
    model.shift = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    certificate = certify(model, (4,), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)
    factor = certificate.groups[0].uses[0].gradient_factor
    assert factor == pytest.approx(1.0 if name == "torch.rsub" else 3.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x.__add__(other=3.0),
        lambda m, x: torch.add(x, 3, x),
        lambda m, x: x.sub(3, x),
        lambda m, x: torch.add(x, x, alpha=x),
        lambda m, x: torch.add(x, x, alpha=float("nan")),
        lambda m, x: torch.add(x, x, alpha=float("inf")),
        lambda m, x: torch.add(x, x, alpha=m.scale[0]),
        lambda m, x: x * float("nan"),
        lambda m, x: torch.abs(x * m.imaginary),
        lambda m, x: torch.abs(x + m.imaginary),
        lambda m, x: torch.abs(x / m.imaginary),
        lambda m, x: torch.abs(x * 3j),
        lambda m, x: x / 1e-300,
        lambda m, x: torch.div(x, 2.0, rounding_mode="floor"),
        lambda m, x: torch.nn.functional.leaky_relu(x, float("nan")),
        lambda m, x: torch.nn.functional.elu(x, float("nan")),
        lambda m, x: torch.softmax(x, 1, dtype=torch.float16),
        lambda m, x: torch.where(x > 0, x, 3 * x),
        lambda m, x: x * (x > 0),
        lambda m, x: x.masked_fill(x > 0, 1.0),
    ],
)
def test_operands_that_are_no_public_real_numbers_are_refused(function: Callable[[Any, Tensor], Tensor]) -> None:
    model = Forward(function).double()
    model.register_buffer("imaginary", torch.full((4,), 100j, dtype=torch.complex128))
    with pytest.raises(CertificationError) as refused:
        certify(model, (4,), 1.0, "binary_cross_entropy", compute_dtype=torch.float64)
    assert "HINT" in str(refused.value)


def test_values_that_float32_rounds_up_are_refused() -> None:
    """0.8e-45 becomes 1.4e-45, the smallest number there is, and the factors after it scale the error up."""
    function = lambda m, x: x * 1e-45 * 1e30 * 1e15  # noqa: E731
    x = torch.full((1, 4), 0.8)
    assert float(function(None, x).norm()) > 1.7 * float(x.norm())
    for tiny in (function, lambda m, x: x / 1e35 / 1e10 * 1e15 * 1e15 * 1e15):
        with pytest.raises(CertificationError, match="rounds them up"):
            certify(Forward(tiny), (4,), 1.0, "binary_cross_entropy")
    certify(Forward(lambda m, x: x * 0), (4,), 1.0, "binary_cross_entropy")


class Blend(torch.nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + 5 * y


@rule(Blend)
def blend(op: Any, x: Any, y: Any) -> Bound:
    return Bound(x.norm + 5 * y.norm, (1.0, 5.0))


def test_activations_by_keyword_keep_their_slots() -> None:
    """A rule answers in the order of its arguments, which is not the order of keywords in a call."""
    model: Any = Forward(lambda m, x: m.blend(y=m.inner(x), x=100 * x))
    model.blend, model.inner = Blend(), torch.nn.Linear(4, 4)
    with pytest.raises(CertificationError, match="by keyword"):
        certify(model, (4,), 1.0, "binary_cross_entropy")
    model.function = lambda m, x: m.blend(100 * x, y=m.inner(x))
    certificate = certify(model, (4,), 1.0, "binary_cross_entropy")
    assert certificate.groups[0].uses[0].cotangent_bound == pytest.approx(5 * certificate.loss_lipschitz, rel=1e-5)
