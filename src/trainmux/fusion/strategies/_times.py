"""What candidates take, measured once and remembered: in this process, and on disk for the next start."""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainmux.errors import TrainmuxWarning
from trainmux.fusion._stacked import Stacked
from trainmux.fusion.strategies._clock import Clock, Work, clock_for
from trainmux.fusion.strategies._store import TimesFile, default_folder
from trainmux.fusion.strategies._torch_modes import real_tensors

ADVANTAGE = 0.97
"""The first candidate is kept unless another takes at most this share of its time: less is noise."""
HOPELESS = 2.5
"""A candidate that takes this many times the best one's time at a glance is not looked at again."""
_SEED = 20231


class OperatorTimes:
    """Answers "which of these is fastest here", measuring what is not known yet.

    A question is text that names everything that decides the answer; ``prepare`` makes the candidates' work
    (one callable for each branch that runs beside the others), with real tensors on the device. What fails
    on the device, for want of memory or of a kernel, is never chosen. ``num_measured`` counts candidates,
    ``measuring_s`` the seconds spent on them.
    """

    def __init__(self, device: torch.device, file: TimesFile | None, clock: Clock | None = None) -> None:
        self.device = device
        self.num_measured = 0
        self.measuring_s = 0.0
        self._file = file
        self._clock = clock
        self._known = {} if file is None else file.read()
        self._may_measure = True
        self._is_measuring = False

    def without_measuring(self) -> OperatorTimes:
        """The same answers, as far as there are any."""
        other = copy.copy(self)
        other._may_measure = False
        return other

    def seconds(
        self, question: str, names: Sequence[str], prepare: Callable[[], Mapping[str, Sequence[Work]]]
    ) -> dict[str, float]:
        """Seconds of each candidate that runs here."""
        known = self._known.get(question)
        if known is None or not set(names) <= known.keys():
            known = self._timed_measure(prepare) if self._may_measure else None
            if known is None:
                return {}
            self._known[question] = known
            if self._file is not None:
                self._file.add({question: known})
        return {name: taken for name in names if (taken := known[name]) is not None}

    def fastest(
        self, question: str, names: Sequence[str], prepare: Callable[[], Mapping[str, Sequence[Work]]]
    ) -> str | None:
        """The best candidate, the first one where others are no better; ``None`` where nothing ran."""
        found = self.seconds(question, names, prepare)
        if not found:
            return None
        best = min(found, key=lambda name: found[name])
        first = found.get(names[0])
        return names[0] if first is not None and found[best] > ADVANTAGE * first else best

    def _timed_measure(
        self, prepare: Callable[[], Mapping[str, Sequence[Work]]]
    ) -> dict[str, float | None] | None:
        """``_measure``, its time added up; preparing one question may ask others."""
        if self._is_measuring:
            return self._measure(prepare)
        begin = time.perf_counter()
        self._is_measuring = True
        try:
            return self._measure(prepare)
        finally:
            self._is_measuring = False
            self.measuring_s += time.perf_counter() - begin

    def _measure(self, prepare: Callable[[], Mapping[str, Sequence[Work]]]) -> dict[str, float | None] | None:
        with real_tensors():
            self._clock = self._clock or clock_for(self.device)
            try:
                candidates = prepare()
                self.num_measured += len(candidates)
                found = self._compare(self._clock, candidates)
            except torch.OutOfMemoryError:
                return None
            finally:
                candidates = {}  # and with it the memory that they read
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # what was measured with is not the step's
            return found

    def _compare(
        self, clock: Clock, candidates: Mapping[str, Sequence[Work]]
    ) -> dict[str, float | None] | None:
        """Times of all candidates, rough ones where these already say that another is far better."""
        failures: list[str] = []
        found: dict[str, float | None] = dict.fromkeys(candidates)
        if len(candidates) > 1:
            for name, branches in candidates.items():
                found[name] = _attempt(clock.glance, branches, failures)
        limit = HOPELESS * min((taken for taken in found.values() if taken is not None), default=0.0)
        for name, branches in candidates.items():
            taken = found[name]
            if len(candidates) == 1 or (taken is not None and taken <= limit):
                found[name] = _attempt(clock.seconds, branches, failures)
        if candidates and all(taken is None for taken in found.values()):
            warnings.warn(
                f"expected one of {', '.join(candidates)} to run on {self.device} to be timed, got "
                f"{failures[0]}; the usual choice is taken, name another with strategies=",
                TrainmuxWarning,
                stacklevel=2,
            )
            return None
        return found


def _attempt(
    measure: Callable[[Sequence[Work]], float], branches: Sequence[Work], failures: list[str]
) -> float | None:
    try:
        return measure(branches)
    except RuntimeError as error:  # out of memory is one of them
        reason = str(error).strip() or "no reason given"
        failures.append(f"{type(error).__name__}: {reason.splitlines()[0]}")
        return None


@functools.cache
def _shared(device: torch.device, folder: Path) -> OperatorTimes:
    return OperatorTimes(device, TimesFile(device, folder))


def times_for(device: torch.device) -> OperatorTimes:
    """The times of a device, shared by everything in this process that measures."""
    return _shared(device, default_folder())


def text_of(value: Any) -> str:
    """A value as part of a question: of a tensor all that decides how fast it is read."""
    if isinstance(value, Stacked):
        return f"stacked {text_of(value.tensor)}"
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype}{list(value.shape)}{list(value.stride())}".replace(" ", "")
    if isinstance(value, (tuple, list)):
        return f"({' '.join(map(text_of, value))})"
    return str(value)


def precision_text() -> str:
    """torch's switches for products of single-precision numbers, which decide how fast these are."""
    cuda = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return f"tf32={int(cuda[0])}{int(cuda[1])}"


def random_like(value: Any, device: torch.device, generator: torch.Generator | None = None) -> Any:
    """Real tensors with random numbers in the place of fake ones, laid out like them."""
    if generator is None:
        generator = torch.Generator(device).manual_seed(_SEED)
    if isinstance(value, Stacked):
        return Stacked(random_like(value.tensor, device, generator))
    if isinstance(value, (tuple, list)):
        return type(value)(random_like(item, device, generator) for item in value)
    if not isinstance(value, Tensor):
        return value
    pairs = zip(value.shape, value.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in pairs) if value.numel() else 0
    flat = torch.empty(length, dtype=value.dtype, device=device)
    if value.dim() > 2:
        flat.normal_(generator=generator)
    else:
        flat.uniform_(0.5, 1.5, generator=generator)  # variances and scales among them are positive
    return flat.as_strided(value.shape, value.stride())
