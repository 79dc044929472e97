"""One part of a program, instruction by instruction in issue order: the verifier's machine.

It keeps, for each tensor on the device, which version it holds, who wrote it and who touched it last; for
each lane, what is known to have ended there. Instruction a is known to have ended before instruction b when
b's lane learned it: by its own order, or through a chain of waits (vector clocks over the three lanes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainmux.ir._program import (
    Compute,
    Free,
    Instruction,
    Lane,
    Offload,
    Part,
    Prefetch,
    Recompute,
    Tenancy,
    Wait,
)
from trainmux.ir._verifier._facts import StepFacts
from trainmux.ir._verifier._order import PartOrder
from trainmux.ir._verifier._report import Findings, Names, ViolationKind
from trainmux.ir._verifier._slab import AT_BEGINNING, WORKSPACE, PartSlab

Key = tuple[int, int]
"""A tensor: its sub-array, and its position in the sub-array's profile."""

_COMPUTE, _OUT, _IN = 0, 1, 2
_LANES = {Lane.COMPUTE: _COMPUTE, Lane.OUT: _OUT, Lane.IN: _IN}
_LANE_NAMES = ("COMPUTE", "OUT", "IN")


@dataclass(frozen=True)
class Held:
    """A tensor on the device between two parts. ``offset`` is ``None`` where it has no placement.

    ``version`` is counted from the step that is under way, ``None`` where nothing was written yet.
    """

    offset: int | None
    version: int | None


@dataclass(frozen=True)
class MachineState:
    """Tensors on the device and, by version, on the host between two parts."""

    device: Mapping[Key, Held]
    host: Mapping[Key, int | None]


@dataclass(frozen=True)
class Walked:
    """The state a part leaves, the earlier host copies that it relies on, and the tensors it offloads."""

    memory: MachineState
    host_reads: frozenset[Key]
    offloaded: frozenset[Key]


@dataclass(slots=True)
class _Resident:
    """A tensor on the device; positions are -1 where nothing of this part did it."""

    tenancy: Tenancy | None
    version: int | None
    written_at: int = -1
    written_on: int = _COMPUTE
    last_compute: int = -1
    last_offload: int = -1


class PartWalk:
    """Walks through one part, once. ``kept_results`` are results that keep their bytes from step to step."""

    def __init__(
        self,
        name: str,
        part: Part,
        order: PartOrder,
        facts: Sequence[StepFacts],
        *,
        kept_results: frozenset[Key],
        slab_bytes: int,
        names: Names,
        findings: Findings,
    ) -> None:
        self._name = name
        self._instructions = part.instructions
        self._order = order
        self._facts = facts
        self._kept_results = kept_results
        self._names = names
        self._findings = findings
        self._slab = PartSlab(name, part, slab_bytes, names=names, findings=findings)
        self._position = -1
        self._device: dict[Key, _Resident] = {}
        self._freed_at: dict[Key, int] = {}
        self._host: dict[Key, int | None] = {}
        self._offloaded_at: dict[Key, int] = {}
        self._host_reads: set[Key] = set()
        # What each lane knows to have ended on each lane: everything there at positions below the number.
        self._clocks = [[0, 0, 0] for _ in _LANE_NAMES]
        self._clock_after: list[tuple[int, int, int]] = []

    def run(self, entry: MachineState) -> Walked:
        """Walk from ``entry`` to the end of the part, where all lanes join."""
        self._begin(entry)
        for position, instruction in enumerate(self._instructions):
            self._position = position
            lane = self._run_one(instruction)
            clock = self._clocks[lane]
            clock[lane] = position + 1
            self._clock_after.append((clock[0], clock[1], clock[2]))
        self._position = -1
        self._order.finish()
        return self._end()

    def _begin(self, entry: MachineState) -> None:
        self._host = dict(entry.host)
        begins_with = set(self._slab.begins_with())
        for key, held in entry.device.items():
            size_bytes = self._facts[key[0]].sizes[key[1]]
            tenancy = None
            if key in begins_with:
                tenancy = self._slab.take(AT_BEGINNING, key, size_bytes)
            elif size_bytes:
                self._refuse(
                    ViolationKind.BOUNDARY,
                    f"{self._names.tensor(*key)} is on the device when the part begins, but the part begins "
                    "without it",
                )
            if tenancy is not None and held.offset is not None and tenancy.offset != held.offset:
                self._refuse(
                    ViolationKind.BOUNDARY,
                    f"{self._names.tensor(*key)} must stay at offset {held.offset}, where it was left, but "
                    f"the part begins with it at {tenancy.offset}",
                )
            self._device[key] = _Resident(tenancy, held.version)
        for key in begins_with - entry.device.keys():
            self._refuse(
                ViolationKind.BOUNDARY,
                f"the part begins with {self._names.tensor(*key)}, which is not on the device then",
            )

    def _end(self) -> Walked:
        device = {}
        for key, resident in self._device.items():
            offset = None
            if resident.tenancy is not None:
                offset = resident.tenancy.offset
                self._slab.check_end(len(self._instructions), resident.tenancy)
            device[key] = Held(offset, resident.version)
        self._slab.finish()
        return Walked(
            MachineState(device, self._host), frozenset(self._host_reads), frozenset(self._offloaded_at)
        )

    def _run_one(self, instruction: Instruction) -> int:
        """Check one instruction and carry it out; returns its lane."""
        match instruction:
            case Wait():
                return self._wait(instruction)
            case Compute():
                if self._knows_node(instruction):
                    self._compute(instruction)
                return _COMPUTE
            case Recompute():
                if self._knows_node(instruction):
                    self._recompute(instruction)
                return _COMPUTE
            case Free():
                if self._knows_tensor(instruction):
                    self._free(instruction)
                return _COMPUTE
            case Offload():
                if self._knows_tensor(instruction):
                    self._offload(instruction)
                return _OUT
            case Prefetch():
                if self._knows_tensor(instruction):
                    self._prefetch(instruction)
                return _IN

    def _knows_node(self, instruction: Compute | Recompute) -> bool:
        sub_array, node = instruction.sub_array, instruction.node
        known = 0 <= sub_array < len(self._facts) and 0 <= node < len(self._facts[sub_array].nodes)
        if not known:
            self._refuse(ViolationKind.MALFORMED, f"there is no {self._names.node(sub_array, node)}")
        return known

    def _knows_tensor(self, instruction: Offload | Prefetch | Free) -> bool:
        sub_array, tensor = instruction.sub_array, instruction.tensor
        known = 0 <= sub_array < len(self._facts) and 0 <= tensor < len(self._facts[sub_array].sizes)
        if not known:
            verb = type(instruction).__name__
            self._refuse(
                ViolationKind.MALFORMED, f"{verb}: there is no tensor {tensor} of sub-array {sub_array}"
            )
        return known

    def _wait(self, wait: Wait) -> int:
        lane = _LANES[wait.lane]
        if not 0 <= wait.on < self._position:
            self._refuse(
                ViolationKind.MALFORMED,
                f"a Wait must name an instruction that was issued before it, but names [{wait.on}]",
            )
            return lane
        clock, other = self._clocks[lane], self._clock_after[wait.on]
        for i, ended in enumerate(other):
            if ended > clock[i]:
                clock[i] = ended
        return lane

    def _compute(self, instruction: Compute) -> None:
        sub_array, node = instruction.sub_array, instruction.node
        step = self._order.compute(self._position, sub_array, node)
        facts = self._facts[sub_array]
        self._use_inputs(instruction, step)
        for tensor, count in facts.nodes[node].changes:
            resident = self._device.get((sub_array, tensor))
            if resident is not None:
                self._overwrite(resident, step * facts.periods[tensor] + count + 1)
        for tensor in facts.nodes[node].creates:
            version = step * facts.periods[tensor]
            resident = self._device.get((sub_array, tensor))
            if resident is not None and (sub_array, tensor) in self._kept_results:
                self._need_ended(_COMPUTE, resident.written_on, resident.written_at)
                self._overwrite(resident, version)
            else:
                self._take((sub_array, tensor), version, _COMPUTE)
        self._take_for_now(sub_array, node, ())

    def _recompute(self, instruction: Recompute) -> None:
        sub_array, node = instruction.sub_array, instruction.node
        step = self._order.recompute(self._position, sub_array, node)
        facts = self._facts[sub_array]
        who = self._names.node(sub_array, node)
        if facts.nodes[node].changes:
            changed = self._names.tensor(sub_array, facts.nodes[node].changes[0][0])
            self._refuse(
                ViolationKind.NOT_REPEATABLE,
                f"{who} changes {changed} in place: run again, it would change it a second time",
            )
        if not facts.nodes[node].is_repeatable:
            self._refuse(ViolationKind.NOT_REPEATABLE, f"{who} may run only once per step")
        self._use_inputs(instruction, step)
        creates, keeps = facts.nodes[node].creates, instruction.keeps
        if len(set(keeps)) < len(keeps) or not set(keeps) <= set(creates):
            self._refuse(
                ViolationKind.MALFORMED,
                f"a Recompute of {who} can keep each of the tensors {creates} once, but keeps {keeps}",
            )
        for tensor in creates:
            if tensor in keeps:
                self._take((sub_array, tensor), step * facts.periods[tensor], _COMPUTE)
        self._take_for_now(sub_array, node, [tensor for tensor in creates if tensor not in keeps])

    def _use_inputs(self, instruction: Compute | Recompute, step: int) -> None:
        facts = self._facts[instruction.sub_array]
        for tensor, count in facts.nodes[instruction.node].needs:
            key = (instruction.sub_array, tensor)
            resident = self._device.get(key)
            if resident is None:
                self._refuse(
                    ViolationKind.NOT_RESIDENT,
                    f"{self._names.instruction(instruction)} needs {self._names.tensor(*key)}, which is "
                    f"{self._absence(key)}",
                )
                continue
            self._need_ended(_COMPUTE, resident.written_on, resident.written_at)
            expected = step * facts.periods[tensor] + count
            if resident.version != expected:
                self._refuse(
                    ViolationKind.WRONG_VERSION,
                    f"{self._names.instruction(instruction)} needs {self._names.tensor(*key)} as the step "
                    f"without a plan has it there, but it {_difference(resident.version, expected)}"
                    f"{self._writer(resident)}",
                )
            resident.last_compute = self._position

    def _overwrite(self, resident: _Resident, version: int) -> None:
        """The compute lane writes to a tensor that is on the device."""
        self._need_ended(_COMPUTE, _OUT, resident.last_offload)
        resident.version = version
        resident.written_at = resident.last_compute = self._position
        resident.written_on = _COMPUTE

    def _offload(self, instruction: Offload) -> None:
        key = (instruction.sub_array, instruction.tensor)
        resident = self._device.get(key)
        if resident is None:
            self._refuse(
                ViolationKind.NOT_RESIDENT,
                f"Offload of {self._names.tensor(*key)}, which is {self._absence(key)}",
            )
            return
        self._need_ended(_OUT, resident.written_on, resident.written_at)
        resident.last_offload = self._position
        self._host[key] = resident.version
        self._offloaded_at[key] = self._position

    def _prefetch(self, instruction: Prefetch) -> None:
        key = (instruction.sub_array, instruction.tensor)
        if key not in self._host:
            self._refuse(
                ViolationKind.NOT_RESIDENT,
                f"Prefetch of {self._names.tensor(*key)}, which has no copy on the host",
            )
        offloaded_at = self._offloaded_at.get(key, -1)
        self._need_ended(_IN, _OUT, offloaded_at)
        if offloaded_at == -1:
            self._host_reads.add(key)
        resident = self._take(key, self._host.get(key), _IN)
        if resident.tenancy is not None:
            for former in self._slab.former_tenants(resident.tenancy):
                self._need_ended(_IN, _COMPUTE, former.last_compute, former.owner)
                self._need_ended(_IN, _OUT, former.last_offload, former.owner)

    def _free(self, instruction: Free) -> None:
        key = (instruction.sub_array, instruction.tensor)
        resident = self._device.pop(key, None)
        if resident is None:
            self._refuse(
                ViolationKind.FREE, f"Free of {self._names.tensor(*key)}, which is {self._absence(key)}"
            )
            return
        self._need_ended(_COMPUTE, _OUT, resident.last_offload)
        self._need_ended(_COMPUTE, resident.written_on, resident.written_at)
        facts = self._facts[key[0]]
        if facts.is_static[key[1]] and key not in self._offloaded_at:
            self._host_reads.add(key)
        if facts.is_static[key[1]] and (key not in self._host or self._host[key] != resident.version):
            self._refuse(
                ViolationKind.FREE,
                f"Free of {self._names.tensor(*key)}, which must outlive the step, but the host has no copy "
                "of the version that it holds",
            )
        if facts.is_result[key[1]] and resident.version is not None:
            end_of_step = (resident.version // facts.periods[key[1]] + 1) * len(facts.nodes)
            if self._order.num_ran(key[0]) < end_of_step:
                self._refuse(
                    ViolationKind.FREE,
                    f"Free of {self._names.tensor(*key)}, a result, before its step has ended",
                )
        self._vacate(resident)
        self._freed_at[key] = self._position

    def _take(self, key: Key, version: int | None, lane: int) -> _Resident:
        """Make a tensor resident that the present instruction writes."""
        old = self._device.get(key)
        if old is not None:
            self._refuse(
                ViolationKind.LEAK,
                f"{self._names.instruction(self._instructions[self._position])} takes bytes for "
                f"{self._names.tensor(*key)}, which is on the device already and was not freed",
            )
            self._vacate(old)
        tenancy = self._slab.take(self._position, key, self._facts[key[0]].sizes[key[1]])
        resident = _Resident(tenancy, version, self._position, lane)
        if lane == _COMPUTE:
            resident.last_compute = self._position
        self._device[key] = resident
        return resident

    def _take_for_now(self, sub_array: int, node: int, discarded: Sequence[int]) -> None:
        """Bytes for the present instruction alone: its workspace, and outputs that it does not keep."""
        facts = self._facts[sub_array]
        takers = [((sub_array, tensor), facts.sizes[tensor]) for tensor in discarded]
        if facts.nodes[node].workspace_bytes:
            takers.append(((sub_array, WORKSPACE), facts.nodes[node].workspace_bytes))
        self._slab.take_for_now(self._position, takers)

    def _vacate(self, resident: _Resident) -> None:
        if resident.tenancy is not None:
            self._slab.give_back(
                self._position, resident.tenancy, resident.last_compute, resident.last_offload
            )

    def _need_ended(self, lane: int, other: int, position: int, tenant: Key | None = None) -> None:
        """The present instruction, on ``lane``, must know that the one at ``position`` has ended.

        ``tenant`` is who had the bytes before, where it is about them.
        """
        if position < self._clocks[lane][other] or lane == other:
            return
        about = f" (it used bytes of {self._names.tensor(*tenant)} that are overwritten)" if tenant else ""
        self._refuse(
            ViolationKind.MISSING_WAIT,
            f"{self._names.instruction(self._instructions[self._position])} must run after [{position}] "
            f"{self._names.instruction(self._instructions[position])}{about}, but lane {_LANE_NAMES[lane]} "
            f"does not wait for it",
        )

    def _absence(self, key: Key) -> str:
        """Why a tensor is not on the device, as far as this part tells."""
        if key in self._freed_at:
            return f"not on the device: it was freed at [{self._freed_at[key]}]"
        if key in self._host:
            return "on the host only: it was not prefetched"
        return "not on the device"

    def _writer(self, resident: _Resident) -> str:
        if resident.written_at < 0:
            return ""
        written_by = self._names.instruction(self._instructions[resident.written_at])
        return f" (last written by [{resident.written_at}] {written_by})"

    def _refuse(self, kind: ViolationKind, text: str) -> None:
        self._findings.add(kind, self._name, self._position, text)


def _difference(version: int | None, expected: int) -> str:
    if version is None:
        return "was never written"
    if version > expected:
        return f"was changed already: version {version}, expected {expected}"
    return f"is too old: version {version}, expected {expected}"
