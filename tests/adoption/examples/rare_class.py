"""A rare class, found with a weight on its examples."""

import lightning as L
import torch
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAUROC


class Detector(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([4.0]))
        self.auroc = BinaryAUROC()

    def forward(self, x):
        return self.net(x)[:, 0]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.loss(self(x), y.float())
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.auroc.update(self(x), y)
        self.log("test_auroc", self.auroc)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(**options):
    x, y = digits()
    train_set, test_set = split(x, (y == 8).long())
    data = DataLoader(train_set, batch_size=64, shuffle=True)
    model = Detector()
    trainer = L.Trainer(max_epochs=10, **options)
    trainer.fit(model, data)
    return trainer.test(model, DataLoader(test_set, batch_size=360))[0]
