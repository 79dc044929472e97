"""Independent jobs that share one device and one memory arena (Zico)."""

from trainmux.colocate._colocation import Colocation, colocate
from trainmux.colocate._job import Job, JobCallback, JobStep
from trainmux.colocate._result import ColocationResult, JobResult, JobUsage

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
