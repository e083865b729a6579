"""Seconds that roles beside the policy take of a training step: sampling completions, the reference, a teacher.

Completions are sampled by an engine over the ranks of each replica, which is timed as one that serves is
(`simulate.serving`): each prompt is computed once for its group, and then as many completions as have room are decoded
at once, in waves. Replicas wait for the slowest. Devices that sample and do not train get the weights first, and then
a share of the prompts each. A reference is one forward pass of the rows that are learned. A
teacher beside the student computes on the device of rank 0, which it takes from the student.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.cache_room import PAGE_SIZE
from tllm.planner.cost.flops import BACKWARD
from tllm.planner.cost.rank_work import TeacherFacts, TrainingFacts, deal_microbatches, rank_works
from tllm.planner.cost.serving_load import ExpectedBatch, SamplingFacts, ServingFacts
from tllm.planner.cost.stage_team import StageTeam, single_stage_plan, whole_model
from tllm.planner.simulate.serving import predict_serving, ring_seconds
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

Roles = Mapping[str, float]
"""Seconds of a step, on an average over the steps, by role: "sampling", "reference", "teacher"."""


class Learning(NamedTuple):
    """What is learned takes of a step, in seconds: all of it, and its forward and backward `passes`."""

    seconds: float
    passes: float


class RolloutSeconds(NamedTuple):
    """What completions of servers take: until rank 0 has `gathered` the weights, while no rank learns; and until they
    are `served`, with the weights' way there, while ranks may learn (`max_staleness`)."""

    gathered: float
    served: float


def role_seconds(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, cluster: Cluster, devices: Sequence[int], learning: Learning
) -> Roles:
    """Those roles that a job has; of sampling what the ranks wait for it.

    A teacher is left out whose dtype was not measured.
    """
    found, serving = dict[str, float](), cluster.as_serving()
    sampling = facts.sampling
    if sampling is not None and sampling.share and not sampling.servers:
        found["sampling"] = sampling.share * sampling_seconds(spec, plan, facts, serving, devices)
    if facts.reference:
        share = 1.0 if sampling is None else sampling.share
        again = (plan.recompute == "layer") + facts.value_pass
        found["reference"] = share * learning.passes / (1 + BACKWARD + again)
    if facts.teacher is not None and serving.devices[devices[0]].knows(facts.teacher.dtype):
        found["teacher"] = teacher_seconds(facts.teacher, serving, devices[0])
    if sampling is not None and sampling.share and sampling.servers:
        apart = rollout_seconds(spec, plan, facts, serving, devices)
        hidden = learning.seconds + sum(found.values()) if sampling.ahead else 0.0
        waited = sampling.share * apart.gathered + max(0.0, sampling.share * apart.served - hidden)
        found = {"sampling": waited, **found}
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


def rollout_seconds(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, cluster: Cluster, devices: Sequence[int]
) -> RolloutSeconds:
    """Of the completions of one step, with the weights' way to the servers, all of which have changed: to rank 0 from
    the others of its replica, and from there to each server over the one port that it has."""
    sampling = facts.sampling
    assert sampling is not None and sampling.servers, "asked of a job whose completions servers sample"
    (work,) = rank_works(spec, whole_model(spec), replace(facts, global_batch_size=1, microbatch_size=1))
    nbytes = sum(one.nbytes(facts.learned_bytes) for unit in work.learned(spec) for one in unit)
    first, *others = devices[: plan.replica_size]
    part = nbytes / plan.replica_size
    gathered = sum(part / cluster.link(other, first).rate(part) for other in others)
    sent = sum(nbytes / cluster.link(first, server).rate(nbytes) for server in sampling.servers)
    return RolloutSeconds(gathered, sent + _served_seconds(spec, facts, cluster, sampling))


def group_seconds(spec: ModelSpec, facts: TrainingFacts, cluster: Cluster, device: int, groups: int) -> float:
    """One device alone samples the completions of so many prompts."""
    assert facts.sampling is not None, "asked of a job that samples"
    return _replica_seconds(spec, whole_model(spec), cluster, (device,), facts.sampling, groups, facts.dtype)


def _served_seconds(spec: ModelSpec, facts: TrainingFacts, cluster: Cluster, sampling: SamplingFacts) -> float:
    """Prompts go out as `training.rollout_servers` asks them: about one question a server, to whichever is free."""
    servers = sampling.servers
    most = max(1, sampling.at_once // sampling.num_generations)
    each = min(most, -(-sampling.groups // len(servers)))
    known = dict[tuple[object, int], float]()

    def seconds(server: int, groups: int) -> float:
        key = cluster.devices[server], groups
        if key not in known:
            known[key] = group_seconds(spec, facts, cluster, server, groups)
        return known[key]

    free = [(0.0, server) for server in servers]
    for at in range(0, sampling.groups, each):
        now, server = heappop(free)
        heappush(free, (now + seconds(server, min(each, sampling.groups - at)), server))
    return max(end for end, _ in free)


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
