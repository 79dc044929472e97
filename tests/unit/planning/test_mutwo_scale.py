"""Time to schedule a large pair. Processor time, as the machine may have other work."""

from __future__ import annotations

import random
import time

import pytest
from figure6 import Builder

from trainmux.ir import ByteClass, Multiplexing, Phase, Profile
from trainmux.planning._facts import Facts
from trainmux.planning._policy import Task, live_bytes, plain_order
from trainmux.planning.policies._mutwo_body import Body
from trainmux.planning.policies.mutwo import MuTwo

MIB = 2**20
LINK_BYTES_PER_SECOND = 50e9


def large(num_nodes: int, num_feature_maps: int, seed: int) -> Profile:
    """A chain of layers, half of its nodes forward, with temporaries between the feature maps."""
    rng = random.Random(seed)
    builder = Builder()
    num_forward = num_nodes // 2
    builder.tensor("z-1", ByteClass.BATCH, MIB)
    saved = [
        (index + 1) * num_feature_maps // num_forward > index * num_feature_maps // num_forward
        for index in range(num_forward)
    ]
    for index in range(num_forward):
        kind = ByteClass.FEATURE_MAP if saved[index] else ByteClass.TEMPORARY
        size = rng.choice((4, 8, 16, 32)) * MIB
        seconds = size / LINK_BYTES_PER_SECOND
        builder.tensor(f"w{index}", ByteClass.PARAMETER, rng.choice((1, 2, 4)) * MIB)
        builder.tensor(f"z{index}", kind, size, seconds, seconds)
        reads = [f"z{index - 1}", f"w{index}"]
        time_s = rng.choice((0.5, 1.0, 2.0)) * 60e-6
        builder.node(f"f{index}", Phase.FORWARD, reads, [f"z{index}"], time_s, workspace=rng.choice((0, MIB)))
    for index in reversed(range(num_nodes - num_forward)):
        builder.tensor(f"g{index}", ByteClass.GRADIENT_MAP, 8 * MIB)
        reads = [f"w{index}", *([f"z{index}"] if saved[index] else [])]
        if index + 1 < num_forward:
            reads.append(f"g{index + 1}")
        time_s = rng.choice((1.0, 2.0, 4.0)) * 60e-6
        builder.node(f"b{index}", Phase.BACKWARD, reads, [f"g{index}"], time_s)
    return builder.profile(f"large {seed}")


def schedule_seconds(num_nodes: int, num_feature_maps: int, share: float) -> float:
    """Processor seconds to schedule a pair with so many nodes and feature maps, and to less memory."""
    profiles = tuple(large(num_nodes // 2, num_feature_maps // 2, seed) for seed in (1, 2))
    order = plain_order(profiles, Multiplexing.RING)
    peak = max(live_bytes(Task(profiles, Multiplexing.RING, 0, 0), order))
    static = sum(t.size_bytes for profile in profiles for t in profile.tensors if t.byte_class.is_static)
    task = Task(profiles, Multiplexing.RING, static + int((peak - static) * share), host_bytes=2**60)
    begin = time.process_time()
    made = MuTwo().schedule(task)
    seconds = time.process_time() - begin
    assert made.swaps
    assert max(live_bytes(task, made.order, made.swaps, made.recomputes)) <= task.limit_bytes
    return seconds


def test_one_more_decision_is_not_a_new_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors are booked once; each decision then changes what is booked at a few nodes."""
    num_booked: list[int] = []
    num_changed: list[int] = []
    book, take_out = Body._book_tensors, Body.take_out

    def counted_booking(body: Body, sub_array: int, facts: Facts) -> None:
        num_booked.append(len(facts.tensors))
        book(body, sub_array, facts)

    def counted_change(body: Body, size_bytes: int, release: int, prompt: int) -> None:
        before = body.taken.copy()
        take_out(body, size_bytes, release, prompt)
        num_changed.append(int((body.taken != before).sum()))

    monkeypatch.setattr(Body, "_book_tensors", counted_booking)
    monkeypatch.setattr(Body, "take_out", counted_change)
    schedule_seconds(400, 100, share=0.3)
    assert len(num_booked) == 2  # sub-arrays
    assert len(num_changed) > 40
    assert max(num_changed) <= 2


def test_a_pair_of_4000_nodes_and_1000_feature_maps() -> None:
    assert schedule_seconds(4000, 1000, share=0.3) < 10
