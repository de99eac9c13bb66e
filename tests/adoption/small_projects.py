"""A project small enough for tests: sixty rows in six dimensions, two layers, and steps that do more than they say."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from projects import WITHOUT_FILES
from small_runs import SECRET, Blobs, make_network, make_plan
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lipdp_lightning
from lipdp_lightning.adoption.private_trainer import PrivateTrainer
from lipdp_lightning.adoption.privatize import Privatized


class Project(lightning.LightningModule):
    """An ordinary project; its name in a test says how it differs from this one."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.net = make_network(hidden=hidden)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows() -> tuple[Tensor, Tensor]:
    """Returns the training rows."""
    return Blobs().load_train()


def loader(x: Tensor | None = None, y: Tensor | None = None, **options: Any) -> DataLoader[Any]:
    own_x, own_y = rows()
    data = TensorDataset(own_x if x is None else x, own_y if y is None else y)
    return DataLoader(data, **({"batch_size": 20, "shuffle": True} | options))


def held_out() -> DataLoader[Any]:
    return DataLoader(TensorDataset(*Blobs().load_test()), batch_size=30)


def privatize(project: Any = None, data: Any = None, **options: Any) -> Privatized:
    """Returns the project under a plan of twelve steps."""
    if not {"plan", "epsilon", "noise_multiplier"} & set(options):
        options["plan"] = make_plan(scaling="exact", radius=1.0, max_norm=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lipdp_lightning.privatize(
            Project() if project is None else project, loader() if data is None else data,
            **({"size": 60} | options),
        )  # fmt: skip


def fit(
    private: Privatized, *callbacks: Any, held_out: Any = None, checkpoint: Any = None, **options: Any
) -> PrivateTrainer:
    """Trains with a secret that is known, and returns the Trainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = private.Trainer(callbacks=list(callbacks), **(WITHOUT_FILES | {"log_every_n_steps": 1} | options))
        trainer.strategy.fixed_secret = SECRET
        trainer.fit(private.module, private.data, held_out, ckpt_path=checkpoint, weights_only=False)
    return trainer


def all_weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in module.parameters()])
