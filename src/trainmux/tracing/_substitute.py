"""Run a model with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from trainmux.tracing._reach import Items, Reach, is_same, process_generators, same_items


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


@dataclass(frozen=True)
class Change:
    """An entry that code has put something else into."""

    holder: int
    key: Any
    value: Any  # ``ABSENT`` where it was deleted


ABSENT = object()


class Substitution:
    """Replaces a model's own tensors wherever its code, or a loss function's, can reach them.

    Besides the registered places this covers plain attributes, containers, closures and globals that hold a
    parameter, a buffer or a view of one. Afterwards everything that can be reached is as it was before,
    whatever the code has stored or drawn meanwhile.
    """

    def __init__(self, model: nn.Module, *functions: Any) -> None:
        self._model = model
        self.reach = Reach(model, *functions)
        self.reach.include(process_generators())
        self._registries = {
            id(registry) for module in model.modules() for registry in (module._parameters, module._buffers)
        }

    @contextmanager
    def active(
        self, replacements: Sequence[Tensor], contents: Sequence[Items] | None = None
    ) -> Iterator[Callable[[], list[Items]]]:
        """While active, ``replacements`` stand in for the model's tensors, which are ``reach.own``.

        ``contents`` is what holders hold besides, if it is not what they held when this was made. Yields a
        function that tells what they hold now, in terms of the model's own tensors again.
        """
        made: dict[int, tuple[Any, Any]] = {}
        own = self.reach.own
        originals: dict[int, Any] = {id(new): old for new, old in zip(replacements, own, strict=True)}

        def read() -> list[Items]:
            originals.update((id(new), old) for old, new in made.values())
            return [
                {key: originals.get(id(value), value) for key, value in holder.read().items()}
                for holder in self.reach.holders
            ]

        with self.reach.restored():
            for number, holder in enumerate(self.reach.holders):
                before = self.reach.contents[number]
                items = before if contents is None else contents[number]
                if id(holder.value) in self._registries:
                    items = {**items, **before}  # values of the model's own tensors are inputs
                new = {
                    key: self.reach.stand_in(value, replacements.__getitem__, made)
                    for key, value in items.items()
                }
                if not same_items(before, new):
                    holder.write(new)
            yield read

    def changes(self, before: Sequence[Items], after: Sequence[Items]) -> list[Change]:
        """Entries that code has changed, but for new values of the model's own buffers."""
        found = []
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if same_items(old, new):
                continue
            is_registry = id(self.reach.holders[number].value) in self._registries
            found += [
                Change(number, key, new.get(key, ABSENT))
                for key in {**old, **new}
                if not is_same(new.get(key, ABSENT), old.get(key, ABSENT))
                and not (is_registry and key in self.reach.contents[number])
            ]
        return found

    def current(self, names: Sequence[str]) -> list[Tensor]:
        """What the named buffers are at this moment, reassigned ones included."""
        values: list[Tensor] = []
        for name in names:
            path, _, leaf = name.rpartition(".")
            value = self._model.get_submodule(path)._buffers[leaf]
            assert value is not None
            values.append(value)
        return values
