"""OneCycle, early stopping, the best checkpoint and W&B: the habits of a project that has grown."""

import lightning as L
import torch
import torch.nn.functional as F
from digits_data import digits, split
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from torch import nn
from torch.utils.data import DataLoader


class Classifier(L.LightningModule):
    def __init__(self, max_lr=2e-2):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Linear(256, 10)
        self.outputs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        features = self.backbone(x)
        loss = F.cross_entropy(self.head(features), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.head(self.backbone(x))
        self.outputs.append((logits.argmax(1) == y).float().mean())
        self.log("val/loss", F.cross_entropy(logits, y))

    def on_validation_epoch_end(self):
        self.log("val/acc", torch.stack(self.outputs).mean(), prog_bar=True)
        self.outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.max_lr, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.max_lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(folder, **options):
    train_set, val_set = split(*digits())
    data = DataLoader(train_set, batch_size=64, shuffle=True)
    held_out = DataLoader(val_set, batch_size=360)
    model = Classifier()
    best = ModelCheckpoint(folder, monitor="val/acc", mode="max", filename="best", save_weights_only=True)
    callbacks = [best, EarlyStopping("val/loss", patience=5), LearningRateMonitor("step")]
    logger = WandbLogger(save_dir=folder, offline=True, project="digits")
    trainer = L.Trainer(max_epochs=10, callbacks=callbacks, logger=logger, gradient_clip_val=10.0, **options)
    trainer.fit(model, data, held_out)
    model = Classifier.load_from_checkpoint(best.best_model_path, map_location="cpu").eval()
    logger.experiment.finish()
    with torch.no_grad():
        right = [model.head(model.backbone(x)).argmax(1) == y for x, y in held_out]
    return {"val_acc": float(torch.cat(right).float().mean())}
