"""The parts of the policy one by one: the multiplexer, the two copy lanes, and what Algorithm C corrects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from figure6 import Builder, first, limit, rank_of, second, tensor_of

from trainmux.ir import ByteClass, Multiplexing, Phase, Profile
from trainmux.planning._policy import Infeasible, Task, live_bytes, plain_order
from trainmux.planning.policies._mutwo_body import BODY_END, Body, Stage
from trainmux.planning.policies._mutwo_copies import CopyBack, LaneIn, LaneOut
from trainmux.planning.policies._mutwo_pair import Pair
from trainmux.planning.policies._mutwo_swap import try_swap
from trainmux.planning.policies.mutwo import MuTwo

F, B = Phase.FORWARD, Phase.BACKWARD
PLENTY = 10**6


def stage() -> Stage:
    """Six fixed nodes; six movable ones of 2 seconds each."""
    numbers = np.arange(12, dtype=np.int64)
    return Stage(0, numbers[:6], numbers[6:], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0])


def row(made: Stage) -> str:
    """Fixed nodes as digits, movable ones as letters."""
    fixed, movable = made.places()
    at = dict(zip(fixed, "012345", strict=True)) | dict(zip(movable, "abcdef", strict=True))
    return "".join(at[position] for position in range(12))


def test_forward_nodes_stand_in_front_of_the_deadline() -> None:
    made = stage()
    assert row(made) == "012345abcdef"
    made.add_forward_nodes(4, 2)
    assert row(made) == "0123ab45cdef"
    assert (made.num_before(3), made.num_before(4), made.num_at(4), made.num_at(5)) == (0, 2, 2, 0)
    made.add_forward_nodes(4, 1)
    assert row(made) == "0123abc45def"


def test_a_cut_that_loses_a_node_takes_the_next_ones() -> None:
    made = stage()
    made.add_forward_nodes(4, 2)
    made.want(4, 4.0)
    made.add_forward_nodes(2, 1)
    assert row(made) == "01a23bc45def"
    made.want(2, 2.0)
    made.add_forward_nodes(0, 3)
    assert row(made) == "abc01d23ef45"
    # There is no other node for the last cut to take.
    made.want(0, 6.0)
    made.add_forward_nodes(0, 1)
    assert row(made) == "abcd01e23f45"


def test_a_cut_that_has_more_than_it_wants_gives_without_taking() -> None:
    made = stage()
    made.add_forward_nodes(4, 3)
    made.want(4, 3.0)
    made.add_forward_nodes(2, 1)
    assert row(made) == "01a23bc45def"


def straight(times: list[float], num_forward: int) -> Body:
    """The body of one sub-array in turns, with nodes of these times and nothing else."""
    builder = Builder()
    for index, time in enumerate(times):
        builder.node(f"n{index}", F if index < num_forward else B, [], [], time)
    return Body(Task((builder.profile("straight"),), Multiplexing.TURNS, PLENTY, PLENTY))


def copy_back(tensor: int, seconds: float, release: int, deadline: int) -> CopyBack:
    return CopyBack((0, tensor), 1 << tensor, seconds, release, deadline, overlaps_recomputes=True)


def test_copies_back_start_as_late_as_the_whole_queue_allows() -> None:
    body = straight([1.0] * 10, 3)
    lane = LaneIn(0, 1e-9)
    copies = [copy_back(0, 2.0, 1, 5), copy_back(1, 1.5, 1, 6), copy_back(2, 1.0, 1, 9)]
    for index, copy in enumerate(copies):
        assert lane.index_by_deadline(body, copy.deadline) == index
        lane.insert(index, copy, body)
    lane.lay_out(body, body.start_times())
    # The second must have ended at 6 and starts at 4.5; the first therefore at 2.5, in node 2's turn.
    assert lane.starts.tolist() == [2.5, 4.5, 8.0]
    assert lane.prompts.tolist() == [2, 4, 8]
    assert lane.is_hidden.tolist() == [True, True, True]
    absent = [0, 1 + 2 + 4, 2 + 4, 2 + 4, 4, 4, 4, 4, 0, 0]
    assert body.needed().tolist() == [-bytes_ for bytes_ in absent]
    # A stall at node 5 is time like any other: the second copy may start later, and so may the first.
    lane.stall(0, 1.0, body)
    lane.lay_out(body, body.start_times())
    assert lane.starts.tolist() == [3.5, 5.5, 9.0]
    assert lane.prompts.tolist() == [3, 5, 8]
    lane.remove(1, body)
    lane.lay_out(body, body.start_times())
    assert lane.starts.tolist() == [4.0, 9.0]


def test_recomputations_before_the_deadline_hide_a_copy_unless_they_read_it() -> None:
    body = straight([1.0] * 6, 2)
    lane = LaneIn(0, 1e-9)
    lane.insert(0, copy_back(0, 3.0, 1, 4), body)
    body.set_recompute(4, 2.0, 0)
    lane.lay_out(body, body.start_times())
    assert lane.prompts.tolist() == [3]
    lane.read_at_deadline(0)
    lane.lay_out(body, body.start_times())
    # It would have to start at 1, but is released at 1 itself.
    assert lane.starts.tolist() == [1.0]
    assert (lane.prompts.tolist(), lane.is_hidden.tolist()) == ([2], [False])


def test_releases() -> None:
    body = straight([1.0] * 10, 4)
    lane, times = LaneOut(1e-9), body.start_times()
    nothing = np.zeros(0, dtype=np.int64)
    # Used last by node 1, copied out from 2 to 4.5: node 5 is the first that begins after that.
    assert lane.release_at(body, times, nothing, 1, 8, 2.5) == (5, 0.0)
    # Node 3 needs the bytes: it waits for the rest of the copy. What node 1 itself needs is another matter.
    assert lane.release_at(body, times, np.asarray([0, 1, 3, 4]), 1, 8, 2.5) == (3, 1.5)
    # It would be due before it is on the host.
    assert lane.release_at(body, times, nothing, 1, 4, 2.5) is None
    # The lane runs one copy after the other.
    lane.add((0, 0), 1, 2.5)
    assert lane.end_of(body, times, 2, 1.0) == 5.5
    assert lane.end_of(body, times, 0, 1.0) == 2.0
    lane.add((0, 1), 0, 1.0)
    order, ends = lane.ends(body, times)
    assert (order.tolist(), ends.tolist()) == ([1, 0], [2.0, 4.5])
    lane.remove([(0, 1)])
    assert lane.keys == [(0, 0)]


def test_releases_beyond_the_end_of_the_body_happen_there() -> None:
    builder = Builder()
    for index in range(6):
        builder.node(f"n{index}", F if index < 3 else B, [], [], 1.0)
    body = Body(Task((builder.profile("ring"),), Multiplexing.RING, PLENTY, PLENTY))
    assert body.order.tolist() == [3, 4, 5, 0, 1, 2]
    lane, times = LaneOut(1e-9), body.start_times()
    nothing = np.zeros(0, dtype=np.int64)
    assert lane.release_at(body, times, nothing, 0, 5, 1.5) == (BODY_END, 0.0)
    assert lane.release_at(body, times, nothing, 0, 5, 1.0) == (2, 0.0)
    assert lane.release_at(body, times, nothing, 0, 5, 2.5) == (BODY_END, 0.5)


def alone(
    swap_in: float, peak_workspace: int = 0, swap_out: float = 0.0, recompute_seconds: float = 1.0
) -> Profile:
    """One sub-array with feature maps p and q: q is needed by the fourth backward node, p by the second."""
    builder = Builder()
    for name in "pq":
        builder.tensor(name, ByteClass.FEATURE_MAP, 10, swap_in, swap_out)
    builder.tensor("r", ByteClass.FEATURE_MAP, 10, 100.0, 100.0)
    builder.node("p", F, [], ["p"], repeatable=False)
    builder.node("q", F, [], ["q"], repeatable=False)
    builder.node("r", F, [], ["r"], recompute_seconds)
    builder.node("idle", F, [], [], workspace=50)
    builder.node("b0", B, [])
    builder.node("b1", B, ["p", "r"], workspace=peak_workspace)
    builder.node("b2", B, [])
    builder.node("b3", B, ["q"])
    return builder.profile("alone")


def pair_of(profile: Profile, limit_bytes: int) -> Pair:
    return Pair(Task((profile,), Multiplexing.TURNS, limit_bytes, PLENTY))


def test_a_copy_that_is_due_while_another_one_runs_waits_for_it() -> None:
    """Case 1b. q's copy runs from 4.5 to 7; p is due at 5 with the node over the limit."""
    pair = pair_of(alone(2.5, peak_workspace=5), limit_bytes=PLENTY)
    trial = try_swap(pair, (0, 1))
    assert trial is not None
    assert (trial.case, trial.overhead) == ("2b", 0)
    pair.lineages[0].swap(1)
    assert pair.body.nodes[pair.lanes_in[0].prompts[0]] == (0, 4)
    pair.limit = 34
    trial = try_swap(pair, (0, 0))
    assert trial is not None
    assert trial.case == "1b"
    # 2 s are left of q's copy at 5, then come p's own 2.5.
    assert trial.overhead == pytest.approx(4.5)
    assert [pair.body.nodes[prompt] for prompt in pair.lanes_in[0].prompts] == [(0, 4), (0, 5)]


def test_recomputation_hides_a_copy_and_overheads_are_never_negative() -> None:
    pair = pair_of(alone(2.5, peak_workspace=100, recompute_seconds=4.0), limit_bytes=100)
    key = (0, 2)
    graphs = pair.lineages[0].would_run(2)
    assert graphs == {2: {2}}
    pair.recompute(key, graphs)
    pair.lineages[0].recompute(2)
    trial = try_swap(pair, (0, 0))
    assert trial is not None
    assert (trial.case, trial.overhead) == ("1a", 0)


def test_recomputation_shortens_the_stall_of_a_copy_under_way() -> None:
    """A.5: p, due in the peak interval, stalls for 2.5 s; then r is to be made again just before its use."""
    pair = pair_of(alone(2.5, peak_workspace=100, recompute_seconds=1.0), limit_bytes=100)
    trial = try_swap(pair, (0, 0))
    assert trial is not None
    assert (trial.case, trial.overhead) == ("1a", 2.5)
    pair.lineages[0].swap(0)
    graphs = pair.lineages[0].would_run(2)
    assert graphs is not None
    pair.recompute((0, 2), graphs)
    assert pair.lanes_in[0].copies[0].stall_seconds == 1.5
    assert pair.body.nodes[pair.lanes_in[0].prompts[0]] == (0, 5)


def test_what_the_release_waits_for_is_overhead_too() -> None:
    """p's copy to the host runs from 1 to 3.5, and the node that is over the limit would begin at 3."""
    pair = pair_of(alone(0.5, swap_out=2.5), limit_bytes=75)
    assert pair.over(pair.body.needed()).tolist() == [3]
    trial = try_swap(pair, (0, 0))
    assert trial is not None
    assert trial.overhead == pytest.approx(0.5)
    assert "release waits 0.5 s" in trial.reason


def test_a_trial_can_be_taken_back_whole() -> None:
    profiles = (first(), second())
    pair = Pair(Task(profiles, Multiplexing.RING, limit(profiles), PLENTY))
    before = (pair.body.order.tolist(), pair.body.needed().tolist(), pair.body.start_times().tolist())
    state = pair.state()
    assert try_swap(pair, (0, tensor_of(profiles[0], "Z1"))) is not None
    assert pair.body.order.tolist() != before[0]
    pair.go_back(state)
    assert (pair.body.order.tolist(), pair.body.needed().tolist(), pair.body.start_times().tolist()) == before
    assert pair.lanes_in[0].copies == []


def test_only_what_lowers_memory_over_the_limit_is_decided_on() -> None:
    """With the whole peak in the first sub-array's last forward node the second one is left alone."""
    profiles = (first(), second())
    order = plain_order(profiles, Multiplexing.RING)
    peak = max(live_bytes(Task(profiles, Multiplexing.RING, 0, 0), order))
    made = MuTwo().schedule(Task(profiles, Multiplexing.RING, peak - 5, PLENTY))
    assert len(made.swaps) + len(made.recomputes) == 1
    assert {record.sub_array for record in (*made.swaps, *made.recomputes)} == {0}


def test_decisions_that_others_made_needless_are_taken_back() -> None:
    """Without the workspace of ∇Z5 nothing needs Z4 to leave any more once R has."""
    profiles = (first(), second())
    nodes = list(profiles[0].nodes)
    rank = rank_of(profiles[0], "∇Z5")
    nodes[rank] = replace(nodes[rank], workspace_bytes=6)
    smaller = replace(profiles[0], nodes=tuple(nodes))
    task = Task((smaller, profiles[1]), Multiplexing.RING, limit(profiles), PLENTY)
    made = MuTwo().schedule(task)
    assert {smaller.tensors[swap.tensor].name for swap in made.swaps} == {"Z1", "Z2", "Z3"}
    assert [smaller.tensors[record.tensor].name for record in made.recomputes] == ["R"]
    assert max(live_bytes(task, made.order, made.swaps, made.recomputes)) <= task.limit_bytes


def test_swaps_stay_within_the_host() -> None:
    profiles = (first(), second())
    with pytest.raises(Infeasible) as caught:
        MuTwo().schedule(Task(profiles, Multiplexing.RING, limit(profiles), host_bytes=25))
    assert caught.value.excess_bytes > 0
