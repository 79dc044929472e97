"""The matrix: every model, optimizer and way to train, in fp64, equal to plain torch one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from equivalence import (
    PLAIN,
    adamw,
    assert_equivalent,
    check,
    in_two_groups,
    members_of,
    outcomes,
    train_alone,
)
from fleet_cases import OPTIMIZERS
from odd_models import ODD, VECTORS, classify, labelled, weighted
from short_workloads import SHORT
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import MemberError, TraceError

pytestmark = pytest.mark.usefixtures("built_once")

MODELS = {**{name: SHORT[name] for name in PLAIN}, **ODD}
RELATIVES = ("bottleneck", "lstm_untied", "lstm_translation", "dlrm_joint", "bert_nsp", "vit")
"""Models with a near relative among the others, and no operator of their own."""

CLASSES = [name for name in OPTIMIZERS if name != "last-layer"]


def every_model() -> list[Any]:
    """Each model with one optimizer, in turn."""
    found = []
    for number, name in enumerate(MODELS):
        marks = [pytest.mark.extensive] if name in RELATIVES else []
        optimizer = CLASSES[number % len(CLASSES)] if name in ODD or number % 2 else "adamw"
        found.append(pytest.param(name, optimizer, marks=marks, id=f"{name}-{optimizer}"))
    return found


@pytest.mark.parametrize(("name", "optimizer"), every_model())
def test_every_model_trains_as_alone(name: str, optimizer: str) -> None:
    check(MODELS[name], optimizer=OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", [name for name in CLASSES if name != "param-groups"])
def test_every_optimizer_trains_as_alone_with_settings_by_member_and_group(optimizer: str) -> None:
    check(SMALL["mlp"], optimizer=in_two_groups(OPTIMIZERS[optimizer]), num_steps=6)


def test_parameters_outside_the_optimizer_pass_gradients_on_and_do_not_change() -> None:
    check(ODD["tied"], optimizer=OPTIMIZERS["last-layer"])


# Batch norm, a mask that differs between members, ragged bags in a dataclass, and every convolution.
@pytest.mark.parametrize("name", ["cnn", "transformer", "dlrm", "convolutions_2d"])
def test_members_with_batches_of_their_own_train_as_alone(name: str) -> None:
    check(MODELS[name], data="per_member")


@pytest.mark.parametrize(
    ("way", "name"),
    [("planned", "mlp"), ("planned", "cnn"), ("job", "mlp"), ("job", "cnn"), ("job", "transformer")],
)
def test_a_plan_and_a_job_beside_another_train_as_alone(way: str, name: str) -> None:
    check(MODELS[name], way=way, num_steps=3)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_differences_do_not_grow_over_many_steps_of_six_members(name: str) -> None:
    check(SMALL[name], optimizer=adamw, num_members=6, num_steps=50)


def test_one_member_in_a_fleet_trains_as_alone() -> None:
    check(SHORT["residual"], num_members=1)


def test_a_member_that_trained_alone_before_continues_in_a_fleet() -> None:
    """Optimizer state and step count go in with the member: bias correction does not start again."""
    workload = SMALL["mlp"]

    def make(model: nn.Module, number: int) -> torch.optim.Optimizer:
        optimizer = adamw(model, number)
        for step in range(3 * number):  # a history of another length for each member
            optimizer.zero_grad()
            workload.loss(model, workload.batch(step, torch.float64)).backward()
            optimizer.step()
        return optimizer

    check(workload, optimizer=make)


def test_members_with_losses_and_batch_sizes_of_their_own() -> None:
    """Three groups in one fleet: two members of one loss, one of another, one of another batch size."""
    common = [VECTORS(step, torch.float64) for step in range(5)]
    own = [labelled(3, 8)(step, torch.float64) for step in range(5)]
    losses = (classify, weighted, classify, classify)
    alone = [
        train_alone(member.model, member.optimizer, loss, own if row == 3 else common)
        for row, (member, loss) in enumerate(zip(members_of(ODD["squared"], range(4)), losses, strict=True))
    ]
    members = members_of(ODD["squared"], range(4))
    for member, loss in zip(members, losses, strict=True):
        member.loss = loss
    members[3].example_batch = own[0]
    fleet = tm.Fleet(members, example_batch=common[0], precision="fp64")
    assert sorted(group.width for group in fleet.summary()) == [1, 1, 2]
    steps = [fleet.step(batch, overrides={"m3": other}) for batch, other in zip(common, own, strict=True)]
    assert_equivalent(outcomes(fleet, steps, []), alone)


# ---- members that share nothing but a fleet ------------------------------------------------------------


def test_a_weight_in_the_closure_of_a_loss_is_the_one_that_trains() -> None:
    model, plain = members_of(ODD["squared"], [0]), members_of(ODD["squared"], [0])

    def with_penalty(weight: Tensor) -> Any:
        return lambda m, b: classify(m, b) + weight.square().sum()

    batches = [VECTORS(step, torch.float64) for step in range(4)]
    fleet = tm.Fleet(model, with_penalty(model[0].model[0].weight), batches[0], precision="fp64")
    losses = [fleet.step(batch) for batch in batches]
    alone = train_alone(plain[0].model, plain[0].optimizer, with_penalty(plain[0].model[0].weight), batches)
    assert_equivalent(outcomes(fleet, losses, []), [alone])


def test_members_with_other_closures_inside_do_not_share_a_graph() -> None:
    losses = [
        lambda m, b: sum((p - q).square().mean() for p, q in [(m(b[0]), b[0][:, :5])]),
        lambda m, b: sum((p + q).square().mean() for p, q in [(m(b[0]), b[0][:, :5])]),
    ]
    members, batch = members_of(ODD["squared"], [0, 1]), VECTORS(0, torch.float64)
    for member, loss in zip(members, losses, strict=True):
        member.loss = loss
    with torch.no_grad():
        expected = [loss(m.model, batch).item() for loss, m in zip(losses, members, strict=True)]
    fleet = tm.Fleet(members, example_batch=batch, precision="fp64")
    assert fleet.step(batch).tolist() == pytest.approx(expected, rel=1e-12)


class Diagonal(nn.Module):
    """Factorizes a diagonal matrix, which fails where an entry is negative."""

    def __init__(self, entry: float) -> None:
        super().__init__()
        self.entries = nn.Parameter(torch.tensor([1.0, entry], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.linalg.cholesky(torch.diag(self.entries)) ** 2).sum() + x.sum() * 0


class _Solved(torch.autograd.Function):
    """Hands its argument on; its gradient is the solution of a system with it on the diagonal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.linalg.solve(torch.diag(x), gradient)


@pytest.mark.parametrize(
    ("loss", "bad", "updated"),
    [
        (lambda model, x: model(x), -1.0, [0.9, 1.9]),
        (lambda model, x: _Solved.apply(model.entries).sum() + x.sum(), 0.0, [0.9, 1.95]),
    ],
    ids=["forward", "backward"],
)
def test_a_factorization_that_fails_freezes_only_its_member(loss: Any, bad: float, updated: Any) -> None:
    models = [Diagonal(1.0), Diagonal(bad), Diagonal(2.0)]
    members = [tm.Member(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    batch = torch.zeros(2, dtype=torch.float64)
    fleet = tm.Fleet(members, loss=loss, example_batch=batch)
    fleet.step(batch)
    assert list(fleet.stopped()) == ["member-1"]
    fleet.sync()
    assert models[1].entries.tolist() == [1.0, bad]
    torch.testing.assert_close(models[2].entries, torch.tensor(updated, dtype=torch.float64))


# ---- what is said and refused ----------------------------------------------------------------------------


def test_operators_without_a_batching_rule_are_looped_over_and_said() -> None:
    workload = ODD["convolutions_1d"]
    fleet = tm.Fleet(
        members_of(workload, [0, 1]), workload.loss, workload.batch(0, torch.float64), precision="fp64"
    )
    assert "_weight_norm_interface" in fleet.explain()
    assert "loop" in fleet.explain()


def test_a_loss_with_a_data_dependent_check_is_refused_with_its_line() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        y = model(batch[0])
        return nn.functional.gaussian_nll_loss(y[:, 0], y[:, 1], y[:, 1] ** 2)

    with pytest.raises(TraceError) as caught:
        tm.Fleet(members_of(ODD["squared"], [0]), loss, VECTORS(0, torch.float64))
    assert caught.value.location is not None
    assert "test_equivalence.py" in caught.value.location


def test_two_parameters_in_the_same_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    model[1].weight.data = model[0].weight.data
    with pytest.raises(MemberError):
        tm.Fleet([tm.Member(model, adamw(model, 0))], classify, VECTORS(0, torch.float64))
