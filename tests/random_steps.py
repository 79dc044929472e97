"""Random training steps as profiles, from a seed: forward layers with skips, their backward, their update.

The forward pass is drawn at random; the backward pass follows from it as automatic differentiation would
make it, accumulating where a tensor has several readers. So lifetimes, classes and dependencies are those of
a real step, and only sizes, times and shape are random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from trainmux.ir import ByteClass, DeviceFacts, Phase, Profile, ProfiledNode, ProfiledTensor

KIB = 1024
DEVICE = DeviceFacts("test device", memory_bytes=2**40, host_bytes=2**40)


@dataclass(frozen=True)
class Shape:
    """What a random step looks like: how many layers, and how likely each feature of one is.

    A ``constant`` is read in the forward pass and, half of the time, in the backward pass; a ``frozen``
    parameter is read in the forward pass, now and then by two layers, and never trained. Nothing changes
    either of them. An activation may be changed ``in_place``, or pass through a ``scratch`` tensor that only
    the forward pass has; any tensor may be ``empty``.
    """

    num_layers: int = 4
    skip: float = 0.3
    second_output: float = 0.2
    workspace: float = 0.2
    unrepeatable: float = 0.1
    buffer: float = 0.1
    constant: float = 0.2
    frozen: float = 0.15
    immediate_update: float = 0.5
    in_place: float = 0.0
    scratch: float = 0.0
    empty: float = 0.0
    optimizer_states: int = 1
    max_feature_kib: int = 64
    max_parameter_kib: int = 16
    odd_sizes: bool = False
    duplex_slowdown: float = 1.1


USUAL = Shape()

Node = tuple[int, int]


def split_passes(profiles: Sequence[Profile]) -> list[tuple[list[Node], list[Node]]]:
    """The nodes of each sub-array: its forward pass, and its backward pass with the update."""
    passes = []
    for sub_array, profile in enumerate(profiles):
        nodes = [(sub_array, rank) for rank in range(len(profile.nodes))]
        num_forward = sum(node.phase is Phase.FORWARD for node in profile.nodes)
        passes.append((nodes[:num_forward], nodes[num_forward:]))
    return passes


@dataclass
class _Draft:
    """A step being written. Tensors and nodes are lists of fields until classes are known."""

    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    fixed_class: list[ByteClass | None] = field(default_factory=list)
    nodes: list[ProfiledNode] = field(default_factory=list)

    def tensor(self, name: str, size: int, byte_class: ByteClass | None = None) -> int:
        self.names.append(name)
        self.sizes.append(size)
        self.fixed_class.append(byte_class)
        return len(self.names) - 1

    def node(
        self,
        name: str,
        phase: Phase,
        reads: Sequence[int],
        creates: Sequence[int],
        changes: Sequence[int] = (),
        seconds: float = 1e-3,
        workspace: int = 0,
        repeatable: bool = True,
    ) -> None:
        changed = tuple(dict.fromkeys(changes))
        read = tuple(tensor for tensor in dict.fromkeys(reads) if tensor not in changed)
        self.nodes.append(
            ProfiledNode(name, phase, read, tuple(creates), changed, seconds, workspace, repeatable)
        )


def random_profile(seed: int, width: int = 1, shape: Shape = USUAL) -> Profile:
    """The step of a random model at a width: tensors grow with it, times grow by less."""
    rng = random.Random(f"{seed}")
    draft = _write(rng, random.Random(f"{seed} unchanged"), shape)
    link_bytes_per_second = 10 ** rng.uniform(6.0, 8.5)
    saturation = rng.uniform(0.1, 0.9)
    return _finish(draft, f"random-{seed}", width, link_bytes_per_second, saturation, shape.duplex_slowdown)


def _write(rng: random.Random, unchanged: random.Random, shape: Shape) -> _Draft:
    """``unchanged`` draws tensors that nothing changes, apart from all others, which stay what they are."""
    draft = _Draft()
    frozen: list[int] = []

    def size(limit_kib: int) -> int:
        units = rng.randint(1, limit_kib)
        if shape.empty and rng.random() < shape.empty:
            return 0
        return units * KIB + (rng.randint(-500, 500) if shape.odd_sizes else 0)

    def seconds() -> float:
        return rng.choice((0.25, 0.5, 1.0, 2.0, 4.0)) * 1e-3 * rng.uniform(0.8, 1.2)

    def workspace() -> int:
        return size(shape.max_feature_kib) if rng.random() < shape.workspace else 0

    batch = draft.tensor("batch", size(shape.max_feature_kib // 2 or 1), ByteClass.BATCH)
    activations = [batch]
    layers: list[tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]] = []
    for number in range(shape.num_layers):
        parameter = draft.tensor(f"w{number}", size(shape.max_parameter_kib), ByteClass.PARAMETER)
        inputs = [activations[-1]]
        if len(activations) > 2 and rng.random() < shape.skip:
            inputs.append(rng.choice(activations[1:-1]))
        outputs = [draft.tensor(f"z{number}", size(shape.max_feature_kib))]
        if rng.random() < shape.second_output:
            outputs.append(draft.tensor(f"m{number}", size(max(1, shape.max_feature_kib // 4))))
        changes = []
        if rng.random() < shape.buffer:
            changes = [draft.tensor(f"b{number}", size(2), ByteClass.BUFFER)]
        beside, also_backward = [], []
        if unchanged.random() < shape.constant:
            units = unchanged.randint(1, shape.max_feature_kib)
            beside.append(draft.tensor(f"c{number}", units * KIB, ByteClass.CONSTANT))
            also_backward += beside if unchanged.random() < 0.5 else []
        if unchanged.random() < shape.frozen:
            if not frozen or unchanged.random() < 0.7:
                units = unchanged.randint(1, shape.max_parameter_kib)
                frozen.append(draft.tensor(f"f{number}", units * KIB, ByteClass.PARAMETER))
            beside.append(unchanged.choice(frozen))
        draft.node(
            f"forward{number}",
            Phase.FORWARD,
            [*inputs, parameter, *beside],
            outputs,
            changes,
            seconds(),
            workspace(),
            not changes and rng.random() >= shape.unrepeatable,
        )
        if shape.in_place and rng.random() < shape.in_place:
            draft.node(f"in place{number}", Phase.FORWARD, [], [], outputs[:1], seconds())
        if shape.scratch and rng.random() < shape.scratch:
            scratch = draft.tensor(f"t{number}", size(shape.max_feature_kib))
            draft.node(f"scratch{number}", Phase.FORWARD, outputs[:1], [scratch], seconds=seconds())
            outputs[0] = draft.tensor(f"y{number}", size(shape.max_feature_kib))
            draft.node(
                f"after{number}", Phase.FORWARD, [scratch, inputs[0]], outputs[:1], (), seconds(), workspace()
            )
        candidates = [*inputs, outputs[0]]
        saved = [tensor for tensor in candidates if rng.random() < 0.6] or [inputs[0]]
        layers.append((tuple(inputs), parameter, tuple(outputs), (*saved, *outputs[1:], *also_backward)))
        activations.append(outputs[0])
    loss = draft.tensor("loss", 512, ByteClass.RESULT)
    gradient_of = {activations[-1]: draft.tensor(f"g.z{shape.num_layers - 1}", draft.sizes[activations[-1]])}
    draft.node("loss", Phase.FORWARD, [activations[-1]], [loss], seconds=seconds() / 4, repeatable=False)
    draft.node(
        "loss backward",
        Phase.BACKWARD,
        [activations[-1]],
        [gradient_of[activations[-1]]],
        seconds=seconds() / 4,
    )

    is_immediate = rng.random() < shape.immediate_update
    updates: list[tuple[int, int, int]] = []
    for number, (inputs, parameter, outputs, saved) in reversed(list(enumerate(layers))):
        gradient = draft.tensor(f"g.w{number}", draft.sizes[parameter], ByteClass.GRADIENT)
        created, accumulated = [gradient], []
        for tensor in inputs:
            if tensor == batch:
                continue
            if tensor in gradient_of:
                accumulated.append(gradient_of[tensor])
            else:
                gradient_of[tensor] = draft.tensor(f"g.{draft.names[tensor]}", draft.sizes[tensor])
                created.append(gradient_of[tensor])
        draft.node(
            f"backward{number}",
            Phase.BACKWARD,
            [gradient_of[outputs[0]], parameter, *saved],
            created,
            accumulated,
            seconds() * 2,
            workspace(),
        )
        updates.append((number, parameter, gradient))
        if is_immediate:
            _update(draft, shape, *updates.pop(), seconds() / 8)
    for number, parameter, gradient in updates:
        _update(draft, shape, number, parameter, gradient, seconds() / 8)
    return draft


def _update(draft: _Draft, shape: Shape, number: int, parameter: int, gradient: int, seconds: float) -> None:
    states = [
        draft.tensor(f"s{which}.w{number}", draft.sizes[parameter], ByteClass.OPTIMIZER_STATE)
        for which in range(shape.optimizer_states)
    ]
    draft.node(f"update{number}", Phase.UPDATE, [gradient], [], [parameter, *states], seconds)


def _finish(
    draft: _Draft, name: str, width: int, link: float, saturation: float, duplex_slowdown: float
) -> Profile:
    tensors = []
    for number, (tensor_name, one_size) in enumerate(zip(draft.names, draft.sizes, strict=True)):
        num_bytes = one_size * (1 if draft.fixed_class[number] is ByteClass.BATCH else width)
        alone = num_bytes / link
        duplex = alone * duplex_slowdown
        tensors.append(
            ProfiledTensor(tensor_name, _class_of(draft, number), num_bytes, alone, alone, duplex, duplex)
        )
    slower = saturation * width + 1 - saturation
    nodes = tuple(
        replace(node, seconds=node.seconds * slower, workspace_bytes=node.workspace_bytes * width)
        for node in draft.nodes
    )
    return Profile(f"{name}-{width}", "analytic", width, DEVICE, tuple(tensors), nodes)


def _class_of(draft: _Draft, tensor: int) -> ByteClass:
    fixed = draft.fixed_class[tensor]
    if fixed is not None:
        return fixed
    made = next(node.phase for node in draft.nodes if tensor in node.creates)
    last = [node.phase for node in draft.nodes if tensor in (*node.reads, *node.creates, *node.changes)][-1]
    if made is Phase.BACKWARD:
        return ByteClass.GRADIENT_MAP
    return ByteClass.TEMPORARY if last is made else ByteClass.FEATURE_MAP
