"""Bytes that a training rank holds for roles beside the policy that learns: sampling, a reference, a teacher.

They are there as long as the run: the KV cache of completions (`node.roles.colocated_rollouts`), the weights of a
reference model, and on rank 0 a teacher's. A batch of completions is computed when no backward pass is under way.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from tllm.planner.cost.cache_room import working_bytes
from tllm.planner.cost.rank_bytes import (
    ITEM_BYTES,
    RankBytes,
    cached_layers,
    end_bytes,
    kv_bytes,
    layer_bytes,
    state_bytes,
)
from tllm.planner.cost.rank_work import RankWork, TeacherFacts, TrainingFacts, rank_works
from tllm.planner.cost.stage_team import whole_model
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec

TEACHER_ROWS = 128
"""Tokens whose logits a teacher has in memory at once."""


class RoleMemory(NamedTuple):
    """All in bytes."""

    cache: int = 0
    """Keys and values of completions, and states of layers that have those."""
    reference: int = 0
    teacher: int = 0
    """Its weights, and one row under way."""
    sampling: int = 0
    """Workspace of a batch of completions, while nothing is learned."""


def role_memory(spec: ModelSpec, facts: TrainingFacts, work: RankWork) -> RoleMemory:
    """What a rank holds beside the policy."""
    cache, sampling = _sampling_bytes(spec, facts, work)
    is_held = facts.reference and facts.adapter is None
    weights = (parameter.nbytes(facts.item_bytes) for unit in work.parameters(spec) for parameter in unit)
    return RoleMemory(
        cache,
        math.ceil(sum(weights)) if is_held else 0,
        teacher_bytes(facts.teacher) if facts.teacher is not None and work.rank == 0 else 0,
        sampling,
    )


def teacher_bytes(teacher: TeacherFacts) -> int:
    """A whole model in its dtype, and the row that it judges, with the hidden states that it tells of it."""
    spec, item = teacher.spec, ITEM_BYTES[teacher.dtype]
    (cut,), layers = cut_stage(spec, (1,)), range(spec.num_layers)
    weights = sum(end_bytes(spec, layers, cut, item)) + sum(layer_bytes(spec, n, cut, item) for n in layers)
    whole = RankBytes(0, 0, layers, cut, 0, 0)
    working = working_bytes(spec, whole, teacher.dtype, teacher.row, TEACHER_ROWS)
    return math.ceil(weights) + working + teacher.row * teacher.told


def rollout_bytes(spec: ModelSpec, facts: TrainingFacts) -> int:
    """A whole model that samples for others: its weights, the cache, and a batch under way."""
    (work,) = rank_works(spec, whole_model(spec), replace(facts, global_batch_size=1, microbatch_size=1))
    weights = sum(parameter.nbytes(facts.item_bytes) for unit in work.parameters(spec) for parameter in unit)
    return math.ceil(weights) + sum(_sampling_bytes(spec, facts, work))


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
