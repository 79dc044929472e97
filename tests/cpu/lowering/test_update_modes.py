"""Bucketed and immediate updates: bit for bit those of the deferred one, on ATen, lowered and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lowering_tools
import pytest
import torch
from benchmarks.workloads import SMALL, Workload
from lowering_tools import TINY, compile_afresh, example_of, fleet_of, leave_uncompiled, trained
from torch import Tensor, nn

from trainmux.engine import _units
from trainmux.ir import ByteClass, Phase
from trainmux.lowering import RegionCall
from trainmux.lowering._kinds import base_of, changes
from trainmux.lowering._regions import from_payload, to_payload
from trainmux.profiling import read_kernels

pytestmark = pytest.mark.usefixtures("traced_once")

Optimizer = Callable[[nn.Module, int], torch.optim.Optimizer]

NAMES = ("mlp", "cnn_with_dropout", "transformer_with_dropout", "dlrm", "lstm")
"""One of each kind: buffers, tied and shared weights, tables that are updated by rows, weights read again and
again."""

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda m, i: torch.optim.SGD(m.parameters(), lr=1e-2 * (i + 1)),
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
    different = [name for name, value in expected.items() if not torch.equal(got[name], value)]
    assert not different


def outcome(workload: Workload, lowering: str, update: str, **options: Any) -> dict[str, Tensor]:
    return trained(workload, fleet_of(workload, lowering, update=update, **options), 2)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.extensive] if name == "transformer_with_dropout" else [])
        for name in NAMES
    ],
)
def test_every_workload_trains_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncompiled(monkeypatch)
    workload = TINY[name]
    expected = outcome(workload, "aten", "deferred")
    assert_same(outcome(workload, "aten", "immediate"), expected)
    lowered = outcome(workload, "inductor", "deferred")
    for update in ("bucketed", "immediate"):
        assert_same(outcome(workload, "inductor", update), lowered)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncompiled(monkeypatch)
    monkeypatch.setattr(lowering_tools, "optimizer_of", OPTIMIZERS[name])
    workload = SMALL["mlp"]
    for lowering in ("aten", "inductor"):
        expected = outcome(workload, lowering, "deferred")
        for update in ("bucketed", "immediate"):
            assert_same(outcome(workload, lowering, update), expected)


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp64", marks=pytest.mark.extensive)])
def test_every_precision_trains_to_the_same_bits(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncompiled(monkeypatch)
    workload = TINY["cnn_with_dropout"]
    expected = outcome(workload, "inductor", "deferred", precision=precision)
    for update in ("bucketed", "immediate"):
        assert_same(outcome(workload, "inductor", update, precision=precision), expected)


@pytest.mark.parametrize(
    "name", ["adamw with amsgrad", pytest.param("nesterov", marks=pytest.mark.extensive)]
)
def test_compiled_updates_have_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_afresh(monkeypatch)
    monkeypatch.setattr(lowering_tools, "optimizer_of", OPTIMIZERS[name])
    workload = SMALL["mlp"]
    expected = outcome(workload, "inductor", "deferred")
    for update in ("bucketed", "immediate"):
        got = outcome(workload, "inductor", update)
        # The norm over all gradients is added up by other kernels; here it changes nothing.
        norms = [key for key in expected if key.startswith("grad_norm")]
        for key in norms:
            torch.testing.assert_close(got.pop(key), expected[key])
        assert_same(got, {key: value for key, value in expected.items() if key not in norms})


def test_a_bucket_is_one_region_that_is_compiled_to_few_kernels() -> None:
    deferred, bucketed = (example_of(TINY["mlp"], update=update) for update in ("deferred", "bucketed"))

    def updates(regions: Any) -> list[Any]:
        return [region for region in regions if region.body[-1].meta["phase"] is Phase.UPDATE]

    marked = [region for region in bucketed.regions() if region.is_bucket]
    assert marked
    for region in bucketed.regions():
        names = {node.meta.get("unit") for node in region.body if changes(node) is not None}
        assert len(names) <= 1
        assert region.is_bucket == (len(parameters_of(region)) > 1)
    assert not any(region.is_bucket for region in deferred.regions())
    assert len(updates(bucketed.regions())) < len(updates(deferred.regions()))
    for region in marked:
        assert region.combines
        again = from_payload(to_payload(region))
        assert again.is_bucket
        assert again.combines
        assert again.key() == region.key()
        region.body[-1].meta["bucket"] = False
        assert again.key() != region.key()


def parameters_of(region: Any) -> set[str]:
    """Names of the parameters that a region updates: it reads first moments of them."""
    names = {base_of(node).name for node in map(changes, region.body) if node is not None}
    return {name for name in names if name.endswith("_exp_avg")}


def named_uses(module: torch.fx.GraphModule) -> list[tuple[Phase | None, set[str], set[str]]]:
    """Of each node that computes: its phase, the arguments that it takes, and those that it changes."""
    source: dict[torch.fx.Node, str] = {}
    found = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            source[node] = node.name
        elif node.op == "call_module":
            called = module.get_submodule(str(node.target))
            taken = [source.get(argument, "") for argument in node.all_input_nodes]
            positions = called.changed if isinstance(called, RegionCall) else ()
            names = [source.get(argument, "") for argument in node.args]
            found.append((node.meta.get("phase"), set(taken), {names[i] for i in positions}))
        elif node.op == "call_function":
            taken = [source.get(argument, "") for argument in node.all_input_nodes]
            found.append((node.meta.get("phase"), set(taken), set()))
            # Whatever is made of an argument alone may be a view of it.
            if len(node.all_input_nodes) == 1 and node.all_input_nodes[0] in source:
                source[node] = source[node.all_input_nodes[0]]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_no_parameter_is_read_after_its_update(name: str) -> None:
    example = example_of(TINY[name], update="immediate")
    changed: set[str] = set()
    num_between = 0
    uses = named_uses(example.lowered.module)
    last_backward = max(place for place, (phase, _, _) in enumerate(uses) if phase is Phase.BACKWARD)
    for place, (phase, taken, written_here) in enumerate(uses):
        if phase in (Phase.FORWARD, Phase.BACKWARD):
            assert not taken & changed - {""}
        changed |= written_here
        num_between += bool(written_here) and place < last_backward
    # All of a recurrent layer's gradients come with its first step, which is the last in the backward pass.
    assert num_between > 0 or name == "lstm"

    # By storages, and node by node.
    graph = example.whole
    kernels = read_kernels(graph, [ByteClass.PARAMETER] * len(graph.graph.find_nodes(op="placeholder")))
    phases = [step.phase for step in kernels.steps]
    assert phases.index(Phase.UPDATE) < max(i for i, phase in enumerate(phases) if phase is Phase.BACKWARD)
    written: set[int] = set()
    for step in kernels.steps:
        if step.phase is Phase.UPDATE:
            written |= set(step.changes)
        else:
            assert not written & {*step.reads, *step.changes}
