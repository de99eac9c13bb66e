"""Augmentation multiplicity: K views of every example, each of which is a row, before the input's bound."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from ..augmentations import Augmentation, Draws, seeded
from ..privacy.digests import state_digest

StepKey = Callable[..., int]
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Views:
    """Turns B rows into K B: K views of each example, next to each other, drawn on the device of the batch.

    An example's views are a function of that example, its id and the keys of the step. Their mean is bounded
    like one of them: every view passes the input's bound, the scaling and all clips as a row by itself, and the
    mechanism divides the summed gradient by K.

    An ``Augmentation`` draws for every row. Any other module is called once per view, on that view of all examples,
    with torch's generator seeded for the step and the view; ``independence_problems`` checks that it treats each row by
    itself.

    Args:
        number: The number K of views.
        augmentations: The modules that are applied in turn.
    """

    def __init__(self, number: int, augmentations: Sequence[nn.Module]) -> None:
        strangers = [a for a in augmentations if not isinstance(a, nn.Module)]
        if not (isinstance(number, int) and not isinstance(number, bool) and number >= 1):
            raise ValueError(f"views={number!r} is not a positive number of views. HINT: use 16.")
        if strangers:
            raise ValueError(f"augmentations hold {strangers[0]!r}, which is not a torch module. HINT: wrap it in one.")
        self.number, self.augmentations = number, tuple(augmentations)

    @torch.no_grad()
    def expand(self, x: Tensor, y: Tensor, ids: Tensor, key: StepKey) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views, their labels, and a number for each (example, view) in place of the example's id."""
        number = self.number
        rows = (ids.unsqueeze(1) * number + torch.arange(number, device=ids.device)).flatten()
        views = x.repeat_interleave(number, 0)
        if len(views):
            with torch.autocast(x.device.type, enabled=False):
                for index, augmentation in enumerate(self.augmentations):
                    views = self._apply(index, augmentation.to(x.device), views, rows, key)
        return views, y.repeat_interleave(number, 0), rows

    def _apply(self, index: int, module: nn.Module, x: Tensor, rows: Tensor, key: StepKey) -> Tensor:
        if isinstance(module, Augmentation):
            changed = module(x, Draws(key("augmentation", index), rows))
        else:
            changed = torch.empty_like(x)
            for view in range(self.number):
                with seeded(key("augmentation", index, view), x.device):
                    changed[view :: self.number] = _checked(module(x[view :: self.number]), x[view :: self.number])
        return _checked(changed, x).to(x.dtype)

    def identity(self) -> bytes:
        """Returns a digest of all settings, which differs between runs whose views may differ."""
        digest = hashlib.sha256(str(self.number).encode())
        for augmentation in self.augmentations:
            for path, module in augmentation.named_modules():
                kind = f"{path} {type(module).__module__}.{type(module).__qualname__}"
                settings = {k: v for k, v in vars(module).items() if k not in _OF_EVERY_MODULE}
                digest.update(f"{kind} {_ADDRESS.sub('', repr(sorted(settings.items())))}\n".encode())
            digest.update(state_digest(dict([*augmentation.named_parameters(), *augmentation.named_buffers()])))
        return digest.digest()

    def __repr__(self) -> str:
        names = ", ".join(type(a).__name__ for a in self.augmentations) or "no augmentation"
        return f"{self.number} views ({names})"


def _checked(changed: Any, x: Tensor) -> Tensor:
    if not (isinstance(changed, Tensor) and changed.shape == x.shape and changed.is_floating_point()):
        # the message leaves the number of rows out, since it is that of a private sample
        tensor = isinstance(changed, Tensor)
        given = f"rows of shape {tuple(changed.shape[1:])}, {changed.dtype}," if tensor else type(changed).__name__
        raise ValueError(
            f"an augmentation returned {given} for rows of shape {tuple(x.shape[1:])}, {x.dtype}. "
            "HINT: it must return as many rows as it is given, of the same shape."
        )
    return changed


def views_of(trainer: lightning.Trainer) -> Views | None:
    """Returns the views that a callback of the trainer configures, or None; ``view_problems`` refuses a second one."""
    return next(iter(_all_views(trainer)), None)


def _all_views(trainer: lightning.Trainer) -> list[Views]:
    found = [getattr(callback, "views", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return [views for views in found if isinstance(views, Views)]


def view_problems(trainer: lightning.Trainer, strategy: Any, data: Any) -> list[str]:
    """Returns every reason not to train with the trainer's views."""
    found = _all_views(trainer)
    if not found:
        return []
    if len(found) > 1:
        return [f"{len(found)} callbacks make views of the examples. HINT: use one AugmentationMultiplicity."]
    views, problems = found[0], []
    size = strategy.physical_batch_size
    if isinstance(size, int) and 1 <= size < views.number:
        problems.append(
            f"physical_batch_size={size} counts rows, and one example has {views.number} of them. "
            f"HINT: use at least {views.number}."
        )
    shape = getattr(data, "input_shape", None)
    return problems if shape is None else problems + independence_problems(views, tuple(shape))


_PROBE_ROWS = 5
_PROBE_KEYS = 24  # an augmentation may act only now and then
_OUTLIERS = (1e6, -1e6, float("nan"))


def independence_problems(views: Views, shape: tuple[int, ...]) -> list[str]:
    """Returns the problems of augmentations on random rows, one of which is changed or removed."""
    problems = []
    for augmentation in views.augmentations:
        try:
            reason = _dependence(Views(4, [augmentation]), shape)
        except (ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
            message = str(error)
            hint = "" if "HINT" in message else f" HINT: it is given float tensors of shape (rows, {_list(shape)})."
            reason = f"fails on rows of the data's shape: {message.rstrip('.')}.{hint}"
        if reason is not None:
            problems.append(f"augmentation {type(augmentation).__name__} {reason}")
    return problems


def _list(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _dependence(views: Views, shape: tuple[int, ...]) -> str | None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(_PROBE_ROWS, *shape, generator=generator)
    ids = torch.arange(_PROBE_ROWS)

    def run(rows: Tensor, numbers: Tensor, seed: int) -> Tensor:
        def key(*parts: Any) -> int:
            return int.from_bytes(hashlib.sha256(repr((seed, parts)).encode()).digest()[:8], "big", signed=True)

        return views.expand(rows, numbers, numbers, key)[0].reshape(len(rows), views.number, *shape)

    for seed in range(_PROBE_KEYS):
        whole = run(x, ids, seed)
        if not _same(run(x, ids, seed), whole):
            return (
                "does not repeat its views from the same keys, so a step could not be repeated after an interruption. "
                "HINT: draw from torch's generator, or from the draws of an Augmentation, and keep no state."
            )
        for j in (0, seed % _PROBE_ROWS, _PROBE_ROWS - 1):
            others = ids != j
            changed = x.clone()
            changed[j] = _OUTLIERS[seed % len(_OUTLIERS)]
            if not _same(run(changed, ids, seed)[others], whole[others]):
                return (
                    "mixes examples: changing one row changes the views of others, so that one example enters the "
                    "gradients of others and no bound holds. HINT: mix-up, cut-mix and statistics of the batch cannot "
                    "be used; augment each example by itself."
                )
            fewer = run(x[others], ids[others], seed)
            if not torch.allclose(fewer, whole[others], rtol=1e-5, atol=1e-6, equal_nan=True):
                return (
                    "draws by the row of the batch: without one example, all that follow it get other views. "
                    "HINT: use a subclass of lipdp_lightning.augmentations.Augmentation, which draws by example, or "
                    "lipdp_lightning.augmentations.PerExample around the module."
                )
    return None


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.nan_to_num(7e7), second.nan_to_num(7e7))
