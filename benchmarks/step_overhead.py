"""Host time of a step of 64 MLPs in this source tree and in another one, in turns, in one run.

    python benchmarks/step_overhead.py --other PATH/TO/OTHER/src --out FILE

Each turn is a process of its own: it builds the fleet, trains until steps run compiled, then times blocks of
steps. ``host_us`` is how long ``fleet.step`` keeps the host, ``step_us`` a step with the device's work;
``look_us`` what a look at all members for changes takes, which happens every 100 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OWN = Path(__file__).resolve().parent.parent / "src"


def measure(device: str, members: int, blocks: int, block_steps: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F
    from torch import nn

    import trainmux as tm

    def make(number: int) -> tm.Member:
        torch.manual_seed(number)
        layers = [nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4 * (number + 1))
        return tm.Member(model, optimizer, name=str(number))

    def loss(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1])

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    batch = (torch.randn(128, 784, device=device), torch.randint(0, 10, (128,), device=device))
    fleet = tm.Fleet(
        [make(number) for number in range(members)],
        loss,
        batch,
        device=device,
        precision="bf16" if device == "cuda" else "fp32",
    )
    for _ in range(20):
        fleet.step(batch)
    fleet.wait_until_compiled()
    for _ in range(block_steps):
        fleet.step(batch)
    host, whole = [], []
    for _ in range(blocks):
        wait()
        begin = time.perf_counter()
        for _ in range(block_steps):
            fleet.step(batch)
        enqueued = time.perf_counter()
        wait()
        host.append((enqueued - begin) / block_steps * 1e6)
        whole.append((time.perf_counter() - begin) / block_steps * 1e6)
    found: dict[str, Any] = {"host_us": min(host), "step_us": statistics.median(whole)}
    watch = getattr(fleet, "_watch", None)
    if watch is not None:
        looks = []
        for _ in range(50):
            watch.handed_out()
            begin = time.perf_counter()
            watch.at_step(fleet._groups)
            looks.append((time.perf_counter() - begin) * 1e6)
        found["look_us"] = statistics.median(looks)
    found["torch"] = torch.__version__
    found["device"] = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--other", type=Path, help="the src folder to compare with")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--block-steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.device, given.members, given.blocks, given.block_steps)))
        return
    sources = {"this": OWN} | ({"other": given.other.resolve()} if given.other else {})
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in sources}
    options = [f"--{key.replace('_', '-')}={getattr(given, key)}" for key in ("device", "members", "blocks")]
    for _ in range(given.rounds):
        for name, source in sources.items():
            command = [sys.executable, __file__, "--one", *options, f"--block-steps={given.block_steps}"]
            environment = {**os.environ, "PYTHONPATH": str(source)}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            rows[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, rows[name][-1], flush=True)
    medians = {
        name: {
            key: statistics.median(row[key] for row in found if key in row) for key in ("host_us", "step_us")
        }
        for name, found in rows.items()
    }
    result: dict[str, Any] = {
        "command": "python benchmarks/step_overhead.py " + " ".join(options),
        "date": time.strftime("%Y-%m-%d"),
        "medians": medians,
        "rows": rows,
    }
    looks = [row["look_us"] for row in rows["this"] if "look_us" in row]
    result["look_share_of_step"] = statistics.median(looks) / 100 / medians["this"]["step_us"]
    if "other" in medians:
        result["ratio"] = {key: medians["this"][key] / medians["other"][key] for key in medians["this"]}
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=2))
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
