"""`colocate`, by which users put jobs side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainmux.colocate._colocation import Colocation
from trainmux.colocate._constants import ScroogeConstants
from trainmux.colocate._user_job import Job, JobCallback


def colocate(
    jobs: Sequence[Job],
    budget: int | str | None = None,
    *,
    tracking_bytes: int | None = None,
    region_bytes: int | None = None,
    constants: ScroogeConstants | None = None,
    callbacks: Sequence[JobCallback] = (),
    profiles: str | os.PathLike[str] | None = None,
    poisons: bool = False,
) -> Colocation:
    """Put jobs side by side on one device, never past ``budget`` bytes; ``run()`` trains them.

    ``budget`` is in bytes, or text such as "24GiB" or "70%"; ``None`` is all that is free. A job's
    iteration is cut into segments wherever ``tracking_bytes`` of feature maps have been allocated or
    released: 8 MB on a CPU, and on a CUDA device as much as keeps segments from being shorter than their
    launch. Memory changes hands in regions of ``region_bytes``: on a CUDA device 64 MB, or less where one of
    ``jobs`` would have only a few; single tensors on a CPU. ``callbacks`` see every iteration of every job.
    What is learned of a job's times is kept in the folder ``profiles``, where one is named; a job like it, in
    regions of the same size, needs no iteration to itself then, on this device and with this torch. (Eager
    jobs do.) ``constants`` are the scheduler's; ``poisons`` fills freed memory with NaN, for tests.

    Everything is traced, and on a CUDA device compiled, here. Refused with a typed error: no jobs, two of one
    name or one fleet, jobs on several devices, a job that trainmux cannot train; with `BudgetError`, which
    has the smallest workable budget: jobs that do not fit even in turns.
    """
    return Colocation(
        list(jobs),
        budget,
        tracking_bytes=tracking_bytes,
        region_bytes=region_bytes,
        constants=constants,
        callbacks=callbacks,
        profiles=profiles,
        poisons=poisons,
    )
