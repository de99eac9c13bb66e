"""Adds to the site what lies outside of docs/ or is no Markdown: README and other pages, and the tutorials."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# where a file of the repository is on the site
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "slurm/README.md": "slurm.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are made from other files of the repository."""
    for source, place in PLACES.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        content = as_markdown((ROOT / "docs" / file.src_uri).read_text(encoding="utf-8"), Path(file.src_uri).name)
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the page with links to where files of the repository are on the site."""
    place = page.file.src_uri
    source = next((name for name, at in PLACES.items() if at == place), f"docs/{place}")
    return LINK.sub(lambda match: _link(match, posixpath.dirname(source), posixpath.dirname(place)), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Returns the page with the headings of examples as the other parts of a docstring have them."""
    return html.replace("<p>Example::</p>", "<p><strong>Example:</strong></p>")


def _link(match: re.Match[str], folder: str, site_folder: str) -> str:
    mark, text, target = match.groups()
    path, hash_sign, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target) or not path:
        return match.group()
    file = posixpath.normpath(posixpath.join(folder, path))
    if file in PLACES:
        place = PLACES[file]
    elif file.startswith("docs/"):
        place = file.removeprefix("docs/")
        if place.endswith(".ipynb") and "download" not in text:
            place = place.removesuffix(".ipynb") + ".md"
    else:
        return text  # a file of the repository that is no page
    if text.endswith(".md") and (ROOT / file).is_file():
        text = f"*{_title(ROOT / file)}*"
    return f"{mark}[{text}]({posixpath.relpath(place, site_folder or '.')}{hash_sign}{anchor})"


def _title(file: Path) -> str:
    """Returns the heading of a page, which says more than the name of its file."""
    first = file.read_text(encoding="utf-8").partition("\n")[0]
    return first.removeprefix("# ").partition(":")[0]


# ---- notebooks


def as_markdown(notebook: str, name: str) -> str:
    """Returns an executed notebook as a page: text, code, and the outputs that were kept."""
    cells = json.loads(notebook)["cells"]
    parts = [part for cell in cells for part in _cell(cell)]
    return "\n\n".join([*parts, f"*This page is a notebook: [download it]({name}).*"]) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    source = _text(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [f"```python\n{source}\n```", *(_output(output) for output in cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="plot of the cell above" src="data:image/png;base64,{_text(data["image/png"]).strip()}">'
    text = _text(output.get("text") or data.get("text/plain", ""))
    return f'<div class="output" markdown>\n\n```text\n{text.rstrip()}\n```\n\n</div>'


def _text(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)
