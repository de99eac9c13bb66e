"""The documentation as a site: every page is in its navigation, and a broken link fails the build."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT

CONFIG = ROOT / "mkdocs.yml"
MADE_OF_OTHERS = {"index.md", "contributing.md", "changelog.md", "slurm.md"}
# what another host would see of a reader
LOADED = re.compile(
    r"<(?:script|img|iframe)[^>]* src=\"(https?://[^\"]+)|<link[^>]*rel=\"stylesheet\"[^>]*href=\"(https?://[^\"]+)"
)


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason=f"the site needs {name} of the extra 'docs', from Python 3.11 on")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(site),
    ]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=config.parent, timeout=600, check=False
    )


def navigation() -> list[str]:
    text = CONFIG.read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r"^ +- ([\w/]+\.md)$", text, re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    notebooks = {str(path.relative_to(docs).with_suffix(".md")) for path in docs.rglob("*.ipynb")}
    listed = navigation()
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | notebooks | MADE_OF_OTHERS


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    built = build(CONFIG, tmp_path / "site")
    assert built.returncode == 0, built.stderr[-2000:]
    for page in navigation():
        text = (tmp_path / "site" / page).with_suffix(".html").read_text(encoding="utf-8")
        assert "<article" in text and LOADED.findall(text) == [], page
    reference = (tmp_path / "site/reference/python.html").read_text(encoding="utf-8")
    assert 'id="lipdp_lightning.adoption.privatize.privatize"' in reference
    assert "Raises" in reference and "Example::" not in reference
    tutorial = (tmp_path / "site/tutorials/3_what_epsilon_means_and_how_to_attack_it.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in tutorial and "the promise is false" in tutorial


@pytest.mark.slow
@pytest.mark.parametrize("link", ["[a](gone.md)", "[a](guarantee.md#no-such-part)", "[a](../docs/gone.md)"])
def test_a_broken_link_fails_the_build(link: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "slurm", "lipdp_lightning"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copy(CONFIG, tmp_path)
    with open(tmp_path / "docs/pitfalls.md", "a", encoding="utf-8") as page:
        page.write(f"\n{link}\n")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0 and "pitfalls.md" in built.stderr
