"""Times the parts of our step: each function that belongs to a part is timed without the parts that it calls.

A process of its own is timed, after the comparison, since timing adds a little to every call. On a GPU each boundary
waits for the device.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

REST = "rest"
# (part, module, attribute): every call that looks the name up at the time of the call is timed
POINTS: tuple[tuple[str, str, str], ...] = (
    ("data", "lipdp_lightning.data_modules.poisson", "InMemoryRows.__getitem__"),
    ("forward and backward", "lipdp_lightning.training.strategy", "PrivateStrategy.training_step"),
    ("forward and backward", "lipdp_lightning.training.strategy", "PrivateStrategy.backward"),
    ("certificate", "lipdp_lightning.mechanism.step", "Mechanism.begin_step"),
    ("scaling", "lipdp_lightning.layers.scaled", "ScaledLayer._factor"),
    ("scaling", "lipdp_lightning.layers.contribution", "_weigh"),
    ("scaling", "lipdp_lightning.training.module", "scale_cotangent"),
    ("scaling", "lipdp_lightning.mechanism.scaling", "Joint.example_factor"),
    ("scaling", "lipdp_lightning.mechanism.radii", "_Measured._settle"),
    ("scaling", "lipdp_lightning.training.module", "ClippedLoss.per_example"),
    ("noise", "lipdp_lightning.mechanism.step", "KeyedDigest.begin"),
    ("noise", "lipdp_lightning.mechanism.step", "digest_of"),
    ("noise", "lipdp_lightning.kernels.normals", "normals"),
    ("release", "lipdp_lightning.mechanism.step", "Mechanism.privatize_"),
    ("all-reduce", "lipdp_lightning.training.strategy", "PrivateStrategy._all_reduce"),
    ("optimizer", "torch.optim.sgd", "SGD.step"),
    ("projection", "lipdp_lightning.mechanism.step", "Mechanism.project_"),
)
ORDER = tuple(dict.fromkeys([*(part for part, _, _ in POINTS), REST]))


def place_of(module: str, path: str) -> tuple[Any, str]:
    """Returns the module or class that holds a name, and the name."""
    holder: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        holder = getattr(holder, part)
    getattr(holder, name)
    return holder, name


class Parts:
    """Seconds by part since the last ``begin``; those of other threads, which run beside the step, are kept apart."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._main = threading.get_ident()
        self._seconds: dict[str, float] = {}
        self._beside: dict[str, float] = {}
        self._local = threading.local()

    def install(self) -> None:
        """Times every point from here on; a training whose set-up came before would refuse its next step."""
        for part, module, path in POINTS:
            holder, name = place_of(module, path)
            setattr(holder, name, self._timed(part, getattr(holder, name)))

    def begin(self) -> None:
        self._seconds, self._beside = {}, {}

    def take(self) -> dict[str, float]:
        return dict(self._seconds)

    def take_beside(self) -> dict[str, float]:
        return dict(self._beside)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            stack = self._local.__dict__.setdefault("stack", [])
            self._charge(stack)
            stack.append(part)
            try:
                return function(*arguments, **options)
            finally:
                self._charge(stack)
                stack.pop()

        return timed

    def _charge(self, stack: list[str]) -> None:
        """Charges the time since the last boundary to the innermost part."""
        now = self._now()
        if stack:
            seconds = self._seconds if threading.get_ident() == self._main else self._beside
            seconds[stack[-1]] = seconds.get(stack[-1], 0.0) + now - self._local.since
        self._local.since = now
