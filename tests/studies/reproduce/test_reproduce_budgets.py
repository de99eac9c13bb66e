"""Accuracy at epsilon 1, 2, 4 and 8: what is trained, and how rows become curves beside the published numbers."""

from __future__ import annotations

import pytest
import yaml

from lipdp_lightning.studies.reproduce import Options
from lipdp_lightning.studies.reproduce.entries import results, results_budgets
from lipdp_lightning.studies.reproduce.entries.results_budgets import ENTRY, EPSILONS, METHODS, PUBLISHED, curves, draw

SHARED = {"certified_epsilon": 1.0, "delta": 1e-5, "adjacency": "add_remove", "seconds": 10.0}


def row(data: str, method: str, epsilon: float, seed: int, accuracy: float) -> dict[str, object]:
    return {"data": data, "method": method, "epsilon": epsilon, "seed": seed, "accuracy": accuracy, **SHARED}


ROWS = [
    row("MNIST", results.UNCLIPPED, 1.0, 0, 97.0), row("MNIST", results.UNCLIPPED, 1.0, 1, 98.0),
    row("MNIST", results.CLIPPED, 1.0, 0, 96.0), row("MNIST", results.UNCLIPPED, 8.0, 0, 99.0),
    row("CIFAR-10", results.UNCLIPPED, 1.0, 0, 60.0),
]  # fmt: skip


def test_every_configuration_is_trained_at_every_budget() -> None:
    cells = ENTRY.cells(Options())
    assert {(c["data"], c["method"], c["epsilon"]) for c in cells} == {
        (data, method, epsilon) for data in results.FILES for method in METHODS for epsilon in EPSILONS
    }
    assert all(cell["steps"] == results.QUICK_STEPS for cell in ENTRY.cells(Options(quick=True)))


def test_the_budget_alone_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, object]] = []
    monkeypatch.setattr(results, "train", lambda cell, changes: asked.append((cell["epsilon"], changes)) or {})
    for cell in ENTRY.cells(Options()):
        results_budgets.run(cell)
    assert asked == [(epsilon, {"privacy.epsilon": epsilon}) for epsilon, _ in asked] and len(asked) == 24
    # a file that fixes the noise itself would ignore the budget
    for data in results.FILES:
        for method in METHODS:
            privacy = yaml.safe_load(results.configuration(data, method)[0].read_text())["privacy"]
            assert privacy.get("noise_multiplier") is None and privacy["epsilon"] == 3.0


def test_curves_are_means_over_seeds_before_what_is_published() -> None:
    found = curves(ROWS)
    assert found["MNIST"][f"ours, {results.UNCLIPPED}"] == {1.0: 97.5, 8.0: 99.0}
    assert found["MNIST"][f"ours, {results.CLIPPED}"] == {1.0: 96.0}
    assert list(found["CIFAR-10"]) == [f"ours, {results.UNCLIPPED}", *PUBLISHED["CIFAR-10"]]


def test_every_published_number_stands_beside_ours() -> None:
    ours = {claim.what: claim.ours(ROWS) for claim in ENTRY.claims}
    numbers = [a for of in PUBLISHED.values() for by in of.values() for e, a in by.items() if e in EPSILONS]
    assert len(ENTRY.claims) == len(numbers)
    assert ours["MNIST at epsilon 1"] == f"ours, {results.UNCLIPPED} 97.50 %, ours, {results.CLIPPED} 96.00 %"
    assert ours["MNIST at epsilon 2"] == "not run"


def test_the_figure_has_a_plot_for_each_data_set_and_one_entry_for_each_method() -> None:
    figure = draw(curves(ROWS))
    assert [axes.get_xlabel() for axes in figure.axes] == ["epsilon (MNIST)", "epsilon (CIFAR-10)"]
    labels = [line.get_label() for axes in figure.axes for line in axes.lines]
    named = [label for label in labels if label != "_nolegend_"]
    assert len(named) == len(set(named)) and f"ours, {results.UNCLIPPED}" in named
