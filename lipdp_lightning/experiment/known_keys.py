"""Lists the keys of a configuration that do not depend on a class path."""

from __future__ import annotations

import inspect

import lightning

from ..training.module import PrivateModule
from ..training.settings import PrivacySettings

_GROUPS = {"model": PrivateModule, "privacy": PrivacySettings, "trainer": lightning.Trainer}
_PLAIN = ("config", "seed_everything", "data", "optimizer", "lr_scheduler", "lr_interval", *_GROUPS)


def known_keys() -> list[str]:
    """Returns the groups, and the dotted keys of the groups whose class is known."""
    inside = [f"{group}.{name}" for group, kind in _GROUPS.items() for name in inspect.signature(kind).parameters]
    return [*_PLAIN, *inside, "data.class_path", "data.init_args", "optimizer.class_path", "optimizer.init_args"]
