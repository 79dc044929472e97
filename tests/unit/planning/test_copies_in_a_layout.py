"""Where copies stand: within the limit, and compute waits for no more of them than memory demands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_relief import body_of
from tests.random_steps import DEVICE, KIB

from trainmux.ir import ByteClass, Multiplexing, Phase, Profile, ProfiledNode, ProfiledTensor
from trainmux.planning import Task, lane_times, peak_live_bytes, rewrite
from trainmux.planning._policy import plain_order
from trainmux.planning.policies._body import FixedBody
from trainmux.planning.policies._clock import seconds_of
from trainmux.planning.policies._gaps import Choice, find_gaps
from trainmux.planning.policies._layout import demand, lay_out

NUM_MAPS, NUM_BETWEEN = 3, 30


def three_maps() -> Profile:
    """Three maps of 40 KiB, made in 1 ms and copied in 4; then a node that takes 100 KiB; long after that the
    backward pass needs the maps."""
    tensors = [ProfiledTensor("batch", ByteClass.BATCH, KIB, 0.0, 0.0, 0.0, 0.0)]
    nodes = []

    def tensor(name: str, byte_class: ByteClass, kib: int) -> int:
        tensors.append(ProfiledTensor(name, byte_class, kib * KIB, *[kib / 10 * 1e-3] * 4))
        return len(tensors) - 1

    def node(phase: Phase, reads: tuple[int, ...], creates: tuple[int, ...] = (), kib: int = 0) -> None:
        nodes.append(
            ProfiledNode(
                f"node {len(nodes)}", phase, reads, creates, (), 1e-3, kib * KIB, is_repeatable=False
            )
        )

    maps = [tensor(f"map {number}", ByteClass.FEATURE_MAP, 40) for number in range(NUM_MAPS)]
    for position in maps:
        node(Phase.FORWARD, (0,), (position,))
    node(Phase.FORWARD, (0,), kib=100)
    for _ in range(NUM_BETWEEN):
        node(Phase.BACKWARD, (0,))
    for position in reversed(maps):
        node(Phase.BACKWARD, (position,))
    return Profile("three maps", "analytic", 1, DEVICE, tuple(tensors), tuple(nodes))


@pytest.mark.parametrize(
    ("spare_kib", "waited_ms"), [(120, 0), (110, 2), (80, 2), (70, 6), (40, 6), (30, 10)]
)
def test_compute_waits_for_the_copies_that_end_first(spare_kib: int, waited_ms: int) -> None:
    """What is behind them in the lane stays on the device if there is room for it."""
    profile = three_maps()
    limit = KIB + (100 + spare_kib) * KIB
    task = Task((profile,), Multiplexing.TURNS, limit, 1 << 50)
    body = FixedBody(task, plain_order(task.profiles, task.multiplexing))
    gaps = find_gaps(body.all_facts, with_static=False)
    needs = demand(body, gaps, [Choice.SWAP] * NUM_MAPS)
    assert needs is not None
    layout = lay_out(body, gaps, needs, limit)
    assert layout is not None
    assert seconds_of(layout) == pytest.approx((len(profile.nodes) + waited_ms) * 1e-3)
    assert peak_live_bytes(rewrite([profile], layout.schedule("")).body) <= limit


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 200),
    num_sub_arrays=st.integers(1, 3),
    multiplexing=st.sampled_from(list(Multiplexing)),
    share=st.floats(0.0, 1.0),
    late=st.booleans(),
)
def test_a_layout_is_within_its_limit_and_takes_what_it_says(
    seed: int, num_sub_arrays: int, multiplexing: Multiplexing, share: float, late: bool
) -> None:
    body, gaps = body_of(seed, num_sub_arrays, multiplexing)
    profiles = body.task.profiles
    choices = [Choice.SWAP if (number + seed) % 4 else Choice.KEEP for number in range(len(gaps))]
    needs = demand(body, gaps, choices)
    assert needs is not None
    limit = needs.peak_bytes + int(share * max(0, int(body.needed().max()) - needs.peak_bytes))
    layout = lay_out(body, gaps, needs, limit, late=late)
    assert layout is not None
    program = rewrite(profiles, layout.schedule(""))
    assert peak_live_bytes(program.body) <= limit
    assert lane_times(program.body, profiles).seconds <= seconds_of(layout) * (1 + 1e-9)
