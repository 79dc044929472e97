"""What copies and waits for them cost a planned step: the same plan captured again with less of them.

    python benchmarks/planned.py gpt2_no_dropout --ask folder
    python benchmarks/planned.py gpt2_no_dropout --shares 1/10 --policies auto --answer folder
    python benchmarks/planned_less.py gpt2_no_dropout --plans folder --shares 1/10 --out planned_less.json

Each row is a plan as it is, with copies of a few bytes, with compute that waits for none of them, or both.
What such a step computes is wrong from the first one on; its time is what is looked at, and the gaps between
its kernels by torch's profiler.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from planned import Bench
from planned_ahead import read_answer
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bench.environment import describe
from trainmux.engine._lanes import StreamLanes
from trainmux.ir import Lane

AS_IS, FEW_BYTES, NO_WAITS, NEITHER = "as it is", "copies of 256 bytes", "no waits of compute", "neither"


class _Few(TorchDispatchMode):
    """Copies the first 256 elements."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            into, source, *rest = args
            func(into.view(-1)[:256], source.view(-1)[:256], *rest, **(kwargs or {}))
            return into
        return func(*args, **(kwargs or {}))


@contextmanager
def less(way: str) -> Iterator[None]:
    """Lanes on which there is less to copy, or compute waits for nothing."""
    on, wait = StreamLanes.on, StreamLanes.wait

    @contextmanager
    def few_on(self: StreamLanes, lane: Lane, position: int) -> Iterator[None]:
        with on(self, lane, position):
            if lane is Lane.COMPUTE:
                yield
            else:
                with _Few():
                    yield

    def no_wait(self: StreamLanes, lane: Lane, position: int) -> None:
        if lane is not Lane.COMPUTE:
            wait(self, lane, position)

    with ExitStack() as changed:
        if way in (FEW_BYTES, NEITHER):
            changed.enter_context(patch.object(StreamLanes, "on", few_on))
        if way in (NO_WAITS, NEITHER):
            changed.enter_context(patch.object(StreamLanes, "wait", no_wait))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("workload")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--plans", type=Path, required=True, help="a folder of planned.py's")
    parser.add_argument("--shares", default="1/10")
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    options = parser.parse_args()
    bench = Bench(options.workload, options.members, "cuda", "bf16")
    rows: list[dict[str, Any]] = []
    for share in options.shares.split(","):
        plan, said = read_answer(options.plans, share, "auto")
        if plan is None:
            print(share, said["error"])
            continue
        for way in (AS_IS, FEW_BYTES, NO_WAITS, NEITHER):
            with less(way):
                bench.fleet.use(None)
                bench.fleet.step(bench.batches[0])
                bench.fleet.use(plan)  # and captured anew
                measured = bench.measure()
            row = {"share": share, "way": way, "predicted_ms": plan.step_seconds * 1e3, **measured}
            rows.append({**row, "replayed": bench.trace()})
            print(
                f"{share:>10} {way:22} {row['step_ms']:.2f} ms, predicted {row['predicted_ms']:.2f}",
                flush=True,
            )
    if options.out is not None:
        document = {
            "command": "python benchmarks/planned_less.py " + " ".join(sys.argv[1:]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": describe("cuda"),
            "rows": rows,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
