"""Programs of small workloads, lowered but not compiled: regions run through ATen until they are.

Compiling takes a second or two for each kernel. Nearly everything that lowering does can be seen without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.workloads import Workload
from benchmarks.workloads.seeding import seeded, seeded_generator
from short_workloads import SHORT, member_of
from torch import Tensor, fx, nn

import trainmux as tm
import trainmux.fleet._build as build_module
import trainmux.lowering._lower as lower_module
from trainmux.lowering import Kernel, KernelCache, Lowered
from trainmux.lowering._partition import Cut
from trainmux.lowering._regions import Extractor, RegionGraph
from trainmux.tracing import make_fx, static_fake_mode


class Mixed(nn.Module):
    """Images, pools, dropout and bags of words in one short graph: a kernel takes seconds to compile.

    One pool is without overlap, one with overlap and padding. Parameters of one size share kernels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2)
        self.pools = nn.Sequential(nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1))
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(8 + 4, 4, bias=False)
        self.bag = nn.EmbeddingBag(12, 4, mode="sum")

    def forward(self, images: Tensor, words: Tensor, begins: Tensor) -> Tensor:
        seen = self.drop(self.pools(self.norm(self.conv(images)).relu())).flatten(1)
        return self.last(torch.cat([seen, self.bag(words, begins)], 1))  # type: ignore[no-any-return]


def _mixed_batch(seed: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = seeded_generator(seed)
    images = torch.randn(4, 1, 8, 8, generator=generator, dtype=dtype)
    words, labels = (torch.randint(most, (n,), generator=generator) for most, n in ((12, 12), (4, 4)))
    return images, words, torch.tensor([0, 2, 5, 9]), labels


def _mixed_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(*batch[:-1]), batch[-1])


MIXED = Workload("mixed", seeded(Mixed), _mixed_loss, _mixed_batch)

_MORE = ("mlp", "gpt2", "mobilenet", "bottleneck", "lstm", "cnn_with_dropout", "dlrm")
_HALVES = ("cnn_with_dropout", "transformer_with_dropout", "gpt2")
CASES: list[Any] = [
    (MIXED, "fp64"),
    (SHORT["transformer_with_dropout"], "fp64"),
    (MIXED, "bf16"),
    *(pytest.param(SHORT[name], "fp64", marks=pytest.mark.extensive) for name in _MORE),
    *(pytest.param(SHORT[name], "bf16", marks=pytest.mark.extensive) for name in _HALVES),
]
"""Workload and precision; fp32 lies between the two, and end-to-end tests run it."""


class UncompiledCache(KernelCache):
    """Kernels that stay on ATen."""

    def compile_batches(self, batches: Iterable[Iterable[Kernel]]) -> None:
        for _ in batches:
            pass

    def fill(self, kernels: Iterable[Kernel]) -> Callable[[], None]:
        return lambda: None


@functools.cache
def _uncompiled(deterministic: bool) -> UncompiledCache:
    return UncompiledCache(deterministic=deterministic)


def leave_uncompiled(patch: pytest.MonkeyPatch) -> None:
    """Fleets lower their programs from here on, but compile nothing; equal regions of all tests are one."""
    patch.setattr(build_module, "_kernels", _uncompiled)


def members_of(workload: Workload, num_members: int, dtype: torch.dtype = torch.float32) -> list[tm.Member]:
    """With AdamW whose settings depend on the member.

    A large eps: some gradients are zero but for rounding (a bias before batch norm), and the update must not
    make a whole step out of them.
    """
    return [
        member_of(workload, number, dtype, lr=1e-2 * (number + 1), eps=1e-2, weight_decay=0.1 * number)
        for number in range(num_members)
    ]


def fleet_of(workload: Workload, lowering: str, **options: Any) -> tm.Fleet:
    dtype = torch.float64 if options.get("precision") == "fp64" else torch.float32
    batch = workload.batch(0, torch.float32)
    return tm.Fleet(members_of(workload, 2, dtype), workload.loss, batch, lowering=lowering, **options)


def trained(workload: Workload, fleet: tm.Fleet, num_steps: int = 2) -> dict[str, Tensor]:
    """Losses, metrics, weights and optimizer state after a few steps."""
    found: dict[str, Tensor] = {}
    for step in range(num_steps):
        found[f"loss {step}"] = fleet.step(workload.batch(step, torch.float32))
        found |= {f"{name} {step}": value for name, value in fleet.metrics.items()}
    fleet.sync()
    for name, member in zip(fleet.names, fleet.members, strict=True):
        found |= {f"{name} {key}": value.detach() for key, value in member.model.state_dict().items()}
        for number, state in enumerate(member.optimizer.state.values()):
            found |= {f"{name} {number} {key}": torch.as_tensor(value) for key, value in state.items()}
    return found


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> None:
    """Apart by no more than a share of each tensor's largest value, or of one where all are small."""
    assert got.keys() == expected.keys()
    errors = {name: apart(got[name], expected[name]) for name in expected}
    too_far = {name: error for name, error in errors.items() if not error <= share}
    assert not too_far, too_far


def apart(got: Tensor, expected: Tensor) -> float:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if expected.numel() == 0 or torch.equal(got, expected):
        return 0.0
    wide = expected.double()
    return float((got.double() - wide).abs().max() / max(1.0, float(wide.abs().max())))


# ---- programs ------------------------------------------------------------------------------------------


def regions_of(graph: fx.Graph, cut: Cut) -> list[RegionGraph]:
    """In the order in which they run."""
    extractor = Extractor(graph, cut)
    return [extractor.region(piece) for piece in cut.pieces if not cut.is_library(piece)]


@dataclass(frozen=True)
class Example:
    """A step of a workload: through ATen, as it was cut, lowered; and the arguments of its first run."""

    on_aten: nn.Module
    whole: fx.GraphModule
    lowered: Lowered
    source: fx.Graph
    cut: Cut
    arguments: tuple[Tensor, ...]

    def regions(self) -> list[RegionGraph]:
        return regions_of(self.source, self.cut)

    def run(self, module: nn.Module, num_runs: int = 2) -> dict[str, Tensor]:
        """Results of each run in a row, and all arguments afterwards."""
        arguments = [copied(argument) for argument in self.arguments]
        found: dict[str, Tensor] = {}
        with torch.no_grad():
            for run in range(num_runs):
                found |= {f"run {run} result {i}": value for i, value in enumerate(module(*arguments))}
        return found | {f"argument {i}": value for i, value in enumerate(arguments)}


def example_of(workload: Workload, precision: str = "fp32", **options: Any) -> Example:
    """Lower a workload's step for two members."""
    cuts: list[tuple[fx.Graph, Cut]] = []
    modules: list[tuple[fx.GraphModule, Lowered]] = []
    original_cut, original_lower = lower_module.cut, build_module.lower

    def cut(graph: fx.Graph, **options: bool) -> Cut:
        cuts.append((graph, original_cut(graph, **options)))
        return cuts[-1][1]

    def lower(module: fx.GraphModule, cache: KernelCache, **options: bool) -> Lowered:
        modules.append((module, original_lower(module, cache, **options)))
        return modules[-1][1]

    fleet = fleet_of(workload, "aten", precision=precision, **options)
    (group,) = fleet._groups
    (program,) = group.programs.kept.values()
    group.push_numbers()
    fed = fleet._feed.for_groups(workload.batch(0, torch.float32), {}, [group], fleet.names)[0]
    arguments = group.arguments(program, [leaf.to(torch.device("cpu")) for leaf in fed.leaves])
    with pytest.MonkeyPatch.context() as patch:
        leave_uncompiled(patch)
        patch.setattr(lower_module, "cut", cut)
        patch.setattr(build_module, "lower", lower)
        group.sub_array_program(2, kernels="lowered")
    return Example(program.module, *modules[0], *cuts[0], tuple(map(copied, arguments)))


def copied(tensor: Tensor) -> Tensor:
    """In other memory, laid out alike."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def traced(function: Callable[..., Any], *tensors: Tensor) -> fx.GraphModule:
    """A function's graph over fakes of ``tensors``, as lowering sees it."""
    mode = static_fake_mode()
    with mode, torch.no_grad():
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in tensors]
        module: fx.GraphModule = make_fx(function)(*fakes)
    return module
