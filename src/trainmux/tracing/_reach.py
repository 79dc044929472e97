"""Everything that Python code can reach from a model and a loss function.

One walk over modules, attributes, containers, closures, defaults and the globals that code mentions. Each
container found is a ``Holder``, which can be read and written. The walk serves three purposes:

- its ``signature`` is equal for two members that would trace to the same graph (values of parameters and
  buffers do not count, everything else does);
- tracing puts stand-ins where the walk found tensors of the model, and puts everything back afterwards;
- comparing two walks tells what a user changed.

Code of installed packages is looked into only as far as its closures and defaults; user code also by the
globals, methods and module attributes that it mentions by name. What cannot be looked into counts by
identity, which costs a trace of its own and never a wrong graph.
"""

from __future__ import annotations

import bisect
import dis
import enum
import functools
import hashlib
import itertools
import math
import pickle
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainmux.tracing._source import is_library_file

Items = dict[Any, Any]

Place = tuple[int, Any]
"""An entry of a container: the container's number, and the key."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OPAQUE_PACKAGES = ("trainmux.", "torch.optim.", "torch.utils.data.")
_HIDDEN = frozenset({"_modules", "_parameters", "_buffers"})
_ATTRIBUTES = "__dict__"
_WITHOUT_EFFECT = frozenset(
    {
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)
"""Attributes of a module that its forward pass does not see."""
_DIGESTED_BYTES = 1 << 20
"""A constant tensor up to this size counts by its values, a larger one by identity: hashing takes 1 ms."""


# ---- holders -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Holder:
    """A container that code can reach; ``replace`` fills it anew, ``None`` for one that cannot be written.

    ``mapping`` is the dict behind it, if its entries are exactly those of one.
    """

    value: Any  # kept alive: an address alone is given away again
    label: Hashable
    read: Callable[[], Items]
    replace: Callable[[Items], None] | None = None
    mapping: dict[Any, Any] | None = None

    @property
    def can_change(self) -> bool:
        """Whether its entries may become others while it stays the same object."""
        return self.replace is not None or isinstance(self.value, types.FunctionType)

    def write(self, items: Items) -> None:
        """Make the container hold ``items``, if it can be written."""
        if self.replace is not None:
            self.replace(items)


_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, list, deque, set)
"""Built-in containers, by whose methods those of a class of its own are read and written, too."""


def _container_holder(value: Any, label: Hashable) -> Holder:
    """A dict, list, deque or set, with the attributes that one of a class of its own carries.

    Its class may read or write otherwise than its base: what is stored counts.
    """
    base = next(kind for kind in _CONTAINERS if isinstance(value, kind))
    is_dict = isinstance(value, dict)

    def read() -> Items:
        if is_dict:
            return {**dict(base.items(value)), **_attributes_of(value)}
        stored = base.__iter__(value)
        ordered = sorted(stored, key=repr) if base is set else stored
        return {**dict(enumerate(ordered)), **_attributes_of(value)}

    def replace(items: Items) -> None:
        kept = {key: item for key, item in items.items() if key is not _ATTRIBUTES}
        base.clear(value)
        if is_dict:
            for key, item in kept.items():
                base.__setitem__(value, key, item)
        else:
            (base.update if base is set else base.extend)(value, kept.values())

    return Holder(value, label, read, replace, value if is_dict and not _is_own_class(value) else None)


def _sorted(value: Any) -> Items:
    return dict(enumerate(sorted(value, key=repr)))


def _attributes_of(container: Any) -> Items:
    """Attributes that a container of a class of its own carries besides its items."""
    has_some = _is_own_class(container) and hasattr(container, "__dict__")
    return {_ATTRIBUTES: vars(container)} if has_some else {}


def _is_own_class(container: Any) -> bool:
    return type(container).__module__ not in ("builtins", "collections")


def _object_holder(value: Any) -> Holder:
    slots = [
        name
        for cls in type(value).__mro__
        for name in _names_in_slots(cls)
        if name not in ("__dict__", "__weakref__")
    ]

    def read() -> Items:
        own = vars(value) if hasattr(value, "__dict__") else {}
        return {**own, **{name: getattr(value, name) for name in slots if hasattr(value, name)}}

    def replace(items: Items) -> None:
        for name in slots:
            if name in items:
                object.__setattr__(value, name, items[name])
            elif hasattr(value, name):
                object.__delattr__(value, name)
        if hasattr(value, "__dict__"):
            attributes = vars(value)
            attributes.clear()
            attributes.update((name, item) for name, item in items.items() if name not in slots)

    mapping = vars(value) if hasattr(value, "__dict__") and not slots else None
    return Holder(value, ("object", type(value)), read, replace, mapping)


def _names_in_slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _cell_holder(cell: types.CellType) -> Holder:
    def read() -> Items:
        try:
            return {"": cell.cell_contents}
        except ValueError:
            return {}

    def replace(items: Items) -> None:
        if items:
            cell.cell_contents = items[""]
        elif read():
            del cell.cell_contents

    return Holder(cell, "cell", read, replace)


def _names_holder(owner: Any, namespace: Mapping[str, Any], names: tuple[str, ...], what: str) -> Holder:
    """Some entries of a namespace: the globals of a function, attributes of a module or a class."""

    def read() -> Items:
        return {name: namespace[name] for name in names if name in namespace}

    def replace(items: Items) -> None:
        for name in names:
            if isinstance(namespace, dict):
                if name in items:
                    namespace[name] = items[name]
                else:
                    namespace.pop(name, None)
            elif name in items:
                setattr(owner, name, items[name])
            elif name in namespace:
                delattr(owner, name)

    return Holder(owner, what, read, replace)


@dataclass(frozen=True)
class GeneratorState:
    """The state of a random generator; equal to one from which the same numbers come."""

    digest: bytes
    state: Any = field(compare=False)


def _random_holder(owner: Any, get: Callable[[], Any], put: Callable[[Any], None]) -> Holder:
    def read() -> Items:
        state = get()
        return {"": GeneratorState(hashlib.sha256(pickle.dumps(state)).digest(), state)}

    return Holder(owner, "random", read, lambda items: put(items[""].state))


def _generator_holder(value: Any) -> Holder:
    if isinstance(value, random.Random):
        return _random_holder(value, value.getstate, value.setstate)
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
    return _random_holder(value, lambda: bits.state, lambda state: setattr(bits, "state", state))


def process_generators() -> list[Holder]:
    """The generators behind ``random`` and ``numpy.random``."""
    return [
        _random_holder(random, random.getstate, random.setstate),
        _random_holder(np.random, np.random.get_state, np.random.set_state),
    ]


def _fixed(value: Any, label: Hashable, **items: Any) -> Holder:
    return Holder(value, label, lambda: items)


def _function_holder(function: types.FunctionType) -> Holder:
    def read() -> Items:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        return {
            **cells,
            "__code__": function.__code__,
            "__defaults__": function.__defaults__,
            "__kwdefaults__": function.__kwdefaults__,
            _ATTRIBUTES: vars(function),
        }

    return Holder(function, "function", read)


def _holder_of(value: Any) -> Holder | None:
    """The holder of a value; ``None`` for a leaf."""
    kind = type(value)
    if isinstance(value, (dict, list, deque, set)):
        return _container_holder(value, ("container", kind))
    if isinstance(value, tuple):
        return Holder(value, ("tuple", kind), lambda: dict(enumerate(value)))
    if isinstance(value, frozenset):
        return Holder(value, "frozenset", lambda: _sorted(value))
    if isinstance(value, functools.partial):
        return _fixed(value, "partial", func=value.func, args=value.args, keywords=value.keywords)
    if isinstance(value, types.MethodType):
        return _fixed(value, "method", function=value.__func__, self=value.__self__)
    if isinstance(value, (staticmethod, classmethod)):
        return _fixed(value, kind.__name__, function=value.__func__)
    if isinstance(value, property):
        return _fixed(value, "property", get=value.fget)
    if isinstance(value, types.FunctionType):
        return _function_holder(value)
    if isinstance(value, types.CellType):
        return _cell_holder(value)
    if isinstance(value, weakref.ref):
        return _fixed(value, "reference", to=value())
    if isinstance(value, (random.Random, np.random.Generator, np.random.RandomState)):
        return _generator_holder(value)
    is_ordinary = getattr(kind, "__reduce__", None) is object.__reduce__
    if isinstance(value, nn.Module) or (is_ordinary and _has_state(value) and not _is_opaque(kind)):
        return _object_holder(value)
    return None


def _has_state(value: Any) -> bool:
    is_code = isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType))
    return not is_code and (hasattr(value, "__dict__") or any(map(_names_in_slots, type(value).__mro__)))


def _is_opaque(cls: type) -> bool:
    return f"{cls.__module__}.".startswith(_OPAQUE_PACKAGES)


# ---- code ----------------------------------------------------------------------------------------------


@functools.cache
def _mentions(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Global names that code and the code inside it use, and every name or text that it mentions."""
    used: dict[str, None] = {}
    mentioned: set[str] = set(code.co_names)
    for instruction in dis.get_instructions(code):
        if instruction.opname.endswith(("_GLOBAL", "_NAME")):
            used[str(instruction.argval)] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_used, inner_mentioned = _mentions(constant)
            used.update(dict.fromkeys(inner_used))
            mentioned |= inner_mentioned
        elif isinstance(constant, str) and constant.isidentifier():
            mentioned.add(constant)
    return tuple(used), frozenset(mentioned)


@functools.cache
def _is_user_module(name: str) -> bool:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return name == "__main__" or (file is not None and not is_library_file(file))


# ---- memory --------------------------------------------------------------------------------------------


class OwnMemory:
    """Map from bytes to the model's own tensors."""

    def __init__(self, tensors: list[Tensor]) -> None:
        spans = [(*memory_span(tensor), index) for index, tensor in enumerate(tensors) if _has_memory(tensor)]
        self._spans = sorted(spans)
        self._tensors = tensors

    def overlapping(self, tensor: Tensor) -> list[int]:
        """The model's tensors, by number, that share bytes with ``tensor``."""
        if not self._spans or not _has_memory(tensor):
            return []
        begin, end = memory_span(tensor)
        last = bisect.bisect_left(self._spans, (end, 0, 0))
        return [index for low, high, index in self._spans[:last] if low < end and begin < high]

    def shared(self) -> Iterator[tuple[int, int]]:
        """Pairs of the model's tensors, by number, that share bytes."""
        for (_, end, one), (begin, _, other) in itertools.pairwise(self._spans):
            if begin < end:
                yield one, other

    def view_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The tensor that ``tensor`` is a view of, and where it begins there; ``None`` if it is none."""
        owners = self.overlapping(tensor)
        if len(owners) != 1:
            return None
        owner = self._tensors[owners[0]]
        (begin, end), (low, high) = memory_span(tensor), memory_span(owner)
        if tensor.dtype != owner.dtype or not owner.is_contiguous() or begin < low or end > high:
            return None
        return owners[0], (begin - low) // tensor.element_size()


def _has_memory(tensor: Tensor) -> bool:
    is_real = type(tensor) in (Tensor, nn.Buffer) or isinstance(tensor, nn.Parameter)
    is_dense = tensor.layout == torch.strided and tensor.device.type != "meta"
    return is_real and is_dense and tensor.numel() > 0


def memory_span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and of the one behind its last."""
    begin = tensor.data_ptr()
    length = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + length * tensor.element_size()


def tensor_digest(tensor: Tensor) -> bytes:
    """Digest of a tensor's shape, type and values."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    head = f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device.type}".encode()
    return hashlib.sha256(head + raw.numpy().tobytes()).digest()


class Identity:
    """Equal to itself only, and keeps what it stands for alive: an address alone is given away again."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


# ---- the walk ------------------------------------------------------------------------------------------


class Reach:
    """Everything that code can reach from ``model`` and ``functions``, as it is now.

    ``holders`` are the containers found, ``contents`` what each of them holds, ``own`` the model's parameters
    and buffers, each once, and ``named`` the same by name.
    """

    def __init__(self, model: nn.Module | None, *functions: Any) -> None:
        named = {} if model is None else {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.named: dict[str, Tensor] = named
        self.own: list[Tensor] = list(named.values())
        self.memory = OwnMemory(self.own)
        self.holders: list[Holder] = []
        self.contents: list[Items] = []
        self._number = {id(tensor): number for number, tensor in enumerate(self.own)}
        self._origins: list[tuple[int, Any]] = []
        self._places: dict[int, int] = {}
        self._namespaces: dict[int, tuple[Any, set[str]]] = {}
        self._mentioned: set[str] = {"forward"}
        self._tokens: list[tuple[Hashable, tuple[tuple[Hashable, Hashable], ...]]] = []
        roots: Items = {} if model is None else {"model": model}
        roots |= {f"function {number}" if number else "loss": fn for number, fn in enumerate(functions)}
        roots |= {
            f"{name} hooks": tensor._backward_hooks
            for name, tensor in named.items()
            if tensor._backward_hooks
        }
        self._add(Holder(roots, "roots", lambda: roots), (-1, ""))
        self._walk()

    @property
    def signature(self) -> Hashable:
        """Equal for what would trace to the same graph."""
        own = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in self.own)
        return (own, *self._tokens)

    def apart_from_numbers(self) -> tuple[Hashable, dict[Place, int | float]]:
        """``signature`` without numbers of the code but for their kinds, and those numbers.

        Numbers count where they can be replaced, and where they are not special: 0, 1 and the like.
        """
        own = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in self.own)
        outline: list[Hashable] = [own]
        found: dict[Place, int | float] = {}
        for number, (holder, (label, entries)) in enumerate(zip(self.holders, self._tokens, strict=False)):
            if holder.replace is not None and not isinstance(holder.value, set):
                items = self.contents[number]
                names = [name for name in items if name not in _WITHOUT_EFFECT]
                kinds = [kind_of_number(items[name]) if isinstance(name, PLAIN) else None for name in names]
                if any(kinds):
                    found |= {
                        (number, name): items[name] for name, kind in zip(names, kinds, strict=True) if kind
                    }
                    entries = tuple(
                        (key, (type(items[name]), kind) if kind else token)
                        for (key, token), name, kind in zip(entries, names, kinds, strict=True)
                    )
            outline.append((label, entries))
        return tuple(outline), found

    def include(self, holders: list[Holder]) -> None:
        """Restore these, too; they are no part of the signature."""
        for holder in holders:
            self.contents.append(holder.read())
            self._add(holder, (0, holder.value.__name__))

    def path(self, number: int, key: Any) -> str:
        """Name of a holder's entry, as user code would write it."""
        steps = [] if _is_item_of_sequence(self.holders[number]) else [key]
        while number > 0:
            number, key = self._origins[number]
            steps.append(key)
        words = [_word(step) for step in reversed(steps)]
        return "".join(words).lstrip(".") or "model"

    def differences(self, before: Hashable) -> Iterator[tuple[Any, str]]:
        """Entries in which ``signature`` is another than ``before``, of an older walk: key, path and values.

        The first one is exact. Behind an entry that holds another container the walks may run apart.
        """
        now = self.signature
        assert isinstance(now, tuple)
        assert isinstance(before, tuple)
        for name, new, old in zip(self.named, now[0], before[0], strict=False):
            if new != old:
                was, is_now = (
                    f"shape {shape}, {dtype}, requires_grad={learns}" for shape, dtype, learns in (old, new)
                )
                yield "own", f"{name} (was {was}, is {is_now})"
        if len(now[0]) != len(before[0]):
            yield "own", "the set of its parameters and buffers"
        for number, (new, old) in enumerate(zip(now[1:], before[1:], strict=False)):
            known = dict(old[1])
            names = [name for name in self.contents[number] if name not in _WITHOUT_EFFECT]
            found = [
                (name, self.path(number, name) + _values(known.get(key), token))
                for name, (key, token) in zip(names, new[1], strict=True)
                if known.get(key, "absent") != token
            ]
            gone = known.keys() - {key for key, _ in new[1]}
            if gone or (new != old and not found):
                found.append((None, self.path(*self._origins[number]) if number else "model"))
            yield from found

    @contextmanager
    def restored(self) -> Iterator[Reach]:
        """Put back what every holder held, afterwards."""
        try:
            yield self
        finally:
            for holder, items in zip(self.holders, self.contents, strict=True):
                if not same_items(holder.read(), items):
                    holder.write(items)

    def stand_in(self, value: Any, replace: Callable[[int], Tensor], views: dict[int, Any]) -> Any:
        """``value`` with ``replace(number)`` in the place of the model's tensors, views of them included.

        ``views`` remembers what was made, so that one object gets one stand-in.
        """
        if id(value) in views:
            return views[id(value)][1]
        found = value
        if isinstance(value, Tensor):
            if id(value) in self._number:
                return replace(self._number[id(value)])
            view = self.memory.view_of(value)
            if view is not None:
                base = replace(view[0]) if value.requires_grad else replace(view[0]).detach()
                found = base.as_strided(value.shape, value.stride(), view[1])
        elif isinstance(value, weakref.ref):
            if id(value()) in self._number:
                found = weakref.ref(replace(self._number[id(value())]))
        elif isinstance(value, tuple):
            items = [self.stand_in(item, replace, views) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                found = rebuilt_tuple(value, items)
        elif isinstance(value, functools.partial):
            args = self.stand_in(value.args, replace, views)
            keywords = {name: self.stand_in(item, replace, views) for name, item in value.keywords.items()}
            if args is not value.args or any(keywords[name] is not value.keywords[name] for name in keywords):
                found = functools.partial(value.func, *args, **keywords)
        if found is not value:
            views[id(value)] = (value, found)
        return found

    def _walk(self) -> None:
        while len(self.contents) < len(self.holders):
            self._expand(len(self.contents))
            if len(self.contents) == len(self.holders):
                self._visit_mentioned()

    def _add(self, holder: Holder, origin: tuple[int, Any]) -> int:
        self.holders.append(holder)
        self._origins.append(origin)
        return len(self.holders) - 1

    def _expand(self, number: int) -> None:
        holder = self.holders[number]
        items = holder.read()
        self.contents.append(items)
        # The keys of hooks are handles that count up through the whole process.
        counted = str(self._origins[number][1]).endswith("hooks")
        entries = tuple(
            ((position if counted else _key(key)), self._token(value, (number, key)))
            for position, (key, value) in enumerate(items.items())
            if key not in _WITHOUT_EFFECT
        )
        self._tokens.append((holder.label, entries))
        if holder.label == "function":
            self._look_into(holder.value, number)
        if holder.label == ("object", type(holder.value)):
            for cls in type(holder.value).__mro__:
                self._namespace_token(cls)

    def _look_into(self, function: types.FunctionType, number: int) -> None:
        """Note what a user's function mentions: globals now, methods and module attributes later."""
        if is_library_file(function.__code__.co_filename):
            return
        used, mentioned = _mentions(function.__code__)
        self._mentioned |= mentioned
        known = tuple(name for name in used if name in function.__globals__)
        if known:
            holder = _names_holder(function, function.__globals__, known, "globals")
            self._add(holder, (number, "globals"))

    def _visit_mentioned(self) -> None:
        """Walk on into methods and attributes of user classes and modules that code mentions by name."""
        for owner, done in list(self._namespaces.values()):
            namespace = vars(owner)
            names = [
                name
                for name in namespace
                if name not in done and (name in self._mentioned or _is_special(name, namespace[name]))
            ]
            done.update(names)
            for name in names:
                self._add(_names_holder(owner, namespace, (name,), "named"), (0, owner.__name__))

    def _token(self, value: Any, origin: tuple[int, Any]) -> Hashable:
        if isinstance(value, enum.Enum):
            return (type(value), value.name)
        if isinstance(value, PLAIN):
            return (type(value).__name__, repr(value))
        if isinstance(value, Tensor):
            return self._tensor_token(value)
        if isinstance(value, np.ndarray) and value.dtype != object:
            # A masked array's own ``tobytes`` leaves the mask out, and raises for ``np.ma.masked``.
            raw = np.ndarray.tobytes(value) + np.asarray(np.ma.getmask(value)).tobytes()
            return ("array", value.shape, str(value.dtype), hashlib.sha256(raw).digest())
        if isinstance(value, np.generic):
            return ("scalar", repr(value))
        if isinstance(value, (types.CodeType, GeneratorState)):
            return value
        if isinstance(value, types.BuiltinFunctionType) and not _bound_to_object(value):
            return ("builtin", value.__module__, value.__qualname__)
        if isinstance(value, (type, types.ModuleType)):
            return self._namespace_token(value)
        if id(value) not in self._places:
            holder = _holder_of(value)
            if holder is None:
                return ("opaque", Identity(value))
            self._places[id(value)] = self._add(holder, origin)
        return ("at", self._places[id(value)])

    def _namespace_token(self, value: type | types.ModuleType) -> Hashable:
        # The class object itself: two classes of one name from two notebook cells are not the same.
        name = value.__module__ if isinstance(value, type) else value.__name__
        if name is not None and _is_user_module(name):
            self._namespaces.setdefault(id(value), (value, set()))
        return value if isinstance(value, type) else ("module", name)

    def _tensor_token(self, tensor: Tensor) -> Hashable:
        number = self._number.get(id(tensor))
        if number is not None:
            return ("own tensor", number)
        view = self.memory.view_of(tensor)
        if view is not None:
            return ("view", view, tuple(tensor.shape), tensor.stride(), tensor.requires_grad)
        has_values = tensor.layout is torch.strided and tensor.device.type != "meta"
        if has_values and tensor.numel() * tensor.element_size() <= _DIGESTED_BYTES:
            return ("tensor", tensor_digest(tensor), tensor.requires_grad)
        return ("tensor", Identity(tensor), tensor._version, tensor.requires_grad)


def rebuilt_tuple(original: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """A tuple of the same class, whatever its constructor takes, with other items."""
    found = tuple.__new__(type(original), items)
    if hasattr(original, "__dict__"):
        vars(found).update(vars(original))
    return found


def kind_of_number(value: Any) -> str | None:
    """The class of numbers that code treats alike; ``None`` for special ones, and for other values."""
    if type(value) not in (int, float) or value in (0, 1, -1) or not math.isfinite(value):
        return None
    return "positive" if value > 0 else "negative"


def same_items(one: Items, other: Items) -> bool:
    """Whether two containers hold the same objects under the same keys."""
    return len(one) == len(other) and all(key in other and is_same(other[key], one[key]) for key in one)


def is_same(one: Any, other: Any) -> bool:
    """Whether two entries are one object, or the same state of a random generator."""
    return one is other or (isinstance(one, GeneratorState) and one == other)


def _is_special(name: str, value: Any) -> bool:
    return name.startswith("__") and isinstance(value, types.FunctionType)


def _bound_to_object(function: types.BuiltinFunctionType) -> bool:
    return not (function.__self__ is None or isinstance(function.__self__, types.ModuleType))


def _key(key: Any) -> Hashable:
    return (type(key).__name__, key) if isinstance(key, PLAIN) else Identity(key)


def _values(old: Hashable, new: Hashable) -> str:
    """Old and new value in words, where both are plain."""
    texts = [token[1] for token in (old, new) if isinstance(token, tuple) and isinstance(token[1], str)]
    return f" (was {texts[0]}, is {texts[1]})" if len(texts) == 2 and len(str(texts)) < 120 else ""


def _is_item_of_sequence(holder: Holder) -> bool:
    return isinstance(holder.value, (list, deque, set))


def _word(step: Any) -> str:
    if step in _HIDDEN or step in ("", _ATTRIBUTES, "globals", "self"):
        return ""
    if isinstance(step, str) and step.isidentifier():
        return f".{step}"
    return f".{step}" if isinstance(step, str) and step.isdecimal() else f"[{step!r}]"
