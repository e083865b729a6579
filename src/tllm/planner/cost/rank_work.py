"""`RankWork`: what one rank of a training plan holds and computes, in plain numbers; what costs are worked out from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise

from tllm.core.errors import PlanError
from tllm.planner.cost.activations import Microbatch
from tllm.planner.cost.rank_bytes import ITEM_BYTES, Parameter, run_parameters
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.pipeline_schedule import Depth, Schedule, build
from tllm.spec.plan import Coordinates, Plan

BUCKET_BYTES = 16 * 1024 * 1024
"""Of gradient, that are summed in one message."""


@dataclass(frozen=True)
class TrainingFacts:
    """What of a job decides its cost: rows of `seq_len` tokens, `global_batch_size` of them a step.

    `states`: tensors of the optimizer as large as the weights. `documents`: the lengths of those in one row, when they
    are known; left out, one fills it. `target_tokens`: how many of a row's tokens are learned; left out, all. Copies of the
    state go to another rank's memory every `mirror_steps` steps, 0 never. `deterministic`: gradients are added as one
    tree (`train.gradients.accumulation_order`). `local`: replicas learn on their own between outer steps
    (`train.sync.diloco`). `residual`: each
    replica keeps what its sums did not send (`train.gradients.error_feedback`). `late`: a sum is applied a step late.
    """

    seq_len: int
    global_batch_size: int
    microbatch_size: int = 1
    dtype: str = "float32"
    states: int = 2
    documents: tuple[int, ...] = ()
    target_tokens: int | None = None
    bucket_bytes: int = BUCKET_BYTES
    mirror_steps: int = 0
    deterministic: bool = False
    local: bool = False
    residual: bool = False
    late: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise PlanError(f"dtype {self.dtype!r} is not known", "known: " + ", ".join(ITEM_BYTES))
        for name in ("seq_len", "global_batch_size", "microbatch_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", f"give {name} of 1 or more")

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of weights and activations."""
        return ITEM_BYTES[self.dtype]

    @property
    def master_bytes(self) -> int:
        """Bytes of a number of gradients, states and updated weights."""
        return max(self.item_bytes, 4)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The documents of one microbatch."""
        return (self.documents or (self.seq_len,)) * self.microbatch_size

    @property
    def microbatches(self) -> int:
        """Of a step, over all replicas; the last may be smaller and counts as whole."""
        return -(-self.global_batch_size // self.microbatch_size)


@dataclass(frozen=True)
class RankWork:
    """A rank that computes. `runs` are the layers of its chunks, `microbatches` those of its replica in one step.

    `replicas` and `expert_replicas` are how many ranks its gradients are summed over.
    """

    rank: int
    at: Coordinates
    cut: Cut
    runs: tuple[range, ...]
    batch: Microbatch
    microbatches: int
    tp: int
    replicas: int
    expert_replicas: int

    def parameters(self, spec: ModelSpec) -> list[list[Parameter]]:
        """Unit by unit."""
        replica = self.at.replica
        units = chain.from_iterable(run_parameters(spec, run, self.cut, replica) for run in self.runs)
        return [unit for unit in units if unit]


def rank_works(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, replicas: Sequence[int] | None = None
) -> list[RankWork]:
    """Every rank of a plan that computes, in order, or those of some replicas that stand for all.

    PlanError where the plan does not fit the model.
    """
    plan.check(spec.num_layers)
    cuts = [cut_stage(spec, stage.shares, plan.experts, plan.ep) for stage in plan.stages[: plan.pp]]
    shares = deal_microbatches(facts.microbatches, plan.dp)
    ranks = []
    some = range(plan.replicas) if replicas is None else replicas
    for rank in (replica * plan.replica_size + place for replica in some for place in range(plan.replica_size)):
        at = plan.coordinates(rank)
        tp = plan.stages[at.stage].tp
        ranks.append(
            RankWork(
                rank,
                at,
                cuts[at.stage][at.tp],
                tuple(plan.runs[chunk * plan.pp + at.stage] for chunk in range(plan.chunks)),
                _batch(plan, facts, at, tp),
                shares[at.replica],
                tp,
                plan.replicas * plan.cp,
                plan.replicas // plan.ep * plan.cp,
            )
        )
    return ranks


def schedule_of(plan: Plan, microbatches: int) -> Schedule:
    """What the stages of a replica play over its microbatches of a step, one or more."""
    return cached_schedule(plan.schedule, plan.pp, microbatches, plan.depth, plan.chunks)


@lru_cache(64)
def cached_schedule(name: str, stages: int, microbatches: int, depth: Depth, chunks: int) -> Schedule:
    """Each rank asks for its stage's list of the same schedule."""
    return build(name, stages, microbatches, depth, chunks)


def deal_microbatches(count: int, shares: tuple[int, ...]) -> list[int]:
    """How many of `count` microbatches each replica takes, in proportion to its share."""
    whole = sum(shares)
    bounds = [count * taken // whole for taken in (0, *accumulate(shares))]
    return [stop - start for start, stop in pairwise(bounds)]


def _batch(plan: Plan, facts: TrainingFacts, at: Coordinates, tp: int) -> Microbatch:
    whole = sum(facts.lengths)
    tokens = sum(stop - start for start, stop in zigzag_spans(whole, plan.cp)[at.cp])
    rows = tokens * (at.tp + 1) // tp - tokens * at.tp // tp if plan.sequence else tokens
    of_row = facts.seq_len if facts.target_tokens is None else facts.target_tokens
    predicted = min(tokens, -(-of_row * facts.microbatch_size * tokens // whole))
    return Microbatch(facts.lengths, tokens, rows, predicted, facts.item_bytes, plan.cp > 1)


def zigzag_spans(tokens: int, ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """The tokens of a microbatch that each cp rank has: pieces r and 2 n - 1 - r of 2 n."""
    pieces = list(pairwise(tokens * i // (2 * ranks) for i in range(2 * ranks + 1)))
    return [tuple((a, b) for a, b in (pieces[r], pieces[-1 - r]) if a < b) for r in range(ranks)]
