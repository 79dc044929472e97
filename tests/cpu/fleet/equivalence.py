"""Training in a fleet beside training one by one in plain torch, on any device.

The equivalence tests of ``tests/cpu/fleet`` and ``tests/gpu`` share what is here: members that differ in
every hyper-parameter, an eager loop that knows nothing of trainmux, and comparisons that say which tensor
of which member is how far off.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.workloads import SMALL, Workload
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import trainmux as tm

Loss = Callable[[nn.Module, Any], Any]
MakeOptimizer = Callable[[nn.Module, int], torch.optim.Optimizer]
"""Makes the optimizer of the member with this number."""

PLAIN = tuple(name for name in SMALL if not name.endswith("_with_dropout"))
WITH_DROPOUT = tuple(name for name in SMALL if name.endswith("_with_dropout"))

NO_GRADIENT = 1e-14
"""A gradient that stays below this in fp64 is the rounding error of one that is zero."""

DRIFT = 1e-6
"""How far rounding errors alone may carry an element: Adam makes a step of some size out of any gradient."""

_BEHIND_A_BIAS = {"features.1.running_mean": 1e-6, "features.5.running_mean": 1e-6}
LOOSER: dict[str, dict[str, float]] = {"cnn": _BEHIND_A_BIAS, "cnn_with_dropout": _BEHIND_A_BIAS}
"""Buffers with a bound of their own, by workload.

The bias of the convolution before them has a true gradient of zero. Rounding errors move it, batch norm
takes the mean away again, and the running mean is where its drift shows.
"""

ADAMW = (
    {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.0},
    {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 1e-1},
    {"lr": 3e-4, "betas": (0.5, 0.9), "eps": 1e-8, "weight_decay": 5e-2},
    {"lr": 2e-3, "betas": (0.0, 0.999), "eps": 1e-5, "weight_decay": 1e-3},
    {"lr": 5e-3, "betas": (0.95, 0.98), "eps": 1e-8, "weight_decay": 3e-1},
)


def adamw(model: nn.Module, number: int) -> torch.optim.Optimizer:
    """AdamW whose settings all depend on the member's number."""
    return torch.optim.AdamW(model.parameters(), **ADAMW[number % len(ADAMW)])


# ---- batches and models ------------------------------------------------------------------------------


def map_batch(function: Callable[..., Tensor], *batches: Any) -> Any:
    """Apply ``function`` to the tensors that stand in the same place of tuples, dicts or dataclasses."""
    first = batches[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in dataclasses.fields(first)]
        parts = {name: map_batch(function, *(getattr(b, name) for b in batches)) for name in names}
        return replace(first, **parts)
    return pytree.tree_map(function, *batches)


def stack_batches(batches: Sequence[Any]) -> Any:
    """One batch per member as the single batch that ``data="per_member"`` wants."""
    return map_batch(lambda *leaves: torch.stack(leaves), *batches)


def batch_to(batch: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """The batch on a device, its floating tensors in ``dtype`` if one is given."""
    return map_batch(
        lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() and dtype is not None else leaf.dtype),
        batch,
    )


def batches_of(workload: Workload, num_steps: int, *, device: str = "cpu", seed: int = 100) -> list[Any]:
    """A fresh fp64 batch for each step."""
    return [batch_to(workload.batch(seed + step, torch.float64), device) for step in range(num_steps)]


def models_of(workload: Workload, num_members: int, *, device: str = "cpu") -> list[nn.Module]:
    """fp64 models in training mode, each with its own initial weights."""
    # transformers hands its models out in evaluation mode.
    return [workload.build(number).double().to(device).train() for number in range(num_members)]


def clone(model: nn.Module) -> nn.Module:
    """A copy that runs as the original does."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN warns about copies, which are not in one piece
    return twin


# ---- what a run leaves behind ------------------------------------------------------------------------


@dataclass
class Outcome:
    """A member after training.

    ``tensors`` has every parameter, buffer (by name) and optimizer state (``name/state``); ``losses`` and
    ``metrics`` one value per step; ``largest_gradients`` each parameter's gradient, element by element the
    largest absolute value over all steps, where that was recorded.
    """

    tensors: dict[str, Tensor]
    losses: list[Tensor] = field(default_factory=list)
    metrics: list[dict[str, Tensor]] = field(default_factory=list)
    largest_gradients: dict[str, Tensor] = field(default_factory=dict)

    def driven_by_rounding(self, name: str) -> Tensor | None:
        """Which elements of a tensor only rounding errors moved; ``None`` where that is no question.

        A bias before batch norm and the key's bias in attention have a true gradient of zero: in any two
        runs they drift apart (the latter may be a third of a larger tensor). Elements whose gradient was
        exactly zero stay in: nothing may have changed them.
        """
        parameter, _, state = name.partition("/")
        largest = self.largest_gradients.get(parameter)
        if largest is None or state == "step":
            return None
        return (largest > 0) & (largest < NO_GRADIENT)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all parameters, buffers and optimizer state."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{name}/{key}"] = torch.as_tensor(value).detach().clone()
    found |= {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    return found


def split_loss(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss function's result as loss and metrics."""
    return result if isinstance(result, tuple) else (result, {})


def train_alone(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: Iterable[Any],
    *,
    autocast: torch.dtype | None = None,
) -> Outcome:
    """Train one model in plain eager torch."""
    losses: list[Tensor] = []
    metrics: list[dict[str, Tensor]] = []
    largest: dict[str, Tensor] = {}
    device = next(model.parameters()).device.type
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast(device, autocast) if autocast is not None else nullcontext():
            value, extra = split_loss(loss(model, batch))
        value.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and parameter.grad.numel():
                size = parameter.grad.abs()
                largest[name] = torch.maximum(largest[name], size) if name in largest else size
        optimizer.step()
        losses.append(value.detach())
        metrics.append({name: item.detach() for name, item in extra.items()})
    return Outcome(snapshot(model, optimizer), losses, metrics, largest)


def train_fused(fleet: tm.Fleet, batches: Iterable[Any]) -> list[Outcome]:
    """Train a fleet; an outcome for each member in the order of its names."""
    losses: list[Tensor] = []
    metrics: list[dict[str, Any]] = []
    for batch in batches:
        losses.append(fleet.step(batch))
        metrics.append(fleet.metrics)
    fleet.sync()
    return [
        Outcome(
            snapshot(member.model, member.optimizer),
            [step[row] for step in losses],
            [{name: value[row] for name, value in step.items()} for step in metrics],
        )
        for row, member in enumerate(fleet.members)
    ]


# ---- comparisons -------------------------------------------------------------------------------------


def distance(actual: Tensor, expected: Tensor, left_out: Tensor | None = None) -> float:
    """The largest difference, as a share of the largest value of ``expected``; NaN where one is NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    wanted = expected.double()
    difference = (actual.to(wanted.device).double() - wanted).abs()
    if left_out is not None:
        difference = difference.masked_fill(left_out, 0.0)
    largest = difference.amax().item()
    return largest if largest == 0.0 else largest / max(wanted.abs().amax().item(), 1e-300)


def differences(
    actual: Outcome, expected: Outcome, bound: float, *, looser: Mapping[str, float] | None = None
) -> list[str]:
    """What is further apart than ``bound``, in words; empty if nothing is.

    ``looser`` has tensors with a bound of their own. Elements that only rounding errors moved are held to
    ``DRIFT``, an absolute bound.
    """
    found: list[str] = []
    one_sided = set(expected.tensors) ^ set(actual.tensors)
    if one_sided:
        found.append(f"only on one side: {sorted(one_sided)}")
    for name in expected.tensors.keys() - one_sided:
        got, wanted = actual.tensors[name], expected.tensors[name]
        allowed = (looser or {}).get(name, bound)
        drifts = expected.driven_by_rounding(name)
        off = distance(got, wanted, drifts)
        if not off <= allowed:
            found.append(f"{name}: {off:.2e} of its largest value, expected at most {allowed:.0e}")
        if drifts is not None and drifts.any():
            drift = (got - wanted).abs()[drifts].amax().item()
            if not drift <= DRIFT:
                found.append(f"{name}: {drift:.2e} apart without a gradient, expected at most {DRIFT:.0e}")
    for step, (got, wanted) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        if not distance(got, wanted) <= bound:
            found.append(f"loss of step {step}: got {got.item()!r}, expected {wanted.item()!r}")
    for step, metrics in enumerate(expected.metrics):
        for name, wanted in metrics.items():
            got = actual.metrics[step][name]
            if not distance(got, wanted) <= bound:
                found.append(f"metric {name} of step {step}: got {got!r}, expected {wanted!r}")
    return found


def assert_equivalent(
    actual: Sequence[Outcome],
    expected: Sequence[Outcome],
    bound: float,
    *,
    looser: Mapping[str, float] | None = None,
) -> None:
    """Every member within ``bound``; the message names all tensors that are not."""
    assert len(actual) == len(expected)
    found = [
        f"member {row}: {text}"
        for row, (got, wanted) in enumerate(zip(actual, expected, strict=True))
        for text in differences(got, wanted, bound, looser=looser)
    ]
    assert not found, "\n".join(found)


def bits(outcome: Outcome) -> dict[str, Tensor]:
    """Everything a member's training produced, to be compared bit for bit."""
    everything = dict(outcome.tensors)
    everything |= {f"loss {step}": loss for step, loss in enumerate(outcome.losses)}
    for step, metrics in enumerate(outcome.metrics):
        everything |= {f"{name} {step}": value for name, value in metrics.items()}
    return everything


def assert_same_bits(actual: Outcome, expected: Outcome) -> None:
    """Bitwise equal in every tensor, loss and metric, NaNs and signs of zero included."""
    got, wanted = bits(actual), bits(expected)
    assert got.keys() == wanted.keys()
    unequal = [
        name
        for name in wanted
        if got[name].dtype != wanted[name].dtype
        or got[name].shape != wanted[name].shape
        or not torch.equal(
            got[name].contiguous().view(-1).view(torch.uint8),
            wanted[name].contiguous().view(-1).view(torch.uint8),
        )
    ]
    assert not unequal


# ---- checks that several tests make ------------------------------------------------------------------


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 products in fp32 (no TF32), whatever the process was set to."""
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


def check_fp64(
    models: Sequence[nn.Module],
    loss: Loss,
    batches: Sequence[Any],
    *,
    optimizer: MakeOptimizer = adamw,
    device: str = "cpu",
    data: str = "shared",
    bound: float = 1e-10,
    looser: Mapping[str, float] | None = None,
) -> tm.Fleet:
    """Train the models one by one and as a fleet, in fp64 on the same batches, and compare everything.

    With ``data="per_member"``, ``batches`` has a list of batches for each member. Returns the fleet.
    """
    twins = [clone(model) for model in models]
    per_member = data == "per_member"
    alone = [
        train_alone(model, optimizer(model, number), loss, batches[number] if per_member else batches)
        for number, model in enumerate(models)
    ]
    fed = [stack_batches(rows) for rows in zip(*batches, strict=True)] if per_member else batches
    fleet = tm.Fleet(
        [tm.Member(model, optimizer(model, number), name=f"m{number}") for number, model in enumerate(twins)],
        loss,
        fed[0],
        device=device,
        precision="fp64",
        data=data,
        lowering="aten",
    )
    assert [group.width for group in fleet.summary()] == [len(models)], "expected one fused group"
    assert_equivalent(train_fused(fleet, fed), alone, bound, looser=looser)
    assert fleet.stopped() == {}
    return fleet


# ---- precision ---------------------------------------------------------------------------------------

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""Autocast dtype of each precision below fp64."""

MAX_ERROR_RATIO = 3.0

# What rounding alone does to one number; below it, an individual run is exact by accident.
_FLOOR = {"fp32": 2.0**-22, "bf16": 2.0**-9}
_POINTS = (0, 8, 16)


def _first_moment_is_the_gradient(model: nn.Module) -> torch.optim.Optimizer:
    # A first beta of 0 leaves this step's gradient in exp_avg, which is how the fleet hands it out; a large
    # eps keeps the update from turning the sign of a tiny gradient into a whole step.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.0, 0.99), eps=1e-3)


def _trajectory(workload: Workload, device: str) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """Points of one training run, weights and optimizer state rounded to fp32."""
    model = workload.build(0).double().to(device).train()
    optimizer = _first_moment_is_the_gradient(model)
    points = []
    for step, batch in enumerate(batches_of(workload, max(_POINTS) + 1, device=device)):
        if step in _POINTS:
            rounded = clone(model).float()
            points.append((rounded, _with_state(rounded, optimizer)))
        train_alone(model, optimizer, workload.loss, [batch])
    return points


def _with_state(model: nn.Module, source: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A new optimizer over ``model`` that continues from ``source``, in the model's dtype."""
    optimizer = _first_moment_is_the_gradient(model)
    optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    return optimizer


def _step_result(before: nn.Module, after: Outcome) -> dict[str, Tensor]:
    """What one step made: the update of each parameter, new state, new buffers, the loss; in fp64."""
    result = {name: value.double() for name, value in after.tensors.items() if value.is_floating_point()}
    for name, parameter in before.named_parameters():
        result[name] = result[name] - parameter.detach().double()
    result["loss"] = after.losses[0].double()
    return result


def _relative_errors(
    got: Mapping[str, Tensor], exact: Mapping[str, Tensor], reference: Outcome
) -> dict[str, float]:
    """Root mean square error of each tensor, as a share of the root mean square of the exact one."""
    errors: dict[str, float] = {}
    for name, wanted in exact.items():
        counted = torch.ones_like(wanted, dtype=torch.bool)
        largest = reference.largest_gradients.get(name.partition("/")[0])
        if largest is not None and largest.shape == wanted.shape:
            counted = largest >= NO_GRADIENT
        size = wanted[counted].square().mean().sqrt().item() if counted.any() else 0.0
        if size > 0.0:
            errors[name] = (got[name] - wanted)[counted].square().mean().sqrt().item() / size
    return errors


def _pooled(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return (sum(squares) / len(squares)) ** 0.5


def check_precision(workload: Workload, precision: str, *, device: str = "cpu") -> None:
    """One step from points of a trajectory: errors against fp64 at most three times those of plain torch.

    The points are the members of one fleet. Each point's error over the whole model is compared, and each
    tensor's error over all points.
    """
    points = _trajectory(workload, device)
    batch = batch_to(workload.batch(77, torch.float32), device)
    members = []
    for number, (model, optimizer) in enumerate(points):
        twin = clone(model)
        members.append(tm.Member(twin, _with_state(twin, optimizer), name=f"point {number}"))
    with full_precision():
        fleet = tm.Fleet(members, workload.loss, batch, device=device, precision=precision, lowering="aten")
        fused = train_fused(fleet, [batch])
        errors: list[tuple[dict[str, float], dict[str, float]]] = []
        for (model, optimizer), outcome in zip(points, fused, strict=True):
            twin = clone(model)
            state = _with_state(twin, optimizer)
            alone = train_alone(twin, state, workload.loss, [batch], autocast=PRECISIONS[precision])
            wide = clone(model).double()
            state = _with_state(wide, optimizer)
            reference = train_alone(wide, state, workload.loss, [batch_to(batch, device, torch.float64)])
            exact = _step_result(model, reference)
            errors.append(
                (
                    _relative_errors(_step_result(model, outcome), exact, reference),
                    _relative_errors(_step_result(model, alone), exact, reference),
                )
            )
    floor = _FLOOR[precision]
    found = []
    for number, (of_fused, of_alone) in enumerate(errors):
        got, allowed = _pooled(of_fused.values()), MAX_ERROR_RATIO * _pooled(of_alone.values())
        if not got <= allowed:
            found.append(f"model at point {number}: error {got:.2e}, expected at most {allowed:.2e}")
    for name in sorted({name for of_fused, _ in errors for name in of_fused}):
        if name.endswith("/exp_avg_sq"):
            continue  # the gradient once more, seen through its few largest elements: too few to compare by
        pairs = [(fused[name], alone[name]) for fused, alone in errors if name in fused]
        got = _pooled(pair[0] for pair in pairs)
        allowed = MAX_ERROR_RATIO * max(_pooled(pair[1] for pair in pairs), floor)
        if not got <= allowed:
            found.append(f"{name}: error {got:.2e}, expected at most {allowed:.2e}")
    assert not found, "\n".join(found)


# ---- dropout -----------------------------------------------------------------------------------------


def members_of(
    workload: Workload,
    numbers: Sequence[int],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    weights: int = 0,
    optimizer: MakeOptimizer = adamw,
) -> list[tm.Member]:
    """Members by number: each number stands for weights, hyper-parameters, a name and a seed.

    ``weights`` shifts the initial weights alone, for members that are to be restored.
    """
    members = []
    for number in numbers:
        model = workload.build(number + weights).to(device, dtype).train()
        member = tm.Member(model, optimizer(model, number), name=f"m{number}", seed=1000 + number)
        members.append(member)
    return members


def check_dropout(workload: Workload, checkpoint: Path, *, device: str = "cpu", num_steps: int = 5) -> None:
    """A member trains the same at width 1, 2 and 5, in three slots, and after save and restore."""
    batches = batches_of(workload, num_steps, device=device)

    def fleet_of(numbers: Sequence[int], weights: int = 0) -> tm.Fleet:
        members = members_of(workload, numbers, device=device, weights=weights)
        return tm.Fleet(members, workload.loss, batches[0], device=device, precision="fp64", lowering="aten")

    def assert_same(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
        for outcome in expected:
            outcome.largest_gradients = _gradient_sizes(outcome)
        assert_equivalent(actual, expected, 1e-12, looser=LOOSER.get(workload.name))

    (alone,) = train_fused(fleet_of([3]), batches)
    _, pair = train_fused(fleet_of([1, 3]), batches)
    assert_same([pair], [alone])

    fleet = fleet_of([0, 1, 2, 3, 4])
    early = train_fused(fleet, batches[:2])
    fleet.save(checkpoint)
    late = train_fused(fleet, batches[2:])
    five = Outcome(late[3].tensors, early[3].losses + late[3].losses, early[3].metrics + late[3].metrics)
    assert_same([five], [alone])

    order = [3, 4, 0, 2, 1]
    again = fleet_of(order, weights=50)
    again.restore(checkpoint)
    assert_same(train_fused(again, batches[2:]), [late[number] for number in order])


def _gradient_sizes(outcome: Outcome) -> dict[str, Tensor]:
    """About how large each element's gradients were, from Adam's second moments."""
    suffix = "/exp_avg_sq"
    moments = {name: value for name, value in outcome.tensors.items() if name.endswith(suffix)}
    return {name.removesuffix(suffix): value.sqrt() for name, value in moments.items()}


class MaskProbe(nn.Module):
    """Two dropouts over ones, shown as metrics, beside a weight to train."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones_like(x)
        return F.dropout(ones, 0.25, self.training), F.dropout(ones, 0.5, self.training)


def masks_as_metrics(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss for ``MaskProbe``: it does not depend on the masks, which come as metrics."""
    first, second = model(batch)
    return (model.weight * batch).square().mean(), {"first": first, "second": second}


def drawn_masks(
    names_and_seeds: Mapping[str, int | None], num_steps: int = 3, *, device: str = "cpu"
) -> dict[str, list[Tensor]]:
    """For each member the two masks of each step, stacked, as they were drawn (on the CPU)."""
    batch = torch.ones(64, 5, device=device)
    members = []
    for name, seed in names_and_seeds.items():
        model = MaskProbe().to(device)
        members.append(tm.Member(model, torch.optim.SGD(model.parameters(), lr=1e-3), name=name, seed=seed))
    fleet = tm.Fleet(members, masks_as_metrics, batch, device=device, lowering="aten")
    found: dict[str, list[Tensor]] = {name: [] for name in names_and_seeds}
    for _ in range(num_steps):
        fleet.step(batch)
        for row, name in enumerate(fleet.names):
            masks = [fleet.metrics[key][row] for key in ("first", "second")]
            found[name].append(torch.stack(masks).cpu())
    return found


# ---- independence of the other members ---------------------------------------------------------------


def check_bits(
    workload: Workload,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    deterministic: bool = False,
    others: bool = True,
    num_steps: int = 5,
) -> None:
    """The same fleet twice gives the same bits; whatever the others are, one member's bits stay the same.

    The latter is left out without ``others``: one changes its weights, hyper-parameters and seed, one has
    NaNs among its weights, and one a learning rate that makes it overflow.
    """
    batches = [batch_to(workload.batch(100 + step, torch.float32), device) for step in range(num_steps)]

    def train(members: list[tm.Member]) -> tuple[tm.Fleet, list[Outcome]]:
        fleet = tm.Fleet(
            members,
            workload.loss,
            batches[0],
            device=device,
            precision=precision,
            deterministic=deterministic,
            lowering="aten",
        )
        return fleet, train_fused(fleet, batches)

    def members(*numbers: int) -> list[tm.Member]:
        return members_of(workload, numbers, device=device, dtype=torch.float32)

    fleet, first = train(members(0, 1, 2, 3))
    _, second = train(members(0, 1, 2, 3))
    for one, other in zip(first, second, strict=True):
        assert_same_bits(one, other)
    assert fleet.stopped() == {}
    if not others:
        return

    changed = members(7, 1, 8, 9)
    with torch.no_grad():
        next(changed[2].model.parameters()).fill_(float("nan"))
    changed[3].optimizer.param_groups[0]["lr"] = 1e30
    fleet, beside_others = train(changed)
    assert set(fleet.stopped()) == {"m8", "m9"}
    assert_same_bits(beside_others[1], first[1])
