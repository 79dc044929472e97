"""What copies and waits on other lanes do to the time between the kernels of a CUDA graph.

    python benchmarks/graph_gaps.py --out benchmarks/results/graph_gaps_h200.json

Each row is a graph of so many kernels one behind the other, with something beside them on two further lanes:
nothing, small kernels, copies to and from pinned memory. Of each, what a kernel takes in the mean. *sleep*
touches no memory, *scale* reads and writes some that the device's cache holds. "Waited for": compute waits
for each of them, one stretch of kernels later; where it has ended by then, only the wait itself is left.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.bench.environment import describe
from benchmarks.bench.timing import seconds_of

DEVICE = torch.device("cuda")
MIB = 1 << 20
NUM_KERNELS = 4000
NUM_SPLIT = 8
NUM_REPEATS = 5
CYCLES = 18_000
LARGEST_COPY = 64 * MIB


@dataclass(frozen=True)
class Beside:
    """What runs beside every ``every`` kernels: MiB out and in, or small kernels; whether compute waits for
    it one such stretch later."""

    name: str
    every: int = 40
    out_mib: float = 0.0
    in_mib: float = 0.0
    small_kernels: bool = False
    is_waited_for: bool = False


def variants() -> Iterator[Beside]:
    yield Beside("nothing")
    for every in (10, 40):
        share = every / 40
        yield Beside("small kernels", every, small_kernels=True)
        yield Beside("small kernels, waited for", every, small_kernels=True, is_waited_for=True)
        for is_waited_for in (False, True):
            name = "copies, waited for" if is_waited_for else "copies"
            for out, into in ((16, 0), (0, 16), (16, 16), (1, 1)):
                yield Beside(name, every, share * out, share * into, is_waited_for=is_waited_for)


class Bench:
    """Tensors, streams and kernels on one device."""

    def __init__(self) -> None:
        self._main, self._out, self._into = (torch.cuda.Stream() for _ in range(3))
        there = [torch.randint(255, (LARGEST_COPY,), dtype=torch.uint8, device="cuda") for _ in range(2)]
        host = [tensor.cpu().pin_memory() for tensor in there]
        self._pairs = {self._out: (host[0], there[0]), self._into: (there[1], host[1])}
        self._cached = torch.randn(MIB, device="cuda")
        self._small = {stream: torch.zeros(1, device="cuda") for stream in self._pairs}

    def kernel(self, kind: str) -> None:
        if kind == "sleep":
            torch.cuda._sleep(CYCLES)
        else:
            self._cached.mul_(1.0001)

    def run(self, kind: str, num_kernels: int, beside: Beside) -> None:
        main = torch.cuda.current_stream()
        ends: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        sizes = {self._out: beside.out_mib, self._into: beside.in_mib}
        for number in range(num_kernels):
            self.kernel(kind)
            if number % beside.every != beside.every - 1:
                continue
            for stream, size in sizes.items():
                if not size and not beside.small_kernels:
                    continue
                if beside.is_waited_for and stream in ends:
                    main.wait_event(ends[stream])
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    if beside.small_kernels:
                        self._small[stream].add_(1)
                    else:
                        target, source = self._pairs[stream]
                        count = int(size * MIB)
                        target[:count].copy_(source[:count], non_blocking=True)
                ends[stream] = stream.record_event()
        for stream in ends:
            main.wait_stream(stream)

    def capture(self, kind: str, num_kernels: int, beside: Beside) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._main, capture_error_mode="thread_local"):
            self.run(kind, num_kernels, beside)
        return graph

    def microseconds(self, kind: str, beside: Beside) -> float:
        """Of a kernel, in one graph of all."""
        return microseconds_of([self.capture(kind, NUM_KERNELS, beside)])

    def microseconds_split(self, kind: str) -> float:
        """The same in several graphs, with nothing beside them."""
        nothing = Beside("nothing")
        return microseconds_of(
            [self.capture(kind, NUM_KERNELS // NUM_SPLIT, nothing) for _ in range(NUM_SPLIT)]
        )


def microseconds_of(graphs: Sequence[torch.cuda.CUDAGraph]) -> float:
    """Of a kernel: the median of a few replays, after one that warms up."""

    def replay() -> None:
        for graph in graphs:
            graph.replay()

    replay()
    return statistics.median(seconds_of(replay, DEVICE) for _ in range(NUM_REPEATS)) / NUM_KERNELS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="where the results go, as JSON")
    options = parser.parse_args()
    bench, rows = Bench(), []
    for kind in ("sleep", "scale"):
        alone = bench.microseconds(kind, Beside("nothing"))
        rows.append(
            {"kernel": kind, "beside": f"nothing, {NUM_SPLIT} graphs", "us": bench.microseconds_split(kind)}
        )
        for beside in variants():
            taken = bench.microseconds(kind, beside)
            rows.append(
                {"kernel": kind, "beside": beside.name, **vars(beside), "us": taken, "more_us": taken - alone}
            )
            print(
                f"{kind:6} beside {beside.name:26} every {beside.every:3} kernels "
                f"({beside.out_mib:g} MiB out, {beside.in_mib:g} in): {taken:.3f} us, {taken - alone:+.3f}",
                flush=True,
            )
    if options.out is not None:
        document = {
            "command": "python benchmarks/graph_gaps.py",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "environment": describe("cuda"),
            "num_kernels": NUM_KERNELS,
            "rows": rows,
        }
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
