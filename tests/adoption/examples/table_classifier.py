"""A multilayer perceptron on a table, with rows as dictionaries, after the fashion of feature stores."""

import lightning as L
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, Dataset, random_split


class Tumours(Dataset):
    """Thirty measurements of a cell nucleus, divided by their largest possible values, and a diagnosis."""

    def __init__(self):
        table = load_breast_cancer()
        # the scales are constants of the measuring device, and not taken from the rows
        scale = [50, 50, 300, 4000, 0.5, 0.5, 1, 0.5, 0.5, 0.2, 5, 5, 50, 1000, 0.1, 0.2, 0.5, 0.1, 0.1, 0.05]
        scale += [50, 50, 300, 5000, 0.5, 1.5, 2, 0.5, 1, 0.5]
        self.features = 4 * torch.tensor(table.data, dtype=torch.float32) / torch.tensor(scale) - 1
        self.diagnosis = torch.tensor(table.target)

    def __len__(self):
        return len(self.features)

    def __getitem__(self, index):
        return {"features": self.features[index], "diagnosis": self.diagnosis[index]}


class TumourClassifier(L.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, width), nn.Tanh(), nn.Linear(width, 2))
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, features):
        return self.layers(features)

    def training_step(self, batch, batch_idx):
        return {"loss": self.criterion(self(batch["features"]), batch["diagnosis"])}

    def validation_step(self, batch, batch_idx):
        right = self(batch["features"]).argmax(1) == batch["diagnosis"]
        self.log("val_acc", right.float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def main(**options):
    train_set, val_set = random_split(Tumours(), [450, 119], torch.Generator().manual_seed(1))
    data = DataLoader(train_set, batch_size=90, shuffle=True, drop_last=True)
    model = TumourClassifier()
    trainer = L.Trainer(max_epochs=20, **options)
    trainer.fit(model, data, DataLoader(val_set, batch_size=119))
    return trainer.validate(model, DataLoader(val_set, batch_size=119))[0]
