"""Training in a fleet, under a plan and as a co-located job, compared with plain torch on any device.

Tests on the CPU and on a GPU share the members, the eager loop, the comparisons and all tolerances.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.workloads import SMALL, Workload
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import trainmux as tm

Optimizer = torch.optim.Optimizer

PLAIN = tuple(name for name in SMALL if not name.endswith("_with_dropout"))

# ---- tolerances --------------------------------------------------------------------------------------

BOUND = 1e-10
"""Largest difference of fp64 training from plain torch, as a share of a tensor's largest value."""

CLOSE = 1e-12
"""The same between two fleets of the same members."""

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

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
"""Autocast dtype of each precision below fp64."""

MAX_ERROR_RATIO = 3.0
"""Largest error of a fleet's step in a lower precision, as a multiple of the error of plain torch."""

_FLOOR = {"fp32": 2.0**-22, "bf16": 2.0**-9}
"""The rounding error of one number; below it, an individual run is exact by accident."""

_FEW = 8
"""Numbers of a bias."""

# ---- optimizers --------------------------------------------------------------------------------------

MakeOptimizer = Callable[[nn.Module, int], Optimizer]
"""Makes the optimizer of the member with this number."""


def adamw(model: nn.Module, number: int) -> Optimizer:
    """AdamW whose settings all depend on the member's number."""
    betas = (0.9 - 0.2 * (number % 5), 0.999 - 0.01 * number)
    eps, decay = 10.0 ** (number % 3 - 8), 0.05 * number
    return torch.optim.AdamW(
        model.parameters(), lr=1e-3 * (number + 1), betas=betas, eps=eps, weight_decay=decay
    )


def in_two_groups(make: MakeOptimizer) -> MakeOptimizer:
    """The same class, with the next member's settings for parameters of one dimension."""

    def optimizer(model: nn.Module, number: int) -> Optimizer:
        first, second = (make(model, (number + shift) % 3) for shift in (0, 1))
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups = [{**first.defaults, "params": matrices}, {**second.defaults, "params": vectors}]
        return type(first)(groups)

    return optimizer


# ---- batches and models ------------------------------------------------------------------------------


def map_batch(function: Callable[..., Tensor], *batches: Any) -> Any:
    """Apply ``function`` to the tensors that stand in the same place of tuples, dicts or dataclasses."""
    first = batches[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in dataclasses.fields(first)]
        parts = {name: map_batch(function, *(getattr(b, name) for b in batches)) for name in names}
        return dataclasses.replace(first, **parts)
    return pytree.tree_map(function, *batches)


def batch_to(batch: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    """The batch on a device, its floating tensors in ``dtype`` if one is given."""
    return map_batch(
        lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() and dtype is not None else leaf.dtype),
        batch,
    )


def batches_of(
    workload: Workload,
    num_steps: int,
    *,
    device: str = "cpu",
    seed: int = 100,
    dtype: torch.dtype = torch.float64,
) -> list[Any]:
    """A fresh batch for each step."""
    return [batch_to(workload.batch(seed + step, dtype), device) for step in range(num_steps)]


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
        # transformers hands its models out in evaluation mode.
        model = workload.build(number + weights).to(device, dtype).train()
        member = tm.Member(model, optimizer(model, number), name=f"m{number}", seed=1000 + number)
        members.append(member)
    return members


def clone(model: nn.Module) -> nn.Module:
    """A copy that runs as the original does."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN warns about copies, which are not in one piece
    return twin


# ---- results of a run --------------------------------------------------------------------------------


@dataclass
class Outcome:
    """A member after training.

    ``tensors`` has every parameter, buffer (by name) and optimizer state (``name/state``); ``results`` the
    loss and the metrics of each step (``loss 1``); ``largest_gradients`` each parameter's gradient, element
    by element the largest absolute value over all steps, where that was recorded.
    """

    tensors: dict[str, Tensor]
    results: dict[str, Tensor] = field(default_factory=dict)
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


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of all parameters, buffers and optimizer state."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.detach().clone()
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                found[f"{name}/{key}"] = torch.as_tensor(value).detach().clone()
    return found | {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def train_member(
    member: tm.Member,
    batches: Iterable[Any],
    loss: Callable[..., Any],
    *,
    accumulate: int = 1,
    first: int = 1,
    autocast: torch.dtype | None = None,
) -> Outcome:
    """Train a member's own objects in plain eager torch, with its clipping and its schedule.

    ``first`` is the number of the first batch: the last of every ``accumulate`` batches makes an update.
    """
    outcome = Outcome({})
    largest, model = outcome.largest_gradients, member.model
    device, loss = next(model.parameters()).device.type, member.loss or loss
    for number, batch in enumerate(batches, first):
        with torch.autocast(device, autocast) if autocast is not None else nullcontext():
            result = loss(model, batch)
        value, metrics = result if isinstance(result, tuple) else (result, {})
        (value / accumulate).backward()
        given = {"loss": value, **metrics}
        outcome.results |= {f"{name} {number}": item.detach() for name, item in given.items()}
        if number % accumulate:
            continue
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and parameter.grad.numel():
                size = parameter.grad.abs()
                largest[name] = torch.maximum(largest[name], size) if name in largest else size
                parameter.grad = parameter.grad.clone()  # torch may give two parameters one gradient
        if member.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), member.clip_norm)
        if member.clip_value is not None:
            nn.utils.clip_grad_value_(model.parameters(), member.clip_value)
        member.optimizer.step()
        model.zero_grad()
        if member.scheduler is not None and not member.steps_by_epoch:
            member.scheduler.step()
    outcome.tensors = snapshot(model, member.optimizer)
    return outcome


def train_alone(
    model: nn.Module, optimizer: Optimizer, loss: Callable[..., Any], batches: Iterable[Any], **options: Any
) -> Outcome:
    """Train one model in plain eager torch."""
    return train_member(tm.Member(model, optimizer), batches, loss, **options)


def outcomes(fleet: tm.Fleet, steps: Iterable[tuple[dict[str, Any], int]]) -> list[Outcome]:
    """An outcome for each member in the order of its names, with the results of all steps, by number."""
    fleet.sync()
    found = [Outcome(snapshot(member.model, member.optimizer)) for member in fleet.members]
    for given, number in steps:
        for name, rows in given.items():
            for outcome, value in zip(found, rows, strict=True):
                outcome.results[f"{name} {number}"] = value
    return found


def train_fused(fleet: tm.Fleet, batches: Iterable[Any]) -> list[Outcome]:
    """Train a fleet as it is, with its plan if it has one."""
    return outcomes(
        fleet, [({"loss": fleet.step(batch), **fleet.metrics}, fleet.num_steps) for batch in batches]
    )


def _is_on_gpu(fleet: tm.Fleet) -> bool:
    return next(fleet.members[0].model.parameters()).is_cuda


def _train_planned(fleet: tm.Fleet, batches: Sequence[Any]) -> list[Outcome]:
    # On a CPU for a named device: measuring takes longer, and may have another result each time.
    device = None if _is_on_gpu(fleet) else "a100-40gb"
    fleet.use(fleet.plan(policy="mutwo", device=device, max_partitions=3))
    return train_fused(fleet, batches)


def _train_job(fleet: tm.Fleet, batches: Sequence[Any]) -> list[Outcome]:
    """As a job beside another one, cut into small segments."""
    model = nn.Linear(4, 4)
    other = tm.Job(
        "other",
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        loader=[torch.ones(2, 4)],
        steps=len(batches),
        device="cuda" if _is_on_gpu(fleet) else "cpu",
    )
    job = tm.Job("fleet", fleet=fleet, loader=batches, steps=len(batches))
    budget = "20GiB" if _is_on_gpu(fleet) else "4GiB"
    result = tm.colocate([job, other], budget, tracking_bytes=2048).run()
    assert [repr(each.error) for each in result.jobs.values() if each.error] == []
    return outcomes(fleet, (({"loss": row}, step) for step, row in enumerate(result["fleet"].losses, 1)))


WAYS: dict[str, Callable[[tm.Fleet, Sequence[Any]], list[Outcome]]] = {
    "fleet": train_fused,
    "planned": _train_planned,
    "job": _train_job,
}

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
    actual: Outcome, expected: Outcome, bound: float, looser: Mapping[str, float]
) -> Iterator[str]:
    """What is further apart than ``bound``, in words.

    ``looser`` has tensors with a bound of their own. Elements that only rounding errors moved are held to
    ``DRIFT``, an absolute bound.
    """
    found, all_wanted = (each.tensors | each.results for each in (actual, expected))
    one_sided = (all_wanted.keys() - found) | (actual.tensors.keys() - expected.tensors)
    if one_sided:
        yield f"only on one side: {sorted(one_sided)}"
    for name in all_wanted.keys() - one_sided:
        got, wanted = found[name], all_wanted[name]
        allowed = looser.get(name, bound)
        drifts = expected.driven_by_rounding(name)
        off = distance(got, wanted, drifts)
        if not off <= allowed:
            yield f"{name}: {off:.2e} of its largest value, expected at most {allowed:.0e}"
        if drifts is not None and drifts.any():
            drift = (got - wanted).abs()[drifts].amax().item()
            if not drift <= DRIFT:
                yield f"{name}: {drift:.2e} apart without a gradient, expected at most {DRIFT:.0e}"


def assert_equivalent(
    actual: Sequence[Outcome],
    expected: Sequence[Outcome],
    bound: float = BOUND,
    *,
    looser: Mapping[str, float] | None = None,
) -> None:
    """Every member within ``bound``; the message names all tensors that are not."""
    assert len(actual) == len(expected)
    found = [
        f"member {row}: {text}"
        for row, (got, wanted) in enumerate(zip(actual, expected, strict=True))
        for text in differences(got, wanted, bound, looser or {})
    ]
    assert not found, "\n".join(found)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, the sign of zero and NaN included."""
    one, other = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(one, other)


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Tensors by name are bitwise the same."""
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    assert not [name for name in expected if not same_bits(got[name], expected[name])]


def assert_same_bits(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """Bitwise equal in every tensor, loss and metric."""
    for one, other in zip(actual, expected, strict=True):
        assert_same(one.tensors | one.results, other.tensors | other.results)


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


def check(
    workload: Workload,
    *,
    way: str = "fleet",
    optimizer: MakeOptimizer = adamw,
    settings: Callable[[tm.Member, int], object] = lambda member, number: None,
    num_members: int = 3,
    num_steps: int = 5,
    plain_steps: int = 0,
    device: str = "cpu",
    data: str = "shared",
    **options: Any,
) -> tm.Fleet:
    """Train members one by one and fused, in fp64 on the same batches, and compare everything.

    ``settings`` changes each member before it trains. With ``plain_steps``, member ``i`` has trained ``i``
    times that many steps in plain torch before, and all train so many afterwards. Returns the fleet.
    """
    numbers = range(num_members)
    seeds = [1000 * number if data == "per_member" else 100 for number in numbers]
    batches = [batches_of(workload, num_steps, device=device, seed=seed) for seed in seeds]
    around = batches_of(workload, num_members * plain_steps, device=device, seed=50)

    def with_a_history() -> list[tm.Member]:
        members = members_of(workload, numbers, device=device, optimizer=optimizer)
        for number, member in enumerate(members):
            settings(member, number)
            train_member(member, around[: number * plain_steps], workload.loss)
        return members

    plain, members = with_a_history(), with_a_history()
    accumulate = options.get("accumulate", 1)
    alone = [
        train_member(member, own, workload.loss, accumulate=accumulate)
        for member, own in zip(plain, batches, strict=True)
    ]
    fed = batches[0]
    if data == "per_member":
        fed = [map_batch(lambda *leaves: torch.stack(leaves), *rows) for rows in zip(*batches, strict=True)]
    options = {"device": device, "precision": "fp64", "data": data, "lowering": "aten", **options}
    fleet = tm.Fleet(members, workload.loss, fed[0], **options)
    assert [len(group.members) for group in fleet.summary()] == [num_members], "expected one fused group"
    looser = LOOSER.get(workload.name)
    if way == "job":  # which reports losses alone
        for outcome in alone:
            losses = [name for name in outcome.results if name.startswith("loss ")]
            outcome.results = {name: outcome.results[name] for name in losses}
    assert_equivalent(WAYS[way](fleet, fed), alone, looser=looser)
    assert fleet.stopped() == {}
    if plain_steps:
        after, expected = (
            [train_member(member, around[:plain_steps], workload.loss) for member in each]
            for each in (members, plain)
        )
        assert_equivalent(after, expected, looser=looser)
    return fleet


def check_precision(workload: Workload, precision: str, *, device: str = "cpu") -> None:
    """Loss, gradients and buffers of a step: errors against fp64 at most three times those of plain torch.

    Taken from three points of a trajectory, the members of one fleet; a tensor's errors are pooled over them.
    """
    batch = batch_to(workload.batch(77, torch.float32), device)

    def optimizer(model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)  # whose buffer is the gradient

    def step(model: nn.Module, batch: Any, **options: Any) -> Outcome:
        return train_alone(model, optimizer(model), workload.loss, [batch], **options)

    points = []
    for num_steps in (0, 4, 8):
        model = workload.build(0).double().to(device).train()
        train_alone(model, adamw(model, 0), workload.loss, batches_of(workload, num_steps, device=device))
        points.append(clone(model).float())
    members = [tm.Member(twin, optimizer(twin)) for twin in map(clone, points)]
    errors: dict[str, list[list[float]]] = {}
    with full_precision():
        fleet = tm.Fleet(members, workload.loss, batch, device=device, precision=precision, lowering="aten")
        for model, fused in zip(points, train_fused(fleet, [batch]), strict=True):
            exact = step(clone(model).double(), batch_to(batch, device, torch.float64))
            alone = step(clone(model), batch, autocast=PRECISIONS[precision])
            for name, pair in _errors(exact, fused, alone).items():
                errors.setdefault(name, []).append(pair)
    found = []
    for name, pairs in sorted(errors.items()):
        got, plain = (sum(error * error for error in each) ** 0.5 for each in zip(*pairs, strict=True))
        allowed = MAX_ERROR_RATIO * max(plain, _FLOOR[precision] * len(pairs) ** 0.5)
        if not got <= allowed:
            found.append(f"{name}: error {got:.2e}, expected at most {allowed:.2e}")
    assert not found, "\n".join(found)


def _errors(exact: Outcome, *runs: Outcome) -> dict[str, list[float]]:
    """By tensor the root mean square error of each run, as a share of the tensor's size.

    A bias of a few numbers counts with its layer's weight, and as much. The weight's gradient has the
    errors of the same backward pass, whose sum over the batch may cancel out in the bias by accident.
    """
    shares: dict[str, list[list[float]]] = {}
    for name, value in {"loss 1": exact.results["loss 1"], **exact.tensors}.items():
        largest = exact.largest_gradients.get(name.partition("/")[0])
        if name in exact.largest_gradients or not value.is_floating_point():
            continue  # parameters: the update is rounded as plain torch rounds it
        counted = torch.ones_like(value, dtype=torch.bool) if largest is None else largest >= NO_GRADIENT
        size = _rms(value[counted])
        if size > 0.0:
            weight = name.replace(".bias/", ".weight/")
            key = weight if value.numel() < _FEW and weight in exact.tensors else name
            for found, run in zip(shares.setdefault(key, [[] for _ in runs]), runs, strict=True):
                result = (run.results | run.tensors)[name]
                found.append(_rms((result.double() - value)[counted]) / size)
    return {
        name: [_rms(torch.tensor(each, dtype=torch.float64)) for each in found]
        for name, found in shares.items()
    }


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item() if values.numel() else 0.0


def check_dropout(workload: Workload, checkpoint: Path, *, device: str = "cpu", num_steps: int = 4) -> None:
    """A member trains the same alone, with others, and restored in other slots and sub-arrays."""
    batches = batches_of(workload, num_steps, device=device)

    def fleet_of(numbers: Sequence[int], weights: int = 0, width: int | None = None) -> tm.Fleet:
        members = members_of(workload, numbers, device=device, weights=weights)
        options = {"device": device, "precision": "fp64", "lowering": "aten", "width": width}
        return tm.Fleet(members, workload.loss, batches[0], **options)

    def assert_same(actual: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
        suffix = "/exp_avg_sq"
        for outcome in expected:  # about how large each element's gradients were, from Adam's moments
            moments = {name: value for name, value in outcome.tensors.items() if name.endswith(suffix)}
            outcome.largest_gradients = {n.removesuffix(suffix): v.sqrt() for n, v in moments.items()}
        assert_equivalent(actual, expected, CLOSE, looser=LOOSER.get(workload.name))

    (alone,) = train_fused(fleet_of([3]), batches)
    fleet = fleet_of([0, 1, 2, 3])
    early = train_fused(fleet, batches[:2])
    fleet.save(checkpoint)
    late = train_fused(fleet, batches[2:])
    assert_same([Outcome(late[3].tensors, early[3].results | late[3].results)], [alone])
    order = [3, 0, 2, 1]
    again = fleet_of(order, weights=50, width=2)
    again.restore(checkpoint)
    assert_same(train_fused(again, batches[2:]), [late[number] for number in order])


def masks_as_metrics(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that does not depend on the masks of two dropouts over ones, which come as metrics."""
    rates, ones = {"first": 0.25, "second": 0.5}, torch.ones_like(batch)
    masks = {name: F.dropout(ones, rate, model.training) for name, rate in rates.items()}
    return model(batch).square().mean(), masks


def mask_fleet(names_and_seeds: Mapping[str, int | None], device: str = "cpu") -> tm.Fleet:
    """Layers that are shown masks as one fleet, for batches of 64 rows."""
    members = []
    for name, seed in names_and_seeds.items():
        model = nn.Linear(5, 1).to(device)
        members.append(tm.Member(model, torch.optim.SGD(model.parameters(), lr=1e-3), name=name, seed=seed))
    return tm.Fleet(members, masks_as_metrics, torch.ones(64, 5), device=device, lowering="aten")


def drawn_masks(fleet: tm.Fleet, num_steps: int = 3) -> dict[str, list[Tensor]]:
    """For each member the two masks of each step, stacked, as they were drawn (on the CPU)."""
    found: dict[str, list[Tensor]] = {name: [] for name in fleet.names}
    for _ in range(num_steps):
        fleet.step(torch.ones(64, 5))
        for row, name in enumerate(fleet.names):
            masks = [fleet.metrics[key][row] for key in ("first", "second")]
            found[name].append(torch.stack(masks).cpu())
    return found


def check_bits(
    workload: Workload,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    deterministic: bool = False,
    others: bool = True,
) -> None:
    """The same fleet twice gives the same bits; whatever the others are, one member's bits stay the same.

    The latter is left out without ``others``: one changes its weights, hyper-parameters and seed, one has
    NaNs among its weights, and one a learning rate that makes it overflow.
    """
    batches = batches_of(workload, 4, device=device, dtype=torch.float32)
    options = {"device": device, "precision": precision, "deterministic": deterministic, "lowering": "aten"}

    def members(*numbers: int) -> list[tm.Member]:
        return members_of(workload, numbers, device=device, dtype=torch.float32)

    fleets = [tm.Fleet(members(0, 1, 2, 3), workload.loss, batches[0], **options) for _ in range(2)]
    first, second = (train_fused(fleet, batches) for fleet in fleets)
    assert_same_bits(first, second)
    assert fleets[0].stopped() == {}
    if not others:
        return
    changed = members(7, 1, 8, 9)
    with torch.no_grad():
        next(changed[2].model.parameters()).fill_(float("nan"))
    changed[3].optimizer.param_groups[0]["lr"] = 1e30
    fleet = tm.Fleet(changed, workload.loss, batches[0], **options)
    beside_others = train_fused(fleet, batches)
    assert set(fleet.stopped()) == {"m8", "m9"}
    assert_same_bits(beside_others[1:2], first[1:2])
