"""Refuses options of the trainer group on which Lightning would fail later, and shows its own refusals in one line."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import lightning
from lightning.fabric.utilities.exceptions import MisconfigurationException

from .one_line import described, one_line, shortened

PROCESSES_PER_CORE = 4
_PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_COUNTS = {"num_sanity_val_steps": -1, "log_every_n_steps": 0, "min_steps": 0, "min_epochs": 0, "val_check_interval": 1}
_COUNTS |= {"max_steps": -1, "max_epochs": -1, "num_nodes": 1}


def refuse_trainer_options(chosen: Mapping[str, Any]) -> None:
    """Raises one ValueError that lists every option of the trainer group that cannot work."""
    problems = [*_counts(chosen), *_devices(chosen), *_precision(chosen), *_gradients(chosen)]
    if problems:
        raise ValueError("\n".join(problems))


def make_trainer(options: Mapping[str, Any]) -> lightning.Trainer:
    """Returns the Trainer of the options.

    Raises:
        ValueError: if Lightning refuses them, with its reason.
    """
    try:
        return lightning.Trainer(**options)
    except (ValueError, MisconfigurationException, TypeError) as error:
        problem = shortened(one_line(str(error)), 240)
    except Exception as error:  # a backend that is not installed, for example
        problem = described(error).replace("HINT: ", "")
    raise ValueError(f"the trainer group cannot be used: {problem.rstrip('.')}. {_HINT}")


_HINT = "HINT: leave the option out; trainer.accelerator=cpu and trainer.devices=1 always work."


def _counts(chosen: Mapping[str, Any]) -> Iterator[str]:
    for name, least in _COUNTS.items():
        value = chosen.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            yield f"trainer.{name} is {value}, and the smallest possible value is {least}. HINT: leave it out."
    value = chosen.get("val_check_interval")
    if isinstance(value, float) and not 0 < value <= 1:
        yield f"trainer.val_check_interval is {value}, not a share in (0, 1]. HINT: use 1.0, or a number of batches."
    steps, fewest = chosen.get("max_steps"), chosen.get("min_steps")
    if isinstance(steps, int) and isinstance(fewest, int) and 0 <= steps < fewest:
        yield f"trainer.min_steps is {fewest}, above trainer.max_steps {steps}. HINT: leave min_steps out."


def _devices(chosen: Mapping[str, Any]) -> Iterator[str]:
    devices, accelerator = chosen.get("devices"), chosen.get("accelerator") or "auto"
    if accelerator == "tpu":
        yield "trainer.accelerator 'tpu' is not supported. HINT: cpu, gpu or auto."
    if isinstance(devices, str) and devices != "auto":
        try:
            devices = int(devices)
        except ValueError:
            assert isinstance(devices, str)
            if not all(part.strip().isdigit() for part in devices.split(",")):
                yield f"trainer.devices {shortened(devices)!r} is not a number of devices. HINT: use 1, or auto."
            elif accelerator == "cpu":
                yield f"trainer.devices {shortened(devices)!r} names devices, and a CPU has none. HINT: give a number."
            return
    if isinstance(devices, list) and (not devices or accelerator == "cpu"):
        yield f"trainer.devices {devices} is not a list of this machine's devices. HINT: use 1, or auto."
    elif isinstance(devices, int) and devices < 1 and not (devices == -1 and accelerator != "cpu"):
        yield f"trainer.devices is {devices}, and at least 1 is needed. HINT: use 1, or auto."
    elif isinstance(devices, int) and devices > _most_processes() and accelerator != "gpu":
        yield (
            f"trainer.devices is {devices}, and this machine has {os.cpu_count()} processors: each device is a process."
            " HINT: use 1, or auto."
        )


def _most_processes() -> int:
    return max(8, PROCESSES_PER_CORE * (os.cpu_count() or 1))


def _precision(chosen: Mapping[str, Any]) -> Iterator[str]:
    given = chosen.get("precision")
    if given is not None and str(given).startswith("transformer-engine"):
        yield (
            f"trainer.precision {given!r} computes in fewer bits than the bound on the gradients' sum needs. "
            f"HINT: use one of {', '.join(_PRECISIONS)}."
        )
    if given is not None and str(given) in ("16", "16-mixed", "16-true"):
        yield (
            f"trainer.precision {given!r} scales the loss by a factor that follows the data. "
            f"HINT: use one of {', '.join(_PRECISIONS)}."
        )


def _gradients(chosen: Mapping[str, Any]) -> Iterator[str]:
    value = chosen.get("gradient_clip_val")
    if value is not None and not (math.isfinite(value) and value >= 0):
        yield f"trainer.gradient_clip_val is {value}, not a size. HINT: leave it out; the noise covers them."
