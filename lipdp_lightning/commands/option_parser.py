"""Parses a command's own options."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError in place of a page of usage, and takes no abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. HINT: `{self.prog} --help` lists the options.")
