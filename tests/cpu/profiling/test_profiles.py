"""Measured and analytic profiles, the table of devices, and profiles on disk."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiled import kernels_of, program_of, traced_kernels
from torch import Tensor

from trainmux.engine import handed_over, run_into
from trainmux.errors import ConfigError
from trainmux.ir import DeviceFacts, Profile
from trainmux.lowering import Place
from trainmux.profiling import (
    DEVICES,
    Device,
    KernelGraph,
    LinkRates,
    Measurements,
    ProfileCache,
    _measured,
    analytic_profile,
    device_present,
    find_device,
    measure_profile,
    probe_link,
)
from trainmux.profiling._analytic import idleness
from trainmux.profiling._clocks import HostClock, NodeSamples, Sample
from trainmux.profiling._devices import BANDWIDTH_SHARE, FLOPS_SHARE, NODE_SECONDS
from trainmux.profiling._link import slowdown_of
from trainmux.profiling._measured import NUM_SAMPLES, in_step_seconds, settled_seconds
from trainmux.profiling._sync_cost import sync_points
from trainmux.runtime import storage_bytes

pytestmark = pytest.mark.usefixtures("built_once")

FACTS = DeviceFacts("here", 1 << 30, 1 << 30)
DEEP = "transformer_with_dropout"


def measured(graph: KernelGraph, arguments: list[Tensor], **options: Any) -> Profile:
    """A profile of two members, nodes run as the engine runs them."""
    given = {"into": run_into, "handed_over": handed_over(graph), **options}
    given.setdefault("known", Measurements(torch.device("cpu")))
    return measure_profile(graph, arguments, width=2, fingerprint="f", facts=FACTS, model=0, **given)


@pytest.mark.parametrize(
    ("name", "lowering"), [("mlp", "inductor"), ("cnn_with_dropout", "inductor"), (DEEP, "aten")]
)
def test_measuring_runs_every_node_in_little_memory_and_changes_nothing(
    name: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With feature maps away between the passes, far fewer bytes are there at a time: a step larger than the
    device can be measured. Results are those of the program, bit for bit."""
    program, arguments = program_of(name, lowering)
    with torch.no_grad():
        expected = program.module(*arguments)
    graph = kernels_of(program)
    before = [argument.clone() for argument in arguments]
    made: list[tuple[weakref.ref[Tensor], int]] = []
    memory = {
        at.tensor: storage_bytes(a.untyped_storage()) for at, a in zip(graph.inputs, arguments, strict=True)
    }
    results = {at.tensor for at in graph.outputs}
    told: list[tuple[int, int]] = []
    most = 0

    def watched(target: Any, args: Any, kwargs: Any, places: Sequence[Place | None]) -> list[Tensor]:
        nonlocal most
        step = graph.steps[len(told) % len(graph.steps)]
        for number, place in zip(step.results, places, strict=True):
            if place is not None:
                made.append((weakref.ref(place.memory), place.memory.nbytes))
                memory.update({number: place.memory} if number in results else {})
        most = max(most, sum(size for held, size in made if held() is not None))
        return run_into(target, args, kwargs, places)

    monkeypatch.setattr(_measured, "probe_link", lambda device: LinkRates(4.0, 5.0, 2.0, 2.5, 0.25))
    profile = measured(graph, arguments, into=watched, tell=lambda *progress: told.append(progress))
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))
    assert told[-1] == (2 * len(graph.steps),) * 2
    got = [at.look(memory[at.tensor]) for at in graph.outputs]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert most < (0.8 if name == DEEP else 1.1) * most_live(graph)
    memory.clear()
    del got
    assert all(held() is None for held, _ in made)  # nothing that is no longer needed is held

    assert profile.source == "measured"
    assert all(node.seconds > 0 for node in profile.nodes)
    assert [node.name for node in profile.nodes] == [step.node.name for step in graph.steps]
    assert all(node.is_repeatable == (not node.changes) for node in profile.nodes)
    for tensor in profile.tensors:
        alone = (tensor.swap_out_seconds, tensor.swap_in_seconds)
        both = (tensor.swap_out_duplex_seconds, tensor.swap_in_duplex_seconds)
        assert (*alone, *both) == tuple(0.25 + tensor.size_bytes / rate for rate in (4, 5, 2, 2.5))


def most_live(graph: KernelGraph) -> int:
    """The most bytes of what a step makes that are needed at once."""
    steps, tensors = graph.steps, graph.tensors
    made = {number: rank for rank, step in enumerate(steps) for number in step.creates}
    last = {n: rank for rank, step in enumerate(steps) for n in (*step.reads, *step.creates, *step.changes)}
    return max(
        sum(tensors[number].size_bytes for number, begin in made.items() if begin <= rank <= last[number])
        for rank in range(len(steps))
    )


def test_an_analytic_node_takes_the_slower_of_arithmetic_and_traffic() -> None:
    graph = kernels_of(program_of("mlp", "inductor")[0])
    device = replace(find_device("a100"), half_flops=1e9, single_flops=1e6, bandwidth=1e12)
    by_half = analytic_profile(graph, 2, device, half=True)
    by_single = analytic_profile(graph, 2, device, half=False)
    slow = analytic_profile(graph, 2, replace(device, bandwidth=1e6), half=True)
    products = 0
    for step, a, b, c in zip(graph.steps, by_half.nodes, by_single.nodes, slow.nodes, strict=True):
        arithmetic = 0.0
        if step.work is not None:
            arithmetic = step.work.flops * idleness(step.work.tiles, 108) / (1e9 * FLOPS_SHARE)
            products += 1
            assert a.seconds == pytest.approx(NODE_SECONDS + arithmetic)
            assert b.seconds == pytest.approx(NODE_SECONDS + 1000 * arithmetic)
        read = sum(graph.tensors[i].size_bytes for i in (*step.reads, *step.creates))
        written = sum(graph.tensors[i].size_bytes for i in step.changes)
        moved = (read + 2 * written) / (1e6 * BANDWIDTH_SHARE)
        assert c.seconds == pytest.approx(NODE_SECONDS + max(moved, arithmetic))
    assert products >= 4
    assert len({by_half.fingerprint, by_single.fingerprint, slow.fingerprint}) == 3
    for tensor in by_half.tensors:
        assert tensor.swap_out_seconds == tensor.size_bytes / 32e9


def test_a_product_with_few_tiles_leaves_the_device_idle() -> None:
    assert idleness(0, 108) == 1.0
    assert idleness(108, 108) == idleness(216, 108) == 1.0
    assert idleness(27, 108) == 4.0
    assert idleness(109, 108) == pytest.approx(216 / 109)


def layers(width: int) -> tuple[KernelGraph, list[Tensor]]:
    """Four equal layers over each member's own tensor, and four over one that all share."""

    def work(own: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(4):
            own, shared = own * 2.0, shared * 2.0
        return own, shared

    given = [torch.ones(width, 8), torch.ones(64)]
    return traced_kernels(work, *given), given


def test_kernels_that_are_alike_are_measured_once_for_all_layers_and_widths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several of them, or all but the first layer would go unnoticed."""
    ran: list[int] = []
    took: list[float] = []

    def into(*call: Any) -> list[Tensor]:
        ran.append(len(ran))
        return run_into(*call)

    def measure(self: object, work: Callable[[], None], head_start_seconds: float) -> Sample:
        work()
        took.append(1.0 + ran[-1] % 8)  # eight nodes a pass
        return Sample(took[-1])

    monkeypatch.setattr(HostClock, "measure", measure)
    known = Measurements(torch.device("cpu"))
    two = measured(*layers(2), into=into, handed_over={}, known=known)
    assert len(ran) == 2 * 8  # all run twice, or the next ones had nothing to read
    assert len(took) == 2 * NUM_SAMPLES == len(set(took))
    assert [node.seconds for node in two.nodes] == [3.0, 4.0] * 4  # the second layer's: the median
    three = measured(*layers(3), into=into, handed_over={}, known=known)
    assert len(took) == 3 * NUM_SAMPLES
    assert [node.seconds for node in three.nodes] == [3.0, 4.0] * 4
    assert measured(*layers(3), into=into, handed_over={}, known=known).nodes == three.nodes
    assert len(took) == 3 * NUM_SAMPLES
    # One whose result is copied to its place is not like one whose result is handed over.
    measured(*layers(3), into=into, handed_over={0: frozenset({2})}, known=known)
    assert len(took) == 4 * NUM_SAMPLES


def test_nodes_with_other_types_strides_numbers_or_operands_are_not_alike() -> None:
    def calls(x: Tensor, y: Tensor) -> list[Tensor]:
        halves = [x[:4] + y[:4], x[4:] + y[4:], x[1:5] + y[1:5], x[::2] + y[::2]]
        return [*halves, x[:4].half() + y[:4].half(), x + y, y + x, x + x, y + y, x * 2.0, y * 3.0]

    graph = traced_kernels(calls, torch.zeros(8), torch.zeros(8))
    by_signature: dict[Any, list[int]] = {}
    for rank, signature in enumerate(graph.signatures()):
        by_signature.setdefault(signature, []).append(rank)
    assert list(by_signature.values()) == [[0, 1], [2], [3], [4, 5], [6], [7, 8], [9, 10], [11], [12]]


def test_a_node_that_the_host_was_late_for_is_measured_again() -> None:
    node = NodeSamples()
    start = node.head_start_seconds
    node.add(Sample(0.005, 1, host_seconds=0.004, head_start_seconds=start))
    assert node.seconds == 0.005  # nothing better yet
    longer = node.head_start_seconds
    assert longer > 0.004 / 0.8
    node.add(Sample(0.001, 3, host_seconds=0.0035, head_start_seconds=longer))
    assert node.head_start_seconds == longer
    node.add(Sample(0.002, 2, host_seconds=0.0035, head_start_seconds=longer))
    assert node.seconds == 0.0015
    assert node.workspace_bytes == 3


OWN = {
    "name": "mine",
    "memory_bytes": 8 * 10**9,
    "host_bytes": 10**9,
    "num_multiprocessors": 20,
    "half_flops": 1e13,
    "single_flops": 5e12,
    "bandwidth": 2e11,
    "link": 1e10,
    "duplex_link": 8e9,
}


@pytest.mark.parametrize(
    "written",
    [
        None,
        "{",
        "[]",
        *(json.dumps({**OWN, name: value}) for name, value in [("price", 1), ("link", 0), ("link", "fast")]),
        *(json.dumps({**OWN, name: value}) for name, value in [("memory_bytes", 1.5), ("name", "")]),
        json.dumps({**OWN, "bandwidth": math.nan}),
    ],
)
def test_other_files_are_refused(written: str | None, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    if written is not None:
        path.write_text(written)
    with pytest.raises(ConfigError, match="expected"):
        Device.load(path)


def test_estimates_are_scaled_from_the_known_device_of_the_nearest_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = SimpleNamespace(name="NVIDIA H200", total_memory=150 * 10**9, multi_processor_count=66)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    device_present.cache_clear()
    half, whole = device_present(torch.device("cuda", 0)), DEVICES["h200-141gb"]
    assert (half.half_flops, half.bandwidth) == (whole.half_flops / 2, whole.bandwidth)
    device_present.cache_clear()


def test_devices_are_found_by_name() -> None:
    assert find_device("A100").name == find_device("a100-40gb").name == find_device("A100 40GB").name
    for wrong in ("", "b300", "a100-80gb", "00"):
        with pytest.raises(ConfigError, match="a100-40gb"):
            find_device(wrong)
    assert all(device.duplex_link <= device.link for device in DEVICES.values())


def test_both_directions_at_once_are_no_faster_than_one() -> None:
    rates = probe_link(torch.device("cpu"), 1 << 20)
    assert 0 < rates.out_duplex <= rates.out
    assert 0 < rates.into_duplex <= rates.into


def test_profiles_are_kept_by_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))
    graph = kernels_of(program_of("mlp", "inductor")[0])
    profile = analytic_profile(graph, 2, find_device("a100"), half=True)
    cache = ProfileCache()
    assert cache.get(profile.fingerprint) is None
    cache.put(profile)
    assert ProfileCache(tmp_path / "profiles").get(profile.fingerprint) == profile
    assert cache.get("another") is None
    (path,) = (tmp_path / "profiles").iterdir()
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert cache.get(profile.fingerprint) is None
    path.with_name("other.profile.json").write_text(whole)
    assert cache.get("other") is None  # its content says which one it is
    unwritable = ProfileCache(path)
    unwritable.put(profile)
    assert unwritable.get(profile.fingerprint) is None


# ---- nodes alone, and in a step ---------------------------------------------------------------------------


@given(st.lists(st.floats(1e-6, 1e-2), min_size=1, max_size=30), st.floats(0.05, 3.0))
def test_times_in_a_step_add_up_and_keep_their_order(alone: list[float], share: float) -> None:
    together = share * sum(alone)
    found = in_step_seconds(alone, together)
    assert sum(found) == pytest.approx(together)
    order = sorted(range(len(alone)), key=alone.__getitem__)
    assert all(found[a] <= found[b] * (1 + 1e-9) for a, b in pairwise(order))
    assert min(found) > 0


def test_a_constant_overhead_is_found_again() -> None:
    true = [1e-3, 5e-3, 2e-4, 8e-4]
    assert in_step_seconds([seconds + 1e-5 for seconds in true], sum(true)) == pytest.approx(true)


# ---- copies beside a step ---------------------------------------------------------------------------------


def test_a_slowdown_is_of_the_time_that_copies_ran() -> None:
    assert slowdown_of(10.0, 10.0, 5.0) == 1.0
    assert slowdown_of(10.0, 11.0, 6.0) == pytest.approx(6 / 5)
    assert slowdown_of(10.0, 12.0, 20.0) == pytest.approx(1.2)  # the copies outlasted the kernels
    assert slowdown_of(10.0, 9.9, 6.0) == 1.0
    assert slowdown_of(10.0, 40.0, 6.0) == 1.0  # nothing to do with copies
    assert slowdown_of(10.0, 40.0, 50.0) == 2.0
    assert slowdown_of(10.0, 10.0, 0.0) == 1.0


@given(st.integers(0, 5000))
def test_copies_have_time_to_end_before_they_are_waited_for(num_nodes: int) -> None:
    """Each is waited for once, three nodes later at least, and no two dependencies are at the same node."""
    copies, waits = sync_points(num_nodes)
    assert len(copies) == len(waits) <= 32
    assert len(copies) >= min(num_nodes // 8 - 1, 15)
    assert all(rank + 1 < num_nodes for rank in waits)  # a node follows that waits
    places = sorted([*copies, *(rank + 1 for rank in waits)])
    assert all(after - before >= 3 for before, after in pairwise(places))
    assert [rank in copies for rank in places] == [number % 2 == 0 for number in range(len(places))]


@pytest.mark.parametrize(
    ("seconds_at", "most"),
    [
        (lambda passed: 0.01, 0.41),  # at its clock already
        (lambda passed: 0.01 * (1 - 0.06 * math.exp(-passed / 0.15)), 1.01),
        (lambda passed: 0.01 if passed < 0.25 else 0.0105, 1.01),  # slows down all at once
    ],
)
def test_a_step_is_replayed_until_the_device_is_as_slow_as_it_stays(
    seconds_at: Callable[[float], float], most: float
) -> None:
    passed = 0.0

    def replay_for(seconds: float) -> float:
        nonlocal passed
        begin, count = passed, 0
        while passed < begin + seconds:
            passed += seconds_at(passed)
            count += 1
        return (passed - begin) / count

    assert settled_seconds(replay_for) == pytest.approx(seconds_at(10), rel=0.005)
    assert passed <= most
