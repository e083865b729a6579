"""Seconds that roles beside the policy take of a training step: sampling completions, the reference, a teacher.

Completions are sampled by an engine over the ranks of each replica, which is timed as one that serves is
(`simulate.serving`): each prompt is computed once for its group, and then as many completions as have room are decoded
at once, in waves. Replicas wait for the slowest. A reference is one forward pass of the rows that are learned. A
teacher beside the student computes on the device of rank 0, which it takes from the student.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.cache_room import PAGE_SIZE
from tllm.planner.cost.flops import BACKWARD
from tllm.planner.cost.rank_work import TeacherFacts, TrainingFacts, deal_microbatches
from tllm.planner.cost.serving_load import ExpectedBatch, SamplingFacts, ServingFacts
from tllm.planner.cost.stage_team import StageTeam, single_stage_plan
from tllm.planner.simulate.serving import predict_serving, ring_seconds
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

Roles = Mapping[str, float]
"""Seconds of a step, on an average over the steps, by role: "sampling", "reference", "teacher"."""


def role_seconds(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, cluster: Cluster, devices: Sequence[int], passes: float
) -> Roles:
    """Those roles that a job has. `passes`: seconds of the step's forward and backward passes.

    A teacher is left out whose dtype was not measured.
    """
    found, serving = dict[str, float](), cluster.as_serving()
    sampling = facts.sampling
    if sampling is not None and sampling.share:
        found["sampling"] = sampling.share * sampling_seconds(spec, plan, facts, serving, devices)
    if facts.reference:
        share = 1.0 if sampling is None else sampling.share
        again = (plan.recompute == "layer") + facts.value_pass
        found["reference"] = share * passes / (1 + BACKWARD + again)
    if facts.teacher is not None and serving.devices[devices[0]].knows(facts.teacher.dtype):
        found["teacher"] = teacher_seconds(facts.teacher, serving, devices[0])
    return found


def sampling_seconds(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, cluster: Cluster, devices: Sequence[int]
) -> float:
    """Until every replica has its completions of one step. `cluster` has the devices' speeds when they serve.

    PlanError for a plan that cannot sample.
    """
    sampling = facts.sampling
    assert sampling is not None, "asked of a job that samples"
    if plan.chunks > 1 or plan.cp > 1:
        raise PlanError(f"the plan {plan} samples nothing: a completion's ring passes each stage once", "leave cp out")
    ring, kinds = Plan(plan.stages, plan.experts), dict[object, float]()
    for replica, count in enumerate(deal_microbatches(sampling.groups, plan.dp)):
        own = devices[replica * plan.replica_size :][: plan.replica_size]
        key = (count, cluster.pattern(own))
        if key not in kinds:
            kinds[key] = _replica_seconds(spec, ring, cluster, own, sampling, count, facts.dtype)
    return max(kinds.values())


def teacher_seconds(teacher: TeacherFacts, cluster: Cluster, device: int) -> float:
    """The rows of a step on one device, which computes nothing else meanwhile."""
    layers = range(teacher.spec.num_layers)
    facts = ServingFacts(teacher.dtype, teacher.row, 1)
    team = StageTeam(teacher.spec, cluster, (device,), single_stage_plan((1,), len(layers), "cut"), 0, facts)
    row = ExpectedBatch(teacher.row, 1, (teacher.row + 1) / 2, teacher.row)
    return teacher.tokens / teacher.row * team.batch_time(layers, row).seconds


def _replica_seconds(
    spec: ModelSpec,
    ring: Plan,
    cluster: Cluster,
    devices: Sequence[int],
    sampling: SamplingFacts,
    groups: int,
    dtype: str,
) -> float:
    """One replica's completions of so many groups."""
    if not groups:
        return 0.0
    if sampling.one_by_one and groups > 1:
        return groups * _replica_seconds(spec, ring, cluster, devices, sampling, 1, dtype)
    facts = ServingFacts(dtype, sampling.prompt, sampling.completion)
    waves, rest = divmod(groups * sampling.num_generations, sampling.at_once)
    seconds, prompts = 0.0, 0.0
    for count, at_once in ((waves, sampling.at_once), (1, rest)):
        if not count or not at_once:
            continue
        wave = predict_serving(spec, ring, cluster, devices, replace(facts, concurrency=at_once))
        seconds += count * (sampling.completion - 1) * wave.per_token
        if not prompts:
            chunk = ring_seconds([(stage.prefill, stage.prefill_hop) for stage in wave.stages])
            prompts = wave.load.prompt_seconds(*chunk, requests=groups * computed_prompts(sampling))
    return seconds + prompts


def computed_prompts(sampling: SamplingFacts) -> float:
    """Of a group: one whole prompt, and of each further completion what lies beyond the last full page before its end,
    as only full pages are found again (`engine.schedule.prefix_cache`)."""
    beyond = sampling.prompt - (sampling.prompt - 1) // PAGE_SIZE * PAGE_SIZE
    return 1 + (sampling.num_generations - 1) * beyond / sampling.prompt
