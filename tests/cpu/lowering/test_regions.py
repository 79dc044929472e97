"""Regions: keys that tell structures apart, bytes that mean the same region, kernels that fit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from lowering_tools import CASES, example, example_of, traced
from test_partition import deep_mlp
from torch import Tensor, fx

from trainmux.lowering import KernelCache, lower
from trainmux.lowering._compile import Kernel
from trainmux.lowering._lower import Conform
from trainmux.lowering._partition import cut
from trainmux.lowering._regions import Extractor, RegionGraph, TensorSpec, from_payload, spec_of, to_payload

aten = torch.ops.aten
CPU = torch.device("cpu")


def regions_of(graph: fx.Graph) -> list[RegionGraph]:
    found = cut(graph)
    extractor = Extractor(graph, found)
    return [extractor.region(piece) for piece in found.pieces if not found.is_library(piece)]


def only_region(module: fx.GraphModule) -> RegionGraph:
    (region,) = regions_of(module.graph)
    return region


def filled(spec: TensorSpec, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
    if spec.dtype.is_floating_point:
        return tensor.copy_(torch.rand(spec.shape, generator=generator, dtype=torch.float64))
    return tensor.copy_(torch.randint(0, 2, spec.shape, generator=generator))


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_region_survives_being_sent(name: str, precision: str) -> None:
    for region in example(name, precision).regions():
        again = from_payload(to_payload(region))
        assert again.key() == region.key()
        assert again.combines == region.combines


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_a_program_has_one_kernel_for_each_key(name: str, precision: str) -> None:
    case = example(name, precision)
    keys = [region.key() for region in case.regions()]
    assert len(keys) == case.lowered.num_regions
    assert {kernel.key for kernel in case.lowered.kernels} == set(keys)
    assert len(case.lowered.kernels) == len(set(keys))


def test_regions_of_one_key_compute_the_same() -> None:
    alike: dict[str, list[RegionGraph]] = defaultdict(list)
    for region in example_of(deep_mlp(4)).regions():
        alike[region.key()].append(region)
    pairs = [found for found in alike.values() if len(found) > 1]
    assert len(pairs) >= 2, "expected the layers of an MLP to share kernels"
    for regions in pairs:
        results = []
        for region in (regions[0], regions[-1]):
            specs = [*region.input_specs, *region.placed_specs()]
            tensors = [filled(spec, seed) for seed, spec in enumerate(specs)]
            results.append([*Kernel("", region).run(list(tensors)), *tensors])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def scaled(factor: float, shape: tuple[int, ...] = (4, 6)) -> RegionGraph:
    return only_region(traced(lambda x: (x * factor).relu(), torch.zeros(shape)))


def test_keys_tell_structures_apart() -> None:
    assert scaled(2.0).key() == scaled(2.0).key()
    others = [
        scaled(3.0),
        scaled(2.0, (6, 4)),
        only_region(traced(lambda x: (x * 2.0).relu(), torch.zeros(6, 4).t())),
        only_region(traced(lambda x: (x * 2.0).relu(), torch.zeros(4, 6, dtype=torch.float64))),
        only_region(traced(lambda x: (x * 2.0).tanh(), torch.zeros(4, 6))),
        replace(scaled(2.0), placed=(True,)),
    ]
    assert len({region.key() for region in others} | {scaled(2.0).key()}) == len(others) + 1


def test_a_region_gives_only_what_is_read_elsewhere() -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        hidden = (x * 2).relu()
        return (hidden @ weight) + hidden.sum()

    first, last = regions_of(traced(function, torch.zeros(4, 6), torch.zeros(6, 3)).graph)
    assert [str(node.target) for node in first.outputs] == ["aten.relu.default"]
    assert [str(node.target) for node in last.outputs] == ["aten.add.Tensor"]
    assert "aten.sum.default" in [str(node.target) for node in last.body]


def test_a_placed_output_is_written_into_the_memory_that_is_given() -> None:
    region = replace(scaled(2.0), placed=(True,))
    x, memory = torch.randn(4, 6), torch.zeros(4, 6)
    assert list(Kernel("", region).run([x, memory])) == []
    assert torch.equal(memory, (x * 2).relu())


def test_memory_with_room_around_it_is_zero_beyond_the_shape() -> None:
    spec = TensorSpec((2, 3, 5), (32, 8, 1), torch.float32, CPU, padded=(2, 4, 8))
    tensor = spec.empty()
    assert tensor.shape == spec.shape
    assert tensor.stride() == spec.strides
    around = tensor.as_strided((2, 4, 8), (32, 8, 1))
    tensor.fill_(1.0)
    assert around.sum() == 2 * 3 * 5


def test_a_kernel_that_cannot_be_compiled_stays_on_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainmux.errors import TrainmuxWarning
    from trainmux.lowering import _inductor

    def refuse(*_: object) -> None:
        raise RuntimeError("no compiler today\nand more lines")

    monkeypatch.setattr(_inductor, "compile_graph", refuse)
    cache = KernelCache()
    lowered = lower(traced(lambda x: x.relu() + 1, torch.zeros(4)), cache)
    with pytest.warns(TrainmuxWarning, match="1 of 1 regions could not be compiled.*no compiler today"):
        cache.compile(lowered.kernels)
    (kernel,) = lowered.kernels
    assert kernel.is_settled
    assert not kernel.is_compiled
    cache.compile(lowered.kernels)  # said once
    x = torch.randn(4)
    (result,) = [lowered.module(x)]
    assert torch.equal(result, x.relu() + 1)


def test_equal_regions_of_two_programs_meet_in_the_cache() -> None:
    cache = KernelCache()
    first = lower(traced(lambda x: x.relu() + 1, torch.zeros(4)), cache)
    second = lower(traced(lambda x: x.relu() + 1, torch.zeros(4)), cache)
    assert first.kernels == second.kernels


def test_what_a_region_computes_never_lies_in_memory_once() -> None:
    """Torch 2.11 says so of some results of expanded tensors, which differ from member to member."""
    region = scaled(2.0)
    (node,) = region.outputs
    node.meta["val"] = torch.empty(1, 6, device="meta").expand(4, 6)
    assert spec_of(node).strides == (6, 1)


@pytest.mark.parametrize("strides", [(12, 4, 1), (1, 2, 6)])
def test_results_are_handed_on_in_the_layout_that_was_promised(strides: tuple[int, ...]) -> None:
    spec = TensorSpec((2, 3, 4), strides, torch.float32, CPU)
    result = torch.randn(2, 3, 4)
    (conformed,) = Conform([spec])(result)
    assert conformed.stride() == strides
    assert torch.equal(conformed, result)
