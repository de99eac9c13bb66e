"""Takes a private step of a small network on made-up rows, on any device."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..bounds.certifier import Certifier
from ..bounds.losses import CrossEntropy
from ..layers import BoundedInput, MaxMin, make_private, scale_cotangent
from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.plan import PrivacyPlan

SHAPE, CLASSES, ROWS = (3, 16, 16), 10, 64
SECRET = bytes(range(16))
"""It protects nothing: the rows are made up."""


class Trial:
    """A network, its mechanism and a batch; two trials on one device take the same steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers = nn.Sequential(
                nn.Conv2d(3, 8, 3, padding=1), MaxMin(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(128, CLASSES)
            )
            rows, self.y = torch.randn(ROWS, *SHAPE), torch.randint(CLASSES, (ROWS,)).to(device)
        self.network = make_private(layers).to(device)
        self.x = BoundedInput(1.0)(rows.to(device))
        self.loss = CrossEntropy()
        certifier = Certifier(self.network, SHAPE, 1.0, self.loss, norms=Follower())
        self.mechanism = Mechanism(self.network, certifier, _plan(), SECRET)
        self.mechanism.project_()
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self.milliseconds: dict[str, float] = {}

    def step(self, number: int) -> None:
        """Takes one step, and notes how long each part took."""
        with self._timed("certificate"):
            self.mechanism.begin_step(number)
        with self._timed("forward and backward"):
            self.optimizer.zero_grad()
            self._summed_loss().backward()
        with self._timed("release"):
            self.mechanism.privatize_(number)
        with self._timed("optimizer and projection"):
            self.optimizer.step()
            self.mechanism.project_()

    def weights(self) -> Tensor:
        """Returns all parameters, on the CPU."""
        return torch.cat([p.detach().cpu().flatten() for p in self.network.parameters()])

    def _summed_loss(self) -> Tensor:
        logits = self.network(self.x)
        factor = self.mechanism.scaling.example_factor(ROWS, logits.device)
        return self.loss.per_example(logits if factor is None else scale_cotangent(logits, factor), self.y).sum()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = self._now()
        yield
        self.milliseconds[part] = 1e3 * (self._now() - begun)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _plan() -> PrivacyPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PrivacyPlan.create(
            dataset_size=6400, expected_batch_size=ROWS, steps=100, noise_multiplier=1.0, delta=1e-6, scaling="joint",
            accountant="rdp",
        )  # fmt: skip
