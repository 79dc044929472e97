"""Records made up for tests of what is done with records."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bench.job import Measurement, Memory
from benchmarks.bench.record import Record
from benchmarks.bench.timing import Blocks, summarize

DEVICE = "Some GPU"


def record(
    way: str,
    block_seconds: Sequence[float] | None,
    *,
    workload: str = "vit_b16",
    width: int = 2,
    error: str = "OutOfMemoryError: too <big> | far",
    device: str = DEVICE,
) -> Record:
    """``block_seconds`` are those of one step of ``width`` members; without them, the way failed."""
    measurement = None
    if block_seconds is not None:
        blocks = Blocks(tuple(block_seconds), steps_per_block=7, num_warmup_steps=4)
        measurement = Measurement(
            num_parameters=1234,
            timing=summarize(blocks, width, build_s=3.0, start_to_first_step_s=5.0),
            memory=Memory(2**30, 2**29, 2**31),
            first_losses=(1.0, 1.0),
            last_losses=(0.5, 0.5),
            notes=("done differently",),
        )
    return Record(
        workload=workload,
        batch_size=32,
        width=width,
        way=way,
        command="trainmux bench step --workloads vit_b16",
        date="2026-11-15T07:00:00+00:00",
        settings={"fleet": {"engine": "reference"}},
        environment={
            "device": device,
            "python": "3.12.3",
            "torch": "2.11.0+cu130",
            "cuda": "13.0",
            "cudnn": None,
            "driver": "580.159.04",
            "packages": {"transformers": "5.17.0"},
            "system": "Linux",
            "num_cores": 16,
            "num_threads": 16,
            "commit": "0123456789abcdef",
            "dirty": True,
            "source_sha256": "feedbeef",
        },
        measurement=measurement,
        error=error if measurement is None else None,
        warnings=("TrainmuxWarning: runs node by node", "UserWarning: of no interest"),
    )
