"""Averages the weights over the steps of a run, evaluates the average, and certifies it anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import lightning
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lipdp_lightning.bounds.certifier import Certifier
from lipdp_lightning.callbacks.accountant import _strategy
from lipdp_lightning.training.averaging import STATE_KEY, WeightAverage
from lipdp_lightning.training.public_numbers import averaged_rows
from lipdp_lightning.training.set_up import make_certifier


class ParameterAveraging(Callback):
    """Averages the released weights after every step, which costs no privacy.

    The Strategy updates the average directly after the projection. Validation, test and prediction use it, and
    training continues from the trained weights, which no evaluation changes: they are kept aside with their storage,
    and restored even if an evaluation fails. Every checkpoint's ``state_dict`` holds the trained weights, checkpoints
    to resume from also hold the average, and ``lipdp test`` and ``lipdp export`` use the average.

    Norm balls are convex: an average of weights that were projected onto one (``clip``, ``clip_singular``,
    ``frobenius``) lies in it. ``fixed`` and ``bjorck`` aim at a norm, and an average of such weights has at most that
    norm. The report states the norms that were certified for the average itself.

    Args:
        kind: 'ema', with decay min(decay, (1 + n) / (10 + n)) at the n-th step; 'polyak', the mean; or 'weighted', the
            mean with weights n + 1.
        decay: the decay of the ema.
        start_step: the first step after which weights are averaged; before it, the trained weights are evaluated.
        raw_metrics: whether `lipdp fit` also evaluates the last weights when training ends.
    """

    def __init__(
        self,
        kind: Literal["ema", "polyak", "weighted"] = "ema",
        decay: float = 0.9999,
        start_step: int = 0,
        raw_metrics: bool = False,
    ) -> None:
        self.average = WeightAverage(kind, decay, start_step)
        self.raw_metrics = raw_metrics
        self._suspended = False
        self._certifier: Certifier | None = None
        self._rows: tuple[int, list[dict[str, Any]]] | None = None
        self._strategy: Any = None

    # ---- the run

    def setup(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        self._strategy = _strategy(trainer)
        assert self._strategy.average is self.average  # Lightning refuses a second callback of this kind
        plan = self._strategy.plan
        # before the hooks of cotangent clips are attached; it certifies exact norms of the parameters' present values
        self._certifier = make_certifier(trainer, pl_module, plan, trainer.datamodule)  # type: ignore[attr-defined]
        self._rows = None
        self.average.reset()

    @property
    def state_key(self) -> str:
        """The key of the average in checkpoints."""
        return STATE_KEY

    def state_dict(self) -> dict[str, Any]:
        return self.average.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average.load_state(state_dict)

    # ---- evaluation

    def _show(self, pl_module: Any) -> None:
        if not self._suspended:
            self.average.show(pl_module.network)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._show(pl_module)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.average.hide()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_exception(self, trainer: lightning.Trainer, pl_module: Any, exception: BaseException) -> None:
        self.average.hide()

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self.average.hide()

    @property
    def suspended(self) -> bool:
        """Returns whether evaluations use the trained weights."""
        return self._suspended

    @contextmanager
    def last_weights(self) -> Iterator[None]:
        """Lets evaluations in the block use the trained weights."""
        self._suspended = True
        try:
            yield
        finally:
            self._suspended = False

    @contextmanager
    def averaged(self, module: Any) -> Iterator[None]:
        """Puts the average, if there is one, into the module for the block."""
        before = self.average.shown
        self.average.show(module.network)
        try:
            yield
        finally:
            if not before:
                self.average.hide()

    def weights(self) -> dict[str, Tensor]:
        """Returns the average in float64, by the network's parameter names; it is empty before the first one."""
        return self.average.weights()

    # ---- the report

    def certificate(self) -> list[dict[str, Any]]:
        """Returns the bounds of the average, one row per parameter group, from exact norms of the evaluated values."""
        if not self.average.exists or self._certifier is None:
            return []
        if self._rows is None or self._rows[0] != self.average.step:
            maxima = {name: maximum for name, (_, maximum) in self._strategy.mechanism.boundary().items()}
            with self.averaged(self._strategy.lightning_module):
                certificate = self._certifier.certify()
            self._rows = (self.average.step, averaged_rows(certificate, maxima))
        return self._rows[1]

    def report_notes(self) -> list[str]:
        """Returns lines for the report about the average and its certificate."""
        if not self.average.exists:
            return [f"weights are averaged from step {self.average.start_step} on, which was not reached"]
        rows = [row for row in self.certificate() if row["max_norm"] is not None]
        within = max((row["lipschitz"] / row["max_norm"] for row in rows), default=None)
        bound = "" if within is None else f", its largest certified norm is {within:.4g} of that layer's maximum"
        return [f"metrics and exports are of averaged weights ({self.average}); the average was certified anew{bound}"]


def averaging_of(trainer: lightning.Trainer) -> ParameterAveraging | None:
    """Returns the trainer's callback that averages weights."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, ParameterAveraging)), None)
