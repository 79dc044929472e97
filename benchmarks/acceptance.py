"""What a fleet of full size must hold on a GPU besides its speed: start, replacement, memory, loading, bits.

    python benchmarks/acceptance.py --out acceptance.json

Each check runs in processes of its own, because a start is part of what is measured. ``cold`` compiles into
an empty cache, ``warm`` starts the same fleet again from it. Needs a CUDA device; small:NAME workloads try it
out without one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

AFTER = "ACCEPTANCE_AFTER"
NUM_MEMBERS = 8
NUM_REPLACEMENTS = 5
LOADER_STEPS = 120
LOADER_WORKERS = 4
FLAT_STEPS = 2000
FLAT_FROM = 200
DETERMINISTIC = ("transformer_with_dropout", "bottleneck", "lstm_with_dropout")


def find(name: str) -> tuple[Callable[[int, int], Any], Callable[[Any, Any], Any], Callable[[int], Any]]:
    """How to make so many models from a number on, their loss, and batches by seed."""
    from benchmarks.bench.cases import find_case

    case = find_case(name)
    return case.models, case.loss, lambda seed: case.batch(seed, case.batch_sizes[0])


def make_members(name: str, count: int, first: int = 0) -> list[Any]:
    import torch

    import trainmux as tm

    members = []
    for number, model in enumerate(find(name)[0](count, first), first):
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4 * (1 + number / NUM_MEMBERS))
        members.append(tm.Member(model, optimizer, name=f"member {number}", seed=number))
    return members


def begun(name: str, *, lowering: str) -> tuple[Any, dict[str, Any]]:
    """A fleet after its first step, and how long it took from imported torch: without building the models,
    which is the user's, and with importing trainmux.
    """
    import torch

    begin = time.perf_counter()
    import trainmux as tm

    import_seconds = time.perf_counter() - begin
    make_models, loss, batch = find(name)
    models = [model.train() for model in make_models(NUM_MEMBERS, 0)]
    first = batch(0)
    wait_for_turn()
    begin = time.perf_counter()
    members = [
        tm.Member(model, torch.optim.AdamW(model.parameters(), lr=1e-4), name=f"member {seed}", seed=seed)
        for seed, model in enumerate(models)
    ]
    precision = "bf16" if device() == "cuda" else "fp32"
    fleet = tm.Fleet(members, loss, first, device=device(), precision=precision, lowering=lowering)
    fleet_seconds = time.perf_counter() - begin
    fleet.step(first)
    synchronize()
    seconds = import_seconds + time.perf_counter() - begin
    return fleet, {
        "first_step_seconds": seconds,
        "of_which_importing_trainmux_seconds": import_seconds,
        "of_which_fleet_seconds": fleet_seconds,
    }


def wait_for_turn() -> None:
    """Where ``--after`` names a file: until it is there. Models are built while others use the device."""
    after = os.environ.get(AFTER, "")
    while after and not Path(after).exists():
        time.sleep(0.05)


def make_fleet(name: str, num_members: int = NUM_MEMBERS, **options: Any) -> Any:
    import trainmux as tm

    _, loss, batch = find(name)
    members = make_members(name, num_members)
    wait_for_turn()
    return tm.Fleet(members, loss, batch(0), device=device(), **options)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reserved() -> dict[str, int]:
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"reserved_bytes": torch.cuda.memory_reserved(), "taken_bytes": total - free}


def milliseconds(step: Callable[[], Any], num_steps: int) -> list[float]:
    """Wall-clock time of each of some blocks of steps, per step, queue drained before and after."""
    blocks = []
    for _ in range(5):
        synchronize()
        begin = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        blocks.append((time.perf_counter() - begin) / num_steps * 1e3)
    return blocks


# ---- checks: each prints one JSON object on its last line ------------------------------------------------


def start(name: str, *, lowering: str = "inductor") -> dict[str, Any]:
    """From imported torch to the end of the first step, replacement of a member, predicted memory."""
    import torch

    fleet, result = begun(name, lowering=lowering)
    batch = find(name)[2]
    memory = fleet.summary()[0].memory
    result |= {
        "predicted_bytes": memory and memory.predicted_bytes,
        "reserved_after_capture_bytes": memory and memory.reserved_bytes,
    }
    batches = [batch(seed) for seed in range(4)]
    if device() == "cuda":
        batches = [_map(lambda tensor: tensor.cuda(), one) for one in batches]
    for one in batches:
        fleet.step(one)
    synchronize()
    result |= reserved()
    programs = captures(fleet)
    # "host for device": a member whose own tensors are on the host makes way for one on the device.
    kinds = ["host for device", *["device for device"] * NUM_REPLACEMENTS, "device for host", "host for host"]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, newcomer in zip(kinds, make_members(name, len(kinds), 100), strict=True):
        if device() == "cuda" and kind.endswith("for device"):
            newcomer.model.cuda()
        synchronize()
        begin = time.perf_counter()
        fleet.replace(fleet.names[0], newcomer)
        synchronize()
        times[kind].append((time.perf_counter() - begin) * 1e3)
        fleet.step(batches[0])
    result["replace_ms"] = {kind: statistics.median(found) for kind, found in times.items()}
    losses = fleet.step(batches[1])
    synchronize()
    result["captures_before_and_after"] = [programs, captures(fleet)]
    result["finite"] = bool(torch.isfinite(losses).all())
    result["step_ms"] = statistics.median(milliseconds(lambda: fleet.step(batches[0]), 10))
    return result


def captures(fleet: Any) -> int:
    """Graphs that the fleet's engines captured so far, retired ones among them."""
    engines = [group.programs.engine for group in fleet._groups]
    return sum(getattr(engine, "num_captures", 0) for engine in engines)


def loading(name: str) -> dict[str, Any]:
    """``fit`` with a loader of several worker processes against steps on batches that are on the device."""
    import torch
    from torch.utils.data import DataLoader

    fleet, result = begun(name, lowering="inductor" if device() == "cuda" else "aten")
    batch = find(name)[2]
    on_device = [_map(lambda tensor: tensor.to(device()), batch(seed)) for seed in range(4)]
    turn: Iterator[int] = iter(range(10**9))
    for _ in range(5):
        fleet.step(on_device[next(turn) % 4])
    busy = milliseconds(lambda: fleet.step(on_device[next(turn) % 4]), 20)
    dataset = Samples(name)
    loader: Any = DataLoader(
        dataset,  # type: ignore[arg-type]
        batch_size=dataset.batch_size,
        num_workers=LOADER_WORKERS,
        pin_memory=torch.cuda.is_available(),
        shuffle=True,
        drop_last=True,
        persistent_workers=True,
    )
    fleet.fit(loader, steps=10, progress=False)  # starts the workers
    walls = []
    for _ in range(3):
        synchronize()
        marks: list[float] = []
        fleet.fit(loader, steps=LOADER_STEPS, progress=False, callbacks=[_marking(marks)])
        synchronize()
        # From the first step to the last: the workers' first batches are the loader's affair.
        walls.append((time.perf_counter() - marks[0]) / (LOADER_STEPS - 1) * 1e3)
    busy_ms, wall_ms = statistics.median(busy), statistics.median(walls)
    return result | {
        "busy_ms": busy_ms,
        "busy_blocks": busy,
        "fit_ms": wall_ms,
        "fit_blocks": walls,
        "idle": 1 - busy_ms / wall_ms,
    }


def _marking(marks: list[float]) -> Any:
    """A callback that notes when each step of a fit had been enqueued."""
    import trainmux as tm

    class Marks(tm.Callback):
        def on_step_end(self, state: Any) -> None:
            marks.append(time.perf_counter())

    return Marks()


class Samples:
    """Rows of a few made-up batches, one by one, as a dataset on disk would give them."""

    def __init__(self, name: str) -> None:
        batch = find(name)[2](0)
        self._batch = batch
        values = batch.values() if isinstance(batch, dict) else batch
        self.batch_size = len(next(iter(values)))

    def __len__(self) -> int:
        return self.batch_size * (LOADER_STEPS + 20)

    def __getitem__(self, index: int) -> Any:
        return _map(lambda tensor: tensor[index % self.batch_size], self._batch)


def bits(name: str) -> dict[str, Any]:
    """A hash of losses and weights after twenty steps in deterministic mode."""
    import torch

    precision = "bf16" if device() == "cuda" else "fp32"
    fleet = make_fleet(name, 4, deterministic=True, precision=precision)
    batch = find(name)[2]
    digest = hashlib.sha256()
    for step in range(20):
        digest.update(fleet.step(batch(step)).cpu().to(torch.float64).numpy().tobytes())
    fleet.sync()
    for member in fleet.members:
        for tensor in (*member.model.parameters(), *member.model.buffers()):
            digest.update(tensor.detach().cpu().double().contiguous().numpy().tobytes())
    return {"sha256": digest.hexdigest()}


def flat(name: str) -> dict[str, Any]:
    """Two thousand steps with replacements: what the device has taken after step 200 and at the end."""
    fleet = make_fleet(name, 4, lowering="auto" if device() == "cuda" else "aten")
    batch = find(name)[2]
    batches = [batch(seed) for seed in range(8)]
    seen = []
    for step in range(FLAT_STEPS):
        fleet.step(batches[step % 8])
        if step == 20:
            fleet.wait_until_compiled()
        if step % 50 == 49:
            fleet.replace(fleet.names[step // 50 % 4], *make_members(name, 1, 1000 + step))
        if step >= FLAT_FROM and step % 50 == 0:
            synchronize()
            seen.append(reserved().get("taken_bytes", 0))
    return {"taken_bytes": seen, "moved_bytes": max(seen) - min(seen)}


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(function, value) for value in tree)
    return function(tree)


CHECKS: dict[str, Callable[[str], dict[str, Any]]] = {
    "start": start,
    "loading": loading,
    "bits": bits,
    "flat": flat,
}


# ---- the run ---------------------------------------------------------------------------------------------


def spawn(check: str, name: str, cache: str) -> subprocess.Popen[str]:
    environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache)
    command = [sys.executable, __file__, "--check", check, "--workload", name]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate()
    try:
        found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        found = {"error": output[-3000:]}
    return found


def run(out: Path, cache: str, start_names: list[str], load_names: list[str], small: list[str]) -> None:
    results: dict[str, Any] = {
        "command": " ".join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }

    def note(key: str, value: dict[str, Any]) -> None:
        results[key] = value
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        print(
            key,
            json.dumps({k: v for k, v in value.items() if not isinstance(v, list) or len(v) < 4}),
            flush=True,
        )

    with tempfile.TemporaryDirectory() as empty:
        cache = cache or empty
        cold = {name: spawn("start", name, cache) for name in start_names}
        bits_of = {name: spawn("bits", name, cache) for name in small}
        for name, process in cold.items():
            note(f"cold start, {name}", finish(process))
        for name, process in bits_of.items():
            note(f"bits, {name}, first process", finish(process))
        bits_of = {name: spawn("bits", name, cache) for name in small}
        for name, process in bits_of.items():
            note(f"bits, {name}, second process", finish(process))
        # From here on one process at a time: clocks, and what the device has taken, are everybody's.
        for name in start_names:
            note(f"warm start, {name}", finish(spawn("start", name, cache)))
        for name in load_names:
            note(f"loading, {name}", finish(spawn("loading", name, cache)))
        for name in small[:1]:
            note(f"flat, {name}", finish(spawn("flat", name, cache)))
    results["environment"] = environment()
    out.write_text(json.dumps(results, indent=1), encoding="utf-8")


def environment() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/acceptance.json"))
    parser.add_argument("--start", default="gpt2_no_dropout,bert_base_mlm_no_dropout")
    parser.add_argument("--loading", default="bert_base_mlm_no_dropout")
    parser.add_argument("--small", default=",".join(f"small:{name}" for name in DETERMINISTIC))
    parser.add_argument(
        "--cache", default="", help="where compiled code is kept; an empty folder unless given"
    )
    parser.add_argument("--check", choices=sorted(CHECKS))
    parser.add_argument("--workload")
    parser.add_argument("--after", default="", help="with --check: begin when this file is there")
    given = parser.parse_args()
    if given.check:
        os.environ[AFTER] = given.after
        print(json.dumps(CHECKS[given.check](given.workload)))
        return
    run(
        given.out,
        given.cache,
        *(text.split(",") if text else [] for text in (given.start, given.loading, given.small)),
    )


if __name__ == "__main__":
    main()
