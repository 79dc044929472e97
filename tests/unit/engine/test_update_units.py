"""Which parameters are updated together, and where updates go among the other pieces of a step."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from trainmux.engine._units import MAX_BUCKET, MOST_TOGETHER, SMALL, Unit, as_ready, buckets, large_alone
from trainmux.lowering import interleave

WIDTH = 2
SIZES = st.lists(
    st.one_of(
        st.integers(1, 40), st.sampled_from([SMALL - 1, SMALL, SMALL + 1, MAX_BUCKET // 4, MAX_BUCKET])
    ),
    max_size=80,
)


def stacked(sizes: Iterable[int]) -> list[Tensor]:
    return [torch.empty((WIDTH, size), device="meta") for size in sizes]


def several(units: Iterable[Unit]) -> list[Unit]:
    return [unit for unit in units if len(unit.positions) > 1]


@given(SIZES, st.randoms(use_true_random=False))
def test_every_parameter_is_in_one_unit_of_bounded_size(sizes: list[int], random: Random) -> None:
    tensors = stacked(sizes)
    ready = random.sample(range(len(sizes)), len(sizes))
    kinds = [random.choice(["a", "b", None]) for _ in sizes]
    deferred, immediate, bucketed = large_alone(tensors), as_ready(tensors, ready), buckets(tensors, kinds)
    for units in (deferred, immediate, bucketed):
        assert sorted(position for unit in units for position in unit.positions) == list(range(len(sizes)))
        assert len({unit.number for unit in units}) == len(units)
        assert all(len(unit.positions) <= MOST_TOGETHER for unit in units)
    for unit in several(deferred):
        assert all(sizes[position] <= SMALL for position in unit.positions)
    for unit in several(immediate):
        assert sum(sizes[position] for position in unit.positions) <= SMALL
    last = [max(ready[position] for position in unit.positions) for unit in immediate]
    assert last == sorted(last)
    for unit in several(bucketed):
        assert len({kinds[position] for position in unit.positions}) == 1
        assert kinds[unit.positions[0]] is not None
        assert WIDTH * sum(sizes[position] for position in unit.positions) <= MAX_BUCKET
    assert [unit for unit in bucketed if unit.is_bucket] == several(bucketed)


def test_equal_parameters_make_equal_buckets() -> None:
    """As the layers of a transformer do, whose parameters come in turns."""
    sizes = [MAX_BUCKET // 8, 768, MAX_BUCKET // 4, 768] * 12
    found = [tuple(sizes[p] for p in unit.positions) for unit in buckets(stacked(sizes), ["a"] * len(sizes))]
    assert len(found) == 10
    assert len(set(found)) == 3


# ---- where they go -------------------------------------------------------------------------------------


def test_an_update_comes_when_its_gradient_is_there_and_nobody_reads_the_parameter_any_more() -> None:
    graph = fx.Graph()
    weight, bias, batch = (graph.placeholder(name) for name in ("weight", "bias", "batch"))

    def node(*sources: fx.Node) -> fx.Node:
        return graph.call_function(torch.ops.aten.add.Tensor, sources)

    forward = node(weight, batch)
    of_bias = node(forward)
    of_weight = node(of_bias, batch)
    of_batch = node(of_weight, weight)  # reads the weight behind its gradient
    last = node(of_batch)
    steps = [(n,) for n in (forward, of_bias, of_weight, of_batch, last)]
    change_weight, change_bias, norm = node(of_weight), node(of_bias), node(forward)
    changes = {change_weight: weight, change_bias: bias}

    def merged(*updates: fx.Node, first: int = 1) -> list[fx.Node]:
        found = interleave(
            steps,
            [(n,) for n in updates],
            first=first,
            reads=lambda piece: piece[0].all_input_nodes,
            changes=lambda piece: [changes[piece[0]]] if piece[0] in changes else [],
        )
        return [n for (n,) in found]

    early = [forward, norm, of_bias, change_bias, of_weight, of_batch, change_weight, last]
    assert merged(norm, change_bias, change_weight) == early
    # Updates keep their own order, whatever it costs.
    late = [forward, of_bias, of_weight, of_batch, change_weight, change_bias, last]
    assert merged(change_weight, change_bias) == late
    assert merged(norm, first=5) == [forward, of_bias, of_weight, of_batch, last, norm]
    assert merged() == [n for (n,) in steps]
