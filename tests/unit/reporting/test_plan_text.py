"""A plan as text."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from sample_plans import GIB, MIB, ring_sample, turns_sample

from trainmux.errors import PlanError
from trainmux.ir import SubArray
from trainmux.reporting import plan_text


def blocks(text: str) -> dict[str, list[str]]:
    """The lines of each block, by the words its first line begins with."""
    found = {}
    for block in text.split("\n\n"):
        title, *lines = block.splitlines()
        found[title.partition(":")[0]] = [title, *lines]
    return found


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
    summary = "\n".join(blocks(plan_text(plan, profiles=sample.profiles))["plan by mutwo"])
    assert "7 members in 2 sub-arrays (4 + 3), as a ring" in summary
    assert f"{plan.step_seconds * 1e3:.2f} ms, {plan.step_seconds / 7 * 1e3:.2f} ms a member" in summary
    assert f"{plan.peak_bytes / GIB:.2f} GiB of the budget's {plan.budget_bytes / GIB:.2f} GiB" in summary
    undecided = f"{plan.budget_bytes * 1.25 / GIB:.2f} GiB with nothing swapped or recomputed"
    assert f"{undecided}, 25.0% over the budget" in summary
    assert f"{plan.stall_seconds * 1e3:.2f} ms" in summary
    sizes = [sample.profiles[swap.sub_array].tensors[swap.tensor].size_bytes for swap in plan.swaps]
    assert f"{len(sizes)} tensors, {sum(sizes) / GIB:.2f} GiB each way" in summary
    assert f"{plan.swap_overlap * 100:.1f}% of the copy time" in summary
    assert f"{plan.recompute_share * 100:.1f}% of the compute time" in summary


def test_every_partition_tried_is_listed_and_the_chosen_one_comes_first() -> None:
    plan = ring_sample().plan
    title, header, *rows = blocks(plan_text(plan, profiles=ring_sample().profiles))["partitions tried"]
    assert title == "partitions tried: 7 (* is the one chosen); 1,234 more partitions were left out"
    assert " ".join(header.split()) == "policy widths multiplexing step peak stall recompute outcome"
    assert len(rows) == len(plan.attempts)
    assert rows[0].startswith("  *  mutwo")
    assert rows[0].endswith("chosen")
    assert [row.lstrip()[0] == "*" for row in rows].count(True) == 1
    for attempt in plan.attempts:
        row = next(row for row in rows if row.endswith(attempt.lost_because or "chosen"))
        assert attempt.multiplexing.value in row
        if attempt.step_seconds != float("inf"):
            assert f"{attempt.step_seconds * 1e3:.2f} ms" in row
    times = [float(found[1]) for row in rows[1:-1] if (found := re.search(r" ([\d.]+) ms", row))]
    assert times == sorted(times)
    assert "does not fit" in rows[-1]
    assert any(" 7 x width 1 " in row for row in rows)


def test_the_largest_decisions_come_with_their_reasons() -> None:
    sample = ring_sample(num_layers=24)
    title, _, *lines = blocks(plan_text(sample.plan, profiles=sample.profiles))["largest swaps"]
    assert title == f"largest swaps: 10 of {len(sample.plan.swaps)}"
    sizes = sorted(
        (sample.profiles[swap.sub_array].tensors[swap.tensor].size_bytes for swap in sample.plan.swaps),
        reverse=True,
    )
    shown = [line.split(" MiB")[0].strip() for line in lines[::2]]
    assert shown == [f"{size / MIB:.0f}" for size in sizes[:10]]
    assert all(line.strip().startswith("case 2b: idle for") for line in lines[1::2])
    assert re.search(r"0:blocks\.\d+\.\w+, back before \d:", lines[0])


def test_recomputes_say_how_many_nodes_run_again_and_reasons_take_a_line() -> None:
    sample = ring_sample()
    _, _, *lines = blocks(plan_text(sample.plan, profiles=sample.profiles))["recomputes"]
    assert "by 1 node (2.20 ms) before 0:blocks." in lines[0]
    assert "cheaper than the 1.9 ms stall" in lines[1]
    swaps = tuple(replace(swap, reason="") for swap in sample.plan.swaps[:2])
    plan = replace(sample.plan, schedule=replace(sample.plan.schedule, swaps=swaps))
    assert len(blocks(plan_text(plan, profiles=sample.profiles))["swaps"]) == 4


def test_what_the_budget_costs() -> None:
    sample = ring_sample()
    text = blocks(plan_text(sample.plan, profiles=sample.profiles, budget_curve=sample.budget_curve))
    title, header, *rows = text["what the budget costs"]
    assert "1.41 times the fastest step" in title
    assert header.split() == ["budget", "step", "more"]
    assert len(rows) == len(sample.budget_curve)
    assert rows[0].endswith("nothing fits")
    bars = [row.count("#") for row in rows[1:]]
    assert bars == sorted(bars, reverse=True)
    assert bars[0] == 40
    assert [row.startswith("  *") for row in rows].index(True) == 4
    assert "what the budget costs" not in plan_text(sample.plan, profiles=sample.profiles)


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ([(GIB, float("inf"))], "no budget on the curve fits"),
        ([(2 * GIB, 0.5), (GIB, 0.5)], "every budget that fits takes 500.00 ms"),
    ],
)
def test_a_curve_on_which_nothing_fits_or_nothing_changes(curve: list[tuple[int, float]], said: str) -> None:
    sample = turns_sample()
    text = plan_text(sample.plan, profiles=sample.profiles, budget_curve=curve)
    assert f"what the budget costs: {said}" in text


def test_many_members_are_cut_short_and_names_stay_on_one_line() -> None:
    plan = turns_sample().plan
    names = ("evil\nplan by nobody", *(f"m{number}" for number in range(11)))
    text = plan_text(replace(plan, partition=(SubArray(names, 0),)), profiles=turns_sample().profiles)
    assert "  0  width 12: evil\\nplan by nobody, m0, m1, m2, m3, m4, m5, m6 and 4 more" in text
    assert "\nplan by nobody" not in text


def test_profiles_are_found_by_their_fingerprints() -> None:
    sample = ring_sample()
    text = plan_text(sample.plan, profiles=sample.profiles)
    assert plan_text(sample.plan, profiles=sample.profiles[::-1]) == text
    assert plan_text(sample.plan, profiles=sample.profiles * 2) == text


def test_what_does_not_belong_to_the_plan_is_refused() -> None:
    sample, other = ring_sample(), turns_sample()
    plan, swap = sample.plan, sample.plan.swaps[0]
    profiles = sample.profiles
    wrong = [(plan, given) for given in (other.profiles, profiles[:1], profiles + other.profiles, ())]
    wrong.append((replace(plan, partition=(SubArray(("a",), 5),)), profiles))
    bad = (replace(swap, tensor=10_000), replace(swap, sub_array=9), replace(swap, offload_after=(0, -1)))
    wrong += [(replace(plan, schedule=replace(plan.schedule, swaps=(one,))), profiles) for one in bad]
    for broken, given in wrong:
        with pytest.raises(PlanError):
            plan_text(broken, profiles=given)
