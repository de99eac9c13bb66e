"""The rows of each micro-batch, and the rows of zeros that are appended to them.

The rows drawn are a pure function of the secret, the step and the process's rank.

The size of a Poisson sample differs between almost all steps. Libraries of convolutions cache what they prepare for a
size, and allocators keep blocks of it: without padding, a training takes longer and its memory grows with the steps.
Hence rows of zeros are appended to the sample if the network has convolutions.

Guarantee: the loss is a sum over the sample's rows alone, so the cotangent of an appended row is exactly zero, and
zero times a finite number adds nothing to a sum. No example's row depends on the number of rows after it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from ..kernels.loops import address_of, version_of
from ..own_folders import is_own
from ..privacy.plan import PrivacyPlan
from ..privacy.sampling import SampleCiphers, local_slice, poisson_sample

_AT_ONCE = 1 << 20  # rows decided at once, for several steps of a small data set, since every call has a fixed cost


def planned_draws(
    secret: bytes, plan: PrivacyPlan, rows: int, rank: int, world_size: int, chunks: int
) -> Callable[[int, int], Tensor]:
    """Returns ``draw(step, chunk)``: this process's share of the step's Poisson sample, possibly empty."""
    drawn: dict[int, Tensor] = {}
    ciphers = SampleCiphers(secret)
    ahead = min(16, max(1, _AT_ONCE // max(1, rows)))

    def draw(step: int, chunk: int) -> Tensor:
        if step not in drawn:
            drawn.clear()
            for later in range(step, step + ahead):
                drawn[later] = poisson_sample(ciphers, later, rows, plan.sample_rate)
        return local_slice(drawn[step], rank, world_size, chunk, chunks)

    return draw


Batch = tuple[Tensor, Tensor, Tensor]
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def padding_multiple(network: nn.Module, expected_rows: float, views: int = 1) -> int:
    """Returns the number to a multiple of which the number of rows is rounded up.

    It is a power of two, about half a standard deviation of the sample's size. For a network without convolutions,
    which needs no padding, it is 1.
    """
    if expected_rows < 4 or not any(isinstance(m, _CONVOLUTIONS) for m in network.modules()):
        return 1
    return math.lcm(views, 1 << max(0, math.floor(math.log2(expected_rows) / 2) - 1))


def with_empty_rows(x: Tensor, multiple: int) -> Tensor:
    """Returns x with rows of zeros up to the next multiple; an empty batch stays empty."""
    missing = -len(x) % multiple
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


# ---- from the data module to the network


@dataclass(frozen=True)
class HandedOver:
    """A batch between the data module and the network, and a copy of it for hooks.

    Guarantee: the network receives the rows, labels and ids that the data module has handed over. Nothing else holds
    the tensors that are kept here, and a step whose hooks have written to the copy is refused, since the certificate
    bounds the examples that the sampler drew.
    """

    kept: Batch
    shown: Batch
    _shown_as: list[tuple[Any, ...]]

    @classmethod
    def of(cls, batch: Any) -> HandedOver:
        """Keeps a batch, and copies it for hooks.

        Raises:
            ValueError: If the batch does not hold a row, a label and an id for each example.
        """
        if not (
            isinstance(batch, tuple | list)
            and len(batch) == 3
            and all(isinstance(part, Tensor) for part in batch)
            and len(batch[0]) == len(batch[1]) == len(batch[2])
        ):
            raise ValueError(
                "the data module hands over a batch that is not (x, y, ids), three tensors with an entry for each "
                "example. HINT: data_modules.PrivateDataModule hands over such batches."
            )
        x, y, ids = batch
        shown = x.clone(), y.clone(), ids.clone()
        return cls((x, y, ids), shown, _looks(shown))

    def opened(self, batch: Any) -> Batch:
        """Returns the batch for the network.

        Args:
            batch: The batch that Lightning passes to the step after all hooks.

        Raises:
            ValueError: If it is not the copy that was handed over, or was changed.
        """
        same = (
            isinstance(batch, tuple)
            and len(batch) == 3
            and all(map(is_, batch, self.shown))
            and _looks(self.shown) == self._shown_as
            # on other devices a comparison would wait for the device; the network does not read the copy anyway
            and (self.kept[0].device.type != "cpu" or all(map(_same_bits, self.kept, self.shown)))
        )
        if not same:
            raise ValueError(
                "the batch was changed between the data module and the training step. The certificate and the sampling "
                "rate are for the rows as they were drawn. HINT: change rows one by one in the data module's "
                "transform_batch, or use AugmentationMultiplicity; a hook may look at a batch and no more."
            )
        return self.kept


def _looks(batch: Batch) -> list[tuple[Any, ...]]:
    """Returns what changes if torch writes to a tensor of a batch, or shows its memory in another way."""
    return [(version_of(t), address_of(t), t.shape, t.stride(), t.dtype) for t in batch]


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROBE_ROWS = 5
_PROBES = 8  # a hook may act only now and then
_OUTLIERS = (1e6, -1e6, float("nan"))


def transfer_problems(data: Any, methods: Sequence[str]) -> list[str]:
    """Returns the reason why a data module's hooks on a batch do not treat each row by itself, if there is one.

    Hooks of this project are known to do so. Other hooks are tried on random rows: one row is changed, and one is
    removed, and the other rows must stay as they are, in the order of the sample and with their labels and ids.

    Args:
        data: The data module.
        methods: The names of the hooks.
    """
    own = [name for name in methods if not defined_here(data, name)]
    if not own:
        return []
    name = f"{type(data).__name__}.{own[0]}"
    hint = "HINT: transform_batch changes rows one by one; AugmentationMultiplicity draws views of each example."
    if not hasattr(data, "made_up_rows"):
        return [f"{name} changes batches in a way of its own. HINT: derive from data_modules.PrivateDataModule."]
    try:
        with torch.random.fork_rng(devices=[]):
            reason = next(_mixtures(data), None)
    except Exception as error:
        if own == ["transform_batch"]:  # it fails in a step, too, where its message is withheld
            return []
        reason = f"fails on made-up rows with {type(error).__name__}"
    return [] if reason is None else [f"{name} {reason}. {hint}"]


def defined_here(thing: Any, name: str) -> bool:
    """Returns whether a class of this project or of Lightning defines an object's method."""
    if name in vars(thing):
        return False
    owner = next((kind for kind in type(thing).__mro__ if name in vars(kind)), object)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return owner is object or (file is not None and (is_own(file) or _is_lightnings(file)))


def _is_lightnings(file: str) -> bool:
    return Path(file).resolve().is_relative_to(Path(lightning.__file__).resolve().parent)


def _mixtures(data: Any) -> Iterator[str]:
    for seed in range(_PROBES):
        batch = data.made_up_rows(_PROBE_ROWS, torch.Generator().manual_seed(seed))
        whole = _arrived(data, batch)
        if not (isinstance(whole, tuple | list) and len(whole) == 3 and all(isinstance(t, Tensor) for t in whole)):
            yield "does not return (x, y, ids) for a batch of rows"
            return
        if any(len(part) != _PROBE_ROWS for part in whole) or not torch.equal(whole[2], batch[2]):
            yield "returns other rows than it was given, so that an example could count more than once"
            return
        if not _equal(_arrived(data, batch), whole):
            yield "does not give the same rows again: it draws at random, or keeps something of the rows before"
        row = seed % _PROBE_ROWS
        others = torch.arange(_PROBE_ROWS) != row
        rest = [part[others] for part in whole]
        for changed in _with_another(batch, row, _OUTLIERS[seed % len(_OUTLIERS)]):
            if not _equal([part[others] for part in _arrived(data, changed)], rest):
                yield "mixes examples: when one row of a batch is changed, other rows change with it"
        if not _equal(_arrived(data, tuple(part[others] for part in batch)), rest, rounded=True):
            yield "changes rows by the others in the batch, or by their number: without one row, the others change"


def _arrived(data: Any, batch: Sequence[Tensor]) -> Any:
    moved: Any = data.on_before_batch_transfer(tuple(part.clone() for part in batch), 0)
    moved = data.transfer_batch_to_device(moved, torch.device("cpu"), 0)
    return data.on_after_batch_transfer(moved, 0)


def _with_another(batch: Batch, row: int, outlier: float) -> Iterator[tuple[Tensor, ...]]:
    """Yields the batch with another row, and with another label."""
    x, y, ids = batch
    changed = x.clone()
    changed[row] = outlier if x.is_floating_point() else 255 - x[row]
    yield changed, y, ids
    label = y.clone()
    label[row] = 1 - label[row] if y.is_floating_point() or bool(y[row].lt(2).all()) else 0
    yield x, label, ids


def _equal(first: Sequence[Tensor], second: Sequence[Tensor], rounded: bool = False) -> bool:
    if [part.shape for part in first] != [part.shape for part in second]:
        return False
    if rounded:  # products over a different number of rows may be rounded differently
        pairs = zip(first, second, strict=True)
        return all(torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in pairs)
    return all(_same_bits(a, b) for a, b in zip(first, second, strict=True))
