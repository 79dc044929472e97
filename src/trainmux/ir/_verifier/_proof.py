"""The proof that a program may run: it computes what the step without a plan computes, within its bytes.

The verifier knows profiles and instructions only. It shares no code with what plans, simulates or rewrites,
and derives from the instructions alone what must be where, in which version, and who must wait for whom.

A body that is repeated needs one walk. The prologue leads from the state before any step to some state S;
the body, walked from S, must lead back to it, one step later; the epilogue, walked from S too, must lead
back to the state before any step. By induction every number of passes is then right, zero included.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from trainmux.errors import PlanError
from trainmux.ir._profile import Profile
from trainmux.ir._program import Part, Program, Tenancy
from trainmux.ir._verifier._facts import StepFacts, read_profile
from trainmux.ir._verifier._order import PartOrder, expected_shares
from trainmux.ir._verifier._report import Report, Violation, ViolationKind
from trainmux.ir._verifier._slab import AT_BEGINNING, Key
from trainmux.ir._verifier._walk import Held, MachineState, PartWalk

_MAX_SHOWN = 20
"""Violations in the error's text: one fault breaks much of what follows it, and the first ones explain it."""


def verify(
    program: Program,
    profiles: Sequence[Profile],
    *,
    budget_bytes: int,
    fixed_bytes: int = 0,
    host_bytes: int | None = None,
) -> None:
    """Prove ``program`` over one profile per sub-array, or raise `PlanError` with what is wrong.

    Proved: each node of each sub-array runs once per step, in rank order, in the part and stage where it
    belongs; whatever it reads or changes is on the device in the version that the step without a plan has
    there, with every wait between lanes that this takes; a node runs again only where that makes the same
    values; no use after free, no double free, no leak, no static tensor lost; tenancies are those that the
    instructions imply, without overlap, within ``slab_bytes``; the slab and ``fixed_bytes`` are within
    ``budget_bytes``. Each tensor that is ever copied to the host, or lies there between steps, has a place
    there of its own; all of them are within the program's ``host_bytes``, and those within ``host_bytes``
    where that is given.
    """
    found = find_violations(
        program, profiles, budget_bytes=budget_bytes, fixed_bytes=fixed_bytes, host_bytes=host_bytes
    )
    if found:
        shown = [str(violation) for violation in found[:_MAX_SHOWN]]
        if len(found) > _MAX_SHOWN:
            shown.append(f"and {len(found) - _MAX_SHOWN} more")
        raise PlanError(
            f"expected a program that computes what the step without a plan computes, within its bytes, but "
            f"it breaks {len(found)} rules:\n- " + "\n- ".join(shown) + "\nDo not run it: plan again; "
            "if that is refused too, the planner is at fault"
        )


def find_violations(
    program: Program,
    profiles: Sequence[Profile],
    *,
    budget_bytes: int,
    fixed_bytes: int = 0,
    host_bytes: int | None = None,
) -> tuple[Violation, ...]:
    """The violations that `verify` would raise, as records; none where the program is right."""
    report = Report(profiles)
    known = {id(profile): read_profile(profile, report) for profile in profiles}
    if report.violations:
        return tuple(report.violations)
    facts = [known[id(profile)] for profile in profiles]
    host_keys = _Proof(program, facts, report).run()
    needed = sum(facts[sub_array].sizes[tensor] for sub_array, tensor in host_keys)
    taken = program.slab_bytes + fixed_bytes
    report.part = "program"
    if taken > budget_bytes:
        text = f"the budget is {budget_bytes} bytes, but slab and fixed bytes are {taken - budget_bytes} more"
        report.add(ViolationKind.BUDGET, text)
    if needed > program.host_bytes:
        text = f"the program promises {program.host_bytes} bytes of host copies, but they take {needed}"
        report.add(ViolationKind.HOST_MEMORY, text)
    if host_bytes is not None and max(needed, program.host_bytes) > host_bytes:
        text = f"the host has {host_bytes} bytes for copies, but they take {max(needed, program.host_bytes)}"
        report.add(ViolationKind.HOST_MEMORY, text)
    return tuple(report.violations)


def _is_empty(part: Part) -> bool:
    return not part.instructions and not part.tenancies


class _Proof:
    """Walks through the parts of one program and compares what each leaves with what must be there."""

    def __init__(self, program: Program, facts: Sequence[StepFacts], report: Report) -> None:
        self._program = program
        self._facts = facts
        self._report = report
        self._shares = expected_shares(program, facts)
        self._resident = self._read_resident()
        self._kept_results = frozenset(
            (sub_array, tensor) for sub_array, tensor in self._resident if facts[sub_array].is_result[tensor]
        )

    def run(self) -> set[Key]:
        """Check everything; returns the tensors that have a place on the host."""
        program, shares = self._program, self._shares
        start = self._before_any_step()
        begun = self._walk("prologue", program.prologue, shares.prologue, start)
        body = self._walk("body", program.body, shares.body, begun)
        on_host = {key for key in start.host if key not in begun.device}
        after_body = self._later(body, [1] * len(self._facts))
        epilogue = self._walk("epilogue", program.epilogue, shares.epilogue, begun)
        num_ended = [
            share.stop // max(1, len(facts.nodes))
            for share, facts in zip(shares.epilogue, self._facts, strict=True)
        ]
        self._compare("body", begun, after_body, on_host | body.host_reads | epilogue.host_reads)
        self._compare("epilogue", start, self._later(epilogue, num_ended), start.host)
        return {*start.host, *begun.offloaded, *body.offloaded, *epilogue.offloaded}

    def _read_resident(self) -> list[Key]:
        found: dict[Key, None] = {}
        for key in self._program.resident:
            sub_array, tensor = key
            if not (0 <= sub_array < len(self._facts) and 0 <= tensor < len(self._facts[sub_array].sizes)):
                problem = "does not exist"
            elif key in found:
                problem = "is listed twice"
            elif not (self._facts[sub_array].is_static[tensor] or self._facts[sub_array].is_result[tensor]):
                problem = "is made anew in every step"
            else:
                found[key] = None
                continue
            self._report.add(
                ViolationKind.MALFORMED,
                f"resident {self._report.tensor(*key)} {problem}: expected static tensors and results",
            )
        return list(found)

    def _before_any_step(self) -> MachineState:
        parts = (self._program.prologue, self._program.body, self._program.epilogue)
        first = next((part for part in parts if not _is_empty(part)), self._program.prologue)
        offsets = {
            (tenancy.sub_array, tenancy.tensor): tenancy.offset
            for tenancy in first.tenancies
            if tenancy.begin == AT_BEGINNING
        }
        device = {
            key: Held(offsets.get(key), None if key in self._kept_results else 0) for key in self._resident
        }
        host = {
            (sub_array, tensor): 0
            for sub_array, facts in enumerate(self._facts)
            for tensor, is_static in enumerate(facts.is_static)
            if is_static and (sub_array, tensor) not in device
        }
        return MachineState(device, host)

    def _walk(self, name: str, part: Part, shares: Sequence[range], entry: MachineState) -> MachineState:
        self._report.part = name
        if _is_empty(part):  # nothing moves, and nothing needs to be said about it
            stay = [
                Tenancy(*key, AT_BEGINNING, 0, held.offset, self._facts[key[0]].sizes[key[1]])
                for key, held in entry.device.items()
                if held.offset is not None
            ]
            part = Part((), tuple(stay))
        order = PartOrder(shares, self._facts, self._shares.is_ring, self._report)
        slab_bytes = self._program.slab_bytes
        walk = PartWalk(part, order, self._facts, self._kept_results, slab_bytes, self._report)
        return walk.run(entry)

    def _later(self, memory: MachineState, num_steps: Sequence[int]) -> MachineState:
        """``memory`` with versions counted from a step that is ``num_steps`` later, by sub-array."""

        def count(key: Key, version: int | None) -> int | None:
            sub_array, tensor = key
            if version is None:
                return None
            return version - num_steps[sub_array] * self._facts[sub_array].periods[tensor]

        return MachineState(
            {key: Held(held.offset, count(key, held.version)) for key, held in memory.device.items()},
            {key: count(key, version) for key, version in memory.host.items()},
        )

    def _compare(
        self, part: str, expected: MachineState, got: MachineState, host_keys: Collection[Key]
    ) -> None:
        """At the end of ``part`` there must be what its successor, or the next step, begins with."""
        self._report.part = part
        for key, held in expected.device.items():
            after = got.device.get(key)
            if after is None:
                self._refuse(key, "must be on the device at the end, as at the beginning, but is not")
                continue
            if after.offset != held.offset and None not in (after.offset, held.offset):
                self._refuse(key, f"must end at offset {held.offset}, but is at {after.offset}")
            if held.version is not None and after.version != held.version:
                self._refuse(key, f"must end with version {held.version}, but holds {after.version}")
        for key in got.device.keys() - expected.device.keys():
            text = f"{self._report.tensor(*key)} is still on the device at the end: it was never freed"
            self._report.add(ViolationKind.LEAK, text)
        for key in host_keys:
            if key in expected.host and got.host.get(key) != expected.host[key]:
                self._refuse(
                    key, "must lie on the host at the end in its latest version, but an old one does"
                )

    def _refuse(self, key: Key, text: str) -> None:
        self._report.add(ViolationKind.BOUNDARY, f"{self._report.tensor(*key)} {text}")
