"""Numbers that the host feeds: a packed layout, one memory on a CPU, a ring that waits only when it must."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fake_cuda import FakeDevice, FakeEvent

from trainmux.engine import HostFeed
from trainmux.runtime import ALIGNMENT_BYTES

CPU = torch.device("cpu")
FIELDS = {
    "counters": (torch.int64, (3,)),
    "scalars": (torch.float64, (5, 3)),
    "limits": (torch.float64, (2, 3)),
    "active": (torch.bool, (3,)),
}
limited = settings(max_examples=50, deadline=None, derandomize=True)
dtypes = st.sampled_from([torch.int64, torch.float64, torch.float32, torch.int16, torch.bool])
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)


class Events:
    """Makes the events of one ring, on a device of their own."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.made: list[FakeEvent] = []

    def __call__(self) -> FakeEvent:
        self.made.append(FakeEvent(self.device))
        return self.made[-1]

    @property
    def num_waits(self) -> list[int]:
        return [event.num_waits for event in self.made]


# ---- layout --------------------------------------------------------------------------------------------


@limited
@given(fields=st.lists(st.tuples(dtypes, shapes), max_size=6))
def test_arrays_are_aligned_and_do_not_overlap(fields: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
    named = {str(i): field for i, field in enumerate(fields)}
    feed = HostFeed(named, CPU)
    for array in feed.host.values():
        array.fill(1)
    for name, (dtype, shape) in named.items():
        tensor = feed.device[name]
        feed.host[name].fill(0)
        assert not tensor.any()
        assert all(other.all() for key, other in feed.device.items() if int(key) > int(name))
        assert tensor.dtype == dtype
        assert tensor.shape == feed.host[name].shape == shape
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % ALIGNMENT_BYTES == 0


# ---- on a CPU ------------------------------------------------------------------------------------------


def test_on_a_cpu_the_program_reads_what_the_host_wrote() -> None:
    feed = HostFeed(FIELDS, CPU)
    tensors = dict(feed.device)
    feed.host["counters"][:] = [1, 2, 2**62]
    feed.host["scalars"][4] = [0.1, -0.0, np.inf]
    feed.host["active"][1] = True
    feed.push()
    assert feed.device["counters"].tolist() == [1, 2, 2**62]
    assert feed.device["scalars"][4].tolist() == [0.1, 0.0, np.inf]
    assert feed.device["scalars"][4].signbit().tolist() == [False, True, False]
    assert feed.device["active"].tolist() == [False, True, False]
    assert not feed.device["limits"].any()
    assert all(feed.device[name] is tensor for name, tensor in tensors.items())


# ---- the ring ------------------------------------------------------------------------------------------


def test_the_host_waits_only_for_a_slot_that_is_in_flight() -> None:
    events = Events()
    feed = HostFeed(FIELDS, CPU, num_slots=3, make_event=events)
    for _ in range(3):
        feed.push()
    assert events.num_waits == [0, 0, 0]
    feed.push()  # a fourth, while none of the three has been copied
    assert events.num_waits == [1, 0, 0]
    events.device.run_until(events.made[1].query)
    feed.push()
    assert events.num_waits == [1, 0, 0]
    feed.push()
    assert events.num_waits == [1, 0, 1]


@pytest.mark.parametrize("num_slots", [1, 2, 8])
def test_what_is_in_flight_is_not_overwritten(num_slots: int) -> None:
    """The slots hold what the last pushes sent, however the host goes on writing."""
    feed = HostFeed(FIELDS, CPU, num_slots=num_slots, make_event=Events())
    for number in range(1, 20):
        feed.host["counters"][:] = number
        feed.push()
        feed.host["counters"][:] = -1
        assert feed.device["counters"].eq(number).all()
        sent = sorted(int(slot[:8].view(torch.int64)) for slot in feed._slots)
        expected = range(max(0, number - num_slots) + 1, number + 1)
        assert sent == [0] * (num_slots - len(expected)) + list(expected)
