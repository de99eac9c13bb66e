"""A data module of one's own, in full; CONTRIBUTING shows the same text."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule, box_norm


class Thermometers(PrivateDataModule):
    """A day of hourly readings per household, and whether the heating failed."""

    input_shape = (24,)
    task = "binary"
    num_classes = 2
    declared_size = 5000  # the size announced for the study, not a length
    heldout_share = 0.2  # about 1000 rows, chosen by a hash of each row
    input_bound = box_norm((24,), -1.0, 1.0)

    def load_train(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)  # your file is read here
        degrees = 20 + 6 * torch.randn(4990, 24, generator=generator)
        failed = (degrees.mean(dim=1) < 19).long()
        # a room is declared to be between 0 and 40 degrees; nothing is fitted to the rows
        return (degrees.clamp(0, 40) - 20) / 20, failed

    def declarations(self) -> list[str]:
        return ["readings in [0, 40] degrees Celsius"]


def test_the_module_above_is_ready_for_training() -> None:
    module = Thermometers()
    module.bind(lambda step, chunk: torch.arange(step * 3), steps_per_epoch=4, chunks=1, start_step=lambda: 0)
    module.setup("fit")
    batches = list(module.train_dataloader())
    assert [tuple(x.shape) for x, _, _ in batches] == [(0, 24), (3, 24), (6, 24), (9, 24)]
    assert module.dataset_size == 4000 and 3600 < module.rows < 4400
    assert torch.cat([x for x, _, _ in module.val_dataloader()]).norm(dim=1).max() <= module.input_bound
    assert "readings in [0, 40]" in module.describe()


def test_it_is_refused_when_it_declares_what_it_does_not_keep() -> None:
    class Larger(Thermometers):
        declared_size = 6000

    with pytest.raises(ValueError, match="6000 rows are declared and fewer exist"):
        Larger().setup()


def test_it_takes_fewer_than_forty_lines() -> None:
    assert len(inspect.getsource(Thermometers).splitlines()) < 40
