"""Bytes that a training rank holds for roles beside the policy: sampling, a reference, a teacher, a reward model.

They are held for the whole run: the KV cache of completions (`node.roles.colocated_rollouts`), the weights of a
reference model, and on rank 0 those of a teacher and of a reward model. A batch of completions is computed when no
backward pass is under way.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from tllm.planner.cost.cache_room import working_bytes
from tllm.planner.cost.rank_bytes import (
    RankBytes,
    cached_layers,
    kv_bytes,
    rank_bytes,
    state_bytes,
)
from tllm.planner.cost.rank_work import JudgeFacts, RankWork, TrainingFacts, rank_works
from tllm.planner.cost.stage_team import whole_model
from tllm.spec.model_spec import ModelSpec

LOGITS_AT_ONCE = 128
"""Tokens whose logits a teacher has in memory at once."""

LOGITS_COPIES = 4
"""Of these logits in float32, at most, of all tokens also where ranks have made parts of them: as they are, over the
temperature, their exponentials, and those beside the likeliest (`kl_budget`)."""


class RoleMemory(NamedTuple):
    """All in bytes."""

    cache: int = 0
    """Keys and values of completions, and states of layers that have those."""
    reference: int = 0
    teacher: int = 0
    """Its weights, and one row under way."""
    reward: int = 0
    """The same of a reward model."""
    sampling: int = 0
    """Workspace of a batch of completions, while nothing is learned."""


def role_memory(spec: ModelSpec, facts: TrainingFacts, work: RankWork) -> RoleMemory:
    """What a rank holds beside the policy."""
    cache, sampling = _sampling_bytes(spec, facts, work)
    is_held = facts.reference and facts.adapter is None
    return RoleMemory(
        cache,
        _weight_bytes(spec, facts, work) if is_held else 0,
        _beside_rank_0(facts.teacher, work),
        _beside_rank_0(facts.reward, work),
        sampling,
    )


def _beside_rank_0(judge: JudgeFacts | None, work: RankWork) -> int:
    return judge_bytes(judge.whole) if judge is not None and not judge.devices and work.rank == 0 else 0


def judge_bytes(judge: JudgeFacts) -> int:
    """The most that one device holds."""
    return max(judge_parts(judge))


def judge_parts(judge: JudgeFacts) -> tuple[int, ...]:
    """What the devices of one model hold, in their order: each its part in its dtype, and the row that it judges, with
    the hidden states that it tells of it."""
    spec, told, logits = judge.spec, judge.row * judge.told, 0
    if not spec.num_labels:
        logits = LOGITS_COPIES * 4 * min(judge.row, LOGITS_AT_ONCE) * spec.vocab_size

    def held(rank: RankBytes) -> int:
        ends = rank.layers.stop == spec.num_layers
        return rank.weights + working_bytes(spec, rank, judge.dtype, judge.row, 1) + told + ends * logits

    return tuple(map(held, rank_bytes(spec, judge.plan or whole_model(spec), judge.dtype)))


def rollout_bytes(spec: ModelSpec, facts: TrainingFacts) -> int:
    """The most that one device holds that samples and does not train."""
    return max(rollout_parts(spec, facts))


def rollout_parts(spec: ModelSpec, facts: TrainingFacts) -> tuple[int, ...]:
    """What the devices of one model that samples for others hold, in their order: each its part of the weights and of
    the cache, and a batch under way."""
    assert facts.sampling is not None, "asked of a job that samples"
    plan = facts.sampling.plan or whole_model(spec)

    def held(work: RankWork) -> int:
        return _weight_bytes(spec, facts, work) + sum(_sampling_bytes(spec, facts, work))

    return tuple(map(held, rank_works(spec, plan, replace(facts, global_batch_size=1, microbatch_size=1))))


def _weight_bytes(spec: ModelSpec, facts: TrainingFacts, work: RankWork) -> int:
    """Of the model's weights on a rank, in the job's dtype."""
    return math.ceil(sum(one.nbytes(facts.item_bytes) for unit in work.parameters(spec) for one in unit))


def _sampling_bytes(spec: ModelSpec, facts: TrainingFacts, work: RankWork) -> tuple[int, int]:
    """The cache, and a batch under way; nothing where others sample. Plans that sample have one run of layers on each
    rank."""
    sampling = facts.sampling
    if sampling is None or sampling.servers:
        return 0, 0
    cache = working = 0
    for run in work.runs:
        layers = (spec.layers[number] for number in cached_layers(spec, run))
        per_token = sum(kv_bytes(spec, layer, work.cut, facts.item_bytes, "auto") for layer in layers)
        states = sampling.at_once * state_bytes(spec, run, work.cut, facts.item_bytes)
        cache += per_token * sampling.cached_tokens + states
        rank = RankBytes(work.rank, work.at.stage, run, work.cut, 0, per_token)
        batch = working_bytes(spec, rank, facts.dtype, sampling.batch_tokens, sampling.at_once)
        working = max(working, batch - states)
    return cache, working
