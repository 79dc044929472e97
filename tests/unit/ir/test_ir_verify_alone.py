"""The verifier stands alone: of the package it knows the types, and nobody uses a part of it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import trainmux.ir

ROOM = Path(trainmux.ir.__file__).parent
PACKAGE = ROOM.parent
TYPES = ("_graph", "_profile", "_program")
VERIFIER = sorted(path.stem for path in ROOM.glob("_verify*.py"))


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports, and everything else by its first name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(f"{'.' * node.level}{node.module or ''}")
    return {name if name.startswith(("trainmux", ".")) else name.partition(".")[0] for name in found}


@pytest.mark.parametrize("name", VERIFIER)
def test_it_imports_types_errors_and_itself(name: str) -> None:
    allowed = {f"trainmux.ir.{found}" for found in (*TYPES, *VERIFIER)} | {"trainmux.errors"}
    standard = {"__future__", "bisect", "collections", "dataclasses", "enum"}
    assert imported(ROOM / f"{name}.py") <= allowed | standard


@pytest.mark.parametrize("name", TYPES)
def test_the_types_it_shares_with_planners_decide_nothing(name: str) -> None:
    body = ast.parse((ROOM / f"{name}.py").read_text(encoding="utf-8")).body
    assert not [node.name for node in body if isinstance(node, ast.FunctionDef)]


def test_nobody_else_uses_a_part_of_it() -> None:
    parts = {f"trainmux.ir.{name}" for name in VERIFIER}
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.stem not in VERIFIER and imported(path) & parts
    }
    assert users == {"ir/__init__.py"}
