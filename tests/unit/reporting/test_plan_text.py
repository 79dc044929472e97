"""A plan as text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from sample_plans import GIB, MIB, Sample, ring_sample, turns_sample

from trainmux.errors import PlanError
from trainmux.ir import SubArray
from trainmux.reporting import plan_text


def blocks(sample: Sample) -> dict[str, list[str]]:
    """The lines of each block, by the words its first line begins with."""
    text = plan_text(sample.plan, profiles=sample.profiles, budget_curve=sample.budget_curve)
    return {block.partition(":")[0]: block.splitlines() for block in text.split("\n\n")}


def test_the_smallest_plan_from_first_to_last_line() -> None:
    sample = turns_sample()
    assert plan_text(sample.plan, profiles=sample.profiles).splitlines() == [
        "plan by none: 1 member in 1 sub-array",
        "  step        1.50 ms, 1.50 ms a member",
        "  peak        6.0 MiB of the budget's 8.00 GiB (0.1%); 0 B of it for library workspaces and graphs",
        "  undecided   6.0 MiB with nothing swapped or recomputed, within the budget",
        "  host        0 B for what is swapped out",
        "  stall       0 ms (0.0% of the step)",
        "  swaps       none",
        "  recomputes  none",
        "",
        "sub-arrays",
        "  0  width 1: only",
    ]


def test_the_summary_says_what_the_plan_costs() -> None:
    sample = ring_sample()
    plan = sample.plan
    sizes = [sample.profiles[swap.sub_array].tensors[swap.tensor].size_bytes for swap in plan.swaps]
    summary = "\n".join(blocks(sample)["plan by mutwo"])
    for words in (
        "7 members in 2 sub-arrays (4 + 3), as a ring",
        f"{plan.step_seconds * 1e3:.2f} ms, {plan.step_seconds / 7 * 1e3:.2f} ms a member",
        f"{plan.peak_bytes / GIB:.2f} GiB of the budget's {plan.budget_bytes / GIB:.2f} GiB",
        f"{plan.budget_bytes * 1.25 / GIB:.2f} GiB with nothing swapped or recomputed, 25.0% over the budget",
        f"{plan.stall_seconds * 1e3:.2f} ms",
        f"{len(sizes)} tensors, {sum(sizes) / GIB:.2f} GiB each way",
        f"{plan.swap_overlap * 100:.1f}% of the copy time",
        f"{plan.recompute_share * 100:.1f}% of the compute time",
    ):
        assert words in summary


def test_every_partition_tried_is_listed_and_the_chosen_one_comes_first() -> None:
    title, header, *rows = blocks(ring_sample())["partitions tried"]
    assert title == "partitions tried: 4 (* is the one chosen); 1,234 more partitions were left out"
    assert " ".join(header.split()) == "policy widths multiplexing step peak stall recompute outcome"
    step = f"{ring_sample().plan.step_seconds * 1e3:.2f} ms"
    assert re.fullmatch(rf"  \*  mutwo +4 \+ 3 +ring +{step} +5.00 GiB +10.00 ms +20.00 ms +chosen", rows[0])
    assert [row.split()[-2] for row in rows[1:3]] == ["18.0%", "44.0%"]
    assert " 7 x width 1 " in rows[2]
    assert "does not fit" in rows[3]


def test_the_largest_decisions_come_with_their_reasons() -> None:
    sample = ring_sample(num_layers=24)
    title, _, *lines = blocks(sample)["largest swaps"]
    assert title == f"largest swaps: 10 of {len(sample.plan.swaps)}"
    found = [sample.profiles[swap.sub_array].tensors[swap.tensor].size_bytes for swap in sample.plan.swaps]
    shown = [line.split(" MiB")[0].strip() for line in lines[::2]]
    assert shown == [f"{size / MIB:.0f}" for size in sorted(found, reverse=True)[:10]]
    assert all(line.strip().startswith("case 2b: idle for") for line in lines[1::2])
    assert re.search(r"out after 0:blocks\.\d+\.\w+, back before \d:", lines[0])
    _, _, *lines = blocks(ring_sample())["recomputes"]
    assert "by 1 node (2.20 ms) before 0:blocks." in lines[0]
    assert "cheaper than the 1.9 ms stall" in lines[1]


def test_the_curve_says_what_a_budget_costs() -> None:
    title, header, *rows = blocks(ring_sample())["what the budget costs"]
    assert "1.41 times the fastest step" in title
    assert header.split() == ["budget", "step", "more"]
    assert len(rows) == len(ring_sample().budget_curve)
    assert rows[0].endswith("nothing fits")
    bars = [row.count("#") for row in rows[1:]]
    assert bars == sorted(bars, reverse=True)
    assert bars[0] == 40
    assert [row.startswith("  *") for row in rows].index(True) == 3
    for curve, said in (
        (((GIB, float("inf")),), "no budget on the curve fits"),
        (((2 * GIB, 0.5), (GIB, 0.5)), "every budget that fits takes 500.00 ms"),
    ):
        (title, *_) = blocks(replace(turns_sample(), budget_curve=curve))["what the budget costs"]
        assert title == f"what the budget costs: {said}"


def test_many_members_are_cut_short_and_names_stay_on_one_line() -> None:
    plan = turns_sample().plan
    names = ("evil\nplan by nobody", *(f"m{number}" for number in range(11)))
    text = plan_text(replace(plan, partition=(SubArray(names, 0),)), profiles=turns_sample().profiles)
    assert "  0  width 12: evil\\nplan by nobody, m0, m1, m2, m3, m4, m5, m6 and 4 more" in text
    assert "\nplan by nobody" not in text


def test_profiles_are_found_by_their_fingerprints_and_others_are_refused() -> None:
    sample, other = ring_sample(), turns_sample()
    plan, swap, profiles = sample.plan, sample.plan.swaps[0], sample.profiles
    text = plan_text(plan, profiles=profiles)
    assert plan_text(plan, profiles=profiles[::-1]) == plan_text(plan, profiles=profiles * 2) == text
    wrong = [(plan, given) for given in (other.profiles, profiles[:1], profiles + other.profiles, ())]
    wrong.append((replace(plan, partition=(SubArray(("a",), 5),)), profiles))
    bad = (replace(swap, tensor=10_000), replace(swap, sub_array=9), replace(swap, offload_after=(0, -1)))
    wrong += [(replace(plan, schedule=replace(plan.schedule, swaps=(one,))), profiles) for one in bad]
    for broken, given in wrong:
        with pytest.raises(PlanError):
            plan_text(broken, profiles=given)
