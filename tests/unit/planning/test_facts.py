"""Tables A and B on steps small enough to read them off by hand."""

from __future__ import annotations

import dataclasses

import pytest
from figure6 import Builder, first, second, tensor_of

from trainmux.errors import PlanError
from trainmux.ir import ByteClass, Multiplexing, Phase, Profile, Recomputation, Swap
from trainmux.planning._facts import Facts, facts_of, num_forward
from trainmux.planning._policy import Infeasible, Policy, Task, live_bytes, plain_order
from trainmux.planning.policies.mutwo import MuTwo

F, B, U = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


def step() -> Profile:
    """x → a → (t) → b → loss, then the gradients of b and a, and one update."""
    builder = Builder()
    builder.tensor("x", ByteClass.BATCH, 1)
    builder.tensor("w", ByteClass.PARAMETER, 2)
    builder.tensor("unused", ByteClass.CONSTANT, 3)
    builder.tensor("a", ByteClass.FEATURE_MAP, 10)
    builder.tensor("t", ByteClass.TEMPORARY, 20)
    builder.tensor("b", ByteClass.FEATURE_MAP, 30)
    builder.tensor("loss", ByteClass.RESULT, 4)
    builder.tensor("gb", ByteClass.GRADIENT_MAP, 30)
    builder.tensor("gw", ByteClass.GRADIENT, 2)
    builder.node("make a", F, ["x", "w"], ["a"], 1.0)  # 0
    builder.node("make t", F, ["a"], ["t"], 2.0, workspace=7)  # 1
    builder.node("make b", F, ["t", "w"], ["b"], 4.0)  # 2
    builder.node("loss", F, ["b"], ["loss"], 8.0)  # 3
    builder.node("gb", B, ["b"], ["gb"], 16.0)  # 4
    builder.node("gw", B, ["gb", "a"], ["gw"], 32.0)  # 5
    builder.node("gw again", B, ["a"], [], 64.0, changes=["gw"])  # 6
    builder.node("update", U, ["gw"], [], 128.0, changes=["w"])  # 7
    return builder.profile("step")


@pytest.fixture
def facts() -> Facts:
    return facts_of(step())


def test_nodes(facts: Facts) -> None:
    assert [node.rank for node in facts.nodes] == list(range(8))
    assert [node.gtype for node in facts.nodes] == [F, F, F, F, B, B, B, U]
    assert [node.frees for node in facts.nodes] == [(), (), (4,), (), (5,), (7,), (3,), (8,)]
    assert [node.created_bytes for node in facts.nodes] == [10, 20, 30, 4, 30, 2, 0, 0]
    assert facts.nodes[1].workspace_bytes == 7
    assert facts.num_forward == num_forward(facts.profile) == 4
    assert facts.start_seconds == (0, 1, 3, 7, 15, 31, 63, 127, 255)
    assert facts.feature_maps == (3, 5)


@pytest.mark.parametrize(
    ("name", "created", "accesses", "last_fw", "first_bw", "last_bw", "lifetime", "inactive"),
    [
        ("x", None, (0,), 0, None, None, (0, 7), 0.0),
        ("w", None, (0, 2, 7), 2, 7, 7, (0, 7), 8 + 16 + 32 + 64),
        ("unused", None, (), None, None, None, (0, 7), 0.0),
        ("a", 0, (0, 1, 5, 6), 1, 5, 6, (0, 6), 4 + 8 + 16),
        ("t", 1, (1, 2), 2, None, None, (1, 2), 0.0),
        ("b", 2, (2, 3, 4), 3, 4, 4, (2, 4), 0.0),
        ("loss", 3, (3,), 3, None, None, (3, 7), 0.0),
        ("gb", 4, (4, 5), None, 4, 5, (4, 5), 0.0),
        ("gw", 5, (5, 6, 7), None, 5, 7, (5, 7), 0.0),
    ],
)
def test_tensors(
    facts: Facts,
    name: str,
    created: int | None,
    accesses: tuple[int, ...],
    last_fw: int | None,
    first_bw: int | None,
    last_bw: int | None,
    lifetime: tuple[int, int],
    inactive: float,
) -> None:
    tensor = facts.tensors[tensor_of(facts.profile, name)]
    assert (tensor.created_at, tensor.accesses) == (created, accesses)
    assert (tensor.last_fw_access, tensor.first_bw_access, tensor.last_bw_access) == (
        last_fw,
        first_bw,
        last_bw,
    )
    assert (tensor.lifetime, tensor.inactive_time) == (lifetime, inactive)


def test_intervals(facts: Facts) -> None:
    assert facts.tensors[3].active_fw_interval == (0, 1)
    assert facts.tensors[3].active_bw_interval == (5, 6)
    assert facts.tensors[0].active_fw_interval is None
    assert facts.tensors[4].active_bw_interval is None
    assert facts.tensors[1].changed_at == (7,)
    assert facts.tensors[8].changed_at == (6,)


def changed(profile: Profile, rank: int, **fields: object) -> Profile:
    nodes = list(profile.nodes)
    nodes[rank] = dataclasses.replace(nodes[rank], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(profile, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("rank", "fields", "said"),
    [
        (6, {"phase": F}, "must come before all others"),
        (1, {"reads": (99,)}, "must name tensors 0 to 8, but got 99"),
        (1, {"creates": (-1,)}, "must name tensors 0 to 8, but got -1"),
        (1, {"reads": (5,)}, "nothing before it creates that"),
        (2, {"creates": (3,)}, "exists already"),
        (2, {"creates": (1,)}, "exists already"),
        (3, {"creates": ()}, "'loss' must be static or created"),
    ],
)
def test_a_profile_that_contradicts_itself_is_refused(
    rank: int, fields: dict[str, object], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        facts_of(changed(step(), rank, **fields))


def test_plain_orders() -> None:
    a, b = step(), changed(changed(step(), 0, seconds=64.0), 4, seconds=20.0)
    own = [(0, rank) for rank in range(8)]
    assert plain_order([a], Multiplexing.TURNS) == tuple(own)
    assert plain_order([a, b], Multiplexing.TURNS) == tuple(own + [(1, rank) for rank in range(8)])
    assert plain_order([a], Multiplexing.RING) == (*own[4:], *own[:4])
    stage_a = [(0, 4), (0, 5), (0, 6), (0, 7), (1, 0), (1, 1), (1, 2), (1, 3)]
    stage_b = [(1, 4), (1, 5), (1, 6), (1, 7), (0, 0), (0, 1), (0, 2), (0, 3)]
    assert plain_order([a, b], Multiplexing.RING) == (*stage_a, *stage_b)
    spread = plain_order([a, b], Multiplexing.RING, interleaved=True)
    # Where the middles of nodes lie: in the first stage at 8, 32, 80, 176 of 240 and 32, 65, 68, 74 of 78,
    # in the second at 10, 36, 84, 180 of 244 and 0.5, 2, 5, 11 of 15.
    assert spread[:8] == ((0, 4), (0, 5), (0, 6), (1, 0), (0, 7), (1, 1), (1, 2), (1, 3))
    assert spread[8:] == ((0, 0), (1, 4), (0, 1), (1, 5), (0, 2), (1, 6), (0, 3), (1, 7))
    assert sorted(spread) == sorted((*stage_a, *stage_b))


def test_live_bytes_in_turns() -> None:
    task = Task((step(),), Multiplexing.TURNS, limit_bytes=0, host_bytes=0)
    order = plain_order(task.profiles, task.multiplexing)
    static = 6
    plain = [10, 10 + 20 + 7, 10 + 20 + 30, 10 + 30 + 4, 10 + 30 + 4 + 30, 10 + 4 + 30 + 2, 10 + 4 + 2, 4 + 2]
    assert live_bytes(task, order) == [static + bytes_ for bytes_ in plain]
    swap = Swap(0, 3, offload_after=(0, 1), release_before=(0, 3), prefetch_prompt=(0, 4))
    expected = plain.copy()
    expected[3] -= 10
    assert live_bytes(task, order, [swap]) == [static + bytes_ for bytes_ in expected]
    # Made again from x, just before its use; the temporary and b are not, so nothing is thrown away.
    again = Recomputation(0, 3, nodes=(0,), before=(0, 5))
    expected = [plain[0], plain[1], plain[2] - 10, plain[3] - 10, plain[4] - 10, *plain[5:]]
    assert live_bytes(task, order, [], [again]) == [static + bytes_ for bytes_ in expected]


def test_live_bytes_of_a_recomputation_that_throws_things_away() -> None:
    task = Task((step(),), Multiplexing.TURNS, limit_bytes=0, host_bytes=0)
    order = plain_order(task.profiles, task.multiplexing)
    again = Recomputation(0, 5, nodes=(1, 2), before=(0, 4))
    # b is not away for long: its last forward node is just before. But making t takes 20 + 7, then both 50,
    # of which 30 count as b already; "gb" has not taken its own 30 then.
    assert live_bytes(task, order, [], [again]) == live_bytes(task, order)
    nodes = (dataclasses.replace(task.profiles[0].nodes[2], workspace_bytes=25),)
    bigger = dataclasses.replace(
        task.profiles[0], nodes=(*task.profiles[0].nodes[:2], *nodes, *task.profiles[0].nodes[3:])
    )
    task = dataclasses.replace(task, profiles=(bigger,))
    raised = live_bytes(task, order, [], [again])[4] - live_bytes(task, order)[4]
    assert raised == (20 + 30 + 25) - 30 - 30


def test_live_bytes_in_a_ring_wrap_around() -> None:
    task = Task((step(),), Multiplexing.RING, limit_bytes=0, host_bytes=0)
    order = plain_order(task.profiles, task.multiplexing)
    assert order == ((0, 4), (0, 5), (0, 6), (0, 7), (0, 0), (0, 1), (0, 2), (0, 3))
    static = 6
    plain = [10 + 30 + 4 + 30, 10 + 4 + 30 + 2, 10 + 4 + 2, 4 + 2, 10, 37, 60, 44]
    assert live_bytes(task, order) == [static + bytes_ for bytes_ in plain]
    swap = Swap(0, 3, offload_after=(0, 1), release_before=(0, 3), prefetch_prompt=(0, 5))
    expected = [plain[0] - 10, *plain[1:7], plain[7] - 10]
    assert live_bytes(task, order, [swap]) == [static + bytes_ for bytes_ in expected]
    # A static tensor may be away over the end of the body too.
    away = Swap(0, 2, offload_after=(0, 2), release_before=(0, 3), prefetch_prompt=(0, 5))
    expected = [plain[0] - 3, *plain[1:7], plain[7] - 3]
    assert live_bytes(task, order, [away]) == [static + bytes_ for bytes_ in expected]
    with pytest.raises(PlanError, match="must be used in the forward pass"):
        live_bytes(task, order, [], [Recomputation(0, 7, nodes=(4,), before=(0, 5))])


def test_results_of_a_ring_live_to_the_end_of_their_step() -> None:
    profiles = (step(), step())
    task = Task(profiles, Multiplexing.RING, limit_bytes=0, host_bytes=0)
    order = plain_order(profiles, task.multiplexing)
    without = tuple(
        dataclasses.replace(
            profile,
            tensors=tuple(
                dataclasses.replace(tensor, size_bytes=0) if tensor.name == "loss" else tensor
                for tensor in profile.tensors
            ),
        )
        for profile in profiles
    )
    bare = live_bytes(dataclasses.replace(task, profiles=without), order)
    losses = [a - b for a, b in zip(live_bytes(task, order), bare, strict=True)]
    # The first's is made last in the body and goes with its update; the second's stays to the body's end.
    assert losses == [4, 4, 4, 4, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4, 8]


def test_the_policy_keeps_the_contract() -> None:
    policy: Policy = MuTwo()
    assert policy.name == "mutwo"
    profiles = (first(), second(), second())
    with pytest.raises(PlanError, match="one or two sub-arrays, but got 3"):
        policy.schedule(Task(profiles, Multiplexing.RING, 10**6, 10**6))
    with pytest.raises(Infeasible, match="must fit into 3 bytes") as caught:
        policy.schedule(Task(profiles[:2], Multiplexing.RING, 3, 10**6))
    assert caught.value.excess_bytes > 0
