"""A classifier that runs its backward pass by hand, to step only every second batch."""

import lightning as L
import torch
import torch.nn.functional as F
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader


class ByHand(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Linear(64, 10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.manual_backward(F.cross_entropy(self.net(x), y) / 2)
        if batch_idx % 2:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(**options):
    train_set, _ = split(*digits(flat=True))
    data = DataLoader(train_set, batch_size=64, shuffle=True)
    model = ByHand()
    trainer = L.Trainer(max_epochs=1, **options)
    trainer.fit(model, data)
    return {}
