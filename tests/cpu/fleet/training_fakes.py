"""A small stand-in for a fleet: members are scalar weights that move towards the mean of each batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from trainmux.fleet import Callback, FitState, History
from trainmux.fleet._checkpoint_files import read_checkpoint, write_checkpoint
from trainmux.fleet._fit import fit

LRS = {"slow": 0.01, "fast": 0.1}
BATCHES = [torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])]


class WatchedTensor(torch.Tensor):
    """Writes down every torch function it takes part in, to catch those that wait for the device."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


class FakeFleet:
    """Stands in for a fleet. ``poison`` maps a member to the step at which its loss becomes NaN."""

    def __init__(self, lrs: Mapping[str, float], *, poison: Mapping[str, int] | None = None) -> None:
        self._names = tuple(lrs)
        self.lrs = torch.tensor([lrs[name] for name in self._names], dtype=torch.float64)
        self.weights = torch.zeros(len(lrs), dtype=torch.float64)
        self.poison = dict(poison or {})
        self.num_steps = 0
        self.reasons: dict[str, str] = {}
        self.log: list[str] = []
        self.seen: list[list[float]] = []
        self.monitored: list[dict[str, dict[str, float]]] = []
        self.num_stopped_calls = 0
        self.fail_at: dict[int, BaseException] = {}
        self.step_type: type[torch.Tensor] = torch.Tensor
        # One buffer for all steps, as a replayed graph has it.
        self._losses = torch.zeros(len(lrs), dtype=torch.float64)
        self._metrics: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    @property
    def metrics(self) -> Mapping[str, Any]:
        return self._metrics

    def step(self, batch: Any, overrides: Mapping[str, Any] | None = None) -> torch.Tensor:
        self.num_steps += 1
        if self.num_steps in self.fail_at:
            raise self.fail_at[self.num_steps]
        targets = torch.tensor(
            [
                float(torch.as_tensor((overrides or {}).get(name, batch)).double().mean())
                for name in self._names
            ],
            dtype=torch.float64,
        )
        self.seen.append(targets.tolist())
        gap = self.weights - targets
        losses = gap**2
        for name, step in self.poison.items():
            if self.num_steps == step:
                losses[self._names.index(name)] = math.nan
                self.reasons.setdefault(name, f"not finite at step {step}")
        active = torch.tensor([name not in self.reasons for name in self._names])
        self.weights = torch.where(active, self.weights - self.lrs * gap, self.weights)
        self._losses.copy_(losses)
        self._metrics = {
            "grad_norm": gap.abs(),
            "finite": torch.isfinite(losses),
            "accuracy": (gap.abs() < 0.5).float(),
            "note": "not a tensor",
        }
        return self._losses.as_subclass(self.step_type)

    def evaluate(self, loader: Iterable[Any], metric_fn: Any = None) -> dict[str, dict[str, float]]:
        self.log.append("evaluate")
        data = torch.cat([torch.as_tensor(batch).double().reshape(-1) for batch in loader])
        gaps = (self.weights - data.mean()) ** 2
        result = {name: {"loss": float(gap)} for name, gap in zip(self._names, gaps, strict=True)}
        if metric_fn is not None:
            for name in self._names:
                result[name]["extra"] = metric_fn(name)
        return result

    def stop(self, name: str) -> None:
        self.log.append(f"stop {name}")
        self.reasons.setdefault(name, "stopped")

    def stopped(self) -> dict[str, str]:
        self.num_stopped_calls += 1
        return dict(self.reasons)

    def end_epoch(self, monitored: Mapping[str, Mapping[str, float]]) -> None:
        self.log.append("end_epoch")
        self.monitored.append({name: dict(values) for name, values in monitored.items()})

    def sync(self) -> None:
        self.log.append("sync")

    def save(self, path: Any, extra: Mapping[str, Any] | None = None) -> None:
        self.log.append("save")
        document = {"reasons": self.reasons, "num_steps": self.num_steps, "extra": dict(extra or {})}
        write_checkpoint(path, {"weights": self.weights}, document)

    def restore(self, path: Any) -> Mapping[str, Any]:
        self.log.append("restore")
        tensors, document = read_checkpoint(path)
        self.weights = tensors["weights"]
        self.reasons = document["reasons"]
        self.num_steps = document["num_steps"]
        return document["extra"]


class Spy(Callback):
    """Keeps the hooks that were called, with epoch and step."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []

    def on_fit_start(self, state: FitState) -> None:
        self.calls.append(("start", state.epoch, state.step))

    def on_step_end(self, state: FitState) -> None:
        assert state.losses is not None
        self.calls.append(("step", state.epoch, state.step))

    def on_epoch_end(self, state: FitState) -> None:
        self.calls.append(("epoch", state.epoch, state.step))

    def on_fit_end(self, state: FitState) -> None:
        self.calls.append(("end", state.epoch, state.step))

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: Any) -> None:
        self.calls = [tuple(call) for call in state["calls"]]


def run(fleet: FakeFleet, loader: Any = BATCHES, **options: Any) -> History:
    """``fit`` without a display."""
    return fit(fleet, loader, progress=False, **options)
