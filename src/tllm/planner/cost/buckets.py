"""How gradients are all-reduced: in buckets, last parameter first, as `training.gradients.bucket_layout` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from tllm.planner.cost.rank_bytes import Parameter
from tllm.planner.cost.rank_work import RankWork, TrainingFacts
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

LINE = 16
"""Elements: in a bucket parameters begin, and ranges are cut, at multiples of it."""

ROOM_BYTES = 32 * 2**20
"""Bytes that an all-reduce receives into at most (`comm.collectives.group`)."""


class Bucket(NamedTuple):
    """A bucket as a backward pass fills it."""

    part: float
    """Its share of all gradients."""
    done: float
    """The share of the backward pass that is over when it is full."""


def padded_elements(parameter: Parameter) -> int:
    """Elements that a parameter takes in its bucket."""
    return -(-parameter.elements // LINE) * LINE


def range_elements(parameter: Parameter, work: RankWork) -> int:
    """Elements of a rank's range of a parameter that ZeRO divides over the ranks that share it, as evenly as
    possible."""
    return -(-padded_elements(parameter) // (work.expert_replicas if parameter.spread else work.replicas))


def bucket_sizes(sizes: Sequence[int], limit: int) -> list[int]:
    """The sizes of buckets that hold parameters of these `sizes`, in the order in which they are full.

    A bucket is full as soon as it has `limit` or more; a parameter is never divided.
    """
    buckets, filled = [], 0
    for size in reversed(sizes):
        filled += size
        if filled >= limit:
            buckets.append(filled)
            filled = 0
    return buckets + ([filled] if filled else [])


def fill_order(sizes: Sequence[int], limit: int) -> list[Bucket]:
    """Buckets in the order in which they are full, if a pass takes time in proportion to what they hold."""
    whole, buckets = sum(sizes), bucket_sizes(sizes, limit)
    return [Bucket(size / whole, done / whole) for size, done in zip(buckets, accumulate(buckets), strict=True)]


def received(message: int, ranks: int) -> int:
    """Bytes that a rank receives of a message that is all-reduced: all of it from one other rank, or of more a piece
    from each."""
    return message if ranks == 2 else message * (ranks - 1) // ranks


def receive_bytes(buckets: Sequence[int], ranks: int, cut: bool = False) -> int:
    """Bytes of the receive buffers for these buckets, which are all-reduced one after the other.

    A bucket comes in equal parts of `ROOM_BYTES` at most. A longer part needs a larger buffer, and the heap keeps the
    one before it, which is of no more use. With `cut` (ZeRO) a rank sums only its own range of a bucket."""
    if ranks == 1:
        return 0
    largest = previous = 0
    for size in buckets:
        part = -(-size // -(-size // ROOM_BYTES))
        buffer = part * (ranks - 1) // ranks if cut else received(part, ranks)
        if buffer > largest:
            largest, previous = buffer, largest
    return largest + previous


def exposed_seconds(buckets: Sequence[Bucket], all_reduces: float, backward: float) -> float:
    """Seconds by which the all-reduces of all buckets, one after the other, end later than the pass that fills them.

    `all_reduces`: seconds of all of them together; `backward`: seconds of the pass.
    """
    end = 0.0
    for bucket in buckets:
        end = max(end, bucket.done * backward) + bucket.part * all_reduces
    return max(0.0, end - backward)


def buckets_of(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork, spread: bool) -> list[int]:
    """Bytes of a rank's buckets in the order in which they are full: those of experts that are divided over replicas
    (`spread`), or those of all other parameters. A table that another stage holds too comes last, by itself."""
    units, shared = work.learned(spec), list[Parameter]()
    if shares_table(spec, plan, work):
        at = 0 if work.begins_model else -1
        *units[at], table = units[at]
        shared = [table]
    if plan.zero != 3:
        units = [[parameter for unit in units for parameter in unit]]
    sizes = [
        [padded_elements(parameter) * facts.full_precision_bytes for parameter in unit if parameter.spread == spread]
        for unit in (shared, *units)
    ]
    return [size for unit in reversed(sizes) for size in bucket_sizes(unit, facts.bucket_bytes)]


def shares_table(spec: ModelSpec, plan: Plan, work: RankWork) -> bool:
    """Whether this rank learns a tied table that a rank of another stage learns too."""
    return spec.tied and plan.pp > 1 and work.begins_model != work.ends_model(spec) and work.adapter is None
