"""Which `Learner` a job and a plan ask for."""

from __future__ import annotations

from tllm.spec.plan import Plan
from tllm.train.job.job import Job
from tllm.train.parameter_server.learner import ParameterServerLearner
from tllm.train.sync.diloco import DiLoCoLearner
from tllm.train.sync.learner import SynchronousLearner


def learner_of(job: Job, plan: Plan) -> type[SynchronousLearner] | type[DiLoCoLearner] | type[ParameterServerLearner]:
    """How the replicas learn together."""
    if plan.servers:
        return ParameterServerLearner
    return DiLoCoLearner if job.local_steps > 1 else SynchronousLearner
