"""Wraps this library's own step as a training function for the black-box tests."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...bounds.losses import Huber
from ...layers import BoundedInput
from ...mechanism.step import Mechanism
from ...privacy.plan import PrivacyPlan
from ...training.module import PrivateModule
from ..subject import Subject
from .black_box import HUBER, Checkpoint, Data, HyperParameters, Implementation, network

WIDE = 4.0  # no input of a test is clipped
Knob = Literal["input_bound", "loss_clip"]
# exact scalings: larger than any clipped gradient of a calibration test, so that the noise follows the certificate
RADIUS = {"radius": 0.7, "exact": 40.0, "exact_layerwise": 40.0}


def our_implementation(
    scaling: str = "worst_case",
    knob: Knob | None = None,
    *,
    kind: type[Mechanism] = Mechanism,
    build: Callable[[], nn.Module] = network,
    module_kind: type[PrivateModule] = PrivateModule,
    input_shape: tuple[int, ...] | None = None,
    **options: Any,
) -> Implementation:
    """Returns the private step under a scaling; C is ``knob``, to which all noise is in proportion.

    With ``input_bound`` (for worst_case) inputs are clipped to C, and the noise keeps growing with C even where nothing
    is clipped any more, as in DP-SGD. With ``loss_clip`` (for any scaling) gradients at the logits are clipped to C;
    the certificate never exceeds the loss's own constant, at which the noise stops growing.
    """
    chosen: Knob = knob or ("input_bound" if scaling == "worst_case" else "loss_clip")

    def subject(hyper: HyperParameters, size: int, start: Checkpoint | None) -> Subject:
        net = build()
        shape = input_shape or (next(m for m in net.modules() if isinstance(m, nn.Linear)).in_features,)
        module = module_kind(net, Huber(HUBER), input_bound=_input_bound(chosen, hyper))
        if start is not None:
            module.network.load_state_dict(start.weights)
        settings: dict[str, Any] = {
            "dataset_size": size, "expected_batch_size": size, "steps": max(1, hyper.steps), "delta": 1e-5,
            "noise_multiplier": hyper.noise_multiplier, "scaling": scaling, "allocation": "global", "max_norm": None,
            "allow_noncertified": True, "loss_clip": hyper.bound if chosen == "loss_clip" else None,
        }  # fmt: skip
        if scaling in RADIUS:
            settings["radius"] = RADIUS[scaling]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = PrivacyPlan.from_dict(settings | options)
        return Subject(module, plan, shape, kind=kind, secret=hyper.seed.to_bytes(16, "big"))

    def train(data: Data, hyper: HyperParameters, start: Checkpoint | None) -> Checkpoint:
        own = subject(hyper, len(data[0]), start)
        parameters = list(own.module.network.parameters())
        optimizer = OPTIMIZERS[hyper.optimizer](parameters, lr=hyper.learning_rate)
        if start is not None and start.optimizer and hyper.optimizer == "adam":
            optimizer.load_state_dict(copy.deepcopy(dict(start.optimizer)))
        batch = (*data, torch.arange(len(data[0])))
        for step in range(hyper.steps):
            own.release(batch, step)
            optimizer.step()
            own.mechanism.project_()
        own.close()
        weights = {n: p.detach().clone() for n, p in own.module.network.named_parameters()}
        return Checkpoint(weights, optimizer.state_dict())

    def predict(checkpoint: Checkpoint, x: Tensor, hyper: HyperParameters) -> Tensor:
        net = build()
        net.load_state_dict(dict(checkpoint.weights))
        with torch.no_grad():
            result: Tensor = net.double()(BoundedInput(_input_bound(chosen, hyper))(x).double())
        return result

    def deviations(checkpoint: Checkpoint, hyper: HyperParameters, size: int) -> Mapping[str, float]:
        own = subject(hyper, size, checkpoint)
        by_group = own.mechanism.deviations()
        found = {n: by_group[g.name] for g in own.mechanism.certificate.groups for n in g.parameters}
        own.close()
        return found

    return Implementation(scaling, train, predict, deviations, saturates=chosen == "loss_clip")


def _input_bound(knob: Knob, hyper: HyperParameters) -> float:
    return hyper.bound if knob == "input_bound" else WIDE


OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
