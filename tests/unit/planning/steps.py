"""Steps to plan for: a builder, a step with programs written by hand, random steps and schedules."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.random_steps import Shape, random_profile, split_passes
from tests.slab_check import peak_live_bytes
from tests.symbolic_machine import fault

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    DeviceFacts,
    Multiplexing,
    Phase,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Program,
    Recomputation,
    Schedule,
    Swap,
    verify,
)
from trainmux.planning import Infeasible, Task, policy_named, rewrite
from trainmux.planning.policies.auto import Auto

Node = tuple[int, int]
PLENTY = 1 << 50
DEVICE = DeviceFacts("a test's device", 1 << 30, 1 << 30)
TURNS, RING = Multiplexing.TURNS, Multiplexing.RING


class Builder:
    """Writes a profile by names."""

    def __init__(self) -> None:
        self.tensors: list[ProfiledTensor] = []
        self.nodes: list[ProfiledNode] = []
        self.at: dict[str, int] = {}

    def tensor(
        self, name: str, byte_class: ByteClass, size: int, seconds_in: float = 0.0, seconds_out: float = 0.0
    ) -> None:
        self.at[name] = len(self.tensors)
        self.tensors.append(
            ProfiledTensor(name, byte_class, size, seconds_out, seconds_in, seconds_out, seconds_in)
        )

    def node(
        self,
        name: str,
        phase: Phase,
        reads: Sequence[str],
        creates: Sequence[str] = (),
        seconds: float = 1.0,
        changes: Sequence[str] = (),
        workspace: int = 0,
        repeatable: bool = True,
    ) -> None:
        rows = [tuple(self.at[tensor] for tensor in row) for row in (reads, creates, changes)]
        self.nodes.append(ProfiledNode(name, phase, *rows, seconds, workspace, repeatable))

    def profile(self, name: str) -> Profile:
        return Profile(name, "analytic", 1, DEVICE, tuple(self.tensors), tuple(self.nodes))


def _step() -> Profile:
    """Copies take one second per 1024 bytes out, half of that back."""
    builder = Builder()
    for name, byte_class, size in (
        ("batch", ByteClass.BATCH, 512),
        ("weight", ByteClass.PARAMETER, 1024),
        ("map", ByteClass.FEATURE_MAP, 2048),
        ("mask", ByteClass.FEATURE_MAP, 512),
        ("top", ByteClass.FEATURE_MAP, 1024),
        ("loss", ByteClass.RESULT, 4),
        ("slope", ByteClass.GRADIENT_MAP, 2048),
        ("gradient", ByteClass.GRADIENT, 1024),
    ):
        builder.tensor(name, byte_class, size, size / 2048, size / 1024)
    builder.node("layer", Phase.FORWARD, ["batch", "weight"], ["map", "mask"], workspace=100)
    builder.node("head", Phase.FORWARD, ["map"], ["top"])
    builder.node("loss", Phase.FORWARD, ["top"], ["loss"])
    builder.node("∇loss", Phase.BACKWARD, ["top", "loss"], ["slope"])
    builder.node("∇layer", Phase.BACKWARD, ["slope", "mask", "map", "batch"], ["gradient"])
    builder.node("update", Phase.UPDATE, ["gradient"], changes=["weight"])
    return builder.profile("small step")


STEP = _step()
TENSORS = {tensor.name: number for number, tensor in enumerate(STEP.tensors)}
NODES = {node.name: rank for rank, node in enumerate(STEP.nodes)}


def swap(tensor: str, out: str, release: str, back: str) -> Swap:
    """A swap in `STEP`, by names."""
    return Swap(0, TENSORS[tensor], *((0, NODES[node]) for node in (out, release, back)))


def again(tensor: str, nodes: str, before: str) -> Recomputation:
    """A recomputation in `STEP`, by names."""
    ranks = tuple(NODES[node] for node in nodes.split())
    return Recomputation(0, TENSORS[tensor], ranks, (0, NODES[before]))


def decided(
    *decisions: Swap | Recomputation, profile: Profile = STEP, multiplexing: Multiplexing = TURNS
) -> Schedule:
    """The plain order of one step with these decisions."""
    swaps = tuple(each for each in decisions if isinstance(each, Swap))
    recomputes = tuple(each for each in decisions if isinstance(each, Recomputation))
    return Schedule(multiplexing, plain_order([profile], multiplexing), swaps, recomputes)


def num_forward(profile: Profile) -> int:
    return sum(node.phase is Phase.FORWARD for node in profile.nodes)


def plain_order(profiles: Sequence[Profile], multiplexing: Multiplexing) -> tuple[Node, ...]:
    """In a ring each backward pass is followed by the next sub-array's forward pass."""
    if multiplexing is TURNS:
        return tuple((s, rank) for s, profile in enumerate(profiles) for rank in range(len(profile.nodes)))
    return tuple(node for back, forward in _stages(profiles) for node in (*back, *forward))


def _stages(profiles: Sequence[Profile]) -> list[tuple[list[Node], list[Node]]]:
    """A ring's stages: the backward pass of one sub-array and the forward pass of the next."""
    passes = split_passes(profiles)
    return [(back, passes[(s + 1) % len(passes)][0]) for s, (_, back) in enumerate(passes)]


def undecided(profiles: Sequence[Profile], multiplexing: Multiplexing) -> Schedule:
    """The plain order, with nothing swapped and nothing recomputed."""
    return Schedule(multiplexing, plain_order(profiles, multiplexing), (), ())


def plain_peak(profiles: Sequence[Profile], multiplexing: Multiplexing) -> int:
    return peak_live_bytes(rewrite(profiles, undecided(profiles, multiplexing)).body)


def static_bytes(profiles: Sequence[Profile]) -> int:
    return sum(t.size_bytes for profile in profiles for t in profile.tensors if t.byte_class.is_static)


def decide(
    policy: str,
    profiles: Sequence[Profile],
    multiplexing: Multiplexing,
    limit_bytes: int,
    host_bytes: int = PLENTY,
    evaluations: int | None = 4,
) -> Schedule | None:
    """A policy's own schedule for one arrangement within a limit; ``None`` where it finds none."""
    task = Task(tuple(profiles), multiplexing, limit_bytes, host_bytes)
    try:
        found = policy_named(policy, evaluations=evaluations).policy.schedules(task)
        return [schedule for schedule in found if schedule is not None][-1]
    except Infeasible:
        return None


def bound_seconds(profiles: Sequence[Profile], multiplexing: Multiplexing, limit_bytes: int) -> float:
    """A time that no schedule in the plain order goes below; infinite where nothing fits."""
    return Auto().bound_seconds(Task(tuple(profiles), multiplexing, limit_bytes, PLENTY))


def prove(profiles: Sequence[Profile], schedule: Schedule, limit_bytes: int = PLENTY) -> Program:
    """The schedule's program, proved, run on symbolic values, and within the limit of live bytes."""
    program = rewrite(profiles, schedule)
    verify(program, profiles, budget_bytes=program.slab_bytes, host_bytes=program.host_bytes)
    assert fault(program, profiles) == ""
    assert peak_live_bytes(program.body) <= limit_bytes
    return program


def random_step(rng: random.Random, num_layers: int) -> Profile:
    """A step with everything that `Shape` knows, sizes off the alignment included."""
    sizes = {"max_feature_kib": 4, "max_parameter_kib": 4, "odd_sizes": True}
    shape = Shape(num_layers, in_place=0.15, scratch=0.2, empty=0.02, **sizes)
    return random_profile(rng.randrange(2**32), shape=shape)


def random_order(
    rng: random.Random, profiles: Sequence[Profile], multiplexing: Multiplexing
) -> tuple[Node, ...]:
    """A body's order: stage after stage, the two passes of a ring's stage interleaved at random."""
    if multiplexing is TURNS or len(profiles) == 1:
        return plain_order(profiles, multiplexing)
    order: list[Node] = []
    for back, forward in _stages(profiles):
        while back or forward:
            take = back if not forward or (back and rng.random() < 0.6) else forward
            order.append(take.pop(0))
    return tuple(order)


def random_case(seed: int) -> tuple[tuple[Profile, ...], Schedule]:
    """One to four sub-arrays in a ring or in turns, with up to a few dozen decisions that make sense."""
    rng = random.Random(seed)
    num_sub_arrays = rng.randint(1, 4)
    different = [random_step(rng, rng.randint(1, 6)) for _ in range(rng.randint(1, num_sub_arrays))]
    profiles = tuple(rng.choice(different) for _ in range(num_sub_arrays))
    multiplexing = rng.choice([RING, RING, TURNS])
    order = random_order(rng, profiles, multiplexing)
    schedule = Schedule(multiplexing, order, (), ())
    uses: dict[Node, list[int]] = {}
    for position, (s, rank) in enumerate(order):
        node = profiles[s].nodes[rank]
        for tensor in {*node.reads, *node.changes, *node.creates}:
            uses.setdefault((s, tensor), []).append(position)
    for _ in range(rng.choice([0, 5, 15, 30])):
        swaps, recomputes = schedule.swaps, schedule.recomputes
        if rng.random() < 0.6:
            swaps = (*swaps, _sensible_swap(rng, order, uses))
        else:
            recomputes = (*recomputes, _sensible_recomputation(rng, profiles, order, uses))
        tried = Schedule(multiplexing, order, swaps, recomputes)
        try:
            rewrite(profiles, tried)
        except PlanError:
            continue
        schedule = tried
    return profiles, schedule


def _sensible_swap(rng: random.Random, order: Sequence[Node], all_uses: dict[Node, list[int]]) -> Swap:
    """Out behind a use, back before the next one around the body, with random slack."""
    (s, tensor), uses = rng.choice(list(all_uses.items()))
    which = rng.randrange(len(uses))
    used = uses[which]
    gap = (uses[(which + 1) % len(uses)] - used - 1) % len(order)
    cuts = sorted(rng.randint(0, gap) for _ in range(3))
    if rng.random() < 0.5:
        cuts[0] = 0
    out, release, back = (order[(used + cut + (i > 0)) % len(order)] for i, cut in enumerate(cuts))
    return Swap(s, tensor, out, release, back)


def _sensible_recomputation(
    rng: random.Random, profiles: Sequence[Profile], order: Sequence[Node], all_uses: dict[Node, list[int]]
) -> Recomputation:
    """A tensor from its maker, and with some luck from its sources' makers, and theirs."""
    s = rng.randrange(len(profiles))
    profile = profiles[s]
    made_by = {tensor: rank for rank, node in enumerate(profile.nodes) for tensor in node.creates}
    kinds = (ByteClass.FEATURE_MAP, ByteClass.GRADIENT_MAP)
    tensor = rng.choice([t for t in made_by if profile.tensors[t].byte_class in kinds])
    nodes = {made_by[tensor]}
    waiting = [made_by[tensor]]
    while waiting:
        for source in profile.nodes[waiting.pop()].reads:
            if source in made_by and made_by[source] not in nodes and rng.random() < 0.4:
                nodes.add(made_by[source])
                waiting.append(made_by[source])
    use = rng.choice(all_uses[s, tensor])
    return Recomputation(s, tensor, tuple(sorted(nodes)), order[use - rng.choice([0, 0, 0, 1, 3])])


def careless_case(seed: int) -> tuple[tuple[Profile, ...], Schedule]:
    """A few decisions about small steps without any thought: most such schedules make no sense."""
    rng = random.Random(seed)
    profiles = tuple(random_step(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 3)))
    multiplexing = rng.choice(list(Multiplexing))
    order = random_order(rng, profiles, multiplexing)
    swaps: list[Swap] = []
    recomputes = []
    for _ in range(rng.randint(1, 4)):
        s = rng.randrange(len(profiles))
        if rng.random() < 0.6:
            tensor = rng.randrange(len(profiles[s].tensors))
            if swaps and rng.random() < 0.5:
                s, tensor = swaps[-1].sub_array, swaps[-1].tensor
            out, *gaps = rng.randrange(len(order)), *sorted(rng.randrange(len(order)) for _ in range(2))
            release, back = (order[(out + 1 + gap) % len(order)] for gap in gaps)
            swaps.append(Swap(s, tensor, order[out], release, back))
        else:
            rank = rng.choice([r for r, node in enumerate(profiles[s].nodes) if node.creates])
            nodes = {rank, *rng.choice([(), (), (rng.randrange(len(profiles[s].nodes)),)])}
            tensor = rng.choice(profiles[s].nodes[rank].creates)
            recomputes.append(Recomputation(s, tensor, tuple(sorted(nodes)), rng.choice(order)))
    return profiles, Schedule(multiplexing, order, tuple(swaps), tuple(recomputes))
