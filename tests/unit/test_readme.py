"""What the documents show works: the README's Python is run, make targets, links and named files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import trainmux

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for found, body in FENCED.findall(README) if found == language]


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks follow one another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    examples = blocks("python")
    assert len(examples) > 4
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, source in enumerate(examples, start=1):
        exec(compile(source, f"README.md, Python block {number}", "exec"), namespace)


def test_make_commands_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    shown = "\n".join([*blocks("sh"), *re.findall(r"`(make [^`]*)`", README)])
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", shown))
    assert named >= {"demo", "test", "test-gpu"}
    assert named <= set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    assert re.findall(r"^make ([a-z-]+)", blocks("sh")[0], flags=re.MULTILINE) == ["demo", "test"]


def test_linked_and_named_files_exist() -> None:
    folders = ("src", "tests", "benchmarks")
    known = [f"/{path}" for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "docs").rglob("*.md")]
    missing = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)
        missing += [(page.name, link) for link in links if not (page.parent / link).exists()]
        named = re.findall(r"`([a-z_0-9/]+\.py)`", text)
        missing += [(page.name, name) for name in named if not any(one.endswith(f"/{name}") for one in known)]
    assert missing == []


def test_the_reference_has_every_public_name_once() -> None:
    pages = sorted((REPOSITORY / "docs" / "reference").glob("*.md"))
    texts = [page.read_text(encoding="utf-8") for page in pages]
    named = [name for text in texts for name in re.findall(r"^::: trainmux\.(\w+)$", text, re.MULTILINE)]
    public = set(trainmux.__all__) - {"__version__", "errors"}
    assert sorted(named) == sorted(public), "put `::: trainmux.NAME` onto a page of docs/reference"
