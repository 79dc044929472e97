"""Whatever a policy decides can be carried out: no search may hide a schedule that no program keeps to.

Planners drop schedules that `rewrite` refuses, so a policy that decides the impossible would only look slow.
The steps here have many tensors that nothing changes, some of them read in the forward pass alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.random_steps import Shape, random_profile

from trainmux.ir import Multiplexing, verify
from trainmux.planning import Infeasible, Task, peak_live_bytes, policy_named, rewrite
from trainmux.planning._facts import facts_of
from trainmux.planning._lift import schedule_all_at_once, schedule_sub_arrays
from trainmux.planning._policy import live_bytes, plain_order
from trainmux.planning.policies import Auto

SHAPE = Shape(num_layers=4, constant=0.6, frozen=0.6, unrepeatable=0.0)
POLICIES = ("swap_only", "recompute_only", "capuchin", "mutwo", "auto")


def tasks(seed: int) -> list[Task]:
    """A step alone, with itself in a ring, and three in turns, each below static memory and above it."""
    profile = random_profile(seed, 1, SHAPE)
    found = []
    for count, multiplexing in ((1, Multiplexing.TURNS), (2, Multiplexing.RING), (3, Multiplexing.TURNS)):
        task = Task((profile,) * count, multiplexing, 0, 1 << 50)
        high = max(live_bytes(task, plain_order(task.profiles, multiplexing)))
        static = count * sum(tensor.size_bytes for tensor in profile.tensors if tensor.byte_class.is_static)
        limits = [high // 2, *(int(static + share * (high - static)) for share in (0.7, 0.9))]
        found += [replace(task, limit_bytes=limit) for limit in limits]
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_every_schedule_becomes_a_proved_program(name: str) -> None:
    num_decided = 0
    for seed in range(10):
        policy = policy_named(name, evaluations=6).policy
        for task in tasks(seed):
            for make in (schedule_sub_arrays, schedule_all_at_once)[: 2 if isinstance(policy, Auto) else 1]:
                try:
                    schedule = make(policy.schedule, task)
                except Infeasible:
                    continue
                program = rewrite(task.profiles, schedule)
                assert peak_live_bytes(program.body) <= task.limit_bytes
                verify(program, task.profiles, budget_bytes=program.slab_bytes)
                num_decided += bool(schedule.swaps or schedule.recomputes)
    assert num_decided >= 10


def test_the_steps_have_tensors_that_only_the_forward_pass_reads() -> None:
    found = {"constant": 0, "parameter": 0}
    for seed in range(10):
        for tensor in facts_of(random_profile(seed, 1, SHAPE)).tensors:
            kind = tensor.byte_class.value
            if kind in found and tensor.accesses and tensor.last_bw_access is None:
                found[kind] += 1
    assert all(count >= 5 for count in found.values()), found
