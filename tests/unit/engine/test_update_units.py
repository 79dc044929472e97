"""Which parameters are updated together, and where updates go among the other pieces of a step."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx

from trainmux.engine._units import MAX_BUCKET, MOST_TOGETHER, SMALL, Unit, as_ready, buckets, large_alone
from trainmux.engine._updates import UpdateMode, UpdateSettings
from trainmux.errors import ConfigError
from trainmux.fusion.optimizers import OptimizerStructure
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


def positions(units: Iterable[Unit]) -> list[int]:
    return [position for unit in units for position in unit.positions]


@given(SIZES)
def test_every_parameter_is_in_one_unit_and_large_ones_are_alone(sizes: list[int]) -> None:
    units = large_alone(stacked(sizes))
    assert sorted(positions(units)) == list(range(len(sizes)))
    assert len({unit.number for unit in units}) == len(units)
    for unit in units:
        assert len(unit.positions) <= MOST_TOGETHER
        assert len(unit.positions) == 1 or all(sizes[position] <= SMALL for position in unit.positions)
    num_small = sum(size <= SMALL for size in sizes)
    assert len(units) == len(sizes) - num_small + -(-num_small // MOST_TOGETHER)


@given(SIZES, st.randoms(use_true_random=False))
def test_immediate_units_come_as_they_are_ready_and_hold_little(sizes: list[int], random: object) -> None:
    ready = list(range(len(sizes)))
    random.shuffle(ready)  # type: ignore[attr-defined]
    units = as_ready(stacked(sizes), ready)
    assert sorted(positions(units)) == list(range(len(sizes)))
    assert len({unit.number for unit in units}) == len(units)
    last = [max(ready[position] for position in unit.positions) for unit in units]
    assert last == sorted(last)
    for unit in units:
        assert len(unit.positions) == 1 or sum(sizes[position] for position in unit.positions) <= SMALL


@given(SIZES, st.randoms(use_true_random=False))
def test_buckets_are_of_one_kind_and_bounded(sizes: list[int], random: object) -> None:
    kinds = [random.choice(["a", "b", None]) for _ in sizes]  # type: ignore[attr-defined]
    units = buckets(stacked(sizes), kinds)
    assert sorted(positions(units)) == list(range(len(sizes)))
    assert len({unit.number for unit in units}) == len(units)
    for unit in units:
        assert unit.is_bucket == (len(unit.positions) > 1)
        assert len(unit.positions) <= MOST_TOGETHER
        if unit.is_bucket:
            assert len({kinds[position] for position in unit.positions} - {None}) == 1
            assert None not in {kinds[position] for position in unit.positions}
            assert WIDTH * sum(sizes[position] for position in unit.positions) <= MAX_BUCKET


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


@pytest.mark.parametrize("switch", ["clips_norm", "accumulates"])
def test_what_needs_all_gradients_is_never_immediate(switch: str) -> None:
    switches = {"clips_norm": False, "clips_value": True, "accumulates": False, "applies": True}

    def settings(**options: bool) -> UpdateSettings:
        given = {**switches, **options}
        return UpdateSettings(OptimizerStructure(()), (), (), (), **given, mode=UpdateMode.IMMEDIATE)

    settings()
    with pytest.raises(ConfigError, match=r"all gradients at once, got 'immediate'; set clip_norm back"):
        settings(**{switch: True})
