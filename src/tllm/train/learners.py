"""Which `Learner` a job and a plan ask for."""

from __future__ import annotations

from tllm.spec.plan import Plan
from tllm.train.job import Job
from tllm.train.learner import Synchronous
from tllm.train.local_learner import Local
from tllm.train.served_learner import Served


def learner_of(job: Job, plan: Plan) -> type[Synchronous] | type[Local] | type[Served]:
    """How the replicas learn together."""
    if plan.servers:
        return Served
    return Local if job.local_steps > 1 else Synchronous
