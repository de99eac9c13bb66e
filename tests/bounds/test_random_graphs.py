"""No bound of any certificate is exceeded, over random graphs with their weights on a projection's boundary.

Run with -s for the tightest ratio of every rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

import pytest
import torch
from random_graphs import Graph, random_graph

from lipdp_lightning.audit import attack, rule_ratios

TOLERANCE = 1e-5
Tightest = dict[str, list[float]]
FAST = range(60)
fast_graph = lru_cache(random_graph)  # made for two tests; an attack on the inputs leaves the weights alone


@pytest.fixture(scope="module")
def tightest() -> Iterator[Tightest]:
    """Largest output, Jacobian and gradient ratio by rule; printed when the module is done."""
    torch.set_num_threads(1)
    found: Tightest = defaultdict(lambda: [0.0, 0.0, 0.0])
    yield found
    print("\nrule                  output  Jacobian  gradient   (measured / certified)")
    for rule, ratios in sorted(found.items()):
        print(f"{rule:20}  {ratios[0]:6.4f}    {ratios[1]:6.4f}    {ratios[2]:6.4f}")


def check(graph: Graph, tightest: Tightest, restarts: int, steps: int, weights: bool = False) -> None:
    report = attack(*graph.arguments, restarts=restarts, steps=steps, seed=graph.seed, weights=weights, weight_rounds=1)
    assert not report.violations(TOLERANCE), (graph.seed, report.violations(TOLERANCE))
    groups = [g.name for g in report.groups]
    inputs = torch.stack([report.witnesses[f"group {name}, worst_case"][0] for name in (groups[0], groups[-1])])
    for found in rule_ratios(*graph.arguments, inputs, seed=graph.seed):
        assert found.worst <= 1 + TOLERANCE, (graph.seed, found)
        held = tightest[found.rule]
        for i, value in enumerate((found.output, found.lipschitz, found.gradient)):
            held[i] = max(held[i], value)


@pytest.mark.parametrize("seed", FAST)
def test_no_bound_is_exceeded(seed: int, tightest: Tightest) -> None:
    check(fast_graph(seed), tightest, restarts=8, steps=6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 360))
def test_no_bound_is_exceeded_by_a_longer_attack(seed: int, tightest: Tightest) -> None:
    check(random_graph(seed), tightest, restarts=24, steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(360, 390))
def test_no_bound_is_exceeded_when_the_weights_ascend_too(seed: int, tightest: Tightest) -> None:
    check(random_graph(seed), tightest, restarts=12, steps=10, weights=True)


def test_the_generator_is_seeded_and_covers_the_rules() -> None:
    def described(seed: int) -> tuple[str, float]:
        graph = random_graph(seed)
        return str(graph.model), float(sum(p.detach().double().abs().sum() for p in graph.model.parameters()))

    assert described(3) == described(3)
    assert described(3) != described(4)
    kinds = {type(m).__name__ for seed in FAST for m in fast_graph(seed).model.modules()}
    wanted = {
        "ScaledLinear", "ScaledConv1d", "ScaledConv2d", "Functional", "Residual", "Branches", "Shared", "Reused",
        "Tied", "Parts", "Arithmetic", "GroupNorm", "InstanceNorm", "LayerNorm", "MaxMin", "GELU", "Sigmoid",
        "TemperedSigmoid", "AvgPool1d", "AvgPool2d", "MaxPool1d", "MaxPool2d", "KeyedDropout",
    }  # fmt: skip
    assert wanted <= kinds, wanted - kinds
