"""A random walk through the life of a fleet, beside the same members in plain torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import trainmux as tm
from trainmux.errors import CheckpointError, MemberChangedError

TOLERANCE = 1e-10
MAX_MEMBERS = 5


class Net(nn.Module):
    """Two layers around a batch norm; wide ones form a group of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, 2)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh()) * self.scale


def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    y = model(batch[0])
    return F.mse_loss(y, batch[1]), {"mean": y.mean()}


def plain_loss(model: nn.Module, batch: Any) -> Tensor:
    return loss_fn(model, batch)[0]


def make_optimizer(kind: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


class Replica:
    """A member, and what plain torch makes of the same model."""

    def __init__(self, name: str, choose: random.Random) -> None:
        self.name = name
        torch.manual_seed(choose.randrange(1 << 30))
        width, kind, lr = choose.choice((3, 5)), choose.choice(("sgd", "adamw")), choose.uniform(0.001, 0.05)
        model = Net(width).double()
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(kind, self.model, lr)
        optimizer = make_optimizer(kind, model, lr)
        self.scheduler: Any = None
        scheduler = None
        if choose.random() < 0.4:
            self.scheduler, scheduler = (
                torch.optim.lr_scheduler.ExponentialLR(each, 0.97) for each in (self.optimizer, optimizer)
            )
        self.clip_norm = choose.choice((None, 0.5))
        self.is_stopped = False
        self.waits = False
        self.member = tm.Member(model, optimizer, name=name, scheduler=scheduler, clip_norm=self.clip_norm)

    def state(self) -> Any:
        """All of the plain side."""
        schedule = None if self.scheduler is None else copy.deepcopy(self.scheduler.state_dict())
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        grads = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        flags = (self.is_stopped, self.waits)
        return copy.deepcopy((model, optimizer)), schedule, grads, flags

    def go_back(self, state: Any) -> None:
        (model, optimizer), schedule, grads, (self.is_stopped, self.waits) = copy.deepcopy(state)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        if schedule is not None:
            self.scheduler.load_state_dict(schedule)
        for parameter, grad in zip(self.model.parameters(), grads, strict=True):
            parameter.grad = grad

    def step(self, batch: Any, num_micro: int, *, applies: bool) -> float:
        if self.is_stopped or self.waits:
            buffers = copy.deepcopy(dict(self.model.named_buffers()))
            with torch.no_grad():
                loss = plain_loss(self.model, batch)
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(buffers[name])
            return loss.item()
        loss = plain_loss(self.model, batch)
        (loss / num_micro).backward()
        if applies:
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        return loss.item()

    def evaluate(self, batches: Any) -> float:
        is_training = self.model.norm.training
        self.model.eval()
        with torch.no_grad():
            losses = [plain_loss(self.model, batch).item() for batch in batches]
        self.model.train()
        self.model.norm.train(is_training)
        return sum(losses) / len(losses)

    def assert_same(self) -> None:
        for (name, one), other in zip(
            self.member.model.state_dict().items(), self.model.state_dict().values(), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE, msg=f"{self.name} {name}")
        assert self.member.optimizer.param_groups[0]["lr"] == pytest.approx(
            self.optimizer.param_groups[0]["lr"], rel=1e-12
        )


def _rescale(model: Any, optimizer: Any) -> None:
    model.scale = 0.5 if model.scale == 1.0 else 1.0


def _freeze(model: Any, optimizer: Any) -> None:
    model.last.bias.requires_grad_(not model.last.bias.requires_grad)


def _to_eval(model: Any, optimizer: Any) -> None:
    model.norm.train(not model.norm.training)


class Walk:
    """One walk; ``run`` takes as many actions as it is told."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.choose = random.Random(seed)
        self.folder = folder
        self.accumulate = self.choose.choice((1, 1, 2, 3))
        self.num_made = self.num_steps = 0
        self.saved: dict[Path, tuple[int, dict[str, Any]]] = {}
        self.log: list[str] = []
        self.replicas = [self._new() for _ in range(2)]
        members = [replica.member for replica in self.replicas]
        self.fleet = tm.Fleet(
            members, loss_fn, self._batch(), precision="fp64", accumulate=self.accumulate, lowering="aten"
        )

    def run(self, num_actions: int, weights: dict[str, float]) -> None:
        actions = list(weights)
        for name in self.choose.choices(actions, [weights[name] for name in actions], k=num_actions):
            self.log.append(name)
            try:
                getattr(self, f"do_{name}")()
            except Exception as error:
                error.add_note(f"after {self.log[-30:]}")
                raise
        self.do_sync()

    def _new(self) -> Replica:
        self.num_made += 1
        return Replica(f"m{self.num_made}", self.choose)

    def _batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.choose.randrange(1 << 30))
        x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
        return x, torch.randn(6, 2, dtype=torch.float64, generator=generator)

    def _one(self) -> Replica:
        return self.choose.choice(self.replicas)

    def _is_between_updates(self) -> bool:
        return self.num_steps % self.accumulate != 0

    def do_step(self) -> None:
        batch = self._batch()
        found = self.fleet.step(batch).tolist()
        self.num_steps += 1
        applies = not self._is_between_updates()
        for replica, loss in zip(self.replicas, found, strict=True):
            expected = replica.step(batch, self.accumulate, applies=applies)
            assert loss == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE), replica.name
            replica.waits = replica.waits and not applies

    def do_add(self) -> None:
        if len(self.replicas) < MAX_MEMBERS:
            replica = self._new()
            self.fleet.add(replica.member)
            replica.waits = self._is_between_updates()
            self.replicas.append(replica)
            self.saved.clear()

    def do_drop(self) -> None:
        if len(self.replicas) > 1:
            replica = self._one()
            assert self.fleet.drop(replica.name) is replica.member
            replica.assert_same()
            self.replicas.remove(replica)
            self.saved.clear()

    def do_replace(self) -> None:
        old, new = self._one(), self._new()
        assert self.fleet.replace(old.name, new.member) is old.member
        old.assert_same()
        new.waits = self._is_between_updates()
        self.replicas[self.replicas.index(old)] = new
        self.saved.clear()

    def do_stop(self) -> None:
        replica = self._one()
        if not replica.waits:
            self.fleet.stop(replica.name)
            replica.is_stopped = True

    def do_sync(self) -> None:
        self.fleet.sync()
        for replica in self.replicas:
            replica.assert_same()

    def do_save(self) -> None:
        path = self.folder / f"checkpoint {len(self.saved) % 2}"
        self.fleet.save(path)
        self.saved[path] = (self.num_steps, {replica.name: replica.state() for replica in self.replicas})

    def do_restore(self) -> None:
        if not self.saved:
            with pytest.raises(CheckpointError):
                self.fleet.restore(self.folder / "none")
            return
        path = self.choose.choice(list(self.saved))
        self.fleet.restore(path)
        self.num_steps, states = self.saved[path]
        for replica in self.replicas:
            replica.go_back(states[replica.name])

    def do_evaluate(self) -> None:
        batches = [self._batch() for _ in range(2)]
        found = self.fleet.evaluate(batches)
        for replica in self.replicas:
            expected = replica.evaluate(batches)
            assert found[replica.name]["loss"] == pytest.approx(expected, rel=TOLERANCE), replica.name

    def do_number(self) -> None:
        """A number that the fleet follows by itself."""
        replica = self._one()
        group, plain = replica.member.optimizer.param_groups[0], replica.optimizer.param_groups[0]
        kind = self.choose.choice(("lr", "weight_decay", "clip_norm"))
        if kind == "clip_norm":
            replica.clip_norm = replica.member.clip_norm = self.choose.choice((None, 0.1, 1.0))
        else:
            group[kind] = plain[kind] = self.choose.uniform(0.0, 0.05)

    def do_edit(self) -> None:
        """Weights that are edited by hand after ``sync``, and taken over."""
        replica = self._one()
        self.fleet.sync()
        for model in (replica.member.model, replica.model):
            with torch.no_grad():
                model.last.weight.mul_(0.5)
        with pytest.raises(MemberChangedError):
            self.fleet.step(self._batch())
        self.fleet.refresh(replica.name)

    def do_change(self) -> None:
        """A change that must be refused: undone again, or taken over."""
        replica = self._one()
        change: Callable[[Any, Any], None] = self.choose.choice((_rescale, _freeze, _to_eval))
        change(replica.member.model, replica.member.optimizer)
        with pytest.raises(MemberChangedError, match=replica.name):
            self.fleet.step(self._batch())
        if self.choose.random() < 0.5 or change is _freeze:
            change(replica.member.model, replica.member.optimizer)
            return
        change(replica.model, replica.optimizer)
        self.fleet.refresh(replica.name)
        self.saved.clear()

    def do_plan(self) -> None:
        self.fleet.plan(budget="64MiB", policy="none")

    def do_unplan(self) -> None:
        self.fleet.use(None)
