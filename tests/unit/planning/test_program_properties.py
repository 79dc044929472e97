"""Random steps under random schedules: programs compute what plain steps compute, in the bytes they say."""

from __future__ import annotations

import dataclasses
import random
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from steps import RING, careless_case, prove, random_case, random_order, random_step
from tests.slab_check import Placed, check_placement, max_live_bytes, peak_live_bytes
from tests.symbolic_machine import fault

from trainmux.errors import PlanError
from trainmux.ir import (
    ALIGNMENT,
    Compute,
    Instruction,
    Lane,
    Multiplexing,
    Offload,
    Part,
    Prefetch,
    Profile,
    Program,
    Recompute,
    Schedule,
    Wait,
    lane_of,
    verify,
)
from trainmux.planning import fewer_waits, lane_times, rewrite, timeline

SEEDS = st.integers(0, 10**6)
FEW_SEEDS = st.integers(0, 24)  # where a case is looked at once more, from another side


@cache
def case(seed: int) -> tuple[tuple[Profile, ...], Schedule, Program]:
    profiles, schedule = random_case(seed)
    return profiles, schedule, rewrite(profiles, schedule)


@settings(max_examples=15, deadline=None)
@given(SEEDS)
@example(398376)  # copies that are held back would have one wait more
def test_every_node_reads_what_it_reads_without_a_plan(seed: int) -> None:
    profiles, schedule, _ = case(seed)
    prove(profiles, schedule)


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_careless_schedules_are_refused_or_right(seed: int) -> None:
    profiles, schedule = careless_case(seed)
    try:
        rewrite(profiles, schedule)
    except PlanError:
        return
    prove(profiles, schedule)


@settings(max_examples=25, deadline=None)
@given(FEW_SEEDS)
def test_programs_hold_to_their_schedule(seed: int) -> None:
    _, schedule, program = case(seed)
    body = program.body.instructions
    fetched = {(i.sub_array, i.tensor) for i in body if isinstance(i, Prefetch)}
    copied = {(i.sub_array, i.tensor) for i in body if isinstance(i, Offload)}
    assert fetched == {(swap.sub_array, swap.tensor) for swap in schedule.swaps} >= copied
    kept = {(i.sub_array, tensor) for i in body if isinstance(i, Recompute) for tensor in i.keeps}
    assert kept >= {(record.sub_array, record.tensor) for record in schedule.recomputes}
    assert tuple((i.sub_array, i.node) for i in body if isinstance(i, Compute)) == schedule.order


@settings(max_examples=25, deadline=None)
@given(FEW_SEEDS)
def test_bytes_lie_side_by_side_in_a_slab_that_is_no_larger(seed: int) -> None:
    """The verifier proves it, too, and that they stay where they are from part to part."""
    profiles, _, program = case(seed)
    parts = (program.prologue, program.body, program.epilogue)
    for part in parts:
        placed = [Placed(t.begin, t.end + (t.begin == t.end), t.offset, t.size_bytes) for t in part.tenancies]
        check_placement(placed, program.slab_bytes, ALIGNMENT)
        in_use = [sum(t.size_bytes for t in part.tenancies if t.begin == -1)]
        for point in timeline(part, profiles).memory:
            in_use.append(sum(size for _, size in point.bytes_by_class) + point.workspace_bytes)
        assert peak_live_bytes(part) == max_live_bytes(placed) == max(in_use)
    assert program.slab_bytes == max(t.offset + t.size_bytes for part in parts for t in part.tenancies)


@settings(max_examples=25, deadline=None)
@given(FEW_SEEDS)
def test_where_nothing_is_decided_nothing_waits(seed: int) -> None:
    profiles, schedule, _ = case(seed)
    bare = rewrite(profiles, dataclasses.replace(schedule, swaps=(), recomputes=()))
    total = sum(node.seconds for profile in profiles for node in profile.nodes)
    alone = timeline(bare.body, profiles)
    assert (alone.seconds, alone.stall_seconds, alone.copy_seconds) == (pytest.approx(total), 0.0, 0.0)
    parts = (bare.prologue, bare.body, bare.epilogue)
    assert not any(isinstance(i, Wait) for part in parts for i in part.instructions)


@settings(max_examples=20, deadline=None)
@given(FEW_SEEDS)
def test_fewer_waits_keep_the_work_and_the_time(seed: int) -> None:
    """Waits that cost time are left out where they are not needed; nothing moves, and it is still proved."""
    profiles, _, program = case(seed)
    least = min(node.seconds for profile in profiles for node in profile.nodes)
    costly = [dataclasses.replace(profile, sync_seconds=least / 2) for profile in profiles]
    body = fewer_waits(program.body, costly)
    fewer = dataclasses.replace(program, body=body)
    verify(fewer, costly, budget_bytes=program.slab_bytes, host_bytes=program.host_bytes)
    assert fault(fewer, costly) == ""

    def work_of(part: Part, lane: Lane) -> list[Instruction]:
        return [i for i in part.instructions if not isinstance(i, Wait) and lane_of(i) is lane]

    assert all(work_of(body, lane) == work_of(program.body, lane) for lane in Lane)
    assert [t.offset for t in body.tenancies] == [t.offset for t in program.body.tenancies]
    assert len(body.instructions) <= len(program.body.instructions)
    for slow_copies, tolerance in ((1.0, 1e-12), (1.25, 1e-2)):
        before, after = (lane_times(part, costly, slow_copies).seconds for part in (program.body, body))
        assert after <= before * (1 + tolerance)


def test_no_wait_can_be_left_out() -> None:
    """Which also shows that the oracle can fail."""
    noticed = dict.fromkeys(Lane, 0)
    for seed in range(25):
        profiles, _, program = case(seed)
        body = program.body.instructions
        for position, instruction in enumerate(body):
            if not isinstance(instruction, Wait) or noticed[instruction.lane] >= 2:
                continue
            own = [i for i in range(position) if lane_of(body[i]) is instruction.lane]
            if own:
                idle = (*body[:position], Wait(instruction.lane, own[-1]), *body[position + 1 :])
                mutant = dataclasses.replace(program, body=Part(idle, program.body.tenancies))
                noticed[instruction.lane] += bool(fault(mutant, profiles))
    assert all(count >= 2 for count in noticed.values())


def test_the_random_cases_are_varied_enough() -> None:
    """Rings and turns, many swaps, chains of recomputations: what the properties above are worth."""
    found = [case(seed) for seed in range(25)]
    schedules = [schedule for _, schedule, _ in found]
    assert {s.multiplexing for s in schedules} == set(Multiplexing)
    assert {len(profiles) for profiles, _, _ in found} == {1, 2, 3, 4}
    assert sum(len(s.swaps) for s in schedules) > 60
    assert sum(len(r.nodes) > 1 for s in schedules for r in s.recomputes) > 6
    static = [
        swap
        for profiles, schedule, _ in found
        for swap in schedule.swaps
        if profiles[swap.sub_array].tensors[swap.tensor].byte_class.is_static
    ]
    assert len(static) > 15


def test_a_large_ring_is_rewritten_with_little_waste() -> None:
    rng = random.Random(5)
    profiles = [random_step(rng, 150) for _ in range(2)]
    program = rewrite(profiles, Schedule(RING, random_order(rng, profiles, RING), (), ()))
    verify(program, profiles, budget_bytes=program.slab_bytes)
    placed = [
        Placed(t.begin, t.end + (t.begin == t.end), t.offset, t.size_bytes) for t in program.body.tenancies
    ]
    assert program.slab_bytes <= 1.03 * max_live_bytes(placed, ALIGNMENT)
