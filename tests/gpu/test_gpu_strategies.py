"""Measuring on a CUDA device: times that can be believed, memory given back, choices that are kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainmux import Fleet, Member
from trainmux.fusion import MEASURED, STRATEGY_FAMILIES, times_for
from trainmux.fusion.strategies import CudaClock, _times

DEVICE = torch.device("cuda", 0)
ALL_MEASURED = dict.fromkeys((*STRATEGY_FAMILIES, "width"), MEASURED)


def test_more_work_takes_more_time_and_branches_run_side_by_side() -> None:
    clock = CudaClock(DEVICE)
    small, large = (torch.randn(n, n, device=DEVICE) for n in (512, 4096))
    one = clock.seconds([lambda: large @ large])
    assert one > 5 * clock.seconds([lambda: small @ small])
    assert clock.seconds([lambda: [large @ large for _ in range(3)]]) > 2 * one
    tiny = torch.randn(64, 64, device=DEVICE)

    def many() -> None:
        for _ in range(50):
            tiny.mm(tiny)

    assert clock.seconds([many] * 4) < 3 * clock.seconds([many])  # one after another it would be four


def test_what_fails_once_does_not_spoil_what_comes_next() -> None:
    clock = CudaClock(DEVICE)
    x = torch.randn(64, 64, device=DEVICE)
    with pytest.raises(RuntimeError, match="captur"):
        clock.seconds([lambda: x.sum().item()])
    assert clock.seconds([lambda: x @ x]) > 0
    assert clock.glance([lambda: x @ x]) > 0


def fleet(strategies: dict[str, str]) -> Fleet:
    members = []
    for seed in range(4):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            body = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 1)]
            net = nn.Sequential(*body, nn.BatchNorm2d(32), nn.Flatten(), nn.Linear(32 * 64, 8))
        members.append(Member(net, torch.optim.SGD(net.parameters(), lr=0.01), name=f"m{seed}"))
    return Fleet(members, loss, batch(), device=DEVICE, strategies=strategies, lowering="aten")


def loss(net: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(net(given[0]), given[1])


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(8, 3, 8, 8, generator=generator), torch.arange(8)


def test_a_fleet_of_measured_choices_trains_like_a_usual_one_and_starts_again_without_measuring() -> None:
    _times._shared.cache_clear()
    usual, measured = fleet({}), fleet(ALL_MEASURED)
    times = times_for(DEVICE)
    assert times.num_measured > 0
    for _ in range(3):
        torch.testing.assert_close(measured.step(batch()), usual.step(batch()), rtol=2e-2, atol=2e-2)
    _times._shared.cache_clear()
    again = fleet(ALL_MEASURED)
    assert times_for(DEVICE).num_measured == 0
    assert [record.how for record in again.summary()[0].records] == [
        record.how for record in measured.summary()[0].records
    ]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_users_switch_for_convolutions_is_put_back(wanted: bool) -> None:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        CudaClock(DEVICE).seconds([lambda: torch.ones(8, device=DEVICE) + 1])
        assert torch.backends.cudnn.benchmark is wanted
    finally:
        torch.backends.cudnn.benchmark = before
