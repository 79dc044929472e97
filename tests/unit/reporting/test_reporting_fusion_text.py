"""The text that says how a fleet was fused."""

from __future__ import annotations

from trainmux.ir import FusionRecord, GroupSummary
from trainmux.reporting import format_fusion


def group(
    members: tuple[str, ...] = ("a", "b"),
    records: tuple[FusionRecord, ...] = (),
    width: int = 4,
    unfused_because: str = "",
) -> GroupSummary:
    return GroupSummary(members, width, "Adam", 12, records, unfused_because)


def test_no_groups_no_text() -> None:
    assert format_fusion([]) == ""


def test_a_group_from_first_to_last_line() -> None:
    records = (
        FusionRecord("aten.mm.default", "bmm", 3, ("model.py:3 in forward",)),
        FusionRecord("aten.sort.default", "vmap", 1),
        FusionRecord(
            "aten.histc.default",
            "loop",
            2,
            ("model.py:7 in forward", "model.py:9 in forward"),
            "torch.vmap has no rule for it",
        ),
    )
    assert format_fusion([group(records=records)]).splitlines() == [
        "group 0: 2 of 4 slots taken (a, b)",
        "  optimizer Adam; 12 nodes in the fused step",
        "  aten.mm.default     bmm   x3",
        "  aten.sort.default   vmap  x1",
        "  aten.histc.default  loop  x2",
        "  fell back:",
        "    aten.histc.default x2 at model.py:7 in forward; model.py:9 in forward: loop, because "
        "torch.vmap has no rule for it",
    ]


def test_a_fallback_without_a_known_place() -> None:
    text = format_fusion([group(records=(FusionRecord("op", "loop", 1, (), "no rule"),))])
    assert text.endswith("  fell back:\n    op x1: loop, because no rule")


def test_it_says_when_nothing_fell_back() -> None:
    assert format_fusion([group(records=(FusionRecord("op", "bmm", 1),))]).endswith("  nothing fell back")
    assert format_fusion([group()]).endswith("  nothing fell back")


def test_it_says_why_a_group_is_not_fused() -> None:
    text = format_fusion([group(("a",), width=1, unfused_because="aten.foo has no rule")])
    assert "  trains at width 1: aten.foo has no rule\n" in text
    assert "trains at width 1" not in format_fusion([group()])


def test_many_members_are_counted_not_listed() -> None:
    names = tuple(f"m{index}" for index in range(9))
    first = format_fusion([group(names, width=9)]).splitlines()[0]
    assert first == "group 0: 9 of 9 slots taken (m0, m1, m2, m3, m4, m5 and 3 more)"
    six = format_fusion([group(names[:6], width=6)]).splitlines()[0]
    assert six == "group 0: 6 of 6 slots taken (m0, m1, m2, m3, m4, m5)"


def test_groups_are_numbered_and_set_apart() -> None:
    blocks = format_fusion([group(("a",)), group(("b",))]).split("\n\n")
    assert [block.splitlines()[0] for block in blocks] == [
        "group 0: 1 of 4 slots taken (a)",
        "group 1: 1 of 4 slots taken (b)",
    ]
