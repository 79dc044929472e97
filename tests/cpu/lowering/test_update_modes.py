"""Bucketed and immediate updates: bit for bit those of the deferred one, on ATen, lowered and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lowering_tools
import pytest
import torch
from benchmarks.workloads import Workload
from lowering_tools import compile_afresh, example_of, fleet_of, leave_uncompiled, trained
from short_workloads import SHORT
from torch import Tensor, nn

from trainmux.engine import _units
from trainmux.ir import ByteClass, Phase
from trainmux.lowering._kinds import base_of, changes
from trainmux.lowering._regions import from_payload, to_payload
from trainmux.profiling import read_kernels

pytestmark = pytest.mark.usefixtures("traced_once")

OPTIMIZERS: dict[str, Callable[[nn.Module, int], torch.optim.Optimizer]] = {
    "heavy ball": lambda m, i: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, dampening=0.1 * i),
    "nesterov": lambda m, i: torch.optim.SGD(
        m.parameters(), lr=1e-2, momentum=0.8 + 0.1 * i, nesterov=True, weight_decay=0.1
    ),
    "adam": lambda m, i: torch.optim.Adam(
        m.parameters(), lr=1e-2 * (i + 1), weight_decay=0.1, maximize=i > 0
    ),
    "adamw with amsgrad": lambda m, i: torch.optim.AdamW(m.parameters(), lr=1e-2 * (i + 1), amsgrad=True),
    "rmsprop": lambda m, i: torch.optim.RMSprop(
        m.parameters(), lr=1e-2 * (i + 1), centered=True, momentum=0.5
    ),
    "adagrad": lambda m, i: torch.optim.Adagrad(m.parameters(), lr=1e-2 * (i + 1), lr_decay=0.1),
    "adadelta": lambda m, i: torch.optim.Adadelta(m.parameters(), lr=0.5 * (i + 1)),
    "two groups": lambda m, i: torch.optim.AdamW(
        [
            {"params": [p for p in m.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in m.parameters() if p.dim() <= 1], "lr": 1e-3 * (i + 1)},
        ]
    ),
}


@pytest.fixture(autouse=True)
def small_models_have_all_kinds_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large parameters and small ones, and more than one bucket."""
    monkeypatch.setattr(_units, "SMALL", 100)
    monkeypatch.setattr(_units, "MOST_TOGETHER", 3)
    monkeypatch.setattr(_units, "MAX_BUCKET", 4000)


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(got[name], value)] == []


def outcome(workload: Workload, lowering: str, update: str, **options: Any) -> dict[str, Tensor]:
    return trained(workload, fleet_of(workload, lowering, update=update, **options), 2)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("dlrm", "fp32"),  # tables that are updated by rows
        ("cnn_with_dropout", "bf16"),  # buffers
        pytest.param("lstm", "fp32", marks=pytest.mark.extensive),
        pytest.param("transformer_with_dropout", "fp32", marks=pytest.mark.extensive),
    ],
)
def test_every_workload_trains_to_the_same_bits(
    name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_uncompiled(monkeypatch)
    expected = outcome(SHORT[name], "inductor", "deferred", precision=precision)
    for update in ("bucketed", "immediate"):
        assert_same(outcome(SHORT[name], "inductor", update, precision=precision), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through ATen an update is never in buckets."""
    leave_uncompiled(monkeypatch)
    monkeypatch.setattr(lowering_tools, "optimizer_of", OPTIMIZERS[name])
    workload = SHORT["mlp"]
    assert_same(outcome(workload, "aten", "immediate"), outcome(workload, "aten", "deferred"))
    assert_same(outcome(workload, "inductor", "bucketed"), outcome(workload, "inductor", "deferred"))


def test_compiled_updates_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_afresh(monkeypatch)
    monkeypatch.setattr(lowering_tools, "optimizer_of", OPTIMIZERS["adamw with amsgrad"])
    expected = outcome(SHORT["mlp"], "inductor", "deferred")
    for update in ("bucketed", "immediate"):
        got = outcome(SHORT["mlp"], "inductor", update)
        # The norm over all gradients is added up by other kernels; here it changes nothing.
        norms = [key for key in expected if key.startswith("grad_norm")]
        for key in norms:
            torch.testing.assert_close(got.pop(key), expected[key])
        assert_same(got, {key: value for key, value in expected.items() if key not in norms})


def test_a_bucket_is_one_region_that_is_compiled_to_few_kernels() -> None:
    deferred, bucketed = (
        example_of(SHORT["mlp"], update=update).regions() for update in ("deferred", "bucketed")
    )

    def num_updates(regions: Any) -> int:
        return sum(region.body[-1].meta["phase"] is Phase.UPDATE for region in regions)

    assert num_updates(bucketed) < num_updates(deferred)
    assert not any(region.is_bucket for region in deferred)
    marked = [region for region in bucketed if region.is_bucket]
    assert marked
    for region in bucketed:
        changed = [base_of(node).name for node in map(changes, region.body) if node is not None]
        num_parameters = sum(name.endswith("_exp_avg") for name in changed)
        assert region.is_bucket == (num_parameters > 1)
    for region in marked:
        assert region.combines
        sent = from_payload(to_payload(region))
        assert (sent.is_bucket, sent.combines, sent.key()) == (True, True, region.key())
        region.body[-1].meta["bucket"] = False
        assert sent.key() != region.key()


@pytest.mark.parametrize(
    "name", ["cnn_with_dropout", "lstm", pytest.param("dlrm", marks=pytest.mark.extensive)]
)
def test_no_parameter_is_read_after_its_immediate_update(name: str) -> None:
    case = example_of(SHORT[name], update="immediate")
    for graph in (case.whole, case.lowered.module):
        classes = [ByteClass.PARAMETER] * len(graph.graph.find_nodes(op="placeholder"))
        steps = read_kernels(graph, classes).steps
        last_backward = max(rank for rank, step in enumerate(steps) if step.phase is Phase.BACKWARD)
        written: set[int] = set()
        for step in steps:
            if step.phase is Phase.UPDATE:
                written |= set(step.changes)
            else:
                assert not written & {*step.reads, *step.changes}
        early = [rank for rank, step in enumerate(steps) if step.phase is Phase.UPDATE and step.changes]
        # All of a recurrent layer's gradients come with its first step, the last in the backward pass.
        assert early[0] < last_backward or name == "lstm"
