"""Whether two models, or two loss functions, would trace to the same graph.

A signature holds everything about a module tree that its code can see except the values of parameters
and buffers: classes, flags, plain attributes, hooks, closures. Equal signatures share one trace. What
cannot be looked into counts by identity, which costs a trace of its own and never a wrong graph;
``graph_key`` then finds out that two traces are the same after all.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
import weakref
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainmux.tracing import TracedGraph, graph_constant

_SKIPPED = frozenset({"_parameters", "_buffers", "_modules"})
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def model_signature(model: nn.Module) -> Hashable:
    """Signature of a module tree."""
    return _Encoder(model).module_tree()


def function_signature(fn: Any) -> Hashable:
    """Signature of a loss or metric function, closures and defaults included."""
    return _Encoder(None).encode(fn)


def graph_key(traced: TracedGraph) -> str:
    """Equal for graphs that compute the same: code, input and output descriptions, constants."""
    digest = hashlib.sha256(traced.module.code.encode())
    digest.update(repr((traced.inputs, traced.outputs)).encode())
    for node in traced.module.graph.nodes:
        if node.op == "get_attr":
            digest.update(_tensor_digest(graph_constant(traced.module, node)))
    return digest.hexdigest()


def _tensor_digest(tensor: Tensor) -> bytes:
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    head = f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device.type}".encode()
    return hashlib.sha256(head + raw.numpy().tobytes()).digest()


class _Identity:
    """Equal to itself only, and keeps what it stands for alive: an address alone is given away again."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class _Encoder:
    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._seen: dict[int, int] = {}
        self._tensors: dict[int, int] = {}
        self._modules: dict[int, int] = {}
        if model is not None:
            for tensor in (*model.parameters(), *model.buffers()):
                self._tensors.setdefault(id(tensor), len(self._tensors))
            for module in model.modules():
                self._modules.setdefault(id(module), len(self._modules))

    def module_tree(self) -> Hashable:
        assert self._model is not None
        return tuple(
            (name, self._class(type(module)), self._tensors_of(module), self._attributes(module))
            for name, module in self._model.named_modules(remove_duplicate=False)
        )

    def _tensors_of(self, module: nn.Module) -> Hashable:
        return tuple(
            (
                name,
                None
                if tensor is None
                else (
                    self._tensors.get(id(tensor)),
                    tuple(tensor.shape),
                    str(tensor.dtype),
                    tensor.requires_grad,
                ),
            )
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
        )

    def _attributes(self, module: nn.Module) -> Hashable:
        items: list[Hashable] = []
        for name, value in module.__dict__.items():
            if name in _SKIPPED:
                continue
            if name in _HOOKS:
                # The keys are handles that count up through the whole process.
                items.append((name, tuple(self.encode(hook) for hook in value.values())))
            else:
                items.append((name, self.encode(value)))
        return tuple(items)

    def encode(self, value: Any) -> Hashable:
        if isinstance(value, enum.Enum):
            return (self._class(type(value)), value.name)
        if isinstance(value, _PLAIN):
            return (type(value).__name__, repr(value))
        if isinstance(value, Tensor):
            if id(value) in self._tensors:
                return ("own tensor", self._tensors[id(value)])
            return ("tensor", _tensor_digest(value), value.requires_grad)
        if isinstance(value, np.ndarray) and value.dtype != object:
            return ("array", value.shape, str(value.dtype), hashlib.sha256(value.tobytes()).digest())
        if isinstance(value, np.generic):
            return ("scalar", repr(value))
        if isinstance(value, type):
            return self._class(value)
        if id(value) in self._modules:
            return ("own module", self._modules[id(value)])
        if id(value) in self._seen:
            return ("seen", self._seen[id(value)])
        self._seen[id(value)] = len(self._seen)
        return self._compound(value)

    def _compound(self, value: Any) -> Hashable:
        if isinstance(value, dict):
            pairs = tuple((self.encode(key), self.encode(item)) for key, item in value.items())
            return ("dict", self._class(type(value)), pairs, self._beside(value))
        if isinstance(value, (list, tuple)):
            items = tuple(self.encode(item) for item in value)
            return ("sequence", self._class(type(value)), items, self._beside(value))
        if isinstance(value, (set, frozenset)):
            return ("set", frozenset(self.encode(item) for item in value), self._beside(value))
        if isinstance(value, functools.partial):
            return ("partial", self.encode(value.func), self.encode(value.args), self.encode(value.keywords))
        if isinstance(value, types.MethodType):
            return ("method", self.encode(value.__func__), self.encode(value.__self__))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.BuiltinFunctionType) and value.__self__ is None:
            return ("builtin", value.__module__, value.__qualname__)
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        if isinstance(value, weakref.ref):
            return ("reference", self.encode(value()))
        if isinstance(value, nn.Module):
            # One that holds tensors (a teacher) ends up in the graph with its values: by identity.
            holds = any(True for _ in (*value.parameters(), *value.buffers()))
            return ("foreign module", _Identity(value) if holds else None, _Encoder(value).module_tree())
        if hasattr(value, "__dict__") and getattr(type(value), "__reduce__", None) is object.__reduce__:
            return ("object", self._class(type(value)), self._state(value))
        return ("opaque", _Identity(value))

    def _beside(self, container: Any) -> Hashable:
        """Attributes that a container of a class of its own carries besides its items."""
        return self._state(container) if hasattr(container, "__dict__") else ()

    def _state(self, value: Any) -> Hashable:
        """An object's attributes, those in slots included."""
        found = list(vars(value).items())
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            found += [
                (name, getattr(value, name)) for name in names if name != "__dict__" and hasattr(value, name)
            ]
        return tuple((name, self.encode(item)) for name, item in found if name != "__weakref__")

    def _function(self, function: types.FunctionType) -> Hashable:
        code = function.__code__
        cells = []
        for cell in function.__closure__ or ():
            try:
                cells.append(self.encode(cell.cell_contents))
            except ValueError:
                cells.append("empty")
        used = {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        return (
            "function",
            function.__module__,
            function.__qualname__,
            code.co_code,
            self._constants(code),
            tuple(cells),
            self.encode(function.__defaults__),
            self.encode(function.__kwdefaults__),
            # Globals that hold plain values are part of what the function computes.
            tuple((name, repr(item)) for name, item in sorted(used.items()) if isinstance(item, _PLAIN)),
        )

    def _constants(self, code: types.CodeType) -> Hashable:
        return (
            code.co_names,
            tuple(
                self._constants(item) if isinstance(item, types.CodeType) else repr(item)
                for item in code.co_consts
            ),
        )

    @staticmethod
    def _class(cls: type) -> Hashable:
        # The class object itself: two classes of one name from two notebook cells are not the same.
        return cls
