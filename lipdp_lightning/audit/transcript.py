"""Records the releases of a run, the inputs of each release, and everything else that can be seen of the run.

A proof of privacy for an adaptive run goes release by release: given everything that was released before, the next
release is a mechanism whose input moves by at most its sensitivity when one example joins. Two transcripts show whether
this holds for one pair of data sets, if the second run was given the outputs of the first: everything that its noise
could change is then equal, and what differs besides the inputs of mechanisms follows the private data.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_FAULTS = 20


@dataclass(frozen=True)
class Release:
    """One call of a mechanism.

    Attributes:
        name: the name of the call, unique within a run.
        inputs: the values that noise is added to, summed over all processes, flat and in float64.
        deviations: the standard deviation of the noise at every entry of ``inputs``.
        multiplier: the noise multiplier that the ledger counts this call with.
        outputs: the released values.
    """

    name: str
    inputs: Tensor
    deviations: Tensor
    multiplier: float
    outputs: tuple[Tensor, ...]

    def moved(self, other: Release) -> float:
        """Returns how far apart two inputs are, over the sensitivity that the ledger assumes; infinite for NaN."""
        if self.inputs.shape != other.inputs.shape:
            return math.inf
        apart = self.inputs - other.inputs
        without = torch.where(apart == 0, 0.0, math.inf).to(apart.dtype)  # entries without noise
        whitened = torch.where(self.deviations > 0, apart / self.deviations.clamp_min(1e-300), without)
        size = self.multiplier * float(whitened.norm())
        return math.inf if math.isnan(size) else size


@dataclass(frozen=True)
class Transcript:
    """The releases of a run, and (name, value) of everything else that can be seen of it, each in order."""

    releases: tuple[Release, ...]
    shown: tuple[tuple[str, str], ...]

    def outputs(self) -> dict[str, tuple[Tensor, ...]]:
        return {release.name: release.outputs for release in self.releases}


@dataclass(frozen=True)
class Comparison:
    """Lists what differs between two transcripts.

    Attributes:
        moved: by release, the distance of the inputs over the sensitivity that is assumed.
        faults: sentences, each about something that the noise does not cover; none for a correct run.
    """

    moved: Mapping[str, float]
    faults: tuple[str, ...]

    @property
    def largest(self) -> float:
        return max(self.moved.values(), default=0.0)


def compare(first: Transcript, second: Transcript, touched: Collection[str]) -> Comparison:
    """Compares a run with one on a neighbouring data set that was given the outputs of the first.

    Args:
        first: the transcript of the run whose outputs are its own.
        second: the transcript of the run that was given them.
        touched: the names of the releases that the differing example takes part in; no other input may move.
    """
    faults = _differences("releases", [r.name for r in first.releases], [r.name for r in second.releases])
    others = {release.name: release for release in second.releases}
    moved = {r.name: r.moved(others[r.name]) for r in first.releases if r.name in others}
    for name, size in moved.items():
        if not size <= 1:
            faults.append(f"{name}: the input moves by {size:.4g} times the sensitivity that its noise is made for.")
        elif size > 0 and name not in touched:
            faults.append(f"{name}: the input moves by {size:.4g} sensitivities, and the example takes no part in it.")
    return Comparison(moved, tuple(faults + _shown_faults(first.shown, second.shown)))


def _shown_faults(first: Sequence[tuple[str, str]], second: Sequence[tuple[str, str]]) -> list[str]:
    faults = _differences("shows", [name for name, _ in first], [name for name, _ in second])
    pairs = zip(first, second, strict=False)
    different = [f"{a[0]} is {a[1]} with the example and {b[1]} without." for a, b in pairs if a[0] == b[0] and a != b]
    more = len(different) - MOST_FAULTS
    return faults + different[:MOST_FAULTS] + ([f"{more} further values differ."] if more > 0 else [])


def _differences(verb: str, first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Returns one sentence about the first place at which two lists of names differ."""
    if list(first) == list(second):
        return []
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    here, there = (repr(names[same]) if same < len(names) else "nothing more" for names in (first, second))
    return [
        f"One run {verb} {len(first)} things and the other {len(second)}; after the first {same} it is {here} with the "
        f"example and {there} without."
    ]


def text_of(value: Any) -> str:
    """Returns numbers and words as they are, and a digest of tensors; equal texts mean equal bits."""
    if isinstance(value, Tensor):
        if value.numel() == 1:
            return f"{value.item()!r} {value.dtype}"
        kept = value.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{kept.dtype} {tuple(kept.shape)}".encode())
        digest.update(kept.reshape(-1).view(torch.uint8).numpy().tobytes())
        return f"a tensor {digest.hexdigest()[:16]}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {text_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(text_of, value)) + "]"
    return repr(value)
