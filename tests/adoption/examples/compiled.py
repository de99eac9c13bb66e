"""A module that is compiled before it is trained."""

import lightning as L
import torch
import torch.nn.functional as F
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader


class Compiled(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x):
        return self.net(x.view(x.size(0), -1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main(**options):
    train_set, test_set = split(*digits())
    data = DataLoader(train_set, batch_size=64, shuffle=True)
    model = torch.compile(Compiled(), backend="eager")
    trainer = L.Trainer(max_epochs=10, **options)
    trainer.fit(model, data)
    return trainer.test(model, DataLoader(test_set, batch_size=360))[0]
