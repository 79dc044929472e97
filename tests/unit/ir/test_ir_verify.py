"""Rules of the verifier one by one, what it says, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from ir_handmade import Case, pair_with_swap, pair_with_swapped_state, recompute_from_swapped, turns
from ir_programs import named, placed, statics, tape, tensor, two_layers
from mutants import (
    missing_prefetches,
    overlapping_tensors,
    with_part,
    wrong_offsets_across_the_boundary,
    wrong_sizes,
)

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
    ViolationKind,
    Wait,
    find_violations,
    verify,
)

STEP = """
    compute 0 fw_h
    compute 0 fw_stats
    compute 0 fw_a
    compute 0 fw_loss
    free 0 t
    compute 0 bw_loss
    free 0 a
    compute 0 up_w2
    free 0 g_w2
    compute 0 bw_a
    free 0 g_a
    free 0 mask
    compute 0 bw_h
    free 0 h
    free 0 g_h
    compute 0 up_w1
    free 0 g_w1
    free 0 loss
"""


def found_in(program: Program, profiles: Sequence[Profile]) -> tuple[Violation, ...]:
    return find_violations(program, profiles, budget_bytes=program.slab_bytes)


def in_turns(text: str, of: Profile | None = None, without: Sequence[str] = ()) -> Case:
    """One sub-array whose step is ``text``, with the static tensors ``without`` on the host between steps."""
    profiles = (of or two_layers(),)
    resident = statics(profiles, [(0, named(profiles[0], name)) for name in without])
    return Case(placed(profiles, [[], tape(profiles, text), []], resident), profiles)


def kinds_of(case: Case) -> set[ViolationKind]:
    return {each.kind for each in found_in(case.program, case.profiles)}


def after(line: str, added: str, text: str = STEP) -> str:
    assert line in text
    return text.replace(line, f"{line}\n{added}")


def test_a_step_by_hand_is_right() -> None:
    assert kinds_of(in_turns(STEP)) == set()


def test_the_error_says_where_what_and_what_to_do() -> None:
    case = pair_with_swap()
    mutant = next(missing_prefetches(case.program, case.profiles))
    with pytest.raises(PlanError) as caught:
        verify(mutant.program, case.profiles, budget_bytes=mutant.program.slab_bytes)
    text = str(caught.value)
    assert text.startswith("expected a program that computes what the step without a plan computes")
    assert (
        "body[11]: not resident: Compute of node 'bw_a' (rank 6 of sub-array 0) needs tensor 'h' (5 of "
        "sub-array 0), which is on the host only: it was not prefetched" in text
    )
    assert text.endswith("plan again; if that is refused too, the planner is at fault")


def test_a_right_program_raises_nothing() -> None:
    case = turns()
    verify(case.program, case.profiles, budget_bytes=case.program.slab_bytes + 7, fixed_bytes=7, host_bytes=0)


def test_only_the_first_twenty_violations_are_listed() -> None:
    case = turns()
    nothing = replace(case.program.body, tenancies=())
    with pytest.raises(PlanError, match=r"breaks \d+ rules") as caught:
        verify(replace(case.program, body=nothing), case.profiles, budget_bytes=10**6)
    lines = str(caught.value).splitlines()
    assert sum(line.startswith("- body") for line in lines) == 20
    assert any(line.startswith("- and ") and line.endswith(" more") for line in lines)


def test_the_budget_counts_the_fixed_bytes() -> None:
    case = turns()
    budget = case.program.slab_bytes + 99
    assert find_violations(case.program, case.profiles, budget_bytes=budget, fixed_bytes=99) == ()
    (over,) = find_violations(case.program, case.profiles, budget_bytes=budget, fixed_bytes=100)
    assert over.kind is ViolationKind.BUDGET
    assert over.text.endswith("1 more")


def test_host_copies_are_within_what_the_host_has() -> None:
    case = pair_with_swapped_state()
    needed, slab = case.program.host_bytes, case.program.slab_bytes
    assert needed == 2 * 64
    assert find_violations(case.program, case.profiles, budget_bytes=slab, host_bytes=needed) == ()
    (over,) = find_violations(case.program, case.profiles, budget_bytes=slab, host_bytes=needed - 1)
    assert over.kind is ViolationKind.HOST_MEMORY


# Versions


def test_a_forward_node_may_not_run_again_after_the_update_of_its_parameter() -> None:
    # w1 changes at the very end, so fw_h may run again before; w2 changes early, so fw_loss may not.
    again = after("free 0 mask", "recompute 0 fw_h")
    assert kinds_of(in_turns(again)) == set()
    late = after("compute 0 up_w1", "recompute 0 fw_h")
    (found,) = found_in(in_turns(late).program, [two_layers()])
    assert found.kind is ViolationKind.WRONG_VERSION
    assert "'w1'" in found.text
    assert "was changed already: version 1, expected 0 (last written by" in found.text


def test_a_recompute_may_not_read_what_was_made_from_something_else() -> None:
    # Reading a buffer that the step changes: before the change fine, after it not.
    of = two_layers()
    stats = named(of, "stats")
    nodes = [replace(node, reads=(*node.reads, stats)) if node.name == "fw_h" else node for node in of.nodes]
    reads_stats = replace(of, nodes=tuple(nodes))
    assert kinds_of(in_turns(after("compute 0 fw_h", "recompute 0 fw_h"), reads_stats)) == set()
    assert kinds_of(in_turns(after("compute 0 fw_stats", "recompute 0 fw_h"), reads_stats)) == {
        ViolationKind.WRONG_VERSION
    }


def test_a_host_copy_is_old_once_the_tensor_was_changed() -> None:
    # The copy is made before the update, and brought back after it.
    text = after("compute 0 bw_h", "offload 0 m1")
    text = after("free 0 loss", "free 0 m1 after offload:m1\nprefetch 0 m1 after compute", text)
    text = text.replace("compute 0 up_w1", "compute 0 up_w1 after offload:m1")
    case = in_turns(text)
    assert {ViolationKind.FREE, ViolationKind.BOUNDARY} == kinds_of(case)


def test_what_lies_on_the_host_between_steps_ends_there_changed() -> None:
    text = STEP.replace("compute 0 up_w1", "prefetch 0 m1 after compute\ncompute 0 up_w1 after prefetch:m1")
    goes_back = after("free 0 g_w1", "offload 0 m1 after compute\nfree 0 m1 after offload:m1", text)
    assert kinds_of(in_turns(goes_back, without=["m1"])) == set()
    is_dropped = after("free 0 g_w1", "free 0 m1", text)
    assert kinds_of(in_turns(is_dropped, without=["m1"])) == {ViolationKind.FREE, ViolationKind.BOUNDARY}


def test_a_change_waits_for_a_copy_that_reads_the_old_version() -> None:
    text = after("compute 0 bw_h", "offload 0 m1")
    (found,) = found_in(in_turns(text).program, [two_layers()])
    assert found.kind is ViolationKind.MISSING_WAIT
    assert "Compute of node 'up_w1'" in found.text
    assert "Offload of tensor 'm1'" in found.text


def test_a_tensor_restored_in_the_next_step_is_not_that_steps() -> None:
    # h is copied out in one step and read in the next, which makes its own: too old by one step.
    forward = """
        compute 0 fw_h
        compute 0 fw_stats
        compute 0 fw_a
        offload 0 h after compute
        compute 0 fw_loss
        free 0 t
        free 0 h after offload:h
    """
    backward = STEP.partition("free 0 t")[2]
    profiles = [two_layers()]
    good = backward.replace("compute 0 bw_a", "prefetch 0 h after compute\ncompute 0 bw_a after prefetch:h")
    parts = [tape(profiles, text) for text in (forward, good + forward, good)]
    assert found_in(placed(profiles, parts, statics(profiles)), profiles) == ()
    not_again = forward.replace("offload 0 h after compute", "").replace(" after offload:h", "")
    parts[1] = tape(profiles, good + not_again)
    found = found_in(placed(profiles, parts, statics(profiles)), profiles)
    assert {each.kind for each in found} == {ViolationKind.BOUNDARY}
    assert "the copy there is an old one" in found[0].text


# Nodes that run again


def test_what_may_run_only_once_is_not_recomputed() -> None:
    of = two_layers()
    nodes = [replace(node, is_repeatable=node.name != "fw_h") for node in of.nodes]
    text = after("free 0 mask", "recompute 0 fw_h")
    assert kinds_of(in_turns(text, replace(of, nodes=tuple(nodes)))) == {ViolationKind.NOT_REPEATABLE}


def test_a_node_runs_again_only_after_it_ran() -> None:
    assert kinds_of(in_turns("recompute 0 fw_h" + STEP)) == {ViolationKind.ORDER}


def test_a_recompute_keeps_what_its_node_creates() -> None:
    case = in_turns(after("free 0 mask", "recompute 0 fw_h"))
    body = case.program.body
    position = next(at for at, each in enumerate(body.instructions) if isinstance(each, Recompute))
    for keeps in [(named(case.profiles[0], "a"),), (5, 5)]:
        instructions = (
            *body.instructions[:position],
            Recompute(0, 0, keeps),
            *body.instructions[position + 1 :],
        )
        program = replace(case.program, body=replace(body, instructions=instructions))
        assert ViolationKind.MALFORMED in {each.kind for each in found_in(program, case.profiles)}


def test_outputs_that_a_recompute_discards_need_bytes() -> None:
    case = in_turns(after("free 0 mask", "recompute 0 fw_a"))
    body = case.program.body
    position = next(at for at, each in enumerate(body.instructions) if isinstance(each, Recompute))
    discarded = [each for each in body.tenancies if each.begin == position]
    assert {each.tensor for each in discarded} == {named(case.profiles[0], name) for name in ("a", "mask")}
    left = tuple(each for each in body.tenancies if each not in discarded)
    found = found_in(replace(case.program, body=replace(body, tenancies=left)), case.profiles)
    assert [each.kind for each in found] == [ViolationKind.PLACEMENT] * 2


# Where things belong


def test_a_ring_keeps_to_its_stages() -> None:
    case = pair_with_swap()
    body = case.program.body
    # The second sub-array's backward pass begins while the first one's is not over yet.
    computes = [(at, each) for at, each in enumerate(body.instructions) if isinstance(each, Compute)]
    last = max(at for at, each in computes if each.sub_array == 0 and each.node == 8)
    first = min(at for at, each in computes if each.sub_array == 1 and each.node == 4)
    assert last < first
    late = list(body.instructions)
    late[last], late[first] = late[first], late[last]
    found = found_in(with_part(case.program, "body", replace(body, instructions=tuple(late))), case.profiles)
    assert any(each.kind is ViolationKind.ORDER and "belongs to stage 0" in each.text for each in found)


def test_turns_are_not_mixed() -> None:
    profiles = [two_layers()] * 2
    second = STEP.replace(" 0 ", " 1 ")
    mixed = [line for pair in zip(STEP.split("\n"), second.split("\n"), strict=True) for line in pair]
    body = tape(profiles, "\n".join(mixed))
    found = found_in(placed(profiles, [[], body, []], statics(profiles)), profiles)
    assert [each.kind for each in found] == [ViolationKind.ORDER]
    assert "belongs to stage 0, but stage 1 has begun (turns)" in found[0].text


def test_a_forward_pass_has_no_place_in_the_epilogue() -> None:
    case = pair_with_swap()
    epilogue = case.program.epilogue
    again = replace(epilogue, instructions=(*epilogue.instructions, Compute(0, 0)))
    found = found_in(replace(case.program, epilogue=again), case.profiles)
    assert "does not belong in the epilogue" in "".join(
        each.text for each in found if each.kind is ViolationKind.ORDER
    )


def test_a_result_lives_until_its_step_ends() -> None:
    lines = [line for line in STEP.splitlines() if "free 0 loss" not in line]
    early = "\n".join(lines).replace("compute 0 up_w1", "free 0 loss\ncompute 0 up_w1")
    assert kinds_of(in_turns(early)) == {ViolationKind.FREE}


def test_a_result_may_keep_its_bytes_for_good() -> None:
    profiles = (two_layers(),)
    loss = (0, named(profiles[0], "loss"))
    body = tape(profiles, STEP.replace("free 0 loss", ""))
    resident = [*statics(profiles), loss]
    program = placed(profiles, [[], body, []], resident)
    assert found_in(program, profiles) == ()
    feature = (0, named(profiles[0], "h"))
    with_feature = replace(program, resident=(*resident, feature))
    assert ViolationKind.MALFORMED in {each.kind for each in found_in(with_feature, profiles)}


# Bytes


def test_a_workspace_needs_bytes_of_its_own() -> None:
    case = in_turns(STEP)
    body = case.program.body
    index, workspace = next((at, each) for at, each in enumerate(body.tenancies) if each.tensor == -1)
    victim = next(each for each in body.tenancies if each.begin == -1)
    for changed, kind in [
        ((), ViolationKind.PLACEMENT),
        ((replace(workspace, offset=victim.offset),), ViolationKind.OVERLAP),
        ((replace(workspace, end=workspace.end + 1),), ViolationKind.PLACEMENT),
    ]:
        tenancies = (*body.tenancies[:index], *changed, *body.tenancies[index + 1 :])
        found = found_in(replace(case.program, body=replace(body, tenancies=tenancies)), case.profiles)
        assert kind in {each.kind for each in found}


def test_tenancies_that_nothing_implies_are_refused() -> None:
    case = in_turns(STEP)
    body = case.program.body
    number = named(case.profiles[0], "h")
    for extra in [
        Tenancy(0, number, 3, 5, 0, 100),
        Tenancy(0, number, -1, 5, 0, 100),
        next(each for each in body.tenancies if each.tensor == number),
        Tenancy(0, -1, 4, 4, 0, 8),
        Tenancy(3, 99, 2, 4, 0, 8),
    ]:
        changed = replace(body, tenancies=(*body.tenancies, extra))
        found = {each.kind for each in found_in(replace(case.program, body=changed), case.profiles)}
        assert found & {ViolationKind.PLACEMENT, ViolationKind.BOUNDARY}, extra


def test_tensors_without_bytes_need_no_place() -> None:
    of = two_layers()
    empty = replace(of, tensors=tuple(replace(each, size_bytes=0) for each in of.tensors))
    case = in_turns(STEP, empty)
    assert kinds_of(case) == set()
    body = case.program.body
    kept = tuple(each for each in body.tenancies if each.size_bytes)
    assert len(kept) < len(body.tenancies)
    assert found_in(replace(case.program, body=replace(body, tenancies=kept)), case.profiles) == ()


def test_a_prefetch_waits_for_whoever_had_any_of_its_bytes() -> None:
    # x comes back to bytes that several tensors had before; each of their last uses has to be over.
    case = recompute_from_swapped()
    body = case.program.body
    last = max(at for at, each in enumerate(body.instructions) if each == Prefetch(0, 0))
    waits = [
        at for at, each in enumerate(body.instructions) if isinstance(each, Wait) and each.lane is Lane.IN
    ]
    spoiled = list(body.instructions)
    for at in waits:
        spoiled[at] = Wait(Lane.IN, 0)
    found = found_in(replace(case.program, body=replace(body, instructions=tuple(spoiled))), case.profiles)
    texts = [each.text for each in found if each.position == last]
    assert texts
    assert all("that are overwritten" in text for text in texts)


def test_parts_without_instructions_need_no_tenancies() -> None:
    case = turns()
    short = replace(case.program, prologue=Part((), ()), epilogue=Part((), ()))
    assert found_in(short, case.profiles) == ()
    for mutator in (wrong_offsets_across_the_boundary, overlapping_tensors, wrong_sizes):
        mutants = list(mutator(short, case.profiles))
        assert mutants
        for mutant in mutants:
            # At the beginning of the first part nothing says where a tensor was before; at the end it does.
            found = {each.kind for each in found_in(mutant.program, case.profiles)}
            is_all_along = "begin=-1" in mutant.name and f"end={len(short.body.instructions)}" in mutant.name
            assert mutant.kinds & found or (is_all_along and mutator is wrong_offsets_across_the_boundary), (
                mutant.name
            )


def test_a_ring_needs_its_prologue() -> None:
    case = pair_with_swap()
    found = found_in(replace(case.program, prologue=Part((), ())), case.profiles)
    assert "never run" in "".join(each.text for each in found if each.part == "prologue")


# Numbers that name nothing


@pytest.mark.parametrize(
    "instruction",
    [
        Compute(0, 99),
        Compute(5, 0),
        Compute(-1, 0),
        Recompute(0, -1, ()),
        Offload(0, 99),
        Prefetch(7, 0),
        Free(0, -1),
        Wait(Lane.OUT, 10**6),
        Wait(Lane.OUT, -1),
    ],
    ids=str,
)
def test_unknown_numbers_are_refused(instruction: Instruction) -> None:
    case = in_turns(STEP)
    body = case.program.body
    changed = replace(
        body,
        instructions=(*body.instructions, instruction),
        tenancies=tuple(
            replace(each, end=each.end + 1) if each.end == len(body.instructions) else each
            for each in body.tenancies
        ),
    )
    found = found_in(replace(case.program, body=changed), case.profiles)
    assert [each.kind for each in found] == [ViolationKind.MALFORMED]


def test_unknown_residents_are_refused() -> None:
    case = in_turns(STEP)
    for extra in [(0, 99), (4, 0), (0, 0)]:
        program = replace(case.program, resident=(*case.program.resident, extra))
        assert [each.kind for each in found_in(program, case.profiles)] == [ViolationKind.MALFORMED]


def test_a_profile_that_contradicts_itself_proves_nothing() -> None:
    case = in_turns(STEP)
    of = case.profiles[0]

    def with_node(rank: int, **changes: object) -> Profile:
        nodes = list(of.nodes)
        nodes[rank] = replace(nodes[rank], **changes)  # type: ignore[arg-type]
        return replace(of, nodes=tuple(nodes))

    broken = [
        with_node(0, reads=(99,)),
        with_node(0, reads=(named(of, "g_h"),)),
        with_node(2, creates=(named(of, "h"),)),
        with_node(8, creates=(named(of, "w2"),)),
        with_node(8, changes=(1, 1)),
        with_node(8, phase=Phase.FORWARD),
        with_node(0, workspace_bytes=-1),
        replace(of, tensors=(*of.tensors, tensor("bad", ByteClass.CONSTANT, -1))),
    ]
    for bad in broken:
        found = find_violations(case.program, [bad], budget_bytes=case.program.slab_bytes)
        assert {each.kind for each in found} == {ViolationKind.PROFILE}


def test_an_empty_program_for_nobody_is_right() -> None:
    assert find_violations(placed([], [[], [], []], []), [], budget_bytes=0) == ()
