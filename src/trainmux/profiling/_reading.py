"""Read a program's graph as kernels: walk it once with fake tensors, so that nothing runs.

No memory is touched either: a step larger than any device can be read. Layers repeat, so each call is tried
on fakes once, and its outcome is taken over wherever an equal one occurs.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.ir import ByteClass, Phase
from trainmux.lowering import Conform, RegionCall
from trainmux.profiling._kernels import KernelGraph, KernelStep, KernelTensor, Location, Work, locations_of
from trainmux.tracing import FakeTensorMode, graph_constant, written_arguments

_ORDER = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.UPDATE: 2}

aten = torch.ops.aten


def read_kernels(module: fx.GraphModule, classes: Sequence[ByteClass]) -> KernelGraph:
    """The kernels of a step whose arguments are of the given classes.

    Placeholders carry fake tensors in ``meta["val"]``, computing nodes their phase in ``meta["phase"]``.
    """
    reader = _Reader(module, classes)
    reader.walk()
    return reader.finish()


@dataclass(frozen=True)
class _Outcome:
    """The effect of a call. Its operands' storages are numbered by first use, new ones -1, -2 and so on.

    ``value`` is its result with a `Location` in the place of each tensor, ``new_bytes`` the sizes of new
    storages, ``changed`` the storages that it writes to.
    """

    value: Any
    new_bytes: tuple[int, ...]
    changed: tuple[int, ...] = ()
    work: Work | None = None


class _Reader:
    """Walks the graph and writes down who touches which storage."""

    def __init__(self, module: fx.GraphModule, classes: Sequence[ByteClass]) -> None:
        self._module = module
        self._classes = iter(classes)
        self._values: dict[fx.Node, Any] = {}
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._given: dict[int, ByteClass] = {}
        self._constants: dict[int, int] = {}
        self._steps: list[KernelStep] = []
        self._outcomes: dict[Hashable, _Outcome] = {}
        placeholder = next(node for node in module.graph.nodes if node.op == "placeholder")
        self._mode: FakeTensorMode = placeholder.meta["val"].fake_mode

    def walk(self) -> None:
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                # A storage of its own: a parameter and its optimizer state may have one fake.
                at = replace(Location.of(len(self._names), node.meta["val"]), offset=0)
                number = self._new_storage(node.name, _reach(at))
                self._values[node] = at
                self._given[number] = next(self._classes)
            elif node.op == "get_attr":
                value = graph_constant(self._module, node)
                storage = value.untyped_storage()
                if storage._cdata not in self._constants:
                    self._constants[storage._cdata] = self._new_storage(node.name, storage.nbytes())
                number = self._constants[storage._cdata]
                self._values[node] = Location.of(number, value)
                self._given[number] = ByteClass.CONSTANT
            elif node.op != "output":
                self._run(node)

    def finish(self) -> KernelGraph:
        graph = self._module.graph
        (output,) = graph.find_nodes(op="output")
        results = [leaf for leaf in pytree.tree_leaves(output.args) if isinstance(leaf, fx.Node)]
        returned = {at.tensor for leaf in results for at in locations_of(self._values[leaf])}
        steps = sorted(self._steps, key=lambda step: step.phase is not Phase.FORWARD)
        made: dict[int, Phase] = {}
        last: dict[int, Phase] = {}
        for step in steps:
            made.update(dict.fromkeys(step.creates, step.phase))
            last.update(dict.fromkeys(step.touched, step.phase))

        def class_of(number: int) -> ByteClass:
            if number in self._given:
                return self._given[number]
            if number in returned:
                return ByteClass.RESULT
            born, died = made[number], last[number]
            if born is died:
                return ByteClass.GRADIENT_MAP if born is Phase.BACKWARD else ByteClass.TEMPORARY
            return ByteClass.FEATURE_MAP if born is Phase.FORWARD else ByteClass.GRADIENT

        named = zip(self._names, self._sizes, strict=True)
        tensors = [KernelTensor(name, class_of(n), size) for n, (name, size) in enumerate(named)]
        constants = {str(node.target): self._values[node] for node in graph.find_nodes(op="get_attr")}
        return KernelGraph(
            self._module,
            tuple(steps),
            tuple(tensors),
            MappingProxyType(self._values),
            tuple(self._values[node] for node in graph.find_nodes(op="placeholder")),
            MappingProxyType(constants),
            tuple(self._values[node] for node in results),
        )

    def _new_storage(self, name: str, size_bytes: int) -> int:
        self._names.append(name)
        self._sizes.append(size_bytes)
        return len(self._names) - 1

    def _run(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            self._values[node] = self._values[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        storages: dict[int, int] = {}
        arguments = self._key((node.args, node.kwargs), storages)
        called: Any = node.target
        if node.op == "call_module":
            called = self._module.get_submodule(str(node.target))
        if isinstance(called, RegionCall):
            key: Hashable = called.outputs  # whatever it is given
            changes = {self._values[node.args[i]].tensor for i in called.changed}  # type: ignore[index]
        else:
            key = (called.specs if isinstance(called, Conform) else called, arguments)
        found = self._outcomes.get(key)
        if found is None:
            found = self._outcomes[key] = self._outcome(node, called, storages)
        known = tuple(storages)
        if not isinstance(called, RegionCall):
            changes = {known[local] for local in found.changed}
        creates = tuple(self._new_storage(node.name, size) for size in found.new_bytes)

        def here(item: Any) -> Any:
            if not isinstance(item, Location):
                return item
            number = known[item.tensor] if item.tensor >= 0 else creates[~item.tensor]
            return replace(item, tensor=number)

        self._values[node] = value = pytree.tree_map(here, found.value)
        if not creates and not changes:
            return  # a view
        self._steps.append(
            KernelStep(
                node,
                node.meta.get("phase") or self._phase_of_inputs(node),
                tuple(sorted(storages.keys() - changes)),
                creates,
                tuple(sorted(changes)),
                tuple(at.tensor for at in locations_of(value)),
                found.work,
            )
        )

    def _key(self, value: Any, storages: dict[int, int]) -> Hashable:
        """A key, equal for arguments that differ in their storages only; these are numbered as they come."""
        if isinstance(value, fx.Node):
            value = self._values[value]
        if isinstance(value, Location):
            local = storages.setdefault(value.tensor, len(storages))
            view = (value.shape, value.strides, value.offset, value.is_conj, value.is_neg)
            return (local, self._sizes[value.tensor], value.dtype, value.device, view)
        if isinstance(value, (tuple, list)):
            return (
                tuple if isinstance(value, tuple) else list,
                *(self._key(each, storages) for each in value),
            )
        if isinstance(value, dict):
            return (dict, *((name, self._key(each, storages)) for name, each in value.items()))
        if isinstance(value, slice):
            return (slice, *(self._key(each, storages) for each in (value.start, value.stop, value.step)))
        return (type(value), repr(value) if isinstance(value, float) else value)  # tells zeros apart

    def _outcome(self, node: fx.Node, called: Any, storages: dict[int, int]) -> _Outcome:
        """Run a call on fakes."""
        if isinstance(called, RegionCall):
            with self._mode:
                return _Outcome(*_located([spec.empty() for spec in called.outputs], {}))
        given: Any = fx.map_arg((node.args, dict(node.kwargs)), self._values.__getitem__)
        num_uses = Counter(at.tensor for at in locations_of(given))
        whole: dict[int, Tensor] = {}
        known: dict[int, int] = {}  # storages of operands, which live on in ``args``, by address

        def fake(at: Any) -> Any:
            if not isinstance(at, Location):
                return at
            if num_uses[at.tensor] == 1 and at.is_plain and _reach(at) == self._sizes[at.tensor]:
                value = torch.empty_strided(at.shape, at.strides, dtype=at.dtype, device=at.device)
            else:
                if at.tensor not in whole:
                    size = self._sizes[at.tensor]
                    whole[at.tensor] = torch.empty(size, dtype=torch.uint8, device=at.device)
                value = at.look(whole[at.tensor])
            known[value.untyped_storage()._cdata] = storages[at.tensor]
            return value

        with self._mode, torch.no_grad():
            args, kwargs = pytree.tree_map(fake, given)
            value = called(*args, **kwargs)
        if node.op == "call_module":
            return _Outcome(*_located(value, known))
        value = _as_it_runs(called, args, value)
        written = fx.map_arg(written_arguments(node), self._values.__getitem__)
        changed = dict.fromkeys(storages[at.tensor] for at in locations_of(written))
        return _Outcome(*_located(value, known), tuple(changed), work_of(called, args, value))

    def _phase_of_inputs(self, node: fx.Node) -> Phase:
        """The latest phase of what a node reads, for one that was given none."""
        phases = [source.meta.get("phase") for source in node.all_input_nodes]
        known = [phase for phase in phases if phase is not None]
        return max(known, key=_ORDER.__getitem__, default=Phase.FORWARD)


def _located(value: Any, known: dict[int, int]) -> tuple[Any, tuple[int, ...]]:
    """``value`` with a `Location` in the place of each tensor, and the sizes of its new storages."""
    new_bytes: list[int] = []

    def locate(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        storage = item.untyped_storage()
        if storage._cdata not in known:
            known[storage._cdata] = ~len(new_bytes)
            new_bytes.append(storage.nbytes())
        return Location.of(known[storage._cdata], item)

    return pytree.tree_map(locate, value), tuple(new_bytes)


def _reach(at: Location) -> int:
    """The bytes from the beginning of its storage to its end."""
    if 0 in at.shape:
        return 0
    last = at.offset + sum((size - 1) * stride for size, stride in zip(at.shape, at.strides, strict=True))
    return (1 + last) * at.dtype.itemsize


def _as_it_runs(target: Any, args: Sequence[Any], value: Any) -> Any:
    """A view with the strides that it has when it is run, anything else as it is.

    Traced on fakes, an axis of one element keeps the stride that it had; when the same view is run, it gets
    the one that it would have in dense memory. No element lies elsewhere for it, but by such strides torch
    tells whether a convolution's filters of one channel have their channels innermost, and with it the
    layout of the result. A meta tensor has the strides of the run, outside of the mode of fakes.
    """
    if target not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return value
    given: Tensor = args[0]
    is_copy = given.untyped_storage()._cdata != value.untyped_storage()._cdata
    if is_copy or value.numel() == 0:
        return value
    strides = torch.empty_strided(given.shape, given.stride(), device="meta").view(value.shape).stride()
    return given.as_strided(value.shape, strides, value.storage_offset())


_PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}


def work_of(target: Any, args: Sequence[Any], value: Any) -> Work | None:
    """The work of a library call; ``None`` for what is bound by memory."""
    if not isinstance(target, OpOverload) and args and isinstance(args[0], OpOverload):
        target, args = args[0], [leaf for leaf in args[1:] if isinstance(leaf, Tensor)]  # an extended product
    if target in _PRODUCTS:
        left = args[_PRODUCTS[target]]
        batch = value.shape[0] if value.dim() == 3 else 1
        return Work(batch, value.shape[-2], value.shape[-1], left.shape[-1])
    if target is aten.convolution.default:
        return _convolution(value, args[1], args[8], 1)
    if target is aten.convolution_backward.default:
        return _convolution(args[0], args[2], args[9], sum(map(bool, args[-1][:2])))
    name = str(target)
    if "scaled_dot_product" in name and "attention" in name:
        query, key = (args[1], args[2]) if "backward" in name else (args[0], args[1])
        # A block has some rows of one head, all columns of it. Two products forward, five backward.
        heads, depth = query.shape[0] * query.shape[1], query.shape[3] * key.shape[-2]
        return Work(heads, query.shape[2], 1, depth, 5.0 if "backward" in name else 2.0)
    return None


def _convolution(out: Tensor, weight: Tensor, groups: int, passes: int) -> Work:
    pixels = out.numel() // out.shape[1]
    return Work(groups, pixels, out.shape[1] // groups, weight.numel() // weight.shape[0], float(passes))
