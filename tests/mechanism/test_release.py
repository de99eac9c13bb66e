"""A release in one loop: every entry has the noise of its own position, with the bits of the formula in numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.mechanism import release_loop
from lipdp_lightning.mechanism.flat import FlatGradients, Segments
from lipdp_lightning.mechanism.noise import NoiseSource
from lipdp_lightning.mechanism.noisy_sums import NoisySums
from lipdp_lightning.mechanism.place import Place
from lipdp_lightning.mechanism.release import BLOCK, Release
from lipdp_lightning.privacy import normals
from lipdp_lightning.privacy.grid import grid_shift

SECRET = bytes(range(16))
SHAPES: list[tuple[int, ...]] = [(300, 301), (1,), (0,), (64, 3, 5, 5), (70_001,), (0, 3), (33, 100), (17,)]
LAST = torch.channels_last


@dataclass
class Case:
    """Gradients of both types, one in another layout and one that is missing, and groups that end within them."""

    parameters: list[nn.Parameter]
    apart: dict[int, Tensor]
    votes: Tensor
    groups: list[int]
    deviations: list[float]
    share: float = 1 / 3
    divisor: float = 57.0


def case(votes: int, with_apart: bool = False) -> Case:
    torch.manual_seed(votes)
    parameters = []
    for index, shape in enumerate(SHAPES):
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64 if (index + votes) % 3 == 0 else torch.float32))
        if index != 1:
            parameter.grad = torch.randn(shape, dtype=parameter.dtype)
            if len(shape) == 4:
                parameter.grad = parameter.grad.contiguous(memory_format=LAST)
        parameters.append(parameter)
    apart = {id(p): torch.randn(p.shape, dtype=torch.float64) for p in parameters[::2] if with_apart}
    groups = [1, normals.CHUNK - 5, 0, 40_000, BLOCK + 1]
    groups += [sum(p.numel() for p in parameters) - sum(groups)]
    return Case(
        parameters, apart, torch.randn(votes, dtype=torch.float64), groups + [1] * votes,
        [0.5, 0.0, 1.0, 2.0, 0.3, 3.7] + [1.5] * votes,
    )  # fmt: skip


def formula(c: Case, secure: bool) -> list[np.ndarray[Any, Any]]:
    """Every product, sum and quotient rounded by itself, in float64, sums to their grid, and then to the own type."""
    drawn = NoiseSource(SECRET, secure=secure).standard(3, c.groups, 0, 1, "distributed", bytes(32)).numpy()
    noise = drawn * np.repeat(np.array(c.deviations), c.groups)
    shifts = np.repeat(np.array([grid_shift(deviation) for deviation in c.deviations]), c.groups)
    starts = list(itertools.accumulate([p.numel() for p in c.parameters], initial=0))
    found = []
    for parameter, start, stop in zip(c.parameters, starts, starts[1:], strict=False):
        own = noise[start:stop]
        if id(parameter) in c.apart:
            own = own + c.apart[id(parameter)].reshape(-1).numpy() * c.share
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        values = gradient.detach().reshape(-1).numpy()
        sums = own + c.share * values.astype(np.float64)
        shift = shifts[start:stop]
        found.append((((sums + shift) - shift) * (1.0 / c.divisor)).astype(values.dtype))
    shift = shifts[starts[-1] :]
    return [*found, ((c.votes.numpy() * c.share + noise[starts[-1] :]) + shift) - shift]


def released(c: Case, threads: int, secure: bool, grid: bool = True) -> list[np.ndarray[Any, Any]]:
    sums = NoisySums(c.parameters, NoiseSource(SECRET, secure=secure, threads=threads), Place(), grid=grid)
    assert not sums.whole
    strides = [None if p.grad is None else p.grad.stride() for p in c.parameters]
    sums.begin(3, c.groups, bytes(32), c.deviations)
    votes = sums.release_(c.deviations, c.apart, c.votes, c.share, c.divisor, None)
    sums.close()
    for parameter, stride in zip(c.parameters, strides, strict=True):
        assert parameter.grad is not None and stride in (None, parameter.grad.stride())
    return [p.grad.reshape(-1).numpy() for p in c.parameters] + [votes.numpy()]  # type: ignore[union-attr]


def has_the_bits_of_the_formula(threads: int, votes: int = 3, with_apart: bool = False, secure: bool = False) -> bool:
    expected = formula(case(votes, with_apart), secure)
    found = released(case(votes, with_apart), threads, secure)
    assert len(expected) == len(found) == len(SHAPES) + 1
    alike = [a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(expected, found, strict=True)]
    return all(alike)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("with_apart", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_release_has_the_bits_of_the_formula(threads: int, with_apart: bool, secure: bool) -> None:
    for votes in range(4):  # odd and even numbers of entries, and either type for every parameter
        assert has_the_bits_of_the_formula(threads, votes, with_apart, secure)


def test_one_entry_and_none() -> None:
    for size in (0, 1, 2):
        parameter = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        none = torch.zeros(0, dtype=torch.float64)
        c = Case([parameter], {}, none, [size], [2.0])
        expected = formula(c, secure=False)
        assert expected[0].tobytes() == released(c, 2, secure=False)[0].tobytes() and len(expected[0]) == size


class Wrong(Release):
    """A table of segments that is changed before the first words come."""

    change: Callable[[Wrong], None]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        type(self).change(self)


def forgets_the_last(release: Wrong) -> None:
    release._segments, release._numbers = release._segments[:-1].copy(), release._numbers[:-1].copy()


def begins_one_later(release: Wrong) -> None:
    release._segments[5, release_loop.FIRST] += 1


def ends_one_earlier(release: Wrong) -> None:
    release._segments[0, release_loop.LAST] -= 1


def deviation_of_the_next_group(release: Wrong) -> None:
    release._numbers[:-1, release_loop.DEVIATION] = release._numbers[1:, release_loop.DEVIATION].copy()


def no_sums_apart(release: Wrong) -> None:
    release._segments[:, release_loop.APART] = 0


def no_grid(release: Wrong) -> None:
    release._numbers[:, release_loop.SHIFT] = 0


def grid_of_the_next_group(release: Wrong) -> None:
    release._numbers[:-1, release_loop.SHIFT] = release._numbers[1:, release_loop.SHIFT].copy()


CHANGES = [
    forgets_the_last, begins_one_later, ends_one_earlier, deviation_of_the_next_group, no_sums_apart, no_grid,
    grid_of_the_next_group,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_wrong_table_of_segments_fails_the_same_check(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = type("Broken", (Wrong,), {"change": staticmethod(change)})
    monkeypatch.setattr("lipdp_lightning.mechanism.noisy_sums.Release", broken)
    assert not has_the_bits_of_the_formula(2, with_apart=True)


class ForgetsThePlace(Release):
    """Adds every piece where the first one belongs."""

    def complete(self, start: int, words: normals.Words) -> None:
        super().complete(0, words)


class MissesAPart(Release):
    """As a loop that divides its work among threads that it was not given."""

    def complete(self, start: int, words: normals.Words) -> None:
        draws = np.empty((2, len(words), BLOCK))
        release_loop.release.compiled(0, 2, words, start, self._segments, self._numbers, draws)


class DoesAPartTwice(Release):
    def complete(self, start: int, words: normals.Words) -> None:
        super().complete(start, words)
        MissesAPart.complete(self, start, words)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [ForgetsThePlace, MissesAPart, DoesAPartTwice])
def test_words_that_are_lost_or_used_twice_fail_the_same_check(
    kind: type[Release], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lipdp_lightning.mechanism.noisy_sums.Release", kind)
    assert not has_the_bits_of_the_formula(1)


def test_every_entry_has_one_draw_of_its_own() -> None:
    """Of deviation 1 on gradients of zero: no two entries are alike, before they are rounded to the grid."""
    parameters = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (70_001, 1, 0, 199_998)]
    sizes = [p.numel() for p in parameters]
    c = Case(parameters, {}, torch.zeros(0, dtype=torch.float64), sizes, [1.0] * 4, 1.0, 1.0)
    values = np.concatenate(released(c, 3, secure=False, grid=False))
    assert len(np.unique(values)) == len(values) == 270_000
    assert abs(values.std() - 1) < 0.01


@pytest.mark.parametrize(
    ("groups", "deviations"), [([4], [1.0]), ([6], [1.0]), ([2, 3], [1.0]), ([5], [1.0, 1.0])], ids=str
)
def test_groups_that_leave_an_entry_out_are_refused(groups: Sequence[int], deviations: Sequence[float]) -> None:
    gradients, votes = FlatGradients([nn.Parameter(torch.zeros(4))]), torch.zeros(1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="without noise"):
        Release(gradients, {}, votes, 1.0, 1.0, groups, deviations)


def test_pieces_are_held_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a piece is used again: nothing as long as the vector is ever allocated."""
    seen: list[tuple[int, int, int]] = []
    count = 5 * normals.CHUNK + 3
    source = NoiseSource(SECRET)
    for start, words in source.words(0, [count], 0, 1, "distributed", bytes(32)):
        seen.append((start, words.ctypes.data, words.size))
    assert [start for start, _, _ in seen] == list(range(0, count, normals.CHUNK))
    assert len({place for _, place, _ in seen}) == 1 and max(size for _, _, size in seen) == normals.CHUNK


def test_the_memory_of_a_loop_is_that_of_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """More would be written behind its end: OpenMP gives no more threads than it is asked for."""
    asked: list[tuple[int, int]] = []
    loop = release_loop.release
    shared = loop.shared

    def recorded(threads: int, *arguments: Any) -> None:
        asked.append((threads, len(arguments[-1])))
        assert arguments[-1].shape[1:] == (len(arguments[0]), BLOCK)
        shared(threads, *arguments)

    monkeypatch.setattr(loop, "shared", recorded)
    for secure in (False, True):
        assert has_the_bits_of_the_formula(3, secure=secure)
    assert asked and all(threads <= rows for threads, rows in asked)


def test_segments_meet_in_every_position_once() -> None:
    owners: Mapping[tuple[int, ...], list[int]] = {
        (3, 0, 5, 1): [0, 0, 0, 2, 2, 2, 2, 2, 3], (0, 9): [1] * 9, (9, 0): [0] * 9,
        (1, 2, 6, 0, 0): [0, 1, 1] + [2] * 6,
    }  # fmt: skip
    for (sizes, own), (others, of_other) in itertools.product(owners.items(), repeat=2):
        found = list(Segments(sizes).meet(Segments(others)))
        assert [i for i, _, first, last in found for _ in range(first, last)] == own
        assert [k for _, k, first, last in found for _ in range(first, last)] == of_other
        assert [at for *_, first, last in found for at in range(first, last)] == list(range(9))
