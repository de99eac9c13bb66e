"""The ``privacy`` group of a configuration, from which the plan is derived."""

from __future__ import annotations

import copy
from typing import Any, Literal

from ..clipping.methods import Clipping, Method, settled
from ..privacy.plan import PrivacyPlan

_BUDGET = (
    "epsilon", "delta", "epochs", "steps", "batch_size", "adjacency", "accountant", "max_examples_per_unit",
    "radius_noise_multiplier",
)  # fmt: skip


class PrivacySettings:
    """The user's choices; epsilon or noise_multiplier and epochs or steps are needed, and the rest has defaults.

    Args:
        epsilon: target of the whole run, to which the noise is calibrated.
        noise_multiplier: the noise itself; give either this or epsilon.
        delta: delta of the guarantee; by default 1/N.
        epochs: expected passes over the data.
        steps: number of steps; give either this or epochs.
        batch_size: expected number of examples in a step; a constant of the plan.
        scaling: rule that scales an example's gradient. With 'auto', set-up takes 'joint' where certified bounds are
            tight, and 'exact' elsewhere, and prints why. 'batch_max' is not private.
        allocation: rule that shares the noise among parameter groups; 'auto' is 'global' where an automatic scaling
            becomes 'exact', and 'optimal' elsewhere.
        group_weights: pattern -> share of the budget, for allocation 'custom'.
        projection: projection that limits the layers' norms.
        max_norm: largest norm of a layer, or pattern -> norm; null leaves every layer free. 'auto' is 1; under
            'exact' and 'exact_layerwise' it is the largest power of two, up to 64, that keeps the certificate finite.
        free_layers: patterns of layers that are not projected.
        standardize: after a step, subtract the mean from every kernel of a convolution, or also equalise norms.
        adjacency: relation of data sets that the guarantee protects: add_remove or replace_one.
        accountant: pld, prv or rdp; for replace_one, pld always answers, since only it accounts for it exactly.
        loss_clip: clip each example's loss gradient to this norm.
        cotangent_clip: pattern of modules -> radius; clips the cotangents at their outputs.
        radius: radius of the scalings 'radius', 'exact' and 'exact_layerwise'; 1 where an automatic scaling becomes
            'exact'.
        radius_quantile: track the radius as this private quantile.
        radius_noise_multiplier: noise of the quantile query, which joins the step.
        scaling_floor: smallest n_ik (or joint norm) by which an example is divided.
        secure: sum four draws for the noise of every coordinate; their law is normal out to 18.7 deviations.
        max_examples_per_unit: most rows of one protected unit; by default the number that the data module declares.
        allow_noncertified: needed for scaling 'batch_max'.
        method: with lipschitz, the other settings decide. worst_case and fix_lip (paper 000) replace scaling and
            projection; dpsgd_flat, dpsgd_per_layer and dpsgd_ghost clip each example's gradient with opacus and bound
            no layer; nonprivate has neither clipping nor noise, and guarantees nothing.
        clipping: clipping function of the dpsgd methods: local, global or automatic.
        clip_norm: norm to which the dpsgd methods clip each example's gradient.
        switch_at: share of the steps after which switch_to is in force.
        switch_to: another clipping function, or another of the scalings worst_case, layerwise and joint.
        physical_batch_size: largest expected micro-batch per process, in rows; a view is a row.
        noise_mode: distributed, replicated, or sharded, with which each process draws the noise and holds the
            optimizer's state of its share of the parameters.
        deterministic: on a GPU, use algorithms that repeat their bits, so that a run that continues after a crash
            repeats its steps; otherwise up to 50 steps count for each crash. A CPU always repeats its bits.
        tf32: on a GPU, let weight gradients of a run in 32-true round their factors to TF32, on tensor cores, and pay
            .3 % more noise for it. In bf16-mixed they always do, since factors in bfloat16 are exact in TF32.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        delta: float | None = None,
        epochs: float | None = None,
        steps: int | None = None,
        batch_size: float = 256,
        scaling: Literal[
            "auto", "worst_case", "layerwise", "joint", "radius", "exact", "exact_layerwise", "batch_max"
        ] = "auto",
        allocation: Literal["auto", "equal", "global", "optimal", "custom"] = "auto",
        group_weights: dict[str, float] | None = None,
        projection: Literal["clip", "clip_singular", "fixed", "bjorck", "frobenius"] = "clip",
        max_norm: float | dict[str, float] | Literal["auto"] | None = "auto",
        free_layers: list[str] | None = None,
        standardize: Literal["none", "mean", "mean_and_variance"] = "none",
        adjacency: Literal["add_remove", "replace_one"] = "add_remove",
        accountant: Literal["pld", "prv", "rdp"] = "pld",
        loss_clip: float | None = None,
        cotangent_clip: dict[str, float] | None = None,
        radius: float | None = None,
        radius_quantile: float | None = None,
        radius_noise_multiplier: float | None = None,
        scaling_floor: float = 1e-6,
        secure: bool = False,
        max_examples_per_unit: int | None = None,
        allow_noncertified: bool = False,
        method: Method = "lipschitz",
        clipping: Clipping = "local",
        clip_norm: float = 1.0,
        switch_at: float | None = None,
        switch_to: Literal["worst_case", "layerwise", "joint", "local", "global", "automatic"] | None = None,
        physical_batch_size: int | None = None,
        noise_mode: Literal["distributed", "replicated", "sharded"] = "distributed",
        deterministic: bool = False,
        tf32: bool = False,
    ) -> None:
        chosen = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        self.physical_batch_size = chosen.pop("physical_batch_size")
        self.noise_mode: str = chosen.pop("noise_mode")
        self.deterministic: bool = chosen.pop("deterministic")
        self.tf32: bool = chosen.pop("tf32")
        self._chosen: dict[str, Any] = settled(chosen.pop("method"), chosen)

    @property
    def epsilon(self) -> float | None:
        """The target to which noise is calibrated; None if the noise is given."""
        epsilon: float | None = self._chosen["epsilon"]
        return epsilon

    @property
    def leaves_norm_open(self) -> bool:
        """Returns whether exact norms of gradients are named, and the largest norm of a layer is left out."""
        named = self._chosen["scaling"] in ("exact", "exact_layerwise")
        return named and self._chosen["max_norm"] == "auto" and self._chosen["projection"] == "clip"

    def budget(self) -> tuple[Any, ...]:
        """Returns all settings that decide the noise of a target, besides the size of the data set."""
        return tuple(self._chosen[name] for name in _BUDGET)

    def with_noise(self, noise_multiplier: float) -> PrivacySettings:
        """Returns the same settings with the noise given in place of the target."""
        known = copy.copy(self)
        known._chosen = self._chosen | {"epsilon": None, "noise_multiplier": noise_multiplier}
        return known

    def of_unit(self, unit: str, rows: int) -> PrivacySettings:
        """Returns the settings for the unit that a data module declares: `example`, or `group` of up to `rows` rows."""
        given = self._chosen["max_examples_per_unit"]
        if unit == "example":
            return self  # rows per unit, if given, are the user's own statement about the rows
        if given not in (None, rows):
            raise ValueError(
                f"privacy.max_examples_per_unit is {given}, and the data module bounds a group to {rows} rows a step. "
                "HINT: leave it out; the data module's grouping declares it."
            )
        known = copy.copy(self)
        known._chosen = self._chosen | {"max_examples_per_unit": rows, "unit": unit}
        return known

    def plan(
        self,
        dataset_size: int,
        input_bound: float | None = None,
        preliminary: tuple[tuple[str, float], ...] = (),
    ) -> PrivacyPlan:
        """Returns the frozen plan for a data set of declared size N and the statistics that it releases.

        Raises:
            ValueError: If the settings have problems; it lists all of them.
        """
        chosen = dict(self._chosen)
        chosen["expected_batch_size"] = chosen.pop("batch_size")
        chosen["group_weights"] = tuple((chosen["group_weights"] or {}).items())
        chosen["free_layers"] = tuple(chosen["free_layers"] or ())
        chosen["cotangent_clip"] = tuple((chosen["cotangent_clip"] or {}).items())
        rows = 1 if chosen["max_examples_per_unit"] is None else chosen["max_examples_per_unit"]
        chosen["max_examples_per_unit"] = rows
        chosen.setdefault("unit", "example" if rows == 1 else "group")
        return PrivacyPlan.create(dataset_size=dataset_size, input_bound=input_bound, preliminary=preliminary, **chosen)
