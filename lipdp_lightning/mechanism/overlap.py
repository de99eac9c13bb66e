"""Adds a step's noisy sums up over processes while the backward pass that forms them still runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .noise import StepNoise, Sum, complete_, joined, write_back

BeginSum = Callable[[Tensor], Callable[[], object]]
"""Begins to sum a float64 tensor over all processes, in place, and returns what waits for the sum."""

BUCKET = 25 << 20  # bytes of float64 from which on a bucket is summed


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
