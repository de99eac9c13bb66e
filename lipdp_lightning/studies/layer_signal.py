"""Prints per layer Delta, signal and noise of a step, and which factors of the bound are slack.

    python -m lipdp_lightning.studies.layer_signal --config configs/digits_wide_resnet_bounds.yaml
        [--examples 256] [--untrained] [--format text|markdown|json] [options of lipdp fit]

It measures at the initial, projected weights and again after the configuration's private training, on held-out rows,
since rows that were trained on are never read outside a step. Gradients of held-out rows are printed without noise, so
use data whose held-out part is public.

For example i and layer k the certificate says ||g_ik|| <= Delta_k = sum over uses of l n, with l the cotangent bound
and n the bound of the gradient's factor. The three shares multiply to mean ||g_ik|| / Delta_k:

* cotangent: sum ||d_i|| n / sum l n, how much of the cotangent bound examples use;
* input: sum ||d_i|| n_i / sum ||d_i|| n, how much of the bound on inputs or patches;
* alignment: sum ||g_i|| / sum ||d_i|| n_i, what is left when the positions of a layer add up.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..bounds.certificate import GroupBound
from ..bounds.certifier import Certifier
from ..layers import ScaledLayer, scale_cotangent
from ..layers.cotangents import attach_cotangent_clips
from ..mechanism.step import Mechanism
from ..norms.follow import Follower
from ..privacy.keys import new_secret
from ..report.tables import render_table
from ..training.set_up import matching_modules

COLUMNS = {
    "layer": "layer", "parameters": "parameters", "cotangent_bound": "l", "delta": "Delta",
    "cotangent": "cotangent", "input": "input", "alignment": "alignment", "used": "used", "largest": "largest",
    "signal": "signal", "noise": "noise", "signal_to_noise": "signal / noise",
}  # fmt: skip

Calls = dict[str, list[tuple[Tensor, Tensor]]]


@contextmanager
def recorded(network: nn.Module) -> Iterator[Calls]:
    """Yields inputs and outputs of every call of a scaled layer; outputs keep their gradient."""
    calls: Calls = defaultdict(list)

    def keep(path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if output.requires_grad:
                output.retain_grad()
                calls[path].append((inputs[0].detach(), output))

        return hook

    layers = [(path, m) for path, m in network.named_modules() if isinstance(m, ScaledLayer)]
    handles = [layer.register_forward_hook(keep(path)) for path, layer in layers]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


class Measurement:
    """Sums over examples for one set of weights."""

    def __init__(self, module: Any, mechanism: Mechanism) -> None:
        self._module, self._mechanism = module, mechanism
        self._network: nn.Module = module.network
        self._named = dict(self._network.named_parameters())
        self._layers = dict(self._network.named_modules())
        self._sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._released: dict[str, Tensor] = {}
        self._count = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Adds one example as a batch of one: its own gradient without scaling, then as a step would scale it."""
        self._count += 1
        self._mechanism.scaling.detach(self._network)
        with recorded(self._network) as calls:
            self._backward(x, y, scaled=False)
            for group in self._mechanism.certificate.groups:
                self._shares(group, calls)
        self._mechanism.scaling.attach(self._network)
        self._mechanism.begin_pass(1, 1)
        self._backward(x, y, scaled=True)
        apart = self._mechanism.scaling.take_sums()
        for group in self._mechanism.certificate.groups:
            own = torch.cat([self._gradient(n, apart) for n in group.parameters])
            self._released[group.name] = self._released.get(group.name, torch.zeros_like(own)) + own

    def _backward(self, x: Tensor, y: Tensor, scaled: bool) -> None:
        self._network.zero_grad(set_to_none=True)
        logits = self._module(x)
        factor = self._mechanism.scaling.example_factor(1, logits.device) if scaled else None
        if factor is not None:
            logits = scale_cotangent(logits, factor)
        self._module.loss.per_example(logits, y).sum().backward()

    def _gradient(self, name: str, apart: Mapping[nn.Parameter, Tensor]) -> Tensor:
        parameter = self._named[name]
        kept = apart.get(parameter, torch.zeros_like(parameter)).double()
        return (kept if parameter.grad is None else kept + parameter.grad.double()).flatten()

    def _shares(self, group: GroupBound, calls: Calls) -> None:
        nth: dict[str, int] = defaultdict(int)
        with_bounds = with_norms = 0.0
        for use in group.uses:
            layer = self._layers[use.module]
            assert use.scalable and isinstance(layer, ScaledLayer), f"{use.node}: its own factor cannot be measured"
            given, output = calls[use.module][nth[use.module]]
            nth[use.module] += 1
            cotangent = 0.0 if output.grad is None else float(output.grad.double().norm())
            with_bounds += cotangent * use.gradient_factor
            with_norms += cotangent * float(layer.example_norms(given))  # type: ignore[operator]
        size = float(torch.cat([self._gradient(n, {}) for n in group.parameters]).norm())
        sums = self._sums[group.name]
        sums["with_bounds"] += with_bounds
        sums["with_norms"] += with_norms
        sums["size"] += size
        sums["largest"] = max(sums["largest"], size)

    def rows(self) -> list[dict[str, Any]]:
        deviations, batch = self._mechanism.deviations(), self._mechanism.plan.expected_batch_size
        rows = []
        for group in self._mechanism.certificate.groups:
            sums, delta = self._sums[group.name], group.worst_case
            signal = float(self._released[group.name].norm()) / self._count
            noise = deviations[group.name] * math.sqrt(group.numel) / batch
            rows.append(
                {
                    "layer": group.name,
                    "parameters": group.numel,
                    "cotangent_bound": sum(u.cotangent_bound for u in group.uses),
                    "delta": delta,
                    "cotangent": _ratio(sums["with_bounds"], self._count * delta),
                    "input": _ratio(sums["with_norms"], sums["with_bounds"]),
                    "alignment": _ratio(sums["size"], sums["with_norms"]),
                    "used": _ratio(sums["size"], self._count * delta),
                    "largest": _ratio(sums["largest"], delta),
                    "signal": signal,
                    "noise": noise,
                    "signal_to_noise": _ratio(signal, noise),
                }
            )
        return rows


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def measure(module: Any, data: Any, plan: Any, examples: int) -> list[dict[str, Any]]:
    """Returns one row per parameter group, for the module's weights after projection."""
    clips = matching_modules(module.network, plan.cotangent_clip)
    certifier = Certifier(
        module.network, data.input_shape, module.input_bound, module.loss,
        norms=Follower(), cotangent_caps=clips,
    )  # fmt: skip
    attach_cotangent_clips(module.network, clips)
    mechanism = Mechanism(module.network, certifier, plan, new_secret())
    try:
        mechanism.project_()
        mechanism.begin_step(0)
        measurement = Measurement(module, mechanism)
        for x, y in _held_out(data, examples):
            measurement.add(x, y)
        module.network.zero_grad(set_to_none=True)
        return measurement.rows()
    finally:
        mechanism.close()


def _held_out(data: Any, examples: int) -> Iterator[tuple[Tensor, Tensor]]:
    data.setup()
    left = examples
    for batch in data.val_dataloader():
        x, y, *_ = data.on_after_batch_transfer(batch, 0)
        for row in range(min(left, len(x))):
            yield x[row : row + 1], y[row : row + 1]
        left -= len(x)
        if left <= 0:
            return


def table(rows: Sequence[dict[str, Any]], form: str) -> str:
    cells = [[_cell(row[name]) for name in COLUMNS] for row in rows]
    if form == "text":
        return render_table(list(COLUMNS.values()), cells)
    lines = [list(COLUMNS.values()), ["---", *["---:"] * (len(COLUMNS) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def study(arguments: Sequence[str], examples: int, untrained: bool) -> dict[str, list[dict[str, Any]]]:
    """Returns rows at initialisation and, unless ``untrained``, after training as the configuration says."""
    from ..experiment.experiment import parse_experiment
    from ..experiment.quiet import quiet

    with quiet():
        experiment = parse_experiment(arguments, None, "off")
        module, data, plan = experiment.model, experiment.datamodule, experiment.plan
        module.clip_loss(plan.loss_clip)
        found = {"at initialisation": measure(module, data, plan, examples)}
        if not untrained:
            experiment.trainer.fit(module, datamodule=data)
            found[f"after {plan.steps} steps"] = measure(module, data, plan, examples)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=256, help="number of held-out rows to measure on (default 256)")
    parser.add_argument("--untrained", action="store_true", help="measure at initialisation only")
    parser.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="format of the table")
    own, rest = parser.parse_known_args()
    if own.examples < 1:
        raise SystemExit("--examples must be positive. HINT: use 256")
    found = study(rest, own.examples, own.untrained)
    if own.format == "json":
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    for when, rows in found.items():
        sys.stdout.write(f"\n{when}\n\n{table(rows, own.format)}\n")


if __name__ == "__main__":
    main()
