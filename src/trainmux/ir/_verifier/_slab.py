"""The bytes of one part: tenancies are those that the instructions imply, in the slab, without overlap."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from trainmux.ir._program import Part, Tenancy
from trainmux.ir._verifier._report import Report, ViolationKind

AT_BEGINNING = -1
"""The position of what is there when a part begins."""

Key = tuple[int, int]
"""A tensor: its sub-array, and its position in the sub-array's profile, -1 for a workspace."""


@dataclass(slots=True)
class Resident:
    """A tensor on the device; positions are -1 where nothing of this part did it.

    ``tenancy`` is ``None`` where it has no bytes. Once given back it is no longer live, and stays known as
    the last tenant of its bytes.
    """

    key: Key
    version: int | None
    written_at: int = -1
    written_on: int = 0
    last_compute: int = -1
    last_offload: int = -1
    tenancy: Tenancy | None = None
    is_live: bool = True


class PartSlab:
    """Hands out a part's tenancies as its instructions take and give back bytes."""

    def __init__(self, part: Part, slab_bytes: int, report: Report) -> None:
        self._report = report
        # Who has each byte, or had it last: disjoint ranges in order. The last tenant is enough to know: it
        # touched the byte after the one before it was done, so who waits for it waits for all before it.
        self._starts: list[int] = []
        self._ranges: list[tuple[int, int, Resident]] = []
        self._tenancies: dict[tuple[int, int, int], Tenancy] = {}
        for tenancy in part.tenancies:
            key = (tenancy.sub_array, tenancy.tensor, tenancy.begin)
            if key in self._tenancies:
                self._refuse(f"{report.tensor(*key[:2])} has two tenancies that begin at {tenancy.begin}")
            self._tenancies[key] = tenancy
            end = tenancy.offset + tenancy.size_bytes
            if tenancy.offset < 0 or end > slab_bytes:
                self._refuse(
                    f"{report.tensor(*key[:2])} must lie in the slab of {slab_bytes} bytes, but has bytes "
                    f"{tenancy.offset} to {end} from {tenancy.begin} on"
                )

    def take(self, position: int, resident: Resident, size_bytes: int) -> list[Resident]:
        """Give ``resident`` its tenancy of bytes taken at ``position``; returns who had any of them before.

        What has zero bytes may have a tenancy or not.
        """
        tenancy = self._tenancies.pop((*resident.key, position), None)
        if tenancy is None or tenancy.size_bytes != size_bytes:
            if tenancy is not None or size_bytes:
                who, found = self._report.tensor(*resident.key), tenancy.size_bytes if tenancy else "none"
                self._refuse(f"{who} takes {size_bytes} bytes here, but the bytes of its tenancy are {found}")
            if tenancy is None:
                return []
        resident.tenancy = tenancy
        end = tenancy.offset + tenancy.size_bytes
        before = self._occupy(tenancy.offset, end, resident)
        for other in before:
            if other.is_live:
                who, whose = self._report.tensor(*resident.key), self._report.tensor(*other.key)
                text = f"{who}, at bytes {tenancy.offset} to {end}, shares some with {whose}: both are live"
                self._report.add(ViolationKind.OVERLAP, text)
        return [other for other in before if not other.is_live]

    def _occupy(self, start: int, end: int, resident: Resident) -> list[Resident]:
        """Enter the tenant of a range; returns those that had bytes of it."""
        if end <= start:
            return []
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[first][1] <= start:
            first += 1
        last = bisect_left(self._starts, end)
        before = self._ranges[first:last]
        new = [(start, end, resident)]
        if before and before[0][0] < start:
            new.insert(0, (before[0][0], start, before[0][2]))
        if before and before[-1][1] > end:
            new.append((end, before[-1][1], before[-1][2]))
        self._ranges[first:last] = new
        self._starts[first:last] = [each[0] for each in new]
        return [tenant for _, _, tenant in before]

    def give_back(self, position: int, resident: Resident) -> None:
        """The bytes are free from ``position`` on."""
        self.check_end(position, resident)
        resident.is_live = False

    def begins_with(self) -> set[Key]:
        """Tensors with bytes in use when the part begins, apart from those taken so far."""
        return {(sub_array, tensor) for sub_array, tensor, begin in self._tenancies if begin == AT_BEGINNING}

    def check_end(self, position: int, resident: Resident) -> None:
        """The tenancy must end at ``position``."""
        tenancy = resident.tenancy
        if tenancy is not None and tenancy.end != position:
            who = f"{self._report.tensor(*resident.key)}, taken at {tenancy.begin},"
            self._refuse(f"{who} has its bytes until {position}, but its tenancy ends at {tenancy.end}")

    def finish(self) -> None:
        """Report the tenancies that nothing took; what the part begins with is not meant."""
        for (sub_array, tensor, begin), tenancy in self._tenancies.items():
            if tenancy.size_bytes and begin != AT_BEGINNING:
                who = self._report.tensor(sub_array, tensor)
                self._refuse(f"{who} has a tenancy from {begin} on, but takes no bytes there")

    def _refuse(self, text: str) -> None:
        self._report.add(ViolationKind.PLACEMENT, text)
