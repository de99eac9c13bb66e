"""Parses a command's own options."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError in place of a page of usage, takes no abbreviations, and refuses empty
    values: a path that is empty, such as a variable of a shell that is not set, would be the current folder.

    Args:
        hint: what an error advises; how to list the options by default.
        **options: those of ArgumentParser.
    """

    def __init__(self, *, hint: str = "", **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})
        self._hint = hint or f"`{self.prog} --help` lists the options."

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. HINT: {self._hint}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if "" in arg_strings and action.nargs != argparse.PARSER:
            raise argparse.ArgumentError(action, "the value is empty")
        return super()._get_values(action, arg_strings)
