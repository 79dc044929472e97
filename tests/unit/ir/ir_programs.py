"""A small training step, a short notation for programs of it, their placement, and right programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

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
from trainmux.planning._rewrite import place_parts

Key = tuple[int, int]


@dataclass(frozen=True)
class Case:
    program: Program
    profiles: tuple[Profile, ...]


def tensor(name: str, byte_class: ByteClass, size_bytes: int) -> ProfiledTensor:
    seconds = size_bytes * 1e-6
    return ProfiledTensor(name, byte_class, size_bytes, seconds, seconds, 1.1 * seconds, 1.1 * seconds)


def two_layers() -> Profile:
    """Two layers with batch statistics, updated as soon as their gradients exist; momentum for the first."""
    kind = ByteClass
    tensors = [
        tensor("x", kind.BATCH, 40),
        tensor("w1", kind.PARAMETER, 64),
        tensor("w2", kind.PARAMETER, 32),
        tensor("m1", kind.OPTIMIZER_STATE, 64),
        tensor("stats", kind.BUFFER, 16),
        tensor("h", kind.FEATURE_MAP, 100),
        tensor("a", kind.FEATURE_MAP, 100),
        tensor("mask", kind.FEATURE_MAP, 20),
        tensor("t", kind.TEMPORARY, 90),
        tensor("loss", kind.RESULT, 4),
        tensor("g_a", kind.GRADIENT_MAP, 100),
        tensor("g_w2", kind.GRADIENT, 32),
        tensor("g_h", kind.GRADIENT_MAP, 100),
        tensor("g_w1", kind.GRADIENT, 64),
    ]
    number = {each.name: position for position, each in enumerate(tensors)}

    def node(name: str, reads: str, creates: str, changes: str, workspace_bytes: int) -> ProfiledNode:
        phase = {"fw": Phase.FORWARD, "bw": Phase.BACKWARD, "up": Phase.UPDATE}[name[:2]]
        touched = [tuple(number[each] for each in names.split()) for names in (reads, creates, changes)]
        return ProfiledNode(name, phase, *touched, 1e-3, workspace_bytes)

    nodes = (
        node("fw_h", "x w1", "h", "", 30),
        node("fw_stats", "h", "t", "stats", 0),
        node("fw_a", "h", "a mask", "", 0),
        node("fw_loss", "a w2 t", "loss", "", 10),
        node("bw_loss", "loss a w2", "g_a g_w2", "", 50),
        node("up_w2", "g_w2", "", "w2", 0),
        node("bw_a", "h mask g_a", "g_h", "", 0),
        node("bw_h", "x h g_h", "g_w1", "", 25),
        node("up_w1", "g_w1", "", "w1 m1", 8),
    )
    device = DeviceFacts("none", memory_bytes=1 << 30, host_bytes=1 << 30)
    return Profile("hand-written", "analytic", 1, device, tuple(tensors), nodes)


def named(of: Profile, name: str) -> int:
    """The number of a tensor, or the rank of a node, by its name."""
    names = [each.name for each in (*of.tensors, *of.nodes)]
    position = names.index(name)
    return position if position < len(of.tensors) else position - len(of.tensors)


VERBS = {"compute": Compute, "free": Free, "offload": Offload, "prefetch": Prefetch}


def tape(profiles: Sequence[Profile], text: str) -> list[Instruction]:
    """Instructions from lines: a verb, a sub-array, a node or tensor, what is kept, what is waited for.

    ``after compute`` waits for the last instruction before it on the compute lane, ``after offload:h`` and
    ``after prefetch:h`` for the last copy of that tensor. Only what is written is waited for.
    """
    made: list[Instruction] = []
    last: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        head, _, after = line.partition(" after ")
        verb, sub_array, name, *keeps = head.split()
        of = profiles[int(sub_array)]
        lane = {"offload": Lane.OUT, "prefetch": Lane.IN}.get(verb, Lane.COMPUTE)
        edges = ["compute" if edge == "compute" else f"{edge} {sub_array}" for edge in after.split()]
        made += [Wait(lane, last[edge]) for edge in edges if edge in last]
        last["compute" if lane is Lane.COMPUTE else f"{verb}:{name} {sub_array}"] = len(made)
        if verb == "recompute":
            kept = tuple(named(of, each) for each in keeps)
            made.append(Recompute(int(sub_array), named(of, name), kept))
        else:
            made.append(VERBS[verb](int(sub_array), named(of, name)))
    return made


def statics(profiles: Sequence[Profile], except_for: Sequence[Key] = ()) -> list[Key]:
    return [
        (sub_array, number)
        for sub_array, of in enumerate(profiles)
        for number, each in enumerate(of.tensors)
        if each.byte_class.is_static and (sub_array, number) not in except_for
    ]


def _tenancies(
    profiles: Sequence[Profile], instructions: Sequence[Instruction], there: Sequence[Key]
) -> list[Tenancy]:
    """The bytes that the instructions of a part take, in this order, before they have a place."""
    end = len(instructions)
    found: list[Tenancy] = []
    is_open: dict[Key, int] = {}

    def take(key: Key, begin: int, until: int, size_bytes: int | None = None) -> None:
        size = profiles[key[0]].tensors[key[1]].size_bytes if size_bytes is None else size_bytes
        if until == end:
            is_open[key] = len(found)
        found.append(Tenancy(*key, begin, until, -1, size))

    for key in there:
        take(key, -1, end)
    for at, instruction in enumerate(instructions):
        match instruction:
            case Compute(sub_array, rank) | Recompute(sub_array, rank):
                node = profiles[sub_array].nodes[rank]
                keeps = instruction.keeps if isinstance(instruction, Recompute) else node.creates
                for number in node.creates:
                    if number not in keeps:
                        take((sub_array, number), at, at)
                    elif (sub_array, number) not in is_open:
                        take((sub_array, number), at, end)
                if node.workspace_bytes:
                    take((sub_array, -1), at, at, node.workspace_bytes)
            case Prefetch(sub_array, number):
                take((sub_array, number), at, end)
            case Free(sub_array, number):
                index = is_open.pop((sub_array, number))
                found[index] = replace(found[index], end=at)
    return found


def placed(
    profiles: Sequence[Profile], parts: Sequence[Sequence[Instruction]], resident: Sequence[Key]
) -> Program:
    """A program with offsets. What lies on the host between steps has a copy there, and what is offloaded."""
    prologue = _tenancies(profiles, parts[0], resident)
    begun = [(each.sub_array, each.tensor) for each in prologue if each.end == len(parts[0]) > each.begin]
    wanted = [prologue, *(_tenancies(profiles, part, begun) for part in parts[1:])]
    unplaced = [Part(tuple(part), tuple(each)) for part, each in zip(parts, wanted, strict=True)]
    made, slab_bytes = place_parts(unplaced, alignment=1)
    on_host = {key for key in statics(profiles) if key not in resident}
    on_host |= {(each.sub_array, each.tensor) for part in parts for each in part if isinstance(each, Offload)}
    host_bytes = sum(profiles[key[0]].tensors[key[1]].size_bytes for key in on_host)
    return Program(*made, tuple(resident), slab_bytes, host_bytes)


# Programs written by hand, each right, with every wait that it needs.

FORWARD = """
    compute 0 fw_h
    compute 0 fw_stats
    compute 0 fw_a
    compute 0 fw_loss
    free 0 t
"""
BACKWARD = """
    compute 0 bw_loss
    free 0 a
    compute 0 up_w2
    free 0 g_w2
    compute 0 bw_a
    free 0 g_a
    free 0 mask
    compute 0 bw_h
    free 0 h
    free 0 g_h
    compute 0 up_w1
    free 0 g_w1
    free 0 loss
"""
STEP = FORWARD + BACKWARD


def edited(text: str, edits: dict[str, str]) -> str:
    """The text with lines replaced by others; "..." stands for the line itself."""
    for line, instead in edits.items():
        assert f"{line}\n" in text
        text = text.replace(f"{line}\n", instead.replace("...", line).replace("; ", "\n") + "\n")
    return text


def in_turns(text: str, of: Profile | None = None, without: Sequence[str] = ()) -> Case:
    """One sub-array whose step is ``text``, with the static tensors ``without`` on the host between steps."""
    profiles = (of or two_layers(),)
    resident = statics(profiles, [(0, named(profiles[0], name)) for name in without])
    return Case(placed(profiles, [[], tape(profiles, text), []], resident), profiles)


def in_a_ring(forward: str, backward: str, without: Sequence[str] = ()) -> Case:
    """A pair; the backward pass of one and the forward pass of the other take a line each in turn."""
    profiles = (two_layers(), two_layers())
    second_forward, second_backward = (text.replace(" 0 ", " 1 ") for text in (forward, backward))
    body = [
        line
        for pair in ((backward, second_forward), (second_backward, forward))
        for lines in zip_longest(*(text.strip().splitlines() for text in pair), fillvalue="")
        for line in lines
    ]
    swapped = [(s, named(profiles[s], name)) for s in (0, 1) for name in without]
    parts = [tape(profiles, text) for text in (forward, "\n".join(body), backward)]
    return Case(placed(profiles, parts, statics(profiles, swapped)), profiles)


def turns() -> Case:
    """Two sub-arrays one after the other; nothing is swapped or recomputed."""
    profiles = (two_layers(), two_layers())
    body = tape(profiles, STEP + STEP.replace(" 0 ", " 1 "))
    return Case(placed(profiles, [[], body, []], statics(profiles)), profiles)


def pair_with_swap() -> Case:
    """A feature map is copied out in the forward pass and back in the backward pass."""
    out = {"compute 0 fw_a": "...; offload 0 h after compute", "free 0 t": "...; free 0 h after offload:h"}
    back = {"compute 0 bw_a": "prefetch 0 h after offload:h compute; compute 0 bw_a after prefetch:h"}
    return in_a_ring(edited(FORWARD, out), edited(BACKWARD, back))


def pair_with_recompute() -> Case:
    """Both feature maps are dropped and made again; the mask is kept, its second copy discarded."""
    dropped = edited(FORWARD, {"compute 0 fw_a": "...; free 0 h", "compute 0 fw_loss": "...; free 0 a"})
    return in_a_ring(dropped, f"recompute 0 fw_h h\nrecompute 0 fw_a a{BACKWARD}")


def pair_with_swapped_state() -> Case:
    """Momentum lies on the host, comes for its update and goes back changed."""
    edits = {
        "free 0 mask": "...; prefetch 0 m1 after compute",
        "compute 0 up_w1": "compute 0 up_w1 after prefetch:m1; offload 0 m1 after compute",
        "free 0 loss": "...; free 0 m1 after offload:m1",
    }
    return in_a_ring(FORWARD, edited(BACKWARD, edits), without=["m1"])


def recompute_from_swapped() -> Case:
    """A chain is recomputed from a batch and a parameter that were swapped out meanwhile."""
    edits = {
        "compute 0 fw_h": "prefetch 0 x; compute 0 fw_h after prefetch:x; offload 0 w1 after compute",
        "compute 0 fw_stats": "...; free 0 x",
        "compute 0 fw_a": "...; free 0 h; free 0 mask",
        "free 0 t": "...; free 0 a; free 0 w1 after offload:w1; prefetch 0 w1 after offload:w1 compute; "
        "prefetch 0 x; recompute 0 fw_h h after prefetch:w1 prefetch:x; recompute 0 fw_a a mask",
        "free 0 g_h": "free 0 x; ...",
    }
    return in_turns(edited(STEP, edits), without=["x"])


HANDMADE: tuple[Callable[[], Case], ...] = (
    turns,
    pair_with_swap,
    pair_with_recompute,
    pair_with_swapped_state,
    recompute_from_swapped,
)
