"""Positions in loaders that can be saved in a checkpoint and resumed at the same batch.

With them goes the random state on the host that decides which batches come next: shuffling and
augmentation by torch's default CPU generator, a loader's own generators, ``random`` and ``numpy.random``.
Members draw from counters of their own.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from trainmux.errors import BatchError

Batch = Any


def first_batch(loader: Iterable[Batch], what: str = "the loader") -> Batch:
    """Look at a loader's first batch, leaving the host's random state as it was."""
    before = random_state()
    try:
        return BatchCursor(loader, what).next()
    finally:
        restore_random_state(before)


END_OF_PASS: Final = object()
"""Returned by ``BatchCursor.next`` once between two passes over the loader."""


class BatchCursor:
    """Walks over ``loader`` again and again. ``what`` names it in errors.

    A pass is opened only when its first batch is asked for, so that the random state at the end of an epoch
    is the one from which the next epoch's order is drawn.
    """

    def __init__(self, loader: Iterable[Batch], what: str = "the loader") -> None:
        self._loader = loader
        self._what = what
        self._iterator: Iterator[Batch] | None = None
        self._at_start: dict[str, Any] = {}  # random states when the pass was opened
        self._num_passes = 0  # finished ones
        self.num_batches = 0
        """Batches taken in the pass after them."""

    def pass_length(self) -> int | None:
        """Batches in a pass; None where the loader does not say."""
        try:
            return len(self._loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return None

    def next(self) -> Batch:
        """The next batch, or ``END_OF_PASS`` after the last one of a pass; refuses a pass without batches."""
        if self._iterator is None:
            self._iterator = self._open()
        try:
            batch = next(self._iterator)
        except StopIteration:
            if self.num_batches == 0:
                raise BatchError(self._empty_message()) from None
            self.end_pass()
            return END_OF_PASS
        self.num_batches += 1
        return batch

    def next_cycled(self) -> Batch:
        """The next batch, from a new pass where one has ended."""
        batch = self.next()
        return self.next() if batch is END_OF_PASS else batch

    def end_pass(self) -> None:
        """Leave the rest of the pass; the next batch is the first of a new one."""
        self._iterator = None
        self._num_passes += 1
        self.num_batches = 0

    def state(self) -> dict[str, Any]:
        """Return the position, for a checkpoint."""
        return {
            "num_passes": self._num_passes,
            "num_batches": self.num_batches,
            "at_start": self._at_start if self.num_batches else {},
            "generators": self._generator_states(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state`` was taken.

        Within a pass, the pass is opened with the random state it had then and its first batches are read and
        dropped. Leaves the global random state changed: restore it afterwards.
        """
        self._iterator = None
        self._num_passes, self.num_batches = state["num_passes"], 0
        if state["num_batches"]:
            restore_random_state(state["at_start"]["global"])
            self._restore_generators(state["at_start"]["generators"])
            self._iterator = self._open()
            skipped = zip(range(state["num_batches"]), self._iterator, strict=False)
            self.num_batches = sum(1 for _ in skipped)
        self._restore_generators(state["generators"])

    def _open(self) -> Iterator[Batch]:
        self._at_start = {"global": random_state(), "generators": self._generator_states()}
        for owner in {id(owner): owner for owner in self._owners().values()}.values():
            # Distributed samplers shuffle by it.
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(self._num_passes)
        try:
            return iter(self._loader)
        except TypeError as error:
            raise BatchError(
                f"expected {self._what} to be iterable (a DataLoader, a list of batches), "
                f"got {type(self._loader).__name__}: {error}"
            ) from error

    def _empty_message(self) -> str:
        if self._num_passes == 0:
            return f"{self._what} gave no batches, at least one is needed (does drop_last=True leave none?)"
        return (
            f"{self._what} gave batches at first but none in pass {self._num_passes + 1}: "
            "it can be iterated only once. Give a list or a DataLoader instead of an iterator"
        )

    def _owners(self) -> dict[str, Any]:
        """The loader and its samplers: each may have a generator, or shuffle by epoch."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        return {
            "loader": self._loader,
            "sampler": getattr(self._loader, "sampler", None),
            "batch_sampler": batch_sampler,
            "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
        }

    def _generators(self) -> dict[str, torch.Generator]:
        found: dict[str, torch.Generator] = {}
        for path, owner in self._owners().items():
            generator = getattr(owner, "generator", None)
            if isinstance(generator, torch.Generator) and generator not in found.values():
                found[path] = generator
        return found

    def _generator_states(self) -> dict[str, torch.Tensor]:
        return {path: generator.get_state() for path, generator in self._generators().items()}

    def _restore_generators(self, states: Mapping[str, torch.Tensor]) -> None:
        for path, generator in self._generators().items():
            if path in states:
                generator.set_state(states[path])


def random_state() -> dict[str, Any]:
    """Return the process-wide random state, as values that a checkpoint can hold."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    legacy = np.random.get_state(legacy=False)
    # Another bit generator may stand behind numpy.random; its state has no fixed form.
    if isinstance(legacy, dict) and legacy["bit_generator"] == "MT19937":
        key = torch.from_numpy(legacy["state"]["key"].astype(np.int64))
        state["numpy"] = [key, legacy["state"]["pos"], legacy["has_gauss"], legacy["gauss"]]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go back to a ``random_state``."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        key, position, has_gauss, gauss = state["numpy"]
        np.random.set_state(("MT19937", key.numpy().astype(np.uint32), position, has_gauss, gauss))
