"""``python -m benchmarks zoo``: public and classic architectures as fleets, compared with plain torch.

For each model: is it one fused group, is its step captured as a CUDA graph, are losses and updates in double
precision those of plain torch, does it train in bf16, and how long do tracing and fusing take.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatch
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import trainmux as tm
from trainmux.errors import TrainmuxError

from .cases import map_tensors, scaled, split
from .environment import choose_device, describe
from .pages import fill, source
from .processes import all_isolated, isolated
from .records import Results, name_of
from .records import read as read_results
from .resumable import LATE_SECONDS
from .workloads.classic import CLASSIC
from .workloads.public import ARCHITECTURES, REMEDIES, Architecture

NUM_STEPS = 3
"""Steps that are compared: longer, and rounding errors grow by themselves."""
OPTIMIZERS: tuple[tuple[str, Callable[..., torch.optim.Optimizer], dict[str, float]], ...] = (
    ("SGD", torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    ("AdamW", torch.optim.AdamW, {"lr": 1e-4}),
    ("RMSprop", torch.optim.RMSprop, {"lr": 1e-4}),
)
"""In rotation; from one member to the next the learning rate doubles."""
TOLERANCES = {"double": (1e-10, 1e-6), "single": (1e-5, 1e-2)}
"""Relative errors of losses and of updates that are rounding: of models that compute in double precision
throughout, and of those that cast to single precision whatever they are given."""

MAX_TIMES_ROUNDING = 10.0
"""Errors may be this many times what it makes to change weights by the last bit of the precision it computes
in: where a model divides by next to nothing, or chooses among equals, rounding is not small."""

VERDICTS = ("right", "wrong", "not fused", "not captured", "refused", "failed", "absent")

ZOO: tuple[Architecture, ...] = (
    *(Architecture(f"classic:{name}", "classic", build) for name, build in CLASSIC.items()),
    *ARCHITECTURES,
)


def find(patterns: Sequence[str]) -> list[Architecture]:
    """The architectures of which a name, with ``*`` for any text, is among ``patterns``."""
    found = [each for each in ZOO if any(fnmatch(each.name, pattern) for pattern in patterns)]
    if not found:
        raise typer.BadParameter(f"expected names like {ZOO[0].name} or timm:*, got {', '.join(patterns)}")
    return found


def measure(name: str, width: int, device: str) -> dict[str, Any]:
    """Train as a fleet and one by one from the same weights, and compare.

    A refusal is in the result, and where there is a remedy for it, what came of the remedy.
    """
    number, architecture = next((n, each) for n, each in enumerate(ZOO) if each.name == name)
    optimizer = number % len(OPTIMIZERS)
    row = {"family": architecture.family, "optimizer": OPTIMIZERS[optimizer][0]}
    try:
        with _installed():
            torch.manual_seed(0)
            model, loss, batch = architecture.build()
    except _MissingError as error:
        return {**row, "verdict": "absent", "message": str(error)}
    found = _judged(model.train(), loss, batch, optimizer, width, torch.device(device))
    if found["verdict"] in ("refused", "not captured") and name in REMEDIES:
        text, build = REMEDIES[name]
        torch.manual_seed(0)
        remedied = _judged(*build(), optimizer, width, torch.device(device))
        found |= {"remedy": text, "with_remedy": remedied["verdict"]}
    elif found["verdict"] == "refused" and "-O" in found["message"] and __debug__:
        found |= {"remedy": "python -O", "with_remedy": _without_assertions(name, width, device)}
    return {**row, **found}


def _without_assertions(name: str, width: int, device: str) -> str:
    """The verdict under Python's -O."""
    code = f"import json, benchmarks.zoo as z; print(json.dumps(z.measure({name!r}, {width}, {device!r})))"
    done = subprocess.run([sys.executable, "-O", "-W", "ignore", "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        return "failed"
    return str(json.loads(done.stdout.splitlines()[-1])["verdict"])


class _MissingError(Exception):
    """A library, or a model of it, is not installed."""


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except (ImportError, KeyError) as error:
        raise _MissingError(f"{type(error).__name__}: {error}") from error
    except RuntimeError as error:
        if "nknown model" not in str(error):
            raise
        raise _MissingError(str(error)) from error


def _judged(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: Any,
    optimizer: int,
    width: int,
    device: torch.device,
) -> dict[str, Any]:
    models = [scaled(model, number) for number in range(width)]
    row: dict[str, Any] = {"num_parameters": sum(parameter.numel() for parameter in model.parameters())}
    try:
        row |= _compared(models, loss, batch, optimizer, device)
        row |= _trained_in_bf16(models, loss, batch, optimizer, device)
    except TrainmuxError as error:
        lines = str(error).strip().splitlines()
        return {**row, "verdict": "refused", "refusal": type(error).__name__, "message": lines[0]}
    if not _is_close(row, row["loss_error"], row["update_error"]):
        verdict = "wrong"
        row["message"] = f"loss error {row['loss_error']:.2g}, update error {row['update_error']:.2g}"
    elif row["num_groups"] > 1 or row["unfused_because"]:
        verdict = "not fused"
    elif row["not_captured"]:
        verdict = "not captured"
    else:
        verdict = "right"
    return {**row, "verdict": verdict}


def _is_close(row: Mapping[str, Any], *errors: float) -> bool:
    """Whether the errors of losses and of updates are rounding."""
    limits, floors = TOLERANCES[row["computes_in"]], row.get("rounding", (0.0, 0.0))
    return all(
        error <= max(limit, MAX_TIMES_ROUNDING * floor)
        for error, limit, floor in zip(errors, limits, floors, strict=True)
    )


def _compared(
    models: Sequence[nn.Module], loss: Callable[..., Tensor], batch: Any, optimizer: int, device: torch.device
) -> dict[str, Any]:
    """Steps of a fleet and of plain torch on the same batch: in double precision, if plain torch can.

    Experts multiply by ``batched_mm`` in double precision: torch's grouped product has none.
    """
    double = [copy.deepcopy(model).double() for model in models]
    each: Any
    for each in double:
        if getattr(getattr(each, "config", None), "_experts_implementation", "") == "grouped_mm":
            each.set_experts_implementation("batched_mm")
    dtype, precision, begin, dtypes = torch.float64, "fp64", double, _Dtypes()

    def plain(begin: Sequence[nn.Module]) -> tuple[list[nn.Module], list[Tensor]]:
        return _trained_alone(begin, loss, _placed(batch, device, dtype), optimizer, device)

    try:
        with dtypes:
            alone, theirs = plain(begin)
        if not torch.stack(theirs).isfinite().all():
            raise ArithmeticError("plain torch is not finite in double precision")
    except (RuntimeError, ArithmeticError):
        dtype, precision, begin, dtypes.has_single = torch.float32, "fp32", list(models), True
        alone, theirs = plain(begin)
    given = _placed(batch, device, dtype)
    members = [
        tm.Member(own := copy.deepcopy(model), _optimizer(own, optimizer, number))
        for number, model in enumerate(begin)
    ]
    started = time.perf_counter()
    fleet = tm.Fleet(members, loss, given, device=device, precision=precision, lowering="aten")
    ours = [fleet.step(given).clone()]
    build_s = time.perf_counter() - started
    ours += [fleet.step(given).clone() for _ in range(NUM_STEPS - 1)]
    fleet.sync()
    groups = fleet.summary()
    row: dict[str, Any] = {
        "num_groups": len(groups),
        "unfused_because": groups[0].unfused_because,
        "is_captured": all(group.memory is not None for group in groups) if device.type == "cuda" else None,
        "not_captured": groups[0].not_captured,
        "num_nodes": groups[0].num_nodes,
        "computes_in": "single" if dtypes.has_single else "double",
        "loss_error": max(map(_error, ours, theirs)),
        "update_error": _update_error(begin, alone, [member.model for member in members]),
        "build_s": round(build_s, 2),
    }
    if not _is_close(row, row["loss_error"], row["update_error"]):
        eps = torch.finfo(torch.float32 if dtypes.has_single else torch.float64).eps
        again, losses = plain([_nudged(model, eps) for model in begin])
        row["rounding"] = max(map(_error, losses, theirs)), _update_error(begin, alone, again)
    return row


def _nudged(model: nn.Module, eps: float) -> nn.Module:
    """A copy whose weights are off by so much of themselves, up or down."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                signs = torch.randint(0, 2, parameter.shape) * 2 - 1
                parameter.mul_(1 + eps * signs.to(parameter.dtype))
    return copied


def _placed(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    return map_tensors(lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype), batch)


def _trained_alone(
    models: Sequence[nn.Module], loss: Callable[..., Tensor], batch: Any, optimizer: int, device: torch.device
) -> tuple[list[nn.Module], list[Tensor]]:
    """Models after a few steps of plain torch, one by one, and their losses by step."""
    alone = [copy.deepcopy(model).to(device) for model in models]
    optimizers = [_optimizer(model, optimizer, number) for number, model in enumerate(alone)]
    found = []
    for _ in range(NUM_STEPS):
        losses = []
        for model, updates in zip(alone, optimizers, strict=True):
            updates.zero_grad()
            value = loss(model, batch)
            value.backward()
            updates.step()
            losses.append(value.detach().double())
        found.append(torch.stack(losses))
    return alone, found


def _trained_in_bf16(
    models: Sequence[nn.Module], loss: Callable[..., Tensor], batch: Any, optimizer: int, device: torch.device
) -> dict[str, Any]:
    """A step in bf16: seconds until it is done, or that plain torch fails in bf16, too."""
    batch = map_tensors(lambda tensor: tensor.to(device), batch)
    try:
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(copy.deepcopy(models[0]).to(device), batch)
        value.backward()
    except RuntimeError as error:
        return {"bf16": f"plain torch fails, too: {str(error).splitlines()[0][:100]}"}
    started = time.perf_counter()
    members = [tm.Member(each, _optimizer(each, optimizer, number)) for number, each in enumerate(models)]
    fleet = tm.Fleet(members, loss, batch, device=device, precision="bf16", lowering="aten")
    losses = fleet.step(batch)
    if not losses.isfinite().all() and value.isfinite():
        raise ArithmeticError(f"losses in bf16 are {losses.tolist()}")
    found: dict[str, Any] = {"bf16_s": round(time.perf_counter() - started, 2)}
    because = fleet.summary()[0].not_captured
    return {**found, "not_captured": because} if because else found


def _optimizer(model: nn.Module, kind: int, number: int) -> torch.optim.Optimizer:
    _, make, settings = OPTIMIZERS[kind]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return make(parameters, **{**settings, "lr": settings["lr"] * 2**number})


def _error(ours: Tensor, theirs: Tensor) -> float:
    scale = theirs.abs().clamp_min(1e-12)
    return float(((ours.double() - theirs).abs() / scale).max())


def _update_error(
    begin: Sequence[nn.Module], alone: Sequence[nn.Module], fused: Sequence[nn.Module]
) -> float:
    """How far the updates of all parameters are apart, relative to their size; the worst member."""
    errors = []
    for before, theirs, ours in zip(begin, alone, fused, strict=True):
        apart = moved = torch.zeros((), dtype=torch.float64)
        for start, their, our in zip(
            before.parameters(), theirs.parameters(), ours.parameters(), strict=True
        ):
            apart = apart + (our.detach().cpu() - their.detach().cpu()).square().sum()
            moved = moved + (their.detach().cpu() - start.detach().cpu()).square().sum()
        errors.append(float((apart / moved.clamp_min(1e-300)).sqrt()))
    return max(errors)


class _Dtypes(TorchDispatchMode):
    """Notes whether numbers of single precision are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.has_single = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.float32 and result.numel() > 1:
            self.has_single = True
        return result


def refresh(document: dict[str, Any], page: Path) -> None:
    """Fill the parts of docs/zoo.md: where the results are from, tables by family and of all others.

    `ValueError` for a part that nobody can fill.
    """
    from .report import as_markdown, zoo_tables

    families, others = zoo_tables(document).values()
    parts = {
        "source": source(document["runs"]),
        "families": as_markdown(families),
        "others": as_markdown(others) if len(others) else "None.",
    }

    def part(name: str) -> str:
        if name not in parts:
            raise ValueError(f"expected a part among {', '.join(parts)}; got {name!r}")
        return parts[name]

    fill(page, "zoo", part)


def command(
    models: Annotated[str, typer.Option(help="LIBRARY:NAME, with commas; * is any text.")] = "*",
    members: Annotated[int, typer.Option(min=1, help="Models to train at once.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    processes: Annotated[int, typer.Option(min=1, help="Models to try at the same time.")] = 1,
    limit: Annotated[float, typer.Option(help="Seconds that one model may take.")] = 300.0,
    time_limit: Annotated[float, typer.Option(min=0, help="Seconds after which nothing is begun.")] = 540.0,
    out: Annotated[Path, typer.Option(help="File of results; what it has is not measured again.")] = Path(
        "runs/bench/zoo.json"
    ),
    retry: Annotated[
        str, typer.Option(help=f"Verdicts to measure again, with commas: {', '.join(VERDICTS)}.")
    ] = "",
    read: Annotated[Path | None, typer.Option(help="Measure nothing: read this file of results.")] = None,
    page: Annotated[Path | None, typer.Option(help="Page whose tables are made from the results.")] = None,
) -> None:
    """Train public architectures as fleets: are they fused, captured and right."""
    for verdict in split(retry):
        if verdict not in VERDICTS:
            raise typer.BadParameter(
                f"expected verdicts among {', '.join(VERDICTS)}; got {verdict}", param_hint="--retry"
            )
    if read is None:
        chosen = find(split(models))
        with _ended_by_sigterm():
            _measure_all(chosen, members, device, processes, limit, time_limit, out, split(retry))
    if page is not None:
        refresh(read_results(read or out, "zoo"), page)
        print(f"written to {page}")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise, as SIGINT does: then what was started is ended, too."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure_all(
    chosen: Sequence[Architecture],
    members: int,
    device: str,
    processes: int,
    limit: float,
    time_limit: float,
    out: Path,
    retry: Sequence[str],
) -> None:
    """Measure what the file lacks or what is to be measured again, until the time is over."""
    # Processes are forked from one that has torch, which must not touch the device to see that it is there.
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    get_context("forkserver").set_forkserver_preload(["benchmarks.zoo"])
    place = choose_device(device)
    results = Results(out, "zoo", isolated(describe, place, method="forkserver"))
    known = {name_of("zoo", row) for row in results.rows if row["verdict"] not in retry}
    # Images and videos, which take longest, come last in the zoo.
    left = [each for each in reversed(chosen) if (each.name, members) not in known]
    num_done, end = 0, time.monotonic() + time_limit

    def jobs() -> Iterator[tuple[tuple[Architecture, float], tuple[Any, ...], float]]:
        for each in left:
            if (seconds := end - time.monotonic()) <= 0:
                return
            limit_s = min(limit, seconds + LATE_SECONDS)
            yield (each, limit_s), (each.name, members, place), limit_s

    counts: Counter[str] = Counter()
    with closing(all_isolated(measure, jobs(), processes, method="forkserver")) as measured:
        for (each, limit_s), found in measured:
            if limit_s < limit and "no result within" in found.get("error", ""):
                print(f"{each.name}: cut off, the time is over", flush=True)
                continue
            row = {"verdict": "failed", "family": each.family, **found}
            results.add({"model": each.name, "width": members, **row})
            num_done += 1
            counts[row["verdict"]] += 1
            told = row.get("error") or row.get("message") or ""
            print(f"{num_done}/{len(left)} {each.name}: {row['verdict']} {told}"[:200], flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    print(f"{len(left) - num_done} models are left; what was measured is in {out}")
