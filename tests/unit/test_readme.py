"""What the README shows works: its Python is run, its make targets exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [body for found, body in FENCED.findall(README) if found == language]


def make_targets() -> set[str]:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))


def test_python_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks follow one another, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    examples = blocks("python")
    assert examples
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, source in enumerate(examples, start=1):
        exec(compile(source, f"README.md, Python block {number}", "exec"), namespace)


def test_python_examples_show_the_whole_public_surface() -> None:
    source = "\n".join(blocks("python"))
    for call in (
        *("tm.Member(", "tm.Fleet(", "fleet.step(", "fleet.fit(", "fleet.evaluate(", "fleet.sync("),
        *("fleet.save(", "fleet.restore(", "fleet.drop(", "fleet.replace(", "fleet.add(", "fleet.explain("),
        *("fleet.plan(", "plan.explain(", "plan.report(", "plan.trace(", "plan.save(", "tm.Plan.load("),
    ):
        assert call in source


def test_make_commands_exist() -> None:
    shown = "\n".join([*blocks("sh"), *re.findall(r"`(make [^`]*)`", README)])
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", shown))
    assert named >= {"demo", "test", "test-gpu"}
    assert named <= make_targets()


def test_the_first_commands_are_demo_and_test() -> None:
    assert re.findall(r"^make ([a-z-]+)", blocks("sh")[0], flags=re.MULTILINE) == ["demo", "test"]


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (REPOSITORY / target).is_file(), target
