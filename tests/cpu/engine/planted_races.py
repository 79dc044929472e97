"""Programs with one wait too few: each is a race, on the device's memory or on the host's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainmux.ir import Free, Instruction, Lane, Offload, Prefetch, Program, Wait

RACES = ("free before the copy out has ended", "use before the copy back has ended", "copy back too early")
"""The last: before the copy out has ended, which the lane for copies back knows through the compute lane."""


def planted(program: Program, race: str) -> Iterator[Program]:
    """The program without one of the waits that the race is about, for each of these in the body.

    In its place the compute lane waits for itself, which holds up nobody: other positions stay what they are.
    """
    instructions = program.body.instructions
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Wait) and _is_about(race, instruction, position, instructions):
            own = [n for n, each in enumerate(instructions[:position]) if not _is_elsewhere(each)]
            if own:
                changed = (
                    *instructions[:position],
                    Wait(Lane.COMPUTE, own[-1]),
                    *instructions[position + 1 :],
                )
                yield replace(program, body=replace(program.body, instructions=changed))


def _is_about(race: str, wait: Wait, position: int, instructions: tuple[Instruction, ...]) -> bool:
    awaited = instructions[wait.on]
    if race == RACES[0]:
        return wait.lane is Lane.COMPUTE and isinstance(awaited, Offload)
    if race == RACES[1]:
        return wait.lane is Lane.COMPUTE and isinstance(awaited, Prefetch)
    follower = next((each for each in instructions[position:] if isinstance(each, Prefetch)), None)
    return (
        wait.lane is Lane.IN
        and follower is not None
        and Offload(follower.sub_array, follower.tensor) in instructions[:position]
        and Free(follower.sub_array, follower.tensor) in instructions[:position]
    )


def _is_elsewhere(instruction: Instruction) -> bool:
    return isinstance(instruction, Offload | Prefetch | Wait)
