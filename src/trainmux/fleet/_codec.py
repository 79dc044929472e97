"""A checkpoint's document ↔ strict JSON values, with tensors taken out on the way.

Plain JSON types stand for themselves. Everything else is an object with one key that starts with ``$``
(``{"$tuple": [...]}``); a dict whose own keys could be mistaken for that is written as a list of pairs.
Reading looks tags up in a closed table: nothing in a file can name code to run.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from trainmux.errors import CheckpointError

TENSOR_PREFIX = "__document__."
"""Begins the names of tensors that were found inside a document."""

_MAX_DEPTH = 100
"""Levels: deep enough for any state dict, far below the recursion limits of Python and its JSON parser."""

_MAX_INT_BITS = 8192
"""Python refuses to read decimal texts of more than 4300 digits."""

_DTYPES = {
    str(item).removeprefix("torch."): item for item in vars(torch).values() if isinstance(item, torch.dtype)
}
"""By name, so that a file's text is looked up in a closed table and never as an attribute of a module."""

_CONTAINERS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "$tuple": (tuple, tuple),
    "$dict": (dict, dict),
    "$ordered": (OrderedDict, OrderedDict),
    "$counter": (Counter, lambda pairs: Counter(dict(pairs))),  # Counter(pairs) would count the pairs
}
_TAGS = {kind: tag for tag, (kind, _) in _CONTAINERS.items()}


def encode(value: Any, tensors: dict[str, torch.Tensor], path: str = "", depth: int = 0) -> Any:
    """Turn a document into a JSON value and add the tensors inside to ``tensors``.

    Refuses, naming the path to it, what a checkpoint cannot hold.
    """
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            f"the checkpoint document is nested deeper than {_MAX_DEPTH} levels at {path[:80]!r}…; "
            "does a list or dict contain itself?"
        )
    if isinstance(value, np.generic):
        value = value.item()  # extended precision has no Python counterpart, stays as it is and is refused
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_INT_BITS:
        raise CheckpointError(f"a checkpoint cannot hold {path}: an int of more than {_MAX_INT_BITS} bits")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        name = f"{TENSOR_PREFIX}{len(tensors)}"
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}

    def items(values: Iterable[Any]) -> list[Any]:
        return [encode(item, tensors, f"{path}[{index}]", depth + 1) for index, item in enumerate(values)]

    if kind is list:
        return items(value)
    if kind is tuple:
        return {"$tuple": items(value)}
    if kind is deque:
        return {"$deque": [value.maxlen, items(value)]}
    if kind not in _TAGS:
        raise CheckpointError(
            f"a checkpoint cannot hold {path or 'the document'}, a {kind.__module__}.{kind.__qualname__}: "
            "expected None, bool, int, float, str, list, tuple, dict, Counter, deque, torch dtype or tensor. "
            "Convert it to one of these, or leave it out of the state"
        )
    pairs = []
    for key, item in value.items():
        # A tensor is hashable only by identity, so as a key it would not be found again after reading.
        if isinstance(key, torch.Tensor):
            raise CheckpointError(f"a checkpoint cannot hold a tensor as a key of {path or 'the document'}")
        found = encode(item, tensors, _child(path, key), depth + 1)
        pairs.append([encode(key, tensors, f"{path}.<key>", depth + 1), found])
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return dict(pairs)
    return {_TAGS[kind]: pairs}


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Undo `encode`; ``tensors`` holds those it took out.

    Raises ``CheckpointError`` for a value that `encode` never writes.
    """
    try:
        return _decode(value, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the checkpoint's document is malformed, or of a torch with other dtypes: {error!r}"
        ) from error


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Return ``torch.float32`` for ``"float32"``; ``KeyError`` for one that this torch does not have."""
    return _DTYPES[name]


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    if len(value) != 1:
        raise ValueError(f"{tag} stands beside other keys")
    content = value[tag]
    if tag == "$tensor":
        return tensors[content]
    if tag == "$float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
    if tag == "$dtype":
        return dtype_named(content)
    if tag == "$deque":
        maxlen, items = content
        return deque(_decode(items, tensors), maxlen)
    return _CONTAINERS[tag][1](_decode(content, tensors))


def _child(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"
