"""Makes the model that a stored configuration describes, without its data, plan and trainer."""

from __future__ import annotations

from typing import Any

import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser

from ..bounds.losses import Loss
from ..training.module import PrivateModule
from .foreign_code import refuse_projects
from .one_line import described
from .short_names import PARSER_MODE, with_full_names


def stored_model(config: str, place: object) -> PrivateModule:
    """Returns the module of the group ``model``; what the configuration may name is for the caller to check.

    Raises:
        ValueError: If it cannot be made; ``place`` is named in the message.
    """
    refuse_projects(config, place)
    try:
        content = yaml.safe_load(config)
        set_parsing_settings(subclasses_enabled=[Loss])
        parser = LightningArgumentParser(exit_on_error=False, parser_mode=PARSER_MODE)
        parser.add_class_arguments(PrivateModule, "model")
        parsed = parser.parse_object({"model": with_full_names(content["model"])})
        module: Any = parser.instantiate_classes(parsed)["model"]
    except Exception as error:  # whatever constructors and the parser raise
        raise ValueError(
            f"the model of {place} cannot be made: {described(error)}. HINT: use the version that trained it, and make "
            "what its configuration names importable."
        ) from error
    assert isinstance(module, PrivateModule)
    return module
