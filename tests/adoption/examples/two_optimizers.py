"""A generator and a discriminator with an optimizer each, which is not one private step."""

import lightning as L
import torch
import torch.nn.functional as F
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.Sigmoid())
        self.discriminator = nn.Linear(64, 1)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        first, second = self.optimizers()
        noise = torch.randn(len(x), 8, device=self.device)
        loss = -F.logsigmoid(self.discriminator(self.generator(noise))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        real, fake = self.discriminator(x), self.discriminator(self.generator(noise).detach())
        loss = -(F.logsigmoid(real) + F.logsigmoid(-fake)).mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters()), torch.optim.Adam(self.discriminator.parameters())


def main(**options):
    train_set, _ = split(*digits(flat=True))
    data = DataLoader(train_set, batch_size=64, shuffle=True)
    model = Gan()
    trainer = L.Trainer(max_epochs=1, **options)
    trainer.fit(model, data)
    return {}
