"""Rules of the verifier one by one, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ir_programs import (
    BACKWARD,
    FORWARD,
    STEP,
    Case,
    edited,
    in_turns,
    named,
    pair_with_swap,
    pair_with_swapped_state,
    placed,
    statics,
    tape,
    tensor,
    turns,
    two_layers,
)
from mutants import places

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    Compute,
    Free,
    Instruction,
    Lane,
    Offload,
    Part,
    Phase,
    Prefetch,
    Profile,
    Program,
    Recompute,
    Tenancy,
    Violation,
    Wait,
    find_violations,
    verify,
)
from trainmux.ir import ViolationKind as Kind

OF = two_layers()


def found_in(program: Program, profiles: Sequence[Profile]) -> tuple[Violation, ...]:
    return find_violations(program, profiles, budget_bytes=program.slab_bytes)


def kinds_in(program: Program, profiles: Sequence[Profile]) -> set[Kind]:
    return {each.kind for each in found_in(program, profiles)}


def with_body(case: Case, **changes: object) -> Program:
    return replace(case.program, body=replace(case.program.body, **changes))  # type: ignore[arg-type]


def with_node(rank: int, **changes: object) -> Profile:
    nodes = list(OF.nodes)
    nodes[rank] = replace(nodes[rank], **changes)  # type: ignore[arg-type]
    return replace(OF, nodes=tuple(nodes))


READS_STATS = {"of": with_node(0, reads=(*OF.nodes[0].reads, named(OF, "stats")))}
UNREPEATABLE = {"of": with_node(0, is_repeatable=False)}
M1 = {"without": ["m1"]}
OLD_COPY = {
    "compute 0 bw_h": "...; offload 0 m1",
    "compute 0 up_w1": "compute 0 up_w1 after offload:m1",
    "free 0 loss": "...; free 0 m1 after offload:m1; prefetch 0 m1 after compute",
}
FETCHED = {"compute 0 up_w1": "prefetch 0 m1 after compute; compute 0 up_w1 after prefetch:m1"}


@pytest.mark.parametrize(
    ("edits", "kinds", "options"),
    [
        ({}, set(), {}),
        # w1 changes at the very end: a node that reads it may run again before, not after.
        ({"free 0 mask": "...; recompute 0 fw_h"}, set(), {}),
        ({"compute 0 up_w1": "...; recompute 0 fw_h"}, {Kind.WRONG_VERSION}, {}),
        # A buffer that the step changes, too.
        ({"compute 0 fw_h": "...; recompute 0 fw_h"}, set(), READS_STATS),
        ({"compute 0 fw_stats": "...; recompute 0 fw_h"}, {Kind.WRONG_VERSION}, READS_STATS),
        ({"free 0 mask": "...; recompute 0 fw_h"}, {Kind.NOT_REPEATABLE}, UNREPEATABLE),
        ({"compute 0 fw_h": "recompute 0 fw_h; ..."}, {Kind.ORDER}, {}),
        # A node that changes something runs once.
        ({"compute 0 fw_stats": "...; recompute 0 fw_stats"}, {Kind.NOT_REPEATABLE, Kind.WRONG_VERSION}, {}),
        ({"compute 0 up_w1": "...; compute 0 up_w1"}, {Kind.ORDER, Kind.WRONG_VERSION}, {}),
        # A copy made before the update is old after it; what it reads may not change meanwhile.
        (OLD_COPY, {Kind.FREE, Kind.BOUNDARY}, {}),
        ({"compute 0 bw_h": "...; offload 0 m1"}, {Kind.MISSING_WAIT}, {}),
        # What lies on the host between steps ends there, changed.
        (FETCHED | {"free 0 g_w1": "...; offload 0 m1 after compute; free 0 m1 after offload:m1"}, set(), M1),
        (FETCHED | {"free 0 g_w1": "...; free 0 m1"}, {Kind.FREE, Kind.BOUNDARY}, M1),
        # A result lives until its step ends.
        ({"free 0 loss": "", "compute 0 up_w1": "free 0 loss; ..."}, {Kind.FREE}, {}),
    ],
)
def test_one_step(edits: dict[str, str], kinds: set[Kind], options: dict[str, Any]) -> None:
    case = in_turns(edited(STEP, edits), **options)
    assert kinds_in(case.program, case.profiles) == kinds


def test_the_error_says_where_what_and_what_to_do() -> None:
    case = in_turns(edited(STEP, {"compute 0 up_w1": "...; recompute 0 fw_h"}))
    with pytest.raises(PlanError, match="plan again") as caught:
        verify(case.program, case.profiles, budget_bytes=case.program.slab_bytes)
    assert "'fw_h'" in str(caught.value)
    assert "'w1'" in str(caught.value)
    with pytest.raises(PlanError, match=r"and \d+ more"):
        verify(with_body(turns(), tenancies=()), turns().profiles, budget_bytes=10**6)


@pytest.mark.parametrize(("over", "kind"), [("fixed_bytes", Kind.BUDGET), ("host_bytes", Kind.HOST_MEMORY)])
def test_fixed_bytes_count_and_host_copies_are_within_what_the_host_has(over: str, kind: Kind) -> None:
    case = pair_with_swapped_state()
    assert case.program.host_bytes == 2 * 64
    limits = {"budget_bytes": case.program.slab_bytes + 99, "fixed_bytes": 99, "host_bytes": 128}
    verify(case.program, case.profiles, **limits)
    limits[over] += 1 if over == "fixed_bytes" else -1
    assert [each.kind for each in find_violations(case.program, case.profiles, **limits)] == [kind]


def test_a_tensor_restored_in_the_next_step_is_not_that_steps() -> None:
    # h is copied out in one step and read in the next, which makes its own: too old by one step.
    out = {"compute 0 fw_a": "...; offload 0 h after compute", "free 0 t": "...; free 0 h after offload:h"}
    forward, not_again = edited(FORWARD, out), edited(FORWARD, {"free 0 t": "...; free 0 h"})
    back = {"compute 0 bw_a": "prefetch 0 h after compute; compute 0 bw_a after prefetch:h"}
    backward = edited(BACKWARD, back)
    for passed, kinds in ((forward, set()), (not_again, {Kind.BOUNDARY})):
        parts = [tape([OF], text) for text in (forward, backward + passed, backward)]
        assert kinds_in(placed([OF], parts, statics([OF])), [OF]) == kinds


def test_a_recompute_keeps_only_what_it_creates_and_once() -> None:
    case = in_turns(edited(STEP, {"free 0 mask": "...; recompute 0 fw_a"}))
    body = case.program.body.instructions
    ((_, _, at, _),) = places(case.program, Recompute)
    for keeps in [(named(OF, "h"),), (named(OF, "a"),) * 2]:
        changed = with_body(case, instructions=(*body[:at], Recompute(0, 2, keeps), *body[at + 1 :]))
        assert Kind.MALFORMED in kinds_in(changed, case.profiles)


def test_stages_are_not_mixed() -> None:
    # A ring in which the second sub-array's backward pass begins while the first one's is not over yet.
    case = pair_with_swap()
    body = [(at, each) for name, _, at, each in places(case.program, Compute) if name == "body"]
    last = max(at for at, each in body if (each.sub_array, each.node) == (0, 8))
    first = min(at for at, each in body if (each.sub_array, each.node) == (1, 4))
    late = list(case.program.body.instructions)
    late[last], late[first] = late[first], late[last]
    found = found_in(with_body(case, instructions=tuple(late)), case.profiles)
    assert any(each.kind is Kind.ORDER and "stage" in each.text for each in found)
    # Turns, a line of one sub-array and a line of the other.
    lines = zip(STEP.split("\n"), STEP.replace(" 0 ", " 1 ").split("\n"), strict=True)
    mixed = tape([OF, OF], "\n".join(line for pair in lines for line in pair))
    assert kinds_in(placed([OF, OF], [[], mixed, []], statics([OF, OF])), [OF, OF]) == {Kind.ORDER}


def test_a_ring_needs_its_prologue_and_has_no_forward_pass_in_its_epilogue() -> None:
    case = pair_with_swap()
    epilogue = case.program.epilogue
    again = replace(epilogue, instructions=(*epilogue.instructions, Compute(0, 0)))
    for program, part in (
        (replace(case.program, prologue=Part((), ())), "prologue"),
        (replace(case.program, epilogue=again), "epilogue"),
    ):
        found = found_in(program, case.profiles)
        assert any(each.kind is Kind.ORDER and each.part == part for each in found)


def test_a_result_may_keep_its_bytes_for_good() -> None:
    body = tape([OF], edited(STEP, {"free 0 loss": ""}))
    resident = [*statics([OF]), (0, named(OF, "loss"))]
    program = placed([OF], [[], body, []], resident)
    assert found_in(program, [OF]) == ()
    with_feature = replace(program, resident=(*resident, (0, named(OF, "h"))))
    assert Kind.MALFORMED in kinds_in(with_feature, [OF])


def test_tenancies_are_those_that_the_instructions_imply() -> None:
    """Including those of a node's workspace and of outputs that a recompute discards."""
    case = in_turns(edited(STEP, {"free 0 mask": "...; recompute 0 fw_a"}))
    tenancies = case.program.body.tenancies
    h = named(OF, "h")
    extra = [Tenancy(0, h, begin, 5, 0, 100) for begin in (3, -1, 0)]  # the last begins twice
    spoiled = [(*tenancies, each) for each in (*extra, Tenancy(3, 99, 2, 4, 0, 8))]
    for at, each in enumerate(tenancies):
        others = (*tenancies[:at], *tenancies[at + 1 :])
        spoiled += [others, (*others, replace(each, end=each.end + 1))]
    for changed in spoiled:
        program = with_body(case, tenancies=changed)
        assert kinds_in(program, case.profiles) & {Kind.PLACEMENT, Kind.BOUNDARY}, changed


def test_tensors_without_bytes_and_parts_without_instructions_need_no_place() -> None:
    empty = replace(OF, tensors=tuple(replace(each, size_bytes=0) for each in OF.tensors))
    case = in_turns(STEP, empty)
    assert found_in(case.program, case.profiles) == ()
    kept = tuple(each for each in case.program.body.tenancies if each.size_bytes)
    assert len(kept) < len(case.program.body.tenancies)
    assert found_in(with_body(case, tenancies=kept), case.profiles) == ()
    case = turns()
    short = replace(case.program, prologue=Part((), ()), epilogue=Part((), ()))
    assert found_in(short, case.profiles) == ()
    assert find_violations(placed([], [[], [], []], []), [], budget_bytes=0) == ()


NOWHERE = (
    *(Compute(0, 99), Compute(5, 0), Compute(-1, 0), Recompute(0, -1, ()), Offload(0, 99)),
    *(Prefetch(7, 0), Free(0, -1), Wait(Lane.OUT, 10**6), Wait(Lane.OUT, -1)),
)


@pytest.mark.parametrize("extra", [*NOWHERE, (0, 99), (4, 0), (0, 0)], ids=str)
def test_numbers_that_name_nothing_are_refused(extra: Instruction | tuple[int, int]) -> None:
    """In an instruction, or of a resident tensor, which is named once."""
    case = in_turns(STEP)
    body = case.program.body
    if isinstance(extra, tuple):
        program = replace(case.program, resident=(*case.program.resident, extra))
    else:
        end = len(body.instructions)
        tenancies = [replace(each, end=each.end + (each.end == end)) for each in body.tenancies]
        program = with_body(case, instructions=(*body.instructions, extra), tenancies=tuple(tenancies))
    assert [each.kind for each in found_in(program, case.profiles)] == [Kind.MALFORMED]


@pytest.mark.parametrize(
    "broken",
    [
        lambda: with_node(0, reads=(99,)),
        lambda: with_node(0, reads=(named(OF, "g_h"),)),
        lambda: with_node(2, creates=(named(OF, "h"),)),
        lambda: with_node(8, creates=(named(OF, "w2"),)),
        lambda: with_node(8, changes=(1, 1)),
        lambda: with_node(8, phase=Phase.FORWARD),
        lambda: with_node(0, workspace_bytes=-1),
        lambda: replace(OF, tensors=(*OF.tensors, tensor("bad", ByteClass.CONSTANT, -1))),
    ],
)
def test_a_profile_that_contradicts_itself_proves_nothing(broken: Callable[[], Profile]) -> None:
    case = in_turns(STEP)
    assert kinds_in(case.program, [broken()]) == {Kind.PROFILE}
