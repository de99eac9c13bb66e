"""The probe of training dynamics: the kernel is what moves the loss, and factors are those of training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from private_step import Harness, make_plan
from torch import Tensor, nn

from lipdp_lightning.clipping.clipper import OpacusClipper
from lipdp_lightning.studies.dynamics import (
    Clipped,
    Scaled,
    Unclipped,
    integrate,
    jacobians,
    layer_kernels,
    layers_of,
    spectrum,
    weighted_kernel,
)
from lipdp_lightning.studies.dynamics.flow import state_of
from lipdp_lightning.studies.dynamics.problems import FEATURES, LOSS, METHODS, make_case, make_problem, median_norm

EVERY = sorted(METHODS)


def factors_at_start(method: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, dict[str, Tensor]]:
    problem, rule = make_case(method, seed)
    state = state_of(problem.network, problem.x, problem.y, LOSS)
    return problem.network, problem.x, problem.y, rule(problem.x, state.norms)


def moved(network: nn.Module, x: Tensor, y: Tensor, factors: dict[str, Tensor], time: float) -> float:
    """The mean loss after one explicit step, from gradients of autograd on examples one by one."""
    after = copy.deepcopy(network)
    named = dict(after.named_parameters())
    steps = {name: torch.zeros_like(p) for name, p in named.items()}
    for i in range(len(x)):
        after.zero_grad()
        LOSS.per_example(after(x[i : i + 1]), y[i : i + 1]).sum().backward()
        for path, names in layers_of(after).items():
            for name in names:
                steps[name] += float(factors[path][i]) * named[name].grad / len(x)
    with torch.no_grad():
        for name, step in steps.items():
            named[name] -= time * step
        return float(LOSS.per_example(after(x), y).mean())


@pytest.mark.parametrize("method", EVERY)
def test_the_kernel_gives_the_decay_of_the_loss(method: str) -> None:
    """Equations 4.3 and 4.4, against a difference quotient that knows no Jacobian."""
    network, x, y, factors = factors_at_start(method)
    state = state_of(network, x, y, LOSS)
    kernel = weighted_kernel(layer_kernels(state.jacobians), factors)
    cotangent = state.residuals.flatten() / len(x)
    predicted = -float(cotangent @ kernel @ cotangent)
    unit = 1e-6 / max(1e-12, float(max(f.max() for f in factors.values())))
    measured = (moved(network, x, y, factors, unit) - moved(network, x, y, factors, -unit)) / (2 * unit)
    assert measured == pytest.approx(predicted, rel=1e-4, abs=1e-9)
    each = torch.stack(list(factors.values()))
    if float(each.max()) > 1.1 * float(each.min()):
        without = -float(cotangent @ sum(layer_kernels(state.jacobians).values()) @ cotangent)
        assert measured != pytest.approx(without, rel=1e-3)  # the factors matter


def test_kernels_of_two_outputs_repeat_the_factor_of_their_example() -> None:
    network, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    found = layer_kernels(jacobians(network, x))[""]
    expected = torch.kron(x @ x.T + 1, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(found, expected)
    weighted = weighted_kernel({"": found}, {"": torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)})
    torch.testing.assert_close(weighted[:, 3], 2 * expected[:, 3])


@pytest.mark.parametrize("scaling", ["worst_case", "joint", "layerwise", "exact", "exact_layerwise"])
def test_factors_are_those_of_a_private_step(scaling: str) -> None:
    """A step on one example, its noise left out, releases that example's gradient times the factor of each layer."""
    problem = make_problem(3)
    options = {"radius": 0.3 * median_norm(problem)} if scaling.startswith("exact") else {}
    rule = Scaled(problem.network, (FEATURES,), problem.input_bound, LOSS, scaling, options)
    state = state_of(problem.network, problem.x, problem.y, LOSS)
    factors = rule(problem.x, state.norms)
    plan = make_plan(scaling=scaling, max_norm=None, **options)
    single = copy.deepcopy(problem.network).float()
    harness = Harness(single, (FEATURES,), plan, loss=LOSS, input_bound=problem.input_bound, project=False)
    for i in range(len(problem.x)):
        batch = problem.x[i : i + 1].float(), problem.y[i : i + 1].float(), torch.tensor([i])
        for path, released in harness.release(batch).items():
            expected = factors[path][i] * state.gradients[path][i]
            torch.testing.assert_close(released, expected, rtol=1e-3, atol=1e-5 * float(expected.norm()))


@pytest.mark.parametrize(("scaling", "layerwise"), [("clip_flat", False), ("clip_per_layer", True)])
@pytest.mark.parametrize("clipping", ["local", "global", "automatic"])
def test_clipping_factors_are_those_of_the_clipper(clipping: str, scaling: str, layerwise: bool) -> None:
    problem = make_problem(4)
    radius = median_norm(problem)
    state = state_of(problem.network, problem.x, problem.y, LOSS)
    factors = Clipped(clipping, radius, layerwise)(problem.x, state.norms)  # type: ignore[arg-type]
    plan = make_plan(scaling=scaling, clipping=clipping, clip_norm=radius, max_norm=None)
    clipper = OpacusClipper(problem.network, plan)
    problem.network.train().zero_grad()
    total = clipper.total(problem.x, lambda rows: LOSS.per_example(problem.network(rows), problem.y), 0)
    total.backward()
    named = dict(problem.network.named_parameters())
    for path, names in layers_of(problem.network).items():
        found = torch.cat([named[name].grad.flatten() for name in names])
        torch.testing.assert_close(found, (factors[path].unsqueeze(1) * state.gradients[path]).sum(0))


def test_what_table_1_says_of_each_kernel() -> None:
    """Equal factors keep the kernel symmetric and positive; one factor per example keeps its eigenvalues positive."""
    signs = {}
    for method in EVERY:
        network, x, _, factors = factors_at_start(method, seed=1)
        kernels = layer_kernels(jacobians(network, x))
        signs[method] = spectrum(weighted_kernel(kernels, factors))
    for method, kernel in METHODS.items():
        found = signs[method]
        if kernel in ("H", "c H"):
            assert found.asymmetry < 1e-12 and found.quadratic > 0 and found.eigenvalue > 0, method
        else:
            assert found.asymmetry > 0.1, method
        if kernel == "H C":
            assert found.eigenvalue > -1e-12 and found.imaginary < 1e-9, method
    assert signs["local clipping, small R, flat"].quadratic < -1e-3
    assert signs["global clipping, small R, flat"].quadratic < -1e-3


def test_a_loss_may_rise_under_clipping_and_a_dropped_row_is_not_learned() -> None:
    """Of two opposite rows, clipping hears the short ones; global clipping drops the long one and its loss stays."""
    x = torch.tensor([[-10.0, 0.1], [1.0, 0.0], [1.0, 0.1], [1.0, -0.1]], dtype=torch.float64)
    y = torch.tensor([[1.0], [2.0], [2.0], [2.0]], dtype=torch.float64)

    def flow(rule: object) -> object:
        network = nn.Linear(2, 1, bias=False).double()
        nn.init.zeros_(network.weight)
        return integrate(network, x, y, LOSS, rule, steps=300)  # type: ignore[arg-type]

    plain, local, dropped = (flow(rule) for rule in (Unclipped(), Clipped("local", 1.0), Clipped("global", 5.0)))
    assert plain.monotone and plain.worst("quadratic") > -1e-12  # type: ignore[attr-defined]
    assert not local.monotone  # type: ignore[attr-defined]
    assert not dropped.monotone and dropped.remaining > 1  # type: ignore[attr-defined]


def test_a_flow_that_drops_every_row_stands_still_and_float32_is_refused() -> None:
    problem = make_problem(0)
    flow = integrate(problem.network, problem.x, problem.y, LOSS, Clipped("global", 1e-9), steps=5)
    assert len(flow.moments) == 1 and flow.remaining == 1
    with pytest.raises(ValueError, match="lost in rounding"):
        integrate(problem.network.float(), problem.x, problem.y, LOSS, Unclipped())
    with pytest.raises(ValueError, match="make_private"):
        Scaled(nn.Linear(2, 1).double(), (2,), 1.0, LOSS, "joint")
    with pytest.raises(ValueError, match="trains nothing"):
        layers_of(nn.Linear(2, 1).requires_grad_(False))
    assert math.isfinite(flow.moments[0].loss)
