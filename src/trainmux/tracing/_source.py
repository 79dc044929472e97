"""Places in the user's code, and errors that name them."""

from __future__ import annotations

import functools
import re
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

from trainmux.errors import TraceError, first_line

_TORCH_ROOT = str(Path(torch.__file__).parent)
_OWN_ROOT = str(Path(__file__).parent.parent)
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
# By name: a file with the ending .pth, or PYTHONPATH, may add such a folder of another interpreter.
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def _is_installed(path: str) -> bool:
    return not _INSTALLED.isdisjoint(Path(path).parts)


@functools.cache
def is_user_file(path: str) -> bool:
    """Whether a source file is none of Python's, torch's or ours."""
    is_standard = path.startswith(_STANDARD) and not _is_installed(path)
    return not is_standard and not path.startswith(("<", _TORCH_ROOT, _OWN_ROOT))


@functools.cache
def is_library_file(path: str) -> bool:
    """Whether a source file belongs to Python, an installed package or us; what was typed in does not."""
    if path.startswith("<"):
        return path.startswith("<frozen")
    return not is_user_file(path) or _is_installed(path)


def innermost_user_frame(tb: TracebackType | None) -> str | None:
    """``file:line in function`` of the deepest user frame of a traceback."""
    return _innermost(traceback.extract_tb(tb))


def current_user_frame() -> str | None:
    """``file:line in function`` of the user code that is running."""
    return _innermost(traceback.extract_stack())


def _innermost(frames: traceback.StackSummary) -> str | None:
    for frame in reversed(frames):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return None


def node_location(node: fx.Node) -> str | None:
    """``file:line in function`` of the user code that made a node, where the tracer recorded it."""
    for match in reversed(list(_FRAME.finditer(node.meta.get("stack_trace") or ""))):
        if is_user_file(match["file"]):
            return f"{match['file']}:{match['line']} in {match['function']}"
    return None


def failed_node(error: BaseException) -> fx.Node | None:
    """The node that was run when an error came up in the code of a graph."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule) and frame.f_code.co_filename.startswith("<eval_with_key>"):
            lines = module.code.splitlines()
            name = lines[line - 1].partition(" = ")[0].strip() if line <= len(lines) else ""
            return next((node for node in module.graph.nodes if node.name == name), None)
    return None


def failure_text(error: BaseException) -> str:
    """The first line of an error that came up in a graph, with the operator and the user's line."""
    node = failed_node(error)
    if node is None:
        return first_line(error)
    location = node_location(node)
    where = f" at {location}" if location else ""
    return f"{node.meta.get('operator', node.target)}{where}: {first_line(error)}"


def refusal(what: str, reason: str, location: str | None, op: object = None) -> TraceError:
    """An error that says ``what`` happened where in the user's code, what was expected, and a remedy."""
    where = f" at {location}" if location else ""
    return TraceError(f"{what}{where}{reason}", op=None if op is None else str(op), location=location)
