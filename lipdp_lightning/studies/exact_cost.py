"""Measures the cost of exact norms: one private step under each scaling, as ratios to the step without scaling.

    python -m lipdp_lightning.studies.exact_cost [--rows 256] [--repeats 5]

Every repeat times each scaling once, in turn; a ratio is that of the smallest processor times. Memory is that of the
tensors that the scaling holds from the backward pass to the release, in units of the inputs of all trained layers.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from ..bounds.certifier import Certifier
from ..bounds.losses import CrossEntropy
from ..layers import make_private
from ..mechanism.step import Mechanism
from ..models import ConvNet, GaborNet, ShallowVGG
from ..norms.follow import Follower
from ..privacy.plan import PrivacyPlan
from ..report.tables import render_table

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int]]] = {
    "8 x 8 stride 4, 32 filters": (lambda: GaborNet((1, 28, 28), 10), (1, 28, 28)),
    "two 5 x 5 stride 2, 16 and 32": (lambda: ConvNet((1, 28, 28), 10, (16, 32), 5), (1, 28, 28)),
    "VGG, 32, 64, 128": (lambda: ShallowVGG((3, 32, 32), 10, (32, 64, 128)), (3, 32, 32)),
}
SCALINGS = ("worst_case", "layerwise", "exact", "gradients of every example")


class Step:
    """The forward and backward pass of one batch with random images and labels, and the release."""

    def __init__(self, network: str, scaling: str, rows: int) -> None:
        torch.manual_seed(0)
        build, shape = NETWORKS[network]
        self._model, self._loss, self._number = make_private(build()), CrossEntropy(), 0
        self._x, self._y = torch.rand(rows, *shape), torch.randint(10, (rows,))
        self._x /= self._x.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
        self._mechanism: Mechanism | None = None
        if scaling in ("worst_case", "layerwise", "exact"):
            plan = PrivacyPlan.create(
                dataset_size=100_000, expected_batch_size=rows, steps=10**6, noise_multiplier=1.0, delta=1e-6,
                scaling=scaling, max_norm=None, radius=1.0 if scaling == "exact" else None,
            )  # fmt: skip
            certifier = Certifier(self._model, shape, 1.0, self._loss, norms=Follower())
            self._mechanism = Mechanism(self._model, certifier, plan, bytes(16))

    def __call__(self) -> float:
        """Returns processor seconds of forward, backward and sums; certificate and noise, the same for all, are left
        out.
        """
        self._model.zero_grad(set_to_none=True)
        if self._mechanism is not None:
            self._mechanism.scaling.begin(self._mechanism.numbers())
        start = time.process_time()
        if self._mechanism is None:
            self._by_example()
        else:
            self._loss.per_example(self._model(self._x), self._y).sum().backward()
            self._mechanism.scaling.take_sums()
        return time.process_time() - start

    def _by_example(self) -> None:
        """Computes clipped sums from torch.func's gradients of every example, a few at a time."""
        parameters = {n: p.detach() for n, p in self._model.named_parameters()}

        def loss(values: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = torch.func.functional_call(self._model, values, (x.unsqueeze(0),))
            return self._loss.per_example(logits, y.unsqueeze(0)).sum()

        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
        for x, y in zip(self._x.split(64), self._y.split(64), strict=True):
            gradients = each(parameters, x, y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            for gradient in gradients.values():
                torch.tensordot(1 / norms.clamp_min(1.0), gradient, dims=1)

    def held(self) -> float:
        """Returns the numbers held for the sums, over those of the inputs of all trained layers."""
        assert self._mechanism is not None
        self._mechanism.scaling.begin(self._mechanism.numbers())
        self._loss.per_example(self._model(self._x), self._y).sum().backward()
        kept = [c for _, _, c in self._mechanism.scaling._kept]  # type: ignore[attr-defined]
        inputs = sum(c.inputs.numel() for c in kept)
        return 1 + sum(c.cotangent.numel() for c in kept) / inputs


def measure(rows: int, repeats: int) -> list[list[str]]:
    table = []
    for network in NETWORKS:
        steps = {scaling: Step(network, scaling, rows) for scaling in SCALINGS}
        best = dict.fromkeys(SCALINGS, float("inf"))
        for _ in range(repeats):
            for scaling, step in steps.items():
                best[scaling] = min(best[scaling], step())
        ratios = [f"{best[scaling] / best['worst_case']:.2f}" for scaling in SCALINGS[1:]]
        table.append([network, *ratios, f"{steps['exact'].held():.1f}"])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="batch size")
    parser.add_argument("--repeats", type=int, default=5, help="timings of each scaling")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    sys.stdout.write(render_table(["network", *SCALINGS[1:], "held"], measure(options.rows, options.repeats)) + "\n")


if __name__ == "__main__":
    main()
