"""Where in the user's code something happened."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

import torch
from torch import fx

_TORCH_ROOT = str(Path(torch.__file__).parent)
_OWN_ROOT = str(Path(__file__).parent.parent)
_WORKLOADS = str(Path(__file__).parent.parent / "workloads")
_LIBRARY = sysconfig.get_path("stdlib")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


def is_user_file(path: str) -> bool:
    """Whether a source file is neither torch's, Python's nor ours (the example models count as a user's)."""
    if path.startswith(("<", _TORCH_ROOT)):
        return False
    if path.startswith(_LIBRARY) and "site-packages" not in path:
        return False
    return not path.startswith(_OWN_ROOT) or path.startswith(_WORKLOADS)


def innermost_user_frame(tb: TracebackType | None) -> str | None:
    """``file:line in function`` of the deepest user frame of a traceback."""
    for frame in reversed(traceback.extract_tb(tb)):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return None


def node_location(node: fx.Node) -> str | None:
    """``file:line in function`` of the user code that made a node, where the tracer recorded it."""
    for match in reversed(list(_FRAME.finditer(node.meta.get("stack_trace") or ""))):
        if is_user_file(match["file"]):
            return f"{match['file']}:{match['line']} in {match['function']}"
    return None
