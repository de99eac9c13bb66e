"""The release of sums while a backward pass runs: lipdp_lightning/mechanism/reductions.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.mechanism import reductions as module
from lipdp_lightning.mechanism.noise import StepNoise, Sum
from lipdp_lightning.mechanism.reductions import Overlap, buckets_of, release_

NOISE = StepNoise(bytes(range(32)), share=0.5)
DEVIATIONS = (1.0, 2.0, 0.5, 3.0)


class Step:
    """Four parameters, of which the third has no gradient, and what leaves the process."""

    def __init__(self, deviations: tuple[float, ...] = DEVIATIONS) -> None:
        self.deviations = deviations
        torch.manual_seed(0)
        self.parameters = [nn.Parameter(torch.randn(size)) for size in (5, 8, 3, 40)]
        self.sent: list[Tensor] = []
        planned = dict(zip(self.parameters, deviations, strict=True))
        self.overlap = Overlap(planned, 0.25, NOISE, self._begin, lambda parameter: None)

    def _begin(self, total: Tensor) -> Callable[[], object]:
        self.sent.append(total.clone())
        return lambda: total.mul_(2)  # another process with the same sum

    def backward(self, times: int = 1) -> None:
        used = [p for number, p in enumerate(self.parameters) if number != 2]
        for _ in range(times):
            sum((p.sin().sum() for p in used), start=torch.zeros(())).backward()

    def sums(self) -> list[Sum]:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        named = zip(self.parameters, self.deviations, strict=True)
        votes = Sum(torch.ones(2, dtype=torch.float64), 7.0, 0.25)
        return [*(Sum(p.grad, deviation, 0.25, 10.0) for p, deviation in named if p.grad is not None), votes]


@pytest.mark.parametrize("bucket", [1, 100, 1 << 20])
def test_the_release_and_what_is_sent_have_the_bits_of_one_sum(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET", bucket)
    plain, sent = Step(), list[Tensor]()
    plain.backward()
    expected = plain.sums()

    def reduce(total: Tensor) -> None:
        sent.append(total.clone())
        total.mul_(2)

    release_(expected, NOISE, reduce)
    own = Step()
    with own.overlap:
        own.backward()
        assert all(p.grad is None for p in own.parameters), "a hook would find a gradient without noise"
    own.overlap.check()
    found = own.sums()
    own.overlap.finish(found)
    assert all(torch.equal(a.values, b.values) for a, b in zip(found, expected, strict=True))
    assert torch.equal(torch.cat(own.sent).sort().values, sent[0].sort().values)
    assert len(own.sent) == {1: 5, 100: 3, 1 << 20: 2}[bucket]


def test_what_leaves_the_process_has_noise_in_every_entry() -> None:
    noisy, quiet = Step(), Step((0.0,) * 4)
    for one in (noisy, quiet):
        with one.overlap:
            one.backward()
        one.overlap.finish(one.sums())
    plain = torch.cat([p.detach().cos() * 0.25 for n, p in enumerate(quiet.parameters) if n != 2])
    values = torch.cat(quiet.sent[:-1])
    assert torch.allclose(values[values != 0].sort().values, plain.double().sort().values)
    assert bool((torch.cat(noisy.sent[:-1]) != values).all())


def test_a_gradient_in_two_parts_is_refused() -> None:
    own = Step()
    with pytest.raises(ValueError, match=r"added to after they were complete.*HINT"), own.overlap:
        own.backward(times=2)
    late = Step()
    with late.overlap:
        late.backward()
    late.backward()  # after the hooks are gone
    with pytest.raises(ValueError, match="3 parameters were added to"):
        late.overlap.check()


def test_hooks_are_gone_after_the_pass_even_if_it_fails() -> None:
    own = Step()
    with pytest.raises(RuntimeError, match="boom"), own.overlap:
        raise RuntimeError("boom")
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in own.parameters)


@pytest.mark.parametrize(
    ("sizes", "size", "expected"),
    [
        ([5, 8, 3, 40], 1, [[3], [2], [1], [0]]), ([5, 8, 3, 40], 300, [[3], [2, 1, 0]]),
        ([5, 8], 1 << 20, [[1, 0]]), ([], 1, []), ([4], 1, [[0]]),
    ],
)  # fmt: skip
def test_buckets_hold_every_parameter_once_from_the_last_on(sizes: Any, size: int, expected: Any) -> None:
    assert buckets_of(sizes, size) == expected
