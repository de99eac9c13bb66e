"""Adds a step's noisy sums up over processes, after the backward pass that forms them or while it still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .noise import StepNoise, Sum, check_deviations, complete_

Reduce = Callable[..., None]
"""Sums a float64 tensor over all processes, in place; a rank as second argument is the only one that needs the sum."""

BeginSum = Callable[[Tensor], Callable[[], object]]
"""Begins to sum a float64 tensor over all processes, in place, and returns what waits for the sum."""

BUCKET = 25 << 20  # bytes of float64 from which on a bucket is summed


def owners_of(sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Returns the rank that owns each parameter: the largest first, each to the rank that has least so far."""
    loads, owners = [0] * world_size, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owners[index] = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += sizes[index]
    return tuple(owners)


def release_(
    sums: Sequence[Sum],
    noise: StepNoise,
    reduce: Reduce | None = None,
    replicated: bool = False,
    owners: Sequence[int] = (),
    rank: int = 0,
) -> None:
    """Replaces each sum by its release, grid(sum over processes + noise) / divisor, in place.

    What a process hands over is on the grid already, so that the sum over processes is exact, on the grid, and the same
    in any order.

    Args:
        sums: The sums of a step; each is replaced by its release.
        noise: The noise of this process in this step.
        reduce: Sums a tensor over processes; None if there is one process.
        replicated: Whether the noise is added to the reduced sum rather than to each process's part of it.
        owners: The ranks that receive the releases of the first sums; all ranks receive those of the others. A rank
            leaves a sum that it does not own as it was.
        rank: The rank of this process.

    Raises:
        ValueError: if a deviation is not finite and at least 0.
    """
    numbered = dict(enumerate(sums))
    if reduce is None:
        complete_(numbered, noise)
        return
    check_deviations(sums)  # on every process, before anything is sent
    for owner in sorted(set(owners)):
        own = {number: numbered.pop(number) for number, of in enumerate(owners) if of == owner}
        _release_together(own, noise, lambda whole, to=owner: reduce(whole, to), replicated, owner == rank)
    _release_together(numbered, noise, reduce, replicated)


def _release_together(
    sums: Mapping[int, Sum], noise: StepNoise, reduce: Reduce, replicated: bool, is_mine: bool = True
) -> None:
    """Releases the sums of these numbers by one reduction; who does not need them only takes part in it."""
    whole, noisy = joined(sums)
    if not replicated:
        complete_(noisy, noise)
    reduce(whole)
    if not is_mine:
        return
    if replicated:
        complete_(noisy, noise)
    write_back(sums, noisy)


def joined(sums: Mapping[int, Sum]) -> tuple[Tensor, dict[int, Sum]]:
    """Returns the totals of these sums as one vector in float64, and each part of it as a sum of the same number."""
    whole = torch.cat([one.total() for one in sums.values()])
    segments = whole.split_with_sizes([one.values.numel() for one in sums.values()])
    return whole, {number: Sum(part, sums[number].deviation) for number, part in zip(sums, segments, strict=True)}


def write_back(sums: Mapping[int, Sum], noisy: Mapping[int, Sum]) -> None:
    """Writes the noisy sums over all processes, divided, over the values of the sums."""
    for number, one in sums.items():
        one.values.copy_((noisy[number].values * (1.0 / one.divisor)).view(one.values.shape))


class Overlap:
    """The release of one step whose noise is known before its last backward pass; the pass runs within the context.

    As soon as the gradients of a bucket of parameters are complete, this process's share of the noise is added to them,
    and their sum over processes begins.

    Guarantee: a gradient is taken out of ``grad`` when it is complete, so that no later hook finds it there, and what
    leaves the process is a sum with this process's share of the noise, on the public grid. The release has the bits of
    ``release_`` with the same noise: sums of multiples of the grid are exact, however they are cut into buckets. Every
    process sums the same buckets in the same order, also where its share of the sample is empty.

    Args:
        deviations: The standard deviation of the noise on each parameter's sum, in the order of the step's sums.
        share: The factor that each sum is multiplied by before noise is added.
        noise: The noise of this process in this step.
        begin_sum: Begins a sum over processes.
        complete: Adds to ``grad`` what earlier micro-batches have left of the sum.
    """

    def __init__(
        self, deviations: Mapping[nn.Parameter, float], share: float, noise: StepNoise, begin_sum: BeginSum,
        complete: Callable[[nn.Parameter], None],
    ) -> None:  # fmt: skip
        self._parameters, self._deviations, self._share = list(deviations), deviations, share
        self._noise, self._begin_sum, self._add_earlier = noise, begin_sum, complete
        self.hooks = len(self._parameters)
        """The number of hooks that the context attaches."""
        self._left = buckets_of([p.numel() for p in deviations], BUCKET)
        self._held: dict[int, Sum] = {}
        self._taken: set[int] = set()
        self._begun: list[tuple[Mapping[int, Sum], Callable[[], object]]] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Overlap:
        for number, parameter in enumerate(self._parameters):
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(lambda own, number=number: self._take(number, own))
            )
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        for parameter in self._parameters:
            if not parameter._post_accumulate_grad_hooks:  # an empty dictionary is left
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]  # as it was certified

    def check(self) -> None:
        """Raises ValueError if a gradient was added after it had been taken."""
        late = [n for n in self._taken if self._parameters[n].grad is not None]
        if late:
            raise added_late(late)

    @torch.no_grad()
    def finish(self, sums: Sequence[Sum]) -> None:
        """Replaces each sum by its release; the values of those that were taken are overwritten."""
        self._held |= {number: one for number, one in enumerate(sums) if number not in self._taken}
        self._left.append([number for number in range(len(self._parameters), len(sums))])  # votes
        self._send()
        assert not self._left and not self._held
        for noisy, wait in self._begun:
            wait()
            write_back({number: sums[number] for number in noisy}, noisy)

    @torch.no_grad()
    def _take(self, number: int, parameter: nn.Parameter) -> None:
        if number in self._taken:
            raise added_late([number])
        self._add_earlier(parameter)
        assert parameter.grad is not None
        self._held[number] = Sum(parameter.grad, self._deviations[parameter], self._share)
        self._taken.add(number)
        parameter.grad = None
        self._send()

    def _send(self) -> None:
        """Begins the sums of all buckets that are complete and have none before them that is not."""
        while self._left and all(number in self._held for number in self._left[0]):
            whole, noisy = joined({number: self._held.pop(number) for number in self._left.pop(0)})
            complete_(noisy, self._noise)
            self._begun.append((noisy, self._begin_sum(whole)))


def buckets_of(sizes: Sequence[int], size: int) -> list[list[int]]:
    """Returns the numbers of parameters of so many entries in buckets, the last ones first, as a backward pass goes.

    Args:
        sizes: The number of entries of each parameter.
        size: The number of bytes of float64 from which on a bucket is complete.
    """
    buckets: list[list[int]] = [[]]
    held = 0
    for number in reversed(range(len(sizes))):
        buckets[-1].append(number)
        held += 8 * sizes[number]
        if held >= size and number:
            buckets.append([])
            held = 0
    return buckets if buckets[0] else []


def added_late(numbers: Sequence[int]) -> ValueError:
    """Returns the error for parameters whose gradient came in more than one part."""
    return ValueError(
        f"the gradients of {len(numbers)} parameters were added to after they were complete, and one example's bound "
        "does not cover that. HINT: call no backward() in a hook, and use no reentrant checkpointing."
    )
