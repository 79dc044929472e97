"""Run a module with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class NamedTensor:
    """A parameter or buffer under the first name the module knows it by."""

    name: str
    tensor: Tensor


def unique_parameters(model: nn.Module) -> tuple[NamedTensor, ...]:
    """The module's parameters, tied ones once."""
    return tuple(NamedTensor(name, tensor) for name, tensor in model.named_parameters())


def unique_buffers(model: nn.Module) -> tuple[NamedTensor, ...]:
    """The module's buffers, shared ones once; those that are not persistent included."""
    return tuple(NamedTensor(name, tensor) for name, tensor in model.named_buffers())


_REGISTRIES = ("_parameters", "_buffers", "_modules")


class Substitution:
    """Replaces tensors of ``model`` (by identity) while active, wherever the module tree holds them.

    Besides the registered places this covers plain attributes that hold a parameter or a list, tuple
    or dict of them: recurrent layers read their weights from such a list. Afterwards every module has the
    attributes it had before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @contextmanager
    def active(self, replacements: Mapping[int, Tensor]) -> Iterator[None]:
        """``replacements`` maps ``id(original)`` to the tensor that stands in for it."""
        saved = [
            (module, dict(module.__dict__), dict(module._parameters), dict(module._buffers))
            for module in self._model.modules()
        ]
        try:
            for module, attributes, _, _ in saved:
                for registry in (module._parameters, module._buffers):
                    for name, tensor in registry.items():
                        if tensor is not None:
                            registry[name] = replacements.get(id(tensor), tensor)  # type: ignore[assignment]
                for name, value in attributes.items():
                    if name not in _REGISTRIES:
                        module.__dict__[name] = _swap(value, replacements)
            yield
        finally:
            # Whatever else the code stored meanwhile (caches, counters) goes too: it would be fake.
            for module, attributes, parameters, buffers in saved:
                for registry, original in (
                    (attributes["_parameters"], parameters),
                    (attributes["_buffers"], buffers),
                ):
                    registry.clear()
                    registry.update(original)
                module.__dict__.clear()
                module.__dict__.update(attributes)

    def current(self, names: Iterator[str] | tuple[str, ...]) -> list[Tensor]:
        """What the named buffers are at this moment, reassigned ones included."""
        values: list[Tensor] = []
        for name in names:
            path, _, leaf = name.rpartition(".")
            value = self._model.get_submodule(path)._buffers[leaf]
            assert value is not None
            values.append(value)
        return values


def _swap(value: Any, replacements: Mapping[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return replacements.get(id(value), value)
    if type(value) in (list, tuple) and any(id(item) in replacements for item in value):
        return type(value)(replacements.get(id(item), item) for item in value)
    if type(value) is dict and any(id(item) in replacements for item in value.values()):
        return {key: replacements.get(id(item), item) for key, item in value.items()}
    return value
