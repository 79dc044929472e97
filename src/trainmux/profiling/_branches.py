"""Members side by side: each branch a step of its own, all branches at the same time (D8 of narrow arrays).

Where fusion does not pay, as with large convolutions, members on parallel branches fill a device all the
same. For planning they are one sub-array: a tensor of it is the tensors of all branches, a node the nodes of
all. Each branch has a share of the memory to itself, at the same offsets as the others, so branches need not
wait for each other: what a program may do to a sub-array's bytes it may do to each branch's share of them.
"""

from __future__ import annotations

from dataclasses import replace

from trainmux.ir import ALIGNMENT, Profile, ProfiledTensor

_BESIDE = "-beside-"
"""Between a fingerprint and how many of its steps there are at the same time."""


def known_branches(profile: Profile) -> tuple[int, ...]:
    """Numbers of branches of which it is known how long they take."""
    return tuple(number for number, _ in profile.seconds_beside)


def side_by_side(profile: Profile, num_branches: int) -> Profile:
    """The profile of ``num_branches`` members at the same time, out of that of one; the same for one branch.

    Nodes take what their step takes longer in company than alone, all alike. Where that was not measured,
    branches gain nothing: they take as long as one after another.
    """
    if num_branches == 1:
        return profile
    alone = sum(node.seconds for node in profile.nodes)
    together = dict(profile.seconds_beside).get(num_branches, num_branches * alone)
    stretch = together / alone if alone > 0 else 1.0
    return replace(
        profile,
        fingerprint=beside_fingerprint(profile.fingerprint, num_branches),
        width=num_branches,
        tensors=tuple(_of_all(tensor, num_branches) for tensor in profile.tensors),
        nodes=tuple(
            replace(
                node,
                seconds=node.seconds * stretch,
                workspace_bytes=num_branches * _rounded(node.workspace_bytes),
            )
            for node in profile.nodes
        ),
        seconds_beside=(),
        num_branches=num_branches,
    )


def beside_fingerprint(fingerprint: str, num_branches: int) -> str:
    """That of so many steps side by side, out of that of one; the same for one."""
    return fingerprint if num_branches == 1 else f"{fingerprint}{_BESIDE}{num_branches}"


def fingerprint_of_one(profile: Profile) -> str:
    """That of the profile of which this one has several side by side, or its own."""
    return profile.fingerprint.removesuffix(f"{_BESIDE}{profile.num_branches}")


def _of_all(tensor: ProfiledTensor, num_branches: int) -> ProfiledTensor:
    """A tensor of every branch; each branch's is copied by itself."""
    return replace(
        tensor,
        size_bytes=num_branches * _rounded(tensor.size_bytes),
        swap_out_seconds=num_branches * tensor.swap_out_seconds,
        swap_in_seconds=num_branches * tensor.swap_in_seconds,
        swap_out_duplex_seconds=num_branches * tensor.swap_out_duplex_seconds,
        swap_in_duplex_seconds=num_branches * tensor.swap_in_duplex_seconds,
    )


def _rounded(size_bytes: int) -> int:
    """A branch's share of each tensor is a multiple of the alignment: so are all its offsets."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
