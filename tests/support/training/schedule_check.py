"""Whether lists of a pipeline schedule can be played: the rules of `spec.pipeline_schedule`, checked one by one."""

from __future__ import annotations

from collections import defaultdict

from tllm.core.errors import PlanError
from tllm.spec.pipeline_schedule import Kind, Schedule, StageTransfer, play

LIVES: tuple[tuple[Kind, ...], ...] = (("forward", "backward"), ("forward", "backward_input", "backward_weight"))
"""What may happen to one microbatch on one chunk, in this order."""


def check(schedule: Schedule) -> None:
    """Raise PlanError unless the lists can be played to their end by stages that send without waiting.

    Each microbatch passes each chunk once, forward before backward; on each link the tensors of one kind are received
    in the order they were sent (an activation and a gradient may overtake each other, so each kind wants its own wire).
    """
    if len(schedule.lists) != schedule.stages:
        raise PlanError(f"the schedule has {len(schedule.lists)} lists for {schedule.stages} stages")
    for stage in range(schedule.stages):
        _check_complete(schedule, stage)
    _check_links(schedule)
    for _ in play(schedule):
        pass


def _check_complete(schedule: Schedule, stage: int) -> None:
    lives: dict[tuple[int, int], tuple[Kind, ...]] = {
        (microbatch, chunk): () for microbatch in range(schedule.microbatches) for chunk in range(schedule.chunks)
    }
    for op in schedule.lists[stage]:
        if (op.microbatch, op.chunk) not in lives:
            raise PlanError(
                f"stage {stage} plays {op} of microbatch {op.microbatch} and chunk {op.chunk} in a schedule of "
                f"{schedule.microbatches} microbatches and {schedule.chunks} chunks"
            )
        lives[op.microbatch, op.chunk] += (op.kind,)
    for (microbatch, chunk), life in lives.items():
        if life not in LIVES:
            raise PlanError(
                f"stage {stage} does {', '.join(life) or 'nothing'} for microbatch {microbatch} on chunk {chunk}",
                "each needs forward, then backward or backward_input and backward_weight, once each",
            )


def _check_links(schedule: Schedule) -> None:
    """The n-th tensor of a kind that one stage sends to another must be the n-th that the other receives."""
    sent: dict[tuple[int, int, str], list[StageTransfer]] = defaultdict(list)
    received: dict[tuple[int, int, str], list[StageTransfer]] = defaultdict(list)
    for stage, ops in enumerate(schedule.lists):
        for op in ops:
            for hop, log in ((schedule.sends(stage, op), sent), (schedule.receives(stage, op), received)):
                if hop is not None:
                    log[hop.source.stage, hop.target.stage, hop.kind].append(hop)
    for (source, target, kind), hops in sent.items():
        for n, (ours, theirs) in enumerate(zip(hops, received[source, target, kind], strict=True)):
            if ours != theirs:
                raise PlanError(
                    f"{kind} tensor {n} from stage {source} to {target} is sent for microbatch {ours.microbatch} and "
                    f"chunk {ours.target.chunk}, and awaited for {theirs.microbatch} and {theirs.target.chunk}"
                )
