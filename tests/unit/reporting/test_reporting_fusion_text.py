"""The text that says how a fleet was fused."""

from __future__ import annotations

import dataclasses

from trainmux.ir import FusionRecord, GroupSummary, MemoryUse
from trainmux.reporting import format_fusion


def test_groups_from_first_to_last_line() -> None:
    places = ("model.py:7 in forward", "model.py:9 in forward")
    records = (
        FusionRecord("aten.mm.default", "bmm", 3, ("model.py:3 in forward",)),
        FusionRecord("aten.histc.default", "loop", 2, places, "torch.vmap has no rule for it"),
        FusionRecord("aten.sort.default", "loop", 1, (), "no rule"),
    )
    many = tuple(f"m{index}" for index in range(9))
    groups = [
        GroupSummary(("a", "b"), 4, "Adam", 12, records, notes=("a note",), memory=MemoryUse(None, 2**20)),
        GroupSummary(many, 9, "SGD", 3, records[:1], "aten.foo has no rule", memory=MemoryUse(2**10, 2**20)),
    ]
    assert format_fusion([]) == ""
    assert format_fusion(groups).splitlines() == [
        "group 0: 2 of 4 slots taken (a, b)",
        "  optimizer Adam; 12 nodes in the fused step",
        "  a note",
        "  1.0 MiB reserved on the device, not predicted: its allocations are being recorded by someone else",
        "  aten.mm.default     bmm   x3",
        "  aten.histc.default  loop  x2",
        "  aten.sort.default   loop  x1",
        "  fell back:",
        "    aten.histc.default x2 at model.py:7 in forward; model.py:9 in forward: loop, because "
        "torch.vmap has no rule for it",
        "    aten.sort.default x1: loop, because no rule",
        "",
        "group 1: 9 of 9 slots taken (m0, m1, m2, m3, m4, m5 and 3 more)",
        "  optimizer SGD; 3 nodes in the fused step",
        "  1.0 MiB reserved on the device, 1 KiB predicted",
        "  trains at width 1: aten.foo has no rule",
        "  aten.mm.default  bmm  x3",
        "  nothing fell back",
    ]


def test_a_step_that_is_not_captured_is_named_first() -> None:
    groups = [
        GroupSummary((name,), 1, "SGD", 3, (), not_captured=why) for name, why in (("a", ""), ("b", "no"))
    ]
    first, empty, *rest = format_fusion(groups).splitlines()
    assert first == "group 1 is not captured and runs node by node: no"
    assert not empty
    assert rest == format_fusion([groups[0], dataclasses.replace(groups[1], not_captured="")]).splitlines()
