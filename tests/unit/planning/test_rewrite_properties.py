"""Random training graphs under random schedules: programs compute what plain steps compute, within bytes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.slab_check import Placed, check_placement, max_live_bytes
from tests.symbolic_machine import fault, lane_of
from training_graphs import careless_case, random_case, random_order, random_step

from trainmux.errors import PlanError
from trainmux.ir import (
    ALIGNMENT,
    Compute,
    Free,
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
    verify,
)
from trainmux.planning._explain import explain_program
from trainmux.planning._fewer_waits import _Old, _Waits, fewer_waits
from trainmux.planning._lane_writer import IN, OUT
from trainmux.planning._memory import live_bytes, memory, peak_live_bytes
from trainmux.planning._rewrite import draft, place, rewrite
from trainmux.planning._timeline import lane_times, timeline

SEEDS = st.integers(0, 10**6)
FEW_SEEDS = st.integers(0, 99)  # where a case is looked at once more, from another side


@cache
def case(seed: int) -> tuple[tuple[Profile, ...], Schedule, Program]:
    profiles, schedule = random_case(seed)
    return tuple(profiles), schedule, rewrite(profiles, schedule)


def parts(program: Program) -> Iterator[tuple[str, Part]]:
    for name in ("prologue", "body", "epilogue"):
        yield name, getattr(program, name)


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_every_node_reads_what_it_reads_without_a_plan(seed: int) -> None:
    profiles, _, program = case(seed)
    assert fault(program, profiles) == ""
    verify(program, profiles, budget_bytes=program.slab_bytes, host_bytes=program.host_bytes)


@settings(max_examples=25, deadline=None)
@given(SEEDS)
@example(398376)  # copies that are held back would have one wait more
def test_fewer_waits_take_as_long_and_move_nothing(seed: int) -> None:
    profiles, schedule, program = case(seed)
    plain = place(profiles, draft(profiles, schedule))
    check_same_work(profiles, plain.body, program.body)
    least = min(node.seconds for profile in profiles for node in profile.nodes)
    meeting = [dataclasses.replace(profile, meeting_seconds=least / 2) for profile in profiles]
    body = fewer_waits(plain.body, meeting)
    check_same_work(meeting, plain.body, body)
    fewer = dataclasses.replace(plain, body=body)
    verify(fewer, meeting, budget_bytes=plain.slab_bytes, host_bytes=plain.host_bytes)
    assert fault(fewer, meeting) == ""


def check_same_work(profiles: Sequence[Profile], plain: Part, fewer: Part) -> None:
    """The same, in the same order and at the same places, with no more waits and not slower."""

    def work_of(part: Part, lane: Lane) -> list[Instruction]:
        return [i for i in part.instructions if not isinstance(i, Wait) and lane_of(i) is lane]

    for lane in Lane:
        assert work_of(fewer, lane) == work_of(plain, lane)
    assert [(t.sub_array, t.tensor, t.offset) for t in fewer.tenancies] == [
        (t.sub_array, t.tensor, t.offset) for t in plain.tenancies
    ]
    assert len(fewer.instructions) <= len(plain.instructions)
    for strain, tolerance in ((1.0, 1e-12), (1.25, 1e-2)):
        longer = lane_times(fewer, profiles, strain).seconds
        assert longer <= lane_times(plain, profiles, strain).seconds * (1 + tolerance)


@settings(max_examples=15, deadline=None)
@given(SEEDS)
def test_waits_found_anew_are_enough(seed: int) -> None:
    """However long copies are held back, and also where they are not: proved, and without a race."""
    profiles, schedule, program = case(seed)
    plain = place(profiles, draft(profiles, schedule))
    old = _Old(plain.body, profiles)
    for share in (None, 0.0, 0.5, 1.0):
        shares = None if share is None else {OUT: share, IN: share}
        body = _Waits(old, shares).part()
        held = dataclasses.replace(program, body=body)
        verify(held, profiles, budget_bytes=program.slab_bytes, host_bytes=program.host_bytes)
        assert fault(held, profiles) == ""


def test_a_wait_is_for_all_that_has_ended_by_then() -> None:
    """Of random cases with copies, some have fewer waits; or nothing would be tested."""
    saved = 0
    for seed in range(40):
        profiles, schedule, program = case(seed)
        plain = place(profiles, draft(profiles, schedule))
        saved += len(plain.body.instructions) - len(program.body.instructions)
    assert saved > 0


@settings(max_examples=80, deadline=None)
@given(SEEDS)
def test_careless_schedules_are_refused_or_right(seed: int) -> None:
    profiles, schedule = careless_case(seed)
    refusal = ""
    try:
        program = rewrite(profiles, schedule)
    except PlanError as refused:
        refusal = str(refused)
    if refusal:
        assert refusal.startswith(("swap of tensor", "recomputation of tensor", "tensor"))
        return
    verify(program, profiles, budget_bytes=program.slab_bytes, host_bytes=program.host_bytes)
    assert fault(program, profiles) == ""


@settings(max_examples=30, deadline=None)
@given(FEW_SEEDS)
def test_bytes_lie_side_by_side_and_stay_where_they_are(seed: int) -> None:
    _, _, program = case(seed)
    for _, part in parts(program):
        placed = [Placed(t.begin, t.end + (t.begin == t.end), t.offset, t.size_bytes) for t in part.tenancies]
        check_placement(placed, program.slab_bytes, ALIGNMENT)
        assert peak_live_bytes(part) == max_live_bytes(placed) <= program.slab_bytes
    ends = {name: len(part.instructions) for name, part in parts(program)}
    left = {
        name: {(t.sub_array, t.tensor): t for t in p.tenancies if t.end == ends[name]}
        for name, p in parts(program)
    }
    found = {
        name: {(t.sub_array, t.tensor): t for t in p.tenancies if t.begin == -1} for name, p in parts(program)
    }
    for before, after in (("prologue", "body"), ("body", "body"), ("body", "epilogue")):
        assert left[before].keys() == found[after].keys()
        assert all(left[before][key].offset == tenancy.offset for key, tenancy in found[after].items())
    assert found["prologue"].keys() == left["epilogue"].keys() == set(program.resident)
    assert program.slab_bytes == max(t.offset + t.size_bytes for _, p in parts(program) for t in p.tenancies)


@settings(max_examples=30, deadline=None)
@given(FEW_SEEDS)
def test_prologue_and_epilogue_need_no_more_than_the_body(seed: int) -> None:
    profiles, schedule, program = case(seed)
    peak = peak_live_bytes(place(profiles, draft(profiles, schedule)).body)  # copies may be held back since
    assert peak_live_bytes(program.prologue) <= peak
    assert peak_live_bytes(program.epilogue) <= peak


def bytes_by_walking(part: Part, profiles: tuple[Profile, ...]) -> list[int]:
    """Bytes in use after each instruction, from the instructions alone."""
    live = {(t.sub_array, t.tensor): t.size_bytes for t in part.tenancies if t.begin == -1}
    found = []
    for instruction in part.instructions:
        brief = 0
        if isinstance(instruction, Compute | Recompute):
            profile = profiles[instruction.sub_array]
            node = profile.nodes[instruction.node]
            kept = node.creates if isinstance(instruction, Compute) else instruction.keeps
            live |= {(instruction.sub_array, t): profile.tensors[t].size_bytes for t in kept}
            brief = node.workspace_bytes
            brief += sum(profile.tensors[t].size_bytes for t in node.creates if t not in kept)
        elif isinstance(instruction, Prefetch):
            tensor = profiles[instruction.sub_array].tensors[instruction.tensor]
            live[instruction.sub_array, instruction.tensor] = tensor.size_bytes
        elif isinstance(instruction, Free):
            del live[instruction.sub_array, instruction.tensor]
        found.append(sum(live.values()) + brief)
    return found


@settings(max_examples=30, deadline=None)
@given(FEW_SEEDS)
def test_memory_is_what_the_instructions_take(seed: int) -> None:
    profiles, _, program = case(seed)
    for _, part in parts(program):
        expected = bytes_by_walking(part, profiles)
        assert live_bytes(part) == expected
        points = memory(part, profiles)
        assert [sum(n for _, n in p.bytes_by_class) + p.workspace_bytes for p in points] == expected


def knowledge(instructions: tuple[Instruction, ...], without: int) -> list[int]:
    """For each instruction the set (as bits) of those that have ended before it ends, one wait left out."""
    of_lane = dict.fromkeys(Lane, 0)
    known = []
    for position, instruction in enumerate(instructions):
        lane = lane_of(instruction)
        of_lane[lane] |= 1 << position
        if isinstance(instruction, Wait) and position != without:
            of_lane[lane] |= known[instruction.on]
        known.append(of_lane[lane])
    return known


@settings(max_examples=15, deadline=None)
@given(FEW_SEEDS)
def test_no_wait_is_implied_by_the_others(seed: int) -> None:
    _, _, program = case(seed)
    for _, part in parts(program):
        for position, instruction in enumerate(part.instructions):
            if isinstance(instruction, Wait):
                known = knowledge(part.instructions, without=position)
                held = next(
                    later
                    for later in range(position, len(part.instructions))
                    if lane_of(part.instructions[later]) is instruction.lane
                    and not isinstance(part.instructions[later], Wait)
                )
                assert not known[held] >> instruction.on & 1


@settings(max_examples=30, deadline=None)
@given(FEW_SEEDS)
def test_what_is_swapped_and_recomputed_appears_in_the_program(seed: int) -> None:
    _, schedule, program = case(seed)
    swapped = {(swap.sub_array, swap.tensor) for swap in schedule.swaps}
    body = program.body.instructions
    fetched = {(i.sub_array, i.tensor) for i in body if isinstance(i, Prefetch)}
    copied = {(i.sub_array, i.tensor) for i in body if isinstance(i, Offload)}
    assert fetched == swapped >= copied
    kept = {(i.sub_array, tensor) for i in body if isinstance(i, Recompute) for tensor in i.keeps}
    assert kept >= {(record.sub_array, record.tensor) for record in schedule.recomputes}
    computed = [(i.sub_array, i.node) for i in body if isinstance(i, Compute)]
    assert tuple(computed) == schedule.order


@settings(max_examples=25, deadline=None)
@given(FEW_SEEDS)
def test_time_is_what_nodes_and_copies_take(seed: int) -> None:
    profiles, schedule, program = case(seed)
    for _, part in parts(program):
        found = timeline(part, profiles)
        by_lane = {lane: [s for s in found.spans if s.lane is lane] for lane in Lane}
        for spans in by_lane.values():
            assert all(a.end <= b.start for a, b in pairwise(spans))
            assert found.seconds >= sum(s.end - s.start for s in spans) - 1e-9
        assert found.compute_seconds == pytest.approx(sum(s.end - s.start for s in by_lane[Lane.COMPUTE]))
        assert found.seconds == pytest.approx(found.compute_seconds + found.stall_seconds)
    bare = rewrite(profiles, dataclasses.replace(schedule, swaps=(), recomputes=()))
    total = sum(node.seconds for profile in profiles for node in profile.nodes)
    alone = timeline(bare.body, profiles)
    assert (alone.seconds, alone.stall_seconds, alone.copy_seconds) == (pytest.approx(total), 0.0, 0.0)
    assert not any(isinstance(i, Wait) for _, part in parts(bare) for i in part.instructions)


@settings(max_examples=10, deadline=None)
@given(FEW_SEEDS)
def test_the_text_has_a_line_for_each_instruction(seed: int) -> None:
    profiles, _, program = case(seed)
    lines = explain_program(program, profiles).splitlines()
    num_instructions = sum(len(part.instructions) for _, part in parts(program))
    assert len(lines) == 2 + len(program.resident) + 3 + num_instructions


def test_the_random_cases_are_varied_enough() -> None:
    """What the properties above are worth: rings and turns, many swaps, chains of recomputed nodes."""
    found = [case(seed) for seed in range(40)]
    schedules = [schedule for _, schedule, _ in found]
    assert {s.multiplexing for s in schedules} == set(Multiplexing)
    assert {len(profiles) for profiles, _, _ in found} == {1, 2, 3, 4}
    assert sum(len(s.swaps) for s in schedules) > 150
    assert sum(len(r.nodes) > 1 for s in schedules for r in s.recomputes) > 15
    static = [
        swap
        for profiles, schedule, _ in found
        for swap in schedule.swaps
        if profiles[swap.sub_array].tensors[swap.tensor].byte_class.is_static
    ]
    assert len(static) > 40


def test_a_missing_wait_is_noticed() -> None:
    """The oracle can fail: no wait of a program can be left out."""
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


def test_a_large_ring_is_rewritten_with_little_waste() -> None:
    rng = random.Random(5)
    profiles = [random_step(rng, 150) for _ in range(2)]
    order = random_order(rng, profiles, Multiplexing.RING)
    program = rewrite(profiles, Schedule(Multiplexing.RING, order, (), ()))
    verify(program, profiles, budget_bytes=program.slab_bytes)
    placed = [
        Placed(t.begin, t.end + (t.begin == t.end), t.offset, t.size_bytes) for t in program.body.tenancies
    ]
    assert program.slab_bytes <= 1.03 * max_live_bytes(placed, ALIGNMENT)
