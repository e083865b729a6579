"""How gradients are summed: in buckets, from the last parameter to the first, as `train.gradients.bucket_layout`
lays them out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tllm.planner.cost.rank_bytes import Parameter
from tllm.planner.cost.rank_work import RankWork, TrainingFacts
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

LINE = 16
"""Elements: parameters begin and ranges are cut at multiples of it."""

ROOM_BYTES = 32 * 2**20
"""Of a sum (`comm.collectives.group`)."""


class Bucket(NamedTuple):
    """A bucket: its part of all gradients, and of the last backward pass what is done when it is full."""

    part: float
    done: float


def padded_elements(one: Parameter) -> int:
    """Elements of a parameter's room in its bucket."""
    return -(-one.elements // LINE) * LINE


def bucket_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """Of buckets of about `limit` of what `sizes` count, a parameter each, in the order in which they are full."""
    found, now = [], 0
    for size in reversed(sizes):
        now += size
        if now >= limit:
            found.append(now)
            now = 0
    return found + ([now] if now else [])


def fill_order(sizes: Sequence[int], limit: int) -> list[Bucket]:
    """Buckets, where a pass takes time in proportion to what they hold."""
    whole, found = sum(sizes), bucket_sizes(sizes, limit)
    return [Bucket(size / whole, done / whole) for size, done in zip(found, accumulate(found), strict=True)]


def received(message: int, ranks: int) -> int:
    """All of the message from one other rank; of more, a piece from each."""
    return message if ranks == 2 else message * (ranks - 1) // ranks


def receive_bytes(buckets: Sequence[int], ranks: int, cut: bool = False) -> int:
    """Bytes into which these are received, one after the other, and what is left of the room before the last.

    A bucket comes in even parts of `ROOM_BYTES` at the most; a longer part needs a room of its own, while the one
    before it is of no more use. With `cut` a rank sums its own range of a bucket alone.
    """
    if ranks == 1:
        return 0
    kept = before = 0
    for size in buckets:
        part = -(-size // -(-size // ROOM_BYTES))
        room = part * (ranks - 1) // ranks if cut else received(part, ranks)
        if room > kept:
            kept, before = room, kept
    return kept + before


def exposed_seconds(buckets: Sequence[Bucket], sums: float, backward: float) -> float:
    """Seconds by which the sums of all buckets, one after the other, end later than the pass that fills them."""
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.done * backward) + bucket.part * sums
    return max(0.0, end - backward)


def buckets_of(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork, spread: bool) -> list[int]:
    """Bytes of those of experts that are spread over replicas, or of all others, in the order in which they are full.

    A table that another stage has too comes last, by itself.
    """
    units, last = work.parameters(spec), list[Parameter]()
    if shares_table(spec, plan, work):
        at = 0 if work.runs[0].start == 0 else -1
        *units[at], table = units[at]
        last = [table]
    if plan.zero != 3:
        units = [[one for unit in units for one in unit]]
    sizes = [
        [padded_elements(one) * facts.full_precision_bytes for one in unit if one.spread == spread]
        for unit in (last, *units)
    ]
    return [size for unit in reversed(sizes) for size in bucket_sizes(unit, facts.bucket_bytes)]


def shares_table(spec: ModelSpec, plan: Plan, work: RankWork) -> bool:
    """Whether this rank holds a tied table that a rank of another stage holds too."""
    first, last = work.runs[0].start == 0, work.runs[-1].stop == spec.num_layers
    return spec.tied and plan.pp > 1 and first != last
