"""Seconds that the roles beside the policy take of a training step: sampling, rewards, the reference, a teacher.

Completions are sampled by an engine over the ranks of each replica, which is timed as one that serves is
(`simulate.serving`): each prompt is computed once for its group, and then as many completions as have room are decoded
at once, in waves. Replicas wait for the slowest. Devices that sample and do not train get the weights first, and then
a share of the prompts each. A reference is one forward pass of the rows that are learned. A
teacher beside the student computes on the device of rank 0, which it takes from the student; so does a reward model
that no other device computes, while all ranks wait for the scores of the completions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush, heapreplace
from itertools import pairwise
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.cache_room import PAGE_SIZE
from tllm.planner.cost.flops import attention_flops, forward_flops, layer_flops, training_flops
from tllm.planner.cost.message_time import transfer_after_compute
from tllm.planner.cost.rank_work import (
    JudgeFacts,
    TrainingFacts,
    deal_microbatches,
    forward_only_layers,
    rank_works,
)
from tllm.planner.cost.serving_load import ExpectedBatch, SamplingFacts, ServingFacts
from tllm.planner.cost.stage_team import whole_model
from tllm.planner.cost.tensor_parallel.grid_team import stage_teams
from tllm.planner.simulate.serving import predict_serving
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

Roles = Mapping[str, float]
"""Seconds of a step, on an average over the steps, by role: "sampling", "rewards", "reference", "teacher"."""


Answering = Callable[[int], float]
"""answer(device): seconds that one of its answers travels"""


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

    A teacher or a reward model is left out whose dtype was not measured.
    """
    found, serving = dict[str, float](), cluster.as_serving()
    sampling = facts.sampling
    if sampling is not None and sampling.share and not sampling.servers:
        found["sampling"] = sampling.share * sampling_seconds(spec, plan, facts, serving, devices)
    if facts.reward is not None and sampling is not None:
        reward = facts.reward if facts.reward.devices else replace(facts.reward.whole, devices=tuple(devices[:1]))
        if all(serving.devices[device].knows(reward.dtype) for device in reward.devices):
            found["rewards"] = sampling.share * dealt_seconds(reward, serving, reward.devices)
    if facts.reference:
        share = 1.0 if sampling is None else sampling.share
        found["reference"] = share * learning.passes * _forward_share(spec, plan, facts.in_ring(plan.cp))
    if facts.teacher is not None and serving.devices[devices[0]].knows(facts.teacher.dtype):
        found["teacher"] = dealt_seconds(facts.teacher.whole, serving, devices[:1])
    if sampling is not None and sampling.share and sampling.servers:
        apart = rollout_seconds(spec, plan, facts, serving, devices)
        hidden = learning.seconds + sum(found.values()) if sampling.ahead else 0.0
        waited = sampling.share * apart.gathered + max(0.0, sampling.share * apart.served - hidden)
        found = {"sampling": waited, **found}
    return found


def _forward_share(spec: ModelSpec, plan: Plan, facts: TrainingFacts) -> float:
    """Of the flops of all passes that learn, those of one forward pass."""
    (whole,) = cut_stage(spec, (1,))
    forward = forward_flops(spec, facts.lengths, facts.predicted, facts.before)
    is_frozen, below = facts.adapter is not None, forward_only_layers(spec, facts)
    passes = training_flops(spec, facts.lengths, facts.predicted, is_frozen, facts.before, below)
    if plan.recompute != "none":
        again = layer_flops if plan.recompute == "layer" else attention_flops
        passes += round(sum(again(spec, one, whole, facts.lengths, facts.before) for one in spec.layers[below:]))
    return forward / (passes + facts.value_pass * forward)


def sampling_seconds(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, cluster: Cluster, devices: Sequence[int]
) -> float:
    """Until every replica has its completions of one step. `cluster` has the devices' speeds when they serve.

    PlanError for a plan that cannot sample.
    """
    sampling = facts.sampling
    assert sampling is not None, "asked of a job that samples"
    if plan.chunks > 1 or plan.cp > 1:
        raise PlanError(
            f"the plan {plan} samples nothing: a completion's ring passes each stage once", "leave chunks and cp out"
        )
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
    the others of its replica, and from there to each server over the one port that it has; of several that have one
    model to the first, which sends the others their parts."""
    sampling = facts.sampling
    assert sampling is not None and sampling.servers, "asked of a job whose completions servers sample"
    (work,) = rank_works(spec, whole_model(spec), replace(facts, global_batch_size=1, microbatch_size=1))
    nbytes = sum(one.nbytes(facts.learned_bytes) for unit in work.learned(spec) for one in unit)
    first, *others = devices[: plan.replica_size]
    part = nbytes / plan.replica_size
    gathered = sum(part / cluster.link(other, first).rate(part) for other in others)
    sent = 0.0
    for server, *others in sampling.teams:
        part = nbytes / (1 + len(others))
        sent += nbytes / cluster.link(first, server).rate(nbytes)
        sent += sum(part / cluster.link(server, other).rate(part) for other in others)
    return RolloutSeconds(gathered, sent + _served_seconds(spec, facts, cluster, sampling))


def group_seconds(spec: ModelSpec, facts: TrainingFacts, cluster: Cluster, groups: int, *devices: int) -> float:
    """The devices of one model, which do not train, sample the completions of so many prompts."""
    sampling = facts.sampling
    assert sampling is not None, "asked of a job that samples"
    return _replica_seconds(spec, sampling.plan or whole_model(spec), cluster, devices, sampling, groups, facts.dtype)


def _served_seconds(spec: ModelSpec, facts: TrainingFacts, cluster: Cluster, sampling: SamplingFacts) -> float:
    """Prompts go out as `training.rollout_servers` asks them: about one question a server, to whichever is free."""
    teams = sampling.teams
    most = max(1, sampling.at_once // sampling.num_generations)
    each = min(most, -(-sampling.groups // len(teams)))
    known = dict[tuple[object, int], float]()

    def seconds(team: tuple[int, ...], groups: int) -> float:
        key = cluster.pattern(team), groups
        if key not in known:
            known[key] = group_seconds(spec, facts, cluster, groups, *team)
        return known[key]

    free = [(0.0, team) for team in teams]
    for at in range(0, sampling.groups, each):
        now, team = heappop(free)
        heappush(free, (now + seconds(team, min(each, sampling.groups - at)), team))
    return max(end for end, _ in free)


def row_seconds(judge: JudgeFacts, cluster: Cluster, *devices: int) -> float:
    """One row on the devices of one model, which compute nothing else meanwhile: stage after stage."""
    spec, plan = judge.spec, judge.plan or whole_model(judge.spec)
    facts = ServingFacts(judge.dtype, judge.row, 1)
    row = ExpectedBatch(judge.row, 1, (judge.row + 1) / 2, judge.answered)
    teams = stage_teams(spec, plan, cluster, devices, facts)
    seconds = 0.0
    for team, layers in zip(teams, plan.runs, strict=True):
        seconds += team.batch_time(layers, row).seconds
    for here, there in pairwise(teams):
        hop = judge.row * spec.widest_hop * facts.item_bytes
        seconds += transfer_after_compute(hop, cluster.link(here.devices[0], there.devices[0])).seconds
    return seconds


def dealt_seconds(
    judge: JudgeFacts, cluster: Cluster, devices: Sequence[int], answer: Answering | None = None
) -> float:
    """Until all rows of a step are judged, each by those who are free first and have a model together. Answers travel
    while the next row is computed."""
    rows, size = -(-judge.tokens // judge.row), judge.size
    teams = [devices[at : at + size] for at in range(0, len(devices), size)]
    each = [max(row_seconds(judge, cluster, *team), answer(team[0]) if answer else 0.0) for team in teams]
    ends, last = [(seconds, seconds) for seconds in each], 0.0
    heapify(ends)
    for _ in range(rows):
        end, seconds = ends[0]
        last = max(last, end)
        heapreplace(ends, (end + seconds, seconds))
    return last


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
            prompts = wave.load.prompt_seconds(*wave.chunk, requests=groups * computed_prompts(sampling))
    return seconds + prompts


def computed_prompts(sampling: SamplingFacts) -> float:
    """Of a group: one whole prompt, and of each further completion what lies beyond the last full page before its end,
    as only full pages are found again (`engine.schedule.prefix_cache`)."""
    beyond = sampling.prompt - (sampling.prompt - 1) // PAGE_SIZE * PAGE_SIZE
    return 1 + (sampling.num_generations - 1) * beyond / sampling.prompt
