"""Members side by side: each branch a step of its own, all branches at the same time (D8 of narrow arrays).

Where fusion does not pay, as with large convolutions, members on parallel branches fill a device all the
same. For planning they are one sub-array: a tensor of it is the tensors of all branches, a node the nodes of
all. Each branch has a share of the memory to itself, at the same offsets as the others, so branches need not
wait for each other: what a program may do to a sub-array's bytes it may do to each branch's share of them.
Where members cannot be shared out evenly, some sub-arrays have fewer than there are branches, and leave the
memory of the last ones unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainmux.ir import ALIGNMENT, Profile, ProfiledTensor
from trainmux.sizes import round_up

_CONCURRENT = "-concurrent-"
"""Separates a fingerprint from its number of concurrent steps."""


def branches_to_measure(num_members: int) -> tuple[int, ...]:
    """Numbers of concurrent members to measure: up to four, as a fleet without a plan has them; three only
    where pairs leave one over, or threes none.
    """
    uses_three = num_members % 2 == 1 or num_members % 3 == 0
    return tuple(number for number in (2, 3, 4) if number <= num_members and (number != 3 or uses_three))


def known_branches(profile: Profile) -> tuple[int, ...]:
    """Numbers of branches of which it is known how long they take."""
    return tuple(number for number, _ in profile.concurrent_seconds)


def side_by_side(profile: Profile, num_branches: int, num_members: int | None = None) -> Profile:
    """The profile of concurrent members, from that of one; unchanged for one branch.

    There are as many ``num_members`` as branches, or fewer. All nodes are stretched by the same factor, that
    of their step in company to their step alone. Where that was not measured, branches gain nothing: they
    take as long as one after another.
    """
    if num_branches == 1:
        return profile
    num_members = num_branches if num_members is None else num_members
    alone = sum(node.seconds for node in profile.nodes)
    together = {1: alone, **dict(profile.concurrent_seconds)}.get(num_members, num_members * alone)
    stretch = together / alone if alone > 0 else 1.0
    return replace(
        profile,
        fingerprint=concurrent_fingerprint(profile.fingerprint, num_branches, num_members),
        width=num_members,
        tensors=tuple(_of_all(tensor, num_branches, num_members) for tensor in profile.tensors),
        nodes=tuple(
            replace(
                node,
                seconds=node.seconds * stretch,
                workspace_bytes=num_branches * round_up(node.workspace_bytes, ALIGNMENT),
            )
            for node in profile.nodes
        ),
        concurrent_seconds=(),
        num_branches=num_branches,
    )


def branch_width(num_members: int, num_branches: int) -> int:
    """The fused width of a sub-array: all of its members, or one on each branch."""
    return 1 if num_branches > 1 else num_members


def used_branches(widths: Sequence[int], num_branches: int) -> tuple[int, ...]:
    """The number of branches that each sub-array uses."""
    return tuple(width if num_branches > 1 else 1 for width in widths)


def concurrent_fingerprint(fingerprint: str, num_branches: int, num_members: int) -> str:
    """The fingerprint of concurrent members, from that of one; unchanged for one branch."""
    if num_branches == 1:
        return fingerprint
    fewer = "" if num_members == num_branches else f"-with-{num_members}"
    return f"{fingerprint}{_CONCURRENT}{num_branches}{fewer}"


def fingerprint_of_one(profile: Profile) -> str:
    """The fingerprint of a single branch of this profile; its own where there is one branch."""
    return profile.fingerprint.removesuffix(concurrent_fingerprint("", profile.num_branches, profile.width))


def _of_all(tensor: ProfiledTensor, num_branches: int, num_members: int) -> ProfiledTensor:
    """A tensor of every branch, each with an aligned share; each member's is copied by itself."""
    return replace(
        tensor,
        size_bytes=num_branches * round_up(tensor.size_bytes, ALIGNMENT),
        swap_out_seconds=num_members * tensor.swap_out_seconds,
        swap_in_seconds=num_members * tensor.swap_in_seconds,
        swap_out_duplex_seconds=num_members * tensor.swap_out_duplex_seconds,
        swap_in_duplex_seconds=num_members * tensor.swap_in_duplex_seconds,
    )
