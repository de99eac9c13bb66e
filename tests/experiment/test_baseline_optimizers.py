"""Heavy-ball, DP-Adam, DP-AdamW and DP-RMSprop train on private gradients, and the ledger does not know of them."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import Any

import pytest
import torch
from small_runs import SECRET

from lipdp_lightning.experiment import run_once

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.3}),
    "heavy-ball": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "Adam": ("Adam", {"lr": 0.05}),
    "AdamW": ("AdamW", {"lr": 0.05, "weight_decay": 0.01}),
    "RMSprop": ("RMSprop", {"lr": 0.02, "momentum": 0.5}),
}
CONFIG: dict[str, Any] = {
    "seed_everything": 1,
    "model": {
        "network": {
            "class_path": "lipdp_lightning.models.MLP",
            "init_args": {"input_shape": [30], "outputs": 1, "hidden": [8]},
        },
        "loss": "binary_cross_entropy",
    },
    "data": {"class_path": "data_modules.EmbeddedBreastCancer"},
    "privacy": {"noise_multiplier": 2.0, "delta": 1e-4, "steps": 20, "batch_size": 300, "accountant": "rdp"},
    "trainer": {"accelerator": "cpu", "devices": 1},
}
SWITCHES: dict[str, dict[str, Any]] = {
    "dpsgd_flat": {"privacy.clipping": "local", "privacy.switch_to": "global", "privacy.clip_norm": 2.0},
    "dpsgd_per_layer": {"privacy.clipping": "automatic", "privacy.switch_to": "local"},
    "lipschitz": {"privacy.scaling": "joint", "privacy.switch_to": "layerwise"},
}


def trained(optimizer: str, method: str, **changes: Any) -> Any:
    name, arguments = OPTIMIZERS[optimizer]
    chosen = {"class_path": f"torch.optim.{name}", "init_args": arguments}
    return run_once(CONFIG, {"optimizer": chosen, "privacy.method": method, **changes}, secret=SECRET)


@lru_cache(maxsize=1)
def reference_run() -> Any:
    return trained("SGD", "dpsgd_flat")


@pytest.mark.parametrize("method", ["dpsgd_flat", "lipschitz"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_under_every_method_and_the_ledger_is_one(optimizer: str, method: str) -> None:
    found = trained(optimizer, method)
    assert found.certified and found.metrics["validation/loss"] < 0.95 * math.log(2)
    reference = reference_run()
    assert found.plan.events() == reference.plan.events() and found.epsilon == reference.epsilon


@pytest.mark.parametrize("method", SWITCHES)
def test_a_switch_changes_the_training_and_not_the_ledger(method: str) -> None:
    options = dict(SWITCHES[method])
    target = options.pop("privacy.switch_to")
    plain, switched = (
        trained("heavy-ball", method, **options, **changes)
        for changes in (
            {},
            {"privacy.switch_at": 0.5, "privacy.switch_to": target},
        )
    )
    assert plain.plan.events() == switched.plan.events()
    assert plain.epsilon == switched.epsilon < math.inf
    assert plain.plan.digest() != switched.plan.digest()  # the switch is part of what a resume compares
    weights = [torch.cat([p.flatten() for p in r.module.parameters()]) for r in (plain, switched)]
    assert not torch.equal(weights[0], weights[1])
    # a plan of more noise is another ledger: the comparison can fail
    other = dataclasses.replace(plain.plan, noise_multiplier=2.5)
    assert other.events() != plain.plan.events()
