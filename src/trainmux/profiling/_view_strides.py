"""Strides of views as they come out when they are run.

Traced on fakes, an axis of one element keeps the stride that it had; when the same view is run, it gets the
one that it would have in dense memory. No element lies elsewhere for it, but by such strides torch tells
whether a convolution's filters of one channel have their channels innermost, and with it the layout of the
result.
"""

from __future__ import annotations

from collections.abc import Sequence


def view_strides(
    shape: Sequence[int], strides: Sequence[int], wanted: Sequence[int]
) -> tuple[int, ...] | None:
    """Strides of a tensor looked at in another shape; ``None`` where it cannot be, or holds nothing.

    Axes that lie densely within each other form a block. Each block is dealt out to the new axes, the last
    ones first; an axis of one element goes with the block behind it.
    """
    if 0 in shape:
        return None
    if not shape:
        return (1,) * len(wanted)
    found = [0] * len(wanted)
    axis = len(wanted) - 1
    base, in_block, dealt = strides[-1], 1, 1
    for old in reversed(range(len(shape))):
        in_block *= shape[old]
        is_first = old == 0
        if not is_first and (shape[old - 1] == 1 or strides[old - 1] == in_block * base):
            continue
        while axis >= 0 and (dealt < in_block or wanted[axis] == 1):
            found[axis] = dealt * base
            dealt *= wanted[axis]
            axis -= 1
        if dealt != in_block:
            return None
        if not is_first:
            base, in_block, dealt = strides[old - 1], 1, 1
    return tuple(found) if axis < 0 else None
