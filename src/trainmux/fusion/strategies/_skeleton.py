"""A step reduced to its library calls, to find out how many members are best fused into one array.

Convolutions and matrix products decide whether fusing more members pays: everything between them reads and
writes the same bytes at any width. So the member's convolutions and products are run in their order, at a
width, on random numbers, each in the way that is fastest there, followed by one pass over its result in the
place of the compiled region behind it. Several such arrays run side by side on branches, as sub-arrays do.

How images lie between convolutions follows from the ways that are taken, and decides which are fast: a
grouped convolution of members that lie one after another begins with a copy, one of members that lie side by
side in channels does not. So several members are timed in both layouts, and the better one counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._ops import OpOverload

from trainmux.fusion._stacked import Context, Stacked, find_rule
from trainmux.fusion.strategies._clock import Work
from trainmux.fusion.strategies._times import OperatorTimes, precision_text, text_of
from trainmux.runtime import stacked_strides

aten = torch.ops.aten
_CONVOLUTIONS = {aten.convolution.default: 1, aten.convolution_backward.default: 2}
"""With the position of the filters among the arguments."""
_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})
_ARRAYS_PER_BRANCH = 2
_NUM_BUFFERS = 4
_SEED = 77003


@dataclass(frozen=True)
class LibraryCall:
    """A call of the member's graph; tensors that differ between members are ``Stacked`` at width 1."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any

    def text(self) -> str:
        return f"{self.op} {text_of(self.args)} {sorted(self.kwargs.items())}"


class Layout(Enum):
    """How the images of several members lie."""

    ONE_AFTER_ANOTHER = "one after another"
    SIDE_BY_SIDE = "side by side in channels"


@dataclass(frozen=True)
class Partition:
    """Members in arrays of one width, a number of them side by side."""

    width: int
    num_branches: int

    @property
    def name(self) -> str:
        return f"{self.width}x{self.num_branches}"


def library_calls(module: fx.GraphModule, batched: Sequence[bool]) -> list[LibraryCall]:
    """The convolutions and products of a member's graph that depend on the member, in order."""
    given = iter(batched)
    stacked: set[fx.Node] = set()
    calls = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if next(given):
                stacked.add(node)
        elif stacked.intersection(node.all_input_nodes):
            stacked.add(node)
            if node.target in _CONVOLUTIONS or node.target in _PRODUCTS:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), partial(_described, stacked))
                calls.append(LibraryCall(node.target, args, kwargs, node.meta["val"]))
    return calls


def _described(stacked: set[fx.Node], node: fx.Node) -> Any:
    value = node.meta["val"]
    shape = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return Stacked(shape.unsqueeze(0)) if node in stacked else shape


def partition_time(
    calls: Sequence[LibraryCall],
    num_members: int,
    partition: Partition,
    strategies: Mapping[str, str],
    times: OperatorTimes,
) -> float | None:
    """Seconds per member of ``num_members`` in a partition; ``None`` where they could not be measured."""
    digest = hashlib.sha256("\n".join(call.text() for call in calls).encode()).hexdigest()[:24]
    ways = " ".join(f"{name}={way}" for name, way in sorted(strategies.items()))
    question = f"partition {partition.name} of {num_members} calls={digest} {ways} {precision_text()}"

    has_images = partition.width > 1 and any(call.op in _CONVOLUTIONS for call in calls)
    layouts = tuple(Layout) if has_images else (Layout.ONE_AFTER_ANOTHER,)

    def prepare() -> dict[str, list[Work]]:
        return {
            layout.value: _branches(calls, num_members, partition, layout, strategies, times)
            for layout in layouts
        }

    found = times.seconds(question, [layout.value for layout in layouts], prepare)
    num_timed = _num_arrays(num_members, partition) * partition.width
    return min(found.values()) / num_timed if found else None


def _num_arrays(num_members: int, partition: Partition) -> int:
    """Arrays that are run: a few on each branch stand for all of them."""
    return min(num_members // partition.width, _ARRAYS_PER_BRANCH * partition.num_branches)


def _branches(
    calls: Sequence[LibraryCall],
    num_members: int,
    partition: Partition,
    layout: Layout,
    strategies: Mapping[str, str],
    times: OperatorTimes,
) -> list[Work]:
    buffers = _Buffers(times.device)
    known: dict[str, Work] = {}
    line: list[Work] = []
    for call in calls:
        key = call.text()
        if key not in known:
            known[key] = _work(call, partition.width, layout, strategies, times, buffers)
        line.append(known[key])

    def array() -> None:
        for work in line:
            work()

    total = _num_arrays(num_members, partition)
    shares = [total // partition.num_branches] * partition.num_branches
    for branch in range(total % partition.num_branches):
        shares[branch] += 1
    return [partial(_repeat, array, share) for share in shares if share]


def _repeat(work: Work, count: int) -> None:
    for _ in range(count):
        work()


def _work(
    call: LibraryCall,
    width: int,
    layout: Layout,
    strategies: Mapping[str, str],
    times: OperatorTimes,
    buffers: _Buffers,
) -> Work:
    """The call at a width, with a pass over its result behind it."""
    context = Context(width, times.device, call.value, strategies, times, compiles=True)
    widen = _Widen(width, times.device, layout)
    filters = _CONVOLUTIONS.get(call.op)
    if filters is None:
        args, kwargs = pytree.tree_map(widen.matrix, (call.args, dict(call.kwargs)), is_leaf=_is_stacked)
    else:
        pairs = enumerate(call.args)
        args = tuple(widen.filters(arg) if number == filters else widen.images(arg) for number, arg in pairs)
        kwargs = dict(call.kwargs)
    run = _chosen(context, call.op, args, kwargs)
    buffers.begin()
    real_args, real_kwargs = pytree.tree_map(buffers.filled, (args, kwargs), is_leaf=_is_stacked)

    def work() -> None:
        result = run(context, call.op, *real_args, **real_kwargs)
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, Stacked):
                part.tensor.relu_()
                break

    return work


def _chosen(
    context: Context, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any]:
    rule = find_rule(op)
    assert rule is not None
    if rule.family is None:
        return rule.apply
    return rule.family.choose(context, op, args, kwargs).way.runs[op]


def _is_stacked(leaf: Any) -> bool:
    return isinstance(leaf, Stacked)


@dataclass(frozen=True)
class _Widen:
    """A member's value as that of several members, which lie as stacked storage has them, or side by side."""

    width: int
    device: torch.device
    layout: Layout

    def matrix(self, leaf: Any) -> Any:
        """In the member's own layout: a transposed view stays one."""
        if not isinstance(leaf, (Stacked, Tensor)):
            return leaf
        member = leaf.tensor[0] if isinstance(leaf, Stacked) else leaf
        step = stacked_strides(member.shape, member.dtype, self.device)[0]
        return self._like(leaf, member, (step, *member.stride()))

    def filters(self, leaf: Any) -> Any:
        """As they are stored."""
        if not isinstance(leaf, (Stacked, Tensor)):
            return leaf
        member = leaf.tensor[0] if isinstance(leaf, Stacked) else leaf
        return self._like(leaf, member, stacked_strides(member.shape, member.dtype, self.device))

    def images(self, leaf: Any) -> Any:
        """In the layout to be tried; biases, which have one axis, as filters."""
        is_stacked = isinstance(leaf, Stacked)
        if not is_stacked or self.layout is Layout.ONE_AFTER_ANOTHER or leaf.rank < 3:
            return self.filters(leaf)
        count, channels, *sizes = leaf.shape
        folded = (count, self.width * channels, *sizes)
        _, first, channel, *rest = stacked_strides(folded, leaf.tensor.dtype, self.device)
        return self._like(leaf, leaf.tensor[0], (channels * channel, first, channel, *rest))

    def _like(self, leaf: Any, member: Tensor, strides: Sequence[int]) -> Any:
        if not isinstance(leaf, Stacked):
            return torch.empty_strided(member.shape, strides[1:], dtype=member.dtype, device="meta")
        shape = (self.width, *member.shape)
        return Stacked(torch.empty_strided(shape, tuple(strides), dtype=member.dtype, device="meta"))


class _Buffers:
    """Random numbers that the arguments of all calls look at: memory for each argument, not for each call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(_SEED)
        self._memory: dict[tuple[int, torch.dtype], Tensor] = {}
        self._position = 0

    def begin(self) -> None:
        """The arguments of another call follow."""
        self._position = 0

    def filled(self, leaf: Any) -> Any:
        if isinstance(leaf, Stacked):
            return Stacked(self.filled(leaf.tensor))
        if not isinstance(leaf, Tensor):
            return leaf
        length = 1 + sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride(), strict=True))
        key = (self._position % _NUM_BUFFERS, leaf.dtype)
        self._position += 1
        if key not in self._memory or self._memory[key].numel() < length:
            memory = torch.empty(length, dtype=leaf.dtype, device=self._device)
            self._memory[key] = memory.normal_(generator=self._generator)
        return self._memory[key].as_strided(leaf.shape, leaf.stride())
