"""A regression with the squared error, whose targets are unbounded; the private diff states another loss."""

import lightning as L
import torch
import torch.nn.functional as F
from digits_data import split
from sklearn.datasets import make_friedman1
from torch import nn
from torch.utils.data import DataLoader


class Regressor(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.model(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_r2", 1 - F.mse_loss(self(x), y) / y.var())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]


def main(**options):
    x, y = make_friedman1(3000, random_state=0)
    train_set, test_set = split(
        torch.tensor(2 * x - 1, dtype=torch.float32), torch.tensor((y - 15) / 10, dtype=torch.float32), train=2500
    )
    data = DataLoader(train_set, batch_size=128, shuffle=True)
    model = Regressor()
    trainer = L.Trainer(max_epochs=15, **options)
    trainer.fit(model, data)
    return trainer.test(model, DataLoader(test_set, batch_size=500))[0]
