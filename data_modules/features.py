"""Serves fixed features of another data module's rows, computed once, with private means if they are wanted."""

from __future__ import annotations

import gc
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lipdp_lightning.data_modules.base import PrivateDataModule
from lipdp_lightning.data_modules.found_files import cache_root, refusal
from lipdp_lightning.data_modules.poisson import InMemoryRows, OnDevice, slices
from lipdp_lightning.features import FeatureExtractor
from lipdp_lightning.features.cache import KeptRows, Source, cached_features
from lipdp_lightning.privacy.statistics import Terms

SMALLEST_NORM = 1e-12
_PROBES = 3
_PIECE = 1 << 18  # numbers processed at a time, which fit into the processor's cache


class Features(PrivateDataModule):
    """Rows of ``data`` seen through one or several fixed extractors; declarations, N and held-out rows are those of
    ``data``.

    What one example becomes depends on that example, on public constants, and on the released means:

    1. each extractor's features are scaled to norm 1;
    2. with ``private_mean``, the noisy mean of those unit vectors over the training rows is subtracted and the result
       is scaled to norm 1 again. The mean is released once per run, by the Strategy, and is in the plan's ledger:
       adding or removing an example moves the sum of unit vectors by at most 1;
    3. the blocks are joined, block k times sqrt(weight_k / sum of weights), so that the whole has norm 1.

    Features are computed once and kept in ``cache_dir``, readable by their owner only, since features of private rows
    are private.

    Args:
        data: the data module whose rows, split and labels are used.
        extractor: one extractor, or a list of extractors whose features are joined.
        private_mean: the noise multiplier of each block's mean, one for all or one per block; None removes no mean.
        weights: the share of each block in the squared norm; None for equal shares.
        cache_dir: the folder of the cache; None for the folder `features` of LIPDP_CACHE, or of ~/.cache/lipdp.
        batch_size: rows per call of the extractor.
        device: the device that computes features.
        eval_batch_size: rows per batch in validation, test and prediction.
        on_device: whether to pin batches in memory, for training on an accelerator.
    """

    input_bound = 1.0

    def __init__(
        self,
        data: PrivateDataModule,
        extractor: FeatureExtractor | list[FeatureExtractor],
        private_mean: float | list[float] | None = None,
        weights: list[float] | None = None,
        cache_dir: str | None = None,
        batch_size: int = 256,
        device: str = "cpu",
        eval_batch_size: int = 1024,
        on_device: OnDevice = "auto",
    ) -> None:
        self.data = data
        self.blocks = list(extractor) if isinstance(extractor, list | tuple) else [extractor]
        noise = _noise(private_mean, len(self.blocks))
        shares = [1.0] * len(self.blocks) if weights is None else [float(w) for w in weights]
        if problems := _problems(data, self.blocks, noise, shares, batch_size):
            raise refusal(f"Features: {'; '.join(problems)}", "see the arguments of data_modules.Features")
        super().__init__(data.validation_fraction, data.split, eval_batch_size, on_device)
        self.task, self.num_classes, self.target_bound = data.task, data.num_classes, data.target_bound
        self.declared_size, self.grouping, self.class_names = data.declared_size, data.grouping, data.class_names
        self.test_fraction = data.test_fraction
        self.factors = [math.sqrt(share / sum(shares)) for share in shares]
        sizes = [math.prod(block.feature_shape) for block in self.blocks]
        self.input_shape = self.blocks[0].feature_shape if len(sizes) == 1 else (sum(sizes),)
        self.labels = [f"mean of {type(b).__name__} features {i}" for i, b in enumerate(self.blocks, 1)]
        self.preliminary = tuple(zip(self.labels, noise, strict=True)) if noise else ()
        self.cache_dir = cache_root() / "features" if cache_dir is None else Path(cache_dir).expanduser()
        self.batch_size, self.device = batch_size, device
        self._means: list[Tensor] = []
        self._computed: dict[str, tuple[list[KeptRows], Tensor]] = {}

    @property
    def dataset_size(self) -> int:
        return self.data.dataset_size

    def in_units(self, targets: Tensor) -> Tensor:
        return self.data.in_units(targets)

    def declarations(self) -> list[str]:
        lines = [f"features of {type(self.data).__name__}: {', '.join(map(repr, self.blocks))}; each of norm 1"]
        if len(self.blocks) > 1:
            lines.append(f"joined with factors {', '.join(f'{factor:.4g}' for factor in self.factors)}")
        return [*self.data.declarations(), *lines]

    # ---- set-up

    def setup(self, stage: str | None = None) -> None:
        """Computes the features, or opens them; rows exist as soon as the released means are known."""
        if self._computed:
            return
        self.data.setup(stage)
        for block in self.blocks:
            block.check_frozen()
            _check_rows_apart(block)
        train, validation, test = self.data._train, self.data._validation, self.data._test
        assert train is not None
        self._groups = self.data._groups
        found = {"train": self._features(train)}
        if test is not None:
            found["test"] = self._features(test)
        if validation is not None:
            found["validation"] = found["test"] if validation is test else self._features(validation)
        self._computed = found
        if not self.preliminary:
            self._assemble()

    def _features(self, rows: InMemoryRows) -> tuple[list[KeptRows], Tensor]:
        digest = hashlib.sha256(repr((self.data.scale, self.data.offset)).encode())
        rows.digest_into(digest)
        source = Source(len(rows), digest.digest(), lambda piece: self.data.transform_batch(rows[piece][0]))
        blocks = [cached_features(self.cache_dir, b, source, self.batch_size, self.device) for b in self.blocks]
        return blocks, torch.cat([rows[piece][1] for piece in slices(len(rows), rows.x)])

    def _assemble(self) -> None:
        """Assembles the rows as the network sees them; rows with other means are freed first, so that memory holds one
        set.
        """
        self._train = self._validation = self._test = None
        gc.collect()  # a finished trainer still holds its loaders in a reference cycle
        parts = {id(part): part for part in self._computed.values()}  # test rows may also be the validation rows
        made = {name: InMemoryRows(self._joined(part[0]), part[1]) for name, part in parts.items()}
        self._train = made[id(self._computed["train"])]
        self._validation, self._test = (
            made[id(self._computed[name])] if name in self._computed else None for name in ("validation", "test")
        )
        self._fingerprint = None

    def _joined(self, blocks: Sequence[KeptRows]) -> Tensor:
        sizes = [math.prod(block.shape[1:]) for block in blocks]
        out = torch.empty(len(blocks[0]), sum(sizes), dtype=torch.float32)
        columns = torch.split(out, sizes, dim=1)
        for place, block in enumerate(blocks):
            for piece, rows in _unit_rows(block):
                if self.preliminary:
                    rows = _unit(rows.sub_(self._means[place]))
                columns[place][piece] = rows.mul_(self.factors[place])
        return out.reshape(len(out), *self.input_shape)

    def _ready(self) -> InMemoryRows:
        self.setup()
        if self._train is None:
            raise refusal(
                "Features: the private means that its rows need have not been released yet",
                "train first; afterwards `lipdp test`, or a Trainer given ckpt_path, takes them from the checkpoint",
            )
        return self._train

    # ---- private means

    def statistic_terms(self, label: str) -> Terms:
        """Returns the unit vectors of a block, one per training row."""
        self.setup()
        place = self.labels.index(label)
        block = self._computed["train"][0][place]
        return Terms(math.prod(self.blocks[place].feature_shape), (rows for _, rows in _unit_rows(block)))

    def use_statistics(self, values: Mapping[str, Tensor]) -> None:
        """Takes the released means, and prepares the rows with them."""
        if not self.preliminary:
            return
        sizes = {label: math.prod(b.feature_shape) for label, b in zip(self.labels, self.blocks, strict=True)}
        if {label: value.numel() for label, value in values.items()} != sizes:
            raise refusal(
                f"Features: the released means {', '.join(values)} are not those of its extractors, "
                f"{', '.join(self.labels)}",
                "use the data module of the run that released them",
            )
        means = [values[label].to(torch.float32) for label in self.labels]
        if self._means and all(map(torch.equal, means, self._means)):
            return
        self._means = means
        self.setup()
        self._assemble()


def _unit(rows: Tensor) -> Tensor:
    """Scales each row to norm 1; a zero row stays zero."""
    return rows.div_(torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(SMALLEST_NORM))


def _unit_rows(block: KeptRows) -> Iterator[tuple[slice, Tensor]]:
    """Yields the rows of a block as unit vectors, some at a time; entries that are not finite count as zero."""
    height = max(1, _PIECE // max(1, math.prod(block.shape[1:])))
    for start in range(0, len(block), height):
        piece = slice(start, min(start + height, len(block)))
        yield piece, _unit(torch.nan_to_num(block[piece].flatten(1), nan=0.0, posinf=0.0, neginf=0.0))


def _noise(private_mean: float | list[float] | None, blocks: int) -> list[float]:
    if private_mean is None:
        return []
    if isinstance(private_mean, list | tuple):
        return [float(level) for level in private_mean]
    return [float(private_mean)] * blocks


def _problems(
    data: PrivateDataModule, blocks: list[FeatureExtractor], noise: list[float], shares: list[float], batch_size: int
) -> list[str]:
    problems = []
    if not blocks:
        problems.append("there is no extractor")
    for block in blocks:
        if tuple(block.input_shape) != tuple(data.input_shape):
            problems.append(
                f"{type(block).__name__} takes rows of shape {tuple(block.input_shape)}, and those of "
                f"{type(data).__name__} have {tuple(data.input_shape)}"
            )
    if noise and len(noise) != len(blocks):
        problems.append(f"private_mean has {len(noise)} noise multipliers for {len(blocks)} extractors")
    if not all(math.isfinite(level) and level > 0 for level in noise):
        problems.append(f"private_mean {noise}: a mean of private rows needs noise, a multiplier of about 10")
    if noise and data.samples_groups:
        problems.append("private_mean sums all rows of a group, and the groups of this data module are drawn as units")
    if len(shares) != len(blocks) or not all(math.isfinite(share) and share > 0 for share in shares):
        problems.append(f"weights {shares}: one positive number for each of {len(blocks)} extractors")
    if data.preliminary:
        problems.append(f"{type(data).__name__} releases statistics of its own")
    if batch_size < 1:
        problems.append(f"batch_size {batch_size} is not positive")
    return problems


def _check_rows_apart(block: FeatureExtractor) -> None:
    """Refuses an extractor whose features of one example change with the others of its batch, as tested on noise."""
    probe = torch.rand(_PROBES, *block.input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = block(probe)
        apart = torch.cat([block(probe[i : i + 1]) for i in range(_PROBES)])
    if not torch.allclose(together, apart, rtol=1e-2, atol=1e-3 * float(together.abs().max())):
        raise refusal(
            f"{type(block).__name__} gives an example other features when other examples are beside it, so one private "
            "row would change the features of all",
            "use an extractor that maps each example by itself: no statistics over the batch",
        )
