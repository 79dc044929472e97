"""``tm.sweep``: members through the slots of one fleet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainmux.fleet import Callback, Mode, whole_number
from trainmux.search._callbacks import SearchCallback
from trainmux.search._results import Results
from trainmux.search._search import Search, SearchOptions
from trainmux.search._source import AskTell, Given, MemberSource


def sweep(
    members: Iterable[Given] | AskTell,
    *,
    loss: Callable[..., Any] | None = None,
    loader: Iterable[Any] | None = None,
    metric: str | Sequence[str] = "loss",
    mode: Mode | Sequence[Mode] = "min",
    slots: int | None = 16,
    budget: int | str | None = None,
    max_epochs: int = 1,
    steps_per_epoch: int | None = None,
    validation: Iterable[Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    example_batch: Any = None,
    callbacks: Iterable[Callback | SearchCallback] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    resume: str | bool = "auto",
    keep: int | None = None,
    max_groups: int = 4,
    timeout: float | None = None,
    progress: str | bool = "auto",
    **fleet: Any,
) -> Results:
    """Train a queue of members, ``slots`` at a time, and return what became of each.

    ``members`` is a list or generator of `Member`, `Candidate`, or functions that build one when its turn
    comes, or an object with ``ask()`` and ``tell(trial)``. They are built ahead of time on a thread of their
    own. A slot whose member is finished, stopped or failed gets the next one, without a new capture where it
    is like the others. A member that cannot be built or trained fails alone.

    All trials train on the same batches of ``loader``; an epoch is a pass over it, or ``steps_per_epoch``
    steps, and a trial has ``max_epochs`` of them. ``validation`` is evaluated after each with ``metric_fn``
    (default: the loss). ``metric`` names a validation metric, or else a training metric; less of it is
    better, or with ``mode="max"`` more. ``example_batch`` is by default the loader's first. ``callbacks`` are
    those of ``fit`` (`EarlyStopping`, …) and `SearchCallback`s. ``max_groups`` is how many structures train
    side by side; others wait.

    With a ``budget`` the fleet trains by a plan within it (see `Fleet.plan`); ``slots=None`` takes as many as
    it holds without one that offloads.

    With ``checkpoint=``, a folder, trials are saved every ``checkpoint_every`` epochs, and a search that was
    killed goes on from it (``resume`` as for ``fit``); the best trial's weights are in its folder ``best``.
    ``keep=n`` keeps the members of the best n trials only. After ``timeout`` seconds no trial is begun.
    ``progress`` is as for `Fleet.fit`: a live table in a terminal, or lines, or nothing (False).
    Further arguments (``device``, ``precision``, ``deterministic``, …) are those of `Fleet`.
    """
    options = SearchOptions(
        loss, loader, metric, mode, slots, budget, steps_per_epoch, validation, metric_fn, example_batch,
        callbacks, checkpoint, checkpoint_every, resume, keep, max_groups, timeout, progress, fleet,
    )  # fmt: skip
    return Search(MemberSource(members, whole_number("max_epochs", max_epochs)), options).run()
