"""A small CNN on handwritten digits."""

import lightning as L
import torch
import torch.nn.functional as F
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader


class DigitClassifier(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(torch.flatten(x, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def main(**options):
    train_set, test_set = split(*digits())
    data = DataLoader(train_set, batch_size=64, shuffle=True)
    model = DigitClassifier()
    trainer = L.Trainer(max_epochs=10, **options)
    trainer.fit(model, data)
    return trainer.test(model, DataLoader(test_set, batch_size=360))[0]
