"""Members from LightningModules: ``tm.lightning.member(module)``, ``metric_fn=tm.lightning.validation``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainmux.errors import LossError, MemberError, OptimizerError, warn_user
from trainmux.fleet import Member

__all__ = ["member", "training_loss", "validation"]

_DECISIVE_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_after_batch_transfer",
    "on_before_backward",
    "on_before_batch_transfer",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)
"""Hooks in the middle of a step: a module that has one of its own trains otherwise than its steps say."""
_OTHER_HOOKS = (
    "on_fit_end",
    "on_fit_start",
    "on_train_end",
    "on_train_epoch_end",
    "on_train_epoch_start",
    "on_train_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "on_validation_epoch_end",
    "on_validation_epoch_start",
    "setup",
)
_VALIDATION = "val_"


def member(
    module: nn.Module,
    name: str | None = None,
    *,
    seed: int | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> Member:
    """Make a member of a LightningModule with automatic optimization, as it is.

    Its loss is that of ``training_step``, always called with 0 for the number of the batch; what that logs
    becomes metrics. Optimizer and schedule are those of ``configure_optimizers``, also where the schedule
    has a ``monitor``. Clipping is what a ``Trainer`` would be told. The module has no ``Trainer``: code that
    asks for one is refused when it is traced, and hooks are not called.

    Refuses what is no LightningModule, and hooks of its own in the middle of a step (``MemberError``);
    manual optimization, several optimizers or schedules, and a schedule with a ``frequency``
    (``OptimizerError``). Warns of other hooks, which may have to be called before.
    """
    base = _base_of(module)
    label = type(module).__name__
    own = _own_hooks(module, base, _DECISIVE_HOOKS)
    if own:
        raise MemberError(
            f"{label}: expected a module without hooks in the middle of a step, got {', '.join(own)}; move "
            "what they do into training_step, or into the loader"
        )
    if not module.automatic_optimization:
        raise OptimizerError(
            f"{label}: expected automatic optimization, got automatic_optimization=False; train it "
            "by trainmux.Member(module, optimizer, loss=...) if its step is that of one optimizer"
        )
    others = _own_hooks(module, base, _OTHER_HOOKS)
    if others:
        warn_user(f"{label}: {', '.join(others)} are not called in a fleet; call what is needed yourself")
    configure: Any = module.configure_model
    configure()
    decide: Any = module.configure_optimizers
    optimizer, schedule = _optimizer_of(decide(), label)
    return Member(
        module,
        optimizer,
        name,
        seed=seed,
        clip_norm=clip_norm,
        clip_value=clip_value,
        loss=training_loss,
        **schedule,
    )


def training_loss(module: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Call ``training_step``; returns the loss, and what was logged."""
    with _log_of(module) as logged:
        found = _step(module.training_step, batch)
    loss = found["loss"] if isinstance(found, Mapping) else found
    if not isinstance(loss, Tensor):
        raise LossError(
            f"training_step of {type(module).__name__}: expected a loss, or a dict with one, got "
            f"{type(found).__name__}; return the loss"
        )
    return loss, {name: _as_metric(value, loss) for name, value in logged.items()}


def validation(module: Any, batch: Any) -> dict[str, Tensor]:
    """Call ``validation_step``; returns what was logged, or else the loss that it returned.

    To be used as ``metric_fn``. As every validation metric is recorded with ``val_`` before its name, that is
    left out where it is there already: ``self.log("val_loss", ...)`` is ``val_loss`` in a history.
    """
    with _log_of(module) as logged:
        found = _step(module.validation_step, batch)
    found = found.get("loss") if isinstance(found, Mapping) else found
    values: dict[str, Any] = {key.removeprefix(_VALIDATION): value for key, value in logged.items()}
    if not values and isinstance(found, Tensor):
        values = {"loss": found}
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    if not tensors:
        raise LossError(
            f"validation_step of {type(module).__name__}: expected it to log a tensor or return one, got "
            f"{sorted(values) or type(found).__name__}; call self.log, or pass a metric_fn of your own"
        )
    return {name: _as_metric(value, tensors[0]) for name, value in values.items()}


def _base_of(module: Any) -> type:
    """LightningModule itself: of whichever of Lightning's two packages the module is from."""
    for cls in type(module).__mro__:
        if cls.__name__ == "LightningModule" and cls.__module__.split(".")[0] in (
            "lightning",
            "pytorch_lightning",
        ):
            return cls
    raise MemberError(
        f"expected a LightningModule, got {type(module).__name__}; make a trainmux.Member of other modules"
    )


def _own_hooks(module: Any, base: type, hooks: Iterable[str]) -> list[str]:
    return [hook for hook in hooks if getattr(type(module), hook, None) is not getattr(base, hook, None)]


def _step(step: Any, batch: Any) -> Any:
    parameters = inspect.signature(step).parameters
    return step(batch, 0) if len(parameters) > 1 else step(batch)


@contextmanager
def _log_of(module: Any) -> Iterator[dict[str, Any]]:
    """Collect what a module logs inside."""
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        logged[name] = value

    def log_dict(dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        logged.update(dictionary)

    attributes = vars(module)
    attributes.update(log=log, log_dict=log_dict)
    try:
        yield logged
    finally:
        del attributes["log"], attributes["log_dict"]


def _as_metric(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, (int, float)):
        return torch.full_like(like.detach(), value)
    if not isinstance(value, Tensor):
        raise LossError(
            f"expected tensors or numbers to be logged, got {type(value).__name__}; torchmetrics' functions "
            "return tensors, its objects keep counts that a fleet cannot follow"
        )
    return value.detach()


def _optimizer_of(given: Any, label: str) -> tuple[Any, dict[str, Any]]:
    """One optimizer and the schedule's part of a member, of the forms that Lightning documents."""
    optimizers, monitor = given, None
    schedulers: list[Any] = []
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list):
        optimizers = given[0]
        schedulers = given[1] if isinstance(given[1], list) else [given[1]]
    if isinstance(optimizers, (list, tuple)):
        if len(optimizers) != 1:
            raise OptimizerError(
                f"{label}: expected one optimizer from configure_optimizers, got {len(optimizers)}; give one "
                "several parameter groups instead"
            )
        optimizers = optimizers[0]
    if isinstance(optimizers, Mapping):
        monitor = optimizers.get("monitor")
        schedulers = [optimizers["lr_scheduler"]] if optimizers.get("lr_scheduler") is not None else []
        optimizers = optimizers.get("optimizer")
    if not isinstance(optimizers, torch.optim.Optimizer):
        raise OptimizerError(
            f"{label}: expected an optimizer from configure_optimizers, got {type(optimizers).__name__}; "
            "return one of torch.optim"
        )
    if not schedulers:
        return optimizers, {}
    if len(schedulers) > 1:
        raise OptimizerError(
            f"{label}: expected one schedule from configure_optimizers, got {len(schedulers)}; chain them by "
            "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR"
        )
    given = schedulers[0]
    chosen = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    interval, monitor = chosen.get("interval", "epoch"), chosen.get("monitor", monitor)
    if "scheduler" not in chosen or chosen.get("frequency", 1) != 1 or interval not in ("step", "epoch"):
        raise OptimizerError(
            f"{label}: expected a schedule advanced by every step or epoch, got {chosen}; leave frequency out"
        )
    schedule = {"scheduler": chosen["scheduler"], "scheduler_interval": interval}
    if isinstance(chosen["scheduler"], ReduceLROnPlateau):
        if monitor is None or interval != "epoch":
            raise OptimizerError(
                f"{label}: expected ReduceLROnPlateau with a monitor, once an epoch, got {chosen}; return "
                '{"scheduler": ..., "monitor": "val_loss"}'
            )
        schedule["scheduler_monitor"] = monitor
    return optimizers, schedule
