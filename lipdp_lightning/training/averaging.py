"""Averages of released weights: updates after each step, and evaluation in place of the trained weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning
import torch
from torch import Tensor, nn

KINDS = ("ema", "polyak", "weighted")
LAST_WEIGHTS = "those of the last step"
STATE_KEY = "lipdp_average"  # under a checkpoint's "callbacks"


class WeightAverage:
    """A running average of the weights after steps ``start_step``, ``start_step`` + 1, ...; n counts them from 0.

    * ``ema``: a <- d a + (1 - d) w with d = min(decay, (1 + n) / (10 + n));
    * ``polyak``: the mean of all of them;
    * ``weighted``: the mean with weights n + 1, so a <- a + (w - a) 2 / (n + 2).

    Each is a convex combination of weights that were released, so it costs no privacy. It is kept in float64, since
    float32 would lose increments at a decay of 0.9999. Buffers are constants of a certified model and are not averaged.
    """

    def __init__(self, kind: str = "ema", decay: float = 0.9999, start_step: int = 0) -> None:
        problems = []
        if kind not in KINDS:
            problems.append(f"kind={kind!r} is unknown. HINT: use one of {', '.join(KINDS)}")
        if not 0 <= decay < 1:
            problems.append(f"decay={decay} is not in [0, 1). HINT: use 0.9999")
        if not (isinstance(start_step, int) and start_step >= 0):
            problems.append(f"start_step={start_step!r} is not a step. HINT: use 0")
        if problems:
            raise ValueError("; ".join(problems))
        self.kind, self.decay, self.start_step = kind, float(decay), start_step
        self.count, self.step = 0, 0
        self._average: dict[str, Tensor] = {}
        self._shown: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # parameter, its trained values, the average

    @property
    def exists(self) -> bool:
        """Returns whether a step has been averaged."""
        return self.count > 0

    def __str__(self) -> str:
        decay = f", decay {self.decay:g}" if self.kind == "ema" else ""
        return f"{self.kind}{decay}, over {self.count} steps"

    # ---- after each step

    def share(self) -> float:
        """Returns the weight of the next weights in the average."""
        n = self.count
        if n == 0:
            return 1.0
        if self.kind == "ema":
            return 1.0 - min(self.decay, (1 + n) / (10 + n))
        return 1 / (n + 1) if self.kind == "polyak" else 2 / (n + 2)

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Adds the projected weights after ``step`` steps to the average; a repeated call for a step does nothing."""
        assert not self._shown, "the network shows its average, and the trained weights are put aside"
        if step < self.start_step or step <= self.step:
            return
        share = self.share()
        for name, parameter in trained(network).items():
            values = parameter.detach().double()
            before = self._average.get(name)
            self._average[name] = values.clone() if before is None else before.to(values.device).lerp_(values, share)
        self.count, self.step = self.count + 1, step

    def weights(self) -> dict[str, Tensor]:
        """Returns the average in float64, by the network's parameter names."""
        return {name: values.clone() for name, values in self._average.items()}

    # ---- in place of the trained weights

    @property
    def shown(self) -> bool:
        """Returns whether the network holds the average."""
        return bool(self._shown)

    def show(self, network: nn.Module) -> None:
        """Puts the average into the network; the trained values are kept aside with their storage and versions."""
        if self._shown or not self.exists:
            return
        for name, parameter in trained(network).items():
            average = self._average[name].to(parameter.device, parameter.dtype)
            self._shown.append((parameter, parameter.data, average))
            parameter.data = average

    def hide(self) -> None:
        """Puts the trained weights back."""
        for parameter, values, _ in self._shown:
            parameter.data = values
        self._shown = []

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """Puts the trained weights into the network for the block."""
        shown = self._shown
        self.hide()
        try:
            yield
        finally:
            for parameter, _, average in shown:
                parameter.data = average
            self._shown = shown

    # ---- in checkpoints

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {**self._settings(), "count": self.count, "step": self.step, "average": self.weights()}

    def reset(self) -> None:
        """Forgets the average."""
        self.hide()
        self.count, self.step, self._average = 0, 0, {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved ``state``; raises ValueError if it belongs to another average."""
        other = {k: state[k] for k, v in self._settings().items() if state[k] != v}
        if other:
            own = {k: self._settings()[k] for k in other}
            raise ValueError(
                f"the checkpoint holds another average of the weights ({other}) than the configured one ({own}). "
                "HINT: continue with the ParameterAveraging of the run's config.yaml, or use a new --run_dir."
            )
        self.count, self.step = state["count"], state["step"]
        self._average = dict(state["average"])

    def _settings(self) -> dict[str, Any]:
        return {"kind": self.kind, "decay": self.decay, "start_step": self.start_step}


def trained(network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that are trained, by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def average_of(trainer: lightning.Trainer) -> WeightAverage | None:
    """Returns the average that a callback of the trainer configures, or None."""
    found = [getattr(callback, "average", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return next((average for average in found if isinstance(average, WeightAverage)), None)


def evaluated_state(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Returns the state_dict to evaluate and its description: the average if there is one, else the last weights."""
    released = dict(checkpoint["state_dict"])
    state = checkpoint.get("callbacks", {}).get(STATE_KEY)
    if not state or not state["count"]:
        return released, LAST_WEIGHTS
    average = WeightAverage(state["kind"], state["decay"], state["start_step"])
    average.load_state(state)
    for name, values in average.weights().items():
        released[f"network.{name}"] = values.to(released[f"network.{name}"].dtype)
    return released, f"averaged: {average}"
