"""Measured and analytic profiles, the table of devices, and profiles on disk."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from profiled import kernels_of, leave_uncompiled, program_of
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from trainmux.engine import handed_over, run_into
from trainmux.errors import ConfigError
from trainmux.ir import ByteClass, DeviceFacts, Phase, Profile
from trainmux.profiling import (
    DEVICES,
    Device,
    KernelGraph,
    LinkRates,
    ProfileCache,
    _measured,
    analytic_profile,
    device_present,
    find_device,
    measure_profile,
    probe_link,
)
from trainmux.profiling._analytic import idleness
from trainmux.profiling._devices import BANDWIDTH_SHARE, FLOPS_SHARE, NODE_SECONDS
from trainmux.profiling._kernels import KernelStep, alike, read_kernels
from trainmux.profiling._link import slowdown_of
from trainmux.profiling._measured import NUM_PASSES, NodeSamples, Sample, _HostClock, in_step_seconds
from trainmux.profiling._pass import Pass
from trainmux.profiling._sync_cost import sync_points

pytestmark = pytest.mark.usefixtures("built_once")

FACTS = DeviceFacts("here", 1 << 30, 1 << 30)
DEEP = "transformer_with_dropout"


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncompiled(monkeypatch)


def measured(graph: KernelGraph, arguments: list[Tensor], **options: Any) -> Profile:
    """A profile of two members, nodes run as the engine runs them."""
    return measure_profile(
        graph,
        arguments,
        width=2,
        fingerprint="f",
        facts=FACTS,
        into=run_into,
        handed_over=handed_over(graph),
        **options,
    )


@pytest.mark.parametrize(("name", "lowering"), [("mlp", "inductor"), ("cnn_with_dropout", "aten")])
def test_measuring_runs_every_node_and_changes_nothing(
    name: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, arguments = program_of(name, lowering)
    graph = kernels_of(program)
    before = [argument.clone() for argument in arguments]
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(_measured, "probe_link", lambda device: LinkRates(4.0, 5.0, 2.0, 2.5, 0.25))
    profile = measured(graph, arguments, tell=lambda *progress: told.append(progress))
    assert all(torch.equal(a, b) for a, b in zip(arguments, before, strict=True))
    assert told[-1] == (len(graph.steps) * (1 + NUM_PASSES),) * 2
    assert profile.source == "measured"
    assert all(node.seconds > 0 for node in profile.nodes)
    assert [node.name for node in profile.nodes] == [step.node.name for step in graph.steps]
    assert all(node.is_repeatable == (not node.changes) for node in profile.nodes)
    for tensor in profile.tensors:
        alone = (tensor.swap_out_seconds, tensor.swap_in_seconds)
        both = (tensor.swap_out_duplex_seconds, tensor.swap_in_duplex_seconds)
        assert (*alone, *both) == tuple(0.25 + tensor.size_bytes / rate for rate in (4, 5, 2, 2.5))


@pytest.mark.parametrize(("name", "lowering"), [("cnn_with_dropout", "inductor"), (DEEP, "aten")])
def test_the_values_are_those_of_the_program(name: str, lowering: str) -> None:
    """Swapped out and back on the way, and yet the same losses, bit for bit."""
    program, arguments = program_of(name, lowering)
    with torch.no_grad():
        expected = program.module(*arguments)
    graph = kernels_of(program)
    run = Pass(graph, arguments, run_into, handed_over(graph), swaps=True)
    (output,) = graph.module.graph.find_nodes(op="output")
    kept = set(output.all_input_nodes)
    run._last_use = {
        rank: [node for node in nodes if node not in kept] for rank, nodes in run._last_use.items()
    }
    num_away = 0
    for rank, step in enumerate(graph.steps):
        run.prepare(rank, step)
        run.run(step)
        run.release(rank, step)
        num_away = max(num_away, len(run._host))
    got = [run._value(node) for node in output.args[0]]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert num_away > 1
    assert not run._host  # everything that was sent away was needed again


def test_a_step_larger_than_the_device_can_be_measured() -> None:
    """With feature maps away between the passes, far fewer bytes are there at a time."""
    program, arguments = program_of(DEEP, "aten")
    graph = kernels_of(program)

    def peak(*, swaps: bool) -> int:
        run, most = Pass(graph, arguments, run_into, handed_over(graph), swaps=swaps), 0
        for rank, step in enumerate(graph.steps):
            run.prepare(rank, step)
            run.run(step)
            held = {storage._cdata: storage.nbytes() for storage in run._storages.values()}
            given = {argument.untyped_storage()._cdata for argument in arguments}
            for value in _tensors(run._values.values()):
                storage = value.untyped_storage()
                if storage._cdata not in given:
                    held[storage._cdata] = storage.nbytes()
            most = max(most, sum(held.values()))
            run.release(rank, step)
        assert not run._storages  # nothing that is no longer needed is held
        return most

    whole = peak(swaps=False)
    assert whole <= 1.1 * most_live(graph)
    assert peak(swaps=True) < 0.8 * whole


def most_live(graph: KernelGraph) -> int:
    """The most bytes of what a step makes that are needed at once."""
    steps, tensors = graph.steps, graph.tensors
    made = {number: rank for rank, step in enumerate(steps) for number in step.creates}
    last = {n: rank for rank, step in enumerate(steps) for n in (*step.reads, *step.creates, *step.changes)}
    return max(
        sum(tensors[number].size_bytes for number, begin in made.items() if begin <= rank <= last[number])
        for rank in range(len(steps))
    )


def _tensors(values: Iterable[object]) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, Tensor)]


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


def test_of_nodes_that_are_alike_another_one_is_measured_in_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, arguments = program_of(DEEP, "aten")
    graph = kernels_of(program)
    groups = alike(graph)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(len(graph.steps)))
    assert max(map(len, groups)) >= NUM_PASSES
    ran: list[fx.Node] = []
    original = Pass.run

    def run(self: Pass, step: KernelStep) -> None:
        ran.append(step.node)
        original(self, step)

    monkeypatch.setattr(Pass, "run", run)
    count = 0

    def measure(self: object, work: Callable[[], None], head_start_seconds: float) -> Sample:
        nonlocal count
        work()
        count += 1
        return Sample(float(graph_rank[ran[-1]] + 1))

    graph_rank = {step.node: rank for rank, step in enumerate(graph.steps)}
    monkeypatch.setattr(_HostClock, "measure", measure)
    profile = measured(graph, arguments)
    assert len(ran) == (1 + NUM_PASSES) * len(graph.steps)  # all run, or the next ones had nothing to read
    assert count == NUM_PASSES * len(groups)
    for ranks in groups:
        expected = statistics.median(ranks[number % len(ranks)] + 1.0 for number in range(1, 1 + NUM_PASSES))
        assert {profile.nodes[rank].seconds for rank in ranks} == {expected}


def test_what_two_operands_share_and_where_they_begin_sets_nodes_apart() -> None:
    def calls(x: Tensor, y: Tensor) -> list[Tensor]:
        halves = [x[:4] + y[:4], x[4:] + y[4:], x[1:5] + y[1:5]]
        return [x + y, y + x, x + x, y + y, *halves, x * 2.0, y * 3.0]

    module = make_fx(calls, tracing_mode="fake")(torch.zeros(8), torch.zeros(8))
    for node in module.graph.nodes:
        node.meta["phase"] = Phase.FORWARD
    graph = read_kernels(module, [ByteClass.BATCH, ByteClass.BATCH])
    assert len(graph.steps) == 9
    assert alike(graph) == [[0, 1], [2], [3, 4], [5, 6], [7], [8]]


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


def test_a_device_of_one_s_own_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(OWN))
    assert Device.load(path) == Device(**OWN)
    assert Device.load(path).facts == DeviceFacts("mine", 8 * 10**9, 10**9)


@pytest.mark.parametrize(
    "written",
    [
        "{",
        "[]",
        json.dumps({**OWN, "price": 1}),
        json.dumps({**OWN, "link": 0}),
        json.dumps({**OWN, "link": "fast"}),
        json.dumps({**OWN, "bandwidth": float("nan")}),
        json.dumps({**OWN, "memory_bytes": 1.5}),
        json.dumps({**OWN, "name": ""}),
        None,
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
    assert (find_device("v100").host_bytes, find_device("a100").host_bytes) == (96 * 10**9, 144 * 10**9)
    for wrong in ("", "b300", "a100-80gb", "00"):
        with pytest.raises(ConfigError, match=r"expected one of .*a100-40gb"):
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
