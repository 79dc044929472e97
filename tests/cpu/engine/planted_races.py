"""Programs with one wait too few: each is a race on the device's memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainmux.ir import Lane, Offload, Prefetch, Program, Wait

RACES = {"free before the copy out has ended": Offload, "use before the copy back has ended": Prefetch}
"""With the copy that the compute lane does not wait for."""


def planted(program: Program, race: str) -> Iterator[Program]:
    """The program without one of the waits that the race is about, for each of these in the body.

    In its place the compute lane waits for itself, which holds up nobody: other positions stay what they are.
    """
    instructions = program.body.instructions
    for position, wait in enumerate(instructions):
        own = [
            n
            for n, each in enumerate(instructions[:position])
            if not isinstance(each, Offload | Prefetch | Wait)
        ]
        if not own or not isinstance(wait, Wait) or wait.lane is not Lane.COMPUTE:
            continue
        if isinstance(instructions[wait.on], RACES[race]):
            of_itself = Wait(Lane.COMPUTE, own[-1])
            changed = (*instructions[:position], of_itself, *instructions[position + 1 :])
            yield replace(program, body=replace(program.body, instructions=changed))
