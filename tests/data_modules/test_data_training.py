"""The data module under Lightning's Trainer: epochs, accumulation, a resume inside an epoch, bytes to floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule


class Rows(PrivateDataModule):
    """100 given rows of four classes."""

    input_shape = (3,)
    task = "classification"
    num_classes = 4
    declared_size = 100
    scale = 1 / 255

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def load_train(self) -> tuple[Tensor, Tensor]:
        return self.x, torch.arange(100) % 4


class Recorder(lightning.LightningModule):
    """A model that records which rows each micro-batch held."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)
        self.seen: list[list[int]] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y, ids = batch
        self.seen.append(ids.tolist())
        return torch.nn.functional.cross_entropy(self.layer(x), y, reduction="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(folder: Path, max_steps: int, ckpt_path: str | None = None) -> tuple[list[list[int]], str]:
    module = Rows(torch.rand(100, 3))
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # step s, chunk c draws row 10 s + c, and every third step draws nobody
    module.bind(
        lambda step, chunk: torch.tensor([10 * step + chunk] if step % 3 else [], dtype=torch.int64),
        steps_per_epoch=3,
        chunks=2,
        start_step=lambda: trainer.global_step,
    )
    model = Recorder()
    trainer.fit(model, datamodule=module, ckpt_path=ckpt_path, weights_only=False)
    assert trainer.global_step == max_steps
    path = str(folder / f"after_{max_steps}.ckpt")
    trainer.save_checkpoint(path)
    return model.seen, path


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_walks_the_plan_over_epochs_and_resumes_inside_one(tmp_path: Path) -> None:
    expected = [[10 * step + chunk] if step % 3 else [] for step in range(8) for chunk in range(2)]
    whole, _ = train(tmp_path, 8)
    assert whole == expected
    first, checkpoint = train(tmp_path, 4)  # one epoch is three steps: this stops inside the second
    second, _ = train(tmp_path, 8, checkpoint)
    assert first + second == expected


@pytest.mark.filterwarnings("ignore")
def test_a_trainer_hands_the_network_floats_made_from_bytes(tmp_path: Path) -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).expand(100, 3)
    module = Rows(pixels)
    module.bind(lambda step, chunk: torch.tensor([4, 2]), steps_per_epoch=1, chunks=1, start_step=lambda: 0)
    arrived: list[Tensor] = []

    class Keeper(Recorder):
        def training_step(self, batch: Any, index: int) -> Tensor:
            arrived.append(batch[0])
            return super().training_step(batch, index)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    lightning.Trainer(accelerator="cpu", default_root_dir=tmp_path, max_steps=1, **options).fit(Keeper(), module)
    assert len(arrived) == 1 and arrived[0].dtype == torch.float32
    assert torch.allclose(arrived[0], torch.tensor([[0.0, 0.2, 1.0]] * 2))
