"""Random profiles of training steps, and random schedules for them, from a seeded generator."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trainmux.errors import PlanError
from trainmux.ir import (
    ByteClass,
    DeviceFacts,
    Multiplexing,
    Phase,
    Profile,
    ProfiledNode,
    ProfiledTensor,
    Recomputation,
    Schedule,
    Swap,
)
from trainmux.rewrite import draft

DEVICE = DeviceFacts("a test's device", 1 << 40, 1 << 40)


class _Builder:
    """Tensors and nodes of one step as they are thought of; byte classes of feature maps come last."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tensors: list[tuple[str, ByteClass, int]] = []
        self.nodes: list[ProfiledNode] = []

    def tensor(self, name: str, byte_class: ByteClass, max_blocks: int = 8) -> int:
        # Sizes off the alignment, of a few blocks, now and then none at all.
        size = 0 if self.rng.random() < 0.02 else self.rng.randint(1, max_blocks * 512)
        self.tensors.append((name, byte_class, size))
        return len(self.tensors) - 1

    def node(
        self,
        name: str,
        phase: Phase,
        reads: Sequence[int] = (),
        creates: Sequence[int] = (),
        changes: Sequence[int] = (),
        is_repeatable: bool = True,
    ) -> None:
        self.nodes.append(
            ProfiledNode(
                name=name,
                phase=phase,
                reads=tuple(dict.fromkeys(t for t in reads if t not in changes)),
                creates=tuple(creates),
                changes=tuple(changes),
                seconds=self.rng.choice([0.0, 1.0, 2.0, 3.5]) / 8,
                workspace_bytes=self.rng.choice([0, 0, 100, 1500]),
                is_repeatable=is_repeatable,
            )
        )

    def profile(self) -> Profile:
        last_phase: dict[int, Phase] = {}
        for node in self.nodes:
            for tensor in (*node.reads, *node.changes, *node.creates):
                last_phase[tensor] = node.phase
        tensors = []
        for number, (name, byte_class, size) in enumerate(self.tensors):
            if byte_class is ByteClass.FEATURE_MAP and last_phase[number] is Phase.FORWARD:
                byte_class = ByteClass.TEMPORARY
            out, back = size / 4096, size / 5120
            tensors.append(ProfiledTensor(name, byte_class, size, out, back, out * 1.25, back * 1.5))
        return Profile("random", "analytic", 1, DEVICE, tuple(tensors), tuple(self.nodes))


def random_profile(rng: random.Random, num_layers: int) -> Profile:
    """Layers with skips over others, a loss, the backward pass through all of them, and an update.

    In between: batch statistics that a forward node changes, constants and parameters that nothing changes,
    some of them read in the forward pass only, activations in place, nodes with two outputs, gradients that
    several consumers add to, updates at once or at the end, a norm as a second result.
    """
    make = _Builder(rng)
    batch = make.tensor("batch", ByteClass.BATCH)
    features = [batch]
    layers: list[tuple[list[int], list[int], int, list[int]]] = []  # inputs, saved, output, statics
    for i in range(num_layers):
        weight = make.tensor(f"weight{i}", ByteClass.PARAMETER)
        output = make.tensor(f"map{i}", ByteClass.FEATURE_MAP)
        inputs = [features[-1]]
        if len(features) > 2 and rng.random() < 0.4:
            inputs.append(rng.choice(features[1:-1]))
        creates, changes = [output], []
        saved = [output] if rng.random() < 0.7 else []
        saved += [tensor for tensor in inputs if rng.random() < 0.7]
        if rng.random() < 0.3:
            creates.append(make.tensor(f"mask{i}", ByteClass.FEATURE_MAP))
            saved.append(creates[-1])
        if rng.random() < 0.15:
            changes.append(make.tensor(f"statistics{i}", ByteClass.BUFFER, 2))
        unchanged = _unchanged(make, i, saved)
        make.node(
            f"layer{i}",
            Phase.FORWARD,
            [*inputs, weight, *unchanged],
            creates,
            changes,
            is_repeatable=rng.random() < 0.95,
        )
        if rng.random() < 0.15:
            make.node(f"in place{i}", Phase.FORWARD, [], [], [output])
        if rng.random() < 0.2:
            scratch = make.tensor(f"scratch{i}", ByteClass.TEMPORARY)
            make.node(f"scratch{i}", Phase.FORWARD, [output], [scratch])
            if rng.random() < 0.7:
                output = make.tensor(f"map{i}b", ByteClass.FEATURE_MAP)
                make.node(f"second{i}", Phase.FORWARD, [scratch, *inputs[:1]], [output])
                saved = [tensor if tensor != creates[0] else output for tensor in saved]
        layers.append((inputs, saved, output, [weight]))
        features.append(output)
    loss = make.tensor("loss", ByteClass.RESULT, 1)
    make.node("loss", Phase.FORWARD, [features[-1]], [loss])
    _backward(make, rng, layers, features[-1], loss)
    return make.profile()


def _unchanged(make: _Builder, layer: int, saved: list[int]) -> list[int]:
    """Tensors that a layer reads and nothing changes: a constant, a parameter that is not trained.

    The constant is also read in the backward pass half of the time.
    """
    found = []
    if make.rng.random() < 0.15:
        found.append(make.tensor(f"constant{layer}", ByteClass.CONSTANT))
        saved += found if make.rng.random() < 0.5 else []
    if make.rng.random() < 0.15:
        found.append(make.tensor(f"frozen{layer}", ByteClass.PARAMETER))
    return found


def _backward(
    make: _Builder,
    rng: random.Random,
    layers: Sequence[tuple[list[int], list[int], int, list[int]]],
    top: int,
    loss: int,
) -> None:
    deferred = rng.random() < 0.4
    updates: list[tuple[str, list[int], list[int]]] = []
    gradients = {top: make.tensor("gradient map of top", ByteClass.GRADIENT_MAP)}
    make.node("loss backward", Phase.BACKWARD, [top, loss], [gradients[top]])
    for i in reversed(range(len(layers))):
        inputs, saved, output, (weight,) = layers[i]
        of_weight = make.tensor(f"gradient{i}", ByteClass.GRADIENT)
        creates, changes = [of_weight], []
        for tensor in inputs:
            if tensor in gradients:
                changes.append(gradients[tensor])
            elif tensor != 0:
                gradients[tensor] = make.tensor(f"gradient map{i}/{tensor}", ByteClass.GRADIENT_MAP)
                creates.append(gradients[tensor])
        make.node(f"layer{i} backward", Phase.BACKWARD, [gradients[output], *saved, weight], creates, changes)
        states = [
            make.tensor(f"state{i}.{j}", ByteClass.OPTIMIZER_STATE) for j in range(rng.choice([0, 1, 2]))
        ]
        updates.append((f"update{i}", [of_weight], [weight, *states]))
        if not deferred:
            make.node(updates[-1][0], Phase.UPDATE, updates[-1][1], [], updates[-1][2])
    if rng.random() < 0.5:
        norm = make.tensor("norm", ByteClass.RESULT, 1)
        make.node("norm", Phase.BACKWARD, [*updates[-1][1]] if deferred else [], [norm])
    if deferred:
        for name, reads, changes in updates:
            make.node(name, Phase.UPDATE, reads, [], changes)


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
    different = [random_profile(rng, rng.randint(1, 6)) for _ in range(rng.randint(1, num_sub_arrays))]
    profiles = [rng.choice(different) for _ in range(num_sub_arrays)]
    multiplexing = rng.choice([Multiplexing.RING, Multiplexing.RING, Multiplexing.TURNS])
    return profiles, random_schedule(rng, profiles, multiplexing, rng.choice([0, 5, 15, 30, 60]))


def careless_case(seed: int) -> tuple[list[Profile], Schedule]:
    """A few decisions about small steps without any thought: most such schedules make no sense."""
    rng = random.Random(seed)
    profiles = [random_profile(rng, rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
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
