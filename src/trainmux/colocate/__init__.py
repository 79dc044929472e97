"""Independent jobs that share one device and one memory arena (Zico)."""

from trainmux.colocate._colocation import Colocation, colocate
from trainmux.colocate._job import ColocationResult, Job, JobCallback, JobResult, JobStep, JobUsage

__all__ = [
    "Colocation",
    "ColocationResult",
    "Job",
    "JobCallback",
    "JobResult",
    "JobStep",
    "JobUsage",
    "colocate",
]
