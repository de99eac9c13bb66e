"""Tries the converter on 28 architectures of timm: each is trained privately for two steps in the best certified form.

    python -m lipdp_lightning.studies.timm_models
    python -m lipdp_lightning.studies.timm_models resnet18 mixer_s32_224

The weights and the images are random, so that no accuracy means anything: the table says what can be trained.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..conversion import ConversionReport, convert
from ..data_modules.base import PrivateDataModule
from ..experiment.short_training import train
from ..privacy.plan import PrivacyPlan
from ..training import PrivateModule

SHAPE = (3, 32, 32)
CLASSES = 10
STEPS = 2

_SMALL = {"img_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet50": {},
    "resnext50_32x4d": {},
    "wide_resnet50_2": {},
    "vgg11": {},
    "vgg16_bn": {},
    "densenet121": {},
    "mobilenetv2_100": {},
    "mobilenetv3_small_100": {},
    "efficientnet_b0": {},
    "mnasnet_100": {},
    "regnetx_002": {},
    "regnety_002": {},
    "ghostnet_100": {},
    "dla34": {},
    "repvgg_a0": {},
    "darknet53": {},
    "convnext_tiny": {},
    "poolformer_s12": {},
    "edgenext_xx_small": {},
    "mixer_s32_224": _SMALL,
    "gmixer_12_224": _SMALL,
    "resmlp_12_224": _SMALL,
    "vit_tiny_patch16_224": _SMALL,
    "deit_tiny_patch16_224": _SMALL,
    "swin_tiny_patch4_window7_224": {"img_size": 32, "window_size": 2},
    "cait_xxs24_224": _SMALL,
    "coat_tiny": _SMALL,
}
"""Names of timm, and what makes them read images of 32 x 32 pixels."""

HEAD = "head on a frozen backbone"
FORMS: dict[str, dict[str, Any]] = {
    "converted": {},
    "converted, norms limited": {"alpha": 1.0, "max_norm": 1.0},
    "last block": {"train": "last", "batch_norm": "running"},
    HEAD: {"train": "last", "blocks": 0},
}
"""The options of ``convert`` to try, the form that trains most of the model first."""


class MadeUpImages(PrivateDataModule):
    """Random images with random labels."""

    input_shape = SHAPE
    task = "classification"
    num_classes = CLASSES
    declared_size = 16

    def load_train(self) -> tuple[Tensor, Tensor]:
        return self._rows(self.declared_size, 1)

    def load_test(self) -> tuple[Tensor, Tensor]:
        return self._rows(4, 2)

    def _rows(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn((count, *SHAPE), generator=generator), torch.arange(count) % CLASSES


@dataclass(frozen=True)
class Outcome:
    """The form in which an architecture was trained; ``form`` is empty if there is none, and ``why`` says why."""

    name: str
    form: str
    trained: int
    parameters: int
    moved: float
    why: str

    def __str__(self) -> str:
        if not self.form:
            return f"{self.name:29} none: {self.why}"
        share = f"{self.trained:,} of {self.parameters:,} parameters"
        return f"{self.name:29} {self.form:26} {share:39} outputs moved by {100 * self.moved:.2g} %{self.why}"


def try_architecture(name: str) -> Outcome:
    """Trains one architecture privately in the first form that has a certificate, and says which it was."""
    torch.manual_seed(0)
    model = _timm().create_model(name, pretrained=False, num_classes=CLASSES, **ARCHITECTURES.get(name, {}))
    parameters, reasons = sum(p.numel() for p in model.parameters()), list[str]()
    for form, options in FORMS.items():
        try:
            network, report = convert(model, SHAPE, **options)
            trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
            if report.certified:
                train_privately(network, report)
        except ValueError as error:
            reasons.append(str(error).strip().splitlines()[0])
            continue
        if report.certified:
            form = HEAD if report.blocks == 0 else form
            why = f"; not whole: {_shortened(reasons[0])}" if reasons and options.get("train") == "last" else ""
            return Outcome(name, form, trained, parameters, report.moved, why)
        reasons.append(report.refusals[0].reason)
    return Outcome(name, "", 0, parameters, 0.0, reasons[-1])


def train_privately(network: nn.Module, report: ConversionReport, scaling: str = "exact") -> None:
    """Takes private steps on made-up images, under the certificate of the converted network.

    Raises:
        ValueError: If set-up refuses the network.
        RuntimeError: If the weights did not change, or are not finite afterwards.
    """
    before = [p.detach().clone() for p in network.parameters() if p.requires_grad]
    sgd = partial(torch.optim.SGD, lr=1e-3)
    module = PrivateModule(network, "cross_entropy", input_bound=report.input_bound, optimizer=sgd)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = PrivacyPlan.from_dict(
            {
                "dataset_size": MadeUpImages.declared_size, "expected_batch_size": 4, "steps": STEPS,
                "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp", "scaling": scaling,
                "allocation": "global", "max_norm": None, "radius": 0.1,
            }
        )  # fmt: skip
        result = train(module, MadeUpImages(), plan, secret=bytes(16))
    after = [p.detach() for p in module.network.parameters() if p.requires_grad]
    moved = all(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    if result.steps != STEPS or not result.certified or not moved or not all(bool(a.isfinite().all()) for a in after):
        raise RuntimeError(f"the private training took {result.steps} steps, and its weights are not as they should be")


def _shortened(reason: str) -> str:
    return reason if len(reason) <= 70 else reason[:67] + "..."


def _timm() -> Any:
    import timm

    return timm


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes on one thread, which is faster for layers as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models that read 32 x 32 images; by default the 28 of the list")
    names = parser.parse_args(arguments).names or list(ARCHITECTURES)
    done = 0
    with one_thread():
        for name in names:
            outcome = try_architecture(name)
            done += bool(outcome.form)
            sys.stdout.write(f"{outcome}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{done} of {len(names)} were trained privately for {STEPS} steps with scaling exact\n")


if __name__ == "__main__":
    main()
