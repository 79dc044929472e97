"""One frozen base under several members: held once, computed once, and each trains as it would alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import (
    BATCHES,
    EXAMPLE,
    TOLERANCE,
    assert_same,
    assert_same_fleets,
    assert_same_states,
    copies_of,
    mse,
    states_of,
    train,
    train_alone,
)
from safetensors import safe_open
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import CheckpointError, MemberChangedError, MemberError

pytestmark = pytest.mark.usefixtures("built_once")

WIDTH = 37
"""Features of the base: no other tensor has as many bytes as its square matrix."""


def backbone(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(dtype)


class Probe(nn.Module):
    """A head on a base; ``hidden`` features in between make it another architecture."""

    def __init__(self, base: nn.Module, seed: int, hidden: int | None = None) -> None:
        super().__init__()
        self.base = base
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            head = nn.Linear(hidden or WIDTH, 2)
            self.head = head if hidden is None else nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), head)
        self.head.to(next(base.parameters()).dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def probe(base: nn.Module, number: int, hidden: int | None = None, **options: Any) -> tm.Member:
    model = Probe(base, number, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (number + 1), weight_decay=0.1)
    return tm.Member(model, optimizer, f"m{number}", **options)


def probes(base: nn.Module, *hidden: int | None) -> list[tm.Member]:
    return [probe(tm.share_frozen(base), number, size) for number, size in enumerate(hidden)]


def matrix_of(base: nn.Module) -> Tensor:
    """The square one, which no other tensor has as many bytes as."""
    return base.get_parameter("2.weight")


def alone(members: list[tm.Member], loss: Any = mse) -> dict[str, dict[str, Tensor]]:
    """The members' weights after plain training of copies that share nothing."""
    copies = copy.deepcopy(members)
    for member in copies:
        train_alone(member, BATCHES, loss)
    return {member.name or "": member.model.state_dict() for member in copies}


def assert_trains_alike(
    fleet: tm.Fleet, expected: dict[str, dict[str, Tensor]], batches: Sequence[Any] = BATCHES
) -> None:
    """Step the fleet over ``batches``; all members then have the weights that are expected of them."""
    train(fleet, batches)
    fleet.sync()
    for member in fleet.members:
        for name, tensor in member.model.state_dict().items():
            wanted = expected[member.name or ""][name]
            torch.testing.assert_close(tensor, wanted, rtol=TOLERANCE, atol=1e-14)


# ---- share_frozen --------------------------------------------------------------------------------------


def test_a_tree_has_its_own_modules_over_the_memory_of_the_base() -> None:
    base = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    base[0].register_buffer("mask", torch.ones(3))
    one, other = tm.share_frozen(base), tm.share_frozen(base)
    one[0].register_forward_hook(lambda *_: None)  # type: ignore[index, operator]
    assert not other[0]._forward_hooks  # type: ignore[index]
    assert not base[0]._forward_hooks
    assert len({id(part) for tree in (base, one, other) for part in tree.modules()}) == 9
    for name, parameter in one.named_parameters():
        assert parameter.data_ptr() == base.get_parameter(name).data_ptr()
        assert not parameter.requires_grad
    assert all(parameter.requires_grad for parameter in base.parameters())
    assert one.get_buffer("0.mask").data_ptr() == base.get_buffer("0.mask").data_ptr()
    assert one.get_buffer("1.running_mean").data_ptr() != base.get_buffer("1.running_mean").data_ptr()
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    tree = tm.share_frozen(tied)
    assert tree[0].weight is tree[1].weight  # type: ignore[index]


def test_what_is_no_module_or_cannot_be_copied_is_refused() -> None:
    with pytest.raises(MemberError, match=r"expected a torch\.nn\.Module to share, got dict"):
        tm.share_frozen({})  # type: ignore[arg-type]
    with pytest.raises(MemberError, match="initialise or dequantize"):
        tm.share_frozen(nn.LazyLinear(3))
    base = nn.Linear(3, 3)
    base.held = (item for item in ())  # type: ignore[assignment]
    with pytest.raises(MemberError, match="expected a module that can be copied, got TypeError"):
        tm.share_frozen(base)


# ---- training ------------------------------------------------------------------------------------------


def test_probes_on_one_backbone_train_as_alone_and_compute_it_once() -> None:
    base = backbone()
    members = probes(base, None, None, None)
    expected, before = alone(members), copies_of(matrix_of(base))
    fleet = tm.Fleet(members, mse, EXAMPLE)
    assert_trains_alike(fleet, expected)
    assert copies_of(matrix_of(base)) == before
    (summary,) = fleet.summary()
    products = {(record.how, record.count) for record in summary.records if "addmm" in record.op}
    assert ("shared", 2) in products  # both layers of the base, once for all members


def test_groups_of_other_heads_have_one_base_in_the_precision_of_the_fleet() -> None:
    base = backbone(dtype=torch.float32)
    members, before = probes(base, None, 5, None, 6), copies_of(matrix_of(base))
    fleet = tm.Fleet(members, mse, EXAMPLE, precision="fp64")
    fleet.step(EXAMPLE)
    assert len(fleet.summary()) == 3
    assert len(copies_of(matrix_of(base)) - before) == 1  # the one of the type that is trained in


def test_students_learn_from_one_frozen_teacher_as_alone() -> None:
    teacher = nn.Sequential(backbone(), nn.Linear(WIDTH, 2).double())

    class Student(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.teacher = tm.share_frozen(teacher)
            self.net = Probe(backbone(number + 1), number)

    def distill(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            soft = model.teacher(batch[0]).softmax(-1)
        return nn.functional.kl_div(model.net(batch[0]).log_softmax(-1), soft, reduction="batchmean")

    members = []
    for number in range(2):
        model = Student(number)
        members.append(tm.Member(model, torch.optim.SGD(model.net.parameters(), 0.1), f"m{number}"))
    expected = alone(members, distill)
    fleet = tm.Fleet(members, distill, EXAMPLE)
    assert_trains_alike(fleet, expected)
    assert len(fleet.summary()) == 1


def test_a_base_whose_statistics_change_has_them_for_each_member() -> None:
    base = nn.Sequential(nn.Linear(3, WIDTH), nn.BatchNorm1d(WIDTH)).double()
    members = probes(base, None, None)
    expected = alone(members)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    assert_trains_alike(fleet, expected)
    assert not torch.equal(members[0].model.base[1].running_mean, base[1].running_mean)  # type: ignore[union-attr, index, arg-type]


def test_a_base_in_another_layout_or_place_of_its_memory_is_used_as_it_is_seen() -> None:
    base = backbone()
    flat = torch.empty(1 + WIDTH * WIDTH, dtype=torch.float64)
    square = flat[1:].view(WIDTH, WIDTH).t()
    with torch.no_grad():
        base[2].weight = nn.Parameter(square.copy_(base[2].weight))  # type: ignore[index, union-attr, assignment]
    members = probes(base, None, None)
    expected = alone(members)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    assert_trains_alike(fleet, expected)


# ---- refusals ------------------------------------------------------------------------------------------


def _base_itself(base: nn.Module) -> list[tm.Member]:
    return [probe(base, 0), probe(tm.share_frozen(base), 1)]


def _one_optimizer_less(base: nn.Module) -> list[tm.Member]:
    members = probes(base, None, None)
    members[1].model.get_parameter("base.0.weight").requires_grad_()
    return members


def test_a_copy_in_place_is_enough_to_train_a_part_of_a_shared_base() -> None:
    """As the message says; PEFT's ``bias="all"`` trains biases of the base."""
    members = []
    for number in range(2):
        model = Probe(tm.share_frozen(backbone()), number)
        model.base[0].bias.requires_grad_()  # type: ignore[index, union-attr]
        members.append(tm.Member(model, torch.optim.SGD(model.parameters(), 0.1), f"m{number}"))
    shared = members[0].model.get_parameter("base.0.bias")
    members[1].model.get_parameter("base.0.bias").data = shared.data
    with pytest.raises(MemberError, match=r"or make a copy: tensor\.data = tensor\.data\.clone"):
        tm.Fleet(members, mse, EXAMPLE)
    shared.data = shared.data.clone()
    expected = alone(members)
    fleet = tm.Fleet(members, mse, EXAMPLE)
    assert_trains_alike(fleet, expected)


def _one_normalisation(base: nn.Module) -> list[tm.Member]:
    members, norm = probes(base, None, None), nn.BatchNorm1d(2, affine=False).double()
    for member in members:
        member.model.head = nn.Sequential(member.model.head, norm)  # type: ignore[arg-type]
    return members


@pytest.mark.parametrize("make", [_base_itself, _one_optimizer_less, _one_normalisation])
def test_memory_that_training_changes_may_not_be_shared(
    make: Callable[[nn.Module], list[tm.Member]],
) -> None:
    members = make(backbone())
    with pytest.raises(MemberError, match=r"of its own where training .*, got .* in memory of member"):
        tm.Fleet(members, mse, EXAMPLE)
    fleet = tm.Fleet(members[:1], mse, EXAMPLE)
    with pytest.raises(MemberError, match="in memory of member 'm0'"):
        fleet.add(members[1])
    assert fleet.names == ("m0",)


# ---- changes -------------------------------------------------------------------------------------------


def test_members_come_and_go_on_one_base() -> None:
    base = backbone()
    members, others = probes(base, None, None), probes(base, None, None, None, 5)[2:]
    expected, before = alone([members[0], *others]), copies_of(matrix_of(base))
    fleet = tm.Fleet(members, mse, EXAMPLE)
    fleet.replace("m1", others[0])
    fleet.add(others[1])
    assert_trains_alike(fleet, expected)
    assert [len(group.members) for group in fleet.summary()] == [2, 1]
    assert copies_of(matrix_of(base)) == before


def test_a_member_that_was_alone_on_its_base_is_joined_by_one_that_shares_it() -> None:
    """Two models may also have the frozen module itself in common."""
    base = backbone().requires_grad_(False)
    fleet = tm.Fleet([probe(base, 0)], mse, EXAMPLE)
    fleet.add(probe(base, 1))
    assert [len(group.members) for group in fleet.summary()] == [2]


def test_constants_held_per_member_stay_so_when_a_newcomer_shares_them() -> None:
    bases = [backbone(seed).requires_grad_(False) for seed in (1, 2)]
    members = [probe(bases[0], 0), probe(bases[1], 1), probe(bases[0], 2)]
    expected = alone([members[0], members[2]])
    fleet = tm.Fleet(members[:2], mse, EXAMPLE)
    fleet.drop("m1")
    fleet.add(members[2])
    assert_trains_alike(fleet, expected)


def test_members_on_another_base_form_a_group_of_their_own() -> None:
    one, other = backbone(1), backbone(2)
    members = probes(one, None, None)
    members += [probe(tm.share_frozen(other), number) for number in (2, 3)]
    expected, before = alone(members), copies_of(matrix_of(one))
    fleet = tm.Fleet(members[:3], mse, EXAMPLE)
    fleet.add(members[3])
    assert_trains_alike(fleet, expected)
    assert [group.members for group in fleet.summary()] == [("m0", "m1"), ("m2", "m3")]
    assert copies_of(matrix_of(one)) == before


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_an_edited_base_is_noticed_and_taken_over_for_all_its_members(precision: str) -> None:
    base = backbone(dtype=torch.float32)
    batches = [[leaf.to(torch.float32) for leaf in batch] for batch in BATCHES[:3]]
    members = probes(base, None, None, 5)
    fleet = tm.Fleet(members, mse, batches[0], precision=precision)
    base[0].bias.data.add_(1.0)  # type: ignore[index, union-attr, operator]
    with pytest.raises(MemberChangedError, match=r"base\.0\.bias"):
        fleet.evaluate([batches[0]])
    fleet.refresh("m1")
    fresh = tm.Fleet(probes(base, None, None, 5), mse, batches[0], precision=precision)
    for batch in batches:
        assert torch.equal(fleet.step(batch), fresh.step(batch))
    fleet.evaluate([batches[0]])


def test_sync_writes_a_base_back_only_where_it_was_edited() -> None:
    base = backbone(dtype=torch.float32)
    batch = [leaf.float() for leaf in EXAMPLE]
    fleet = tm.Fleet(probes(base, None, None), mse, batch, precision="fp64")
    fleet.step(batch)
    values, version = base[0].weight.clone(), base[0].weight._version  # type: ignore[index, union-attr, operator]
    fleet.sync()
    assert base[0].weight._version == version  # type: ignore[index, union-attr]
    base[0].weight.data.mul_(2)  # type: ignore[index, union-attr, operator]
    with pytest.warns(tm.TrainmuxWarning, match="overwritten"):
        fleet.sync()
    assert torch.equal(base[0].weight, values)  # type: ignore[index, union-attr, arg-type]
    fleet.step(batch)
    fleet.evaluate([batch])


# ---- checkpoints ---------------------------------------------------------------------------------------


def saved_tensors(path: Path) -> dict[str, tuple[int, ...]]:
    (file,) = path.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118


def test_a_checkpoint_holds_a_base_once_and_brings_it_back(tmp_path: Path) -> None:
    fleet = tm.Fleet(probes(backbone(), None, None, 5), mse, EXAMPLE)
    train(fleet, BATCHES[:4])
    fleet.save(tmp_path)
    assert list(saved_tensors(tmp_path).values()).count((WIDTH, WIDTH)) == 1
    # Another process draws another base, and has the saved one after the restore.
    other = backbone(7)
    restored = tm.Fleet(probes(other, None, None, 5), mse, EXAMPLE)
    restored.restore(tmp_path)
    assert torch.equal(other[2].weight, backbone()[2].weight)  # type: ignore[index, union-attr, arg-type]
    for batch in BATCHES[4:8]:
        assert torch.equal(fleet.step(batch), restored.step(batch))
    assert_same_fleets(fleet, restored)


def test_a_fleet_that_shares_its_base_cannot_take_several(tmp_path: Path) -> None:
    tm.Fleet([probe(backbone(i).requires_grad_(False), i) for i in range(2)], mse, EXAMPLE).save(tmp_path)
    fleet = tm.Fleet(probes(backbone(), None, None), mse, EXAMPLE)
    before = states_of(fleet)
    with pytest.raises(CheckpointError, match=r"expected one value of base.* got several"):
        fleet.restore(tmp_path)
    assert_same_states(states_of(fleet), before)


def test_a_member_is_saved_without_its_base_and_goes_on_elsewhere(tmp_path: Path) -> None:
    fleet = tm.Fleet(probes(backbone(), None, None), mse, EXAMPLE)
    train(fleet, BATCHES[:4])
    fleet.save_member("m1", tmp_path)
    assert not any(torch.Size(shape).numel() == WIDTH * WIDTH for shape in saved_tensors(tmp_path).values())
    elsewhere = tm.Fleet(probes(backbone(), 5, None, None), mse, EXAMPLE)
    elsewhere.load_member("m2", tmp_path)
    for batch in BATCHES[4:8]:
        assert torch.equal(fleet.step(batch)[1], elsewhere.step(batch)[2])
    assert_same(states_of(fleet)["m1"], states_of(elsewhere)["m2"])
    groups = (member.optimizer.param_groups for member in (fleet.members[1], elsewhere.members[2]))
    assert len(set(map(repr, groups))) == 1


def test_a_member_with_a_base_of_its_own_takes_it_along(tmp_path: Path) -> None:
    """Other members keep theirs, though all had the same before."""
    frozen = [backbone(seed).requires_grad_(False) for seed in (3, 0, 0)]
    source = tm.Fleet([probe(frozen[0], 0)], mse, EXAMPLE)
    source.step(EXAMPLE)
    source.save_member("m0", tmp_path)
    fleet = tm.Fleet([probe(frozen[1], 1), probe(frozen[2], 2)], mse, EXAMPLE)
    control = tm.Fleet([probe(backbone(0).requires_grad_(False), 2)], mse, EXAMPLE)
    fleet.load_member("m1", tmp_path)
    for batch in BATCHES[:4]:
        losses = fleet.step(batch)
        torch.testing.assert_close(losses[0], source.step(batch)[0], rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(losses[1], control.step(batch)[0], rtol=TOLERANCE, atol=0)
    fleet.sync()
    assert torch.equal(frozen[1][2].weight, frozen[0][2].weight)  # type: ignore[index, union-attr, arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: probe(tm.share_frozen(backbone(7)), 0), "on the base of 'm0', got other values"),
        (lambda: probe(tm.share_frozen(backbone()), 0, 5), "make the member with the architecture"),
        (
            lambda: tm.Member(
                model := Probe(tm.share_frozen(backbone()), 0), torch.optim.SGD(model.parameters()), "m0"
            ),
            "expected optimizer SGD",
        ),
    ],
)
def test_a_saved_member_that_does_not_fit_is_refused(
    make: Callable[[], tm.Member], said: str, tmp_path: Path
) -> None:
    source = tm.Fleet(probes(backbone(), None), mse, EXAMPLE)
    source.step(EXAMPLE)
    source.save_member("m0", tmp_path / "member")
    source.save(tmp_path / "fleet")
    fleet = tm.Fleet([make()], mse, EXAMPLE)
    before = fleet.step(EXAMPLE)
    with pytest.raises(CheckpointError, match=said):
        fleet.load_member("m0", tmp_path / "member")
    with pytest.raises(CheckpointError, match="expected a checkpoint of a member"):
        fleet.load_member("m0", tmp_path / "fleet")
    with pytest.raises(CheckpointError, match="expected a checkpoint of a fleet"):
        fleet.restore(tmp_path / "member")
    assert fleet.step(EXAMPLE)[0] < before[0]


# ---- plans ---------------------------------------------------------------------------------------------


def test_a_plan_trains_members_on_one_base_as_alone_and_gives_it_back(tmp_path: Path) -> None:
    base = backbone()
    members = probes(base, None, None, 5)
    expected, before = alone(members), copies_of(matrix_of(base))
    fleet = tm.Fleet(members, mse, EXAMPLE)
    fleet.plan("64MiB", "none")
    train(fleet, BATCHES[:6])
    fleet.save_member("m2", tmp_path)
    fleet.use(None)
    assert_trains_alike(fleet, expected, BATCHES[6:])
    assert copies_of(matrix_of(base)) == before
