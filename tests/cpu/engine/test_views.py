"""Views cost the host a call each: idle ones are left out, and those of lasting memory are made once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import trainmux as tm
from trainmux.engine._order import Halves, KeptViews
from trainmux.engine._views import drop_idle_views

aten = torch.ops.aten

IDLE: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.detach(),
    lambda x: x.permute(0, 1),
    lambda x: x.reshape(2, -1),
    lambda x: x.view(2, 3),
    lambda x: x.expand(2, -1),
    lambda x: x.permute(0, 1).reshape(2, 3).detach(),
]
OTHER: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.permute(1, 0),
    lambda x: x.reshape(3, 2),
    lambda x: x.expand(1, 2, 3),
    lambda x: x[:1],
    lambda x: x.unsqueeze(1),
    lambda x: x.clone(),
]


class Counted(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    with Counted() as mode, torch.no_grad():
        yield mode.names


def graph_of(change: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        return make_fx(change, tracing_mode="fake")(*given)


@pytest.mark.parametrize("view", [*IDLE, *OTHER])
def test_only_views_that_change_nothing_are_left_out(view: Callable[[Tensor], Tensor]) -> None:
    module = graph_of(lambda x: view(x * 2) + 1, torch.ones(2, 3))
    num_nodes = len(module.graph.nodes)
    drop_idle_views(module.graph)
    module.graph.lint()
    module.recompile()
    given = torch.randn(2, 3)
    assert torch.equal(module(given), view(given * 2) + 1)
    assert len(module.graph.nodes) == (4 if view in IDLE else num_nodes)


def test_what_is_written_into_a_view_is_seen_through_the_others() -> None:
    def change(x: Tensor, total: Tensor) -> Tensor:
        doubled = x * 2
        doubled.reshape(2, 3).detach().add_(1)
        total.reshape(-1).add_(doubled.permute(0, 1).reshape(-1))
        return doubled + total.detach()

    module = graph_of(change, torch.ones(2, 3), torch.ones(2, 3))
    for halves in (Halves(module), Halves(module, [1]), Halves(module, [0, 1])):
        x, total, expected = torch.randn(2, 3), torch.ones(2, 3), torch.ones(2, 3)
        with torch.no_grad():
            for _ in range(3):
                (result,) = [halves.begin([x, total])()]
                assert torch.equal(torch.as_tensor(result), change(x, expected))
                assert torch.equal(total, expected)


def test_views_of_lasting_arguments_are_made_once_and_let_go_of() -> None:
    module = graph_of(lambda w, x: w.t().reshape(1, 3, 2) + x.t(), torch.ones(2, 3), torch.ones(2, 3))
    halves = Halves(module, lasting=[0])
    kept: KeptViews = {}

    def names(w: Tensor) -> list[str]:
        with counted() as found:
            result = torch.as_tensor(halves.begin([w, torch.ones(2, 3)], kept)())
        assert torch.equal(result, w.t()[None] + 1)
        return [name for name in found if name not in ("aten.ones.default", "aten.equal.default")]

    own, other = torch.randn(2, 3), torch.randn(2, 3)
    assert "aten.t.default" in names(own)
    first, second = names(own), names(own.mul_(2))  # what is shown is as it is now
    assert first == second
    assert len(first) < len(names(other))
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is not None
    kept.clear()
    gc.collect()
    assert gone() is None


def test_steps_make_fewer_calls_and_state_that_moved_is_let_go_of() -> None:
    models = [nn.Linear(3, 2) for _ in range(4)]
    members = [tm.Member(model, torch.optim.AdamW(model.parameters(), lr=0.1)) for model in models]
    batch = torch.ones(5, 3)
    fleet = tm.Fleet(members, lambda m, x: m(x).square().mean(), batch, lowering="aten")
    fleet.step(batch)
    group = fleet._groups[0]
    (program,) = group.programs.kept.values()
    arguments = group.arguments(program, [batch])
    with counted() as all_names:
        program.module(*arguments)
    with counted() as names:
        program.begin(arguments, {})()
    assert len(names) < 0.8 * len(all_names)

    old = weakref.ref(group.state.tensors["weight"])
    del arguments
    group.resize(8)
    gc.collect()
    assert old() is None
