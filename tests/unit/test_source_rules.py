"""Rules of the source that neither ruff nor import-linter (pyproject.toml) can express."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import trainmux

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(trainmux.__file__).parent
PURE = ("ir", "planning", "sizes.py", "errors.py")
"""Data and decisions only: planning for a GPU works where there is none."""


def test_pure_rooms_never_touch_cuda() -> None:
    sources = [
        path for name in PURE for path in [PACKAGE / name, *(PACKAGE / name).rglob("*.py")] if path.is_file()
    ]
    assert len(sources) > 20
    offenders = [
        f"{path.name}:{node.lineno}"
        for path in sources
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute | ast.Import | ast.ImportFrom)
        and re.search(r"\btorch\.cuda\b|from torch import .*\bcuda\b", ast.unparse(node))
    ]
    assert offenders == []


def test_packages_open_without_logic() -> None:
    offenders = []
    for path in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            targets = [ast.unparse(one) for one in node.targets] if isinstance(node, ast.Assign) else [""]
            is_listing = set(targets) <= {"__all__", "__version__"}
            if not (is_text or is_listing or isinstance(node, ast.Import | ast.ImportFrom)):
                offenders.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert offenders == []


def test_the_records_that_the_verifier_shares_with_planners_decide_nothing() -> None:
    for name in ("_graph", "_profile", "_program"):
        body = ast.parse((PACKAGE / "ir" / f"{name}.py").read_text(encoding="utf-8")).body
        assert not [node.name for node in body if isinstance(node, ast.FunctionDef)]


def test_the_layout_page_lists_the_rooms_in_the_order_that_is_enforced() -> None:
    config = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    layers = config["tool"]["importlinter"]["contracts"][0]["layers"]
    page = (REPOSITORY / "docs" / "layout.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)/` \|", page, flags=re.MULTILINE)
    rooms = [layer for layer in layers if (PACKAGE / layer).is_dir()]
    assert list(reversed(listed)) == rooms
