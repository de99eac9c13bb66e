"""A project with a LightningDataModule for training, validation and test."""

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader, random_split


class DigitsData(L.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        train_set, self.test_set = split(*digits(flat=True))
        self.train_set, self.val_set = random_split(train_set, [1237, 200], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=200)

    def test_dataloader(self):
        return DataLoader(self.test_set, batch_size=360)


class Perceptron(L.LightningModule):
    def __init__(self, width=64, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 10))
        metrics = torchmetrics.MetricCollection({"acc": torchmetrics.classification.MulticlassAccuracy(10)})
        self.val_metrics = metrics.clone(prefix="val_")
        self.test_metrics = metrics.clone(prefix="test_")

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_metrics.update(self(x), y)

    def on_validation_epoch_end(self):
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log_dict(self.test_metrics(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main(**options):
    data = DigitsData()
    model = Perceptron()
    trainer = L.Trainer(max_epochs=10, **options)
    trainer.fit(model, datamodule=data)
    return trainer.test(model, datamodule=data)[0]
