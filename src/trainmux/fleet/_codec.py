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
from trainmux.fleet._tensor_file import dtype_name, dtype_named

JSONValue = Any

# Deep enough for any state dict; far below Python's and the JSON parser's own recursion limits.
_MAX_DEPTH = 100

# Python refuses to read decimal texts of more than 4300 digits.
_MAX_INT_BITS = 8192

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class DocumentEncoder:
    """Turns one document into a JSON value and gathers the tensors found inside.

    ``tensors`` maps the names given to them (``<prefix>0``, ``<prefix>1``, …) to the tensors.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, document: Mapping[str, Any]) -> JSONValue:
        """``document`` as a JSON value; refuses, by path, what a checkpoint cannot hold."""
        return self._value(dict(document), "", 0)

    def _value(self, value: Any, path: str, depth: int) -> JSONValue:
        if depth > _MAX_DEPTH:
            raise CheckpointError(
                f"the checkpoint document is nested deeper than {_MAX_DEPTH} levels at {path[:80]!r}…; "
                "does a list or dict contain itself?"
            )
        if isinstance(value, np.generic):
            value = _python_scalar(value, path)
        kind = type(value)
        if kind is int and value.bit_length() > _MAX_INT_BITS:
            raise CheckpointError(
                f"a checkpoint cannot hold {path}: an int of more than {_MAX_INT_BITS} bits"
            )
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            name = f"{self._prefix}{len(self.tensors)}"
            self.tensors[name] = value
            return {"$tensor": name}
        if isinstance(value, torch.dtype):
            return {"$dtype": dtype_name(value)}
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if kind is deque:
            return {"$deque": [value.maxlen, self._items(value, path, depth)]}
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self._value(item, _child(path, key), depth + 1) for key, item in value.items()}
            return {"$dict": self._pairs(value, path, depth)}
        if kind is Counter:
            return {"$counter": self._pairs(value, path, depth)}
        if kind is OrderedDict:
            return {"$ordered": self._pairs(value, path, depth)}
        raise CheckpointError(
            f"a checkpoint cannot hold {path or 'the document'}, a {kind.__module__}.{kind.__qualname__}: "
            "expected None, bool, int, float, str, list, tuple, dict, Counter, deque, torch dtype or tensor. "
            "Convert it to one of these, or leave it out of the state"
        )

    def _items(self, values: Iterable[Any], path: str, depth: int) -> list[JSONValue]:
        return [self._value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(values)]

    def _pairs(self, mapping: Mapping[Any, Any], path: str, depth: int) -> list[JSONValue]:
        return [
            [self._key(key, path, depth + 1), self._value(item, _child(path, key), depth + 1)]
            for key, item in mapping.items()
        ]

    def _key(self, key: Any, path: str, depth: int) -> JSONValue:
        # A tensor is hashable only by identity, so as a key it would not be found again after reading.
        if isinstance(key, torch.Tensor):
            raise CheckpointError(f"a checkpoint cannot hold a tensor as a key of {path or 'the document'}")
        return self._value(key, f"{path}.<key>", depth)


def decode(value: JSONValue, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The document that ``DocumentEncoder.encode`` was given; ``tensors`` holds those it took out.

    Raises ``CheckpointError`` for a value that the encoder never writes.
    """
    try:
        return _decode(value, tensors)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's document is malformed: {error!r}") from error


def _decode(value: JSONValue, tensors: Mapping[str, torch.Tensor]) -> Any:
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
        return _NON_FINITE[content]
    if tag == "$dtype":
        return dtype_named(content)
    if tag == "$deque":
        maxlen, items = content
        return deque(_decode(items, tensors), maxlen)
    return _CONTAINERS[tag](_decode(content, tensors))


def _counter(pairs: list[list[Any]]) -> Counter[Any]:
    # Not Counter(pairs): that would count the pairs.
    return Counter(dict(pairs))


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": _counter,
}


def _python_scalar(value: np.generic[Any], path: str) -> Any:
    scalar = value.item()
    # Extended precision has no Python counterpart: item() gives the same kind back.
    if isinstance(scalar, np.generic):
        raise CheckpointError(f"a checkpoint cannot hold {path}, a numpy {value.dtype}; convert it to float")
    return scalar


def _child(path: str, key: Any) -> str:
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"
