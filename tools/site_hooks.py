"""What mkdocs asks while it builds the site: the README is its first page, and links to files that are no pages name
them instead."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(
    r"```.*?```|(?P<picture>!?)\[(?P<label>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<place>#[^)\s]*)?\)|`[^`\n]*`", re.DOTALL
)
"""A link, or code, in which nothing is one."""


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md as the first page, and the icon of the server's pages."""
    icon = ROOT / "tureen" / "app" / "playground" / "icon.svg"
    files.append(File.generated(config, "images/icon.svg", abs_src_path=str(icon)))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=relinked(text, "")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the text of a page with links as the site has them."""
    path = page.file.src_uri
    return markdown if path == "index.md" else relinked(markdown, posixpath.join("docs", posixpath.dirname(path)))


def relinked(markdown: str, folder: str) -> str:
    """Returns a text of `folder` in the repository: a link to a page is one between pages of the site, one to another
    file of the repository is the file's name. What is code stays."""
    here = _in_docs(folder)

    def replaced(match: re.Match[str]) -> str:
        target = match["target"]
        if target is None or "://" in target or target.startswith("mailto:"):
            return match.group()
        path = posixpath.normpath(posixpath.join(folder, target))
        path = {"README.md": "docs/index.md", "docs/decisions": "docs/decisions/README.md"}.get(path, path)
        if path == "docs/index.md" or (path.startswith("docs/") and (ROOT / path).is_file()):
            to = posixpath.relpath(_in_docs(path), here)
            return f"{match['picture']}[{match['label']}]({to}{match['place'] or ''})"
        return match["label"] if match["label"].strip("`") == path else f"{match['label']} (`{path}`)"

    return LINK.sub(replaced, markdown)


def _in_docs(path: str) -> str:
    return path.removeprefix("docs").removeprefix("/") or "."
