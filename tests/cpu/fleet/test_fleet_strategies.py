"""Strategies of a fleet: asked for, measured, kept for the next start, and never measured unasked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from trainmux import Fleet, Member
from trainmux.errors import ConfigError
from trainmux.fleet import _config
from trainmux.fleet._config import make_config
from trainmux.fusion import MEASURED, STRATEGY_FAMILIES, OperatorTimes, times_for
from trainmux.fusion.strategies import _times

ALL_MEASURED = dict.fromkeys((*STRATEGY_FAMILIES, "width"), MEASURED)
CPU = torch.device("cpu")


def model(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = [nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU()]
        return nn.Sequential(*body, nn.Flatten(), nn.Linear(144, 2))


def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def batch(count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 1, 6, 6, generator=generator), torch.arange(count) % 2


def fleet(strategies: dict[str, str] | None = None, **options: bool) -> Fleet:
    members = []
    for seed in range(3):
        net = model(seed)
        members.append(Member(net, torch.optim.SGD(net.parameters(), lr=0.1), name=f"m{seed}"))
    return Fleet(members, loss, batch(), precision="fp64", strategies=strategies, **options)


@pytest.fixture
def new_process() -> Iterator[None]:
    """Nothing is remembered from before but what is on disk; nothing of this test stays."""
    _times._shared.cache_clear()
    yield
    _times._shared.cache_clear()


def times() -> OperatorTimes:
    return times_for(CPU)


@pytest.mark.usefixtures("new_process")
def test_measured_choices_train_alike_and_are_told() -> None:
    usual, measured = fleet(), fleet(ALL_MEASURED)
    for count in (4, 3):
        torch.testing.assert_close(measured.step(batch(count)), usual.step(batch(count)))
    assert times().num_measured > 0
    assert times().measuring_s > 0
    assert "(measured)" in measured.explain()
    assert "(measured)" in measured.summary()[0].notes[0]
    assert "(measured)" not in usual.explain()


@pytest.mark.usefixtures("new_process")
def test_a_second_start_measures_nothing_and_chooses_alike() -> None:
    first = fleet(ALL_MEASURED)
    _times._shared.cache_clear()
    second = fleet(ALL_MEASURED)
    assert times().num_measured == 0
    assert second.explain() == first.explain()


@pytest.mark.usefixtures("new_process")
def test_a_broken_file_is_measured_anew() -> None:
    fleet(ALL_MEASURED)
    (path,) = Path(os.environ["TRAINMUX_STRATEGY_DIR"]).iterdir()
    path.write_text(path.read_text()[:100])
    _times._shared.cache_clear()
    fleet(ALL_MEASURED)
    assert times().num_measured > 0
    _times._shared.cache_clear()
    fleet(ALL_MEASURED)
    assert times().num_measured == 0


@pytest.mark.usefixtures("new_process")
def test_other_batches_and_evaluations_do_not_wait_for_measurements() -> None:
    trained = fleet(ALL_MEASURED)
    trained.step(batch())
    before = times().num_measured
    trained.step(batch(3))
    trained.evaluate([batch(2)])
    assert times().num_measured == before


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_cpu_measures_only_when_asked(deterministic: bool) -> None:
    fleet({"convolution": "auto"}, deterministic=deterministic)
    assert times().num_measured == 0
    assert not Path(os.environ["TRAINMUX_STRATEGY_DIR"]).exists()


def test_repeatable_runs_and_measured_choices_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"deterministic=True, got 'measured'.*name the ways"):
        fleet({"convolution": MEASURED}, deterministic=True)


def strategies(given: dict[str, str], *, deterministic: bool = False) -> Mapping[str, str]:
    settings = ("cpu", "fp32", "shared", 1, deterministic, "auto", given, "auto", None, None)
    return make_config(*settings).strategies


def test_repeatable_runs_never_measure_of_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_config, "_AUTO", {"cpu": MEASURED})
    assert set(strategies({}).values()) == {MEASURED}
    assert set(strategies({}, deterministic=True).values()) == {"fixed"}


def test_every_family_takes_its_ways_by_name() -> None:
    for name, family in STRATEGY_FAMILIES.items():
        for way in family.names:
            assert strategies({name: way})[name] == way
    assert set(strategies({}).values()) == {"fixed"}
    with pytest.raises(ConfigError, match="strategies: expected entries of"):
        strategies({"matmul": "grouped"})
