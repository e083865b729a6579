"""The objective of a job's task."""

from __future__ import annotations

from tllm.comm.collectives.group import Group
from tllm.parallel.mesh import Mesh
from tllm.training.job.job import Job
from tllm.training.objectives.distillation import DistillationLoss
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.objectives.objective import Objective
from tllm.training.objectives.policy_gradient import PolicyGradientLoss


def choose_objective(job: Job, mesh: Mesh, cp: Group) -> Objective:
    """What the ranks of a replica's last stage compute with. `cp`: those that share the tokens of a microbatch."""
    match job.task:
        case "sft" | "rejection":
            return NextTokenLoss(mesh)
        case "grpo":
            return PolicyGradientLoss(job, mesh, cp)
        case "distill" if job.distill is not None:
            return DistillationLoss(job.distill, mesh, cp)
    raise AssertionError(f"the task {job.task} has no objective")
