"""torch.compile around private steps: the same numbers, no graph per step, or a refusal that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from small_runs import Blobs, make_module, make_plan, make_strategy, make_trainer
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lipdp_lightning.training import PrivateModule


class Graphs(Callback):
    """How many graphs had been compiled before each step."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen.append(int(counters["stats"]["unique_graphs"]))


def trained(how: str, scaling: str) -> tuple[Tensor, list[int]]:
    torch._dynamo.reset()
    counters.clear()
    module = make_module(0.01)
    plan = make_plan(scaling=scaling, steps=6, radius=0.5 if scaling == "exact" else None)
    graphs = Graphs()
    trainer = make_trainer(make_strategy(plan), graphs)
    given: Any = module
    if how == "network":
        module.network.compile(backend="eager")
    elif how == "step":
        given = torch.compile(module, backend="eager")
    trainer.fit(given, datamodule=Blobs())
    return torch.cat([p.detach().flatten() for p in module.parameters()]), graphs.seen


@pytest.mark.parametrize(
    ("how", "scaling"),
    [
        ("network", "joint"),
        pytest.param("step", "joint", marks=pytest.mark.slow),
        pytest.param("step", "exact", marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_release_the_same_numbers(how: str, scaling: str) -> None:
    plain, none = trained("plain", scaling)
    compiled, graphs = trained(how, scaling)
    assert torch.equal(plain, compiled)
    assert max(none) == 0 and graphs[-1] > 0
    # one set of graphs serves batches of every size and every step's numbers
    assert graphs[-1] == graphs[3]


def test_a_wrapped_network_is_refused_with_the_ways_that_work() -> None:
    plan = make_plan()
    module = PrivateModule(nn.Sequential(nn.Linear(6, 3)))
    module.network[0] = torch.compile(module.network[0], backend="eager")
    with pytest.raises(ValueError, match=r"wrapped by torch.compile.*HINT: use network.compile\(\)"):
        make_trainer(make_strategy(plan)).fit(module, datamodule=Blobs())
