"""A frozen backbone with a new head, which alone is trained."""

import lightning as L
import torch
import torch.nn.functional as F
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten())

    def forward(self, x):
        return self.features(x)


class Transfer(L.LightningModule):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False
        self.head = nn.Linear(288, 10)

    def forward(self, x):
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self(x), y, label_smoothing=0.05)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=2e-2)


def main(**options):
    train_set, test_set = split(*digits())
    data = DataLoader(train_set, batch_size=128, shuffle=True)
    model = Transfer(Backbone())
    trainer = L.Trainer(max_epochs=15, **options)
    trainer.fit(model, data)
    return trainer.test(model, DataLoader(test_set, batch_size=360))[0]
