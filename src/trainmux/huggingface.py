"""Members from Hugging Face Trainers: ``tm.huggingface.member(trainer)``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from trainmux.errors import ConfigError, LossError, MemberError
from trainmux.fleet import Member, whole_number

__all__ = ["member"]

_EVALUATION = "eval_"
_REFUSED = {
    "fp16": "use bf16, by Fleet(precision='bf16')",
    "deepspeed": "a fleet trains on one device",
    "fsdp": "a fleet trains on one device",
    "neftune_noise_alpha": "a fleet does not add noise to embeddings",
}


def member(trainer: Any, name: str | None = None, *, num_steps: int | None = None) -> Member:
    """Make a member of what a ``transformers.Trainer`` has: model, optimizer, schedule, loss and clipping.

    Optimizer and schedule are those of ``trainer.create_optimizer_and_scheduler``, for ``num_steps`` updates
    (default: as many as the Trainer would do). The loss is that of ``compute_loss``: the model's own, the
    ``compute_loss_func``, label smoothing, or a subclass's method. ``max_grad_norm`` clips, ``seed`` is the
    member's. A schedule that waits for a plateau looks at ``metric_for_best_model`` in ``validation``.

    The Trainer itself does nothing more: its callbacks, logging and checkpoints are not used. Give `Fleet`
    ``precision`` and ``accumulate`` as its arguments say (``bf16``, ``gradient_accumulation_steps``), and
    ``trainer.get_train_dataloader()`` for a loader; micro-batches then count alike, whatever is padded.

    Refuses what is no Trainer or has a ``training_step`` of its own (``MemberError``), and arguments that a
    fleet cannot honour (``ConfigError``).
    """
    base = _base_of(trainer)
    label = type(trainer).__name__
    if type(trainer).training_step is not base.training_step:
        raise MemberError(
            f"{label}: expected the training_step of a Trainer, got one of its own; move what it does into "
            "compute_loss"
        )
    for setting, remedy in _REFUSED.items():
        if getattr(trainer.args, setting, None):
            raise ConfigError(
                f"{label}: expected {setting} to be off, got {getattr(trainer.args, setting)!r}; {remedy}"
            )
    number = _num_steps(trainer) if num_steps is None else whole_number("num_steps", num_steps)
    trainer.create_optimizer_and_scheduler(num_training_steps=number)
    schedule: dict[str, Any] = {"scheduler": trainer.lr_scheduler}
    if isinstance(trainer.lr_scheduler, ReduceLROnPlateau):
        watched = str(trainer.args.metric_for_best_model or "loss").removeprefix(_EVALUATION)
        schedule["scheduler_monitor"] = f"val_{watched}"
    return Member(
        trainer.model,
        trainer.optimizer,
        name,
        seed=trainer.args.seed,
        clip_norm=trainer.args.max_grad_norm or None,
        loss=_loss_of(trainer, base),
        **schedule,
    )


def _base_of(trainer: Any) -> Any:
    for cls in type(trainer).__mro__:
        if cls.__name__ == "Trainer" and cls.__module__.split(".")[0] == "transformers":
            return cls
    raise MemberError(
        f"expected a transformers.Trainer, got {type(trainer).__name__}; make a trainmux.Member of a model "
        "and an optimizer"
    )


def _num_steps(trainer: Any) -> int:
    """Updates that the Trainer would do."""
    args = trainer.args
    if args.max_steps > 0:
        return int(args.max_steps)
    try:
        num_batches = len(trainer.get_train_dataloader())
    except TypeError:
        raise ConfigError(
            "expected num_steps= or max_steps where the data set has no length, got neither"
        ) from None
    per_epoch: int = max(math.ceil(num_batches / args.gradient_accumulation_steps), 1)
    return math.ceil(float(args.num_train_epochs) * per_epoch)


class _TrainerLoss:
    """A Trainer's ``compute_loss``, told the number of items that the Trainer would count in the batch."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        """Compute the loss of a batch."""
        device = next(value.device for value in batch.values() if isinstance(value, Tensor))
        _, count = self._trainer.get_batch_samples(iter([batch]), 1, device)
        try:
            found = self._trainer.compute_loss(model, dict(batch), num_items_in_batch=count)
        except ValueError as error:
            if "did not return a loss" not in str(error):
                raise
            raise LossError(
                f"expected {type(model).__name__} to return a loss, got none; does the batch have labels? It "
                f"has {sorted(batch)}"
            ) from error
        return found  # type: ignore[no-any-return]


_shared: WeakValueDictionary[Any, _TrainerLoss] = WeakValueDictionary()
"""Losses in use, by all that they depend on: members with one loss share a trace."""


def _loss_of(trainer: Any, base: Any) -> _TrainerLoss:
    if any(
        getattr(type(trainer), method) is not getattr(base, method)
        for method in ("compute_loss", "get_batch_samples")
    ):
        return _TrainerLoss(trainer)
    key = (
        type(trainer.model),
        trainer.compute_loss_func,
        trainer.args.label_smoothing_factor,
        trainer.args.average_tokens_across_devices,
        trainer.model_accepts_loss_kwargs,
        getattr(trainer, "_loss_shifts_labels", None),
    )
    return _shared.setdefault(key, _TrainerLoss(trainer))
