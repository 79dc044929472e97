"""The contract of a policy: a schedule that is right and fits, or `Infeasible`; whatever the step.

Planners leave out schedules that no program keeps to, so a policy that decides the impossible would only look
slow there. Here each is asked itself.
"""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from steps import (
    PLENTY,
    RING,
    TURNS,
    decide,
    num_forward,
    plain_peak,
    prove,
    static_bytes,
    undecided,
)
from tests.random_steps import Shape, random_profile
from tests.slab_check import peak_live_bytes

from trainmux.ir import ByteClass, Multiplexing, Profile, Schedule, Swap
from trainmux.planning import POLICY_NAMES, Infeasible, Task, policy_named, rewrite

SEEDS = st.integers(0, 10**6)


def random_steps(seed: int) -> tuple[tuple[Profile, ...], Multiplexing]:
    """One or two sub-arrays in turns or as a ring; many tensors that nothing changes, or that stay whole."""
    rng = random.Random(seed)
    shape = Shape(
        num_layers=rng.choice((2, 3, 4, 6)),
        odd_sizes=rng.random() < 0.5,
        unrepeatable=rng.choice((0.0, 0.2, 1.0)),
        workspace=rng.choice((0.0, 0.2, 0.5)),
        constant=rng.choice((0.0, 0.6)),
        frozen=rng.choice((0.0, 0.6)),
        scratch=rng.choice((0.0, 0.2)),
    )
    one = random_profile(rng.randrange(10**6), rng.choice((1, 2)), shape)
    profiles = rng.choice(((one,), (one, one), (one, random_profile(rng.randrange(10**6), 1, shape))))
    return profiles, rng.choice((TURNS, RING)) if len(profiles) > 1 else TURNS


def all_swapped(profiles: tuple[Profile, ...], multiplexing: Multiplexing) -> Schedule:
    """Each feature map given back right after its last forward use and taken right before its next."""
    order = undecided(profiles, multiplexing).order
    place = {node: position for position, node in enumerate(order)}
    swaps = []
    for s, profile in enumerate(profiles):
        count = num_forward(profile)
        for tensor, record in enumerate(profile.tensors):
            uses = [rank for rank, node in enumerate(profile.nodes) if tensor in (*node.reads, *node.creates)]
            forward = [rank for rank in uses if rank < count]
            if record.byte_class is ByteClass.FEATURE_MAP and forward and forward != uses:
                release = order[(place[s, forward[-1]] + 1) % len(order)]
                back = (s, uses[len(forward)])
                swaps.append(Swap(s, tensor, (s, forward[-1]), release, back))
    return Schedule(multiplexing, order, tuple(swaps), ())


@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(seed=SEEDS, share=st.floats(0.0, 1.1), host_share=st.sampled_from([0.0, 0.3, 10.0, 10.0]))
def test_a_schedule_is_right_and_fits_or_is_refused(
    policy: str, seed: int, share: float, host_share: float
) -> None:
    profiles, multiplexing = random_steps(seed)
    static, peak = static_bytes(profiles), plain_peak(profiles, multiplexing)
    limit = static + int((peak - static) * share)
    host = int(host_share * (peak - static))
    made = decide(policy, profiles, multiplexing, limit, host)
    assert decide(policy, profiles, multiplexing, limit, host) == made
    if made is None:
        assert limit < peak
        return
    program = prove(profiles, made, limit)
    assert program.host_bytes <= host
    if limit >= peak or policy == "none":
        assert not made.swaps
        assert not made.recomputes
    if multiplexing is TURNS:
        assert made.order == undecided(profiles, TURNS).order
    assert not made.swaps or policy != "recompute_only"
    assert not made.recomputes or policy != "swap_only"
    for each in (*made.swaps, *made.recomputes):
        record = profiles[each.sub_array].tensors[each.tensor]
        assert each.reason
        assert policy == "auto" or record.byte_class is ByteClass.FEATURE_MAP


@pytest.mark.parametrize("policy", ["swap_only", "mutwo", "auto"])
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(SEEDS, st.floats(0.0, 0.99))
def test_what_fits_with_everything_swapped_is_not_refused(policy: str, seed: int, share: float) -> None:
    """True of thousands of random steps, not proven: the examples are the same ones in every run."""
    profiles, multiplexing = random_steps(seed)
    low = peak_live_bytes(rewrite(profiles, all_swapped(profiles, multiplexing)).body)
    high = plain_peak(profiles, multiplexing)
    if low < high:
        made = decide(policy, profiles, multiplexing, low + int((high - low) * share))
        assert made is not None
        assert made.swaps or made.recomputes


@pytest.mark.parametrize("multiplexing", [RING, TURNS])
@pytest.mark.parametrize("widths", [(4, 4), (3, 3, 1, 1), (2, 2, 2, 2), (1,) * 8, (2, 2, 1)])
def test_mutwo_schedules_pairs_and_leaves_multiplexing_out_where_asked(
    widths: tuple[int, ...], multiplexing: Multiplexing
) -> None:
    """All of the paper's partitions of eight, and one whose last sub-array has no partner."""
    by_width = {width: random_profile(5, width, Shape(num_layers=3)) for width in widths}
    profiles = tuple(by_width[width] for width in widths)
    low = peak_live_bytes(rewrite(profiles, all_swapped(profiles, multiplexing)).body)
    limit = low + (plain_peak(profiles, multiplexing) - low) // 3
    made = decide("mutwo", profiles, multiplexing, limit)
    assert made is not None
    assert made.multiplexing is multiplexing
    assert made.swaps or made.recomputes
    prove(profiles, made, limit)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_an_impossible_limit_is_infeasible_by_so_many_bytes(policy: str) -> None:
    profiles, multiplexing = random_steps(3)
    task = Task(profiles, multiplexing, 1, PLENTY)
    with pytest.raises(Infeasible) as refused:
        next(policy_named(policy, evaluations=2).policy.schedules(task))
    assert 0 < refused.value.excess_bytes <= plain_peak(profiles, multiplexing)


@pytest.mark.parametrize("policy", ["mutwo", pytest.param("capuchin", marks=pytest.mark.extensive)])
def test_a_pair_of_1200_nodes_and_400_feature_maps_takes_seconds(policy: str) -> None:
    """Processor time, as the machine may have other work."""
    profiles = tuple(random_profile(n, 1, Shape(num_layers=200, skip=0.0, buffer=0.0)) for n in (1, 2))
    multiplexing = RING if policy == "mutwo" else TURNS
    static = static_bytes(profiles)
    limit = static + int((plain_peak(profiles, multiplexing) - static) * 0.6)
    begin = time.process_time()
    made = decide(policy, profiles, multiplexing, limit)
    assert time.process_time() - begin < 5
    assert made is not None
    assert made.swaps
    assert peak_live_bytes(rewrite(profiles, made).body) <= limit
