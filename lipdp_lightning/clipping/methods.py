"""Defines ``privacy.method``, one key that changes the other settings of the privacy group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

Method = Literal["lipschitz", "worst_case", "fix_lip", "dpsgd_flat", "dpsgd_per_layer", "dpsgd_ghost", "nonprivate"]
Clipping = Literal["local", "global", "automatic"]
METHODS: tuple[str, ...] = get_args(Method)

_NO_RADIUS = {"radius": None, "radius_quantile": None, "radius_noise_multiplier": None}
# settings that bound a network or scale by its bounds, which the other methods ignore
_NO_LIPSCHITZ = {
    **_NO_RADIUS, "allocation": "global", "group_weights": None, "projection": "clip", "max_norm": None,
    "free_layers": None, "standardize": "none", "loss_clip": None, "cotangent_clip": None,
}  # fmt: skip
_NO_CLIPPING = {"clipping": None, "clip_norm": None}


def settled(method: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings with those replaced that the method decides; the others keep what the user chose."""
    if method not in METHODS:
        raise ValueError(f"method {method!r} is unknown. HINT: use one of {', '.join(METHODS)}.")
    if method == "lipschitz":
        return {**chosen, **_NO_CLIPPING}
    if method == "worst_case":
        return {**chosen, **_NO_CLIPPING, **_NO_RADIUS, "scaling": "worst_case", "projection": "clip"}
    if method == "fix_lip":
        norm = 1.0 if chosen["max_norm"] in (None, "auto") else chosen["max_norm"]
        fixed = {"scaling": "worst_case", "projection": "fixed", "max_norm": norm}
        return {**chosen, **_NO_CLIPPING, **_NO_RADIUS, **fixed}
    if method == "nonprivate":
        bare = {"scaling": "none", "epsilon": None, "noise_multiplier": 0.0, "allow_noncertified": True}
        return {**chosen, **_NO_CLIPPING, **_NO_LIPSCHITZ, **bare, "switch_at": None, "switch_to": None}
    return {**chosen, **_NO_LIPSCHITZ, "scaling": f"clip_{method.removeprefix('dpsgd_')}"}
