"""What the link carries beside kernels, over a device that is made up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from trainmux.profiling import LinkRates, _link
from trainmux.profiling._link import LinkUnderLoad, probe_link_under_load, slowdown_of

IDLE = LinkRates(50e9, 40e9, 30e9, 20e9, handover_seconds=1e-6)
LOAD_SECONDS = 0.2
PIECE_BYTES = 32 << 20


@dataclass
class Timer:
    taken: float = 0.0

    def start(self, stream: object) -> None:
        """Times are told afterwards."""

    stop = start

    def seconds(self) -> float:
        return self.taken


class Device:
    """Copies at ``share`` of the idle rates while a load is on; what is asked of it is noted.

    Beside copies the load takes ``slowdown`` times as long.
    """

    def __init__(self, share: float, slowdown: float = 1.0) -> None:
        self.share = share
        self.slowdown = slowdown
        self.of_load = Timer()
        self.num_loads = 0
        self.ways: list[tuple[int, ...]] = []
        self.longest = 0.0
        self._asked: list[tuple[int, int, Timer]] = []

    def load(self) -> None:
        self.num_loads += 1

    def timed_copies(self, lane: int, count: int) -> Timer:
        assert self.num_loads == len(self.ways) + 1  # the load has begun
        self._asked.append((lane, count, Timer()))
        return self._asked[-1][2]

    def synchronize(self, device: torch.device) -> None:
        if not self._asked:
            return
        ways = tuple(lane for lane, _, _ in self._asked)
        rates = (IDLE.out_duplex, IDLE.into_duplex) if len(ways) == 2 else (IDLE.out, IDLE.into)
        for lane, count, end in self._asked:
            end.taken = count * PIECE_BYTES / (self.share * rates[lane])
        copied = max(end.taken for _, _, end in self._asked)
        self.longest = max(self.longest, copied)
        self.of_load.taken = copied + LOAD_SECONDS - copied / self.slowdown
        self.ways.append(ways)
        self._asked = []


def on(device: Device, monkeypatch: pytest.MonkeyPatch) -> LinkUnderLoad:
    monkeypatch.setattr(_link, "_Link", lambda where, num_bytes: device)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(_link, "CudaTimer", lambda: device.of_load)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: None)
    return probe_link_under_load(device.load, LOAD_SECONDS, IDLE, torch.device("cuda"))


def test_copies_are_as_slow_as_beside_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.8)
    found = on(device, monkeypatch).link
    assert (found.out, found.into) == pytest.approx((40e9, 32e9))
    assert (found.out_duplex, found.into_duplex) == pytest.approx((24e9, 16e9))
    assert found.handover_seconds == IDLE.handover_seconds
    assert device.ways == [(0,)] * 3 + [(1,)] * 3 + [(0, 1)] * 3


def test_the_load_outlasts_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.8)
    on(device, monkeypatch)
    assert 0.5 * LOAD_SECONDS < device.longest < LOAD_SECONDS


def test_no_link_is_faster_than_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(Device(1.5), monkeypatch).link == IDLE


@pytest.mark.parametrize("slowdown", [1.0, 1.1, 1.5])
def test_kernels_are_slower_by_what_copies_cost_them(
    slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on(Device(0.8, slowdown), monkeypatch).slowdown == pytest.approx(slowdown)


def test_a_slowdown_is_of_the_time_that_copies_ran() -> None:
    assert slowdown_of(10.0, 10.0, 5.0) == 1.0
    assert slowdown_of(10.0, 11.0, 6.0) == pytest.approx(6 / 5)
    assert slowdown_of(10.0, 12.0, 20.0) == pytest.approx(1.2)  # the copies outlasted the kernels
    assert slowdown_of(10.0, 9.9, 6.0) == 1.0
    assert slowdown_of(10.0, 40.0, 6.0) == 1.0  # nothing to do with copies
    assert slowdown_of(10.0, 40.0, 50.0) == 2.0
    assert slowdown_of(10.0, 10.0, 0.0) == 1.0


def test_without_memory_for_the_copies_the_link_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(where: torch.device, num_bytes: int) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(_link, "_Link", full)
    assert probe_link_under_load(lambda: None, LOAD_SECONDS, IDLE, torch.device("cuda")) == LinkUnderLoad(
        IDLE
    )
