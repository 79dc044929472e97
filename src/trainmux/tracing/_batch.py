"""Batches as lists of tensors and back.

A batch may be a tensor, a mapping, a sequence, a named tuple, a dataclass, or any nesting of them;
mapping-like objects (``UserDict``, tokenizer outputs) and objects that only carry attributes count
too. Everything that is not a tensor is a constant: part of the structure, so that two batches with
different constants do not share a graph.

Text, such as names of files, is seldom read. A trace is made with a stand-in that notes any use. If there is
none, batches share its graph whatever their text is; otherwise it is made again with the text, which is then
part of a batch's structure.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainmux.errors import BatchError
from trainmux.tracing._reach import rebuilt_tuple


class Text:
    """Whether traced code reads the text of batches that share this.

    ``is_read`` makes text part of their structure, ``was_hidden`` says whether a trace was given a stand-in,
    and ``was_noted`` whether it used one.
    """

    def __init__(self, *, is_read: bool = False) -> None:
        self.is_read = is_read
        self.was_hidden = self.was_noted = False

        def note(*args: Any, **kwargs: Any) -> Any:
            self.was_noted = True
            raise TypeError("expected code that does not read this text")  # noted, and traced again

        self._stand_in: Any = type("UnreadText", (), dict.fromkeys(_USES, note))()

    def shown(self, value: Any) -> Any:
        """``value``, or its stand-in."""
        if self.is_read:
            return value
        self.was_hidden = True
        return self._stand_in


def _is_text(value: Any) -> bool:
    """Whether it is text, or a list of nothing else."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(type(item) is str for item in value)
    return type(value) is str


_USES = {
    name
    for kind in (str, bytes, int, float, complex, list, dict, set)
    for name in dir(kind)
    if name.startswith("__") and callable(getattr(kind, name))
} | {"__call__", "__enter__", "__fspath__", "__next__"}
_USES -= {"__new__", "__init__", "__init_subclass__", "__class__", "__subclasshook__", "__class_getitem__"}
"""Every way to use text, or something else in its place."""

_READ = Text(is_read=True)
"""For batches whose text is always part of their structure."""


@dataclass(frozen=True)
class LeafSpec:
    """Place, shape and dtype of a tensor in the batch."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class BatchSpec:
    """Structure of a batch: hashable, equal for batches that can share a graph.

    ``structure`` is that of mappings in any order; ``order`` has theirs, for code that iterates over one.
    """

    structure: str
    leaves: tuple[LeafSpec, ...]
    order: tuple[Any, ...] = dataclasses.field(default=(), repr=False)


@dataclass(frozen=True)
class FlatBatch:
    """A batch taken apart: its tensors, its specification, and the way back."""

    tensors: tuple[Tensor, ...]
    spec: BatchSpec
    rebuild: Callable[[list[Tensor]], Any]
    text: Text


def flatten_batch(batch: Any, text: Text | None = None) -> FlatBatch:
    """Take ``batch`` apart; refuses one that holds no tensor.

    Batches that are to share a graph although their text differs have one ``text``.
    """
    text = text or _READ
    flat = _Flat(text)
    structure, build = flat.take_apart(batch, "batch")
    if not flat.tensors:
        raise BatchError(
            f"expected a batch that holds at least one tensor, got {type(batch).__name__} without any; "
            "return tensors (or a dict, tuple or dataclass of tensors) from the loader"
        )

    def rebuild(values: list[Tensor]) -> Any:
        return build(iter(values))

    return FlatBatch(
        tuple(flat.tensors), BatchSpec(structure, tuple(flat.leaves), tuple(flat.order)), rebuild, text
    )


class _Flat:
    """Collects what a batch is made of."""

    def __init__(self, text: Text) -> None:
        self.tensors: list[Tensor] = []
        self.leaves: list[LeafSpec] = []
        self.order: list[tuple[Any, ...]] = []
        self._text = text

    def take_apart(self, value: Any, path: str) -> tuple[str, Any]:
        """Structure text and a builder ``iterator of tensors -> value`` for one sub-tree."""
        if isinstance(value, np.ndarray):
            value = _from_numpy(value, path)
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_nested:
                raise BatchError(
                    f"{path}: expected a dense tensor, got one with layout {value.layout}"
                    f"{' that is nested' if value.is_nested else ''}; convert it with .to_dense() or "
                    ".to_padded_tensor(0) in the loader"
                )
            self.tensors.append(value)
            self.leaves.append(LeafSpec(path, tuple(value.shape), value.dtype))
            return "*", next
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, Mapping):
            stored = _stored(value)
            keys = tuple(stored)
            parts, build = self._children((f"{path}[{key!r}]", item) for key, item in stored.items())
            text = ",".join(sorted(f"{key!r}:{part}" for key, part in zip(keys, parts, strict=True)))
            self.order.append(keys)
            return f"{name}{{{text}}}", lambda it: _like_mapping(
                value, dict(zip(keys, build(it), strict=True))
            )
        if not self._text.is_read and _is_text(value):
            shown = self._text.shown
            return "text", lambda it: shown(value)
        if isinstance(value, (list, tuple)):
            parts, build = self._children((f"{path}[{i}]", item) for i, item in enumerate(value))
            # A loader hands out lists where the data set has tuples: they count as the same.
            label = "" if type(value) in (list, tuple) else name
            return f"{label}[{','.join(parts)}]", lambda it: _like_sequence(value, build(it))
        fields = _attributes(value)
        if fields is not None:
            parts, build = self._children((f"{path}.{field}", item) for field, item in fields.items())
            text = ",".join(f"{field}:{part}" for field, part in zip(fields, parts, strict=True))
            return f"{name}({text})", lambda it: _like_object(
                value, dict(zip(fields, build(it), strict=True))
            )
        return f"{name}={value!r}", lambda it: value

    def _children(self, items: Iterable[tuple[str, Any]]) -> tuple[list[str], Callable[[Any], list[Any]]]:
        """Structure texts of sub-trees, given with their paths, and a builder of all of them."""
        parts = [self.take_apart(item, path) for path, item in items]
        return [text for text, _ in parts], lambda it: [build(it) for _, build in parts]


def _attributes(value: Any) -> dict[str, Any] | None:
    """The fields of a dataclass, or of a plain object that carries tensors; ``None`` for constants."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    attributes = getattr(value, "__dict__", None)
    if attributes and any(_holds_tensor(item) for item in attributes.values()):
        return dict(attributes)
    return None


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, (Tensor, np.ndarray))


def _from_numpy(value: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        # Torch takes neither negative strides nor memory that may not be written.
        usable = np.ascontiguousarray(value).reshape(value.shape)
        return torch.from_numpy(usable if usable.flags.writeable else usable.copy())
    except TypeError as error:
        raise BatchError(
            f"{path}: expected numbers, got an array of {value.dtype}; convert or drop it"
        ) from error


def _stored(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries as they are stored: the class of a dict may hand out others than it was given."""
    if isinstance(mapping, OrderedDict):
        return dict(OrderedDict.items(mapping))
    return dict(dict.items(mapping) if isinstance(mapping, dict) else mapping.items())


def _like_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    if isinstance(original, dict):
        clone: Any = copy.copy(original)
        for key, item in items.items():
            clone[key] = item  # what the class notes besides, such as an attribute, comes along
            if dict.__getitem__(clone, key) is not item:
                dict.__setitem__(clone, key, item)
        return clone
    if isinstance(getattr(original, "data", None), dict):
        # UserDict and tokenizer outputs: a shallow copy would still write through to the original.
        clone = copy.copy(original)
        clone.data = items
        return clone
    try:
        return type(original)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def _like_sequence(original: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(original, tuple):
        return rebuilt_tuple(original, items)
    clone = copy.copy(original)
    list.__setitem__(clone, slice(None), items)
    return clone


def _like_object(original: Any, fields: dict[str, Any]) -> Any:
    clone = copy.copy(original)
    for field, item in fields.items():
        object.__setattr__(clone, field, item)  # frozen dataclasses included
    return clone


def check_batch(expected: BatchSpec, got: BatchSpec) -> None:
    """Refuse a batch whose structure or dtypes differ from the example's; shapes may differ."""
    wanted, given = (
        {leaf.path: f"a tensor of {leaf.dtype} with {len(leaf.shape)} dimensions" for leaf in spec.leaves}
        for spec in (expected, got)
    )
    for path in wanted | given:
        want, have = wanted.get(path, "no tensor"), given.get(path, "none")
        if want != have:
            raise BatchError(
                f"{path}: expected {want} as in the example batch, got {have} (of {sorted(given)}); "
                "give step() the structure, dtypes and dimensions of example_batch"
            )
    if expected.structure != got.structure:
        raise BatchError(
            f"batch: expected the structure {expected.structure}, got {got.structure}; give step() the "
            "structure and constants of example_batch"
        )
