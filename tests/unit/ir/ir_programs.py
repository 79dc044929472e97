"""Small training steps and programs for them, written by hand in a short notation, and placed first-fit."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmux.ir import (
    ByteClass,
    Compute,
    DeviceFacts,
    Free,
    Instruction,
    Lane,
    Offload,
    Part,
    Phase,
    Prefetch,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Program,
    Recompute,
    Tenancy,
    Wait,
)

Key = tuple[int, int]


def tensor(name: str, byte_class: ByteClass, size_bytes: int) -> ProfiledTensor:
    seconds = size_bytes * 1e-6
    return ProfiledTensor(name, byte_class, size_bytes, seconds, seconds, 1.1 * seconds, 1.1 * seconds)


def profile(tensors: Sequence[ProfiledTensor], nodes: Sequence[ProfiledNode]) -> Profile:
    device = DeviceFacts("none", memory_bytes=1 << 30, host_bytes=1 << 30)
    return Profile("hand-written", "analytic", 1, device, tuple(tensors), tuple(nodes))


def two_layers() -> Profile:
    """Two layers with batch statistics, updated as soon as their gradients exist; momentum for the first."""
    static = [
        ("x", ByteClass.BATCH, 40),
        ("w1", ByteClass.PARAMETER, 64),
        ("w2", ByteClass.PARAMETER, 32),
        ("m1", ByteClass.OPTIMIZER_STATE, 64),
        ("stats", ByteClass.BUFFER, 16),
    ]
    made = [
        ("h", ByteClass.FEATURE_MAP, 100),
        ("a", ByteClass.FEATURE_MAP, 100),
        ("mask", ByteClass.FEATURE_MAP, 20),
        ("t", ByteClass.TEMPORARY, 90),
        ("loss", ByteClass.RESULT, 4),
        ("g_a", ByteClass.GRADIENT_MAP, 100),
        ("g_w2", ByteClass.GRADIENT, 32),
        ("g_h", ByteClass.GRADIENT_MAP, 100),
        ("g_w1", ByteClass.GRADIENT, 64),
    ]
    tensors = [tensor(*row) for row in (*static, *made)]
    number = {each.name: position for position, each in enumerate(tensors)}
    forward, backward, update = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE
    rows = [
        ("fw_h", forward, "x w1", "h", "", 30),
        ("fw_stats", forward, "h", "t", "stats", 0),
        ("fw_a", forward, "h", "a mask", "", 0),
        ("fw_loss", forward, "a w2 t", "loss", "", 10),
        ("bw_loss", backward, "a w2", "g_a g_w2", "", 50),
        ("up_w2", update, "g_w2", "", "w2", 0),
        ("bw_a", backward, "h mask g_a", "g_h", "", 0),
        ("bw_h", backward, "x h g_h", "g_w1", "", 25),
        ("up_w1", update, "g_w1", "", "w1 m1", 8),
    ]

    def numbers(names: str) -> tuple[int, ...]:
        return tuple(number[name] for name in names.split())

    nodes = [
        ProfiledNode(name, phase, numbers(reads), numbers(creates), numbers(changes), 1e-3, workspace)
        for name, phase, reads, creates, changes, workspace in rows
    ]
    return profile(tensors, nodes)


def named(of: Profile, name: str) -> int:
    """The number of a tensor, or the rank of a node, by its name."""
    names = [each.name for each in (*of.tensors, *of.nodes)]
    position = names.index(name)
    return position if position < len(of.tensors) else position - len(of.tensors)


@dataclass
class Tape:
    """Instructions in issue order, with the positions that waits need."""

    instructions: list[Instruction] = field(default_factory=list)
    last_compute: int = -1
    last_copy: dict[tuple[type, Key], int] = field(default_factory=dict)

    def do(self, instruction: Instruction) -> int:
        position = len(self.instructions)
        self.instructions.append(instruction)
        if isinstance(instruction, Compute | Recompute | Free):
            self.last_compute = position
        elif isinstance(instruction, Offload | Prefetch):
            self.last_copy[type(instruction), (instruction.sub_array, instruction.tensor)] = position
        return position

    def wait_for_compute(self, lane: Lane) -> None:
        if self.last_compute >= 0:
            self.do(Wait(lane, self.last_compute))

    def wait_for_copy(self, lane: Lane, copy: type, key: Key) -> None:
        if (copy, key) in self.last_copy:
            self.do(Wait(lane, self.last_copy[copy, key]))


def tape(profiles: Sequence[Profile], text: str) -> list[Instruction]:
    """Instructions from lines: a verb, a sub-array, a node or tensor, what is kept, what is waited for.

    ``after compute`` waits for the last instruction before it on the compute lane, ``after offload:h`` and
    ``after prefetch:h`` for the last copy of that tensor. Only what is written is waited for.
    """
    made = Tape()
    for line in filter(None, map(str.strip, text.splitlines())):
        head, _, after = line.partition(" after ")
        verb, number, name, *keeps = head.split()
        sub_array = int(number)
        of = profiles[sub_array]
        lane = {"offload": Lane.OUT, "prefetch": Lane.IN}.get(verb, Lane.COMPUTE)
        for edge in after.split():
            if edge == "compute":
                made.wait_for_compute(lane)
            else:
                copy, _, copied = edge.partition(":")
                key = (sub_array, named(of, copied))
                made.wait_for_copy(lane, {"offload": Offload, "prefetch": Prefetch}[copy], key)
        if verb == "recompute":
            made.do(Recompute(sub_array, named(of, name), tuple(named(of, kept) for kept in keeps)))
        else:
            verbs = {"compute": Compute, "offload": Offload, "prefetch": Prefetch, "free": Free}
            made.do(verbs[verb](sub_array, named(of, name)))
    return made.instructions


def statics(profiles: Sequence[Profile], except_for: Sequence[Key] = ()) -> list[Key]:
    return [
        (sub_array, number)
        for sub_array, of in enumerate(profiles)
        for number, each in enumerate(of.tensors)
        if each.byte_class.is_static and (sub_array, number) not in except_for
    ]


@dataclass(frozen=True)
class Span:
    """Bytes that are needed from ``begin`` to ``end``, as in `Tenancy`, before they have a place."""

    key: Key
    begin: int
    end: int
    size_bytes: int


def spans(
    profiles: Sequence[Profile], instructions: Sequence[Instruction], there: Sequence[Key]
) -> tuple[list[Span], list[Key]]:
    """What the instructions of a part take, in the order they take it, and what is there at its end."""
    end = len(instructions)
    found: list[Span] = []
    open_spans: dict[Key, tuple[int, int]] = {}

    def size(key: Key) -> int:
        return profiles[key[0]].tensors[key[1]].size_bytes

    def open_span(key: Key, position: int) -> None:
        open_spans[key] = (len(found), position)
        found.append(Span(key, position, end, size(key)))

    for key in there:
        open_span(key, -1)
    for position, instruction in enumerate(instructions):
        match instruction:
            case Compute(sub_array, rank) | Recompute(sub_array, rank, _):
                node = profiles[sub_array].nodes[rank]
                keeps = instruction.keeps if isinstance(instruction, Recompute) else node.creates
                for number in node.creates:
                    key = (sub_array, number)
                    if number in keeps and key not in open_spans:
                        open_span(key, position)
                    elif number not in keeps:
                        found.append(Span(key, position, position, size(key)))
                if node.workspace_bytes:
                    found.append(Span((sub_array, -1), position, position, node.workspace_bytes))
            case Prefetch(sub_array, number):
                open_span((sub_array, number), position)
            case Free(sub_array, number):
                index, begin = open_spans.pop((sub_array, number))
                found[index] = Span((sub_array, number), begin, position, size((sub_array, number)))
    return found, list(open_spans)


def placed(
    profiles: Sequence[Profile],
    parts: Sequence[Sequence[Instruction]],
    resident: Sequence[Key],
    alignment: int = 1,
) -> Program:
    """A program with offsets: what outlives a part has a place of its own, the rest lies first-fit above."""
    prologue, begun = spans(profiles, parts[0], resident)
    body, _ = spans(profiles, parts[1], begun)
    epilogue, _ = spans(profiles, parts[2], begun)
    offsets: dict[Key, int] = {}
    base = 0

    def aligned(size: int) -> int:
        return -(-size // alignment) * alignment

    for key in dict.fromkeys([*resident, *begun]):
        offsets[key] = base
        base += aligned(profiles[key[0]].tensors[key[1]].size_bytes)

    def place(part: Sequence[Span]) -> tuple[Tenancy, ...]:
        tenancies = []
        live: list[tuple[int, int, int]] = []  # offset, end of the bytes, end of the span
        for span in sorted(part, key=lambda each: each.begin):
            is_for_now = span.begin == span.end  # beside the tensor's own place, should it be there
            offset = None if is_for_now else offsets.get(span.key)
            if offset is None:
                live = [entry for entry in live if entry[2] > span.begin]
                offset = base
                for start, top, _ in live:
                    if start >= offset + aligned(span.size_bytes):
                        break
                    offset = max(offset, top)
                # What only the instruction itself needs is gone when the next one begins.
                until = span.begin + 1 if is_for_now else span.end
                insort(live, (offset, offset + aligned(span.size_bytes), until))
            tenancies.append(Tenancy(*span.key, span.begin, span.end, offset, span.size_bytes))
        return tuple(tenancies)

    made = [
        Part(tuple(instructions), place(part))
        for instructions, part in zip(parts, (prologue, body, epilogue), strict=True)
    ]
    on_host = {key for key in statics(profiles) if key not in set(resident)}
    for part in parts:
        on_host |= {(each.sub_array, each.tensor) for each in part if isinstance(each, Offload)}
    ends = [tenancy.offset + tenancy.size_bytes for part in made for tenancy in part.tenancies]
    return Program(
        *made,
        resident=tuple(resident),
        slab_bytes=max(ends, default=0),
        host_bytes=sum(profiles[key[0]].tensors[key[1]].size_bytes for key in on_host),
    )
