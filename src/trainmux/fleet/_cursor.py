"""Positions in loaders that can be saved in a checkpoint and resumed at the same batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainmux.errors import BatchError
from trainmux.fleet import _random_state
from trainmux.fleet._fit_options import Batch


class EndOfPass:
    """Returned by ``BatchCursor.next`` once between two passes over the loader."""


END_OF_PASS: Final = EndOfPass()


@dataclass(frozen=True)
class Position:
    """Passes finished, and batches taken in the pass after them."""

    num_passes: int = 0
    num_batches: int = 0


class BatchCursor:
    """Walks over ``loader`` again and again. ``what`` names it in errors.

    A pass is opened only when its first batch is asked for, so that the random state at the end of an epoch
    is the one from which the next epoch's order is drawn.
    """

    def __init__(self, loader: Iterable[Batch], what: str = "the loader") -> None:
        self._loader = loader
        self._what = what
        self._iterator: Iterator[Batch] | None = None
        self._position = Position()
        self._at_start: dict[str, Any] = {}  # random states when the pass was opened

    @property
    def position(self) -> Position:
        return self._position

    def pass_length(self) -> int | None:
        """Batches in a pass; None where the loader does not say."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def next(self) -> Batch | EndOfPass:
        """The next batch, or ``END_OF_PASS`` after the last one of a pass; refuses a pass without batches."""
        if self._iterator is None:
            self._iterator = self._open()
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self._position.num_batches == 0:
                raise BatchError(self._empty_message()) from None
            self.end_pass()
            return END_OF_PASS
        self._position = Position(self._position.num_passes, self._position.num_batches + 1)
        return batch

    def next_cycled(self) -> Batch:
        """The next batch, from a new pass where one has ended."""
        batch = self.next()
        return self.next() if batch is END_OF_PASS else batch

    def end_pass(self) -> None:
        """Leave the rest of the pass; the next batch is the first of a new one."""
        self._iterator = None
        self._position = Position(self._position.num_passes + 1, 0)

    def state(self) -> dict[str, Any]:
        """Return the position, for a checkpoint."""
        return {
            "num_passes": self._position.num_passes,
            "num_batches": self._position.num_batches,
            "at_start": self._at_start if self._position.num_batches else {},
            "generators": _random_state.capture_generators(self._loader),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was taken.

        Within a pass, the pass is opened with the random state it had then and its first batches are read and
        dropped. Leaves the global random state changed: restore it afterwards.
        """
        self._iterator = None
        self._position = Position(state["num_passes"], 0)
        if state["num_batches"]:
            _random_state.restore_global(state["at_start"]["global"])
            _random_state.restore_generators(self._loader, state["at_start"]["generators"])
            self._iterator = self._open()
            num_skipped = sum(1 for _ in zip(range(state["num_batches"]), self._iterator, strict=False))
            self._position = Position(state["num_passes"], num_skipped)
        _random_state.restore_generators(self._loader, state["generators"])

    def _open(self) -> Iterator[Batch]:
        self._at_start = {
            "global": _random_state.capture_global(),
            "generators": _random_state.capture_generators(self._loader),
        }
        for set_epoch in _epoch_setters(self._loader):
            set_epoch(self._position.num_passes)
        try:
            return iter(self._loader)
        except TypeError as error:
            raise BatchError(
                f"expected {self._what} to be iterable (a DataLoader, a list of batches), "
                f"got {type(self._loader).__name__}: {error}"
            ) from error

    def _empty_message(self) -> str:
        if self._position.num_passes == 0:
            return f"{self._what} gave no batches, at least one is needed (does drop_last=True leave none?)"
        return (
            f"{self._what} gave batches at first but none in pass {self._position.num_passes + 1}: "
            "it can be iterated only once. Give a list or a DataLoader instead of an iterator"
        )


def _epoch_setters(loader: Iterable[Batch]) -> list[Callable[[int], object]]:
    """``set_epoch`` of the loader and its samplers, each once; distributed samplers shuffle by it."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = [
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ]
    distinct = {id(owner): owner for owner in owners if callable(getattr(owner, "set_epoch", None))}
    return [owner.set_epoch for owner in distinct.values()]  # type: ignore[union-attr]
