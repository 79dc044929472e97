"""Compiled regions: one kernel for each distinct structure, compiled side by side, cached across runs.

Inductor keeps what it compiled on disk by itself; here equal regions meet before they reach it. Until a
kernel is compiled, and if it cannot be, its region runs node by node through ATen.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, fx

from trainmux.errors import ConfigError, TrainmuxWarning
from trainmux.lowering import _inductor
from trainmux.lowering._given_memory import GivenMemory, Place
from trainmux.lowering._known import (
    is_known,
    recall,
    recall_choices,
    remember,
    remember_choices,
    stored_key,
)
from trainmux.lowering._regions import RegionGraph, to_payload
from trainmux.lowering._workers import Job, Workers
from trainmux.runtime import deterministic_algorithms, ignored_warnings, process_lock
from trainmux.tracing import FakeTensorMode

_MAX_WORKERS = 12


def _max_workers() -> int:
    """Processes to compile in: what ``TRAINMUX_COMPILE_WORKERS`` says, else one for each core but one."""
    given = os.environ.get("TRAINMUX_COMPILE_WORKERS", "")
    if given and not given.isdecimal():
        raise ConfigError(f"TRAINMUX_COMPILE_WORKERS: expected a whole number, got {given!r}")
    return int(given) if given else max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) - 1))


class Kernel:
    """The code of a region."""

    def __init__(self, key: str, region: RegionGraph) -> None:
        self.key = key
        self.stored_key = ""
        """The key of its code and choices on disk, once it is known."""
        self.failure = ""
        self.is_claimed = False
        self._region: RegionGraph | None = region
        self._module: fx.GraphModule | None = None
        self._compiled: _inductor.Compiled | None = None
        self._given: GivenMemory | None = None
        self._has_run = False
        self._payload = b""
        self.combines = region.combines

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @property
    def is_settled(self) -> bool:
        """Whether it is compiled, or known not to compile."""
        return self._compiled is not None or bool(self.failure)

    def run(self, tensors: list[Tensor], places: Sequence[Place | None] = ()) -> Sequence[Tensor]:
        """Run on inputs and memory for placed outputs; returns the other outputs. ``tensors`` is emptied.

        ``places`` says where those others should go; code that cannot be steered puts them elsewhere.
        """
        compiled, module = self._compiled, self._module
        if compiled is None and module is None:
            with process_lock:  # another thread may compile it just now
                compiled = self._compiled
                if compiled is None:
                    module = self._module = self._traced()[0]
        if compiled is None:
            assert module is not None
            plain: Sequence[Tensor] = module(*tensors)
            return plain
        if self._has_run:
            return self._run_compiled(compiled, tensors, places)
        variants = _inductor.Variants(compiled)
        known = recall_choices(self.stored_key) if variants.are_open and self.stored_key else {}
        variants.take(known)
        # The first time, code may choose among its variants, which imports parts of the compiler: torch warns
        # about itself then, and where warnings are errors, nothing would run.
        with ignored_warnings(), _inductor.short_benchmarks():
            try:
                results = self._run_compiled(compiled, tensors, places)
            finally:  # what was chosen before a failure is not open any more
                made = variants.made()
                if made and self.stored_key:
                    remember_choices(self.stored_key, {**known, **made})
        self._has_run = True
        return results

    def _run_compiled(
        self, compiled: _inductor.Compiled, tensors: list[Tensor], places: Sequence[Place | None]
    ) -> Sequence[Tensor]:
        if not places:
            results: Sequence[Tensor] = compiled(tensors)
            return results
        if self._given is None:
            self._given = GivenMemory(compiled)
        return self._given.run(tensors, places)

    def payload(self) -> bytes:
        """The region, to be compiled elsewhere or stored."""
        if not self._payload:
            assert self._region is not None
            self._payload = to_payload(self._region)
        return self._payload

    def job(self) -> Job:
        """The region, as a worker wants it."""
        return self.payload(), self.combines, self.stored_key

    def compile(self) -> None:
        """Compile once; a failure is kept in ``failure`` and the kernel goes on through ATen."""
        if self.is_settled:
            return
        try:
            module, fakes, mode = self._traced()
            self._compiled = _inductor.compile_graph(module, fakes, mode)
            self.payload()
            self._module = self._region = None
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]

    def load(self, code: bytes) -> None:
        """Take code that was compiled before; where it is empty or damaged, nothing happens."""
        if self.is_settled or not code:
            return
        try:
            self._compiled = _inductor.load_code(code)
        except Exception:  # damaged code can fail in any way
            return
        self.payload()
        self._module = self._region = None

    def store(self) -> None:
        """Keep the code by ``stored_key``, where it is compiled and can be stored."""
        code = b"" if self._compiled is None else _inductor.code_of(self._compiled)
        if code:
            remember(self.stored_key, code)

    def _traced(self) -> tuple[fx.GraphModule, Sequence[Tensor], FakeTensorMode]:
        assert self._region is not None
        return self._region.traced()


class KernelCache:
    """The kernels of a process for one way of compiling."""

    def __init__(self, *, deterministic: bool = False) -> None:
        self._deterministic = deterministic
        self._kernels: dict[str, Kernel] = {}
        self._filling = threading.Lock()

    def kernel(self, key: str, read: Callable[[], RegionGraph]) -> Kernel:
        """The kernel for a region's structure; the region is read only where no kernel is known for it."""
        if key not in self._kernels:
            self._kernels[key] = Kernel(key, read())
        return self._kernels[key]

    def has(self, kernels: Sequence[Kernel]) -> bool:
        """Whether nothing is left to be compiled: all code is here, or on disk."""
        missing = [kernel for kernel in kernels if not kernel.is_compiled]
        return all(map(is_known, self._stored_keys(missing).values()))

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile what is not compiled yet, side by side; warns about kernels that stay on ATen."""
        self.compile_batches([kernels])

    def compile_batches(self, batches: Iterable[Iterable[Kernel]]) -> None:
        """Compile kernels that come in batches, of which workers have the first while others are made."""
        found: dict[str, Kernel] = {}
        with Workers(_max_workers(), deterministic=self._deterministic) as workers:
            for batch in batches:
                new = {kernel.key: kernel for kernel in batch if kernel.key not in found}
                missing = self._loaded([kernel for kernel in new.values() if not kernel.is_settled])
                found |= {kernel.key: kernel for kernel in missing}
                for kernel in missing:
                    if not kernel.is_claimed:
                        workers.add(kernel.job())
            if found:
                with self._filling:  # what another thread has workers compile is needed, too
                    workers.finish()
        waiting = self._loaded(list(found.values()))
        # One after another: Inductor's settings are those of the process, and its threads trip over them.
        for kernel in waiting:
            with self._settings(combines=kernel.combines):
                kernel.compile()
            if kernel.failure and kernel.combines:
                kernel.failure = ""
                with self._settings(combines=False):
                    kernel.compile()
            kernel.store()
        failed = [kernel for kernel in waiting if kernel.failure]
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(waiting)} regions could not be compiled and run through ATen, "
                f"slower; the first one: {failed[0].failure}",
                TrainmuxWarning,
                stacklevel=2,
            )

    def _loaded(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Load code that is on disk; returns the kernels for which there is none."""
        keys = self._stored_keys(kernels)
        for kernel in kernels:
            kernel.stored_key = keys[kernel.key]
            with self._settings(combines=kernel.combines):
                kernel.load(recall(kernel.stored_key))
        return [kernel for kernel in kernels if not kernel.is_settled]

    def _stored_keys(self, kernels: Sequence[Kernel]) -> dict[str, str]:
        """The key on disk of each kernel's code, by the kernel's own key."""
        decisive: dict[bool, str] = {}
        for combines in {kernel.combines for kernel in kernels}:
            with self._settings(combines=combines):
                decisive[combines] = _inductor.surroundings()
        return {kernel.key: stored_key(kernel.key, decisive[kernel.combines]) for kernel in kernels}

    @contextmanager
    def _settings(self, *, combines: bool) -> Iterator[None]:
        with (
            _inductor.settings(deterministic=self._deterministic, combines=combines),
            deterministic_algorithms(self._deterministic),
        ):
            yield

    def fill(self, kernels: Iterable[Kernel]) -> Callable[[], None]:
        """A function that has workers compile kernels into the cache on disk, one at least: nobody waits.

        It may be called on any thread. Calls wait for one another, so that the last to return finds the
        kernels of all before it as well.
        """
        waiting = [kernel for kernel in kernels if not kernel.is_settled and not kernel.is_claimed]
        keys = self._stored_keys(waiting)
        for kernel in waiting:
            kernel.stored_key = keys[kernel.key]
        waiting = [kernel for kernel in waiting if not is_known(kernel.stored_key)]
        jobs: list[Job] = []
        most = _max_workers()
        for kernel in waiting if most else ():
            kernel.is_claimed = True
            jobs.append(kernel.job())

        def work() -> None:
            with self._filling, Workers(most, least=1, deterministic=self._deterministic) as workers:
                for job in jobs:
                    workers.add(job)
                workers.finish()

        return work
