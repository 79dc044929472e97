"""Independent jobs that share one device and one memory arena (Zico)."""

from trainmux.colocate._colocation import Colocation, colocate
from trainmux.colocate._job import ColocationResult, Job, JobResult, JobStep, JobUsage
