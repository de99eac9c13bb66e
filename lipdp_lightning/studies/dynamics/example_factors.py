"""Computes the factors c_ir of examples and layers: none, those of clipping, and those of this library's scalings.

They come from the functions that training uses: `clipping/factors.py` and the scalings of `mechanism`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from ...bounds.certifier import Certifier
from ...bounds.losses import Loss
from ...clipping.factors import clip_factors
from ...layers.scaled import ScaledLayer
from ...mechanism.radii import Exact, ExactLayerwise, scaling_of
from ...privacy.plan import PrivacyPlan


class Factors(Protocol):
    """Returns c_ir from the inputs and the norms of the examples' gradients by layer."""

    def __call__(self, x: Tensor, norms: Mapping[str, Tensor]) -> dict[str, Tensor]: ...


class Unclipped:
    """The factors c = 1."""

    def __call__(self, x: Tensor, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {path: torch.ones_like(size) for path, size in norms.items()}


@dataclass(frozen=True)
class Clipped:
    """The factors of DP-SGD for radius R: of the whole gradient, or of each of K layers with radius R / sqrt(K)."""

    clipping: Literal["local", "global", "automatic"]
    radius: float
    layerwise: bool = False

    def __call__(self, x: Tensor, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self.layerwise:
            radius = self.radius / math.sqrt(len(norms))
            return {path: clip_factors(size, radius, self.clipping) for path, size in norms.items()}
        whole = torch.stack(list(norms.values())).square().sum(0).sqrt()
        return dict.fromkeys(norms, clip_factors(whole, self.radius, self.clipping))


@dataclass
class Scaled:
    """The factors of one of the library's scalings, with the certificate of the weights at the time of the call.

    ``network`` is the one whose flow is integrated; it consists of the library's own layers (`layers.make_private`).
    """

    network: nn.Module
    input_shape: tuple[int, ...]
    input_bound: float
    loss: Loss
    scaling: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plain = sorted({type(m).__name__ for m in self.network.modules() if _trains(m) and not _scaled(m)})
        if plain:
            raise ValueError(f"{', '.join(plain)}: no norm is measured there. HINT: call make_private(network) first.")
        settings: dict[str, Any] = {
            "dataset_size": 2, "expected_batch_size": 1, "steps": 1, "noise_multiplier": 1.0, "delta": 0.1,
            "scaling": self.scaling, "allocation": "global", "max_norm": None, "accountant": "rdp",
        }  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._plan = PrivacyPlan.from_dict(settings | dict(self.options))
        self._certifier = Certifier(
            self.network, self.input_shape, self.input_bound, self.loss, compute_dtype=torch.float64
        )

    def __call__(self, x: Tensor, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        certificate = self._certifier.certify()
        scaling = scaling_of(self._plan, 0, certificate)
        scaling.begin(scaling.numbers(certificate))
        if isinstance(scaling, Exact | ExactLayerwise):
            return scaling._factors(norms)
        seen: dict[str, Tensor] = {}
        scaling.attach(self.network)
        try:
            for path, module in self.network.named_modules():
                if isinstance(module, ScaledLayer) and module.gradient_scaler is not None:
                    module.gradient_scaler = _noted(seen, path, module.gradient_scaler)
            with torch.enable_grad():
                self.network(x)
            whole = scaling.example_factor(len(x), x.device)
        finally:
            scaling.detach(self.network)
        ones = torch.ones(len(x), dtype=x.dtype)
        common = ones if whole is None else whole.to(x.dtype)
        return {path: common * seen.get(path, ones) for path in norms}


def _noted(seen: dict[str, Tensor], path: str, scaler: Any) -> Any:
    """Returns the scaler and records its factors; a layer that is called twice would have two."""

    def scale(norms: Tensor) -> Tensor | None:
        found: Tensor | None = scaler(norms)
        if found is not None:
            assert path not in seen, f"{path} is called twice: its gradient has no single factor"
            seen[path] = found.detach()
        return found

    return scale


def _scaled(module: nn.Module) -> bool:
    return isinstance(module, ScaledLayer)


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))
