"""The arguments of ``fit``, checked before anything is touched."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainmux.errors import ConfigError
from trainmux.fleet._callbacks import Callback

Batch = Any
MetricFn = Callable[..., Any]
Resume = Literal["auto", "must", "never"]
Progress = Literal["auto", "rich", "plain", "off"]

_RESUME: dict[Any, Resume] = {"auto": "auto", "must": "must", True: "must", "never": "never", False: "never"}
_PROGRESS: dict[Any, Progress] = {
    "auto": "auto",
    True: "auto",
    "rich": "rich",
    "plain": "plain",
    False: "off",
}


@dataclass(frozen=True)
class FitOptions:
    """Checked arguments of ``fit``; exactly one of ``epochs`` and ``steps`` is set."""

    loader: Iterable[Batch]
    epochs: int | None
    steps: int | None
    validation: Iterable[Batch] | None
    validate_every: int | None
    metric_fn: MetricFn | None
    callbacks: tuple[Callback, ...]
    checkpoint: str | os.PathLike[str] | None
    resume: Resume
    progress: Progress
    log_every: int | None
    member_loaders: Mapping[str, Iterable[Batch]]


def check_options(
    names: tuple[str, ...],
    loader: Iterable[Batch],
    *,
    epochs: int | None = None,
    steps: int | None = None,
    validation: Iterable[Batch] | None = None,
    validate_every: int | None = None,
    metric_fn: MetricFn | None = None,
    callbacks: Iterable[object] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    resume: str | bool = "auto",
    progress: str | bool = "auto",
    log_every: int | None = None,
    member_loaders: Mapping[str, Iterable[Batch]] | None = None,
) -> FitOptions:
    """Check the arguments; ``ConfigError`` says which one is wrong. No loader is iterated."""
    if (epochs is None) == (steps is None):
        raise ConfigError(
            f"give exactly one of epochs= and steps=, but got epochs={epochs!r} and steps={steps!r}"
        )
    epochs = _count("epochs", epochs)
    steps = _count("steps", steps)
    validate_every = _count("validate_every", validate_every)
    log_every = _count("log_every", log_every)
    if validate_every is not None and epochs is not None:
        raise ConfigError(
            "validate_every= goes with steps=; with epochs= an epoch is what is validated. Leave it out"
        )
    if epochs is not None and epochs > 1 and isinstance(loader, Iterator):
        raise ConfigError(
            f"epochs={epochs} needs a loader that can be iterated again, but got the iterator "
            f"{type(loader).__name__}. Give a DataLoader or a list, or use steps="
        )
    if isinstance(validation, Iterator):
        raise ConfigError(
            f"validation= is iterated after every epoch, but got the iterator {type(validation).__name__}, "
            "which runs out. Give a DataLoader or a list"
        )
    if metric_fn is not None and validation is None:
        raise ConfigError("metric_fn= is for validation, but there is none. Give validation= as well")

    checked: list[Callback] = []
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; did you forget the brackets?" if isinstance(callback, type) else ""
            raise ConfigError(f"expected callbacks derived from trainmux's Callback, got {callback!r}{hint}")
        checked.append(callback)

    try:
        how = _RESUME[resume]
    except (KeyError, TypeError):
        raise ConfigError(
            f"resume must be 'auto', 'must' (True) or 'never' (False), but got {resume!r}"
        ) from None
    if how == "must" and checkpoint is None:
        raise ConfigError("resume='must' needs checkpoint=, the directory to resume from")
    try:
        shown = _PROGRESS[progress]
    except (KeyError, TypeError):
        raise ConfigError(
            f"progress must be 'auto' (True), 'rich', 'plain' or False, but got {progress!r}"
        ) from None

    loaders = dict(member_loaders or {})
    unknown = [name for name in loaders if name not in names]
    if unknown:
        raise ConfigError(f"member_loaders names {unknown}, but the members are {list(names[:20])}")
    return FitOptions(
        loader=loader,
        epochs=epochs,
        steps=steps,
        validation=validation,
        validate_every=validate_every,
        metric_fn=metric_fn,
        callbacks=tuple(checked),
        checkpoint=checkpoint,
        resume=how,
        progress=shown,
        log_every=log_every,
        member_loaders=loaders,
    )


def _count(what: str, value: int | None) -> int | None:
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ConfigError(f"{what} must be a whole number, at least 1, but got {value!r}")
    return number
