"""The LightningModule: a plain torch network, a certified loss, and metrics on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import lightning
import torch
import torchmetrics
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from ..bounds.losses import Loss, as_loss
from ..layers import BoundedInput, KeyedDropout, make_private, scale_cotangent
from ..layers.cotangents import CotangentClip
from .batches import with_empty_rows
from .checkpoints import restore_statistics
from .class_scores import ClassScores


@dataclass(frozen=True)
class ClippedLoss(Loss):
    """A loss with the same values, whose cotangent at each example's logits is clipped to norm ``radius``.

    The radius applies to the gradient of the example's whole loss, so nothing may divide the loss in
    between. Clipping biases the gradient; with one trained layer on unit-norm inputs, it is per-sample clipping.
    """

    loss: Loss
    radius: float

    def per_example(self, logits: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of each example."""
        return self.loss.per_example(CotangentClip(self.radius)(logits), target)

    def lipschitz(self, shape: tuple[int, ...]) -> float:
        """Returns the smaller of the loss's Lipschitz constant and the radius."""
        return min(self.loss.lipschitz(shape), self.radius)


OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Task = Literal["classification", "binary", "regression"]


class PrivateModule(lightning.LightningModule):
    """Trains ``network`` on batches (x, y, example ids) of a private data set.

    The module bounds the input of every example, so the certificate may rely on that bound. The training loss is
    a sum over examples, never a mean, and is not logged, since it is a function of private data.

    Args:
        network: A torch model of supported layers; its Linear, Conv and Dropout layers are swapped for
            layers that the mechanism can work with, and that keep their state_dict keys.
        loss: A name, a Loss, or a torch loss with reduction 'sum' or 'none'.
        input_bound: The largest norm of an example's input, which the module enforces.
        input_mode: 'clip' to the ball, or 'normalize' onto the sphere.
        color_space: The colour space to which RGB images are converted before the bound.
        optimizer: Makes the optimizer if no ``optimizer`` group is configured.
        log_nonprivate: Whether to log the training loss under ``nonprivate/``; the report says that it is released
            without privacy.
        channels_last: Whether the network's kernels and the images that it reads are laid out in memory with the
            channels last, which tensor cores prefer. What a step guarantees is the same.

    Example::

        PrivateModule(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), loss="cross_entropy", input_bound=1.0)
    """

    def __init__(
        self,
        network: nn.Module,
        loss: str | Loss | nn.Module = "cross_entropy",
        input_bound: float = 1.0,
        input_mode: Literal["clip", "normalize"] = "clip",
        color_space: str = "rgb",
        optimizer: OptimizerFactory | None = None,
        log_nonprivate: bool = False,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.loss = as_loss(loss)
        self.bounded_input = BoundedInput(input_bound, input_mode, color_space)
        self.network = make_private(network)
        self.channels_last = channels_last
        if channels_last:
            self.network.to(memory_format=torch.channels_last)
        self.log_nonprivate = log_nonprivate
        self._make_optimizer = optimizer
        self.task: Task = _task(self.loss)
        # temperature scaling after training sets it; evaluations and predictions divide class scores by it
        self.output_temperature = 1.0
        self.rows_to_multiple_of = 1  # in training, the network's rows are padded to a multiple of this
        self._metrics = nn.ModuleDict()
        self._scores: dict[str, ClassScores] = {}  # of evaluations outside training

    @property
    def input_bound(self) -> float:
        """The norm that every example's input is kept within."""
        return self.bounded_input.bound

    # ---- private training

    def private_loss(self, radius: float | None) -> Loss:
        """Returns the loss whose cotangents at the logits are clipped to a radius, the plan's loss_clip."""
        plain = self.loss.loss if isinstance(self.loss, ClippedLoss) else self.loss
        return plain if radius is None else ClippedLoss(plain, radius)

    def clip_loss(self, radius: float | None) -> None:
        """Trains with ``private_loss(radius)``."""
        self.loss = self.private_loss(radius)

    def configure_callbacks(self) -> list[lightning.pytorch.Callback]:
        """Refuses a Strategy that adds no noise."""
        # this is the first hook of a run, before anything is written; no other Strategy adds noise
        if self.trainer.state.fn == TrainerFn.FITTING and not hasattr(self.trainer.strategy, "mechanism"):
            raise ValueError(
                f"PrivateModule is to be trained by {type(self.trainer.strategy).__name__}, which would release raw "
                "gradients. HINT: use Trainer(strategy=PrivateStrategy(plan), ...), or `lipdp fit`."
            )
        return []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # in training, the Strategy decides which statistics are used
        if self._trainer is not None and self.trainer.state.fn != TrainerFn.FITTING:
            restore_statistics(checkpoint, getattr(self.trainer, "datamodule", None))

    def forward(self, x: Tensor) -> Tensor:
        return self._of_bounded(self.network, x)

    def _of_bounded(self, network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = self.bounded_input(x if self.dtype != torch.float64 else x.double())
        return network(x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        """Returns the summed loss of a batch, whose gradient the mechanism releases."""
        x, y, ids = batch
        private = getattr(self.trainer.strategy, "mechanism", None)
        if private is None:
            raise ValueError(
                "PrivateModule is trained without the private Strategy, and would release raw gradients. "
                "HINT: use Trainer(strategy=PrivateStrategy(plan), ...), or `lipdp fit`."
            )
        drawn = len(x)
        x, y, ids = self._views(x, y, ids, private)
        private.begin_pass(drawn, len(x))
        self._key_dropout(ids)
        total = self._summed_loss(x, y, private)
        if self.log_nonprivate:
            shares = self.trainer.accumulate_grad_batches * self.trainer.world_size
            share = private.plan.expected_batch_size * private.views / shares
            self.log("nonprivate/loss", total.detach() / share, sync_dist=True)
        # Lightning divides the loss by the number of micro-batches, and the step releases a sum
        micro_batches = self.trainer.accumulate_grad_batches
        return total if micro_batches == 1 else total * micro_batches

    def _summed_loss(self, x: Tensor, y: Tensor, private: Any) -> Tensor:
        """Returns the loss summed over rows; on the way back, the gradient of every row is bounded as the plan says."""
        strategy: Any = self.trainer.strategy
        if strategy.clipper is not None:
            with private.own_hooks():
                total: Tensor = strategy.clipper.total(
                    x, lambda rows: self.loss.per_example(self._output(rows, private), y), self.trainer.global_step
                )
            return total
        rows, multiple = len(x), self.rows_to_multiple_of
        padded = x if multiple == 1 else with_empty_rows(x, multiple)
        logits = self._output(padded, private)
        factor = private.scaling.example_factor(len(padded), logits.device)
        if padded is not x:  # the cotangents of the appended rows are zero
            logits, factor = logits[:rows], None if factor is None else factor[:rows]
        return self.loss.per_example(logits if factor is None else scale_cotangent(logits, factor), y).sum()

    def _output(self, x: Tensor, private: Any) -> Tensor:
        """Returns the output of the certified graph; hooks on this module, such as those of loggers, receive copies."""
        output = self._of_bounded(private.run, x)
        if self._forward_hooks or self._forward_pre_hooks:
            self._show(x, output)
        return output

    @torch.no_grad()
    def _show(self, x: Tensor, output: Tensor) -> None:
        for key, before in self._forward_pre_hooks.items():
            before(self, (x.clone(),), *([{}] if key in self._forward_pre_hooks_with_kwargs else []))
        for key, after in self._forward_hooks.items():
            between: list[dict[str, Any]] = [{}] if key in self._forward_hooks_with_kwargs else []
            after(self, (x.clone(),), *between, output.clone())

    def _views(self, x: Tensor, y: Tensor, ids: Tensor, private: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns one row per view, if the Strategy makes views of examples; the mechanism divides by their number."""
        strategy: Any = self.trainer.strategy
        views = getattr(strategy, "views", None)
        if (1 if views is None else views.number) != private.views:
            raise ValueError(
                f"the batch is expanded to {views}, and the mechanism divides by {private.views}: an example's bound "
                "would not be that of its mean. HINT: configure one AugmentationMultiplicity before training starts."
            )
        return (x, y, ids) if views is None else views.expand(x, y, ids, strategy.step_key)

    def _key_dropout(self, ids: Tensor) -> None:
        layers = [m for m in self.network.modules() if isinstance(m, KeyedDropout)]
        if layers:
            keys: Callable[[int], int] = self.trainer.strategy.dropout_key  # type: ignore[attr-defined]
            ids = with_empty_rows(ids, self.rows_to_multiple_of)
            for index, layer in enumerate(layers):
                layer.context = (keys(index), ids)

    # ---- held-out data

    def _metric(self, stage: str, outputs: int) -> torchmetrics.Metric:
        if stage not in self._metrics:
            self._metrics[stage] = _new_metric(self.task, outputs).to(self.device)
        metric = self._metrics[stage]
        assert isinstance(metric, torchmetrics.Metric)
        return metric

    def _scaled(self, outputs: Tensor) -> Tensor:
        return outputs if self.output_temperature == 1.0 else outputs / self.output_temperature

    def _evaluate(self, batch: Any, stage: str) -> dict[str, Tensor]:
        """Logs loss and metric, and returns the network's outputs, without the temperature, for callbacks."""
        x, y = batch[0], batch[1]
        outputs = self(x)
        logits = self._scaled(outputs)
        losses = self.loss.per_example(logits, y)
        metric = self._metric(stage, logits.shape[1] if logits.dim() > 1 else 1)
        predicted = _predictions(self.task, logits, y)
        metric.update(*predicted)
        if self.task != "regression" and self.trainer.state.fn != TrainerFn.FITTING:
            self._scores.setdefault(stage, ClassScores().to(self.device)).update(*predicted)
        self.log(f"{stage}/loss", losses.mean(), on_epoch=True, on_step=False, batch_size=len(x), sync_dist=True)
        name = "mae" if self.task == "regression" else "accuracy"
        self.log(f"{stage}/{name}", metric, on_epoch=True, on_step=False, prog_bar=stage == "validation")
        return {"outputs": outputs.detach()}

    def _log_scores(self, stage: str) -> None:
        scores = self._scores.pop(stage, None)  # none while training, where they would cost more than they tell
        if scores is not None:
            self.log_dict({f"{stage}/{name}": value for name, value in scores.compute().items()})

    def on_validation_epoch_end(self) -> None:
        """Logs what belongs beside an accuracy on held-out rows."""
        self._log_scores("validation")

    def on_test_epoch_end(self) -> None:
        """Logs what belongs beside an accuracy on test rows."""
        self._log_scores("test")

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Logs loss and metric of held-out rows."""
        return self._evaluate(batch, "validation")

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Logs loss and metric of test rows."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Returns the network's outputs."""
        return self._scaled(self(batch[0]))

    def configure_optimizers(self) -> Any:
        """Returns the constructor's optimizer, or Adam if there is none."""
        if self._make_optimizer is not None:
            return self._make_optimizer(p for p in self.parameters() if p.requires_grad)
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _task(loss: Loss) -> Task:
    if loss.task == "binary":
        return "binary"
    return "regression" if loss.task == "regression" else "classification"


def _new_metric(task: Task, outputs: int) -> torchmetrics.Metric:
    if task == "binary":
        return torchmetrics.classification.BinaryAccuracy()
    if task == "regression":
        return torchmetrics.MeanAbsoluteError()
    return torchmetrics.classification.MulticlassAccuracy(outputs, average="micro")


def _predictions(task: Task, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if task == "binary":
        return logits.reshape(-1).sigmoid(), y.reshape(-1).long()
    if task == "regression":
        return logits.reshape(-1), y.reshape(-1).to(logits.dtype)
    return logits, y
