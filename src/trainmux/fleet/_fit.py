"""The fit loop: steps, epochs, validation, callbacks, checkpoints, progress.

The loop never waits for the device at every step: losses stay there and come over in blocks, about twice a
second while progress is shown and at the end of each epoch. Where ``steps`` is given, an "epoch" is what
lies between two validations, or one pass over the loader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainmux.errors import CheckpointError, ConfigError, warn_user
from trainmux.fleet._callbacks import Callback, FitState, callback_states, load_callback_states
from trainmux.fleet._checkpoint_files import checkpoint_exists
from trainmux.fleet._config import require_choice, whole_number
from trainmux.fleet._cursor import END_OF_PASS, Batch, BatchCursor, random_state, restore_random_state
from trainmux.fleet._fit_view import Curves, FitView
from trainmux.fleet._history import STOPPED_ON_REQUEST, EpochRecord, History, Recorder
from trainmux.fleet._progress import Display, open_display, printable, progress_setting

if TYPE_CHECKING:
    from trainmux.fleet._fleet import Fleet

_REFRESH_S = 0.5
_MAX_NAMED = 10
_STATE_KEY = "fit"
_NEW_SHARE = 0.3
"""Weight of the latest interval in the smoothed speed."""


def fit(fleet: Fleet, options: FitOptions) -> History:
    """Run the loop behind `Fleet.fit`, which describes the options."""
    unknown = [name for name in options.member_loaders or () if name not in fleet.names]
    if unknown:
        raise ConfigError(f"member_loaders names {unknown}, but the members are {list(fleet.names[:20])}")
    # Opened before a checkpoint is restored: what it refuses leaves the fleet as it was.
    display = open_display(str(options.progress), every_update=options.log_every is not None)
    return _FitRun(fleet, options, display).run()


@dataclass
class FitOptions:
    """Arguments of ``fit``, checked: ``ConfigError`` says which one is wrong. No loader is iterated."""

    loader: Iterable[Batch]
    epochs: int | None
    steps: int | None
    validation: Iterable[Batch] | None
    validate_every: int | None
    metric_fn: Callable[..., Any] | None
    callbacks: Iterable[Any]
    checkpoint: str | os.PathLike[str] | None
    resume: str | bool
    progress: str | bool
    log_every: int | None
    member_loaders: Mapping[str, Iterable[Batch]] | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"give exactly one of epochs= and steps=, but got epochs={self.epochs!r} and "
                f"steps={self.steps!r}"
            )
        for setting in ("epochs", "steps", "validate_every", "log_every"):
            if getattr(self, setting) is not None:
                setattr(self, setting, whole_number(setting, getattr(self, setting)))
        if self.validate_every is not None and self.epochs is not None:
            raise ConfigError(
                "validate_every= goes with steps=; with epochs= an epoch is what is validated. Leave it out"
            )
        if self.epochs is not None and self.epochs > 1 and isinstance(self.loader, Iterator):
            raise ConfigError(
                f"epochs={self.epochs} needs a loader that can be iterated again, but got the iterator "
                f"{type(self.loader).__name__}. Give a DataLoader or a list, or use steps="
            )
        if isinstance(self.validation, Iterator):
            raise ConfigError(
                "validation= is iterated after every epoch, but got the iterator "
                f"{type(self.validation).__name__}, which runs out. Give a DataLoader or a list"
            )
        if self.metric_fn is not None and self.validation is None:
            raise ConfigError("metric_fn= is for validation, but there is none. Give validation= as well")
        self.callbacks = tuple(self.callbacks)
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                hint = "; did you forget the brackets?" if isinstance(callback, type) else ""
                raise ConfigError(
                    f"expected callbacks derived from trainmux's Callback, got {callback!r}{hint}"
                )
        if isinstance(self.resume, bool):
            self.resume = "must" if self.resume else "never"
        require_choice("resume", self.resume, ("auto", "must", "never"))
        if self.resume == "must" and self.checkpoint is None:
            raise ConfigError("resume='must' needs checkpoint=, the directory to resume from")
        self.progress = progress_setting(self.progress)

    @property
    def unit(self) -> str:
        """Whether the fit is counted in epochs or in steps."""
        return "epochs" if self.epochs is not None else "steps"


class _FitRun:
    """One call of ``fit``."""

    def __init__(self, fleet: Fleet, options: FitOptions, display: Display) -> None:
        self._fleet = fleet
        self._options = options
        self._display = display
        self._batches = BatchCursor(options.loader)
        self._member_batches: dict[str, BatchCursor] = {}
        self._own_cursors()
        self._epoch = 0  # finished epochs
        self._step = 0  # finished steps
        self._history = History()
        self._losses: torch.Tensor | None = None
        self._end_requested = False
        self._resumed: Mapping[str, Any] | None = self._restore()
        self._recorder = Recorder(fleet.names, fleet.stopped)
        self._reported = set(self._recorder.stopped)
        self._timed_step, self._timed_s = self._step, time.monotonic()
        self._steps_per_s: float | None = None
        self._curves = Curves()

    def run(self) -> History:
        with self._display:
            try:
                self._train()
            except BaseException as error:
                self._sync_after(error)
                raise
        return self._history

    def _train(self) -> None:
        for callback in self._options.callbacks:
            callback.on_fit_start(self._state(self._epoch))
        if self._resumed is not None:
            self._go_to_position(self._resumed)
        while not self._is_done():
            self._train_epoch()
        self._fleet.sync()
        for callback in self._options.callbacks:
            callback.on_fit_end(self._state(self._epoch))

    def _is_done(self) -> bool:
        options = self._options
        return (
            self._end_requested
            or (options.epochs is not None and self._epoch >= options.epochs)
            or (options.steps is not None and self._step >= options.steps)
            or self._all_stopped()
        )

    def _all_stopped(self) -> bool:
        return all(name in self._recorder.stopped for name in self._fleet.names)

    def _train_epoch(self) -> None:
        """Steps until the epoch's end, then everything that belongs there."""
        self._recorder.start_epoch()
        first_step = self._step
        while True:
            batch = self._batches.next()
            if batch is END_OF_PASS:
                # A resume, or a validation at the very end of a pass, may leave an epoch without a step.
                if self._options.validate_every is None and self._step > first_step:
                    break
                continue
            self._train_step(batch)
            if self._epoch_is_cut(first_step):
                break
        if self._options.epochs is not None and self._batches.num_batches:
            # Ended within a pass because nobody trains on: the next epoch is a new pass all the same.
            self._batches.end_pass()
        self._end_epoch()

    def _epoch_is_cut(self, first_step: int) -> bool:
        """Whether the epoch ends after this step, in the middle of a pass or not."""
        options = self._options
        if self._end_requested or self._all_stopped():
            return True
        if options.steps is None:
            return False
        every = options.validate_every
        return self._step >= options.steps or (every is not None and self._step - first_step >= every)

    def _train_step(self, batch: Batch) -> None:
        names = self._fleet.names
        cursors = self._own_cursors()
        overrides = {name: cursors[name].next_cycled() for name in cursors if name in names}
        self._losses = self._fleet.step(batch, overrides) if overrides else self._fleet.step(batch)
        self._step += 1
        self._recorder.add(names, self._losses, self._fleet.metrics)
        if self._refresh_is_due():
            self._recorder.flush()
            self._display.show(self._view(self._epoch + 1))
        for callback in self._options.callbacks:
            callback.on_step_end(self._state(self._epoch + 1))

    def _own_cursors(self) -> dict[str, BatchCursor]:
        """The members' own loaders, also of those that came since."""
        for name, loader in (self._options.member_loaders or {}).items():
            if name not in self._member_batches:
                self._member_batches[name] = BatchCursor(loader, f"the loader of member {name!r}")
        return self._member_batches

    def _refresh_is_due(self) -> bool:
        if self._options.log_every is not None:
            return self._step % self._options.log_every == 0
        return self._display.wants_updates and time.monotonic() - self._timed_s >= _REFRESH_S

    def _end_epoch(self) -> None:
        options, fleet, recorder = self._options, self._fleet, self._recorder
        recorder.flush()
        self._time_steps()  # now, so that validation does not count as training time
        self._epoch += 1
        means = recorder.means()
        if options.validation is not None:
            for name, metrics in fleet.evaluate(options.validation, options.metric_fn).items():
                if name in means:
                    means[name].update({f"val_{key}": float(value) for key, value in metrics.items()})
        for name, values in means.items():
            metrics = {key: value for key, value in values.items() if key != "loss"}
            self._history.append(name, EpochRecord(self._epoch, self._step, values["loss"], metrics))
        self._history.mark_stopped(recorder.stopped)
        fleet.end_epoch(means)

        for callback in options.callbacks:
            callback.on_epoch_end(self._state(self._epoch))
        recorder.flush()  # callbacks may have stopped members
        self._history.mark_stopped(recorder.stopped)
        if options.checkpoint is not None:
            fleet.save(options.checkpoint, {_STATE_KEY: self._checkpoint_state()})
        self._display.show(self._view(self._epoch), ends_epoch=True)
        self._report_frozen()

    def _report_frozen(self) -> None:
        # Last in the epoch: where warnings are errors, the epoch has been recorded and saved by now.
        new = {name: why for name, why in self._recorder.stopped.items() if name not in self._reported}
        self._reported.update(new)
        frozen = [f"{name!r} ({why})" for name, why in new.items() if why != STOPPED_ON_REQUEST]
        if not frozen:
            return
        named = ", ".join(frozen[:_MAX_NAMED])
        if len(frozen) > _MAX_NAMED:
            named += f" and {len(frozen) - _MAX_NAMED} more"
        text = (
            f"epoch {self._epoch}: {len(frozen)} of {len(self._fleet.names)} members stopped training: "
            f"{named}. They keep the weights they had. Try a smaller learning rate or clip_norm for them"
        )
        self._display.message(printable(text))
        warn_user(text)

    def _stop_member(self, name: str) -> None:
        """Before and after, flush: the steps so far count for this member, later ones do not."""
        self._recorder.flush()
        self._fleet.stop(name)
        self._recorder.flush()

    def _request_end(self) -> None:
        self._end_requested = True

    def _state(self, epoch: int) -> FitState:
        return FitState(
            fleet=self._fleet,
            epoch=epoch,
            step=self._step,
            num_epochs=self._options.epochs,
            num_steps=self._options.steps,
            losses=self._losses,
            history=self._history,
            stopped=self._recorder.stopped,
            stop_member=self._stop_member,
            end_fit=self._request_end,
        )

    def _view(self, epoch: int) -> FitView:
        """``epoch`` as shown; call right after a flush, when the device has caught up."""
        self._time_steps()
        losses = self._recorder.current_losses
        self._curves.add(losses)
        return FitView(
            epoch,
            self._options.epochs,
            self._step,
            self._options.steps,
            losses,
            self._curves.current(),
            self._recorder.stopped,
            self._steps_per_s,
            self._remaining_steps(),
            self._fleet._config.device,
        )

    def _time_steps(self) -> None:
        """Update the smoothed speed, now that the device has caught up with the host."""
        now_s = time.monotonic()
        if self._step > self._timed_step and now_s > self._timed_s:
            rate, old = (self._step - self._timed_step) / (now_s - self._timed_s), self._steps_per_s
            self._steps_per_s = rate if old is None else old + _NEW_SHARE * (rate - old)
        self._timed_step, self._timed_s = self._step, now_s

    def _remaining_steps(self) -> int | None:
        if self._options.steps is not None:
            return max(self._options.steps - self._step, 0)
        length = self._batches.pass_length()
        if length is None or self._options.epochs is None:
            return None
        return max((self._options.epochs - self._epoch) * length - self._batches.num_batches, 0)

    def _restore(self) -> Mapping[str, Any] | None:
        """Go back to the checkpoint, if that is asked for and there is one; returns the fit's saved state."""
        path, resume = self._options.checkpoint, self._options.resume
        if path is None or resume == "never":
            return None
        if not checkpoint_exists(path):
            if resume == "must":
                raise CheckpointError(f"resume='must', but there is no checkpoint in {path}. Check the path")
            return None
        saved = self._fleet.restore(path).get(_STATE_KEY)
        if saved is None:
            raise CheckpointError(
                f"the checkpoint {path} was not saved by fit and says nothing of epochs. "
                "Call restore() on it yourself and fit with another checkpoint="
            )
        unit = self._options.unit
        if saved["unit"] != unit:
            raise CheckpointError(
                f"the checkpoint {path} is of a fit with {saved['unit']}=, which cannot go on with {unit}=. "
                f"Give {saved['unit']}=, or resume=False to start over"
            )
        self._epoch = saved["epoch"]
        self._step = saved["step"]
        self._history = History.from_document(saved["history"])
        load_callback_states(self._options.callbacks, saved["callbacks"])
        return saved  # type: ignore[no-any-return]

    def _checkpoint_state(self) -> dict[str, Any]:
        return {
            "unit": self._options.unit,
            "epoch": self._epoch,
            "step": self._step,
            "history": self._history.to_document(),
            "callbacks": callback_states(self._options.callbacks),
            "batches": self._batches.state(),
            "member_batches": {name: cursor.state() for name, cursor in self._member_batches.items()},
            "random": random_state(),
        }

    def _go_to_position(self, saved: Mapping[str, Any]) -> None:
        if self._is_done():
            return  # nothing will be read: do not wait for batches to be skipped
        self._batches.load_state(saved["batches"])
        for name, cursor in self._member_batches.items():
            if name in saved["member_batches"]:
                cursor.load_state(saved["member_batches"][name])
        restore_random_state(saved["random"])

    def _sync_after(self, error: BaseException) -> None:
        try:
            self._fleet.sync()
        except Exception as second:
            # What went wrong first is what the user has to see.
            error.add_note(f"fleet.sync() failed afterwards: {second!r}")
