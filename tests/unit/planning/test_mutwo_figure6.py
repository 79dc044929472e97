"""The paper's worked example: 2a, then 2b with Z1 covered again, then 3, then 1a."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from figure6 import SWAP_IN, first, limit, rank_of, second, tensor_of
from schedule_walk import walk

from trainmux.ir import Multiplexing, Profile, Schedule
from trainmux.planning._facts import NodeHints, facts_of, hints_of
from trainmux.planning._policy import Task, live_bytes, plain_order
from trainmux.planning.policies._mutwo_pair import Pair
from trainmux.planning.policies._mutwo_swap import SwapTrial, try_swap
from trainmux.planning.policies.mutwo import MuTwo

PLAIN = ["∇Z5", "∇W5", "∇Z4", "∇W4", "∇Z3", "∇W3", "∇Z2", "∇W2", "∇Z1", "∇W1", "update"]
FORWARD = ["Z1²", "Z2²", "Z3²", "Z4²", "Z5²"]


def task(**changes: float) -> Task:
    profiles = (first(**changes), second())
    return Task(profiles, Multiplexing.RING, limit(profiles), host_bytes=1000)


def names(profiles: Sequence[Profile], order: Sequence[tuple[int, int]]) -> list[str]:
    """The first stage, forward nodes of the second sub-array with a ²."""
    labels = [profiles[sub].nodes[rank].name + "²" * sub for sub, rank in order]
    return labels[: len(PLAIN) + len(FORWARD)]


class Snapshots:
    """Algorithm C on one feature map after the other, as in Figures 6d to 6g."""

    def __init__(self) -> None:
        self.task = task()
        self.pair = Pair(self.task)

    def schedule(self, name: str) -> SwapTrial:
        tensor = tensor_of(self.task.profiles[0], name)
        trial = try_swap(self.pair, (0, tensor))
        assert trial is not None
        self.pair.lane_out.add(trial.key, trial.offload, trial.seconds_out)
        self.pair.lineages[0].swap(tensor)
        return trial

    def order(self) -> list[str]:
        body = self.pair.body
        return names(self.task.profiles, [body.nodes[number] for number in body.order])

    def prompt(self, name: str) -> str:
        lane = self.pair.lanes_in[0]
        key = (0, tensor_of(self.task.profiles[0], name))
        index = [copy.key for copy in lane.copies].index(key)
        sub_array, rank = self.pair.body.nodes[lane.prompts[index]]
        return self.task.profiles[sub_array].nodes[rank].name + "²" * sub_array


def test_the_timeline_begins_with_the_backward_pass_followed_by_the_forward_pass() -> None:
    given = task()
    assert names(given.profiles, plain_order(given.profiles, given.multiplexing)) == PLAIN + FORWARD
    assert Snapshots().order() == PLAIN + FORWARD


def test_snapshots() -> None:
    figure = Snapshots()

    z1 = figure.schedule("Z1")
    assert (z1.case, z1.overhead) == ("2a", 0)
    assert figure.order()[5:10] == ["∇W3", "∇Z2", "Z1²", "Z2²", "∇W2"]
    assert figure.prompt("Z1") == "Z1²"

    z2 = figure.schedule("Z2")
    assert (z2.case, z2.overhead) == ("2b", 0)
    assert figure.order()[4:11] == ["∇Z3", "Z1²", "∇W3", "∇Z2", "Z2²", "Z3²", "∇W2"]
    assert figure.prompt("Z2") == "∇Z3"
    assert figure.prompt("Z1") == "Z2²"

    before = figure.order()
    z3 = figure.schedule("Z3")
    assert (z3.case, z3.overhead) == ("3", 1)
    assert figure.order() == before
    assert figure.prompt("Z3") == "∇Z4"

    z4 = figure.schedule("Z4")
    assert (z4.case, z4.overhead) == ("1a", SWAP_IN["Z4"])
    assert figure.order() == before
    assert [figure.prompt(name) for name in ("Z4", "Z3", "Z2", "Z1")] == ["∇W5", "∇Z4", "∇Z3", "Z2²"]


def decided(given: Task, made: Schedule) -> dict[str, str]:
    tensors = given.profiles[0].tensors
    cases = {tensors[swap.tensor].name: swap.reason.split(":")[0] for swap in made.swaps}
    return cases | {tensors[record.tensor].name: "recomputed" for record in made.recomputes}


def test_the_whole_policy() -> None:
    given = task()
    profile = given.profiles[0]
    made = MuTwo().schedule(given)
    assert decided(given, made) == {
        "Z1": "case 2a",
        "Z2": "case 2b",
        "Z3": "case 3",
        "Z4": "case 1a",
        "R": "recomputed",
    }
    stage = [
        "∇Z5",
        "∇W5",
        "∇Z4",
        "∇W4",
        "∇Z3",
        "Z1²",
        "∇W3",
        "∇Z2",
        "Z2²",
        "Z3²",
        "∇W2",
        "∇Z1",
        "∇W1",
        "update",
    ]
    assert names(given.profiles, made.order) == [*stage, "Z4²", "Z5²"]
    swaps = {profile.tensors[swap.tensor].name: swap for swap in made.swaps}
    prompts = {name: swap.prefetch_prompt for name, swap in swaps.items()}
    assert prompts == {
        "Z1": (1, rank_of(given.profiles[1], "Z2")),
        "Z2": (0, rank_of(profile, "∇Z3")),
        "Z3": (0, rank_of(profile, "∇Z4")),
        "Z4": (0, rank_of(profile, "∇W5")),
    }
    # Copies to the host take no time here, so each is released with the node after its last forward use.
    for layer in range(1, 5):
        swap = swaps[f"Z{layer}"]
        assert swap.offload_after == (0, rank_of(profile, f"Z{layer + 1}"))
        assert swap.release_before == (0, rank_of(profile, f"Z{layer + 2}" if layer < 4 else "R"))
    (again,) = made.recomputes
    assert (again.nodes, again.before) == ((rank_of(profile, "R"),), (0, rank_of(profile, "∇Z4")))
    assert "hidden by 1 forward node of the other sub-array and 1 node of its own" in swaps["Z2"].reason
    assert "stall of 1 s" in swaps["Z3"].reason
    assert "a swap would stall for 6 s" in again.reason

    assert walk(given.profiles, made) == live_bytes(given, made.order, made.swaps, made.recomputes)
    assert max(walk(given.profiles, made)) <= given.limit_bytes


def test_hints_hang_on_nodes() -> None:
    given = task()
    profile = given.profiles[0]
    hints = hints_of([facts_of(each) for each in given.profiles], MuTwo().schedule(given))

    def tensor(name: str) -> tuple[int, int]:
        return 0, tensor_of(profile, name)

    def node(name: str) -> tuple[int, int]:
        return 0, rank_of(profile, name)

    assert hints == {
        node("Z2"): NodeHints(to_offload=(tensor("Z1"),)),
        node("Z3"): NodeHints(to_offload=(tensor("Z2"),)),
        node("Z4"): NodeHints(to_offload=(tensor("Z3"),)),
        node("Z5"): NodeHints(to_offload=(tensor("Z4"),)),
        node("R"): NodeHints(to_delete=(tensor("R"),)),
        node("∇W5"): NodeHints(to_prefetch=(tensor("Z4"),)),
        node("∇Z4"): NodeHints(to_prefetch=(tensor("Z3"),), to_recompute=(tensor("R"),)),
        node("∇Z3"): NodeHints(to_prefetch=(tensor("Z2"),)),
        (1, rank_of(given.profiles[1], "Z2")): NodeHints(to_prefetch=(tensor("Z1"),)),
    }


@pytest.mark.parametrize(("recompute_seconds", "stall"), [(0.5, 1), (2.0, 3), (4.0, 6)])
def test_a_recomputation_is_taken_as_soon_as_it_costs_less_than_the_next_swap(
    recompute_seconds: float, stall: int
) -> None:
    """R instead of Z3, which would stall for 1, or of Z4, for 3, or of R itself, for 6."""
    given = task(recompute_seconds=recompute_seconds)
    made = MuTwo().schedule(given)
    (again,) = made.recomputes
    assert given.profiles[0].tensors[again.tensor].name == "R"
    assert f"a swap would stall for {stall} s" in again.reason
    assert max(walk(given.profiles, made)) <= given.limit_bytes


def test_nothing_happens_within_the_plain_peak() -> None:
    profiles = (first(), second())
    order = plain_order(profiles, Multiplexing.RING)
    peak = max(live_bytes(Task(profiles, Multiplexing.RING, 0, 0), order))
    made = MuTwo().schedule(Task(profiles, Multiplexing.RING, peak, 0))
    assert made == Schedule(Multiplexing.RING, order, (), ())
    made = MuTwo().schedule(Task(profiles, Multiplexing.RING, peak - 1, 1000))
    assert made.swaps
