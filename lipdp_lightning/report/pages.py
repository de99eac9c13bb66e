"""Fills the templates of pages: whatever a template shows of a value is visible text, and never markup."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from functools import lru_cache, partial
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lipdp_lightning.extras import is_installed
from lipdp_lightning.report.figure_style import COLOURS, DARK_COLOURS
from lipdp_lightning.report.formats import clean_lines, clean_text

__all__ = ["render_page"]

SCRIPT = "page.js"
# If a string slips through the escaping, the browser still refuses to load anything, or to run any other script.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'; base-uri 'none'; "
    "form-action 'none'"
)


def render_page(template: str, **values: Any) -> str:
    """Returns a page, made of a template of this folder.

    Values are escaped, and become one line each; only those of type :class:`markupsafe.Markup` are taken as markup.
    The page holds its style and its script, and names the digest of that script as the only one that may run.
    """
    return clean_lines(_environment().get_template(template).render(values))  # figures hold names too


def _shown(value: Any) -> Any:
    return value if hasattr(value, "__html__") else clean_text(value)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    loader = PackageLoader("lipdp_lightning.report")
    environment = Environment(
        loader=loader, autoescape=True, finalize=_shown, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    script, _, _ = loader.get_source(environment, SCRIPT)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {
        "script": Markup(script), "policy": Markup(POLICY.format(digest=digest)), "light": vars(COLOURS),
        "dark": vars(DARK_COLOURS), "has_plots": partial(is_installed, "matplotlib"),
    }  # fmt: skip
    return environment
