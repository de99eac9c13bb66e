"""The ``privacy`` group of a configuration: what a user chooses; the plan is derived from it."""

from __future__ import annotations

from typing import Any, Literal

from ..privacy.plan import PrivacyPlan


class PrivacySettings:
    """Choose epsilon or noise_multiplier, and epochs or steps; everything else has a default.

    Args:
        epsilon: target of the whole run; the noise is calibrated to it.
        noise_multiplier: instead of epsilon.
        delta: default 1/N.
        epochs: expected passes over the data.
        steps: instead of epochs.
        batch_size: expected number of examples in a step; a constant of the plan.
        scaling: how an example's gradient is scaled; 'batch_max' is not private.
        allocation: how the noise is shared among parameter groups.
        group_weights: pattern -> share of the budget, for allocation 'custom'.
        projection: what keeps the layers' norms.
        max_norm: largest norm of a layer, or pattern -> norm; null leaves every layer free.
        free_layers: patterns of layers that no projection touches.
        adjacency: whom the guarantee protects: add_remove or replace_one.
        accountant: prv, pld or rdp.
        loss_clip: clip each example's loss gradient to this norm.
        cotangent_clip: pattern of modules -> radius; clips the cotangent at their output.
        radius: first radius of scaling 'radius'.
        radius_quantile: track the radius as this private quantile.
        radius_noise_multiplier: noise of the quantile query, which joins the step.
        scaling_floor: smallest n_ik (or joint norm) an example is divided by.
        secure: draw several samples per coordinate against floating-point attacks.
        max_examples_per_unit: rows that one protected unit may have.
        allow_noncertified: needed for scaling 'batch_max'.
        physical_batch_size: largest expected micro-batch per process.
        noise_mode: distributed or replicated.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        batch_size: float = 256,
        scaling: Literal["worst_case", "layerwise", "joint", "radius", "batch_max"] = "joint",
        allocation: Literal["equal", "global", "optimal", "custom"] = "optimal",
        group_weights: dict[str, float] | None = None,
        projection: Literal["clip", "clip_singular", "fixed", "bjorck", "frobenius"] = "clip",
        max_norm: float | dict[str, float] | None = 1.0,
        free_layers: list[str] | None = None,
        adjacency: Literal["add_remove", "replace_one"] = "add_remove",
        accountant: Literal["prv", "pld", "rdp"] = "prv",
        loss_clip: float | None = None,
        cotangent_clip: dict[str, float] | None = None,
        radius: float | None = None,
        radius_quantile: float | None = None,
        radius_noise_multiplier: float | None = None,
        scaling_floor: float = 1e-6,
        secure: bool = False,
        max_examples_per_unit: int = 1,
        allow_noncertified: bool = False,
        physical_batch_size: int | None = None,
        noise_mode: Literal["distributed", "replicated"] = "distributed",
    ) -> None:
        chosen = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        self.physical_batch_size = chosen.pop("physical_batch_size")
        self.noise_mode: str = chosen.pop("noise_mode")
        self._chosen: dict[str, Any] = chosen

    def plan(self, dataset_size: int, input_bound: float | None = None) -> PrivacyPlan:
        """The frozen plan for a data set of declared size N; raises with every problem at once."""
        chosen = dict(self._chosen)
        chosen["expected_batch_size"] = chosen.pop("batch_size")
        chosen["group_weights"] = tuple((chosen["group_weights"] or {}).items())
        chosen["free_layers"] = tuple(chosen["free_layers"] or ())
        chosen["cotangent_clip"] = tuple((chosen["cotangent_clip"] or {}).items())
        chosen["unit"] = "example" if chosen["max_examples_per_unit"] == 1 else "group"
        return PrivacyPlan.create(dataset_size=dataset_size, input_bound=input_bound, **chosen)
