"""Wraps frozen backbones of timm, with the weights, input size and normalisation that timm gives for the name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.input import without_dropout
from .extractor import FeatureExtractor


class TimmFeatures(FeatureExtractor):
    """Computes the pooled features of a timm model without its classifier: (channels, height, width) to (features,).

    Images are resized to the model's own size, with its own interpolation, and normalised with its own constants, all
    public. Grey images are repeated on the model's channels. Pretrained weights must come from data that is public with
    respect to the private rows; the user must judge that.

    Args:
        name: the name of a timm model, such as ``resnet18`` or ``vit_small_patch16_224.dino``.
        pretrained: whether timm loads the published weights, from its cache or the network.
        input_shape: (channels, height, width) of one image.
        input_range: values of black and white in the data.
        image_size: a size to resize to instead of the model's own.
        checkpoint_path: a local file with weights (.safetensors, .pth) to load instead.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        name: str,
        pretrained: bool = True,
        input_shape: Sequence[int] = (3, 32, 32),
        input_range: Sequence[float] = (0.0, 1.0),
        image_size: int | None = None,
        checkpoint_path: str | None = None,
    ) -> None:
        super().__init__(input_shape)
        low, high = (float(v) for v in input_range)
        if len(self.input_shape) != 3 or not low < high or (image_size is not None and image_size < 1):
            raise ValueError(
                f"TimmFeatures: input_shape={self.input_shape}, input_range={(low, high)}, image_size={image_size}. "
                "HINT: give (channels, height, width), the values of black and white, and a size in pixels or null."
            )
        timm = _timm()
        self.name, self.pretrained, self.input_range = name, pretrained and checkpoint_path is None, (low, high)
        self.backbone: nn.Module = _create(timm, name, self.pretrained)
        if checkpoint_path is not None:
            _load(timm, self.backbone, name, checkpoint_path)
        without_dropout(self.backbone)
        config = timm.data.resolve_model_data_config(self.backbone)
        channels, *own_size = config["input_size"]
        if self.input_shape[0] not in (1, channels):
            raise ValueError(
                f"TimmFeatures: {name} takes {channels} channels, and the images have {self.input_shape[0]}. "
                f"HINT: images of {channels} channels or of one."
            )
        self.image_size = (image_size, image_size) if image_size is not None else tuple(own_size)
        self.interpolation = "bilinear" if config["interpolation"] == "bilinear" else "bicubic"
        # converted to the units of the data, since timm normalises (x - low) / (high - low)
        mean, deviation = torch.tensor(config["mean"]), torch.tensor(config["std"])
        self.register_buffer("mean", (mean * (high - low) + low).reshape(1, -1, 1, 1), persistent=False)
        self.register_buffer("deviation", (deviation * (high - low)).reshape(1, -1, 1, 1), persistent=False)
        try:
            self.freeze()
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"TimmFeatures: {name} does not take images of {self.image_size}: {_first_line(error)} "
                "HINT: leave image_size at null, which is the model's own."
            ) from error

    def extract(self, x: Tensor) -> Tensor:
        if tuple(x.shape[2:]) != self.image_size:
            x = F.interpolate(x, self.image_size, mode=self.interpolation, align_corners=False, antialias=True)
            x = x.clamp(*self.input_range)  # bicubic overshoots
        x = (x - self.mean) / self.deviation  # broadcasting repeats a single channel
        features: Tensor = self.backbone(x)
        return features

    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "input_range": self.input_range,
            "image_size": self.image_size,
            "interpolation": self.interpolation,
            "timm": _timm().__version__,
        }

    def extra_repr(self) -> str:
        return f"{self.name!r}, pretrained={self.pretrained}, image_size={self.image_size}"


def _timm() -> Any:
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"TimmFeatures needs timm, which cannot be imported ({error}). HINT: pip install 'lipdp-lightning[vision]'"
        ) from error
    return timm


def _create(timm: Any, name: str, pretrained: bool) -> nn.Module:
    hosted = ":" in name  # hf-hub:..., local-dir:...: timm resolves these names itself
    if not hosted and not timm.is_model(name):
        known = timm.list_models()
        near = difflib.get_close_matches(name.partition(".")[0], known, n=4, cutoff=0.5)
        suggestion = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists them all."
        raise ValueError(f"timm knows no model {name!r} ({len(known)} names). HINT: {suggestion}")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=0)
        return model
    except Exception as error:  # it may come from timm, from the hub's client or from the network
        if "pretrained tag" in str(error):
            tags = ", ".join(timm.list_pretrained(f"{name.partition('.')[0]}.*")) or "none"
            raise ValueError(f"{_first_line(error)} HINT: weights of this model: {tags}.") from error
        raise ValueError(
            f"timm cannot load {name!r}: {_first_line(error)} HINT: without network access, fetch the weights "
            f"elsewhere with timm.create_model({name!r}, pretrained=True), save its state_dict, and give the file as "
            "checkpoint_path=...; pretrained=False gives random weights."
        ) from error


def _load(timm: Any, backbone: nn.Module, name: str, path: str) -> None:
    """Loads weights from a file; it must hold every tensor of the backbone, and beyond them a classifier's alone."""
    if not Path(path).is_file():
        raise ValueError(
            f"checkpoint_path={path!r} is not a file. HINT: give a .safetensors or .pth file with {name}'s weights."
        )
    try:
        state = timm.models.load_state_dict(path, device="cpu", weights_only=True)
        missing, unexpected = backbone.load_state_dict(state, strict=False)
    except Exception as error:  # unpickling and shape errors have several types
        raise ValueError(
            f"checkpoint_path={path!r} does not load into {name}: {_first_line(error)} HINT: give its state_dict."
        ) from error
    classifiers = getattr(backbone, "pretrained_cfg", {}).get("classifier") or ()
    classifiers = (classifiers,) if isinstance(classifiers, str) else tuple(classifiers)
    foreign = [key for key in unexpected if not key.startswith(tuple(f"{c}." for c in classifiers))]
    if missing or foreign:
        raise ValueError(
            f"checkpoint_path={path!r} holds another network than {name}: {len(missing)} tensors are missing "
            f"({', '.join(missing[:3])}), {len(foreign)} are of no use ({', '.join(foreign[:3])}). "
            "HINT: name the model that the file was saved from."
        )


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if line.endswith(".") else line + "."
