"""Fleets in several threads: each trains as it would alone, and torch is afterwards as it was before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch._dynamo.eval_frame
import torch.nn.functional as F
import torch.utils.checkpoint
from benchmarks.workloads.seeding import seeded
from fleet_cases import mse, sgd
from torch import Tensor, fx, nn

import trainmux as tm
from trainmux.errors import TraceError

aten = torch.ops.aten
Batch = tuple[Tensor, Tensor]


def bags() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum", sparse=True), nn.Linear(4, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Tanh(), nn.Linear(4, 2))


def inputs(kind: Callable[[], nn.Module]) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if kind is bags:
        return torch.randint(0, 10, (6, 3), generator=generator)
    return torch.randn((6, 3), generator=generator, dtype=torch.float64)


def members(kind: Callable[[], nn.Module]) -> list[tm.Member]:
    return [sgd(seeded(kind)(seed).double(), f"m{seed}") for seed in range(2)]


def trained(group: list[tm.Member], x: Tensor) -> tuple[list[Tensor], dict[str, Any]]:
    batch = (x, torch.ones(len(x), 2, dtype=torch.float64))
    fleet = tm.Fleet(group, loss=mse, example_batch=batch)
    losses = [fleet.step(batch).clone() for _ in range(2)]
    scores = fleet.evaluate([batch])
    fleet.sync()
    states = [value.clone() for member in group for value in member.model.state_dict().values()]
    return [*losses, *states], scores


def patched_by_tracing() -> dict[str, Any]:
    """Everything of torch's and Python's that a trace changes, by what it is now."""
    owners: list[tuple[Any, tuple[str, ...]]] = [
        (F, ("embedding", "embedding_bag")),
        (nn.modules.batchnorm._BatchNorm, ("forward",)),
        (nn.RNNBase, ("flatten_parameters",)),
        (nn.Module, ("__call__", "__getattr__", "__setattr__")),
        (torch.compiler, ("_is_compiling_flag",)),
        (torch._dynamo.eval_frame, ("_stance",)),
        (torch.utils.checkpoint, ("_checkpoint_without_reentrant_generator", "CheckpointFunction")),
        (fx.proxy, ("CapturedTraceback",)),
        (fx.proxy.TracerBase, ("_filter_traceback_frames", "create_node")),
        (fx._symbolic_trace, ("_new_patcher", "_is_fx_tracing_flag", "CURRENT_PATCHER")),
        (fx.experimental.proxy_tensor, ("_CURRENT_MAKE_FX_TRACER",)),
        (fx._lazy_graph_module, ("_use_lazy_graph_module_flag",)),
        (torch._decomp.decompositions, ("lstm_cell", "_rnn_helper", "select_one_layer_lstm_function")),
        (torch._higher_order_ops.effects, ("has_effects",)),
        (torch.distributions.Distribution, ("_validate_args",)),
    ]
    found = {f"{owner}.{name}": getattr(owner, name, None) for owner, names in owners for name in names}
    for packet in (aten.batch_norm, aten.layer_norm, aten.scaled_dot_product_attention, aten.embedding_bag):
        for overload in packet.overloads():
            found[f"{packet}.{overload}"] = dict(getattr(packet, overload).py_kernels)
    functorch: Any = torch._C._functorch
    return found | {
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "loops of vmap": functorch._is_vmap_fallback_enabled(),
        "tensors of numbers": torch._C._only_lift_cpu_tensors(),
        "filters": list(warnings.filters),
    }


def in_threads(work: list[Callable[[], Any]]) -> list[Any]:
    """What each returns, run at the same time; the first error of any is raised here."""
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(each) for each in work]]


def test_fleets_train_in_several_threads_as_in_one_beside_a_trace_that_fails() -> None:
    """And torch is as it was before."""

    def fails(model: nn.Module, batch: Batch) -> Tensor:
        raise ValueError("in the loss")

    def attempt() -> None:
        with pytest.raises(TraceError, match="in the loss"):
            tm.Fleet(members(normed), loss=fails, example_batch=(inputs(normed), torch.ones(6, 2)))

    kinds: list[Callable[[], nn.Module]] = [bags, normed]
    alone = [trained(members(kind), inputs(kind)) for kind in kinds]
    groups = [members(kind) for kind in kinds]
    before = patched_by_tracing()
    beside = in_threads(
        [
            *(
                lambda group=group, kind=kind: trained(group, inputs(kind))  # type: ignore[misc]
                for group, kind in zip(groups, kinds, strict=True)
            ),
            attempt,
        ]
    )
    assert patched_by_tracing() == before
    for (tensors, scores), (other_tensors, other_scores) in zip(alone, beside[:2], strict=True):
        assert all(map(torch.equal, tensors, other_tensors))
        assert scores == other_scores


# Torch says on stderr that ``vmap`` loops, from 2.15 on in a warning.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_plain_code_in_another_thread_does_not_notice_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first torch.compile of a process switches these checks off for all of it.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()  # a dict would be put back as it was after the trace
    calls = (nn.Module.__call__, nn.Module.__getattr__)

    def plain() -> None:
        seen: dict[str, Any] = {}
        bag = nn.EmbeddingBag(10, 4, mode="sum", sparse=True)
        bag(torch.tensor([[1, 2]])).sum().backward()
        seen["sparse gradient"] = bag.weight.grad is not None and bag.weight.grad.is_sparse
        norm = nn.BatchNorm1d(3, momentum=None)
        norm(torch.randn(4, 3))
        seen["plain batch norm"] = norm.num_batches_tracked is not None and bool(norm.num_batches_tracked)
        seen["not compiling"] = torch.compiler.is_compiling() == False  # noqa: E712
        seen["modules"] = (nn.Module.__call__, nn.Module.__getattr__) == calls
        nodes = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).graph.nodes
        seen["another tracer"] = [node.op for node in nodes][1:-1] == ["call_module"] * 2
        seen["library for products"] = torch._C._get_mkldnn_enabled()
        x = torch.randn(3, requires_grad=True)
        again = torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True)
        again.sum().backward()
        seen["checkpoint"] = x.grad is not None and torch.equal(x.grad, x.detach().cos())
        looped = torch.vmap(lambda row: aten.histc.default(row, 4, 0.0, 1.0))(torch.rand(2, 5))
        seen["vmap"] = tuple(looped.shape) == (2, 4)
        with pytest.raises(ValueError, match="scale"):
            torch.distributions.Normal(0.0, -1.0)
        with pytest.raises(UserWarning, match="heard"):
            warnings.warn("heard", UserWarning, stacklevel=1)
        told.put(seen)

    def watched(model: nn.Module, batch: Batch) -> Tensor:
        if told.empty():
            in_threads([plain])
        assert torch.compiler.is_compiling()
        return mse(model, batch)

    batch = (inputs(bags), torch.ones(6, 2, dtype=torch.float64))
    before = patched_by_tracing()
    tm.Fleet(members(bags), loss=watched, example_batch=batch)
    seen = told.get()
    assert all(seen.values()), seen
    assert len(seen) == 8
    assert patched_by_tracing() == before
