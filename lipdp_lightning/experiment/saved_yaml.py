"""Writes YAML that the parser of configurations reads as what was written."""

from __future__ import annotations

import re
from typing import Any

import yaml
from jsonargparse import set_dumper


class _Dumper(yaml.SafeDumper):
    """Quotes text that the parser, but not YAML 1.1, takes for a number, such as 1e3, and escapes rare line breaks."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Returns text, with double quotes if it holds a line break that single quotes would turn into a blank."""
        style = '"' if set(text) & set("\x85\u2028\u2029") else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)

_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9._]+(?:[eE][-+]?[0-9]+)?$"), list("-+.0123456789")
)


def saved_yaml(content: Any) -> str:
    """Returns a configuration as YAML, in the order of its keys."""
    return yaml.dump(content, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def use_saved_yaml(parser_mode: str) -> None:
    """Lets parsers of a mode write their configurations in this form."""
    set_dumper(parser_mode, saved_yaml)
