"""Random walks through a fleet's life: no member is ever different from the same one in plain torch."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet_cases import assert_close, mse, net, state_of, train_alone, vectors
from torch import Tensor

import trainmux as tm
from trainmux.errors import CheckpointError, MemberChangedError

pytestmark = pytest.mark.usefixtures("built_once")

TOLERANCE = 1e-10
MAX_MEMBERS = 5
WEIGHTS = {
    "step": 40,
    "add": 4,
    "drop": 3,
    "replace": 4,
    "take_out_and_put_back": 2,
    "stop": 1,
    "sync": 5,
    "save": 3,
    "restore": 3,
    "evaluate": 5,
    "number": 8,
    "edit": 2,
    "change": 3,
}


def make(name: str, seed: int) -> tm.Member:
    """Of two groups; learning rate, clipping, constant and schedule are each member's own."""
    choose = random.Random(seed)
    width = choose.choice((3, 5))
    model = net(seed, hidden=width, shift=choose.choice((0.0, 0.0, 0.5)))
    kind: Any = {3: torch.optim.SGD, 5: torch.optim.AdamW}[width]
    settings = {"momentum": 0.9} if width == 3 else {"weight_decay": 0.1}
    optimizer = kind(model.parameters(), lr=choose.uniform(0.001, 0.05), **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97) if choose.random() < 0.4 else None
    return tm.Member(model, optimizer, name, scheduler=scheduler, clip_norm=choose.choice((None, 0.5)))


class Twins:
    """A member, and the same one in plain torch."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.member, self.plain = name, make(name, seed), make(name, seed)
        self.is_stopped = self.waits = False

    def state(self) -> Any:
        """All of the plain side."""
        model, optimizer, scheduler = self.plain.model, self.plain.optimizer, self.plain.scheduler
        schedule = None if scheduler is None else scheduler.state_dict()
        grads = [parameter.grad for parameter in model.parameters()]
        flags = (self.is_stopped, self.waits)
        return copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule, grads, flags))

    def go_back(self, state: Any) -> None:
        model, optimizer, schedule, grads, (self.is_stopped, self.waits) = copy.deepcopy(state)
        self.plain.model.load_state_dict(model)
        self.plain.optimizer.load_state_dict(optimizer)
        if schedule is not None:
            self.plain.scheduler.load_state_dict(schedule)
        for parameter, grad in zip(self.plain.model.parameters(), grads, strict=True):
            parameter.grad = grad

    def step(self, batch: Any, number: int, accumulate: int) -> float:
        if self.is_stopped or self.waits:
            twin = copy.deepcopy(self.plain.model)  # running statistics do not move
            with torch.no_grad():
                return mse(twin, batch).item()
        return train_alone(self.plain, [batch], accumulate=accumulate, first=number)[0]

    def evaluate(self, batches: Any) -> float:
        twin = copy.deepcopy(self.plain.model).eval()
        with torch.no_grad():
            return sum(mse(twin, batch).item() for batch in batches) / len(batches)

    def assert_same(self) -> None:
        assert_close(state_of(self.member), state_of(self.plain), TOLERANCE)
        rates = [side.optimizer.param_groups[0]["lr"] for side in (self.member, self.plain)]
        assert rates[0] == pytest.approx(rates[1], rel=1e-12)


class Walk:
    """One walk; ``run`` takes as many actions as it is told."""

    def __init__(self, seed: int, folder: Path, **options: Any) -> None:
        self.choose, self.folder = random.Random(seed), folder
        self.accumulate = options.get("accumulate", 1)
        self.num_made = self.num_steps = 0
        self.saved: dict[Path, tuple[int, dict[str, Any]]] = {}
        self.log: list[str] = []
        self.twins = [self._new() for _ in range(2)]
        members = [twins.member for twins in self.twins]
        self.fleet = tm.Fleet(members, mse, self._batch(), precision="fp64", lowering="aten", **options)

    def run(self, num_actions: int, weights: dict[str, float]) -> None:
        """All kinds of actions in any order, and then some by weight."""
        kinds = list(weights)
        more = self.choose.choices(kinds, [weights[kind] for kind in kinds], k=num_actions - len(kinds))
        actions = [*kinds, *more]
        self.choose.shuffle(actions)
        for name in actions:
            self.log.append(name)
            try:
                getattr(self, f"do_{name}")()
                assert self.fleet.names == tuple(twins.name for twins in self.twins)
            except Exception as error:
                error.add_note(f"after {self.log[-30:]}")
                raise
        self.do_sync()

    def _new(self) -> Twins:
        self.num_made += 1
        return Twins(f"m{self.num_made}", self.choose.randrange(1 << 30))

    def _batch(self) -> tuple[Tensor, Tensor]:
        return vectors(self.choose.randrange(1 << 30), size=6)

    def _one(self) -> Twins:
        return self.choose.choice(self.twins)

    def _is_between_updates(self) -> bool:
        return self.num_steps % self.accumulate != 0

    def do_step(self) -> None:
        batch = self._batch()
        found = self.fleet.step(batch).tolist()
        self.num_steps += 1
        for twins, loss in zip(self.twins, found, strict=True):
            expected = twins.step(batch, self.num_steps, self.accumulate)
            assert loss == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), twins.name
            twins.waits = twins.waits and self._is_between_updates()

    def do_add(self) -> None:
        if len(self.twins) < MAX_MEMBERS:
            self._join(self._new())

    def _join(self, twins: Twins) -> None:
        self.fleet.add(twins.member)
        twins.waits = self._is_between_updates()
        self.twins.append(twins)
        self.saved.clear()

    def _leave(self) -> Twins:
        twins = self._one()
        assert self.fleet.drop(twins.name) is twins.member
        twins.assert_same()
        self.twins.remove(twins)
        self.saved.clear()
        return twins

    def do_drop(self) -> None:
        if len(self.twins) > 1:
            self._leave()

    def do_take_out_and_put_back(self) -> None:
        """It trains again where it was stopped, and loses what was accumulated."""
        twins = self._leave()
        twins.is_stopped = False
        twins.plain.optimizer.zero_grad()
        self._join(twins)

    def do_replace(self) -> None:
        old, new = self._one(), self._new()
        assert self.fleet.replace(old.name, new.member) is old.member
        old.assert_same()
        new.waits = self._is_between_updates()
        self.twins[self.twins.index(old)] = new
        self.saved.clear()

    def do_stop(self) -> None:
        twins = self._one()
        self.fleet.stop(twins.name)
        twins.is_stopped = True

    def do_sync(self) -> None:
        self.fleet.sync()
        for twins in self.twins:
            twins.assert_same()

    def do_save(self) -> None:
        path = self.folder / f"checkpoint {len(self.saved) % 2}"
        self.fleet.save(path)
        self.saved[path] = (self.num_steps, {twins.name: twins.state() for twins in self.twins})

    def do_restore(self) -> None:
        if not self.saved:
            with pytest.raises(CheckpointError):
                self.fleet.restore(self.folder / "none")
            return
        path = self.choose.choice(list(self.saved))
        self.fleet.restore(path)
        self.num_steps, states = self.saved[path]
        for twins in self.twins:
            twins.go_back(states[twins.name])

    def do_evaluate(self) -> None:
        batches = [self._batch() for _ in range(2)]
        found = self.fleet.evaluate(batches)
        for twins in self.twins:
            assert found[twins.name]["loss"] == pytest.approx(twins.evaluate(batches), rel=TOLERANCE)

    def do_number(self) -> None:
        """A number that the fleet follows by itself."""
        twins = self._one()
        kind = self.choose.choice(("lr", "weight_decay", "clip_norm"))
        limit, value = self.choose.choice((None, 0.1, 1.0)), self.choose.uniform(0.0, 0.05)
        for side in (twins.member, twins.plain):
            if kind == "clip_norm":
                side.clip_norm = limit
            else:
                side.optimizer.param_groups[0][kind] = value

    def do_edit(self) -> None:
        """Weights that are edited by hand after ``sync``, and taken over."""
        twins = self._one()
        self.fleet.sync()
        for side in (twins.member, twins.plain):
            with torch.no_grad():
                side.model.last.weight.mul_(0.5)
        with pytest.raises(MemberChangedError):
            self.fleet.step(self._batch())
        self.fleet.refresh(twins.name)

    def do_change(self) -> None:
        """A change that must be refused: undone again, or taken over."""
        twins, kind = self._one(), self.choose.choice(("scale", "mode", "frozen"))

        def change(model: Any) -> None:
            if kind == "scale":
                model.scale = 1.5 - model.scale
            elif kind == "mode":
                model.norm.train(not model.norm.training)
            else:
                model.last.bias.requires_grad_(not model.last.bias.requires_grad)

        change(twins.member.model)
        with pytest.raises(MemberChangedError, match=twins.name):
            self.fleet.step(self._batch())
        if self.choose.random() < 0.5 or kind == "frozen":
            change(twins.member.model)
            return
        change(twins.plain.model)
        self.fleet.refresh(twins.name)
        self.saved.clear()

    def do_plan(self) -> None:
        self.fleet.plan(budget="64MiB", policy="none")

    def do_unplan(self) -> None:
        self.fleet.use(None)


PLANS: dict[str, float] = {"plan": 4, "unplan": 3}


@pytest.mark.parametrize(
    ("seed", "num_actions", "plans", "options"),
    [
        (0, 20, {}, {}),
        (2, 25, {}, {"accumulate": 2, "width": 2}),
        (100, 20, PLANS, {"accumulate": 2}),
    ],
)
def test_a_short_walk(
    seed: int, num_actions: int, plans: dict[str, float], options: dict[str, int], tmp_path: Path
) -> None:
    Walk(seed, tmp_path, **options).run(num_actions, {**WEIGHTS, **plans})


@pytest.mark.extensive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(50))
def test_a_walk_of_500_actions(seed: int, tmp_path: Path) -> None:
    walk = Walk(1000 + seed, tmp_path, accumulate=(1, 1, 2, 3)[seed % 4])
    walk.run(500, {**WEIGHTS, "plan": 0.3, "unplan": 0.3})
