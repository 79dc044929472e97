"""Programs of a group at its whole width, upgraded when their kernels are compiled, and their engine."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

from trainmux.engine import CudaGraphEngine, ForwardProgram, StepProgram
from trainmux.fleet._background import Upgrade
from trainmux.fleet._config import FleetConfig

Program = StepProgram | ForwardProgram


def with_batch(held: Sequence[Tensor | None], batch: Sequence[Tensor]) -> list[Tensor]:
    """All arguments: the leaves of ``batch`` in the places that were left for them."""
    leaves = iter(batch)
    return [next(leaves) if argument is None else argument for argument in held]


_MAX_PROGRAMS = 8
_MAX_ASIDE = 24

P = TypeVar("P", bound=Program)


class ProgramCache:
    """The most recently used programs of one group, with the tensors that each is called with.

    A key has all that decides a program. Programs that were used before state moved, of other widths for
    instance, are laid aside without their graphs, for the case that they are wanted again.
    """

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self.engine = config.make_engine()
        self.kept: OrderedDict[Hashable, Program] = OrderedDict()
        self._aside: OrderedDict[Hashable, Program] = OrderedDict()
        self._upgrades: dict[Hashable, Upgrade[StepProgram]] = {}
        self._build_s: dict[Hashable, float] = {}
        # By the program's id, with the program itself: its id must not be given to another one.
        self._held: dict[int, tuple[Program, list[Tensor | None]]] = {}

    @property
    def build_s(self) -> float:
        """Seconds that it took to build the programs in use."""
        return sum(self._build_s.get(key, 0.0) for key in self.kept)

    def get(self, key: Hashable, build: Callable[[], P]) -> P:
        """Find a program or build it; the least recently used one of too many goes."""
        self._upgrade(key)
        if key not in self.kept:
            begin_s = time.monotonic()
            self.kept[key] = self._aside.pop(key) if key in self._aside else build()
            self._build_s.setdefault(key, time.monotonic() - begin_s)
        self.kept.move_to_end(key)
        program = self.kept[key]
        while len(self.kept) > _MAX_PROGRAMS:
            old, gone = self.kept.popitem(last=False)
            self._forget(gone)
            self._drop(old)
        return program  # type: ignore[return-value]

    def held_arguments(
        self, program: Program, find: Callable[[Program], list[Tensor | None]]
    ) -> list[Tensor | None]:
        """Remember what ``find`` returns for a program until state moves."""
        held = self._held.get(id(program))
        if held is None:
            held = self._held[id(program)] = (program, find(program))
        return held[1]

    def expect(self, key: Hashable, upgrade: Upgrade[StepProgram]) -> None:
        """Have ``upgrade`` replace a program once it is ready."""
        self._upgrades[key] = upgrade

    def _upgrade(self, key: Hashable) -> None:
        """Replace the program that training began with by the compiled one, once it is ready.

        Compilation starts at a program's second use: what runs once, such as a short last batch, is never
        compiled.
        """
        upgrade = self._upgrades.get(key)
        if upgrade is None:
            return
        upgrade.start()
        if upgrade.is_ready:
            del self._upgrades[key]
            better = upgrade.result()
            if better is not None and key in self.kept:
                self._forget(self.kept[key])
                self.kept[key] = better

    def wait_until_compiled(self) -> None:
        """Wait for every compilation that is under way or due for the programs in use."""
        for key, upgrade in self._upgrades.items():
            if key in self.kept:
                upgrade.wait()

    def set_aside(self) -> None:
        """Free the graphs and arguments of all programs: state has moved."""
        self.engine.forget(list(self.kept.values()))
        self._held.clear()
        self._aside |= self.kept
        self.kept.clear()
        while len(self._aside) > _MAX_ASIDE:
            self._drop(self._aside.popitem(last=False)[0])

    def clear(self) -> None:
        """Forget all programs."""
        self.set_aside()
        for store in (self._aside, self._upgrades, self._build_s):
            store.clear()

    def drop_graphs(self) -> bool:
        """Free captured graphs with their pool and workspaces; false where there are none."""
        has_graphs = isinstance(self.engine, CudaGraphEngine) and self.engine.num_captures > 0
        if has_graphs:
            self.engine = self._config.make_engine()
        return has_graphs

    def _drop(self, key: Hashable) -> None:
        self._upgrades.pop(key, None)
        self._build_s.pop(key, None)

    def _forget(self, program: Program) -> None:
        self.engine.forget([program])
        self._held.pop(id(program), None)
