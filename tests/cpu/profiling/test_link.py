"""What the link carries beside a step, over a device that is made up."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from trainmux.profiling import LinkRates, _link
from trainmux.profiling._link import beside_step

IDLE = LinkRates(50e9, 40e9, 30e9, 20e9, handover_seconds=1e-6)
STEP_SECONDS = 0.02


@dataclass
class Moment:
    at: float = 0.0

    def elapsed_time(self, end: Moment) -> float:
        return (end.at - self.at) * 1e3


class Device:
    """Copies at ``share`` of the idle rates while steps are enqueued; what is asked of it is noted."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.num_replays = 0
        self.ways: list[tuple[bool, ...]] = []
        self.longest = 0.0
        self._asked: list[tuple[bool, float, Moment]] = []

    def replay(self) -> None:
        self.num_replays += 1

    def keep_busy(self, is_out: bool, least_bytes: float) -> tuple[int, Moment, Moment]:
        assert self.num_replays > 0  # the step has begun
        self._asked.append((is_out, least_bytes, Moment()))
        return int(least_bytes), Moment(), self._asked[-1][2]

    def synchronize(self, device: torch.device) -> None:
        if not self._asked:
            return
        ways = tuple(num_bytes > 0 for _, num_bytes, _ in self._asked)
        out, into = (IDLE.out_duplex, IDLE.into_duplex) if all(ways) else (IDLE.out, IDLE.into)
        for is_out, num_bytes, end in self._asked:
            end.at = num_bytes / (self.share * (out if is_out else into))
            self.longest = max(self.longest, end.at)
        self.ways.append(ways)
        self._asked = []


def on(device: Device, monkeypatch: pytest.MonkeyPatch) -> LinkRates:
    monkeypatch.setattr(_link, "_Link", lambda where, num_bytes: device)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    return beside_step(IDLE, device.replay, STEP_SECONDS, torch.device("cuda"))


def test_copies_are_as_slow_as_beside_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.8)
    found = on(device, monkeypatch)
    assert (found.out, found.into) == pytest.approx((40e9, 32e9))
    assert (found.out_duplex, found.into_duplex) == pytest.approx((24e9, 16e9))
    assert found.handover_seconds == IDLE.handover_seconds
    assert device.ways == [(True, True), (True, False), (False, True), (True, True)]  # the first warms up


def test_the_step_outlasts_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.8)
    on(device, monkeypatch)
    assert device.longest < device.num_replays / len(device.ways) * STEP_SECONDS


def test_no_link_is_faster_than_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on(Device(1.5), monkeypatch) == IDLE


def test_without_memory_for_the_copies_the_link_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(where: torch.device, num_bytes: int) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(_link, "_Link", full)
    assert beside_step(IDLE, lambda: None, STEP_SECONDS, torch.device("cuda")) == IDLE
