"""Gives a network the shapes that the data module declares, where a configuration leaves them open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jsonargparse import ArgumentParser

from lipdp_lightning.data_modules.base import PrivateDataModule

from .class_paths import Constructors

_DECLARED: dict[str, Callable[[PrivateDataModule], Any]] = {
    "input_shape": lambda data: list(data.input_shape),
    "outputs": lambda data: data.num_outputs,
}


def fill_shapes(config: Any, make: Constructors) -> None:
    """Replaces null for `input_shape` and `outputs` of the network by what the data module declares.

    The data module is made once more for it, which reads no row.
    """
    options = config.get("model.network.init_args")
    empty = [] if options is None else [name for name in _DECLARED if name in options and options[name] is None]
    if empty:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(PrivateDataModule, "data")
        data = make.make(parser, type(config)(data=config.data.clone())).data
        for name in empty:
            options[name] = _DECLARED[name](data)
