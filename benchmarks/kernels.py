"""Where the time of a step goes, kernel by kernel, for one workload trained in several ways.

    python benchmarks/kernels.py dlrm --ways trainmux,compiled_vmap_graph --width 8 --out kernels.json

Each way trains in a process of its own, as in ``trainmux bench step``; torch's profiler watches some steps
after it has warmed up. Times are microseconds of one step of all members.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

NUM_WARM = 12
NUM_WATCHED = 5
NUM_SHOWN = 16
NAME_LENGTH = 96


def watch(workload: str, way: str, width: int, device: str) -> dict[str, Any]:
    """Train, warm up, and add up the kernels of some steps by name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from trainmux.cli.bench.cases import find_case
    from trainmux.cli.bench.job import Job
    from trainmux.cli.bench.measure import make_setup
    from trainmux.cli.bench.ways import eager, fused, stacked

    prepare = {
        "trainmux": fused.prepare,
        "eager": eager.prepare,
        "eager_vmap": stacked.prepare_eager,
        "compiled_vmap_graph": stacked.prepare_captured,
    }[way]
    torch.backends.cudnn.benchmark = True
    batch_size = find_case(workload).batch_sizes[0]
    job = Job(workload, batch_size, width, way, device, 1, 0.1, "")
    setup, batches = make_setup(job, width, torch.device(device))
    prepared = prepare(setup)
    for number in range(NUM_WARM):
        prepared.step(batches[number % len(batches)])
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as seen:
        for number in range(NUM_WATCHED):
            prepared.step(batches[number % len(batches)])
        if device == "cuda":
            torch.cuda.synchronize()
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in seen.events() or ():
        taken = event.device_time_total if device == "cuda" else event.self_cpu_time_total
        sums[event.name][0] += 1
        sums[event.name][1] += taken
    kernels = [
        {"name": name[:NAME_LENGTH], "calls": calls / NUM_WATCHED, "us": us / NUM_WATCHED}
        for name, (calls, us) in sums.items()
    ]
    kernels.sort(key=lambda kernel: -kernel["us"])
    return {"way": way, "total_us": sum(kernel["us"] for kernel in kernels), "kernels": kernels}


def show(found: dict[str, Any]) -> None:
    print(f"\n{found['way']}: {found['total_us']:.0f} us in {len(found['kernels'])} kinds of kernels")
    for kernel in found["kernels"][:NUM_SHOWN]:
        print(f"  {kernel['us']:9.1f} us  {kernel['calls']:6.1f}x  {kernel['name']}")


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("workload")
    parser.add_argument("--ways", default="trainmux,compiled_vmap_graph")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/kernels.json"))
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        found = watch(options.workload, options.ways, options.width, options.device)
        options.one.write_text(json.dumps(found))
        return
    result: dict[str, Any] = {
        "workload": options.workload,
        "width": options.width,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "ways": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory() as folder:
            one = Path(folder) / "found.json"
            command = [sys.executable, __file__, options.workload, "--ways", way, "--one", str(one)]
            command += ["--width", str(options.width), "--device", options.device]
            if subprocess.run(command, check=False).returncode != 0:
                print(f"{way}: failed")
                continue
            found = json.loads(one.read_text())
        show(found)
        result["ways"].append(found)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
