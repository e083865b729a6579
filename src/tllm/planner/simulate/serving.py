"""What serving takes under a plan: time to first token, seconds per token, memory, bytes sent.

`concurrency` requests come at once, each with a prompt, and each is given a reply. A stage computes a batch in the time
of its products, of reading its weights once and its keys and values, and of two all-reduces in each layer over its
ranks (`cost.stage_team`). As many batches are in flight as there are stages, so a decode step takes

    max(sum over stages of (batch + hop), batches in flight x the slowest stage or wire)   seconds.

Prompts go round in chunks, as `engine.schedule.scheduler` cuts them, which follow one another through the stages.
Where draft tokens are allowed, a step checks as many as give the most tokens per second (`load.draft_tokens`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.message_time import TimeBreakdown, transfer_after_compute
from tllm.planner.cost.messages.collective_bytes import all_reduce
from tllm.planner.cost.serving_load import ExpectedBatch, RingSeconds, ServingFacts, ServingLoad, loads
from tllm.planner.cost.stage_team import TOKEN_ID, ServingMemory, StageTeam
from tllm.planner.cost.tensor_parallel.grid_team import stage_teams
from tllm.planner.cost.tensor_parallel.serving_traffic import StageSums
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


@dataclass(frozen=True)
class StageCost:
    """One stage's time for a chunk of prompts and for a batch of a decode step, and the hop that follows each.

    The hop of the last stage takes token ids back to the first.
    """

    prefill: TimeBreakdown
    decode: TimeBreakdown
    prefill_hop: TimeBreakdown
    decode_hop: TimeBreakdown


@dataclass(frozen=True)
class RingTurn:
    """Batches that follow one another through all stages, and the seconds from the first to the last."""

    batches: int
    stages: tuple[tuple[TimeBreakdown, TimeBreakdown], ...]
    """One batch on each stage, and the hop after it."""
    seconds: float


@dataclass(frozen=True)
class ServingPrediction:
    """What a plan is predicted to do under one load."""

    seconds: float
    """From the moment at which all requests come to the last token of all."""
    first_token: float
    """Mean seconds from then to a request's first token."""
    per_token: float
    """Mean seconds from one token of a request to the next; a decode step may give several."""
    tokens_per_second: float
    """Tokens of all replies, divided by `seconds`."""
    load: ServingLoad
    stages: tuple[StageCost, ...]
    memory: tuple[ServingMemory, ...]
    """Of each rank."""

    @property
    def chunk(self) -> RingSeconds:
        """One chunk of prompts."""
        return ring_seconds([(stage.prefill, stage.prefill_hop) for stage in self.stages])

    @property
    def step_seconds(self) -> float:
        """Seconds of a decode step of all batches in flight."""
        return self.per_token * self.load.tokens_per_step

    @property
    def between_tokens(self) -> float | None:
        """`per_token`; None where replies have one token or prompts are pooled, and nothing follows."""
        return self.per_token if self.load.facts.reply > 1 else None

    @property
    def turn(self) -> RingTurn:
        """A decode step; all prompts, where replies have one token or prompts are pooled, and no such step follows."""
        if self.load.facts.reply > 1:
            steps = tuple((stage.decode, stage.decode_hop) for stage in self.stages)
            return RingTurn(self.load.batches, steps, self.step_seconds)
        prompts = tuple((stage.prefill, stage.prefill_hop) for stage in self.stages)
        return RingTurn(self.load.chunks, prompts, self.load.prompt_seconds(*self.chunk))

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they compute nothing, in a turn."""
        turn = self.turn
        busy = sum(turn.batches * batch.seconds for batch, _ in turn.stages)
        return max(0.0, 1 - busy / (len(turn.stages) * turn.seconds)) if turn.seconds else 0.0

    def shown(self, facts: ServingFacts) -> dict[str, Any]:
        """What is shown beside measurements while a plan serves; `per_token` is None where nothing follows the first
        token, `stages` are the seconds of each stage for a batch of replies, and the last three say for which requests
        (`facts`) all of it was predicted."""
        return {
            "first_token": self.first_token,
            "per_token": self.between_tokens,
            "tokens_per_second": self.tokens_per_second,
            "stages": [stage.decode.seconds for stage in self.stages],
            "prompt": facts.prompt,
            "reply": facts.reply,
            "concurrency": facts.concurrency,
        }


def predict_serving(
    spec: ModelSpec, plan: Plan, cluster: Cluster, devices: Sequence[int], facts: ServingFacts
) -> ServingPrediction:
    """`devices[rank]` is where a rank runs. Raises PlanError where the plan cannot be cut or needs another number."""
    plan.check(spec.num_layers)
    plan.check_serving()
    if len(devices) != plan.world_size:
        raise PlanError(f"the plan has {plan.world_size} ranks and {len(devices)} devices are given")
    teams = stage_teams(spec, plan, cluster, devices, facts)
    predictions = (_under(load, plan, teams) for load in loads(plan.pp, facts))
    return min(predictions, key=lambda prediction: prediction.seconds)


def _under(load: ServingLoad, plan: Plan, teams: Sequence[StageTeam]) -> ServingPrediction:
    """What a plan's teams do under one load."""
    facts, spec, cluster = load.facts, teams[0].spec, teams[0].cluster
    stages = []
    for index, team in enumerate(teams):
        following = teams[(index + 1) % len(teams)]
        layers = plan.runs[index]
        prefill, decode = (team.batch_time(layers, batch) for batch in (load.prefill, load.decode))
        ends, closes = (team.devices[0], following.devices[0]), index + 1 == len(teams)
        prefill_hop, decode_hop = (
            hop_time(spec, cluster, facts.message_bytes, *ends, batch, closes) for batch in (load.prefill, load.decode)
        )
        stages.append(StageCost(prefill, decode, prefill_hop, decode_hop))
    prefill_ring = ring_seconds([(stage.prefill, stage.prefill_hop) for stage in stages])
    decode_ring = ring_seconds([(stage.decode, stage.decode_hop) for stage in stages])
    mean_requests = (facts.concurrency + 1) / 2  # whose prompts are computed when a request gets its first token
    seconds = load.total_seconds(prefill_ring, decode_ring)
    return ServingPrediction(
        seconds,
        load.prompt_seconds(*prefill_ring, mean_requests),
        load.seconds_per_token(*decode_ring),
        facts.concurrency * facts.reply / seconds,
        load,
        tuple(stages),
        tuple(memory for index, team in enumerate(teams) for memory in team.memory(plan.runs[index])),
    )


def ring_seconds(stages: Sequence[tuple[TimeBreakdown, TimeBreakdown]]) -> RingSeconds:
    """Seconds of one batch through a ring whose stages each take (batch, hop)."""
    total = sum(batch.seconds + hop.seconds for batch, hop in stages)
    return RingSeconds(total, max(max(batch.seconds, hop.sending) for batch, hop in stages))


def hop_time(
    spec: ModelSpec,
    cluster: Cluster,
    item_bytes: float,
    source: int,
    target: int,
    batch: ExpectedBatch,
    closes: bool,
) -> TimeBreakdown:
    """From the device that leads a stage to the one that leads the next: the batch's hidden states.

    The hop that `closes` the ring goes from the last stage to the first and carries token ids; a stage alone sends
    nothing. The sender comes from computing and the receiver has to wake up: the overhead of that is the one measured
    in a ring, or that of an all-reduce where none was measured.
    """
    if source == target:
        return TimeBreakdown()
    size = TOKEN_ID * batch.rows if closes else batch.tokens * spec.widest_hop * item_bytes
    return transfer_after_compute(size, cluster.link(source, target).for_hops)


def hop_bytes(spec: ModelSpec, facts: ServingFacts) -> int:
    """Bytes that one token takes from stage to stage, at most."""
    return round(spec.widest_hop * facts.message_bytes)


def all_reduce_bytes(spec: ModelSpec, plan: Plan, index: int, facts: ServingFacts) -> int:
    """Bytes that each rank of a stage sends for one token, in the hidden states that its layers all-reduce; those on a
    grid in the mean, in all that it sums."""
    stage, shape = plan.stages[index], plan.grid_of(index)
    layers = spec.layers[stage.start : stage.stop]
    if shape is None:
        count = sum(layer.hidden_sums for layer in layers)
        whole = count * all_reduce(spec.hidden_size, facts.item_bytes, 0, stage.tp)
        return round(whole * facts.message_bytes / facts.item_bytes) if stage.tp > 1 else 0
    sums = StageSums(spec, shape, stage.tp)
    sent = sum(one.sent(facts.item_bytes).bytes for layer in layers for one in sums.of_layer(layer, 1))
    return round(sent / stage.tp * facts.message_bytes / facts.item_bytes)
