"""Captures into a pool that is reserved before, on an allocator that exists on paper."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from trainmux.engine._capture_room import PoolNeed, capture_reserved, peak_need

MIB = 1 << 20
MAIN, SIDE = 7, 8


@dataclass
class PaperCapture:
    """Work that needs ``needs``; captured into less than ``fits`` by stream, the pool grows by ``grows``."""

    needs: PoolNeed | None
    fits: dict[int, int]
    grows: int = 40 * MIB
    log: list[str] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    small_bytes: int = 0

    def rehearse(self) -> PoolNeed | None:
        self.log.append("rehearse")
        return self.needs

    def reserve(self, need: PoolNeed) -> None:
        self.log.append("reserve")
        self.held = {stream: max(20 * MIB, size) for stream, size in need.large.items()}

    def capture(self) -> str:
        self.log.append("capture")
        for stream, size in self.fits.items():
            if self.held.get(stream, 0) < size:
                self.held[stream] = self.held.get(stream, 0) + self.grows
        self.small_bytes = 2 * MIB
        return f"graph {self.log.count('capture')}"

    def reserved(self) -> PoolNeed:
        return PoolNeed(dict(self.held), self.small_bytes)

    def start_over(self) -> None:
        self.log.append("start over")
        self.held, self.small_bytes = {}, 0


ONCE = ["rehearse", "reserve", "capture"]


@pytest.mark.parametrize("size", [4 * MIB, 60 * MIB])
def test_work_that_fits_is_captured_once_in_what_was_promised(size: int) -> None:
    work = PaperCapture(PoolNeed({MAIN: size}, 2 * MIB), {MAIN: size})
    assert capture_reserved(work) == ("graph 1", work.reserved().total_bytes)
    assert work.log == ONCE


@pytest.mark.parametrize("grown", [MAIN, SIDE])
def test_a_pool_that_grew_is_made_anew_as_large_as_it_became(grown: int) -> None:
    needs = PoolNeed({MAIN: 60 * MIB, SIDE: 30 * MIB}, 2 * MIB)
    fits = {**needs.large, grown: needs.large[grown] + 10 * MIB}
    work = PaperCapture(needs, fits)
    captured, promised = capture_reserved(work)
    assert captured == "graph 2"
    assert work.log == [*ONCE, "start over", *ONCE]
    assert work.held == {**needs.large, grown: needs.large[grown] + 40 * MIB}
    assert promised == work.reserved().total_bytes


def test_a_pool_that_grows_again_is_kept() -> None:
    work = PaperCapture(PoolNeed({MAIN: 60 * MIB}), {MAIN: 1000 * MIB})
    captured, promised = capture_reserved(work)
    assert captured == "graph 2"
    assert promised is not None
    assert promised < work.reserved().total_bytes
    assert work.log.count("capture") == 2


def test_nothing_is_promised_where_nothing_could_be_recorded() -> None:
    work = PaperCapture(None, {MAIN: 60 * MIB})
    assert capture_reserved(work) == ("graph 1", None)
    assert work.log == ["rehearse", "capture"]


def event(action: str, address: int, size: int = 0, stream: int = MAIN) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": stream}


def test_needs_are_the_most_bytes_live_at_a_time_on_each_stream() -> None:
    trace = [
        event("free_completed", 99),  # was there before
        event("alloc", 1, 30 * MIB),
        event("alloc", 2, 10 * MIB, SIDE),
        event("alloc", 3, 700),
        event("free_requested", 1),
        event("free_completed", 1),
        event("alloc", 1, 20 * MIB + 1),
        event("alloc", 4, 21 * MIB),
        event("free_completed", 2),
        event("alloc", 5, 3 * MIB, SIDE),
    ]
    assert peak_need(trace) == PoolNeed({MAIN: 42 * MIB, SIDE: 10 * MIB}, 2 * MIB)
    assert peak_need([]) == PoolNeed()
