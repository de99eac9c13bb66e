"""Writes the report files of a run directory."""

from __future__ import annotations

from pathlib import Path

from lipdp_lightning.report.atomic import write_all_atomically
from lipdp_lightning.report.model import RunFacts, report_json
from lipdp_lightning.report.render_html import render_html
from lipdp_lightning.report.render_markdown import render_markdown

__all__ = ["HTML_NAME", "JSON_NAME", "MARKDOWN_NAME", "write_report"]

JSON_NAME = "privacy_report.json"
MARKDOWN_NAME = "privacy_report.md"
HTML_NAME = "report.html"


def write_report(directory: str | Path, facts: RunFacts, *, page: bool = True) -> dict[str, Path]:
    """Writes the reports of a run.

    All of them are rendered before anything is written, so an error leaves the directory as it was.

    Args:
        directory: the folder to write into.
        facts: what the reports say.
        page: whether to write the HTML page beside JSON and Markdown; drawing its plots takes a second or more.

    Returns:
        The paths by file name.
    """
    contents = {JSON_NAME: report_json(facts), MARKDOWN_NAME: render_markdown(facts)}
    if page:
        contents[HTML_NAME] = render_html(facts)
    return write_all_atomically(directory, contents)
