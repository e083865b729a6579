"""What is said in each role, and what opens its model, or a rank's part of one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tllm.cluster.messages import TakeRole
from tllm.devices.choose import CPU, compute_on
from tllm.node.roles.rollout_model import RolloutModel
from tllm.spec.families import spec_from_config
from tllm.spec.process_groups import RoleName
from tllm.training.questions.question_server import Answerer
from tllm.training.questions.run_connection import Conversation
from tllm.training.reward_models.reward_messages import SCORING
from tllm.training.reward_models.reward_model import RewardModel
from tllm.training.rollout_servers.rollout_messages import SAMPLING
from tllm.training.step.frozen_model import FrozenModel
from tllm.training.step.rank_groups import Groups
from tllm.training.teachers.teacher_messages import TEACHING
from tllm.training.teachers.teacher_model import TeacherModel
from tllm.weights.byte_source import ByteSource
from tllm.weights.load import Progress

OpenAnswerer = Callable[[TakeRole, ByteSource | None, torch.device, Groups, Progress | None], Answerer[Any, Any, Any]]
"""open(what is asked of this node, weights that it can read, where it computes, its groups, who hears of progress)"""


def _teacher(
    order: TakeRole, weights: ByteSource | None, device: torch.device, groups: Groups, progress: Progress | None
) -> TeacherModel:
    return TeacherModel(order.model, _part(order, weights, groups, progress), order.vocabulary)


def _reward_model(
    order: TakeRole, weights: ByteSource | None, device: torch.device, groups: Groups, progress: Progress | None
) -> RewardModel:
    return RewardModel(order.model, _part(order, weights, groups, progress))


def _part(order: TakeRole, weights: ByteSource | None, groups: Groups, progress: Progress | None) -> FrozenModel:
    assert weights is not None, "no run sends them"
    compute_on(CPU)
    return FrozenModel.load(json.loads(order.config), weights, order.dtype, order.plan, order.rank, groups, progress)


def _rollout_model(
    order: TakeRole, weights: ByteSource | None, device: torch.device, groups: Groups, progress: Progress | None
) -> RolloutModel:
    """With the weights that can be read here, which it does when a run comes: the run sends what it lacks, but for
    those beside an adapter."""
    config = json.loads(order.config)
    spec, place = spec_from_config(config), (order.plan, order.rank, groups)
    return RolloutModel(order.model, config, spec, order.vocabulary, weights, None, device, *place)


ANSWERERS: Mapping[RoleName, tuple[Conversation[Any, Any, Any], OpenAnswerer]] = {
    "teacher": (TEACHING, _teacher),
    "rollout": (SAMPLING, _rollout_model),
    "reward": (SCORING, _reward_model),
}
