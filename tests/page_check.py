"""Finds on an HTML page whatever would load or run something that is not its own."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from html.parser import HTMLParser
from pathlib import Path

from lipdp_lightning import report

SCRIPT = (Path(report.__file__).parent / "templates" / "page.js").read_text(encoding="utf-8")
VOID = {"meta", "br", "hr", "img", "link", "input"}
LOADING = {"src", "href", "xlink:href", "srcset", "data", "poster", "action", "background", "formaction"}
FORBIDDEN = {"link", "iframe", "object", "embed", "img", "base", "form", "foreignobject"}


class Page(HTMLParser):
    """Every tag, attribute and text of a page, and what is not allowed on it."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.problems: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(page)
        self.close()
        digests = [b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in self.scripts]
        if self.scripts != [SCRIPT] or not re.search(rf"script-src 'sha256-{re.escape(digests[0])}'; base-uri", page):
            self.problems.append(f"{len(self.scripts)} scripts, or one that the page's policy does not name")
        if self.open:
            self.problems.append(f"never closed: {self.open}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in FORBIDDEN:
            self.problems.append(f"<{tag}>")
        self.scripts += [""] if tag == "script" else []
        for name, value in attrs:
            text = value or ""
            self.attributes.append((tag, name, text))
            if name == "id":
                self.ids.append(text)
            if name.startswith("on") or (name in LOADING and not text.startswith("#")):
                self.problems.append(f"<{tag} {name}={text}>")
            if re.search(r"url\((?!#)|@import|javascript:", text):
                self.problems.append(f"<{tag} {name}={text}>")
            self.references += re.findall(r"url\(#([^)]*)\)", text)
            if name.endswith("href"):
                self.references.append(text.removeprefix("#"))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style" and re.search(r"url\(|@import", data):
            self.problems.append("style that loads something")
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
            return
        self.texts.append(data)
