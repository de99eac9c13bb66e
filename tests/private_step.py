"""Networks, plans and one private step, as the Strategy drives them but without a Trainer around."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lipdp_lightning.bounds.certifier import Certifier
from lipdp_lightning.bounds.losses import Loss
from lipdp_lightning.kernels import normals as normals_module
from lipdp_lightning.layers import MaxMin
from lipdp_lightning.layers.cotangents import attach_cotangent_clips
from lipdp_lightning.mechanism.noise import Place, Sum
from lipdp_lightning.mechanism.scaling import StepNumbers
from lipdp_lightning.mechanism.step import Mechanism
from lipdp_lightning.norms.follow import Follower
from lipdp_lightning.privacy.plan import PrivacyPlan
from lipdp_lightning.training import PrivateModule
from lipdp_lightning.training.set_up import matching_modules

SECRET = bytes(range(16))
Batch = tuple[Tensor, Tensor, Tensor]
Example = tuple[Tensor, Tensor]


def make_plan(**options: Any) -> PrivacyPlan:
    """A small plan; what a test does not name has a value of its own, unlike the others."""
    chosen: dict[str, Any] = {
        "dataset_size": 1000, "expected_batch_size": 20, "steps": 50, "noise_multiplier": 0.8, "delta": 1e-5,
        "accountant": "rdp", "scaling": "worst_case", "allocation": "global",
    } | options  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PrivacyPlan.from_dict(chosen)


class Noiseless(Mechanism):
    """The whole mechanism, its noise set aside and its sum not normalised: what is released, to the last bit.

    Votes on tracked radii are kept for the test to read, and the radii stay where they are.
    """

    votes: Tensor | None = None

    def _sums(self, numbers: StepNumbers) -> list[Sum]:
        return [replace(one, deviation=0.0, divisor=1.0) for one in super()._sums(numbers)]

    def _learn(self, numbers: StepNumbers, noisy_votes: Tensor) -> None:
        if numbers.votes:
            self.votes = noisy_votes.clone()


Draw = Callable[[int, int, int], Tensor]


@contextmanager
def drawn_otherwise(change: Callable[[Draw, int, int, int], Tensor]) -> Iterator[None]:
    """Changes the normals of every release: ``change`` is given the true draw, and number of sum, start and count."""
    own = normals_module.normals

    def changed(key: bytes, stream: int, start: int, count: int, samples: int = 1) -> Tensor:
        return change(lambda n, at, length: own(key, n * samples, at, length, samples), stream // samples, start, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normals_module, "normals", changed)
        yield


class Harness:
    """A PrivateModule and its Mechanism; ``release`` is one step on a batch, in micro-batches."""

    def __init__(
        self,
        network: nn.Module,
        input_shape: tuple[int, ...],
        plan: PrivacyPlan,
        *,
        loss: str | Loss = "cross_entropy",
        input_bound: float = 1.0,
        kind: type[Mechanism] = Noiseless,
        chunks: int = 1,
        secret: bytes = SECRET,
        context: bytes = b"",
        place: Place | None = None,
        project: bool = True,
        grid: bool = True,
    ) -> None:
        self.module = PrivateModule(network, loss, input_bound=input_bound)
        self.module.clip_loss(plan.loss_clip)
        self.plan, self.chunks, self.input_shape = plan, chunks, input_shape
        clips = matching_modules(self.module.network, plan.cotangent_clip)
        certifier = Certifier(
            self.module.network, input_shape, input_bound, self.module.loss,
            norms=Follower(), cotangent_caps=clips,
        )  # fmt: skip
        attach_cotangent_clips(self.module.network, clips)
        self.mechanism = kind(self.module.network, certifier, plan, secret, place=place, context=context, grid=grid)
        if project:
            self.mechanism.project_()
        strategy = SimpleNamespace(mechanism=self.mechanism, dropout_key=lambda layer: 7919 * layer + 1, clipper=None)
        self.module.trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=chunks)

    def accumulate(self, batch: Batch, step: int = 0) -> None:
        """Forward and backward of all micro-batches, with the division that Lightning's loop makes."""
        self.module.zero_grad(set_to_none=True)
        for chunk in range(self.chunks):
            part = tuple(t[chunk :: self.chunks] for t in batch)
            self.mechanism.begin_step(step)
            loss = self.module.training_step(part, chunk)
            (loss / self.chunks).backward()

    def release(self, batch: Batch, step: int = 0) -> dict[str, Tensor]:
        """What the step releases, one float64 vector for each group."""
        self.accumulate(batch, step)
        self.mechanism.privatize_(step)
        return self.gradients()

    def gradients(self) -> dict[str, Tensor]:
        """The sums in ``grad``, and what a scaling still keeps apart from it."""
        named, apart = dict(self.module.network.named_parameters()), self.mechanism.scaling.take_sums()
        return {
            group.name: torch.cat([_gradient(named[n], apart).flatten() for n in group.parameters])
            for group in self.mechanism.certificate.groups
        }


def _gradient(parameter: nn.Parameter, apart: Mapping[nn.Parameter, Tensor]) -> Tensor:
    kept = apart.get(parameter, torch.zeros_like(parameter, dtype=torch.float64))
    return kept if parameter.grad is None else kept + parameter.grad


def mahalanobis(first: Mapping[str, Tensor], second: Mapping[str, Tensor], deviations: Mapping[str, float]) -> float:
    """sum_k ||shift_k||^2 / sigma_k^2, which add/remove of one example must keep below 1 / sigma^2."""
    total = 0.0
    for name, values in first.items():
        shift = (values - second[name]).square().sum().item()
        if shift > 0:
            total += shift / deviations[name] ** 2 if deviations[name] > 0 else float("inf")
    return total


def with_example(batch: Batch, x: Tensor, y: Tensor) -> Batch:
    """The neighbouring batch, the example in its middle: positions of the others change."""
    half = len(batch[0]) // 2
    number = batch[2].max() + 1 if len(batch[2]) else torch.tensor(0)
    added = (x.unsqueeze(0), y.unsqueeze(0), number.reshape(1))
    return tuple(torch.cat([t[:half], a.to(t.dtype), t[half:]]) for t, a in zip(batch, added, strict=True))


def random_batch(size: int, shape: Sequence[int], classes: int, seed: int = 0, scale: float = 1.0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, *shape, generator=generator)
    x = scale * x / x.flatten(1).norm(dim=1).clamp_min(1e-9).reshape(-1, *(1,) * len(shape))
    x = x * torch.rand(size, *(1,) * len(shape), generator=generator)
    return x, torch.randint(classes, (size,), generator=generator), torch.arange(size)


def influential_examples(harness: Harness, classes: int, steps: int = 12, rate: float = 0.4) -> list[Example]:
    """Boundary inputs of large influence: gradient ascent on sum_k ||g_k||^2 / Delta_k^2 from several starts.

    It ascends the gradient of the network without scaling, which autograd can differentiate twice. A constant
    image, tiny inputs and zero are among the candidates, for scalings that divide by a norm.
    """
    network, loss, bound = harness.module.network, harness.module.loss, harness.module.input_bound
    groups, shape = harness.mechanism.certificate.groups, harness.input_shape
    named = dict(network.named_parameters())
    parameters = [named[n] for g in groups for n in g.parameters]
    weights = [g.worst_case**-2 if g.worst_case > 0 else 0.0 for g in groups for _ in g.parameters]
    harness.mechanism.scaling.detach(network)
    starts = torch.cat([torch.ones(1, *shape), random_batch(2, shape, classes, seed=3)[0]])
    found: list[Example] = [(torch.zeros(shape), torch.tensor(0))]
    for start in starts:
        for label in {0, classes - 1}:
            y = torch.tensor([label])
            x = _onto_sphere(start, bound)
            found.append((x, y[0]))
            for _ in range(steps):
                x.requires_grad_()
                value = loss.per_example(network(x.unsqueeze(0)), y).sum()
                slopes = torch.autograd.grad(value, parameters, create_graph=True)
                influence = sum(w * g.square().sum() for w, g in zip(weights, slopes, strict=True))
                (slope,) = torch.autograd.grad(influence, x)
                if not slope.norm() > 0:
                    break
                x = _onto_sphere(x.detach() + rate * bound * slope / slope.norm(), bound)
            found += [(x.detach(), y[0]), (0.02 * x.detach(), y[0])]
    harness.mechanism.scaling.attach(network)
    return found


def influence(harness: Harness, example: Example, step: int = 0) -> float:
    """The example's own share of the condition of one step, times sigma^2: at most 1 for a certified scaling."""
    empty = (example[0].unsqueeze(0)[:0], example[1].unsqueeze(0)[:0], torch.zeros(0, dtype=torch.int64))
    harness.accumulate(with_example(empty, *example), step)  # a step of its own: it starts without votes
    own = harness.gradients()
    nothing = {name: torch.zeros_like(values) for name, values in own.items()}
    return mahalanobis(own, nothing, harness.mechanism.deviations()) * harness.plan.noise_multiplier**2


def strongest(harness: Harness, examples: Sequence[Example]) -> Example:
    """The most influential of the candidates, by the mechanism itself."""
    measured = [influence(harness, example, 1 + number) for number, example in enumerate(examples)]
    return examples[max(range(len(measured)), key=measured.__getitem__)]


def _onto_sphere(x: Tensor, bound: float) -> Tensor:
    return (bound * x / x.norm().clamp_min(1e-9)).detach()


# ---- networks


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 5))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), MaxMin(), nn.Linear(16, 10), nn.ReLU(), nn.Linear(10, 5))


def convnet() -> nn.Module:
    """Stride, groups, padding, dilation and a head."""
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, stride=2, padding=1), MaxMin(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 16, 5),
    )  # fmt: skip


class Tied(nn.Module):
    """One layer used twice, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)
        self.first, self.second = nn.Linear(12, 8), nn.Linear(12, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        y = torch.relu(self.inner(torch.relu(self.inner(x))))
        return self.head(self.first(y) + self.second(x))


class Branched(nn.Module):
    """Branches that meet in a sum and in a concatenation; one weight is used without its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(12, 8), nn.Linear(8, 6), nn.Linear(8, 6)
        self.plain = nn.Parameter(torch.randn(6, 6) / 6)
        self.head = nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.trunk(x.flatten(1)))
        left, right = torch.relu(self.left(y)), self.right(y)
        return self.head(torch.cat([left + right, nn.functional.linear(left, self.plain), right], dim=1))


NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (linear, (12,)),
    "mlp": (mlp, (12,)),
    "convnet": (convnet, (2, 8, 8)),
    "tied": (Tied, (12,)),
    "branched": (Branched, (12,)),
}


def make_network(name: str, seed: int = 0, gain: float = 1.0) -> tuple[nn.Module, tuple[int, ...]]:
    """``gain`` multiplies the weights: large logits saturate the softmax, and gradients come near their bounds."""
    torch.manual_seed(seed)
    build, shape = NETWORKS[name]
    network = build()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(gain if parameter.dim() > 1 else 1.0)
    return network, shape
