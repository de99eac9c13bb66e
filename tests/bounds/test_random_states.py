"""A rehearsal notices when a forward pass draws random numbers, from whichever generator."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lipdp_lightning.bounds.rehearsal import _random_states

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1), "random": random.random, "numpy": np.random.rand,
    "numpy seeded anew": lambda: np.random.seed(1),  # the words change, and their position does not
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_changes_the_states(name: str) -> None:
    np.random.seed(0)
    before = _random_states()
    assert before == _random_states()
    DRAWS[name]()
    assert before != _random_states()
