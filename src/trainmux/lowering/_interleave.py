"""Updates among the other pieces of a step, each as early as it can be (D3 "immediate")."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import fx

Piece = tuple[fx.Node, ...]
Touched = Callable[[Piece], Iterable[fx.Node]]


def interleave(
    steps: Sequence[Piece], updates: Sequence[Piece], *, first: int, reads: Touched, changes: Touched
) -> list[Piece]:
    """``steps`` in their order, with ``updates`` in theirs between them, none before step ``first``.

    ``reads`` gives what a piece reads: nodes of other pieces, and whatever node's memory it looks at.
    ``changes`` gives the nodes whose memory an update writes to. An update comes when what it reads is there
    and no step will look at what it changes any more.
    """
    made = {node: place for place, piece in enumerate(steps) for node in piece}
    last_read: dict[fx.Node, int] = {}
    for place, piece in enumerate(steps):
        last_read.update(dict.fromkeys(reads(piece), place))
    before: list[list[Piece]] = [[] for _ in range(len(steps) + 1)]
    place = first
    for piece in updates:
        needed = [made[node] for node in reads(piece) if node in made]
        needed += [last_read[node] for node in changes(piece) if node in last_read]
        place = max([place, *(step + 1 for step in needed)])
        before[place].append(piece)
    merged: list[Piece] = []
    for place, waiting in enumerate(before):
        merged += waiting
        merged += steps[place : place + 1]
    return merged
