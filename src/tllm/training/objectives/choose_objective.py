"""The objective of a job's task."""

from __future__ import annotations

from tllm.comm.collectives.group import Group
from tllm.parallel.mesh import Mesh
from tllm.training.job.job import Job
from tllm.training.job.preference_tables import DPOConfig, KTOConfig, ORPOConfig, RewardConfig, SimPOConfig
from tllm.training.objectives.distillation import DistillationLoss
from tllm.training.objectives.hidden_state_loss import HiddenStateLoss
from tllm.training.objectives.kto_loss import KTOLoss
from tllm.training.objectives.next_token import NextTokenLoss
from tllm.training.objectives.objective import Objective
from tllm.training.objectives.pair_losses import DPOPairs, ORPOPairs, SimPOPairs
from tllm.training.objectives.policy_gradient import PolicyGradientLoss
from tllm.training.objectives.preference_loss import PreferenceLoss
from tllm.training.objectives.reply_log_probs import ReplyLogProbs
from tllm.training.objectives.reward_loss import RewardLoss


def choose_objective(
    job: Job, mesh: Mesh, cp: Group, batch_invariant: bool = False, of_states: HiddenStateLoss | None = None
) -> Objective:
    """What the ranks of a replica's last stage compute with. `cp`: those that share the tokens of a microbatch.

    `batch_invariant`: so are the model's products. `of_states`: what is learned of hidden states beside it.
    """
    match job.task:
        case "sft" | "rejection":
            return NextTokenLoss(mesh)
        case "grpo":
            return PolicyGradientLoss(job, mesh, cp, batch_invariant)
        case "distill" if job.distill is not None:
            return DistillationLoss(job.distill, mesh, cp, of_states)
        case "dpo":
            dpo = job.dpo or DPOConfig()
            return PreferenceLoss(ReplyLogProbs(mesh, cp, dpo.ld_alpha), DPOPairs(dpo))
        case "kto":
            return KTOLoss(job.kto or KTOConfig(), ReplyLogProbs(mesh, cp))
        case "orpo":
            return PreferenceLoss(ReplyLogProbs(mesh, cp), ORPOPairs(job.orpo or ORPOConfig()))
        case "simpo":
            return PreferenceLoss(ReplyLogProbs(mesh, cp), SimPOPairs(job.simpo or SimPOConfig()))
        case "reward":
            return RewardLoss(job.reward or RewardConfig(), mesh, cp)
    raise AssertionError(f"the task {job.task} has no objective")
