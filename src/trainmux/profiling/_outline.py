"""What of a kernel graph an analytic profile needs, and how to have it for a width that nobody lowered.

Fusing and lowering a large model takes many seconds for each width. Two widths mostly give the same kernels
on larger tensors: then the widths between them do too, and every size is a straight line through the two.
This is checked node by node and size by size. What cannot be checked is that no width between the two is an
exception; who uses an outline that was worked out so has to compare it with the kernels in the end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import fx

from trainmux.ir import Phase
from trainmux.lowering import RegionCall
from trainmux.profiling._kernels import KernelGraph, KernelStep, KernelTensor, Work, target_text


@dataclass(frozen=True)
class OutlineStep:
    """A node: ``kind`` is what it calls, apart from sizes; the rest as in `KernelStep`."""

    name: str
    kind: tuple[Any, ...]
    phase: Phase
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    changes: tuple[int, ...]
    work: Work | None


@dataclass(frozen=True)
class Outline:
    """The nodes of a step in order, and the storages they touch."""

    steps: tuple[OutlineStep, ...]
    tensors: tuple[KernelTensor, ...]

    def traffic(self, step: OutlineStep) -> int:
        """Bytes that a node moves: what it changes is read and written."""
        sizes = [self.tensors[number].size_bytes for number in (*step.reads, *step.creates)]
        return sum(sizes) + 2 * sum(self.tensors[number].size_bytes for number in step.changes)


def outline_of(graph: KernelGraph) -> Outline:
    """The outline of kernels that were lowered."""
    return Outline(tuple(_outline_step(graph.module, step) for step in graph.steps), graph.tensors)


def outline_between(
    low: Outline, low_width: int, high: Outline, high_width: int, width: int
) -> Outline | None:
    """The outline of a width between two; ``None`` where their nodes are not the same, or sizes do not grow
    by the same whole number with each member."""
    if not low_width < width < high_width:
        raise ValueError(f"expected a width between {low_width} and {high_width}, got {width}")
    if len(low.steps) != len(high.steps) or len(low.tensors) != len(high.tensors):
        return None
    line = _Line(low_width, high_width, width)
    steps = [line.step(a, b) for a, b in zip(low.steps, high.steps, strict=True)]
    tensors = [line.tensor(a, b) for a, b in zip(low.tensors, high.tensors, strict=True)]
    whole_steps = tuple(step for step in steps if step is not None)
    whole_tensors = tuple(tensor for tensor in tensors if tensor is not None)
    if len(whole_steps) < len(steps) or len(whole_tensors) < len(tensors):
        return None
    return Outline(whole_steps, whole_tensors)


class _Line:
    """Numbers at a width, from those at a lower and a higher one; ``None`` where no line goes through."""

    def __init__(self, low_width: int, high_width: int, width: int) -> None:
        self._way = high_width - low_width
        self._done = width - low_width

    def number(self, low: int, high: int) -> int | None:
        growth, rest = divmod(high - low, self._way)
        return None if rest or growth < 0 else low + growth * self._done

    def tensor(self, low: KernelTensor, high: KernelTensor) -> KernelTensor | None:
        size = self.number(low.size_bytes, high.size_bytes)
        if size is None or (low.name, low.byte_class) != (high.name, high.byte_class):
            return None
        return KernelTensor(low.name, low.byte_class, size)

    def step(self, low: OutlineStep, high: OutlineStep) -> OutlineStep | None:
        if low.work is None and high.work is None:
            return low if low == high else None
        if low.work is None or high.work is None:
            return None
        work = self._work(low.work, high.work)
        if work is None or replace(low, work=work) != replace(high, work=work):
            return None
        return replace(low, work=work)

    def _work(self, low: Work, high: Work) -> Work | None:
        if low.passes != high.passes:
            return None
        names = [field.name for field in fields(Work) if field.name != "passes"]
        sizes = {name: self.number(getattr(low, name), getattr(high, name)) for name in names}
        whole = {name: size for name, size in sizes.items() if size is not None}
        return replace(low, **whole) if len(whole) == len(sizes) else None


def _outline_step(module: fx.GraphModule, step: KernelStep) -> OutlineStep:
    kind = _kind(module, step.node)
    return OutlineStep(step.node.name, kind, step.phase, step.reads, step.creates, step.changes, step.work)


def _kind(module: fx.GraphModule, node: fx.Node) -> tuple[Any, ...]:
    """What a node calls. A region counts by the types and dimensions of what it gives."""
    if node.op != "call_module":
        return (node.op, target_text(node.target))
    called = module.get_submodule(str(node.target))
    if not isinstance(called, RegionCall):
        return (node.op, type(called).__name__)
    outputs = tuple((str(spec.dtype), len(spec.shape), spec.padded is None) for spec in called.outputs)
    return (node.op, "region", outputs, called.placed, called.changed)
