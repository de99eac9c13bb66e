"""A loop of plain torch, without Lightning."""

import torch
import torch.nn.functional as F
from digits_data import digits, split
from torch import nn
from torch.utils.data import DataLoader


def main():
    train_set, test_set = split(*digits(flat=True))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=225)
    for _ in range(10):
        for x, y in DataLoader(train_set, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
    x, y = test_set.tensors
    with torch.no_grad():
        return {"test_acc": float((model(x).argmax(1) == y).float().mean())}
