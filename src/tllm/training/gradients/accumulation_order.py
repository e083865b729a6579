"""The order in which the gradients of a rank's microbatches are added: one after another, or as part of a fixed tree.

The tree (`deterministic`): of the M microbatches of a step, V is the largest power of two that divides M. Those of each
of V virtual shards, M / V in a row, are added one after another, and the V sums as a balanced binary tree. R ranks that
take equal parts, where R divides V, each make a subtree, and sums over ranks are balanced trees too: every R makes the
same additions. A rank keeps the sums that are not yet added as a binary counter does, so at most log2(V / R) of them
beside the one that it adds to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tllm.core.errors import PlanError, counted
from tllm.spec.plan import Plan

ShardLength = Callable[[int, int], int]
"""(microbatches of this rank, ranks) -> how many microbatches are added one after another."""


def exact_sum(numbers: Sequence[float]) -> tuple[float, float]:
    """The sum, rounded once, and what that rounding took: 106 bits, enough to be exact for losses in float32.

    The sum over ranks of both, by this function again, is then the same to the bit however the numbers were dealt.
    """
    if not all(map(math.isfinite, numbers)):
        return sum(numbers), 0.0
    total = math.fsum(numbers)
    return total, math.fsum((*numbers, -total))


class Addition(NamedTuple):
    """A gradient starts the sum at `level`, or is added to it; then the sums of levels `level` … `stop` + 1 go down.

    Each is added to the one below it, the highest first.
    """

    level: int
    starts: bool
    stop: int


def one_after_another(microbatches: int, ranks: int) -> int:
    return max(1, microbatches)


def as_tree(microbatches: int, ranks: int) -> int:
    total = microbatches * ranks
    shards = virtual_shards(total)
    assert shards % ranks == 0, "check_deterministic refuses ranks that are no subtrees"
    return total // shards


def virtual_shards(microbatches: int) -> int:
    """The largest power of two that divides the number of microbatches."""
    return microbatches & -microbatches


def addition(index: int, length: int) -> Addition:
    """Where the gradient of a rank's microbatch `index` goes, with shards of `length`."""
    shard, place = divmod(index, length)
    level = shard.bit_count()  # so many sums of whole subtrees wait
    return Addition(level, place == 0, (shard + 1).bit_count() - 1 if place == length - 1 else level)


def check_deterministic(plan: Plan, microbatches: int, tied: bool) -> None:
    """Refuse a plan whose weights would not be those of every other plan to the bit.

    `microbatches` are those of a step over all replicas; `tied`: one table is embedding and head.
    """
    shards = virtual_shards(microbatches)
    tp = max(stage.tp for stage in plan.stages)
    for name, size in (("tp", tp), ("cp", plan.cp), ("ep", plan.ep), ("servers", plan.servers + 1)):
        if size > 1:
            raise PlanError(
                f"deterministic=true with {name}={size - (name == 'servers')}: {REASONS[name]}",
                f"leave {name} out: dp, zero, pp and schedules do not change a bit",
            )
    if tied and plan.pp > 1:
        raise PlanError(
            f"deterministic=true with pp={plan.pp} and tied embeddings: the two parts of the table's gradient "
            "are added after the microbatches, on one stage before them",
            "take pp=1, or a model with tie_word_embeddings=false",
        )
    if len(set(plan.dp)) > 1:
        raise PlanError(
            f"deterministic=true with unequal shares dp={':'.join(map(str, plan.dp))}",
            "give every replica the same share",
        )
    if shards % plan.replicas:
        raise PlanError(
            f"deterministic=true with dp={plan.replicas}, which does not divide {shards}: "
            f"the largest power of two in the {counted(microbatches, 'microbatch', 'microbatches')} of a step",
            f"take dp of {_powers(shards)}, or a global batch of more microbatches",
        )


REASONS = {
    "tp": "the parts of a product are added in another order than one rank adds them",
    "cp": "attention over a part of the sequence at a time rounds otherwise than over all of it",
    "ep": "an expert takes the tokens of several microbatches at once, in products of other shapes",
    "servers": "each server adds up the squares of its own part for the norm that clips",
}


def _powers(largest: int) -> str:
    return ", ".join(str(1 << power) for power in range(largest.bit_length()))
