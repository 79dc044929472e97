"""The bytes of one part: tenancies are those that the instructions imply, in the slab, without overlap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainmux.ir._program import Part, Tenancy
from trainmux.ir._verifier._report import Findings, Names, ViolationKind

WORKSPACE = -1
"""The tensor number of an instruction's own workspace."""
AT_BEGINNING = -1
"""The position of what is there when a part begins."""


Owner = tuple[int, int]
"""Sub-array and tensor; tensor -1 is a workspace."""


class LiveBytes:
    """The ranges in use. A range of zero bytes takes none and is not kept."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int, Owner]] = []

    def take(self, offset: int, size_bytes: int, owner: Owner) -> Owner | None:
        """Put a range into use; returns the owner of one that it overlaps, if there is one."""
        if size_bytes <= 0:
            return None
        entry = (offset, offset + size_bytes, owner)
        at = bisect_left(self._ranges, entry)
        met = None
        if at < len(self._ranges) and self._ranges[at][0] < offset + size_bytes:
            met = self._ranges[at][2]
        elif at > 0 and self._ranges[at - 1][1] > offset:
            met = self._ranges[at - 1][2]
        self._ranges.insert(at, entry)
        return met

    def give_back(self, offset: int, size_bytes: int, owner: Owner) -> None:
        """Undo a `take` with the same arguments."""
        if size_bytes <= 0:
            return
        del self._ranges[bisect_left(self._ranges, (offset, offset + size_bytes, owner))]


@dataclass(frozen=True, slots=True)
class FormerTenant:
    """The last owner of some bytes, and the last instructions that touched them (-1: none of this part)."""

    owner: Owner
    last_compute: int
    last_offload: int


class FormerTenants:
    """Disjoint ranges of bytes that were given back in this part, each with its last tenant.

    Only the last tenant of a byte is kept: it touched the byte after the one before it was done, so who
    waits for it waits for all before it.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, FormerTenant]] = []

    def _span(self, start: int, end: int) -> tuple[int, int]:
        """Positions of the ranges that share a byte with ``start`` to ``end``."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[first][1] <= start:
            first += 1
        return first, bisect_left(self._starts, end)

    def retire(self, offset: int, size_bytes: int, tenant: FormerTenant) -> None:
        """``tenant`` gave these bytes back."""
        if size_bytes <= 0:
            return
        end = offset + size_bytes
        first, last = self._span(offset, end)
        new = []
        if first < last and self._ranges[first][0] < offset:
            new.append((self._ranges[first][0], offset, self._ranges[first][2]))
        new.append((offset, end, tenant))
        if first < last and self._ranges[last - 1][1] > end:
            new.append((end, self._ranges[last - 1][1], self._ranges[last - 1][2]))
        self._ranges[first:last] = new
        self._starts[first:last] = [start for start, _, _ in new]

    def of(self, offset: int, size_bytes: int) -> Iterator[FormerTenant]:
        """The last owners of these bytes."""
        if size_bytes <= 0:
            return
        first, last = self._span(offset, offset + size_bytes)
        for _, _, tenant in self._ranges[first:last]:
            yield tenant


class PartSlab:
    """Hands out a part's tenancies as its instructions take and give back bytes."""

    def __init__(self, name: str, part: Part, slab_bytes: int, *, names: Names, findings: Findings) -> None:
        self._name = name
        self._num_instructions = len(part.instructions)
        self._names = names
        self._findings = findings
        self._live = LiveBytes()
        self._former = FormerTenants()
        self._tenancies: dict[tuple[int, int, int], Tenancy] = {}
        for tenancy in part.tenancies:
            self._read(tenancy, slab_bytes)

    def _read(self, tenancy: Tenancy, slab_bytes: int) -> None:
        owner = (tenancy.sub_array, tenancy.tensor)
        key = (*owner, tenancy.begin)
        if key in self._tenancies:
            self._refuse(tenancy.begin, f"{self._names.tensor(*owner)} has two tenancies that begin here")
        self._tenancies[key] = tenancy
        end = tenancy.offset + tenancy.size_bytes
        if tenancy.offset < 0 or end > slab_bytes:
            self._refuse(
                tenancy.begin,
                f"{self._names.tensor(*owner)} must lie in the slab of {slab_bytes} bytes, but has bytes "
                f"{tenancy.offset} to {end}",
            )

    def take(self, position: int, owner: Owner, size_bytes: int) -> Tenancy | None:
        """The tenancy of bytes that are taken at ``position``; ``None`` where there is none, which is said.

        What has zero bytes may have a tenancy or not.
        """
        tenancy = self._tenancies.pop((*owner, position), None)
        if tenancy is None:
            if size_bytes:
                who = self._names.tensor(*owner)
                self._refuse(position, f"{who} takes {size_bytes} bytes here, but has no tenancy")
            return None
        if tenancy.size_bytes != size_bytes:
            self._refuse(
                position,
                f"{self._names.tensor(*owner)} has {size_bytes} bytes, but its tenancy is for "
                f"{tenancy.size_bytes}",
            )
        met = self._live.take(tenancy.offset, tenancy.size_bytes, owner)
        if met is not None:
            self._findings.add(
                ViolationKind.OVERLAP,
                self._name,
                position,
                f"{self._names.tensor(*owner)}, at bytes {tenancy.offset} to "
                f"{tenancy.offset + tenancy.size_bytes}, shares bytes with {self._names.tensor(*met)}, and "
                "both are live",
            )
        return tenancy

    def give_back(self, position: int, tenancy: Tenancy, last_compute: int, last_offload: int) -> None:
        """The bytes are free from ``position`` on, which must be the tenancy's end."""
        owner = (tenancy.sub_array, tenancy.tensor)
        self.check_end(position, tenancy)
        self._live.give_back(tenancy.offset, tenancy.size_bytes, owner)
        self._former.retire(
            tenancy.offset, tenancy.size_bytes, FormerTenant(owner, last_compute, last_offload)
        )

    def take_for_now(self, position: int, takers: Sequence[tuple[Owner, int]]) -> None:
        """Bytes, by owner and size, that only the instruction at ``position`` of the compute lane uses."""
        taken = [self.take(position, owner, size_bytes) for owner, size_bytes in takers]
        for tenancy in taken:
            if tenancy is not None:
                self.give_back(position, tenancy, position, -1)

    def former_tenants(self, tenancy: Tenancy) -> Iterator[FormerTenant]:
        """The owners of bytes of ``tenancy`` before it, in this part."""
        return self._former.of(tenancy.offset, tenancy.size_bytes)

    def begins_with(self) -> list[Owner]:
        """Whose bytes are in use when the part begins, apart from those taken so far."""
        return [(sub_array, tensor) for sub_array, tensor, begin in self._tenancies if begin == AT_BEGINNING]

    def check_end(self, position: int, tenancy: Tenancy) -> None:
        """The tenancy must end at ``position``."""
        if tenancy.end != position:
            who = self._names.tensor(tenancy.sub_array, tenancy.tensor)
            self._refuse(
                min(position, self._num_instructions - 1),
                f"{who}, taken at {tenancy.begin}, has its bytes until {position}, but its tenancy ends at "
                f"{tenancy.end}",
            )

    def finish(self) -> None:
        """Report the tenancies that nothing took; what the part begins with is not meant."""
        for (sub_array, tensor, begin), tenancy in self._tenancies.items():
            if tenancy.size_bytes and begin != AT_BEGINNING:
                self._refuse(
                    begin,
                    f"there is a tenancy for {self._names.tensor(sub_array, tensor)} from here on, but the "
                    "instruction takes no bytes for it",
                )

    def _refuse(self, position: int, text: str) -> None:
        self._findings.add(ViolationKind.PLACEMENT, self._name, position, text)
