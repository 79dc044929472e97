"""Where trials come from, and to whom their results go."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from enum import Enum
from typing import Any, Final, Protocol, runtime_checkable

from torch import nn

from trainmux.errors import ConfigError, named_line
from trainmux.fleet import EpochRecord, Member
from trainmux.search._trial import Candidate, Trial


class Later(Enum):
    """Returned by ``Source.ask`` while there is no trial, but may be one when others have finished."""

    LATER = "later"


LATER: Final = Later.LATER


class Verdict(Enum):
    """The decision of a source about a trial after an epoch."""

    GO_ON = "go on"
    PRUNE = "prune"
    LOST = "lost"
    """Somebody else has the trial by now: it ends here, and nobody is told."""


class Source(Protocol):
    """Gives a search its trials and hears what becomes of them.

    All calls come from one thread of its own, but for ``is_stuck``. One that ``asks_ahead`` may be asked
    before there is a slot, and before it has heard of earlier trials.
    """

    asks_ahead: bool

    def is_resumed(self) -> bool:
        """Whether trials of an earlier search may come."""
        ...

    def num_trials(self) -> int | None:
        """The number of trials that a search will get, as far as that is known; from any thread, at once."""
        ...

    def ask(self) -> Trial | Later | None:
        """Return the next trial, `LATER`, or ``None`` when there will be no more.

        A trial whose member cannot be built comes as failed or pruned.
        """
        ...

    def report(self, trial: Trial, record: EpochRecord) -> Verdict:
        """Hear of an epoch; the trial may be further by now."""
        ...

    def tell(self, trial: Trial) -> None:
        """Hear that a trial is finished."""
        ...

    def give_back(self, trial: Trial) -> None:
        """Hear that the search ends with the trial unfinished."""
        ...

    def is_stuck(self) -> bool:
        """Whether a call hangs, so that training should go on without its answer."""
        ...


@runtime_checkable
class AskTell(Protocol):
    """A source of members in place of a list: asked for members, and told what became of them.

    ``ask`` returns a `Member`, a `Candidate` or ``None`` when there are no more.
    """

    def ask(self) -> Member | Candidate | None: ...

    def tell(self, trial: Trial) -> None: ...


Given = Member | Candidate | Callable[[], Member | Candidate]
"""A member of a search, or a function that builds it when its turn comes."""


class MemberSource:
    """The trials of a list, a generator, or an object with ``ask`` and ``tell``; they are never pruned."""

    def __init__(self, members: Iterable[Given] | AskTell, max_epochs: int) -> None:
        self._asked = members if isinstance(members, AskTell) else None
        self.asks_ahead = self._asked is None
        self._rest: Iterator[Given | None] = iter(self._asked_for() if self._asked else _checked(members))
        self._num_trials = len(members) if isinstance(members, Sized) else None
        self._max_epochs = max_epochs
        self._numbers = itertools.count()

    def is_resumed(self) -> bool:
        return False

    def num_trials(self) -> int | None:
        return self._num_trials

    def ask(self) -> Trial | Later | None:
        try:
            given = next(self._rest)
        except StopIteration:
            return None
        return None if given is None else build_trial(given, next(self._numbers), self._max_epochs)

    def report(self, trial: Trial, record: EpochRecord) -> Verdict:
        return Verdict.GO_ON

    def tell(self, trial: Trial) -> None:
        if self._asked is not None:
            self._asked.tell(trial)

    def give_back(self, trial: Trial) -> None:
        pass

    def is_stuck(self) -> bool:
        return False

    def _asked_for(self) -> Iterator[Given | None]:
        assert self._asked is not None
        while (given := self._asked.ask()) is not None:
            yield given


def build_trial(given: Given, number: int, max_epochs: int, params: Mapping[str, Any] | None = None) -> Trial:
    """Make the trial of a member; one that cannot be built comes as failed."""
    try:
        built: Any = given() if callable(given) and not isinstance(given, nn.Module) else given
        candidate = built if isinstance(built, Candidate) else Candidate(built)
        if not isinstance(candidate.member, Member):
            raise ConfigError(
                f"expected trial {number} to be a trainmux.Member or Candidate, got "
                f"{type(candidate.member).__name__}"
            )
    except Exception as error:
        failed = Trial(number, f"trial-{number}", params or {}, max_epochs)
        failed.fail(named_line(error))
        failed.cause = error
        return failed
    member = candidate.member
    if member.name is None:
        member.name = f"trial-{number}"
    epochs = max_epochs if candidate.epochs is None else candidate.epochs
    return Trial(number, member.name, candidate.params or params or {}, epochs, member, candidate.loader)


def _checked(members: Any) -> Iterator[Given]:
    try:
        return iter(members)
    except TypeError:
        raise ConfigError(
            "expected members as a list, a generator, or an object with ask() and tell(), got "
            f"{type(members).__name__}"
        ) from None
