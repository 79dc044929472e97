"""Pages of the repository's root in the site, and links as they are there.

Named in mkdocs.yml under ``hooks``; MkDocs calls the functions ``on_...``.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages beside docs/ that are part of the site, and their names there."""
LINK = re.compile(r"\[([^\]]*)\]\(((?!https?:|#)[^)#\s]+)([^)]*\))")


def on_config(config: Any) -> None:
    """Put the pages that a pattern stands for into the navigation: those that are not named in it."""
    docs = Path(config.docs_dir)
    named = set(re.findall(r"[\w/.-]+\.md", str(config.nav)))

    def expanded(item: Any) -> Any:
        if isinstance(item, dict):
            return {title: expanded(one) for title, one in item.items()}
        if isinstance(item, str) and "*" in item:
            return sorted({path.relative_to(docs).as_posix() for path in docs.glob(item)} - named)
        if isinstance(item, list):
            found = [expanded(one) for one in item]
            return [page for one in found for page in (one if isinstance(one, list) else [one])]
        return item

    config.nav = expanded(config.nav)


def on_files(files: Files, config: Any) -> None:
    """Add the pages of the root, and what pages link to outside of docs/."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(REPOSITORY / name).read_text(encoding="utf-8")))
    for file in list(files.documentation_pages()):
        for _, link, _ in LINK.findall(file.content_string):
            path = _in_repository(file.src_uri, link)
            is_elsewhere = not (path in PAGES or path.startswith("docs/") or files.get_file_from_path(path))
            if is_elsewhere and (REPOSITORY / path).is_file():
                files.append(File.generated(config, path, abs_src_path=str(REPOSITORY / path)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at where pages are in the site; it has no folders, so links to those become text."""

    def moved(found: re.Match[str]) -> str:
        text, link, rest = found.groups()
        path = _in_repository(page.file.src_uri, link)
        if (REPOSITORY / path).is_dir():
            return text
        place = PAGES.get(path, path.removeprefix("docs/"))
        return f"[{text}]({posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or '.')}{rest}"

    return LINK.sub(moved, markdown)


def _in_repository(page: str, link: str) -> str:
    """The path in the repository of what a page of the site links to."""
    folder = "" if page in PAGES.values() else posixpath.join("docs", posixpath.dirname(page))
    return posixpath.normpath(posixpath.join(folder, link))
