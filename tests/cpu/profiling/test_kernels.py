"""A program as kernels over storages: classes, phases, and proof that order and storages are right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from profiled import kernels_of, program_of, traced, traced_kernels
from torch import Tensor, nn

from trainmux.ir import ByteClass, Multiplexing, Phase, Schedule, verify
from trainmux.lowering import extended_product, lower
from trainmux.lowering._compile import KernelCache
from trainmux.planning import rewrite
from trainmux.profiling import KernelGraph, _kernels, analytic_profile, find_device, read_kernels

pytestmark = pytest.mark.usefixtures("built_once")


@pytest.mark.parametrize(
    ("name", "lowering"),
    [
        ("cnn_with_dropout", "aten"),
        ("mlp", "inductor"),
        pytest.param("dlrm", "inductor", marks=pytest.mark.extensive),
    ],
)
def test_a_program_in_its_own_order_is_proved(name: str, lowering: str) -> None:
    program, arguments = program_of(name, lowering)
    graph = kernels_of(program)
    phases = [step.phase for step in graph.steps]
    assert phases == sorted(phases, key=list(Phase).index)
    assert set(phases) == set(Phase)
    assert {step.phase for step in graph.steps if step.changes} == {Phase.UPDATE}
    profile = analytic_profile(graph, 2, find_device("a100"), half=False)
    order = tuple((0, rank) for rank in range(len(profile.nodes)))
    planned = rewrite([profile], Schedule(Multiplexing.TURNS, order, (), ()))
    verify(planned, [profile], budget_bytes=planned.slab_bytes)

    by_class = {kind: [t for t in graph.tensors if t.byte_class is kind] for kind in ByteClass}
    assert len(by_class[ByteClass.OPTIMIZER_STATE]) == 2 * len(program.settings.parameters)
    learning = (ByteClass.PARAMETER, ByteClass.OPTIMIZER_STATE)
    classes = program.byte_classes()
    given = sum(a.nbytes for a, kind in zip(arguments, classes, strict=True) if kind in learning)
    read = sum(tensor.size_bytes for kind in learning for tensor in by_class[kind])
    assert given <= read <= 1.2 * given  # members are padded to 16 bytes
    # Every parameter has a gradient that the update reads, and the update writes every parameter and state.
    assert len(by_class[ByteClass.GRADIENT]) >= len(program.settings.parameters) / 2
    changed = {number for step in graph.steps for number in step.changes}
    for number, tensor in enumerate(graph.tensors):
        if tensor.byte_class in learning:
            assert number in changed, tensor.name
    assert by_class[ByteClass.FEATURE_MAP]
    assert len(by_class[ByteClass.RESULT]) >= 3


def convolved(
    *, size: int = 16, dilation: int = 1, channels_last: bool = False, dtype: torch.dtype = torch.float32
) -> KernelGraph:
    """One convolution of 8 channels whose result has the size of its input."""
    given = torch.empty(2, 8, size, size, dtype=dtype)
    weight = torch.empty(8, 8, 3, 3, dtype=dtype)
    if channels_last:
        given = given.to(memory_format=torch.channels_last)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return nn.functional.conv2d(x, w, padding=dilation, dilation=dilation)

    return traced_kernels(function, given, weight)


def test_kernels_that_only_differ_in_their_arguments_have_other_fingerprints() -> None:
    """All of these touch storages of the same sizes, but do not take the same time."""
    plain = convolved()
    assert plain.steps[0].work.flops == 2 * (2 * 8 * 16 * 16) * (8 * 3 * 3)
    assert plain.fingerprint() == convolved().fingerprint()
    assert plain.fingerprint(layouts=True) == convolved().fingerprint(layouts=True)
    assert plain.fingerprint() != convolved(dilation=2).fingerprint()
    last = convolved(channels_last=True)
    assert plain.fingerprint(layouts=True) != last.fingerprint(layouts=True)
    assert plain.fingerprint() != convolved(size=8).fingerprint()
    by_type = {convolved(dtype=dtype).fingerprint() for dtype in (torch.float16, torch.bfloat16)}
    assert len(by_type) == 2


def test_views_are_no_tensors_and_no_nodes() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x.t() @ y.view(4, 3))[1:].transpose(0, 1).relu()

    graph = traced_kernels(function, torch.empty(4, 5), torch.empty(12))
    assert [str(step.node.target) for step in graph.steps] == ["aten.mm.default", "aten.relu.default"]
    assert [step.reads for step in graph.steps] == [(0, 1), (2,)]
    assert [tensor.size_bytes for tensor in graph.tensors] == [80, 48, 60, 48]
    assert graph.tensors[3].byte_class is ByteClass.RESULT
    assert graph.steps[0].work.flops == 2 * 5 * 4 * 3


def test_what_is_changed_in_place_is_no_new_tensor() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y)
        x[0].mul_(2)
        return x + 1

    graph = traced_kernels(function, torch.empty(4, 5), torch.empty(4, 5))
    assert [step.changes for step in graph.steps] == [(0,), (0,), ()]
    assert [step.reads for step in graph.steps] == [(1,), (), (0,)]
    assert [step.creates for step in graph.steps] == [(), (), (2,)]


def test_a_value_is_conjugated_or_negated_as_its_view_is() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.conj() * x, torch._neg_view(x) * x

    module = traced(function, torch.empty(3, dtype=torch.complex64))
    graph = read_kernels(module, [ByteClass.BATCH])
    x = torch.tensor([1 + 2j, 3 - 4j, 5j])
    for target, expected in [(torch.ops.aten._conj, x.conj()), (torch.ops.aten._neg_view, -x)]:
        (view,) = module.graph.find_nodes(op="call_function", target=target.default)
        assert torch.equal(graph.values[view].look(x.view(torch.uint8)), expected)


def test_a_region_says_what_it_changes() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(y.relu())
        return y * 2

    lowered = lower(traced(function, torch.empty(4, 5), torch.empty(4, 5)), KernelCache())
    graph = read_kernels(lowered.module, [ByteClass.PARAMETER, ByteClass.BATCH])
    assert {number for step in graph.steps for number in step.changes} == {0}
    assert all(0 not in step.reads for step in graph.steps if 0 in step.changes)


def test_a_fingerprint_is_of_nothing_that_another_process_has_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans and profiles are kept by it: no address is part of it, even where products are extended."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x.relu() @ w.relu()).sum()

    module = lower(traced(function, torch.empty(8, 257), torch.empty(257, 16)), KernelCache()).module
    assert any(node.target is extended_product for node in module.graph.nodes)
    hashed: list[bytes] = []

    class Recorded:
        update = staticmethod(hashed.append)
        hexdigest = staticmethod(lambda: "")

    monkeypatch.setattr(_kernels, "hashlib", SimpleNamespace(sha256=Recorded))
    read_kernels(module, [ByteClass.BATCH, ByteClass.PARAMETER]).fingerprint(layouts=True)
    assert hashed
    assert not [line for line in hashed if b" at 0x" in line]


def test_a_view_has_the_strides_that_it_has_when_it_is_run() -> None:
    """Filters of one channel of two members: a trace has (9, 1, 3, 1), which is channels last."""
    given = torch.empty_strided((2, 16, 1, 3, 3), (144, 9, 1, 3, 1))
    graph = traced_kernels(lambda x: x.view(32, 1, 3, 3).relu(), given)
    (step,) = graph.steps
    assert graph.values[step.node.args[0]].strides == given.view(32, 1, 3, 3).stride() == (9, 9, 3, 1)
