"""Profiles of widths that nobody lowered: the same as those of the kernels, or not made at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benchmarks.workloads import SMALL
from profiled import traced_kernels

import trainmux as tm
from trainmux.fleet._other_steps import read_step
from trainmux.fleet._plan_cache import PlanCache
from trainmux.ir import ByteClass, Phase, Profile
from trainmux.profiling import KernelGraph, WidthProfiles, find_device, same_but_for_origin

pytestmark = pytest.mark.usefixtures("built_once")

A100 = find_device("a100")


def fleet_of_one() -> tm.Fleet:
    workload = SMALL["mlp"]
    model = workload.build(0).train()
    member = tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1), name="m")
    return tm.Fleet([member], workload.loss, workload.batch(0, torch.float32), precision="bf16")


def test_widths_between_two_of_the_same_kernels_are_worked_out_exactly() -> None:
    (group,), read = fleet_of_one()._groups, []

    def lowered(width: int) -> KernelGraph:
        read.append(width)
        return read_step(group.sub_array_program(width, kernels="lowered"))

    profiles = WidthProfiles(lowered, A100, half=True)
    assert [profiles.profile(width).width for width in (5, 1, 3, 4)] == [5, 1, 3, 4]
    assert read == [5, 1, 2]
    derived, real = profiles.profile(3), profiles.confirmed(3)
    assert profiles.lowered == {1, 2, 3, 5}
    assert derived.fingerprint != real.fingerprint
    assert same_but_for_origin(derived, real)
    assert profiles.profile(3) is real
    assert not same_but_for_origin(profiles.profile(4), real)


def graph_of(width: int, *, size: int = 64, function: str = "relu") -> KernelGraph:
    """A product of each member's own rows with a matrix that all share."""

    def work(x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return getattr(torch.bmm(x, shared.expand(width, size, 4)), function)()

    return traced_kernels(work, torch.empty(width, 8, size), torch.empty(size, 4))


def test_widths_whose_kernels_differ_are_lowered_each() -> None:
    def changed(high: KernelGraph, **values: object) -> KernelGraph:
        return replace(high, steps=(replace(high.steps[0], **values), *high.steps[1:]))

    high = graph_of(8)
    first = high.tensors[0]
    others = [
        graph_of(8, function="tanh"),
        graph_of(8, size=65),  # no whole number for each member
        replace(high, tensors=(replace(first, byte_class=ByteClass.CONSTANT), *high.tensors[1:])),
        replace(high, tensors=(replace(first, size_bytes=0), *high.tensors[1:])),  # shrinks
        changed(high, reads=(1,)),
        changed(high, phase=Phase.BACKWARD),
        changed(high, work=replace(high.steps[0].work, passes=2.0)),
    ]
    for other, expected in [(high, {2, 8}), *((other, {2, 5, 8}) for other in others)]:
        graphs = {2: graph_of(2), 5: graph_of(5), 8: other}
        profiles = WidthProfiles(graphs.__getitem__, A100, half=True)
        for width in (8, 2, 5):
            profiles.profile(width)
        assert profiles.lowered == expected
        assert same_but_for_origin(profiles.profile(5), profiles.confirmed(5))


def test_a_plan_is_over_real_kernels_even_where_what_was_worked_out_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worked-out widths that seem to take no time win at first; what they really take is found out."""
    fleet = fleet_of_one()
    monkeypatch.setattr(PlanCache, "get", lambda *args: None)
    expected = fleet.plan(None, "none", device=A100, num_members=4)
    planned: list[str] = []

    def no_time(profiles: WidthProfiles, width: int) -> Profile:
        found = interpolated(profiles, width)
        if width in profiles.lowered:
            return found
        return replace(found, nodes=tuple(replace(node, seconds=1e-12) for node in found.nodes))

    def confirmed(profiles: WidthProfiles, width: int) -> Profile:
        planned.append(f"{width} {'lowered' if width in profiles.lowered else 'worked out'}")
        return lower(profiles, width)

    interpolated, lower = WidthProfiles.profile, WidthProfiles.confirmed
    monkeypatch.setattr(WidthProfiles, "profile", no_time)
    monkeypatch.setattr(WidthProfiles, "confirmed", confirmed)
    plan = fleet.plan(None, "none", device=A100, num_members=4)
    assert (plan.record.partition, plan.profiles) == (expected.record.partition, expected.profiles)
    assert plan.step_seconds == expected.step_seconds
    # Three of four members were to be fused, until three were lowered.
    assert "3 worked out" in planned
    assert planned[-1] == "4 lowered"
