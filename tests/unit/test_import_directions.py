"""The package's rooms depend on each other in one direction only (docs/layout.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "trainmux"
LAYOUT = REPOSITORY / "docs" / "layout.md"

# From the top down: a room may import itself and what stands above it.
ROOM_ORDER = (
    "ir",
    "runtime",
    "optim",
    "tracing",
    "fusion",
    "lowering",
    "profiling",
    "simulate",
    "rewrite",
    "scheduling",
    "engine",
    "reporting",
    "training",
    "fleet",
    "colocate",
    "workloads",
    "cli",
)
# Tighter than the order: these may import only the rooms named. ROOT is `import trainmux` itself.
ROOT = "the public surface"
ONLY = {
    "reporting": {"ir"},
    "training": {"ir"},
    "workloads": set(),
    "cli": {ROOT, "workloads"},
}
# Plain modules beside the rooms. Everyone may import errors; the other two are the outermost layer.
ERRORS = "errors"
OUTERMOST = {"__init__", "__main__"}
WITHOUT_CUDA = {"ir", "simulate", "rewrite", "scheduling", ERRORS}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@dataclass(frozen=True)
class Import:
    """One imported name: ``target`` is absolute (``trainmux.ir.Graph``), ``line`` where it is written."""

    target: str
    line: int


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[Import]:
    """Every import in ``tree``, inside functions and ``TYPE_CHECKING`` blocks too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = parents[: len(parents) - node.level + is_package]
                base = ".".join([*kept, base]) if base else ".".join(kept)
            yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _name_of(node.func) in {"import_module", "__import__"}:
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(first.value, node.lineno)


def _name_of(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def room_of(path: Path) -> str:
    """The room a file lies in, or the name of a module beside the rooms."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def room_of_target(target: str) -> str | None:
    """The room an import reaches; ``None`` if it leaves the package."""
    parts = target.split(".")
    if parts[0] != "trainmux":
        return None
    if len(parts) > 1 and (parts[1] in ROOM_ORDER or parts[1] in {ERRORS, *OUTERMOST}):
        return parts[1]
    return ROOT


def allowed_rooms(room: str) -> set[str]:
    if room == ERRORS:
        return set()
    if room in OUTERMOST:
        return {ERRORS, *ROOM_ORDER}
    above = set(ROOM_ORDER[: ROOM_ORDER.index(room)])
    return {room, ERRORS} | ONLY.get(room, above)


def violations(source: str, path: Path) -> list[str]:
    """Each import of ``source`` that its room may not have, as ``file:line imports room``."""
    is_package = path.name == "__init__.py"
    module = ".".join(["trainmux", *path.relative_to(PACKAGE).with_suffix("").parts])
    if is_package:
        module = module.removesuffix(".__init__")
    allowed = allowed_rooms(room_of(path))
    return [
        f"{relative(path)}:{found.line} imports {target}"
        for found in imports(ast.parse(source), module, is_package)
        if (target := room_of_target(found.target)) is not None and target not in allowed
    ]


def cuda_uses(source: str) -> list[int]:
    """Lines that import or name ``torch.cuda``."""
    tree = ast.parse(source)
    lines = [found.line for found in imports(tree, "trainmux", True) if found.target.startswith("torch.cuda")]
    lines += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "cuda"
        and isinstance(node.value, ast.Name)
        and node.value.id == "torch"
    ]
    return lines


def logic_lines(source: str) -> list[int]:
    """Lines of statements other than a docstring, imports, ``__all__`` and ``__version__``."""
    lines = []
    for node in ast.parse(source).body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        is_listing = bool(targets) and all(
            isinstance(target, ast.Name) and target.id in {"__all__", "__version__"} for target in targets
        )
        if not (is_text or is_listing or isinstance(node, ast.Import | ast.ImportFrom)):
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_point_up_the_order(path: Path) -> None:
    assert violations(path.read_text(encoding="utf-8"), path) == []


@pytest.mark.parametrize("path", [p for p in SOURCES if room_of(p) in WITHOUT_CUDA], ids=relative)
def test_types_and_errors_never_touch_cuda(path: Path) -> None:
    assert cuda_uses(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name == "__init__.py"], ids=relative)
def test_packages_open_without_logic(path: Path) -> None:
    assert logic_lines(path.read_text(encoding="utf-8")) == []


def test_every_room_has_a_place_in_the_order() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and list(path.rglob("*.py"))}
    assert rooms == set(ROOM_ORDER)
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules <= {ERRORS, *OUTERMOST}


def test_the_layout_page_lists_the_rooms_in_this_order() -> None:
    listed = re.findall(r"^\| `(\w+)/` \|", LAYOUT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert tuple(listed) == ROOM_ORDER


@pytest.mark.parametrize(
    ("file", "source", "bad"),
    [
        ("ir/graph.py", "from trainmux.tracing import trace", True),
        ("ir/graph.py", "def f():\n    import trainmux.engine.cpu", True),
        ("ir/graph.py", "from .. import fleet", True),
        ("ir/graph.py", "from ..errors import TraceError\nfrom . import _graph", False),
        ("ir/__init__.py", "from ._graph import Graph", False),
        ("ir/__init__.py", "from ..fleet import Fleet", True),
        ("fusion/rules.py", "import importlib\nimportlib.import_module('trainmux.fleet')", True),
        ("fusion/rules.py", "from trainmux.tracing import trace\nimport torch", False),
        ("fusion/rules.py", "import trainmux", True),
        (
            "fleet/_fleet.py",
            "from trainmux.training import x\nfrom ..reporting import text",
            False,
        ),
        ("training/fit.py", "from trainmux.engine import cpu", True),
        ("reporting/text.py", "from trainmux.ir import Graph\nfrom trainmux.errors import X", False),
        ("reporting/text.py", "from trainmux.runtime import device", True),
        ("workloads/vision.py", "from trainmux.errors import X\nfrom .dense import mlp", False),
        ("workloads/vision.py", "import trainmux as tm", True),
        ("cli/demo.py", "import trainmux as tm\nfrom trainmux import Fleet", False),
        ("cli/demo.py", "from trainmux.fleet import Fleet", True),
        ("errors.py", "from .ir import Graph", True),
        ("__init__.py", "from .fleet import Fleet", False),
    ],
)
def test_the_check_itself(file: str, source: str, bad: bool) -> None:
    assert bool(violations(source, PACKAGE / file)) is bad


def test_the_other_checks_themselves() -> None:
    assert cuda_uses("import torch\ntorch.cuda.synchronize()") == [2]
    assert cuda_uses("from torch import cuda") == [1]
    assert cuda_uses("import torch\ntorch.empty(1)") == []
    assert logic_lines('"""Doc."""\nfrom .a import b\n__all__ = ["b"]\n__version__ = "1"') == []
    assert logic_lines("import os\nif os.name:\n    x = 1\ny = 2") == [2, 4]
