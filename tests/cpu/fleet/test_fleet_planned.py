"""A fleet under a plan behaves as one without: in turns, in a ring, side by side, through everything."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.workloads import SMALL
from equivalence import assert_same
from fleet_cases import BATCHES, EXAMPLE, Made, adam, assert_same_fleets, mse, projected, scheduled, sgd
from interrupted import train_interrupted
from odd_models import classify, labelled
from short_workloads import member_of
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import BudgetError, PlanError, TrainmuxWarning
from trainmux.fleet import _planning
from trainmux.fleet._planned_runner import PlannedRunner
from trainmux.ir import Free, Profile, Wait

pytestmark = pytest.mark.usefixtures("built_once")

WORKLOAD = SMALL["mlp"]
DEVICE = "a100-40gb"
"""Plans are worked out for it where measuring takes longer, and may have another outcome each time."""


@pytest.fixture(autouse=True, scope="module")
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured here is measured once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path_factory.mktemp("profiles")))
        yield


_NODE_SECONDS = 1e-5


@pytest.fixture
def known_seconds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Profiles by which fused members take no longer than one; for ways that have members side by side, two
    of these hardly longer."""
    is_beside = "side by side" in request.node.callspec.params.get("way", "side by side")
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path / "profiles"))
    measure: Callable[..., Profile] = _planning.measure_profile

    def measured(*arguments: Any, branches: Any = (), **options: Any) -> Profile:
        found = measure(*arguments, branches=branches, **options)
        nodes = tuple(replace(node, seconds=_NODE_SECONDS) for node in found.nodes)
        taken = _NODE_SECONDS * len(nodes)
        beside = tuple((number, 0.01 * taken) for number in branches) if is_beside else ()
        return replace(found, nodes=nodes, concurrent_seconds=beside)

    monkeypatch.setattr(_planning, "measure_profile", measured)


def member(number: int, **options: Any) -> tm.Member:
    return scheduled(member_of(WORKLOAD, number, lr=1e-3 * (number + 1)), **options)


def fleet_of(num_members: int = 2, *, clips: bool = False, **options: Any) -> tm.Fleet:
    limits: list[Any] = [{"clip_norm": 0.1}, {"clip_value": 0.01}] if clips else [{}, {}]
    members = [member(number, **limits[min(number, 1)]) for number in range(num_members)]
    return tm.Fleet(members, WORKLOAD.loss, batch(0), deterministic=True, **options)


def batch(number: int, size: int | None = None) -> Any:
    whole = WORKLOAD.batch(number, torch.float32)
    return whole if size is None else torch.utils._pytree.tree_map(lambda tensor: tensor[:size], whole)


def train(*fleets: tm.Fleet, steps: Sequence[int]) -> None:
    """Both are given the same batches, and have the same losses."""
    for number in steps:
        losses = [fleet.step(batch(number)).nan_to_num() for fleet in fleets]
        assert torch.equal(*losses)


def train_and_compare(*fleets: tm.Fleet, steps: Sequence[int]) -> None:
    """They then are the same in all they have, too."""
    train(*fleets, steps=steps)
    assert_same_fleets(*fleets)


def smallest_bytes(fleet: tm.Fleet, *how: Any, **asked: Any) -> int:
    """The smallest budget that a plan works with."""
    with pytest.raises(BudgetError) as caught:
        fleet.plan(1000, *how, **asked)
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes


WAYS: dict[str, tuple[int, str, list[int], int]] = {
    # By name: members, policy, members of each sub-array, branches.
    "turns": (2, "none", [2], 1),
    "ring": (2, "mutwo", [1, 1], 1),
    "side by side": (4, "mutwo", [2, 2], 2),
    "unevenly side by side": (5, "mutwo", [2, 3], 3),
}


EVENLY = pytest.param("side by side", marks=pytest.mark.extensive)
"""One more combination of branches."""


def planned_and_plain(way: str, **options: Any) -> tuple[tm.Fleet, tm.Fleet, tm.Plan]:
    """The same members by a plan, and without one as the plan has them."""
    num_members, policy, widths, num_branches = WAYS[way]
    planned = fleet_of(num_members, **options)
    plain = fleet_of(num_members, **options, width=1 if num_branches > 1 else None)
    plan = planned.plan(policy=policy, max_partitions=5)
    assert sorted(len(part.members) for part in plan.partition) == widths
    assert plan.record.num_branches == num_branches
    return planned, plain, plan


@pytest.mark.usefixtures("known_seconds")
@pytest.mark.parametrize("way", [name if name != "side by side" else EVENLY for name in WAYS])
def test_everything_in_the_life_of_a_fleet_has_the_bits_of_one_without_a_plan(
    way: str, tmp_path: Path
) -> None:
    """Clipping, schedules, accumulation, evaluation, stops, newcomers, checkpoints, some steps unplanned."""
    planned, plain, plan = planned_and_plain(way, clips=True, accumulate=2)
    train(planned, plain, steps=range(4))
    assert torch.equal(planned.metrics["grad_norm"], plain.metrics["grad_norm"])
    assert_same_fleets(planned, plain)
    assert planned.evaluate([batch(7)]) == plain.evaluate([batch(7)])
    train(planned, plain, steps=[4, 5])  # after a sync a new flight begins
    planned.save(tmp_path / "saved")
    planned.step(batch(6))  # which the checkpoint does not have
    for fleet in (planned, plain):
        fleet.restore(tmp_path / "saved")
        fleet.stop("m0")
        fleet.replace("m1", member(7))
    train(planned, plain, steps=range(4))
    planned.use(None)
    train(planned, plain, steps=range(2))
    planned.plan(policy=plan.record.policy, max_partitions=5)
    train(planned, plain, steps=range(2))
    assert plain.stopped() != {}
    assert_same_fleets(planned, plain)


@pytest.mark.usefixtures("known_seconds")
@pytest.mark.parametrize("way", ["ring", EVENLY])
def test_a_step_can_be_watched_and_a_plan_is_read_again(way: str, tmp_path: Path) -> None:
    planned, plain, plan = planned_and_plain(way)
    assert ("side by side" in plan.explain()) == (WAYS[way][3] > 1)
    with pytest.raises(PlanError):
        plain.watch(batch(0))
    plan.save(tmp_path / "plan.json")
    other = fleet_of(WAYS[way][0])
    other.use(tm.Plan.load(tmp_path / "plan.json"))
    train(planned, plain, steps=range(2))
    train(other, fleet_of(WAYS[way][0], width=1), steps=range(2))
    with pytest.raises(tm.TrainmuxError):
        planned.watch({"not": "a batch"})
    train(planned, plain, steps=[2])
    seen = planned.watch(batch(3))
    plain.step(batch(3))
    assert_same_fleets(planned, plain)  # a watched step is a step
    assert seen.source == "measured"
    body = plan.program.body.instructions
    expected = {position for position, item in enumerate(body) if not isinstance(item, Free | Wait)}
    assert {span.instruction for span in seen.spans} == expected
    assert 0 < seen.compute_seconds <= seen.seconds
    assert all(0 <= span.start <= span.end <= seen.seconds for span in seen.spans)
    plan.report(tmp_path / "plan.html", measured=seen)
    assert "measured" in (tmp_path / "plan.html").read_text()
    with pytest.raises(PlanError):
        planned.watch(batch(4, 3))


def test_fits_freezes_other_shapes_and_budgets_that_cannot_work() -> None:
    """All in the life of one planned fleet."""
    planned, plain, _ = planned_and_plain("ring")
    for fleet in (planned, plain):
        fleet.fit([batch(0), batch(1)], epochs=2, validation=[batch(8)], progress=False)
    for number, size in enumerate((3, None, 3, 5)):
        torch.testing.assert_close(*[fleet.step(batch(number, size)) for fleet in (planned, plain)])
    planned, plain, _ = planned_and_plain("ring")
    train(planned, plain, steps=[0])
    smallest = smallest_bytes(planned, "none")
    train(planned, plain, steps=[1])
    planned.plan(smallest, "none")
    train_and_compare(planned, plain, steps=[2])
    for fleet in (planned, plain):
        fleet.members[0].optimizer.param_groups[0]["lr"] = 1e38
    train(planned, plain, steps=range(4))
    assert plain.stopped() != {}
    assert_same_fleets(planned, plain)


def test_micro_batches_train_where_optimizer_state_has_no_room_beside_them() -> None:
    planned, plain = fleet_of(accumulate=2), fleet_of(accumulate=2)
    planned.plan(smallest_bytes(planned, max_partitions=2) + 2000, max_partitions=2)
    for number in range(4):
        torch.testing.assert_close(*[fleet.step(batch(number)) for fleet in (planned, plain)])


def test_members_come_and_go_and_the_plan_is_made_anew_where_it_must() -> None:
    planned, plain = fleet_of(4), fleet_of(4)
    planned.plan(1 << 20, "none")
    for fleet in (planned, plain):  # before it is used
        fleet.add(member(4))
        fleet.drop("m0")
    train(planned, plain, steps=range(2))
    taken = planned.members[1]
    for fleet in (planned, plain):
        fleet.replace("m1", member(7))
        fleet.drop("m2")
    kept = {name: value.clone() for name, value in taken.model.state_dict().items()}
    train(planned, plain, steps=[2])
    assert_same(taken.model.state_dict(), kept)  # nothing writes to whoever has left
    for fleet in (planned, plain):
        fleet.add(member(8))
        fleet.add(member(9))
        fleet.replace("m8", sgd(WORKLOAD.build(8), "m8"))  # of another group, and the same name
    train(planned, plain, steps=[3])
    for fleet in (planned, plain):
        for name in ("m3", "m8"):
            fleet.drop(name)
    train_and_compare(planned, plain, steps=[4])
    plan = planned.plan(1 << 20, "none")
    assert sorted(name for part in plan.partition for name in part.members) == sorted(planned.names)


@pytest.mark.usefixtures("known_seconds")
@pytest.mark.parametrize("way", ["turns"])
def test_a_plan_that_holds_more_than_its_budget_is_made_anew(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process holds shows when a plan runs; on a CPU it is what was planned."""
    planned, plain, plan = planned_and_plain(way)
    held = PlannedRunner._held_bytes
    with monkeypatch.context() as patched:
        patched.setattr(PlannedRunner, "_held_bytes", lambda self: held(self) + plan.budget_bytes)
        with pytest.warns(TrainmuxWarning):
            train(planned, plain, steps=[0])
    train_and_compare(planned, plain, steps=[1, 2])


# ---- constants under a plan with branches ---------------------------------------------------------------


def with_constants(*constants: float, **options: Any) -> tm.Fleet:
    members = [adam(projected(number, constant), f"m{number}") for number, constant in enumerate(constants)]
    return tm.Fleet(members, mse, EXAMPLE, deterministic=True, **options)


@pytest.mark.usefixtures("known_seconds")
@pytest.mark.parametrize(
    "constants",
    [
        pytest.param((3.0,) * 4, marks=pytest.mark.extensive, id="shared"),
        pytest.param((1.0, 2.0, 3.0, 4.0), id="of each"),
    ],
)
def test_constants_of_checkpoints_and_newcomers_reach_every_branch(
    constants: Sequence[float], tmp_path: Path
) -> None:
    with_constants(*constants, width=1).save(tmp_path / "saved")
    fleets = with_constants(*(1.0,) * 4), with_constants(*(1.0,) * 4, width=1)
    plan = fleets[0].plan(max_partitions=5)
    assert plan.record.num_branches == 4
    for num_branches in (1, 2, 3):
        with pytest.raises(PlanError):
            fleets[0].use(tm.Plan(replace(plan.record, num_branches=num_branches), plan.profiles))
    fleets[0].step(EXAMPLE)
    for fleet in fleets:
        fleet.restore(tmp_path / "saved")
    for number in range(4):
        if number == 2:
            for fleet in fleets:
                fleet.replace("m1", adam(projected(7, 2.0), "m7"))
        torch.testing.assert_close(*[fleet.step(EXAMPLE) for fleet in fleets])


def test_an_edited_constant_that_members_share_is_taken_over_under_a_plan() -> None:
    planned, plain = with_constants(2.0, 2.0, lowering="aten"), with_constants(2.0, 2.0, lowering="aten")
    planned.plan("64MiB", "none", max_partitions=2)
    for batch in BATCHES[:5]:
        assert torch.equal(planned.step(batch), plain.step(batch))
        if batch is BATCHES[1]:
            for fleet in (planned, plain):
                fleet.members[1].model.frozen.data.mul_(2.0)
                fleet.refresh("m1")


# ---- too little memory, and Ctrl-C ----------------------------------------------------------------------


def is_slab(*size: Any, **options: Any) -> bool:
    is_large = bool(size) and isinstance(size[0], int) and size[0] > 20_000
    return is_large and options.get("dtype") is torch.uint8


def is_host_memory(*_: Any, **options: Any) -> bool:
    return "pin_memory" in options


def no_memory() -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")


@pytest.mark.parametrize(
    ("is_hit", "failure", "was_planned"),
    [
        (is_slab, torch.OutOfMemoryError("no memory"), True),
        (is_host_memory, RuntimeError("can't allocate memory"), True),
        (is_slab, None, False),
        (is_slab, None, True),
    ],
    ids=["no memory", "no host memory", "interrupt before any plan", "interrupt between plans"],
)
def test_a_plan_that_is_not_put_into_use_leaves_the_step_not_begun_and_nothing_is_lost(
    is_hit: Callable[..., bool], failure: Exception | None, was_planned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no memory, or is interrupted."""
    planned, plain, first = planned_and_plain("ring")
    if was_planned:
        train(planned, plain, steps=[0])
    planned.plan(policy="none")
    zeros, interrupts = torch.zeros, []

    def failing(*size: Any, **options: Any) -> Tensor:
        if is_hit(*size, **options) and failure is not None:
            raise failure
        if is_hit(*size, **options) and not interrupts:
            interrupts.append(signal.raise_signal(signal.SIGINT))
        return zeros(*size, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch, "zeros", failing)
        with pytest.raises(BudgetError if failure else KeyboardInterrupt):
            planned.step(batch(2))
    assert_same_fleets(planned, plain)
    if failure is not None:
        planned.use(first if is_hit is is_slab else None)
    train_and_compare(planned, plain, steps=[2])


def test_no_memory_while_a_step_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned, plain = fleet_of(), fleet_of()
    monkeypatch.setenv("TRAINMUX_PROFILE_DIR", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(_planning, "measure_profile", lambda *_, **__: no_memory())
        with pytest.raises(BudgetError) as caught:
            planned.plan(policy="none")
        assert caught.value.__context__ is None
    train(planned, plain, steps=[0])
    planned.plan(policy="none")
    train_and_compare(planned, plain, steps=[1])


def test_interrupts_at_any_time_change_nothing() -> None:
    planned, plain, _ = planned_and_plain("ring")
    planned.step(batch(0))  # what is made once is made in peace
    num_steps = 40
    assert train_interrupted(planned, batch, num_steps) > 3
    for number in range(num_steps):
        plain.step(batch(number))
    assert_same_fleets(planned, plain)


# ---- evaluation by a plan -------------------------------------------------------------------------------

WIDTH = 64


def noisy(model: Any, x: Tensor) -> Any:
    y = model.last(model.drop(model.norm(model.first(x)).relu())) + 0.1 * torch.randn_like(x)
    return 2 * y if model.doubles and not model.training else y


def normed(*, doubles: bool = False) -> nn.Module:
    """Batch norm, dropout and noise, and where ``doubles`` is set another graph in evaluation."""
    layers = {"first": nn.Linear(WIDTH, 8), "last": nn.Linear(8, WIDTH)}
    return Made(noisy, **layers, norm=nn.BatchNorm1d(8), drop=nn.Dropout(0.5), doubles=doubles)


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


LABELLED = labelled(4, WIDTH)
LOADER = [LABELLED(0, torch.float32), labelled(3, WIDTH)(1, torch.float32)]


def evaluated_fleet(builders: list[Any], make_optimizer: Any = torch.optim.AdamW, **options: Any) -> tm.Fleet:
    members = []
    for number, build in enumerate(builders):
        torch.manual_seed(number)
        model = build().train()
        optimizer = make_optimizer(model.parameters(), lr=1e-2 * (number + 1))
        members.append(tm.Member(model, optimizer, name=f"m{number}", seed=number))
    return tm.Fleet(members, classify, LOADER[0], deterministic=True, **options)


def first_weight(model: nn.Module, _: Any) -> dict[str, Tensor]:
    """A metric that nothing has to be computed for: a view of the state."""
    return {"weight": next(model.parameters()).flatten()[0]}


EVALUATED: dict[str, tuple[list[Any], Any, int | None]] = {
    # By name: models, optimizer, how many bytes the budget has above the smallest.
    "everything fits": ([normed] * 2, torch.optim.AdamW, None),
    "optimizer state waits on the host": ([deep] * 4, torch.optim.Adagrad, 170_000),
    "parameters come in as they are needed": ([deep] * 4, torch.optim.SGD, 0),
}


@pytest.mark.parametrize("kind", EVALUATED)
def test_a_planned_evaluation_has_the_same_bits_and_disturbs_nothing(kind: str, tmp_path: Path) -> None:
    builders, optimizer, more_bytes = EVALUATED[kind]
    fleet, control = (evaluated_fleet(builders, optimizer, width=1) for _ in range(2))
    asked: dict[str, Any] = {"device": DEVICE, "max_partitions": 2}
    budget = 1 << 30 if more_bytes is None else smallest_bytes(fleet, **asked) + more_bytes
    plan = fleet.plan(budget, "none" if more_bytes is None else "auto", **asked)

    def evaluate() -> list[Any]:
        return [fleet.evaluate(LOADER), fleet.evaluate(LOADER[:1], first_weight)]

    for each in (fleet, control):
        each.use(plan)
    for number in range(2):
        for each in (fleet, control):
            each.step(LABELLED(10 + number, torch.float32))
        norms = fleet.metrics["grad_norm"]
        if more_bytes is not None:
            with pytest.raises(BudgetError):
                fleet.evaluate([labelled(4096, WIDTH)(0, torch.float32)])
        found = evaluate()
        assert torch.equal(fleet.metrics["grad_norm"], norms)
    for each in (fleet, control):
        each.step(LABELLED(20, torch.float32))
    assert_same_fleets(fleet, control)
    found = evaluate()
    fleet.use(None)
    assert evaluate() == found


def test_members_that_differ_in_evaluation_run_their_own_graphs_by_a_plan() -> None:
    """Before the first step, beside a group with one graph; and where a sub-array has lost its member."""
    fleet = evaluated_fleet([normed, lambda: normed(doubles=True), deep])
    expected = fleet.evaluate(LOADER)
    fleet.use(fleet.plan("1GiB", "none", device=DEVICE))
    assert fleet.evaluate(LOADER[:1]) != expected
    assert fleet.evaluate(LOADER) == expected
    fleet.drop("m2")
    assert fleet.evaluate(LOADER) == {name: expected[name] for name in ("m0", "m1")}
