"""Cut a program's nodes (D4): library calls in their order, and compiled regions between them.

Slot ``i`` lies between library calls ``i`` and ``i + 1``. A fusable node goes to the first slot in which
its inputs exist, so that what reads the same values meets in one region. A node that depends on weights,
batch and counters alone, or in the backward pass on saved values alone (a recomputation), goes to the
last slot before its first use instead: early, it would only hold memory. Within a slot, nodes that
neither feed one another nor read the same large value are regions of their own, which makes regions
small and alike: equal ones are compiled once.

The update phase keeps its own order: its nodes change parameters in place. Consecutive nodes of one
``unit`` (the update of one parameter) are a region. The update comes last.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from trainmux.ir import Phase
from trainmux.lowering._kinds import SMALL_BYTES, Kind, is_view, kind_of, num_bytes, root_of

_LARGE_BYTES = 1 << 16
_MAX_REGION = 600


Piece = tuple[fx.Node, ...]


@dataclass(frozen=True)
class Cut:
    """The nodes of each piece, in an order in which they can run: library calls and regions."""

    pieces: tuple[Piece, ...]
    kinds: dict[fx.Node, Kind]

    def is_library(self, piece: Sequence[fx.Node]) -> bool:
        return self.kinds[piece[0]] is Kind.LIBRARY


def cut(graph: fx.Graph, *, keeps_results: bool = False) -> Cut:
    """Cut a program's graph; its nodes carry ``phase`` and, in the update, ``unit``.

    ``keeps_results`` has what the forward pass returns (losses, metrics) computed before the backward pass
    begins: where other work comes between the two, it is wanted then. Otherwise they may share a region.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    kinds = {node: kind_of(node) for node in graph.nodes}
    steps = [node for node in nodes if _phase(node) is not Phase.UPDATE]
    updates = [node for node in nodes if _phase(node) is Phase.UPDATE]
    slots = _Slots(steps, kinds)
    results = _forward_results(graph) if keeps_results else frozenset()
    pieces: list[Piece] = []
    for slot, members in enumerate(slots.filled()):
        if slot > 0:
            pieces.append((slots.calls[slot - 1],))
        if any(_phase(node) is Phase.BACKWARD for node in members):
            first = [node for node in members if node in results]
            pieces.extend(_components(first, kinds))
            members = [node for node in members if node not in results]
        pieces.extend(_components(members, kinds))
    return Cut((*pieces, *_runs(updates, kinds)), kinds)


def _phase(node: fx.Node) -> Phase:
    phase: Phase = node.meta.get("phase", Phase.FORWARD)
    return phase


def _forward_results(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes of the forward pass that something returned is made from."""
    (output,) = graph.find_nodes(op="output")
    found: set[fx.Node] = set()
    waiting = list(output.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.op == "call_function" and _phase(node) is Phase.FORWARD:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return frozenset(found)


class _Slots:
    """The slot of every fusable node before the update."""

    def __init__(self, nodes: Sequence[fx.Node], kinds: dict[fx.Node, Kind]) -> None:
        self._kinds = kinds
        self._nodes = nodes
        # The parts of a tuple come with the call that makes it.
        self.calls = [n for n in nodes if kinds[n] is Kind.LIBRARY and not _is_part(n)]
        self._index = {call: i + 1 for i, call in enumerate(self.calls)}
        self._first_backward = sum(_phase(call) is Phase.FORWARD for call in self.calls)
        self.slot: dict[fx.Node, int] = {}
        late = self._late()
        self._place_early(late)
        self._place_late(late)
        for node in nodes:
            if _is_part(node) and kinds[node] is Kind.FUSABLE:
                self.slot[node] = self.slot[node.args[0]]  # type: ignore[index]

    def filled(self) -> list[list[fx.Node]]:
        members: list[list[fx.Node]] = [[] for _ in range(len(self.calls) + 1)]
        for node in self._nodes:
            if self._kinds[node] in (Kind.FUSABLE, Kind.INLINE) and node in self.slot:
                members[self.slot[node]].append(node)
        return members

    def _late(self) -> set[fx.Node]:
        """Nodes before which no library call of their own phase has to run."""
        late: set[fx.Node] = set()
        for node in self._nodes:
            if self._kinds[node] is Kind.LIBRARY:
                continue
            if all(self._is_given(source, _phase(node), late) for source in node.all_input_nodes):
                late.add(node)
        return late

    def _is_given(self, source: fx.Node, phase: Phase, late: set[fx.Node]) -> bool:
        if self._kinds[source] is Kind.SOURCE or source in late:
            return True
        return phase is Phase.BACKWARD and _phase(source) is Phase.FORWARD

    def _place_early(self, late: set[fx.Node]) -> None:
        """Slots of what is not late; inline nodes count as their source."""
        exists: dict[fx.Node, int] = {}
        for node in self._nodes:
            kind = self._kinds[node]
            if kind is Kind.LIBRARY:
                call = node.args[0] if _is_part(node) else node
                exists[node] = self._index[call]  # type: ignore[index]
                continue
            floor = self._first_backward if _phase(node) is Phase.BACKWARD else 0
            exists[node] = max([floor, *(exists.get(source, 0) for source in node.all_input_nodes)])
            if kind is Kind.FUSABLE and node not in late:
                self.slot[node] = exists[node]

    def _place_late(self, late: set[fx.Node]) -> None:
        last = len(self.calls)
        need: dict[fx.Node, int] = {}
        for node in reversed(self._nodes):
            wanted = min([last, *(self._needed_by(user, need) for user in node.users)])
            need[node] = wanted
            if node in late and self._kinds[node] is Kind.FUSABLE:
                self.slot[node] = wanted
            elif self._kinds[node] is Kind.INLINE and not is_view(node) and self._leaves(node):
                # A cast that a library call or the caller reads has to be computed for real; small ones
                # of weights all at once, at the beginning.
                early = (
                    node in late
                    and _phase(node) is Phase.FORWARD
                    and num_bytes(node.meta.get("val")) <= SMALL_BYTES
                )
                self.slot[node] = 0 if early and root_of(node).op == "placeholder" else wanted

    def _leaves(self, node: fx.Node) -> bool:
        for user in node.users:
            kind = self._kinds[user]
            if kind is Kind.LIBRARY or kind is Kind.SOURCE:
                return True
            if kind is Kind.INLINE and self._leaves(user):
                return True
        return False

    def _needed_by(self, user: fx.Node, need: dict[fx.Node, int]) -> int:
        if user in self._index:
            return self._index[user] - 1
        if user in self.slot:
            return self.slot[user]
        return need.get(user, len(self.calls))


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _components(members: list[fx.Node], kinds: dict[fx.Node, Kind]) -> list[Piece]:
    """The nodes of one slot in groups that share nothing but small values; in order."""
    parent: dict[fx.Node, fx.Node] = {node: node for node in members}

    def find(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    reader: dict[fx.Node, fx.Node] = {}
    for node in members:
        for source in through_inline(node, kinds, parent):
            if source in parent:
                parent[find(node)] = find(source)
            elif source.op != "placeholder" and num_bytes(source.meta.get("val")) >= _LARGE_BYTES:
                known = reader.setdefault(source, node)
                parent[find(node)] = find(known)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in members:
        groups.setdefault(find(node), []).append(node)
    large = [group for group in groups.values() if not _is_small(group)]
    alone = {node for group in large for node in group}
    together = [node for node in members if node not in alone]
    return [piece for group in (*large, together) if group for piece in _bounded(group)]


def _bounded(group: list[fx.Node]) -> Iterator[Piece]:
    """A group in pieces of bounded length; a tuple's parts stay with it."""
    piece: list[fx.Node] = []
    for node in group:
        if len(piece) >= _MAX_REGION and not _is_part(node):
            yield tuple(piece)
            piece = []
        piece.append(node)
    yield tuple(piece)


def _is_small(group: list[fx.Node]) -> bool:
    return all(num_bytes(node.meta.get("val")) <= SMALL_BYTES for node in group)


def through_inline(node: fx.Node, kinds: dict[fx.Node, Kind], own: Any = ()) -> Iterator[fx.Node]:
    """The nodes that a node reads, through inline nodes that are not in ``own``."""
    for source in node.all_input_nodes:
        if kinds[source] is Kind.INLINE and source not in own:
            yield from through_inline(source, kinds, own)
        else:
            yield source


def _runs(nodes: Sequence[fx.Node], kinds: dict[fx.Node, Kind]) -> list[Piece]:
    """The update's nodes in their order, cut at library calls and where the unit changes."""
    pieces: list[Piece] = []
    current: list[fx.Node] = []
    unit: Any = None
    for node in nodes:
        kind = kinds[node]
        if kind is Kind.INLINE and (is_view(node) or not _is_returned(node)):
            continue
        if kind is Kind.LIBRARY:
            if _is_part(node):
                continue
            if current:
                pieces.append(tuple(current))
                current = []
            pieces.append((node,))
            continue
        ends = node.meta.get("unit") != unit or len(current) >= _MAX_REGION
        if current and ends and not _is_part(node):
            pieces.append(tuple(current))
            current = []
        unit = node.meta.get("unit")
        current.append(node)
    if current:
        pieces.append(tuple(current))
    return pieces


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
