"""Objects of users' Python files, named on the command line as ``FILE:NAME``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import typer

T = TypeVar("T")


def load(text: str, kind: type[T]) -> T:
    """Give the ``kind`` that ``FILE:NAME`` names: one that is there, or what the function NAME makes.

    ``typer.BadParameter`` where the file or the name does not exist, or is something else.
    """
    path_text, colon, name = text.rpartition(":")
    path = Path(path_text)
    if not colon or not name or not path.is_file():
        raise typer.BadParameter(f"expected FILE:NAME with a Python file that exists, got {text}")
    found = getattr(_module(path), name, None)
    if found is None:
        raise typer.BadParameter(f"expected {name!r} in {path}, got no such name")
    made = found() if callable(found) and not isinstance(found, kind) else found
    if not isinstance(made, kind):
        raise typer.BadParameter(
            f"expected {name!r} in {path} to be a {_kind_text(kind)} or a function that makes one, "
            f"got {type(made).__name__}"
        )
    return made


def _kind_text(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"trainmux.{kind.__name__}"


def _module(path: Path) -> ModuleType:
    """Import a file, once for all names that it is asked for."""
    name = f"trainmux_user_file_{path.resolve().as_posix().encode().hex()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # not named *.py
        raise typer.BadParameter(f"expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
