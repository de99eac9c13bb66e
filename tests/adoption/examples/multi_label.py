"""Three labels for each digit: whether it is even, above four, and a prime."""

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader


class Tagger(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.tags = nn.Linear(64, 3)
        self.accuracy = torchmetrics.classification.MultilabelAccuracy(3)

    def forward(self, x):
        return self.tags(self.encoder(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.binary_cross_entropy_with_logits(self(x), y)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy.update(self(x).sigmoid(), y.int())
        self.log("test_acc", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(**options):
    x, y = digits(flat=True)
    tags = torch.stack([y % 2 == 0, y > 4, torch.isin(y, torch.tensor([2, 3, 5, 7]))], dim=1).float()
    train_set, test_set = split(x, tags)
    data = DataLoader(train_set, batch_size=64, shuffle=True)
    model = Tagger()
    trainer = L.Trainer(max_epochs=15, **options)
    trainer.fit(model, data)
    return trainer.test(model, DataLoader(test_set, batch_size=360))[0]
