"""What serving takes under a plan on given devices: time to first token, milliseconds per token, memory, bytes sent.

`concurrency` requests come at once, each with a prompt, and each is given a reply. A stage computes a batch in the time
of its products, of reading its weights once and its keys and values, and of two sums in each layer over its ranks.
As many batches are in flight as there are stages, so a turn round the ring takes

    max(sum over stages of (batch + hop), batches x the slowest stage or wire)

Prompts go round in chunks, as `engine.schedule.scheduler` cuts them, which follow one another through the stages.
Where tokens
may be drafted, a turn checks as many as give the most tokens a second (`load.drafted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.collective_bytes import all_reduce
from tllm.planner.cost.message_time import TimeBreakdown, transfer_after_compute
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts, ServingLoad, loads
from tllm.planner.cost.stage_team import TOKEN_ID, ServingMemory, StageTeam
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan, Stage


@dataclass(frozen=True)
class StageCost:
    """One stage: its two kinds of batch, and the hop that follows (of the last stage: token ids to the first)."""

    prefill: TimeBreakdown
    decode: TimeBreakdown
    prefill_hop: TimeBreakdown
    decode_hop: TimeBreakdown


@dataclass(frozen=True)
class ServingPrediction:
    """`seconds`: of all requests, from their coming at once to the last token; the others per request.

    `first_token`: on an average over the requests; `per_token`: of the tokens that follow it, of which a turn may give
    several.
    """

    seconds: float
    first_token: float
    per_token: float
    tokens_per_second: float
    load: ServingLoad
    stages: tuple[StageCost, ...]
    memory: tuple[ServingMemory, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds of a turn round the ring."""
        return self.per_token * self.load.tokens_per_step

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they compute nothing, while replies are made."""
        busy = sum(self.load.batches * stage.decode.seconds for stage in self.stages)
        return max(0.0, 1 - busy / (len(self.stages) * self.step_seconds)) if self.step_seconds else 0.0


def predict_serving(
    spec: ModelSpec, plan: Plan, cluster: Cluster, devices: Sequence[int], facts: ServingFacts
) -> ServingPrediction:
    """`devices[rank]` is where a rank runs. PlanError where the plan cannot be cut or has another number of ranks."""
    plan.check(spec.num_layers)
    plan.check_serving()
    if len(devices) != plan.world_size:
        raise PlanError(f"the plan has {plan.world_size} ranks and {len(devices)} devices are given")
    teams = [StageTeam(spec, cluster, [devices[r] for r in plan.ranks(i)], plan, i, facts) for i in range(plan.pp)]
    return min((_with(plan, teams, load) for load in loads(plan.pp, facts)), key=lambda one: one.seconds)


def _with(plan: Plan, teams: Sequence[StageTeam], load: ServingLoad) -> ServingPrediction:
    """What a plan's teams take under one load."""
    facts, spec, cluster = load.facts, teams[0].spec, teams[0].cluster
    stages = []
    for index, team in enumerate(teams):
        after = teams[(index + 1) % len(teams)]
        layers = plan.runs[index]
        prefill, decode = (team.batch_time(layers, batch) for batch in (load.prefill, load.decode))
        ends, closes = (team.devices[0], after.devices[0]), index + 1 == len(teams)
        hops = [
            hop_time(spec, cluster, facts.message_bytes, *ends, batch, closes) for batch in (load.prefill, load.decode)
        ]
        stages.append(StageCost(prefill, decode, *hops))
    of_prefill, of_decode = (
        ring_seconds([(getattr(one, kind), getattr(one, f"{kind}_hop")) for one in stages])
        for kind in ("prefill", "decode")
    )
    mean = (facts.concurrency + 1) / 2
    seconds = load.total_seconds(of_prefill, of_decode)
    return ServingPrediction(
        seconds,
        load.prompt_seconds(*of_prefill, mean),
        load.seconds_per_token(*of_decode),
        facts.concurrency * facts.reply / seconds,
        load,
        tuple(stages),
        tuple(one for index, team in enumerate(teams) for one in team.memory(plan.runs[index])),
    )


def ring_seconds(stages: Sequence[tuple[TimeBreakdown, TimeBreakdown]]) -> tuple[float, float]:
    """(total, slowest) of a ring's (batch, hop), stage by stage."""
    total = sum(batch.seconds + hop_time.seconds for batch, hop_time in stages)
    return total, max(max(batch.seconds, hop_time.sending) for batch, hop_time in stages)


def hop_time(
    spec: ModelSpec,
    cluster: Cluster,
    item: float,
    here: int,
    there: int,
    batch: ExpectedBatch,
    closes: bool,
) -> TimeBreakdown:
    """From the leader of a stage, a device, to the next one's: the hidden state, which that tells its others
    (`StageTeam`).

    What `closes` the ring goes from the last stage to the first, and is token ids; a stage alone sends none. Who sends
    comes from computing and who takes it wakes up: what is lost was measured in a ring, or is as when ranks meet.
    """
    if here == there:
        return TimeBreakdown()
    size = TOKEN_ID * batch.rows if closes else batch.tokens * spec.hidden_size * item
    link = cluster.link(here, there)
    return transfer_after_compute(size, link.with_sync_overhead(link.hop_overhead))


def hop_bytes(spec: ModelSpec, facts: ServingFacts) -> int:
    """Of one token from stage to stage."""
    return round(spec.hidden_size * facts.message_bytes)


def all_reduce_bytes(spec: ModelSpec, stage: Stage, facts: ServingFacts) -> int:
    """That each rank of a stage sends for one token, in two sums of each of its layers."""
    whole = 2 * (stage.stop - stage.start) * all_reduce(spec.hidden_size, facts.item_bytes, 0, stage.tp)
    return round(whole * facts.message_bytes / facts.item_bytes) if stage.tp > 1 else 0
