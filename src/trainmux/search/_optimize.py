"""``tm.optuna.optimize``: trials of an Optuna study through the slots of one fleet."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainmux.errors import ConfigError
from trainmux.fleet import Callback, Member, Mode, whole_number
from trainmux.search._callbacks import SearchCallback
from trainmux.search._results import Results
from trainmux.search._search import Search, SearchOptions
from trainmux.search._trial import Candidate

if TYPE_CHECKING:
    import optuna

_MODES: dict[str, Mode] = {"MINIMIZE": "min", "MAXIMIZE": "max"}


def optimize(
    study: optuna.Study,
    make_member: Callable[[optuna.Trial], Member | Candidate],
    *,
    loss: Callable[..., Any] | None = None,
    loader: Iterable[Any] | None = None,
    metric: str | Sequence[str] = "loss",
    mode: Mode | Sequence[Mode] | None = None,
    slots: int | None = 16,
    budget: int | str | None = None,
    n_trials: int | None = None,
    total_trials: int | None = None,
    max_epochs: int = 1,
    steps_per_epoch: int | None = None,
    validation: Iterable[Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    example_batch: Any = None,
    callbacks: Iterable[Callback | SearchCallback | Callable[[optuna.Study, Any], None]] = (),
    catch: type[BaseException] | Iterable[type[BaseException]] = (Exception,),
    report_every: int = 1,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    resume: str | bool = "auto",
    keep: int | None = None,
    max_groups: int = 4,
    timeout: float | None = None,
    worker: str | None = None,
    heartbeat: float = 60.0,
    storage_timeout: float = 300.0,
    sigterm: bool = False,
    progress: str | bool = "auto",
    **fleet: Any,
) -> Results:
    """Train trials of an Optuna study, ``slots`` at a time, and return what became of each.

    The study is yours: its sampler, pruner and storage, and the dashboards on it, work as with
    ``study.optimize``. ``make_member(trial)`` asks the trial for parameters and returns a `Member` or
    `Candidate`. After every epoch (every ``report_every``-th) the metric is reported, counted from 0, and a
    trial that the pruner gives up leaves its slot to the next. Where a storage would take more than 3% of the
    time for that, epochs are left out, but with ``deterministic=True``. Studies with several directions need
    as many metrics, and do not prune. ``mode`` is the study's; where it is given too, it has to agree.

    A trial fails alone when its member cannot be built or trained, or its value is NaN; why is in its user
    attribute ``trainmux_error``. Exceptions that are not among ``catch`` (default: all are) end the search
    after that. ``optuna.TrialPruned`` in ``make_member`` prunes. ``callbacks`` are those of ``fit``,
    `SearchCallback`s, and functions of ``(study, frozen_trial)``, in which ``study.stop()`` works.

    ``n_trials`` counts the trials that this call begins; ``total_trials`` counts the study's configurations,
    whoever trains them, and has this call wait for trials that other workers may leave behind. Without
    either, and without ``timeout``, the search ends with ``study.stop()``. Unfinished trials wait in the
    study for the next call.

    Any number of processes may work on one study. Each gives a sign of life every ``heartbeat`` seconds (on
    a storage with a ``heartbeat_interval``, as often as that says). The trials of one that is silent for two
    to three times as long fail and are retried by others, from their last checkpoint where ``checkpoint`` is
    a folder that all workers share. ``worker`` is this process's name, made up by default; two of one name
    are refused. A storage that is out of reach is tried again for ``storage_timeout`` seconds while trials
    train on; then their state is saved, and `SearchError` raised. With ``sigterm=True`` (in the main
    thread), SIGTERM ends the search after the epoch, with all saved and given back; a second one ends the
    process at once.

    All else is as for `sweep`.
    """
    try:
        from trainmux.search._study import StudySource
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise ConfigError("expected Optuna, got none: pip install 'trainmux[optuna]'") from None

    callbacks = tuple(callbacks)
    of_study = [item for item in callbacks if _is_of_study(item)]
    options = SearchOptions(
        loss=loss,
        loader=loader,
        metric=metric,
        mode=_mode_of(study, mode),
        slots=slots,
        budget=budget,
        steps_per_epoch=steps_per_epoch,
        validation=validation,
        metric_fn=metric_fn,
        example_batch=example_batch,
        callbacks=[item for item in callbacks if not _is_of_study(item)],  # type: ignore[misc]
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        keep=keep,
        max_groups=max_groups,
        timeout=timeout,
        progress=progress,
        fleet=fleet,
    )
    for name, seconds in (("heartbeat", heartbeat), ("storage_timeout", storage_timeout)):
        if not seconds > 0:
            raise ConfigError(f"{name} must be a number of seconds above 0, but got {seconds!r}")
    source = StudySource(
        study,
        make_member,
        metric=options.metrics[0],
        max_epochs=whole_number("max_epochs", max_epochs),
        n_trials=None if n_trials is None else whole_number("n_trials", n_trials),
        total_trials=None if total_trials is None else whole_number("total_trials", total_trials),
        report_every=whole_number("report_every", report_every),
        callbacks=of_study,  # type: ignore[arg-type]
        catch=(catch,) if isinstance(catch, type) else tuple(catch),
        patience_s=storage_timeout,
        worker=worker,
        heartbeat=heartbeat,
        reports_all=bool(fleet.get("deterministic")),
    )
    search = Search(source, options)
    source.on_stop = search.begin_no_more
    with _ends_on_sigterm(search, sigterm):
        source.open()
        try:
            return search.run()
        finally:
            source.close()


@contextmanager
def _ends_on_sigterm(search: Search, is_wanted: bool) -> Iterator[None]:
    """Have SIGTERM end a search after the epoch; a second one ends the process as it did before."""
    if not is_wanted:
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, before)
        search.end()

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_of_study(item: Any) -> bool:
    return callable(item) and not isinstance(item, (Callback, SearchCallback, type))


def _mode_of(study: Any, mode: Mode | Sequence[Mode] | None) -> Mode | Sequence[Mode]:
    """The study's directions; refuses others."""
    found = tuple(_MODES[direction.name] for direction in study.directions)
    given = (mode,) if isinstance(mode, str) else mode
    if given is not None and tuple(given) != found:
        raise ConfigError(
            f"expected mode= to be {list(found)} like the study's directions, got {mode!r}; leave it out"
        )
    return found
