"""Random schedules for random training steps, from a seeded generator."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.random_steps import Shape, random_profile

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    Multiplexing,
    Phase,
    Profile,
    Recomputation,
    Schedule,
    Swap,
)
from trainmux.planning._rewrite import draft


def random_step(rng: random.Random, num_layers: int) -> Profile:
    """A step with everything that `Shape` knows, sizes off the alignment included."""
    sizes = {"max_feature_kib": 4, "max_parameter_kib": 4, "odd_sizes": True}
    shape = Shape(num_layers, in_place=0.15, scratch=0.2, empty=0.02, **sizes)
    return random_profile(rng.randrange(2**32), shape=shape)


def random_order(
    rng: random.Random, profiles: Sequence[Profile], multiplexing: Multiplexing
) -> tuple[tuple[int, int], ...]:
    """A body's order: stage after stage, the two passes of a ring's stage interleaved at random."""
    order: list[tuple[int, int]] = []
    num_forward = [sum(node.phase is Phase.FORWARD for node in profile.nodes) for profile in profiles]
    for s, profile in enumerate(profiles):
        if multiplexing is Multiplexing.TURNS:
            order += [(s, rank) for rank in range(len(profile.nodes))]
            continue
        other = (s + 1) % len(profiles)
        back = [(s, rank) for rank in range(num_forward[s], len(profile.nodes))]
        forward = [(other, rank) for rank in range(num_forward[other])]
        if other == s:
            order += back + forward
            continue
        while back or forward:
            take = back if not forward or (back and rng.random() < 0.6) else forward
            order.append(take.pop(0))
    return tuple(order)


def random_schedule(
    rng: random.Random, profiles: Sequence[Profile], multiplexing: Multiplexing, num_decisions: int
) -> Schedule:
    """Random swaps and recomputations on a random order; proposals that `draft` refuses are not taken."""
    order = random_order(rng, profiles, multiplexing)
    schedule = Schedule(multiplexing, order, (), ())
    propose = _Proposals(rng, profiles, order)
    for _ in range(num_decisions):
        if rng.random() < 0.6:
            swap = propose.swap()
            tried = Schedule(multiplexing, order, (*schedule.swaps, swap), schedule.recomputes)
        else:
            again = propose.recomputation()
            if again is None:
                continue
            tried = Schedule(multiplexing, order, schedule.swaps, (*schedule.recomputes, again))
        try:
            draft(profiles, tried)
        except PlanError:
            continue
        schedule = tried
    return schedule


class _Proposals:
    def __init__(
        self, rng: random.Random, profiles: Sequence[Profile], order: Sequence[tuple[int, int]]
    ) -> None:
        self._rng = rng
        self._profiles = profiles
        self._order = order
        self._uses: dict[tuple[int, int], list[int]] = {}
        for position, (s, rank) in enumerate(order):
            node = profiles[s].nodes[rank]
            for tensor in {*node.reads, *node.changes, *node.creates}:
                self._uses.setdefault((s, tensor), []).append(position)

    def swap(self) -> Swap:
        """Out behind a use, back before the next one around the body, with random slack."""
        (s, tensor), uses = self._rng.choice(list(self._uses.items()))
        which = self._rng.randrange(len(uses))
        used = uses[which]
        gap = (uses[(which + 1) % len(uses)] - used - 1) % len(self._order)
        cuts = sorted(self._rng.randint(0, gap) for _ in range(3))
        if self._rng.random() < 0.5:
            cuts[0] = 0
        out, release, back = (
            self._order[(used + cut + (0 if i == 0 else 1)) % len(self._order)] for i, cut in enumerate(cuts)
        )
        return Swap(s, tensor, out, release, back)

    def recomputation(self) -> Recomputation | None:
        """A tensor from its maker, and with some luck from its sources' makers, and theirs."""
        rng = self._rng
        s = rng.randrange(len(self._profiles))
        profile = self._profiles[s]
        made_by = {tensor: rank for rank, node in enumerate(profile.nodes) for tensor in node.creates}
        kinds = (ByteClass.FEATURE_MAP, ByteClass.GRADIENT_MAP)
        wanted = [t for t in made_by if profile.tensors[t].byte_class in kinds]
        if not wanted:
            return None
        tensor = rng.choice(wanted)
        nodes = {made_by[tensor]}
        waiting = [made_by[tensor]]
        while waiting:
            for source in profile.nodes[waiting.pop()].reads:
                if source in made_by and made_by[source] not in nodes and rng.random() < 0.4:
                    nodes.add(made_by[source])
                    waiting.append(made_by[source])
        use = rng.choice(self._uses[s, tensor])
        return Recomputation(s, tensor, tuple(sorted(nodes)), self._order[use - rng.choice([0, 0, 0, 1, 3])])


def random_case(seed: int) -> tuple[list[Profile], Schedule]:
    """One to four sub-arrays in a ring or in turns, with up to a few dozen decisions."""
    rng = random.Random(seed)
    num_sub_arrays = rng.randint(1, 4)
    different = [random_step(rng, rng.randint(1, 6)) for _ in range(rng.randint(1, num_sub_arrays))]
    profiles = [rng.choice(different) for _ in range(num_sub_arrays)]
    multiplexing = rng.choice([Multiplexing.RING, Multiplexing.RING, Multiplexing.TURNS])
    return profiles, random_schedule(rng, profiles, multiplexing, rng.choice([0, 5, 15, 30, 60]))


def careless_case(seed: int) -> tuple[list[Profile], Schedule]:
    """A few decisions about small steps without any thought: most such schedules make no sense."""
    rng = random.Random(seed)
    profiles = [random_step(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
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
            tensor = rng.choice(profiles[s].nodes[rank].creates)
            nodes = {rank, *rng.choice([(), (), (rng.randrange(len(profiles[s].nodes)),)])}
            recomputes.append(Recomputation(s, tensor, tuple(sorted(nodes)), rng.choice(order)))
    return profiles, Schedule(multiplexing, order, tuple(swaps), tuple(recomputes))
