"""Memory of jobs on a CPU: two ends of an arena, pages given back, a clock that blames memory alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainmux.colocate._demand import SegmentRef
from trainmux.colocate._host_device import HostDevice
from trainmux.colocate._layout import ArenaLayout, MemoryLayout
from trainmux.colocate._protocols import MemoryNeed

NEEDS = {"a": MemoryNeed(1024, 1536, 2048), "b": MemoryNeed(512, 512, 1024)}


def layout(capacity_bytes: int) -> MemoryLayout:
    return MemoryLayout((ArenaLayout(("a",), ("b",), capacity_bytes),))


def test_two_jobs_count_from_opposite_ends() -> None:
    device = HostDevice()
    device.arrange(layout(2560), NEEDS)
    assert device.reserved_bytes == 1536 + 512 + 2560
    base, top = device.memory_of("a"), device.memory_of("b")
    arena = base.at(1024, 2048).untyped_storage().data_ptr()
    assert base.at(1024, 8).data_ptr() == arena
    assert base.at(1024 + 512, 8).data_ptr() == arena + 512
    assert top.at(512, 8).data_ptr() == arena + 2560 - 512
    assert top.at(512 + 512, 512).data_ptr() == arena + 2560 - 1024
    assert base.at(0, 8).untyped_storage().data_ptr() != arena


def test_a_smaller_arena_keeps_what_lies_at_its_base() -> None:
    device = HostDevice()
    device.arrange(layout(3072), NEEDS)
    base, top = device.memory_of("a"), device.memory_of("b")
    base.at(1024, 2048).fill_(7)
    before = base.at(1024, 8).data_ptr()
    device.arrange(layout(2048), NEEDS)
    assert device.memory_of("a") is base
    assert base.at(1024, 8).data_ptr() == before
    assert bool((base.at(1024, 2048) == 7).all())
    assert top.at(512, 1024).data_ptr() == before + 2048 - 1024
    assert device.reserved_bytes == 1536 + 512 + 2048


def test_what_belonged_to_a_job_that_left_is_given_back() -> None:
    device = HostDevice(poisons=True)
    device.arrange(layout(2560), NEEDS)
    assert bool(device.memory_of("b").at(0, 512).view(torch.float32).isnan().all())
    device.arrange(MemoryLayout((ArenaLayout(("a",), (), 2048),)), NEEDS)
    assert device.reserved_bytes == 1536 + 2048
    device.arrange(MemoryLayout(()), NEEDS)
    assert device.reserved_bytes == 0


def test_pages_above_the_capacity_are_given_back() -> None:
    needs = {name: MemoryNeed(512, 512, 1 << 16) for name in "ab"}
    device = HostDevice()
    device.arrange(MemoryLayout((ArenaLayout(("a",), ("b",), 1 << 17),)), needs)
    base = device.memory_of("a").at(512, 1 << 16)
    base.fill_(7)
    device.arrange(MemoryLayout((ArenaLayout(("a",), ("b",), 5000),)), needs)  # the page of byte 5000 stays
    assert bool((base[:8192] == 7).all())
    assert not base[8192:].any()


def test_a_segment_starts_when_only_the_processor_keeps_it_waiting() -> None:
    moments = iter(range(100))
    device = HostDevice(clock=lambda: float(next(moments)))
    refs = [SegmentRef("a", 0, 0), SegmentRef("b", 0, 0), SegmentRef("b", 0, 1)]
    device.enqueue(refs[0], (), lambda: None)  # at 0
    device.enqueue(refs[1], (), lambda: None)  # at 1
    device.enqueue(refs[2], (refs[0],), lambda: None)  # at 2

    def ends() -> Iterator[tuple[SegmentRef, float, float]]:
        while (ended := device.next_ended()) is not None:
            yield ended.ref, ended.started_at, ended.ended_at

    # The second waited for the processor alone, the third for its own job's last segment, too.
    assert list(ends()) == [(refs[0], 0.0, 3.0), (refs[1], 1.0, 4.0), (refs[2], 4.0, 5.0)]
