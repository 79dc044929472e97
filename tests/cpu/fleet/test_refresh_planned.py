"""An edited constant that members share is taken over by ``refresh`` under a plan, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import trainmux as tm

pytestmark = pytest.mark.usefixtures("built_once")


class Frozen(nn.Module):
    """Two layers that learn around one that does not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.frozen(self.first(x)).relu())
        return out


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def losses(*, planned: bool) -> Tensor:
    members = []
    for seed in (1, 2):
        model = Frozen(seed)
        members.append(tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.05 * seed), name=f"m{seed}"))
    torch.manual_seed(3)
    batches = torch.randn(5, 6, 4).unbind()
    fleet = tm.Fleet(members, mean_square, batches[0], lowering="aten")
    if planned:
        fleet.plan("64MiB", "none", max_partitions=2)
    found = [fleet.step(batch) for batch in batches[:2]]
    with torch.no_grad():
        members[1].model.frozen.weight.mul_(2.0)  # type: ignore[union-attr, operator]
    fleet.refresh("m2")
    return torch.stack([*found, *(fleet.step(batch) for batch in batches[2:])])


def test_an_edited_constant_counts_under_a_plan_as_without_one() -> None:
    assert torch.equal(losses(planned=True), losses(planned=False))
