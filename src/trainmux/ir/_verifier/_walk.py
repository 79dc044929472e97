"""One part of a program, instruction by instruction in issue order: the verifier's machine.

It keeps, for each tensor on the device, which version it holds, who wrote it and who touched it last; for
each lane, what is known to have ended there. Instruction a is known to have ended before instruction b when
b's lane learned it: by its own order, or through a chain of waits (vector clocks over the three lanes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainmux.ir._program import Compute, Free, Instruction, Lane, Offload, Part, Prefetch, Recompute, Wait
from trainmux.ir._verifier._facts import StepFacts
from trainmux.ir._verifier._order import PartOrder
from trainmux.ir._verifier._report import WORKSPACE, Report, ViolationKind
from trainmux.ir._verifier._slab import AT_BEGINNING, Key, PartSlab, Resident

_COMPUTE, _OUT, _IN = 0, 1, 2
_LANES = {Lane.COMPUTE: _COMPUTE, Lane.OUT: _OUT, Lane.IN: _IN}


@dataclass(frozen=True)
class Held:
    """A tensor on the device between two parts. ``offset`` is ``None`` where it has no placement.

    ``version`` is counted from the step that is under way, ``None`` where nothing was written yet.
    """

    offset: int | None
    version: int | None


@dataclass(frozen=True)
class MachineState:
    """Tensors on the device and, by version, on the host between two parts.

    After a part, also the earlier host copies that it relies on, and the tensors that it offloaded.
    """

    device: Mapping[Key, Held]
    host: Mapping[Key, int | None]
    host_reads: frozenset[Key] = frozenset()
    offloaded: frozenset[Key] = frozenset()


class PartWalk:
    """Walks through one part, once. ``kept_results`` are results that keep their bytes from step to step."""

    def __init__(
        self,
        part: Part,
        order: PartOrder,
        facts: Sequence[StepFacts],
        kept_results: frozenset[Key],
        slab_bytes: int,
        report: Report,
    ) -> None:
        self._instructions = part.instructions
        self._order = order
        self._facts = facts
        self._kept_results = kept_results
        self._report = report
        self._slab = PartSlab(part, slab_bytes, report)
        self._position = -1
        self._device: dict[Key, Resident] = {}
        self._freed_at: dict[Key, int] = {}
        self._host: dict[Key, int | None] = {}
        self._offloaded_at: dict[Key, int] = {}
        self._host_reads: set[Key] = set()
        # What each lane knows to have ended on each lane: everything there at positions below the number.
        self._clocks = [[0, 0, 0] for _ in _LANES]
        self._clock_after: list[tuple[int, int, int]] = []

    def run(self, entry: MachineState) -> MachineState:
        """Walk from ``entry`` to the end of the part, where all lanes join."""
        self._begin(entry)
        for position, instruction in enumerate(self._instructions):
            self._position = self._report.position = position
            lane = self._run_one(instruction)
            clock = self._clocks[lane]
            clock[lane] = position + 1
            self._clock_after.append((clock[0], clock[1], clock[2]))
        self._report.position = -1
        self._order.finish()
        device = {}
        for key, resident in self._device.items():
            self._slab.check_end(len(self._instructions), resident)
            device[key] = Held(resident.tenancy.offset if resident.tenancy else None, resident.version)
        self._slab.finish()
        return MachineState(device, self._host, frozenset(self._host_reads), frozenset(self._offloaded_at))

    def _begin(self, entry: MachineState) -> None:
        self._host = dict(entry.host)
        begins_with = self._slab.begins_with()
        for key, held in entry.device.items():
            size_bytes = self._facts[key[0]].sizes[key[1]]
            resident = self._device[key] = Resident(key, held.version)
            if key in begins_with:
                self._slab.take(AT_BEGINNING, resident, size_bytes)
            elif size_bytes:
                self._refuse_boundary(key, "is on the device when the part begins, but has no tenancy then")
            tenancy = resident.tenancy
            if tenancy is not None and held.offset is not None and tenancy.offset != held.offset:
                self._refuse_boundary(
                    key, f"must stay at offset {held.offset}, but the part begins with it at {tenancy.offset}"
                )
        for key in begins_with - entry.device.keys():
            self._refuse_boundary(key, "is not on the device when the part begins, but has a tenancy then")

    def _refuse_boundary(self, key: Key, text: str) -> None:
        self._report.add(ViolationKind.BOUNDARY, f"{self._report.tensor(*key)} {text}")

    def _run_one(self, instruction: Instruction) -> int:
        """Check one instruction and carry it out; returns its lane."""
        if isinstance(instruction, Wait):
            return self._wait(instruction)
        is_copy = isinstance(instruction, Offload | Prefetch)
        lane = (_OUT if isinstance(instruction, Offload) else _IN) if is_copy else _COMPUTE
        match instruction:
            case _ if not self._names_something(instruction):
                text = f"{self._report.instruction(instruction)}, which does not exist"
                self._report.add(ViolationKind.MALFORMED, text)
            case Compute():
                self._compute(instruction)
            case Recompute():
                self._recompute(instruction)
            case Offload(sub_array, tensor):
                self._offload((sub_array, tensor))
            case Prefetch(sub_array, tensor):
                self._prefetch((sub_array, tensor))
            case Free(sub_array, tensor):
                self._free((sub_array, tensor))
        return lane

    def _names_something(self, instruction: Compute | Recompute | Offload | Prefetch | Free) -> bool:
        if not 0 <= instruction.sub_array < len(self._facts):
            return False
        facts = self._facts[instruction.sub_array]
        if isinstance(instruction, Compute | Recompute):
            return 0 <= instruction.node < len(facts.nodes)
        return 0 <= instruction.tensor < len(facts.sizes)

    def _wait(self, wait: Wait) -> int:
        lane = _LANES[wait.lane]
        if 0 <= wait.on < self._position:
            self._clocks[lane] = list(map(max, self._clocks[lane], self._clock_after[wait.on]))
        else:
            text = f"a Wait must name an instruction that was issued before it, but names [{wait.on}]"
            self._report.add(ViolationKind.MALFORMED, text)
        return lane

    def _compute(self, instruction: Compute) -> None:
        sub_array, node = instruction.sub_array, instruction.node
        step = self._order.compute(sub_array, node)
        facts = self._facts[sub_array]
        self._use_inputs(instruction, step)
        for tensor, count in facts.nodes[node].changes:
            resident = self._device.get((sub_array, tensor))
            if resident is not None:
                self._overwrite(resident, step * facts.periods[tensor] + count + 1)
        for tensor in facts.nodes[node].creates:
            key, version = (sub_array, tensor), step * facts.periods[tensor]
            resident = self._device.get(key)
            if resident is not None and key in self._kept_results:
                self._need_ended(_COMPUTE, resident.written_on, resident.written_at)
                self._overwrite(resident, version)
            else:
                self._take(key, version, _COMPUTE)
        self._take_briefly(sub_array, node, ())

    def _recompute(self, instruction: Recompute) -> None:
        sub_array, node = instruction.sub_array, instruction.node
        step = self._order.recompute(sub_array, node)
        facts = self._facts[sub_array]
        creates, keeps = facts.nodes[node].creates, instruction.keeps
        if facts.nodes[node].changes or not facts.nodes[node].is_repeatable:
            who = self._report.node(sub_array, node)
            text = f"{who} changes a tensor in place, or may run only once per step, but runs again"
            self._report.add(ViolationKind.NOT_REPEATABLE, text)
        if len(set(keeps)) < len(keeps) or not set(keeps) <= set(creates):
            who = self._report.instruction(instruction)
            text = f"{who} can keep each of the tensors {creates} once, but keeps {keeps}"
            self._report.add(ViolationKind.MALFORMED, text)
        self._use_inputs(instruction, step)
        for tensor in creates:
            if tensor in keeps:
                self._take((sub_array, tensor), step * facts.periods[tensor], _COMPUTE)
        self._take_briefly(sub_array, node, [tensor for tensor in creates if tensor not in keeps])

    def _use_inputs(self, instruction: Compute | Recompute, step: int) -> None:
        facts = self._facts[instruction.sub_array]
        for tensor, count in facts.nodes[instruction.node].needs:
            key = (instruction.sub_array, tensor)
            resident = self._device.get(key)
            if resident is None:
                self._refuse_absent(ViolationKind.NOT_RESIDENT, key)
                continue
            self._need_ended(_COMPUTE, resident.written_on, resident.written_at)
            expected = step * facts.periods[tensor] + count
            if resident.version != expected:
                at = resident.written_at
                writer = self._report.instruction(self._instructions[at]) if at >= 0 else "an earlier part"
                self._report.add(
                    ViolationKind.WRONG_VERSION,
                    f"{self._report.instruction(instruction)} needs version {expected} of "
                    f"{self._report.tensor(*key)}, which the step without a plan has there, but the device "
                    f"holds version {resident.version}, written by {writer}",
                )
            resident.last_compute = self._position

    def _overwrite(self, resident: Resident, version: int) -> None:
        """The compute lane writes to a tensor that is on the device."""
        self._need_ended(_COMPUTE, _OUT, resident.last_offload)
        resident.version = version
        resident.written_at = resident.last_compute = self._position
        resident.written_on = _COMPUTE

    def _offload(self, key: Key) -> None:
        resident = self._device.get(key)
        if resident is None:
            self._refuse_absent(ViolationKind.NOT_RESIDENT, key)
            return
        self._need_ended(_OUT, resident.written_on, resident.written_at)
        resident.last_offload = self._position
        self._host[key] = resident.version
        self._offloaded_at[key] = self._position

    def _prefetch(self, key: Key) -> None:
        if key not in self._host:
            text = f"Prefetch of {self._report.tensor(*key)}, which has no copy on the host"
            self._report.add(ViolationKind.NOT_RESIDENT, text)
        offloaded_at = self._offloaded_at.get(key, -1)
        self._need_ended(_IN, _OUT, offloaded_at)
        if offloaded_at == -1:
            self._host_reads.add(key)
        for former in self._take(key, self._host.get(key), _IN):
            self._need_ended(_IN, _COMPUTE, former.last_compute, former.key)
            self._need_ended(_IN, _OUT, former.last_offload, former.key)

    def _free(self, key: Key) -> None:
        resident = self._device.pop(key, None)
        if resident is None:
            self._refuse_absent(ViolationKind.FREE, key)
            return
        self._need_ended(_COMPUTE, _OUT, resident.last_offload)
        self._need_ended(_COMPUTE, resident.written_on, resident.written_at)
        facts = self._facts[key[0]]
        if facts.is_static[key[1]]:
            if key not in self._offloaded_at:
                self._host_reads.add(key)
            if key not in self._host or self._host[key] != resident.version:
                text = "must outlive the step, but the host has no copy of the version that it holds"
                self._report.add(ViolationKind.FREE, f"Free of {self._report.tensor(*key)}, which {text}")
        if facts.is_result[key[1]] and resident.version is not None:
            end_of_step = (resident.version // facts.periods[key[1]] + 1) * len(facts.nodes)
            if self._order.num_ran(key[0]) < end_of_step:
                text = f"Free of {self._report.tensor(*key)}, a result, before its step has ended"
                self._report.add(ViolationKind.FREE, text)
        self._slab.give_back(self._position, resident)
        self._freed_at[key] = self._position

    def _take(self, key: Key, version: int | None, lane: int) -> list[Resident]:
        """Make a tensor resident that the present instruction writes; returns who had its bytes before."""
        old = self._device.get(key)
        if old is not None:
            text = f"{self._report.tensor(*key)} takes bytes, but is on the device already and was not freed"
            self._report.add(ViolationKind.LEAK, text)
            self._slab.give_back(self._position, old)
        resident = self._device[key] = Resident(key, version, self._position, lane)
        if lane == _COMPUTE:
            resident.last_compute = self._position
        return self._slab.take(self._position, resident, self._facts[key[0]].sizes[key[1]])

    def _take_briefly(self, sub_array: int, node: int, discarded: Sequence[int]) -> None:
        """Take bytes for the present instruction alone: its workspace, and outputs that it does not keep."""
        facts = self._facts[sub_array]
        sizes = {tensor: facts.sizes[tensor] for tensor in discarded}
        if facts.nodes[node].workspace_bytes:
            sizes[WORKSPACE] = facts.nodes[node].workspace_bytes
        takers = [Resident((sub_array, tensor), None, last_compute=self._position) for tensor in sizes]
        for taker in takers:
            self._slab.take(self._position, taker, sizes[taker.key[1]])
        for taker in takers:
            self._slab.give_back(self._position, taker)

    def _need_ended(self, lane: int, other: int, position: int, tenant: Key | None = None) -> None:
        """The present instruction, on ``lane``, must know that the one at ``position`` has ended.

        ``tenant`` is who had the bytes before, where it is about them.
        """
        if position < self._clocks[lane][other] or lane == other:
            return
        this, first = self._instructions[self._position], self._instructions[position]
        about = f" (it used bytes of {self._report.tensor(*tenant)} that are overwritten)" if tenant else ""
        self._report.add(
            ViolationKind.MISSING_WAIT,
            f"{self._report.instruction(this)} must run after [{position}] "
            f"{self._report.instruction(first)}{about}, but its lane does not wait for it",
        )

    def _refuse_absent(self, kind: ViolationKind, key: Key) -> None:
        """Say that a tensor is not on the device and why, as far as this part tells."""
        why = f": it was freed at [{self._freed_at[key]}]" if key in self._freed_at else ""
        if not why and key in self._host:
            why = ", but on the host: it was not prefetched"
        this = self._report.instruction(self._instructions[self._position])
        tensor = self._report.tensor(*key)
        self._report.add(kind, f"{this} needs {tensor}, which is not on the device{why}")
