"""Graphs written from pieces: what is alike is traced once, what is not is never taken for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from trainmux.fusion._stacked import Stacked
from trainmux.fusion._writing import GraphWriter, Written
from trainmux.tracing import FakeTensorMode

aten = torch.ops.aten


class _Pieces:
    """A writer with two stacked inputs, and how often each function was traced."""

    def __init__(self) -> None:
        self.writer = GraphWriter(FakeTensorMode(allow_non_fake_inputs=True), None)
        self.num_traced = 0
        self.origin = fx.Graph().placeholder("origin")
        device = torch.device("cpu")
        self.x, self.y = (
            self.writer.placeholder(self.writer.empty((3, 4), None, torch.float32, device), is_stacked=True)
            for _ in range(2)
        )

    def write(self, function: Callable[..., Tensor], *given: Any, kind: str = "kind") -> Any:
        def counted(*values: Any) -> tuple[Any, str]:
            self.num_traced += 1
            plain = [value.tensor if isinstance(value, Stacked) else value for value in values]
            return Stacked(function(*plain)), kind

        result, said = self.writer.write(self.origin, kind, counted, given)
        assert said == kind
        return result

    def run(self, *results: Written) -> list[Tensor]:
        module = self.writer.finish(results)
        module.graph.lint()
        x, y = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) - 7
        found: list[Tensor] = module(x, y)
        return found


def test_equal_calls_are_traced_once_and_written_each_time() -> None:
    pieces = _Pieces()
    once = pieces.write(lambda a, b: a * 2 + b, pieces.x, pieces.y)
    twice = pieces.write(lambda a, b: a * 2 + b, once, pieces.y)
    assert pieces.num_traced == 1
    x, y = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) - 7
    (found,) = pieces.run(twice)
    assert torch.equal(found, (x * 2 + y) * 2 + y)


def test_one_node_twice_is_not_two_nodes() -> None:
    pieces = _Pieces()
    same = pieces.write(lambda a, b: a * b, pieces.x, pieces.x)
    other = pieces.write(lambda a, b: a * b, pieces.x, pieces.y)
    assert pieces.num_traced == 2
    x, y = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) - 7
    found = pieces.run(same, other)
    assert torch.equal(found[0], x * x)
    assert torch.equal(found[1], x * y)


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), (0.0, -0.0), (True, 1), ((1, 2), [1, 2]), (None, 0)])
def test_values_that_are_equal_but_not_alike_are_traced_apart(first: Any, second: Any) -> None:
    pieces = _Pieces()
    for value in (first, second, first):
        pieces.write(lambda a, _: a + 1, pieces.x, value)
    assert pieces.num_traced == 2


def test_strides_and_kinds_tell_calls_apart() -> None:
    pieces = _Pieces()
    turned = pieces.write(lambda a: aten.permute.default(a, [0, 1]).t().contiguous().t(), pieces.x)
    assert turned.fake.shape == pieces.x.fake.shape
    assert turned.fake.stride() != pieces.x.fake.stride()
    before = pieces.num_traced
    pieces.write(lambda a: a + 1, pieces.x, kind="add")
    pieces.write(lambda a: a + 1, turned, kind="add")
    pieces.write(lambda a: a + 2, turned, kind="other")
    assert pieces.num_traced == before + 3


def test_a_part_of_a_tensor_lies_where_it_lies() -> None:
    pieces = _Pieces()
    part = pieces.write(lambda a: aten.slice.Tensor(a, 1, 1, 3), pieces.x)
    assert part.fake.storage_offset() == 1
    seen = []

    def offset(a: Tensor) -> Tensor:
        seen.append((a.storage_offset(), a.stride()))
        return a * 3

    tripled = pieces.write(offset, part, kind="triple")
    assert seen == [(1, (4, 1))]
    (found,) = pieces.run(tripled)
    assert torch.equal(found, torch.arange(12.0).reshape(3, 4)[:, 1:3] * 3)


def test_constants_are_kept_and_shared() -> None:
    pieces = _Pieces()
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    other = torch.tensor([5.0, 5.0, 5.0, 5.0])
    masked = pieces.write(lambda a, m: a * m, pieces.x, mask)
    again = pieces.write(lambda a, m: a * m, pieces.y, mask)
    added = pieces.write(lambda a, m: a * m, masked, other)
    assert pieces.num_traced == 2
    module = pieces.writer.finish([masked, again, added])
    assert len([node for node in module.graph.nodes if node.op == "get_attr"]) == 2
    x, y = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4) - 7
    found = module(x, y)
    assert torch.equal(found[0], x * mask)
    assert torch.equal(found[1], y * mask)
    assert torch.equal(found[2], x * mask * 5)


def test_what_nobody_uses_is_not_written() -> None:
    pieces = _Pieces()
    used = pieces.write(lambda a: a + 1, pieces.x)
    pieces.write(lambda a: a * 7, used, kind="unused")
    module = pieces.writer.finish([used])
    assert aten.mul.Tensor not in {node.target for node in module.graph.nodes}
